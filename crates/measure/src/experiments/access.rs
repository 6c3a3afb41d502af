//! Local and remote access by one thread (Figure 1 of the paper): a thread on a CPU of one node
//! reads and writes memory of that node, and of another one, in order and at random.
//!
//! On a machine with one node all memory is local. There the page sizes are compared with each
//! other: a thread that accesses pages of 4 KB at random misses the TLB.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use pageleap::{NodeId, PageSize};

use super::drawing::{Drawing, Of, Over};
use super::{About, Case, Label, Outcome, PAGE, Scene, label, time};
use crate::Error;
use crate::experiments::memory::private;
use crate::matrix::on_cpu;
use crate::private::PrivateMemory;
use crate::random::SplitMix64;

/// The experiment.
pub const ABOUT: About = About {
    name: "access",
    title: "Access to local and remote memory by one thread",
    figure: "Taking the Leap, Figure 1",
    needs: "1 GB of each page size on each node; a second node for remote memory",
    takes: "5 min",
    labels: &[label("pattern", "pattern", "each word in order, or words at random"), PAGE, PLACE],
    metrics: &[time("time", "time", "")],
    plots: &PLOTS,
};

const PLOTS: [Drawing; 1] = [Drawing {
    title: "Time of the accesses",
    about: "Lower is better. Each dot is a round.",
    over: Over::Rows,
    of: Of::Metric("time"),
    split: &["pattern"],
    theirs: &[],
}];

const PLACE: Label = label("memory", "memory", "on the node of the thread, or on the other one");

/// The most accesses at random, as in the paper.
const MOST_RANDOM: usize = 10_000_000;

/// How the words are accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pattern {
    ReadInOrder,
    WriteInOrder,
    ReadAtRandom,
    WriteAtRandom,
}

impl Pattern {
    const ALL: [Pattern; 4] = [
        Pattern::ReadInOrder,
        Pattern::WriteInOrder,
        Pattern::ReadAtRandom,
        Pattern::WriteAtRandom,
    ];

    fn name(self) -> &'static str {
        match self {
            Pattern::ReadInOrder => "read in order",
            Pattern::WriteInOrder => "write in order",
            Pattern::ReadAtRandom => "read at random",
            Pattern::WriteAtRandom => "write at random",
        }
    }
}

/// The setting of the experiment.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Bytes of each memory: whole pages of all sizes.
    pub bytes: u64,
    /// The page sizes, each once.
    pub pages: Vec<PageSize>,
    /// The other node, if there is one.
    pub remote: Option<NodeId>,
    /// The node of the thread.
    pub local: NodeId,
    /// A CPU of that node.
    pub cpu: usize,
    /// Of the contents, and of random accesses.
    pub seed: u64,
}

impl Setting {
    /// Accesses at random in one measurement.
    pub fn random_accesses(&self) -> usize {
        MOST_RANDOM.min(self.bytes as usize / 64)
    }
}

/// Memory of all sizes on both nodes.
pub struct Access {
    setting: Setting,
    memories: Vec<PrivateMemory>,
    /// For each case its pattern, and the index of its memory.
    work: Vec<(Pattern, usize)>,
    cases: Vec<Case>,
    left_out: Vec<String>,
}

impl Access {
    /// Takes the memory and fills it. Page sizes of which the machine has too little memory are
    /// left out.
    ///
    /// # Errors
    /// Those of `go_on`, which is asked between long steps; and if there is too little memory for
    /// 4 KB pages.
    pub fn new<E: From<Error>>(
        setting: Setting,
        go_on: impl Fn() -> Result<(), E>,
    ) -> Result<Access, E> {
        let mut access = Access {
            memories: Vec::new(),
            work: Vec::new(),
            cases: Vec::new(),
            left_out: Vec::new(),
            setting,
        };
        let mut taken: Vec<(PageSize, bool)> = Vec::new();
        let nodes = [(false, Some(access.setting.local)), (true, access.setting.remote)];
        for page in access.setting.pages.clone() {
            for (is_remote, node) in nodes {
                let Some(node) = node else { continue };
                go_on()?;
                match private(access.setting.bytes, page, node, access.setting.seed) {
                    Ok(memory) => {
                        access.memories.push(memory);
                        taken.push((page, is_remote));
                    }
                    Err(error) if page != PageSize::Base => {
                        access.left_out.push(format!("pages of {page} on {node}: {error}"));
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        }
        for pattern in Pattern::ALL {
            let first = access.cases.len();
            for (at, (page, is_remote)) in taken.iter().enumerate() {
                // Remote memory is compared with local memory of the same pages, and local memory
                // of large pages with that of 4 KB pages.
                let base = match is_remote {
                    true => (*page, false),
                    false => (PageSize::Base, false),
                };
                let bases = taken.iter().position(|other| *other == base);
                let place = if *is_remote { "remote" } else { "local" };
                let labels = vec![pattern.name().into(), page.to_string().into(), place.into()];
                let bases = bases.into_iter().map(|base| first + base).collect();
                access.cases.push(Case { labels, bases, at_rest: Vec::new() });
                access.work.push((pattern, at));
            }
        }
        Ok(access)
    }
}

impl Scene for Access {
    fn cases(&self) -> &[Case] {
        &self.cases
    }

    fn left_out(&self) -> &[String] {
        &self.left_out
    }

    fn measure(&mut self, case: usize, _: &dyn Fn() -> bool) -> Result<Option<Outcome>, Error> {
        let (pattern, memory) = self.work[case];
        let words = self.memories[memory].words();
        let (accesses, seed) = (self.setting.random_accesses(), self.setting.seed);
        let ns = on_cpu(self.setting.cpu, || access(words, pattern, accesses, seed))?;
        Ok(Some(Outcome { numbers: vec![ns as f64], lost: 0 }))
    }
}

/// Time to access the words.
fn access(words: &[AtomicU64], pattern: Pattern, accesses: usize, seed: u64) -> u64 {
    use Ordering::Relaxed;
    let mut random = SplitMix64(seed);
    let start = Instant::now();
    match pattern {
        Pattern::ReadInOrder => {
            let sum = words.iter().fold(0, |sum, word| word.load(Relaxed).wrapping_add(sum));
            black_box(sum);
        }
        Pattern::WriteInOrder => words.iter().zip(seed..).for_each(|(word, of)| {
            word.store(of, Relaxed);
        }),
        Pattern::ReadAtRandom => {
            let mut sum = 0_u64;
            for _ in 0..accesses {
                sum = sum.wrapping_add(words[random.below(words.len())].load(Relaxed));
            }
            black_box(sum);
        }
        Pattern::WriteAtRandom => {
            for of in 0..accesses as u64 {
                words[random.below(words.len())].store(of, Relaxed);
            }
        }
    }
    start.elapsed().as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use pageleap::topology::Topology;

    use super::*;

    fn setting(remote: Option<NodeId>) -> Setting {
        let topology = Topology::read().unwrap();
        let local = topology.nodes().iter().find(|node| node.total_bytes > 0).unwrap().id;
        let pages = vec![PageSize::Base, PageSize::Thp];
        let cpu = topology.allowed_cpus()[0];
        Setting { bytes: 4 << 20, pages, remote, local, cpu, seed: 3 }
    }

    #[test]
    fn large_pages_are_compared_with_small_ones_and_remote_with_local() {
        let one = Access::new(setting(None), || Ok::<_, Error>(())).unwrap();
        let pages = one.memories.len();
        assert_eq!(one.cases.len(), 4 * pages);
        for case in &one.cases {
            let base = &one.cases[case.bases[0]];
            assert_eq!(case.labels[0], base.labels[0]);
            assert_eq!(base.labels[1..], ["4k".into(), "local".into()]);
        }
        // The same node a second time, as if it was another one.
        let local = setting(None).local;
        let two = Access::new(setting(Some(local)), || Ok::<_, Error>(())).unwrap();
        assert_eq!(two.cases.len(), 8 * pages);
        let remote: Vec<&Case> =
            two.cases.iter().filter(|case| case.labels[2] == "remote".into()).collect();
        assert_eq!(remote.len(), 4 * pages);
        for case in remote {
            let base = &two.cases[case.bases[0]];
            assert_eq!(base.labels[..2], case.labels[..2]);
            assert_eq!(base.labels[2], "local".into());
        }
    }

    #[test]
    fn patterns_access_the_words() {
        let mut access = Access::new(setting(None), || Ok::<_, Error>(())).unwrap();
        for case in 0..access.cases.len() {
            let (pattern, memory) = access.work[case];
            let sum = |access: &Access| {
                let words = access.memories[memory].words().iter();
                words.fold(0u64, |sum, word| sum.wrapping_add(word.load(Ordering::Relaxed)))
            };
            let before = sum(&access);
            let outcome = access.measure(case, &|| false).unwrap().unwrap();
            assert!(outcome.numbers[0] > 0.0);
            let writes = matches!(pattern, Pattern::WriteInOrder | Pattern::WriteAtRandom);
            assert_eq!(sum(&access) != before, writes, "{pattern:?}");
        }
    }
}
