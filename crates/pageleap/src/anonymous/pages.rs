//! Finds the present pages of a range through `/proc/self/pagemap`.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use pageleap_sys::{self as sys, Errno, Kept, KeptFd, PageQuery, PageRegion, page_is};

use crate::job::area::Reason;
use crate::units::{BASE_PAGE, Call};

/// The most regions that one scan returns.
const REGIONS: usize = 128;

/// Present and swapped pages, with their categories. `page_is::FILE` is not asked for, because for
/// it the kernel would have to look at each frame.
const THERE: PageQuery = PageQuery {
    inverted: 0,
    all_of: 0,
    any_of: page_is::PRESENT | page_is::SWAPPED,
    tell: page_is::PRESENT | page_is::SWAPPED | page_is::ZERO | page_is::HUGE,
};
/// Present pages that no file backs.
const ANONYMOUS: PageQuery = PageQuery {
    inverted: page_is::FILE,
    all_of: page_is::PRESENT | page_is::FILE,
    any_of: 0,
    tell: page_is::PRESENT,
};

/// The pagemap of this process. A forked child must open its own, because this one shows its
/// parent.
pub(crate) struct Pagemap(KeptFd);

impl Pagemap {
    /// Opens the pagemap, and tries a scan (PAGEMAP_SCAN), because another file may be mounted
    /// there.
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

    /// Scans a range for present and swapped pages, and returns them in runs of equal categories;
    /// the gaps between runs are holes. Also returns the address up to which the range was scanned.
    pub(crate) fn scan(
        &self,
        range: Range<usize>,
    ) -> Result<(Vec<PageRegion>, usize), (Call, Errno)> {
        self.ask(range, &THERE)
    }

    /// The present anonymous pages of a range, in the form of [`Pagemap::scan`].
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

    /// The pagemap entry of each page of a range. If they cannot be read, each entry is unknown.
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

    /// Whether only this process maps the page, and only once. An unknown entry counts as
    /// exclusive, because the kernel refuses a page that is not.
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

    /// The number of its frame, which the kernel shows only with CAP_SYS_ADMIN (Linux 4.2).
    pub(super) fn frame(self) -> Option<u64> {
        Some(self.0 & Self::FRAME).filter(|frame| *frame != 0 && self.is_present())
    }
}
