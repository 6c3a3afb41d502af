//! Notices when the cpuset no longer allows the nodes to which a job moves something.

use std::collections::BTreeSet;

use crate::backend::Backend;
use crate::error::Error;
use crate::job::books::Books;
use crate::job::handle::Stop;
use crate::job::report::{Warning, WarningKind};
use crate::sync::{AtomicU64, Instant, Ordering};
use crate::units::NodeId;

/// How a job watches the cpuset.
pub(super) struct CpusetWatch {
    began: Instant,
    /// When a worker last looked, in nanoseconds since the job began.
    seen_ns: AtomicU64,
}

impl CpusetWatch {
    /// For a job that began then.
    pub(super) fn new(began: Instant) -> CpusetWatch {
        CpusetWatch { began, seen_ns: AtomicU64::new(0) }
    }

    /// Stops the job if the cpuset no longer allows one of the nodes. An administrator who changes
    /// the cpuset wants this process off that node. The kernel itself moves the pages that have
    /// already arrived there.
    pub(super) fn still_allows(
        &self,
        nodes: &BTreeSet<NodeId>,
        backend: &dyn Backend,
        books: Books<'_>,
    ) -> Result<(), Stop> {
        /// Where a seccomp filter refuses the cheap call, a check takes some 80 us.
        const EVERY_NS: u64 = 25_000_000;
        let now = self.began.elapsed().as_nanos() as u64;
        let seen = self.seen_ns.load(Ordering::Relaxed);
        let (word, relaxed) = (&self.seen_ns, Ordering::Relaxed);
        let mine =
            now >= seen + EVERY_NS && word.compare_exchange(seen, now, relaxed, relaxed).is_ok();
        if !mine {
            return Ok(());
        }
        match nodes.iter().find(|node| !backend.allows_node(node.0)) {
            None => Ok(()),
            Some(node) => {
                let text = Error::NodeNotAllowed { node: *node }.to_string();
                books.warn(Warning::new(WarningKind::Cpuset, text));
                Err(Stop::CpusetChanged)
            }
        }
    }
}
