//! Fault injection: the Nth mapping call fails, before its side effect, after it, or half-way.
//!
//! The calls are numbered from 1 in the order in which they arrive, from all threads and from the
//! fault handler. Tests first run a job with [`FailAt::never`] to count its calls, and then once
//! for each number and each mode.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::interpose::{Interposer, Part, Request};
use super::{Backend, Call, Errno};

/// When the chosen call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailMode {
    /// It does nothing and reports an error.
    Before,
    /// It does its work and then reports an error.
    After,
    /// It does part of its work and then reports an error: a replacing call has already unmapped
    /// its target, any other has done the first half of the range.
    Partial,
}

/// A backend whose Nth counted call fails.
pub struct FailAt {
    inner: Arc<dyn Backend>,
    /// The number of the call that fails; 0: no call fails.
    at: AtomicU64,
    mode: FailMode,
    errno: Errno,
    seen: AtomicU64,
    armed: AtomicBool,
    struck: AtomicU64,
}

impl FailAt {
    /// Fails the `at`-th call after [`FailAt::arm`].
    pub fn new(inner: Arc<dyn Backend>, at: u64, mode: FailMode, errno: Errno) -> Self {
        let (at, seen, struck) = (AtomicU64::new(at), AtomicU64::new(0), AtomicU64::new(0));
        FailAt { inner, at, mode, errno, seen, armed: AtomicBool::new(false), struck }
    }

    /// Counts the calls, and lets all of them succeed.
    pub fn never(inner: Arc<dyn Backend>) -> Self {
        FailAt::new(inner, 0, FailMode::Before, Errno(libc::ENOMEM))
    }

    /// Starts to count. Earlier calls (which made pools and regions) have no number.
    pub fn arm(&self) {
        self.seen.store(0, Relaxed);
        self.armed.store(true, Relaxed);
    }

    /// Stops counting and failing.
    pub fn disarm(&self) {
        self.armed.store(false, Relaxed);
    }

    /// How many calls have arrived since [`FailAt::arm`].
    pub fn seen(&self) -> u64 {
        self.seen.load(Relaxed)
    }

    /// The call that was made to fail, if its turn has come.
    pub fn struck(&self) -> Option<Call> {
        match self.struck.load(Relaxed) {
            0 => None,
            n => Some(Call::ALL[n as usize - 1]),
        }
    }

    fn strikes(&self, call: Call) -> bool {
        if !self.armed.load(Relaxed) {
            return false;
        }
        let number = self.seen.fetch_add(1, Relaxed) + 1;
        let strikes = number == self.at.load(Relaxed);
        if strikes {
            self.struck.store(call as u64 + 1, Relaxed);
        }
        strikes
    }
}

// SAFETY: the call is made once at most, and its result is returned unless it is to fail.
unsafe impl Interposer for FailAt {
    fn inner(&self) -> &dyn Backend {
        &*self.inner
    }

    fn decide<T>(
        &self,
        request: &Request,
        mut make: impl FnMut(Part) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        if !self.strikes(request.call) {
            return make(Part::Whole);
        }
        match (self.mode, request.call) {
            // These undo what they have done before they report an error: a file that cannot be
            // sealed is closed, and so is a descriptor that cannot shake hands.
            (_, Call::CreateFile | Call::Reserve | Call::QueryNodes | Call::OpenTracker) => {}
            (FailMode::Before, _) => {}
            (FailMode::After, _) => {
                make(Part::Whole)?;
            }
            (FailMode::Partial, _) => {
                let _ = make(Part::Half);
            }
        }
        Err(self.errno)
    }
}
