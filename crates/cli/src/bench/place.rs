//! The memory that leaps, and its shadow copy: a region between two pools, or private memory.
//! Checks here also tell, before anything is measured, whether they fit into the free memory.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use pageleap::{
    BASE_PAGE, Job, MemoryEngine, MemoryMigration, Migration, NodeId, PageSize, Reserve,
};
use pageleap_measure::experiments::memory::{Pools, refused};
use pageleap_measure::figures::human_bytes;
use pageleap_measure::load::Shadow;
use pageleap_measure::memcpy::Target;
use pageleap_measure::private::PrivateMemory;

use super::args::{EngineRow, EnginesArgs, Kind};
use super::memory::{USABLE_SHARE, stop_between_leaps};
use crate::machine::NodeMemory;
use crate::stop::{Refusal, Stop};

/// Rows of regions come from `EnginesArgs::rows`.
const OF_REGION: &str = "rows of regions name engines of regions";

/// The memory that leaps, with a shadow copy of its contents.
pub struct Place {
    /// The memory that leaps.
    pub memory: Memory,
    /// The words that the memory must contain.
    pub shadow: Shadow,
}

/// Memory that leaps, with its source and destination.
pub enum Memory {
    Region(Pools),
    Private(Private),
}

/// Private memory, and the nodes between which it leaps.
pub struct Private {
    memory: PrivateMemory,
    page: PageSize,
    from: NodeId,
    to: NodeId,
}

impl Place {
    /// Takes the memory, and fills it so that no two words are equal.
    pub fn build(bytes: u64, kind: Kind, from: u32, to: u32) -> Result<Place, Stop> {
        let (page, from, to) = (kind.page, NodeId(from), NodeId(to));
        let memory = match kind.private {
            true => Memory::Private(Private::build(bytes, page, from, to)?),
            false => {
                Memory::Region(Pools::build([bytes; 2], page, [from, to], stop_between_leaps)?)
            }
        };
        let shadow = Shadow::fill(memory.words()?);
        Ok(Place { memory, shadow })
    }
}

impl Private {
    fn build(bytes: u64, page: PageSize, from: NodeId, to: NodeId) -> Result<Private, Stop> {
        stop_between_leaps()?;
        let memory = PrivateMemory::new(bytes as usize, page, from)?;
        if page == PageSize::Thp {
            memory.check_huge()?;
        }
        Ok(Private { memory, page, from, to })
    }

    fn bytes(&self) -> usize {
        size_of_val(self.memory.words())
    }

    fn migration(&self, bytes: usize, to: NodeId, engine: Option<MemoryEngine>) -> MemoryMigration {
        // SAFETY: no thread unmaps, remaps or protects the memory. Each job is waited for, or
        // dropped, before the memory is unmapped.
        let migration = unsafe { MemoryMigration::new().range(self.memory.as_ptr(), bytes, to) };
        migration.engine(engine).renew(self.from == self.to)
    }
}

impl Memory {
    /// The memory as words.
    pub fn words(&self) -> Result<&[AtomicU64], Stop> {
        Ok(match self {
            Memory::Region(Pools { region, .. }) => region.atomics_u64(0..region.len())?,
            Memory::Private(private) => private.memory.words(),
        })
    }

    /// Pages, as reports count them.
    pub fn pages(&self) -> u64 {
        let (bytes, page) = match self {
            Memory::Region(Pools { region, .. }) => (region.len(), region.page_size().bytes()),
            Memory::Private(private) => (private.bytes(), BASE_PAGE),
        };
        (bytes / page) as u64
    }

    /// The memory that memcpys copy to.
    pub fn target(&self) -> Result<Target<'_>, Stop> {
        Ok(match self {
            Memory::Region(pools) => Target::new(&pools.region, &pools.destination)?,
            Memory::Private(Private { memory, page, to, .. }) => {
                let copy = PrivateMemory::new(size_of_val(memory.words()), *page, *to)?;
                Target::private(memory.words(), copy)
            }
        })
    }

    /// A leap to the destination, ready to be started.
    pub fn leap(&self, args: &EnginesArgs, engine: &EngineRow) -> Result<Leap<'_>, Stop> {
        let starter = engine.starter;
        match self {
            Memory::Region(pools) => {
                let migration = pools.migration(&pools.destination);
                let choice = engine.choice.for_region().expect(OF_REGION);
                let migration = migration.engine(choice).threads(args.threads);
                let migration =
                    args.wait_budget.into_iter().fold(migration, Migration::wait_budget);
                let migration = engine.area.into_iter().fold(migration, Migration::area_bytes);
                let start = move || starter.run(move || migration.start());
                Ok(Leap { start: Box::new(start), populate_ns: None })
            }
            Memory::Private(private) => {
                let migration =
                    private.migration(private.bytes(), private.to, engine.choice.memory_engine());
                let migration =
                    args.wait_budget.into_iter().fold(migration, MemoryMigration::wait_budget);
                let began = Instant::now();
                let reserve = match engine.choice.memory_engine() {
                    // The kernel takes fresh memory itself, so no reserve is of use.
                    Some(MemoryEngine::Kernel) => None,
                    Some(MemoryEngine::UffdMove) | None => {
                        Some(Reserve::new(private.to, private.bytes(), private.page)?)
                    }
                };
                let populate_ns = reserve.is_some().then(|| began.elapsed().as_nanos() as u64);
                let migration = reserve
                    .into_iter()
                    .fold(migration, |migration, reserve| migration.reserve(&Arc::new(reserve)));
                let start = move || starter.run(move || migration.start());
                Ok(Leap { start: Box::new(start), populate_ns })
            }
        }
    }

    /// Starts the way back to where the memory was at first.
    pub fn back(&self) -> Result<Job, pageleap::Error> {
        match self {
            Memory::Region(pools) => pools.migration(&pools.source).start(),
            Memory::Private(private) => {
                let migration = private.migration(private.bytes(), private.from, None);
                // Without `renew`, pages that already lie on the node stay, so on a machine with
                // one node nothing moves.
                migration.renew(false).start()
            }
        }
    }

    /// Why an engine cannot be measured here; `None` if it can. To find out, a page leaps by it,
    /// and back.
    pub fn unfit(&self, engine: &EngineRow) -> Result<Option<String>, Stop> {
        match self {
            Memory::Region(pools) => Ok(pools.unfit(engine.choice.for_region().expect(OF_REGION))?),
            Memory::Private(Private { from, to, .. })
                if from == to && engine.choice.moves_to_other_nodes_only() =>
            {
                Ok(Some("it moves pages to other nodes only".into()))
            }
            Memory::Private(private) => {
                let page = private.page.bytes();
                let leap = private.migration(page, private.to, engine.choice.memory_engine());
                Ok(refused(leap.start(), || self.back())?)
            }
        }
    }
}

/// A leap that has not begun.
pub struct Leap<'a> {
    /// Starts the leap.
    pub start: Box<dyn FnOnce() -> Result<Job, pageleap::Error> + Send + 'a>,
    /// The time to take and populate the memory that the leap copies into, in nanoseconds; `None`
    /// without such memory.
    pub populate_ns: Option<u64>,
}

/// Refuses a size that the ordinary memory of the nodes cannot hold beside the shadow copy.
pub fn check_memory(
    args: &EnginesArgs,
    kinds: &[Kind],
    nodes: &[NodeMemory],
    from: u32,
    to: u32,
) -> Result<(), Refusal> {
    let pages: Vec<PageSize> = kinds.iter().map(|kind| kind.page).collect();
    // Private memory needs as much as pools: itself, and a reserve or the target of memcpys.
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
            // Rounded down to whole megabytes, so that the flag accepts the size as it is printed.
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
        let pages = [PageSize::Base, PageSize::Thp].map(Kind::from);
        check_memory(&args("900m"), &pages, &nodes, 0, 0).unwrap();
        check_memory(&args("900m"), &pages, &nodes, 0, 1).unwrap();
        for to in [0, 1] {
            let refusal = check_memory(&args("2g"), &pages, &nodes, 0, to).unwrap_err().to_string();
            assert!(refusal.starts_with("--size 2147483648: needs "), "{refusal}");
            let named = refusal.split("use --size ").nth(1).unwrap().split(' ').next().unwrap();
            let fits = args(named);
            assert!(fits.size < 2 << 30);
            // The size that fits on the first node may still be too large for the second. The error
            // then names the second.
            if to == 0 {
                check_memory(&fits, &[PageSize::Base.into()], &nodes, 0, to).unwrap();
            }
        }
        let refusal = check_memory(&args("4k"), &[PageSize::Base.into()], &[node(0, 0, 0)], 0, 0)
            .unwrap_err();
        assert!(refusal.to_string().ends_with("free some memory"), "{refusal}");
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
