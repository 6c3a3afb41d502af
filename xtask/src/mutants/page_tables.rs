//! Rows about page tables that move without the data.

use super::{Checker, Mutant};

const STAGING: &str = "crates/pageleap/src/leap/tables/staging.rs";
const MOVER: &str = "crates/pageleap/src/leap/tables/mover.rs";

pub const ROWS: &[Mutant] = &[
    Mutant {
        name: "page-tables-moved-as-they-are",
        file: STAGING,
        find: "below.map_or(BASE_PAGE, PageTableLevel::reach_bytes)",
        replace: "below.map_or(0, PageTableLevel::reach_bytes)",
        why: "the staging agrees with the region modulo 2 MB, so the kernel moves whole pages of page table, which stay on their node",
        claims: &["T2"],
        caught_by: Checker::Unit.says("page tables on another node"),
    },
    Mutant {
        name: "attributes-left-in-the-staging",
        file: MOVER,
        find: "tell_lost(books, restore_attributes(backend, &now, &span, has_stayed));",
        replace: "let _ = (now, has_stayed);",
        why: "a span that was mapped by its file after a refused call lacks the attributes that the program has set",
        claims: &["T3", "T4"],
        caught_by: Checker::Unit.says("an attribute is lost"),
    },
    Mutant {
        name: "a-hole-in-the-staging-for-ever",
        file: MOVER,
        find: "tables::Staging::Torn => staging.mend(&frames, len),",
        replace: "tables::Staging::Torn => {}",
        why: "another thread's mapping may land in the hole, and the job unmaps it at its end",
        claims: &["T5"],
        caught_by: Checker::Unit.says("a hole stays in the staging"),
    },
];
