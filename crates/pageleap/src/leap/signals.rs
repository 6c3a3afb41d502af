//! Whether a job may move areas by an engine that raises signals: the process must have the
//! library's SIGSEGV handler, and no thread may block the signal.

use std::sync::OnceLock;

use crate::backend::{Backend, Call, Errno};
use crate::engine::fault;
use crate::error::Error;
use crate::job::area::Reason;

/// The state of signals, as a job has found it.
#[derive(Default)]
pub(super) struct Signals {
    /// The thread that blocks SIGSEGV, as an error, once that has been checked: a fault would kill
    /// it.
    blocked: OnceLock<Option<Error>>,
    /// The problem of the handler, once an area has stayed because of it.
    replaced: OnceLock<Error>,
}

impl Signals {
    /// Checks whether a thread blocks SIGSEGV, the first time. A thread counts only if it still
    /// blocks the signal a second later, so the job makes this check when it needs the result, and
    /// not at its start.
    pub(super) fn look_for_threads_that_block(&self, backend: &dyn Backend) -> Option<&Error> {
        let look = || {
            let host = backend.is_host_memory();
            host.then(fault::check_no_thread_blocks_sigsegv).and_then(Result::err)
        };
        self.blocked.get_or_init(look).as_ref()
    }

    /// Whether an engine may raise signals now. The kernel would kill a writer that blocks the
    /// signal, and another handler than the library's would end the process.
    pub(super) fn may_be_raised(&self, backend: &dyn Backend) -> bool {
        !self.is_replaced(backend) && self.look_for_threads_that_block(backend).is_none()
    }

    /// Whether another handler is installed. Checked each time, because the program may install one
    /// at any moment.
    fn is_replaced(&self, backend: &dyn Backend) -> bool {
        let in_place = if backend.is_host_memory() { fault::is_in_place() } else { Ok(()) };
        let Err(error) = in_place else { return false };
        self.replaced.get_or_init(|| error);
        true
    }

    /// Why an attempt by an engine that raises signals was not made.
    pub(super) fn why_not(&self, call: Call) -> Reason {
        match self.blocked.get() {
            _ if self.replaced.get().is_some() => Reason::HandlerReplaced,
            Some(Some(_)) => Reason::SignalBlocked,
            _ => Reason::Refused(call, Errno(libc::EDEADLK)),
        }
    }

    /// The error for pages that stay for such a reason; `None` for other reasons.
    pub(super) fn error(&self, why: Reason) -> Option<Error> {
        match why {
            Reason::HandlerReplaced => self.replaced.get().cloned(),
            Reason::SignalBlocked => self.blocked.get().cloned().flatten(),
            _ => None,
        }
    }
}
