//! What runs beside the leap, other than the writer: a thread for which the kernel writes, and one that has nothing to do with the region.

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
/// Between two words that the kernel writes: often enough to meet many areas, and rarely enough to cost nobody a measurable share of a CPU.
const KERNEL_PAUSE: Duration = Duration::from_millis(2);
/// Set in every value that the kernel writes, and in no other.
const KERNEL_MARK: u64 = 1 << 62;
/// What the bystander maps and faults each time.
const BYSTANDER_BYTES: usize = 256 << 10;

/// What the kernel has written for a thread.
#[derive(Debug, Default)]
pub struct KernelLog {
    /// The last value of each word that is the kernel's; 0 where it has written none.
    pub last: Vec<u64>,
    /// How many it has written.
    pub writes: u64,
    /// How many calls failed with EFAULT and were repeated.
    pub efaults: u64,
}

/// Has `pread` write words of a region, one in each base page, in steps over all of it, until `stage` says stop. `written` writes have come before.
pub fn kernel_writer(words: &[AtomicU64], written: u64, stage: &Stage) -> Result<KernelLog, Stop> {
    // SAFETY: a constant name; the descriptor is fresh, and the file takes it over.
    let file = unsafe {
        let fd = libc::memfd_create(c"pageleap-bench".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(anyhow::Error::from(std::io::Error::last_os_error()).context("memfd_create").into());
        }
        File::from_raw_fd(fd)
    };
    let pages = words.len() / KERNEL_EVERY;
    let mut log = KernelLog { last: vec![0; pages], ..KernelLog::default() };
    while !stage.stopped() {
        let value = KERNEL_MARK | (written + log.writes);
        // An odd step meets every page of a region whose number of pages is a power of two.
        let page = (value as usize).wrapping_mul(0x9E37_79B9) % pages;
        let word = &words[page * KERNEL_EVERY + KERNEL_EVERY - 1];
        std::os::unix::fs::FileExt::write_all_at(&file, &value.to_ne_bytes(), 0).context("pwrite")?;
        loop {
            // SAFETY: the kernel writes the eight bytes of a word that nobody else writes.
            match unsafe { libc::pread(file.as_raw_fd(), word.as_ptr().cast(), size_of::<u64>(), 0) } {
                8 => break,
                _ if std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT) => log.efaults += 1,
                got => {
                    let error = anyhow::Error::from(std::io::Error::last_os_error());
                    return Err(error.context(format!("pread returned {got}")).into());
                }
            }
            thread::yield_now();
        }
        log.last[page] = value;
        log.writes += 1;
        thread::sleep(KERNEL_PAUSE);
    }
    Ok(log)
}

/// Maps, faults and unmaps memory that has nothing to do with the region, all the time, until `stage` says stop. The log has no writes but rounds, and
/// the time from the end of one to the end of the next.
pub fn bystander(shadow: Vec<u64>, stage: &Stage, completed: &AtomicU64) -> WriteLog {
    let mut log = WriteLog::none(shadow);
    let mut gaps = Times::new();
    let (mut last_end, mut last_phase) = (Instant::now(), stage.phase());
    while !stage.stopped() {
        map_and_fault();
        log.writes += 1;
        completed.store(log.writes, Ordering::Relaxed);
        let (now, phase) = (Instant::now(), stage.phase());
        gaps.add(Phase::of_interval(last_phase, phase), now - last_end);
        (last_end, last_phase) = (now, phase);
    }
    WriteLog { gaps, ..log }
}

fn map_and_fault() {
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh mapping at an address that the kernel chooses, written within its bounds and unmapped again.
    unsafe {
        let memory = libc::mmap(std::ptr::null_mut(), BYSTANDER_BYTES, access, kind, -1, 0);
        if memory == libc::MAP_FAILED {
            return; // the rate shows it
        }
        for at in (0..BYSTANDER_BYTES).step_by(BASE_PAGE) {
            memory.cast::<u8>().add(at).write_volatile(1);
        }
        libc::munmap(memory, BYSTANDER_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn while_running<T: Send>(run: impl FnOnce(&Stage) -> T + Send, enough: impl Fn() -> bool) -> T {
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

    #[test]
    fn the_kernel_writes_one_word_of_each_page() {
        let words: Vec<AtomicU64> = (0..4 * KERNEL_EVERY).map(|_| AtomicU64::new(0)).collect();
        let written = || words.iter().filter(|word| word.load(Ordering::Relaxed) != 0).count();
        let log = while_running(|stage| kernel_writer(&words, 5, stage).ok().unwrap(), || written() == 4);
        assert_eq!((written(), log.efaults), (4, 0));
        for (page, last) in log.last.iter().enumerate() {
            let at = page * KERNEL_EVERY + KERNEL_EVERY - 1;
            assert_eq!(words[at].load(Ordering::Relaxed), *last);
            assert!(*last & !KERNEL_MARK >= 5 && *last & !KERNEL_MARK < 5 + log.writes);
        }
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
