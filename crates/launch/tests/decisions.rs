//! The decisions about page tables and homes on the papers' scenarios, in a model of a machine.
//!
//! [`parameters`] has each figure with its source, [`machine`] the model, [`scenarios`] the situations
//! with the expected decisions. The model says which placement of page tables is the fastest; the
//! decisions see only what a program can see of it: latencies, threads, pages of data, cycles in walks
//! and mapping calls. No scenario's name is an input of anything. `docs/page-table-decisions.md` has
//! the results.

#[path = "decisions/homes.rs"]
mod homes;
#[path = "decisions/machine.rs"]
mod machine;
#[path = "decisions/parameters.rs"]
mod parameters;
#[path = "decisions/scenarios.rs"]
mod scenarios;
#[path = "../../pageleap/tests/common/tree.rs"]
mod tree;

use std::collections::BTreeSet;

use machine::{Kind, Machine, Program, Traffic};
use pageleap::decisions::BackOff;
use parameters::Parameters;
use scenarios::{APART, Action, Expected, LATENCY, PHOENIX, Scenario, all_scenarios};

const NUMBERS: [u32; 4] = [0, 1, 2, 3];
const KINDS: [Kind; 3] = [Kind::TwoSockets, Kind::FourNodes, Kind::MemoryAlone];

fn machine(kind: Kind) -> Machine {
    Machine::new(kind, Parameters::PAPERS, &NUMBERS)
}

fn scenario(name: &str) -> &'static Scenario {
    all_scenarios().find(|scenario| scenario.name == name).unwrap()
}

/// All orders of four numbers, and numbers with gaps between them.
fn numberings() -> Vec<[u32; 4]> {
    let mut all = vec![[7, 2, 9, 4], [60, 61, 12, 0]];
    for (a, b, c) in (0..64).map(|i| (i / 16, i / 4 % 4, i % 4)) {
        let (set, d) = (BTreeSet::from([a, b, c]), 6 - (a + b + c) as i32);
        if set.len() == 3 {
            all.push([a, b, c, d as u32]);
        }
    }
    assert_eq!(all.len(), 26);
    all
}

#[test]
fn the_model_has_the_ratios_of_the_papers_text() {
    let quiet = Traffic::default();
    let ratio = |kind, to| {
        let machine = machine(kind);
        machine.latency(0, to, &quiet) / machine.latency(0, 0, &quiet)
    };
    // 002, section 3.2.
    assert!((1.2..=1.4).contains(&ratio(Kind::TwoSockets, 1)));
    // 003, section 3.2.1.
    assert!((ratio(Kind::FourNodes, 2) - 2.3).abs() < 1e-9);
    // 003, section 3.4.1: node 1 is the closest, node 3 the farthest.
    let order: Vec<f64> = (0..4).map(|to| ratio(Kind::FourNodes, to)).collect();
    assert!(order.is_sorted() && order[0] == 1.0, "{order:?}");
}

#[test]
fn controllers_and_links_saturate() {
    let two = machine(Kind::TwoSockets);
    let used = |times| {
        let traffic = two.throttled(&two.stream_on(&[0]), times);
        two.latency(1, 0, &traffic)
    };
    assert!(used(0.0) < used(0.3) && used(0.3) < used(0.6));
    assert_eq!(used(1.0), used(2.0), "a saturated controller is not used more");
    let interleaved = two.stream_interleaved();
    let extra =
        |from| two.latency(from, 0, &interleaved) - two.latency(from, 0, &Traffic::default());
    assert!(extra(1) > extra(0), "the link is in the way of remote loads only");
}

#[test]
fn a_program_is_slower_where_its_walks_are() {
    let four = machine(Kind::FourNodes);
    let program = Program::thin(&four.parameters, 0, 0);
    let times: Vec<f64> = four
        .places()
        .map(|tables| four.time_at(&program, tables, &Traffic::default()).ns)
        .collect();
    assert!(times.is_sorted(), "{times:?}");
    let both = four.time(&program, &[0, 3].into(), &Traffic::default());
    assert_eq!(
        both.ns.round(),
        (times[0] / (1.0 - 20.0 * 8e-6)).round(),
        "a thread walks the near one"
    );
    assert!(both.walks > 0.3 && both.walks < 0.6, "{both:?}");
}

#[test]
fn each_scenario_is_decided_as_its_paper_says() {
    for scenario in all_scenarios() {
        let decided = scenario.decide(Parameters::PAPERS, &NUMBERS);
        assert_eq!(decided, scenario.expected, "{}", scenario.name);
    }
    for kind in KINDS {
        assert_eq!(homes::decide(&machine(kind)), homes::expected(kind), "{kind:?}");
    }
}

#[test]
fn renumbered_nodes_keep_the_decisions() {
    for numbers in numberings() {
        for scenario in all_scenarios() {
            let decided = scenario.decide(Parameters::PAPERS, &numbers);
            // Equal threads on several nodes: the lower number is the one that is kept.
            let ties = matches!(scenario.expected.phoenix, Action::Drop(_));
            let expected = match decided.phoenix {
                Action::Drop(_) if ties => {
                    Expected { phoenix: decided.phoenix, ..scenario.expected }
                }
                _ => scenario.expected,
            };
            assert_eq!(decided, expected, "{} with {numbers:?}", scenario.name);
        }
    }
    for kind in KINDS {
        for numbers in [[3, 2, 1, 0], [7, 2, 9, 4], [1, 3, 0, 2]] {
            let machine = Machine::new(kind, Parameters::PAPERS, &numbers);
            assert_eq!(homes::decide(&machine), homes::expected(kind), "{kind:?} with {numbers:?}");
        }
    }
}

#[test]
fn parameters_that_change_by_a_fifth_keep_the_decisions() {
    let all = Parameters::changed();
    assert_eq!(all.len(), 2 * 17, "each parameter, up and down");
    for (name, parameters) in &all {
        for scenario in all_scenarios() {
            let decided = scenario.decide(*parameters, &NUMBERS);
            assert_eq!(decided, scenario.expected, "{}: {name}", scenario.name);
        }
    }
    for (name, parameters) in &all {
        for kind in KINDS {
            let machine = Machine::new(kind, *parameters, &NUMBERS);
            let decided = homes::decide(&machine);
            // The home and the first node over which it grows. The two nodes of the other socket are
            // 13 % apart, so changed distances may change their order, and growth follows distances.
            for (decided, expected) in decided.iter().zip(homes::expected(kind)) {
                assert_eq!(decided[..2], expected[..2], "{kind:?}: {name}");
                let distance = |to: &usize| (10.0 * machine.extra(decided[0], *to)).round() as u64;
                assert!(decided.is_sorted_by_key(distance), "{kind:?}: {name}: {decided:?}");
            }
        }
    }
}

/// The time of a scenario's program with all page tables at a place.
fn time_at(scenario: &Scenario, machine: &Machine, place: usize) -> f64 {
    machine.time_at(&scenario.program(machine), place, &(scenario.traffic)(machine)).ns
}

#[test]
fn the_default_rule_finds_the_fastest_node_with_cpus() {
    for scenario in all_scenarios() {
        let machine = machine(scenario.kind);
        let decided = time_at(scenario, &machine, scenario.expected.latency_aware);
        for place in machine.places().filter(|place| machine.has_cpus(*place)) {
            let there = time_at(scenario, &machine, place);
            assert!(decided <= there * (1.0 + 1e-9), "{}: {place} is faster", scenario.name);
        }
    }
}

#[test]
fn algorithm_1_is_as_good_where_threads_are_with_their_data_and_slower_elsewhere() {
    let compare = |scenario: &Scenario| {
        let machine = machine(scenario.kind);
        let [pte, pmd, pud] = scenario.expected.algorithm_1;
        assert_eq!((pte, pmd), (pmd, pud));
        let default = time_at(scenario, &machine, scenario.expected.latency_aware);
        time_at(scenario, &machine, pte) / default
    };
    for scenario in LATENCY.iter().chain(PHOENIX) {
        assert!((compare(scenario) - 1.0).abs() < 1e-9, "{}", scenario.name);
    }
    for scenario in APART {
        let times = compare(scenario);
        println!("{}: {times:.2} times as long", scenario.name);
        assert!(times > 1.1, "{}: {times}", scenario.name);
    }
}

/// The conclusions from figures 5 and 9 of 003.
#[test]
fn the_model_orders_the_papers_configurations_as_measured() {
    let four = machine(Kind::FourNodes);
    let time = |name: &str, tables: usize| time_at(scenario(name), &four, tables);
    let as_is = |name: &str| time(name, scenario(name).tables[0]);
    let with_auto_ptm = |name: &str| time(name, scenario(name).expected.auto_ptm[0]);
    let aware = |name: &str| time(name, scenario(name).expected.latency_aware);
    // Figure 5: LPLD is the shortest and LPLDI the longest; type 2 (near) is better than type 1 (far).
    let figure_5 =
        [as_is("LPLD"), as_is("RPLDLI, type 2 of figure 5"), as_is("RPLDLI"), as_is("LPLDI")];
    println!("figure 5: {:.2?}", figure_5.map(|ns| ns / figure_5[0]));
    assert!(figure_5.is_sorted_by(|shorter, longer| shorter < longer), "{figure_5:?}");
    // Figure 9a: Auto-PTM makes RPLDLI longer, and the latency-aware rule makes both shorter.
    assert!(with_auto_ptm("RPLDLI") > as_is("RPLDLI"));
    assert!(aware("RPLDLI") < as_is("RPLDLI") && aware("LPLDI") < as_is("LPLDI"));
    // Figure 9b: with remote interference both are as good; with both, the latency-aware rule is the
    // best, and RPLDRILI is longer than RPLDRI.
    assert_eq!(with_auto_ptm("RPLDRI"), aware("RPLDRI"));
    assert!(aware("RPLDRI") < as_is("RPLDRI") && as_is("RPLDRI") < as_is("RPLDRILI"));
    assert!(with_auto_ptm("RPLDRILI") < as_is("RPLDRILI"));
    assert!(aware("RPLDRILI") < with_auto_ptm("RPLDRILI"));
    for name in ["RPLDLI", "LPLDI", "RPLDRI", "RPLDRILI"] {
        let times = with_auto_ptm(name) / aware(name);
        println!("{name}: {times:.2} times as fast as with Auto-PTM");
    }
}

/// `docs/page-table-decisions.md` has the times of each scenario, with LPLD as 1.
#[test]
fn the_document_has_the_figures_of_the_model() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/page-table-decisions.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mut rest = &*text;
    let mut expect = |figures: String, name: &str| match rest.find(&figures) {
        Some(at) => rest = &rest[at + figures.len()..],
        None => panic!("{name}: no row with {figures} comes next"),
    };
    let four = machine(Kind::FourNodes);
    let quiet = time_at(scenario("LPLD"), &four, 0);
    for scenario in LATENCY {
        let Expected { auto_ptm, algorithm_1, latency_aware, .. } = scenario.expected;
        assert_eq!(algorithm_1, [latency_aware; 3], "{}", scenario.name);
        let [before, auto_ptm, default] = [scenario.tables[0], auto_ptm[0], latency_aware]
            .map(|place| time_at(scenario, &four, place) / quiet);
        expect(format!("| {before:.2} | {auto_ptm:.2} | {default:.2} |"), scenario.name);
    }
    for scenario in APART {
        let machine = machine(scenario.kind);
        let Expected { algorithm_1, latency_aware, .. } = scenario.expected;
        let times = time_at(scenario, &machine, algorithm_1[0])
            / time_at(scenario, &machine, latency_aware);
        expect(format!("| {times:.2} |"), scenario.name);
    }
}

/// 003, section 6.2: the text says that page tables stay on node 0, where the model has a better one.
#[test]
fn the_model_disagrees_with_figure_10() {
    let name = "figure 10: threads and data have moved beside STREAM";
    let (four, scenario) = (machine(Kind::FourNodes), scenario(name));
    let time = |place| time_at(scenario, &four, place);
    assert!(time(3) > time(0), "Auto-PTM makes it longer, as in the figure");
    assert!(time(2) < time(0), "the other node of the socket is nearer");
    assert_eq!(scenario.expected.algorithm_1, [2; 3], "the algorithm agrees with the model");
}

/// The scans that the back-off saves (003, sections 4.1.4 and 6.5.2: from 13 % to at most 1.2 %).
#[test]
fn the_back_off_saves_most_of_the_scans_that_move_nothing() {
    const TRIGGERS: usize = 64;
    let scenario = scenario("LPLD");
    assert_eq!(scenario.expected.auto_ptm, [scenario.tables[0]; 3], "a scan moves nothing");
    let mut back_off = BackOff::new();
    let due = (0..TRIGGERS).filter(|_| {
        let is_due = back_off.is_due();
        if is_due {
            back_off.scanned(false);
        }
        is_due
    });
    let scans = due.count();
    let lost = Parameters::PAPERS.scan_share * scans as f64 / TRIGGERS as f64;
    println!("{scans} scans at {TRIGGERS} triggers: {:.1} % of the time", lost * 100.0);
    assert!(lost < 0.015, "{scans} scans at {TRIGGERS} triggers");
}

/// Actions of Phoenix against the alternatives in the model.
#[test]
fn phoenix_does_not_slow_a_program_down() {
    for scenario in PHOENIX.iter().filter(|scenario| scenario.has_counter) {
        let machine = machine(scenario.kind);
        let (program, traffic) = (scenario.program(&machine), (scenario.traffic)(&machine));
        let time = |copies: &[usize], traffic: &Traffic| {
            machine.time(&program, &copies.iter().copied().collect(), traffic).ns
        };
        let before = time(scenario.tables, &traffic);
        let after = match scenario.expected.phoenix {
            Action::Nothing => before,
            Action::Resolve(_) => time(scenario.tables, &machine.throttled(&traffic, 0.1)),
            Action::Migrate(to) | Action::Drop(to) => time(&[to], &traffic),
            Action::Replicate(copies) => time(copies, &traffic),
        };
        println!("{}: {:.2} of the time", scenario.name, after / before);
        assert!(after <= before, "{}: {after} instead of {before} ns", scenario.name);
        if let Action::Resolve(_) = scenario.expected.phoenix {
            let replicated = time(&[0, 1], &traffic);
            assert!(after < replicated, "{}: replicas would be better", scenario.name);
        }
    }
}

/// The bound on mapping calls is lower than the model's break-even, because the model knows neither
/// the lock of the replicas nor the latency of a single request (002, sections 1 and 2.2).
#[test]
fn the_bound_on_mapping_calls_is_on_the_safe_side() {
    let two = machine(Kind::TwoSockets);
    let gain = |calls: f64| {
        let program = scenario("threads on both sockets").program(&two);
        let program = Program { mapping_calls_per_s: calls, ..program };
        let single = two.time_at(&program, 0, &Traffic::default()).ns;
        1.0 - two.time(&program, &[0, 1].into(), &Traffic::default()).ns / single
    };
    let rates: Vec<f64> = (1..40).map(|thousands| f64::from(thousands) * 1e3).collect();
    let break_even = rates.iter().find(|rate| gain(**rate) < 0.0).unwrap();
    println!("replicas gain {:.1} %, and nothing from {break_even} calls/s on", gain(0.0) * 100.0);
    assert!(*break_even > pageleap::decisions::Phoenix::DROP_ABOVE);
    assert!(*break_even <= Parameters::PAPERS.many_calls);
}

/// 002, section 6.3: interleaved STREAM saturates the link, so that remote walks suffer most.
#[test]
fn a_saturated_link_makes_remote_walks_longer() {
    let two = machine(Kind::TwoSockets);
    let program = Program::thin(&two.parameters, 0, 0);
    let remote = |traffic: &Traffic| {
        two.time_at(&program, 1, traffic).ns / two.time_at(&program, 0, traffic).ns
    };
    assert!(remote(&two.stream_interleaved()) > remote(&Traffic::default()));
}
