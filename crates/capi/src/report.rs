//! Reports: outcomes, reasons, figures, engines, copies and calls of a job, and the report as text
//! or JSON.

mod json;
#[cfg(test)]
mod tests;

use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use pageleap::{CopyLoop, Ended, PageOutcome, Reason, Report, Source};

use crate::boundary::{bad, free, handle, value, write};
use crate::migration::pageleap_engine;
use crate::status::{constant, pageleap_status, text};
use crate::warning::{pageleap_warning, pageleap_warning_kind};

/// The report of a job. It never changes.
pub struct pageleap_report {
    report: Report,
    ended: CString,
    engine_reason: CString,
    engine_whys: Vec<CString>,
    run_reasons: Vec<CString>,
    warnings: Vec<CString>,
    text: OnceLock<CString>,
    json: OnceLock<CString>,
}

/// The reason why a job has ended. In any case pages that have moved stay moved, all others stay
/// where they were, and all are whole.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum pageleap_ended {
    /// Every page was dealt with.
    PAGELEAP_COMPLETED = 0,
    /// The program cancelled or freed the job.
    PAGELEAP_CANCELLED = 1,
    /// The time was up.
    PAGELEAP_TIMED_OUT = 2,
    /// The program freed a region that the job worked on.
    PAGELEAP_REGION_FREED = 3,
    /// The cpuset of the process was changed and no longer allows a node that pages were to
    /// move to.
    PAGELEAP_CPUSET_CHANGED = 4,
    /// Some pages could not be moved, or a guard has kept them where they are.
    PAGELEAP_FAILED = 5,
}

/// The outcome of a page.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum pageleap_outcome {
    /// The page lies in a frame of the destination now.
    PAGELEAP_MIGRATED = 0,
    /// There was nothing to do: the page lay in such a frame already, has no memory, or was not to
    /// move, for the reason that its run gives.
    PAGELEAP_UNCHANGED = 1,
    /// The page was tried without success, and the job was stopped before the next try; or a guard
    /// kept it in its frame.
    PAGELEAP_BUSY = 2,
    /// The job has given the page up: a system call was refused each time the page was tried.
    PAGELEAP_NOT_MOVABLE = 3,
    /// The job was stopped before it tried the page.
    PAGELEAP_NOT_ATTEMPTED = 4,
}

/// The figures of a report. Texts are valid until the report is freed, and never NULL.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_report_figures {
    /// sizeof(pageleap_report_figures).
    pub size: usize,
    /// Why the job has ended.
    pub ended: pageleap_ended,
    /// The engine that was chosen, and used wherever it was not refused.
    pub engine: pageleap_engine,
    /// Why the job has ended, in words: for PAGELEAP_FAILED the first error.
    pub ended_text: *const c_char,
    /// Why this engine was chosen, in words.
    pub engine_reason: *const c_char,
    /// Pages that have moved.
    pub pages_migrated: u64,
    /// Pages with nothing to do (PAGELEAP_UNCHANGED).
    pub pages_unchanged: u64,
    /// Pages that were tried and stay where they were.
    pub pages_busy: u64,
    /// Pages that could not be moved.
    pub pages_not_movable: u64,
    /// Pages that were not tried.
    pub pages_not_attempted: u64,
    /// Bytes of all ranges.
    pub bytes: u64,
    /// Bytes copied, including worthless copies.
    pub bytes_copied: u64,
    /// Bytes of worthless copies: they were written meanwhile.
    pub bytes_recopied: u64,
    /// The time from the start of the job until the last page had moved, in nanoseconds.
    pub migrate_ns: u64,
    /// The time after that, in which vacated frames were made ready for use again, in nanoseconds.
    pub recycle_ns: u64,
    /// The longest window, in nanoseconds. A window is the time for which an area is closed to
    /// writers (with the engines precopy, stop-copy and uffd-move to readers, too).
    pub window_max_ns: u64,
    /// The 99th percentile of the windows, in nanoseconds.
    pub window_p99_ns: u64,
    /// How many windows there were.
    pub windows: u64,
    /// How many of them were longer than the wait budget.
    pub windows_over_budget: u64,
    /// The longest time for which a thread had to wait in the SIGSEGV handler, in nanoseconds.
    pub wait_max_ns: u64,
    /// Areas whose writers had to wait although much of the area was still to be copied.
    pub holds: u64,
    /// How often a refused system call was repeated because giving up would have left part of a
    /// region inaccessible.
    pub repairs: u64,
    /// The largest size of an area, in bytes.
    pub area_bytes: usize,
    /// Threads that copied, at most.
    pub threads: u32,
    /// How many of them still copied at the end. Fewer than threads means that more of them were
    /// hardly faster.
    pub threads_settled: u32,
    /// How many warnings there are: pageleap_report_warning().
    pub warning_count: usize,
    /// How many runs of pages there are: pageleap_report_run().
    pub run_count: usize,
    /// How many uses of engines there are: pageleap_report_get_engine_use().
    pub engine_use_count: usize,
    /// How many pairs of nodes pages were copied between: pageleap_report_get_copy_use().
    pub copy_use_count: usize,
    /// In how many windows the thread that kept the area closed ran before ordinary threads
    /// (SCHED_FIFO).
    pub windows_first: u64,
    /// CPU time of the job's threads until the last page had moved, in nanoseconds; UINT64_MAX if the
    /// kernel does not say.
    pub migrate_cpu_ns: u64,
    /// CPU time of the recycling after that, in nanoseconds; UINT64_MAX if the kernel does not say.
    pub recycle_cpu_ns: u64,
    /// Copies that writes have spoilt, with the engine mprotect.
    pub disturbed_copies: u64,
    /// Areas that were split because writes had spoilt their copies.
    pub splits: u64,
    /// How many different system calls were made: pageleap_report_get_call_use().
    pub call_use_count: usize,
    /// How many more mappings the regions consist of than before, or fewer if negative. Pages over
    /// consecutive frames of a pool count as one. A page that leaves its neighbours behind adds two.
    /// 0 for memory that is no region.
    pub mappings_added: i64,
}
grows!(pageleap_report_figures, 208, mappings_added);

/// Why pages stay where they are.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum pageleap_reason {
    /// They have moved, or did not have to.
    PAGELEAP_REASON_NONE = 0,
    /// Threads wrote to them while they were copied, and the job was stopped before the next try.
    PAGELEAP_REASON_WRITTEN = 1,
    /// A guard keeps them in their frames: pageleap_region_pin().
    PAGELEAP_REASON_GUARDED = 2,
    /// A system call was refused; reason_errno has its error number.
    PAGELEAP_REASON_CALL_REFUSED = 3,
    /// A thread blocks SIGSEGV, and the only engine that is left would kill it.
    PAGELEAP_REASON_SIGNAL_BLOCKED = 4,
    /// The job was stopped before it tried them.
    PAGELEAP_REASON_STOPPED = 5,
    /// No page is present there: the process has not touched them.
    PAGELEAP_REASON_ABSENT = 6,
    /// They have been swapped out.
    PAGELEAP_REASON_SWAPPED_OUT = 7,
    /// Nothing is mapped there.
    PAGELEAP_REASON_UNMAPPED = 8,
    /// They are the kernel's zero page, which stands for pages that were only read.
    PAGELEAP_REASON_ZERO_PAGE = 9,
    /// They are mapped more than once, by a child of fork() for instance.
    PAGELEAP_REASON_SHARED = 10,
    /// No pages of such mappings move: memory of a device, of the kernel, or secret.
    PAGELEAP_REASON_UNMOVABLE = 11,
    /// The kernel did not move them each time they were tried: they are pinned for I/O, locked, or
    /// being written back.
    PAGELEAP_REASON_IN_USE = 12,
    /// The node of the destination has no room for them.
    PAGELEAP_REASON_NO_ROOM = 13,
    /// The process has ended, or runs another program now.
    PAGELEAP_REASON_PROCESS_ENDED = 14,
    /// The process ended, or began to run another program, during the call that was to move them;
    /// it is not known whether they moved.
    PAGELEAP_REASON_UNCERTAIN = 15,
    /// They lie on a node from which no page was to move.
    PAGELEAP_REASON_OTHER_NODE = 16,
    /// They arrived, and have moved on since: they belong to a huge page of which another part was
    /// to go elsewhere, or something else has moved them.
    PAGELEAP_REASON_MOVED_ON = 17,
    /// They belong to a transparent huge page, and the node of the destination has no free block of
    /// 2 MB.
    PAGELEAP_REASON_NO_FREE_BLOCK = 18,
    /// Other code of this process has closed a descriptor that the job needs.
    PAGELEAP_REASON_DESCRIPTOR_LOST = 19,
    /// Another SIGSEGV handler was installed over the library's, and would get the faults that the
    /// only engine left raises.
    PAGELEAP_REASON_HANDLER_REPLACED = 20,
    /// Another process traces the job's threads (strace, a debugger), and would wait for ever for a
    /// page that the engine has unmapped.
    PAGELEAP_REASON_TRACED = 21,
    /// The program went on changing the mapping (madvise, mprotect, mlock, munmap) each time they
    /// were to be moved, or has set attributes on a part of a huge page.
    PAGELEAP_REASON_MAPPING_CHANGED = 22,
    /// The program has discarded or backed them while the job ran, or was about to.
    PAGELEAP_REASON_DISCARDED = 23,
    /// Only page tables were to move, and theirs also map other mappings.
    PAGELEAP_REASON_SHARED_TABLE = 24,
    /// Another reason, which reason_text tells.
    PAGELEAP_REASON_OTHER = 255,
}

/// The kind of memory that a job moves.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum pageleap_source {
    /// Pages of a region. source_id is its identity, pageleap_region_describe(), and offsets count
    /// from its start. Later versions may add other sources.
    PAGELEAP_SOURCE_REGION = 0,
    /// Pages of a process that lie in no region. source_id is the number of the process (pid), and
    /// offsets are addresses.
    PAGELEAP_SOURCE_PROCESS = 1,
}

/// Consecutive pages of one source that had the same outcome, for the same reason.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_page_run {
    /// sizeof(pageleap_page_run).
    pub size: usize,
    /// The kind of memory.
    pub source: pageleap_source,
    /// The outcome of these pages.
    pub outcome: pageleap_outcome,
    /// The region or process.
    pub source_id: u64,
    /// The first byte of the source.
    pub offset: usize,
    /// How many bytes.
    pub length: usize,
    /// Why these pages stay where they are.
    pub reason: pageleap_reason,
    /// The error number of the refused call; 0 without one.
    pub reason_errno: i32,
    /// The reason in words; empty without one. Valid until the report is freed, and never NULL.
    pub reason_text: *const c_char,
}
grows!(pageleap_page_run, 56, reason_text);

/// The pages of a range that one engine has moved.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_engine_use {
    /// sizeof(pageleap_engine_use).
    pub size: usize,
    /// The kind of memory.
    pub source: pageleap_source,
    /// The engine.
    pub engine: pageleap_engine,
    /// The region or process.
    pub source_id: u64,
    /// The first byte of the range, in the source.
    pub offset: usize,
    /// How many bytes the range has.
    pub length: usize,
    /// How many pages of the range this engine has moved.
    pub pages: u64,
    /// Why this engine was taken, in words. Valid until the report is freed, and never NULL.
    pub why: *const c_char,
}
grows!(pageleap_engine_use, 56, why);

/// A loop that copies pages.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum pageleap_copy_loop {
    /// One word after the other. Later versions may add other loops, and name them so.
    PAGELEAP_COPY_WORDS = 0,
    /// Four pages in turns, with streaming stores (x86-64).
    PAGELEAP_COPY_FOUR_PAGES = 1,
    /// memcpy of the C library.
    PAGELEAP_COPY_MEMCPY = 2,
}

/// How pages were copied from one node to another.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_copy_use {
    /// sizeof(pageleap_copy_use).
    pub size: usize,
    /// The node of the old frames.
    pub from_node: u32,
    /// The node of the new frames.
    pub to_node: u32,
    /// The copy loop.
    pub by: pageleap_copy_loop,
    /// 1 if a trial in this process has found this loop with these steps to be the fastest, else 0.
    pub tried: u32,
    /// Bytes that the loop copies at a time.
    pub step_bytes: usize,
}
grows!(pageleap_copy_use, 32, step_bytes);

/// How often a job has made one system call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_call_use {
    /// sizeof(pageleap_call_use).
    pub size: usize,
    /// The name of the call. Constant.
    pub name: *const c_char,
    /// The calls made by attempts and by the SIGSEGV handler. Calls that prepare a job or recycle
    /// frames do not count.
    pub count: u64,
}
grows!(pageleap_call_use, 24, count);

fn copy_loop(by: CopyLoop) -> pageleap_copy_loop {
    match by {
        CopyLoop::FourPages => pageleap_copy_loop::PAGELEAP_COPY_FOUR_PAGES,
        CopyLoop::Memcpy => pageleap_copy_loop::PAGELEAP_COPY_MEMCPY,
        _ => pageleap_copy_loop::PAGELEAP_COPY_WORDS,
    }
}

fn source(source: Source) -> pageleap_source {
    match source.region() {
        Some(_) => pageleap_source::PAGELEAP_SOURCE_REGION,
        None => pageleap_source::PAGELEAP_SOURCE_PROCESS,
    }
}

fn reason(reason: Option<Reason>) -> pageleap_reason {
    use pageleap_reason::*;
    let Some(reason) = reason else { return PAGELEAP_REASON_NONE };
    match reason {
        Reason::Written => PAGELEAP_REASON_WRITTEN,
        Reason::Guarded => PAGELEAP_REASON_GUARDED,
        Reason::Refused(..) => PAGELEAP_REASON_CALL_REFUSED,
        Reason::SignalBlocked => PAGELEAP_REASON_SIGNAL_BLOCKED,
        Reason::Stopped => PAGELEAP_REASON_STOPPED,
        Reason::Absent => PAGELEAP_REASON_ABSENT,
        Reason::SwappedOut => PAGELEAP_REASON_SWAPPED_OUT,
        Reason::Unmapped => PAGELEAP_REASON_UNMAPPED,
        Reason::ZeroPage => PAGELEAP_REASON_ZERO_PAGE,
        Reason::Shared => PAGELEAP_REASON_SHARED,
        Reason::Unmovable => PAGELEAP_REASON_UNMOVABLE,
        Reason::InUse => PAGELEAP_REASON_IN_USE,
        Reason::NoRoom => PAGELEAP_REASON_NO_ROOM,
        Reason::ProcessEnded => PAGELEAP_REASON_PROCESS_ENDED,
        Reason::Uncertain => PAGELEAP_REASON_UNCERTAIN,
        Reason::OtherNode => PAGELEAP_REASON_OTHER_NODE,
        Reason::MovedOn => PAGELEAP_REASON_MOVED_ON,
        Reason::NoFreeBlock => PAGELEAP_REASON_NO_FREE_BLOCK,
        Reason::DescriptorLost => PAGELEAP_REASON_DESCRIPTOR_LOST,
        Reason::HandlerReplaced => PAGELEAP_REASON_HANDLER_REPLACED,
        Reason::Traced => PAGELEAP_REASON_TRACED,
        Reason::MappingChanged(_) => PAGELEAP_REASON_MAPPING_CHANGED,
        Reason::Discarded => PAGELEAP_REASON_DISCARDED,
        Reason::SharedTable => PAGELEAP_REASON_SHARED_TABLE,
        _ => PAGELEAP_REASON_OTHER,
    }
}

/// The error number of the call that was refused.
fn errno_of(reason: Option<Reason>) -> Option<i32> {
    match reason {
        Some(Reason::Refused(_, errno) | Reason::MappingChanged(Some((_, errno)))) => Some(errno.0),
        _ => None,
    }
}

/// A reason in words; empty without one.
fn words(reason: Option<Reason>) -> String {
    reason.map_or_else(String::new, |reason| reason.to_string())
}

/// Why a job has ended: the number, its name in JSON, and words.
fn ended(ended: &Ended) -> (pageleap_ended, &'static str, String) {
    use pageleap_ended::*;
    let (number, name, words) = match ended {
        Ended::Completed => (PAGELEAP_COMPLETED, "completed", "every page was dealt with"),
        Ended::Cancelled => (PAGELEAP_CANCELLED, "cancelled", "it was cancelled"),
        Ended::TimedOut => (PAGELEAP_TIMED_OUT, "timed-out", "the time was up"),
        Ended::RegionDropped => {
            (PAGELEAP_REGION_FREED, "region-freed", "a region was freed that it worked on")
        }
        Ended::CpusetChanged => (
            PAGELEAP_CPUSET_CHANGED,
            "cpuset-changed",
            "the cpuset no longer allows a node of the destination",
        ),
        Ended::Failed(error) => return (PAGELEAP_FAILED, "failed", error.to_string()),
    };
    (number, name, words.to_owned())
}

fn outcome(outcome: PageOutcome) -> (pageleap_outcome, &'static str) {
    match outcome {
        PageOutcome::Migrated => (pageleap_outcome::PAGELEAP_MIGRATED, "migrated"),
        PageOutcome::Unchanged => (pageleap_outcome::PAGELEAP_UNCHANGED, "unchanged"),
        PageOutcome::Busy => (pageleap_outcome::PAGELEAP_BUSY, "busy"),
        PageOutcome::Failed => (pageleap_outcome::PAGELEAP_NOT_MOVABLE, "not-movable"),
        PageOutcome::NotAttempted => (pageleap_outcome::PAGELEAP_NOT_ATTEMPTED, "not-attempted"),
    }
}

impl pageleap_report {
    pub(crate) fn new(report: Report) -> pageleap_report {
        pageleap_report {
            ended: text(ended(&report.ended).2),
            engine_reason: text(report.engine_reason.as_str()),
            engine_whys: report.engines.iter().map(|part| text(part.why.as_str())).collect(),
            run_reasons: report.runs.iter().map(|run| text(words(run.reason))).collect(),
            warnings: report.warnings.iter().map(|warning| text(warning.text.as_str())).collect(),
            text: OnceLock::new(),
            json: OnceLock::new(),
            report,
        }
    }
}

/// Frees a report and its texts; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_report_free(report: *mut pageleap_report) {
    // SAFETY: forwarded to the caller.
    unsafe { free(report) };
}

/// The figures of a report.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_report_get_figures(
    report: *const pageleap_report,
    figures: *mut pageleap_report_figures,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let of = unsafe { handle(report, "report") }?;
        let report = &of.report;
        let shown = pageleap_report_figures {
            size: 0,
            ended: ended(&report.ended).0,
            engine: pageleap_engine::of(report.engine),
            ended_text: of.ended.as_ptr(),
            engine_reason: of.engine_reason.as_ptr(),
            pages_migrated: report.pages.migrated,
            pages_unchanged: report.pages.unchanged,
            pages_busy: report.pages.busy,
            pages_not_movable: report.pages.failed,
            pages_not_attempted: report.pages.not_attempted,
            bytes: report.bytes,
            bytes_copied: report.bytes_copied,
            bytes_recopied: report.bytes_recopied,
            migrate_ns: report.migrate_ns,
            recycle_ns: report.recycle_ns,
            window_max_ns: report.windows.max_ns,
            window_p99_ns: report.windows.quantile(0.99),
            windows: report.windows.count,
            windows_over_budget: report.counts.windows_over_budget,
            wait_max_ns: report.waits.max_ns,
            holds: report.counts.holds,
            repairs: report.counts.repairs,
            area_bytes: report.area_bytes,
            threads: report.threads as u32,
            threads_settled: report.threads_settled as u32,
            warning_count: of.warnings.len(),
            run_count: report.runs.len(),
            engine_use_count: report.engines.len(),
            copy_use_count: report.copies.len(),
            windows_first: report.counts.windows_first,
            migrate_cpu_ns: report.migrate_cpu_ns.unwrap_or(u64::MAX),
            recycle_cpu_ns: report.recycle_cpu_ns.unwrap_or(u64::MAX),
            disturbed_copies: report.counts.disturbed_copies,
            splits: report.counts.splits,
            call_use_count: report.calls.len(),
            mappings_added: report.counts.mappings_added,
        };
        // SAFETY: forwarded to the caller.
        unsafe { write(figures, shown) }
    })
}

/// The run of pages at an index, 0 to run_count - 1, in the order in which the ranges were
/// given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_report_run(
    report: *const pageleap_report,
    index: usize,
    run: *mut pageleap_page_run,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let report = unsafe { handle(report, "report") }?;
        let runs = &report.report.runs;
        let of = runs.get(index).ok_or_else(|| {
            bad("index", format!("{index} of {} runs", runs.len()), "use a smaller one")
        })?;
        let shown = pageleap_page_run {
            size: 0,
            source: source(of.source),
            outcome: outcome(of.outcome).0,
            source_id: of.source.id(),
            offset: of.range.start,
            length: of.range.len(),
            reason: reason(of.reason),
            reason_errno: errno_of(of.reason).unwrap_or(0),
            reason_text: report.run_reasons[index].as_ptr(),
        };
        // SAFETY: forwarded to the caller.
        unsafe { write(run, shown) }
    })
}

/// The use of an engine at an index, 0 to engine_use_count - 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_report_get_engine_use(
    report: *const pageleap_report,
    index: usize,
    engine_use: *mut pageleap_engine_use,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let report = unsafe { handle(report, "report") }?;
        let uses = &report.report.engines;
        let of = uses.get(index).ok_or_else(|| {
            bad("index", format!("{index} of {} uses", uses.len()), "use a smaller one")
        })?;
        let shown = pageleap_engine_use {
            size: 0,
            source: source(of.source),
            engine: pageleap_engine::of(of.engine),
            source_id: of.source.id(),
            offset: of.range.start,
            length: of.range.len(),
            pages: of.pages,
            why: report.engine_whys[index].as_ptr(),
        };
        // SAFETY: forwarded to the caller.
        unsafe { write(engine_use, shown) }
    })
}

/// How pages were copied between one pair of nodes: `index` is 0 to copy_use_count - 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_report_get_copy_use(
    report: *const pageleap_report,
    index: usize,
    copy_use: *mut pageleap_copy_use,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let report = unsafe { handle(report, "report") }?;
        let uses = &report.report.copies;
        let of = uses.get(index).ok_or_else(|| {
            bad("index", format!("{index} of {} uses", uses.len()), "use a smaller one")
        })?;
        let shown = pageleap_copy_use {
            size: 0,
            from_node: of.from.0,
            to_node: of.to.0,
            by: copy_loop(of.method.by),
            tried: of.tried.into(),
            step_bytes: of.method.step_bytes,
        };
        // SAFETY: forwarded to the caller.
        unsafe { write(copy_use, shown) }
    })
}

/// How often a system call was made: `index` is 0 to call_use_count - 1, in the order of the names.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_report_get_call_use(
    report: *const pageleap_report,
    index: usize,
    call_use: *mut pageleap_call_use,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let calls = &unsafe { handle(report, "report") }?.report.calls;
        let (name, count) = calls.iter().nth(index).ok_or_else(|| {
            bad("index", format!("{index} of {} calls", calls.len()), "use a smaller one")
        })?;
        let shown = pageleap_call_use { size: 0, name: constant(name).as_ptr(), count: *count };
        // SAFETY: forwarded to the caller.
        unsafe { write(call_use, shown) }
    })
}

/// One warning, something that went less well than asked: `index` is 0 to warning_count - 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_report_get_warning(
    report: *const pageleap_report,
    index: usize,
    warning: *mut pageleap_warning,
) -> pageleap_status {
    boundary!({
        // SAFETY: forwarded to the caller.
        let report = unsafe { handle(report, "report") }?;
        let all = &report.report.warnings;
        let of = all.get(index).ok_or_else(|| {
            bad("index", format!("{index} of {} warnings", all.len()), "use a smaller one")
        })?;
        let shown = pageleap_warning {
            size: 0,
            text: report.warnings[index].as_ptr(),
            call: of.call.map_or(std::ptr::null(), |name| constant(name).as_ptr()),
            error_number: of.errno.map_or(0, |errno| errno.0),
            kind: pageleap_warning_kind::of(of.kind),
        };
        // SAFETY: forwarded to the caller.
        unsafe { write(warning, shown) }
    })
}

/// The text of one warning: `index` is 0 to warning_count - 1; NULL beyond. Valid until the report
/// is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_report_warning(
    report: *const pageleap_report,
    index: usize,
) -> *const c_char {
    value(std::ptr::null(), || {
        // SAFETY: forwarded to the caller.
        let warnings = &unsafe { handle(report, "report") }?.warnings;
        Ok(warnings.get(index).map_or(std::ptr::null(), |warning| warning.as_ptr()))
    })
}

/// The report as text for people: several lines, the last without a newline. NULL for NULL. Valid
/// until the report is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_report_text(report: *const pageleap_report) -> *const c_char {
    value(std::ptr::null(), || {
        // SAFETY: forwarded to the caller.
        let report = unsafe { handle(report, "report") }?;
        Ok(report.text.get_or_init(|| text(report.report.to_string())).as_ptr())
    })
}

/// The report as one JSON object on one line; NULL for NULL. Valid until the report is freed.
///
/// Its keys are named as the fields of pageleap_report_figures, except that page counts are in
/// "pages" ("migrated", "unchanged", "busy", "not-movable", "not-attempted"), "waits" and "windows"
/// are objects ("count", "total_ns", "p50_ns", "p99_ns", "max_ns"), and "runs", "engines", "copies"
/// and "warnings" are arrays with the results of the functions above. In "copies", "by" is
/// "four-pages", "memcpy" or "words", and "tried" true or false. There "source" is an object
/// ("kind", "id"), and "reason" an object ("code", "errno", "text") or null. "calls" counts system
/// calls by name, "disturbed_copies" the copies that writes have spoilt and "splits" the areas that
/// were split (both with the engine mprotect), "windows_first" the windows in which the thread that
/// kept the area closed ran before ordinary threads (SCHED_FIFO); "migrate_cpu_ns" is the CPU time
/// of the job's threads until the last page had moved, "recycle_cpu_ns" that of recycling; each may
/// be null. Later versions may add keys.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_report_json(report: *const pageleap_report) -> *const c_char {
    value(std::ptr::null(), || {
        // SAFETY: forwarded to the caller.
        let report = unsafe { handle(report, "report") }?;
        Ok(report.json.get_or_init(|| text(json::of(&report.report))).as_ptr())
    })
}
