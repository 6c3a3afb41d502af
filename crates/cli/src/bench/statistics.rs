//! Medians and extremes over runs.

/// The value in the middle, or the mean of the two there; `None` of nothing.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// The lowest and the highest; `None` of nothing.
pub fn extremes(values: &[f64]) -> Option<(f64, f64)> {
    let lowest = values.iter().copied().min_by(f64::total_cmp)?;
    let highest = values.iter().copied().max_by(f64::total_cmp)?;
    Some((lowest, highest))
}

/// The median of those that are known; `None` if not all are, because a median of some would look
/// like one of all.
pub fn median_if_all_known(values: &[Option<f64>]) -> Option<f64> {
    median(&values.iter().copied().collect::<Option<Vec<f64>>>()?)
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
    fn what_is_partly_unknown_has_no_median() {
        assert_eq!(median_if_all_known(&[Some(1.0), Some(3.0)]), Some(2.0));
        assert_eq!(median_if_all_known(&[Some(1.0), None]), None);
        assert_eq!(median_if_all_known(&[]), None);
    }
}
