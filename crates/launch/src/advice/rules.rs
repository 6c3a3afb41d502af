//! The rules, one for each topic. Figures without a document are the paper's.

use pageleap::NodeId;
use pageleap::topology::id_list;

use super::facts::{Balancing, Facts, HugePageSetting};
use super::{Advice, Pattern, Topic, Verdict, Workload};
use crate::allocators::Allocator;

/// Distances up to this one count as near: in the paper's machine B remote memory takes 1.1 times
/// as long as local memory, and there the gains were small.
const NEAR: u32 = 12;

/// Sections 4.3.1 and 4.6: off.
pub fn balancing(facts: &Facts) -> Advice {
    const SOURCE: &str =
        "paper, sections 3.4.2, 4.3.1, 4.5 and 4.6; docs/run.md, Automatic balancing";
    let advice = |verdict, summary: &str| Advice::new(Topic::Balancing, verdict, summary);
    if let Some(why) = one_node(facts) {
        let summary = "automatic balancing has no other node to move pages to";
        return advice(Verdict::MeansNothingHere, summary).because(SOURCE, why);
    }
    let is_off = match facts.balancing {
        Balancing::Off => Some("kernel.numa_balancing has balancing among nodes off"),
        Balancing::NotBuilt => Some("this kernel has none (CONFIG_NUMA_BALANCING)"),
        Balancing::On | Balancing::Unknown => None,
    };
    if let Some(why) = is_off {
        let summary = "the kernel does not move pages on its own";
        return advice(Verdict::AsYouAre, summary).because(SOURCE, why);
    }
    let is_unknown = facts.balancing == Balancing::Unknown;
    let condition = is_unknown.then_some("if kernel.numa_balancing is not 0 there");
    let why = "With balancing the paper's queries were slower under every policy but Preferred, which \
               fills one node first. First touch with balancing, the default, took 86 % longer \
               than interleaving without it (W1, machine A): pages that several threads share are \
               moved again and again, and the cost of moving is not weighed. TPC-H queries of MonetDB \
               took 2 to 43 % less without balancing and huge pages, 14.5 % on average; those of \
               PostgreSQL 3 % on average, but five took longer.";
    let advice = advice(Verdict::Do, "switch automatic balancing off").given(condition);
    if facts.can_set_policy == Some(false) {
        let mut advice = advice.because(SOURCE, why).costs(
            "Root of the host has to type it, and no program of the machine has its pages moved \
             after its threads any more. A filter refuses set_mempolicy here, by which one program \
             could be left out.",
        );
        advice.line = Some("sysctl -w kernel.numa_balancing=0".to_owned());
        return advice;
    }
    advice
        .options(&["--balancing off"])
        .because(SOURCE, why)
        .costs(format!(
            "Pages do not follow threads that the scheduler moves to another node; so place the \
             threads, too. It needs no root, and affects this program only. {}",
            system_wide(facts, "--balancing off")
        ))
        .differs(
            "The paper needed root for it, and says that interleaving largely nullifies balancing \
             without root. Linux balances no pages of an explicit policy, so interleaving, or -l, is \
             all that --balancing off sets.",
        )
}

/// Sections 4.3.2 and 4.6: off, because access is random and allocators have no support.
pub fn huge_pages(facts: &Facts, workload: &Workload) -> Advice {
    const SOURCE: &str = "paper, sections 3.4.1, 4.3.2 and 4.6; docs/figures.md, `auto` and Random \
                          reads with huge pages; docs/run.md, Huge pages";
    let advice = |verdict, summary: &str| Advice::new(Topic::HugePages, verdict, summary);
    let is_sequential = workload.pattern == Some(Pattern::Sequential);
    match (facts.huge_pages, is_sequential) {
        (HugePageSetting::NotBuilt, _) => {
            advice(Verdict::MeansNothingHere, "this kernel has no transparent huge pages")
                .because(SOURCE, "/sys/kernel/mm/transparent_hugepage is not there.")
        }
        (HugePageSetting::Never, false) => {
            let why = "/sys/kernel/mm/transparent_hugepage/enabled is never, as the paper advises.";
            advice(Verdict::AsYouAre, "there are no huge pages").because(SOURCE, why).differs(measured("pageleap run --system --thp on COMMAND (root)"))
        }
        (HugePageSetting::Never, true) => {
            let mut advice = advice(Verdict::Do, "try huge pages")
                .because(SOURCE, SEQUENTIAL)
                .costs("Root has to type it, and all programs get huge pages until this one ends.");
            advice.line = Some("pageleap run --system --thp on COMMAND".to_owned());
            advice
        }
        (HugePageSetting::Madvise, false) => {
            advice(Verdict::AsYouAre, "only memory that asks for huge pages gets them")
                .because(
                    SOURCE,
                    "/sys/kernel/mm/transparent_hugepage/enabled is madvise. glibc's malloc and \
                     jemalloc ask only if a variable tells them to. --thp off would also refuse the \
                     parts of a program that ask on purpose.",
                )
                .differs(measured("--thp on"))
        }
        (HugePageSetting::Madvise, true) => advice(Verdict::Do, "have the allocator ask for huge pages")
            .options(&["--thp on"])
            .because(SOURCE, SEQUENTIAL)
            .costs(
                "glibc 2.35 and jemalloc 5 are told by GLIBC_TUNABLES and MALLOC_CONF; other \
                 allocators are not. Huge pages take more memory where few bytes of them are used.",
            ),
        (HugePageSetting::Always | HugePageSetting::Unknown, true) => {
            advice(Verdict::DoNot, "do not switch huge pages off").because(SOURCE, SEQUENTIAL)
        }
        (setting, false) => {
            let is_unknown = setting == HugePageSetting::Unknown;
            let random = workload.pattern == Some(Pattern::Random);
            let condition = match (is_unknown, random) {
                (true, true) => Some("if huge pages are always on there"),
                (true, false) => {
                    Some("if huge pages are always on there, and memory is not used in sequence")
                }
                (false, false) => Some("if memory is not used in sequence"),
                (false, true) => None,
            };
            advice(Verdict::Do, "switch transparent huge pages off, and measure with them, too")
                .given(condition)
                .options(&["--thp off"])
                .because(
                    SOURCE,
                    "In the paper they ranged from harmful, in most cases, to negligible. It gives \
                     two reasons: random access, and allocators that did not handle them well \
                     (tcmalloc of gperftools 2.7, jemalloc 5.1.0, tbbmalloc 2019 update 4).",
                )
                .costs(format!(
                    "More TLB misses and larger page tables. A leap at rest takes 1.26 times as long \
                     as a memcpy, and 1.12 times with huge pages. {}",
                    system_wide(facts, "--thp off")
                ))
                .differs(measured("without --thp off"))
        }
    }
}

/// Measurements of this project, which differ from the paper's. So the user should measure the
/// program with huge pages, too, in the way `by`.
fn measured(by: &str) -> String {
    format!(
        "Random reads of 1 GiB that the program had written before took 13 ns each with huge pages \
         here, and 23 ns without, so random access alone is no reason against them. The paper's \
         machines A and B have 8 and 32 entries for huge pages in their TLBs. Its glibc is 2.27 at \
         most; since 2.35 malloc can ask for huge pages. So measure your program with them, too: {by}."
    )
}

const SEQUENTIAL: &str = "The paper's reason against huge pages is random access; memory that is used \
                          in sequence has fewer TLB misses with them. Support in the allocator \
                          decides, so measure both.";

/// Sections 3.3, 4.3.1 and 6: interleaved, unless each thread uses its own memory.
pub fn policy(facts: &Facts, workload: &Workload) -> Advice {
    const SOURCE: &str = "paper, sections 3.3, 4.3.1, 4.3.3 and 6";
    let advice = |verdict, summary: &str| Advice::new(Topic::Policy, verdict, summary);
    if let Some(why) = one_node(facts) {
        let summary = "all memory comes from one node under every policy";
        return advice(Verdict::MeansNothingHere, summary).because(SOURCE, why);
    }
    if facts.can_set_policy == Some(false) {
        let mut advice = advice(Verdict::Do, "allow memory policies in this container first")
            .because(
                "docs/run.md, What the kernel drops or refuses",
                "A seccomp filter refuses set_mempolicy. Docker's default profile does so without \
                 CAP_SYS_NICE.",
            )
            .costs(
                "The capability also lets the container raise priorities and move pages of others.",
            );
        advice.line = Some("docker run --cap-add SYS_NICE IMAGE".to_owned());
        return advice;
    }
    if workload.shares() == Some(false) {
        return advice(
            Verdict::Do,
            "take memory from the node of the thread that touches it first",
        )
        .options(&["-l"])
        .because(
            SOURCE,
            "Each thread uses its own memory. As a rule of thumb data should be on the node of \
                 the thread that processes it (section 3.3).",
        )
        .costs(
            "Memory that one thread fills for all is on that thread's node. Place the threads, so \
                 that they stay where their memory is.",
        );
    }
    interleaved(facts, workload, SOURCE)
}

fn interleaved(facts: &Facts, workload: &Workload, source: &'static str) -> Advice {
    let condition = workload.shares_data.is_none().then_some(
        "if threads of several nodes use the same memory; if each uses its own, -l instead",
    );
    let (fast, has_slower) = facts.fastest();
    let (options, nodes, differs) = match (has_slower, facts.has_weights) {
        (false, _) => ("-i all".to_owned(), facts.memory.len(), None),
        (true, Some(true)) => ("-w all".to_owned(), facts.memory.len(), Some(weighted(facts))),
        (true, _) if fast.len() > 1 => {
            let nodes = id_list(fast.iter().map(|NodeId(id)| *id as usize));
            let why = "The paper's nodes are all equally fast. Here some are slower, and interleaving \
                       over all would wait for them; weights (-w) need Linux 6.9.";
            (format!("-i {nodes}"), fast.len(), Some(why.to_owned()))
        }
        (true, _) => {
            let why = "One node is faster than all others. First touch takes it while it has memory; \
                       weights (-w) need Linux 6.9.";
            return Advice::new(Topic::Policy, Verdict::AsYouAre, "the fast node is filled first")
                .because(source, why)
                .differs("The paper's nodes are all equally fast.");
        }
    };
    let mut costs = match options.as_str() {
        "-w all" => "Most accesses are to other nodes".to_owned(),
        _ => format!(
            "Of {nodes} nodes, 1 - 1/{nodes} = {:.0} % of the accesses are remote",
            100.0 * (1.0 - 1.0 / nodes as f64)
        ),
    };
    costs +=
        ", if threads are on all nodes (section 4.3.1: 17 % local on 8 nodes). No root is needed.";
    if facts.nodes_with_cpus == 1 {
        costs += " Here only one node has CPUs that may be used, so its own share is local.";
    }
    let advice = Advice::new(Topic::Policy, Verdict::Do, "interleave memory over the nodes")
        .given(condition)
        .options(&[&options])
        .because(source, why_interleave(facts))
        .costs(costs);
    match differs {
        Some(differs) => advice.differs(differs),
        None => advice,
    }
}

fn why_interleave(facts: &Facts) -> String {
    let mut why = "Interleaving was generally the fastest policy (section 6): all memory controllers \
                   work, and none is congested. With balancing and huge pages off, too, run times fell by up \
                   to 46 % on machine A, 21 % on C and around 7 % on B, whose remote memory takes \
                   only 1.1 times as long as local memory. Without balancing, policies differ less \
                   (section 4.6)."
        .to_owned();
    if let Some((near, far)) = facts.distances {
        why += &format!(" Distances here are {near} to {far}, and 10 is local");
        why += match far <= NEAR {
            true => ": expect little, as on machine B.",
            false => ".",
        };
    }
    why
}

/// The reason for weights, with the nodes' bandwidths and weights as far as they are known.
fn weighted(facts: &Facts) -> String {
    let shown = |value: fn(&super::Speed) -> Option<u64>, unit: &str| {
        let known = facts.memory.iter().map(|node| Some((node.node.0, value(node)?)));
        let all: Option<Vec<(u32, u64)>> = known.collect();
        all.map(|all| {
            let each = all.iter().map(|(node, value)| format!("node {node} {value}{unit}"));
            each.collect::<Vec<_>>().join(", ")
        })
    };
    let mut text =
        "The paper's nodes are all equally fast. Here some are slower, so they get fewer \
                    pages by the kernel's weights (Linux 6.9)."
            .to_owned();
    if let Some(speeds) = shown(|node| node.mb_per_s, " MB/s") {
        text += &format!(" Bandwidths by the firmware: {speeds}.");
    }
    match shown(|node| node.weight, "") {
        Some(weights) => text += &format!(" Weights: {weights}."),
        None => text += " The weights are in /sys/kernel/mm/mempolicy/weighted_interleave.",
    }
    let weights: Vec<u64> = facts.memory.iter().filter_map(|node| node.weight).collect();
    if weights.len() > 1 && weights.windows(2).all(|two| two[0] == two[1]) {
        text +=
            " Equal weights are plain interleaving: root writes the ratio of the bandwidths there.";
    }
    text
}

/// Section 3.2: pinned, and sparse where CPUs are left.
pub fn placement(facts: &Facts, workload: &Workload) -> Advice {
    const SOURCE: &str =
        "paper, section 3.2; docs/adr/0033-threads-are-placed-by-a-preloaded-library.md";
    let advice = |verdict, summary: &str| Advice::new(Topic::Placement, verdict, summary);
    let cpus = facts.cpus;
    if cpus < 2 {
        let summary = "all threads run on one CPU anyway";
        return advice(Verdict::MeansNothingHere, summary)
            .because(SOURCE, format!("CPUs that may be used: {cpus}."));
    }
    match workload.threads {
        Some(1) => {
            let why = "A program's main thread is left free. `pageleap run --home auto` keeps it on \
                       one node, and -C on one CPU.";
            return advice(Verdict::MeansNothingHere, "one thread cannot be spread")
                .because(SOURCE, why);
        }
        Some(threads) if threads > cpus => {
            let why = format!(
                "{threads} threads share {cpus} CPUs. The paper pinned at most one thread to each. \
                 Threads that are pinned cannot go to a CPU that falls idle."
            );
            return advice(Verdict::DoNot, "leave threads to the scheduler").because(SOURCE, why);
        }
        _ => {}
    }
    let pinned = "The kernel moves threads: 33,196 times in a run of W1 with 16 threads, 16 times when \
                  they were pinned, with 33 % fewer cache misses. The times of ten runs without pins \
                  varied widely, and with pins W1 was around 27 % faster than the fastest of them \
                  (machine A).";
    let order = match (facts.nodes_with_cpus, workload.threads) {
        (..=1, _) => {
            "Sparse and dense mean the same here, because one node has all the CPUs: each thread gets \
             a core, and sibling hyper-threads come last."
                .to_owned()
        }
        (nodes, Some(threads)) if threads < cpus => format!(
            "{threads} threads leave CPUs free, so sparse gives them the memory controllers of all \
             {nodes} nodes, and was faster."
        ),
        (_, Some(_)) => "All CPUs are in use, so sparse and dense are almost the same.".to_owned(),
        (nodes, None) => format!(
            "With fewer threads than the {cpus} CPUs, sparse was faster, because threads have the \
             memory controllers of all {nodes} nodes; with as many, both are almost the same."
        ),
    };
    let siblings = match facts.cores < cpus {
        true => format!(" The {cpus} CPUs are {} cores; siblings come last.", facts.cores),
        false => String::new(),
    };
    advice(Verdict::Do, "pin each thread to a CPU")
        .given(workload.threads.is_none().then(|| format!("if at most {cpus} threads work at a time")))
        .options(&["--place sparse"])
        .because(SOURCE, format!("{pinned} {order}{siblings}"))
        .costs(
            "A thread waits for its CPU while another program uses that, and two programs both begin \
             with the first CPU. Creating a thread takes 1 to 2 us longer. The main thread stays free.",
        )
}

/// Sections 3.1.8, 4.4 and 4.6: another one, if threads allocate at the same time.
pub fn allocator(facts: &Facts, workload: &Workload) -> Advice {
    const SOURCE: &str =
        "paper, sections 3.1.8, 4.4.1, 4.4.3, 4.5 and 4.6; docs/figures.md, Allocators";
    let advice = |verdict, summary: &str| Advice::new(Topic::Allocator, verdict, summary);
    if workload.allocates() == Some(false) {
        let why = match workload.threads {
            Some(1) => "One thread waits for no other in malloc.",
            _ => {
                "The question is whether threads often allocate at the same time (section 4.6). A \
                 distributive aggregation (W2), which allocates little, gained little."
            }
        };
        return advice(Verdict::DoNot, "keep the allocator").because(SOURCE, why);
    }
    let condition = workload
        .allocates_often
        .is_none()
        .then_some("if several threads often allocate memory at the same time");
    let has = |one: Allocator| facts.allocators.as_ref().is_none_or(|all| all.contains(&one));
    let found = [Allocator::Tbbmalloc, Allocator::Jemalloc].into_iter().find(|one| has(*one));
    let advice = advice(Verdict::Do, "replace the allocator").given(condition);
    let mut advice = match found {
        Some(one) => advice.options(&[&format!("--alloc {one}")]),
        None => advice,
    };
    let mut why = "With tbbmalloc and interleaving, W1 (a holistic aggregation) took up to 62, 83 and \
                   72 % less time than with ptmalloc on machines A, B and C, and W3 (a hash join) 70, \
                   94 and 92 %. jemalloc was best for W4 (a join by an index). Queries 5 and 18 of \
                   TPC-H on MonetDB took up to 12 and 20 % less with tbbmalloc. Code that allocates \
                   little (W2) gained little."
        .to_owned();
    match (&facts.allocators, found) {
        (None, _) => why += " Whether it is installed there is not known.",
        (_, Some(Allocator::Jemalloc)) => why += &format!(" {}.", Allocator::Tbbmalloc.missing()),
        (_, Some(_)) => {}
        (_, None) => {
            let packages = [Allocator::Tbbmalloc, Allocator::Jemalloc];
            let names: Vec<&str> = packages.iter().filter_map(|one| one.package()).collect();
            advice.line = Some(format!("apt-get install {}", names.join(" ")));
            why += " Neither is installed; these are the packages of Debian 12. Then ask again.";
        }
    }
    advice
        .because(SOURCE, why)
        .costs(
            "tbbmalloc takes slightly more memory than the others (section 3.1.8). Programs that are \
             linked statically cannot be given another allocator.",
        )
        .differs(DIFFERS_OF_ALLOCATORS)
}

const DIFFERS_OF_ALLOCATORS: &str = "Here glibc 2.36 took 1.23 bytes for each byte asked for, tbbmalloc 1.37, and jemalloc, tcmalloc \
     and mimalloc 1.03 to 1.09, so these take less memory than what they replace. The glibc of the \
     paper's machine C (2.24) had no caches of threads yet; they came with 2.26. `pageleap bench \
     allocators` compares them on your CPUs.";

/// Why nothing can be said about several nodes, if that is so.
fn one_node(facts: &Facts) -> Option<String> {
    match (facts.memory.len(), facts.nodes_with_memory) {
        (2.., _) => None,
        (_, ..=1) => Some("This machine has one node with memory.".to_owned()),
        (_, all) => Some(format!(
            "Of {all} nodes with memory this process may use one; its cpuset decides that."
        )),
    }
}

/// The same for the whole machine, for whom that is possible.
fn system_wide(facts: &Facts, option: &str) -> String {
    let you = match facts.is_root {
        Some(true) => ", as you are",
        Some(false) => ", and you are not",
        None => "",
    };
    format!(
        "For the whole machine: `pageleap run --system {option} COMMAND`, which also affects all other \
         programs until this one ends, and needs root{you}."
    )
}
