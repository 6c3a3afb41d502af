//! The kernel's error number as a value, which a signal handler and a freeze window can carry,
//! because making one allocates nothing.

use std::fmt;
use std::os::fd::{FromRawFd, OwnedFd};

/// A kernel error number (`errno(3)`). Always positive.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl Errno {
    /// The calling thread's `errno`, as the last failed call of the C library left it.
    pub fn last() -> Self {
        Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }

    /// The name of the constant, such as `ENOMEM`, or `errno` for a number outside this list.
    pub fn name(self) -> &'static str {
        match self.0 {
            libc::EPERM => "EPERM",
            libc::ENOENT => "ENOENT",
            libc::EIO => "EIO",
            libc::EBADF => "EBADF",
            libc::EAGAIN => "EAGAIN",
            libc::ENOMEM => "ENOMEM",
            libc::EACCES => "EACCES",
            libc::EFAULT => "EFAULT",
            libc::EBUSY => "EBUSY",
            libc::EEXIST => "EEXIST",
            libc::EXDEV => "EXDEV",
            libc::ENOTDIR => "ENOTDIR",
            libc::ELOOP => "ELOOP",
            libc::EINVAL => "EINVAL",
            libc::ENOTTY => "ENOTTY",
            libc::ENFILE => "ENFILE",
            libc::EMFILE => "EMFILE",
            libc::EFBIG => "EFBIG",
            libc::ENOSPC => "ENOSPC",
            libc::ENOSYS => "ENOSYS",
            libc::EOPNOTSUPP => "EOPNOTSUPP",
            libc::EHWPOISON => "EHWPOISON",
            _ => "errno",
        }
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name(), self.0)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = std::io::Error::from_raw_os_error(self.0).to_string();
        let text = text.split(" (os error").next().unwrap_or_default();
        write!(f, "{} ({text})", self.name())
    }
}

impl std::error::Error for Errno {}

impl From<Errno> for std::io::Error {
    fn from(e: Errno) -> Self {
        std::io::Error::from_raw_os_error(e.0)
    }
}

/// Turns the C convention "-1 and `errno`" into a result.
pub(crate) fn check(rc: libc::c_long) -> Result<usize, Errno> {
    if rc < 0 { Err(Errno::last()) } else { Ok(rc as usize) }
}

/// Takes ownership of a descriptor that a call returned, or reports the error that it returned.
///
/// # Safety
/// `rc` is the result of a call that makes a new descriptor, and no other code has the descriptor.
pub(crate) unsafe fn check_descriptor(rc: libc::c_long) -> Result<OwnedFd, Errno> {
    // SAFETY: the descriptor is new, and no other code has it.
    check(rc).map(|fd| unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
