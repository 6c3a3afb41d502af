//! The memory that moves in experiments, and its contents.

use std::sync::atomic::{AtomicU64, Ordering};

use pageleap::{EngineChoice, Job, Migration, NodeId, PageSize, Pool, Region};

use crate::Error;
use crate::private::PrivateMemory;
use crate::random::scattered;

/// More threads that fill pools would not make a node's memory faster.
const MOST_THREADS: usize = 16;

/// A region and the pools between which it leaps. The fields are dropped in this order: the region
/// gives its frames back to the pools first.
pub struct Pools {
    /// It has all frames of the source at first.
    pub region: Region,
    /// Where the region is at first.
    pub source: Pool,
    /// Where it leaps.
    pub destination: Pool,
}

impl Pools {
    /// Builds a pool of `bytes[0]` bytes on `from` and one of `bytes[1]` on `to`. The region takes
    /// all of the first one. Asks `go_on` before each pool.
    ///
    /// # Errors
    /// Those of `go_on`, and if a node has too little memory.
    pub fn build<E: From<Error>>(
        bytes: [u64; 2],
        page: PageSize,
        [from, to]: [NodeId; 2],
        go_on: impl Fn() -> Result<(), E>,
    ) -> Result<Pools, E> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let pool = |node, bytes| -> Result<Pool, E> {
            go_on()?;
            let pool =
                Pool::builder(node, bytes).page_size(page).threads(threads.min(MOST_THREADS));
            pool.build().map_err(|error| Error::from(error).into())
        };
        let (source, destination) = (pool(from, bytes[0])?, pool(to, bytes[1])?);
        let region = Region::new(&source, bytes[0] as usize).map_err(Error::from)?;
        Ok(Pools { region, source, destination })
    }

    /// Why an engine cannot move the region here; `None` if it can. To find out, a page leaps by
    /// it, and back.
    ///
    /// # Errors
    /// That leap fails for another reason.
    pub fn unfit(&self, engine: EngineChoice) -> Result<Option<String>, pageleap::Error> {
        let page = 0..self.region.page_size().bytes();
        let leap = Migration::new().range(&self.region, page, &self.destination);
        refused(leap.engine(engine).start(), || self.migration(&self.source).start())
    }

    /// A leap of the whole region into a pool.
    pub fn migration<'a>(&'a self, pool: &'a Pool) -> Migration<'a> {
        Migration::new().range(&self.region, 0..self.region.len(), pool)
    }
}

/// Why an engine refused to start a leap. If it did not refuse, waits for the leap and the way
/// back, and returns `None`.
///
/// # Errors
/// The leap failed for another reason.
pub fn refused(
    started: Result<Job, pageleap::Error>,
    back: impl FnOnce() -> Result<Job, pageleap::Error>,
) -> Result<Option<String>, pageleap::Error> {
    match started {
        Ok(job) => drop(job.wait()),
        Err(why @ pageleap::Error::EngineRefused { .. }) => return Ok(Some(why.to_string())),
        Err(error) => return Err(error),
    }
    drop(back()?.wait());
    Ok(None)
}

/// Private memory that is touched and filled, in pages of this size on this node.
///
/// # Errors
/// The machine has too little memory, or gives too few huge pages.
pub fn private(
    bytes: u64,
    page: PageSize,
    node: NodeId,
    seed: u64,
) -> Result<PrivateMemory, Error> {
    let memory = PrivateMemory::new(bytes as usize, page, node)?;
    if page == PageSize::Thp {
        memory.check_huge()?;
    }
    fill(memory.words(), seed);
    Ok(memory)
}

/// Gives each word a value that depends on its place, and that no copy of zeros or of other words
/// has.
pub(crate) fn fill(words: &[AtomicU64], seed: u64) {
    for (at, word) in words.iter().enumerate() {
        word.store(value(at, seed), Ordering::Relaxed);
    }
}

/// Words that do not have the value of [`fill`].
pub(crate) fn wrong(words: &[AtomicU64], seed: u64) -> u64 {
    let is_wrong =
        |(at, word): &(usize, &AtomicU64)| word.load(Ordering::Relaxed) != value(*at, seed);
    words.iter().enumerate().filter(is_wrong).count() as u64
}

fn value(at: usize, seed: u64) -> u64 {
    scattered((at as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_word_is_found() {
        let words: Vec<AtomicU64> = (0..5000).map(|_| AtomicU64::new(0)).collect();
        assert_eq!(wrong(&words, 3), 5000);
        fill(&words, 3);
        assert_eq!(wrong(&words, 3), 0);
        assert_eq!(wrong(&words, 4), 5000);
        words[77].fetch_add(1, Ordering::Relaxed);
        words[78].store(0, Ordering::Relaxed);
        assert_eq!(wrong(&words, 3), 2);
    }
}
