//! The state of an area while it is being migrated, and the rules by which the migrator and
//! faulting writers change it.
//!
//! A migrating worker owns one [`Slot`]. While the worker moves an area, the slot holds the area's
//! addresses and phase. A thread whose access faults looks up the address in the [`SlotTable`] and
//! does what the phase asks for.
//!
//! `docs/protocol.md`, section 2.1, draws the phases, says who may leave each of them, and has the
//! claims S1 to S3 about these steps. The rule that other protocols lack: when a writer opens the
//! area and the migrator closes it, exactly one compare-and-swap succeeds. If the migrator only
//! checked a flag, a writer could open the area between that check and the remap, and its write
//! would be lost.
//!
//! The word carries a generation, which each publish raises. So a thread that slept through several
//! attempts neither acts on a later attempt nor waits for it.

use crate::backend::{Backend, Errno, Prot};
use crate::sync::{
    AtomicU32, AtomicU64, AtomicUsize, Ordering, UnsafeCell, WaitWord, array_of, const_unless_loom,
};

use super::waits::WaitCounters;
use crate::engine::crew::Crew;
use crate::engine::notes::WriteNotes;

/// Bits of the word that hold the phase. The generation lies above them.
const PHASE_BITS: u32 = 3;
const PHASE_MASK: u64 = (1 << PHASE_BITS) - 1;

/// Where the attempt on an area stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum SlotPhase {
    /// No attempt.
    Idle = 0,
    /// Only the migrator changes mappings of the area. A thread that faults sleeps until the phase
    /// changes.
    Closed = 1,
    /// The area is read-only, and is being copied.
    Tracking = 2,
    /// A writer has won the right to open the area, and is making it writable.
    Opening = 3,
    /// The area is writable again; the copy is worthless.
    Open = 4,
}

/// One value of a slot's word: generation and phase.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(u64);

impl Word {
    pub(crate) fn phase(self) -> SlotPhase {
        match self.0 & PHASE_MASK {
            0 => SlotPhase::Idle,
            1 => SlotPhase::Closed,
            2 => SlotPhase::Tracking,
            3 => SlotPhase::Opening,
            _ => SlotPhase::Open,
        }
    }

    fn with(self, phase: SlotPhase) -> Word {
        Word(self.0 & !PHASE_MASK | phase as u64)
    }

    fn next_generation(self, phase: SlotPhase) -> Word {
        Word((self.0 & !PHASE_MASK).wrapping_add(1 << PHASE_BITS) | phase as u64)
    }
}

/// The addresses of one attempt, and the access that the user has set on them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) addr: usize,
    pub(crate) len: usize,
    pub(crate) prot: Prot,
}

/// How [`Slot::close`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Close {
    /// The copy is complete and no write was possible since it began: commit it.
    Closed,
    /// A writer has opened the area: the copy is worthless, the area is writable.
    Opened,
    /// A writer wanted to open the area, but its `mprotect` failed, perhaps after its side effect.
    /// The area is closed, the copy is worthless, and writers wait.
    HandedOver,
}

/// State of one worker's current attempt, shared with every thread that may fault.
pub(crate) struct Slot {
    word: WaitWord,
    start: AtomicUsize,
    len: AtomicUsize,
    prot: AtomicU32,
    /// The job's backend, for the writer that opens the area. `publish` writes it while the slot is
    /// idle. Only the thread whose compare-and-swap entered `Opening` reads it, and the migrator
    /// does not go on before that thread has left `Opening`.
    backend: UnsafeCell<Option<*const dyn Backend>>,
    /// How long faulting threads waited.
    pub(crate) waits: WaitCounters,
    /// The dirty pages of `wp-sync`. They lie in the slot and not on the heap, which may be frozen.
    pub(crate) notes: WriteNotes,
    /// The threads that copy with the worker. They lie here for the same reason.
    pub(crate) crew: Crew,
}

// SAFETY: `backend` is the only field without its own synchronisation. One thread writes it while
// the word is Idle, and one thread reads it in Opening. `publish` releases the word and `covering`
// acquires it: this orders the write before the read. The opener releases the word and the migrator
// acquires it: this orders the read before the next write. The pointee is `Send + Sync`.
unsafe impl Sync for Slot {}
// SAFETY: nothing in a slot belongs to a thread.
unsafe impl Send for Slot {}

impl Slot {
    const_unless_loom! {
        pub(crate) fn new() -> Self {
            Slot {
                word: WaitWord::new(0),
                start: AtomicUsize::new(0),
                len: AtomicUsize::new(0),
                prot: AtomicU32::new(0),
                backend: UnsafeCell::new(None),
                waits: WaitCounters::new(),
                notes: WriteNotes::new(),
                crew: Crew::new(),
            }
        }
    }

    fn load(&self) -> Word {
        Word(self.word.load())
    }

    fn change(&self, to: Word) {
        self.word.set_and_wake(to.0);
    }

    /// Sleeps while the word is `seen`. May return early.
    pub(super) fn sleep(&self, seen: Word) {
        self.word.wait_while(seen.0);
    }

    // Migrator's side
    // ---------------------------------------------------------------------------------------------

    /// Announces an attempt, in phase Closed: from now on threads that fault in `span` wait for it.
    /// The call must come before the first call that forbids access to the span.
    ///
    /// # Safety
    /// `backend` must stay valid until [`Slot::retire`].
    pub(crate) unsafe fn publish(
        &self,
        epoch: &AtomicU64,
        span: &Span,
        backend: *const dyn Backend,
    ) {
        let word = self.load();
        debug_assert_eq!(word.phase(), SlotPhase::Idle, "a slot serves one attempt at a time");
        // Relaxed: a thread that sees the new generation sees these fields, because `change`
        // releases the word. A thread that sees the old generation with these fields may decide
        // wrongly, but does no harm. It opens nothing, because the word has changed, and it
        // declares no fault foreign, because the epoch has changed.
        self.start.store(span.addr, Ordering::Relaxed);
        self.len.store(span.len, Ordering::Relaxed);
        self.prot.store(span.prot.0 as u32, Ordering::Relaxed);
        // SAFETY: the word is Idle, so no thread can be in Opening and read the cell (see `Sync`).
        self.backend.with_mut(|cell| unsafe { *cell = Some(backend) });
        self.change(word.next_generation(SlotPhase::Closed));
        // After the word, and before the first protection change; see `SlotTable::resolve`.
        // Release: a thread that sees the new epoch sees the word.
        epoch.fetch_add(1, Ordering::Release);
    }

    /// Lets writers interrupt the attempt from now on. The span must already be read-only.
    /// Otherwise a writer could open the area before our own `mprotect` protects it, and would then
    /// fault again in a phase in which no thread opens the area any more.
    pub(crate) fn track(&self) {
        self.change(self.load().with(SlotPhase::Tracking));
    }

    /// Whether no writer has interrupted the attempt yet. This is only a hint, to stop copying
    /// early.
    pub(crate) fn is_undisturbed(&self) -> bool {
        matches!(self.load().phase(), SlotPhase::Tracking | SlotPhase::Closed)
    }

    /// Closes the area for the commit, unless a writer was faster.
    pub(crate) fn close(&self) -> Close {
        let tracking = self.load().with(SlotPhase::Tracking);
        let closed = tracking.with(SlotPhase::Closed);
        // The exchange that makes the paper's protocol correct.
        if self.word.exchange(tracking.0, closed.0) { Close::Closed } else { self.await_opener() }
    }

    /// Waits until the writer that is opening the area has finished its call.
    fn await_opener(&self) -> Close {
        loop {
            let word = self.load();
            match word.phase() {
                SlotPhase::Opening => self.sleep(word),
                SlotPhase::Open => return Close::Opened,
                SlotPhase::Closed => return Close::HandedOver,
                SlotPhase::Idle | SlotPhase::Tracking => {
                    unreachable!("only the opener leaves Opening")
                }
            }
        }
    }

    /// Ends the attempt: the span is fully accessible again, through old or new frames. Wakes all
    /// sleepers.
    pub(crate) fn retire(&self) {
        self.change(self.load().with(SlotPhase::Idle));
    }

    /// Number of threads that sleep on this slot, are about to sleep, or have just woken.
    pub(crate) fn sleepers(&self) -> u32 {
        self.word.sleepers()
    }

    // Writer's side
    // ---------------------------------------------------------------------------------------------

    /// The word, if the slot's attempt covers `addr`. If the attempt ends meanwhile, the answer may
    /// be wrong in both directions (see `publish`).
    pub(super) fn covering(&self, addr: usize) -> Option<Word> {
        let word = self.load();
        let covers = word.phase() != SlotPhase::Idle
            && addr.wrapping_sub(self.start.load(Ordering::Relaxed))
                < self.len.load(Ordering::Relaxed);
        covers.then_some(word)
    }

    /// A writer's side of the race with `close`: makes the area writable again, if the attempt of
    /// `seen` is still current.
    fn open(&self, seen: Word) {
        let opening = seen.with(SlotPhase::Opening);
        if !self.word.exchange(seen.0, opening.0) {
            return; // somebody else was faster; look again
        }
        let span = Span {
            addr: self.start.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
            prot: Prot(self.prot.load(Ordering::Relaxed) as i32),
        };
        self.waits.count_opening();
        let opened: Result<(), Errno> = self.backend.with(|cell| {
            // SAFETY: we entered Opening, so only we read the cell. The attempt, and with it the
            // backend, lives until we leave Opening. The span belongs to a region under migration,
            // and its users expect that access is given back.
            unsafe {
                match *cell {
                    Some(backend) => (*backend).protect(span.addr, span.len, span.prot),
                    None => Err(Errno(0)),
                }
            }
        });
        // The last step for this attempt: now the migrator may go on. Nobody else leaves Opening,
        // so the exchange succeeds.
        let next = if opened.is_ok() { SlotPhase::Open } else { SlotPhase::Closed };
        if self.word.exchange(opening.0, opening.with(next).0) {
            self.word.wake();
        }
    }
}

/// The handler's decision about a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultVerdict {
    /// A migration held up the access: repeat it.
    Retry,
    /// The access is not allowed, with or without a migration: leave it to the previous handler.
    Foreign,
}

/// All slots of the process. A real process has one table; a model checker has one per execution.
pub(crate) struct SlotTable<const N: usize> {
    pub(crate) slots: [Slot; N],
    /// Counts publishes.
    pub(crate) epoch: AtomicU64,
    /// All slots that have ever been claimed lie below this index, so searches end here.
    high: AtomicUsize,
    claimed: [AtomicU32; N],
}

impl<const N: usize> SlotTable<N> {
    const_unless_loom! {
        pub(crate) fn new() -> Self {
            SlotTable {
                slots: array_of![Slot::new(); N],
                epoch: AtomicU64::new(0),
                high: AtomicUsize::new(0),
                claimed: array_of![AtomicU32::new(0); N],
            }
        }
    }

    /// Takes a free slot for a worker.
    pub(crate) fn claim(&self) -> Option<usize> {
        let free =
            |c: &AtomicU32| c.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let index = self.claimed.iter().position(free)?;
        // Before any publish in this slot, hence visible to each thread that sees the epoch that
        // the publish raised.
        self.high.fetch_max(index + 1, Ordering::Relaxed);
        Some(index)
    }

    /// Makes all slots free and idle again, in a child made by `fork`. Async-signal-safe.
    #[cfg(not(loom))]
    pub(crate) fn forget(&self) {
        self.high.store(0, Ordering::Relaxed);
        self.slots.iter().for_each(|slot| {
            slot.word.reset();
            slot.notes.reset();
            slot.crew.reset();
        });
        self.claimed.iter().for_each(|claimed| claimed.store(0, Ordering::Relaxed));
    }

    /// Gives a slot back. The slot must be idle.
    pub(crate) fn release(&self, index: usize) {
        debug_assert_eq!(self.slots[index].load().phase(), SlotPhase::Idle);
        self.claimed[index].store(0, Ordering::Release);
    }

    /// Decides about a load or store at `addr` that faulted. `accessible` asks the kernel whether
    /// the same access would succeed now. It is called only if no attempt covers the address.
    /// `held_up` gets the slot whose attempt stood in the way.
    ///
    /// A fault without a covering slot is either a left-over or foreign. A left-over's attempt is
    /// over, and the access will succeed now. The fault is foreign only if the kernel still refuses
    /// the access *and* no attempt was published since before the search. Suppose that an attempt
    /// published earlier caused the refusal. Then the search would have found that attempt in its
    /// slot, because an attempt is retired only after access has been given back.
    pub(crate) fn resolve(
        &self,
        addr: usize,
        accessible: &dyn Fn() -> bool,
        held_up: &mut dyn FnMut(&Slot),
    ) -> FaultVerdict {
        loop {
            // Acquire: the search sees the slots as they were at this epoch, or later.
            let epoch = self.epoch.load(Ordering::Acquire);
            let high = self.high.load(Ordering::Relaxed);
            let found = self.slots[..high]
                .iter()
                .find_map(|slot| slot.covering(addr).map(|word| (slot, word)));
            if let Some((slot, word)) = found {
                match word.phase() {
                    // Only spans that the user may write are tracked, so this fault is not foreign.
                    SlotPhase::Tracking => slot.open(word),
                    SlotPhase::Closed | SlotPhase::Opening => {
                        slot.waits.count_waiter();
                        slot.sleep(word);
                    }
                    SlotPhase::Open | SlotPhase::Idle => {}
                }
                held_up(slot);
                return FaultVerdict::Retry;
            }
            if accessible() {
                return FaultVerdict::Retry;
            }
            // Relaxed: if an attempt made the kernel refuse, the kernel's lock orders its publish
            // before this load.
            if self.epoch.load(Ordering::Relaxed) == epoch {
                return FaultVerdict::Foreign;
            }
        }
    }
}
