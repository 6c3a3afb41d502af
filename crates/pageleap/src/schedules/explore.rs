//! Runs a test under many schedules, or under one that is replayed.

use std::env;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shuttle::scheduler::{ReplayScheduler, Scheduler};

/// Environment variable: how many schedules each test runs.
const ITERATIONS_VAR: &str = "PAGELEAP_SHUTTLE_ITERATIONS";
/// The default.
const ITERATIONS: usize = 8000;

/// Environment variable: the only schedule to run, as a failed test printed it.
const REPLAY_VAR: &str = "PAGELEAP_SHUTTLE_REPLAY";

pub(super) fn iterations() -> usize {
    env::var(ITERATIONS_VAR).map_or(ITERATIONS, |text| text.parse().expect("a number of schedules"))
}

/// Runs `body` under each schedule of the scheduler, or only under the schedule to replay.
pub(super) fn explore(
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

/// Prints what the schedules have met. Fails if many schedules ran and met one of the cases never.
pub(super) fn expect(seen: &[(&str, &AtomicU64)]) {
    let text: Vec<String> =
        seen.iter().map(|(name, n)| format!("{name}: {}", n.load(Relaxed))).collect();
    eprintln!("{}", text.join(", "));
    let enough = iterations() >= 500 && env::var(REPLAY_VAR).is_err();
    let missing = seen.iter().find(|(_, n)| n.load(Relaxed) == 0);
    assert!(!enough || missing.is_none(), "never seen: {missing:?}");
}
