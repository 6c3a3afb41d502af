//! A sample: the results of one leap beside one load.

use std::sync::atomic::AtomicU64;

use pageleap::Job;

use crate::Error;
use crate::leap::{self, Watched, Wish};
use crate::load::{Load, Log, Shadow, run_beside};
use crate::memcpy::Copy;
use crate::phase::Phase;

/// One leap beside one load.
#[derive(Debug)]
pub struct Sample {
    /// The observations of the leap.
    pub leap: Watched,
    /// The results of the load.
    pub load: Log,
    /// Time to touch all pages after the leap, minus the time to do so again. Negative if the
    /// difference is below the noise.
    pub first_touch_ns: i64,
    /// Time to allocate and populate the memory for the copies, before the leap. `None` if it
    /// existed already.
    pub populate_ns: Option<u64>,
    /// Words that do not contain the last value written to them.
    pub lost: u64,
}

impl Sample {
    /// Leaps once beside a load. `words` is the memory that leaps, and `shadow` its expected
    /// contents. `start` starts the job. Calls `look` every 50 ms, which may cancel the job.
    ///
    /// # Errors
    /// If the job or a thread of the load cannot be started. A leap that ended early is no error
    /// ([`leap::check_complete`]).
    pub fn take(
        words: &[AtomicU64],
        start: impl FnOnce() -> Result<Job, pageleap::Error>,
        load: &Load,
        shadow: &mut Shadow,
        look: impl FnMut(&Job) -> Wish,
    ) -> Result<Sample, Error> {
        let (leap, load) =
            run_beside(load, words, shadow, |beside| leap::watch(start, beside, look))?;
        let first_touch_ns = leap::first_touch_ns(words);
        Ok(Sample { leap, load, first_touch_ns, populate_ns: None, lost: shadow.lost(words) })
    }

    /// Time of the leap / time of a memcpy.
    pub fn ratio_to(&self, memcpy: Copy) -> f64 {
        self.leap.report.migrate_ns as f64 / memcpy.ns as f64
    }

    /// CPU time of leap and recycling / CPU time of a memcpy; `None` if a part is unknown.
    pub fn cpu_ratio_to(&self, memcpy: Copy) -> Option<f64> {
        let memcpy = memcpy.cpu_ns.filter(|ns| *ns > 0)?;
        Some(self.leap.cpu_ns()? as f64 / memcpy as f64)
    }

    /// Bytes copied again because they were written meanwhile / all bytes.
    pub fn extra_copied(&self) -> f64 {
        self.leap.report.bytes_recopied as f64 / self.leap.report.bytes as f64
    }

    /// The gap that this share of the gaps during the leap does not exceed; `None` without gaps.
    pub fn gap_ns(&self, share: f64) -> Option<u64> {
        self.load.gaps.quantile_ns(Phase::During, share)
    }

    /// The window that this share of the windows does not exceed; `None` without windows.
    pub fn window_ns(&self, share: f64) -> Option<u64> {
        let windows = &self.leap.report.windows;
        (windows.count > 0).then(|| windows.quantile(share))
    }
}
