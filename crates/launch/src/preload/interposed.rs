//! The functions that the loader finds here before those of the C library.
//!
//! **Counting CPUs.** Programs call `sched_getaffinity` to learn how many threads to start, and some
//! ask in a thread that they have created: Java's main function runs in one. The answer would be one
//! CPU. So a thread with a pin is told the CPUs on which the program has started. The kernel tells
//! the pin in `/proc/thread-self/status`.

use core::ffi::{c_char, c_int, c_ulong, c_void};
use core::ptr;

use super::affinity::{own_pin, without_pin};
use super::beginning::created;
use super::functions::{
    Routine, Words, pthread_self, real_execv, real_execve, real_execvp, real_execvpe, real_popen,
    real_posix_spawn, real_posix_spawnp, real_pthread_create, real_pthread_getaffinity,
    real_pthread_setaffinity, real_sched_getaffinity, real_sched_setaffinity, real_system,
    real_thrd_create, thread_number,
};
use super::places::{Mask, PLACES};
use super::prepare::prepare;
use super::value::note_choice;

/// Tells the calling thread the CPUs on which the program has started, if it has the pin of this
/// library.
///
/// # Safety
/// The memory has `bytes` bytes, which the kernel has written.
unsafe fn tell_all(bytes: usize, memory: *mut c_ulong) {
    if PLACES.number() > 0 && own_pin().is_some() {
        let all = PLACES.start_words().as_ptr();
        let bytes = if bytes < size_of::<Mask>() { bytes } else { size_of::<Mask>() };
        // SAFETY: forwarded to the caller, and no more bytes than the mask has.
        unsafe { ptr::copy_nonoverlapping(all.cast::<u8>(), memory.cast(), bytes) };
    }
}

/// The CPUs of a thread; those of the program's start for a pinned thread that asks about itself.
///
/// # Safety
/// As `sched_getaffinity(2)` of the C library.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sched_getaffinity(
    thread: c_int,
    bytes: usize,
    mask: *mut c_ulong,
) -> c_int {
    let Some(real) = real_sched_getaffinity() else { return FAILED };
    // SAFETY: forwarded to the caller.
    unsafe {
        let result = real(thread, bytes, mask);
        if result == 0 && thread == 0 {
            tell_all(bytes, mask);
        }
        result
    }
}

/// As [`sched_getaffinity`], for a thread of this process.
///
/// # Safety
/// As `pthread_getaffinity_np(3)` of the C library.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pthread_getaffinity_np(
    thread: usize,
    bytes: usize,
    mask: *mut c_ulong,
) -> c_int {
    let Some(real) = real_pthread_getaffinity() else { return EAGAIN };
    // SAFETY: forwarded to the caller.
    unsafe {
        let result = real(thread, bytes, mask);
        if result == 0 && thread == pthread_self() {
            tell_all(bytes, mask);
        }
        result
    }
}

/// Sets the CPUs of a thread. The calling thread has chosen them from now on.
///
/// # Safety
/// As `sched_setaffinity(2)` of the C library.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sched_setaffinity(
    thread: c_int,
    bytes: usize,
    mask: *const c_ulong,
) -> c_int {
    let Some(real) = real_sched_setaffinity() else { return FAILED };
    // SAFETY: forwarded to the caller; the other call takes no pointers.
    let (result, is_own) = unsafe {
        let is_own = thread == 0 || thread_number().is_some_and(|own| own() == thread);
        (real(thread, bytes, mask), is_own)
    };
    if result == 0 && is_own {
        note_choice();
    }
    result
}

/// As [`sched_setaffinity`], for a thread of this process.
///
/// # Safety
/// As `pthread_setaffinity_np(3)` of the C library.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pthread_setaffinity_np(
    thread: usize,
    bytes: usize,
    mask: *const c_ulong,
) -> c_int {
    let Some(real) = real_pthread_setaffinity() else { return EAGAIN };
    // SAFETY: forwarded to the caller; the other call takes no pointers.
    let (result, is_own) = unsafe { (real(thread, bytes, mask), thread == pthread_self()) };
    if result == 0 && is_own {
        note_choice();
    }
    result
}

/// EAGAIN of Linux, which `pthread_create` returns if it lacks something.
const EAGAIN: c_int = 11;
/// `thrd_error` of C11 in glibc and musl.
const THRD_ERROR: c_int = 2;
/// EINVAL and ENOSYS belong to other failures: a function that another object lacks has this one.
const FAILED: c_int = -1;

/// Creates a thread with a place.
///
/// # Safety
/// As `pthread_create(3)` of the C library.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pthread_create(
    thread: *mut c_void,
    attributes: *const c_void,
    routine: Routine,
    argument: *mut c_void,
) -> c_int {
    prepare();
    let Some(real) = real_pthread_create() else { return EAGAIN };
    // SAFETY: forwarded to the caller.
    unsafe {
        created(thread, attributes, routine, argument, |routine, argument| {
            real(thread, attributes, routine, argument)
        })
    }
}

/// Creates a thread with a place. That of glibc does not come by `pthread_create`.
///
/// # Safety
/// As `thrd_create(3)` of the C library.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn thrd_create(
    thread: *mut c_void,
    routine: Routine,
    argument: *mut c_void,
) -> c_int {
    prepare();
    let Some(real) = real_thrd_create() else { return THRD_ERROR };
    // SAFETY: forwarded to the caller.
    unsafe {
        created(thread, ptr::null(), routine, argument, |routine, argument| {
            real(thread, routine, argument)
        })
    }
}

macro_rules! processes {
    ($($name:ident by $real:ident ($($argument:ident: $kind:ty),*) -> $result:ty, $failed:expr;)*) => {$(
        /// Makes or becomes a process whose main thread has the CPUs of the program's start.
        ///
        /// # Safety
        /// As the function of this name in the C library.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> $result {
            let Some(real) = $real() else { return $failed };
            // SAFETY: forwarded to the caller.
            without_pin(|| unsafe { real($($argument),*) })
        }
    )*};
}

processes! {
    posix_spawn by real_posix_spawn (child: *mut c_int, path: *const c_char, actions: *const c_void,
        attributes: *const c_void, words: Words, environment: Words) -> c_int, EAGAIN;
    posix_spawnp by real_posix_spawnp (child: *mut c_int, name: *const c_char,
        actions: *const c_void, attributes: *const c_void, words: Words, environment: Words)
        -> c_int, EAGAIN;
    system by real_system (line: *const c_char) -> c_int, FAILED;
    popen by real_popen (line: *const c_char, mode: *const c_char) -> *mut c_void, ptr::null_mut();
    execve by real_execve (path: *const c_char, words: Words, environment: Words) -> c_int, FAILED;
    execv by real_execv (path: *const c_char, words: Words) -> c_int, FAILED;
    execvp by real_execvp (name: *const c_char, words: Words) -> c_int, FAILED;
    execvpe by real_execvpe (name: *const c_char, words: Words, environment: Words)
        -> c_int, FAILED;
}
