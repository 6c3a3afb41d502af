//! The kernel's files below a folder, read as if somebody hostile had written them.
//!
//! In a container, `/sys` and `/proc` are what its maker mounted there, and `--sysroot` names any
//! folder at all. So:
//!
//! * No link is followed out of the folder. Links inside it are: sysfs is made of them
//!   (`node0/cpu0` leads to `../../cpu/cpu0`). The kernel resolves the path where it has `openat2`
//!   (Linux 5.6). Where it has not, or a seccomp filter refuses the call, [`walk`] opens one step
//!   after the other, each relative to the descriptor of the step before, reads links itself, and
//!   climbs only by descriptors that it came through.
//! * Only regular files are read and only folders listed. A FIFO or a device is not even opened,
//!   because that may wait or have effects; one that takes the place of a file between the look and
//!   the opening is opened without waiting and refused then.
//! * What is read has a cap: bytes of a file, entries of a folder.
//!
//! A file system that answers a read never (FUSE can) is not defended against: nothing short of
//! another process could.

use std::ffi::{CStr, CString};
use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use pageleap_sys::{Entries, Errno, link_target, open_beneath, open_entry};

use crate::error::Error;

/// Bytes of the largest file that is read. sysfs files are at most a page, lists of CPUs (Linux
/// 5.15) a few; `/proc/vmstat` has 5 KB.
const MAX_BYTES: u64 = 1 << 20;
/// Entries of the largest folder that is listed. A node's folder has one per memory block: 16 TB in
/// blocks of 256 MB.
const MAX_ENTRIES: usize = 65_536;
/// Links followed on one path, as many as the kernel follows (`MAXSYMLINKS`).
const MAX_LINKS: usize = 40;
/// Folders below each other on one path; sysfs has ten.
const MAX_DEPTH: usize = 64;
/// Characters of damaged text that an error shows.
const MAX_SHOWN: usize = 40;

/// The kernel's files below a folder, which is `/` on the machine itself. Paths are relative to it:
/// `sys/devices/system/node/online`, `proc/self/status`.
///
/// Whatever lies there, nothing outside the folder is read, no call waits on a FIFO, and no more
/// than 1 MB of a file or 65 536 entries of a folder are taken; the rest are errors that say what
/// is wrong. Opened anew for every file, so that a value can be copied and kept.
#[derive(Clone, Debug)]
pub struct SysFiles {
    root: PathBuf,
    resolve: Resolve,
}

/// Who follows links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resolve {
    /// The kernel if it can.
    Kernel,
    /// [`walk`], as where the kernel cannot.
    #[cfg(test)]
    Walk,
}

/// What a path must lead to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    File,
    Folder,
}

impl SysFiles {
    /// The files of this machine.
    pub fn host() -> Self {
        SysFiles::at("/")
    }

    /// Those below another folder: of a container, or recorded on another machine.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        SysFiles { root: root.into(), resolve: Resolve::Kernel }
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The text of a file.
    ///
    /// # Errors
    /// [`Error::SystemFile`] if it is not there, no regular file, outside the folder, larger than 1
    /// MB, not UTF-8, or cannot be read.
    pub fn text(&self, path: &str) -> Result<String, Error> {
        self.text_if_there(path)?
            .ok_or_else(|| self.error(path, Refusal::Path(Errno(libc::ENOENT))))
    }

    /// The text of a file, or `None` if it or a folder on the way to it does not exist. A folder of
    /// `self` that does not exist is an error.
    ///
    /// # Errors
    /// As for [`text`](SysFiles::text), except for that.
    pub fn text_if_there(&self, path: &str) -> Result<Option<String>, Error> {
        let file = match self.open(path, Wanted::File) {
            Err(Refusal::Path(Errno(libc::ENOENT))) => return Ok(None),
            other => other.map_err(|why| self.error(path, why))?,
        };
        let mut bytes = Vec::new();
        // One byte more than is allowed tells a file that is too large from one that just fits.
        match file.take(MAX_BYTES + 1).read_to_end(&mut bytes) {
            Err(error) => Err(Error::system_file(&self.shown(path), &error)),
            Ok(_) if bytes.len() as u64 > MAX_BYTES => {
                Err(self.damaged(path, format!("it has more than {} KB", MAX_BYTES >> 10)))
            }
            Ok(_) => match String::from_utf8(bytes) {
                Ok(text) => Ok(Some(text)),
                Err(_) => Err(self.damaged(path, "it is not text".into())),
            },
        }
    }

    /// The whole number that a file consists of.
    ///
    /// # Errors
    /// As for [`text`](SysFiles::text), or if it is no number of 64 bits without sign.
    pub fn number(&self, path: &str) -> Result<u64, Error> {
        let text = self.text(path)?;
        let text = text.trim_ascii();
        text.parse()
            .map_err(|_| self.damaged(path, format!("`{}` is not a number", shortened(text))))
    }

    /// The names in a folder, sorted. Names that are not UTF-8 are left out: the kernel makes none.
    ///
    /// # Errors
    /// [`Error::SystemFile`] if it is not there, no folder, outside the folder of `self`, has more
    /// than 65 536 entries, or cannot be read.
    pub fn names(&self, folder: &str) -> Result<Vec<String>, Error> {
        self.names_if_there(folder, MAX_ENTRIES)?
            .ok_or_else(|| self.error(folder, Refusal::Path(Errno(libc::ENOENT))))
    }

    /// The names in a folder that has at most `most` entries, or `None` if it does not exist.
    pub(super) fn names_if_there(
        &self,
        folder: &str,
        most: usize,
    ) -> Result<Option<Vec<String>>, Error> {
        let open = match self.open(folder, Wanted::Folder) {
            Err(Refusal::Path(Errno(libc::ENOENT))) => return Ok(None),
            other => other.map_err(|why| self.error(folder, why))?,
        };
        let failed = |errno| self.error(folder, Refusal::Path(errno));
        let mut names = Vec::new();
        for (count, name) in Entries::of(open.into()).map_err(failed)?.enumerate() {
            if count == most {
                return Err(self.damaged(folder, format!("it has more than {most} entries")));
            }
            names.extend(name.map_err(failed)?.into_string().ok());
        }
        names.sort_unstable();
        Ok(Some(names))
    }

    /// An error about what is in a file.
    pub(crate) fn damaged(&self, path: &str, reason: String) -> Error {
        Error::SystemFile {
            path: self.shown(path),
            reason,
            remedy: "if the kernel itself wrote this, report it with the kernel version",
        }
    }

    /// A path as errors name it.
    pub(crate) fn shown(&self, path: &str) -> String {
        escaped(&self.root.join(path).display().to_string())
    }

    /// Opens what `path` leads to if it is what is wanted, and never anything else, unless it
    /// changes in this moment.
    fn open(&self, path: &str, wanted: Wanted) -> Result<File, Refusal> {
        let mut as_folder = OpenOptions::new();
        as_folder.read(true).custom_flags(libc::O_DIRECTORY);
        let root = as_folder.open(&self.root).map_err(Refusal::Root)?;
        let path = CString::new(path).map_err(|_| Refusal::Path(Errno(libc::EINVAL)))?;
        let open =
            |flags| self.resolve(root.as_fd(), &path, flags).map(File::from).map_err(Refusal::Path);
        let right_kind = |file: File| {
            let kind = file_type(&file).map_err(Refusal::Path)?;
            let right = if wanted == Wanted::File { kind.is_file() } else { kind.is_dir() };
            if right { Ok(file) } else { Err(Refusal::Kind(kind)) }
        };
        right_kind(open(libc::O_PATH)?)?;
        right_kind(open(libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY)?)
    }

    fn resolve(&self, root: BorrowedFd, path: &CStr, flags: libc::c_int) -> Result<OwnedFd, Errno> {
        if self.resolve == Resolve::Kernel {
            match open_beneath(root, path, flags) {
                // Not there, or refused by a filter; EAGAIN: a folder was moved meanwhile.
                Err(Errno(libc::ENOSYS | libc::EPERM | libc::EAGAIN)) => {}
                other => return other,
            }
        }
        walk(root, path, flags)
    }

    fn error(&self, path: &str, why: Refusal) -> Error {
        let link = |reason: &str| Error::SystemFile {
            path: self.shown(path),
            reason: reason.into(),
            remedy: "the kernel makes no such link: remove it, or read another folder",
        };
        match why {
            Refusal::Root(error) => Error::SystemFile {
                path: escaped(&self.root.display().to_string()),
                reason: error.to_string(),
                remedy: "name a folder that exists and can be read",
            },
            Refusal::Path(Errno(libc::EXDEV)) => {
                link("a link leads out of the folder that is read")
            }
            Refusal::Path(Errno(libc::ELOOP)) => {
                link("too many links, or one of those in /proc that name open files")
            }
            Refusal::Path(errno) => Error::system_file(&self.shown(path), &errno.into()),
            Refusal::Kind(kind) => {
                let found = match kind {
                    k if k.is_dir() => "a folder",
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

/// Why something was not opened.
enum Refusal {
    /// The folder that everything is relative to.
    Root(io::Error),
    Path(Errno),
    /// It is not what was wanted.
    Kind(FileType),
}

fn file_type(file: &File) -> Result<FileType, Errno> {
    let metadata =
        file.metadata().map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
    Ok(metadata.file_type())
}

/// Opens `path` below `root` without the kernel's help: what [`open_beneath`] does, with the same
/// error numbers.
fn walk(root: BorrowedFd, path: &CStr, flags: libc::c_int) -> Result<OwnedFd, Errno> {
    let parts = |path: &CStr| -> Vec<CString> {
        let parts = path.to_bytes().split(|byte| *byte == b'/').rev();
        parts.map(|part| CString::new(part).expect("part of a C string")).collect()
    };
    let is_absolute = |path: &CStr| path.to_bytes().starts_with(b"/");
    if is_absolute(path) {
        return Err(Errno(libc::EXDEV));
    }
    // The folders between the root and where the walk is. It climbs by these descriptors, so that
    // nobody can lead it elsewhere by moving a folder.
    let mut folders: Vec<OwnedFd> = Vec::new();
    // What is left of the path, the next step last.
    let mut left = parts(path);
    let mut links = 0;
    while let Some(name) = left.pop() {
        let here = folders.last().map_or(root, OwnedFd::as_fd);
        match name.to_bytes() {
            b"" | b"." => continue,
            b".." => {
                folders.pop().ok_or(Errno(libc::EXDEV))?;
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
            left.extend(parts(&target));
        } else if kind.is_dir() {
            if folders.len() == MAX_DEPTH {
                return Err(Errno(libc::ENAMETOOLONG));
            }
            folders.push(step.into());
        } else if left.is_empty() {
            return open_entry(here, &name, flags);
        } else {
            return Err(Errno(libc::ENOTDIR));
        }
    }
    open_entry(folders.last().map_or(root, OwnedFd::as_fd), c".", flags)
}

/// The text without control characters, which could steer a terminal.
pub(crate) fn escaped(text: &str) -> String {
    /// Line and paragraph separators, and what changes the direction of text.
    const MISLEADING: [std::ops::RangeInclusive<char>; 3] =
        ['\u{200e}'..='\u{200f}', '\u{2028}'..='\u{202e}', '\u{2066}'..='\u{2069}'];
    text.chars().fold(String::new(), |mut out, c| {
        if c.is_control() || MISLEADING.iter().any(|range| range.contains(&c)) {
            out.extend(c.escape_default())
        } else {
            out.push(c)
        }
        out
    })
}

/// Damaged text as errors show it: its beginning, without control characters.
pub(super) fn shortened(text: &str) -> String {
    let mut out = escaped(&text.chars().take(MAX_SHOWN).collect::<String>());
    if text.chars().nth(MAX_SHOWN).is_some() {
        out.push('…');
    }
    out
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::fs;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;
    use std::time::{Duration, Instant};

    use super::*;

    /// A folder that goes away with the value.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Tree {
            let path =
                std::env::temp_dir().join(format!("pageleap-files-{}-{name}", std::process::id()));
            fs::create_dir_all(path.join("root/sub")).unwrap();
            fs::write(path.join("secret"), "secret").unwrap();
            fs::write(path.join("root/number"), "42\n").unwrap();
            fs::write(path.join("root/sub/text"), "hello").unwrap();
            Tree(path)
        }

        fn root(&self) -> PathBuf {
            self.0.join("root")
        }

        fn link(&self, name: &str, target: &str) {
            symlink(target, self.root().join(name)).unwrap();
        }

        /// The tree, read with the kernel's resolution and with our own.
        fn both(&self) -> [SysFiles; 2] {
            [Resolve::Kernel, Resolve::Walk].map(|resolve| SysFiles { root: self.root(), resolve })
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::SystemFile { .. }), "{error:?}");
        error.to_string()
    }

    #[test]
    fn files_folders_and_links_inside_the_tree_are_read() {
        let tree = Tree::new("inside");
        tree.link("to-file", "sub/text");
        tree.link("to-folder", "./sub/");
        tree.link("sub/up", "../number");
        tree.link("sub/back", "../sub/../to-folder");
        for files in tree.both() {
            assert_eq!(files.number("number").unwrap(), 42);
            for path in [
                "sub/text",
                "to-file",
                "to-folder/text",
                "sub//./text",
                "sub/../sub/text",
                "sub/back/text",
            ] {
                assert_eq!(files.text(path).unwrap(), "hello", "{path}");
            }
            assert_eq!(files.text("to-folder/up").unwrap(), "42\n");
            assert_eq!(files.names(".").unwrap(), ["number", "sub", "to-file", "to-folder"]);
            assert_eq!(files.names("sub/back").unwrap(), ["back", "text", "up"]);
            assert_eq!(files.text_if_there("sub/none").unwrap(), None);
            assert_eq!(files.text_if_there("none/none").unwrap(), None);
            assert!(refusal(files.text("sub/none")).contains("sub/none"));
            assert!(refusal(files.number("sub/text")).contains("`hello` is not a number"));
        }
    }

    #[test]
    fn nothing_outside_the_tree_is_read() {
        let tree = Tree::new("outside");
        let above = "../".repeat(40);
        tree.link("absolute", "/etc/passwd");
        tree.link("climbing", &format!("{above}etc/passwd"));
        tree.link("beside", "../secret");
        tree.link("folder", "..");
        tree.link("sub/twice", "../folder/secret");
        tree.link("own-root-by-name", tree.root().join("number").to_str().unwrap());
        tree.link("loop", "loop");
        tree.link("ping", "pong");
        tree.link("pong", "ping");
        for files in tree.both() {
            for path in [
                "absolute",
                "climbing",
                "beside",
                "folder/secret",
                "sub/twice",
                "../secret",
                "own-root-by-name",
                "/etc/passwd",
            ] {
                for text in [
                    refusal(files.text(path)),
                    refusal(files.text_if_there(path)),
                    refusal(files.number(path)),
                ] {
                    assert!(text.contains("out of the folder"), "{path}: {text}");
                }
            }
            for folder in ["folder", "..", "/"] {
                assert!(refusal(files.names(folder)).contains("out of the folder"), "{folder}");
            }
            for path in ["loop", "ping", "loop/x"] {
                assert!(refusal(files.text(path)).contains("too many links"), "{path}");
            }
        }
    }

    #[test]
    fn what_is_no_file_is_neither_read_nor_waited_for() {
        let tree = Tree::new("kinds");
        let fifo = CString::new(tree.root().join("fifo").as_os_str().as_bytes()).unwrap();
        // SAFETY: the path outlives the call.
        assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
        let _socket = std::os::unix::net::UnixListener::bind(tree.root().join("socket")).unwrap();
        let began = Instant::now();
        for files in tree.both() {
            for (path, kind) in [("fifo", "a FIFO"), ("socket", "a socket"), ("sub", "a folder")] {
                assert!(refusal(files.text(path)).contains(kind), "{path}");
            }
            for (path, kind) in [("fifo", "a FIFO"), ("number", "a file")] {
                assert!(refusal(files.names(path)).contains(kind), "{path}");
            }
            refusal(files.text("number/below"));
            refusal(files.text("nul\0byte"));
        }
        // A device of this machine: opening one is not needed to refuse it.
        assert!(refusal(SysFiles::host().text("dev/zero")).contains("a device"));
        assert!(began.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn what_is_read_has_a_cap() {
        let tree = Tree::new("caps");
        let write = |name: &str, text: &[u8]| fs::write(tree.root().join(name), text).unwrap();
        write("fits", &vec![b'1'; MAX_BYTES as usize]);
        write("larger", &vec![b'1'; MAX_BYTES as usize + 1]);
        write("binary", b"\xff\xfe");
        File::create(tree.root().join("sparse")).unwrap().set_len(1 << 40).unwrap();
        for files in tree.both() {
            assert_eq!(files.text("fits").unwrap().len() as u64, MAX_BYTES);
            for path in ["larger", "sparse"] {
                assert!(refusal(files.text(path)).contains("more than 1024 KB"), "{path}");
            }
            assert!(refusal(files.text("binary")).contains("not text"));
            let long = refusal(files.number("fits"));
            assert!(long.contains("1…`") && long.len() < 300, "{long}");
        }
        write("steering", b"\x1b]0;title\x07 5");
        let shown = refusal(tree.both()[0].number("steering"));
        assert!(!shown.contains('\x1b') && shown.contains("\\u{1b}"), "{shown}");
    }

    #[test]
    fn a_folder_with_too_many_entries_is_refused() {
        let tree = Tree::new("entries");
        let many = tree.root().join("many");
        fs::create_dir(&many).unwrap();
        for n in 0..MAX_ENTRIES {
            fs::hard_link(tree.root().join("number"), many.join(n.to_string()))
                .or_else(|_| fs::write(many.join(n.to_string()), ""))
                .unwrap();
        }
        let [files, _] = tree.both();
        assert_eq!(files.names("many").unwrap().len(), MAX_ENTRIES);
        fs::write(many.join("one more"), "").unwrap();
        assert!(refusal(files.names("many")).contains("more than 65536 entries"));
    }

    #[test]
    fn a_root_that_does_not_exist_is_an_error_and_no_missing_file() {
        for root in ["/nonexistent/root", "/etc/passwd"] {
            let text = refusal(SysFiles::at(root).text_if_there("sys/devices/system/node/online"));
            assert!(text.starts_with(root), "{text}");
        }
    }

    #[test]
    fn this_machine() {
        for files in [SysFiles::host(), SysFiles { resolve: Resolve::Walk, ..SysFiles::host() }] {
            // `/proc/self` is a link.
            assert!(files.text("proc/self/status").unwrap().starts_with("Name:"));
            assert!(files.names("proc/self").unwrap().contains(&"maps".to_owned()));
            // What it leads to may be anywhere.
            refusal(files.names("proc/self/cwd"));
        }
    }
}
