use pageleap::NodeId;

use super::*;
use crate::allocators::Allocator;

/// A machine like the paper's C: four nodes, all equally fast.
fn four() -> Facts {
    Facts {
        memory: (0..4).map(|node| speed(node, Some(4), None)).collect(),
        nodes_with_memory: 4,
        nodes_with_cpus: 4,
        distances: Some((21, 21)),
        cpus: 64,
        cores: 32,
        balancing: Balancing::On,
        huge_pages: HugePageSetting::Always,
        allocators: Some(Allocator::ALL.to_vec()),
        kernel: Some("6.12.1".into()),
        can_set_policy: Some(true),
        is_root: Some(false),
        has_weights: Some(true),
    }
}

fn one() -> Facts {
    let memory = vec![speed(0, Some(4), None)];
    Facts { memory, nodes_with_memory: 1, nodes_with_cpus: 1, distances: None, ..four() }
}

fn speed(node: u32, tier: Option<u32>, mb_per_s: Option<u64>) -> Speed {
    Speed { node: NodeId(node), tier, mb_per_s, weight: None }
}

const UNKNOWN: Workload =
    Workload { threads: None, allocates_often: None, shares_data: None, pattern: None };

fn of(topic: Topic, facts: &Facts, workload: &Workload) -> Advice {
    advise(facts, workload).into_iter().find(|one| one.topic == topic).unwrap()
}

/// Verdict and options.
fn short(topic: Topic, facts: &Facts, workload: &Workload) -> (Verdict, String) {
    let advice = of(topic, facts, workload);
    (advice.verdict, advice.options.join(" "))
}

fn is(verdict: Verdict, options: &str) -> (Verdict, String) {
    (verdict, options.to_owned())
}

#[test]
fn the_papers_machine_gets_the_papers_advice() {
    let advice = advise(&four(), &UNKNOWN);
    assert_eq!(
        combined(&advice).unwrap(),
        "pageleap run --balancing off --thp off -i all --place sparse --alloc tbbmalloc COMMAND"
    );
    // A trait that is not known stays a condition.
    let conditions = advice.iter().filter(|one| one.condition.is_some()).count();
    assert_eq!(conditions, 4, "{advice:?}");
    let known = Workload {
        threads: Some(64),
        allocates_often: Some(true),
        shares_data: Some(true),
        pattern: Some(Pattern::Random),
    };
    assert!(advise(&four(), &known).iter().all(|one| one.condition.is_none()));
}

#[test]
fn all_advice_has_a_reason_and_a_source_and_its_price() {
    let mut machines = vec![four(), one()];
    let all = [
        HugePageSetting::Always,
        HugePageSetting::Madvise,
        HugePageSetting::Never,
        HugePageSetting::NotBuilt,
        HugePageSetting::Unknown,
    ];
    machines.extend(all.map(|huge_pages| Facts { huge_pages, ..four() }));
    machines.push(Facts { can_set_policy: Some(false), ..four() });
    machines.push(Facts { allocators: Some(Vec::new()), ..four() });
    let patterns = [None, Some(Pattern::Random), Some(Pattern::Sequential)];
    for facts in &machines {
        for pattern in patterns {
            for threads in [None, Some(1), Some(8), Some(64), Some(65)] {
                let workload = Workload { threads, pattern, ..UNKNOWN };
                let advice = advise(facts, &workload);
                let topics: Vec<&str> = advice.iter().map(|one| one.topic.name()).collect();
                assert_eq!(topics, ["balancing", "huge-pages", "policy", "placement", "allocator"]);
                for one in advice {
                    assert!(!one.why.is_empty() && !one.source.is_empty(), "{one:?}");
                    assert!(!one.why.contains("  "), "{one:?}");
                    let is_do = one.verdict == Verdict::Do;
                    assert_eq!(is_do, one.line.is_some(), "{one:?}");
                    assert_eq!(is_do, one.costs.is_some(), "{one:?}");
                    assert!(is_do || one.options.is_empty(), "{one:?}");
                }
            }
        }
    }
}

#[test]
fn one_node_has_no_other() {
    for topic in [Topic::Balancing, Topic::Policy] {
        let advice = of(topic, &one(), &UNKNOWN);
        assert_eq!(advice.verdict, Verdict::MeansNothingHere);
        assert!(advice.why.contains("one node with memory"), "{}", advice.why);
        let confined = Facts { nodes_with_memory: 4, ..one() };
        let why = of(topic, &confined, &UNKNOWN).why;
        assert!(why.contains("Of 4 nodes") && why.contains("cpuset"), "{why}");
    }
    let placement = of(Topic::Placement, &one(), &UNKNOWN);
    assert!(placement.why.contains("Sparse and dense mean the same here"), "{}", placement.why);
    let rest = combined(&advise(&one(), &UNKNOWN)).unwrap();
    assert_eq!(rest, "pageleap run --thp off --place sparse --alloc tbbmalloc COMMAND");
}

#[test]
fn balancing_that_is_off_stays_so() {
    let with = |balancing| Facts { balancing, ..four() };
    let short = |facts: &Facts| short(Topic::Balancing, facts, &UNKNOWN);
    assert_eq!(short(&with(Balancing::Off)), is(Verdict::AsYouAre, ""));
    assert_eq!(short(&with(Balancing::NotBuilt)), is(Verdict::AsYouAre, ""));
    assert_eq!(short(&with(Balancing::Unknown)), is(Verdict::Do, "--balancing off"));
    let unknown = of(Topic::Balancing, &with(Balancing::Unknown), &UNKNOWN);
    assert!(unknown.condition.is_some());
    assert_eq!(of(Topic::Balancing, &four(), &UNKNOWN).condition, None);
    // Root's privilege is named where it is needed.
    let costs = |is_root| of(Topic::Balancing, &Facts { is_root, ..four() }, &UNKNOWN).costs;
    assert!(costs(Some(false)).unwrap().contains("needs root, and you are not"));
    assert!(costs(Some(true)).unwrap().contains("needs root, as you are"));
}

#[test]
fn where_a_filter_refuses_policies_the_line_is_for_the_host() {
    let filtered = Facts { can_set_policy: Some(false), ..four() };
    let balancing = of(Topic::Balancing, &filtered, &UNKNOWN);
    assert_eq!(balancing.line.as_deref(), Some("sysctl -w kernel.numa_balancing=0"));
    let policy = of(Topic::Policy, &filtered, &UNKNOWN);
    assert_eq!(policy.line.as_deref(), Some("docker run --cap-add SYS_NICE IMAGE"));
    let rest = combined(&advise(&filtered, &UNKNOWN)).unwrap();
    assert_eq!(rest, "pageleap run --thp off --place sparse --alloc tbbmalloc COMMAND");
}

#[test]
fn huge_pages_depend_on_the_setting_and_on_the_access() {
    let short = |huge_pages, pattern| {
        let workload = Workload { pattern, ..UNKNOWN };
        short(Topic::HugePages, &Facts { huge_pages, ..four() }, &workload)
    };
    let (random, sequential) = (Some(Pattern::Random), Some(Pattern::Sequential));
    use HugePageSetting::{Always, Madvise, Never, NotBuilt, Unknown};
    assert_eq!(short(Always, random), is(Verdict::Do, "--thp off"));
    assert_eq!(short(Unknown, random), is(Verdict::Do, "--thp off"));
    assert_eq!(short(Always, sequential), is(Verdict::DoNot, ""));
    assert_eq!(short(Madvise, random), is(Verdict::AsYouAre, ""));
    assert_eq!(short(Madvise, None), is(Verdict::AsYouAre, ""));
    assert_eq!(short(Madvise, sequential), is(Verdict::Do, "--thp on"));
    assert_eq!(short(Never, random), is(Verdict::AsYouAre, ""));
    // Only root can do it, for all programs: so it is no part of the command.
    assert_eq!(short(Never, sequential), is(Verdict::Do, ""));
    assert_eq!(short(NotBuilt, sequential), is(Verdict::MeansNothingHere, ""));
    let differs = of(Topic::HugePages, &four(), &UNKNOWN).differs.unwrap();
    assert!(differs.contains("13 ns") && differs.contains("23 ns"), "{differs}");
}

#[test]
fn memory_is_interleaved_unless_each_thread_has_its_own() {
    let policy = |workload: &Workload| of(Topic::Policy, &four(), workload);
    let unknown = policy(&UNKNOWN);
    assert!(unknown.condition.unwrap().contains("-l instead"));
    assert!(unknown.costs.unwrap().contains("1 - 1/4 = 75 %"));
    let shared = policy(&Workload { shares_data: Some(true), ..UNKNOWN });
    assert_eq!((shared.condition, shared.options), (None, vec!["-i all".to_owned()]));
    let apart = policy(&Workload { shares_data: Some(false), ..UNKNOWN });
    assert_eq!((apart.verdict, apart.options), (Verdict::Do, vec!["-l".to_owned()]));
    let single = policy(&Workload { threads: Some(1), ..UNKNOWN });
    assert_eq!(single.options, ["-l"]);
    let near = Facts { distances: Some((12, 12)), ..four() };
    assert!(of(Topic::Policy, &near, &UNKNOWN).why.contains("expect little"));
    assert!(!unknown.why.contains("expect little"), "{}", unknown.why);
}

#[test]
fn slower_nodes_get_fewer_pages_where_the_kernel_can() {
    let mut tiers = four();
    tiers.memory = vec![
        speed(0, Some(4), Some(20_000)),
        speed(1, Some(4), Some(20_000)),
        speed(2, Some(60), Some(5_000)),
    ];
    let weighted = of(Topic::Policy, &tiers, &UNKNOWN);
    assert_eq!(weighted.options, ["-w all"]);
    let differs = weighted.differs.unwrap();
    assert!(differs.contains("node 0 20000 MB/s") && differs.contains("node 2 5000"), "{differs}");
    // The kernel's weights are shown, and equal ones are named as such.
    tiers.memory.iter_mut().for_each(|node| node.weight = Some(1));
    let equal = of(Topic::Policy, &tiers, &UNKNOWN).differs.unwrap();
    assert!(equal.contains("node 2 1.") && equal.contains("Equal weights"), "{equal}");
    tiers.memory[0].weight = Some(4);
    tiers.memory[1].weight = Some(4);
    let unequal = of(Topic::Policy, &tiers, &UNKNOWN).differs.unwrap();
    assert!(unequal.contains("node 0 4, node 1 4, node 2 1.") && !unequal.contains("Equal"));
    // Older kernels interleave over the fast nodes.
    tiers.has_weights = Some(false);
    assert_eq!(of(Topic::Policy, &tiers, &UNKNOWN).options, ["-i 0-1"]);
    tiers.memory.remove(0);
    let alone = short(Topic::Policy, &tiers, &UNKNOWN);
    assert_eq!(alone, is(Verdict::AsYouAre, ""));
    // Bandwidths alone tell it, too.
    let bandwidths = [20_000, 20_000, 5_000];
    tiers.memory = (0..).zip(bandwidths).map(|(id, mb)| speed(id, None, Some(mb))).collect();
    assert_eq!(of(Topic::Policy, &tiers, &UNKNOWN).options, ["-i 0-1"]);
}

#[test]
fn threads_are_spread_while_cpus_are_left() {
    let placement = |threads| of(Topic::Placement, &four(), &Workload { threads, ..UNKNOWN });
    let few = placement(Some(16));
    assert_eq!((few.verdict, few.condition), (Verdict::Do, None));
    assert!(few.why.contains("16 threads leave CPUs free"), "{}", few.why);
    assert!(few.why.contains("64 CPUs are 32 cores"), "{}", few.why);
    assert!(placement(Some(64)).why.contains("sparse and dense are almost the same"));
    assert!(placement(None).condition.unwrap().contains("at most 64 threads"));
    assert_eq!(placement(Some(65)).verdict, Verdict::DoNot);
    assert_eq!(placement(Some(1)).verdict, Verdict::MeansNothingHere);
    let single = Facts { cpus: 1, cores: 1, ..one() };
    let verdict = of(Topic::Placement, &single, &UNKNOWN).verdict;
    assert_eq!(verdict, Verdict::MeansNothingHere);
}

#[test]
fn an_allocator_is_replaced_by_one_that_is_there() {
    let with = |allocators: Option<&[Allocator]>| Facts {
        allocators: allocators.map(<[Allocator]>::to_vec),
        ..four()
    };
    let often = Workload { allocates_often: Some(true), ..UNKNOWN };
    let advice = |allocators| of(Topic::Allocator, &with(allocators), &often);
    assert_eq!(advice(Some(&Allocator::ALL)).options, ["--alloc tbbmalloc"]);
    let jemalloc = advice(Some(&[Allocator::Glibc, Allocator::Jemalloc]));
    assert_eq!(jemalloc.options, ["--alloc jemalloc"]);
    assert!(jemalloc.why.contains("tbbmalloc is not installed: apt-get install libtbbmalloc2"));
    let none = advice(Some(&[Allocator::Glibc, Allocator::Mimalloc]));
    assert_eq!(none.line.as_deref(), Some("apt-get install libtbbmalloc2 libjemalloc2"));
    assert!(none.options.is_empty());
    assert!(advice(None).why.contains("Whether it is installed there is not known"));
    let rarely = Workload { allocates_often: Some(false), ..UNKNOWN };
    assert_eq!(of(Topic::Allocator, &four(), &rarely).verdict, Verdict::DoNot);
    let single = Workload { threads: Some(1), ..often };
    assert_eq!(of(Topic::Allocator, &four(), &single).verdict, Verdict::DoNot);
}

#[test]
fn nothing_may_be_left_to_set() {
    let facts = Facts { huge_pages: HugePageSetting::Never, cpus: 1, ..one() };
    let rarely = Workload { allocates_often: Some(false), ..UNKNOWN };
    assert_eq!(combined(&advise(&facts, &rarely)), None);
}
