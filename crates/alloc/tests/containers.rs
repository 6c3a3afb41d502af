//! Containers that leap while threads change them, and the use and reuse of their memory.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use allocator_api2::alloc::{Allocator, Layout};
use allocator_api2::boxed::Box;
use allocator_api2::vec::Vec;
use hashbrown::HashMap;
use pageleap::topology::Topology;
use pageleap::{NodeId, Pool, audit};
use pageleap_alloc::RegionAllocator;

const MB: usize = 1 << 20;

fn node() -> NodeId {
    Topology::read().unwrap().allowed_nodes()[0]
}

fn pool(bytes: usize) -> Pool {
    Pool::builder(node(), bytes as u64).build().unwrap()
}

/// Whether an object lies in the allocator's region.
fn is_inside<T: ?Sized>(memory: &RegionAllocator, place: *const T) -> bool {
    let all = memory.place();
    let start = all.cast::<u8>().as_ptr().addr();
    (start..start + all.len()).contains(&place.cast::<u8>().addr())
}

#[test]
fn containers_of_several_threads_leap_while_they_are_changed() {
    let (near, far) = (pool(96 * MB), pool(96 * MB));
    let memory = RegionAllocator::new(1024 * MB, [&near, &far]).unwrap();
    let (stop, ready) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let mut threads = std::vec::Vec::new();
        for thread in 0..2usize {
            let (memory, stop, ready) = (memory.clone(), &stop, &ready);
            threads.push(scope.spawn(move || {
                let mut map = HashMap::new_in(memory.clone());
                let mut lists: Vec<Vec<usize, _>, _> = Vec::new_in(memory.clone());
                let mut rounds = 0;
                while rounds < 20_000 || !stop.load(Relaxed) {
                    *map.entry(rounds % 5000)
                        .or_insert_with(|| Box::new_in(0usize, memory.clone()))
                        .as_mut() += 1;
                    if rounds % 64 == 0 {
                        lists.push(Vec::new_in(memory.clone()));
                    }
                    if let Some(list) = lists.last_mut() {
                        list.push(rounds ^ thread);
                    }
                    if lists.len() > 300 {
                        lists.truncate(10);
                        lists.shrink_to_fit();
                    }
                    rounds += 1;
                    if rounds == 1000 {
                        ready.fetch_add(1, Relaxed);
                    }
                }
                assert_eq!(map.values().map(|count| **count).sum::<usize>(), rounds);
                assert!(map.values().all(|count| is_inside(&memory, &raw const **count)));
                for list in &lists {
                    assert!(is_inside(&memory, list.as_ptr()));
                    assert!(list.windows(2).all(|pair| (pair[0] ^ thread) < pair[1] ^ thread));
                }
            }));
        }
        while ready.load(Relaxed) < 2 {
            assert!(!threads.iter().any(|thread| thread.is_finished()), "a thread has failed");
            std::thread::yield_now();
        }
        for round in 0..20 {
            let (to, other) = if round % 2 == 0 { (&far, &near) } else { (&near, &far) };
            memory.grow_from([to, other]);
            let report = memory.migration(to).start().unwrap().wait();
            assert!(report.ended.is_completed(), "{report}");
        }
        stop.store(true, Relaxed);
    });
    // SAFETY: `audit` only reads the region's books. It neither unmaps nor discards memory.
    audit(&[&near, &far], &[unsafe { memory.region() }]).unwrap();
    drop(memory);
    assert_eq!(near.free_bytes() + far.free_bytes(), 192 * MB as u64);
}

#[test]
fn freed_memory_is_reused_and_exhaustion_is_an_error() {
    let (small, other) = (pool(4 * MB), pool(8 * MB));
    let memory = RegionAllocator::new(64 * MB, [&small, &other]).unwrap();
    let layout = |bytes| Layout::from_size_align(bytes, 8).unwrap();
    let all_but_notes = 11 * MB;
    for _ in 0..20 {
        let mut places = std::vec::Vec::new();
        while let Ok(place) = memory.allocate(layout(MB / 2)) {
            places.push(place.cast::<u8>());
        }
        assert!(places.len() * MB / 2 >= all_but_notes, "{}", places.len());
        assert!(memory.allocate(layout(65 * MB)).is_err());
        for place in places {
            // SAFETY: the memory was allocated above with this layout, and nothing uses it.
            unsafe { memory.deallocate(place, layout(MB / 2)) };
        }
    }
    assert_eq!(memory.place().len(), 12 * MB, "nothing is lost between the rounds");
    let whole = memory.allocate(layout(all_but_notes)).unwrap();
    // SAFETY: each call gets the memory of the last one, with the layout of that memory.
    unsafe {
        let shrunk = memory.shrink(whole.cast(), layout(all_but_notes), layout(MB)).unwrap();
        assert_eq!(shrunk.cast::<u8>(), whole.cast());
        let grown = memory.grow(shrunk.cast(), layout(MB), layout(2 * MB)).unwrap();
        memory.deallocate(grown.cast(), layout(2 * MB));
    }
    for align in [1, 64, 4096, 1 << 16, 1 << 20] {
        let layout = Layout::from_size_align(100, align).unwrap();
        let place = memory.allocate(layout).unwrap();
        assert!(place.cast::<u8>().as_ptr().addr().is_multiple_of(align));
        // SAFETY: the memory was allocated above with this layout, and nothing uses it.
        unsafe { memory.deallocate(place.cast(), layout) };
    }
    assert_eq!(memory.allocate(Layout::new::<()>()).unwrap().len(), 0);
}

/// Freed memory is reused for large allocations too. When the region grows, free memory at its end
/// is part of the new allocation.
#[test]
fn allocations_of_all_sizes_find_freed_memory() {
    let layout = |bytes| Layout::from_size_align(bytes, 16).unwrap();
    let pool = pool(100 * MB);
    let memory = RegionAllocator::new(100 * MB, [&pool]).unwrap();
    for bytes in [85 * MB, 86 * MB, 89 * MB, 98 * MB] {
        let place = memory.allocate(layout(bytes)).unwrap();
        // SAFETY: the memory was allocated above with this layout, and nothing uses it.
        unsafe { memory.deallocate(place.cast(), layout(bytes)) };
    }
    assert!(memory.place().len() <= 100 * MB);
}

#[test]
fn no_pools_and_full_regions_are_errors() {
    let none: [&Pool; 0] = [];
    assert!(
        RegionAllocator::new(MB, none).unwrap_err().to_string().contains("pools: no pool is named")
    );
    let memory = RegionAllocator::new(MB, [&pool(4096)]).unwrap();
    assert_eq!(memory.place().len(), 0);
    assert!(memory.allocate(Layout::from_size_align(2 * MB, 8).unwrap()).is_err());
    memory.grow_from(none);
    assert!(memory.allocate(Layout::from_size_align(8, 8).unwrap()).is_err());
}
