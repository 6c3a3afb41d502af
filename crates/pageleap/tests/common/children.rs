//! Children made by `fork`, and which memory they inherit.

/// Forks a child, and returns how many of `addresses` are mapped in the child.
pub fn mapped_in_a_child(addresses: &[usize]) -> i32 {
    // SAFETY: the child makes system calls only, and takes no lock that another thread may have
    // held at the fork. Addresses are passed as numbers: `mincore` accepts any.
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
