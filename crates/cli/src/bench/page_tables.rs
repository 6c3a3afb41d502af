//! `pageleap bench page-tables`: what it costs to move page tables, and leave the data where it is.

use clap::Args;
use pageleap::topology::Topology;
use pageleap::{EngineName, NodeId, PageSize};
use pageleap_measure::document::{Body, Column, Document, Section, Table, Value, column, fact};
use pageleap_measure::memcpy::BaseLine;
use pageleap_measure::statistics::Summary;
use pageleap_measure::tables::{Beside, Pair, Run, Scene};
use pageleap_measure::views::{self as measured_views, Bench};

use super::summaries::{middle, ns, ratio, span};
use super::views;
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
/// Exit code: 0 measured; 1 a failure, or lost writes; 2 a request that makes no sense; 130
/// interrupted by Ctrl-C.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct PageTablesArgs {
    /// Bytes of the region
    #[arg(long, value_name = "SIZE", default_value = "1g", value_parser = bytes::region_size)]
    pub size: u64,

    /// The node of the data [default: the first with memory]
    #[arg(long, value_name = "NODE")]
    pub from: Option<u32>,

    /// The node to which page tables move [default: another node, if there is one]
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

    /// Print one JSON object to standard output instead of text
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub exports: Exports,
}

const EXAMPLES: &str = "\
Examples:
  pageleap bench page-tables
      1 GB on the first node, with up to 4 views
  pageleap bench page-tables --size 256m --views 16
      what up to 16 views cost
  pageleap bench page-tables --size 256m --from 0 --to 1 --views 0 --json > tables.json
      the data lies on node 0, and its page tables move to node 1 and back; no views are made";

/// Measures, prints and exports the runs that are complete.
pub fn run(args: &PageTablesArgs) -> Result<(), Stop> {
    let exports = args.exports.open()?;
    interrupt::install();
    let nodes = machine::nodes(PageSize::Base)?;
    let (from, to) = machine::choose_nodes(&nodes, args.from, args.to)?;
    let topology = Topology::read()?;
    let home = topology.nearest_with_cpus(NodeId(from));
    let size = args.size.next_multiple_of(2 << 20);
    let view_nodes = views::nodes(&topology, args.views);
    check_memory(&topology, from, size, view_nodes.len())?;
    let mut rows =
        Rows { size, from, to, engine: None, runs: Vec::new(), view_nodes, views: Vec::new() };
    let measured = measure(args, home, &mut rows);
    let printed = match rows.runs.is_empty() {
        true => Ok(()),
        false => exports.print(&document(&rows, args.views)?, args.json),
    };
    let lost = rows.lost();
    if lost > 0 {
        printed?;
        return Err(anyhow::anyhow!("LOST: {lost} words do not have their last value").into());
    }
    export::conclude(measured, printed)
}

/// Refuses a region for which the node has too little memory.
fn check_memory(topology: &Topology, node: u32, size: u64, views: usize) -> Result<(), Stop> {
    let free = topology.node(NodeId(node))?.free_bytes;
    // Two pools, and a shadow of every word.
    let scene = size.saturating_mul(3);
    if scene.saturating_add(measured_views::bytes_beside(size, views)) <= free {
        return Ok(());
    }
    let fits = (free / 4) >> 20;
    let why = format!("node {node} has too little free memory; use --size {fits}m or less");
    Err(Refusal::new(why).into())
}

/// Adds runs to the rows until all are done, or a signal arrives.
fn measure(args: &PageTablesArgs, home: NodeId, rows: &mut Rows) -> Result<(), Stop> {
    let stopped = || interrupt::received().is_some();
    let (runs, with_views) = (usize::from(args.runs), !rows.view_nodes.is_empty());
    let mut steps = Steps::new("moving page tables", runs, 1 + usize::from(with_views));
    steps.now("filling memory".to_owned());
    let mut scene = Scene::new(rows.size, NodeId(rows.from), [home, NodeId(rows.to)])?;
    rows.engine = Some(scene.engine());
    for nth in 0..runs {
        steps.now("memcpy, page tables, leap".to_owned());
        let Some(run) = scene.run(nth, &stopped)? else { break };
        steps.done();
        let ratio = run.pairs[0].ratio();
        rows.runs.push(run);
        if with_views {
            steps.now("views".to_owned());
            let Some(run) = Bench::new(&mut scene, &rows.view_nodes)?.run(nth, &stopped)? else {
                break;
            };
            steps.done();
            rows.views.push(run);
        }
        steps.row_done(&format!("page tables / leap {ratio:.3}"));
        interrupt::stop_if_received(|| format!("{} runs were measured", rows.runs.len()))?;
    }
    interrupt::stop_if_received(|| format!("{} runs were measured", rows.runs.len()))
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

fn document(rows: &Rows, asked_views: u8) -> Result<Document, Stop> {
    let node_numbers = rows.view_nodes.iter().map(|node| Value::count(node.0)).collect();
    let facts = vec![
        fact("kernel", "Linux", machine::kernel_release()?),
        fact("data_node", "node of the data", Value::count(rows.from)),
        fact("to_node", "node of the page tables", Value::count(rows.to)),
        fact("size_bytes", "region", Value::Bytes(rows.size)),
        fact("part_bytes", "", Value::Bytes(measured_views::part_bytes(rows.size))),
        fact("runs", "runs", Value::count(rows.runs.len())),
        fact("views_at_most", "views, at most", Value::count(rows.view_nodes.len())),
        fact("view_nodes", "", Value::List(node_numbers)),
        fact(
            "engine",
            "engine of the leap",
            rows.engine.map_or(Value::Unknown, |engine| engine.name().into()),
        ),
    ];
    let all: Vec<Row> = (0..Beside::ALL.len()).map(|at| rows.row(at)).collect();
    let table = Table::of(&columns(), &all, |_| String::new());
    let mut notes = Vec::new();
    if rows.from == rows.to {
        let text = "One node: page tables were made anew on the node where they lay. The gain of near \
                    page tables cannot be seen here.";
        notes.push(text.to_owned());
    }
    let mut sections = vec![
        Section::new("", "Machine", Body::Facts(facts)),
        Section::new("rows", "Page tables alone, and with the data (medians)", Body::Table(table)),
    ];
    if !rows.views.is_empty() {
        sections.extend(views::sections(&rows.views, rows.size));
    } else if asked_views > 0 && rows.view_nodes.is_empty() {
        notes.push("Views: not measured: no node has CPUs and memory.".to_owned());
    }
    if !notes.is_empty() {
        sections.push(Section::new("notes", "Notes", Body::Notes(notes)));
    }
    Ok(Document { sections })
}
