//! The object of `--json`. Sizes are in bytes; nodes appear as their numbers.

use std::collections::BTreeMap;

use anyhow::Context;
use pageleap::NodeId;
use pageleap::process::{MappingKind, MappingMemory, Movable, ProcessMemory};
use serde::Serialize;

/// All processes.
#[derive(Serialize)]
struct Status<'a> {
    processes: Vec<JsonProcess<'a>>,
}

/// One process.
#[derive(Serialize)]
struct JsonProcess<'a> {
    pid: u32,
    /// Its name, with control characters escaped.
    name: &'a str,
    /// Its numbers in its pid namespaces, the innermost last.
    namespace_pids: &'a [u32],
    /// Nodes that its cpuset allows.
    allowed_nodes: Vec<u32>,
    /// Page tables: pages of PTEs, PMDs and PUDs.
    page_table_bytes: u64,
    /// Memory that is present, of reserved huge pages too.
    resident_bytes: u64,
    /// Memory that has been swapped out.
    swapped_bytes: u64,
    /// Memory by node.
    node_bytes: BTreeMap<u32, u64>,
    /// Memory by kind of mapping and by node.
    kinds: BTreeMap<&'static str, BTreeMap<u32, u64>>,
    /// All mappings, by address.
    mappings: Vec<JsonMapping<'a>>,
    /// Parts that are missing, and why.
    warnings: &'a [String],
}

/// One mapping.
#[derive(Serialize)]
struct JsonMapping<'a> {
    start: usize,
    end: usize,
    /// Access and sharing in the kernel's letters.
    access: &'a str,
    kind: &'static str,
    /// May be empty.
    name: &'a str,
    /// In the kernel's words; empty if it is not known.
    policy: &'a str,
    page_bytes: u64,
    resident_bytes: u64,
    /// The part of it that is mapped by transparent huge pages.
    huge_bytes: u64,
    swapped_bytes: u64,
    node_bytes: BTreeMap<u32, u64>,
    /// The part of the resident memory that is mapped more than once.
    shared_bytes: u64,
    /// Whether the kernel can move its pages: all (yes), those that are mapped once (partly), none
    /// because none is present (nothing), or none because of the kind of memory, such as that of a
    /// device.
    movable: &'static str,
}

pub(super) fn text(memories: &[&ProcessMemory]) -> anyhow::Result<String> {
    let status = Status { processes: memories.iter().map(|memory| process(memory)).collect() };
    serde_json::to_string(&status).context("the result could not be written as JSON")
}

fn process(memory: &ProcessMemory) -> JsonProcess<'_> {
    let of_kind = |kind: MappingKind| numbers(&memory.on_nodes_of(|mapping| mapping.kind == kind));
    JsonProcess {
        pid: memory.pid,
        name: &memory.name,
        namespace_pids: &memory.namespace_pids,
        allowed_nodes: memory.allowed_nodes.iter().map(|node| node.0).collect(),
        page_table_bytes: memory.page_table_bytes,
        resident_bytes: memory.resident_bytes(),
        swapped_bytes: memory.mappings.iter().map(|mapping| mapping.swapped_bytes).sum(),
        node_bytes: numbers(&memory.on_nodes()),
        kinds: MappingKind::ALL.into_iter().map(|kind| (kind.name(), of_kind(kind))).collect(),
        mappings: memory.mappings.iter().map(mapping).collect(),
        warnings: &memory.warnings,
    }
}

fn mapping(mapping: &MappingMemory) -> JsonMapping<'_> {
    JsonMapping {
        start: mapping.start,
        end: mapping.end,
        access: &mapping.access,
        kind: mapping.kind.name(),
        name: &mapping.name,
        policy: &mapping.policy,
        page_bytes: mapping.page_bytes,
        resident_bytes: mapping.resident_bytes,
        huge_bytes: mapping.huge_bytes,
        swapped_bytes: mapping.swapped_bytes,
        node_bytes: numbers(&mapping.on_nodes),
        shared_bytes: mapping.shared_bytes,
        movable: match mapping.movable {
            Movable::Yes => "yes",
            Movable::Partly => "partly",
            Movable::Nothing => "nothing",
            Movable::Device => "device",
            Movable::Kernel => "kernel",
            Movable::Secret => "secret",
            _ => "unknown",
        },
    }
}

fn numbers(on_nodes: &BTreeMap<NodeId, u64>) -> BTreeMap<u32, u64> {
    on_nodes.iter().map(|(node, bytes)| (node.0, *bytes)).collect()
}
