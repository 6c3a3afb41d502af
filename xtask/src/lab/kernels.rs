//! Debian's kernels for cloud machines: downloaded as packages, unpacked without being installed,
//! kept below `target/lab/kernels`.
//!
//! These have everything built in that the lab needs: NUMA, hugetlb, cgroups, serial ports. Nothing
//! of them is loaded as a module.

use std::cmp::Ordering;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// The series that the lab knows: the one of Debian 12, the oldest that is tested, and the one of
/// its security updates (and of Debian 13).
pub const SERIES: [&str; 2] = ["6.1", "6.12"];

/// A kernel that can be booted.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// One of [`SERIES`].
    pub series: &'static str,
    /// The compressed image.
    pub image: PathBuf,
    /// What `uname -r` will say.
    pub release: String,
}

/// The kernel of a series, from the cache below `folder` or else from the package archive.
pub fn get(folder: &Path, series: &'static str) -> Result<Kernel> {
    let folder = folder.join(series);
    if let Some(kernel) = cached(&folder, series) {
        return Ok(kernel);
    }
    println!("lab: getting Linux {series} from the package archive");
    fetch(&folder, series).with_context(|| {
        format!(
            "cannot get Debian's Linux {series}. On a Debian machine with network: apt-get update && cargo xtask lab setup. Elsewhere, \
             put a bzImage into {} under the name vmlinuz-RELEASE",
            folder.display()
        )
    })
}

/// Whether a series is in the cache.
pub fn is_cached(folder: &Path, series: &'static str) -> bool {
    cached(&folder.join(series), series).is_some()
}

fn cached(folder: &Path, series: &'static str) -> Option<Kernel> {
    let entries = fs::read_dir(folder).ok()?;
    let images = entries.flatten().filter_map(|entry| {
        let release = entry.file_name().to_string_lossy().strip_prefix("vmlinuz-")?.to_owned();
        // Somebody may have put another kernel here.
        let rest = release.strip_prefix(series)?;
        rest.starts_with('.').then_some(())?;
        Some(Kernel { series, image: entry.path(), release })
    });
    images.max_by(|a, b| by_version(&a.release, &b.release))
}

fn fetch(folder: &Path, series: &'static str) -> Result<Kernel> {
    let prefix = format!("linux-image-{series}.");
    let names = output(Command::new("apt-cache").args(["pkgnames", &prefix]))?;
    let package = newest(names.lines(), &prefix).with_context(|| {
        format!("the package lists name no {prefix}*-cloud-amd64: run `apt-get update`, on Debian 12 or 13")
    })?;
    let work = folder.join("work");
    // What an interrupted download has left may be another version.
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("cannot clear {}", work.display()))?;
    }
    fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    output(Command::new("apt-get").args(["download", package]).current_dir(&work))?;
    let is_package = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "deb");
    let file = fs::read_dir(&work)?.flatten().map(|entry| entry.path()).find(is_package);
    let file = file.context("apt-get download has left no package")?;
    output(Command::new("dpkg").arg("-x").arg(&file).arg(&work))?;
    let release = package.trim_start_matches("linux-image-");
    let image = work.join("boot").join(format!("vmlinuz-{release}"));
    ensure!(image.is_file(), "{package} holds no {}", image.display());
    // Renamed last: what is in the cache is whole.
    fs::rename(&image, folder.join(format!("vmlinuz-{release}")))?;
    fs::remove_dir_all(&work)?;
    cached(folder, series).context("the cache is empty")
}

/// The newest signed package among names of packages.
fn newest<'a>(names: impl Iterator<Item = &'a str>, prefix: &str) -> Option<&'a str> {
    names
        .filter(|name| name.starts_with(prefix) && name.ends_with("-cloud-amd64"))
        .max_by(|a, b| by_version(a, b))
}

/// Orders by the numbers in two texts.
fn by_version(a: &str, b: &str) -> Ordering {
    let numbers = |text: &str| -> Vec<u64> {
        text.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
    };
    numbers(a).cmp(&numbers(b))
}

/// Runs a command that has to succeed, and returns what it prints.
fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot start `{name}`"))?;
    if !output.status.success() {
        bail!("`{name}` failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn the_newest_signed_image_is_taken() {
        let names = [
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64-unsigned",
            "linux-image-6.1.0-48-cloud-amd64",
            "linux-image-6.1.0-48-cloud-amd64-dbg",
            "linux-image-6.1.0-50-amd64",
            "linux-image-6.12.1-cloud-amd64",
        ];
        assert_eq!(newest(names.into_iter(), "linux-image-6.1."), Some(names[2]));
        assert_eq!(newest(names.into_iter(), "linux-image-6.13."), None);
    }

    #[test]
    fn what_is_in_the_cache_is_not_fetched() {
        let scratch = Scratch::new("kernels");
        assert!(!is_cached(scratch.path(), "6.12"));
        let folder = scratch.path().join("6.12");
        fs::create_dir_all(&folder).unwrap();
        for release in [
            "6.12.9+deb12-cloud-amd64",
            "6.12.117+deb12-cloud-amd64",
            "6.18.1-cloud-amd64",
            "6.121",
        ] {
            fs::write(folder.join(format!("vmlinuz-{release}")), "").unwrap();
        }
        let kernel = get(scratch.path(), "6.12").unwrap();
        assert_eq!(kernel.release, "6.12.117+deb12-cloud-amd64");
        assert!(kernel.image.is_file());
    }
}
