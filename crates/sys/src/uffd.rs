//! userfaultfd: descriptors by three ways, the handshake, registration, waking, messages
//! (`userfaultfd(2)`, `ioctl_userfaultfd(2)`).
//!
//! Structures and numbers are those of `include/uapi/linux/userfaultfd.h`, Linux 6.18.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::errno::{Errno, check};

/// The version of the interface that every kernel speaks.
const UFFD_API: u64 = 0xaa;
/// Only faults of user code are handled: none that the kernel has on the process' behalf (Linux
/// 5.11).
const UFFD_USER_MODE_ONLY: libc::c_int = 1;

/// `_IO(0xAA, 0)`: a descriptor from `/dev/userfaultfd` (Linux 6.1).
const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;
/// `_IOWR(0xAA, 0x3f, struct uffdio_api)`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
/// `_IOWR(0xAA, 0, struct uffdio_register)`.
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
/// `_IOR(0xAA, 1, struct uffdio_range)`.
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_aa01;

/// `_IOR(0xAA, 2, struct uffdio_range)`.
const UFFDIO_WAKE: libc::c_ulong = 0x8010_aa02;
/// `_IOWR(0xAA, 6, struct uffdio_writeprotect)`.
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;
/// `UFFDIO_WRITEPROTECT_MODE_WP`.
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
/// `UFFD_EVENT_PAGEFAULT`.
const EVENT_PAGEFAULT: u8 = 0x12;
/// `UFFD_PAGEFAULT_FLAG_WP`: a write to a protected page.
const PAGEFAULT_FLAG_WP: u64 = 1 << 1;

/// `struct uffd_msg`, as it is for a page fault.
#[repr(C)]
#[derive(Clone, Copy)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u64,
}

/// Feature bits of the handshake (`UFFD_FEATURE_*`).
pub mod uffd_feature {
    /// Write-protection of anonymous memory (Linux 5.7).
    pub const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
    /// Children made by `fork` are announced; asks for CAP_SYS_PTRACE (Linux 4.11).
    pub const EVENT_FORK: u64 = 1 << 1;
    /// `mremap` is announced, and waits until that has been read (Linux 4.11).
    pub const EVENT_REMAP: u64 = 1 << 2;
    /// Discarded pages are announced (Linux 4.11).
    pub const EVENT_REMOVE: u64 = 1 << 3;
    /// Missing pages of hugetlb memory (Linux 4.11).
    pub const MISSING_HUGETLBFS: u64 = 1 << 4;
    /// Missing pages of shared memory (Linux 4.11).
    pub const MISSING_SHMEM: u64 = 1 << 5;
    /// `munmap` is announced (Linux 4.11).
    pub const EVENT_UNMAP: u64 = 1 << 6;
    /// SIGBUS instead of a message (Linux 4.14).
    pub const SIGBUS: u64 = 1 << 7;
    /// Messages name the thread (Linux 4.14).
    pub const THREAD_ID: u64 = 1 << 8;
    /// Present but unmapped pages of hugetlb memory (Linux 5.13).
    pub const MINOR_HUGETLBFS: u64 = 1 << 9;
    /// The same of shared memory (Linux 5.14).
    pub const MINOR_SHMEM: u64 = 1 << 10;
    /// Messages have the address to the byte (Linux 5.18).
    pub const EXACT_ADDRESS: u64 = 1 << 11;
    /// Write-protection of hugetlb and shared memory (Linux 5.19).
    pub const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
    /// Write-protection reaches pages that are not there yet (Linux 6.4).
    pub const WP_UNPOPULATED: u64 = 1 << 13;
    /// Pages that raise SIGBUS when touched (Linux 6.6).
    pub const POISON: u64 = 1 << 14;
    /// Writes lift the protection without a message: dirty tracking (Linux 6.7).
    pub const WP_ASYNC: u64 = 1 << 15;
    /// Pages of anonymous memory move to another address without a copy (Linux 6.8).
    pub const MOVE: u64 = 1 << 16;
}

/// What a registration asks for (`UFFDIO_REGISTER_MODE_*`); bits that may be joined.
pub mod uffd_mode {
    /// Faults on missing pages.
    pub const MISSING: u64 = 1 << 0;
    /// Writes to write-protected pages (Linux 5.7).
    pub const WP: u64 = 1 << 1;
    /// Faults on pages that are present in the file but not mapped (Linux 5.13).
    pub const MINOR: u64 = 1 << 2;
}

#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioRange {
    start: u64,
    len: u64,
}

#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioWriteProtect {
    range: UffdioRange,
    mode: u64,
}

/// Flags of every descriptor made here: children do not inherit it across `exec`, reading never
/// blocks.
const fn flags(user_mode_only: bool) -> libc::c_int {
    libc::O_CLOEXEC | libc::O_NONBLOCK | if user_mode_only { UFFD_USER_MODE_ONLY } else { 0 }
}

/// Makes a descriptor by the system call. With `user_mode_only` the kernel's own accesses to
/// registered memory fail with EFAULT instead of waiting; without it the call needs CAP_SYS_PTRACE
/// or `vm.unprivileged_userfaultfd=1` (EPERM).
pub fn userfaultfd(user_mode_only: bool) -> Result<OwnedFd, Errno> {
    // SAFETY: the call touches no memory.
    let fd = check(unsafe { libc::syscall(libc::SYS_userfaultfd, flags(user_mode_only)) })?;
    // SAFETY: the kernel just gave us this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// The same through an open `/dev/userfaultfd`, whose file permissions take the place of the
/// privilege (Linux 6.1).
pub fn userfaultfd_from_device(
    device: BorrowedFd<'_>,
    user_mode_only: bool,
) -> Result<OwnedFd, Errno> {
    // SAFETY: the request takes a number, no pointer.
    let fd = check(unsafe {
        libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW as _, flags(user_mode_only)).into()
    })?;
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// The handshake, possible once per descriptor: asks for `features` and returns all that the kernel
/// has. EINVAL for an unknown one, EPERM for [`uffd_feature::EVENT_FORK`] without CAP_SYS_PTRACE.
/// Some kernels between 6.4 and 6.6 ignore unknown features: look at what is returned.
pub fn uffd_handshake(uffd: BorrowedFd<'_>, features: u64) -> Result<u64, Errno> {
    let mut api = UffdioApi { api: UFFD_API, features, ioctls: 0 };
    // SAFETY: reads and writes the struct, which outlives the call.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API as _, &mut api).into() })?;
    Ok(api.features)
}

/// Registers `[addr, addr + len)`; returns the requests that are possible on it (bit N: request N).
///
/// # Safety
/// The caller owns the range. Threads that touch it wait for whoever serves the descriptor.
pub unsafe fn uffd_register(
    uffd: BorrowedFd<'_>,
    addr: usize,
    len: usize,
    mode: u64,
) -> Result<u64, Errno> {
    let range = UffdioRange { start: addr as u64, len: len as u64 };
    let mut register = UffdioRegister { range, mode, ioctls: 0 };
    // SAFETY: reads and writes the struct, which outlives the call; the rest is forwarded to the
    // caller.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_REGISTER as _, &mut register).into() })?;
    Ok(register.ioctls)
}

/// Ends a registration, and its write-protection with it.
pub fn uffd_unregister(uffd: BorrowedFd<'_>, addr: usize, len: usize) -> Result<(), Errno> {
    let mut range = UffdioRange { start: addr as u64, len: len as u64 };
    // SAFETY: reads the struct, which outlives the call.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_UNREGISTER as _, &mut range).into() })
        .map(drop)
}

/// Has every thread go on that waits for a page of `[addr, addr + len)`; it repeats its access.
/// Whether anything is registered, or even mapped, there now does not matter.
pub fn uffd_wake(uffd: BorrowedFd<'_>, addr: usize, len: usize) -> Result<(), Errno> {
    let mut range = UffdioRange { start: addr as u64, len: len as u64 };
    // SAFETY: reads the struct, which outlives the call.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WAKE as _, &mut range).into() }).map(drop)
}

/// Lifts that protection and has everybody go on who waits for it. Page table entries stay
/// read-only: the next write has one more fault.
pub fn uffd_let_write(uffd: BorrowedFd<'_>, addr: usize, len: usize) -> Result<(), Errno> {
    let range = UffdioRange { start: addr as u64, len: len as u64 };
    let mut protect = UffdioWriteProtect { range, mode: 0 };
    // SAFETY: reads the struct, which outlives the call.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WRITEPROTECT as _, &mut protect).into() })
        .map(drop)
}

/// Write-protects `[addr, addr + len)`, registered with [`uffd_mode::WP`]. Huge pages of shared
/// memory are mapped by base pages from then on (page by page as they are touched). EAGAIN while an
/// `mremap` of registered memory waits for its message to be read.
///
/// # Safety
/// The caller owns the range.
pub unsafe fn uffd_write_protect(
    uffd: BorrowedFd<'_>,
    addr: usize,
    len: usize,
) -> Result<(), Errno> {
    let range = UffdioRange { start: addr as u64, len: len as u64 };
    let mut protect = UffdioWriteProtect { range, mode: WRITEPROTECT_MODE_WP };
    // SAFETY: reads the struct, which outlives the call; the rest is forwarded to the caller.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WRITEPROTECT as _, &mut protect).into() })
        .map(drop)
}

/// Reads all messages that there are. That is all that an announced event asks for: the call that
/// caused it goes on. Whoever waits for a page goes on waiting; `write` gets the address of each
/// write to a protected page. Allocates nothing.
pub fn uffd_drain(uffd: BorrowedFd<'_>, write: &mut dyn FnMut(usize)) {
    let mut messages = [Message { event: 0, reserved: [0; 7], flags: 0, address: 0, thread: 0 }; 8];
    loop {
        // SAFETY: the kernel writes whole messages into the buffer. The descriptor does not block.
        let read = unsafe {
            libc::read(uffd.as_raw_fd(), messages.as_mut_ptr().cast(), size_of_val(&messages))
        };
        let Some(read @ 1..) = usize::try_from(read).ok() else { return };
        for message in &messages[..read / size_of::<Message>()] {
            if message.event == EVENT_PAGEFAULT && message.flags & PAGEFAULT_FLAG_WP != 0 {
                write(message.address as usize);
            }
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::mem::{offset_of, size_of};
    use std::os::fd::AsFd;

    use super::*;
    use linux_raw_sys::general as uapi;

    #[test]
    fn layouts_and_numbers_are_the_kernels() {
        assert_eq!(size_of::<UffdioApi>(), size_of::<uapi::uffdio_api>());
        assert_eq!(offset_of!(UffdioApi, features), offset_of!(uapi::uffdio_api, features));
        assert_eq!(size_of::<UffdioRange>(), size_of::<uapi::uffdio_range>());
        assert_eq!(size_of::<UffdioRegister>(), size_of::<uapi::uffdio_register>());
        assert_eq!(offset_of!(UffdioRegister, mode), offset_of!(uapi::uffdio_register, mode));
        let request = |direction: u32, number: u32, bytes: usize| {
            libc::c_ulong::from(direction << 30 | (bytes as u32) << 16 | 0xaa << 8 | number)
        };
        assert_eq!(UFFDIO_API, request(3, uapi::_UFFDIO_API, size_of::<UffdioApi>()));
        assert_eq!(
            UFFDIO_REGISTER,
            request(3, uapi::_UFFDIO_REGISTER, size_of::<UffdioRegister>())
        );
        assert_eq!(
            UFFDIO_UNREGISTER,
            request(2, uapi::_UFFDIO_UNREGISTER, size_of::<UffdioRange>())
        );
        assert_eq!(UFFDIO_WAKE, request(2, uapi::_UFFDIO_WAKE, size_of::<UffdioRange>()));
        assert_eq!(
            UFFDIO_WRITEPROTECT,
            request(3, uapi::_UFFDIO_WRITEPROTECT, size_of::<UffdioWriteProtect>())
        );
        assert_eq!(size_of::<UffdioWriteProtect>(), size_of::<uapi::uffdio_writeprotect>());
        assert_eq!(size_of::<Message>(), size_of::<uapi::uffd_msg>());
        assert_eq!(offset_of!(Message, flags), offset_of!(uapi::uffd_msg, arg.pagefault.flags));
        assert_eq!(offset_of!(Message, address), offset_of!(uapi::uffd_msg, arg.pagefault.address));
        assert_eq!(EVENT_PAGEFAULT as u32, uapi::UFFD_EVENT_PAGEFAULT);
        assert_eq!(PAGEFAULT_FLAG_WP, u64::from(uapi::UFFD_PAGEFAULT_FLAG_WP));
        assert_eq!(UFFD_USER_MODE_ONLY as u32, uapi::UFFD_USER_MODE_ONLY);
        for (ours, theirs) in [
            (uffd_feature::PAGEFAULT_FLAG_WP, uapi::UFFD_FEATURE_PAGEFAULT_FLAG_WP),
            (uffd_feature::EVENT_FORK, uapi::UFFD_FEATURE_EVENT_FORK),
            (uffd_feature::EVENT_REMAP, uapi::UFFD_FEATURE_EVENT_REMAP),
            (uffd_feature::EVENT_REMOVE, uapi::UFFD_FEATURE_EVENT_REMOVE),
            (uffd_feature::MISSING_HUGETLBFS, uapi::UFFD_FEATURE_MISSING_HUGETLBFS),
            (uffd_feature::MISSING_SHMEM, uapi::UFFD_FEATURE_MISSING_SHMEM),
            (uffd_feature::EVENT_UNMAP, uapi::UFFD_FEATURE_EVENT_UNMAP),
            (uffd_feature::SIGBUS, uapi::UFFD_FEATURE_SIGBUS),
            (uffd_feature::THREAD_ID, uapi::UFFD_FEATURE_THREAD_ID),
            (uffd_feature::MINOR_HUGETLBFS, uapi::UFFD_FEATURE_MINOR_HUGETLBFS),
            (uffd_feature::MINOR_SHMEM, uapi::UFFD_FEATURE_MINOR_SHMEM),
            (uffd_feature::EXACT_ADDRESS, uapi::UFFD_FEATURE_EXACT_ADDRESS),
            (uffd_feature::WP_HUGETLBFS_SHMEM, uapi::UFFD_FEATURE_WP_HUGETLBFS_SHMEM),
            (uffd_feature::WP_UNPOPULATED, uapi::UFFD_FEATURE_WP_UNPOPULATED),
            (uffd_feature::POISON, uapi::UFFD_FEATURE_POISON),
            (uffd_feature::WP_ASYNC, uapi::UFFD_FEATURE_WP_ASYNC),
            (uffd_feature::MOVE, uapi::UFFD_FEATURE_MOVE),
        ] {
            assert_eq!(ours, u64::from(theirs));
        }
    }

    #[test]
    fn a_descriptor_shakes_hands_once() {
        // Without privilege this is the one way; where even it is refused there is nothing to test.
        let Ok(uffd) = userfaultfd(true) else { return };
        let features = uffd_handshake(uffd.as_fd(), 0).unwrap();
        assert_ne!(features & uffd_feature::SIGBUS, 0);
        let other = userfaultfd(true).unwrap();
        assert_eq!(uffd_handshake(other.as_fd(), 1 << 63), Err(Errno(libc::EINVAL)));
    }
}
