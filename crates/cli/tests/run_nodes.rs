//! `pageleap run` on machines with several memory nodes. The kernel tells what a program has got:
//! `numa_maps` its policy and pages, `/proc/self/task` the CPUs of its threads. numactl is asked for
//! the same beside it. Tests of `--place` and `--home` are in `threads.rs`.

#[path = "../../pageleap/tests/common/mod.rs"]
mod common;
#[path = "../../pageleap/tests/common/filter.rs"]
mod filter;
#[path = "run_nodes/grown.rs"]
mod grown;
#[path = "../../pageleap/tests/common/machine_settings.rs"]
mod machine_settings;
#[path = "../../pageleap/tests/common/nodes.rs"]
mod nodes;
#[path = "run_nodes/program.rs"]
mod program;
#[path = "run_nodes/threads.rs"]
mod threads;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::{case, is_root, skip};
use filter::{Action, install_filter};
use machine_settings::{Cpuset, Setting};
use nodes::{lab_machine, several};
use pageleap::NodeId;
use pageleap::topology::id_list;
use program::{PAGES, Program, Seen};

/// The user and group `nobody`.
const NOBODY: u32 = 65_534;
/// The calls that Docker's default profile refuses without CAP_SYS_NICE.
const OF_CONTAINERS: [i64; 3] = [libc::SYS_set_mempolicy, libc::SYS_get_mempolicy, libc::SYS_mbind];

/// Who starts a program.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Who {
    /// The user of the test: root in the lab.
    Own,
    Nobody,
    /// `nobody` if the test is root, under a filter that does this with policies.
    Container(Action),
}

impl Who {
    /// Both users, or only that of the test if it cannot become another one.
    fn users() -> Vec<Who> {
        if is_root() { vec![Who::Own, Who::Nobody] } else { vec![Who::Own] }
    }

    fn starts(self, command: &mut Command) {
        if self != Who::Own && is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        if let Who::Container(action) = self {
            // SAFETY: the filter is installed by system calls alone.
            unsafe { command.pre_exec(move || install_filter(action, &OF_CONTAINERS)) };
        }
    }
}

/// The nodes of this machine.
struct Machine {
    /// All that have memory.
    all: Vec<NodeId>,
    /// The first and the last of those that have memory and CPUs.
    near: NodeId,
    far: NodeId,
}

impl Machine {
    /// `None` if it has one node only: then the test is skipped.
    fn of(test: &str) -> Option<Machine> {
        let all = several(test)?;
        let with_cpus: Vec<NodeId> =
            all.iter().copied().filter(|node| !cpus_of(*node).is_empty()).collect();
        if with_cpus.len() < 2 {
            skip(test, &"this machine has CPUs on one node only");
            return None;
        }
        Some(Machine { near: with_cpus[0], far: with_cpus[with_cpus.len() - 1], all })
    }

    /// The nodes without CPUs, such as those of a slower tier.
    fn without_cpus(&self) -> Vec<NodeId> {
        self.all.iter().copied().filter(|node| cpus_of(*node).is_empty()).collect()
    }

    /// All nodes except this one.
    fn without(&self, node: NodeId) -> Vec<NodeId> {
        self.all.iter().copied().filter(|other| *other != node).collect()
    }

    /// The CPUs of all nodes, also of those without memory.
    fn cpus(&self) -> BTreeSet<usize> {
        numbers(&fs::read_to_string("/sys/devices/system/cpu/online").unwrap())
    }
}

fn cpus_of(node: NodeId) -> BTreeSet<usize> {
    let list = format!("/sys/devices/system/node/node{}/cpulist", node.0);
    numbers(&fs::read_to_string(list).unwrap())
}

/// Reads the kernel's notation of a list: `0-2,8`.
fn numbers(list: &str) -> BTreeSet<usize> {
    let parts = list.trim().split(',').filter(|part| !part.is_empty());
    let ranges = parts.map(|part| part.split_once('-').unwrap_or((part, part)));
    ranges.flat_map(|(from, to)| from.parse().unwrap()..=to.parse().unwrap()).collect()
}

/// Nodes in the notation of numactl and of the kernel.
fn list(nodes: &[NodeId]) -> String {
    id_list(nodes.iter().map(|node| node.0 as usize))
}

/// `pageleap run FLAGS`, started by `who`.
fn pageleap(who: Who, flags: &[&str]) -> Command {
    let mut command = Command::new(program::reachable(Path::new(env!("CARGO_BIN_EXE_pageleap"))));
    command.arg("run").args(flags);
    who.starts(&mut command);
    command
}

fn numactl(flags: &[&str]) -> Command {
    let mut command = Command::new("numactl");
    command.args(flags);
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What the kernel tells of a program, and what its launcher has said.
#[track_caller]
fn seen(mut launcher: Command) -> (Seen, String) {
    let output = Program::Tells.under(&mut launcher).output().expect("the launcher starts");
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{launcher:?}: {said}");
    (Seen::of(&output.stdout), said)
}

/// The error of a run that starts nothing.
#[track_caller]
fn refused(mut launcher: Command) -> String {
    let output = Program::Tells.under(&mut launcher).output().expect("the launcher starts");
    assert_eq!(output.status.code(), Some(125), "{launcher:?}: {}", stderr(&output));
    assert!(output.stdout.is_empty(), "{launcher:?}");
    stderr(&output)
}

/// Where the pages of a program have to be.
#[derive(Clone, Debug)]
enum Where {
    /// All on one of these nodes, or on several.
    Among(Vec<NodeId>),
    /// On each node by its weight, within as many pages as the weight is.
    Shared(Vec<(NodeId, usize)>),
}

impl Where {
    fn on(node: NodeId) -> Where {
        Where::Among(vec![node])
    }

    fn equally(nodes: &[NodeId]) -> Where {
        Where::Shared(nodes.iter().map(|node| (*node, 1)).collect())
    }

    #[track_caller]
    fn check(&self, seen: &Seen, about: &str) {
        let nodes: Vec<NodeId> = match self {
            Where::Among(nodes) => nodes.clone(),
            Where::Shared(shares) => shares.iter().map(|(node, _)| *node).collect(),
        };
        let strange = seen.pages.keys().find(|node| !nodes.contains(node));
        assert_eq!(strange, None, "{about}: {seen:?}");
        assert_eq!(seen.pages.values().sum::<usize>(), PAGES, "{about}: {seen:?}");
        let Where::Shared(shares) = self else { return };
        let all: usize = shares.iter().map(|(_, weight)| weight).sum();
        for (node, weight) in shares {
            let wanted = PAGES * weight / all;
            let pages = seen.pages.get(node).copied().unwrap_or(0);
            assert!(pages.abs_diff(wanted) <= *weight, "{about}: {wanted} on {node}: {seen:?}");
        }
    }
}

/// Checks the CPUs of all threads.
#[track_caller]
fn check_cpus(seen: &Seen, cpus: &BTreeSet<usize>, about: &str) {
    // The harness has threads, too.
    assert!(seen.threads.len() > program::THREADS, "{about}: {seen:?}");
    for thread in &seen.threads {
        assert_eq!(&numbers(&thread.allowed), cpus, "{about}: {seen:?}");
        assert!(!thread.cpus.is_empty() && thread.cpus.is_subset(cpus), "{about}: {seen:?}");
    }
}

/// Flags, and what the kernel has to tell of a program that is started with them.
struct Row {
    flags: Vec<String>,
    policy: String,
    pages: Where,
    cpus: BTreeSet<usize>,
}

fn row(flags: &str, policy: &str, pages: Where, cpus: BTreeSet<usize>) -> Row {
    let flags = flags.split_whitespace().map(str::to_owned).collect();
    Row { flags, policy: policy.to_owned(), pages, cpus }
}

impl Row {
    fn flags(&self) -> Vec<&str> {
        self.flags.iter().map(String::as_str).collect()
    }

    #[track_caller]
    fn check(&self, seen: &Seen) {
        let about = self.flags.join(" ");
        assert_eq!(seen.policy, self.policy, "{about}: {seen:?}");
        self.pages.check(seen, &about);
        check_cpus(seen, &self.cpus, &about);
    }
}

/// Each letter that numactl has, too, over the nodes of a machine.
fn letters(machine: &Machine) -> Vec<Row> {
    let Machine { all, near, far } = machine;
    let (a, b, both) = (near.0, far.0, [*near, *far]);
    let rest = machine.without(*near);
    let [everything, others, two] = [all, &rest[..], &both].map(list);
    let (cpus, near_cpus, far_cpus) = (machine.cpus(), cpus_of(*near), cpus_of(*far));
    let (near_cpu, far_cpu) = (*near_cpus.last().unwrap(), *far_cpus.last().unwrap());
    let first_cpu = *cpus.first().unwrap();
    let all_but_one = &cpus - &[near_cpu].into();
    let [one_near, one_far] = both.map(Where::on);
    let [shared, shared_rest, shared_two] = [all, &rest[..], &both].map(Where::equally);
    let (second, anywhere) = (all[1], Where::Among(all.clone()));
    let table = [
        ("".into(), "default".into(), &anywhere, &cpus),
        (format!("-m {b}"), format!("bind:{b}"), &one_far, &cpus),
        (format!("-m{b} -N{a}"), format!("bind:{b}"), &one_far, &near_cpus),
        (format!("-N {b} -m same"), format!("bind:{b}"), &one_far, &far_cpus),
        // Of several nodes the kernel takes the nearest.
        (format!("-m all -N {b}"), format!("bind:{everything}"), &one_far, &far_cpus),
        (format!("--membind={two} -c {b}"), format!("bind:{two}"), &one_far, &far_cpus),
        (format!("-m !{a} -N {b}"), format!("bind:{others}"), &one_far, &far_cpus),
        (format!("-p {b} -N {a}"), format!("prefer:{b}"), &one_far, &near_cpus),
        (format!("-P {b} -N {a}"), format!("prefer (many):{b}"), &one_far, &near_cpus),
        (format!("-P {two} -N {b}"), format!("prefer (many):{two}"), &one_far, &far_cpus),
        (format!("-l -N {b}"), "local".into(), &one_far, &far_cpus),
        (format!("-N {b}"), "default".into(), &one_far, &far_cpus),
        (format!("--cpunodebind={a}"), "default".into(), &one_near, &near_cpus),
        (format!("-C {far_cpu}"), "default".into(), &one_far, &[far_cpu].into()),
        (format!("-C !{near_cpu}"), "default".into(), &anywhere, &all_but_one),
        ("-C +0 -l".into(), "local".into(), &anywhere, &[first_cpu].into()),
        ("-i all".into(), format!("interleave:{everything}"), &shared, &cpus),
        ("-a -N all -i same".into(), format!("interleave:{everything}"), &shared, &cpus),
        (format!("-i {two}"), format!("interleave:{two}"), &shared_two, &cpus),
        (format!("-i !{a}"), format!("interleave:{others}"), &shared_rest, &cpus),
        ("-i +1".into(), format!("interleave:{}", second.0), &Where::on(second), &cpus),
    ];
    let rows =
        table.map(|(flags, policy, pages, cpus)| row(&flags, &policy, pages.clone(), cpus.clone()));
    let of_tier = machine.without_cpus().into_iter().map(|node| {
        let flags = format!("-m {} -N {a}", node.0);
        row(&flags, &format!("bind:{}", node.0), Where::on(node), near_cpus.clone())
    });
    rows.into_iter().chain(of_tier).collect()
}

const PROGRAM: &str = program::TEST;

/// The short one, which also is the program that all tests start.
#[test]
fn memory_and_threads_are_on_the_nodes_that_were_named() {
    if let Some(case) = case() {
        return program::run(&case);
    }
    let Some(machine) = Machine::of(PROGRAM) else { return };
    let Machine { all, near, far } = &machine;
    let (a, b) = (near.0, far.0);
    for row in [
        row(&format!("-N {b} -m same"), &format!("bind:{b}"), Where::on(*far), cpus_of(*far)),
        row(&format!("-N {a} -p {b}"), &format!("prefer:{b}"), Where::on(*far), cpus_of(*near)),
        row("-i all", &format!("interleave:{}", list(all)), Where::equally(all), machine.cpus()),
    ] {
        let (seen, said) = seen(pageleap(Who::Own, &row.flags()));
        assert_eq!(said, "");
        row.check(&seen);
    }
}

#[test]
fn each_letter_places_memory_and_threads_for_every_user() {
    let Some(machine) = Machine::of("each_letter_places_memory_and_threads_for_every_user") else {
        return;
    };
    for who in Who::users() {
        for row in letters(&machine) {
            let (seen, said) = seen(pageleap(who, &row.flags()));
            assert_eq!(said, "", "{:?}", row.flags);
            row.check(&seen);
        }
        for node in machine.without_cpus() {
            let error = refused(pageleap(who, &["-N", &node.0.to_string()]));
            assert!(error.contains(&format!("node {} has no CPUs", node.0)), "{error}");
        }
    }
}

/// Balancing is a flag of some policies, and a policy where it is off.
#[test]
fn balancing_is_a_part_of_the_policy() {
    let Some(machine) = Machine::of("balancing_is_a_part_of_the_policy") else { return };
    let far = machine.far.0.to_string();
    let on_far = Where::on(machine.far);
    for who in Who::users() {
        let (bound, said) = seen(pageleap(who, &["-b", "-m", &far]));
        // Linux 6.1 tells that there is a flag, newer kernels tell which.
        let is_balanced = [format!("bind=:{far}"), format!("bind=balancing:{far}")];
        assert!(is_balanced.contains(&bound.policy), "{bound:?}");
        on_far.check(&bound, "-b -m");
        let setting = fs::read_to_string("/proc/sys/kernel/numa_balancing");
        match setting.as_deref().map(str::trim) {
            Ok("1" | "3") => assert_eq!(said, ""),
            _ => assert!(said.lines().count() == 1 && said.contains("balancing has no effect")),
        }
        let (off, said) = seen(pageleap(who, &["--balancing", "off", "-N", &far]));
        assert_eq!((off.policy.as_str(), said.as_str()), ("local", ""));
        on_far.check(&off, "--balancing off");
        let (on, _) = seen(pageleap(who, &["--balancing", "on"]));
        assert_eq!(on.policy, "default");
        if common::in_lab() && is_root() {
            let _on = Setting::new("/proc/sys/kernel/numa_balancing", "1");
            let (bound, said) = seen(pageleap(who, &["--no-fallback", "-b", "-m", &far]));
            assert!(is_balanced.contains(&bound.policy) && said.is_empty(), "{bound:?} {said}");
        }
        let error = refused(pageleap(who, &["-b", "-i", "all"]));
        assert!(error.contains("never balances pages of MPOL_INTERLEAVE"), "{error}");
    }
}

/// The weights by which the kernel interleaves (Linux 6.9).
const WEIGHTS: &str = "/sys/kernel/mm/mempolicy/weighted_interleave";

fn weight_file(node: NodeId) -> String {
    format!("{WEIGHTS}/node{}", node.0)
}

#[test]
fn weighted_interleave_follows_the_weights_or_becomes_interleave() {
    const NAME: &str = "weighted_interleave_follows_the_weights_or_becomes_interleave";
    let Some(machine) = Machine::of(NAME) else { return };
    let (all, names) = (&machine.all, list(&machine.all));
    if !Path::new(WEIGHTS).is_dir() {
        for who in Who::users() {
            let (seen, said) = seen(pageleap(who, &["-w", "all"]));
            assert_eq!(said.lines().count(), 1, "{said}");
            assert!(said.contains("MPOL_WEIGHTED_INTERLEAVE needs Linux 6.9"), "{said}");
            assert!(said.contains(&format!("MPOL_INTERLEAVE of nodes {names} instead")), "{said}");
            let row =
                row("-w all", &format!("interleave:{names}"), Where::equally(all), machine.cpus());
            row.check(&seen);
            let error = refused(pageleap(who, &["--no-fallback", "-w", "all"]));
            assert!(error.contains("needs Linux 6.9"), "{error}");
        }
        return;
    }
    // 1, 3, 5 and so on. Other machines keep theirs.
    let mut kept = Vec::new();
    if is_root() && common::in_lab() {
        for (position, node) in all.iter().enumerate() {
            kept.push(Setting::new(weight_file(*node), &(2 * position + 1).to_string()));
        }
    }
    let weights = |nodes: &[NodeId]| -> Vec<(NodeId, usize)> {
        let weight = |node| fs::read_to_string(weight_file(node)).unwrap();
        nodes.iter().map(|node| (*node, weight(*node).trim().parse().unwrap())).collect()
    };
    let rest = machine.without(machine.near);
    for who in Who::users() {
        for (text, nodes) in [("all".to_owned(), all), (format!("!{}", machine.near.0), &rest)] {
            let policy = format!("weighted interleave:{}", list(nodes));
            let flags = format!("--no-fallback -w {text}");
            let row = row(&flags, &policy, Where::Shared(weights(nodes)), machine.cpus());
            let (seen, said) = seen(pageleap(who, &row.flags()));
            assert_eq!(said, "");
            row.check(&seen);
        }
    }
}

#[test]
fn numactl_and_run_agree_on_every_letter() {
    const NAME: &str = "numactl_and_run_agree_on_every_letter";
    let Some(machine) = Machine::of(NAME) else { return };
    if numactl(&["--version"]).output().is_err() {
        return skip(NAME, &"numactl is not installed");
    }
    let is_sparse = machine.all.last().unwrap().0 as usize >= machine.all.len();
    for row in letters(&machine) {
        let flags = row.flags();
        // numactl counts `!` up to the number of nodes, and fails on nodes that are not there.
        if is_sparse && (flags.contains(&"-a") || flags.iter().any(|flag| flag.starts_with('!'))) {
            continue;
        }
        let mut theirs = numactl(&flags);
        let output = Program::Tells.under(&mut theirs).output().unwrap();
        if stderr(&output).contains("invalid option") {
            // numactl 2.0.15 brought it.
            assert_eq!(flags[0], "-P");
            continue;
        }
        assert_eq!(output.status.code(), Some(0), "{flags:?}: {}", stderr(&output));
        row.check(&Seen::of(&output.stdout));
        let (ours, _) = seen(pageleap(Who::Own, &flags));
        row.check(&ours);
        // The line of a trial does the same.
        let mut trial = pageleap(Who::Own, &["--dry-run"]);
        trial.args(&flags);
        let line = Program::Tells.under(&mut trial).output().unwrap().stdout;
        let mut shell = Command::new("sh");
        shell.args(["-c", std::str::from_utf8(&line).unwrap()]);
        shell.env(common::CASE, program::TELLS);
        let output = shell.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{flags:?}: {}", stderr(&output));
        row.check(&Seen::of(&output.stdout));
    }
    let far = machine.far.0.to_string();
    let flags = ["-b", "-m", far.as_str()];
    let [(theirs, _), (ours, _)] = [numactl(&flags), pageleap(Who::Own, &flags)].map(seen);
    assert_eq!((ours.policy, ours.pages), (theirs.policy, theirs.pages));
}

/// Without policies, threads run on the CPUs of a node, and first touch places their memory there.
#[test]
fn where_a_container_refuses_policies_first_touch_takes_their_place() {
    const NAME: &str = "where_a_container_refuses_policies_first_touch_takes_their_place";
    let Some(machine) = Machine::of(NAME) else { return };
    let [a, b] = [machine.near, machine.far].map(|node| node.0.to_string());
    let on_far = Where::on(machine.far);
    for action in [Action::Errno(libc::EPERM), Action::Errno(libc::ENOSYS), Action::Kill] {
        let who = Who::Container(action);
        for flag in ["-m", "-p", "-P"] {
            let (seen, said) = seen(pageleap(who, &[flag, &b]));
            assert_eq!(said.lines().count(), 1, "{said}");
            assert!(said.contains(&format!("of node {b} instead, where first touch")), "{said}");
            let row = row(&format!("{flag} {b}"), "default", on_far.clone(), cpus_of(machine.far));
            row.check(&seen);
            let error = refused(pageleap(who, &["--no-fallback", flag, &b]));
            assert!(error.contains("filter of the container refuses it"), "{error}");
        }
        // CPUs that were named stay, and nothing comes near these policies. A node without CPUs has
        // no first touch.
        let of_tier: Vec<String> =
            machine.without_cpus().iter().map(|node| node.0.to_string()).collect();
        let of_tier = of_tier.iter().map(|node| {
            (vec!["-m", node.as_str()], Where::Among(machine.all.clone()), machine.cpus())
        });
        for (flags, pages, cpus) in of_tier.chain([
            (vec!["-N", &a, "-m", &b], Where::on(machine.near), cpus_of(machine.near)),
            (vec!["-i", "all"], Where::Among(machine.all.clone()), machine.cpus()),
            (vec!["-w", "all"], Where::Among(machine.all.clone()), machine.cpus()),
            (vec!["-l"], Where::Among(machine.all.clone()), machine.cpus()),
        ]) {
            let (seen, said) = seen(pageleap(who, &flags));
            assert_eq!(said.lines().count(), 1, "{said}");
            assert!(said.contains("The policy stays as it was"), "{said}");
            row(&flags.join(" "), "default", pages, cpus).check(&seen);
            let strict = refused(pageleap(who, &[&["--no-fallback"][..], &flags].concat()));
            assert!(strict.contains("--cap-add SYS_NICE"), "{strict}");
        }
        // Without a policy nothing is refused.
        let (seen, said) = seen(pageleap(who, &["--no-fallback", "-N", &b]));
        assert_eq!(said, "");
        row("-N", "default", on_far.clone(), cpus_of(machine.far)).check(&seen);
    }
}

/// A cpuset of all nodes but the last one, or a skip.
fn cpuset(test: &str, name: &str, machine: &Machine) -> Option<Cpuset> {
    lab_machine(test)?;
    let set = Cpuset::new(name, &list(&machine.without(machine.far)));
    set.map_err(|why| skip(test, &why)).ok()
}

#[test]
fn nodes_outside_of_the_cpuset_are_named() {
    const NAME: &str = "nodes_outside_of_the_cpuset_are_named";
    let Some(machine) = Machine::of(NAME) else { return };
    let Some(set) = cpuset(NAME, "run-nodes", &machine) else { return };
    let (allowed, far) = (machine.without(machine.far), machine.far.0.to_string());
    let may = list(&allowed);
    let inside = |flags: &[&str]| {
        let mut command = pageleap(Who::Own, flags);
        set.take_in(&mut command);
        command
    };
    for (flag, mode) in [
        ("-m", "MPOL_BIND"),
        ("-p", "MPOL_PREFERRED"),
        ("-P", "MPOL_PREFERRED_MANY"),
        ("-i", "MPOL_INTERLEAVE"),
        ("-w", "MPOL_WEIGHTED_INTERLEAVE"),
    ] {
        let error = refused(inside(&[flag, &far]));
        assert!(error.contains(&format!("node {far} is outside the cpuset")), "{error}");
        // No node is left, which is EINVAL for the kernel, as is a mode that it does not know.
        for strict in [&[][..], &["--no-fallback"]] {
            let error = refused(inside(&[strict, &["-a", flag, &far]].concat()));
            assert!(error.contains(&format!("({mode} of node {far}): EINVAL (")), "{error}");
            assert!(error.contains(&format!("allowed are {may}; ")), "{error}");
            assert!(error.contains("name other nodes, or widen cpuset.mems"), "{error}");
        }
    }
    let (seen_all, said) = seen(inside(&["-i", "all"]));
    assert_eq!((seen_all.policy, said.as_str()), (format!("interleave:{may}"), ""));
    for (flag, policy) in [("-i", "interleave"), ("-m", "bind"), ("-P", "prefer (many)")] {
        let (seen, said) = seen(inside(&["-a", flag, "all"]));
        assert_eq!(seen.policy, format!("{policy}:{may}"), "{said}");
        let pages =
            if flag == "-i" { Where::equally(&allowed) } else { Where::Among(allowed.clone()) };
        pages.check(&seen, flag);
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains(&format!("the kernel has dropped the nodes {far}: ")), "{said}");
        let error = refused(inside(&["--no-fallback", "-a", flag, "all"]));
        assert!(error.contains(&format!("dropped the nodes {far}")), "{error}");
    }
    // Its CPUs are not forbidden, but its memory is.
    let error = refused(inside(&["-N", &far]));
    assert!(error.contains(&format!("node {far} is outside the cpuset")), "{error}");
    let (seen, said) = seen(inside(&["-a", "-N", &far]));
    assert_eq!(said, "");
    row("-N", "default", Where::Among(allowed), cpus_of(machine.far)).check(&seen);
}

#[test]
fn cpus_outside_of_the_cpuset_are_named() {
    const NAME: &str = "cpus_outside_of_the_cpuset_are_named";
    let Some(machine) = Machine::of(NAME) else { return };
    let Some(set) = cpuset(NAME, "run-cpus", &machine) else { return };
    let forbidden = cpus_of(machine.far);
    let allowed: BTreeSet<usize> = machine.cpus().difference(&forbidden).copied().collect();
    let [allowed_list, forbidden_list] =
        [&allowed, &forbidden].map(|cpus| id_list(cpus.iter().copied()));
    set.write("cpuset.cpus", &allowed_list).unwrap();
    let far = machine.far.0.to_string();
    let cpu = forbidden.first().unwrap().to_string();
    let inside = |flags: &[&str]| {
        let mut command = pageleap(Who::Own, flags);
        set.take_in(&mut command);
        command
    };
    for (flags, part) in [
        (["-N", far.as_str()], format!("node {far} is outside the cpuset")),
        (["-C", cpu.as_str()], format!("CPU {cpu} is outside the cpuset")),
    ] {
        let error = refused(inside(&flags));
        assert!(error.contains(&part), "{error}");
        let error = refused(inside(&[&["-a"][..], &flags].concat()));
        assert!(error.contains("EINVAL") && error.contains("widen cpuset.cpus"), "{error}");
        assert!(error.contains(&format!("allowed are {allowed_list}")), "{error}");
    }
    for flag in ["-N", "-C"] {
        let (seen, said) = seen(inside(&["-a", flag, "all"]));
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains(&format!("dropped the CPUs {forbidden_list}: ")), "{said}");
        check_cpus(&seen, &allowed, flag);
        let error = refused(inside(&["--no-fallback", "-a", flag, "all"]));
        assert!(error.contains(&format!("dropped the CPUs {forbidden_list}")), "{error}");
    }
}

/// A parent that stays behind reads the program's policy and pages from the kernel.
#[test]
fn a_parent_that_stays_tells_the_policy_and_the_nodes() {
    const NAME: &str = "a_parent_that_stays_tells_the_policy_and_the_nodes";
    let Some(machine) = Machine::of(NAME) else { return };
    let far = machine.far;
    for who in Who::users() {
        let mut command = pageleap(who, &["-v", "-m", &far.0.to_string()]);
        Program::Waits.under(&mut command);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        // The program waits until the parent has looked at it.
        let last = "the policy of its heap";
        let mut said = Vec::new();
        while !said.last().is_some_and(|line: &String| line.contains(last)) {
            said.push(lines.next().unwrap_or_else(|| panic!("{said:?}")));
        }
        drop(child.stdin.take());
        let mut told = Vec::new();
        child.stdout.take().unwrap().read_to_end(&mut told).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0));
        let said: String = said.into_iter().chain(lines).map(|line| line + "\n").collect();
        for part in [
            format!("memory policy: MPOL_BIND of node {}\n", far.0),
            format!("the policy of its heap, by numa_maps: bind:{}\n", far.0),
            "exit status 0".to_owned(),
        ] {
            assert!(said.contains(&part), "{part}: {said}");
        }
        let look = said.lines().find(|line| line.contains("after 1 s: ")).unwrap();
        assert!(look.contains(&format!("MiB on {far}")), "{look}");
        let seen = Seen::of(&told);
        assert_eq!(seen.policy, format!("bind:{}", far.0));
        Where::on(far).check(&seen, "-v -m");
    }
}
