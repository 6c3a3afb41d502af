//! A processor of the modelled machine: a load or store that faults goes through the real handler's
//! decision, and is repeated.

use super::slot::{SlotTable, Verdict};
use crate::backend::{Backend, Model};
use crate::units::BASE_PAGE;

/// What a thread of the program needs in order to touch modelled memory.
#[derive(Clone, Copy)]
pub(crate) struct Processor<'a, const N: usize> {
    pub(crate) model: &'a Model,
    /// The slots of those who may be migrating.
    pub(crate) table: &'a SlotTable<N>,
}

impl<const N: usize> Processor<'_, N> {
    /// A store, which faults as often as it must.
    pub(crate) fn store(self, addr: usize, value: u64) {
        while self.model.store(addr, value).is_err() {
            self.fault(addr, true);
        }
    }

    /// A load, which does the same.
    pub(crate) fn load(self, addr: usize) -> u64 {
        loop {
            match self.model.load(addr) {
                Ok(value) => return value,
                Err(_) => self.fault(addr, false),
            }
        }
    }

    /// What the handler does about a fault at an address that the program may access.
    pub(crate) fn fault(self, addr: usize, write: bool) {
        let page = addr / BASE_PAGE * BASE_PAGE;
        // SAFETY: asks, changes nothing.
        let accessible = || unsafe { self.model.populate(page, BASE_PAGE, write) }.is_ok();
        let verdict = self.table.resolve(addr, &accessible, &mut |_| {});
        assert_eq!(
            verdict,
            Verdict::Retry,
            "a fault that migration caused was taken for somebody else's"
        );
    }
}
