//! The window: pages leave the range, are copied, and the copies come.
//!
//! Nothing here allocates, logs, or touches memory of the program: the heap may lie in the area.
//! The data that it uses lies on the stack, in memory that [`Mapped`](super::mapped::Mapped) has, or
//! is static: mappings with static variables are not moved.
//!
//! One lock, [`Shared::open`], orders what the worker and the [`attendant`] do:
//!
//! * The worker takes pages out, and brings their copies, with the lock held.
//! * The attendant reads messages with the lock held, and does at once what they ask for.
//!
//! So a page of zeros never comes into an area that is open: the copy would find its place taken.
//!
//! Pages that the program discards (`MADV_DONTNEED`) or unmaps are noted, and this job does not
//! take them or bring them any more. The thread that does so waits until its message has been read.
//! Until then the kernel refuses to move pages through this userfaultfd, out of a range as well as
//! into one (EAGAIN), and the attendant notes what it has read before it lets go of the lock. So
//! pages that were discarded do not come back, and pages of a mapping that has replaced the range
//! are not taken: UFFDIO_MOVE does not ask whether what it takes from is registered.

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

/// Runs of pages that one window moves, at most.
pub(super) const MOST_RUNS: usize = 64;
/// How often a call is repeated that a page on its way elsewhere has refused.
const TRIES: u32 = 32;

/// How often messages are read, a few each time, while some cannot be dealt with.
const MOST_ROUNDS: usize = 1024;

/// How much CPU time a call that takes pages may need for one page, before it counts as stuck.
const STUCK_NS: u64 = 10_000_000;

/// The lock, held.
type Open<'a> = MutexGuard<'a, Range<usize>>;

/// What the worker and the attendant share. It lies in memory of the library's own.
pub(super) struct Shared {
    /// The area whose pages may be away; empty while there is none.
    open: Mutex<Range<usize>>,
    taking: Taking,
    served: Served,
    pub(super) vacated: Vacated,
    #[cfg(test)]
    pub(super) refuse: super::tests::Refuse,
}

/// What the threads beside the worker say of themselves.
#[derive(Default)]
pub(super) struct Served {
    /// How many of them need nothing of the heap any more.
    pub(super) ready: AtomicU64,
    /// How many of them were traced at their start.
    pub(super) traced: AtomicU64,
    /// The CPU time of those that have ended.
    pub(super) cpu_ns: AtomicU64,
    /// Of how many it is not known.
    pub(super) unknown: AtomicU64,
}

/// The call that takes pages, while it lasts.
#[derive(Default)]
struct Taking {
    /// Since when; 0 while there is none.
    since_ns: AtomicU64,
    /// The clock of the worker's CPU time.
    clock: AtomicI32,
    to: AtomicUsize,
    len: AtomicUsize,
}

/// What the watcher has seen of a call.
#[derive(Clone, Copy, Default, PartialEq)]
pub(super) struct Sight {
    since_ns: u64,
    /// The first place that is free.
    place: usize,
    /// The worker's CPU time.
    cpu_ns: u64,
}

/// A registered range, and where the bits of its pages begin.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) first_bit: usize,
}

/// Addresses and descriptors for windows. Copied to the stack before a window begins.
#[derive(Clone, Copy)]
pub(super) struct Ground<'a> {
    pub(super) uffd: BorrowedFd<'a>,
    pub(super) pagemap: BorrowedFd<'a>,
    pub(super) shared: &'a Shared,
    /// Ascending.
    pub(super) spans: &'a [Span],
    /// A bit for each page of the spans: the program has discarded it.
    pub(super) discarded: &'a [AtomicU64],
}

/// Pages that move in a window.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Run {
    /// Where they lie, and where they are parked meanwhile.
    pub(super) at: usize,
    pub(super) parked: usize,
    /// Where their copies are made, on the node that they are to have.
    pub(super) copy: usize,
    pub(super) len: usize,
    /// Whether they are one huge page or several.
    pub(super) huge: bool,
}

/// What became of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// Their copies have come.
    Moved,
    /// A call refused them. They are where they were.
    Stayed(Call, Errno),
    /// The program has discarded them.
    Discarded,
    /// Their mapping is gone, or is another one.
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
        // The window keeps room for what it may have to say.
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

    /// The pages from `at` on, before `end`, that have been discarded, or have not been.
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

    /// Does what waiting messages ask for.
    ///
    /// The kernel tells of faults before it tells what is discarded. While a discard waits to be
    /// read, no hole can be filled (EAGAIN). A thread that was woken then would fault again, and
    /// its message would come first again. So threads whose hole could not be filled stay asleep
    /// until everything has been read.
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
                        // A page has come meanwhile, or the mapping is another one: the thread
                        // tries again, and sends another message if it must.
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
    /// [`leap_memory`](super::leap_memory). Parking places and copies are the caller's. A parking
    /// place is a registered hole, and what copies are made into is present.
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
            // A write by way of `/proc/PID/mem` or `ptrace(2)` may have looked up a page before it was
            // taken, and not have stored to it yet. Meanwhile it holds the lock of the address space
            // for reading, as the call does that takes pages. This one changes nothing, and holds the
            // lock for writing. Where a filter refuses it, such a write may be lost.
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

    /// Ends a call that takes pages, if it does not end by itself. Some kernels ask for ever
    /// whether a pinned huge page can be split, and do so at the place that the page is to have.
    /// If somebody else has filled that place, the call ends (EEXIST). `before`: what was seen
    /// last. Returns what is seen now.
    pub(super) fn end_what_is_stuck(&self, before: Sight) -> Sight {
        let Taking { since_ns, clock, to, len } = &self.shared.taking;
        let since = since_ns.load(Ordering::Acquire);
        if since == 0 {
            return Sight::default();
        }
        let (to, len) = (to.load(Ordering::Relaxed), len.load(Ordering::Relaxed));
        let cpu_ns = sys::cpu_time_ns(clock.load(Ordering::Relaxed)).unwrap_or(0);
        // Pages move one after the other: it is at the first place that is free.
        let there = self.alike_pages(to, len, |categories| categories & page_is::PRESENT != 0);
        let place = to + there;
        if (before.since_ns, before.place) != (since, place) || there == len {
            return Sight { since_ns: since, place, cpu_ns };
        }
        if cpu_ns.saturating_sub(before.cpu_ns) >= STUCK_NS
            && since_ns.load(Ordering::Acquire) == since
        {
            // If the call has just ended, the place is given back with the others.
            let _ = sys::uffd_zeropage(self.uffd, place, BASE_PAGE);
        }
        before
    }

    /// Takes pages by one call, while somebody looks how long it lasts. Returns how many bytes are
    /// there, from the first page on, and why not more.
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
        // A page that was filled to end the call is the page of zeros. A page that reclaim had in hand has
        // moved as an entry of the swap.
        let arrived = |categories| {
            categories & page_is::ZERO == 0
                && categories & (page_is::PRESENT | page_is::SWAPPED) != 0
        };
        (self.untold(dst, len, done, arrived), refused)
    }

    /// Brings pages of the library's own by one call. Returns the same.
    ///
    /// # Safety
    /// As for [`Ground::pass`].
    unsafe fn relocate_in(&self, dst: usize, src: usize, len: usize) -> (usize, Option<Errno>) {
        // SAFETY: forwarded to the caller.
        let (done, refused) = unsafe { self.relocate(dst, src, len) };
        (self.untold(src, len, done, |categories| categories == 0), refused)
    }

    /// Some kernels move pages and do not count them, where something was in the way for a moment
    /// (Linux 6.18, until "userfaultfd: reset err to be 0 when move_pages_ptes succeeded"). So
    /// after a call that has counted `done` of `len` bytes, it is looked how many pages of the
    /// library's own side are as they are after a move.
    fn untold(&self, own: usize, len: usize, done: usize, is_done: impl Fn(u64) -> bool) -> usize {
        let mut at = done;
        while at < len {
            // It tells a few runs of pages each time.
            match self.alike_pages(own + at, len - at, &is_done) {
                0 => break,
                more => at += more,
            }
        }
        at
    }

    /// How many bytes, from the first page on, have pages of which `is` holds.
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

    /// Moves pages, unless a test wants to see what follows where the kernel does not.
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

    /// Lets the attendant read its messages. Until then the kernel moves nothing, if a mapping
    /// changes or pages are being discarded.
    fn let_attend<'a>(&'a self, open: &mut Option<Open<'a>>) {
        *open = None;
        thread::sleep(Duration::from_micros(5));
        *open = Some(self.shared.lock());
    }

    /// Takes pages out of the range, as far as the kernel lets them go.
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
            // Of what is parked now, each page may need a fate of its own kind.
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
                // The kernel moves nothing of such a mapping.
                Errno(libc::EINVAL) => rest,
                // The call was stuck, and would be at each page of the same huge page.
                Errno(libc::EEXIST) => (super::HUGE - at % super::HUGE).min(rest),
                // Of a huge page all stays.
                _ if run.huge => (super::HUGE - at % super::HUGE).min(rest),
                _ => BASE_PAGE,
            };
            fates.say(at, len, Fate::Stayed(Call::TakePages, errno));
            (done, tries) = (done + len, 0);
        }
    }

    /// Brings the copies of `len` bytes of a run at `at`, or the old pages back. Returns of how
    /// many bytes the fate is, or `None` if the call has to be repeated.
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
            // Only who has the descriptor can fill a hole, so a new mapping lies here that the
            // program itself has registered with it. The page is the program's.
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
        // The access or the lock of the mapping has changed, so that pages cannot move into it. New
        // ones can be made.
        counters.count(Call::FillPages);
        // Without the lock: if a parked page is gone, its place waits for the attendant.
        *open = None;
        // SAFETY: as above; the parked pages are readable.
        let (filled, refused) = unsafe { sys::uffd_copy(self.uffd, at, run.parked + skip, len) };
        *open = Some(self.shared.lock());
        match refused {
            _ if filled > 0 => (filled, Some(Fate::Stayed(Call::BringPages, why))),
            // Without memory the page has nowhere to go but here: again, until there is some.
            None | Some(Errno(libc::EAGAIN | libc::ENOMEM)) => (0, None),
            // No call works on pages of several mappings, and somebody has split this one. A page
            // lies in one mapping.
            // SAFETY: forwarded to the caller.
            Some(_) if len > BASE_PAGE => unsafe { self.bring(run, at, BASE_PAGE, open, counters) },
            // The mapping is gone or another one, or the page itself cannot be read.
            Some(_) => (BASE_PAGE, Some(Fate::Gone)),
        }
    }
}

/// Gives back what windows leave, and looks after the worker's calls, until the end.
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

/// Serves the ranges until `end` is signalled. A function of its own: nothing may be read from the
/// heap, where captured variables lie.
#[inline(never)]
pub(super) fn attendant(ground: Ground<'_>, kept: [Kept; 2]) {
    /// How soon it is noticed that a descriptor is no longer the job's: then nothing ends the wait.
    const LOOK_MS: i32 = 500;
    let mut waits = kept.map(|kept| kept.number());
    loop {
        // Messages are read also after an interrupted call.
        let [_, is_over] = wait_readable(waits, LOOK_MS);
        let [faults, ends] = kept.each_ref().map(Kept::is_ours);
        if !faults {
            // Closing the userfaultfd has ended all registrations.
            return;
        }
        ground.attend();
        if ends && is_over {
            return;
        }
        if !ends {
            // Threads that touch holes are served until the userfaultfd is closed.
            waits[1] = -1;
        }
    }
}
