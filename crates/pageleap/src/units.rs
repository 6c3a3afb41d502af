//! Units and names that all other modules use: a node id is not an index, and a byte length is not
//! a page count.

use std::fmt;
use std::ops::Range;

/// Bytes of a base page. On a kernel with larger base pages (arm64 with 64 KB) pools and regions
/// cannot be made.
pub const BASE_PAGE: usize = 4096;

/// The operating system's number of a NUMA node. Numbers are sparse: a machine may have the nodes 0
/// and 4 only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct NodeId(pub u32);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}

/// Identifies a region within the process, for reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub u64);

/// The name of the method by which pages were moved, as reports give it: of an
/// [`Engine`](crate::Engine) for memory of regions, of a [`MemoryEngine`](crate::MemoryEngine) for
/// other memory. Compare it with either.
///
/// A job knows its mover's methods by their names only, so a new kind of memory brings names of its
/// own (`docs/adr/0029`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineName {
    name: &'static str,
    number: u32,
}

impl EngineName {
    pub(crate) const fn new(name: &'static str, number: u32) -> EngineName {
        EngineName { name, number }
    }

    /// In options and reports, such as `wp-sync`.
    pub const fn name(self) -> &'static str {
        self.name
    }

    /// Its number in the C interface; 0 there means that the library chooses.
    pub const fn number(self) -> u32 {
        self.number
    }
}

impl fmt::Display for EngineName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// The size of the pages of a pool and of the regions over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageSize {
    /// 4 KB pages.
    Base,
    /// Transparent huge pages of 2 MB: ordinary memory, in pages that the kernel has joined. They
    /// need contiguous free memory, and either Linux 6.1 (`MADV_COLLAPSE`) or `always` in
    /// `/sys/kernel/mm/transparent_hugepage/shmem_enabled`.
    #[doc(alias = "transparent_hugepage")]
    Thp,
    /// 2 MB pages from the hugetlb pool, where they have to be reserved first (`nr_hugepages`).
    #[doc(alias = "MFD_HUGE_2MB")]
    Huge2M,
    /// 1 GB pages from the hugetlb pool, where they have to be reserved first (`nr_hugepages`, best
    /// at boot: `hugepagesz=1G hugepages=N`).
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

    /// Whether the pages come from the hugetlb pool. Such pages are reserved beforehand and never
    /// swapped out, and the kernel does not merge their mappings.
    pub const fn is_hugetlb(self) -> bool {
        self.hugetlb_bits().is_some()
    }

    /// The binary logarithm of the size, which `memfd_create` takes for hugetlb. `None` for
    /// ordinary memory.
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

/// Access that a mapping allows (`PROT_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prot(pub i32);

impl Prot {
    /// No access.
    pub const NONE: Prot = Prot(0);
    /// Reading.
    pub const READ: Prot = Prot(1);
    /// Reading and writing.
    pub const READ_WRITE: Prot = Prot(3);

    /// Whether loads are allowed.
    pub const fn readable(self) -> bool {
        self.0 & 1 != 0
    }

    /// Whether stores are allowed.
    pub const fn writable(self) -> bool {
        self.0 & 2 != 0
    }

    /// The same without permission to store.
    pub const fn without_write(self) -> Prot {
        Prot(self.0 & !2)
    }
}

/// Makes [`Call`] of one list, so that no operation lacks its number or its name.
macro_rules! calls {
    ($($(#[$doc:meta])+ $call:ident = $name:literal,)+) => {
        /// The operations of the boundary to the kernel, as reports count them and errors name
        /// them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(usize)]
        pub enum Call {
            $($(#[$doc])+ $call,)+
        }

        impl Call {
            /// All operations, in the order of their numbers.
            pub const ALL: [Call; [$($name),+].len()] = [$(Call::$call),+];

            /// The name of the system call.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Call::$call => $name,)+
                }
            }
        }
    };
}

calls! {
    /// Creation and sealing of a memory file.
    CreateFile = "memfd_create",
    /// Reservation of address space.
    Reserve = "mmap(PROT_NONE)",
    /// Return of address space.
    Release = "munmap",
    /// A mapping is removed, and its address space kept.
    Vacate = "mmap(MAP_FIXED|PROT_NONE)",
    /// A fixed shared mapping of a memory file.
    Map = "mmap(MAP_FIXED|MAP_SHARED)",
    /// Page tables move from one mapping to another.
    Exchange = "mremap(DONTUNMAP)",
    /// A change of protection.
    Protect = "mprotect",
    /// `madvise` that changes no contents.
    Advise = "madvise",
    /// `madvise` that fills page tables.
    Populate = "madvise(POPULATE)",
    /// `madvise` that makes huge pages.
    Collapse = "madvise(COLLAPSE)",
    /// `mlock2` or `munlock`.
    Lock = "mlock2",
    /// `mbind`.
    Bind = "mbind",
    /// `set_mempolicy`.
    PreferTables = "set_mempolicy",
    /// The query of the nodes on which pages lie.
    QueryNodes = "move_pages(query)",
    /// Moving pages to another node by the kernel.
    MovePages = "move_pages",
    /// Opening a userfaultfd, and the event that ends its service.
    OpenTracker = "userfaultfd",
    /// Registration of a range with a userfaultfd.
    Track = "UFFDIO_REGISTER",
    /// The end of a registration.
    Untrack = "UFFDIO_UNREGISTER",
    /// Write-protection of a registered range.
    MarkClean = "UFFDIO_WRITEPROTECT",
    /// The end of write-protection, for a page that a thread wants to write to.
    LetWrite = "UFFDIO_WRITEPROTECT(0)",
    /// The query of the pages that were written.
    Scan = "PAGEMAP_SCAN",
    /// Waking the threads that wait for a range.
    Wake = "UFFDIO_WAKE",
    /// Reading frames through their file.
    ReadFile = "pread",
    /// Moving pages out of a range.
    TakePages = "UFFDIO_MOVE(out)",
    /// Moving pages into a range.
    BringPages = "UFFDIO_MOVE(in)",
    /// Filling holes of a range with new pages.
    FillPages = "UFFDIO_COPY",
    /// `madvise` that gives pages back.
    Discard = "madvise(DONTNEED)",
    /// Opening the pagemap of this process, for PAGEMAP_SCAN.
    OpenPagemap = "open(/proc/self/pagemap)",
    /// A mapping moves, with its page tables, into a hole.
    MoveMapping = "mremap",
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A number of bytes for messages: `512 KiB`, `1.5 GiB`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
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
