//! Where pages lie, as the kernel says, and where they should go.

use std::collections::BTreeMap;
use std::fmt;

use crate::backend::{Backend, Call};
use crate::error::Error;
use crate::pool::Pool;
use crate::units::NodeId;

/// Where the pages of a range should go.
#[derive(Clone, Debug)]
pub enum Placement {
    /// Into frames of this pool, and so onto its node.
    On(Pool),
}

impl Placement {
    pub(crate) fn pool(&self) -> &Pool {
        let Placement::On(pool) = self;
        pool
    }
}

/// How many pages lie on which node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeCounts {
    by_node: BTreeMap<NodeId, u64>,
    absent: u64,
}

impl NodeCounts {
    /// Asks the kernel about the page at each address.
    pub(crate) fn of_pages(backend: &dyn Backend, pages: impl Iterator<Item = usize>) -> Result<Self, Error> {
        /// Pages asked for at a time: keeps the kernel's copies of the lists within a few pages.
        const BATCH: usize = 1024;
        let mut counts = NodeCounts::default();
        let mut batch = Vec::with_capacity(BATCH);
        let mut status = [0i32; BATCH];
        let mut pages = pages.peekable();
        while pages.peek().is_some() {
            batch.clear();
            batch.extend(pages.by_ref().take(BATCH));
            let status = &mut status[..batch.len()];
            backend.nodes_of(&batch, status).map_err(|errno| {
                Error::call(Call::QueryNodes, batch[0], batch[batch.len() - 1] - batch[0], errno)
            })?;
            for &node in status.iter() {
                match u32::try_from(node) {
                    Ok(node) => *counts.by_node.entry(NodeId(node)).or_default() += 1,
                    Err(_) => counts.absent += 1,
                }
            }
        }
        Ok(counts)
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
        let mut parts: Vec<String> = self.iter().map(|(node, pages)| format!("{node}: {pages}")).collect();
        if self.absent > 0 {
            parts.push(format!("absent: {}", self.absent));
        }
        f.write_str(if parts.is_empty() { "no pages" } else { "" })?;
        f.write_str(&parts.join(", "))
    }
}
