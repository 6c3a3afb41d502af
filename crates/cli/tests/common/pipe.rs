//! A pipe that holds up who writes to it.

use std::io::{PipeReader, PipeWriter, Write, pipe};
use std::os::fd::AsRawFd;

/// A pipe that has no room: who writes to it waits until somebody reads.
pub fn full_pipe() -> (PipeReader, PipeWriter) {
    let (from, to) = pipe().unwrap();
    let waits = |waits: bool| {
        let flags = if waits { 0 } else { libc::O_NONBLOCK };
        // SAFETY: the call takes numbers only.
        assert_eq!(unsafe { libc::fcntl(to.as_raw_fd(), libc::F_SETFL, flags) }, 0);
    };
    waits(false);
    while (&to).write(&[0; 4096]).is_ok() {}
    waits(true);
    (from, to)
}
