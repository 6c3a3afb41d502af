//! What several test binaries need: pools on the first node, skips that leave a trace, the kernel's
//! view of the process, child processes, and reproducible random numbers.

#![allow(dead_code)] // each test binary uses a part of it

use std::fmt::Display;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pageleap::backend::Call;
use pageleap::probe::{Capabilities, Topic};
use pageleap::{
    Engine, EngineChoice, Error, Migration, NodeId, PageSize, Pool, Region, Report,
    topology::Topology,
};

/// Two pools of the same size, on two nodes where the machine has them, else on one.
pub fn pools(page: PageSize, bytes: u64) -> Result<[Pool; 2], Error> {
    let build = |node| Pool::builder(node, bytes).page_size(page).build();
    let [near, far] = nodes();
    Ok([build(near)?, build(far)?])
}

/// The first two nodes with memory, or the only one twice.
pub fn nodes() -> [NodeId; 2] {
    let topology = Topology::read().unwrap();
    let mut nodes = topology.nodes().iter().filter(|n| n.total_bytes > 0).map(|n| n.id);
    let first = nodes.next().unwrap();
    [first, nodes.next().unwrap_or(first)]
}

/// Says why a test does not run here, on stderr and in the file that `PAGELEAP_SKIP_LOG` names.
pub fn skip(test: &str, reason: &dyn Display) {
    eprintln!("SKIP {test}: {reason}");
    if let Ok(path) = std::env::var("PAGELEAP_SKIP_LOG") {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
        writeln!(file.expect("the skip log can be written"), "{test}: {reason}")
            .expect("the skip log can be written");
    }
}

/// The process' mappings of pools, by regions and aliases, as the kernel lists them.
pub fn pool_mappings() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:pageleap")).map(str::to_owned).collect()
}

/// Tests that look at the whole process (mappings, descriptors) or need scarce huge pages take
/// turns.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Page sizes that most machines can have; the largest needs a gigabyte for each page.
pub const PAGE_SIZES: [PageSize; 3] = [PageSize::Base, PageSize::Thp, PageSize::Huge2M];

/// Runs a test with two pools of `pages` pages of each size, as far as the machine has such pages.
pub fn for_page_sizes(test: &str, pages: usize, body: impl Fn([Pool; 2])) {
    for page in PAGE_SIZES {
        match pools(page, (pages * page.bytes()) as u64) {
            Ok(pools) => body(pools),
            Err(error) => skip_page_size(test, page, error),
        }
    }
}

/// Skips a test for huge pages that the machine does not have. Base pages there must be, and any
/// other error is a failure.
pub fn skip_page_size(test: &str, page: PageSize, error: Error) {
    match error {
        Error::OutOfMemory { .. } | Error::NotHuge { .. } if page != PageSize::Base => {
            skip(&format!("{test} ({page} pages)"), &error)
        }
        error => panic!("{error}"),
    }
}

/// The warnings of a job, except that an engine was chosen which lets some system calls fail: that
/// depends on the machine and the pages.
pub fn surprises(report: &Report) -> Vec<&String> {
    let expected = "system calls that write into a moving area may fail with EFAULT (";
    let fails = matches!(report.engine, Engine::Mprotect | Engine::PrecopyProtect);
    let told = |warning: &str| fails && warning.starts_with(expected);
    report.warnings.iter().filter(|warning| !told(warning)).collect()
}

/// Whether an engine works here.
pub fn works(engine: EngineChoice) -> bool {
    static FOUND: OnceLock<Capabilities> = OnceLock::new();
    let has = |topic| FOUND.get_or_init(Capabilities::probe).has(topic);
    match engine {
        EngineChoice::Precopy => has(Topic::Freeze) && has(Topic::WriteTracking),
        EngineChoice::WpSync => has(Topic::WriteBarrier),
        EngineChoice::PrecopyProtect => has(Topic::WriteTracking),
        EngineChoice::Auto | EngineChoice::Mprotect => true,
    }
}

/// Whether the engine `precopy` works here.
pub fn can_follow() -> bool {
    works(EngineChoice::Precopy)
}

/// By what tests are repeated for each engine: the last resort, the best that works here, and what
/// is between them.
pub const ENGINES: [EngineChoice; 4] = [
    EngineChoice::Mprotect,
    EngineChoice::Auto,
    EngineChoice::WpSync,
    EngineChoice::PrecopyProtect,
];

/// Those of [`ENGINES`] that work here. Where processors are emulated only the first two: what
/// `auto` chooses differs between the kernels of the lab.
pub fn engines() -> Vec<EngineChoice> {
    let most = if in_lab() { 2 } else { ENGINES.len() };
    ENGINES[..most].iter().copied().filter(|engine| works(*engine)).collect()
}

/// Whether this is a machine of the lab, where every instruction is emulated: less of the same is
/// enough there.
pub fn in_lab() -> bool {
    std::env::var_os("PAGELEAP_LAB").is_some()
}

/// The engines between which `auto` chooses here, but the last.
pub fn ladder(page: PageSize) -> Vec<Engine> {
    let fits = |engine: &Engine| {
        !(page.is_hugetlb() && *engine == Engine::Precopy || *engine == Engine::Mprotect)
    };
    let works = EngineChoice::ALL.into_iter().filter(|choice| works(*choice));
    works.filter_map(EngineChoice::forced).filter(fits).collect()
}

/// Checks which engine a job has used: with [`EngineChoice::Auto`] the first of `ladder` whose
/// tracker was opened, or the last resort.
pub fn check_engine(
    engine: EngineChoice,
    report: &Report,
    struck: Option<Call>,
    ladder: &[Engine],
) {
    let refused = usize::from(struck == Some(Call::OpenTracker));
    let expected = match engine {
        EngineChoice::Auto => ladder.get(refused).copied().unwrap_or(Engine::Mprotect).to_string(),
        forced => forced.to_string(),
    };
    assert_eq!(report.engine.to_string(), expected, "{report}");
}

/// A job over one range, in areas of two pages.
pub fn migration<'a>(region: &'a Region, range: Range<usize>, to: &Pool) -> Migration<'a> {
    let area = 2 * region.page_size().bytes();
    Migration::new().range(region, range, to).area_bytes(area)
}

/// Moves a range and expects that every page of it ends in the pool.
pub fn leap(region: &Region, range: Range<usize>, to: &Pool) -> Report {
    let report = migration(region, range, to).start().unwrap().wait();
    assert!(report.ended.is_completed(), "{report}");
    assert_eq!(report.pages.migrated + report.pages.unchanged, report.pages.total(), "{report}");
    assert!(surprises(&report).is_empty(), "{report}");
    report
}

/// Words between two that [`stamp`] writes: some in each page, at changing places.
const STAMP_STRIDE: usize = 61;

fn stamped(seed: u64, word: usize) -> u64 {
    seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ word as u64 | 1
}

/// The words of a range that are stamped, with their values.
fn stamps(
    region: &Region,
    range: Range<usize>,
    seed: u64,
) -> impl Iterator<Item = (usize, &AtomicU64, u64)> {
    let first = range.start / 8;
    let words = region.atomics_u64(range).unwrap().iter().enumerate();
    let chosen =
        words.map(move |(i, word)| (first + i, word)).filter(|(i, _)| i % STAMP_STRIDE == 0);
    chosen.map(move |(i, word)| (i, word, stamped(seed, i)))
}

/// Writes values that depend on `seed` and the place into a range of a region.
pub fn stamp(region: &Region, range: Range<usize>, seed: u64) {
    stamps(region, range, seed).for_each(|(_, word, value)| word.store(value, Relaxed));
}

/// Checks what [`stamp`] wrote, into this range or a larger one.
pub fn check_stamp(region: &Region, range: Range<usize>, seed: u64) {
    for (i, word, value) in stamps(region, range, seed) {
        assert_eq!(word.load(Relaxed), value, "LOST: word {i} of {region:?}");
    }
}

/// Whether every byte of a range is zero.
pub fn is_zero(region: &Region, range: Range<usize>) -> bool {
    region.atomics_u64(range).unwrap().iter().all(|word| word.load(Relaxed) == 0)
}

/// The permissions and the flags (`VmFlags`) of each part of an address range, from smaps, equal
/// neighbours joined.
pub fn vm_flags(start: usize, len: usize) -> Vec<(Range<usize>, String)> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut parts: Vec<(Range<usize>, String)> = Vec::new();
    let mut current: Option<(Range<usize>, String)> = None;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let head = words.next().unwrap_or_default();
        if head == "VmFlags:" {
            let Some((range, perms)) = current.take() else { continue };
            let range = range.start.max(start)..range.end.min(start + len);
            let text = format!("{perms} {}", words.collect::<Vec<_>>().join(" "));
            match parts.last_mut() {
                _ if range.is_empty() => {}
                Some((last, t)) if last.end == range.start && *t == text => last.end = range.end,
                _ => parts.push((range, text)),
            }
        } else if let Some((from, to)) = head.split_once('-') {
            let hex = |s| usize::from_str_radix(s, 16).unwrap();
            current = Some((hex(from)..hex(to), words.next().unwrap().to_owned()));
        }
    }
    parts
}

/// The same for all of a region.
pub fn region_flags(region: &Region) -> Vec<(Range<usize>, String)> {
    vm_flags(region.as_ptr().as_ptr() as usize, region.len())
}

/// What the process' open descriptors are, as far as pools and jobs could have opened them.
pub fn own_descriptors() -> Vec<String> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let names =
        open.filter_map(|fd| Some(std::fs::read_link(fd.ok()?.path()).ok()?.display().to_string()));
    let ours = ["memfd:pageleap", "eventfd", "userfaultfd", "pagemap"];
    names.filter(|name| ours.iter().any(|kind| name.contains(kind))).collect()
}

/// Waits for something that another thread is about to do. Gives up, and returns false, only after
/// far more time than it takes.
pub fn soon(mut condition: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while !condition() {
        if began.elapsed() > PATIENCE {
            return false;
        }
        rest();
    }
    true
}

/// Ends the threads that look at the flag, also when a check fails.
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Between two looks at something that changes: where CPUs are emulated, one that never rests keeps
/// the others waiting.
pub fn rest() {
    std::thread::sleep(Duration::from_micros(50));
}

/// Far more time than anything takes that a test waits for.
const PATIENCE: Duration = Duration::from_secs(60);

/// Names the case that a child process runs.
const CASE: &str = "PAGELEAP_TEST_CASE";

/// The case that this process is to run, if it is a child that [`run_case`] started.
pub fn case() -> Option<String> {
    std::env::var(CASE).ok()
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Exited(i32),
    Killed(i32),
    /// It was killed because it did nothing any more.
    Hung,
}

/// Runs `test` of this binary again in a child process, which finds `case` in [`case`]. Returns how
/// it ended, and what it wrote.
pub fn run_case(test: &str, case: &str) -> (End, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(CASE, case)
        .env("RUST_BACKTRACE", "0")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = out.read_to_string(&mut text);
        let _ = err.read_to_string(&mut text);
        text
    });
    let began = Instant::now();
    let mut hung = false;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if began.elapsed() > PATIENCE && !hung => {
                hung = true;
                child.kill().unwrap();
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let end = match (status.code(), status.signal()) {
        _ if hung => End::Hung,
        (Some(code), _) => End::Exited(code),
        (None, signal) => End::Killed(signal.unwrap_or(0)),
    };
    let output = reader.join().unwrap();
    // A harness without such a test ends well, having done nothing.
    assert!(
        end != End::Exited(0) || output.contains("running 1 test"),
        "there is no test {test}: {output}"
    );
    (end, output)
}

/// Seconds that each stress case runs.
pub fn stress_seconds() -> u64 {
    std::env::var("PAGELEAP_STRESS_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(3)
}

/// Numbers that look random and repeat with the seed (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Less than `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }
}
