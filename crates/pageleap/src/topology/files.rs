//! The kernel's files below a directory, read as if an attacker had written them.
//!
//! In a container, its maker chooses the file systems at `/sys` and `/proc`. With `--sysroot` the
//! user names any directory at all. Three rules follow:
//!
//! * No path leads out of the directory. Symbolic links inside the directory are followed, because
//!   sysfs is made of them (`node0/cpu0` leads to `../../cpu/cpu0`). With `openat2` (Linux 5.6) the
//!   kernel resolves paths without links. [`walk`] resolves the others, and all of them where the
//!   kernel is older or a seccomp filter refuses the call.
//! * Only regular files are read, and only directories are listed. A FIFO or a device is not even
//!   opened, because opening may wait or have effects. If one takes the place of a file between the
//!   check and the opening, it is opened without waiting and then refused.
//! * Reading is limited: in bytes of a file, in entries of a directory, and in the cost of all
//!   files of a machine together ([`Bounded`]).
//!
//! A file system that never answers a read (FUSE can do so) is out of scope: only a process of its
//! own could guard against it.

use std::ffi::{CStr, CString};
use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use pageleap_sys::{Entries, Errno, open_beneath};

use super::effort::Effort;
use super::shown::{escaped, shortened};
use super::walk::{file_type, walk};
use crate::error::Error;

/// Most bytes of a file. Files of sysfs have at most one page, lists of CPUs a few pages (Linux
/// 5.15), and `/proc/vmstat` has 5 KB.
const MAX_BYTES: u64 = 1 << 20;
/// Most bytes of a file that has a part for each CPU: `/proc/zoneinfo` has some 100 bytes for each
/// CPU and zone, `/proc/cpuinfo` some 2 KB for each CPU.
const MAX_BYTES_BY_CPU: u64 = 64 << 20;
/// Most bytes of a file with one number. The kernel writes some twenty.
const MAX_NUMBER_BYTES: u64 = 4096;
/// Most entries of a directory. The directory of a node has one entry per memory block: 16 TB in
/// blocks of 256 MB.
pub(super) const MAX_ENTRIES: usize = 65_536;

/// The kernel's files below a directory, which is `/` for this machine. Paths are relative to the
/// directory, such as `sys/devices/system/node/online` or `proc/self/status`.
///
/// Nothing outside the directory is read, whatever it contains, and no call waits on a FIFO. At
/// most 1 MB of a file ([`text_by_cpu`](SysFiles::text_by_cpu): 64 MB) and 65 536 entries of a
/// directory are read. Everything else is an error with its reason. The directory is opened again for each file, so the value can be copied and kept. It
/// need not be listable: `/` is closed in some sandboxes.
#[derive(Clone, Debug)]
pub struct SysFiles {
    root: PathBuf,
    resolve: Resolve,
}

/// How symbolic links are resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resolve {
    /// By the kernel if there are none and it can, else by [`walk`].
    Kernel,
    /// Always by [`walk`].
    #[cfg(test)]
    Walk,
}

/// The kind of file that a path has to lead to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    File,
    Directory,
}

impl SysFiles {
    /// The files of this machine.
    pub fn host() -> Self {
        SysFiles::at("/")
    }

    /// The files below another directory: a container's, or a recording of another machine.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        SysFiles { root: root.into(), resolve: Resolve::Kernel }
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The text of a file, without the zeros at its end: some kernels before 5.16 write one.
    ///
    /// # Errors
    /// [`Error::SystemFile`] if the file does not exist, is not a regular file, lies outside the
    /// directory, is larger than 1 MB, is not UTF-8, or cannot be read.
    pub fn text(&self, path: &str) -> Result<String, Error> {
        Bounded::new(self).text(path)
    }

    /// The text of a file, or `None` if the file or a directory on its path does not exist. A
    /// missing root directory is an error.
    ///
    /// # Errors
    /// As for [`text`](SysFiles::text), except for a file that does not exist.
    pub fn text_if_there(&self, path: &str) -> Result<Option<String>, Error> {
        Bounded::new(self).text_if_there(path)
    }

    /// The text of a file with a part for each CPU, such as `proc/cpuinfo` or `proc/zoneinfo`, which
    /// may be large: up to 64 MB.
    ///
    /// # Errors
    /// As for [`text`](SysFiles::text), with 64 MB in place of 1 MB.
    pub fn text_by_cpu(&self, path: &str) -> Result<String, Error> {
        let text = self.text_within(path, MAX_BYTES_BY_CPU, &Effort::new())?;
        text.ok_or_else(|| self.missing(path))
    }

    fn text_within(&self, path: &str, most: u64, effort: &Effort) -> Result<Option<String>, Error> {
        let file = match self.open(path, Wanted::File, effort) {
            Err(Refusal::Path(Errno(libc::ENOENT))) => return Ok(None),
            other => other.map_err(|why| self.error(path, why))?,
        };
        let mut bytes = Vec::new();
        // One byte beyond the limit tells a file that is too large from one that just fits.
        match file.take(most + 1).read_to_end(&mut bytes) {
            Err(error) => return Err(self.failed(path, &error)),
            Ok(_) if bytes.len() as u64 > most => {
                return Err(self.damaged(path, format!("it has more than {} KB", most >> 10)));
            }
            Ok(_) => {}
        }
        effort.take_bytes(bytes.len()).map_err(|errno| self.error(path, Refusal::Path(errno)))?;
        // Kernels before 5.16 end some lists with a zero behind the line (`node/online`).
        while bytes.pop_if(|byte| *byte == 0).is_some() {}
        match String::from_utf8(bytes) {
            Ok(text) => Ok(Some(text)),
            Err(_) => Err(self.damaged(path, "it is not UTF-8 text".into())),
        }
    }

    /// The unsigned integer that is the whole content of a file.
    ///
    /// # Errors
    /// As for [`text`](SysFiles::text), or if the file is larger than 4 KB, or the text is not an
    /// unsigned integer of 64 bits.
    pub fn number(&self, path: &str) -> Result<u64, Error> {
        Bounded::new(self).number(path)
    }

    /// The names in a directory, sorted. Names that are not UTF-8 are left out: the kernel makes no
    /// such names.
    ///
    /// # Errors
    /// [`Error::SystemFile`] if the directory does not exist, is not a directory, lies outside the
    /// root directory, has more than 65 536 entries, or cannot be read.
    pub fn names(&self, directory: &str) -> Result<Vec<String>, Error> {
        Bounded::new(self)
            .names_if_there(directory, MAX_ENTRIES)?
            .ok_or_else(|| self.missing(directory))
    }

    fn missing(&self, path: &str) -> Error {
        self.error(path, Refusal::Path(Errno(libc::ENOENT)))
    }

    /// Whether these are the files of this machine, and not those of another one or of a container.
    fn is_host(&self) -> bool {
        self.root == Path::new("/")
    }

    /// An error about the content of a file.
    pub(crate) fn damaged(&self, path: &str, reason: String) -> Error {
        let remedy = if self.is_host() {
            "if the kernel itself wrote this, report it with the kernel version"
        } else {
            "record the file again; if the kernel itself wrote this, report it with the kernel \
             version"
        };
        Error::SystemFile { path: self.shown(path), reason, remedy }
    }

    /// A path in the form in which errors show it: below the root, and [`escaped`].
    pub fn shown(&self, path: &str) -> String {
        escaped(&self.root.join(path).display().to_string())
    }

    /// Opens the target of `path` if it is of the wanted kind. Anything else is not opened, unless
    /// the path changes at this very moment.
    ///
    /// On this machine, `proc/self` is read as the calling thread sees it, because the main thread
    /// may have ended (`pageleap_sys::open_own`).
    fn open(&self, path: &str, wanted: Wanted, effort: &Effort) -> Result<File, Refusal> {
        let own = path.strip_prefix("proc/self/").filter(|_| self.is_host());
        if let Some(name) = own
            && let Ok(file) =
                self.open_as_named(&format!("proc/thread-self/{name}"), wanted, effort)
        {
            return Ok(file);
        }
        self.open_as_named(path, wanted, effort)
    }

    fn open_as_named(&self, path: &str, wanted: Wanted, effort: &Effort) -> Result<File, Refusal> {
        effort.take_file().map_err(Refusal::Path)?;
        // Only a starting point: O_PATH needs no right to list the directory. A Landlock sandbox
        // refuses to list `/`, and so does a mode of 0711.
        let mut anchor = OpenOptions::new();
        anchor.read(true).custom_flags(libc::O_DIRECTORY | libc::O_PATH);
        let root = anchor.open(&self.root).map_err(Refusal::Root)?;
        let path = CString::new(path).map_err(|_| Refusal::Path(Errno(libc::EINVAL)))?;
        let open = |flags| {
            let opened = self.resolve(root.as_fd(), &path, flags, effort);
            opened.map(File::from).map_err(Refusal::Path)
        };
        let right_kind = |file: File| {
            let kind = file_type(&file).map_err(Refusal::Path)?;
            let right = if wanted == Wanted::File { kind.is_file() } else { kind.is_dir() };
            if right { Ok(file) } else { Err(Refusal::Kind(kind)) }
        };
        right_kind(open(libc::O_PATH)?)?;
        right_kind(open(libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY)?)
    }

    fn resolve(
        &self,
        root: BorrowedFd,
        path: &CStr,
        flags: libc::c_int,
        effort: &Effort,
    ) -> Result<OwnedFd, Errno> {
        if self.resolve == Resolve::Kernel {
            match open_beneath(root, path, flags) {
                // ELOOP: a symbolic link, whose steps have to be counted. ENOSYS: an older kernel.
                // ENOSYS or EPERM: a filter refuses the call. EAGAIN: a directory was moved
                // meanwhile.
                Err(Errno(libc::ELOOP | libc::ENOSYS | libc::EPERM | libc::EAGAIN)) => {}
                other => return other,
            }
        }
        walk(root, path, flags, effort)
    }

    /// An error of a call on a file.
    fn failed(&self, path: &str, error: &io::Error) -> Error {
        let remedy = match error.raw_os_error() {
            _ if self.is_host() => return Error::system_file(&self.shown(path), error),
            Some(libc::EMFILE | libc::ENFILE) => {
                return Error::system_file(&self.shown(path), error);
            }
            Some(libc::ENOENT) => "add the file to the directory, or name another directory",
            _ => "allow this user to read it",
        };
        Error::SystemFile { path: self.shown(path), reason: error.to_string(), remedy }
    }

    fn error(&self, path: &str, why: Refusal) -> Error {
        let not_of_a_kernel = |reason: &str| {
            let remedy = if self.is_host() {
                "unmount what lies there: the kernel makes no such tree"
            } else {
                "remove it, or name another directory: the kernel makes no such tree"
            };
            Error::SystemFile { path: self.shown(path), reason: reason.into(), remedy }
        };
        match why {
            Refusal::Root(error) => {
                let remedy = match error.raw_os_error() {
                    Some(libc::EMFILE | libc::ENFILE) => return self.failed("", &error),
                    Some(libc::ENOENT | libc::ENOTDIR) => "name a directory that exists",
                    _ => "name a directory that this user may enter",
                };
                let path = escaped(&self.root.display().to_string());
                Error::SystemFile { path, reason: error.to_string(), remedy }
            }
            Refusal::Path(Errno(libc::EXDEV)) => {
                not_of_a_kernel("a symbolic link leads out of the directory")
            }
            Refusal::Path(Errno(libc::ELOOP)) => not_of_a_kernel(
                "too many symbolic links, or a link of /proc that stands for an open file",
            ),
            Refusal::Path(Errno(libc::EDQUOT)) => {
                not_of_a_kernel("with what was read before, it is more than any machine has")
            }
            Refusal::Path(errno) => self.failed(path, &errno.into()),
            Refusal::Kind(kind) => {
                let found = match kind {
                    k if k.is_dir() => "a directory",
                    k if k.is_file() => "a file",
                    k if k.is_fifo() => "a FIFO",
                    k if k.is_socket() => "a socket",
                    _ => "a device",
                };
                self.damaged(path, format!("it is {found}"))
            }
        }
    }
}

/// The files of one machine, read within limits for all of them together.
#[derive(Debug)]
pub(super) struct Bounded<'a> {
    files: &'a SysFiles,
    effort: Effort,
}

impl<'a> Bounded<'a> {
    pub(super) fn new(files: &'a SysFiles) -> Bounded<'a> {
        Bounded { files, effort: Effort::new() }
    }

    /// As [`SysFiles::text`].
    pub(super) fn text(&self, path: &str) -> Result<String, Error> {
        self.text_if_there(path)?.ok_or_else(|| self.files.missing(path))
    }

    /// As [`SysFiles::text_if_there`].
    pub(super) fn text_if_there(&self, path: &str) -> Result<Option<String>, Error> {
        self.files.text_within(path, MAX_BYTES, &self.effort)
    }

    /// As [`SysFiles::number`].
    pub(super) fn number(&self, path: &str) -> Result<u64, Error> {
        self.number_if_there(path)?.ok_or_else(|| self.files.missing(path))
    }

    /// The same, or `None` if the file does not exist.
    pub(super) fn number_if_there(&self, path: &str) -> Result<Option<u64>, Error> {
        let text = self.files.text_within(path, MAX_NUMBER_BYTES, &self.effort)?;
        let parse = |text: String| {
            let text = text.trim_ascii();
            let damaged = |_| self.damaged(path, format!("`{}` is not a number", shortened(text)));
            text.parse().map_err(damaged)
        };
        text.map(parse).transpose()
    }

    /// The names in a directory of at most `most` entries, sorted, or `None` if it does not exist.
    pub(super) fn names_if_there(
        &self,
        directory: &str,
        most: usize,
    ) -> Result<Option<Vec<String>>, Error> {
        let failed = |errno| self.files.error(directory, Refusal::Path(errno));
        let open = match self.files.open(directory, Wanted::Directory, &self.effort) {
            Err(Refusal::Path(Errno(libc::ENOENT))) => return Ok(None),
            other => other.map_err(|why| self.files.error(directory, why))?,
        };
        let mut names = Vec::new();
        for (count, name) in Entries::of(open.into()).map_err(failed)?.enumerate() {
            if count == most {
                return Err(self.damaged(directory, format!("it has more than {most} entries")));
            }
            self.effort.take_entries(1).map_err(failed)?;
            names.extend(name.map_err(failed)?.into_string().ok());
        }
        names.sort_unstable();
        Ok(Some(names))
    }

    /// The error for a file that has to be there.
    pub(super) fn missing(&self, path: &str) -> Error {
        self.files.missing(path)
    }

    /// As [`SysFiles::damaged`].
    pub(super) fn damaged(&self, path: &str, reason: String) -> Error {
        self.files.damaged(path, reason)
    }
}

/// Why a path was not opened.
enum Refusal {
    /// The root directory cannot be opened.
    Root(io::Error),
    /// The path cannot be resolved or opened.
    Path(Errno),
    /// The path leads to something of another kind.
    Kind(FileType),
}

#[cfg(all(test, not(miri)))]
#[path = "files_tests.rs"]
mod tests;
