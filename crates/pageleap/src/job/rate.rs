//! The rate limit of a job: a token bucket. Pure: no system calls, no locks, no clocks.

use std::time::Duration;

use crate::units::BASE_PAGE;

/// The most idle time that later copies may make up for.
const CREDIT: Duration = Duration::from_millis(10);
const NS_PER_S: f64 = 1e9;

/// The largest area under a rate limit, in bytes: as much as may be copied in [`CREDIT`], but at
/// least a base page. For example, 1 MB at 100 MB/s.
pub(crate) fn area_bytes_at(bytes_per_s: u64) -> u64 {
    (u128::from(bytes_per_s) * CREDIT.as_nanos() / NS_PER_S as u128).max(BASE_PAGE as u128) as u64
}

/// A limit on how fast a job copies. Times are since its start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    bytes_per_s: u64,
    /// The time at which all copies so far are paid for, at the rate.
    paid: Duration,
}

impl Rate {
    pub(crate) fn new(bytes_per_s: u64) -> Self {
        Rate { bytes_per_s, paid: Duration::ZERO }
    }

    /// How long to pause at time `now` before the next copy.
    pub(crate) fn pause(&mut self, now: Duration) -> Duration {
        self.paid = self.paid.max(now.saturating_sub(CREDIT));
        self.paid.saturating_sub(now)
    }

    /// Charges a copy of `bytes`.
    pub(crate) fn charge(&mut self, bytes: u64) {
        let takes = Duration::try_from_secs_f64(bytes as f64 / self.bytes_per_s as f64)
            .unwrap_or(Duration::MAX);
        self.paid = self.paid.saturating_add(takes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_kept_by_pauses_and_idle_time_is_no_credit() {
        let ms = Duration::from_millis;
        let mut rate = Rate::new(1 << 20);
        assert_eq!(rate.pause(Duration::ZERO), Duration::ZERO);
        rate.charge(3 << 20);
        assert_eq!(rate.pause(ms(1000)), ms(2000));
        assert_eq!(rate.pause(ms(3000)), Duration::ZERO);
        // After a minute without copies, a hundredth of a second may be made up for.
        assert_eq!(rate.pause(ms(60_000)), Duration::ZERO);
        rate.charge(1 << 20);
        assert_eq!(rate.pause(ms(60_000)), ms(1000) - CREDIT);
        let mut slow = Rate::new(1);
        (0..3).for_each(|_| slow.charge(u64::MAX));
        assert!(slow.pause(ms(1000)) > Duration::from_secs(1 << 60));
        assert_eq!(area_bytes_at(1), 4096);
        assert_eq!(area_bytes_at(800 << 20), 8 << 20);
        assert_eq!(area_bytes_at(u64::MAX), u64::MAX / 100);
    }
}
