//! Automatic NUMA balancing as a rival: memory that the kernel may move by itself, and the wait
//! until it has done so.
//!
//! The kernel unmaps pages of a task from time to time, and moves a page to the node from which it
//! is touched next, if it judges that to pay off. It reports neither start nor end, so the caller
//! asks for the places of pages every [`POLL`].
//!
//! * The memory must have no memory policy: the kernel leaves mappings with one alone (unless the
//!   policy has MPOL_F_NUMA_BALANCING). So [`Unbound`] gets its node by the thread that touches it
//!   first.
//! * The threads that access the memory must run on CPUs of the destination, and have no memory
//!   policy either (`numactl --membind` gives them one). They are the caller's.
//! * The setting `kernel.numa_balancing` is the caller's as well. Nothing here reads or changes it.
//! * The kernel does not balance hugetlb pages.

use std::thread;
use std::time::{Duration, Instant};

use pageleap::topology::Topology;
use pageleap::{NodeId, PageSize};

use super::placement::Placement;
use crate::Error;
use crate::matrix::on_cpu;
use crate::private::{PrivateMemory, failed};

/// The name of this rival.
pub const NAME: &str = "balancing";
/// Pause between two polls, as in the paper (*page_leap*, section 6).
pub const POLL: Duration = Duration::from_millis(100);

/// Private memory without a memory policy. All of its pages lie on one node at first.
#[derive(Debug)]
pub struct Unbound(PrivateMemory);

impl Unbound {
    /// Maps `len` bytes of base pages or transparent huge pages, and touches them in a thread on a
    /// CPU of `node`. For a node without CPUs that this process may use, the thread has a
    /// policy instead, which ends with the thread.
    ///
    /// # Errors
    /// [`Error::Elsewhere`] if the node has too little free memory. [`Error::Rival`] for hugetlb
    /// pages. Otherwise if a limit of the process or the machine leaves less.
    pub fn new(len: usize, page: PageSize, node: NodeId) -> Result<Unbound, Error> {
        if page.is_hugetlb() {
            let reason = format!("the kernel does not balance hugetlb pages ({page})");
            return Err(Error::Rival { rival: NAME, reason });
        }
        let topology = Topology::read()?;
        let allowed = topology.allowed_cpus();
        let of_node = topology.node(node)?.cpus.iter().find(|cpu| allowed.contains(cpu));
        let policy = if of_node.is_none() { Some(node.0) } else { None };
        let Some(cpu) = of_node.or(allowed.first()).copied() else {
            let reason = "the CPUs of this process are not known".into();
            return Err(Error::Rival { rival: NAME, reason });
        };
        let memory = PrivateMemory::without_policy(len, page)?;
        on_cpu(cpu, || {
            // The thread has inherited the policy of its parent, which would decide on the node.
            pageleap_sys::prefer_node(policy).map_err(failed("set_mempolicy"))?;
            memory.touch();
            Ok::<_, Error>(())
        })??;
        let memory = Unbound(memory);
        let placement = poll(&memory, node)?;
        if !placement.is_complete() {
            return Err(Error::Elsewhere { node, verified: placement.to_string() });
        }
        Ok(memory)
    }

    /// The memory, for threads that access it.
    pub fn memory(&self) -> &PrivateMemory {
        &self.0
    }
}

/// The result of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Balanced {
    /// Time until the end of the first poll that found all pages on the destination; `None` if the
    /// wait ended before. It may be too long by [`POLL`] and the time of a poll.
    pub ns: Option<u64>,
    /// The places of pages at the last poll.
    pub placement: Placement,
    /// Number of polls.
    pub polls: u64,
}

/// Where the pages of the memory lie now. Touches no page.
///
/// # Errors
/// If the kernel does not say.
pub fn poll(memory: &Unbound, to: NodeId) -> Result<Placement, Error> {
    Placement::of(&memory.0, to)
}

/// Asks every [`POLL`] where the pages lie, until all of them are on the destination, `limit` is
/// over, or `stopped` is true. Asks at least once. The thread that waits sleeps between two polls.
///
/// # Errors
/// As [`poll`].
pub fn await_balanced(
    memory: &Unbound,
    to: NodeId,
    limit: Duration,
    stopped: &dyn Fn() -> bool,
) -> Result<Balanced, Error> {
    let start = Instant::now();
    let mut polls = 0;
    loop {
        let placement = poll(memory, to)?;
        polls += 1;
        let elapsed = start.elapsed();
        if placement.is_complete() {
            return Ok(Balanced { ns: Some(elapsed.as_nanos() as u64), placement, polls });
        }
        if elapsed >= limit || stopped() {
            return Ok(Balanced { ns: None, placement, polls });
        }
        thread::sleep(POLL.min(limit - elapsed));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use pageleap::BASE_PAGE;
    use pageleap_sys::{MappingPolicy, mpol};

    use super::*;
    use crate::private::tests::node;

    const PAGES: usize = 7;
    /// No page lies there.
    const NOWHERE: NodeId = NodeId(1023);
    const FOREVER: Duration = Duration::MAX;

    fn unbound() -> Unbound {
        Unbound::new(PAGES * BASE_PAGE, PageSize::Base, node()).unwrap()
    }

    #[test]
    fn the_memory_has_no_policy_even_if_its_maker_has_one() {
        let policy = |memory: &PrivateMemory| MappingPolicy::at(memory.as_ptr().addr()).unwrap();
        let bound = PrivateMemory::new(BASE_PAGE, PageSize::Base, node()).unwrap();
        assert_ne!(policy(&bound).mode(), mpol::DEFAULT);
        let made = || {
            pageleap_sys::prefer_node(Some(node().0)).unwrap();
            [PageSize::Base, PageSize::Thp].map(|page| Unbound::new(4 << 20, page, node()).unwrap())
        };
        // A policy belongs to a thread.
        for memory in thread::spawn(made).join().unwrap() {
            assert_eq!(policy(memory.memory()).mode(), mpol::DEFAULT);
            assert!(policy(memory.memory()).nodes().is_empty());
        }
    }

    #[test]
    fn a_poll_counts_all_pages() {
        let memory = unbound();
        let here = Placement { on_target: PAGES, ..Placement::default() };
        assert_eq!(poll(&memory, node()).unwrap(), here);
        let elsewhere = Placement { elsewhere: PAGES, ..Placement::default() };
        assert_eq!(poll(&memory, NOWHERE).unwrap(), elsewhere);
    }

    #[test]
    fn a_wait_for_pages_that_are_there_asks_once() {
        let stopped = || -> bool { panic!("it does not wait") };
        let balanced = await_balanced(&unbound(), node(), FOREVER, &stopped).unwrap();
        assert!(balanced.ns.is_some() && balanced.placement.is_complete());
        assert_eq!(balanced.polls, 1);
    }

    #[test]
    fn a_wait_ends_when_it_is_stopped() {
        let asked = Cell::new(0);
        let stopped = || asked.replace(asked.get() + 1) == 2;
        let balanced = await_balanced(&unbound(), NOWHERE, FOREVER, &stopped).unwrap();
        assert_eq!((balanced.ns, balanced.polls), (None, 3));
        assert_eq!(balanced.placement.elsewhere, PAGES);
    }

    #[test]
    fn a_wait_ends_at_its_limit() {
        for (limit, most) in [(Duration::ZERO, 1), (2 * POLL, 3)] {
            let start = Instant::now();
            let balanced = await_balanced(&unbound(), NOWHERE, limit, &|| false).unwrap();
            assert!(balanced.ns.is_none() && start.elapsed() >= limit);
            assert!((1..=most).contains(&balanced.polls), "{balanced:?}");
        }
    }

    #[test]
    fn pages_that_are_absent_are_not_balanced() {
        let memory = unbound();
        // SAFETY: a page of this test's own, whose contents nobody needs.
        unsafe { pageleap_sys::discard(memory.memory().as_ptr().addr(), BASE_PAGE) }.unwrap();
        let balanced = await_balanced(&memory, node(), Duration::ZERO, &|| false).unwrap();
        assert_eq!((balanced.ns, balanced.placement.absent), (None, 1));
    }

    #[test]
    fn hugetlb_pages_are_refused() {
        let error = Unbound::new(2 << 20, PageSize::Huge2M, node()).unwrap_err();
        assert!(matches!(error, Error::Rival { rival: NAME, .. }), "{error}");
    }
}
