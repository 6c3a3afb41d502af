//! A hash map of hashbrown that leaps while threads look up its keys: `cargo run --release -p
//! pageleap-alloc --example hash_map [KEYS [FROM [TO]]]`.
//!
//! Each thread checks the values that it finds, and at the end every key is looked up once. On a
//! machine with one memory node the map leaps to other frames of that node: this shows the cost of
//! a leap, not the gain of a NUMA machine. Exit code: 0 if every value was found, else 101.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use pageleap::topology::Topology;
use pageleap::{NodeId, Pool};
use pageleap_alloc::RegionAllocator;

/// The value of a key.
fn value(key: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers: Vec<u64> =
        std::env::args().skip(1).map(|number| number.parse()).collect::<Result<_, _>>()?;
    let keys = numbers.first().copied().unwrap_or(4_000_000).max(1);
    let allowed = Topology::read()?.allowed_nodes();
    let node = |at: usize| match numbers.get(at + 1) {
        Some(id) => NodeId(*id as u32),
        None => allowed[at.min(allowed.len() - 1)],
    };
    let (from, to) = (node(0), node(1));
    let bytes = keys * 40 + (64 << 20);
    let (near, far) = (Pool::builder(from, bytes).build()?, Pool::builder(to, bytes).build()?);

    let memory = RegionAllocator::new(2 * bytes as usize, [&near])?;
    let mut map = HashMap::with_capacity_in(keys as usize, memory.clone());
    map.extend((0..keys).map(|key| (key, value(key))));
    let same = if from == to { ": other frames of one node; this is no NUMA speed-up" } else { "" };
    println!(
        "map       {keys} keys, {:.1} MiB; {from} -> {to}{same}",
        memory.place().len() as f64 / 1048576.0
    );

    let (map, lookups, stop) = (&map, AtomicU64::new(0), AtomicBool::new(false));
    let check = |key: u64| {
        assert_eq!(map.get(&key), (key < keys).then(|| value(key)).as_ref(), "LOST: key {key}")
    };
    let report = std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let (lookups, stop) = (&lookups, &stop);
            scope.spawn(move || {
                let mut random = (thread * 0x2545_f491_4f6c_dd1d) | 1;
                while !stop.load(Relaxed) {
                    for _ in 0..256 {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        check(random % (keys + keys / 8));
                    }
                    lookups.fetch_add(256, Relaxed);
                }
            });
        }
        let rate = |work: &mut dyn FnMut()| {
            let (began, before) = (Instant::now(), lookups.load(Relaxed));
            work();
            (lookups.load(Relaxed) - before) as f64 / began.elapsed().as_secs_f64()
        };
        let mut pause = || std::thread::sleep(Duration::from_millis(500));
        pause();
        let before = rate(&mut pause);
        let mut report = Err(None);
        let during = rate(&mut || {
            report = memory.migration(&far).start().map(|job| job.wait()).map_err(Some)
        });
        let after = rate(&mut pause);
        stop.store(true, Relaxed);
        for (name, rate) in [("before", before), ("leaping", during), ("after", after)] {
            println!(
                "{name:9} {:8.0} thousand lookups/s, {:.2} of those before",
                rate / 1e3,
                rate / before
            );
        }
        report
    });
    let report = report
        .map_err(|error| error.map_or_else(|| "no leap".to_owned(), |error| error.to_string()))?;
    (0..keys + 1).for_each(check);
    assert!(report.ended.is_completed(), "{report}");
    println!(
        "verified  every key was found with its value, by every lookup; {} pages have moved",
        report.pages.migrated
    );
    Ok(())
}
