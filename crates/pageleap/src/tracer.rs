//! Whether another process traces a thread of the library (`ptrace(2)`: strace, gdb, py-spy).
//!
//! A tracer stops the threads that it traces at each of their system calls, and between two stops
//! it may read their memory by `process_vm_readv`, which waits for pages like any other access.
//! If it reads an area that a thread of a job has closed, and has stopped that thread, each waits
//! for the other for ever. So while a job's threads are traced, the job closes areas only in ways
//! that let readers go on.
//!
//! **Which threads.** Only threads that end windows matter: workers, and the threads that read
//! messages for them. A thread looks at itself, because `/proc/self/status` tells of the main
//! thread only, and a tracer of the main thread alone (strace without `-f`) lets a job's threads go
//! on. One of them stands for all others of its job: a job starts its threads itself, so a tracer
//! that follows `clone` has all of them, and one that attaches to a process later attaches to all
//! of its threads before it reads their memory. A tracer that attaches to single threads by their
//! numbers is not covered.

use std::io::Read;

/// How often threads look that are not traced: a look takes some 10 us.
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

/// A thread's knowledge of its tracer. The thread looks between areas, and never in a window.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    seen_ns: Option<u64>,
    tracer: Option<u32>,
}

impl Watch {
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
