//! The fault handler among others: faults that are not pageleap's reach whoever would have had
//! them, and a handler that would take its place is refused.
//!
//! Signal actions belong to the process, and some cases end it: each runs in a child.

mod common;
#[path = "common/moving.rs"]
mod moving;

use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering::Relaxed};

use common::{address, check_stamp, leap, migration, soon, stamp};
use moving::{
    BYTES, FINE, SEGV, cases, leap_by_turns, scene, while_leaping, while_migrating, write_rounds,
};
use pageleap::{Error, PageSize, Pool, Region};

/// Writes one byte in a way that the compiler knows nothing about.
fn poke(addr: usize) {
    // SAFETY: not sound at all where the address is not writable: that is what the cases are about.
    unsafe { libc::memset(addr as *mut libc::c_void, 1, 1) };
}

fn protect(addr: usize, len: usize, prot: i32) {
    // SAFETY: pages that the case owns.
    assert_eq!(unsafe { libc::mprotect(addr as *mut libc::c_void, len, prot) }, 0);
}

fn jump_into(region: &Region) {
    // SAFETY: never sound; the processor refuses to fetch from a page that is not executable.
    unsafe {
        let function: extern "C" fn() = std::mem::transmute(address(region));
        function();
    }
}

fn set_action(handler: usize, flags: i32, also_blocked: &[i32]) -> libc::sigaction {
    // SAFETY: plain calls on structures of this frame; the handlers below are async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let mut old: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        also_blocked
            .iter()
            .for_each(|signal| assert_eq!(libc::sigaddset(&mut action.sa_mask, *signal), 0));
        assert_eq!(libc::sigaction(libc::SIGSEGV, &action, &mut old), 0);
        old
    }
}

fn action_now() -> libc::sigaction {
    // SAFETY: writes one structure.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        assert_eq!(libc::sigaction(libc::SIGSEGV, ptr::null(), &mut action), 0);
        action
    }
}

/// One job with a default action before it, so that nobody but the kernel ends the process.
fn default_action_and_a_leap() -> ([Pool; 2], Region) {
    set_action(libc::SIG_DFL, 0, &[]);
    let (pools, region) = scene();
    leap(&region, 0..BYTES, &pools[1]);
    (pools, region)
}

#[test]
fn foreign_faults_still_kill() {
    cases(
        "foreign_faults_still_kill",
        &[
            ("null", || drop((default_action_and_a_leap(), poke(8))), SEGV),
            (
                "null, with the handler of the standard library",
                || {
                    let (pools, region) = scene();
                    leap(&region, 0..BYTES, &pools[1]);
                    poke(8);
                },
                SEGV,
            ),
            (
                "null, while migrating",
                || {
                    set_action(libc::SIG_DFL, 0, &[]);
                    while_migrating(|_| poke(8));
                },
                SEGV,
            ),
            (
                "read-only part",
                || {
                    let (_pools, region) = default_action_and_a_leap();
                    protect(address(&region) + 8192, 4096, libc::PROT_READ);
                    poke(address(&region) + 8192);
                },
                SEGV,
            ),
            (
                "read-only part that moves",
                || {
                    set_action(libc::SIG_DFL, 0, &[]);
                    let (pools, region) = scene();
                    protect(address(&region) + 8192, 4096, libc::PROT_READ);
                    while_leaping(
                        |leap| leap_by_turns(&region, &pools, leap),
                        |_| poke(address(&region) + 8192),
                    );
                },
                SEGV,
            ),
            (
                "unbacked part",
                || {
                    let (_pools, mut region) = default_action_and_a_leap();
                    region.discard(0..4096).unwrap();
                    poke(address(&region));
                },
                SEGV,
            ),
            (
                "beyond the end",
                || {
                    set_action(libc::SIG_DFL, 0, &[]);
                    let (pools, _region) = scene();
                    let region = Region::reserve(BYTES, PageSize::Base).unwrap();
                    region.grow(4096, &pools[1]).unwrap();
                    leap(&region, 0..4096, &pools[1]);
                    poke(address(&region) + 4096);
                },
                SEGV,
            ),
            (
                "dropped region",
                || {
                    let (_pools, region) = default_action_and_a_leap();
                    let addr = address(&region);
                    drop(region);
                    poke(addr);
                },
                SEGV,
            ),
            (
                "instruction fetch",
                || {
                    let (_pools, region) = default_action_and_a_leap();
                    jump_into(&region);
                },
                SEGV,
            ),
            (
                "instruction fetch while migrating",
                || {
                    set_action(libc::SIG_DFL, 0, &[]);
                    while_migrating(jump_into);
                },
                SEGV,
            ),
            (
                "ignored before",
                || {
                    set_action(libc::SIG_IGN, 0, &[]);
                    let (pools, region) = scene();
                    leap(&region, 0..BYTES, &pools[1]);
                    poke(8);
                },
                SEGV,
            ),
        ],
    );
}

#[test]
fn a_sent_signal_does_what_it_did() {
    fn send() {
        // SAFETY: a signal to this process.
        assert_eq!(unsafe { libc::kill(libc::getpid(), libc::SIGSEGV) }, 0);
    }
    cases(
        "a_sent_signal_does_what_it_did",
        &[
            (
                "kill",
                || {
                    let _scene = default_action_and_a_leap();
                    send();
                    soon(|| false);
                },
                SEGV,
            ),
            (
                "kill while migrating",
                || {
                    set_action(libc::SIG_DFL, 0, &[]);
                    while_migrating(|_| {
                        send();
                        soon(|| false);
                    });
                },
                SEGV,
            ),
            (
                "raise",
                || {
                    let _scene = default_action_and_a_leap();
                    // SAFETY: a signal to this thread.
                    unsafe { libc::raise(libc::SIGSEGV) };
                },
                SEGV,
            ),
            (
                "ignored",
                || {
                    set_action(libc::SIG_IGN, 0, &[]);
                    while_migrating(|region| {
                        send();
                        write_rounds(region, 20);
                    });
                },
                FINE,
            ),
        ],
    );
}

// Handlers of the application
// -----------------------------------------------------------------------------------------

static CALLS: AtomicU64 = AtomicU64::new(0);
static SIGNAL: AtomicI32 = AtomicI32::new(0);
static CODE: AtomicI32 = AtomicI32::new(0);
static FAULT: AtomicUsize = AtomicUsize::new(0);
static CONTEXT: AtomicUsize = AtomicUsize::new(0);
/// The thread's blocked signals while the handler ran.
static BLOCKED: AtomicU64 = AtomicU64::new(0);
/// What errno was when the handler began.
static ERRNO: AtomicI32 = AtomicI32::new(0);
/// The page that the handlers make writable.
static TRAP: AtomicUsize = AtomicUsize::new(0);

fn blocked() -> u64 {
    let mut mask = 0u64;
    // SAFETY: the kernel writes eight bytes.
    unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, ptr::null::<u64>(), &mut mask, 8)
    };
    mask
}

fn is_blocked(mask: u64, signal: i32) -> bool {
    mask & 1 << (signal - 1) != 0
}

extern "C" fn one_argument(signal: libc::c_int) {
    // SAFETY: errno is this thread's own.
    ERRNO.store(unsafe { *libc::__errno_location() }, Relaxed);
    CALLS.fetch_add(1, Relaxed);
    SIGNAL.store(signal, Relaxed);
    BLOCKED.store(blocked(), Relaxed);
    // SAFETY: the trap page belongs to the case; async-signal-safe.
    unsafe {
        libc::mprotect(
            TRAP.load(Relaxed) as *mut libc::c_void,
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
        );
        *libc::__errno_location() = libc::EDOM;
    }
}

extern "C" fn three_arguments(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel, or who chains, passed a valid `info`.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    CODE.store(code, Relaxed);
    FAULT.store(addr, Relaxed);
    CONTEXT.store(context as usize, Relaxed);
    one_argument(signal);
}

/// A page without access that [`one_argument`] opens.
fn trap() -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping.
    let page = unsafe { libc::mmap(ptr::null_mut(), 4096, libc::PROT_NONE, flags, -1, 0) } as usize;
    TRAP.store(page, Relaxed);
    page
}

#[test]
fn a_handler_that_was_there_gets_foreign_faults() {
    cases(
        "a_handler_that_was_there_gets_foreign_faults",
        &[
            (
                "three arguments",
                || {
                    set_action(three_arguments as *const () as usize, libc::SA_SIGINFO, &[]);
                    while_migrating(|region| {
                        write_rounds(region, 200);
                        assert_eq!(CALLS.load(Relaxed), 0, "it saw faults that are ours");
                        let page = trap();
                        poke(page + 17);
                        assert_eq!((CALLS.load(Relaxed), SIGNAL.load(Relaxed)), (1, libc::SIGSEGV));
                        /// `SEGV_ACCERR`: mapped, but forbidden.
                        const FORBIDDEN: i32 = 2;
                        assert_eq!(
                            (FAULT.load(Relaxed), CODE.load(Relaxed)),
                            (page + 17, FORBIDDEN)
                        );
                        assert_ne!(CONTEXT.load(Relaxed), 0);
                        write_rounds(region, 50);
                        assert_eq!(CALLS.load(Relaxed), 1);
                    });
                },
                FINE,
            ),
            (
                "one argument",
                || {
                    set_action(one_argument as *const () as usize, 0, &[]);
                    while_migrating(|region| {
                        poke(trap());
                        write_rounds(region, 50);
                        assert_eq!((CALLS.load(Relaxed), SIGNAL.load(Relaxed)), (1, libc::SIGSEGV));
                    });
                },
                FINE,
            ),
            (
                "a forbidden part of a region",
                || {
                    set_action(
                        three_arguments as *const () as usize,
                        libc::SA_SIGINFO | libc::SA_ONSTACK,
                        &[],
                    );
                    let (pools, region) = scene();
                    protect(address(&region) + 4096, 4096, libc::PROT_NONE);
                    leap(&region, 0..BYTES, &pools[1]);
                    TRAP.store(address(&region) + 4096, Relaxed);
                    // SAFETY: errno is this thread's own.
                    unsafe { *libc::__errno_location() = libc::EXDEV };
                    poke(address(&region) + 5000);
                    assert_eq!(
                        (CALLS.load(Relaxed), FAULT.load(Relaxed)),
                        (1, address(&region) + 5000)
                    );
                    assert_eq!(ERRNO.load(Relaxed), libc::EXDEV, "our handler changed errno");
                },
                FINE,
            ),
            (
                "its mask",
                || {
                    let blocks = [libc::SIGUSR1, libc::SIGALRM];
                    set_action(one_argument as *const () as usize, 0, &blocks);
                    let (pools, region) = scene();
                    leap(&region, 0..BYTES, &pools[1]);
                    let before = blocked();
                    poke(trap());
                    let within = BLOCKED.load(Relaxed);
                    for signal in [libc::SIGUSR1, libc::SIGALRM, libc::SIGSEGV] {
                        assert!(is_blocked(within, signal), "signal {signal} was not blocked");
                    }
                    for signal in [libc::SIGUSR2, libc::SIGINT, libc::SIGTERM] {
                        assert!(!is_blocked(within, signal), "signal {signal} was blocked");
                    }
                    assert_eq!(blocked(), before);
                },
                FINE,
            ),
            (
                "no mask",
                || {
                    set_action(one_argument as *const () as usize, libc::SA_NODEFER, &[]);
                    let (pools, region) = scene();
                    leap(&region, 0..BYTES, &pools[1]);
                    poke(trap());
                    assert_eq!((CALLS.load(Relaxed), BLOCKED.load(Relaxed)), (1, 0));
                },
                FINE,
            ),
            (
                "once only: the first",
                || {
                    set_action(one_argument as *const () as usize, libc::SA_RESETHAND, &[]);
                    let (pools, region) = scene();
                    leap(&region, 0..BYTES, &pools[1]);
                    poke(trap());
                    assert_eq!(CALLS.load(Relaxed), 1);
                },
                FINE,
            ),
            (
                "once only: the second",
                || {
                    set_action(one_argument as *const () as usize, libc::SA_RESETHAND, &[]);
                    let (pools, region) = scene();
                    leap(&region, 0..BYTES, &pools[1]);
                    poke(trap());
                    poke(trap());
                },
                SEGV,
            ),
            (
                "once only: writers afterwards",
                || {
                    set_action(one_argument as *const () as usize, libc::SA_RESETHAND, &[]);
                    while_migrating(|region| {
                        poke(trap());
                        write_rounds(region, 200);
                    });
                },
                FINE,
            ),
            (
                "a sent signal",
                || {
                    set_action(three_arguments as *const () as usize, libc::SA_SIGINFO, &[]);
                    while_migrating(|region| {
                        trap();
                        // SAFETY: a signal to this process.
                        unsafe { libc::kill(libc::getpid(), libc::SIGSEGV) };
                        assert!(soon(|| CALLS.load(Relaxed) == 1));
                        assert_eq!(CODE.load(Relaxed), libc::SI_USER);
                        write_rounds(region, 50);
                        assert_eq!(CALLS.load(Relaxed), 1);
                    });
                },
                FINE,
            ),
        ],
    );
}

#[test]
fn a_handler_that_comes_later_is_refused_and_named() {
    cases(
        "a_handler_that_comes_later_is_refused_and_named",
        &[(
            "later",
            || {
                let (pools, region) = scene();
                leap(&region, 0..BYTES, &pools[1]);
                stamp(&region, 0..BYTES, 1);
                let ours = action_now();
                let theirs = one_argument as *const () as usize;
                set_action(theirs, 0, &[]);
                let free = pools[0].free_bytes();
                for _ in 0..2 {
                    let Err(error) = migration(&region, 0..BYTES, &pools[0]).start().map(drop)
                    else {
                        panic!("not refused")
                    };
                    let text = error.to_string();
                    assert!(
                        matches!(error, Error::EngineRefused { engine: "mprotect", .. }),
                        "{text}"
                    );
                    assert!(
                        text.contains("another SIGSEGV handler")
                            && text.contains(&format!("{theirs:#x}")),
                        "{text}"
                    );
                    assert!(
                        text.contains("before the first job")
                            && text.contains("install_fault_handler"),
                        "{text}"
                    );
                    assert_eq!(pools[0].free_bytes(), free);
                }
                // SAFETY: puts back what was there.
                assert_eq!(unsafe { libc::sigaction(libc::SIGSEGV, &ours, ptr::null_mut()) }, 0);
                leap(&region, 0..BYTES, &pools[0]);
                check_stamp(&region, 0..BYTES, 1);
            },
            FINE,
        )],
    );
}
