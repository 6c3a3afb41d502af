//! A directory for one test, removed when dropped.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Numbers the directories of this process, since tests run in parallel.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// See the module.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Makes an empty directory whose name tells its purpose.
    pub fn new(purpose: &str) -> Scratch {
        // Relaxed: only uniqueness matters, which a single atomic addition gives.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("pageleap-xtask-{purpose}-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("the temporary directory is writable");
        Scratch(path)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A left-over in the temporary directory does no harm, and a panic here would hide the
        // test's own.
        let _ = fs::remove_dir_all(&self.0);
    }
}
