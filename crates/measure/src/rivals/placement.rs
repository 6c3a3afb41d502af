//! Where the pages of a memory lie, by the kernel's own answer (`move_pages(2)` without nodes).

use std::fmt;
use std::thread;
use std::time::Duration;

use pageleap::{BASE_PAGE, NodeId, PageSize};

use crate::Error;
use crate::private::{PrivateMemory, failed};

/// Addresses of one query.
const BATCH: usize = 64 << 10;
/// How often the kernel is asked again for pages that seem absent. It unmaps a page while it moves
/// it, for balancing or compaction, and says then that the page is not present.
const TRIES: usize = 10;
/// Time between two of these tries, which is longer than the kernel takes to move a batch of pages.
const PAUSE: Duration = Duration::from_millis(1);

/// The pages of a memory, by their place. The unit is the page of the memory. A transparent huge
/// page that the kernel has split counts by the places of all of its base pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Pages that lie on the node, with all of their base pages.
    pub on_target: usize,
    /// Pages that lie on another node, perhaps in part.
    pub elsewhere: usize,
    /// Pages that are not present, perhaps in part: never touched, given back, or swapped out.
    pub absent: usize,
}

impl Placement {
    /// All pages.
    pub fn pages(self) -> usize {
        self.on_target + self.elsewhere + self.absent
    }

    /// Whether each page lies on the node.
    pub fn is_complete(self) -> bool {
        self.on_target == self.pages()
    }

    /// Asks the kernel for the place of each page of the memory. Touches no page.
    pub(super) fn of(memory: &PrivateMemory, to: NodeId) -> Result<Placement, Error> {
        Ok(find(memory, to)?.into_iter().collect())
    }
}

impl FromIterator<Place> for Placement {
    fn from_iter<T: IntoIterator<Item = Place>>(places: T) -> Placement {
        let mut placement = Placement::default();
        for place in places {
            *match place {
                Place::OnTarget => &mut placement.on_target,
                Place::Elsewhere => &mut placement.elsewhere,
                Place::Absent => &mut placement.absent,
            } += 1;
        }
        placement
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Placement { on_target, elsewhere, absent } = self;
        write!(f, "{on_target} pages on the node, {elsewhere} elsewhere, {absent} absent")
    }
}

/// The place of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    OnTarget,
    Elsewhere,
    Absent,
}

impl Place {
    /// Judges a page by the statuses of its parts: nodes, or negated error numbers.
    fn of(parts: &[i32], to: NodeId) -> Place {
        if parts.iter().any(|node| *node < 0) {
            Place::Absent
        } else if parts.iter().all(|node| *node as u32 == to.0) {
            Place::OnTarget
        } else {
            Place::Elsewhere
        }
    }
}

/// Asks the kernel for the place of each page of the memory, in the order of their addresses.
pub(super) fn find(memory: &PrivateMemory, to: NodeId) -> Result<Vec<Place>, Error> {
    let (start, page) = (memory.as_ptr().addr(), memory.page());
    let pages: Vec<usize> = (start..start + memory.len()).step_by(page.bytes()).collect();
    let mut places = ask(page, &pages, to)?;
    for _ in 0..TRIES {
        let is_absent = |at: &usize| places[*at] == Place::Absent;
        let absent: Vec<usize> = (0..places.len()).filter(is_absent).collect();
        if absent.is_empty() {
            break;
        }
        thread::sleep(PAUSE);
        let again: Vec<usize> = absent.iter().map(|at| pages[*at]).collect();
        for (at, place) in absent.into_iter().zip(ask(page, &again, to)?) {
            places[at] = place;
        }
    }
    Ok(places)
}

/// Asks once for the places of these pages.
fn ask(page: PageSize, pages: &[usize], to: NodeId) -> Result<Vec<Place>, Error> {
    // The kernel may have split a transparent huge page, so each of its base pages is looked up.
    let parts = if page == PageSize::Thp { page.bytes() / BASE_PAGE } else { 1 };
    let mut places = Vec::with_capacity(pages.len());
    let (mut addresses, mut status) = (Vec::new(), Vec::new());
    for batch in pages.chunks(BATCH / parts) {
        addresses.clear();
        let parts_of = |page: &usize| (*page..).step_by(BASE_PAGE).take(parts);
        addresses.extend(batch.iter().flat_map(parts_of));
        status.resize(addresses.len(), 0);
        pageleap_sys::nodes_of_pages(0, &addresses, &mut status).map_err(failed("move_pages"))?;
        places.extend(status.chunks(parts).map(|parts| Place::of(parts, to)));
    }
    Ok(places)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::private::tests::node;

    #[test]
    fn a_page_lies_on_the_node_if_all_of_its_parts_do() {
        let of = |parts: &[i32]| Place::of(parts, NodeId(2));
        assert_eq!([of(&[2]), of(&[2, 2])], [Place::OnTarget; 2]);
        assert_eq!([of(&[0]), of(&[2, 0]), of(&[0, 2])], [Place::Elsewhere; 3]);
        assert_eq!([of(&[-libc::ENOENT]), of(&[2, 0, -libc::EFAULT])], [Place::Absent; 2]);
    }

    #[test]
    fn each_page_is_counted_once() {
        // More pages than one query asks for.
        let pages = BATCH + 3;
        let memory = PrivateMemory::new(pages * BASE_PAGE, PageSize::Base, node()).unwrap();
        let at = |page: usize| memory.as_ptr().addr() + page * BASE_PAGE;
        for page in [1, BATCH + 1] {
            // SAFETY: a page of this test's own, whose contents nobody needs.
            unsafe { pageleap_sys::discard(at(page), BASE_PAGE) }.unwrap();
        }
        let here = Placement { on_target: pages - 2, elsewhere: 0, absent: 2 };
        assert_eq!(Placement::of(&memory, node()).unwrap(), here);
        let nowhere = Placement { on_target: 0, elsewhere: pages - 2, absent: 2 };
        assert_eq!(Placement::of(&memory, NodeId(1023)).unwrap(), nowhere);
        assert_eq!(find(&memory, node()).unwrap()[1], Place::Absent);
        assert!(!here.is_complete());
        memory.touch();
        assert!(Placement::of(&memory, node()).unwrap().is_complete());
    }

    #[test]
    fn a_transparent_huge_page_is_one_page() {
        let memory = PrivateMemory::new(2 * (2 << 20), PageSize::Thp, node()).unwrap();
        let placement = Placement::of(&memory, node()).unwrap();
        assert_eq!(placement, Placement { on_target: 2, ..Placement::default() });
        // SAFETY: the last base page of the second page. Nobody needs its contents.
        unsafe {
            let last = memory.as_ptr().addr() + memory.len() - BASE_PAGE;
            pageleap_sys::discard(last, BASE_PAGE).unwrap();
        }
        let placement = Placement::of(&memory, node()).unwrap();
        assert_eq!(placement, Placement { on_target: 1, elsewhere: 0, absent: 1 });
    }
}
