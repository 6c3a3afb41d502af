//! `pageleap doctor`: says what works on this machine, what does not, and why. For what does not
//! work, it names the remedies and the price of each.

mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use pageleap::PageSize;
use pageleap::topology::SysFiles;
use pageleap_measure::export::Format;
use pageleap_probe::{Capabilities, Demand, Finding};

use crate::export::Exports;
use crate::stop::Stop;
use crate::{FAILED, bytes, output, sysroot};
use report::Report;

/// Say what works on this machine, for this user and in this container, and what would make the
/// rest work.
///
/// The doctor tries every call on a few pages, and a whole leap too. It infers nothing from the
/// kernel's version, changes nothing, and needs no privilege. Each remedy says what else it grants;
/// the least intrusive remedy comes first. Fill in the parts between angle brackets.
///
/// Exit code: 0 a leap (of the size and page size asked for) is possible; 1 it is not; 2 a request
/// that makes no sense.
#[derive(Args, Clone, Debug)]
pub struct DoctorArgs {
    /// Bytes of the leap, such as 512m or 64g: the doctor compares limits with two pools of that
    /// size
    #[arg(long, value_name = "BYTES", allow_hyphen_values = true, value_parser = bytes::region_size)]
    pub size: Option<u64>,

    /// Page size of the leap: 4k, thp, 2m or 1g
    #[arg(long, value_name = "SIZE", default_value = "4k")]
    pub page_size: PageSize,

    /// Read /proc and /sys below this folder; the doctor then tries no calls and never finds a leap
    /// possible
    #[arg(long, value_name = "DIR", value_parser = sysroot::folder)]
    pub sysroot: Option<PathBuf>,

    /// Print one JSON object to standard output instead of text
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub exports: Exports,
}

/// What the doctor found, and what follows from it.
struct Diagnosis {
    capabilities: Capabilities,
    demand: Demand,
    /// The result of the leap that the doctor tried.
    trial: Finding,
    sysroot: Option<PathBuf>,
}

impl Diagnosis {
    /// The findings that make the leap impossible.
    fn blockers(&self) -> Vec<&Finding> {
        self.capabilities.blockers(&self.demand, &self.trial)
    }

    /// Whether a leap is possible. Only a leap that succeeded proves it.
    fn leap_possible(&self) -> bool {
        self.trial.state == pageleap_probe::State::Works && self.blockers().is_empty()
    }
}

/// Probes, prints, exports, and returns the verdict as an exit code.
pub fn run(args: &DoctorArgs) -> Result<ExitCode, Stop> {
    let exports = args.exports.open()?;
    let files = args.sysroot.as_ref().map_or_else(SysFiles::host, SysFiles::at);
    let demand = Demand { bytes: args.size, page: args.page_size };
    let capabilities = Capabilities::probe_with(&files, &demand);
    let trial = capabilities.try_leap(&demand);
    let diagnosis = Diagnosis { capabilities, demand, trial, sysroot: args.sysroot.clone() };
    let report = Report::of(&diagnosis);
    let shown = |format| match format {
        Format::Json => report.json() + "\n",
        Format::Text { .. } => report.text(),
    };
    let printed = output::write(&shown(output::format(args.json)));
    exports.write(printed, |format| Ok(shown(format)))?;
    Ok(if diagnosis.leap_possible() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}
