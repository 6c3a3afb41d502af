//! A crew: threads that copy one area together, for areas whose writers wait for the whole copy.
//!
//! One thread, the leader, publishes the bytes to copy and copies as well. It returns when all
//! bytes are copied and no helper copies any more.
//!
//! ```text
//!           leader                  leader
//!   shut ───────────► open ───────────────────► shut, some inside ──► shut
//!                     │  ▲                          │ helper
//!              helper ▼  │ helper                   ▼ (the last one wakes the leader)
//!                  one more inside               one less
//! ```
//!
//! A helper enters by a compare-and-swap of the *open* word, and the leader shuts the crew by
//! another one. So a helper that is late, or got no CPU for a while before it enters, never copies
//! bytes of an earlier call, and never delays the leader.
//!
//! The crew lies in a slot, because no thread of a job may access the heap between the freeze and
//! the commit.

use crate::backend::{Backend, CopyMethod, Haste};
#[cfg(not(loom))]
use crate::priority;
use crate::sync::{AtomicUsize, Ordering, WaitWord, const_unless_loom};

/// Bytes that a thread claims at a time. Their copy takes some 10 us.
#[cfg(not(any(loom, shuttle)))]
const PIECE: usize = 64 << 10;
#[cfg(any(loom, shuttle))]
const PIECE: usize = crate::units::BASE_PAGE;

/// The fewest bytes for which helpers are woken. A smaller copy ends before a helper has woken.
const LEAST: usize = 2 * PIECE;

const HELPERS_MASK: u64 = 0xff;

/// How often a thread polls the word before it sleeps on it: for some 50 us, as long as the system
/// calls between two areas take.
const LOOKS: u32 = if cfg!(any(loom, shuttle)) { 0 } else { 1500 };

// Bits of the word.
const OPEN: u64 = 1;
const ENDED: u64 = 1 << 1;
/// A thread of the program waits for the copy.
const URGENT: u64 = 1 << 2;
/// One helper that is inside.
const INSIDE: u64 = 1 << 3;
const INSIDE_MASK: u64 = 0xff * INSIDE;
/// Added for each copy, so that values do not repeat, except while helpers enter and leave.
const COPY: u64 = 1 << 11;

/// Bytes to copy.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) dst: usize,
    pub(crate) src: usize,
    pub(crate) len: usize,
    pub(crate) method: CopyMethod,
}

impl Piece {
    /// # Safety
    /// As [`Backend::copy`].
    pub(super) unsafe fn copy(self, backend: &dyn Backend) {
        // SAFETY: forwarded to the caller.
        unsafe { backend.copy(self.dst, self.src, self.len, self.method) };
    }
}

/// A crew, as the job hands it to its helpers' threads.
#[cfg(not(loom))]
#[derive(Clone, Copy)]
pub(crate) struct Team<'a> {
    pub(crate) crew: &'static Crew,
    /// The leader's backend.
    pub(crate) backend: &'a dyn Backend,
}

#[cfg(not(loom))]
impl Team<'_> {
    /// Runs the calling thread as a helper until [`Crew::end`]. In urgent copies it is raised
    /// (SCHED_FIFO), if that is allowed.
    ///
    /// A function of its own, and not a closure: captured variables and the job lie on the heap,
    /// which must not be read meanwhile because it may be frozen.
    #[inline(never)]
    pub(crate) fn help(self, number: usize) {
        let haste = self.backend.is_host_memory().then(|| {
            priority::run_shortly();
            priority::first()
        });
        // SAFETY: the backend of the job.
        unsafe { self.crew.help(self.backend, number, haste.flatten()) };
    }
}

/// Copies bytes.
type CopyPiece<'a> = dyn Fn(Piece) + 'a;

/// One worker's helpers.
pub(crate) struct Crew {
    word: WaitWord,
    /// How many helpers take part. Above [`HELPERS_MASK`] lies a count of the changes, so that
    /// values do not repeat. A helper that takes no part sleeps on this word, so `end` changes it
    /// too: a helper that is just about to sleep must not miss the end.
    helpers: WaitWord,
    dst: AtomicUsize,
    src: AtomicUsize,
    len: AtomicUsize,
    /// [`CopyMethod::to_bits`].
    method: AtomicUsize,
    /// The offset of the next piece that no thread has claimed.
    next: AtomicUsize,
}

impl Crew {
    const_unless_loom! {
        pub(crate) fn new() -> Self {
            Crew {
                word: WaitWord::new(ENDED),
                helpers: WaitWord::new(0),
                dst: AtomicUsize::new(0),
                src: AtomicUsize::new(0),
                len: AtomicUsize::new(0),
                method: AtomicUsize::new(0),
                next: AtomicUsize::new(0),
            }
        }
    }

    /// Sets the crew to its initial state, in a process that has no other thread.
    #[cfg(not(loom))]
    pub(crate) fn reset(&self) {
        self.word.reset();
        self.helpers.reset();
    }

    // Leader's side
    // ---------------------------------------------------------------------------------------------

    /// Begins a job with `helpers` helpers, at most 255. The caller starts their threads after this
    /// call.
    pub(crate) fn begin(&self, helpers: usize) {
        let word = self.word.load();
        debug_assert_eq!(word & (OPEN | INSIDE_MASK), 0, "one job at a time");
        self.word.set_and_wake((word & !ENDED).wrapping_add(COPY));
        self.set_helpers(helpers);
    }

    /// Sets how many helpers take part from the next copy on.
    pub(crate) fn set_helpers(&self, helpers: usize) {
        debug_assert!(helpers as u64 <= HELPERS_MASK);
        let said = self.helpers.load() & !HELPERS_MASK;
        self.helpers.set_and_wake(said.wrapping_add(HELPERS_MASK + 1) | helpers as u64);
    }

    /// Ends all helpers.
    pub(crate) fn end(&self) {
        self.word.set_and_wake(self.word.load() | ENDED);
        self.set_helpers(0);
    }

    /// How many threads copy, including the leader.
    pub(crate) fn members(&self) -> usize {
        (self.helpers.load() & HELPERS_MASK) as usize + 1
    }

    /// Copies bytes together with the helpers. When the call returns, all bytes are copied, and no
    /// helper accesses them any more.
    ///
    /// # Safety
    /// As [`Backend::copy`]. Only one thread leads.
    pub(crate) unsafe fn copy(&self, backend: &dyn Backend, all: Piece, urgent: bool) {
        // SAFETY: a part of the bytes that the caller vouches for, and nobody else copies it.
        self.lead(all, urgent, &|part| unsafe { part.copy(backend) });
    }

    fn lead(&self, all: Piece, urgent: bool, copy: &CopyPiece<'_>) {
        let Piece { dst, src, len, method } = all;
        if len < LEAST || self.members() == 1 {
            return copy(all);
        }
        // Relaxed: no helper is inside, and a helper that enters has acquired the word that
        // releases these stores.
        self.dst.store(dst, Ordering::Relaxed);
        self.src.store(src, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.method.store(method.to_bits(), Ordering::Relaxed);
        self.next.store(0, Ordering::Relaxed);
        let word = self.word.load();
        debug_assert_eq!(word & (OPEN | INSIDE_MASK), 0, "one copy at a time");
        let urgent = if urgent { URGENT } else { 0 };
        self.word.set_and_wake((word & !URGENT).wrapping_add(COPY) | OPEN | urgent);
        self.take_pieces(copy);
        loop {
            let word = self.word.load();
            if self.word.exchange(word, word & !OPEN) {
                break;
            }
        }
        loop {
            // Acquires the copies of the helpers that have left.
            let word = self.word.load();
            if word & INSIDE_MASK == 0 {
                return;
            }
            self.pause(word);
        }
    }

    // Helper's side
    // ---------------------------------------------------------------------------------------------

    /// Runs a helper until [`Crew::end`]. In urgent copies its scheduling is `haste`.
    ///
    /// # Safety
    /// `backend` is the leader's backend.
    pub(crate) unsafe fn help(&self, backend: &dyn Backend, number: usize, haste: Option<Haste>) {
        // SAFETY: a part of the bytes that the leader vouches for until we have left, and nobody
        // else copies it.
        let copy = |part: Piece| unsafe { part.copy(backend) };
        self.follow(number, &copy, &|on| haste.is_some_and(|haste| backend.hurry(haste, on)));
    }

    fn follow(&self, number: usize, copy: &CopyPiece<'_>, hurry: &dyn Fn(bool) -> bool) {
        let mut last = None;
        loop {
            let helpers = self.helpers.load();
            let word = self.word.load();
            if word & ENDED != 0 {
                return;
            }
            if number as u64 >= helpers & HELPERS_MASK {
                self.helpers.wait_while(helpers);
                continue;
            }
            let this = Some(word / COPY);
            if word & OPEN == 0 || this == last {
                self.pause(word);
                continue;
            }
            let hurries = word & URGENT != 0 && hurry(true);
            if self.word.exchange(word, word + INSIDE) {
                last = this;
                // The leader does not return before we have left, and begins no other copy until
                // then.
                self.take_pieces(copy);
                self.leave();
            }
            if hurries {
                hurry(false);
            }
        }
    }

    fn leave(&self) {
        loop {
            let word = self.word.load();
            let left = word - INSIDE;
            // Releases our copies.
            if self.word.exchange(word, left) {
                if left & (OPEN | INSIDE_MASK) == 0 {
                    self.word.wake();
                }
                return;
            }
        }
    }

    /// Claims and copies pieces until none is left. The caller leads a copy, or is inside.
    fn take_pieces(&self, copy: &CopyPiece<'_>) {
        let [dst, src, len, method] = [&self.dst, &self.src, &self.len, &self.method]
            .map(|word| word.load(Ordering::Relaxed));
        let method = CopyMethod::from_bits(method);
        loop {
            let at = self.next.fetch_add(PIECE, Ordering::Relaxed);
            if at >= len {
                return;
            }
            copy(Piece { dst: dst + at, src: src + at, len: PIECE.min(len - at), method });
        }
    }

    /// Waits until the word is no longer `seen`. May return early.
    fn pause(&self, seen: u64) {
        for _ in 0..LOOKS {
            if self.word.load() != seen {
                return;
            }
            std::hint::spin_loop();
        }
        self.word.wait_while(seen);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::CopyLoop;
    #[cfg(shuttle)]
    use crate::schedules::explore::{at_random, explore, with_few_switches};
    use crate::sync::UnsafeCell;
    #[cfg(loom)]
    use loom::thread;
    #[cfg(shuttle)]
    use shuttle::thread;
    #[cfg(not(any(loom, shuttle)))]
    use std::thread;

    /// Memory of three pieces and a remainder; each piece is one number. The cells let the checkers
    /// detect two threads that copy one piece, or a copy while no leader leads.
    struct Memory {
        crew: Crew,
        target: [UnsafeCell<u64>; 4],
    }

    // SAFETY: the crew has to order the accesses to the cells. The tests test just that, and the
    // checkers detect any failure.
    unsafe impl Sync for Memory {}
    // SAFETY: as above.
    unsafe impl Send for Memory {}

    const LEN: usize = 3 * PIECE + 64;
    const METHOD: CopyMethod = CopyMethod { by: CopyLoop::Memcpy, step_bytes: 12345 };

    impl Memory {
        fn new() -> Arc<Self> {
            Arc::new(Memory {
                crew: Crew::new(),
                target: std::array::from_fn(|_| UnsafeCell::new(0)),
            })
        }

        /// Adds the amount `src - dst` to each piece.
        fn copy(&self, part: Piece) {
            let Piece { dst, src, len, method } = part;
            assert_eq!(method, METHOD);
            assert!(len == LEN || len == PIECE || dst == 3 * PIECE && len == 64);
            for cell in &self.target[dst / PIECE..(dst + len).div_ceil(PIECE)] {
                // SAFETY: one thread takes each piece.
                cell.with_mut(|cell| unsafe { *cell += (src - dst) as u64 });
            }
        }

        fn lead(&self, what: usize) {
            let all = Piece { dst: 0, src: what, len: LEN, method: METHOD };
            self.crew.lead(all, false, &|part| self.copy(part));
        }

        fn helper(self: &Arc<Self>, number: usize) -> thread::JoinHandle<()> {
            let memory = self.clone();
            thread::spawn(move || {
                memory.crew.follow(number, &|part| memory.copy(part), &|_| false);
            })
        }

        fn has(&self, sum: u64) {
            for cell in &self.target {
                // SAFETY: nobody copies any more.
                cell.with(|cell| assert_eq!(unsafe { *cell }, sum));
            }
        }
    }

    fn everything_is_copied_once_and_nobody_is_late(helpers: usize) {
        let memory = Memory::new();
        memory.crew.begin(helpers);
        let threads: Vec<_> = (0..helpers).map(|number| memory.helper(number)).collect();
        memory.lead(1);
        memory.has(1);
        memory.lead(10);
        memory.has(11);
        memory.crew.end();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    fn helpers_come_and_go() {
        let memory = Memory::new();
        memory.crew.begin(2);
        let threads = [0, 1].map(|number| memory.helper(number));
        for (helpers, sum) in [(0, 1), (1, 2), (2, 3)] {
            memory.crew.set_helpers(helpers);
            memory.lead(1);
            memory.has(sum);
        }
        memory.crew.end();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        // The next job.
        memory.crew.begin(1);
        let thread = memory.helper(0);
        memory.lead(1);
        memory.has(4);
        memory.crew.end();
        thread.join().unwrap();
    }

    #[cfg(loom)]
    #[test]
    fn loom_crew() {
        let bounded = |preemptions, body: fn()| {
            let mut model = loom::model::Builder::new();
            model.preemption_bound = Some(preemptions);
            model.check(body);
        };
        bounded(3, || everything_is_copied_once_and_nobody_is_late(1));
        bounded(1, || everything_is_copied_once_and_nobody_is_late(2));
    }

    #[cfg(shuttle)]
    #[test]
    fn shuttle_crew() {
        for run in 0..5 {
            explore(at_random(run), || everything_is_copied_once_and_nobody_is_late(2));
            explore(at_random(run), helpers_come_and_go);
        }
        // A helper misses the job's end only if it is held up at several places.
        (0..20).for_each(|run| explore(with_few_switches(5, run), helpers_come_and_go));
    }

    /// A helper that takes no part, then may take part, and is about to sleep when the crew ends.
    #[cfg(shuttle)]
    #[test]
    fn shuttle_directed_helpers_that_take_no_part_end_too() {
        let asleep = "a helper sleeps although its crew has ended";
        crate::schedules::bounded::each_schedule(2, asleep, || {
            let memory = Memory::new();
            memory.crew.begin(0);
            let helper = memory.helper(0);
            memory.crew.set_helpers(1);
            memory.crew.end();
            helper.join().unwrap();
        });
    }

    #[cfg(not(any(loom, shuttle)))]
    #[test]
    fn a_crew_copies_everything_once() {
        for _ in 0..if cfg!(miri) { 2 } else { 200 } {
            everything_is_copied_once_and_nobody_is_late(3);
            helpers_come_and_go();
        }
    }
}
