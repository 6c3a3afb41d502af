//! The contract of a region, as children, other programs, core dumps and the kernel see it.

#[path = "common/calls.rs"]
mod calls;
#[path = "common/children.rs"]
mod children;
mod common;
#[path = "common/moving.rs"]
mod moving;
#[path = "common/refusing.rs"]
mod refusing;

use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};

use calls::pipe;
use children::mapped_in_a_child;
use common::{
    End, StopOnDrop, address, become_nobody, can_follow, case, check_stamp, engines,
    for_page_sizes, is_root, leap, migration, no_core_dump, nodes, own_files, pool_ranges, pools,
    run_case, set_dumpable, skip, soon, stamp, turn, vm_flags,
};
use moving::{BYTES, scene, while_migrating};
use pageleap::backend::{Call, Errno, Linux};
use pageleap::{BASE_PAGE, Engine, Migration, PageSize, Pool, Region, audit};
use refusing::Refusing;

/// The flags of all mappings of pools outside a region: the aliases.
fn aliases(region: &Region) -> Vec<(std::ops::Range<usize>, String)> {
    let own = address(region)..address(region) + region.len();
    let others = pool_ranges().into_iter().filter(|range| !own.contains(&range.start));
    others.flat_map(|range| vm_flags(range.start, range.len())).collect()
}

#[test]
fn children_do_not_get_regions_and_disturb_no_leap() {
    const NAME: &str = "children_do_not_get_regions_and_disturb_no_leap";
    let _turn = turn();
    // The check can find a page: this one is inherited.
    assert_eq!(mapped_in_a_child(&[&raw const CONTROL as usize & !4095]), 1);
    for_page_sizes(NAME, 8, |pools| {
        let page = pools[0].page_size().bytes();
        let region = Region::new(&pools[0], 8 * page).unwrap();
        let views: Vec<usize> = (0..8).map(|i| address(&region) + i * page).collect();
        let aliases: Vec<usize> = aliases(&region).iter().map(|(range, _)| range.start).collect();
        assert_eq!(aliases.len(), 2);
        assert_eq!(mapped_in_a_child(&views) + mapped_in_a_child(&aliases), 0);

        let (stop, leaps) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let mover = scope.spawn(|| {
                while !stop.load(Relaxed) {
                    let round = leaps.load(Relaxed);
                    stamp(&region, 0..8 * page, round);
                    leap(&region, 0..8 * page, &pools[(round as usize + 1) % 2]);
                    check_stamp(&region, 0..8 * page, round);
                    leaps.fetch_add(1, Relaxed);
                }
            });
            let _stop = StopOnDrop(&stop);
            let mut forks = 0;
            while leaps.load(Relaxed) < 50 || forks < 300 {
                assert!(!mover.is_finished(), "the leaps have ended");
                // A child can inherit pages of hugetlb between two calls that move them
                // (docs/protocol.md, section 10).
                let inherited = [mapped_in_a_child(&views), mapped_in_a_child(&aliases)];
                assert_eq!(inherited[1], 0, "a child got part of an alias");
                let may_inherit = region.page_size().is_hugetlb();
                assert!(inherited[0] == 0 || may_inherit, "a child got part of a region");
                forks += 1;
            }
        });
    });
}

/// A word that children inherit.
static CONTROL: AtomicU32 = AtomicU32::new(0);

#[test]
fn aliases_are_kept_from_core_dumps_and_children() {
    let _turn = turn();
    for_page_sizes("aliases_are_kept_from_core_dumps_and_children", 8, |[near, far]| {
        let page = near.page_size().bytes();
        let region = Region::new(&near, 8 * page).unwrap();
        let check = |when: &str| {
            for (range, flags) in aliases(&region) {
                let has = |flag| flags.split(' ').any(|f| f == flag);
                assert!(has("dd") && has("dc"), "{when}: {range:x?} has {flags}");
            }
        };
        check("at first");
        leap(&region, 0..4 * page, &far);
        check("after a leap of one half");
        leap(&region, 0..8 * page, &far);
        check("after a leap");
        leap(&region, 0..8 * page, &near);
        check("after a round trip");
    });
}

/// The number of pages of a range that are in memory and have no entry in the page tables. The
/// kernel may take entries away at any time: while it moves a page, it puts an entry of another
/// kind in its place; and a page that it has swapped out is not in memory.
fn absent(range: &std::ops::Range<usize>) -> usize {
    /// Bits of an entry of the pagemap (Documentation/admin-guide/mm/pagemap.rst).
    const PRESENT: u64 = 1 << 63;
    const OTHER_KIND: u64 = 1 << 62;
    const WRITE_PROTECTED: u64 = 1 << 57;
    let pages = range.len() / BASE_PAGE;
    let (mut entries, mut in_memory) = (vec![0; pages * 8], vec![0u8; pages]);
    let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
    pagemap.read_exact_at(&mut entries, (range.start / BASE_PAGE * 8) as u64).unwrap();
    let start = range.start as *mut libc::c_void;
    // SAFETY: the call writes a byte for each page of the range.
    assert_eq!(unsafe { libc::mincore(start, range.len(), in_memory.as_mut_ptr()) }, 0);
    let is_absent = |(entry, in_memory): (&[u8], &u8)| {
        let entry = u64::from_ne_bytes(entry.try_into().unwrap());
        // A mark of protection without a page is also of another kind.
        let moving = entry & (OTHER_KIND | WRITE_PROTECTED) == OTHER_KIND;
        entry & PRESENT == 0 && !moving && in_memory & 1 == 1
    };
    entries.chunks(8).zip(&in_memory).filter(|page| is_absent(*page)).count()
}

/// A child could inherit a new mapping before the mapping is hidden from children. And frames that
/// are used again must not fault: their page tables have to be filled.
#[test]
fn pages_leap_and_are_given_back_without_new_mappings() {
    let _turn = turn();
    for engine in engines() {
        let made = Arc::new(AtomicU64::new(0));
        let count = made.clone();
        let watched = Arc::new(Refusing::new(Arc::new(Linux), move |request| {
            count.fetch_add(u64::from(request.call == Call::Map), Relaxed);
            None
        }));
        let build =
            |node| Pool::builder(node, BYTES as u64).backend(watched.clone()).build().unwrap();
        let [near, far] = nodes().map(build);
        let region = Region::new(&near, BYTES).unwrap();
        let before = made.swap(0, Relaxed);
        assert!(before >= 2, "each alias is mapped once");
        let report = migration(&region, 0..BYTES, &far).engine(engine).start().unwrap().wait();
        assert!(report.ended.is_completed(), "{report}");
        drop(region);
        assert_eq!(made.load(Relaxed), 0, "{engine}: {report}");
        for alias in pool_ranges() {
            assert_eq!(absent(&alias), 0, "{engine}: entries of the page tables of {alias:x?}");
        }
        assert_eq!(near.free_bytes() + far.free_bytes(), 2 * BYTES as u64);
        assert!(near.verify().unwrap().is_right() && far.verify().unwrap().is_right());
        audit(&[&near, &far], &[]).unwrap();
    }
}

/// The seal that keeps a memory file from being made executable (new in Linux 6.3).
const F_SEAL_EXEC: i32 = 0x20;

#[test]
fn files_are_sealed_and_closed_on_exec() {
    let _turn = turn();
    for_page_sizes("files_are_sealed_and_closed_on_exec", 8, |[near, far]| {
        let page = near.page_size().bytes();
        let region = Region::new(&near, 8 * page).unwrap();
        let job = migration(&region, 0..8 * page, &far).start().unwrap();
        let files = own_files();
        let of = |kind: &str| files.iter().filter(|(_, name)| name.contains(kind)).count();
        assert!(of("memfd") == 2 && of("pipe:") >= 1, "{files:?}");
        for (fd, name) in &files {
            // SAFETY: the call takes numbers only.
            let flags = unsafe { libc::fcntl(*fd, libc::F_GETFD) };
            // The job may have closed the descriptors of its tracker by now.
            assert!(flags == libc::FD_CLOEXEC || flags == -1 && !name.contains("memfd"), "{name}");
        }
        let list = run("ls", &["-l", "/proc/self/fd"]);
        let list = String::from_utf8(list.stdout).unwrap();
        assert!(list.contains(" 1 -> "), "{list}");
        let is_ours = |line: &str| {
            // An event is a pipe whose one descriptor both reads and writes it.
            let is_event = line.starts_with("lrwx") && line.contains("pipe:");
            is_event || ["memfd", "userfaultfd", "pagemap"].iter().any(|kind| line.contains(kind))
        };
        assert!(!list.lines().any(is_ours), "{list}");

        for (fd, name) in files.iter().filter(|(_, name)| name.contains("memfd")) {
            // SAFETY: the calls take numbers only. Those that would change the file are refused,
            // which is what is checked.
            unsafe {
                let seals = libc::fcntl(*fd, libc::F_GET_SEALS);
                let wanted = libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
                assert_eq!(seals & !F_SEAL_EXEC, wanted, "{name}: {seals:#x}");
                for bytes in [0, 4 * page, 16 * page] {
                    assert_eq!(libc::ftruncate(*fd, bytes as i64), -1);
                    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EPERM));
                }
                assert_eq!(libc::fcntl(*fd, libc::F_ADD_SEALS, libc::F_SEAL_WRITE), -1);
            }
        }
        assert!(job.wait().ended.is_completed());
    });
}

/// Runs a program of the system, with messages in English.
fn run(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).env("LC_ALL", "C").output().expect(program)
}

#[test]
fn other_processes_of_the_user_do_not_open_memory_files_by_accident() {
    const NAME: &str = "other_processes_of_the_user_do_not_open_memory_files_by_accident";
    if case().is_none() {
        let _turn = turn();
        if !is_root() {
            return skip(NAME, &"only root can become a user whom permissions bind");
        }
        let (end, text) = run_case(NAME, "victim");
        return assert_eq!(end, End::Exited(0), "{text}");
    }
    become_nobody();
    set_dumpable(true);
    let [pool, _far] = pools(PageSize::Base, BASE_PAGE as u64).unwrap();
    let region = Region::new(&pool, BASE_PAGE).unwrap();
    stamp(&region, 0..BASE_PAGE, 1);
    let directory = format!("/proc/{}/fd", std::process::id());
    let memory = own_files().into_iter().filter(|(_, name)| name.contains("memfd"));
    let files: Vec<String> = memory.map(|(fd, _)| format!("{directory}/{fd}")).collect();
    assert_eq!(files.len(), 2);
    for path in &files {
        assert_eq!(std::fs::metadata(path).unwrap().mode() & 0o777, 0);
        let head = run("head", &["-c", "1", path]);
        let text = String::from_utf8_lossy(&head.stderr).into_owned();
        assert!(!head.status.success() && text.contains("Permission denied"), "{text}");
    }
    // The mode protects against accidents only: the same user can change it. The documentation says
    // so (docs/memory.md).
    let file = &files[0];
    assert!(run("chmod", &["600", file]).status.success());
    assert!(run("head", &["-c", "1", file]).status.success());
    set_dumpable(false);
    assert!(
        !run("head", &["-c", "1", file]).status.success(),
        "PR_SET_DUMPABLE=0, which the documentation names as the remedy, does not help"
    );
}

#[test]
fn what_follows_writes_is_closed_on_exec() {
    const NAME: &str = "what_follows_writes_is_closed_on_exec";
    let _turn = turn();
    if !can_follow() {
        return skip(NAME, &"the engine precopy does not work here");
    }
    let (pools, region) = scene();
    for engine in engines() {
        // At a byte per second the job pauses with all its descriptors open.
        let job = migration(&region, 0..BYTES, &pools[1]).engine(engine).rate_limit(1);
        let job = job.start().unwrap();
        assert!(soon(|| job.progress().bytes_migrated > 0));
        let mut follows = 0;
        for (fd, name) in own_files() {
            // SAFETY: the call takes numbers only.
            let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
            assert_eq!(flags, libc::FD_CLOEXEC, "{engine}: {name}");
            follows += usize::from(name.contains("userfaultfd") || name.contains("pagemap"));
        }
        job.cancel();
        let report = job.wait();
        assert!(
            follows > 0 || report.engine.engine().and_then(Engine::needs).is_none(),
            "{engine}: {report}"
        );
        leap(&region, 0..BYTES, &pools[0]);
    }
}

#[test]
fn a_read_into_a_moving_area_succeeds_or_fails_and_keeps_what_it_wrote() {
    let _turn = turn();
    const CHUNK: usize = 48 << 10;
    while_migrating(|region| {
        let (from, to) = pipe();
        // SAFETY: all accesses to the region have this size.
        let bytes = unsafe { region.atomics_u8(0..BYTES) }.unwrap();
        let (mut whole, mut parts, mut refused) = (0, 0, 0);
        for round in 1..=1500usize {
            let data: Vec<u8> = (0..CHUNK).map(|i| (i * 31 + round) as u8).collect();
            // At odd offsets, so that calls begin and end within pages.
            let at = (round * 4711) % (BYTES - CHUNK);
            // SAFETY: the first call reads `CHUNK` bytes of a vector. The second writes at most as
            // many bytes of the region as are left, and all accesses to these are atomic.
            unsafe {
                assert_eq!(
                    libc::write(to.as_raw_fd(), data.as_ptr().cast(), CHUNK),
                    CHUNK as isize
                );
                let mut done = 0;
                while done < CHUNK {
                    let got = libc::read(
                        from.as_raw_fd(),
                        bytes[at + done].as_ptr().cast(),
                        CHUNK - done,
                    );
                    if got < 0 {
                        assert_eq!(*libc::__errno_location(), libc::EFAULT);
                        refused += 1;
                        std::thread::yield_now();
                        continue;
                    }
                    assert!(got > 0);
                    if got as usize == CHUNK {
                        whole += 1
                    } else {
                        parts += 1
                    }
                    done += got as usize;
                }
            }
            let lost = (0..CHUNK).filter(|i| bytes[at + i].load(Relaxed) != data[*i]).count();
            assert_eq!(lost, 0, "LOST {lost} bytes that read(2) wrote in round {round}");
        }
        eprintln!("  {whole} whole reads, {parts} parts, {refused} EFAULT");
    });
}

/// The library can neither give up the commit nor finish it: the address would have two owners, or
/// the other thread's memory would be destroyed.
#[test]
fn memory_of_others_where_a_region_was_ends_the_process() {
    const NAME: &str = "memory_of_others_where_a_region_was_ends_the_process";
    static REGION: AtomicUsize = AtomicUsize::new(0);
    let _turn = turn();
    if case().is_none() {
        let (end, text) = run_case(NAME, "child");
        assert_eq!(end, End::Killed(libc::SIGABRT), "{text}");
        assert!(text.contains("another thread has mapped memory into a region"), "{text}");
        return;
    }
    no_core_dump();
    let backend = Arc::new(Refusing::new(Arc::new(Linux), |request| {
        (request.call == Call::Exchange && request.addr == REGION.load(Relaxed)).then(|| {
            let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: the mapping replaces the region's only page. That is what the test is about:
            // it looks as if the refused call had unmapped the page, and the kernel had then given
            // the address to another thread.
            let other = unsafe {
                libc::mmap(request.addr as *mut _, BASE_PAGE, libc::PROT_NONE, flags, -1, 0)
            };
            assert_eq!(other as usize, request.addr);
            Errno(libc::ENOMEM)
        })
    }));
    let pools = nodes().map(|node| {
        Pool::builder(node, BASE_PAGE as u64).backend(backend.clone()).build().unwrap()
    });
    let region = Region::new(&pools[0], BASE_PAGE).unwrap();
    REGION.store(address(&region), Relaxed);
    let job = Migration::new().range(&region, 0..BASE_PAGE, &pools[1]).engine(Engine::Mprotect);
    let report = job.start().unwrap().wait();
    panic!("{report}");
}

#[test]
fn a_write_from_a_moving_area_always_succeeds() {
    let _turn = turn();
    while_migrating(|region| {
        let (from, to) = pipe();
        let words = region.atomics_u64(0..BYTES).unwrap();
        for round in 1..=1500u64 {
            let at = (round as usize * 997) % (words.len() - 512);
            words[at..at + 512].iter().for_each(|word| word.store(round, Relaxed));
            let mut back = [0u64; 512];
            // SAFETY: the first call reads 512 words of the region, the second writes an array of
            // as many. The pipe is empty and has room, so neither call waits.
            unsafe {
                let put = libc::write(to.as_raw_fd(), words[at].as_ptr().cast(), 4096);
                assert_eq!(put, 4096, "{}", std::io::Error::last_os_error());
                assert_eq!(libc::read(from.as_raw_fd(), back.as_mut_ptr().cast(), 4096), 4096);
            }
            assert!(back.iter().all(|word| *word == round), "round {round}");
        }
    });
}

/// The kernel finds a process-private futex by its address, so waiters on moving memory are woken.
#[test]
fn private_futexes_keep_their_waiters() {
    let _turn = turn();
    let private = libc::FUTEX_PRIVATE_FLAG;
    while_migrating(|region| {
        // SAFETY: all accesses to the region have this size.
        let word = unsafe { &region.atomics_u32(4096..4100).unwrap()[0] };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..2000u32 {
                    while word.load(Relaxed) == 2 * round {
                        // SAFETY: the call reads the word, which lives in the region. It sleeps
                        // only while the word has this value.
                        unsafe {
                            let wait = libc::FUTEX_WAIT | private;
                            libc::syscall(libc::SYS_futex, word.as_ptr(), wait, 2 * round, 0usize);
                        }
                    }
                    word.store(2 * round + 2, Relaxed);
                }
            });
            for round in 0..2000u32 {
                word.store(2 * round + 1, Relaxed);
                assert!(soon(|| {
                    // SAFETY: the call uses the address only, to find sleeping threads.
                    unsafe {
                        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | private, 1)
                    };
                    word.load(Relaxed) == 2 * round + 2
                }));
            }
        });
    });
}

/// With `MADV_DOFORK`, children inherit a region. When the region leaps, such a child keeps the old
/// frames, and does not see later writes.
#[test]
fn a_region_that_is_given_to_children_still_leaps() {
    const NAME: &str = "a_region_that_is_given_to_children_still_leaps";
    if case().is_none() {
        let (end, output) = run_case(NAME, "fork");
        assert_eq!(end, common::End::Exited(0), "{output}");
        return;
    }
    let [near, far]: [Pool; 2] = pools(PageSize::Base, BYTES as u64).unwrap();
    let region = Region::new(&near, BYTES).unwrap();
    // SAFETY: the range is the whole region. The advice changes no contents.
    let advised =
        unsafe { libc::madvise(address(&region) as *mut libc::c_void, BYTES, libc::MADV_DOFORK) };
    assert_eq!(advised, 0);
    stamp(&region, 0..BYTES, 1);
    leap(&region, 0..BYTES, &far);
    assert_eq!(mapped_in_a_child(&[address(&region), address(&region) + BYTES - 4096]), 2);
    leap(&region, 0..BYTES, &near);
    check_stamp(&region, 0..BYTES, 1);
}
