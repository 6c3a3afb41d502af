//! Memory that pageleap does not own leaps in place.
//!
//! On a machine with one node, pages get other frames of that node.

mod common;
#[path = "common/in_place.rs"]
mod in_place;
#[path = "common/mapping.rs"]
mod mapping;
#[path = "common/nodes.rs"]
mod nodes;

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use common::{Random, StopOnDrop, in_lab, own_files, rest, skip, soon, turn, vm_flags};
use in_place::{
    HUGE, KINDS, leap, memory, migration, moved, oracle_time, pages_of, pipe, resident, works,
};
use io_uring::{IoUring, opcode, types::Fd};
use mapping::Mapping;
use nodes::several;
use pageleap::{
    BASE_PAGE, Ended, Error, MemoryEngine, MemoryMigration, NodeId, PageOutcome, PageSize,
    Placement, Reason, Reserve, leap_memory,
};

/// The frames of pages, if this user may see them.
fn frames(mapping: &Mapping) -> Option<Vec<u64>> {
    let frames = mapping.pagemap().into_iter().map(|entry| entry & ((1 << 55) - 1));
    let frames: Vec<u64> = frames.collect();
    frames.iter().any(|frame| *frame != 0).then_some(frames)
}

/// Who writes which words, by their number: four threads, of which two let the kernel write.
const OWNERS: usize = 4;
/// Words of a page. The last one has the page's number, and nobody writes it while pages move.
const WORDS: usize = BASE_PAGE / 8;

/// A random word of an owner.
fn word_of(random: &mut Random, words: usize, owner: usize) -> usize {
    loop {
        let at = random.below(words as u64) as usize / OWNERS * OWNERS + owner;
        if at % WORDS != WORDS - 1 {
            return at;
        }
    }
}

/// Writes rising values, by stores or by `read(2)`, and returns the last ones.
fn writer(words: &[AtomicU64], owner: usize, stop: &AtomicBool) -> Vec<(usize, u64)> {
    let (mut random, mut last) = (Random::new(owner as u64), vec![0; words.len()]);
    let by_kernel = (owner >= 2).then(pipe);
    let mut value = 0u64;
    while !stop.load(Relaxed) {
        let at = word_of(&mut random, words.len(), owner);
        value += 1;
        match &by_kernel {
            None => words[at].store(value, Relaxed),
            Some([from, to]) => {
                (&*to).write_all(&value.to_ne_bytes()).unwrap();
                let fd = from.as_raw_fd();
                // SAFETY: the word is this thread's.
                let got = unsafe { libc::read(fd, words[at].as_ptr().cast(), 8) };
                assert_eq!(got, 8, "{}", std::io::Error::last_os_error());
                // The kernel reads it, too.
                // SAFETY: as above.
                let put = unsafe { libc::write(to.as_raw_fd(), words[at].as_ptr().cast(), 8) };
                assert_eq!(put, 8, "{}", std::io::Error::last_os_error());
                let mut back = [0; 8];
                (&*from).read_exact(&mut back).unwrap();
                assert_eq!(u64::from_ne_bytes(back), value, "LOST by the kernel");
            }
        }
        last[at] = value;
        if value.is_multiple_of(64) {
            rest();
        }
    }
    last.into_iter().enumerate().filter(|(_, value)| *value > 0).collect()
}

fn reader(words: &[AtomicU64], stop: &AtomicBool) {
    let (mut random, mut seen) = (Random::new(99), vec![0; words.len()]);
    while !stop.load(Relaxed) {
        for _ in 0..256 {
            let at = word_of(&mut random, words.len(), random_owner());
            let value = words[at].load(Relaxed);
            assert!(value >= seen[at], "LOST: word {at} fell from {} to {value}", seen[at]);
            seen[at] = value;
        }
        rest();
    }
    // The kernel may write a word byte by byte, so that only words of the first owner are read.
    fn random_owner() -> usize {
        0
    }
}

/// Forks children that look at each page, at least one.
fn forker(words: &[AtomicU64], stop: &AtomicBool) -> u64 {
    let mut children = 0;
    while children == 0 || !stop.load(Relaxed) {
        // SAFETY: the child reads memory, and ends by a system call.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "{}", std::io::Error::last_os_error());
        if child == 0 {
            let stamps = words.chunks_exact(WORDS).map(|page| page[WORDS - 1].load(Relaxed));
            let wrong = stamps.enumerate().any(|(number, stamp)| stamp != number as u64);
            // SAFETY: ends the child.
            unsafe { libc::_exit(wrong.into()) };
        }
        let mut status = 0;
        // SAFETY: waits for the child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "LOST: a child has seen another page");
        children += 1;
        rest();
    }
    children
}

/// Discards pages of its own, at least one, and touches them again, some for the first time.
fn discarder(part: &[AtomicU64], stop: &AtomicBool) -> u64 {
    let (mut random, mut discarded) = (Random::new(7), 0);
    let pages: Vec<&[AtomicU64]> = part.chunks_exact(WORDS).collect();
    while discarded == 0 || !stop.load(Relaxed) {
        let page = pages[random.below(pages.len() as u64) as usize];
        if random.below(2) == 0 {
            discarded += 1;
            let start = page.as_ptr() as *mut libc::c_void;
            // SAFETY: the page is this thread's.
            assert_eq!(unsafe { libc::madvise(start, BASE_PAGE, libc::MADV_DONTNEED) }, 0);
            assert_eq!(page[3].load(Relaxed), 0, "a discarded page is back");
        }
        let value = page[3].load(Relaxed) + 1;
        page[3].store(value, Relaxed);
        rest();
        assert_eq!(page[3].load(Relaxed), value, "LOST");
    }
    discarded
}

#[test]
fn memory_in_place_loses_nothing_under_load() {
    const NAME: &str = "memory_in_place_loses_nothing_under_load";
    let _turn = turn();
    if !works(NAME) {
        return;
    }
    for page in KINDS {
        let mapping = memory(16 << 20, page);
        // The last part belongs to the thread that discards, and half of it is not touched before.
        let (words, part) = mapping.words().split_at(mapping.words().len() / 8 * 7);
        for (number, page) in words.chunks_exact(WORDS).enumerate() {
            page[WORDS - 1].store(number as u64, Relaxed);
        }
        part[..part.len() / 2].iter().for_each(|word| word.store(0, Relaxed));
        let stop = AtomicBool::new(false);
        let (mut leaps, mut pages, mut last) = (0, 0, Vec::new());
        let (mut children, mut discarded) = (0, 0);
        std::thread::scope(|scope| {
            let stop = &stop;
            let writers: Vec<_> =
                (0..OWNERS).map(|owner| scope.spawn(move || writer(words, owner, stop))).collect();
            scope.spawn(move || reader(words, stop));
            let forker = scope.spawn(move || forker(words, stop));
            let discarder = scope.spawn(move || discarder(part, stop));
            let end = StopOnDrop(stop);
            let began = Instant::now();
            // A page stays while a child shares it, and so may all.
            while began.elapsed() < oracle_time() || leaps < 4 || pages == 0 {
                let [a, b] = common::nodes();
                let to = if leaps % 2 == 0 { b } else { a };
                let report = leap(&mapping, to).unwrap().wait();
                // Pages may be shared with a child, or in the hands of the kernel, each time.
                let odd = pages_of(&report, |outcome, reason| {
                    outcome == PageOutcome::Failed && reason != Some(Reason::InUse)
                });
                assert_eq!(odd, 0, "{report}");
                leaps += 1;
                pages += moved(&report);
            }
            drop(end);
            last = writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect();
            children = forker.join().unwrap();
            discarded = discarder.join().unwrap();
        });
        let report = leap(&mapping, common::nodes()[0]).unwrap().wait();
        // Of a huge page that was shared with a child and has been written in part, the kernel asks
        // the first page for all of them, and may keep the others.
        assert!(report.ended.is_completed() || page == PageSize::Thp, "{report}");
        for (at, value) in last {
            assert_eq!(words[at].load(Relaxed), value, "LOST: word {at}");
        }
        println!(
            "{page}: {leaps} leaps, {pages} pages, {children} children, {discarded} discarded"
        );
    }
}

#[test]
fn many_first_touches_do_not_keep_a_discard_waiting() {
    const NAME: &str = "many_first_touches_do_not_keep_a_discard_waiting";
    // With few threads, a message of a discard is read some time. Emulated CPUs take too long.
    let (threads, bytes) = if in_lab() { (16, 8 << 20) } else { (128, 32 << 20) };
    let _turn = turn();
    if !works(NAME) {
        return;
    }
    let mapping = memory(bytes, PageSize::Base);
    let (own, untouched) = mapping.words().split_at(HUGE / 8);
    own.iter().step_by(WORDS).for_each(|word| word.store(1, Relaxed));
    let job = migration(&mapping, common::nodes()[0]).rate_limit(64 << 10).start().unwrap();
    let [touching, touched, discards] = [const { AtomicU64::new(0) }; 3];
    std::thread::scope(|scope| {
        for part in untouched.chunks(untouched.len().div_ceil(threads)) {
            let (touching, touched) = (&touching, &touched);
            touching.fetch_add(1, Relaxed);
            scope.spawn(move || {
                for word in part.iter().step_by(WORDS) {
                    assert_eq!(word.load(Relaxed), 0);
                    touched.fetch_add(1, Relaxed);
                }
                touching.fetch_sub(1, Relaxed);
            });
        }
        scope.spawn(|| {
            while touching.load(Relaxed) > 0 {
                let page = own[own.len() - WORDS..].as_ptr() as *mut libc::c_void;
                // SAFETY: the page is this thread's.
                assert_eq!(unsafe { libc::madvise(page, BASE_PAGE, libc::MADV_DONTNEED) }, 0);
                discards.fetch_add(1, Relaxed);
            }
        });
        // However slow the machine is, there is progress.
        let (mut goes_on, mut seen) = (true, 0);
        while goes_on && touching.load(Relaxed) > 0 {
            goes_on = soon(|| touched.load(Relaxed) > seen || touching.load(Relaxed) == 0);
            seen = touched.load(Relaxed);
        }
        job.cancel();
        assert!(goes_on, "{} threads wait for pages", touching.load(Relaxed));
    });
    job.wait();
    println!("{} discards beside {} first touches", discards.into_inner(), untouched.len() / WORDS);
}

#[test]
fn pages_get_other_frames_and_all_else_stays() {
    const NAME: &str = "pages_get_other_frames_and_all_else_stays";
    let _turn = turn();
    if !works(NAME) {
        return;
    }
    for page in KINDS {
        let mapping = memory(8 << 20, page);
        let words = mapping.words();
        // The third quarter has holes; the fourth one has pages that were only read.
        let quarter = words.len() / 4;
        let touched = |at: usize| at < 2 * quarter || (at / WORDS).is_multiple_of(3);
        for at in (0..3 * quarter).step_by(WORDS).filter(|at| touched(*at)) {
            words[at].store(at as u64 + 1, Relaxed);
        }
        for at in (3 * quarter..4 * quarter).step_by(WORDS) {
            assert_eq!(words[at].load(Relaxed), 0);
        }
        mapping.advise(libc::MADV_DONTDUMP);
        mapping.advise(libc::MADV_DONTFORK);
        let seen = || (vm_flags(mapping.start, mapping.len), resident(&mapping));
        let (before, old, files) = (seen(), frames(&mapping), own_files().len());
        let half = mapping.len / BASE_PAGE / 2;
        for round in 0..3 {
            let report = leap(&mapping, common::nodes()[0]).unwrap().wait();
            assert!(report.ended.is_completed() && report.engine == MemoryEngine::UffdMove);
            assert_eq!(report.pages.failed + report.pages.busy, 0, "{report}");
            assert!(moved(&report) >= 2 * (quarter / WORDS) as u64, "{report}");
            assert_eq!(seen(), before, "{page}, leap {round}");
            // The first leap takes new frames while the pages still have their old ones. Later
            // leaps may take those again, and so may the kernel when it migrates pages by itself:
            // then a few of 1024 pages can come back.
            let now = frames(&mapping).filter(|_| round == 0);
            if let (Some(old), Some(now)) = (&old, now) {
                let same = |(old, now): &(&u64, u64)| **old != 0 && **old == *now;
                let kept = old.iter().zip(now).take(half).filter(same).count();
                assert!(kept < half / 2, "{kept} of {half} pages have their old frames");
            }
        }
        for at in (0..words.len()).step_by(WORDS) {
            let value = if at < 3 * quarter && touched(at) { at as u64 + 1 } else { 0 };
            assert_eq!(words[at].load(Relaxed), value, "LOST: page {}", at / WORDS);
        }
        assert_eq!(own_files().len(), files, "{:?}", own_files());
    }
}

#[test]
fn pinned_pages_stay_and_io_arrives() {
    const NAME: &str = "pinned_pages_stay_and_io_arrives";
    let _turn = turn();
    if !works(NAME) {
        return;
    }
    let mapping = memory(1 << 20, PageSize::Base);
    mapping.fill(NodeId(0));
    let Ok(mut ring) = IoUring::new(2) else { return skip(NAME, &"io_uring is refused here") };
    let pinned = 16 * BASE_PAGE..32 * BASE_PAGE;
    let at = |offset: usize| (mapping.start + offset) as *mut u8;
    let buffer = libc::iovec { iov_base: at(pinned.start).cast(), iov_len: pinned.len() };
    // SAFETY: the mapping outlives the ring.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
    let [from, mut to] = pipe();
    let read = opcode::ReadFixed::new(Fd(from.as_raw_fd()), at(pinned.start + 8), 8, 0).build();
    // SAFETY: the buffer is registered.
    unsafe { ring.submission().push(&read) }.unwrap();
    ring.submit().unwrap();
    // The read waits for the pipe while pages move.
    let report = leap(&mapping, common::nodes()[0]).unwrap().wait();
    let in_use = |outcome, reason| outcome == PageOutcome::Failed && reason == Some(Reason::InUse);
    assert_eq!(pages_of(&report, in_use), 16, "{report}");
    assert_eq!(moved(&report), 256 - 16, "{report}");
    to.write_all(&4711u64.to_ne_bytes()).unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().unwrap().result(), 8);
    assert_eq!(mapping.words()[pinned.start / 8 + 1].load(Relaxed), 4711, "LOST by the device");
    drop(ring);
    mapping.check();
}

#[test]
fn pages_that_a_child_shares_stay_until_it_ends() {
    const NAME: &str = "pages_that_a_child_shares_stay_until_it_ends";
    let _turn = turn();
    if !works(NAME) {
        return;
    }
    for page in KINDS {
        let mapping = memory(4 << 20, page);
        mapping.fill(NodeId(0));
        // SAFETY: the child sleeps, and ends by a signal.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: only waits.
                unsafe { libc::pause() };
            }
        }
        let report = leap(&mapping, common::nodes()[0]).unwrap().wait();
        // SAFETY: the child is this test's.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        let shared = |_, reason| reason == Some(Reason::Shared);
        assert_eq!(pages_of(&report, shared), 1024, "{page}: {report}");
        mapping.check();
        let report = leap(&mapping, common::nodes()[0]).unwrap().wait();
        assert_eq!(moved(&report), 1024, "{page}: {report}");
        mapping.check();
    }
}

#[test]
fn locked_memory_moves_and_stays_locked() {
    const NAME: &str = "locked_memory_moves_and_stays_locked";
    let _turn = turn();
    if !works(NAME) {
        return;
    }
    let mapping = memory(256 << 10, PageSize::Base);
    mapping.fill(NodeId(0));
    // SAFETY: the mapping is this test's.
    if unsafe { libc::mlock(mapping.start as *const _, mapping.len) } != 0 {
        return skip(NAME, &std::io::Error::last_os_error());
    }
    let before = vm_flags(mapping.start, mapping.len);
    let report = leap(&mapping, common::nodes()[0]).unwrap().wait();
    assert_eq!(moved(&report), 64, "{report}");
    assert_eq!(vm_flags(mapping.start, mapping.len), before);
    mapping.check();
}

#[test]
fn a_mapping_that_replaces_the_range_is_left_alone() {
    const NAME: &str = "a_mapping_that_replaces_the_range_is_left_alone";
    let _turn = turn();
    if !works(NAME) {
        return;
    }
    let mapping = memory(8 << 20, PageSize::Base);
    mapping.fill(NodeId(0));
    let (reached, job) = (AtomicU64::new(0), migration(&mapping, NodeId(0)).rate_limit(32 << 20));
    let job = job.start().unwrap();
    // Breaks the contract, piece by piece, while windows open and close.
    for start in mapping.range().step_by(64 << 10) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: replaces a part of the mapping of this test.
        let new = unsafe { libc::mmap(start as *mut _, 64 << 10, 3, flags, -1, 0) };
        assert_eq!(new as usize, start);
        for page in (start..start + (64 << 10)).step_by(BASE_PAGE) {
            // SAFETY: a word of the new mapping.
            unsafe { (page as *mut u64).write_volatile(!(page as u64)) };
        }
        reached.fetch_add(1, Relaxed);
        rest();
    }
    let report = job.wait();
    for page in mapping.pages() {
        // SAFETY: as above.
        assert_eq!(unsafe { (page as *const u64).read_volatile() }, !(page as u64), "{report}");
    }
    assert_eq!(reached.load(Relaxed), 128);
}

#[test]
fn a_stopped_job_leaves_all_memory_whole() {
    const NAME: &str = "a_stopped_job_leaves_all_memory_whole";
    let _turn = turn();
    if !works(NAME) {
        return;
    }
    let mapping = memory(8 << 20, PageSize::Base);
    mapping.fill(NodeId(0));
    // At this rate it would take hours.
    let slow = || migration(&mapping, NodeId(0)).rate_limit(100);
    let job = slow().start().unwrap();
    // A second job cannot take the range.
    let second = leap(&mapping, NodeId(0));
    let busy = matches!(second, Err(Error::Call { errno: pageleap::backend::Errno(16), .. }));
    assert!(busy, "{second:?}");
    job.cancel();
    let report = job.wait();
    assert!(matches!(report.ended, Ended::Cancelled), "{report}");
    mapping.check();
    let report = slow().timeout(Duration::from_millis(20)).start().unwrap().wait();
    assert!(matches!(report.ended, Ended::TimedOut), "{report}");
    mapping.check();
    let report = leap(&mapping, NodeId(0)).unwrap().wait();
    assert_eq!(moved(&report), 2048, "{report}");
    mapping.check();
}

#[test]
fn a_reserve_gives_its_memory_and_is_refilled() {
    const NAME: &str = "a_reserve_gives_its_memory_and_is_refilled";
    let _turn = turn();
    if !works(NAME) {
        return;
    }
    let node = common::nodes()[0];
    for page in KINDS {
        let mapping = memory(4 << 20, page);
        mapping.fill(node);
        let reserve = match Reserve::new(node, mapping.len, page) {
            Ok(reserve) => Arc::new(reserve),
            Err(error) => return skip(NAME, &error),
        };
        for round in 0..3 {
            assert_eq!(reserve.free_bytes(), mapping.len, "leap {round}");
            let job = migration(&mapping, node).reserve(&reserve).rate_limit(64 << 20);
            let job = job.start().unwrap();
            let is_full = reserve.refill().is_ok();
            assert!(!is_full || soon(|| job.is_finished()), "a job uses it");
            let report = job.wait();
            assert_eq!(moved(&report), 1024, "{report}");
            assert_eq!(reserve.free_bytes(), if is_full { mapping.len } else { 0 });
            mapping.check();
            reserve.refill().unwrap();
        }
    }
    assert!(Reserve::new(node, 0, PageSize::Base).unwrap_err().is_usage());
    assert!(Reserve::new(node, 1, PageSize::Huge2M).unwrap_err().is_usage());
    assert!(Reserve::new(NodeId(999), 1, PageSize::Base).unwrap_err().is_usage());
    let too_much = Reserve::new(node, 1 << 46, PageSize::Base);
    assert!(matches!(too_much, Err(Error::OutOfMemory { .. })), "{too_much:?}");
}

#[test]
fn memory_that_cannot_leap_is_refused() {
    let _turn = turn();
    let mapping = memory(64 << 10, PageSize::Base);
    let at = |offset: usize| (mapping.start + offset) as *mut u8;
    let refused = |address: *mut u8, len: usize| {
        // SAFETY: nothing is started.
        let alone = unsafe { MemoryMigration::new().range(address, len, NodeId(0)) };
        let error = alone.engine(MemoryEngine::UffdMove).start().unwrap_err();
        assert!(error.is_usage(), "{error}");
        error.to_string()
    };
    assert!(MemoryMigration::new().start().unwrap_err().to_string().contains("no range"));
    assert!(refused(at(0), 0).contains("no whole page"));
    assert!(refused(at(1), BASE_PAGE).contains("no whole page"));
    refused(at(0), usize::MAX);
    assert!(refused(BASE_PAGE as *mut u8, BASE_PAGE).contains("nothing is mapped"));
    let local = 0u8;
    let stack = (&raw const local as usize / BASE_PAGE * BASE_PAGE) as *mut u8;
    assert!(refused(stack, BASE_PAGE).contains("stack"));
    // SAFETY: read-only memory of this test.
    assert_eq!(unsafe { libc::mprotect(at(0).cast(), BASE_PAGE, libc::PROT_READ) }, 0);
    assert!(refused(at(0), mapping.len).contains("writable"));
    let shared = Mapping::new(BASE_PAGE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    assert!(refused(shared.start as *mut u8, BASE_PAGE).contains("not private"));
    // SAFETY: nothing is started.
    let twice = unsafe {
        let whole = MemoryMigration::new().range(at(BASE_PAGE), 4 * BASE_PAGE, NodeId(0));
        whole.range(at(2 * BASE_PAGE), BASE_PAGE, NodeId(0)).start().unwrap_err()
    };
    assert!(twice.to_string().contains("overlaps"), "{twice}");
    // SAFETY: as above.
    let node = unsafe { leap_memory(at(BASE_PAGE), BASE_PAGE, NodeId(999)) }.unwrap_err();
    assert!(matches!(node, Error::UnknownNode { .. }), "{node}");
    // SAFETY: as above.
    let zero = unsafe { MemoryMigration::new().range(at(BASE_PAGE), BASE_PAGE, NodeId(0)) };
    assert!(zero.rate_limit(0).start().unwrap_err().is_usage());
}

#[test]
fn malloced_memory_moves_between_nodes() {
    const NAME: &str = "malloced_memory_moves_between_nodes";
    let _turn = turn();
    let Some(nodes) = several(NAME) else { return };
    moves_between(nodes[0], nodes[1]);
    let hidden = || {
        hide_frames();
        moves_between(nodes[0], nodes[1]);
    };
    std::thread::scope(|scope| scope.spawn(hidden).join().unwrap());
}

/// The calling thread, and those that it starts, may not see frame numbers any more.
fn hide_frames() {
    /// `CAP_SYS_ADMIN` of `include/uapi/linux/capability.h`.
    const SYS_ADMIN: u32 = 21;
    // `_LINUX_CAPABILITY_VERSION_3`, and the calling thread.
    let mut header = [0x2008_0522u32, 0];
    // Effective, permitted and inheritable capabilities, by 32.
    let mut sets = [[0u32; 3]; 2];
    // SAFETY: the calls read and write both arrays, which have the layout that version 3 says.
    unsafe {
        let header = header.as_mut_ptr();
        assert_eq!(libc::syscall(libc::SYS_capget, header, sets.as_mut_ptr()), 0);
        sets[0][0] &= !(1 << SYS_ADMIN);
        assert_eq!(libc::syscall(libc::SYS_capset, header, sets.as_ptr()), 0);
    }
}

fn moves_between(a: NodeId, b: NodeId) {
    for page in KINDS {
        let mapping = memory(16 << 20, page);
        mapping.fill(a);
        let sees_frames = frames(&mapping).is_some();
        let before = resident(&mapping);
        for to in [b, a, b] {
            // SAFETY: the test waits for the job.
            let job = unsafe { leap_memory(mapping.start as *mut u8, mapping.len, to) };
            let report = job.unwrap().wait();
            assert_eq!(report.pages.failed, 0, "{report}");
            if report.by_engine().iter().all(|share| share.engine == MemoryEngine::UffdMove) {
                // Who sees frames need not ask for nodes.
                let asked = report.calls.contains_key("move_pages(query)");
                assert_eq!(asked, !sees_frames, "{report}");
            }
            assert_eq!(mapping.on_nodes(), [(Some(to), 4096)].into(), "{page}: {report}");
            assert_eq!(resident(&mapping), before, "{page}");
            mapping.check();
            // Again: nothing is left to do.
            // SAFETY: as above.
            let job = unsafe { leap_memory(mapping.start as *mut u8, mapping.len, to) };
            assert_eq!(moved(&job.unwrap().wait()), 0);
        }
        // What is touched for the first time later follows.
        let part = 2 << 20;
        let at = mapping.start as *mut libc::c_void;
        // SAFETY: the memory of this test.
        assert_eq!(unsafe { libc::madvise(at, part, libc::MADV_DONTNEED) }, 0);
        mapping.words()[..part / 8].iter().for_each(|word| word.store(0, Relaxed));
        assert_eq!(mapping.on_nodes(), [(Some(b), 4096)].into(), "{page}");
        // Over both, by stripes of 2 MB.
        let report = migration(&mapping, Placement::interleave([a, b])).start().unwrap().wait();
        let half = [(Some(a), 2048), (Some(b), 2048)].into();
        assert_eq!(mapping.on_nodes(), half, "{page}: {report}");
    }
}
