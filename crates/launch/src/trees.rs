//! Files of a machine for tests.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use pageleap::topology::SysFiles;

/// A folder with files, which is removed in the end.
pub(crate) struct Tree(PathBuf);

impl Tree {
    /// Files by path and contents.
    pub(crate) fn new(files: &[(&str, &str)]) -> Tree {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let nth = NEXT.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("pageleap-tree-{}-{nth}", std::process::id()));
        std::fs::create_dir_all(&root).unwrap();
        for (path, text) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        Tree(root)
    }

    /// The path of a file or folder of it.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }

    /// Makes a symbolic link.
    pub(crate) fn link(&self, path: &str, target: &str) {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
    }

    pub(crate) fn files(&self) -> SysFiles {
        SysFiles::at(&self.0)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
