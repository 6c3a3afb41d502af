//! The difference of two trimmed means, with its interval. Pure.
//!
//! Times of a machine have few values that are far too large: a page fault in the copy loop,
//! another virtual machine. A mean follows them, and a median ignores most values. A **trimmed
//! mean** drops a fifth of the values at each end and averages the others, so its error is close
//! to the smaller one of both. The interval of a difference of two is Yuen's: winsorized
//! variances, and Welch's degrees of freedom (K. Yuen, *The two-sample trimmed t for unequal
//! population variances*, 1974).
//!
//! Values follow each other in time. If values that are near each other are alike, because the
//! machine drifts, a mean varies more than its values say. So the variance has the autocovariances
//! in it, weighted as by Newey and West (*A simple, positive semi-definite, heteroskedasticity and
//! autocorrelation consistent covariance matrix*, 1987). It is never made smaller by them.

use statrs::distribution::{ContinuousCDF, StudentsT};

/// The share of values that is dropped at each end, as Yuen recommends.
const TRIMMED: f64 = 0.2;
/// The distance up to which values may be alike, over the cube root of their number: 4 of 30, 8 of
/// 200.
const REACH: f64 = 1.4;

/// A trimmed mean and its error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Trimmed {
    /// The mean of the values that are left.
    pub mean: f64,
    /// Its variance.
    variance: f64,
    /// Degrees of freedom of the variance.
    freedom: f64,
}

impl Trimmed {
    /// Of values in the order of time. `None` for fewer than four.
    pub fn of(values: &[f64]) -> Option<Trimmed> {
        if values.len() < 4 {
            return None;
        }
        let count = values.len() as f64;
        let dropped = (TRIMMED * count) as usize;
        let mut sorted = values.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let kept = &sorted[dropped..sorted.len() - dropped];
        let mean = average(kept);
        let winsorized: Vec<f64> =
            values.iter().map(|value| value.clamp(kept[0], kept[kept.len() - 1])).collect();
        let middle = average(&winsorized);
        let away: Vec<f64> = winsorized.iter().map(|value| value - middle).collect();
        let squares = products(&away, 0);
        let factor = drift(&away, squares);
        let left = kept.len() as f64;
        Some(Trimmed {
            mean,
            variance: squares / (left * (left - 1.0)) * factor,
            // Values that are alike are worth fewer independent ones.
            freedom: ((left - 1.0) / factor).max(1.0),
        })
    }
}

impl Trimmed {
    /// Of values that are independent of each other and have no far ones, such as the means of
    /// runs: nothing is dropped. `None` for fewer than two.
    pub fn of_independent(values: &[f64]) -> Option<Trimmed> {
        if values.len() < 2 {
            return None;
        }
        let (count, mean) = (values.len() as f64, average(values));
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let freedom = count - 1.0;
        Some(Trimmed { mean, variance: squares / (freedom * count), freedom })
    }
}

fn average(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The sum of products of each value and the one that is so far behind it.
fn products(away: &[f64], distance: usize) -> f64 {
    away.iter().zip(&away[distance..]).map(|(one, other)| one * other).sum()
}

/// How many times the variance of a mean is that of independent values; at least 1.
fn drift(away: &[f64], squares: f64) -> f64 {
    if squares == 0.0 {
        return 1.0;
    }
    let reach = (REACH * (away.len() as f64).cbrt()) as usize;
    let weighted = |distance: usize| {
        let weight = 1.0 - distance as f64 / (reach + 1) as f64;
        2.0 * weight * products(away, distance) / squares
    };
    (1.0 + (1..=reach).map(weighted).sum::<f64>()).max(1.0)
}

/// A difference of two trimmed means.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Difference {
    /// The second minus the first.
    pub middle: f64,
    /// Half of the width of its interval.
    pub half: f64,
}

impl Difference {
    /// Of two; `level` is the probability with which the interval misses the true difference.
    pub fn of(first: Trimmed, second: Trimmed, level: f64) -> Difference {
        let middle = second.mean - first.mean;
        let variance = first.variance + second.variance;
        if variance == 0.0 {
            return Difference { middle, half: 0.0 };
        }
        let share = |of: Trimmed| of.variance.powi(2) / of.freedom;
        let freedom = variance.powi(2) / (share(first) + share(second));
        let quantile = StudentsT::new(0.0, 1.0, freedom.max(1.0))
            .map_or(f64::INFINITY, |of| of.inverse_cdf(1.0 - level / 2.0));
        Difference { middle, half: quantile * variance.sqrt() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix64;

    /// Numbers of a bell curve, each of which keeps this share of the one before.
    fn noisy(count: usize, keeps: f64, seed: u64) -> Vec<f64> {
        let mut random = SplitMix64(seed);
        let mut bell =
            || (0..12).map(|_| random.below(1 << 20) as f64 / 1048576.0).sum::<f64>() - 6.0;
        let mut last = bell();
        let fresh = (1.0 - keeps * keeps).sqrt();
        let mut next = || {
            last = keeps * last + fresh * bell();
            last
        };
        (0..count).map(|_| next()).collect()
    }

    /// How often the interval of a difference misses 0, where both have the same true mean.
    fn misses(count: usize, keeps: f64, level: f64) -> f64 {
        let tries = 2000;
        let missed = |seed: &u64| {
            let of = |seed| Trimmed::of(&noisy(count, keeps, seed)).unwrap();
            let difference = Difference::of(of(2 * seed), of(2 * seed + 1), level);
            difference.middle.abs() > difference.half
        };
        (1..=tries).filter(missed).count() as f64 / tries as f64
    }

    #[test]
    fn an_interval_misses_as_often_as_it_says() {
        for count in [12, 40] {
            let share = misses(count, 0.0, 0.05);
            assert!((0.02..0.06).contains(&share), "{count}: {share}");
        }
    }

    #[test]
    fn neighbours_that_are_alike_make_it_wider() {
        let share = misses(60, 0.4, 0.05);
        assert!(share < 0.09, "{share}");
        let half = |keeps| {
            let of = |seed| Trimmed::of(&noisy(400, keeps, seed)).unwrap();
            Difference::of(of(1), of(2), 0.05).half
        };
        // The factor of the variance is (1 + 0.6) / (1 - 0.6) = 4 for an endless reach.
        let wider = half(0.6) / half(0.0);
        assert!((1.5..2.3).contains(&wider), "{wider}");
    }

    #[test]
    fn few_far_values_do_not_move_it() {
        let mut values = noisy(40, 0.0, 3);
        let calm = Trimmed::of(&values).unwrap();
        values[7] = 1e6;
        values[30] = 1e6;
        let wild = Trimmed::of(&values).unwrap();
        assert!((calm.mean - wild.mean).abs() < 0.2, "{calm:?} {wild:?}");
        assert!(wild.variance < 2.0 * calm.variance, "{calm:?} {wild:?}");
    }

    #[test]
    fn equal_values_have_no_interval_and_few_have_no_mean() {
        let of = |value: f64| Trimmed::of(&[value; 6]).unwrap();
        let difference = Difference::of(of(1.0), of(3.0), 0.05);
        assert_eq!(difference, Difference { middle: 2.0, half: 0.0 });
        assert_eq!(Trimmed::of(&[1.0; 3]), None);
    }
}
