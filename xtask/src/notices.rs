//! The crates of others that are inside the command and the library, and their licences: packages
//! have to name both.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::commands::Workspace;

/// The names of files with licences begin with one of these.
const FILES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];

#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Debug, Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    repository: Option<String>,
    /// `None` for crates of the workspace.
    source: Option<String>,
    manifest_path: PathBuf,
    targets: Vec<Target>,
}

#[derive(Debug, Deserialize)]
struct Target {
    kind: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<Kind>,
}

#[derive(Debug, Deserialize)]
struct Kind {
    /// `None` for a crate that is linked; else "dev" or "build".
    kind: Option<String>,
}

impl Package {
    /// Whether compilers run the crate. Nothing of it is in what they compile.
    fn is_macro(&self) -> bool {
        self.targets.iter().any(|target| target.kind.iter().any(|kind| kind == "proc-macro"))
    }
}

/// The text: the crates that are linked into these packages of the workspace, then the text of
/// each licence once.
pub fn text(workspace: &Workspace, roots: &[&str]) -> Result<String> {
    let version =
        std::process::Command::new("rustc").arg("-vV").output().context("cannot start rustc")?;
    let version = String::from_utf8(version.stdout)?;
    let host = version
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .context("rustc names no host")?;
    let mut command = workspace.cargo(&[
        "metadata",
        "--format-version",
        "1",
        "--locked",
        "--filter-platform",
        host,
    ]);
    let output = command.output().context("cannot start cargo")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Metadata = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    let linked = linked(&metadata, roots);
    ensure!(!linked.is_empty(), "{roots:?} link nothing");

    let mut text = String::from(
        "The pageleap command and library contain the Rust standard library with its own parts\n\
         (https://www.rust-lang.org; used under the Apache License 2.0, which LICENSE-APACHE has,\n\
         and for tables of characters under Unicode-3.0.txt; COPYRIGHT-library.html names all of\n\
         it), and these crates:\n\n",
    );
    let mut licences: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in linked {
        let name = format!("{} {}", package.name, package.version);
        let licence =
            package.license.as_deref().with_context(|| format!("{name} names no licence"))?;
        text += &format!(
            "{name}: {licence} ({})\n",
            package.repository.as_deref().unwrap_or("crates.io")
        );
        let folder = package.manifest_path.parent().context("a manifest lies in a folder")?;
        let files = licence_files(folder)?;
        ensure!(!files.is_empty(), "{name} comes without the text of its licence");
        for file in files {
            licences.entry(file.trim().to_owned()).or_default().push(name.clone());
        }
    }
    for (licence, names) in licences {
        text += &format!("\n{}\n{}:\n\n{licence}\n", "-".repeat(80), names.join(", "));
    }
    Ok(text)
}

/// The crates of others that are linked into the roots, by name.
fn linked<'a>(metadata: &'a Metadata, roots: &[&str]) -> Vec<&'a Package> {
    let packages: BTreeMap<&str, &Package> =
        metadata.packages.iter().map(|package| (package.id.as_str(), package)).collect();
    let nodes: BTreeMap<&str, &Node> =
        metadata.resolve.nodes.iter().map(|node| (node.id.as_str(), node)).collect();
    let is_root =
        |package: &&Package| package.source.is_none() && roots.contains(&package.name.as_str());
    let mut open: Vec<&Package> = metadata.packages.iter().filter(is_root).collect();
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    while let Some(package) = open.pop() {
        if package.is_macro() || !seen.insert(&package.id) {
            continue;
        }
        if package.source.is_some() {
            found.push(package);
        }
        let Some(node) = nodes.get(package.id.as_str()) else { continue };
        let is_linked =
            |dependency: &&Dependency| dependency.dep_kinds.iter().any(|kind| kind.kind.is_none());
        open.extend(
            node.deps.iter().filter(is_linked).filter_map(|dep| packages.get(dep.pkg.as_str())),
        );
    }
    found.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
    found
}

fn licence_files(folder: &Path) -> Result<Vec<String>> {
    let cannot = || format!("cannot read {}", folder.display());
    let mut texts = Vec::new();
    for entry in fs::read_dir(folder).with_context(cannot)? {
        let path = entry.with_context(cannot)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        if path.is_file() && FILES.iter().any(|begin| name.starts_with(begin)) {
            texts.push(
                fs::read_to_string(&path)
                    .with_context(|| format!("cannot read {}", path.display()))?,
            );
        }
    }
    texts.sort();
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linked_crates_are_named_and_build_tools_are_not() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned();
        let workspace = Workspace { target: root.join("target"), root };
        let text = text(&workspace, &["pageleap-capi"]).unwrap();
        let crates: Vec<&str> =
            text.lines().filter_map(|line| line.split_once(": ")?.0.split(' ').next()).collect();
        assert!(crates.contains(&"libc") && crates.contains(&"serde_json"), "{crates:?}");
        for helper in ["pageleap", "serde_derive", "syn", "loom", "clap"] {
            assert!(!crates.contains(&helper), "{helper}: {crates:?}");
        }
        assert!(text.contains("Permission is hereby granted"));
    }
}
