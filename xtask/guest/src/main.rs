//! The first process (`/init`) of a guest of `cargo xtask lab`. It carries out `/lab/plan`, reports
//! to the host over the second serial port, and ends the machine.
//!
//! The host decides which tests have passed. This program only reports what happened, line by line:
//!
//! ```text
//! @hello NONCE RELEASE NODES     the file systems are mounted
//! @setup PATH: ERROR             a setting of the plan failed
//! @begin I                       test I of the plan starts, in a process of its own
//! @skip I NAME: REASON           a line that the test wrote to the log of skips
//! @out I TEXT                    one of the last lines of output of a test that failed
//! @end I ENDING PASSED IGNORED KILLED MS
//!                                the test has ended: how, how many tests its harness counted as
//!                                passed and as ignored, OOM kills meanwhile, milliseconds
//! =TEXT                          a line of output of a command
//! @exit CODE                     the exit code of the command
//! @beat                          sent every two seconds, so that silence means a hang
//! @bye NONCE                     everything is done
//! ```

mod exit;
#[path = "../../../crates/pageleap/tests/common/filter.rs"]
mod filter;
mod persona;
mod plan;
mod test;

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use plan::{Mode, Plan, Who};

/// The plan in the initial file system.
const PLAN: &str = "/lab/plan";

/// The serial port that the host reads.
const RESULTS: &str = "/dev/ttyS1";

/// Time between two `@beat` lines.
const BEAT: Duration = Duration::from_secs(2);

/// The connection to the host. Each line is sent whole, whichever thread sends it.
pub struct Host(Mutex<File>);

impl Host {
    /// Opens the serial port in raw mode, so that it passes all bytes on unchanged.
    fn open() -> std::io::Result<Host> {
        let port = OpenOptions::new().write(true).open(RESULTS)?;
        // SAFETY: both calls work on one struct of this function, for which zeros are a valid
        // value. The descriptor is open.
        unsafe {
            let mut settings: libc::termios = std::mem::zeroed();
            if libc::tcgetattr(port.as_raw_fd(), &mut settings) == 0 {
                libc::cfmakeraw(&mut settings);
                libc::tcsetattr(port.as_raw_fd(), libc::TCSANOW, &settings);
            }
        }
        Ok(Host(Mutex::new(port)))
    }

    /// Sends one line.
    pub fn say(&self, line: &str) {
        let mut port = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let text: String =
            line.chars().map(|c| if c == '\n' || c == '\r' { ' ' } else { c }).collect();
        // An error cannot be reported without the port. The host notices that the line is missing.
        let _ = port.write_all(format!("{text}\n").as_bytes());
    }
}

fn main() {
    if persona::is_wanted() {
        persona::play();
    }
    if std::process::id() != 1 || !Path::new(PLAN).exists() {
        eprintln!("lab-guest only works as the first process of a guest of `cargo xtask lab`");
        std::process::exit(2);
    }
    let code = match run() {
        Ok(()) => exit::DONE,
        Err(error) => {
            println!("lab-guest: {error}");
            exit::BROKEN
        }
    };
    exit::machine(code);
}

fn run() -> Result<(), String> {
    let problems = mount();
    // The connection comes first, so that every later problem can be reported.
    let host: &'static Host =
        Box::leak(Box::new(Host::open().map_err(|error| format!("{RESULTS}: {error}"))?));
    let plan = Plan::parse(&fs::read_to_string(PLAN).map_err(|error| format!("{PLAN}: {error}"))?)?;
    host.say(&format!("@hello {} {} {}", plan.nonce, release(), online_nodes()));
    problems.iter().for_each(|problem| host.say(&format!("@setup {problem}")));
    apply_settings(host, &plan);
    std::thread::spawn(|| {
        loop {
            host.say("@beat");
            std::thread::sleep(BEAT);
        }
    });
    match plan.mode {
        Mode::Tests => {
            install_busybox()?;
            let tests = plan.tests.iter().enumerate();
            tests.for_each(|(number, test)| test::run(host, &plan, number, test));
        }
        Mode::Command => command(host, &plan)?,
        Mode::Shell => shell(&plan)?,
        Mode::BrokenPanic => {
            host.say("@begin 0");
            fs::write("/proc/sysrq-trigger", "c").map_err(|error| error.to_string())?;
        }
        Mode::BrokenHang => {
            host.say("@begin 0");
            // The lock on the port also stops the `@beat` lines.
            let _silence = host.0.lock();
            exit::stop();
        }
    }
    // The taint flags show a complaint of the kernel even if its line on the console was lost.
    let tainted = fs::read_to_string("/proc/sys/kernel/tainted").unwrap_or_default();
    if tainted.trim() != "0" {
        host.say(&format!("@setup the kernel is tainted: {}", tainted.trim()));
    }
    host.say(&format!("@bye {}", plan.nonce));
    Ok(())
}

/// Writes the files and makes the links of the plan. Reports every setting that failed.
fn apply_settings(host: &Host, plan: &Plan) {
    for (path, value) in &plan.writes {
        if let Err(error) = fs::write(path, value) {
            host.say(&format!("@setup {path}: {error}"));
        } else if path.ends_with("nr_hugepages") {
            let now = fs::read_to_string(path).unwrap_or_default();
            if now.trim() != value {
                host.say(&format!("@setup {path}: {} instead of {value}", now.trim()));
            }
        }
    }
    for (link, target) in &plan.links {
        let directory = Path::new(link).parent().map_or(Ok(()), fs::create_dir_all);
        if let Err(error) = directory.and_then(|()| std::os::unix::fs::symlink(target, link)) {
            host.say(&format!("@setup {link}: {error}"));
        }
    }
}

/// Mounts the file systems that the tests need. Returns a line for each problem.
fn mount() -> Vec<String> {
    const MOUNTS: [(&str, &str, &str); 5] = [
        ("proc", "/proc", ""),
        ("sysfs", "/sys", ""),
        ("devtmpfs", "/dev", ""),
        ("tmpfs", "/tmp", "mode=1777"),
        ("cgroup2", "/sys/fs/cgroup", ""),
    ];
    let mut problems = Vec::new();
    for (kind, target, options) in MOUNTS {
        let _ = fs::create_dir_all(target);
        let text = |text: &str| std::ffi::CString::new(text).expect("no NUL in a constant");
        let (kind_c, target_c, options_c) = (text(kind), text(target), text(options));
        // SAFETY: all pointers are C strings that live until the call returns.
        let result = unsafe {
            libc::mount(
                kind_c.as_ptr(),
                target_c.as_ptr(),
                kind_c.as_ptr(),
                0,
                options_c.as_ptr().cast::<libc::c_void>(),
            )
        };
        let error = std::io::Error::last_os_error();
        // EBUSY: the kernel has mounted /dev itself.
        if result != 0 && error.raw_os_error() != Some(libc::EBUSY) {
            problems.push(format!("mount {kind} on {target}: {error}"));
        }
    }
    // A group gives its children only the controllers that are listed here.
    if let Err(error) = fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+cpuset +memory") {
        problems.push(format!("cgroup.subtree_control: {error}"));
    }
    problems
}

fn release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

/// The online nodes in the kernel's list format (`0-1`).
fn online_nodes() -> String {
    fs::read_to_string("/sys/devices/system/node/online").unwrap_or_default().trim().to_owned()
}

/// Runs the command of the plan and passes its output on.
fn command(host: &Host, plan: &Plan) -> Result<(), String> {
    install_busybox()?;
    let (program, arguments) = plan.arguments.split_first().ok_or("the plan has no command")?;
    let (reader, writer) = std::io::pipe().map_err(|error| error.to_string())?;
    let copy = writer.try_clone().map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    command.args(arguments).envs(plan.variables.iter().cloned()).current_dir("/tmp");
    let who = plan.who;
    // SAFETY: between fork and exec the closure makes only system calls.
    unsafe { command.pre_exec(move || drop_privileges(who)) };
    let started = command.stdin(Stdio::null()).stdout(copy).stderr(writer).spawn();
    drop(command); // closes the write ends of the pipe in this process
    let mut child = match started {
        Ok(child) => child,
        Err(error) => {
            host.say(&format!("={program}: {error}"));
            host.say("@exit 127");
            return Ok(());
        }
    };
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
        host.say(&format!("={}", String::from_utf8_lossy(&line).trim_end_matches('\n')));
        line.clear();
    }
    let status = child.wait().map_err(|error| error.to_string())?;
    host.say(&format!("@exit {}", test::shell_code(status)));
    Ok(())
}

/// Drops the privileges that `who` does not have. Runs between fork and exec.
fn drop_privileges(who: Who) -> std::io::Result<()> {
    /// The user `nobody`.
    const NOBODY: libc::uid_t = 65534;
    /// System calls of this library that Docker's default profile refuses. Some it allows with
    /// CAP_SYS_NICE, others to no process.
    const REFUSED: [libc::c_long; 5] = [
        libc::SYS_get_mempolicy,
        libc::SYS_set_mempolicy,
        libc::SYS_mbind,
        libc::SYS_move_pages,
        libc::SYS_userfaultfd,
    ];
    if who == Who::Root {
        return Ok(());
    }
    // SAFETY: the calls take numbers only. An empty list of groups is not read.
    unsafe {
        filter::check(libc::setgroups(0, std::ptr::null()).into())?;
        filter::check(libc::setresgid(NOBODY, NOBODY, NOBODY).into())?;
        filter::check(libc::setresuid(NOBODY, NOBODY, NOBODY).into())?;
    }
    match who {
        Who::Container => filter::install_filter(filter::Action::Errno(libc::EPERM), &REFUSED),
        Who::Root | Who::Nobody => Ok(()),
    }
}

/// Runs an interactive shell on the console. The shell has a session of its own, so that the
/// console can be its terminal.
fn shell(plan: &Plan) -> Result<(), String> {
    /// The serial port that is connected to the terminal of the host.
    const CONSOLE: &str = "/dev/ttyS0";
    install_busybox()?;
    let terminal = || {
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(CONSOLE)
            .map_err(|e| format!("{CONSOLE}: {e}"))
    };
    let mut command = Command::new("/bin/busybox");
    command
        .args(["setsid", "-c", "sh", "-l"])
        .envs(plan.variables.iter().cloned())
        .current_dir("/tmp");
    command.stdin(terminal()?).stdout(terminal()?).stderr(terminal()?);
    command.status().map_err(|error| format!("/bin/busybox: {error}"))?;
    Ok(())
}

/// Installs the usual commands below `/bin`, if the guest has a busybox.
fn install_busybox() -> Result<(), String> {
    if !Path::new("/bin/busybox").exists() {
        return Ok(());
    }
    let status = Command::new("/bin/busybox").args(["--install", "-s", "/bin"]).status();
    status.map(drop).map_err(|error| format!("/bin/busybox: {error}"))
}
