//! Times the kernel's own migration of base pages on any machine, also with one node: memory
//! compaction.
//!
//! A page that lies on its destination does not move, so one node cannot show the cost of
//! `move_pages(2)`. But compaction moves pages between frames of one node, by the same function of
//! the kernel, `migrate_pages()` (Linux, mm/migrate.c):
//!
//! ```text
//! frames   low                                     high
//! before   |####    |####    |####    |####    |####    |     each block of 2 MB is half full
//! after    |        |        |    ####|########|########|
//! ```
//!
//! Compaction looks for pages to move from the lowest frame upwards, and for free frames from the
//! highest one downwards, until both searches meet (Linux, mm/compaction.c). It takes no frames of
//! blocks that are wholly free, and gives up where a larger page of the page cache finds only
//! smaller free frames. So the memory here gives back one half of each block of 2 MB that it has
//! wholly. If it has too few of them, it gives back every other page. Free memory in fragments is
//! used up first, and then more memory is needed. One compaction before, which is not timed, moves
//! pages of others.
//!
//! The time includes both searches, and the counters are those of the whole machine. So the time
//! per page is an upper bound for the cost of a page of 4 KB, as long as most pages are this
//! memory's ([`Compacted::own`]): a larger page of others counts as the base pages that it has.
//!
//! Compaction changes only the frames of pages, on their own node: contents and addresses stay.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Instant;

use pageleap::{BASE_PAGE, NodeId, PageSize};

use crate::Error;
use crate::memcpy::cpu_ns;
use crate::private::{PrivateMemory, failed};

/// The name of this rival.
pub const NAME: &str = "compaction";
/// With fewer pages, the time is that of the search.
pub const MIN_MIGRATED: u64 = 10_000;

/// Base pages of a block of 2 MB, the unit in which the kernel searches (`pageblock_order`).
const BLOCK_PAGES: u64 = 512;
/// Pages in whole blocks that are enough: a half is kept, and half of that moves.
const MIN_PAGES: u64 = 5 * MIN_MIGRATED;
/// Pages between two looks whether to stop: 64 MB.
const PIECE_PAGES: usize = 1 << 14;
const WORDS_PER_PAGE: usize = BASE_PAGE / size_of::<u64>();
const COUNTERS: &str = "/proc/vmstat";

/// One compaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compacted {
    /// Time of the compaction.
    pub ns: u64,
    /// CPU time of the thread that asked for it, in which the kernel did it; `None` if the kernel
    /// does not say.
    pub cpu_ns: Option<u64>,
    /// Base pages that have moved, on the whole machine (`pgmigrate_success`).
    pub migrated: u64,
    /// Base pages that could not be moved (`pgmigrate_fail`).
    pub failed: u64,
    /// Frames among which the kernel searched for pages to move (`compact_migrate_scanned`).
    pub scanned_migrate: u64,
    /// Frames among which the kernel searched for free ones (`compact_free_scanned`).
    pub scanned_free: u64,
    /// Those of the pages that have moved that are the memory's, by their frame numbers; `None` if
    /// the kernel hides these.
    pub own: Option<u64>,
    /// Words of the memory with a wrong value afterwards.
    pub lost: u64,
}

impl Compacted {
    /// Time for each page that has moved, search included.
    pub fn ns_per_page(&self) -> f64 {
        self.ns as f64 / self.migrated as f64
    }
}

/// Takes `bytes` of a node, gives back half of them, and times one compaction of the node. A kernel
/// without a file for a single node compacts all nodes.
///
/// 1 GB is enough where free memory is in large blocks. Others need more: pages of free
/// fragments (`/proc/buddyinfo`) are handed out first, and are of no use here.
///
/// # Errors
/// [`Error::Rival`] if the kernel has no compaction, this process may not ask for it, fewer than
/// [`MIN_MIGRATED`] pages have moved, or `stopped` was true meanwhile. Otherwise if the node has too
/// little memory.
pub fn compact(node: NodeId, bytes: usize, stopped: &dyn Fn() -> bool) -> Result<Compacted, Error> {
    // Moves pages of others out of the way, and fails before memory is filled in vain.
    start(&mut open(node)?)?;
    Holes::new(node, bytes, stopped)?.compact()
}

/// Whether this process may ask for a compaction of the node.
///
/// # Errors
/// [`Error::Rival`] if the kernel has no compaction, or refuses it.
pub fn can_compact(node: NodeId) -> Result<(), Error> {
    open(node).map(drop)
}

/// Memory of base pages, a part of which has been given back.
struct Holes {
    memory: PrivateMemory,
    node: NodeId,
    /// For each page, whether it was kept.
    kept: Vec<bool>,
}

impl Holes {
    fn new(node: NodeId, bytes: usize, stopped: &dyn Fn() -> bool) -> Result<Holes, Error> {
        let memory = PrivateMemory::untouched(bytes, PageSize::Base, node)?;
        let go_on = || match stopped() {
            true => Err(unusable("it was stopped".into())),
            false => Ok(()),
        };
        let mut next = 1..;
        for piece in memory.words().chunks(PIECE_PAGES * WORDS_PER_PAGE) {
            go_on()?;
            piece.iter().zip(&mut next).for_each(|(word, at)| word.store(at, Ordering::Relaxed));
        }
        let start = memory.as_ptr().addr();
        let kept = kept(bytes / BASE_PAGE, frame_numbers(&memory)?.as_deref());
        for (at, _) in kept.iter().enumerate().filter(|(_, is_kept)| !**is_kept) {
            if at.is_multiple_of(PIECE_PAGES) {
                go_on()?;
            }
            // SAFETY: the page is the memory's own, and nobody needs its contents.
            unsafe { pageleap_sys::discard(start + at * BASE_PAGE, BASE_PAGE) }
                .map_err(failed("madvise"))?;
        }
        Ok(Holes { memory, node, kept })
    }

    fn compact(&self) -> Result<Compacted, Error> {
        let mut file = open(self.node)?;
        let frames_before = frame_numbers(&self.memory)?;
        let before = Counters::read()?;
        let (cpu_start, clock) = (cpu_ns(), Instant::now());
        let started = start(&mut file);
        let ns = clock.elapsed().as_nanos() as u64;
        let cpu_ns = cpu_start.zip(cpu_ns()).map(|(from, to)| to - from);
        started?;
        let Counters { migrated, failed, scanned_migrate, scanned_free } =
            Counters::read()?.since(before);
        if migrated < MIN_MIGRATED {
            return Err(unusable(format!(
                "{migrated} pages have moved, and with fewer than {MIN_MIGRATED} the time is that \
                 of the search; use more memory, or free memory that is in use (page cache)"
            )));
        }
        let frames = frames_before.zip(frame_numbers(&self.memory)?);
        let own = frames.map(|(before, after)| {
            let pairs = before.into_iter().zip(after).zip(&self.kept);
            pairs.filter(|((before, after), is_kept)| **is_kept && before != after).count() as u64
        });
        let lost = self.lost();
        Ok(Compacted { ns, cpu_ns, migrated, failed, scanned_migrate, scanned_free, own, lost })
    }

    /// How many words of the pages that were kept have lost their values.
    fn lost(&self) -> u64 {
        let words = self.memory.words().iter().zip(1u64..);
        let kept = words.enumerate().filter(|(at, _)| self.kept[at / WORDS_PER_PAGE]);
        kept.filter(|(_, (word, value))| word.load(Ordering::Relaxed) != *value).count() as u64
    }
}

/// Chooses the pages to keep, so that blocks of frames are half full.
fn kept(pages: usize, frames: Option<&[u64]>) -> Vec<bool> {
    let block = |frame: &u64| frame / BLOCK_PAGES;
    let mut own: BTreeMap<u64, u64> = BTreeMap::new();
    for frame in frames.unwrap_or_default() {
        *own.entry(block(frame)).or_default() += 1;
    }
    own.retain(|_, pages| *pages == BLOCK_PAGES);
    match frames {
        Some(frames) if own.len() as u64 * BLOCK_PAGES >= MIN_PAGES => frames
            .iter()
            .map(|frame| !own.contains_key(&block(frame)) || frame % BLOCK_PAGES < BLOCK_PAGES / 2)
            .collect(),
        // Frame numbers are hidden, or too few blocks are whole.
        _ => (0..pages).map(|at| !at.is_multiple_of(2)).collect(),
    }
}

fn frame_numbers(memory: &PrivateMemory) -> Result<Option<Vec<u64>>, Error> {
    let (start, len) = (memory.as_ptr().addr(), memory.len());
    Ok(pageleap::observe::frame_numbers(start, len, BASE_PAGE)?)
}

/// Compacts, and returns when that is done.
fn start(file: &mut File) -> Result<(), Error> {
    file.write_all(b"1").map_err(|error| refused(&error))
}

/// Opens the file that starts a compaction of the node, or else of all nodes
/// (Documentation/admin-guide/sysctl/vm.rst, `compact_memory`).
fn open(node: NodeId) -> Result<File, Error> {
    let of_node = PathBuf::from(format!("/sys/devices/system/node/node{}/compact", node.0));
    let of_all = PathBuf::from("/proc/sys/vm/compact_memory");
    let path = if of_node.exists() { of_node } else { of_all };
    OpenOptions::new().write(true).open(path).map_err(|error| refused(&error))
}

/// The reason of a failure in words.
fn refused(error: &io::Error) -> Error {
    unusable(match error.kind() {
        ErrorKind::NotFound => "the kernel has no compaction (CONFIG_COMPACTION)".into(),
        ErrorKind::PermissionDenied => {
            format!("only root may ask for it, outside of a user namespace ({error})")
        }
        ErrorKind::ReadOnlyFilesystem => {
            format!(
                "the files that start it are mounted read-only, as containers have them ({error})"
            )
        }
        _ => format!("the kernel refuses it: {error}"),
    })
}

fn unusable(reason: String) -> Error {
    Error::Rival { rival: NAME, reason }
}

/// The kernel's counters of compaction and migration, for the whole machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counters {
    migrated: u64,
    failed: u64,
    scanned_migrate: u64,
    scanned_free: u64,
}

impl Counters {
    fn read() -> Result<Counters, Error> {
        let text = std::fs::read_to_string(COUNTERS)
            .map_err(|error| unusable(format!("{COUNTERS} cannot be read: {error}")))?;
        let missing = |name| unusable(format!("{COUNTERS} has no line `{name}`"));
        Counters::parse(&text).map_err(missing)
    }

    /// Parses lines of a name and a number. The error is a name that is missing.
    fn parse(text: &str) -> Result<Counters, &'static str> {
        let counter = |name: &'static str| {
            let of_name = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
            text.lines().find_map(of_name).ok_or(name)
        };
        Ok(Counters {
            migrated: counter("pgmigrate_success")?,
            failed: counter("pgmigrate_fail")?,
            scanned_migrate: counter("compact_migrate_scanned")?,
            scanned_free: counter("compact_free_scanned")?,
        })
    }

    fn since(self, before: Counters) -> Counters {
        Counters {
            migrated: self.migrated - before.migrated,
            failed: self.failed - before.failed,
            scanned_migrate: self.scanned_migrate - before.scanned_migrate,
            scanned_free: self.scanned_free - before.scanned_free,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::private::tests::node;

    #[test]
    fn compaction_moves_pages_and_keeps_their_contents() {
        const TEST: &str = "compaction_moves_pages_and_keeps_their_contents";
        match open(node()).and_then(|mut file| start(&mut file)) {
            Ok(()) => {}
            Err(why @ Error::Rival { .. }) => return eprintln!("SKIP {TEST}: {why}"),
            Err(error) => panic!("{error}"),
        }
        // Less memory is enough on most machines.
        for bytes in [256 << 20, 512 << 20, 1 << 30] {
            let holes = Holes::new(node(), bytes, &|| false).unwrap();
            let compacted = holes.compact();
            assert_eq!(holes.lost(), 0);
            let compacted = match compacted {
                Err(Error::Rival { reason, .. }) if reason.contains("pages have moved") => {
                    eprintln!("{bytes} bytes: {reason}");
                    continue;
                }
                compacted => compacted.unwrap(),
            };
            println!("{bytes} bytes: {compacted:?}, {:.0} ns a page", compacted.ns_per_page());
            assert!(compacted.migrated >= MIN_MIGRATED && compacted.ns > 0);
            assert!(compacted.scanned_migrate >= compacted.migrated && compacted.scanned_free > 0);
            assert_eq!(compacted.lost, 0);
            // Another observer than the counters. Without it, the kernel hides frame numbers.
            let own = compacted.own.unwrap_or(compacted.migrated);
            assert!((1..=compacted.migrated).contains(&own), "{compacted:?}");
            return;
        }
        eprintln!("SKIP {TEST}: free memory is too fragmented, so compaction gives up early");
    }

    #[test]
    fn a_lost_word_of_a_page_that_was_kept_is_found() {
        let holes = Holes::new(node(), 6 * BASE_PAGE, &|| false).unwrap();
        // So little memory has no block of 2 MB.
        assert_eq!(holes.kept, [false, true, false, true, false, true]);
        let words = holes.memory.words();
        assert_eq!(words[WORDS_PER_PAGE].load(Ordering::Relaxed), WORDS_PER_PAGE as u64 + 1);
        assert_eq!(words[2 * WORDS_PER_PAGE].load(Ordering::Relaxed), 0);
        assert_eq!(holes.lost(), 0);
        words[4 * WORDS_PER_PAGE - 1].store(7, Ordering::Relaxed);
        words[4 * WORDS_PER_PAGE].store(7, Ordering::Relaxed);
        assert_eq!(holes.lost(), 1);
    }

    #[test]
    fn half_of_each_whole_block_is_given_back() {
        // The last block lacks its last frame, and comes first.
        let whole = MIN_PAGES.next_multiple_of(512);
        let frames: Vec<u64> = (1 << 30..(1 << 30) + 511).chain((0..whole).rev()).collect();
        let kept_of = |frames: &[u64]| kept(frames.len(), Some(frames));
        let kept_ones = kept_of(&frames);
        assert!(kept_ones[..511].iter().all(|is_kept| *is_kept));
        let halves: Vec<_> = kept_ones[511..].chunks(256).collect();
        assert!(halves.iter().step_by(2).all(|half| half.iter().all(|is_kept| !is_kept)));
        assert!(halves.iter().skip(1).step_by(2).all(|half| half.iter().all(|is_kept| *is_kept)));
        // Without frame numbers, or with too few whole blocks.
        assert_eq!(kept(4, None), [false, true, false, true]);
        assert_eq!(kept_of(&frames[1024..])[..3], [false, true, false]);
    }

    #[test]
    fn counters_are_read_by_their_whole_names() {
        let text = "pgmigrate_successful 9\npgmigrate_success 5\npgmigrate_fail 2\n\
                    compact_migrate_scanned 70\n\
                    compact_free_scanned 80\ncompact_daemon_free_scanned 9\n";
        let counters = Counters::parse(text).unwrap();
        let expected = Counters { migrated: 5, failed: 2, scanned_migrate: 70, scanned_free: 80 };
        assert_eq!(counters, expected);
        assert_eq!(counters.since(expected).scanned_free, 0);
        let without = text.replace("compact_free_scanned", "compact_free");
        assert_eq!(Counters::parse(&without), Err("compact_free_scanned"));
    }

    #[test]
    fn the_reason_tells_what_is_missing() {
        let reason = |errno| refused(&io::Error::from_raw_os_error(errno)).to_string();
        assert!(reason(libc::ENOENT).contains("CONFIG_COMPACTION"));
        assert!(reason(libc::EACCES).contains("root"));
        assert!(reason(libc::EROFS).contains("read-only"));
    }
}
