//! The program gives advice on a region, protects and locks parts of it while it leaps, as numpy,
//! jemalloc and the JVM do. Each such call splits mappings, and the kernel moves page tables of one
//! mapping only.

#[path = "common/calls.rs"]
mod calls;
mod common;
#[path = "common/refusing.rs"]
mod refusing;

use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use common::{
    address, check_stamp, engines_for, for_page_sizes, leap, migration, nodes, region_flags, skip,
    stamp, surprises, turn, works,
};
use pageleap::backend::{Backend, Call, Errno, Linux, Model};
use pageleap::{
    BASE_PAGE, Ended, Engine, EngineChoice, Error, Migration, NodeId, PageOutcome, PageSize, Pool,
    Reason, Region, audit,
};
use refusing::{Refusing, Request};

/// Longer than what the library has read of a mapping counts as present.
const LONG_AGO: Duration = Duration::from_millis(20);

/// Gives advice on pages of a region.
fn advise(addr: usize, len: usize, advice: libc::c_int) {
    // SAFETY: whole pages of a region. The advice changes no contents.
    let done = unsafe { libc::madvise(addr as *mut _, len, advice) };
    let errno = std::io::Error::last_os_error().raw_os_error();
    // Some kernels know no advice on huge pages.
    assert!(done == 0 || errno == Some(libc::EINVAL), "madvise({advice}): {errno:?}");
}

fn protect(addr: usize, len: usize, access: libc::c_int) {
    // SAFETY: whole pages of a region, to which nothing is stored while they are read-only.
    let done = unsafe { libc::mprotect(addr as *mut _, len, access) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

fn mlock(addr: usize, len: usize) {
    // SAFETY: as for `advise`.
    let done = unsafe { libc::mlock(addr as *const _, len) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

const READ: libc::c_int = libc::PROT_READ;
const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Calls of the program on pages: from which one on, how many, and which.
type Settings<'a> = &'a [(usize, usize, fn(usize, usize))];

const SETTINGS: [Settings<'static>; 6] = [
    &[(0, 8, |addr, len| advise(addr, len, libc::MADV_DONTDUMP))],
    &[(0, 3, |addr, len| advise(addr, len, libc::MADV_SEQUENTIAL)), (2, 4, mlock)],
    &[(0, 5, |addr, len| advise(addr, len, libc::MADV_NOHUGEPAGE))],
    &[(0, 1, |addr, len| advise(addr, len, libc::MADV_HUGEPAGE)), (4, 4, mlock)],
    &[(0, 2, |addr, len| protect(addr, len, READ)), (5, 2, |addr, len| protect(addr, len, READ))],
    &[
        (1, 6, |addr, len| advise(addr, len, libc::MADV_DOFORK)),
        (0, 4, |addr, len| advise(addr, len, libc::MADV_RANDOM)),
        (3, 1, |addr, len| protect(addr, len, READ)),
    ],
];

/// The process has no free descriptor when the job is to look at its mappings.
#[test]
fn a_look_that_fails_tells_of_no_change() {
    let _turn = turn();
    let bytes = 8 * BASE_PAGE;
    for engine in engines_for(PageSize::Base) {
        let pools = common::pools(PageSize::Base, bytes as u64).unwrap();
        let region = Region::new(&pools[0], bytes).unwrap();
        stamp(&region, 0..bytes, 1);
        let guard = region.pin(0..bytes).unwrap();
        let job = migration(&region, 0..bytes, &pools[1]).engine(engine).threads(1);
        let job = job.pin_patience(Duration::from_secs(600)).start().unwrap();
        std::thread::sleep(LONG_AGO);
        let limit = |limit: &libc::rlimit| {
            // SAFETY: the call reads the limit.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, limit) }, 0);
        };
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the call writes the limit.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut before) }, 0);
        limit(&libc::rlimit { rlim_cur: 64, ..before });
        let open = || std::fs::File::open("/dev/null").ok();
        let all_numbers: Vec<_> = std::iter::from_fn(open).collect();
        drop(guard);
        let report = job.wait();
        limit(&before);
        drop(all_numbers);
        assert!(report.ended.is_completed(), "{engine:?}: {report}");
        assert_eq!(report.pages.migrated, 8, "{engine:?}: {report}");
        check_stamp(&region, 0..bytes, 1);
    }
}

/// A guard holds the job until the program has set them: what the job has read at its start is old.
#[test]
fn what_the_program_sets_during_a_job_is_what_moved_pages_have() {
    const PAGES: usize = 8;
    let _turn = turn();
    for_page_sizes("what_the_program_sets_during_a_job_is_what_moved_pages_have", PAGES, |pools| {
        let page = pools[0].page_size().bytes();
        let all = 0..PAGES * page;
        let is_base = page == BASE_PAGE;
        // As one range, and as a range for each page, of which one look tells several.
        for (engine, settings, each) in engines_for(pools[0].page_size())
            .into_iter()
            .flat_map(|engine| SETTINGS.map(|settings| (engine, settings)))
            .flat_map(|(engine, settings)| [(engine, settings, PAGES), (engine, settings, 1)])
            .filter(|(.., each)| is_base || *each == PAGES)
        {
            let region = Region::new(&pools[0], all.end).unwrap();
            stamp(&region, all.clone(), 3);
            let start = address(&region);
            let guard = region.pin(all.clone()).unwrap();
            let job = all.clone().step_by(each * page).fold(Migration::new(), |job, start| {
                job.range(&region, start..start + each * page, &pools[1])
            });
            let job = job.engine(engine).pin_patience(Duration::from_secs(3600)).start().unwrap();
            std::thread::sleep(LONG_AGO);
            settings.iter().for_each(|(first, pages, set)| set(start + first * page, pages * page));
            let wanted = region_flags(&region);
            drop(guard);
            let report = job.wait();
            assert!(report.ended.is_completed(), "{engine}: {report}");
            assert_eq!(report.pages.migrated, PAGES as u64, "{report}");
            assert!(surprises(&report).is_empty(), "{report}");
            assert_eq!(region_flags(&region), wanted, "{engine}: attributes of before: {report}");
            audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
            protect(start, all.end, READ_WRITE);
            check_stamp(&region, all.clone(), 3);
            // What was set reaches neither frames that are free nor the next region.
            drop(region);
            let next = Region::new(&pools[0], all.end).unwrap();
            leap(&next, all.clone(), &pools[1]);
            let flags = region_flags(&next);
            let mine = |flag: &str| ["nh", "hg", "lo", "sr", "rr", "dd"].contains(&flag);
            assert!(
                !flags.iter().any(|(_, text)| text.split(' ').any(mine)),
                "{engine}: {flags:?}"
            );
        }
    });
}

/// A pool for each node whose calls `rule` watches, and a region of some base pages.
fn scene(
    pages: usize,
    rule: impl Fn(&Request) -> Option<Errno> + Send + Sync + 'static,
) -> ([Pool; 2], Region) {
    let backend = Arc::new(Refusing::new(Arc::new(Linux), rule));
    let bytes = (pages * BASE_PAGE) as u64;
    let pools =
        nodes().map(|node| Pool::builder(node, bytes).backend(backend.clone()).build().unwrap());
    let region = Region::new(&pools[0], bytes as usize).unwrap();
    stamp(&region, 0..bytes as usize, 1);
    (pools, region)
}

/// The mapping splits at the worst moment: right before the call that takes its page tables away.
#[test]
fn a_mapping_that_splits_before_its_page_tables_move_is_moved_in_parts() {
    const PAGES: usize = 64;
    const PART: Range<usize> = 24..29;
    let _turn = turn();
    // The engine `wp-sync` takes no page tables away.
    let takes = |choice: &EngineChoice| *choice != EngineChoice::Only(Engine::WpSync);
    for engine in engines_for(PageSize::Base).into_iter().filter(takes) {
        let [start, splits] = [0, 0].map(|zero| Arc::new(AtomicUsize::new(zero)));
        let (of_region, left) = (start.clone(), splits.clone());
        let (pools, region) = scene(PAGES, move |request| {
            let start = of_region.load(SeqCst);
            let parks = request.call == Call::Exchange
                && !(start..start + PAGES * BASE_PAGE).contains(&request.addr);
            let count = |left: usize| left.checked_sub(1);
            if start > 0 && parks && left.fetch_update(SeqCst, SeqCst, count).is_ok() {
                let part = start + PART.start * BASE_PAGE;
                advise(part, PART.len() * BASE_PAGE, libc::MADV_DONTDUMP);
            }
            None
        });
        start.store(address(&region), SeqCst);
        splits.store(1, SeqCst);
        let all = 0..PAGES * BASE_PAGE;
        let job = migration(&region, all.clone(), &pools[1]).area_bytes(all.end).threads(1);
        let report = job.engine(engine).start().unwrap().wait();
        assert_eq!(splits.load(SeqCst), 0, "{engine}: nothing was split");
        assert!(report.ended.is_completed(), "{engine}: {report}");
        assert_eq!(report.pages.migrated, PAGES as u64, "{report}");
        let signals =
            |part: &pageleap::EngineUse| part.engine.engine().is_some_and(Engine::signals);
        let may = report.engine.engine().is_some_and(Engine::signals);
        assert!(may || !report.engines.iter().any(signals), "system calls may fail: {report}");
        assert!(surprises(&report).is_empty(), "{report}");
        // From Linux 6.17 on the kernel moves the page tables of several mappings at once, unless a
        // tracker follows them.
        let untracked = |part: &pageleap::EngineUse| part.engine == Engine::Mprotect;
        let is_noticed = !report.engines.iter().any(untracked);
        let dumped = |page: usize| {
            let flags = common::vm_flags(address(&region) + page * BASE_PAGE, BASE_PAGE);
            !flags[0].1.split(' ').any(|flag| flag == "dd")
        };
        let kept: Vec<usize> = (0..PAGES).filter(|page| !dumped(*page)).collect();
        assert!(!is_noticed || kept.into_iter().eq(PART), "{engine}: {report}");
        check_stamp(&region, all.clone(), 1);
        audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
        leap(&region, all.clone(), &pools[0]);
        check_stamp(&region, all, 1);
    }
}

/// The program advises a whole mapping right before its page tables go to the alias of the frames
/// that it leaves. No call takes advice on huge pages back, and the next region must not get it.
#[test]
fn advice_that_goes_with_page_tables_does_not_reach_the_next_region() {
    const PAGES: usize = 64;
    let _turn = turn();
    for engine in engines_for(PageSize::Base) {
        let [start, advises] = [0, 0].map(|zero| Arc::new(AtomicUsize::new(zero)));
        let (of_region, left) = (start.clone(), advises.clone());
        let (pools, region) = scene(PAGES, move |request| {
            let (start, len) = (of_region.load(SeqCst), PAGES * BASE_PAGE);
            let is_exchange = request.call == Call::Exchange;
            if start > 0 && is_exchange && !(start..start + len).contains(&request.addr) {
                advise(start, len, libc::MADV_NOHUGEPAGE);
                left.fetch_add(1, SeqCst);
            }
            None
        });
        start.store(address(&region), SeqCst);
        let all = 0..PAGES * BASE_PAGE;
        let job = migration(&region, all.clone(), &pools[1]).engine(engine).threads(1);
        // One area: in the next one the job would see what has changed.
        let report = job.area_bytes(all.end).start().unwrap().wait();
        assert!(report.ended.is_completed(), "{engine}: {report}");
        // The engine `wp-sync` takes no page tables away.
        let takes = engine != EngineChoice::Only(Engine::WpSync);
        assert_eq!(advises.load(SeqCst) > 0, takes, "{engine}: {report}");
        drop(region);
        start.store(0, SeqCst);
        let next = Region::new(&pools[0], all.end).unwrap();
        stamp(&next, all.clone(), 2);
        leap(&next, all.clone(), &pools[1]);
        leap(&next, all.clone(), &pools[0]);
        check_stamp(&next, all.clone(), 2);
        let flags = region_flags(&next);
        assert!(!flags.iter().any(|(_, text)| text.contains("nh")), "{engine}: {flags:?}");
        audit(&[&pools[0], &pools[1]], &[&next]).unwrap();
    }
}

/// If it goes on, the pages stay in the end, with the first cause as their reason. Then they move
/// as ever.
#[test]
fn pages_of_a_mapping_that_never_stands_still_are_busy() {
    const PAGES: usize = 4;
    let _turn = turn();
    let engines = [EngineChoice::Auto, Engine::Precopy.into(), Engine::StopCopy.into()];
    for engine in engines.into_iter().chain([Engine::Mprotect.into()]).filter(|one| works(*one)) {
        let [start, count] = [0, 0].map(|zero| Arc::new(AtomicUsize::new(zero)));
        let (of_region, refused) = (start.clone(), count.clone());
        let (pools, region) = scene(PAGES, move |request| {
            let start = of_region.load(SeqCst);
            let parks = request.call == Call::Exchange
                && !(start..start + PAGES * BASE_PAGE).contains(&request.addr);
            // As the kernel answers when the span is more than one mapping.
            (start > 0 && parks).then(|| {
                refused.fetch_add(1, SeqCst);
                Errno(libc::EFAULT)
            })
        });
        start.store(address(&region), SeqCst);
        let all = 0..PAGES * BASE_PAGE;
        let before = region_flags(&region);
        let job = migration(&region, all.clone(), &pools[1]).engine(engine).threads(1);
        let report = job.start().unwrap().wait();
        start.store(0, SeqCst);
        let Ended::Failed(Error::Call { call, errno, remedy, .. }) = &report.ended else {
            panic!("{engine}: {report}")
        };
        assert_eq!((*call, *errno), (Call::Exchange, Errno(libc::EFAULT)), "{report}");
        assert!(remedy.contains("madvise"), "{remedy}");
        assert_eq!(report.pages.busy, PAGES as u64, "{report}");
        let why = Reason::MappingChanged(Some((Call::Exchange, Errno(libc::EFAULT))));
        let stays = |run: &pageleap::PageRun| (run.outcome, run.reason);
        assert!(report.runs.iter().all(|run| stays(run) == (PageOutcome::Busy, Some(why))));
        let tries = count.load(SeqCst);
        assert!((PAGES * 10..PAGES * 30).contains(&tries), "{tries} tries: {report}");
        check_stamp(&region, all.clone(), 1);
        assert_eq!(region_flags(&region), before);
        leap(&region, all.clone(), &pools[1]);
        check_stamp(&region, all, 1);
        audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
    }
}

/// Pages that the program has unmapped stay, and the others move. On the model: on the kernel any
/// thread could map something else there.
#[test]
fn pages_whose_mapping_is_gone_stay_and_the_others_move() {
    const PAGES: usize = 6;
    let _turn = turn();
    let bytes = PAGES * BASE_PAGE;
    for engine in common::repeated() {
        let model = Arc::new(Model::new());
        let build = || Pool::builder(NodeId(0), bytes as u64).threads(1).backend(model.clone());
        let pools = [(); 2].map(|()| build().build().unwrap());
        let region = Region::new(&pools[0], bytes).unwrap();
        let page = |at: usize| address(&region) + at * BASE_PAGE;
        (0..PAGES).for_each(|at| model.store(page(at), at as u64 + 1).unwrap());
        let guard = region.pin(0..bytes).unwrap();
        let job = migration(&region, 0..bytes, &pools[1]).engine(engine).threads(1);
        let job = job.pin_patience(Duration::from_secs(3600)).start().unwrap();
        // What the job has read at its start is too old by then.
        std::thread::sleep(LONG_AGO);
        // SAFETY: nothing accesses the pages of the model any more.
        unsafe { model.release(page(3), 2 * BASE_PAGE) }.unwrap();
        drop(guard);
        let report = job.wait();
        assert!(matches!(report.ended, Ended::Failed(Error::Unsupported { .. })), "{report}");
        assert_eq!((report.pages.migrated, report.pages.busy), (4, 2), "{engine}: {report}");
        let stays = |run: &&pageleap::PageRun| run.outcome == PageOutcome::Busy;
        let [run] = &report.runs.iter().filter(stays).collect::<Vec<_>>()[..] else {
            panic!("{report}")
        };
        let why = Some(Reason::MappingChanged(None));
        assert_eq!((&run.range, run.reason), (&(3 * BASE_PAGE..5 * BASE_PAGE), why), "{report}");
        for at in [0, 1, 2, 5] {
            assert_eq!(model.load(page(at)), Ok(at as u64 + 1), "{engine}");
        }
    }
}

/// The reason of pages that stay is the call that was refused first, and a warning tells what came
/// of it.
#[test]
fn the_first_refused_call_is_the_reason() {
    const NAME: &str = "the_first_refused_call_is_the_reason";
    const PAGES: usize = 4;
    let _turn = turn();
    if !works(Engine::StopCopy.into()) {
        return skip(NAME, &"stop-copy does not work here");
    }
    let [armed, first] = [false, true].map(|value| Arc::new(AtomicBool::new(value)));
    let (is_armed, is_first) = (armed.clone(), first.clone());
    let (pools, region) = scene(PAGES, move |request| {
        if !is_armed.load(SeqCst) {
            return None;
        }
        match request.call {
            Call::Track if is_first.swap(false, SeqCst) => Some(Errno(libc::ENOMEM)),
            Call::Exchange => Some(Errno(libc::EPERM)),
            _ => None,
        }
    });
    armed.store(true, SeqCst);
    let job = migration(&region, 0..region.len(), &pools[1]).area_bytes(region.len()).threads(1);
    let report = job.engine(Engine::StopCopy).start().unwrap().wait();
    armed.store(false, SeqCst);
    let Ended::Failed(Error::Call { call, errno, .. }) = &report.ended else { panic!("{report}") };
    assert_eq!((*call, *errno), (Call::Track, Errno(libc::ENOMEM)), "{report}");
    let why = Some(Reason::Refused(Call::Track, Errno(libc::ENOMEM)));
    assert!(report.runs.iter().all(|run| run.reason == why), "{report}");
    assert!(report.warnings.iter().any(|words| words.contains("EPERM")), "{report}");
    check_stamp(&region, 0..region.len(), 1);
}

/// Threads give advice, protect and lock parts of a region that leaps, and others read and write it
/// by system calls. What they set last is what pages have at the end.
#[test]
fn programs_that_change_mappings_beside_leaps_lose_nothing() {
    const PAGES: usize = 512;
    let leaps = if common::in_lab() { 4 } else { 12 };
    let _turn = turn();
    for engine in engines_for(PageSize::Base) {
        let bytes = PAGES * BASE_PAGE;
        let pools = nodes().map(|node| Pool::builder(node, bytes as u64).build().unwrap());
        let region = Region::new(&pools[0], bytes).unwrap();
        let start = address(&region);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for (number, by) in [advises, locks, protects].into_iter().enumerate() {
                let (over, part) = (&over, start + (number + 1) * 128 * BASE_PAGE);
                scope.spawn(move || by(part, over));
            }
            // Pages that advice is given on are written by system calls, and by themselves.
            let (over, region, pools) = (&over, &region, &pools);
            scope.spawn(move || pipes(region, 0..256 * BASE_PAGE, engine, over));
            for round in 0..leaps {
                let to = &pools[usize::from(round % 2 == 0)];
                let job = migration(region, 0..bytes, to).area_bytes(32 * BASE_PAGE);
                let report = job.engine(engine).start().unwrap().wait();
                assert!(report.ended.is_completed(), "{engine}: {report}");
                assert_eq!(report.pages.migrated, PAGES as u64, "{report}");
                let whole = report.engine.engine().is_some_and(Engine::signals)
                    || report.engines.iter().all(|part| {
                        !part.engine.engine().is_some_and(Engine::signals) || is_read_only(part)
                    });
                assert!(whole, "{engine}: system calls may have failed: {report}");
                audit(&[&pools[0], &pools[1]], &[region]).unwrap();
            }
            over.store(true, SeqCst);
        });
        // Whatever the race has left: what is set now stays.
        protect(start, bytes, READ_WRITE);
        advise(start, bytes, libc::MADV_DODUMP);
        advise(start + 200 * BASE_PAGE, 9 * BASE_PAGE, libc::MADV_DONTDUMP);
        stamp(&region, 0..bytes, 5);
        let wanted = region_flags(&region);
        for to in [&pools[1], &pools[0]] {
            let report = migration(&region, 0..bytes, to).engine(engine).start().unwrap().wait();
            assert!(report.ended.is_completed(), "{engine}: {report}");
            assert_eq!(region_flags(&region), wanted, "{engine}");
        }
        check_stamp(&region, 0..bytes, 5);
        audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
    }
}

/// Pages that nobody may write need no engine that follows writes.
fn is_read_only(part: &pageleap::EngineUse) -> bool {
    part.why.contains("nobody may write")
}

/// Gives advice on parts of 128 pages, until it is over.
fn advises(start: usize, over: &AtomicBool) {
    let all = [
        libc::MADV_HUGEPAGE,
        libc::MADV_NOHUGEPAGE,
        libc::MADV_DONTDUMP,
        libc::MADV_SEQUENTIAL,
        libc::MADV_DODUMP,
        libc::MADV_NORMAL,
    ];
    for (round, advice) in all.into_iter().cycle().enumerate() {
        if over.load(SeqCst) {
            return;
        }
        let (first, pages) = (round * 37 % 100, 1 + round * 11 % 28);
        advise(start + first * BASE_PAGE, pages * BASE_PAGE, advice);
    }
}

/// Locks and unlocks parts.
fn locks(start: usize, over: &AtomicBool) {
    for round in 0.. {
        if over.load(SeqCst) {
            return;
        }
        let addr = start + round * 37 % 100 * BASE_PAGE;
        mlock(addr, 4 * BASE_PAGE);
        // SAFETY: the same pages.
        assert_eq!(unsafe { libc::munlock(addr as *const _, 4 * BASE_PAGE) }, 0);
    }
}

/// Takes write access of parts to which nothing is stored away, and gives it again.
fn protects(start: usize, over: &AtomicBool) {
    for round in 0.. {
        if over.load(SeqCst) {
            return;
        }
        let addr = start + round * 37 % 100 * BASE_PAGE;
        protect(addr, 8 * BASE_PAGE, READ);
        protect(addr, 8 * BASE_PAGE, READ_WRITE);
    }
}

/// Sends pages of a region through a pipe into others, and checks the bytes. Engines that raise
/// signals let such calls fail.
fn pipes(region: &Region, range: Range<usize>, engine: EngineChoice, over: &AtomicBool) {
    let (from, to) = calls::pipe();
    let words = region.atomics_u64(range).unwrap();
    let whole = match engine.forced() {
        Some(engine) => !engine.signals(),
        None => works(Engine::Precopy.into()),
    };
    let page = BASE_PAGE / 8;
    let pages = words.len() / page;
    for round in 1u64.. {
        if over.load(SeqCst) {
            return;
        }
        let [source, target] = [7, 13].map(|step| round as usize * step % (pages / 2));
        let source = &words[source * page..(source + 1) * page];
        let target = &words[(pages / 2 + target) * page..(pages / 2 + target + 1) * page];
        source.iter().for_each(|word| word.store(round, SeqCst));
        // SAFETY: one page of the region is read, and another one written, which no other thread
        // uses. The pipe is empty and has room, so that neither call waits.
        let put = unsafe { libc::write(to.as_raw_fd(), source.as_ptr().cast(), BASE_PAGE) };
        assert_eq!(put, BASE_PAGE as isize, "{}", std::io::Error::last_os_error());
        let mut got = 0;
        while got < BASE_PAGE as isize {
            let at = target.as_ptr().cast::<u8>().wrapping_add(got as usize);
            // SAFETY: as above.
            let n = unsafe { libc::read(from.as_raw_fd(), at as *mut _, BASE_PAGE - got as usize) };
            let error = std::io::Error::last_os_error();
            assert!(n > 0 || !whole, "a system call into a leaping region has failed: {error}");
            assert!(n > 0 || error.raw_os_error() == Some(libc::EFAULT), "{error}");
            got += n.max(0);
        }
        assert!(target.iter().all(|word| word.load(SeqCst) == round), "round {round}");
    }
}
