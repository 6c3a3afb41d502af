//! Runs a test under many schedules, or under one that is replayed.

use std::env;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shuttle::scheduler::{PctScheduler, RandomScheduler, ReplayScheduler, Scheduler};

/// Environment variable: how many schedules each test runs.
const ITERATIONS_VAR: &str = "PAGELEAP_SHUTTLE_ITERATIONS";
/// The default.
const ITERATIONS: usize = 8000;

/// Environment variable: the only schedule to run, as a failed test printed it.
const REPLAY_VAR: &str = "PAGELEAP_SHUTTLE_REPLAY";

/// Environment variable: a number from which the schedulers draw all their choices. Another number
/// gives other schedules.
const SEED_VAR: &str = "PAGELEAP_SHUTTLE_SEED";
/// The default. It is fixed, so that a test of the same code always meets the same cases.
const SEED: usize = 4711;

/// From how many schedules on a test must have met all its cases. The first test command runs
/// fewer: there the seed alone decides whether a rare case is met, and a harmless change of the
/// code is another draw.
const ENOUGH: usize = 5000;

fn number(var: &str, default: usize) -> usize {
    env::var(var).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{var}: {text}")))
}

fn iterations() -> usize {
    number(ITERATIONS_VAR, ITERATIONS)
}

fn seed(run: usize) -> u64 {
    (number(SEED_VAR, SEED) + run) as u64
}

/// Switches between threads at random. Each `run` gives other schedules.
pub(crate) fn at_random(run: usize) -> RandomScheduler {
    RandomScheduler::new_from_seed(seed(run), iterations())
}

/// The same with one schedule for each `fewer` of the others, for tests whose schedules are long.
pub(crate) fn at_random_seldom(fewer: usize) -> RandomScheduler {
    RandomScheduler::new_from_seed(seed(0), iterations().div_ceil(fewer))
}

/// Lets a thread run until it waits, and interrupts it at `switches - 1` places. Each `run` gives
/// other schedules.
pub(crate) fn with_few_switches(switches: usize, run: usize) -> PctScheduler {
    PctScheduler::new_from_seed(seed(run), switches, iterations())
}

/// Runs `body` under each schedule of the scheduler, or only under the schedule to replay.
pub(crate) fn explore(
    scheduler: impl Scheduler + 'static,
    body: impl Fn() + Send + Sync + 'static,
) {
    let mut config = shuttle::Config::new();
    config.silence_warnings = true;
    // A scan keeps its findings on the stack.
    config.stack_size = 256 << 10;
    config.ungraceful_shutdown_config.immediately_return_on_panic = true;
    let runs = match env::var(REPLAY_VAR) {
        Ok(schedule) => {
            shuttle::Runner::new(ReplayScheduler::new_from_encoded(&schedule), config).run(body)
        }
        Err(_) => shuttle::Runner::new(scheduler, config).run(body),
    };
    eprintln!("{runs} schedules");
}

/// One of the cases that the schedules of a test are to meet: its name, and how often it was met.
pub(crate) type Case<'a> = (&'a str, &'a AtomicU64);

/// Whether the schedules are so many that they must have met each case.
fn enough() -> bool {
    iterations() >= ENOUGH && env::var(REPLAY_VAR).is_err()
}

/// Whether more schedules are needed for cases that must be met.
pub(crate) fn needs_more(cases: &[Case]) -> bool {
    enough() && cases.iter().any(|(_, n)| n.load(Relaxed) == 0)
}

/// Prints what the schedules have met. Fails if [`ENOUGH`] schedules ran and met one of the cases
/// never.
pub(crate) fn expect(seen: &[Case]) {
    let text: Vec<String> =
        seen.iter().map(|(name, n)| format!("{name}: {}", n.load(Relaxed))).collect();
    eprintln!("{}", text.join(", "));
    let missing = seen.iter().find(|(_, n)| n.load(Relaxed) == 0);
    assert!(!enough() || missing.is_none(), "never seen: {missing:?}");
}
