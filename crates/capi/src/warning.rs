//! Warnings of reports, and the numbers of their kinds.

use std::ffi::{c_char, c_int};

use pageleap::WarningKind;

/// The subject of a warning.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum pageleap_warning_kind {
    /// None of those below.
    PAGELEAP_WARNING_OTHER = 0,
    /// The engine keeps writers away by mprotect and SIGSEGV: system calls that write into a moving
    /// area may fail with EFAULT.
    PAGELEAP_WARNING_SYSTEM_CALLS_MAY_FAIL = 1,
    /// Another SIGSEGV handler was installed over the library's. Areas that only the engine
    /// mprotect could move stay where they are.
    PAGELEAP_WARNING_NO_FAULT_HANDLER = 2,
    /// The job's threads do not run on the CPUs of the destination's node: it has none, or the
    /// process may not use them.
    PAGELEAP_WARNING_AFFINITY = 3,
    /// The job's threads keep a low priority, so threads that wait for a page may wait until such a
    /// thread gets a CPU.
    PAGELEAP_WARNING_PRIORITY = 4,
    /// Fewer threads copy than asked for.
    PAGELEAP_WARNING_THREADS = 5,
    /// Page tables do not lie where they were asked to lie.
    PAGELEAP_WARNING_PAGE_TABLES = 6,
    /// The cpuset no longer allows a node of the destination.
    PAGELEAP_WARNING_CPUSET = 7,
    /// Another process traces the job's threads (ptrace: strace, a debugger). Pages have stayed, or
    /// another engine has moved them.
    PAGELEAP_WARNING_TRACER = 8,
    /// Too few mappings are left (vm.max_map_count) to go around all guards: pages between guards
    /// have stayed, too.
    PAGELEAP_WARNING_GUARDS = 9,
    /// Neighbouring mappings of hugetlb pages could be one, and were not joined.
    PAGELEAP_WARNING_MAPPINGS = 10,
    /// An attribute of a range (madvise, mlock) is lost, or the range has one that its user has not
    /// set.
    PAGELEAP_WARNING_ATTRIBUTES = 11,
    /// Core dumps may contain the data twice.
    PAGELEAP_WARNING_CORE_DUMPS = 12,
    /// Frames that pages have left are out of circulation until the pool's next attempt.
    PAGELEAP_WARNING_RECYCLING = 13,
    /// Pages were tried again for one reason, and stay for another reason.
    PAGELEAP_WARNING_LATER_REASON = 14,
    /// Pages may lie elsewhere than the report says.
    PAGELEAP_WARNING_PLACES = 15,
    /// A range ends within a huge page, which moves as a whole.
    PAGELEAP_WARNING_EDGES = 16,
}

impl pageleap_warning_kind {
    pub(crate) fn of(kind: WarningKind) -> pageleap_warning_kind {
        use pageleap_warning_kind::*;
        match kind {
            WarningKind::SystemCallsMayFail => PAGELEAP_WARNING_SYSTEM_CALLS_MAY_FAIL,
            WarningKind::NoFaultHandler => PAGELEAP_WARNING_NO_FAULT_HANDLER,
            WarningKind::Affinity => PAGELEAP_WARNING_AFFINITY,
            WarningKind::Priority => PAGELEAP_WARNING_PRIORITY,
            WarningKind::Threads => PAGELEAP_WARNING_THREADS,
            WarningKind::PageTables => PAGELEAP_WARNING_PAGE_TABLES,
            WarningKind::Cpuset => PAGELEAP_WARNING_CPUSET,
            WarningKind::Tracer => PAGELEAP_WARNING_TRACER,
            WarningKind::Guards => PAGELEAP_WARNING_GUARDS,
            WarningKind::Mappings => PAGELEAP_WARNING_MAPPINGS,
            WarningKind::Attributes => PAGELEAP_WARNING_ATTRIBUTES,
            WarningKind::CoreDumps => PAGELEAP_WARNING_CORE_DUMPS,
            WarningKind::Recycling => PAGELEAP_WARNING_RECYCLING,
            WarningKind::LaterReason => PAGELEAP_WARNING_LATER_REASON,
            WarningKind::Places => PAGELEAP_WARNING_PLACES,
            WarningKind::Edges => PAGELEAP_WARNING_EDGES,
            _ => PAGELEAP_WARNING_OTHER,
        }
    }
}

/// A warning of a report: something went less well than asked.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_warning {
    /// sizeof(pageleap_warning).
    pub size: usize,
    /// In words. Valid until the report is freed, and never NULL.
    pub text: *const c_char,
    /// The name of the call that failed, or NULL if the warning is about none. Constant.
    pub call: *const c_char,
    /// The error number of that call, or 0.
    pub error_number: c_int,
    /// The subject of the warning.
    pub kind: pageleap_warning_kind,
}
grows!(pageleap_warning, 32, kind);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_never_change() {
        let numbers = [
            (WarningKind::SystemCallsMayFail, 1),
            (WarningKind::NoFaultHandler, 2),
            (WarningKind::Affinity, 3),
            (WarningKind::Priority, 4),
            (WarningKind::Threads, 5),
            (WarningKind::PageTables, 6),
            (WarningKind::Cpuset, 7),
            (WarningKind::Tracer, 8),
            (WarningKind::Guards, 9),
            (WarningKind::Mappings, 10),
            (WarningKind::Attributes, 11),
            (WarningKind::CoreDumps, 12),
            (WarningKind::Recycling, 13),
            (WarningKind::LaterReason, 14),
            (WarningKind::Places, 15),
            (WarningKind::Edges, 16),
        ];
        for (kind, number) in numbers {
            assert_eq!(pageleap_warning_kind::of(kind) as u32, number, "{kind:?}");
        }
    }
}
