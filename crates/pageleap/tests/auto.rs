//! How `auto` chooses between closing an area before it is copied and following its writes. These
//! tests force whether a thread comes to wait: it touches an area only after the area's window has
//! begun, and the window ends only after the tracker or the fault handler has noted that thread.

mod common;
#[path = "common/refusing.rs"]
mod refusing;

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::Duration;

use common::{
    End, address, become_nobody, case, check_stamp, is_root, ladder, nodes, own_files, run_case,
    set_dumpable, skip, skip_page_size, soon, stamp, turn, works,
};
use pageleap::backend::{Advice, Call, Errno, Linux};
use pageleap::{BASE_PAGE, Engine, Error, Migration, PageSize, Pool, Region, Report, audit};
use pageleap_probe::{Capabilities, Topic};
use refusing::Refusing;

const AREA: usize = 64 << 10;
const AREAS: usize = 128;
const BYTES: usize = AREAS * AREA;

/// A thread that touches an address when it is told to.
struct Toucher {
    shared: Arc<Touch>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Touch {
    /// The address to touch; 0: nothing to do.
    target: AtomicUsize,
    /// Whether the thread writes there, or only reads.
    writes: AtomicBool,
    /// The thread's number.
    thread: AtomicI32,
    over: AtomicBool,
    /// The area whose writes have been followed last in this job.
    followed: AtomicUsize,
}

impl Toucher {
    fn start() -> Toucher {
        let shared = Arc::new(Touch::default());
        let touch = shared.clone();
        let thread = std::thread::spawn(move || {
            // SAFETY: the call cannot fail.
            touch.thread.store(unsafe { libc::gettid() }, SeqCst);
            while !touch.over.load(SeqCst) {
                let target = touch.target.load(SeqCst) as *mut u8;
                if target.is_null() {
                    // It never sleeps of its own accord.
                    std::hint::spin_loop();
                    continue;
                }
                // SAFETY: an address of a region, which outlives this thread. Nobody else writes to
                // it, and the value stays.
                unsafe {
                    let value = target.read_volatile();
                    if touch.writes.load(SeqCst) {
                        target.write_volatile(value);
                    }
                }
                touch.target.store(0, SeqCst);
            }
        });
        assert!(soon(|| shared.thread.load(SeqCst) != 0));
        Toucher { shared, thread: Some(thread) }
    }
}

impl Drop for Toucher {
    fn drop(&mut self) {
        self.shared.over.store(true, SeqCst);
        self.thread.take().unwrap().join().unwrap();
    }
}

impl Touch {
    /// Has the thread touch `addr`, and returns when it waits for it. Who waits for an area whose
    /// writes were followed is counted by nobody.
    fn touch_unless_followed(&self, addr: usize) {
        if self.followed.load(SeqCst) == addr {
            return;
        }
        assert!(soon(|| self.target.load(SeqCst) == 0), "the thread waits for the last window");
        self.target.store(addr, SeqCst);
        assert!(soon(|| self.is_noted()), "the thread does not wait");
    }

    /// Whether the thread waits and counts as one that does. That it sleeps would not say so: it
    /// may sleep for a lock of the kernel on its way there.
    fn is_noted(&self) -> bool {
        // The fault handler counts a thread before it makes this call, and the thread makes it
        // nowhere else.
        let thread = self.thread.load(SeqCst);
        let call = std::fs::read_to_string(format!("/proc/self/task/{thread}/syscall")).unwrap();
        call.starts_with(&format!("{} ", libc::SYS_futex)) || has_message()
    }
}

/// Whether a tracker has a message that nobody has read. In a window without a copy beside it, only
/// a thread that has come to wait sends one.
fn has_message() -> bool {
    let trackers = own_files().into_iter().filter(|(_, name)| name.contains("userfaultfd"));
    let poll = |(fd, _)| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut polls: Vec<libc::pollfd> = trackers.map(poll).collect();
    // SAFETY: the array outlives the call.
    let ready = unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, 0) };
    ready > 0 && polls.iter().any(|poll| poll.revents & libc::POLLIN != 0)
}

/// What is moved: so many areas of these pages.
#[derive(Clone, Copy)]
struct Memory {
    page: PageSize,
    area: usize,
    areas: usize,
}

const BASE: Memory = Memory { page: PageSize::Base, area: AREA, areas: AREAS };
/// As many as machines have that run the tests, and page by page.
const HUGE: Memory = Memory { page: PageSize::Huge2M, area: 2 << 20, areas: 40 };

impl Memory {
    fn bytes(self) -> usize {
        self.area * self.areas
    }
}

/// A region with its pools, and a thread that touches each area of `touched` in its window.
struct Scene {
    memory: Memory,
    region: Region,
    pools: [Pool; 2],
    /// The pool in which the region lies.
    at: Cell<usize>,
    touched: Arc<[AtomicUsize; 2]>,
    toucher: Toucher,
}

impl Scene {
    fn new(memory: Memory) -> Result<Scene, Error> {
        let toucher = Toucher::start();
        let touched: Arc<[AtomicUsize; 2]> = Arc::default();
        let (touch, addresses) = (toucher.shared.clone(), touched.clone());
        // The area whose page tables have been dropped, and not been replaced yet.
        let dropped = AtomicUsize::new(0);
        let backend = Arc::new(Refusing::new(Arc::new(Linux), move |request| {
            let [start, end] = [0, 1].map(|at| addresses[at].load(SeqCst));
            match request.call {
                Call::MarkClean => touch.followed.store(request.addr, SeqCst),
                // The page tables of the new frames are about to come.
                Call::Exchange if (start..end).contains(&request.addr) => {
                    touch.touch_unless_followed(request.addr);
                }
                // The same where they cannot be exchanged.
                Call::Advise if request.advice == Some(Advice::DropTables) => {
                    dropped.store(request.addr, SeqCst);
                }
                Call::Map
                    if dropped.swap(0, SeqCst) == request.addr
                        && (start..end).contains(&request.addr) =>
                {
                    touch.touch_unless_followed(request.addr);
                }
                _ => {}
            }
            None
        }));
        let build = |node| {
            let pool = Pool::builder(node, memory.bytes() as u64).page_size(memory.page);
            pool.backend(backend.clone()).build()
        };
        let [near, far] = nodes();
        let pools = [build(near)?, build(far)?];
        let region = Region::new(&pools[0], memory.bytes())?;
        stamp(&region, 0..memory.bytes(), 1);
        Ok(Scene { memory, region, pools, at: Cell::new(0), touched, toucher })
    }

    /// Moves the region while a thread touches some of its areas. Each area and window fits the
    /// budget.
    fn leap(&self, touched: Range<usize>, writes: bool) -> Report {
        self.at.set(1 - self.at.get());
        let Memory { area, .. } = self.memory;
        let all = 0..self.memory.bytes();
        let addresses = [touched.start, touched.end].map(|at| address(&self.region) + at * area);
        self.toucher.shared.writes.store(writes, SeqCst);
        self.toucher.shared.followed.store(0, SeqCst);
        self.touched.iter().zip(addresses).for_each(|(word, addr)| word.store(addr, SeqCst));
        let job = Migration::new().range(&self.region, all.clone(), &self.pools[self.at.get()]);
        let job = job.area_bytes(area).threads(1).wait_budget(Duration::from_secs(600));
        let report = job.start().unwrap().wait();
        assert!(report.ended.is_completed(), "{report}");
        check_stamp(&self.region, all, 1);
        audit(&[&self.pools[0], &self.pools[1]], &[&self.region]).unwrap();
        report
    }
}

/// How many pages were moved by an engine, for a reason that contains `why`.
fn pages_by(report: &Report, engine: Engine, why: &str) -> usize {
    let parts = report.engines.iter().filter(|part| part.engine == engine);
    parts.filter(|part| part.why.contains(why)).map(|part| part.pages).sum::<u64>() as usize
}

/// How many areas of a job were closed first by one engine. All others have been followed by the
/// other one.
fn closed_first(memory: Memory, closes: Engine, follows: Engine, report: &Report) -> usize {
    const FEW: &str = "few threads came to wait";
    const MANY: &str = "would have had to wait";
    let [few, many] = [pages_by(report, closes, FEW), pages_by(report, follows, MANY)]
        .map(|pages| pages * memory.page.bytes() / memory.area);
    assert_eq!((few + many, report.engine), (memory.areas, follows.into()), "{report}");
    assert_eq!(report.counts.holds, 0, "{report}");
    few
}

/// Checks what a job does that can close areas first by one engine and follow writes by another.
fn check_choices(closes: Engine, follows: Engine, readers_wait: bool) {
    let scene = Scene::new(BASE).unwrap();
    let split = |report: &Report| closed_first(BASE, closes, follows, report);
    assert_eq!(split(&scene.leap(0..0, true)), AREAS);
    // A thread waits for each area. That is noticed after 11 areas. Following lasts for 16 areas,
    // then for 32 and 64, with 7 areas of trial in between.
    assert_eq!(split(&scene.leap(0..AREAS, true)), 11 + 7 + 7);
    if readers_wait {
        assert_eq!(split(&scene.leap(0..AREAS, false)), 11 + 7 + 7);
    }
    // Some areas in a row are no reason to follow, and after a phase areas are closed first again.
    assert_eq!(split(&scene.leap(40..48, true)), AREAS);
    assert_eq!(split(&scene.leap(20..40, true)), AREAS - 16);
    assert_eq!(split(&scene.leap(0..0, true)), AREAS, "the next job begins anew");
}

#[test]
fn areas_are_followed_while_threads_come_to_wait() {
    const NAME: &str = "areas_are_followed_while_threads_come_to_wait";
    let _turn = turn();
    for engine in [Engine::Precopy, Engine::StopCopy] {
        if !works(engine.into()) {
            return skip(NAME, &format!("{engine} does not work here"));
        }
    }
    check_choices(Engine::StopCopy, Engine::Precopy, true);
}

/// As above, with fewer areas.
#[test]
fn areas_of_hugetlb_pages_are_followed_while_threads_come_to_wait() {
    const NAME: &str = "areas_of_hugetlb_pages_are_followed_while_threads_come_to_wait";
    let _turn = turn();
    let (closes, follows) = (Engine::StopCopy, Engine::WpSync);
    if !ladder(HUGE.page).starts_with(&[follows, closes]) {
        return skip(NAME, &"hugetlb pages cannot be both held and followed here");
    }
    let scene = match Scene::new(HUGE) {
        Ok(scene) => scene,
        Err(error) => return skip_page_size(NAME, HUGE.page, error),
    };
    let areas = HUGE.areas;
    let split = |report: &Report| closed_first(HUGE, closes, follows, report);
    assert_eq!(split(&scene.leap(0..0, true)), areas);
    for writes in [true, false] {
        assert_eq!(split(&scene.leap(0..areas, writes)), 11 + 7);
    }
    assert_eq!(split(&scene.leap(4..12, true)), areas);
    assert_eq!(split(&scene.leap(4..24, true)), areas - 16);
    assert_eq!(split(&scene.leap(0..0, true)), areas, "the next job begins anew");
}

#[test]
fn an_unprivileged_job_chooses_too() {
    const NAME: &str = "an_unprivileged_job_chooses_too";
    let _turn = turn();
    if case().is_some() {
        become_nobody();
        set_dumpable(true);
        return check_choices(Engine::Mprotect, Engine::PrecopyProtect, false);
    }
    if !works(Engine::PrecopyProtect.into()) {
        return skip(NAME, &"precopy-protect does not work here");
    }
    if !is_root() {
        return skip(NAME, &"the engines of another user are known to root alone");
    }
    let (end, text) = run_case(NAME, "inside");
    assert_eq!(end, End::Exited(0), "{text}");
}

/// After a change of user, or `prctl(PR_SET_DUMPABLE, 0)`, `/proc/self` belongs to root.
#[test]
fn a_process_that_is_not_dumpable_learns_what_that_costs() {
    const NAME: &str = "a_process_that_is_not_dumpable_learns_what_that_costs";
    let _turn = turn();
    if case().is_some() {
        return lose_the_pagemap();
    }
    if !works(Engine::PrecopyProtect.into()) {
        return skip(NAME, &"precopy-protect does not work here");
    }
    let (end, text) = run_case(NAME, "inside");
    assert_eq!(end, End::Exited(0), "{text}");
}

fn lose_the_pagemap() {
    if is_root() {
        become_nobody();
    }
    set_dumpable(false);
    let told = |text: &str| {
        let parts = ["open(/proc/self/pagemap) failed with EACCES", "prctl(PR_SET_DUMPABLE, 1)"];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    };
    let pools = nodes().map(|node| Pool::builder(node, BYTES as u64).build().unwrap());
    let region = Region::new(&pools[0], BYTES).unwrap();
    stamp(&region, 0..BYTES, 1);
    let to = |pool| Migration::new().range(&region, 0..BYTES, pool);
    told(&to(&pools[1]).engine(Engine::PrecopyProtect).start().map(drop).unwrap_err().to_string());
    let report = to(&pools[1]).start().unwrap().wait();
    assert!(report.ended.is_completed() && report.engine == Engine::Mprotect, "{report}");
    told(&report.engine_reason);
    let found = Capabilities::probe();
    let scans = found.get(Topic::PagemapScan).unwrap();
    let remedies = scans.remedies.iter().any(|r| r.line.contains("PR_SET_DUMPABLE, 1"));
    assert!(remedies && scans.reason.contains("PR_SET_DUMPABLE, 0"), "{scans:?}");
    // The remedy: for as long as it takes to start.
    set_dumpable(true);
    let job = to(&pools[0]).start().unwrap();
    set_dumpable(false);
    let report = job.wait();
    assert!(report.ended.is_completed() && report.engine == Engine::PrecopyProtect, "{report}");
    check_stamp(&region, 0..BYTES, 1);
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
}

#[test]
fn what_keeps_page_tables_from_moving_is_told() {
    let _turn = turn();
    let backend = Arc::new(Refusing::new(Arc::new(Linux), |request| {
        (request.call == Call::Exchange).then_some(Errno(libc::EINVAL))
    }));
    let pools = nodes()
        .map(|node| Pool::builder(node, BYTES as u64).backend(backend.clone()).build().unwrap());
    let region = Region::new(&pools[0], BYTES).unwrap();
    stamp(&region, 0..BYTES, 1);
    let report = Migration::new().range(&region, 0..BYTES, &pools[1]).start().unwrap().wait();
    check_stamp(&region, 0..BYTES, 1);
    if report.engine == Engine::StopCopy && !works(Engine::WpSync.into()) {
        // Linux before 6.6 has no other engine that lets no system call fail.
        assert!(report.pages.failed > 0 && report.to_string().contains("EINVAL"), "{report}");
        return;
    }
    assert!(report.ended.is_completed(), "{report}");
    if matches!(report.engine.engine(), Some(Engine::Precopy | Engine::StopCopy)) {
        // The engine that is left lets no system call fail either.
        let all = pages_by(&report, Engine::WpSync, "failed with EINVAL");
        assert_eq!(all, BYTES / BASE_PAGE, "{report}");
        assert!(report.warnings.is_empty(), "{report}");
    }
}
