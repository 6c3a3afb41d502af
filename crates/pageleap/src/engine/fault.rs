//! The SIGSEGV handler. It finds out whether a fault belongs to a migration, and leaves every other
//! fault to the handler that was installed before.
//!
//! The handler uses only atomics, futexes, `mprotect`, `madvise`, `mincore`, `rt_sigprocmask` and
//! `clock_gettime`. It uses no allocation, no lock and no thread-local. It runs on the thread's
//! alternate stack if the thread has one (`SA_ONSTACK`), else on the thread's own stack. It needs
//! less than 2 KB of that stack.

use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pageleap_sys::{Advice, Errno, is_mapped, set_advice};

use super::slot::{FaultVerdict, SlotTable};
use crate::address_ranges::REGIONS;
use crate::error::Error;
use crate::sync::{monotonic_ns, process_wide};
use crate::units::BASE_PAGE;

/// The most threads that can migrate at the same time in one process, all jobs together.
// Few under a checker, so that jobs run out of them.
pub const MAX_THREADS: usize = if cfg!(shuttle) { 4 } else { 64 };

process_wide! {
    /// The slots of all workers.
    static SLOTS: SlotTable<MAX_THREADS> = SlotTable::new()
}

/// The action for SIGSEGV before ours. Set before our handler is installed, never changed
/// afterwards.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// Whether the previous handler was to be called only once (`SA_RESETHAND`), and has been called.
static PREVIOUS_USED_UP: AtomicBool = AtomicBool::new(false);

type Action = unsafe extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// The kind of access that faulted, as far as the processor reports it.
#[derive(PartialEq, Eq)]
enum Access {
    Load,
    Store,
    /// An instruction fetch, or a violated protection key: never caused by a migration.
    Other,
}

/// # Safety
/// `context` is the pointer that the kernel passed to a SIGSEGV handler.
#[cfg(target_arch = "x86_64")]
unsafe fn access(_code: libc::c_int, context: *const libc::c_void) -> Access {
    const WRITE: i64 = 1 << 1;
    const FETCH: i64 = 1 << 4;
    const PROTECTION_KEY: i64 = 1 << 5;
    // SAFETY: the kernel passed a `ucontext_t`.
    let error =
        unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_ERR as usize] };
    if error & (FETCH | PROTECTION_KEY) != 0 {
        Access::Other
    } else if error & WRITE != 0 {
        Access::Store
    } else {
        Access::Load
    }
}

/// # Safety
/// The caller has nothing to ensure: `context` is not read. Without the processor's error code, a
/// missing mapping counts as a load, and a forbidden access as a store.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn access(code: libc::c_int, _context: *const libc::c_void) -> Access {
    if code == SEGV_MAPERR { Access::Load } else { Access::Store }
}

const SEGV_MAPERR: libc::c_int = 1;
const SEGV_ACCERR: libc::c_int = 2;

unsafe extern "C" fn on_sigsegv(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: errno is the thread's own; the kernel passed valid `info` and `context`.
    unsafe {
        let errno = *libc::__errno_location();
        let (code, addr) = ((*info).si_code, (*info).si_addr() as usize);
        let home = match code {
            SEGV_MAPERR | SEGV_ACCERR => REGIONS.home_of(addr),
            _ => None,
        };
        let ours = home.is_some_and(|home| match access(code, context) {
            Access::Load => with_own_mask(|| resolve(addr, home, Advice::PopulateRead)),
            Access::Store => with_own_mask(|| resolve(addr, home, Advice::PopulateWrite)),
            Access::Other => false,
        });
        *libc::__errno_location() = errno;
        if !ours {
            chain(signal, info, context);
        }
    }
}

/// The signals that are blocked in the handler, numbered as in the kernel. SIGSEGV stays unblocked;
/// otherwise another thread could not tell a thread that waits in the handler from one that always
/// blocks SIGSEGV. glibc's signal for thread cancellation is blocked, although glibc keeps it out
/// of full sets, because unwinding a thread out of the handler would leave an area closed.
const MASK: u64 = !(1 << (libc::SIGSEGV - 1) | 1 << (SIGSETXID - 1));

/// The flags with which the handler is installed.
const FLAGS: libc::c_int = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;

/// Runs `wait` with the handler's own signal mask. The kernel has already set it, unless another
/// handler has passed the fault on: then the mask is that handler's.
fn with_own_mask(wait: impl FnOnce() -> bool) -> bool {
    if !PROMISED.load(Ordering::Relaxed) {
        return wait();
    }
    let before = set_mask(MASK);
    let result = wait();
    set_mask(before);
    result
}

/// Sets the calling thread's signal mask, numbered as in the kernel, and returns the previous mask.
fn set_mask(new: u64) -> u64 {
    let mut before = 0u64;
    // SAFETY: both masks have the kernel's size, and only the calling thread's mask changes.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &new,
            &mut before,
            size_of::<u64>(),
        )
    };
    before
}

/// Waits for the migration that made an access fault, or interrupts it. Returns `false` if no
/// migration was the cause. `home` is the address in the region, if `addr` lies in a view of it.
fn resolve(addr: usize, home: usize, probe: Advice) -> bool {
    let entered = monotonic_ns();
    let page = addr & !(BASE_PAGE - 1);
    // SAFETY: the page lies in a region; populating it changes neither contents nor access.
    let populates = |advice| match unsafe { set_advice(page, BASE_PAGE, advice) } {
        // The call was interrupted or short of a resource, which says nothing about the access:
        // repeating the access will show.
        Ok(()) | Err(Errno(libc::EINTR | libc::EAGAIN)) => true,
        // Nothing is mapped, or memory is short.
        Err(Errno(libc::ENOMEM)) => is_mapped(page, BASE_PAGE),
        Err(_) => false,
    };
    // On x86-64 a load from memory that is writable but not readable succeeds. The kernel populates
    // such memory for writing only.
    let accessible =
        || populates(probe) || probe == Advice::PopulateRead && populates(Advice::PopulateWrite);
    let verdict = SLOTS.resolve(home, &accessible, &mut |slot| {
        slot.waits.record(monotonic_ns().saturating_sub(entered));
    });
    verdict == FaultVerdict::Retry
}

/// Passes a fault on to the previous action, as the kernel would have done without our handler.
///
/// # Safety
/// The arguments are those of a signal handler that does nothing more after this call.
unsafe fn chain(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: set before the handler was installed, leaked, never changed.
    let previous = unsafe { &*PREVIOUS.load(Ordering::Acquire) };
    // SAFETY: the kernel passed a valid `info`.
    let sent_by_process = unsafe { (*info).si_code } <= 0;
    let used_up = if previous.sa_flags & libc::SA_RESETHAND != 0 {
        // The kernel would have installed the default action instead. Our handler stays, because
        // writers need it.
        PREVIOUS_USED_UP.swap(true, Ordering::AcqRel)
    } else {
        false
    };
    if previous.sa_sigaction == libc::SIG_IGN && sent_by_process {
        return;
    }
    if used_up || matches!(previous.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN) {
        // A real fault repeats itself and ends the process, as it would have without our handler. A
        // signal that was sent has to be sent again.
        // SAFETY: plain system calls; a zeroed sigaction is SIG_DFL with an empty mask.
        unsafe {
            let default: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, &default, ptr::null_mut());
            if sent_by_process {
                libc::raise(signal);
            }
        }
        return;
    }
    // SAFETY: the kernel's mask is the first word of both sets. The previous handler gets the
    // arguments and the mask that the kernel would have given it. It returns (or jumps) to where it
    // could have returned under the kernel.
    unsafe {
        let interrupted =
            *ptr::addr_of!((*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>();
        let wanted = *ptr::addr_of!(previous.sa_mask).cast::<u64>();
        let own = if previous.sa_flags & libc::SA_NODEFER != 0 { 0 } else { 1u64 << (signal - 1) };
        let before = set_mask(interrupted | wanted | own);
        // With SA_SIGINFO the handler takes three arguments. Without it the handler takes one, and
        // on all Linux ABIs it ignores the others.
        let action = std::mem::transmute::<usize, Action>(previous.sa_sigaction);
        action(signal, info, context);
        // A handler that has passed the fault on to ours gets its mask back.
        set_mask(before);
    }
}

/// glibc's signal for `setuid` and similar calls, which all threads have to carry out.
const SIGSETXID: libc::c_int = 33;

unsafe extern "C" fn forget_slots() {
    SLOTS.forget();
}

fn current_action() -> libc::sigaction {
    // SAFETY: with a null new action the call only writes the old one.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGSEGV, ptr::null(), &mut action);
        action
    }
}

/// Whether the program has promised that handlers installed over ours pass on faults that they do
/// not handle themselves.
static PROMISED: AtomicBool = AtomicBool::new(false);

/// Installs the SIGSEGV handler in front of the present handler, which still gets every fault that
/// does not concern a moving page. Call it if the program installs a handler of its own later on;
/// otherwise the first job installs the library's. The engines
/// `mprotect` and `precopy-protect` need it; the others need it when the kernel refuses their own
/// calls.
///
/// If another handler was installed over ours since, a writer's fault would reach that handler and
/// end the process, so engines that raise signals are refused. `auto` then uses only engines that
/// raise no signal; areas for which the kernel refuses their calls stay.
///
/// The other handler may pass faults that it does not handle to the handler that it replaced, with
/// all three arguments. If it does, call this function before that handler is installed. The call
/// is the promise that the handler passes faults on. Jobs then start, provided that the handler has
/// SA_SIGINFO and not SA_RESETHAND.
///
/// While the other handler runs, no further signal handler may store into a region. If one might,
/// let the other handler block all signals (`sa_mask`).
pub fn install() -> Result<(), Error> {
    ensure_installed()?;
    PROMISED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Whether an action can pass its signals on: every time (no SA_RESETHAND), and with all arguments
/// (SA_SIGINFO).
fn can_pass_on(action: &libc::sigaction) -> bool {
    !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
        && action.sa_flags & libc::SA_SIGINFO != 0
        && action.sa_flags & libc::SA_RESETHAND == 0
}

/// Whether SIGSEGV reaches the library's handler now. Refuses if another handler was installed over
/// it and the program has not promised that this one passes faults on.
pub(crate) fn is_in_place() -> Result<(), Error> {
    let found = current_action();
    if is_in_order(&found) || is_ours(&found) {
        return Ok(());
    }
    let what = match found.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            "the action for SIGSEGV was set to the default or to be ignored".to_owned()
        }
        handler => {
            format!("another SIGSEGV handler (at {handler:#x}) was installed over pageleap's")
        }
    };
    let remedy = if PROMISED.load(Ordering::Relaxed) {
        "give it SA_SIGINFO and not SA_RESETHAND, so that it can pass on faults that are not its \
         own, each time and with all arguments"
    } else {
        "install that handler before the first job, so that pageleap passes faults of others on \
         to it; or, if it passes such faults on itself, call install_fault_handler before you \
         install it"
    };
    let reason = format!("{what}, and would receive the faults of writers");
    Err(Error::EngineRefused { engine: "mprotect", reason, remedy: remedy.into() })
}

fn is_ours(action: &libc::sigaction) -> bool {
    action.sa_sigaction == on_sigsegv as *const () as usize
}

/// Whether an action passes the library's faults on to the library's handler.
fn is_in_order(action: &libc::sigaction) -> bool {
    match is_ours(action) {
        true => action.sa_flags & FLAGS == FLAGS,
        false => PROMISED.load(Ordering::Relaxed) && can_pass_on(action),
    }
}

/// Installs the handler, once per process. Refuses as [`is_in_place`] does.
pub(crate) fn ensure_installed() -> Result<(), Error> {
    static ONCE: Mutex<()> = Mutex::new(());
    let _once = ONCE.lock().unwrap_or_else(PoisonError::into_inner);
    let found = current_action();
    // An action that is in order is not written again, because the write could replace a handler
    // that another thread is installing at this moment.
    if is_in_order(&found) {
        return Ok(());
    }
    let is_first = PREVIOUS.load(Ordering::Acquire).is_null();
    if !is_first {
        is_in_place()?;
    }
    if is_first {
        PREVIOUS.store(Box::leak(Box::new(found)), Ordering::Release);
        // A child made by `fork` inherits attempts, but no migrator that could end them. So the
        // child forgets the slots, and its faults are its own.
        // SAFETY: the function is async-signal-safe and stays.
        unsafe { libc::pthread_atfork(None, None, Some(forget_slots)) };
    }
    // Also needed if the handler is ours already: a program that has reinstalled it by `signal` has
    // cleared its flags.
    // SAFETY: the handler is async-signal-safe (see the module's head) and `PREVIOUS` is set.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigsegv as *const () as usize;
        action.sa_flags = FLAGS;
        *ptr::addr_of_mut!(action.sa_mask).cast::<u64>() = MASK;
        libc::sigaction(libc::SIGSEGV, &action, ptr::null_mut());
    }
    Ok(())
}

/// Refuses if a thread of the process blocks SIGSEGV. At that thread's first write into an area
/// that is being copied, the kernel would kill the process without calling any handler.
pub(crate) fn check_no_thread_blocks_sigsegv() -> Result<(), Error> {
    /// A thread that is being created or is ending blocks all signals for a moment, so only a
    /// thread that blocks SIGSEGV in every scan counts.
    const LOOKS: u32 = 500;
    const PAUSE: Duration = Duration::from_millis(2);
    let look = || threads_that_block(Path::new("/proc/self/task"), libc::SIGSEGV);
    let mut found = look();
    for _ in 1..LOOKS {
        match &mut found {
            Ok(threads) if !threads.is_empty() => {
                std::thread::sleep(PAUSE);
                match look() {
                    Ok(still) => {
                        threads.retain(|(tid, _)| still.iter().any(|(other, _)| other == tid))
                    }
                    error => found = error,
                }
            }
            _ => break,
        }
    }
    match found {
        Ok(threads) if threads.is_empty() => Ok(()),
        Ok(threads) => Err(Error::EngineRefused {
            engine: "mprotect",
            reason: format!("these threads block SIGSEGV: {}", named(&threads)),
            remedy: "unblock it there (pthread_sigmask): a blocked SIGSEGV kills the process on the first write to a moving page"
                .into(),
        }),
        Err(e) => Err(Error::system_file("/proc/self/task/*/status", &e)),
    }
}

fn named(threads: &[(String, String)]) -> String {
    threads.iter().map(|(tid, name)| format!("{tid} ({name})")).collect::<Vec<_>>().join(", ")
}

/// Ids and names of the threads below a task folder whose blocked-signal mask (`SigBlk`) contains
/// `signal`. The kernel's workers among them (io_uring, vhost) are left out: they run no code of
/// the process, block all signals, and get EFAULT instead. A main thread that has ended before the
/// others is left out, too.
fn threads_that_block(tasks: &Path, signal: libc::c_int) -> std::io::Result<Vec<(String, String)>> {
    let mut blocking = Vec::new();
    for task in std::fs::read_dir(tasks)? {
        let task = task?;
        // A thread that ends meanwhile does not matter.
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else { continue };
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let blocked =
            field("SigBlk:").and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap_or(0);
        let stat = || std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        let has_ended = field("State:").is_some_and(|state| state.starts_with('Z'));
        if blocked & 1 << (signal - 1) != 0 && !has_ended && !is_kernels(&stat()) {
            let name: String =
                field("Name:").unwrap_or("?").chars().filter(|c| !c.is_control()).collect();
            blocking.push((task.file_name().to_string_lossy().into_owned(), name));
        }
    }
    Ok(blocking)
}

/// Whether a line of `/proc/PID/stat` belongs to a thread that the kernel has made for its own
/// work.
fn is_kernels(stat: &str) -> bool {
    /// PF_IO_WORKER (io_uring, since 5.12) and PF_USER_WORKER (also vhost, since 6.4), of
    /// include/linux/sched.h.
    const WORKER: u64 = 0x10 | 0x4000;
    // The flags are the seventh field after the name. The name may contain any character.
    let flags = stat
        .rsplit(')')
        .next()
        .and_then(|rest| rest.split_whitespace().nth(6)?.parse::<u64>().ok());
    flags.is_some_and(|flags| flags & WORKER != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_of_the_kernel_are_told_from_threads_of_the_process() {
        let line = |flags: u64| format!("5 (a) S 1) S 1 5 5 0 -1 {flags} 10 0 0 0 0 0 0 0 20 0");
        assert!(is_kernels(&line(0x0040_4050)) && is_kernels(&line(0x4000)));
        assert!(!is_kernels(&line(0x0040_0040)) && !is_kernels("") && !is_kernels("5 (a) S 1 5"));
        let own = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        assert!(!is_kernels(&own), "{own}");
    }

    #[test]
    #[cfg(not(miri))]
    fn a_thread_that_blocks_the_signal_is_named() {
        let tasks = Path::new("/proc/self/task");
        let (blocked, wait) = (std::sync::mpsc::channel(), std::sync::mpsc::channel::<()>());
        let thread = std::thread::Builder::new().name("deaf\u{7}one".into()).spawn(move || {
            // SAFETY: masks of this thread only.
            unsafe {
                let mut set = std::mem::zeroed();
                libc::sigemptyset(&mut set);
                libc::sigaddset(&mut set, libc::SIGUSR2);
                libc::pthread_sigmask(libc::SIG_BLOCK, &set, ptr::null_mut());
            }
            blocked.0.send(()).unwrap();
            let _ = wait.1.recv();
        });
        blocked.1.recv().unwrap();
        let [blocked, open] =
            [libc::SIGUSR2, libc::SIGUSR1].map(|signal| threads_that_block(tasks, signal).unwrap());
        drop(wait.0);
        thread.unwrap().join().unwrap();
        let is_named = |found: &[(String, String)]| found.iter().any(|(_, name)| name == "deafone");
        assert!(is_named(&blocked) && !is_named(&open), "{blocked:?}, {open:?}");
    }
}
