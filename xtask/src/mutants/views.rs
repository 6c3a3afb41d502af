//! Rows about views, the further mappings of a region's frames.

use super::{Checker, Mutant};

const STOP_COPY: &str = "crates/pageleap/src/engine/stop_copy.rs";
const FOLLOW: &str = "crates/pageleap/src/engine/follow.rs";
const VIEWS: &str = "crates/pageleap/src/engine/views.rs";
const RANGES: &str = "crates/pageleap/src/address_ranges.rs";
const REPLICAS: &str = "crates/pageleap/src/region/replicas.rs";
const REGION: &str = "crates/pageleap/src/region/mod.rs";

pub const ROWS: &[Mutant] = &[
    Mutant {
        name: "views-left-open",
        file: STOP_COPY,
        find: "            at.close_views(effort)?;\n",
        replace: "",
        why: "threads go on to store through views while the area is copied",
        claims: &["V1", "V2"],
        caught_by: Checker::Loom.fails(),
    },
    Mutant {
        name: "standby-left-empty",
        file: STOP_COPY,
        find: "            at.prepare_views(effort)\n",
        replace: "            Ok(())\n",
        why: "what moves to the view in the window is not the mapping of the new frames",
        claims: &["V3"],
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "views-refused-and-still-closed",
        file: FOLLOW,
        find: "                at.let_go(effort);\n                at.reopen_views(effort);",
        replace: "                at.let_go(effort);",
        why: "after a refused call the views keep their frames, and everybody waits for them",
        claims: &["V4"],
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "views-never-woken",
        file: VIEWS,
        find: "            wake(backend, tracker, (view.addr, len), effort);\n        }\n        self.prefer_own",
        replace: "        }\n        self.prefer_own",
        why: "threads that touched a view while it was closed sleep for ever",
        claims: &["V1", "V2"],
        caught_by: Checker::Loom.fails(),
    },
    Mutant {
        name: "holes-of-views-unknown",
        file: RANGES,
        find: "let home = home.wrapping_add(addr - start);",
        replace: "let home = { _ = home; addr };",
        why: "a thread that meets a hole in a view finds no slot that covers it, and gets SIGSEGV",
        claims: &["V5"],
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "views-made-under-a-job",
        file: REPLICAS,
        find: "        // Jobs and calls know which views there are, so none may work meanwhile.\n        let _claim = inner.claim(0..inner.capacity)?;",
        replace: "",
        why: "a job that has begun without the view leaves it open",
        claims: &["V6"],
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "views-not-backed",
        file: REGION,
        find: "            inner.map_in_views(&new).map_err(|error| {",
        replace: "            Ok(()).map_err(|error| {",
        why: "new pages are handed out that a view does not map",
        claims: &["V7"],
        caught_by: Checker::Unit.fails(),
    },
];
