//! Measured pairs of nodes as text and as JSON.

use pageleap::latency::Order;
use pageleap::topology::{Access, Topology};
use pageleap::{NodeId, PageSize};
use pageleap_measure::figures::{human_bytes, three_digits};
use pageleap_measure::matrix::{Figure, Kind, PAGES, Pair};
use serde::Serialize;

use super::measure::Measured;
use crate::output;

/// Most columns of a matrix whose cells have the smallest and the largest value, too.
const MAX_WITH_RANGE: usize = 4;
/// Bytes per second of a gigabyte per second.
const GB: f64 = 1e9;

/// Tables of what was measured: first matrices, as `numactl -H` prints distances.
pub fn text(measured: &Measured, topology: &Topology) -> String {
    let runs = match measured.runs {
        1 => "one run".to_owned(),
        runs => format!("medians of {runs} runs, with the smallest and the largest"),
    };
    let mut out = format!(
        "\nMeasured just now, {runs}. Rows: the node of the CPUs. Columns: the node of the memory.\n"
    );
    out += &latencies(measured);
    out += &bandwidths(measured);
    out += &by_threads(measured);
    out += &loaded(measured);
    out += &beside_firmware(measured, topology);
    out += &lay(measured);
    out + &left_out(measured)
}

/// The remarks on missing and doubtful figures, each with its pairs.
fn left_out(measured: &Measured) -> String {
    if measured.left_out.is_empty() {
        return String::new();
    }
    let mut out = "\nNot measured, or not as it should be\n".to_owned();
    for (sentence, pairs) in &measured.left_out {
        let pairs = match pairs.len() {
            all if all > 1 && all == measured.pairs.len() => "all pairs".to_owned(),
            _ => pairs.join(", "),
        };
        out += &output::hanging("  ", &format!("{pairs}: {sentence}"), output::terminal_columns());
    }
    out
}

fn latencies(measured: &Measured) -> String {
    let mut out = String::new();
    for order in [Order::Blocks, Order::Pages] {
        for page in PAGES {
            let cell = |pair: &Pair| pair.idle_ns(page, order);
            if measured.pairs.iter().all(|pair| cell(pair).is_none()) {
                continue;
            }
            let how = match order {
                Order::Blocks => "random within 256 KB, so that translations are in the TLB",
                Order::Pages => "another 4 KB each time, so that the TLB misses",
            };
            out += &format!("\nLatency of a load (ns), {page} pages; {how}\n");
            out += &matrix(measured, cell, |ns| format!("{ns:.0}"));
        }
    }
    out
}

fn bandwidths(measured: &Measured) -> String {
    let mut out = String::new();
    for kind in Kind::ALL {
        out += &format!("\nBandwidth (GB/s), {kind} by a thread on each CPU of the row\n");
        let cell = |pair: &Pair| pair.most(kind).map(|most| most.bytes_per_s);
        out += &matrix(measured, cell, |rate| three_digits(rate / GB));
    }
    out
}

/// A matrix of one figure.
fn matrix(
    measured: &Measured,
    cell: impl Fn(&Pair) -> Option<Figure>,
    shown: impl Fn(f64) -> String,
) -> String {
    let (from, to) = (nodes(measured, |pair| pair.from), nodes(measured, |pair| pair.to));
    let with_range = to.len() <= MAX_WITH_RANGE && measured.runs > 1;
    let figure = |figure: Figure| match with_range {
        true => format!("{} ({}-{})", shown(figure.median), shown(figure.min), shown(figure.max)),
        false => shown(figure.median),
    };
    let head = std::iter::once("node".to_owned()).chain(to.iter().map(|node| node.0.to_string()));
    let mut rows: Vec<Vec<String>> = vec![head.collect()];
    for from in from {
        let of =
            |to: &NodeId| measured.pair(from, *to).and_then(&cell).map_or("-".to_owned(), figure);
        rows.push(std::iter::once(from.0.to_string()).chain(to.iter().map(of)).collect());
    }
    aligned(&rows)
}

/// The bandwidth of each number of threads.
fn by_threads(measured: &Measured) -> String {
    let mut counts: Vec<usize> =
        measured.pairs.iter().flat_map(|pair| &pair.bandwidth).map(|one| one.threads).collect();
    counts.sort_unstable();
    counts.dedup();
    if counts.len() < 2 {
        return String::new();
    }
    let head = ["from", "to", ""].map(str::to_owned).into_iter();
    let mut rows: Vec<Vec<String>> =
        vec![head.chain(counts.iter().map(usize::to_string)).collect()];
    for pair in &measured.pairs {
        for kind in Kind::ALL {
            let cell = |count: &usize| {
                let mut all = pair.bandwidth.iter();
                let one = all.find(|one| one.kind == kind && one.threads == *count);
                one.map_or("-".to_owned(), |one| three_digits(one.bytes_per_s.median / GB))
            };
            let names = [pair.from.0.to_string(), pair.to.0.to_string(), kind.to_string()];
            rows.push(names.into_iter().chain(counts.iter().map(cell)).collect());
        }
    }
    format!("\nBandwidth (GB/s) by the number of threads\n{}", aligned(&rows))
}

/// Latency beside threads that read, at growing bandwidths.
fn loaded(measured: &Measured) -> String {
    let Some(curve) = measured.pairs.iter().map(|pair| &pair.loaded).find(|all| !all.is_empty())
    else {
        return String::new();
    };
    let shares = curve.iter().map(|point| format!("{:.0} %", point.share * 100.0));
    let head = ["from", "to", "", "alone"].map(str::to_owned).into_iter();
    let mut rows: Vec<Vec<String>> = vec![head.chain(shares).collect()];
    for pair in measured.pairs.iter().filter(|pair| !pair.loaded.is_empty()) {
        let alone = pair.idle_ns(pair.page, Order::Blocks);
        let alone = alone.map_or("-".to_owned(), |ns| format!("{:.0}", ns.median));
        let names = [pair.from.0.to_string(), pair.to.0.to_string(), "GB/s".into(), "0".into()];
        let rates = pair.loaded.iter().map(|point| three_digits(point.bytes_per_s.median / GB));
        rows.push(names.into_iter().chain(rates).collect());
        let names = [String::new(), String::new(), "ns".into(), alone];
        let ns = pair.loaded.iter().map(|point| format!("{:.0}", point.ns.median));
        rows.push(names.into_iter().chain(ns).collect());
    }
    format!(
        "\nLatency under load: of a load beside threads on the other cores of its node, which are asked \
         to read a share of what they can\n{}",
        aligned(&rows)
    )
}

/// The firmware's figures for a pair: those of CPUs, if it tells them apart.
fn firmware<'a>(topology: &'a Topology, pair: &Pair) -> Option<&'a Access> {
    let of_pair = |access: &&Access| access.initiators.contains(&pair.from);
    let access = &topology.node(pair.to).ok()?.access;
    access.iter().filter(of_pair).max_by_key(|access| access.class)
}

fn beside_firmware(measured: &Measured, topology: &Topology) -> String {
    let head = ["from", "to", "latency", "firmware", "read", "firmware", "write", "firmware"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for pair in &measured.pairs {
        let Some(access) = firmware(topology, pair) else { continue };
        let ns = pair.idle_ns(pair.page, Order::Blocks).map(|ns| ns.median);
        let rate = |kind| pair.most(kind).map(|most| most.bytes_per_s.median / GB);
        let told = |value: Option<u64>, by: f64| value.map(|value| value as f64 / by);
        let cells = [
            (ns, "ns"),
            (told(access.read_latency_ns, 1.0), "ns"),
            (rate(Kind::Read), "GB/s"),
            (told(access.read_bandwidth_mb_per_s, 1e3), "GB/s"),
            (rate(Kind::Write), "GB/s"),
            (told(access.write_bandwidth_mb_per_s, 1e3), "GB/s"),
        ];
        let cell = |(value, unit): (Option<f64>, &str)| {
            value.map_or("-".to_owned(), |value| format!("{} {unit}", three_digits(value)))
        };
        let names = [pair.from.0.to_string(), pair.to.0.to_string()];
        rows.push(names.into_iter().chain(cells.map(cell)).collect());
    }
    match rows.len() {
        1 => String::new(),
        _ => format!("\nMeasured, and as the firmware says (HMAT)\n{}", aligned(&rows)),
    }
}

/// Where the buffers lay.
fn lay(measured: &Measured) -> String {
    let mut buffers = Vec::new();
    for page in PAGES {
        let lays = measured.pairs.iter().flat_map(|pair| &pair.lay).filter(|lay| lay.0 == page);
        let Some(most) = lays.map(|lay| lay.1.bytes).max() else { continue };
        let bytes = human_bytes(most as f64);
        buffers.push(format!("{bytes} of {page} pages"));
    }
    format!(
        "\nBuffers of each pair: {}. The kernel says of each page that it lay on the node of the \
         column.\n",
        buffers.join(", then ")
    ) + "Page tables were asked for on the node of the row, if it has memory; the kernel does not say \
           where it has put them.\n"
}

fn nodes(measured: &Measured, of: impl Fn(&Pair) -> NodeId) -> Vec<NodeId> {
    let mut nodes: Vec<NodeId> = measured.pairs.iter().map(of).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes
}

fn aligned(rows: &[Vec<String>]) -> String {
    output::aligned(rows, "", |_, head| head.is_empty())
}

/// The measured part of the object of `--json`. Latencies are in nanoseconds, bandwidths in bytes per
/// second.
#[derive(Serialize)]
pub struct JsonMeasured<'a> {
    /// Runs of each figure.
    runs: usize,
    /// By initiator and target.
    pairs: Vec<JsonPair>,
    /// Remarks on missing and doubtful figures.
    left_out: Vec<JsonLeftOut<'a>>,
}

#[derive(Serialize)]
struct JsonLeftOut<'a> {
    /// A sentence.
    reason: &'a str,
    /// The pairs, such as `node 0 to node 1`.
    pairs: &'a [String],
}

#[derive(Serialize)]
struct JsonPair {
    /// The node of the CPUs.
    from: u32,
    /// The node of the memory.
    to: u32,
    /// Latency of loads that nothing disturbs.
    idle: Vec<JsonIdle>,
    /// Bandwidth by kind and number of threads.
    bandwidth: Vec<JsonBandwidth>,
    /// Latency beside threads that read.
    loaded: Vec<JsonLoaded>,
    /// Threads that read meanwhile.
    injectors: usize,
    /// The kind of pages for bandwidth and for latency under load.
    page: String,
    /// Where the buffers lay.
    buffers: Vec<JsonBuffers>,
    /// The firmware's figures (HMAT) for this pair; null if it has none.
    firmware: Option<JsonFirmware>,
}

/// The median of the runs, the smallest and the largest.
#[derive(Serialize)]
struct JsonFigure {
    median: f64,
    min: f64,
    max: f64,
}

#[derive(Serialize)]
struct JsonIdle {
    page: String,
    /// `blocks`: random within 256 KB; `pages`: another page of 4 KB each time.
    order: &'static str,
    ns: JsonFigure,
}

#[derive(Serialize)]
struct JsonBandwidth {
    kind: String,
    threads: usize,
    bytes_per_s: JsonFigure,
}

#[derive(Serialize)]
struct JsonLoaded {
    /// The bandwidth that the threads were asked for, as a share of the most that they can read.
    share: f64,
    /// The same in bytes per second; null for no limit.
    asked_bytes_per_s: Option<f64>,
    bytes_per_s: JsonFigure,
    ns: JsonFigure,
}

#[derive(Serialize)]
struct JsonBuffers {
    page: String,
    bytes: u64,
    /// Pages that the kernel has on the target: all of them.
    pages: u64,
    /// The node on which page tables were asked for; null for a node of CPUs without memory. The
    /// kernel does not say where it has put them.
    page_tables_asked: Option<u32>,
}

#[derive(Serialize)]
struct JsonFirmware {
    class: u32,
    read_latency_ns: Option<u64>,
    write_latency_ns: Option<u64>,
    read_bandwidth_mb_per_s: Option<u64>,
    write_bandwidth_mb_per_s: Option<u64>,
}

impl<'a> JsonMeasured<'a> {
    pub fn of(measured: &'a Measured, topology: &Topology) -> JsonMeasured<'a> {
        let pairs = measured.pairs.iter().map(|pair| JsonPair::of(pair, topology)).collect();
        let left_out = measured.left_out.iter();
        let left_out = left_out.map(|(reason, pairs)| JsonLeftOut { reason, pairs });
        JsonMeasured { runs: measured.runs, pairs, left_out: left_out.collect() }
    }
}

impl JsonPair {
    fn of(pair: &Pair, topology: &Topology) -> JsonPair {
        let idle = pair.idle.iter().map(|idle| JsonIdle {
            page: idle.page.to_string(),
            order: if idle.order == Order::Blocks { "blocks" } else { "pages" },
            ns: idle.ns.into(),
        });
        let bandwidth = pair.bandwidth.iter().map(|one| JsonBandwidth {
            kind: one.kind.to_string(),
            threads: one.threads,
            bytes_per_s: one.bytes_per_s.into(),
        });
        let loaded = pair.loaded.iter().map(|point| JsonLoaded {
            share: point.share,
            asked_bytes_per_s: point.asked_bytes_per_s,
            bytes_per_s: point.bytes_per_s.into(),
            ns: point.ns.into(),
        });
        let buffers = pair.lay.iter().map(|(page, lay): &(PageSize, _)| JsonBuffers {
            page: page.to_string(),
            bytes: lay.bytes,
            pages: lay.pages,
            page_tables_asked: lay.page_tables.map(|node| node.0),
        });
        let firmware = firmware(topology, pair).map(|access| JsonFirmware {
            class: access.class,
            read_latency_ns: access.read_latency_ns,
            write_latency_ns: access.write_latency_ns,
            read_bandwidth_mb_per_s: access.read_bandwidth_mb_per_s,
            write_bandwidth_mb_per_s: access.write_bandwidth_mb_per_s,
        });
        JsonPair {
            from: pair.from.0,
            to: pair.to.0,
            idle: idle.collect(),
            bandwidth: bandwidth.collect(),
            loaded: loaded.collect(),
            injectors: pair.injectors,
            page: pair.page.to_string(),
            buffers: buffers.collect(),
            firmware,
        }
    }
}

impl From<Figure> for JsonFigure {
    fn from(Figure { median, min, max }: Figure) -> JsonFigure {
        JsonFigure { median, min, max }
    }
}
