//! Page sizes and their numbers in C.

use pageleap::{Error, PageSize};

use crate::boundary::bad;

/// The size of the pages of a pool and of the regions over it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum pageleap_page_size {
    /// 4 KB pages.
    PAGELEAP_PAGE_4K = 0,
    /// Transparent huge pages (THP) of 2 MB: ordinary memory whose 4 KB pages the kernel has
    /// joined.
    PAGELEAP_PAGE_THP = 1,
    /// 2 MB pages of hugetlb; an administrator must have reserved them (nr_hugepages).
    PAGELEAP_PAGE_2M = 2,
    /// 1 GB pages of hugetlb; an administrator must have reserved them (nr_hugepages).
    PAGELEAP_PAGE_1G = 3,
}

const ALL: [PageSize; 4] = [PageSize::Base, PageSize::Thp, PageSize::Huge2M, PageSize::Huge1G];

/// The page size that a program has passed.
pub(crate) fn page_size(number: u32) -> Result<PageSize, Error> {
    let found = ALL.get(number as usize).copied();
    found.ok_or_else(|| {
        bad("page size", format!("{number} is not a page size"), "use one of pageleap_page_size")
    })
}

pub(crate) fn number(page: PageSize) -> u32 {
    ALL.iter().position(|one| *one == page).unwrap_or_default() as u32
}

/// Bytes of one page of a size, one of pageleap_page_size; 0 for other numbers.
#[unsafe(no_mangle)]
pub extern "C" fn pageleap_page_bytes(page_size: u32) -> usize {
    ALL.get(page_size as usize).map_or(0, |page| page.bytes())
}
