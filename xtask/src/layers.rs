//! The step `layers`: no crate of the workspace and no module of the library imports upward, and
//! no modules of one folder import each other in a circle.
//!
//! `crates/layers.toml` has the order. A crate may depend on crates of lower rows. A module of the
//! library may import from modules that stand before it, so that no two modules import each other,
//! not even around a corner. A crate or a module that the file does not list is refused, and so is
//! an entry of the file that nothing stands for.
//!
//! Below the library's top level, and in all of the other crates, modules stand in no listed order.
//! There `circles` refuses siblings that import each other, directly or around a corner.
//!
//! Modules under `#[cfg(test)]`, folders of tests, `dev-dependencies`, and `lib.rs` or `main.rs`,
//! which stands on top, may import anything. `imports` finds the imports.

mod circles;
mod imports;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use toml::Spanned;

use imports::{Import, Sources};

/// The order, from the workspace root.
const ORDER: &str = "crates/layers.toml";
/// The library whose modules are checked, from the workspace root.
const LIBRARY: &str = "crates/pageleap";

/// What `crates/layers.toml` says.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    /// Rows of crates, lowest first.
    crates: Vec<Vec<String>>,
    /// Layers by name, lowest first, each with its modules, lowest first.
    modules: toml::Table,
}

/// Where a module stands.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    /// Counted from 1, over all layers.
    number: usize,
    layer: String,
}

/// A dependency or an import that the order does not allow, or what is wrong with the order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Refusal {
    /// From the workspace root.
    file: PathBuf,
    line: usize,
    what: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.what)
    }
}

/// What the check has looked at and refused.
#[derive(Debug, Default)]
pub struct Found {
    /// Imports between different modules of the library.
    pub imports: usize,
    /// Imports between children of the same module, or between their descendants, wherever such
    /// children have no listed order.
    pub siblings: usize,
    /// Dependencies between crates of the workspace.
    pub dependencies: usize,
    /// Sorted by place.
    pub refusals: Vec<Refusal>,
}

/// Checks the workspace at `root`.
pub fn check(root: &Path) -> Result<Found> {
    let order: Order = parse(root, Path::new(ORDER))?;
    let mut found = Found::default();
    let workspace = parse::<Manifest>(root, Path::new("Cargo.toml"))?;
    let workspace = workspace.workspace.context("Cargo.toml has no workspace")?;
    check_crates(root, &workspace, &order.crates, &mut found)?;
    for member in &workspace.members {
        let tops = [Path::new(member).join("src/lib.rs"), Path::new(member).join("src/main.rs")];
        let tops: Vec<&PathBuf> = tops.iter().filter(|top| root.join(top).is_file()).collect();
        ensure!(!tops.is_empty(), "{member} has neither lib.rs nor main.rs");
        for top in tops {
            let sources = imports::read(root, top)?;
            if member == LIBRARY {
                check_modules(root, &order, &sources, &mut found)?;
            }
            circles::check(top, &sources, member == LIBRARY, &mut found);
        }
    }
    found.refusals.sort();
    ensure!(found.imports > 0, "no import found in {LIBRARY}: the check looks at nothing");
    Ok(found)
}

fn parse<T: for<'a> Deserialize<'a>>(root: &Path, file: &Path) -> Result<T> {
    let text = read(root, file)?;
    toml::from_str(&text).with_context(|| format!("{} makes no sense", file.display()))
}

fn read(root: &Path, file: &Path) -> Result<String> {
    fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {}", file.display()))
}

// Modules
// -------

fn places(order: &Order) -> Result<BTreeMap<String, Place>> {
    let mut places = BTreeMap::new();
    for (layer, modules) in &order.modules {
        let modules = modules.as_array().with_context(|| format!("{ORDER}: {layer} is no list"))?;
        for module in modules {
            let module = module.as_str().with_context(|| format!("{ORDER}: {layer}: no name"))?;
            let place = Place { number: places.len() + 1, layer: layer.clone() };
            let twice = places.insert(module.to_owned(), place).is_some();
            ensure!(!twice, "{ORDER}: the module {module} is listed twice");
        }
    }
    Ok(places)
}

fn check_modules(root: &Path, order: &Order, library: &Sources, found: &mut Found) -> Result<()> {
    let places = places(order)?;
    let mut existing = BTreeSet::new();
    for (path, module) in &library.modules {
        let [name] = path.as_slice() else { continue };
        existing.insert(name);
        if !places.contains_key(name) {
            let what = format!(
                "the module {name} has no layer: list it in {ORDER}, behind all that it imports"
            );
            found.refusals.push(Refusal { file: module.file.clone(), line: module.line, what });
        }
    }
    for name in places.keys().filter(|name| !existing.contains(name)) {
        let what = format!("the library has no module {name}: take it out of the list");
        let line = line_with(&read(root, Path::new(ORDER))?, &format!("\"{name}\""));
        found.refusals.push(Refusal { file: ORDER.into(), line, what });
    }
    for import in &library.imports {
        let refuse = |what: String| {
            let what = format!("`{}`: {what}", import.path);
            Refusal { file: import.file.clone(), line: import.line, what }
        };
        let from = &import.from[0];
        let Some(target) = import.target.first() else {
            found.refusals.push(refuse(why_not_the_root(import)));
            continue;
        };
        if target == from {
            continue;
        }
        found.imports += 1;
        let (Some(low), Some(high)) = (places.get(from), places.get(target)) else {
            continue; // refused above
        };
        if high.number > low.number {
            found.refusals.push(refuse(format!(
                "{from} ({}, place {}) imports {target} ({}, place {}), which stands above it",
                low.layer, low.number, high.layer, high.number
            )));
        }
    }
    Ok(())
}

/// What is wrong with an import from `lib.rs`, which stands on top.
fn why_not_the_root(import: &Import) -> String {
    match import.item.as_deref() {
        None | Some("*") => "takes in all of the library: name what is meant".to_owned(),
        Some(name) => {
            format!("{name} is neither a module nor handed on by lib.rs: name its module")
        }
    }
}

/// The number of the first line of a text that contains `what`, or 1.
fn line_with(text: &str, what: &str) -> usize {
    text.lines().position(|line| line.contains(what)).map_or(1, |at| at + 1)
}

// Crates
// ------

#[derive(Debug, Deserialize)]
struct Manifest {
    package: Option<Package>,
    workspace: Option<Workspace>,
    #[serde(default)]
    dependencies: Dependencies,
    #[serde(default, rename = "build-dependencies")]
    build_dependencies: Dependencies,
    #[serde(default)]
    target: BTreeMap<String, TargetTables>,
}

type Dependencies = BTreeMap<Spanned<String>, toml::Value>;

#[derive(Debug, Deserialize)]
struct Package {
    name: Spanned<String>,
}

#[derive(Debug, Deserialize)]
struct Workspace {
    members: Vec<String>,
    #[serde(default)]
    dependencies: toml::Table,
}

#[derive(Debug, Deserialize)]
struct TargetTables {
    #[serde(default)]
    dependencies: Dependencies,
    #[serde(default, rename = "build-dependencies")]
    build_dependencies: Dependencies,
}

impl Manifest {
    /// All dependencies but those of tests, by the name that the manifest gives them.
    fn dependencies(&self) -> impl Iterator<Item = (&Spanned<String>, &toml::Value)> {
        let of_targets =
            self.target.values().flat_map(|t| t.dependencies.iter().chain(&t.build_dependencies));
        self.dependencies.iter().chain(&self.build_dependencies).chain(of_targets)
    }
}

fn check_crates(
    root: &Path,
    workspace: &Workspace,
    rows: &[Vec<String>],
    found: &mut Found,
) -> Result<()> {
    let row_of = |name: &str| rows.iter().position(|row| row.iter().any(|member| member == name));
    let mut members = BTreeMap::new();
    for member in &workspace.members {
        let file = Path::new(member).join("Cargo.toml");
        let text = read(root, &file)?;
        let manifest: Manifest =
            toml::from_str(&text).with_context(|| format!("{} makes no sense", file.display()))?;
        let package = manifest.package.as_ref();
        let name = &package.with_context(|| format!("{} has no package", file.display()))?.name;
        members.insert(name.get_ref().clone(), (file, text, manifest));
    }
    for name in rows.iter().flatten().collect::<BTreeSet<_>>() {
        if !members.contains_key(name) {
            let what = format!("the workspace has no crate {name}: take it out of the list");
            let line = line_with(&read(root, Path::new(ORDER))?, &format!("\"{name}\""));
            found.refusals.push(Refusal { file: ORDER.into(), line, what });
        }
    }
    for (name, (file, text, manifest)) in &members {
        let refuse = |at: &Spanned<String>, what| {
            let line = text[..at.span().start].matches('\n').count() + 1;
            Refusal { file: file.clone(), line, what }
        };
        let Some(row) = row_of(name) else {
            let at = &manifest.package.as_ref().expect("it has a name").name;
            let what = format!(
                "the crate {name} has no layer: list it in {ORDER}, below all that it depends on"
            );
            found.refusals.push(refuse(at, what));
            continue;
        };
        for (key, value) in manifest.dependencies() {
            let package = package_of(key.get_ref(), value, &workspace.dependencies);
            let Some(other) = members.get(package).and_then(|_| row_of(package)) else {
                continue; // of a registry, or refused above
            };
            found.dependencies += 1;
            if other >= row {
                let (row, other) = (row + 1, other + 1);
                let what = format!(
                    "`{}`: {name} (row {row}) depends on {package} (row {other}), \
                     which stands no lower",
                    key.get_ref()
                );
                found.refusals.push(refuse(key, what));
            }
        }
    }
    Ok(())
}

/// The package behind a dependency, which the manifest or the workspace may have renamed.
fn package_of<'a>(key: &'a str, value: &'a toml::Value, workspace: &'a toml::Table) -> &'a str {
    let renamed = |value: &'a toml::Value| value.get("package").and_then(toml::Value::as_str);
    let inherited = value.get("workspace").is_some();
    let inherited = inherited.then(|| workspace.get(key)).flatten();
    renamed(value).or_else(|| inherited.and_then(renamed)).unwrap_or(key)
}

#[cfg(test)]
mod tests;
