//! A program to start: where it is, and how this process becomes it.

use std::ffi::{CStr, CString, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use pageleap_sys::Errno;

use crate::error::Error;
use crate::inherited;

/// Where programs are looked for without PATH in the environment, as execvp(3) of glibc does.
const DEFAULT_PATH: &str = "/bin:/usr/bin";
/// Runs files of no known format, as execvp(3) does: scripts without `#!`.
pub(crate) const SHELL: &str = "/bin/sh";

/// A program with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The name by which it was called, which becomes its first argument.
    name: OsString,
    path: PathBuf,
    arguments: Vec<OsString>,
}

impl Program {
    /// Finds a program as shells do: `name` with a slash is a path, and every other name is looked
    /// for in the folders of PATH.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotExecutable`].
    pub fn find(name: OsString, arguments: Vec<OsString>) -> Result<Program, Error> {
        Program::find_in(std::env::var_os("PATH"), name, arguments)
    }

    fn find_in(
        folders: Option<OsString>,
        name: OsString,
        arguments: Vec<OsString>,
    ) -> Result<Program, Error> {
        if name.as_bytes().contains(&b'/') {
            let path = PathBuf::from(&name);
            return match executable(&path) {
                Ok(()) => Ok(Program { name, path, arguments }),
                Err(libc::ENOENT | libc::ENOTDIR) => {
                    Err(Error::NotFound { program: name, whither: "" })
                }
                Err(errno) => Err(Error::NotExecutable { program: name, reason: reason(errno) }),
            };
        }
        let folders = folders.unwrap_or_else(|| DEFAULT_PATH.into());
        let mut refused = None;
        for folder in std::env::split_paths(&folders).filter(|_| !name.is_empty()) {
            // An empty entry is the working directory.
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { &folder };
            let path = folder.join(&name);
            match executable(&path) {
                Ok(()) => return Ok(Program { name, path, arguments }),
                Err(libc::ENOENT | libc::ENOTDIR) => {}
                Err(errno) => refused = refused.or(Some((path, errno))),
            }
        }
        Err(match refused {
            Some((path, errno)) => {
                Error::NotExecutable { program: path.into(), reason: reason(errno) }
            }
            None => Error::NotFound { program: name, whither: " in the folders of PATH" },
        })
    }

    /// The file of the program.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The command with its arguments, as a shell takes it.
    pub fn words(&self) -> impl Iterator<Item = &OsStr> {
        std::iter::once(self.name.as_os_str()).chain(self.arguments.iter().map(OsString::as_os_str))
    }

    /// Becomes the program (`execve(2)`), and returns only if that fails. `changes` of the
    /// environment are names with their new values; `None` takes a variable out.
    ///
    /// The program inherits ignored signals and closed standard files as this process has inherited
    /// them, although Rust's runtime changes both before `main`. The process has one thread.
    #[must_use = "it returns only if the program was not started"]
    pub fn exec(&self, changes: &[(OsString, Option<OsString>)]) -> Error {
        let (Ok(path), Ok(words), Ok(environment)) = (
            c_string(self.path.as_os_str()),
            self.words().map(c_string).collect(),
            environment(changes),
        ) else {
            return self.not_executable("a word of the command has a zero byte".to_owned());
        };
        let words: Vec<CString> = words;
        inherited::give_back();
        let errno = match pageleap_sys::exec(&path, &words, &environment) {
            Errno(libc::ENOEXEC) => {
                let shell = CString::new(SHELL).unwrap_or_default();
                let rest = words.iter().skip(1).cloned();
                let words: Vec<CString> = [shell.clone(), path].into_iter().chain(rest).collect();
                pageleap_sys::exec(&shell, &words, &environment)
            }
            errno => errno,
        };
        self.not_executable(match errno.0 {
            // The file was there when it was looked for.
            libc::ENOENT => "its interpreter does not exist (the first line of a script, or the \
                             loader of a program)"
                .to_owned(),
            number => reason(number),
        })
    }

    fn not_executable(&self, reason: String) -> Error {
        Error::NotExecutable { program: self.path.clone().into(), reason }
    }
}

/// Whether a file can be executed by this user, or the number of the error.
fn executable(path: &Path) -> Result<(), i32> {
    let Ok(name) = c_string(path.as_os_str()) else { return Err(libc::ENOENT) };
    // SAFETY: the call reads a string that ends with zero.
    if unsafe { libc::faccessat(libc::AT_FDCWD, name.as_ptr(), libc::X_OK, libc::AT_EACCESS) } != 0
    {
        return Err(Errno::last().0);
    }
    match std::fs::metadata(path) {
        Ok(file) if file.is_dir() => Err(libc::EISDIR),
        Ok(_) => Ok(()),
        Err(error) => Err(error.raw_os_error().unwrap_or(libc::ENOENT)),
    }
}

fn reason(errno: i32) -> String {
    match errno {
        libc::EACCES => {
            "EACCES: the file or a folder on its path lacks the permission (x), or the file system \
             is mounted with noexec"
                .to_owned()
        }
        libc::EISDIR => "it is a folder".to_owned(),
        libc::E2BIG => "E2BIG: its arguments and the environment are too long".to_owned(),
        libc::ENOEXEC => "ENOEXEC: its format is not known".to_owned(),
        number => Errno(number).to_string(),
    }
}

fn c_string(text: &OsStr) -> Result<CString, std::ffi::NulError> {
    CString::new(text.as_bytes())
}

/// The environment of this process with changes. Words without `=`, which a shell never makes, are
/// kept as well.
fn environment(
    changes: &[(OsString, Option<OsString>)],
) -> Result<Vec<CString>, std::ffi::NulError> {
    let is_changed = |word: &CString| {
        let name = word.to_bytes().split(|byte| *byte == b'=').next().unwrap_or_default();
        word.to_bytes().contains(&b'=')
            && changes.iter().any(|(changed, _)| changed.as_bytes() == name)
    };
    let kept = inherited_environment().into_iter().filter(|word| !is_changed(word)).map(Ok);
    let new = changes.iter().filter_map(|(name, value)| Some((name.clone(), value.clone()?)));
    let line = |(name, value): (OsString, OsString)| {
        CString::new([name.into_vec(), value.into_vec()].join(&b'='))
    };
    kept.chain(new.map(line)).collect()
}

/// The words of the environment, as they are.
fn inherited_environment() -> Vec<CString> {
    unsafe extern "C" {
        static environ: *const *const libc::c_char;
    }
    let mut words = Vec::new();
    // SAFETY: the C library keeps a list of strings that ends with null, or null. Nothing changes it
    // meanwhile, because the process has one thread.
    unsafe {
        let mut at = environ;
        while !at.is_null() && !(*at).is_null() {
            words.push(CStr::from_ptr(*at).to_owned());
            at = at.add(1);
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn find(folders: &str, name: &str) -> Result<Program, Error> {
        Program::find_in(Some(folders.into()), name.into(), vec!["x".into()])
    }

    #[test]
    fn programs_are_found_as_shells_find_them() {
        let root = std::env::temp_dir().join(format!("pageleap-launch-{}", std::process::id()));
        for (folder, mode) in [("first", 0o644), ("second", 0o755), ("third", 0o755)] {
            fs::create_dir_all(root.join(folder)).unwrap();
            let file = root.join(folder).join("tool");
            fs::write(&file, "").unwrap();
            fs::set_permissions(file, Permissions::from_mode(mode)).unwrap();
        }
        let at = |folder: &str| root.join(folder).to_string_lossy().into_owned();
        let (first, second) = (at("first"), at("second"));
        // The first that can be executed, and a folder is none.
        let path = format!("/nowhere:{first}:{second}:{}", at("third"));
        let found = find(&path, "tool").unwrap();
        assert_eq!(found.path(), root.join("second/tool"));
        assert_eq!(found.words().collect::<Vec<_>>(), ["tool", "x"]);
        assert_eq!(find(&root.to_string_lossy(), "first").unwrap_err().exit_code(), 126);
        // One that cannot be executed is told apart from none.
        let refused = find(&first, "tool").unwrap_err();
        assert_eq!(refused.exit_code(), 126);
        assert!(refused.to_string().contains("EACCES"), "{refused}");
        for (path, name) in [(&*second, "no such tool"), (&*second, ""), ("", "tool/"), ("", "/no")]
        {
            let error = find(path, name).unwrap_err();
            assert_eq!(error.exit_code(), 127, "{name}: {error}");
        }
        let escape = find(&second, "\x1b[2J").unwrap_err().to_string();
        assert!(!escape.contains('\x1b'), "{escape}");
        let slash = format!("{second}/tool");
        assert_eq!(find("", &slash).unwrap().path(), Path::new(&slash));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_changed_environment_has_each_name_once() {
        let value = |text: &str| Some(OsString::from(text));
        let new: OsString = "PAGELEAP_LAUNCH_TEST".into();
        let environment =
            environment(&[(new, value("a=b")), ("PATH".into(), None), ("HOME".into(), value(""))])
                .unwrap();
        let lines: Vec<&str> = environment.iter().map(|line| line.to_str().unwrap()).collect();
        let of = |name: &str| lines.iter().filter(|line| line.starts_with(name)).count();
        assert_eq!((of("PATH="), of("HOME=")), (0, 1));
        assert!(lines.contains(&"PAGELEAP_LAUNCH_TEST=a=b") && lines.contains(&"HOME="));
    }
}
