//! Discarding and backing parts of a region that a job moves: all but what is under way, and who
//! waits gets that too.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use crate::common::{
    address, check_stamp, engines_for, is_zero, leap, migration, nodes, region_flags,
    skip_page_size, soon, stamp, turn,
};
use crate::refusing::{Refusing, Request};
use pageleap::backend::{Call, Linux};
use pageleap::{
    BASE_PAGE, EngineChoice, Error, Job, PageOutcome, PageSize, Pool, Reason, Region, audit,
};

const PAGES: usize = 8;
/// The second area. Areas have two pages.
const UNDER_WAY: Range<usize> = 2..4;
const LONG: Duration = Duration::from_secs(600);

/// Holds a job at the first call on some addresses.
#[derive(Default)]
struct Gate {
    start: AtomicUsize,
    len: AtomicUsize,
    reached: AtomicBool,
    open: AtomicBool,
}

impl Gate {
    fn pass(&self, request: &Request) {
        // The test's own thread has a name that the standard library knows.
        if std::thread::current().name().is_some() {
            return;
        }
        let start = self.start.load(SeqCst);
        if !(start..start + self.len.load(SeqCst)).contains(&request.addr) {
            return;
        }
        self.reached.store(true, SeqCst);
        while !self.open.load(SeqCst) {
            std::thread::yield_now();
        }
    }
}

/// Lets the job go on, whatever has failed.
struct OpenOnDrop<'a>(&'a Gate);

impl Drop for OpenOnDrop<'_> {
    fn drop(&mut self) {
        self.0.open.store(true, SeqCst);
    }
}

struct Scene {
    gate: Arc<Gate>,
    pools: [Pool; 3],
    region: Region,
}

impl Scene {
    fn new(page: PageSize) -> Result<Scene, Error> {
        Scene::with(page, |_| ())
    }

    /// `also` is called before each mapping call.
    fn with(
        page: PageSize,
        also: impl Fn(&Request) + Send + Sync + 'static,
    ) -> Result<Scene, Error> {
        let gate = Arc::new(Gate::default());
        let held = gate.clone();
        let backend = Arc::new(Refusing::new(Arc::new(Linux), move |request: &Request| {
            also(request);
            held.pass(request);
            None
        }));
        let build = |node, pages: usize| {
            let bytes = (pages * page.bytes()) as u64;
            Pool::builder(node, bytes).page_size(page).backend(backend.clone()).build()
        };
        let [near, far] = nodes();
        let pools = [build(near, PAGES)?, build(far, PAGES)?, build(far, 1)?];
        let region = Region::new(&pools[0], PAGES * page.bytes())?;
        stamp(&region, 0..region.len(), 1);
        Ok(Scene { gate, pools, region })
    }

    fn bytes(&self, pages: Range<usize>) -> Range<usize> {
        let page = self.region.page_size().bytes();
        pages.start * page..pages.end * page
    }

    /// A job that is moving the second area, and goes on when the gate is open.
    fn start(&self, engine: EngineChoice) -> Job {
        let under_way = self.bytes(UNDER_WAY);
        self.gate.len.store(under_way.len(), SeqCst);
        self.gate.start.store(address(&self.region) + under_way.start, SeqCst);
        let job = migration(&self.region, self.bytes(0..PAGES), &self.pools[1]).engine(engine);
        let job = job.threads(1).start().unwrap();
        assert!(soon(|| self.gate.reached.load(SeqCst)));
        job
    }

    fn discard(&self, pages: Range<usize>, patience: Duration) -> Result<(), Error> {
        // SAFETY: no thread accesses the pages.
        unsafe { self.region.discard_shared_within(self.bytes(pages), patience) }
    }

    fn check_busy(&self, pages: Range<usize>, result: Result<(), Error>) {
        let bytes = self.bytes(pages);
        let is_busy =
            matches!(result, Err(Error::RangeBusy { start, end }) if (start..end) == bytes);
        if !is_busy {
            // The job would meet pages that are gone, and perhaps never end.
            eprintln!("{bytes:x?} are not busy: {result:?}");
            std::process::abort();
        }
    }

    fn check_all(&self) {
        let pools: Vec<&Pool> = self.pools.iter().collect();
        audit(&pools, &[&self.region]).unwrap();
    }
}

#[test]
fn a_call_discards_and_backs_all_but_what_is_under_way() {
    let _turn = turn();
    for engine in engines_for(PageSize::Base) {
        let scene = Scene::new(PageSize::Base).unwrap();
        let [near, _, spare] = &scene.pools;
        let (job, region) = (scene.start(engine), &scene.region);
        let open = OpenOnDrop(&scene.gate);
        // It has moved.
        scene.discard(0..1, Duration::ZERO).unwrap();
        region.back(scene.bytes(0..1), spare).unwrap();
        // It has not begun.
        scene.discard(4..6, Duration::ZERO).unwrap();
        region.back(scene.bytes(4..5), near).unwrap();
        assert!([0..1, 4..5].into_iter().all(|pages| is_zero(region, scene.bytes(pages))));
        // A page that has memory stays the job's.
        let error = region.back_within(scene.bytes(6..7), near, LONG).unwrap_err();
        assert!(matches!(error, Error::BadRange { .. }), "{error}");
        // It is under way, or part of it is.
        scene.check_busy(2..3, scene.discard(2..3, Duration::ZERO));
        scene.check_busy(3..7, scene.discard(3..7, Duration::from_millis(1)));
        let other = migration(region, scene.bytes(6..8), near).start().map(drop);
        scene.check_busy(6..8, other);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| scene.discard(2..3, LONG));
            drop(open);
            waits.join().unwrap().unwrap();
        });
        let report = job.wait();
        assert!(report.ended.is_completed(), "{report}");
        assert_eq!((report.pages.migrated, report.pages.unchanged), (6, 2), "{report}");
        let gone = report.runs.iter().find(|run| run.outcome == PageOutcome::Unchanged).unwrap();
        let expected = (scene.bytes(4..6), Some(Reason::Discarded));
        assert_eq!((gone.range.clone(), gone.reason), expected, "{report}");
        scene.check_all();
        // Everything is whole, and can leap again.
        for pages in [2..3, 5..6] {
            region.back(scene.bytes(pages), near).unwrap();
        }
        leap(region, 0..region.len(), near);
        for pages in [1..2, 3..4, 6..8] {
            check_stamp(region, scene.bytes(pages), 1);
        }
        scene.check_all();
        assert_eq!(scene.pools[1].free_bytes(), scene.pools[1].bytes(), "{engine}");
    }
}

/// The job gives the alias of its new frames the advice of all aliases again when it ends. The frame
/// of a page that was discarded meanwhile may be another region's by then.
#[test]
fn frames_of_discarded_pages_are_no_longer_the_jobs() {
    let _turn = turn();
    let [making, reached, open] = [(); 3].map(|()| Arc::new(AtomicBool::new(false)));
    let (begun, at, go_on) = (making.clone(), reached.clone(), open.clone());
    let scene = Scene::with(PageSize::Base, move |request| {
        // The alias has the advice of a region by now, and goes to it with its page tables.
        // The job is held meanwhile, and so the first one is that of the other region.
        let is_exchange = request.call == Call::Exchange;
        if is_exchange && begun.load(SeqCst) && !at.swap(true, SeqCst) {
            while !go_on.load(SeqCst) {
                std::thread::yield_now();
            }
        }
    });
    let scene = scene.unwrap();
    let job = scene.start(EngineChoice::Auto);
    let open_first = OpenOnDrop(&scene.gate);
    scene.discard(0..1, Duration::ZERO).unwrap();
    std::thread::scope(|scope| {
        making.store(true, SeqCst);
        let maker = scope.spawn(|| Region::new(&scene.pools[1], BASE_PAGE).unwrap());
        let came = soon(|| reached.load(SeqCst));
        drop(open_first);
        let report = job.wait();
        open.store(true, SeqCst);
        let other = maker.join().unwrap();
        assert!(came && report.ended.is_completed(), "{report}");
        let flags = region_flags(&other);
        assert!(flags.iter().all(|(_, flags)| !flags.contains(" dd")), "{flags:?}");
    });
}

/// Mappings of hugetlb pages are joined when others have moved, so the job keeps all pages.
/// One area is under way until after the call has given up. Another worker meets the pages behind it
/// while the call waits.
#[test]
fn a_call_that_gives_up_has_taken_nothing_from_the_job() {
    let _turn = turn();
    let gates: [Arc<Gate>; 2] = Default::default();
    let pass = gates.clone();
    let backend = Arc::new(Refusing::new(Arc::new(Linux), move |request| {
        pass.iter().for_each(|gate| gate.pass(request));
        None
    }));
    let bytes = PAGES * BASE_PAGE;
    let pools = nodes()
        .map(|node| Pool::builder(node, bytes as u64).backend(backend.clone()).build().unwrap());
    let region = Region::new(&pools[0], bytes).unwrap();
    stamp(&region, 0..bytes, 1);
    for (gate, first) in gates.iter().zip([0, 2]) {
        gate.len.store(2 * BASE_PAGE, SeqCst);
        gate.start.store(address(&region) + first * BASE_PAGE, SeqCst);
    }
    let job = migration(&region, 0..bytes, &pools[1]).threads(2).area_bytes(2 * BASE_PAGE);
    let job = job.start().unwrap();
    assert!(soon(|| gates.iter().all(|gate| gate.reached.load(SeqCst))));
    let given_up = std::thread::scope(|scope| {
        let range = 2 * BASE_PAGE..bytes;
        // SAFETY: nobody touches these pages during the call, and it fails.
        let waits = || unsafe { region.discard_shared_within(range, Duration::from_millis(300)) };
        let waits = scope.spawn(waits);
        std::thread::sleep(Duration::from_millis(100));
        gates[0].open.store(true, SeqCst);
        waits.join().unwrap()
    });
    gates[1].open.store(true, SeqCst);
    let report = job.wait();
    assert!(matches!(given_up, Err(Error::RangeBusy { .. })), "{given_up:?}");
    assert_eq!(report.pages.migrated as usize, PAGES, "{report}");
    check_stamp(&region, 0..bytes, 1);
    drop(region);
    audit(&pools.each_ref(), &[]).unwrap();
}

#[test]
fn a_call_waits_for_a_job_over_hugetlb_pages() {
    const NAME: &str = "a_call_waits_for_a_job_over_hugetlb_pages";
    let _turn = turn();
    for engine in engines_for(PageSize::Huge2M) {
        let scene = match Scene::new(PageSize::Huge2M) {
            Ok(scene) => scene,
            Err(error) => return skip_page_size(NAME, PageSize::Huge2M, error),
        };
        let job = scene.start(engine);
        let open = OpenOnDrop(&scene.gate);
        for pages in [0..1, 2..3, 6..7] {
            scene.check_busy(pages.clone(), scene.discard(pages, Duration::ZERO));
        }
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| scene.discard(6..7, LONG));
            drop(open);
            waits.join().unwrap().unwrap();
        });
        let report = job.wait();
        assert!(report.ended.is_completed(), "{report}");
        assert_eq!(report.pages.migrated, PAGES as u64, "{report}");
        check_stamp(&scene.region, scene.bytes(0..6), 1);
        scene.check_all();
    }
}
