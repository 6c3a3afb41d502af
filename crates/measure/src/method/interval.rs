//! Bootstrap intervals of a median. Pure: the same values and seed give the same interval.

use crate::random::SplitMix64;
use crate::statistics::median;

/// The probability with which an interval covers the median of all possible runs, if runs are
/// independent of each other.
pub const CONFIDENCE: f64 = 0.95;
/// With fewer values, even their whole range covers the median less often than [`CONFIDENCE`]: the
/// range of `n` values misses it with a probability of 2 / 2^n.
pub const LEAST_VALUES: usize = 6;
/// How often values are drawn again. With 2,000 draws the ends of an interval of 95 % rest on the
/// 50 lowest and the 50 highest medians.
const DRAWS: usize = 2000;

/// A range that covers the median.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Its lower end.
    pub low: f64,
    /// Its upper end.
    pub high: f64,
}

impl Interval {
    /// The percentile interval of the median of `values`, by [`CONFIDENCE`]: medians of as many
    /// values, drawn from `values` with replacement (B. Efron, *Bootstrap Methods: Another Look at
    /// the Jackknife*, 1979). `None` for fewer than [`LEAST_VALUES`].
    pub fn of_median(values: &[f64], seed: u64) -> Option<Interval> {
        if values.len() < LEAST_VALUES {
            return None;
        }
        let mut random = SplitMix64(seed);
        let mut drawn = vec![0.0; values.len()];
        let mut medians: Vec<f64> = (0..DRAWS)
            .filter_map(|_| {
                drawn.fill_with(|| values[random.below(values.len())]);
                median(&drawn)
            })
            .collect();
        medians.sort_unstable_by(f64::total_cmp);
        let tail = ((1.0 - CONFIDENCE) / 2.0 * DRAWS as f64) as usize;
        Some(Interval { low: medians[tail], high: medians[DRAWS - 1 - tail] })
    }

    /// Half of its width / the amount of `middle`; `None` if the middle is 0, or no number.
    pub fn half_width_of(self, middle: f64) -> Option<f64> {
        let share = (self.high - self.low) / 2.0 / middle.abs();
        share.is_finite().then_some(share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values around `middle`, uniform within a tenth of it.
    fn noisy(middle: f64, count: usize, seed: u64) -> Vec<f64> {
        let mut random = SplitMix64(seed);
        let steps = 1_000_001;
        let share = |nth: usize| (nth as f64 / (steps - 1) as f64 - 0.5) / 5.0;
        (0..count).map(|_| middle * (1.0 + share(random.below(steps)))).collect()
    }

    #[test]
    fn few_values_have_none() {
        assert_eq!(Interval::of_median(&[], 1), None);
        assert_eq!(Interval::of_median(&[5.0, 9.0, 6.0, 7.0, 5.0], 1), None);
        let six = Interval::of_median(&[5.0, 9.0, 6.0, 7.0, 5.0, 6.5], 1).unwrap();
        assert!(5.0 <= six.low && six.low < six.high && six.high <= 9.0, "{six:?}");
        let equal = Interval::of_median(&[4.0; 9], 1).unwrap();
        assert_eq!(equal, Interval { low: 4.0, high: 4.0 });
        assert_eq!(equal.half_width_of(4.0), Some(0.0));
        assert_eq!(equal.half_width_of(0.0), None);
    }

    #[test]
    fn it_covers_the_true_median_about_as_often_as_it_says() {
        let tries = 400;
        let covers = |seed: &u64| {
            let of = Interval::of_median(&noisy(100.0, 15, seed.wrapping_mul(77)), *seed).unwrap();
            of.low <= 100.0 && 100.0 <= of.high
        };
        let share = (1..=tries).filter(covers).count() as f64 / tries as f64;
        assert!((0.90..=0.99).contains(&share), "{share}");
    }

    #[test]
    fn more_values_make_it_narrower_and_one_far_value_does_not_widen_it() {
        let width = |values: &[f64]| Interval::of_median(values, 3).unwrap().half_width_of(100.0);
        let (few, many) = (noisy(100.0, 9, 5), noisy(100.0, 200, 5));
        assert!(width(&many).unwrap() < width(&few).unwrap() / 2.0);
        let mut with_outlier = many.clone();
        with_outlier[0] = 1e9;
        assert!(width(&with_outlier).unwrap() < width(&few).unwrap() / 2.0);
    }
}
