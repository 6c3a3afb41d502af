//! The C library as programs link it, and the programs that test it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::commands::Workspace;
use crate::process;
use crate::tally::{Counts, Skip};

/// How long a program may take, and the build of the library.
const LIMIT: Duration = Duration::from_secs(300);
/// A program exits with this if it cannot run here; its last line says why.
const SKIPPED: i32 = 77;

/// What the static library needs (`rustc --print native-static-libs`).
const PRIVATE_LIBRARIES: &str = "-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc";

/// Builds the library and puts it, with header and pkg-config file, below `prefix`.
pub fn install(workspace: &Workspace, prefix: &Path) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    run(workspace.cargo(&["build", "--release", "-p", "pageleap-capi"]))?;
    let sources = workspace.root.join("crates/capi");
    let folders = [prefix.join("lib"), prefix.join("lib/pkgconfig"), prefix.join("include")];
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
    link.args(["-Wl,-z,nodelete", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,--no-undefined", "-Wl,--gc-sections"]);
    link.arg("-Wl,--whole-archive").arg(&archive).arg("-Wl,--no-whole-archive");
    link.args(PRIVATE_LIBRARIES.split(' '));
    run(link)?;
    for name in [soname.as_str(), "libpageleap.so"] {
        let link = lib.join(name);
        let _ = fs::remove_file(&link);
        symlink(&file, &link).with_context(|| format!("cannot make {}", link.display()))?;
    }
    let text = format!(
        "prefix=${{pcfiledir}}/../..\nlibdir=${{prefix}}/lib\nincludedir=${{prefix}}/include\n\n\
         Name: pageleap\nDescription: Moves pages between memory nodes while threads use them\nVersion: {version}\n\
         Libs: -L${{libdir}} -lpageleap\nLibs.private: {PRIVATE_LIBRARIES}\nCflags: -I${{includedir}}\n"
    );
    let file = pkgconfig.join("pageleap.pc");
    fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// Programs of one major version run with each other's libraries; before the first, those of one minor version do.
fn soname(version: &str) -> String {
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
}

impl Build {
    fn compiler(&self, source: &Path) -> &'static str {
        self.compilers[usize::from(is_cpp(source))]
    }

    fn name(&self, source: &Path) -> String {
        let kind = if self.is_static { " static" } else { "" };
        let words = [&[self.compiler(source)], self.flags].concat().join(" ");
        format!("{} ({words}{kind})", source.file_stem().unwrap_or_default().display())
    }
}

const GCC: [&str; 2] = ["gcc", "g++"];
const CLANG: [&str; 2] = ["clang", "clang++"];

const BUILDS: [Build; 4] = [
    Build { compilers: GCC, flags: &["-O2"], is_static: false },
    Build { compilers: GCC, flags: &["-O1"], is_static: true },
    Build { compilers: CLANG, flags: &["-O2"], is_static: false },
    Build { compilers: GCC, flags: &["-O1", "-fsanitize=address,undefined"], is_static: false },
];

/// Examples, with sizes that make them short.
const EXAMPLES: [(&str, &[&str]); 2] =
    [("buffer_pool.c", &["64", "16", "1.5"]), ("hash_join.cpp", &["100000", "1000000"])];

/// How the programs went.
#[derive(Debug, Default)]
pub struct Outcome {
    pub counts: Counts,
    pub failed: Vec<String>,
    pub skips: Vec<Skip>,
}

/// Builds each program of `crates/capi/tests` and `examples`, in C and C++, in each way, runs it, and says how it went.
pub fn test(workspace: &Workspace) -> Result<Outcome> {
    let prefix = workspace.target.join("capi");
    install(workspace, &prefix)?;
    let mut outcome = Outcome::default();
    outcome.add("header and symbols", check_symbols(workspace, &prefix).map(|()| None));
    outcome.add("header in C and C++", check_languages(workspace).map(|()| None));
    let sources = workspace.root.join("crates/capi");
    let tests = programs(&sources.join("tests"))?.into_iter().map(|source| (source, &[][..]));
    let examples = EXAMPLES.iter().map(|(name, arguments)| (sources.join("examples").join(name), *arguments));
    for (source, arguments) in tests.chain(examples) {
        for build in &BUILDS {
            let result = build_and_run(workspace, &prefix, &source, arguments, build);
            outcome.add(&build.name(&source), result);
        }
    }
    let mut map =
        workspace.cargo(&["run", "--release", "-q", "-p", "pageleap-alloc", "--example", "hash_map"]);
    map.args(["--", "100000"]);
    outcome.add("hash_map (cargo)", run(map).map(|()| None));
    Ok(outcome)
}

impl Outcome {
    /// Counts a test that has passed, was skipped for a reason, or failed.
    fn add(&mut self, name: &str, result: Result<Option<String>>) {
        match result {
            Ok(None) => {
                println!("test {name} ... ok");
                self.counts.passed += 1;
            }
            Ok(Some(reason)) => {
                println!("SKIP {name}: {reason}");
                self.counts.skipped += 1;
                self.skips.push(Skip { name: name.to_owned(), reason });
            }
            Err(error) => {
                println!("test {name} ... FAILED\n{error:#}");
                self.counts.failed += 1;
                self.failed.push(name.to_owned());
            }
        }
    }
}

fn programs(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
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
    source: &Path,
    arguments: &[&str],
    build: &Build,
) -> Result<Option<String>> {
    let compiler = build.compiler(source);
    if Command::new(compiler).arg("--version").output().is_err() {
        return Ok(Some(format!("there is no {compiler}")));
    }
    let folder = workspace.target.join("capi-tests");
    fs::create_dir_all(&folder)?;
    let program = folder.join(source.file_stem().context("a program has a name")?);
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
    compile.args(build.flags).arg("-o").arg(&program).arg(source);
    compile.args(pkg_config(prefix, &["--cflags"])?);
    match build.is_static {
        true => compile.arg(prefix.join("lib/libpageleap.a")).args(PRIVATE_LIBRARIES.split(' ')),
        false => {
            let lib = prefix.join("lib");
            compile.args(pkg_config(prefix, &["--libs"])?).arg(format!("-Wl,-rpath,{}", lib.display()))
        }
    };
    compile.arg("-ldl");
    run(compile)?;
    let mut last = String::new();
    let mut command = Command::new(&program);
    command.args(arguments).env("PAGELEAP_LIBRARY", prefix.join("lib/libpageleap.so"));
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

fn pkg_config(prefix: &Path, flags: &[&str]) -> Result<Vec<String>> {
    let mut command = Command::new("pkg-config");
    command.args(flags).arg("pageleap").env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
    let output = command.output().context("cannot start pkg-config; install it")?;
    ensure!(output.status.success(), "pkg-config: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.split_whitespace().map(str::to_owned).collect())
}

/// The header, the list of versions and the shared library have the same functions, and the library nothing else.
fn check_symbols(workspace: &Workspace, prefix: &Path) -> Result<()> {
    let header = fs::read_to_string(prefix.join("include/pageleap.h"))?;
    let map = fs::read_to_string(workspace.root.join("crates/capi/pageleap.map"))?;
    let output =
        Command::new("nm").args(["-D", "--defined-only"]).arg(prefix.join("lib/libpageleap.so")).output();
    let symbols = String::from_utf8(output.context("cannot start nm")?.stdout)?;
    let (declared, listed, exported) = (declared(&header), listed(&map), exported(&symbols));
    ensure!(!declared.is_empty(), "the header declares no function");
    ensure!(declared == listed, "the header declares {declared:?}, pageleap.map lists {listed:?}");
    ensure!(declared == exported, "the header declares {declared:?}, the library exports {exported:?}");
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
            compile.args(["-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-x", language]);
            run({
                compile.arg(format!("-std={standard}")).arg(&header);
                compile
            })?;
        }
    }
    Ok(())
}

/// The functions that a header declares: names before a parenthesis outside comments, at the beginning of a declaration.
fn declared(header: &str) -> Vec<String> {
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

fn copy(from: &Path, to: &Path) -> Result<()> {
    let copied = fs::copy(from, to);
    copied.with_context(|| format!("cannot copy {} to {}", from.display(), to.display())).map(drop)
}

/// Runs a command that must succeed.
fn run(mut command: Command) -> Result<()> {
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
