//! Rows about memory that no pool owns: moved by the kernel, and in place.

use super::{Checker, Mutant};

const WINDOW: &str = "crates/pageleap/src/anonymous/window.rs";
const OBSERVE: &str = "crates/pageleap/src/observe.rs";
const KERNEL_CALL: &str = "crates/pageleap/src/kernel/call.rs";
const KERNEL_MOVER: &str = "crates/pageleap/src/kernel/mover.rs";
const KERNEL_ROOM: &str = "crates/pageleap/src/kernel/room.rs";
const KERNEL_SETTLE: &str = "crates/pageleap/src/kernel/settle.rs";
const JOB_HANDLE: &str = "crates/pageleap/src/job/handle.rs";
const OUTCOMES: &str = "crates/pageleap/src/job/outcomes.rs";

pub const ROWS: &[Mutant] = &[
    Mutant {
        name: "dropped-pages-count-as-tried",
        file: KERNEL_CALL,
        find: "Some(last) if status[..last].contains(&UNWRITTEN) => last + 1,",
        replace: "Some(last) if status[..last].contains(&UNWRITTEN) => nodes.len(),",
        why: "pages that the kernel has dropped behind a batch that failed are taken for pages in use",
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "refused-once-is-enough",
        file: KERNEL_MOVER,
        find: "Persistence::Tries(tries) => area.refused + 1 < tries,",
        replace: "Persistence::Tries(tries) => tries == 0,",
        why: "a page that is in use for a moment is not tried again",
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "one-page-stands-for-a-huge-page",
        file: KERNEL_MOVER,
        find: "                span = 1;\n",
        replace: "",
        why: "a block of small pages counts as moved when its first page has moved",
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "watermarks-ignored",
        file: KERNEL_ROOM,
        find: "zones.insert(name, (zone.high + zone.protection).min(zone.managed));",
        replace: "zones.insert(name, zone.managed.min(0));",
        why: "a node is filled until the kernel reclaims memory of others",
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "moved-pages-forgotten",
        file: OUTCOMES,
        find: "(*outcome != PageOutcome::Migrated).then_some((*start..*end, *outcome))",
        replace: "(*end > 0).then_some((*start..*end, *outcome))",
        why: "a page that has moved counts as unchanged when its neighbours are tried again",
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "moved-and-not-counted",
        file: WINDOW,
        find: "more => at += more,",
        replace: "_ => break,",
        why: "a page that UFFDIO_MOVE has moved and not counted is neither parked nor in its place",
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "parked-where-pages-are-left",
        file: "crates/pageleap/src/anonymous/vacated.rs",
        find: "state.places[left.place] = Content::UnderWay;",
        replace: "state.places[left.place] = Content::Nothing;",
        why: "the watcher gives back what the next window has parked",
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "split-mapping-given-up",
        file: WINDOW,
        find: "Some(_) if len > BASE_PAGE",
        replace: "Some(_) if len == 0",
        why: "pages of a mapping that was split in the window count as pages without a mapping",
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "discarded-and-not-noted",
        file: WINDOW,
        find: "UffdMessage::Remove(from, to) => self.note_discarded(from, to),",
        replace: "UffdMessage::Remove(..) => {}",
        why: "pages that the program has discarded in a window come back, and memory of others is taken",
        caught_by: Checker::Directed.says("a window brings back what was discarded"),
    },
    Mutant {
        name: "zeros-in-an-open-area",
        file: WINDOW,
        find: "if open.contains(&page) {",
        replace: "if open.contains(&page) && page == 0 {",
        why: "a thread finds zeros where a page is away, and the copy finds its place taken",
        caught_by: Checker::Directed.says("a page is seen empty in a window"),
    },
    Mutant {
        name: "messages-without-the-lock",
        file: WINDOW,
        find: "let open = self.shared.lock();",
        replace: "let open = self.shared.lock().clone();",
        why: "what a message says is noted after the worker has gone on",
        caught_by: Checker::Directed.says("a window has taken a page of another mapping"),
    },
    Mutant {
        name: "nobody-is-woken-after-a-window",
        file: WINDOW,
        find: "let _ = sys::uffd_wake(self.uffd, area.start, area.len());",
        replace: "",
        why: "threads that have touched pages in a window wait for ever",
        caught_by: Checker::Directed.says("a thread waits for a page whose window has ended"),
    },
    Mutant {
        name: "taken-though-discarded",
        file: WINDOW,
        find: "let (alike, is_discarded) = self.alike(at, run.at + run.len);",
        replace: "let (alike, is_discarded) = (self.alike(at, run.at + run.len).0, false);",
        why: "pages of a mapping that has replaced the range are taken",
        caught_by: Checker::Directed.says("a window has taken a page of another mapping"),
    },
    Mutant {
        name: "brought-though-discarded",
        file: WINDOW,
        find: "let (len, is_discarded) = self.alike(at, end);",
        replace: "let (len, is_discarded) = (self.alike(at, end).0, false);",
        why: "pages that were discarded while they were copied come back",
        caught_by: Checker::Directed.says("a window brings back what was discarded"),
    },
    Mutant {
        name: "mapping-told-twice",
        file: OBSERVE,
        find: "from.max(last.end)",
        replace: "from.min(last.end)",
        why: "a mapping that has grown while mappings were read overlaps another one of other access",
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "a-stopped-job-asks-about-all-pages",
        file: KERNEL_SETTLE,
        find: "if !books.is_to_stop() {",
        replace: "if pages > 0 {",
        why: "Ctrl-C does not end a job before it has asked about all its pages",
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "needless-pages-are-not-asked-about",
        file: KERNEL_SETTLE,
        find: "(PageOutcome::Unchanged, None) => !has_one_target,",
        replace: "(PageOutcome::Unchanged, None) => false,",
        why: "a page that lay right is taken along by its folio, and the report does not notice",
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "the-last-progress-is-a-sum-of-attempts",
        file: JOB_HANDLE,
        find: "self.bytes_migrated.store(migrated, Ordering::Relaxed);",
        replace: "let _ = migrated;",
        why: "progress counts pages that have moved on, and not those that came along",
        caught_by: Checker::Unit.fails(),
    },
    Mutant {
        name: "tracer-waits-for-memory-in-place",
        file: "crates/pageleap/src/anonymous/mover.rs",
        find: "            self.in_place.store(false, Relaxed);",
        replace: "            self.in_place.store(true, Relaxed);",
        why: "memory in place moves by windows while a tracer has stopped the threads that end them",
        caught_by: Checker::Unit.fails(),
    },
];
