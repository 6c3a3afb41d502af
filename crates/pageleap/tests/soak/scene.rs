//! Pools and regions of a round, what was stored in them, and what must be true of them while all
//! actors pause.

use std::ops::Range;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pageleap::backend::{Backend, Call, Errno, FailAt, FailMode, Linux};
use pageleap::observe::mapping_count;
use pageleap::topology::Topology;
use pageleap::{Error, Migration, NodeId, Pool, Region, audit};

use crate::common::{
    address, each_place_once, is_zero, own_descriptors, places, pool_mappings, pool_ranges,
    region_flags, soon, surprises,
};
use crate::refusing::Refusing;
use crate::round::{Faults, HANDLERS, OWNERS, Round, sanitizer};
use crate::watch::{Count, count};

/// A region with its shadow.
pub struct Field {
    pub region: Region,
    /// The last value that was stored to each word.
    shadow: Vec<AtomicU64>,
    /// Permissions and flags before the first leap.
    flags: Vec<(Range<usize>, String)>,
}

impl Field {
    fn new(region: Region) -> Field {
        let shadow = (0..region.len() / 8).map(|_| AtomicU64::new(0)).collect();
        let flags = region_flags(&region);
        Field { region, shadow, flags }
    }

    pub fn words(&self) -> &[AtomicU64] {
        self.region.atomics_u64(0..self.region.len()).unwrap()
    }

    pub fn address(&self) -> usize {
        address(&self.region)
    }

    pub fn range(&self) -> Range<usize> {
        self.address()..self.address() + self.region.len()
    }

    /// Notes a value after it was stored. A thread that reads the note finds this value in the
    /// word, or a later one.
    pub fn note(&self, word: usize, value: u64) {
        self.shadow[word].store(value, Release);
    }

    /// The least value that a word has from now on.
    pub fn noted(&self, word: usize) -> u64 {
        self.shadow[word].load(Acquire)
    }

    fn check_words(&self) {
        let different = |(at, word): &(usize, &AtomicU64)| word.load(Relaxed) != self.noted(*at);
        let lost: Vec<usize> =
            self.words().iter().enumerate().filter(different).map(|(at, _)| at).collect();
        if let Some(first) = lost.first() {
            let [is, was] = [self.words()[*first].load(Relaxed), self.noted(*first)];
            panic!(
                "LOST {} writes to {:?}: first word {first} of owner {}, \
                 which is {is} and not {was}",
                lost.len(),
                self.region,
                first % OWNERS
            );
        }
    }
}

/// Failing calls.
pub struct Injected {
    /// How many of the next calls are refused.
    burst: Arc<AtomicU64>,
    /// How many calls have been refused and not been counted yet.
    refused: Arc<AtomicU64>,
    /// The call that fails after its effect, and its number.
    late: Arc<FailAt>,
    late_at: u64,
}

impl Injected {
    fn new(faults: Faults) -> (Arc<dyn Backend>, Injected) {
        // After the effect, but not half-way. A call that fails half-way leaves a hole. Other
        // threads of this test could map memory there, and the library would end the process
        // (docs/protocol.md, section 9). `tests/fault_injection.rs` tests such calls.
        let late = FailAt::new(Arc::new(Linux), faults.late, FailMode::After, Errno(libc::ENOMEM));
        let (late, burst, refused) =
            (Arc::new(late), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (left, done) = (burst.clone(), refused.clone());
        let backend = Refusing::new(late.clone(), move |request| {
            // Releases never fail: address space that is not given back would be lost for good.
            let strikes = request.call != Call::Release
                && left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok();
            strikes.then(|| {
                done.fetch_add(1, Relaxed);
                faults.errno
            })
        });
        (Arc::new(backend), Injected { burst, refused, late, late_at: faults.late })
    }

    /// Lets the next `calls` calls fail.
    pub fn refuse(&self, calls: u64) {
        self.burst.store(calls, Relaxed);
    }

    /// Lets one call fail after its effect.
    pub fn fail_late(&self) {
        self.count_late();
        self.late.arm();
    }

    /// Lets no more calls fail.
    pub fn stop(&self) {
        self.burst.store(0, Relaxed);
        self.late.disarm();
        self.count_late();
        count(Count::Faults, self.refused.swap(0, Relaxed));
    }

    /// Counts the call that fails after its effect, if it was made.
    fn count_late(&self) {
        count(Count::Faults, u64::from(self.late.seen() >= self.late_at));
    }
}

/// Resources of the process other than memory.
#[derive(Clone, Debug, PartialEq)]
struct Process {
    threads: usize,
    descriptors: usize,
    of_pools: Vec<String>,
}

impl Process {
    fn now() -> Process {
        let entries = |directory: &str| std::fs::read_dir(directory).unwrap().count();
        let mut of_pools = own_descriptors();
        of_pools.sort();
        // A sanitizer opens descriptors of its own.
        let descriptors = if sanitizer().is_empty() { entries("/proc/self/fd") } else { 0 };
        Process { threads: entries("/proc/self/task"), descriptors, of_pools }
    }

    /// The resources between rounds. They must be the same each time.
    fn between_rounds() -> Process {
        static FOUND: OnceLock<Process> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            // Before the first round, threads and descriptors of the start may still disappear.
            // They have done so when nothing has changed for a while.
            const WHILE: Duration = Duration::from_millis(100);
            let (mut last, mut same) = (Process::now(), 0);
            while same < 5 {
                std::thread::sleep(WHILE);
                let now = Process::now();
                same = if now == last { same + 1 } else { 0 };
                last = now;
            }
            last
        });
        found.expect_again("before a round");
        found.clone()
    }

    /// Waits until the resources are the same again. The kernel counts a thread for a moment after
    /// it was joined, and threads of io_uring a little longer.
    fn expect_again(&self, when: &str) {
        let mut now = Process::now();
        let same = soon(|| {
            now = Process::now();
            now == *self
        });
        assert!(same, "{when}: {now:?}, and {self:?} before");
    }
}

/// Pools and regions of a round.
pub struct Scene {
    pub round: Round,
    pub pools: Vec<Pool>,
    pub fields: Vec<Field>,
    pub injected: Option<Injected>,
    pub backend: Arc<dyn Backend>,
    /// The address ranges of the pools' aliases.
    pub aliases: Vec<Range<usize>>,
    /// The last value of each owner.
    pub last: [AtomicU64; OWNERS],
    /// Whether a job may have lost an attribute.
    pub attributes_lost: AtomicBool,
    /// Resources before the round.
    before: Process,
    /// Resources with the pools and regions of the round, while no job runs.
    with_pools: Process,
    /// Mappings of pools before regions were made.
    mappings: usize,
    /// All mappings of the process before the round.
    all_mappings: usize,
}

/// How many mappings may come with stacks and heaps of threads.
const MAPPINGS_OF_OTHERS: usize = 100;

impl Scene {
    pub fn build(round: Round) -> Result<Scene, Error> {
        let before = Process::between_rounds();
        let all_mappings = mapping_count()?;
        let (backend, injected): (Arc<dyn Backend>, _) = match round.faults {
            Some(faults) => {
                let (backend, injected) = Injected::new(faults);
                (backend, Some(injected))
            }
            None => (Arc::new(Linux), None),
        };
        let topology = Topology::read()?;
        let nodes: Vec<NodeId> = topology
            .nodes()
            .iter()
            .filter(|node| node.total_bytes > 0)
            .map(|node| node.id)
            .collect();
        let mut pools = Vec::new();
        for number in 0..round.pools {
            let at_first =
                (0..round.regions).filter(|region| region % round.pools == number).count();
            let bytes = round.pool_bytes(at_first * round.region_bytes());
            let pool = Pool::builder(nodes[number % nodes.len()], bytes).page_size(round.kind.page);
            pools.push(pool.backend(backend.clone()).build()?);
        }
        let mappings = pool_mappings().len();
        let aliases = pool_ranges();
        let mut fields = Vec::new();
        let mut random = round.random(0, 0);
        for number in 0..round.regions {
            let region = Region::new(&pools[number % round.pools], round.region_bytes())?;
            if round.attributes {
                set_attributes(&region, random.next());
            }
            fields.push(Field::new(region));
        }
        // The threads that filled the pools have been joined, but the kernel may still count them.
        let with_pools = Process { threads: before.threads, ..Process::now() };
        let last = [const { AtomicU64::new(0) }; OWNERS];
        HANDLED.store(0, SeqCst);
        Ok(Scene {
            round,
            pools,
            fields,
            injected,
            backend,
            aliases,
            last,
            attributes_lost: AtomicBool::new(false),
            before,
            with_pools,
            mappings,
            all_mappings,
        })
    }

    /// Checks everything, lets all regions leap once more, and checks again. No actor runs
    /// meanwhile.
    pub fn check(&self) {
        self.with_pools.expect_again("after the actors have ended");
        self.check_contents();
        for (number, field) in self.fields.iter().enumerate() {
            self.settle(field, &self.pools[(number + 1) % self.pools.len()]);
        }
        self.check_contents();
        self.with_pools.expect_again("after another leap");
        count(Count::Checks, 1);
    }

    fn check_contents(&self) {
        for field in &self.fields {
            field.check_words();
            if !self.attributes_lost.load(Relaxed) {
                assert_eq!(
                    region_flags(&field.region),
                    field.flags,
                    "attributes of {:?}",
                    field.region
                );
            }
        }
        let regions: Vec<&Region> = self.fields.iter().map(|field| &field.region).collect();
        let pools: Vec<&Pool> = self.pools.iter().collect();
        audit(&pools, &regions).unwrap();
        let taken: u64 = regions.iter().map(|region| region.len() as u64).sum();
        let [all, free] =
            [Pool::bytes, Pool::free_bytes].map(|of| self.pools.iter().map(of).sum::<u64>());
        // Frames that recycling could not repair are out of circulation until they are needed.
        let right = if self.injected.is_some() { free + taken <= all } else { free + taken == all };
        assert!(right, "{free} bytes are free and {taken} are taken, of {all}");
        each_place_once(&regions.into_iter().flat_map(places).collect::<Vec<_>>());
    }

    /// Moves as much of a region as there is room for. The job must succeed.
    fn settle(&self, field: &Field, to: &Pool) {
        let page = self.round.kind.page.bytes();
        let bytes = (to.free_bytes() as usize / page * page).min(field.region.len());
        if bytes == 0 {
            return;
        }
        let before = places(&field.region);
        let report = Migration::new().range(&field.region, 0..bytes, to).start().unwrap().wait();
        assert!(report.ended.is_completed() && surprises(&report).is_empty(), "{report}");
        assert_eq!(
            report.pages.migrated + report.pages.unchanged,
            (bytes / page) as u64,
            "{report}"
        );
        let now = places(&field.region);
        let moved = before.iter().zip(&now).filter(|(then, now)| then != now).count();
        assert_eq!(moved as u64, report.pages.migrated, "frames that have changed: {report}");
    }

    /// Ends the round: drops regions and pools, and checks that nothing is left over.
    pub fn end(mut self) {
        HANDLERS_WORD.store(std::ptr::null_mut(), SeqCst);
        self.fields.clear();
        if self.injected.is_none() {
            let now = pool_mappings();
            assert!(
                now.len() <= self.mappings,
                "{} mappings before:\n{}",
                self.mappings,
                now.join("\n")
            );
        }
        for pool in &self.pools {
            // Frames that were out of circulation come back because this region needs them.
            let all = Region::new(pool, pool.bytes() as usize).unwrap();
            assert!(is_zero(&all, 0..all.len()), "a free frame kept its contents");
            audit(&[pool], &[&all]).unwrap();
            drop(all);
            assert_eq!(pool.free_bytes(), pool.bytes(), "frames leaked");
        }
        self.pools.clear();
        drop(self.injected);
        drop(self.backend);
        assert_eq!(pool_mappings(), Vec::<String>::new(), "mappings leaked");
        self.before.expect_again("after the round");
        let mappings = mapping_count().unwrap();
        let most = self.all_mappings + MAPPINGS_OF_OTHERS;
        let right = mappings <= most || !sanitizer().is_empty();
        assert!(right, "{mappings} mappings, and {} before", self.all_mappings);
        count(Count::Rounds, 1);
    }

    /// The word that signal handlers increment.
    fn handlers_word(&self) -> &AtomicU64 {
        &self.fields[0].words()[HANDLERS]
    }

    /// Lets signal handlers increment a word of the first region.
    pub fn let_handlers_write(&self) {
        HANDLERS_WORD.store(self.handlers_word().as_ptr(), SeqCst);
    }

    /// Lets signal handlers leave the word alone, and waits until running handlers have ended.
    pub fn stop_handlers(&self) {
        HANDLERS_WORD.store(std::ptr::null_mut(), SeqCst);
        assert!(soon(|| IN_HANDLERS.load(SeqCst) == 0), "a signal handler does not return");
        self.fields[0].note(HANDLERS, HANDLED.load(SeqCst));
    }
}

/// Sets attributes of three parts of a region: one is left out of core dumps, one is advised to be
/// read at random, one is locked.
fn set_attributes(region: &Region, chance: u64) {
    let page = region.page_size().bytes();
    let pages = region.len() / page;
    let part = |number: usize| {
        let first = (chance >> (16 * number)) as usize % pages;
        (region.as_ptr().as_ptr().wrapping_add(first * page), (pages - first).div_ceil(3) * page)
    };
    for (number, advice) in [libc::MADV_DONTDUMP, libc::MADV_RANDOM].into_iter().enumerate() {
        let (start, len) = part(number);
        // SAFETY: whole pages of the region. The advice changes no contents.
        assert_eq!(unsafe { libc::madvise(start.cast(), len, advice) }, 0);
    }
    let (start, len) = part(2);
    // SAFETY: whole pages of the region. A user who may not lock them gets an error, which does not
    // matter here.
    unsafe { libc::mlock(start.cast(), len) };
}

/// The word that signal handlers increment, or null.
static HANDLERS_WORD: AtomicPtr<u64> = AtomicPtr::new(std::ptr::null_mut());
/// How often handlers have incremented the word.
static HANDLED: AtomicU64 = AtomicU64::new(0);
/// How many handlers are running.
static IN_HANDLERS: AtomicU64 = AtomicU64::new(0);

/// A signal handler that stores into a region, wherever its thread was interrupted.
pub extern "C" fn increment_the_word(_signal: libc::c_int) {
    IN_HANDLERS.fetch_add(1, SeqCst);
    let word = HANDLERS_WORD.load(SeqCst);
    if !word.is_null() {
        // SAFETY: the word lies in a region. The region lives while the pointer is set or while a
        // handler is counted that may have read the pointer.
        unsafe { AtomicU64::from_ptr(word) }.fetch_add(1, Relaxed);
        HANDLED.fetch_add(1, SeqCst);
    }
    IN_HANDLERS.fetch_sub(1, SeqCst);
    count(Count::Signals, 1);
}
