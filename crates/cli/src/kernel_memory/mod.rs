//! The page tables of a process by node and level, found in the memory of the kernel.
//!
//! No file of the kernel tells them. Root may read the memory of the kernel (`/proc/kcore`), whose
//! layout the kernel describes itself (BTF): from its list of processes a walk leads to the highest
//! page table of a process and from there to all others. It only reads, takes no lock, and stops
//! nobody. Addresses of the kernel leave this module neither as results nor in messages, because
//! they are a secret that protects the kernel.
//!
//! Only x86-64 is known: entries of page tables differ by architecture.

mod btf;
mod core;
mod nodes;
mod tables;
mod tasks;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use btf::Types;
use core::{Core, KernelAddress};
use nodes::NodesOfMemory;
use pageleap::NodeId;
pub use tables::{LEVELS, TablesOfProcess};
use tasks::Task;

/// The inode of the first pid namespace (`PROC_PID_INIT_INO`), by whose numbers the kernel's list
/// has processes.
const FIRST_NAMESPACE: u64 = 0xEFFF_FFFC;

/// The first entry of the kernel's list of processes.
const FIRST_PROCESS: &str = "init_task";

/// How often the walk of a process begins again because the process has started another program.
const ATTEMPTS: usize = 3;

/// The members that a walk needs, as [`Layout`] has them.
const MEMBERS: [(&str, &str); 4] = [
    ("task_struct", "tasks"),
    ("task_struct", "tgid"),
    ("task_struct", "mm"),
    ("mm_struct", "pgd"),
];

/// Why something is not known.
#[derive(Clone, Debug)]
pub struct Reason(String);

impl Reason {
    fn new(reason: String) -> Reason {
        Reason(reason)
    }
}

#[cfg(test)]
impl From<&str> for Reason {
    fn from(reason: &str) -> Reason {
        Reason(reason.to_owned())
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Where members lie in structures of the kernel, in bytes.
struct Layout {
    /// The list of processes in `struct task_struct`: a pointer to that of the next one.
    tasks: u64,
    tgid: u64,
    mm: u64,
    /// The highest page table in `struct mm_struct`.
    pgd: u64,
}

/// The memory of the kernel, with all that a walk needs to know.
pub struct KernelMemory {
    core: Core,
    layout: Layout,
    first: KernelAddress,
    nodes: NodesOfMemory,
}

impl KernelMemory {
    /// Opens the memory of the running kernel, which lies on these nodes.
    ///
    /// Takes some 100 ms, most of them for the kernel's symbols.
    ///
    /// # Errors
    /// The reason why it cannot be read, with a remedy if there is one.
    pub fn open(nodes: &[NodeId]) -> Result<KernelMemory, Reason> {
        if !cfg!(target_arch = "x86_64") {
            return Err(Reason::new(
                "this version of pageleap reads the page tables of x86-64 only".to_owned(),
            ));
        }
        let lockdown = Path::new("/sys/kernel/security/lockdown");
        let core = Core::open(Path::new("/proc/kcore"), lockdown)?;
        is_in_first_namespace()?;
        let types = "/sys/kernel/btf/vmlinux";
        let types = fs::read(types).map_err(|error| {
            Reason::new(format!(
                "the kernel does not describe its types: {types}: {error} (it needs \
                 CONFIG_DEBUG_INFO_BTF)"
            ))
        })?;
        let layout = Layout::read(&Types::parse(&types)?)?;
        let symbols = File::open("/proc/kallsyms")
            .map_err(|error| Reason::new(format!("/proc/kallsyms cannot be opened: {error}")))?;
        let first = address_of(FIRST_PROCESS, BufReader::new(symbols))?;
        let nodes = NodesOfMemory::read(Path::new("/sys/devices/system"), nodes)?;
        Ok(KernelMemory { core, layout, first, nodes })
    }

    /// Counts the page tables of processes, by their numbers in the first pid namespace.
    ///
    /// # Errors
    /// The reason why the processes cannot be found; for each process, why its page tables are not
    /// known.
    pub fn page_tables(
        &self,
        pids: &[u32],
    ) -> Result<Vec<Result<TablesOfProcess, Reason>>, Reason> {
        // An open folder of /proc stays that of its process. If the folder is alive after the walk,
        // its number belonged to that process all the time.
        let folders: Vec<_> = pids.iter().map(|pid| File::open(format!("/proc/{pid}"))).collect();
        let tasks = self.find(pids)?;
        let of = |(pid, folder): (&u32, _)| {
            let counted = self.of_process(*pid, tasks.get(pid).copied())?;
            if is_alive(folder) { Ok(counted) } else { Err(has_ended()) }
        };
        Ok(pids.iter().zip(&folders).map(of).collect())
    }

    fn find(&self, pids: &[u32]) -> Result<BTreeMap<u32, Task>, Reason> {
        tasks::find(&self.core, &self.layout, self.first, pids)
    }

    fn of_process(&self, pid: u32, mut task: Option<Task>) -> Result<TablesOfProcess, Reason> {
        for _ in 0..ATTEMPTS {
            let found = task.ok_or_else(has_ended)?;
            let root = found.root.ok_or_else(|| {
                Reason::new("it has no memory of its own, or its main thread has ended".to_owned())
            })?;
            let counted = tables::count(&self.core, &self.nodes, root);
            if tasks::is_unchanged(&self.core, &self.layout, pid, &found) {
                return counted;
            }
            task = self.find(&[pid])?.remove(&pid);
        }
        Err(Reason::new("it starts one program after the other".to_owned()))
    }
}

impl Layout {
    fn read(types: &Types) -> Result<Layout, Reason> {
        let [tasks, tgid, mm, pgd] =
            MEMBERS.map(|(structure, member)| types.offset(structure, member));
        Ok(Layout { tasks: tasks?, tgid: tgid?, mm: mm?, pgd: pgd? })
    }
}

fn has_ended() -> Reason {
    Reason::new("it has ended meanwhile".to_owned())
}

/// Whether the process of an open folder of `/proc` has not ended.
fn is_alive(folder: &std::io::Result<File>) -> bool {
    let stat = |folder: &File| fs::read(format!("/proc/self/fd/{}/stat", folder.as_raw_fd()));
    folder.as_ref().is_ok_and(|folder| stat(folder).is_ok())
}

/// Refuses other pid namespaces than the first one.
fn is_in_first_namespace() -> Result<(), Reason> {
    let namespace = fs::metadata("/proc/self/ns/pid").map(|found| found.ino());
    let shown = fs::read_link("/proc/self").ok();
    let is_own = shown.is_some_and(|own| own.to_str() == Some(&std::process::id().to_string()));
    match namespace {
        Ok(FIRST_NAMESPACE) if is_own => Ok(()),
        _ => Err(Reason::new(
            "this is another pid namespace than the first one (a container): the kernel's list of \
             processes has other numbers"
                .to_owned(),
        )),
    }
}

/// The address of a symbol of the kernel, in the lines of `/proc/kallsyms`.
fn address_of(symbol: &str, lines: impl BufRead) -> Result<KernelAddress, Reason> {
    let missing = |why: &str| Reason::new(format!("/proc/kallsyms {why} {symbol}"));
    for line in lines.lines() {
        let line = line.map_err(|error| missing(&format!("cannot be read ({error}) for")))?;
        let mut words = line.split_whitespace();
        let (address, _, name) = (words.next(), words.next(), words.next());
        if name != Some(symbol) || words.next().is_some() {
            continue;
        }
        return match address.and_then(|address| u64::from_str_radix(address, 16).ok()) {
            Some(0) | None => Err(missing(
                "hides the address (it shows it to CAP_SYSLOG while sysctl kernel.kptr_restrict is \
                 0 or 1) of",
            )),
            Some(address) => Ok(KernelAddress(address)),
        };
    }
    Err(missing("does not have (it needs CONFIG_KALLSYMS_ALL)"))
}
