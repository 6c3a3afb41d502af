//! Decides whether the demo fits into memory, before the generator starts.

use pageleap::pool::reserve_command;
use pageleap::{NodeId, PageSize};
use pageleap_measure::figures::human_bytes;

use super::args::Memory;
use crate::machine::NodeMemory;
use crate::stop::Refusal;
use pageleap_measure::tpch::lineitem::{
    MIN_SCALE_FACTOR, ROWS_AT_SF1, TEXT_POOL_BYTES, estimate_bytes,
};

/// Largest share of the free memory that the demo takes. The rest is for page tables and other
/// processes.
const USABLE_SHARE: f64 = 0.95;

/// The memory that the demo needs.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// TPC-H scale factor.
    pub scale_factor: f64,
    /// Memory of the table.
    pub memory: Memory,
    /// Node to start from.
    pub from: u32,
    /// Node to move to.
    pub to: u32,
    /// The size of the table's pages.
    pub page: PageSize,
    /// Whether the demo will reserve missing huge pages.
    pub reserve: bool,
}

impl Demand {
    /// Refuses a demo that will not fit.
    pub fn check(&self, nodes: &[NodeMemory]) -> Result<(), Refusal> {
        let from = find(nodes, self.from)?;
        let to = find(nodes, self.to)?;
        // The target of the memcpy beside the load takes frames of the destination pool. Where
        // there is no pool, it lies beside the reserve.
        let at_destination = match self.memory {
            Memory::Pool => 1,
            Memory::Malloc => 2,
        };
        if self.from == self.to {
            self.check_node(from, 1 + at_destination, true)
        } else {
            self.check_node(from, 1, true)?;
            self.check_node(to, at_destination, false)
        }
    }

    /// Refuses a node that has too little free memory for the table `tables` times. With
    /// `ordinary`, the demo's other memory must fit too.
    fn check_node(&self, node: &NodeMemory, tables: u32, ordinary: bool) -> Result<(), Refusal> {
        let table = estimate_bytes(self.scale_factor);
        // The demo frees the text of the comments before it makes the shadow copy.
        let shadow = self.scale_factor * ROWS_AT_SF1 as f64 * size_of::<u64>() as f64;
        let beside = if ordinary { shadow.max(TEXT_POOL_BYTES as f64) } else { 0.0 };
        let page = self.page.bytes() as f64;
        let pages = f64::from(tables) * (table / page).ceil();
        let table_bytes = pages * page;

        if self.page.is_hugetlb() && !self.reserve {
            if pages > node.free_huge_pages as f64 {
                let missing = pages - node.free_huge_pages as f64;
                return Err(Refusal::new(format!(
                    "--page-size {size} --scale-factor {}: needs {pages} free huge pages of {} on node {id}, which has \
                     {free}; add --reserve-huge-pages (needs root), or type {}, or use --page-size thp or 4k",
                    self.scale_factor,
                    human_bytes(page),
                    reserve_command(NodeId(node.id), self.page, missing as u64),
                    size = self.page,
                    id = node.id,
                    free = node.free_huge_pages,
                )));
            }
            return Ok(());
        }
        let usable = node.free_bytes as f64 * USABLE_SHARE;
        if table_bytes + beside <= usable {
            return Ok(());
        }
        let largest =
            (usable - beside.min(TEXT_POOL_BYTES as f64)) / (table_bytes / self.scale_factor);
        let largest = largest.min(usable / ((table_bytes + shadow) / self.scale_factor));
        let remedy = if largest >= MIN_SCALE_FACTOR {
            format!("use --scale-factor {} or less", round_down(largest))
        } else {
            "free some memory".to_owned()
        };
        let what = match self.memory {
            Memory::Pool => "pool",
            Memory::Malloc => "block",
        };
        Err(Refusal::new(format!(
            "--scale-factor {}: needs about {} on node {id} ({tables} {what}{} of {}, and {} for the generator and a \
             shadow copy), but node {id} has {} free; {remedy}",
            self.scale_factor,
            human_bytes(table_bytes + beside),
            if tables == 1 { "" } else { "s" },
            human_bytes(table),
            human_bytes(beside),
            human_bytes(node.free_bytes as f64),
            id = node.id,
        )))
    }
}

fn find(nodes: &[NodeMemory], id: u32) -> Result<&NodeMemory, Refusal> {
    nodes
        .iter()
        .find(|node| node.id == id)
        .ok_or_else(|| Refusal::new(format!("node {id} does not exist")))
}

/// Rounds down to two significant digits; the result never exceeds `value`.
fn round_down(value: f64) -> f64 {
    let unit = 10f64.powf(value.log10().floor() - 1.0);
    let rounded = (value / unit).floor() * unit;
    // Printing and parsing removes the tail of digits that the multiplication by a power of ten
    // leaves.
    format!("{rounded:.6}").parse().unwrap_or(rounded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(id: u32, total_gib: u64, free_gib: u64) -> NodeMemory {
        NodeMemory {
            id,
            total_bytes: total_gib << 30,
            free_bytes: free_gib << 30,
            free_huge_pages: 0,
        }
    }

    fn demand(scale_factor: f64, to: u32) -> Demand {
        let (memory, page) = (Memory::Pool, PageSize::Base);
        Demand { scale_factor, memory, from: 0, to, page, reserve: false }
    }

    #[test]
    fn what_fits_is_accepted_and_the_largest_that_fits_is_named() {
        let nodes = [node(0, 24, 22), node(1, 24, 4)];
        demand(1.0, 0).check(&nodes).unwrap();
        demand(10.0, 0).check(&nodes).unwrap();
        for (factor, to) in [(100.0, 0), (1e9, 0), (10.0, 1)] {
            let refusal = demand(factor, to).check(&nodes).unwrap_err().to_string();
            assert!(refusal.contains("free; use --scale-factor "), "{refusal}");
            let named =
                refusal.split("use --scale-factor ").nth(1).unwrap().split(' ').next().unwrap();
            demand(named.parse().unwrap(), to).check(&nodes).unwrap();
        }
        let refusal = demand(1.0, 0).check(&[node(0, 24, 0)]).unwrap_err().to_string();
        assert!(refusal.ends_with("free some memory"), "{refusal}");
    }

    #[test]
    fn a_block_of_malloc_needs_room_for_a_reserve_and_a_copy() {
        let of_malloc = |to| Demand { memory: Memory::Malloc, ..demand(10.0, to) };
        // One table has 8.4 GB.
        let nodes = [node(0, 24, 22), node(1, 24, 12)];
        demand(10.0, 1).check(&nodes).unwrap();
        for (to, tables) in [(0, "3 blocks"), (1, "2 blocks")] {
            let refusal = of_malloc(to).check(&nodes).unwrap_err().to_string();
            assert!(refusal.contains(tables), "{refusal}");
        }
        of_malloc(1).check(&[node(0, 24, 12), node(1, 24, 22)]).unwrap();
        of_malloc(0).check(&[node(0, 48, 44)]).unwrap();
    }

    #[test]
    fn huge_pages_must_be_free_or_be_reserved() {
        let mut nodes = [node(0, 24, 22)];
        let mut demand = Demand { page: PageSize::Huge2M, ..demand(1.0, 0) };
        let refusal = demand.check(&nodes).unwrap_err().to_string();
        assert!(
            refusal.contains("needs 802 free huge pages of 2 MiB on node 0, which has 0"),
            "{refusal}"
        );
        nodes[0].free_huge_pages = 802;
        demand.check(&nodes).unwrap();
        nodes[0].free_huge_pages = 0;
        demand.reserve = true;
        demand.check(&nodes).unwrap();
    }

    #[test]
    fn rounding_never_exceeds() {
        for (value, rounded) in
            [(12.96, 12.0), (129.0, 120.0), (0.0999, 0.099), (1.0, 1.0), (3.57, 3.5)]
        {
            assert!((round_down(value) - rounded).abs() < 1e-9, "{value}");
            assert!(round_down(value) <= value);
        }
    }
}
