//! Children made by `fork`, and what they have of the process' memory.

#![allow(dead_code)] // each test binary uses a part of it

use std::ops::Range;

use crate::common::pool_mappings;

/// Where pools and regions are mapped now.
pub fn pool_ranges() -> Vec<Range<usize>> {
    let hex = |s: &str| usize::from_str_radix(s, 16).unwrap();
    let range = |line: String| {
        let (from, rest) = line.split_once('-').unwrap();
        hex(from)..hex(rest.split(' ').next().unwrap())
    };
    pool_mappings().into_iter().map(range).collect()
}

/// Makes a child that exits with the number of `addresses` that are mapped there.
pub fn mapped_in_a_child(addresses: &[usize]) -> i32 {
    // SAFETY: the child makes system calls only.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0);
        if child == 0 {
            let mut resident = 0u8;
            let is_mapped = |addr: &&usize| {
                libc::mincore(**addr as *mut libc::c_void, 4096, &mut resident) == 0
            };
            libc::_exit(addresses.iter().filter(is_mapped).count() as i32);
        }
        let mut status = 0;
        let ended = loop {
            match libc::waitpid(child, &mut status, 0) {
                -1 if *libc::__errno_location() == libc::EINTR => {}
                ended => break ended,
            }
        };
        assert_eq!(ended, child);
        assert!(libc::WIFEXITED(status), "{status:#x}");
        libc::WEXITSTATUS(status)
    }
}
