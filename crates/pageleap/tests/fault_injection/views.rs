//! Calls fail while a region has views.

use std::iter::repeat_n;

use super::*;
use common::places;
use common::places_in;

const VIEWS: usize = 2;

fn replicate(region: &Region) -> Result<(), Error> {
    region.replicate(repeat_n(nodes()[1], VIEWS))
}

fn leap(region: &Region, to: &Pool) -> Report {
    start_forced(EngineChoice::Auto, region, to)
        .or_else(|error| match error {
            // The only tracker that serves could not be opened, or there was no address space.
            Error::EngineRefused { .. } | Error::Call { call: Call::Reserve, .. } => {
                start_forced(EngineChoice::Auto, region, to)
            }
            error => Err(error),
        })
        .unwrap()
        .wait()
}

/// Checks that views map the frames of the region.
fn check_views(region: &Region, what: &str) {
    let wanted = places(region);
    for view in region.views() {
        let first = view.as_ptr().as_ptr() as usize;
        let found = places_in(first..first + region.len(), region.page_size().bytes());
        assert!(found == wanted, "{what}: {view:?} maps other frames");
    }
}

/// A thread that stores through a view and loads through the region, and the other way round.
fn with_thread_in_view<T>(region: &Region, body: impl FnOnce() -> T) -> T {
    let stop = std::sync::atomic::AtomicBool::new(false);
    let rounds = &AtomicU64::new(0);
    let stride = region.page_size().bytes() / 8;
    let mappings = || {
        let own = region.atomics_u64(0..region.len()).unwrap();
        let views = region.views();
        let views = views.iter().map(|view| view.atomics_u64(0..region.len()).unwrap());
        [own].into_iter().chain(views).collect::<Vec<_>>()
    };
    let result = std::thread::scope(|scope| {
        let stop_guard = common::StopOnDrop(&stop);
        let (mappings, stop) = (mappings(), &stop);
        scope.spawn(move || {
            for round in 1u64.. {
                if stop.load(Relaxed) {
                    return rounds.store(round, Relaxed);
                }
                // A word of each page that belongs neither to the load nor to the test.
                for at in (0..region.len() / 8 / stride).map(|page| page * stride + 70) {
                    let turn = round as usize % mappings.len();
                    mappings[turn][at].store(round, Relaxed);
                    for (number, words) in mappings.iter().enumerate() {
                        let seen = words[at].load(Relaxed);
                        assert_eq!(
                            seen, round,
                            "LOST: word {at} by mapping {turn}, seen by {number}"
                        );
                    }
                }
            }
        });
        let result = body();
        drop(stop_guard);
        result
    });
    assert!(rounds.load(Relaxed) > 1, "the thread did not run");
    result
}

/// One run on the kernel: a job with a failing call, then one more job each way.
fn on_the_kernel(sabotage: Sabotage, page: PageSize) -> Result<Option<Call>, Error> {
    let failing = sabotage.of(Arc::new(Linux));
    let pools = [build(failing.clone(), page, PAGES)?, build(failing.clone(), page, PAGES)?];
    let region = Region::new(&pools[0], PAGES * page.bytes())?;
    replicate(&region).unwrap();
    touch_all(&region, 1);
    // Where CPUs are emulated, each thread more makes a run much longer.
    let beside = |body: &dyn Fn()| if in_lab() { body() } else { with_load(&region, body) };
    beside(&|| {
        with_thread_in_view(&region, || {
            failing.arm();
            let report = leap(&region, &pools[1]);
            failing.disarm();
            let what = format!("{sabotage:?}: {:?}", failing.struck());
            check_report(&report, PAGES, &what);
            check_all(&region, 1, &what);
            check_views(&region, &what);
            touch_all(&region, 2);
            for to in [&pools[0], &pools[1]] {
                check_report(&leap(&region, to), PAGES, &what);
                check_views(&region, &what);
            }
            check_all(&region, 2, &what);
            audit(&[&pools[0], &pools[1]], &[&region]).unwrap_or_else(|e| panic!("{what}: {e}"));
        });
    });
    drop(region);
    let is_free = |pool: &Pool| pool.free_bytes() == pool.bytes();
    assert!(pools.iter().all(is_free), "{sabotage:?}: frames leaked");
    drop(pools);
    assert_eq!((pool_mappings(), own_descriptors()), (vec![], vec![]), "{sabotage:?}");
    Ok(failing.struck())
}

#[test]
fn on_the_kernel_a_region_with_views_moves_although_any_call_may_fail() {
    let _turn = turn();
    let name = "on_the_kernel_a_region_with_views_moves_although_any_call_may_fail";
    let mut calls = std::collections::BTreeSet::new();
    let sizes = if in_lab() { &PAGE_SIZES[..1] } else { &PAGE_SIZES };
    for page in sizes.iter().copied() {
        if !common::works_for(Engine::StopCopy.into(), page) {
            common::skip(&format!("{name} ({page})"), &"the engine stop-copy does not work here");
            continue;
        }
        if let Err(error) = on_the_kernel(Sabotage::NONE, page) {
            skip_page_size(name, page, error);
            continue;
        }
        // Huge pages differ in few calls.
        let (all, first) = (&MODES[..], &MODES[..1]);
        let errors = [(ENOMEM, all), (Errno(libc::EINVAL), first), (ENOMEM, first)];
        let all_errors = page == PageSize::Base && !in_lab();
        for (errno, modes) in if all_errors { &errors[..2] } else { &errors[2..] } {
            let reached = sweep(*errno, modes, |sabotage| {
                let call = on_the_kernel(sabotage(), page).unwrap();
                calls.extend(call);
                call
            });
            assert!(reached >= 20 * modes.len() as u64, "only {reached} calls were made to fail");
        }
    }
    let all = [Call::Map, Call::Advise, Call::Track, Call::Wake, Call::PreferTables];
    for call in all.into_iter().chain([Call::Exchange, Call::Lock, Call::Protect]) {
        assert!(calls.is_empty() || calls.contains(&call), "{call:?} never failed: {calls:?}");
    }
}

/// Making views, growing with them, discarding, backing and dropping them: each is whole or has not
/// happened, and the frames come back.
#[test]
fn on_the_kernel_calls_on_views_are_whole_or_have_not_happened() {
    let _turn = turn();
    for page in [PageSize::Base, PageSize::Thp] {
        let bytes = page.bytes();
        if let Err(error) = build(Arc::new(Linux), page, PAGES) {
            skip_page_size("calls_on_views_are_whole_or_have_not_happened", page, error);
            continue;
        }
        let reached = sweep(ENOMEM, &MODES, |sabotage| {
            let failing = sabotage().of(Arc::new(Linux));
            let pool = build(failing.clone(), page, PAGES).unwrap();
            let mut region = Region::reserve_with(failing.clone(), PAGES * bytes, page).unwrap();
            region.grow(4 * bytes, &pool).unwrap();
            touch_all(&region, 1);
            failing.arm();
            let made = replicate(&region);
            let grown = region.grow(6 * bytes, &pool);
            let discarded = region.discard(bytes..2 * bytes);
            let backed = discarded.is_ok().then(|| region.back(bytes..2 * bytes, &pool));
            let dropped = region.drop_views([nodes()[1]]);
            failing.disarm();
            let struck = failing.struck();
            let what = format!(
                "{:?}: {struck:?}: {made:?}, {grown:?}, {discarded:?}, {backed:?}, {dropped:?}",
                sabotage()
            );
            let all =
                [Some(&made), Some(&grown), Some(&discarded), backed.as_ref(), Some(&dropped)];
            let failed = all.into_iter().flatten().filter(|result| result.is_err()).count();
            assert!(failed <= 1 && (failed == 0 || struck.is_some()), "{what}");
            assert!(made.is_ok() || region.views().is_empty(), "{what}");
            if dropped.is_err() {
                let again = region.drop_views([nodes()[1]]);
                again.unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            assert!(region.views().is_empty(), "{what}");
            region.grow(6 * bytes, &pool).unwrap_or_else(|e| panic!("{what}: {e}"));
            if discarded.is_err() {
                // The call may have left a hole, which the next one closes.
                let again = region.discard(bytes..2 * bytes);
                again.unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            let unbacked = region.atomics_u64(bytes..2 * bytes).is_err();
            if unbacked {
                let again = region.back(bytes..2 * bytes, &pool);
                again.unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            replicate(&region).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_eq!(region.views().len(), VIEWS, "{what}");
            touch_all(&region, 2);
            check_all(&region, 2, &what);
            check_views(&region, &what);
            audit(&[&pool], &[&region]).unwrap_or_else(|e| panic!("{what}: {e}"));
            drop(region);
            assert_eq!(pool.free_bytes(), pool.bytes(), "{what}: frames leaked");
            drop(pool);
            assert_eq!(pool_mappings(), Vec::<String>::new(), "{what}");
            struck
        });
        assert!(reached >= 20, "only {reached} calls were made to fail");
    }
}

#[test]
fn on_the_model_a_region_with_views_moves_although_any_call_may_fail() {
    let _turn = turn();
    let errors =
        [(libc::ENOMEM, &MODES[..]), (libc::EINVAL, &MODES[..2]), (libc::EPERM, &MODES[..])];
    for (errno, modes) in errors {
        let reached = sweep(Errno(errno), modes, |sabotage| {
            let OnModel { model, failing, pools, region } = OnModel::new(sabotage());
            replicate(&region).unwrap();
            let views: Vec<usize> =
                region.views().iter().map(|view| view.as_ptr().as_ptr() as usize).collect();
            failing.arm();
            let report = leap(&region, &pools[1]);
            failing.disarm();
            let what = format!("{:?}: {:?}", sabotage(), failing.struck());
            check_report(&report, PAGES, &what);
            for to in [&pools[0], &pools[1]] {
                for page in 0..PAGES {
                    let at = address(&region) + page * 4096;
                    for view in &views {
                        let at_view = view + page * 4096;
                        assert_eq!(model.frame_at(at_view), model.frame_at(at), "{what}");
                        assert_eq!(model.load(at_view), Ok(page as u64 + 100), "{what}");
                        assert_eq!(model.store(at_view, page as u64 + 100), Ok(()), "{what}");
                        let hidden = Some((Prot::READ_WRITE, true, true, false));
                        let told = failing.struck() == Some(Call::Advise);
                        assert!(told || model.attributes_at(at_view) == hidden, "{what}");
                    }
                }
                check_report(&leap(&region, to), PAGES, &what);
            }
            audit(&[&pools[0], &pools[1]], &[&region]).unwrap_or_else(|e| panic!("{what}: {e}"));
            drop(region);
            let is_free = |pool: &Pool| pool.free_bytes() == pool.bytes();
            assert!(pools.iter().all(is_free), "{what}: frames leaked");
            drop(pools);
            assert_eq!(model.pages_in_use(), 0, "{what}: address space leaked");
            assert_eq!(model.trackers_open(), 0, "{what}: a tracker was left open");
            failing.struck()
        });
        assert!(reached >= 40 * modes.len() as u64, "only {reached} calls were made to fail");
    }
}
