//! The part of `pageleap bench page-tables` on workloads that miss the TLB, in the scenarios of
//! *Latency-aware page-table migration*.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use clap::ValueEnum;
use pageleap::NodeId;
use pageleap::topology::{Cache, SysFiles, Topology, data_caches};
use pageleap_measure::document::{Body, Column, Section, Table, Value, column, fact};
use pageleap_measure::figures::human_bytes;
use pageleap_measure::matrix::buffer_bytes;
use pageleap_measure::scenarios::{Cast, Cell, Interference, Policy, Run, Scenario, Scenes};
use pageleap_measure::statistics::Summary;
use pageleap_measure::workloads::{LEAST_BYTES, Workload};

use super::summaries::{middle, ns, ratio, span};
use crate::interrupt;
use crate::machine::cores;
use crate::progress::Steps;
use crate::stop::Stop;

/// A workload, as the command names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Name {
    /// Updates of random words
    Gups,
    /// Probes of a hash join
    Join,
    /// Look-ups of cross sections, as in XSBench
    Xsbench,
    /// Look-ups in a B+-tree
    Btree,
}

/// Bytes of a huge page, to which buffers are aligned.
const HUGE: u64 = 2 << 20;

impl Name {
    fn workload(self) -> Workload {
        match self {
            Name::Gups => Workload::Gups,
            Name::Join => Workload::Join,
            Name::Xsbench => Workload::XsBench,
            Name::Btree => Workload::Btree,
        }
    }
}

/// The workloads of the command, each once.
pub fn workloads(names: &[Name]) -> Vec<Workload> {
    let is_named = |workload: &Workload| {
        names.is_empty() || names.iter().any(|name| name.workload() == *workload)
    };
    Workload::ALL.into_iter().filter(is_named).collect()
}

/// The bytes of the region, which all workloads have room in.
pub fn region_bytes(size: u64) -> u64 {
    size.max(LEAST_BYTES as u64).next_multiple_of(2 << 20)
}

/// Chooses the CPUs of all threads. Without `threads`, the workload gets half of the local cores,
/// and the interference the others. The remote node is the one that is named, or else the farthest
/// one with CPUs, as in the paper's Table 3 (its *type-1*: from a nearer one, the gain of
/// latency-aware policies is smaller). `None` if this process may use no CPU of the local node.
pub fn cast(
    topology: &Topology,
    local: NodeId,
    remote: Option<NodeId>,
    threads: Option<u16>,
) -> Option<Cast> {
    let of_local = cores(topology, local);
    let workers = threads.map_or((of_local.len() / 2).max(1), usize::from);
    let (with_workers, others) = of_local.split_at(workers.min(of_local.len()));
    let workers: Vec<usize> =
        with_workers.iter().filter_map(|core| core.first().copied()).collect();
    if workers.is_empty() {
        return None;
    }
    let remote = match remote {
        Some(named) => Some(named).filter(|node| *node != local && topology.is_allowed(*node)),
        None => farthest(topology, local),
    };
    Some(Cast {
        local,
        workers,
        local_load: interference(topology, local, others),
        remote,
        remote_load: remote.and_then(|node| interference(topology, node, &cores(topology, node))),
    })
}

/// The farthest node whose memory and CPUs this process may use, or else whose memory it may use.
fn farthest(topology: &Topology, from: NodeId) -> Option<NodeId> {
    let others = topology.allowed_nodes().into_iter().filter(|node| *node != from);
    let key = |node: &NodeId| {
        (!cores(topology, *node).is_empty(), topology.distance(from, *node), Reverse(*node))
    };
    others.max_by_key(key)
}

/// A thread on each CPU of these cores.
fn interference(topology: &Topology, node: NodeId, cores: &[Vec<usize>]) -> Option<Interference> {
    let cpus: Vec<usize> = cores.iter().flatten().copied().collect();
    if cpus.is_empty() {
        return None;
    }
    let sum = |caches: Vec<Cache>| caches.iter().map(|cache| cache.bytes).sum();
    let least = (cpus.len() as u64 * (256 << 10)).next_multiple_of(2 << 20);
    let beyond_caches = buffer_bytes(data_caches(&SysFiles::host(), &cpus).map(sum)).max(least);
    // Half is copied to the other half. STREAM asks for four times the caches in each.
    let most = topology.node(node).map_or(0, |node| node.free_bytes / 8) & !(HUGE - 1);
    let bytes = (beyond_caches * 4).min(most).max(beyond_caches);
    Some(Interference { node, cpus, bytes })
}

/// The complete runs of each workload.
pub struct Scenery {
    cast: Cast,
    /// Nodes whose memory and CPUs this process may use.
    nodes: usize,
    /// The largest page tables of a region, and the caches of the workload's CPUs, if known.
    table_bytes: u64,
    cache_bytes: Option<u64>,
    runs: Vec<(Workload, Vec<Run>)>,
}

impl Scenery {
    /// Nothing is measured yet.
    pub fn new(cast: Cast, topology: &Topology, size: u64) -> Scenery {
        let could_hold = |id: &NodeId| {
            topology.node(*id).is_ok_and(|node| node.total_bytes > 0 && !node.cpus.is_empty())
        };
        let nodes = topology.allowed_nodes().iter().filter(|id| could_hold(id)).count();
        let sum = |caches: Vec<Cache>| caches.iter().map(|cache| cache.bytes).sum();
        let cache_bytes = data_caches(&SysFiles::host(), &cast.workers).map(sum);
        Scenery {
            cast,
            nodes,
            table_bytes: region_bytes(size) / 512,
            cache_bytes,
            runs: Vec::new(),
        }
    }

    /// Adds runs of all workloads, until all are done or a signal arrives.
    pub fn measure(&mut self, size: u64, workloads: &[Workload], runs: usize) -> Result<(), Stop> {
        let stopped = || interrupt::received().is_some();
        let mut steps = Steps::new("scenarios", runs * workloads.len(), 1);
        let mut scenes: Option<Scenes> = None;
        for &workload in workloads {
            steps.now(format!("{}: filling memory", workload.name()));
            match &mut scenes {
                Some(scenes) => scenes.change_to(workload)?,
                None => {
                    let cast = self.cast.clone();
                    scenes = Some(Scenes::new(cast, &Scenario::ALL, region_bytes(size), workload)?);
                }
            }
            let Some(scenes) = &mut scenes else { continue };
            self.runs.push((workload, Vec::new()));
            for nth in 0..runs {
                let mut step = |scenario: &Scenario, policy: Policy| {
                    let (workload, policy) = (workload.name(), policy.name());
                    steps.now(format!("{workload}, {}, {policy}", scenario.name));
                };
                let Some(run) = scenes.run(nth, &mut step, &stopped)? else { break };
                steps.done();
                let rate = run.cells.first().map_or(0.0, |cell| cell.per_second / 1e6);
                steps.row_done(&format!("{} {rate:.3} M/s at rest", workload.name()));
                if let Some((_, runs)) = self.runs.last_mut() {
                    runs.push(run);
                }
            }
            interrupt::stop_if_received(|| format!("{} runs were measured", self.complete()))?;
        }
        Ok(())
    }

    /// Complete runs of all workloads.
    pub fn complete(&self) -> usize {
        self.runs.iter().map(|(_, runs)| runs.len()).sum()
    }

    /// Complete runs of a workload, at most.
    pub fn runs(&self) -> usize {
        self.runs.iter().map(|(_, runs)| runs.len()).max().unwrap_or(0)
    }

    /// Answers and words that were wrong.
    pub fn wrong(&self) -> u64 {
        self.runs.iter().flat_map(|(_, runs)| runs).map(Run::wrong).sum()
    }

    /// The tables with their notes. Empty if no run is complete.
    pub fn sections(&self) -> Vec<Section> {
        let measured = self.runs.iter().filter(|(_, runs)| !runs.is_empty());
        let rows: Vec<Row> =
            measured.clone().flat_map(|(workload, runs)| rows(*workload, runs)).collect();
        if rows.is_empty() {
            return Vec::new();
        }
        let decisions: Vec<Decided> = measured
            .filter_map(|(workload, runs)| Some((*workload, runs.last()?)))
            .flat_map(|(workload, run)| run.cells.iter().map(move |cell| (workload, cell)))
            .filter(|(_, cell)| !matches!(cell.policy, Policy::Off | Policy::Views))
            .map(|(workload, cell)| Decided::of(workload, cell))
            .collect();
        let cast = &self.cast;
        let threads_of = |load: &Option<Interference>| {
            Value::count(load.as_ref().map_or(0, |load| load.cpus.len()))
        };
        let facts = vec![
            fact("local_node", "local node", Value::count(cast.local.0)),
            fact("remote_node", "remote node", cast.remote.map(|node| Value::count(node.0))),
            fact("table_bytes", "page tables (PTEs)", Value::Bytes(self.table_bytes)),
            fact("cache_bytes", "caches of its CPUs", self.cache_bytes.map(Value::Bytes)),
            fact("threads", "threads of a workload", Value::count(cast.workers.len())),
            fact("local_load_threads", "interference, local", threads_of(&cast.local_load)),
            fact("remote_load_threads", "interference, remote", threads_of(&cast.remote_load)),
        ];
        let of_rows = Table::of(&columns(), &rows, |row| row.workload.name().to_owned());
        let of_decisions =
            Table::of(&decision_columns(), &decisions, |row| row.workload.name().to_owned());
        vec![
            Section::new("setting", "Scenarios: threads and nodes", Body::Facts(facts)),
            Section::new("scenarios", "Scenarios (medians)", Body::Table(of_rows)),
            Section::new(
                "decisions",
                "Decisions in the last run of each workload",
                Body::Table(of_decisions),
            ),
            Section::new("scenarios_notes", "Notes on scenarios", Body::Notes(self.notes())),
        ]
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = vec![
            "L: local, R: remote, P: page tables, D: data, I: interference, threads that copy memory at \
             full speed. The workload's threads and its data are on the local node. LPLDI is the \
             paper's LPLDLI. Page tables move while the threads work; 0.1 s later operations are \
             counted for 0.2 s. The interference's rate includes the time before. / LPLD: time of an operation / that in LPLD without a policy, in the same run."
                .to_owned(),
        ];
        let missing: Vec<&str> = Scenario::ALL
            .iter()
            .filter(|scenario| !self.cast.can_play(scenario))
            .map(|scenario| scenario.name)
            .collect();
        if let Some(cache_bytes) = self.cache_bytes.filter(|bytes| self.table_bytes < 2 * bytes) {
            notes.push(format!(
                "The region's pages of PTEs have {}, and the caches of the workload's CPUs {}: most \
                 walks end in a cache, so the node of page tables shows little. --size {}g or more has \
                 twice as many page tables as caches.",
                human_bytes(self.table_bytes as f64),
                human_bytes(cache_bytes as f64),
                (cache_bytes * 2 * 512).div_ceil(1 << 30)
            ));
        }
        if !missing.is_empty() {
            notes.push(format!("Not measured: {}: {}.", missing.join(", "), self.why_missing()));
        }
        if self.nodes < 2 {
            notes.push(
                "One node with memory and CPUs: every policy leaves page tables on it. The rows show \
                 the cost of interference and of policies, and no gain."
                    .to_owned(),
            );
        } else if self.nodes == 2 {
            notes.push(
                "Two nodes with memory and CPUs: in RPLDRILI no quiet node is left for page tables. The \
                 paper's ARM server has four."
                    .to_owned(),
            );
        }
        notes.push(
            "Latency-aware page-table migration (Qu and Wang, Electronics 2025) reports for its changed \
             kernel on four nodes of Kunpeng 920: -w (algorithm-1) up to 3.53 times as fast as -m \
             (auto-ptm) for GUPS, 1.77 for XSBench and 1.68 for Hashjoin (abstract); and scans that \
             move nothing cost XSBench 42 % in LPLDLI (section 4.1.4). There one program ran for \
             minutes; here the cost of a decision stands in its own column."
                .to_owned(),
        );
        notes
    }

    fn why_missing(&self) -> String {
        let mut why = Vec::new();
        let (local, remote) = (self.cast.local, self.cast.remote);
        if self.cast.local_load.is_none() {
            why.push(format!("{local} has no core for interference beside those of the workload"));
        }
        match remote {
            None => why.push("no other node may be used as the remote one".to_owned()),
            Some(remote) if self.cast.remote_load.is_none() => {
                why.push(format!("{remote} has no CPU for interference"));
            }
            Some(_) => {}
        }
        why.join(", and ")
    }
}

/// A workload in a scenario with a policy.
struct Row {
    workload: Workload,
    scenario: &'static str,
    policy: &'static str,
    /// Millions for each second.
    rate: Option<Summary>,
    to_base: Option<Summary>,
    p50_ns: Option<Summary>,
    p99_ns: Option<Summary>,
    /// Milliseconds.
    placing: Option<Summary>,
    /// The nodes of page tables in all runs.
    tables: BTreeSet<NodeId>,
    /// Runs in which they were moved.
    moved: usize,
    /// GB/s on the local node, and on the remote one.
    loads: [Option<Summary>; 2],
}

fn rows(workload: Workload, runs: &[Run]) -> Vec<Row> {
    let first = runs.first().map_or(&[][..], |run| &run.cells);
    let row = |(at, of): (usize, &Cell)| {
        let all = |value: &dyn Fn(&Run, &Cell) -> Option<f64>| {
            let values: Option<Vec<f64>> =
                runs.iter().map(|run| value(run, &run.cells[at])).collect();
            values.and_then(|values| Summary::of(&values))
        };
        let load = |nth: usize| all(&|_, cell| Some(cell.load_bytes_per_s[nth]? / 1e9));
        let cells = || runs.iter().map(|run| &run.cells[at]);
        Row {
            workload,
            scenario: of.scenario.name,
            policy: of.policy.name(),
            rate: all(&|_, cell| Some(cell.per_second / 1e6)),
            to_base: all(&|run, cell| run.to_base(cell)),
            p50_ns: all(&|_, cell| Some(cell.times?.p50_ns as f64)),
            p99_ns: all(&|_, cell| Some(cell.times?.p99_ns as f64)),
            placing: all(&|_, cell| Some(cell.placed.took.as_secs_f64() * 1e3)),
            tables: cells().filter_map(|cell| cell.tables).collect(),
            moved: cells().filter(|cell| cell.placed.to.is_some()).count(),
            loads: [load(0), load(1)],
        }
    };
    first.iter().enumerate().map(row).collect()
}

fn nodes_for_people(row: &Row) -> Value {
    let all: Vec<String> = row.tables.iter().map(|node| node.0.to_string()).collect();
    all.join(",").into()
}

fn per_second(of: Option<Summary>, unit: f64, pick: fn(Summary) -> f64) -> Value {
    Value::per_second(of.map(|of| pick(of) * unit))
}

fn columns() -> Vec<Column<Row>> {
    vec![
        column("workload", "", "", |row: &Row| row.workload.name().into()),
        column("scenario", "scenario", "", |row: &Row| row.scenario.into()),
        column("policy", "policy", "", |row: &Row| row.policy.into()),
        column("", "tables", "nodes on which page tables were asked for", nodes_for_people),
        column("table_nodes", "", "", |row: &Row| {
            Value::List(row.tables.iter().map(|node| Value::count(node.0)).collect())
        }),
        column("moved_runs", "moved", "runs in which the policy moved page tables", |row: &Row| {
            Value::count(row.moved)
        }),
        column("", "M/s", "million operations of all threads for each second", |row: &Row| {
            middle(row.rate)
        }),
        column("", "min to max", "", |row: &Row| span(row.rate)),
        column("", "/ LPLD", "time of an operation / that in LPLD, off", |row: &Row| {
            middle(row.to_base)
        }),
        column("", "min to max", "", |row: &Row| span(row.to_base)),
        column("", "p50", "ns of a single operation, with the clock's", |row: &Row| {
            middle(row.p50_ns)
        }),
        column("", "p99", "ns", |row: &Row| middle(row.p99_ns)),
        column(
            "",
            "placing",
            "ms with the start of a prober or the making of a view",
            |row: &Row| middle(row.placing),
        ),
        column("per_s", "", "", |row: &Row| per_second(row.rate, 1e6, |of| of.median)),
        column("per_s_min", "", "", |row: &Row| per_second(row.rate, 1e6, |of| of.min)),
        column("per_s_max", "", "", |row: &Row| per_second(row.rate, 1e6, |of| of.max)),
        column("to_lpld_ratio", "", "", |row: &Row| ratio(row.to_base, |of| of.median)),
        column("to_lpld_ratio_min", "", "", |row: &Row| ratio(row.to_base, |of| of.min)),
        column("to_lpld_ratio_max", "", "", |row: &Row| ratio(row.to_base, |of| of.max)),
        column("p50_ns", "", "", |row: &Row| ns(row.p50_ns, 1.0, |of| of.median)),
        column("p50_ns_min", "", "", |row: &Row| ns(row.p50_ns, 1.0, |of| of.min)),
        column("p50_ns_max", "", "", |row: &Row| ns(row.p50_ns, 1.0, |of| of.max)),
        column("p99_ns", "", "", |row: &Row| ns(row.p99_ns, 1.0, |of| of.median)),
        column("p99_ns_min", "", "", |row: &Row| ns(row.p99_ns, 1.0, |of| of.min)),
        column("p99_ns_max", "", "", |row: &Row| ns(row.p99_ns, 1.0, |of| of.max)),
        column("placing_ns", "", "", |row: &Row| ns(row.placing, 1e6, |of| of.median)),
        column("local_load_bytes_per_s", "", "", |row: &Row| {
            per_second(row.loads[0], 1e9, |of| of.median)
        }),
        column("remote_load_bytes_per_s", "", "", |row: &Row| {
            per_second(row.loads[1], 1e9, |of| of.median)
        }),
    ]
}

/// A decision of a policy.
struct Decided {
    workload: Workload,
    scenario: &'static str,
    policy: &'static str,
    to: Option<NodeId>,
    reason: String,
}

impl Decided {
    fn of(workload: Workload, cell: &Cell) -> Decided {
        Decided {
            workload,
            scenario: cell.scenario.name,
            policy: cell.policy.name(),
            to: cell.placed.to,
            reason: cell.placed.reason.clone(),
        }
    }
}

fn decision_columns() -> Vec<Column<Decided>> {
    vec![
        column("workload", "", "", |row: &Decided| row.workload.name().into()),
        column("scenario", "scenario", "", |row: &Decided| row.scenario.into()),
        column("policy", "policy", "", |row: &Decided| row.policy.into()),
        column("to_node", "", "", |row: &Decided| {
            row.to.map_or(Value::Unknown, |node| Value::count(node.0))
        }),
        column("", "to", "the node to which page tables were moved", |row: &Decided| {
            row.to.map_or("stay".into(), |node| node.0.to_string().into())
        }),
        column("reason", "reason", "", |row: &Decided| row.reason.clone().into()),
    ]
}
