//! `pageleap topology`: shows what the kernel says about memory nodes. It prints a table and a
//! picture of the distances, or JSON.
//!
//! The files may be hostile. So the command prints only numbers and the library's errors, which
//! leave out control characters.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use pageleap::NodeId;
use pageleap::topology::{Access, Node, SysFiles, Topology, id_list};
use pageleap_measure::figures::human_bytes;
use serde::Serialize;

use crate::output;
use crate::stop::Stop;
use crate::sysroot;

/// Widest list of CPUs in the table. `--json` has all CPUs.
const MAX_LIST: usize = 24;
/// Most nodes in a picture with numbers. More nodes are drawn without numbers.
const MAX_NUMBERED: usize = 16;
/// Most nodes in a picture. More nodes are not drawn.
const MAX_DRAWN: usize = 64;
/// Shades from the node itself to the farthest node.
const SHADES: [char; 5] = ['·', '░', '▒', '▓', '█'];

/// Show memory nodes: CPUs, free memory, huge pages, distances, and which nodes this process may
/// use.
///
/// The command reads sysfs and procfs, changes nothing, and needs no privilege.
///
/// Exit code: 0 shown; 1 nodes, CPUs or memory cannot be read; 2 nodes that do not exist, or a
/// folder that cannot be entered.
#[derive(Args, Clone, Debug)]
pub struct TopologyArgs {
    /// Print one JSON object to standard output instead of text
    #[arg(long)]
    pub json: bool,

    /// Read sys and proc below this folder instead of /, such as a container's or a recorded
    /// machine's
    #[arg(long, value_name = "DIR", value_parser = sysroot::folder)]
    pub sysroot: Option<PathBuf>,

    /// Show only these nodes, in numactl's notation: 0,2-3 or !1 or all or +0-1 (the first two
    /// allowed nodes)
    #[arg(long, value_name = "NODES", allow_hyphen_values = true)]
    pub nodes: Option<String>,
}

/// Reads the machine and prints it.
pub fn run(args: &TopologyArgs) -> Result<(), Stop> {
    let files = args.sysroot.as_ref().map_or_else(SysFiles::host, SysFiles::at);
    let topology = Topology::read_from(&files)?;
    let shown = match &args.nodes {
        Some(text) => topology.parse_nodes(text, None)?,
        None => topology.nodes().iter().map(|node| node.id).collect(),
    };
    let shown: Vec<&Node> =
        topology.nodes().iter().filter(|node| shown.contains(&node.id)).collect();
    let text = if args.json {
        let machine = Machine::of(&topology, &shown);
        serde_json::to_string(&machine).context("the result could not be written as JSON")? + "\n"
    } else {
        text(&topology, &shown)
    };
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("standard output")?;
    Ok(())
}

/// The object of `--json`. Sizes are in bytes. Nodes and CPUs appear as their numbers.
#[derive(Serialize)]
struct Machine<'a> {
    /// The online nodes, or those of `--nodes`, by number.
    nodes: Vec<JsonNode<'a>>,
    /// Nodes that could become online.
    possible_nodes: Vec<u32>,
    /// Nodes that this process may take memory from: they have memory and are in its cpuset.
    allowed_nodes: Vec<u32>,
    /// CPUs that the cpuset and the affinity of this process allow.
    allowed_cpus: Vec<usize>,
    /// What the output leaves out, because its file is damaged or cannot be read.
    warnings: &'a [String],
}

/// One node.
#[derive(Serialize)]
struct JsonNode<'a> {
    /// Its number.
    id: u32,
    /// Its online CPUs.
    cpus: &'a [usize],
    /// Its memory; 0 for a node without memory.
    total_bytes: u64,
    /// Memory that can be allocated without swapping.
    free_bytes: u64,
    /// Reserved huge pages, the smallest size first.
    huge_pages: Vec<JsonHugePages>,
    /// Memory tier, smaller is faster; null if the kernel reports no tiers.
    tier: Option<u32>,
    /// Whether the node is in the cpuset of this process.
    in_cpuset: bool,
    /// The node itself if it has CPUs, else the nearest node with CPUs.
    nearest_with_cpus: u32,
    /// Distance to each online node, by the number of that node. 10 is the same node; null if the
    /// kernel reports no distance.
    distances: BTreeMap<u32, Option<u32>>,
    /// The firmware's figures (HMAT) for the initiators that reach this memory fastest; empty if
    /// the firmware has no figures.
    access: Vec<JsonAccess>,
}

/// Huge pages of one size.
#[derive(Serialize)]
struct JsonHugePages {
    /// Bytes of one page.
    page_bytes: u64,
    /// Pages reserved.
    total: u64,
    /// Reserved pages that are free.
    free: u64,
    /// Reserved pages beyond the number asked for.
    surplus: u64,
}

/// The firmware's figures for an access class. A figure is null if the firmware does not give it.
#[derive(Serialize)]
struct JsonAccess {
    /// 0: the fastest initiators of any kind; 1: the fastest initiators with CPUs.
    class: u32,
    /// The nodes from which memory access has these figures.
    initiators: Vec<u32>,
    /// Megabytes per second.
    read_bandwidth_mb_per_s: Option<u64>,
    /// Megabytes per second.
    write_bandwidth_mb_per_s: Option<u64>,
    /// Nanoseconds.
    read_latency_ns: Option<u64>,
    /// Nanoseconds.
    write_latency_ns: Option<u64>,
}

impl<'a> Machine<'a> {
    fn of(topology: &'a Topology, shown: &[&'a Node]) -> Machine<'a> {
        let numbers = |nodes: &[NodeId]| nodes.iter().map(|node| node.0).collect();
        Machine {
            nodes: shown.iter().map(|node| JsonNode::of(topology, node)).collect(),
            possible_nodes: numbers(topology.possible_nodes()),
            allowed_nodes: numbers(&topology.allowed_nodes()),
            allowed_cpus: topology.allowed_cpus(),
            warnings: topology.warnings(),
        }
    }
}

impl<'a> JsonNode<'a> {
    fn of(topology: &Topology, node: &'a Node) -> JsonNode<'a> {
        let huge_pages = node.huge_pages.iter().map(|pages| JsonHugePages {
            page_bytes: pages.page_bytes,
            total: pages.total,
            free: pages.free,
            surplus: pages.surplus,
        });
        let access = node.access.iter().map(|access| JsonAccess {
            class: access.class,
            initiators: access.initiators.iter().map(|node| node.0).collect(),
            read_bandwidth_mb_per_s: access.read_bandwidth_mb_per_s,
            write_bandwidth_mb_per_s: access.write_bandwidth_mb_per_s,
            read_latency_ns: access.read_latency_ns,
            write_latency_ns: access.write_latency_ns,
        });
        JsonNode {
            id: node.id.0,
            cpus: &node.cpus,
            total_bytes: node.total_bytes,
            free_bytes: node.free_bytes,
            huge_pages: huge_pages.collect(),
            tier: node.tier,
            in_cpuset: topology.is_allowed(node.id),
            nearest_with_cpus: topology.nearest_with_cpus(node.id).0,
            distances: topology
                .nodes()
                .iter()
                .map(|to| (to.id.0, topology.distance(node.id, to.id)))
                .collect(),
            access: access.collect(),
        }
    }
}

fn text(topology: &Topology, shown: &[&Node]) -> String {
    let mut out = summary(topology);
    out += "\n";
    out += &aligned(&node_table(topology, shown));
    if shown.len() > 1 {
        out += "\n";
        out += &distance_picture(topology, shown);
    }
    if shown.iter().any(|node| !node.access.is_empty()) {
        out += "\nMemory seen from the nodes where it is fastest, as the firmware says (HMAT), not measured;\n";
        out += "class 0: from anything that accesses memory, class 1: from CPUs\n";
        out += &aligned(&access_table(shown));
    }
    for warning in topology.warnings() {
        out += &format!("\nleft out: {warning}\n");
    }
    out
}

fn summary(topology: &Topology) -> String {
    let nodes = topology.nodes();
    let cpus: usize = nodes.iter().map(|node| node.cpus.len()).sum();
    let bytes = nodes.iter().fold(0f64, |sum, node| sum + node.total_bytes as f64);
    let counted =
        |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let possible = topology.possible_nodes().len();
    let more =
        if possible > nodes.len() { format!(" of {possible} possible") } else { String::new() };
    let nodes_usable = match topology.allowed_nodes().as_slice() {
        [] => "the memory of no node".to_owned(),
        [one] => format!("the memory of {one}"),
        several => format!("the memory of nodes {}", node_list(several)),
    };
    let cpus_usable = match topology.allowed_cpus().as_slice() {
        [] => "no CPU".to_owned(),
        [one] => format!("CPU {one}"),
        several => format!("CPUs {}", short_list(several.iter().copied())),
    };
    format!(
        "{} online{more}, {}, {}\nThis process may use {nodes_usable}, and {cpus_usable}.\n",
        counted(nodes.len(), "node"),
        counted(cpus, "CPU"),
        human_bytes(bytes),
    )
}

fn node_table(topology: &Topology, shown: &[&Node]) -> Vec<Vec<String>> {
    let sizes: BTreeSet<u64> =
        shown.iter().flat_map(|node| &node.huge_pages).map(|pages| pages.page_bytes).collect();
    let mut head: Vec<String> = ["node", "CPUs", "memory", "free"].map(str::to_owned).into();
    head.extend(sizes.iter().map(|bytes| format!("{} free/all", page_size(*bytes))));
    head.extend(["tier", "in cpuset"].map(str::to_owned));
    let mut rows = vec![head];
    for node in shown {
        let bytes = |bytes: u64| {
            if node.total_bytes == 0 { "-".to_owned() } else { human_bytes(bytes as f64) }
        };
        let mut row = vec![
            node.id.0.to_string(),
            short_list(node.cpus.iter().copied()),
            bytes(node.total_bytes),
            bytes(node.free_bytes),
        ];
        row.extend(sizes.iter().map(|size| {
            let pages = node.huge_pages.iter().find(|pages| pages.page_bytes == *size);
            pages.map_or_else(|| "-".to_owned(), |pages| format!("{}/{}", pages.free, pages.total))
        }));
        row.push(node.tier.map_or_else(|| "-".to_owned(), |tier| tier.to_string()));
        row.push(if topology.is_allowed(node.id) { "yes" } else { "no" }.to_owned());
        rows.push(row);
    }
    rows
}

fn access_table(shown: &[&Node]) -> Vec<Vec<String>> {
    let head = [
        "node",
        "class",
        "from",
        "read latency",
        "write latency",
        "read bandwidth",
        "write bandwidth",
    ];
    let figures = |access: &Access| {
        let figure = |value: Option<u64>, unit| {
            value.map_or_else(|| "-".to_owned(), |v| format!("{v} {unit}"))
        };
        [
            node_list(&access.initiators),
            figure(access.read_latency_ns, "ns"),
            figure(access.write_latency_ns, "ns"),
            figure(access.read_bandwidth_mb_per_s, "MB/s"),
            figure(access.write_bandwidth_mb_per_s, "MB/s"),
        ]
    };
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for node in shown {
        // On most machines only CPUs access memory, and both classes are the same.
        for same in node.access.chunk_by(|a, b| figures(a) == figures(b)) {
            let classes: Vec<String> = same.iter().map(|access| access.class.to_string()).collect();
            let mut row = vec![node.id.0.to_string(), classes.join(",")];
            row.extend(figures(&same[0]));
            rows.push(row);
        }
    }
    rows
}

/// The distances as a matrix: the darker, the farther. The row is the node of the thread, the
/// column is the node of the memory.
fn distance_picture(topology: &Topology, shown: &[&Node]) -> String {
    if shown.len() > MAX_DRAWN {
        return format!(
            "{} nodes are too many to draw; --nodes selects some, --json has all distances\n",
            shown.len()
        );
    }
    let distance = |from: &Node, to: &Node| topology.distance(from.id, to.id);
    let known: BTreeSet<u32> = shown
        .iter()
        .flat_map(|from| shown.iter().filter_map(move |to| distance(from, to)))
        .collect();
    if known.is_empty() {
        return "The kernel does not say how far the nodes are from each other.\n".to_owned();
    }
    let known: Vec<u32> = known.into_iter().collect();
    let shade = |distance: u32| {
        // Shades spread evenly over the distances that occur. So 20 and 21 differ if no other
        // distances occur.
        let rank = known.partition_point(|other| *other < distance);
        SHADES[rank * (SHADES.len() - 1) / (known.len() - 1).max(1)]
    };
    let mut out =
        "Distances (relative costs, not latencies), from CPUs of the row to memory of the column\n"
            .to_owned();
    if shown.len() <= MAX_NUMBERED {
        let mut rows = vec![vec!["node".to_owned()]];
        rows[0].extend(shown.iter().map(|to| format!("{}  ", to.id.0)));
        for from in shown {
            let cell = |to: &&Node| {
                let known =
                    distance(from, to).map(|distance| format!("{distance} {}", shade(distance)));
                known.unwrap_or_else(|| "?  ".to_owned())
            };
            rows.push(
                std::iter::once(from.id.0.to_string()).chain(shown.iter().map(cell)).collect(),
            );
        }
        out += &aligned(&rows);
    } else {
        for from in shown {
            let row: String =
                shown.iter().map(|to| distance(from, to).map_or('?', shade)).collect();
            out += &format!("{:>4}  {row}\n", from.id.0);
        }
    }
    let mut legend: BTreeMap<char, [u32; 2]> = BTreeMap::new();
    for distance in &known {
        legend.entry(shade(*distance)).or_insert([*distance; 2])[1] = *distance;
    }
    let meaning = SHADES.iter().filter_map(|shade| legend.get(shade).map(|range| (shade, range)));
    let meaning: Vec<String> = meaning
        .map(|(shade, [first, last])| {
            if first == last {
                format!("{shade} {first}")
            } else {
                format!("{shade} {first} to {last}")
            }
        })
        .collect();
    out + &format!("      {}\n", meaning.join("   "))
}

/// Aligns columns. Lists, which have the head `CPUs` or `from`, are left-aligned.
fn aligned(rows: &[Vec<String>]) -> String {
    output::aligned(rows, "", |_, head| matches!(head, "CPUs" | "from"))
}

fn node_list(nodes: &[NodeId]) -> String {
    short_list(nodes.iter().map(|node| node.0 as usize))
}

/// Ids in the kernel's list notation. A long list is cut, and the number of all its ids follows. An
/// empty list is `-`.
fn short_list(ids: impl IntoIterator<Item = usize>) -> String {
    let ids: Vec<usize> = ids.into_iter().collect();
    let list = id_list(ids.iter().copied());
    if list.is_empty() {
        return "-".to_owned();
    }
    if list.len() <= MAX_LIST {
        return list;
    }
    let cut = list[..MAX_LIST].rfind(',').unwrap_or(MAX_LIST);
    format!("{},... ({})", &list[..cut], ids.len())
}

/// A page size in the notation of this program's flags.
fn page_size(bytes: u64) -> String {
    match bytes.trailing_zeros() {
        30.. => format!("{}g", bytes >> 30),
        20.. => format!("{}m", bytes >> 20),
        _ => format!("{}k", bytes >> 10),
    }
}
