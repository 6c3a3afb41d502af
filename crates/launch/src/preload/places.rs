//! CPUs in the order in which threads come to them, and the number of living threads on each.

use core::ffi::c_ulong;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU32, AtomicUsize};

/// The most CPUs that Linux knows on most architectures (`CONFIG_NR_CPUS`).
const MOST_CPUS: usize = 8192;
pub(super) const BITS: usize = c_ulong::BITS as usize;
pub(super) const WORDS: usize = MOST_CPUS / BITS;
/// The words of a set of 1,024 CPUs.
pub(super) const FEW: usize = 1024 / BITS;

/// CPUs as the kernel takes them.
pub(super) type Mask = [c_ulong; WORDS];

pub(super) static PLACES: Places = Places::new();

/// CPUs in an order, with the number of living threads on each.
pub(super) struct Places {
    number: AtomicUsize,
    cpus: [AtomicU32; MOST_CPUS],
    living: [AtomicU32; MOST_CPUS],
    /// The CPUs on which the program starts, and its child processes: those of its home, or of all
    /// places.
    start: [AtomicUsize; WORDS],
}

impl Places {
    const fn new() -> Places {
        Places {
            number: AtomicUsize::new(0),
            cpus: [const { AtomicU32::new(0) }; MOST_CPUS],
            living: [const { AtomicU32::new(0) }; MOST_CPUS],
            start: [const { AtomicUsize::new(0) }; WORDS],
        }
    }

    /// Takes the places from a text, and the CPUs of the home from another, if there is one. A text
    /// that is no list of CPUs has none.
    pub(super) fn fill(&self, text: &[u8], home: &[u8]) {
        let mut number = 0;
        for word in text.split(|byte| *byte == b',') {
            let (Some(cpu), Some(place)) = (decimal(word), self.cpus.get(number)) else { return };
            place.store(cpu, Relaxed);
            number += 1;
        }
        let of_home = || home.split(|byte| *byte == b',').map(decimal);
        if of_home().all(|cpu| cpu.is_some()) {
            of_home().flatten().for_each(|cpu| self.add_to_start(cpu));
        } else {
            self.cpus.iter().take(number).for_each(|cpu| self.add_to_start(cpu.load(Relaxed)));
        }
        self.number.store(number, Relaxed);
    }

    fn add_to_start(&self, cpu: u32) {
        if let Some(word) = self.start.get(cpu as usize / BITS) {
            word.fetch_or(1 << (cpu as usize % BITS), Relaxed);
        }
    }

    /// The set of CPUs on which the program starts, in memory as the kernel has it.
    pub(super) fn start_words(&self) -> &[AtomicUsize; WORDS] {
        &self.start
    }

    /// A word of the set of CPUs on which the program starts.
    pub(super) fn start(&self, at: usize) -> c_ulong {
        self.start.get(at).map_or(0, |word| word.load(Relaxed) as c_ulong)
    }

    pub(super) fn number(&self) -> usize {
        self.number.load(Relaxed)
    }

    /// The CPU of a place.
    pub(super) fn cpu(&self, place: usize) -> Option<usize> {
        Some(self.cpus.get(place)?.load(Relaxed) as usize)
    }

    /// The place with the fewest living threads, the first of several. It has one thread more.
    pub(super) fn take(&self) -> Option<usize> {
        let living = self.living.get(..self.number())?;
        loop {
            let mut best: Option<(usize, u32)> = None;
            for (place, count) in living.iter().enumerate() {
                let count = count.load(Relaxed);
                if best.is_none_or(|(_, fewest)| count < fewest) {
                    best = Some((place, count));
                }
                if count == 0 {
                    break;
                }
            }
            let (place, count) = best?;
            // Another thread may have taken it meanwhile.
            let taken =
                living.get(place)?.compare_exchange(count, count.wrapping_add(1), Relaxed, Relaxed);
            if taken.is_ok() {
                return Some(place);
            }
        }
    }

    pub(super) fn give_back(&self, place: usize) {
        if let Some(count) = self.living.get(place) {
            let _ = count.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
        }
    }

    /// Forgets all threads.
    pub(super) fn forget(&self) {
        for count in self.living.iter().take(self.number()) {
            count.store(0, Relaxed);
        }
    }
}

/// A number of a CPU.
fn decimal(word: &[u8]) -> Option<u32> {
    let mut number: Option<u32> = None;
    for byte in word {
        let digit = byte.wrapping_sub(b'0');
        let before = number.unwrap_or(0);
        let is_valid = digit <= 9 && before < MOST_CPUS as u32;
        number = Some(before.wrapping_mul(10).wrapping_add(digit.into()));
        if !is_valid {
            return None;
        }
    }
    number.filter(|cpu| *cpu < MOST_CPUS as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(text: &str) -> Places {
        let places = Places::new();
        places.fill(text.as_bytes(), b"");
        places
    }

    #[test]
    fn a_list_of_cpus_is_read_or_there_are_no_places() {
        let read = |text: &str| {
            let places = places(text);
            (0..places.number()).map(|place| places.cpu(place).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(read("0,4,1,5"), [0, 4, 1, 5]);
        assert_eq!(read("8191"), [8191]);
        for wrong in ["", "0,", ",0", "0,x", "-1", "0-3", "8192", "99999999999999999999", " 0"] {
            assert!(read(wrong).is_empty(), "{wrong}");
        }
        let all = (0..MOST_CPUS).map(|cpu| cpu.to_string()).collect::<Vec<_>>().join(",");
        assert_eq!(read(&all).len(), MOST_CPUS);
        assert!(read(&format!("{all},0")).is_empty(), "more places than there can be");
    }

    #[test]
    fn the_place_with_the_fewest_threads_is_taken_and_the_first_of_several() {
        let places = places("3,7,5");
        let take = || places.take().unwrap();
        assert_eq!([take(), take(), take(), take(), take()], [0, 1, 2, 0, 1]);
        places.give_back(1);
        assert_eq!([take(), take(), take()], [1, 2, 0]);
        places.forget();
        assert_eq!(take(), 0);
        // A thread of before that ends now is not counted twice.
        [0, 0, 0, 1, 3, usize::MAX].iter().for_each(|place| places.give_back(*place));
        assert_eq!([take(), take(), take(), take()], [0, 1, 2, 0]);
        assert_eq!(super::Places::new().take(), None);
    }

    #[test]
    fn many_threads_that_take_places_at_once_are_counted_right() {
        static PLACES: Places = Places::new();
        PLACES.fill(b"0,1,2", b"");
        let threads: Vec<_> = (0..4)
            .map(|_| {
                std::thread::spawn(|| {
                    for _ in 0..1000 {
                        let place = PLACES.take().unwrap();
                        PLACES.give_back(place);
                    }
                    (0..300).for_each(|_| assert!(PLACES.take().is_some()));
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let living: Vec<u32> = (0..3).map(|place| PLACES.living[place].load(Relaxed)).collect();
        assert_eq!(living.iter().sum::<u32>(), 1200);
    }

    #[test]
    fn a_program_with_a_home_starts_there() {
        let with = |home: &str| {
            let places = Places::new();
            places.fill(b"0,1,2,3", home.as_bytes());
            places.start(0)
        };
        assert_eq!(with("1,3"), 0b1010);
        for wrong in ["", "1,x", "1-3"] {
            assert_eq!(with(wrong), 0b1111, "{wrong}");
        }
    }

    #[test]
    fn masks_have_the_cpus_of_the_places() {
        let places = places("0,63,64,8191");
        let words: Vec<c_ulong> = (0..=WORDS).map(|at| places.start(at)).collect();
        assert_eq!((words[0], words[1], words[WORDS - 1]), (1 << 63 | 1, 1, 1 << 63));
        assert_eq!(words.iter().map(|word| word.count_ones()).sum::<u32>(), 4);
    }
}
