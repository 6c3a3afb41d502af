//! Reserves 2 MB huge pages on node 0 for the tests that need them, and gives them back.
//!
//! The kernel takes hugetlb pages only from a reserve. Root fills it, and it is empty on a fresh
//! machine. Nothing else can use the reserved pages. So the reserve must shrink again, however the
//! run ends: normally, by a panic ([`Guard`]) or by a signal ([`restore`]). It shrinks by the added
//! number of pages, not to the old total: another process may have changed the total meanwhile.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};

/// Free 2 MB pages that the tests want on node 0.
pub const WANTED_PAGES: u64 = 96;

/// The directory with the reserve of 2 MB pages of node 0.
const NODE0_2M: &str = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB";

/// The pages that this process has added. The signal path takes them back too.
static ADDED: Mutex<Option<Reservation>> = Mutex::new(None);

/// Dropping it takes the added pages back.
#[derive(Debug)]
pub struct Guard(());

impl Guard {
    /// Makes sure that [`WANTED_PAGES`] are free on node 0, or prints the command that does.
    pub fn reserve() -> Guard {
        match Reservation::take(Path::new(NODE0_2M), WANTED_PAGES) {
            Ok(None) => {}
            Ok(Some(reservation)) => {
                println!(
                    "xtask: reserved {} huge pages of 2 MB on node 0 until the end of this run",
                    reservation.added
                );
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
    let Some(reservation) = taken else { return };
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

/// Pages that were added to the reserve in `dir`.
#[derive(Debug, PartialEq, Eq)]
struct Reservation {
    dir: PathBuf,
    added: u64,
}

impl Reservation {
    /// Raises the total so that `wanted` pages are free. `None` if they are free already.
    fn take(dir: &Path, wanted: u64) -> Result<Option<Reservation>> {
        let total = read_count(&dir.join("nr_hugepages"))?;
        let free = read_count(&dir.join("free_hugepages"))?;
        if free >= wanted {
            return Ok(None);
        }
        let target = total + (wanted - free);
        write_count(&dir.join("nr_hugepages"), target)?;
        let reached = read_count(&dir.join("nr_hugepages"))?;
        let reservation = Reservation { dir: dir.to_owned(), added: reached.saturating_sub(total) };
        if reached < target {
            reservation.give_back()?;
            bail!(
                "the kernel found memory for {} of {} more huge pages",
                reservation.added,
                target - total
            );
        }
        Ok(Some(reservation))
    }

    fn give_back(&self) -> Result<()> {
        let file = self.dir.join("nr_hugepages");
        write_count(&file, read_count(&file)?.saturating_sub(self.added))
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

    fn total(dir: &Scratch) -> u64 {
        read_count(&dir.path().join("nr_hugepages")).unwrap()
    }

    #[test]
    fn adds_only_what_is_missing_and_gives_it_back() {
        let dir = reserve_of(10, 4);
        let reservation = Reservation::take(dir.path(), 96).unwrap().expect("pages are missing");
        assert_eq!(reservation.added, 92);
        assert_eq!(total(&dir), 102);
        reservation.give_back().unwrap();
        assert_eq!(total(&dir), 10);
    }

    #[test]
    fn keeps_what_others_added_meanwhile() {
        let dir = reserve_of(0, 0);
        let reservation = Reservation::take(dir.path(), 96).unwrap().expect("pages are missing");
        write_count(&dir.path().join("nr_hugepages"), 100).unwrap();
        reservation.give_back().unwrap();
        assert_eq!(total(&dir), 4);
    }

    #[test]
    fn leaves_a_full_reserve_alone() {
        let dir = reserve_of(96, 96);
        assert_eq!(Reservation::take(dir.path(), 96).unwrap(), None);
        assert_eq!(total(&dir), 96);
    }

    #[test]
    fn says_which_file_is_missing() {
        let dir = Scratch::new("hugepages-none");
        let error = Reservation::take(dir.path(), 96).unwrap_err();
        assert!(format!("{error:#}").contains("nr_hugepages"), "{error:#}");
    }
}
