//! Folders and files that commands make, with errors that name them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Makes a folder, and those above it.
pub fn make_folder(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}

pub fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

pub fn write(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

pub fn copy(from: &Path, to: &Path) -> Result<()> {
    let copied = fs::copy(from, to);
    copied.with_context(|| format!("cannot copy {} to {}", from.display(), to.display())).map(drop)
}

/// What lies in a folder, in the order of names.
pub fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let cannot = || format!("cannot read {}", folder.display());
    let entries = fs::read_dir(folder).with_context(cannot)?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>();
    let mut paths = paths.with_context(cannot)?;
    paths.sort();
    Ok(paths)
}

/// The files of a folder with an extension, in the order of their names.
pub fn with_extension(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut paths = entries(folder)?;
    paths.retain(|path| path.extension().is_some_and(|found| found == extension));
    Ok(paths)
}
