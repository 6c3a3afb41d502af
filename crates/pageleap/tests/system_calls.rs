//! System calls that read or write a region while it leaps by engines that raise no signal: no call
//! fails, and nothing that a call writes is lost.
//!
//! Calls that pin pages (`process_vm_writev`, O_DIRECT, registered buffers) are tested in
//! `pins.rs`: the contract forbids them in a moving area.

#[path = "common/calls.rs"]
mod calls;
mod common;
#[path = "common/moving.rs"]
mod moving;
#[path = "common/refusing.rs"]
mod refusing;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::thread;

use calls::{Ends, READING, WRITING};
use common::{PAGE_SIZES, address, nodes, pools, skip, skip_page_size, turn, works, works_for};
use pageleap::backend::{Advice, Call, Linux};
use pageleap::{Engine, Migration, PageSize, Pool, Region};
use refusing::{Refusing, Request};

const BYTES: usize = 4 << 20;
/// Bytes of each call: several pages, and a part of one.
const CHUNK: usize = 20 << 10 | 123;

/// How often each call is made.
fn rounds() -> usize {
    130 * common::stress_seconds() as usize
}

/// The engines that work here and promise that no system call fails.
fn engines() -> Vec<Engine> {
    let promises = |engine: &Engine| !engine.signals() && works((*engine).into());
    Engine::ALL.into_iter().filter(promises).collect()
}

/// Leaps by each of [`engines`] in turn, in areas of all sizes, while `body` runs. `body` gets the
/// region's bytes, and a function that waits until all pages have leapt once more.
fn while_leaping(body: impl FnOnce(&[AtomicU8], &dyn Fn())) {
    while_pools_leap(&pools(PageSize::Base, BYTES as u64).unwrap(), &engines(), body);
}

fn while_pools_leap(
    pools: &[Pool; 2],
    engines: &[Engine],
    body: impl FnOnce(&[AtomicU8], &dyn Fn()),
) {
    let region = Region::new(&pools[0], BYTES).unwrap();
    // SAFETY: all accesses to the region have this size.
    let bytes = unsafe { region.atomics_u8(0..BYTES) }.unwrap();
    let leap = |number: usize| {
        let engine = engines[number % engines.len()];
        let job = Migration::new()
            .range(&region, 0..BYTES, &pools[(number + 1) % 2])
            .engine(engine)
            .area_bytes(pools[0].page_size().bytes().max(4096 << (number / engines.len() % 10)));
        let report = job.start().unwrap().wait();
        assert!(report.ended.is_completed() && report.warnings.is_empty(), "{report}");
        assert_eq!(report.engine, engine);
    };
    moving::while_leaping(leap, |leap_again| body(bytes, leap_again));
}

/// Makes a call [`rounds`] times, with other data at another place each time. `call` and `check`
/// get the data and the place.
fn make(
    test: &str,
    (name, by_ring): (&str, bool),
    ends: &mut Ends,
    call: impl Fn(&mut Ends, &[u8], &[AtomicU8]) -> io::Result<usize>,
    check: impl Fn(&mut Ends, &[u8], &[AtomicU8]),
) {
    if by_ring && ends.ring.is_none() {
        return skip(&format!("{test} ({name})"), &"io_uring is refused");
    }
    while_leaping(|region, leap_again| {
        let mut shadow = vec![0u8; BYTES];
        for round in 1..=rounds() {
            let data: Vec<u8> = (0..CHUNK).map(|i| (i * 31 + round * 7) as u8).collect();
            let at = round * 4711 * 13 % (BYTES - CHUNK);
            let bytes = &region[at..at + CHUNK];
            let done = call(ends, &data, bytes);
            assert!(matches!(done, Ok(CHUNK)), "{name} in round {round}: {done:?}");
            check(ends, &data, bytes);
            shadow[at..at + CHUNK].copy_from_slice(&data);
        }
        // Old frames keep their contents until the leap is over. So a loss may show only later.
        leap_again();
        check_shadow(region, &shadow, name);
    });
}

fn check_shadow(region: &[AtomicU8], shadow: &[u8], what: &str) {
    let lost =
        region.iter().zip(shadow).filter(|(byte, value)| byte.load(Relaxed) != **value).count();
    assert_eq!(lost, 0, "LOST {lost} bytes after {what}");
}

#[test]
fn what_the_kernel_writes_into_a_leaping_region_is_kept() {
    const NAME: &str = "what_the_kernel_writes_into_a_leaping_region_is_kept";
    let _turn = turn();
    if engines().is_empty() {
        return skip(NAME, &"no engine that raises no signal works here");
    }
    let mut ends = Ends::new();
    for writing in &WRITING {
        let call = |ends: &mut Ends, data: &[u8], bytes: &[AtomicU8]| {
            (writing.feed)(ends, data);
            (writing.take)(ends, bytes[0].as_ptr(), CHUNK, 0)
        };
        make(NAME, (writing.name, writing.by_ring), &mut ends, call, |_, data, bytes| {
            let lost = bytes
                .iter()
                .zip(data)
                .filter(|(byte, value)| byte.load(Relaxed) != **value)
                .count();
            assert_eq!(lost, 0, "LOST {lost} bytes of {}", writing.name);
        });
    }
}

#[test]
fn the_kernel_reads_from_a_leaping_region_what_is_there() {
    const NAME: &str = "the_kernel_reads_from_a_leaping_region_what_is_there";
    let _turn = turn();
    if engines().is_empty() {
        return skip(NAME, &"no engine that raises no signal works here");
    }
    let mut ends = Ends::new();
    for reading in &READING {
        let call = |ends: &mut Ends, data: &[u8], bytes: &[AtomicU8]| {
            bytes.iter().zip(data).for_each(|(byte, value)| byte.store(*value, Relaxed));
            (reading.take)(ends, bytes[0].as_ptr(), CHUNK)
        };
        make(NAME, (reading.name, reading.by_ring), &mut ends, call, |ends, data, _| {
            assert!(ends.contents() == data, "{} has read something else", reading.name);
        });
    }
}

/// The kernel may drop page table entries at any time, for example to swap. What it knows of writes
/// to those pages is lost with them.
#[test]
fn entries_that_are_dropped_under_writers_lose_nothing() {
    const NAME: &str = "entries_that_are_dropped_under_writers_lose_nothing";
    let _turn = turn();
    if engines().is_empty() {
        return skip(NAME, &"no engine that raises no signal works here");
    }
    while_leaping(|region, leap_again| {
        let mut shadow = vec![0u8; BYTES];
        for round in 1..=20 * rounds() {
            let at = (round * 4711 * 17 % (BYTES - 4096)) & !4095;
            let (byte, value) = (&region[at + round % 4096], round as u8);
            byte.store(value, Relaxed);
            shadow[at + round % 4096] = value;
            let first = at & !((64 << 10) - 1);
            // SAFETY: the call drops page table entries of a shared mapping. The bytes stay in the
            // file.
            let dropped = unsafe {
                libc::madvise(region[first].as_ptr().cast(), 64 << 10, libc::MADV_DONTNEED)
            };
            assert_eq!(dropped, 0, "{}", std::io::Error::last_os_error());
            assert_eq!(byte.load(Relaxed), value, "LOST a write");
        }
        leap_again();
        check_shadow(region, &shadow, "stores");
    });
}

/// The kernel may put a huge entry into a range whose page tables have been taken away. A store
/// through that entry would go to a frame that the page is about to leave.
#[test]
fn pages_that_are_collapsed_under_writers_lose_nothing() {
    const NAME: &str = "pages_that_are_collapsed_under_writers_lose_nothing";
    let _turn = turn();
    let pools = match pools(PageSize::Thp, BYTES as u64) {
        Ok(pools) => pools,
        Err(error) => return skip_page_size(NAME, PageSize::Thp, error),
    };
    // Each alone: how many of its windows a call meets depends on how long they are.
    for engine in engines() {
        while_pools_leap(&pools, &[engine], |region, leap_again| {
            collapse_and_store(engine, region, leap_again);
        });
    }
    if engines().is_empty() {
        skip(NAME, &"no engine that raises no signal works here");
    }
}

/// Collapses huge pages and stores to them while they leap. One thread does both: in a window it
/// does not touch a page before the call that may have made an entry for it.
fn collapse_and_store(engine: Engine, region: &[AtomicU8], leap_again: &dyn Fn()) {
    let bytes = || region.iter().step_by(64 << 10);
    let mut value = 0u8;
    for _ in 0..20 * common::stress_seconds() {
        for _ in 0..500 {
            // Where the kernel refuses it, nothing can be lost by it. SAFETY: the call changes no
            // contents.
            unsafe { libc::madvise(region[0].as_ptr().cast(), BYTES, libc::MADV_COLLAPSE) };
            // A store to a frame that the page leaves is missing when the page has left it.
            let lost = bytes().filter(|byte| byte.load(Relaxed) != value).count();
            assert_eq!(lost, 0, "{engine}: LOST a write");
            value = value.wrapping_add(1);
            bytes().for_each(|byte| byte.store(value, Relaxed));
        }
        leap_again();
    }
}

/// A write by way of `/proc/PID/mem` or `ptrace(2)` looks a page up, and stores to it afterwards,
/// under the lock of the address space. A call that takes this lock for reading does not wait for
/// the store. So a call that takes it for writing must come between the call that ends stores to a
/// page and the copy of the page. (A test that waits for such a store to meet a copy would depend on
/// interrupts, so this one judges the order of calls.)
#[test]
fn writes_from_outside_end_before_a_copy_begins() {
    const NAME: &str = "writes_from_outside_end_before_a_copy_begins";
    const PAGES: usize = 16;
    let _turn = turn();
    for (page, engine) in PAGE_SIZES.into_iter().flat_map(|page| Engine::ALL.map(|e| (page, e))) {
        if !works_for(engine.into(), page) {
            continue;
        }
        let region_at: Arc<[AtomicUsize; 2]> = Arc::default();
        let counts: Arc<[AtomicUsize; 3]> = Arc::default();
        let (at, counted) = (region_at.clone(), counts.clone());
        // The last call that took the lock for writing, and whether a later one has ended stores.
        let (is_registered, ends_stores) =
            (AtomicBool::new(false), Arc::new(AtomicBool::new(false)));
        let outwaits = ends_stores.clone();
        let rule = move |request: &Request| {
            if !(at[0].load(SeqCst)..at[1].load(SeqCst)).contains(&request.addr) {
                return None;
            }
            match (request.call, request.advice) {
                (Call::Track | Call::Exchange | Call::Protect | Call::Map, _) => {
                    is_registered.store(request.call == Call::Track, SeqCst);
                    outwaits.store(false, SeqCst);
                }
                // Of an area that is protected by `mprotect` it is looked at only.
                (Call::Scan, _) if !is_registered.load(SeqCst) => {}
                (Call::Scan | Call::MarkClean, _) | (_, Some(Advice::DropTables)) => {
                    counted[0].fetch_add(1, SeqCst);
                    outwaits.store(true, SeqCst);
                }
                _ => {}
            }
            None
        };
        let counted = counts.clone();
        let backend = Refusing::new(Arc::new(Linux), rule).before_copy(move |_| {
            counted[1].fetch_add(1, SeqCst);
            counted[2].fetch_add(usize::from(ends_stores.load(SeqCst)), SeqCst);
        });
        let (backend, bytes) = (Arc::new(backend), PAGES * page.bytes());
        let build = |node| {
            let pool = Pool::builder(node, bytes as u64).page_size(page);
            pool.backend(backend.clone()).build()
        };
        let pools = match nodes().map(build) {
            [Ok(near), Ok(far)] => [near, far],
            [Err(error), _] | [_, Err(error)] => {
                skip_page_size(NAME, page, error);
                continue;
            }
        };
        let region = Region::new(&pools[0], bytes).unwrap();
        // SAFETY: all accesses to the region have this size.
        let words = unsafe { region.atomics_u8(0..bytes) }.unwrap();
        region_at[1].store(address(&region) + bytes, SeqCst);
        region_at[0].store(address(&region), SeqCst);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    words.iter().step_by(4096).for_each(|word| _ = word.fetch_add(1, Relaxed));
                }
            });
            let leap = |round: usize| {
                let job = Migration::new().range(&region, 0..bytes, &pools[(round + 1) % 2]);
                job.engine(engine).area_bytes(4 * page.bytes()).threads(1).start().unwrap().wait()
            };
            let reports: Vec<_> = (0..20).map(leap).collect();
            is_over.store(true, Relaxed);
            for report in reports {
                assert!(report.ended.is_completed(), "{page}, {engine}: {report}");
            }
        });
        let [ending, copies, too_early] = [0, 1, 2].map(|which| counts[which].load(SeqCst));
        assert!(copies > 0, "{page}, {engine}");
        assert_eq!(too_early, 0, "{page}, {engine}: of {copies} copies after {ending} calls");
        // `mprotect`, and the exchange by which `stop-copy` closes, need no further call.
        let needs_one =
            engine != Engine::Mprotect && (engine != Engine::StopCopy || page.is_hugetlb());
        assert_eq!(ending > 0, needs_one, "{page}, {engine}");
    }
}
