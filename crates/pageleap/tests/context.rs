//! Jobs that run in the calling thread, and jobs whose threads and descriptors are kept: the thread
//! is as before, nothing is left over, and no page is lost whatever happens meanwhile.
//!
//! Each case runs in a child, because threads and descriptors are those of the whole process.

mod common;
#[path = "common/moving.rs"]
mod moving;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use common::{
    StopOnDrop, address, check_stamp, engines, migration, own_descriptors, soon, stamp, surprises,
    works,
};
use moving::{BYTES, FINE, cases, scene, write_rounds};
use pageleap::{
    BASE_PAGE, Engine, EngineChoice, MigrationContext, Pool, Region, Report, thread_is_ours,
};

/// Numbers of this process' threads.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks.map(|task| task.file_name().into_string().unwrap()).collect()
}

/// What the kernel says of the calling thread that a job might change.
fn own_state() -> (Vec<String>, i32, String) {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let kept = ["SigBlk", "Cpus_allowed:", "Mems_allowed:"];
    let lines = status.lines().filter(|line| kept.iter().any(|name| line.starts_with(name)));
    // SAFETY: the call takes no pointers.
    let policy = unsafe { libc::sched_getscheduler(0) };
    let memory = format!("{:?}", pageleap_sys::ThreadPolicy::own());
    (lines.map(str::to_owned).collect(), policy, memory)
}

fn check(report: &Report, pages: usize) {
    assert!(report.ended.is_completed() && surprises(report).is_empty(), "{report}");
    assert_eq!(report.pages.migrated, pages as u64, "{report}");
}

/// Runs a job of the whole region in areas of two pages.
fn run(
    region: &Region,
    to: &Pool,
    engine: impl Into<EngineChoice>,
    with: Option<&MigrationContext>,
) {
    let migration = migration(region, 0..BYTES, to).engine(engine);
    let migration = with.into_iter().fold(migration, |migration, with| migration.context(with));
    check(&migration.run().unwrap(), BYTES / BASE_PAGE);
}

#[test]
fn a_job_in_the_calling_thread_leaves_it_as_it_was() {
    cases(
        "a_job_in_the_calling_thread_leaves_it_as_it_was",
        &[
            ("alone", || stays_as_it_was(None), FINE),
            ("with a context", || stays_as_it_was(Some(MigrationContext::new())), FINE),
            ("signals", signals_wait, FINE),
        ],
    );
}

fn stays_as_it_was(context: Option<MigrationContext>) {
    let (pools, region) = scene();
    let (state, descriptors, alone) = (own_state(), own_descriptors(), threads());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (region, stop) = (&region, &stop);
        scope.spawn(move || {
            while !stop.load(Relaxed) {
                write_rounds(region, 1);
            }
        });
        let _stop = StopOnDrop(stop);
        for round in 0..20 {
            for engine in engines() {
                run(region, &pools[1], engine, context.as_ref());
                run(region, &pools[0], engine, context.as_ref());
                assert_eq!(own_state(), state, "{engine} in round {round}");
                assert!(!thread_is_ours());
            }
        }
    });
    drop(context);
    assert!(soon(|| threads() == alone), "{:?}", threads());
    assert_eq!(own_descriptors(), descriptors);
}

/// A handler of the program's that stores into the pages runs before a job or behind it, and never
/// while its thread has them closed.
fn signals_wait() {
    static WORD: AtomicUsize = AtomicUsize::new(0);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    extern "C" fn handle(_: i32) {
        assert!(!thread_is_ours());
        let count = COUNT.fetch_add(1, Relaxed) + 1;
        // SAFETY: a word of the region, which lives as long as the timer.
        unsafe { AtomicU64::from_ptr(WORD.load(Relaxed) as *mut u64) }.store(count, Relaxed);
    }
    let (pools, region) = scene();
    WORD.store(address(&region) + BYTES / 2, Relaxed);
    let every = |us| {
        let time = libc::timeval { tv_sec: 0, tv_usec: us };
        let timer = libc::itimerval { it_interval: time, it_value: time };
        // SAFETY: the handler is async-signal-safe; the calls read one structure each.
        unsafe {
            libc::signal(libc::SIGALRM, handle as *const () as libc::sighandler_t);
            assert_eq!(libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()), 0);
        }
    };
    every(200);
    let context = MigrationContext::new();
    for _ in 0..100 {
        run(&region, &pools[1], EngineChoice::Auto, Some(&context));
        run(&region, &pools[0], EngineChoice::Auto, None);
    }
    every(0);
    assert!(COUNT.load(Relaxed) > 0);
    let word = &region.atomics_u64(0..BYTES).unwrap()[BYTES / 16];
    assert_eq!(word.load(Relaxed), COUNT.load(Relaxed), "LOST a store of the handler");
}

#[test]
fn a_thread_that_needs_the_pages_does_not_run_the_job() {
    cases(
        "a_thread_that_needs_the_pages_does_not_run_the_job",
        &[("its stack leaps", its_stack_leaps, FINE), ("low priority", low_priority, FINE)],
    );
}

/// Runs `body` in a thread whose stack is that memory.
fn with_stack(start: usize, len: usize, body: &mut dyn FnMut()) {
    extern "C" fn call(body: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: the argument of `pthread_create` below.
        (unsafe { &mut *body.cast::<&mut dyn FnMut()>() })();
        std::ptr::null_mut()
    }
    let mut body = body;
    // SAFETY: the attributes are made and destroyed here. The memory is the caller's, and the thread
    // is joined before it goes.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        assert_eq!(libc::pthread_attr_init(&mut attributes), 0);
        assert_eq!(libc::pthread_attr_setstack(&mut attributes, start as *mut _, len), 0);
        let (mut thread, argument) = (std::mem::zeroed(), (&raw mut body).cast());
        assert_eq!(libc::pthread_create(&mut thread, &attributes, call, argument), 0);
        assert_eq!(libc::pthread_join(thread, std::ptr::null_mut()), 0);
        libc::pthread_attr_destroy(&mut attributes);
    }
}

fn its_stack_leaps() {
    let (pools, region) = scene();
    let context = MigrationContext::new();
    let mut leaps = 0;
    with_stack(address(&region), BYTES, &mut || {
        for _ in 0..50 {
            run(&region, &pools[1], EngineChoice::Auto, Some(&context));
            run(&region, &pools[0], EngineChoice::Auto, None);
            leaps += 2;
        }
    });
    assert_eq!(leaps, 100);
}

/// The job is an ordinary one, and the thread stays low.
fn low_priority() {
    let (pools, region) = scene();
    let context = MigrationContext::new();
    let parameter = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call reads one structure.
    assert_eq!(unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &parameter) }, 0);
    let before = threads().len();
    run(&region, &pools[1], EngineChoice::Auto, Some(&context));
    assert!(threads().len() > before, "{:?}", threads());
    // SAFETY: the call takes no pointers.
    let policy = unsafe { libc::sched_getscheduler(0) };
    assert_eq!(policy & !libc::SCHED_RESET_ON_FORK, libc::SCHED_IDLE);
}

#[test]
fn threads_and_descriptors_are_kept_and_go_with_the_context() {
    cases(
        "threads_and_descriptors_are_kept_and_go_with_the_context",
        &[
            ("one after the other", kept_for_the_next_job, FINE),
            ("at the same time", at_the_same_time, FINE),
            ("closed by the program", closed_by_the_program, FINE),
            ("in a child", in_a_child, FINE),
            ("dropped in a child of a thread beside jobs", dropped_in_a_child, FINE),
            ("dropped while a job runs", dropped_while_a_job_runs, FINE),
        ],
    );
}

fn kept_for_the_next_job() {
    let (pools, region) = scene();
    let (descriptors, alone) = (own_descriptors(), threads());
    let context = MigrationContext::new();
    assert_eq!((threads(), own_descriptors()), (alone.clone(), descriptors.clone()));
    let leap = |round: usize| {
        stamp(&region, 0..BYTES, round as u64);
        let job = migration(&region, 0..BYTES, &pools[(round + 1) % 2]).context(&context);
        check(&job.start().unwrap().wait(), BYTES / BASE_PAGE);
        check_stamp(&region, 0..BYTES, round as u64);
    };
    const JOBS: usize = 100;
    leap(0);
    let after_one = threads();
    assert!(after_one.len() > alone.len() && own_descriptors().len() > descriptors.len());
    for round in 1..JOBS {
        // The thread that has run the job begins to wait a moment after the job's end.
        std::thread::sleep(std::time::Duration::from_millis(1));
        leap(round);
    }
    // A job that has found none waiting has started one, and one that came to need messages of the
    // kernel has started their reader. Without what is kept, each job would have started one.
    let now = threads();
    assert!(after_one.iter().all(|thread| now.contains(thread)), "{after_one:?} and {now:?}");
    assert!(now.len() < after_one.len() + JOBS / 2, "{after_one:?} and {now:?}");
    assert!(own_descriptors().len() <= descriptors.len() + 10, "{:?}", own_descriptors());
    drop(context);
    assert!(soon(|| threads() == alone), "{:?}", threads());
    assert_eq!(own_descriptors(), descriptors);
    leap_without(&region, &pools);
}

/// What was kept has left nothing that a job without would mind.
fn leap_without(region: &Region, pools: &[Pool; 2]) {
    for engine in engines() {
        for to in [1, 0, 1, 0] {
            let job = migration(region, 0..BYTES, &pools[to]).engine(engine);
            assert!(job.start().unwrap().wait().ended.is_completed());
        }
    }
}

/// Jobs of several threads, with parts of one region, while others write to all of it.
fn at_the_same_time() {
    const THREADS: usize = 4;
    let (pools, region) = scene();
    let (context, stop) = (MigrationContext::new(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (region, pools, context, stop) = (&region, &pools, &context, &stop);
        scope.spawn(move || {
            while !stop.load(Relaxed) {
                write_rounds(region, 1);
            }
        });
        let _stop = StopOnDrop(stop);
        std::thread::scope(|scope| {
            for part in 0..THREADS {
                scope.spawn(move || {
                    let range = part * BYTES / THREADS..(part + 1) * BYTES / THREADS;
                    for round in 0..60 {
                        let engine = engines()[round / 2 % engines().len()];
                        let job = migration(region, range.clone(), &pools[(round + 1) % 2]);
                        let job = job.engine(engine).context(context);
                        let report = match part % 2 {
                            0 => job.run().unwrap(),
                            _ => job.start().unwrap().wait(),
                        };
                        check(&report, BYTES / THREADS / BASE_PAGE);
                    }
                });
            }
        });
    });
}

/// A daemon closes all descriptors: those that are kept are made anew.
fn closed_by_the_program() {
    let (pools, region) = scene();
    let context = MigrationContext::new();
    for round in 0..6 {
        for engine in engines() {
            run(&region, &pools[1], engine, Some(&context));
            run(&region, &pools[0], engine, Some(&context));
        }
        let trackers = common::own_files().into_iter().filter(|(_, name)| !name.contains("memfd"));
        for (number, _) in trackers {
            // SAFETY: the call takes no pointers.
            assert_eq!(unsafe { libc::close(number) }, 0, "round {round}");
        }
    }
}

/// What is kept is of the process that has made it.
fn in_a_child() {
    let (pools, region) = scene();
    let context = MigrationContext::new();
    let forced = if works(Engine::Precopy.into()) { Engine::Precopy } else { Engine::Mprotect };
    for _ in 0..3 {
        run(&region, &pools[1], forced, Some(&context));
        // SAFETY: the child makes a region of its own, and ends without returning.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let (pools, region) = scene();
            run(&region, &pools[1], forced, Some(&context));
            let job = migration(&region, 0..BYTES, &pools[0]).context(&context);
            let whole = job.start().unwrap().wait().ended.is_completed();
            drop(context);
            // SAFETY: the call does not return.
            unsafe { libc::_exit(if whole { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: the call writes one number.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child has failed");
        // The parent's thread still reads messages.
        run(&region, &pools[0], forced, Some(&context));
    }
}

/// A child drops its copy of a context that another thread was using at the time of the `fork`.
fn dropped_in_a_child() {
    let (pools, region) = scene();
    let (context, stop) = (MigrationContext::new(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (region, pools, context, stop) = (&region, &pools, &context, &stop);
        scope.spawn(move || {
            for round in 0.. {
                if stop.load(Relaxed) {
                    return;
                }
                let job = migration(region, 0..BASE_PAGE, &pools[(round + 1) % 2]).context(context);
                check(&job.start().unwrap().wait(), 1);
            }
        });
        let _stop = StopOnDrop(stop);
        for _ in 0..500 {
            // SAFETY: the child ends without returning.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: the child has no other owner of the context. One that waits is killed.
                unsafe {
                    libc::alarm(20);
                    drop(std::ptr::read(context));
                    libc::_exit(0);
                }
            }
            let mut status = -1;
            // SAFETY: the call writes one number.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0, "the child waits for a thread that it does not have");
        }
    });
}

fn dropped_while_a_job_runs() {
    let (pools, region) = scene();
    let alone = threads();
    for round in 0..50 {
        let context = MigrationContext::new();
        stamp(&region, 0..BYTES, round);
        let to = &pools[(round as usize + 1) % 2];
        let job = migration(&region, 0..BYTES, to).context(&context).start().unwrap();
        drop(context);
        check(&job.wait(), BYTES / BASE_PAGE);
        check_stamp(&region, 0..BYTES, round);
    }
    assert!(soon(|| threads() == alone), "{:?}", threads());
}
