//! Waits for descriptors.

use std::mem::MaybeUninit;
use std::os::fd::RawFd;

use crate::errno::{Errno, check};

/// Waits until a descriptor is readable, for at most `ms` milliseconds, or until a signal comes
/// (`poll(2)`). Returns for each descriptor whether it has something to read: bytes, an end or an
/// error. Negative numbers stand for no descriptor. Allocates nothing.
///
/// `poll(2)` refuses more descriptors than the process may have open (RLIMIT_NOFILE), and a program
/// may lower that limit at any time. Then this uses `select(2)`, which knows no such limit.
pub fn wait_readable<const N: usize>(descriptors: [RawFd; N], ms: i32) -> [bool; N] {
    let mut polled = descriptors.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    // SAFETY: the array outlives the call.
    let found = check(unsafe { libc::poll(polled.as_mut_ptr(), N as libc::nfds_t, ms) }.into());
    match found {
        Err(Errno(libc::EINVAL)) => select_readable(descriptors, ms),
        _ => polled.map(|one| one.revents != 0),
    }
}

/// The same by `select(2)`. The library's descriptors have small numbers
/// ([`out_of_the_way`](crate::out_of_the_way)), even if the program has some thousand.
fn select_readable<const N: usize>(descriptors: [RawFd; N], ms: i32) -> [bool; N] {
    const BITS: usize = libc::c_ulong::BITS as usize;
    const WORDS: usize = 1 << 10;
    /// How long to sleep when `select(2)` fails, in milliseconds.
    const PAUSE_MS: libc::c_long = 1;
    let place = |fd: RawFd| {
        let fd = usize::try_from(fd).ok().filter(|fd| *fd < WORDS * BITS)?;
        Some((fd / BITS, 1 << (fd % BITS)))
    };
    let mut wanted: [libc::c_ulong; WORDS] = [0; WORDS];
    for (word, bit) in descriptors.into_iter().filter_map(place) {
        wanted[word] |= bit;
    }
    let time =
        |ms: libc::c_long| libc::timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 };
    let (limit, none) = (time(ms.max(0).into()), std::ptr::null_mut::<libc::fd_set>());
    let end = descriptors.into_iter().max().map_or(0, |most| most.saturating_add(1));
    // SAFETY: the kernel reads and writes one bit for each number below `end`, all in the array.
    let found = check(unsafe {
        let wanted = wanted.as_mut_ptr().cast::<libc::fd_set>();
        let end = end.min((WORDS * BITS) as libc::c_int);
        libc::pselect(end, wanted, none, none, &limit, std::ptr::null()).into()
    });
    if found.is_ok() {
        return descriptors.map(|fd| place(fd).is_some_and(|(word, bit)| wanted[word] & bit != 0));
    }
    // A number stands for no file, which the caller will notice, or a signal has come.
    let mut rest = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: the call reads one struct and may write one.
    unsafe { libc::nanosleep(&time(PAUSE_MS.min(ms.max(0).into())), rest.as_mut_ptr()) };
    descriptors.map(|_| false)
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;
    use crate::Event;

    #[test]
    fn both_ways_see_the_same() {
        let events = [Event::new().unwrap(), Event::new().unwrap()];
        let [one, other] = events.each_ref().map(|event| event.as_fd().as_raw_fd());
        let both = |wanted: [RawFd; 3], expected: [bool; 3]| {
            assert_eq!(wait_readable(wanted, 0), expected);
            assert_eq!(select_readable(wanted, 0), expected);
        };
        both([one, -1, other], [false, false, false]);
        assert!(events[1].signal());
        both([one, -1, other], [false, false, true]);
        assert_eq!(select_readable([one, other], 60_000), [false, true]);
        assert!(events[0].signal());
        both([one, -1, other], [true, false, true]);
        both([-1; 3], [false; 3]);
    }
}
