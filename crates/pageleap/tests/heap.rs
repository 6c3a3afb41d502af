//! The heap of the process may lie in the region that moves. So the library must not touch the heap
//! between closing and opening an area.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use common::{address, pools};
use pageleap::{Migration, PageSize, Region};

/// An allocator that takes memory from the region while [`END`] is set, else from the system.
/// Memory of the region is never used again.
struct FromRegion;

/// The first byte of the region that has not been handed out.
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// The end of the region while memory is taken from it, else 0.
static END: AtomicUsize = AtomicUsize::new(0);
/// Where the region begins and ends, once it exists.
static START: AtomicUsize = AtomicUsize::new(0);
static END_EVER: AtomicUsize = AtomicUsize::new(0);

// SAFETY: pieces of the region are disjoint and aligned, because `NEXT` only grows, and stay mapped
// until the process ends. All other memory comes from the system's allocator and returns to it.
unsafe impl GlobalAlloc for FromRegion {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let end = END.load(Relaxed);
        let place = |next: usize| next.next_multiple_of(layout.align());
        let fits = |next| {
            (end != 0 && place(next) + layout.size() <= end).then(|| place(next) + layout.size())
        };
        match NEXT.fetch_update(Relaxed, Relaxed, fits) {
            Ok(next) => place(next) as *mut u8,
            // SAFETY: the caller's promise is forwarded.
            Err(_) => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn dealloc(&self, piece: *mut u8, layout: Layout) {
        let from_region = START.load(Relaxed) != 0
            && (START.load(Relaxed)..END_EVER.load(Relaxed)).contains(&(piece as usize));
        if !from_region {
            // SAFETY: the caller's promise is forwarded, and the system has allocated the piece.
            unsafe { System.dealloc(piece, layout) }
        }
    }
}

#[global_allocator]
static ALLOCATOR: FromRegion = FromRegion;

#[test]
fn the_heap_moves_while_the_job_uses_it() {
    const BYTES: usize = 32 << 20;
    const ROUNDS: usize = 6;
    /// Bytes of the heap that are used in each round, at least.
    const ENOUGH: usize = 64 << 10;
    let pools = pools(PageSize::Base, BYTES as u64).unwrap();
    // The region is never unmapped: the test harness may free memory of it long after this test.
    let region: &Region = Box::leak(Box::new(Region::new(&pools[0], BYTES).unwrap()));
    let start = address(region);
    NEXT.store(start, Relaxed);
    END_EVER.store(start + BYTES, Relaxed);
    START.store(start, Relaxed);
    for round in 0..ROUNDS {
        // Each round has its part: a slow job would otherwise use the whole region up, and the
        // rounds after it could not use enough.
        END.store(start + BYTES / ROUNDS * (round + 1), Relaxed);
        // Areas are tracked in the first three rounds of six, and held from the start in the
        // others.
        let migration = Migration::new()
            .range(region, 0..BYTES, &pools[(round + 1) % 2])
            .area_bytes(256 << 10)
            .max_disturbed_copies([3, 0][round / 3 % 2])
            .max_rounds([4, 0][round / 3 % 2])
            .pin_patience(Duration::from_secs(3600))
            .threads(1 + round % 2);
        // The job cannot end before this thread has used enough of the heap.
        let mut guard = Some(region.pin(BYTES - 1..BYTES).unwrap());
        let job = migration.start().unwrap();
        let before = NEXT.load(Relaxed);
        // This thread also uses the heap, and so disturbs copies.
        let mut numbers: Vec<Vec<usize>> = Vec::new();
        while !job.is_finished() {
            if NEXT.load(Relaxed) > before + ENOUGH {
                drop(guard.take());
            }
            numbers.push(vec![numbers.len(); 100]);
            if numbers.len() > 1000 {
                assert!(
                    numbers.iter().enumerate().all(|(i, v)| v.iter().all(|n| *n == i)),
                    "LOST a write"
                );
                numbers.clear();
            }
            std::thread::yield_now();
        }
        let report = job.wait();
        END.store(0, Relaxed);
        assert!(report.ended.is_completed(), "{report}");
    }
    assert!(NEXT.load(Relaxed) > start + ROUNDS * ENOUGH, "the heap did not lie in the region");
}
