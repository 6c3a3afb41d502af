//! The kernel's part of windows, modelled for shuttle: the effects of UFFDIO_MOVE, of messages and
//! of discards on pages, as far as [`window`](super::window) relies on them (docs/protocol.md,
//! 3.7). The tests run windows beside threads that write, discard, and replace mappings.
//!
//! The functions have the names, arguments and results of those in `pageleap_sys`. Addresses are
//! numbers, and a page contains one word.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64 as Count, Ordering::Relaxed};

use pageleap_sys::{CopyMethod, Errno, PageQuery, PageRegion, UffdMessage, page_is};
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
use shuttle::thread;

use super::window::{Fate, Ground, Run, Shared, Span};
use crate::engine::effort::Counters;
use crate::schedules::bounded::each_schedule;
use crate::schedules::explore::{at_random, expect, explore, with_few_switches};
use crate::units::BASE_PAGE;

/// Addresses of the range, the parking place and the copies.
const RANGE: usize = 1 << 30;
const PARKING: usize = 2 << 30;
const COPIES: usize = 3 << 30;
/// Pages of the range.
const PAGES: usize = 4;
/// The page that its owner discards, and the page where something else is mapped.
const DISCARDED: usize = 2;
const REPLACED: usize = 3;
/// The contents of a copy before it is made.
const GARBAGE: u64 = u64::MAX;

#[derive(Default)]
struct State {
    /// Contents of the pages that are present.
    pages: BTreeMap<usize, u64>,
    /// Pages of mappings that are not registered.
    foreign: BTreeSet<usize>,
    /// Pinned pages, which do not move.
    pinned: BTreeSet<usize>,
    messages: VecDeque<(u64, UffdMessage)>,
    /// The number of the last message that was sent, and of the last one that was read.
    sent: u64,
    read: u64,
    /// Threads that discard or unmap and wait for their message to be read.
    changing: u32,
    /// How often waiting threads were woken.
    wakes: u64,
    over: bool,
}

#[derive(Default)]
struct Kernel {
    state: Mutex<State>,
    changed: Condvar,
}

shuttle::lazy_static! {
    static ref KERNEL: Kernel = Kernel::default();
}

/// Counts of events in all schedules.
static UNCOUNTED: Count = Count::new(0);
static AGAIN: Count = Count::new(0);
static WAITED: Count = Count::new(0);

fn page(at: usize) -> usize {
    RANGE + at * BASE_PAGE
}

impl Kernel {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Waits until `reached`.
    fn wait(&self, reached: impl Fn(&State) -> bool) {
        let mut state = self.lock();
        while !reached(&state) {
            state = self.changed.wait(state).unwrap();
        }
    }

    fn send(&self, message: UffdMessage) -> u64 {
        let mut state = self.lock();
        state.sent += 1;
        let number = state.sent;
        state.messages.push_back((number, message));
        self.changed.notify_all();
        number
    }

    /// An access to a page by a thread of the program, which waits for a page that is missing.
    fn access<R>(&self, at: usize, body: impl Fn(&mut u64) -> R) -> R {
        loop {
            let mut state = self.lock();
            if let Some(contents) = state.pages.get_mut(&at) {
                return body(contents);
            }
            let wakes = state.wakes;
            drop(state);
            WAITED.fetch_add(1, Relaxed);
            self.send(UffdMessage::Fault(at));
            self.wait(|state| state.wakes != wakes || state.pages.contains_key(&at));
            // While mappings change, the attendant wakes this thread without filling the hole.
            thread::yield_now();
        }
    }

    /// Sends a message of a change, waits until it is read, and lets pages move again.
    fn announce(&self, at: usize) {
        let number = self.send(UffdMessage::Remove(at, at + BASE_PAGE));
        self.wait(|state| state.read >= number);
        self.lock().changing -= 1;
    }

    /// MADV_DONTNEED sends its message before the pages go.
    fn discard(&self, at: usize) {
        self.lock().changing += 1;
        self.announce(at);
        self.lock().pages.remove(&at);
    }

    /// Maps something else. The message is sent after the old mapping has gone.
    fn replace(&self, at: usize, contents: u64) {
        let mut state = self.lock();
        state.changing += 1;
        state.pages.insert(at, contents);
        state.foreign.insert(at);
        drop(state);
        self.announce(at);
    }

    /// Fills a hole of a registered mapping.
    fn fill(&self, at: usize, contents: u64) -> Result<(), Errno> {
        let mut state = self.lock();
        if state.changing > 0 {
            AGAIN.fetch_add(1, Relaxed);
            return Err(Errno(libc::EAGAIN));
        }
        if state.foreign.contains(&at) {
            return Err(Errno(libc::ENOENT));
        }
        if state.pages.contains_key(&at) {
            return Err(Errno(libc::EEXIST));
        }
        state.pages.insert(at, contents);
        Ok(())
    }

    fn wake(&self) {
        self.lock().wakes += 1;
        self.changed.notify_all();
    }

    /// Moves one page.
    fn relocate(&self, dst: usize, src: usize) -> Result<(), Errno> {
        let mut state = self.lock();
        let refused = match state.pages.get(&src) {
            _ if state.changing > 0 => libc::EAGAIN,
            // The kernel checks the destination for registration, and not the source.
            _ if state.foreign.contains(&dst) => libc::ENOENT,
            None => libc::ENOENT,
            _ if state.pages.contains_key(&dst) => libc::EEXIST,
            _ if state.pinned.contains(&src) => libc::EBUSY,
            Some(_) => 0,
        };
        if refused != 0 {
            AGAIN.fetch_add(u64::from(refused == libc::EAGAIN), Relaxed);
            return Err(Errno(refused));
        }
        let contents = state.pages.remove(&src).expect("it was there");
        state.pages.insert(dst, contents);
        Ok(())
    }
}

pub(super) unsafe fn uffd_move(
    _: BorrowedFd<'_>,
    dst: usize,
    src: usize,
    len: usize,
) -> (usize, Option<Errno>) {
    for done in (0..len).step_by(BASE_PAGE) {
        if let Err(errno) = KERNEL.relocate(dst + done, src + done) {
            return (done, (done == 0).then_some(errno));
        }
        if thread_rng().gen_ratio(1, 8) {
            // Linux 6.18 does not count moved pages after a transient obstacle.
            UNCOUNTED.fetch_add(1, Relaxed);
            return (0, Some(Errno(libc::EAGAIN)));
        }
    }
    (len, None)
}

pub(super) unsafe fn uffd_copy(
    _: BorrowedFd<'_>,
    dst: usize,
    src: usize,
    len: usize,
) -> (usize, Option<Errno>) {
    for done in (0..len).step_by(BASE_PAGE) {
        let contents = KERNEL.lock().pages[&(src + done)];
        if let Err(errno) = KERNEL.fill(dst + done, contents) {
            return (done, (done == 0).then_some(errno));
        }
    }
    KERNEL.wake();
    (len, None)
}

/// The model changes each page under a lock, so no write from outside is under way once a page has
/// been taken.
pub(super) unsafe fn protect(_: usize, _: usize, _: libc::c_int) -> Result<(), Errno> {
    Ok(())
}

pub(super) fn uffd_zeropage(_: BorrowedFd<'_>, addr: usize, _: usize) -> Result<(), Errno> {
    KERNEL.fill(addr, 0)?;
    KERNEL.wake();
    Ok(())
}

pub(super) fn uffd_wake(_: BorrowedFd<'_>, _: usize, _: usize) -> Result<(), Errno> {
    KERNEL.wake();
    Ok(())
}

pub(super) fn uffd_read(_: BorrowedFd<'_>, handle: &mut dyn FnMut(UffdMessage)) -> bool {
    let mut state = KERNEL.lock();
    let messages = std::mem::take(&mut state.messages);
    state.read = messages.back().map_or(state.read, |(number, _)| *number);
    drop(state);
    KERNEL.changed.notify_all();
    let any = !messages.is_empty();
    messages.into_iter().for_each(|(_, message)| handle(message));
    any
}

pub(super) unsafe fn copy_racing(dst: usize, src: usize, len: usize, _: CopyMethod) {
    for done in (0..len).step_by(BASE_PAGE) {
        let contents = KERNEL.lock().pages[&(src + done)];
        KERNEL.lock().pages.insert(dst + done, contents);
    }
}

pub(super) unsafe fn pagemap_scan(
    _: BorrowedFd<'_>,
    range: Range<usize>,
    _: u64,
    _: &PageQuery,
    found: &mut [PageRegion],
) -> Result<(usize, usize), Errno> {
    let (mut count, mut end) = (0, range.start);
    for at in range.step_by(BASE_PAGE) {
        let is_present = KERNEL.lock().pages.contains_key(&at);
        let categories = if is_present { page_is::PRESENT } else { 0 };
        let room = count < found.len();
        match found[..count].last_mut() {
            Some(last) if last.categories == categories => last.end += BASE_PAGE as u64,
            _ if !room => break,
            _ => {
                let (start, end) = (at as u64, (at + BASE_PAGE) as u64);
                found[count] = PageRegion { start, end, categories };
                count += 1;
            }
        }
        end = at + BASE_PAGE;
    }
    Ok((count, end))
}

pub(super) fn own_cpu_clock() -> i32 {
    0
}

pub(super) fn cpu_time_ns(_: i32) -> Result<u64, Errno> {
    Ok(0)
}

/// The ground of windows over the range.
struct Field {
    shared: Shared,
    spans: [Span; 1],
    discarded: [Count; 1],
}

impl Field {
    fn ground(&self) -> Ground<'_> {
        // SAFETY: the calls of this module look at no descriptor.
        let nothing = unsafe { BorrowedFd::borrow_raw(0) };
        Ground {
            uffd: nothing,
            pagemap: nothing,
            shared: &self.shared,
            spans: &self.spans,
            discarded: &self.discarded,
        }
    }

    fn attend(&self) {
        loop {
            KERNEL.wait(|state| state.over || !state.messages.is_empty());
            self.ground().attend();
            let state = KERNEL.lock();
            if state.over && state.messages.is_empty() {
                return;
            }
        }
    }

    /// One window over pages that are present, as the mover finds them.
    fn window(&self, first: usize, pages: usize, seen: &Seen) {
        let is_there = |at: &usize| KERNEL.lock().pages.contains_key(&page(*at));
        let found: Vec<usize> = (first..first + pages).filter(is_there).collect();
        let mut runs: Vec<Run> = Vec::new();
        for at in found {
            let offset = at * BASE_PAGE;
            KERNEL.lock().pages.insert(COPIES + offset, GARBAGE);
            match runs.last_mut() {
                Some(run) if run.at + run.len == page(at) => run.len += BASE_PAGE,
                _ => runs.push(Run {
                    at: page(at),
                    parked: PARKING + offset,
                    copy: COPIES + offset,
                    len: BASE_PAGE,
                    huge: false,
                }),
            }
        }
        let area = page(first)..page(first + pages);
        let mut counters = Counters::default();
        // SAFETY: nothing here is memory.
        let fates = unsafe { self.ground().pass(area, &runs, CopyMethod::DEFAULT, &mut counters) };
        for told in fates.as_slice() {
            let count = match told.fate {
                Fate::Moved => &seen.moved,
                Fate::Stayed(..) => &seen.stayed,
                Fate::Discarded | Fate::Gone => &seen.discarded,
            };
            count.fetch_add(1, Relaxed);
        }
        let mut state = KERNEL.lock();
        let of_range = RANGE..page(PAGES);
        state.pages.retain(|at, _| of_range.contains(at));
    }
}

#[derive(Default)]
struct Seen {
    moved: Count,
    stayed: Count,
    discarded: Count,
}

/// Stores rising values in a page of its own, and reads them back.
fn own(at: usize, writes: u64) {
    for value in 1..=writes {
        KERNEL.access(page(at), |contents| {
            assert_eq!(*contents, value - 1, "LOST: page {at}");
            *contents = value;
        });
    }
}

/// Discards a page of its own, and sees zeros until it has written again.
fn own_and_discard(at: usize, rounds: u64) {
    for value in 1..=rounds {
        KERNEL.access(page(at), |contents| *contents = value);
        KERNEL.access(page(at), |contents| assert_eq!(*contents, value, "LOST: page {at}"));
        KERNEL.discard(page(at));
        KERNEL.access(page(at), |contents| assert_eq!(*contents, 0, "what was discarded is back"));
    }
}

fn windows_beside_the_program(seen: &Seen) {
    const WRITES: u64 = 3;
    let field = Arc::new(Field {
        shared: Shared::new(2),
        spans: [Span { start: page(0), end: page(PAGES), first_bit: 0 }],
        discarded: [Count::new(0)],
    });
    let pinned = thread_rng().gen_ratio(1, 4);
    {
        let mut state = KERNEL.lock();
        state.pages.extend((0..PAGES).map(|at| (page(at), 0)));
        if pinned {
            state.pinned.insert(page(1));
        }
    }
    let other = field.clone();
    let attendant = thread::spawn(move || other.attend());
    let owners = [
        thread::spawn(|| own(0, WRITES)),
        thread::spawn(|| own(1, WRITES)),
        thread::spawn(|| own_and_discard(DISCARDED, 2)),
        thread::spawn(|| KERNEL.replace(page(REPLACED), 77)),
    ];
    for (first, pages) in [(0, PAGES), (0, 2), (1, PAGES - 1)] {
        field.window(first, pages, seen);
    }
    owners.into_iter().for_each(|owner| owner.join().unwrap());
    KERNEL.lock().over = true;
    KERNEL.changed.notify_all();
    attendant.join().unwrap();
    let state = KERNEL.lock();
    assert_eq!([0, 1].map(|at| state.pages.get(&page(at))), [Some(&WRITES); 2], "LOST");
    assert_eq!(state.pages.get(&page(REPLACED)), Some(&77), "LOST: memory of others");
}

#[test]
fn shuttle_windows_lose_nothing() {
    let seen = std::sync::Arc::new(Seen::default());
    let (one, other) = (seen.clone(), seen.clone());
    explore(at_random(0), move || windows_beside_the_program(&one));
    explore(with_few_switches(4, 1), move || windows_beside_the_program(&other));
    expect(&[
        ("moved", &seen.moved),
        ("stayed", &seen.stayed),
        ("discarded", &seen.discarded),
        ("not counted", &UNCOUNTED),
        ("refused for a change", &AGAIN),
        ("waited", &WAITED),
    ]);
}

// One page, and one thread beside its window
// -------------------------------------------------------------------------------------------------

/// Contents of the page when the window begins.
const CONTENTS: u64 = 5;

/// Runs a window over one page while a thread of the program does something to the page. At the end
/// the page must have `contents`; `lost` describes the failure if it does not. `asleep` describes
/// the failure if a thread waits for ever.
fn one_page(asleep: &str, does: fn(), contents: u64, lost: &'static str) {
    // The threads run in turn: the program, then either the attendant or the window.
    for is_attended_first in [false, true] {
        each_schedule(2, asleep, move || {
            let field = Arc::new(Field {
                shared: Shared::new(2),
                spans: [Span { start: page(0), end: page(1), first_bit: 0 }],
                discarded: [Count::new(0)],
            });
            KERNEL.lock().pages.insert(page(0), CONTENTS);
            let attend = || {
                let other = field.clone();
                thread::spawn(move || other.attend())
            };
            let before = is_attended_first.then(attend);
            let program = thread::spawn(does);
            let attendant = before.unwrap_or_else(attend);
            field.window(0, 1, &Seen::default());
            program.join().unwrap();
            KERNEL.lock().over = true;
            KERNEL.changed.notify_all();
            attendant.join().unwrap();
            let found = KERNEL.lock().pages.get(&page(0)).copied();
            assert_eq!(found, Some(contents), "{lost}");
        });
    }
}

#[test]
fn shuttle_directed_who_touches_a_page_in_a_window_waits_for_it() {
    let access = || {
        KERNEL.access(page(0), |contents| {
            assert_eq!(*contents, CONTENTS, "a page is seen empty in a window");
            *contents += 1;
        });
    };
    let asleep = "a thread waits for a page whose window has ended";
    one_page(asleep, access, CONTENTS + 1, "a store beside a window is gone");
}

#[test]
fn shuttle_directed_what_is_discarded_beside_a_window_stays_away() {
    let discard = || {
        KERNEL.discard(page(0));
        KERNEL.access(page(0), |contents| {
            assert_eq!(*contents, 0, "a window brings back what was discarded");
        });
    };
    one_page("a discard beside a window does not end", discard, 0, "discarded and not empty");
}

#[test]
fn shuttle_directed_a_window_takes_nothing_of_another_mapping() {
    let asleep = "a mapping beside a window does not end";
    let replace = || KERNEL.replace(page(0), 77);
    one_page(asleep, replace, 77, "a window has taken a page of another mapping");
}
