//! Which CPUs a thread of ours runs on, how urgently, and which signals it takes.

/// Confines the calling thread to those of `cpus` on which it may run at all. Returns whether that
/// worked; with an empty list (a node without CPUs) nothing changes.
pub(crate) fn run_on(cpus: &[usize]) -> bool {
    if cpus.is_empty() {
        return true;
    }
    // SAFETY: both calls read or write one CPU set of the calling thread; CPU_* stay inside it, as
    // the range check ensures.
    unsafe {
        let mut allowed: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut allowed) != 0 {
            return false;
        }
        let mut wanted: libc::cpu_set_t = std::mem::zeroed();
        let fits = |cpu: &&usize| **cpu < libc::CPU_SETSIZE as usize;
        let mut any = false;
        for &cpu in cpus.iter().filter(fits) {
            if libc::CPU_ISSET(cpu, &allowed) {
                libc::CPU_SET(cpu, &mut wanted);
                any = true;
            }
        }
        any && libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &wanted) == 0
    }
}

/// Has the calling thread let in soon when others wait for it, as far as the kernel does that for
/// everybody.
pub(crate) fn run_shortly() {
    if pageleap_sys::is_ordinary() {
        let _ = pageleap_sys::run_shortly();
    }
}

/// Whether the calling thread may be put before others for as long as it likes, and may go back:
/// one that the user has given another policy keeps it, and where `RLIMIT_RTTIME` is set, the
/// kernel would end the process for a copy that takes longer.
pub(crate) fn may_run_first() -> bool {
    use pageleap_sys::{Resource, is_ordinary, resource_limit, run_first};
    let unlimited = resource_limit(Resource::RealTime).is_ok_and(|limit| limit.soft.is_none());
    unlimited && is_ordinary() && run_first(true).is_ok() && run_first(false).is_ok()
}
