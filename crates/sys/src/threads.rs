//! Threads that start with what memory there is. Those of the standard library set up a signal
//! stack when they begin, and end the process if that fails: a library must not, whose host has
//! used up its mappings or its address space.

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;

use crate::errno::Errno;

/// Bytes of a thread's stack, which are reserved and used as needed: as many as the standard
/// library gives.
const STACK_BYTES: usize = 2 << 20;

type Body = Box<dyn FnOnce() + Send>;

/// A thread that somebody must join or leave alone. Dropped, it does what [`Thread::detach`] does,
/// but its memory is not given back when it has ended.
#[must_use]
pub struct Thread(libc::pthread_t);

// SAFETY: an identifier, which any thread may join.
unsafe impl Send for Thread {}

impl Thread {
    /// Starts a thread of that name, which has at most 15 bytes (`pthread_create(3)`: EAGAIN
    /// without memory, mappings or permission for another thread). It has no signal stack, so it
    /// ends the process by an ordinary SIGSEGV if its stack overflows. It blocks all signals but
    /// those that a fault raises, so that handlers of the program never run on it, perhaps while it
    /// holds an area closed. `body` must not unwind: the process is aborted.
    pub fn start(
        name: &'static CStr,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<Thread, Errno> {
        let body: Box<Body> = Box::new(Box::new(move || {
            // SAFETY: the call reads the name. A name is not worth an error.
            unsafe { libc::pthread_setname_np(libc::pthread_self(), name.as_ptr()) };
            body();
        }));
        let argument = Box::into_raw(body);
        create(argument.cast()).map(Thread).inspect_err(|_| {
            // SAFETY: no thread has it.
            drop(unsafe { Box::from_raw(argument) });
        })
    }

    /// Waits until it has ended.
    pub fn join(self) {
        // SAFETY: it is joinable: nobody else joins or detaches it.
        let error = unsafe { libc::pthread_join(self.0, std::ptr::null_mut()) };
        assert_eq!(error, 0, "pthread_join of a joinable thread");
    }

    /// Lets it end by itself.
    pub fn detach(self) {
        // SAFETY: as in `join`.
        unsafe { libc::pthread_detach(self.0) };
    }
}

/// A thread that runs `run` with this argument, which it takes over unless this fails.
fn create(argument: *mut c_void) -> Result<libc::pthread_t, Errno> {
    let check = |error| if error == 0 { Ok(()) } else { Err(Errno(error)) };
    let mut thread = MaybeUninit::uninit();
    // Miri has no attributes.
    if cfg!(miri) {
        // SAFETY: without attributes; the caller has made the argument for `run`.
        check(unsafe {
            libc::pthread_create(thread.as_mut_ptr(), std::ptr::null(), run, argument)
        })?;
    } else {
        let mut attributes = MaybeUninit::uninit();
        // SAFETY: the call initialises them.
        check(unsafe { libc::pthread_attr_init(attributes.as_mut_ptr()) })?;
        // SAFETY: they are initialised, and destroyed once; the caller has made the argument for
        // `run`.
        check(unsafe {
            libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), STACK_BYTES);
            let error = without_signals(|| {
                libc::pthread_create(thread.as_mut_ptr(), attributes.as_ptr(), run, argument)
            });
            libc::pthread_attr_destroy(attributes.as_mut_ptr());
            error
        })?;
    }
    // SAFETY: a call that succeeds has written it.
    Ok(unsafe { thread.assume_init() })
}

/// All signals but those that a fault raises: those for which a program has handlers, or waits.
fn application_signals() -> libc::sigset_t {
    // SAFETY: fills a set of this function.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut set);
        // SIGSYS is what a seccomp filter raises whose handler emulates calls.
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
        set
    }
}

/// Makes a call with these blocked, and only these: a thread that begins in it inherits that,
/// whatever its caller blocks.
fn without_signals<T>(call: impl FnOnce() -> T) -> T {
    // SAFETY: changes the mask of the calling thread only, and back.
    unsafe {
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_SETMASK, &application_signals(), &mut before);
        let result = call();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        result
    }
}

extern "C" fn run(argument: *mut c_void) -> *mut c_void {
    // SAFETY: made from a box by `start`, for this thread alone.
    let body = unsafe { Box::from_raw(argument.cast::<Body>()) };
    body();
    std::ptr::null_mut()
}
