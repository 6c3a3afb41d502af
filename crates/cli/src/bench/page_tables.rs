//! `pageleap bench page-tables`: what it costs to move page tables, and leave the data where it is.

use clap::Args;
use pageleap::topology::Topology;
use pageleap::{EngineName, NodeId, PageSize};
use pageleap_measure::document::{Body, Column, Document, Section, Table, Value, column, fact};
use pageleap_measure::figures::three_digits;
use pageleap_measure::memcpy::BaseLine;
use pageleap_measure::statistics::Summary;
use pageleap_measure::tables::{Beside, Pair, Run, Scene};

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
/// one thread, and begin in turns. The way back is not measured. Every word is compared with what was
/// written to it.
///
/// On a machine with one node page tables are made anew on the same node. That costs the same, and
/// shows no gain.
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

    /// Print one JSON object to standard output instead of text
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub exports: Exports,
}

const EXAMPLES: &str = "\
Examples:
  pageleap bench page-tables
      1 GB on the first node
  pageleap bench page-tables --size 256m --from 0 --to 1 --json > tables.json
      the data lies on node 0, and its page tables move to node 1 and back";

/// Measures, prints and exports the runs that are complete.
pub fn run(args: &PageTablesArgs) -> Result<(), Stop> {
    let exports = args.exports.open()?;
    interrupt::install();
    let nodes = machine::nodes(PageSize::Base)?;
    let (from, to) = machine::choose_nodes(&nodes, args.from, args.to)?;
    let topology = Topology::read()?;
    let home = topology.nearest_with_cpus(NodeId(from));
    let size = args.size.next_multiple_of(2 << 20);
    let free = topology.node(NodeId(from))?.free_bytes;
    // Two pools, and a shadow of every word.
    if size.saturating_mul(3) > free {
        let fits = (free / 4) >> 20;
        let why = format!("node {from} has too little free memory; use --size {fits}m or less");
        return Err(Refusal::new(why).into());
    }
    let mut runs = Vec::new();
    let mut engine = None;
    let measured = (|| {
        let mut steps = Steps::new("moving page tables", usize::from(args.runs), 1);
        steps.now("filling memory".to_owned());
        let mut scene = Scene::new(size, NodeId(from), [home, NodeId(to)])?;
        engine = Some(scene.engine());
        for nth in 0..usize::from(args.runs) {
            steps.now("memcpy, page tables, leap".to_owned());
            let Some(run) = scene.run(nth, &|| interrupt::received().is_some())? else { break };
            steps.done();
            steps.row_done(&format!("page tables / leap {:.3}", run.pairs[0].ratio()));
            runs.push(run);
            interrupt::stop_if_received(|| format!("{} runs were measured", runs.len()))?;
        }
        interrupt::stop_if_received(|| format!("{} runs were measured", runs.len()))
    })();
    let rows = Rows { size, from, to, engine, runs };
    let printed = match rows.runs.is_empty() {
        true => Ok(()),
        false => exports.print(&document(&rows)?, args.json),
    };
    let lost: u64 = rows.runs.iter().flat_map(|run| &run.pairs).map(Pair::lost).sum();
    if lost > 0 {
        printed?;
        return Err(anyhow::anyhow!("LOST: {lost} words do not have their last value").into());
    }
    export::conclude(measured, printed)
}

/// What was measured.
struct Rows {
    size: u64,
    from: u32,
    to: u32,
    engine: Option<EngineName>,
    runs: Vec<Run>,
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

fn span(of: Option<Summary>) -> Value {
    let text = |of: Summary| format!("{} to {}", three_digits(of.min), three_digits(of.max));
    of.map_or(Value::Unknown, |of| text(of).into())
}

fn middle(of: Option<Summary>) -> Value {
    of.map_or(Value::Unknown, |of| three_digits(of.median).into())
}

fn ratio(of: Option<Summary>, pick: fn(Summary) -> f64) -> Value {
    Value::ratio(of.map(pick))
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
        column("memcpy_ns_per_gb", "", "", |row: &Row| ns(row.memcpy, 1e6)),
        column("leap_ns_per_gb", "", "", |row: &Row| ns(row.leap, 1e6)),
        column("tables_ns_per_gb", "", "", |row: &Row| ns(row.tables, 1e6)),
        column("longest_area_ns", "", "", |row: &Row| ns(row.window, 1e3)),
    ]
}

fn ns(of: Option<Summary>, unit_ns: f64) -> Value {
    Value::ns(of.map(|of| (of.median * unit_ns) as u64))
}

fn document(rows: &Rows) -> Result<Document, Stop> {
    let facts = vec![
        fact("kernel", "Linux", machine::kernel_release()?),
        fact("data_node", "node of the data", Value::count(rows.from)),
        fact("to_node", "node of the page tables", Value::count(rows.to)),
        fact("size_bytes", "region", Value::Bytes(rows.size)),
        fact("runs", "runs", Value::count(rows.runs.len())),
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
    if !notes.is_empty() {
        sections.push(Section::new("notes", "Notes", Body::Notes(notes)));
    }
    Ok(Document { sections })
}
