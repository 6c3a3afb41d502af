//! The programs and kernels that the lab needs on the host, and how to get them.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail, ensure};

use super::kernels;
use super::machine::QEMU;

/// Debian's packages of QEMU and of a busybox without shared libraries.
const PACKAGES: [&str; 2] = ["qemu-system-x86", "busybox-static"];

/// Something that the lab needs and does not find.
#[derive(Debug)]
pub struct Missing {
    /// The missing thing, in a sentence.
    pub what: String,
    /// The command to type.
    pub remedy: String,
}

/// The first program that keeps the lab from running, or `None` if it has all of them.
pub fn missing() -> Option<Missing> {
    if find(QEMU).is_none() {
        return Some(Missing {
            what: format!("{QEMU} is not installed"),
            remedy: format!("{} && cargo xtask lab setup", install_line()),
        });
    }
    if busybox().is_none() {
        return Some(Missing {
            what: "a static busybox is not installed, and tests and shells need its programs"
                .to_owned(),
            remedy: format!("{} && cargo xtask lab setup", install_line()),
        });
    }
    None
}

/// Like [`missing`], for a run that boots kernels of these series. It fetches those that are not in
/// the folder.
pub fn missing_kernel(kernel_folder: &Path, series: &[&'static str]) -> Option<Missing> {
    let error = series.iter().find_map(|series| kernels::get(kernel_folder, series).err())?;
    Some(Missing {
        what: format!("{error:#}"),
        remedy: "sudo apt-get update && cargo xtask lab setup".to_owned(),
    })
}

/// Installs the packages, as root on Debian, and fetches the kernels of these series.
pub fn install(kernel_folder: &Path, series: &[&'static str]) -> Result<()> {
    if find(QEMU).is_none() || busybox().is_none() {
        // SAFETY: the call takes no arguments and cannot fail.
        let is_root = unsafe { libc::geteuid() } == 0;
        if !is_root || find("apt-get").is_none() {
            bail!("packages can only be installed by root on Debian: {}", install_line());
        }
        for arguments in
            [&["update", "-q"][..], &["install", "-y", "-q", "--no-install-recommends"]]
        {
            let mut command = Command::new("apt-get");
            command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive");
            if arguments[0] == "install" {
                command.args(PACKAGES);
            }
            let status = command.status()?;
            ensure!(status.success(), "apt-get {} failed: {status}", arguments[0]);
        }
    }
    for series in series {
        let kernel = kernels::get(kernel_folder, series)?;
        println!("lab: Linux {} is in {}", kernel.release, kernel.image.display());
    }
    println!("lab: everything is installed");
    Ok(())
}

fn install_line() -> String {
    format!(
        "sudo apt-get update && sudo apt-get install --no-install-recommends {}",
        PACKAGES.join(" ")
    )
}

/// The path of a busybox without shared libraries. It provides the programs of a guest.
pub fn busybox() -> Option<PathBuf> {
    /// The path of the dynamic loader. The program headers of an ELF file contain it if the program
    /// needs shared libraries.
    const LOADER: &[u8] = b"/lib64/ld-linux";
    let path = find("busybox")?;
    let bytes = std::fs::read(&path).ok()?;
    // The first page has the headers and, if the program needs it, the path of the loader.
    let head = &bytes[..bytes.len().min(4096)];
    (!head.windows(LOADER.len()).any(|part| part == LOADER)).then_some(path)
}

/// The path of a program, from the directories of PATH.
fn find(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}
