//! The crates of others that are inside the command and the library, and their licences: packages
//! have to name both. The tool cargo-about finds them; `about.toml` and `about.hbs` beside this
//! folder say which licences are accepted, and how the text looks.

use anyhow::{Context, Result};

use crate::commands::{Workspace, output};

/// What is linked in besides crates.
const OPENING: &str = "\
The Rust standard library with its own parts (https://www.rust-lang.org) is in here; used under the
Apache License 2.0, which LICENSE-APACHE has, and for tables of characters under Unicode-3.0.txt.
COPYRIGHT-library.html names all of it. Crates that are in here:

";

/// The line between two licences, as in `about.hbs`.
const RULE: &str =
    "--------------------------------------------------------------------------------";

/// The text for one crate of the workspace: each licence once, with the crates that are under it.
pub fn text(workspace: &Workspace, folder: &str) -> Result<String> {
    let manifest = format!("{folder}/Cargo.toml");
    let mut about = workspace.cargo(&["about", "generate", "--frozen", "--fail"]);
    about.args(["--config", "xtask/about.toml", "--manifest-path", &manifest, "xtask/about.hbs"]);
    let licences = output(about).context(
        "cargo-about finds the licences; get it by: cargo install --locked cargo-about \
         --features cli",
    )?;
    let page = match folder {
        "crates/cli" => plots(workspace)?,
        _ => String::new(),
    };
    Ok(format!("{OPENING}{licences}\n{page}"))
}

/// The library that is no crate, but a part of each report that the command writes.
fn plots(workspace: &Workspace) -> Result<String> {
    const FOLDER: &str = "crates/measure/src/export/html/uplot";
    let path = workspace.root.join(FOLDER).join("LICENSE");
    let licence = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    Ok(format!("{RULE}\nuPlot (https://github.com/leeoniya/uPlot), in reports:\n\n{licence}\n"))
}
