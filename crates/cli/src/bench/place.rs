//! What leaps: a region, two pools and the shadow copy; and whether they fit.

use std::sync::atomic::AtomicU64;
use std::thread::available_parallelism;

use pageleap::pool::reserve_command;
use pageleap::{Migration, NodeId, PageSize, Pool, Region};

use pageleap_measure::figures::human_bytes;
use pageleap_measure::load::Shadow;

use super::args::{EngineRow, EnginesArgs};
use crate::interrupt;
use crate::machine::{NodeMemory, Refusal};
use crate::stop::Stop;

/// Largest share of the free memory that is taken; the rest is for page tables and other programs.
const USABLE_SHARE: f64 = 0.95;
/// More threads fill a pool no faster.
const MOST_THREADS: usize = 16;

/// A region and the pools between which it leaps. The fields are dropped in this order: the region
/// gives its frames back to the pools first.
pub struct Place {
    /// What leaps.
    pub region: Region,
    /// Where it starts.
    pub source: Pool,
    /// Where it leaps to.
    pub destination: Pool,
    /// What the region must contain.
    pub shadow: Shadow,
}

impl Place {
    /// Takes the memory and fills the region, so that no two words are equal.
    pub fn build(bytes: u64, page: PageSize, from: u32, to: u32) -> Result<Place, Stop> {
        let threads = available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
        let pool = |node| -> Result<Pool, Stop> {
            interrupt::stop_if_received(|| "nothing was measured yet".to_owned())?;
            Ok(Pool::builder(NodeId(node), bytes).page_size(page).threads(threads).build()?)
        };
        let (source, destination) = (pool(from)?, pool(to)?);
        let region = Region::new(&source, bytes as usize)?;
        let shadow = Shadow::fill(region.atomics_u64(0..region.len())?);
        Ok(Place { region, source, destination, shadow })
    }

    /// Why an engine cannot be measured here: a page leaps by it, and back.
    pub fn unfit(&self, engine: &EngineRow) -> Result<Option<String>, Stop> {
        let page = 0..self.region.page_size().bytes();
        let to =
            |pool| Migration::new().range(&self.region, page.clone(), pool).engine(engine.choice);
        match to(&self.destination).start() {
            Ok(job) => drop(job.wait()),
            Err(why @ pageleap::Error::EngineRefused { .. }) => return Ok(Some(why.to_string())),
            Err(error) => return Err(error.into()),
        }
        drop(to(&self.source).start()?.wait());
        Ok(None)
    }

    /// The region as words.
    pub fn words(&self) -> Result<&[AtomicU64], Stop> {
        Ok(self.region.atomics_u64(0..self.region.len())?)
    }
}

/// Refuses a size that the ordinary memory of the nodes cannot hold beside the shadow copy.
pub fn check_memory(
    args: &EnginesArgs,
    pages: &[PageSize],
    nodes: &[NodeMemory],
    from: u32,
    to: u32,
) -> Result<(), Refusal> {
    let ordinary: Vec<PageSize> = pages.iter().copied().filter(|page| !page.is_hugetlb()).collect();
    let largest = ordinary.iter().map(|page| args.region_bytes(*page)).max().unwrap_or(0);
    let shadow = pages.iter().map(|page| args.region_bytes(*page)).max().unwrap_or(0);
    let pools = if ordinary.is_empty() { 0 } else { 1 };
    let demands = if from == to {
        vec![(from, 2 * pools, 1)]
    } else {
        vec![(from, pools, 1), (to, pools, 0)]
    };
    for (id, pools, shadows) in demands {
        let free = nodes.iter().find(|node| node.id == id).map_or(0, |node| node.free_bytes);
        let needed = pools as f64 * largest as f64 + shadows as f64 * shadow as f64;
        let usable = free as f64 * USABLE_SHARE;
        if needed > usable {
            // Rounded down to what the flag takes as it is printed.
            let fits = (usable / f64::from(pools + shadows)) as u64 >> 20;
            let remedy = if fits == 0 {
                "free some memory".to_owned()
            } else {
                format!("use --size {fits}m or less")
            };
            return Err(Refusal::new(format!(
                "--size {}: needs {} on node {id} (pools, and a shadow copy of the region), \
                 which has {} free; {remedy}",
                args.size,
                human_bytes(needed),
                human_bytes(free as f64),
            )));
        }
    }
    Ok(())
}

/// Why pages of this size cannot be measured here: too few huge pages are reserved and free.
pub fn missing_huge_pages(
    bytes: u64,
    page: PageSize,
    nodes: &[NodeMemory],
    from: u32,
    to: u32,
) -> Option<String> {
    if !page.is_hugetlb() {
        return None;
    }
    let pages = bytes / page.bytes() as u64;
    let demands =
        if from == to { vec![(from, 2 * pages)] } else { vec![(from, pages), (to, pages)] };
    demands.into_iter().find_map(|(id, needed)| {
        let free = nodes.iter().find(|node| node.id == id).map_or(0, |node| node.free_huge_pages);
        (free < needed).then(|| {
            format!(
                "needs {needed} free huge pages of {} on node {id}, which has {free}; as root: {}",
                human_bytes(page.bytes() as f64),
                reserve_command(NodeId(id), page, needed - free),
            )
        })
    })
}

/// Why areas of this size cannot be measured with pages of this size.
pub fn unfit_area(area: Option<usize>, page: PageSize) -> Option<String> {
    area.filter(|area| area % page.bytes() != 0).map(|area| {
        format!(
            "an area consists of whole pages, and {} is no multiple of {}",
            human_bytes(area as f64),
            human_bytes(page.bytes() as f64)
        )
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: EnginesArgs,
    }

    fn args(size: &str) -> EnginesArgs {
        Line::parse_from(["engines", "--size", size]).args
    }

    fn node(id: u32, free: u64, free_huge_pages: u64) -> NodeMemory {
        NodeMemory { id, total_bytes: 8 << 30, free_bytes: free, free_huge_pages }
    }

    #[test]
    fn the_size_that_a_refusal_names_fits() {
        let nodes = [node(0, 3 << 30, 0), node(1, 1 << 30, 0)];
        let pages = [PageSize::Base, PageSize::Thp];
        check_memory(&args("900m"), &pages, &nodes, 0, 0).unwrap();
        check_memory(&args("900m"), &pages, &nodes, 0, 1).unwrap();
        for to in [0, 1] {
            let refusal = check_memory(&args("2g"), &pages, &nodes, 0, to).unwrap_err().to_string();
            assert!(refusal.starts_with("--size 2147483648: needs "), "{refusal}");
            let named = refusal.split("use --size ").nth(1).unwrap().split(' ').next().unwrap();
            let fits = args(named);
            assert!(fits.size < 2 << 30);
            // To the other node what fits on the first may still be too much for the second, which
            // is named then.
            if to == 0 {
                check_memory(&fits, &[PageSize::Base], &nodes, 0, to).unwrap();
            }
        }
        let refusal =
            check_memory(&args("4k"), &[PageSize::Base], &[node(0, 0, 0)], 0, 0).unwrap_err();
        assert!(refusal.to_string().ends_with("free some memory"), "{refusal}");
    }

    #[test]
    fn missing_huge_pages_are_counted_on_both_nodes() {
        let page = PageSize::Huge2M;
        let nodes = [node(0, 1 << 30, 8), node(1, 1 << 30, 3)];
        assert_eq!(missing_huge_pages(8 << 20, page, &nodes, 0, 0), None);
        let why = missing_huge_pages(8 << 20, page, &nodes, 0, 1).unwrap();
        assert!(why.contains("needs 4 free huge pages of 2 MiB on node 1, which has 3"), "{why}");
        assert_eq!(missing_huge_pages(1 << 40, PageSize::Thp, &nodes, 0, 1), None);
    }

    #[test]
    fn areas_have_whole_pages() {
        assert_eq!(unfit_area(None, PageSize::Huge1G), None);
        assert_eq!(unfit_area(Some(512 << 10), PageSize::Base), None);
        assert_eq!(unfit_area(Some(16 << 20), PageSize::Thp), None);
        assert!(
            unfit_area(Some(512 << 10), PageSize::Thp)
                .unwrap()
                .contains("512 KiB is no multiple of 2 MiB")
        );
        assert!(unfit_area(Some(16 << 20), PageSize::Huge1G).is_some());
    }
}
