//! Guards: pages whose frames a device or the kernel accesses keep their frames, whether the frames
//! are read or written. Tests also show what happens without a guard.

#[path = "common/calls.rs"]
mod calls;
mod common;
#[path = "common/gate.rs"]
mod gate;
#[path = "common/moving.rs"]
mod moving;
#[path = "common/refusing.rs"]
mod refusing;

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use calls::{pipe, process_vm, splice};
use common::{address, check_stamp, engines, nodes, places, pools, skip, soon, stamp, turn};
use gate::Gate;
use io_uring::{IoUring, opcode, types::Fd};
use pageleap::backend::{Call, Linux};
use pageleap::{
    BASE_PAGE, Ended, EngineChoice, Error, Migration, PageOutcome, PageSize, Pool, Reason, Region,
    Report,
};
use refusing::{Refusing, Request};

const PAGES: usize = 16;
const BYTES: usize = PAGES * BASE_PAGE;
/// Patience for guards of jobs that must end although pages are guarded.
const SHORT: Duration = Duration::from_millis(10);
/// Patience for guards of jobs that must wait for them.
const LONG: Duration = Duration::from_secs(600);

fn scene() -> ([Pool; 2], Region) {
    let pools = pools(PageSize::Base, BYTES as u64).unwrap();
    let region = Region::new(&pools[0], BYTES).unwrap();
    (pools, region)
}

fn leap(region: &Region, to: &Pool, engine: EngineChoice, patience: Duration) -> Report {
    let job =
        Migration::new().range(region, 0..region.len(), to).engine(engine).pin_patience(patience);
    job.start().unwrap().wait()
}

fn bytes_of(region: &Region, page: usize) -> &[AtomicU8] {
    // SAFETY: all accesses to the page by the process have this size.
    unsafe { region.atomics_u8(page * BASE_PAGE..(page + 1) * BASE_PAGE) }.unwrap()
}

fn fill(bytes: &[AtomicU8], seed: usize) {
    bytes.iter().enumerate().for_each(|(i, byte)| byte.store(pattern(seed, i), Relaxed));
}

fn pattern(seed: usize, i: usize) -> u8 {
    (i * 31 + seed * 7 + 1) as u8
}

fn holds(bytes: &[AtomicU8], seed: usize) -> bool {
    bytes.iter().enumerate().all(|(i, byte)| byte.load(Relaxed) == pattern(seed, i))
}

/// Two pools, and a region of the first one, whose calls that change memory are shown to `look`.
fn watched(look: impl Fn(&Request) + Send + Sync + 'static) -> ([Pool; 2], Region) {
    let watching = Arc::new(Refusing::new(Arc::new(Linux), move |request| {
        look(request);
        None
    }));
    let build = |node| Pool::builder(node, BYTES as u64).backend(watching.clone()).build().unwrap();
    let pools = nodes().map(build);
    let region = Region::new(&pools[0], BYTES).unwrap();
    (pools, region)
}

/// Waits until a guard on a page has been requested: the page, which is not busy otherwise, leaps
/// until then.
fn wait_for_request(region: &Region, pools: &[Pool; 2], page: usize) {
    let mut round = 0;
    let requested = soon(|| {
        round += 1;
        let range = page * BASE_PAGE..(page + 1) * BASE_PAGE;
        let leap = Migration::new().range(region, range, &pools[round % 2]);
        leap.pin_patience(Duration::ZERO).start().unwrap().wait().pages.busy == 1
    });
    assert!(requested, "no guard was requested, or it is ignored");
}

/// A guard that is requested while its page is being discarded is not given: the frame gets another
/// owner.
#[test]
fn no_guard_is_given_on_what_is_being_discarded() {
    let _turn = turn();
    let gate = Arc::new(Gate::default());
    let held = gate.clone();
    let (pools, region) = watched(move |request| {
        if request.call == Call::Vacate {
            held.pass();
        }
    });
    std::thread::scope(|scope| {
        // SAFETY: no thread accesses the region.
        let discard = scope.spawn(|| unsafe { region.discard_shared(0..4 * BASE_PAGE) });
        gate.wait_until_reached();
        // The last page of the guard is not discarded.
        let guard = scope.spawn(|| region.pin(BASE_PAGE..5 * BASE_PAGE));
        wait_for_request(&region, &pools, 4);
        gate.open();
        discard.join().unwrap().unwrap();
        let refused = guard.join().unwrap().err().expect("the guard was given");
        assert!(refused.to_string().contains("unbacked"), "{refused}");
    });
    let guard = region.pin(8 * BASE_PAGE..9 * BASE_PAGE).unwrap();
    // SAFETY: no thread accesses the region.
    let refused = unsafe { region.discard_shared(0..BYTES) }.unwrap_err();
    assert!(matches!(refused, Error::Pinned { .. }), "{refused}");
    drop(guard);
}

#[test]
fn guarded_pages_stay_and_the_others_move() {
    let _turn = turn();
    for engine in engines() {
        let (pools, region) = scene();
        stamp(&region, 0..BYTES, 1);
        let before = places(&region);
        // The first range does not end at page boundaries. Its pages are guarded whole.
        let guards = [(5 * BASE_PAGE + 7..6 * BASE_PAGE + 9), (9 * BASE_PAGE..10 * BASE_PAGE)];
        let [first, second] = guards.map(|part| region.pin(part).unwrap());
        let report = leap(&region, &pools[1], engine, SHORT);
        assert_eq!((report.pages.migrated, report.pages.busy), (PAGES as u64 - 3, 3), "{report}");
        let Ended::Failed(Error::Pinned { range }) = &report.ended else { panic!("{report}") };
        let start = address(&region);
        assert_eq!(range.0, start + 5 * BASE_PAGE..start + 7 * BASE_PAGE);
        let busy: Vec<_> =
            report.runs.iter().filter(|run| run.outcome == PageOutcome::Busy).collect();
        assert_eq!(busy.len(), 2, "{report}");
        assert!(busy.iter().all(|run| run.reason == Some(Reason::Guarded)), "{report}");
        let now = places(&region);
        let kept: Vec<usize> = (0..PAGES).filter(|page| before[*page] == now[*page]).collect();
        assert_eq!(kept, [5, 6, 9]);
        drop(second);
        let report = leap(&region, &pools[1], engine, SHORT);
        assert_eq!((report.pages.migrated, report.pages.busy), (1, 2), "{report}");
        drop(first);
        let report = leap(&region, &pools[1], engine, SHORT);
        assert!(report.ended.is_completed() && report.pages.migrated == 2, "{report}");
        check_stamp(&region, 0..BYTES, 1);
        assert_eq!(pools[0].free_bytes(), pools[0].bytes());
    }
}

#[test]
fn a_job_waits_for_guards_and_is_cancelled_while_it_waits() {
    let _turn = turn();
    let (pools, region) = scene();
    let job =
        |to| Migration::new().range(&region, 0..BYTES, to).pin_patience(LONG).start().unwrap();
    let guard = region.pin(0..1).unwrap();
    let waiting = job(&pools[1]);
    assert!(soon(|| waiting.progress().bytes_migrated == (BYTES - BASE_PAGE) as u64));
    assert!(!waiting.is_finished());
    drop(guard);
    let report = waiting.wait();
    assert!(report.ended.is_completed() && report.pages.busy == 0, "{report}");

    let guard = region.pin(BYTES - 1..BYTES).unwrap();
    let waiting = job(&pools[0]);
    assert!(soon(|| waiting.progress().bytes_migrated == (BYTES - BASE_PAGE) as u64));
    waiting.cancel();
    let report = waiting.wait();
    assert!(matches!(report.ended, Ended::Cancelled) && report.pages.busy == 1, "{report}");
    drop(guard);
}

/// A job moves the pages of a guard that was dropped while it ran, however short its patience is.
#[test]
fn pages_whose_guards_have_gone_are_moved() {
    let _turn = turn();
    // The job waits at this page until the guard of an earlier page is dropped.
    let (gate, open) = (Arc::new(AtomicUsize::new(usize::MAX)), Arc::new(AtomicBool::new(false)));
    let (at, is_open) = (gate.clone(), open.clone());
    let waiting = Arc::new(Refusing::new(Arc::new(Linux), move |request| {
        if request.addr == at.load(Relaxed) {
            soon(|| is_open.load(Relaxed));
        }
        None
    }));
    let build = |node| Pool::builder(node, BYTES as u64).backend(waiting.clone()).build().unwrap();
    let pools = nodes().map(build);
    let region = Region::new(&pools[0], BYTES).unwrap();
    for (number, engine) in engines().into_iter().enumerate() {
        let to = (number + 1) % 2;
        let early = region.pin(0..BASE_PAGE).unwrap();
        let last = region.pin(BYTES - 1..BYTES).unwrap();
        gate.store(address(&region) + 8 * BASE_PAGE, Relaxed);
        open.store(false, Relaxed);
        let job = Migration::new()
            .range(&region, 0..BYTES, &pools[to])
            .engine(engine)
            .area_bytes(BASE_PAGE);
        let job = job.threads(1).pin_patience(Duration::ZERO).start().unwrap();
        assert!(soon(|| job.progress().bytes_migrated > 0));
        drop(early);
        open.store(true, Relaxed);
        let report = job.wait();
        assert_eq!((report.pages.migrated, report.pages.busy), (PAGES as u64 - 1, 1), "{report}");
        drop(last);
        assert!(leap(&region, &pools[to], engine, SHORT).ended.is_completed());
    }
}

#[test]
fn what_cannot_be_guarded_is_refused_and_guarded_pages_are_not_discarded() {
    let _turn = turn();
    let (pools, mut region) = scene();
    #[allow(clippy::reversed_empty_ranges)] // one of the refused ranges
    for part in [0..0, 5..4, BYTES - 1..BYTES + 1, usize::MAX - 1..usize::MAX] {
        assert!(matches!(region.pin(part), Err(Error::BadRange { .. })));
    }
    let guard = region.pin(4096..4097).unwrap();
    assert!(matches!(region.discard(0..8192), Err(Error::Pinned { .. })));
    region.discard(8192..12288).unwrap();
    assert!(matches!(region.pin(8191..8193), Err(Error::BadRange { .. })));
    drop(guard);
    region.discard(0..8192).unwrap();
    // A guard keeps the region mapped after the handle is dropped.
    let guard = region.pin(BYTES - 1..BYTES).unwrap();
    drop(region);
    assert_ne!(pools[0].free_bytes(), pools[0].bytes());
    drop(guard);
    assert_eq!(pools[0].free_bytes(), pools[0].bytes());
}

/// Leaps back and forth while `body` runs.
fn while_leaping(body: impl FnOnce(&Region)) {
    let (pools, region) = scene();
    let leap = |number: usize| {
        let engine = engines()[number / 2 % engines().len()];
        let report = leap(&region, &pools[(number + 1) % 2], engine, LONG);
        assert!(report.ended.is_completed(), "{report}");
    };
    moving::while_leaping(leap, |_| body(&region));
}

/// A guard that is requested while an attempt moves its page is given after the attempt.
#[test]
fn a_guard_is_given_when_no_attempt_is_under_way() {
    let _turn = turn();
    for engine in engines() {
        let (gate, first) = (Arc::new(Gate::default()), Arc::new(AtomicUsize::new(usize::MAX)));
        let (held, at) = (gate.clone(), first.clone());
        let (pools, region) = watched(move |request| {
            if request.addr == at.load(Relaxed) {
                held.pass();
            }
        });
        first.store(address(&region), Relaxed);
        let leap = Migration::new().engine(engine).range(&region, 0..BASE_PAGE, &pools[1]);
        let job = leap.start().unwrap();
        std::thread::scope(|scope| {
            gate.wait_until_reached();
            // The job leaves the second page of the guard alone.
            let guard = scope.spawn(|| {
                let guard = region.pin(0..2 * BASE_PAGE).unwrap();
                (guard, gate.is_open(), places(&region))
            });
            wait_for_request(&region, &pools, 1);
            gate.open();
            let report = job.wait();
            assert!(report.ended.is_completed() && report.pages.migrated == 1, "{report}");
            let (guard, in_time, given) = guard.join().unwrap();
            assert!(in_time, "{engine}: a guard was given during an attempt");
            assert_eq!(places(&region), given, "{engine}: a guarded page has moved");
            drop(guard);
        });
    }
}

/// Reads into a registered buffer while the region leaps. The kernel writes to the frames that the
/// buffer had at registration, whenever the data arrives. Returns whether the data is in the region
/// and the report of the leap, or `None` without io_uring.
fn fixed_read(guarded: bool) -> Option<(bool, Report)> {
    let (pools, region) = scene();
    let mut ring = IoUring::new(2).ok()?;
    let page = bytes_of(&region, 3);
    let buffer = libc::iovec { iov_base: page.as_ptr() as *mut _, iov_len: BASE_PAGE };
    let guard = guarded.then(|| region.pin(3 * BASE_PAGE..4 * BASE_PAGE).unwrap());
    // SAFETY: the buffer is a page of the region, which is alive when the buffer is unregistered.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
    let (from, mut to) = pipe();
    let read =
        opcode::ReadFixed::new(Fd(from.as_raw_fd()), page[0].as_ptr(), BASE_PAGE as u32, 0).build();
    // SAFETY: the buffer and the pipe live until the request is complete, which is waited for
    // below.
    unsafe { ring.submission().push(&read) }.unwrap();
    ring.submit().unwrap();
    let report = leap(&region, &pools[1], EngineChoice::Auto, SHORT);
    let data: Vec<u8> = (0..BASE_PAGE).map(|i| pattern(1, i)).collect();
    to.write_all(&data).unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().unwrap().result(), BASE_PAGE as i32);
    ring.submitter().unregister_buffers().unwrap();
    drop(guard);
    let kept = holds(page, 1);
    if guarded {
        let report = leap(&region, &pools[1], EngineChoice::Auto, SHORT);
        assert!(report.ended.is_completed(), "{report}");
        assert!(holds(page, 1), "LOST what was read");
    }
    Some((kept, report))
}

#[test]
fn a_registered_buffer_is_kept_with_a_guard_and_lost_without() {
    const NAME: &str = "a_registered_buffer_is_kept_with_a_guard_and_lost_without";
    let _turn = turn();
    let Some((kept, report)) = fixed_read(true) else { return skip(NAME, &"io_uring is refused") };
    assert!(kept && report.pages.busy == 1, "LOST what was read: {report}");
    // Without a guard the read succeeds, but its data is not in the region. Therefore the contract
    // asks for a guard.
    let (kept, report) = fixed_read(false).unwrap();
    assert!(report.ended.is_completed(), "{report}");
    assert!(!kept, "without a guard the data was expected to be lost");
}

/// Puts a page into a pipe, lets the region leap, and overwrites the vacated frames. The pipe holds
/// the page's frame, not its bytes. Returns whether the pipe still delivers the page's bytes.
fn spliced(guarded: bool) -> bool {
    let (pools, region) = scene();
    let page = bytes_of(&region, 3);
    fill(page, 2);
    let (mut from, to) = pipe();
    let guard = guarded.then(|| region.pin(3 * BASE_PAGE..4 * BASE_PAGE).unwrap());
    // SAFETY: the page belongs to the region, which lives.
    assert_eq!(unsafe { splice(page[0].as_ptr(), BASE_PAGE, &to) }.unwrap(), BASE_PAGE);
    leap(&region, &pools[1], EngineChoice::Auto, SHORT);
    // Another region gets the vacated frames and writes to them.
    let free = pools[0].free_bytes() as usize;
    let other = Region::new(&pools[0], free).unwrap();
    (0..free / BASE_PAGE).for_each(|page| fill(bytes_of(&other, page), 99));
    let mut back = vec![0; BASE_PAGE];
    from.read_exact(&mut back).unwrap();
    drop(guard);
    assert!(holds(page, 2), "LOST the page itself");
    back.iter().enumerate().all(|(i, byte)| *byte == pattern(2, i))
}

#[test]
fn a_spliced_page_is_sent_with_a_guard_and_another_without() {
    let _turn = turn();
    assert!(spliced(true), "the pipe has the bytes of another region");
    assert!(!spliced(false), "without a guard the frame was expected to have another owner");
}

/// A file for direct I/O: devices access memory by themselves. `None` if the file system has none.
fn direct_file() -> Option<File> {
    // The build directory does not exist on machines of the lab.
    let built = option_env!("CARGO_TARGET_TMPDIR").map(PathBuf::from).filter(|path| path.is_dir());
    let path = built
        .unwrap_or_else(std::env::temp_dir)
        .join(format!("pageleap-pins-{}", std::process::id()));
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT);
    let file = options.open(&path).ok()?;
    std::fs::remove_file(path).unwrap();
    Some(file)
}

#[test]
fn process_vm_writev_is_kept_with_guards() {
    const NAME: &str = "process_vm_writev_is_kept_with_guards";
    const ROUNDS: usize = 2000;
    let _turn = turn();
    let mut data = vec![0; BASE_PAGE];
    let (_pools, region) = scene();
    // SAFETY: the page belongs to the region, and all accesses to it are atomic.
    if let Err(error) = unsafe { process_vm(bytes_of(&region, 0)[0].as_ptr(), &mut data, true) } {
        return skip(NAME, &error);
    }
    while_leaping(|region| {
        for round in 0..ROUNDS {
            let page = round % PAGES;
            let bytes = bytes_of(region, page);
            data.iter_mut().enumerate().for_each(|(i, byte)| *byte = pattern(round, i));
            let guard = region.pin(page * BASE_PAGE..(page + 1) * BASE_PAGE).unwrap();
            // SAFETY: the page belongs to the region, and all accesses to it are atomic.
            let written = unsafe { process_vm(bytes[0].as_ptr(), &mut data, true) };
            drop(guard);
            assert_eq!(written.unwrap(), BASE_PAGE);
            assert!(holds(bytes, round), "LOST what was written");
            let guard = region.pin(page * BASE_PAGE..(page + 1) * BASE_PAGE).unwrap();
            // SAFETY: the page belongs to the region, and all accesses to it are atomic.
            let read = unsafe { process_vm(bytes[0].as_ptr(), &mut data, false) };
            drop(guard);
            assert_eq!(read.unwrap(), BASE_PAGE);
            assert!(
                data.iter().enumerate().all(|(i, byte)| *byte == pattern(round, i)),
                "read something else"
            );
        }
    });
}

/// Writes pages to the file and reads them back, without the page cache, while the region leaps.
/// Returns how many pages were wrong.
fn direct_rounds(file: &File, guarded: bool) -> usize {
    const ROUNDS: usize = 200;
    let mut wrong = 0;
    while_leaping(|region| {
        for round in 0..ROUNDS {
            let page = round % PAGES;
            let bytes = bytes_of(region, page);
            let pin =
                || guarded.then(|| region.pin(page * BASE_PAGE..(page + 1) * BASE_PAGE).unwrap());
            // SAFETY: the page belongs to the region, which lives. Only one slice exists at a time,
            // and it is passed to one call; meanwhile this thread accesses the page no other way.
            let slice = || unsafe { std::slice::from_raw_parts_mut(bytes[0].as_ptr(), BASE_PAGE) };
            fill(bytes, round);
            let guard = pin();
            let written = file.write_at(slice(), 0);
            drop(guard);
            assert_eq!(written.unwrap(), BASE_PAGE);
            fill(bytes, round + 1);
            let guard = pin();
            let read = file.read_at(slice(), 0);
            drop(guard);
            match read {
                Ok(BASE_PAGE) => wrong += usize::from(!holds(bytes, round)),
                // On memory file systems the kernel copies. Without a guard the engine `mprotect`
                // may protect the page before the copy or during it.
                Ok(_) if !guarded => wrong += 1,
                Err(error) if !guarded && error.raw_os_error() == Some(libc::EFAULT) => wrong += 1,
                other => panic!("{other:?}"),
            }
        }
    });
    wrong
}

#[test]
fn direct_io_is_kept_with_guards() {
    const NAME: &str = "direct_io_is_kept_with_guards";
    let _turn = turn();
    let Some(file) = direct_file() else { return skip(NAME, &"the file system has no O_DIRECT") };
    assert_eq!(direct_rounds(&file, true), 0, "LOST what a device wrote or read");
    // How many are wrong is chance, and it may be none.
    eprintln!("  without guards: {} of 200 pages wrong", direct_rounds(&file, false));
}
