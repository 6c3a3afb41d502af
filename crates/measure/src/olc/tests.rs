use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use super::*;
use crate::random::{SplitMix64, scattered};

fn words(nodes: usize) -> Vec<AtomicU64> {
    (0..nodes * NODE_WORDS).map(|_| AtomicU64::new(0x5555)).collect()
}

fn all(tree: Tree<'_>) -> Vec<(u64, u64)> {
    let mut entries = Vec::new();
    tree.each_leaf(|_, leaf| entries.extend_from_slice(leaf)).unwrap();
    entries
}

#[test]
fn a_tree_is_a_sorted_map() {
    // Random keys, and ascending ones, which leave all nodes but the last half full.
    for (keys, nodes, mix) in [(50_000, 600, true), (70_000, 900, false)] {
        let words = words(nodes);
        let roots = Roots::empty(&words);
        let tree = Tree::new(&words, &roots);
        let key = |at: u64| if mix { scattered(at) } else { at };
        let mut map = BTreeMap::new();
        for at in 1..=keys {
            assert_eq!(tree.insert(key(at), at), Ok(Inserted::New));
            map.insert(key(at), at);
        }
        assert_eq!(tree.insert(key(7), 0), Ok(Inserted::Exists));
        assert_eq!(tree.update(key(7), |value| value + 1), Ok(Some(7)));
        map.insert(key(7), 8);
        assert_eq!(tree.update(key(keys + 1), |value| value), Ok(None));
        assert!(map.iter().all(|(key, value)| tree.get(*key) == Ok(Some(*value))));
        assert_eq!(tree.get(key(keys + 1)), Ok(None));
        assert_eq!(all(tree), map.clone().into_iter().collect::<Vec<_>>());
        for (from, most) in [(0, 5), (key(9), 1), (key(11) + 1, 1000), (u64::MAX - 5, 100)] {
            let mut found = vec![(1, 1)];
            tree.scan(from, most, &mut found).unwrap();
            let expected = map.range(from..).take(most).map(|(key, value)| (*key, *value));
            assert_eq!(found[1..], expected.collect::<Vec<_>>());
        }
        // Inner nodes have been split, too.
        assert_eq!(tree.node(roots.root.load(Ordering::Relaxed)).unwrap().level(), 2);
    }
}

#[test]
fn a_full_tree_refuses_keys_and_keeps_the_others() {
    let words = words(9);
    let roots = Roots::empty(&words);
    let tree = Tree::new(&words, &roots);
    let mut keys = 0;
    while tree.insert(scattered(keys + 1), keys) == Ok(Inserted::New) {
        keys += 1;
    }
    assert_eq!(tree.insert(scattered(keys + 1), 0), Ok(Inserted::Full));
    assert!(keys > 4 * CAPACITY as u64, "{keys}");
    assert!((0..keys).all(|at| tree.get(scattered(at + 1)) == Ok(Some(at))));
    assert_eq!(all(tree).len() as u64, keys);
}

/// The value of a key that was updated this often.
fn value(key: u64, times: u64) -> u64 {
    scattered(key).wrapping_add(times)
}

/// How often a key was updated, by its value.
fn times(key: u64, value: u64) -> u64 {
    value.wrapping_sub(scattered(key))
}

/// Without the comparison of versions, readers find neither all keys nor right values here.
#[test]
fn threads_insert_update_look_up_and_scan_at_the_same_time() {
    const KEYS: u64 = 40_000;
    const THREADS: u64 = 2;
    const MOST: u64 = 1 << 40;
    let words = words(1200);
    let roots = Roots::empty(&words);
    let tree = Tree::new(&words, &roots);
    let key = |thread: u64, at: u64| scattered(at * THREADS + thread + 1);
    // The keys of each thread that are there.
    let there: Vec<AtomicU64> = (0..THREADS).map(|_| AtomicU64::new(0)).collect();
    let over = AtomicBool::new(false);
    let any = |random: &mut SplitMix64| {
        let thread = random.below(THREADS as usize);
        let there = there[thread].load(Ordering::Acquire);
        (there > 0).then(|| key(thread as u64, random.below(there as usize) as u64))
    };
    let updates = thread::scope(|scope| {
        let inserting: Vec<_> = (0..THREADS)
            .map(|nth| {
                let there = &there[nth as usize];
                scope.spawn(move || {
                    for at in 0..KEYS {
                        let key = key(nth, at);
                        assert_eq!(tree.insert(key, value(key, 0)), Ok(Inserted::New));
                        there.store(at + 1, Ordering::Release);
                    }
                })
            })
            .collect();
        let over = &over;
        let any = &any;
        let updating: Vec<_> = (0..THREADS)
            .map(|nth| {
                scope.spawn(move || {
                    let (mut random, mut done) = (SplitMix64(nth), Vec::new());
                    while !over.load(Ordering::Relaxed) {
                        let Some(key) = any(&mut random) else { continue };
                        let before = tree.update(key, |value| value.wrapping_add(1)).unwrap();
                        assert!(times(key, before.unwrap()) < MOST);
                        done.push(key);
                    }
                    done
                })
            })
            .collect();
        scope.spawn(move || {
            let mut random = SplitMix64(77);
            while !over.load(Ordering::Relaxed) {
                let Some(key) = any(&mut random) else { continue };
                let found = tree.get(key).unwrap().expect("an inserted key is found");
                assert!(times(key, found) < MOST);
            }
        });
        scope.spawn(move || {
            let (mut random, mut found) = (SplitMix64(78), Vec::new());
            while !over.load(Ordering::Relaxed) {
                let Some(first) = any(&mut random) else { continue };
                found.clear();
                tree.scan(first, 300, &mut found).unwrap();
                assert_eq!(found[0].0, first);
                assert!(found.is_sorted_by(|one, other| one.0 < other.0));
                assert!(found.iter().all(|(key, value)| times(*key, *value) < MOST));
            }
        });
        let inserted: Vec<_> = inserting.into_iter().map(|thread| thread.join()).collect();
        over.store(true, Ordering::Relaxed);
        assert!(inserted.iter().all(Result::is_ok));
        let updates = updating.into_iter().flat_map(|thread| thread.join().unwrap());
        updates.collect::<Vec<u64>>()
    });
    let mut expected: BTreeMap<u64, u64> = BTreeMap::new();
    for nth in 0..THREADS {
        expected.extend((0..KEYS).map(|at| (key(nth, at), 0)));
    }
    for key in updates {
        *expected.get_mut(&key).unwrap() += 1;
    }
    let expected = expected.into_iter().map(|(key, times)| (key, value(key, times)));
    assert_eq!(all(tree), expected.collect::<Vec<_>>());
}

#[test]
fn a_damaged_tree_is_broken_and_ends_no_thread() {
    let words = words(40);
    let roots = Roots::empty(&words);
    let tree = Tree::new(&words, &roots);
    for at in 1..1000 {
        tree.insert(scattered(at), at).unwrap();
    }
    let root = roots.root.load(Ordering::Relaxed);
    let node = tree.node(root).unwrap();
    let child = node.value(0);
    // A child that does not exist, and one that is the root itself.
    for wrong in [1 << 40, root] {
        node.set_child(0, wrong);
        assert_eq!(tree.get(0), Err(Broken));
        assert_eq!(tree.insert(0, 0), Err(Broken));
        assert_eq!(tree.scan(0, 5, &mut Vec::new()), Err(Broken));
    }
    node.set_child(0, child);
    assert_eq!(tree.get(0), Ok(None));
    // A chain of leaves that is a circle.
    tree.node(child).unwrap().set_next(child);
    assert_eq!(tree.each_leaf(|_, _| ()), Err(Broken));
}
