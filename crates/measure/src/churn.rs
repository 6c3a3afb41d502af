//! The micro-benchmark of allocators: threads allocate and free memory as fast as they can.
//!
//! It is that of section 3.1.8 of *The Art of Efficient In-memory Query Processing on NUMA Systems*
//! (Memarzia, Ray and Bhavsar, 2019). Each operation either allocates an item and writes all of it,
//! or reads all of an item and frees it. Small items are more frequent: the share of a size class is
//! inversely proportional to its size. Two figures come out, as in the paper: the time until all
//! threads are done, and the memory that the kernel has given, divided by what was asked for.
//!
//! ```text
//! slots of a thread   [ item ][      ][ item ][ item ][      ] ...
//!                        │       │
//!    one is chosen:      │       └─ empty: allocate, write
//!                        └─ taken: read, free
//! ```
//!
//! Half of the slots are taken in the end, whatever the number of operations. The process that runs
//! it measures nothing else: its resident memory must be the allocator's.

use std::fs;
use std::hint::black_box;
use std::io;
use std::sync::{PoisonError, RwLock};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::random::SplitMix64;

/// Slots of a thread. With the mean size of an item, half of them are some 10 MB.
pub const SLOTS: usize = 1 << 18;
/// The smallest size class, in bytes.
const SMALLEST: usize = 16;
/// Size classes: each has twice the size of the one before, up to 8 KB.
const CLASSES: u32 = 10;

/// What a process is to do.
#[derive(Clone, Copy, Debug)]
pub struct Churn {
    /// Threads, each with slots of its own.
    pub threads: usize,
    /// Operations of each thread.
    pub operations: u64,
    /// Decides on slots and sizes, so that all allocators get the same requests.
    pub seed: u64,
}

/// What came out.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Churned {
    /// From the start of the threads' operations until the last one is done, without freeing the
    /// rest.
    pub time_ns: u64,
    /// The most bytes that each thread had asked for at a time, in all.
    pub requested_bytes: u64,
    /// By how much the resident memory of the process had grown, at most.
    pub resident_bytes: u64,
    /// The file that the allocator comes from: the C library, or a preloaded library.
    pub allocator: String,
}

impl Churned {
    /// Resident bytes for each byte asked for.
    pub fn overhead(&self) -> f64 {
        self.resident_bytes as f64 / self.requested_bytes.max(1) as f64
    }
}

impl Churn {
    /// Does it in this process, with the allocator that this process has.
    ///
    /// # Errors
    /// [`Error::Call`] if the kernel does not tell the memory of this process, or if memory ran out;
    /// [`Error::Thread`] if a thread could not be started.
    pub fn run(&self) -> Result<Churned, Error> {
        let mut tables: Vec<Table> = (0..self.threads).map(|_| Table::new()).collect();
        // The tables are resident by now, and so are not counted.
        reset_peak()?;
        let before = resident("VmRSS")?;
        let (time_ns, requested) = self.run_threads(&mut tables)?;
        let most = resident("VmHWM")?;
        let allocator = allocator_of_this_process()?;
        tables.iter_mut().for_each(Table::clear);
        let resident_bytes = most.saturating_sub(before);
        Ok(Churned { time_ns, requested_bytes: requested, resident_bytes, allocator })
    }

    /// Starts the threads, and lets them begin at once when all are there. Returns the time, and the
    /// bytes that were asked for.
    fn run_threads(&self, tables: &mut [Table]) -> Result<(u64, u64), Error> {
        // Threads wait to read it. It is true if all threads have started, and otherwise they end.
        let all_started = RwLock::new(false);
        std::thread::scope(|scope| {
            let mut gate = all_started.write().unwrap_or_else(PoisonError::into_inner);
            let mut threads = Vec::new();
            for (nth, table) in tables.iter_mut().enumerate() {
                let (gate, seed) = (&all_started, self.seed ^ ((nth as u64) << 32));
                let work = move || match *gate.read().unwrap_or_else(PoisonError::into_inner) {
                    true => table.churn(self.operations, seed),
                    false => None,
                };
                let thread = std::thread::Builder::new().spawn_scoped(scope, work);
                let name = "churn";
                threads.push(thread.map_err(|source| Error::Thread { name, reason: source })?);
            }
            *gate = true;
            let began = Instant::now();
            drop(gate);
            let mut requested = 0;
            for thread in threads {
                let source = || io::ErrorKind::OutOfMemory.into();
                let none_left = || Error::Call { call: "malloc", reason: source() };
                requested += thread.join().unwrap_or(None).ok_or_else(none_left)?;
            }
            Ok((began.elapsed().as_nanos() as u64, requested))
        })
    }
}

/// The items of a thread: address and size, or null.
struct Table(Vec<(*mut u8, usize)>);

// SAFETY: the pointers are to memory that belongs to the table alone.
unsafe impl Send for Table {}

impl Table {
    fn new() -> Table {
        // Written, and so resident.
        Table((0..SLOTS).map(|slot| black_box((std::ptr::null_mut(), slot))).collect())
    }

    /// Returns the most bytes that were allocated at a time, or `None` if malloc has failed.
    fn churn(&mut self, operations: u64, seed: u64) -> Option<u64> {
        let mut random = SplitMix64(seed);
        let (mut now, mut most) = (0, 0);
        for _ in 0..operations {
            let slot = random.below(SLOTS);
            let (item, size) = &mut self.0[slot];
            if item.is_null() {
                *size = size_of_item(&mut random);
                // SAFETY: the call takes no pointers.
                *item = unsafe { libc::malloc(*size) }.cast();
                if item.is_null() {
                    return None;
                }
                // SAFETY: the memory has this many bytes, and is this table's.
                unsafe { std::ptr::write_bytes(*item, slot as u8, *size) };
                now += *size as u64;
                most = most.max(now);
            } else {
                // SAFETY: all of its bytes were written when it was allocated.
                let bytes = unsafe { std::slice::from_raw_parts(*item, *size) };
                black_box(bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)));
                // SAFETY: it is from malloc, and no longer used.
                unsafe { libc::free(item.cast()) };
                *item = std::ptr::null_mut();
                now -= *size as u64;
            }
        }
        Some(most)
    }

    fn clear(&mut self) {
        for (item, _) in &mut self.0 {
            // SAFETY: it is from malloc, or null, and no longer used.
            unsafe { libc::free(item.cast()) };
            *item = std::ptr::null_mut();
        }
    }
}

/// The size of the next item. A class with twice the size is half as frequent.
fn size_of_item(random: &mut SplitMix64) -> usize {
    // Of 2^n - 1 numbers, the largest class has one, the one below it two, and so on.
    let number = random.below((1 << CLASSES) - 1) + 1;
    let class = CLASSES - 1 - number.ilog2();
    SMALLEST << class
}

/// Makes the kernel forget the most resident memory so far (`/proc/self/clear_refs`, Linux 4.0).
fn reset_peak() -> Result<(), Error> {
    let call = "writing /proc/self/clear_refs";
    fs::write("/proc/self/clear_refs", "5").map_err(|source| Error::Call { call, reason: source })
}

/// A size of `/proc/self/status` in bytes.
fn resident(name: &str) -> Result<u64, Error> {
    let call = "reading /proc/self/status";
    let status = fs::read_to_string("/proc/self/status")
        .map_err(|source| Error::Call { call, reason: source })?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kb = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    let missing = || Error::Call { call, reason: io::ErrorKind::InvalidData.into() };
    kb.map(|kb| kb << 10).ok_or_else(missing)
}

/// The file that has the function `malloc` of this process.
fn allocator_of_this_process() -> Result<String, Error> {
    // SAFETY: zeros are a valid `Dl_info`. The call writes it; the name that it points to lives as
    // long as the object, which is never unloaded.
    let file = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let malloc = libc::dlsym(libc::RTLD_DEFAULT, c"malloc".as_ptr());
        match libc::dladdr(malloc, &mut info) {
            0 => None,
            _ => Some(std::ffi::CStr::from_ptr(info.dli_fname).to_string_lossy().into_owned()),
        }
    };
    let call = "dladdr(malloc)";
    file.ok_or_else(|| Error::Call { call, reason: io::ErrorKind::NotFound.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_items_are_more_frequent_in_proportion() {
        let (mut random, mut counts) = (SplitMix64(7), [0u32; CLASSES as usize]);
        for _ in 0..1 << 20 {
            counts[(size_of_item(&mut random) / SMALLEST).ilog2() as usize] += 1;
        }
        for pair in counts.windows(2) {
            let ratio = f64::from(pair[0]) / f64::from(pair[1]);
            assert!((1.8..2.2).contains(&ratio), "{counts:?}");
        }
    }
}
