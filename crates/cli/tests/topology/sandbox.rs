//! Sandboxes for the command: what it may call, and what it may list.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Installs a seccomp filter for this process and its children, and checks that it works.
pub fn refuse_openat2(errno: i32) -> io::Result<()> {
    let statement =
        |code: u32, k: u32, jf: u8| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    let filter = [
        // The filter's input begins with the number of the system call.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_openat2 as u32, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno as u32, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the kernel copies the filter, which outlives the calls. The kernel refuses the last
    // call before it looks at the arguments.
    let refused = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
            && libc::syscall(libc::SYS_openat2, -1, 0, 0, 0) == -1
    };
    let error = io::Error::last_os_error();
    if refused && error.raw_os_error() == Some(errno) { Ok(()) } else { Err(error) }
}

/// The right to list a directory (`LANDLOCK_ACCESS_FS_READ_DIR`).
const READ_DIR: u64 = 1 << 3;
/// Makes the call tell the version of Landlock (`LANDLOCK_CREATE_RULESET_VERSION`).
const TELL_VERSION: u32 = 1;
/// A rule about what lies below a directory (`LANDLOCK_RULE_PATH_BENEATH`).
const PATH_BENEATH: u32 = 1;

/// `struct landlock_path_beneath_attr`.
#[repr(C, packed)]
struct PathBeneath {
    allowed: u64,
    parent: libc::c_int,
}

/// Whether the kernel has Landlock (Linux 5.13), and it is switched on.
pub fn has_landlock() -> bool {
    let nothing = std::ptr::null::<u64>();
    // SAFETY: without a ruleset the call only tells the version.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, nothing, 0, TELL_VERSION) > 0 }
}

/// Lets this process and its children list only directories below `places`.
pub fn list_only<const N: usize>(places: [&CStr; N]) -> io::Result<()> {
    // The first field of `landlock_ruleset_attr`, and its size.
    let handled = READ_DIR;
    // SAFETY: the kernel reads the field, which outlives the call.
    let made = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, &raw const handled, size_of::<u64>(), 0)
    };
    let ruleset = owned(made)?;
    for place in places {
        // SAFETY: the path ends with zero.
        let parent = owned(unsafe { libc::open(place.as_ptr(), libc::O_PATH) }.into())?;
        let rule = PathBeneath { allowed: READ_DIR, parent: parent.as_raw_fd() };
        let (ruleset, rule) = (ruleset.as_raw_fd(), &raw const rule);
        // SAFETY: the kernel reads the rule, which outlives the call.
        let added =
            unsafe { libc::syscall(libc::SYS_landlock_add_rule, ruleset, PATH_BENEATH, rule, 0) };
        checked(added)?;
    }
    // SAFETY: neither call takes a pointer.
    unsafe {
        checked(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())?;
        checked(libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0))?;
    }
    Ok(())
}

fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    let descriptor = checked(result)?;
    // SAFETY: the call has just made the descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as libc::c_int) })
}

fn checked(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
