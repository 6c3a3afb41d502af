//! Owns the state that windows need, in memory that no allocator knows, and runs the attendant and
//! the watcher, the threads beside the job's worker.
//!
//! The program's heap may lie in the ranges, so a thread that touches the heap may hit a hole and
//! wait for the attendant. So the attendant starts before the ranges are registered, and ends after
//! their registration has.

use std::ffi::CStr;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use pageleap_sys::{
    self as sys, Errno, Event, Kept, KeptFd, Thread, thread_cpu_time_ns, uffd_mode,
};

use super::mapped::Mapped;
use super::pages::Pagemap;
use super::vacated::{Vacated, places_for};
use super::window::{Ground, Shared, Span, attendant, watcher};
use crate::error::Error;
use crate::job::run::AbortOnUnwind;
use crate::observe;
use crate::priority::{Raised, no_thread};
use crate::sync::{Mutex, lock};
use crate::tracer;
use crate::units::{BASE_PAGE, Call};

/// The body of a thread, which ends when a descriptor is signalled.
type Role = fn(Ground<'static>, [Kept; 2]);

/// The threads beside the worker.
const ROLES: [(&CStr, Role); 2] = [(c"pageleap-holes", attendant), (c"pageleap-watch", watcher)];

/// The ranges of a job, and the threads that serve them.
pub(super) struct Yard {
    /// Contains a [`Shared`], then the [`Span`]s, then the bits of discarded pages.
    mapped: Mapped,
    spans: usize,
    words: usize,
    uffd: KeptFd,
    pagemap: Pagemap,
    /// How many of the spans are registered.
    registered: AtomicUsize,
    /// Signalled to end the threads.
    end: Event,
    threads: Mutex<Vec<Thread>>,
}

const SPANS_AT: usize = size_of::<Shared>().next_multiple_of(64);

impl Yard {
    /// Prepares windows on these ranges, which are ascending, and starts the threads.
    pub(super) fn new(
        ranges: &[Range<usize>],
        uffd: OwnedFd,
        pagemap: Pagemap,
    ) -> Result<Yard, Error> {
        let refused = |(call, errno)| Error::call(call, ranges[0].start, ranges[0].len(), errno);
        let bytes: usize = ranges.iter().map(|range| range.len()).sum();
        let pages = bytes / BASE_PAGE;
        let words = pages.div_ceil(64);
        let bits_at = (SPANS_AT + ranges.len() * size_of::<Span>()).next_multiple_of(64);
        let len = (bits_at + words * size_of::<u64>()).next_multiple_of(BASE_PAGE);
        let mapped = Mapped::new(len, BASE_PAGE).map_err(refused)?;
        let start = mapped.start();
        let mut first_bit = 0;
        for (number, range) in ranges.iter().enumerate() {
            let span = Span { start: range.start, end: range.end, first_bit };
            first_bit += range.len() / BASE_PAGE;
            // SAFETY: the mapping is new, large enough, and aligned to pages.
            unsafe { ((start + SPANS_AT) as *mut Span).add(number).write(span) };
        }
        // SAFETY: as above.
        unsafe { (start as *mut Shared).write(Shared::new(places_for(bytes))) };
        let yard = Yard {
            mapped,
            spans: ranges.len(),
            words,
            uffd: KeptFd::new(uffd).map_err(|errno| refused((Call::OpenTracker, errno)))?,
            pagemap,
            registered: AtomicUsize::new(0),
            end: Event::new().map_err(|errno| refused((Call::CreateFile, errno)))?,
            threads: Mutex::new(Vec::new()),
        };
        let refused = |errno| no_thread("a thread that reads messages of the kernel", errno);
        yard.start_threads().map_err(refused)?;
        Ok(yard)
    }

    /// Starts the threads, and waits until they no longer access the heap.
    fn start_threads(&self) -> Result<(), Errno> {
        for (number, (name, role)) in ROLES.into_iter().enumerate() {
            // SAFETY: `close` joins the threads before the value goes.
            let ground = unsafe { self.ground_for_threads() };
            let kept = [self.uffd.kept(), self.end.kept()];
            let thread = Thread::start(name, move || {
                let bomb = AbortOnUnwind;
                // The captured values lie on the heap. This copies them to the stack.
                let (ground, kept) = std::hint::black_box((ground, kept));
                let served = ground.shared.served();
                let is_traced = u64::from(tracer::of_this_thread().is_some());
                served.traced.fetch_add(is_traced, Relaxed);
                served.ready.fetch_add(1, Release);
                // Threads of the program wait for this one.
                Raised::this_thread(|_| ());
                role(ground, kept);
                match thread_cpu_time_ns() {
                    Ok(ns) => served.cpu_ns.fetch_add(ns, Relaxed),
                    Err(_) => served.unknown.fetch_add(1, Relaxed),
                };
                std::mem::forget(bomb);
            })?;
            lock(&self.threads).push(thread);
            while self.ground().shared.served().ready.load(Acquire) <= number as u64 {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    pub(super) fn ground(&self) -> Ground<'_> {
        // SAFETY: the returned value borrows `self`, which therefore outlives it.
        unsafe { self.ground_for_threads() }
    }

    /// # Safety
    /// This value outlives the returned one, and stays the owner of its mapping and descriptors.
    unsafe fn ground_for_threads<'a>(&self) -> Ground<'a> {
        let start = self.mapped.start();
        let bits_at = (SPANS_AT + self.spans * size_of::<Span>()).next_multiple_of(64);
        // SAFETY: `new` has written the lock and the spans; zeros are valid bits. Nobody has a
        // mutable reference to them. The caller keeps them.
        unsafe {
            Ground {
                uffd: BorrowedFd::borrow_raw(self.uffd.as_raw_fd()),
                pagemap: BorrowedFd::borrow_raw(self.pagemap.as_fd().as_raw_fd()),
                shared: &*(start as *const Shared),
                spans: std::slice::from_raw_parts((start + SPANS_AT) as *const _, self.spans),
                discarded: std::slice::from_raw_parts((start + bits_at) as *const _, self.words),
            }
        }
    }

    /// Whether the descriptors are still this job's.
    pub(super) fn has_descriptors(&self) -> bool {
        self.lost().is_none()
    }

    /// The number of a descriptor that other code of the process has closed, and whether the number
    /// stands for another file now.
    pub(super) fn lost(&self) -> Option<(i32, bool)> {
        let all = [self.uffd.kept(), self.pagemap.kept(), self.end.kept()];
        let lost = all.into_iter().find(|kept| !kept.is_ours())?;
        Some((lost.number(), lost.is_open()))
    }

    pub(super) fn uffd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }

    pub(super) fn vacated(&self) -> &Vacated {
        &self.ground().shared.vacated
    }

    pub(super) fn pagemap(&self) -> &Pagemap {
        &self.pagemap
    }

    /// Registers the ranges for missing pages.
    ///
    /// # Safety
    /// The user keeps the contract until the registration ends.
    pub(super) unsafe fn hold(&self) -> Result<(), Error> {
        for Span { start, end, .. } in self.ground().spans {
            let len = end - start;
            // SAFETY: forwarded to the caller. The attendant serves the range.
            unsafe { sys::uffd_register(self.uffd.as_fd(), *start, len, uffd_mode::MISSING) }
                .map_err(|errno| Error::call(Call::Track, *start, len, errno))?;
            self.registered.fetch_add(1, Relaxed);
        }
        Ok(())
    }

    /// Whether another process traced the threads of the job at their start.
    pub(super) fn was_traced(&self) -> bool {
        self.ground().shared.served().traced.load(Relaxed) > 0
    }

    /// Ends the registration of a range mapping by mapping. This is needed where a part has been
    /// replaced by a mapping that userfaultfd does not support: then the kernel refuses the range
    /// as a whole.
    fn let_go_of_parts(&self, range: Range<usize>) {
        for mapping in observe::mappings(range.start, range.len()).unwrap_or_default() {
            let start = mapping.start.max(range.start);
            let len = mapping.end.min(range.end).saturating_sub(start);
            // If the kernel refuses a mapping, it has no registration.
            let _ = sys::uffd_unregister(self.uffd.as_fd(), start, len);
        }
    }

    /// How many ranges are registered.
    pub(super) fn registered(&self) -> usize {
        self.registered.load(Relaxed)
    }

    /// Ends the registration of the ranges, which wakes the threads that wait there. From then on
    /// the program needs none of the job's threads to use the ranges.
    ///
    /// Closing the descriptor instead would not be enough, because a child may have a copy. Only
    /// ranges that this descriptor has registered are unregistered, because until Linux 6.14 the
    /// kernel ends the registrations of other descriptors as well.
    pub(super) fn let_go(&self) {
        let mut registered = self.registered.swap(0, Relaxed);
        if !self.uffd.is_ours() {
            // Closing it has ended all registrations.
            registered = 0;
        }
        for Span { start, end, .. } in &self.ground().spans[..registered] {
            if sys::uffd_unregister(self.uffd.as_fd(), *start, end - start).is_err() {
                self.let_go_of_parts(*start..*end);
            }
        }
    }

    /// Ends the registration of the ranges, then the threads. Returns their CPU time in
    /// nanoseconds, if it is known.
    ///
    /// The attendant works until the last range is unregistered, because a thread that discards
    /// pages waits for it.
    pub(super) fn close(&self) -> Option<u64> {
        self.let_go();
        self.vacated().end();
        for (number, thread) in lock(&self.threads).drain(..).enumerate().rev() {
            if number == 0 {
                // The attendant ends last: if the kernel has kept the registration of a parking
                // place, the watcher waits for the attendant when it gives back pages there.
                if !self.end.signal() {
                    // Other code has closed the event, so the attendant ends when the userfaultfd
                    // is closed. SAFETY: nothing is registered any more, and the last drop finds
                    // that it is not the job's.
                    unsafe { self.uffd.kept().close() };
                }
            }
            thread.join();
        }
        let served = self.ground().shared.served();
        (served.unknown.load(Relaxed) == 0).then(|| served.cpu_ns.load(Relaxed))
    }
}

impl Drop for Yard {
    fn drop(&mut self) {
        self.close();
    }
}
