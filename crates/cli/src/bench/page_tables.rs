//! `pageleap bench page-tables`: what it costs to move page tables, and leave the data where it is.

use clap::{Args, ValueEnum};
use pageleap::topology::Topology;
use pageleap::{EngineName, NodeId, PageSize};
use pageleap_measure::document::{Body, Column, Document, Section, Table, Value, column, fact};
use pageleap_measure::memcpy::BaseLine;
use pageleap_measure::scenarios::Cast;
use pageleap_measure::statistics::Summary;
use pageleap_measure::tables::{Beside, Pair, Run, Scene};
use pageleap_measure::views::{self as measured_views, Bench};

use super::scenarios::{self, Scenery};
use super::summaries::{middle, ns, ratio, span};
use super::views;
use crate::environment::Environment;
use crate::export::Exports;
use crate::machine;
use crate::progress::Steps;
use crate::stop::{Refusal, Stop};
use crate::{bytes, export, interrupt};

/// Compare moving page tables alone with leaping the data and with a memcpy.
///
/// A region of base pages lies on one node. Each run times a memcpy of its bytes by one thread, and
/// then, at rest and beside one thread that writes at full speed, a move of its page tables to
/// another node, and a leap of its data to other frames of its own node by stop-and-copy. Both have
/// one thread, and begin in turns. The way back is not measured. Every word is compared with what
/// was written to it.
///
/// On a machine with one node page tables are made anew on the same node. That costs the same, and
/// shows no gain.
///
/// Each run also measures views of the region (`replicate`) against their number: 0, 1, 2, 4 and so
/// on, up to --views, in an order that rotates with the runs. It times making them, a leap of the
/// whole region at rest, discarding and backing a part, and growing a small region by as much.
/// Beside that stand mmap, mprotect, mremap and munmap of as many plain mappings of one file.
///
/// Last come workloads that miss the TLB, as threads of this process: GUPS, probes of a hash join,
/// XSBench's look-ups and look-ups in a B+-tree. They run in the scenarios LPLD, LPLDI, RPLDLI,
/// RPLDRI and RPLDRILI of the paper "Latency-aware page-table migration": page tables begin on the
/// local or the remote node (--from, --to), and threads that copy memory use up the bandwidth of
/// either, or of both. In each, page tables stay (off), or move while the threads work, as
/// Auto-PTM, the paper's Algorithm 1 or the library's own rule says (auto-ptm, algorithm-1,
/// latency-aware), or the threads use a view. Each answer is checked.
///
/// Exit code: 0 measured; 1 a failure, lost writes, or wrong answers; 2 a request that makes no
/// sense; 130 interrupted by Ctrl-C.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct PageTablesArgs {
    /// Bytes of the region
    #[arg(long, value_name = "SIZE", default_value = "1g", value_parser = bytes::region_size)]
    pub size: u64,

    /// The node of the data [default: the first with memory]
    #[arg(long, value_name = "NODE")]
    pub from: Option<u32>,

    /// The node to which page tables move, and the remote one of the scenarios [default: another
    /// node; for the scenarios the farthest one with CPUs]
    #[arg(long, value_name = "NODE")]
    pub to: Option<u32>,

    /// Runs; the medians count
    #[arg(long, value_name = "N", default_value = "7")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,

    /// The most views of the region, each for a node with CPUs, and the same nodes again where
    /// these are fewer; 0 leaves views out
    #[arg(long, value_name = "N", default_value = "4")]
    #[arg(value_parser = clap::value_parser!(u8).range(..=i64::from(views::MOST)))]
    pub views: u8,

    /// Measure these parts only [default: all]
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    pub only: Vec<Part>,

    /// Run these workloads in the scenarios [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub workloads: Vec<scenarios::Name>,

    /// Threads of a workload, one for each core of the local node [default: half of the cores; the
    /// others are for interference]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,

    /// Print one JSON object to standard output instead of text
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub exports: Exports,
}

/// A part of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Moving page tables, beside leaps and memcpys
    Costs,
    /// Views of a region, against their number
    Views,
    /// Workloads that miss the TLB, beside interference
    Scenarios,
}

impl PageTablesArgs {
    fn has(&self, part: Part) -> bool {
        let is_wanted = self.only.is_empty() || self.only.contains(&part);
        is_wanted && (part != Part::Views || self.views > 0)
    }
}

const EXAMPLES: &str = "\
Examples:
  pageleap bench page-tables
      1 GB on the first node, with up to 4 views, and all scenarios
  pageleap bench page-tables --only scenarios --workloads gups,btree --size 8g
      two workloads in all scenarios, without the costs of moves and views
  pageleap bench page-tables --size 256m --views 16
      what up to 16 views cost
  pageleap bench page-tables --size 256m --from 0 --to 1 --only costs --json > tables.json
      the data lies on node 0, and its page tables move to node 1 and back";

/// Measures, prints and exports the runs that are complete.
pub fn run(args: &PageTablesArgs) -> Result<(), Stop> {
    let exports = args.exports.open()?;
    interrupt::install();
    let environment = Environment::start();
    let nodes = machine::nodes(PageSize::Base)?;
    let (from, to) = machine::choose_nodes(&nodes, args.from, args.to)?;
    let topology = Topology::read()?;
    let home = topology.nearest_with_cpus(NodeId(from));
    let size = args.size.next_multiple_of(2 << 20);
    let view_nodes = match args.has(Part::Views) {
        true => views::nodes(&topology, args.views),
        false => Vec::new(),
    };
    let remote = args.to.map(NodeId);
    let cast = scenarios::cast(&topology, NodeId(from), remote, args.threads)
        .filter(|_| args.has(Part::Scenarios));
    check_memory(args, &topology, from, view_nodes.len(), cast.as_ref())?;
    let mut rows =
        Rows { size, from, to, engine: None, runs: Vec::new(), view_nodes, views: Vec::new() };
    let mut scenery = cast.map(|cast| Scenery::new(cast, &topology, size));
    let measured = measure(args, home, &mut rows).and_then(|()| match &mut scenery {
        Some(scenery) => {
            let workloads = scenarios::workloads(&args.workloads);
            scenery.measure(size, &workloads, usize::from(args.runs))
        }
        None => Ok(()),
    });
    let has_runs = !rows.runs.is_empty()
        || !rows.views.is_empty()
        || scenery.as_ref().is_some_and(|scenery| scenery.complete() > 0);
    let printed = match has_runs {
        true => {
            let document = document(args, &rows, scenery.as_ref())?;
            exports.print(&environment.add_to(document), args.json)
        }
        false => Ok(()),
    };
    let lost = rows.lost();
    if lost > 0 {
        printed?;
        return Err(anyhow::anyhow!("LOST: {lost} words do not have their last value").into());
    }
    let wrong = scenery.as_ref().map_or(0, Scenery::wrong);
    if wrong > 0 {
        printed?;
        return Err(anyhow::anyhow!("WRONG: {wrong} answers of the workloads").into());
    }
    export::conclude(measured, printed)
}

/// Refuses a region for which a node has too little memory.
fn check_memory(
    args: &PageTablesArgs,
    topology: &Topology,
    node: u32,
    views: usize,
    cast: Option<&Cast>,
) -> Result<(), Stop> {
    let size = args.size.next_multiple_of(2 << 20);
    let free = topology.node(NodeId(node))?.free_bytes;
    // Each part gives its memory back before the next one. Costs and views need two pools and a
    // shadow of every word; XSBench needs a list of energies, of some 5 %.
    let of_views = measured_views::bytes_beside(size, views);
    let has_scenes = args.has(Part::Costs) || args.has(Part::Views);
    let scene = if has_scenes { size.saturating_mul(3).saturating_add(of_views) } else { 0 };
    let scenarios = cast.map_or(0, |cast| {
        scenarios::region_bytes(size).saturating_add(size / 16) + cast.local_bytes_beside()
    });
    if scene.max(scenarios) > free {
        let fits = if has_scenes { free / 4 } else { free / 2 } >> 20;
        let why = format!("node {node} has too little free memory; use --size {fits}m or less");
        return Err(Refusal::new(why).into());
    }
    let Some(load) = cast.and_then(|cast| cast.remote_load.as_ref()) else { return Ok(()) };
    if load.bytes > topology.node(load.node)?.free_bytes {
        let why = format!(
            "{} has too little free memory for interference, {} MB; choose another one by --to, or \
             use --only costs,views",
            load.node,
            load.bytes >> 20
        );
        return Err(Refusal::new(why).into());
    }
    Ok(())
}

/// Adds runs to the rows until all are done, or a signal arrives.
fn measure(args: &PageTablesArgs, home: NodeId, rows: &mut Rows) -> Result<(), Stop> {
    let stopped = || interrupt::received().is_some();
    let (runs, with_views) = (usize::from(args.runs), !rows.view_nodes.is_empty());
    let with_costs = args.has(Part::Costs);
    if !with_costs && !with_views {
        return Ok(());
    }
    let parts = usize::from(with_costs) + usize::from(with_views);
    let mut steps = Steps::new("moving page tables", runs, parts);
    steps.now("filling memory".to_owned());
    let mut scene = Scene::new(rows.size, NodeId(rows.from), [home, NodeId(rows.to)])?;
    rows.engine = Some(scene.engine());
    for nth in 0..runs {
        let mut done = Vec::new();
        if with_costs {
            steps.now("memcpy, page tables, leap".to_owned());
            let Some(run) = scene.run(nth, &stopped)? else { break };
            steps.done();
            done.push(format!("page tables / leap {:.3}", run.pairs[0].ratio()));
            rows.runs.push(run);
        }
        if with_views {
            steps.now("views".to_owned());
            let Some(run) = Bench::new(&mut scene, &rows.view_nodes)?.run(nth, &stopped)? else {
                break;
            };
            steps.done();
            done.push(format!("{} numbers of views", run.figures.len()));
            rows.views.push(run);
        }
        steps.row_done(&done.join(", "));
        stop_if_received(rows)?;
    }
    stop_if_received(rows)
}

fn stop_if_received(rows: &Rows) -> Result<(), Stop> {
    let complete = rows.runs.len().max(rows.views.len());
    interrupt::stop_if_received(|| format!("{complete} runs were measured"))
}

/// The complete runs, with the settings of the command.
struct Rows {
    size: u64,
    from: u32,
    to: u32,
    engine: Option<EngineName>,
    runs: Vec<Run>,
    /// A node for each view, at most.
    view_nodes: Vec<NodeId>,
    views: Vec<measured_views::Run>,
}

/// The moves beside one load. Times are for each GB.
struct Row {
    beside: Beside,
    memcpy: Option<Summary>,
    tables: Option<Summary>,
    leap: Option<Summary>,
    ratio: Option<Summary>,
    to_memcpy: Option<Summary>,
    window: Option<Summary>,
}

impl Rows {
    /// Words that did not have their last value.
    fn lost(&self) -> u64 {
        let pairs: u64 = self.runs.iter().flat_map(|run| &run.pairs).map(Pair::lost).sum();
        pairs + self.views.iter().map(|run| run.lost).sum::<u64>()
    }

    fn row(&self, at: usize) -> Row {
        let base = BaseLine::of(&self.runs.iter().map(|run| run.copies).collect::<Vec<_>>());
        let ms = |ns: u64| ns as f64 / 1e6 * (1 << 30) as f64 / self.size as f64;
        let of = |value: &dyn Fn(&Run, &Pair) -> Option<f64>| {
            let all: Option<Vec<f64>> =
                self.runs.iter().map(|run| value(run, &run.pairs[at])).collect();
            all.and_then(|all| Summary::of(&all))
        };
        let memcpy_ns = |run: &Run| Some(base?.copy_in(&run.copies).ns);
        let tables_ns = |pair: &Pair| pair.tables.leap.report.migrate_ns;
        Row {
            beside: Beside::ALL[at],
            memcpy: of(&|run, _| memcpy_ns(run).map(ms)),
            tables: of(&|_, pair| Some(ms(tables_ns(pair)))),
            leap: of(&|_, pair| Some(ms(pair.leap.leap.report.migrate_ns))),
            ratio: of(&|_, pair| Some(pair.ratio())),
            to_memcpy: of(&|run, pair| Some(tables_ns(pair) as f64 / memcpy_ns(run)? as f64)),
            window: of(&|_, pair| Some(pair.tables.window_ns(1.0)? as f64 / 1e3)),
        }
    }
}

fn columns() -> Vec<Column<Row>> {
    vec![
        column(
            "beside",
            "beside",
            "the load meanwhile; a memcpy always runs alone",
            |row: &Row| row.beside.name().into(),
        ),
        column("", "memcpy", "ms for each GB, by one thread", |row: &Row| middle(row.memcpy)),
        column("", "leap", "ms for each GB: the data moves", |row: &Row| middle(row.leap)),
        column(
            "",
            "tables",
            "ms for each GB: page tables move, and the data stays",
            |row: &Row| middle(row.tables),
        ),
        column("", "min to max", "", |row: &Row| span(row.tables)),
        column("", "/ leap", "tables / leap in the same run", |row: &Row| middle(row.ratio)),
        column("", "min to max", "", |row: &Row| span(row.ratio)),
        column("", "/ memcpy", "tables / memcpy in the same run", |row: &Row| {
            middle(row.to_memcpy)
        }),
        column(
            "",
            "area",
            "the longest that an area took, in us (median of the runs)",
            |row: &Row| middle(row.window),
        ),
        column("tables_to_leap_ratio", "", "", |row: &Row| ratio(row.ratio, |of| of.median)),
        column("tables_to_leap_ratio_min", "", "", |row: &Row| ratio(row.ratio, |of| of.min)),
        column("tables_to_leap_ratio_max", "", "", |row: &Row| ratio(row.ratio, |of| of.max)),
        column("tables_to_memcpy_ratio", "", "", |row: &Row| ratio(row.to_memcpy, |of| of.median)),
        column("tables_to_memcpy_ratio_min", "", "", |row: &Row| ratio(row.to_memcpy, |of| of.min)),
        column("tables_to_memcpy_ratio_max", "", "", |row: &Row| ratio(row.to_memcpy, |of| of.max)),
        column("memcpy_ns_per_gb", "", "", |row: &Row| ns(row.memcpy, 1e6, |of| of.median)),
        column("leap_ns_per_gb", "", "", |row: &Row| ns(row.leap, 1e6, |of| of.median)),
        column("tables_ns_per_gb", "", "", |row: &Row| ns(row.tables, 1e6, |of| of.median)),
        column("longest_area_ns", "", "", |row: &Row| ns(row.window, 1e3, |of| of.median)),
    ]
}

fn document(
    args: &PageTablesArgs,
    rows: &Rows,
    scenery: Option<&Scenery>,
) -> Result<Document, Stop> {
    let runs = rows.runs.len().max(rows.views.len()).max(scenery.map_or(0, Scenery::runs));
    let node_numbers = rows.view_nodes.iter().map(|node| Value::count(node.0)).collect();
    let facts = vec![
        fact("kernel", "Linux", machine::kernel_release()?),
        fact("data_node", "node of the data", Value::count(rows.from)),
        fact("to_node", "node of the page tables", Value::count(rows.to)),
        fact("size_bytes", "region", Value::Bytes(rows.size)),
        fact("part_bytes", "", Value::Bytes(measured_views::part_bytes(rows.size))),
        fact("runs", "runs", Value::count(runs)),
        fact("views_at_most", "views, at most", Value::count(rows.view_nodes.len())),
        fact("view_nodes", "", Value::List(node_numbers)),
        fact(
            "engine",
            "engine of the leap",
            rows.engine.map_or(Value::Unknown, |engine| engine.name().into()),
        ),
    ];
    let mut sections = vec![Section::new("", "Machine", Body::Facts(facts))];
    let mut notes = Vec::new();
    if !rows.runs.is_empty() {
        let all: Vec<Row> = (0..Beside::ALL.len()).map(|at| rows.row(at)).collect();
        let table = Body::Table(Table::of(&columns(), &all, |_| String::new()));
        let title = "Page tables alone, and with the data (medians)";
        sections.push(Section::new("rows", title, table));
        if rows.from == rows.to {
            let text = "One node: page tables were made anew on the node where they lay. The gain of \
                        near page tables cannot be seen here.";
            notes.push(text.to_owned());
        }
    }
    if !rows.views.is_empty() {
        sections.extend(views::sections(&rows.views, rows.size));
    } else if args.has(Part::Views) && rows.view_nodes.is_empty() {
        notes.push("Views: not measured: no node has CPUs and memory.".to_owned());
    }
    match scenery {
        Some(scenery) => sections.extend(scenery.sections()),
        None if args.has(Part::Scenarios) => {
            notes.push(format!(
                "Scenarios: not measured: node {} has no CPU that this process may use, and the \
                 threads of a workload run where its data lies.",
                rows.from
            ));
        }
        None => {}
    }
    if !notes.is_empty() {
        sections.push(Section::new("notes", "Notes", Body::Notes(notes)));
    }
    Ok(Document { sections })
}
