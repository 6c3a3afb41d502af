//! Notes of dirty pages, for the engine `wp-sync`, whose kernel does not track them. A migrator
//! shares the notes with the *server*: the thread that reads the tracker's messages about writers
//! that wait for a write-protected page.
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
//! * **Following**: for a writer that waits for a protected page, the server unprotects the page,
//!   then notes it.
//! * **Letting**: the server is unprotecting a page. Only the server leaves this phase. So once a
//!   migrator has closed the notes, no page becomes writable any more, and every page that became
//!   writable is noted.
//! * **Closed**, **Idle**: writers wait until the migrator wakes them.

use std::ops::Range;

use crate::sync::{AtomicU64, AtomicUsize, Ordering, WaitWord, array_of, const_unless_loom};

/// The most pages of an area: 16 MB of base pages.
pub(crate) const MOST_PAGES: usize = if cfg!(any(loom, shuttle)) { 64 } else { 4096 };
const WORDS: usize = MOST_PAGES / 64;

/// Bits of the word that hold the phase. A count lies above them, so that values do not repeat.
const PHASE_BITS: u32 = 2;
const PHASE_MASK: u64 = (1 << PHASE_BITS) - 1;
const IDLE: u64 = 0;
const FOLLOWING: u64 = 1;
const LETTING: u64 = 2;
const CLOSED: u64 = 3;

/// The dirty pages of one worker's current attempt.
pub(crate) struct WriteNotes {
    word: WaitWord,
    start: AtomicUsize,
    pages: AtomicUsize,
    page_bytes: AtomicUsize,
    written: [AtomicU64; WORDS],
    /// How often the server unprotected a page.
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

    /// Sets the notes to their initial state, in a process that has no other thread.
    #[cfg(not(loom))]
    pub(crate) fn reset(&self) {
        self.word.reset();
    }

    fn next(seen: u64, phase: u64) -> u64 {
        (seen & !PHASE_MASK).wrapping_add(1 << PHASE_BITS) | phase
    }

    // Migrator's side
    // ---------------------------------------------------------------------------------------------

    /// From now on, pages of the `len` bytes from `start` are unprotected for writers. The call must
    /// come before the first write-protecting call, because a writer that began to wait earlier
    /// would wait until the attempt is over.
    pub(crate) fn begin(&self, start: usize, len: usize, page_bytes: usize) {
        let word = self.word.load();
        debug_assert_eq!(word & PHASE_MASK, IDLE, "one attempt at a time");
        debug_assert!(len / page_bytes <= MOST_PAGES);
        self.start.store(start, Ordering::Relaxed);
        self.pages.store(len / page_bytes, Ordering::Relaxed);
        self.page_bytes.store(page_bytes, Ordering::Relaxed);
        self.written.iter().for_each(|bits| bits.store(0, Ordering::Relaxed));
        // Releases the stores above.
        self.word.set_and_wake(Self::next(word, FOLLOWING));
    }

    /// From now on, no page is unprotected for a writer. When the call returns, all pages that were
    /// unprotected are noted.
    pub(crate) fn close(&self) {
        self.leave(CLOSED);
    }

    /// Ends the attempt, in any phase.
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

    /// How often the server unprotected a page since the last call.
    #[cfg(not(loom))]
    pub(crate) fn take_lettings(&self) -> u64 {
        self.lettings.swap(0, Ordering::Relaxed)
    }

    /// Passes the noted pages to `each`, as bytes from the start of the area; neighbouring pages
    /// may come as one range. Stops when `each` returns `false` or fails. With `forget`, the notes
    /// of the pages are erased.
    pub(crate) fn written<E>(
        &self,
        forget: bool,
        each: &mut dyn FnMut(Range<usize>) -> Result<bool, E>,
    ) -> Result<(), E> {
        let page_bytes = self.page_bytes.load(Ordering::Relaxed);
        let words = self.pages.load(Ordering::Relaxed).div_ceil(64);
        for (i, bits) in self.written[..words].iter().enumerate() {
            // Acquire: the page became writable before it was noted, so a caller that now protects
            // the page again does so after that.
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

    /// Handles a writer that waits to write to `addr`. In phase Following, calls `unprotect`
    /// for the page (address, bytes), and notes the page. If `unprotect` fails, with or without
    /// effect, writers of the page wait until the attempt is over, or have written.
    pub(crate) fn wanted(&self, addr: usize, unprotect: impl FnOnce(usize, usize)) {
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
        // `unprotect` lifts any protection of the page, even another worker's, so `leave` waits for
        // us.
        //
        // The note comes after the call. Otherwise the migrator could find the note and protect the
        // page again, and then this call would make the page writable without a note.
        unprotect(start + page * page_bytes, page_bytes);
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
        let refuse = |_: usize, _: usize| panic!("no page is to be unprotected");
        notes.wanted(0x4000, refuse);
        notes.begin(0x4000, 200 * 4096, 4096);
        let mut unprotected = Vec::new();
        for page in [0, 63, 64, 65, 199] {
            notes.wanted(0x4000 + page * 4096 + 5, |addr, len| {
                assert!(!noted(&notes, false).iter().any(|run| run.contains(&(page * 4096))));
                unprotected.push((addr, len));
            });
        }
        assert_eq!(unprotected[1], (0x4000 + 63 * 4096, 4096));
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
