//! The fault handler and other handlers: foreign faults reach the handler that was installed
//! before, and jobs are refused once another handler has replaced pageleap's.
//!
//! Each case runs in a child: signal actions belong to the process, and some cases end it.

mod common;
#[path = "common/moving.rs"]
mod moving;
#[path = "common/refusing.rs"]
mod refusing;

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering::Relaxed};

use common::{
    address, can_follow, check_stamp, engines, leap, migration, nodes, soon, stamp, works,
};
use moving::{
    BYTES, FINE, SEGV, cases, leap_by_turns, scene, while_leaping, while_migrating, write_rounds,
};
use pageleap::backend::{Call, Errno, Linux};
use pageleap::{
    Ended, Engine, EngineChoice, Error, PageRun, PageSize, Pool, Reason, Region, WarningKind,
};
use refusing::{Refusing, Request};

/// Writes one byte by a call, so that the compiler cannot assume that the write succeeds.
fn poke(addr: usize) {
    // SAFETY: the cases call this for bytes that nothing else uses. Where a byte is not writable,
    // the fault ends the process or is handled: that is what the cases are about.
    unsafe { libc::memset(addr as *mut libc::c_void, 1, 1) };
}

fn protect(addr: usize, len: usize, prot: i32) {
    // SAFETY: callers pass pages of their own, of which they know that nothing relies on the
    // access.
    assert_eq!(unsafe { libc::mprotect(addr as *mut libc::c_void, len, prot) }, 0);
}

fn jump_into(region: &Region) {
    // SAFETY: no instruction runs. The processor refuses to fetch from a page that is not
    // executable, and the process ends.
    unsafe {
        let function: extern "C" fn() = std::mem::transmute(address(region));
        function();
    }
}

/// Sets the action for SIGSEGV, and returns the one before.
fn set_action(handler: usize, flags: i32, also_blocked: &[i32]) -> libc::sigaction {
    // SAFETY: the calls read and write structures of this frame. The handlers of this file are
    // async-signal-safe.
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

/// The action for SIGSEGV now.
fn action_now() -> libc::sigaction {
    // SAFETY: the call writes one structure of this frame.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        assert_eq!(libc::sigaction(libc::SIGSEGV, ptr::null(), &mut action), 0);
        action
    }
}

/// A scene after one job. The default action is set before the job, so that the kernel ends the
/// process and no handler of the standard library.
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
            ("null, with the handler of the standard library", fault_with_the_handler_of_std, SEGV),
            ("null, while migrating", fault_null_while_migrating, SEGV),
            ("read-only part", fault_read_only_part, SEGV),
            ("read-only part that moves", fault_read_only_part_that_moves, SEGV),
            ("unbacked part", fault_unbacked_part, SEGV),
            ("beyond the end", fault_beyond_the_end, SEGV),
            ("dropped region", fault_dropped_region, SEGV),
            ("instruction fetch", fault_instruction_fetch, SEGV),
            ("instruction fetch while migrating", fault_instruction_fetch_while_migrating, SEGV),
            ("ignored before", fault_ignored_before, SEGV),
        ],
    );
}

fn fault_with_the_handler_of_std() {
    let (pools, region) = scene();
    leap(&region, 0..BYTES, &pools[1]);
    poke(8);
}

fn fault_null_while_migrating() {
    set_action(libc::SIG_DFL, 0, &[]);
    while_migrating(|_| poke(8));
}

fn fault_read_only_part() {
    let (_pools, region) = default_action_and_a_leap();
    protect(address(&region) + 8192, 4096, libc::PROT_READ);
    poke(address(&region) + 8192);
}

fn fault_read_only_part_that_moves() {
    set_action(libc::SIG_DFL, 0, &[]);
    let (pools, region) = scene();
    protect(address(&region) + 8192, 4096, libc::PROT_READ);
    while_leaping(|leap| leap_by_turns(&region, &pools, leap), |_| poke(address(&region) + 8192));
}

fn fault_unbacked_part() {
    let (_pools, mut region) = default_action_and_a_leap();
    region.discard(0..4096).unwrap();
    poke(address(&region));
}

fn fault_beyond_the_end() {
    set_action(libc::SIG_DFL, 0, &[]);
    let (pools, _region) = scene();
    let region = Region::reserve(BYTES, PageSize::Base).unwrap();
    region.grow(4096, &pools[1]).unwrap();
    leap(&region, 0..4096, &pools[1]);
    poke(address(&region) + 4096);
}

fn fault_dropped_region() {
    let (_pools, region) = default_action_and_a_leap();
    let addr = address(&region);
    drop(region);
    poke(addr);
}

fn fault_instruction_fetch() {
    let (_pools, region) = default_action_and_a_leap();
    jump_into(&region);
}

fn fault_instruction_fetch_while_migrating() {
    set_action(libc::SIG_DFL, 0, &[]);
    while_migrating(jump_into);
}

fn fault_ignored_before() {
    set_action(libc::SIG_IGN, 0, &[]);
    let (pools, region) = scene();
    leap(&region, 0..BYTES, &pools[1]);
    poke(8);
}

#[test]
fn a_sent_signal_does_what_it_did() {
    cases(
        "a_sent_signal_does_what_it_did",
        &[
            ("kill", sent_kill, SEGV),
            ("kill while migrating", sent_kill_while_migrating, SEGV),
            ("raise", sent_raise, SEGV),
            ("ignored", sent_ignored, FINE),
        ],
    );
}

/// Sends SIGSEGV to this process.
fn send() {
    // SAFETY: the calls take numbers only.
    assert_eq!(unsafe { libc::kill(libc::getpid(), libc::SIGSEGV) }, 0);
}

fn sent_kill() {
    let _scene = default_action_and_a_leap();
    send();
    soon(|| false);
}

fn sent_kill_while_migrating() {
    set_action(libc::SIG_DFL, 0, &[]);
    while_migrating(|_| {
        send();
        soon(|| false);
    });
}

fn sent_raise() {
    let _scene = default_action_and_a_leap();
    // SAFETY: the call takes a number only.
    unsafe { libc::raise(libc::SIGSEGV) };
}

fn sent_ignored() {
    set_action(libc::SIG_IGN, 0, &[]);
    while_migrating(|region| {
        send();
        write_rounds(region, 20);
    });
}

// Handlers of the application
// ------------------------------------------------------------------------------------------------

static CALLS: AtomicU64 = AtomicU64::new(0);
static SIGNAL: AtomicI32 = AtomicI32::new(0);
static CODE: AtomicI32 = AtomicI32::new(0);
static FAULT: AtomicUsize = AtomicUsize::new(0);
static CONTEXT: AtomicUsize = AtomicUsize::new(0);
/// The signals that were blocked while the handler ran.
static BLOCKED: AtomicU64 = AtomicU64::new(0);
/// The value of errno when the handler began.
static ERRNO: AtomicI32 = AtomicI32::new(0);
/// The page that the handlers make writable.
static TRAP: AtomicUsize = AtomicUsize::new(0);

/// The signals that this thread blocks.
fn blocked() -> u64 {
    let mut mask = 0u64;
    // SAFETY: the kernel writes eight bytes, the size of the mask.
    unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, ptr::null::<u64>(), &mut mask, 8)
    };
    mask
}

fn is_blocked(mask: u64, signal: i32) -> bool {
    mask & 1 << (signal - 1) != 0
}

extern "C" fn one_argument(signal: libc::c_int) {
    // SAFETY: errno belongs to this thread.
    ERRNO.store(unsafe { *libc::__errno_location() }, Relaxed);
    CALLS.fetch_add(1, Relaxed);
    SIGNAL.store(signal, Relaxed);
    BLOCKED.store(blocked(), Relaxed);
    // SAFETY: the trap page belongs to the case, and errno to this thread. `mprotect` is a system
    // call without locks, so a handler may make it.
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
    // SAFETY: the kernel passes a valid `info`, and so does a handler that forwards the signal.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    CODE.store(code, Relaxed);
    FAULT.store(addr, Relaxed);
    CONTEXT.store(context as usize, Relaxed);
    one_argument(signal);
}

/// A page without access that [`one_argument`] opens.
fn trap() -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the kernel chooses a free address.
    let page = unsafe { libc::mmap(ptr::null_mut(), 4096, libc::PROT_NONE, flags, -1, 0) } as usize;
    TRAP.store(page, Relaxed);
    page
}

#[test]
fn a_handler_that_was_there_gets_foreign_faults() {
    cases(
        "a_handler_that_was_there_gets_foreign_faults",
        &[
            ("three arguments", earlier_three_arguments, FINE),
            ("one argument", earlier_one_argument, FINE),
            ("a forbidden part of a region", earlier_a_forbidden_part_of_a_region, FINE),
            ("its mask", earlier_its_mask, FINE),
            ("no mask", earlier_no_mask, FINE),
            ("once only: the first", earlier_once_only_the_first, FINE),
            ("once only: the second", earlier_once_only_the_second, SEGV),
            ("once only: writers afterwards", earlier_once_only_writers_afterwards, FINE),
            ("a sent signal", earlier_a_sent_signal, FINE),
        ],
    );
}

fn earlier_three_arguments() {
    set_action(three_arguments as *const () as usize, libc::SA_SIGINFO, &[]);
    while_migrating(|region| {
        write_rounds(region, 200);
        assert_eq!(CALLS.load(Relaxed), 0, "it saw faults that are ours");
        let page = trap();
        poke(page + 17);
        assert_eq!((CALLS.load(Relaxed), SIGNAL.load(Relaxed)), (1, libc::SIGSEGV));
        /// `SEGV_ACCERR`: mapped, but forbidden.
        const FORBIDDEN: i32 = 2;
        assert_eq!((FAULT.load(Relaxed), CODE.load(Relaxed)), (page + 17, FORBIDDEN));
        assert_ne!(CONTEXT.load(Relaxed), 0);
        write_rounds(region, 50);
        assert_eq!(CALLS.load(Relaxed), 1);
    });
}

fn earlier_one_argument() {
    set_action(one_argument as *const () as usize, 0, &[]);
    while_migrating(|region| {
        poke(trap());
        write_rounds(region, 50);
        assert_eq!((CALLS.load(Relaxed), SIGNAL.load(Relaxed)), (1, libc::SIGSEGV));
    });
}

fn earlier_a_forbidden_part_of_a_region() {
    set_action(three_arguments as *const () as usize, libc::SA_SIGINFO | libc::SA_ONSTACK, &[]);
    let (pools, region) = scene();
    protect(address(&region) + 4096, 4096, libc::PROT_NONE);
    leap(&region, 0..BYTES, &pools[1]);
    TRAP.store(address(&region) + 4096, Relaxed);
    // SAFETY: errno belongs to this thread.
    unsafe { *libc::__errno_location() = libc::EXDEV };
    poke(address(&region) + 5000);
    assert_eq!((CALLS.load(Relaxed), FAULT.load(Relaxed)), (1, address(&region) + 5000));
    assert_eq!(ERRNO.load(Relaxed), libc::EXDEV, "our handler changed errno");
}

fn earlier_its_mask() {
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
}

fn earlier_no_mask() {
    set_action(one_argument as *const () as usize, libc::SA_NODEFER, &[]);
    let (pools, region) = scene();
    leap(&region, 0..BYTES, &pools[1]);
    poke(trap());
    assert_eq!((CALLS.load(Relaxed), BLOCKED.load(Relaxed)), (1, 0));
}

fn earlier_once_only_the_first() {
    set_action(one_argument as *const () as usize, libc::SA_RESETHAND, &[]);
    let (pools, region) = scene();
    leap(&region, 0..BYTES, &pools[1]);
    poke(trap());
    assert_eq!(CALLS.load(Relaxed), 1);
}

fn earlier_once_only_the_second() {
    set_action(one_argument as *const () as usize, libc::SA_RESETHAND, &[]);
    let (pools, region) = scene();
    leap(&region, 0..BYTES, &pools[1]);
    poke(trap());
    poke(trap());
}

fn earlier_once_only_writers_afterwards() {
    set_action(one_argument as *const () as usize, libc::SA_RESETHAND, &[]);
    while_migrating(|region| {
        poke(trap());
        write_rounds(region, 200);
    });
}

fn earlier_a_sent_signal() {
    set_action(three_arguments as *const () as usize, libc::SA_SIGINFO, &[]);
    while_migrating(|region| {
        trap();
        // SAFETY: the calls take numbers only.
        unsafe { libc::kill(libc::getpid(), libc::SIGSEGV) };
        assert!(soon(|| CALLS.load(Relaxed) == 1));
        assert_eq!(CODE.load(Relaxed), libc::SI_USER);
        write_rounds(region, 50);
        assert_eq!(CALLS.load(Relaxed), 1);
    });
}

#[test]
fn a_handler_that_comes_later_is_refused_and_named() {
    cases(
        "a_handler_that_comes_later_is_refused_and_named",
        &[("later", handler_later, FINE), ("during a job", handler_during_a_job, FINE)],
    );
}

/// An area stays where it is instead of being moved by signals that would reach the other handler,
/// which comes while a job is under way. Areas of an engine that raises none move on, also where
/// its calls are refused.
fn handler_during_a_job() {
    let [comes, refuses] = [false, true].map(|_| Arc::new(AtomicBool::new(false)));
    let (now, refused) = (comes.clone(), refuses.clone());
    let backend = Arc::new(Refusing::new(Arc::new(Linux), move |request: &Request| {
        let ours = matches!(request.call, Call::Track | Call::Protect) && request.addr != 0;
        if ours && now.swap(false, Relaxed) {
            set_action(one_argument as *const () as usize, 0, &[]);
        }
        let needed = matches!(request.call, Call::Exchange) && refused.load(Relaxed);
        needed.then_some(Errno(libc::ENOMEM))
    }));
    let pools = nodes()
        .map(|node| Pool::builder(node, BYTES as u64).backend(backend.clone()).build().unwrap());
    let region = Region::new(&pools[0], BYTES).unwrap();
    stamp(&region, 0..BYTES, 1);
    leap(&region, 0..BYTES, &pools[1]);
    let ours = action_now();
    // SAFETY: the action is the one that `action_now` has read.
    let put_back =
        || assert_eq!(unsafe { libc::sigaction(libc::SIGSEGV, &ours, ptr::null_mut()) }, 0);
    if can_follow() && works(Engine::WpSync.into()) {
        comes.store(true, Relaxed);
        refuses.store(true, Relaxed);
        let report = migration(&region, 0..BYTES, &pools[0]).start().unwrap().wait();
        refuses.store(false, Relaxed);
        assert!(report.ended.is_completed(), "{report}");
        assert!(report.engines.iter().all(|part| part.engine == Engine::WpSync), "{report}");
        put_back();
        leap(&region, 0..BYTES, &pools[1]);
    }
    comes.store(true, Relaxed);
    let job = migration(&region, 0..BYTES, &pools[0]).engine(Engine::Mprotect).threads(1);
    let report = job.start().unwrap().wait();
    let Ended::Failed(Error::EngineRefused { reason, .. }) = &report.ended else {
        panic!("{report}")
    };
    assert!(reason.contains("another SIGSEGV handler"), "{reason}");
    assert!(report.pages.migrated <= 2, "only the first area was under way: {report}");
    let why = |run: &PageRun| run.reason == Some(Reason::HandlerReplaced);
    assert!(report.runs.iter().any(why), "{report}");
    check_stamp(&region, 0..BYTES, 1);
    put_back();
    leap(&region, 0..BYTES, &pools[0]);
    check_stamp(&region, 0..BYTES, 1);
}

fn handler_later() {
    let (pools, region) = scene();
    leap(&region, 0..BYTES, &pools[1]);
    stamp(&region, 0..BYTES, 1);
    let ours = action_now();
    let theirs = one_argument as *const () as usize;
    set_action(theirs, 0, &[]);
    let any_without = Engine::ALL.iter().any(|one| !one.signals() && works((*one).into()));
    for engine in engines() {
        // `auto` leaves out the engines that raise signals.
        let signals = engine.forced().map_or(!any_without, |engine| engine.signals());
        let free = pools[0].free_bytes();
        let started = migration(&region, 0..BYTES, &pools[0]).engine(engine).start();
        let error = match started {
            Ok(job) => {
                let report = job.wait();
                assert!(!signals && report.ended.is_completed(), "{engine:?}: {report}");
                assert!(!report.engine.engine().is_some_and(Engine::signals), "{report}");
                let told =
                    |warning: &pageleap::Warning| warning.kind == WarningKind::NoFaultHandler;
                let is_auto = engine == EngineChoice::Auto;
                assert_eq!(report.warnings.iter().any(told), is_auto, "{report}");
                assert!(
                    report
                        .engines
                        .iter()
                        .all(|part| !part.engine.engine().is_some_and(Engine::signals)),
                    "{report}"
                );
                let back = migration(&region, 0..BYTES, &pools[1]).engine(engine).start();
                assert!(back.unwrap().wait().ended.is_completed());
                continue;
            }
            Err(error) => error,
        };
        assert!(signals, "{engine:?}: {error}");
        let text = error.to_string();
        assert!(matches!(error, Error::EngineRefused { engine: "mprotect", .. }), "{text}");
        assert!(
            text.contains("another SIGSEGV handler") && text.contains(&format!("{theirs:#x}")),
            "{text}"
        );
        assert!(
            text.contains("before the first job") && text.contains("install_fault_handler"),
            "{text}"
        );
        assert_eq!(pools[0].free_bytes(), free);
    }
    // SAFETY: the action is the one that `action_now` has read.
    assert_eq!(unsafe { libc::sigaction(libc::SIGSEGV, &ours, ptr::null_mut()) }, 0);
    leap(&region, 0..BYTES, &pools[0]);
    check_stamp(&region, 0..BYTES, 1);
}
