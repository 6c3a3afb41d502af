//! The public interface of the libraries, listed in a file beside each, so that a change of it is
//! seen in review: `cargo xtask api` writes the files, and the deep step `api` checks them.
//!
//! The tool cargo-public-api makes the lists of rustdoc's own description. It needs a nightly
//! toolchain, and a newer one can name the same interface differently. So a list names the tools
//! that made it, and the check is no part of the first command: there each verdict is a function
//! of the code.

use std::process::Command;

use anyhow::{Context, Result};

use crate::commands::{Workspace, output};
use crate::files::{read, write};

/// The crates whose interface other projects program against, and their folders.
const CRATES: [(&str, &str); 3] = [
    ("pageleap", "crates/pageleap"),
    ("pageleap-alloc", "crates/alloc"),
    ("pageleap-probe", "crates/probe"),
];

/// The list, in the folder of its crate.
const FILE: &str = "public-api.txt";

/// Traits that the compiler implements by itself, and that nobody relies on here: without them, a
/// type is listed with the traits that its users see, `Send` and `Sync` among them.
const NOISE: [&str; 6] =
    ["Freeze", "Unpin", "UnsafeUnpin", "UnwindSafe", "RefUnwindSafe", "StructuralPartialEq"];

/// How to get what makes the lists.
pub const REMEDY: &str = "cargo install --locked cargo-public-api; and the nightly toolchain: \
                          rustup toolchain install nightly --profile minimal";

/// Whether the lists can be made here.
pub fn is_possible() -> bool {
    tools().is_ok()
}

/// The tools that make the lists, with their versions.
fn tools() -> Result<String> {
    let said = |program: &str, argument: &str| {
        let mut command = Command::new(program);
        command.args([argument, "--version"]);
        output(command)
    };
    Ok(format!("{}, {}", said("cargo", "public-api")?, said("rustc", "+nightly")?))
}

/// Writes the lists anew, or, with `check`, returns what is wrong with them.
pub fn run(workspace: &Workspace, check: bool) -> Result<Vec<String>> {
    let tools = tools().with_context(|| format!("get them by: {REMEDY}"))?;
    let mut problems = Vec::new();
    for (name, folder) in CRATES {
        let file = workspace.root.join(folder).join(FILE);
        let (found, wanted) = (read(&file).unwrap_or_default(), list(workspace, name)?);
        if !check {
            write(&file, &text(&tools, &wanted))?;
        } else if items(&found) != items(&wanted) {
            problems.push(format!(
                "{}\n{} is out of date, or another nightly has written it ({tools} now); \
                 type: cargo xtask api",
                difference(&found, &wanted),
                file.display()
            ));
        }
    }
    Ok(problems)
}

/// The list of a crate as the tool prints it, without noise.
fn list(workspace: &Workspace, name: &str) -> Result<String> {
    let own = Workspace { target: workspace.target.join("api"), ..workspace.clone() };
    let arguments = ["+nightly", "public-api", "--simplified", "--color=never", "--package", name];
    Ok(without_noise(&output(own.cargo(&arguments))?))
}

fn without_noise(list: &str) -> String {
    let is_noise = |line: &&str| {
        NOISE
            .iter()
            .any(|name| line.starts_with("impl") && line.contains(&format!("::{name} for ")))
    };
    list.lines().filter(|line| !is_noise(line)).map(|line| format!("{line}\n")).collect()
}

fn text(tools: &str, list: &str) -> String {
    format!(
        "// What other crates can use of this one. Written by: cargo xtask api\n\
         // ({tools})\n\
         // A change here is a change of the interface: say it in CHANGELOG.md.\n\n{list}"
    )
}

/// The lines of a list that name something.
fn items(list: &str) -> Vec<&str> {
    list.lines().filter(|line| !line.is_empty() && !line.starts_with("//")).collect()
}

/// The lines that only one of two lists has.
fn difference(found: &str, wanted: &str) -> String {
    let (found, wanted) = (items(found), items(wanted));
    let only = |mark: char, of: &[&str], other: &[&str]| -> Vec<String> {
        let lines = of.iter().filter(|line| !other.contains(line));
        lines.map(|line| format!("{mark} {line}")).collect()
    };
    [only('-', &found, &wanted), only('+', &wanted, &found)].concat().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn send_is_listed_and_noise_is_not() {
        let list = "pub struct a::A\nimpl core::marker::Send for a::A\n\
                    impl !core::marker::Sync for a::A\nimpl core::marker::Unpin for a::A\n\
                    impl core::panic::unwind_safe::RefUnwindSafe for a::A\n";
        let kept = without_noise(list);
        assert_eq!(items(&kept).len(), 3, "{kept}");
        let other = text("tool 1", &kept.replace("Send", "Clone"));
        let wanted = "- impl core::marker::Clone for a::A\n+ impl core::marker::Send for a::A";
        assert_eq!(difference(&other, &kept), wanted);
        assert_eq!(items(&text("tool 1", &kept)), items(&text("tool 2", &kept)));
    }
}
