//! System calls by which the kernel writes to or reads from memory of the process, and the files
//! that the calls need.

#![allow(dead_code)] // each test binary uses a part of it

use std::fs::File;
use std::io::{Error, Read, Result, Seek, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;

use io_uring::{IoUring, opcode, types::Fd};

/// The pipe, the file and the sockets on which calls are made.
pub struct Ends {
    pipe: (File, File),
    file: File,
    sockets: [UnixStream; 2],
    packets: [File; 2],
    /// `None` if io_uring is refused here.
    pub ring: Option<IoUring>,
}

/// A pipe whose ends are closed on exec: the read end and the write end.
pub fn pipe() -> (File, File) {
    let mut ends: [RawFd; 2] = [0; 2];
    // SAFETY: the call writes two descriptors into the array. Both are new, and each becomes one
    // file.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
    }
}

impl Ends {
    pub fn new() -> Ends {
        let (pipe, mut packets) = (pipe(), [0; 2]);
        // SAFETY: the first call takes numbers only. The second writes two descriptors into the
        // array. Both are new, and each becomes one file.
        let packets = unsafe {
            assert!(libc::fcntl(pipe.0.as_raw_fd(), libc::F_SETPIPE_SZ, 1 << 18) > 0);
            let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
            assert_eq!(libc::socketpair(libc::AF_UNIX, kind, 0, packets.as_mut_ptr()), 0);
            packets.map(|fd| File::from_raw_fd(fd))
        };
        let sockets = UnixStream::pair().unwrap().into();
        Ends { pipe, file: memory_file(), sockets, packets, ring: IoUring::new(4).ok() }
    }

    /// Runs one request and returns its result.
    fn submit(&mut self, entry: io_uring::squeue::Entry) -> Result<usize> {
        let ring = self.ring.as_mut().expect("callers check that io_uring works");
        // SAFETY: the memory that the entry names lives until this function returns, and by then
        // the request is complete.
        unsafe { ring.submission().push(&entry) }.unwrap();
        let done = loop {
            match ring.submit_and_wait(1) {
                Err(error) if error.kind() != std::io::ErrorKind::Interrupted => panic!("{error}"),
                _ => {}
            }
            if let Some(done) = ring.completion().next() {
                break done.result();
            }
        };
        match -done {
            // Older kernels (6.1) answer this if a signal arrives while they queue the request for
            // a worker.
            libc::ECANCELED => Err(Error::from_raw_os_error(libc::EINTR)),
            errno if errno > 0 => Err(Error::from_raw_os_error(errno)),
            _ => Ok(done as usize),
        }
    }

    /// Writes data to the start of the file.
    pub fn put(&mut self, data: &[u8]) {
        self.file.rewind().unwrap();
        self.file.write_all(data).unwrap();
    }

    /// The whole file.
    pub fn contents(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        self.file.rewind().unwrap();
        self.file.read_to_end(&mut all).unwrap();
        all
    }
}

fn memory_file() -> File {
    // SAFETY: the name is a constant string. The descriptor is new, and becomes one file.
    unsafe {
        let fd = libc::memfd_create(c"system_calls".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0);
        File::from_raw_fd(fd)
    }
}

/// The result of a call that returns a count, or -1 and errno.
fn counted(done: isize) -> Result<usize> {
    if done < 0 { Err(Error::last_os_error()) } else { Ok(done as usize) }
}

/// A call by which the kernel writes data to an address.
pub struct Writing {
    pub name: &'static str,
    /// Puts data where the call will read it from.
    pub feed: fn(&mut Ends, &[u8]),
    /// Lets the kernel write the data that was fed, from byte `done` on, to `len` bytes at `to`.
    pub take: fn(ends: &mut Ends, to: *mut u8, len: usize, done: usize) -> Result<usize>,
    /// Whether a failed call consumes nothing, so that it can be repeated (docs/protocol.md,
    /// section 10).
    pub keeps: bool,
    /// Whether the call needs io_uring.
    pub by_ring: bool,
}

fn into_pipe(ends: &mut Ends, data: &[u8]) {
    ends.pipe.1.write_all(data).unwrap();
}

// SAFETY of all blocks: callers pass the address of `len` bytes in a region that outlives the call.
// All accesses to these bytes by the process are atomic.
#[allow(clippy::undocumented_unsafe_blocks)]
pub static WRITING: [Writing; 8] = [
    Writing {
        name: "read(pipe)",
        feed: into_pipe,
        take: |ends, to, len, _| {
            counted(unsafe { libc::read(ends.pipe.0.as_raw_fd(), to.cast(), len) })
        },
        keeps: true,
        by_ring: false,
    },
    Writing {
        name: "pread",
        feed: Ends::put,
        take: |ends, to, len, done| {
            counted(unsafe { libc::pread(ends.file.as_raw_fd(), to.cast(), len, done as i64) })
        },
        keeps: true,
        by_ring: false,
    },
    Writing {
        name: "preadv",
        feed: Ends::put,
        take: |ends, to, len, done| {
            let piece =
                |from, len| libc::iovec { iov_base: to.wrapping_add(from).cast(), iov_len: len };
            let pieces = [piece(0, len / 4), piece(len / 4, len - len / 4)];
            counted(unsafe { libc::preadv(ends.file.as_raw_fd(), pieces.as_ptr(), 2, done as i64) })
        },
        keeps: true,
        by_ring: false,
    },
    Writing {
        name: "recv(stream)",
        feed: |ends, data| ends.sockets[0].write_all(data).unwrap(),
        take: |ends, to, len, _| {
            let all = libc::MSG_WAITALL;
            counted(unsafe { libc::recv(ends.sockets[1].as_raw_fd(), to.cast(), len, all) })
        },
        keeps: true,
        by_ring: false,
    },
    // A packet that cannot be delivered is lost.
    Writing {
        name: "recv(packet)",
        feed: |ends, data| assert_eq!(ends.packets[0].write(data).unwrap(), data.len()),
        take: |ends, to, len, _| {
            counted(unsafe { libc::recv(ends.packets[1].as_raw_fd(), to.cast(), len, 0) })
        },
        keeps: false,
        by_ring: false,
    },
    Writing {
        name: "io_uring read(pipe)",
        feed: into_pipe,
        take: |ends, to, len, _| {
            let read = opcode::Read::new(Fd(ends.pipe.0.as_raw_fd()), to, len as u32);
            ends.submit(read.build())
        },
        keeps: true,
        by_ring: true,
    },
    Writing {
        name: "io_uring read(file)",
        feed: Ends::put,
        take: |ends, to, len, done| {
            let read =
                opcode::Read::new(Fd(ends.file.as_raw_fd()), to, len as u32).offset(done as u64);
            ends.submit(read.build())
        },
        keeps: true,
        by_ring: true,
    },
    // A thread of the kernel writes, not the calling thread.
    Writing {
        name: "io_uring read(file, async)",
        feed: Ends::put,
        take: |ends, to, len, done| {
            let read =
                opcode::Read::new(Fd(ends.file.as_raw_fd()), to, len as u32).offset(done as u64);
            ends.submit(read.build().flags(io_uring::squeue::Flags::ASYNC))
        },
        keeps: true,
        by_ring: true,
    },
];

/// A call by which the kernel reads data at an address.
pub struct Reading {
    pub name: &'static str,
    /// Lets the kernel read `len` bytes at `from`. Afterwards the file holds what was read.
    pub take: fn(ends: &mut Ends, from: *mut u8, len: usize) -> Result<usize>,
    /// Whether the call needs io_uring.
    pub by_ring: bool,
}

// SAFETY of all blocks: as for `WRITING`.
#[allow(clippy::undocumented_unsafe_blocks)]
pub static READING: [Reading; 4] = [
    Reading {
        name: "write(pipe)",
        take: |ends, from, len| {
            let written =
                counted(unsafe { libc::write(ends.pipe.1.as_raw_fd(), from.cast(), len) })?;
            let mut back = vec![0; written];
            ends.pipe.0.read_exact(&mut back).unwrap();
            ends.put(&back);
            Ok(written)
        },
        by_ring: false,
    },
    Reading {
        name: "pwrite",
        take: |ends, from, len| {
            counted(unsafe { libc::pwrite(ends.file.as_raw_fd(), from.cast(), len, 0) })
        },
        by_ring: false,
    },
    Reading {
        name: "send",
        take: |ends, from, len| {
            let sent =
                counted(unsafe { libc::send(ends.sockets[0].as_raw_fd(), from.cast(), len, 0) })?;
            let mut back = vec![0; sent];
            ends.sockets[1].read_exact(&mut back).unwrap();
            ends.put(&back);
            Ok(sent)
        },
        by_ring: false,
    },
    Reading {
        name: "io_uring write(file, async)",
        take: |ends, from, len| {
            let write = opcode::Write::new(Fd(ends.file.as_raw_fd()), from, len as u32).build();
            ends.submit(write.flags(io_uring::squeue::Flags::ASYNC))
        },
        by_ring: true,
    },
];

/// Lets the kernel copy between `data` and the memory at `at`, by the frames of that memory, as it
/// does for another process.
///
/// # Safety
/// The memory at `at` belongs to this process, is as long as `data`, and is only accessed by atomic
/// operations.
pub unsafe fn process_vm(at: *mut u8, data: &mut [u8], write: bool) -> Result<usize> {
    let len = data.len();
    let piece = |base: *mut u8| libc::iovec { iov_base: base.cast(), iov_len: len };
    let (local, remote) = (piece(data.as_mut_ptr()), piece(at));
    // SAFETY: the caller promises that the remote memory exists. The local memory is a slice that
    // is borrowed mutably.
    counted(unsafe {
        let me = libc::getpid();
        if write {
            libc::process_vm_writev(me, &local, 1, &remote, 1, 0)
        } else {
            libc::process_vm_readv(me, &local, 1, &remote, 1, 0)
        }
    })
}

/// Puts the frames of some memory into a pipe. Who reads from the pipe gets what the frames contain
/// at that time.
///
/// # Safety
/// The memory at `at` belongs to this process and is `len` bytes long.
pub unsafe fn splice(at: *mut u8, len: usize, to: &File) -> Result<usize> {
    let piece = libc::iovec { iov_base: at.cast(), iov_len: len };
    // SAFETY: the caller promises that the memory exists.
    counted(unsafe { libc::vmsplice(to.as_raw_fd(), &piece, 1, 0) })
}
