//! Measures the cost of a leap: loads that run beside it, samples of each run, statistics over the
//! samples, and exporters.
//!
//! The commands `demo` and `bench` share this crate. They parse arguments, decide on the order of
//! measurements, and show progress. All measurements, and all results that they print, come from
//! here.
//!
//! ```text
//! load ──┐
//!        ├──► samples ──► statistics ──► document ──► export: text, json, csv, html
//! leap ──┤
//! memcpy ┘
//! ```
//!
//! * [`load`]: threads that write, read or map memory while pages leap, and the shadow copy that
//!   finds lost writes.
//! * [`leap`]: runs one job, watches it from outside, and keeps the observations.
//! * [`jobs`]: short jobs at rest, each beside copies of the same bytes.
//! * [`matrix`]: latency and bandwidth of memory from each node to each node.
//! * [`rivals`]: the kernel's own ways to move pages, which a leap is compared with.
//! * [`probing`]: a probe of latency beside the sweep that it replaces.
//! * [`tables`]: moves of page tables alone, beside leaps of the data.
//! * [`timeline`]: the progress of a load and of a job, every few milliseconds.
//! * [`tpch`]: a table of TPC-H, and two of its queries.
//! * [`views`]: views of a region, and mappings of a file, against their number.
//! * [`workloads`]: threads that update or search a data structure, and miss the TLB.
//! * [`scenarios`]: those beside threads that use up bandwidth, with page tables placed by a rule.
//! * [`experiments`]: the experiments of *Taking the Leap*, and one of *Revisiting Page Migration*,
//!   each with its rivals.
//! * `olc`: a B+-tree with optimistic lock coupling, for one of them.
//! * [`churn`]: threads that allocate and free memory, to compare allocators.
//! * [`compare`]: two results of the same experiments: changes, and whether they are more than noise.
//! * [`host`]: the machine beside results, and the noise on it while something is measured.
//! * [`memcpy`]: the base line for leaps: copies of the same bytes by one thread.
//! * [`private`]: private anonymous memory for measurements.
//! * [`sample`]: the results of one leap beside one load.
//! * [`method`]: the order of measurements in rounds, and when there are enough of them.
//! * [`statistics`]: medians, quartiles and extremes. Pure.
//! * [`plot`]: plots without a format: lines, and the samples behind each point.
//! * [`document`]: a result as facts and tables, with a unit for each value. Knows no format.
//! * [`export`]: one file for each format. A further format is one file and one line.

#![cfg_attr(not(test), warn(clippy::excessive_nesting, clippy::too_many_lines))]

pub mod churn;
pub mod compare;
pub mod document;
pub mod experiments;
pub mod export;
pub mod figures;
pub mod host;
pub mod jobs;
pub mod leap;
pub mod load;
pub mod matrix;
pub mod memcpy;
pub mod method;
mod olc;
pub mod phase;
pub mod plot;
pub mod private;
pub mod probing;
mod random;
pub mod rivals;
pub mod sample;
pub mod scenarios;
pub mod statistics;
pub mod tables;
pub mod timeline;
pub mod tpch;
pub mod views;
pub mod workloads;

use std::io;

/// Why a measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The library refused a request or failed.
    #[error(transparent)]
    Leap(#[from] pageleap::Error),
    /// A system call failed.
    #[error("{call} failed: {reason}")]
    Call {
        /// Its name.
        call: &'static str,
        /// Why.
        reason: io::Error,
    },
    /// A thread could not be started.
    #[error(
        "cannot start the thread `{name}` of the load: {reason}; \
         raise the limit of threads (ulimit -u, pids.max)"
    )]
    Thread {
        /// Its name.
        name: &'static str,
        /// Why.
        reason: io::Error,
    },
    /// A thread cannot run on the CPU that it is for.
    #[error(
        "no thread can be bound to CPU {cpu}: sched_setaffinity failed with {errno}; with EINVAL the CPU \
         is offline, or has left the cpuset of this process; with EPERM or ENOSYS a seccomp filter \
         refuses the call"
    )]
    Cpu {
        /// The CPU.
        cpu: usize,
        /// With which error number.
        errno: pageleap::Errno,
    },
    /// Memory for a measurement lies on another node than it was asked for.
    #[error("memory that was taken for {node} lies elsewhere: {verified}")]
    Elsewhere {
        /// The node.
        node: pageleap::NodeId,
        /// Pages by node, in words.
        verified: String,
    },
    /// The machine gives fewer transparent huge pages than a measurement needs.
    #[error(
        "only {ratio:.3} of the memory has transparent huge pages; set \
         /sys/kernel/mm/transparent_hugepage/enabled to madvise, or free some memory"
    )]
    NotHuge {
        /// The share of the memory that has them.
        ratio: f64,
    },
    /// A node has too few free pages in its hugetlb pool.
    #[error(
        "{wanted} huge pages of {page} are needed on {node}, and {free} are free there: reserve more \
         ({folder}/nr_hugepages), or raise the limit of the cgroup (hugetlb.*.max)",
        folder = huge_page_folder(*.node, *.page)
    )]
    HugePages {
        /// The node.
        node: pageleap::NodeId,
        /// The size of the pages.
        page: pageleap::PageSize,
        /// Pages that the memory has.
        wanted: u64,
        /// Pages that are free on the node, and not reserved on the machine.
        free: u64,
    },
    /// One of the kernel's ways to move pages does not work here, or has done too little.
    #[error("cannot time {rival}: {reason}")]
    Rival {
        /// The way.
        rival: &'static str,
        /// Why.
        reason: String,
    },
    /// A measurement failed, and words have wrong values afterwards.
    #[error("{lost} words had a wrong value after: {after}")]
    Lost {
        /// Words with a wrong value.
        lost: u64,
        /// The failure.
        after: Box<Error>,
    },
    /// A job ended before all pages had moved, so its time is meaningless.
    #[error("a leap did not move all of its {pages} pages, so its time says nothing: {report}")]
    Incomplete {
        /// Pages that were to move.
        pages: u64,
        /// The job's report.
        report: Box<pageleap::Report>,
    },
    /// The kernel has left pages where they were, so its time is meaningless.
    #[error("the kernel left {stayed} of {pages} pages where they were, so its time says nothing")]
    Stayed {
        /// Pages that stayed.
        stayed: usize,
        /// Pages that were to move.
        pages: usize,
    },
}

/// The folder in which the huge pages of a node are reserved.
fn huge_page_folder(node: pageleap::NodeId, page: pageleap::PageSize) -> String {
    let kb = page.bytes() >> 10;
    format!("/sys/devices/system/node/node{}/hugepages/hugepages-{kb}kB", node.0)
}

impl Error {
    /// The same, with the number of words that have wrong values afterwards.
    fn with_lost(self, lost: u64) -> Error {
        match lost {
            0 => self,
            lost => Error::Lost { lost, after: Box::new(self) },
        }
    }
}
