//! The process runs out of descriptors, address space or mappings: errors are clear, nothing is
//! lost, and jobs succeed again under a higher limit.
//!
//! Each case runs in a child, because the limits hold for the whole process.

mod common;
#[path = "common/machine_settings.rs"]
mod machine_settings;
#[path = "common/moving.rs"]
mod moving;

use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use common::{
    check_stamp, engines, in_lab, is_zero, leap, limit_address_space, migration, nodes, pools,
    soon, stamp, surprises,
};
use machine_settings::MappingLimit;
use moving::{BYTES, FINE, cases, scene, while_migrating, write_rounds};
use pageleap::backend::{Backend, Call, Errno, Interposer, Linux, Part, Request};
use pageleap::{Ended, Error, Migration, PageSize, Pool, Region, WarningKind, audit, observe};

fn set_file_limit(files: u64) {
    let limit = libc::rlimit { rlim_cur: files, rlim_max: 4096 };
    // SAFETY: the call reads one structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
}

#[test]
fn running_out_of_descriptors_loses_nothing() {
    cases(
        "running_out_of_descriptors_loses_nothing",
        &[("drops", without_descriptors_drops, FINE), ("files", without_descriptors_files, FINE)],
    );
}

/// Frames are given back without opening a file, unless a call has failed.
fn without_descriptors_drops() {
    let (pools, region) = scene();
    leap(&region, 0..BYTES, &pools[1]);
    let job = migration(&region, 0..BYTES, &pools[0]).start().unwrap();
    set_file_limit(3);
    assert!(job.wait().ended.is_completed());
    drop(region);
    set_file_limit(4096);
    assert_eq!((pools[0].free_bytes(), pools[1].free_bytes()), (BYTES as u64, BYTES as u64));
    let region = Region::new(&pools[1], BYTES).unwrap();
    assert!(is_zero(&region, 0..BYTES));
    leap(&region, 0..BYTES, &pools[0]);
}

fn without_descriptors_files() {
    let (pools, region) = scene();
    stamp(&region, 0..BYTES, 1);
    leap(&region, 0..BYTES, &pools[1]);
    leap(&region, 0..BYTES, &pools[0]);
    // SAFETY: the descriptor is new, and closed again. It has the first free number.
    let next = unsafe {
        let fd = libc::dup(0);
        libc::close(fd);
        fd as u64
    };
    let mut refusals = 0;
    for spare in 0..16 {
        set_file_limit(next + spare);
        let pool = Pool::builder(pools[0].nodes()[0], 4096).build().map(drop);
        let job = migration(&region, 0..BYTES, &pools[1]).start();
        set_file_limit(4096);
        for result in [pool, job.map(|job| drop(job.wait()))] {
            let Err(error) = result else { continue };
            refusals += 1;
            let text = error.to_string();
            assert!(text.contains("EMFILE") || text.contains("open files"), "{text}");
            assert!(
                !error.is_usage() && !text.contains("mount "),
                "the remedy is one for another error: {text}"
            );
        }
        leap(&region, 0..BYTES, &pools[0]);
        assert_eq!((pools[0].free_bytes(), pools[1].free_bytes()), (0, BYTES as u64));
        check_stamp(&region, 0..BYTES, 1);
        audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
    }
    assert!(refusals > 0, "no limit was low enough");
}

#[test]
fn running_out_of_address_space_loses_nothing() {
    cases(
        "running_out_of_address_space_loses_nothing",
        &[
            ("a job", without_address_space_a_job, FINE),
            ("memory for a region", without_address_space_memory_for_a_region, FINE),
        ],
    );
}

#[test]
fn running_out_of_threads_loses_nothing() {
    cases(
        "running_out_of_threads_loses_nothing",
        &[
            ("a job", without_threads_a_job, FINE),
            ("a pool", without_threads_a_pool, FINE),
            ("views", without_threads_views, FINE),
        ],
    );
}

/// Lets the user of this process, who is not root, have no more threads. `false` lifts the limit.
fn forbid_threads(forbid: bool) {
    let rlim_cur = if forbid { 0 } else { 4096 };
    let limit = libc::rlimit { rlim_cur, rlim_max: 4096 };
    // SAFETY: the call reads one structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NPROC, &limit) }, 0);
}

fn without_threads_a_job() {
    if common::is_root() {
        common::become_nobody();
    }
    let (pools, region) = scene();
    stamp(&region, 0..BYTES, 1);
    forbid_threads(true);
    let refused = migration(&region, 0..BYTES, &pools[1]).start().map(drop);
    forbid_threads(false);
    let error = refused.expect_err("not refused");
    let is_named = matches!(error, Error::NoThread { errno: Errno(libc::EAGAIN), .. });
    let text = error.to_string();
    assert!(is_named && text.contains("pthread_create") && text.contains("ulimit -u"), "{text}");
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
    leap(&region, 0..BYTES, &pools[1]);
    check_stamp(&region, 0..BYTES, 1);
}

/// The caller's own thread fills it.
fn without_threads_a_pool() {
    if common::is_root() {
        common::become_nobody();
    }
    forbid_threads(true);
    let (_pools, region) = scene();
    assert!(is_zero(&region, 0..BYTES));
}

/// The memory policy of the calling thread: its mode and its nodes.
fn own_policy() -> (i32, [u64; 16]) {
    let (mut mode, mut nodes) = (0, [0u64; 16]);
    // SAFETY: the call writes a number and as many bits as the array has.
    let rc = unsafe {
        let (mode, nodes) = (&raw mut mode, nodes.as_mut_ptr());
        libc::syscall(libc::SYS_get_mempolicy, mode, nodes, 1024usize, 0usize, 0usize)
    };
    assert_eq!(rc, 0);
    (mode, nodes)
}

/// Without a thread of the library `replicate` is refused, and `back` fills the page tables of
/// views under the caller's own memory policy.
fn without_threads_views() {
    if common::is_root() {
        common::become_nobody();
    }
    let (pools, mut region) = scene();
    let node = nodes()[0];
    forbid_threads(true);
    let refused = region.replicate([node]).unwrap_err();
    assert!(matches!(refused, Error::NoThread { .. }), "{refused}");
    assert!(region.views().is_empty());
    forbid_threads(false);
    region.replicate([node]).unwrap();
    stamp(&region, 0..BYTES, 1);
    region.discard(0..BYTES).unwrap();
    forbid_threads(true);
    let before = own_policy();
    region.back(0..BYTES, &pools[0]).unwrap();
    assert_eq!(own_policy(), before);
    forbid_threads(false);
    let views = region.views();
    let words = views[0].atomics_u64(0..BYTES).unwrap();
    words[7].store(5, Relaxed);
    assert_eq!(region.atomics_u64(0..BYTES).unwrap()[7].load(Relaxed), 5);
}

/// A limit that falls while a job runs also meets whatever else the process allocates, so these
/// cases belong to `cargo xtask test --only faults`. In the first command calls of the job fail
/// instead: `calls_that_fail_for_a_while_cost_no_page`.
#[test]
fn a_limit_that_falls_under_a_running_job_loses_nothing() {
    cases(
        "a_limit_that_falls_under_a_running_job_loses_nothing",
        &[
            ("address space", without_address_space_a_running_job, FINE),
            ("mappings", without_mappings_a_job_that_runs_out_of_them, FINE),
        ],
    );
}

/// A kernel that has no room for mappings while some calls are made.
struct Full {
    /// What has been mapped is gone before a call fails that replaces it: so it is if the address
    /// space is used up, and else nothing has happened.
    leaves_holes: bool,
    /// The numbers of the calls that fail, counted from [`Full::arm`].
    fails: Range<u64>,
    made: AtomicU64,
}

impl Full {
    /// Counts no calls yet: pools and regions are made.
    const IDLE: u64 = u64::MAX / 2;

    fn arm(&self) {
        self.made.store(0, Relaxed);
    }
}

// SAFETY: the call is made once at most, and its result is returned unless it is to fail.
unsafe impl Interposer for Full {
    fn inner(&self) -> &dyn Backend {
        &Linux
    }

    fn decide<T>(
        &self,
        request: &Request,
        mut make: impl FnMut(Part) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let replaces = matches!(request.call, Call::Map | Call::Exchange);
        let splits = matches!(request.call, Call::Protect | Call::Advise | Call::Track);
        let counts = replaces || splits && !self.leaves_holes;
        if !counts || !self.fails.contains(&self.made.fetch_add(1, Relaxed)) {
            return make(Part::Whole);
        }
        if self.leaves_holes {
            let _ = make(Part::Half);
        }
        Err(Errno(libc::ENOMEM))
    }
}

/// The job goes on when there is room again, and has filled each hole.
#[test]
fn calls_that_fail_for_a_while_cost_no_page() {
    cases(
        "calls_that_fail_for_a_while_cost_no_page",
        &[
            ("nothing", || calls_fail_for_a_while(false), FINE),
            ("holes", || calls_fail_for_a_while(true), FINE),
        ],
    );
}

fn calls_fail_for_a_while(leaves_holes: bool) {
    /// As many calls fail in a row.
    const WHILE: u64 = 20;
    for (engine, first) in engines().into_iter().flat_map(|e| [1, 2, 30].map(|n| (e, n))) {
        let fails = first..first + WHILE;
        let full = Arc::new(Full { leaves_holes, fails, made: AtomicU64::new(Full::IDLE) });
        let pools =
            nodes().map(|n| Pool::builder(n, BYTES as u64).backend(full.clone()).build().unwrap());
        let region = Region::new(&pools[0], BYTES).unwrap();
        stamp(&region, 0..BYTES, 1);
        full.arm();
        let job = migration(&region, 0..BYTES, &pools[1]).engine(engine).threads(1);
        let report = job.start().unwrap().wait();
        let what = format!("{engine}, call {first}: {report}");
        let ended = matches!(report.ended, Ended::Failed(Error::Call { .. }) | Ended::Completed);
        assert!(ended && report.pages.busy + report.pages.not_attempted == 0, "{what}");
        assert!(full.made.load(Relaxed) > first + WHILE, "too few calls: {what}");
        check_stamp(&region, 0..BYTES, 1);
        audit(&[&pools[0], &pools[1]], &[&region]).unwrap_or_else(|e| panic!("{e}: {what}"));
        leap(&region, 0..BYTES, &pools[1]);
        check_stamp(&region, 0..BYTES, 1);
    }
}

fn without_address_space_a_job() {
    let (pools, region) = scene();
    stamp(&region, 0..BYTES, 1);
    limit_address_space(Some(-(1 << 20)));
    let refused = migration(&region, 0..BYTES, &pools[1]).start().map(drop);
    limit_address_space(None);
    let text = refused.expect_err("not refused").to_string();
    assert!(text.contains("RLIMIT_AS"), "{text}");
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
    leap(&region, 0..BYTES, &pools[1]);
    check_stamp(&region, 0..BYTES, 1);
}

fn without_address_space_memory_for_a_region() {
    let [pool, _] = common::pools(PageSize::Base, BYTES as u64).unwrap();
    let region = Region::reserve(BYTES, PageSize::Base).unwrap();
    for _ in 0..3 {
        limit_address_space(Some(-(1 << 20)));
        let refused = region.grow(BYTES, &pool);
        limit_address_space(None);
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("RLIMIT_AS"), "{text}");
        assert_eq!(pool.free_bytes(), BYTES as u64);
    }
    region.grow(BYTES, &pool).unwrap();
    assert!(is_zero(&region, 0..BYTES));
}

/// A call that is under way when the limit falls leaves a hole. The job fills it when
/// the limit allows that. Afterwards the job begins no area while the limit is
/// exceeded.
fn without_address_space_a_running_job() {
    const LONG: usize = 64 << 20;
    let [near, far] = common::pools(PageSize::Base, LONG as u64).unwrap();
    let region = Region::new(&near, LONG).unwrap();
    stamp(&region, 0..LONG, 1);
    let job = migration(&region, 0..LONG, &far).area_bytes(4096).start().unwrap();
    assert!(soon(|| job.progress().bytes_migrated > 0));
    limit_address_space(Some(-(8 << 20)));
    std::thread::sleep(Duration::from_millis(100));
    limit_address_space(None);
    let report = job.wait();
    let ended = matches!(report.ended, Ended::Failed(Error::Call { .. }) | Ended::Completed);
    assert!(ended && report.pages.busy + report.pages.not_attempted == 0, "{report}");
    check_stamp(&region, 0..LONG, 1);
    audit(&[&near, &far], &[&region]).unwrap();
    leap(&region, 0..LONG, &far);
    check_stamp(&region, 0..LONG, 1);
}

/// Uses up mappings: one large mapping, of which some pages have another protection.
struct Hog {
    /// A lower limit, on machines of the lab.
    _limit: Option<MappingLimit>,
    start: usize,
    pages: usize,
    /// The number of pages with another protection.
    taken: usize,
}

/// More mappings than any job here needs.
const PLENTY: usize = 4000;

impl Hog {
    fn new() -> Hog {
        // Where every instruction is emulated, it takes half a minute to reach the usual limit.
        let limit = in_lab().then(|| MappingLimit::lower_to(16384));
        let pages = observe::max_mapping_count().unwrap() + 16;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the kernel chooses a free address.
        let start =
            unsafe { libc::mmap(ptr::null_mut(), pages * 4096, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        Hog { _limit: limit, start: start as usize, pages, taken: 0 }
    }

    fn protect(&self, page: usize, prot: i32) -> bool {
        // SAFETY: a page of this value's mapping, which nothing accesses.
        unsafe { libc::mprotect((self.start + page * 4096) as *mut libc::c_void, 4096, prot) == 0 }
    }

    /// Changes the protection of `pages` more pages, or of as many as the limit allows.
    fn take(&mut self, pages: usize) {
        let end = (self.taken + pages).min(self.pages / 2);
        while self.taken < end && self.protect(2 * self.taken + 1, libc::PROT_READ) {
            self.taken += 1;
        }
    }

    /// Takes all mappings that are left.
    fn take_all(&mut self) {
        self.take(self.pages);
    }

    /// Takes mappings or gives them back until about `spare` are left. At no instant are fewer
    /// left, except before the call.
    fn leave(&mut self, spare: usize) {
        let room =
            observe::max_mapping_count().unwrap().saturating_sub(observe::mapping_count().unwrap());
        // Each page with another protection cuts one mapping into three.
        self.take(room.saturating_sub(spare) / 2);
        for _ in 0..spare.saturating_sub(room).div_ceil(2) {
            self.taken -= 1;
            assert!(self.protect(2 * self.taken + 1, libc::PROT_NONE));
        }
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        // SAFETY: this value's mapping, which nothing accesses.
        unsafe { libc::munmap(self.start as *mut libc::c_void, self.pages * 4096) };
    }
}

#[test]
fn running_out_of_mappings_loses_nothing() {
    cases(
        "running_out_of_mappings_loses_nothing",
        &[
            ("a job", without_mappings_a_job, FINE),
            ("a running job", without_mappings_a_running_job, FINE),
            ("more guards than mappings", without_mappings_more_guards_than_mappings, FINE),
            ("pools and regions", without_mappings_pools_and_regions, FINE),
            ("discard", without_mappings_discard, FINE),
            ("views", without_mappings_views, FINE),
            ("many pieces", without_mappings_many_pieces, FINE),
        ],
    );
}

fn without_mappings_a_job() {
    let (pools, region) = scene();
    stamp(&region, 0..BYTES, 1);
    leap(&region, 0..BYTES, &pools[1]);
    let mut hog = Hog::new();
    hog.take_all();
    let Err(error) = migration(&region, 0..BYTES, &pools[0]).start().map(drop) else {
        panic!("not refused")
    };
    let text = error.to_string();
    assert!(text.contains("max_map_count"), "{text}");
    assert_eq!((pools[0].free_bytes(), pools[1].free_bytes()), (BYTES as u64, 0));
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
    drop(hog);
    leap(&region, 0..BYTES, &pools[0]);
    check_stamp(&region, 0..BYTES, 1);
}

fn without_mappings_a_running_job() {
    while_migrating(|region| {
        let mut hog = Hog::new();
        for spare in [300, 200, 120] {
            hog.leave(spare);
            write_rounds(region, 20);
            hog.leave(PLENTY);
        }
    });
}

fn without_mappings_a_job_that_runs_out_of_them() {
    let (pools, region) = scene();
    stamp(&region, 0..BYTES, 1);
    leap(&region, 0..BYTES, &pools[1]);
    let mut hog = Hog::new();
    hog.leave(PLENTY);
    for round in 0..20 {
        let to = &pools[round % 2];
        let job = migration(&region, 0..BYTES, to).area_bytes(4096).threads(2).start().unwrap();
        hog.take_all();
        hog.leave(PLENTY);
        let report = job.wait();
        assert!(
            matches!(report.ended, Ended::Completed | Ended::Failed(Error::Call { .. })),
            "{report}"
        );
        check_stamp(&region, 0..BYTES, 1);
        leap(&region, 0..BYTES, to);
        audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
    }
}

/// A region of many pieces moves in parts: with its mappings joined as it goes, it needs fewer than
/// for all pieces at once.
fn without_mappings_many_pieces() {
    const PAGES: usize = 1200;
    const LEN: usize = PAGES * 4096;
    let [from, to] = pools(PageSize::Base, LEN as u64).unwrap();
    let beside = Pool::builder(nodes()[1], LEN as u64).build().unwrap();
    let all = [&from, &to, &beside];
    let region = Region::new(&from, LEN).unwrap();
    stamp(&region, 0..LEN, 1);
    for engine in engines() {
        // Every second page leaves.
        let pages = (0..PAGES).step_by(2).map(|page| page * 4096..(page + 1) * 4096);
        let job = pages.fold(Migration::new(), |job, page| job.range(&region, page, &beside));
        assert!(job.start().unwrap().wait().ended.is_completed());
        assert!(common::region_flags(&region).len() == 1, "attributes differ");
        let pieces = || common::pool_ranges().into_iter().filter(|range| in_region(&region, range));
        assert_eq!(pieces().count(), PAGES);
        let mut hog = Hog::new();
        // Each piece takes two at once.
        hog.leave(PAGES);
        let job = Migration::new().range(&region, 0..LEN, &to).engine(engine).threads(2);
        let report = job.start().unwrap().wait();
        drop(hog);
        assert!(report.ended.is_completed(), "{engine}: {report}");
        assert_eq!(
            (report.pages.migrated, report.counts.repairs),
            (PAGES as u64, 0),
            "{engine}: {report}"
        );
        assert!(surprises(&report).is_empty(), "{engine}: {report}");
        assert_eq!(pieces().count(), 1, "{engine}: mappings stay apart");
        check_stamp(&region, 0..LEN, 1);
        audit(&all, &[&region]).unwrap_or_else(|error| panic!("{engine}: {error}"));
        leap(&region, 0..LEN, &from);
    }
}

fn in_region(region: &Region, range: &Range<usize>) -> bool {
    let start = common::address(region);
    start <= range.start && range.end <= start + region.len()
}

fn without_mappings_more_guards_than_mappings() {
    const PAGES: usize = 1024;
    let pools = pools(PageSize::Base, (PAGES * 4096) as u64).unwrap();
    let region = Region::new(&pools[0], PAGES * 4096).unwrap();
    stamp(&region, 0..PAGES * 4096, 1);
    let mut hog = Hog::new();
    hog.leave(PLENTY);
    let before = observe::mapping_count().unwrap();
    let every_second = (0..PAGES).step_by(2);
    let guards: Vec<_> =
        every_second.map(|page| region.pin(page * 4096..page * 4096 + 1).unwrap()).collect();
    let job = || Migration::new().range(&region, 0..PAGES * 4096, &pools[1]);
    let report = job().pin_patience(Duration::from_millis(1)).start().unwrap().wait();
    assert!(matches!(report.ended, Ended::Failed(Error::Pinned { .. })), "{report}");
    assert!(report.warnings.iter().any(|w| w.kind == WarningKind::Guards), "{report}");
    let pages = &report.pages;
    assert!(pages.migrated > 0 && pages.busy > PAGES as u64 / 2 && pages.failed == 0, "{report}");
    let more = observe::mapping_count().unwrap() - before;
    assert!(more <= PLENTY / 2, "{more} mappings more than before");
    check_stamp(&region, 0..PAGES * 4096, 1);
    drop(guards);
    let report = job().start().unwrap().wait();
    assert!(report.ended.is_completed(), "{report}");
    check_stamp(&region, 0..PAGES * 4096, 1);
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
}

fn without_mappings_pools_and_regions() {
    let (pools, region) = scene();
    let mut hog = Hog::new();
    hog.take_all();
    assert!(Pool::builder(pools[0].nodes()[0], 4096).build().is_err());
    assert!(Region::new(&pools[1], 4096).is_err());
    assert_eq!(pools[1].free_bytes(), pools[1].bytes());
    drop(hog);
    let other = Region::new(&pools[1], 4096).unwrap();
    drop(Pool::builder(pools[0].nodes()[0], 4096).build().unwrap());
    audit(&[&pools[0], &pools[1]], &[&region, &other]).unwrap();
}

fn without_mappings_discard() {
    let (pools, mut region) = scene();
    stamp(&region, 0..BYTES, 1);
    let mut hog = Hog::new();
    hog.take_all();
    let discarded = region.discard(8192..16384);
    drop(hog);
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
    check_stamp(&region, 0..8192, 1);
    check_stamp(&region, 16384..BYTES, 1);
    if discarded.is_err() {
        check_stamp(&region, 0..BYTES, 1);
        region.discard(8192..16384).unwrap();
    }
    region.back(8192..16384, &pools[0]).unwrap();
    assert!(is_zero(&region, 8192..16384));
    drop(region);
    assert_eq!(pools[0].free_bytes(), pools[0].bytes(), "frames leaked");
}

/// Views are refused if their mappings would not fit, and calls on a region with views are whole.
fn without_mappings_views() {
    let (pools, mut region) = scene();
    let node = nodes()[0];
    stamp(&region, 0..BYTES, 1);
    let mut hog = Hog::new();
    hog.leave(3);
    let refused = region.replicate([node, node, node]).unwrap_err();
    assert!(refused.to_string().contains("max_map_count"), "{refused}");
    assert!(region.views().is_empty());
    drop(hog);
    region.replicate([node, node]).unwrap();
    let mut hog = Hog::new();
    hog.take_all();
    let discarded = region.discard(8192..16384);
    let backed = discarded.is_ok().then(|| region.back(8192..16384, &pools[0]));
    drop(hog);
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
    if backed.is_none_or(|backed| backed.is_err()) {
        let _ = region.discard(8192..16384);
        region.back(8192..16384, &pools[0]).unwrap();
    }
    for view in region.views() {
        let (words, all) = (view.atomics_u64(0..BYTES), region.atomics_u64(0..BYTES).unwrap());
        let same = words.unwrap().iter().zip(all).all(|(a, b)| a.load(Relaxed) == b.load(Relaxed));
        assert!(same, "{view:?}");
    }
    assert!(is_zero(&region, 8192..16384));
    check_stamp(&region, 16384..BYTES, 1);
    drop(region);
    let is_free = |pool: &Pool| pool.free_bytes() == pool.bytes();
    assert!(pools.iter().all(is_free), "frames leaked");
}
