//! Finds out whether another process traces a thread of the library (`ptrace(2)`: strace, gdb,
//! py-spy).
//!
//! A tracer stops the threads that it traces at each of their system calls. Between two stops it
//! may read their memory by `process_vm_readv`, which waits for pages like any other access. If it
//! reads an area that a thread of a job has closed, and has stopped that thread, each waits for the
//! other for ever. So while a job's threads are traced, the job closes areas only in ways that let
//! readers go on.
//!
//! **Which threads.** Only threads that end windows matter: workers, and the threads that read
//! messages for them. A thread looks at itself, because `/proc/self/status` shows the main thread
//! only, and a tracer of the main thread alone (strace without `-f`) lets a job's threads go on.
//! One thread stands for all others of its job, because the job starts them itself: a tracer that
//! follows `clone` has all of them. One that attaches to a process later attaches to all of its
//! threads before it reads their memory. A tracer that attaches to single threads by their numbers
//! is not covered.

use std::io::Read;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// How often a thread that is not traced looks for a tracer. A look takes some 10 us.
const EVERY_NS: u64 = 100_000_000;

/// The process that traces the calling thread, by its number in the PID namespace of `/proc`. A
/// tracer outside of that namespace is not seen. Allocates nothing.
pub(crate) fn of_this_thread() -> Option<u32> {
    // The line is among the first ones of the file; the longest before it, the name, has 64 bytes.
    let mut text = [0; 512];
    let opened = pageleap_sys::open_own("status").map_err(std::io::Error::from);
    let read = opened.and_then(|mut file| file.read(&mut text));
    tracer_in(&text[..read.unwrap_or(0)])
}

fn tracer_in(status: &[u8]) -> Option<u32> {
    let mut lines = status.split(|byte| *byte == b'\n');
    let number = lines.find_map(|line| line.strip_prefix(b"TracerPid:"))?;
    let number: u32 = std::str::from_utf8(number).ok()?.trim().parse().ok()?;
    Some(number).filter(|number| *number != 0)
}

/// The times at which threads last found that no process traces them, for threads that run many
/// short jobs. If two threads share an entry, each overwrites the other's, and looks again.
struct Untraced([AtomicU64; 16]);

static UNTRACED: Untraced = Untraced([const { AtomicU64::new(0) }; 16]);

impl Untraced {
    /// An entry has the number of the thread, and 32 bits of a time in units of 2^20 ns.
    const UNIT: u32 = 20;

    fn note(&self, thread: u32, now_ns: u64, is_traced: bool) {
        let time = u64::from((now_ns >> Self::UNIT) as u32);
        let entry = if is_traced { 0 } else { u64::from(thread) << 32 | time };
        self.0[thread as usize % self.0.len()].store(entry, Relaxed);
    }

    /// The time of a thread's last look, if that is not too long ago.
    fn last(&self, thread: u32, now_ns: u64) -> Option<u64> {
        let entry = self.0[thread as usize % self.0.len()].load(Relaxed);
        let units = ((now_ns >> Self::UNIT) as u32).wrapping_sub(entry as u32);
        let seen_ns = (now_ns >> Self::UNIT).checked_sub(units.into())? << Self::UNIT;
        (entry >> 32 == thread.into() && now_ns - seen_ns < EVERY_NS).then_some(seen_ns)
    }
}

/// The number of the calling thread.
fn own_number() -> u32 {
    // SAFETY: the call takes no arguments.
    unsafe { libc::gettid() as u32 }
}

/// A thread's knowledge of its tracer. The thread looks between areas, and never in a window.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    seen_ns: Option<u64>,
    tracer: Option<u32>,
    /// Whether the thread outlives the job.
    lasts: bool,
}

impl Watch {
    /// For a thread that outlives the job: it may have looked in the last one.
    pub(crate) fn of_lasting_thread(now_ns: u64) -> Watch {
        let seen_ns = UNTRACED.last(own_number(), now_ns);
        Watch { seen_ns, tracer: None, lasts: true }
    }

    /// The process that traces the calling thread, as far as is known at `now_ns`. The first call
    /// looks, and then each call that comes [`EVERY_NS`] after the last look. While the thread is
    /// traced, each call looks, which costs little beside the stops: so the job's own engine goes on
    /// as soon as the tracer is gone.
    pub(crate) fn tracer(
        &mut self,
        now_ns: u64,
        look: impl FnOnce() -> Option<u32>,
    ) -> Option<u32> {
        let is_old = self.seen_ns.is_none_or(|seen| now_ns.saturating_sub(seen) >= EVERY_NS);
        if is_old || self.tracer.is_some() {
            (self.seen_ns, self.tracer) = (Some(now_ns), look());
            if self.lasts {
                UNTRACED.note(own_number(), now_ns, self.tracer.is_some());
            }
        }
        self.last()
    }

    /// The process that traced the thread at the last look.
    pub(crate) fn last(&self) -> Option<u32> {
        self.tracer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_the_tracer_is_found() {
        let status =
            |tracer| format!("Name:\ta\\nTracerPid:\\t7\nState:\tS\nTracerPid:\t{tracer}\n");
        assert_eq!(tracer_in(status("0").as_bytes()), None);
        assert_eq!(tracer_in(status("4711").as_bytes()), Some(4711));
        assert_eq!(tracer_in(status("x").as_bytes()), None);
        assert_eq!(tracer_in(b"Name:\tx\n"), None);
        assert_eq!(tracer_in(b""), None);
    }

    #[test]
    fn what_a_thread_has_found_counts_for_its_next_job() {
        let untraced = Untraced([const { AtomicU64::new(0) }; 16]);
        // Also when the 32 bits overflow.
        for now_ns in [EVERY_NS, 5 << 40, (1 << 52) - 5, (1 << 52) + 5] {
            assert_eq!(untraced.last(7, now_ns), None);
            untraced.note(7, now_ns, false);
            let later_ns = now_ns + EVERY_NS / 2;
            let seen_ns = untraced.last(7, later_ns).unwrap();
            assert!((now_ns - (1 << 20)..=now_ns).contains(&seen_ns), "{seen_ns} and {now_ns}");
            assert_eq!(untraced.last(7, now_ns + EVERY_NS), None);
            // A thread with the same entry, and one with another.
            let of_others = (untraced.last(23, later_ns), untraced.last(8, later_ns));
            assert_eq!(of_others, (None, None), "a thread goes by another one's look");
            untraced.note(7, later_ns, true);
            assert_eq!(untraced.last(7, later_ns), None);
        }
    }

    #[test]
    fn who_is_not_traced_looks_seldom_and_who_is_traced_looks_each_time() {
        let mut watch = Watch::default();
        let unasked = || -> Option<u32> { panic!("a look too many") };
        assert_eq!(watch.tracer(5, || None), None);
        assert_eq!(watch.tracer(4 + EVERY_NS, unasked), None);
        assert_eq!(watch.tracer(5 + EVERY_NS, || Some(7)), Some(7));
        assert_eq!(watch.last(), Some(7));
        assert_eq!(watch.tracer(6 + EVERY_NS, || Some(8)), Some(8));
        assert_eq!(watch.tracer(7 + EVERY_NS, || None), None, "it has gone");
        assert_eq!(watch.tracer(8 + EVERY_NS, unasked), None);
    }
}
