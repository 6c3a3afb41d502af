//! The report of a job, for people and programs. No code of the library decides by it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use super::outcomes::{PageCounts, PageOutcome, PageRun};
use super::source::Source;
use crate::backend::{Call, CopyMethod, Errno};
use crate::engine::effort::JobCounts;
use crate::engine::waits::Waits;
use crate::error::Error;
use crate::units::{EngineName, NodeId};

/// The most runs of failed pages that the text of a report lists.
const MOST_SHOWN: usize = 8;

/// The pages of one range that one engine has moved for one reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineUse {
    /// The source of the pages.
    pub source: Source,
    /// The range as it was given, in bytes of the source.
    pub range: Range<usize>,
    /// The engine that moved them.
    pub engine: EngineName,
    /// Number of pages.
    pub pages: u64,
    /// The reason for this engine, in words.
    pub why: String,
}

/// How many pages of a job an engine has moved ([`Report::by_engine`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineShare<'a> {
    /// The engine.
    pub engine: EngineName,
    /// Number of pages.
    pub pages: u64,
    /// The reason for this engine, in words.
    pub why: &'a str,
}

/// The copy method of pages that moved from one node to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyUse {
    /// The node of the frames that they left.
    pub from: NodeId,
    /// The node of the frames that they got.
    pub to: NodeId,
    /// The copy loop, and the bytes of its steps.
    pub method: CopyMethod,
    /// Whether a trial in this process has found the method to be the fastest one. A trial takes
    /// some milliseconds. It is made by the first job that moves much memory between the two nodes
    /// and has no rate limit.
    pub tried: bool,
}

impl fmt::Display for CopyUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CopyUse { from, to, method, tried } = self;
        let how = if *tried { "the fastest in a trial" } else { "by default" };
        write!(f, "{method} ({how}), {from} to {to}")
    }
}

/// The reason why a job ended.
#[derive(Clone, Debug)]
pub enum Ended {
    /// Each page has moved, or did not have to ([`PageOutcome::Unchanged`]).
    Completed,
    /// Somebody called `cancel` or dropped the job.
    Cancelled,
    /// The job's time limit had passed.
    TimedOut,
    /// A region it worked on was dropped.
    RegionDropped,
    /// The cpuset of the process was changed and no longer allows a node that pages were to move
    /// to; [`Report::warnings`] names it.
    CpusetChanged,
    /// Some pages could not be moved; this was the first reason.
    Failed(Error),
}

impl Ended {
    /// Whether every page was dealt with.
    pub fn is_completed(&self) -> bool {
        matches!(self, Ended::Completed)
    }
}

/// The subject of a [`Warning`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum WarningKind {
    /// The engine closes areas by `mprotect`, so writers get SIGSEGV, and system calls of the
    /// program that write into a moving area may fail with EFAULT.
    SystemCallsMayFail,
    /// Another SIGSEGV handler stands before the library's. Areas that only the engine `mprotect`
    /// could move stay where they are.
    NoFaultHandler,
    /// The workers do not run on the CPUs of the destination's node: it has none, or the process
    /// may not use them.
    Affinity,
    /// The job's threads keep a low priority, so threads that wait for a page may wait until such a
    /// thread gets a CPU.
    Priority,
    /// Fewer threads copy than asked for.
    Threads,
    /// Page tables do not lie on the node where they were requested.
    PageTables,
    /// The cpuset no longer allows a node of the destination.
    Cpuset,
    /// A process traces the job's threads. Pages have stayed, or another engine has moved them.
    Tracer,
    /// There are more guards than mappings to spare, so pages between guards have stayed too.
    Guards,
    /// Mappings of hugetlb pages stay apart that could be one mapping.
    Mappings,
    /// An attribute of a range (`madvise`, `mlock`) is lost, or is set although its user did not
    /// set it.
    Attributes,
    /// Core dumps may contain the data twice.
    CoreDumps,
    /// Vacated frames are unusable until the pool's next attempt to recycle them.
    Recycling,
    /// Pages were retried after one reason, and stay for another one.
    LaterReason,
    /// Pages may lie on other nodes than the report says.
    Places,
    /// A range ends within a huge page, which moves as a whole.
    Edges,
}

/// Something that went less well than asked. Dereferences to its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Its subject.
    pub kind: WarningKind,
    /// The warning in words.
    pub text: String,
    /// The name of the system call that failed, if one did.
    pub call: Option<&'static str>,
    /// The error number of that call.
    pub errno: Option<Errno>,
}

impl Warning {
    /// A warning without a failed call.
    pub(crate) fn new(kind: WarningKind, text: impl Into<String>) -> Self {
        Warning { kind, text: text.into(), call: None, errno: None }
    }

    /// The warning of a job whose engine raises SIGSEGV, with the reason why that engine was taken.
    pub(crate) fn system_calls_may_fail(engine_reason: &str) -> Self {
        let text = "system calls that write into a moving area may fail with EFAULT";
        Warning::new(WarningKind::SystemCallsMayFail, format!("{text} ({engine_reason})"))
    }

    /// The warning of workers that run on whichever CPUs the scheduler chooses.
    pub(crate) fn not_on_cpus() -> Self {
        let text = "the workers may not run on the destination node's CPUs";
        Warning::new(WarningKind::Affinity, text)
    }

    /// A warning about a call that failed.
    pub(crate) fn of(kind: WarningKind, text: String, call: Call, errno: Errno) -> Self {
        Warning { kind, text, call: Some(call.name()), errno: Some(errno) }
    }

    /// The warning for an error despite which the job goes on.
    pub(crate) fn because(kind: WarningKind, what: &str, error: &Error) -> Self {
        let (call, errno) = match error {
            Error::Call { call, errno, .. } => (Some(call.name()), Some(*errno)),
            Error::NoThread { errno, .. } => (Some("pthread_create"), Some(*errno)),
            _ => (None, None),
        };
        Warning { kind, text: format!("{what}: {error}"), call, errno }
    }
}

impl std::ops::Deref for Warning {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl PartialEq<&str> for Warning {
    fn eq(&self, other: &&str) -> bool {
        self.text == *other
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The outcome of a job: pages, times, waits and calls. `Display` prints it as text.
///
/// ```
/// use pageleap::{Ended, Migration, NodeId, PageOutcome, Pool, Region};
///
/// # fn main() -> Result<(), pageleap::Error> {
/// # let from = Pool::builder(NodeId(0), 1 << 20).build()?;
/// # let to = Pool::builder(NodeId(0), 1 << 20).build()?;
/// # let region = Region::new(&from, 1 << 20)?;
/// let report = Migration::new().range(&region, 0..region.len(), &to).run()?;
/// match &report.ended {
///     Ended::Completed => println!("moved by {} ({})", report.engine, report.engine_reason),
///     other => {
///         println!("{other:?}");
///         let stayed = |outcome| outcome != PageOutcome::Migrated;
///         for run in report.runs.iter().filter(|run| stayed(run.outcome)) {
///             println!("bytes {:?} stay where they were: {:?}", run.range, run.reason);
///         }
///     }
/// }
/// println!("longest window: {} us", report.windows.max_ns / 1000);
/// for warning in &report.warnings {
///     println!("{:?}: {warning}", warning.kind);
/// }
/// # assert_eq!(report.pages.migrated, 256);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Report {
    /// Why the job ended. Pages that moved stay moved, the others stay where they were, and all
    /// have their contents.
    pub ended: Ended,
    /// The job's engine: the one that was asked for, or the one that
    /// [`EngineChoice::Auto`](crate::EngineChoice::Auto) uses for areas that threads use all the
    /// time. [`Report::engines`] says which engine moved how many pages.
    pub engine: EngineName,
    /// The reason for this engine, in words.
    pub engine_reason: String,
    /// Pages that have moved, by range and engine; of each range the engine that moved most
    /// comes first. With
    /// [`EngineChoice::Auto`](crate::EngineChoice::Auto) a job uses other engines for some areas:
    /// where contention is low, where its engine is refused, where nobody may write, and where
    /// writers are faster than copies.
    pub engines: Vec<EngineUse>,
    /// Copy methods, by pair of nodes. Empty on a modelled machine.
    pub copies: Vec<CopyUse>,
    /// The largest size of an area, in bytes.
    pub area_bytes: usize,
    /// The most threads that copied.
    pub threads: usize,
    /// Number of threads that copied at the end. It is lower than `threads` if more of them were
    /// hardly faster.
    pub threads_settled: usize,
    /// The outcome of each page, in the order in which the ranges were given. Neighbours with the
    /// same outcome are one run.
    pub runs: Vec<PageRun>,
    /// Number of pages with each outcome.
    pub pages: PageCounts,
    /// Bytes of all ranges.
    pub bytes: u64,
    /// Bytes copied, including disturbed copies.
    pub bytes_copied: u64,
    /// Bytes copied in vain: `bytes_copied` less the bytes that have moved.
    pub bytes_recopied: u64,
    /// Counts of events.
    pub counts: JobCounts,
    /// How long threads waited in the SIGSEGV handler
    /// ([`Engine::Mprotect`](crate::Engine::Mprotect)). Threads that wait inside the kernel, in a
    /// page fault, are not counted.
    pub waits: Waits,
    /// How long areas were closed: to writers with [`Engine::Mprotect`](crate::Engine::Mprotect),
    /// to readers too with [`Engine::Precopy`](crate::Engine::Precopy). No thread waited longer for
    /// one window. Not included is the time that writers wait until a page is unprotected for them
    /// ([`Engine::WpSync`](crate::Engine::WpSync)).
    pub windows: Waits,
    /// From the start of the job until the last page had moved, in nanoseconds.
    pub migrate_ns: u64,
    /// CPU time of the job's threads until then, in nanoseconds. It does not include the thread
    /// that started the job, nor threads that waited for a moving area. `None` if the kernel does
    /// not report it.
    pub migrate_cpu_ns: Option<u64>,
    /// Nanoseconds from then to the end: recycling, which makes vacated frames usable again.
    pub recycle_ns: u64,
    /// CPU time of recycling, in nanoseconds. It is less than `recycle_ns` if the thread had to
    /// wait for a CPU. `None` if the kernel does not report it.
    pub recycle_cpu_ns: Option<u64>,
    /// Number of system calls of the attempts, by name. Those of the fault handler are included,
    /// those of preparation and recycling are not.
    pub calls: BTreeMap<&'static str, u64>,
    /// Warnings: each names one thing that went less well than asked.
    pub warnings: Vec<Warning>,
}

impl Report {
    /// How many pages each engine has moved in all ranges together, and why; the most first.
    pub fn by_engine(&self) -> Vec<EngineShare<'_>> {
        let mut shares: Vec<EngineShare<'_>> = Vec::new();
        for part in &self.engines {
            let same = |share: &&mut EngineShare<'_>| {
                (share.engine, share.why) == (part.engine, &*part.why)
            };
            match shares.iter_mut().find(same) {
                Some(share) => share.pages += part.pages,
                None => {
                    let EngineUse { engine, pages, why, .. } = part;
                    shares.push(EngineShare { engine: *engine, pages: *pages, why });
                }
            }
        }
        shares.sort_by_key(|share| std::cmp::Reverse(share.pages));
        shares
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |ns: u64| ns as f64 / 1e6;
        let times = |t: &Waits| {
            let us = |ns: u64| ns / 1000;
            let [p50, p99] = [0.5, 0.99].map(|q| us(t.quantile(q)));
            format!("{} (p50 <= {p50} us, p99 <= {p99} us, longest {} us)", t.count, us(t.max_ns))
        };
        let p = &self.pages;
        let (word, why) = match &self.ended {
            Ended::Completed => ("completed", String::new()),
            Ended::Failed(error) => ("failed", format!(": {error}")),
            Ended::Cancelled => ("cancelled", String::new()),
            Ended::TimedOut => ("timed out", String::new()),
            Ended::RegionDropped => ("ended", ": a region was dropped".to_owned()),
            Ended::CpusetChanged => {
                ("ended", ": the cpuset no longer allows a node of the destination".to_owned())
            }
        };
        let [took, recycling] = [self.migrate_ns, self.recycle_ns].map(ms);
        writeln!(f, "{word} after {took:.1} ms (+ {recycling:.1} ms recycling){why}")?;
        writeln!(
            f,
            "engine {} ({}), areas of up to {} KB, {} thread(s){}",
            self.engine,
            self.engine_reason,
            self.area_bytes >> 10,
            self.threads,
            match self.threads_settled {
                settled if settled < self.threads =>
                    format!(", at last {settled}: it was hardly faster with more"),
                _ => String::new(),
            }
        )?;
        let told = self.engines.len() > 1 || self.engines.iter().any(|p| p.engine != self.engine);
        for part in self.engines.iter().filter(|_| told) {
            let EngineUse { source, range, engine, pages, why } = part;
            writeln!(f, "{source}, bytes {range:?}: {pages} pages by {engine} ({why})")?;
        }
        for copies in &self.copies {
            writeln!(f, "copied by {copies}")?;
        }
        writeln!(
            f,
            "pages: {} migrated, {} unchanged, {} busy, {} failed, {} not attempted",
            p.migrated, p.unchanged, p.busy, p.failed, p.not_attempted
        )?;
        write!(f, "copied {} bytes, {} of them in vain", self.bytes_copied, self.bytes_recopied)?;
        let worded = ["mappings_added", "windows_over_budget", "windows_first"];
        for (at, (name, count)) in
            self.counts.named().into_iter().filter(|(name, _)| !worded.contains(name)).enumerate()
        {
            let (mark, words) = (if at == 0 { ';' } else { ',' }, name.replace('_', " "));
            write!(f, "{mark} {count} {words}")?;
        }
        writeln!(f)?;
        if self.counts.mappings_added > 0 {
            let added = self.counts.mappings_added;
            writeln!(f, "{added} more mapping(s): pages have left neighbours that stayed")?;
        }
        writeln!(
            f,
            "waits: {}; windows: {}, {} of them over budget, {} before other threads",
            times(&self.waits),
            times(&self.windows),
            self.counts.windows_over_budget,
            self.counts.windows_first
        )?;
        for run in
            self.runs.iter().filter(|run| run.outcome == PageOutcome::Failed).take(MOST_SHOWN)
        {
            let PageRun { source, range, reason, .. } = run;
            let why = reason.map_or_else(String::new, |reason| format!(": {reason}"));
            writeln!(f, "failed: {source}, bytes {range:?}{why}")?;
        }
        let calls: Vec<String> = self.calls.iter().map(|(name, n)| format!("{name} {n}")).collect();
        write!(f, "calls: {}", calls.join(", "))?;
        for warning in &self.warnings {
            write!(f, "\nwarning: {warning}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_keeps_the_call_and_the_errno_of_its_error() {
        let errno = Errno(libc::ENOMEM);
        let kind = WarningKind::Attributes;
        let called = Warning::because(kind, "lost", &Error::call(Call::Advise, 0, 4096, errno));
        assert_eq!((called.call, called.errno), (Some("madvise"), Some(errno)));
        assert!(called.starts_with("lost: madvise of"), "{called}");
        let thread = Error::NoThread { what: "one", errno, remedy: "end some" };
        assert_eq!(Warning::because(kind, "", &thread).call, Some("pthread_create"));
        assert_eq!(Warning::new(kind, "other").errno, None);
    }
}
