//! `pageleap run --alloc`: another allocator in the place of the C library's malloc.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use pageleap::process::ProcessMemory;
use pageleap::topology::escaped;
use pageleap_launch::{Allocator, Program, not_preloaded, preloaded_first};

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

/// The new value of LD_PRELOAD, by which a program gets the allocator, if it has to change. `before`
/// is the present value, which is kept behind it. Nothing is known of the program in a trial without
/// one.
pub fn preload(
    alloc: &Alloc,
    before: Option<OsString>,
    program: Option<&Program>,
) -> Result<Option<OsString>, Unstarted> {
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
    if library.to_string_lossy().contains([':', ' ']) {
        let shown = library.display();
        return Err(Refusal::new(format!(
            "--alloc {shown}: LD_PRELOAD separates paths by colons and blanks; make a link"
        ))
        .into());
    }
    Ok(Some(preloaded_first(&library, before)))
}

/// The C library's own malloc needs nothing, unless the user preloads another one.
fn without(before: Option<OsString>) -> Result<Option<OsString>, Unstarted> {
    let before = before.unwrap_or_default();
    let before = before.to_string_lossy();
    let other = before.split([':', ' ']).find_map(|path| Allocator::of_library(Path::new(path)));
    match other {
        None => Ok(None),
        Some(other) => Err(Refusal::new(format!(
            "--alloc glibc: LD_PRELOAD of this shell has {other} ({before}); unset it"
        ))
        .into()),
    }
}

/// The allocators whose libraries a running program has mapped, for `--verbose`.
pub fn mapped(memory: &ProcessMemory) -> String {
    let mut found: Vec<String> = Vec::new();
    for mapping in &memory.mappings {
        let path = Path::new(&mapping.name);
        let Some(allocator) = Allocator::of_library(path) else { continue };
        let line = format!("{allocator} ({})", mapping.name);
        if !found.contains(&line) {
            found.push(line);
        }
    }
    match found.is_empty() {
        true => "the allocator is that of the program or of its C library".to_owned(),
        false => format!("allocators that are mapped: {}", found.join(", ")),
    }
}
