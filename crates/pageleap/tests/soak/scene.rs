//! Pools and regions of a round, what was stored in them, and what must be true of them when nobody
//! moves or writes anything.

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
    address, is_zero, own_descriptors, pool_mappings, pool_ranges, region_flags, soon, surprises,
};
use crate::load::each_frame_once;
use crate::refusing::Refusing;
use crate::round::{Faults, HANDLERS, OWNERS, Round, sanitizer};
use crate::watch::{Count, count};

/// A region, and what was stored in each of its words last.
pub struct Field {
    pub region: Region,
    shadow: Vec<AtomicU64>,
    /// Permissions and flags, as they were set before the first leap.
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

    /// Notes what was stored, afterwards: whoever sees the note finds that value in the word, or a
    /// later one.
    pub fn note(&self, word: usize, value: u64) {
        self.shadow[word].store(value, Release);
    }

    /// What a word has at least from now on.
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
                "LOST {} writes to {:?}: the first is word {first} of owner {}, which has {is} and not {was}",
                lost.len(),
                self.region,
                first % OWNERS
            );
        }
    }
}

/// The kernel's answers, falsified when somebody asks for it.
pub struct Injected {
    burst: Arc<AtomicU64>,
    refused: Arc<AtomicU64>,
    late: Arc<FailAt>,
    late_at: u64,
}

impl Injected {
    fn new(faults: Faults) -> (Arc<dyn Backend>, Injected) {
        // After the effect, but not half-way: that leaves holes, into which the other threads of
        // this test would map their memory, and the library would end the process
        // (`docs/protocol.md`, section 9). `tests/fault_injection.rs` has those.
        let late = FailAt::new(Arc::new(Linux), faults.late, FailMode::After, Errno(libc::ENOMEM));
        let (late, burst, refused) =
            (Arc::new(late), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (left, done) = (burst.clone(), refused.clone());
        let backend = Refusing::new(late.clone(), move |request| {
            // Address space that is not given back is lost for good.
            let strikes = request.call != Call::Release
                && left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok();
            strikes.then(|| {
                done.fetch_add(1, Relaxed);
                faults.errno
            })
        });
        (Arc::new(backend), Injected { burst, refused, late, late_at: faults.late })
    }

    /// The next calls fail.
    pub fn refuse(&self, calls: u64) {
        self.burst.store(calls, Relaxed);
    }

    /// A call fails once it has had its effect.
    pub fn fail_late(&self) {
        self.count_late();
        self.late.arm();
    }

    /// From now on all answers are the kernel's.
    pub fn stop(&self) {
        self.burst.store(0, Relaxed);
        self.late.disarm();
        self.count_late();
        count(Count::Faults, self.refused.swap(0, Relaxed));
    }

    fn count_late(&self) {
        count(Count::Faults, u64::from(self.late.seen() >= self.late_at));
    }
}

/// What the process has, apart from memory.
#[derive(Clone, Debug, PartialEq)]
struct Process {
    threads: usize,
    descriptors: usize,
    of_pools: Vec<String>,
}

impl Process {
    fn now() -> Process {
        let entries = |folder: &str| std::fs::read_dir(folder).unwrap().count();
        let mut of_pools = own_descriptors();
        of_pools.sort();
        // A sanitizer opens some of its own.
        let descriptors = if sanitizer().is_empty() { entries("/proc/self/fd") } else { 0 };
        Process { threads: entries("/proc/self/task"), descriptors, of_pools }
    }

    /// What it has when no round is on: the same before each of them.
    fn between_rounds() -> Process {
        static FOUND: OnceLock<Process> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            // What has come to an end before the first round is gone when it has not been seen for
            // a while.
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

    /// Threads are counted for a moment after they have been joined, and what the kernel runs for
    /// io_uring a bit longer.
    fn expect_again(&self, when: &str) {
        let mut now = Process::now();
        let same = soon(|| {
            now = Process::now();
            now == *self
        });
        assert!(same, "{when}: {now:?}, and {self:?} before");
    }
}

pub struct Scene {
    pub round: Round,
    pub pools: Vec<Pool>,
    pub fields: Vec<Field>,
    pub injected: Option<Injected>,
    pub backend: Arc<dyn Backend>,
    /// Where the aliases of pools are.
    pub aliases: Vec<Range<usize>>,
    /// Whether page tables have a node of their own, so that the alias of frames may be mapped anew
    /// to bring them there.
    pub tables_move: bool,
    /// What each owner has written last.
    pub last: [AtomicU64; OWNERS],
    /// Whether a job has said that it could not keep an attribute.
    pub attributes_lost: AtomicBool,
    before: Process,
    with_pools: Process,
    mappings: usize,
    all_mappings: usize,
}

/// Mappings that come and go with stacks and heaps of threads.
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
        let tables_move = topology.nodes().len() > 1;
        let mut fields = Vec::new();
        let mut random = round.random(0, 0);
        for number in 0..round.regions {
            let region = Region::new(&pools[number % round.pools], round.region_bytes())?;
            if round.attributes {
                set_attributes(&region, random.next());
            }
            fields.push(Field::new(region));
        }
        // Pools' threads have been joined, but may still be counted.
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
            tables_move,
            last,
            attributes_lost: AtomicBool::new(false),
            before,
            with_pools,
            mappings,
            all_mappings,
        })
    }

    /// Checks everything, has everything leap once more, and checks it again. Nobody else uses the
    /// scene.
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
        // What recycling could not mend is out of circulation until somebody needs it.
        let right = if self.injected.is_some() { free + taken <= all } else { free + taken == all };
        assert!(right, "{free} bytes are free and {taken} are taken, of {all}");
        let frames: Option<Vec<Vec<u64>>> =
            regions.iter().map(|r| r.frame_numbers().unwrap()).collect();
        if let Some(frames) = frames {
            each_frame_once(&frames.concat());
        }
    }

    /// Has as much of a region leap as there is room for, which must succeed.
    fn settle(&self, field: &Field, to: &Pool) {
        let page = self.round.kind.page.bytes();
        let bytes = (to.free_bytes() as usize / page * page).min(field.region.len());
        if bytes == 0 {
            return;
        }
        let before = field.region.frame_numbers().unwrap();
        let report = Migration::new().range(&field.region, 0..bytes, to).start().unwrap().wait();
        assert!(report.ended.is_completed() && surprises(&report).is_empty(), "{report}");
        assert_eq!(
            report.pages.migrated + report.pages.unchanged,
            (bytes / page) as u64,
            "{report}"
        );
        if let (Some(before), Some(now)) = (before, field.region.frame_numbers().unwrap()) {
            let moved = before
                .iter()
                .zip(&now)
                .take(bytes / page)
                .filter(|(then, now)| then != now)
                .count();
            assert!(moved as u64 >= report.pages.migrated, "{moved} frames have changed: {report}");
        }
    }

    /// Ends the round: all regions go, and everything is as it was before.
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
            // Also what was out of circulation comes back when somebody needs it.
            let all = Region::new(pool, pool.bytes() as usize).unwrap();
            assert!(is_zero(&all, 0..all.len()), "somebody else's data");
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

    /// The word that signal handlers raise.
    fn handlers_word(&self) -> &AtomicU64 {
        &self.fields[0].words()[HANDLERS]
    }

    /// Has signal handlers raise a word of the first region.
    pub fn let_handlers_write(&self) {
        HANDLERS_WORD.store(self.handlers_word().as_ptr(), SeqCst);
    }

    /// Has them leave it, and waits until those that are running have done so.
    pub fn have_handlers_leave(&self) {
        HANDLERS_WORD.store(std::ptr::null_mut(), SeqCst);
        assert!(soon(|| IN_HANDLERS.load(SeqCst) == 0), "a signal handler does not return");
        self.fields[0].note(HANDLERS, HANDLED.load(SeqCst));
    }
}

/// Has one part locked, another left out of core dumps, and a third one expected to be read at
/// random.
fn set_attributes(region: &Region, chance: u64) {
    let page = region.page_size().bytes();
    let pages = region.len() / page;
    let part = |number: usize| {
        let first = (chance >> (16 * number)) as usize % pages;
        (region.as_ptr().as_ptr().wrapping_add(first * page), (pages - first).div_ceil(3) * page)
    };
    for (number, advice) in [libc::MADV_DONTDUMP, libc::MADV_RANDOM].into_iter().enumerate() {
        let (start, len) = part(number);
        // SAFETY: pages of the region; the advice changes no contents.
        assert_eq!(unsafe { libc::madvise(start.cast(), len, advice) }, 0);
    }
    let (start, len) = part(2);
    // SAFETY: pages of the region. Who may not lock them does without.
    unsafe { libc::mlock(start.cast(), len) };
}

/// The word that handlers raise, how often they have, and how many of them are running.
static HANDLERS_WORD: AtomicPtr<u64> = AtomicPtr::new(std::ptr::null_mut());
static HANDLED: AtomicU64 = AtomicU64::new(0);
static IN_HANDLERS: AtomicU64 = AtomicU64::new(0);

/// A signal handler that stores into a region, wherever its thread was.
pub extern "C" fn raise_the_word(_signal: libc::c_int) {
    IN_HANDLERS.fetch_add(1, SeqCst);
    let word = HANDLERS_WORD.load(SeqCst);
    if !word.is_null() {
        // SAFETY: it is a word of a region that lives while the pointer is set, or a handler is
        // counted that may have seen it.
        unsafe { AtomicU64::from_ptr(word) }.fetch_add(1, Relaxed);
        HANDLED.fetch_add(1, SeqCst);
    }
    IN_HANDLERS.fetch_sub(1, SeqCst);
    count(Count::Signals, 1);
}
