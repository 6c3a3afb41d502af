//! What most test binaries need: pools, page sizes, engines, jobs, and skips that leave a trace.
//! The submodules hold the rest, each file named by what it holds.

#![allow(dead_code, unused_imports)] // each test binary uses a part of it

mod cases;
mod places;
mod process;
mod random;
mod stamps;
mod waiting;

use std::fmt::Display;
use std::io::Write;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use pageleap::backend::{Ability, Call, Errno};
use pageleap::{
    Engine, EngineChoice, Error, Migration, NodeId, PageSize, Pool, Region, Report, Warning,
    WarningKind, topology::Topology,
};
use pageleap_probe::{Capabilities, Topic};

pub use cases::{CASE, End, alone, case, no_core_dump, run_case};
pub use places::{Kept, Place, each_place_once, places, places_in};
pub use process::{
    address, become_nobody, is_root, limit_address_space, own_descriptors, own_files, own_mappings,
    pool_mappings, pool_ranges, region_flags, set_dumpable, status_kb, vm_flags,
};
pub use random::Random;
pub use stamps::{check_stamp, is_zero, stamp};
pub use waiting::{StopOnDrop, rest, soon};

/// Two pools of the same size, on two nodes if the machine has them, else on one.
pub fn pools(page: PageSize, bytes: u64) -> Result<[Pool; 2], Error> {
    let build = |node| Pool::builder(node, bytes).page_size(page).build();
    let [near, far] = nodes();
    Ok([build(near)?, build(far)?])
}

/// The first two nodes with memory, or the only such node twice.
pub fn nodes() -> [NodeId; 2] {
    let topology = Topology::read().unwrap();
    let mut nodes = topology.nodes().iter().filter(|n| n.total_bytes > 0).map(|n| n.id);
    let first = nodes.next().unwrap();
    [first, nodes.next().unwrap_or(first)]
}

/// Reports why a test does not run here: on stderr, and in the file that `PAGELEAP_SKIP_LOG` names.
pub fn skip(test: &str, reason: &dyn Display) {
    eprintln!("SKIP {test}: {reason}");
    if let Ok(path) = std::env::var("PAGELEAP_SKIP_LOG") {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
        // In one call: other tests skip at the same time.
        let line = format!("{test}: {reason}\n");
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the skip log");
    }
}

/// Lets tests of one binary run one at a time. A test takes a turn if it looks at the whole process
/// (mappings, descriptors), changes the process, or needs scarce huge pages.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Page sizes of which most machines have enough. Pages of 1 GB are left out.
pub const PAGE_SIZES: [PageSize; 3] = [PageSize::Base, PageSize::Thp, PageSize::Huge2M];

/// Runs `body` with two pools of `pages` pages, for each page size of which the machine has enough.
pub fn for_page_sizes(test: &str, pages: usize, body: impl Fn([Pool; 2])) {
    for page in PAGE_SIZES {
        match pools(page, (pages * page.bytes()) as u64) {
            Ok(pools) => body(pools),
            Err(error) => skip_page_size(test, page, error),
        }
    }
}

/// Skips a test because the machine has too few huge pages. For base pages, and with any other
/// error, the test fails.
pub fn skip_page_size(test: &str, page: PageSize, error: Error) {
    match error {
        Error::OutOfMemory { .. } | Error::NotHuge { .. } if page != PageSize::Base => {
            skip(&format!("{test} ({page} pages)"), &error)
        }
        // Another process has taken free huge pages after they were counted.
        Error::Call { call: Call::Map, errno: Errno(libc::ENOMEM), .. } if page.is_hugetlb() => {
            skip(&format!("{test} ({page} pages)"), &error)
        }
        error => panic!("{error}"),
    }
}

/// The warnings of a job that a test does not expect. Expected is the warning that the engine lets
/// some system calls fail: whether such an engine is used depends on the machine and the pages.
pub fn surprises(report: &Report) -> Vec<&Warning> {
    let fails = report.engine.engine().is_some_and(Engine::signals);
    let told = |warning: &Warning| fails && warning.kind == WarningKind::SystemCallsMayFail;
    report.warnings.iter().filter(|warning| !told(warning)).collect()
}

/// Whether this machine and user can use an engine.
pub fn works(engine: EngineChoice) -> bool {
    works_for(engine, PageSize::Base)
}

/// Whether it can use it for pages of this size.
pub fn works_for(engine: EngineChoice, page: PageSize) -> bool {
    static FOUND: OnceLock<Capabilities> = OnceLock::new();
    let has = |topic| FOUND.get_or_init(Capabilities::probe).has(topic);
    let Some(engine) = engine.forced() else { return true };
    let opens = engine.needs_for(page).is_none_or(|ability| match ability {
        Ability::NoteAndHold => has(Topic::Freeze) && has(Topic::WriteTracking),
        Ability::Hold => has(Topic::Hold),
        Ability::HoldHugetlb => has(Topic::HoldHugetlb),
        Ability::HoldWriters => has(Topic::WriteBarrier),
        Ability::Note => has(Topic::WriteTracking),
    });
    opens && engine.moves(page)
}

/// Whether this machine and user can use the engine `precopy`.
pub fn can_follow() -> bool {
    works(Engine::Precopy.into())
}

/// The engine that `auto` falls back to. It needs no feature of the kernel.
pub fn last_resort() -> Engine {
    Engine::ALL[Engine::ALL.len() - 1]
}

/// The engines for which tests are repeated: the last resort, what `auto` chooses for each area,
/// and the others alone.
pub fn repeated() -> Vec<EngineChoice> {
    let others = Engine::ALL[..Engine::ALL.len() - 1].iter().map(|engine| (*engine).into());
    [last_resort().into(), EngineChoice::Auto].into_iter().chain(others).collect()
}

/// Those of [`repeated`] that work here. In the lab, where CPUs are slow, only the first three: the
/// last resort, `auto`, which chooses other engines on each of its kernels, and the best one that
/// follows writes.
pub fn engines() -> Vec<EngineChoice> {
    let most = if in_lab() { 3 } else { usize::MAX };
    repeated().into_iter().take(most).filter(|engine| works(*engine)).collect()
}

/// Those of [`engines`] that move pages of this size.
pub fn engines_for(page: PageSize) -> Vec<EngineChoice> {
    engines().into_iter().filter(|engine| works_for(*engine, page)).collect()
}

/// Whether this is a machine of the lab. Every instruction is emulated there, so tests do less.
pub fn in_lab() -> bool {
    std::env::var_os("PAGELEAP_LAB").is_some()
}

/// The engines that `auto` tries here for pages of this size, best first, without the last resort.
pub fn ladder(page: PageSize) -> Vec<Engine> {
    let fits = |engine: &Engine| works_for((*engine).into(), page) && *engine != last_resort();
    Engine::preferred(page).into_iter().filter(fits).collect()
}

/// Checks which engine a job has got. With [`EngineChoice::Auto`] that is the first of `ladder`
/// whose tracker could be opened, or the last resort. `struck` is the call that failed. If that was
/// the opening of a tracker, it may have been the second one, which the job can do without.
pub fn check_engine(
    engine: EngineChoice,
    report: &Report,
    struck: Option<Call>,
    ladder: &[Engine],
) {
    let opening = struck == Some(Call::OpenTracker);
    let first = ladder.first().is_some_and(|first| report.engine == *first);
    if opening && engine.forced().is_none() && first {
        assert!(report.engine_reason.contains("failed with"), "{report}");
        assert!(!report.engines.iter().any(|part| part.why.contains("few threads")), "{report}");
    }
    let refused = usize::from(opening && !first);
    let expected = match engine {
        EngineChoice::Auto => ladder.get(refused).copied().unwrap_or(last_resort()).to_string(),
        forced => forced.to_string(),
    };
    assert_eq!(report.engine.to_string(), expected, "{report}");
}

/// A migration of one range, in areas of two pages.
pub fn migration<'a>(region: &'a Region, range: Range<usize>, to: &Pool) -> Migration<'a> {
    let area = 2 * region.page_size().bytes();
    Migration::new().range(region, range, to).area_bytes(area)
}

/// Moves a range, and checks that every page of it is in the pool afterwards.
pub fn leap(region: &Region, range: Range<usize>, to: &Pool) -> Report {
    let report = migration(region, range, to).start().unwrap().wait();
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(report.pages.migrated + report.pages.unchanged, report.pages.total(), "{report}");
    assert!(surprises(&report).is_empty(), "{report}");
    report
}

/// How many seconds each stress case runs.
pub fn stress_seconds() -> u64 {
    const NAME: &str = "PAGELEAP_STRESS_SECONDS";
    let parse = |text: String| text.parse().unwrap_or_else(|_| panic!("{NAME}={text}: no number"));
    std::env::var(NAME).map_or(3, parse)
}

/// The distance between two calls that a sweep makes to fail: 1 unless the environment says
/// otherwise, and up to 3.
pub fn sweep_step() -> u64 {
    const NAME: &str = "PAGELEAP_SWEEP_STEP";
    let text = std::env::var(NAME).unwrap_or_else(|_| "1".to_owned());
    let step = text.parse().ok().filter(|step| (1..=3).contains(step));
    step.unwrap_or_else(|| panic!("{NAME} is {text}, and has to be from 1 to 3"))
}
