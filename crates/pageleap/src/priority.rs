//! The scheduling of a job's threads, which keeps threads that wait for the job from starving.
//!
//! A job inherits the policy and the nice value of the thread that starts it, and may be as
//! unimportant as that. A thread of the program that waits for the job is not: if the job gets no
//! CPU, neither does the waiting thread (priority inversion). It waits for *windows*, and also for
//! other mapping calls of the job, each of which takes a lock of the address space. So threads of a
//! job are raised as far as the user may:
//!
//! * to ordinary threads, for good, if the starter is *low*: SCHED_IDLE, SCHED_BATCH, or a nice value
//!   above 0. Only copies that nobody waits for are made as low as that ([`Raised::copying`]);
//! * before all ordinary threads (SCHED_FIFO, lowest priority) in windows: in those that are short,
//!   and in those that contain a copy as far as a share of real time allows ([`FirstShare`]).
//!
//! A thread with a real-time policy that the user has chosen keeps it.

use pageleap_sys::{self as sys, Errno, Resource, Scheduling};

use crate::error::Error;
use crate::sync::{Fresh, monotonic_ns};

/// A change of the calling thread's scheduling for a part of its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Haste {
    usual: Scheduling,
    meanwhile: Scheduling,
}

impl Haste {
    /// Whether the change runs the thread before all ordinary threads (SCHED_FIFO).
    pub(crate) fn is_first(self) -> bool {
        self.meanwhile.is_first()
    }

    /// Begins or ends the change for the calling thread. Returns whether that worked.
    pub(crate) fn apply(self, on: bool) -> bool {
        let Haste { usual, meanwhile } = self;
        let (from, to) = if on { (usual, meanwhile) } else { (meanwhile, usual) };
        sys::reschedule(from, to).is_ok()
    }
}

/// The scheduling of the calling thread, one of the library's, if it may be changed. Threads that
/// it starts must not inherit a real-time policy (SCHED_RESET_ON_FORK).
fn own() -> Option<Scheduling> {
    present().map(|own| Scheduling { resets_on_fork: true, ..own })
}

/// The scheduling of the calling thread, if it may be changed.
fn present() -> Option<Scheduling> {
    let is_modelled = cfg!(any(miri, shuttle));
    sys::scheduling().ok().filter(|own| own.is_fair() && !is_modelled)
}

/// Whether a job may run in the calling thread. It may not if it would have to raise the thread
/// ([`Raised`]), nor under SCHED_DEADLINE: then the kernel takes the CPU away when the thread's
/// time is up.
pub(crate) fn lends_itself() -> bool {
    let own = sys::scheduling().ok();
    own.is_some_and(|own| !own.is_low() && own.policy != libc::SCHED_DEADLINE)
}

/// The scheduling of a thread that may have inherited a low priority from its starter.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Raised {
    /// The low priority that it had, if it has been raised.
    low: Option<Scheduling>,
}

impl Raised {
    /// Makes the calling thread an ordinary one, if it is lower and may be. Threads that it starts
    /// are ordinary too. If it has to stay low, warns.
    pub(crate) fn this_thread(warn: impl FnOnce(String)) -> Raised {
        let Some(low) = own().filter(|own| own.is_low()) else { return Raised::default() };
        if sys::reschedule(low, Scheduling::ORDINARY).is_ok() {
            return Raised { low: Some(low) };
        }
        warn(stays_low(low));
        Raised::default()
    }

    /// Gives the thread its low priority back.
    pub(crate) fn undo(self) {
        if let Some(low) = self.low {
            let _ = sys::reschedule(Scheduling::ORDINARY, low);
        }
    }

    /// The low priority for copies that nobody waits for, if the thread was raised.
    pub(crate) fn copying(self) -> Option<Haste> {
        let usual = Scheduling::ORDINARY;
        self.low.map(|low| Haste { usual, meanwhile: low })
    }
}

/// The text of the warning for a job that has to stay low.
fn stays_low(own: Scheduling) -> String {
    let name = match own {
        Scheduling { policy: libc::SCHED_IDLE, .. } => "SCHED_IDLE".to_owned(),
        Scheduling { policy: libc::SCHED_BATCH, nice, .. } => format!("SCHED_BATCH, nice {nice}"),
        Scheduling { nice, .. } => format!("nice {nice}"),
    };
    format!(
        "the thread that started the job has a low priority ({name}), and the job may not have a \
         higher one: threads may wait for a page as long as others keep the job from the CPU; grant \
         CAP_SYS_NICE or an RLIMIT_NICE of 20 (ulimit -e 20), or start the job from an ordinary \
         thread"
    )
}

/// Why the calling thread could not start another one.
pub(crate) fn no_thread(what: &'static str, errno: Errno) -> Error {
    let policy = sys::scheduling().ok().map(|own| own.policy);
    Error::NoThread { what, errno, remedy: remedy_without_thread(errno, policy) }
}

/// The remedy for a thread of this policy that cannot start another. The kernel refuses threads of
/// SCHED_DEADLINE, because the new one would take the same share of real time. It uses the same
/// error number for too many threads (EAGAIN).
fn remedy_without_thread(errno: Errno, policy: Option<i32>) -> &'static str {
    match (errno.0, policy) {
        (libc::EAGAIN, Some(libc::SCHED_DEADLINE)) => {
            "the calling thread has the policy SCHED_DEADLINE, and may start none without \
             SCHED_FLAG_RESET_ON_FORK: set that flag (sched_setattr), or make the call from a thread \
             with another policy"
        }
        (libc::EPERM, _) => "allow clone and clone3 in the seccomp profile",
        _ => {
            "raise the limit of threads (ulimit -u, pids.max, kernel.threads-max), of mappings \
             (vm.max_map_count) or of address space (ulimit -v), or end threads; while another \
             thread of the process is in execve, none can start"
        }
    }
}

/// The change of the calling thread to SCHED_FIFO, if it may make the change and undo it. `None`
/// under a limit on real time (RLIMIT_RTTIME), because the kernel would kill the process during a
/// window that takes longer.
pub(crate) fn first() -> Option<Haste> {
    own().and_then(first_of)
}

/// Like [`first`], for a thread of the program in which a job runs. It starts no thread meanwhile.
/// A change that was allowed a moment ago is not tried again, because in a small job that would
/// take a good part of the time.
pub(crate) fn first_of_lent_thread() -> Option<Haste> {
    static ALLOWED: Fresh<()> = Fresh::new();
    let usual = present()?;
    if ALLOWED.get(|()| ()).is_some() {
        return may_take_long().then(|| Haste { usual, meanwhile: usual.first() });
    }
    let (haste, now_ns) = (first_of(usual)?, monotonic_ns());
    ALLOWED.put((), now_ns);
    Some(haste)
}

fn first_of(usual: Scheduling) -> Option<Haste> {
    let haste = Haste { usual, meanwhile: usual.first() };
    (may_take_long() && haste.apply(true) && haste.apply(false)).then_some(haste)
}

/// Whether no limit (RLIMIT_RTTIME) bounds the time of a thread under SCHED_FIFO.
fn may_take_long() -> bool {
    sys::resource_limit(Resource::RealTime).is_ok_and(|limit| limit.soft.is_none())
}

/// Raises the calling thread for good, to SCHED_FIFO if it may be. For threads that sleep until
/// others wait for them, and then do little.
pub(crate) fn serve_others() {
    let Some(own) = own() else { return };
    if sys::reschedule(own, own.first()).is_err() {
        run_shortly();
    }
}

/// Asks for short time slices for the calling thread, so that the scheduler runs it soon after a
/// wake-up. The kernel offers that to every ordinary thread without privilege.
pub(crate) fn run_shortly() {
    if sys::scheduling().is_ok_and(|own| own.policy == libc::SCHED_OTHER) {
        let _ = sys::run_shortly();
    }
}

/// Bounds the time for which a worker runs before ordinary threads in windows that contain the copy
/// of an area. Without a bound, one window after the other would keep a CPU from everybody else for
/// the length of a job.
///
/// The time that passes earns credit, half as much, and windows spend it. Without credit the worker
/// offers its CPU to other threads before it closes the next area. If one takes it, that earns
/// credit. If none does, nobody competes with the worker, and the window needs no priority.
#[derive(Debug)]
pub(crate) struct FirstShare {
    credit_ns: i64,
    earned_at_ns: u64,
    last_ns: i64,
}

impl FirstShare {
    /// The most credit, with which a worker begins: a time slice of the scheduler. The kernel charges
    /// a thread no time as an ordinary one while it runs first, so a thread that shares the CPU with
    /// the worker hardly runs as long as credit lasts. With 20 ms of credit that was the whole of a
    /// leap of 256 MB (`docs/adr/0043-raised-windows-save-a-time-slice.md`).
    const MOST_NS: i64 = 4_000_000;

    /// How often the CPU is offered before a window.
    const OFFERS: u32 = 16;

    pub(crate) fn new(now_ns: u64) -> FirstShare {
        FirstShare { credit_ns: Self::MOST_NS, earned_at_ns: now_ns, last_ns: 0 }
    }

    /// Whether the next window may run first, if it takes as long as the last one.
    pub(crate) fn admits(&mut self, now_ns: impl Fn() -> u64, offer: impl Fn()) -> bool {
        for _ in 0..Self::OFFERS {
            if self.suffices(now_ns()) {
                return true;
            }
            offer();
        }
        self.suffices(now_ns())
    }

    fn suffices(&mut self, now_ns: u64) -> bool {
        let earned = now_ns.saturating_sub(self.earned_at_ns) / 2;
        self.credit_ns = self.credit_ns.saturating_add_unsigned(earned).min(Self::MOST_NS);
        self.earned_at_ns = now_ns;
        self.credit_ns >= self.last_ns.min(Self::MOST_NS)
    }

    /// Takes the time of a window that has run first off the credit.
    pub(crate) fn spend(&mut self, window_ns: u64) {
        self.last_ns = i64::try_from(window_ns).unwrap_or(i64::MAX);
        self.credit_ns = self.credit_ns.saturating_sub(self.last_ns);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use std::cell::Cell;

    use super::*;

    const MS: u64 = 1_000_000;

    /// Makes windows of some length one after the other, on a machine where each offer of the CPU
    /// takes some time. Returns how many ran first, the time they took, and all time.
    fn run(windows: u64, window_ns: u64, offer_ns: u64) -> (u64, u64, u64) {
        let clock = Cell::new(0);
        let mut share = FirstShare::new(0);
        let mut first = 0;
        for _ in 0..windows {
            if share.admits(|| clock.get(), || clock.set(clock.get() + offer_ns)) {
                first += 1;
                share.spend(window_ns);
            }
            clock.set(clock.get() + window_ns);
        }
        (first, first * window_ns, clock.get())
    }

    #[test]
    fn windows_that_copy_run_first_for_half_of_the_time_at_most() {
        for window_ns in [MS, 4 * MS, 50 * MS] {
            // Nobody else wants the CPU.
            let (first, used, all) = run(1000, window_ns, 0);
            assert!(first > 0 && first < 1000);
            assert!(used <= all / 2 + 4 * MS + window_ns, "{used} of {all}");
            // Others take it for 3 ms whenever it is offered: every window runs first, and the
            // others get as much time as the windows.
            let (first, used, all) = run(1000, window_ns, 3 * MS);
            assert!(used <= all / 2 + 4 * MS + window_ns, "{used} of {all}");
            assert!(window_ns > 4 * MS || first == 1000, "{first} windows of {window_ns} ns");
            // The scheduler gives the CPU back soon.
            let (first, used, all) = run(1000, window_ns, MS / 10);
            assert!(used <= all / 2 + 4 * MS + window_ns, "{used} of {all}");
            assert!(first > 0);
        }
    }

    #[test]
    fn credit_does_not_grow_for_ever() {
        let mut share = FirstShare::new(0);
        // An hour without a window.
        let now = 3_600_000 * MS;
        let mut first = 0;
        while share.admits(|| now, || ()) {
            share.spend(MS);
            first += 1;
        }
        assert_eq!(first, 4);
    }

    #[test]
    fn the_remedy_for_no_thread_is_that_of_its_cause() {
        let remedy = |errno, policy| remedy_without_thread(Errno(errno), Some(policy));
        for policy in [libc::SCHED_OTHER, libc::SCHED_IDLE, libc::SCHED_FIFO] {
            assert!(remedy(libc::EAGAIN, policy).contains("pids.max"), "{policy}");
        }
        assert!(remedy(libc::EAGAIN, libc::SCHED_DEADLINE).contains("SCHED_FLAG_RESET_ON_FORK"));
        // It takes more than another policy.
        assert!(remedy(libc::ENOMEM, libc::SCHED_DEADLINE).contains("pids.max"));
        assert!(remedy(libc::EPERM, libc::SCHED_OTHER).contains("seccomp"));
    }

    #[test]
    fn low_is_what_ordinary_threads_run_before() {
        let scheduling = |policy, nice| Scheduling { policy, nice, ..Scheduling::ORDINARY };
        for (policy, nice, low) in [
            (libc::SCHED_OTHER, 0, false),
            (libc::SCHED_OTHER, -5, false),
            (libc::SCHED_OTHER, 1, true),
            (libc::SCHED_BATCH, 0, true),
            (libc::SCHED_IDLE, 0, true),
            (libc::SCHED_FIFO, 19, false),
        ] {
            assert_eq!(scheduling(policy, nice).is_low(), low, "{policy} {nice}");
        }
    }
}
