//! Room for a pool. A node, the machine and the memory cgroups have limits. A pool that would
//! exceed one is refused by an error; without this check the OOM killer would come.
//!
//! A thread that fills a pool *announces* bytes before it takes them, and reads the limits after
//! that. Free memory shows only bytes that have been taken, so each thread also counts the
//! announced bytes of all others against the limits. Reading the limits takes some hundred
//! microseconds. So a thread announces many steps at once while much room is left ([`granted`]).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::reserve_command;
use super::share::ShareInner;
use crate::backend::{Backend, Call, Errno};
use crate::cgroup;
use crate::error::Error;
use crate::sync::thread;
use crate::topology::{SysFiles, Topology, available, unreserved_huge_pages};
use crate::units::{NodeId, PageSize, human_bytes};

/// Bytes that a pool leaves free for others.
pub const MARGIN: u64 = 64 << 20;
/// Most bytes that a thread announces at once. A thread takes some 100 ms to fill them.
pub(super) const MOST_ANNOUNCED: u64 = 256 << 20;
/// A thread announces at most this part of the room. So the limits are exceeded only if others
/// take fifteen times as much meanwhile.
const PART: u64 = 16;

/// Bytes that threads of this process have announced, for all pools together.
pub(super) static IN_FLIGHT: AtomicU64 = AtomicU64::new(0);

/// The limit that leaves the least memory.
pub(crate) struct Room {
    node: NodeId,
    limit: String,
    /// Bytes that may be taken.
    free_bytes: u64,
    /// Why there may be further limits.
    hidden: Option<String>,
}

impl Room {
    /// Reads all limits that apply to base pages and transparent huge pages of a node.
    pub(crate) fn now(node: NodeId) -> Result<Room, Error> {
        let files = SysFiles::host();
        let free = Topology::free_now(node)?;
        const MEMINFO: &str = "proc/meminfo";
        let machine = available(&files.text(MEMINFO)?);
        let machine = machine.map_err(|reason| files.damaged(MEMINFO, reason))?;
        // Memory that the kernel keeps for itself on each node.
        let reserve = files.number("proc/sys/vm/min_free_kbytes")? << 10;
        let cgroups = cgroup::memory(&files);
        let limits = [
            (format!("the free memory of {node}"), free.saturating_sub(reserve)),
            ("the free memory of the machine".to_owned(), machine.saturating_sub(reserve)),
        ];
        let limits = limits
            .into_iter()
            .chain(cgroups.seen.into_iter().map(|seen| (format!("/{}", seen.file), seen.left)));
        let (limit, free) = limits.min_by_key(|(_, free)| *free).expect("a node has a limit");
        let free_bytes = free.saturating_sub(MARGIN);
        Ok(Room { node, limit, free_bytes, hidden: cgroups.hidden })
    }

    /// Why there may be limits that this process cannot see.
    pub(crate) fn hidden(&self) -> Option<&str> {
        self.hidden.as_deref()
    }

    /// Bytes that may be taken.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    pub(crate) fn too_small_for(self, needed_bytes: u64) -> Error {
        let Room { node, limit, free_bytes, .. } = self;
        let remedy = "take less, free memory, or raise the limit".into();
        Error::OutOfMemory { node, needed_bytes, free_bytes, limit, remedy }
    }
}

/// Checks that the node exists and has room for the whole pool.
pub(super) fn check_node(
    backend: &dyn Backend,
    node: NodeId,
    page: PageSize,
    bytes: u64,
) -> Result<(), Error> {
    let host = backend.is_host_memory();
    if host {
        Topology::node_now(node)?;
    }
    if !backend.allows_node(node.0) {
        return Err(Error::NodeNotAllowed { node });
    }
    if !host {
        return Ok(());
    }
    if page.is_hugetlb() {
        return check_huge_pages(node, page, bytes);
    }
    let room = Room::now(node)?;
    if room.free_bytes < bytes { Err(room.too_small_for(bytes)) } else { Ok(()) }
}

/// Checks that a node has `bytes` of free pages of hugetlb that this process may have.
fn check_huge_pages(node: NodeId, page: PageSize, bytes: u64) -> Result<(), Error> {
    let files = SysFiles::host();
    let page_bytes = page.bytes() as u64;
    let size = human_bytes(page_bytes);
    let short = |free_bytes: u64, limit: String, remedy: String| Error::OutOfMemory {
        node,
        needed_bytes: bytes,
        free_bytes,
        limit,
        remedy,
    };
    let reserve_more = |free: u64| {
        let missing = bytes / page_bytes - free;
        format!("reserve {missing} more: {}", reserve_command(node, page, missing))
    };
    let free = Topology::node_now(node)?.free_huge(page_bytes);
    if free * page_bytes < bytes {
        let limit = format!("the number of free {size} huge pages");
        return Err(short(free * page_bytes, limit, reserve_more(free)));
    }
    if let Some(free) = unreserved_huge_pages(&files, page_bytes)
        && free * page_bytes < bytes
    {
        let limit =
            format!("the number of free {size} huge pages that no other mapping has reserved");
        return Err(short(free * page_bytes, limit, reserve_more(free)));
    }
    let limits = cgroup::huge_pages(&files, page_bytes).seen;
    match limits.into_iter().min_by_key(|limit| limit.left) {
        Some(limit) if limit.left < bytes => {
            let remedy = "raise the limit, or take less".into();
            Err(short(limit.left, format!("/{}", limit.file), remedy))
        }
        _ => Ok(()),
    }
}

/// What a refusal of huge pages means that were free and allowed a moment ago.
fn huge_pages_refused(share: &ShareInner, call: Call, errno: Errno) -> Option<Error> {
    let refused = share.page.is_hugetlb()
        && share.backend.is_host_memory()
        && matches!(
            (call, errno),
            (Call::Map | Call::Populate, Errno(libc::ENOMEM | libc::EFAULT | libc::ENOSPC))
        );
    refused.then(|| Error::OutOfMemory {
        node: share.node,
        needed_bytes: share.frames * share.page.bytes() as u64,
        free_bytes: 0,
        limit: format!("the kernel ({call}: {errno})"),
        remedy: format!(
            "other mappings may have reserved the free huge pages \
             (/sys/kernel/mm/hugepages/hugepages-{}kB/resv_hugepages), the cpuset may not allow the \
             node, or a hugetlb cgroup that this process cannot see may limit them",
            share.page.bytes() >> 10
        ),
    })
}

impl ShareInner {
    /// The error of a call that has been refused while the share was made.
    pub(super) fn refused(&self, call: Call, addr: usize, len: usize, errno: Errno) -> Error {
        huge_pages_refused(self, call, errno).unwrap_or_else(|| Error::call(call, addr, len, errno))
    }
}

/// How many bytes a thread may take before it reads the limits again; `None` if `step` bytes do not
/// fit. `others`: the bytes that other threads have announced. The answer is `step` if little room
/// is left, and never above `wanted`, which is at least `step`.
fn granted(room: u64, others: u64, step: u64, wanted: u64) -> Option<u64> {
    let left = room.checked_sub(others).filter(|left| *left >= step)?;
    Some((left / PART / step * step).clamp(step, wanted))
}

/// The bytes that one thread has announced. Dropping the value takes them back.
pub(super) struct Announced<'a> {
    /// The bytes that all threads have announced together.
    all: &'a AtomicU64,
    left: u64,
}

impl<'a> Announced<'a> {
    pub(super) fn new(all: &'a AtomicU64) -> Self {
        Announced { all, left: 0 }
    }

    /// Makes sure that at least `step` bytes are announced and fit under all limits. Up to `wanted`
    /// bytes are announced at once. If only the announcements of other threads stand in the way, it
    /// waits for them.
    pub(super) fn cover(
        &mut self,
        step: u64,
        wanted: u64,
        room: impl Fn() -> Result<Room, Error>,
    ) -> Result<(), Error> {
        let wanted = wanted.max(step);
        while self.left < step {
            self.take_back(self.left);
            // The limits are read after the announcement. In the other order, bytes that another
            // thread takes in between would count neither as announced nor as taken.
            let others = self.all.fetch_add(wanted, Relaxed);
            self.left = wanted;
            let room = room()?;
            if let Some(granted) = granted(room.free_bytes, others, step, wanted) {
                self.take_back(wanted - granted);
                return Ok(());
            }
            self.take_back(wanted);
            if others == 0 {
                return Err(room.too_small_for(step));
            }
            // Memory that other threads have announced and already taken counts twice: check again
            // when they are done.
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Notes that announced bytes have been taken, so that free memory shows them.
    pub(super) fn take_back(&mut self, bytes: u64) {
        self.left -= bytes;
        self.all.fetch_sub(bytes, Relaxed);
    }
}

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        self.take_back(self.left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::cases;
    use proptest::prelude::*;
    use std::sync::atomic::AtomicBool;

    const MB: u64 = 1 << 20;

    fn room(free_bytes: u64) -> Room {
        Room { node: NodeId(0), limit: "a limit".into(), free_bytes, hidden: None }
    }

    #[test]
    fn limits_are_read_rarely_while_much_room_is_left_and_at_each_step_at_the_end() {
        let next = |room, others| granted(room * MB, others * MB, 32 * MB, 256 * MB);
        assert_eq!(next(100_000, 0), Some(256 * MB), "as much as was asked for");
        assert_eq!(next(2048, 0), Some(128 * MB), "a sixteenth of the room");
        assert_eq!(next(2048, 1024), Some(64 * MB), "announced bytes are no room");
        assert_eq!(next(2047, 0), Some(96 * MB), "whole steps");
        assert_eq!(next(32, 0), Some(32 * MB), "the last step");
        assert_eq!(next(31, 0), None);
        assert_eq!(next(2048, 2017), None);
        assert_eq!(next(2048, 5000), None);
        // The last step of a pool may be shorter.
        assert_eq!(granted(100, 0, 5, 5), Some(5));
    }

    proptest! {
        #![proptest_config(cases(256, 8))]
        #[test]
        fn nothing_is_granted_beyond_the_room(
            room: u64, others in 0..1u64 << 50, step in 1..1u64 << 30, more in 0..1u64 << 30,
        ) {
            match granted(room, others, step, step + more) {
                None => prop_assert!(room < others + step),
                Some(bytes) => {
                    prop_assert!((step..=step + more).contains(&bytes));
                    prop_assert!(others + bytes <= room);
                    prop_assert!(bytes == step || bytes <= (room - others) / PART);
                }
            }
        }
    }

    #[test]
    fn what_is_refused_or_dropped_is_no_longer_announced() {
        let all = AtomicU64::new(0);
        let mut announced = Announced::new(&all);
        announced.cover(2, 64, || Ok(room(320))).unwrap();
        assert_eq!(all.load(Relaxed), 20, "a sixteenth");
        announced.take_back(2);
        announced.cover(2, 64, || panic!("18 bytes are left")).unwrap();
        announced.take_back(17);
        let error = announced.cover(2, 64, || Ok(room(1))).unwrap_err().to_string();
        assert!(error.contains("a limit"), "{error}");
        assert_eq!(all.load(Relaxed), 0);
        announced.cover(2, 2, || Ok(room(2))).unwrap();
        assert_eq!(all.load(Relaxed), 2);
        drop(announced);
        assert_eq!(all.load(Relaxed), 0);
    }

    /// A machine whose free memory shrinks when a thread takes some. Threads of several pools take
    /// memory until one is refused: the machine is nearly full then, and never too full.
    #[test]
    #[cfg(not(miri))]
    fn threads_together_never_take_more_than_there_is() {
        const FREE: u64 = 10_000;
        const STEP: u64 = 7;
        for _ in 0..50 {
            let (all, taken) = (AtomicU64::new(0), AtomicU64::new(0));
            let refused = AtomicBool::new(false);
            let now = || {
                let left = FREE.checked_sub(taken.load(Relaxed)).expect("more than there was");
                std::thread::yield_now();
                Ok(room(left))
            };
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        let mut announced = Announced::new(&all);
                        while announced.cover(STEP, 100 * STEP, now).is_ok() {
                            std::thread::yield_now();
                            taken.fetch_add(STEP, Relaxed);
                            announced.take_back(STEP);
                        }
                        refused.store(true, Relaxed);
                    });
                }
            });
            let left = FREE.checked_sub(taken.load(Relaxed)).expect("more than there was");
            assert!(left < STEP && refused.load(Relaxed) && all.load(Relaxed) == 0, "{left}");
        }
    }
}
