//! Threads that need no memory but their stack to start.
//!
//! A thread of the standard library sets up a signal stack when it begins, and aborts the process
//! if that fails. A library must not abort its host because that has used up its mappings or its
//! address space.

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use crate::errno::Errno;

/// Bytes of address space for a thread's stack, the same as in the standard library. The kernel
/// backs them with memory as they are used.
const STACK_BYTES: usize = 2 << 20;

type Body = Box<dyn FnOnce() + Send>;

/// A running thread. The owner must call [`Thread::join`] or [`Thread::detach`]. A dropped `Thread`
/// runs on, and its memory is not freed when it ends.
#[must_use]
pub struct Thread(libc::pthread_t);

// SAFETY: the value is only an identifier, and any thread may join it.
unsafe impl Send for Thread {}

impl Thread {
    /// Starts a thread that runs `body` (`pthread_create(3)`). `name` has at most 15 bytes.
    ///
    /// The thread has no signal stack, so an overflow of its stack ends the process by an ordinary
    /// SIGSEGV. The thread blocks all signals except those that a fault raises. The program's
    /// signal handlers therefore never run on it, not even while it holds an area closed.
    ///
    /// `body` must not unwind. If it does, the process is aborted.
    ///
    /// # Errors
    /// EAGAIN: no memory or no mapping is left for the stack, or the process may not have another
    /// thread (`pids.max`, `ulimit -u`), or has no thread-specific key left (PTHREAD_KEYS_MAX).
    pub fn start(
        name: &'static CStr,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<Thread, Errno> {
        let key = mark()?;
        let body: Box<Body> = Box::new(Box::new(move || {
            // SAFETY: the call stores the value, and nothing dereferences it. It fails only for
            // want of memory, and the first keys need none.
            unsafe { libc::pthread_setspecific(key, (&raw const MARK).cast()) };
            // SAFETY: the call only reads the name. A failure is ignored: the name serves debugging
            // only.
            unsafe { libc::pthread_setname_np(libc::pthread_self(), name.as_ptr()) };
            body();
        }));
        let argument = Box::into_raw(body);
        create(argument.cast()).map(Thread).inspect_err(|_| {
            // SAFETY: no thread has started, so the box still belongs to this function.
            drop(unsafe { Box::from_raw(argument) });
        })
    }

    /// Waits until the thread has ended (`pthread_join(3)`).
    pub fn join(self) {
        // SAFETY: the thread is joinable, because `self` is the only right to join or detach it.
        let error = unsafe { libc::pthread_join(self.0, std::ptr::null_mut()) };
        assert_eq!(error, 0, "pthread_join of a joinable thread");
    }

    /// Lets the thread run on and end by itself (`pthread_detach(3)`).
    pub fn detach(self) {
        // SAFETY: the thread is joinable, as in `join`.
        unsafe { libc::pthread_detach(self.0) };
    }
}

/// The value of [`KEY`] in threads of [`Thread::start`].
static MARK: u8 = 0;

/// The thread-specific key with the value [`MARK`]. Reading it neither allocates nor takes a lock.
/// A `thread_local` could allocate if the program loads the library late (dlopen).
static KEY: OnceLock<libc::pthread_key_t> = OnceLock::new();

fn mark() -> Result<libc::pthread_key_t, Errno> {
    if let Some(key) = KEY.get() {
        return Ok(*key);
    }
    let mut key = 0;
    // SAFETY: the call writes one number.
    let error = unsafe { libc::pthread_key_create(&raw mut key, None) };
    if error != 0 {
        return Err(Errno(error));
    }
    if KEY.set(key).is_err() {
        // Another thread was faster. SAFETY: nobody has a value under this key.
        unsafe { libc::pthread_key_delete(key) };
    }
    Ok(*KEY.get().expect("it is set"))
}

/// Whether the calling thread was started by [`Thread::start`] (`pthread_getspecific(3)`).
///
/// It may be called anywhere, even in an allocator or a signal handler: it allocates nothing, takes
/// no lock, and makes no system call. A child made by `fork` has none of these threads.
pub fn is_own_thread() -> bool {
    // SAFETY: the key exists, and is never deleted.
    KEY.get().is_some_and(|key| !unsafe { libc::pthread_getspecific(*key) }.is_null())
}

/// Runs `body` with the calling thread as one of this library's: [`is_own_thread`] is true
/// meanwhile, and the signals that programs handle are blocked, as in a thread of
/// [`Thread::start`]. At the end the thread is as before, even if `body` unwinds.
///
/// # Errors
/// ENOMEM, and EAGAIN: no thread-specific key is left (PTHREAD_KEYS_MAX). Then `body` has not run.
pub fn as_own_thread<T>(body: impl FnOnce() -> T) -> Result<T, Errno> {
    struct Restore {
        key: libc::pthread_key_t,
        mask: libc::sigset_t,
    }
    impl Drop for Restore {
        fn drop(&mut self) {
            // SAFETY: the key exists. The call changes the mask of the calling thread only.
            unsafe {
                libc::pthread_setspecific(self.key, std::ptr::null());
                libc::pthread_sigmask(libc::SIG_SETMASK, &self.mask, std::ptr::null_mut());
            }
        }
    }
    let key = mark()?;
    // SAFETY: zeros are a valid set, which the second call overwrites. The other calls change the
    // calling thread only, and nothing dereferences the value of the key.
    let _restore = unsafe {
        let mut mask: libc::sigset_t = std::mem::zeroed();
        // Blocked first, so that no signal handler of the program runs while the thread is marked.
        libc::pthread_sigmask(libc::SIG_BLOCK, &application_signals(), &raw mut mask);
        let restore = Restore { key, mask };
        match libc::pthread_setspecific(key, (&raw const MARK).cast()) {
            0 => restore,
            error => return Err(Errno(error)),
        }
    };
    Ok(body())
}

/// Starts a thread that runs `run` with `argument`. If the call fails, `argument` still belongs to
/// the caller.
fn create(argument: *mut c_void) -> Result<libc::pthread_t, Errno> {
    let check = |error| if error == 0 { Ok(()) } else { Err(Errno(error)) };
    let mut thread = MaybeUninit::uninit();
    // Miri does not support thread attributes.
    if cfg!(miri) {
        // SAFETY: null means default attributes. The caller has made the argument for `run`.
        check(unsafe {
            libc::pthread_create(thread.as_mut_ptr(), std::ptr::null(), run, argument)
        })?;
    } else {
        let mut attributes = MaybeUninit::uninit();
        // SAFETY: the call initialises the attributes.
        check(unsafe { libc::pthread_attr_init(attributes.as_mut_ptr()) })?;
        // SAFETY: the attributes are initialised, and are destroyed once. The caller has made the
        // argument for `run`.
        check(unsafe {
            libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), STACK_BYTES);
            let error = with_signal_mask(&application_signals(), || {
                libc::pthread_create(thread.as_mut_ptr(), attributes.as_ptr(), run, argument)
            });
            libc::pthread_attr_destroy(attributes.as_mut_ptr());
            error
        })?;
    }
    // SAFETY: the call has succeeded, so it has written the identifier.
    Ok(unsafe { thread.assume_init() })
}

/// All signals except those that a fault raises. Programs handle the others, or wait for them.
fn application_signals() -> libc::sigset_t {
    let mut set = all_signals();
    // SAFETY: the calls change only the set of this function.
    unsafe {
        // SIGSYS counts as a fault: a seccomp filter raises it, and its handler emulates system
        // calls.
        for fault in [
            libc::SIGSEGV,
            libc::SIGBUS,
            libc::SIGFPE,
            libc::SIGILL,
            libc::SIGTRAP,
            libc::SIGABRT,
            libc::SIGSYS,
        ] {
            libc::sigdelset(&mut set, fault);
        }
    }
    set
}

/// The set of all signals (`sigfillset(3)`).
pub(crate) fn all_signals() -> libc::sigset_t {
    // SAFETY: zeros are a valid set, and the call writes only the set of this function.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut set);
        set
    }
}

/// Runs `call` while exactly the signals of `blocked` are blocked for the calling thread
/// (`pthread_sigmask(3)`). A thread or process that `call` starts inherits this mask, whatever the
/// caller blocks.
pub(crate) fn with_signal_mask<T>(blocked: &libc::sigset_t, call: impl FnOnce() -> T) -> T {
    // SAFETY: the calls change only the mask of the calling thread, and restore it.
    unsafe {
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_SETMASK, blocked, &mut before);
        let result = call();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        result
    }
}

extern "C" fn run(argument: *mut c_void) -> *mut c_void {
    // SAFETY: `start` has made the argument from a box, for this thread alone.
    let body = unsafe { Box::from_raw(argument.cast::<Body>()) };
    body();
    std::ptr::null_mut()
}

/// The addresses of the calling thread's stack; with glibc also of its thread-local memory, if it
/// is not the main thread (`pthread_getattr_np(3)`).
///
/// # Errors
/// ENOMEM, and errors of reading `/proc/self/maps` in the main thread.
pub fn own_stack() -> Result<std::ops::Range<usize>, Errno> {
    // SAFETY: zeros are a valid value, which the first call overwrites. The other calls read it.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        let refused = libc::pthread_getattr_np(libc::pthread_self(), &raw mut attributes);
        if refused != 0 {
            return Err(Errno(refused));
        }
        let (mut start, mut len) = (std::ptr::null_mut(), 0);
        libc::pthread_attr_getstack(&raw const attributes, &raw mut start, &raw mut len);
        libc::pthread_attr_destroy(&raw mut attributes);
        Ok(start.addr()..start.addr() + len)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_thread_of_the_program_is_ours_for_a_while() {
        let blocks = |signal| unsafe {
            // SAFETY: zeros are a valid set, which the call overwrites.
            let mut mask: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut mask);
            libc::sigismember(&raw const mask, signal) == 1
        };
        std::thread::spawn(move || {
            let seen =
                as_own_thread(|| (is_own_thread(), blocks(libc::SIGUSR1), blocks(libc::SIGSEGV)));
            assert_eq!(seen, Ok((true, true, false)));
            assert!(!is_own_thread() && !blocks(libc::SIGUSR1));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn threads_know_whose_they_are() {
        let (say, said) = channel();
        let thread = Thread::start(c"own", move || say.send(is_own_thread()).unwrap()).unwrap();
        assert_eq!(said.recv(), Ok(true));
        thread.join();
        assert!(!is_own_thread());
        // A marked thread may have had the same stack before.
        assert!(!std::thread::spawn(is_own_thread).join().unwrap());
    }
}
