//! Order statistics over the samples of one row. Pure.

/// The value in the middle, or the mean of the two in the middle; `None` for no values.
pub fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// The smallest and the largest value; `None` for no values.
pub fn extremes(values: &[f64]) -> Option<(f64, f64)> {
    let smallest = values.iter().copied().min_by(f64::total_cmp)?;
    let largest = values.iter().copied().max_by(f64::total_cmp)?;
    Some((smallest, largest))
}

/// The value below which the given share of the values lies, with linear interpolation between
/// neighbours; `None` for no values.
///
/// `share` is between 0 (the smallest value) and 1 (the largest).
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    let place = share.clamp(0.0, 1.0) * last as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    let weight = place - place.floor();
    // Equal neighbours must not be mixed: infinity times 0 is not a number.
    if weight == 0.0 || sorted[below] == sorted[above] {
        return Some(sorted[below]);
    }
    Some(sorted[below] * (1.0 - weight) + sorted[above] * weight)
}

/// The median if all values are known, else `None`: the median of some values would look like the
/// median of all.
pub fn median_if_all_known(values: &[Option<f64>]) -> Option<f64> {
    median(&values.iter().copied().collect::<Option<Vec<f64>>>()?)
}

/// A five-number summary of values, with their count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// How many values there are.
    pub count: usize,
    /// The smallest.
    pub min: f64,
    /// A quarter of the values is not larger.
    pub lower_quartile: f64,
    /// The value in the middle.
    pub median: f64,
    /// Three quarters of the values are not larger.
    pub upper_quartile: f64,
    /// The largest.
    pub max: f64,
}

impl Summary {
    /// Sums up the values; `None` for no values.
    pub fn of(values: &[f64]) -> Option<Summary> {
        Some(Summary {
            count: values.len(),
            min: quantile(values, 0.0)?,
            lower_quartile: quantile(values, 0.25)?,
            median: median(values)?,
            upper_quartile: quantile(values, 0.75)?,
            max: quantile(values, 1.0)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(&[-5.0, 5.0, -1.0]), Some(-1.0));
    }

    #[test]
    fn lowest_and_highest() {
        assert_eq!(extremes(&[]), None);
        assert_eq!(extremes(&[2.0]), Some((2.0, 2.0)));
        assert_eq!(extremes(&[2.0, -1.0, 7.0]), Some((-1.0, 7.0)));
    }

    #[test]
    fn quantiles_lie_between_their_neighbours() {
        let values = [40.0, 10.0, 30.0, 20.0, 50.0];
        for (share, value) in [(0.0, 10.0), (0.25, 20.0), (0.5, 30.0), (0.9, 46.0), (1.0, 50.0)] {
            let found = quantile(&values, share).unwrap();
            assert!((found - value).abs() < 1e-9, "{share}: {found}");
        }
        assert_eq!(quantile(&values, -1.0), Some(10.0));
        assert_eq!(quantile(&values, 2.0), Some(50.0));
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(quantile(&[f64::INFINITY; 2], 0.3), Some(f64::INFINITY));
    }

    #[test]
    fn a_summary_is_ordered_and_counts() {
        let summary = Summary::of(&[5.0, 1.0, 4.0, 2.0, 3.0]).unwrap();
        let Summary { count, min, lower_quartile, median, upper_quartile, max } = summary;
        assert_eq!(count, 5);
        assert_eq!([min, lower_quartile, median, upper_quartile, max], [1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn what_is_partly_unknown_has_no_median() {
        assert_eq!(median_if_all_known(&[Some(1.0), Some(3.0)]), Some(2.0));
        assert_eq!(median_if_all_known(&[Some(1.0), None]), None);
        assert_eq!(median_if_all_known(&[]), None);
    }
}
