//! The decisions about page tables and homes on the papers' scenarios, in a model of a machine.
//!
//! [`parameters`] has each figure with its source, [`machine`] the model. The model says which
//! placement of page tables is the fastest; the decisions see only what a program can see of it:
//! latencies, threads, pages of data, cycles in walks and mapping calls. No scenario's name is an
//! input of anything.

#[allow(dead_code)] // the scenarios will use the rest
#[path = "decisions/machine.rs"]
mod machine;
#[allow(dead_code)]
#[path = "decisions/parameters.rs"]
mod parameters;

use machine::{Kind, Machine, Program, Traffic};
use parameters::Parameters;

const NUMBERS: [u32; 4] = [0, 1, 2, 3];

fn machine(kind: Kind) -> Machine {
    Machine::new(kind, Parameters::PAPERS, &NUMBERS)
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
