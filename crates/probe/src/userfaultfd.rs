//! userfaultfd by each way to it, feature by feature.
//!
//! A feature is tried by a handshake of its own that asks for nothing else, because a descriptor
//! shakes hands once and refuses as a whole.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use pageleap::for_probe::{EXCHANGE, MOVE_IN_PLACE, TRACKING};
use pageleap_sys::{self as sys, Errno, UFFD_DEVICE as DEVICE};

use crate::around::{Around, Killed, drop_in, is_plain};
use crate::features::{FEATURES, Feature};
use crate::finding::{Finding, Remedy, Topic, Who};
use crate::scratch::Failed;

const SYSCTL: &str = "proc/sys/vm/unprivileged_userfaultfd";
/// What a process can do, and an attacker, that holds up the kernel's own faults.
const POWER: &str = "can make accesses of the kernel to their own memory wait as long as they like, which exploits have used to widen race \
                     windows inside the kernel";

/// A way to a userfaultfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// The system call, faults of the kernel included.
    Call,
    /// `/dev/userfaultfd`, the same.
    Device,
    /// The system call with `UFFD_USER_MODE_ONLY`.
    UserMode,
}

impl Way {
    /// All of them.
    pub const ALL: [Way; 3] = [Way::Call, Way::Device, Way::UserMode];

    /// As users write it.
    pub const fn text(self) -> &'static str {
        match self {
            Way::Call => "userfaultfd()",
            Way::Device => DEVICE,
            Way::UserMode => "userfaultfd(UFFD_USER_MODE_ONLY)",
        }
    }

    fn topic(self) -> Topic {
        match self {
            Way::Call => Topic::Userfaultfd,
            Way::Device => Topic::UserfaultfdDevice,
            Way::UserMode => Topic::UserfaultfdUserMode,
        }
    }

    /// The features that pageleap has a use for by this way.
    fn wanted(self) -> u64 {
        if self == Way::UserMode { TRACKING } else { EXCHANGE | MOVE_IN_PLACE }
    }

    /// A descriptor that has shaken hands for features.
    pub(crate) fn open_with(self, features: u64) -> Result<OwnedFd, Failed> {
        let refused =
            |refused: Refused| Failed::at(self.text())(refused.errno().unwrap_or(Errno(0)));
        let uffd = self.open().map_err(refused)?;
        sys::uffd_handshake(uffd.as_fd(), features).map_err(Failed::at("ioctl(UFFDIO_API)"))?;
        Ok(uffd)
    }

    fn open(self) -> Result<OwnedFd, Refused> {
        match self {
            Way::Call | Way::UserMode => {
                sys::userfaultfd(self == Way::UserMode).map_err(Refused::Call)
            }
            Way::Device => {
                let device = sys::open_uffd_device().map_err(Refused::Open)?;
                sys::userfaultfd_from_device(device.as_fd(), false).map_err(Refused::Call)
            }
        }
    }
}

/// Why a way gives no descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Refused {
    /// The device could not be opened.
    Open(Errno),
    /// The call, or the device's request, failed.
    Call(Errno),
    /// The call would end the process.
    Killed(Killed),
}

impl Refused {
    /// The call that was tried by that way, and its result.
    fn seen(&self, way: Way) -> String {
        match self {
            Refused::Killed(killed) => killed.seen(),
            Refused::Open(errno) => format!("open({DEVICE}): {errno}"),
            Refused::Call(errno) if way == Way::Device => {
                format!("ioctl({DEVICE}, USERFAULTFD_IOC_NEW): {errno}")
            }
            Refused::Call(errno) => format!("{}: {errno}", way.text()),
        }
    }

    fn errno(&self) -> Option<Errno> {
        match self {
            Refused::Open(errno) | Refused::Call(errno) => Some(*errno),
            Refused::Killed(_) => None,
        }
    }
}

/// One row of the matrix.
#[derive(Clone, Debug)]
pub struct WayFound {
    /// Which way.
    pub way: Way,
    /// Bits of the features whose handshake succeeded.
    pub features: u64,
    refused: Option<Refused>,
    /// Features that the kernel names but refuses.
    denied: Vec<(&'static str, Errno)>,
}

impl WayFound {
    /// Whether the way gives a descriptor.
    pub fn opens(&self) -> bool {
        self.refused.is_none()
    }

    pub(crate) fn has(&self, features: u64) -> bool {
        self.features & features == features
    }
}

/// Tries one way: a descriptor for what the kernel names, and one for each feature.
fn try_way(around: &Around, way: Way) -> WayFound {
    let mut found = WayFound { way, features: 0, refused: None, denied: Vec::new() };
    if way != Way::Device {
        let call = || sys::userfaultfd(way == Way::UserMode).map(|_| 0);
        if let Err(killed) = around.survives("userfaultfd", &call) {
            found.refused = Some(Refused::Killed(killed));
            return found;
        }
    }
    for feature in FEATURES {
        let shaken = match way.open() {
            Ok(uffd) => sys::uffd_handshake(uffd.as_fd(), feature.bit),
            Err(refused) => {
                found.refused = Some(refused);
                return found;
            }
        };
        match shaken {
            // Some kernels ignore what they do not know.
            Ok(known) if known & feature.bit != 0 => found.features |= feature.bit,
            Ok(_) | Err(Errno(libc::EINVAL)) => {}
            Err(errno) => found.denied.push((feature.name, errno)),
        }
    }
    found
}

/// Tries all ways and features. Only for a live kernel.
pub(crate) fn findings(around: &Around) -> (Vec<WayFound>, Vec<Finding>) {
    let ways: Vec<WayFound> = Way::ALL.into_iter().map(|way| try_way(around, way)).collect();
    let device = Device::look(around);
    let findings = ways.iter().map(|found| judge_way(around, &ways, found, &device)).collect();
    (ways, findings)
}

/// What files tell of the device.
#[derive(Clone, Debug, Default)]
struct Device {
    /// Its minor number, where the kernel says that it has such a device.
    minor: Option<u32>,
    /// Owner, group and permissions, if it is in `/dev`.
    permissions: Option<(u32, u32, u32)>,
    /// The name of that group.
    group: Option<String>,
}

impl Device {
    fn look(around: &Around) -> Device {
        let misc = around.files.text_if_there("proc/misc").ok().flatten().unwrap_or_default();
        let minor = misc
            .lines()
            .find_map(|line| line.trim().strip_suffix("userfaultfd")?.trim().parse().ok());
        let permissions =
            std::fs::metadata(DEVICE).ok().map(|m| (m.uid(), m.gid(), m.mode() & 0o777));
        let groups = around.files.text_if_there("etc/group").ok().flatten().unwrap_or_default();
        let group = permissions.and_then(|(_, gid, _)| {
            let mut fields = groups.lines().map(|line| line.split(':'));
            fields.find_map(|mut f| {
                let name = f.next().filter(|name| is_plain(name))?;
                (f.nth(1)?.parse() == Ok(gid)).then(|| name.to_owned())
            })
        });
        Device { minor, permissions, group }
    }

    /// How this process gets access: by passing the device in, or by its permissions.
    fn way_in(&self, around: &Around) -> Vec<Remedy> {
        if self.permissions.is_some() { self.access(around) } else { missing_device(self) }
    }

    /// How a user gets at it, without anybody else gaining anything.
    fn access(&self, around: &Around) -> Vec<Remedy> {
        let grants = format!("members of that group {POWER}; other users gain nothing");
        let mut remedies = Vec::new();
        match (&around.user, &self.group, self.permissions) {
            (Some(user), Some(group), Some((_, gid, mode)))
                if gid != 0 && mode & 0o060 == 0o060 =>
            {
                let line = format!("usermod -aG {group} {user}");
                let grants = format!("from the next login on, {grants}");
                remedies.push(Remedy::new(Who::Root, line, grants));
                return remedies;
            }
            (Some(user), ..) => remedies.push(Remedy::new(
                Who::Root,
                format!(
                    "groupadd -f -r userfaultfd && usermod -aG userfaultfd {user} && chgrp \
                     userfaultfd {DEVICE} && chmod 0660 {DEVICE}"
                ),
                format!("from the next login until the next boot, {grants}"),
            )),
            (None, ..) => remedies.push(Remedy::new(
                Who::Root,
                format!("chgrp {} {DEVICE} && chmod 0660 {DEVICE}", around.gid),
                format!(
                    "until the next boot, {grants} (group {} is the one that this process \
                 has)",
                    around.gid
                ),
            )),
        }
        remedies.push(Remedy::new(
            Who::Root,
            "echo 'KERNEL==\"userfaultfd\", GROUP=\"userfaultfd\", MODE=\"0660\"' > \
             /etc/udev/rules.d/70-userfaultfd.rules && \
             udevadm control --reload && udevadm trigger --sysname-match=userfaultfd",
            "the same for good (after the group has been made)",
        ));
        remedies
    }
}

fn judge_way(around: &Around, ways: &[WayFound], found: &WayFound, device: &Device) -> Finding {
    let topic = found.way.topic();
    let (sysctl, sysctl_seen) = around.read_number(SYSCTL);
    let text = found.way.text();
    let Some(refused) = &found.refused else {
        return judge_features(found).saw(sysctl_seen);
    };
    let seen = refused.seen(found.way);
    let user_mode_opens = ways.iter().any(|w| w.way == Way::UserMode && w.opens());
    let device_opens = ways.iter().any(|w| w.way == Way::Device && w.opens());
    let summary = format!("{text} is refused");
    let enough = format!("{DEVICE} works, which is enough: nothing needs to change");
    let finding = match (found.way, refused, refused.errno().unwrap_or(Errno(0)).0) {
        // The device is no way around it: jobs make the call first.
        (_, Refused::Killed(killed), _) => {
            return killed.finding(topic, summary).filtered("userfaultfd").saw(sysctl_seen);
        }
        (Way::Device, _, number) => return judge_device(around, device, number, summary).saw(seen),
        (_, _, libc::EMFILE | libc::ENFILE) => {
            Finding::unknown(topic, "not tried", "as many files are open as may be").remedy(
                Who::You,
                "ulimit -n 4096",
                "more open files for this shell and what it starts",
            )
        }
        (_, _, libc::ENOSYS) if sysctl.is_none() => Finding::missing(
            topic,
            summary,
            "the kernel seems to be built without CONFIG_USERFAULTFD: it has no sysctl for it either",
        ),
        (Way::UserMode, _, libc::EINVAL) => {
            Finding::missing(topic, summary, "UFFD_USER_MODE_ONLY came with Linux 5.11")
        }
        // The kernel refuses nothing to faults of user code only; so where both fail, it was not
        // the kernel.
        (Way::Call, _, libc::EPERM) if user_mode_opens => {
            let held = around.capabilities >> sys::capability::SYS_PTRACE & 1 == 1;
            let why = if held && around.in_user_namespace == Some(true) {
                "faults of the kernel ask for CAP_SYS_PTRACE on the machine, and this process has it \
                 in a user namespace only"
            } else {
                "faults of the kernel ask for CAP_SYS_PTRACE or vm.unprivileged_userfaultfd=1"
            };
            let finding = Finding::missing(topic, summary, why);
            if device_opens {
                return finding.saw(seen).saw(sysctl_seen).saw(enough);
            }
            finding
                .remedies(device.way_in(around))
                .remedy(
                    Who::Root,
                    "sysctl -w vm.unprivileged_userfaultfd=1",
                    format!("all processes of the machine {POWER}: prefer the device, which only its group can open"),
                )
                .remedy(
                    Who::Root,
                    "setcap cap_sys_ptrace+ep <PROGRAM>",
                    "users who may run the program can read and change the memory of every process through \
                     it, and it can no longer read /proc/self/pagemap: the worst of the three",
                )
        }
        (_, _, number) => {
            let finding =
                Finding::missing(topic, summary, around.refusal("userfaultfd", Errno(number)));
            match (device_opens, found.way) {
                (true, _) => return finding.saw(seen).saw(sysctl_seen).saw(enough),
                (false, Way::Call) => {
                    finding.remedies(device.way_in(around)).filtered("userfaultfd")
                }
                (false, _) => finding.filtered("userfaultfd"),
            }
        }
    };
    finding.saw(seen).saw(sysctl_seen)
}

fn judge_features(found: &WayFound) -> Finding {
    let topic = found.way.topic();
    let names = |keep: &dyn Fn(&Feature) -> bool| {
        let names =
            FEATURES.iter().filter(|f| keep(f)).map(|f| format!("{} ({})", f.name, f.since));
        names.collect::<Vec<_>>().join(", ")
    };
    let count = FEATURES.iter().filter(|f| found.has(f.bit)).count();
    let summary = format!("{} works, {count} of {} features", found.way.text(), FEATURES.len());
    let lacks = |f: &Feature| found.way.wanted() & f.bit != 0 && !found.has(f.bit);
    let wanted = names(&lacks);
    let absent = names(&|f| !found.has(f.bit));
    let mut finding = if wanted.is_empty() {
        Finding::works(topic, summary)
    } else {
        // Later features have higher bits.
        let newest = FEATURES.iter().rfind(|feature| lacks(feature)).map_or("", |f| f.since);
        let reason = format!("this kernel lacks {wanted}; in brackets the version that brought it");
        Finding::limited(topic, summary, reason).remedy(
            Who::Root,
            format!("boot Linux {newest} or later"),
            "",
        )
    };
    if !absent.is_empty() {
        finding = finding.saw(format!("handshakes refused: {absent}"));
    }
    for (name, errno) in &found.denied {
        let why = if *name == "EVENT_FORK" && errno.0 == libc::EPERM {
            " (asks for CAP_SYS_PTRACE; not needed)"
        } else {
            ""
        };
        finding = finding.saw(format!("UFFDIO_API with {name}: {errno}{why}"));
    }
    finding
}

fn judge_device(around: &Around, device: &Device, number: i32, summary: String) -> Finding {
    let topic = Topic::UserfaultfdDevice;
    match number {
        libc::ENOENT if device.minor.is_some() => Finding::missing(
            topic,
            summary,
            "the kernel has the device, and this /dev does not: a container gets it only if it is passed in",
        )
        .remedies(missing_device(device)),
        libc::ENOENT => Finding::missing(
            topic,
            summary,
            "this kernel has no such device: it came with Linux 6.1 (CONFIG_USERFAULTFD)",
        )
        .remedy(Who::Root, "boot Linux 6.1 or later", ""),
        libc::EACCES => {
            let (uid, gid, mode) = device.permissions.unwrap_or_default();
            let reason = format!(
                "{} is neither its owner nor in its group (owner {uid}, group {gid}, permissions {mode:04o})",
                around.who()
            );
            Finding::missing(topic, summary, reason).remedies(device.access(around))
        }
        libc::EPERM => {
            Finding::missing(topic, summary, "the device cgroup of this container or service refuses it")
                .remedies([
                    pass_device(),
                    Remedy::new(
                        Who::Starter,
                        drop_in("DeviceAllow=/dev/userfaultfd rw"),
                        "the same, for a service with a closed device policy",
                    ),
                ])
        }
        other => Finding::missing(topic, summary, around.refusal("the device", Errno(other))),
    }
}

fn pass_device() -> Remedy {
    Remedy::new(
        Who::Starter,
        "docker run --device /dev/userfaultfd --group-add \"$(stat -c %g /dev/userfaultfd)\" <IMAGE>",
        format!(
            "processes of that group in the container {POWER}; the filter for system calls stays as it is"
        ),
    )
}

fn missing_device(device: &Device) -> Vec<Remedy> {
    let mut remedies = vec![pass_device()];
    if let Some(minor) = device.minor {
        remedies.push(Remedy::new(
            Who::Root,
            format!("mknod -m 0600 {DEVICE} c 10 {minor}"),
            "only root can open it then: give it a group afterwards",
        ));
    }
    remedies
}

#[cfg(all(test, not(miri)))]
pub(crate) mod tests {
    use pageleap_sys::uffd_feature;

    use super::*;
    use crate::State;
    use crate::tests::around;

    const ALL: Option<u64> = Some((1 << FEATURES.len()) - 1);

    /// A way that gives descriptors with these features, or a way that is refused.
    pub(crate) fn found(way: Way, features: Option<u64>) -> WayFound {
        let refused = features.is_none().then_some(Refused::Call(Errno(libc::EPERM)));
        WayFound { way, features: features.unwrap_or(0), refused, denied: Vec::new() }
    }

    fn refused_all(errno: i32) -> Vec<WayFound> {
        let refused = |way, refused| WayFound { refused: Some(refused), ..found(way, None) };
        let call = Refused::Call(Errno(errno));
        vec![
            refused(Way::Call, call.clone()),
            refused(Way::Device, Refused::Open(Errno(libc::EACCES))),
            refused(Way::UserMode, call),
        ]
    }

    #[test]
    fn an_ordinary_user_is_sent_to_the_device_before_any_sysctl() {
        let mut ways = refused_all(libc::EPERM);
        ways[2] = found(Way::UserMode, ALL);
        let device = Device {
            minor: Some(257),
            permissions: Some((0, 0, 0o600)),
            group: Some("root".into()),
        };
        let around = around(&[("proc/sys/vm/unprivileged_userfaultfd", "0\n")], Some("ann"));
        let finding = judge_way(&around, &ways, &ways[0], &device);
        assert_eq!(finding.state, State::Missing);
        assert!(finding.reason.contains("CAP_SYS_PTRACE"), "{finding}");
        let lines: Vec<&str> = finding.remedies.iter().map(|r| r.line.as_str()).collect();
        let place = |text: &str| lines.iter().position(|line| line.contains(text)).unwrap();
        assert!(
            lines[0].contains("usermod -aG userfaultfd ann") && lines[0].contains("chmod 0660"),
            "{lines:?}"
        );
        assert!(place("udev") < place("sysctl") && place("sysctl") < place("setcap"), "{lines:?}");
        let device = judge_way(&around, &ways, &ways[1], &device);
        assert!(device.reason.contains("ann") && device.reason.contains("0600"), "{device}");
        assert!(!device.remedies.iter().any(|r| r.line.contains("sysctl")));
    }

    #[test]
    fn a_filter_is_told_from_a_missing_privilege_and_from_a_kernel_without() {
        for (errno, filtered) in [(libc::EPERM, true), (libc::ENOSYS, true)] {
            let ways = refused_all(errno);
            let mut around = around(&[("proc/sys/vm/unprivileged_userfaultfd", "0\n")], None);
            around.filtered = Some(filtered);
            for way in [0, 2] {
                let finding = judge_way(&around, &ways, &ways[way], &Device::default());
                assert!(finding.reason.contains("seccomp filter"), "{finding}");
                assert!(!finding.remedies.iter().any(|r| r.line.contains("sysctl")), "{finding:?}");
            }
        }
        let ways = refused_all(libc::ENOSYS);
        let finding = judge_way(&around(&[], None), &ways, &ways[0], &Device::default());
        assert!(
            finding.reason.contains("CONFIG_USERFAULTFD") && finding.remedies.is_empty(),
            "{finding}"
        );
    }

    #[test]
    fn a_kernel_without_some_features_is_limited_and_says_which() {
        let mut way = found(Way::Call, ALL);
        way.features &= !(uffd_feature::WP_ASYNC | uffd_feature::POISON);
        let finding = judge_features(&way);
        assert_eq!(finding.state, State::Limited);
        assert!(
            finding.reason.contains("WP_ASYNC (6.7)") && !finding.reason.contains("POISON"),
            "{finding}"
        );
        assert!(finding.observed[0].contains("POISON (6.6)"), "{finding:?}");
        assert_eq!(finding.remedies[0].line, "boot Linux 6.7 or later");
        way.features &= !uffd_feature::MOVE;
        let finding = judge_features(&way);
        assert!(finding.reason.contains("MOVE (6.8)"), "{finding}");
        assert_eq!(finding.remedies[0].line, "boot Linux 6.8 or later");
    }

    #[test]
    fn a_device_that_is_not_passed_in_is_told_from_a_kernel_without_it() {
        let around = around(&[], None);
        let with = Device { minor: Some(257), ..Device::default() };
        let passed = judge_device(&around, &with, libc::ENOENT, String::new());
        assert!(passed.remedies[0].line.contains("--device /dev/userfaultfd"));
        assert!(passed.remedies[1].line.contains("c 10 257"));
        let without = judge_device(&around, &Device::default(), libc::ENOENT, String::new());
        assert!(without.reason.contains("6.1"));
    }
}
