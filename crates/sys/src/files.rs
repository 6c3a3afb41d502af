//! Opening files below a directory without ever leaving it: `openat2(2)`, and the calls that a walk
//! without `openat2` needs.

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr::NonNull;

use crate::errno::{Errno, check, check_descriptor};

/// Opens `path` below `directory`, such that no step of the resolution leaves `directory` or
/// follows a symbolic link (`openat2(2)` with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS, Linux 5.6).
///
/// `flags` are those of `open(2)`, without O_CREAT. The descriptor is always close-on-exec.
///
/// # Errors
/// ELOOP: there is a symbolic link on the path. EXDEV: the path leaves `directory` by `..`. ENOSYS:
/// the kernel is older than 5.6. ENOSYS or EPERM: a seccomp filter does not know the call.
/// Otherwise those of `open(2)`.
#[doc(alias = "openat2")]
pub fn open_beneath(
    directory: BorrowedFd,
    path: &CStr,
    flags: libc::c_int,
) -> Result<OwnedFd, Errno> {
    // SAFETY: all fields are integers, and zero is the documented default of each.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (flags | libc::O_CLOEXEC) as u64;
    how.resolve = libc::RESOLVE_BENEATH | libc::RESOLVE_NO_SYMLINKS;
    // SAFETY: the call only reads the path and the struct, and both outlive it. The size is the
    // struct's. The call returns a new descriptor.
    unsafe {
        check_descriptor(libc::syscall(
            libc::SYS_openat2,
            directory.as_raw_fd(),
            path.as_ptr(),
            &raw const how,
            size_of::<libc::open_how>(),
        ))
    }
}

/// Opens one entry of `directory` (`openat(2)`). `name` contains no `/`.
///
/// The call never follows a symbolic link. With O_PATH it opens the link itself. The descriptor is
/// always close-on-exec.
///
/// # Errors
/// ELOOP: `name` is a symbolic link, and `flags` lack O_PATH. Otherwise those of `open(2)`.
pub fn open_entry(
    directory: BorrowedFd,
    name: &CStr,
    flags: libc::c_int,
) -> Result<OwnedFd, Errno> {
    let flags = flags | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    // SAFETY: the name outlives the call. Without O_CREAT there is no mode argument. The call
    // returns a new descriptor.
    unsafe { check_descriptor(libc::openat(directory.as_raw_fd(), name.as_ptr(), flags).into()) }
}

/// The target of a symbolic link that was opened with O_PATH (`readlinkat(2)` with an empty path,
/// Linux 2.6.39).
///
/// # Errors
/// ENAMETOOLONG: the target has `PATH_MAX` bytes or more. The kernel does not resolve such links
/// either. ENOENT: the descriptor is not a symbolic link.
pub fn link_target(link: BorrowedFd) -> Result<CString, Errno> {
    let mut target = vec![0u8; libc::PATH_MAX as usize];
    // SAFETY: the kernel writes at most `target.len()` bytes into the buffer. The empty path
    // outlives the call.
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

/// The entries of a directory, in the kernel's order, without `.` and `..` (`readdir(3)`, which
/// calls `getdents64(2)`).
pub struct Entries(NonNull<libc::DIR>);

impl Entries {
    /// Lists a directory that is open for reading.
    ///
    /// # Errors
    /// ENOTDIR: the descriptor is not a directory. EBADF: it was opened with O_PATH. ENOMEM: no
    /// memory for the stream.
    pub fn of(directory: OwnedFd) -> Result<Entries, Errno> {
        let fd = directory.into_raw_fd();
        // SAFETY: this function owns the descriptor and passes it on.
        match NonNull::new(unsafe { libc::fdopendir(fd) }) {
            Some(stream) => Ok(Entries(stream)),
            None => {
                let errno = Errno::last();
                // SAFETY: `fdopendir` has failed, and then it does not take the descriptor.
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
            // SAFETY: `errno` belongs to the calling thread. `readdir64` sets it on an error and
            // leaves it alone at the end of the stream.
            unsafe { *libc::__errno_location() = 0 };
            // SAFETY: the stream is open until `drop`, and `&mut self` keeps other threads away.
            let entry = unsafe { libc::readdir64(self.0.as_ptr()) };
            if entry.is_null() {
                return match Errno::last() {
                    Errno(0) => None,
                    errno => Some(Err(errno)),
                };
            }
            // SAFETY: the entry and its zero-terminated name are valid until the next call on this
            // stream. The name is copied before that.
            let name = unsafe { CStr::from_ptr((&raw const (*entry).d_name).cast()) };
            if name != c"." && name != c".." {
                return Some(Ok(name.to_owned()));
            }
        }
    }
}

impl Drop for Entries {
    fn drop(&mut self) {
        // SAFETY: nothing uses the stream after `drop`.
        unsafe { libc::closedir(self.0.as_ptr()) };
    }
}
