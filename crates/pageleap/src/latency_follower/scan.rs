//! Which page tables of a region are to move, and when the next scan is due. No calls: a scan gets
//! its samples and the function that moves.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{FollowDecision, FollowStatus};
use crate::decisions::{BackOff, LatencyAware, NodeFacts, TableDecision, TableSample};
use crate::error::Error;
use crate::latency::Latencies;
use crate::units::NodeId;

/// Bytes of a region whose data lies on one node, and whose page tables were asked for on one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) range: Range<usize>,
    pub(super) data: NodeId,
    pub(super) pages: u64,
    /// `None` if no node was asked for.
    pub(super) tables: Option<NodeId>,
}

/// Everything that a scan decides by.
pub(super) struct Samples {
    pub(super) parts: Vec<Part>,
    /// The GBs of base pages that have a page of the second level for themselves, and the node on which
    /// it was asked for.
    pub(super) uppers: Vec<(Range<usize>, Option<NodeId>)>,
    pub(super) threads: BTreeMap<NodeId, u64>,
    pub(super) nodes: BTreeMap<NodeId, NodeFacts>,
    pub(super) latencies: Latencies,
}

impl Samples {
    fn decide_on(&self, rule: &LatencyAware, part: &Part) -> TableDecision {
        rule.decide(&TableSample {
            tables: part.tables,
            threads: &self.threads,
            data: &BTreeMap::from([(part.data, part.pages)]),
            nodes: &self.nodes,
            latencies: &self.latencies,
        })
    }

    /// The GBs whose page of the second level is to move alone: all page tables below it stay, on one
    /// other node.
    fn uppers_to_move(&self, rule: &LatencyAware) -> Vec<(Range<usize>, NodeId)> {
        let target = |(range, node): &(Range<usize>, Option<NodeId>)| {
            let inside =
                |part: &&Part| part.range.start < range.end && range.start < part.range.end;
            let below: Vec<&Part> = self.parts.iter().filter(inside).collect();
            let to = below.first()?.tables.filter(|to| Some(*to) != *node)?;
            let same =
                |part: &&Part| part.tables == Some(to) && self.decide_on(rule, part).to.is_none();
            below.iter().all(same).then(|| (range.clone(), to))
        };
        self.uppers.iter().filter_map(target).collect()
    }

    /// The decisions for all parts. Neighbours about which the same is decided are one.
    pub(super) fn decide(&self, rule: &LatencyAware) -> Vec<FollowDecision> {
        let mut all: Vec<FollowDecision> = Vec::new();
        for part in &self.parts {
            let decision = self.decide_on(rule, part);
            match all.last_mut() {
                Some(last) if last.range.end == part.range.start && last.decision == decision => {
                    last.range.end = part.range.end;
                }
                _ => all.push(FollowDecision { range: part.range.clone(), decision }),
            }
        }
        all
    }
}

/// The result of moving the page tables of a range.
#[derive(Clone, Debug)]
pub(super) enum Moved {
    /// So many bytes have new page tables now. Fewer than the range has, if pages of page table also
    /// map other memory, or the move was cancelled.
    Bytes(usize),
    /// A job has the range.
    Busy,
    /// The move has failed, after so many bytes.
    Failed(Error, usize),
}

/// The triggers and scans of one follower.
#[derive(Debug)]
pub(super) struct Scanner {
    rule: LatencyAware,
    back_off: BackOff,
}

impl Scanner {
    pub(super) fn new(rule: LatencyAware, back_off: BackOff) -> Scanner {
        Scanner { rule, back_off }
    }

    /// Notes a trigger. Returns whether a scan is due.
    pub(super) fn is_due(&mut self) -> bool {
        self.back_off.is_due()
    }

    /// Decides for all parts, and moves the page tables that are to move.
    /// Returns the status after the scan.
    pub(super) fn scan(
        &mut self,
        before: FollowStatus,
        samples: &Samples,
        mut move_to: impl FnMut(Range<usize>, NodeId) -> Moved,
    ) -> FollowStatus {
        let mut now = FollowStatus {
            scans: before.scans + 1,
            decisions: samples.decide(&self.rule),
            bytes_left: 0,
            ..before
        };
        let (moved_before, busy_before) = (now.bytes_moved, now.busy);
        let mut has_failed = false;
        let uppers = samples.uppers_to_move(&self.rule);
        for (range, to) in ranges(&now.decisions).into_iter().chain(uppers) {
            let bytes = range.len();
            let moved = match move_to(range, to) {
                Moved::Bytes(moved) => moved,
                Moved::Busy => {
                    now.busy += 1;
                    0
                }
                Moved::Failed(error, moved) => {
                    now.failures += 1;
                    now.last_failure = Some(error);
                    has_failed = true;
                    moved
                }
            };
            now.moves += u64::from(moved > 0);
            now.bytes_moved += moved as u64;
            now.bytes_left += bytes.saturating_sub(moved) as u64;
        }
        let has_moved = now.bytes_moved > moved_before;
        // A range is free again when its job has ended, so the next trigger looks again.
        if has_failed || has_moved || now.busy == busy_before {
            self.back_off.scanned(has_moved && !has_failed);
        }
        now
    }
}

/// The ranges whose page tables are to move, at most 1 GB each: a job that has a part of a range, or a
/// call that fails there, keeps the rest of it back, too. Neighbours with the same target are one up to
/// there.
fn ranges(decisions: &[FollowDecision]) -> Vec<(Range<usize>, NodeId)> {
    const MOST: usize = 1 << 30;
    let mut all: Vec<(Range<usize>, NodeId)> = Vec::new();
    for one in decisions {
        let Some(to) = one.decision.to else { continue };
        let mut start = one.range.start;
        while start < one.range.end {
            let end = one.range.end.min((start / MOST + 1) * MOST);
            match all.last_mut() {
                Some((last, node))
                    if last.end == start && *node == to && !start.is_multiple_of(MOST) =>
                {
                    last.end = end;
                }
                _ => all.push((start..end, to)),
            }
            start = end;
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: usize = 1 << 20;

    fn part(mb: Range<usize>, data: u32, tables: Option<u32>) -> Part {
        let range = mb.start * MB..mb.end * MB;
        let pages = (range.len() / 4096) as u64;
        Part { range, data: NodeId(data), pages, tables: tables.map(NodeId) }
    }

    /// Two nodes. Loads from each to the other one take 1.3 times as long.
    fn samples(parts: &[Part]) -> Samples {
        let mut latencies = Latencies::default();
        for (from, to, ns) in [(0, 0, 100.0), (0, 1, 130.0), (1, 0, 130.0), (1, 1, 100.0)] {
            latencies.set(NodeId(from), NodeId(to), ns);
        }
        let facts =
            |node| (NodeId(node), NodeFacts { nearest_with_cpus: NodeId(node), is_allowed: true });
        Samples {
            parts: parts.to_vec(),
            uppers: Vec::new(),
            threads: BTreeMap::new(),
            nodes: BTreeMap::from([facts(0), facts(1)]),
            latencies,
        }
    }

    fn scanner() -> Scanner {
        Scanner::new(LatencyAware::new(), BackOff::up_to(3))
    }

    /// Triggers until the next scan, which is not made.
    fn triggers(scanner: &mut Scanner) -> u64 {
        let mut triggers = 1;
        while !scanner.is_due() {
            triggers += 1;
        }
        triggers
    }

    fn failure() -> Moved {
        Moved::Failed(Error::NodeNotAllowed { node: NodeId(1) }, 0)
    }

    #[test]
    fn each_part_goes_with_its_data_and_neighbours_go_together() {
        let parts = [
            part(0..2, 1, Some(0)),
            part(2..4, 1, None),
            part(4..8, 0, Some(0)),
            part(8..10, 0, Some(1)),
            part(12..14, 0, Some(1)),
        ];
        let mut moved = Vec::new();
        let status = scanner().scan(FollowStatus::default(), &samples(&parts), |range, to| {
            moved.push((range.start / MB..range.end / MB, to.0));
            Moved::Bytes(range.len())
        });
        assert_eq!(moved, [(0..4, 1), (8..10, 0), (12..14, 0)]);
        assert_eq!((status.moves, status.bytes_moved, status.bytes_left), (3, 8 * MB as u64, 0));
        assert_eq!(status.decisions.len(), 5, "{:?}", status.decisions);
    }

    #[test]
    fn known_threads_take_all_parts_to_one_node() {
        let parts = [part(0..2, 1, Some(0)), part(2..4, 0, Some(0))];
        let threads = BTreeMap::from([(NodeId(1), 3)]);
        let samples = Samples { threads, ..samples(&parts) };
        let decisions = samples.decide(&LatencyAware::new());
        assert_eq!(decisions.len(), 1, "{decisions:?}");
        assert_eq!(
            (&decisions[0].range, decisions[0].decision.to),
            (&(0..4 * MB), Some(NodeId(1)))
        );
    }

    #[test]
    fn a_failed_move_keeps_no_other_range_back_and_is_tried_less_and_less() {
        let parts = [part(0..2, 1, Some(0)), part(4..6, 1, Some(0))];
        let (mut scanner, mut status) = (scanner(), FollowStatus::default());
        for skipped in [0, 1, 2, 4, 8, 8] {
            assert_eq!(triggers(&mut scanner), skipped + 1);
            let mut tried = 0;
            status = scanner.scan(status, &samples(&parts), |_, _| {
                tried += 1;
                failure()
            });
            assert_eq!(tried, 2);
        }
        assert_eq!((status.failures, status.moves, status.bytes_left), (12, 0, 4 * MB as u64));
        assert!(matches!(status.last_failure, Some(Error::NodeNotAllowed { .. })));
        // A move beside the failed one does not end the back-off.
        let mut first = true;
        scanner.scan(status, &samples(&parts), |range, _| match std::mem::take(&mut first) {
            true => Moved::Bytes(range.len()),
            false => failure(),
        });
        assert_eq!(triggers(&mut scanner), 9);
    }

    #[test]
    fn ranges_end_at_each_gb_and_a_page_of_the_second_level_follows_those_below() {
        let parts = [part(0..2048, 1, Some(1)), part(2048..4096, 1, Some(0))];
        let gb = |at: usize| at * 1024 * MB..(at + 1) * 1024 * MB;
        let uppers = vec![
            (gb(0), Some(NodeId(1))),
            (gb(1), None),
            // Moves with the pages below it.
            (gb(2), Some(NodeId(0))),
        ];
        let samples = Samples { uppers, ..samples(&parts) };
        let mut moved = Vec::new();
        let status = scanner().scan(FollowStatus::default(), &samples, |range, to| {
            moved.push((range.start / (1024 * MB)..range.end / (1024 * MB), to.0));
            Moved::Failed(Error::NodeNotAllowed { node: NodeId(1) }, 4 * MB)
        });
        assert_eq!(moved, [(2..3, 1), (3..4, 1), (1..2, 1)]);
        assert_eq!((status.failures, status.moves, status.bytes_moved), (3, 3, 12 * MB as u64));
    }

    #[test]
    fn a_busy_range_is_no_failure_and_is_tried_at_the_next_trigger() {
        let parts = [part(0..2, 1, Some(0))];
        let (mut scanner, mut status) = (scanner(), FollowStatus::default());
        for _ in 0..5 {
            assert_eq!(triggers(&mut scanner), 1);
            status = scanner.scan(status, &samples(&parts), |_, _| Moved::Busy);
        }
        assert_eq!((status.busy, status.failures, status.bytes_left), (5, 0, 2 * MB as u64));
    }

    #[test]
    fn scans_that_move_nothing_back_off_and_a_move_ends_that() {
        let (mut scanner, mut status) = (scanner(), FollowStatus::default());
        let at_rest = samples(&[part(0..2, 1, Some(1))]);
        for expected in [1, 2, 3, 5] {
            assert_eq!(triggers(&mut scanner), expected);
            status = scanner.scan(status, &at_rest, |_, _| unreachable!("nothing is to move"));
        }
        assert_eq!(triggers(&mut scanner), 9);
        // Page tables that cannot move count as not moved.
        let to_move = samples(&[part(0..2, 1, Some(0))]);
        status = scanner.scan(status, &to_move, |_, _| Moved::Bytes(0));
        assert_eq!((status.moves, status.bytes_left), (0, 2 * MB as u64));
        assert_eq!(triggers(&mut scanner), 9);
        scanner.scan(status, &to_move, |range, _| Moved::Bytes(range.len()));
        assert_eq!(triggers(&mut scanner), 1);
    }
}
