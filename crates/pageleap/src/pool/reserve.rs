//! Huge pages that are reserved as long as a value lives.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::topology::{Topology, huge_page_directory, read_count};
use crate::units::{NodeId, PageSize};

/// Huge pages that were added to a node's hugetlb pool. Dropping the value gives them back; drop
/// the pools that use them first.
#[derive(Debug)]
pub struct HugePageReservation {
    total: PathBuf,
    added: u64,
    /// The process that made it: a child made by `fork` gives nothing back.
    process: u32,
}

impl HugePageReservation {
    /// Raises the node's `nr_hugepages` until `pages` huge pages of that size are free. Needs root.
    /// Pages that another program has reserved and not yet used count as free. On a machine that
    /// has run for a while the kernel seldom finds pages of 1 GB: reserve them at boot
    /// (`hugepagesz=1G hugepages=N`).
    ///
    /// # Errors
    /// If the page size is not one of hugetlb, the file cannot be written, or the kernel finds
    /// fewer contiguous pages than requested; pages that were added are given back.
    pub fn reserve(node: NodeId, page: PageSize, pages: u64) -> Result<Self, Error> {
        if !page.is_hugetlb() {
            return Err(Error::BadArgument {
                what: "page size",
                reason: format!("{page} pages need no reservation"),
                remedy: "use 2m or 1g".into(),
            });
        }
        let page = page.bytes() as u64;
        let total = huge_page_directory(node, page).join("nr_hugepages");
        let _only_us = lock_file(&total);
        let present = Topology::node_now(node)?;
        let missing = pages.saturating_sub(present.free_huge(page));
        // The kernel would take all memory of the node before it refused.
        if missing.saturating_mul(page) > present.total_bytes {
            return Err(Error::OutOfMemory {
                node,
                needed_bytes: missing.saturating_mul(page),
                free_bytes: present.free_bytes,
                limit: "the memory of the node".into(),
                remedy: "reserve fewer pages".into(),
            });
        }
        if missing == 0 {
            return Ok(HugePageReservation { total, added: 0, process: std::process::id() });
        }
        let before = read_count(&total)?;
        write(&total, before + missing)?;
        let added = read_count(&total)?.saturating_sub(before);
        if added < missing {
            write(&total, before)?;
            return Err(Error::OutOfMemory {
                node,
                needed_bytes: missing * page,
                free_bytes: added * page,
                limit: format!("the kernel ({})", total.display()),
                remedy: "free memory, or compact it first: echo 1 > /proc/sys/vm/compact_memory"
                    .into(),
            });
        }
        Ok(HugePageReservation { total, added, process: std::process::id() })
    }

    /// How many pages have been added.
    pub fn added(&self) -> u64 {
        self.added
    }
}

impl Drop for HugePageReservation {
    fn drop(&mut self) {
        if self.added == 0 || self.process != std::process::id() {
            return;
        }
        let _only_us = lock_file(&self.total);
        if let Ok(now) = read_count(&self.total) {
            let _ = write(&self.total, now.saturating_sub(self.added));
        }
    }
}

fn write(total: &Path, pages: u64) -> Result<(), Error> {
    fs::write(total, pages.to_string()).map_err(|e| Error::SystemFile {
        path: total.display().to_string(),
        reason: e.to_string(),
        remedy: "run as root, or ask an administrator to write the number of huge pages there",
    })
}

/// Keeps other reservations on this node out until the file is dropped, because each reads the
/// number of pages and writes another. A process that may not open the file cannot write the number
/// either.
fn lock_file(path: &Path) -> Option<File> {
    let file = File::open(path).ok()?;
    // SAFETY: locks a descriptor of ours; closing it unlocks.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) };
    Some(file)
}
