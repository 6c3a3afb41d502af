//! Lists and jobs on a modelled kernel.

use std::collections::BTreeMap;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use pageleap_sys::Errno;
use proptest::prelude::*;

use super::batch::Batch;
use super::call::Calls;
use super::list::{List, PageStatus};
use super::model::{Folio, Kind, Model, NODES, folio};
use super::room::Rooms;
use super::target::Process;
use super::{HUGE, KernelMigration, Mode};
use crate::cases::cases;
use crate::job::area::Reason;
use crate::job::outcomes::{PageOutcome, PageRun};
use crate::job::report::{Ended, Report};
use crate::placement::Placement;
use crate::process::ProcessMemory;
use crate::sync::Instant;
use crate::units::{BASE_PAGE, Call, NodeId};

fn addresses(pages: impl IntoIterator<Item = u64>) -> Vec<usize> {
    pages.into_iter().map(|page| page as usize * BASE_PAGE).collect()
}

/// Moves a list, and returns the status of each page.
fn move_list(model: &Model, pages: &[usize], nodes: &[NodeId], mode: Mode) -> Vec<PageStatus> {
    let none = PageStatus { node: None, reason: None };
    let status = vec![none; pages.len()];
    let mut list = List { calls: model, is_gone: &|| false, pages, status, shared: false };
    list.look(0..pages.len()).unwrap();
    list.move_to(nodes, &Rooms::unlimited(), Batch::new(None, Duration::from_secs(1)), mode);
    list.settle(nodes);
    list.status
}

/// Every tenth page refuses to move, for one of four reasons in turn.
fn every_tenth_refuses() -> Vec<(u64, Folio)> {
    let kind = |page: u64| match page {
        page if !page.is_multiple_of(10) => Some(Kind::Movable),
        page => match page / 10 % 4 {
            0 => Some(Kind::Pinned),
            1 => Some(Kind::Shared),
            2 => Some(Kind::Zero),
            _ => None,
        },
    };
    (0..1000).filter_map(|page| Some((page, folio(1, kind(page)?)))).collect()
}

#[test]
fn exactly_those_pages_stay_that_refuse() {
    let pages = addresses(0..1000);
    let nodes = vec![NodeId(1); 1000];
    // The kernel's call alone leaves nearly all pages where they are.
    let model = Model::new(every_tenth_refuses());
    let mut status = vec![0; 1000];
    model.move_pages(&pages, &[1; 1000], &mut status, false).unwrap();
    assert!((0..1000).filter(|page| model.node(*page) == Some(1)).count() < 100);

    let model = Model::new(every_tenth_refuses());
    let found = move_list(&model, &pages, &nodes, Mode::Retry);
    for (page, status) in found.iter().enumerate() {
        let on = |node| Some(NodeId(node));
        let wanted = match (page % 10, page / 10 % 4) {
            (1.., _) => PageStatus { node: on(1), reason: None },
            (_, 0) => PageStatus { node: on(0), reason: Some(Reason::InUse) },
            (_, 1) => PageStatus { node: on(0), reason: Some(Reason::Shared) },
            _ => PageStatus { node: None, reason: None },
        };
        assert_eq!(*status, wanted, "page {page}");
    }
    assert!(model.moving_calls() <= 120, "{} calls", model.moving_calls());
}

#[test]
fn a_page_that_moved_on_with_its_neighbours_says_so() {
    let model = Model::new([(0, folio(512, Kind::Movable)), (512, folio(1, Kind::Movable))]);
    let nodes: Vec<NodeId> = (0..513).map(|page| NodeId(page % 2)).collect();
    model.0.lock().unwrap().folios.get_mut(&512).unwrap().node = 1;
    let found = move_list(&model, &addresses(0..513), &nodes, Mode::Retry);
    for (page, status) in found.iter().enumerate() {
        let on = model.node(page as u64).map(NodeId);
        assert_eq!(status.node, on, "page {page} lies on another node than its status says");
        assert_eq!(status.reason.is_none(), on == Some(nodes[page]), "page {page}: {status:?}");
    }
    assert!(found.iter().any(|status| status.reason == Some(Reason::MovedOn)), "{found:?}");
}

#[test]
fn pages_of_a_program_that_is_gone_are_not_said_to_be_absent() {
    let model = Model::new((0..64).map(|page| (page, folio(1, Kind::Movable))));
    // The first query has 64 pages, and the query after the first call the 16 that it has moved.
    model.0.lock().unwrap().executes_at = Some(64 + 16);
    let found = by_page(&run_in_batches(&model, 64, 16));
    assert_eq!(found[0], (PageOutcome::Migrated, None));
    let gone = (PageOutcome::Failed, Some(Reason::ProcessEnded));
    assert!(found[16..].iter().all(|page| *page == gone), "{:?}", &found[16..]);
}

#[test]
fn a_page_that_is_busy_for_a_while_moves_unless_the_mode_is_light() {
    for (mode, moved) in [(Mode::Light, 1), (Mode::Retry, 3)] {
        let kinds = [Kind::Busy(2), Kind::Movable, Kind::Busy(3)];
        let model = Model::new((0..3).zip(kinds.map(|kind| folio(1, kind))));
        let found = move_list(&model, &addresses(0..3), &[NodeId(1); 3], mode);
        let there = found.iter().filter(|status| status.node == Some(NodeId(1))).count();
        assert_eq!(there, moved, "{mode}: {found:?}");
    }
}

#[test]
fn a_full_node_takes_what_it_can_and_the_rest_says_so() {
    let model = Model::new((0..300).map(|page| (page, folio(1, Kind::Movable))));
    model.0.lock().unwrap().room = Some(100);
    let found = move_list(&model, &addresses(0..300), &[NodeId(1); 300], Mode::Retry);
    let full = Some(Reason::Refused(Call::MovePages, Errno(libc::ENOMEM)));
    assert_eq!(found.iter().filter(|s| s.reason.is_none()).count(), 100);
    assert_eq!(found.iter().filter(|s| s.reason == full).count(), 200);
    assert!(found.iter().all(|s| s.code() == 1 || s.code() == -libc::ENOMEM));
}

/// A process whose one mapping has `pages` pages.
fn process(model: &Model, pages: u64, page_bytes: u64) -> (ProcessMemory, Process) {
    let mut memory = ProcessMemory::modelled(0..pages as usize * BASE_PAGE);
    memory.mappings[0].page_bytes = page_bytes;
    memory.mappings[0].huge_bytes = if page_bytes == BASE_PAGE as u64 { HUGE as u64 } else { 0 };
    let process = Process::modelled(memory.pid, Box::new(model.clone()));
    (memory, process)
}

/// Runs a job over all of the mapping. Returns the outcomes of its pages.
fn run(model: &Model, pages: u64, page_bytes: u64, to: Placement, mode: Mode) -> Vec<PageRun> {
    let (memory, process) = process(model, pages, page_bytes);
    let all = KernelMigration::new().range(&memory, 0..pages as usize * BASE_PAGE, to);
    finish(&all.mode(mode), process, pages)
}

/// Runs a job in calls of `batch` pages.
fn run_in_batches(model: &Model, pages: u64, batch: usize) -> Vec<PageRun> {
    let (memory, process) = process(model, pages, BASE_PAGE as u64);
    let all = KernelMigration::new().range(&memory, 0..pages as usize * BASE_PAGE, NodeId(1));
    finish(&all.batch_pages(batch), process, pages)
}

fn finish(migration: &KernelMigration<'_>, process: Process, pages: u64) -> Vec<PageRun> {
    let plan = migration.plan_on(vec![process], &[Some(0)], Rooms::unlimited()).unwrap();
    let job = plan.start(migration.settings(), Vec::new(), Instant::now()).unwrap();
    let report = job.wait();
    assert_eq!(report.pages.total(), pages);
    assert_eq!(report.pages.not_attempted + report.pages.busy, 0, "{report}");
    report.runs
}

/// The outcome of each page.
fn by_page(runs: &[PageRun]) -> Vec<(PageOutcome, Option<Reason>)> {
    let each = |run: &PageRun| {
        let state = (run.outcome, run.reason);
        vec![state; run.range.len() / BASE_PAGE]
    };
    runs.iter().flat_map(each).collect()
}

#[test]
fn huge_pages_move_as_one_and_a_pinned_one_takes_few_calls() {
    const PAGES: u64 = (HUGE / BASE_PAGE) as u64;
    let kinds = [Kind::Movable, Kind::Pinned, Kind::Movable, Kind::Shared, Kind::Busy(1)];
    let folios = (0..).map(|i| i * PAGES).zip(kinds.map(|kind| folio(PAGES, kind)));
    let model = Model::new(folios);
    let runs = run_in_batches(&model, 5 * PAGES, PAGES as usize);
    let of = |run: &PageRun| (run.range.len() / HUGE, run.outcome, run.reason);
    assert_eq!(
        runs.iter().map(of).collect::<Vec<_>>(),
        [
            (1, PageOutcome::Migrated, None),
            (1, PageOutcome::Failed, Some(Reason::InUse)),
            (1, PageOutcome::Migrated, None),
            (1, PageOutcome::Unchanged, Some(Reason::Shared)),
            (1, PageOutcome::Migrated, None),
        ]
    );
    assert!(model.moving_calls() <= 40, "{} calls", model.moving_calls());
}

/// Pages between two busy ones are not queried again with them.
#[test]
fn only_pages_that_stayed_are_tried_again() {
    const PAGES: u64 = 8192;
    let kind = |page| match page {
        0 | 4000 => Kind::Pinned,
        PAGES.. => unreachable!(),
        page if page == PAGES - 1 => Kind::Busy(2),
        _ => Kind::Movable,
    };
    let model = Model::new((0..PAGES).map(|page| (page, folio(1, kind(page)))));
    let runs = run_in_batches(&model, PAGES, 128);
    let failed = runs.iter().filter(|run| run.outcome == PageOutcome::Failed);
    assert_eq!(failed.map(|run| run.range.len() / BASE_PAGE).sum::<usize>(), 2);
    // Each page is queried before and after its call, and the rest of a query is queried again.
    let quiet = Model::new((0..PAGES).map(|page| (page, folio(1, Kind::Movable))));
    run_in_batches(&quiet, PAGES, 128);
    let asked = [&model, &quiet].map(Model::asked);
    assert!(
        asked[0] < asked[1] + PAGES / 2,
        "{asked:?} pages were asked about, the latter at rest"
    );
}

#[test]
fn small_pages_that_look_like_a_huge_one_all_move() {
    const PAGES: u64 = (HUGE / BASE_PAGE) as u64;
    let kind = |page| if page == PAGES + 7 { Kind::Pinned } else { Kind::Movable };
    let model = Model::new((0..3 * PAGES).map(|page| (page, folio(1, kind(page)))));
    let runs = run(&model, 3 * PAGES, BASE_PAGE as u64, NodeId(1).into(), Mode::Retry);
    for (page, (outcome, reason)) in (0..).zip(by_page(&runs)) {
        let wanted = match kind(page) {
            Kind::Pinned => (PageOutcome::Failed, Some(Reason::InUse), Some(0)),
            _ => (PageOutcome::Migrated, None, Some(1)),
        };
        assert_eq!((outcome, reason, model.node(page)), wanted, "page {page}");
    }
}

/// A forked child shares all memory until it ends.
#[test]
fn pages_of_a_snapshot_move_when_it_has_ended() {
    const PAGES: u64 = 64;
    let all = |mode| {
        let kind = |page| if page % 2 == 0 { Kind::Snapshot(2) } else { Kind::Movable };
        let model = Model::new((0..PAGES).map(|page| (page, folio(1, kind(page)))));
        let runs = run(&model, PAGES, BASE_PAGE as u64, NodeId(1).into(), mode);
        by_page(&runs).iter().filter(|is| **is == (PageOutcome::Migrated, None)).count()
    };
    assert_eq!(all(Mode::Insist), 64);
    assert_eq!(all(Mode::Retry), 32);
}

#[test]
fn reserved_huge_pages_are_named_once_each() {
    const PAGES: u64 = (HUGE / BASE_PAGE) as u64;
    let kinds = [Kind::Movable, Kind::Pinned, Kind::Movable];
    let model = Model::new((0..).map(|i| i * PAGES).zip(kinds.map(|kind| folio(PAGES, kind))));
    let runs = run(&model, 4 * PAGES, HUGE as u64, NodeId(1).into(), Mode::Light);
    let of = |run: &PageRun| (run.range.len() / HUGE, run.outcome, run.reason);
    assert_eq!(
        runs.iter().map(of).collect::<Vec<_>>(),
        [
            (1, PageOutcome::Migrated, None),
            (1, PageOutcome::Failed, Some(Reason::InUse)),
            (1, PageOutcome::Migrated, None),
            (1, PageOutcome::Unchanged, Some(Reason::Absent)),
        ]
    );
}

#[test]
fn pages_are_spread_over_several_nodes() {
    let model = Model::new((0..64).map(|page| (page, folio(1, Kind::Movable))));
    let to = Placement::weighted([(NodeId(0), 1), (NodeId(1), 3)]).stripe_bytes(BASE_PAGE);
    run(&model, 64, BASE_PAGE as u64, to, Mode::Retry);
    assert_eq!((0..64).filter(|page| model.node(*page) == Some(1)).count(), 48);
}

fn kinds() -> impl Strategy<Value = Option<Kind>> {
    prop_oneof![
        6 => Just(Some(Kind::Movable)),
        1 => Just(Some(Kind::Pinned)),
        1 => Just(Some(Kind::Shared)),
        1 => Just(Some(Kind::Zero)),
        1 => (1u32..3).prop_map(|times| Some(Kind::Busy(times))),
        1 => Just(None),
    ]
}

/// The number of pages of a folio.
fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![8 => Just(1), 2 => Just(16), 1 => Just(512)]
}

proptest! {
    #![proptest_config(cases(100, 100))]
    /// Each page gets its true status, and all pages move that can.
    #[test]
    fn each_page_of_a_list_gets_its_true_status(
        all in proptest::collection::vec((kinds(), sizes(), 0i32..NODES, 0u32..2), 1..100),
        mixed in proptest::collection::vec(0u32..2, 1..40),
        old in any::<bool>(),
    ) {
        let (mut folios, mut nodes) = (BTreeMap::new(), Vec::new());
        for (kind, pages, node, to) in &all {
            let first = nodes.len() as u64;
            folios.extend(kind.map(|kind| (first, Folio { node: *node, ..folio(*pages, kind) })));
            // For half of the large folios, all pages are wanted on one node.
            let to = |page: u64| match first % 2 {
                0 => *to,
                _ => mixed[page as usize % mixed.len()],
            };
            nodes.extend((0..*pages).map(|page| NodeId(to(page))));
            // A page without memory shifts the next folio.
            nodes.push(NodeId(0));
        }
        let before = folios.clone();
        let model = Model::new(folios);
        model.0.lock().unwrap().old = old;
        let found = move_list(&model, &addresses(0..nodes.len() as u64), &nodes, Mode::Retry);
        for page in 0..nodes.len() as u64 {
            let (status, to) = (found[page as usize], nodes[page as usize]);
            prop_assert_eq!(status.node, model.node(page).map(NodeId), "page {}", page);
            let last = before.range(..=page).next_back();
            let there = last.filter(|(first, folio)| page < *first + folio.pages);
            let kind = there.map(|(_, folio)| folio.kind);
            let is_true = match (status.reason, kind) {
                (None, _) => status.node.is_none_or(|on| on == to),
                _ if status.node.is_none_or(|on| on == to) => false,
                (why, Some(Kind::Shared)) => why == Some(Reason::Shared),
                (why, _) => matches!(why, Some(Reason::InUse | Reason::MovedOn)),
            };
            prop_assert!(is_true, "page {}: {:?}, {:?}", page, status, there);
            // A folio whose pages are all wanted on one node arrives, if it can move.
            let Some((first, folio)) = there else { continue };
            let as_one = (*first..*first + folio.pages).all(|other| nodes[other as usize] == to);
            let moves = matches!(folio.kind, Kind::Movable) || folio.pages == 1
                && matches!(folio.kind, Kind::Busy(_));
            prop_assert!(!(as_one && moves) || status.node == Some(to), "page {}", page);
        }
        // A batch that fails costs a call, and each is tried four times at most.
        let refusing = before.values().filter(|folio| folio.kind != Kind::Movable);
        let refusing = refusing.map(|folio| folio.pages as usize).sum::<usize>();
        let calls = model.moving_calls() as usize;
        prop_assert!(calls <= 4 * (refusing + 2 * all.len() + 5), "{} calls", calls);
    }

    /// The same for a job over folios of all sizes, to one node or interleaved in stripes.
    #[test]
    fn each_page_of_a_job_gets_its_true_outcome(
        all in proptest::collection::vec((kinds(), sizes(), 0i32..NODES), 1..60),
        stripe in prop_oneof![Just(0), Just(1), Just(16), Just(512)],
        old in any::<bool>(),
    ) {
        let (mut folios, mut pages) = (BTreeMap::new(), 0u64);
        for (kind, size, node) in &all {
            // Folios are aligned.
            pages = pages.next_multiple_of(*size);
            folios.extend(kind.map(|kind| (pages, Folio { node: *node, ..folio(*size, kind) })));
            pages += size;
        }
        let before = folios.clone();
        let model = Model::new(folios);
        model.0.lock().unwrap().old = old;
        let to = match stripe {
            0 => NodeId(1).into(),
            pages => Placement::interleave([NodeId(0), NodeId(1)]).stripe_bytes(pages * BASE_PAGE),
        };
        let wanted_on = |page: u64| page.checked_div(stripe as u64).map_or(1, |at| at as u32 % 2);
        let is_torn = |first: u64, pages: u64| {
            (first..first + pages).any(|page| wanted_on(page) != wanted_on(first))
        };
        let moves = |kind: Kind| matches!(kind, Kind::Movable | Kind::Busy(_));
        let found = by_page(&run(&model, pages, BASE_PAGE as u64, to, Mode::Retry));
        for page in 0..pages {
            let last = before.range(..=page).next_back();
            let there = last.filter(|(first, folio)| page < *first + folio.pages);
            let is_there = model.node(page) == Some(wanted_on(page));
            let is = found[page as usize];
            let is_true = match (is, there) {
                (is, None | Some((_, Folio { kind: Kind::Zero, .. }))) => {
                    is == (PageOutcome::Unchanged, Some(Reason::Absent))
                }
                ((PageOutcome::Migrated | PageOutcome::Unchanged, None), _) => is_there,
                ((PageOutcome::Unchanged, Some(Reason::Shared)), Some((_, folio))) => {
                    folio.kind == Kind::Shared && !is_there
                }
                ((PageOutcome::Failed, Some(Reason::MovedOn)), Some((first, folio))) => {
                    is_torn(*first, folio.pages) && !is_there
                }
                ((PageOutcome::Failed, Some(Reason::InUse)), Some((first, folio))) => {
                    (folio.kind == Kind::Pinned || is_torn(*first, folio.pages)) && !is_there
                }
                _ => false,
            };
            prop_assert!(is_true, "page {} on {:?}: {:?}, {:?}", page, model.node(page), is, there);
            // A folio whose pages are all wanted on one node arrives, if it can move.
            let Some((first, folio)) = there else { continue };
            let is_parted = is_torn(*first, folio.pages);
            prop_assert!(is_parted || !moves(folio.kind) || is_there, "page {}: {:?}", page, folio);
        }
    }
}

/// Runs a job that interleaves the pages of a mapping or moves them to one node. The folios are
/// smaller than 2 MB or mapped page by page, so that smaps does not show them.
fn run_over_hidden_folios(
    model: &Model,
    pages: u64,
    to: &Placement,
    adjust: impl Fn(KernelMigration<'_>) -> KernelMigration<'_>,
) -> Report {
    let (mut memory, process) = process(model, pages, BASE_PAGE as u64);
    memory.mappings[0].huge_bytes = 0;
    let all = 0..pages as usize * BASE_PAGE;
    let migration = adjust(KernelMigration::new().range(&memory, all, to.clone()));
    let plan = migration.plan_on(vec![process], &[Some(0)], Rooms::unlimited()).unwrap();
    let job = plan.start(migration.settings(), Vec::new(), Instant::now()).unwrap();
    job.wait_until_finished();
    let progress = job.progress();
    let report = job.wait();
    // The progress agrees with the report, also after the query at the end.
    assert_eq!(progress.bytes_migrated, report.pages.migrated * BASE_PAGE as u64, "{report}");
    assert!(progress.bytes_total >= progress.bytes_migrated, "{progress:?}");
    report
}

/// Where the kernel may have made folios, pages are interleaved by 2 MB, so that each node gets its
/// share.
#[test]
fn pages_that_the_kernel_keeps_together_are_spread_by_blocks() {
    const PAGES: u64 = 16 * (HUGE / BASE_PAGE) as u64;
    let cases = [16, 512].into_iter().flat_map(|size| [(size, 1), (size, 3)]);
    for ((size, heavy), batch) in
        cases.flat_map(|case| [1, 2, 60, 700, 4096].map(|batch| (case, batch)))
    {
        for kind in [Kind::Movable, Kind::Busy(1), Kind::Snapshot(1)] {
            let case = format!("folios of {size} pages, {kind:?}, {heavy}:1, {batch} a call");
            let model = Model::new((0..PAGES / size).map(|i| (i * size, folio(size, kind))));
            let to = Placement::weighted([(NodeId(0), heavy), (NodeId(1), 1)]);
            let report = run_over_hidden_folios(&model, PAGES, &to, |migration| {
                migration.batch_pages(batch).mode(Mode::Insist).from_nodes([NodeId(0)])
            });
            let on_light = (0..PAGES).filter(|page| model.node(*page) == Some(1)).count() as u64;
            assert_eq!(on_light, PAGES / u64::from(heavy + 1), "{case}: {report}");
            assert!(report.ended.is_completed(), "{case}: {report}");
            assert_eq!(report.pages.migrated, on_light, "{case}: {report}");
        }
    }
}

/// Pages that move along with others are counted, so that a rate limit is kept.
#[test]
fn pages_that_come_along_have_moved() {
    const PAGES: u64 = 4096;
    for (size, batch) in [16, 512].into_iter().flat_map(|size| [1, 7, 600].map(|b| (size, b))) {
        let model = Model::new((0..PAGES / size).map(|i| (i * size, folio(size, Kind::Movable))));
        let to = NodeId(1).into();
        let report = run_over_hidden_folios(&model, PAGES, &to, |m| m.batch_pages(batch));
        assert_eq!(report.pages.migrated, PAGES, "{size} {batch}: {report}");
        assert_eq!(report.bytes_copied, PAGES * BASE_PAGE as u64, "{size} {batch}: {report}");
    }
}

/// Folios that lie across blocks (after `mremap`) cannot be split between nodes: the report says
/// which of their pages are elsewhere.
#[test]
fn pages_of_folios_across_blocks_are_told() {
    const FOLIOS: u64 = 16;
    for batch in [1, 600, 16384] {
        let model = Model::new((0..FOLIOS).map(|i| (256 + i * 512, folio(512, Kind::Movable))));
        let pages = 256 + FOLIOS * 512;
        let to = Placement::interleave([NodeId(0), NodeId(1)]);
        let report = run_over_hidden_folios(&model, pages, &to, |m| m.batch_pages(batch));
        assert!(matches!(report.ended, Ended::Failed(_)), "{batch}: {report}");
        assert_eq!(report.pages.failed, FOLIOS * 256, "{batch}: {report}");
    }
}

/// The query at the end asks for many pages at a time, however the pages are interleaved.
#[test]
fn the_question_at_the_end_is_asked_in_few_calls() {
    const PAGES: u64 = 8192;
    let model = Model::new((0..PAGES).map(|page| (page, folio(1, Kind::Movable))));
    let to = Placement::interleave([NodeId(0), NodeId(1)]).stripe_bytes(BASE_PAGE);
    let report = run_over_hidden_folios(&model, PAGES, &to, |m| m.batch_pages(1024));
    assert!(report.ended.is_completed(), "{report}");
    assert!(model.0.lock().unwrap().queries < 80, "{}", model.0.lock().unwrap().queries);
}

/// A cancelled job queries a bounded number of its pages at its end (here 4096), and warns that the
/// others have the outcome of their last call.
#[test]
fn a_cancelled_job_asks_about_some_of_its_pages() {
    const BATCH: u64 = 1024;
    for (calls, asked_again) in [(3, 4 * BATCH), (6, 4 * BATCH)] {
        let model = Model::new((0..8 * BATCH).map(|page| (page, folio(1, Kind::Movable))));
        let barrier = Arc::new(Barrier::new(2));
        model.0.lock().unwrap().pauses_at = Some((calls, barrier.clone()));
        let (mut memory, process) = process(&model, 8 * BATCH, BASE_PAGE as u64);
        memory.mappings[0].huge_bytes = 0;
        let all = 0..(8 * BATCH) as usize * BASE_PAGE;
        let migration =
            KernelMigration::new().range(&memory, all, NodeId(1)).batch_pages(BATCH as usize);
        let plan = migration.plan_on(vec![process], &[Some(0)], Rooms::unlimited()).unwrap();
        let job = plan.start(migration.settings(), Vec::new(), Instant::now()).unwrap();
        barrier.wait();
        job.cancel();
        barrier.wait();
        let report = job.wait();
        assert!(matches!(report.ended, Ended::Cancelled), "{report}");
        // The call that is under way is completed.
        let moved = (u64::from(calls) + 1) * BATCH;
        assert_eq!(report.pages.migrated, moved, "{report}");
        assert_eq!(report.pages.not_attempted, 8 * BATCH - moved, "{report}");
        assert_eq!(report.warnings.len(), usize::from(moved > asked_again), "{report}");
        // Pages are queried before and after their call, and at the end.
        assert_eq!(model.asked(), 2 * moved + moved.min(asked_again), "{report}");
    }
}
