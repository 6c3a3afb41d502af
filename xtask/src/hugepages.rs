//! Reserves 2 MB huge pages on node 0 for the tests that need them, and gives them back.
//!
//! The kernel takes hugetlb pages only from a reserve. Root fills it, and it is empty on a fresh
//! machine. Nothing else can use the reserved pages. So the reserve must shrink again, however the
//! run ends: normally, by a panic ([`Guard`]) or by a signal ([`restore`]). It shrinks by the added
//! number of pages, not to the old total: another process may have changed the total meanwhile.
//!
//! Two runs at once would take each other's pages. So a run holds [`LEDGER`] locked, and the next
//! one waits, for [`PATIENCE`] at most: then it goes on without huge pages, and says who has them.
//! The ledger holds the number of added pages: after a run that was killed, the next one gives back
//! the pages of both.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Free 2 MB pages that the tests want on node 0.
pub const WANTED_PAGES: u64 = 96;

/// The directory with the reserve of 2 MB pages of node 0.
const NODE0_2M: &str = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB";

/// Locked by the run that has the pages, with the number of pages that runs have added. On tmpfs:
/// after a boot there are neither.
const LEDGER: &str = "/dev/shm/pageleap-xtask-huge-pages";

/// How long a run waits for another one: as long as the tests take on two CPUs. Whoever has the
/// pages for longer hangs, or is no run of the tests.
const PATIENCE: Duration = Duration::from_secs(10 * 60);

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
    /// Waits for the run that has it, but for [`PATIENCE`] at most.
    fn lock(path: &Path) -> Result<Ledger> {
        const PAUSE: Duration = Duration::from_millis(100);
        let (began, mut said) = (Instant::now(), false);
        Ledger::lock_while(path, |holder| {
            if !std::mem::replace(&mut said, true) {
                println!(
                    "xtask: waits up to {} minutes for {holder}, which uses the huge pages ({})",
                    PATIENCE.as_secs() / 60,
                    path.display()
                );
            }
            thread::sleep(PAUSE);
            began.elapsed() < PATIENCE
        })
    }

    /// Tries again as long as another process has it and `go_on`, which is told which one, returns
    /// true.
    fn lock_while(path: &Path, mut go_on: impl FnMut(&str) -> bool) -> Result<Ledger> {
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        // SAFETY: the descriptor is open, and the call touches no memory.
        while unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::WouldBlock {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
            let holder = holder(&file);
            if !go_on(&holder) {
                bail!(
                    "{holder} uses the huge pages, and keeps {} locked; wait until it has ended, \
                     or end it if it hangs, and run the tests again",
                    path.display()
                );
            }
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

/// The process that has locked a file, with its command line. The kernel hides processes of other
/// containers.
fn holder(file: &File) -> String {
    let pid = file.metadata().ok().and_then(|file| {
        let locks = fs::read_to_string("/proc/locks").ok()?;
        locks.lines().find_map(|line| locked_by(line, file.ino()))
    });
    let Some(pid) = pid else { return "a process that this one cannot see".to_owned() };
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let command = String::from_utf8_lossy(&command).replace('\0', " ");
    format!("process {pid} ({})", command.trim())
}

/// The process that a line of `/proc/locks` says has locked the file with this inode:
/// `1: FLOCK  ADVISORY  WRITE 4711 00:1a:23 0 EOF`. In lines of processes that wait, `->` follows
/// the number.
fn locked_by(line: &str, inode: u64) -> Option<u32> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [_, "FLOCK", _, _, pid, file, ..] = fields[..] else { return None };
    let pid = pid.parse().ok().filter(|pid| *pid != 0)?;
    (file.rsplit(':').next() == Some(&inode.to_string())).then_some(pid)
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
        let mut first = Some(take(&dir, 96).unwrap());
        let ledger = Ledger::lock_while(&dir.path().join("ledger"), |_| {
            // A child that another test is starting may have the file open for a moment longer.
            if let Some(first) = first.take() {
                first.give_back().unwrap();
                write_count(&dir.path().join("free_hugepages"), 4).unwrap();
            }
            true
        });
        let second = Reservation::take(dir.path(), ledger.unwrap(), 96).unwrap();
        assert!(first.is_none(), "two runs hold the ledger");
        assert_eq!((second.added, total(&dir)), (92, 102));
    }

    #[test]
    fn a_run_that_does_not_end_is_named_and_left_alone() {
        let dir = reserve_of(10, 4);
        let first = take(&dir, 96).unwrap();
        let path = dir.path().join("ledger");
        let mut tries = 0;
        let error = Ledger::lock_while(&path, |_| {
            tries += 1;
            tries < 3
        });
        let error = format!("{:#}", error.unwrap_err());
        assert_eq!(tries, 3);
        let this = format!("process {} (", std::process::id());
        for part in [&this, path.to_str().unwrap(), "wait until it has ended", "end it"] {
            assert!(error.contains(part), "{part}: {error}");
        }
        assert_eq!((first.ledger.added().unwrap(), total(&dir)), (92, 102));
    }

    #[test]
    fn the_holder_of_a_lock_is_found_among_others() {
        let line = "12: FLOCK  ADVISORY  WRITE 4711 00:1a:23 0 EOF";
        assert_eq!(locked_by(line, 23), Some(4711));
        assert_eq!(locked_by(line, 3), None);
        for other in [
            "12: -> FLOCK  ADVISORY  WRITE 4711 00:1a:23 0 EOF",
            "12: POSIX  ADVISORY  WRITE 4711 00:1a:23 0 EOF",
            "12: FLOCK  ADVISORY  WRITE 0 00:1a:23 0 EOF",
            "",
        ] {
            assert_eq!(locked_by(other, 23), None, "{other}");
        }
    }

    #[test]
    fn says_which_file_is_missing() {
        let dir = Scratch::new("hugepages-none");
        let error = take(&dir, 96).unwrap_err();
        assert!(format!("{error:#}").contains("nr_hugepages"), "{error:#}");
    }
}
