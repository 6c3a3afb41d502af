//! Reading a [`Topology`]: which file says what, and which files may be missing.

use pageleap_sys::MAX_NODES;

use super::formats::{distances, huge_page_bytes, meminfo, parse_id, parse_list, status_value};
use super::{Access, HUGE_PAGES, HugePages, NODES, Node, SysFiles, Topology};
use crate::error::Error;
use crate::units::NodeId;

const CPUS_ONLINE: &str = "sys/devices/system/cpu/online";
const STATUS: &str = "proc/self/status";
/// The directory of the tiers (Linux 6.1). It has one directory per tier, which lists the nodes of
/// the tier in `nodelist`.
const TIERS: &str = "sys/devices/virtual/memory_tiering";
/// Every CPU number is below this limit (`NR_CPUS` is at most 8192, `CONFIG_MAXSMP` on x86).
const MAX_CPUS: usize = 8192;
/// Most tiers, and most huge page sizes, that are read. Linux has at most four page sizes (arm64),
/// and one tier per kind of memory.
const MAX_DIRECTORIES: usize = 64;
/// Most warnings that are kept. Further warnings are only counted.
const MAX_WARNINGS: usize = 16;

/// Reads the whole machine.
pub(super) fn topology(files: &SysFiles) -> Result<Topology, Error> {
    let mut reading = Reading { files, warnings: Vec::new(), more_warnings: 0 };
    let online_cpus = reading.list_if_there(CPUS_ONLINE, MAX_CPUS);
    // Without NUMA support in the kernel there are no directories of nodes.
    let online = online(files)?;
    let ids = online.as_deref().unwrap_or_default();
    let mut nodes = Vec::new();
    if online.is_none() {
        nodes.push(the_machine(files, online_cpus.as_deref())?);
    }
    // A CPU belongs to one node. Counting each CPU once bounds the lists of all nodes together.
    let mut free = vec![true; MAX_CPUS];
    for id in ids {
        let mut node = node(files, *id)?;
        let listed = node.cpus.len();
        node.cpus.retain(|cpu| std::mem::take(&mut free[*cpu]));
        if node.cpus.len() < listed {
            reading.warn(format!("{}: CPUs that another node also lists were left out", node.id));
        }
        if let Some(online) = &online_cpus {
            node.cpus.retain(|cpu| online.binary_search(cpu).is_ok());
        }
        node.cpus.shrink_to_fit();
        nodes.push(node);
    }
    let distances = ids.iter().map(|id| reading.distances(*id, ids.len())).collect();
    for node in &mut nodes {
        let found = huge_pages(files, &huge_page_directory(online.is_some(), node.id));
        node.huge_pages = reading.noted(found.map(Some)).unwrap_or_default();
        if online.is_some() {
            node.access =
                [0, 1].into_iter().filter_map(|class| reading.access(node.id, class)).collect();
        }
    }
    reading.set_tiers(&mut nodes);
    let possible = reading.list_if_there(&format!("{NODES}/possible"), MAX_NODES);
    let possible = possible.map_or_else(|| nodes.iter().map(|node| node.id).collect(), node_ids);
    let (mems_allowed, cpus_allowed) = reading.cpuset();
    let warnings = reading.into_warnings();
    Ok(Topology { nodes, possible, distances, mems_allowed, cpus_allowed, warnings })
}

/// Reads one node if it is online, without tier and access classes.
pub(super) fn node_now(files: &SysFiles, id: NodeId) -> Result<Option<Node>, Error> {
    let online = online(files)?;
    let mut node = match &online {
        Some(online) if online.contains(&(id.0 as usize)) => node(files, id.0 as usize)?,
        None if id == NodeId(0) => the_machine(files, None)?,
        _ => return Ok(None),
    };
    node.huge_pages = huge_pages(files, &huge_page_directory(online.is_some(), id))?;
    Ok(Some(node))
}

/// The free bytes of one node; `None` if the kernel has no file about it.
pub(super) fn free_now(files: &SysFiles, id: NodeId) -> Result<Option<u64>, Error> {
    let text = files.text_if_there(&format!("{NODES}/node{}/meminfo", id.0))?;
    Ok(text.map(|text| meminfo(&text).1))
}

/// The directory that counts the huge pages of a node, relative to the root.
pub(super) fn huge_page_directory(has_numa: bool, node: NodeId) -> String {
    if has_numa { format!("{NODES}/node{}/hugepages", node.0) } else { HUGE_PAGES.to_owned() }
}

/// The ids of the online nodes; `None` if the kernel has no NUMA support.
fn online(files: &SysFiles) -> Result<Option<Vec<usize>>, Error> {
    let path = format!("{NODES}/online");
    let Some(text) = files.text_if_there(&path)? else { return Ok(None) };
    let ids = parse_list(&text, MAX_NODES).map_err(|reason| files.damaged(&path, reason))?;
    if ids.is_empty() {
        return Err(files.damaged(&path, "no node is online".into()));
    }
    Ok(Some(ids))
}

fn node(files: &SysFiles, id: usize) -> Result<Node, Error> {
    let directory = format!("{NODES}/node{id}");
    let cpus = list(files, &format!("{directory}/cpulist"), MAX_CPUS)?;
    let (total_bytes, free_bytes) = meminfo(&files.text(&format!("{directory}/meminfo"))?);
    Ok(bare_node(id, cpus, total_bytes, free_bytes))
}

/// A node whose huge pages, tier and access classes are not known yet.
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
    }
}

/// The one node of a kernel without NUMA support.
fn the_machine(files: &SysFiles, online_cpus: Option<&[usize]>) -> Result<Node, Error> {
    let cpus = match online_cpus {
        Some(cpus) => cpus.to_vec(),
        None => list(files, CPUS_ONLINE, MAX_CPUS)?,
    };
    let (total_bytes, free_bytes) = meminfo(&files.text("proc/meminfo")?);
    Ok(bare_node(0, cpus, total_bytes, free_bytes))
}

/// The huge pages that a directory counts. Empty if the directory does not exist.
fn huge_pages(files: &SysFiles, directory: &str) -> Result<Vec<HugePages>, Error> {
    let mut sizes = Vec::new();
    for name in files.names_if_there(directory, MAX_DIRECTORIES)?.unwrap_or_default().iter() {
        let Some(page_bytes) = huge_page_bytes(name) else { continue };
        let count = |file: &str| {
            let path = format!("{directory}/{name}/{file}");
            let count = files.number(&path)?;
            // Callers multiply the count by the page size, so the product must fit into 64 bits.
            match count.checked_mul(page_bytes) {
                Some(_) => Ok(count),
                None => Err(files.damaged(&path, format!("{count} huge pages are impossible"))),
            }
        };
        sizes.push(HugePages {
            page_bytes,
            total: count("nr_hugepages")?,
            free: count("free_hugepages")?,
            surplus: count("surplus_hugepages")?,
        });
    }
    sizes.sort_unstable_by_key(|pages| pages.page_bytes);
    Ok(sizes)
}

fn list(files: &SysFiles, path: &str, end: usize) -> Result<Vec<usize>, Error> {
    parse_list(&files.text(path)?, end).map_err(|reason| files.damaged(path, reason))
}

fn node_ids(ids: Vec<usize>) -> Vec<NodeId> {
    ids.into_iter().map(|id| NodeId(id as u32)).collect()
}

/// Reads the parts that may be missing, and collects a warning for each damaged part.
struct Reading<'a> {
    files: &'a SysFiles,
    warnings: Vec<String>,
    more_warnings: usize,
}

impl Reading<'_> {
    fn warn(&mut self, warning: String) {
        if self.warnings.len() < MAX_WARNINGS {
            self.warnings.push(warning);
        } else {
            self.more_warnings += 1;
        }
    }

    fn into_warnings(mut self) -> Vec<String> {
        if self.more_warnings > 0 {
            self.warnings.push(format!("{} more files were left out", self.more_warnings));
        }
        self.warnings
    }

    /// The value that was found, or `None` and a warning.
    fn noted<T>(&mut self, found: Result<Option<T>, Error>) -> Option<T> {
        found.unwrap_or_else(|error| {
            self.warn(error.to_string());
            None
        })
    }

    fn parsed<T>(&mut self, path: &str, parse: impl Fn(&str) -> Result<T, String>) -> Option<T> {
        let files = self.files;
        let parse = |text: String| parse(&text).map_err(|reason| files.damaged(path, reason));
        let found = files.text_if_there(path).and_then(|text| text.map(parse).transpose());
        self.noted(found)
    }

    fn list_if_there(&mut self, path: &str, end: usize) -> Option<Vec<usize>> {
        self.parsed(path, |text| parse_list(text, end))
    }

    /// The row of distances of a node. Empty if the file is missing, or does not fit the online
    /// nodes. A node may have come or gone meanwhile.
    fn distances(&mut self, id: usize, nodes: usize) -> Vec<u32> {
        let path = format!("{NODES}/node{id}/distance");
        self.parsed(&path, |text| distances(text, nodes)).unwrap_or_default()
    }

    /// The speed of a node's memory for the initiators of a class. The kernel makes the directory
    /// for every node that HMAT names, and writes 0 for an unknown value.
    fn access(&mut self, id: NodeId, class: u32) -> Option<Access> {
        let directory = format!("{NODES}/node{}/access{class}/initiators", id.0);
        // The directory has a link to each initiator, and a few files with values.
        let names = self.files.names_if_there(&directory, MAX_NODES + 64);
        let names = self.noted(names)?;
        let nodes =
            names.iter().filter_map(|name| parse_id(name.strip_prefix("node")?, MAX_NODES).ok());
        let mut initiators = node_ids(nodes.collect());
        initiators.sort_unstable();
        initiators.dedup();
        initiators.shrink_to_fit();
        let mut number = |name: &str| {
            let path = format!("{directory}/{name}");
            let parse = |text: &str| {
                text.trim_ascii().parse::<u64>().map_err(|_| "not a number".to_owned())
            };
            self.parsed(&path, parse).filter(|value| *value > 0)
        };
        let access = Access {
            class,
            initiators,
            read_bandwidth_mb_per_s: number("read_bandwidth"),
            write_bandwidth_mb_per_s: number("write_bandwidth"),
            read_latency_ns: number("read_latency"),
            write_latency_ns: number("write_latency"),
        };
        // A directory without initiators and values says nothing.
        let nothing = Access { class, ..Access::default() };
        (access != nothing).then_some(access)
    }

    fn set_tiers(&mut self, nodes: &mut [Node]) {
        let names = self.files.names_if_there(TIERS, MAX_NODES + 64);
        let names = self.noted(names).unwrap_or_default();
        let tier = |name: &String| name.strip_prefix("memory_tier")?.parse::<u32>().ok();
        for tier in names.iter().filter_map(tier).take(MAX_DIRECTORIES) {
            let path = format!("{TIERS}/memory_tier{tier}/nodelist");
            for id in self.list_if_there(&path, MAX_NODES).unwrap_or_default() {
                if let Some(node) = nodes.iter_mut().find(|node| node.id.0 as usize == id) {
                    node.tier = Some(tier);
                }
            }
        }
    }

    /// The nodes and the CPUs that the process may use; `None` if the kernel does not say.
    fn cpuset(&mut self) -> (Option<Vec<NodeId>>, Option<Vec<usize>>) {
        let files = self.files;
        let status = self.noted(files.text_if_there(STATUS));
        let status = status.as_deref().unwrap_or_default();
        let mut list = |name: &str, end| {
            let text = status_value(status, name)?;
            let list = parse_list(text, end)
                .map_err(|reason| files.damaged(STATUS, format!("{name}: {reason}")));
            self.noted(list.map(Some))
        };
        let nodes = list("Mems_allowed_list", MAX_NODES).map(node_ids);
        (nodes, list("Cpus_allowed_list", MAX_CPUS))
    }
}
