//! Each system call of a job that moves memory in place fails once, on the real kernel: the first
//! time that it is made, the second time, and so on.
//!
//! A filter hands the calls of the job's threads to a supervisor (`seccomp_unotify(2)`). It lets
//! all of them go on but one, which fails with an error that the kernel may give. Afterwards
//! nothing is lost, nothing is left behind, and the next job moves all pages.

mod common;
#[path = "common/in_place.rs"]
mod in_place;
#[path = "common/mapping.rs"]
mod mapping;
#[path = "common/supervisor.rs"]
mod supervisor;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::SeqCst};

use common::{
    End, StopOnDrop, case, nodes, own_descriptors, own_mappings, rest, run_case, skip, soon,
    sweep_step, turn,
};
use in_place::{KINDS, memory, migration, moved, pages_of, resident, works};
use mapping::Mapping;
use pageleap::{BASE_PAGE, Ended, NodeId, PageOutcome, PageSize, Report, Reserve};
use supervisor::{Calls, hand_over, supervise};

const BYTES: usize = 4 << 20;
const PAGES: usize = BYTES / BASE_PAGE;

/// How many times of a call are tried, at most: the first half of them from the first time on, and
/// the others spread over the rest. A larger step of sweeps makes it less.
const MOST_TIMES: u64 = 12;

/// Calls that do not fail: the kernel never refuses them as threads make them here, or they belong
/// to threads and to the C library, and not to a job.
const SPARED: [libc::c_long; 22] = [
    libc::SYS_brk,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_lseek,
    libc::SYS_membarrier,
    libc::SYS_munmap,
    libc::SYS_prctl,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigprocmask,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_seccomp,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_write,
];

/// `UFFDIO_WAKE` of `include/uapi/linux/userfaultfd.h`. The kernel refuses wrong ranges only.
const UFFDIO_WAKE: u64 = 0x8010_aa02;
/// `UFFDIO_MOVE`, of the same file.
const UFFDIO_MOVE: u64 = 0xc028_aa05;
/// `PAGEMAP_SCAN` of `include/uapi/linux/fs.h`. The highest of the numbers.
const PAGEMAP_SCAN: u64 = 0xc060_6610;

// Which call fails
// ------------------------------------------------------------------------------------------------

/// Different calls of a job, at most.
const MOST_CALLS: usize = 64;

/// How often each call has been made, by what [`key`] makes of it.
static CALLS: [[AtomicU64; 2]; MOST_CALLS] =
    [const { [const { AtomicU64::new(0) }; 2] }; MOST_CALLS];
/// The call that is to fail, and which time: 0 if none is.
static WANTED: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
/// Whether a job runs, so that calls count.
static IS_ON: AtomicBool = AtomicBool::new(false);
/// Whether the wanted call has failed.
static HAS_FAILED: AtomicBool = AtomicBool::new(false);

/// What tells calls apart: number, and for some an argument.
fn key(call: &libc::seccomp_data) -> Option<u64> {
    let number = i64::from(call.nr);
    // Of a thread that begins: the stack of its signal handlers, without which it cannot run.
    let is_small_stack = number == libc::SYS_mmap
        && call.args[3] as i32 & libc::MAP_STACK != 0
        && call.args[1] < 64 << 10;
    let is_guard = number == libc::SYS_mprotect && call.args[2] as i32 == libc::PROT_NONE;
    let argument = match number {
        libc::SYS_ioctl => call.args[1] & 0xffff_ffff,
        libc::SYS_madvise => call.args[2],
        _ => 0,
    };
    let is_wake = number == libc::SYS_ioctl && argument == UFFDIO_WAKE;
    // Of a descriptor and no path: the C library's `fstat`.
    let is_fstat = number == libc::SYS_newfstatat && call.args[3] as i32 & libc::AT_EMPTY_PATH != 0;
    let can_fail = !is_small_stack && !is_guard && !is_wake && !is_fstat;
    can_fail.then_some(argument << 16 | number as u64)
}

/// An error that the kernel may give.
fn error_of(key: u64) -> i32 {
    match (key & 0xffff) as i64 {
        libc::SYS_poll | libc::SYS_ppoll => libc::EINTR,
        libc::SYS_openat | libc::SYS_pipe2 | libc::SYS_userfaultfd => libc::EMFILE,
        libc::SYS_clone | libc::SYS_clone3 => libc::EAGAIN,
        libc::SYS_read | libc::SYS_pread64 => libc::EIO,
        _ => libc::ENOMEM,
    }
}

/// Counts a call, and returns the error with which it is to fail, or 0. Allocates nothing: who has
/// made the call may hold the allocator's lock.
fn decide(call: &libc::seccomp_data) -> i32 {
    let Some(key) = key(call).filter(|_| IS_ON.load(SeqCst)) else { return 0 };
    let of_this = |[of, _]: &&[AtomicU64; 2]| {
        of.compare_exchange(0, key, SeqCst, SeqCst).unwrap_or_else(|other| other) == key
            || of.load(SeqCst) == key
    };
    let Some([_, times]) = CALLS.iter().find(of_this) else { std::process::abort() };
    let time = times.fetch_add(1, SeqCst) + 1;
    if WANTED.each_ref().map(|wanted| wanted.load(SeqCst)) != [key, time] {
        return 0;
    }
    HAS_FAILED.store(true, SeqCst);
    error_of(key)
}

// The jobs
// ------------------------------------------------------------------------------------------------

/// Writes rising values to a word of each page, in turn, and checks each before.
fn writer(mapping: &Mapping, stop: &AtomicBool) {
    let words = || mapping.words().iter().skip(1).step_by(BASE_PAGE / 8);
    let mut value = 0;
    while !stop.load(SeqCst) {
        for word in words() {
            let before = word.swap(value + 1, SeqCst);
            assert_eq!(before, value, "LOST");
        }
        value += 1;
        rest();
    }
    assert!(words().all(|word| word.load(SeqCst) == value), "LOST");
}

/// What a job must leave as it was.
fn state(mapping: &Mapping) -> ([usize; 2], usize, usize) {
    (resident(mapping), own_mappings().len(), own_descriptors().len())
}

/// The job that is looked at.
struct Scene<'a> {
    mapping: &'a Mapping,
    node: NodeId,
    page: PageSize,
    reserve: Option<Arc<Reserve>>,
    /// How many threads there are beside a job's.
    idle: usize,
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

impl Scene<'_> {
    /// Runs a job, whose `time`th `call` fails. Returns its report, if it has begun.
    fn run(&self, call: u64, time: u64) -> Option<Report> {
        if let Some(reserve) = &self.reserve {
            reserve.refill().unwrap();
        }
        CALLS.iter().for_each(|[_, times]| times.store(0, SeqCst));
        HAS_FAILED.store(false, SeqCst);
        WANTED[0].store(call, SeqCst);
        WANTED[1].store(time, SeqCst);
        let mut job = migration(self.mapping, self.node);
        if let Some(reserve) = &self.reserve {
            job = job.reserve(reserve);
        }
        IS_ON.store(true, SeqCst);
        let report = job.start().map(|job| job.wait());
        IS_ON.store(false, SeqCst);
        // Threads that still end have memory of their own.
        assert!(soon(|| threads() == self.idle), "{} threads", threads());
        report.inspect_err(|error| println!("{error}")).ok()
    }

    /// Makes each call fail, each time.
    fn each_call_fails(&self) {
        let mut before = state(self.mapping);
        self.run(0, 0);
        let count = |[of, times]: &[AtomicU64; 2]| (of.load(SeqCst), times.load(SeqCst));
        let made: BTreeMap<u64, u64> = CALLS.iter().map(count).filter(|made| made.1 > 0).collect();
        let mut reached = BTreeMap::new();
        for (call, times) in made {
            let half = MOST_TIMES / sweep_step() / 2;
            let spread = (1..=half).map(|part| part * times / half);
            let some: BTreeSet<u64> = (1..=half.min(times)).chain(spread).collect();
            for time in some.into_iter().filter(|time| *time > 0) {
                let report = self.run(call, time);
                *reached.entry(call).or_insert(0) += u64::from(HAS_FAILED.load(SeqCst));
                let name = format!("call {} of {}, time {time}", call & 0xffff, call >> 16);
                self.check(report.as_ref(), &name);
                let next = self.run(0, 0).unwrap();
                assert_eq!(moved(&next), PAGES as u64, "after {name}: {next}");
                let now = state(self.mapping);
                // Without the scan, which comes last, huge pages are not known as such.
                if call >> 16 == PAGEMAP_SCAN {
                    before.0[1] = now.0[1];
                }
                assert_eq!(now, before, "after {name}: {next}");
            }
        }
        println!("{}: {reached:?}", self.page);
        let must = [libc::SYS_openat as u64, UFFDIO_MOVE << 16 | libc::SYS_ioctl as u64];
        assert!(must.iter().all(|call| reached[call] > 1), "{reached:?}");
    }

    /// Each page has an outcome, and what stays has a reason.
    fn check(&self, report: Option<&Report>, name: &str) {
        let Some(report) = report else { return };
        assert!(matches!(report.ended, Ended::Completed | Ended::Failed(_)), "{name}: {report}");
        assert_eq!(report.pages.total(), PAGES as u64, "{name}: {report}");
        // The kernel's engine, which comes where the other one is refused, lets them lie.
        let stays = |outcome, reason: Option<_>| {
            let moved = [PageOutcome::Migrated, PageOutcome::Unchanged].contains(&outcome);
            !moved && reason.is_none()
        };
        assert_eq!(pages_of(report, stays), 0, "{name}: {report}");
    }
}

#[test]
fn each_call_of_a_job_in_place_fails_once() {
    const NAME: &str = "each_call_of_a_job_in_place_fails_once";
    let Some(case) = case() else {
        let _turn = turn();
        if !works(NAME) {
            return;
        }
        let cases = ["4k", "thp with a reserve", "4k with a reserve", "thp"];
        for case in cases.into_iter().take(if sweep_step() > 1 { 2 } else { 4 }) {
            let (end, output) = run_case(NAME, case);
            println!("{case}: {output}");
            assert_eq!(end, End::Exited(0), "{case}: {output}");
        }
        return;
    };
    static LISTENER: AtomicI32 = AtomicI32::new(-1);
    let node = nodes()[0];
    let page = KINDS[usize::from(case.starts_with("thp"))];
    let mapping = memory(BYTES, page);
    mapping.fill(node);
    let reserve = case.ends_with("reserve").then(|| Reserve::new(node, BYTES, page));
    let reserve = match reserve.transpose() {
        Ok(reserve) => reserve.map(Arc::new),
        Err(error) => return skip(NAME, &error),
    };
    std::thread::spawn(|| supervise(&LISTENER, decide));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let end = StopOnDrop(&stop);
        scope.spawn(|| writer(&mapping, &stop));
        let mover = scope.spawn(|| {
            match hand_over(&Calls::AllBut(&SPARED)) {
                Ok(listener) => LISTENER.store(listener, SeqCst),
                Err(error) => return skip(NAME, &error),
            }
            let scene = Scene { mapping: &mapping, node, page, reserve, idle: threads() };
            // What the library does once in a process.
            scene.run(0, 0).unwrap();
            scene.run(0, 0).unwrap();
            scene.each_call_fails();
        });
        mover.join().unwrap();
        drop(end);
    });
}
