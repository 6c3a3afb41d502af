//! Descriptors of this library that other code of the process may close, and whose numbers it may
//! reuse.
//!
//! A descriptor is a number in a table that all code of the process shares. A daemon that closes
//! all numbers, or code that closes one twice, also closes those of this library, and the next
//! `open` may get the same number. So each use first compares the file behind the number with the
//! file that was there at first.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use crate::errno::{Errno, check, check_descriptor};
use crate::process::{Resource, resource_limit};
use crate::wait::wait_readable;

/// The identity of the file that a descriptor stands for: device, inode, type and seals.
///
/// Memory files, pipes and userfaultfds (since Linux 5.12) have inodes of their own. All eventfds
/// share one inode, and so do all descriptors of one file of `/proc`; these cannot be told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
    kind: u32,
    /// `None` for files that cannot have seals.
    seals: Option<i32>,
}

impl FileIdentity {
    /// The file that a number stands for now (`fstat(2)`, and `fcntl(2)` with F_GET_SEALS).
    /// Allocates nothing.
    ///
    /// # Errors
    /// EBADF: the number stands for nothing.
    pub fn of(descriptor: RawFd) -> Result<FileIdentity, Errno> {
        Ok(FileIdentity { seals: seals_of(descriptor), ..FileIdentity::by_stat(descriptor)? })
    }

    /// Whether a number still stands for this file: one `fstat(2)`, and one `fcntl(2)` if the file
    /// has seals. Allocates nothing.
    pub fn is_of(&self, descriptor: RawFd) -> bool {
        FileIdentity::by_stat(descriptor)
            .is_ok_and(|now| FileIdentity { seals: self.seals, ..now } == *self)
            && self.seals.is_none_or(|seals| seals_of(descriptor) == Some(seals))
    }

    /// Without the seals.
    fn by_stat(descriptor: RawFd) -> Result<FileIdentity, Errno> {
        let mut found = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: the kernel fills the struct, or the call fails.
        let found = unsafe {
            check(libc::fstat(descriptor, found.as_mut_ptr()).into())?;
            found.assume_init()
        };
        let kind = found.st_mode & libc::S_IFMT;
        Ok(FileIdentity { device: found.st_dev, inode: found.st_ino, kind, seals: None })
    }
}

fn seals_of(descriptor: RawFd) -> Option<i32> {
    // SAFETY: the call takes no pointers. Files that cannot have seals give EINVAL.
    let seals = unsafe { libc::fcntl(descriptor, libc::F_GET_SEALS) };
    (seals >= 0).then_some(seals)
}

/// Moves a descriptor to a number that the program is unlikely to get when the number has been
/// closed. The kernel gives the lowest free number, so this is one in the upper quarter of the
/// numbers that the process may open (`fcntl(2)` with F_DUPFD_CLOEXEC). If none is free there, it
/// keeps its number.
pub fn out_of_the_way(descriptor: OwnedFd) -> OwnedFd {
    /// The start of the upper quarter, as of the last reading of the limit; 0 before the first one.
    static FROM: AtomicI32 = AtomicI32::new(0);
    let last = FROM.load(Ordering::Relaxed);
    if last > 0
        && let Ok(duplicate) = duplicate_above(&descriptor, last)
    {
        return duplicate;
    }
    // The limit may be lower by now.
    let from = upper_quarter();
    FROM.store(from, Ordering::Relaxed);
    duplicate_above(&descriptor, from).unwrap_or(descriptor)
}

/// The start of the upper quarter of the numbers that the process may open.
fn upper_quarter() -> RawFd {
    /// Beyond this, the kernel's table of descriptors would become large.
    const MOST: u64 = 1024;
    let limit = resource_limit(Resource::OpenFiles).ok().and_then(|limit| limit.soft);
    (limit.unwrap_or(MOST).min(MOST) * 3 / 4) as RawFd
}

fn duplicate_above(descriptor: &OwnedFd, from: RawFd) -> Result<OwnedFd, Errno> {
    let fd = descriptor.as_raw_fd();
    // SAFETY: the call takes no pointers, and returns a new descriptor.
    unsafe { check_descriptor(libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, from).into()) }
}

/// A descriptor of this library that remembers its file. The number is used and closed only while
/// it stands for that file. A short race remains between the check and the use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kept {
    number: RawFd,
    identity: FileIdentity,
}

impl Kept {
    /// Keeps a descriptor, under a number out of the way ([`out_of_the_way`]).
    ///
    /// # Errors
    /// EBADF: it has been closed already.
    pub fn new(descriptor: OwnedFd) -> Result<Kept, Errno> {
        let descriptor = out_of_the_way(descriptor);
        let identity = FileIdentity::of(descriptor.as_raw_fd())?;
        Ok(Kept { number: descriptor.into_raw_fd(), identity })
    }

    /// Its number.
    pub fn number(&self) -> RawFd {
        self.number
    }

    /// Whether the number still stands for the file.
    pub fn is_ours(&self) -> bool {
        self.identity.is_of(self.number)
    }

    /// Device and inode of the file, as `/proc/PID/maps` shows them, also when the descriptor has
    /// been closed.
    pub fn device_and_inode(&self) -> (u64, u64) {
        (self.identity.device, self.identity.inode)
    }

    /// Whether the number stands for any file.
    pub fn is_open(&self) -> bool {
        FileIdentity::of(self.number).is_ok()
    }

    /// Borrows the descriptor without checking that it is still this library's.
    ///
    /// # Safety
    /// [`Kept::close`] has not been called.
    pub unsafe fn borrow<'a>(&self) -> BorrowedFd<'a> {
        // SAFETY: the caller vouches that this library has not closed it. If the program has, calls
        // fail with EBADF or reach a file of the program; `is_ours` tells beforehand.
        unsafe { BorrowedFd::borrow_raw(self.number) }
    }

    /// Closes it, if it is still this library's. Returns whether it was.
    ///
    /// # Safety
    /// Called once, and nothing uses the descriptor any more.
    pub unsafe fn close(self) -> bool {
        let is_ours = self.is_ours();
        if is_ours {
            // SAFETY: the number is this library's, and the caller vouches for the rest.
            drop(unsafe { OwnedFd::from_raw_fd(self.number) });
        }
        is_ours
    }
}

/// A [`Kept`] descriptor that is closed when it is dropped, if it is still this library's.
#[derive(Debug)]
pub struct KeptFd(Kept);

impl KeptFd {
    /// Keeps a descriptor.
    ///
    /// # Errors
    /// Those of [`Kept::new`].
    pub fn new(descriptor: OwnedFd) -> Result<KeptFd, Errno> {
        Kept::new(descriptor).map(KeptFd)
    }

    /// The kept descriptor, for code that lives no longer than this value.
    pub fn kept(&self) -> Kept {
        self.0
    }

    /// Whether the number still stands for the file.
    pub fn is_ours(&self) -> bool {
        self.0.is_ours()
    }

    /// Reads from a position of the file (`pread(2)`), if the number still stands for it.
    ///
    /// # Errors
    /// EBADF: it does not.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> Result<usize, Errno> {
        if !self.is_ours() {
            return Err(Errno(libc::EBADF));
        }
        let (to, len) = (into.as_mut_ptr().cast(), into.len());
        // SAFETY: the kernel writes at most `len` bytes into the buffer.
        check(
            unsafe { libc::pread(self.0.number(), to, len, offset as libc::off_t) } as libc::c_long
        )
    }

    /// Gives up the ownership: the caller closes the descriptor by [`Kept::close`].
    pub fn into_kept(self) -> Kept {
        std::mem::ManuallyDrop::new(self).0
    }
}

impl AsFd for KeptFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: it is closed by `drop` only.
        unsafe { self.0.borrow() }
    }
}

impl AsRawFd for KeptFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.number()
    }
}

impl Drop for KeptFd {
    fn drop(&mut self) {
        // SAFETY: nothing borrows it any more.
        unsafe { self.0.close() };
    }
}

/// A pidfd: names one process, and never another one that gets the same number later
/// (`pidfd_open(2)`, Linux 5.3).
#[derive(Debug)]
pub struct PidFd(KeptFd);

impl PidFd {
    /// Opens the process with this number.
    ///
    /// # Errors
    /// ESRCH: there is no such process. EINVAL: the number is that of a thread. ENOSYS or EPERM: a
    /// seccomp filter refuses the call. EMFILE, ENFILE: too many open files.
    pub fn open(pid: i32) -> Result<PidFd, Errno> {
        // SAFETY: the call takes no pointers.
        let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
        // SAFETY: the kernel has just made the descriptor, and nobody else has it.
        KeptFd::new(unsafe { OwnedFd::from_raw_fd(fd as i32) }).map(PidFd)
    }

    /// Whether all threads of the process have ended. `false` also if other code of this process
    /// has closed the descriptor.
    pub fn has_ended(&self) -> bool {
        self.wait_for_end(0)
    }

    /// Waits until all threads of the process have ended, for at most `ms` milliseconds, or until a
    /// signal comes. Returns whether they have. `false` also if other code of this process has
    /// closed the descriptor.
    pub fn wait_for_end(&self, ms: i32) -> bool {
        if !self.0.is_ours() {
            return false;
        }
        wait_readable([self.0.as_raw_fd()], ms) == [true]
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;

    fn memory_file(name: &std::ffi::CStr) -> Kept {
        Kept::new(crate::memfd_create(name, None).unwrap()).unwrap()
    }

    #[test]
    fn a_number_that_stands_for_another_file_is_not_ours() {
        let kept = memory_file(c"ours");
        assert!(kept.is_ours());
        // SAFETY: the number is this test's.
        unsafe { libc::close(kept.number()) };
        assert!(!kept.is_ours());
        // Another memory file under the same number.
        let other = crate::memfd_create(c"theirs", None).unwrap();
        // SAFETY: as above; nothing else has the number.
        assert!(unsafe { libc::dup2(other.as_raw_fd(), kept.number()) } >= 0);
        assert!(!kept.is_ours());
        // It is not closed.
        // SAFETY: nothing uses it any more.
        assert!(!unsafe { kept.close() });
        // SAFETY: the test's own duplicate.
        assert_eq!(unsafe { libc::close(kept.number()) }, 0);
    }

    #[test]
    fn numbers_are_out_of_the_way_of_new_files() {
        let kept = memory_file(c"ours");
        let number = kept.number();
        // SAFETY: nothing uses it any more.
        assert!(unsafe { kept.close() });
        let mut new = File::open("/dev/zero").unwrap();
        assert_ne!(new.as_raw_fd(), number);
        new.read_exact(&mut [0]).unwrap();
    }
}
