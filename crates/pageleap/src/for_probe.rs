//! Rules of the library that the doctor (`pageleap-probe`) judges a machine by. Nobody else uses
//! this module: it stands outside of semantic versioning, and `pageleap-probe` depends on exactly
//! the version of `pageleap` that it was released with.
//!
//! The doctor says what pools and jobs will do here. It must judge by their own rules, because a copy
//! of a rule is right only until the rule changes. Items of the public interface and of
//! `pageleap-sys` are not repeated here.

/// The features that trackers ask a userfaultfd for: the doctor tries exactly these.
pub use crate::backend::uffd::{BARRIER, EXCHANGE, HOLD, HOLD_HUGETLB, MOVE_IN_PLACE, TRACKING};
/// The limits of cgroups as pools find them, on both versions and behind any mount: the doctor
/// compares them with a leap of any size.
pub use crate::cgroup::{huge_pages as huge_page_limits, memory as memory_limits};
/// The mappings that a job with hugetlb pages asks for before it begins.
pub use crate::leap::mappings_apart;
/// The bytes that pools leave free on a node and in a cgroup.
pub use crate::pool::room::MARGIN;
/// The form in which errors give a number of bytes: the doctor's findings stand beside them.
pub use crate::units::human_bytes;
