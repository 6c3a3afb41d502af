//! The list of places is read before the program's `main`, and a child of `fork` starts anew.

use core::ffi::CStr;
use core::ptr;
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::Relaxed;

use super::affinity::{find_size, unpin};
use super::functions::{
    Handler, get_specific, getenv, pthread_atfork, real_execv, real_execve, real_execvp,
    real_execvpe, real_popen, real_posix_spawn, real_posix_spawnp, real_sched_getaffinity,
    real_sched_setaffinity, real_system, register_atfork, set_specific, thread_number,
};
use super::places::PLACES;
use super::value::{make_key, own_value, set_value};

/// The environment variable with the CPUs in the order of places: `0,4,1,5`.
pub(super) const VARIABLE: &CStr = c"PAGELEAP_PLACES";
/// The environment variable with the CPUs on which the program starts, if these are fewer than the
/// places: those of its home.
pub(super) const HOME: &CStr = c"PAGELEAP_HOME";

static IS_READY: AtomicBool = AtomicBool::new(false);

/// The loader calls functions of this section before `main`.
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = prepare;

/// Reads the list of places, once. Constructors of other libraries may create threads before that of
/// this one runs, so each creation asks for it; the first one finds no second thread.
pub(super) extern "C" fn prepare() {
    if IS_READY.swap(true, Relaxed) {
        return;
    }
    // SAFETY: the name ends with zero, and the value too, if there is one. No thread changes the
    // environment meanwhile, because there is only one.
    let value = |name: &CStr| unsafe {
        let value = getenv(name.as_ptr());
        if value.is_null() { None } else { Some(CStr::from_ptr(value).to_bytes()) }
    };
    let Some(text) = value(VARIABLE) else { return };
    find_all();
    if make_key() {
        find_size();
        PLACES.fill(text, value(HOME).unwrap_or_default());
    }
    let handler: Option<Handler> = Some(forked);
    // SAFETY: the handler is a function of this library, which is never unloaded.
    unsafe {
        match (register_atfork(), pthread_atfork()) {
            (Some(register), _) => register(None, None, handler, ptr::null_mut()),
            (None, Some(register)) => register(None, None, handler),
            (None, None) => 0,
        }
    };
}

/// Finds the functions that a child of `fork` or `vfork` calls: `dlsym` takes a lock of the loader,
/// which another thread may hold for ever in such a child.
fn find_all() {
    let _ = (get_specific(), set_specific());
    let _ = (real_sched_getaffinity(), real_sched_setaffinity(), thread_number());
    let _ = (real_posix_spawn(), real_posix_spawnp(), real_system(), real_popen());
    let _ = (real_execve(), real_execv(), real_execvp(), real_execvpe());
}

/// Runs in a forked child, whose only thread is its main thread from now on.
unsafe extern "C" fn forked() {
    PLACES.forget();
    if own_value() != 0 {
        unpin();
        set_value(0);
    }
}
