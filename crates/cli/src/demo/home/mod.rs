//! Where the table lies: memory that leaps to another node and back.

mod malloc;
mod pools;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::AtomicU64;

use pageleap::observe::MappedPages;
use pageleap::{Job, PageRun};
use pageleap_measure::memcpy::Target;

use super::args::{DemoArgs, Memory};
use crate::stop::Stop;

pub use malloc::Block;
pub use pools::Pools;

/// Most threads that fill the memory or generate the table. More threads gain no speed, because
/// they exhaust the memory bandwidth.
pub const MOST_THREADS: usize = 16;

/// Pages by node.
pub type NodePages = BTreeMap<u32, u64>;

/// The direction of a leap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// To the destination.
    There,
    /// To where the table began.
    Back,
}

/// Memory that holds the table and leaps: a region, or a block of the allocator.
pub trait Home: Sync {
    /// All of the memory as words.
    fn words(&self) -> Result<&[AtomicU64], Stop>;

    /// Bytes of a page, as reports and frames count them.
    fn page_bytes(&self) -> usize;

    /// Pages by node, as the kernel reports them.
    fn placement(&self) -> Result<NodePages, Stop>;

    /// The frame of each page; `None` if the kernel hides frames.
    fn frames(&self) -> Result<Option<Vec<u64>>, Stop>;

    /// How it is mapped.
    fn mapped_pages(&self) -> Result<MappedPages, Stop>;

    /// Mappings that a leap may change in number.
    fn mapping_count(&self) -> Result<usize, pageleap::Error>;

    /// The bytes of the table that a run of pages in a report stands for.
    fn bytes_of(&self, run: &PageRun) -> Range<usize>;

    /// Memory that memcpys copy to. It is populated as the memory is that leaps copy into, so that
    /// both cost the same.
    fn memcpy_target(&self) -> Result<Target<'_>, Stop>;

    /// Populates the memory that the next leap in this direction copies into. Returns the time for
    /// it in nanoseconds; `None` if there is nothing to populate.
    fn prepare(&self, way: Way) -> Result<Option<u64>, Stop>;

    /// Populated bytes that no leap in this direction has taken; `None` without such memory.
    fn left_over(&self, way: Way) -> Option<u64>;

    /// Starts a leap of all of it.
    fn leap(&self, args: &DemoArgs, wishes: Wishes) -> Result<Job, pageleap::Error>;
}

/// The options of one leap.
#[derive(Clone, Copy, Debug)]
pub struct Wishes {
    /// The direction.
    pub way: Way,
    /// Whether the time-out of the arguments holds.
    pub may_time_out: bool,
}

/// Takes memory for a table of `bytes` bytes, on `nodes`: where it begins, and its destination.
pub fn take(args: &DemoArgs, bytes: usize, nodes: [u32; 2]) -> Result<Box<dyn Home>, Stop> {
    Ok(match args.memory {
        Memory::Pool => Box::new(Pools::take(args, bytes, nodes)?),
        Memory::Malloc => Box::new(Block::take(args, bytes, nodes)?),
    })
}

/// Refuses memory that cannot leap on this machine, before anything takes time.
pub fn check(args: &DemoArgs, nodes: [u32; 2]) -> Result<(), Stop> {
    match args.memory {
        Memory::Pool => Ok(()),
        Memory::Malloc => malloc::moves_in_place(args, nodes).map(drop),
    }
}
