//! A buffer pool over two tiers of memory: blocks that threads use often are promoted to the fast
//! tier, blocks that they no longer use are demoted, while all threads go on: `cargo run --release
//! -p pageleap --example two_tiers [MB [FAST [SLOW]]]`.
//!
//! The table has records of 1 KB in blocks of 64 KB. A quarter of the blocks fits the fast tier.
//! The threads run YCSB's mix A: half of the operations read a record and half of them write one,
//! by Zipf's law with exponent 0.99, so a few blocks get most of them. Each thread counts every
//! sixteenth operation for its block. A manager halves the counts in each round, and lets the
//! blocks with the highest counts change places with the blocks of the fast tier that have the
//! lowest: one job with all ranges, in both directions. In the middle of the run other blocks
//! become hot.
//!
//! Every read checks the whole record, and at the end each record is compared with the number of
//! writes to it. FAST and SLOW are nodes; the defaults are a node with CPUs, and the node that is
//! farthest from it. On a machine with one node both tiers are pools of that node: this shows that
//! blocks find their places, and no gain. Exit code: 0 if every record was right, else 1.

#[path = "common/tiers.rs"]
mod tiers;

use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};

use pageleap::{Migration, NodeId, PageSize, Pool, Region};

const BLOCK: usize = 64 << 10;
const RECORD: usize = 1 << 10;
/// A smaller table has no tiers.
const LEAST_BLOCKS: usize = 64;
/// Words of a record: its number of changes, and contents that follow from it.
const WORDS: usize = RECORD / size_of::<u64>();
const RECORDS_OF_BLOCK: usize = BLOCK / RECORD;
/// Threads that use the table.
const THREADS: usize = 2;
/// After looking at a guard this often, for minutes, a thread takes it for damaged.
const MOST_SPINS: u64 = 1 << 32;
/// Rounds of the manager, before and after other blocks become hot.
const ROUNDS: usize = 16;
/// One of this number of operations is counted.
const SAMPLED: u64 = 16;

/// The sizes and the places of a run.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Bytes of the table, in whole blocks.
    pub bytes: usize,
    /// Operations between two rounds of the manager.
    pub operations: u64,
    /// The node of the fast tier.
    pub fast: NodeId,
    /// The node of the slow tier.
    pub slow: NodeId,
}

/// The end of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Reads and writes of records.
    pub operations: u64,
    /// Blocks that went to the fast tier.
    pub promoted: u64,
    /// Blocks that left it.
    pub demoted: u64,
    /// The share of operations on blocks of the fast tier: in the first round, in the last round
    /// before other blocks become hot, in the round after that, and in the last one.
    pub fast_shares: [f64; 4],
    /// Records with wrong contents.
    pub wrong: u64,
}

/// Xorshift: a few instructions, so that threads spend their time on the table.
struct Random(u64);

impl Random {
    fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number from 0 to below 1.
    fn share(&mut self) -> f64 {
        (self.number() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Zipf's law over the records, as YCSB draws it (J. Gray et al., *Quickly generating
/// billion-record synthetic databases*, 1994).
struct Zipf {
    count: f64,
    theta: f64,
    zeta: f64,
    eta: f64,
}

impl Zipf {
    fn new(count: usize, theta: f64) -> Zipf {
        let zeta = |count: usize| (1..=count).map(|rank| (rank as f64).powf(-theta)).sum::<f64>();
        let (of_two, all, count) = (zeta(2), zeta(count), count as f64);
        let eta = (1.0 - (2.0 / count).powf(1.0 - theta)) / (1.0 - of_two / all);
        Zipf { count, theta, zeta: all, eta }
    }

    /// A rank from 0, the most frequent one.
    fn rank(&self, random: &mut Random) -> usize {
        let share = random.share();
        let scaled = share * self.zeta;
        if scaled < 1.0 {
            return 0;
        }
        if scaled < 1.0 + 0.5f64.powf(self.theta) {
            return 1;
        }
        let rank = self.count * (self.eta * share - self.eta + 1.0).powf(1.0 / (1.0 - self.theta));
        rank.min(self.count - 1.0) as usize
    }
}

/// The content of a word of a record after some changes.
fn content(record: usize, changes: u64, word: usize) -> u64 {
    ((record as u64) << 32 ^ changes << 8 ^ word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The records, each guarded by its first word: twice the number of changes, and odd while a thread
/// changes the record.
struct Table<'a> {
    words: &'a [AtomicU64],
}

impl Table<'_> {
    fn record(&self, record: usize) -> &[AtomicU64] {
        &self.words[record * WORDS..][..WORDS]
    }

    /// Reads a record. `false` if its contents are wrong.
    fn read(&self, record: usize) -> bool {
        let words = self.record(record);
        for _ in 0..MOST_SPINS {
            let before = words[0].load(Acquire);
            let is_right =
                |word: usize| words[word].load(Relaxed) == content(record, before / 2, word);
            let all_right = (1..WORDS).all(is_right);
            fence(Acquire);
            if before.is_multiple_of(2) && words[0].load(Relaxed) == before {
                return all_right;
            }
            std::hint::spin_loop();
        }
        false
    }

    /// Changes a record. `false` if another thread seems to change it for ever: a word was lost.
    fn write(&self, record: usize) -> bool {
        let words = self.record(record);
        let latched = (0..MOST_SPINS).find_map(|_| {
            std::hint::spin_loop();
            let now = words[0].load(Relaxed);
            let is_free = now.is_multiple_of(2);
            let latched =
                is_free && words[0].compare_exchange(now, now + 1, Acquire, Relaxed).is_ok();
            latched.then_some(now)
        });
        let Some(before) = latched else { return false };
        // Readers that see a word of the new contents see that the record is being changed.
        fence(Release);
        for (at, word) in words.iter().enumerate().skip(1) {
            word.store(content(record, before / 2 + 1, at), Relaxed);
        }
        words[0].store(before + 2, Release);
        true
    }
}

/// The state that threads and the manager share.
struct Shared {
    zipf: Zipf,
    /// Sampled operations on each block since the last round.
    counts: Vec<AtomicU32>,
    /// Whether each block is in the fast tier.
    in_fast: Vec<AtomicBool>,
    /// The block of rank 0. Others follow in steps, so that hot blocks are scattered.
    hottest: AtomicU64,
    operations: AtomicU64,
    on_fast: AtomicU64,
    wrong: AtomicU64,
    stop: AtomicBool,
}

impl Shared {
    /// The record of a rank: ranks of a block stay together.
    fn record(&self, rank: usize) -> usize {
        let blocks = self.counts.len();
        // A step without a common factor with the number of blocks meets each block once.
        let step = (blocks * 5 / 8..).find(|step| gcd(*step, blocks) == 1).unwrap_or(1);
        let hottest = self.hottest.load(Relaxed) as usize;
        let block = (hottest + rank / RECORDS_OF_BLOCK * step) % blocks;
        block * RECORDS_OF_BLOCK + rank % RECORDS_OF_BLOCK
    }
}

fn gcd(one: usize, other: usize) -> usize {
    if other == 0 { one } else { gcd(other, one % other) }
}

/// Runs the mix until the end. Returns the number of writes to each record.
fn use_table(table: &Table<'_>, shared: &Shared, seed: u64) -> Vec<u32> {
    let mut random = Random(seed);
    let mut written = vec![0; table.words.len() / WORDS];
    while !shared.stop.load(Relaxed) {
        let (mut on_fast, mut wrong) = (0, 0);
        for nth in 0..256 {
            let record = shared.record(shared.zipf.rank(&mut random));
            let block = record / RECORDS_OF_BLOCK;
            if nth % SAMPLED == 0 {
                shared.counts[block].fetch_add(1, Relaxed);
            }
            on_fast += u64::from(shared.in_fast[block].load(Relaxed));
            if random.number().is_multiple_of(2) {
                wrong += u64::from(!table.write(record));
                written[record] += 1;
            } else {
                wrong += u64::from(!table.read(record));
            }
        }
        shared.on_fast.fetch_add(on_fast, Relaxed);
        shared.wrong.fetch_add(wrong, Relaxed);
        shared.operations.fetch_add(256, Relaxed);
    }
    written
}

/// The tiers, and how often each block was used lately.
struct Manager<'a> {
    region: &'a Region,
    fast: &'a Pool,
    slow: &'a Pool,
    scores: Vec<u32>,
    /// The most blocks that change places in a round: the spare frames of each tier.
    most: usize,
}

impl Manager<'_> {
    /// Lets hot blocks of the slow tier and cold blocks of the fast tier change places. Returns how
    /// many were promoted, and how many demoted.
    fn round(&mut self, shared: &Shared) -> Result<[u64; 2], Box<dyn Error>> {
        for (score, count) in self.scores.iter_mut().zip(&shared.counts) {
            *score = *score / 2 + count.swap(0, Relaxed);
        }
        let is_fast = |block: &usize| shared.in_fast[*block].load(Relaxed);
        let (mut fast, mut slow): (Vec<usize>, Vec<usize>) =
            (0..self.scores.len()).partition(is_fast);
        slow.sort_unstable_by_key(|block| std::cmp::Reverse(self.scores[*block]));
        fast.sort_unstable_by_key(|block| self.scores[*block]);
        // A tier that has room takes blocks without giving some.
        let room = ((self.fast.free_bytes() as usize / BLOCK).saturating_sub(self.most))
            .min(self.most)
            .min(slow.len());
        let mut up: Vec<usize> = slow.drain(..room).collect();
        let mut down = Vec::new();
        for (hot, cold) in slow.into_iter().zip(fast).take(self.most - room) {
            // A block that is hotter by a little is not worth two moves.
            if self.scores[hot] <= self.scores[cold] + self.scores[cold] / 4 + 1 {
                break;
            }
            up.push(hot);
            down.push(cold);
        }
        if up.is_empty() {
            return Ok([0, 0]);
        }
        let mut migration = Migration::new();
        for (blocks, pool) in [(&down, self.slow), (&up, self.fast)] {
            for block in blocks {
                migration = migration.range(self.region, block * BLOCK..(block + 1) * BLOCK, pool);
            }
        }
        let report = migration.run()?;
        if !report.ended.is_completed() {
            return Err(report.to_string().into());
        }
        up.iter().for_each(|block| shared.in_fast[*block].store(true, Relaxed));
        down.iter().for_each(|block| shared.in_fast[*block].store(false, Relaxed));
        Ok([up.len() as u64, down.len() as u64])
    }
}

/// The manager's rounds. In the middle other blocks become hot.
fn manage(
    manager: &mut Manager<'_>,
    shared: &Shared,
    operations: u64,
) -> Result<Outcome, Box<dyn Error>> {
    let mut outcome = Outcome::default();
    for round in 0..2 * ROUNDS {
        if round == ROUNDS {
            shared.hottest.store(shared.counts.len() as u64 / 2, Relaxed);
        }
        let begin = [&shared.operations, &shared.on_fast].map(|count| count.load(Relaxed));
        while shared.operations.load(Relaxed) < begin[0] + operations {
            if shared.wrong.load(Relaxed) > 0 {
                return Err("a record was wrong while blocks changed places".into());
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let done = shared.operations.load(Relaxed) - begin[0];
        let share = (shared.on_fast.load(Relaxed) - begin[1]) as f64 / done as f64;
        match round {
            0 => outcome.fast_shares[0] = share,
            _ if round == ROUNDS - 1 => outcome.fast_shares[1] = share,
            _ if round == ROUNDS => outcome.fast_shares[2] = share,
            _ => outcome.fast_shares[3] = share,
        }
        let [promoted, demoted] = manager.round(shared)?;
        outcome.promoted += promoted;
        outcome.demoted += demoted;
    }
    Ok(outcome)
}

/// Runs the table on two tiers, and verifies it.
pub fn run(setting: Setting) -> Result<Outcome, Box<dyn Error>> {
    let blocks = (setting.bytes / BLOCK).max(LEAST_BLOCKS);
    let records = blocks * RECORDS_OF_BLOCK;
    let most = blocks / 32;
    let pool = |node: NodeId, blocks: usize| {
        Pool::builder(node, (blocks * BLOCK) as u64).page_size(PageSize::Base).build()
    };
    let (fast, slow) = (pool(setting.fast, blocks / 4 + most)?, pool(setting.slow, blocks + most)?);
    let region = Region::new(&slow, blocks * BLOCK)?;
    let table = Table { words: region.atomics_u64(0..blocks * BLOCK)? };
    for record in 0..records {
        for (at, word) in table.record(record).iter().enumerate().skip(1) {
            word.store(content(record, 0, at), Relaxed);
        }
    }
    let shared = Shared {
        zipf: Zipf::new(records, 0.99),
        counts: (0..blocks).map(|_| AtomicU32::new(0)).collect(),
        in_fast: (0..blocks).map(|_| AtomicBool::new(false)).collect(),
        hottest: AtomicU64::new(0),
        operations: AtomicU64::new(0),
        on_fast: AtomicU64::new(0),
        wrong: AtomicU64::new(0),
        stop: AtomicBool::new(false),
    };
    let scores = vec![0; blocks];
    let mut manager = Manager { region: &region, fast: &fast, slow: &slow, scores, most };
    let (managed, written) = std::thread::scope(|scope| {
        let (table, shared) = (&table, &shared);
        let threads: Vec<_> = (1..=THREADS as u64)
            .map(|seed| {
                let seed = seed.wrapping_mul(0x2545_f491_4f6c_dd1d);
                scope.spawn(move || use_table(table, shared, seed))
            })
            .collect();
        let managed = manage(&mut manager, shared, setting.operations);
        shared.stop.store(true, Relaxed);
        let join = |thread: std::thread::ScopedJoinHandle<'_, Vec<u32>>| {
            thread.join().expect("no thread panics")
        };
        (managed, threads.into_iter().map(join).collect::<Vec<_>>())
    });
    let mut outcome = managed?;
    outcome.operations = shared.operations.load(Relaxed);
    outcome.wrong = shared.wrong.load(Relaxed);
    for record in 0..records {
        let writes: u64 = written.iter().map(|writes| u64::from(writes[record])).sum();
        let is_right = table.read(record) && table.record(record)[0].load(Relaxed) == 2 * writes;
        outcome.wrong += u64::from(!is_right);
    }
    let promoted = shared.in_fast.iter().filter(|is_fast| is_fast.load(Relaxed)).count();
    let used = (fast.bytes() - fast.free_bytes()) as usize / BLOCK;
    let verified = region.verify()?;
    if used != promoted || !verified.is_right() {
        return Err(
            format!("{promoted} blocks in {used} frames of the fast tier: {verified}").into()
        );
    }
    Ok(outcome)
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
    let tiers = tiers::tiers()?;
    let node = |at: usize| numbers.get(at + 1).map_or(tiers[at], |id| NodeId(*id as u32));
    let bytes = numbers.first().unwrap_or(&256).checked_mul(1 << 20).ok_or("MB: too many")?;
    let setting = Setting { bytes, operations: 200_000, fast: node(0), slow: node(1) };
    let outcome = run(setting)?;
    let same = if setting.fast == setting.slow { ": one node, so no speed-up" } else { "" };
    println!(
        "table     {} MiB; fast tier {}, slow tier {}{same}",
        ((bytes / BLOCK).max(LEAST_BLOCKS) * BLOCK) >> 20,
        setting.fast,
        setting.slow
    );
    println!("blocks    {} promoted, {} demoted", outcome.promoted, outcome.demoted);
    let [first, found, changed, last] = outcome.fast_shares.map(|share| 100.0 * share);
    println!(
        "fast      {first:.0} % of the operations at first, {found:.0} % after {ROUNDS} rounds"
    );
    println!(
        "          {changed:.0} % when other blocks became hot, {last:.0} % after {ROUNDS} rounds"
    );
    match outcome.wrong {
        0 => println!("records   all right after {} operations", outcome.operations),
        wrong => println!("records   {wrong} WRONG"),
    }
    Ok(outcome.wrong)
}
