//! Reads files of `/proc` about this process.

use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::descriptor::KeptFd;
use crate::errno::{Errno, check};

/// Opens a file of `/proc` about this process, such as `maps`, through the calling thread
/// (`/proc/thread-self`, Linux 3.17). `/proc/self` stands for the main thread, and shows neither
/// memory nor descriptors once that has ended. It is used only where `/proc/thread-self` is
/// refused. Allocates nothing.
///
/// The descriptor gets a number out of the way ([`crate::out_of_the_way`]). If other code closes
/// it, reads fail.
///
/// # Errors
/// Those of `open(2)`. ENAMETOOLONG: the name has more than 32 bytes.
pub fn open_own(name: &str) -> Result<KeptFd, Errno> {
    open_below(b"/proc/thread-self/", name).or_else(|_| open_below(b"/proc/self/", name))
}

fn open_below(folder: &[u8], name: &str) -> Result<KeptFd, Errno> {
    let mut path = [0u8; 64];
    let name = name.as_bytes();
    let len = folder.len() + name.len();
    if name.len() > 32 || name.contains(&0) {
        return Err(Errno(libc::ENAMETOOLONG));
    }
    path[..folder.len()].copy_from_slice(folder);
    path[folder.len()..len].copy_from_slice(name);
    // SAFETY: the path ends with NUL, because the rest of the array is zero. The descriptor is new,
    // and nobody else has it.
    let file = unsafe {
        let file = libc::open(path.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC);
        OwnedFd::from_raw_fd(check(file.into())? as i32)
    };
    KeptFd::new(file)
}

/// The whole text of a file below `/proc/self`, read into one buffer ([`open_own`]).
///
/// # Errors
/// Those of [`open_own`] and of `read(2)`.
pub fn read_own(name: &str) -> Result<Vec<u8>, Errno> {
    /// The most that the kernel mostly returns at once.
    const PART: usize = 4096;
    let mut file = open_own(name)?;
    let (mut text, mut used) = (vec![0; PART], 0);
    loop {
        // The kernel ends the file with an empty read, so there must always be room for another
        // one.
        if text.len() - used < PART {
            text.resize(2 * text.len(), 0);
        }
        match file.read_part(&mut text[used..])? {
            0 => break,
            read => used += read,
        }
    }
    text.truncate(used);
    Ok(text)
}

impl KeptFd {
    fn read_part(&mut self, into: &mut [u8]) -> Result<usize, Errno> {
        if !self.is_ours() {
            return Err(Errno(libc::EBADF));
        }
        // SAFETY: the kernel writes at most as many bytes as the buffer has.
        let read = unsafe { libc::read(self.as_raw_fd(), into.as_mut_ptr().cast(), into.len()) };
        Ok(check(read as libc::c_long)? as usize)
    }
}

impl Read for KeptFd {
    /// Fails with EBADF if the number stands for another file now.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        Ok(self.read_part(into)?)
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn each_thread_opens_what_is_its_own() {
        let thread = || {
            // SAFETY: the call takes no arguments.
            let own = unsafe { libc::gettid() };
            let text = io::read_to_string(open_own("stat").unwrap()).unwrap();
            assert!(text.starts_with(&format!("{own} (")), "{text}");
        };
        thread();
        std::thread::spawn(thread).join().unwrap();
        assert_eq!(read_own("comm").unwrap(), std::fs::read("/proc/thread-self/comm").unwrap());
        assert!(read_own("smaps").unwrap().len() > 8192, "in several parts");
        assert_eq!(open_own("no such file").unwrap_err(), Errno(libc::ENOENT));
        assert!(open_own(&"long".repeat(9)).is_err());
    }

    #[test]
    fn a_number_of_another_file_is_not_read() {
        let mut maps = open_own("maps").unwrap();
        let theirs = std::fs::File::open("/dev/zero").unwrap();
        // SAFETY: the call takes no pointers, and the number is this test's.
        assert!(unsafe { libc::dup2(theirs.as_raw_fd(), maps.as_raw_fd()) } >= 0);
        let error = maps.read(&mut [0]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        let number = maps.as_raw_fd();
        drop(maps);
        // SAFETY: the test's own duplicate.
        assert_eq!(unsafe { libc::close(number) }, 0, "it was closed");
    }
}
