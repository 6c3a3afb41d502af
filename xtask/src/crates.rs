//! The crates that are meant for a registry: whether each builds from what would be uploaded.
//!
//! Published are the libraries for Rust programs with what they depend on, and the command. A crate
//! with `publish = false` stays here: `pageleap-capi` because C programs need header, soname and
//! symbol versions beside it, which no registry delivers.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::commands::{Workspace, output, run};
use crate::files::make_folder;
use crate::tally::Outcome;

/// What every crate brings along: nothing outside its folder goes with it.
const SHIPPED: [&str; 3] = ["LICENSE-APACHE", "LICENSE-MIT", "README.md"];

#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    /// The registries to which it may go; `None` stands for all.
    publish: Option<Vec<String>>,
}

/// Checks each published crate, then packages all of them and builds each from its archive.
pub fn test(workspace: &Workspace) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let published = published(workspace)?;
    for package in &published {
        let name = format!("{} has what it needs with it", package.name);
        outcome.add(&name, check_files(workspace, package).map(|()| None));
    }
    outcome.add("each crate builds from its archive", build(workspace, &published).map(|()| None));
    Ok(outcome)
}

/// Packages all crates and builds each from its archive. All at once: cargo then builds each
/// against the archives of the others, which are in no registry yet. Changes that are not committed
/// are in.
fn build(workspace: &Workspace, published: &[Package]) -> Result<()> {
    // Anew each time: cargo takes a crate of one version for the same crate, unpacked and built.
    let folder = workspace.target.join("crates");
    remove(&folder)?;
    let home = folder.join("home");
    lend_downloads(&home)?;
    let mut package = workspace.cargo(&["package", "--locked", "--allow-dirty"]);
    package.args(published.iter().flat_map(|package| ["-p", package.name.as_str()]));
    package.env("CARGO_HOME", &home).env("CARGO_TARGET_DIR", folder.join("target"));
    run(package)?;
    remove(&folder)
}

/// Makes a home for cargo that shares downloads and settings with the user's, but not what is
/// unpacked.
fn lend_downloads(home: &Path) -> Result<()> {
    make_folder(&home.join("registry"))?;
    let of_the_user = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let of_the_user = of_the_user
        .or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cargo")))
        .context("neither CARGO_HOME nor HOME is set")?;
    for shared in ["registry/index", "registry/cache", "config.toml"] {
        let there = of_the_user.join(shared);
        if there.exists() {
            symlink(&there, home.join(shared))
                .with_context(|| format!("cannot link to {}", there.display()))?;
        }
    }
    Ok(())
}

fn remove(folder: &Path) -> Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// The crates of the workspace that may go to a registry.
fn published(workspace: &Workspace) -> Result<Vec<Package>> {
    let command = workspace.cargo(&["metadata", "--format-version", "1", "--locked", "--no-deps"]);
    let metadata: Metadata = serde_json::from_str(&output(command)?).context("cargo metadata")?;
    let is_published = |package: &Package| package.publish.as_ref().is_none_or(|to| !to.is_empty());
    let published: Vec<Package> = metadata.packages.into_iter().filter(is_published).collect();
    ensure!(!published.is_empty(), "no crate of the workspace may be published");
    Ok(published)
}

/// Whether licences and readme go along: nothing outside the crate's folder does.
fn check_files(workspace: &Workspace, package: &Package) -> Result<()> {
    let arguments = ["package", "--list", "--locked", "--allow-dirty", "-p", &package.name];
    let listed = output(workspace.cargo(&arguments))?;
    for file in SHIPPED {
        ensure!(listed.lines().any(|line| line == file), "its archive has no {file}");
    }
    Ok(())
}
