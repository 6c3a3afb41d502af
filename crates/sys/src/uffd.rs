//! userfaultfd: descriptors from the system call and from the device, the handshake, registration,
//! write-protection, waking and messages (`userfaultfd(2)`, `ioctl_userfaultfd(2)`; Linux 4.3).
//!
//! Structures and numbers are those of `include/uapi/linux/userfaultfd.h`, Linux 6.18.

use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use crate::errno::{Errno, check, check_descriptor};
use crate::wait::wait_readable;

/// The device that gives out descriptors without a privilege, by its file permissions (Linux 6.1).
pub const UFFD_DEVICE: &str = "/dev/userfaultfd";

/// The version of the interface; every kernel has this one.
const UFFD_API: u64 = 0xaa;
/// The descriptor handles faults of user code only, and none that the kernel causes on behalf of
/// the process (Linux 5.11).
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
/// `_IOWR(0xAA, 3, struct uffdio_copy)`.
const UFFDIO_COPY: libc::c_ulong = 0xc028_aa03;
/// `_IOWR(0xAA, 4, struct uffdio_zeropage)`.
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;
/// `_IOWR(0xAA, 5, struct uffdio_move)`.
const UFFDIO_MOVE: libc::c_ulong = 0xc028_aa05;
/// `UFFDIO_COPY_MODE_DONTWAKE`, which is also `UFFDIO_MOVE_MODE_DONTWAKE`.
const MODE_DONTWAKE: u64 = 1 << 0;
/// `_IOWR(0xAA, 6, struct uffdio_writeprotect)`.
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;
/// `UFFDIO_WRITEPROTECT_MODE_WP`.
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
/// `UFFD_EVENT_PAGEFAULT`.
const EVENT_PAGEFAULT: u8 = 0x12;
/// `UFFD_EVENT_REMOVE`.
const EVENT_REMOVE: u8 = 0x15;
/// `UFFD_EVENT_UNMAP`.
const EVENT_UNMAP: u8 = 0x16;
/// `UFFD_PAGEFAULT_FLAG_WP`: the fault is a write to a write-protected page.
const PAGEFAULT_FLAG_WP: u64 = 1 << 1;

/// `struct uffd_msg` with the fields of a page fault. In a message of discarded pages the first
/// two words are the start and the end of the range.
#[repr(C)]
#[derive(Clone, Copy)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u64,
}

/// A message of a userfaultfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UffdMessage {
    /// A thread has faulted on the page at this address, and waits.
    Fault(usize),
    /// Pages from the first address to the second one are about to be discarded
    /// ([`uffd_feature::EVENT_REMOVE`]), or have been unmapped ([`uffd_feature::EVENT_UNMAP`]). The
    /// thread that does so goes on when the message is read.
    Remove(usize, usize),
    /// Any other message.
    Other,
}

impl Message {
    const EMPTY: Message = Message { event: 0, reserved: [0; 7], flags: 0, address: 0, thread: 0 };
}

/// Feature bits of the handshake (`UFFD_FEATURE_*`). The bits can be combined.
pub mod uffd_feature {
    /// Write-protection of anonymous memory (Linux 5.7).
    pub const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
    /// A message for each `fork`. Needs CAP_SYS_PTRACE (Linux 4.11).
    pub const EVENT_FORK: u64 = 1 << 1;
    /// A message for each `mremap`, which waits until the message is read (Linux 4.11).
    pub const EVENT_REMAP: u64 = 1 << 2;
    /// A message for discarded pages (Linux 4.11).
    pub const EVENT_REMOVE: u64 = 1 << 3;
    /// Faults on missing pages of hugetlb memory (Linux 4.11).
    pub const MISSING_HUGETLBFS: u64 = 1 << 4;
    /// Faults on missing pages of shared memory (Linux 4.11).
    pub const MISSING_SHMEM: u64 = 1 << 5;
    /// A message for each `munmap` (Linux 4.11).
    pub const EVENT_UNMAP: u64 = 1 << 6;
    /// A fault raises SIGBUS and sends no message (Linux 4.14).
    pub const SIGBUS: u64 = 1 << 7;
    /// Messages contain the id of the faulting thread (Linux 4.14).
    pub const THREAD_ID: u64 = 1 << 8;
    /// Faults on pages of hugetlb memory that are present in the file but not mapped (Linux 5.13).
    pub const MINOR_HUGETLBFS: u64 = 1 << 9;
    /// Faults on pages of shared memory that are present in the file but not mapped (Linux 5.14).
    pub const MINOR_SHMEM: u64 = 1 << 10;
    /// Messages contain the exact address instead of the start of the page (Linux 5.18).
    pub const EXACT_ADDRESS: u64 = 1 << 11;
    /// Write-protection of hugetlb and shared memory (Linux 5.19).
    pub const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
    /// Write-protection covers pages that are not present yet (Linux 6.4).
    pub const WP_UNPOPULATED: u64 = 1 << 13;
    /// Pages that raise SIGBUS on access (Linux 6.6).
    pub const POISON: u64 = 1 << 14;
    /// A write removes the write-protection and sends no message: dirty tracking (Linux 6.7).
    pub const WP_ASYNC: u64 = 1 << 15;
    /// Moves pages of anonymous memory to another address without a copy (Linux 6.8).
    pub const MOVE: u64 = 1 << 16;
}

/// The faults that a registration covers (`UFFDIO_REGISTER_MODE_*`). The bits can be combined.
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

/// `struct uffdio_copy`, and `struct uffdio_move` with the same fields.
#[repr(C)]
struct UffdioCopy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    done: i64,
}

#[repr(C)]
struct UffdioZeropage {
    range: UffdioRange,
    mode: u64,
    done: i64,
}

#[repr(C)]
struct UffdioWriteProtect {
    range: UffdioRange,
    mode: u64,
}

/// Flags of every descriptor: close-on-exec, and reading never blocks.
const fn flags(user_mode_only: bool) -> libc::c_int {
    libc::O_CLOEXEC | libc::O_NONBLOCK | if user_mode_only { UFFD_USER_MODE_ONLY } else { 0 }
}

/// Makes a descriptor by the system call (`userfaultfd(2)`, Linux 4.3).
///
/// With `user_mode_only` (Linux 5.11) the descriptor handles no faults of the kernel itself.
/// The kernel's accesses to registered memory then fail with EFAULT instead of waiting.
///
/// # Errors
/// EPERM: `user_mode_only` is false, CAP_SYS_PTRACE is missing, and `vm.unprivileged_userfaultfd`
/// is 0; or a seccomp filter refuses the call. EINVAL: the kernel does not know `user_mode_only`.
/// ENOSYS: the kernel has no userfaultfd. EMFILE or ENFILE: too many open files.
pub fn userfaultfd(user_mode_only: bool) -> Result<OwnedFd, Errno> {
    // SAFETY: the call takes no pointers, and returns a new descriptor.
    unsafe { check_descriptor(libc::syscall(libc::SYS_userfaultfd, flags(user_mode_only))) }
}

/// Opens [`UFFD_DEVICE`], which [`userfaultfd_from_device`] asks for a descriptor.
pub fn open_uffd_device() -> Result<OwnedFd, Errno> {
    let opened =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(UFFD_DEVICE);
    Ok(opened.map_err(|e| Errno(e.raw_os_error().unwrap_or(libc::EIO)))?.into())
}

/// Makes a descriptor through an open `/dev/userfaultfd` (`USERFAULTFD_IOC_NEW` of `ioctl(2)`,
/// Linux 6.1). The permissions of the device file take the place of CAP_SYS_PTRACE.
///
/// `user_mode_only` is that of [`userfaultfd`].
///
/// # Errors
/// EMFILE or ENFILE: too many open files. ENOMEM: the kernel has no memory.
pub fn userfaultfd_from_device(
    device: BorrowedFd<'_>,
    user_mode_only: bool,
) -> Result<OwnedFd, Errno> {
    let flags = flags(user_mode_only);
    // SAFETY: the request takes a number and no pointer, and returns a new descriptor.
    unsafe {
        check_descriptor(libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW as _, flags).into())
    }
}

/// Makes a request of `ioctl_userfaultfd(2)`.
///
/// # Safety
/// `argument` is the struct that `request` takes. The caller vouches for the effects of the request
/// on memory.
unsafe fn request<T>(
    uffd: BorrowedFd<'_>,
    request: libc::c_ulong,
    argument: &mut T,
) -> Result<(), Errno> {
    let argument: *mut T = argument;
    // SAFETY: the kernel reads and writes only the struct, which outlives the call.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), request as _, argument).into() }).map(drop)
}

/// Does the handshake, which is possible once per descriptor (`UFFDIO_API`, Linux 4.3). Asks for
/// `features` and returns all features that the kernel has, both of [`uffd_feature`].
///
/// Some kernels between 6.4 and 6.6 ignore features that they do not know. Callers check the
/// returned bits.
///
/// # Errors
/// EINVAL: the kernel does not know a feature, or the handshake is done already. EPERM:
/// [`uffd_feature::EVENT_FORK`] without CAP_SYS_PTRACE.
pub fn uffd_handshake(uffd: BorrowedFd<'_>, features: u64) -> Result<u64, Errno> {
    let mut api = UffdioApi { api: UFFD_API, features, ioctls: 0 };
    // SAFETY: the struct is the one of this request, which changes no memory.
    unsafe { request(uffd, UFFDIO_API, &mut api) }?;
    Ok(api.features)
}

/// Registers `[addr, addr + len)`, in bytes, for the faults of `mode` (`UFFDIO_REGISTER`, Linux
/// 4.3). `mode` is made of [`uffd_mode`].
///
/// Returns the requests that are possible on the range: bit N stands for request number N.
///
/// # Errors
/// EINVAL: the kernel or this kind of memory does not support `mode`, the range has a hole, or it
/// is not page-aligned. EBUSY: another descriptor has registered part of the range. EPERM: the file
/// was opened without write access.
///
/// # Safety
/// The caller owns the range. A thread that faults there waits until the descriptor's owner serves
/// the fault.
pub unsafe fn uffd_register(
    uffd: BorrowedFd<'_>,
    addr: usize,
    len: usize,
    mode: u64,
) -> Result<u64, Errno> {
    let range = UffdioRange { start: addr as u64, len: len as u64 };
    let mut register = UffdioRegister { range, mode, ioctls: 0 };
    // SAFETY: the struct is the one of this request, and the caller owns the range.
    unsafe { request(uffd, UFFDIO_REGISTER, &mut register) }?;
    Ok(register.ioctls)
}

/// Removes the registration of `[addr, addr + len)`, and the write-protection with it
/// (`UFFDIO_UNREGISTER`, Linux 4.3).
///
/// # Errors
/// EINVAL: nothing that userfaultfd supports is mapped there.
pub fn uffd_unregister(uffd: BorrowedFd<'_>, addr: usize, len: usize) -> Result<(), Errno> {
    let mut range = UffdioRange { start: addr as u64, len: len as u64 };
    // SAFETY: the struct is the one of this request, which changes no contents.
    unsafe { request(uffd, UFFDIO_UNREGISTER, &mut range) }
}

/// Wakes every thread that waits for a page of `[addr, addr + len)`; each repeats its access
/// (`UFFDIO_WAKE`, Linux 4.3). The range need not be registered or mapped any more.
///
/// # Errors
/// EINVAL: the range is not page-aligned.
pub fn uffd_wake(uffd: BorrowedFd<'_>, addr: usize, len: usize) -> Result<(), Errno> {
    let mut range = UffdioRange { start: addr as u64, len: len as u64 };
    // SAFETY: the struct is the one of this request, which changes no memory.
    unsafe { request(uffd, UFFDIO_WAKE, &mut range) }
}

/// Removes the write-protection of `[addr, addr + len)` and wakes every thread that waits to write
/// there (`UFFDIO_WRITEPROTECT` without its mode WP; versions as for [`uffd_mode::WP`]).
///
/// The page table entries stay read-only, so the next write faults once more.
///
/// # Errors
/// As for [`uffd_write_protect`].
pub fn uffd_let_write(uffd: BorrowedFd<'_>, addr: usize, len: usize) -> Result<(), Errno> {
    // SAFETY: the kernel changes registered ranges only, and no contents.
    unsafe { write_protect(uffd, addr, len, 0) }
}

/// Write-protects `[addr, addr + len)`, in bytes (`UFFDIO_WRITEPROTECT`). The range is registered
/// with [`uffd_mode::WP`]. Linux 5.7 for anonymous memory, 5.19 for shared and hugetlb memory.
///
/// Base pages then map the huge pages of shared memory, page by page as threads touch them.
///
/// # Errors
/// EAGAIN: an `mremap` of registered memory waits for its message to be read. ENOENT: part of the
/// range is not registered for write-protection.
///
/// # Safety
/// The caller owns the range.
pub unsafe fn uffd_write_protect(
    uffd: BorrowedFd<'_>,
    addr: usize,
    len: usize,
) -> Result<(), Errno> {
    // SAFETY: the caller owns the range.
    unsafe { write_protect(uffd, addr, len, WRITEPROTECT_MODE_WP) }
}

/// Sets or removes the write-protection of a range.
///
/// # Safety
/// The caller owns the range, or the call only removes write-protection.
unsafe fn write_protect(
    uffd: BorrowedFd<'_>,
    addr: usize,
    len: usize,
    mode: u64,
) -> Result<(), Errno> {
    let range = UffdioRange { start: addr as u64, len: len as u64 };
    let mut protect = UffdioWriteProtect { range, mode };
    // SAFETY: the struct is the one of this request, which changes no contents.
    unsafe { request(uffd, UFFDIO_WRITEPROTECT, &mut protect) }
}

/// Moves the pages of private anonymous memory at `[src, src + len)` to the hole at
/// `[dst, dst + len)`, without a copy and without waking (`UFFDIO_MOVE`, Linux 6.8). `dst` lies in
/// memory that is registered with `uffd`. A huge page that is aligned alike on both sides moves as
/// a whole.
///
/// Returns how many bytes have moved, and the error that stopped the call, if any. Pages move in
/// ascending order, and each is in its old place or in its new one.
///
/// # Errors
/// EBUSY: a page is pinned, or shared with another process. ENOENT: a page is not present, or `dst`
/// is not mapped. EEXIST: `dst` has a page. EAGAIN: a thread that changes mappings or discards
/// pages waits for its message to be read, or a page is being migrated. EINVAL: the two mappings
/// differ in access or in locking, one is not private, anonymous and writable, or `dst` is not
/// registered.
///
/// # Safety
/// The caller owns both ranges, or vouches for their users.
pub unsafe fn uffd_move(
    uffd: BorrowedFd<'_>,
    dst: usize,
    src: usize,
    len: usize,
) -> (usize, Option<Errno>) {
    // SAFETY: forwarded to the caller.
    unsafe { fill(uffd, UFFDIO_MOVE, dst, src, len) }
}

/// Fills the hole at `[dst, dst + len)` with new pages that are copies of those at `src`, without
/// waking (`UFFDIO_COPY`, Linux 4.3). Returns the same as [`uffd_move`].
///
/// # Errors
/// ENOENT, EEXIST, EAGAIN: as for [`uffd_move`]. ENOMEM: the kernel has no memory. ESRCH: the
/// process ends.
///
/// # Safety
/// As for [`uffd_move`]; `src` is readable.
pub unsafe fn uffd_copy(
    uffd: BorrowedFd<'_>,
    dst: usize,
    src: usize,
    len: usize,
) -> (usize, Option<Errno>) {
    // SAFETY: forwarded to the caller.
    unsafe { fill(uffd, UFFDIO_COPY, dst, src, len) }
}

/// # Safety
/// As for [`uffd_move`].
unsafe fn fill(
    uffd: BorrowedFd<'_>,
    number: libc::c_ulong,
    dst: usize,
    src: usize,
    len: usize,
) -> (usize, Option<Errno>) {
    let [dst, src, len] = [dst, src, len].map(|n| n as u64);
    let mut copy = UffdioCopy { dst, src, len, mode: MODE_DONTWAKE, done: 0 };
    // SAFETY: the struct is the one of these requests, and the caller owns the ranges.
    let refused = unsafe { request(uffd, number, &mut copy) }.err();
    match (refused, usize::try_from(copy.done)) {
        (None, _) => (len as usize, None),
        // The kernel returns EAGAIN for a request that was done in part.
        (Some(Errno(libc::EAGAIN)), Ok(done)) if done > 0 => (done, refused),
        (Some(errno), _) => (0, Some(errno)),
    }
}

/// Maps the kernel's zero page into the hole at `[addr, addr + len)`, and wakes the threads that
/// wait there (`UFFDIO_ZEROPAGE`, Linux 4.3).
///
/// # Errors
/// EEXIST: a page is there. ENOENT: the range is not registered. EAGAIN: as for [`uffd_move`].
pub fn uffd_zeropage(uffd: BorrowedFd<'_>, addr: usize, len: usize) -> Result<(), Errno> {
    let range = UffdioRange { start: addr as u64, len: len as u64 };
    let mut zeropage = UffdioZeropage { range, mode: 0, done: 0 };
    // SAFETY: the struct is the one of this request, which fills holes of registered ranges only.
    unsafe { request(uffd, UFFDIO_ZEROPAGE, &mut zeropage) }
}

/// Reads a few of the waiting messages, and calls `handle` with each (`read(2)`). Allocates
/// nothing. Returns whether there were any.
pub fn uffd_read(uffd: BorrowedFd<'_>, handle: &mut dyn FnMut(UffdMessage)) -> bool {
    let mut messages = [Message::EMPTY; BATCH];
    let read = read_messages(uffd, &mut messages);
    for message in read {
        handle(match message.event {
            EVENT_PAGEFAULT => UffdMessage::Fault(message.address as usize),
            EVENT_REMOVE | EVENT_UNMAP => {
                UffdMessage::Remove(message.flags as usize, message.address as usize)
            }
            _ => UffdMessage::Other,
        });
    }
    !read.is_empty()
}

/// Reads a few of the waiting messages (`read(2)`), and calls `write` with the address of each
/// write to a write-protected page. Returns whether there were any. Allocates nothing.
///
/// A call such as `mremap` that waits for its message goes on once that is read, and other code may
/// give the descriptor's number to a file of its own right then. So the caller checks the
/// descriptor before each call. A thread that waits for a page stays asleep until [`uffd_wake`] or
/// [`uffd_let_write`].
pub fn uffd_serve_some(uffd: BorrowedFd<'_>, write: &mut dyn FnMut(usize)) -> bool {
    let mut messages = [Message::EMPTY; BATCH];
    let read = read_messages(uffd, &mut messages);
    for message in read {
        if message.event == EVENT_PAGEFAULT && message.flags & PAGEFAULT_FLAG_WP != 0 {
            write(message.address as usize);
        }
    }
    !read.is_empty()
}

/// Reads a few of the waiting messages, and counts the page faults among them: threads that have
/// begun to wait since the last call. Allocates nothing. The threads stay asleep until
/// [`uffd_wake`].
///
/// Makes only one `read(2)`, because threads with a signal pending send their message again and
/// again.
pub fn uffd_count_faults(uffd: BorrowedFd<'_>) -> u64 {
    let mut messages = [Message::EMPTY; BATCH];
    let read = read_messages(uffd, &mut messages);
    read.iter().filter(|message| message.event == EVENT_PAGEFAULT).count() as u64
}

/// Messages of one `read(2)`.
const BATCH: usize = 8;

/// Reads the waiting messages, as far as there is room (`read(2)`). Polls first: a userfaultfd does
/// not block, but its number may stand for a pipe by now, which does.
fn read_messages<'a>(uffd: BorrowedFd<'_>, messages: &'a mut [Message; BATCH]) -> &'a [Message] {
    if wait_readable([uffd.as_raw_fd()], 0) == [false] {
        return &[];
    }
    // SAFETY: the kernel writes whole messages into the buffer.
    let read = unsafe {
        libc::read(uffd.as_raw_fd(), messages.as_mut_ptr().cast(), size_of_val(messages))
    };
    &messages[..usize::try_from(read).unwrap_or(0) / size_of::<Message>()]
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
        assert_eq!(UFFDIO_COPY, request(3, uapi::_UFFDIO_COPY, size_of::<UffdioCopy>()));
        assert_eq!(UFFDIO_MOVE, request(3, uapi::_UFFDIO_MOVE, size_of::<UffdioCopy>()));
        assert_eq!(
            UFFDIO_ZEROPAGE,
            request(3, uapi::_UFFDIO_ZEROPAGE, size_of::<UffdioZeropage>())
        );
        assert_eq!(size_of::<UffdioCopy>(), size_of::<uapi::uffdio_copy>());
        assert_eq!(size_of::<UffdioCopy>(), size_of::<uapi::uffdio_move>());
        assert_eq!(size_of::<UffdioZeropage>(), size_of::<uapi::uffdio_zeropage>());
        assert_eq!(MODE_DONTWAKE, u64::from(uapi::UFFDIO_COPY_MODE_DONTWAKE));
        assert_eq!(EVENT_REMOVE as u32, uapi::UFFD_EVENT_REMOVE);
        assert_eq!(EVENT_UNMAP as u32, uapi::UFFD_EVENT_UNMAP);
        assert_eq!(offset_of!(Message, flags), offset_of!(uapi::uffd_msg, arg.remove.start));
        assert_eq!(offset_of!(Message, address), offset_of!(uapi::uffd_msg, arg.remove.end));
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
        // Without privilege only this kind can be made. Where it is refused too, the test has
        // nothing to check.
        let Ok(uffd) = userfaultfd(true) else { return };
        let features = uffd_handshake(uffd.as_fd(), 0).unwrap();
        assert_ne!(features & uffd_feature::SIGBUS, 0);
        let other = userfaultfd(true).unwrap();
        assert_eq!(uffd_handshake(other.as_fd(), 1 << 63), Err(Errno(libc::EINVAL)));
    }
}
