//! `pageleap run --alloc`: another allocator in the place of the C library's malloc.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use pageleap::process::ProcessMemory;
use pageleap::topology::escaped;
use pageleap_launch::{Allocator, Program, is_library, not_preloaded};

use super::Unstarted;
use crate::stop::Refusal;

/// The loader's list of libraries.
pub const PRELOAD: &str = "LD_PRELOAD";

/// The allocator that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Alloc {
    /// By name.
    Named(Allocator),
    /// By the path of its library.
    Library(PathBuf),
}

impl FromStr for Alloc {
    type Err = String;

    fn from_str(text: &str) -> Result<Alloc, String> {
        match text.contains('/') {
            true => Ok(Alloc::Library(text.into())),
            false => text.parse().map(Alloc::Named),
        }
    }
}

/// The library that a program is to get, if it is not the C library's own malloc. `before` is the
/// present value of LD_PRELOAD. Nothing is known of the program in a trial without one.
pub fn library(
    alloc: &Alloc,
    before: Option<OsString>,
    program: Option<&Program>,
) -> Result<Option<PathBuf>, Unstarted> {
    let library = match alloc {
        Alloc::Named(Allocator::Glibc) => return without(before),
        Alloc::Named(allocator) => {
            allocator.library().ok_or_else(|| Refusal::new(allocator.missing()))?
        }
        Alloc::Library(path) => path
            .canonicalize()
            .map_err(|error| Refusal::new(format!("--alloc {}: {error}", path.display())))?,
    };
    if let Some(program) = program
        && let Some(why) = not_preloaded(program.path())
    {
        let name = escaped(&program.path().to_string_lossy());
        let why = why.reason();
        return Err(Refusal::new(format!(
            "--alloc: {name} {why}, so the loader preloads no allocator into it; link it with one"
        ))
        .into());
    }
    if !is_library(&library) {
        let shown = library.display();
        return Err(
            Refusal::new(format!("--alloc {shown}: it is no library of this machine")).into()
        );
    }
    if library.to_string_lossy().contains([':', ' ']) {
        let shown = library.display();
        return Err(Refusal::new(format!(
            "--alloc {shown}: LD_PRELOAD separates paths by colons and blanks; make a link"
        ))
        .into());
    }
    Ok(Some(library))
}

/// The C library's own malloc needs nothing, unless the user preloads another one.
fn without(before: Option<OsString>) -> Result<Option<PathBuf>, Unstarted> {
    let before = before.unwrap_or_default();
    match other_allocator(&before) {
        None => Ok(None),
        Some(other) => Err(Refusal::new(format!(
            "--alloc glibc: LD_PRELOAD of this shell has {other} ({}); unset it",
            before.to_string_lossy()
        ))
        .into()),
    }
}

/// The first known allocator of a value of LD_PRELOAD.
fn other_allocator(value: &OsStr) -> Option<Allocator> {
    let value = value.to_string_lossy();
    value.split([':', ' ']).find_map(|path| Allocator::of_library(Path::new(path)))
}

/// A sentence if another allocator that the user preloads gives way to this one.
pub fn replaced(library: &Path, before: Option<&OsStr>) -> Option<String> {
    let other = other_allocator(before?)?;
    let is_other = Allocator::of_library(library) != Some(other);
    is_other.then(|| {
        format!("LD_PRELOAD of this shell has {other}, which gives way to {}", library.display())
    })
}

/// Which allocators a running program has mapped, for `--verbose`: known ones, and the one that was
/// asked for.
pub fn mapped(memory: &ProcessMemory, asked: Option<&Path>) -> String {
    // The kernel names files by their own paths, without links.
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let asked = asked.map(|path| real(path).to_string_lossy().into_owned());
    let mut found: Vec<String> = Vec::new();
    for mapping in &memory.mappings {
        let name = &mapping.name;
        let known = Allocator::of_library(Path::new(name)).map(Allocator::name);
        let is_asked = asked.as_ref() == Some(name);
        let Some(kind) = known.or(is_asked.then_some("the one that was asked for")) else {
            continue;
        };
        let line = format!("{kind} ({name})");
        if !found.contains(&line) {
            found.push(line);
        }
    }
    let is_there = |path: &String| memory.mappings.iter().any(|mapping| mapping.name == *path);
    match (found.is_empty(), asked.filter(|path| !is_there(path))) {
        (_, Some(asked)) => format!(
            "{asked} is NOT mapped, so malloc is another one: the program may have started a \
             static one, or cleaned its environment"
        ),
        (true, None) => "the allocator is that of the program or of its C library".to_owned(),
        (false, None) => format!("allocators that are mapped: {}", found.join(", ")),
    }
}
