//! A process of two threads, of which the main one can end.

#![allow(dead_code)] // each test binary uses a part of it

use std::ffi::{CString, c_int, c_void};
use std::ops::Range;
use std::ptr;

/// Bytes of memory that the process has, in base pages of one mapping. A block of 2 MB lies in it.
pub const BYTES: usize = 4 << 20;
const STACK: usize = 64 << 10;

/// The process. It makes system calls only, and ends with the test.
pub struct TwoThreads {
    pub pid: u32,
    /// The thread that stays.
    pub other: u32,
    start: usize,
    /// A byte in it ends the main thread.
    end: c_int,
}

/// What the process tells.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Told {
    start: usize,
    other: usize,
}

extern "C" fn wait_for_ever(_: *mut c_void) -> c_int {
    loop {
        // SAFETY: it takes no argument.
        unsafe { libc::pause() };
    }
}

impl TwoThreads {
    /// Starts it with a name of up to 15 bytes.
    pub fn start(name: &str) -> TwoThreads {
        let name = CString::new(name).unwrap();
        let [mut tell, mut end] = [[0; 2]; 2];
        let mut told = Told::default();
        // SAFETY: the child makes system calls only, on memory of its own, and never returns.
        unsafe {
            assert_eq!(libc::pipe2(tell.as_mut_ptr(), libc::O_CLOEXEC), 0);
            assert_eq!(libc::pipe2(end.as_mut_ptr(), libc::O_CLOEXEC), 0);
            let pid = libc::fork();
            if pid == 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::prctl(libc::PR_SET_NAME, name.as_ptr());
                libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0);
                hold(tell[1], end[0]);
            }
            libc::close(tell[1]);
            libc::close(end[0]);
            let size = size_of::<Told>();
            let read = libc::read(tell[0], (&raw mut told).cast(), size);
            libc::close(tell[0]);
            assert!(pid > 0 && read == size as isize && told.other > 0, "it has not started");
            TwoThreads { pid: pid as u32, other: told.other as u32, start: told.start, end: end[1] }
        }
    }

    /// The same with a main thread that has ended.
    pub fn without_main_thread(name: &str) -> TwoThreads {
        let process = TwoThreads::start(name);
        process.end_main_thread();
        process
    }

    pub fn range(&self) -> Range<usize> {
        self.start..self.start + BYTES
    }

    pub fn end_main_thread(&self) {
        // SAFETY: one byte of a constant.
        assert_eq!(unsafe { libc::write(self.end, c".".as_ptr().cast(), 1) }, 1);
        while !std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap().contains(") Z ")
        {
            std::thread::yield_now();
        }
    }
}

impl Drop for TwoThreads {
    fn drop(&mut self) {
        // SAFETY: a child that nobody else has waited for, and a descriptor of this value.
        unsafe {
            libc::kill(self.pid as i32, libc::SIGKILL);
            libc::waitpid(self.pid as i32, ptr::null_mut(), 0);
            libc::close(self.end);
        }
    }
}

/// Maps memory, starts the other thread, and waits for the end of the main one.
///
/// # Safety
/// For a child of `fork`.
unsafe fn hold(tell: c_int, end: c_int) -> ! {
    const FLAGS: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    const THREAD: c_int = libc::CLONE_VM
        | libc::CLONE_FS
        | libc::CLONE_FILES
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_SYSVSEM;
    let both = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: new mappings, of which each page is touched; a stack of the other thread alone, which
    // uses no variable of its own.
    unsafe {
        let start = libc::mmap(ptr::null_mut(), BYTES, both, FLAGS, -1, 0).cast::<u8>();
        (0..BYTES).step_by(4096).for_each(|at| start.add(at).write_volatile(1));
        // Shared memory is no neighbour that the kernel joins with it.
        let shared = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        let stack = libc::mmap(ptr::null_mut(), STACK, both, shared, -1, 0);
        let other = libc::clone(wait_for_ever, stack.byte_add(STACK), THREAD, ptr::null_mut());
        let told = Told { start: start as usize, other: other.max(0) as usize };
        libc::write(tell, (&raw const told).cast(), size_of::<Told>());
        let mut byte = 0u8;
        libc::read(end, (&raw mut byte).cast(), 1);
        // The thread alone.
        libc::syscall(libc::SYS_exit, 0);
    }
    unreachable!("the thread has ended")
}
