//! Signals that a call sends to its own thread.

/// Makes a write that exceeds the limit of file sizes (RLIMIT_FSIZE, `ulimit -f`) fail with EFBIG,
/// and do nothing else. The kernel also sends SIGXFSZ to the thread, which ends the process by
/// default; ignoring the signal instead would be inherited by a program that is executed.
///
/// A SIGXFSZ that was waiting before still does so afterwards.
///
/// ```
/// use std::io::Write;
///
/// let mut file = std::fs::File::open("/dev/null")?;
/// let error = pageleap_sys::without_file_size_signal(|| file.write(b"x")).unwrap_err();
/// assert_eq!(error.raw_os_error(), Some(libc::EBADF));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn without_file_size_signal<T>(write: impl FnOnce() -> T) -> T {
    let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the calls read and write sets that live until they are over, and for which zeros are
    // valid. No information about the signal is asked for.
    unsafe {
        let (mut signal, mut pending, mut before): (libc::sigset_t, libc::sigset_t, _) =
            (std::mem::zeroed(), std::mem::zeroed(), std::mem::zeroed());
        libc::sigemptyset(&mut signal);
        libc::sigaddset(&mut signal, libc::SIGXFSZ);
        libc::pthread_sigmask(libc::SIG_BLOCK, &signal, &mut before);
        libc::sigpending(&mut pending);
        let result = write();
        if libc::sigismember(&pending, libc::SIGXFSZ) == 0 {
            libc::sigtimedwait(&signal, std::ptr::null_mut(), &none);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        result
    }
}
