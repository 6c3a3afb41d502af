//! Calls of a job that moves page tables alone fail.

use super::*;
use pageleap::{NodeId, PageTableLevel, PageTableMigration};

const MB: usize = 1 << 20;

/// Three areas of 16 MB at most, and less where CPUs are emulated.
fn bytes() -> usize {
    if in_lab() { 14 * MB } else { 36 * MB }
}

fn moves(region: &Region) -> Result<Report, Error> {
    PageTableMigration::new(region, 0..region.len(), nodes()[0]).anew().run()
}

/// Checks what the job with the failing call reports. Returns whether it has moved everything.
fn check(report: &Result<Report, Error>, struck: Option<Call>, errno: Errno, what: &str) -> bool {
    match report {
        // It could not start.
        Err(error) => assert!(struck.is_some(), "{what}: {error}"),
        Ok(report) if struck == Some(Call::PreferTables) => {
            assert!(matches!(report.ended, Ended::Failed(Error::Call { .. })), "{what}: {report}");
            assert_eq!(report.pages.migrated, 0, "{what}: {report}");
        }
        // This may be the kernel's last word, so it is not tried again.
        Ok(report)
            if (errno != ENOMEM || struck == Some(Call::Lock)) && report.pages.failed > 0 =>
        {
            assert!(matches!(report.ended, Ended::Failed(Error::Call { .. })), "{what}: {report}");
        }
        Ok(report) => {
            check_report(report, report.pages.total() as usize, what);
            return true;
        }
    }
    false
}

fn on_the_kernel(sabotage: Sabotage) -> Option<Call> {
    let failing = sabotage.of(Arc::new(Linux));
    let pool = build(failing.clone(), PageSize::Base, bytes() / 4096).unwrap();
    let region = Region::new(&pool, bytes()).unwrap();
    let part = region.as_ptr().as_ptr().wrapping_add(6 * MB);
    // SAFETY: a part of the region. The advice changes no contents.
    assert_eq!(unsafe { libc::madvise(part.cast(), 4 * MB, libc::MADV_DONTDUMP) }, 0);
    let (before, kept) = (region_flags(&region), Kept::of(&region));
    touch_all(&region, 1);
    with_load(&region, || {
        failing.arm();
        let report = moves(&region);
        failing.disarm();
        let struck = failing.struck();
        let what = format!("{sabotage:?}: {struck:?}");
        check(&report, struck, sabotage.errno, &what);
        check_all(&region, 1, &what);
        touch_all(&region, 2);
        let told =
            |report: Report| report.warnings.iter().any(|w| w.kind == WarningKind::Attributes);
        assert!(region_flags(&region) == before || report.is_ok_and(told), "{what}");
        audit(&[&pool], &[&region]).unwrap_or_else(|e| panic!("{what}: {e}"));
        check_report(&moves(&region).unwrap(), bytes() / 4096, &what);
        check_all(&region, 2, &what);
        let tables = region.page_tables();
        let pages = tables.asked_on(PageTableLevel::Pte, nodes()[0]);
        assert_eq!(pages, (bytes() / (2 * MB)) as u64, "{what}: {tables}");
        kept.check(&region);
    });
    drop(region);
    assert_eq!(pool.free_bytes(), pool.bytes(), "{sabotage:?}: frames leaked");
    drop(pool);
    assert_eq!((pool_mappings(), own_descriptors()), (vec![], vec![]), "{sabotage:?}");
    failing.struck()
}

#[test]
fn on_the_kernel_page_tables_move_although_any_call_may_fail() {
    let _turn = turn();
    let mut calls = std::collections::BTreeSet::new();
    let errors =
        [(libc::ENOMEM, &MODES[..]), (libc::EINVAL, &MODES[..1]), (libc::EPERM, &MODES[..1])];
    for (errno, modes) in errors {
        let reached = sweep(Errno(errno), modes, |sabotage| {
            let call = on_the_kernel(sabotage());
            calls.extend(call);
            call
        });
        assert!(reached >= 8 * modes.len() as u64, "only {reached} calls were made to fail");
    }
    for call in [Call::Reserve, Call::Map, Call::Exchange, Call::PreferTables] {
        assert!(calls.contains(&call), "{call:?} never failed: {calls:?}");
    }
}

#[test]
fn on_the_model_page_tables_move_although_any_call_may_fail() {
    let _turn = turn();
    const PAGES: usize = 4 * MB / 4096;
    for (errno, modes) in [(libc::ENOMEM, &MODES[..]), (libc::EPERM, &MODES[..])] {
        let reached = sweep(Errno(errno), modes, |sabotage| {
            let model = Arc::new(Model::new());
            let failing = sabotage().of(model.clone());
            let pool = build(failing.clone(), PageSize::Base, PAGES).unwrap();
            let empty = model.pages_in_use();
            let region = Region::new(&pool, PAGES * 4096).unwrap();
            let page = |page: usize| address(&region) + page * 4096;
            (0..PAGES).for_each(|i| model.store(page(i), i as u64 + 100).unwrap());
            // SAFETY: pages of a region of the model that nothing else uses.
            unsafe { model.lock(page(0), 2 * MB, false).unwrap() };
            let attributes =
                || (0..PAGES).map(|i| model.attributes_at(page(i))).collect::<Vec<_>>();
            let before = attributes();
            let moves =
                || PageTableMigration::new(&region, 0..region.len(), NodeId(1)).anew().run();
            failing.arm();
            let report = moves();
            failing.disarm();
            let struck = failing.struck();
            let what = format!("{:?}: {struck:?}", sabotage());
            check(&report, struck, Errno(errno), &what);
            for i in 0..PAGES {
                assert_eq!(model.load(page(i)), Ok(i as u64 + 100), "{what}: page {i}");
                assert_eq!(model.store(page(i), i as u64 + 200), Ok(()), "{what}: page {i}");
            }
            let told =
                |report: Report| report.warnings.iter().any(|w| w.kind == WarningKind::Attributes);
            assert!(attributes() == before || report.is_ok_and(told), "{what}");
            // A lock that came back in part would make two mappings of one block.
            // SAFETY: as above.
            unsafe { model.unlock(page(0), 2 * MB).unwrap() };
            check_report(&moves().unwrap(), PAGES, &what);
            (0..PAGES).for_each(|i| assert_eq!(model.load(page(i)), Ok(i as u64 + 200), "{what}"));
            audit(&[&pool], &[&region]).unwrap_or_else(|e| panic!("{what}: {e}"));
            drop(region);
            assert_eq!(pool.free_bytes(), pool.bytes(), "{what}: frames leaked");
            assert_eq!(model.pages_in_use(), empty, "{what}: address space leaked");
            struck
        });
        assert!(reached >= 6 * modes.len() as u64, "only {reached} calls were made to fail");
    }
}
