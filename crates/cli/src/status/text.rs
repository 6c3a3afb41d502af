//! The memory of processes as text, with strips of characters that show the nodes of pages.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use pageleap::process::{self, MappingKind, MappingMemory, Movable, ProcessMemory};
use pageleap::topology::id_list;
use pageleap::{BASE_PAGE, NodeId};
use pageleap_measure::figures::human_bytes;

use super::Shown;
use crate::output;

/// Characters of a strip.
const CELLS: usize = 32;
/// Pages that the kernel is asked about for one character.
const SAMPLES: usize = 16;
/// The fewest characters for policy, access and name of a mapping beside its strip.
const LEAST_NAME: usize = 24;
/// The words in place of a strip.
const NOT_TOLD: &str = "not told";
/// The character of pages that are not present.
const ABSENT: char = '·';
/// The character of pages on several nodes.
const SEVERAL: char = '*';
/// Background colours of nodes, in turns: blue, green, yellow, magenta, cyan, red.
const COLOURS: [u32; 6] = [44, 42, 43, 45, 46, 41];

/// Where the pages of a mapping lie, from its first address to its last. `None` for memory that is
/// no memory of nodes.
pub(super) fn strip(pid: u32, mapping: &MappingMemory) -> Result<Option<String>, pageleap::Error> {
    if matches!(mapping.movable, Movable::Device | Movable::Kernel) {
        return Ok(None);
    }
    let page = (mapping.page_bytes as usize).max(BASE_PAGE);
    let cells = samples((mapping.end - mapping.start) / page);
    let address = |sample: &usize| mapping.start + sample * page;
    let addresses: Vec<usize> = cells.iter().flatten().map(address).collect();
    let nodes = process::nodes_of_pages(pid, &addresses)?;
    let mut left = nodes.as_slice();
    let cell = |cell: &Vec<usize>| {
        let (these, others) = left.split_at(cell.len());
        left = others;
        summed_up(these)
    };
    Ok(Some(cells.iter().map(cell).collect()))
}

/// The numbers of the pages that are looked at for each character. They are the same at each look,
/// and at irregular distances, because a regular distance could coincide with that of an
/// interleaving.
fn samples(pages: usize) -> Vec<Vec<usize>> {
    let parts = |first: usize, end: usize, parts: usize| {
        (0..parts).map(move |part| {
            first + part * (end - first) / parts..first + (part + 1) * (end - first) / parts
        })
    };
    let sample = |part: std::ops::Range<usize>| {
        // The finalizer of SplitMix64.
        let hash = (part.start as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
        let hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        part.start + (hash ^ hash >> 31) as usize % part.len()
    };
    parts(0, pages, CELLS.min(pages))
        .map(|cell| parts(cell.start, cell.end, SAMPLES.min(cell.len())).map(sample).collect())
        .collect()
}

/// The character for pages: their node if three quarters of those that are present lie there.
fn summed_up(nodes: &[Option<NodeId>]) -> char {
    let mut counts: BTreeMap<NodeId, usize> = BTreeMap::new();
    nodes.iter().flatten().for_each(|node| *counts.entry(*node).or_default() += 1);
    let present: usize = counts.values().sum();
    match counts.into_iter().max_by_key(|(_, count)| *count) {
        None => ABSENT,
        Some((node, count)) if count * 4 >= present * 3 => letter(node),
        Some(_) => SEVERAL,
    }
}

fn letter(node: NodeId) -> char {
    char::from_digit(node.0, 36).unwrap_or('#')
}

/// The text for these processes. `columns` is the width of the terminal, if there is one.
pub(super) fn text(shown: &[Shown], all: bool, colours: bool, columns: Option<usize>) -> String {
    let mut out = String::new();
    if shown.len() > 1 {
        let _ = writeln!(out, "{} processes; shared memory counts in each of them", shown.len());
        out += &aligned(&processes(shown));
    }
    for Shown { memory, largest, untold } in shown {
        if !out.is_empty() {
            out.push('\n');
        }
        out += &summary(memory);
        if !largest.is_empty() {
            out += "\nMemory by kind and node\n";
            out += &aligned(&kinds(memory));
            out += &mappings(memory, largest, all, colours, columns);
        }
        for warning in &memory.warnings {
            out += &output::hanging("\nnote: ", warning, columns);
        }
        if let Some(why) = untold {
            let why = format!("where single pages lie is not told: {why}");
            out += &output::hanging("\nnote: ", &why, columns);
        }
    }
    out
}

fn summary(memory: &ProcessMemory) -> String {
    let sum = |bytes: fn(&MappingMemory) -> u64| memory.mappings.iter().map(bytes).sum::<u64>();
    let inner = match memory.namespace_pids.last() {
        Some(inner) if *inner != memory.pid => format!(", {inner} in its pid namespace"),
        _ => String::new(),
    };
    let hugetlb = sum(|m| if m.kind == MappingKind::Hugetlb { m.resident_bytes } else { 0 });
    let is_movable = |m: &&MappingMemory| matches!(m.movable, Movable::Yes | Movable::Partly);
    let movable = || memory.mappings.iter().filter(is_movable);
    let shared: u64 = movable().map(|m| m.shared_bytes).sum();
    let once: u64 = movable().map(|m| m.resident_bytes.saturating_sub(m.shared_bytes)).sum();
    let nodes = match id_list(memory.allowed_nodes.iter().map(|node| node.0 as usize)) {
        none if none.is_empty() => "not known".to_owned(),
        some => some,
    };
    let mut facts = vec![
        ("resident", human(memory.resident_bytes())),
        (
            "in huge pages",
            format!("{} transparent, {} reserved", human(sum(|m| m.huge_bytes)), human(hugetlb)),
        ),
        ("swapped", human(sum(|m| m.swapped_bytes))),
        ("page tables", human(memory.page_table_bytes)),
        ("nodes allowed", nodes),
    ];
    if memory.resident_bytes() > 0 {
        let rest = format!("{} more is mapped more than once", human(shared));
        facts.push(("movable", format!("{}; {rest}", human(once))));
    }
    let mut out = format!("{} (process {}{inner})\n", memory.name, memory.pid);
    for (name, value) in facts {
        let _ = writeln!(out, "  {name:<14}  {value}");
    }
    out
}

/// The nodes that have memory of the process, or may have.
fn nodes_of(memory: &ProcessMemory) -> BTreeSet<NodeId> {
    memory.on_nodes().into_keys().collect()
}

fn kinds(memory: &ProcessMemory) -> Vec<Vec<String>> {
    let nodes = nodes_of(memory);
    let mut rows = vec![head("kind", &nodes, &["all"])];
    let mut row = |name: &str, on_nodes: BTreeMap<NodeId, u64>, all: u64| {
        let cells = nodes.iter().map(|node| on_nodes.get(node).copied().unwrap_or(0));
        rows.push(std::iter::once(name.to_owned()).chain(cells.chain([all]).map(cell)).collect());
    };
    for kind in MappingKind::ALL {
        let of_kind = || memory.mappings.iter().filter(|mapping| mapping.kind == kind);
        let resident: u64 = of_kind().map(|mapping| mapping.resident_bytes).sum();
        if resident > 0 {
            row(kind.name(), memory.on_nodes_of(|mapping| mapping.kind == kind), resident);
        }
    }
    row("all", memory.on_nodes(), memory.resident_bytes());
    rows
}

fn processes(shown: &[Shown]) -> Vec<Vec<String>> {
    let nodes: BTreeSet<NodeId> = shown.iter().flat_map(|s| nodes_of(&s.memory)).collect();
    let mut rows = vec![head("process", &nodes, &["all"])];
    for Shown { memory, .. } in shown {
        let on_nodes = memory.on_nodes();
        let cells = nodes.iter().map(|node| on_nodes.get(node).copied().unwrap_or(0));
        let name = format!("{} {}", memory.pid, memory.name);
        rows.push(
            std::iter::once(name).chain(cells.chain([memory.resident_bytes()]).map(cell)).collect(),
        );
    }
    rows
}

fn mappings(
    memory: &ProcessMemory,
    largest: &[(MappingMemory, Option<String>)],
    all: bool,
    colours: bool,
    columns: Option<usize>,
) -> String {
    let nodes = nodes_of(memory);
    let mut rows = vec![head("addresses", &nodes, &["all", "huge", "page", "movable"])];
    for (mapping, _) in largest {
        let on_nodes = nodes.iter().map(|node| mapping.on_nodes.get(node).copied().unwrap_or(0));
        let mut row = vec![format!("{:x}-{:x}", mapping.start, mapping.end)];
        row.extend(on_nodes.chain([mapping.resident_bytes, mapping.huge_bytes]).map(cell));
        row.push(human(mapping.page_bytes));
        row.push(mapping.movable.name().to_owned());
        rows.push(row);
    }
    let with_memory = memory.mappings.iter().filter(|m| m.resident_bytes + m.swapped_bytes > 0);
    let (with_memory, of) = (with_memory.count(), memory.mappings.len());
    let mut out = match all || largest.len() == with_memory {
        true => format!("\nMappings with memory, the largest first ({of} mappings in all)\n"),
        false => format!(
            "\nThe {} largest of {with_memory} mappings with memory ({of} in all; --all shows them)\n",
            largest.len()
        ),
    };
    let table = aligned(&rows);
    let strips = std::iter::once(None).chain(largest.iter().map(Some));
    // Where the lines do not fit, the strips get lines of their own.
    let left = table.lines().map(|line| line.chars().count()).max().unwrap_or(0) + 2 + CELLS + 2;
    let is_narrow = columns.is_some_and(|columns| columns < left + LEAST_NAME);
    let (gap, left) = if is_narrow { ("\n    ", 4 + CELLS + 2) } else { ("  ", left) };
    let room = columns.map_or(usize::MAX, |columns| columns.saturating_sub(left).max(LEAST_NAME));
    for (line, mapping) in table.lines().zip(strips) {
        let Some((mapping, strip)) = mapping else {
            let _ = writeln!(out, "{line}{gap}{:<CELLS$}  policy, access, name", "pages lie on");
            continue;
        };
        let pad = CELLS - strip.as_deref().unwrap_or(NOT_TOLD).chars().count();
        let strip = match strip {
            Some(strip) if colours => coloured(strip),
            strip => strip.clone().unwrap_or_else(|| NOT_TOLD.to_owned()),
        };
        let MappingMemory { policy, access, kind, name, .. } = mapping;
        let policy = if policy.is_empty() { "?" } else { policy };
        let name = if name.is_empty() { format!("({})", kind.name()) } else { name.clone() };
        let named = format!("{policy} {access} ");
        let name = shortened(&name, room.saturating_sub(named.chars().count()));
        let _ = writeln!(out, "{line}{gap}{strip}{:pad$}  {named}{name}", "");
    }
    out
}

/// The end of a name that has more characters than there is room for, because the end of a path
/// tells most.
fn shortened(name: &str, room: usize) -> String {
    match name.chars().count() {
        count if count > room => {
            let end = name.chars().skip((count + 1).saturating_sub(room).min(count));
            std::iter::once('…').chain(end).collect()
        }
        _ => name.to_owned(),
    }
}

/// A strip with the colour of its node behind each character.
fn coloured(strip: &str) -> String {
    let mut out = String::new();
    for same in strip.chars().collect::<Vec<_>>().chunk_by(|a, b| a == b) {
        let same_text: String = same.iter().collect();
        out += &match same[0].to_digit(36) {
            Some(node) => {
                let colour = COLOURS[node as usize % COLOURS.len()];
                format!("\x1b[30;{colour}m{same_text}\x1b[0m")
            }
            None => same_text,
        };
    }
    out
}

/// Aligns columns to the right, but for the first one.
fn aligned(rows: &[Vec<String>]) -> String {
    output::aligned(rows, "  ", |column, _| column == 0)
}

fn head(first: &str, nodes: &BTreeSet<NodeId>, rest: &[&str]) -> Vec<String> {
    let nodes = nodes.iter().map(|node| node.to_string());
    std::iter::once(first.to_owned())
        .chain(nodes)
        .chain(rest.iter().map(|&head| head.to_owned()))
        .collect()
}

fn human(bytes: u64) -> String {
    human_bytes(bytes as f64)
}

fn cell(bytes: u64) -> String {
    if bytes == 0 { "-".to_owned() } else { human(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(pages: usize, node_of: impl Fn(usize) -> Option<u32>) -> String {
        let cells = samples(pages);
        cells
            .iter()
            .map(|cell| {
                let nodes: Vec<_> = cell.iter().map(|page| node_of(*page).map(NodeId)).collect();
                summed_up(&nodes)
            })
            .collect()
    }

    #[test]
    fn a_strip_shows_nodes_and_what_lies_on_several() {
        let halves = shown(64, |page| Some(page as u32 / 32));
        assert_eq!(halves, "0".repeat(16) + &"1".repeat(16));
        assert_eq!(
            shown(1 << 20, |page| (page < 1 << 19).then_some(35)),
            "z".repeat(16) + &"·".repeat(16)
        );
        assert_eq!(shown(3, |page| Some([0, 36, 1][page])), "0#1");
        assert_eq!(shown(0, |_| None), "");
        // The strip shows several nodes, whatever the number of pages and the interleaving.
        for pages in [128, 1000, 8192, 1 << 18] {
            for nodes in [2, 3, 4, 8] {
                let text = shown(pages, |page| Some(page as u32 % nodes));
                let several = text.chars().filter(|c| *c == SEVERAL).count();
                assert!(several >= 24, "{pages} pages on {nodes} nodes: {text}");
            }
        }
    }

    #[test]
    fn samples_are_pages_of_their_part() {
        for pages in [1, 31, 32, 33, 511, 512, 513, 1 << 35] {
            let all: Vec<usize> = samples(pages).into_iter().flatten().collect();
            assert!(all.is_sorted() && all.iter().all(|page| *page < pages), "{pages}: {all:?}");
            assert_eq!(all.len(), pages.min(CELLS * SAMPLES).min(all.len()));
        }
    }

    /// A process of two mappings, the second one without a strip.
    fn two_mappings() -> Shown {
        let mut memory = ProcessMemory::read(process::own_pid().unwrap()).unwrap();
        memory.warnings.clear();
        let mut two = memory.mappings.iter().cloned();
        let strips = [Some("0".to_owned()), None];
        let largest = strips.into_iter().map(|strip| (two.next().unwrap(), strip)).collect();
        Shown { memory, largest, untold: None }
    }

    #[test]
    fn only_strips_have_colours() {
        let text = text(&[two_mappings()], true, true, None);
        assert_eq!(text.matches("\x1b[30;44m0\x1b[0m").count(), 1, "{text}");
        assert_eq!(text.matches('\x1b').count(), 2, "{text}");
    }

    #[test]
    fn narrow_terminals_get_two_lines_for_a_mapping() {
        let lines = |columns| {
            let text = text(&[two_mappings()], true, false, columns);
            let table = text.split("\nMappings with memory").nth(1).unwrap().to_owned();
            (table.lines().count(), table.lines().map(|line| line.chars().count()).max().unwrap())
        };
        assert_eq!(lines(Some(500)).0, 1 + 3);
        assert_eq!(lines(Some(500)).0, lines(None).0);
        let (count, longest) = lines(Some(100));
        assert_eq!(count, 1 + 2 * 3);
        assert!(longest <= 100, "{longest}");
    }

    #[test]
    fn long_names_keep_their_ends() {
        assert_eq!(shortened("/usr/lib/libc.so.6", 18), "/usr/lib/libc.so.6");
        assert_eq!(shortened("/usr/lib/libc.so.6", 10), "…libc.so.6");
        assert_eq!(shortened("/usr/lib/libc.so.6", 0), "…");
    }

    #[test]
    fn colours_do_not_change_the_text() {
        let text = coloured("00·1#");
        let parts: Vec<&str> = text.split('\x1b').collect();
        assert_eq!(parts, ["", "[30;44m00", "[0m·", "[30;42m1", "[0m#"]);
    }
}
