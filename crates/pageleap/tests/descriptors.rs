//! A program closes all descriptors, as daemons do, or uses the library's numbers for files of its
//! own: no page is lost, no file of the program is touched, nothing hangs, and the error says it.
//!
//! Each case runs in a child, because the descriptors are those of the whole process.

mod common;
#[path = "common/in_place.rs"]
mod in_place;
#[path = "common/mapping.rs"]
mod mapping;
#[path = "common/moving.rs"]
mod moving;
#[path = "common/refusing.rs"]
mod refusing;

use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use common::{check_stamp, engines_for, leap, migration, pools, soon, stamp, turn};
use moving::{FINE, cases};
use pageleap::backend::{Call, Errno, Linux};
use pageleap::{BASE_PAGE, Ended, EngineChoice, Error, PageSize, Pool, Reason, Region};
use refusing::Refusing;

const PAGES: usize = 16;

/// What other code of the process does.
#[derive(Clone, Copy, Debug)]
enum Closing {
    /// It closes all descriptors but the first three.
    All,
    /// Its own file gets each of their numbers.
    Reuses,
    /// A readable event of its own gets the numbers of the library's events, and only those.
    Events,
}

/// The numbers of all descriptors but the first three.
fn numbers() -> Vec<RawFd> {
    let entries: Vec<_> = fs::read_dir("/proc/self/fd").unwrap().flatten().collect();
    let numbers = entries.iter().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    // The directory itself was one of them.
    numbers.filter(|number: &RawFd| *number > 2 && is_open(*number)).collect()
}

fn is_open(number: RawFd) -> bool {
    // SAFETY: the call takes no pointers.
    unsafe { libc::fcntl(number, libc::F_GETFD) >= 0 }
}

/// A file of the program's, whose bytes and descriptors nobody else may touch.
struct Own {
    file: fs::File,
    numbers: Vec<RawFd>,
    contents: Vec<u8>,
}

impl Own {
    /// Takes over these numbers.
    fn new(bytes: usize, numbers: &[RawFd]) -> Own {
        // SAFETY: the name is a C string, and the descriptor is new.
        let fd = unsafe { libc::memfd_create(c"the program's own".as_ptr(), libc::MFD_CLOEXEC) };
        Own::with((0..bytes).map(|at| (at % 251) as u8 + 1).collect(), fd, numbers)
    }

    /// An event with a count of one.
    fn event(numbers: &[RawFd]) -> Own {
        // SAFETY: the call takes no pointers, and the descriptor is new.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        Own::with(1u64.to_ne_bytes().to_vec(), fd, numbers)
    }

    fn with(contents: Vec<u8>, fd: RawFd, numbers: &[RawFd]) -> Own {
        assert!(fd >= 0);
        // SAFETY: new, and nobody else has it.
        let file = unsafe { <fs::File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
        (&file).write_all(&contents).unwrap();
        for number in numbers {
            // SAFETY: the call takes no pointers.
            assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), *number) }, *number);
        }
        Own { file, numbers: numbers.to_vec(), contents }
    }

    /// It is as it was.
    fn check(&mut self) {
        let mut found = vec![0; self.contents.len() + 1];
        // Events have no position.
        let _ = self.file.seek(SeekFrom::Start(0));
        let read = self.file.read(&mut found).unwrap();
        assert!(found[..read] == self.contents, "the program's file has been written to");
        for number in &self.numbers {
            assert!(is_open(*number), "the program's descriptor {number} has been closed");
        }
    }
}

/// Whether a number of the library's stands for an event.
fn is_event(number: RawFd) -> bool {
    let link = fs::read_link(format!("/proc/self/fd/{number}")).unwrap();
    link.to_string_lossy().starts_with("pipe:")
}

fn close(closing: Closing, numbers: &[RawFd], bytes: usize) -> Option<Own> {
    match closing {
        Closing::All => {
            // SAFETY: the call takes no pointers.
            numbers.iter().for_each(|number| _ = unsafe { libc::close(*number) });
            None
        }
        Closing::Reuses => Some(Own::new(bytes, numbers)),
        Closing::Events => {
            let events: Vec<_> = numbers.iter().copied().filter(|one| is_event(*one)).collect();
            Some(Own::event(&events))
        }
    }
}

fn is_lost<T>(result: Result<T, Error>, closing: Closing) {
    let Err(error) = result else { panic!("{closing:?}: nothing was noticed") };
    let Error::DescriptorLost { is_reused, .. } = error else { panic!("{closing:?}: {error}") };
    assert_eq!(is_reused, !matches!(closing, Closing::All), "{error}");
}

/// What the library has opened since.
fn since(before: &[RawFd]) -> Vec<RawFd> {
    numbers().into_iter().filter(|number| !before.contains(number)).collect()
}

/// The mappings of memory files of pools. Each of them keeps all memory of its file.
fn mapped() -> Vec<String> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:pageleap")).map(str::to_owned).collect()
}

/// Before a job: nothing begins, all memory stays, and none is left when its owners have gone.
fn between_jobs(closing: Closing) {
    let _turn = turn();
    for page in common::PAGE_SIZES {
        let bytes = PAGES * page.bytes();
        let (before, mapped_before) = (numbers(), mapped());
        let Ok(pools) = pools(page, 2 * bytes as u64) else { continue };
        let mut region = Region::new(&pools[0], bytes).unwrap();
        stamp(&region, 0..bytes, 1);
        leap(&region, 0..bytes, &pools[1]);
        let mut own = close(closing, &since(&before), bytes);
        for engine in [EngineChoice::Auto].into_iter().chain(engines_for(page)) {
            is_lost(migration(&region, 0..bytes, &pools[0]).engine(engine).start(), closing);
        }
        is_lost(Region::new(&pools[0], bytes), closing);
        check_stamp(&region, 0..bytes, 1);
        stamp(&region, 0..bytes, 2);
        check_stamp(&region, 0..bytes, 2);
        let _ = pools[1].verify();
        region.discard(0..page.bytes()).unwrap();
        check_stamp(&region, page.bytes()..bytes, 2);
        drop(region);
        drop(pools);
        let mut left = mapped();
        left.retain(|mapping| !mapped_before.contains(mapping));
        assert!(left.is_empty(), "{closing:?}, {page:?}: {left:#?}");
        own.iter_mut().for_each(Own::check);
        drop(own);
        // A new pool works.
        let pools = common::pools(page, bytes as u64).unwrap();
        let region = Region::new(&pools[0], bytes).unwrap();
        stamp(&region, 0..bytes, 3);
        leap(&region, 0..bytes, &pools[1]);
        check_stamp(&region, 0..bytes, 3);
    }
}

/// While a job runs: it ends, and all memory stays.
fn during_a_job(closing: Closing) {
    let _turn = turn();
    for page in [PageSize::Base, PageSize::Huge2M] {
        let bytes = PAGES * page.bytes();
        for engine in engines_for(page) {
            let before = numbers();
            let Ok(pools) = pools(page, bytes as u64) else { continue };
            run_and_close(closing, engine, &before, &pools, bytes);
        }
    }
}

/// Frames that pages have left are made ready for others, and zeroed: not in another file.
fn takes_no_frames(pools: &[Pool; 2], bytes: usize, closing: Closing) {
    pools.iter().for_each(|pool| is_lost(Region::new(pool, bytes), closing));
}

fn run_and_close(
    closing: Closing,
    engine: EngineChoice,
    before: &[RawFd],
    pools: &[Pool; 2],
    bytes: usize,
) {
    let region = Region::new(&pools[0], bytes).unwrap();
    stamp(&region, 0..bytes, 1);
    // It would take an hour.
    let page = bytes / PAGES;
    let rate = (bytes / 3600).max(1) as u64;
    let job = migration(&region, 0..bytes, &pools[1]).engine(engine).area_bytes(page);
    let job = job.rate_limit(rate).start().unwrap();
    assert!(soon(|| job.progress().bytes_migrated > 0));
    let mut own = close(closing, &since(before), bytes);
    job.cancel();
    let report = job.wait();
    assert_eq!(report.pages.total() as usize, bytes / page.max(BASE_PAGE), "{report}");
    check_stamp(&region, 0..bytes, 1);
    if matches!(closing, Closing::Events) {
        // The next job has its own.
        leap(&region, 0..bytes, &pools[1]);
    } else {
        is_lost(migration(&region, 0..bytes, &pools[1]).start(), closing);
        drop(region);
        takes_no_frames(pools, bytes, closing);
    }
    own.iter_mut().for_each(Own::check);
}

/// The same, and the job goes on.
fn in_the_middle(closing: Closing) {
    let _turn = turn();
    for page in [PageSize::Base, PageSize::Huge2M] {
        let bytes = PAGES * page.bytes();
        for engine in engines_for(page) {
            let before = numbers();
            let Ok(pools) = pools(page, bytes as u64) else { continue };
            let region = Region::new(&pools[0], bytes).unwrap();
            stamp(&region, 0..bytes, 1);
            // Half of the pages are done when the job comes to the guard.
            let guard = region.pin(0..bytes / 2).unwrap();
            let job = migration(&region, 0..bytes, &pools[1]).engine(engine);
            let job =
                job.area_bytes(page.bytes()).pin_patience(std::time::Duration::from_secs(3600));
            let job = job.start().unwrap();
            assert!(soon(|| job.progress().bytes_migrated == (bytes / 2) as u64));
            let mut own = close(closing, &since(&before), bytes);
            drop(guard);
            let report = job.wait();
            if matches!(closing, Closing::Events) {
                // The userfaultfd is still there, and the thread that reads its messages.
                assert!(report.ended.is_completed(), "{engine:?}: {report}");
                check_stamp(&region, 0..bytes, 1);
                own.iter_mut().for_each(Own::check);
                continue;
            }
            let Ended::Failed(Error::DescriptorLost { .. }) = &report.ended else {
                panic!("{engine:?}: {report}")
            };
            let lost = report.runs.iter().filter(|run| run.reason == Some(Reason::DescriptorLost));
            assert_eq!(lost.map(|run| run.range.len()).sum::<usize>(), bytes / 2, "{report}");
            check_stamp(&region, 0..bytes, 1);
            drop(region);
            takes_no_frames(&pools, bytes, closing);
            own.iter_mut().for_each(Own::check);
        }
    }
}

/// One of two userfaultfds of a job is closed: the report names that one.
fn one_of_two() {
    let _turn = turn();
    let bytes = PAGES * BASE_PAGE;
    let before = numbers();
    let pools = pools(PageSize::Base, bytes as u64).unwrap();
    let region = Region::new(&pools[0], bytes).unwrap();
    let guard = region.pin(0..bytes / 2).unwrap();
    let job = migration(&region, 0..bytes, &pools[1]).area_bytes(BASE_PAGE);
    let job = job.pin_patience(std::time::Duration::from_secs(3600)).start().unwrap();
    assert!(soon(|| job.progress().bytes_migrated == (bytes / 2) as u64));
    let is_tracker = |number: &RawFd| {
        let link = fs::read_link(format!("/proc/self/fd/{number}")).unwrap();
        link.to_string_lossy().contains("userfaultfd")
    };
    let mut trackers: Vec<_> = since(&before).into_iter().filter(is_tracker).collect();
    trackers.sort_unstable();
    // The second one is that of the engine for areas for which few threads wait.
    let [_, closed] = trackers[..] else { return println!("SKIP one engine moves all areas here") };
    close(Closing::All, &[closed], 0);
    drop(guard);
    let report = job.wait();
    let Ended::Failed(Error::DescriptorLost { descriptor, .. }) = report.ended else {
        panic!("{report}")
    };
    assert_eq!(descriptor, closed, "{report}");
}

/// In a window, at the call that needs the memory files: the attempt ends, and all memory stays.
fn in_a_window() {
    let _turn = turn();
    let page = PageSize::Huge2M;
    for engine in engines_for(page) {
        let files = Arc::new(Mutex::new(Vec::new()));
        let start = Arc::new(AtomicUsize::new(0));
        let (to_close, at) = (files.clone(), start.clone());
        let backend = Arc::new(Refusing::new(Arc::new(Linux), move |request| {
            if request.call == Call::Map && request.addr == at.load(SeqCst) {
                let numbers = std::mem::take(&mut *to_close.lock().unwrap());
                _ = close(Closing::All, &numbers, 0);
            }
            None
        }));
        let before = numbers();
        let pool = |node| {
            let pool = Pool::builder(node, page.bytes() as u64).page_size(page);
            pool.backend(backend.clone()).build()
        };
        let [Ok(from), Ok(to)] = common::nodes().map(pool) else { continue };
        *files.lock().unwrap() = since(&before);
        let region = Region::new(&from, page.bytes()).unwrap();
        stamp(&region, 0..page.bytes(), 1);
        start.store(common::address(&region), SeqCst);
        let report = migration(&region, 0..page.bytes(), &to).engine(engine).start().unwrap();
        let report = report.wait();
        assert!(files.lock().unwrap().is_empty(), "{engine:?}: no call needed a file");
        assert!(matches!(report.ended, Ended::Failed(_)), "{engine:?}: {report}");
        assert_eq!(report.pages.migrated, 0, "{engine:?}: {report}");
        check_stamp(&region, 0..page.bytes(), 1);
        stamp(&region, 0..page.bytes(), 2);
        check_stamp(&region, 0..page.bytes(), 2);
    }
}

/// What the library's numbers stand for, when other code has used them again for something that
/// cannot be mapped.
#[derive(Clone, Copy, Debug)]
enum Unmappable {
    /// The numbers are free.
    Nothing,
    /// The same, and a call has left a hole before.
    NothingAndHole,
    /// The kernel asks the socket when the old mapping is gone.
    Socket,
    /// The kernel refuses it as it refuses what may not be written.
    Pipe,
    /// The kernel refuses it as such.
    Directory,
}

/// Makes these numbers stand for such a file. Events keep theirs: a service whose event is lost ends
/// up to half a second later, which other tests look at.
fn replace(by: Unmappable, numbers: &[RawFd]) {
    let mut pair = [0; 2];
    // SAFETY: the calls get an array of two, or a C string.
    let number = unsafe {
        match by {
            Unmappable::Nothing | Unmappable::NothingAndHole => {
                close(Closing::All, numbers, 0);
                return;
            }
            Unmappable::Socket => {
                assert_eq!(
                    libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr()),
                    0
                );
                pair[0]
            }
            Unmappable::Pipe => {
                assert_eq!(libc::pipe(pair.as_mut_ptr()), 0);
                pair[0]
            }
            Unmappable::Directory => libc::open(c"/".as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY),
        }
    };
    for old in numbers.iter().filter(|one| !is_event(**one)) {
        // SAFETY: the call takes no pointers.
        assert_eq!(unsafe { libc::dup2(number, *old) }, *old);
    }
}

/// How many files the process may open, as it is set. The hard limit stays.
fn set_open_files(most: Option<libc::rlim_t>) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the calls read and write one structure.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        limit.rlim_cur = most.unwrap_or(limit.rlim_max);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
}

/// The program lowers its limit while a job of each engine runs: the job goes on as far as it can,
/// and ends.
fn few_files_in_regions(most: libc::rlim_t) {
    let _turn = turn();
    for page in common::PAGE_SIZES {
        let bytes = PAGES * page.bytes();
        for engine in engines_for(page) {
            let Ok(pools) = pools(page, bytes as u64) else { continue };
            let region = Region::new(&pools[0], bytes).unwrap();
            stamp(&region, 0..bytes, 1);
            // Half of the pages are done when the job comes to the guard.
            let guard = region.pin(0..bytes / 2).unwrap();
            let job = migration(&region, 0..bytes, &pools[1]).engine(engine);
            let job =
                job.area_bytes(page.bytes()).pin_patience(std::time::Duration::from_secs(3600));
            let job = job.start().unwrap();
            assert!(soon(|| job.progress().bytes_migrated == (bytes / 2) as u64));
            set_open_files(Some(most));
            drop(guard);
            let report = job.wait();
            set_open_files(None);
            assert_eq!(report.pages.total() as usize, PAGES, "{engine:?}: {report}");
            check_stamp(&region, 0..bytes, 1);
            stamp(&region, 0..bytes, 2);
            leap(&region, 0..bytes, &pools[1]);
            check_stamp(&region, 0..bytes, 2);
        }
    }
}

/// The same for memory in place.
fn few_files_in_place(most: libc::rlim_t) {
    let _turn = turn();
    if let Some(error) = in_place::why_not() {
        return println!("SKIP {error}");
    }
    for page in in_place::KINDS {
        let bytes = 8 * in_place::HUGE;
        let memory = in_place::memory(bytes, page);
        let node = common::nodes()[1];
        memory.fill(node);
        let job = in_place::migration(&memory, node).rate_limit(bytes as u64);
        let job = job.start().unwrap();
        assert!(soon(|| job.progress().bytes_migrated > 0));
        set_open_files(Some(most));
        let report = job.wait();
        set_open_files(None);
        assert!(in_place::moved(&report) > 0, "{report}");
        memory.check();
    }
}

/// Whether children and core dumps leave out the mapping that begins at an address, by its flags.
fn hidden_from(start: usize) -> Vec<String> {
    // The region may be the first mapping of the process.
    let smaps = format!("\n{}", fs::read_to_string("/proc/self/smaps").unwrap());
    let (_, here) = smaps.split_once(&format!("\n{start:x}-")).expect("it is mapped");
    let line = here.lines().find_map(|line| line.strip_prefix("VmFlags: "));
    let flags = line.unwrap().split_whitespace().filter(|flag| ["dc", "dd"].contains(flag));
    flags.map(str::to_owned).collect()
}

/// In a window whose page tables do not come by an exchange, at the call that maps the file: the
/// attempt ends, nobody waits, and all memory stays.
fn at_the_last_call(by: Unmappable) {
    let _turn = turn();
    for page in common::PAGE_SIZES {
        for engine in engines_for(page) {
            replace_at_the_last_call(by, page, engine);
        }
    }
}

fn replace_at_the_last_call(by: Unmappable, page: PageSize, engine: EngineChoice) {
    let start = Arc::new(AtomicUsize::new(0));
    let before = Arc::new(Mutex::new(None::<Vec<RawFd>>));
    let (at, to_keep) = (start.clone(), before.clone());
    let backend = Arc::new(Refusing::new(Arc::new(Linux), move |request| {
        if request.addr != at.load(SeqCst) {
            return None;
        }
        if request.call == Call::Map
            && let Some(before) = to_keep.lock().unwrap().take()
        {
            replace(by, &since(&before));
            if matches!(by, Unmappable::NothingAndHole) {
                // SAFETY: the window is closed, and the call that comes would replace this.
                unsafe { libc::munmap(request.addr as *mut _, page.bytes()) };
                return Some(Errno(libc::ENOMEM));
            }
        }
        (request.call == Call::Exchange).then_some(Errno(libc::EINVAL))
    }));
    let now = numbers();
    let pool = |node| {
        let pool = Pool::builder(node, page.bytes() as u64).page_size(page);
        pool.backend(backend.clone()).build()
    };
    let [Ok(from), Ok(to)] = common::nodes().map(pool) else { return };
    let region = Region::new(&from, page.bytes()).unwrap();
    stamp(&region, 0..page.bytes(), 1);
    let hidden = hidden_from(common::address(&region));
    *before.lock().unwrap() = Some(now);
    start.store(common::address(&region), SeqCst);
    let report = migration(&region, 0..page.bytes(), &to).engine(engine).start().unwrap().wait();
    assert!(before.lock().unwrap().is_none(), "{engine:?}: no call needed a file");
    check_stamp(&region, 0..page.bytes(), 1);
    stamp(&region, 0..page.bytes(), 2);
    check_stamp(&region, 0..page.bytes(), 2);
    assert_eq!(
        report.pages.total() as usize,
        page.bytes() / BASE_PAGE.max(page.bytes()),
        "{report}"
    );
    let (hidden, was) = (hidden_from(common::address(&region)), hidden);
    assert_eq!(hidden, was, "{engine:?}: left out of children (dc), of core dumps (dd)");
    let closing = match by {
        Unmappable::Nothing | Unmappable::NothingAndHole => Closing::All,
        _ => Closing::Reuses,
    };
    takes_no_frames(&[from, to], page.bytes(), closing);
}

/// Memory in place: the job ends, all memory stays, and another job has descriptors of its own.
fn in_place(closing: Closing) {
    let _turn = turn();
    if let Some(error) = in_place::why_not() {
        return println!("SKIP {error}");
    }
    for page in in_place::KINDS {
        let bytes = 8 * in_place::HUGE;
        let memory = in_place::memory(bytes, page);
        let node = common::nodes()[1];
        memory.fill(node);
        let before = numbers();
        let job = in_place::migration(&memory, node).rate_limit((bytes / 3600) as u64);
        let job = job.start().unwrap();
        assert!(soon(|| job.progress().bytes_migrated > 0));
        // The job waits now, to keep to its rate: nothing is under way.
        let mut own = close(closing, &since(&before), bytes);
        job.cancel();
        let report = job.wait();
        assert!(in_place::moved(&report) > 0, "{report}");
        memory.check();
        own.iter_mut().for_each(Own::check);
        drop(own);
        let report = in_place::leap(&memory, node).unwrap().wait();
        assert!(report.ended.is_completed(), "{report}");
        memory.check();
    }
}

/// The cases of every way of closing all descriptors.
macro_rules! everywhere {
    ($closing:expr) => {
        [
            ("between jobs", (|| between_jobs($closing)) as fn(), FINE),
            ("during a job", || during_a_job($closing), FINE),
            ("in the middle", || in_the_middle($closing), FINE),
            ("in place", || in_place($closing), FINE),
        ]
    };
}

#[test]
fn closed_descriptors_are_noticed_and_no_page_is_lost() {
    let test = "closed_descriptors_are_noticed_and_no_page_is_lost";
    let others: [moving::Case; 2] =
        [("in a window", in_a_window, FINE), ("one of two", one_of_two, FINE)];
    cases(test, &[&everywhere!(Closing::All)[..], &others].concat());
}

#[test]
fn numbers_that_are_used_again_belong_to_the_program() {
    let test = "numbers_that_are_used_again_belong_to_the_program";
    cases(test, &everywhere!(Closing::Reuses));
}

#[test]
fn a_lost_event_ends_no_service_and_another_one_is_not_signalled() {
    cases(
        "a_lost_event_ends_no_service_and_another_one_is_not_signalled",
        &[
            ("during a job", || during_a_job(Closing::Events), FINE),
            ("in the middle", || in_the_middle(Closing::Events), FINE),
            ("in place", || in_place(Closing::Events), FINE),
        ],
    );
}

#[test]
fn numbers_of_files_that_cannot_be_mapped_end_a_window() {
    cases(
        "numbers_of_files_that_cannot_be_mapped_end_a_window",
        &[
            ("free", || at_the_last_call(Unmappable::Nothing), FINE),
            ("free, and a hole", || at_the_last_call(Unmappable::NothingAndHole), FINE),
            ("a socket", || at_the_last_call(Unmappable::Socket), FINE),
            ("a pipe", || at_the_last_call(Unmappable::Pipe), FINE),
            ("a directory", || at_the_last_call(Unmappable::Directory), FINE),
        ],
    );
}

#[test]
fn a_limit_below_the_open_files_ends_no_service() {
    // The kernel refuses to look at two descriptors, or at one.
    cases(
        "a_limit_below_the_open_files_ends_no_service",
        &[
            ("regions, one file", || few_files_in_regions(1), FINE),
            ("regions, no file", || few_files_in_regions(0), FINE),
            ("in place, one file", || few_files_in_place(1), FINE),
            ("in place, no file", || few_files_in_place(0), FINE),
        ],
    );
}
