//! A processor of the modelled machine. When a load or store faults, it runs the decision of the
//! real SIGSEGV handler, then repeats the access.

use super::slot::{FaultVerdict, SlotTable};
use crate::backend::{Backend, Model};
use crate::units::BASE_PAGE;

/// The state with which a thread of the program accesses modelled memory.
#[derive(Clone, Copy)]
pub(crate) struct Processor<'a, const N: usize> {
    pub(crate) model: &'a Model,
    /// The slots of all workers that may be migrating.
    pub(crate) table: &'a SlotTable<N>,
    /// The address of a view, and that of its region.
    pub(crate) view: Option<(usize, usize)>,
}

/// More bytes than any region of a test has.
const REGION: usize = 1 << 20;

impl<const N: usize> Processor<'_, N> {
    /// Stores, and repeats the store until it no longer faults.
    pub(crate) fn store(self, addr: usize, value: u64) {
        while self.model.store(addr, value).is_err() {
            self.fault(addr, true);
        }
    }

    /// Loads, and repeats the load until it no longer faults.
    pub(crate) fn load(self, addr: usize) -> u64 {
        loop {
            match self.model.load(addr) {
                Ok(value) => return value,
                Err(_) => self.fault(addr, false),
            }
        }
    }

    /// Runs the handler's decision about a fault at an address that the program may access.
    pub(crate) fn fault(self, addr: usize, write: bool) {
        let page = addr / BASE_PAGE * BASE_PAGE;
        // SAFETY: populating changes neither contents nor access.
        let accessible = || unsafe { self.model.populate(page, BASE_PAGE, write) }.is_ok();
        let home = match self.view {
            Some((view, region)) if addr.wrapping_sub(view) < REGION => region + (addr - view),
            _ => addr,
        };
        let verdict = self.table.resolve(home, &accessible, &mut |_| {});
        assert_eq!(
            verdict,
            FaultVerdict::Retry,
            "a fault that migration caused was taken for somebody else's"
        );
    }
}
