//! What a probe found: a state with its evidence, the reason, and remedies with their price.

use std::fmt;

/// The subject of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Topic {
    /// The kernel's version. Nothing is inferred from it; it is named because bug reports need it.
    Kernel,
    /// The size of base pages.
    BasePage,
    /// The files of `/proc` that pools and jobs read.
    Procfs,
    /// The files of `/sys` that tell nodes and CPUs.
    Sysfs,
    /// Memory files: `memfd_create` and its policy.
    MemoryFiles,
    /// Seals, which keep a memory file from being truncated.
    Seals,
    /// Filling page tables with an error in place of a signal (`MADV_POPULATE_WRITE`).
    Populate,
    /// Moving filled page tables between mappings of memory files (`mremap` with
    /// `MREMAP_DONTUNMAP`).
    MovePageTables,
    /// The nodes of the machine.
    Nodes,
    /// The nodes that the process may take memory from.
    Cpuset,
    /// Binding memory to a node (`mbind`).
    Mbind,
    /// Choosing the node of page tables (`set_mempolicy`).
    PageTablePlacement,
    /// Asking on which node a page lies (`move_pages` without target).
    PlacementQuery,
    /// The kernel's own migration of pages.
    AutoNuma,
    /// Transparent huge pages of memory files.
    ShmemThp,
    /// hugetlb pages of 2 MB.
    Hugetlb2M,
    /// hugetlb pages of 1 GB.
    Hugetlb1G,
    /// Which pages are mapped and written (`PAGEMAP_SCAN`).
    PagemapScan,
    /// Physical frame numbers.
    FrameNumbers,
    /// userfaultfd through `/dev/userfaultfd`, faults of the kernel included.
    UserfaultfdDevice,
    /// userfaultfd by the system call, faults of the kernel included.
    Userfaultfd,
    /// userfaultfd by the system call for faults of user code only.
    UserfaultfdUserMode,
    /// Seeing writes without a fault handler: asynchronous write-protection of a memory file, and a
    /// scan.
    WriteTracking,
    /// Holding back writers, the kernel's writes included. Used where the kernel cannot note
    /// writes, or not finely enough.
    WriteBarrier,
    /// Holding user code and kernel back from a range, which an exchange of page tables under
    /// writes needs.
    Freeze,
    /// The same without noting writes: holding threads that touch pages which have been taken away.
    Hold,
    /// The same for hugetlb pages of 2 MB.
    HoldHugetlb,
    /// Moving private memory in place (`UFFDIO_MOVE`), while user code and kernel use it.
    MemoryInPlace,
    /// Mappings that a process may have.
    Mappings,
    /// Address space that the process may use.
    AddressSpace,
    /// The size that a file may have.
    FileSize,
    /// Memory that the process may lock.
    LockedMemory,
    /// Free memory of the nodes.
    FreeMemory,
    /// Memory that the process' cgroups leave.
    CgroupMemory,
    /// Memory that the kernel will commit to.
    Overcommit,
    /// Whether pages can be swapped out.
    Swap,
    /// A leap that was done.
    Leap,
}

impl Topic {
    /// A name for programs; stays the same from version to version.
    pub const fn id(self) -> &'static str {
        match self {
            Topic::Kernel => "kernel",
            Topic::BasePage => "base-page",
            Topic::Procfs => "procfs",
            Topic::Sysfs => "sysfs",
            Topic::MemoryFiles => "memfd",
            Topic::Seals => "memfd-seals",
            Topic::Populate => "populate",
            Topic::MovePageTables => "move-page-tables",
            Topic::Nodes => "nodes",
            Topic::Cpuset => "cpuset",
            Topic::Mbind => "mbind",
            Topic::PageTablePlacement => "page-table-placement",
            Topic::PlacementQuery => "placement-query",
            Topic::AutoNuma => "autonuma",
            Topic::ShmemThp => "thp",
            Topic::Hugetlb2M => "hugetlb-2m",
            Topic::Hugetlb1G => "hugetlb-1g",
            Topic::PagemapScan => "pagemap-scan",
            Topic::FrameNumbers => "frame-numbers",
            Topic::Userfaultfd => "userfaultfd",
            Topic::UserfaultfdDevice => "userfaultfd-device",
            Topic::UserfaultfdUserMode => "userfaultfd-user-mode",
            Topic::WriteTracking => "write-tracking",
            Topic::WriteBarrier => "write-barrier",
            Topic::Freeze => "freeze",
            Topic::Hold => "hold",
            Topic::HoldHugetlb => "hold-hugetlb",
            Topic::MemoryInPlace => "memory-in-place",
            Topic::Mappings => "mappings",
            Topic::AddressSpace => "address-space",
            Topic::FileSize => "file-size",
            Topic::LockedMemory => "locked-memory",
            Topic::FreeMemory => "free-memory",
            Topic::CgroupMemory => "cgroup-memory",
            Topic::Overcommit => "overcommit",
            Topic::Swap => "swap",
            Topic::Leap => "leap",
        }
    }

    /// The heading of its group.
    pub const fn group(self) -> &'static str {
        match self {
            Topic::Kernel | Topic::BasePage | Topic::Procfs | Topic::Sysfs => "system",
            Topic::MemoryFiles
            | Topic::Seals
            | Topic::Populate
            | Topic::MovePageTables
            | Topic::MemoryInPlace
            | Topic::Leap => "leap",
            Topic::Nodes
            | Topic::Cpuset
            | Topic::Mbind
            | Topic::PageTablePlacement
            | Topic::PlacementQuery
            | Topic::AutoNuma => "placement",
            Topic::ShmemThp | Topic::Hugetlb2M | Topic::Hugetlb1G => "page sizes",
            Topic::PagemapScan
            | Topic::FrameNumbers
            | Topic::WriteTracking
            | Topic::WriteBarrier
            | Topic::Freeze
            | Topic::Hold
            | Topic::HoldHugetlb => "tracking",
            Topic::Userfaultfd | Topic::UserfaultfdDevice | Topic::UserfaultfdUserMode => {
                "userfaultfd"
            }
            Topic::Mappings
            | Topic::AddressSpace
            | Topic::FileSize
            | Topic::LockedMemory
            | Topic::FreeMemory
            | Topic::CgroupMemory
            | Topic::Overcommit
            | Topic::Swap => "limits",
        }
    }

    /// Whether a larger leap needs more of it, so that a small leap proves nothing about it.
    pub const fn depends_on_size(self) -> bool {
        matches!(
            self,
            Topic::Hugetlb2M
                | Topic::Hugetlb1G
                | Topic::Mappings
                | Topic::AddressSpace
                | Topic::FileSize
                | Topic::LockedMemory
                | Topic::FreeMemory
                | Topic::CgroupMemory
                | Topic::Overcommit
        )
    }

    /// The function of pageleap that depends on it.
    pub const fn needed_by(self) -> Need {
        match self {
            Topic::BasePage
            | Topic::Procfs
            | Topic::Sysfs
            | Topic::MemoryFiles
            | Topic::Seals
            | Topic::Populate
            | Topic::PlacementQuery
            | Topic::Mappings
            | Topic::AddressSpace
            | Topic::FileSize
            | Topic::FreeMemory
            | Topic::CgroupMemory
            | Topic::Overcommit
            | Topic::Leap => Need::Leap,
            Topic::MovePageTables => Need::Speed,
            Topic::Nodes | Topic::Cpuset | Topic::Mbind | Topic::AutoNuma => Need::Placement,
            Topic::PageTablePlacement => Need::PageTables,
            Topic::ShmemThp => Need::Thp,
            Topic::Hugetlb2M => Need::Huge2M,
            Topic::Hugetlb1G => Need::Huge1G,
            Topic::FrameNumbers => Need::Verification,
            Topic::PagemapScan
            | Topic::Userfaultfd
            | Topic::UserfaultfdDevice
            | Topic::UserfaultfdUserMode
            | Topic::WriteTracking
            | Topic::WriteBarrier
            | Topic::Freeze
            | Topic::Hold
            | Topic::HoldHugetlb => Need::Following,
            Topic::MemoryInPlace => Need::InPlace,
            Topic::LockedMemory | Topic::Swap => Need::Residency,
            Topic::Kernel => Need::Nothing,
        }
    }
}

/// What does not work if a topic is not in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Need {
    /// Every leap.
    Leap,
    /// Leaps work, but pages fault once after they have moved.
    Speed,
    /// Memory on the requested node.
    Placement,
    /// Page tables on the requested node.
    PageTables,
    /// Pools of transparent huge pages.
    Thp,
    /// Pools of 2 MB pages.
    Huge2M,
    /// Pools of 1 GB pages.
    Huge1G,
    /// Keeping pools in memory.
    Residency,
    /// Proof that physical frames have changed.
    Verification,
    /// The engines of regions that need a userfaultfd: all but
    /// [`Engine::Mprotect`](pageleap::Engine::Mprotect).
    Following,
    /// The engine [`MemoryEngine::UffdMove`](pageleap::MemoryEngine::UffdMove), for memory that no pool
    /// owns. [`MemoryEngine::Kernel`](pageleap::MemoryEngine::Kernel) moves such memory everywhere.
    InPlace,
    /// Nothing.
    Nothing,
}

impl Need {
    /// In words that follow "needed by".
    pub const fn text(self) -> &'static str {
        match self {
            Need::Leap => "every leap",
            Need::Speed => "leaps without page faults afterwards",
            Need::Placement => "memory on the node asked for",
            Need::PageTables => "page tables on the node asked for",
            Need::Thp => "--page-size thp",
            Need::Huge2M => "--page-size 2m",
            Need::Huge1G => "--page-size 1g",
            Need::Residency => "keeping pools in memory (mlock)",
            Need::Verification => "the proof that frames have changed; leaps do without",
            Need::Following => {
                "the engines precopy, wp-sync and stop-copy, with which no system call fails because of a leap; others do without"
            }
            Need::InPlace => {
                "the engine uffd-move, for memory of malloc and mmap; the engine kernel does without"
            }
            Need::Nothing => "nothing by itself",
        }
    }
}

/// The state of a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// It was tried, or read, and is in order.
    Works,
    /// It is in order with a restriction, which the reason names.
    Limited,
    /// It does not work here.
    Missing,
    /// It could be neither tried nor read.
    Unknown,
}

impl State {
    /// One word.
    pub const fn text(self) -> &'static str {
        match self {
            State::Works => "works",
            State::Limited => "limited",
            State::Missing => "missing",
            State::Unknown => "unknown",
        }
    }
}

/// Who can apply a remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Who {
    /// The user, in the shell or program that is affected.
    You,
    /// The administrator of the machine; of the host, if this is a container.
    Root,
    /// The person who starts the container or the service.
    Starter,
}

impl Who {
    /// In words.
    pub const fn text(self) -> &'static str {
        match self {
            Who::You => "you",
            Who::Root => "root of the machine",
            Who::Starter => "whoever starts the container or service",
        }
    }
}

/// One way to change a finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remedy {
    /// Who can apply it.
    pub who: Who,
    /// The exact line to type or to add. A part in capitals between angle brackets is for the
    /// reader to fill in.
    pub line: String,
    /// The price: what it grants besides, or takes away.
    pub grants: String,
}

impl Remedy {
    pub(crate) fn new(who: Who, line: impl Into<String>, grants: impl Into<String>) -> Remedy {
        Remedy { who, line: line.into(), grants: grants.into() }
    }
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The subject.
    pub topic: Topic,
    /// The state.
    pub state: State,
    /// In one line.
    pub summary: String,
    /// What was seen: calls with their results, files with their contents.
    pub observed: Vec<String>,
    /// Why it is not in order; empty if it is.
    pub reason: String,
    /// What would change it, the least intrusive first; empty if it is in order or nothing helps.
    pub remedies: Vec<Remedy>,
    /// Whether a seccomp filter ends the process that tries it. A program that goes on to use what
    /// the topic is about would be ended too.
    pub ends_process: bool,
    /// The call that a seccomp filter refuses. One filter is changed for all of them at once.
    pub(crate) filtered: Option<&'static str>,
}

impl Finding {
    pub(crate) fn works(topic: Topic, summary: impl Into<String>) -> Finding {
        Finding::of(topic, State::Works, summary, "")
    }

    pub(crate) fn limited(
        topic: Topic,
        summary: impl Into<String>,
        reason: impl Into<String>,
    ) -> Finding {
        Finding::of(topic, State::Limited, summary, reason)
    }

    pub(crate) fn missing(
        topic: Topic,
        summary: impl Into<String>,
        reason: impl Into<String>,
    ) -> Finding {
        Finding::of(topic, State::Missing, summary, reason)
    }

    pub(crate) fn unknown(
        topic: Topic,
        summary: impl Into<String>,
        reason: impl Into<String>,
    ) -> Finding {
        Finding::of(topic, State::Unknown, summary, reason)
    }

    fn of(
        topic: Topic,
        state: State,
        summary: impl Into<String>,
        reason: impl Into<String>,
    ) -> Finding {
        let (summary, reason) = (summary.into(), reason.into());
        Finding {
            topic,
            state,
            summary,
            observed: Vec::new(),
            reason,
            remedies: Vec::new(),
            ends_process: false,
            filtered: None,
        }
    }

    /// Adds something that was seen.
    pub(crate) fn saw(mut self, what: impl Into<String>) -> Finding {
        self.observed.push(what.into());
        self
    }

    /// Adds a remedy, less preferable than those before.
    pub(crate) fn remedy(
        mut self,
        who: Who,
        line: impl Into<String>,
        grants: impl Into<String>,
    ) -> Finding {
        self.remedies.push(Remedy::new(who, line, grants));
        self
    }

    /// Notes that trying it ends the process.
    pub(crate) fn ends_process(mut self) -> Finding {
        self.ends_process = true;
        self
    }

    /// Notes that a filter may be why.
    pub(crate) fn filtered(mut self, call: &'static str) -> Finding {
        self.filtered = Some(call);
        self
    }

    /// Adds remedies that several findings share.
    pub(crate) fn remedies(mut self, remedies: impl IntoIterator<Item = Remedy>) -> Finding {
        self.remedies.extend(remedies);
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.topic.id(), self.state.text(), self.summary)?;
        if !self.reason.is_empty() {
            write!(f, "; {}", self.reason)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use pageleap::Engine;

    use super::*;

    #[test]
    fn the_engines_with_which_no_call_fails_are_named() {
        let words = |text: &'static str| text.split([' ', ',']).collect::<BTreeSet<_>>();
        let named = words(Need::Following.text());
        for engine in Engine::ALL {
            assert_eq!(named.contains(engine.name()), !engine.signals(), "{engine}");
        }
    }
}
