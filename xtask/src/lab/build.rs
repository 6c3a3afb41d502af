//! What runs in a guest: the test binaries, the first process, and the `pageleap` command.
//!
//! They are the programs that the host's own tests have built: nothing is compiled for guests
//! alone. A guest gets them without debug information, together with the shared libraries that
//! they load on the host.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::initramfs::Files;
use super::transcript::TestId;
use crate::built::{self, Executable, Kind, Programs};
use crate::capi;
use crate::commands::Workspace;
use crate::soak;

/// The test binaries of the library whose results depend on the kernel or the machine. `topology`
/// reads recorded machines only. A supervisor looks at each call of `memory_calls`, which takes too
/// long where CPUs are emulated, and so does the tracer of `traced`. `swap` needs a disk for its
/// swap.
pub const TEST_BINARIES: [&str; 40] = [
    "attributes",
    "auto",
    "bad_input",
    "cgroups",
    "changing",
    "context",
    "contract",
    "descriptors",
    "fault_injection",
    "follow_latency",
    "heap",
    "joining",
    "kernel",
    "kernel_cases",
    "kernel_folios",
    "kernel_ltp",
    "kernel_manners",
    "leap",
    "limits",
    "memory",
    "memory_kinds",
    "memory_programs",
    "model_and_kernel",
    "nodes",
    "nodes_adverse",
    "pace",
    "page_tables",
    "pins",
    "placement",
    "process",
    "several",
    "signal_threads",
    "signals",
    "soak",
    "stress",
    "system_calls",
    "table_moves",
    "use_cases",
    "views",
    "windows",
];

/// The test binaries of the command. They start the command from the path where cargo has put it.
const COMMAND_TEST_BINARIES: [&str; 10] = [
    "bench_nodes",
    "demo",
    "doctor",
    "kernel_memory",
    "measured",
    "move",
    "namespaces",
    REAL_PROGRAMS,
    "run",
    "run_nodes",
];

/// The test binary that moves programs of the host.
const REAL_PROGRAMS: &str = "real";

/// Its tests. They take too long for the step `nodes`: the step `lab` runs them.
pub const REAL_TESTS: [&str; 4] = [
    ORDINARY_MEMORY_TEST,
    "memcached_moves_while_it_serves",
    "postgresql_moves_while_it_serves",
    "redis_moves_while_it_serves",
];

/// The programs that it uses. One that is not installed skips its test.
const INSTALLED: [&str; 6] =
    ["memcached", "migratepages", "pgbench", "postgres", "redis-benchmark", "redis-server"];

/// The test binaries that compare with what another program says or does, and the programs.
const COMPARES: [(&str, &str); 3] =
    [("process", "numastat"), ("run", "numactl"), ("run_nodes", "numactl")];

/// A program in C++ of this workspace, by its name in a guest, and the test that starts it.
const ORDINARY_MEMORY: &str = "ordinary_memory";
const ORDINARY_MEMORY_TEST: &str = "ordinary_memory_leaps_while_threads_use_it";

/// Where Debian 12 has the programs of PostgreSQL, and what they read.
const POSTGRESQL: [&str; 2] = ["/usr/lib/postgresql/15/bin", "/usr/share/postgresql/15"];
/// The place of a new database in a guest.
const DATABASE: &str = "/lab/database";
/// The user and group `nobody`, whose database it is.
const NOBODY: u32 = 65_534;

/// The test binaries, and the command that some of them start.
#[derive(Debug)]
pub struct Tests {
    /// The test binaries, by name.
    pub binaries: Programs,
    /// The `pageleap` command, at the path where its tests expect it.
    pub command: PathBuf,
    /// The program [`ORDINARY_MEMORY`], once it is built.
    ordinary_memory: Option<PathBuf>,
}

impl Tests {
    /// Builds [`ORDINARY_MEMORY`] if these tests start it. Without a compiler the test is skipped.
    pub fn add_ordinary_memory<'a>(
        &mut self,
        workspace: &Workspace,
        mut tests: impl Iterator<Item = &'a TestId>,
    ) -> Result<()> {
        if tests.any(|test| test.name == ORDINARY_MEMORY_TEST) {
            match capi::for_the_lab(workspace)? {
                Ok(program) => self.ordinary_memory = Some(program),
                Err(reason) => println!("lab: no {ORDINARY_MEMORY} in guests: {reason}"),
            }
        }
        Ok(())
    }

    /// The other programs that the tests of this binary use.
    pub fn others(&self, binary: &str) -> Programs {
        let compared = COMPARES.iter().filter(|(with, _)| *with == binary).map(|(_, name)| name);
        let names = INSTALLED.iter().filter(|_| binary == REAL_PROGRAMS).chain(compared);
        let place = |name: &str| {
            // Debian's /usr/bin/pgbench is a script that starts this one.
            let folders = [POSTGRESQL[0], "/usr/bin", "/usr/sbin", "/bin", "/usr/local/bin"];
            folders.iter().map(|folder| Path::new(folder).join(name)).find(|path| path.is_file())
        };
        let installed = names.filter_map(|name| Some(((*name).to_owned(), place(name)?)));
        let built = self.ordinary_memory.iter().filter(|_| binary == REAL_PROGRAMS);
        installed.chain(built.map(|path| (ORDINARY_MEMORY.to_owned(), path.clone()))).collect()
    }

    /// The files that the tests of this binary use, with their places in the guest: a new database,
    /// and what PostgreSQL reads. `scratch` is a name that nobody else uses meanwhile. Root makes
    /// the database, because its user is another one.
    pub fn files(binary: &str, scratch: &str) -> Result<Files> {
        let [programs, shared] = POSTGRESQL.map(Path::new);
        let initdb = programs.join("initdb");
        let mut files = Files::new();
        // SAFETY: the call takes no arguments.
        if binary != REAL_PROGRAMS || !initdb.is_file() || unsafe { libc::geteuid() } != 0 {
            return Ok(files);
        }
        // Another user has to reach it.
        let home = std::env::temp_dir().join(scratch);
        fs::create_dir(&home).with_context(|| format!("cannot make {}", home.display()))?;
        std::os::unix::fs::chown(&home, Some(NOBODY), Some(NOBODY))?;
        let made = Command::new(&initdb)
            .args(["--username=nobody", "--auth=trust", "--no-sync", "--locale=C", "-D", "data"])
            .env("TZ", "GMT")
            .current_dir(&home)
            .uid(NOBODY)
            .gid(NOBODY)
            .output();
        let added = add_files(&mut files, &home.join("data"), Path::new(DATABASE));
        fs::remove_dir_all(&home).with_context(|| format!("cannot remove {}", home.display()))?;
        let output = made.with_context(|| format!("cannot start {}", initdb.display()))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{}: {said}", initdb.display());
        added?;
        add_files(&mut files, shared, shared)?;
        // PostgreSQL looks for it beside the folder of its program.
        files.insert("/lab/lib".into(), None);
        Ok(files)
    }

    /// Whether the tests of this binary start the command.
    pub fn starts_command(binary: &str) -> bool {
        COMMAND_TEST_BINARIES.contains(&binary)
    }
}

/// Builds the test binaries.
pub fn tests(workspace: &Workspace) -> Result<Tests> {
    // All of the workspace, as its own tests are built: another choice of packages would be another
    // choice of features, and all would be compiled again.
    let built = build(workspace, &["test", "--workspace", "--no-run"])?;
    let mut binaries = Programs::new();
    for name in TEST_BINARIES.iter().chain(&COMMAND_TEST_BINARIES) {
        let path = built::one(&built, Kind::IntegrationTest, name)?;
        binaries.insert((*name).to_owned(), path);
    }
    let command = built::one(&built, Kind::Program, "pageleap")?;
    Ok(Tests { binaries, command, ordinary_memory: None })
}

/// Builds the soak test.
pub fn soak(workspace: &Workspace) -> Result<PathBuf> {
    let built = build(workspace, &["test", "--workspace", "--no-run", "--test", soak::TEST])?;
    built::one(&built, Kind::IntegrationTest, soak::TEST)
}

/// Builds the first process of the guests.
pub fn guest(workspace: &Workspace) -> Result<PathBuf> {
    let built = build(workspace, &["build", "-p", "lab-guest"])?;
    built::one(&built, Kind::Program, "lab-guest")
}

/// Builds the `pageleap` command.
pub fn pageleap(workspace: &Workspace) -> Result<PathBuf> {
    let built = build(workspace, &["build", "--release", "-p", "pageleap-cli"])?;
    built::one(&built, Kind::Program, "pageleap")
}

fn build(workspace: &Workspace, arguments: &[&str]) -> Result<Vec<Executable>> {
    ensure!(
        cfg!(target_arch = "x86_64"),
        "the lab boots x86-64 kernels, so it needs an x86-64 machine"
    );
    built::executables(workspace.cargo(arguments))
}

/// Adds a folder of this machine with all that is in it. Links count as what they lead to.
fn add_files(files: &mut Files, source: &Path, place: &Path) -> Result<()> {
    let unreadable = || format!("cannot read {}", source.display());
    if !source.is_dir() {
        files.insert(place.to_owned(), Some(fs::read(source).with_context(unreadable)?));
        return Ok(());
    }
    files.insert(place.to_owned(), None);
    for entry in fs::read_dir(source).with_context(unreadable)? {
        let name = entry.with_context(unreadable)?.file_name();
        add_files(files, &source.join(&name), &place.join(&name))?;
    }
    Ok(())
}

/// The contents of a program, without debug information: guests keep it in their memory.
pub fn stripped(program: &Path, scratch: &Path) -> Result<Vec<u8>> {
    let name = program.file_name().context("a program has a name")?;
    let small = scratch.join(format!("{}-stripped", name.display()));
    let mut command = Command::new("strip");
    command.args(["--strip-debug", "-o"]).arg(&small).arg(program);
    let output = command.output().context("cannot start `strip`; install binutils")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "strip {}: {said}", program.display());
    let bytes = fs::read(&small).with_context(|| format!("cannot read {}", small.display()))?;
    fs::remove_file(&small).with_context(|| format!("cannot remove {}", small.display()))?;
    Ok(bytes)
}

/// The shared libraries that programs load, the dynamic loader among them.
pub fn shared_libraries<'a>(programs: impl Iterator<Item = &'a Path>) -> Result<BTreeSet<PathBuf>> {
    let mut libraries = BTreeSet::new();
    for program in programs {
        let output =
            Command::new("ldd").arg(program).output().context("cannot start `ldd`, of glibc")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // A program without shared libraries is an error for ldd, and all right for a guest.
        let found = libraries_of(&text);
        libraries.extend(found.with_context(|| format!("ldd {}", program.display()))?);
    }
    Ok(libraries)
}

/// Reads `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)`, and the loader's line, which has
/// its path only. What the kernel itself provides has no path.
fn libraries_of(ldd: &str) -> Result<Vec<PathBuf>> {
    let mut libraries = Vec::new();
    for line in ldd.lines() {
        ensure!(!line.contains("not found"), "{}", line.trim());
        let place = line.split_once("=>").map_or(line, |(_, place)| place).trim();
        if let Some((path, _)) = place.split_once(" (")
            && path.starts_with('/')
        {
            libraries.push(path.into());
        }
    }
    Ok(libraries)
}

/// The tests of these binaries. Each binary lists its own tests.
pub fn list(programs: &Programs) -> Result<Vec<TestId>> {
    let mut tests = Vec::new();
    for (binary, path) in programs {
        let output = Command::new(path)
            .args(["--list", "--format", "terse"])
            .output()
            .with_context(|| format!("cannot start {}", path.display()))?;
        ensure!(output.status.success(), "{} --list failed: {}", path.display(), output.status);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
        tests.extend(names.map(|name| TestId { binary: binary.clone(), name: name.to_owned() }));
    }
    ensure!(!tests.is_empty(), "the test binaries list no tests");
    // The names must be unique, because skips outside the lab have only the name of the test.
    let mut names = BTreeMap::new();
    for test in &tests {
        if let Some(other) = names.insert(&test.name, test) {
            bail!("{test} and {other} have the same name");
        }
    }
    Ok(tests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_by_their_paths() {
        let text = "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 \
                    (0x00007f01)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f02)\n";
        let wanted: Vec<PathBuf> =
            vec!["/lib/x86_64-linux-gnu/libc.so.6".into(), "/lib64/ld-linux-x86-64.so.2".into()];
        assert_eq!(libraries_of(text).unwrap(), wanted);
        assert!(libraries_of("\tnot a dynamic executable").unwrap().is_empty());
        assert!(libraries_of("\tlibx.so => not found").is_err());
    }

    #[test]
    fn every_test_binary_is_in_a_list_or_left_out_here() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for (folder, known) in [
            (
                "crates/pageleap/tests",
                [
                    &TEST_BINARIES[..],
                    &["memory_calls", "priorities", "swap", "topology", "traced", "traced_model"],
                ]
                .concat(),
            ),
            (
                "crates/cli/tests",
                [
                    &COMMAND_TEST_BINARIES[..],
                    &[
                        "advise",
                        "allocators",
                        "bench",
                        "compare",
                        "experiments",
                        "export",
                        "huge_pages",
                        "place",
                        "restore",
                        "run_settings",
                        "status",
                        "topology",
                    ],
                ]
                .concat(),
            ),
        ] {
            for entry in std::fs::read_dir(root.join(folder)).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                if let Some(name) = name.strip_suffix(".rs") {
                    assert!(
                        known.contains(&name),
                        "{folder}/{name}.rs is neither run in the lab nor left out here"
                    );
                }
            }
        }
    }
}
