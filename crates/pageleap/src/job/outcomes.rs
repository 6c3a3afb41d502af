//! The outcome of each page of a job so far. Pure bookkeeping.

use std::collections::BTreeMap;
use std::ops::Range;

use super::area::Reason;
use super::source::Source;

/// The outcome of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageOutcome {
    /// The page lies in a frame of the destination now.
    Migrated,
    /// Nothing had to be done: the page lay there already, it is unbacked, or it is not to move,
    /// for [the reason](PageRun::reason).
    Unchanged,
    /// An attempt failed, and the job was stopped before the next one; or a guard kept the page in
    /// place ([`Region::pin`](crate::Region::pin)).
    Busy,
    /// The page was given up, because a system call was refused at each attempt.
    Failed,
    /// The job was stopped before it tried the page.
    NotAttempted,
}

/// Consecutive bytes of a source whose pages had the same outcome, for the same reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// The source of the pages.
    pub source: Source,
    /// Bytes of the source.
    pub range: Range<usize>,
    /// The outcome of the pages.
    pub outcome: PageOutcome,
    /// Why the pages stay where they are; `None` if they have moved, or lay on their node already.
    pub reason: Option<Reason>,
}

/// Bytes of the pages that have moved.
pub(crate) fn migrated_bytes(runs: &[PageRun]) -> u64 {
    let migrated = runs.iter().filter(|run| run.outcome == PageOutcome::Migrated);
    migrated.map(|run| run.range.len() as u64).sum()
}

/// Number of pages with each outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// See [`PageOutcome::Migrated`].
    pub migrated: u64,
    /// See [`PageOutcome::Unchanged`].
    pub unchanged: u64,
    /// See [`PageOutcome::Busy`].
    pub busy: u64,
    /// See [`PageOutcome::Failed`].
    pub failed: u64,
    /// See [`PageOutcome::NotAttempted`].
    pub not_attempted: u64,
}

impl PageCounts {
    pub(crate) fn add(&mut self, outcome: PageOutcome, pages: u64) {
        *match outcome {
            PageOutcome::Migrated => &mut self.migrated,
            PageOutcome::Unchanged => &mut self.unchanged,
            PageOutcome::Busy => &mut self.busy,
            PageOutcome::Failed => &mut self.failed,
            PageOutcome::NotAttempted => &mut self.not_attempted,
        } += pages;
    }

    /// All pages of the job.
    pub fn total(&self) -> u64 {
        self.migrated + self.unchanged + self.busy + self.failed + self.not_attempted
    }
}

/// One range that a job is to move.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) source: Source,
    /// Its pages, by their numbers in the source.
    pub(crate) pages: Range<u64>,
    pub(crate) page_bytes: usize,
    /// Pages that are not to move, with the reason, in ascending order.
    pub(crate) left: Vec<(Range<u64>, Reason)>,
}

impl Item {
    /// The range in bytes of the source.
    pub(crate) fn bytes(&self) -> Range<usize> {
        self.bytes_of(&self.pages)
    }

    fn bytes_of(&self, pages: &Range<u64>) -> Range<usize> {
        pages.start as usize * self.page_bytes..pages.end as usize * self.page_bytes
    }
}

pub(crate) type State = (PageOutcome, Option<Reason>);

/// The outcomes of an item's pages: runs, keyed by their first page; each value has the run's end.
#[derive(Debug)]
pub(crate) struct PageOutcomes {
    runs: BTreeMap<u64, (u64, State)>,
}

impl PageOutcomes {
    /// All pages unchanged.
    pub(crate) fn new(item: &Item) -> Self {
        let unchanged = (item.pages.end, (PageOutcome::Unchanged, None));
        let mut outcomes =
            PageOutcomes { runs: [(item.pages.start, unchanged)].into_iter().collect() };
        for (pages, reason) in &item.left {
            outcomes.set(pages, PageOutcome::Unchanged, Some(*reason));
        }
        outcomes
    }

    /// Records that some pages need not move (any more): for `reason`, or, if it is `None`, because
    /// they lie on their node. Pages that have moved keep that outcome; pages that were tried
    /// before and lie on their node now get it. Returns how many pages got it, and how many that
    /// were expected to move will not.
    pub(crate) fn leave(&mut self, pages: &Range<u64>, reason: Option<Reason>) -> (u64, u64) {
        self.cut(pages.start);
        self.cut(pages.end);
        let of = |(start, (end, (outcome, _))): (&u64, &(u64, State))| {
            (*outcome != PageOutcome::Migrated).then_some((*start..*end, *outcome))
        };
        let staying: Vec<(Range<u64>, PageOutcome)> =
            self.runs.range(pages.clone()).filter_map(of).collect();
        let (mut arrived, mut fewer) = (0, 0);
        for (run, before) in staying {
            let pages = run.end - run.start;
            if before == PageOutcome::Busy && reason.is_none() {
                arrived += pages;
                self.set(&run, PageOutcome::Migrated, None);
                continue;
            }
            fewer += if before == PageOutcome::Unchanged { 0 } else { pages };
            self.set(&run, PageOutcome::Unchanged, reason);
        }
        (arrived, fewer)
    }

    /// The outcomes of some pages, in runs.
    pub(crate) fn within(&self, pages: &Range<u64>) -> Vec<(Range<u64>, State)> {
        let first = self.runs.range(..=pages.start).next_back().map_or(pages.start, |run| *run.0);
        let clipped = |(start, (end, state)): (&u64, &(u64, State))| {
            ((*start).max(pages.start)..(*end).min(pages.end), *state)
        };
        let runs = self.runs.range(first..pages.end).map(clipped);
        runs.filter(|(run, _)| !run.is_empty()).collect()
    }

    /// Sets the outcome of some pages.
    pub(crate) fn set(&mut self, pages: &Range<u64>, outcome: PageOutcome, reason: Option<Reason>) {
        if pages.is_empty() {
            return;
        }
        self.cut(pages.start);
        self.cut(pages.end);
        while let Some((first, _)) = self.runs.range(pages.clone()).next() {
            let first = *first;
            self.runs.remove(&first);
        }
        let (mut start, mut end, state) = (pages.start, pages.end, (outcome, reason));
        // Equal neighbours are one run.
        if let Some((before, (to, other))) = self.runs.range(..start).next_back()
            && *to == start
            && *other == state
        {
            start = *before;
        }
        if let Some((to, other)) = self.runs.get(&end).copied()
            && other == state
        {
            self.runs.remove(&end);
            end = to;
        }
        self.runs.insert(start, (end, state));
    }

    /// Makes `at` the first page of a run, if it is within one.
    fn cut(&mut self, at: u64) {
        if let Some((_, (end, state))) = self.runs.range_mut(..at).next_back()
            && *end > at
        {
            let rest = (std::mem::replace(end, at), *state);
            self.runs.insert(at, rest);
        }
    }

    /// The runs, with their bytes of the item's source.
    pub(crate) fn page_runs(&self, item: &Item) -> impl Iterator<Item = PageRun> {
        self.runs.iter().map(|(start, (end, (outcome, reason)))| PageRun {
            source: item.source,
            range: item.bytes_of(&(*start..*end)),
            outcome: *outcome,
            reason: *reason,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::PageOutcome::*;
    use super::*;
    use crate::cases::cases;
    use crate::units::RegionId;
    use proptest::prelude::*;

    static ITEM: Item = Item {
        source: Source::Region(RegionId(1)),
        pages: 10..30,
        page_bytes: 10,
        left: Vec::new(),
    };

    #[test]
    fn equal_neighbours_form_one_run() {
        let mut outcomes = PageOutcomes::new(&Item { pages: 10..14, ..ITEM.clone() });
        outcomes.set(&(10..11), Migrated, None);
        outcomes.set(&(11..14), Migrated, None);
        outcomes.set(&(12..13), Busy, Some(Reason::Guarded));
        let runs = outcomes.page_runs(&ITEM);
        let seen: Vec<_> = runs.map(|r| (r.range, r.outcome, r.reason)).collect();
        let guarded = Some(Reason::Guarded);
        let wanted =
            [(100..120, Migrated, None), (120..130, Busy, guarded), (130..140, Migrated, None)];
        assert_eq!(seen, wanted);
        outcomes.set(&(12..13), Busy, Some(Reason::Written));
        assert_eq!(outcomes.page_runs(&ITEM).nth(1).unwrap().reason, Some(Reason::Written));
        outcomes.set(&(12..13), Migrated, None);
        assert_eq!(outcomes.page_runs(&ITEM).count(), 1);
    }

    #[test]
    fn pages_that_are_left_keep_what_has_moved() {
        let left = vec![(10..12, Reason::Unmapped)];
        let mut outcomes = PageOutcomes::new(&Item { left, pages: 10..20, ..ITEM.clone() });
        outcomes.set(&(12..20), NotAttempted, Some(Reason::Stopped));
        outcomes.set(&(14..16), Migrated, None);
        outcomes.set(&(18..19), Busy, Some(Reason::InUse));
        assert_eq!(outcomes.leave(&(11..18), Some(Reason::Absent)), (0, 4));
        assert_eq!(outcomes.leave(&(11..18), Some(Reason::Absent)), (0, 0));
        assert_eq!(outcomes.leave(&(18..19), None), (1, 0));
        let runs = outcomes.page_runs(&ITEM).map(|r| (r.range, r.outcome, r.reason));
        let absent = Some(Reason::Absent);
        let wanted = [
            (100..110, Unchanged, Some(Reason::Unmapped)),
            (110..140, Unchanged, absent),
            (140..160, Migrated, None),
            (160..180, Unchanged, absent),
            (180..190, Migrated, None),
            (190..200, NotAttempted, Some(Reason::Stopped)),
        ];
        assert_eq!(runs.collect::<Vec<_>>(), wanted);
    }

    proptest! {
        #![proptest_config(cases(256, 8))]
        /// Each page has the outcome that was set last, and neighbouring runs differ.
        #[test]
        fn runs_are_what_was_set_page_by_page(
            sets in proptest::collection::vec((10u64..30, 0u64..8, 0usize..3), 0..20),
        ) {
            let states =
                [(Migrated, None), (Busy, Some(Reason::Written)), (Busy, Some(Reason::Guarded))];
            let mut outcomes = PageOutcomes::new(&ITEM);
            let mut pages = [(Unchanged, None); 20];
            for (start, len, state) in sets {
                let range = start..(start + len).min(30);
                let (outcome, reason) = states[state];
                outcomes.set(&range, outcome, reason);
                pages[(range.start - 10) as usize..(range.end - 10) as usize]
                    .fill((outcome, reason));
            }
            let runs: Vec<_> = outcomes.page_runs(&ITEM).collect();
            let each = runs.iter().flat_map(|run| {
                run.range.clone().step_by(10).map(|_| (run.outcome, run.reason))
            });
            prop_assert_eq!(each.collect::<Vec<_>>(), pages);
            let differ = |two: &[PageRun]| {
                (two[0].outcome, two[0].reason) != (two[1].outcome, two[1].reason)
            };
            prop_assert!(runs.windows(2).all(differ));
        }
    }
}
