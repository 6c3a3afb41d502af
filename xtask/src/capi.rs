//! The C library as programs link it: what is installed, and whether it is whole.

mod cmake;
pub mod preloaded;
mod programs;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::built;
use crate::commands::{Effort, Workspace, run};
use crate::files::{copy, make_folder, read, write};
use crate::tally::Outcome;

/// What the static library needs (`rustc --print native-static-libs`).
const PRIVATE_LIBRARIES: &str = "-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc";

/// Files that tell build systems where the library is: the template, and the file below the folder
/// of libraries.
const DESCRIPTIONS: [(&str, &str); 3] = [
    ("pageleap.pc.in", "pkgconfig/pageleap.pc"),
    ("pageleap-config.cmake.in", "cmake/pageleap/pageleap-config.cmake"),
    ("pageleap-config-version.cmake.in", "cmake/pageleap/pageleap-config-version.cmake"),
];

/// Where the library goes.
#[derive(Debug)]
pub struct Layout<'a> {
    /// The folder that gets `include` and `lib`.
    pub root: &'a Path,
    /// The folder for libraries below it.
    pub lib: &'a str,
    /// The prefix that the pkg-config file names.
    pub prefix: &'a str,
}

impl<'a> Layout<'a> {
    /// A folder that may be moved as a whole.
    pub fn movable(root: &'a Path) -> Layout<'a> {
        Layout { root, lib: "lib", prefix: "${pcfiledir}/../.." }
    }
}

/// Builds the library and installs it with its headers and with the files for build systems.
pub fn install(workspace: &Workspace, layout: &Layout) -> Result<()> {
    run(workspace.cargo(&["build", "--release", "-p", "pageleap-capi"]))?;
    install_built(workspace, layout, &workspace.target.join("release/libpageleap_c.a"))
}

/// Installs the library that the tests of the workspace were built with.
fn install_of_tests(workspace: &Workspace, layout: &Layout) -> Result<()> {
    let archive = built::archive(workspace.cargo(&["test", "--workspace", "--no-run"]))?;
    install_built(workspace, layout, &archive)
}

fn install_built(workspace: &Workspace, layout: &Layout, built: &Path) -> Result<()> {
    let sources = workspace.root.join("crates/capi");
    let (lib, include) = (layout.root.join(layout.lib), layout.root.join("include"));
    for folder in [&lib, &include] {
        make_folder(folder)?;
    }
    for header in ["pageleap.h", "pageleap.hpp"] {
        copy(&sources.join("include").join(header), &include.join(header))?;
    }
    let archive = lib.join("libpageleap.a");
    copy(built, &archive)?;
    // Debug information is four fifths of the archive, and of no use without these sources.
    let mut strip = Command::new("strip");
    strip.arg("--strip-debug").arg(&archive);
    run(strip)?;
    link(&sources, &archive, &lib)?;
    describe(&sources, layout, &lib)
}

/// Makes the shared library of the archive, and its links.
fn link(sources: &Path, archive: &Path, lib: &Path) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
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
    link.arg("-Wl,--whole-archive").arg(archive).arg("-Wl,--no-whole-archive");
    link.args(PRIVATE_LIBRARIES.split(' '));
    run(link)?;
    for name in [soname.as_str(), "libpageleap.so"] {
        let link = lib.join(name);
        let _ = fs::remove_file(&link);
        symlink(&file, &link).with_context(|| format!("cannot make {}", link.display()))?;
    }
    Ok(())
}

/// Writes the files by which pkg-config and CMake find the library.
fn describe(sources: &Path, layout: &Layout, lib: &Path) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    // From `lib/cmake/pageleap`.
    let up = "../".repeat(Path::new(layout.lib).components().count() + 2);
    let system = PRIVATE_LIBRARIES.replace("-l", "").replace(' ', ";");
    let values = [
        ("VERSION", version),
        ("ABI", &abi(version)),
        ("ABI_PATTERN", &abi(version).replace('.', r"\\.")),
        ("SONAME", &soname(version)),
        ("PREFIX", layout.prefix),
        ("LIB", layout.lib),
        ("TO_INCLUDE", &format!("{up}include")),
        ("PRIVATE_LIBRARIES", PRIVATE_LIBRARIES),
        ("SYSTEM_LIBRARIES", &system),
    ];
    for (template, file) in DESCRIPTIONS {
        let template = sources.join("install").join(template);
        let text =
            fill(&read(&template)?, &values).with_context(|| template.display().to_string())?;
        let file = lib.join(file);
        make_folder(file.parent().context("a file lies in a folder")?)?;
        write(&file, &text)?;
    }
    Ok(())
}

/// Puts values in the place of their names: `@NAME@`.
pub fn fill(template: &str, values: &[(&str, &str)]) -> Result<String> {
    let mut text = template.to_owned();
    for (name, value) in values {
        text = text.replace(&format!("@{name}@"), value);
    }
    let left = text.split('@').nth(1).unwrap_or_default();
    ensure!(left.is_empty(), "nothing is known of @{left}@");
    Ok(text)
}

/// The part of a version that all compatible versions share. Programs of one major version run with
/// each other's libraries; before version 1, those of one minor version do.
pub fn abi(version: &str) -> String {
    let mut parts = version.split('.');
    match (parts.next(), parts.next()) {
        (Some("0"), Some(minor)) => format!("0.{minor}"),
        (major, _) => major.unwrap_or_default().to_owned(),
    }
}

/// The name by which programs ask for the shared library.
pub fn soname(version: &str) -> String {
    format!("libpageleap.so.{}", abi(version))
}

/// Installs the library below `target/capi`, and checks it with its programs. A short effort takes
/// the library as the tests were built with it; a full one takes the optimised one.
pub fn test(workspace: &Workspace, effort: Effort) -> Result<Outcome> {
    let prefix = workspace.target.join("capi");
    match effort {
        Effort::Short => install_of_tests(workspace, &Layout::movable(&prefix))?,
        Effort::Full => install(workspace, &Layout::movable(&prefix))?,
    }
    let mut outcome = Outcome::default();
    outcome.add("header and symbols", check_symbols(workspace, &prefix).map(|()| None));
    outcome.add("header in C and C++", check_languages(workspace).map(|()| None));
    cmake::test(workspace, &prefix, &mut outcome);
    programs::test(workspace, &prefix, effort, &mut outcome)?;
    Ok(outcome)
}

/// Builds the program for guests of the lab that leaps ordinary memory, against the library as the
/// tests were built with it. Its files lie in a folder of the lab's own: a step may install another
/// library below `target/capi` meanwhile. The inner error names a tool that is missing.
pub fn for_the_lab(workspace: &Workspace) -> Result<Result<PathBuf, String>> {
    let folder = workspace.target.join("lab/capi");
    install_of_tests(workspace, &Layout::movable(&folder))?;
    programs::ordinary_memory(workspace, &folder, &folder.join("tests"))
}

/// The header, the list of versions and the shared library have the same functions, and the library
/// nothing else.
fn check_symbols(workspace: &Workspace, prefix: &Path) -> Result<()> {
    let header = read(&prefix.join("include/pageleap.h"))?;
    let map = read(&workspace.root.join("crates/capi/pageleap.map"))?;
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
        let header = "/* pageleap_not(x) */
int pageleap_b(void);
const char *pageleap_a(int x,
    int (*pageleap_no)(void));
typedef struct pageleap_t {
    void (*f)(int);
} pageleap_t;
";
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
