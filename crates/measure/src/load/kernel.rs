//! A thread that lets the kernel write words of the region, by preadv.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};

use pageleap::BASE_PAGE;

use super::Beside;
use crate::Error;
use crate::phase::{Phase, Times};

/// Words of a base page. The last of them is the kernel's to write.
pub const WORDS_PER_PAGE: usize = BASE_PAGE / size_of::<u64>();
/// Words that one call writes, spread evenly, so that some of them lie in the area that is moving.
const SPREAD: usize = 64;
/// Between two calls: often enough to meet most areas, and too rarely to cost a measurable share of
/// a CPU.
const PAUSE: Duration = Duration::from_millis(5);
/// Set in every value that the kernel writes, and in no other.
const MARK: u64 = 1 << 62;

/// The kernel's writes for one thread.
#[derive(Debug, Default)]
pub(super) struct KernelLog {
    /// The last value of each word that is the kernel's; 0 where the kernel has written nothing.
    pub last: Vec<u64>,
    /// Calls that have written.
    pub calls: u64,
    /// Calls that failed with EFAULT or stopped short, and had to be repeated.
    pub efaults: u64,
    /// How long the thread waited for the words of a call, repetitions included, by phase.
    pub waits: Times,
}

/// Lets `preadv` write words of a region, one in each base page and [`SPREAD`] in each call, until
/// the stage says stop, but at least once. `calls_before` were made by earlier threads.
pub(super) fn run(
    words: &[AtomicU64],
    calls_before: u64,
    beside: &Beside,
) -> Result<KernelLog, Error> {
    let file = memory_file()?;
    let pages = words.len() / WORDS_PER_PAGE;
    let spread = SPREAD.min(pages);
    let mut log = KernelLog { last: vec![0; pages], ..KernelLog::default() };
    loop {
        let value = MARK | (calls_before + log.calls);
        // A multiplicative step, which meets every page in the end.
        let first = (log.calls as usize).wrapping_mul(0x9E37_79B9) % pages;
        let chosen: Vec<usize> =
            (0..spread).map(|at| (first + at * pages / spread) % pages).collect();
        let pieces: Vec<libc::iovec> = chosen
            .iter()
            .map(|page| words[page * WORDS_PER_PAGE + WORDS_PER_PAGE - 1].as_ptr())
            .map(|word| libc::iovec { iov_base: word.cast(), iov_len: size_of::<u64>() })
            .collect();
        let data: Vec<u8> = value.to_ne_bytes().repeat(spread);
        file.write_all_at(&data, 0)
            .map_err(|source| Error::Call { call: "pwrite", reason: source })?;
        let (start, from) = (Instant::now(), beside.stage.phase());
        log.efaults += u64::from(read_words(&file, &pieces)?);
        log.waits.add(Phase::of_interval(from, beside.stage.phase()), start.elapsed());
        chosen.into_iter().for_each(|page| log.last[page] = value);
        log.calls += 1;
        if beside.stage.stopped() {
            return Ok(log);
        }
        thread::sleep(PAUSE);
    }
}

fn memory_file() -> Result<File, Error> {
    // SAFETY: a constant name; the descriptor is fresh, and the file takes it over.
    unsafe {
        let fd = libc::memfd_create(c"pageleap-measure".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            let source = io::Error::last_os_error();
            return Err(Error::Call { call: "memfd_create", reason: source });
        }
        Ok(File::from_raw_fd(fd))
    }
}

/// Lets the kernel read the file into all pieces (preadv). Returns whether that took more than one
/// call.
fn read_words(file: &File, pieces: &[libc::iovec]) -> Result<bool, Error> {
    let mut done = 0;
    let mut repeated = false;
    loop {
        let rest = &pieces[done..];
        let at = (done * size_of::<u64>()) as libc::off_t;
        // SAFETY: the kernel writes the eight bytes of words that no other thread writes.
        let got =
            unsafe { libc::preadv(file.as_raw_fd(), rest.as_ptr(), rest.len() as libc::c_int, at) };
        let source = io::Error::last_os_error();
        match usize::try_from(got) {
            // The next call repeats a word that this one began.
            Ok(bytes) => done += bytes / size_of::<u64>(),
            Err(_) if source.raw_os_error() == Some(libc::EFAULT) => {}
            Err(_) => return Err(Error::Call { call: "preadv", reason: source }),
        }
        if done == pieces.len() {
            return Ok(repeated);
        }
        repeated = true;
        thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;
    use std::sync::atomic::Ordering;

    use super::super::tests::while_running;
    use super::*;

    fn words(pages: usize) -> Vec<AtomicU64> {
        (0..pages * WORDS_PER_PAGE).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn the_kernel_writes_one_word_of_each_page() {
        let words = words(300);
        let written = || words.iter().filter(|word| word.load(Ordering::Relaxed) != 0).count();
        let log = while_running(|beside| run(&words, 5, beside).unwrap(), |_| written() == 300);
        assert_eq!((written(), log.efaults), (300, 0));
        assert_eq!(log.waits.count(Phase::Before), log.calls);
        for (page, last) in log.last.iter().enumerate() {
            let at = page * WORDS_PER_PAGE + WORDS_PER_PAGE - 1;
            assert_eq!(words[at].load(Ordering::Relaxed), *last);
            assert!(*last & !MARK >= 5 && *last & !MARK < 5 + log.calls);
        }
    }

    #[test]
    fn calls_that_fail_are_counted_and_repeated() {
        // Memory whose second page is read-only for a while.
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh mapping, looked at as atomics, which all bytes are.
        let (base, words) = unsafe {
            let base = libc::mmap(ptr::null_mut(), 2 * BASE_PAGE, access, kind, -1, 0);
            assert_ne!(base, libc::MAP_FAILED);
            (
                base.cast::<u8>(),
                std::slice::from_raw_parts(base.cast::<AtomicU64>(), 2 * WORDS_PER_PAGE),
            )
        };
        let protect = |access| {
            // SAFETY: a page of that mapping, which this thread does not touch meanwhile.
            assert_eq!(unsafe { libc::mprotect(base.add(BASE_PAGE).cast(), BASE_PAGE, access) }, 0);
        };
        protect(libc::PROT_READ);
        let first = &words[WORDS_PER_PAGE - 1];
        let closed = std::cell::Cell::new(true);
        let log = while_running(
            |beside| run(words, 0, beside).unwrap(),
            |_| {
                // The call has written the first word, and is stuck at the second one.
                if closed.get() && first.load(Ordering::Relaxed) != 0 {
                    thread::sleep(PAUSE);
                    protect(access);
                    closed.set(false);
                }
                first.load(Ordering::Relaxed) & !MARK >= 3
            },
        );
        assert_eq!(log.efaults, 1);
        let longest = log.waits.quantile_ns(Phase::Before, 1.0).map(Duration::from_nanos);
        assert!(longest >= Some(PAUSE), "the call that failed took until it was repeated");
        assert_eq!(words[2 * WORDS_PER_PAGE - 1].load(Ordering::Relaxed), log.last[1]);
        // SAFETY: no thread looks at it any more.
        unsafe { libc::munmap(base.cast(), 2 * BASE_PAGE) };
    }
}
