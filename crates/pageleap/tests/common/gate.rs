//! A gate that holds a thread until another one lets it go on.

#![allow(dead_code)] // each test binary uses a part of it

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use crate::common::soon;

/// Closed until [`Gate::open`].
#[derive(Default)]
pub struct Gate {
    reached: AtomicBool,
    open: AtomicBool,
}

impl Gate {
    /// Holds the calling thread until the gate is open. If a test fails, nobody opens its gate:
    /// then the patience of [`soon`] ends the wait.
    pub fn pass(&self) {
        self.reached.store(true, SeqCst);
        soon(|| self.is_open());
    }

    /// Waits until a thread is held.
    pub fn wait_until_reached(&self) {
        assert!(soon(|| self.reached.load(SeqCst)), "no thread comes to the gate");
    }

    pub fn open(&self) {
        self.open.store(true, SeqCst);
    }

    pub fn is_open(&self) -> bool {
        self.open.load(SeqCst)
    }
}
