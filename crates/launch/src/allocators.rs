//! Allocators that can take the place of the C library's `malloc`: where their libraries are, and how
//! to get them.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// An allocator of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Allocator {
    /// That of the C library (glibc: ptmalloc), without any other.
    Glibc,
    /// jemalloc (Jason Evans).
    Jemalloc,
    /// tcmalloc of gperftools.
    Tcmalloc,
    /// mimalloc (Microsoft).
    Mimalloc,
    /// That of oneTBB, by its library for malloc (`libtbbmalloc_proxy`).
    Tbbmalloc,
}

/// Allocators of the paper (section 3.1) that no distribution has. Each with the reason.
pub const NOT_AVAILABLE: [(&str, &str); 3] = [
    ("hoard", "no distribution has it; build it, and name its library by its path"),
    (
        "supermalloc",
        "no distribution has it, its last change was in 2017, and the paper left it out after the \
         first measurement because it did not scale",
    ),
    (
        "mcmalloc",
        "no distribution has it, and the paper left it out after the first measurement because of \
         the memory that it took",
    ),
];

impl Allocator {
    /// All allocators.
    pub const ALL: [Allocator; 5] = [
        Allocator::Glibc,
        Allocator::Jemalloc,
        Allocator::Tcmalloc,
        Allocator::Mimalloc,
        Allocator::Tbbmalloc,
    ];

    /// Its name in options.
    pub fn name(self) -> &'static str {
        match self {
            Allocator::Glibc => "glibc",
            Allocator::Jemalloc => "jemalloc",
            Allocator::Tcmalloc => "tcmalloc",
            Allocator::Mimalloc => "mimalloc",
            Allocator::Tbbmalloc => "tbbmalloc",
        }
    }

    /// Names of its library, up to `.so`; the first that is found counts. None for the C library.
    fn libraries(self) -> &'static [&'static str] {
        match self {
            Allocator::Glibc => &[],
            Allocator::Jemalloc => &["libjemalloc"],
            // The other one also profiles the heap.
            Allocator::Tcmalloc => &["libtcmalloc_minimal", "libtcmalloc"],
            Allocator::Mimalloc => &["libmimalloc"],
            Allocator::Tbbmalloc => &["libtbbmalloc_proxy"],
        }
    }

    /// The package of Debian that has it, if it is one of its own.
    pub fn package(self) -> Option<&'static str> {
        Some(match self {
            Allocator::Glibc => return None,
            Allocator::Jemalloc => "libjemalloc2",
            Allocator::Tcmalloc => "libtcmalloc-minimal4",
            Allocator::Mimalloc => "libmimalloc2.0",
            Allocator::Tbbmalloc => "libtbbmalloc2",
        })
    }

    /// A sentence that says that its library is not there, and how to get it.
    pub fn missing(self) -> String {
        match self.package() {
            Some(package) => format!(
                "{self} is not installed: apt-get install {package} (the name in Debian 12), or \
                 name its library by its path"
            ),
            None => format!("{self} is a part of the system"),
        }
    }

    /// The file of its library on this system, where the loader looks for libraries. `None` if it is
    /// not there, and for the C library.
    pub fn library(self) -> Option<PathBuf> {
        self.library_in(&folders())
    }

    fn library_in(self, folders: &[PathBuf]) -> Option<PathBuf> {
        let found = self.libraries().iter().map(|name| newest(folders, name));
        found.flatten().next()
    }

    /// The allocator whose library a file is, by its name.
    pub fn of_library(file: &Path) -> Option<Allocator> {
        let name = file.file_name()?.to_string_lossy();
        let is_it = |allocator: &Allocator| {
            let mut names = allocator.libraries().iter();
            names.any(|library| suffix(&name, library).is_some())
        };
        Allocator::ALL.into_iter().find(is_it)
    }
}

impl fmt::Display for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Allocator {
    type Err = String;

    fn from_str(text: &str) -> Result<Allocator, String> {
        if let Some((name, why)) = NOT_AVAILABLE.iter().find(|(name, _)| *name == text) {
            return Err(format!("{name} is not available: {why}"));
        }
        let found = Allocator::ALL.into_iter().find(|allocator| allocator.name() == text);
        found.ok_or_else(|| {
            let names: Vec<&str> =
                Allocator::ALL.iter().map(|allocator| allocator.name()).collect();
            format!("no allocator is called {text:?}; known are {}", names.join(", "))
        })
    }
}

/// The part of a file's name behind `NAME.so`: empty, or a version with its dot.
fn suffix<'a>(file: &'a str, library: &str) -> Option<&'a str> {
    let rest = file.strip_prefix(library)?.strip_prefix(".so")?;
    (rest.is_empty() || rest.starts_with('.')).then_some(rest)
}

/// The file of a library with the highest version, in the first folder that has one.
fn newest(folders: &[PathBuf], library: &str) -> Option<PathBuf> {
    folders.iter().find_map(|folder| {
        let entries = fs::read_dir(folder).ok()?.flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let version = |name: &String| -> Option<Vec<u64>> {
            let suffix = suffix(name, library)?;
            suffix.split('.').skip(1).map(|part| part.parse().ok()).collect()
        };
        let best = names.filter_map(|name| Some((version(&name)?, name))).max()?;
        let path = folder.join(best.1);
        // A link may lead nowhere.
        path.is_file().then_some(path)
    })
}

/// The folders in which the loader looks for libraries (ld.so(8)).
fn folders() -> Vec<PathBuf> {
    let variable = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> =
        std::env::split_paths(&variable).filter(|folder| folder.is_absolute()).collect();
    folders.extend(configured(Path::new("/etc/ld.so.conf"), 0));
    folders
        .extend(["/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib"].map(PathBuf::from));
    folders
}

/// The folders of a configuration file of the loader, and of those that it includes: lines have a
/// folder, or `include` with a pattern, whose only wildcard in use is `*.conf`.
fn configured(file: &Path, depth: usize) -> Vec<PathBuf> {
    let text = fs::read_to_string(file).unwrap_or_default();
    let mut folders = Vec::new();
    for line in text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()) {
        match line.strip_prefix("include ") {
            Some(pattern) if depth < 4 => {
                let pattern = file.parent().unwrap_or(Path::new("/")).join(pattern.trim());
                folders
                    .extend(matching(&pattern).iter().flat_map(|file| configured(file, depth + 1)));
            }
            None if line.starts_with('/') => folders.push(line.into()),
            _ => {}
        }
    }
    folders
}

/// The files that a pattern with `*` at the beginning of the file's name stands for, by name.
fn matching(pattern: &Path) -> Vec<PathBuf> {
    let (Some(folder), Some(name)) =
        (pattern.parent(), pattern.file_name().and_then(OsStr::to_str))
    else {
        return Vec::new();
    };
    let Some(end) = name.strip_prefix('*') else { return vec![pattern.to_owned()] };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| path.to_string_lossy().ends_with(end))
        .collect();
    files.sort();
    files
}

/// The value of LD_PRELOAD with one library in front. The user's libraries are kept behind it: the
/// loader takes each function from the first that has it. Other allocators among them are left out,
/// because one of them would free what another one has allocated.
pub fn preloaded_first(library: &Path, before: Option<OsString>) -> OsString {
    let mut value = library.as_os_str().to_owned();
    let kept = without_allocators(before.as_deref().unwrap_or_default());
    if !kept.is_empty() {
        value.push(":");
        value.push(kept);
    }
    value
}

/// A value of LD_PRELOAD without the known allocators.
pub fn without_allocators(value: &OsStr) -> OsString {
    let words = value.as_bytes().split(|byte| matches!(byte, b':' | b' '));
    let is_kept = |word: &&[u8]| {
        !word.is_empty() && Allocator::of_library(Path::new(OsStr::from_bytes(word))).is_none()
    };
    let kept: Vec<&[u8]> = words.filter(is_kept).collect();
    OsString::from_vec(kept.join(&b':'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trees::Tree;

    #[test]
    fn the_newest_library_of_the_first_folder_counts() {
        let tree = Tree::new(&[
            ("a/libjemalloc.so.2.old", ""),
            ("a/libtcmalloc.so.4", ""),
            ("a/libtcmalloc_minimal_debug.so.4", ""),
            ("b/libjemalloc.so.2", ""),
            ("b/libjemalloc.so.10", ""),
            ("b/libtcmalloc_minimal.so.4.5.9", ""),
            ("b/libmimalloc.so", ""),
        ]);
        tree.link("a/libmimalloc.so.2", "nowhere");
        let folders = ["missing", "a", "b"].map(|folder| tree.path(folder));
        let found = |allocator: Allocator| allocator.library_in(&folders);
        assert_eq!(found(Allocator::Jemalloc), Some(tree.path("b/libjemalloc.so.10")));
        assert_eq!(found(Allocator::Tcmalloc), Some(tree.path("b/libtcmalloc_minimal.so.4.5.9")));
        assert_eq!(found(Allocator::Mimalloc), Some(tree.path("b/libmimalloc.so")));
        assert_eq!((found(Allocator::Tbbmalloc), found(Allocator::Glibc)), (None, None));
    }

    #[test]
    fn the_loaders_folders_are_read_with_their_includes() {
        let tree = Tree::new(&[
            ("ld.so.conf", "# first\n/opt/lib # ours\ninclude ld.so.conf.d/*.conf\nrelative\n"),
            ("ld.so.conf.d/b.conf", "/usr/lib/b\n"),
            ("ld.so.conf.d/a.conf", "/usr/lib/a\ninclude ../ld.so.conf\n"),
            ("ld.so.conf.d/c.disabled", "/usr/lib/c\n"),
        ]);
        let folders = configured(&tree.path("ld.so.conf"), 0);
        let has = |folder: &str| folders.contains(&PathBuf::from(folder));
        assert!(has("/opt/lib") && has("/usr/lib/a") && has("/usr/lib/b"), "{folders:?}");
        assert!(!has("/usr/lib/c") && !has("relative"), "{folders:?}");
    }

    #[test]
    fn libraries_are_known_by_their_names() {
        let of = |path: &str| Allocator::of_library(Path::new(path));
        assert_eq!(of("/usr/lib/libjemalloc.so.2"), Some(Allocator::Jemalloc));
        assert_eq!(of("/x/libtbbmalloc_proxy.so"), Some(Allocator::Tbbmalloc));
        assert_eq!(of("/x/libtcmalloc.so.4"), Some(Allocator::Tcmalloc));
        assert_eq!((of("/x/libtbbmalloc.so.2"), of("/x/libc.so.6"), of("/")), (None, None, None));
        assert_eq!("mimalloc".parse(), Ok(Allocator::Mimalloc));
        let hoard = "hoard".parse::<Allocator>().unwrap_err();
        assert!(hoard.contains("not available"), "{hoard}");
        assert!("malloc".parse::<Allocator>().unwrap_err().contains("known are glibc, jemalloc"));
        let library = Path::new("/a.so");
        assert_eq!(preloaded_first(library, None), "/a.so");
        assert_eq!(preloaded_first(library, Some("".into())), "/a.so");
        assert_eq!(preloaded_first(library, Some("/b.so /c.so".into())), "/a.so:/b.so:/c.so");
        let others = "/x/libmimalloc.so.2:/b.so:libjemalloc.so.2";
        assert_eq!(preloaded_first(library, Some(others.into())), "/a.so:/b.so");
        assert_eq!(without_allocators("/x/libtcmalloc.so.4".as_ref()), "");
    }
}
