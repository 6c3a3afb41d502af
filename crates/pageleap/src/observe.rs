//! Reads the kernel's reports of memory in `/proc`: mappings, their attributes, page sizes, frame
//! numbers. Nothing here changes memory, so an effect has another observer than the code that made
//! it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;

use pageleap_sys::KeptFd;

use crate::error::Error;
use crate::units::{AddressRange, BASE_PAGE, NodeId, Prot};

/// The directory of these files.
const OWN: &str = "/proc/self/";
const SMAPS: &str = "/proc/self/smaps";
const MAPS: &str = "/proc/self/maps";
const PAGEMAP: &str = "/proc/self/pagemap";
const NUMA_MAPS: &str = "/proc/self/numa_maps";

/// Opens one of these files, as the calling thread sees it.
fn open(path: &str) -> std::io::Result<KeptFd> {
    Ok(pageleap_sys::open_own(path.trim_start_matches(OWN))?)
}

/// The whole text of one of these files.
fn text(path: &str) -> Result<String, Error> {
    // The name of a mapped file need not be UTF-8.
    let read = pageleap_sys::read_own(path.trim_start_matches(OWN));
    let text = read.map_err(|errno| unreadable(path, errno.into()))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn unreadable(path: &str, error: std::io::Error) -> Error {
    Error::system_file(path, &error)
}

/// The number of mappings of the process, which `vm.max_map_count` limits. Reads the whole of
/// `/proc/self/maps`, which takes about a millisecond per thousand mappings.
pub fn mapping_count() -> Result<usize, Error> {
    count_mappings(|_| true)
}

/// The number of mappings that belong to pageleap: those of regions and the aliases of pools.
pub fn pool_mapping_count() -> Result<usize, Error> {
    count_mappings(|line| line.contains(POOL_FILE))
}

/// The beginning of the names of pools' memory files, as `/proc/self/maps` shows them.
pub(crate) const POOL_FILE: &str = "/memfd:pageleap:";

fn count_mappings(counts: impl Fn(&str) -> bool) -> Result<usize, Error> {
    let maps = text(MAPS)?;
    Ok(maps.lines().filter(|line| counts(line)).count())
}

/// The most mappings that a process may have (`vm.max_map_count`); `None` if it cannot be read.
pub fn max_mapping_count() -> Option<usize> {
    std::fs::read_to_string("/proc/sys/vm/max_map_count").ok()?.trim().parse().ok()
}

/// How many bytes of a range lie on each node, by `/proc/self/numa_maps`, which counts whole
/// mappings. For processes that may not query single pages (`move_pages`). On a kernel without NUMA
/// all mapped bytes lie on the one node.
///
/// # Errors
/// If the file cannot be read, or a mapping lies only partly in the range.
pub fn node_bytes(start: usize, len: usize) -> Result<BTreeMap<NodeId, u64>, Error> {
    let end = start.saturating_add(len);
    let maps = text(MAPS)?;
    let ranges = maps.lines().filter_map(|line| hex_range(line.split_whitespace().next()?));
    let inside: Vec<_> = ranges.filter(|(from, to)| *from < end && *to > start).collect();
    match open(NUMA_MAPS).and_then(std::io::read_to_string) {
        Ok(text) => {
            if inside.iter().any(|(from, to)| *from < start || *to > end) {
                return Err(Error::SystemFile {
                    path: NUMA_MAPS.to_owned(),
                    reason: format!(
                        "a mapping is partly outside {}",
                        AddressRange::new(start, len)
                    ),
                    remedy: "allow move_pages, which tells of single pages (in a container: in its seccomp profile)",
                });
            }
            Ok(node_bytes_in(&text, |mapping| inside.iter().any(|(from, _)| *from == mapping)))
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let bytes =
                inside.iter().map(|(from, to)| (to.min(&end) - from.max(&start)) as u64).sum();
            Ok(BTreeMap::from([(NodeId(0), bytes)]))
        }
        Err(e) => Err(unreadable(NUMA_MAPS, e)),
    }
}

/// The two numbers of `1000-2000`.
pub(crate) fn hex_range(text: &str) -> Option<(usize, usize)> {
    let (from, to) = text.split_once('-')?;
    Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
}

/// Sums up the mappings that are `wanted`, by their first addresses.
fn node_bytes_in(text: &str, wanted: impl Fn(usize) -> bool) -> BTreeMap<NodeId, u64> {
    let mut bytes = BTreeMap::new();
    for entry in text.lines().filter_map(NumaEntry::parse).filter(|entry| wanted(entry.start)) {
        for (node, more) in entry.on_nodes {
            *bytes.entry(node).or_default() += more;
        }
    }
    bytes
}

/// One mapping as numa_maps shows it (Documentation/filesystems/proc.rst: `N<node>=<pages>`, in
/// pages of `kernelpagesize_kB`).
#[derive(Debug, PartialEq)]
pub(crate) struct NumaEntry<'a> {
    pub(crate) start: usize,
    /// The policy in the kernel's words: `default`, `bind:0-1`, `interleave:0,2`.
    pub(crate) policy: &'a str,
    /// Bytes on each node.
    pub(crate) on_nodes: BTreeMap<NodeId, u64>,
}

impl NumaEntry<'_> {
    pub(crate) fn parse(line: &str) -> Option<NumaEntry<'_>> {
        let (start, rest) = line.split_once(' ')?;
        let start = usize::from_str_radix(start, 16).ok()?;
        // Two policies have names of two words: `prefer (many):0`, `weighted interleave:0-1`.
        let is_two = ["prefer (", "weighted "].iter().any(|two| rest.starts_with(two));
        let mut spaces = rest.match_indices(' ').map(|(at, _)| at);
        let policy = &rest[..spaces.nth(usize::from(is_two)).unwrap_or(rest.len())];
        let fields: Vec<(&str, u64)> = rest
            .split_whitespace()
            .filter_map(|word| {
                let (name, value) = word.split_once('=')?;
                Some((name, value.parse().ok()?))
            })
            .collect();
        let field =
            |wanted| fields.iter().find(|(name, _)| *name == wanted).map(|(_, value)| *value);
        let page_bytes = field("kernelpagesize_kB").unwrap_or(4) << 10;
        let node_of = |name: &str| name.strip_prefix('N')?.parse().ok().map(NodeId);
        let on_nodes = fields
            .iter()
            .filter_map(|(name, pages)| Some((node_of(name)?, pages.saturating_mul(page_bytes))))
            .collect();
        Some(NumaEntry { start, policy, on_nodes })
    }
}

/// The attributes that a user can set on a mapping. A change of frames keeps them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Access.
    pub prot: Prot,
    /// Children do not get the range (`MADV_DONTFORK`, smaps `dc`).
    pub dont_fork: bool,
    /// Core dumps leave it out (`MADV_DONTDUMP`, smaps `dd`).
    pub dont_dump: bool,
    /// It is locked into memory (`mlock`, smaps `lo`).
    pub locked: bool,
    /// Only pages that are present are locked (`MLOCK_ONFAULT`, smaps `lf`).
    pub lock_on_fault: bool,
    /// `MADV_HUGEPAGE` (smaps `hg`) or `MADV_NOHUGEPAGE` (`nh`), if either was given.
    pub huge_pages: Option<bool>,
    /// `MADV_RANDOM` (smaps `rr`).
    pub random: bool,
    /// `MADV_SEQUENTIAL` (smaps `sr`).
    pub sequential: bool,
}

/// Consecutive addresses with equal attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttributeRun {
    /// First address.
    pub start: usize,
    /// One past the last.
    pub end: usize,
    /// Their attributes.
    pub attributes: Attributes,
}

/// One mapping as smaps shows it.
pub(crate) struct SmapsEntry {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) perms: String,
    /// The file, or the kernel's name for the mapping, such as `[heap]`. May be empty, and may have
    /// any characters.
    pub(crate) name: String,
    /// The offset in its file, in bytes.
    pub(crate) offset: u64,
    fields: Vec<(String, String)>,
}

impl Attributes {
    /// The attributes of a new mapping with the access `prot`.
    pub(crate) const fn of_new_mapping(prot: Prot) -> Self {
        Attributes {
            prot,
            dont_fork: false,
            dont_dump: false,
            locked: false,
            lock_on_fault: false,
            huge_pages: None,
            random: false,
            sequential: false,
        }
    }
}

impl SmapsEntry {
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn kb(&self, name: &str) -> usize {
        let value = self.field(name).and_then(|v| v.split_whitespace().next()?.parse().ok());
        value.unwrap_or(0)
    }

    pub(crate) fn has_flag(&self, flag: &str) -> bool {
        let flags = self.field("VmFlags").unwrap_or_default();
        flags.split_whitespace().any(|f| f == flag)
    }

    fn attributes(&self) -> Attributes {
        let has = |flag: &str| self.has_flag(flag);
        let perm = |at: usize, c: u8| self.perms.as_bytes().get(at) == Some(&c);
        let prot = i32::from(perm(0, b'r'))
            | i32::from(perm(1, b'w')) << 1
            | i32::from(perm(2, b'x')) << 2;
        Attributes {
            prot: Prot(prot),
            dont_fork: has("dc"),
            dont_dump: has("dd"),
            locked: has("lo"),
            // Some kernels have no letters for this flag (6.1 has none, 6.12 has them). It is the
            // only flag of a locked mapping of memory that they print as `??`.
            lock_on_fault: has("lf") || has("lo") && has("??"),
            huge_pages: if has("hg") { Some(true) } else { has("nh").then_some(false) },
            random: has("rr"),
            sequential: has("sr"),
        }
    }
}

/// Reads the entries of smaps that overlap `[start, end)`, and stops behind them: the kernel walks
/// over the page tables of each entry that is read. No two entries overlap.
pub(crate) fn smaps_entries(
    source: impl BufRead,
    start: usize,
    end: usize,
) -> std::io::Result<Vec<SmapsEntry>> {
    entries_with(source, start, end, |_| true)
}

/// Like [`smaps_entries`], but keeps only fields whose line `is_wanted`. An entry has some 25
/// fields, and parsing them all takes as long as the kernel takes to print them.
fn entries_with(
    mut source: impl BufRead,
    start: usize,
    end: usize,
    is_wanted: impl Fn(&[u8]) -> bool,
) -> std::io::Result<Vec<SmapsEntry>> {
    let mut entries: Vec<SmapsEntry> = Vec::new();
    let mut line = Vec::new();
    while source.read_until(b'\n', &mut line)? > 0 {
        let is_field = line.first().is_some_and(u8::is_ascii_uppercase);
        if !is_field || is_wanted(&line) {
            // The name of a mapped file need not be UTF-8.
            let text = String::from_utf8_lossy(line.strip_suffix(b"\n").unwrap_or(&line));
            if take_line(&mut entries, &text, start, end).is_break() {
                return Ok(entries);
            }
        }
        line.clear();
    }
    entries.retain(|e| e.end > start.max(e.start));
    Ok(entries)
}

/// Parses one line of smaps. Breaks at the first mapping behind the range.
fn take_line(
    entries: &mut Vec<SmapsEntry>,
    line: &str,
    start: usize,
    end: usize,
) -> ControlFlow<()> {
    let mut words = line.split_whitespace();
    let Some(head) = words.next() else { return ControlFlow::Continue(()) };
    if let Some(name) = head.strip_suffix(':') {
        if let Some(entry) = entries.last_mut() {
            let value = line[head.len()..].trim().to_owned();
            entry.fields.push((name.to_owned(), value));
        }
        return ControlFlow::Continue(());
    }
    // A new mapping: keep the previous one only if it overlaps.
    if entries.last().is_some_and(|e| e.end <= start || e.end <= e.start) {
        entries.pop();
    }
    let Some((from, to)) = hex_range(head) else { return ControlFlow::Continue(()) };
    if from >= end {
        return ControlFlow::Break(());
    }
    // A mapping that has grown while the file was read is printed again. Only its new part counts.
    let from = entries.last().map_or(from, |last| from.max(last.end));
    let perms = words.next().unwrap_or_default().to_owned();
    let offset = words.next().and_then(|text| u64::from_str_radix(text, 16).ok()).unwrap_or(0);
    // Behind the offset, the device and the inode. A name may have spaces, also at its ends.
    let name = line.splitn(6, ' ').nth(5).unwrap_or_default().trim_start().to_owned();
    entries.push(SmapsEntry { start: from, end: to, perms, name, offset, fields: Vec::new() });
    ControlFlow::Continue(())
}

/// The mappings of a range with their attributes, at the cost of [`attributes`].
pub(crate) fn smaps(start: usize, len: usize) -> Result<Vec<SmapsEntry>, Error> {
    let file = open(SMAPS).map_err(|e| unreadable(SMAPS, e))?;
    // A small buffer, so that reading ends soon behind the range.
    smaps_entries(BufReader::with_capacity(4096, file), start, start.saturating_add(len))
        .map_err(|e| unreadable(SMAPS, e))
}

/// The mappings of a range, as `/proc/self/maps` shows them: without attributes, but cheap.
pub(crate) fn mappings(start: usize, len: usize) -> Result<Vec<SmapsEntry>, Error> {
    let file = open(MAPS).map_err(|e| unreadable(MAPS, e))?;
    smaps_entries(BufReader::new(file), start, start.saturating_add(len))
        .map_err(|e| unreadable(MAPS, e))
}

/// The stack pointers of the threads of this process, as far as the kernel tells them: for threads
/// that wait in a system call (`/proc/self/task/TID/syscall`).
pub(crate) fn stack_pointers() -> Vec<usize> {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return Vec::new() };
    let pointer = |task: std::fs::DirEntry| {
        let text = std::fs::read_to_string(task.path().join("syscall")).ok()?;
        // The last two words are the stack pointer and the program counter.
        let word = text.split_whitespace().rev().nth(1)?;
        usize::from_str_radix(word.strip_prefix("0x")?, 16).ok()
    };
    tasks.flatten().filter_map(pointer).collect()
}

/// The attributes of `[start, start + len)`, in runs of equal attributes. Parts that are not mapped
/// are left out. The kernel walks over the page tables of the range and of every mapping at lower
/// addresses, which takes some 30 ms per GB of base pages.
pub fn attributes(start: usize, len: usize) -> Result<Vec<AttributeRun>, Error> {
    let file = open(SMAPS).map_err(|e| unreadable(SMAPS, e))?;
    let source = BufReader::with_capacity(4096, file);
    let entries = entries_with(source, start, start.saturating_add(len), tells_attributes)
        .map_err(|e| unreadable(SMAPS, e))?;
    Ok(attribute_runs(&entries, start, len))
}

/// Whether a line of smaps tells attributes, and not sizes.
fn tells_attributes(line: &[u8]) -> bool {
    line.starts_with(b"VmFlags:")
}

/// The attributes of a range, by a text in the format of smaps.
pub(crate) fn attributes_in(text: &[u8], start: usize, len: usize) -> Vec<AttributeRun> {
    let entries = entries_with(text, start, start + len, tells_attributes);
    attribute_runs(&entries.unwrap_or_default(), start, len)
}

/// The error for a part of a region that smaps does not show.
pub(crate) fn not_shown(start: usize, len: usize) -> Error {
    Error::SystemFile {
        path: SMAPS.to_owned(),
        reason: format!("it does not show the mapping {}", AddressRange::new(start, len)),
        remedy: "mount /proc without restrictions, and do not unmap parts of a region",
    }
}

fn attribute_runs(entries: &[SmapsEntry], start: usize, len: usize) -> Vec<AttributeRun> {
    joined(entries.iter().map(|entry| AttributeRun {
        start: entry.start.max(start),
        end: entry.end.min(start + len),
        attributes: entry.attributes(),
    }))
}

/// Joins neighbours with equal attributes.
pub(crate) fn joined(runs: impl Iterator<Item = AttributeRun>) -> Vec<AttributeRun> {
    let mut joined: Vec<AttributeRun> = Vec::new();
    for run in runs {
        match joined.last_mut() {
            Some(last) if last.end == run.start && last.attributes == run.attributes => {
                last.end = run.end
            }
            _ => joined.push(run),
        }
    }
    joined
}

/// The real size of the pages with which a range is mapped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MappedPages {
    /// The page size of the mapping in bytes (`KernelPageSize`); the smallest, if the range has
    /// several.
    pub kernel_page_size: usize,
    /// The share of the resident bytes in huge pages (hugetlb; shmem or anonymous memory mapped by
    /// PMD), 0 to 1.
    pub huge_mapped_ratio: f64,
}

/// Reads in smaps by which page sizes a range is mapped.
pub fn mapped_pages(start: usize, len: usize) -> Result<MappedPages, Error> {
    let (mut smallest, mut resident_kb, mut huge_kb) = (usize::MAX, 0, 0);
    for entry in smaps(start, len)? {
        smallest = smallest.min(entry.kb("KernelPageSize") << 10);
        let hugetlb = entry.kb("Shared_Hugetlb") + entry.kb("Private_Hugetlb");
        huge_kb += hugetlb + entry.kb("ShmemPmdMapped") + entry.kb("AnonHugePages");
        resident_kb += hugetlb + entry.kb("Rss");
    }
    let kernel_page_size = if smallest == usize::MAX { BASE_PAGE } else { smallest };
    Ok(MappedPages {
        kernel_page_size,
        huge_mapped_ratio: huge_kb as f64 / resident_kb.max(1) as f64,
    })
}

/// The physical frame number of each page of `page_bytes` bytes in `[start, start + len)`; 0 for a
/// page that is not present. `None` if the kernel hides frame numbers from this process, because it
/// lacks CAP_SYS_ADMIN, or hides the file that has them.
#[doc(alias = "pagemap")]
pub fn frame_numbers(
    start: usize,
    len: usize,
    page_bytes: usize,
) -> Result<Option<Vec<u64>>, Error> {
    /// Bits 0-54 of an entry are the frame number, bit 63 says that the page is present
    /// (Documentation/admin-guide/mm/pagemap.rst).
    const FRAME: u64 = (1 << 55) - 1;
    const PRESENT: u64 = 1 << 63;
    /// Entries read at a time.
    const BATCH: usize = 8192;
    if page_bytes < BASE_PAGE
        || !page_bytes.is_multiple_of(BASE_PAGE)
        || start.checked_add(len).is_none()
    {
        return Err(Error::BadArgument {
            what: "range or page size",
            reason: format!("{len} bytes at {start:#x} in pages of {page_bytes}"),
            remedy: "use an address range of this process, and a multiple of 4096 bytes".into(),
        });
    }
    // A process that has gained capabilities may not open the file, and containers mask it.
    let hides = |e: &std::io::Error| {
        use std::io::ErrorKind::{NotFound, PermissionDenied, UnexpectedEof};
        matches!(e.kind(), NotFound | PermissionDenied | UnexpectedEof)
    };
    let file = match open(PAGEMAP) {
        Err(e) if hides(&e) => return Ok(None),
        opened => opened.map_err(|e| unreadable(PAGEMAP, e))?,
    };
    let base_pages = len / BASE_PAGE;
    let stride = page_bytes / BASE_PAGE;
    let mut frames = Vec::new();
    let mut buffer = vec![0u8; BATCH * 8];
    let mut hidden = false;
    for batch in (0..base_pages).step_by(BATCH) {
        let entries = BATCH.min(base_pages - batch);
        let bytes = &mut buffer[..entries * 8];
        let offset = (start / BASE_PAGE + batch) as u64 * 8;
        match read_exact(&file, bytes, offset) {
            Err(e) if hides(&e) => return Ok(None),
            read => read.map_err(|e| unreadable(PAGEMAP, e))?,
        }
        for (i, entry) in bytes.chunks_exact(8).enumerate() {
            let entry = u64::from_ne_bytes(entry.try_into().expect("eight bytes"));
            hidden |= entry & PRESENT != 0 && entry & FRAME == 0;
            if (batch + i).is_multiple_of(stride) {
                frames.push(if entry & PRESENT != 0 { entry & FRAME } else { 0 });
            }
        }
    }
    Ok((!hidden).then_some(frames))
}

/// Fills a buffer from a position of a file.
fn read_exact(file: &KeptFd, into: &mut [u8], offset: u64) -> std::io::Result<()> {
    let mut done = 0;
    while done < into.len() {
        match file.read_at(&mut into[done..], offset + done as u64)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            bytes => done += bytes,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
00001000-00003000 rw-s 00000000 00:01 7   /memfd:a b: (deleted)
Size:                  8 kB
KernelPageSize:        4 kB
VmFlags: rd wr sh mr mw me ms dc dd 
00003000-00004000 r--s 00002000 00:01 7   /memfd:a (deleted)
KernelPageSize:        4 kB
VmFlags: rd sh mr mw me ms lo rr 
00004000-00005000 r--s 00003000 00:01 7   /memfd:a (deleted)
VmFlags: rd sh mr mw me ms lo ?? sd 
00005000-00006000 r--s 00004000 00:01 7   /memfd:a (deleted)
VmFlags: rd sh mr mw me ms lo lf ?? 
00006000-00007000 r--s 00005000 00:01 7   /memfd:a (deleted)
VmFlags: rd sh mr mw me ms ?? 
00008000-00009000 ---p 00000000 00:00 0 
KernelPageSize:        4 kB
VmFlags: mr mw me nr 
";

    fn read(start: usize, end: usize) -> Vec<(usize, usize, Attributes)> {
        let entries = smaps_entries(TEXT.as_bytes(), start, end).unwrap();
        entries.iter().map(|e| (e.start, e.end, e.attributes())).collect()
    }

    #[test]
    fn attributes_come_from_permissions_and_flags() {
        let all = read(0, usize::MAX);
        assert_eq!(all.len(), 6);
        assert_eq!(all[0].2.prot, Prot::READ_WRITE);
        assert!(all[0].2.dont_fork && all[0].2.dont_dump && !all[0].2.locked);
        assert_eq!(all[1].2.prot, Prot::READ);
        assert!(all[1].2.locked && all[1].2.random && !all[1].2.dont_fork);
        assert_eq!([1, 2, 3, 4].map(|i: usize| all[i].2.lock_on_fault), [false, true, true, false]);
        assert_eq!(all[5].2.prot, Prot::NONE);
    }

    #[test]
    fn numa_maps_counts_pages_of_the_mappings_size() {
        let text = "\
1000 prefer:0 file=/memfd:pageleap:node0\\040(deleted) dirty=3 N0=2 N4=1 kernelpagesize_kB=4
200000 default file=/memfd:x huge dirty=1 N1=5 kernelpagesize_kB=2048
9000 default
nonsense N0=7
";
        let all = node_bytes_in(text, |_| true);
        assert_eq!(
            all,
            BTreeMap::from([(NodeId(0), 8192), (NodeId(1), 10 << 20), (NodeId(4), 4096)])
        );
        assert_eq!(node_bytes_in(text, |start| start == 0x9000), BTreeMap::new());
    }

    /// Mappings split and merge while the kernel prints them.
    #[test]
    fn mappings_that_are_told_twice_do_not_overlap() {
        let text = "\
1000-3000 r--p 0 0:0 0
2000-6000 rw-p 0 0:0 0
4000-5000 r--p 0 0:0 0
Rss: 4 kB
4000-8000 r--p 0 0:0 0
7000-8000 r--p 0 0:0 0
";
        let entries = smaps_entries(text.as_bytes(), 0x2000, usize::MAX).unwrap();
        let all: Vec<_> = entries.iter().map(|e| (e.start, e.end, &e.perms[..2])).collect();
        assert_eq!(all, [(0x1000, 0x3000, "r-"), (0x3000, 0x6000, "rw"), (0x6000, 0x8000, "r-")]);
        assert!(entries.iter().all(|entry| entry.fields.is_empty()));
    }

    #[test]
    fn only_overlapping_mappings_are_returned() {
        assert_eq!(read(0x3000, 0x4000).iter().map(|e| e.0).collect::<Vec<_>>(), [0x3000]);
        assert_eq!(read(0x2fff, 0x3001).len(), 2);
        assert!(read(0x7000, 0x8000).is_empty());
    }
}
