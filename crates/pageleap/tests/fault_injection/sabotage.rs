//! Making single calls of a job fail.

use std::sync::Arc;

use pageleap::backend::{Backend, Call, Errno, FailAt, FailMode};

use crate::common::sweep_step;

pub const MODES: [FailMode; 3] = [FailMode::Before, FailMode::After, FailMode::Partial];
pub const ENOMEM: Errno = Errno(libc::ENOMEM);

/// More calls than any of the swept cases makes.
const ENDLESS: u64 = 1000;

/// Which call fails, and how. Calls are counted from 1; call 0 is never made.
#[derive(Clone, Copy, Debug)]
pub struct Sabotage {
    pub at: u64,
    pub mode: FailMode,
    pub errno: Errno,
}

impl Sabotage {
    /// No call fails.
    pub const NONE: Sabotage = Sabotage { at: 0, mode: FailMode::Before, errno: ENOMEM };

    /// The backend with the failing call.
    pub fn of(self, backend: Arc<dyn Backend>) -> Arc<FailAt> {
        Arc::new(FailAt::new(backend, self.at, self.mode, self.errno))
    }
}

/// Runs `case` with call 1 failing, then call 2, and so on, in each mode, until `case` makes fewer
/// calls than that. Returns the number of the last call that has failed, added up over the modes.
///
/// With a larger step each mode begins at another call. With all three modes and a step of three,
/// every call still fails once, in one of the modes.
pub fn sweep(
    errno: Errno,
    modes: &[FailMode],
    mut case: impl FnMut(&dyn Fn() -> Sabotage) -> Option<Call>,
) -> u64 {
    let step = sweep_step();
    let mut reached = 0;
    for (mode, first) in modes.iter().zip((1..=step).cycle()) {
        let mut last = 0;
        for at in (first..ENDLESS).step_by(step as usize) {
            if case(&|| Sabotage { at, mode: *mode, errno }).is_some() {
                last = at;
            }
            // The number of calls varies if other threads disturb the job.
            if at >= last + 4 {
                break;
            }
        }
        reached += last;
    }
    reached
}
