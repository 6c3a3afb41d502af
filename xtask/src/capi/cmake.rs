//! The CMake package: which versions it serves, and whether a project builds and runs with it.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use super::abi;
use crate::commands::{Workspace, output, run};
use crate::files::{make_folder, write};
use crate::tally::Outcome;

/// The targets, by the option of the examples' project that chooses between them.
const TARGETS: [(&str, &str); 2] = [("pageleap::pageleap", "OFF"), ("pageleap::static", "ON")];

/// A way to ask for a version: what find_package() sets for it.
enum Asks {
    /// `find_package(pageleap 0.1)`.
    For(String),
    /// `find_package(pageleap 0.1...<2)`: the lower end, the upper end, and whether that is in.
    Range(String, String, bool),
}

/// Checks what `install` has put below `prefix`.
pub fn test(workspace: &Workspace, prefix: &Path, outcome: &mut Outcome) {
    if Command::new("cmake").arg("--version").output().is_err() {
        let reason = "cmake is missing; get it by: apt-get install cmake".to_owned();
        return outcome.add("the CMake package", Ok(Some(reason)));
    }
    let versions = check_versions(workspace, prefix);
    outcome.add("the CMake package's versions", versions.map(|()| None));
    for (target, is_static) in TARGETS {
        let built = build_and_run(workspace, prefix, is_static);
        outcome.add(&format!("an example by CMake ({target})"), built.map(|()| None));
    }
}

/// Configures the examples, builds the one that is quickest to build, and runs it.
fn build_and_run(workspace: &Workspace, prefix: &Path, is_static: &str) -> Result<()> {
    let folder = workspace.target.join("capi-tests").join(format!("cmake-{is_static}"));
    let mut configure = Command::new("cmake");
    // Also where the folder was made for a checkout that has moved.
    configure.arg("--fresh");
    configure.arg("-S").arg(workspace.root.join("crates/capi/examples")).arg("-B").arg(&folder);
    configure.arg(format!("-DPAGELEAP_STATIC={is_static}"));
    configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.canonicalize()?.display()));
    run(configure)?;
    let mut build = Command::new("cmake");
    build.arg("--build").arg(&folder).args(["--target", "buffer_pool"]);
    run(build)?;
    let mut example = Command::new(folder.join("buffer_pool"));
    example.args(["16", "4", "0.3"]);
    run(example)
}

/// The version file, asked as find_package() asks it.
fn check_versions(workspace: &Workspace, prefix: &Path) -> Result<()> {
    let folder = workspace.target.join("capi-tests");
    make_folder(&folder)?;
    let script = folder.join("versions.cmake");
    let file = prefix.canonicalize()?.join("lib/cmake/pageleap/pageleap-config-version.cmake");
    let version = env!("CARGO_PKG_VERSION");
    for (asks, wanted) in cases(version) {
        let sets = match &asks {
            Asks::For(version) => format!("set(PACKAGE_FIND_VERSION {version})\n"),
            Asks::Range(from, to, including) => format!(
                "set(PACKAGE_FIND_VERSION_RANGE {from}...{to})\nset(PACKAGE_FIND_VERSION {from})\n\
                 set(PACKAGE_FIND_VERSION_MIN {from})\nset(PACKAGE_FIND_VERSION_MAX {to})\n\
                 set(PACKAGE_FIND_VERSION_RANGE_MAX {})\n",
                if *including { "INCLUDE" } else { "EXCLUDE" }
            ),
        };
        let text = format!(
            "{sets}include(\"{}\")\nmessage(NOTICE \"${{PACKAGE_VERSION_COMPATIBLE}} \
             ${{PACKAGE_VERSION_EXACT}} ${{PACKAGE_VERSION}}\")\n",
            file.display()
        );
        write(&script, &text)?;
        let mut cmake = Command::new("sh");
        // NOTICE goes to standard error.
        cmake.args(["-c", "exec cmake -P \"$0\" 2>&1"]).arg(&script);
        let found = output(cmake)?;
        ensure!(found == format!("{wanted} {version}"), "{text} gives: {found}; not: {wanted}");
    }
    Ok(())
}

/// Requests, and whether this version is compatible and exact.
fn cases(version: &str) -> Vec<(Asks, &'static str)> {
    let abi = abi(version);
    // The next ABI, and the next release of this one.
    let (front, last) = abi.rsplit_once('.').unwrap_or(("", &abi));
    let next = last.parse::<u32>().map_or_else(|_| "999".to_owned(), |last| (last + 1).to_string());
    let next = if front.is_empty() { next } else { format!("{front}.{next}") };
    let later = format!("{abi}.999");
    let asks = |version: &str| Asks::For(version.to_owned());
    let range = |from: &str, to: &str, including| Asks::Range(from.into(), to.into(), including);
    vec![
        (asks(version), "TRUE TRUE"),
        (asks(&abi), if version == format!("{abi}.0") { "TRUE TRUE" } else { "TRUE FALSE" }),
        (asks(&later), "FALSE FALSE"),
        (asks(&next), "FALSE FALSE"),
        // An older ABI, and one that begins with the same digits.
        (asks("0.0.1"), "FALSE FALSE"),
        (asks(&format!("{abi}5")), "FALSE FALSE"),
        (range(&abi, &next, false), "TRUE FALSE"),
        (range("0", version, true), "TRUE FALSE"),
        (range("0", version, false), "FALSE FALSE"),
        (range(&later, &next, true), "FALSE FALSE"),
    ]
}
