//! Reserves huge pages (`nr_hugepages`) for a run, and puts them back however the run ends.
//!
//! Nothing else can use reserved huge pages, so they must not outlive the run. A run that ends in
//! order puts them back itself, also after a signal that can be caught
//! ([`interrupt`](crate::interrupt)). For all other ends there is the *ledger*, a folder with a
//! file for each run that has reserved pages:
//!
//! * A run notes how many pages it is about to add, adds them, and notes that this is done.
//! * It holds a lock on its file (`flock`), which ends with the process. A pid in the file would be
//!   no proof that the run lives: another process may have it by now, and another container counts
//!   its own pids.
//! * A process of its own, the *keeper*, waits for the lock. It puts back the pages of a run that
//!   was killed. If the keeper was killed, too, the next command does that ([`settle`]).
//!
//! A run adds all pages that it needs and counts on no free ones, so overlapping runs can end in
//! any order: each takes back as many as it has added. Pages of a killed run are taken back by a
//! more careful rule ([`Note::left`]): pages that others have reserved meanwhile stay. If the total
//! has become too small to contain both, somebody has written a smaller number since, and that
//! number stays as it is.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};
use clap::Args;
use pageleap::pool::HugePageReservation;
use pageleap::topology::Topology;
use pageleap::{NodeId, PageSize};
use pageleap_measure::figures::human_bytes;
use serde::{Deserialize, Serialize};

use crate::output;
use crate::stop::Stop;

/// Identifies a boot of the machine. The pages that a file notes are gone after the next boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The hidden command of the keeper.
const KEEPER: &str = "keep-huge-pages";

/// Wait until a run has ended, and put back the huge pages that it has left reserved.
#[derive(Args, Clone, Debug)]
pub struct KeeperArgs {
    /// The run's file in the ledger
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

/// Pages of one size on one node, as a line of a file of the ledger.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
struct Note {
    boot: String,
    node: u32,
    page_bytes: u64,
    /// Reserved pages of the node that no file of the ledger accounted for.
    others: u64,
    added: u64,
    /// Whether all of them have been added. If not, some may have been.
    is_done: bool,
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
}

/// The numbers of huge pages that the ledger reads and changes; a trait, so that tests have a
/// machine of their own.
trait Machine {
    /// The reserved pages of this size on a node, without surplus.
    fn total(&self, node: u32, page_bytes: u64) -> anyhow::Result<u64>;

    /// Takes pages away from the reserved ones.
    fn take_back(&self, node: u32, page_bytes: u64, pages: u64) -> anyhow::Result<()>;
}

struct ThisMachine;

impl Machine for ThisMachine {
    fn total(&self, node: u32, page_bytes: u64) -> anyhow::Result<u64> {
        let topology = Topology::read()?;
        let sizes = &topology.node(NodeId(node))?.huge_pages;
        let of_size = sizes.iter().find(|pages| pages.page_bytes == page_bytes);
        Ok(of_size.map_or(0, |pages| pages.total.saturating_sub(pages.surplus)))
    }

    fn take_back(&self, node: u32, page_bytes: u64, pages: u64) -> anyhow::Result<()> {
        let sizes = [PageSize::Huge2M, PageSize::Huge1G];
        let page = sizes.into_iter().find(|size| size.bytes() as u64 == page_bytes);
        let page = page.ok_or_else(|| anyhow!("no page has {page_bytes} bytes"))?;
        drop(HugePageReservation::left_behind(NodeId(node), page, pages)?);
        Ok(())
    }
}

/// The folder with a file for each run that has added pages.
struct Ledger(PathBuf);

impl Ledger {
    /// The ledger of this user: below `/run` for root, who alone may reserve huge pages as a rule,
    /// else below XDG_RUNTIME_DIR. Both folders are empty after a boot, or their files name another
    /// boot.
    fn of_user() -> Ledger {
        // SAFETY: the call takes no arguments.
        let is_root = unsafe { libc::geteuid() } == 0;
        let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|_| !is_root);
        Ledger(own.map_or_else(|| PathBuf::from("/run"), PathBuf::from).join("pageleap/huge-pages"))
    }

    /// Locks the ledger until the returned file is dropped. Makes the folder if it is missing.
    fn lock(&self) -> io::Result<File> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
        let file = open(&self.0.join("lock"), OpenOptions::new().create(true))?;
        lock(&file, libc::LOCK_EX)?;
        Ok(file)
    }

    /// A new file for this run, locked. Its name has a counter besides the pid, because processes
    /// in other containers may have the same pid. The caller has locked the ledger.
    fn new_file(&self) -> io::Result<(PathBuf, File)> {
        let process = std::process::id();
        let mut paths = (0..).map(|nth| self.0.join(format!("{process}-{nth}.run")));
        let path = paths.find(|path| !path.exists()).unwrap_or_default();
        let file = open(&path, OpenOptions::new().create_new(true))?;
        lock(&file, libc::LOCK_EX)?;
        Ok((path, file))
    }

    /// The files of runs, and whether each run has ended.
    fn runs(&self) -> Vec<(PathBuf, bool)> {
        let Ok(entries) = fs::read_dir(&self.0) else { return Vec::new() };
        let paths = entries.flatten().map(|entry| entry.path());
        let runs = paths.filter(|path| path.extension().is_some_and(|end| end == "run"));
        let has_ended = |path: &Path| {
            let Ok(file) = open(path, &mut OpenOptions::new()) else { return false };
            let ended = lock(&file, libc::LOCK_EX | libc::LOCK_NB).is_ok();
            // Unlocks explicitly. Closing the file would not unlock it while a child that is just
            // starting has inherited it.
            let _ = lock(&file, libc::LOCK_UN);
            ended
        };
        runs.map(|path| (path.clone(), has_ended(&path))).collect()
    }

    /// Puts back the pages that ended runs have left. The caller has locked the ledger. Returns a
    /// sentence for each number that was changed, or could not be changed.
    fn settle(&self, machine: &dyn Machine, boot: &str) -> Vec<String> {
        let runs: Vec<(PathBuf, bool, Vec<Note>)> = self
            .runs()
            .into_iter()
            .map(|(path, ended)| (path.clone(), ended, notes(&path, boot)))
            .collect();
        let mut noted = sums(runs.iter().flat_map(|(_, _, notes)| notes));
        let mut told = Vec::new();
        for (path, _, notes) in runs.iter().filter(|(_, ended, _)| *ended) {
            let mut is_settled = true;
            for note in notes {
                let noted = noted.entry(note.place()).or_default();
                let taken = take_back(machine, note, *noted);
                *noted = noted.saturating_sub(note.added);
                let what = format!("{} on node {}", human_bytes(note.page_bytes as f64), note.node);
                match taken {
                    Ok(0) => {}
                    Ok(pages) => told.push(format!(
                        "put back {pages} huge pages of {what}, which a run had left reserved"
                    )),
                    Err(error) => {
                        is_settled = false;
                        told.push(format!(
                            "huge pages of {what} stay reserved, which a run had left: {error:#}"
                        ));
                    }
                }
            }
            if is_settled {
                let _ = fs::remove_file(path);
            }
        }
        told
    }
}

fn take_back(machine: &dyn Machine, note: &Note, noted: u64) -> anyhow::Result<u64> {
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

/// The notes of a file that belong to this boot. Of several notes about one node and page size the
/// last counts. A line that was cut by a full disk does not count.
fn notes(path: &Path, boot: &str) -> Vec<Note> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    let of_boot = lines.filter(|note: &Note| note.boot == boot);
    let by_place: BTreeMap<(u32, u64), Note> = of_boot.map(|note| (note.place(), note)).collect();
    by_place.into_values().collect()
}

fn boot_id() -> String {
    fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned()
}

fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    options.read(true).append(true).mode(0o600).open(path)
}

/// Locks a file (`flock(2)`). A signal does not end the wait.
fn lock(file: &File, operation: libc::c_int) -> io::Result<()> {
    loop {
        // SAFETY: the descriptor is open, and the call touches no memory.
        if unsafe { libc::flock(file.as_raw_fd(), operation) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Puts back the pages of runs that were killed together with their keepers. Every command but
/// `keep-huge-pages` does this first. A user who may not read the ledger may not change the numbers either.
pub fn settle() {
    let ledger = Ledger::of_user();
    if ledger.runs().iter().any(|(_, ended)| *ended)
        && let Ok(_turn) = ledger.lock()
    {
        ledger.settle(&ThisMachine, &boot_id()).iter().for_each(|line| output::note(line));
    }
}

/// Runs the keeper.
pub fn keep(args: &KeeperArgs) -> Result<(), Stop> {
    // Without a file the run has ended in order already.
    if let Ok(file) = open(&args.file, &mut OpenOptions::new()) {
        lock(&file, libc::LOCK_EX).context("the ledger of huge pages")?;
        drop(file);
    }
    settle();
    Ok(())
}

/// Huge pages that this run has added. Dropping the value puts them back, so the pools that use
/// them have to be dropped before.
pub struct Reserved {
    ledger: Ledger,
    /// Locked until the end of the process or of this value.
    file: File,
    path: PathBuf,
    reservations: Vec<HugePageReservation>,
}

impl Reserved {
    /// Adds pages on some nodes. Each node is named once.
    pub fn add(page: PageSize, demands: &[(u32, u64)]) -> Result<Reserved, Stop> {
        let ledger = Ledger::of_user();
        let cannot = || {
            format!(
                "--reserve-huge-pages: cannot note the pages in {}, from where they are put back if \
                 this run is killed; run as root",
                ledger.0.display()
            )
        };
        let turn = ledger.lock().with_context(cannot)?;
        let boot = boot_id();
        ledger.settle(&ThisMachine, &boot).iter().for_each(|line| output::note(line));
        let (path, file) = ledger.new_file().with_context(cannot)?;
        start_keeper(&path).context("--reserve-huge-pages: cannot start a second process")?;
        let mut reserved = Reserved { ledger, file, path, reservations: Vec::new() };
        let added =
            demands.iter().try_for_each(|&(node, pages)| reserved.add_on(page, node, pages, &boot));
        // Released first, because putting pages back locks the ledger again.
        drop(turn);
        added.map(|()| reserved)
    }

    /// Adds pages on one node. The caller has locked the ledger.
    fn add_on(&mut self, page: PageSize, node: u32, pages: u64, boot: &str) -> Result<(), Stop> {
        let page_bytes = page.bytes() as u64;
        let runs = self.ledger.runs();
        let all: Vec<Note> = runs.iter().flat_map(|(path, _)| notes(path, boot)).collect();
        let noted = sums(all.iter()).get(&(node, page_bytes)).copied().unwrap_or(0);
        let others = ThisMachine.total(node, page_bytes)?.saturating_sub(noted);
        let boot = boot.to_owned();
        let mut note = Note { boot, node, page_bytes, others, added: pages, is_done: false };
        self.write(&note)?;
        let added = HugePageReservation::add(NodeId(node), page, pages);
        note.is_done = true;
        note.added = added.as_ref().map_or(0, HugePageReservation::added);
        self.write(&note)?;
        self.reservations.push(added?);
        Ok(())
    }

    /// Adds a line to the run's file, by one call.
    fn write(&mut self, note: &Note) -> Result<(), Stop> {
        let line = serde_json::to_string(note).context("a note of huge pages")? + "\n";
        Ok(self.file.write_all(line.as_bytes()).context("the ledger of huge pages")?)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // The lock keeps other runs from counting these pages as pages of others while they are
        // being taken away.
        let _turn = self.ledger.lock();
        self.reservations.clear();
        let _ = fs::remove_file(&self.path);
    }
}

/// Starts the keeper. It is in a process group of its own, so Ctrl-C does not reach it.
fn start_keeper(file: &Path) -> io::Result<()> {
    let mut keeper = Command::new("/proc/self/exe");
    keeper.arg(KEEPER).arg(file).process_group(0).current_dir("/");
    keeper.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    keeper.spawn().map(drop)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const BOOT: &str = "this one";
    const PAGE: u64 = 2 << 20;

    /// A machine with one node.
    struct Fake(Cell<u64>);

    impl Machine for Fake {
        fn total(&self, _node: u32, _page_bytes: u64) -> anyhow::Result<u64> {
            Ok(self.0.get())
        }

        fn take_back(&self, _node: u32, _page_bytes: u64, pages: u64) -> anyhow::Result<()> {
            self.0.set(self.0.get() - pages);
            Ok(())
        }
    }

    /// A ledger in a folder of its own, which goes with the value.
    struct Scratch(Ledger);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let name = format!("pageleap-ledger-{name}-{}", std::process::id());
            let ledger = Ledger(std::env::temp_dir().join(name));
            drop(ledger.lock().unwrap());
            Scratch(ledger)
        }

        /// A run that has added pages. It lives until the file is dropped.
        fn run(&self, name: &str, others: u64, added: u64, is_done: bool, boot: &str) -> File {
            let path = self.0.0.join(format!("{name}.run"));
            let mut file = open(&path, OpenOptions::new().create_new(true)).unwrap();
            lock(&file, libc::LOCK_EX).unwrap();
            let boot = boot.to_owned();
            let mut note = Note { boot, node: 0, page_bytes: PAGE, others, added, is_done: false };
            writeln!(file, "{}", serde_json::to_string(&note).unwrap()).unwrap();
            if is_done {
                note.is_done = true;
                writeln!(file, "{}", serde_json::to_string(&note).unwrap()).unwrap();
            }
            file
        }

        /// The total after the next command has begun.
        fn settled(&self, total: u64) -> u64 {
            let machine = Fake(Cell::new(total));
            let _turn = self.0.lock().unwrap();
            self.0.settle(&machine, BOOT);
            machine.0.get()
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0.0).unwrap();
        }
    }

    /// A child that another test is starting may have the file open for a moment longer.
    fn ended(run: File) {
        lock(&run, libc::LOCK_UN).unwrap();
    }

    #[test]
    fn an_ended_run_is_taken_back_and_a_living_one_is_not() {
        let scratch = Scratch::new("living");
        let living = scratch.run("1-0", 10, 4, true, BOOT);
        ended(scratch.run("2-0", 10, 8, true, BOOT));
        assert_eq!(scratch.settled(22), 14);
        assert_eq!(scratch.settled(14), 14, "what was taken back is noted no more");
        ended(living);
        assert_eq!(scratch.settled(14), 10);
    }

    #[test]
    fn what_others_have_reserved_meanwhile_stays() {
        for (total, left) in [
            (18, 10),
            // Somebody has reserved more.
            (118, 110),
            // Somebody has written a smaller number, which stays.
            (17, 17),
            (10, 10),
            (0, 0),
        ] {
            let scratch = Scratch::new(&format!("others-{total}"));
            ended(scratch.run("1-0", 10, 8, true, BOOT));
            assert_eq!(scratch.settled(total), left, "of {total}");
            assert_eq!(scratch.settled(100), 100, "the note has gone");
        }
    }

    #[test]
    fn runs_that_ended_in_any_order_are_told_apart_from_others() {
        let scratch = Scratch::new("order");
        // The first one had added 4 when the second one added 8, and has put them back since.
        ended(scratch.run("2-0", 10, 8, true, BOOT));
        assert_eq!(scratch.settled(18), 10);
        let first = scratch.run("1-0", 10, 4, true, BOOT);
        ended(scratch.run("2-0", 10, 8, true, BOOT));
        ended(first);
        assert_eq!(scratch.settled(22), 10);
    }

    #[test]
    fn a_run_that_was_killed_while_it_added_leaves_some_or_none() {
        for (total, left) in [(10, 10), (13, 10), (18, 10), (21, 13)] {
            let scratch = Scratch::new(&format!("adding-{total}"));
            ended(scratch.run("1-0", 10, 8, false, BOOT));
            assert_eq!(scratch.settled(total), left, "of {total}");
        }
    }

    #[test]
    fn notes_of_another_boot_and_torn_ones_count_for_nothing() {
        let scratch = Scratch::new("boot");
        ended(scratch.run("1-0", 0, 8, true, "an earlier one"));
        fs::write(scratch.0.0.join("2-0.run"), "{\"boot\":\"this one\",\"no").unwrap();
        assert_eq!(scratch.settled(18), 18);
        assert!(scratch.0.runs().is_empty());
    }
}
