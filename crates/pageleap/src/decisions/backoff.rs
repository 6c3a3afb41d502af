//! How many triggers a scan skips while scans move nothing.

/// Skips triggers of a scan after scans that moved nothing: 1 after the first, 2 after the second, 4
/// after the third (*Latency-aware page-table migration*, section 4.1.4, where scans without it took
/// up to 42 % of a program's time). A scan that moved something ends that. The bound on the skipped
/// triggers is ours, so that a change is noticed at last.
///
/// ```
/// use pageleap::decisions::BackOff;
///
/// let mut back_off = BackOff::new();
/// let mut scans = Vec::new();
/// for trigger in 0..12 {
///     if back_off.is_due() {
///         scans.push(trigger);
///         back_off.scanned(false); // it moved nothing
///     }
/// }
/// assert_eq!(scans, [0, 2, 5, 10]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackOff {
    /// The exponent of the number of triggers that the next scan skips if it moves nothing.
    next: u32,
    most: u32,
    skip: u64,
}

impl BackOff {
    /// The exponent of [`BackOff::new`].
    pub const MOST: u32 = 6;

    /// A back-off that skips at most 64 triggers in a row: 11 minutes, if one comes every 10 s.
    pub fn new() -> BackOff {
        BackOff::up_to(BackOff::MOST)
    }

    /// A back-off that skips at most 2^`exponent` triggers in a row. Exponents above 63 count as 63.
    pub fn up_to(exponent: u32) -> BackOff {
        BackOff { next: 0, most: exponent.min(63), skip: 0 }
    }

    /// Notes a trigger. Returns whether it is to cause a scan.
    pub fn is_due(&mut self) -> bool {
        let is_due = self.skip == 0;
        self.skip = self.skip.saturating_sub(1);
        is_due
    }

    /// Notes the end of a scan, and whether it has moved anything.
    pub fn scanned(&mut self, moved: bool) {
        if moved {
            (self.next, self.skip) = (0, 0);
        } else {
            self.skip = 1 << self.next;
            self.next = (self.next + 1).min(self.most);
        }
    }

    /// How many triggers will be skipped before the next scan.
    pub fn to_skip(&self) -> u64 {
        self.skip
    }
}

impl Default for BackOff {
    fn default() -> Self {
        BackOff::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skipped(back_off: &mut BackOff) -> u64 {
        let mut skipped = 0;
        while !back_off.is_due() {
            skipped += 1;
        }
        skipped
    }

    #[test]
    fn skips_double_up_to_the_bound_and_a_move_ends_them() {
        let mut back_off = BackOff::up_to(3);
        assert_eq!(skipped(&mut back_off), 0);
        for expected in [1, 2, 4, 8, 8, 8] {
            back_off.scanned(false);
            assert_eq!(back_off.to_skip(), expected);
            assert_eq!(skipped(&mut back_off), expected);
        }
        back_off.scanned(true);
        assert_eq!(skipped(&mut back_off), 0);
        back_off.scanned(false);
        assert_eq!(skipped(&mut back_off), 1);
    }

    #[test]
    fn the_largest_exponent_does_not_overflow() {
        let mut back_off = BackOff::up_to(u32::MAX);
        for _ in 0..100 {
            back_off.scanned(false);
        }
        assert_eq!(back_off.to_skip(), 1 << 63);
    }
}
