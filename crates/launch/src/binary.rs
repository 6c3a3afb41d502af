//! Whether the loader would preload a library into a program.
//!
//! The kernel starts a loader only for programs that name one (`PT_INTERP`): static programs run
//! without. The loader ignores `LD_PRELOAD` of programs that have more rights than the user who starts
//! them (`AT_SECURE`), and libraries for other machines. Of a script the *interpreter* counts.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::library::LIBRARY;
use crate::program::SHELL;

/// Scripts of scripts that the kernel follows (`exec_binprm` in Linux, fs/exec.c).
const SCRIPTS: usize = 4;
/// Bytes of a script's first line that the kernel reads (`BINPRM_BUF_SIZE`).
const FIRST_LINE: usize = 256;

const MAGIC: &[u8] = b"\x7fELF";
/// Offsets of ELF's header for 64-bit machines: class and byte order, the machine, and the table of
/// program headers.
const CLASS_AND_ORDER: std::ops::Range<usize> = 4..6;
const MACHINE: std::ops::Range<usize> = 18..20;
const HEADER: usize = 64;
const TABLE: usize = 32;
const ENTRY_BYTES: usize = 54;
const ENTRIES: usize = 56;
/// A part of the file in memory (`PT_LOAD`), the dynamic section (`PT_DYNAMIC`), and the loader's path
/// (`PT_INTERP`).
const LOADED: u64 = 1;
const DYNAMIC: u64 = 2;
const INTERPRETER: u64 = 3;
/// Tags of the dynamic section: a library that is loaded (`DT_NEEDED`), and the address of the names
/// (`DT_STRTAB`).
const NEEDED: u64 = 1;
const NAMES: u64 = 5;
/// The name of AddressSanitizer's library begins with this.
const SANITIZER: &[u8] = b"libasan.so";

/// Why the loader preloads nothing into a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotPreloaded {
    /// It has no loader.
    Static,
    /// It has rights of another user, of a group, or capabilities, so that the loader ignores
    /// `LD_PRELOAD`.
    Privileged,
    /// It loads the library of AddressSanitizer, which ends programs that load another one before.
    Sanitized,
    /// It is for another machine than this command, such as 32-bit programs.
    OtherMachine,
}

impl NotPreloaded {
    /// The reason as a part of a sentence: `… is linked statically`.
    pub fn reason(self) -> &'static str {
        match self {
            NotPreloaded::Static => "is linked statically",
            NotPreloaded::Privileged => "has rights of its own (set-user-id or capabilities)",
            NotPreloaded::Sanitized => {
                "loads AddressSanitizer, which preloaded libraries may not precede"
            }
            NotPreloaded::OtherMachine => "is built for another kind of CPU, or for 32 bits",
        }
    }
}

/// Why the loader would preload nothing into this program, if that is so. A file that cannot be read
/// is supposed to be like most programs.
pub fn not_preloaded(program: &Path) -> Option<NotPreloaded> {
    let path = interpreter(program);
    let file = File::open(&path).ok()?;
    match is_privileged(&path) {
        true => Some(NotPreloaded::Privileged),
        false => not_loaded(&file).ok().flatten(),
    }
}

/// The program that the kernel starts for this file: itself, or the last interpreter of scripts.
fn interpreter(program: &Path) -> PathBuf {
    let mut path = program.to_owned();
    for _ in 0..SCRIPTS {
        match script(&path) {
            Ok(Some(next)) => path = next,
            _ => break,
        }
    }
    path
}

/// Whether a file can be a library of programs of this machine: its header is that of one.
pub fn is_library(path: &Path) -> bool {
    /// The kind of shared objects (`ET_DYN`), and where the header has it.
    const SHARED: u16 = 3;
    const KIND: std::ops::Range<usize> = 16..18;
    let mut header = [0; HEADER];
    let read = File::open(path).and_then(|file| file.read_exact_at(&mut header, 0));
    let same = |bytes: std::ops::Range<usize>| header.get(bytes.clone()) == LIBRARY.get(bytes);
    let kind = u16::from_ne_bytes([header[KIND.start], header[KIND.start + 1]]);
    read.is_ok()
        && header.starts_with(MAGIC)
        && same(CLASS_AND_ORDER)
        && same(MACHINE)
        && kind == SHARED
}

/// The interpreter that a script names, or a shell for a file of no known format; `None` for a
/// program.
fn script(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut head = Vec::new();
    File::open(path)?.take(FIRST_LINE as u64).read_to_end(&mut head)?;
    if head.starts_with(MAGIC) {
        return Ok(None);
    }
    let Some(line) = head.strip_prefix(b"#!") else { return Ok(Some(SHELL.into())) };
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii();
    let word = line.split(|byte| matches!(byte, b' ' | b'\t' | 0)).next().unwrap_or_default();
    Ok(Some(PathBuf::from(std::ffi::OsStr::from_bytes(word))).filter(|path| path != Path::new("")))
}

/// Why the file would not load a library of this machine.
fn not_loaded(file: &File) -> io::Result<Option<NotPreloaded>> {
    let mut header = [0; HEADER];
    file.read_exact_at(&mut header, 0)?;
    if !header.starts_with(MAGIC) {
        return Ok(None);
    }
    let same = |bytes: std::ops::Range<usize>| header.get(bytes.clone()) == LIBRARY.get(bytes);
    if !same(CLASS_AND_ORDER) || !same(MACHINE) {
        return Ok(Some(NotPreloaded::OtherMachine));
    }
    // The class is that of this command.
    let short = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
    let table = u64::from_ne_bytes(header[TABLE..TABLE + 8].try_into().unwrap_or_default());
    let mut parts = Vec::new();
    for entry in 0..u64::from(short(ENTRIES)) {
        let at = table.saturating_add(entry * u64::from(short(ENTRY_BYTES)));
        // The kind and flags, the offset in the file, the address, another address, and the bytes.
        let [kind, offset, address, _, bytes] = numbers(file, at)?;
        // The kind is the first half in memory.
        let [first, second, third, fourth, ..] = kind.to_ne_bytes();
        let kind = u32::from_ne_bytes([first, second, third, fourth]).into();
        parts.push(Part { kind, offset, address, bytes });
    }
    if !parts.iter().any(|part| part.kind == INTERPRETER) {
        return Ok(Some(NotPreloaded::Static));
    }
    let is_sanitized = is_sanitized(file, &parts).unwrap_or(false);
    Ok(Some(NotPreloaded::Sanitized).filter(|_| is_sanitized))
}

/// A part of a program's file.
struct Part {
    kind: u64,
    offset: u64,
    address: u64,
    bytes: u64,
}

/// Numbers of 64 bits in a file.
fn numbers<const N: usize>(file: &File, at: u64) -> io::Result<[u64; N]> {
    let mut numbers = [0; N];
    for (number, at) in numbers.iter_mut().zip((at..).step_by(8)) {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at)?;
        *number = u64::from_ne_bytes(bytes);
    }
    Ok(numbers)
}

/// Whether the program names the library of AddressSanitizer among those that it needs.
fn is_sanitized(file: &File, parts: &[Part]) -> io::Result<bool> {
    let (mut needed, mut names) = (Vec::new(), 0);
    for part in parts.iter().filter(|part| part.kind == DYNAMIC) {
        for entry in 0..part.bytes.min(1 << 16) / 16 {
            match numbers(file, part.offset.saturating_add(entry * 16))? {
                [0, _] => break,
                [NEEDED, name] => needed.push(name),
                [NAMES, address] => names = address,
                _ => {}
            }
        }
    }
    let offset = parts.iter().filter(|part| part.kind == LOADED).find_map(|part| {
        let inside = names.checked_sub(part.address).filter(|inside| *inside < part.bytes)?;
        part.offset.checked_add(inside)
    });
    let Some(offset) = offset else { return Ok(false) };
    let is_named = |name: &u64| {
        let mut bytes = [0; SANITIZER.len()];
        let read = file.read_exact_at(&mut bytes, offset.saturating_add(*name));
        read.is_ok() && bytes == SANITIZER
    };
    Ok(needed.iter().any(is_named))
}

/// Whether the program gets rights that this process has not, so that the kernel sets `AT_SECURE`
/// (`cap_bprm_creds_from_file` in Linux, security/commoncap.c).
fn is_privileged(path: &Path) -> bool {
    let Ok(file) = fs::metadata(path) else { return false };
    // SAFETY: the calls take no pointers.
    let (user, group, gets_none) = unsafe {
        let gets_none = libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1;
        (libc::getuid(), libc::getgid(), gets_none)
    };
    if gets_none || is_nosuid(path) {
        return false;
    }
    let (set_user, set_group) = (libc::S_ISUID, libc::S_ISGID | libc::S_IXGRP);
    (file.mode() & set_user == set_user && file.uid() != user)
        || (file.mode() & set_group == set_group && file.gid() != group)
        || (user != 0 && has_capabilities(path))
}

fn is_nosuid(path: &Path) -> bool {
    let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: the call reads a string that ends with zero, and writes one structure, for which zeros
    // are valid.
    unsafe {
        let mut system: libc::statvfs = std::mem::zeroed();
        libc::statvfs(path.as_ptr(), &mut system) == 0 && system.f_flag & libc::ST_NOSUID != 0
    }
}

fn has_capabilities(path: &Path) -> bool {
    let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: the call reads two strings that end with zero, and with a size of 0 it writes nothing.
    unsafe {
        libc::getxattr(path.as_ptr(), c"security.capability".as_ptr(), std::ptr::null_mut(), 0) > 0
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let name = format!("pageleap-binary-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::create_dir_all(&path).unwrap();
            Folder(path)
        }

        fn file(&self, name: &str, bytes: impl AsRef<[u8]>, mode: u32) -> PathBuf {
            let path = self.0.join(name);
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_library_has_the_header_of_one() {
        let folder = Folder::new("libraries");
        let library = folder.file("library.so", LIBRARY, 0o644);
        assert!(is_library(&library));
        let mut other = LIBRARY.to_vec();
        other[MACHINE.start] ^= 1;
        for (name, bytes) in [("text", &b"text"[..]), ("other", &other), ("short", &LIBRARY[..40])]
        {
            assert!(!is_library(&folder.file(name, bytes, 0o644)), "{name}");
        }
        assert!(!is_library(&folder.0) && !is_library(Path::new("/no/such/file")));
    }

    #[test]
    fn scripts_are_judged_by_their_interpreter() {
        let folder = Folder::new("scripts");
        // The library names no loader, as static programs do.
        let program = folder.file("program", LIBRARY, 0o755);
        let program = program.to_str().unwrap();
        let mut next = program.to_owned();
        for depth in 1..=5 {
            let text = format!("#! \t{next} -x\necho\n");
            let script = folder.file(&format!("script{depth}"), text, 0o755);
            let expected = (depth <= SCRIPTS).then_some(NotPreloaded::Static);
            assert_eq!(not_preloaded(&script), expected, "{depth}");
            next = script.to_str().unwrap().to_owned();
        }
        let own = std::env::current_exe().unwrap();
        let plain = folder.file("plain", "echo\n", 0o755);
        assert_eq!((not_preloaded(&own), interpreter(&plain)), (None, SHELL.into()));
        for odd in ["#!", "#! \n", "#!/no/such/shell"] {
            assert_eq!(not_preloaded(&folder.file("odd", odd, 0o755)), None, "{odd}");
        }
        assert_eq!(not_preloaded(&folder.0.join("none")), None);
    }

    #[test]
    fn programs_of_other_machines_and_broken_ones_are_told_apart() {
        let folder = Folder::new("machines");
        let changed = |at: usize, value: u8| {
            let mut bytes = LIBRARY.to_vec();
            bytes[at] = value;
            not_preloaded(&folder.file("changed", bytes, 0o755))
        };
        assert_eq!(changed(CLASS_AND_ORDER.start, 1), Some(NotPreloaded::OtherMachine));
        assert_eq!(changed(MACHINE.start, 8), Some(NotPreloaded::OtherMachine));
        // A table beyond the end.
        assert_eq!(changed(TABLE + 6, 0x7f), None);
        assert_eq!(not_preloaded(&folder.file("short", MAGIC, 0o755)), None);
    }

    #[test]
    fn a_program_with_rights_of_another_is_told_apart() {
        let folder = Folder::new("rights");
        let own = std::env::current_exe().unwrap();
        let bytes = fs::read(own).unwrap();
        let plain = folder.file("plain", &bytes, 0o755);
        let with = folder.file("with", &bytes, 0o4755);
        // A set-user-id program of this user gets nothing that this user has not.
        assert_eq!((not_preloaded(&plain), not_preloaded(&with)), (None, None));
        // SAFETY: the call takes no pointers.
        let is_root = unsafe { libc::geteuid() } == 0;
        if !is_root || is_nosuid(&with) {
            eprintln!("skipped: a_program_with_rights_of_another_is_told_apart: root and suid");
            return;
        }
        for (user, group, mode, expected) in [
            (Some(65_534), None, 0o4755, Some(NotPreloaded::Privileged)),
            (Some(65_534), None, 0o755, None),
            (Some(0), Some(65_534), 0o2755, Some(NotPreloaded::Privileged)),
            // Without the group's x the bit is about locks.
            (None, None, 0o2745, None),
        ] {
            std::os::unix::fs::chown(&with, user, group).unwrap();
            fs::set_permissions(&with, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(not_preloaded(&with), expected, "{mode:o}");
        }
    }
}
