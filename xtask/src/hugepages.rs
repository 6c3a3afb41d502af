//! Reserves 2 MB huge pages on node 0 for the tests that need them, and gives them back.
//!
//! The kernel takes hugetlb pages only from a reserve. Root fills it, and it is empty on a fresh
//! machine. Nothing else can use the reserved pages. So the reserve must shrink again, however the
//! run ends: normally, by a panic ([`Guard`]) or by a signal ([`restore`]). It shrinks by the added
//! number of pages, not to the old total: another process may have changed the total meanwhile.
//!
//! Two runs at once would take each other's pages. So a run holds [`LEDGER`] locked, and the next
//! one waits. The ledger holds the number of added pages: after a run that was killed, the next one
//! gives back the pages of both.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};

/// Free 2 MB pages that the tests want on node 0.
pub const WANTED_PAGES: u64 = 96;

/// The directory with the reserve of 2 MB pages of node 0.
const NODE0_2M: &str = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB";

/// Locked by the run that has the pages, with the number of pages that runs have added. On tmpfs:
/// after a boot there are neither.
const LEDGER: &str = "/dev/shm/pageleap-xtask-huge-pages";

/// The pages that this process has added. The signal path takes them back too.
static ADDED: Mutex<Option<Reservation>> = Mutex::new(None);

/// Dropping it takes the added pages back.
#[derive(Debug)]
pub struct Guard(());

impl Guard {
    /// Makes sure that [`WANTED_PAGES`] are free on node 0, or prints the command that does.
    pub fn reserve() -> Guard {
        let taken = Ledger::lock(Path::new(LEDGER))
            .and_then(|ledger| Reservation::take(Path::new(NODE0_2M), ledger, WANTED_PAGES));
        match taken {
            Ok(reservation) => {
                if reservation.added > 0 {
                    println!(
                        "xtask: reserved {} huge pages of 2 MB on node 0 until the end of this run",
                        reservation.added
                    );
                }
                *ADDED.lock().unwrap_or_else(PoisonError::into_inner) = Some(reservation);
            }
            Err(error) => {
                println!("xtask: !!! tests on 2 MB huge pages will be skipped: {error:#}");
                let file = format!("{NODE0_2M}/nr_hugepages");
                println!("xtask: !!! to run them, type: echo {WANTED_PAGES} | sudo tee {file}");
            }
        }
        Guard(())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        restore();
    }
}

/// Takes back the added pages. A second call does nothing.
pub fn restore() {
    let taken = ADDED.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(reservation) = taken.filter(|reservation| reservation.added > 0) else { return };
    let note = match reservation.give_back() {
        Ok(()) => format!("xtask: gave back {} huge pages on node 0", reservation.added),
        Err(error) => {
            format!("xtask: !!! {} huge pages stay reserved: {error:#}", reservation.added)
        }
    };
    // Not println: this may run while a panic about a closed standard output unwinds, and a second
    // panic aborts.
    let _ = writeln!(io::stdout(), "{note}");
}

/// The file with the number of added pages. It is unlocked when the ledger is dropped, or with the
/// end of the process.
#[derive(Debug)]
struct Ledger {
    path: PathBuf,
    _locked: File,
}

impl Ledger {
    /// Waits for the run that has it.
    fn lock(path: &Path) -> Result<Ledger> {
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        let lock = |how: i32| {
            // SAFETY: the descriptor is open, and the call touches no memory.
            match unsafe { libc::flock(file.as_raw_fd(), how) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        if lock(libc::LOCK_EX | libc::LOCK_NB).is_err() {
            println!("xtask: waits for another run that uses the huge pages ({})", path.display());
            lock(libc::LOCK_EX).with_context(|| format!("cannot lock {}", path.display()))?;
        }
        Ok(Ledger { path: path.to_owned(), _locked: file })
    }

    /// Pages that runs have added and not given back.
    fn added(&self) -> Result<u64> {
        let text = fs::read_to_string(&self.path)
            .with_context(|| format!("cannot read {}", self.path.display()))?;
        Ok(text.trim().parse().unwrap_or(0))
    }

    fn note(&self, added: u64) -> Result<()> {
        write_count(&self.path, added)
    }
}

/// Pages that were added to the reserve in `dir`.
#[derive(Debug)]
struct Reservation {
    dir: PathBuf,
    ledger: Ledger,
    added: u64,
}

impl Reservation {
    /// Raises the total so that `wanted` pages are free.
    fn take(dir: &Path, ledger: Ledger, wanted: u64) -> Result<Reservation> {
        let total = read_count(&dir.join("nr_hugepages"))?;
        let free = read_count(&dir.join("free_hugepages"))?;
        // Somebody may have taken back what a killed run has left.
        let left = ledger.added()?.min(total);
        let missing = wanted.saturating_sub(free);
        let mut reservation = Reservation { dir: dir.to_owned(), ledger, added: left };
        if missing == 0 {
            return Ok(reservation);
        }
        write_count(&dir.join("nr_hugepages"), total + missing)?;
        let reached = read_count(&dir.join("nr_hugepages"))?;
        reservation.added = left + reached.saturating_sub(total);
        reservation.ledger.note(reservation.added)?;
        if reached < total + missing {
            let found = reached.saturating_sub(total);
            reservation.give_back()?;
            bail!("the kernel found memory for {found} of {missing} more huge pages");
        }
        Ok(reservation)
    }

    fn give_back(&self) -> Result<()> {
        let file = self.dir.join("nr_hugepages");
        write_count(&file, read_count(&file)?.saturating_sub(self.added))?;
        self.ledger.note(0)
    }
}

fn read_count(file: &Path) -> Result<u64> {
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    text.trim().parse().with_context(|| format!("{} holds {text:?}, not a count", file.display()))
}

fn write_count(file: &Path, count: u64) -> Result<()> {
    fs::write(file, format!("{count}\n"))
        .with_context(|| format!("cannot write {count} to {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn reserve_of(total: u64, free: u64) -> Scratch {
        let dir = Scratch::new("hugepages");
        write_count(&dir.path().join("nr_hugepages"), total).unwrap();
        write_count(&dir.path().join("free_hugepages"), free).unwrap();
        dir
    }

    fn take(dir: &Scratch, wanted: u64) -> Result<Reservation> {
        let ledger = Ledger::lock(&dir.path().join("ledger"))?;
        Reservation::take(dir.path(), ledger, wanted)
    }

    fn total(dir: &Scratch) -> u64 {
        read_count(&dir.path().join("nr_hugepages")).unwrap()
    }

    #[test]
    fn adds_only_what_is_missing_and_gives_it_back() {
        let dir = reserve_of(10, 4);
        let reservation = take(&dir, 96).unwrap();
        assert_eq!(reservation.added, 92);
        assert_eq!(total(&dir), 102);
        reservation.give_back().unwrap();
        assert_eq!(total(&dir), 10);
    }

    #[test]
    fn keeps_what_others_added_meanwhile() {
        let dir = reserve_of(0, 0);
        let reservation = take(&dir, 96).unwrap();
        write_count(&dir.path().join("nr_hugepages"), 100).unwrap();
        reservation.give_back().unwrap();
        assert_eq!(total(&dir), 4);
    }

    #[test]
    fn leaves_a_full_reserve_alone() {
        let dir = reserve_of(96, 96);
        assert_eq!(take(&dir, 96).unwrap().added, 0);
        assert_eq!(total(&dir), 96);
    }

    #[test]
    fn gives_back_what_a_killed_run_has_left() {
        let dir = reserve_of(10, 4);
        drop(take(&dir, 96).unwrap()); // killed: unlocked, and nothing given back
        write_count(&dir.path().join("free_hugepages"), 96).unwrap();
        let reservation = take(&dir, 96).unwrap();
        assert_eq!((reservation.added, total(&dir)), (92, 102));
        reservation.give_back().unwrap();
        assert_eq!(total(&dir), 10);
        drop(reservation);
        assert_eq!(take(&dir, 4).unwrap().added, 0);
    }

    #[test]
    fn a_second_run_waits_for_the_first() {
        let dir = reserve_of(10, 4);
        let first = take(&dir, 96).unwrap();
        let given_back = std::thread::scope(|scope| {
            let second = scope.spawn(|| take(&dir, 96).unwrap());
            while !waits_for_a_lock(&dir.path().join("ledger")) {
                assert!(!second.is_finished(), "two runs hold the ledger");
                std::thread::yield_now();
            }
            first.give_back().unwrap();
            write_count(&dir.path().join("free_hugepages"), 4).unwrap();
            drop(first);
            second.join().unwrap()
        });
        assert_eq!((given_back.added, total(&dir)), (92, 102));
    }

    /// Whether `/proc/locks` has somebody who waits for a lock on a file.
    fn waits_for_a_lock(file: &Path) -> bool {
        use std::os::unix::fs::MetadataExt;
        let inode = format!(":{} ", fs::metadata(file).unwrap().ino());
        let locks = fs::read_to_string("/proc/locks").unwrap();
        locks.lines().any(|line| line.contains("->") && line.contains(&inode))
    }

    #[test]
    fn says_which_file_is_missing() {
        let dir = Scratch::new("hugepages-none");
        let error = take(&dir, 96).unwrap_err();
        assert!(format!("{error:#}").contains("nr_hugepages"), "{error:#}");
    }
}
