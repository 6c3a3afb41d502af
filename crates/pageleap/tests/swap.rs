//! Memory in place beside the swap. The tests bring a swap of their own, as root: machines of the
//! lab have no disk for one.

mod common;
#[path = "common/in_place.rs"]
mod in_place;
#[path = "common/mapping.rs"]
mod mapping;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use common::{StopOnDrop, is_root, nodes, rest, skip, turn};
use in_place::{KINDS, kb_in_smaps, memory, migration, moved, oracle_time, pages_of, works};
use mapping::Mapping;
use pageleap::{BASE_PAGE, Reason, Report};

/// A swap file of 64 MB. A child takes it away again when the value is dropped, and also when this
/// process is killed: the child reads until nobody is left who could write to it.
struct Swap {
    child: Child,
    _turn: MutexGuard<'static, ()>,
}

impl Swap {
    const SCRIPT: &str = "file=$(mktemp) && dd if=/dev/zero of=$file bs=1M count=64 2>/dev/null && \
                          chmod 600 $file && mkswap $file >/dev/null && swapon $file && echo on; \
                          cat >/dev/null; swapoff $file; rm -f $file";

    /// Adds a swap file of 64 MB. `Err`: why that is not possible here.
    fn on() -> Result<Swap, &'static str> {
        if !is_root() {
            return Err("only root can add a swap");
        }
        let turn = turn();
        let mut child = Command::new("sh")
            .args(["-c", Self::SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|_| "there is no shell")?;
        let mut said = String::new();
        let out = child.stdout.take().expect("it was piped");
        let _ = BufReader::new(out).read_line(&mut said);
        let swap = Swap { child, _turn: turn };
        if said.trim() == "on" { Ok(swap) } else { Err("the system refuses to add a swap") }
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// A swap, if memory can move in place here.
fn prepare(test: &str) -> Option<Swap> {
    works(test).then(Swap::on)?.inspect_err(|why| skip(test, why)).ok()
}

/// Gives all pages other frames of their node.
fn leap(mapping: &Mapping) -> Report {
    migration(mapping, nodes()[0]).start().unwrap().wait()
}

/// Pages of a mapping that are in the swap. The pagemap tells the same of pages that the kernel is
/// migrating by itself, and smaps does not.
fn swapped(mapping: &Mapping) -> u64 {
    (kb_in_smaps(mapping, "Swap:") << 10) as u64 / BASE_PAGE as u64
}

#[test]
fn swapped_pages_stay_in_the_swap() {
    const NAME: &str = "swapped_pages_stay_in_the_swap";
    let Some(_swap) = prepare(NAME) else { return };
    for page in KINDS {
        let mapping = memory(8 << 20, page);
        mapping.fill(nodes()[0]);
        let half = Mapping { start: mapping.start, len: mapping.len / 2 };
        half.advise(libc::MADV_PAGEOUT);
        std::mem::forget(half);
        let out = swapped(&mapping);
        if out == 0 {
            return skip(NAME, &"the swap takes nothing");
        }
        let report = leap(&mapping);
        let told = pages_of(&report, |_, reason| reason == Some(Reason::SwappedOut));
        // The kernel splits huge pages on their way out, and drops parts that are zero: the first.
        let zero = pages_of(&report, |_, reason| reason == Some(Reason::ZeroPage));
        assert!(zero <= 1, "{page}: {report}");
        // Where memory is short, the kernel may have swapped out more in between.
        assert!(told >= out, "{page}: {report}");
        assert_eq!(told + moved(&report) + zero, 2048, "{page}: {report}");
        assert!(swapped(&mapping) >= out, "{page}: the leap has read the swap");
        mapping.check();
        // All are back.
        (0..2048)
            .for_each(|page| mapping.words()[page * BASE_PAGE / 8].store(page as u64, Relaxed));
        let report = leap(&mapping);
        let stay = |_, reason: Option<_>| reason.is_some_and(|why| why != Reason::SwappedOut);
        assert_eq!(pages_of(&report, stay), 0, "{page}: {report}");
        assert!(moved(&report) >= 1024, "{page}: {report}");
        mapping.check();
        println!("{page} pages: {out} of 2048 were in the swap");
    }
}

#[test]
fn pages_that_are_swapped_out_meanwhile_are_not_lost() {
    const NAME: &str = "pages_that_are_swapped_out_meanwhile_are_not_lost";
    let Some(_swap) = prepare(NAME) else { return };
    for page in KINDS {
        let mapping = memory(8 << 20, page);
        mapping.fill(nodes()[0]);
        let (stop, rounds, seen) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        let mut pages = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    mapping.advise(libc::MADV_PAGEOUT);
                    seen.fetch_add(swapped(&mapping), Relaxed);
                    mapping.check();
                    rounds.fetch_add(1, Relaxed);
                }
            });
            let end = StopOnDrop(&stop);
            let began = Instant::now();
            while began.elapsed() < oracle_time() || rounds.load(Relaxed) < 4 || pages == 0 {
                pages += moved(&leap(&mapping));
                rest();
            }
            drop(end);
        });
        mapping.check();
        let seen = seen.into_inner();
        println!(
            "{page}: {pages} pages moved, {} rounds, {seen} seen in the swap",
            rounds.load(Relaxed)
        );
        if seen == 0 {
            return skip(NAME, &"the swap takes nothing");
        }
    }
}
