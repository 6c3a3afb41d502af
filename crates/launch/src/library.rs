//! The preloaded library as a file, and the environment that makes the loader load it.
//!
//! The loader takes libraries by their path only, and programs that the program starts later take it
//! by the same path. So the file stays. It is written once for each version of the library, which its
//! name tells.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use pageleap_sys::{Errno, without_file_size_signal};

use crate::error::Error;
use crate::place;

/// The library, as `build.rs` has compiled it from `preload/`.
pub(crate) const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libpageleap-place.so"));
/// The beginning of the file's name; a number of its contents follows.
const PREFIX: &str = "libpageleap-place-";
/// The loader's list of libraries.
const LD_PRELOAD: &str = "LD_PRELOAD";
/// Separators of the paths of that list. A path with one of them cannot be in it.
const SEPARATORS: [u8; 2] = *b": ";

/// Changes of the environment by which threads of a program come to these places, or to none. `home`
/// has the CPUs on which the program starts, if these are not all places. The file of the library is
/// written if it is not there.
///
/// # Errors
/// [`Error::Library`] if no folder can have the file.
pub fn preloaded(
    places: Option<&[usize]>,
    home: Option<&[usize]>,
    inherited: impl Fn(&str) -> Option<OsString>,
) -> Result<Vec<(OsString, Option<OsString>)>, Error> {
    let Some(places) = places else { return Ok(without(&inherited)) };
    let path = file(&folders(&inherited))?;
    let before = inherited(LD_PRELOAD).unwrap_or_default();
    let mut changes = vec![
        (LD_PRELOAD.into(), Some(preload(&before, Some(&path)))),
        (place::PLACES.into(), Some(place::list(places).into())),
    ];
    // A home of an outer command does not count.
    if home.is_some() || inherited(place::HOME).is_some() {
        changes.push((place::HOME.into(), home.map(|cpus| place::list(cpus).into())));
    }
    Ok(changes)
}

/// Changes of the environment that undo those of an outer command.
fn without(inherited: &impl Fn(&str) -> Option<OsString>) -> Vec<(OsString, Option<OsString>)> {
    if inherited(place::PLACES).is_none() {
        return Vec::new();
    }
    let before = inherited(LD_PRELOAD).unwrap_or_default();
    let after = Some(preload(&before, None)).filter(|after| !after.is_empty());
    let mut changes = vec![(LD_PRELOAD.into(), after), (place::PLACES.into(), None)];
    changes.extend(inherited(place::HOME).map(|_| (place::HOME.into(), None)));
    changes
}

/// The loader's list with this library, and without others of its kind.
///
/// It comes last. Some libraries insist on being the first (AddressSanitizer's, if it is in the list),
/// and this one works at every place of the list, because it calls the next function of each name.
fn preload(before: &OsStr, path: Option<&Path>) -> OsString {
    let words = before.as_bytes().split(|byte| SEPARATORS.contains(byte));
    let is_other = |word: &&[u8]| {
        let name = word.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        !word.is_empty() && !name.starts_with(PREFIX.as_bytes())
    };
    let own = path.map(|path| path.as_os_str().as_bytes());
    let words: Vec<&[u8]> = words.filter(is_other).chain(own).collect();
    OsString::from_vec(words.join(&SEPARATORS[0]))
}

/// A folder for the file, if it fits: where, and with which permissions it is made.
#[derive(Debug)]
struct Folder {
    path: PathBuf,
    mode: u32,
}

/// The folders of this user, the best one first. A program that root starts may change its user, so
/// others may read root's folder, which lies apart from the files that only root may see.
/// XDG_RUNTIME_DIR of root may be that of the user who has become root, and does not count.
fn folders(inherited: &impl Fn(&str) -> Option<OsString>) -> Vec<Folder> {
    // SAFETY: the call takes no pointers.
    let user = unsafe { libc::geteuid() };
    let mode = if user == 0 { 0o755 } else { 0o700 };
    let of_root = (user == 0).then(|| PathBuf::from("/run/pageleap-place"));
    let of_login = inherited("XDG_RUNTIME_DIR").filter(|path| user != 0 && !path.is_empty());
    let of_login = of_login.map(|path| Path::new(&path).join("pageleap"));
    let shared = ["/tmp", "/var/tmp"].map(|path| PathBuf::from(format!("{path}/pageleap-{user}")));
    let paths = of_root.into_iter().chain(of_login).chain(shared);
    paths.map(|path| Folder { path, mode }).collect()
}

/// The file of the library in the first folder that can have it.
fn file(folders: &[Folder]) -> Result<PathBuf, Error> {
    let mut reasons = Vec::new();
    for folder in folders {
        match folder.usable().and_then(|()| written(&folder.path)) {
            Ok(path) => return Ok(path),
            Err(reason) => reasons.push(format!("{}: {reason}", folder.path.display())),
        }
    }
    Err(Error::Library { reasons: reasons.join("; ") })
}

impl Folder {
    /// Makes the folder, or tells why it cannot have the file. Nobody else may be able to write to
    /// it, because the program runs the code in the file.
    fn usable(&self) -> Result<(), String> {
        let bytes = self.path.as_os_str().as_bytes();
        if !self.path.is_absolute() || bytes.iter().any(|byte| SEPARATORS.contains(byte)) {
            return Err("LD_PRELOAD cannot name it, because it is relative or has a colon or a \
                        blank"
                .to_owned());
        }
        let made = DirBuilder::new().mode(self.mode).create(&self.path);
        if let Err(error) = made
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(shown(&error));
        }
        let folder = fs::symlink_metadata(&self.path).map_err(|error| shown(&error))?;
        if !folder.is_dir() {
            return Err("it is a link or a file".to_owned());
        }
        is_own(&folder)?;
        is_safe_above(&self.path)?;
        // Whatever the umask was when it was made.
        if folder.mode() & 0o777 != self.mode {
            let mode = Permissions::from_mode(self.mode);
            fs::set_permissions(&self.path, mode).map_err(|error| shown(&error))?;
        }
        match is_noexec(&self.path) {
            true => Err("its file system is mounted with noexec".to_owned()),
            false => Ok(()),
        }
    }
}

/// The file in a folder, which is written unless it is there.
fn written(folder: &Path) -> Result<PathBuf, String> {
    let name = format!("{PREFIX}{:016x}.so", number_of(LIBRARY));
    let path = folder.join(&name);
    if is_library(&path) {
        return Ok(path);
    }
    // Another process may write it at the same time: each writes a file of its own, and then gives
    // it the name, which replaces a whole file by a whole file. Processes of several pid namespaces
    // may have the same number.
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    let new = folder.join(format!(".{name}.{}.{time}", std::process::id()));
    let open = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&new);
    let mut file: File = open.map_err(|error| shown(&error))?;
    let write = || {
        file.write_all(LIBRARY)?;
        // Whatever the umask is.
        file.set_permissions(Permissions::from_mode(0o644))?;
        fs::rename(&new, &path)
    };
    without_file_size_signal(write).map_err(|error| {
        let _ = fs::remove_file(&new);
        shown(&error)
    })?;
    Ok(path)
}

/// Whether the file is this library, as this user has written it.
fn is_library(path: &Path) -> bool {
    let own = fs::symlink_metadata(path).is_ok_and(|file| file.is_file() && is_own(&file).is_ok());
    own && fs::read(path).is_ok_and(|bytes| bytes == LIBRARY)
}

/// Whether nobody but root and this user can put another folder in the place of this one: all
/// folders on its path are theirs, and others may not write to them, or may at least not rename
/// files of others (sticky).
fn is_safe_above(folder: &Path) -> Result<(), String> {
    // SAFETY: the call takes no pointers.
    let user = unsafe { libc::geteuid() };
    let owners = [Some(0), Some(user), unmapped_owner()];
    let real = folder.canonicalize().map_err(|error| shown(&error))?;
    for above in real.ancestors().skip(1) {
        let about = fs::symlink_metadata(above).map_err(|error| shown(&error))?;
        let (owner, mode) = (about.uid(), about.mode());
        if !owners.contains(&Some(owner)) {
            return Err(format!("{} belongs to user {owner}", above.display()));
        }
        if mode & 0o022 != 0 && mode & libc::S_ISVTX == 0 {
            return Err(format!(
                "others may write to {} (mode {:o})",
                above.display(),
                mode & 0o7777
            ));
        }
    }
    Ok(())
}

/// The owner of files whose user has no number in this user namespace, such as root's outside of it;
/// `None` outside of all user namespaces.
fn unmapped_owner() -> Option<u32> {
    let map = fs::read_to_string("/proc/self/uid_map").ok()?;
    let is_whole = map.split_whitespace().eq(["0", "0", "4294967295"]);
    let owner = fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?;
    owner.trim().parse().ok().filter(|_| !is_whole)
}

/// Whether nobody but this user can write to it.
fn is_own(file: &Metadata) -> Result<(), String> {
    // SAFETY: the call takes no pointers.
    let user = unsafe { libc::geteuid() };
    if file.uid() != user {
        return Err(format!("it belongs to user {}, not to user {user}", file.uid()));
    }
    match file.mode() & 0o022 {
        0 => Ok(()),
        _ => Err(format!("others may write to it (mode {:o})", file.mode() & 0o7777)),
    }
}

/// Whether nothing of this file system can be executed, or mapped as code.
fn is_noexec(path: &Path) -> bool {
    let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: the call reads a string that ends with zero, and writes one structure, for which zeros
    // are valid.
    unsafe {
        let mut system: libc::statvfs = std::mem::zeroed();
        libc::statvfs(path.as_ptr(), &mut system) == 0 && system.f_flag & libc::ST_NOEXEC != 0
    }
}

fn shown(error: &io::Error) -> String {
    error.raw_os_error().map_or_else(|| error.to_string(), |number| Errno(number).to_string())
}

/// A number by which contents differ (FNV-1a).
fn number_of(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let path =
            std::env::temp_dir().join(format!("pageleap-library-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn folder(path: PathBuf) -> Folder {
        Folder { path, mode: 0o700 }
    }

    #[test]
    fn the_file_is_written_once_and_mended() {
        let root = scratch("once");
        let own = || [folder(root.join("own"))];
        let path = file(&own()).unwrap();
        assert_eq!(fs::read(&path).unwrap(), LIBRARY);
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&root.join("own")), mode(&path)), (0o700, 0o644));
        let inode = |path: &Path| fs::metadata(path).unwrap().ino();
        let before = inode(&path);
        assert_eq!((file(&own()).unwrap(), inode(&path)), (path.clone(), before));
        // Another content of this name, a link, and one that others may write to are replaced.
        fs::write(&path, "x").unwrap();
        assert_eq!(fs::read(file(&own()).unwrap()).unwrap(), LIBRARY);
        fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        assert_eq!(mode(&file(&own()).unwrap()), 0o644);
        let elsewhere = root.join("elsewhere");
        fs::rename(&path, &elsewhere).unwrap();
        symlink(&elsewhere, &path).unwrap();
        assert!(fs::symlink_metadata(file(&own()).unwrap()).unwrap().is_file());
        assert_eq!(fs::read_dir(root.join("own")).unwrap().count(), 1, "nothing else is left");
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn folders_that_others_can_change_are_passed_over() {
        let root = scratch("others");
        let open = root.join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
        symlink(&root, root.join("link")).unwrap();
        fs::write(root.join("file"), "").unwrap();
        let wrong = [
            ("open", "others may write to it (mode 777)"),
            ("link", "it is a link or a file"),
            ("file", "it is a link or a file"),
            ("no/such", "ENOENT"),
            ("a b", "blank"),
            ("a:b", "colon"),
        ];
        let folders = wrong.map(|(name, _)| folder(root.join(name)));
        let error = file(&folders).unwrap_err();
        assert_eq!(error.exit_code(), 125);
        let error = error.to_string();
        for (name, part) in wrong {
            let reason = format!("{}: ", root.join(name).display());
            assert!(error.contains(&reason) && error.contains(part), "{name}: {error}");
        }
        let found = file(&[folder(open), folder(root.join("own"))]).unwrap();
        assert!(found.starts_with(root.join("own")));
        // Others may rename files in a folder that all may write to, unless it is sticky.
        let above = root.join("above");
        fs::create_dir(&above).unwrap();
        for (mode, is_safe) in [(0o777, false), (0o1777, true), (0o775, false), (0o755, true)] {
            fs::set_permissions(&above, Permissions::from_mode(mode)).unwrap();
            let usable = folder(above.join("own")).usable();
            assert_eq!(usable.is_ok(), is_safe, "{mode:o}: {usable:?}");
        }
        // A folder that a narrow umask has made is widened.
        let narrow = Folder { path: root.join("narrow"), mode: 0o755 };
        DirBuilder::new().mode(0o700).create(&narrow.path).unwrap();
        narrow.usable().unwrap();
        assert_eq!(fs::metadata(&narrow.path).unwrap().mode() & 0o777, 0o755);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn libraries_of_the_user_stay_and_come_first() {
        let own = Path::new("/run/libpageleap-place-1.so");
        for (before, after) in [
            ("", "/run/libpageleap-place-1.so"),
            ("/a.so", "/a.so:/run/libpageleap-place-1.so"),
            ("a.so /b.so::c.so", "a.so:/b.so:c.so:/run/libpageleap-place-1.so"),
            ("/tmp/libpageleap-place-2.so:/a.so", "/a.so:/run/libpageleap-place-1.so"),
        ] {
            assert_eq!(preload(before.as_ref(), Some(own)), *after, "{before}");
        }
        assert_eq!(preload("/x/libpageleap-place-2.so".as_ref(), None), "");
    }

    #[test]
    fn what_an_outer_command_has_set_is_undone() {
        let known = |names: &'static [(&str, &str)]| {
            move |name: &str| {
                names.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).into())
            }
        };
        assert_eq!(preloaded(None, None, known(&[("LD_PRELOAD", "/a.so")])), Ok(Vec::new()));
        let outer = known(&[
            ("PAGELEAP_PLACES", "1,0"),
            ("PAGELEAP_HOME", "1"),
            ("LD_PRELOAD", "/x/libpageleap-place-2.so"),
        ]);
        let undone = preloaded(None, None, outer).unwrap();
        assert!(undone.iter().all(|(_, value)| value.is_none()) && undone.len() == 3, "{undone:?}");
    }
}
