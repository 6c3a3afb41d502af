//! Programs in C, C++ and Java that use the library: built in several ways, and run.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::PRIVATE_LIBRARIES;
use crate::commands::{Effort, Workspace, output, run};
use crate::files::{make_folder, with_extension};
use crate::process;
use crate::tally::Outcome;

/// How long a program may run.
pub(super) const LIMIT: Duration = Duration::from_secs(300);

/// A program exits with this if it cannot run here; its last line says why.
pub(super) const SKIPPED: i32 = 77;

/// A way to build a program.
struct Build {
    /// The compilers for C and for C++.
    compilers: [&'static str; 2],
    flags: &'static [&'static str],
    /// Whether the program is linked against the static library.
    is_static: bool,
    /// Whether the program runs under valgrind.
    valgrind: bool,
}

/// A program to build and run.
struct Program {
    source: PathBuf,
    arguments: &'static [&'static str],
    /// A library besides pageleap, by its name for pkg-config.
    library: Option<&'static str>,
}

impl Build {
    fn compiler(&self, source: &Path) -> &'static str {
        self.compilers[usize::from(is_cpp(source))]
    }

    /// Whether a program may be built and run in this way. Sanitizers replace malloc, and so
    /// does jemalloc.
    fn suits(&self, program: &Program) -> bool {
        let sanitizes = self.flags.iter().any(|flag| flag.starts_with("-fsanitize"));
        if sanitizes {
            return program.library != Some("jemalloc");
        }
        !self.valgrind || UNDER_VALGRIND.iter().any(|name| program.source.ends_with(name))
    }

    fn name(&self, source: &Path) -> String {
        let kind = match (self.is_static, self.valgrind) {
            (true, _) => " static",
            (_, true) => " under valgrind",
            _ => "",
        };
        let words = [&[self.compiler(source)], self.flags].concat().join(" ");
        format!("{} ({words}{kind})", source.file_stem().unwrap_or_default().display())
    }
}

const GCC: [&str; 2] = ["gcc", "g++"];
const CLANG: [&str; 2] = ["clang", "clang++"];

const BUILDS: [Build; 5] = [
    Build { compilers: GCC, flags: &["-O2"], is_static: false, valgrind: false },
    Build { compilers: GCC, flags: &["-O1"], is_static: true, valgrind: false },
    Build { compilers: CLANG, flags: &["-O2"], is_static: false, valgrind: false },
    Build {
        compilers: GCC,
        flags: &["-O1", "-fsanitize=address,undefined"],
        is_static: false,
        valgrind: false,
    },
    Build { compilers: GCC, flags: &["-O1"], is_static: false, valgrind: true },
];

/// Programs that run under valgrind: one that sanitizers cannot run, and one whose jobs use an
/// engine by protection, because valgrind lacks calls of the others.
const UNDER_VALGRIND: [&str; 2] = ["host_dlopen.c", "jemalloc_arena.c"];

/// Valgrind, as strict as the sanitizers. By default it does not give each thread its turn, and
/// does not keep registers up to date where a fault may happen: two options ask for that.
const VALGRIND: [&str; 7] = [
    "valgrind",
    "-q",
    "--fair-sched=yes",
    "--vex-iropt-register-updates=allregs-at-mem-access",
    "--error-exitcode=9",
    "--leak-check=full",
    "--errors-for-leak-kinds=definite",
];

/// The examples, with arguments that make them short, and the library that they need.
const EXAMPLES: [(&str, &[&str], Option<&str>); 5] = [
    ("buffer_pool.c", &["64", "16", "1.5"], None),
    ("hash_join.cpp", &["100000", "1000000"], None),
    ("jemalloc_arena.c", &["64", "1"], Some("jemalloc")),
    ("move_pages.c", &[], None),
    ("short_jobs.c", &["1"], None),
];

/// The program that runs with each of these allocators in place of the C library's: the library to
/// preload, and its package.
const PRELOADED: &str = "ordinary_memory.cpp";
const ALLOCATORS: [(&str, &str); 3] = [
    ("libjemalloc.so.2", "libjemalloc2"),
    ("libtcmalloc_minimal.so.4", "libtcmalloc-minimal4"),
    ("libmimalloc.so.2", "libmimalloc2.0"),
];

/// Options of the JVM. Its best compiler leaves out null checks that failed often, its first
/// compiler never does.
const JVMS: [Option<&str>; 2] = [None, Some("-XX:TieredStopAtLevel=1")];

/// Builds each program of `crates/capi/tests` and `examples`, in C and C++, in each way, runs it,
/// and adds how it went. A short effort leaves out the static library, valgrind, the JVM and the
/// example that cargo builds.
pub fn test(
    workspace: &Workspace,
    prefix: &Path,
    effort: Effort,
    outcome: &mut Outcome,
) -> Result<()> {
    let sources = workspace.root.join("crates/capi");
    let tests = programs(&sources.join("tests"))?;
    let tests = tests.into_iter().map(|source| Program { source, arguments: &[], library: None });
    let examples = EXAMPLES.map(|(name, arguments, library)| {
        let source = sources.join("examples").join(name);
        Program { source, arguments, library }
    });
    let programs: Vec<Program> = tests.chain(examples).collect();
    for name in UNDER_VALGRIND {
        ensure!(
            programs.iter().any(|program| program.source.ends_with(name)),
            "{name} is not among the programs"
        );
    }
    for program in programs {
        let wanted = |build: &&Build| {
            build.suits(&program) && (effort == Effort::Full || !build.is_static && !build.valgrind)
        };
        for build in BUILDS.iter().filter(wanted) {
            let result = build_and_run(workspace, prefix, &program, build);
            outcome.add(&build.name(&program.source), result);
            let first = build.name(&program.source) == BUILDS[0].name(&program.source);
            if first && effort == Effort::Full && program.source.ends_with(PRELOADED) {
                for (library, package) in ALLOCATORS {
                    let result = run_with(workspace, &program, library, package);
                    outcome.add(&format!("{PRELOADED} with {library}"), result);
                }
            }
        }
    }
    if effort == Effort::Short {
        return Ok(());
    }
    for options in JVMS {
        let name = format!("a JVM ({})", options.unwrap_or("default"));
        outcome.add(&name, run_in_a_jvm(workspace, prefix, options));
    }
    let arguments =
        ["run", "--release", "-q", "-p", "pageleap-alloc", "--example", "hash_map", "--", "100000"];
    outcome.add("hash_map (cargo)", run(workspace.cargo(&arguments)).map(|()| None));
    Ok(())
}

fn programs(folder: &Path) -> Result<Vec<PathBuf>> {
    let programs = [with_extension(folder, "c")?, with_extension(folder, "cpp")?].concat();
    ensure!(!programs.is_empty(), "{} has no programs", folder.display());
    Ok(programs)
}

fn is_cpp(source: &Path) -> bool {
    source.extension().is_some_and(|extension| extension == "cpp")
}

/// Builds [`PRELOADED`] with the static library, for machines that lack the shared one. The inner
/// error is the reason why it cannot be built here.
pub fn ordinary_memory(
    workspace: &Workspace,
    prefix: &Path,
    folder: &Path,
) -> Result<Result<PathBuf, String>> {
    let source = workspace.root.join("crates/capi/tests").join(PRELOADED);
    let program = Program { source, arguments: &[], library: None };
    let build = BUILDS.iter().find(|build| build.is_static).context("a static build")?;
    match missing(prefix, &program, build) {
        Some(reason) => Ok(Err(reason)),
        None => compile(prefix, &program, build, folder).map(Ok),
    }
}

/// Builds a program and runs it. Returns a reason if it cannot be built or run here.
fn build_and_run(
    workspace: &Workspace,
    prefix: &Path,
    program: &Program,
    build: &Build,
) -> Result<Option<String>> {
    if let Some(reason) = missing(prefix, program, build) {
        return Ok(Some(reason));
    }
    let built = compile(prefix, program, build, &workspace.target.join("capi-tests"))?;
    let mut command = Command::new(if build.valgrind { Path::new(VALGRIND[0]) } else { &built });
    if build.valgrind {
        command.args(&VALGRIND[1..]).arg(&built).env("JEMALLOC_ARENA_ENGINE", "mprotect");
    }
    command.args(program.arguments).env("PAGELEAP_LIBRARY", prefix.join("lib/libpageleap.so"));
    run_program(command)
}

/// What is missing here to build and run a program in this way.
fn missing(prefix: &Path, program: &Program, build: &Build) -> Option<String> {
    let tools = [Some(build.compiler(&program.source)), build.valgrind.then_some(VALGRIND[0])];
    let is_missing = |tool: &&str| Command::new(tool).arg("--version").output().is_err();
    if let Some(tool) = tools.into_iter().flatten().find(is_missing) {
        return Some(format!("{tool} is missing; get it by: apt-get install {tool}"));
    }
    let library = program.library?;
    let is_missing = pkg_config(prefix, library, &["--exists"]).is_err();
    let remedy = format!("{library} is missing; get it by: apt-get install lib{library}-dev");
    is_missing.then_some(remedy)
}

/// Builds a program in this way, and returns its path in the folder.
fn compile(prefix: &Path, program: &Program, build: &Build, folder: &Path) -> Result<PathBuf> {
    let Program { source, library, .. } = program;
    make_folder(folder)?;
    let built = folder.join(source.file_stem().context("a program has a name")?);
    let mut compile = Command::new(build.compiler(source));
    compile.args([
        if is_cpp(source) { "-std=c++17" } else { "-std=c11" },
        "-D_GNU_SOURCE",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        "-g",
        "-pthread",
    ]);
    compile.args(build.flags).arg("-o").arg(&built).arg(source);
    compile.args(pkg_config(prefix, "pageleap", &["--cflags"])?);
    match build.is_static {
        true => compile.arg(prefix.join("lib/libpageleap.a")).args(PRIVATE_LIBRARIES.split(' ')),
        false => {
            let lib = prefix.join("lib");
            compile
                .args(pkg_config(prefix, "pageleap", &["--libs"])?)
                .arg(format!("-Wl,-rpath,{}", lib.display()))
        }
    };
    if let Some(library) = library {
        compile.args(pkg_config(prefix, library, &["--cflags", "--libs"])?);
    }
    compile.arg("-ldl");
    run_program(compile)?;
    Ok(built)
}

/// How many of its last lines an error of a program has.
const LAST_LINES: usize = 12;

/// Runs a program. Returns a reason if it says that it cannot run here.
fn run_program(command: Command) -> Result<Option<String>> {
    let mut last = VecDeque::new();
    let ending = process::run(command, LIMIT, |line| {
        println!("    {line}");
        last.push_back(line.to_owned());
        if last.len() > LAST_LINES {
            last.pop_front();
        }
    })?;
    if ending.code() == Some(SKIPPED) {
        return Ok(Some(last.pop_back().unwrap_or_default()));
    }
    let last: Vec<String> = last.into();
    ensure!(ending.success(), "{}\n{}", ending.reason(LIMIT), last.join("\n"));
    Ok(None)
}

/// Runs a program that has been built with another allocator. Returns a reason if it is missing.
fn run_with(
    workspace: &Workspace,
    program: &Program,
    library: &str,
    package: &str,
) -> Result<Option<String>> {
    let mut ldconfig = Command::new("/sbin/ldconfig");
    ldconfig.arg("-p");
    let known = output(ldconfig)?;
    if !known.contains(library) {
        return Ok(Some(format!("{library} is missing; get it by: apt-get install {package}")));
    }
    let name = program.source.file_stem().context("a program has a name")?;
    let mut command = Command::new(workspace.target.join("capi-tests").join(name));
    command.env("LD_PRELOAD", library);
    run_program(command)
}

/// Runs a JVM that loads the library through its native interface. Returns a reason if Java is
/// missing, or if memory of the JVM cannot move here.
fn run_in_a_jvm(
    workspace: &Workspace,
    prefix: &Path,
    options: Option<&str>,
) -> Result<Option<String>> {
    let Some(home) = java_home() else {
        return Ok(Some(
            "Java with jni.h is missing; get it by: apt-get install default-jdk-headless"
                .to_owned(),
        ));
    };
    let sources = workspace.root.join("crates/capi/tests/jvm");
    let folder = workspace.target.join("capi-tests");
    make_folder(&folder)?;
    let include = home.join("include");
    let mut compile = Command::new("gcc");
    compile.args([
        "-std=c11",
        "-D_GNU_SOURCE",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-g",
        "-shared",
        "-fPIC",
    ]);
    compile.arg("-I").arg(&include).arg("-I").arg(include.join("linux"));
    compile.arg("-o").arg(folder.join("libhost_jvm.so")).arg(sources.join("host_jvm.c"));
    compile.args(pkg_config(prefix, "pageleap", &["--cflags", "--libs"])?);
    compile.arg(format!("-Wl,-rpath,{}", prefix.join("lib").display()));
    run_program(compile)?;
    let mut java = Command::new(home.join("bin/java"));
    java.args(options)
        .arg(format!("-Djava.library.path={}", folder.display()))
        .arg(sources.join("Host.java"));
    // If it crashes it leaves a report in the folder where it runs.
    java.current_dir(&folder);
    run_program(java)
}

/// The folder of Java, if it can compile and has `jni.h`.
fn java_home() -> Option<PathBuf> {
    let output =
        Command::new("java").args(["-XshowSettings:properties", "-version"]).output().ok()?;
    let settings = String::from_utf8_lossy(&output.stderr).into_owned();
    let home = settings.lines().find_map(|line| line.trim().strip_prefix("java.home = "))?;
    let home = PathBuf::from(home.trim());
    (home.join("include/jni.h").is_file() && home.join("bin/javac").is_file()).then_some(home)
}

pub(super) fn pkg_config(prefix: &Path, library: &str, flags: &[&str]) -> Result<Vec<String>> {
    let mut command = Command::new("pkg-config");
    command.args(flags).arg(library).env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
    Ok(output(command)?.split_whitespace().map(str::to_owned).collect())
}
