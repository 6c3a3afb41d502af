//! System calls of some threads that another thread decides about (`seccomp_unotify(2)`).

use std::io::{Error, Result};
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};

use crate::common::rest;

/// Calls that are handed over, by their numbers.
#[allow(dead_code)] // each test binary uses a part of it
pub enum Calls<'a> {
    Only(&'a [libc::c_long]),
    AllBut(&'a [libc::c_long]),
}

/// Installs a filter that hands calls of this thread, and of those that it starts, to whoever has
/// the descriptor. It stays as long as the thread.
pub fn hand_over(calls: &Calls<'_>) -> Result<i32> {
    const LOAD_NUMBER: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const ALLOW: u32 = 0x7fff_0000;
    const NOTIFY: u32 = 0x7fc0_0000;
    const SET_MODE_FILTER: u32 = 1;
    const NEW_LISTENER: u32 = 8;
    let (listed, of_these, of_others) = match calls {
        Calls::Only(listed) => (listed, NOTIFY, ALLOW),
        Calls::AllBut(listed) => (listed, ALLOW, NOTIFY),
    };
    let op = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
    let mut program = vec![op(LOAD_NUMBER, 0, 0)];
    for call in *listed {
        program.extend([op(JUMP_IF_EQUAL, 1, *call as u32), op(RETURN, 0, of_these)]);
    }
    program.push(op(RETURN, 0, of_others));
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the kernel copies the program.
    let fd = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(libc::SYS_seccomp, SET_MODE_FILTER, NEW_LISTENER, &raw const filter)
    };
    if fd < 0 { Err(Error::last_os_error()) } else { Ok(fd as i32) }
}

/// Decides about the calls that a filter hands over, until the process ends. `decide` returns the
/// error with which a call fails, or 0 for one that goes on. It must not allocate if the allocator
/// makes such calls, because the caller may have its lock. The descriptor is that of
/// [`hand_over`], as soon as it is not negative.
pub fn supervise(listener: &AtomicI32, mut decide: impl FnMut(&libc::seccomp_data) -> i32) {
    /// `SECCOMP_IOCTL_NOTIF_RECV` and `_SEND` of `include/uapi/linux/seccomp.h`.
    const RECEIVE: libc::c_ulong = 0xc050_2100;
    const SEND: libc::c_ulong = 0xc018_2101;
    const GO_ON: u32 = 1;
    loop {
        let fd = listener.load(SeqCst);
        if fd < 0 {
            rest();
            continue;
        }
        // SAFETY: zeroes are a valid value, and the kernel asks for them.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one structure. If the thread has been interrupted, it repeats
        // the call.
        if unsafe { libc::ioctl(fd, RECEIVE as _, &raw mut call) } != 0 {
            continue;
        }
        let error = decide(&call.data);
        let flags = if error == 0 { GO_ON } else { 0 };
        let answer = libc::seccomp_notif_resp { id: call.id, val: 0, error: -error, flags };
        // SAFETY: the kernel reads one structure.
        unsafe { libc::ioctl(fd, SEND as _, &raw const answer) };
    }
}
