//! `pageleap demo`: moves a live table, then checks everything that could have gone wrong.
//!
//! The steps in order: choose nodes and check that the table fits ([`setup`]). Build the table in
//! its memory ([`build`], [`home`], [`lineitem`]). Time memcpys and leaps without load. Start the
//! query thread ([`queries`]) and the writer, time a memcpy beside them, and leap ([`measure`]).
//! Compare before and after ([`verify`]), sum up ([`summary`]), and print ([`document`]).

mod args;
mod build;
mod document;
mod home;
mod measure;
mod setup;
mod summary;
mod verify;

use std::sync::atomic::Ordering;

use anyhow::anyhow;
use pageleap::BASE_PAGE;

pub use args::DemoArgs;
use build::Built;
use home::NodePages;
use measure::Measured;
use summary::Summary;

use crate::environment::Environment;
use crate::stop::Stop;
use crate::{export, interrupt, progress};

/// Ends the run if a signal has arrived. For the steps before any thread writes to the table.
fn stop_if_interrupted() -> Result<(), Stop> {
    interrupt::stop_if_received(|| {
        "the table is where it was, and no thread had written to it yet".to_owned()
    })
}

/// Runs the demo and prints its result.
pub fn run(args: &DemoArgs) -> Result<(), Stop> {
    args.check().map_err(|why| Stop::Refused(anyhow!(why)))?;
    let exports = args.exports.open_with(&[args.reports.row()])?;
    interrupt::install();
    let environment = Environment::start();
    let built = build::build(args)?;
    let first = Observed::of(&built)?;
    let measured = measure::measure(args, &built)?;
    let lost = measured.shadow.lost(built.order_keys()?);
    let Some(leap) = &measured.under_load.leap else {
        return interrupted_before_the_leap(&measured, lost);
    };
    let checking = progress::moving_spinner("verifying");
    let after = Observed::of(&built)?;
    let mut summary = Summary::of(args, &built, &measured, leap, [&first, &after], lost)?;
    if interrupt::received().is_none() {
        summary.mismatches.extend(summary::incomplete(&summary));
    }
    checking.finish_and_clear();

    let printed = exports.print(&environment.add_data_to(summary.document()), args.json);
    export::conclude(conclude(&summary, &measured), printed)
}

/// Turns a run that has been printed into its exit code.
fn conclude(summary: &Summary, measured: &Measured) -> Result<(), Stop> {
    if !summary.mismatches.is_empty() {
        return Err(Stop::Failed(anyhow!("{}", summary.mismatches.join("\nerror: "))));
    }
    interrupt::stop_if_received(|| {
        let pages = summary.pages.counts;
        format!(
            "{} of {} pages had moved, the table is whole, {} writes, none lost",
            pages.migrated,
            summary.table.bytes / summary.table.counted_page_size,
            measured.write_log.writes
        )
    })
}

/// Reports lost writes of a run that was interrupted before its leap, so that no interrupted run
/// hides them.
fn interrupted_before_the_leap(measured: &Measured, lost: u64) -> Result<(), Stop> {
    if lost > 0 {
        return Err(Stop::Failed(anyhow!("{lost} rows lost their last write, before any leap")));
    }
    interrupt::stop_if_received(|| {
        format!("the table is where it was, {} writes, none lost", measured.write_log.writes)
    })
}

/// The state of the table at one moment, observed without the code that moves it.
struct Observed {
    placement: NodePages,
    frames: Option<Vec<u64>>,
    other_columns: u64,
}

impl Observed {
    fn of(built: &Built) -> Result<Observed, Stop> {
        /// Each look is short, and so is the kernel's migration of a page.
        const MOST_LOOKS: u32 = 16;
        let other_columns = verify::checksum(built.other_columns()?);
        let pages = (built.bytes()? / built.home.page_bytes()) as u64;
        let mut looks = 0;
        loop {
            // Reads every page first: the kernel shows no frame for a page that no access has
            // touched since it was mapped.
            for word in built.home.words()?.iter().step_by(BASE_PAGE / size_of::<u64>()) {
                std::hint::black_box(word.load(Ordering::Relaxed));
            }
            let (placement, frames) = (built.home.placement()?, built.home.frames()?);
            // A page that the kernel is migrating by itself (compaction) has neither node nor
            // frame.
            let found = placement.values().sum::<u64>() >= pages
                && frames.as_ref().is_none_or(|frames| !frames.contains(&0));
            looks += 1;
            if found || looks == MOST_LOOKS {
                return Ok(Observed { placement, frames, other_columns });
            }
        }
    }
}
