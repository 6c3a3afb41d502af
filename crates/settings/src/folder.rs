//! The folder of the ledger: its lock, and notes that are replaced whole.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pageleap_sys::without_file_size_signal;

use crate::error::Error;
use crate::user::User;

/// The ending of the name of a note that is being written.
const NEW: &str = "new";

/// How long a command waits for the ledger in silence. Whoever holds the lock writes a few small
/// files, and nothing else, so a longer wait has a reason that a person should hear of.
pub(crate) const SILENT: Duration = Duration::from_secs(2);
/// How long a command waits for the ledger at most. The holder may be stopped, or wait for a disk
/// that does not answer.
const AT_MOST: Duration = Duration::from_secs(30);
/// The longest pause between two tries.
const PAUSE: Duration = Duration::from_millis(20);

/// The folder with all notes.
#[derive(Clone, Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    /// The folder below which it is made, which has to exist.
    base: PathBuf,
    /// Gets a sentence when a wait for the lock takes long.
    waits: fn(&str),
}

/// The ledger is locked as long as this lives.
pub(crate) struct Turn {
    _file: File,
}

impl Folder {
    pub fn below(base: PathBuf, path: &str) -> Folder {
        Folder { path: base.join(path), base, waits: |_| {} }
    }

    /// The same folder, which tells of long waits.
    pub fn telling(self, waits: fn(&str)) -> Folder {
        Folder { waits, ..self }
    }

    #[cfg(test)]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a note.
    pub fn note(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Locks the ledger. Makes the folder if it is missing. Notes that a killed process was writing
    /// are removed: nothing was changed before they had their names.
    ///
    /// # Errors
    /// [`Error::Busy`] if others hold it for 30 s.
    pub fn lock(&self) -> Result<Turn, Error> {
        self.lock_within(AT_MOST)
    }

    /// The same with another limit.
    pub fn lock_within(&self, limit: Duration) -> Result<Turn, Error> {
        self.make()?;
        let path = self.path.join("lock");
        let file = open(&path, OpenOptions::new().create(true));
        let file = file.map_err(|reason| failed("open", &path, reason))?;
        self.wait_for(&file, &path, limit)?;
        for path in self.unfinished() {
            let _ = fs::remove_file(path);
        }
        Ok(Turn { _file: file })
    }

    /// Tries to lock the file until it succeeds or the limit is over. A blocking `flock` could do
    /// neither: say that it waits, and give up.
    fn wait_for(&self, file: &File, path: &Path, limit: Duration) -> Result<(), Error> {
        let started = Instant::now();
        let mut pause = Duration::from_millis(1);
        let mut is_silent = true;
        loop {
            match lock(file, libc::LOCK_EX | libc::LOCK_NB) {
                Err(reason) if reason.kind() != io::ErrorKind::WouldBlock => {
                    return Err(failed("flock", path, reason));
                }
                Err(_) => {}
                Ok(()) => return Ok(()),
            }
            let waited = started.elapsed();
            if waited >= limit {
                return Err(Error::Busy { path: path.to_owned(), limit, holder: holder(file) });
            }
            if is_silent && waited >= SILENT {
                let holder = holder(file);
                (self.waits)(&format!("waiting for {}, which {holder} holds", path.display()));
                is_silent = false;
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSE);
        }
    }

    /// Notes that are being written, or were by a process that has been killed.
    pub fn unfinished(&self) -> Vec<PathBuf> {
        self.notes(NEW).unwrap_or_default()
    }

    /// Makes the missing folders, but not the one below which they are. Folders that exist already
    /// have to belong to this user or to root, and nobody else may write there.
    fn make(&self) -> Result<(), Error> {
        fs::metadata(&self.base).map_err(|reason| failed("open", &self.base, reason))?;
        // Who owns /run is the system's affair. Another folder is named by the environment.
        if self.base != Path::new("/run") {
            check_owner(&self.base).map_err(|reason| failed("open", &self.base, reason))?;
        }
        let mut path = self.base.clone();
        for part in self.path.strip_prefix(&self.base).unwrap_or(&self.path) {
            path.push(part);
            match DirBuilder::new().mode(0o700).create(&path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(failed("mkdir", &path, error));
                }
                _ => check_owner(&path).map_err(|reason| failed("mkdir", &path, reason))?,
            }
        }
        Ok(())
    }

    /// The notes whose names end so. Without a folder there are none.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn notes(&self, end: &str) -> Result<Vec<PathBuf>, Error> {
        let failed = |reason| failed("read", &self.path, reason);
        let entries = match fs::read_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|found| found == end) {
                paths.push(path);
            }
        }
        paths.sort();
        Ok(paths)
    }

    /// Writes a note under another name, synchronises it, and renames it: whoever reads meanwhile,
    /// or after a crash, finds the old note or the new one.
    pub fn replace(&self, path: &Path, text: &str) -> Result<(), Error> {
        let new = path.with_extension(NEW);
        let write = || {
            let mut file = open(&new, OpenOptions::new().create_new(true))?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, path)
        };
        without_file_size_signal(write).map_err(|reason| {
            let _ = fs::remove_file(&new);
            failed("write", path, reason)
        })?;
        self.synchronise();
        Ok(())
    }

    /// Removes a note, if it is there.
    pub fn remove(&self, path: &Path) -> Result<(), Error> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("unlink", path, error))
            }
            _ => Ok(()),
        }
    }

    /// Synchronises the names. A failure matters only if the machine loses power, and its settings
    /// are gone then, too.
    fn synchronise(&self) {
        let _ = File::open(&self.path).and_then(|folder| folder.sync_all());
    }
}

/// The process that holds a lock on the file, as messages name it. `/proc/locks` lists locks by the
/// inode of their files.
fn holder(file: &File) -> String {
    let unknown = || "another process".to_owned();
    let Ok(inode) = file.metadata().map(|about| about.ino().to_string()) else { return unknown() };
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let holder = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        // `1: FLOCK ADVISORY WRITE 1234 00:19:567 0 EOF`. A waiting one has `->` after the number.
        let [_, "FLOCK", _, _, pid, place, ..] = words[..] else { return None };
        let pid: u32 = pid.parse().ok().filter(|pid| *pid > 0)?;
        (place.rsplit(':').next() == Some(&inode)).then_some(pid)
    };
    let Some(pid) = locks.lines().find_map(holder) else { return unknown() };
    User::of(pid).map_or_else(|_| format!("process {pid}"), |user| user.to_string())
}

/// Fails if another user controls the folder. Others may make entries in it if it is sticky, as
/// `/tmp` is: they can neither rename nor remove those of this user.
fn check_owner(path: &Path) -> io::Result<()> {
    const WRITE_OF_OTHERS: u32 = 0o022;
    const STICKY: u32 = 0o1000;
    let found = fs::symlink_metadata(path)?;
    // SAFETY: the call takes no arguments.
    let own = unsafe { libc::geteuid() };
    match found.uid() {
        _ if !found.is_dir() => Err(io::Error::other("it is no folder")),
        uid if uid != 0 && uid != own => {
            Err(io::Error::other(format!("it belongs to the user {uid}: remove it")))
        }
        _ if found.mode() & WRITE_OF_OTHERS != 0 && found.mode() & STICKY == 0 => {
            Err(io::Error::other("others may write there: chmod go-w"))
        }
        _ => Ok(()),
    }
}

/// Opens a file of the ledger, close-on-exec, as all files of the standard library.
pub(crate) fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    options.read(true).append(true).mode(0o600).open(path)
}

/// Locks a file (`flock(2)`). A signal does not end the wait.
pub(crate) fn lock(file: &File, operation: libc::c_int) -> io::Result<()> {
    loop {
        // SAFETY: the descriptor is open, and the call touches no memory.
        if unsafe { libc::flock(file.as_raw_fd(), operation) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

pub(crate) fn failed(call: &'static str, path: &Path, reason: io::Error) -> Error {
    Error::Ledger { call, path: path.to_owned(), reason }
}
