//! The kernel's files below a directory, read as if an attacker had written them.
//!
//! In a container, the maker of the container has chosen what is mounted at `/sys` and `/proc`.
//! With `--sysroot` the user names any directory at all. Three rules follow:
//!
//! * No path leads out of the directory. Symbolic links inside the directory are followed, because
//!   sysfs is made of them (`node0/cpu0` leads to `../../cpu/cpu0`). With `openat2` (Linux 5.6) the
//!   kernel resolves the path. Without `openat2`, or where a seccomp filter refuses it, [`walk`]
//!   resolves the path one step at a time. [`walk`] opens each step relative to the descriptor of
//!   the step before, reads symbolic links itself, and climbs only to descriptors that it came
//!   through.
//! * Only regular files are read, and only directories are listed. A FIFO or a device is not even
//!   opened, because opening may wait or have effects. If one takes the place of a file between the
//!   check and the opening, it is opened without waiting and then refused.
//! * Reading is limited: in bytes of a file, and in entries of a directory.
//!
//! A file system that never answers a read (FUSE can do so) is out of scope: only a process of its
//! own could guard against it.

use std::ffi::{CStr, CString};
use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use pageleap_sys::{Entries, Errno, link_target, open_beneath, open_entry};

use crate::error::Error;

/// Most bytes of a file. Files of sysfs have at most one page, lists of CPUs a few pages (Linux
/// 5.15), and `/proc/vmstat` has 5 KB.
const MAX_BYTES: u64 = 1 << 20;
/// Most bytes of a file that has a part for each CPU, such as `/proc/zoneinfo`: some 100 bytes for
/// each CPU and zone.
const MAX_BYTES_BY_CPU: u64 = 64 << 20;
/// Most entries of a directory. The directory of a node has one entry per memory block: 16 TB in
/// blocks of 256 MB.
const MAX_ENTRIES: usize = 65_536;
/// Most symbolic links on one path, as many as the kernel follows (`MAXSYMLINKS`).
const MAX_LINKS: usize = 40;
/// Most nested directories on one path. Paths of sysfs have ten.
const MAX_DEPTH: usize = 64;
/// Characters of damaged text that an error shows.
const MAX_SHOWN: usize = 40;

/// The kernel's files below a directory, which is `/` for this machine. Paths are relative to the
/// directory, such as `sys/devices/system/node/online` or `proc/self/status`.
///
/// Nothing outside the directory is read, whatever the directory contains, and no call waits on a
/// FIFO. At most 1 MB of a file and 65 536 entries of a directory are read. Everything else is an
/// error that says what is wrong. The directory is opened again for each file, so the value can be
/// copied and kept.
#[derive(Clone, Debug)]
pub struct SysFiles {
    root: PathBuf,
    resolve: Resolve,
}

/// How symbolic links are resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resolve {
    /// By the kernel if possible, else by [`walk`].
    Kernel,
    /// Always by [`walk`].
    #[cfg(test)]
    Walk,
}

/// What a path has to lead to.
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

    /// The files below another directory: that of a container, or one recorded on another machine.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        SysFiles { root: root.into(), resolve: Resolve::Kernel }
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The text of a file.
    ///
    /// # Errors
    /// [`Error::SystemFile`] if the file does not exist, is not a regular file, lies outside the
    /// directory, is larger than 1 MB, is not UTF-8, or cannot be read.
    pub fn text(&self, path: &str) -> Result<String, Error> {
        self.text_if_there(path)?
            .ok_or_else(|| self.error(path, Refusal::Path(Errno(libc::ENOENT))))
    }

    /// The text of a file, or `None` if the file or a directory on its path does not exist. A
    /// missing root directory is an error.
    ///
    /// # Errors
    /// As for [`text`](SysFiles::text), except for a file that does not exist.
    pub fn text_if_there(&self, path: &str) -> Result<Option<String>, Error> {
        self.text_within(path, MAX_BYTES)
    }

    /// The text of a file that has a part for each CPU, which may be large.
    pub(crate) fn text_by_cpu(&self, path: &str) -> Result<String, Error> {
        self.text_within(path, MAX_BYTES_BY_CPU)?
            .ok_or_else(|| self.error(path, Refusal::Path(Errno(libc::ENOENT))))
    }

    fn text_within(&self, path: &str, most: u64) -> Result<Option<String>, Error> {
        let file = match self.open(path, Wanted::File) {
            Err(Refusal::Path(Errno(libc::ENOENT))) => return Ok(None),
            other => other.map_err(|why| self.error(path, why))?,
        };
        let mut bytes = Vec::new();
        // One byte beyond the limit tells a file that is too large from one that just fits.
        match file.take(most + 1).read_to_end(&mut bytes) {
            Err(error) => Err(Error::system_file(&self.shown(path), &error)),
            Ok(_) if bytes.len() as u64 > most => {
                Err(self.damaged(path, format!("it has more than {} KB", most >> 10)))
            }
            Ok(_) => match String::from_utf8(bytes) {
                Ok(text) => Ok(Some(text)),
                Err(_) => Err(self.damaged(path, "it is not UTF-8 text".into())),
            },
        }
    }

    /// The unsigned integer that is the whole content of a file.
    ///
    /// # Errors
    /// As for [`text`](SysFiles::text), or if the text is not an unsigned integer of 64 bits.
    pub fn number(&self, path: &str) -> Result<u64, Error> {
        let text = self.text(path)?;
        let text = text.trim_ascii();
        text.parse()
            .map_err(|_| self.damaged(path, format!("`{}` is not a number", shortened(text))))
    }

    /// The names in a directory, sorted. Names that are not UTF-8 are left out: the kernel makes no
    /// such names.
    ///
    /// # Errors
    /// [`Error::SystemFile`] if the directory does not exist, is not a directory, lies outside the
    /// root directory, has more than 65 536 entries, or cannot be read.
    pub fn names(&self, directory: &str) -> Result<Vec<String>, Error> {
        self.names_if_there(directory, MAX_ENTRIES)?
            .ok_or_else(|| self.error(directory, Refusal::Path(Errno(libc::ENOENT))))
    }

    /// The names in a directory of at most `most` entries, or `None` if it does not exist.
    pub(super) fn names_if_there(
        &self,
        directory: &str,
        most: usize,
    ) -> Result<Option<Vec<String>>, Error> {
        let open = match self.open(directory, Wanted::Directory) {
            Err(Refusal::Path(Errno(libc::ENOENT))) => return Ok(None),
            other => other.map_err(|why| self.error(directory, why))?,
        };
        let failed = |errno| self.error(directory, Refusal::Path(errno));
        let mut names = Vec::new();
        for (count, name) in Entries::of(open.into()).map_err(failed)?.enumerate() {
            if count == most {
                return Err(self.damaged(directory, format!("it has more than {most} entries")));
            }
            names.extend(name.map_err(failed)?.into_string().ok());
        }
        names.sort_unstable();
        Ok(Some(names))
    }

    /// An error about the content of a file.
    pub(crate) fn damaged(&self, path: &str, reason: String) -> Error {
        Error::SystemFile {
            path: self.shown(path),
            reason,
            remedy: "if the kernel itself wrote this, report it with the kernel version",
        }
    }

    /// A path in the form in which errors show it.
    pub(crate) fn shown(&self, path: &str) -> String {
        escaped(&self.root.join(path).display().to_string())
    }

    /// Opens what `path` leads to if it is of the wanted kind. Anything else is not opened, except
    /// if the path changes at this very moment.
    fn open(&self, path: &str, wanted: Wanted) -> Result<File, Refusal> {
        // Only a starting point: O_PATH needs no right to list the directory. A Landlock sandbox
        // refuses to list `/`, and so does a mode of 0711.
        let mut anchor = OpenOptions::new();
        anchor.read(true).custom_flags(libc::O_DIRECTORY | libc::O_PATH);
        let root = anchor.open(&self.root).map_err(Refusal::Root)?;
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
                // ENOSYS: an older kernel. ENOSYS or EPERM: a filter refuses the call. EAGAIN: a
                // directory was moved meanwhile.
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
            remedy: "remove the link, or name another directory: the kernel makes no such link",
        };
        match why {
            Refusal::Root(error) => Error::SystemFile {
                path: escaped(&self.root.display().to_string()),
                reason: error.to_string(),
                remedy: "name a directory that exists and can be read",
            },
            Refusal::Path(Errno(libc::EXDEV)) => link("a symbolic link leads out of the directory"),
            Refusal::Path(Errno(libc::ELOOP)) => {
                link("too many symbolic links, or a link of /proc that stands for an open file")
            }
            Refusal::Path(errno) => Error::system_file(&self.shown(path), &errno.into()),
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

/// Why something was not opened.
enum Refusal {
    /// The root directory cannot be opened.
    Root(io::Error),
    /// The path cannot be resolved or opened.
    Path(Errno),
    /// The path leads to something of another kind.
    Kind(FileType),
}

fn file_type(file: &File) -> Result<FileType, Errno> {
    let metadata =
        file.metadata().map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
    Ok(metadata.file_type())
}

/// Opens `path` below `root` without `openat2`. Does what [`open_beneath`] does, with the same
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
            left.extend(parts(&target));
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

/// The text with control characters escaped, because they could steer a terminal.
pub(crate) fn escaped(text: &str) -> String {
    /// Line and paragraph separators, and characters that change the direction of text.
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

/// Damaged text in the form in which errors show it: the beginning, with control characters
/// escaped.
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

    /// A directory that is removed when the value is dropped.
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

        /// The tree, resolved by the kernel and resolved by `walk`.
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
    fn files_directories_and_links_inside_the_tree_are_read() {
        let tree = Tree::new("inside");
        tree.link("to-file", "sub/text");
        tree.link("to-directory", "./sub/");
        tree.link("sub/up", "../number");
        tree.link("sub/back", "../sub/../to-directory");
        for files in tree.both() {
            assert_eq!(files.number("number").unwrap(), 42);
            for path in [
                "sub/text",
                "to-file",
                "to-directory/text",
                "sub//./text",
                "sub/../sub/text",
                "sub/back/text",
            ] {
                assert_eq!(files.text(path).unwrap(), "hello", "{path}");
            }
            assert_eq!(files.text("to-directory/up").unwrap(), "42\n");
            assert_eq!(files.names(".").unwrap(), ["number", "sub", "to-directory", "to-file"]);
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
        tree.link("directory", "..");
        tree.link("sub/twice", "../directory/secret");
        tree.link("own-root-by-name", tree.root().join("number").to_str().unwrap());
        tree.link("loop", "loop");
        tree.link("ping", "pong");
        tree.link("pong", "ping");
        for files in tree.both() {
            for path in [
                "absolute",
                "climbing",
                "beside",
                "directory/secret",
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
                    assert!(text.contains("out of the directory"), "{path}: {text}");
                }
            }
            for path in ["directory", "..", "/"] {
                assert!(refusal(files.names(path)).contains("out of the directory"), "{path}");
            }
            for path in ["loop", "ping", "loop/x"] {
                assert!(refusal(files.text(path)).contains("too many symbolic links"), "{path}");
            }
        }
    }

    #[test]
    fn only_files_are_read_and_a_fifo_is_not_waited_for() {
        let tree = Tree::new("kinds");
        let fifo = CString::new(tree.root().join("fifo").as_os_str().as_bytes()).unwrap();
        // SAFETY: the path outlives the call.
        assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
        let _socket = std::os::unix::net::UnixListener::bind(tree.root().join("socket")).unwrap();
        let began = Instant::now();
        for files in tree.both() {
            for (path, kind) in [("fifo", "a FIFO"), ("socket", "a socket"), ("sub", "a directory")]
            {
                assert!(refusal(files.text(path)).contains(kind), "{path}");
            }
            for (path, kind) in [("fifo", "a FIFO"), ("number", "a file")] {
                assert!(refusal(files.names(path)).contains(kind), "{path}");
            }
            refusal(files.text("number/below"));
            refusal(files.text("nul\0byte"));
        }
        // A device of this machine is refused without being opened.
        assert!(refusal(SysFiles::host().text("dev/zero")).contains("a device"));
        assert!(began.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn only_text_up_to_the_limit_is_read() {
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
            assert!(refusal(files.text("binary")).contains("not UTF-8 text"));
            let long = refusal(files.number("fits"));
            assert!(long.contains("1…`") && long.len() < 300, "{long}");
        }
        write("steering", b"\x1b]0;title\x07 5");
        let shown = refusal(tree.both()[0].number("steering"));
        assert!(!shown.contains('\x1b') && shown.contains("\\u{1b}"), "{shown}");
    }

    #[test]
    fn a_directory_with_too_many_entries_is_refused() {
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
    fn a_missing_root_is_an_error_and_not_a_missing_file() {
        for root in ["/nonexistent/root", "/etc/passwd"] {
            let text = refusal(SysFiles::at(root).text_if_there("sys/devices/system/node/online"));
            assert!(text.starts_with(root), "{text}");
        }
    }

    #[test]
    fn files_of_this_machine_are_read_by_the_kernel_and_by_walk() {
        for files in [SysFiles::host(), SysFiles { resolve: Resolve::Walk, ..SysFiles::host() }] {
            // `/proc/self` is a symbolic link.
            assert!(files.text("proc/self/status").unwrap().starts_with("Name:"));
            assert!(files.names("proc/self").unwrap().contains(&"maps".to_owned()));
            // The current directory of the process lies outside `/proc`.
            refusal(files.names("proc/self/cwd"));
        }
    }
}
