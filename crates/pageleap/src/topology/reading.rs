//! Reads the parts of a machine that may be missing or damaged. A damaged part is left out, with a
//! warning that names it.

use pageleap_sys::MAX_NODES;

use super::cpuset::{self, Allowed};
use super::files::Bounded;
use super::formats::{distances, huge_page_bytes, node_ids, numbered, parse_list};
use super::shown::shortened;
use super::{Access, HugePages, NODES, Node, SideCache};
use crate::error::Error;
use crate::units::NodeId;

/// The directory of the tiers (Linux 6.1). It has one directory per tier, which lists the nodes of
/// the tier in `nodelist`.
const TIERS: &str = "sys/devices/virtual/memory_tiering";
/// Most huge page sizes, and most caches in front of memory, that are read. Linux has at most four
/// page sizes (arm64), and firmware names three caches.
const MAX_DIRECTORIES: usize = 64;
/// Every tier is below this limit.
const MAX_TIER: usize = 1 << 20;
/// Most warnings that are kept. Further warnings are only counted.
const MAX_WARNINGS: usize = 16;

/// Reads the parts that may be missing, and collects a warning for each damaged part.
pub(super) struct Reading<'a> {
    files: &'a Bounded<'a>,
    warnings: Vec<String>,
    more_warnings: usize,
}

impl<'a> Reading<'a> {
    pub(super) fn of(files: &'a Bounded<'a>) -> Reading<'a> {
        Reading { files, warnings: Vec::new(), more_warnings: 0 }
    }

    pub(super) fn warn(&mut self, warning: String) {
        if self.warnings.len() < MAX_WARNINGS {
            self.warnings.push(warning);
        } else {
            self.more_warnings += 1;
        }
    }

    pub(super) fn into_warnings(mut self) -> Vec<String> {
        match self.more_warnings {
            0 => {}
            1 => self.warnings.push("one more part was left out".into()),
            more => self.warnings.push(format!("{more} more parts were left out")),
        }
        self.warnings
    }

    /// The value that was found. After an error, `None`, and the error becomes a warning.
    pub(super) fn noted<T>(&mut self, found: Result<Option<T>, Error>) -> Option<T> {
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

    /// The numbers in the names of a directory's entries that begin with `prefix`.
    fn numbered_if_there(
        &mut self,
        directory: &str,
        prefix: &str,
        end: usize,
        most: usize,
    ) -> Option<Vec<usize>> {
        let files = self.files;
        let found = files.names_if_there(directory, most).and_then(|names| {
            let parse = |names: Vec<String>| numbered(&names, prefix, end);
            names.map(parse).transpose().map_err(|reason| files.damaged(directory, reason))
        });
        self.noted(found)
    }

    /// The row of distances of a node. Empty if the file is missing, or does not fit the online
    /// nodes. A node may have come or gone meanwhile.
    pub(super) fn distances(&mut self, id: usize, nodes: usize) -> Vec<u32> {
        let path = format!("{NODES}/node{id}/distance");
        self.parsed(&path, |text| distances(text, nodes)).unwrap_or_default()
    }

    /// The huge pages that a directory counts. A size whose files are damaged is left out.
    pub(super) fn huge_pages(&mut self, directory: &str) -> Vec<HugePages> {
        let sizes = huge_pages(self.files, directory).map(Some);
        let sizes = self.noted(sizes).unwrap_or_default();
        sizes.into_iter().filter_map(|size| self.noted(size.map(Some))).collect()
    }

    /// The speed of a node's memory for the initiators of an access class. The kernel makes the
    /// directory for every node that HMAT names, and writes 0 for an unknown value.
    pub(super) fn access(&mut self, id: NodeId, class: u32) -> Option<Access> {
        let directory = format!("{NODES}/node{}/access{class}/initiators", id.0);
        // The directory has a link to each initiator, and a few files with values.
        let initiators = self.numbered_if_there(&directory, "node", MAX_NODES, MAX_NODES + 64)?;
        let mut number = |name: &str| {
            let found = self.files.number_if_there(&format!("{directory}/{name}"));
            self.noted(found).filter(|value| *value > 0)
        };
        let access = Access {
            class,
            initiators: node_ids(initiators),
            read_bandwidth_mb_per_s: number("read_bandwidth"),
            write_bandwidth_mb_per_s: number("write_bandwidth"),
            read_latency_ns: number("read_latency"),
            write_latency_ns: number("write_latency"),
        };
        // A directory without initiators and values means nothing.
        let nothing = Access { class, ..Access::default() };
        (access != nothing).then_some(access)
    }

    /// The caches in front of a node's memory (Linux 5.2).
    pub(super) fn side_caches(&mut self, id: NodeId) -> Vec<SideCache> {
        let directory = format!("{NODES}/node{}/memory_side_cache", id.0);
        let levels =
            self.numbered_if_there(&directory, "index", MAX_DIRECTORIES, MAX_DIRECTORIES + 8);
        let levels = levels.unwrap_or_default();
        levels.into_iter().filter_map(|level| self.side_cache(&directory, level)).collect()
    }

    fn side_cache(&mut self, directory: &str, level: usize) -> Option<SideCache> {
        let mut number = |name: &str| {
            let found = self.files.number_if_there(&format!("{directory}/index{level}/{name}"));
            self.noted(found)
        };
        Some(SideCache {
            level: level as u32,
            bytes: number("size")?,
            line_bytes: number("line_size").filter(|bytes| *bytes > 0),
            // `enum cache_indexing` and `enum cache_write_policy` of the kernel.
            is_direct_mapped: number("indexing").map(|indexing| indexing == 0),
            writes_back: match number("write_policy") {
                Some(0) => Some(true),
                Some(1) => Some(false),
                _ => None,
            },
        })
    }

    pub(super) fn set_tiers(&mut self, nodes: &mut [Node]) {
        // A tier has at least one node.
        let tiers = self.numbered_if_there(TIERS, "memory_tier", MAX_TIER, MAX_NODES + 64);
        for tier in tiers.unwrap_or_default() {
            let path = format!("{TIERS}/memory_tier{tier}/nodelist");
            for id in self.list_if_there(&path, MAX_NODES).unwrap_or_default() {
                if let Some(node) = nodes.iter_mut().find(|node| node.id.0 as usize == id) {
                    node.tier = Some(tier as u32);
                }
            }
        }
    }

    /// The nodes that can become online, including the online ones.
    pub(super) fn possible(&mut self, nodes: &[Node]) -> Vec<NodeId> {
        let path = format!("{NODES}/possible");
        let online: Vec<NodeId> = nodes.iter().map(|node| node.id).collect();
        let possible = self.parsed(&path, |text| {
            let possible = node_ids(parse_list(text, MAX_NODES)?);
            match online.iter().find(|node| possible.binary_search(node).is_err()) {
                Some(node) => Err(format!("it lacks {node}, which is online")),
                None => Ok(possible),
            }
        });
        possible.unwrap_or(online)
    }

    /// The nodes and the CPUs that the process may use.
    pub(super) fn allowed(&mut self) -> Allowed {
        let files = self.files;
        cpuset::allowed(files, &mut |error| self.warn(error.to_string()))
    }
}

/// The huge pages that a directory counts, each size or the error about its files. Empty if the
/// directory does not exist.
pub(super) fn huge_pages(
    files: &Bounded,
    directory: &str,
) -> Result<Vec<Result<HugePages, Error>>, Error> {
    let names = files.names_if_there(directory, MAX_DIRECTORIES)?.unwrap_or_default();
    let of_size = |name: &String| {
        let page_bytes = huge_page_bytes(name).ok_or_else(|| {
            let reason = format!("`{}` is not a size of huge pages", shortened(name));
            files.damaged(directory, reason)
        })?;
        let count = |file: &str| {
            let path = format!("{directory}/{name}/{file}");
            let count = files.number(&path)?;
            // Callers multiply the count by the page size, so the product must fit into 64 bits.
            match count.checked_mul(page_bytes) {
                Some(_) => Ok(count),
                None => Err(files.damaged(&path, format!("{count} huge pages are impossible"))),
            }
        };
        Ok(HugePages {
            page_bytes,
            total: count("nr_hugepages")?,
            free: count("free_hugepages")?,
            surplus: count("surplus_hugepages")?,
        })
    };
    let sizes = names.iter().filter(|name| name.starts_with("hugepages-"));
    let mut sizes: Vec<_> = sizes.map(of_size).collect();
    sizes.sort_by_key(|size| size.as_ref().map_or(0, |pages| pages.page_bytes));
    Ok(sizes)
}
