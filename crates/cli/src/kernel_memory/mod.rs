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

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind};
use std::os::fd::AsRawFd;
use std::path::Path;

use btf::Types;
use core::{Core, KernelAddress};
use nodes::NodesOfMemory;
use pageleap::NodeId;
use pageleap_settings::is_in_first_pid_namespace;
pub use tables::{LEVELS, TablesOfProcess};
pub use tasks::Task;

/// The first entry of the kernel's list of processes.
const FIRST_PROCESS: &str = "init_task";

/// The most processes that the kernel may have (`PID_MAX_LIMIT`).
const MOST_PROCESSES: usize = 1 << 22;

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
    /// A reason, as a note shows it.
    pub fn new(reason: String) -> Reason {
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

/// The layout of a kernel and the symbol that a walk needs. Neither changes while the kernel runs.
pub struct Symbols {
    layout: Layout,
    /// The first entry of the list of processes.
    first: KernelAddress,
}

impl Symbols {
    /// Reads them. Takes some 100 ms, most of them for `/proc/kallsyms`.
    fn read() -> Result<Symbols, Reason> {
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
        Ok(Symbols { layout, first: address_of(FIRST_PROCESS, BufReader::new(symbols))? })
    }
}

/// The memory of the kernel.
pub struct KernelMemory<'a> {
    core: Core,
    nodes: NodesOfMemory,
    symbols: &'a Symbols,
    /// The most processes in the list.
    most_processes: usize,
}

impl<'a> KernelMemory<'a> {
    /// Opens the memory of the running kernel, which lies on these nodes. `symbols` are read once.
    ///
    /// # Errors
    /// The reason why it cannot be read, with a remedy if there is one.
    pub fn open(
        nodes: &[NodeId],
        symbols: &'a OnceCell<Symbols>,
    ) -> Result<KernelMemory<'a>, Reason> {
        if !cfg!(target_arch = "x86_64") {
            return Err(Reason::new(
                "this version of pageleap reads the page tables of x86-64 only".to_owned(),
            ));
        }
        let lockdown = Path::new("/sys/kernel/security/lockdown");
        let core = Core::open(Path::new("/proc/kcore"), lockdown)?;
        if !is_in_first_pid_namespace() {
            return Err(Reason::new(
                "this is another pid namespace than the first one (a container): the kernel's list \
                 of processes has other numbers"
                    .to_owned(),
            ));
        }
        let guest = fs::read_to_string("/sys/hypervisor/guest_type").unwrap_or_default();
        if guest.trim() == "PV" {
            return Err(Reason::new(
                "in a paravirtualized guest of Xen, page tables have addresses of the host"
                    .to_owned(),
            ));
        }
        if symbols.get().is_none() {
            // Nobody else sets them.
            let _ = symbols.set(Symbols::read()?);
        }
        let symbols = symbols.get().expect("they were just set");
        let nodes = NodesOfMemory::read(Path::new("/sys/devices/system"), nodes)?;
        Ok(KernelMemory { core, nodes, symbols, most_processes: most_processes() })
    }

    /// Finds processes by their numbers.
    ///
    /// # Errors
    /// The reason why that is not possible.
    pub fn find(&self, pids: &[u32]) -> Result<BTreeMap<u32, Task>, Reason> {
        let Symbols { layout, first } = self.symbols;
        tasks::find(&self.core, layout, *first, pids, self.most_processes)
    }

    /// Counts the page tables of a process, which [`find`](KernelMemory::find) has found or not.
    ///
    /// # Errors
    /// The reason why they are not known.
    pub fn page_tables(&self, pid: u32, task: Option<&Task>) -> Result<TablesOfProcess, Reason> {
        let mut task = task.copied();
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                task = self.find(&[pid])?.remove(&pid);
            }
            let Some(found) = task else { continue };
            let root = found.root.ok_or_else(|| {
                Reason::new("it has no memory of its own, or its main thread has ended".to_owned())
            })?;
            let counted = tables::count(&self.core, &self.nodes, root);
            if tasks::is_unchanged(&self.core, &self.symbols.layout, pid, &found) {
                return counted;
            }
        }
        Err(Reason::new(
            match task {
                None => "it is not in the kernel's list of processes: it is a thread, or has ended",
                Some(_) => "it has other memory after each look",
            }
            .to_owned(),
        ))
    }
}

/// More processes than there are: twice the threads that `/proc/loadavg` has in its fourth word.
fn most_processes() -> usize {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let threads =
        load.split_whitespace().nth(3).and_then(|word| word.split_once('/')?.1.parse().ok());
    threads.map_or(MOST_PROCESSES, |threads: usize| 2 * threads.min(MOST_PROCESSES) + 1024)
}

impl Layout {
    fn read(types: &Types) -> Result<Layout, Reason> {
        let [tasks, tgid, mm, pgd] =
            MEMBERS.map(|(structure, member)| types.offset(structure, member));
        Ok(Layout { tasks: tasks?, tgid: tgid?, mm: mm?, pgd: pgd? })
    }
}

/// An open folder of `/proc`. It stays that of its process: if the folder is alive later, its
/// number belonged to that process all the time.
pub struct Folder(std::io::Result<File>);

impl Folder {
    /// Opens the folder of a process.
    pub fn open(pid: u32) -> Folder {
        Folder(File::open(format!("/proc/{pid}")))
    }

    /// Whether the process has not ended.
    ///
    /// # Errors
    /// It has ended, or the folder could not be opened.
    pub fn is_alive(&self) -> Result<(), Reason> {
        let reason = |error: &std::io::Error| {
            Reason::new(match error.kind() {
                ErrorKind::NotFound => "it has ended meanwhile".to_owned(),
                _ if error.raw_os_error() == Some(libc::ESRCH) => {
                    "it has ended meanwhile".to_owned()
                }
                _ => format!("its folder in /proc cannot be read: {error}"),
            })
        };
        let folder = self.0.as_ref().map_err(&reason)?;
        let stat = fs::read(format!("/proc/self/fd/{}/stat", folder.as_raw_fd()));
        stat.map(|_| ()).map_err(|error| reason(&error))
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
