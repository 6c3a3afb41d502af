//! System calls that read or write a region while it leaps: with the engine `precopy` none fails, and what they write is kept.
//!
//! Not here: calls that pin pages (`process_vm_writev`, O_DIRECT, registered buffers), which the contract forbids in a moving area.

mod common;

use std::io::{Read, Seek, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};

use common::{StopOnDrop, can_follow, pools, skip, soon, turn};
use io_uring::{IoUring, opcode, types::Fd};
use pageleap::{Engine, EngineChoice, Migration, PageSize, Region};

const BYTES: usize = 4 << 20;
/// Bytes of a call: several pages, and never whole ones.
const CHUNK: usize = 20 << 10 | 123;
fn rounds() -> usize {
    130 * common::stress_seconds() as usize
}

/// Leaps by `precopy`, in areas of all sizes, while `body` runs, which can wait until all pages have leapt once more.
fn while_leaping(body: impl FnOnce(&[AtomicU8], &dyn Fn())) {
    let pools = pools(PageSize::Base, BYTES as u64).unwrap();
    let region = Region::new(&pools[0], BYTES).unwrap();
    let (stop, leaps) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let mover = scope.spawn(|| {
            while !stop.load(Relaxed) {
                let leap = leaps.fetch_add(1, Relaxed) as usize;
                let job = Migration::new()
                    .range(&region, 0..BYTES, &pools[(leap + 1) % 2])
                    .engine(EngineChoice::Precopy)
                    .area_bytes(4096 << (leap % 10))
                    .start();
                let report = job.unwrap().wait();
                assert!(report.ended.is_completed() && report.warnings.is_empty(), "{report}");
                assert_eq!(report.engine, Engine::Precopy);
            }
        });
        let _stop = StopOnDrop(&stop);
        let goes_on = || {
            let now = leaps.load(Relaxed);
            assert!(soon(|| leaps.load(Relaxed) > now + 2 || mover.is_finished()));
            assert!(!mover.is_finished(), "the migrations have ended");
        };
        goes_on();
        // SAFETY: nobody accesses the region in another size.
        body(unsafe { region.atomics_u8(0..BYTES) }.unwrap(), &goes_on);
        goes_on();
    });
}

/// What the calls are made on.
struct Ends {
    pipe: (RawFd, RawFd),
    file: std::fs::File,
    sockets: [UnixStream; 2],
    packets: [RawFd; 2],
    ring: Option<IoUring>,
}

impl Ends {
    fn new() -> Ends {
        let (mut pipe, mut packets) = ([0; 2], [0; 2]);
        // SAFETY: each call writes two descriptors to its array.
        unsafe {
            assert_eq!(libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC), 0);
            assert!(libc::fcntl(pipe[0], libc::F_SETPIPE_SZ, 1 << 18) > 0);
            let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
            assert_eq!(libc::socketpair(libc::AF_UNIX, kind, 0, packets.as_mut_ptr()), 0);
        }
        Ends {
            pipe: (pipe[0], pipe[1]),
            file: memory_file(),
            sockets: UnixStream::pair().unwrap().into(),
            packets,
            ring: IoUring::new(4).ok(),
        }
    }

    /// Runs one request and returns its result.
    fn submit(&mut self, entry: io_uring::squeue::Entry) -> isize {
        let ring = self.ring.as_mut().expect("looked for before");
        // SAFETY: the memory that the entry names lives until the request is done, which is waited for.
        unsafe { ring.submission().push(&entry) }.unwrap();
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().expect("it was waited for").result() as isize
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        let (read, write) = self.pipe;
        // SAFETY: all are ours.
        [read, write].into_iter().chain(self.packets).for_each(|fd| unsafe {
            libc::close(fd);
        });
    }
}

fn memory_file() -> std::fs::File {
    // SAFETY: a constant name; the descriptor is fresh.
    unsafe {
        let fd = libc::memfd_create(c"system_calls".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0);
        std::os::fd::FromRawFd::from_raw_fd(fd)
    }
}

fn put(ends: &mut Ends, data: &[u8]) {
    ends.file.rewind().unwrap();
    ends.file.write_all(data).unwrap();
}

fn feed(ends: &mut Ends, data: &[u8]) {
    // SAFETY: from a slice into the pipe, which has room.
    assert_eq!(unsafe { libc::write(ends.pipe.1, data.as_ptr().cast(), data.len()) }, data.len() as isize);
}

type Call = (&'static str, fn(&mut Ends, &[u8], *mut u8) -> isize);

/// Calls that write `CHUNK` bytes of `data` to an address, whatever is needed before.
// SAFETY of all blocks: the address has `CHUNK` bytes of a region that lives, and consists of atomics.
#[allow(clippy::undocumented_unsafe_blocks)]
const WRITING: [Call; 8] = [
    ("read(pipe)", |ends, data, to| {
        feed(ends, data);
        unsafe { libc::read(ends.pipe.0, to.cast(), CHUNK) }
    }),
    ("pread", |ends, data, to| {
        put(ends, data);
        unsafe { libc::pread(ends.file.as_raw_fd(), to.cast(), CHUNK, 0) }
    }),
    ("preadv", |ends, data, to| {
        put(ends, data);
        let piece = |from: usize, len| libc::iovec { iov_base: to.wrapping_add(from).cast(), iov_len: len };
        let pieces = [piece(0, 5000), piece(5000, CHUNK - 5000)];
        unsafe { libc::preadv(ends.file.as_raw_fd(), pieces.as_ptr(), 2, 0) }
    }),
    ("recv(stream)", |ends, data, to| {
        ends.sockets[0].write_all(data).unwrap();
        unsafe { libc::recv(ends.sockets[1].as_raw_fd(), to.cast(), CHUNK, libc::MSG_WAITALL) }
    }),
    // A packet that could not be delivered would be gone.
    ("recv(packet)", |ends, data, to| unsafe {
        assert_eq!(libc::send(ends.packets[0], data.as_ptr().cast(), CHUNK, 0), CHUNK as isize);
        libc::recv(ends.packets[1], to.cast(), CHUNK, 0)
    }),
    ("io_uring read(pipe)", |ends, data, to| {
        feed(ends, data);
        let entry = opcode::Read::new(Fd(ends.pipe.0), to, CHUNK as u32).build();
        ends.submit(entry)
    }),
    ("io_uring read(file)", |ends, data, to| {
        put(ends, data);
        let entry = opcode::Read::new(Fd(ends.file.as_raw_fd()), to, CHUNK as u32).build();
        ends.submit(entry)
    }),
    // By a thread of the kernel, not by ours.
    ("io_uring read(file, async)", |ends, data, to| {
        put(ends, data);
        let read = opcode::Read::new(Fd(ends.file.as_raw_fd()), to, CHUNK as u32).build();
        ends.submit(read.flags(io_uring::squeue::Flags::ASYNC))
    }),
];

/// Calls that read `CHUNK` bytes at an address; what they have read lies in the file then.
#[allow(clippy::undocumented_unsafe_blocks)]
const READING: [Call; 4] = [
    ("write(pipe)", |ends, _, from| {
        let mut back = [0u8; CHUNK];
        let written = unsafe { libc::write(ends.pipe.1, from.cast(), CHUNK) };
        let got = unsafe { libc::read(ends.pipe.0, back.as_mut_ptr().cast(), CHUNK) };
        put(ends, &back[..got.max(0) as usize]);
        written
    }),
    ("pwrite", |ends, _, from| unsafe { libc::pwrite(ends.file.as_raw_fd(), from.cast(), CHUNK, 0) }),
    ("send", |ends, _, from| {
        let mut back = vec![0u8; CHUNK];
        let sent = unsafe { libc::send(ends.sockets[0].as_raw_fd(), from.cast(), CHUNK, 0) };
        ends.sockets[1].read_exact(&mut back[..sent.max(0) as usize]).unwrap();
        put(ends, &back);
        sent
    }),
    ("io_uring write(file, async)", |ends, _, from| {
        let write = opcode::Write::new(Fd(ends.file.as_raw_fd()), from, CHUNK as u32).build();
        ends.submit(write.flags(io_uring::squeue::Flags::ASYNC))
    }),
];

/// Makes each call so often at changing places, and shows `check` what it did: its data, and the place.
fn make(test: &str, calls: &[Call], write_before: bool, check: impl Fn(&mut Ends, &[u8], &[AtomicU8], &str)) {
    let _turn = turn();
    if !can_follow() {
        return skip(test, &"the engine precopy does not work here");
    }
    let mut ends = Ends::new();
    for (name, call) in calls {
        if name.starts_with("io_uring") && ends.ring.is_none() {
            skip(&format!("{test} ({name})"), &"io_uring is refused");
            continue;
        }
        while_leaping(|region, leap_again| {
            let mut shadow = vec![0u8; BYTES];
            for round in 1..=rounds() {
                let data: Vec<u8> = (0..CHUNK).map(|i| (i * 31 + round * 7) as u8).collect();
                let at = round * 4711 * 13 % (BYTES - CHUNK);
                let bytes = &region[at..at + CHUNK];
                if write_before {
                    bytes.iter().zip(&data).for_each(|(byte, value)| byte.store(*value, Relaxed));
                }
                let done = call(&mut ends, &data, bytes[0].as_ptr());
                let error = std::io::Error::last_os_error();
                assert_eq!(done, CHUNK as isize, "{name} in round {round}: {error}");
                check(&mut ends, &data, bytes, name);
                shadow[at..at + CHUNK].copy_from_slice(&data);
            }
            // What a leap loses is there until it is over.
            leap_again();
            check_shadow(region, &shadow, name);
        });
    }
}

fn check_shadow(region: &[AtomicU8], shadow: &[u8], what: &str) {
    let lost = region.iter().zip(shadow).filter(|(byte, value)| byte.load(Relaxed) != **value).count();
    assert_eq!(lost, 0, "LOST {lost} bytes after {what}");
}

#[test]
fn what_the_kernel_writes_into_a_leaping_region_is_kept() {
    const NAME: &str = "what_the_kernel_writes_into_a_leaping_region_is_kept";
    make(NAME, &WRITING, false, |_, data, bytes, name| {
        let lost = bytes.iter().zip(data).filter(|(byte, value)| byte.load(Relaxed) != **value).count();
        assert_eq!(lost, 0, "LOST {lost} bytes of {name}");
    });
}

#[test]
fn the_kernel_reads_from_a_leaping_region_what_is_there() {
    const NAME: &str = "the_kernel_reads_from_a_leaping_region_what_is_there";
    make(NAME, &READING, true, |ends, data, _, name| {
        let mut back = Vec::new();
        ends.file.rewind().unwrap();
        ends.file.read_to_end(&mut back).unwrap();
        assert!(back == data, "{name} has read something else");
    });
}

/// The kernel may drop page table entries whenever it likes (it does when it swaps), and what it knows of writes goes with them.
#[test]
fn entries_that_are_dropped_under_writers_lose_nothing() {
    const NAME: &str = "entries_that_are_dropped_under_writers_lose_nothing";
    let _turn = turn();
    if !can_follow() {
        return skip(NAME, &"the engine precopy does not work here");
    }
    while_leaping(|region, leap_again| {
        let mut shadow = vec![0u8; BYTES];
        for round in 1..=20 * rounds() {
            let at = (round * 4711 * 17 % (BYTES - 4096)) & !4095;
            let (byte, value) = (&region[at + round % 4096], round as u8);
            byte.store(value, Relaxed);
            shadow[at + round % 4096] = value;
            let first = at & !((64 << 10) - 1);
            // SAFETY: drops page table entries of a shared mapping; the bytes stay in the file.
            let dropped =
                unsafe { libc::madvise(region[first].as_ptr().cast(), 64 << 10, libc::MADV_DONTNEED) };
            assert_eq!(dropped, 0, "{}", std::io::Error::last_os_error());
            assert_eq!(byte.load(Relaxed), value, "LOST a write");
        }
        leap_again();
        check_shadow(region, &shadow, "stores");
    });
}
