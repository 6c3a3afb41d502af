//! The archive that the kernel unpacks into its first file system: cpio in the `newc` format,
//! uncompressed. One file may hold several archives in a row
//! (Documentation/driver-api/early-userspace/buffer-format.rst of Linux).

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;

/// Names and contents are padded to a multiple of this number of bytes.
const ALIGN: usize = 4;

/// Type bits of a file's mode: directory, regular file, character device.
const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const DEVICE: u32 = 0o020_000;

/// Files by their places, with their contents; an empty directory has none.
pub type Files = BTreeMap<PathBuf, Option<Vec<u8>>>;

/// An archive that is being written.
#[derive(Debug)]
pub struct Archive<W: Write> {
    out: W,
    written: usize,
    inode: u32,
}

impl<W: Write> Archive<W> {
    /// Starts an archive.
    pub fn new(out: W) -> Archive<W> {
        Archive { out, written: 0, inode: 0 }
    }

    /// Adds a directory. Its parent directories must be added before it.
    pub fn directory(&mut self, path: &str) -> io::Result<()> {
        self.entry(path, DIRECTORY | 0o755, (0, 0), &[])
    }

    /// Adds a file that every user may read and execute.
    pub fn file(&mut self, path: &str, contents: &[u8]) -> io::Result<()> {
        self.entry(path, FILE | 0o755, (0, 0), contents)
    }

    /// Adds a character device for root.
    pub fn device(&mut self, path: &str, major: u32, minor: u32) -> io::Result<()> {
        self.entry(path, DEVICE | 0o600, (major, minor), &[])
    }

    /// Writes the trailer and ends the archive.
    pub fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(
        &mut self,
        path: &str,
        mode: u32,
        device: (u32, u32),
        contents: &[u8],
    ) -> io::Result<()> {
        self.inode += 1;
        let size = u32::try_from(contents.len())
            .map_err(|_| io::Error::other(format!("{path} is too large")))?;
        // The fields in order: inode, mode, user, group, links, time, size, device that holds the
        // file, device that the file is, length of the name with its NUL, checksum (unused).
        let fields = [
            self.inode,
            mode,
            0,
            0,
            1,
            0,
            size,
            0,
            0,
            device.0,
            device.1,
            path.len() as u32 + 1,
            0,
        ];
        let mut head = String::from("070701");
        fields.iter().for_each(|field| head += &format!("{field:08X}"));
        self.write(head.as_bytes())?;
        self.write(path.as_bytes())?;
        self.write(&[0])?;
        self.fill()?;
        self.write(contents)?;
        self.fill()
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len();
        self.out.write_all(bytes)
    }

    fn fill(&mut self) -> io::Result<()> {
        let rest = self.written.next_multiple_of(ALIGN) - self.written;
        self.write(&[0; ALIGN][..rest])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_end_with_the_trailer() {
        let mut archive = Archive::new(Vec::new());
        archive.directory("dev").unwrap();
        archive.device("dev/console", 5, 1).unwrap();
        archive.file("init", b"12345").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % ALIGN, 0);
        let mut at = 0;
        let mut names = Vec::new();
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 6], b"070701", "no entry starts at {at}");
            let field = |i: usize| {
                let text = std::str::from_utf8(&bytes[at + 6 + i * 8..at + 14 + i * 8]).unwrap();
                usize::from_str_radix(text, 16).unwrap()
            };
            let (mode, size, name_len) = (field(1), field(6), field(11));
            let name = std::str::from_utf8(&bytes[at + 110..at + 110 + name_len - 1]).unwrap();
            let contents = (at + 110 + name_len).next_multiple_of(ALIGN);
            names.push((name.to_owned(), mode, size, (field(9), field(10))));
            if name == "init" {
                assert_eq!(&bytes[contents..contents + size], b"12345");
            }
            at = (contents + size).next_multiple_of(ALIGN);
        }
        assert_eq!(names.len(), 4);
        assert_eq!(names[1], ("dev/console".to_owned(), 0o020_600, 0, (5, 1)));
        assert_eq!((names[2].1, names[2].2), (0o100_755, 5));
        assert_eq!(names[3].0, "TRAILER!!!");
    }
}
