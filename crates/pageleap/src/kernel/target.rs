//! The process whose pages move, and whether it still runs the program whose memory was read.

use std::fs::File;
use std::os::fd::AsFd;

use pageleap_sys::{Errno, KeptFd, PageQuery, PageRegion, PidFd, page_is, pagemap_scan};

use super::call::{Calls, Kernel};
use crate::error::Error;
use crate::job::area::Reason;
use crate::process::{self, Image, NumberForCalls, ProcessMemory};
use crate::units::BASE_PAGE;

/// Bits of an entry of `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;

/// A process, with the descriptors that tell whether it has ended or runs another program.
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) calls: Box<dyn Calls>,
    /// `None` for this process, and where a seccomp filter refuses the call; then only the start
    /// time tells.
    pidfd: Option<PidFd>,
    /// `None` for this process.
    image: Option<Image>,
    pagemap: Option<KeptFd>,
}

impl Process {
    /// Opens the process whose memory was read.
    ///
    /// # Errors
    /// If it has ended or runs another program since, or this process may not move its pages.
    pub(super) fn open(memory: &ProcessMemory) -> Result<Process, Error> {
        let pid = memory.pid;
        let number = NumberForCalls::of(pid)?;
        let own = number.is_own();
        // Opened before the start time is compared, so that both are about one process.
        let pidfd = match PidFd::open(pid as i32) {
            _ if own => None,
            Ok(pidfd) => Some(pidfd),
            Err(errno @ Errno(libc::EMFILE | libc::ENFILE)) => {
                let error = std::io::Error::from_raw_os_error(errno.0);
                return Err(Error::system_file(&format!("/proc/{pid}"), &error));
            }
            // It has ended, or a seccomp filter refuses the call.
            Err(_) => None,
        };
        // The thread through which the memory was read may have ended since.
        let thread = Image::of(pid).map_or(pid, |now| now.thread);
        let path = process::by_thread(pid, thread, "pagemap");
        let pagemap = match File::open(&path) {
            Ok(file) => KeptFd::new(file.into()).ok(),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                return Err(Error::system_file(&path, &error));
            }
            Err(_) => None,
        };
        let found = Process {
            pid,
            calls: Box::new(Kernel(number)),
            pidfd,
            image: (!own).then(|| memory.image.clone()),
            pagemap,
        };
        match found.calls.query(&[], &mut []) {
            _ if found.is_gone() => Err(process::ended(pid)),
            // `/proc` shows the process, but the kernel does not know its number.
            Err(Errno(libc::ESRCH)) => Err(process::other_namespace(pid)),
            Err(Errno(libc::EINVAL)) => Err(Error::BadArgument {
                what: "process",
                reason: format!(
                    "process {pid} has no memory: it is a thread of the kernel, or is ending"
                ),
                remedy: "name a process with memory".into(),
            }),
            Err(errno) => Err(process::may_not_ask(pid, &errno.to_string())),
            Ok(()) => Ok(found),
        }
    }

    /// A process with modelled memory. It ends when its calls say so.
    #[cfg(all(test, not(any(shuttle, miri))))]
    pub(super) fn modelled(pid: u32, calls: Box<dyn Calls>) -> Process {
        Process { pid, calls, pidfd: None, image: None, pagemap: None }
    }

    /// Whether it has ended, or runs another program than when its memory was read.
    pub(super) fn is_gone(&self) -> bool {
        let Some(image) = &self.image else { return self.calls.has_ended() };
        self.pidfd.as_ref().is_some_and(PidFd::has_ended)
            || self.has_other_memory()
            // A file that cannot be opened (EMFILE) says nothing of the process.
            || Image::of(self.pid).map_or_else(|e| e.is_usage(), |now| !image.may_be(&now))
    }

    /// Whether its memory is no longer the one that it had when it was opened. An open pagemap
    /// belongs to that memory, and is empty once the memory is gone (`pagemap_read` in
    /// fs/proc/task_mmu.c).
    fn has_other_memory(&self) -> bool {
        let mut entry = [0; size_of::<u64>()];
        self.pagemap.as_ref().is_some_and(|file| file.read_at(&mut entry, 0) == Ok(0))
    }

    /// The first page in `page..end` that is present or swapped out; `end` if there is none, and
    /// `page` if that is not known.
    pub(super) fn skip_absent(&self, page: u64, end: u64) -> u64 {
        /// Pagemap entries that are read at a time where the kernel has no PAGEMAP_SCAN.
        const ENTRIES: u64 = 32 << 10;
        let Some(file) = &self.pagemap else { return page };
        let query =
            PageQuery { any_of: page_is::PRESENT | page_is::SWAPPED, ..PageQuery::default() };
        let range = page as usize * BASE_PAGE..end as usize * BASE_PAGE;
        let mut first = [PageRegion::default()];
        // SAFETY: the scan protects nothing.
        match unsafe { pagemap_scan(file.as_fd(), range, 0, &query, &mut first) } {
            Ok((0, _)) => return end,
            Ok(_) => return (first[0].start / BASE_PAGE as u64).clamp(page, end),
            Err(_) => {}
        }
        let mut at = page;
        let mut entries = vec![0u8; ENTRIES as usize * size_of::<u64>()];
        while at < end {
            let wanted = (end - at).min(ENTRIES) as usize * size_of::<u64>();
            let entries = &mut entries[..wanted];
            if file.read_at(entries, at * size_of::<u64>() as u64) != Ok(entries.len()) {
                return at;
            }
            let is_there = |entry: &[u8]| {
                let entry = u64::from_ne_bytes(entry.try_into().expect("eight bytes"));
                entry & (PRESENT | SWAPPED) != 0
            };
            match entries.chunks_exact(size_of::<u64>()).position(is_there) {
                Some(found) => return at + found as u64,
                None => at += (wanted / size_of::<u64>()) as u64,
            }
        }
        end
    }

    /// Whether a huge page maps the page; `None` where the kernel cannot tell (before Linux 6.7).
    pub(super) fn is_huge(&self, page: u64) -> Option<bool> {
        let all_of = page_is::PRESENT | page_is::HUGE;
        let query = PageQuery { all_of, tell: page_is::HUGE, ..PageQuery::default() };
        let range = page as usize * BASE_PAGE..(page as usize + 1) * BASE_PAGE;
        let mut first = [PageRegion::default()];
        let file = self.pagemap.as_ref()?;
        // SAFETY: the scan protects nothing.
        let found = unsafe { pagemap_scan(file.as_fd(), range, 0, &query, &mut first) };
        found.ok().map(|(count, _)| count > 0)
    }

    /// Why consecutive pages have no node, by their pagemap entries.
    pub(super) fn why_absent(&self, first: u64, pages: usize) -> Vec<Reason> {
        let mut entries = vec![0u8; pages * size_of::<u64>()];
        let offset = first * size_of::<u64>() as u64;
        let read = self.pagemap.as_ref().map(|file| file.read_at(&mut entries, offset));
        if read != Some(Ok(entries.len())) {
            return vec![Reason::Absent; pages];
        }
        let reason = |entry: &[u8]| match u64::from_ne_bytes(
            entry.try_into().expect("an entry has eight bytes"),
        ) {
            entry if entry & PRESENT != 0 => Reason::ZeroPage,
            entry if entry & SWAPPED != 0 => Reason::SwappedOut,
            _ => Reason::Absent,
        };
        entries.chunks_exact(size_of::<u64>()).map(reason).collect()
    }

    /// The same for one address.
    pub(super) fn why_absent_at(&self, address: usize) -> Reason {
        self.why_absent((address / BASE_PAGE) as u64, 1)[0]
    }
}
