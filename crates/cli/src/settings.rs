//! Settings of the whole machine that commands borrow: the command's side of the ledger of
//! [`pageleap_settings`].

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use pageleap::{NodeId, PageSize};
use pageleap_settings::{BorrowedPages, Error, Ledger, Settled};

use crate::output;
use crate::stop::Stop;
use crate::sysroot;

/// Wait until a process has ended, and put back the settings that ended processes have left.
#[derive(Args, Clone, Debug)]
pub struct KeeperArgs {
    /// The process
    #[arg(value_name = "PID")]
    pub pid: u32,

    /// Its start time, as in /proc/PID/stat
    #[arg(value_name = "START")]
    pub started: u64,

    /// The ledger and the settings of the files below this folder
    #[arg(long, value_name = "DIR", value_parser = sysroot::folder)]
    pub sysroot: Option<PathBuf>,
}

/// The ledger of this user, or of a copy of a machine's files.
pub fn ledger(sysroot: Option<&PathBuf>) -> Ledger {
    sysroot.map_or_else(Ledger::of_user, Ledger::below).telling(output::note)
}

/// Puts back settings of processes that were killed together with their keepers. Every command
/// but `keep-settings` and `restore` does this first.
pub fn settle() {
    tell(&Ledger::of_user().settle());
}

/// Runs the keeper.
pub fn keep(args: &KeeperArgs) -> Result<(), Stop> {
    ledger(args.sysroot.as_ref()).keep(args.pid, args.started)?;
    Ok(())
}

/// Reserves huge pages until the returned value is dropped, for `--reserve-huge-pages`.
pub fn reserve_huge_pages(page: PageSize, demands: &[(u32, u64)]) -> Result<BorrowedPages, Stop> {
    let demands: Vec<(NodeId, u64)> =
        demands.iter().map(|&(node, pages)| (NodeId(node), pages)).collect();
    let reserved = match ledger(None).add_huge_pages(page, &demands) {
        Err(Error::HugePages(error)) => return Err(error.into()),
        reserved => reserved.context("--reserve-huge-pages")?,
    };
    tell(reserved.settled());
    Ok(reserved)
}

/// Tells how loans of settings have ended, a line for each.
fn tell(settled: &[Settled]) {
    settled.iter().for_each(|one| output::note(&one.to_string()));
}
