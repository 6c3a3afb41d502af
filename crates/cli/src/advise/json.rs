//! The advice as one JSON object.

use pageleap::topology::escaped;
use pageleap_launch::advice::{Advice, Balancing, HugePageSetting, PAPER, Pattern};
use serde::Serialize;

use super::{Advised, RUNNING};

/// The object of `--json`.
#[derive(Serialize)]
pub struct Object<'a> {
    /// The paper whose sections the sources name.
    paper: &'a str,
    machine: Machine,
    program: Program,
    /// One piece of advice for each topic.
    advice: Vec<One<'a>>,
    /// All advice in one command; null if there is nothing to set.
    command: Option<&'a str>,
    /// A sentence on programs that run already.
    running: &'a str,
    /// Sentences about facts that are left out, because their file is damaged or cannot be read.
    warnings: &'a [String],
}

/// The facts on which the advice depends. A fact that is not known is null.
#[derive(Serialize)]
struct Machine {
    kernel: Option<String>,
    /// Nodes from which memory may be taken.
    memory_nodes: Vec<Node>,
    /// Nodes with memory, whether they may be used or not.
    nodes_with_memory: usize,
    /// Nodes with CPUs that may be used.
    nodes_with_cpus: usize,
    /// The smallest and the largest distance between CPUs and memory of different nodes; 10 is local.
    distances: Option<[u32; 2]>,
    cpus: usize,
    cores: usize,
    /// `on`, `off` or `none`.
    balancing: Option<&'static str>,
    /// `always`, `madvise`, `never` or `none`.
    huge_pages: Option<&'static str>,
    /// Allocators that are installed.
    allocators: Option<Vec<&'static str>>,
    /// Whether memory policies may be set.
    can_set_policy: Option<bool>,
    is_root: Option<bool>,
    /// Whether the kernel interleaves by weights (Linux 6.9).
    has_weights: Option<bool>,
}

#[derive(Serialize)]
struct Node {
    id: u32,
    /// Smaller is faster.
    tier: Option<u32>,
    /// By the firmware.
    read_bandwidth_mb_per_s: Option<u64>,
    /// For weighted interleaving.
    weight: Option<u64>,
}

/// The traits of the program, as the user knows them. A trait that is not known is null.
#[derive(Serialize)]
struct Program {
    threads: Option<usize>,
    allocates_often: Option<bool>,
    shares_data: Option<bool>,
    /// `random` or `sequential`.
    access: Option<&'static str>,
}

#[derive(Serialize)]
struct One<'a> {
    /// `balancing`, `huge-pages`, `policy`, `placement` or `allocator`.
    topic: &'a str,
    /// `do`, `do not`, `as you are` or `means nothing here`.
    verdict: &'a str,
    summary: &'a str,
    /// When it holds; null if that is known.
    condition: Option<&'a str>,
    /// The line to type, with words in capitals to fill in.
    line: Option<&'a str>,
    /// Options of `pageleap run` that do it.
    options: &'a [String],
    why: &'a str,
    source: &'a str,
    costs: Option<&'a str>,
    /// Where measurements of pageleap, or newer kernels and libraries, differ from the paper.
    differs: Option<&'a str>,
}

impl<'a> Object<'a> {
    pub fn of(advised: &'a Advised) -> Object<'a> {
        let workload = &advised.workload;
        Object {
            paper: PAPER,
            machine: Machine::of(advised),
            program: Program {
                threads: workload.threads,
                allocates_often: workload.allocates_often,
                shares_data: workload.shares_data,
                access: workload.pattern.map(|pattern| match pattern {
                    Pattern::Random => "random",
                    Pattern::Sequential => "sequential",
                }),
            },
            advice: advised.advice.iter().map(One::of).collect(),
            command: advised.command.as_deref(),
            running: RUNNING,
            warnings: &advised.warnings,
        }
    }
}

impl Machine {
    fn of(advised: &Advised) -> Machine {
        let facts = &advised.facts;
        let node = |node: &pageleap_launch::advice::Speed| Node {
            id: node.node.0,
            tier: node.tier,
            read_bandwidth_mb_per_s: node.mb_per_s,
            weight: node.weight,
        };
        Machine {
            kernel: facts.kernel.as_deref().map(escaped),
            memory_nodes: facts.memory.iter().map(node).collect(),
            nodes_with_memory: facts.nodes_with_memory,
            nodes_with_cpus: facts.nodes_with_cpus,
            distances: facts.distances.map(|(near, far)| [near, far]),
            cpus: facts.cpus,
            cores: facts.cores,
            balancing: balancing(facts.balancing),
            huge_pages: huge_pages(facts.huge_pages),
            allocators: (facts.allocators.as_ref())
                .map(|all| all.iter().map(|allocator| allocator.name()).collect()),
            can_set_policy: facts.can_set_policy,
            is_root: facts.is_root,
            has_weights: facts.has_weights,
        }
    }
}

impl<'a> One<'a> {
    fn of(advice: &'a Advice) -> One<'a> {
        One {
            topic: advice.topic.name(),
            verdict: advice.verdict.text(),
            summary: &advice.summary,
            condition: advice.condition.as_deref(),
            line: advice.line.as_deref(),
            options: &advice.options,
            why: &advice.why,
            source: advice.source,
            costs: advice.costs.as_deref(),
            differs: advice.differs.as_deref(),
        }
    }
}

/// The setting in a word; `None` if it is not known.
pub fn balancing(setting: Balancing) -> Option<&'static str> {
    match setting {
        Balancing::On => Some("on"),
        Balancing::Off => Some("off"),
        Balancing::NotBuilt => Some("none"),
        Balancing::Unknown => None,
    }
}

/// The setting in a word; `None` if it is not known.
pub fn huge_pages(setting: HugePageSetting) -> Option<&'static str> {
    match setting {
        HugePageSetting::Always => Some("always"),
        HugePageSetting::Madvise => Some("madvise"),
        HugePageSetting::Never => Some("never"),
        HugePageSetting::NotBuilt => Some("none"),
        HugePageSetting::Unknown => None,
    }
}
