//! Huge pages that are reserved as long as a value lives.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::topology::{SysFiles, Topology, huge_page_directory, read_count, unreserved_huge_pages};
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
    /// Raises the node's `nr_hugepages` until `pages` huge pages of that size are free there, and as
    /// many on the machine that no mapping of another program has reserved. Needs root. On a machine that
    /// has run for a while the kernel seldom finds pages of 1 GB: reserve them at boot
    /// (`hugepagesz=1G hugepages=N`).
    ///
    /// # Errors
    /// If the page size is not one of hugetlb, the file cannot be written, or the kernel finds
    /// fewer contiguous pages than requested; pages that were added are given back.
    pub fn reserve(node: NodeId, page: PageSize, pages: u64) -> Result<Self, Error> {
        let total = count_file(node, page)?;
        let _only_us = lock_file(&total);
        let free = Topology::node_now(node)?.free_huge(page.bytes() as u64);
        let unreserved = unreserved_huge_pages(&SysFiles::host(), page.bytes() as u64);
        let free = free.min(unreserved.unwrap_or(u64::MAX));
        raise(node, page, total, pages.saturating_sub(free))
    }

    /// Adds `pages` huge pages of that size to those of the node, however many are free: pages that
    /// somebody else has reserved stay free for them. Needs root.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn add(node: NodeId, page: PageSize, pages: u64) -> Result<Self, Error> {
        let total = count_file(node, page)?;
        let _only_us = lock_file(&total);
        raise(node, page, total, pages)
    }

    /// Takes over pages that a process had added and not given back when it ended. Dropping the
    /// value gives them back.
    ///
    /// # Errors
    /// If the page size is not one of hugetlb.
    pub fn left_behind(node: NodeId, page: PageSize, pages: u64) -> Result<Self, Error> {
        let total = count_file(node, page)?;
        Ok(HugePageReservation { total, added: pages, process: std::process::id() })
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
        if let Ok(now) = reserved(&self.total) {
            let _ = write(&self.total, now.saturating_sub(self.added));
        }
    }
}

/// The file with the number of huge pages of that size on the node.
fn count_file(node: NodeId, page: PageSize) -> Result<PathBuf, Error> {
    if !page.is_hugetlb() {
        return Err(Error::BadArgument {
            what: "page size",
            reason: format!("{page} pages need no reservation"),
            remedy: "use 2m or 1g".into(),
        });
    }
    Ok(huge_page_directory(node, page.bytes() as u64).join("nr_hugepages"))
}

/// Raises the number in `total` by `missing`. The caller has locked the file.
fn raise(
    node: NodeId,
    page: PageSize,
    total: PathBuf,
    missing: u64,
) -> Result<HugePageReservation, Error> {
    let page = page.bytes() as u64;
    let present = Topology::node_now(node)?;
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
    let before = reserved(&total)?;
    write(&total, before + missing)?;
    let added = reserved(&total)?.saturating_sub(before);
    if added < missing {
        write(&total, before)?;
        return Err(Error::OutOfMemory {
            node,
            needed_bytes: missing * page,
            free_bytes: added * page,
            limit: format!("the kernel ({})", total.display()),
            remedy: "free memory, or compact it first: echo 1 > /proc/sys/vm/compact_memory".into(),
        });
    }
    Ok(HugePageReservation { total, added, process: std::process::id() })
}

/// The number of persistent huge pages, without surplus pages. Reading the file counts surplus
/// pages too, but the number to write there is without them.
fn reserved(total: &Path) -> Result<u64, Error> {
    let surplus = read_count(&total.with_file_name("surplus_hugepages")).unwrap_or(0);
    Ok(read_count(total)?.saturating_sub(surplus))
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
