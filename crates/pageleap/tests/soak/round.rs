//! The load of a round. It follows from the seed, the round's number and the abilities of the
//! machine.

use pageleap::backend::Errno;
use pageleap::{Engine, EngineChoice, PageSize};

use crate::common::{PAGE_SIZES, Random, in_lab, works};

/// Owners of words: writers, actors that let the kernel write, the actor that writes by frames, and
/// the signal handlers.
pub const OWNERS: usize = MOST_WRITERS + MOST_KERNEL_WRITERS + 2;
pub const MOST_WRITERS: usize = 4;
pub const MOST_KERNEL_WRITERS: usize = 2;
pub const FRAME_WRITER: usize = MOST_WRITERS + MOST_KERNEL_WRITERS;
pub const HANDLERS: usize = FRAME_WRITER + 1;

/// A page size, and the engines of jobs. Each job chooses one of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Kind {
    pub page: PageSize,
    pub engines: Vec<EngineChoice>,
}

/// How much room pools have beside the regions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Room {
    /// Each pool has room for all regions twice.
    Plenty,
    /// Each pool has this many spare pages. Jobs are refused, or wait for frames that are being
    /// recycled.
    Pages(usize),
}

/// How calls are made to fail.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    pub errno: Errno,
    /// The most calls in a row that are refused.
    pub burst: u64,
    /// Which call fails with ENOMEM after its effect, counted from when that is armed.
    pub late: u64,
}

/// The pools, regions and actors of one round.
#[derive(Clone, Debug)]
pub struct Round {
    pub seed: u64,
    pub number: u64,
    pub kind: Kind,
    pub pools: usize,
    pub room: Room,
    pub regions: usize,
    pub region_pages: usize,
    /// Threads that start jobs.
    pub movers: usize,
    /// Whether movers move any pages. If not, each moves pages of its own only.
    pub roaming: bool,
    pub writers: usize,
    /// Percentage of the writes that go to 3.125 % of the words.
    pub skew: u64,
    /// Pause of a writer between two writes, in spins.
    pub pause: u32,
    pub readers: usize,
    pub kernel_writers: usize,
    pub kernel_reader: bool,
    pub guards: bool,
    pub children: bool,
    /// Whether actors get signals. With `Some(true)` interrupted system calls are restarted.
    pub signals: Option<bool>,
    pub bystander: bool,
    /// Whether a thread makes, grows, discards, backs and drops regions of its own.
    pub tenant: bool,
    /// Whether a thread lets the kernel drop page table entries, as swapping does.
    pub forgets: bool,
    /// Whether parts of the regions have attributes: locked, left out of core dumps.
    pub attributes: bool,
    pub faults: Option<Faults>,
}

/// The name of the sanitizer under which the test runs, or an empty string.
pub fn sanitizer() -> String {
    std::env::var("PAGELEAP_SOAK_SANITIZER").unwrap_or_default()
}

/// Whether jobs can ask for an engine by name. The probe that tells creates a thread in a way that
/// the thread sanitizer's runtime does not support. Under that sanitizer only `auto` and `mprotect`
/// are sure to work.
pub fn is_known_to_work(engine: EngineChoice) -> bool {
    engine.forced().is_none_or(|engine| engine.needs().is_none())
        || sanitizer() != "thread" && works(engine)
}

impl Kind {
    /// All kinds whose engines work on this machine.
    pub fn all() -> Vec<Kind> {
        let mut kinds = Vec::new();
        for page in PAGE_SIZES {
            let works = |engine: &EngineChoice| {
                is_known_to_work(*engine) && engine.forced().is_none_or(|engine| engine.moves(page))
            };
            let engines: Vec<EngineChoice> = EngineChoice::ALL.into_iter().filter(works).collect();
            // Each engine alone, and all together.
            kinds.extend(engines.iter().map(|engine| Kind { page, engines: vec![*engine] }));
            kinds.push(Kind { page, engines });
        }
        kinds
    }

    /// Whether a leap by one of the engines may make a system call fail (docs/protocol.md, section
    /// 10).
    pub fn lets_system_calls_fail(&self) -> bool {
        // With `auto` it is sure only where an engine works for pages of every size that does not.
        let sure = |engine: &Engine| !engine.signals() && engine.moves(PageSize::Huge2M);
        let none_fails = |engine: Engine| sure(&engine) && is_known_to_work(engine.into());
        let may = |choice: &EngineChoice| match choice.forced() {
            Some(engine) => engine.signals(),
            None => !Engine::ALL.into_iter().any(none_fails),
        };
        self.engines.iter().any(may)
    }
}

impl Round {
    /// The round with this number. Each of `kinds` comes once before any comes again, in an order
    /// that follows from the seed.
    pub fn draw(seed: u64, number: u64, kinds: &[Kind]) -> Round {
        let (cycle, place) = (number / kinds.len() as u64, (number % kinds.len() as u64) as usize);
        let mut order: Vec<&Kind> = kinds.iter().collect();
        let mut shuffle = stream(seed, &[1, cycle]);
        (1..order.len()).for_each(|last| order.swap(last, shuffle.below(last as u64 + 1) as usize));
        let kind = order[place].clone();

        let mut random = stream(seed, &[2, number]);
        let mut between =
            |least: usize, most: usize| least + random.below((most - least + 1) as u64) as usize;
        let regions = between(1, 3);
        // All regions together have 2 to 16 MB of base pages, or 8 to 24 MB of huge pages.
        let region_pages = match kind.page {
            PageSize::Base => between(512, 4096) / if in_lab() { 8 } else { 1 } / regions,
            _ => (between(4, 12) / if in_lab() { 2 } else { 1 } / regions).max(2),
        };
        let room = match between(0, 2) {
            0 => Room::Pages(between(1, region_pages / 2)),
            _ => Room::Plenty,
        };
        let chance = |percent: u64, random: &mut Random| random.below(100) < percent;
        let faults = chance(25, &mut random).then(|| {
            let errno =
                [libc::ENOMEM, libc::ENOMEM, libc::EINVAL, libc::EPERM][random.below(4) as usize];
            // When the library ends a registration, it takes several EINVAL in a row as the
            // kernel's word that none exists. So bursts of EINVAL are short.
            let longest = if errno == libc::EINVAL { 4 } else { 40 };
            Faults {
                errno: Errno(errno),
                burst: 1 + random.below(longest),
                late: 1 + random.below(100),
            }
        });
        let mut between =
            |least: usize, most: usize| least + random.below((most - least + 1) as u64) as usize;
        Round {
            seed,
            number,
            pools: if kind.page.is_hugetlb() { 2 } else { between(2, 3) },
            room,
            regions,
            region_pages,
            movers: between(1, 3).min(region_pages),
            writers: between(1, MOST_WRITERS),
            skew: [0, 75, 95][between(0, 2)],
            pause: [0, 0, 200, 5000][between(0, 3)],
            readers: between(0, 2),
            kernel_writers: between(0, MOST_KERNEL_WRITERS),
            roaming: chance(25, &mut random),
            kernel_reader: chance(50, &mut random),
            guards: chance(40, &mut random),
            children: chance(40, &mut random),
            // The thread sanitizer runs handlers later, with SIGSEGV blocked. A store to a moving
            // area would then end the process.
            signals: chance(40, &mut random)
                .then(|| chance(50, &mut random))
                .filter(|_| sanitizer() != "thread"),
            bystander: chance(40, &mut random),
            // A failing call could leave frames of a tenant's region out of circulation until the
            // process ends.
            tenant: faults.is_none() && chance(50, &mut random),
            forgets: !kind.page.is_hugetlb() && chance(20, &mut random),
            attributes: chance(50, &mut random),
            faults,
            kind,
        }
    }

    /// The random numbers of one actor in one part of the round.
    pub fn random(&self, actor: u64, part: u64) -> Random {
        stream(self.seed, &[3, self.number, actor, part])
    }

    pub fn region_bytes(&self) -> usize {
        self.region_pages * self.kind.page.bytes()
    }

    /// The most bytes of a tenant's region.
    pub fn tenant_bytes(&self) -> usize {
        let pages = if self.kind.page == PageSize::Base { 128 } else { 3 };
        if self.tenant { pages * self.kind.page.bytes() } else { 0 }
    }

    /// The size of a pool on which regions of `at_first` bytes lie at the start.
    pub fn pool_bytes(&self, at_first: usize) -> u64 {
        let bytes = match self.room {
            Room::Plenty => 2 * (self.regions * self.region_bytes() + self.tenant_bytes()),
            Room::Pages(pages) => at_first + pages * self.kind.page.bytes(),
        };
        bytes as u64
    }

    /// Whether a leap may make a system call fail that writes to a region.
    pub fn lets_system_calls_fail(&self) -> bool {
        // If a tracker is refused, `auto` chooses an engine that lets system calls fail.
        self.kind.lets_system_calls_fail() || self.faults.is_some()
    }
}

/// Random numbers for one purpose.
fn stream(seed: u64, purpose: &[u64]) -> Random {
    let mut random = Random::new(seed.wrapping_add(1));
    for number in purpose {
        random = Random::new(later(&mut random) ^ number.wrapping_mul(0xd6e8_feb8_6659_fd93));
    }
    Random::new(later(&mut random))
}

/// A later random number: the first numbers of similar seeds are similar.
fn later(random: &mut Random) -> u64 {
    (0..8).fold(0, |_, _| random.next())
}
