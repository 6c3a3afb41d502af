//! The folder of the ledger: its lock, and notes that are replaced whole.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::Error;

/// What ends the name of a note that is being written.
const NEW: &str = "new";

/// The folder with all notes, and the one below which it is made, which has to exist.
#[derive(Clone, Debug)]
pub(crate) struct Folder(PathBuf, PathBuf);

/// The ledger is locked as long as this lives.
pub(crate) struct Turn {
    _file: File,
}

impl Folder {
    pub fn below(base: PathBuf, path: &str) -> Folder {
        Folder(base.join(path), base)
    }

    #[cfg(test)]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The path of a note.
    pub fn note(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Locks the ledger. Makes the folder if it is missing. Notes that a killed process was writing
    /// are removed: nothing was changed before they had their names.
    pub fn lock(&self) -> Result<Turn, Error> {
        self.make()?;
        let path = self.0.join("lock");
        let file = open(&path, OpenOptions::new().create(true));
        let file = file.map_err(|reason| failed("open", &path, reason))?;
        lock(&file, libc::LOCK_EX).map_err(|reason| failed("flock", &path, reason))?;
        for path in self.unfinished() {
            let _ = fs::remove_file(path);
        }
        Ok(Turn { _file: file })
    }

    /// Notes that are being written, or were by a process that has been killed.
    pub fn unfinished(&self) -> Vec<PathBuf> {
        self.notes(NEW).unwrap_or_default()
    }

    /// Makes what is missing, but not the folder below which it is. What is there already has to
    /// belong to this user or to root, and nobody else may write there.
    fn make(&self) -> Result<(), Error> {
        fs::metadata(&self.1).map_err(|reason| failed("open", &self.1, reason))?;
        let mut path = self.1.clone();
        for part in self.0.strip_prefix(&self.1).unwrap_or(&self.0) {
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
        let failed = |reason| failed("read", &self.0, reason);
        let entries = match fs::read_dir(&self.0) {
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
        let written = open(&new, OpenOptions::new().create_new(true))
            .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
            .and_then(|()| fs::rename(&new, path));
        written.map_err(|reason| {
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
        let _ = File::open(&self.0).and_then(|folder| folder.sync_all());
    }
}

/// Whether a folder is none that another user controls.
fn check_owner(path: &Path) -> io::Result<()> {
    const WRITE_OF_OTHERS: u32 = 0o022;
    let found = fs::symlink_metadata(path)?;
    // SAFETY: the call takes no arguments.
    let own = unsafe { libc::geteuid() };
    match found.uid() {
        _ if !found.is_dir() => Err(io::Error::other("it is no folder")),
        uid if uid != 0 && uid != own => {
            Err(io::Error::other(format!("it belongs to the user {uid}: remove it")))
        }
        _ if found.mode() & WRITE_OF_OTHERS != 0 => {
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
