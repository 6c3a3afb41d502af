//! The beginning of a thread, which the creator pins before the thread's function runs.
//!
//! The new thread waits instead of the creator, which runs already and needs a few microseconds. If
//! the creator does not come back from the real function, because a signal handler jumps away, the
//! new thread goes on after a second.

use core::ffi::{c_int, c_long, c_void};
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{Acquire, Release};

use super::affinity::{Cpus, have_affinity, inherits_no_choice, set_affinity};
use super::functions::{Routine, free, malloc, sched_yield, syscall};
use super::places::PLACES;
use super::value::set_value;

/// The beginning of a thread: its function, and its place. The creator owns it until it sets the
/// state to [`SETTLED`]; from then on the thread owns it.
struct Beginning {
    routine: Routine,
    argument: *mut c_void,
    place: usize,
    is_pinned: bool,
    state: AtomicU32,
}

/// The creator is at work.
const CREATED: u32 = 0;
/// The creator is at work, and the new thread sleeps.
const SLEEPS: u32 = 1;
/// The creator has done its work.
const SETTLED: u32 = 2;

/// Seconds and nanoseconds as the kernel takes them.
#[repr(C)]
struct Time(c_long, c_long);

/// The number of `futex(2)`, on machines where it takes a [`Time`].
const FUTEX: Option<c_long> = if cfg!(not(target_pointer_width = "64")) {
    None
} else if cfg!(target_arch = "x86_64") {
    Some(202)
} else if cfg!(any(target_arch = "aarch64", target_arch = "riscv64")) {
    Some(98)
} else {
    None
};
/// `FUTEX_WAIT` and `FUTEX_WAKE` among threads of one process.
const WAIT: c_int = 128;
const WAKE: c_int = 129;

/// Waits until the creator has done its work, and returns whether it has. It is no point of
/// cancellation.
fn is_settled(state: &AtomicU32) -> bool {
    if state.compare_exchange(CREATED, SLEEPS, Acquire, Acquire).is_err() {
        return true;
    }
    let most = Time(0, 10_000_000);
    // Signals interrupt the sleep.
    for _ in 0..if FUTEX.is_some() { 100 } else { 1_000_000 } {
        // SAFETY: the one call reads the state and the time, and the other takes no pointers.
        unsafe {
            match FUTEX {
                Some(futex) => syscall(futex, state.as_ptr(), WAIT, SLEEPS, &raw const most),
                None => sched_yield().into(),
            };
        }
        if state.load(Acquire) == SETTLED {
            return true;
        }
    }
    false
}

impl Beginning {
    /// A beginning for a thread with these attributes; `None` if it is left alone.
    ///
    /// # Safety
    /// The attributes are null, or initialised.
    unsafe fn of(
        attributes: *const c_void,
        routine: Routine,
        argument: *mut c_void,
    ) -> Option<*mut Beginning> {
        // SAFETY: forwarded to the caller.
        if PLACES.number() == 0 || unsafe { have_affinity(attributes) } || !inherits_no_choice() {
            return None;
        }
        // SAFETY: the call takes no pointers.
        let memory = unsafe { malloc(size_of::<Beginning>()) }.cast::<Beginning>();
        let place = PLACES.take().filter(|_| !memory.is_null());
        let Some(place) = place else {
            // SAFETY: the memory is from malloc, or null.
            unsafe { free(memory.cast()) };
            return None;
        };
        // SAFETY: malloc returns memory of this size, aligned for every type.
        unsafe {
            memory.write(Beginning {
                routine,
                argument,
                place,
                is_pinned: false,
                state: AtomicU32::new(CREATED),
            });
        }
        Some(memory)
    }

    /// Undoes the beginning of a thread that was not created.
    ///
    /// # Safety
    /// It is from [`Beginning::of`], and is used nowhere else.
    unsafe fn drop(this: *mut Beginning) {
        // SAFETY: forwarded to the caller.
        unsafe {
            PLACES.give_back((*this).place);
            free(this.cast());
        }
    }

    /// Pins the new thread, which waits for that, and lets it go on.
    ///
    /// # Safety
    /// It is from [`Beginning::of`], the thread was created with it, and this is called once.
    #[inline(never)]
    unsafe fn settle(this: *mut Beginning, thread: usize) {
        // SAFETY: the thread only reads the state until that is set. After that it owns the memory,
        // whose address alone is used.
        unsafe {
            let cpu = PLACES.cpu((*this).place);
            (*this).is_pinned = cpu.is_some_and(|cpu| set_affinity(Some(thread), Cpus::One(cpu)));
            let state = &raw const (*this).state;
            let before = (*state).swap(SETTLED, Release);
            if let Some(futex) = FUTEX.filter(|_| before == SLEEPS) {
                syscall(futex, state, WAKE, 1);
            }
        }
    }

    /// Waits for the pin of the calling thread, and returns its function and the argument.
    ///
    /// # Safety
    /// It is from [`Beginning::of`], and the calling thread was created with it.
    #[inline(never)]
    unsafe fn begin(this: *mut c_void) -> (Routine, *mut c_void) {
        let this = this.cast::<Beginning>();
        // SAFETY: forwarded to the caller. The creator writes none of these fields.
        let (routine, argument, place) =
            unsafe { ((*this).routine, (*this).argument, (*this).place) };
        // SAFETY: forwarded to the caller. Memory that the creator may still use is lost.
        let is_pinned = unsafe {
            let is_settled = is_settled(&(*this).state);
            let is_pinned = is_settled && (*this).is_pinned;
            if is_settled {
                free(this.cast());
            }
            is_pinned
        };
        if !is_pinned || !set_value(place + 1) {
            PLACES.give_back(place);
        }
        (routine, argument)
    }
}

/// The function of each pinned thread.
unsafe extern "C" fn start(beginning: *mut c_void) -> *mut c_void {
    // SAFETY: the thread was created with a beginning of its own.
    let (routine, argument) = unsafe { Beginning::begin(beginning) };
    // SAFETY: the program has asked for this call. Nothing is dropped if it unwinds, which
    // pthread_exit does.
    unsafe { routine(argument) }
}

/// Creates a thread by `create`, which gets the routine and its argument, and writes the thread's
/// handle.
///
/// # Safety
/// The attributes are null, or initialised, and `thread` has room for a handle.
pub(super) unsafe fn created(
    thread: *const c_void,
    attributes: *const c_void,
    routine: Routine,
    argument: *mut c_void,
    create: impl FnOnce(Routine, *mut c_void) -> c_int,
) -> c_int {
    // SAFETY: forwarded to the caller.
    match unsafe { Beginning::of(attributes, routine, argument) } {
        None => create(routine, argument),
        Some(beginning) => {
            let failed = create(start, beginning.cast());
            // SAFETY: no thread was created that uses the beginning, or one that waits for its pin,
            // whose handle the call has written. Handles of C11 are those of POSIX.
            unsafe {
                match failed {
                    0 => Beginning::settle(beginning, thread.cast::<usize>().read()),
                    _ => Beginning::drop(beginning),
                }
            }
            failed
        }
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn a_new_thread_waits_for_its_creator_but_not_for_ever() {
        let state = AtomicU32::new(SETTLED);
        assert!(is_settled(&state));
        state.store(CREATED, Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while state.load(Relaxed) != SLEEPS {
                    std::thread::yield_now();
                }
                state.store(SETTLED, Release);
            });
            assert!(is_settled(&state));
        });
        state.store(CREATED, Relaxed);
        assert!(!is_settled(&state), "the creator never comes back");
    }
}
