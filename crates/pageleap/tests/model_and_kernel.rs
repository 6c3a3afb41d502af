//! The model and the kernel in lockstep. Random programs of pools, regions, jobs and attributes run
//! on both. After each step both must have given the same answer, and must show the same pages with
//! the same frames, contents and attributes.
//!
//! Loom, shuttle and fault injection use the model. Their results hold only as far as the model
//! behaves like the kernel, which is compared here. The kernel's state is read from `/proc`, not
//! from the library. A program that fails is shrunk, and printed as Rust code that repeats it.

#[path = "model_and_kernel/account.rs"]
mod account;
mod common;
#[path = "model_and_kernel/machine.rs"]
mod machine;
#[path = "model_and_kernel/program.rs"]
mod program;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use account::Account;
use common::turn;
use machine::{Machine, Outcome, left_in_process};
use pageleap::backend::{Call, Model};
use program::{Program, programs, refused_programs};
use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestCaseError, TestRunner};

/// The number of programs, unless `PROPTEST_CASES` sets another.
const CASES: u32 = 128;
/// From how many programs on they must have met rare cases. Of fewer programs the seed alone
/// decides what they meet, and a harmless change of how programs are drawn is another seed.
const ENOUGH: u32 = 512;
/// The seed, unless `PROPTEST_RNG_SEED` sets another.
const SEED: u64 = 4711;
const STEPS: usize = 40;
const POOLS: usize = 3;
const REGIONS: usize = 3;
/// Pages of the pools and regions that exist at the start.
const FIRST_POOLS: usize = 18;
const FIRST_REGIONS: usize = 5;
/// How many words of each page the model keeps.
const WORDS: usize = 4;

/// Statistics of what happened in the programs.
#[derive(Debug, Default)]
struct Seen {
    steps: u64,
    pages_moved: u64,
    jobs_stopped: u64,
    calls_refused: BTreeSet<Call>,
    /// How often steps were refused, by the reason without numbers.
    refused: BTreeMap<String, u64>,
}

/// Runs a program on both machines, and drops everything.
fn compare(program: &Program, seen: &mut Seen) -> Result<(), String> {
    let left_before = left_in_process().len();
    let model = Arc::new(Model::new());
    let mut machines = [Some(model), None].map(|model| Machine::new(model, program));
    let result = run_in_lockstep(program, &mut machines, seen);
    seen.calls_refused.extend(machines[0].refused());
    let [model, kernel] = machines.map(|machine| machine.end_of_program(left_before));
    result?;
    if model.is_empty() && kernel.is_empty() {
        return Ok(());
    }
    Err(format!("left over on the model {model:?}, on the kernel {kernel:?}"))
}

fn run_in_lockstep(
    program: &Program,
    machines: &mut [Machine; 2],
    seen: &mut Seen,
) -> Result<(), String> {
    let mut account = Some(Account::new());
    for (number, step) in program.steps.iter().enumerate() {
        let at = format!("step {number}, {step:?}");
        let [on_model, on_kernel] = machines.each_mut().map(|machine| machine.run(step));
        if on_model != on_kernel {
            return Err(format!(
                "{at}:\non the model   {on_model:?}\non the kernel  {on_kernel:?}"
            ));
        }
        seen.steps += 1;
        match &on_model {
            Outcome::Nothing => {}
            Outcome::Refused(why) => {
                if machines[0].refused().is_some() {
                    // A part of the step may have been done. The account cannot tell which.
                    account = None;
                }
                let why: String = why.chars().filter(|c| !c.is_numeric()).collect();
                *seen.refused.entry(why).or_default() += 1;
            }
            done => {
                account.iter_mut().for_each(|account| account.note(step));
                match done {
                    Outcome::Finished(finished) => {
                        seen.pages_moved += finished.pages.migrated;
                        if !finished.warnings.is_empty() {
                            account = None; // attributes may be lost
                        }
                    }
                    Outcome::Stopped { .. } => seen.jobs_stopped += 1,
                    _ => {}
                }
            }
        }
        let [on_model, on_kernel] = machines.each_mut().map(|machine| machine.view());
        if on_model != on_kernel {
            return Err(format!("after {at}:\n{}", on_model.differences(&on_kernel).join("\n")));
        }
        for (region, view) in on_model.regions.iter().enumerate() {
            let (Some(view), Some(account)) = (view, &mut account) else { continue };
            account.check(region, view).map_err(|problem| format!("after {at}: {problem}"))?;
        }
        for machine in machines.iter() {
            machine.audit().map_err(|problem| format!("after {at}: {problem}"))?;
        }
    }
    Ok(())
}

/// Runs many programs. Returns statistics if there were [`ENOUGH`].
fn compare_all(programs: impl Strategy<Value = Program>) -> Option<Seen> {
    let _turn = turn();
    let cases = std::env::var("PROPTEST_CASES")
        .map_or(CASES, |text| text.parse().expect("a number of programs"));
    let config = ProptestConfig::default();
    let rng_seed = match config.rng_seed {
        RngSeed::Random => RngSeed::Fixed(SEED),
        chosen => chosen,
    };
    let config = ProptestConfig {
        cases,
        rng_seed,
        failure_persistence: None,
        max_shrink_time: 60_000,
        ..config
    };
    let seen = RefCell::new(Seen::default());
    let result = TestRunner::new(config).run(&programs, |program| {
        compare(&program, &mut seen.borrow_mut()).map_err(TestCaseError::fail)
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    let seen = seen.into_inner();
    eprintln!("{seen:?}");
    if cases < ENOUGH {
        return None;
    }
    assert!(seen.pages_moved > 0 && seen.refused.len() >= 3, "this proves little: {seen:?}");
    Some(seen)
}

#[test]
fn any_program_does_the_same_on_both() {
    if let Some(seen) = compare_all(programs()) {
        assert!(seen.jobs_stopped > 0, "{seen:?}");
    }
}

#[test]
fn any_program_does_the_same_on_both_when_a_call_is_refused() {
    if let Some(seen) = compare_all(refused_programs()) {
        assert!(seen.calls_refused.len() >= 5, "{seen:?}");
    }
}
