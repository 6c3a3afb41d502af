//! Opening files below a folder without leaving it: `openat2(2)` and what a walk without it needs.

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

use crate::errno::{Errno, check};

/// Opens `path` for reading such that no step of the resolution leaves `folder`: absolute links,
/// links and `..` that lead above it, and `/proc`'s magic links fail with `EXDEV` or `ELOOP`. Needs
/// Linux 5.6; older kernels report `ENOSYS`, and seccomp filters that do not know the call `ENOSYS`
/// or `EPERM`. `flags` are those of `open(2)`; descriptors are always close-on-exec.
#[doc(alias = "openat2")]
pub fn open_beneath(folder: BorrowedFd, path: &CStr, flags: libc::c_int) -> Result<OwnedFd, Errno> {
    // SAFETY: zero is a valid value of each field, and the documented default.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (flags | libc::O_CLOEXEC) as u64;
    how.resolve = libc::RESOLVE_BENEATH | libc::RESOLVE_NO_MAGICLINKS;
    // SAFETY: the path and the struct outlive the call, which only reads them; the size is the
    // struct's.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_openat2,
            folder.as_raw_fd(),
            path.as_ptr(),
            &raw const how,
            size_of::<libc::open_how>(),
        )
    };
    // SAFETY: the kernel has just given this descriptor to us.
    check(rc).map(|fd| unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Opens one entry of `folder` (`openat(2)`). `name` must contain no `/`; a link is not followed:
/// with `O_PATH` it is opened itself, else `ELOOP` is the answer.
pub fn open_entry(folder: BorrowedFd, name: &CStr, flags: libc::c_int) -> Result<OwnedFd, Errno> {
    let flags = flags | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    // SAFETY: the name outlives the call. Without O_CREAT there is no mode argument.
    let rc = unsafe { libc::openat(folder.as_raw_fd(), name.as_ptr(), flags) };
    // SAFETY: as above.
    check(rc.into()).map(|fd| unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// The target of a link that was opened with `O_PATH` (`readlinkat(2)` with an empty path, Linux
/// 2.6.39). Targets of `PATH_MAX` bytes and more, which the kernel does not resolve either, give
/// `ENAMETOOLONG`.
pub fn link_target(link: BorrowedFd) -> Result<CString, Errno> {
    let mut target = vec![0u8; libc::PATH_MAX as usize];
    // SAFETY: the kernel writes at most `len` bytes into the buffer; the empty path outlives the
    // call.
    let rc = unsafe {
        libc::readlinkat(link.as_raw_fd(), c"".as_ptr(), target.as_mut_ptr().cast(), target.len())
    };
    let len = check(rc as libc::c_long)?;
    if len == target.len() {
        return Err(Errno(libc::ENAMETOOLONG));
    }
    target.truncate(len);
    CString::new(target).map_err(|_| Errno(libc::EINVAL))
}

/// The entries of a folder, in the kernel's order, without `.` and `..` (`getdents64(2)`).
pub struct Entries(NonNull<libc::DIR>);

impl Entries {
    /// Lists the folder that `folder` has open for reading.
    pub fn of(folder: OwnedFd) -> Result<Entries, Errno> {
        let fd = folder.into_raw_fd();
        // SAFETY: the descriptor is ours to give away.
        match NonNull::new(unsafe { libc::fdopendir(fd) }) {
            Some(stream) => Ok(Entries(stream)),
            None => {
                let errno = Errno::last();
                // SAFETY: `fdopendir` takes the descriptor only when it succeeds.
                drop(unsafe { OwnedFd::from_raw_fd(fd) });
                Err(errno)
            }
        }
    }
}

impl Iterator for Entries {
    type Item = Result<CString, Errno>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            // SAFETY: `errno` is the calling thread's own. The end of the stream leaves it alone,
            // an error sets it.
            unsafe { *libc::__errno_location() = 0 };
            // SAFETY: the stream is open until this is dropped, and `&mut self` keeps other threads
            // away.
            let entry = unsafe { libc::readdir64(self.0.as_ptr()) };
            if entry.is_null() {
                return match Errno::last() {
                    Errno(0) => None,
                    errno => Some(Err(errno)),
                };
            }
            // SAFETY: the entry and its terminated name are valid until the next call on this
            // stream; the name is copied before.
            let name = unsafe { CStr::from_ptr((&raw const (*entry).d_name).cast()) };
            if name != c"." && name != c".." {
                return Some(Ok(name.to_owned()));
            }
        }
    }
}

impl Drop for Entries {
    fn drop(&mut self) {
        // SAFETY: nothing uses the stream afterwards.
        unsafe { libc::closedir(self.0.as_ptr()) };
    }
}
