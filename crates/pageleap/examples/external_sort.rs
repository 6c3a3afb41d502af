//! A merge sort of more records than the fast memory holds: sorted runs are spilled to slower
//! memory instead of a disk, and fetched block by block to be merged:
//! `cargo run --release -p pageleap --example external_sort [MB [FAST_MB [FAST [SLOW]]]]`.
//!
//! 1. A part of the input is generated and sorted in fast memory. Then it leaps to slow memory
//!    while the next part is generated in the frames that the one before has left.
//! 2. The runs are merged. Each has a block in fast memory that is read, and one that leaps there
//!    meanwhile. A block that has been read is discarded. Output leaps to slow memory, block by
//!    block.
//!
//! A spilled record keeps its address: there is no buffer to copy to, no file and no format. At the
//! end the output is checked: it is in order, and it has the records of the input.
//!
//! FAST and SLOW are nodes; the defaults are a node with CPUs, and the node that is farthest from
//! it. On a machine with one node both are pools of that node, which shows that nothing is lost,
//! and no gain. Exit code: 0 if the output is right, else 1.

#[path = "common/tiers.rs"]
mod tiers;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::error::Error;
use std::ops::Range;
use std::process::ExitCode;
use std::time::Duration;

use pageleap::{BASE_PAGE, Job, Migration, NodeId, PageSize, Pool, Region};

/// A key, and a value that follows from it.
type Record = [u64; 2];
const RECORD: usize = size_of::<Record>();
/// For calls that withdraw pages while a job works on others: they wait for milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// The sizes and the places of a run.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Bytes of the input.
    pub bytes: usize,
    /// Bytes of fast memory.
    pub fast_bytes: usize,
    /// The node of fast memory.
    pub fast: NodeId,
    /// The node of slow memory.
    pub slow: NodeId,
}

/// The end of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Records of the input.
    pub records: u64,
    /// Sorted runs.
    pub runs: usize,
    /// Bytes that leapt to slow memory.
    pub spilled: u64,
    /// Bytes that leapt to fast memory.
    pub fetched: u64,
    /// Records that are out of order, lost, or wrong.
    pub wrong: u64,
}

fn value(key: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
}

/// Memory of both kinds, and a region whose parts lie in one of them, or nowhere.
struct Memory {
    region: Region,
    fast: Pool,
    slow: Pool,
    spilled: u64,
    fetched: u64,
}

impl Memory {
    /// Records of the region, in bytes.
    ///
    /// # Safety
    /// No other slice of the part is alive, and the part is backed.
    #[expect(clippy::mut_from_ref, reason = "parts that are alive do not overlap")]
    unsafe fn records(&self, part: Range<usize>) -> &mut [Record] {
        // SAFETY: the caller has the part to itself, and every pattern of bits is a record.
        unsafe {
            let first = self.region.as_ptr().add(part.start).cast::<Record>();
            std::slice::from_raw_parts_mut(first.as_ptr(), part.len() / RECORD)
        }
    }

    fn back(&self, part: Range<usize>) -> Result<(), pageleap::Error> {
        self.region.back_within(part, &self.fast, PATIENCE)
    }

    fn spill(&mut self, part: Range<usize>) -> Result<Job, pageleap::Error> {
        self.spilled += part.len() as u64;
        Migration::new().range(&self.region, part, &self.slow).start()
    }

    fn fetch(&mut self, part: Range<usize>) -> Result<Job, pageleap::Error> {
        self.fetched += part.len() as u64;
        Migration::new().range(&self.region, part, &self.fast).start()
    }
}

/// Waits for a job that has to move everything.
fn finish(job: Job) -> Result<(), Box<dyn Error>> {
    let report = job.wait();
    if report.ended.is_completed() { Ok(()) } else { Err(report.to_string().into()) }
}

/// Waits for the oldest jobs until at most `most` are left.
fn finish_all_but(jobs: &mut VecDeque<Job>, most: usize) -> Result<(), Box<dyn Error>> {
    while jobs.len() > most {
        jobs.pop_front().map_or(Ok(()), finish)?;
    }
    Ok(())
}

/// The parts of a range in steps of `step` bytes.
fn steps(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(step).map(move |first| first..(first + step).min(range.end))
}

/// The sorted runs, and the sum of all keys.
struct Runs {
    parts: Vec<Range<usize>>,
    sum: u64,
}

/// Generates the input part by part, sorts each part, and spills it.
fn make_runs(memory: &mut Memory, bytes: usize, part: usize) -> Result<Runs, Box<dyn Error>> {
    let (mut random, mut sum) = (0x2545_f491_4f6c_dd1d_u64, 0u64);
    let (mut parts, mut spills) = (Vec::new(), VecDeque::new());
    for run in steps(0..bytes, part) {
        // The part before the last one has left its frames.
        finish_all_but(&mut spills, 1)?;
        memory.back(run.clone())?;
        // SAFETY: the part was backed just now, and no other slice of it exists.
        let records = unsafe { memory.records(run.clone()) };
        for record in &mut *records {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            *record = [random, value(random)];
            sum = sum.wrapping_add(random);
        }
        records.sort_unstable();
        spills.push_back(memory.spill(run.clone())?);
        parts.push(run);
    }
    finish_all_but(&mut spills, 0)?;
    Ok(Runs { parts, sum })
}

/// A run that is read block by block.
struct Source {
    /// Blocks that are in slow memory.
    left: VecDeque<Range<usize>>,
    /// The block that is leaping to fast memory.
    coming: Option<(Job, Range<usize>)>,
    /// The block that is read, and the next record of it, in bytes.
    block: Range<usize>,
    next: usize,
}

impl Source {
    fn new(run: Range<usize>, block: usize) -> Source {
        let (left, next) = (steps(run.clone(), block).collect(), run.start);
        Source { left, coming: None, block: run.start..run.start, next }
    }

    /// The next key; `None` at the end of the run.
    fn key(&mut self, memory: &mut Memory) -> Result<Option<u64>, Box<dyn Error>> {
        if self.next == self.block.end {
            if !self.block.is_empty() {
                memory.region.discard_within(self.block.clone(), PATIENCE)?;
            }
            if self.coming.is_none() {
                self.prefetch(memory)?;
            }
            let Some((job, block)) = self.coming.take() else {
                self.block = self.next..self.next;
                return Ok(None);
            };
            finish(job)?;
            (self.next, self.block) = (block.start, block);
            self.prefetch(memory)?;
        }
        // SAFETY: the block is in fast memory, and no other slice of it exists.
        Ok(Some(unsafe { memory.records(self.next..self.next + RECORD) }[0][0]))
    }

    fn prefetch(&mut self, memory: &mut Memory) -> Result<(), pageleap::Error> {
        if let Some(block) = self.left.pop_front() {
            self.coming = Some((memory.fetch(block.clone())?, block));
        }
        Ok(())
    }

    /// The record whose key was asked for. The next one follows.
    fn take(&mut self, memory: &Memory) -> Record {
        // SAFETY: the block is in fast memory, and no other slice of it exists.
        let record = unsafe { memory.records(self.next..self.next + RECORD) }[0];
        self.next += RECORD;
        record
    }
}

/// Merges the runs into `output`, block by block.
fn merge(
    memory: &mut Memory,
    runs: Vec<Range<usize>>,
    output: Range<usize>,
    block: usize,
) -> Result<(), Box<dyn Error>> {
    let mut sources: Vec<Source> = runs.into_iter().map(|run| Source::new(run, block)).collect();
    let mut least = BinaryHeap::new();
    for (at, source) in sources.iter_mut().enumerate() {
        least.extend(source.key(memory)?.map(|key| Reverse((key, at))));
    }
    let mut spills = VecDeque::new();
    for part in steps(output, block) {
        finish_all_but(&mut spills, 1)?;
        memory.back(part.clone())?;
        for at in part.clone().step_by(RECORD) {
            let Some(Reverse((_, from))) = least.pop() else {
                return Err("the runs have fewer records than the input".into());
            };
            let record = sources[from].take(memory);
            // SAFETY: the part was backed for this output, and no other slice of it exists.
            let to = unsafe { memory.records(at..at + RECORD) };
            to[0] = record;
            least.extend(sources[from].key(memory)?.map(|key| Reverse((key, from))));
        }
        spills.push_back(memory.spill(part)?);
    }
    finish_all_but(&mut spills, 0)
}

/// How many records are out of order or wrong. One more if their keys are not those of the input.
fn check(memory: &Memory, output: Range<usize>, sum: u64) -> u64 {
    // SAFETY: the output is complete, and no other slice of it exists.
    let records = unsafe { memory.records(output) };
    let is_wrong = |at: usize| {
        let [key, of_key] = records[at];
        of_key != value(key) || (at > 0 && records[at - 1][0] > key)
    };
    let wrong = (0..records.len()).filter(|at| is_wrong(*at)).count() as u64;
    let found = records.iter().fold(0u64, |sum, record| sum.wrapping_add(record[0]));
    wrong + u64::from(found != sum)
}

/// Sorts, and verifies the output.
pub fn run(setting: Setting) -> Result<Outcome, Box<dyn Error>> {
    // Two parts are in fast memory: one is generated, the other one leaps.
    let part = (setting.fast_bytes / 2 / BASE_PAGE * BASE_PAGE).max(64 * BASE_PAGE);
    let bytes = setting.bytes.next_multiple_of(BASE_PAGE);
    let runs = bytes.div_ceil(part);
    // Each run has two blocks there, and the output two.
    let block = 2 * part / (2 * runs + 2) / BASE_PAGE * BASE_PAGE;
    if block == 0 {
        return Err("the fast memory is too small for so many runs; give more of it".into());
    }
    let pool = |node: NodeId, bytes: usize| {
        Pool::builder(node, bytes as u64).page_size(PageSize::Base).build()
    };
    let region = Region::reserve(2 * bytes, PageSize::Base)?;
    region.extend(2 * bytes)?;
    let mut memory = Memory {
        region,
        fast: pool(setting.fast, 2 * part)?,
        // Output takes as much as runs have left, and some blocks more.
        slow: pool(setting.slow, bytes + (2 * runs + 2) * block)?,
        spilled: 0,
        fetched: 0,
    };
    let made = make_runs(&mut memory, bytes, part)?;
    let output = bytes..2 * bytes;
    merge(&mut memory, made.parts, output.clone(), block)?;
    let wrong = check(&memory, output, made.sum);
    let verified = memory.region.verify()?;
    let used = memory.slow.bytes() - memory.slow.free_bytes();
    if !verified.is_right() || used != bytes as u64 {
        return Err(format!("{used} of {bytes} bytes are in slow memory: {verified}").into());
    }
    Ok(Outcome {
        records: (bytes / RECORD) as u64,
        runs,
        spilled: memory.spilled,
        fetched: memory.fetched,
        wrong,
    })
}

fn main() -> ExitCode {
    match print() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the number of wrong records.
fn print() -> Result<u64, Box<dyn Error>> {
    let numbers: Vec<usize> =
        std::env::args().skip(1).map(|number| number.parse()).collect::<Result<_, _>>()?;
    let bytes = |at: usize, default: usize| {
        let mib = numbers.get(at).copied().unwrap_or(default).max(1);
        mib.checked_mul(1 << 20).ok_or("MB: too many")
    };
    let tiers = tiers::tiers()?;
    let node = |at: usize| numbers.get(at + 2).map_or(tiers[at], |id| NodeId(*id as u32));
    let setting =
        Setting { bytes: bytes(0, 256)?, fast_bytes: bytes(1, 64)?, fast: node(0), slow: node(1) };
    let outcome = run(setting)?;
    let same = if setting.fast == setting.slow { ": one node, so no speed-up" } else { "" };
    let mib = |bytes: u64| bytes >> 20;
    println!("memory    fast on {}, slow on {}{same}", setting.fast, setting.slow);
    println!("input     {} records in {} runs", outcome.records, outcome.runs);
    println!(
        "leapt     {} MiB to slow memory, {} MiB to fast memory",
        mib(outcome.spilled),
        mib(outcome.fetched)
    );
    match outcome.wrong {
        0 => println!("output    in order, and complete"),
        wrong => println!("output    {wrong} records WRONG"),
    }
    Ok(outcome.wrong)
}
