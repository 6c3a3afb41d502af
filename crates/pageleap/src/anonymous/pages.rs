//! What is present in a range, by `/proc/self/pagemap`.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use pageleap_sys::{self as sys, Errno, Kept, KeptFd, PageQuery, PageRegion, page_is};

use crate::job::area::Reason;
use crate::units::{BASE_PAGE, Call};

/// Regions that one scan tells.
const REGIONS: usize = 128;

/// All pages that have something, and what they have. For `page_is::FILE` the kernel would have to
/// look at each frame.
const THERE: PageQuery = PageQuery {
    inverted: 0,
    all_of: 0,
    any_of: page_is::PRESENT | page_is::SWAPPED,
    tell: page_is::PRESENT | page_is::SWAPPED | page_is::ZERO | page_is::HUGE,
};
/// All pages that are present and no file's.
const ANONYMOUS: PageQuery = PageQuery {
    inverted: page_is::FILE,
    all_of: page_is::PRESENT | page_is::FILE,
    any_of: 0,
    tell: page_is::PRESENT,
};

/// The pagemap of this process. A child that opens none of its own would ask about its parent.
pub(crate) struct Pagemap(KeptFd);

impl Pagemap {
    /// Opens it, and makes sure that it can be scanned: another file may be mounted there.
    pub(crate) fn open() -> Result<Pagemap, (Call, Errno)> {
        let opened = sys::open_own("pagemap");
        let pagemap = Pagemap(opened.map_err(|errno| (Call::OpenPagemap, errno))?);
        let page = (&raw const pagemap).addr() / BASE_PAGE * BASE_PAGE;
        pagemap.scan(page..page + BASE_PAGE)?;
        Ok(pagemap)
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub(super) fn kept(&self) -> Kept {
        self.0.kept()
    }

    /// The present and the swapped pages of a range, in runs of equal kind. What is not told is a
    /// hole. Returns the address up to which the range has been looked at as well.
    pub(crate) fn scan(
        &self,
        range: Range<usize>,
    ) -> Result<(Vec<PageRegion>, usize), (Call, Errno)> {
        self.ask(range, &THERE)
    }

    /// The anonymous pages of a range that are present, as [`Pagemap::scan`] tells them.
    pub(super) fn anonymous(
        &self,
        range: Range<usize>,
    ) -> Result<(Vec<PageRegion>, usize), (Call, Errno)> {
        self.ask(range, &ANONYMOUS)
    }

    fn ask(
        &self,
        range: Range<usize>,
        query: &PageQuery,
    ) -> Result<(Vec<PageRegion>, usize), (Call, Errno)> {
        let mut found = vec![PageRegion::default(); REGIONS];
        // SAFETY: the scan protects nothing.
        let (count, end) =
            unsafe { sys::pagemap_scan(self.0.as_fd(), range, 0, query, &mut found) }
                .map_err(|errno| (Call::Scan, errno))?;
        found.truncate(count);
        Ok((found, end))
    }

    /// Whether all of a range is mapped by huge pages.
    pub(super) fn is_huge(&self, range: Range<usize>) -> bool {
        let len = range.len();
        let Ok((found, _)) = self.scan(range) else { return false };
        let huge = found.iter().filter(|region| region.categories & page_is::HUGE != 0);
        huge.map(|region| (region.end - region.start) as usize).sum::<usize>() == len
    }

    /// Whether a range has huge pages.
    pub(super) fn has_huge(&self, range: Range<usize>) -> bool {
        let all_of = page_is::PRESENT | page_is::HUGE;
        let query = PageQuery { inverted: 0, all_of, any_of: 0, tell: page_is::HUGE };
        let mut first = [PageRegion::default()];
        // SAFETY: the scan protects nothing.
        let found = unsafe { sys::pagemap_scan(self.0.as_fd(), range, 0, &query, &mut first) };
        found.is_ok_and(|(count, _)| count > 0)
    }

    /// What the pagemap says of each page of a range. Of what cannot be read nothing is known.
    pub(super) fn entries(&self, range: &Range<usize>) -> Vec<Entry> {
        let mut bytes = vec![0; range.len() / BASE_PAGE * size_of::<u64>()];
        let offset = (range.start / BASE_PAGE * size_of::<u64>()) as u64;
        let read = self.0.read_at(&mut bytes, offset) == Ok(bytes.len());
        let entry = |bytes: &[u8]| match read {
            true => Entry(u64::from_ne_bytes(bytes.try_into().expect("eight bytes"))),
            false => Entry::UNKNOWN,
        };
        bytes.chunks_exact(size_of::<u64>()).map(entry).collect()
    }
}

/// An entry of the pagemap (Documentation/admin-guide/mm/pagemap.rst).
#[derive(Clone, Copy)]
pub(super) struct Entry(u64);

impl Entry {
    const PRESENT: u64 = 1 << 63;
    const EXCLUSIVE: u64 = 1 << 56;
    const FRAME: u64 = (1 << 55) - 1;
    const UNKNOWN: Entry = Entry(Entry::PRESENT | Entry::EXCLUSIVE);

    /// Whether it is mapped by this process only, and once. What is not known counts as such: the
    /// kernel refuses a page that is not.
    pub(super) fn is_exclusive(self) -> bool {
        self.0 & Self::EXCLUSIVE != 0
    }

    fn is_present(self) -> bool {
        self.0 & Self::PRESENT != 0
    }

    /// Why a page stays that is not exclusive.
    pub(super) fn why_not(self) -> Reason {
        if self.is_present() { Reason::Shared } else { Reason::Absent }
    }

    /// The number of its frame. The kernel tells it to who has CAP_SYS_ADMIN (Linux 4.2).
    pub(super) fn frame(self) -> Option<u64> {
        Some(self.0 & Self::FRAME).filter(|frame| *frame != 0 && self.is_present())
    }
}
