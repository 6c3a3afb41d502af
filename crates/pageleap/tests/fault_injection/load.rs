//! A writer and a reader on a region whose jobs fail, and words that the test itself writes.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use pageleap::Region;

use crate::common::StopOnDrop;

/// Words of each page that belong to the writer. The others belong to the test.
const WRITTEN: usize = 64;

/// Runs `body` while one thread writes rising values to each page of the region, and another checks
/// that no word falls back. At the end every word must have its last value.
pub fn with_load<T>(region: &Region, body: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    let ready = Barrier::new(3);
    let stride = region.page_size().bytes() / 8;
    let words = region.atomics_u64(0..region.len()).unwrap();
    let word = |i: usize| &words[i / WRITTEN * stride + i % WRITTEN];
    let count = words.len() / stride * WRITTEN;
    (0..count).for_each(|i| word(i).store(0, Relaxed));
    std::thread::scope(|scope| {
        let stop_guard = StopOnDrop(&stop);
        let writer = scope.spawn(|| {
            let mut last = vec![0; count];
            let mut value = 0;
            ready.wait();
            while !stop.load(Relaxed) {
                for page in 0..words.len() / stride {
                    value += 1;
                    let i = page * WRITTEN + value as usize % WRITTEN;
                    word(i).store(value, Relaxed);
                    last[i] = value;
                }
            }
            last
        });
        scope.spawn(|| {
            let mut seen = vec![0; count];
            ready.wait();
            while !stop.load(Relaxed) {
                for (i, seen) in seen.iter_mut().enumerate() {
                    let value = word(i).load(Relaxed);
                    assert!(value >= *seen, "LOST: word {i} fell from {seen} to {value}");
                    *seen = value;
                }
            }
        });
        ready.wait();
        let result = body();
        drop(stop_guard);
        let last = writer.join().unwrap();
        for (i, value) in last.into_iter().enumerate().filter(|(_, value)| *value > 0) {
            assert_eq!(word(i).load(Relaxed), value, "LOST: word {i}");
        }
        result
    })
}

/// Writes a value to some of the test's words in each page.
pub fn touch_all(region: &Region, value: u64) {
    let words = region.atomics_u64(0..region.len()).unwrap();
    for page in words.chunks(region.page_size().bytes() / 8) {
        page[WRITTEN..].iter().step_by(97).for_each(|word| word.store(value, Relaxed));
    }
}

/// Checks what [`touch_all`] has written.
pub fn check_all(region: &Region, value: u64, what: &str) {
    let words = region.atomics_u64(0..region.len()).unwrap();
    for (i, page) in words.chunks(region.page_size().bytes() / 8).enumerate() {
        let lost =
            page[WRITTEN..].iter().step_by(97).filter(|word| word.load(Relaxed) != value).count();
        assert_eq!(lost, 0, "{what}: LOST {lost} words of page {i}");
    }
}
