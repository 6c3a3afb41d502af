//! Debian's kernels for cloud machines. They are downloaded as packages, unpacked without being
//! installed, and kept below `target/lab/kernels`.
//!
//! Everything that the lab needs is built into these kernels: NUMA, hugetlb, cgroups, serial ports.
//! The guests load no modules.

use std::cmp::Ordering;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// The kernel series of the lab. 6.1 is that of Debian 12 and the oldest that is tested. 6.12 comes
/// with the security updates of Debian 12, and with Debian 13.
pub const SERIES: [&str; 2] = ["6.1", "6.12"];

/// A kernel to boot.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// One of [`SERIES`].
    pub series: &'static str,
    /// The compressed kernel image.
    pub image: PathBuf,
    /// The kernel's release, as `uname -r` prints it.
    pub release: String,
}

/// The kernel of a series: from the cache below `folder`, or else from Debian's package archive.
pub fn get(folder: &Path, series: &'static str) -> Result<Kernel> {
    let folder = folder.join(series);
    if let Some(kernel) = cached(&folder, series) {
        return Ok(kernel);
    }
    println!("lab: getting Linux {series} from the package archive");
    fetch(&folder, series).with_context(|| {
        format!(
            "cannot get Debian's Linux {series}. On Debian with a network, run \
             `apt-get update && cargo xtask lab setup`. Elsewhere, put a bzImage into {} under the \
             name vmlinuz-RELEASE",
            folder.display()
        )
    })
}

fn cached(folder: &Path, series: &'static str) -> Option<Kernel> {
    let entries = fs::read_dir(folder).ok()?;
    let images = entries.flatten().filter_map(|entry| {
        let release = entry.file_name().to_string_lossy().strip_prefix("vmlinuz-")?.to_owned();
        // A user may have put a kernel of another series here.
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
        format!(
            "the package lists have no {prefix}*-cloud-amd64: run `apt-get update` on Debian 12 \
             or 13"
        )
    })?;
    let work = folder.join("work");
    // An interrupted download may have left another version.
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("cannot clear {}", work.display()))?;
    }
    fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    output(Command::new("apt-get").args(["download", package]).current_dir(&work))?;
    let is_package = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "deb");
    let file = fs::read_dir(&work)?.flatten().map(|entry| entry.path()).find(is_package);
    let file = file.context("apt-get download left no package")?;
    output(Command::new("dpkg").arg("-x").arg(&file).arg(&work))?;
    let release = package.trim_start_matches("linux-image-");
    let image = work.join("boot").join(format!("vmlinuz-{release}"));
    ensure!(image.is_file(), "{package} does not contain {}", image.display());
    // The image is moved last, so that every image in the cache is complete.
    fs::rename(&image, folder.join(format!("vmlinuz-{release}")))?;
    fs::remove_dir_all(&work)?;
    cached(folder, series).context("the kernel is not in the cache after its download")
}

/// The newest signed package of a list of package names.
fn newest<'a>(names: impl Iterator<Item = &'a str>, prefix: &str) -> Option<&'a str> {
    names
        .filter(|name| name.starts_with(prefix) && name.ends_with("-cloud-amd64"))
        .max_by(|a, b| by_version(a, b))
}

/// Compares two texts by the numbers that they contain.
fn by_version(a: &str, b: &str) -> Ordering {
    let numbers = |text: &str| -> Vec<u64> {
        text.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
    };
    numbers(a).cmp(&numbers(b))
}

/// Runs a command that must succeed. Returns its standard output.
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
    fn a_cached_kernel_is_not_fetched_again() {
        let scratch = Scratch::new("kernels");
        assert!(cached(&scratch.path().join("6.12"), "6.12").is_none());
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
