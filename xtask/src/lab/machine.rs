//! One guest: its files, its boot, and its results.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};

use super::build;
use super::initramfs::{Archive, Files};
use super::kernels::Kernel;
use super::topology::Topology;
use super::transcript::{Event, Expected, Judged, TestId, Transcript};
use crate::built::Programs;
use crate::process::{self, Limits};

/// The QEMU of the only architecture that the lab knows.
pub const QEMU: &str = "qemu-system-x86_64";

/// The directory of the programs in a guest.
pub const PROGRAMS: &str = "/lab/bin";

/// Time without a line after which a guest counts as hung. A guest sends a line every two seconds.
/// Software emulation on a busy machine is slow, but not by a factor of 60.
const SILENCE: Duration = Duration::from_secs(120);

/// Settings that are the same for all guests of a run.
#[derive(Debug)]
pub struct Lab {
    /// The directory of the guests' files.
    pub folder: PathBuf,
    /// The program that is the first process of a guest.
    pub guest: PathBuf,
    /// The path of a static busybox, if one is installed.
    pub busybox: Option<PathBuf>,
    /// QEMU's accelerator.
    pub accel: String,
}

/// What one guest has to do.
#[derive(Debug)]
pub struct Job<'a> {
    /// The machine.
    pub topology: &'a Topology,
    /// The kernel.
    pub kernel: &'a Kernel,
    /// Name of the guest, and of its directory.
    pub name: String,
    /// Programs that are copied to `/lab/bin`.
    pub programs: Programs,
    /// Further files of the guest, each at its place.
    pub files: Files,
    /// Lines of the plan without the nonce. `xtask/guest/src/plan.rs` parses them.
    pub plan: Vec<String>,
    /// The tests that the plan names, in order.
    pub tests: Vec<TestId>,
    /// Time after which the guest is killed.
    pub limit: Duration,
    /// Time without a line after which the guest is killed.
    pub silence: Duration,
}

impl<'a> Job<'a> {
    /// A job without tests and without a command.
    pub fn new(topology: &'a Topology, kernel: &'a Kernel) -> Job<'a> {
        Job {
            topology,
            kernel,
            name: format!("{}-{}", topology.name, kernel.series),
            programs: Programs::new(),
            files: Files::new(),
            plan: Vec::new(),
            tests: Vec::new(),
            limit: Duration::from_secs(90 * 60),
            silence: SILENCE,
        }
    }
}

/// The results of a guest.
#[derive(Debug)]
pub struct Done {
    /// The verdict on the guest and its tests.
    pub judged: Judged,
    /// The exit code of the command, if the plan had one.
    pub exit: Option<i32>,
    /// Time on the host. It says nothing about the speed of the tested code.
    pub elapsed: Duration,
    /// The directory of the guest's files.
    pub folder: PathBuf,
}

/// A guest's directory, locked against other runs of the lab.
struct Own {
    folder: PathBuf,
    _lock: File,
}

impl Lab {
    /// Boots the guest, waits for its end, and judges it. `on_event` gets each event as it happens.
    pub fn run(
        &self,
        job: &Job<'_>,
        mut on_event: impl FnMut(&Transcript, &Expected, Event),
    ) -> Result<Done> {
        let begun = Instant::now();
        let (Own { folder, _lock }, expected) = self.prepare(job)?;
        let console = folder.join("console.log");
        let mut command = self.qemu(job, &folder);
        command.arg("-serial").arg(format!("file:{}", console.display()));
        command.args(["-chardev", "stdio,id=results,signal=off", "-serial", "chardev:results"]);
        command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=0x04"]);

        let mut transcript = Transcript::default();
        let mut log = BufWriter::new(File::create(folder.join("results.log"))?);
        let limits = Limits { total: job.limit, silence: job.silence };
        let ending = process::run_watched(command, limits, |line| {
            // The log is for readers only. A full disk must not change the results.
            let _ = writeln!(log, "{line}");
            let _ = log.flush();
            if let Some(event) = transcript.line(line) {
                on_event(&transcript, &expected, event);
            }
        })?;
        let why = match ending {
            process::Ending::Silent => {
                format!("the guest hung: silent for {} s", job.silence.as_secs())
            }
            _ => ending.reason(job.limit),
        };
        let text =
            fs::read(&console).with_context(|| format!("cannot read {}", console.display()))?;
        let judged = transcript.judge(&expected, ending, &why, &String::from_utf8_lossy(&text));
        Ok(Done { judged, exit: transcript.exit, elapsed: begun.elapsed(), folder })
    }

    /// Boots the guest with this terminal as its console.
    pub fn interactive(&self, job: &Job<'_>) -> Result<ExitStatus> {
        let (Own { folder, _lock }, _) = self.prepare(job)?;
        let mut command = self.qemu(job, &folder);
        command.args(["-serial", "mon:stdio", "-serial", "null"]);
        command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=0x04"]);
        command.status().with_context(|| format!("cannot start {QEMU}"))
    }

    /// Makes the guest's directory and writes its initial file system.
    fn prepare(&self, job: &Job<'_>) -> Result<(Own, Expected)> {
        let folder = self.folder.join(&job.name);
        let path = self.folder.join(format!("{}.lock", job.name));
        let lock =
            File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        // SAFETY: the call takes no pointers, and the descriptor is open.
        if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            bail!("another lab runs the guest {} in this target directory: wait for it", job.name);
        }
        if folder.exists() {
            fs::remove_dir_all(&folder)
                .with_context(|| format!("cannot clear {}", folder.display()))?;
        }
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let nonce = nonce();
        let mut plan = format!("nonce {nonce}\n");
        for (path, value) in job.topology.guest_writes() {
            plan += &format!("write {path}={value}\n");
        }
        for line in &job.plan {
            ensure!(!line.contains('\n'), "a line of the plan contains a line end: {line:?}");
            plan += &format!("{line}\n");
        }
        let path = folder.join("initramfs");
        let file =
            File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        let mut archive = Archive::new(BufWriter::new(file));
        let programs = || job.programs.values().map(PathBuf::as_path).chain([&*self.guest]);
        let libraries = build::shared_libraries(programs())?;
        let fixed = ["dev", "proc", "sys", "tmp", "run", "bin", "lab", "lab/bin", "etc"];
        let mut directories: BTreeSet<&Path> = fixed.iter().map(Path::new).collect();
        for place in libraries.iter().chain(job.files.keys()) {
            let above = place.ancestors().skip(1).filter_map(|path| path.strip_prefix("/").ok());
            directories.extend(above.filter(|path| !path.as_os_str().is_empty()));
        }
        // Sorted, so that each directory comes after the one that it lies in.
        for directory in directories {
            archive.directory(&directory.to_string_lossy())?;
        }
        // The kernel opens this device before any file system is mounted.
        archive.device("dev/console", 5, 1)?;
        archive.file("init", &build::stripped(&self.guest, &folder)?)?;
        archive.file("lab/plan", plan.as_bytes())?;
        for library in &libraries {
            let place = library.strip_prefix("/").context("ldd names absolute paths")?;
            archive.file(&place.to_string_lossy(), &read(library)?)?;
        }
        for (place, contents) in &job.files {
            let place = place.strip_prefix("/").context("places are absolute paths")?;
            match contents {
                Some(contents) => archive.file(&place.to_string_lossy(), contents)?,
                None => archive.directory(&place.to_string_lossy())?,
            }
        }
        if let Some(busybox) = &self.busybox {
            archive.file("bin/busybox", &read(busybox)?)?;
        }
        for (name, program) in &job.programs {
            archive.file(&format!("lab/bin/{name}"), &build::stripped(program, &folder)?)?;
        }
        archive.finish()?;
        let expected = Expected {
            nonce,
            release: job.kernel.release.clone(),
            nodes: job.topology.online(),
            tests: job.tests.clone(),
        };
        Ok((Own { folder, _lock: lock }, expected))
    }

    fn qemu(&self, job: &Job<'_>, folder: &Path) -> Command {
        let mut command = Command::new(QEMU);
        command.args(["-accel", &self.accel, "-cpu", "max", "-nodefaults", "-no-user-config"]);
        command.args(["-display", "none", "-no-reboot"]);
        command.args(job.topology.qemu_options());
        command.arg("-kernel").arg(&job.kernel.image).arg("-initrd").arg(folder.join("initramfs"));
        let options = job.topology.kernel_options();
        // Without NUMA balancing, only pageleap moves pages, unless a test turns it on. Without
        // KASLR, the kernel's image never lies where it would prevent huge pages of 1 GB. The log
        // level lets warnings (level 4) reach the console, which `quiet` alone would suppress. At
        // boot the kernel counts interrupts of the timer and panics if too few come, which happens
        // on a busy host: `no_timer_check` leaves that out.
        let append = format!(
            "console=ttyS0 quiet loglevel=5 panic=-1 oops=panic nokaslr no_timer_check \
             numa_balancing=disable{options}"
        );
        command.args(["-append", &append]);
        command
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// A text that no other guest has.
fn nonce() -> String {
    static GUESTS: AtomicU32 = AtomicU32::new(0);
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // Relaxed: only uniqueness matters, which a single atomic addition gives.
    let guest = GUESTS.fetch_add(1, Ordering::Relaxed);
    format!("{:x}-{:x}-{guest}", time.as_nanos(), std::process::id())
}
