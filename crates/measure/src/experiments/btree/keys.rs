//! Keys, and the values that follow from them.

use crate::random::scattered;

/// The least bit of the number of a key that is loaded. Keys between two loaded ones are inserted.
pub(super) const GAP_BITS: u32 = 24;
/// No key is updated as often. A value from which more updates follow is wrong.
const MOST_UPDATES: u64 = 1 << 32;

/// The key at a place in the order of all keys that are loaded.
pub(super) fn loaded_key(place: u64) -> u64 {
    (place + 1) << GAP_BITS
}

/// The value of a key that was updated this often.
pub(super) fn value(key: u64, times: u64) -> u64 {
    scattered(key).wrapping_add(times)
}

/// Whether a key can have this value.
pub(super) fn is_right(key: u64, found: u64) -> bool {
    found.wrapping_sub(value(key, 0)) < MOST_UPDATES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_tell_wrong_words() {
        let key = loaded_key(5);
        assert!(is_right(key, value(key, 0)) && is_right(key, value(key, 1 << 20)));
        for wrong in [0, u64::MAX, value(loaded_key(6), 0), value(key, 0).wrapping_sub(1)] {
            assert!(!is_right(key, wrong), "{wrong:#x}");
        }
    }
}
