//! Calls that fail each time.

use super::*;

/// Two pools and a region over a kernel that refuses the calls for which `rule` returns true. The
/// counter is the number of refused calls; nothing is refused while it is `u64::MAX`, as at first.
/// The error says that there is no memory for the pools.
fn refusing_for(
    page: PageSize,
    rule: impl Fn(&Request) -> bool + Send + Sync + 'static,
    errno: i32,
) -> Result<([Pool; 2], Region, Arc<AtomicU64>), Error> {
    let refused = Arc::new(AtomicU64::new(u64::MAX));
    let count = refused.clone();
    let backend = Arc::new(Refusing::new(Arc::new(Linux), move |request| {
        let refuse = count.load(Relaxed) != u64::MAX && rule(request);
        refuse.then(|| {
            count.fetch_add(1, Relaxed);
            Errno(errno)
        })
    }));
    let pools = [build(backend.clone(), page, PAGES)?, build(backend, page, PAGES)?];
    let region = Region::new(&pools[0], PAGES * page.bytes())?;
    touch_all(&region, 1);
    Ok((pools, region, refused))
}

/// As [`refusing_for`], for base pages.
fn refusing(
    rule: impl Fn(&Request) -> bool + Send + Sync + 'static,
    errno: i32,
) -> ([Pool; 2], Region, Arc<AtomicU64>) {
    refusing_for(PageSize::Base, rule, errno).unwrap()
}

#[test]
fn an_area_that_can_never_be_protected_fails_and_stays_whole() {
    let _turn = turn();
    // The two pages at this address cannot be protected. It is set when the region exists.
    let stubborn = Arc::new(AtomicU64::new(0));
    let at = stubborn.clone();
    let rule = move |r: &Request| r.prot == Some(Prot::READ) && r.addr as u64 == at.load(Relaxed);
    let (pools, region, refused) = refusing(rule, libc::ENOMEM);
    let start_of = address(&region);
    stubborn.store((start_of + 2 * 4096) as u64, Relaxed);
    refused.store(0, Relaxed);
    let report =
        with_load(&region, || start_forced(Engine::Mprotect, &region, &pools[1]).unwrap().wait());
    let Ended::Failed(Error::Call { call, errno, range, remedy }) = &report.ended else {
        panic!("{report}")
    };
    assert_eq!((*call, *errno), (Call::Protect, ENOMEM));
    assert_eq!(range.0, start_of + 2 * 4096..start_of + 4 * 4096);
    assert!(remedy.contains("max_map_count"), "{remedy}");
    assert!(report.to_string().contains("ENOMEM"), "{report}");
    let failed = report.runs.iter().filter(|run| run.outcome == PageOutcome::Failed);
    let why = Reason::Refused(Call::Protect, Errno(libc::ENOMEM));
    assert!(failed.clone().all(|run| run.reason == Some(why)), "{report}");
    assert_eq!(failed.count(), 1, "{report}");
    assert_eq!((report.pages.failed, report.pages.migrated), (2, 6), "{report}");
    assert!(refused.load(Relaxed) > 1, "the refused call was not repeated");
    check_all(&region, 1, "after the failure");
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
    refused.store(u64::MAX, Relaxed);
    let report = start_forced(Engine::Mprotect, &region, &pools[1]).unwrap().wait();
    assert_eq!((report.pages.migrated, report.pages.unchanged), (2, 6), "{report}");
    check_all(&region, 1, "after the next job");
}

/// The commit is refused for good. The call that gives access back is refused a few times, and must
/// be repeated: it is of the same kind as the call that took access away, which was allowed.
#[test]
fn a_protected_area_is_writable_again_although_the_call_is_refused_for_a_while() {
    let _turn = turn();
    let opened = AtomicU64::new(0);
    let rule = move |r: &Request| match r.call {
        Call::Exchange | Call::Map => true,
        Call::Protect => r.prot == Some(Prot::READ_WRITE) && opened.fetch_add(1, Relaxed) < 5,
        _ => false,
    };
    let (pools, region, refused) = refusing(rule, libc::EPERM);
    let before = region_flags(&region);
    refused.store(0, Relaxed);
    let report = start_forced(Engine::Mprotect, &region, &pools[1]).unwrap().wait();
    refused.store(u64::MAX, Relaxed);
    assert_eq!((report.pages.failed, report.pages.migrated), (PAGES as u64, 0), "{report}");
    assert_eq!(region_flags(&region), before, "{report}");
    check_all(&region, 1, "after the failure");
    touch_all(&region, 2);
    check_report(
        &start_forced(Engine::Mprotect, &region, &pools[1]).unwrap().wait(),
        PAGES,
        "next",
    );
    check_all(&region, 2, "after the next job");
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
}

/// Another thread may keep the last mappings for good, and the kernel may forbid new ones. While an
/// area has its old mapping, its threads go on there.
#[test]
fn areas_that_can_never_be_mapped_anew_fail_and_stay_whole() {
    const NAME: &str = "areas_that_can_never_be_mapped_anew_fail_and_stay_whole";
    let _turn = turn();
    for page in PAGE_SIZES {
        for (engine, errno) in engines_for(page)
            .into_iter()
            .flat_map(|engine| [(engine, libc::ENOMEM), (engine, libc::EPERM)])
        {
            let bounds: Arc<[AtomicU64; 2]> = Arc::default();
            let of_region = bounds.clone();
            let rule = move |r: &Request| {
                let [start, end] = [0, 1].map(|at| of_region[at].load(Relaxed));
                let maps = matches!(r.call, Call::Exchange | Call::Map);
                maps && (start..end).contains(&(r.addr as u64))
            };
            let (pools, region, refused) = match refusing_for(page, rule, errno) {
                Ok(scene) => scene,
                Err(error) => {
                    skip_page_size(NAME, page, error);
                    break;
                }
            };
            let what = format!("{page}, {engine}, {}", Errno(errno));
            let start = address(&region) as u64;
            bounds[1].store(start + region.len() as u64, Relaxed);
            bounds[0].store(start, Relaxed);
            let before = region_flags(&region);
            refused.store(0, Relaxed);
            let report =
                with_load(&region, || start_forced(engine, &region, &pools[1]).unwrap().wait());
            assert!(matches!(report.ended, Ended::Failed(_)), "{what}: {report}");
            let pages = (report.pages.failed, report.pages.migrated);
            assert_eq!(pages, (PAGES as u64, 0), "{what}: {report}");
            assert!(refused.load(Relaxed) > 0, "{what}");
            refused.store(u64::MAX, Relaxed);
            // Only a new mapping takes advice on huge pages back, and there can be none.
            let is_told = report.to_string().contains("advice on huge pages");
            let mut now = region_flags(&region);
            if is_told {
                now.iter_mut().for_each(|(_, flags)| *flags = flags.replace(" hg", ""));
            }
            assert_eq!(now, before, "{what}: {report}");
            check_all(&region, 1, &what);
            touch_all(&region, 2);
            audit(&[&pools[0], &pools[1]], &[&region]).unwrap_or_else(|e| panic!("{what}: {e}"));
            let report = start_forced(engine, &region, &pools[1]).unwrap().wait();
            check_report(&report, PAGES, &what);
            check_all(&region, 2, &what);
            audit(&[&pools[0], &pools[1]], &[&region]).unwrap_or_else(|e| panic!("{what}: {e}"));
        }
    }
}

#[test]
fn without_exchanges_files_are_mapped() {
    let _turn = turn();
    for errno in [libc::EINVAL, libc::ENOMEM, libc::ENOSYS] {
        let (pools, region, refused) = refusing(|r| r.call == Call::Exchange, errno);
        let before = region_flags(&region);
        refused.store(0, Relaxed);
        for to in [&pools[1], &pools[0]] {
            let report = with_load(&region, || {
                start_forced(EngineChoice::Auto, &region, to).unwrap().wait()
            });
            if report.engine == Engine::StopCopy && !common::works(Engine::WpSync.into()) {
                // Linux before 6.6 has no other engine that lets no system call fail.
                assert_eq!(report.pages.migrated, 0, "{report}");
                continue;
            }
            check_report(&report, PAGES, "no exchange");
            assert!(report.calls.contains_key(Call::Map.name()), "{report}");
            // The engines `precopy` and `stop-copy` freeze an area by an exchange. Without one
            // they cannot hold threads up, and `wp-sync` moves the area.
            let by_another = report.engines.iter().filter(|part| part.engine == Engine::WpSync);
            let needed = matches!(report.engine.engine(), Some(Engine::Precopy | Engine::StopCopy));
            let moved: u64 = by_another.map(|part| part.pages).sum();
            assert_eq!(moved, if needed { PAGES as u64 } else { 0 }, "{report}");
            assert!(surprises(&report).is_empty(), "{report}");
        }
        assert!(refused.load(Relaxed) > 0);
        assert_eq!(region_flags(&region), before);
        check_all(&region, 1, "no exchange");
        audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
    }
}

#[test]
fn without_advice_for_the_alias_files_are_mapped() {
    let _turn = turn();
    let (pools, region, refused) = refusing(|r| r.advice == Some(Advice::DoDump), libc::ENOMEM);
    let before = region_flags(&region);
    refused.store(0, Relaxed);
    for to in [&pools[1], &pools[0]] {
        let report =
            with_load(&region, || start_forced(EngineChoice::Auto, &region, to).unwrap().wait());
        check_report(&report, PAGES, "no advice");
        assert!(
            report.calls.contains_key(Call::Map.name()) && surprises(&report).is_empty(),
            "{report}"
        );
    }
    assert!(refused.load(Relaxed) > 0);
    assert_eq!(region_flags(&region), before);
    check_all(&region, 1, "no advice");
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
}

/// The `mprotect` that opens an area is made in the signal handler, which cannot report its failure.
/// Each area is disturbed when it is copied first: the copy waits until a writer has come.
#[test]
fn writers_are_held_if_the_area_cannot_be_opened() {
    const AREAS: u64 = PAGES as u64 / 2;
    let _turn = turn();
    let [start, end, refused, last] = [const { AtomicU64::new(0) }; 4].map(Arc::new);
    let (from, to, count) = (start.clone(), end.clone(), refused.clone());
    let inside = move |addr: usize| (from.load(Relaxed)..to.load(Relaxed)).contains(&(addr as u64));
    let (of_region, tried) = (inside.clone(), refused.clone());
    let backend = Refusing::new(Arc::new(Linux), move |request| {
        let opens = request.call == Call::Protect && request.prot == Some(Prot::READ_WRITE);
        (opens && inside(request.addr)).then(|| {
            count.fetch_add(1, Relaxed);
            ENOMEM
        })
    });
    let backend = backend.before_copy(move |src| {
        // The second copy of an area is the one that its writers wait for.
        if of_region(src) && last.swap(src as u64, Relaxed) != src as u64 {
            let before = tried.load(Relaxed);
            soon(|| tried.load(Relaxed) > before);
        }
    });
    let backend = Arc::new(backend);
    let pools = [(); 2].map(|()| build(backend.clone(), PageSize::Base, PAGES).unwrap());
    let region = Region::new(&pools[0], PAGES * 4096).unwrap();
    touch_all(&region, 1);
    let first = address(&region) as u64;
    end.store(first + region.len() as u64, Relaxed);
    start.store(first, Relaxed);
    with_load(&region, || {
        for to in [&pools[1], &pools[0]] {
            refused.store(0, Relaxed);
            let report = start_forced(Engine::Mprotect, &region, to).unwrap().wait();
            check_report(&report, PAGES, "held");
            assert_eq!((refused.load(Relaxed), report.counts.holds), (AREAS, AREAS), "{report}");
            assert_eq!(report.counts.disturbed_copies, 0, "{report}");
        }
    });
    check_all(&region, 1, "held");
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
}
