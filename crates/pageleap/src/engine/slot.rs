//! The state of an area while it is being migrated, and the rules by which the migrator and
//! faulting writers change it.
//!
//! A migrating worker owns one [`Slot`]. While it works on an area, the slot says which addresses
//! are concerned and in which phase they are. A thread whose access faults looks its address up in
//! the [`SlotTable`] and does what the phase asks for.
//!
//! ```text
//!            publish                track                     close
//!   Idle ──────────────► Closed ───────────────► Tracking ───────────────► Closed ──► (commit) ──┐
//!    ▲  (start, len,       │    page tables are     │   CAS, migrator          ▲                 │
//!    │   generation + 1)   │    read-only by now    │                          │ protect failed  │
//!    │                     │                        │ CAS, writer              │                 │
//!    │                     │ held: no tracking,     ▼                          │                 │
//!    │                     │ copy, commit        Opening ──────────────────────┘                 │
//!    │                     │                        │ writer has made the area writable          │
//!    │                     │                        ▼                                            │
//!    └─────────────────────┴────── retire ◄───── Open ◄──────────────────────────────────────────┘
//! ```
//!
//! * **Closed**: only the migrator changes mappings of the area. A faulting thread sleeps until the
//!   phase changes.
//! * **Tracking**: the area is read-only and is being copied. A faulting writer takes it to
//!   *Opening*; nobody else leaves this phase except the migrator, by [`Slot::close`]. Exactly one
//!   of the two compare-and-swaps succeeds: this is what protocols without it get wrong (a writer
//!   that is let in between the dirty check and the remap loses its write).
//! * **Opening**: only that writer changes mappings of the area. The migrator waits for it, so a
//!   late `mprotect` cannot hit a later attempt.
//! * **Open**: writable again; the copy is worthless. The migrator retires the slot and plans a
//!   retry.
//!
//! The word carries a generation, raised by each publish, so that a thread that slept through
//! several attempts neither acts on a later one nor waits for it.

use crate::backend::{Backend, Errno, Prot};
use crate::sync::{
    AtomicU32, AtomicU64, AtomicUsize, Ordering, UnsafeCell, WaitWord, array_of, const_unless_loom,
};

use super::waits::WaitCounters;
use crate::engine::crew::Crew;
use crate::engine::notes::WriteNotes;

/// Bits of the word that hold the phase; the generation is above.
const PHASE_BITS: u32 = 3;
const PHASE_MASK: u64 = (1 << PHASE_BITS) - 1;

/// Where the attempt on an area stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Phase {
    Idle = 0,
    Closed = 1,
    Tracking = 2,
    Opening = 3,
    Open = 4,
}

/// One value of a slot's word: generation and phase.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(u64);

impl Word {
    pub(crate) fn phase(self) -> Phase {
        match self.0 & PHASE_MASK {
            0 => Phase::Idle,
            1 => Phase::Closed,
            2 => Phase::Tracking,
            3 => Phase::Opening,
            _ => Phase::Open,
        }
    }

    fn with(self, phase: Phase) -> Word {
        Word(self.0 & !PHASE_MASK | phase as u64)
    }

    fn next_generation(self, phase: Phase) -> Word {
        Word((self.0 & !PHASE_MASK).wrapping_add(1 << PHASE_BITS) | phase as u64)
    }
}

/// The addresses of one attempt and the access that the user has given them.
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
    /// A writer was let in: the copy is worthless, the area is writable.
    Opened,
    /// A writer wanted in, and the call that should have let it in failed, perhaps after its side
    /// effect. The area is closed, the copy is worthless, and writers wait.
    HandedOver,
}

/// State of one worker's current attempt. Shared with every thread that may fault.
pub(crate) struct Slot {
    word: WaitWord,
    start: AtomicUsize,
    len: AtomicUsize,
    prot: AtomicU32,
    /// The job's backend, for the writer that opens the area. Written by `publish` while the slot
    /// is idle; read only by the thread whose compare-and-swap entered `Opening`, and the migrator
    /// does not go on before that thread has left it.
    backend: UnsafeCell<Option<*const dyn Backend>>,
    /// How long faulting threads were held up.
    pub(crate) waits: WaitCounters,
    /// Here, because it must not lie on the heap, which may be what is frozen.
    pub(crate) notes: WriteNotes,
    /// Who copies with its worker. Here for the same reason.
    pub(crate) crew: Crew,
}

// SAFETY: `backend` is the only field without its own synchronisation. It is written while the word
// is Idle and read in Opening, by one thread each; the word, released by `publish` and acquired by
// `covering`, orders the write before the read, and, released by the opener and acquired by the
// migrator, the read before the next write. The pointee is `Send + Sync`.
unsafe impl Sync for Slot {}
// SAFETY: nothing in it belongs to a thread.
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

    /// Announces an attempt, closed: from now on threads that fault in `span` wait for it. Must
    /// come before the first call that forbids access to the span.
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
        debug_assert_eq!(word.phase(), Phase::Idle, "a slot serves one attempt at a time");
        // Relaxed: who sees the new generation sees these (`change` releases). Who sees the old one
        // and these fields decides wrongly, and finds out: it opens nothing, because the word has
        // changed, and declares nothing foreign, because the epoch has.
        self.start.store(span.addr, Ordering::Relaxed);
        self.len.store(span.len, Ordering::Relaxed);
        self.prot.store(span.prot.0 as u32, Ordering::Relaxed);
        // SAFETY: the word is Idle, so no thread can be in Opening and read the cell (see `Sync`).
        self.backend.with_mut(|cell| unsafe { *cell = Some(backend) });
        self.change(word.next_generation(Phase::Closed));
        // After the word, and before the first protection change; see `SlotTable::resolve`.
        // Release: who sees the new epoch sees the word.
        epoch.fetch_add(1, Ordering::Release);
    }

    /// Lets writers interrupt the attempt from now on. The span must be read-only by now: a writer
    /// that is let in earlier would be shut out again by our own protection change, with nobody
    /// left to let it in.
    pub(crate) fn track(&self) {
        self.change(self.load().with(Phase::Tracking));
    }

    /// Whether no writer has interrupted yet: only a hint, to stop copying early.
    pub(crate) fn is_undisturbed(&self) -> bool {
        matches!(self.load().phase(), Phase::Tracking | Phase::Closed)
    }

    /// Shuts the area for the commit, unless a writer was faster.
    pub(crate) fn close(&self) -> Close {
        let tracking = self.load().with(Phase::Tracking);
        let closed = tracking.with(Phase::Closed);
        // The exchange that makes the paper's protocol correct.
        if self.word.exchange(tracking.0, closed.0) { Close::Closed } else { self.await_opener() }
    }

    /// Waits until the writer that is opening the area has finished its call.
    fn await_opener(&self) -> Close {
        loop {
            let word = self.load();
            match word.phase() {
                Phase::Opening => self.sleep(word),
                Phase::Open => return Close::Opened,
                Phase::Closed => return Close::HandedOver,
                Phase::Idle | Phase::Tracking => unreachable!("only the opener leaves Opening"),
            }
        }
    }

    /// Ends the attempt: the span is fully accessible again, through old or new frames. Wakes
    /// everybody.
    pub(crate) fn retire(&self) {
        self.change(self.load().with(Phase::Idle));
    }

    /// Threads asleep on this slot, or just about to be or just awake.
    pub(crate) fn sleepers(&self) -> u32 {
        self.word.sleepers()
    }

    // Writer's side
    // ---------------------------------------------------------------------------------------------

    /// The word, if the slot's attempt covers `addr`. If the attempt ends meanwhile, the answer may
    /// be wrong either way (see `publish`).
    pub(super) fn covering(&self, addr: usize) -> Option<Word> {
        let word = self.load();
        let covers = word.phase() != Phase::Idle
            && addr.wrapping_sub(self.start.load(Ordering::Relaxed))
                < self.len.load(Ordering::Relaxed);
        covers.then_some(word)
    }

    /// A writer's attempt to enter: makes the area writable again if it is still the attempt that
    /// `seen` belongs to.
    fn open(&self, seen: Word) {
        let opening = seen.with(Phase::Opening);
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
            // SAFETY: we entered Opening, so the cell is ours to read and the attempt, hence the
            // backend, lives until we leave it; the span belongs to a region under migration, and
            // giving access back is what its users expect.
            unsafe {
                match *cell {
                    Some(backend) => (*backend).protect(span.addr, span.len, span.prot),
                    None => Err(Errno(0)),
                }
            }
        });
        // The last thing done for this attempt: now the migrator may go on. Nobody else leaves
        // Opening, so this succeeds.
        let next = if opened.is_ok() { Phase::Open } else { Phase::Closed };
        if self.word.exchange(opening.0, opening.with(next).0) {
            self.word.wake();
        }
    }
}

/// What a faulting thread is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The access was held up by a migration: repeat it.
    Retry,
    /// The access is not allowed, migration or not: leave it to whoever handled such faults before.
    Foreign,
}

/// All slots of the process (one table in real life, one per execution in a model checker).
pub(crate) struct SlotTable<const N: usize> {
    pub(crate) slots: [Slot; N],
    /// Counts publishes.
    pub(crate) epoch: AtomicU64,
    /// Slots that have ever been claimed lie below this index: no need to look further.
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
        // Before any publish in this slot, hence visible to whoever sees the epoch that the publish
        // raised.
        self.high.fetch_max(index + 1, Ordering::Relaxed);
        Some(index)
    }

    /// Looks no further, in a child made by `fork`. Async-signal-safe.
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

    /// Gives a slot back. It must be idle.
    pub(crate) fn release(&self, index: usize) {
        debug_assert_eq!(self.slots[index].load().phase(), Phase::Idle);
        self.claimed[index].store(0, Ordering::Release);
    }

    /// Decides about a load or store at `addr` that faulted. `accessible` asks the kernel whether
    /// the same access would succeed now; it is asked only when no attempt covers the address.
    /// `held_up` gets the slot whose attempt stood in the way.
    ///
    /// A fault for which no slot is found is either a left-over (the attempt that caused it is
    /// over, and the access will succeed now) or foreign. It is foreign only if the kernel still
    /// refuses it *and* no attempt was published since before the slots were looked at: a refusal
    /// caused by an attempt published earlier would mean that this attempt is still visible in its
    /// slot, for it is retired only after access has been given back.
    pub(crate) fn resolve(
        &self,
        addr: usize,
        accessible: &dyn Fn() -> bool,
        held_up: &mut dyn FnMut(&Slot),
    ) -> Verdict {
        loop {
            // Acquire: the slots are looked at as they were when the epoch was, or later.
            let epoch = self.epoch.load(Ordering::Acquire);
            let high = self.high.load(Ordering::Relaxed);
            let found = self.slots[..high]
                .iter()
                .find_map(|slot| slot.covering(addr).map(|word| (slot, word)));
            if let Some((slot, word)) = found {
                match word.phase() {
                    // Only spans that the user may write are ever tracked, so this is no foreign
                    // fault.
                    Phase::Tracking => slot.open(word),
                    Phase::Closed | Phase::Opening => slot.sleep(word),
                    Phase::Open | Phase::Idle => {}
                }
                held_up(slot);
                return Verdict::Retry;
            }
            if accessible() {
                return Verdict::Retry;
            }
            // Relaxed: if an attempt made the kernel refuse, the kernel's lock orders its publish
            // before this load.
            if self.epoch.load(Ordering::Relaxed) == epoch {
                return Verdict::Foreign;
            }
        }
    }
}
