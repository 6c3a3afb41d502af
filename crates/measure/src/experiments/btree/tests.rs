use std::sync::atomic::Ordering;

use pageleap::EngineChoice;
use pageleap::topology::Topology;

use super::super::{Outcome, Scene};
use super::*;
use crate::Error;
use crate::olc::NODE_WORDS;

/// Trees of 8 MB on one node, whose private memory moves to its own node, so that all code runs.
fn trees(mix: Mix, ways: &[Way]) -> Trees {
    let topology = Topology::read().unwrap();
    let node = topology.nodes().iter().find(|node| node.total_bytes > 0).unwrap().id;
    let cpu = topology.allowed_cpus()[0];
    let setting = Setting {
        bytes: 8 << 20,
        from: node,
        to: node,
        cpus: vec![cpu, *topology.allowed_cpus().last().unwrap()],
        mix,
        share: Share::MEDIUM,
        pages: 40,
        window: Duration::from_millis(20),
        seed: 5,
        can_move: Ok(()),
    };
    assert_eq!(setting.migration_pages(), 40);
    Trees::new(setting, ways, || Ok::<_, Error>(())).unwrap()
}

/// The place of a metric.
fn metric(key: &str) -> usize {
    METRICS.iter().position(|metric| metric.key == key).unwrap()
}

#[test]
fn queries_beside_each_way_lose_nothing_and_have_a_base() {
    for mix in Mix::ALL {
        let mut trees = trees(mix, &ways(&EngineChoice::ALL, false));
        // The other batches are larger than a migration.
        let too_large = |what: &String| what.ends_with(", private: a migration has 40 leaves");
        assert!(trees.left_out().len() == 5 && trees.left_out().iter().all(too_large));
        for case in 0..trees.cases().len() {
            // A second turn finds the tree as the first one did.
            for _ in 0..if mix == Mix::A { 2 } else { 1 } {
                let Outcome { numbers, lost } = trees.measure(case, &|| false).unwrap().unwrap();
                let labels = trees.cases()[case].labels.clone();
                assert_eq!((lost, numbers.len()), (0, METRICS.len()), "{mix} {labels:?}");
                let base = trees.cases()[case].bases[0];
                let is_base = base == case;
                assert!(numbers[0] > 0.0 && numbers[metric("queries")] > 0.0, "{numbers:?}");
                for key in ["pages", "migration"] {
                    assert_eq!(numbers[metric(key)].is_nan(), is_base, "{labels:?} {key}");
                }
                let name = labels[0].clone();
                if !is_base && !format!("{name:?}").contains("private") {
                    assert_eq!(numbers[metric("moved")], 1.0, "{labels:?}");
                }
            }
        }
    }
}

#[test]
fn each_way_has_labels_of_its_own() {
    let ways = ways(&EngineChoice::ALL, false);
    let labels: Vec<String> = ways.iter().map(|way| format!("{:?}", way.labels())).collect();
    let mut each = labels.clone();
    each.sort();
    each.dedup();
    assert_eq!(each.len(), labels.len());
    let batches = labels.iter().filter(|of| of.contains("Count(")).count();
    assert_eq!(batches, 6);
    assert!(super::ways(&[EngineChoice::Auto], true).len() < 10);
}

#[test]
fn a_wrong_word_of_a_leaf_or_an_inner_node_is_lost_once() {
    // 1792 leaves, and then inner nodes. A value of a leaf; a key of an inner node, by which its
    // leaves are not found.
    for (node, word) in [(100, 300), (1793, 9)] {
        for mix in [Mix::A, Mix::C] {
            let mut trees = trees(mix, &[Way::Stay { private: false }]);
            let place = node * NODE_WORDS + word;
            trees.words(false).unwrap()[place].fetch_add(1 << 40, Ordering::Relaxed);
            let mut lost = || trees.measure(0, &|| false).unwrap().unwrap().lost;
            assert!(lost() > 0, "{mix} {node}");
            assert_eq!(lost(), 0, "{mix} {node}");
        }
    }
}

#[test]
fn leaves_that_lay_apart_leave_no_mappings_behind() {
    let ways = [Way::Stay { private: false }, Way::Leap(EngineChoice::Auto, Leaves::Apart)];
    let mut trees = trees(Mix::C, &ways);
    let mappings = |trees: &Trees| {
        let region = &trees.pools.region;
        let start = region.as_ptr().as_ptr().addr();
        let range = start..start + region.len();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let first =
            |line: &str| usize::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        maps.lines().filter(|line| range.contains(&first(line))).count()
    };
    let before = mappings(&trees);
    for _ in 0..3 {
        assert_eq!(trees.measure(1, &|| false).unwrap().unwrap().lost, 0);
        let after = mappings(&trees);
        assert!(after <= before, "{after} mappings, {before} before");
    }
}

#[test]
fn a_signal_ends_a_turn_and_hides_no_lost_word() {
    let mut trees = trees(Mix::E, &[Way::Stay { private: false }]);
    assert_eq!(trees.measure(0, &|| true).unwrap(), None);
    let words = trees.words(false).unwrap();
    words[200 * NODE_WORDS + 300].store(0, Ordering::Relaxed);
    assert!(trees.measure(0, &|| true).unwrap().unwrap().lost > 0);
}

#[test]
fn loading_asks_whether_to_go_on() {
    let trees = trees(Mix::C, &[Way::Stay { private: false }]);
    let setting = trees.setting.clone();
    let asked = std::cell::Cell::new(0);
    let stop = || {
        asked.set(asked.get() + 1);
        let reason = std::io::Error::other("enough");
        if asked.get() > 2 { Err(Error::Call { call: "none", reason }) } else { Ok(()) }
    };
    let error = Trees::new(setting, &[Way::Stay { private: false }], stop).err().unwrap();
    assert!(error.to_string().contains("enough"));
}

#[test]
fn without_a_second_node_ways_of_the_kernel_are_left_out_with_the_reason() {
    let setting = trees(Mix::C, &[]).setting;
    let setting = Setting { can_move: Err("one node".to_owned()), ..setting };
    assert!(setting.needs()[0] == setting.bytes);
    let ways = ways(&[EngineChoice::Auto], true);
    let trees = Trees::new(setting, &ways, || Ok::<_, Error>(())).unwrap();
    let names: Vec<_> = trees.cases().iter().map(|case| case.labels[0].clone()).collect();
    assert_eq!(names, ["none".into(), "auto".into(), "auto".into()]);
    assert!(trees.left_out().iter().all(|what| what.ends_with(": one node")));
    assert_eq!(trees.left_out().len(), 4);
}
