//! What runs beside the leap, other than the writer: a thread for which the kernel writes, and one
//! that has nothing to do with the region.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use pageleap::BASE_PAGE;

use crate::phase::{Phase, Stage, Times};
use crate::stop::Stop;
use crate::writer::WriteLog;

/// Of so many words, one for each base page, the last is the kernel's to write.
pub const KERNEL_EVERY: usize = BASE_PAGE / size_of::<u64>();
/// Words that one call writes, evenly spread: some of them lie in the area that is moving,
/// whichever it is.
const SPREAD: usize = 64;
/// Between two calls: often enough to meet most areas, and rarely enough to cost nobody a
/// measurable share of a CPU.
const KERNEL_PAUSE: Duration = Duration::from_millis(5);
/// Set in every value that the kernel writes, and in no other.
const KERNEL_MARK: u64 = 1 << 62;
/// What the bystander maps and faults each time.
const BYSTANDER_BYTES: usize = 256 << 10;

/// What the kernel has written for a thread.
#[derive(Debug, Default)]
pub struct KernelLog {
    /// The last value of each word that is the kernel's; 0 where it has written none.
    pub last: Vec<u64>,
    /// How many calls have written.
    pub calls: u64,
    /// How many of them failed with EFAULT, or stopped short, and had to be repeated.
    pub efaults: u64,
}

/// Has `preadv` write words of a region, one in each base page and [`SPREAD`] in each call, until
/// `stage` says stop. `calls` have come before.
pub fn kernel_writer(words: &[AtomicU64], calls: u64, stage: &Stage) -> Result<KernelLog, Stop> {
    // SAFETY: a constant name; the descriptor is fresh, and the file takes it over.
    let file = unsafe {
        let fd = libc::memfd_create(c"pageleap-bench".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(anyhow::Error::from(std::io::Error::last_os_error())
                .context("memfd_create")
                .into());
        }
        File::from_raw_fd(fd)
    };
    let pages = words.len() / KERNEL_EVERY;
    let spread = SPREAD.min(pages);
    let mut log = KernelLog { last: vec![0; pages], ..KernelLog::default() };
    while !stage.stopped() {
        let value = KERNEL_MARK | (calls + log.calls);
        // A step that meets every page in the end.
        let first = (log.calls as usize).wrapping_mul(0x9E37_79B9) % pages;
        let chosen: Vec<usize> =
            (0..spread).map(|at| (first + at * pages / spread) % pages).collect();
        let pieces: Vec<libc::iovec> = chosen
            .iter()
            .map(|page| words[page * KERNEL_EVERY + KERNEL_EVERY - 1].as_ptr())
            .map(|word| libc::iovec { iov_base: word.cast(), iov_len: size_of::<u64>() })
            .collect();
        let data: Vec<u8> = value.to_ne_bytes().repeat(spread);
        std::os::unix::fs::FileExt::write_all_at(&file, &data, 0).context("pwrite")?;
        log.efaults += u64::from(read_words(&file, &pieces)?);
        chosen.into_iter().for_each(|page| log.last[page] = value);
        log.calls += 1;
        thread::sleep(KERNEL_PAUSE);
    }
    Ok(log)
}

/// Has the kernel read the file into all the pieces. Returns whether that took more than one call.
fn read_words(file: &File, pieces: &[libc::iovec]) -> Result<bool, Stop> {
    let mut done = 0;
    let mut failed = false;
    loop {
        let rest = &pieces[done..];
        let at = (done * size_of::<u64>()) as libc::off_t;
        // SAFETY: the kernel writes the eight bytes of words that nobody else writes.
        let got =
            unsafe { libc::preadv(file.as_raw_fd(), rest.as_ptr(), rest.len() as libc::c_int, at) };
        let error = std::io::Error::last_os_error();
        match usize::try_from(got) {
            // A word that was begun is written again.
            Ok(bytes) => done += bytes / size_of::<u64>(),
            Err(_) if error.raw_os_error() == Some(libc::EFAULT) => {}
            Err(_) => return Err(anyhow::Error::from(error).context("preadv").into()),
        }
        if done == pieces.len() {
            return Ok(failed);
        }
        failed = true;
        thread::yield_now();
    }
}

/// Reads all words, again and again, until `stage` says stop.
pub fn reader(words: &[AtomicU64], stage: &Stage) {
    /// Words between two looks at the stage.
    const LOOK_EVERY: usize = 4096;
    while !stage.stopped() {
        for part in words.chunks(LOOK_EVERY).take_while(|_| !stage.stopped()) {
            std::hint::black_box(
                part.iter().fold(0, |sum, word| sum ^ word.load(Ordering::Relaxed)),
            );
        }
    }
}

/// Maps, faults and unmaps memory that has nothing to do with the region, all the time, until
/// `stage` says stop. The log has no writes but rounds, and the time from the end of one to the end
/// of the next.
pub fn bystander(shadow: Vec<u64>, stage: &Stage, completed: &AtomicU64) -> WriteLog {
    let mut log = WriteLog::none(shadow);
    let mut gaps = Times::new();
    let (mut last_end, mut last_phase) = (Instant::now(), stage.phase());
    while !stage.stopped() {
        log.writes += u64::from(map_and_fault());
        completed.store(log.writes, Ordering::Relaxed);
        let (now, phase) = (Instant::now(), stage.phase());
        gaps.add(Phase::of_interval(last_phase, phase), now - last_end);
        (last_end, last_phase) = (now, phase);
    }
    WriteLog { gaps, ..log }
}

/// Returns whether there was a mapping to be had.
fn map_and_fault() -> bool {
    let (access, kind) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh mapping at an address that the kernel chooses, written within its bounds and
    // unmapped again.
    unsafe {
        let memory = libc::mmap(std::ptr::null_mut(), BYSTANDER_BYTES, access, kind, -1, 0);
        if memory == libc::MAP_FAILED {
            return false;
        }
        for at in (0..BYSTANDER_BYTES).step_by(BASE_PAGE) {
            memory.cast::<u8>().add(at).write_volatile(1);
        }
        libc::munmap(memory, BYSTANDER_BYTES) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn while_running<T: Send>(
        run: impl FnOnce(&Stage) -> T + Send,
        enough: impl Fn() -> bool,
    ) -> T {
        let stage = Stage::new();
        thread::scope(|scope| {
            let running = scope.spawn(|| run(&stage));
            while !enough() && !running.is_finished() {
                thread::yield_now();
            }
            stage.stop();
            running.join().unwrap()
        })
    }

    fn words(pages: usize) -> Vec<AtomicU64> {
        (0..pages * KERNEL_EVERY).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn the_kernel_writes_one_word_of_each_page() {
        let words = words(300);
        let written = || words.iter().filter(|word| word.load(Ordering::Relaxed) != 0).count();
        let log = while_running(
            |stage| kernel_writer(&words, 5, stage).ok().unwrap(),
            || written() == 300,
        );
        assert_eq!((written(), log.efaults), (300, 0));
        for (page, last) in log.last.iter().enumerate() {
            let at = page * KERNEL_EVERY + KERNEL_EVERY - 1;
            assert_eq!(words[at].load(Ordering::Relaxed), *last);
            assert!(*last & !KERNEL_MARK >= 5 && *last & !KERNEL_MARK < 5 + log.calls);
        }
    }

    #[test]
    fn calls_that_fail_are_counted_and_repeated() {
        // A region whose second page may not be written for a while.
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh mapping, looked at as atomics, which all bytes are.
        let (base, words) = unsafe {
            let base = libc::mmap(std::ptr::null_mut(), 2 * BASE_PAGE, access, kind, -1, 0);
            assert_ne!(base, libc::MAP_FAILED);
            (
                base.cast::<u8>(),
                std::slice::from_raw_parts(base.cast::<AtomicU64>(), 2 * KERNEL_EVERY),
            )
        };
        let protect = |access| {
            // SAFETY: a page of that mapping, which this thread does not touch meanwhile.
            assert_eq!(unsafe { libc::mprotect(base.add(BASE_PAGE).cast(), BASE_PAGE, access) }, 0);
        };
        protect(libc::PROT_READ);
        let first = &words[KERNEL_EVERY - 1];
        let closed = std::cell::Cell::new(true);
        let log = while_running(
            |stage| kernel_writer(words, 0, stage).ok().unwrap(),
            || {
                // The call that has written the first word is stuck at the second one.
                if closed.get() && first.load(Ordering::Relaxed) != 0 {
                    thread::sleep(KERNEL_PAUSE);
                    protect(access);
                    closed.set(false);
                }
                first.load(Ordering::Relaxed) & !KERNEL_MARK >= 3
            },
        );
        assert_eq!(log.efaults, 1);
        assert_eq!(words[2 * KERNEL_EVERY - 1].load(Ordering::Relaxed), log.last[1]);
        // SAFETY: nobody looks at it any more.
        unsafe { libc::munmap(base.cast(), 2 * BASE_PAGE) };
    }

    #[test]
    fn the_bystander_goes_on_until_it_is_stopped() {
        let completed = AtomicU64::new(0);
        let log = while_running(
            |stage| bystander(vec![1, 2], stage, &completed),
            || completed.load(Ordering::Relaxed) > 3,
        );
        assert!(log.writes > 3 && log.shadow == [1, 2]);
        assert_eq!(log.gaps.count(Phase::Before), log.writes);
    }
}
