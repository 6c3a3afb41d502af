//! Units: a node id is not an index, a byte length is not a page count.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::error::Error;

/// Bytes of a base page. Kernels with larger ones (arm64 with 64 KB) are refused when a pool or a
/// region is made.
pub const BASE_PAGE: usize = 4096;

/// The operating system's number of a memory node. Node numbers are sparse: 0 and 4 may be all
/// there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}

/// The size of the pages of a pool and of the regions over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageSize {
    /// 4 KB pages.
    Base,
    /// Transparent huge pages of 2 MB: ordinary memory, in pages that the kernel has joined. Needs
    /// free memory in blocks of 2 MB, and either Linux 6.1 (`MADV_COLLAPSE`) or
    /// `/sys/kernel/mm/transparent_hugepage/shmem_enabled` on `always`.
    #[doc(alias = "transparent_hugepage")]
    Thp,
    /// 2 MB pages from the hugetlb pool, which somebody must have reserved (`nr_hugepages`).
    #[doc(alias = "MFD_HUGE_2MB")]
    Huge2M,
    /// 1 GB pages from the hugetlb pool, which somebody must have reserved (`nr_hugepages`, best at
    /// boot: `hugepagesz=1G hugepages=N`).
    #[doc(alias = "MFD_HUGE_1GB")]
    Huge1G,
}

impl PageSize {
    /// Bytes of one page.
    pub const fn bytes(self) -> usize {
        match self {
            PageSize::Base => BASE_PAGE,
            PageSize::Thp | PageSize::Huge2M => 2 << 20,
            PageSize::Huge1G => 1 << 30,
        }
    }

    /// Whether its pages come from the hugetlb pool: reserved beforehand, never swapped, mapped by
    /// mappings that do not merge.
    pub const fn is_hugetlb(self) -> bool {
        self.hugetlb_bits().is_some()
    }

    /// The binary logarithm of the size where `memfd_create` wants it, `None` for memory that is
    /// not hugetlb's.
    pub(crate) const fn hugetlb_bits(self) -> Option<u32> {
        match self {
            PageSize::Base | PageSize::Thp => None,
            PageSize::Huge2M => Some(21),
            PageSize::Huge1G => Some(30),
        }
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PageSize::Base => "4k",
            PageSize::Thp => "thp",
            PageSize::Huge2M => "2m",
            PageSize::Huge1G => "1g",
        })
    }
}

impl FromStr for PageSize {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        match s.to_ascii_lowercase().as_str() {
            "4k" => Ok(PageSize::Base),
            "thp" => Ok(PageSize::Thp),
            "2m" => Ok(PageSize::Huge2M),
            "1g" => Ok(PageSize::Huge1G),
            _ => Err(Error::BadArgument {
                what: "page size",
                reason: format!("`{s}` is none"),
                remedy: "use 4k, thp, 2m or 1g".into(),
            }),
        }
    }
}

/// A range of virtual addresses, shown as `/proc/PID/maps` shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct AddressRange(pub Range<usize>);

impl AddressRange {
    /// The range of `len` bytes that starts at `start`.
    pub const fn new(start: usize, len: usize) -> Self {
        AddressRange(start..start + len)
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}-{:#x}", self.0.start, self.0.end)
    }
}

impl fmt::Debug for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A number of bytes as people write it: `512 KB`, `1.5 GB` (binary units).
pub(crate) fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KB", "MB", "GB", "TB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() == 0.0 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}
