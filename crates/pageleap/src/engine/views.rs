//! Views of a region: further mappings of the frames of a span, each with page tables on the node
//! of the threads that use it.
//!
//! A thread may store through any of them, so an engine that moves the span closes all of them
//! before it copies:
//!
//! ```text
//!                     span                 each view
//!   before            old frames           old frames
//!   views close       old frames           no entries; threads wait (MADV_DONTNEED)
//!   the span closes   no entries           no entries           then the copy, which is final
//!   the span opens    new frames           no entries
//!   views open        new frames           new frames, one view after the other
//! ```
//!
//! No view has entries for old frames while the span has entries for new ones. So no thread can
//! read a value that another has replaced already.
//!
//! Once the span has opened, the views must get the new frames, too: nothing can be undone. So the
//! calls that the kernel may refuse for good come before the window. The new frames are mapped at a
//! *standby*, address space of the worker's, whose page tables are filled there, and in the window
//! these only move to the view (`mremap`). A shortage may keep the kernel from that, too, and is
//! outwaited. Hugetlb pages, whose page tables cannot move, are mapped in the window.

#[cfg(not(loom))]
use super::commit::still_maps;
use super::commit::{end_process, is_foreign_for_long, let_go, persist, wake};
#[cfg(not(loom))]
use super::effort::Counters;
use super::effort::{Effort, ViewsLeft};
use super::follow::{Attempt, Refusal};
use super::slot::Span;
use super::{Tools, Work};
use crate::backend::{Advice, Backend, Call, Errno, Mapping, MemoryFile, Prot};
#[cfg(not(loom))]
use crate::forks::while_mapping;
#[cfg(not(loom))]
use crate::sync::monotonic_ns;
use crate::units::NodeId;

/// The most views of a region.
pub(crate) const MOST_VIEWS: usize = if cfg!(loom) { 2 } else { 64 };

/// One more mapping of the frames of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ViewSpan {
    /// Its first address.
    pub(crate) addr: usize,
    /// The node from which its page tables come.
    pub(crate) node: NodeId,
    /// The standby, whose address agrees with the view's modulo 2 MB; 0 for hugetlb pages.
    pub(crate) standby: usize,
}

/// The views of a span. An array, because the heap may lie in the span.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Views {
    all: [ViewSpan; MOST_VIEWS],
    len: usize,
    /// The node that the calling thread prefers for page tables of the span itself.
    pub(crate) of_span: Option<NodeId>,
}

impl Views {
    pub(crate) const NONE: Views = Views {
        all: [ViewSpan { addr: 0, node: NodeId(0), standby: 0 }; MOST_VIEWS],
        len: 0,
        of_span: None,
    };

    /// Adds a view; there is room for [`MOST_VIEWS`].
    pub(crate) fn push(&mut self, view: ViewSpan) {
        self.all[self.len] = view;
        self.len += 1;
    }

    /// Gives the views their standbys, in order.
    pub(crate) fn stand_by(&mut self, addr_of: impl Fn(usize, usize) -> usize) {
        for (number, view) in self.all[..self.len].iter_mut().enumerate() {
            view.standby = addr_of(number, view.addr);
        }
    }

    pub(crate) fn as_slice(&self) -> &[ViewSpan] {
        &self.all[..self.len]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(loom)]
fn while_mapping<T>(map: impl FnOnce() -> T) -> T {
    map()
}

impl Attempt<'_> {
    /// The views, with a number for each.
    fn views(&self) -> impl Iterator<Item = (usize, ViewSpan)> {
        self.work.views.as_slice().iter().copied().enumerate()
    }

    /// Registers the views, so that threads which touch a closed one wait. If one is refused, none
    /// is registered afterwards.
    ///
    /// # Safety
    /// As [`attempt`](super::attempt).
    pub(super) unsafe fn track_views(&self, effort: &mut Effort) -> Result<(), Refusal> {
        let (backend, tracker) = (self.tools.backend, self.following.tracker);
        for (number, view) in self.views() {
            effort.count(Call::Track);
            // SAFETY: forwarded to the caller: the views are the region's, as the span is.
            let tracked = unsafe { backend.track(tracker, view.addr, self.work.span.len, false) };
            if let Err(errno) = tracked {
                // A part of this one may be registered, unless another owner's userfaultfd has it.
                let rest = number + usize::from(errno != Errno(libc::EBUSY));
                self.work.views.as_slice()[..rest].iter().for_each(|view| {
                    let_go(backend, tracker, (view.addr, self.work.span.len), effort);
                });
                return Err((Call::Track, errno));
            }
        }
        Ok(())
    }

    /// Makes the calls that the kernel may refuse, while all mappings still have their old frames:
    /// fills the standbys, and finds out whether the views may be changed at all (they may be
    /// sealed).
    ///
    /// # Safety
    /// As [`attempt`](super::attempt).
    pub(super) unsafe fn prepare_views(&self, effort: &mut Effort) -> Result<(), Refusal> {
        let mut prepared = Ok(());
        for (number, view) in self.views() {
            // SAFETY: forwarded to the caller.
            prepared = unsafe { self.prepare_view(number, view, effort) };
            if prepared.is_err() {
                break;
            }
        }
        self.prefer_own(effort);
        prepared
    }

    /// # Safety
    /// As [`attempt`](super::attempt).
    unsafe fn prepare_view(
        &self,
        number: usize,
        view: ViewSpan,
        effort: &mut Effort,
    ) -> Result<(), Refusal> {
        let Work { span: Span { len, .. }, new, .. } = *self.work;
        let backend = self.tools.backend;
        effort.count(Call::Protect);
        // SAFETY: forwarded to the caller. The view has this access already.
        unsafe { backend.protect(view.addr, len, Prot::READ_WRITE) }
            .map_err(|errno| (Call::Protect, errno))?;
        if view.standby == 0 {
            return Ok(());
        }
        prefer(backend, number, view.node, effort);
        let mapping = of_view(view.standby, len, (new.file, new.offset));
        count_mapping(effort);
        // SAFETY: the standby is the worker's.
        unsafe { map_hidden(backend, &mapping, true) }.map_err(|errno| {
            effort.after.torn_standby = Some(number);
            (Call::Map, errno)
        })?;
        effort.count(Call::Lock);
        // Under `mlockall` the mapping is locked, and the lock would move along.
        // SAFETY: as above.
        unsafe { backend.unlock(view.standby, len) }.map_err(|errno| (Call::Lock, errno))
    }

    /// Closes the views: from now on a thread that touches one sleeps in a page fault. The caller
    /// then closes the span by a call that holds the lock of the address space (mmap_lock) for
    /// writing. Such a call waits for writes by `/proc/PID/mem`, which MADV_DONTNEED does not.
    ///
    /// # Safety
    /// As [`attempt`](super::attempt). The slot is published, and the tracker holds the views.
    pub(super) unsafe fn close_views(&self, effort: &mut Effort) -> Result<(), Refusal> {
        let (backend, len) = (self.tools.backend, self.work.span.len);
        for (_, view) in self.views() {
            effort.after.views = ViewsLeft::Dropped;
            effort.count(Call::Advise);
            // SAFETY: forwarded to the caller.
            let mut dropped = unsafe { backend.advise(view.addr, len, Advice::DropTables) };
            if dropped == Err(Errno(libc::EINVAL)) {
                // The kernel does not drop entries of locked memory (`mlockall`).
                effort.count(Call::Lock);
                effort.count(Call::Advise);
                // SAFETY: as above.
                dropped = unsafe {
                    let unlocked = backend.unlock(view.addr, len);
                    unlocked.and_then(|()| backend.advise(view.addr, len, Advice::DropTables))
                };
            }
            dropped.map_err(|errno| (Call::Advise, errno))?;
        }
        Ok(())
    }

    /// Maps the new frames in all views, and wakes the threads that wait there.
    ///
    /// # Safety
    /// As [`attempt`](super::attempt). The views are closed, and the span maps the new frames.
    pub(super) unsafe fn open_views(&self, effort: &mut Effort) {
        let Work { span: Span { len, .. }, old, new, .. } = *self.work;
        let (backend, tracker) = (self.tools.backend, self.following.tracker);
        for (number, view) in self.views() {
            prefer(backend, number, view.node, effort);
            // SAFETY: forwarded to the caller: the standby has the new frames.
            let moved = view.standby != 0
                && unsafe {
                    effort.count(Call::Exchange);
                    backend.exchange(view.standby, view.addr, len).is_ok()
                };
            if !moved {
                let mapping = of_view(view.addr, len, (new.file, new.offset));
                // After a failed exchange the view may be a hole.
                let is_torn = view.standby != 0;
                // SAFETY: forwarded to the caller.
                unsafe { map(backend, &mapping, is_torn, (old.file, old.offset), effort) };
            }
            wake(backend, tracker, (view.addr, len), effort);
        }
        self.prefer_own(effort);
        effort.after.views = ViewsLeft::Mapped;
    }

    /// Opens views again whose span keeps its old frames. They fill their page tables from the same
    /// nodes as before.
    ///
    /// # Safety
    /// As [`attempt`](super::attempt). The span maps its old frames, and so do the views.
    pub(super) unsafe fn reopen_views(&self, effort: &mut Effort) {
        let len = self.work.span.len;
        let (backend, tracker) = (self.tools.backend, self.following.tracker);
        for (number, view) in self.views() {
            let_go(backend, tracker, (view.addr, len), effort);
            if effort.after.views == ViewsLeft::Untouched {
                continue;
            }
            prefer(backend, number, view.node, effort);
            effort.count(Call::Populate);
            // Entries of a shared file are writable, also if they are made for reading, and those
            // are made sixteen at a time. If this is refused, threads that touch the view fill its
            // page tables.
            // SAFETY: a mapping of frames that stay.
            if unsafe { backend.populate(view.addr, len, false) }.is_err() {
                effort.after.unasked_views |= 1 << number;
            }
        }
        if effort.after.views != ViewsLeft::Untouched {
            self.prefer_own(effort);
        }
    }

    /// Lets page tables come from the span's node again.
    fn prefer_own(&self, effort: &mut Effort) {
        if !self.work.views.is_empty() {
            effort.count(Call::PreferTables);
            let node = self.work.views.of_span.map(|node| node.0);
            // It was set before. If a cpuset refuses the node by now, the job ends.
            let _ = self.tools.backend.prefer_tables_on(node);
        }
    }
}

/// Maps frames again in a view that maps them already, so that its many mappings become one.
/// Threads that find a hole meanwhile wait for the slot, which `span`, the same part of the region,
/// publishes. Its page tables come from its node, and those of the calling thread from `preferred`
/// afterwards.
///
/// # Safety
/// As [`map_again`](super::commit::map_again).
#[cfg(not(loom))]
pub(crate) unsafe fn map_view_again(
    tools: &Tools<'_>,
    (span, view): (&Span, ViewSpan),
    frames: (MemoryFile, u64),
    preferred: Option<NodeId>,
    counters: &mut Counters,
) -> Result<(), Errno> {
    let Tools { slot, epoch, backend } = *tools;
    let (file, offset) = frames;
    if !backend.has_file(file) {
        return Err(Errno(libc::EBADF)); // the view stays as it is
    }
    let effort = &mut Effort::counting_on(*counters);
    prefer(backend, 0, view.node, effort);
    let mapping = of_view(view.addr, span.len, frames);
    let from = monotonic_ns();
    // SAFETY: `backend` outlives this function, which retires the slot.
    unsafe { slot.publish(epoch, span, super::commit::erase(backend)) };
    count_mapping(effort);
    let of_view = Span { addr: view.addr, ..*span };
    let joined = persist(effort, |refusals| {
        let plain = refusals == 0;
        // SAFETY: forwarded to the caller.
        match unsafe { map_hidden(backend, &mapping, plain) } {
            Ok(()) => Some(Ok(())),
            // The view maps these frames before and after, so only a hole must be filled.
            Err(errno)
                if refusals > 0 && still_maps(backend, &of_view, (file, offset), || true) =>
            {
                Some(Err(errno))
            }
            Err(errno) => give_up(backend, file, (refusals, plain), errno),
        }
    });
    slot.retire();
    effort.counters.window_ns = monotonic_ns().saturating_sub(from).max(1);
    effort.count(Call::PreferTables);
    let _ = backend.prefer_tables_on(preferred.map(|node| node.0));
    *counters = effort.counters;
    joined
}

/// Has page tables of a view come from its node.
fn prefer(backend: &dyn Backend, number: usize, node: NodeId, effort: &mut Effort) {
    effort.count(Call::PreferTables);
    if backend.prefer_tables_on(Some(node.0)).is_err() {
        effort.after.unasked_views |= 1 << number;
    }
}

/// A view's mapping of frames.
fn of_view(addr: usize, len: usize, (file, offset): (MemoryFile, u64)) -> Mapping {
    Mapping { addr, len, file, offset, prot: Prot::READ_WRITE, populate: true }
}

/// Counts the calls of [`map_hidden`].
fn count_mapping(effort: &mut Effort) {
    effort.count(Call::Map);
    effort.counters.calls[Call::Advise as usize] += 2;
}

/// Maps frames, and hides the mapping from children and core dumps. If it is not the `first` call,
/// there may be a hole, into which another thread may have mapped memory; that is not replaced.
///
/// # Safety
/// The range is the caller's.
unsafe fn map_hidden(backend: &dyn Backend, mapping: &Mapping, first: bool) -> Result<(), Errno> {
    // SAFETY: forwarded to the caller. Nothing is lost if a child or a core dump does get the
    // mapping.
    while_mapping(|| unsafe {
        if first { backend.map(mapping) } else { backend.map_own(mapping) }?;
        let _ = backend.advise(mapping.addr, mapping.len, Advice::DontFork);
        let _ = backend.advise(mapping.addr, mapping.len, Advice::DontDump);
        Ok(())
    })
}

/// Maps new frames in a closed view, which must not keep its old frames. After a failure it may be
/// a hole, so the call is repeated until it succeeds.
///
/// # Safety
/// The range is that of a view that is closed.
unsafe fn map(
    backend: &dyn Backend,
    mapping: &Mapping,
    is_torn: bool,
    (old_file, old_offset): (MemoryFile, u64),
    effort: &mut Effort,
) {
    let Mapping { addr, len, file, .. } = *mapping;
    count_mapping(effort);
    persist(effort, |refusals| {
        let old = || backend.maps(addr, len, old_file, old_offset);
        // Without a look (`chroot`, Landlock), whatever is mapped counts as the view's.
        let is_blind = || old().is_err() && backend.is_mapped(addr, len);
        let plain = if refusals == 0 { !is_torn } else { is_blind() };
        // SAFETY: forwarded to the caller.
        match unsafe { map_hidden(backend, mapping, plain) } {
            Ok(()) => Some(()),
            // For a second nobody has given a mapping or locked memory back. Those who could may be
            // waiting for this view. Without its old mapping, the process has one mapping less.
            Err(Errno(libc::ENOMEM | libc::EAGAIN))
                if is_foreign_for_long(refusals) && (old() == Ok(true) || is_blind()) =>
            {
                unmap(backend, addr, len)
            }
            Err(errno) => give_up(backend, file, (refusals, plain), errno),
        }
    });
}

/// Unmaps a part of a view that is closed, so that the next call finds a hole.
fn unmap(backend: &dyn Backend, addr: usize, len: usize) -> Option<()> {
    // SAFETY: threads that find the hole wait for the slot.
    let _ = unsafe { backend.release(addr, len) };
    None
}

/// Ends the process if a refused call cannot succeed any more: another owner's mapping lies there,
/// the kernel forbids a `plain` call, or the file's descriptor has been closed. Returns `None`, to
/// repeat it.
fn give_up<T>(
    backend: &dyn Backend,
    file: MemoryFile,
    (refusals, plain): (u64, bool),
    errno: Errno,
) -> Option<T> {
    let is_final = match errno.0 {
        libc::EEXIST => true,
        // Otherwise the look at the owner may have been refused.
        libc::EPERM | libc::EACCES => plain,
        _ => false,
    };
    if is_final && is_foreign_for_long(refusals) || refusals > 0 && !backend.has_file(file) {
        end_process(errno);
    }
    None
}
