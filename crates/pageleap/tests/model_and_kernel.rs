//! The model and the kernel in lockstep: random programs of pools, regions, jobs and attributes run on both, and after each step both must
//! have given the same answer and must show the same pages, with the same frames, contents and attributes.
//!
//! What loom, shuttle and fault injection show on the model is worth as much as the model is like the kernel; this compares them. The state
//! of the kernel is read from `/proc`, not from the library. A program that fails is shrunk and printed as the Rust that repeats it.

#[path = "model_and_kernel/account.rs"]
mod account;
mod common;
#[path = "model_and_kernel/machine.rs"]
mod machine;
#[path = "model_and_kernel/program.rs"]
mod program;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use account::Account;
use common::turn;
use machine::{Machine, Outcome};
use pageleap::backend::{Linux, Model};
use program::{Program, a_step};
use proptest::prelude::*;
use proptest::test_runner::{TestCaseError, TestRunner};

/// Programs, unless `PROPTEST_CASES` says otherwise.
const CASES: u32 = 200;
const STEPS: usize = 30;
const POOLS: usize = 3;
const REGIONS: usize = 3;
/// Pages of those that are there at the start.
const FIRST_POOLS: usize = 18;
const FIRST_REGIONS: usize = 5;
/// The model keeps so many words of a page.
const WORDS: usize = 4;

/// What programs have met. Plain statistics.
#[derive(Debug, Default)]
struct Seen {
    steps: u64,
    pages_moved: u64,
    jobs_stopped: u64,
    /// By the reason, without numbers.
    refused: BTreeMap<String, u64>,
}

/// Runs a program on both machines.
fn compare(program: &Program, seen: &mut Seen) -> Result<(), String> {
    let model = Arc::new(Model::new());
    let mut machines = [Machine::new(model.clone(), Some(model)), Machine::new(Arc::new(Linux), None)];
    let mut account = Account::new();
    for (number, step) in program.0.iter().enumerate() {
        let at = format!("step {number}, {step:?}");
        let [on_model, on_kernel] = machines.each_mut().map(|machine| machine.run(step));
        if on_model != on_kernel {
            return Err(format!("{at}:\non the model   {on_model:?}\non the kernel  {on_kernel:?}"));
        }
        seen.steps += 1;
        match &on_model {
            Outcome::Nothing => {}
            Outcome::Refused(why) => {
                let why: String = why.chars().filter(|c| !c.is_numeric()).collect();
                *seen.refused.entry(why).or_default() += 1;
            }
            done => {
                account.note(step);
                match done {
                    Outcome::Finished(finished) => seen.pages_moved += finished.pages.migrated,
                    Outcome::Stopped { .. } => seen.jobs_stopped += 1,
                    _ => {}
                }
            }
        }
        let [on_model, on_kernel] = machines.each_mut().map(|machine| machine.view());
        if on_model != on_kernel {
            return Err(format!("after {at}:\non the model   {on_model:#?}\non the kernel  {on_kernel:#?}"));
        }
        for (region, view) in on_model.regions.iter().enumerate() {
            let Some(view) = view else { continue };
            account.check(region, view).map_err(|problem| format!("after {at}: {problem}"))?;
        }
        for machine in &machines {
            machine.audit().map_err(|problem| format!("after {at}: {problem}"))?;
        }
    }
    match machines.map(Machine::end_of_program) {
        [model, kernel] if model.is_empty() && kernel.is_empty() => Ok(()),
        [model, kernel] => Err(format!("left over on the model {model:?}, on the kernel {kernel:?}")),
    }
}

#[test]
fn any_program_does_the_same_on_both() {
    let _turn = turn();
    let cases =
        std::env::var("PROPTEST_CASES").map_or(CASES, |text| text.parse().expect("a number of programs"));
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let seen = RefCell::new(Seen::default());
    let programs = prop::collection::vec(a_step(), 1..STEPS).prop_map(Program);
    let result = TestRunner::new(config)
        .run(&programs, |program| compare(&program, &mut seen.borrow_mut()).map_err(TestCaseError::fail));
    if let Err(error) = result {
        panic!("{error}");
    }
    let seen = seen.into_inner();
    eprintln!("{seen:?}");
    let enough = seen.pages_moved > 0 && seen.jobs_stopped > 0 && seen.refused.len() >= 3;
    assert!(enough || cases < CASES, "these programs prove little: {seen:?}");
}
