//! Files with one value: sysctls (`/proc/sys`) and sysfs (`/sys`).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::error::Error;

/// Longer files are no settings. One page is the most that sysfs shows.
const MOST_BYTES: u64 = 4096;

/// Folders below the root that have settings.
const FOLDERS: [&str; 2] = ["sys", "proc/sys"];

/// Settings among them that each namespace has for itself: two processes may see different files
/// under one name. They are those of network, user, IPC and UTS namespaces.
const OF_NAMESPACES: [&str; 13] = [
    "proc/sys/net",
    "proc/sys/user",
    "proc/sys/fs/mqueue",
    "proc/sys/kernel/domainname",
    "proc/sys/kernel/hostname",
    "proc/sys/kernel/msgmax",
    "proc/sys/kernel/msgmnb",
    "proc/sys/kernel/msgmni",
    "proc/sys/kernel/sem",
    "proc/sys/kernel/shm_rmid_forced",
    "proc/sys/kernel/shmall",
    "proc/sys/kernel/shmmax",
    "proc/sys/kernel/shmmni",
];

/// The files with values below a root, which is `/` but for tests.
#[derive(Clone, Debug)]
pub(crate) struct Settings(PathBuf);

impl Settings {
    pub fn below(root: PathBuf) -> Settings {
        Settings(root)
    }

    /// The one name of a setting: absolute below the root, without links.
    pub fn name(&self, file: &Path) -> Result<String, Error> {
        let no_setting = |reason: String| Error::NoSetting { file: file.to_owned(), reason };
        let root = self.0.canonicalize();
        let root = root.map_err(|reason| setting("open", &self.0.display().to_string(), reason))?;
        let path = self.path(&file.display().to_string()).canonicalize();
        let path = path.map_err(|reason| setting("open", &file.display().to_string(), reason))?;
        let relative = path.strip_prefix(root);
        let relative =
            relative.map_err(|_| no_setting(format!("it leads to {}", path.display())))?;
        let is_below = |folder: &&str| relative.starts_with(*folder);
        if !FOLDERS.iter().any(is_below) {
            return Err(no_setting("it is not below /sys or /proc/sys".into()));
        }
        if OF_NAMESPACES.iter().any(is_below) {
            return Err(no_setting("each namespace has a value of its own".into()));
        }
        if !path.is_file() {
            return Err(no_setting("it is not a file".into()));
        }
        let name = relative.to_str();
        name.map(|name| format!("/{name}")).ok_or_else(|| no_setting("it is not UTF-8".into()))
    }

    /// The value of a setting. Of `always [madvise] never` it is `madvise`.
    pub fn read(&self, name: &str) -> Result<String, Error> {
        let mut text = String::new();
        File::open(self.path(name))
            .and_then(|file| file.take(MOST_BYTES).read_to_string(&mut text))
            .map_err(|reason| setting("read", name, reason))?;
        Ok(value_of(&text))
    }

    /// Whether the setting is missing here.
    pub fn is_missing(&self, name: &str) -> bool {
        matches!(fs::symlink_metadata(self.path(name)), Err(e) if e.kind() == io::ErrorKind::NotFound)
    }

    /// Whether the file opens for writing. Nothing is written.
    pub fn check_writable(&self, name: &str) -> Result<(), Error> {
        let opened = OpenOptions::new().write(true).open(self.path(name));
        opened.map(drop).map_err(|reason| setting("open", name, reason))
    }

    /// Writes a value, by one call, and reads it back.
    pub fn write(&self, name: &str, value: &str) -> Result<(), Error> {
        OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(self.path(name))
            .and_then(|mut file| file.write_all(format!("{value}\n").as_bytes()))
            .map_err(|reason| setting("write", name, reason))?;
        let kept = self.read(name)?;
        let (file, value) = (name.to_owned(), value.to_owned());
        if kept == value {
            return Ok(());
        }
        Err(Error::NotKept { file, value, kept, left: Vec::new() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name.trim_start_matches('/'))
    }
}

fn setting(call: &'static str, file: &str, reason: io::Error) -> Error {
    Error::Setting { call, file: file.to_owned(), reason, left: Vec::new() }
}

/// The value that the text of a file stands for: the word in brackets if there is one, else all
/// words.
pub(crate) fn value_of(text: &str) -> String {
    let words = || text.split_whitespace();
    let chosen = words().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    chosen.map_or_else(|| words().collect::<Vec<_>>().join(" "), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_word_is_the_value() {
        assert_eq!(value_of("always [madvise] never\n"), "madvise");
        assert_eq!(value_of("[none] mq-deadline\n"), "none");
        assert_eq!(value_of("1\n"), "1");
        assert_eq!(value_of("4096\t131072\t6291456\n"), "4096 131072 6291456");
        assert_eq!(value_of("\n"), "");
    }

    #[test]
    fn only_settings_of_the_machine_have_names() {
        let machine = Settings::below("/".into());
        assert_eq!(
            machine.name(Path::new("/proc/sys/vm/../vm/max_map_count")).unwrap(),
            "/proc/sys/vm/max_map_count"
        );
        for (file, reason) in [
            ("/etc/passwd", "not below"),
            ("/proc/sys/net/core/somaxconn", "namespace"),
            ("/proc/sys/kernel/shmmax", "namespace"),
            ("/proc/sys/vm", "not a file"),
            ("/proc/version", "not below"),
            ("/proc/sys/vm/no_such_setting", "this kernel has no such setting"),
        ] {
            let error = machine.name(Path::new(file)).unwrap_err().to_string();
            assert!(error.contains(file) && error.contains(reason), "{error}");
        }
    }
}
