//! A child whose memory moves, and what a report says of it.

#![allow(dead_code)] // each test binary uses a part of it

use std::collections::BTreeMap;
use std::fs;

use pageleap::process::ProcessMemory;
use pageleap::{BASE_PAGE, KernelMigration, NodeId, Placement, Report};

use crate::mapping::{Mapping, nodes_of};

/// A child that has touched memory of its own on a node and waits for its end.
pub struct Child {
    pub pid: libc::pid_t,
    pub mapping: Mapping,
}

impl Child {
    pub fn new(len: usize, flags: i32, advice: i32, node: NodeId) -> Child {
        let mapping = Mapping::new(len, flags);
        if advice >= 0 {
            mapping.advise(advice);
        }
        let mut pipe = [0; 2];
        // SAFETY: the child makes system calls only, touches the mapping, and never returns.
        let pid = unsafe {
            assert_eq!(libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC), 0);
            let pid = libc::fork();
            if pid == 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                let mask = 1u64 << node.0;
                libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_BIND, &raw const mask, 65);
                for (at, page) in mapping.pages().enumerate() {
                    (page as *mut u64).write_volatile(at as u64);
                }
                libc::write(pipe[1], b"x".as_ptr().cast(), 1);
                loop {
                    libc::pause();
                }
            }
            libc::close(pipe[1]);
            assert_eq!(libc::read(pipe[0], [0u8].as_mut_ptr().cast(), 1), 1, "the child has ended");
            libc::close(pipe[0]);
            pid
        };
        Child { pid, mapping }
    }

    pub fn base(len: usize, node: NodeId) -> Child {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        Child::new(len, flags, libc::MADV_NOHUGEPAGE, node)
    }

    pub fn pid(&self) -> u32 {
        self.pid as u32
    }

    pub fn memory(&self) -> ProcessMemory {
        ProcessMemory::read(self.pid()).unwrap()
    }

    pub fn kill(&self) {
        // SAFETY: a child that nobody has waited for.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
    }

    /// Moves its mapping.
    pub fn move_to(&self, to: impl Into<Placement>) -> Report {
        let memory = self.memory();
        run(KernelMigration::new().range(&memory, self.mapping.range(), to))
    }

    pub fn on_nodes(&self) -> BTreeMap<Option<NodeId>, usize> {
        nodes_of(self.pid(), self.mapping.pages().collect())
    }

    /// Reads its memory through the kernel.
    pub fn check(&self) {
        let memory = fs::File::open(format!("/proc/{}/mem", self.pid)).unwrap();
        for (at, page) in self.mapping.pages().enumerate() {
            let mut word = [0; 8];
            std::os::unix::fs::FileExt::read_exact_at(&memory, &mut word, page as u64).unwrap();
            assert_eq!(u64::from_ne_bytes(word), at as u64, "LOST: page {at}");
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
        // SAFETY: as above.
        unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), 0) };
    }
}

pub fn run(migration: KernelMigration<'_>) -> Report {
    migration.start().unwrap().wait()
}

/// What became of the pages of a report, in pages.
pub fn outcomes(report: &Report) -> BTreeMap<(String, Option<String>), usize> {
    let mut counts = BTreeMap::new();
    for run in &report.runs {
        let reason = run.reason.map(|reason| reason.to_string());
        *counts.entry((format!("{:?}", run.outcome), reason)).or_default() +=
            run.range.len() / BASE_PAGE;
    }
    counts
}

pub fn all_migrated(report: &Report, pages: usize) {
    let all = BTreeMap::from([(("Migrated".to_owned(), None), pages)]);
    assert_eq!(outcomes(report), all, "{report}");
    assert!(report.ended.is_completed(), "{report}");
}
