//! Moves a list of pages, each to its own node, as `move_pages(2)` does, but with partial migration
//! and a true status for each page.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use pageleap_sys::{Errno, MAX_NODES};

use super::batch::Batch;
use super::call::{Calls, Fate, UNWRITTEN, move_once};
use super::room::Rooms;
use super::target::Process;
use super::{DEFAULT_MAX_CALL, HUGE, Mode, check_allowed, check_privilege};
use crate::error::Error;
use crate::job::area::Reason;
use crate::process::{self, ProcessMemory};
use crate::sync::{Instant, thread};
use crate::topology::{SysFiles, Topology, parse_list};
use crate::units::{BASE_PAGE, Call, NodeId};

/// The most blocks of 2 MB whose pages one call moves: 32 MB if all are huge pages.
const MOST_BLOCKS: usize = 16;
/// How often a page is tried that the kernel did not move, and the pause before the second try.
/// Each further pause is four times as long.
const TRIES: u32 = 4;
const PAUSE: Duration = Duration::from_millis(1);

/// The node of a page, and the reason why it is not on the requested one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageStatus {
    /// The node on which it lies; `None` if it is not present.
    pub node: Option<NodeId>,
    /// Why it has no node, or not the requested one.
    pub reason: Option<Reason>,
}

impl PageStatus {
    /// The status as `move_pages(2)` writes it: the node, or a negated error number.
    ///
    /// The numbers are those of Linux 6.12, on all kernels:
    ///
    /// * `ENOENT`: no page is present.
    /// * `EFAULT`: nothing is mapped, or the page is the zero page.
    /// * `EACCES`: the page is mapped more than once, or the cpuset forbids the node.
    /// * `EBUSY`: the page is in use.
    /// * `ENOMEM`: the node has no room.
    /// * `ENODEV`: there is no such node.
    pub fn code(self) -> i32 {
        let errno = match self.reason {
            None => return self.node.map_or(-libc::ENOENT, |node| node.0 as i32),
            Some(Reason::Absent | Reason::SwappedOut) => libc::ENOENT,
            Some(Reason::Unmapped | Reason::ZeroPage) => libc::EFAULT,
            Some(Reason::Shared) => libc::EACCES,
            Some(Reason::NoRoom) => libc::ENOMEM,
            Some(Reason::ProcessEnded | Reason::Uncertain) => libc::ESRCH,
            Some(Reason::Refused(_, errno)) => errno.0,
            Some(_) => libc::EBUSY,
        };
        -errno
    }
}

/// Moves each page of a list to its node; without nodes, tells where the pages lie. A page is named
/// by any address in it. Process 0 is the calling one.
///
/// A replacement for `move_pages(2)` and `numa_move_pages(3)`: no page stays because another one
/// did, and each page gets its true status, also when some stay. (Before Linux 6.7, the kernel
/// takes a hugetlb page that is not named by its first address for a shared one.) Pages that are in
/// use are tried four times. The pages of one huge page move together: if they are named for
/// several nodes, those that end up elsewhere say so ([`Reason::MovedOn`]).
///
/// A node is not filled beyond its high watermark and a reserve ([`KernelMigration::fill`]). That
/// holds for hugetlb pages as well, and may be exceeded by one huge page. A list counts bytes only:
/// where the node has no free block of 2 MB, or no free page in its hugetlb pool, the kernel makes
/// one or splits the page, which a job of [`KernelMigration`] avoids. A call is sized for 20 ms, as
/// in such a job, and has pages of at most 16 blocks of 2 MB.
///
/// [`KernelMigration`]: crate::KernelMigration
/// [`KernelMigration::fill`]: crate::KernelMigration::fill
///
/// # Errors
/// [`Error::BadArgument`]: there is no such process, or the lists differ in length.
/// [`Error::EngineRefused`]: `shared` needs CAP_SYS_NICE. [`Error::SystemFile`]: this process may
/// not move the pages of that one. Failures of single pages are in their statuses.
pub fn move_pages(
    pid: u32,
    pages: &[usize],
    nodes: Option<&[NodeId]>,
    shared: bool,
) -> Result<Vec<PageStatus>, Error> {
    if nodes.is_some_and(|nodes| nodes.len() != pages.len()) {
        return Err(Error::BadArgument {
            what: "list",
            reason: "it has not as many nodes as pages".into(),
            remedy: "name a node for each page".into(),
        });
    }
    if shared {
        check_privilege()?;
    }
    let pid = if pid == 0 { process::own_pid()? } else { pid };
    let memory = ProcessMemory::identity(pid)?;
    let process = Process::open(&memory)?;
    let mut status = Vec::new();
    status.try_reserve_exact(pages.len()).map_err(|_| Error::BadArgument {
        what: "list",
        reason: format!("there is no memory for the statuses of {} pages", pages.len()),
        remedy: "move fewer pages at once".into(),
    })?;
    status.resize(pages.len(), PageStatus { node: None, reason: None });
    let mut list =
        List { calls: &*process.calls, is_gone: &|| process.is_gone(), pages, status, shared };
    list.look(0..pages.len())?;
    let lies_elsewhere =
        |(at, to): (usize, &NodeId)| list.status[at].node.is_some_and(|on| on != *to);
    if let Some(nodes) = nodes.filter(|nodes| nodes.iter().enumerate().any(lies_elsewhere)) {
        let rooms = list.refuse_nodes(&memory, nodes)?;
        list.move_to(nodes, &rooms, Batch::new(None, DEFAULT_MAX_CALL), Mode::Retry);
        list.settle(nodes);
    }
    let mut found = list.status;
    explain(&process, pages, &mut found);
    Ok(found)
}

/// A list under way.
pub(super) struct List<'a> {
    pub(super) calls: &'a dyn Calls,
    pub(super) is_gone: &'a dyn Fn() -> bool,
    pub(super) pages: &'a [usize],
    pub(super) status: Vec<PageStatus>,
    pub(super) shared: bool,
}

impl List<'_> {
    /// Queries where some of the pages lie. A page without a node gets no reason yet.
    pub(super) fn look(&mut self, which: Range<usize>) -> Result<(), Error> {
        /// Pages of one query. The kernel copies the lists.
        const QUERY: usize = 4096;
        let mut answers = vec![UNWRITTEN; QUERY.min(which.len())];
        let mut at = which.start;
        while at < which.end {
            let end = (at + QUERY).min(which.end);
            let answers = &mut answers[..end - at];
            self.calls
                .query(&self.pages[at..end], answers)
                .map_err(|errno| Error::call(Call::QueryNodes, self.pages[at], BASE_PAGE, errno))?;
            for (status, answer) in self.status[at..end].iter_mut().zip(answers) {
                *status =
                    PageStatus { node: u32::try_from(*answer).ok().map(NodeId), reason: None };
            }
            at = end;
        }
        Ok(())
    }

    /// Notes a reason for pages whose node does not exist or is forbidden to the process: they
    /// stay.
    fn refuse_nodes(&mut self, memory: &ProcessMemory, nodes: &[NodeId]) -> Result<Rooms, Error> {
        let with_memory = nodes_with_memory()?;
        let named: BTreeSet<NodeId> = nodes.iter().copied().collect();
        for (status, node) in self.status.iter_mut().zip(nodes) {
            let errno = match with_memory.contains(node) {
                false => libc::ENODEV,
                true if check_allowed(memory, *node).is_err() => libc::EACCES,
                true => continue,
            };
            if status.node.is_some_and(|on| on != *node) {
                status.reason = Some(Reason::Refused(Call::MovePages, Errno(errno)));
            }
        }
        Rooms::of(named.intersection(&with_memory).copied())
    }

    /// Moves the pages that are present, lie elsewhere, and have no reason to stay.
    pub(super) fn move_to(&mut self, nodes: &[NodeId], rooms: &Rooms, batch: Batch, mode: Mode) {
        let is_to_move = |at: &usize| {
            let PageStatus { node, reason } = self.status[*at];
            node.is_some_and(|on| on != nodes[*at]) && reason.is_none()
        };
        let mut left: Vec<usize> = (0..self.pages.len()).filter(is_to_move).collect();
        left.sort_by_key(|at| (nodes[*at], self.pages[*at]));
        let tries = if mode == Mode::Light { 1 } else { TRIES };
        let mut batch = batch;
        for attempt in 0..tries {
            if left.is_empty() {
                return;
            }
            if attempt > 0 {
                thread::sleep(PAUSE * 4u32.pow(attempt - 1));
            }
            left = self.pass(&mut batch, nodes, rooms, left);
        }
    }

    /// Queries once more where all pages lie. The pages of one huge page move together even if they
    /// were named for several nodes, so a later call may have taken along a page that had arrived
    /// or stayed. If the query fails, all statuses stay as they are.
    pub(super) fn settle(&mut self, nodes: &[NodeId]) {
        let known = self.status.clone();
        if (self.is_gone)() || self.look(0..self.pages.len()).is_err() || (self.is_gone)() {
            self.status = known;
            return;
        }
        for ((status, known), to) in self.status.iter_mut().zip(known).zip(nodes) {
            match (status.node, known.node) {
                // `explain` finds out later why it is absent.
                (None, _) => {}
                (Some(on), _) if on == *to => {}
                (Some(_), Some(before)) if before == *to => {
                    status.reason = known.reason.or(Some(Reason::MovedOn));
                }
                (Some(_), Some(_)) => status.reason = known.reason,
                // It has become present since.
                (Some(_), None) => *status = known,
            }
        }
    }

    /// Tries each of these pages once. Returns the pages that are worth another try.
    fn pass(
        &mut self,
        batch: &mut Batch,
        nodes: &[NodeId],
        rooms: &Rooms,
        which: Vec<usize>,
    ) -> Vec<usize> {
        let mut left: VecDeque<usize> = which.into();
        let mut again = Vec::new();
        while !left.is_empty() {
            let tried = self.next_call(batch.pages(), nodes, rooms, &mut left);
            let pages: Vec<usize> = tried.iter().map(|at| self.pages[*at]).collect();
            let to: Vec<i32> = tried.iter().map(|at| nodes[*at].0 as i32).collect();
            if tried.is_empty() {
                continue;
            }
            if (self.is_gone)() {
                tried.iter().chain(&left).for_each(|at| self.stays(*at, Reason::ProcessEnded));
                return Vec::new();
            }
            let began = Instant::now();
            let fates = move_once(self.calls, &pages, &to, self.shared);
            let took = began.elapsed();
            let gone = (self.is_gone)();
            let fates = match fates {
                Ok(fates) if !gone => fates,
                other => {
                    let (call, errno) =
                        other.err().unwrap_or((Call::MovePages, Errno(libc::ESRCH)));
                    let refused = Reason::Refused(call, errno);
                    let why = |sure| if gone { sure } else { refused };
                    tried.iter().for_each(|at| self.stays(*at, why(Reason::Uncertain)));
                    left.iter().for_each(|at| self.stays(*at, why(Reason::ProcessEnded)));
                    return Vec::new();
                }
            };
            let moved = fates.iter().filter(|fate| **fate == Fate::There).count();
            batch.observe(moved, took);
            let mut not_tried = Vec::new();
            for (at, fate) in tried.into_iter().zip(fates) {
                match fate {
                    Fate::There => {
                        self.status[at] = PageStatus { node: Some(nodes[at]), reason: None };
                    }
                    Fate::NotTried => not_tried.push(at),
                    Fate::Gone => self.status[at] = PageStatus { node: None, reason: None },
                    Fate::Stays(Errno(libc::EACCES)) if !self.shared => {
                        self.stays(at, Reason::Shared);
                    }
                    Fate::Stays(Errno(libc::EBUSY)) | Fate::InUse => {
                        self.stays(at, Reason::InUse);
                        again.push(at);
                    }
                    Fate::Stays(errno) | Fate::Refused(errno) => {
                        self.stays(at, Reason::Refused(Call::MovePages, errno));
                        again.extend((errno.0 == libc::ENOMEM).then_some(at));
                    }
                }
            }
            not_tried.into_iter().rev().for_each(|at| left.push_front(at));
        }
        again
    }

    /// Takes pages for one call, all for one node. Pages for which the node has no room stay.
    ///
    /// An address may belong to a huge page, which shows only after it has moved. So each block of
    /// 2 MB counts once as a whole, and a call has at most [`MOST_BLOCKS`] of them.
    fn next_call(
        &mut self,
        most: usize,
        nodes: &[NodeId],
        rooms: &Rooms,
        left: &mut VecDeque<usize>,
    ) -> Vec<usize> {
        let Some(node) = left.front().map(|at| nodes[*at]) else { return Vec::new() };
        let mut room = rooms.now(node);
        if room < BASE_PAGE as u64 {
            let stay: Vec<usize> =
                left.iter().copied().take_while(|at| nodes[*at] == node).collect();
            left.drain(..stay.len());
            stay.into_iter().for_each(|at| self.stays(at, Reason::NoRoom));
            return Vec::new();
        }
        let (mut call, mut blocks, mut last) = (Vec::new(), 0, None);
        while let Some(&at) = left.front() {
            let block = self.pages[at] / HUGE;
            let is_new = last != Some(block);
            let fits = !is_new || call.is_empty() || blocks < MOST_BLOCKS && room >= HUGE as u64;
            if call.len() >= most || nodes[at] != node || !fits {
                break;
            }
            if is_new {
                (blocks, last) = (blocks + 1, Some(block));
                room = room.saturating_sub(HUGE as u64);
            }
            left.pop_front();
            call.push(at);
        }
        call
    }

    fn stays(&mut self, at: usize, why: Reason) {
        self.status[at].reason = Some(why);
    }
}

/// The nodes with memory. This reads a single file where it can, because programs may move many
/// short lists.
fn nodes_with_memory() -> Result<BTreeSet<NodeId>, Error> {
    let file = SysFiles::host().text_if_there("sys/devices/system/node/has_memory")?;
    let ids = file.and_then(|text| parse_list(&text, MAX_NODES).ok());
    Ok(match ids.filter(|ids| !ids.is_empty()) {
        Some(ids) => ids.into_iter().map(|id| NodeId(id as u32)).collect(),
        None => {
            let machine = Topology::read()?;
            let nodes = machine.nodes().iter().filter(|node| node.total_bytes > 0);
            nodes.map(|node| node.id).collect()
        }
    })
}

/// Notes for each page without a node why it has none.
fn explain(process: &Process, pages: &[usize], found: &mut [PageStatus]) {
    let mut mapped = None;
    for (page, status) in pages.iter().zip(found) {
        if status.node.is_some() || status.reason.is_some() {
            continue;
        }
        let mapped = mapped.get_or_insert_with(|| process::mapped_ranges(process.pid));
        let at = mapped.partition_point(|range| range.end <= *page);
        let is_mapped = mapped.get(at).is_some_and(|range| range.contains(page));
        let why = if is_mapped { process.why_absent_at(*page) } else { Reason::Unmapped };
        status.reason = Some(why);
    }
}
