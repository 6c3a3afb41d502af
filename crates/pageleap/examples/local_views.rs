//! A B+-tree that threads of all nodes search, each through the view of its own node, while the
//! tree leaps: `cargo run --release -p pageleap --example local_views [KEYS [SECONDS]]`.
//!
//! The tree lies in a region, and its nodes name their children by *offset* in the region, not by
//! address. A view maps the same bytes at other addresses: a pointer that is stored in the tree
//! would lead a thread out of its view, into the mapping whose page tables lie on another node. An
//! offset is right in every view.
//!
//! Each answer is checked. On a machine with one memory node the tree leaps to other frames of that
//! node, which shows that views work, and no gain. Exit code: 0 if all answers were right; 1 after
//! a wrong one, or if the region cannot leap here.

use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use pageleap::topology::Topology;
use pageleap::{BASE_PAGE, Migration, NodeId, PageSize, Pool, Region};

/// Words of a node of the tree, which fills a base page: their number, the keys, and for each key a
/// value (in a leaf) or the byte offset of a child, whose keys begin there (further up).
const WORDS: usize = BASE_PAGE / size_of::<u64>();
/// The most keys of a node.
const FANOUT: usize = (WORDS - 1) / 2;
/// The place of the first value or offset.
const VALUES: usize = 1 + FANOUT;
/// Every third number is a key, so that two of three searches for random numbers find none.
const STEP: u64 = 3;

/// The key at a place in the order of keys.
fn key(place: u64) -> u64 {
    place * STEP + 1
}

fn value(key: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)
}

/// Where to begin a search.
#[derive(Clone, Copy)]
struct Tree {
    root: u64,
    /// Levels above the leaves.
    height: usize,
}

/// The nodes of each level of a tree, leaves first.
fn levels(keys: u64) -> Vec<u64> {
    let above = |below: &u64| (*below > 1).then(|| below.div_ceil(FANOUT as u64));
    std::iter::successors(Some(keys.div_ceil(FANOUT as u64)), above).collect()
}

/// Writes a tree of `keys` keys, level by level from the leaves up.
fn bulk_load(words: &[AtomicU64], keys: u64) -> Tree {
    // The first keys of the nodes below, with what the node above stores for each.
    let mut below: Vec<(u64, u64)> = (0..keys).map(|at| (key(at), value(key(at)))).collect();
    let (mut next, levels) = (0, levels(keys));
    for _ in &levels {
        let mut above = Vec::new();
        for entries in below.chunks(FANOUT) {
            let node = &words[next * WORDS..][..WORDS];
            node[0].store(entries.len() as u64, Relaxed);
            for (at, (key, value)) in entries.iter().enumerate() {
                node[1 + at].store(*key, Relaxed);
                node[VALUES + at].store(*value, Relaxed);
            }
            above.push((entries[0].0, (next * BASE_PAGE) as u64));
            next += 1;
        }
        below = above;
    }
    Tree { root: below[0].1, height: levels.len() - 1 }
}

impl Tree {
    /// Looks a key up in the words of one view.
    fn find(self, words: &[AtomicU64], key: u64) -> Option<u64> {
        let mut offset = self.root;
        for level in (0..=self.height).rev() {
            let node = &words[offset as usize / size_of::<u64>()..][..WORDS];
            let keys = &node[1..][..node[0].load(Relaxed) as usize];
            let at = keys.partition_point(|word| word.load(Relaxed) <= key).checked_sub(1)?;
            offset = node[VALUES + at].load(Relaxed);
            if level == 0 {
                return (keys[at].load(Relaxed) == key).then_some(offset);
            }
        }
        None
    }
}

/// Binds the calling thread to a CPU. A thread that stays unbound finds the same answers, by page
/// tables that may lie on another node.
fn pin(cpu: usize) {
    if cpu < libc::CPU_SETSIZE as usize {
        // SAFETY: zeros are a valid set, the CPU has a bit in it, and the call only reads the set.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(cpu, &mut set);
            libc::sched_setaffinity(0, size_of_val(&set), &set);
        }
    }
}

/// Looks random numbers up until `stop` is set. Returns how many, and how many answers were wrong.
fn search(tree: Tree, words: &[AtomicU64], keys: u64, seed: u64, stop: &AtomicBool) -> (u64, u64) {
    let (mut random, mut done, mut wrong) = (seed | 1, 0, 0);
    while !stop.load(Relaxed) {
        for _ in 0..256 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let wanted = random % (key(keys) + STEP);
            let is_key = wanted % STEP == 1 && wanted < key(keys);
            let right = is_key.then(|| value(wanted));
            wrong += u64::from(tree.find(words, wanted) != right);
        }
        done += 256;
    }
    (done, wrong)
}

/// Leaps between the pools for some time. Returns how often.
fn leap(region: &Region, pools: &[Pool; 2], time: Duration) -> Result<u64, Box<dyn Error>> {
    let (began, mut leaps) = (Instant::now(), 0);
    while began.elapsed() < time {
        let to = &pools[(leaps as usize + 1) % 2];
        let report = Migration::new().range(region, 0..region.len(), to).start()?.wait();
        if !report.ended.is_completed() {
            return Err(report.to_string().into());
        }
        leaps += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(leaps)
}

fn main() -> ExitCode {
    match run() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the number of wrong answers.
fn run() -> Result<u64, Box<dyn Error>> {
    let numbers: Vec<u64> =
        std::env::args().skip(1).map(|number| number.parse()).collect::<Result<_, _>>()?;
    let keys = numbers.first().copied().unwrap_or(2_000_000).max(1);
    let time = Duration::from_secs(numbers.get(1).copied().unwrap_or(2));

    let topology = Topology::read()?;
    let allowed = topology.allowed_cpus();
    // A CPU, and the node whose view its thread uses.
    let mut threads: Vec<(usize, NodeId)> = Vec::new();
    for node in topology.nodes() {
        let cpus = node.cpus.iter().filter(|cpu| allowed.contains(cpu));
        if node.total_bytes > 0 && topology.is_allowed(node.id) {
            threads.extend(cpus.map(|cpu| (*cpu, node.id)));
        }
    }
    let mut nodes: Vec<NodeId> = threads.iter().map(|(_, node)| *node).collect();
    nodes.dedup();
    let (Some(first), Some(last)) = (nodes.first(), nodes.last()) else {
        return Err("no node has both memory and CPUs that this process may use".into());
    };

    let bytes = levels(keys).iter().sum::<u64>() * BASE_PAGE as u64;
    let pool = |node: NodeId| Pool::builder(node, bytes).page_size(PageSize::Base).build();
    let pools = [pool(*first)?, pool(*last)?];
    let region = Region::new(&pools[0], bytes as usize)?;
    let tree = bulk_load(region.atomics_u64(0..region.len())?, keys);
    region.replicate(nodes.iter().copied())?;
    println!(
        "tree      {keys} keys, {:.1} MiB, {} levels",
        bytes as f64 / 1048576.0,
        1 + tree.height
    );
    for view in region.views() {
        println!("view      for {}: {}", view.node(), view.page_tables());
    }

    let (stop, began) = (AtomicBool::new(false), Instant::now());
    let (leaps, answers) = std::thread::scope(|scope| {
        let searches: Vec<_> = threads
            .iter()
            .map(|(cpu, node)| {
                let (view, stop) = (region.view(*node).expect("it was made"), &stop);
                scope.spawn(move || {
                    pin(*cpu);
                    let words = view.atomics_u64(0..view.len())?;
                    let seed = (*cpu as u64 + 1).wrapping_mul(0x2545_f491_4f6c_dd1d);
                    Ok::<_, pageleap::Error>(search(tree, words, keys, seed, stop))
                })
            })
            .collect();
        let leaps = leap(&region, &pools, time);
        stop.store(true, Relaxed);
        let join = |search: std::thread::ScopedJoinHandle<'_, _>| search.join().expect("no panic");
        (leaps, searches.into_iter().map(join).collect::<Result<Vec<_>, _>>())
    });
    let (leaps, answers, seconds) = (leaps?, answers?, began.elapsed().as_secs_f64());
    let looked_up: u64 = answers.iter().map(|(done, _)| done).sum();
    let wrong: u64 = answers.iter().map(|(_, wrong)| wrong).sum();
    println!("leaps     {leaps}, {first} <-> {last}");
    println!(
        "look-ups  {looked_up} by {} threads, {:.0} thousand/s",
        threads.len(),
        looked_up as f64 / 1e3 / seconds
    );
    match wrong {
        0 => println!("answers   all right"),
        wrong => println!("answers   {wrong} WRONG"),
    }
    Ok(wrong)
}
