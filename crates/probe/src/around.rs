//! The process that asks: its user, capabilities, namespace and filter. By these facts one error
//! number is told apart from the same number for another reason.

use pageleap::topology::{SysFiles, escaped};
use pageleap_sys::{self as sys, Errno, Trial, call_apart};

use crate::finding::{Finding, Remedy, Topic, Who};

/// What is known about the process before anything is tried.
#[derive(Clone, Debug)]
pub(crate) struct Around {
    pub(crate) files: SysFiles,
    /// Whether `files` are those of this machine, so that calls may be tried.
    pub(crate) live: bool,
    /// Whether a seccomp filter applies; `None` if the question itself is refused.
    pub(crate) filtered: Option<bool>,
    /// Effective capabilities, as a mask.
    pub(crate) capabilities: u64,
    /// Whether the process is in a user namespace of its own: its capabilities do not count on the
    /// machine then. `None` without `/proc`.
    pub(crate) in_user_namespace: Option<bool>,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// The user's name, where `/etc/passwd` has it.
    pub(crate) user: Option<String>,
}

impl Around {
    pub(crate) fn read(files: &SysFiles) -> Around {
        let live = files.root() == std::path::Path::new("/");
        // SAFETY: both calls only return a number.
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        let text = |path| files.text_if_there(path).ok().flatten();
        // The machine's own namespace maps all numbers to themselves.
        let own_map = text("proc/self/uid_map")
            .map(|map| !map.split_whitespace().eq(["0", "0", "4294967295"]));
        let user = text("etc/passwd").and_then(|passwd| user_of(&passwd, uid));
        Around {
            files: files.clone(),
            live,
            filtered: sys::has_seccomp_filter().ok(),
            capabilities: sys::effective_capabilities().unwrap_or(0),
            in_user_namespace: own_map,
            uid,
            gid,
            user,
        }
    }

    /// Whether the process has a capability on the machine. `None` if the capability may count in a
    /// user namespace only.
    pub(crate) fn can(&self, capability: u32) -> Option<bool> {
        let held = self.capabilities >> capability & 1 == 1;
        if held { self.in_user_namespace.map(|own| !own) } else { Some(false) }
    }

    /// The user of the process, for messages.
    pub(crate) fn who(&self) -> String {
        match &self.user {
            Some(name) => name.clone(),
            None => format!("uid {}", self.uid),
        }
    }

    /// The text of a file without its last line break (`None` if the file cannot be read), and a
    /// line that says what was seen.
    pub(crate) fn read_line(&self, path: &str) -> (Option<String>, String) {
        match self.files.text_if_there(path) {
            Ok(Some(text)) => {
                let text = text.trim().to_owned();
                let first = text.lines().next().unwrap_or("(empty)");
                let seen = format!("{}: {}", self.shown(path), escaped(first));
                (Some(text), seen)
            }
            Ok(None) => (None, format!("{}: not there", self.shown(path))),
            Err(error) => (None, error.to_string()),
        }
    }

    /// A number from a file, and a line that says what was seen.
    pub(crate) fn read_number(&self, path: &str) -> (Option<u64>, String) {
        let (text, seen) = self.read_line(path);
        (text.and_then(|text| text.parse().ok()), seen)
    }

    /// A path as messages name it.
    pub(crate) fn shown(&self, path: &str) -> String {
        self.files.shown(path)
    }

    /// The reason for EPERM or ENOSYS of a call that the kernel itself would allow.
    pub(crate) fn refusal(&self, call: &str, errno: Errno) -> String {
        match self.filtered {
            Some(true) => {
                format!("the seccomp filter of this process refuses {call} with {}", errno.name())
            }
            Some(false) => format!(
                "{call} fails with {}, and no seccomp filter applies: a security module, or a kernel that is not Linux \
                 (gVisor and the like), refuses it",
                errno.name()
            ),
            None => format!(
                "{call} fails with {}: most likely a seccomp filter, which cannot be asked about either",
                errno.name()
            ),
        }
    }

    /// If a filter applies, tries a call in a process apart, because the filter may end the caller.
    /// `Err` is the reason not to make the call.
    pub(crate) fn survives(
        &self,
        name: &str,
        call: &dyn Fn() -> Result<usize, Errno>,
    ) -> Result<(), Killed> {
        if self.filtered == Some(false) {
            return Ok(());
        }
        // SAFETY: the callers pass a single system call that changes no memory.
        match unsafe { call_apart(call) } {
            Ok(Trial::Killed(signal)) => Err(Killed::new(name, signal)),
            _ => Ok(()),
        }
    }
}

/// A call that ends the process which makes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Killed {
    name: String,
    signal: i32,
}

impl Killed {
    pub(crate) fn new(name: &str, signal: i32) -> Killed {
        Killed { name: name.to_owned(), signal }
    }

    pub(crate) fn seen(&self) -> String {
        let signal = if self.signal == libc::SIGSYS {
            "SIGSYS".to_owned()
        } else {
            format!("signal {}", self.signal)
        };
        format!("{}: ends the process with {signal} (tried in a process apart)", self.name)
    }

    /// The finding about a topic that takes this call.
    pub(crate) fn finding(&self, topic: Topic, summary: impl Into<String>) -> Finding {
        let reason =
            format!("the seccomp filter of this process ends it when it calls {}", self.name);
        Finding::missing(topic, summary, reason).ends_process().saw(self.seen())
    }
}

/// Gives findings about calls that a filter refuses their remedies: the lines that let all of these
/// calls through.
pub(crate) fn open_filter(around: &Around, findings: &mut [Finding]) {
    if around.filtered == Some(false) {
        return;
    }
    let mut calls: Vec<&'static str> =
        findings.iter().filter_map(|finding| finding.filtered).collect();
    calls.sort_unstable();
    calls.dedup();
    // A user who wants placement alone need not allow userfaultfd. A user who wants userfaultfd
    // gets lines that allow the others too.
    const POWERFUL: &str = "userfaultfd";
    let others: Vec<&str> = calls.iter().copied().filter(|call| *call != POWERFUL).collect();
    let (some, all) = (allow_calls(&others), allow_calls(&calls));
    for finding in findings {
        match finding.filtered {
            None => {}
            Some(POWERFUL) => finding.remedies.extend(all.iter().cloned()),
            Some(_) => finding.remedies.extend(some.iter().cloned()),
        }
    }
}

/// How the filter of a container or a service lets calls through.
fn allow_calls(calls: &[&str]) -> Vec<Remedy> {
    // Docker's profile allows these with the capability (moby, profiles/seccomp/default.json,
    // version 24), but never move_pages or userfaultfd.
    const WITH_NICE: [&str; 3] = ["mbind", "set_mempolicy", "get_mempolicy"];
    let (nice, others): (Vec<&str>, Vec<&str>) =
        calls.iter().partition(|call| WITH_NICE.contains(call));
    let mut powers = Vec::new();
    if calls.contains(&"userfaultfd") {
        powers.push(
            "its processes can hold up page faults of their own code (those of the kernel only with the privilege that \
             vm.unprivileged_userfaultfd asks for)",
        );
    }
    if calls.iter().any(|call| WITH_NICE.contains(call) || *call == "move_pages") {
        powers.push(
            "its processes can choose and see on which node their own memory lies (for memory of others they still need \
             the right to trace them)",
        );
    }
    let grants = powers.join("; ");
    let names = calls.join("\",\"");
    let mut remedies = vec![
        Remedy::new(
            Who::Starter,
            format!(
                "jq '.syscalls += [{{\"names\":[\"{names}\"],\"action\":\"SCMP_ACT_ALLOW\"}}]' default.json > pageleap.json && \
                 docker run --security-opt seccomp=pageleap.json <IMAGE>"
            ),
            format!(
                "{grants}. default.json is the profile in use: Docker's is profiles/seccomp/default.json of moby, Podman's \
                 /usr/share/containers/seccomp.json"
            ),
        ),
        Remedy::new(
            Who::Starter,
            drop_in(&format!("SystemCallFilter={}", calls.join(" "))),
            "the same, for a service that systemd starts with a filter",
        ),
    ];
    if !nice.is_empty() {
        let rest = if others.is_empty() {
            String::new()
        } else {
            format!(", but not {}", others.join(", "))
        };
        remedies.push(Remedy::new(
            Who::Starter,
            "docker run --cap-add SYS_NICE <IMAGE>",
            format!(
                "with it Docker's and Podman's own profiles allow {}{rest}; the container can also raise priorities, up to \
                 real-time, and set the CPUs of other processes in it",
                nice.join(", ")
            ),
        ));
    }
    remedies
}

/// The commands that give a systemd service one more setting.
pub(crate) fn drop_in(setting: &str) -> String {
    let name = setting.split('=').next().unwrap_or_default().to_lowercase();
    format!(
        "mkdir -p /etc/systemd/system/<UNIT>.d && printf '[Service]\\n{setting}\\n' > \
         /etc/systemd/system/<UNIT>.d/pageleap-{name}.conf && systemctl daemon-reload && systemctl restart <UNIT>"
    )
}

/// Whether a name can be part of a command as it is.
pub(crate) fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with('-')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

/// A path, if it can be part of a command as it is.
pub(crate) fn typed(path: &str) -> Option<&str> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-/:@".contains(&b);
    path.bytes().all(plain).then_some(path)
}

/// The name of a user, by a text in the format of `/etc/passwd`.
fn user_of(passwd: &str, uid: u32) -> Option<String> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let fits = fields.nth(1)?.parse() == Ok(uid);
        (fits && is_plain(name)).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_from_passwd_and_never_carry_shell_syntax() {
        let passwd =
            "root:x:0:0:root:/root:/bin/sh\nbad;rm:x:7:7::/:/x\n\nnobody:x:65534:65534:n:/:/x\n";
        assert_eq!(user_of(passwd, 0).as_deref(), Some("root"));
        assert_eq!(user_of(passwd, 65534).as_deref(), Some("nobody"));
        assert_eq!(user_of(passwd, 7), None);
        assert_eq!(user_of(passwd, 8), None);
    }

    #[test]
    #[cfg(not(miri))]
    fn what_files_say_reaches_neither_the_terminal_nor_a_shell_as_it_is() {
        let files = [("proc/sys/vm/max_map_count", "1\u{1b}[31m\u{7}\u{202e}\n")];
        let (_, seen) = crate::tests::around(&files, None).read_line("proc/sys/vm/max_map_count");
        assert!(seen.chars().all(|c| !c.is_control() && c != '\u{202e}'), "{seen:?}");
        assert!(
            is_plain("user-1.x_y") && !is_plain("x$(id)y") && !is_plain("") && !is_plain("-rf")
        );
        assert_eq!(typed("/a/b@1.slice"), Some("/a/b@1.slice"));
        assert_eq!(typed("/a;id>pwned"), None);
    }

    #[test]
    fn a_capability_is_only_suggested_where_it_opens_the_filter() {
        let lines = |calls: &[&str]| {
            allow_calls(calls).into_iter().map(|r| r.line).collect::<Vec<_>>().join("\n")
        };
        assert!(lines(&["mbind"]).contains("SYS_NICE"));
        let both = allow_calls(&["mbind", "move_pages"]);
        assert!(both[0].line.contains("[\"mbind\",\"move_pages\"]"), "{both:?}");
        assert!(both[2].grants.contains("allow mbind, but not move_pages"), "{both:?}");
        assert!(!lines(&["move_pages"]).contains("SYS_NICE"));
        assert!(lines(&["move_pages"]).contains("\"names\":[\"move_pages\"]"));
        assert!(lines(&["userfaultfd"]).contains("SystemCallFilter=userfaultfd"));
    }
}
