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

/// The text for one crate of the workspace: each licence once, with the crates that are under it.
pub fn text(workspace: &Workspace, folder: &str) -> Result<String> {
    let manifest = format!("{folder}/Cargo.toml");
    let mut about = workspace.cargo(&["about", "generate", "--frozen", "--fail"]);
    about.args(["--config", "xtask/about.toml", "--manifest-path", &manifest, "xtask/about.hbs"]);
    let licences = output(about).context(
        "cargo-about finds the licences; get it by: cargo install --locked cargo-about \
         --features cli",
    )?;
    Ok(format!("{OPENING}{licences}\n"))
}
