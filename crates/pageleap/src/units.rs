//! Units: a node id is not an index, a byte length is not a page count.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::error::Error;

/// Bytes of a base page. Kernels with larger ones (arm64 with 64 KB) are refused when a pool or a region is made.
pub const BASE_PAGE: usize = 4096;

/// The operating system's number of a memory node. Node numbers are sparse: 0 and 4 may be all there is.
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
    /// 2 MB pages from the hugetlb pool, which somebody must have reserved (`nr_hugepages`).
    #[doc(alias = "MFD_HUGE_2MB")]
    Huge2M,
}

impl PageSize {
    /// Bytes of one page.
    pub const fn bytes(self) -> usize {
        match self {
            PageSize::Base => BASE_PAGE,
            PageSize::Huge2M => 2 << 20,
        }
    }

    /// The binary logarithm of the size where `memfd_create` wants it, `None` for base pages.
    #[cfg_attr(loom, allow(dead_code))]
    pub(crate) const fn huge_bits(self) -> Option<u32> {
        match self {
            PageSize::Base => None,
            PageSize::Huge2M => Some(21),
        }
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PageSize::Base => "4k",
            PageSize::Huge2M => "2m",
        })
    }
}

impl FromStr for PageSize {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        match s.to_ascii_lowercase().as_str() {
            "4k" => Ok(PageSize::Base),
            "2m" => Ok(PageSize::Huge2M),
            _ => Err(Error::BadArgument {
                what: "page size",
                reason: format!("`{s}` is not one that this version moves"),
                remedy: "use 4k or 2m".into(),
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
