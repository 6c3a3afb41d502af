//! Jobs that move page tables alone, on the modelled machine, whose pages know the node of their page
//! tables. `tests/page_tables.rs` has the same on the kernel.

use std::sync::Arc;

use super::*;
use crate::Migration;
use crate::backend::{Advice, Call, Errno, FailAt, FailMode, Model, Prot};
use crate::job::area::Reason;
use crate::job::outcomes::PageOutcome;
use crate::pool::Pool;
use crate::region::PageTableLevel;
use crate::units::{BASE_PAGE, PageSize};

const MB: usize = 1 << 20;

/// A region of 6 MB, and the machine that it lies in.
struct Scene {
    model: Arc<Model>,
    failing: Arc<FailAt>,
    pools: [Pool; 2],
    region: Region,
}

impl Scene {
    fn new(at: u64, mode: FailMode) -> Scene {
        let model = Arc::new(Model::new());
        let failing = Arc::new(FailAt::new(model.clone(), at, mode, Errno(libc::ENOMEM)));
        let build = |node| {
            let pool = Pool::builder(NodeId(node), 6 * MB as u64).page_size(PageSize::Base);
            pool.threads(1).backend(failing.clone()).build().unwrap()
        };
        let pools = [build(0), build(1)];
        let region = Region::new(&pools[0], 6 * MB).unwrap();
        let scene = Scene { model, failing, pools, region };
        scene.pages().for_each(|page| scene.model.store(page, page as u64).unwrap());
        scene
    }

    fn start(&self) -> usize {
        self.region.inner().start
    }

    fn pages(&self) -> impl Iterator<Item = usize> + use<> {
        (self.start()..self.start() + 6 * MB).step_by(BASE_PAGE)
    }

    fn to(&self, node: u32) -> PageTableMigration<'_> {
        PageTableMigration::new(&self.region, 0..6 * MB, NodeId(node))
    }

    /// The node of the page tables of each 2 MB.
    fn tables(&self) -> [Option<u32>; 3] {
        [0, 1, 2].map(|block| self.model.tables_at(self.start() + block * 2 * MB))
    }

    fn check_contents(&self) {
        for page in self.pages() {
            assert_eq!(self.model.load(page), Ok(page as u64), "LOST: {page:#x}");
            assert_eq!(self.model.store(page, page as u64), Ok(()), "{page:#x}");
        }
    }
}

#[test]
fn page_tables_move_once_and_anew_if_that_is_asked_for() {
    let scene = Scene::new(0, FailMode::Before);
    let report = scene.to(3).run().unwrap();
    assert_eq!((report.pages.migrated, report.bytes_copied), (1536, 0), "{report}");
    assert_eq!(scene.tables(), [Some(3); 3], "page tables on another node");
    scene.check_contents();
    let counted = |node| scene.region.page_tables().asked_on(PageTableLevel::Pte, NodeId(node));
    assert_eq!((counted(3), counted(0)), (3, 0));
    let report = scene.to(3).run().unwrap();
    assert_eq!((report.pages.migrated, report.pages.unchanged), (0, 1536), "{report}");
    assert_eq!(scene.to(3).anew().run().unwrap().pages.migrated, 1536);
    // A part, and a leap of the data, which brings page tables along.
    scene.region.move_page_tables(2 * MB..4 * MB, NodeId(0)).unwrap().wait();
    assert_eq!(scene.tables(), [Some(3), Some(0), Some(3)]);
    Migration::new().range(&scene.region, 0..6 * MB, &scene.pools[1]).start().unwrap().wait();
    scene.check_contents();
}

#[test]
fn page_tables_that_map_something_else_stay() {
    let scene = Scene::new(0, FailMode::Before);
    // One page in another frame, and advice for a part of the last block.
    let page = 3 * MB..3 * MB + BASE_PAGE;
    Migration::new().range(&scene.region, page, &scene.pools[1]).start().unwrap().wait();
    // SAFETY: pages of a region of the model that nothing else uses.
    unsafe { scene.model.advise(scene.start() + 5 * MB, MB, Advice::DontDump).unwrap() };
    let report = scene.to(2).run().unwrap();
    let runs: Vec<_> =
        report.runs.iter().map(|run| (run.range.clone(), run.outcome, run.reason)).collect();
    let shared = Some(Reason::SharedTable);
    assert_eq!(
        runs,
        [
            (0..2 * MB, PageOutcome::Migrated, None),
            (2 * MB..6 * MB, PageOutcome::Unchanged, shared)
        ]
    );
    // Not whole blocks.
    let report = scene.region.move_page_tables(MB..3 * MB, NodeId(4)).unwrap().wait();
    assert_eq!(report.pages.unchanged, 512, "{report}");
    assert!(report.runs.iter().all(|run| run.reason == shared), "{report}");
}

/// The kernel takes the lock off the whole mapping of which a part moves.
#[test]
fn a_lock_stays_on_a_part_that_moves_and_around_it() {
    let scene = Scene::new(0, FailMode::Before);
    // SAFETY: pages of a region of the model that nothing else uses.
    unsafe { scene.model.lock(scene.start(), 6 * MB, false).unwrap() };
    scene.region.move_page_tables(2 * MB..4 * MB, NodeId(1)).unwrap().wait();
    let locked = (Prot::READ_WRITE, true, false, true);
    let kept = scene.pages().all(|page| scene.model.attributes_at(page) == Some(locked));
    assert!(kept, "an attribute is lost");
    assert_eq!(scene.tables()[1], Some(1));
    scene.check_contents();
}

#[test]
fn pieces_are_whole_blocks_with_equal_attributes() {
    use super::plan::pieces;
    use crate::observe::{AttributeRun, Attributes};
    let scene = Scene::new(0, FailMode::Before);
    let inner = scene.region.inner();
    let run = |mb: Range<usize>, prot| AttributeRun {
        start: scene.start() + mb.start * MB,
        end: scene.start() + mb.end * MB,
        attributes: Attributes::of_new_mapping(prot),
    };
    let pages = |mb: Range<u64>| mb.start * 256..mb.end * 256;
    let cut = |from: u64, runs: &[AttributeRun]| {
        let pieces = pieces(inner, PageTableLevel::Pte, &pages(from..6), runs);
        let of = |(pages, attributes): (Range<u64>, Option<Attributes>)| {
            (pages, attributes.map(|attributes| attributes.prot))
        };
        pieces.into_iter().map(of).collect::<Vec<_>>()
    };
    let (all, read) = (Some(Prot::READ_WRITE), Some(Prot::READ));
    let words = "parts of blocks move";
    assert_eq!(cut(0, &[run(0..6, Prot::READ_WRITE)]), [(pages(0..6), all)], "{words}");
    let cut_off = cut(1, &[run(0..5, Prot::READ_WRITE), run(5..6, Prot::READ)]);
    assert_eq!(cut_off, [(pages(1..2), None), (pages(2..4), all), (pages(4..6), None)], "{words}");
    let two = cut(0, &[run(0..3, Prot::READ), run(3..6, Prot::READ_WRITE)]);
    assert_eq!(two, [(pages(0..2), read), (pages(2..4), None), (pages(4..6), all)], "{words}");
    assert_eq!(cut(0, &[]), [(pages(0..6), None)], "{words}");
}

/// Fails each call of a job once. Returns the calls.
fn each_call(mode: FailMode, check: impl Fn(&Scene, Result<Report, Error>, Call)) -> Vec<Call> {
    let mut calls = Vec::new();
    for at in 1.. {
        let scene = Scene::new(at, mode);
        let before = scene.model.pages_in_use();
        // SAFETY: pages of a region of the model that nothing else uses.
        unsafe {
            scene.model.advise(scene.start(), 2 * MB, Advice::DontDump).unwrap();
            scene.model.lock(scene.start(), 2 * MB, false).unwrap();
        }
        scene.failing.arm();
        let report = scene.to(1).run();
        scene.failing.disarm();
        let Some(call) = scene.failing.struck() else { return calls };
        calls.push(call);
        scene.check_contents();
        check(&scene, report, call);
        assert_eq!(scene.model.pages_in_use(), before, "{call}: a hole stays in the staging");
        // A lock that came back in part would make two mappings of one block.
        // SAFETY: as above.
        unsafe { scene.model.unlock(scene.start(), 2 * MB).unwrap() };
        assert_eq!(scene.to(1).anew().run().unwrap().pages.migrated, 1536, "{call}");
        assert_eq!(scene.tables(), [Some(1); 3], "{call}");
        scene.check_contents();
    }
    calls
}

#[test]
fn attributes_stay_whichever_call_fails() {
    for mode in [FailMode::Before, FailMode::Partial] {
        let calls = each_call(mode, |scene, report, call| {
            let wanted = |page: usize| {
                let is_first = page < scene.start() + 2 * MB;
                (Prot::READ_WRITE, true, is_first, is_first)
            };
            let kept =
                scene.pages().all(|page| scene.model.attributes_at(page) == Some(wanted(page)));
            let told = report.is_ok_and(|report| !report.warnings.is_empty());
            assert!(kept || told, "{call}: an attribute is lost");
        });
        assert!(calls.iter().filter(|call| **call == Call::Exchange).count() >= 4, "{calls:?}");
    }
}

#[test]
fn the_second_level_moves_before_the_pages_that_it_points_to() {
    use super::plan::{Leg, Plan, Stretch};
    use crate::observe::Attributes;
    let scene = Scene::new(0, FailMode::Before);
    let inner = scene.region.inner();
    let share = lock_share(&scene);
    const GB: u64 = (1 << 30) / BASE_PAGE as u64;
    let attributes = Attributes::of_new_mapping(Prot::READ_WRITE);
    let stretch = |pages| Stretch { pages, share: share.clone(), first_frame: 100, attributes };
    let mut plan = Plan { legs: Vec::new(), uppers: Vec::new(), left: Vec::new() };
    // The PTEs of the second GB are there already.
    let leg =
        |pages, is_unknown| Leg { level: PageTableLevel::Pte, stretch: stretch(pages), is_unknown };
    let lower = vec![leg(0..GB, false), leg(2 * GB..2 * GB + 512, true)];
    plan.add(lower, vec![stretch(0..3 * GB)], inner);
    let uppers: Vec<_> = plan.uppers.iter().map(|upper| upper.stretch.pages.clone()).collect();
    assert_eq!(uppers, [0..GB, 2 * GB..3 * GB]);
    assert_eq!(plan.uppers[1].stretch.first_frame, 100 + 2 * GB);
    let legs: Vec<_> = plan
        .legs
        .iter()
        .map(|Leg { level, stretch, .. }| (*level, stretch.pages.clone()))
        .collect();
    assert_eq!(
        legs,
        [
            (PageTableLevel::Pmd, GB..2 * GB),
            (PageTableLevel::Pte, 0..GB),
            (PageTableLevel::Pte, 2 * GB..2 * GB + 512)
        ]
    );
    assert_eq!(plan.levels(), [PageTableLevel::Pte, PageTableLevel::Pmd]);
}

fn lock_share(scene: &Scene) -> crate::pool::Share {
    let extents = crate::sync::lock(&scene.region.inner().extents);
    extents.within(0..1).next().unwrap().share
}

#[test]
fn impossible_requests_are_refused() {
    let scene = Scene::new(0, FailMode::Before);
    let refused = |migration: PageTableMigration<'_>, words: &str| {
        let error = migration.run().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let of = |range| PageTableMigration::new(&scene.region, range, NodeId(1));
    refused(of(0..0), "it is empty");
    refused(of(100..BASE_PAGE), "not aligned");
    refused(of(0..8 * MB), "not inside the region");
    refused(of(0..MB).timeout(Duration::ZERO), "leave no time");
    let claim = scene.region.inner().claim(MB..2 * MB).unwrap();
    refused(of(0..6 * MB), "in use by a running job");
    drop(claim);
    of(0..6 * MB).run().unwrap();
}
