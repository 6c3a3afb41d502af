//! Random choices of loads, from a seed.

use std::convert::Infallible;
use std::time::Duration;

use rand_core::TryRng;

/// Sebastiano Vigna's SplitMix64. It takes a few instructions, so that the speed of a writer is
/// that of its writes.
#[derive(Debug)]
pub(crate) struct SplitMix64(pub u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        scattered(self.0)
    }

    /// A number below `end`, uniform to one part in 2^64 / `end`.
    pub fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }

    /// An exponentially distributed time, which is memoryless: how long it has lasted tells nothing
    /// about how long it will last.
    pub fn exponential(&mut self, mean: Duration) -> Duration {
        // Above 0 and at most 1, so that the logarithm is finite.
        let share = ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64;
        mean.mul_f64(-share.ln())
    }
}

/// For distributions of other crates.
impl TryRng for SplitMix64 {
    type Error = Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        Ok((self.next() >> 32) as u32)
    }

    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        Ok(self.next())
    }

    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Infallible> {
        rand_core::utils::fill_bytes_via_next_word(bytes, || self.try_next_u64())
    }
}

/// A one-to-one function of numbers that scatters them, the last step of SplitMix64. 0 stays 0.
pub(crate) fn scattered(number: u64) -> u64 {
    let mut mixed = number;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_choices() {
        let rows = |seed| {
            let mut random = SplitMix64(seed);
            (0..50).map(|_| random.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(rows(1), rows(1));
        assert_ne!(rows(1), rows(2));
        assert!(rows(3).iter().all(|row| *row < 1000));
    }

    #[test]
    fn exponential_times_have_the_mean_and_forget_how_long_they_lasted() {
        let (mut random, mean, tries) = (SplitMix64(1), Duration::from_millis(30), 20_000);
        let times: Vec<Duration> = (0..tries).map(|_| random.exponential(mean)).collect();
        let found = times.iter().sum::<Duration>() / tries;
        assert!(found.abs_diff(mean) < mean / 20, "{found:?}");
        let longer = |than: Duration| times.iter().filter(|time| **time > than).count() as f64;
        // Memoryless: among the times longer than the mean, the share that lasts for another mean
        // is that of all times longer than one mean.
        let shares = [longer(mean) / f64::from(tries), longer(2 * mean) / longer(mean)];
        let expected = (-1.0f64).exp();
        assert!(shares.iter().all(|share| (share - expected).abs() < 0.02), "{shares:?}");
    }
}
