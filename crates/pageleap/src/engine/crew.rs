//! Threads that copy one area together, where everybody who writes to it waits for as long as the
//! copy takes.
//!
//! One thread leads: it says what is to be copied, copies as well, and returns when all has been
//! copied and nobody is at it any more.
//!
//! ```text
//!           leader                  leader
//!   shut ───────────► open ───────────────────► shut, some inside ──► shut
//!                     │  ▲                          │ helper
//!              helper ▼  │ helper                   ▼ (the last one wakes the leader)
//!                  one more inside               one less
//! ```
//!
//! Helpers come in by a compare-and-swap of the word that says *open*, and the leader shuts by
//! another one: so a helper that is late, or was not running for a while, neither copies what
//! nobody asked for any more nor holds the leader up.
//!
//! It lies in a slot, because between the freeze and the commit nobody may look at the heap.

use crate::backend::Backend;
use crate::sync::{AtomicUsize, Ordering, WaitWord, const_unless_loom};

/// Bytes that a thread takes at a time: some 10 us.
#[cfg(not(any(loom, shuttle)))]
const PIECE: usize = 64 << 10;
#[cfg(any(loom, shuttle))]
const PIECE: usize = crate::units::BASE_PAGE;

/// Less is copied sooner than anybody is woken.
const LEAST: usize = 2 * PIECE;

const HELPERS_MASK: u64 = 0xff;

/// So often the word is looked at before a thread goes to sleep: some 50 us, which is what the
/// calls between two areas take.
const LOOKS: u32 = if cfg!(any(loom, shuttle)) { 0 } else { 1500 };

// Bits of the word.
const OPEN: u64 = 1;
const ENDED: u64 = 1 << 1;
/// Somebody waits for the copy.
const URGENT: u64 = 1 << 2;
/// One helper inside.
const INSIDE: u64 = 1 << 3;
const INSIDE_MASK: u64 = 0xff * INSIDE;
/// One copy more: values do not repeat, except while helpers come and go.
const COPY: u64 = 1 << 11;

/// Copies so many bytes: to where, from where, how many.
type Copy<'a> = dyn Fn(usize, usize, usize) + 'a;

/// One worker's helpers.
pub(crate) struct Crew {
    word: WaitWord,
    /// How many helpers take part, and above [`HELPERS_MASK`] how often that was said, so that
    /// values do not repeat: who is about to sleep on it, because it does not take part, must not
    /// miss that all are to end.
    helpers: WaitWord,
    dst: AtomicUsize,
    src: AtomicUsize,
    len: AtomicUsize,
    /// Where the next piece begins that nobody has taken.
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
                next: AtomicUsize::new(0),
            }
        }
    }

    /// As new, for a process that has no other thread.
    #[cfg(not(loom))]
    pub(crate) fn reset(&self) {
        self.word.reset();
        self.helpers.reset();
    }

    // Leader's side
    // ---------------------------------------------------------------------------------------------

    /// Has so many helpers take part, which are to be started after this for the first time. At
    /// most 255.
    pub(crate) fn begin(&self, helpers: usize) {
        let word = self.word.load();
        debug_assert_eq!(word & (OPEN | INSIDE_MASK), 0, "one job at a time");
        self.word.set_and_wake((word & !ENDED).wrapping_add(COPY));
        self.set_helpers(helpers);
    }

    /// Has so many of them take part from the next copy on.
    pub(crate) fn set_helpers(&self, helpers: usize) {
        debug_assert!(helpers as u64 <= HELPERS_MASK);
        let said = self.helpers.load() & !HELPERS_MASK;
        self.helpers.set_and_wake(said.wrapping_add(HELPERS_MASK + 1) | helpers as u64);
    }

    /// Has all helpers end.
    pub(crate) fn end(&self) {
        self.word.set_and_wake(self.word.load() | ENDED);
        self.set_helpers(0);
    }

    /// How many threads copy, the leader included.
    pub(crate) fn members(&self) -> usize {
        (self.helpers.load() & HELPERS_MASK) as usize + 1
    }

    /// Copies `len` bytes from `src` to `dst`, together with the helpers. When it returns, all is
    /// copied, and none of them accesses it any more.
    ///
    /// # Safety
    /// As [`Backend::copy`]. One thread leads.
    pub(crate) unsafe fn copy(
        &self,
        backend: &dyn Backend,
        dst: usize,
        src: usize,
        len: usize,
        urgent: bool,
    ) {
        // SAFETY: a part of what the caller vouches for, and nobody else copies it.
        self.lead(dst, src, len, urgent, &|dst, src, len| unsafe { backend.copy(dst, src, len) });
    }

    fn lead(&self, dst: usize, src: usize, len: usize, urgent: bool, copy: &Copy<'_>) {
        if len < LEAST || self.members() == 1 {
            return copy(dst, src, len);
        }
        // Relaxed: nobody is inside, and who comes in has seen the word that releases these.
        self.dst.store(dst, Ordering::Relaxed);
        self.src.store(src, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
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
            // Acquires what those have copied who have left.
            let word = self.word.load();
            if word & INSIDE_MASK == 0 {
                return;
            }
            self.pause(word);
        }
    }

    // Helper's side
    // ---------------------------------------------------------------------------------------------

    /// A helper's life, until [`Crew::end`]. With `hurry` it is put before others while somebody
    /// waits for a copy.
    ///
    /// # Safety
    /// `backend` is the one that the leader copies with.
    pub(crate) unsafe fn help(&self, backend: &dyn Backend, number: usize, hurry: bool) {
        // SAFETY: a part of what the leader vouches for until we have left, and nobody else copies
        // it.
        let copy = |dst, src, len| unsafe { backend.copy(dst, src, len) };
        self.follow(number, &copy, &|on| hurry && backend.hurry(on));
    }

    fn follow(&self, number: usize, copy: &Copy<'_>, hurry: &dyn Fn(bool) -> bool) {
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
                // The leader does not return before we have left, and nothing else is asked for
                // until then.
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
            // Releases what was copied.
            if self.word.exchange(word, left) {
                if left & (OPEN | INSIDE_MASK) == 0 {
                    self.word.wake();
                }
                return;
            }
        }
    }

    /// Copies pieces until there are none that nobody has taken. The caller leads a copy, or is
    /// inside.
    fn take_pieces(&self, copy: &Copy<'_>) {
        let [dst, src, len] =
            [&self.dst, &self.src, &self.len].map(|word| word.load(Ordering::Relaxed));
        loop {
            let at = self.next.fetch_add(PIECE, Ordering::Relaxed);
            if at >= len {
                return;
            }
            copy(dst + at, src + at, PIECE.min(len - at));
        }
    }

    /// Waits until the word is no longer `seen`, or not even so long.
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
    use crate::sync::UnsafeCell;
    #[cfg(loom)]
    use loom::thread;
    #[cfg(shuttle)]
    use shuttle::thread;
    #[cfg(not(any(loom, shuttle)))]
    use std::thread;

    /// Three pieces and a bit of memory, of which each piece is one number: what is copied is
    /// checked to be copied by one thread, and only while somebody leads.
    struct Memory {
        crew: Crew,
        target: [UnsafeCell<u64>; 4],
    }

    // SAFETY: that the crew orders the accesses to the cells is what is tested; the checkers see
    // whether it does.
    unsafe impl Sync for Memory {}
    // SAFETY: as above.
    unsafe impl Send for Memory {}

    const LEN: usize = 3 * PIECE + 64;

    impl Memory {
        fn new() -> Arc<Self> {
            Arc::new(Memory {
                crew: Crew::new(),
                target: std::array::from_fn(|_| UnsafeCell::new(0)),
            })
        }

        /// Adds what is to be copied (`src`), for each piece.
        fn copy(&self, dst: usize, src: usize, len: usize) {
            assert!(len == LEN || len == PIECE || dst == 3 * PIECE && len == 64);
            for cell in &self.target[dst / PIECE..(dst + len).div_ceil(PIECE)] {
                // SAFETY: each piece is taken by one thread.
                cell.with_mut(|cell| unsafe { *cell += (src - dst) as u64 });
            }
        }

        fn lead(&self, what: usize) {
            self.crew.lead(0, what, LEN, false, &|dst, src, len| self.copy(dst, src, len));
        }

        fn helper(self: &Arc<Self>, number: usize) -> thread::JoinHandle<()> {
            let memory = self.clone();
            thread::spawn(move || {
                memory.crew.follow(number, &|dst, src, len| memory.copy(dst, src, len), &|_| false);
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
        shuttle::check_random(|| everything_is_copied_once_and_nobody_is_late(2), 5_000);
        shuttle::check_random(helpers_come_and_go, 5_000);
        // Who misses that the job ends has to be held up at several places.
        shuttle::check_pct(helpers_come_and_go, 20_000, 5);
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
