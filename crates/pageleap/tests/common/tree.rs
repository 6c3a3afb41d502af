//! Files of sysfs and procfs of the machines recorded in `tests/data/topology`, unpacked into
//! directories that are read instead of `/`.

#![allow(dead_code)] // each test binary uses a part of it

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The recorded machines: their names and files.
pub const RECORDED: [(&str, &str); 7] = [
    ("one", include_str!("../data/topology/one.tree")),
    ("two", include_str!("../data/topology/two.tree")),
    ("four", include_str!("../data/topology/four.tree")),
    ("eight", include_str!("../data/topology/eight.tree")),
    ("sparse", include_str!("../data/topology/sparse.tree")),
    ("tiers", include_str!("../data/topology/tiers.tree")),
    ("apart", include_str!("../data/topology/apart.tree")),
];

/// The directory that lists the nodes.
pub const NODE: &str = "sys/devices/system/node";

/// A directory with a machine's files. It is removed when the value is dropped.
pub struct Tree {
    parent: PathBuf,
}

impl Tree {
    /// A directory without files.
    pub fn empty() -> Tree {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let unique =
            format!("pageleap-tree-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let tree = Tree { parent: std::env::temp_dir().join(unique) };
        fs::create_dir_all(tree.root()).unwrap();
        tree
    }

    /// The files of a recorded machine.
    pub fn recorded(name: &str) -> Tree {
        let (_, text) =
            RECORDED.iter().find(|(recorded, _)| *recorded == name).expect("it is recorded");
        let tree = Tree::empty();
        for line in text.lines() {
            match line.split_once('\t') {
                Some((path, text)) => tree.put(path, text.replace("\\n", "\n")),
                None => {
                    let (path, target) = line.split_once(" -> ").expect("a file or a link");
                    tree.link(path, target);
                }
            }
        }
        tree
    }

    /// The path of the directory. Its parent contains nothing else.
    pub fn root(&self) -> PathBuf {
        self.parent.join("root")
    }

    fn place(&self, path: &str) -> PathBuf {
        let place = self.root().join(path);
        fs::create_dir_all(place.parent().expect("below the root")).unwrap();
        place
    }

    /// Writes a file.
    pub fn put(&self, path: &str, text: impl AsRef<[u8]>) {
        let place = self.place(path);
        // Removed first, so that the text is not written through an existing link.
        let _ = fs::remove_file(&place);
        fs::write(place, text).unwrap();
    }

    /// Replaces whatever is at the path by a link.
    pub fn link(&self, path: &str, target: impl AsRef<Path>) {
        let place = self.place(path);
        let _ = fs::remove_file(&place).or_else(|_| fs::remove_dir_all(&place));
        symlink(target, place).unwrap();
    }

    /// Replaces a file by a FIFO.
    pub fn fifo(&self, path: &str) {
        let place = self.place(path);
        let _ = fs::remove_file(&place);
        let made = std::process::Command::new("mkfifo").arg(place).status().expect("mkfifo runs");
        assert!(made.success());
    }

    /// Removes a file or a directory.
    pub fn remove(&self, path: &str) {
        let place = self.place(path);
        fs::remove_file(&place).or_else(|_| fs::remove_dir_all(&place)).unwrap();
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.parent);
    }
}
