//! What both machines must show. The account computes it from the program in the plainest way. It
//! catches errors that both machines have in common, because they run the same code of the library.

use std::collections::BTreeMap;
use std::ops::Range;

use pageleap::BASE_PAGE;
use pageleap::backend::Prot;

use crate::machine::{Page, RegionView, pattern};
use crate::program::{Attribute, End, Step};
use crate::{FIRST_REGIONS, POOLS, REGIONS};

/// What a backed page must show.
#[derive(Clone, Copy)]
struct Wanted {
    /// The number of its pool. Pools are numbered in the order of their creation.
    pool: usize,
    value: u64,
    access: Prot,
    dont_fork: bool,
    dont_dump: bool,
    locked: bool,
}

/// The pages of all regions after the steps so far.
pub struct Account {
    /// The number of the pool at each place.
    pools: Vec<usize>,
    /// How many pools have been made.
    made: usize,
    regions: Vec<Vec<Option<Wanted>>>,
    /// The file of each pool, once a page has shown it. Keys are numbers of pools.
    files: BTreeMap<usize, usize>,
}

impl Account {
    pub fn new() -> Account {
        let regions = vec![vec![Some(Wanted::new(0)); FIRST_REGIONS]; REGIONS];
        let made = POOLS - 1;
        Account { pools: (0..made).collect(), made, regions, files: BTreeMap::new() }
    }

    fn pool(&self, place: usize) -> usize {
        self.pools[place % self.pools.len()]
    }

    /// The backed pages of a part of a region, with their positions in it. The part may extend
    /// beyond the region.
    fn pages(
        &mut self,
        region: usize,
        part: &Range<usize>,
    ) -> impl Iterator<Item = (u64, &mut Wanted)> {
        let pages = part.start / BASE_PAGE..part.end.div_ceil(BASE_PAGE);
        let all = self.regions[region].iter_mut().skip(pages.start).take(pages.len());
        all.enumerate().filter_map(|(i, page)| Some((i as u64, page.as_mut()?)))
    }

    /// Applies a step that was not refused.
    pub fn note(&mut self, step: &Step) {
        let new = |pool| Some(Wanted::new(pool));
        match step {
            Step::NewPool { pool, .. } => {
                let place = (*pool).min(self.pools.len());
                self.pools.resize(self.pools.len().max(place + 1), 0);
                self.pools[place] = self.made;
                self.made += 1;
            }
            Step::NewRegion { region, pool, bytes } => {
                self.regions[*region] = vec![new(self.pool(*pool)); bytes.div_ceil(BASE_PAGE)];
            }
            Step::Reserve { region, .. } | Step::DropRegion { region } => {
                self.regions[*region].clear()
            }
            Step::Grow { region, bytes, pool } => {
                let (pool, pages) = (self.pool(*pool), &mut self.regions[*region]);
                pages.resize(pages.len().max(bytes.div_ceil(BASE_PAGE)), new(pool));
            }
            Step::Back { region, part, pool } => {
                let pool = self.pool(*pool);
                self.regions[*region][part.start / BASE_PAGE..part.end / BASE_PAGE].fill(new(pool));
            }
            Step::Discard { region, part } => {
                self.regions[*region][part.start / BASE_PAGE..part.end / BASE_PAGE].fill(None);
            }
            Step::Write { region, part, value } => {
                let writable = self.pages(*region, part).filter(|(_, page)| page.access.writable());
                writable.for_each(|(i, page)| page.value = value.wrapping_add(i).max(1));
            }
            Step::Set { region, part, what } => {
                self.pages(*region, part).for_each(|(_, page)| page.set(*what))
            }
            Step::Migrate { moves, end, .. } => {
                if *end == End::DropRegion
                    && let Some(first) = moves.iter().find(|m| !self.regions[m.region].is_empty())
                {
                    self.regions[first.region].clear();
                }
                for m in moves {
                    let pool = self.pool(m.to);
                    self.pages(m.region, &m.part).for_each(|(_, page)| page.pool = pool);
                }
            }
        }
    }

    /// Checks what a machine shows of a region.
    pub fn check(&mut self, region: usize, view: &RegionView) -> Result<(), String> {
        let wanted = self.regions[region].clone();
        if wanted.len() * BASE_PAGE != view.len {
            return Err(format!(
                "region {region} has {} bytes instead of {} pages",
                view.len,
                wanted.len()
            ));
        }
        for (number, (page, wanted)) in view.pages.iter().zip(wanted).enumerate() {
            let agrees = match (page, wanted) {
                (Page::Unbacked, None) => true,
                (
                    Page::Backed { file, access, dont_fork, dont_dump, locked, words, .. },
                    Some(w),
                ) => {
                    let right_pool = *self.files.entry(w.pool).or_insert(*file) == *file;
                    let alone = self.files.values().filter(|of| *of == file).count() == 1;
                    let attributes = (*access, *dont_fork, *dont_dump, *locked);
                    right_pool
                        && alone
                        && attributes == (w.access, w.dont_fork, w.dont_dump, w.locked)
                        && *words == std::array::from_fn(|i| pattern(w.value, i))
                }
                _ => false,
            };
            if !agrees {
                return Err(format!(
                    "page {number} of region {region} shows {page:?}, which is wrong"
                ));
            }
        }
        Ok(())
    }
}

impl Wanted {
    fn new(pool: usize) -> Wanted {
        let access = Prot::READ_WRITE;
        Wanted { pool, value: 0, access, dont_fork: true, dont_dump: false, locked: false }
    }

    fn set(&mut self, what: Attribute) {
        match what {
            Attribute::NoAccess => self.access = Prot::NONE,
            Attribute::ReadOnly => self.access = Prot::READ,
            Attribute::ReadWrite => self.access = Prot::READ_WRITE,
            Attribute::DontFork => self.dont_fork = true,
            Attribute::DoFork => self.dont_fork = false,
            Attribute::DontDump => self.dont_dump = true,
            Attribute::DoDump => self.dont_dump = false,
            Attribute::Lock => self.locked = true,
            Attribute::Unlock => self.locked = false,
        }
    }
}
