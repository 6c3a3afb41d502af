//! Threads of all kinds survive a migration: those without a usual signal stack, those that look at
//! errno, those that are interrupted; and a thread that could not survive one is named before.
//!
//! Each case runs in a child: a failure may end the process.

mod common;
#[path = "common/moving.rs"]
mod moving;

use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use common::{StopOnDrop, address, can_follow, leap, migration, soon};
use moving::{BYTES, FINE, cases, scene, while_migrating, write_rounds};
use pageleap::{EngineChoice, Error, Region};

// Threads
// -------------------------------------------------------------------------------------------------------------

fn block_sigsegv(how: i32) {
    // SAFETY: the mask of this thread.
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
        &[(
            "blocked",
            || {
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
                    std::thread::Builder::new()
                        .name("deaf".into())
                        .spawn_scoped(scope, thread)
                        .unwrap();
                    assert!(soon(|| state.load(Relaxed) == 1));
                    let migration = || migration(&region, 0..BYTES, &pools[0]);
                    let by_signals = migration().engine(EngineChoice::Mprotect).start();
                    let Err(error) = by_signals.map(drop) else { panic!("not refused") };
                    let text = error.to_string();
                    assert!(matches!(error, Error::EngineRefused { .. }), "{text}");
                    assert!(text.contains("(deaf)") && text.contains("pthread_sigmask"), "{text}");
                    assert_eq!(pools[0].free_bytes(), pools[0].bytes());
                    // What needs no signal does not mind.
                    if can_follow() {
                        leap(&region, 0..BYTES, &pools[0]);
                        leap(&region, 0..BYTES, &pools[1]);
                    }
                    state.store(2, Relaxed);
                    assert!(soon(|| state.load(Relaxed) == 3));
                    leap(&region, 0..BYTES, &pools[0]);
                    state.store(4, Relaxed);
                });
            },
            FINE,
        )],
    );
}

/// The C library blocks all signals for an instant in threads that begin, end or fork, and so does
/// the handler in threads that wait.
#[test]
fn threads_that_block_the_signal_for_an_instant_are_no_obstacle() {
    cases(
        "threads_that_block_the_signal_for_an_instant_are_no_obstacle",
        &[
            (
                "threads that come and go",
                || {
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
                },
                FINE,
            ),
            (
                "writers of another job",
                || {
                    while_migrating(|busy| {
                        let stop = AtomicBool::new(false);
                        std::thread::scope(|scope| {
                            for _ in 0..2 {
                                scope.spawn(|| {
                                    while !stop.load(Relaxed) {
                                        let words = busy.atomics_u64(0..BYTES).unwrap();
                                        words
                                            .iter()
                                            .step_by(64)
                                            .for_each(|word| word.store(1, Relaxed));
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
                },
                FINE,
            ),
        ],
    );
}

/// Runs `body` in a new thread of the C library that uses `stack` as its alternate signal stack, or
/// none.
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
            // SAFETY: the new stack lives until the old one is back.
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

/// Bytes that the handler needs beside the frame that the kernel lays on the stack.
const HANDLER_BYTES: usize = 2048;

#[test]
fn threads_with_small_signal_stacks_or_none_survive() {
    cases(
        "threads_with_small_signal_stacks_or_none_survive",
        &[
            (
                "none",
                || {
                    while_migrating(|region| {
                        with_signal_stack(None, |r| write_rounds(r, 300), region)
                    });
                },
                FINE,
            ),
            (
                "the smallest",
                || {
                    // SAFETY: asks for a number.
                    let frame = unsafe { libc::getauxval(libc::AT_MINSIGSTKSZ) } as usize;
                    let bytes = frame.max(libc::MINSIGSTKSZ) + HANDLER_BYTES;
                    while_migrating(|region| {
                        with_signal_stack(Some(bytes), |r| write_rounds(r, 300), region)
                    });
                },
                FINE,
            ),
            (
                "a thread of the C library",
                || {
                    static REGION: Mutex<Option<&'static Region>> = Mutex::new(None);
                    extern "C" fn body(_: *mut libc::c_void) -> *mut libc::c_void {
                        write_rounds(REGION.lock().unwrap().unwrap(), 300);
                        ptr::null_mut()
                    }
                    while_migrating(|region| {
                        // SAFETY: the thread is joined before the region's borrow ends.
                        unsafe {
                            *REGION.lock().unwrap() =
                                Some(std::mem::transmute::<&Region, &'static Region>(region));
                            let mut thread = std::mem::zeroed();
                            assert_eq!(
                                libc::pthread_create(
                                    &mut thread,
                                    ptr::null(),
                                    body,
                                    ptr::null_mut()
                                ),
                                0
                            );
                            assert_eq!(libc::pthread_join(thread, ptr::null_mut()), 0);
                        }
                    });
                },
                FINE,
            ),
        ],
    );
}

#[test]
fn errno_survives_a_fault() {
    cases(
        "errno_survives_a_fault",
        &[(
            "errno",
            || {
                while_migrating(|region| {
                    let words = region.atomics_u64(0..BYTES).unwrap();
                    for round in 0..500 {
                        for (i, word) in words.iter().enumerate().step_by(512) {
                            let value = 1000 + (round * 7 + i as i32) % 1000;
                            // SAFETY: errno is this thread's own.
                            unsafe {
                                *libc::__errno_location() = value;
                                word.store(i as u64, Relaxed);
                                assert_eq!(*libc::__errno_location(), value);
                            }
                        }
                    }
                });
            },
            FINE,
        )],
    );
}

// A signal handler that uses the region
// -------------------------------------------------------------------------------

static COUNTER: AtomicUsize = AtomicUsize::new(0);
static TICKS: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_alarm(_: libc::c_int) {
    TICKS.fetch_add(1, Relaxed);
    // SAFETY: the word lies in a region that lives while the timer runs.
    let word = unsafe { AtomicU64::from_ptr(COUNTER.load(Relaxed) as *mut u64) };
    word.fetch_add(1, Relaxed);
}

#[test]
fn signal_handlers_may_use_the_region() {
    cases(
        "signal_handlers_may_use_the_region",
        &[(
            "timer",
            || {
                while_migrating(|region| {
                    COUNTER.store(address(region) + 8, Relaxed);
                    let every = |microseconds| libc::itimerval {
                        it_interval: libc::timeval { tv_sec: 0, tv_usec: microseconds },
                        it_value: libc::timeval { tv_sec: 0, tv_usec: microseconds },
                    };
                    // SAFETY: the handler does one atomic addition; the timer is stopped before the
                    // region goes.
                    unsafe {
                        libc::signal(libc::SIGALRM, on_alarm as *const () as usize);
                        assert_eq!(
                            libc::setitimer(libc::ITIMER_REAL, &every(200), ptr::null_mut()),
                            0
                        );
                    }
                    let words = region.atomics_u64(0..BYTES).unwrap();
                    assert!(soon(|| {
                        words[1024].fetch_add(1, Relaxed);
                        TICKS.load(Relaxed) > 500
                    }));
                    let never = every(0);
                    // SAFETY: stops the timer.
                    let stopped =
                        unsafe { libc::setitimer(libc::ITIMER_REAL, &never, ptr::null_mut()) };
                    assert_eq!(stopped, 0);
                    assert!(
                        soon(|| words[1].load(Relaxed) == TICKS.load(Relaxed)),
                        "LOST additions of the handler"
                    );
                });
            },
            FINE,
        )],
    );
}
