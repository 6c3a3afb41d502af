//! Seccomp filters like those of containers.

use std::io;

/// What a filter does with the listed calls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Action {
    Errno(i32),
    /// The kernel kills the process.
    #[allow(dead_code)] // each test binary uses a part of it
    Kill,
}

/// The result of a call that returns a negative number on failure and sets errno.
pub fn check(rc: i64) -> io::Result<()> {
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Installs a filter that applies `action` to `calls` and allows all other calls.
pub fn install_filter(action: Action, calls: &[i64]) -> io::Result<()> {
    const LOAD_NUMBER: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const ALLOW: u32 = 0x7fff_0000;
    let verdict = match action {
        Action::Errno(errno) => 0x0005_0000 | errno as u32,
        Action::Kill => 0x8000_0000,
    };
    let op = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
    // On the stack, because nothing may be allocated between fork and exec.
    let mut program = [op(RETURN, 0, ALLOW); 32];
    program[0] = op(LOAD_NUMBER, 0, 0);
    for (i, call) in calls.iter().enumerate() {
        program[1 + 2 * i] = op(JUMP_IF_EQUAL, 1, *call as u32);
        program[2 + 2 * i] = op(RETURN, 0, verdict);
    }
    let len = (2 + 2 * calls.len()) as u16;
    let filter = libc::sock_fprog { len, filter: program.as_mut_ptr() };
    // SAFETY: the program and its header outlive the calls. The kernel copies them.
    unsafe {
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())?;
        let mode = libc::SECCOMP_MODE_FILTER;
        check(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter).into())
    }
}
