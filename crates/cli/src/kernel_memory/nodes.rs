//! On which node a physical address lies, by the kernel's memory blocks (sysfs).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use pageleap::NodeId;

use super::Reason;

/// The nodes of all memory.
pub(super) struct NodesOfMemory {
    block_bytes: u64,
    /// The node of each memory block by its number. `None`: parts of it lie on several nodes.
    blocks: BTreeMap<u64, Option<NodeId>>,
    /// The only node of the machine.
    only: Option<NodeId>,
}

impl NodesOfMemory {
    /// Reads the memory blocks below `/sys/devices/system`.
    ///
    /// `nodes` are the nodes of the machine. If there is one, a kernel without memory blocks, which
    /// are a part of memory hotplug, does as well.
    pub(super) fn read(system: &Path, nodes: &[NodeId]) -> Result<NodesOfMemory, Reason> {
        let only = Some(nodes).filter(|nodes| nodes.len() == 1).map(|nodes| nodes[0]);
        let mut found = NodesOfMemory { block_bytes: 1, blocks: BTreeMap::new(), only };
        if only.is_some() {
            return Ok(found);
        }
        let untold = |what: String| {
            Reason::new(format!("the kernel does not tell on which node its memory lies: {what}"))
        };
        let size = system.join("memory/block_size_bytes");
        let text = fs::read_to_string(&size)
            .map_err(|error| untold(format!("{}: {error}", size.display())))?;
        let bytes = u64::from_str_radix(text.trim(), 16).ok().filter(|bytes| *bytes > 0);
        found.block_bytes =
            bytes.ok_or_else(|| untold(format!("{} has no size", size.display())))?;
        for node in nodes {
            let folder = system.join(format!("node/node{}", node.0));
            let entries = fs::read_dir(&folder)
                .map_err(|error| untold(format!("{}: {error}", folder.display())))?;
            let blocks = entries.flatten().filter_map(|entry| {
                entry.file_name().to_str()?.strip_prefix("memory")?.parse::<u64>().ok()
            });
            blocks.for_each(|block| found.add(*node, block));
        }
        Ok(found)
    }

    /// Memory with blocks of this size: their nodes and numbers.
    #[cfg(test)]
    pub(super) fn of_blocks(block_bytes: u64, blocks: &[(u32, u64)]) -> NodesOfMemory {
        let mut found = NodesOfMemory { block_bytes, blocks: BTreeMap::new(), only: None };
        blocks.iter().for_each(|(node, block)| found.add(NodeId(*node), *block));
        found
    }

    /// A block of a node.
    fn add(&mut self, node: NodeId, block: u64) {
        self.blocks.entry(block).and_modify(|of| *of = None).or_insert(Some(node));
    }

    /// The node of a physical address. `None`: not told.
    pub(super) fn of(&self, physical: u64) -> Option<NodeId> {
        self.only.or_else(|| self.blocks.get(&(physical / self.block_bytes)).copied().flatten())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_nodes() {
        let root = tempfile::tempdir().unwrap();
        let system = root.path();
        let nodes = [NodeId(0), NodeId(2)];
        let reason = NodesOfMemory::read(system, &nodes).err().unwrap().to_string();
        assert!(reason.contains("block_size_bytes"), "{reason}");
        fs::create_dir_all(system.join("memory")).unwrap();
        fs::write(system.join("memory/block_size_bytes"), "8000000\n").unwrap();
        for (node, block) in [(0, 0), (0, 1), (2, 1), (2, 32)] {
            let folder = system.join(format!("node/node{node}/memory{block}"));
            fs::create_dir_all(folder).unwrap();
        }
        fs::create_dir_all(system.join("node/node2/memory_side_cache")).unwrap();
        let found = NodesOfMemory::read(system, &nodes).unwrap();
        let block = 128 << 20;
        let of = |at: u64| found.of(at).map(|node| node.0);
        let all = [of(0), of(block - 1), of(block), of(2 * block), of(32 * block + 5)];
        assert_eq!(all, [Some(0), Some(0), None, None, Some(2)]);
    }

    #[test]
    fn one_node_has_all_memory() {
        let found = NodesOfMemory::read(Path::new("/no such folder"), &[NodeId(3)]).unwrap();
        assert_eq!(found.of(1 << 40), Some(NodeId(3)));
    }
}
