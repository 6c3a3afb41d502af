//! The selected ranges of a process, and how much of them would move.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::Context;
use pageleap::process::{MappingKind, MappingMemory, Movable, ProcessMemory};
use pageleap::{NodeId, Placement, Spread};
use pageleap_measure::export::Format;
use pageleap_measure::figures::human_bytes;
use serde::Serialize;

use super::MoveArgs;
use crate::output;

/// A number of bytes in words.
pub(super) fn human(bytes: u64) -> String {
    human_bytes(bytes as f64)
}

/// A process, with its selected ranges.
pub(super) struct Plan<'a> {
    pub(super) memory: &'a ProcessMemory,
    /// The selected ranges, each with its mapping.
    pub(super) ranges: Vec<(&'a MappingMemory, Range<usize>)>,
    /// Parts of named ranges where nothing is mapped.
    pub(super) unmapped: Vec<Range<usize>>,
}

impl<'a> Plan<'a> {
    /// Selects mappings by kind and addresses. Memory of devices and of the kernel is selected by
    /// its address only.
    pub(super) fn of(memory: &'a ProcessMemory, args: &MoveArgs) -> Plan<'a> {
        let named = joined(args.range.clone());
        let wanted = memory.mappings.iter().filter(|m| is_wanted(m, args));
        let ranges = wanted.flat_map(|mapping| {
            parts(mapping, &named).into_iter().map(move |range| (mapping, range))
        });
        let ranges = ranges.collect();
        Plan { memory, ranges, unmapped: unmapped(memory, named) }
    }

    /// Warnings about the memory of the process.
    pub(super) fn warnings(&self) -> impl Iterator<Item = String> + use<'_> {
        let pid = self.memory.pid;
        self.memory.warnings.iter().map(move |warning| format!("process {pid}: {warning}"))
    }

    /// An upper bound of the bytes that move: those on the nodes to move from. With several target
    /// nodes any page may have to move to another one.
    pub(super) fn most_bytes(
        &self,
        shares: &BTreeMap<NodeId, f64>,
        from: Option<&[NodeId]>,
    ) -> u64 {
        let is_left = |node: &NodeId| {
            let is_target = shares.len() == 1 && shares.contains_key(node);
            !is_target && from.is_none_or(|from| from.contains(node))
        };
        let most = |(mapping, range): &(&MappingMemory, Range<usize>)| {
            let left = mapping.on_nodes.iter().filter(|(node, _)| is_left(node));
            left.map(|(_, bytes)| bytes).sum::<u64>().min(range.len() as u64)
        };
        self.ranges.iter().map(most).sum()
    }
}

/// Ranges in ascending order, each address once.
fn joined(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// Parts of the ranges that lie in no mapping.
fn unmapped(memory: &ProcessMemory, ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    let mut holes = Vec::new();
    for range in ranges {
        let mut at = range.start;
        let inside = |m: &&MappingMemory| m.start < range.end && m.end > range.start;
        for mapping in memory.mappings.iter().filter(inside) {
            holes.extend((at < mapping.start).then_some(at..mapping.start));
            at = mapping.end;
        }
        holes.extend((at < range.end).then_some(at..range.end));
    }
    holes
}

fn is_wanted(mapping: &MappingMemory, args: &MoveArgs) -> bool {
    if !args.mapping.is_empty() {
        return args.mapping.contains(&mapping.kind);
    }
    !args.range.is_empty() || mapping.kind != MappingKind::Special
}

/// The parts of a mapping that lie in the ranges.
fn parts(mapping: &MappingMemory, ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let all = mapping.start..mapping.end;
    if ranges.is_empty() {
        return vec![all];
    }
    let part = |range: &Range<usize>| {
        let (start, end) = (range.start.max(all.start), range.end.min(all.end));
        (start < end).then_some(start..end)
    };
    ranges.iter().filter_map(part).collect()
}

/// How much of a process would move, in bytes.
#[derive(Clone, Copy, Default, Serialize)]
struct Amounts {
    /// Memory that is present.
    resident_bytes: u64,
    /// Bytes that already lie on their target node. With several target nodes this is an estimate:
    /// for each node, its bytes times the share of the placement that this node gets.
    on_target_bytes: u64,
    /// Bytes on nodes from which no page is to move.
    elsewhere_bytes: u64,
    /// Bytes that would move, including those of pages that are mapped more than once. With several
    /// target nodes: all that the estimate does not count as on their node.
    to_move_bytes: u64,
    /// The part of the resident memory that is mapped more than once.
    shared_bytes: u64,
}

#[derive(Serialize)]
struct JsonPlan<'a> {
    dry_run: bool,
    processes: Vec<JsonProcess<'a>>,
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct JsonProcess<'a> {
    pid: u32,
    name: &'a str,
    kinds: BTreeMap<&'static str, Amounts>,
}

/// The amounts of a process that is to move, by kind of mapping.
type OfProcess<'a> = (&'a ProcessMemory, BTreeMap<MappingKind, Amounts>);

/// The plan of `--dry-run` in a format.
pub(super) fn show(
    plans: &[Plan<'_>],
    to: &Placement,
    from: Option<&[NodeId]>,
    warnings: &[String],
    shared: bool,
    format: Format,
) -> anyhow::Result<String> {
    let of_plans = plans.iter().flat_map(Plan::warnings);
    let warnings: Vec<String> = warnings.iter().cloned().chain(of_plans).collect();
    let shares = shares(to);
    let all: Vec<OfProcess<'_>> =
        plans.iter().map(|plan| (plan.memory, plan.amounts(&shares, from))).collect();
    match format {
        Format::Json => json(&all, warnings),
        Format::Text { .. } => Ok(text(&all, &warnings, shares.len() > 1, shared)),
    }
}

fn json(all: &[OfProcess<'_>], warnings: Vec<String>) -> anyhow::Result<String> {
    let processes = all
        .iter()
        .map(|(memory, kinds)| JsonProcess {
            pid: memory.pid,
            name: &memory.name,
            kinds: kinds.iter().map(|(kind, a)| (kind.name(), *a)).collect(),
        })
        .collect();
    let plan = JsonPlan { dry_run: true, processes, warnings };
    Ok(serde_json::to_string(&plan).context("the plan could not be written")? + "\n")
}

fn text(
    all: &[OfProcess<'_>],
    warnings: &[String],
    has_several_targets: bool,
    shared: bool,
) -> String {
    let mut out = String::from("Nothing is moved (--dry-run).\n");
    for (memory, kinds) in all {
        out += &format!("\n{} ({})\n", memory.name, memory.pid);
        let head = ["mapping", "resident", "on target", "to move", "elsewhere", "shared"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for (kind, amounts) in kinds {
            let Amounts { resident_bytes, on_target_bytes, to_move_bytes, .. } = amounts;
            let bytes = [
                *resident_bytes,
                *on_target_bytes,
                *to_move_bytes,
                amounts.elsewhere_bytes,
                amounts.shared_bytes,
            ];
            let cells = bytes.map(|bytes| if bytes == 0 { "-".to_owned() } else { human(bytes) });
            rows.push([vec![kind.name().to_owned()], cells.to_vec()].concat());
        }
        out += &output::aligned(&rows, "  ", |column, _| column == 0);
    }
    if has_several_targets {
        out += "\nWhich page goes to which node is not looked at: \"to move\" is an estimate.\n";
    }
    if !shared {
        out +=
            "\nPages that are mapped more than once stay (column shared); --shared moves them.\n";
    }
    for warning in warnings {
        out += &format!("\nnote: {warning}\n");
    }
    out
}

/// The nodes of a placement, each with its share of the pages.
pub(super) fn shares(to: &Placement) -> BTreeMap<NodeId, f64> {
    match &to.spread {
        Spread::On(node) => BTreeMap::from([(*node, 1.0)]),
        Spread::Interleave(nodes) => {
            nodes.iter().map(|node| (*node, 1.0 / nodes.len() as f64)).collect()
        }
        Spread::Weighted(weights) => {
            let all: u32 = weights.iter().map(|(_, weight)| weight).sum();
            let share = |weight| f64::from(weight) / f64::from(all.max(1));
            weights.iter().map(|(node, weight)| (*node, share(*weight))).collect()
        }
    }
}

impl Plan<'_> {
    /// The amounts by kind of mapping. The kernel tells only the memory of a whole mapping, so a
    /// part of a mapping counts with the same share of that memory.
    fn amounts(
        &self,
        shares: &BTreeMap<NodeId, f64>,
        from: Option<&[NodeId]>,
    ) -> BTreeMap<MappingKind, Amounts> {
        let mut kinds: BTreeMap<MappingKind, Amounts> = BTreeMap::new();
        for (mapping, range) in &self.ranges {
            let share = range.len() as f64 / (mapping.end - mapping.start) as f64;
            let part = |bytes: u64| (bytes as f64 * share) as u64;
            let amounts = kinds.entry(mapping.kind).or_default();
            amounts.resident_bytes += part(mapping.resident_bytes);
            amounts.shared_bytes += part(mapping.shared_bytes);
            if !matches!(mapping.movable, Movable::Yes | Movable::Partly) {
                continue;
            }
            for (node, bytes) in &mapping.on_nodes {
                let bytes = part(*bytes);
                let stays = (bytes as f64 * shares.get(node).unwrap_or(&0.0)) as u64;
                amounts.on_target_bytes += stays;
                match from.is_none_or(|from| from.contains(node)) {
                    true => amounts.to_move_bytes += bytes - stays,
                    false => amounts.elsewhere_bytes += bytes - stays,
                }
            }
        }
        kinds
    }
}
