//! This process as the kernel shows it: mappings, their flags, descriptors, user.

use std::ops::Range;
use std::os::fd::RawFd;

use pageleap::Region;

/// The lines of `/proc/self/maps` that belong to pools: regions and aliases.
pub fn pool_mappings() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:pageleap")).map(str::to_owned).collect()
}

/// The address ranges of [`pool_mappings`].
pub fn pool_ranges() -> Vec<Range<usize>> {
    let hex = |s: &str| usize::from_str_radix(s, 16).unwrap();
    let range = |line: String| {
        let (from, rest) = line.split_once('-').unwrap();
        hex(from)..hex(rest.split(' ').next().unwrap())
    };
    pool_mappings().into_iter().map(range).collect()
}

/// The permissions and the flags (`VmFlags`) in an address range, from smaps. Equal neighbours are
/// joined.
pub fn vm_flags(start: usize, len: usize) -> Vec<(Range<usize>, String)> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut parts: Vec<(Range<usize>, String)> = Vec::new();
    let mut current: Option<(Range<usize>, String)> = None;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let head = words.next().unwrap_or_default();
        if head == "VmFlags:" {
            let Some((range, perms)) = current.take() else { continue };
            let range = range.start.max(start)..range.end.min(start + len);
            let text = format!("{perms} {}", words.collect::<Vec<_>>().join(" "));
            match parts.last_mut() {
                _ if range.is_empty() => {}
                Some((last, t)) if last.end == range.start && *t == text => last.end = range.end,
                _ => parts.push((range, text)),
            }
        } else if let Some((from, to)) = head.split_once('-') {
            let hex = |s| usize::from_str_radix(s, 16).unwrap();
            current = Some((hex(from)..hex(to), words.next().unwrap().to_owned()));
        }
    }
    parts
}

/// [`vm_flags`] of a whole region.
pub fn region_flags(region: &Region) -> Vec<(Range<usize>, String)> {
    vm_flags(address(region), region.len())
}

/// Where a region begins.
pub fn address(region: &Region) -> usize {
    region.as_ptr().as_ptr() as usize
}

/// The open descriptors of the kinds that pools and jobs open, with their names.
pub fn own_files() -> Vec<(RawFd, String)> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let named = open.filter_map(|entry| {
        let path = entry.ok()?.path();
        let fd = path.file_name()?.to_str()?.parse().ok()?;
        Some((fd, std::fs::read_link(&path).ok()?.display().to_string()))
    });
    let ours = ["memfd:pageleap", "userfaultfd", "pagemap"];
    let is_ours = |fd: RawFd, name: &str| {
        ours.iter().any(|kind| name.contains(kind)) || name.starts_with("pipe:") && is_event(fd)
    };
    named.filter(|(fd, name)| is_ours(*fd, name)).collect()
}

/// Whether a pipe is an event: one descriptor both reads and writes it.
fn is_event(pipe: RawFd) -> bool {
    // SAFETY: the call takes no pointers.
    let flags = unsafe { libc::fcntl(pipe, libc::F_GETFL) };
    flags >= 0 && flags & libc::O_ACCMODE == libc::O_RDWR
}

/// The names of [`own_files`].
pub fn own_descriptors() -> Vec<String> {
    own_files().into_iter().map(|(_, name)| name).collect()
}

pub fn is_root() -> bool {
    // SAFETY: the call takes no arguments and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Turns root into the user and group `nobody`, in all threads of this process.
pub fn become_nobody() {
    const NOBODY: libc::uid_t = 65534;
    // SAFETY: the calls take numbers only. They change this process alone, which a test has started
    // for that.
    unsafe {
        assert_eq!(libc::setresgid(NOBODY, NOBODY, NOBODY), 0);
        assert_eq!(libc::setresuid(NOBODY, NOBODY, NOBODY), 0);
    }
}

/// Sets whether the process is dumpable. The files in `/proc/self` belong to the process' user if
/// it is, and to root if not; a change of user clears it.
pub fn set_dumpable(dumpable: bool) {
    // SAFETY: the call takes numbers only.
    let set = unsafe { libc::prctl(libc::PR_SET_DUMPABLE, libc::c_ulong::from(dumpable), 0, 0, 0) };
    assert_eq!(set, 0);
}

/// The value of a field of `/proc/self/status`, in KB.
pub fn status_kb(name: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Sets RLIMIT_AS to what the process has now plus `bytes`. `None` lifts the limit.
pub fn limit_address_space(bytes: Option<i64>) {
    let size = status_kb("VmSize") as i64 * 1024;
    let rlim_cur = bytes.map_or(libc::RLIM_INFINITY, |bytes| (size + bytes) as u64);
    let limit = libc::rlimit { rlim_cur, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the call reads one structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
}

/// The mappings of this process.
pub fn own_mappings() -> Vec<Range<usize>> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let hex = |text: &str| usize::from_str_radix(text, 16).unwrap();
    let mut told = 0;
    let range = |line: &str| {
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        // A mapping that grows between two reads of the file is told twice.
        let range = hex(from).max(told)..hex(to).max(told);
        told = range.end;
        (!range.is_empty()).then_some(range)
    };
    maps.lines().filter_map(range).collect()
}
