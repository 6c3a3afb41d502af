//! The kernel itself, the files that it shows, and what it hides.

use pageleap::topology::{self, Topology};
use pageleap::{BASE_PAGE, Error, observe};
use pageleap_sys as sys;

use crate::around::Around;
use crate::finding::{Finding, Remedy, Topic, Who};
use crate::memory::could_not_try;
use crate::scratch::Scratch;
use crate::tracking::mount_proc;

/// Why files of another root are missing.
const NOT_IN_ROOT: &str = "the folder does not have it, or its permissions are closed";
/// The files of `/proc` that pools and jobs read.
const PROC_FILES: [&str; 6] = [
    "proc/meminfo",
    "proc/self/maps",
    "proc/self/smaps",
    "proc/self/status",
    "proc/self/cgroup",
    "proc/sys/vm/min_free_kbytes",
];

pub(crate) fn findings_from_files(
    around: &Around,
    topology: &Result<Topology, Error>,
) -> Vec<Finding> {
    vec![kernel(around), procfs(around), sysfs(around, topology)]
}

pub(crate) fn findings(around: &Around) -> Vec<Finding> {
    vec![base_page(), frame_numbers(around)]
}

fn kernel(around: &Around) -> Finding {
    const FILE: &str = "proc/sys/kernel/osrelease";
    let (release, seen) = if around.live {
        let release = sys::kernel_release().ok();
        let seen = format!("uname: {}", release.as_deref().unwrap_or("fails"));
        (release, seen)
    } else {
        around.read_line(FILE)
    };
    let finding = match release {
        Some(release) => Finding::works(
            Topic::Kernel,
            format!("Linux {}; what it can do was tried, not inferred", printable(&release)),
        ),
        None => Finding::unknown(
            Topic::Kernel,
            "the kernel's version is not known",
            "neither uname nor /proc tells it",
        ),
    };
    finding.saw(printable(&seen))
}

/// Text of a file without what could steer a terminal.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

fn base_page() -> Finding {
    // SAFETY: reads a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let finding = if bytes == BASE_PAGE as libc::c_long {
        Finding::works(Topic::BasePage, "base pages have 4 KB")
    } else {
        let reason = "this version knows base pages of 4 KB only";
        Finding::missing(Topic::BasePage, format!("base pages have {bytes} bytes"), reason).remedy(
            Who::Root,
            "boot a kernel with 4 KB pages (arm64: CONFIG_ARM64_4K_PAGES)",
            "",
        )
    };
    finding.saw(format!("sysconf(_SC_PAGESIZE): {bytes}"))
}

fn procfs(around: &Around) -> Finding {
    let topic = Topic::Procfs;
    let unreadable: Vec<String> = PROC_FILES
        .iter()
        .filter_map(|file| match around.files.text_if_there(file) {
            Ok(Some(_)) => None,
            Ok(None) => Some(format!("{}: not there", around.shown(file))),
            Err(error) => Some(error.to_string()),
        })
        .collect();
    let finding = match unreadable.len() {
        0 => return Finding::works(topic, "the files of /proc that pools and jobs read are there"),
        // What is mounted here changes nothing for the files of another root.
        n if !around.live => {
            let of = if n == PROC_FILES.len() { "/proc" } else { "files of /proc" };
            Finding::missing(topic, format!("{of} cannot be read"), NOT_IN_ROOT)
        }
        n if n == PROC_FILES.len() => Finding::missing(
            topic,
            "/proc cannot be read",
            "it is not mounted here, or its permissions are closed",
        )
        .remedies([mount_proc()]),
        _ => Finding::missing(
            topic,
            "files of /proc cannot be read",
            "pools and jobs read them to know how much memory is free and where it is",
        )
        .remedy(
            Who::Starter,
            "mount -t proc proc /proc",
            "over the partial one (subset=pid): programs there see the processes of their pid \
             namespace and the settings of the kernel",
        ),
    };
    unreadable.into_iter().fold(finding, Finding::saw)
}

fn sysfs(around: &Around, topology: &Result<Topology, Error>) -> Finding {
    const FILE: &str = "sys/devices/system/node/online";
    const CPUS: &str = "sys/devices/system/cpu/online";
    let topic = Topic::Sysfs;
    match topology {
        Ok(topology) => {
            let (_, seen) = around.read_line(FILE);
            let finding = if !topology.warnings().is_empty() {
                Finding::limited(
                    topic,
                    "the nodes are known, some of what /sys says about them is not",
                    "files are damaged or cannot be read",
                )
            } else if !topology::has_nodes(&around.files) {
                Finding::works(
                    topic,
                    "the kernel counts as one node: it was built without NUMA support",
                )
            } else {
                Finding::works(topic, "nodes, CPUs and memory are known")
            };
            topology
                .warnings()
                .iter()
                .fold(finding.saw(seen), |finding, warning| finding.saw(warning.clone()))
        }
        Err(error) => {
            let is_there = matches!(around.files.text_if_there(CPUS), Ok(Some(_)) | Err(_));
            let reason = match (is_there, around.live) {
                (true, _) => "a file is damaged, or may not be read",
                (false, true) => "/sys is not mounted here, or does not show them",
                (false, false) => NOT_IN_ROOT,
            };
            let finding = Finding::missing(topic, "nodes and CPUs are not known", reason);
            let mount = Remedy::new(
                Who::Root,
                "mount -t sysfs -o ro sysfs /sys",
                "programs there see devices and settings of the machine, and can change none of \
                 them",
            );
            let helps = around.live && !is_there;
            finding.saw(error.to_string()).remedies(helps.then_some(mount))
        }
    }
}

fn frame_numbers(around: &Around) -> Finding {
    let topic = Topic::FrameNumbers;
    let scratch = match Scratch::populated(BASE_PAGE, BASE_PAGE) {
        Ok(scratch) => scratch,
        Err(failed) => return could_not_try(topic, &failed),
    };
    match observe::frame_numbers(scratch.span.start, BASE_PAGE, BASE_PAGE) {
        Ok(Some(_)) => Finding::works(
            topic,
            "frame numbers can be read: that frames have changed can be proven",
        )
        .saw("/proc/self/pagemap: shows the frame of a page of ours"),
        Ok(None) => {
            let reason = if around.in_user_namespace == Some(true) {
                "the kernel shows them to CAP_SYS_ADMIN of the machine only, and this is a user namespace"
            } else {
                "the kernel shows them to CAP_SYS_ADMIN only, because they help to exploit faulty \
                 memory (Rowhammer)"
            };
            Finding::missing(
                topic,
                "frame numbers are hidden: that frames have changed cannot be \
             proven, only that contents are right",
                reason,
            )
            .saw("/proc/self/pagemap: frame 0 for a page of ours that is present")
            .remedy(
                Who::Root,
                "sudo pageleap demo",
                "the run may do anything; on a machine for tests only. Leaps need none of it",
            )
        }
        Err(error) => Finding::missing(
            topic,
            "frame numbers cannot be read",
            "pagemap cannot be read: see pagemap-scan",
        )
        .saw(error.to_string()),
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::State;
    use crate::tests::around;

    #[test]
    fn files_that_are_missing_are_named() {
        let mut none = around(&[], None);
        none.live = true;
        let finding = procfs(&none);
        assert!(
            finding.state == State::Missing
                && finding.remedies[0].line == "mount -t proc proc /proc",
            "{finding}"
        );
        let all: Vec<(&str, &str)> = PROC_FILES.iter().map(|file| (*file, "1\n")).collect();
        assert_eq!(procfs(&around(&all, None)).state, State::Works);
        let finding = procfs(&around(&all[1..], None));
        assert_eq!(finding.state, State::Missing);
        assert!(
            finding.observed.len() == 1 && finding.observed[0].contains("meminfo"),
            "{finding:?}"
        );
    }

    #[test]
    fn what_another_root_lacks_is_not_mounted_on_this_machine() {
        let mut none = around(&[], None);
        let both =
            |around: &Around| [procfs(around), sysfs(around, &Topology::read_from(&around.files))];
        for finding in both(&none) {
            assert!(finding.remedies.is_empty() && finding.reason == NOT_IN_ROOT, "{finding}");
        }
        none.live = true;
        assert!(both(&none).iter().all(|finding| finding.remedies.len() == 1));
    }

    #[test]
    fn a_damaged_file_is_no_reason_to_mount_sysfs() {
        let files = [
            ("sys/devices/system/cpu/online", "0\n"),
            ("sys/devices/system/node/node0/cpulist", "0\n"),
            ("sys/devices/system/node/node0/meminfo", "damaged\n"),
        ];
        let mut machine = around(&files, None);
        machine.live = true;
        let finding = sysfs(&machine, &Topology::read_from(&machine.files));
        assert!(finding.remedies.is_empty(), "{finding:?}");
        assert!(finding.observed[0].contains("it has no MemTotal"), "{finding:?}");
    }

    #[test]
    fn nodes_without_a_list_of_them_are_no_kernel_without_numa() {
        let files = [
            ("sys/devices/system/cpu/online", "0\n"),
            ("sys/devices/system/node/node0/cpulist", "0\n"),
            ("sys/devices/system/node/node0/meminfo", "MemTotal: 8 kB\nMemFree: 4 kB\n"),
        ];
        let machine = around(&files, None);
        let finding = sysfs(&machine, &Topology::read_from(&machine.files));
        assert_eq!(finding.summary, "nodes, CPUs and memory are known");
    }

    #[test]
    fn a_kernel_release_never_steers_a_terminal() {
        let finding = kernel(&around(&[("proc/sys/kernel/osrelease", "6.1\u{1b}[2J\n")], None));
        assert!(
            finding.summary.contains("Linux 6.1[2J") && !finding.observed[0].contains('\u{1b}'),
            "{finding:?}"
        );
    }
}
