//! Resolves a path step by step, where the kernel cannot: without `openat2`, and where there is a
//! symbolic link on the path.
//!
//! Each step is opened relative to the descriptor of the step before. The walk reads symbolic links
//! itself, and climbs only to descriptors that it came through.

use std::ffi::{CStr, CString};
use std::fs::{File, FileType};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use pageleap_sys::{Errno, link_target, open_entry};

use super::effort::Effort;

/// Most symbolic links on one path, as many as the kernel follows (`MAXSYMLINKS`).
const MAX_LINKS: usize = 40;
/// Most nested directories on one path. Paths of sysfs have ten.
const MAX_DEPTH: usize = 64;

/// Opens `path` below `root`, as [`open_beneath`](pageleap_sys::open_beneath) does and with the
/// same error numbers, but follows symbolic links. EDQUOT: the links have more steps than `effort`
/// leaves.
pub(super) fn walk(
    root: BorrowedFd,
    path: &CStr,
    flags: libc::c_int,
    effort: &Effort,
) -> Result<OwnedFd, Errno> {
    let parts = |path: &CStr| -> Vec<CString> {
        let parts = path.to_bytes().split(|byte| *byte == b'/').rev();
        parts.map(|part| CString::new(part).expect("part of a C string")).collect()
    };
    let is_absolute = |path: &CStr| path.to_bytes().starts_with(b"/");
    if is_absolute(path) {
        return Err(Errno(libc::EXDEV));
    }
    // The directories between the root and the current step. The walk climbs by these descriptors,
    // so that moving a directory cannot lead it elsewhere.
    let mut directories: Vec<OwnedFd> = Vec::new();
    // The remaining steps of the path, the next step last.
    let mut left = parts(path);
    let mut links = 0;
    while let Some(name) = left.pop() {
        let here = directories.last().map_or(root, OwnedFd::as_fd);
        match name.to_bytes() {
            b"" | b"." => continue,
            b".." => {
                directories.pop().ok_or(Errno(libc::EXDEV))?;
                continue;
            }
            _ => {}
        }
        let step = File::from(open_entry(here, &name, libc::O_PATH)?);
        let kind = file_type(&step)?;
        if kind.is_symlink() {
            links += 1;
            if links > MAX_LINKS {
                return Err(Errno(libc::ELOOP));
            }
            let target = link_target(step.as_fd())?;
            if is_absolute(&target) {
                return Err(Errno(libc::EXDEV));
            }
            let steps = parts(&target);
            effort.take_steps(steps.len())?;
            left.extend(steps);
        } else if kind.is_dir() {
            if directories.len() == MAX_DEPTH {
                return Err(Errno(libc::ENAMETOOLONG));
            }
            directories.push(step.into());
        } else if left.is_empty() {
            return open_entry(here, &name, flags);
        } else {
            return Err(Errno(libc::ENOTDIR));
        }
    }
    open_entry(directories.last().map_or(root, OwnedFd::as_fd), c".", flags)
}

pub(super) fn file_type(file: &File) -> Result<FileType, Errno> {
    let metadata =
        file.metadata().map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
    Ok(metadata.file_type())
}
