//! The window of the engine `uffd-move`: UFFDIO_MOVE takes pages out of the range to a parking
//! place, they are copied, and UFFDIO_MOVE brings the copies into the range.
//!
//! Nothing here allocates, logs, or touches memory of the program, because the program's heap may
//! lie in the area. All data lies on the stack, in a [`Mapped`](super::mapped::Mapped), or in
//! static variables; mappings with static variables are never moved in place.
//!
//! One lock, [`Shared::open`], orders the worker and the [`attendant`], the thread that reads the
//! userfaultfd's messages:
//!
//! * The worker holds the lock while it takes pages out, and while it brings their copies.
//! * The attendant holds the lock while it reads messages and acts on them.
//!
//! So the attendant never fills a hole of an open area with the zero page, which would take the
//! place of the copy.
//!
//! The attendant notes pages that the program discards (`MADV_DONTNEED`) or unmaps, and from then
//! on this job neither takes them nor brings them. The discarding thread waits until its message is
//! read. Until then the kernel refuses each move through this userfaultfd, in both directions
//! (EAGAIN), and the attendant notes the pages before it releases the lock. Two guarantees follow:
//! discarded pages do not come back, and pages of a mapping that has replaced the range are not
//! taken. The second one is needed because UFFDIO_MOVE does not check that its source is
//! registered.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

#[cfg(not(all(test, shuttle)))]
use pageleap_sys as sys;
use pageleap_sys::{
    CopyMethod, Errno, Kept, PageQuery, PageRegion, UffdMessage, page_is, wait_readable,
};

#[cfg(all(test, shuttle))]
use super::model as sys;
use super::vacated::{Left, Vacated};
use crate::engine::effort::Counters;
use crate::forks;
use crate::sync::{Mutex, MutexGuard, lock, monotonic_ns, thread};
use crate::units::{BASE_PAGE, Call, Prot};

/// The most runs of pages that one window moves.
pub(super) const MOST_RUNS: usize = 64;
/// How often a call is repeated after EAGAIN, which the kernel returns for a page that is being
/// migrated, and while mappings change.
const TRIES: u32 = 32;

/// The most reads of messages, a few each, while some holes could not be filled (EAGAIN).
const MOST_ROUNDS: usize = 1024;

/// CPU time that UFFDIO_MOVE may spend on one page, in nanoseconds, before the call counts as
/// stuck.
const STUCK_NS: u64 = 10_000_000;

/// The lock, held.
type Open<'a> = MutexGuard<'a, Range<usize>>;

/// State that the worker, the attendant and the watcher share. It lies in the library's own
/// mapping.
pub(super) struct Shared {
    /// The area whose pages may be away; empty outside of windows.
    open: Mutex<Range<usize>>,
    taking: Taking,
    served: Served,
    pub(super) vacated: Vacated,
    #[cfg(test)]
    pub(super) refuse: super::tests::Refuse,
}

/// Counts that the attendant and the watcher report, summed over both.
#[derive(Default)]
pub(super) struct Served {
    /// Threads that no longer access the heap.
    pub(super) ready: AtomicU64,
    /// Threads that were traced when they started.
    pub(super) traced: AtomicU64,
    /// CPU time of threads that have ended, in nanoseconds.
    pub(super) cpu_ns: AtomicU64,
    /// Ended threads whose CPU time could not be read.
    pub(super) unknown: AtomicU64,
}

/// The worker's UFFDIO_MOVE out of the range, while it runs.
#[derive(Default)]
struct Taking {
    /// When the call began; 0 while no call runs.
    since_ns: AtomicU64,
    /// The clock of the worker's CPU time.
    clock: AtomicI32,
    to: AtomicUsize,
    len: AtomicUsize,
}

/// The watcher's last observation of that call.
#[derive(Clone, Copy, Default, PartialEq)]
pub(super) struct Sight {
    since_ns: u64,
    /// The first address in the parking place that has no page yet.
    place: usize,
    /// The worker's CPU time.
    cpu_ns: u64,
}

/// A registered range, and the number of its first bit in [`Ground::discarded`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) first_bit: usize,
}

/// Addresses and descriptors that a window needs. They are copied to the stack before it begins.
#[derive(Clone, Copy)]
pub(super) struct Ground<'a> {
    pub(super) uffd: BorrowedFd<'a>,
    pub(super) pagemap: BorrowedFd<'a>,
    pub(super) shared: &'a Shared,
    /// Ascending.
    pub(super) spans: &'a [Span],
    /// One bit for each page of the spans, set when the program has discarded the page.
    pub(super) discarded: &'a [AtomicU64],
}

/// Pages that move in a window.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Run {
    /// Address in the range, and address in the parking place.
    pub(super) at: usize,
    pub(super) parked: usize,
    /// Address of the copies, on the destination node.
    pub(super) copy: usize,
    pub(super) len: usize,
    /// Whether the run consists of whole transparent huge pages.
    pub(super) huge: bool,
}

/// The outcome of a window for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The copy is in the range.
    Moved,
    /// A call refused the page, and it is where it was.
    Stayed(Call, Errno),
    /// The program has discarded the page.
    Discarded,
    /// The mapping is gone or has been replaced.
    Gone,
}

/// Consecutive pages with one fate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told {
    pub(super) at: usize,
    pub(super) len: usize,
    pub(super) fate: Fate,
}

/// A list on the stack.
pub(super) struct Few<T, const N: usize> {
    items: [T; N],
    len: usize,
}

impl<T: Copy, const N: usize> Few<T, N> {
    pub(super) fn new(empty: T) -> Self {
        Few { items: [empty; N], len: 0 }
    }

    /// Adds an item. Returns whether there was room.
    pub(super) fn push(&mut self, item: T) -> bool {
        let room = self.len < N;
        if room {
            self.items[self.len] = item;
            self.len += 1;
        }
        room
    }

    pub(super) fn as_slice(&self) -> &[T] {
        &self.items[..self.len]
    }

    fn room(&self) -> usize {
        N - self.len
    }
}

/// Fates of all pages of a window.
pub(super) type Fates = Few<Told, { 6 * MOST_RUNS }>;

impl Fates {
    fn say(&mut self, at: usize, len: usize, fate: Fate) {
        if let Some(last) = self.len.checked_sub(1).map(|at| &mut self.items[at])
            && last.fate == fate
            && last.at + last.len == at
        {
            last.len += len;
            return;
        }
        // `take` stops early enough that there is always room.
        self.push(Told { at, len, fate });
    }
}

impl Shared {
    /// `places`: how many parking places there are.
    pub(super) fn new(places: usize) -> Shared {
        Shared {
            open: Mutex::new(0..0),
            taking: Taking::default(),
            served: Served::default(),
            vacated: Vacated::new(places),
            #[cfg(test)]
            refuse: super::tests::Refuse::default(),
        }
    }

    pub(super) fn served(&self) -> &Served {
        &self.served
    }

    fn lock(&self) -> MutexGuard<'_, Range<usize>> {
        lock(&self.open)
    }
}

impl Ground<'_> {
    fn bit(&self, at: usize) -> Option<usize> {
        let found = self.spans.partition_point(|span| span.end <= at);
        let span = self.spans.get(found).filter(|span| span.start <= at)?;
        Some(span.first_bit + (at - span.start) / BASE_PAGE)
    }

    fn is_discarded(&self, at: usize) -> bool {
        self.bit(at).is_some_and(|bit| {
            self.discarded[bit / 64].load(Ordering::Relaxed) >> (bit % 64) & 1 == 1
        })
    }

    /// The length of the run from `at` on, up to `end`, whose pages agree on whether they were
    /// discarded, and whether they were.
    fn alike(&self, at: usize, end: usize) -> (usize, bool) {
        let first = self.is_discarded(at);
        let mut len = BASE_PAGE;
        while at + len < end && self.is_discarded(at + len) == first {
            len += BASE_PAGE;
        }
        (len, first)
    }

    fn note_discarded(&self, from: usize, to: usize) {
        for span in self.spans {
            let (from, to) = (from.max(span.start), to.min(span.end));
            for at in (from..to.max(from)).step_by(BASE_PAGE) {
                let bit = span.first_bit + (at - span.start) / BASE_PAGE;
                self.discarded[bit / 64].fetch_or(1 << (bit % 64), Ordering::Relaxed);
            }
        }
    }

    /// Reads and handles the waiting messages.
    ///
    /// The kernel delivers fault messages before discard messages, and while a discard is unread it
    /// refuses to fill any hole (EAGAIN). A thread that was woken then would fault again, and its
    /// new fault message would again come before the discard. So a thread whose hole could not be
    /// filled stays asleep until all messages have been read.
    pub(super) fn attend(&self) {
        let open = self.shared.lock();
        let mut is_changing = false;
        let mut rounds = 0;
        loop {
            let handle = &mut |message| match message {
                UffdMessage::Fault(at) => {
                    let page = at / BASE_PAGE * BASE_PAGE;
                    // The thread is woken when the window ends.
                    if open.contains(&page) {
                        return;
                    }
                    match sys::uffd_zeropage(self.uffd, page, BASE_PAGE) {
                        Ok(()) => {}
                        Err(Errno(libc::EAGAIN)) => is_changing = true,
                        // The hole has been filled meanwhile, or the mapping was replaced. The
                        // thread repeats its access, and sends another message if it faults again.
                        Err(_) => {
                            let _ = sys::uffd_wake(self.uffd, page, BASE_PAGE);
                        }
                    }
                }
                UffdMessage::Remove(from, to) => self.note_discarded(from, to),
                UffdMessage::Other => {}
            };
            rounds += 1;
            let has_read = sys::uffd_read(self.uffd, handle);
            if !has_read || !is_changing || rounds == MOST_ROUNDS {
                break;
            }
        }
        drop(open);
        if is_changing {
            for Span { start, end, .. } in self.spans {
                let _ = sys::uffd_wake(self.uffd, *start, end - start);
            }
        }
    }

    /// Moves runs of an area. Each page of a run gets a fate.
    ///
    /// # Safety
    /// The area is registered, and the program keeps the contract of
    /// [`leap_memory`](super::leap_memory). Parking places and copies belong to the caller. The
    /// parking places are registered and empty, and the memory for the copies is present.
    pub(super) unsafe fn pass(
        &self,
        area: Range<usize>,
        runs: &[Run],
        method: CopyMethod,
        counters: &mut Counters,
    ) -> Fates {
        let mut fates = Fates::new(Told { at: 0, len: 0, fate: Fate::Gone });
        let mut parked: Few<Run, { 2 * MOST_RUNS }> = Few::new(Run::default());
        let no_fork = forks::keep_away();
        let began = monotonic_ns();
        let mut open = Some(self.shared.lock());
        if let Some(open) = &mut open {
            **open = area.clone();
        }
        for run in runs {
            // SAFETY: forwarded to the caller.
            unsafe { self.take(run, &mut open, &mut parked, &mut fates, counters) };
        }
        drop(open);
        let copying = monotonic_ns();
        if let Some(run) = parked.as_slice().first() {
            // A write through `/proc/PID/mem` or `ptrace(2)` may have looked up its page before
            // UFFDIO_MOVE took it, and not have stored yet. Such a writer holds the mmap lock for
            // reading, as UFFDIO_MOVE does, so it is not excluded. mprotect takes the mmap lock for
            // writing, and so waits until the writer is done; with the access that the place has
            // already, it changes nothing. Where a seccomp filter refuses mprotect, such a write
            // may be lost.
            counters.count(Call::Protect);
            // SAFETY: the place is ours, and has this access.
            let _ = unsafe { sys::protect(run.copy, BASE_PAGE, Prot::READ_WRITE.0) };
        }
        for run in parked.as_slice() {
            // SAFETY: nobody else knows either place, and both are present.
            unsafe { sys::copy_racing(run.copy, run.parked, run.len, method) };
            counters.copied += run.len as u64;
            counters.left += (run.len / BASE_PAGE) as u64;
        }
        counters.copy_ns = monotonic_ns().saturating_sub(copying);
        let mut open = Some(self.shared.lock());
        for run in parked.as_slice() {
            let (mut at, end) = (run.at, run.at + run.len);
            while at < end {
                let (len, is_discarded) = self.alike(at, end);
                if is_discarded {
                    fates.say(at, len, Fate::Discarded);
                    at += len;
                    continue;
                }
                // SAFETY: forwarded to the caller.
                let (done, fate) = unsafe { self.bring(run, at, len, &mut open, counters) };
                match fate {
                    Some(fate) => fates.say(at, done, fate),
                    None => self.let_attend(&mut open),
                }
                at += done;
            }
        }
        if let Some(open) = &mut open {
            **open = 0..0;
        }
        drop(open);
        counters.count(Call::Wake);
        let _ = sys::uffd_wake(self.uffd, area.start, area.len());
        counters.window_ns = monotonic_ns().saturating_sub(began);
        drop(no_fork);
        fates
    }

    /// Ends a stuck UFFDIO_MOVE. Some kernels retry the split of a pinned huge page for ever, at
    /// the place that the page is to have. When that place is filled with the zero page, the call
    /// ends (EEXIST). Takes the last observation, and returns the present one.
    pub(super) fn end_what_is_stuck(&self, before: Sight) -> Sight {
        let Taking { since_ns, clock, to, len } = &self.shared.taking;
        let since = since_ns.load(Ordering::Acquire);
        if since == 0 {
            return Sight::default();
        }
        let (to, len) = (to.load(Ordering::Relaxed), len.load(Ordering::Relaxed));
        let cpu_ns = sys::cpu_time_ns(clock.load(Ordering::Relaxed)).unwrap_or(0);
        // UFFDIO_MOVE moves pages in ascending order, so the first empty place is the one it works
        // on.
        let there = self.alike_pages(to, len, |categories| categories & page_is::PRESENT != 0);
        let place = to + there;
        if (before.since_ns, before.place) != (since, place) || there == len {
            return Sight { since_ns: since, place, cpu_ns };
        }
        if cpu_ns.saturating_sub(before.cpu_ns) >= STUCK_NS
            && since_ns.load(Ordering::Acquire) == since
        {
            // If the call has just ended, this page is given back with the parked ones.
            let _ = sys::uffd_zeropage(self.uffd, place, BASE_PAGE);
        }
        before
    }

    /// Takes pages out of the range by one UFFDIO_MOVE, under the watcher's supervision. Returns
    /// how many bytes have arrived, from the first page on, and the error that stopped the call, if
    /// any.
    ///
    /// # Safety
    /// As for [`Ground::pass`].
    unsafe fn relocate_out(&self, dst: usize, src: usize, len: usize) -> (usize, Option<Errno>) {
        let taking = &self.shared.taking;
        taking.clock.store(sys::own_cpu_clock(), Ordering::Relaxed);
        taking.to.store(dst, Ordering::Relaxed);
        taking.len.store(len, Ordering::Relaxed);
        taking.since_ns.store(monotonic_ns(), Ordering::Release);
        // SAFETY: forwarded to the caller.
        let (done, refused) = unsafe { self.relocate(dst, src, len) };
        taking.since_ns.store(0, Ordering::Release);
        // The zero page is one that the watcher has filled in to end the call. A page that was
        // being reclaimed arrives as a swap entry.
        let arrived = |categories| {
            categories & page_is::ZERO == 0
                && categories & (page_is::PRESENT | page_is::SWAPPED) != 0
        };
        (self.untold(dst, len, done, arrived), refused)
    }

    /// Moves the library's own pages into the range by one UFFDIO_MOVE. Returns the same.
    ///
    /// # Safety
    /// As for [`Ground::pass`].
    unsafe fn relocate_in(&self, dst: usize, src: usize, len: usize) -> (usize, Option<Errno>) {
        // SAFETY: forwarded to the caller.
        let (done, refused) = unsafe { self.relocate(dst, src, len) };
        (self.untold(src, len, done, |categories| categories == 0), refused)
    }

    /// Some kernels move pages without counting them after a transient obstacle (Linux 6.18, until
    /// "userfaultfd: reset err to be 0 when move_pages_ptes succeeded"). So after a call that
    /// reported `done` of `len` bytes, the pagemap of the library's own side tells how many pages
    /// have moved. `is_done`: whether the categories of a page are those after its move.
    fn untold(&self, own: usize, len: usize, done: usize, is_done: impl Fn(u64) -> bool) -> usize {
        let mut at = done;
        while at < len {
            // Each scan returns only a few runs of pages.
            match self.alike_pages(own + at, len - at, &is_done) {
                0 => break,
                more => at += more,
            }
        }
        at
    }

    /// How many bytes from `start` on consist of pages whose categories satisfy `is`.
    fn alike_pages(&self, start: usize, len: usize, is: impl Fn(u64) -> bool) -> usize {
        let query = PageQuery {
            inverted: 0,
            all_of: 0,
            any_of: 0,
            tell: page_is::PRESENT | page_is::SWAPPED | page_is::ZERO,
        };
        let mut regions = [PageRegion::default(); 2];
        let mut at = start;
        // SAFETY: the scan protects nothing.
        let found =
            unsafe { sys::pagemap_scan(self.pagemap, start..start + len, 0, &query, &mut regions) };
        let count = found.map_or(0, |(count, _)| count);
        for region in &regions[..count] {
            if region.start as usize != at || !is(region.categories) {
                break;
            }
            at = region.end as usize;
        }
        at - start
    }

    /// Moves pages by UFFDIO_MOVE. Tests may make it fail instead.
    ///
    /// # Safety
    /// As for [`Ground::pass`].
    unsafe fn relocate(&self, dst: usize, src: usize, len: usize) -> (usize, Option<Errno>) {
        #[cfg(test)]
        if let Some(errno) = self.shared.refuse.now() {
            if errno == super::tests::UNTOLD {
                // SAFETY: forwarded to the caller.
                let (done, _) = unsafe { sys::uffd_move(self.uffd, dst, src, len) };
                return (0, Some(Errno(if done > 0 { libc::EEXIST } else { libc::EAGAIN })));
            }
            let takes = self.shared.taking.since_ns.load(Ordering::Relaxed) != 0;
            if errno == super::tests::SPLIT {
                super::tests::split(if takes { src } else { dst }, len);
                // SAFETY: forwarded to the caller.
                return unsafe { sys::uffd_move(self.uffd, dst, src, len) };
            }
            if errno != super::tests::STUCK {
                return (0, Some(errno));
            }
            if takes {
                while !super::tests::is_present(dst) {}
                return (0, Some(Errno(libc::EEXIST)));
            }
        }
        // SAFETY: forwarded to the caller.
        unsafe { sys::uffd_move(self.uffd, dst, src, len) }
    }

    /// Releases the lock for a moment, so that the attendant can read its messages. As long as a
    /// mapping changes or a discard is unread, the kernel moves nothing.
    fn let_attend<'a>(&'a self, open: &mut Option<Open<'a>>) {
        *open = None;
        thread::sleep(Duration::from_micros(5));
        *open = Some(self.shared.lock());
    }

    /// Takes the pages of a run out of the range, as far as the kernel lets them go.
    ///
    /// # Safety
    /// As for [`Ground::pass`].
    unsafe fn take<'a>(
        &'a self,
        run: &Run,
        open: &mut Option<Open<'a>>,
        parked: &mut Few<Run, { 2 * MOST_RUNS }>,
        fates: &mut Fates,
        counters: &mut Counters,
    ) {
        let (mut done, mut tries) = (0, 0);
        while done < run.len {
            let at = run.at + done;
            let (alike, is_discarded) = self.alike(at, run.at + run.len);
            if is_discarded {
                fates.say(at, alike, Fate::Discarded);
                done += alike;
                continue;
            }
            // Each page that is parked now may still need a fate of its own, so there must be room
            // for it.
            if parked.room() == 0 || fates.room() < 2 * MOST_RUNS {
                return;
            }
            counters.count(Call::TakePages);
            // SAFETY: forwarded to the caller.
            let (took, refused) = unsafe { self.relocate_out(run.parked + done, at, alike) };
            if took > 0 {
                let part = Run {
                    at,
                    parked: run.parked + done,
                    copy: run.copy + done,
                    len: took,
                    huge: run.huge,
                };
                parked.push(part);
                done += took;
                tries = 0;
                continue;
            }
            let Some(errno) = refused else { continue };
            tries += 1;
            if errno == Errno(libc::EAGAIN) && tries < TRIES {
                self.let_attend(open);
                continue;
            }
            let rest = run.len - done;
            let len = match errno {
                // EINVAL concerns the whole mapping: its access, its lock or its kind.
                Errno(libc::EINVAL) => rest,
                // The call was stuck, and would get stuck at each page of the same huge page.
                Errno(libc::EEXIST) => (super::HUGE - at % super::HUGE).min(rest),
                // A huge page stays as a whole.
                _ if run.huge => (super::HUGE - at % super::HUGE).min(rest),
                _ => BASE_PAGE,
            };
            fates.say(at, len, Fate::Stayed(Call::TakePages, errno));
            (done, tries) = (done + len, 0);
        }
    }

    /// Brings the copies of `len` bytes of a run at `at`, or the old pages back. Returns how many
    /// bytes the fate covers, or `None` if the call has to be repeated.
    ///
    /// # Safety
    /// As for [`Ground::pass`].
    unsafe fn bring<'a>(
        &'a self,
        run: &Run,
        at: usize,
        len: usize,
        open: &mut Option<Open<'a>>,
        counters: &mut Counters,
    ) -> (usize, Option<Fate>) {
        let skip = at - run.at;
        counters.count(Call::BringPages);
        // SAFETY: forwarded to the caller.
        let (came, refused) = unsafe { self.relocate_in(at, run.copy + skip, len) };
        if came > 0 {
            return (came, Some(Fate::Moved));
        }
        let Some(why) = refused.filter(|errno| *errno != Errno(libc::EAGAIN)) else {
            return (0, None);
        };
        if why == Errno(libc::EEXIST) {
            // Filling a hole takes the userfaultfd. So the program has registered a new mapping
            // here with this descriptor, and the page belongs to the program.
            return (BASE_PAGE, Some(Fate::Gone));
        }
        counters.counts.repairs += 1;
        counters.count(Call::BringPages);
        // SAFETY: forwarded to the caller.
        let (back, refused) = unsafe { self.relocate_in(at, run.parked + skip, len) };
        if back > 0 {
            return (back, Some(Fate::Stayed(Call::BringPages, why)));
        }
        if refused == Some(Errno(libc::EAGAIN)) {
            return (0, None);
        }
        // The access or the lock of the mapping has changed, so no page can move into it.
        // UFFDIO_COPY can still fill it with new pages.
        counters.count(Call::FillPages);
        // The lock is released: if a parked page is gone, reading its place faults, and the
        // attendant needs the lock to handle that.
        *open = None;
        // SAFETY: as above; the parked pages are readable.
        let (filled, refused) = unsafe { sys::uffd_copy(self.uffd, at, run.parked + skip, len) };
        *open = Some(self.shared.lock());
        match refused {
            _ if filled > 0 => (filled, Some(Fate::Stayed(Call::BringPages, why))),
            // Without memory for a new page there is nowhere else to put the contents, so try
            // again.
            None | Some(Errno(libc::EAGAIN | libc::ENOMEM)) => (0, None),
            // No call works across two mappings, and somebody has split this one. A single page
            // lies in one mapping. SAFETY: forwarded to the caller.
            Some(_) if len > BASE_PAGE => unsafe { self.bring(run, at, BASE_PAGE, open, counters) },
            // The mapping is gone or another one, or the page itself cannot be read.
            Some(_) => (BASE_PAGE, Some(Fate::Gone)),
        }
    }
}

/// The watcher: gives back parked pages, and supervises the worker's calls that take pages, until
/// the end.
#[inline(never)]
pub(super) fn watcher(ground: Ground<'_>, _: [Kept; 2]) {
    const TICK: Duration = Duration::from_millis(10);
    let mut seen = Sight::default();
    let look = || seen = ground.end_what_is_stuck(seen);
    // SAFETY: a worker leaves pages of its parking places, when their copies have come and the
    // places are not registered any more.
    let give_back = |left: &Left| unsafe { left.give_back() };
    ground.shared.vacated.watch(TICK, give_back, look);
}

/// The attendant: serves faults in the ranges until `end` is signalled. It is a function and not a
/// closure, because a closure's captured variables lie on the heap, which must not be read here.
#[inline(never)]
pub(super) fn attendant(ground: Ground<'_>, kept: [Kept; 2]) {
    /// How soon a lost descriptor is noticed, in milliseconds: nothing else would end the wait
    /// then.
    const LOOK_MS: i32 = 500;
    let mut waits = kept.map(|kept| kept.number());
    loop {
        // Messages are read also after an interrupted call.
        let [_, is_over] = wait_readable(waits, LOOK_MS);
        let [faults, ends] = kept.each_ref().map(Kept::is_ours);
        if !faults {
            // Other code has closed the userfaultfd, which has ended all registrations.
            return;
        }
        ground.attend();
        if ends && is_over {
            return;
        }
        if !ends {
            // Threads that touch holes still need service until the userfaultfd is closed.
            waits[1] = -1;
        }
    }
}
