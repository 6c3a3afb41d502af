//! CPU affinity of the library's threads.

/// The CPUs on which a thread may run.
pub(crate) struct Affinity(libc::cpu_set_t);

impl Affinity {
    /// The affinity of the calling thread, if the kernel tells it.
    pub(crate) fn own() -> Option<Affinity> {
        // SAFETY: zeros are a valid set, and the call writes one set.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            let refused = libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set);
            (refused == 0).then_some(Affinity(set))
        }
    }

    /// Gives the calling thread this affinity back, as far as the CPUs are still there.
    pub(crate) fn restore(&self) {
        // SAFETY: the call reads one set.
        unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &self.0) };
    }
}

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
