//! Where pages should go, and where they lie, as the kernel says.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use crate::backend::{Backend, Call, Errno};
use crate::error::Error;
use crate::observe;
use crate::units::{BASE_PAGE, NodeId, PageSize};

/// How pages are spread over nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Spread {
    /// All on one node.
    On(NodeId),
    /// In turn on each of these nodes, a stripe at a time.
    Interleave(Vec<NodeId>),
    /// In turn, but a node gets as many stripes of each round as its weight says.
    Weighted(Vec<(NodeId, u32)>),
}

/// Where the page tables go that map the pages.
///
/// Page tables belong with the threads that walk them: on a miss of the TLB a CPU reads them as it
/// reads data. They are placed in blocks of 2 MB of the range (one page of page table); a block
/// that is shared with what lies beside the range keeps those it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageTables {
    /// Where the data goes; for a node without CPUs, on the nearest that has some.
    #[default]
    Auto,
    /// On this node, whether it has CPUs or not.
    Node(NodeId),
}

/// Where pages, and the page tables that map them, should lie: of a pool, of a region, or after a
/// leap.
///
/// A [`NodeId`] is a placement too: everything on that node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The pages.
    pub spread: Spread,
    /// The page tables.
    pub page_tables: PageTables,
    /// Consecutive bytes that go to one node before the next gets its share, a multiple of the page
    /// size. If not said: a power of two from one page to 2 MB for small regions, so that a region
    /// has at least 256 stripes; more than 2 MB for regions beyond 16 GB, so that it has at most
    /// 8192, for each stripe is a mapping (`vm.max_map_count`). The same place of the same region
    /// always belongs to the same node.
    pub stripe_bytes: Option<usize>,
}

impl Placement {
    /// All on one node.
    pub fn on(node: NodeId) -> Self {
        Placement { spread: Spread::On(node), page_tables: PageTables::Auto, stripe_bytes: None }
    }

    /// In turn on each of these nodes.
    pub fn interleave(nodes: impl IntoIterator<Item = NodeId>) -> Self {
        let spread = Spread::Interleave(nodes.into_iter().collect());
        Placement { spread, ..Placement::on(NodeId(0)) }
    }

    /// In turn on each of these nodes, as often as its weight says.
    pub fn weighted(nodes: impl IntoIterator<Item = (NodeId, u32)>) -> Self {
        Placement {
            spread: Spread::Weighted(nodes.into_iter().collect()),
            ..Placement::on(NodeId(0))
        }
    }

    /// Sets where page tables go.
    pub fn page_tables(mut self, page_tables: PageTables) -> Self {
        self.page_tables = page_tables;
        self
    }

    /// Sets the bytes of a stripe.
    pub fn stripe_bytes(mut self, bytes: usize) -> Self {
        self.stripe_bytes = Some(bytes);
        self
    }

    /// The nodes that it names.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = NodeId> {
        let (one, several, weighted) = match &self.spread {
            Spread::On(node) => (Some(*node), &[][..], &[][..]),
            Spread::Interleave(nodes) => (None, nodes.as_slice(), &[][..]),
            Spread::Weighted(weights) => (None, &[][..], weights.as_slice()),
        };
        one.into_iter().chain(several.iter().copied()).chain(weighted.iter().map(|(node, _)| *node))
    }

    /// Each node's weight, checked.
    pub(crate) fn weights(&self) -> Result<Vec<(NodeId, u32)>, Error> {
        let bad = |reason: String, remedy: &str| Error::BadArgument {
            what: "placement",
            reason,
            remedy: remedy.into(),
        };
        let weights = match &self.spread {
            Spread::On(node) => vec![(*node, 1)],
            Spread::Interleave(nodes) => nodes.iter().map(|node| (*node, 1)).collect(),
            Spread::Weighted(weights) => weights.clone(),
        };
        if weights.is_empty() {
            return Err(bad("it names no node".into(), "name at least one"));
        }
        for (i, (node, weight)) in weights.iter().enumerate() {
            if weights[..i].iter().any(|(other, _)| other == node) {
                return Err(bad(
                    format!("it names {node} twice"),
                    "name each node once; weights say how much it gets",
                ));
            }
            if *weight == 0 || *weight > MAX_WEIGHT {
                return Err(bad(
                    format!("{node} has the weight {weight}"),
                    "use 1 to 255, and leave out nodes that get nothing",
                ));
            }
        }
        Ok(weights)
    }

    /// Which pages of a region of `capacity` bytes go to which of its nodes (by their order).
    pub(crate) fn layout(&self, capacity: usize, page: PageSize) -> Result<Layout, Error> {
        let weights: Vec<u32> = self.weights()?.iter().map(|(_, weight)| *weight).collect();
        let stripe =
            self.stripe_bytes.unwrap_or_else(|| default_stripe(capacity).max(page.bytes()));
        if stripe == 0 || !stripe.is_multiple_of(page.bytes()) {
            return Err(Error::BadArgument {
                what: "stripe",
                reason: format!("{stripe} bytes are no whole number of {page} pages"),
                remedy: "use a multiple of the page size".into(),
            });
        }
        Ok(Layout { stripe_pages: (stripe / page.bytes()) as u64, round: round_of(&weights) })
    }
}

impl From<NodeId> for Placement {
    fn from(node: NodeId) -> Self {
        Placement::on(node)
    }
}

/// As the kernel's weighted interleaving has it (`/sys/kernel/mm/mempolicy/weighted_interleave`,
/// Linux 6.9).
const MAX_WEIGHT: u32 = 255;

/// See [`Placement::stripe_bytes`].
fn default_stripe(capacity: usize) -> usize {
    const FEWEST: usize = 256;
    const MOST: usize = 8192;
    const TABLE: usize = 2 << 20;
    let small = (capacity / FEWEST).clamp(BASE_PAGE, TABLE);
    let small = 1usize << small.ilog2();
    small.max(capacity.div_ceil(MOST).next_power_of_two())
}

/// One round of the nodes: each as often as its weight, spread as evenly as possible (smooth
/// weighted round robin).
fn round_of(weights: &[u32]) -> Vec<usize> {
    let total: i64 = weights.iter().map(|w| i64::from(*w)).sum();
    let mut credit = vec![0i64; weights.len()];
    let next = |_| {
        credit.iter_mut().zip(weights).for_each(|(credit, weight)| *credit += i64::from(*weight));
        let richest =
            (0..credit.len()).rev().max_by_key(|i| credit[*i]).expect("at least one node");
        credit[richest] -= total;
        richest
    };
    (0..total).map(next).collect()
}

/// Which of several nodes each page of a region belongs to.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    stripe_pages: u64,
    /// Indices of nodes, stripe by stripe, until it repeats.
    round: Vec<usize>,
}

impl Layout {
    /// How many of the first `pages` pages belong to each node, by their order.
    pub(crate) fn pages_by_node(&self, pages: u64) -> Vec<u64> {
        let round = self.stripe_pages.saturating_mul(self.round.len() as u64);
        let nodes = self.round.iter().max().map_or(0, |last| last + 1);
        let mut counts = vec![0; nodes];
        self.round.iter().for_each(|node| counts[*node] += pages / round * self.stripe_pages);
        self.parts(0..pages % round)
            .into_iter()
            .for_each(|(part, node)| counts[node] += part.end - part.start);
        counts
    }

    /// Cuts pages into parts that belong to one node each, neighbours of the same node joined.
    pub(crate) fn parts(&self, pages: Range<u64>) -> Vec<(Range<u64>, usize)> {
        if self.round.iter().all(|node| *node == self.round[0]) {
            return vec![(pages, self.round[0])];
        }
        let mut parts: Vec<(Range<u64>, usize)> = Vec::new();
        let mut at = pages.start;
        while at < pages.end {
            let stripe = at / self.stripe_pages;
            let end = ((stripe + 1) * self.stripe_pages).min(pages.end);
            let node = self.round[(stripe % self.round.len() as u64) as usize];
            match parts.last_mut() {
                Some((last, same)) if *same == node => last.end = end,
                _ => parts.push((at..end, node)),
            }
            at = end;
        }
        parts
    }
}

/// How many pages lie on which node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeCounts {
    by_node: BTreeMap<NodeId, u64>,
    absent: u64,
}

impl NodeCounts {
    /// Asks the kernel about each page of a range. Where it may not be asked about pages (Docker's
    /// default seccomp profile refuses `move_pages`), it says how much of each mapping lies where.
    pub(crate) fn of_range(
        backend: &dyn Backend,
        start: usize,
        pages: u64,
        page: PageSize,
    ) -> Result<Self, Error> {
        let mut counts = NodeCounts::default();
        match counts.add(backend, (0..pages as usize).map(|i| start + i * page.bytes())) {
            Err((_, Errno(libc::EPERM | libc::EACCES | libc::ENOSYS)))
                if backend.is_host_memory() =>
            {
                let by_node = observe::node_bytes(start, pages as usize * page.bytes())?;
                let by_node: BTreeMap<NodeId, u64> = by_node
                    .into_iter()
                    .map(|(node, bytes)| (node, bytes / page.bytes() as u64))
                    .collect();
                let present: u64 = by_node.values().sum();
                Ok(NodeCounts { by_node, absent: pages.saturating_sub(present) })
            }
            Err((batch, errno)) => {
                Err(Error::call(Call::QueryNodes, batch.start, batch.end - batch.start, errno))
            }
            Ok(()) => Ok(counts),
        }
    }

    /// Asks the kernel about the page at each address, and adds what it says. On an error, says for
    /// which addresses.
    fn add(
        &mut self,
        backend: &dyn Backend,
        pages: impl Iterator<Item = usize>,
    ) -> Result<(), (Range<usize>, Errno)> {
        /// Pages asked for at a time: keeps the kernel's copies of the lists within a few pages.
        const BATCH: usize = 1024;
        let mut batch = Vec::with_capacity(BATCH);
        let mut status = [0i32; BATCH];
        let mut pages = pages.peekable();
        while pages.peek().is_some() {
            batch.clear();
            batch.extend(pages.by_ref().take(BATCH));
            let status = &mut status[..batch.len()];
            backend
                .nodes_of(&batch, status)
                .map_err(|errno| (batch[0]..batch[batch.len() - 1] + BASE_PAGE, errno))?;
            for &node in status.iter() {
                match u32::try_from(node) {
                    Ok(node) => *self.by_node.entry(NodeId(node)).or_default() += 1,
                    Err(_) => self.absent += 1,
                }
            }
        }
        Ok(())
    }

    /// Takes other pages into account.
    pub(crate) fn join(&mut self, other: &NodeCounts) {
        other.iter().for_each(|(node, pages)| *self.by_node.entry(node).or_default() += pages);
        self.absent += other.absent;
    }

    /// Pages on `node`.
    pub fn on(&self, node: NodeId) -> u64 {
        self.by_node.get(&node).copied().unwrap_or(0)
    }

    /// Pages that are not present anywhere (swapped out, say).
    pub fn absent(&self) -> u64 {
        self.absent
    }

    /// All nodes with pages, and how many.
    pub fn iter(&self) -> impl Iterator<Item = (NodeId, u64)> {
        self.by_node.iter().map(|(node, pages)| (*node, *pages))
    }
}

impl fmt::Display for NodeCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<String> =
            self.iter().map(|(node, pages)| format!("{node}: {pages}")).collect();
        if self.absent > 0 {
            parts.push(format!("absent: {}", self.absent));
        }
        f.write_str(if parts.is_empty() { "no pages" } else { "" })?;
        f.write_str(&parts.join(", "))
    }
}

/// Where pages lie, against where they should.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verification {
    /// Pages looked at.
    pub pages: u64,
    /// Pages that are present on another node than they should be.
    pub misplaced: u64,
    /// Pages that are not present: swapped out, say.
    pub absent: u64,
    /// Where they all lie.
    pub found: NodeCounts,
}

impl Verification {
    /// Compares what was found with how many pages should lie on which node.
    pub(crate) fn of(found: NodeCounts, expected: &[(NodeId, u64)]) -> Self {
        let pages = found.iter().map(|(_, pages)| pages).sum::<u64>() + found.absent;
        let surplus = found.iter().map(|(node, pages)| {
            let expected: u64 =
                expected.iter().filter(|(n, _)| *n == node).map(|(_, pages)| pages).sum();
            pages.saturating_sub(expected)
        });
        Verification { pages, misplaced: surplus.sum(), absent: found.absent, found }
    }

    /// Whether every page is present, where it should be.
    pub fn is_right(&self) -> bool {
        self.misplaced == 0 && self.absent == 0
    }

    /// Takes another one into account.
    pub(crate) fn join(&mut self, other: Verification) {
        self.pages += other.pages;
        self.misplaced += other.misplaced;
        self.absent += other.absent;
        self.found.join(&other.found);
    }
}

impl fmt::Display for Verification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} pages where they should be, {} elsewhere, {} absent ({})",
            self.pages - self.misplaced - self.absent,
            self.pages,
            self.misplaced,
            self.absent,
            self.found
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NODES: [NodeId; 3] = [NodeId(0), NodeId(4), NodeId(9)];

    fn parts(
        placement: &Placement,
        capacity: usize,
        pages: Range<u64>,
    ) -> Vec<(Range<u64>, usize)> {
        placement.layout(capacity, PageSize::Base).unwrap().parts(pages)
    }

    #[test]
    fn stripes_alternate_and_their_places_do_not_depend_on_the_range() {
        let placement = Placement::interleave(NODES).stripe_bytes(2 * BASE_PAGE);
        assert_eq!(parts(&placement, 1 << 20, 0..7), [(0..2, 0), (2..4, 1), (4..6, 2), (6..7, 0)]);
        assert_eq!(parts(&placement, 1 << 20, 3..5), [(3..4, 1), (4..5, 2)]);
        assert_eq!(parts(&Placement::on(NODES[1]), 1 << 20, 3..500), [(3..500, 0)]);
    }

    #[test]
    fn weights_are_kept_in_each_round_and_spread_within_it() {
        assert_eq!(round_of(&[3, 1]), [0, 0, 1, 0]);
        assert_eq!(round_of(&[1, 1, 1]), [0, 1, 2]);
        let placement = Placement::weighted([(NODES[0], 2), (NODES[1], 1)]).stripe_bytes(BASE_PAGE);
        assert_eq!(
            parts(&placement, 1 << 20, 0..6),
            [(0..1, 0), (1..2, 1), (2..4, 0), (4..5, 1), (5..6, 0)]
        );
    }

    #[test]
    fn placements_that_make_no_sense_are_refused_by_name() {
        let refused = |placement: Placement, named: &str| {
            let error = placement.layout(1 << 20, PageSize::Huge2M).unwrap_err();
            assert!(error.is_usage() && error.to_string().contains(named), "{error}");
        };
        refused(Placement::interleave([]), "no node");
        refused(Placement::interleave([NODES[1], NODES[1]]), "node 4 twice");
        refused(Placement::weighted([(NODES[1], 0)]), "weight 0");
        refused(Placement::weighted([(NODES[1], 256)]), "weight 256");
        refused(Placement::interleave(NODES).stripe_bytes(4096), "4096 bytes");
        refused(Placement::interleave(NODES).stripe_bytes(0), "0 bytes");
    }

    #[test]
    fn by_itself_a_stripe_is_small_in_small_regions_and_bounds_the_mappings_of_large_ones() {
        for (capacity, stripe) in [
            (1, BASE_PAGE),
            (1 << 20, BASE_PAGE),
            (16 << 20, 64 << 10),
            (1 << 30, 2 << 20),
            (16 << 30, 2 << 20),
            (1 << 40, 128 << 20),
        ] {
            assert_eq!(default_stripe(capacity), stripe, "{capacity}");
            assert!(capacity / stripe <= 8192);
        }
    }

    #[test]
    fn surplus_on_a_node_is_misplaced() {
        let found =
            NodeCounts { by_node: BTreeMap::from([(NODES[0], 7), (NODES[1], 2)]), absent: 1 };
        let mut all = Verification::of(found, &[(NODES[0], 10)]);
        assert_eq!((all.pages, all.misplaced, all.absent), (10, 2, 1));
        let right = NodeCounts { by_node: BTreeMap::from([(NODES[1], 3)]), absent: 0 };
        let right = Verification::of(right, &[(NODES[1], 3)]);
        assert!(right.is_right() && !all.is_right());
        all.join(right);
        assert_eq!((all.pages, all.misplaced, all.found.on(NODES[1])), (13, 2, 5));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..ProptestConfig::default() })]
        /// Parts cover the range in order, belong together where they should, and each node has its
        /// weight of each round.
        #[test]
        fn every_page_belongs_to_one_node_in_proportion(
            weights in prop::collection::vec(1u32..20, 1..5), stripe in 1u64..9, start in 0u64..500, len in 1u64..500
        ) {
            let nodes = weights.iter().enumerate().map(|(i, weight)| (NodeId(i as u32 * 3), *weight));
            let placement = Placement::weighted(nodes).stripe_bytes(stripe as usize * BASE_PAGE);
            let layout = placement.layout(1 << 30, PageSize::Base).unwrap();
            let parts = layout.parts(start..start + len);
            let mut at = start;
            for (part, _) in &parts {
                prop_assert_eq!(part.start, at);
                prop_assert!(!part.is_empty());
                at = part.end;
            }
            prop_assert_eq!(at, start + len);
            prop_assert!(parts.windows(2).all(|w| w[0].1 != w[1].1), "neighbours are joined");
            for (part, node) in parts {
                prop_assert!(part.into_iter().all(|page| layout.parts(page..page + 1)[0].1 == node));
            }
            let round = weights.iter().map(|w| u64::from(*w)).sum::<u64>() * stripe;
            let mut pages = vec![0; weights.len()];
            layout.parts(start * round..(start + 1) * round).into_iter().for_each(|(part, node)| pages[node] += part.end - part.start);
            let expected: Vec<u64> = weights.iter().map(|w| u64::from(*w) * stripe).collect();
            prop_assert_eq!(pages, expected);
            let mut counts = vec![0; weights.len()];
            layout.parts(0..len).into_iter().for_each(|(part, node)| counts[node] += part.end - part.start);
            prop_assert_eq!(layout.pages_by_node(len), counts);
        }
    }
}
