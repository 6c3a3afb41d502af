//! The CPUs on which a thread may run: asked, compared, pinned to one and unpinned.
//!
//! Programs start others from a child that shares their memory and has a stack of a page or two. So
//! sets of CPUs are compared word by word, and the only one on the stack has 128 bytes, unless the
//! machine may have more than 1,024 CPUs.

use core::ffi::{c_ulong, c_void};
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::Relaxed;

use super::functions::{
    attributes_affinity, real_pthread_setaffinity, real_sched_getaffinity, real_sched_setaffinity,
};
use super::places::{BITS, FEW, Mask, PLACES, WORDS};
use super::value::own_place;

/// CPUs that this library sets, and compares.
#[derive(Clone, Copy)]
pub(super) enum Cpus {
    /// Those on which the program starts.
    Start,
    /// One alone.
    One(usize),
}

impl Cpus {
    /// A word of their set.
    fn word(self, at: usize) -> c_ulong {
        match self {
            Cpus::Start => PLACES.start(at),
            Cpus::One(cpu) if cpu / BITS == at => 1 << (cpu % BITS),
            Cpus::One(_) => 0,
        }
    }
}

/// Whether the kernel's sets of CPUs have no more than [`FEW`] words.
static ARE_FEW: AtomicBool = AtomicBool::new(false);

/// Finds out how large the kernel's sets of CPUs are.
pub(super) fn find_size() {
    ARE_FEW.store(compare::<FEW>(Cpus::Start).is_some(), Relaxed);
}

/// Whether the calling thread may run on these CPUs and no others; `None` if the kernel does not
/// tell.
fn runs_on(cpus: Cpus) -> Option<bool> {
    match ARE_FEW.load(Relaxed) {
        true => compare::<FEW>(cpus),
        false => compare::<WORDS>(cpus),
    }
}

#[inline(never)]
fn compare<const N: usize>(cpus: Cpus) -> Option<bool> {
    let mut mask: [c_ulong; N] = [0; N];
    // SAFETY: the call writes at most the bytes of the mask.
    let told = unsafe { real_sched_getaffinity()?(0, size_of_val(&mask), mask.as_mut_ptr()) };
    (told == 0).then(|| mask.iter().enumerate().all(|(at, word)| *word == cpus.word(at)))
}

/// Lets the calling thread, or another one, run on these CPUs only, and returns whether it does.
pub(super) fn set_affinity(thread: Option<usize>, cpus: Cpus) -> bool {
    match ARE_FEW.load(Relaxed) {
        true => set::<FEW>(thread, cpus),
        false => set::<WORDS>(thread, cpus),
    }
}

#[inline(never)]
fn set<const N: usize>(thread: Option<usize>, cpus: Cpus) -> bool {
    let mut mask: [c_ulong; N] = [0; N];
    mask.iter_mut().enumerate().for_each(|(at, word)| *word = cpus.word(at));
    let (bytes, mask) = (size_of_val(&mask), mask.as_ptr());
    // SAFETY: the calls read the bytes of the mask, and another thread waits for this one.
    let failed = unsafe {
        match thread {
            None => real_sched_setaffinity().map(|set| set(0, bytes, mask)),
            Some(thread) => real_pthread_setaffinity().map(|set| set(thread, bytes, mask)),
        }
    };
    failed == Some(0)
}

/// The CPU to which the calling thread is pinned, unless it has chosen CPUs since.
pub(super) fn own_pin() -> Option<Cpus> {
    let pin = Cpus::One(PLACES.cpu(own_place()?)?);
    Some(pin).filter(|pin| runs_on(*pin) == Some(true))
}

/// Takes the pin from the calling thread, and returns it.
pub(super) fn unpin() -> Option<Cpus> {
    own_pin().filter(|_| set_affinity(None, Cpus::Start))
}

/// Calls a function that makes a process, or becomes one, without the pin. Whoever gives the thread
/// other CPUs meanwhile has chosen them.
pub(super) fn without_pin<T>(call: impl FnOnce() -> T) -> T {
    let pin = if PLACES.number() > 0 { unpin() } else { None };
    let result = call();
    if let Some(pin) = pin
        && runs_on(Cpus::Start) == Some(true)
    {
        set_affinity(None, pin);
    }
    result
}

/// Whether threads that the calling thread creates would inherit CPUs that nobody has chosen for
/// them: those of the start, or the pin of the creator.
pub(super) fn inherits_no_choice() -> bool {
    own_pin().is_some() || runs_on(Cpus::Start).unwrap_or(true)
}

/// Whether attributes of a thread have an affinity.
///
/// # Safety
/// They are null, or initialised.
#[inline(never)]
pub(super) unsafe fn have_affinity(attributes: *const c_void) -> bool {
    let Some(ask) = attributes_affinity().filter(|_| !attributes.is_null()) else { return false };
    let mut mask: Mask = [0; WORDS];
    // SAFETY: forwarded to the caller; the call writes at most the bytes of the mask. Without an
    // affinity it sets them all.
    let told = unsafe { ask(attributes, size_of::<Mask>(), mask.as_mut_ptr()) };
    told != 0 || mask.iter().any(|word| *word != c_ulong::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_alone_has_one_word() {
        assert_eq!([0, 1, 2].map(|at| Cpus::One(64).word(at)), [0, 1, 0]);
    }
}
