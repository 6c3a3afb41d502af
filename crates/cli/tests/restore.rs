//! Settings that processes borrow come back however the processes and their keepers end, and
//! `pageleap restore` shows and restores them.
//!
//! The borrowers are processes of this test binary. Their settings are files below a folder, but
//! for one test, which changes two harmless settings of this machine and restores them.

#[path = "../../pageleap/tests/common/mod.rs"]
mod library;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use library::{is_root, skip};
use pageleap_settings::{Keeper, Ledger, User, Wish};
use serde_json::Value;

const THP: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
const BALANCING: &str = "/proc/sys/kernel/numa_balancing";

/// Environment variables for a borrower: the folder of its machine (`/` for this one), its wishes
/// (`FILE=VALUE`, by blanks), and a program that it executes afterwards.
const ROOT: &str = "PAGELEAP_TEST_ROOT";
const WISHES: &str = "PAGELEAP_TEST_WISHES";
const EXECUTES: &str = "PAGELEAP_TEST_EXECUTES";

/// A descriptor that each borrower inherits, which is not close-on-exec.
const INHERITED: libc::c_int = 200;

/// The process that borrows; started by [`Borrower::start`]. By itself, this test does nothing.
#[test]
fn a_borrower() {
    let Some(root) = std::env::var_os(ROOT).map(PathBuf::from) else { return };
    let mut arguments = vec!["keep-settings".into()];
    let mut ledger = Ledger::of_user();
    if root != Path::new("/") {
        arguments.extend(["--sysroot".into(), root.clone().into()]);
        ledger = Ledger::below(&root);
    }
    let keeper = Keeper::new(env!("CARGO_BIN_EXE_pageleap").into(), arguments);
    let wishes = std::env::var(WISHES).unwrap();
    let wishes = wishes.split(' ').map(|wish| {
        let (file, value) = wish.split_once('=').unwrap();
        Wish::new(file, value, "a test")
    });
    let wishes: Vec<Wish> = wishes.collect();
    let borrowed = ledger.with_keeper(keeper).borrow(&User::this_process().unwrap(), &wishes);
    match &borrowed {
        Ok(_) => println!("\nborrowed"),
        Err(error) => println!("\nrefused: {error}"),
    }
    if let Ok(program) = std::env::var(EXECUTES) {
        panic!("{}", Command::new(program).arg("1000").exec());
    }
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// A process that has borrowed settings, and waits. It is killed at the latest when it is dropped.
struct Borrower {
    child: Child,
    printed: BufReader<ChildStdout>,
}

impl Borrower {
    /// Starts one and waits until it has borrowed.
    #[track_caller]
    fn start(root: &Path, wishes: &str) -> Borrower {
        let mut borrower = Borrower::spawn(root, wishes, None);
        assert_eq!(borrower.said(), "borrowed");
        borrower
    }

    fn spawn(root: &Path, wishes: &str, executes: Option<&str>) -> Borrower {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "a_borrower", "--nocapture", "--test-threads=1"]);
        command.env(ROOT, root).env(WISHES, wishes).stderr(Stdio::null());
        if let Some(program) = executes {
            command.env(EXECUTES, program);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // SAFETY: the call takes numbers.
        let inherit = || match unsafe { libc::dup2(1, INHERITED) } {
            INHERITED => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        };
        // SAFETY: the closure makes one system call, which touches no memory.
        unsafe { command.pre_exec(inherit) };
        let mut child = command.spawn().unwrap();
        let printed = BufReader::new(child.stdout.take().unwrap());
        Borrower { child, printed }
    }

    /// What it says of its wishes.
    fn said(&mut self) -> String {
        let lines = self.printed.by_ref().lines().map(Result::unwrap);
        let mut lines =
            lines.skip_while(|l| !l.starts_with("borrowed") && !l.starts_with("refused"));
        lines.next().expect("it says what became of its wishes")
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Its keeper.
    fn keeper(&self) -> i32 {
        let is_keeper = |bytes: &[u8]| {
            let arguments: Vec<&[u8]> = bytes.split(|byte| *byte == 0).collect();
            let pid = self.child.id().to_string();
            // The last argument ends with a zero, too, behind which is nothing.
            arguments.contains(&b"keep-settings".as_slice())
                && arguments.iter().rev().nth(2) == Some(&pid.as_bytes())
        };
        let keepers: Vec<i32> = fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .filter(|entry| fs::read(entry.path().join("cmdline")).is_ok_and(|a| is_keeper(&a)))
            .map(|entry| entry.file_name().to_str().unwrap().parse().unwrap())
            .collect();
        assert_eq!(keepers.len(), 1, "one keeper waits for {}", self.child.id());
        keepers[0]
    }

    /// Kills it and its keeper; nobody is left to put anything back.
    fn kill_with_keeper(mut self, user_first: bool) {
        let keeper = self.keeper();
        if user_first {
            // The keeper cannot act on the end of the user before it is killed itself.
            signal(keeper, libc::SIGSTOP);
            wait_until("the keeper stops", || state(keeper) == "T");
            self.kill();
        }
        signal(keeper, libc::SIGKILL);
        wait_until("the keeper ends", || matches!(state(keeper).as_str(), "" | "Z"));
        if !user_first {
            self.kill();
        }
    }
}

impl Drop for Borrower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn signal(process: i32, signal: i32) {
    // SAFETY: the call takes numbers only. The test has just found the process alive.
    assert_eq!(unsafe { libc::kill(process, signal) }, 0);
}

/// The third field of `/proc/PID/stat`; empty if there is no such process.
fn state(process: i32) -> String {
    field(process, 3)
}

/// A field of `/proc/PID/stat` behind the name, counted from 1.
fn field(process: i32, number: usize) -> String {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let behind = text.rsplit_once(')').map_or("", |(_, behind)| behind);
    behind.split_whitespace().nth(number - 3).unwrap_or_default().to_owned()
}

fn ignores(process: i32, signal: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(ignored.trim(), 16).unwrap() & 1 << (signal - 1) != 0
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Files of a machine below a folder, which goes with the value.
struct Machine(PathBuf);

impl Machine {
    fn new(name: &str) -> Machine {
        let name = format!("pageleap-restore-{name}-{}", std::process::id());
        let machine = Machine(std::env::temp_dir().join(name));
        for (file, text) in [(THP, "always [madvise] never\n"), (BALANCING, "1\n")] {
            fs::create_dir_all(machine.path(file).parent().unwrap()).unwrap();
            fs::write(machine.path(file), text).unwrap();
        }
        machine
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.join(file.trim_start_matches('/'))
    }

    fn text(&self, file: &str) -> String {
        fs::read_to_string(self.path(file)).unwrap()
    }

    /// How many users the setting has in the ledger.
    fn users(&self, file: &str) -> usize {
        let listed = Ledger::below(&self.0).list().unwrap();
        let entry = listed.borrowed.iter().find(|entry| entry.setting == file);
        entry.map_or(0, |entry| entry.users.len())
    }

    /// Runs `pageleap restore` and returns its exit code and its output.
    fn restore(&self, arguments: &[&str]) -> (i32, String, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_pageleap"))
            .args(["restore", "--sysroot"])
            .arg(&self.0)
            .args(arguments)
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn overlapping_users_that_are_killed_in_both_orders_leave_the_machine_as_it_was() {
    for first_dies_first in [true, false] {
        let machine = Machine::new(&format!("overlap-{first_dies_first}"));
        let first = Borrower::start(&machine.0, &format!("{THP}=never"));
        let second = Borrower::start(&machine.0, &format!("{THP}=never {BALANCING}=0"));
        assert_eq!((machine.users(THP), machine.users(BALANCING)), (2, 1));
        let (mut one, mut other) = if first_dies_first { (first, second) } else { (second, first) };
        one.kill();
        wait_until("a keeper drops the first user", || machine.users(THP) == 1);
        assert_eq!(machine.text(THP), "never\n", "the other user still needs it");
        other.kill();
        wait_until("a keeper puts the settings back", || {
            machine.users(THP) + machine.users(BALANCING) == 0
        });
        assert_eq!(
            (machine.text(THP), machine.text(BALANCING)),
            ("madvise\n".into(), "1\n".into())
        );
    }
}

#[test]
fn users_and_keepers_that_are_killed_in_both_orders_are_settled_by_hand() {
    for user_first in [true, false] {
        let machine = Machine::new(&format!("keepers-{user_first}"));
        let first = Borrower::start(&machine.0, &format!("{THP}=never"));
        let second = Borrower::start(&machine.0, &format!("{THP}=never"));
        first.kill_with_keeper(user_first);
        assert_eq!(machine.restore(&[]).0, 0);
        assert_eq!((machine.users(THP), machine.text(THP)), (1, "never\n".into()));
        second.kill_with_keeper(user_first);
        assert_eq!(machine.text(THP), "never\n", "somebody else has put it back");
        let (code, text, error) = machine.restore(&[]);
        assert_eq!((code, error.as_str()), (0, ""));
        assert!(text.starts_with(&format!("put back {THP}: madvise, which ")), "{text}");
        assert!(text.ends_with("\nnothing is borrowed\n"), "{text}");
        assert_eq!((machine.users(THP), machine.text(THP)), (0, "madvise\n".into()));
    }
}

#[test]
fn one_keeper_that_is_left_settles_for_all() {
    let machine = Machine::new("one-keeper");
    let first = Borrower::start(&machine.0, &format!("{THP}=never"));
    let mut second = Borrower::start(&machine.0, &format!("{BALANCING}=0"));
    first.kill_with_keeper(true);
    second.kill();
    wait_until("its keeper settles for both", || machine.text(THP) == "madvise\n");
    wait_until("and for itself", || machine.text(BALANCING) == "1\n");
}

#[test]
fn a_conflicting_wish_is_refused_until_the_user_has_ended() {
    let machine = Machine::new("conflict");
    let mut first = Borrower::start(&machine.0, &format!("{THP}=never"));
    let mut second = Borrower::spawn(&machine.0, &format!("{BALANCING}=0 {THP}=always"), None);
    let said = second.said();
    let reason = format!("refused: {THP} cannot become always: ");
    assert!(said.starts_with(&reason), "{said}");
    assert!(said.contains(&format!("({}) needs never", first.pid())), "{said}");
    assert_eq!((machine.text(THP), machine.text(BALANCING)), ("never\n".into(), "1\n".into()));
    first.kill();
    let third = Borrower::start(&machine.0, &format!("{THP}=always"));
    assert_eq!(machine.text(THP), "always\n");
    drop(third);
    wait_until("it comes back", || machine.text(THP) == "madvise\n");
}

#[test]
fn a_user_may_execute_another_program_and_does_not_own_its_keeper() {
    let machine = Machine::new("exec");
    let mut user = Borrower::spawn(&machine.0, &format!("{THP}=never"), Some("sleep"));
    assert_eq!(user.said(), "borrowed");
    let comm = format!("/proc/{}/comm", user.pid());
    wait_until("it is sleep now", || fs::read_to_string(&comm).unwrap() == "sleep\n");
    let keeper = user.keeper();
    wait_until("the keeper ignores SIGTERM", || ignores(keeper, libc::SIGTERM));
    assert_ne!(field(keeper, 4), user.pid().to_string(), "the parent");
    assert_ne!(field(keeper, 6), field(user.pid(), 6), "the session");
    assert_eq!(fs::read_link(format!("/proc/{keeper}/cwd")).unwrap(), Path::new("/"));
    for stream in 0..3 {
        let link = fs::read_link(format!("/proc/{keeper}/fd/{stream}")).unwrap();
        assert_eq!(link, Path::new("/dev/null"));
    }
    assert!(fs::symlink_metadata(format!("/proc/{}/fd/{INHERITED}", user.pid())).is_ok());
    assert!(fs::symlink_metadata(format!("/proc/{keeper}/fd/{INHERITED}")).is_err());
    // A service that ends sends this to all of its processes. The keeper stays.
    signal(keeper, libc::SIGTERM);
    assert_eq!((machine.users(THP), machine.text(THP)), (1, "never\n".into()));
    user.kill();
    wait_until("the keeper puts it back", || machine.users(THP) == 0);
    assert_eq!(machine.text(THP), "madvise\n");
}

#[test]
fn restore_shows_who_borrows_and_takes_back_on_demand() {
    let machine = Machine::new("shown");
    assert_eq!(machine.restore(&["--list"]), (0, "nothing is borrowed\n".into(), "".into()));
    let user = Borrower::start(&machine.0, &format!("{THP}=never"));
    for arguments in [&["--list"][..], &[]] {
        let (code, text, _) = machine.restore(arguments);
        assert_eq!(code, 0);
        let lines: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["setting", "borrowed", "before", "now", "process", "for"]);
        assert_eq!(lines[1][..4], [THP, "never", "madvise", "never"]);
        assert!(lines[1].contains(&format!("({})", user.pid()).as_str()), "{text}");
    }
    let json = |arguments: &[&str]| -> Value {
        let (code, text, _) = machine.restore(&[arguments, &["--json"]].concat());
        assert_eq!(code, 0);
        serde_json::from_str(&text).unwrap()
    };
    let all = json(&["--list"]);
    let entry = &all["borrowed"][0];
    assert_eq!((&entry["setting"], &entry["value"]), (&THP.into(), &"never".into()));
    assert_eq!(entry["users"][0]["pid"], user.pid());
    assert_eq!(entry["users"][0]["life"], "lives");
    let all = json(&["--force"]);
    let settled = &all["settled"][0];
    assert_eq!((&settled["outcome"], &settled["to"]), (&"put-back".into(), &"madvise".into()));
    assert_eq!(settled["users"][0]["pid"], user.pid());
    assert_eq!(all["borrowed"], Value::Array(Vec::new()));
    assert_eq!(machine.text(THP), "madvise\n");
}

#[test]
fn restore_fails_when_nobody_can_tell_whether_the_user_lives() {
    const TEST: &str = "restore_fails_when_nobody_can_tell_whether_the_user_lives";
    let machine = Machine::new("unknown");
    let _user = Borrower::start(&machine.0, &format!("{THP}=never"));
    // A new pid namespace, from which the user is not seen.
    let restore = |arguments: &[&str]| {
        Command::new("unshare")
            .args(["--pid", "--fork", "--mount-proc", env!("CARGO_BIN_EXE_pageleap"), "restore"])
            .args(arguments)
            .arg("--sysroot")
            .arg(&machine.0)
            .output()
            .ok()
            .filter(|output| !output.stderr.starts_with(b"unshare"))
    };
    let Some(output) = restore(&[]) else {
        return skip(TEST, &"no new pid namespace can be made here");
    };
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains(THP) && error.contains("type: pageleap restore --force"), "{error}");
    assert_eq!(machine.text(THP), "never\n");
    // What is shown is no failure, and what has the value before needs nobody.
    assert_eq!(restore(&["--list"]).unwrap().status.code(), Some(0));
    fs::write(machine.path(THP), "madvise\n").unwrap();
    assert_eq!(restore(&[]).unwrap().status.code(), Some(0));
    fs::write(machine.path(THP), "never\n").unwrap();
    assert_eq!(restore(&["--force"]).unwrap().status.code(), Some(0));
    assert_eq!(machine.text(THP), "madvise\n");
}

/// The inode of the first pid namespace, which sees all others.
const FIRST_NAMESPACE: &str = "pid:[4026531836]";

#[test]
fn processes_that_may_not_be_looked_into_hide_no_end_of_a_container() {
    const TEST: &str = "processes_that_may_not_be_looked_into_hide_no_end_of_a_container";
    let own = fs::read_link("/proc/self/ns/pid").unwrap();
    if !is_root() || own != Path::new(FIRST_NAMESPACE) {
        return skip(TEST, &"only root in the first pid namespace sees containers");
    }
    let machine = Machine::new("hidden");
    Borrower::start(&machine.0, &format!("{THP}=never")).kill_with_keeper(true);
    // As if it had run in a container that has ended.
    let note = fs::read_dir(machine.0.join("run/pageleap/settings")).unwrap().flatten();
    let mut note = note.map(|entry| entry.path()).filter(|p| p.extension().is_some());
    let note = note.next().unwrap();
    let text = fs::read_to_string(&note).unwrap();
    fs::write(&note, text.replace("\"pid_namespace\":4026531836", "\"pid_namespace\":17")).unwrap();
    // Without this capability, namespaces of processes that have more cannot be read.
    let output = Command::new("setpriv")
        .args(["--bounding-set=-sys_ptrace", env!("CARGO_BIN_EXE_pageleap"), "restore"])
        .arg("--sysroot")
        .arg(&machine.0)
        .output();
    let Ok(output) = output else { return skip(TEST, &"setpriv is missing") };
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(machine.text(THP), "madvise\n");
}

#[test]
fn restore_fails_when_something_is_not_as_it_was() {
    let machine = Machine::new("fails");
    let user = Borrower::start(&machine.0, &format!("{THP}=never"));
    user.kill_with_keeper(true);
    let (here, away) = (machine.0.join("sys"), machine.0.join("away"));
    fs::rename(&here, &away).unwrap();
    let (code, text, error) = machine.restore(&[]);
    assert_eq!(code, 1);
    assert!(text.contains("could not be put back") && text.contains(", ended"), "{text}");
    assert!(error.contains("settings that are not as they were: 1"), "{error}");
    fs::rename(&away, &here).unwrap();
    assert_eq!(machine.restore(&[]).0, 0);
    assert_eq!(machine.text(THP), "madvise\n");
    fs::write(machine.0.join("run/pageleap/settings/sys-x.value"), "{").unwrap();
    let (code, text, _) = machine.restore(&[]);
    assert!(code == 1 && text.contains("makes no sense"), "{text}");
    let (code, text, _) = machine.restore(&["--force"]);
    assert!(code == 0 && text.starts_with("removed the note "), "{text}");
    let (code, text, error) = machine.restore(&["--list", "--force"]);
    assert_eq!((code, text.as_str()), (2, ""));
    assert!(error.contains("cannot be used with"), "{error}");
}

/// Two settings of this machine that change nothing which anybody could notice in a second: how the
/// kernel finds huge pages for those who ask for none, and how often it sums up counters.
const DEFRAG: &str = "/sys/kernel/mm/transparent_hugepage/defrag";
const INTERVAL: &str = "/proc/sys/vm/stat_interval";

/// Both settings before a test. They have these values again after it, also if it fails.
struct Before([(&'static str, String); 2]);

impl Before {
    fn read(file: &str) -> String {
        let text = fs::read_to_string(file).unwrap();
        let chosen = text.split_whitespace().find_map(|w| w.strip_prefix('[')?.strip_suffix(']'));
        chosen.unwrap_or(text.trim()).to_owned()
    }

    fn are_again(&self) -> bool {
        self.0.iter().all(|(file, value)| Before::read(file) == *value)
    }
}

impl Drop for Before {
    fn drop(&mut self) {
        for (file, value) in self.0.iter().filter(|(file, value)| Before::read(file) != *value) {
            let _ = fs::write(file, value);
        }
    }
}

#[test]
fn settings_of_this_machine_come_back_after_both_ends() {
    const TEST: &str = "settings_of_this_machine_come_back_after_both_ends";
    if !is_root() {
        return skip(TEST, &"settings of the machine need root");
    }
    for file in [DEFRAG, INTERVAL] {
        if let Err(error) = fs::OpenOptions::new().write(true).open(file) {
            return skip(TEST, &format!("{file}: {error}"));
        }
    }
    let before = Before([DEFRAG, INTERVAL].map(|file| (file, Before::read(file))));
    let defrag = if before.0[0].1 == "defer+madvise" { "madvise" } else { "defer+madvise" };
    let interval = if before.0[1].1 == "2" { "3" } else { "2" };
    let wishes = format!("{DEFRAG}={defrag} {INTERVAL}={interval}");
    let root = Path::new("/");
    // By the keepers.
    let [mut first, mut second] = [0; 2].map(|_| Borrower::start(root, &wishes));
    assert_eq!([DEFRAG, INTERVAL].map(Before::read), [defrag, interval]);
    let keepers = [first.keeper(), second.keeper()];
    first.kill();
    second.kill();
    wait_until("the keepers put them back", || before.are_again());
    // One that is still there would settle for the next user, too.
    for keeper in keepers {
        wait_until("the keeper ends", || matches!(state(keeper).as_str(), "" | "Z"));
    }
    // By the next command, whatever it is.
    Borrower::start(root, &wishes).kill_with_keeper(true);
    assert_eq!([DEFRAG, INTERVAL].map(Before::read), [defrag, interval]);
    let next = Command::new(env!("CARGO_BIN_EXE_pageleap")).arg("topology").output().unwrap();
    let told = String::from_utf8(next.stderr).unwrap();
    assert!(told.contains(&format!("put back {DEFRAG}: {}", before.0[0].1)), "{told}");
    assert!(before.are_again());
    // The kernel refuses the second value; the first one is undone.
    let mut refused = Borrower::spawn(root, &format!("{DEFRAG}={defrag} {INTERVAL}=no"), None);
    let said = refused.said();
    assert!(said.starts_with(&format!("refused: write {INTERVAL}: Invalid argument")), "{said}");
    assert!(before.are_again());
    assert!(Ledger::of_user().list().unwrap().borrowed.iter().all(|e| e.setting != DEFRAG));
}
