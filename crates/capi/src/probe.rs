//! What this machine, user and container allow.

use std::ffi::{CString, c_char};

use pageleap::topology::SysFiles;
use pageleap_probe::{Capabilities, Demand, Finding};

use crate::boundary::{bad, flag, free, give, handle, nothing_yet, read, string, value, write};
use crate::page_size::page_size;
use crate::status::{pageleap_status, text};

/// What was found out about this machine, user and container by trying calls and reading files.
/// Capabilities never change.
pub struct pageleap_capabilities {
    findings: Vec<Texts>,
}

struct Texts {
    topic: CString,
    state: pageleap_state,
    blocks: bool,
    summary: CString,
    reason: CString,
    observed: CString,
    remedies: Vec<[CString; 3]>,
}

/// What a program intends to do.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_demand {
    /// sizeof(pageleap_demand).
    pub size: usize,
    /// Bytes of the region that is to move; 0 for a few pages.
    pub bytes: u64,
    /// The size of its pages.
    pub page_size: u32,
    /// Whether to move a few pages as a trial, which gives the finding "leap". The trial
    /// installs the SIGSEGV handler, as a job does.
    pub try_leap: flag,
    /// Must be 0.
    pub reserved: [u8; 3],
}
grows!(pageleap_demand, 24, reserved);

/// The state of a finding.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum pageleap_state {
    /// It was tried, or read, and works.
    PAGELEAP_WORKS = 0,
    /// It works, with a restriction that the reason names.
    PAGELEAP_LIMITED = 1,
    /// It does not work here.
    PAGELEAP_MISSING = 2,
    /// It could be neither tried nor read.
    PAGELEAP_UNKNOWN = 3,
}

/// One finding. Texts are valid until the capabilities are freed, and never NULL.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_finding {
    /// sizeof(pageleap_finding).
    pub size: usize,
    /// The topic: a name that stays the same from version to version, such as "cpuset",
    /// "hugetlb-2m" or "free-memory". pageleap_engine has the topic of each engine.
    pub topic: *const c_char,
    /// Its state.
    pub state: pageleap_state,
    /// Whether the finding rules out the move that the demand describes.
    pub blocks: flag,
    /// The finding in one line.
    pub summary: *const c_char,
    /// What is wrong or restricted; empty if everything works.
    pub reason: *const c_char,
    /// What was seen, line by line: calls with their results, files with their contents.
    pub observed: *const c_char,
    /// How many remedies there are: pageleap_capabilities_remedy().
    pub remedy_count: usize,
}
grows!(pageleap_finding, 56, remedy_count);

/// One way to change a finding. Texts are valid until the capabilities are freed, and never
/// NULL.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_remedy {
    /// sizeof(pageleap_remedy).
    pub size: usize,
    /// Who can apply the remedy.
    pub who: *const c_char,
    /// The exact line to type or to add.
    pub line: *const c_char,
    /// What else the line grants, or takes away: the price.
    pub grants: *const c_char,
}
grows!(pageleap_remedy, 32, grants);

fn texts(finding: &Finding, demand: &Demand) -> Texts {
    use pageleap_probe::State;
    let state = match finding.state {
        State::Works => pageleap_state::PAGELEAP_WORKS,
        State::Limited => pageleap_state::PAGELEAP_LIMITED,
        State::Missing => pageleap_state::PAGELEAP_MISSING,
        State::Unknown => pageleap_state::PAGELEAP_UNKNOWN,
    };
    let remedies = finding.remedies.iter();
    Texts {
        topic: text(finding.topic.id()),
        state,
        blocks: demand.is_blocked_by(finding),
        summary: text(finding.summary.as_str()),
        reason: text(finding.reason.as_str()),
        observed: text(finding.observed.join("\n")),
        remedies: remedies
            .map(|remedy| {
                [text(remedy.who.text()), text(remedy.line.as_str()), text(remedy.grants.as_str())]
            })
            .collect(),
    }
}

/// Finds out what this machine, user and container allow. It tries each call that matters on
/// memory of its own, and leaves everything as it was. It takes tens of milliseconds. `demand`
/// may be NULL: a few pages of 4 KB. Free the capabilities with pageleap_capabilities_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_probe(
    demand: *const pageleap_demand,
    capabilities: *mut *mut pageleap_capabilities,
) -> pageleap_status {
    // SAFETY: forwarded to the caller.
    unsafe { nothing_yet(capabilities) };
    boundary!({
        // SAFETY: forwarded to the caller.
        let asked = unsafe { read(demand) }?;
        let bytes = asked.map(|demand| demand.bytes).filter(|bytes| *bytes > 0);
        let page = page_size(asked.map_or(0, |demand| demand.page_size))?;
        if asked.is_some_and(|demand| demand.reserved != [0; 3]) {
            return Err(bad("demand", "a reserved field is not 0", "make it with PAGELEAP_INIT"));
        }
        let demand = Demand { bytes, page };
        let make = || {
            let capabilities = Capabilities::probe_with(&SysFiles::host(), &demand);
            let mut findings: Vec<Texts> =
                capabilities.findings().iter().map(|finding| texts(finding, &demand)).collect();
            if asked.is_some_and(|demand| demand.try_leap != 0) {
                findings.push(texts(&capabilities.try_leap(&demand), &demand));
            }
            Ok(pageleap_capabilities { findings })
        };
        // SAFETY: forwarded to the caller.
        unsafe { give(capabilities, "capabilities", make) }
    })
}

/// Frees capabilities; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_capabilities_free(capabilities: *mut pageleap_capabilities) {
    // SAFETY: forwarded to the caller.
    unsafe { free(capabilities) };
}

/// The number of findings; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_capabilities_count(
    capabilities: *const pageleap_capabilities,
) -> usize {
    // SAFETY: forwarded to the caller.
    value(0, || Ok(unsafe { handle(capabilities, "capabilities") }?.findings.len()))
}

/// Whether a topic works, perhaps with a restriction: its state is PAGELEAP_WORKS or
/// PAGELEAP_LIMITED. False for topics that were not looked at, and for unknown names.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_capabilities_has(
    capabilities: *const pageleap_capabilities,
    topic: *const c_char,
) -> bool {
    value(false, || {
        // SAFETY: forwarded to the caller.
        let (capabilities, topic) =
            unsafe { (handle(capabilities, "capabilities")?, string(topic, "topic")?) };
        let found = capabilities
            .findings
            .iter()
            .find(|finding| finding.topic.to_bytes() == topic.as_bytes());
        let good = [pageleap_state::PAGELEAP_WORKS, pageleap_state::PAGELEAP_LIMITED];
        Ok(found.is_some_and(|finding| good.contains(&finding.state)))
    })
}

fn finding_at(
    capabilities: &pageleap_capabilities,
    index: usize,
) -> Result<&Texts, pageleap::Error> {
    let all = &capabilities.findings;
    all.get(index).ok_or_else(|| {
        bad("index", format!("{index} of {} findings", all.len()), "use a smaller one")
    })
}

/// Fills in `finding` with the finding at an index, 0 to pageleap_capabilities_count() - 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_capabilities_finding(
    capabilities: *const pageleap_capabilities,
    index: usize,
    finding: *mut pageleap_finding,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let found = finding_at(unsafe { handle(capabilities, "capabilities") }?, index)?;
        let shown = pageleap_finding {
            size: 0,
            topic: found.topic.as_ptr(),
            state: found.state,
            blocks: found.blocks.into(),
            summary: found.summary.as_ptr(),
            reason: found.reason.as_ptr(),
            observed: found.observed.as_ptr(),
            remedy_count: found.remedies.len(),
        };
        // SAFETY: forwarded to the caller.
        unsafe { write(finding, shown) }
    })
}

/// Fills in `remedy` with a remedy of the finding at an index. Remedies are in order, the least
/// intrusive first: 0 to the finding's remedy_count - 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_capabilities_remedy(
    capabilities: *const pageleap_capabilities,
    finding_index: usize,
    remedy_index: usize,
    remedy: *mut pageleap_remedy,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let found = finding_at(unsafe { handle(capabilities, "capabilities") }?, finding_index)?;
        let [who, line, grants] = found.remedies.get(remedy_index).ok_or_else(|| {
            let count = found.remedies.len();
            bad("index", format!("{remedy_index} of {count} remedies"), "use a smaller one")
        })?;
        let shown = pageleap_remedy {
            size: 0,
            who: who.as_ptr(),
            line: line.as_ptr(),
            grants: grants.as_ptr(),
        };
        // SAFETY: forwarded to the caller.
        unsafe { write(remedy, shown) }
    })
}
