//! Moves a whole range of private memory to another node by one system call, as a program does that
//! knows only the call.
//!
//! ```text
//! Trip::new ─► go ─► Moved ─► bring_back ─► go ─► …
//! ```
//!
//! * `move_pages(2)` gets all addresses at once, as libnuma's `numa_move_pages` passes them on: one
//!   for each base page, or one for each huge page.
//! * `mbind(2)` gets the range, with MPOL_BIND and MPOL_MF_MOVE. It reports neither the pages that
//!   stay nor their number. It leaves its policy on the range, until [`Trip::bring_back`] restores
//!   the former one.
//!
//! The arrays are filled before the clock starts, and the places of pages are read after it has
//! stopped.
//!
//! Transparent huge pages that find no free huge page on the destination are split, and their base
//! pages move one by one. From then on an address of the list stands for one base page only, until
//! the way back joins them again. So [`Moved`] judges a huge page by all of its base pages.

use std::collections::BTreeMap;
use std::time::Instant;

use pageleap::{BASE_PAGE, NodeId, PageSize};
use pageleap_sys::{self as sys, Advice, Errno, MappingPolicy};

use super::placement::{Place, Placement, find};
use crate::Error;
use crate::memcpy::cpu_ns;
use crate::private::{PrivateMemory, failed};

/// The status of a page before the call. The kernel never writes it.
const UNTOLD: i32 = i32::MIN;

/// A system call that moves pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `move_pages(2)`.
    MovePages,
    /// `mbind(2)`.
    Mbind,
}

impl Call {
    /// All of them.
    pub const ALL: [Call; 2] = [Call::MovePages, Call::Mbind];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Call::MovePages => "move_pages",
            Call::Mbind => "mbind",
        }
    }
}

/// The result of one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Time of the call.
    pub ns: u64,
    /// CPU time of the calling thread in the call; `None` if the kernel does not say. Work that the
    /// kernel gives to its own threads is not in it.
    pub cpu_ns: Option<u64>,
    /// Pages of the memory.
    pub pages: usize,
    /// Pages on the destination after the call.
    pub on_target: usize,
    /// Pages on other nodes after the call, perhaps in part.
    pub elsewhere: usize,
    /// Pages that are not present after the call, perhaps in part.
    pub absent: usize,
    /// Pages that are not on the destination, and to which `move_pages` gave an error number. The
    /// kernel gives none to a page that it tried to move without success, nor to its neighbours in
    /// the list, so the sum may be smaller than `elsewhere` and `absent`. Empty for `mbind`.
    pub by_error: BTreeMap<i32, usize>,
    /// The call failed for lack of memory (ENOMEM), perhaps after it had moved some pages.
    pub refused: Option<Errno>,
}

/// The times of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Called {
    /// See [`Moved::ns`].
    pub ns: u64,
    cpu_ns: Option<u64>,
    refused: Option<Errno>,
}

/// Private memory that one call moves from its node to another one, and that comes back.
#[derive(Debug)]
pub struct Trip<'a> {
    call: Call,
    memory: &'a PrivateMemory,
    from: NodeId,
    to: NodeId,
    /// The policy of the memory before the first call.
    policy: MappingPolicy,
    /// The arguments of `move_pages`. Empty for `mbind`.
    pages: Vec<usize>,
    nodes: Vec<i32>,
    status: Vec<i32>,
}

impl<'a> Trip<'a> {
    /// Prepares the arguments of the call, and brings the memory to the first node. The call moves
    /// the memory to the second one. [`can_move`](super::can_move) tells whether that is of use.
    ///
    /// # Errors
    /// [`Error::Stayed`] if pages do not come to the first node, or are not present. Otherwise if
    /// the kernel refuses to tell the policy or the places of pages.
    pub fn new(
        call: Call,
        memory: &'a PrivateMemory,
        [from, to]: [NodeId; 2],
    ) -> Result<Trip<'a>, Error> {
        let start = memory.as_ptr().addr();
        let policy = MappingPolicy::at(start).map_err(failed("get_mempolicy"))?;
        let end = if call == Call::MovePages { start + memory.len() } else { start };
        let pages: Vec<usize> = (start..end).step_by(memory.page().bytes()).collect();
        let (nodes, status) = (vec![to.0 as i32; pages.len()], vec![UNTOLD; pages.len()]);
        let mut trip = Trip { call, memory, from, to, policy, pages, nodes, status };
        trip.bring_back()?;
        Ok(trip)
    }

    /// Moves the memory by one call, and reads the places of its pages afterwards.
    ///
    /// # Errors
    /// As [`Trip::call`].
    pub fn go(&mut self) -> Result<Moved, Error> {
        let called = self.call()?;
        self.moved(called)
    }

    /// Moves the memory by one call.
    ///
    /// # Errors
    /// If the kernel refuses the call and no page has moved: the destination does not exist, the
    /// cpuset does not allow it, or a seccomp filter forbids the call.
    pub fn call(&mut self) -> Result<Called, Error> {
        self.status.fill(UNTOLD);
        let (start, len) = (self.memory.as_ptr().addr(), self.memory.len());
        let (cpu_start, clock) = (cpu_ns(), Instant::now());
        let called = match self.call {
            Call::MovePages => {
                sys::move_pages(0, &self.pages, &self.nodes, &mut self.status, false).map(drop)
            }
            // SAFETY: the range is the memory's own, and the borrow keeps it mapped. The call
            // changes neither contents nor addresses.
            Call::Mbind => unsafe { sys::bind_and_move(start, len, self.to.0) },
        };
        let ns = clock.elapsed().as_nanos() as u64;
        let cpu_ns = cpu_start.zip(cpu_ns()).map(|(from, to)| to - from);
        let refused = match called {
            Ok(()) => None,
            Err(errno @ Errno(libc::ENOMEM)) => Some(errno),
            Err(errno) => return Err(failed(self.call.name())(errno)),
        };
        Ok(Called { ns, cpu_ns, refused })
    }

    /// Reads the places of pages after a call.
    ///
    /// # Errors
    /// If the kernel does not tell them.
    pub fn moved(&self, called: Called) -> Result<Moved, Error> {
        let Called { ns, cpu_ns, refused } = called;
        let places = find(self.memory, self.to)?;
        let by_error = by_error(&places, &self.status);
        let Placement { on_target, elsewhere, absent } = places.iter().copied().collect();
        let pages = places.len();
        Ok(Moved { ns, cpu_ns, pages, on_target, elsewhere, absent, by_error, refused })
    }

    /// Restores the policy that the memory had before the first call, and brings all of its pages
    /// back, by the library's own list of pages, which tries again where pages are in use.
    ///
    /// # Errors
    /// [`Error::Stayed`] if pages do not come back, or are not present. The policy is restored
    /// nevertheless.
    pub fn bring_back(&mut self) -> Result<(), Error> {
        let (start, len) = (self.memory.as_ptr().addr(), self.memory.len());
        // SAFETY: the range is the memory's own, and the borrow keeps it mapped.
        unsafe { self.policy.set(start, len) }.map_err(failed("mbind"))?;
        let page = self.memory.page();
        // All base pages, because transparent huge pages may have been split.
        let step = if page.is_hugetlb() { page.bytes() } else { BASE_PAGE };
        let pages: Vec<usize> = (start..start + len).step_by(step).collect();
        pageleap::move_pages(0, &pages, Some(&vec![self.from; pages.len()]), false)?;
        if page == PageSize::Thp {
            // Joins pages that were split. A kernel before 6.1 cannot, and leaves them as they are.
            // SAFETY: the range is the memory's own, and the advice keeps its contents.
            let _ = unsafe { sys::set_advice(start, len, Advice::Collapse) };
        }
        let placement = Placement::of(self.memory, self.from)?;
        if placement.is_complete() {
            return Ok(());
        }
        let stayed = placement.elsewhere + placement.absent;
        Err(Error::Stayed { stayed, pages: placement.pages() })
    }
}

/// Counts the error numbers of pages that are not on the destination.
fn by_error(places: &[Place], status: &[i32]) -> BTreeMap<i32, usize> {
    let mut errors = BTreeMap::new();
    for (_, status) in places.iter().zip(status).filter(|(place, _)| **place != Place::OnTarget) {
        if *status < 0 && *status != UNTOLD {
            *errors.entry(-status).or_default() += 1;
        }
    }
    errors
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use pageleap::topology::Topology;
    use pageleap_sys::mpol;

    use super::*;
    use crate::private::tests::node;

    const PAGES: usize = 5;

    fn memory() -> PrivateMemory {
        PrivateMemory::new(PAGES * BASE_PAGE, PageSize::Base, node()).unwrap()
    }

    fn policy(memory: &PrivateMemory) -> MappingPolicy {
        MappingPolicy::at(memory.as_ptr().addr()).unwrap()
    }

    #[test]
    fn all_pages_are_on_the_node_where_they_were() {
        // Moving pages to the node where they lie is no work, and possible on every machine.
        for call in Call::ALL {
            let memory = memory();
            let moved = Trip::new(call, &memory, [node(); 2]).unwrap().go().unwrap();
            assert_eq!((moved.pages, moved.on_target), (PAGES, PAGES), "{call:?}");
            assert_eq!((moved.elsewhere, moved.absent, moved.refused), (0, 0, None));
            assert!(moved.ns > 0 && moved.by_error.is_empty());
        }
    }

    #[test]
    fn mbind_leaves_a_policy_and_the_way_back_restores_the_former_one() {
        for call in Call::ALL {
            let memory = memory();
            let before = policy(&memory);
            assert_eq!(before.mode() & !mpol::STATIC_NODES, mpol::PREFERRED);
            let mut trip = Trip::new(call, &memory, [node(); 2]).unwrap();
            trip.go().unwrap();
            assert_eq!(policy(&memory) == before, call == Call::MovePages);
            trip.bring_back().unwrap();
            assert_eq!(policy(&memory), before);
        }
    }

    #[test]
    fn absent_pages_are_counted_and_have_an_error() {
        for call in Call::ALL {
            let memory = memory();
            let mut trip = Trip::new(call, &memory, [node(); 2]).unwrap();
            // SAFETY: a page of this test's own, whose contents nobody needs.
            unsafe { sys::discard(memory.as_ptr().addr() + BASE_PAGE, BASE_PAGE) }.unwrap();
            let moved = trip.go().unwrap();
            assert_eq!((moved.on_target, moved.elsewhere, moved.absent), (PAGES - 1, 0, 1));
            let errors = usize::from(call == Call::MovePages);
            assert_eq!(moved.by_error.values().sum::<usize>(), errors, "{moved:?}");
            let error = trip.bring_back().unwrap_err();
            assert!(matches!(error, Error::Stayed { stayed: 1, pages: PAGES }), "{error}");
        }
    }

    #[test]
    fn errors_of_pages_that_are_on_the_destination_do_not_count() {
        use Place::{Absent, Elsewhere, OnTarget};
        let places = [OnTarget, OnTarget, Elsewhere, Elsewhere, Elsewhere, Absent];
        let status = [1, -libc::EBUSY, -libc::EBUSY, -libc::EBUSY, UNTOLD, -libc::ENOENT];
        let expected = BTreeMap::from([(libc::EBUSY, 2), (libc::ENOENT, 1)]);
        assert_eq!(by_error(&places, &status), expected);
        assert!(by_error(&places, &[]).is_empty());
    }

    #[test]
    fn a_node_that_does_not_exist_is_an_error() {
        for call in Call::ALL {
            let memory = memory();
            let error = Trip::new(call, &memory, [node(), NodeId(1023)]).unwrap().go().unwrap_err();
            assert!(matches!(error, Error::Call { call: name, .. } if name == call.name()));
        }
    }

    #[test]
    fn a_list_has_one_address_for_each_page() {
        for page in [PageSize::Base, PageSize::Thp, PageSize::Huge2M] {
            let memory = match PrivateMemory::new(2 * page.bytes(), page, node()) {
                Ok(memory) => memory,
                Err(error @ Error::HugePages { .. }) => {
                    eprintln!("SKIP a_list_has_one_address_for_each_page ({page} pages): {error}");
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            let mut trip = Trip::new(Call::MovePages, &memory, [node(); 2]).unwrap();
            assert_eq!(trip.pages, [0, 1].map(|at| memory.as_ptr().addr() + at * page.bytes()));
            assert_eq!(trip.go().unwrap().on_target, 2);
        }
    }

    #[test]
    fn pages_move_to_another_node_and_back() {
        const TEST: &str = "pages_move_to_another_node_and_back";
        let nodes = Topology::read().unwrap().allowed_nodes();
        let [from, to, ..] = nodes[..] else { return eprintln!("SKIP {TEST}: needs two nodes") };
        for page in [PageSize::Base, PageSize::Thp, PageSize::Huge2M] {
            for call in Call::ALL {
                let memory = match PrivateMemory::new(2 * page.bytes(), page, from) {
                    Ok(memory) => memory,
                    Err(error) => {
                        eprintln!("SKIP {TEST} ({page} pages): {error}");
                        continue;
                    }
                };
                let before = policy(&memory);
                memory.words().iter().zip(1..).for_each(|(word, at)| {
                    word.store(at, Ordering::Relaxed);
                });
                let mut trip = Trip::new(call, &memory, [from, to]).unwrap();
                for _ in 0..2 {
                    let moved = trip.go().unwrap();
                    assert_eq!((moved.pages, moved.on_target), (2, 2), "{call:?} {page}");
                    trip.bring_back().unwrap();
                    assert_eq!(Placement::of(&memory, from).unwrap().on_target, 2);
                    assert_eq!(policy(&memory), before);
                }
                let value = |word: &std::sync::atomic::AtomicU64| word.load(Ordering::Relaxed);
                assert!(memory.words().iter().zip(1..).all(|(word, at)| value(word) == at));
            }
        }
    }
}
