//! Which priority a job's threads have while threads of the program wait for them, by the thread that
//! starts the job. The kernel is asked in the calls of a window.

mod common;
#[path = "common/in_place.rs"]
mod in_place;
#[path = "common/mapping.rs"]
mod mapping;
#[path = "common/refusing.rs"]
mod refusing;

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use common::{address, check_stamp, is_root, nodes, skip, soon, stamp, turn, works};
use pageleap::backend::{Call, Linux};
use pageleap::{
    BASE_PAGE, Engine, Error, Job, MemoryEngine, Migration, PageSize, Pool, Region, Report,
    WarningKind,
};
use refusing::{Refusing, Request};

/// Two areas: what is true at the beginning of the second one has come after a window.
const BYTES: usize = 8 * BASE_PAGE;

/// Policy and nice value of the calling thread.
type Scheduling = (i32, i32);

const ORDINARY: Scheduling = (libc::SCHED_OTHER, 0);
const STARTERS: [Scheduling; 4] =
    [ORDINARY, (libc::SCHED_IDLE, 0), (libc::SCHED_BATCH, 0), (libc::SCHED_OTHER, 19)];

fn scheduling() -> Scheduling {
    scheduling_of(0)
}

/// The same of another thread of this process.
fn scheduling_of(thread: i32) -> Scheduling {
    // SAFETY: the calls take no pointers. The second one tells 20 minus the nice value.
    unsafe {
        let policy = libc::sched_getscheduler(thread) & !libc::SCHED_RESET_ON_FORK;
        (policy, 20 - libc::syscall(libc::SYS_getpriority, libc::PRIO_PROCESS, thread) as i32)
    }
}

/// Changes the calling thread.
fn become_a(starter: Scheduling) {
    // SAFETY: the calls change the calling thread only; the first one reads one structure.
    unsafe {
        let parameter = libc::sched_param { sched_priority: 0 };
        assert_eq!(libc::sched_setscheduler(0, starter.0, &parameter), 0);
        assert_eq!(libc::setpriority(libc::PRIO_PROCESS, 0, starter.1), 0);
    }
    assert_eq!(scheduling(), starter);
}

/// Takes CAP_SYS_NICE away from the calling thread, and so from the threads of its jobs.
fn may_not_raise() {
    const CAP_SYS_NICE: u32 = 23;
    const VERSION_3: u32 = 0x2008_0522;
    let mut header = [VERSION_3, 0];
    let mut sets = [[0u32; 3]; 2];
    // SAFETY: the header has two words, and the sets of version 3 have six.
    unsafe {
        let (header, sets) = (header.as_mut_ptr(), sets.as_mut_ptr());
        assert_eq!(libc::syscall(libc::SYS_capget, header, sets), 0);
        (*sets)[0] &= !(1 << CAP_SYS_NICE);
        assert_eq!(libc::syscall(libc::SYS_capset, header, sets), 0);
    }
}

/// A soft limit of the process. It is as before when the value is dropped.
struct Limited(libc::__rlimit_resource_t, libc::rlimit);

impl Limited {
    fn to(resource: libc::__rlimit_resource_t, soft: u64) -> Limited {
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: each call reads or writes one structure.
        unsafe {
            assert_eq!(libc::getrlimit(resource, &mut before), 0);
            let limit = libc::rlimit { rlim_cur: soft, ..before };
            assert_eq!(libc::setrlimit(resource, &limit), 0);
        }
        Limited(resource, before)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        // SAFETY: the call reads one structure.
        unsafe { libc::setrlimit(self.0, &self.1) };
    }
}

/// What a job's worker was while it moved a region.
struct Seen {
    /// In mapping calls outside of windows.
    beside: Vec<Scheduling>,
    /// While it copied an area.
    copies: Vec<Scheduling>,
    /// When the new frames of an area were about to come.
    windows: Vec<Scheduling>,
    report: Report,
}

/// Moves a region of two areas by a job that a thread of this priority starts. With `hold` writers
/// wait for the copy of an area.
fn seen(engine: Engine, starter: Scheduling, may_raise: bool, hold: bool) -> Seen {
    let start = Arc::new(AtomicUsize::new(0));
    let [beside, copies, windows] = [(); 3].map(|()| Arc::new(Mutex::new(Vec::new())));
    let (opened, out, inside) = (start.clone(), beside.clone(), windows.clone());
    let (moves, copied) = (start.clone(), copies.clone());
    let gate = move |request: &Request| {
        let start = opened.load(SeqCst);
        if start == 0 || !(start..start + BYTES).contains(&request.addr) {
            return None;
        }
        match request.call {
            Call::Exchange | Call::Map => inside.lock().unwrap().push(scheduling()),
            Call::Track => out.lock().unwrap().push(scheduling()),
            // It makes an area read-only, which is the first call of an attempt.
            Call::Protect if engine == Engine::Mprotect => out.lock().unwrap().push(scheduling()),
            _ => {}
        }
        None
    };
    let backend = Refusing::new(Arc::new(Linux), gate).before_copy(move |_| {
        if moves.load(SeqCst) != 0 {
            copied.lock().unwrap().push(scheduling());
        }
    });
    let backend = Arc::new(backend);
    let [from, to] = nodes()
        .map(|node| Pool::builder(node, BYTES as u64).backend(backend.clone()).build().unwrap());
    let region = Region::new(&from, BYTES).unwrap();
    stamp(&region, 0..BYTES, 1);
    start.store(address(&region), SeqCst);
    let job = Migration::new().range(&region, 0..BYTES, &to).engine(engine);
    let job = job.area_bytes(BYTES / 2).threads(1);
    let job = if hold { job.max_disturbed_copies(0).max_rounds(0) } else { job };
    let report = std::thread::scope(|scope| {
        let starts = scope.spawn(|| {
            if !may_raise {
                may_not_raise();
            }
            become_a(starter);
            job.start().unwrap().wait()
        });
        starts.join().unwrap()
    });
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!((report.engine, report.pages.migrated), (engine.into(), 8), "{report}");
    start.store(0, SeqCst);
    check_stamp(&region, 0..BYTES, 1);
    let all = [beside, copies, windows].map(|all| std::mem::take(&mut *all.lock().unwrap()));
    assert!(all.iter().all(|some| some.len() >= 2), "{engine}: {all:?}");
    let [beside, copies, windows] = all;
    Seen { beside, copies, windows, report }
}

fn each_engine(test: &str, each: impl Fn(Engine, Scheduling)) {
    for engine in Engine::ALL {
        if works(engine.into()) {
            STARTERS.into_iter().for_each(|starter| each(engine, starter));
        } else {
            skip(test, &format!("no engine {engine}"));
        }
    }
}

/// Whether nobody limits real-time threads, and the test may change limits.
fn may_try(test: &str) -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes one structure.
    unsafe { libc::getrlimit(libc::RLIMIT_RTTIME, &mut limit) };
    let may = is_root() && limit.rlim_cur == libc::RLIM_INFINITY;
    if !may {
        skip(test, &"needs CAP_SYS_NICE, and no RLIMIT_RTTIME");
    }
    may
}

#[test]
fn windows_run_first_whoever_starts_the_job() {
    const TEST: &str = "windows_run_first_whoever_starts_the_job";
    let _turn = turn();
    if !may_try(TEST) {
        return;
    }
    each_engine(TEST, |engine, starter| {
        let Seen { beside, copies, windows, report } = seen(engine, starter, true, false);
        let case = format!("{engine}, started by {starter:?}: {beside:?} {copies:?} {windows:?}");
        // Also a mapping call keeps others waiting.
        assert!(beside.iter().all(|seen| *seen == ORDINARY), "{case}");
        // Short windows are not worth the calls that raise it, unless it has copied at a low
        // priority.
        let is_short = engine == Engine::Mprotect && starter == ORDINARY;
        let (policy, first) = if is_short { (ORDINARY.0, 0) } else { (libc::SCHED_FIFO, 2) };
        // Only `stop-copy` copies in the window, of those who have nothing to copy again. If its
        // first window has taken all credit, the second one does not run first.
        let copies_in_window = engine == Engine::StopCopy;
        let as_window =
            |seen: &Scheduling| *seen == (policy, 0) || copies_in_window && *seen == ORDINARY;
        assert!(windows[0] == (policy, 0) && windows.iter().all(as_window), "{case}");
        let as_copy = |seen: &Scheduling| {
            if copies_in_window { as_window(seen) } else { *seen == starter }
        };
        assert!(copies.iter().all(as_copy), "{case}");
        let few = if copies_in_window { 1 } else { first };
        assert!((few..=first).contains(&report.counts.windows_first), "{report}");
        assert_eq!(report.windows.count, 2, "{report}");
        assert!(
            !report.warnings.iter().any(|warning| warning.kind == WarningKind::Priority),
            "{report}"
        );
    });
}

#[test]
fn copies_for_which_writers_wait_run_first_too() {
    const TEST: &str = "copies_for_which_writers_wait_run_first_too";
    let _turn = turn();
    if !may_try(TEST) {
        return;
    }
    for starter in STARTERS {
        let Seen { copies, windows, report, .. } = seen(Engine::Mprotect, starter, true, true);
        let case = format!("started by {starter:?}: {copies:?} {windows:?}");
        let first = (libc::SCHED_FIFO, 0);
        // The second area may come when the first one has taken all credit: see the unit tests.
        assert_eq!((copies[0], windows[0]), (first, first), "{case}");
        let as_copies = |seen: &Scheduling| *seen == first || *seen == ORDINARY;
        assert!([copies, windows].concat().iter().all(as_copies), "{case}");
        assert!((1..=2).contains(&report.counts.windows_first), "{report}");
    }
}

#[test]
fn windows_are_ordinary_where_only_that_is_allowed() {
    const TEST: &str = "windows_are_ordinary_where_only_that_is_allowed";
    let _turn = turn();
    if !may_try(TEST) {
        return;
    }
    // A window that runs first could last too long for the limit, and the kernel would kill.
    let _limited = Limited::to(libc::RLIMIT_RTTIME, 1 << 40);
    each_engine(TEST, |engine, starter| {
        let Seen { beside, copies, windows, report } = seen(engine, starter, true, false);
        let case = format!("{engine}, started by {starter:?}: {beside:?} {copies:?} {windows:?}");
        assert!([beside, windows].concat().iter().all(|seen| *seen == ORDINARY), "{case}");
        let copying = if engine == Engine::StopCopy { ORDINARY } else { starter };
        assert!(copies.iter().all(|seen| *seen == copying), "{case}");
        assert_eq!(report.counts.windows_first, 0, "{case}");
        assert!(
            !report.warnings.iter().any(|warning| warning.kind == WarningKind::Priority),
            "{report}"
        );
    });
}

#[test]
fn a_job_that_has_to_stay_low_warns() {
    const TEST: &str = "a_job_that_has_to_stay_low_warns";
    let _turn = turn();
    if !may_try(TEST) {
        return;
    }
    let _limited = [libc::RLIMIT_NICE, libc::RLIMIT_RTPRIO].map(|limit| Limited::to(limit, 0));
    each_engine(TEST, |engine, starter| {
        let Seen { beside, copies, windows, report } = seen(engine, starter, false, false);
        let case = format!("{engine}, started by {starter:?}: {beside:?} {copies:?} {windows:?}");
        // Everybody may leave SCHED_BATCH.
        let is_free = starter == ORDINARY || starter.0 == libc::SCHED_BATCH;
        let usual = if is_free { ORDINARY } else { starter };
        assert!([beside, windows].concat().iter().all(|seen| *seen == usual), "{case}");
        let copying = if engine == Engine::StopCopy { usual } else { starter };
        assert!(copies.iter().all(|seen| *seen == copying), "{case}");
        let warnings =
            report.warnings.iter().filter(|warning| warning.kind == WarningKind::Priority);
        assert_eq!(warnings.count(), usize::from(!is_free), "{report}");
    });
}

/// Threads of jobs by name, with what they are.
fn job_threads() -> Vec<(String, Scheduling)> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let named = tasks.filter_map(|task| {
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let number = task.file_name().to_str()?.parse().ok()?;
        Some((name.trim().to_owned(), scheduling_of(number)))
    });
    let mut threads: Vec<_> = named.filter(|(name, _)| name.starts_with("pageleap")).collect();
    threads.sort();
    threads
}

/// The worker, whose attempts are windows, and the threads for which others wait.
#[test]
fn threads_of_a_job_in_place_are_ordinary() {
    const TEST: &str = "threads_of_a_job_in_place_are_ordinary";
    let _turn = turn();
    if !may_try(TEST) || !in_place::works(TEST) {
        return;
    }
    let memory = in_place::memory(64 << 20, PageSize::Base);
    memory.fill(nodes()[0]);
    for starter in STARTERS {
        // At this rate it takes a minute, if nobody stops it.
        let job = in_place::migration(&memory, nodes()[1]).rate_limit(1 << 20);
        let job = std::thread::scope(|scope| {
            let starts = scope.spawn(|| {
                become_a(starter);
                job.engine(MemoryEngine::UffdMove).start().unwrap()
            });
            starts.join().unwrap()
        });
        let expected = ["pageleap", "pageleap-holes", "pageleap-watch"];
        let expected = expected.map(|name| (name.to_owned(), ORDINARY));
        let are_raised = soon(|| job_threads() == expected);
        let threads = job_threads();
        job.cancel();
        let report = job.wait();
        assert!(are_raised, "started by {starter:?}: {threads:?} {report}");
    }
}

/// `struct sched_attr` of the kernel, in its first version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

/// Gives the calling thread a share of real time (SCHED_DEADLINE), with these flags. Refused where the
/// process may not use all CPUs (a cpuset), or others have all shares.
fn get_a_deadline(flags: i32) -> std::io::Result<()> {
    let (size, policy) = (size_of::<Attributes>() as u32, libc::SCHED_DEADLINE as u32);
    let [runtime_ns, deadline_ns, period_ns] = [10_000_000, 100_000_000, 100_000_000];
    let flags = flags as u64;
    let attributes = Attributes {
        size,
        policy,
        flags,
        runtime_ns,
        deadline_ns,
        period_ns,
        ..Attributes::default()
    };
    // SAFETY: the call reads one structure, and changes the calling thread.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// The kernel refuses its threads, with the error number of too many threads.
#[test]
fn a_thread_with_a_deadline_learns_why_it_starts_no_job() {
    const TEST: &str = "a_thread_with_a_deadline_learns_why_it_starts_no_job";
    let _turn = turn();
    if !may_try(TEST) {
        return;
    }
    let pools = nodes().map(|node| Pool::builder(node, BYTES as u64).build().unwrap());
    let region = Region::new(&pools[0], BYTES).unwrap();
    let memory = in_place::works(TEST).then(|| in_place::memory(BYTES, PageSize::Base));
    memory.iter().for_each(|memory| memory.fill(nodes()[0]));
    let refused = |started: Result<Job, Error>| {
        let error = started.map(drop).expect_err("it was started");
        let is_named = matches!(error, Error::NoThread { .. });
        assert!(is_named && error.to_string().contains("SCHED_FLAG_RESET_ON_FORK"), "{error}");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if let Err(error) = get_a_deadline(0) {
                return skip(TEST, &format!("SCHED_DEADLINE: {error}"));
            }
            refused(Migration::new().range(&region, 0..BYTES, &pools[1]).start());
            let in_place = |memory| in_place::leap(memory, nodes()[1]);
            memory.as_ref().map(in_place).into_iter().for_each(refused);
            assert_eq!(pools[1].free_bytes(), BYTES as u64);
            get_a_deadline(libc::SCHED_FLAG_RESET_ON_FORK).unwrap();
            let job = Migration::new().range(&region, 0..BYTES, &pools[1]).start();
            let report = job.unwrap().wait();
            assert!(report.ended.is_completed() && report.pages.migrated == 8, "{report}");
        });
    });
}

/// The CPUs on which a thread of this process may run.
fn cpus_of(thread: i32) -> Vec<usize> {
    // SAFETY: the first call writes one set, and the other reads within it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(thread, size_of::<libc::cpu_set_t>(), &mut set), 0);
        (0..libc::CPU_SETSIZE as usize).filter(|cpu| libc::CPU_ISSET(*cpu, &set)).collect()
    }
}

/// Of the CPUs of the destination's node, those on which the starter may run.
#[test]
fn threads_of_a_job_run_where_their_starter_may() {
    let _turn = turn();
    let cpus = pageleap::topology::Topology::read().unwrap();
    let cpus = cpus.nodes().iter().find(|node| node.id == nodes()[1]).unwrap().cpus.clone();
    let may = cpus_of(0);
    let Some(only) = cpus.into_iter().rfind(|cpu| may.contains(cpu)) else {
        return skip("threads_of_a_job_run_where_their_starter_may", &"its node has no CPU");
    };
    let seen = Arc::new(Mutex::new(Vec::new()));
    let inside = seen.clone();
    let backend = Refusing::new(Arc::new(Linux), |_: &Request| None).before_copy(move |_| {
        assert!(pageleap::thread_is_ours(), "a worker does not know whose it is");
        inside.lock().unwrap().push(cpus_of(0));
    });
    assert!(!pageleap::thread_is_ours());
    let backend = Arc::new(backend);
    let [from, to] = nodes()
        .map(|node| Pool::builder(node, BYTES as u64).backend(backend.clone()).build().unwrap());
    let region = Region::new(&from, BYTES).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: the calls change one set, and the calling thread.
            unsafe {
                let mut set: libc::cpu_set_t = std::mem::zeroed();
                libc::CPU_SET(only, &mut set);
                assert_eq!(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set), 0);
            }
            let job = Migration::new().range(&region, 0..BYTES, &to).start();
            assert!(job.unwrap().wait().ended.is_completed());
        });
    });
    let seen = seen.lock().unwrap();
    assert!(!seen.is_empty() && seen.iter().all(|cpus| *cpus == [only]), "{seen:?} {only}");
}
