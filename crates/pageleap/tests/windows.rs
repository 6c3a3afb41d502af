//! Stores at the two moments at which an engine could lose one: just before the window, and in it. A
//! gate in the backend makes each happen where it matters, on the kernel.

mod common;
#[path = "common/refusing.rs"]
mod refusing;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::SeqCst};

use common::{
    Kept, address, check_stamp, nodes, skip, skip_page_size, stamp, turn, works, works_for,
};
use pageleap::backend::{Call, Linux};
use pageleap::{Engine, Error, Migration, PageSize, PageTableMigration, Pool, Region};
use refusing::{Refusing, Request};

const PAGES: usize = 4;

/// A region of one area, and the pool to which it moves.
struct Scene {
    region: Region,
    to: Pool,
}

impl Scene {
    /// `gate` is run before each call on the region's first page, when it is given the address of
    /// that page.
    fn new(
        page: PageSize,
        gate: impl Fn(&Request) + Send + Sync + 'static,
    ) -> Result<(Scene, Arc<AtomicUsize>), Error> {
        let start = Arc::new(AtomicUsize::new(0));
        let opened = start.clone();
        let backend = Arc::new(Refusing::new(Arc::new(Linux), move |request| {
            let start = opened.load(SeqCst);
            if start != 0 && request.addr == start {
                gate(request);
            }
            None
        }));
        let bytes = PAGES * page.bytes();
        let build = |node| {
            let pool = Pool::builder(node, bytes as u64).page_size(page);
            pool.backend(backend.clone()).build()
        };
        let [near, far] = nodes();
        let (from, to) = (build(near)?, build(far)?);
        let region = Region::new(&from, bytes)?;
        let scene = Scene { region, to };
        stamp(&scene.region, 0..scene.stored_at(), 1);
        Ok((scene, start))
    }

    /// Where the stores go. Stamps do not reach it.
    fn stored_at(&self) -> usize {
        self.region.len() / 2
    }

    fn word(&self) -> &AtomicU64 {
        &self.region.atomics_u64(self.stored_at()..self.stored_at() + 8).unwrap()[0]
    }

    /// Moves the region in one attempt.
    fn leap(&self, engine: Engine) {
        let bytes = self.region.len();
        let job = Migration::new().range(&self.region, 0..bytes, &self.to).engine(engine);
        let report = job.area_bytes(bytes).threads(1).start().unwrap().wait();
        assert!(report.ended.is_completed(), "{report}");
        assert_eq!(report.engine, engine, "{report}");
        check_stamp(&self.region, 0..self.stored_at(), 1);
    }
}

/// Whether a thread that does nothing but store waits for its page: at a userfaultfd, each of which
/// tells how many threads wait there, or in the library's fault handler, on a futex.
fn waits(thread: u32) -> bool {
    let call = std::fs::read_to_string(format!("/proc/self/task/{thread}/syscall"));
    let number = call.ok().and_then(|text| text.split(' ').next()?.parse().ok());
    number == Some(libc::SYS_futex) || waiting_at_userfaultfds() > 0
}

fn waiting_at_userfaultfds() -> usize {
    let count = |entry: std::io::Result<std::fs::DirEntry>| {
        // Others may be closed meanwhile.
        let text = std::fs::read_to_string(entry.ok()?.path()).ok()?;
        text.lines().find_map(|line| line.strip_prefix("total:"))?.trim().parse::<usize>().ok()
    };
    std::fs::read_dir("/proc/self/fdinfo").unwrap().filter_map(count).sum()
}

/// The window begins with a call of its own, at which a page counts as copied. A store at that
/// moment has to be copied too.
#[test]
fn a_store_just_before_the_window_is_not_lost() {
    let _turn = turn();
    let engine = Engine::Precopy;
    if !works(engine.into()) {
        return skip("a_store_just_before_the_window_is_not_lost", &"no engine precopy");
    }
    let word = Arc::new(AtomicUsize::new(0));
    let stores = Arc::new(AtomicU64::new(0));
    let (at, count) = (word.clone(), stores.clone());
    let (scene, start) = Scene::new(PageSize::Base, move |request| {
        // The last of these calls is made when all has been copied that was seen to be written.
        if request.call == Call::Track {
            let value = count.fetch_add(1, SeqCst) + 1;
            // SAFETY: an aligned word of the region, which only atomic operations access.
            unsafe { AtomicU64::from_ptr(at.load(SeqCst) as *mut u64) }.store(value, SeqCst);
        }
    })
    .unwrap();
    word.store(scene.word().as_ptr() as usize, SeqCst);
    start.store(address(&scene.region), SeqCst);
    scene.leap(engine);
    let last = stores.load(SeqCst);
    assert!(last > 0, "the gate was not reached");
    assert_eq!(scene.word().load(SeqCst), last, "a store just before the window is lost");
}

#[test]
fn a_store_in_the_window_is_not_lost() {
    const NAME: &str = "a_store_in_the_window_is_not_lost";
    let _turn = turn();
    let ways = [Engine::Precopy, Engine::StopCopy, Engine::Mprotect].map(|e| (e, PageSize::Base));
    for (engine, page) in ways.into_iter().chain([(Engine::StopCopy, PageSize::Huge2M)]) {
        if !works_for(engine.into(), page) {
            skip(NAME, &format!("no engine {engine} for pages of {page}"));
        } else if let Err(error) = store_in_the_window(engine, page) {
            skip_page_size(NAME, page, error);
        }
    }
}

fn store_in_the_window(engine: Engine, page: PageSize) -> Result<(), Error> {
    let [opened, stored] = [0; 2].map(|_| Arc::new(AtomicBool::new(false)));
    let writer = Arc::new(AtomicU32::new(0));
    let (open, done, thread) = (opened.clone(), stored.clone(), writer.clone());
    let (scene, start) = Scene::new(page, move |request| {
        // All has been copied, and the new frames are about to come.
        if matches!(request.call, Call::Exchange | Call::Map) && !open.swap(true, SeqCst) {
            while !done.load(SeqCst) && !waits(thread.load(SeqCst)) {
                std::thread::yield_now();
            }
        }
    })?;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: the call has no arguments.
            writer.store(unsafe { libc::gettid() } as u32, SeqCst);
            while !opened.load(SeqCst) {
                std::thread::yield_now();
            }
            scene.word().store(7, SeqCst);
            stored.store(true, SeqCst);
        });
        // Before that it could be a futex of its start that the thread waits on.
        while writer.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
        start.store(address(&scene.region), SeqCst);
        scene.leap(engine);
        // A thread that waits for a gate that was not reached would wait for ever.
        assert!(opened.swap(true, SeqCst), "the gate was not reached");
    });
    let words = format!("{engine}: a store in the window is lost, of pages of {page}");
    assert_eq!(scene.word().load(SeqCst), 7, "{words}");
    Ok(())
}

/// Between the two calls that move page tables alone, a page has no entry. The worker stores there
/// itself, in user code and by the kernel.
#[test]
fn a_store_while_page_tables_are_made_is_not_lost() {
    let _turn = turn();
    const BYTES: usize = 2 << 20;
    let word = Arc::new(AtomicUsize::new(0));
    let stores = Arc::new(AtomicU64::new(0));
    let (at, count) = (word.clone(), stores.clone());
    let backend = Arc::new(Refusing::new(Arc::new(Linux), move |request| {
        let first = at.load(SeqCst);
        // The entries are about to come back to the region.
        if first != 0 && request.call == Call::Exchange && request.addr == first {
            let value = count.fetch_add(1, SeqCst) + 1;
            // SAFETY: two aligned words of the region, which only atomic operations and the kernel
            // access.
            unsafe {
                AtomicU64::from_ptr(first as *mut u64).store(value, SeqCst);
                let size = libc::getrandom((first + 4096) as *mut libc::c_void, 8, 0);
                assert_eq!(size, 8, "a system call fails while page tables are made");
            }
        }
        None
    }));
    let pool = Pool::builder(nodes()[0], BYTES as u64).backend(backend).build().unwrap();
    let region = Region::new(&pool, BYTES).unwrap();
    stamp(&region, 8192..BYTES, 1);
    let kept = Kept::of(&region);
    let words = region.atomics_u64(0..8192).unwrap();
    word.store(address(&region), SeqCst);
    for nth in 1..=3 {
        words[512].store(0, SeqCst);
        let move_all = PageTableMigration::new(&region, 0..BYTES, nodes()[0]).anew();
        let report = move_all.run().unwrap();
        assert_eq!(report.pages.migrated, 512, "{report}");
        assert_eq!(stores.load(SeqCst), nth, "the gate was not reached");
        assert_eq!(words[0].load(SeqCst), nth, "a store while page tables are made is lost");
        assert_ne!(words[512].load(SeqCst), 0, "a store by the kernel is lost");
    }
    check_stamp(&region, 8192..BYTES, 1);
    kept.check(&region);
}
