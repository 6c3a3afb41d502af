//! Threads of all kinds survive migrations: with a small signal stack or none, reading errno,
//! interrupted by signals. A thread that could not survive is named in the refusal of the job.
//!
//! Each case runs in a child, because a failure may end the process.

mod common;
#[path = "common/in_place.rs"]
mod in_place;
#[path = "common/mapping.rs"]
mod mapping;
#[path = "common/moving.rs"]
mod moving;

use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use common::{StopOnDrop, address, can_follow, engines, leap, migration, soon};
use moving::{BYTES, FINE, cases, scene, while_migrating, write_rounds};
use pageleap::{Ended, Engine, Error, Region};
use pageleap_probe::{Capabilities, Topic};

// Threads
// ------------------------------------------------------------------------------------------------

/// Blocks or unblocks SIGSEGV in this thread.
fn block_sigsegv(how: i32) {
    // SAFETY: a zeroed signal set is empty and valid. The call changes the mask of this thread
    // only.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&mut set, libc::SIGSEGV);
        assert_eq!(libc::pthread_sigmask(how, &set, ptr::null_mut()), 0);
    }
}

#[test]
fn a_thread_that_blocks_the_signal_is_refused_and_named() {
    cases(
        "a_thread_that_blocks_the_signal_is_refused_and_named",
        &[("blocked", refusal_blocked, FINE)],
    );
}

fn refusal_blocked() {
    let (pools, region) = scene();
    leap(&region, 0..BYTES, &pools[1]);
    let state = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let thread = || {
            block_sigsegv(libc::SIG_BLOCK);
            state.store(1, Relaxed);
            assert!(soon(|| state.load(Relaxed) == 2));
            block_sigsegv(libc::SIG_UNBLOCK);
            state.store(3, Relaxed);
            assert!(soon(|| state.load(Relaxed) == 4));
        };
        std::thread::Builder::new().name("deaf".into()).spawn_scoped(scope, thread).unwrap();
        assert!(soon(|| state.load(Relaxed) == 1));
        let migration = || migration(&region, 0..BYTES, &pools[0]);
        // Starting the job waits for nobody; its worker looks at the threads.
        let report = migration().engine(Engine::Mprotect).start().unwrap().wait();
        let Ended::Failed(error @ Error::EngineRefused { .. }) = &report.ended else {
            panic!("not refused: {report}")
        };
        assert_eq!(report.pages.migrated, 0, "{report}");
        let text = error.to_string();
        assert!(text.contains("(deaf)") && text.contains("pthread_sigmask"), "{text}");
        assert_eq!(pools[0].free_bytes(), pools[0].bytes());
        // Engines that raise no signal do not refuse.
        if can_follow() {
            leap(&region, 0..BYTES, &pools[0]);
            leap(&region, 0..BYTES, &pools[1]);
        }
        state.store(2, Relaxed);
        assert!(soon(|| state.load(Relaxed) == 3));
        leap(&region, 0..BYTES, &pools[0]);
        state.store(4, Relaxed);
    });
}

/// The C library blocks all signals for an instant in threads that begin, end or fork. The fault
/// handler does so in threads that wait. The check for blocked signals must not refuse for that.
#[test]
fn threads_that_block_the_signal_for_an_instant_are_no_obstacle() {
    cases(
        "threads_that_block_the_signal_for_an_instant_are_no_obstacle",
        &[
            ("threads that come and go", leaps_among_threads_that_come_and_go, FINE),
            ("writers of another job", leaps_among_writers_of_another_job, FINE),
        ],
    );
}

fn leaps_among_threads_that_come_and_go() {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                std::thread::spawn(|| {}).join().unwrap();
            }
        });
        let _stop = StopOnDrop(&stop);
        let (pools, region) = scene();
        for round in 0..200 {
            leap(&region, 0..BYTES, &pools[(round + 1) % 2]);
        }
    });
}

fn leaps_among_writers_of_another_job() {
    while_migrating(|busy| {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Relaxed) {
                        let words = busy.atomics_u64(0..BYTES).unwrap();
                        words.iter().step_by(64).for_each(|word| word.store(1, Relaxed));
                    }
                });
            }
            let _stop = StopOnDrop(&stop);
            let (pools, region) = scene();
            for round in 0..200 {
                leap(&region, 0..BYTES, &pools[(round + 1) % 2]);
            }
        });
    });
}

/// Runs `body` in a new thread with an alternate signal stack of `stack` bytes, or with none.
fn with_signal_stack(stack: Option<usize>, body: fn(&Region), region: &Region) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut memory = vec![0u64; stack.unwrap_or(0).div_ceil(8)];
            let wanted = libc::stack_t {
                ss_sp: memory.as_mut_ptr().cast(),
                ss_flags: if stack.is_some() { 0 } else { libc::SS_DISABLE },
                ss_size: stack.unwrap_or(0),
            };
            let mut before = libc::stack_t { ss_sp: ptr::null_mut(), ss_flags: 0, ss_size: 0 };
            // SAFETY: the memory of the new stack lives until the old stack is set again.
            unsafe {
                assert_eq!(
                    libc::sigaltstack(&wanted, &mut before),
                    0,
                    "{}",
                    std::io::Error::last_os_error()
                );
                body(region);
                assert_eq!(libc::sigaltstack(&before, ptr::null_mut()), 0);
            }
        });
    });
}

/// Stack bytes that the handler needs beside the frame that the kernel pushes.
const HANDLER_BYTES: usize = 2048;

#[test]
fn threads_with_small_signal_stacks_or_none_survive() {
    cases(
        "threads_with_small_signal_stacks_or_none_survive",
        &[
            ("none", signal_stack_none, FINE),
            ("the smallest", signal_stack_the_smallest, FINE),
            ("a thread of the C library", signal_stack_a_thread_of_the_c_library, FINE),
        ],
    );
}

fn signal_stack_none() {
    while_migrating(|region| with_signal_stack(None, |r| write_rounds(r, 300), region));
}

fn signal_stack_the_smallest() {
    // SAFETY: the call takes and returns numbers.
    let frame = unsafe { libc::getauxval(libc::AT_MINSIGSTKSZ) } as usize;
    let bytes = frame.max(libc::MINSIGSTKSZ) + HANDLER_BYTES;
    while_migrating(|region| with_signal_stack(Some(bytes), |r| write_rounds(r, 300), region));
}

fn signal_stack_a_thread_of_the_c_library() {
    static REGION: Mutex<Option<&'static Region>> = Mutex::new(None);
    extern "C" fn body(_: *mut libc::c_void) -> *mut libc::c_void {
        write_rounds(REGION.lock().unwrap().unwrap(), 300);
        ptr::null_mut()
    }
    while_migrating(|region| {
        // SAFETY: the thread is joined before the borrow of the region ends, so the longer lifetime
        // is never used beyond it.
        unsafe {
            *REGION.lock().unwrap() = Some(std::mem::transmute::<&Region, &'static Region>(region));
            let mut thread = std::mem::zeroed();
            assert_eq!(libc::pthread_create(&mut thread, ptr::null(), body, ptr::null_mut()), 0);
            assert_eq!(libc::pthread_join(thread, ptr::null_mut()), 0);
        }
    });
}

#[test]
fn errno_survives_a_fault() {
    cases("errno_survives_a_fault", &[("errno", fault_keeps_errno, FINE)]);
}

fn fault_keeps_errno() {
    while_migrating(|region| {
        let words = region.atomics_u64(0..BYTES).unwrap();
        for round in 0..500 {
            for (i, word) in words.iter().enumerate().step_by(512) {
                let value = 1000 + (round * 7 + i as i32) % 1000;
                // SAFETY: errno belongs to this thread.
                unsafe {
                    *libc::__errno_location() = value;
                    word.store(i as u64, Relaxed);
                    assert_eq!(*libc::__errno_location(), value);
                }
            }
        }
    });
}

// A signal handler that uses the region
// ------------------------------------------------------------------------------------------------

/// The address of the word that the handler raises.
static COUNTER: AtomicUsize = AtomicUsize::new(0);
/// How often the handler has run.
static TICKS: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_alarm(_: libc::c_int) {
    TICKS.fetch_add(1, Relaxed);
    // SAFETY: the word lies in a region that outlives the timer. All accesses to it are atomic.
    let word = unsafe { AtomicU64::from_ptr(COUNTER.load(Relaxed) as *mut u64) };
    word.fetch_add(1, Relaxed);
}

#[test]
fn signal_handlers_may_use_the_region() {
    cases("signal_handlers_may_use_the_region", &[("timer", handler_of_timer, FINE)]);
}

fn handler_of_timer() {
    while_migrating(|region| {
        COUNTER.store(address(region) + 8, Relaxed);
        let every = |microseconds| libc::itimerval {
            it_interval: libc::timeval { tv_sec: 0, tv_usec: microseconds },
            it_value: libc::timeval { tv_sec: 0, tv_usec: microseconds },
        };
        // SAFETY: the handler only makes atomic additions. The timer is stopped before the region
        // is dropped.
        unsafe {
            libc::signal(libc::SIGALRM, on_alarm as *const () as usize);
            assert_eq!(libc::setitimer(libc::ITIMER_REAL, &every(200), ptr::null_mut()), 0);
        }
        let words = region.atomics_u64(0..BYTES).unwrap();
        assert!(soon(|| {
            words[1024].fetch_add(1, Relaxed);
            TICKS.load(Relaxed) > 500
        }));
        let never = every(0);
        // SAFETY: the call reads one structure.
        let stopped = unsafe { libc::setitimer(libc::ITIMER_REAL, &never, ptr::null_mut()) };
        assert_eq!(stopped, 0);
        assert!(
            soon(|| words[1].load(Relaxed) == TICKS.load(Relaxed)),
            "LOST additions of the handler"
        );
    });
}

// A main thread that ends before the others
// ------------------------------------------------------------------------------------------------

/// Ends this thread, and not the process.
extern "C" fn on_end(_: libc::c_int) {
    // SAFETY: as `pthread_exit` ends the main thread. If no other thread ends the process, this is
    // its exit code.
    unsafe { libc::syscall(libc::SYS_exit, 101) };
}

/// Ends the main thread, which stays as a zombie: what `/proc/self` shows of memory and descriptors
/// is gone.
fn end_main_thread() {
    let process = std::process::id();
    // SAFETY: the handler ends the main thread, which waits for this one.
    unsafe {
        libc::signal(libc::SIGUSR1, on_end as *const () as usize);
        let sent = libc::syscall(libc::SYS_tgkill, process, process, libc::SIGUSR1);
        assert_eq!(sent, 0);
    }
    let stat = format!("/proc/{process}/stat");
    assert!(soon(|| std::fs::read_to_string(&stat).unwrap().contains(") Z ")));
    assert!(std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.is_empty()));
}

/// Runs `body` after the main thread has ended, and then ends the process.
fn without_main_thread(body: impl FnOnce() + std::panic::UnwindSafe) {
    let body = || {
        end_main_thread();
        body();
    };
    let code = std::panic::catch_unwind(body).map_or(101, |()| 0);
    // SAFETY: nothing is left to be done; the harness would wait for its main thread.
    unsafe { libc::_exit(code) };
}

/// What the machine allows, by topic.
fn findings() -> Vec<(Topic, bool)> {
    let found = Capabilities::probe();
    found.findings().iter().map(|finding| (finding.topic, found.has(finding.topic))).collect()
}

fn leaps_of_regions() {
    // They are found out beforehand.
    let all = engines();
    without_main_thread(move || {
        for engine in all {
            for page in common::PAGE_SIZES {
                let bytes = 4 * page.bytes();
                let Ok(pools) = common::pools(page, bytes as u64) else { continue };
                if engine.forced().is_some_and(|engine| !engine.moves(page)) {
                    continue;
                }
                let mut region = Region::new(&pools[0], bytes).unwrap();
                common::stamp(&region, 0..bytes, 1);
                region.verify().unwrap();
                let job = migration(&region, 0..bytes, &pools[1]).engine(engine);
                let report = job.start().unwrap().wait();
                assert!(report.ended.is_completed(), "{engine:?}: {report}");
                assert_eq!(report.pages.migrated, report.pages.total(), "{report}");
                assert!(common::surprises(&report).is_empty(), "{report}");
                common::check_stamp(&region, 0..bytes, 1);
                region.discard(0..page.bytes()).unwrap();
            }
        }
    });
}

fn leaps_in_place() {
    let works = in_place::works("memory in place without a main thread");
    without_main_thread(move || {
        for page in in_place::KINDS.into_iter().filter(|_| works) {
            let memory = in_place::memory(4 * in_place::HUGE, page);
            let node = common::nodes()[1];
            memory.fill(node);
            let report = in_place::leap(&memory, node).unwrap().wait();
            assert!(report.ended.is_completed(), "{report}");
            assert!(in_place::moved(&report) > 0, "{report}");
            memory.check();
        }
    });
}

fn what_is_found() {
    let before = findings();
    without_main_thread(move || {
        assert_eq!(findings(), before);
        let (region, nodes) = (scene().1, pageleap::observe::node_bytes);
        let (start, len) = (address(&region), BYTES);
        assert_eq!(nodes(start, len).unwrap().values().sum::<u64>(), len as u64);
        let runs = pageleap::observe::attributes(start, len).unwrap();
        assert_eq!(runs.len(), 1, "{runs:?}");
    });
}

#[test]
fn the_main_thread_may_end_before_the_others() {
    cases(
        "the_main_thread_may_end_before_the_others",
        &[
            ("regions", leaps_of_regions, FINE),
            ("in place", leaps_in_place, FINE),
            ("found", what_is_found, FINE),
        ],
    );
}
