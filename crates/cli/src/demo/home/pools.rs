//! A region, and the two pools between which it leaps.

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::thread::available_parallelism;

use pageleap::observe::{self, MappedPages};
use pageleap::{Job, Migration, NodeId, PageRun, Pool, Region};
use pageleap_measure::memcpy::Target;
use pageleap_settings::BorrowedPages;

use super::super::args::DemoArgs;
use super::{Home, MOST_THREADS, NodePages, Way, Wishes};
use crate::stop::Stop;
use crate::{progress, settings};

/// The region and its pools.
///
/// Rust drops the fields in this order, and the order matters. First the region returns its frames
/// to the pools. Then the pools return their frames to the kernel. Only then can reserved huge
/// pages be released.
pub struct Pools {
    region: Region,
    /// The pool that the region starts in.
    source: Pool,
    /// The pool to leap to. It is as large as the region.
    destination: Pool,
    _reserved: Option<BorrowedPages>,
}

impl Pools {
    /// Fills two pools and takes a region of the first one. Before that it reserves huge pages if a
    /// flag asks for them.
    pub fn take(args: &DemoArgs, bytes: usize, [from, to]: [u32; 2]) -> Result<Pools, Stop> {
        let reserved = reserve_huge_pages(args, bytes, [from, to])?;
        let threads = available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
        let pool = |node, title: &str| -> Result<Pool, Stop> {
            super::super::stop_if_interrupted()?;
            let bar = progress::bytes(title, bytes as u64);
            let shown = bar.clone();
            let pool = Pool::builder(NodeId(node), bytes as u64)
                .page_size(args.page_size)
                .threads(threads)
                .progress(move |done, _total| shown.set_position(done))
                .build();
            bar.finish_and_clear();
            Ok(pool?)
        };
        let source = pool(from, "filling source pool")?;
        let destination = pool(to, "filling second pool")?;
        super::super::stop_if_interrupted()?;
        let region = Region::new(&source, bytes)?;
        Ok(Pools { region, source, destination, _reserved: reserved })
    }
}

fn reserve_huge_pages(
    args: &DemoArgs,
    bytes: usize,
    [from, to]: [u32; 2],
) -> Result<Option<BorrowedPages>, Stop> {
    if !args.reserve_huge_pages {
        return Ok(None);
    }
    let pages = (bytes / args.page_size.bytes()) as u64;
    let demands =
        if from == to { vec![(from, 2 * pages)] } else { vec![(from, pages), (to, pages)] };
    settings::reserve_huge_pages(args.page_size, &demands).map(Some).or_else(|stop| {
        // A signal ends the call before the kernel has found all pages.
        super::super::stop_if_interrupted()?;
        Err(stop)
    })
}

impl Home for Pools {
    fn words(&self) -> Result<&[AtomicU64], Stop> {
        Ok(self.region.atomics_u64(0..self.region.len())?)
    }

    fn page_bytes(&self) -> usize {
        self.region.page_size().bytes()
    }

    fn placement(&self) -> Result<NodePages, Stop> {
        Ok(self.region.placement()?.iter().map(|(node, pages)| (node.0, pages)).collect())
    }

    fn frames(&self) -> Result<Option<Vec<u64>>, Stop> {
        Ok(self.region.frame_numbers()?)
    }

    fn mapped_pages(&self) -> Result<MappedPages, Stop> {
        Ok(self.region.mapped_pages()?)
    }

    fn mapping_count(&self) -> Result<usize, pageleap::Error> {
        observe::pool_mapping_count()
    }

    fn bytes_of(&self, run: &PageRun) -> Range<usize> {
        run.range.clone()
    }

    /// Takes frames of the destination, which are faulted in already. The target has to be dropped
    /// before the next leap, which needs them: the pool has no others.
    fn memcpy_target(&self) -> Result<Target<'_>, Stop> {
        Ok(Target::new(&self.region, &self.destination)?)
    }

    fn prepare(&self, _way: Way) -> Result<Option<u64>, Stop> {
        Ok(None)
    }

    fn left_over(&self, _way: Way) -> Option<u64> {
        None
    }

    fn leap(&self, args: &DemoArgs, wishes: Wishes) -> Result<Job, pageleap::Error> {
        let pool = match wishes.way {
            Way::There => &self.destination,
            Way::Back => &self.source,
        };
        let migration = Migration::new()
            .range(&self.region, 0..self.region.len(), pool)
            .engine(args.engine.for_region().expect("the flags were checked"))
            .threads(args.threads);
        let migration = args.area.into_iter().fold(migration, Migration::area_bytes);
        let timeout = args.timeout.filter(|_| wishes.may_time_out);
        timeout.into_iter().fold(migration, Migration::timeout).start()
    }
}
