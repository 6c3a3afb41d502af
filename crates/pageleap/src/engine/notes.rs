//! Which pages of an area somebody was let write to, where the kernel does not note it: shared by a
//! migrator and the thread that serves its tracker, which reads the messages of writers who wait.
//!
//! ```text
//!          begin                    close
//!   Idle ─────────► Following ────────────────► Closed ──► (commit) ──► Idle
//!                    │     ▲
//!               CAS, │     │ the page may be written, and that is noted
//!             server ▼     │
//!                    Letting
//! ```
//!
//! * **Following**: a writer who waits for a protected page is let in, and the page is noted.
//! * **Letting**: the server is at it. Nobody else leaves this phase, so that a migrator who has
//!   closed the area knows that no page becomes writable any more, and that all that did are noted.
//! * **Closed**, **Idle**: writers go on waiting, until the migrator wakes them.

use std::ops::Range;

use crate::sync::{AtomicU64, AtomicUsize, Ordering, WaitWord, array_of, const_unless_loom};

/// The most pages of an area: 16 MB of base pages.
pub(crate) const MOST_PAGES: usize = if cfg!(any(loom, shuttle)) { 64 } else { 4096 };
const WORDS: usize = MOST_PAGES / 64;

/// Bits of the word that hold the phase; above them a count, so that values do not repeat.
const PHASE_BITS: u32 = 2;
const PHASE_MASK: u64 = (1 << PHASE_BITS) - 1;
const IDLE: u64 = 0;
const FOLLOWING: u64 = 1;
const LETTING: u64 = 2;
const CLOSED: u64 = 3;

/// What was written in one worker's current attempt.
pub(crate) struct WriteNotes {
    word: WaitWord,
    start: AtomicUsize,
    pages: AtomicUsize,
    page_bytes: AtomicUsize,
    written: [AtomicU64; WORDS],
    /// How often somebody was let in.
    lettings: AtomicU64,
}

impl WriteNotes {
    const_unless_loom! {
        pub(crate) fn new() -> Self {
            WriteNotes {
                word: WaitWord::new(IDLE),
                start: AtomicUsize::new(0),
                pages: AtomicUsize::new(0),
                page_bytes: AtomicUsize::new(1),
                written: array_of![AtomicU64::new(0); WORDS],
                lettings: AtomicU64::new(0),
            }
        }
    }

    /// As new, for a process that has no other thread.
    #[cfg(not(loom))]
    pub(crate) fn reset(&self) {
        self.word.reset();
    }

    fn next(seen: u64, phase: u64) -> u64 {
        (seen & !PHASE_MASK).wrapping_add(1 << PHASE_BITS) | phase
    }

    // Migrator's side
    // ---------------------------------------------------------------------------------------------

    /// Has writers of `len` bytes from `start` on let in from now on. Must come before the first
    /// call that holds them up: who comes earlier and finds nobody at it waits until the attempt is
    /// over.
    pub(crate) fn begin(&self, start: usize, len: usize, page_bytes: usize) {
        let word = self.word.load();
        debug_assert_eq!(word & PHASE_MASK, IDLE, "one attempt at a time");
        debug_assert!(len / page_bytes <= MOST_PAGES);
        self.start.store(start, Ordering::Relaxed);
        self.pages.store(len / page_bytes, Ordering::Relaxed);
        self.page_bytes.store(page_bytes, Ordering::Relaxed);
        self.written.iter().for_each(|bits| bits.store(0, Ordering::Relaxed));
        // Releases these.
        self.word.set_and_wake(Self::next(word, FOLLOWING));
    }

    /// Has writers go on waiting. When it returns, nobody is being let in, and all who were are
    /// noted.
    pub(crate) fn close(&self) {
        self.leave(CLOSED);
    }

    /// Ends the attempt, in whatever phase it is.
    pub(crate) fn end(&self) {
        self.leave(IDLE);
    }

    fn leave(&self, to: u64) {
        loop {
            let word = self.word.load();
            if word & PHASE_MASK == LETTING {
                self.word.wait_while(word);
            } else if self.word.exchange(word, Self::next(word, to)) {
                return;
            }
        }
    }

    /// How often somebody was let in since this was asked last.
    #[cfg(not(loom))]
    pub(crate) fn take_lettings(&self) -> u64 {
        self.lettings.swap(0, Ordering::Relaxed)
    }

    /// Shows `each` the pages noted, as bytes from the start of the area, neighbours together,
    /// until it says that this is enough or fails. With `forget` those that it is shown are noted
    /// no longer.
    pub(crate) fn written<E>(
        &self,
        forget: bool,
        each: &mut dyn FnMut(Range<usize>) -> Result<bool, E>,
    ) -> Result<(), E> {
        let page_bytes = self.page_bytes.load(Ordering::Relaxed);
        let words = self.pages.load(Ordering::Relaxed).div_ceil(64);
        for (i, bits) in self.written[..words].iter().enumerate() {
            // Acquire: the page was let go before it was noted, so whoever protects it again now
            // comes after that.
            let mut left =
                if forget { bits.swap(0, Ordering::AcqRel) } else { bits.load(Ordering::Acquire) };
            while left != 0 {
                let first = left.trailing_zeros();
                let run = (left >> first).trailing_ones();
                left &= u64::MAX.checked_shl(first + run).unwrap_or(0);
                let page = i * 64 + first as usize;
                if !each(page * page_bytes..(page + run as usize) * page_bytes)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    // Server's side
    // ---------------------------------------------------------------------------------------------

    /// Somebody waits to write to `addr`: calls `let_in` for the page (address, bytes) if writers
    /// are let in now, and notes it. `let_in` may fail, with or without effect: then they wait
    /// until the attempt is over, or have written.
    pub(crate) fn wanted(&self, addr: usize, let_in: impl FnOnce(usize, usize)) {
        let word = self.word.load();
        let start = self.start.load(Ordering::Relaxed);
        let page_bytes = self.page_bytes.load(Ordering::Relaxed);
        let page = addr.wrapping_sub(start) / page_bytes;
        if word & PHASE_MASK != FOLLOWING || page >= self.pages.load(Ordering::Relaxed) {
            return;
        }
        let letting = Self::next(word, LETTING);
        if !self.word.exchange(word, letting) {
            return; // The migrator has closed it: nobody else changes the word now.
        }
        // The kernel lifts any protection there, also another worker's: so `leave` waits for us.
        // Noted afterwards: else the page could be taken for noted and protected again, and then be
        // let go.
        let_in(start + page * page_bytes, page_bytes);
        self.written[page / 64].fetch_or(1 << (page % 64), Ordering::Release);
        self.lettings.fetch_add(1, Ordering::Relaxed);
        self.word.set_and_wake(Self::next(letting, FOLLOWING));
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    fn noted(notes: &WriteNotes, forget: bool) -> Vec<Range<usize>> {
        let mut found = Vec::new();
        let all: Result<(), ()> = notes.written(forget, &mut |pages| {
            found.push(pages);
            Ok(true)
        });
        all.map(|()| found).unwrap()
    }

    #[test]
    fn pages_are_noted_when_they_have_been_let_go_and_only_while_the_area_is_followed() {
        let notes = WriteNotes::new();
        let refuse = |_: usize, _: usize| panic!("nobody is to be let in");
        notes.wanted(0x4000, refuse);
        notes.begin(0x4000, 200 * 4096, 4096);
        let mut let_in = Vec::new();
        for page in [0, 63, 64, 65, 199] {
            notes.wanted(0x4000 + page * 4096 + 5, |addr, len| {
                assert!(!noted(&notes, false).iter().any(|run| run.contains(&(page * 4096))));
                let_in.push((addr, len));
            });
        }
        assert_eq!(let_in[1], (0x4000 + 63 * 4096, 4096));
        notes.wanted(0x3fff, refuse);
        notes.wanted(0x4000 + 200 * 4096, refuse);
        let runs = [0..4096, 63 * 4096..64 * 4096, 64 * 4096..66 * 4096, 199 * 4096..200 * 4096];
        assert_eq!(noted(&notes, false), runs);
        assert_eq!(noted(&notes, true), runs);
        assert_eq!(noted(&notes, true), []);
        notes.wanted(0x4000, |_, _| {});
        notes.close();
        notes.wanted(0x8000, refuse);
        assert_eq!(noted(&notes, false), runs[..1]);
        notes.end();
        notes.begin(0x4000, 2 << 20, 2 << 20);
        assert_eq!(noted(&notes, false), []);
        notes.wanted(0x5000, |addr, len| assert_eq!((addr, len), (0x4000, 2 << 20)));
        assert_eq!(noted(&notes, false).len(), 1);
        assert_eq!(noted(&notes, false)[0], 0..2 << 20);
        notes.end();
    }
}
