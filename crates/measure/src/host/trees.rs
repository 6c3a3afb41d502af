//! Files of a machine for tests.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use pageleap::topology::SysFiles;

/// A folder with files, which is removed when the value is dropped.
pub(super) struct Tree(PathBuf);

impl Tree {
    /// A folder with these files: path and contents.
    pub(super) fn new(files: &[(&str, &str)]) -> Tree {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let nth = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("pageleap-host-{}-{nth}", std::process::id());
        let tree = Tree(std::env::temp_dir().join(name));
        std::fs::create_dir_all(&tree.0).unwrap();
        files.iter().for_each(|(path, text)| tree.write(path, text));
        tree
    }

    /// Writes a file, new or not.
    pub(super) fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub(super) fn files(&self) -> SysFiles {
        SysFiles::at(&self.0)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
