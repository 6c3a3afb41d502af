//! What this machine, user and container let pageleap do: tried, not inferred.
//!
//! [`Capabilities::probe`] makes each call that matters once, on memory of its own, and reads the
//! settings that no call shows. The result is a list of [`Finding`]s: a state, what was seen, the
//! reason, and remedies with their price. [`Capabilities::try_leap`] does a leap of a few pages.
//!
//! ```no_run
//! use pageleap_probe::{Capabilities, Demand, Topic};
//!
//! let found = Capabilities::probe();
//! if !found.has(Topic::Freeze) {
//!     println!("{}", found.get(Topic::Freeze).unwrap()); // why the engine precopy is out of reach
//! }
//! println!("{}", found.try_leap(&Demand::default()));
//! ```
//!
//! **Invariant:** a probe leaves no mapping, descriptor, policy or limit changed, so that it may
//! run in any thread of a busy program. Descriptors are close-on-exec. The memory policy of a task
//! is only set in a process apart. If a seccomp filter applies, calls that few programs make
//! (`mbind`, `move_pages`, `set_mempolicy`, `userfaultfd`) are first tried in a process apart,
//! because some filters end the caller. A filter that ends the caller of `madvise` or `clone`,
//! which every program makes, ends the probing process too.
//!
//! Deciding is apart from trying: functions named `judge` turn an outcome into a finding without
//! touching the system.
//!
//! What a pool or a job checks is judged by the library's own rule, which comes by its public
//! interface or by `pageleap::for_probe`, and never by a copy. Estimates for a leap that nobody has
//! started, such as the address space of threads, are this crate's own.

#![cfg_attr(not(test), warn(clippy::excessive_nesting, clippy::too_many_lines))]
#![cfg(target_os = "linux")]

mod around;
mod demand;
mod features;
mod finding;
mod hold;
mod hugetlb;
mod in_place;
mod limits;
mod memory;
mod placement;
mod scratch;
mod system;
mod tracking;
mod trial;
mod userfaultfd;

pub use demand::Demand;
pub use features::{FEATURES, Feature};
pub use finding::{Finding, Need, Remedy, State, Topic, Who};
pub use userfaultfd::{Way, WayFound};

use pageleap::NodeId;
use pageleap::topology::{Node, SysFiles, Topology};

use around::Around;
use placement::Allowed;

/// What was found.
#[derive(Clone, Debug)]
pub struct Capabilities {
    findings: Vec<Finding>,
    userfaultfd: Vec<WayFound>,
    allowed: Vec<NodeId>,
    user: String,
    live: bool,
}

impl Capabilities {
    /// Probes this machine for the smallest demand: a few base pages.
    pub fn probe() -> Capabilities {
        Capabilities::probe_with(&SysFiles::host(), &Demand::default())
    }

    /// The same for a demand, and with the files below another root. If the root is not `/`, the
    /// files may be another machine's. Then no call is tried, and topics that only a call shows are
    /// [`State::Unknown`].
    pub fn probe_with(files: &SysFiles, demand: &Demand) -> Capabilities {
        let around = Around::read(files);
        let topology = Topology::read_from(files);
        let nodes = topology.as_ref().map_or(&[][..], Topology::nodes);
        let allowed = Allowed::read(&around, topology.as_ref().ok());
        let mut findings = system::findings_from_files(&around, &topology);
        findings.extend(placement::findings_from_files(&around, &allowed));
        let mut userfaultfd = Vec::new();
        if around.live {
            findings.extend(system::findings(&around));
            findings.extend(memory::findings(&around, limits::cgroup_room(&around)));
            findings.extend(placement::findings(&around, &allowed));
            let (ways, more) = userfaultfd::findings(&around);
            findings.extend(more);
            findings.extend(tracking::findings(&around, &ways));
            findings.extend(hold::findings(&ways));
            findings.push(in_place::finding(&ways, &findings));
            userfaultfd = ways;
        } else {
            findings.push(placement::autonuma(&around, &allowed, None));
            findings.extend(NOT_WITHOUT_CALLS.iter().map(|topic| {
                let reason =
                    "files of another root are read, and a call would be answered by this machine's kernel";
                Finding::unknown(*topic, "not tried", reason)
            }));
        }
        let usable: Vec<Node> =
            nodes.iter().filter(|node| allowed.allowed.contains(&node.id)).cloned().collect();
        findings.extend(hugetlb::findings(&around, demand, &usable));
        findings.extend(limits::findings(&around, demand, nodes, &allowed));
        around::open_filter(&around, &mut findings);
        findings.sort_by_key(|finding| finding.topic);
        Capabilities {
            findings,
            userfaultfd,
            allowed: allowed.allowed,
            user: around.who(),
            live: around.live,
        }
    }

    /// All findings, in the order of their topics.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// The finding about a topic. [`Topic::Leap`] is not among them: see
    /// [`Capabilities::try_leap`].
    pub fn get(&self, topic: Topic) -> Option<&Finding> {
        self.findings.iter().find(|finding| finding.topic == topic)
    }

    /// Whether a topic works, perhaps with a restriction.
    pub fn has(&self, topic: Topic) -> bool {
        self.get(topic)
            .is_some_and(|finding| matches!(finding.state, State::Works | State::Limited))
    }

    /// The ways to userfaultfd and the features that each has; empty if nothing was tried.
    pub fn userfaultfd(&self) -> &[WayFound] {
        &self.userfaultfd
    }

    /// The nodes that the process may take memory from.
    pub fn allowed_nodes(&self) -> &[NodeId] {
        &self.allowed
    }

    /// The user that the findings hold for.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// Whether calls were tried, because the files are this machine's.
    pub fn is_live(&self) -> bool {
        self.live
    }

    /// The findings that make a leap impossible, given the outcome of [`Capabilities::try_leap`].
    pub fn blockers<'a>(&'a self, demand: &Demand, trial: &'a Finding) -> Vec<&'a Finding> {
        trial::blockers(demand, &self.findings, trial)
    }
}

/// Topics that files say nothing about.
const NOT_WITHOUT_CALLS: [Topic; 23] = [
    Topic::BasePage,
    Topic::MemoryFiles,
    Topic::Seals,
    Topic::Populate,
    Topic::MovePageTables,
    Topic::ShmemThp,
    Topic::Mbind,
    Topic::PageTablePlacement,
    Topic::PlacementQuery,
    Topic::PagemapScan,
    Topic::FrameNumbers,
    Topic::Userfaultfd,
    Topic::UserfaultfdDevice,
    Topic::UserfaultfdUserMode,
    Topic::WriteTracking,
    Topic::WriteBarrier,
    Topic::Freeze,
    Topic::Hold,
    Topic::HoldHugetlb,
    Topic::MemoryInPlace,
    Topic::AddressSpace,
    Topic::FileSize,
    Topic::LockedMemory,
];

#[cfg(all(test, not(miri)))]
mod tests {
    use std::fs;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use super::*;

    /// Surroundings with files of their own, which go when it is dropped.
    pub(crate) struct Scene(Around);

    impl std::ops::Deref for Scene {
        type Target = Around;

        fn deref(&self) -> &Around {
            &self.0
        }
    }

    impl std::ops::DerefMut for Scene {
        fn deref_mut(&mut self) -> &mut Around {
            &mut self.0
        }
    }

    impl Drop for Scene {
        fn drop(&mut self) {
            fs::remove_dir_all(self.0.files.root()).unwrap();
        }
    }

    /// Files below a folder that is made for the test, looked at by an ordinary user without a
    /// filter.
    pub(crate) fn around(files: &[(&str, &str)], user: Option<&str>) -> Scene {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("pageleap-probe-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let root = std::env::temp_dir().join(name);
        fs::create_dir_all(&root).unwrap();
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Scene(Around {
            files: SysFiles::at(root),
            live: false,
            filtered: Some(false),
            capabilities: 0,
            in_user_namespace: Some(false),
            uid: 1000,
            gid: 1000,
            user: user.map(str::to_owned),
        })
    }

    #[test]
    fn every_topic_has_one_finding_with_or_without_calls() {
        let none = around(&[], None);
        for files in [SysFiles::host(), none.files.clone()] {
            let found = Capabilities::probe_with(&files, &Demand::default());
            let mut topics: Vec<Topic> =
                found.findings().iter().map(|finding| finding.topic).collect();
            assert!(topics.is_sorted());
            topics.dedup();
            assert_eq!(topics.len(), found.findings().len(), "a topic twice: {topics:?}");
            // All but the leap itself.
            assert_eq!(topics.len(), Topic::Leap as usize, "{topics:?}");
            for finding in found.findings() {
                let fine = finding.state == State::Works;
                assert_eq!(fine, finding.reason.is_empty(), "{finding}");
                assert!(!fine || finding.remedies.is_empty(), "{finding:?}");
            }
        }
    }

    #[test]
    fn hostile_numbers_are_counted_without_overflow() {
        let most = u64::MAX.to_string();
        let meminfo = format!(
            "MemTotal: {most} kB\nMemFree: {most} kB\nCommitLimit: {most} kB\nCommitted_AS: {most} kB\n"
        );
        let node = "sys/devices/system/node/node0";
        let hugepages = format!("{node}/hugepages/hugepages-2048kB");
        let files = [
            ("sys/devices/system/node/online", "0"),
            (&format!("{node}/cpulist"), "0"),
            (&format!("{node}/meminfo"), &meminfo),
            (&format!("{hugepages}/nr_hugepages"), &most),
            (&format!("{hugepages}/free_hugepages"), &most),
            ("proc/meminfo", &meminfo),
            ("proc/sys/vm/max_map_count", &most),
            ("proc/sys/vm/min_free_kbytes", &most),
            ("proc/sys/vm/overcommit_memory", "2"),
            ("proc/sys/kernel/numa_balancing", &most),
            ("proc/self/cgroup", "0::/"),
            ("sys/fs/cgroup/memory.max", &most),
            ("sys/fs/cgroup/memory.current", &most),
            ("sys/fs/cgroup/memory.stat", &format!("active_file {most}\ninactive_file {most}")),
        ];
        for page in [pageleap::PageSize::Base, pageleap::PageSize::Huge2M] {
            for bytes in [None, Some(1), Some(u64::MAX)] {
                let found =
                    Capabilities::probe_with(&around(&files, None).files, &Demand { bytes, page });
                assert!(found.get(Topic::Mappings).is_some());
            }
        }
    }

    #[test]
    fn nothing_is_tried_on_files_of_another_root() {
        let found = Capabilities::probe_with(&around(&[], None).files, &Demand::default());
        assert!(!found.is_live() && found.userfaultfd().is_empty());
        for topic in NOT_WITHOUT_CALLS {
            assert_eq!(found.get(topic).unwrap().state, State::Unknown, "{topic:?}");
        }
        let leap = found.try_leap(&Demand::default());
        assert_eq!(leap.state, State::Unknown);
    }

    #[test]
    fn a_probe_leaves_nothing_behind() {
        // The folder is read while it is open: one more, each time.
        let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
        let mappings = || {
            let maps = fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().filter(|line| line.contains("pageleap:probe")).count()
        };
        let before = descriptors();
        for _ in 0..20 {
            Capabilities::probe();
        }
        // Other tests of this process open and close files meanwhile, but not twenty more all the
        // time.
        assert!((0..1000).any(|_| descriptors() < before + 20), "descriptors are left");
        assert_eq!(
            pageleap_sys::policy_mode().unwrap_or(0),
            0,
            "the thread's memory policy was changed"
        );
        // Those of other tests that probe at this moment come and go.
        assert!((0..1000).any(|_| mappings() == 0), "mappings are left");
    }

    #[test]
    fn what_a_leap_has_proven_no_longer_stands_in_its_way() {
        let query = Finding::missing(Topic::PlacementQuery, "", "");
        let space = Finding::missing(Topic::AddressSpace, "", "");
        let findings = [query, space];
        let demand = Demand::default();
        let topics = |trial: &Finding| {
            trial::blockers(&demand, &findings, trial).iter().map(|f| f.topic).collect::<Vec<_>>()
        };
        assert_eq!(topics(&Finding::works(Topic::Leap, "")), [Topic::AddressSpace]);
        assert_eq!(
            topics(&Finding::missing(Topic::Leap, "", "")),
            [Topic::Leap, Topic::PlacementQuery, Topic::AddressSpace]
        );
    }
}
