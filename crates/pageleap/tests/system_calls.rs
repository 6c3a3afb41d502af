//! System calls that read or write a region while it leaps by the engine `precopy`: no call fails,
//! and nothing that a call writes is lost.
//!
//! Calls that pin pages (`process_vm_writev`, O_DIRECT, registered buffers) are tested in
//! `pins.rs`: the contract forbids them in a moving area.

#[path = "common/calls.rs"]
mod calls;
mod common;
#[path = "common/moving.rs"]
mod moving;

use std::io;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use calls::{Ends, READING, WRITING};
use common::{can_follow, pools, skip, turn};
use pageleap::{Engine, Migration, PageSize, Region};

const BYTES: usize = 4 << 20;
/// Bytes of each call: several pages, and a part of one.
const CHUNK: usize = 20 << 10 | 123;

/// How often each call is made.
fn rounds() -> usize {
    130 * common::stress_seconds() as usize
}

/// Leaps by `precopy`, in areas of all sizes, while `body` runs. `body` gets the region's bytes,
/// and a function that waits until all pages have leapt once more.
fn while_leaping(body: impl FnOnce(&[AtomicU8], &dyn Fn())) {
    let pools = pools(PageSize::Base, BYTES as u64).unwrap();
    let region = Region::new(&pools[0], BYTES).unwrap();
    // SAFETY: all accesses to the region have this size.
    let bytes = unsafe { region.atomics_u8(0..BYTES) }.unwrap();
    let leap = |number: usize| {
        let job = Migration::new()
            .range(&region, 0..BYTES, &pools[(number + 1) % 2])
            .engine(Engine::Precopy)
            .area_bytes(4096 << (number % 10));
        let report = job.start().unwrap().wait();
        assert!(report.ended.is_completed() && report.warnings.is_empty(), "{report}");
        assert_eq!(report.engine, Engine::Precopy);
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
    if !can_follow() {
        return skip(NAME, &"the engine precopy does not work here");
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
    if !can_follow() {
        return skip(NAME, &"the engine precopy does not work here");
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
    if !can_follow() {
        return skip(NAME, &"the engine precopy does not work here");
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
