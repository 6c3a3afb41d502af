//! Memory that no pool owns: mapped by the test itself.

#![allow(dead_code)] // each test binary uses a part of it

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicU64;

use pageleap::process::{nodes_of_pages, own_pid};
use pageleap::{BASE_PAGE, NodeId};

/// Memory of this process, by `mmap`.
pub struct Mapping {
    pub start: usize,
    pub len: usize,
}

impl Mapping {
    pub fn new(len: usize, flags: i32) -> Mapping {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        Mapping { start: start as usize, len }
    }

    /// Private memory in base pages. Children do not get it.
    pub fn own(len: usize) -> Mapping {
        let mapping = Mapping::new(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        mapping.advise(libc::MADV_NOHUGEPAGE);
        mapping.advise(libc::MADV_DONTFORK);
        mapping
    }

    pub fn advise(&self, advice: i32) {
        // SAFETY: the advice changes no contents.
        assert_eq!(unsafe { libc::madvise(self.start as *mut _, self.len, advice) }, 0);
    }

    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    pub fn pages(&self) -> impl Iterator<Item = usize> + use<> {
        self.range().step_by(BASE_PAGE)
    }

    /// Words that threads may write while pages move.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is readable, writable, aligned, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start as *const AtomicU64, self.len / 8) }
    }

    /// Writes the number of each page into it, so that it is on a node: on this one.
    pub fn fill(&self, node: NodeId) {
        on_node(node, || {
            for (at, page) in self.pages().enumerate() {
                // SAFETY: a word of the mapping.
                unsafe { (page as *mut u64).write_volatile(at as u64) };
            }
        });
    }

    pub fn check(&self) {
        for (at, page) in self.pages().enumerate() {
            // SAFETY: a word of the mapping.
            assert_eq!(unsafe { (page as *const u64).read_volatile() }, at as u64, "LOST");
        }
    }

    /// What `/proc/self/pagemap` says of each page.
    pub fn pagemap(&self) -> Vec<u64> {
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let mut entries = vec![0; self.len / BASE_PAGE * 8];
        pagemap.read_exact_at(&mut entries, (self.start / BASE_PAGE * 8) as u64).unwrap();
        let entries = entries.chunks_exact(8);
        entries.map(|entry| u64::from_ne_bytes(entry.try_into().unwrap())).collect()
    }

    /// How many pages are on each node.
    pub fn on_nodes(&self) -> BTreeMap<Option<NodeId>, usize> {
        nodes_of(own_pid().unwrap(), self.pages().collect())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nobody uses the mapping any more.
        unsafe { libc::munmap(self.start as *mut _, self.len) };
    }
}

/// How many of these pages of a process are on each node.
pub fn nodes_of(pid: u32, pages: Vec<usize>) -> BTreeMap<Option<NodeId>, usize> {
    let mut counts = BTreeMap::new();
    for node in nodes_of_pages(pid, &pages).unwrap() {
        *counts.entry(node).or_default() += 1;
    }
    counts
}

/// Runs `work` while new pages of this thread come from a node.
pub fn on_node(node: NodeId, work: impl FnOnce()) {
    let mask = 1u64 << node.0;
    let set = |mode: i32, mask: *const u64, bits: usize| {
        // SAFETY: the call reads one word.
        assert_eq!(unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask, bits) }, 0);
    };
    set(libc::MPOL_BIND, &raw const mask, 65);
    work();
    set(libc::MPOL_DEFAULT, std::ptr::null(), 0);
}
