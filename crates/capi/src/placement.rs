//! Placements say where pages should go; verifications say where they lie.

use pageleap::{Destination, Error, NodeCounts, NodeId, PageTables, Placement, Pool, Verification};

use crate::boundary::{array, bad, flag, list, read, write};

/// How pages are spread over nodes, and on which node the page tables lie that map the pages.
///
/// With one node all pages lie there. With several, stripes of the range go to the nodes in
/// turn. A node that is named twice, or is not one of the pool's, gives PAGELEAP_BAD_ARGUMENT.
/// In pageleap_pool_new(), a node that the machine lacks gives PAGELEAP_UNKNOWN_NODE.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_placement {
    /// sizeof(pageleap_placement).
    pub size: usize,
    /// The nodes' numbers. The array belongs to the caller and is not needed after the call.
    pub nodes: *const u32,
    /// How many nodes `nodes` has; at least 1.
    pub node_count: usize,
    /// How many stripes of each round a node gets, 1 to 255, in the order of `nodes`; NULL: one
    /// stripe each.
    pub weights: *const u32,
    /// Bytes of a stripe, a multiple of the page size; 0: a size from one page to 2 MB, so that
    /// a region has at least 256 stripes.
    pub stripe_bytes: usize,
    /// Whether page tables go to page_tables_node. If not, they go to the node of the data, or, if
    /// that has no CPUs, to the nearest node with CPUs.
    pub has_page_tables_node: flag,
    /// The node for page tables.
    pub page_tables_node: u32,
}
grows!(pageleap_placement, 48, page_tables_node);

/// Reads a placement; `None` if the pointer is NULL.
///
/// # Safety
/// The pointer is NULL or points to such a structure, with arrays of the length that it says.
pub(crate) unsafe fn placement(
    pointer: *const pageleap_placement,
) -> Result<Option<Placement>, Error> {
    // SAFETY: forwarded to the caller.
    let Some(given) = (unsafe { read(pointer) })? else { return Ok(None) };
    // SAFETY: forwarded to the caller.
    let nodes = unsafe { array(given.nodes, given.node_count, "nodes") }?;
    let ids = nodes.iter().map(|node| NodeId(*node));
    let mut placement = match (nodes, given.weights.is_null()) {
        ([], _) => return Err(bad("placement", "it names no node", "name at least one")),
        ([node], true) => Placement::on(NodeId(*node)),
        (_, true) => Placement::interleave(ids),
        (_, false) => {
            // SAFETY: forwarded to the caller.
            let weights = unsafe { array(given.weights, given.node_count, "weights") }?;
            Placement::weighted(ids.zip(weights.iter().copied()))
        }
    };
    if given.stripe_bytes > 0 {
        placement = placement.stripe_bytes(given.stripe_bytes);
    }
    if given.has_page_tables_node != 0 {
        placement = placement.page_tables(PageTables::Node(NodeId(given.page_tables_node)));
    }
    Ok(Some(placement))
}

/// A pool as a destination, on the nodes of the placement; NULL: of the pool's own placement.
///
/// # Safety
/// As [`placement`].
pub(crate) unsafe fn destination(
    pool: &Pool,
    to: *const pageleap_placement,
) -> Result<Destination, Error> {
    // SAFETY: forwarded to the caller.
    let placement = unsafe { placement(to) }?;
    Ok(placement.map_or_else(|| Destination::from(pool), |placement| pool.on(placement)))
}

/// The result of comparing where pages lie with where they should lie.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_verification {
    /// sizeof(pageleap_verification).
    pub size: usize,
    /// Pages that were looked at.
    pub pages: u64,
    /// Pages that are present, but on another node than their placement says.
    pub misplaced: u64,
    /// Pages that are not present, for example because they are swapped out.
    pub absent: u64,
}
grows!(pageleap_verification, 32, absent);

/// # Safety
/// A pointer that is not NULL points to such a structure.
pub(crate) unsafe fn write_verification(
    out: *mut pageleap_verification,
    of: &Verification,
) -> Result<(), Error> {
    let shown = pageleap_verification {
        size: 0,
        pages: of.pages,
        misplaced: of.misplaced,
        absent: of.absent,
    };
    // SAFETY: forwarded to the caller.
    unsafe { write(out, shown) }
}

/// How many pages lie on a node. The structure has no size field, because it is used in arrays;
/// later versions will not change it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_node_pages {
    /// The node's number.
    pub node: u32,
    /// Set to 0.
    pub reserved: u32,
    /// How many pages.
    pub pages: u64,
}

/// # Safety
/// As [`list`].
pub(crate) unsafe fn list_counts(
    counts: &NodeCounts,
    out: *mut pageleap_node_pages,
    capacity: usize,
    count: *mut usize,
) -> Result<(), Error> {
    let all: Vec<_> = counts
        .iter()
        .map(|(node, pages)| pageleap_node_pages { node: node.0, reserved: 0, pages })
        .collect();
    // SAFETY: forwarded to the caller.
    unsafe { list(&all, out, capacity, count, "nodes") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_gets_where_it_belongs() {
        let (nodes, weights) = ([4u32, 0], [3u32, 1]);
        let given = |weighted: bool, count, stripe_bytes, tables: Option<u32>| {
            let given = pageleap_placement {
                size: size_of::<pageleap_placement>(),
                nodes: nodes.as_ptr(),
                node_count: count,
                weights: if weighted { weights.as_ptr() } else { std::ptr::null() },
                stripe_bytes,
                has_page_tables_node: tables.is_some().into(),
                page_tables_node: tables.unwrap_or(9),
            };
            // SAFETY: a structure with arrays of that length.
            unsafe { placement(&raw const given) }.unwrap().unwrap()
        };
        let [four, zero] = [NodeId(4), NodeId(0)];
        assert_eq!(given(false, 1, 0, None), Placement::on(four));
        assert_eq!(
            given(false, 2, 8192, None),
            Placement::interleave([four, zero]).stripe_bytes(8192)
        );
        let weighted = Placement::weighted([(four, 3), (zero, 1)]);
        assert_eq!(given(true, 2, 0, Some(0)), weighted.page_tables(PageTables::Node(zero)));
    }
}
