//! A process that uses borrowed settings, and whether it still lives.
//!
//! A pid alone proves nothing: another process may have it by now, and each pid namespace counts
//! its own. So a user is known by its pid, by the time at which it started, and by its pid
//! namespace. All three stay the same when the process executes another program (`execve(2)`).
//! A lock or a pipe would not do, because the program that is executed inherits no descriptors.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use pageleap_sys::PidFd;
use serde::{Deserialize, Serialize};

/// The inode of the first pid namespace (`PROC_PID_INIT_INO`). It sees the processes of all others.
const FIRST_NAMESPACE: u64 = 0xEFFF_FFFC;

/// How long one wait for the end of a process lasts at most, in milliseconds. Then its start time
/// is compared again.
const WAIT_MS: i32 = 60_000;

/// The pause between two looks at a process without a pidfd.
const PAUSE: Duration = Duration::from_millis(100);

/// The pause after the end of a process that `/proc` does not show yet.
const SHORT_PAUSE: Duration = Duration::from_millis(2);

/// Why a process cannot be the user of a setting.
#[derive(Debug, thiserror::Error)]
#[error("process {pid} cannot borrow settings: {reason}; {remedy}")]
pub struct NoUser {
    /// The number that was asked for.
    pub pid: u32,
    /// Why not.
    pub reason: String,
    /// How to fix it.
    pub remedy: &'static str,
}

/// Whether the user of a setting lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Life {
    /// It lives.
    Lives,
    /// All of its threads have ended.
    Ended,
    /// It belongs to a pid namespace that cannot be seen from here. It counts as living.
    Unknown,
}

/// A process that uses settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    pid: u32,
    /// Clock ticks from the boot to its start, as in `/proc/PID/stat`.
    started: u64,
    /// The inode of its pid namespace.
    pid_namespace: u64,
    command: String,
}

impl User {
    /// The calling process.
    ///
    /// # Errors
    /// `/proc` is not mounted, or shows another pid namespace than that of the process.
    pub fn this_process() -> Result<User, NoUser> {
        User::of(std::process::id())
    }

    /// The process with this number in the pid namespace of the caller.
    ///
    /// ```
    /// use pageleap_settings::{Life, User};
    ///
    /// let parent = User::of(std::os::unix::process::parent_id())?;
    /// assert_eq!(parent.life(), Life::Lives);
    /// # Ok::<(), pageleap_settings::NoUser>(())
    /// ```
    ///
    /// # Errors
    /// There is no such process, `/proc` is not mounted, or `/proc` shows another pid namespace
    /// than that of the caller.
    pub fn of(pid: u32) -> Result<User, NoUser> {
        let no_user = |reason: String, remedy| NoUser { pid, reason, remedy };
        let mount = "mount the /proc of this pid namespace: mount -t proc proc /proc";
        let pid_namespace = own_namespace().map_err(|reason| no_user(reason, mount))?;
        let stat = Stat::of(pid)
            .map_err(|error| no_user(format!("/proc/{pid}/stat: {error}"), "use a living one"))?;
        Ok(User { pid, started: stat.started, pid_namespace, command: printable(&stat.command) })
    }

    /// Whoever took note of it had this process. For the keeper, which gets pid and start time.
    pub(crate) fn noted(pid: u32, started: u64) -> Result<User, NoUser> {
        let pid_namespace = own_namespace();
        let remedy = "mount -t proc proc /proc";
        let pid_namespace = pid_namespace.map_err(|reason| NoUser { pid, reason, remedy })?;
        Ok(User { pid, started, pid_namespace, command: String::new() })
    }

    /// The same process, named after the program that it is about to execute.
    pub fn about_to_execute(self, command: &str) -> User {
        User { command: printable(command), ..self }
    }

    /// Its number, in its own pid namespace.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The name of its program when it borrowed the setting, without control characters.
    pub fn command(&self) -> &str {
        &self.command
    }

    /// Whether a keeper can see its end: with the first process of a pid namespace the kernel ends
    /// all others.
    pub(crate) fn check_that_others_outlive_it(&self) -> Result<(), NoUser> {
        const FIRST: u32 = 1;
        match self.pid {
            FIRST => Err(NoUser {
                pid: FIRST,
                reason: "with the first process of a container all others end, and nobody would \
                         put its settings back"
                    .into(),
                remedy: "start it below an init, such as that of docker run --init",
            }),
            _ => Ok(()),
        }
    }

    /// Clock ticks from the boot to its start.
    pub(crate) fn started(&self) -> u64 {
        self.started
    }

    /// Whether both are the same process, whatever program it executes.
    pub fn is_same_process(&self, other: &User) -> bool {
        (self.pid, self.started, self.pid_namespace)
            == (other.pid, other.started, other.pid_namespace)
    }

    /// Whether it lives.
    pub fn life(&self) -> Life {
        match own_namespace() {
            Ok(own) if own == self.pid_namespace => self.life_here(),
            Ok(FIRST_NAMESPACE) => self.life_below(),
            _ => Life::Unknown,
        }
    }

    /// Whether it has ended for certain.
    pub(crate) fn has_ended(&self) -> bool {
        self.life() == Life::Ended
    }

    /// Whether it lives, if it belongs to the pid namespace of the caller.
    fn life_here(&self) -> Life {
        match Stat::of(self.pid) {
            Ok(stat) if stat.started == self.started && !stat.has_ended => Life::Lives,
            Ok(_) => Life::Ended,
            Err(error) if is_no_process(&error) => Life::Ended,
            Err(_) => Life::Unknown,
        }
    }

    /// Whether it lives, if it belongs to a namespace below the first one, where it has another
    /// number. Only a process with that number and start time can be this one. The namespaces of all
    /// others do not matter, so it does not matter either whether they can be read.
    fn life_below(&self) -> Life {
        let Ok(entries) = fs::read_dir("/proc") else { return Life::Unknown };
        let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let mut life = Life::Ended;
        for pid in pids {
            match self.life_as(pid) {
                Life::Lives => return Life::Lives,
                Life::Unknown => life = Life::Unknown,
                Life::Ended => {}
            }
        }
        life
    }

    /// Whether the process with this number in the caller's namespace is this one, and lives.
    fn life_as(&self, outer: u32) -> Life {
        match fs::read(format!("/proc/{outer}/status")) {
            Ok(status) if inner_number(&String::from_utf8_lossy(&status)) == Some(self.pid) => {}
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Life::Unknown,
            _ => return Life::Ended,
        }
        match Stat::of(outer) {
            Ok(stat) if stat.started == self.started && !stat.has_ended => {}
            Err(error) if !is_no_process(&error) => return Life::Unknown,
            _ => return Life::Ended,
        }
        match namespace_of(&format!("/proc/{outer}/ns/pid")) {
            Ok(found) if found == self.pid_namespace => Life::Lives,
            Err(error) if !is_no_process(&error) => Life::Unknown,
            _ => Life::Ended,
        }
    }

    /// Waits until it has ended.
    ///
    /// The pidfd is opened first and the start time compared afterwards. The number belongs to this
    /// user then, so it did when the pidfd was opened. If a seccomp filter refuses the pidfd,
    /// `/proc` is read again and again.
    pub(crate) fn wait_for_end(&self) {
        loop {
            let pidfd = PidFd::open(self.pid as i32);
            if self.has_ended() {
                return;
            }
            match pidfd {
                Ok(pidfd) if pidfd.wait_for_end(WAIT_MS) => std::thread::sleep(SHORT_PAUSE),
                Ok(_) => {}
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }
}

/// As messages name it: `redis-server (1234)`.
impl std::fmt::Display for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.command, self.pid)
    }
}

/// Text of others without characters that steer a terminal.
fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
        .collect()
}

fn is_no_process(error: &io::Error) -> bool {
    // A process that ends between `open` and `read` gives ESRCH.
    let is_gone =
        error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH);
    is_gone && Path::new("/proc/self").exists()
}

/// Whether this process is in the first pid namespace, and `/proc` shows that one: its numbers are
/// those that the kernel has for all processes then. Not so in a container.
pub fn is_in_first_pid_namespace() -> bool {
    own_namespace() == Ok(FIRST_NAMESPACE)
}

/// The pid namespace of this process, if `/proc` shows it.
fn own_namespace() -> Result<u64, String> {
    let shown = fs::read_link("/proc/self").map_err(|error| format!("/proc/self: {error}"))?;
    if shown.to_str() != Some(&std::process::id().to_string()) {
        return Err("/proc shows another pid namespace than that of this process".into());
    }
    namespace_of("/proc/self/ns/pid").map_err(|error| format!("/proc/self/ns/pid: {error}"))
}

fn namespace_of(link: &str) -> io::Result<u64> {
    fs::metadata(link).map(|found| found.ino())
}

/// The number of a process in its own pid namespace, from its `status`. `None`: that is the
/// namespace of `/proc`, none below.
fn inner_number(status: &str) -> Option<u32> {
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    let mut numbers = numbers.split_whitespace();
    numbers.next()?;
    numbers.last()?.parse().ok()
}

/// Fields of `/proc/PID/stat`.
struct Stat {
    command: String,
    started: u64,
    /// Whether all threads have ended. A main thread may end before the others: it is a zombie,
    /// then, and not the only thread.
    has_ended: bool,
}

impl Stat {
    fn of(pid: u32) -> io::Result<Stat> {
        let bytes = fs::read(format!("/proc/{pid}/stat"))?;
        let text = String::from_utf8_lossy(&bytes);
        Stat::parse(&text).ok_or_else(|| io::Error::other("its form is unknown"))
    }

    /// Reads `1234 (a name) S 1 …`. The name may contain brackets and blanks.
    fn parse(text: &str) -> Option<Stat> {
        /// Positions behind the name, from the third field on.
        const THREADS: usize = 20 - 3;
        const STARTED: usize = 22 - 3;
        let (head, rest) = text.rsplit_once(')')?;
        let (_, command) = head.split_once('(')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let threads: u64 = fields.get(THREADS)?.parse().ok()?;
        let started = fields.get(STARTED)?.parse().ok()?;
        let has_ended = match *fields.first()? {
            "Z" => threads <= 1,
            "X" | "x" => true,
            _ => false,
        };
        Some(Stat { command: command.to_owned(), started, has_ended })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sleeper::Sleeper;

    #[test]
    fn a_name_may_contain_brackets() {
        let line = |state: &str, threads: u32| {
            format!("7 (a) Z (b) {state} 1 1 1 0 -1 4 0 0 0 0 0 0 0 0 20 0 {threads} 0 4711 9 9")
        };
        let stat = Stat::parse(&line("S", 3)).unwrap();
        assert_eq!((stat.command.as_str(), stat.started, stat.has_ended), ("a) Z (b", 4711, false));
        assert!(Stat::parse(&line("Z", 1)).unwrap().has_ended);
        assert!(!Stat::parse(&line("Z", 2)).unwrap().has_ended, "other threads live on");
        assert!(Stat::parse("7 (a) S 1").is_none());
    }

    #[test]
    fn a_zombie_has_ended_and_a_reused_number_is_another_process() {
        let mut sleeper = Sleeper::new();
        let user = sleeper.user();
        assert_eq!(user.life(), Life::Lives);
        let another = User { started: user.started + 1, ..user.clone() };
        assert_eq!(another.life(), Life::Ended);
        assert!(!another.is_same_process(&user));
        sleeper.0.kill().unwrap();
        user.wait_for_end();
        assert_eq!(user.life(), Life::Ended, "not waited for yet");
        sleeper.0.wait().unwrap();
        assert_eq!(user.life(), Life::Ended);
        assert!(User::of(user.pid()).is_err());
    }

    #[test]
    fn only_a_process_below_has_an_inner_number() {
        assert_eq!(inner_number("Name:\tx\nNSpid:\t4711\nNSpgid:\t1\t2\n"), None);
        assert_eq!(inner_number("NSpid:\t4711\t12\n"), Some(12));
        assert_eq!(inner_number("NSpid:\t4711\t12\t7\n"), Some(7));
        assert_eq!(inner_number("Name:\tx\n"), None);
    }

    #[test]
    fn names_cannot_steer_a_terminal() {
        let user = User::this_process().unwrap().about_to_execute("a\u{1b}[2J");
        assert_eq!(user.command(), "a\\u{1b}[2J");
    }
}
