use std::sync::atomic::{AtomicU64, Ordering};

use pageleap::topology::Topology;

use super::*;

/// Notes the steps, and stops after some.
struct Steps {
    seen: Vec<String>,
    stop_after: usize,
}

impl Watch for Steps {
    fn step(&mut self, what: String) {
        self.seen.push(what);
    }

    fn is_stopped(&self) -> bool {
        self.seen.len() > self.stop_after
    }
}

fn measure(cpus: usize, stop_after: usize) -> (Option<Pair>, Vec<String>) {
    let topology = Topology::read().unwrap();
    let node = topology.nodes().iter().find(|node| node.total_bytes > 0).unwrap().id;
    let cpus: Vec<usize> = topology.allowed_cpus().into_iter().take(cpus).collect();
    let plan = Plan { runs: 1, buffer_bytes: 4 << 20 };
    let injectors = cpus[1..].to_vec();
    let from = Initiator { node, cpus, injectors, has_memory: true };
    let mut steps = Steps { seen: Vec::new(), stop_after };
    let pair = Pair::measure(&from, node, plan, &mut steps).unwrap();
    (pair, steps.seen)
}

#[test]
fn a_pair_has_all_figures() {
    let (pair, seen) = measure(2, usize::MAX);
    let pair = pair.unwrap();
    let cpus = pair.injectors + 1;
    assert!(seen.len() <= steps(cpus), "{seen:?}");
    assert!(pair.idle_ns(PageSize::Base, Order::Blocks).unwrap().median > 0.0);
    for (_, lay) in &pair.lay {
        assert!(lay.pages > 0 && lay.bytes >= 4 << 20);
    }
    for kind in Kind::ALL {
        let most = pair.most(kind).unwrap();
        assert_eq!(most.threads, cpus);
        assert!(most.bytes_per_s.min > 0.0 && most.bytes_per_s.min <= most.bytes_per_s.max);
    }
    match cpus {
        1 => assert!(pair.loaded.is_empty() && !pair.left_out.is_empty()),
        _ => assert_eq!(pair.loaded.len(), SHARES.len()),
    }
}

#[test]
fn one_core_measures_no_latency_under_load() {
    let (pair, _) = measure(1, usize::MAX);
    let pair = pair.unwrap();
    assert!(pair.loaded.is_empty() && pair.left_out.iter().any(|line| line.contains("one core")));
}

#[test]
fn a_measurement_ends_at_any_step() {
    let (_, all) = measure(2, usize::MAX);
    for stop_after in [0, 1, all.len() / 2, all.len() - 1] {
        let (pair, seen) = measure(2, stop_after);
        assert!(pair.is_none() && seen == all[..=stop_after], "{seen:?}");
    }
}

#[test]
fn threads_keep_the_pace_that_was_asked_for() {
    let words: Vec<AtomicU64> = (0..1 << 16).map(|_| Default::default()).collect();
    let cpus = Topology::read().unwrap().allowed_cpus();
    for kind in Kind::ALL {
        let rate = 10e6;
        let slow = Traffic { kind, cpus: &cpus[..1], rate: Some(rate) };
        let seen = slow.bandwidth(&words).unwrap();
        // A step of 16 KB more or less, of 1 MB in all.
        assert!(seen.bytes_per_s > 0.0 && seen.bytes_per_s < 1.2 * rate, "{kind}: {seen:?}");
    }
}

#[test]
fn a_cpu_that_is_not_there_is_an_error() {
    let words: Vec<AtomicU64> = (0..1 << 16).map(|_| Default::default()).collect();
    let traffic = Traffic { kind: Kind::Read, cpus: &[8000], rate: None };
    let error = traffic.bandwidth(&words).unwrap_err().to_string();
    assert!(error.starts_with("no thread can be bound to CPU 8000"), "{error}");
}

#[test]
fn interference_ends_with_work_that_panics() {
    let words: Vec<AtomicU64> = (0..1 << 16).map(|_| Default::default()).collect();
    let cpus = Topology::read().unwrap().allowed_cpus();
    let traffic = Traffic { kind: Kind::Read, cpus: &cpus[..1], rate: None };
    // Threads that went on would keep this test from ending.
    let panicked = std::panic::catch_unwind(|| {
        let flow = traffic.beside(&words, || std::panic::resume_unwind(Box::new("work")));
        flow.map(|((), _)| ())
    });
    assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"work"));
}

#[test]
fn more_threads_than_a_small_buffer_has_parts_get_a_larger_one() {
    let topology = Topology::read().unwrap();
    let node = topology.nodes().iter().find(|node| node.total_bytes > 0).unwrap().id;
    let cpus = vec![topology.allowed_cpus()[0]; 65];
    let from = Initiator { node, cpus, injectors: Vec::new(), has_memory: true };
    let plan = Plan { runs: 1, buffer_bytes: 2 << 20 };
    // Up to the bandwidth of two threads.
    let mut steps = Steps { seen: Vec::new(), stop_after: 3 };
    assert!(Pair::measure(&from, node, plan, &mut steps).unwrap().is_none());
    let mut lay = None;
    for page in PAGES {
        lay = lay.or_else(|| Buffers::new(&from, node, page, 18 << 20, true).ok());
    }
    let words = lay.unwrap();
    let all = Traffic { kind: Kind::Copy, cpus: &from.cpus, rate: None };
    assert!(all.bandwidth(words.traffic().unwrap()).unwrap().bytes_per_s > 0.0);
}

#[test]
fn copies_fill_the_second_half() {
    let words: Vec<AtomicU64> = (0..1 << 16).map(|nth| AtomicU64::new(nth % (1 << 15))).collect();
    words[1 << 15..].iter().for_each(|word| word.store(0, Ordering::Relaxed));
    let cpus = Topology::read().unwrap().allowed_cpus();
    Traffic { kind: Kind::Copy, cpus: &cpus[..1], rate: None }.bandwidth(&words).unwrap();
    let all = words
        .iter()
        .zip(0..)
        .all(|(word, nth): (_, u64)| word.load(Ordering::Relaxed) == nth % (1 << 15));
    assert!(all);
}

#[test]
fn buffers_exceed_the_caches() {
    assert_eq!(buffer_bytes(None), UNKNOWN_BYTES);
    assert_eq!(buffer_bytes(Some(1 << 20)), LEAST_BYTES);
    assert_eq!(buffer_bytes(Some(260 << 20)), 520 << 20);
    assert_eq!(buffer_bytes(Some((100 << 20) + 1)), 202 << 20);
}

#[test]
fn thread_counts_double_up_to_all() {
    assert_eq!(thread_counts(1), [1]);
    assert_eq!(thread_counts(2), [1, 2]);
    assert_eq!(thread_counts(6), [1, 2, 4, 6]);
    assert_eq!(thread_counts(8), [1, 2, 4, 8]);
}
