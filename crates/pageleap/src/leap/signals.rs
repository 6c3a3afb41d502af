//! Whether a job may move areas by an engine that raises signals: the process must have the
//! library's SIGSEGV handler, and no thread may block the signal.

use std::sync::OnceLock;

use crate::backend::{Backend, Call, Errno};
use crate::engine::fault;
use crate::error::Error;
use crate::job::area::Reason;

/// What a job has found out about signals.
#[derive(Default)]
pub(super) struct Signals {
    /// Why a thread would be killed by SIGSEGV, once that has been looked at.
    blocked: OnceLock<Option<Error>>,
    /// What is wrong with the handler, once an area has stayed because of it.
    replaced: OnceLock<Error>,
}

impl Signals {
    /// Looks whether a thread blocks SIGSEGV, the first time. A thread counts only if it still
    /// blocks the signal a second later, so the job makes this look when it needs to know, and not
    /// at its start.
    pub(super) fn look_for_threads_that_block(&self, backend: &dyn Backend) -> Option<&Error> {
        let look = || {
            let host = backend.is_host_memory();
            host.then(fault::check_no_thread_blocks_sigsegv).and_then(Result::err)
        };
        self.blocked.get_or_init(look).as_ref()
    }

    /// Whether an engine may raise signals now. A writer whose signal is blocked would be killed,
    /// and another handler than the library's would end the process.
    pub(super) fn may_be_raised(&self, backend: &dyn Backend) -> bool {
        !self.is_replaced(backend) && self.look_for_threads_that_block(backend).is_none()
    }

    /// Whether another handler is installed. Looked at each time, because the program may install
    /// one at any moment.
    fn is_replaced(&self, backend: &dyn Backend) -> bool {
        let in_place = if backend.is_host_memory() { fault::is_in_place() } else { Ok(()) };
        let Err(error) = in_place else { return false };
        self.replaced.get_or_init(|| error);
        true
    }

    /// Why an attempt was not made whose engine would have raised signals.
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
