//! The allocator of the process may live in the region that moves: nothing between closing and
//! opening an area may touch the heap.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use common::{address, pools};
use pageleap::{Migration, PageSize, Region};

/// Hands out memory of the region while there is one, and never takes it back.
struct FromRegion;

static NEXT: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);
static START: AtomicUsize = AtomicUsize::new(0);

// SAFETY: pieces of the region are disjoint, aligned and mapped for as long as the process lives;
// everything else is the system's.
unsafe impl GlobalAlloc for FromRegion {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let end = END.load(Relaxed);
        let place = |next: usize| next.next_multiple_of(layout.align());
        let fits = |next| {
            (end != 0 && place(next) + layout.size() <= end).then(|| place(next) + layout.size())
        };
        match NEXT.fetch_update(Relaxed, Relaxed, fits) {
            Ok(next) => place(next) as *mut u8,
            // SAFETY: forwarded to the caller.
            Err(_) => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn dealloc(&self, piece: *mut u8, layout: Layout) {
        let from_region = START.load(Relaxed) != 0
            && (START.load(Relaxed)..END_EVER.load(Relaxed)).contains(&(piece as usize));
        if !from_region {
            // SAFETY: forwarded to the caller; the piece is the system's.
            unsafe { System.dealloc(piece, layout) }
        }
    }
}

/// The end of the region, also when no more is taken from it.
static END_EVER: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: FromRegion = FromRegion;

#[test]
fn the_heap_moves_while_the_job_uses_it() {
    const BYTES: usize = 32 << 20;
    let pools = pools(PageSize::Base, BYTES as u64).unwrap();
    // The test harness may free what it allocated meanwhile long after this test: the region stays.
    let region: &Region = Box::leak(Box::new(Region::new(&pools[0], BYTES).unwrap()));
    let start = address(region);
    NEXT.store(start, Relaxed);
    END_EVER.store(start + BYTES, Relaxed);
    START.store(start, Relaxed);
    for round in 0..6 {
        END.store(start + BYTES, Relaxed);
        // Tracked first, and held from the start, in turns.
        let migration = Migration::new()
            .range(region, 0..BYTES, &pools[(round + 1) % 2])
            .area_bytes(256 << 10)
            .max_disturbed_copies([3, 0][round / 3])
            .threads(1 + round % 2);
        let job = migration.start().unwrap();
        // This thread uses the heap as well, and so disturbs copies.
        let mut numbers: Vec<Vec<usize>> = Vec::new();
        while !job.is_finished() {
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
    assert!(NEXT.load(Relaxed) > start + (64 << 10), "the heap did not lie in the region");
}
