//! Machines recorded in `tests/data/topology`, unpacked into folders that can be read instead of
//! `/`.

#![allow(dead_code)] // each test binary uses a part of it

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// All that there are.
pub const RECORDED: [(&str, &str); 7] = [
    ("one", include_str!("../data/topology/one.tree")),
    ("two", include_str!("../data/topology/two.tree")),
    ("four", include_str!("../data/topology/four.tree")),
    ("eight", include_str!("../data/topology/eight.tree")),
    ("sparse", include_str!("../data/topology/sparse.tree")),
    ("tiers", include_str!("../data/topology/tiers.tree")),
    ("apart", include_str!("../data/topology/apart.tree")),
];

/// The folder of the nodes.
pub const NODE: &str = "sys/devices/system/node";

/// A folder with a machine's files, which goes away with the value.
pub struct Tree {
    parent: PathBuf,
}

impl Tree {
    /// One without files.
    pub fn empty() -> Tree {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let unique =
            format!("pageleap-tree-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let tree = Tree { parent: std::env::temp_dir().join(unique) };
        fs::create_dir_all(tree.root()).unwrap();
        tree
    }

    /// A recorded one.
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

    /// Where it is. Nothing else is in its parent folder.
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
        // Not through a link that is there.
        let _ = fs::remove_file(&place);
        fs::write(place, text).unwrap();
    }

    /// Makes a link in the place of whatever is there.
    pub fn link(&self, path: &str, target: impl AsRef<Path>) {
        let place = self.place(path);
        let _ = fs::remove_file(&place).or_else(|_| fs::remove_dir_all(&place));
        symlink(target, place).unwrap();
    }

    /// Makes a FIFO in the place of a file.
    pub fn fifo(&self, path: &str) {
        let place = self.place(path);
        let _ = fs::remove_file(&place);
        let made = std::process::Command::new("mkfifo").arg(place).status().expect("mkfifo runs");
        assert!(made.success());
    }

    /// Takes a file or a folder away.
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
