//! Reserved huge pages (`nr_hugepages`): numbers to which several runs add at the same time.
//!
//! Each run has a file, to which it adds a line before and after each change. It holds a lock on
//! the file (`flock`), which ends with the process. The lock also works across pid namespaces, and
//! a run that reserves pages executes no other program, which would not inherit it.
//!
//! A run adds all pages that it needs and counts on no free ones, so overlapping runs can end in
//! any order: each takes back as many as it has added. Pages of a killed run are taken back by a
//! more careful rule ([`Note::left`]): pages that others have reserved meanwhile stay. If the total
//! has become too small to contain both, somebody has written a smaller number since, and that
//! number stays as it is.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use pageleap::pool::HugePageReservation;
use pageleap::topology::Topology;
use pageleap::{NodeId, PageSize};
use pageleap_sys::without_file_size_signal;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::folder::{Folder, failed, lock, open};
use crate::settled::{Outcome, Settled};
use crate::user::User;

/// The ending of the name of a run's file.
const END: &str = "run";

/// Pages of one size on one node, as a line of a run's file.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Note {
    boot: String,
    pub node: u32,
    pub page_bytes: u64,
    /// Reserved pages of the node that no file of the ledger accounted for.
    others: u64,
    pub added: u64,
    /// Whether all of them have been added. If not, some may have been.
    is_done: bool,
    pub user: User,
}

impl Note {
    /// How many pages to take back after the end of the run. `total`: pages of the node. `noted`:
    /// pages in all files of the ledger, including these.
    fn left(&self, total: u64, noted: u64) -> u64 {
        let beside = self.others + noted.saturating_sub(self.added);
        let at_most = total.saturating_sub(beside);
        if self.is_done && at_most < self.added { 0 } else { at_most.min(self.added) }
    }

    fn place(&self) -> (u32, u64) {
        (self.node, self.page_bytes)
    }

    /// Such as `huge pages of 2m on node 0`.
    pub fn setting(&self) -> String {
        let size = page_size(self.page_bytes)
            .map_or_else(|| format!("{} bytes", self.page_bytes), |size| size.to_string());
        format!("huge pages of {size} on node {}", self.node)
    }
}

fn page_size(page_bytes: u64) -> Option<PageSize> {
    let sizes = [PageSize::Huge2M, PageSize::Huge1G];
    sizes.into_iter().find(|size| size.bytes() as u64 == page_bytes)
}

/// The numbers of huge pages that the ledger reads and changes; a trait, so that tests have a
/// machine of their own.
pub(crate) trait Machine {
    /// The reserved pages of this size on a node, without surplus.
    fn total(&self, node: u32, page_bytes: u64) -> Result<u64, Error>;

    /// Takes pages away from the reserved ones.
    fn take_back(&self, node: u32, page_bytes: u64, pages: u64) -> Result<(), Error>;
}

pub(crate) struct ThisMachine;

impl Machine for ThisMachine {
    fn total(&self, node: u32, page_bytes: u64) -> Result<u64, Error> {
        let topology = Topology::read()?;
        let sizes = &topology.node(NodeId(node))?.huge_pages;
        let of_size = sizes.iter().find(|pages| pages.page_bytes == page_bytes);
        Ok(of_size.map_or(0, |pages| pages.total.saturating_sub(pages.surplus)))
    }

    fn take_back(&self, node: u32, page_bytes: u64, pages: u64) -> Result<(), Error> {
        // A size that this version does not know is that of a base page to it, and is refused.
        let page = page_size(page_bytes).unwrap_or(PageSize::Base);
        drop(HugePageReservation::left_behind(NodeId(node), page, pages)?);
        Ok(())
    }
}

/// The files of all runs.
pub(crate) struct Runs<'a> {
    pub folder: &'a Folder,
    pub boot: &'a str,
}

impl Runs<'_> {
    /// A new file for this run, locked. Its name has a counter besides the pid, because processes
    /// in other containers may have the same pid. The caller has locked the ledger.
    fn new_file(&self) -> Result<(PathBuf, File), Error> {
        let process = std::process::id();
        let mut paths = (0..).map(|nth| self.folder.note(&format!("{process}-{nth}.{END}")));
        let path = paths.find(|path| !path.exists()).unwrap_or_default();
        let file = open(&path, OpenOptions::new().create_new(true));
        let file = file.map_err(|reason| failed("open", &path, reason))?;
        lock(&file, libc::LOCK_EX).map_err(|reason| failed("flock", &path, reason))?;
        Ok((path, file))
    }

    /// The files of runs, and whether each run has ended.
    pub fn all(&self) -> Vec<(PathBuf, bool)> {
        let has_ended = |path: &Path| {
            let Ok(file) = open(path, &mut OpenOptions::new()) else { return false };
            let ended = lock(&file, libc::LOCK_EX | libc::LOCK_NB).is_ok();
            // Unlocks explicitly. Closing the file would not unlock it while a child that is just
            // starting has inherited it.
            let _ = lock(&file, libc::LOCK_UN);
            ended
        };
        let paths = self.folder.notes(END).unwrap_or_default();
        paths.into_iter().map(|path| (path.clone(), has_ended(&path))).collect()
    }

    /// Whether a run has ended that has left its file. Needs no lock.
    pub fn has_ended(&self) -> bool {
        self.all().iter().any(|(_, ended)| *ended)
    }

    /// The notes of a file that belong to this boot. Of several notes about one node and page size
    /// the last counts. A line that was cut by a full disk does not count.
    pub fn notes(&self, path: &Path) -> Vec<Note> {
        let text = fs::read_to_string(path).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok());
        let of_boot = lines.filter(|note: &Note| note.boot == self.boot);
        let by_place: BTreeMap<(u32, u64), Note> =
            of_boot.map(|note| (note.place(), note)).collect();
        by_place.into_values().collect()
    }

    /// Puts back the pages that ended runs have left. The caller has locked the ledger.
    pub fn settle(&self, machine: &dyn Machine) -> Vec<Settled> {
        let runs: Vec<(PathBuf, bool, Vec<Note>)> = self
            .all()
            .into_iter()
            .map(|(path, ended)| (path.clone(), ended, self.notes(&path)))
            .collect();
        let mut noted = sums(runs.iter().flat_map(|(_, _, notes)| notes));
        let mut all = Vec::new();
        for (path, _, notes) in runs.iter().filter(|(_, ended, _)| *ended) {
            let mut is_settled = true;
            for note in notes {
                let noted = noted.entry(note.place()).or_default();
                let taken = take_back(machine, note, *noted);
                *noted = noted.saturating_sub(note.added);
                let outcome = match taken {
                    Ok(0) => continue,
                    Ok(pages) => Outcome::PagesPutBack { pages },
                    Err(error) => Outcome::Stays { why: error.to_string() },
                };
                let setting = note.setting();
                let settled = Settled { setting, outcome, users: vec![note.user.clone()] };
                is_settled &= settled.is_settled();
                all.push(settled);
            }
            if is_settled {
                let _ = fs::remove_file(path);
            }
        }
        all
    }
}

fn take_back(machine: &dyn Machine, note: &Note, noted: u64) -> Result<u64, Error> {
    let left = note.left(machine.total(note.node, note.page_bytes)?, noted);
    if left > 0 {
        machine.take_back(note.node, note.page_bytes, left)?;
    }
    Ok(left)
}

/// Pages by place.
fn sums<'a>(notes: impl Iterator<Item = &'a Note>) -> BTreeMap<(u32, u64), u64> {
    let mut sums = BTreeMap::new();
    notes.for_each(|note| *sums.entry(note.place()).or_default() += note.added);
    sums
}

/// Huge pages that this process has added. Dropping the value puts them back, so the pools that use
/// them have to be dropped before.
#[derive(Debug)]
pub struct BorrowedPages {
    folder: Folder,
    /// Locked until the end of the process or of this value.
    file: File,
    path: PathBuf,
    user: User,
    reservations: Vec<HugePageReservation>,
    settled: Vec<Settled>,
}

impl BorrowedPages {
    /// Pages that ended processes had left, and how they were settled before these were added.
    pub fn settled(&self) -> &[Settled] {
        &self.settled
    }

    /// Starts the file of this process. The caller has locked the ledger.
    pub(crate) fn begin(
        runs: &Runs,
        user: User,
        settled: Vec<Settled>,
    ) -> Result<BorrowedPages, Error> {
        let (path, file) = runs.new_file()?;
        let folder = runs.folder.clone();
        Ok(BorrowedPages { folder, file, path, user, reservations: Vec::new(), settled })
    }

    /// Adds pages on one node. The caller has locked the ledger.
    pub(crate) fn add_on(
        &mut self,
        runs: &Runs,
        page: PageSize,
        node: NodeId,
        pages: u64,
    ) -> Result<(), Error> {
        let page_bytes = page.bytes() as u64;
        let all: Vec<Note> = runs.all().iter().flat_map(|(path, _)| runs.notes(path)).collect();
        let noted = sums(all.iter()).get(&(node.0, page_bytes)).copied().unwrap_or(0);
        let others = ThisMachine.total(node.0, page_bytes)?.saturating_sub(noted);
        let (boot, user) = (runs.boot.to_owned(), self.user.clone());
        let mut note =
            Note { boot, node: node.0, page_bytes, others, added: pages, is_done: false, user };
        self.write(&note)?;
        let added = HugePageReservation::add(node, page, pages);
        note.is_done = true;
        note.added = added.as_ref().map_or(0, HugePageReservation::added);
        self.write(&note)?;
        self.reservations.push(added?);
        Ok(())
    }

    /// Adds a line to the run's file, by one call.
    fn write(&mut self, note: &Note) -> Result<(), Error> {
        let line = serde_json::to_string(note).expect("strings and numbers are JSON") + "\n";
        let write = || self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_data());
        without_file_size_signal(write).map_err(|reason| failed("write", &self.path, reason))
    }
}

impl Drop for BorrowedPages {
    fn drop(&mut self) {
        // The lock keeps other runs from counting these pages as pages of others while they are
        // being taken away.
        let _turn = self.folder.lock();
        self.reservations.clear();
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests;
