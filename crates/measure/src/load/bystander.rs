//! A thread that has nothing to do with the region: it maps, faults and unmaps other memory.

use pageleap::BASE_PAGE;

use super::Beside;
use super::gaps::Gaps;
use super::writer::WriteLog;

/// Bytes that the bystander maps and faults in each round.
const ROUND_BYTES: usize = 256 << 10;

/// Maps, faults and unmaps memory until the stage is stopped. The log counts rounds as writes.
pub(super) fn run(shadow: Vec<u64>, beside: &Beside) -> WriteLog {
    let mut gaps = Gaps::begin(beside);
    let mut rounds = 0;
    while !beside.stage.stopped() {
        if map_and_fault() {
            rounds += 1;
            beside.complete(1);
        }
        gaps.end(beside);
    }
    let gaps = gaps.finish(beside);
    WriteLog { shadow, writes: rounds, gaps, full_speed: Default::default() }
}

/// Returns whether the kernel granted a mapping.
fn map_and_fault() -> bool {
    let (access, kind) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh mapping at an address that the kernel chooses, written within its bounds and
    // unmapped again.
    unsafe {
        let memory = libc::mmap(std::ptr::null_mut(), ROUND_BYTES, access, kind, -1, 0);
        if memory == libc::MAP_FAILED {
            return false;
        }
        for at in (0..ROUND_BYTES).step_by(BASE_PAGE) {
            memory.cast::<u8>().add(at).write_volatile(1);
        }
        libc::munmap(memory, ROUND_BYTES) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::while_running;
    use super::*;
    use crate::phase::Phase;

    #[test]
    fn the_bystander_goes_on_until_it_is_stopped() {
        let log = while_running(|beside| run(vec![1, 2], beside), |beside| beside.completed() > 3);
        assert!(log.writes > 3 && log.shadow == [1, 2]);
        // The gap that was open at the end counts.
        assert_eq!(log.gaps.count(Phase::Before), log.writes + 1);
    }
}
