//! The machine as text: tables, and a picture of the distances.

use std::collections::{BTreeMap, BTreeSet};

use pageleap::NodeId;
use pageleap::topology::{Access, Node, Topology, id_list};
use pageleap_measure::figures::human_bytes;

use crate::output;

/// Widest list of CPUs in the table. `--json` has all CPUs.
const MAX_LIST: usize = 24;
/// Most nodes in a picture with numbers. More nodes are drawn without numbers.
const MAX_NUMBERED: usize = 16;
/// Most nodes in a picture. More nodes are not drawn.
const MAX_DRAWN: usize = 64;
/// Shades from the node itself to the farthest node.
const SHADES: [char; 5] = ['·', '░', '▒', '▓', '█'];

/// The machine as text. `is_here` says whether the files describe this machine, as this process
/// sees it.
pub fn text(topology: &Topology, shown: &[&Node], is_here: bool) -> String {
    let mut out = summary(topology);
    out += &usable(topology, if is_here { "this process" } else { "the process there" });
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
    if shown.iter().any(|node| !node.side_caches.is_empty()) {
        out += "\nCaches in front of memory, as the firmware says (HMAT); level 1 is nearest to the memory\n";
        out += &aligned(&side_cache_table(shown));
    }
    for warning in topology.warnings() {
        out += &format!("\nleft out: {warning}\n");
    }
    out
}

fn summary(topology: &Topology) -> String {
    let nodes = topology.nodes();
    let bytes = nodes.iter().fold(0f64, |sum, node| sum + node.total_bytes as f64);
    let counted =
        |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let possible = topology.possible_nodes().len();
    let more =
        if possible > nodes.len() { format!(" of {possible} possible") } else { String::new() };
    format!(
        "{} online{more}, {}, {}\n",
        counted(nodes.len(), "node"),
        counted(topology.online_cpus().len(), "CPU"),
        human_bytes(bytes),
    )
}

/// A sentence on the nodes and CPUs that a process may use.
fn usable(topology: &Topology, process: &str) -> String {
    let nodes = match topology.allowed_nodes().as_slice() {
        [] => "the memory of no node".to_owned(),
        [one] => format!("the memory of {one}"),
        several => format!("the memory of nodes {}", node_list(several)),
    };
    let cpus = match topology.allowed_cpus().as_slice() {
        [] => "no CPU".to_owned(),
        [one] => format!("CPU {one}"),
        several => format!("CPUs {}", short_list(several.iter().copied())),
    };
    let sentence = match (topology.knows_allowed_nodes(), topology.knows_allowed_cpus()) {
        (true, true) => format!("{process} may use {nodes}, and {cpus}"),
        (true, false) => format!("{process} may use {nodes}; which CPUs is not known"),
        (false, true) => {
            format!("{process} may use {cpus}; the memory of which nodes is not known")
        }
        (false, false) => format!("which nodes and CPUs {process} may use is not known"),
    };
    let (first, rest) = sentence.split_at(1);
    format!("{}{rest}.\n", first.to_uppercase())
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
        let in_cpuset = match topology.is_allowed(node.id) {
            _ if !topology.knows_allowed_nodes() => "?",
            true => "yes",
            false => "no",
        };
        row.push(in_cpuset.to_owned());
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
        // On most machines both access classes have the same figures, because only CPUs access
        // memory. Equal ones are shown once.
        for same in node.access.chunk_by(|a, b| figures(a) == figures(b)) {
            let classes: Vec<String> = same.iter().map(|access| access.class.to_string()).collect();
            let mut row = vec![node.id.0.to_string(), classes.join(",")];
            row.extend(figures(&same[0]));
            rows.push(row);
        }
    }
    rows
}

fn side_cache_table(shown: &[&Node]) -> Vec<Vec<String>> {
    let head = ["node", "level", "size", "line", "places of an address", "writes"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for node in shown {
        for cache in &node.side_caches {
            let line =
                cache.line_bytes.map_or_else(|| "?".to_owned(), |bytes| human_bytes(bytes as f64));
            let places = match cache.is_direct_mapped {
                Some(true) => "one",
                Some(false) => "several",
                None => "?",
            };
            let writes = match cache.writes_back {
                Some(true) => "back",
                Some(false) => "through",
                None => "?",
            };
            rows.push(vec![
                node.id.0.to_string(),
                cache.level.to_string(),
                human_bytes(cache.bytes as f64),
                line,
                places.to_owned(),
                writes.to_owned(),
            ]);
        }
    }
    rows
}

/// The distances as a picture: a matrix whose row is the node of the thread, and whose column is
/// the node of the memory. The darker, the farther.
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
        // The shades spread evenly over the distances that occur, so 20 and 21 have different
        // shades if no other distances occur.
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
        out += &heads_of_columns(shown);
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

/// The numbers of the nodes above columns that have room for one digit: each number is written
/// downwards.
fn heads_of_columns(shown: &[&Node]) -> String {
    let numbers: Vec<String> = shown.iter().map(|node| node.id.0.to_string()).collect();
    let height = numbers.iter().map(String::len).max().unwrap_or(0);
    let line = |row: usize| {
        // The last digits of all numbers are in the last line.
        let digit = |number: &String| {
            let at = (row + number.len()).checked_sub(height)?;
            number.chars().nth(at)
        };
        let digits: String = numbers.iter().map(|number| digit(number).unwrap_or(' ')).collect();
        format!("{:6}{}\n", "", digits.trim_end())
    };
    (0..height).map(line).collect()
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
