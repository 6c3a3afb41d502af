//! Limits on the cost of reading, for one file or for all files of one machine together.
//!
//! A machine has thousands of files, and each of them is bounded. All of them together are bounded
//! too, far above what any kernel has, so that a hostile directory cannot keep a reader busy.

use std::cell::Cell;

use pageleap_sys::Errno;

/// Most files and directories that are opened: some thirty of each of 1024 nodes, and more.
const MAX_OPENED: usize = 1 << 17;
/// Most bytes that are read: 5 KB of each node, and as much again for its CPUs.
const MAX_BYTES: usize = 128 << 20;
/// Most entries of directories. The larger directories of a node are not listed.
const MAX_ENTRIES: usize = 1 << 18;
/// Most path steps behind symbolic links. Among the paths that are read, the kernel has such a link
/// only in `/proc/self`.
const MAX_STEPS: usize = 1 << 18;

/// The cost that reading may still have.
#[derive(Debug)]
pub(super) struct Effort {
    opened: Cell<usize>,
    bytes: Cell<usize>,
    entries: Cell<usize>,
    steps: Cell<usize>,
}

impl Effort {
    /// The limits, for one call or for all calls that read one machine.
    pub(super) fn new() -> Effort {
        Effort {
            opened: Cell::new(MAX_OPENED),
            bytes: Cell::new(MAX_BYTES),
            entries: Cell::new(MAX_ENTRIES),
            steps: Cell::new(MAX_STEPS),
        }
    }

    /// Counts a file or directory that is opened.
    pub(super) fn take_file(&self) -> Result<(), Errno> {
        take(&self.opened, 1)
    }

    /// Counts bytes that were read.
    pub(super) fn take_bytes(&self, bytes: usize) -> Result<(), Errno> {
        take(&self.bytes, bytes)
    }

    /// Counts entries of a directory that were listed.
    pub(super) fn take_entries(&self, entries: usize) -> Result<(), Errno> {
        take(&self.entries, entries)
    }

    /// Counts the steps of a path that a symbolic link leads along.
    pub(super) fn take_steps(&self, steps: usize) -> Result<(), Errno> {
        take(&self.steps, steps)
    }
}

/// Takes `amount` from the rest. Fails with EDQUOT, which reading itself never returns, if the rest
/// is smaller.
fn take(left: &Cell<usize>, amount: usize) -> Result<(), Errno> {
    let rest = left.get().checked_sub(amount);
    left.set(rest.unwrap_or(0));
    rest.map(|_| ()).ok_or(Errno(libc::EDQUOT))
}
