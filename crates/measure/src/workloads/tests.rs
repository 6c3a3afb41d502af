use std::sync::atomic::AtomicU64;
use std::time::Duration;

use super::{Control, Count, Done, Structure, Workload, load, store};
use crate::phase::{Phase, Stage};

/// Memory of an odd size, with old contents.
fn memory() -> Vec<AtomicU64> {
    (0..150_001).map(|at| AtomicU64::new(at ^ 0x55)).collect()
}

/// Lets threads work until each has done some operations, and joins their results.
fn work(structure: &dyn Structure, words: &[AtomicU64], threads: usize) -> (u64, Vec<Done>) {
    let (stage, counts) = (Stage::new(), [(); 4].map(|()| Count::default()));
    stage.enter(Phase::During);
    let all: Vec<Done> = std::thread::scope(|scope| {
        let start = |nth: usize| {
            let control = Control { stage: &stage, count: &counts[nth] };
            scope.spawn(move || structure.work(words, nth, 7, &control))
        };
        let all: Vec<_> = (0..threads).map(start).collect();
        let done = |count: &Count| count.0.load(std::sync::atomic::Ordering::Relaxed);
        while counts[..threads].iter().any(|count| done(count) < 2000) {
            std::thread::sleep(Duration::from_millis(1));
        }
        stage.stop();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    (all.iter().map(|done| done.wrong).sum(), all)
}

#[test]
fn all_answers_are_right_and_times_are_sampled() {
    for workload in Workload::ALL {
        for threads in [1, 3] {
            let words = memory();
            let structure = workload.build(&words, threads);
            for _ in 0..2 {
                let (wrong, all) = work(&*structure, &words, threads);
                assert_eq!(wrong, 0, "{workload:?}");
                assert!(all.iter().all(|done| done.times.count(Phase::During) > 0));
                assert_eq!(structure.wrong_words(&words), 0, "{workload:?}");
            }
        }
    }
}

#[test]
fn a_mapping_with_other_contents_gives_wrong_answers() {
    for workload in [Workload::Join, Workload::XsBench, Workload::Btree] {
        let words = memory();
        let structure = workload.build(&words, 1);
        // The last bit of the upper half of the words: values and cross sections among them.
        for place in words.len() / 2..words.len() {
            let bit = if workload == Workload::XsBench { 1 << 48 } else { 1 };
            store(&words, place, load(&words, place) ^ bit);
        }
        assert!(work(&*structure, &words, 1).0 > 0, "{workload:?}");
    }
}

#[test]
fn a_lost_update_is_seen() {
    let words = memory();
    let gups = Workload::Gups.build(&words, 2);
    assert_eq!(work(&*gups, &words, 2).0, 0);
    store(&words, 5, load(&words, 5) ^ 0x10);
    assert_eq!(gups.wrong_words(&words), 1);
}

#[test]
#[should_panic(expected = "needs 1048576 bytes")]
fn too_little_memory_is_refused() {
    let words: Vec<AtomicU64> = (0..1 << 16).map(AtomicU64::new).collect();
    Workload::Gups.build(&words, 1);
}
