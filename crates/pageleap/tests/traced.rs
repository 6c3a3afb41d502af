//! Jobs of a program that another process traces. The tracer stops the job's threads, and reads the
//! memory that moves meanwhile: areas move in ways in which it need not wait for these threads.

mod common;
#[path = "common/in_place.rs"]
mod in_place;
#[path = "common/mapping.rs"]
mod mapping;
#[path = "common/tracing.rs"]
mod tracing;

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use common::{
    StopOnDrop, address, case, engines_for, ladder, nodes, pools, skip, skip_page_size, soon,
    works, works_for,
};
use pageleap::backend::Errno;
use pageleap::{
    BASE_PAGE, Engine, EngineChoice, MemoryEngine, Migration, PageSize, Reason, Region, Report,
    audit,
};
use tracing::{LOOK, Program, Tracer, check_stayed, moved_for_tracer, ready, warns_of};

// Regions
// ------------------------------------------------------------------------------------------------

/// Runs a test of this binary as a program, and traces it as soon as it has said where its pages
/// are. Returns `None` if the kernel allows nobody to trace, or the program skips the test.
fn traced(test: &str, case: &str) -> Option<(Program, Tracer)> {
    let mut program = Program::start(test, case);
    let Some(watched) = watched(&program.wait_until_ready()) else {
        program.go_on();
        program.succeed();
        return None;
    };
    match Tracer::attach(program.pid(), watched) {
        Ok(tracer) => {
            program.go_on();
            Some((program, tracer))
        }
        Err(errno) => {
            skip(test, &format!("ptrace is refused: {}", Errno(errno)));
            program.kill();
            None
        }
    }
}

/// Traces a program until it says that all has moved, while its memory is as it was.
fn end(mut program: Program, tracer: Tracer) {
    assert!(program.wait_until_ready().is_empty());
    let met = tracer.leave();
    program.go_on();
    program.succeed();
    assert!(met.stops > 20 && met.wrong == 0, "{met:?}");
}

/// What a tracer reads of a program: some pages at a distance from each other. Those behind the
/// written ones are empty.
fn watched(said: &[usize]) -> Option<Vec<(usize, Vec<u8>)>> {
    let [start, distance, written, empty] = said[..] else { return None };
    let contents = |page: usize| match page < written {
        true => (0..BASE_PAGE / 8).flat_map(|word| stamped(page, word).to_ne_bytes()).collect(),
        false => vec![0; BASE_PAGE],
    };
    Some((0..written + empty).map(|page| (start + page * distance, contents(page))).collect())
}

/// The word of a page that a program has written.
fn stamped(page: usize, word: usize) -> u64 {
    (page as u64 + 1) << 32 | word as u64
}

/// The words at the beginning of the first pages of a region.
fn words(region: &Region, pages: usize) -> impl Iterator<Item = (&AtomicU64, u64)> {
    let page_bytes = region.page_size().bytes();
    (0..pages).flat_map(move |page| {
        let at = page * page_bytes;
        let words = region.atomics_u64(at..at + BASE_PAGE).unwrap();
        words.iter().enumerate().map(move |(word, value)| (value, stamped(page, word)))
    })
}

const PAGES: usize = 6;

/// What a job has to report that is traced all the time.
fn check(engine: EngineChoice, page: PageSize, report: &Report) {
    // An engine that the job takes along while few threads wait may be such a one, too.
    let takes_along = engine.forced().is_none() && works_for(Engine::StopCopy.into(), page);
    match engine.forced() {
        Some(forced) if forced.readers_wait() => {
            check_stayed(report, "let the engine be chosen (auto)");
        }
        None if report.engine.engine().is_some_and(Engine::readers_wait)
            && !works(Engine::WpSync.into()) =>
        {
            check_stayed(report, "end the tracer");
        }
        _ => {
            assert!(report.ended.is_completed(), "{report}");
            assert_eq!(report.pages.migrated, report.pages.total(), "{report}");
            let waits = report.engine.engine().is_some_and(Engine::readers_wait) || takes_along;
            let other = if waits { report.pages.total() } else { 0 };
            assert_eq!(moved_for_tracer(report, Engine::WpSync), other, "{report}");
            assert_eq!(warns_of(report, "moved by the engine wp-sync"), other > 0, "{report}");
        }
    }
}

/// A program with a region that leaps by each engine while it is traced. The last page is written
/// meanwhile.
fn leap_by_each_engine(test: &str, page: PageSize) {
    let bytes = PAGES * page.bytes();
    let pools = match pools(page, bytes as u64) {
        Ok(pools) => pools,
        Err(error) => {
            skip_page_size(test, page, error);
            return ready(&[]);
        }
    };
    let region = Region::new(&pools[0], bytes).unwrap();
    words(&region, PAGES - 1).for_each(|(word, value)| word.store(value, SeqCst));
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let last = &region.atomics_u64(bytes - page.bytes()..bytes).unwrap()[0];
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        scope.spawn(|| {
            while !stop.load(SeqCst) {
                let before = last.fetch_add(1, SeqCst);
                assert_eq!(before, written.fetch_add(1, SeqCst), "LOST");
            }
        });
        ready(&[address(&region), page.bytes(), PAGES - 1, 0]);
        for engine in engines_for(page) {
            for to in [&pools[1], &pools[0]] {
                eprintln!("{engine}");
                let migration = Migration::new().range(&region, 0..bytes, to).engine(engine);
                let job = migration.area_bytes(2 * page.bytes()).threads(2).start().unwrap();
                let report = job.wait();
                check(engine, page, &report);
                if report.pages.migrated == 0 {
                    break;
                }
                let before = written.load(SeqCst);
                assert!(soon(|| written.load(SeqCst) > before), "the writer does not go on");
            }
        }
    });
    ready(&[]);
    assert!(words(&region, PAGES - 1).all(|(word, value)| word.load(SeqCst) == value), "LOST");
    audit(&[&pools[0], &pools[1]], &[&region]).unwrap();
}

fn regions_leap_while_traced(test: &str, page: PageSize) {
    if case().is_some() {
        return leap_by_each_engine(test, page);
    }
    let Some((program, tracer)) = traced(test, "traced") else { return };
    end(program, tracer);
}

#[test]
fn regions_of_base_pages_leap_while_a_tracer_reads_them() {
    const TEST: &str = "regions_of_base_pages_leap_while_a_tracer_reads_them";
    regions_leap_while_traced(TEST, PageSize::Base);
}

#[test]
fn regions_of_thp_leap_while_a_tracer_reads_them() {
    regions_leap_while_traced("regions_of_thp_leap_while_a_tracer_reads_them", PageSize::Thp);
}

#[test]
fn regions_of_hugetlb_pages_leap_while_a_tracer_reads_them() {
    const TEST: &str = "regions_of_hugetlb_pages_leap_while_a_tracer_reads_them";
    regions_leap_while_traced(TEST, PageSize::Huge2M);
}

/// The tracer comes when nothing but guarded pages is left, so at no moment at which an area is
/// closed, and goes before the last guard does.
#[test]
fn a_tracer_that_comes_and_goes_changes_the_engine_of_a_running_job() {
    const TEST: &str = "a_tracer_that_comes_and_goes_changes_the_engine_of_a_running_job";
    if case().is_some() {
        return leap_behind_guards();
    }
    let waits = ladder(PageSize::Base).first().is_some_and(|engine| engine.readers_wait());
    if !waits || !works(Engine::WpSync.into()) {
        return skip(TEST, &"auto changes no engine here, or has none to change to");
    }
    let mut program = Program::start(TEST, "guards");
    let said = program.wait_until_ready();
    program.go_on();
    assert!(program.wait_until_ready().is_empty(), "all but the guarded pages have moved");
    let tracer = match Tracer::attach(program.pid(), watched(&said).unwrap()) {
        Ok(tracer) => tracer,
        Err(errno) => {
            skip(TEST, &format!("ptrace is refused: {}", Errno(errno)));
            return program.kill();
        }
    };
    program.go_on();
    assert!(program.wait_until_ready().is_empty(), "a page has moved while the job was traced");
    let met = tracer.leave();
    assert!(met.stops > 10 && met.wrong == 0, "{met:?}");
    program.go_on();
    program.succeed();
}

fn leap_behind_guards() {
    let pools = pools(PageSize::Base, (3 * BASE_PAGE) as u64).unwrap();
    let region = Region::new(&pools[0], 3 * BASE_PAGE).unwrap();
    words(&region, 3).for_each(|(word, value)| word.store(value, SeqCst));
    ready(&[address(&region), BASE_PAGE, 3, 0]);
    let mut guards = [0, 1].map(|page| {
        let page = page * BASE_PAGE..(page + 1) * BASE_PAGE;
        Some(region.pin(page).unwrap())
    });
    let migration = Migration::new().range(&region, 0..3 * BASE_PAGE, &pools[1]).threads(1);
    let migration = migration.area_bytes(BASE_PAGE).pin_patience(Duration::from_secs(600));
    let job = migration.start().unwrap();
    let moved = |pages: usize| {
        let bytes = (pages * BASE_PAGE) as u64;
        assert!(soon(|| job.progress().bytes_migrated == bytes), "{:?}", job.progress());
    };
    // The guarded pages come first, so that all have been tried then.
    moved(1);
    // At least that long: then the next look is due.
    std::thread::sleep(LOOK);
    ready(&[]);
    guards[0] = None;
    moved(2);
    ready(&[]);
    guards[1] = None;
    let report = job.wait();
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(moved_for_tracer(&report, Engine::WpSync), 1, "{report}");
    let own: u64 = report
        .engines
        .iter()
        .filter(|e| e.engine.engine().is_some_and(Engine::readers_wait))
        .map(|e| e.pages)
        .sum();
    assert_eq!(own, 2, "{report}");
    assert!(words(&region, 3).all(|(word, value)| word.load(SeqCst) == value), "LOST");
}

// Memory that no pool owns
// ------------------------------------------------------------------------------------------------

/// A program whose own memory moves while it is traced. Nobody has touched its last pages, so a
/// tracer that reads them would need the job's threads as well while the memory is registered.
fn leap_memory() {
    let memory = in_place::memory(PAGES * BASE_PAGE, PageSize::Base);
    let (written, empty) = (PAGES - 2, 2);
    let [near, far] = nodes();
    let words = &memory.words()[..written * BASE_PAGE / 8];
    mapping::on_node(near, || {
        for (at, word) in words.iter().enumerate() {
            word.store(stamped(at / (BASE_PAGE / 8), at % (BASE_PAGE / 8)), SeqCst);
        }
    });
    ready(&[memory.start, BASE_PAGE, written, empty]);
    for (engine, renew) in [(None, false), (Some(MemoryEngine::UffdMove), true)] {
        for to in [far, near] {
            let job = in_place::migration(&memory, to).renew(renew).engine(engine).start();
            let report = job.unwrap().wait();
            let traced = in_place::pages_of(&report, |_, why| why == Some(Reason::Traced));
            let moved = in_place::moved(&report);
            if engine.is_none() {
                assert!(report.ended.is_completed(), "{report}");
                assert_eq!(traced, 0, "{report}");
                assert_eq!(moved_for_tracer(&report, MemoryEngine::Kernel), moved, "{report}");
                assert_eq!(moved, if near == far { 0 } else { written as u64 }, "{report}");
                assert_eq!(warns_of(&report, "by the engine kernel"), moved > 0, "{report}");
            } else {
                check_stayed(&report, "end the tracer, or let the kernel move");
            }
        }
    }
    ready(&[]);
}

#[test]
fn memory_in_place_leaps_while_a_tracer_reads_it() {
    const TEST: &str = "memory_in_place_leaps_while_a_tracer_reads_it";
    if case().is_some() {
        return leap_memory();
    }
    if !in_place::works(TEST) {
        return;
    }
    let Some((program, tracer)) = traced(TEST, "memory") else { return };
    end(program, tracer);
}

// Real tracers: these tests run when they are asked for by name
// ------------------------------------------------------------------------------------------------

const REAL_PAGES: usize = 64;

/// A program with a region that leaps back and forth by `auto` until it is told to end, while a
/// thread passes its pages to system calls, for which tracers read them.
fn leap_for_real_tracers() {
    let bytes = REAL_PAGES * BASE_PAGE;
    let pools = pools(PageSize::Base, bytes as u64).unwrap();
    let region = Region::new(&pools[0], bytes).unwrap();
    words(&region, REAL_PAGES).for_each(|(word, value)| word.store(value, SeqCst));
    ready(&[address(&region), BASE_PAGE, REAL_PAGES, 0]);
    let null = std::fs::File::options().write(true).open("/dev/null").unwrap();
    let [stop, told] = [(); 2].map(|()| AtomicBool::new(false));
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        scope.spawn(|| {
            for page in (0..REAL_PAGES).cycle().take_while(|_| !stop.load(SeqCst)) {
                let start = (address(&region) + page * BASE_PAGE) as *const libc::c_void;
                // SAFETY: the call reads a page of the region.
                let written = unsafe { libc::write(null.as_raw_fd(), start, BASE_PAGE) };
                assert_eq!(written, BASE_PAGE as isize);
            }
        });
        scope.spawn(|| {
            ready(&[]);
            told.store(true, SeqCst);
        });
        let mut leaps = 0;
        while leaps < 20 || !told.load(SeqCst) {
            leaps += 1;
            let migration = Migration::new().range(&region, 0..bytes, &pools[leaps % 2]);
            let report = migration.area_bytes(8 * BASE_PAGE).start().unwrap().wait();
            assert!(report.ended.is_completed(), "{report}");
        }
    });
    assert!(words(&region, REAL_PAGES).all(|(word, value)| word.load(SeqCst) == value), "LOST");
}

/// Whether a program is installed. If not, the test is skipped.
fn installed(test: &str, program: &str) -> bool {
    let found = std::process::Command::new(program).arg("--version").output();
    found.inspect_err(|error| skip(test, &format!("{program}: {error}"))).is_ok()
}

#[test]
fn real_tracers_strace_follows_a_program_whose_memory_leaps() {
    const TEST: &str = "real_tracers_strace_follows_a_program_whose_memory_leaps";
    if case().is_some() {
        return leap_for_real_tracers();
    }
    if !installed(TEST, "strace") {
        return;
    }
    let mut program = Program::start_under(&["strace", "-f", "-o", "/dev/null"], TEST, "strace");
    assert!(watched(&program.wait_until_ready()).is_some());
    program.go_on();
    assert!(program.wait_until_ready().is_empty());
    program.go_on();
    program.succeed();
}

/// Runs a debugger several times on a program whose memory leaps. It attaches at any moment.
fn attach_again_and_again(
    test: &str,
    debugger: &str,
    arguments: impl Fn(&mut std::process::Command, &[(usize, Vec<u8>)]),
    check: impl Fn(&[(usize, Vec<u8>)], &str),
) {
    if case().is_some() {
        return leap_for_real_tracers();
    }
    if !installed(test, debugger) {
        return;
    }
    let mut program = Program::start(test, debugger);
    let watched = watched(&program.wait_until_ready()).unwrap();
    program.go_on();
    assert!(program.wait_until_ready().is_empty());
    for _ in 0..5 {
        let mut command = std::process::Command::new(debugger);
        arguments(&mut command, &watched);
        // If it waits for ever, it ends with the program.
        let output = command.args(["-p", &program.pid().to_string()]).output().unwrap();
        check(&watched, &String::from_utf8_lossy(&output.stdout));
    }
    program.go_on();
    program.succeed();
}

/// For a page that is away gdb gets an error, and what it reads is right.
#[test]
fn real_tracers_gdb_reads_a_program_whose_memory_leaps() {
    const TEST: &str = "real_tracers_gdb_reads_a_program_whose_memory_leaps";
    let arguments = |gdb: &mut std::process::Command, watched: &[(usize, Vec<u8>)]| {
        gdb.args(["-nx", "-batch"]);
        watched.iter().for_each(|(at, _)| _ = gdb.arg("-ex").arg(format!("x/1gx {at}")));
    };
    attach_again_and_again(TEST, "gdb", arguments, |watched, text| {
        let mut read = 0;
        for (page, (at, _)) in watched.iter().enumerate() {
            let Some((_, rest)) = text.split_once(&format!("{at:#x}:\t")) else { continue };
            // The error goes to standard error, so the next address or nothing follows then.
            let value = rest.split_whitespace().next().unwrap_or_default();
            if !value.starts_with("0x") || value.ends_with(':') {
                continue;
            }
            let right = format!("{:#018x}", stamped(page, 0));
            assert_eq!(value, right, "page {page}: {text}");
            read += 1;
        }
        assert!(read > 0, "{text}");
    });
}

/// It stops all threads and reads their stacks, of programs that are not Python too.
#[test]
fn real_tracers_py_spy_reads_a_program_whose_memory_leaps() {
    const TEST: &str = "real_tracers_py_spy_reads_a_program_whose_memory_leaps";
    let arguments = |py_spy: &mut std::process::Command, _: &[_]| _ = py_spy.arg("dump");
    attach_again_and_again(TEST, "py-spy", arguments, |_, _| ());
}
