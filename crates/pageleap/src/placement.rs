//! Placements: the nodes on which pages should lie, and on which they lie according to the kernel.

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
    /// All pages on one node.
    On(NodeId),
    /// One stripe on each of these nodes in turn.
    Interleave(Vec<NodeId>),
    /// In turn, but in each round a node gets as many stripes as its weight.
    Weighted(Vec<(NodeId, u32)>),
}

/// The node of the page tables that map the pages.
///
/// Page tables belong near the threads that walk them: on a TLB miss a CPU reads page tables as it
/// reads data. They are placed in blocks of 2 MB of the range, which is what one page of page table
/// maps. A block that also maps memory beside the range keeps its page tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageTables {
    /// On the node of the data. For a node without CPUs, on the nearest node with CPUs.
    #[default]
    Auto,
    /// On this node, with or without CPUs.
    Node(NodeId),
}

/// The nodes on which pages, and the page tables that map them, should lie. Pools, regions and
/// leaps each have a placement.
///
/// A [`NodeId`] converts to a placement of everything on that node.
///
/// ```
/// use pageleap::{NodeId, PageTables, Placement, Pool, Region};
///
/// # fn main() -> Result<(), pageleap::Error> {
/// // On a machine with two nodes it would be `Placement::interleave([NodeId(0), NodeId(1)])`.
/// let nodes = Placement::interleave([NodeId(0)]).stripe_bytes(2 << 20);
/// let pool = Pool::builder(nodes, 4 << 20).build()?;
/// let one = Placement::on(NodeId(0)).page_tables(PageTables::Node(NodeId(0)));
/// let region = Region::new(pool.on(one), 1 << 20)?;
/// assert!(region.verify()?.is_right()); // asks the kernel
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// How the pages are spread.
    pub spread: Spread,
    /// The node of the page tables.
    pub page_tables: PageTables,
    /// Bytes of a stripe: consecutive bytes on one node before the next node's turn. A multiple of
    /// the page size.
    ///
    /// `None` chooses a power of two by the size of the region. A small region has at least 256
    /// stripes of one page to 2 MB each. Above 16 GB a stripe is larger than 2 MB, so that a region
    /// has at most 8192 stripes. Each stripe is a mapping, which counts towards `vm.max_map_count`.
    ///
    /// An offset in a region always belongs to the same node, whatever range a leap moves.
    pub stripe_bytes: Option<usize>,
}

impl Placement {
    /// All pages on one node.
    pub fn on(node: NodeId) -> Self {
        Placement { spread: Spread::On(node), page_tables: PageTables::Auto, stripe_bytes: None }
    }

    /// One stripe on each of these nodes in turn.
    pub fn interleave(nodes: impl IntoIterator<Item = NodeId>) -> Self {
        let spread = Spread::Interleave(nodes.into_iter().collect());
        Placement { spread, ..Placement::on(NodeId(0)) }
    }

    /// As many stripes on each node in turn as its weight.
    pub fn weighted(nodes: impl IntoIterator<Item = (NodeId, u32)>) -> Self {
        Placement {
            spread: Spread::Weighted(nodes.into_iter().collect()),
            ..Placement::on(NodeId(0))
        }
    }

    /// Sets the node of the page tables.
    pub fn page_tables(mut self, page_tables: PageTables) -> Self {
        self.page_tables = page_tables;
        self
    }

    /// Sets the bytes of a stripe.
    pub fn stripe_bytes(mut self, bytes: usize) -> Self {
        self.stripe_bytes = Some(bytes);
        self
    }

    /// The nodes of the placement.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = NodeId> {
        let (one, several, weighted) = match &self.spread {
            Spread::On(node) => (Some(*node), &[][..], &[][..]),
            Spread::Interleave(nodes) => (None, nodes.as_slice(), &[][..]),
            Spread::Weighted(weights) => (None, &[][..], weights.as_slice()),
        };
        one.into_iter().chain(several.iter().copied()).chain(weighted.iter().map(|(node, _)| *node))
    }

    /// Each node with its weight.
    ///
    /// # Errors
    /// [`Error::BadArgument`] if the placement has no nodes, has a node twice, or has a weight
    /// outside 1 to 255.
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
            return Err(bad("it names no node".into(), "name at least one node"));
        }
        for (i, (node, weight)) in weights.iter().enumerate() {
            if weights[..i].iter().any(|(other, _)| other == node) {
                return Err(bad(
                    format!("it names {node} twice"),
                    "name each node once; give weights to nodes that get more",
                ));
            }
            if *weight == 0 || *weight > MAX_WEIGHT {
                return Err(bad(
                    format!("{node} has the weight {weight}"),
                    "use 1 to 255, and leave out nodes that get no pages",
                ));
            }
        }
        Ok(weights)
    }

    /// The node of each page of a region of `capacity` bytes. Nodes are given by their index in the
    /// placement.
    ///
    /// # Errors
    /// Those of [`weights`](Placement::weights), or [`Error::BadArgument`] if a stripe is not a
    /// multiple of the page size.
    pub(crate) fn layout(&self, capacity: usize, page: PageSize) -> Result<Layout, Error> {
        let weights: Vec<u32> = self.weights()?.iter().map(|(_, weight)| *weight).collect();
        let stripe =
            self.stripe_bytes.unwrap_or_else(|| default_stripe(capacity).max(page.bytes()));
        if stripe == 0 || !stripe.is_multiple_of(page.bytes()) {
            return Err(Error::BadArgument {
                what: "stripe",
                reason: format!("{stripe} bytes are not a multiple of {page} pages"),
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

/// The largest weight, as in the kernel's weighted interleaving
/// (`/sys/kernel/mm/mempolicy/weighted_interleave`, Linux 6.9).
const MAX_WEIGHT: u32 = 255;

/// Bytes of a stripe of a region that does not set [`Placement::stripe_bytes`].
fn default_stripe(capacity: usize) -> usize {
    const FEWEST_STRIPES: usize = 256;
    const MOST_STRIPES: usize = 8192;
    /// Bytes that one page of page table maps.
    const TABLE: usize = 2 << 20;
    let small = (capacity / FEWEST_STRIPES).clamp(BASE_PAGE, TABLE);
    let small = 1usize << small.ilog2();
    small.max(capacity.div_ceil(MOST_STRIPES).next_power_of_two())
}

/// One round of stripes, as indices of nodes. Each node occurs as often as its weight, spread as
/// evenly as possible (smooth weighted round robin).
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

/// The node of each page of a region, for a placement on several nodes.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    stripe_pages: u64,
    /// The node of each stripe of one round, as an index. The rounds repeat.
    round: Vec<usize>,
}

impl Layout {
    /// How many of the first `pages` pages go to each node, by the index of the node.
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

    /// The node of a page, as an index.
    pub(crate) fn node_of(&self, page: u64) -> usize {
        self.round[(page / self.stripe_pages % self.round.len() as u64) as usize]
    }

    /// Cuts a range of pages into parts that go to one node each. Neighbouring stripes of the same
    /// node are one part.
    pub(crate) fn parts(&self, pages: Range<u64>) -> Vec<(Range<u64>, usize)> {
        if self.round.iter().all(|node| *node == self.round[0]) {
            return vec![(pages, self.round[0])];
        }
        let mut parts: Vec<(Range<u64>, usize)> = Vec::new();
        let mut at = pages.start;
        while at < pages.end {
            let end = ((at / self.stripe_pages + 1) * self.stripe_pages).min(pages.end);
            let node = self.node_of(at);
            match parts.last_mut() {
                Some((last, same)) if *same == node => last.end = end,
                _ => parts.push((at..end, node)),
            }
            at = end;
        }
        parts
    }
}

/// How many pages lie on each node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeCounts {
    by_node: BTreeMap<NodeId, u64>,
    absent: u64,
}

impl NodeCounts {
    /// Counts the pages of a range by node, as the kernel reports them.
    ///
    /// The kernel is asked about each page. Where that is not allowed (Docker's default seccomp
    /// profile refuses `move_pages`), the counts come from the bytes per node that the kernel
    /// reports for each mapping.
    pub(crate) fn of_range(
        backend: &dyn Backend,
        start: usize,
        pages: u64,
        page: PageSize,
    ) -> Result<Self, Error> {
        let mut counts = NodeCounts::default();
        match counts.ask(backend, start, pages, page) {
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

    /// Asks the kernel about each page of a range, and adds the answers. An error comes with the
    /// addresses of the failed query.
    pub(crate) fn ask(
        &mut self,
        backend: &dyn Backend,
        start: usize,
        pages: u64,
        page: PageSize,
    ) -> Result<(), (Range<usize>, Errno)> {
        self.add(backend, (0..pages as usize).map(|i| start + i * page.bytes()))
    }

    /// Asks the kernel about the page at each address, and adds the answers. An error comes with
    /// the addresses of the failed query.
    fn add(
        &mut self,
        backend: &dyn Backend,
        pages: impl Iterator<Item = usize>,
    ) -> Result<(), (Range<usize>, Errno)> {
        /// Pages per query. The kernel copies the lists, and this size keeps the copies within a
        /// few pages.
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

    /// Adds the counts of other pages.
    pub(crate) fn join(&mut self, other: &NodeCounts) {
        other.iter().for_each(|(node, pages)| *self.by_node.entry(node).or_default() += pages);
        self.absent += other.absent;
    }

    /// Number of pages on `node`.
    pub fn on(&self, node: NodeId) -> u64 {
        self.by_node.get(&node).copied().unwrap_or(0)
    }

    /// Number of pages that are not present on any node, because they are swapped out, for example.
    pub fn absent(&self) -> u64 {
        self.absent
    }

    /// All nodes with pages, and the number of pages on each.
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

/// A comparison of where pages lie with where they should lie.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verification {
    /// Number of pages compared.
    pub pages: u64,
    /// Number of pages that are present on a wrong node.
    pub misplaced: u64,
    /// Number of pages that are not present, because they are swapped out, for example.
    pub absent: u64,
    /// The nodes on which the pages lie.
    pub found: NodeCounts,
}

impl Verification {
    /// Compares the pages found on each node with the number expected there.
    pub(crate) fn of(found: NodeCounts, expected: &[(NodeId, u64)]) -> Self {
        let pages = found.iter().map(|(_, pages)| pages).sum::<u64>() + found.absent;
        let surplus = found.iter().map(|(node, pages)| {
            let expected: u64 =
                expected.iter().filter(|(n, _)| *n == node).map(|(_, pages)| pages).sum();
            pages.saturating_sub(expected)
        });
        Verification { pages, misplaced: surplus.sum(), absent: found.absent, found }
    }

    /// Whether every page is present and on the right node.
    pub fn is_right(&self) -> bool {
        self.misplaced == 0 && self.absent == 0
    }

    /// Adds the result of another comparison.
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
    use crate::cases::cases;
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
    fn stripes_alternate_and_their_nodes_do_not_depend_on_the_range() {
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
    fn wrong_placements_are_refused_and_the_error_names_the_node_or_size() {
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
    fn the_default_stripe_is_small_in_small_regions_and_limits_the_mappings_of_large_ones() {
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
    fn more_pages_than_expected_on_a_node_are_misplaced() {
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
        #![proptest_config(cases(256, 4))]

        /// The parts cover the range in order. Neighbouring stripes of one node are one part, and
        /// each node gets its weight of each round.
        #[test]
        fn every_page_belongs_to_one_node_in_proportion(
            weights in prop::collection::vec(1u32..20, 1..5),
            stripe in 1u64..9,
            start in 0u64..500,
            len in 1u64..500,
        ) {
            let node = |(i, weight): (usize, &u32)| (NodeId(i as u32 * 3), *weight);
            let nodes = weights.iter().enumerate().map(node);
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
                prop_assert!(part.into_iter().all(|page| layout.node_of(page) == node));
            }
            let round = weights.iter().map(|w| u64::from(*w)).sum::<u64>() * stripe;
            let count = |pages: Range<u64>| {
                let mut counts = vec![0; weights.len()];
                for (part, node) in layout.parts(pages) {
                    counts[node] += part.end - part.start;
                }
                counts
            };
            let pages = count(start * round..(start + 1) * round);
            let expected: Vec<u64> = weights.iter().map(|w| u64::from(*w) * stripe).collect();
            prop_assert_eq!(pages, expected);
            prop_assert_eq!(layout.pages_by_node(len), count(0..len));
        }
    }
}
