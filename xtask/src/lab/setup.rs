//! What the lab needs of the host, and how to get it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail, ensure};

use super::kernels::{self, SERIES};
use super::machine::QEMU;

/// Debian's packages of QEMU and of a busybox that needs no libraries.
const PACKAGES: [&str; 2] = ["qemu-system-x86", "busybox-static"];

/// Something that is not there.
#[derive(Debug)]
pub struct Missing {
    /// What.
    pub what: String,
    /// What to type.
    pub remedy: String,
}

/// What keeps the lab from running, if anything does.
pub fn missing(kernel_folder: &Path) -> Option<Missing> {
    if find(QEMU).is_none() {
        return Some(Missing {
            what: format!("there is no {QEMU}"),
            remedy: format!("{} && cargo xtask lab setup", install_line()),
        });
    }
    if busybox().is_none() {
        return Some(Missing {
            what: "there is no static busybox, for tests and shells that start other programs"
                .to_owned(),
            remedy: format!("{} && cargo xtask lab setup", install_line()),
        });
    }
    // Kernels that are not here yet are fetched when they are needed; that takes Debian's tools.
    let without = SERIES.into_iter().find(|series| !kernels::is_cached(kernel_folder, series))?;
    let tool = ["apt-cache", "apt-get", "dpkg"].into_iter().find(|tool| find(tool).is_none())?;
    Some(Missing {
        what: format!(
            "Linux {without} is not in {}, and there is no {tool} to get it",
            kernel_folder.display()
        ),
        remedy: "use Debian 12 or 13, or copy that folder from such a machine".to_owned(),
    })
}

/// Installs the packages (as root on Debian) and fetches the kernels.
pub fn install(kernel_folder: &Path) -> Result<()> {
    if find(QEMU).is_none() || busybox().is_none() {
        // SAFETY: a plain call.
        let is_root = unsafe { libc::geteuid() } == 0;
        if !is_root || find("apt-get").is_none() {
            bail!("only root can install packages, on Debian: {}", install_line());
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
    for series in SERIES {
        let kernel = kernels::get(kernel_folder, series)?;
        println!("lab: Linux {} is in {}", kernel.release, kernel.image.display());
    }
    println!("lab: everything is there");
    Ok(())
}

fn install_line() -> String {
    format!(
        "sudo apt-get update && sudo apt-get install --no-install-recommends {}",
        PACKAGES.join(" ")
    )
}

/// A busybox without shared libraries: the programs of a guest.
pub fn busybox() -> Option<PathBuf> {
    /// In the program headers of an ELF file that needs a dynamic loader stands its path.
    const LOADER: &[u8] = b"/lib64/ld-linux";
    let path = find("busybox")?;
    let bytes = std::fs::read(&path).ok()?;
    // The first page holds the headers and, if there is one, the loader's path.
    let head = &bytes[..bytes.len().min(4096)];
    (!head.windows(LOADER.len()).any(|part| part == LOADER)).then_some(path)
}

/// A program in PATH.
fn find(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}
