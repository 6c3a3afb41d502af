//! A backend that counts the mappings of pools after each call that changes mappings.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use pageleap::backend::{Backend, Call, Errno, Interposer, Linux, Part, Request};

use crate::common::pool_mappings;

/// Notes the most mappings that pools have had at a time.
///
/// The kernel takes several steps to list mappings, so that a list which another thread reads
/// beside a job may have mappings of different moments. Here the thread that has made a call also
/// reads the list, and no other thread changes a mapping meanwhile. So the peak follows from the
/// calls alone.
///
/// Not for jobs whose engine signals and whose region is written to: the signal handler of such a
/// job makes calls too, and must not lock or allocate.
#[derive(Default)]
pub struct Counting {
    /// One call at a time.
    turn: Mutex<()>,
    peak: AtomicUsize,
}

impl Counting {
    /// The peak since this was last asked.
    pub fn take_peak(&self) -> usize {
        self.peak.swap(0, Relaxed)
    }
}

/// Whether a call changes mappings. All others may run beside it; some wait for other threads, so
/// that they must.
fn changes_mappings(call: Call) -> bool {
    use Call::{Advise, Bind, Exchange, Lock, Map, Protect, Track, Untrack};
    let maps = matches!(call, Call::Reserve | Call::Release | Call::Vacate | Map | Exchange);
    maps || matches!(call, Protect | Advise | Lock | Bind | Track | Untrack)
}

// SAFETY: each call is made once.
unsafe impl Interposer for Counting {
    fn inner(&self) -> &dyn Backend {
        &Linux
    }

    fn decide<T>(
        &self,
        request: &Request,
        mut make: impl FnMut(Part) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        if !changes_mappings(request.call) {
            return make(Part::Whole);
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let made = make(Part::Whole);
        self.peak.fetch_max(pool_mappings().len(), Relaxed);
        made
    }
}

/// Such a backend, also as pools take it.
pub fn counting() -> (Arc<Counting>, Arc<dyn Backend>) {
    let counting = Arc::new(Counting::default());
    (counting.clone(), counting)
}
