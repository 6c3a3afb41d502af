//! A process for tests.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Image, MappingKind, MappingMemory, Movable, ProcessMemory};
use crate::units::{BASE_PAGE, NodeId};

impl ProcessMemory {
    /// A process with one mapping: private memory without a file, of which all base pages are
    /// present. Nodes 0 and 1 are allowed.
    pub(crate) fn modelled(mapped: Range<usize>) -> ProcessMemory {
        let mapping = MappingMemory {
            start: mapped.start,
            end: mapped.end,
            access: "rw-p".into(),
            kind: MappingKind::Anonymous,
            name: String::new(),
            policy: "default".into(),
            page_bytes: BASE_PAGE as u64,
            resident_bytes: mapped.len() as u64,
            huge_bytes: 0,
            may_be_huge: true,
            swapped_bytes: 0,
            on_nodes: BTreeMap::new(),
            shared_bytes: 0,
            movable: Movable::Yes,
            file_offset: 0,
        };
        ProcessMemory {
            pid: 7,
            name: "model".into(),
            namespace_pids: vec![7],
            allowed_nodes: vec![NodeId(0), NodeId(1)],
            page_table_bytes: 0,
            mappings: vec![mapping],
            warnings: Vec::new(),
            image: Image::NONE,
        }
    }
}
