//! The place of each thread, in a thread-specific value.
//!
//! The value's destructor gives the place back, because it runs however the thread ends: by
//! returning, by `pthread_exit`, or by cancellation. Counts may be too low for a moment, between
//! this destructor and the real end.

use core::ffi::c_void;
use core::ptr;
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::Relaxed;

use super::functions::{get_specific, key_create, set_specific};
use super::places::PLACES;

/// The key of the value by which the end of a thread is noticed. The value is the place of the
/// thread plus one, and [`CHOSEN`] if the thread has chosen CPUs.
static KEY: AtomicU32 = AtomicU32::new(0);
const CHOSEN: usize = 1 << (usize::BITS - 1);

/// Makes the key, and returns whether it is made.
pub(super) fn make_key() -> bool {
    let mut key = 0;
    // SAFETY: the call writes the key; the destructor is a function of this library, which is never
    // unloaded.
    let made = key_create().map(|create| unsafe { create(&raw mut key, ended) });
    if made == Some(0) {
        KEY.store(key, Relaxed);
    }
    made == Some(0)
}

/// Notices the end of a thread.
unsafe extern "C" fn ended(value: *mut c_void) {
    PLACES.give_back((value.addr() & !CHOSEN).wrapping_sub(1));
}

/// The place of the calling thread, unless it has chosen CPUs since.
pub(super) fn own_place() -> Option<usize> {
    own_value().checked_sub(1).filter(|place| place & CHOSEN == 0)
}

/// The value of the calling thread; zero if it has no place.
pub(super) fn own_value() -> usize {
    let Some(get) = get_specific().filter(|_| PLACES.number() > 0) else { return 0 };
    // SAFETY: the key is one that was made, because there are places.
    unsafe { get(KEY.load(Relaxed)) }.addr()
}

/// Notes a value for the calling thread, and returns whether it is noted.
pub(super) fn set_value(value: usize) -> bool {
    let value = ptr::without_provenance(value);
    // SAFETY: the key is one that was made, because there are places.
    set_specific().is_some_and(|set| unsafe { set(KEY.load(Relaxed), value) } == 0)
}

/// Notes that the calling thread has chosen CPUs.
pub(super) fn note_choice() {
    let value = own_value();
    if value != 0 {
        set_value(value | CHOSEN);
    }
}
