//! Rows about page tables that move without the data.

use super::{Checker, Mutant};

const STAGING: &str = "crates/pageleap/src/leap/tables/staging.rs";
const PLAN: &str = "crates/pageleap/src/leap/tables/plan.rs";
const MOVER: &str = "crates/pageleap/src/leap/tables/mover.rs";

pub const ROWS: &[Mutant] = &[
    Mutant {
        name: "page-tables-moved-as-they-are",
        file: STAGING,
        find: "below.map_or(BASE_PAGE, PageTableLevel::reach_bytes)",
        replace: "below.map_or(0, PageTableLevel::reach_bytes)",
        why: "the staging agrees with the region modulo 2 MB, so the kernel moves whole pages of page table, which stay on their node",
        claims: &["T2"],
        caught_by: Checker::Unit.says("page tables would move as they are"),
    },
    Mutant {
        name: "beyond-whole-blocks",
        file: PLAN,
        find: "let whole = whole(level, &common);\n        if common",
        replace: "let whole = common.clone();\n        if common",
        why: "parts of blocks count as moved, and their page tables stay",
        claims: &["T2"],
        caught_by: Checker::Unit.says("parts of blocks move"),
    },
    Mutant {
        name: "attributes-left-in-the-staging",
        file: MOVER,
        find: "self.restore_from(&frames, &span, attributes, &mut lost);",
        replace: "lost.clear();",
        why: "a span that was mapped from its file after a refused call lacks the attributes that the program has set",
        claims: &["T3", "T4"],
        caught_by: Checker::Unit.says("an attribute is lost"),
    },
    Mutant {
        name: "locks-that-move",
        file: MOVER,
        find: "if !attributes.locked {\n            return Ok(());",
        replace: "if true {\n            return Ok(());",
        why: "the kernel takes the lock off the pages around the area",
        claims: &["T3"],
        caught_by: Checker::Unit.says("an attribute is lost"),
    },
];
