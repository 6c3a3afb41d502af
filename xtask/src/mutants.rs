//! The mutation list of the protocol: each row breaks one rule on purpose, and some checker must
//! notice.
//!
//! The list is part of the argument in `docs/protocol.md`: a rule without a row is a claim, a rule
//! with a surviving row is not tested. `cargo xtask mutants` applies the rows one by one to a copy
//! of the workspace; see `mutation`.
//!
//! To add a row, append to [`TABLE`] and type `cargo xtask mutants --write`, which writes the table
//! of `docs/protocol.md`. `find` must occur exactly once in the file, so take enough of the line,
//! or several lines. A row whose text is gone fails the run: a stale list must not pass.

use std::fmt::Write;

use anyhow::Result;

use crate::marked;

/// The document that has the list as a table, from the workspace root.
pub const DOCUMENT: &str = "docs/protocol.md";

/// The command that writes that table, as the document's markers name it.
pub const COMMAND: &str = "cargo xtask mutants --write";

/// What must notice a mutant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Checker {
    /// The model checker: loom tests of the library.
    Loom,
    /// Whole jobs under long random schedules: shuttle tests of the library.
    Shuttle,
    /// The library's unit tests, and the tests of placements and of `auto`.
    Unit,
    /// The stress oracle, which must report lost writes: another failure is not the one that was
    /// predicted.
    Stress,
}

impl Checker {
    /// All of them, cheapest first.
    pub const ALL: [Checker; 4] = [Checker::Unit, Checker::Loom, Checker::Shuttle, Checker::Stress];

    /// Its name in tables and paths.
    pub fn name(self) -> &'static str {
        match self {
            Checker::Loom => "loom",
            Checker::Shuttle => "shuttle",
            Checker::Unit => "unit",
            Checker::Stress => "stress",
        }
    }

    /// What its output must contain for a failure to count as a catch. In capitals, since the names
    /// of tests and their ordinary reports ("0 lost") must not look like it.
    pub fn evidence(self) -> Option<&'static str> {
        match self {
            Checker::Loom | Checker::Shuttle | Checker::Unit => None,
            Checker::Stress => Some("LOST"),
        }
    }
}

/// One deliberate defect.
#[derive(Debug, Clone, Copy)]
pub struct Mutant {
    /// Short name in kebab case.
    pub name: &'static str,
    /// File from the workspace root.
    pub file: &'static str,
    /// Text that occurs exactly once in `file`.
    pub find: &'static str,
    /// Text to put in its place; it must still compile.
    pub replace: &'static str,
    /// What the change takes away, in one sentence.
    pub why: &'static str,
    /// Who must notice.
    pub caught_by: Checker,
}

/// The list.
pub const TABLE: &[Mutant] = &[
    Mutant {
        name: "commit-without-cas",
        file: SLOT,
        find: "if self.word.exchange(tracking.0, closed.0) {",
        replace: "if self.word.load() == tracking.0 {",
        why: "the migrator only checks that nobody wrote, as the paper does, instead of closing the area in the same step",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "commit-without-cas-for-real",
        file: SLOT,
        find: "if self.word.exchange(tracking.0, closed.0) {",
        replace: "if self.word.load() == tracking.0 {",
        why: "the same on the real kernel: the unguarded variant loses writes",
        caught_by: Checker::Stress,
    },
    Mutant {
        name: "open-without-cas",
        file: SLOT,
        find: "if !self.word.exchange(seen.0, opening.0) {\n            return; // somebody else was faster; look again\n        }",
        replace: "self.change(opening);",
        why: "a writer enters without checking that the attempt it saw is still tracking",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "open-before-the-call",
        file: SLOT,
        find: "let opening = seen.with(SlotPhase::Opening);",
        replace: "let opening = seen.with(SlotPhase::Open);",
        why: "no handshake: the migrator may start the next attempt before the writer's mprotect has run",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "track-before-protect",
        file: MPROTECT,
        find: "        if trackable {\n            effort.count(Call::Protect);",
        replace: "        if trackable {\n            if !hold {\n                slot.track();\n            }\n            effort.count(Call::Protect);",
        why: "writers may enter before the area is read-only, and are shut out again with nobody to let them in",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "opener-failure-ignored",
        file: SLOT,
        find: "if opened.is_ok() { SlotPhase::Open } else { SlotPhase::Closed }",
        replace: "if opened.is_ok() { SlotPhase::Open } else { SlotPhase::Open }",
        why: "a failed mprotect in the handler counts as done: the area stays read-only and writers fault for ever",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "handed-over-copy-committed",
        file: MPROTECT,
        find: "                    hold = true;\n                    continue;",
        replace: "                    hold = true;",
        why: "a copy is committed although the writer's failed call may have made the area writable",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "retire-before-commit",
        file: MPROTECT,
        find: "        // SAFETY: the area is closed and the copy is complete.\n",
        replace: "        slot.retire();\n        // SAFETY: the area is closed and the copy is complete.\n",
        why: "writers are let go before the new frames are in place",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "publish-without-epoch",
        file: SLOT,
        find: "epoch.fetch_add(1, Ordering::Release);",
        replace: "let _ = epoch;",
        why: "a fault that an attempt has caused can be taken for somebody else's, which ends the process",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "epoch-not-released",
        file: SLOT,
        find: "epoch.fetch_add(1, Ordering::Release);",
        replace: "epoch.fetch_add(1, Ordering::Relaxed);",
        why: "the new epoch can be seen before the slot's new word",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "epoch-not-acquired",
        file: SLOT,
        find: "let epoch = self.epoch.load(Ordering::Acquire);",
        replace: "let epoch = self.epoch.load(Ordering::Relaxed);",
        why: "the slots can be looked at as they were before the epoch",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "word-not-acquired",
        file: SYNC,
        find: "self.word.load(Ordering::Acquire)",
        replace: "self.word.load(Ordering::Relaxed)",
        why: "a writer that sees the word need not see the span and the backend that it speaks of",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "word-not-released",
        file: SYNC,
        find: "self.word.swap(to, Ordering::SeqCst);",
        replace: "self.word.swap(to, Ordering::Relaxed);",
        why: "the same from the other side",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "exchange-not-released",
        file: SYNC,
        find: "compare_exchange(from, to, Ordering::Release, Ordering::Relaxed)",
        replace: "compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed)",
        why: "the migrator may begin the next attempt while the opener still reads what belongs to this one",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "nobody-is-woken",
        file: SYNC,
        find: "self.sleepers() > 0 {",
        replace: "self.sleepers() > u32::MAX - 1 {",
        why: "threads that wait for an area sleep for ever",
        caught_by: Checker::Shuttle,
    },
    Mutant {
        name: "sleepers-counted-too-early",
        file: SYNC,
        find: "        self.word.swap(to, Ordering::SeqCst);\n        self.wake();",
        replace: "        let sleepers = self.sleepers();\n        self.word.swap(to, Ordering::SeqCst);\n        self.changes.fetch_add(1, Ordering::SeqCst);\n        if cfg!(loom) || sleepers > 0 {\n            self.kernel.wake_all(&self.changes);\n        }",
        why: "a thread that goes to sleep between the look for sleepers and the change of the word is overlooked",
        caught_by: Checker::Shuttle,
    },
    Mutant {
        name: "finished-without-the-lock",
        file: "crates/pageleap/src/job/handle.rs",
        find: "        *slot = report;",
        replace: "        *slot = report;\n        drop(slot);\n        let slot = ();",
        why: "whoever waits for a job can miss its end and sleep for ever",
        caught_by: Checker::Shuttle,
    },
    Mutant {
        name: "helpers-not-waited-for",
        file: CREW,
        find: "            if word & INSIDE_MASK == 0 {",
        replace: "            if word & OPEN == 0 {",
        why: "a helper still copies while the new frames are brought into place",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "late-helper-comes-in",
        file: CREW,
        find: "            if self.word.exchange(word, word + INSIDE) {",
        replace: "            if self.word.exchange(self.word.load(), self.word.load() + INSIDE) {",
        why: "a helper that was not running for a while copies what belongs to nobody any more",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "values-of-helpers-repeat",
        file: CREW,
        find: "said.wrapping_add(HELPERS_MASK + 1) | helpers as u64",
        replace: "said | helpers as u64",
        why: "a helper that takes no part misses that all are to end, and the job does not",
        caught_by: Checker::Shuttle,
    },
    Mutant {
        name: "parked-workers-not-told",
        file: RUN,
        find: "        lock(&self.state).over = true;",
        replace: "",
        why: "workers that were parked because more did not help sleep for ever, and the job does not end",
        caught_by: Checker::Shuttle,
    },
    Mutant {
        name: "last-area-not-announced",
        file: RUN,
        find: "may be what others wait for.\n            self.changed.notify_all();",
        replace: "may be what others wait for.\n            if lock(&self.state).queue.has_any() {\n                self.changed.notify_all();\n            }",
        why: "workers that wait for what the last area may leave behind sleep for ever, and the job does not end",
        caught_by: Checker::Shuttle,
    },
    Mutant {
        name: "no-generation",
        file: SLOT,
        find: "wrapping_add(1 << PHASE_BITS)",
        replace: "wrapping_add(0)",
        why: "a thread held up by one attempt cannot tell it from the next, and waits for that one too",
        caught_by: Checker::Unit,
    },
    Mutant {
        name: "who-waits-is-not-counted",
        file: RUN,
        find: "closing.closed(area.item, seen, waiters)",
        replace: "closing.closed(area.item, seen, waiters * 0)",
        why: "areas that threads use all the time are closed for as long as their copies take",
        caught_by: Checker::Unit,
    },
    Mutant {
        name: "who-waits-is-not-read",
        file: FOLLOW,
        find: "backend.count_waiting(following.tracker)",
        replace: "0",
        why: "the kernel's messages of threads that wait are not counted",
        caught_by: Checker::Unit,
    },
    Mutant {
        name: "sleepers-are-no-waiters",
        file: MPROTECT,
        find: "effort.waiters = slot.waits.take_waiters();",
        replace: "",
        why: "threads that wait in the fault handler are not counted",
        caught_by: Checker::Unit,
    },
    Mutant {
        name: "refused-protect-not-undone",
        file: MPROTECT,
        find: "unsafe {\n                    give_access_back(backend, &work.span, (!protected).then_some(errno), effort)\n                };\n                slot.retire();",
        replace: "slot.retire();",
        why: "a protection change that failed after its effect leaves the area read-only",
        caught_by: Checker::Unit,
    },
    Mutant {
        name: "commit-gives-up",
        file: COMMIT,
        find: "        Err(_) => None,\n    })\n}\n\n/// Maps frames again",
        replace: "        Err(_) => Some(Ok(())),\n    })\n}\n\n/// Maps frames again",
        why: "a commit that failed half-way leaves a hole",
        caught_by: Checker::Unit,
    },
    Mutant {
        name: "marked-after-the-copy",
        file: FOLLOW,
        find: "        way.mark(at, effort)?;\n        slot.crew.copy(backend, at.work.piece(source, 0..len), false);",
        replace: "        let _ = slot;\n        at.work.piece(source, 0..len).copy(backend);\n        way.mark(at, effort)?;",
        why: "a store that lands between the copy and the mark is not noticed",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "no-last-look",
        file: PRECOPY,
        find: "at.unproven(old.alias, len, false,",
        replace: "at.unproven(old.alias, 0, false,",
        why: "stores between the last look and the freeze are not copied",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "no-last-look-for-real",
        file: PRECOPY,
        find: "at.unproven(old.alias, len, false,",
        replace: "at.unproven(old.alias, 0, false,",
        why: "the same on the real kernel loses writes",
        caught_by: Checker::Stress,
    },
    Mutant {
        name: "nobody-is-held",
        file: PRECOPY,
        find: "backend.track(tracker, addr, len, true)",
        replace: "backend.track(tracker, addr, len, false)",
        why: "who touches the frozen area gets the old frames again, and stores to them are lost",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "nobody-is-held-for-real",
        file: PRECOPY,
        find: "backend.track(tracker, addr, len, true)",
        replace: "backend.track(tracker, addr, len, false)",
        why: "the same on the real kernel loses writes",
        caught_by: Checker::Stress,
    },
    Mutant {
        name: "forgotten-counts-as-clean",
        file: FOLLOW,
        find: "run.categories & (page_is::SWAPPED | page_is::WRITTEN) == page_is::SWAPPED",
        replace: "run.categories & page_is::WRITTEN == 0",
        why: "a page that was written and then lost its page table entry is not copied again",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "read-where-everybody-waits",
        file: PRECOPY,
        find: "let read = backend.read_file(old.file, offset, dst, pages.len());",
        replace: "let _ = offset; backend.copy(dst, old.alias + pages.start, pages.len(), at.work.method); let read: Result<(), crate::backend::Errno> = Ok(());",
        why: "the migrator waits for itself",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "no-last-look-behind-protection",
        file: PRECOPY_PROTECT,
        find: "at.unproven(addr, len, false,",
        replace: "at.unproven(addr, 0, false,",
        why: "stores between the last look and the protection are not copied",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "no-last-look-behind-the-barrier",
        file: WP_SYNC,
        find: "unsafe { self.look(at, runs <= FEW, effort, &mut copy) }?;",
        replace: "let _ = (&mut copy, runs <= FEW);",
        why: "stores of those who were let in last are not copied, and others may follow",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "closed-while-letting-in",
        file: NOTES,
        find: "if word & PHASE_MASK == LETTING {",
        replace: "if false {",
        why: "a page becomes writable after the last look",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "noted-before-let-in",
        file: NOTES,
        find: "        let_in(start + page * page_bytes, page_bytes);\n        self.written[page / 64].fetch_or(1 << (page % 64), Ordering::Release);\n",
        replace: "        self.written[page / 64].fetch_or(1 << (page % 64), Ordering::Release);\n        let_in(start + page * page_bytes, page_bytes);\n",
        why: "a page is forgotten, protected and copied, and then let go unnoticed",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "held-and-never-woken",
        file: FOLLOW,
        find: "            at.wake(effort);\n            Step::Migrated",
        replace: "            Step::Migrated",
        why: "threads that touched the area while it was frozen sleep for ever",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "refused-and-still-held",
        file: FOLLOW,
        find: "            // SAFETY: the span maps its old frames, with or without page tables.\n            unsafe { at.let_go(effort) };",
        replace: "",
        why: "after a refused call the area keeps its frames and everybody waits for it",
        caught_by: Checker::Unit,
    },
    Mutant {
        name: "guards-ignored",
        file: PINS,
        find: "            return Err(first);",
        replace: "            let _ = first;",
        why: "pages move although a device has their frames",
        caught_by: Checker::Shuttle,
    },
    Mutant {
        name: "guard-given-too-early",
        file: PINS,
        find: "while state.moving.iter().any(|moving| overlap(moving, pages)) {",
        replace: "while false {",
        why: "a guard is given while an attempt moves its pages",
        caught_by: Checker::Shuttle,
    },
    Mutant {
        name: "attempt-hides-from-guards",
        file: MOVER,
        find: "match place.region.pins.start_moving(&area.pages) {",
        replace: "match place.region.pins.start_moving(&area.pages).map(drop) {",
        why: "guards do not wait for the attempt that moves their pages",
        caught_by: Checker::Shuttle,
    },
    Mutant {
        name: "discard-hides-from-guards",
        file: REGION,
        find: "self.0.pins.start_moving(&pages).map_err(|_| Error::Pinned {",
        replace: "self.0.pins.start_moving(&pages).map(drop).map_err(|_| Error::Pinned {",
        why: "a guard is given on pages whose frames are given back",
        caught_by: Checker::Shuttle,
    },
    Mutant {
        name: "claims-before-frames",
        file: RECYCLE,
        find: "        vacated.iter().for_each(|vacated| vacated.share.announce(vacated.run));\n        claimed.iter_mut().for_each(Claimed::give_back_unused);\n        drop(claimed);",
        replace: "        drop(claimed);\n        vacated.iter().for_each(|vacated| vacated.share.announce(vacated.run));",
        why: "whoever may move the pages again finds no frames for them",
        caught_by: Checker::Shuttle,
    },
    Mutant {
        name: "announced-and-never-there",
        file: "crates/pageleap/src/pool/share.rs",
        find: "        lock(&self.0.state).announced -= run.frames;",
        replace: "        if result.is_ok() {\n            lock(&self.0.state).announced -= run.frames;\n        }",
        why: "whoever needs frames waits for ever for some that are out of circulation",
        caught_by: Checker::Unit,
    },
    Mutant {
        name: "never-hold",
        file: "crates/pageleap/src/job/plan.rs",
        find: "area.disturbed >= self.max_disturbed",
        replace: "area.disturbed >= self.max_disturbed && area.disturbed == 0",
        why: "areas under constant writes are retried without end",
        caught_by: Checker::Unit,
    },
    Mutant {
        name: "stray-tables-handed-out",
        file: SHARE,
        find: "lock(&self.0.state).strayed.set(part, !wanted);",
        replace: "lock(&self.0.state).strayed.set(part, false);",
        why: "page tables that were sent to another node are later handed out as if they lay where the share wants them",
        caught_by: Checker::Unit,
    },
    Mutant {
        name: "mapped-anew-and-not-noted",
        file: SHARE,
        find: "self.strayed.set(run, true);",
        replace: "",
        why: "page tables that some thread's call has allocated anew count as being where the share wants them",
        caught_by: Checker::Unit,
    },
    Mutant {
        name: "filled-again-and-not-noted",
        file: SHARE,
        find: "            if filled.is_ok() {\n                state.strayed.set(part, true);\n            }\n",
        replace: "",
        why: "page tables that some thread's call has allocated for an alias that lost its own count as being where the share wants them",
        caught_by: Checker::Unit,
    },
    Mutant {
        name: "cpuset-ignored",
        file: MOVER,
        find: "                Err(Stop::CpusetChanged)",
        replace: "                Ok(())",
        why: "a job goes on moving pages to a node that the cpuset no longer allows",
        caught_by: Checker::Unit,
    },
    Mutant {
        name: "frames-given-back-twice",
        file: "crates/pageleap/src/pool/frames.rs",
        find: "before.is_none_or(|b| b.end() <= run.first)",
        replace: "before.is_none_or(|b| b.end() <= run.end())",
        why: "a frame can get a second owner unnoticed",
        caught_by: Checker::Unit,
    },
    Mutant {
        name: "copied-without-being-stopped",
        file: STOP_COPY,
        find: "unsafe { at.freeze(effort) }?;",
        replace: "",
        why: "an area is copied and replaced although its page tables have not been taken away",
        caught_by: Checker::Loom,
    },
    Mutant {
        name: "stopped-and-faulted-in",
        file: TRACKER,
        find: "let (least, whole) = (uffd_mode::MINOR | uffd_mode::MISSING, HOLD_AGAINST_COLLAPSE);",
        replace: "let (least, whole) = (uffd_mode::MISSING, HOLD_AGAINST_COLLAPSE);",
        why: "in the window of stop-copy a store finds the old frame in the file, and does not wait",
        caught_by: Checker::Stress,
    },
];

const SLOT: &str = "crates/pageleap/src/engine/slot.rs";
const SHARE: &str = "crates/pageleap/src/pool/share.rs";
const RUN: &str = "crates/pageleap/src/job/run.rs";
const MPROTECT: &str = "crates/pageleap/src/engine/mprotect.rs";
const COMMIT: &str = "crates/pageleap/src/engine/commit.rs";
const FOLLOW: &str = "crates/pageleap/src/engine/follow.rs";
const PRECOPY: &str = "crates/pageleap/src/engine/precopy.rs";
const PRECOPY_PROTECT: &str = "crates/pageleap/src/engine/precopy_protect.rs";
const STOP_COPY: &str = "crates/pageleap/src/engine/stop_copy.rs";
const TRACKER: &str = "crates/pageleap/src/backend/tracker.rs";
const WP_SYNC: &str = "crates/pageleap/src/engine/wp_sync.rs";
const NOTES: &str = "crates/pageleap/src/engine/notes.rs";
const CREW: &str = "crates/pageleap/src/engine/crew.rs";
const RECYCLE: &str = "crates/pageleap/src/leap/recycle.rs";
const MOVER: &str = "crates/pageleap/src/leap/mover.rs";
const REGION: &str = "crates/pageleap/src/region/mod.rs";
const PINS: &str = "crates/pageleap/src/region/pins.rs";
const SYNC: &str = "crates/pageleap/src/sync.rs";

/// The list as a markdown table.
fn markdown(table: &[Mutant]) -> String {
    let cell =
        |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
    let mut text =
        String::from("| mutant | file | what is changed | caught by |\n|---|---|---|---|\n");
    for mutant in table {
        let (name, file, checker) = (mutant.name, mutant.file, mutant.caught_by.name());
        writeln!(text, "| `{name}` | `{file}` | {} | {checker} |", cell(mutant.why))
            .expect("a String grows");
    }
    text
}

/// The document with the table of this list.
pub fn with_table(document: &str, table: &[Mutant]) -> Result<String> {
    marked::replace(document, COMMAND, &markdown(table))
}

/// Everything that is wrong with the list itself. `read` gives the text of a file from the
/// workspace root.
pub fn problems(
    table: &[Mutant],
    document: &str,
    read: impl Fn(&str) -> std::io::Result<String>,
) -> Vec<String> {
    let mut problems = Vec::new();
    for (index, mutant) in table.iter().enumerate() {
        let name = mutant.name;
        if table[..index].iter().any(|earlier| earlier.name == name) {
            problems.push(format!("{name}: the name is used twice"));
        }
        match read(mutant.file) {
            Ok(text) => problems.extend(mutate(mutant, &text).err()),
            Err(error) => problems.push(format!("{name}: cannot read {}: {error}", mutant.file)),
        }
    }
    match with_table(document, table) {
        Err(error) => problems.push(format!("{DOCUMENT}: {error:#}")),
        Ok(current) if current != document => {
            problems.push(format!("{DOCUMENT}: its table is not this list; type `{COMMAND}`"));
        }
        Ok(_) => {}
    }
    problems
}

/// The text of the mutated file, or why the row does not fit the file.
pub fn mutate(mutant: &Mutant, text: &str) -> Result<String, String> {
    let Mutant { name, file, find, replace, .. } = mutant;
    if find.is_empty() || find == replace {
        return Err(format!("{name}: the replacement changes nothing"));
    }
    match text.matches(find).count() {
        1 => Ok(text.replacen(find, replace, 1)),
        0 => Err(format!("{name}: stale, {file} no longer contains {find:?}")),
        count => Err(format!("{name}: ambiguous, {file} contains {find:?} {count} times")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: Mutant = Mutant {
        name: "weak-cas",
        file: "src/state.rs",
        find: "Ordering::AcqRel",
        replace: "Ordering::Relaxed",
        why: "the freeze is not ordered\n before the copy | at all",
        caught_by: Checker::Loom,
    };

    #[test]
    fn exactly_one_occurrence_is_replaced() {
        assert_eq!(mutate(&ROW, "cas(Ordering::AcqRel);").unwrap(), "cas(Ordering::Relaxed);");
        assert!(mutate(&ROW, "cas();").unwrap_err().contains("stale"));
        assert!(mutate(&ROW, "Ordering::AcqRel Ordering::AcqRel").unwrap_err().contains("2 times"));
        let idle = Mutant { replace: ROW.find, ..ROW };
        assert!(mutate(&idle, ROW.find).unwrap_err().contains("changes nothing"));
    }

    #[test]
    fn each_defect_of_the_list_is_named() {
        let text = |_: &str| Ok(ROW.find.to_owned());
        let empty = format!("{}\n<!-- end -->\n", marked::begin(COMMAND));
        let document = |table: &[Mutant]| with_table(&empty, table).unwrap();
        assert!(problems(&[ROW], &document(&[ROW]), text).is_empty());
        assert_eq!(problems(&[ROW], &empty, text).len(), 1);
        assert_eq!(problems(&[ROW], "", text).len(), 1);
        assert_eq!(problems(&[ROW, ROW], &document(&[ROW, ROW]), text).len(), 1);
        let gone = |_: &str| Err(std::io::ErrorKind::NotFound.into());
        assert!(problems(&[ROW], &document(&[ROW]), gone)[0].contains("src/state.rs"));
    }

    #[test]
    fn markdown_keeps_one_row_per_line() {
        let text = markdown(&[ROW]);
        let row = text.lines().nth(2).unwrap();
        assert_eq!(
            row,
            "| `weak-cas` | `src/state.rs` | the freeze is not ordered before the copy \\| at all | loom |"
        );
        assert_eq!(text.lines().count(), 3);
    }
}
