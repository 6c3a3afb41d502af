//! A backend that refuses those calls that a test's rule names.

#![allow(dead_code)] // each test binary uses a part of it

use std::sync::Arc;

pub use pageleap::backend::Request;
use pageleap::backend::{Backend, Errno, Interposer, Part};

type Rule = dyn Fn(&Request) -> Option<Errno> + Send + Sync;
type Watch = dyn Fn(usize) + Send + Sync;

/// Asks a rule before each mapping call. A refused call has no effect. The rule may run in a signal
/// handler, so it uses atomics only.
pub struct Refusing {
    inner: Arc<dyn Backend>,
    rule: Box<Rule>,
    before_copy: Box<Watch>,
}

impl Refusing {
    pub fn new(
        inner: Arc<dyn Backend>,
        rule: impl Fn(&Request) -> Option<Errno> + Send + Sync + 'static,
    ) -> Self {
        Refusing { inner, rule: Box::new(rule), before_copy: Box::new(|_| ()) }
    }

    /// Calls `watch` before each copy, with the address from which the bytes come. The copy waits.
    pub fn before_copy(self, watch: impl Fn(usize) + Send + Sync + 'static) -> Self {
        Refusing { before_copy: Box::new(watch), ..self }
    }
}

// SAFETY: each call is either made, once, or refused without effect.
unsafe impl Interposer for Refusing {
    fn inner(&self) -> &dyn Backend {
        &*self.inner
    }

    fn decide<T>(
        &self,
        request: &Request,
        mut make: impl FnMut(Part) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        (self.rule)(request).map_or_else(|| make(Part::Whole), Err)
    }

    fn before_copy(&self, _dst: usize, src: usize, _len: usize) {
        (self.before_copy)(src);
    }
}
