use pageleap::{CopyUse, NodeId, PageCounts};
use pageleap_measure::export::Format;
use pageleap_measure::load::Rate;
use pageleap_measure::memcpy::{Copy, METHODS};
use pageleap_measure::phase::Spread;
use pageleap_measure::statistics;
use serde_json::Value as Json;

use super::super::args::Memory;
use super::super::summary;
use super::super::summary::{Leap, Machine, Memcpy, Pages, Query, Quiet, Writes};
use super::*;
use pageleap_measure::tpch::queries::Decimal;

fn gaps(max_ns: u64) -> Spread {
    let p999_ns = max_ns - 10_000;
    Spread { count: 5, p50_ns: 55_000, p99_ns: 56_000, p999_ns, max_ns }
}

fn summary() -> Summary {
    let query = Query {
        median_ns: [Some(61_200_000), Some(63_000_000), Some(72_000_000), Some(60_900_000)],
        runs: [12, 2, 3, 12],
        counts: [
            vec![(61_200_000, 12)],
            vec![(63_000_000, 2)],
            vec![(72_000_000, 3)],
            vec![(60_900_000, 12)],
        ],
        equal: true,
    };
    let copy = Copy { ns: 200_000_000, cpu_ns: Some(190_000_000) };
    Summary {
        table: summary::Table {
            scale_factor: 1.0,
            rows: 6_001_215,
            memory: Memory::Pool,
            bytes: 844_800_000,
            page_size: 4096,
            counted_page_size: 4096,
        },
        machine: Machine { kernel: "6.18.0".to_owned(), nodes: 1, cpus: 4 },
        leap: Leap {
            from: 0,
            to: 0,
            engine: "precopy".to_owned(),
            engine_reason: "asked for".to_owned(),
            moved_by: vec![("precopy", 844_800_000)],
            reserve_ns: None,
            reserve_left_bytes: None,
            area_bytes: 16 << 20,
            threads: 1,
            copies: Some(CopyUse {
                from: NodeId(0),
                to: NodeId(0),
                method: METHODS[1],
                tried: true,
            }),
            migrate_ns: 212_000_000,
            recycle_ns: 30_000_000,
            cpu_ns: Some(228_000_000),
            completed: true,
            moved_bytes: 844_800_000,
            extra_copied_ratio: 0.0004,
            max_wait_ns: 120_000,
            ended_early: None,
        },
        memcpy: Memcpy {
            method: METHODS[1],
            ns: 200_000_000,
            cpu_ns: Some(190_000_000),
            runs: vec![[copy; METHODS.len()]; 3],
        },
        quiet: Quiet {
            samples_ns: vec![190_000_000, 210_000_000, 206_000_000],
            ns: statistics::Summary::of(&[190e6, 210e6, 206e6]).unwrap(),
            cpu_ns: Some(209_000_000),
            reserve_ns: None,
            engine: "stop-copy".to_owned(),
            engine_reason: "few come to wait".to_owned(),
        },
        memcpy_under_load_ns: Some(208_000_000),
        writes: Writes {
            requested: Rate::PerSecond(100_000),
            achieved_ratio: Some(0.998),
            before_per_s: 100_000.0,
            during_per_s: 99_800.0,
            count: 250_000,
            landed_during: 21_200,
            lost: 0,
            gaps: [70_000, 90_000, 140_000, 70_000].map(|max_ns| Some(gaps(max_ns))),
            gap_beyond_memcpy_ns: Some(50_000),
        },
        q1: query.clone(),
        q6: query,
        pages: Pages {
            counts: PageCounts { migrated: 206_250, ..PageCounts::default() },
            before: [(0, 206_250)].into(),
            after: [(0, 206_250)].into(),
            kernel_page_size: 4096,
            huge_mapped_ratio: 0.0,
            mappings: [31, 900, 33],
            frames_changed_ratio: Some(1.0),
        },
        published: Some((true, Decimal(1_231_410_782_283, 4))),
        timeline: vec![],
        warnings: Vec::new(),
        mismatches: Vec::new(),
    }
}

fn json(summary: &Summary) -> Json {
    serde_json::from_str(&Format::Json.write(&summary.document())).unwrap()
}

fn text(summary: &Summary) -> String {
    // Joins the lines, so that line breaks do not matter to the tests.
    let text = Format::WIDE.write(&summary.document());
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn json_has_the_documented_keys() {
    let keys = |value: &Json| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let value = json(&summary());
    let mut expected = vec![
        "rows",
        "bytes",
        "memory",
        "page_size",
        "counted_page_size",
        "moved_by",
        "reserve_ns",
        "reserve_left_bytes",
        "kernel",
        "cpus",
        "nodes",
        "from",
        "to",
        "engine",
        "engine_reason",
        "area_bytes",
        "copy_loop",
        "copy_step_bytes",
        "copy_threads",
        "copy_tried",
        "migrate_ns",
        "recycle_ns",
        "memcpy_ns",
        "memcpy_loop",
        "memcpy_step_bytes",
        "ratio_to_memcpy",
        "memcpy_under_load_ns",
        "ratio_to_memcpy_under_load",
        "leap_load_cost_ns",
        "memcpy_load_cost_ns",
        "cpu_to_memcpy_ratio",
        "cpu_ns",
        "memcpy_cpu_ns",
        "extra_copied_ratio",
        "max_wait_ns",
        "quiet",
        "queries",
        "writes",
        "pages",
        "placement",
        "kernel_page_size",
        "huge_mapped_ratio",
        "mappings",
        "frames_changed_ratio",
        "memcpy_samples",
        "notes",
        "summary",
        "timeline",
        "title",
    ];
    expected.sort_unstable();
    assert_eq!(keys(&value), expected);
    assert_eq!(keys(&value["pages"]), ["busy", "failed", "migrated", "not_attempted", "unchanged"]);
    for key in ["achieved_ratio", "landed_during", "lost"] {
        assert!(value["writes"][key].is_number(), "{key}");
    }
    for (key, ns) in [
        ("max_gap_before_ns", 70_000),
        ("max_gap_memcpy_ns", 90_000),
        ("max_gap_ns", 140_000),
        ("gap_beyond_memcpy_ns", 50_000),
        ("p99_gap_ns", 56_000),
        ("p999_gap_ns", 130_000),
        ("memcpy_p999_gap_ns", 80_000),
    ] {
        assert_eq!(value["writes"][key], ns, "{key}");
    }
    let q6 = &value["queries"]["q6"];
    assert_eq!(q6["during_ns_counts"], serde_json::json!([[72_000_000, 3]]));
    assert_eq!((&q6["memcpy_ns"], &q6["during_ns"]), (&63_000_000.into(), &72_000_000.into()));
    assert!(q6["after_ns"].is_number() && q6["equal"] == true);
    assert_eq!(value["placement"]["after"]["0"], 206_250);
    assert_eq!(value["quiet"]["samples_ns"].as_array().unwrap().len(), 3);
    assert_eq!(value["memcpy_samples"].as_array().unwrap().len(), 3 * METHODS.len());
    assert_eq!(value["ratio_to_memcpy"], 1.06);
    assert_eq!(value["cpu_to_memcpy_ratio"], 1.2);
    assert_eq!(value["quiet"]["ratio_to_memcpy"], 1.03);
    assert_eq!(value["quiet"]["cpu_to_memcpy_ratio"], 1.1);
    assert_eq!(value["leap_load_cost_ns"], 6_000_000);
    assert_eq!(value["memcpy_load_cost_ns"], 8_000_000);
    let ratio = value["ratio_to_memcpy_under_load"].as_f64().unwrap();
    assert!((ratio - 212.0 / 208.0).abs() < 1e-9, "{ratio}");
}

#[test]
fn hidden_frames_and_unlimited_writes_are_null() {
    let mut summary = summary();
    summary.pages.frames_changed_ratio = None;
    summary.writes.requested = Rate::Max;
    let value = json(&summary);
    assert!(
        value["frames_changed_ratio"].is_null() && value["writes"]["requested_per_s"].is_null()
    );
    assert!(text(&summary).contains("frames not checked"));
}

#[test]
fn text_says_plainly_what_one_node_means() {
    let one = text(&summary());
    assert!(one.contains(
        "the machine has one node: leaps between two pools of node 0; new frames, same node"
    ));
    assert!(one.contains("this is no NUMA speed-up"));
    assert!(one.contains("Verdict verified: "), "{one}");
    let mut two = summary();
    (two.leap.to, two.machine.nodes) = (1, 2);
    let two = text(&two);
    assert!(two.contains("from node 0 to node 1") && !two.contains("NUMA"), "{two}");
}

#[test]
fn what_populating_took_has_a_line_of_its_own() {
    let of_pools = summary();
    assert!(!text(&of_pools).contains("reserve ") && json(&of_pools)["reserve_ns"].is_null());
    let mut of_malloc = summary();
    of_malloc.table.memory = Memory::Malloc;
    of_malloc.leap.moved_by = vec![("uffd-move", 844_000_000), ("kernel", 800_000)];
    (of_malloc.leap.reserve_ns, of_malloc.quiet.reserve_ns) =
        (Some(800_000_000), Some(700_000_000));
    let (quiet, under_load) = {
        let text = text(&of_malloc);
        let (quiet, under_load) = text.split_once("Under load: ").unwrap();
        (quiet.to_owned(), under_load.to_owned())
    };
    assert!(quiet.contains("reserve 700 ms 1.12 GiB/s; populated before each leap"), "{quiet}");
    assert!(under_load.contains("reserve 800 ms 1007 MiB/s; populated before the leap"));
    assert!(under_load.contains("moved by uffd-move: 805 MiB, kernel: 781 KiB"), "{under_load}");
    assert!(quiet.contains("leaps within node 0; new frames, same node"), "{quiet}");
    let value = json(&of_malloc);
    assert_eq!((&value["reserve_ns"], &value["memory"]), (&800_000_000.into(), &"malloc".into()));
    assert_eq!(value["quiet"]["reserve_ns"], 700_000_000);
    assert_eq!(value["moved_by"]["kernel"], 800_000);
    // Times and ratios leave it out.
    assert_eq!(value["ratio_to_memcpy"], json(&of_pools)["ratio_to_memcpy"]);
    of_malloc.leap.reserve_ns = None;
    assert!(text(&of_malloc).contains("reserve - none: the kernel's engine takes fresh memory"));
}

#[test]
fn the_unit_of_counted_pages_is_said_where_it_is_another() {
    let mut summary = summary();
    assert!(!text(&summary).contains("counted in pages of"));
    summary.table.page_size = 2 << 20;
    assert!(text(&summary).contains("migrated 206,250 counted in pages of 4 KiB"));
}

#[test]
fn the_leap_without_load_comes_first() {
    let text = text(&summary());
    let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"));
    let parts = [
        "Leaps of the whole table",
        "Without load: the leap and the fastest memcpy engine stop-copy",
        "ratio 1.03 leap / memcpy",
        "CPU ratio 1.10",
        "Under load: queries read the table, and a thread writes it engine precopy",
        "ratio 1.02 leap / memcpy, both beside the load",
        "ratio, quiet memcpy 1.06",
        "load costs the leap 6.00 ms more than without load load costs the memcpy 8.00 ms",
        "Queries: ",
        "gap beyond the memcpy 50.0 us",
        "during the leap 55.0us 56.0us 130us 140us",
        "Verdict",
    ];
    assert!(parts.map(at).is_sorted(), "{text}");
}

#[test]
fn text_says_what_the_load_costs_and_when_threads_must_share_cpus() {
    let mut summary = summary();
    assert!(!text(&summary).contains("wait for a CPU"));
    summary.machine.cpus = 2;
    let shared = text(&summary);
    let (quiet, under_load) = shared.split_once("Under load: ").unwrap();
    assert!(under_load.contains("without load; 3 threads share 2 CPUs, and wait"), "{shared}");
    assert!(!quiet.contains("threads share"), "{shared}");
    summary.writes.requested = Rate::PerSecond(0);
    assert!(!text(&summary).contains("wait for a CPU") && !text(&summary).contains("gaps"));
    summary.memcpy_under_load_ns = Some(199_000_000);
    assert_eq!(json(&summary)["memcpy_load_cost_ns"], -1_000_000);
}

#[test]
fn text_does_not_claim_what_failed() {
    let mut failed = summary();
    failed.mismatches.push("3 writes lost".to_owned());
    assert!(!text(&failed).contains("verified") && text(&failed).contains("FAILED"));
    let mut early = summary();
    early.leap.completed = false;
    early.leap.ended_early = Some("timed out".to_owned());
    assert!(text(&early).contains("ratio - not everything moved"), "{}", text(&early));
    assert!(text(&early).contains("load costs the leap - "), "{}", text(&early));
    let wrong = summary::incomplete(&early).unwrap();
    assert!(wrong.contains("(timed out)") && wrong.ends_with("--timeout"), "{wrong}");
    assert_eq!(summary::incomplete(&summary()), None);
}
