//! The crates that are meant for a registry: what each says of itself, and whether it builds from
//! what would be uploaded.
//!
//! Published are the libraries for Rust programs with what they depend on, and the command. A crate
//! with `publish = false` stays here: `pageleap-capi` because C programs need header, soname and
//! symbol versions beside it, which no registry delivers.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::commands::{Workspace, output, run};
use crate::files::{make_folder, read};
use crate::tally::Outcome;

/// What every crate brings along: nothing outside its folder goes with it.
const SHIPPED: [&str; 3] = ["LICENSE-APACHE", "LICENSE-MIT", "README.md"];

/// crates.io takes no more keywords and categories, and no longer keywords.
const LABELS_MAX: usize = 5;
const KEYWORD_LENGTH_MAX: usize = 20;

#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    description: Option<String>,
    license: Option<String>,
    readme: Option<PathBuf>,
    keywords: Vec<String>,
    categories: Vec<String>,
    /// The registries to which it may go; `None` stands for all.
    publish: Option<Vec<String>>,
    manifest_path: PathBuf,
    metadata: Option<serde_json::Value>,
    targets: Vec<Target>,
}

#[derive(Debug, Deserialize)]
struct Target {
    kind: Vec<String>,
}

/// Checks each published crate, then packages all of them and builds each from its archive.
pub fn test(workspace: &Workspace) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let published = published(workspace)?;
    for package in &published {
        let name = format!("{} is described", package.name);
        outcome.add(&name, check_description(package).map(|()| None));
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

/// Whether a registry would show what a user needs to choose the crate.
fn check_description(package: &Package) -> Result<()> {
    let said = |field: &Option<String>| field.as_ref().is_some_and(|text| !text.is_empty());
    ensure!(said(&package.description), "it has no description");
    ensure!(said(&package.license), "it has no license");
    let readme = package.readme.as_ref().context("it has no readme")?;
    let folder = package.manifest_path.parent().context("a manifest lies in a folder")?;
    ensure!(folder.join(readme).is_file(), "its readme, {}, is missing", readme.display());
    for (what, labels) in [("keywords", &package.keywords), ("categories", &package.categories)] {
        let count = labels.len();
        ensure!((1..=LABELS_MAX).contains(&count), "it has {count} {what}; 1 to 5 are possible");
    }
    for keyword in &package.keywords {
        ensure!(keyword.len() <= KEYWORD_LENGTH_MAX, "`{keyword}` is too long for a keyword");
    }
    let is_library = package.targets.iter().any(|target| target.kind.iter().any(|k| k == "lib"));
    let docs_rs = package.metadata.as_ref().and_then(|all| all.pointer("/docs/rs/targets"));
    ensure!(!is_library || docs_rs.is_some(), "it names no targets for docs.rs");
    Ok(())
}

/// Whether licences and readme go along, and everything that is named comes from the crate's own
/// folder.
fn check_files(workspace: &Workspace, package: &Package) -> Result<()> {
    let arguments = ["package", "--list", "--locked", "--allow-dirty", "-p", &package.name];
    let listed = output(workspace.cargo(&arguments))?;
    for file in SHIPPED {
        ensure!(listed.lines().any(|line| line == file), "its archive has no {file}");
    }
    let folder = package.manifest_path.parent().context("a manifest lies in a folder")?;
    for file in listed.lines().filter(|line| line.ends_with(".rs")) {
        check_paths(&folder.join(file), Path::new(file))?;
    }
    Ok(())
}

/// Refuses a source that takes modules or text from a folder outside its crate.
fn check_paths(source: &Path, inside: &Path) -> Result<()> {
    let depth = inside.components().count() - 1;
    for (index, line) in read(source)?.lines().enumerate() {
        let takes = ["#[path = \"", "include!(\"", "include_str!(\"", "include_bytes!(\""];
        let Some(path) = takes.iter().find_map(|take| line.split(take).nth(1)) else { continue };
        if path.matches("../").count() > depth {
            bail!("{}:{}: this file lies outside the crate", source.display(), index + 1);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn package() -> Package {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        Package {
            name: "one".to_owned(),
            description: Some("Does it".to_owned()),
            license: Some("MIT".to_owned()),
            readme: Some("Cargo.toml".into()),
            keywords: vec!["numa".to_owned()],
            categories: vec!["memory-management".to_owned()],
            publish: None,
            manifest_path: manifest,
            metadata: Some(serde_json::json!({ "docs": { "rs": { "targets": [] } } })),
            targets: vec![Target { kind: vec!["lib".to_owned()] }],
        }
    }

    #[test]
    fn a_crate_that_says_too_little_is_refused() {
        check_description(&package()).unwrap();
        type Break = fn(&mut Package);
        let broken: [(&str, Break); 6] = [
            ("description", |package| package.description = None),
            ("license", |package| package.license = Some(String::new())),
            ("readme", |package| package.readme = Some("no such file".into())),
            ("0 keywords", |package| package.keywords.clear()),
            ("too long", |package| package.keywords[0] = "k".repeat(21)),
            ("docs.rs", |package| package.metadata = None),
        ];
        for (wanted, breaks) in broken {
            let mut package = package();
            breaks(&mut package);
            let refused = check_description(&package).unwrap_err().to_string();
            assert!(refused.contains(wanted), "{wanted}: {refused}");
        }
    }

    #[test]
    fn a_source_outside_of_its_crate_is_found() {
        let folder = Scratch::new("crates");
        let source = folder.path().join("source.rs");
        std::fs::write(&source, "\n#[path = \"../../other/tests/mod.rs\"]\nmod other;\n").unwrap();
        check_paths(&source, Path::new("a/b/source.rs")).unwrap();
        let refused = check_paths(&source, Path::new("tests/source.rs")).unwrap_err().to_string();
        assert!(refused.contains("source.rs:2"), "{refused}");
    }
}
