//! What happens when the process runs out of descriptors, address space or mappings: clear errors,
//! nothing lost, and all is well when there are more.
//!
//! The limits hold for the whole process: each case runs in a child.

mod common;
#[path = "common/machine_settings.rs"]
mod machine_settings;
#[path = "common/moving.rs"]
mod moving;

use std::ptr;
use std::time::Duration;

use common::{check_stamp, in_lab, is_zero, leap, migration, pools, soon, stamp};
use machine_settings::MappingLimit;
use moving::{BYTES, FINE, cases, scene, while_migrating, write_rounds};
use pageleap::{Ended, Error, Migration, PageSize, Pool, Region, audit, observe};

fn set_file_limit(files: u64) {
    let limit = libc::rlimit { rlim_cur: files, rlim_max: 4096 };
    // SAFETY: reads one structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
}

#[test]
fn running_out_of_descriptors_loses_nothing() {
    cases(
        "running_out_of_descriptors_loses_nothing",
        &[
            (
                // Giving frames back opens no file where nothing has failed.
                "drops",
                || {
                    let (pools, region) = scene();
                    leap(&region, 0..BYTES, &pools[1]);
                    let job = migration(&region, 0..BYTES, &pools[0]).start().unwrap();
                    set_file_limit(3);
                    assert!(job.wait().ended.is_completed());
                    drop(region);
                    set_file_limit(4096);
                    assert_eq!(
                        (pools[0].free_bytes(), pools[1].free_bytes()),
                        (BYTES as u64, BYTES as u64)
                    );
                    let region = Region::new(&pools[1], BYTES).unwrap();
                    assert!(is_zero(&region, 0..BYTES));
                    leap(&region, 0..BYTES, &pools[0]);
                },
                FINE,
            ),
            (
                "files",
                || {
                    let (pools, region) = scene();
                    stamp(&region, 0..BYTES, 1);
                    leap(&region, 0..BYTES, &pools[1]);
                    leap(&region, 0..BYTES, &pools[0]);
                    // SAFETY: makes and closes a descriptor of its own: the first free number.
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
                            assert!(
                                text.contains("EMFILE") || text.contains("open files"),
                                "{text}"
                            );
                            assert!(
                                !error.is_usage() && !text.contains("mount "),
                                "the remedy does not help: {text}"
                            );
                        }
                        leap(&region, 0..BYTES, &pools[0]);
                        assert_eq!(
                            (pools[0].free_bytes(), pools[1].free_bytes()),
                            (0, BYTES as u64)
                        );
                        check_stamp(&region, 0..BYTES, 1);
                        audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
                    }
                    assert!(refusals > 0);
                },
                FINE,
            ),
        ],
    );
}

/// Sets RLIMIT_AS to what the process has, and `bytes` more or less; `None` lifts it.
fn limit_address_space(bytes: Option<i64>) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let kb: i64 = size.split_whitespace().next().unwrap().parse().unwrap();
    let rlim_cur = bytes.map_or(libc::RLIM_INFINITY, |bytes| (kb * 1024 + bytes) as u64);
    let limit = libc::rlimit { rlim_cur, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: reads one structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
}

#[test]
fn running_out_of_address_space_loses_nothing() {
    cases(
        "running_out_of_address_space_loses_nothing",
        &[
            (
                "a job",
                || {
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
                },
                FINE,
            ),
            (
                "memory for a region",
                || {
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
                },
                FINE,
            ),
            (
                // A call under way when the limit falls leaves a hole, which is filled once the
                // limit allows it; after that no area is attempted while the limit is exceeded.
                "a running job",
                || {
                    const LONG: usize = 64 << 20;
                    let [near, far] = common::pools(PageSize::Base, LONG as u64).unwrap();
                    let region = Region::new(&near, LONG).unwrap();
                    stamp(&region, 0..LONG, 1);
                    let job = migration(&region, 0..LONG, &far).area_bytes(4096).start().unwrap();
                    assert!(soon(|| job.progress().bytes_migrated > 0));
                    limit_address_space(Some(-(8 << 20)));
                    std::thread::sleep(std::time::Duration::from_millis(100));
                    limit_address_space(None);
                    let report = job.wait();
                    let ended = matches!(
                        report.ended,
                        Ended::Failed(Error::Call { .. }) | Ended::Completed
                    );
                    assert!(
                        ended && report.pages.busy + report.pages.not_attempted == 0,
                        "{report}"
                    );
                    check_stamp(&region, 0..LONG, 1);
                    audit(&[&near, &far], &[&region]).unwrap();
                    leap(&region, 0..LONG, &far);
                    check_stamp(&region, 0..LONG, 1);
                },
                FINE,
            ),
        ],
    );
}

/// Takes mappings until `spare` are left. One large mapping of which every other page has another
/// protection.
struct Hog {
    /// The limit that was there before, if this machine is ours to change.
    _limit: Option<MappingLimit>,
    start: usize,
    pages: usize,
    taken: usize,
}

/// More mappings than anything here takes.
const PLENTY: usize = 4000;

impl Hog {
    fn new() -> Hog {
        // To reach the usual limit takes half a minute where every instruction is emulated.
        let limit = in_lab().then(|| MappingLimit::lower_to(16384));
        let pages = observe::max_mapping_count().unwrap() + 16;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping.
        let start =
            unsafe { libc::mmap(ptr::null_mut(), pages * 4096, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        Hog { _limit: limit, start: start as usize, pages, taken: 0 }
    }

    fn protect(&self, page: usize, prot: i32) -> bool {
        // SAFETY: a page of our own mapping, which nobody uses.
        unsafe { libc::mprotect((self.start + page * 4096) as *mut libc::c_void, 4096, prot) == 0 }
    }

    fn take(&mut self, pages: usize) {
        let end = (self.taken + pages).min(self.pages / 2);
        while self.taken < end && self.protect(2 * self.taken + 1, libc::PROT_READ) {
            self.taken += 1;
        }
    }

    /// Takes all that are left.
    fn take_all(&mut self) {
        self.take(self.pages);
    }

    /// Takes or gives back until about `spare` are left: never more than that is taken, not even
    /// for an instant.
    fn leave(&mut self, spare: usize) {
        let room =
            observe::max_mapping_count().unwrap().saturating_sub(observe::mapping_count().unwrap());
        // Each page whose access changes cuts one mapping into three.
        self.take(room.saturating_sub(spare) / 2);
        for _ in 0..spare.saturating_sub(room).div_ceil(2) {
            self.taken -= 1;
            assert!(self.protect(2 * self.taken + 1, libc::PROT_NONE));
        }
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        unsafe { libc::munmap(self.start as *mut libc::c_void, self.pages * 4096) };
    }
}

#[test]
fn running_out_of_mappings_loses_nothing() {
    cases(
        "running_out_of_mappings_loses_nothing",
        &[
            (
                "a job",
                || {
                    let (pools, region) = scene();
                    stamp(&region, 0..BYTES, 1);
                    leap(&region, 0..BYTES, &pools[1]);
                    let mut hog = Hog::new();
                    hog.take_all();
                    let Err(error) = migration(&region, 0..BYTES, &pools[0]).start().map(drop)
                    else {
                        panic!("not refused")
                    };
                    let text = error.to_string();
                    assert!(text.contains("max_map_count"), "{text}");
                    assert_eq!((pools[0].free_bytes(), pools[1].free_bytes()), (BYTES as u64, 0));
                    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
                    drop(hog);
                    leap(&region, 0..BYTES, &pools[0]);
                    check_stamp(&region, 0..BYTES, 1);
                },
                FINE,
            ),
            (
                "a running job",
                || {
                    while_migrating(|region| {
                        let mut hog = Hog::new();
                        for spare in [300, 200, 120] {
                            hog.leave(spare);
                            write_rounds(region, 20);
                            hog.leave(PLENTY);
                        }
                    });
                },
                FINE,
            ),
            (
                "a job that runs out of them",
                || {
                    let (pools, region) = scene();
                    stamp(&region, 0..BYTES, 1);
                    leap(&region, 0..BYTES, &pools[1]);
                    let mut hog = Hog::new();
                    hog.leave(PLENTY);
                    for round in 0..20 {
                        let to = &pools[round % 2];
                        let job = migration(&region, 0..BYTES, to)
                            .area_bytes(4096)
                            .threads(2)
                            .start()
                            .unwrap();
                        hog.take_all();
                        hog.leave(PLENTY);
                        let report = job.wait();
                        assert!(
                            matches!(
                                report.ended,
                                Ended::Completed | Ended::Failed(Error::Call { .. })
                            ),
                            "{report}"
                        );
                        check_stamp(&region, 0..BYTES, 1);
                        leap(&region, 0..BYTES, to);
                        audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
                    }
                },
                FINE,
            ),
            (
                "more guards than mappings",
                || {
                    const PAGES: usize = 1024;
                    let pools = pools(PageSize::Base, (PAGES * 4096) as u64).unwrap();
                    let region = Region::new(&pools[0], PAGES * 4096).unwrap();
                    stamp(&region, 0..PAGES * 4096, 1);
                    let mut hog = Hog::new();
                    hog.leave(PLENTY);
                    let before = observe::mapping_count().unwrap();
                    let every_second = (0..PAGES).step_by(2);
                    let guards: Vec<_> = every_second
                        .map(|page| region.pin(page * 4096..page * 4096 + 1).unwrap())
                        .collect();
                    let job = || Migration::new().range(&region, 0..PAGES * 4096, &pools[1]);
                    let report =
                        job().pin_patience(Duration::from_millis(1)).start().unwrap().wait();
                    assert!(
                        matches!(report.ended, Ended::Failed(Error::Pinned { .. })),
                        "{report}"
                    );
                    assert!(
                        report.warnings.iter().any(|w| w.contains("max_map_count")),
                        "{report}"
                    );
                    let pages = &report.pages;
                    assert!(
                        pages.migrated > 0 && pages.busy > PAGES as u64 / 2 && pages.failed == 0,
                        "{report}"
                    );
                    let more = observe::mapping_count().unwrap() - before;
                    assert!(more <= PLENTY / 2, "{more} mappings more than before");
                    check_stamp(&region, 0..PAGES * 4096, 1);
                    drop(guards);
                    let report = job().start().unwrap().wait();
                    assert!(report.ended.is_completed(), "{report}");
                    check_stamp(&region, 0..PAGES * 4096, 1);
                    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
                },
                FINE,
            ),
            (
                "pools and regions",
                || {
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
                },
                FINE,
            ),
            (
                "discard",
                || {
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
                },
                FINE,
            ),
        ],
    );
}
