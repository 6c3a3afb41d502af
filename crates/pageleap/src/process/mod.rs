//! The memory of a process as the kernel describes it: of this process, or of another that it may
//! inspect.
//!
//! Reading neither touches a page of the process nor stops it. The files of `/proc` are read one
//! after the other while the process goes on, so the figures of a busy process may disagree by the
//! changes in between.

mod files;
#[cfg(test)]
mod modelled;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufReader, ErrorKind};
use std::ops::Range;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::time::Duration;

use pageleap_sys::{self as sys, MAX_NODES};

use crate::error::Error;
use crate::observe::{NumaEntry, SmapsEntry, hex_range, smaps_entries};
use crate::topology::{escaped, parse_list, status_value};
use crate::units::NodeId;
pub(crate) use files::{Image, by_thread, ended};
use files::{main_thread_has_ended, name_of, open, path, text, text_of, threads, unreadable};

/// The memory of a process at one moment.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ProcessMemory {
    /// Its number, as this process sees it.
    pub pid: u32,
    /// Its name (`/proc/PID/comm`), with control characters escaped.
    pub name: String,
    /// Its numbers in its pid namespaces, the innermost last. One number if it is in the namespace
    /// of this process.
    pub namespace_pids: Vec<u32>,
    /// The nodes that its cpuset allows (`Mems_allowed_list`). Empty if that is not known.
    pub allowed_nodes: Vec<NodeId>,
    /// Page tables (`VmPTE`): pages of PTEs, PMDs and PUDs. The kernel does not say on which node they
    /// lie.
    pub page_table_bytes: u64,
    /// Its mappings, by address. Empty for a process without memory of its own.
    pub mappings: Vec<MappingMemory>,
    /// Parts that are missing, and why.
    pub warnings: Vec<String>,
    /// Identity of the program, by which a later program is recognised.
    pub(crate) image: Image,
}

/// The memory of one mapping.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MappingMemory {
    /// The first address.
    pub start: usize,
    /// One past the last.
    pub end: usize,
    /// Access and sharing in the kernel's letters: `rw-p`, `r--s`.
    pub access: String,
    /// Its kind.
    pub kind: MappingKind,
    /// Its file, or the kernel's name for it, such as `[heap]`, with control characters escaped.
    /// May be empty.
    pub name: String,
    /// The memory policy in the kernel's words: `default` (the node of the CPU that touches a page
    /// first), `bind:0-1`, `prefer:1`. For a mapping without a policy, the kernel shows the policy
    /// of the main thread, or of the thread that a warning names. Empty if it is not known.
    pub policy: String,
    /// The page size of the mapping: 4096, unless it has reserved huge pages (hugetlb).
    pub page_bytes: u64,
    /// Memory that is present, of reserved huge pages too.
    pub resident_bytes: u64,
    /// The part of it that is mapped by transparent huge pages.
    pub huge_bytes: u64,
    /// Whether the kernel may have given it transparent huge pages or smaller folios (`THPeligible`
    /// in smaps, Linux 5.0). `huge_bytes` counts only huge pages that are mapped as such.
    pub may_be_huge: bool,
    /// Memory that has been swapped out.
    pub swapped_bytes: u64,
    /// Memory on each node, by numa_maps. Pages that the kernel counts on no node are left out,
    /// such as the zero page.
    pub on_nodes: BTreeMap<NodeId, u64>,
    /// The part of the resident memory whose pages are mapped more than once, by this process or
    /// others.
    pub shared_bytes: u64,
    /// Whether the kernel can move its pages.
    pub movable: Movable,
    /// Where in its file the mapping begins, in bytes; 0 without a file.
    pub(crate) file_offset: u64,
}

/// Kinds of mappings: those of `numastat -p`, with files and shared memory apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum MappingKind {
    /// The heap that `brk` grows.
    Heap,
    /// The stack of the main thread.
    Stack,
    /// Other private memory without a file. Allocators and stacks of threads lie there.
    Anonymous,
    /// A file, private or shared. Pages of it that were written privately belong to the process.
    File,
    /// Memory that processes share: memory files, System V segments, `/dev/shm`.
    Shared,
    /// Reserved huge pages.
    Hugetlb,
    /// Pages of the kernel (`[vdso]`), and of devices.
    Special,
}

/// Whether the kernel can move the pages of a mapping to another node (`move_pages(2)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Movable {
    /// Yes, except pinned pages, which only an attempt shows.
    Yes,
    /// Only pages that are mapped once. The others ([`MappingMemory::shared_bytes`]) move only on
    /// request (`MPOL_MF_MOVE_ALL`), which needs CAP_SYS_NICE.
    Partly,
    /// Nothing is present.
    Nothing,
    /// No: it is memory of a device.
    Device,
    /// No: it is memory of the kernel.
    Kernel,
    /// No: it is secret memory (`memfd_secret(2)`).
    Secret,
}

impl MappingKind {
    /// All of them, in the order of tables.
    pub const ALL: [MappingKind; 7] = [
        MappingKind::Heap,
        MappingKind::Stack,
        MappingKind::Anonymous,
        MappingKind::File,
        MappingKind::Shared,
        MappingKind::Hugetlb,
        MappingKind::Special,
    ];

    /// Its name in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            MappingKind::Heap => "heap",
            MappingKind::Stack => "stack",
            MappingKind::Anonymous => "anonymous",
            MappingKind::File => "file",
            MappingKind::Shared => "shared",
            MappingKind::Hugetlb => "hugetlb",
            MappingKind::Special => "special",
        }
    }

    fn of(entry: &SmapsEntry) -> MappingKind {
        let name = entry.name.as_str();
        // An ordinary file may have such a name, too, but not one that is deleted.
        let beginnings = ["/memfd:", "/SYSV", "/dev/zero"];
        let is_shared_memory = name.starts_with("/dev/shm/")
            || name.ends_with(" (deleted)") && beginnings.iter().any(|b| name.starts_with(b));
        if entry.has_flag("ht") {
            return MappingKind::Hugetlb;
        }
        match name {
            "[heap]" => MappingKind::Heap,
            "[stack]" => MappingKind::Stack,
            _ if is_unmanaged(entry) => MappingKind::Special,
            "" | "/dev/zero" => MappingKind::Anonymous,
            _ if name.starts_with("[anon_shmem:") || is_shared_memory => MappingKind::Shared,
            _ if name.starts_with("[anon:") => MappingKind::Anonymous,
            _ if name.starts_with('/') => MappingKind::File,
            // `[vdso]`, and mappings without a path: `anon_inode:[io_uring]`, `socket:[7]`.
            _ => MappingKind::Special,
        }
    }
}

impl Movable {
    /// Its name in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Movable::Yes => "yes",
            Movable::Partly => "partly",
            Movable::Nothing => "-",
            Movable::Device => "no: device",
            Movable::Kernel => "no: kernel",
            Movable::Secret => "no: secret",
        }
    }

    fn of(entry: &SmapsEntry, resident_bytes: u64, shared_bytes: u64) -> Movable {
        if is_unmanaged(entry) && entry.name.starts_with("/dev/") {
            Movable::Device
        } else if entry.name == "/secretmem (deleted)" {
            Movable::Secret
        } else if MappingKind::of(entry) == MappingKind::Special {
            Movable::Kernel
        } else if resident_bytes == 0 {
            Movable::Nothing
        } else if shared_bytes > 0 {
            Movable::Partly
        } else {
            Movable::Yes
        }
    }
}

/// Whether the mapping is special (VM_IO, VM_PFNMAP, VM_MIXEDMAP): its pages belong to a device or
/// to the kernel, which manages them differently.
fn is_unmanaged(entry: &SmapsEntry) -> bool {
    ["io", "pf", "mm"].iter().any(|flag| entry.has_flag(flag))
}

impl ProcessMemory {
    /// Reads the memory of a process. The kernel walks over its page tables twice, which takes some
    /// 60 ms per GB of base pages.
    ///
    /// # Errors
    /// [`Error::BadArgument`]: there is no such process. [`Error::SystemFile`]: this process may
    /// not look at it, or it ended meanwhile.
    pub fn read(pid: u32) -> Result<ProcessMemory, Error> {
        /// Bounds the wait for a process that executes programs all the time. On a busy machine an
        /// exec may take long.
        const TRIES: u32 = 10;
        let mut before = Image::of(pid)?;
        for number in 0..TRIES {
            if number > 0 {
                std::thread::sleep(Duration::from_millis(1 << (number - 1)));
            }
            let read = ProcessMemory::read_once(pid);
            let after = Image::of(pid).map_err(|_| ended(pid))?;
            if !before.is_of_same_process(&after) {
                return Err(ended(pid));
            }
            let settled = |memory: &ProcessMemory| memory.mappings.is_empty() || after.is_settled();
            if before == after && read.as_ref().map_or(true, settled) {
                return read;
            }
            before = after;
        }
        Err(Error::SystemFile {
            path: path(pid, "smaps"),
            reason: "the process executed other programs while it was read".into(),
            remedy: "try again",
        })
    }

    /// Identity and limits of a process, without its mappings.
    pub(crate) fn identity(pid: u32) -> Result<ProcessMemory, Error> {
        // The identity is read first: if the other files are about a later program, a comparison
        // shows it.
        let image = Image::of(pid)?;
        let status = text(pid, &by_thread(pid, image.thread, "status"))?;
        let mut warnings = Vec::new();
        let value = |name| status_value(&status, name).unwrap_or_default().trim();
        let allowed = parse_list(value("Mems_allowed_list"), MAX_NODES).unwrap_or_else(|reason| {
            warnings.push(format!("the nodes that its cpuset allows are not known: {reason}"));
            Vec::new()
        });
        if image.thread != pid {
            warnings.push(format!(
                "its main thread has ended: its memory is read, and moves, by its thread {}",
                image.thread
            ));
        }
        Ok(ProcessMemory {
            pid,
            name: escaped(&name_of(pid)?),
            namespace_pids: value("NStgid").split_whitespace().flat_map(str::parse).collect(),
            allowed_nodes: allowed.into_iter().map(|node| NodeId(node as u32)).collect(),
            page_table_bytes: kb(value("VmPTE")),
            mappings: Vec::new(),
            warnings,
            image,
        })
    }

    /// Sets the mappings from entries of smaps or maps. Fields that the text lacks count as zero,
    /// and all memory counts as lying on one node.
    pub(crate) fn set_mappings(&mut self, entries: &[SmapsEntry]) {
        self.mappings = mappings(entries, None);
    }

    fn read_once(pid: u32) -> Result<ProcessMemory, Error> {
        let mut memory = ProcessMemory::identity(pid)?;
        let warnings = &mut memory.warnings;
        let [smaps, numa_maps] =
            ["smaps", "numa_maps"].map(|file| by_thread(pid, memory.image.thread, file));
        let smaps = smaps_entries(BufReader::new(open(pid, &smaps)?), 0, usize::MAX)
            .map_err(|e| unreadable(pid, &smaps, &e))?;
        let numa_maps = match File::open(&numa_maps) {
            // A kernel without NUMA, where all memory lies on one node.
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            _ => Some(text(pid, &numa_maps)?),
        };
        if smaps.is_empty() {
            warnings.push(why_without_memory(pid));
        }
        let mappings = mappings(&smaps, numa_maps.as_deref());
        // Only smaps has the kernel's own page at the end of the address space.
        let is_unknown = |m: &&MappingMemory| m.policy.is_empty() && m.kind != MappingKind::Special;
        match mappings.iter().filter(|m| numa_maps.is_some() && is_unknown(m)).count() {
            0 => {}
            count => warnings.push(format!(
                "mappings that changed while they were read, so that their nodes are not known: {count}"
            )),
        }
        memory.mappings = mappings;
        Ok(memory)
    }

    /// Memory that is present, of reserved huge pages too.
    pub fn resident_bytes(&self) -> u64 {
        self.mappings.iter().map(|mapping| mapping.resident_bytes).sum()
    }

    /// Memory on each node.
    pub fn on_nodes(&self) -> BTreeMap<NodeId, u64> {
        self.on_nodes_of(|_| true)
    }

    /// Memory on each node, of the mappings that `counts` selects.
    pub fn on_nodes_of(&self, counts: impl Fn(&MappingMemory) -> bool) -> BTreeMap<NodeId, u64> {
        let mut sum = BTreeMap::new();
        for mapping in self.mappings.iter().filter(|mapping| counts(mapping)) {
            for (node, bytes) in &mapping.on_nodes {
                *sum.entry(*node).or_default() += bytes;
            }
        }
        sum
    }
}

/// The page tables of a process at one moment, as far as the kernel tells.
///
/// They need no privilege, because `/proc/PID/status` may be read by every user. Only a mount of
/// `/proc` with `hidepid` hides processes of other users: they seem not to exist.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ProcessPageTables {
    /// Its number, as this process sees it.
    pub pid: u32,
    /// Its name (`/proc/PID/comm`), with control characters escaped.
    pub name: String,
    /// Bytes of page tables (`VmPTE`, `mm_pgtables_bytes` in the kernel). These are pages of PTEs,
    /// PMDs and PUDs (before Linux 4.15 of PTEs), but not of the levels above. `None` for a process
    /// without memory of its own: a thread of the kernel, or a process that has ended (a zombie) or
    /// is ending.
    pub bytes: Option<u64>,
}

impl ProcessPageTables {
    /// Reads the page tables of a process. Takes some 20 us, however much memory the process has.
    ///
    /// # Errors
    /// [`Error::BadArgument`]: there is no such process. [`Error::SystemFile`]: a file cannot be
    /// read.
    pub fn read(pid: u32) -> Result<ProcessPageTables, Error> {
        // If the main thread has ended while others go on, they have the memory.
        let thread = Image::of(pid)?.thread;
        let status = text(pid, &by_thread(pid, thread, "status"))?;
        let bytes = status_value(&status, "VmPTE").map(|value| kb(value.trim()));
        Ok(ProcessPageTables { pid, name: escaped(&name_of(pid)?), bytes })
    }
}

/// Why a process has no mappings.
fn why_without_memory(pid: u32) -> String {
    if !main_thread_has_ended(pid) {
        return "it has no memory of its own: a thread of the kernel, or a process that is ending"
            .into();
    }
    match threads(pid).len() {
        0 | 1 => "it has ended, and its parent has not asked how: it has no memory".into(),
        _ => "its main thread has ended, and its other threads are ending".into(),
    }
}

/// Joins smaps and numa_maps by the first address of each mapping. Without numa_maps all memory
/// lies on the one node.
fn mappings(smaps: &[SmapsEntry], numa_maps: Option<&str>) -> Vec<MappingMemory> {
    let lines = numa_maps.unwrap_or_default().lines();
    let by_start: BTreeMap<usize, NumaEntry<'_>> =
        lines.filter_map(NumaEntry::parse).map(|entry| (entry.start, entry)).collect();
    let mapping = |entry: &SmapsEntry| {
        let bytes = |name| (entry.kb(name) as u64) << 10;
        // Rss does not include reserved huge pages.
        let hugetlb = bytes("Private_Hugetlb") + bytes("Shared_Hugetlb");
        let numa = by_start.get(&entry.start);
        let resident_bytes = bytes("Rss") + hugetlb;
        let shared_bytes =
            ["Shared_Clean", "Shared_Dirty", "Shared_Hugetlb"].map(bytes).iter().sum();
        let one_node = || match numa_maps {
            None if resident_bytes > 0 => BTreeMap::from([(NodeId(0), resident_bytes)]),
            _ => BTreeMap::new(),
        };
        MappingMemory {
            start: entry.start,
            end: entry.end,
            access: entry.perms.clone(),
            kind: MappingKind::of(entry),
            name: escaped(&entry.name),
            policy: numa.map_or_else(String::new, |numa| escaped(numa.policy)),
            page_bytes: bytes("KernelPageSize"),
            resident_bytes,
            huge_bytes: ["AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"]
                .map(bytes)
                .iter()
                .sum(),
            may_be_huge: entry.field("THPeligible").is_some_and(|is| is.trim() != "0"),
            swapped_bytes: bytes("Swap"),
            on_nodes: numa.map_or_else(one_node, |numa| numa.on_nodes.clone()),
            shared_bytes,
            movable: Movable::of(entry, resident_bytes, shared_bytes),
            file_offset: entry.offset,
        }
    };
    smaps.iter().map(mapping).collect()
}

/// The node of each page; `None` for a page that is not present. No page is touched.
///
/// # Errors
/// The kernel refuses: the process has ended, or this process may not inspect it.
pub fn nodes_of_pages(pid: u32, pages: &[usize]) -> Result<Vec<Option<NodeId>>, Error> {
    let mut status = vec![i32::MIN; pages.len()];
    let number = NumberForCalls::of(pid)?;
    number
        .call(|number| sys::nodes_of_pages(number, pages, &mut status))
        .map_err(|errno| may_not_ask(pid, &errno.to_string()))?;
    let node = |status: i32| u32::try_from(status).ok().map(NodeId);
    Ok(status.into_iter().map(node).collect())
}

/// The number by which `move_pages(2)` knows a process of `/proc`: 0 for this process, otherwise
/// the number of a thread that has not ended.
#[derive(Debug)]
pub(crate) struct NumberForCalls {
    pid: u32,
    number: AtomicI32,
}

impl NumberForCalls {
    pub(crate) fn of(pid: u32) -> Result<NumberForCalls, Error> {
        let own = own_pid()?;
        let number = match i32::try_from(pid) {
            _ if pid == own => 0,
            // To the kernel, the number would be that of another process.
            _ if has_foreign_proc(own) => return Err(other_namespace(pid)),
            Ok(number) if number > 0 => Image::of(pid).map_or(number, |now| now.thread as i32),
            _ => return Err(may_not_ask(pid, &sys::Errno(libc::ESRCH).to_string())),
        };
        Ok(NumberForCalls { pid, number: AtomicI32::new(number) })
    }

    pub(crate) fn is_own(&self) -> bool {
        self.number.load(Relaxed) == 0
    }

    /// Makes a call that takes such a number. If the thread has ended, the call is repeated with
    /// another thread of the process, so it must be one that may be made twice.
    pub(crate) fn call<T>(
        &self,
        mut call: impl FnMut(i32) -> Result<T, sys::Errno>,
    ) -> Result<T, sys::Errno> {
        /// Bounds the repetitions for a program whose threads all live shorter than a call.
        const TRIES: u32 = 100;
        for _ in 0..TRIES {
            let number = self.number.load(Relaxed);
            let result = call(number);
            // The number of a main thread stays taken until the process has ended. That of another
            // thread may already belong to another process at the time of the call.
            let may_be_wrong = matches!(result, Err(sys::Errno(libc::ESRCH | libc::EINVAL)))
                || number != self.pid as i32;
            if number == 0 || !may_be_wrong {
                return result;
            }
            match Image::of(self.pid) {
                Ok(now) if now.thread as i32 != number => {
                    self.number.store(now.thread as i32, Relaxed);
                }
                Ok(_) => return result,
                Err(_) => break,
            }
        }
        Err(sys::Errno(libc::ESRCH))
    }
}

/// Whether `/proc` is that of a pid namespace above the one of this process. `/proc` then shows a
/// number of this process for each of these namespaces; the numbers may be equal.
fn has_foreign_proc(own: u32) -> bool {
    let status = text_of(own, "status").unwrap_or_default();
    let numbers = status_value(&status, "NStgid").unwrap_or_default().split_whitespace();
    // A kernel without pid namespaces lists no numbers.
    numbers.count() > 1 || own != std::process::id()
}

/// The error for a `/proc` of another pid namespace: `move_pages` would take its numbers for those
/// of other processes.
pub(crate) fn other_namespace(pid: u32) -> Error {
    Error::SystemFile {
        path: format!("move_pages of process {pid}"),
        reason: "/proc is that of another pid namespace".to_owned(),
        remedy: "mount /proc of this pid namespace (unshare --mount-proc)",
    }
}

pub(crate) fn may_not_ask(pid: u32, reason: &str) -> Error {
    Error::SystemFile {
        path: format!("move_pages of process {pid}"),
        reason: reason.to_owned(),
        remedy: "run as root, as the user of the process, or with CAP_SYS_PTRACE, and allow \
                 move_pages (in a container: in its seccomp profile)",
    }
}

/// The number of this process in `/proc`, which may be mounted for another pid namespace.
///
/// # Errors
/// If `/proc` cannot be read.
pub fn own_pid() -> Result<u32, Error> {
    let link =
        std::fs::read_link("/proc/self").map_err(|e| Error::system_file("/proc/self", &e))?;
    link.to_str().and_then(|pid| pid.parse().ok()).ok_or_else(|| {
        Error::system_file("/proc/self", &std::io::Error::from(ErrorKind::InvalidData))
    })
}

/// All processes that `/proc` shows, with their names, by number.
///
/// # Errors
/// If `/proc` cannot be read.
pub fn processes() -> Result<Vec<(u32, String)>, Error> {
    let entries = std::fs::read_dir("/proc").map_err(|e| Error::system_file("/proc", &e))?;
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut found: Vec<(u32, String)> = pids
        // The process may have ended meanwhile.
        .filter_map(|pid| Some((pid, name_of(pid).ok()?)))
        .collect();
    found.sort();
    Ok(found)
}

/// A process and all its descendants, by number.
///
/// # Errors
/// If `/proc` cannot be read.
pub fn descendants(root: u32) -> Result<Vec<u32>, Error> {
    let parents: Vec<(u32, u32)> = processes()?
        .into_iter()
        .filter_map(|(pid, _)| {
            let status = text_of(pid, "status").ok()?;
            Some((pid, status_value(&status, "PPid")?.trim().parse().ok()?))
        })
        .collect();
    let mut found = BTreeSet::from([root]);
    loop {
        let children = parents.iter().filter(|(_, parent)| found.contains(parent));
        let more: Vec<u32> = children.map(|(pid, _)| *pid).collect();
        let before = found.len();
        found.extend(more);
        if found.len() == before {
            return Ok(found.into_iter().collect());
        }
    }
}

/// The mapped ranges of a process, ascending; none if they cannot be read.
pub(crate) fn mapped_ranges(pid: u32) -> Vec<Range<usize>> {
    let thread = Image::of(pid).map_or(pid, |image| image.thread);
    let text = text(pid, &by_thread(pid, thread, "maps")).unwrap_or_default();
    let range = |line: &str| hex_range(line.split_whitespace().next()?);
    text.lines().filter_map(range).map(|(start, end)| start..end).collect()
}

fn kb(text: &str) -> u64 {
    let number = text.split_whitespace().next().and_then(|kb| kb.parse::<u64>().ok());
    number.unwrap_or(0) << 10
}

#[cfg(all(test, not(any(loom, shuttle, miri))))]
mod tests {
    use super::*;

    const SMAPS: &str = "\
1000-3000 rw-p 00000000 00:00 0                          [heap]
Rss:                   8 kB
KernelPageSize:        4 kB
Swap:                  4 kB
VmFlags: rd wr mr mw me ac 
200000-600000 rw-s 00000000 00:01 7                      /memfd:a \x1b[2J b (deleted)
Rss:                   0 kB
KernelPageSize:     2048 kB
Shared_Hugetlb:     2048 kB
Private_Hugetlb:    2048 kB
VmFlags: rd wr sh mr mw me ms ht 
700000-701000 r--p 00000000 00:00 0                      [vvar]
Rss:                   0 kB
KernelPageSize:        4 kB
VmFlags: rd mr pf io de dd 
800000-c00000 rw-p 00000000 00:00 0 
Rss:                4096 kB
KernelPageSize:        4 kB
AnonHugePages:      2048 kB
THPeligible:           1
VmFlags: rd wr mr mw me ac hg 
d00000-d01000 rw-s 00000000 00:05 3                      /dev/card0
Rss:                   4 kB
KernelPageSize:        4 kB
VmFlags: rd wr sh pf io 
e00000-e01000 r-xp 00000000 08:01 99                     /usr/lib/x y.so
Rss:                   4 kB
Shared_Clean:          4 kB
KernelPageSize:        4 kB
VmFlags: rd ex mr mw me 
f00000-f01000 rw-s 00000000 00:0e 4                      anon_inode:[io_uring]
Rss:                   4 kB
KernelPageSize:        4 kB
VmFlags: rd wr sh mr mw me ms de mm 
";
    const NUMA_MAPS: &str = "\
1000 default heap anon=2 dirty=2 N1=2 kernelpagesize_kB=4
200000 bind:1 file=/memfd:a\\040b huge dirty=2 N0=1 N1=1 kernelpagesize_kB=2048
800000 weighted interleave:0-1 anon=1024 dirty=1024 N0=512 N1=512 kernelpagesize_kB=4
e00000 default file=/usr/lib/x\\040y.so mapped=1 mapmax=31 N0=1 kernelpagesize_kB=4
";

    #[test]
    fn mappings_are_told_apart_and_their_nodes_found() {
        let entries = smaps_entries(SMAPS.as_bytes(), 0, usize::MAX).unwrap();
        let all = mappings(&entries, Some(NUMA_MAPS));
        let of = |find: fn(&MappingMemory) -> String| all.iter().map(find).collect::<Vec<_>>();
        assert_eq!(
            of(|m| m.kind.name().into()),
            ["heap", "hugetlb", "special", "anonymous", "special", "file", "special"]
        );
        assert_eq!(
            of(|m| m.movable.name().into()),
            ["yes", "partly", "no: kernel", "yes", "no: device", "partly", "no: kernel"]
        );
        assert_eq!(
            of(|m| m.name.clone()),
            [
                "[heap]",
                "/memfd:a \\u{1b}[2J b (deleted)",
                "[vvar]",
                "",
                "/dev/card0",
                "/usr/lib/x y.so",
                "anon_inode:[io_uring]"
            ]
        );
        assert_eq!(
            of(|m| format!("{:?} {}", m.resident_bytes >> 10, m.policy)),
            [
                "8 default",
                "4096 bind:1",
                "0 ",
                "4096 weighted interleave:0-1",
                "4 ",
                "4 default",
                "4 "
            ]
        );
        let on =
            |at: usize| all[at].on_nodes.iter().map(|(n, b)| (n.0, b >> 10)).collect::<Vec<_>>();
        assert_eq!(on(0), [(1, 8)]);
        assert_eq!(on(1), [(0, 2048), (1, 2048)]);
        assert_eq!(on(3), [(0, 2048), (1, 2048)]);
        assert_eq!((all[3].huge_bytes, all[0].swapped_bytes), (2 << 20, 4096));
        assert_eq!((all[3].may_be_huge, all[0].may_be_huge), (true, false));
    }

    #[test]
    fn this_process_has_memory_and_no_process_has_none() {
        let memory = ProcessMemory::read(std::process::id()).unwrap();
        assert!(memory.resident_bytes() > 0 && memory.page_table_bytes > 0, "{memory:?}");
        assert!(memory.mappings.iter().any(|m| m.kind == MappingKind::Stack), "{memory:?}");
        assert!(!memory.allowed_nodes.is_empty());
        let tables = ProcessPageTables::read(std::process::id()).unwrap();
        assert!(tables.bytes.is_some_and(|bytes| bytes > 0), "{tables:?}");
        let error = ProcessPageTables::read(u32::MAX >> 1).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("no process"), "{error}");
        let error = ProcessMemory::read(u32::MAX >> 1).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("no process"), "{error}");
    }
}
