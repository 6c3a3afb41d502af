//! Reads a [`Topology`]: which file contains which part, and which files may be missing.

use pageleap_sys::MAX_NODES;

use super::files::{Bounded, MAX_ENTRIES};
use super::formats::{self, MAX_CPUS, id_list, meminfo, numbered, parse_list, parse_map};
use super::reading::{Reading, huge_pages};
use super::{HUGE_PAGES, NODES, Node, NodePageTables, SysFiles, Topology};
use crate::error::Error;
use crate::units::NodeId;

const CPUS: &str = "sys/devices/system/cpu";
const CPUS_ONLINE: &str = "sys/devices/system/cpu/online";

/// Reads the whole machine.
pub(super) fn topology(files: &SysFiles) -> Result<Topology, Error> {
    let files = Bounded::new(files);
    let mut reading = Reading::of(&files);
    let online_cpus = online_cpus(&files, &mut |error| reading.warn(error.to_string()));
    let online_cpus = reading.noted(online_cpus);
    // Without NUMA support in the kernel there are no directories of nodes.
    let online = online(&files)?;
    let ids = online.as_deref().unwrap_or_default();
    let mut nodes = Vec::new();
    if online.is_none() {
        nodes.push(the_machine(&files, online_cpus.as_deref())?);
    }
    for id in ids {
        let mut node = node(&files, *id)?;
        if let Some(online) = &online_cpus {
            node.cpus.retain(|cpu| online.binary_search(cpu).is_ok());
        }
        node.cpus.shrink_to_fit();
        nodes.push(node);
    }
    if nodes.iter().all(|node| node.cpus.is_empty()) {
        reading.warn(format!("{CPUS}: no node has a CPU that is online"));
    }
    let distances = ids.iter().map(|id| reading.distances(*id, ids.len())).collect();
    for node in &mut nodes {
        node.huge_pages = reading.huge_pages(&huge_page_directory(online.is_some(), node.id));
        if online.is_some() {
            node.access =
                [0, 1].into_iter().filter_map(|class| reading.access(node.id, class)).collect();
            node.side_caches = reading.side_caches(node.id);
        }
    }
    reading.set_tiers(&mut nodes);
    let possible = reading.possible(&nodes);
    let allowed = reading.allowed();
    if let (None, Some(mems)) = (&online, &allowed.mems)
        && mems.iter().any(|node| *node != NodeId(0))
    {
        let named = id_list(mems.iter().map(|node| node.0 as usize));
        reading.warn(format!(
            "{NODES} does not show the nodes, and the process may use the nodes {named}: all \
             memory counts as that of node 0"
        ));
    }
    Ok(Topology { nodes, possible, distances, allowed, warnings: reading.into_warnings() })
}

/// Reads one node if it is online, without tier, access classes and side caches. Huge pages of a
/// size whose files are damaged are left out.
pub(super) fn node_now(files: &SysFiles, id: NodeId) -> Result<Option<Node>, Error> {
    let files = Bounded::new(files);
    let online = online(&files)?;
    let mut node = match &online {
        Some(online) if online.contains(&(id.0 as usize)) => node(&files, id.0 as usize)?,
        None if id == NodeId(0) => the_machine(&files, None)?,
        _ => return Ok(None),
    };
    let found = huge_pages(&files, &huge_page_directory(online.is_some(), id))?;
    node.huge_pages = found.into_iter().flatten().collect();
    Ok(Some(node))
}

/// The free bytes of one node; `None` if the kernel has no file about it.
pub(super) fn free_now(files: &SysFiles, id: NodeId) -> Result<Option<u64>, Error> {
    let path = format!("{NODES}/node{}/meminfo", id.0);
    let Some(text) = files.text_if_there(&path)? else { return Ok(None) };
    let (_, free) = meminfo(&text).map_err(|reason| files.damaged(&path, reason))?;
    Ok(Some(free))
}

/// The page tables on each online node.
pub(super) fn page_tables(files: &SysFiles) -> Result<Vec<NodePageTables>, Error> {
    let files = Bounded::new(files);
    let on = |id: usize, path: String| {
        let text = files.text(&path)?;
        let (bytes, secondary_bytes) =
            formats::page_tables(&text).map_err(|reason| files.damaged(&path, reason))?;
        Ok(NodePageTables { node: NodeId(id as u32), bytes, secondary_bytes })
    };
    match online(&files)? {
        Some(online) => {
            online.iter().map(|id| on(*id, format!("{NODES}/node{id}/meminfo"))).collect()
        }
        None => Ok(vec![on(0, "proc/meminfo".to_owned())?]),
    }
}

/// The directory that counts the huge pages of a node, relative to the root.
pub(super) fn huge_page_directory(has_numa: bool, node: NodeId) -> String {
    if has_numa { format!("{NODES}/node{}/hugepages", node.0) } else { HUGE_PAGES.to_owned() }
}

/// Whether the kernel shows nodes.
pub(super) fn has_nodes(files: &SysFiles) -> bool {
    // Damaged files do not mean that the kernel lacks NUMA support.
    !matches!(online(&Bounded::new(files)), Ok(None))
}

/// The ids of the online nodes; `None` if the kernel has no NUMA support.
fn online(files: &Bounded) -> Result<Option<Vec<usize>>, Error> {
    let path = format!("{NODES}/online");
    let Some(text) = files.text_if_there(&path)? else {
        // The kernel makes a directory for each online node, and has no list of them before
        // Linux 2.6.24.
        let names = files.names_if_there(NODES, MAX_ENTRIES)?.unwrap_or_default();
        let ids = numbered(&names, "node", MAX_NODES);
        let ids = ids.map_err(|reason| files.damaged(NODES, reason))?;
        return Ok(Some(ids).filter(|ids| !ids.is_empty()));
    };
    let ids = parse_list(&text, MAX_NODES).map_err(|reason| files.damaged(&path, reason))?;
    if ids.is_empty() {
        return Err(files.damaged(&path, "no node is online".into()));
    }
    Ok(Some(ids))
}

/// The CPUs that are online; `None` if the kernel has no list of them (before Linux 2.6.27) and
/// shows no CPUs. `warn` gets an error for each CPU with damaged files.
fn online_cpus(files: &Bounded, warn: &mut dyn FnMut(Error)) -> Result<Option<Vec<usize>>, Error> {
    if let Some(text) = files.text_if_there(CPUS_ONLINE)? {
        let cpus =
            parse_list(&text, MAX_CPUS).map_err(|reason| files.damaged(CPUS_ONLINE, reason))?;
        return match cpus.is_empty() {
            true => Err(files.damaged(CPUS_ONLINE, "no CPU is online".into())),
            false => Ok(Some(cpus)),
        };
    }
    let names = files.names_if_there(CPUS, MAX_ENTRIES)?.unwrap_or_default();
    let cpus = numbered(&names, "cpu", MAX_CPUS).map_err(|reason| files.damaged(CPUS, reason))?;
    let mut online = Vec::new();
    for cpu in cpus {
        // The first CPU often cannot go offline, and then has no such file.
        let is_online = files.number_if_there(&format!("{CPUS}/cpu{cpu}/online"));
        let is_online = is_online.unwrap_or_else(|error| {
            warn(error);
            None
        });
        if is_online != Some(0) {
            online.push(cpu);
        }
    }
    Ok(Some(online).filter(|online| !online.is_empty()))
}

fn node(files: &Bounded, id: usize) -> Result<Node, Error> {
    let directory = format!("{NODES}/node{id}");
    let cpus = cpus_of(files, &directory)?;
    let (total_bytes, free_bytes) = memory(files, &format!("{directory}/meminfo"))?;
    Ok(bare_node(id, cpus, total_bytes, free_bytes))
}

/// The CPUs of a node. Those of several nodes may be the same (`numa=fake`).
fn cpus_of(files: &Bounded, directory: &str) -> Result<Vec<usize>, Error> {
    let [list, map] = ["cpulist", "cpumap"].map(|name| format!("{directory}/{name}"));
    if let Some(text) = files.text_if_there(&list)? {
        return parse_list(&text, MAX_CPUS).map_err(|reason| files.damaged(&list, reason));
    }
    match files.text_if_there(&map)? {
        // Before Linux 2.6.26.
        Some(text) => parse_map(&text, MAX_CPUS).map_err(|reason| files.damaged(&map, reason)),
        None => Err(files.missing(&list)),
    }
}

/// Total and free bytes.
fn memory(files: &Bounded, path: &str) -> Result<(u64, u64), Error> {
    meminfo(&files.text(path)?).map_err(|reason| files.damaged(path, reason))
}

/// A node whose huge pages, tier, access classes and side caches are not known yet.
fn bare_node(id: usize, cpus: Vec<usize>, total_bytes: u64, free_bytes: u64) -> Node {
    let id = NodeId(id as u32);
    Node {
        id,
        cpus,
        total_bytes,
        free_bytes,
        huge_pages: Vec::new(),
        tier: None,
        access: Vec::new(),
        side_caches: Vec::new(),
    }
}

/// The one node of a kernel without NUMA support.
fn the_machine(files: &Bounded, online: Option<&[usize]>) -> Result<Node, Error> {
    let cpus = match online {
        Some(cpus) => cpus.to_vec(),
        None => online_cpus(files, &mut |_| ())?.ok_or_else(|| files.missing(CPUS_ONLINE))?,
    };
    let (total_bytes, free_bytes) = memory(files, "proc/meminfo")?;
    Ok(bare_node(0, cpus, total_bytes, free_bytes))
}
