//! The CPUs on which a thread of the library runs, and its scheduling.

/// Restricts the calling thread to `cpus`, as far as its present affinity allows. Returns whether
/// that worked. An empty list (a node without CPUs) changes nothing and returns `true`.
pub(crate) fn run_on(cpus: &[usize]) -> bool {
    if cpus.is_empty() {
        return true;
    }
    // SAFETY: each call reads or writes one CPU set that outlives it. The filter keeps CPU_ISSET
    // and CPU_SET within the set.
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

/// Asks for short time slices for the calling thread, so that the scheduler runs it soon after a
/// wake-up. The kernel offers that to every ordinary thread without privilege.
pub(crate) fn run_shortly() {
    if pageleap_sys::is_ordinary() {
        let _ = pageleap_sys::run_shortly();
    }
}

/// Whether the calling thread may run before ordinary threads without a time limit, and may return
/// to the ordinary policy afterwards.
///
/// A thread with a policy that the user has chosen keeps it. Where RLIMIT_RTTIME is set, the kernel
/// would kill the process during a copy that takes longer.
pub(crate) fn may_run_first() -> bool {
    use pageleap_sys::{Resource, is_ordinary, resource_limit, run_first};
    let unlimited = resource_limit(Resource::RealTime).is_ok_and(|limit| limit.soft.is_none());
    unlimited && is_ordinary() && run_first(true).is_ok() && run_first(false).is_ok()
}
