//! The C library as programs link it, and the programs that test it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::commands::Workspace;
use crate::process;
use crate::tally::Outcome;

/// How long a program may take, and the build of the library.
const LIMIT: Duration = Duration::from_secs(300);
/// A program exits with this if it cannot run here; its last line says why.
const SKIPPED: i32 = 77;

/// What the static library needs (`rustc --print native-static-libs`).
const PRIVATE_LIBRARIES: &str = "-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc";

/// Where the library goes.
#[derive(Debug)]
pub struct Layout<'a> {
    /// The folder that gets `include` and `lib`.
    pub root: &'a Path,
    /// The folder for libraries below it.
    pub lib: &'a str,
    /// What it will be called when programs are built: for the pkg-config file.
    pub prefix: &'a str,
}

impl<'a> Layout<'a> {
    /// A folder that may be moved as a whole.
    pub fn movable(root: &'a Path) -> Layout<'a> {
        Layout { root, lib: "lib", prefix: "${pcfiledir}/../.." }
    }
}

/// Builds the library and puts it, with headers and pkg-config file, where they belong.
pub fn install(workspace: &Workspace, layout: &Layout) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    run(workspace.cargo(&["build", "--release", "-p", "pageleap-capi"]))?;
    let sources = workspace.root.join("crates/capi");
    let lib = layout.root.join(layout.lib);
    let folders = [lib.clone(), lib.join("pkgconfig"), layout.root.join("include")];
    for folder in &folders {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let [lib, pkgconfig, include] = folders;
    for header in ["pageleap.h", "pageleap.hpp"] {
        copy(&sources.join("include").join(header), &include.join(header))?;
    }
    let archive = lib.join("libpageleap.a");
    copy(&workspace.target.join("release/libpageleap_c.a"), &archive)?;
    // Four fifths of it, and of no use without this workspace's sources.
    let mut strip = Command::new("strip");
    strip.arg("--strip-debug").arg(&archive);
    run(strip)?;
    let (soname, file) = (soname(version), format!("libpageleap.so.{version}"));
    let mut link = Command::new("cc");
    link.args(["-shared", "-o"]).arg(lib.join(&file));
    link.arg(format!("-Wl,-soname,{soname}"));
    link.arg(format!("-Wl,--version-script,{}", sources.join("pageleap.map").display()));
    link.args([
        "-Wl,-z,nodelete",
        "-Wl,-z,relro",
        "-Wl,-z,now",
        "-Wl,--no-undefined",
        "-Wl,--gc-sections",
    ]);
    link.arg("-Wl,--whole-archive").arg(&archive).arg("-Wl,--no-whole-archive");
    link.args(PRIVATE_LIBRARIES.split(' '));
    run(link)?;
    for name in [soname.as_str(), "libpageleap.so"] {
        let link = lib.join(name);
        let _ = fs::remove_file(&link);
        symlink(&file, &link).with_context(|| format!("cannot make {}", link.display()))?;
    }
    let text = format!(
        "prefix={}\nlibdir=${{prefix}}/{}\nincludedir=${{prefix}}/include\n\n\
         Name: pageleap\nDescription: Moves pages between memory nodes while threads use them\nVersion: {version}\n\
         Libs: -L${{libdir}} -lpageleap\nLibs.private: {PRIVATE_LIBRARIES}\nCflags: -I${{includedir}}\n",
        layout.prefix, layout.lib
    );
    let file = pkgconfig.join("pageleap.pc");
    fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// Programs of one major version run with each other's libraries; before the first, those of one
/// minor version do.
pub fn soname(version: &str) -> String {
    let mut parts = version.split('.');
    match (parts.next(), parts.next()) {
        (Some("0"), Some(minor)) => format!("libpageleap.so.0.{minor}"),
        (major, _) => format!("libpageleap.so.{}", major.unwrap_or_default()),
    }
}

/// A way to build a program.
struct Build {
    /// For C, and for C++.
    compilers: [&'static str; 2],
    flags: &'static [&'static str],
    /// Against the archive.
    is_static: bool,
    /// Run under valgrind.
    valgrind: bool,
}

/// A program to build and run.
struct Program {
    source: PathBuf,
    arguments: &'static [&'static str],
    /// A library besides ours, by its name for pkg-config.
    library: Option<&'static str>,
}

impl Build {
    fn compiler(&self, source: &Path) -> &'static str {
        self.compilers[usize::from(is_cpp(source))]
    }

    /// Whether a program may be built and run so. Sanitizers replace malloc, and so does jemalloc.
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

/// Programs that run there: where the sanitizers cannot work, and where an engine by protection has
/// to do without calls that valgrind does not know.
const UNDER_VALGRIND: [&str; 2] = ["host_dlopen.c", "jemalloc_arena.c"];

/// Valgrind, as strict as the sanitizers. Only if it is told to it gives each thread its turn, and
/// keeps registers as they are where a fault may happen.
const VALGRIND: [&str; 7] = [
    "valgrind",
    "-q",
    "--fair-sched=yes",
    "--vex-iropt-register-updates=allregs-at-mem-access",
    "--error-exitcode=9",
    "--leak-check=full",
    "--errors-for-leak-kinds=definite",
];

/// Examples, with sizes that make them short, and what they need besides.
const EXAMPLES: [(&str, &[&str], Option<&str>); 3] = [
    ("buffer_pool.c", &["64", "16", "1.5"], None),
    ("hash_join.cpp", &["100000", "1000000"], None),
    ("jemalloc_arena.c", &["64", "1"], Some("jemalloc")),
];

/// How the JVM runs: its best compiler leaves out null checks that failed often, its first one
/// never does.
const JVMS: [Option<&str>; 2] = [None, Some("-XX:TieredStopAtLevel=1")];

/// Builds each program of `crates/capi/tests` and `examples`, in C and C++, in each way, runs it,
/// and says how it went.
pub fn test(workspace: &Workspace) -> Result<Outcome> {
    let prefix = workspace.target.join("capi");
    install(workspace, &Layout::movable(&prefix))?;
    let mut outcome = Outcome::default();
    outcome.add("header and symbols", check_symbols(workspace, &prefix).map(|()| None));
    outcome.add("header in C and C++", check_languages(workspace).map(|()| None));
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
            "there is no {name}"
        );
    }
    for program in programs {
        for build in BUILDS.iter().filter(|build| build.suits(&program)) {
            let result = build_and_run(workspace, &prefix, &program, build);
            outcome.add(&build.name(&program.source), result);
        }
    }
    for options in JVMS {
        let name = format!("a JVM ({})", options.unwrap_or("default"));
        outcome.add(&name, run_in_a_jvm(workspace, &prefix, options));
    }
    let mut map = workspace.cargo(&[
        "run",
        "--release",
        "-q",
        "-p",
        "pageleap-alloc",
        "--example",
        "hash_map",
    ]);
    map.args(["--", "100000"]);
    outcome.add("hash_map (cargo)", run(map).map(|()| None));
    Ok(outcome)
}

fn programs(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let is_program =
        |path: &PathBuf| is_cpp(path) || path.extension().is_some_and(|extension| extension == "c");
    let mut programs: Vec<_> = paths.into_iter().filter(is_program).collect();
    programs.sort();
    ensure!(!programs.is_empty(), "{} has no programs", folder.display());
    Ok(programs)
}

fn is_cpp(source: &Path) -> bool {
    source.extension().is_some_and(|extension| extension == "cpp")
}

/// Gives the reason if the program cannot be built or run here.
fn build_and_run(
    workspace: &Workspace,
    prefix: &Path,
    program: &Program,
    build: &Build,
) -> Result<Option<String>> {
    let Program { source, arguments, library } = program;
    let compiler = build.compiler(source);
    let tools = [Some(compiler), build.valgrind.then_some(VALGRIND[0])];
    for tool in tools.into_iter().flatten() {
        if Command::new(tool).arg("--version").output().is_err() {
            return Ok(Some(format!("there is no {tool}; get it by: apt-get install {tool}")));
        }
    }
    if let Some(library) = library
        && pkg_config(prefix, library, &["--exists"]).is_err()
    {
        return Ok(Some(format!(
            "there is no {library}; get it by: apt-get install lib{library}-dev"
        )));
    }
    let folder = workspace.target.join("capi-tests");
    fs::create_dir_all(&folder)?;
    let built = folder.join(source.file_stem().context("a program has a name")?);
    let mut compile = Command::new(compiler);
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
    run(compile)?;
    let mut last = String::new();
    let mut command = Command::new(if build.valgrind { Path::new(VALGRIND[0]) } else { &built });
    if build.valgrind {
        command.args(&VALGRIND[1..]).arg(&built);
    }
    command.args(*arguments).env("PAGELEAP_LIBRARY", prefix.join("lib/libpageleap.so"));
    let ending = process::run(command, LIMIT, |line| {
        println!("    {line}");
        last = line.to_owned();
    })?;
    if ending.code() == Some(SKIPPED) {
        return Ok(Some(last));
    }
    ensure!(ending.success(), "{}", ending.reason(LIMIT));
    Ok(None)
}

/// A JVM that loads the library through its native interface. Gives the reason if there is none
/// here.
fn run_in_a_jvm(
    workspace: &Workspace,
    prefix: &Path,
    options: Option<&str>,
) -> Result<Option<String>> {
    let Some(home) = java_home() else {
        return Ok(Some(
            "there is no Java with jni.h; get it by: apt-get install default-jdk-headless"
                .to_owned(),
        ));
    };
    let sources = workspace.root.join("crates/capi/tests/jvm");
    let folder = workspace.target.join("capi-tests");
    fs::create_dir_all(&folder)?;
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
    run(compile)?;
    let mut java = Command::new(home.join("bin/java"));
    java.args(options)
        .arg(format!("-Djava.library.path={}", folder.display()))
        .arg(sources.join("Host.java"));
    // It would leave a report where it was started from.
    java.current_dir(&folder);
    let ending = process::run(java, LIMIT, |line| println!("    {line}"))?;
    ensure!(ending.success(), "{}", ending.reason(LIMIT));
    Ok(None)
}

/// Where Java is, if it can compile and has what C needs.
fn java_home() -> Option<PathBuf> {
    let output =
        Command::new("java").args(["-XshowSettings:properties", "-version"]).output().ok()?;
    let settings = String::from_utf8_lossy(&output.stderr).into_owned();
    let home = settings.lines().find_map(|line| line.trim().strip_prefix("java.home = "))?;
    let home = PathBuf::from(home.trim());
    (home.join("include/jni.h").is_file() && home.join("bin/javac").is_file()).then_some(home)
}

fn pkg_config(prefix: &Path, library: &str, flags: &[&str]) -> Result<Vec<String>> {
    let mut command = Command::new("pkg-config");
    command.args(flags).arg(library).env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
    let output = command.output().context("cannot start pkg-config; install it")?;
    ensure!(output.status.success(), "pkg-config: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.split_whitespace().map(str::to_owned).collect())
}

/// The header, the list of versions and the shared library have the same functions, and the library
/// nothing else.
fn check_symbols(workspace: &Workspace, prefix: &Path) -> Result<()> {
    let header = fs::read_to_string(prefix.join("include/pageleap.h"))?;
    let map = fs::read_to_string(workspace.root.join("crates/capi/pageleap.map"))?;
    let output = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(prefix.join("lib/libpageleap.so"))
        .output();
    let symbols = String::from_utf8(output.context("cannot start nm")?.stdout)?;
    let (declared, listed, exported) = (declared(&header), listed(&map), exported(&symbols));
    ensure!(!declared.is_empty(), "the header declares no function");
    ensure!(declared == listed, "the header declares {declared:?}, pageleap.map lists {listed:?}");
    ensure!(
        declared == exported,
        "the header declares {declared:?}, the library exports {exported:?}"
    );
    Ok(())
}

/// The header goes with each of these languages.
fn check_languages(workspace: &Workspace) -> Result<()> {
    let header = workspace.root.join("crates/capi/include/pageleap.h");
    for (compiler, language, standards) in
        [("gcc", "c", ["c99", "c11", "c2x"]), ("g++", "c++", ["c++11", "c++17", "c++20"])]
    {
        for standard in standards {
            let mut compile = Command::new(compiler);
            compile.args([
                "-fsyntax-only",
                "-Wall",
                "-Wextra",
                "-Wpedantic",
                "-Werror",
                "-x",
                language,
            ]);
            run({
                compile.arg(format!("-std={standard}")).arg(&header);
                compile
            })?;
        }
    }
    Ok(())
}

/// The functions that a header declares: names before a parenthesis outside comments, at the
/// beginning of a declaration.
pub fn declared(header: &str) -> Vec<String> {
    let mut code = String::new();
    let mut rest = header;
    while let Some((before, comment)) = rest.split_once("/*") {
        code += before;
        rest = comment.split_once("*/").map_or("", |(_, after)| after);
    }
    code += rest;
    let lines = code.lines().filter(|line| !line.starts_with([' ', '#', '}', '(']));
    let names = lines.filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next());
    sorted(names.filter(|name| name.starts_with("pageleap_")))
}

fn listed(map: &str) -> Vec<String> {
    sorted(
        map.lines()
            .filter_map(|line| line.trim().strip_suffix(';'))
            .filter(|name| name.starts_with("pageleap_")),
    )
}

fn exported(symbols: &str) -> Vec<String> {
    // All but the names of the versions, which are absolute.
    let of_the_library = symbols.lines().filter(|line| !line.contains(" A "));
    sorted(of_the_library.filter_map(|line| line.rsplit(' ').next()?.split('@').next()))
}

fn sorted<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort();
    names
}

pub fn copy(from: &Path, to: &Path) -> Result<()> {
    let copied = fs::copy(from, to);
    copied.with_context(|| format!("cannot copy {} to {}", from.display(), to.display())).map(drop)
}

/// Runs a command that must succeed.
pub fn run(mut command: Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_versions() {
        assert_eq!(soname("0.1.0"), "libpageleap.so.0.1");
        assert_eq!(soname("0.12.3"), "libpageleap.so.0.12");
        assert_eq!(soname("2.3.4"), "libpageleap.so.2");
    }

    #[test]
    fn functions_are_found_in_all_three() {
        let header = "/* pageleap_not(x) */\nint pageleap_b(void);\nconst char *pageleap_a(int x,\n    int (*pageleap_no)(void));\n\
                      typedef struct pageleap_t {\n    void (*f)(int);\n} pageleap_t;\n";
        assert_eq!(declared(header), ["pageleap_a", "pageleap_b"]);
        assert_eq!(
            listed("V {\n global:\n  pageleap_b;\n  pageleap_a;\n local:\n  *;\n};"),
            ["pageleap_a", "pageleap_b"]
        );
        assert_eq!(
            exported("0001 T pageleap_b@@V\n0002 T pageleap_a@@V\n0 A V\n"),
            ["pageleap_a", "pageleap_b"]
        );
    }
}
