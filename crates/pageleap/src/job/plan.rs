//! Decides how an area is retried that was disturbed or refused. Pure: no system calls, no locks,
//! no clocks.

use std::ops::Range;

use super::area::{Area, Reason};

/// How a disturbed area is split, when its writers are held, and when an area is given up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RetryPolicy {
    /// The number of parts into which a disturbed area is split (page_leap, section 4.2: reduction
    /// factor).
    pub(crate) reduction_factor: u64,
    /// After this many disturbed copies the writers of an area wait until it has moved. This makes
    /// every job end.
    pub(crate) max_disturbed: u32,
    /// After this many refused system calls an area is given up as failed.
    pub(crate) max_refused: u32,
}

/// After this many attempts that ended because the program had changed the mapping, the area stays.
/// For example, an area of 16 MB is halved to single base pages by the thirteenth attempt; single
/// pages are not split further.
const MOST_CHANGES: u32 = 20;

/// The same limit if no call was refused: no memory is mapped there, or a part of a page has
/// attributes of its own. A retry only helps if the program was about to change more.
const MOST_LOOKS: u32 = 3;

/// The recent share of areas that writers disturbed at the first attempt.
///
/// Tracking pays while most copies succeed. When more than a third of them are disturbed, it costs
/// more than it saves: signals, system calls and wasted copies, for writers as for the migrator.
/// Then areas are held from the start. One in sixteen areas is still tracked, to notice when the
/// pressure ends. (This is an addition to page_leap, whose method only splits; `docs/adr/0003` has
/// the measurements.)
#[derive(Debug, Default)]
pub(crate) struct Pressure {
    disturbed_share: f64,
    held_in_a_row: u32,
}

impl Pressure {
    /// Weight of the latest attempt in the running share.
    const WEIGHT: f64 = 1.0 / 8.0;
    /// Above this share, areas are held from the start.
    const HOLD_ABOVE: f64 = 1.0 / 3.0;
    /// Under pressure, one in this many areas is still tracked.
    const TRACK_EVERY: u32 = 16;

    /// Takes the result of a first, tracked attempt into account.
    pub(crate) fn observe(&mut self, disturbed: bool) {
        self.disturbed_share +=
            (f64::from(u8::from(disturbed)) - self.disturbed_share) * Self::WEIGHT;
    }

    /// Whether to hold the next new area from the start.
    pub(crate) fn holds_next(&mut self) -> bool {
        if self.disturbed_share <= Self::HOLD_ABOVE {
            return false;
        }
        self.held_in_a_row = (self.held_in_a_row + 1) % Self::TRACK_EVERY;
        self.held_in_a_row != 0
    }
}

impl RetryPolicy {
    /// Whether to hold the writers of this area.
    pub(crate) fn holds(&self, area: &Area) -> bool {
        area.disturbed >= self.max_disturbed
    }

    /// The areas to retry instead of a disturbed area: its parts, as equal as whole pages allow.
    pub(crate) fn after_disturbance(&self, area: &Area) -> Vec<Area> {
        let again = |pages| Area { pages, disturbed: area.disturbed + 1, ..area.clone() };
        parts(&area.pages, self.reduction_factor).map(again).collect()
    }

    /// The area to retry after a refused system call; `None` if the area has to be given up.
    pub(crate) fn after_refusal(&self, area: &Area, why: Reason) -> Option<Area> {
        let (refused, cause) = (area.refused + 1, area.cause.or(Some(why)));
        (refused < self.max_refused).then(|| Area { refused, cause, ..area.clone() })
    }

    /// The areas to retry after the program has changed the mapping; none if the area stays. The
    /// first retry has the same pages, because the attempt works on those that have equal
    /// attributes by then. If the program goes on changing the mapping, the area is halved.
    pub(crate) fn after_change(&self, area: &Area, why: Reason) -> Vec<Area> {
        let (changed, cause) = (area.changed + 1, area.cause.or(Some(why)));
        let is_refused = !matches!(why, Reason::MappingChanged(None));
        if changed >= if is_refused { MOST_CHANGES } else { MOST_LOOKS } {
            return Vec::new();
        }
        let again = |pages| Area { pages, changed, cause, ..area.clone() };
        parts(&area.pages, if is_refused && changed > 1 { 2 } else { 1 }).map(again).collect()
    }
}

/// Up to `most` parts of a range, as equal as whole pages allow.
fn parts(pages: &Range<u64>, most: u64) -> impl Iterator<Item = Range<u64>> {
    let (start, len) = (pages.start, pages.end - pages.start);
    let parts = most.clamp(1, len);
    (0..parts).map(move |i| start + len * i / parts..start + len * (i + 1) / parts)
}

/// Joins neighbouring ranges. The ranges must come in ascending order.
pub(crate) fn joined(ranges: impl IntoIterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}

/// Cuts `range` at the `boundaries` that lie inside it.
pub(crate) fn cut(range: Range<u64>, boundaries: impl IntoIterator<Item = u64>) -> Vec<Range<u64>> {
    let mut cuts: Vec<u64> = boundaries.into_iter().filter(|b| range.contains(b)).collect();
    cuts.extend([range.start, range.end]);
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|w| w[0]..w[1]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Call, Errno};
    use crate::cases::cases;
    use proptest::prelude::*;

    const POLICY: RetryPolicy =
        RetryPolicy { reduction_factor: 2, max_disturbed: 3, max_refused: 2 };

    fn area(pages: Range<u64>) -> Area {
        Area::new(0, 7, pages)
    }

    #[test]
    fn pressure_holds_areas_and_its_end_is_noticed() {
        let mut pressure = Pressure::default();
        assert!(!pressure.holds_next(), "calm at first");
        (0..100).for_each(|_| pressure.observe(true));
        let tracked = (0..160).filter(|_| !pressure.holds_next()).count();
        assert_eq!(tracked, 10, "one in sixteen is tracked");
        (0..20).for_each(|_| pressure.observe(false));
        assert!((0..100).all(|_| !pressure.holds_next()));
        (0..1000).for_each(|i| pressure.observe(i % 5 == 0));
        assert!(!pressure.holds_next(), "one in five is worth tracking");
    }

    #[test]
    fn refusals_are_bounded() {
        let [first, second] =
            [libc::EFAULT, libc::ENOMEM].map(|n| Reason::Refused(Call::Exchange, Errno(n)));
        let once = POLICY.after_refusal(&area(0..4), first).unwrap();
        assert_eq!(once.cause, Some(first));
        assert_eq!(POLICY.after_refusal(&once, second), None);
        let policy = RetryPolicy { max_refused: 3, ..POLICY };
        let twice = policy.after_refusal(&once, second).unwrap();
        assert_eq!(twice.cause, Some(first), "what came of the first refusal is no cause");
    }

    /// Even if the program changes the mapping each time: the pages stay the same until the area is
    /// a single page, which is tried some more times.
    #[test]
    fn changes_lead_to_single_pages_and_are_bounded() {
        let why = Reason::MappingChanged(Some((Call::Exchange, Errno(libc::EFAULT))));
        for pages in [5..6, 3..4096 + 3] {
            let mut areas = vec![area(pages.clone())];
            for tries in 1.. {
                assert!(tries <= 2 * MOST_CHANGES, "changing pages are tried without end");
                let again: Vec<_> =
                    areas.iter().flat_map(|area| POLICY.after_change(area, why)).collect();
                if again.is_empty() {
                    assert!(tries > 13 + 3 && tries < 30, "{tries}");
                    break;
                }
                let all = joined(again.iter().map(|area| area.pages.clone()));
                assert_eq!(all, std::slice::from_ref(&pages));
                assert!(again.iter().all(|area| area.refused == 0 && !area.is_new()));
                assert!(tries > 1 || again.len() == 1, "it is cut where the mappings are");
                areas = again;
            }
            assert!(areas.iter().all(|area| area.len() == 1 && area.cause == Some(why)));
        }
        let mut areas = vec![area(0..512)];
        for tries in 1.. {
            assert!(tries <= MOST_CHANGES, "pages without a mapping are tried without end");
            let unmapped = Reason::MappingChanged(None);
            let again: Vec<_> =
                areas.iter().flat_map(|area| POLICY.after_change(area, unmapped)).collect();
            if again.is_empty() {
                assert_eq!((tries, areas.len()), (MOST_LOOKS, 1));
                break;
            }
            areas = again;
        }
    }

    #[test]
    fn ranges_are_joined_and_cut() {
        assert_eq!(joined([0..2, 2..5, 7..8]), [0..5, 7..8]);
        assert_eq!(cut(2..9, [0, 4, 4, 2, 9, 12]), [2..4, 4..9]);
    }

    proptest! {
        #![proptest_config(cases(256, 8))]
        /// Even if every area is disturbed each time, the pages stay the same, and each area is
        /// held after `max_disturbed` rounds.
        #[test]
        fn disturbance_always_ends_in_a_hold(start in 0u64..100, len in 1u64..300, factor in 1u64..9, max in 0u32..6) {
            let policy = RetryPolicy { reduction_factor: factor, max_disturbed: max, max_refused: 1 };
            let mut queue = vec![area(start..start + len)];
            let mut held = Vec::new();
            let mut rounds = 0;
            while let Some(area) = queue.pop() {
                rounds += 1;
                prop_assert!(rounds < 100_000);
                prop_assert!(!area.pages.is_empty());
                if policy.holds(&area) {
                    prop_assert_eq!(area.disturbed, max);
                    held.push(area.pages);
                } else {
                    let parts = policy.after_disturbance(&area);
                    let (small, large) = parts.iter().map(|p| p.pages.end - p.pages.start).fold((u64::MAX, 0), |(s, l), n| (s.min(n), l.max(n)));
                    prop_assert!(large - small <= 1, "parts are as equal as pages allow");
                    queue.extend(parts);
                }
            }
            held.sort_by_key(|r| r.start);
            prop_assert_eq!(joined(held), vec![start..start + len]);
        }
    }
}
