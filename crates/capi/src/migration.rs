//! The ranges, options and engines of a job.

use std::ffi::{CString, c_char};
use std::sync::OnceLock;
use std::time::Duration;

use pageleap::{Engine, EngineChoice, EngineName, Error, MemoryEngine, Migration};

use crate::boundary::bad;
use crate::context::pageleap_migration_context;
use crate::placement::pageleap_placement;
use crate::pool::pageleap_pool;
use crate::region::pageleap_region;
use crate::status::{pageleap_status, text};

/// The method by which pages are moved, and its effect on the threads that use them meanwhile. With
/// every engine nothing is lost, and no thread keeps a page from moving by writing to it. Threads
/// wait for milliseconds at most while the job gets a CPU; see pageleap_job_start() for what that
/// depends on. Where all CPUs are busy, expect waits of some 20 ms. If the comment of an engine names
/// a topic of pageleap_finding, the engine works where the topic does.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum pageleap_engine {
    /// The library chooses the best engine that works here: for each job, and again for each area,
    /// by how many threads waited for earlier areas. Where an engine is refused, another one stands
    /// in.
    PAGELEAP_ENGINE_AUTO = 0,
    /// Pre-copy: copies pages while threads write to them, and copies dirty pages again. Then it
    /// unmaps the area for a moment, and copies the rest. System calls do not fail because of it.
    /// Needs Linux 6.7, and a userfaultfd that also holds up the kernel's own accesses (not
    /// UFFD_USER_MODE_ONLY: root, vm.unprivileged_userfaultfd=1 or access to /dev/userfaultfd). Not
    /// for hugetlb pages. Topic: "freeze".
    PAGELEAP_ENGINE_PRECOPY = 1,
    /// Write-protects pages while it copies them (UFFDIO_WRITEPROTECT). A thread that writes to one
    /// waits in the page fault until the library lifts the protection of that page, which is then
    /// copied again. System calls do not fail because of it. Needs Linux 6.6 and a userfaultfd as
    /// precopy does. Also for hugetlb pages. Topic: "write-barrier".
    PAGELEAP_ENGINE_WP_SYNC = 2,
    /// Pre-copy as precopy does it, but at the end the area becomes read-only (mprotect) for a
    /// moment: system calls that write into it in that moment fail with EFAULT. Needs Linux 6.7 and
    /// no privilege. Topic: "write-tracking".
    PAGELEAP_ENGINE_PRECOPY_PROTECT = 3,
    /// Makes pages read-only (mprotect) while they are copied: system calls that write into them
    /// fail with EFAULT. Works wherever the library does (Linux 5.14), without privilege, so
    /// it has no topic.
    PAGELEAP_ENGINE_MPROTECT = 4,
    /// Stop-and-copy: unmaps an area, copies it, and maps the copy. A thread that touches the area
    /// meanwhile, to read or to write, waits in the page fault until it has been copied. System
    /// calls do not fail because of it. Needs Linux 5.14, and a userfaultfd as precopy does; for
    /// hugetlb pages of 2 MB Linux 5.18. Not for those of 1 GB. Topic: "hold", for hugetlb pages of
    /// 2 MB "hold-hugetlb".
    PAGELEAP_ENGINE_STOP_COPY = 5,
    /// The kernel's move_pages(2), for memory that no pool owns: pageleap_leap_memory(). It has
    /// no topic of its own.
    PAGELEAP_ENGINE_KERNEL = 6,
    /// Moves private anonymous memory that no pool owns in place (UFFDIO_MOVE):
    /// pageleap_leap_memory(). System calls do not fail because of it. Needs Linux 6.8, and a
    /// userfaultfd as precopy does. Topic: "memory-in-place".
    PAGELEAP_ENGINE_UFFD_MOVE = 7,
}

impl pageleap_engine {
    /// All of them, in the order of their numbers.
    const ALL: [pageleap_engine; 8] = [
        pageleap_engine::PAGELEAP_ENGINE_AUTO,
        pageleap_engine::PAGELEAP_ENGINE_PRECOPY,
        pageleap_engine::PAGELEAP_ENGINE_WP_SYNC,
        pageleap_engine::PAGELEAP_ENGINE_PRECOPY_PROTECT,
        pageleap_engine::PAGELEAP_ENGINE_MPROTECT,
        pageleap_engine::PAGELEAP_ENGINE_STOP_COPY,
        pageleap_engine::PAGELEAP_ENGINE_KERNEL,
        pageleap_engine::PAGELEAP_ENGINE_UFFD_MOVE,
    ];

    /// The number of an engine that has moved pages.
    pub(crate) fn of(engine: EngineName) -> pageleap_engine {
        Self::ALL[engine.number() as usize]
    }
}

/// The engine of regions that a program has passed.
pub(crate) fn engine(number: u32) -> Result<EngineChoice, Error> {
    match (number, Engine::by_number(number)) {
        (0, _) => Ok(EngineChoice::Auto),
        (_, Some(engine)) => Ok(engine.into()),
        _ => Err(no_engine(
            MemoryEngine::by_number(number).map(EngineName::from),
            number,
            "pages of a region lie in frames of its pools, and stay there",
            "take another engine; pageleap_leap_memory() moves memory that no pool owns",
        )),
    }
}

/// The engine that a program has passed for memory that no pool owns; `None`: the library chooses.
pub(crate) fn memory_engine(number: u32) -> Result<Option<MemoryEngine>, Error> {
    match (number, MemoryEngine::by_number(number)) {
        (0, _) => Ok(None),
        (_, Some(engine)) => Ok(Some(engine)),
        _ => Err(no_engine(
            Engine::by_number(number).map(EngineName::from),
            number,
            "it moves pages of regions only",
            "take PAGELEAP_ENGINE_UFFD_MOVE or PAGELEAP_ENGINE_KERNEL, or 0: the library chooses",
        )),
    }
}

/// The error for a number that is no engine here: `other` is the engine for the other kind of
/// memory that has this number, if there is one.
fn no_engine(other: Option<EngineName>, number: u32, reason: &str, remedy: &str) -> Error {
    match other {
        Some(engine) => Error::EngineRefused {
            engine: engine.name(),
            reason: reason.into(),
            remedy: remedy.into(),
        },
        None => bad("engine", format!("{number} is not an engine"), "use one of pageleap_engine"),
    }
}

/// The name of an engine number; empty for other numbers.
fn name(number: u32) -> String {
    match (Engine::by_number(number), MemoryEngine::by_number(number)) {
        (Some(engine), _) => engine.to_string(),
        (_, Some(engine)) => engine.to_string(),
        _ if number == 0 => EngineChoice::Auto.to_string(),
        _ => String::new(),
    }
}

/// The name of an engine, such as "wp-sync"; "unknown" for other numbers. Constant.
#[unsafe(no_mangle)]
pub extern "C" fn pageleap_engine_name(engine: u32) -> *const c_char {
    static NAMES: OnceLock<Vec<CString>> = OnceLock::new();
    let names =
        || (0..pageleap_engine::ALL.len() as u32).map(|number| text(name(number))).collect();
    let names = NAMES.get_or_init(names);
    names.get(engine as usize).map_or(c"unknown", CString::as_c_str).as_ptr()
}

/// A range of a job: bytes of a region, in whole pages, and where they go.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_range {
    /// sizeof(pageleap_range), the same in all elements of an array.
    pub size: usize,
    /// The region whose pages are to move.
    pub region: *const pageleap_region,
    /// The first byte, from the start of the region.
    pub offset: usize,
    /// How many bytes. If length and offset are 0: the whole region.
    pub length: usize,
    /// The pool whose frames the pages get. Pages that already have a frame of this pool on the
    /// right node, and pages without memory, stay as they are.
    pub pool: *const pageleap_pool,
    /// The nodes of the pool that the pages go to; NULL: as the pool is placed.
    pub place: *const pageleap_placement,
}
grows!(pageleap_range, 48, place);

/// How a job works. If all fields but size are 0, the library chooses.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_job_options {
    /// sizeof(pageleap_job_options).
    pub size: usize,
    /// The engine, one of pageleap_engine. If an engine other than PAGELEAP_ENGINE_AUTO cannot
    /// work here, the job is refused (PAGELEAP_ENGINE_REFUSED).
    pub engine: u32,
    /// The most threads that copy, up to 64; 0: one for each four CPUs of the destination and
    /// one for each 2 MB of the ranges, whichever is fewer; at least 1 and at most 8.
    pub threads: u32,
    /// The initial size of an area in bytes, a multiple of the page size; 0: chosen by the job,
    /// which may change it as it goes.
    pub area_bytes: usize,
    /// Nanoseconds after which the job begins no new area; 0: no limit.
    pub timeout_ns: u64,
    /// The longest time, in nanoseconds, for which a thread of the program should have to wait
    /// for the job; 0: one millisecond. This is a target, not a limit: jobs that choose their
    /// areas fit them to it, and every page moves in any case.
    pub wait_budget_ns: u64,
    /// The most bytes that all threads together copy per second, repeated copies included; 0: no
    /// limit. Each thread may run ahead of the limit by one area. That is area_bytes if it is
    /// set, else at most the largest of 2 MB, one page and the bytes that the rate copies in 10
    /// ms.
    pub rate_limit_bytes_per_s: u64,
    /// How long, in nanoseconds, the job waits for guards once everything else has moved. The
    /// time starts anew whenever a guard is dropped. 0: one second; -1: the job does not wait.
    pub pin_patience_ns: i64,
    /// How many copies of an area may be spoilt by writes before its writers must wait until the
    /// area has moved (engines mprotect and wp-sync, and for hugetlb pages precopy-protect). 0: 3.
    /// -1: writers wait from the start.
    pub max_disturbed_copies: i32,
    /// Into how many parts an area is split when writes have spoilt its copy (engine mprotect); 0:
    /// 2 parts; 1: areas are not split.
    pub reduction_factor: u32,
    /// The context whose threads and descriptors the job uses, and leaves there for the next job;
    /// NULL: the job makes its own. The context may be freed once the job has started: the job
    /// keeps what it uses until it ends.
    pub context: *const pageleap_migration_context,
    /// The most rounds in which an engine that follows writes copies dirty pages again, before it
    /// closes the area and copies the rest. 0: 4 rounds. -1: none.
    pub max_rounds: i32,
    /// Set to 0.
    pub reserved: u32,
}
grows!(pageleap_job_options, 64, reserved);

/// `None` for 0, which asks for the library's default.
pub(crate) fn unless_0(number: u64) -> Option<u64> {
    (number > 0).then_some(number)
}

/// As [`unless_0`], for options in which 0 is a useful value, which C programs write as -1.
fn unless_0_or_none(number: i64, what: &'static str) -> Result<Option<u64>, Error> {
    match number {
        0 => Ok(None),
        -1 => Ok(Some(0)),
        more => u64::try_from(more).map(Some).map_err(|_| {
            bad(what, format!("{more}"), "use -1 for none, 0 for the default, or more")
        }),
    }
}

/// # Safety
/// The context is NULL, or a handle that nobody frees while the migration is used.
pub(crate) unsafe fn with_options<'a>(
    mut migration: Migration<'a>,
    options: &pageleap_job_options,
) -> Result<Migration<'a>, Error> {
    migration = migration.engine(engine(options.engine)?);
    if options.threads > 0 {
        migration = migration.threads(options.threads as usize);
    }
    if options.area_bytes > 0 {
        migration = migration.area_bytes(options.area_bytes);
    }
    if let Some(ns) = unless_0(options.timeout_ns) {
        migration = migration.timeout(Duration::from_nanos(ns));
    }
    if let Some(ns) = unless_0(options.wait_budget_ns) {
        migration = migration.wait_budget(Duration::from_nanos(ns));
    }
    if let Some(rate) = unless_0(options.rate_limit_bytes_per_s) {
        migration = migration.rate_limit(rate);
    }
    if let Some(ns) = unless_0_or_none(options.pin_patience_ns, "pin_patience_ns")? {
        migration = migration.pin_patience(Duration::from_nanos(ns));
    }
    if let Some(copies) =
        unless_0_or_none(options.max_disturbed_copies.into(), "max_disturbed_copies")?
    {
        migration = migration.max_disturbed_copies(copies as u32);
    }
    if let Some(rounds) = unless_0_or_none(options.max_rounds.into(), "max_rounds")? {
        migration = migration.max_rounds(rounds as u32);
    }
    if options.reduction_factor > 0 {
        migration = migration.reduction_factor(u64::from(options.reduction_factor));
    }
    // SAFETY: forwarded to the caller.
    if let Some(context) = unsafe { options.context.as_ref() } {
        migration = migration.context(&context.0);
    }
    Ok(migration)
}

/// Installs the library's SIGSEGV handler in front of the present one, which goes on getting
/// every fault that is not about a moving page. Without this call the first job installs the
/// handler. The engines mprotect and precopy-protect need it; the others need it where their own
/// way is refused.
///
/// If another handler has been installed over the library's since, that one would get the faults of
/// writers. The engines that raise signals are refused then, and `auto` leaves them out.
///
/// If your handler passes faults that are not its own to the handler that it replaced, with all
/// three arguments, call this function before you install yours. The call is your promise that your
/// handler does so. These engines are then not refused, provided your handler has SA_SIGINFO and
/// not SA_RESETHAND. While your handler runs, no other signal handler may store into a region: if
/// one might, let yours block all signals (sa_mask).
#[unsafe(no_mangle)]
pub extern "C" fn pageleap_install_fault_handler() -> pageleap_status {
    boundary!({ pageleap::install_fault_handler() })
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use pageleap::MigrationContext;

    use super::*;

    /// The library's view of options of which `set` has set some fields, and all others are 0.
    fn with(set: impl FnOnce(&mut pageleap_job_options)) -> String {
        // SAFETY: 0 is a value of its numbers, and NULL of its pointer.
        let mut options: pageleap_job_options = unsafe { std::mem::zeroed() };
        set(&mut options);
        // SAFETY: tests set no context, or one that outlives the call.
        format!("{:?}", unsafe { with_options(Migration::new(), &options) }.unwrap())
    }

    #[test]
    fn every_option_gets_where_it_belongs() {
        let new = Migration::new;
        let ns = Duration::from_nanos;
        let context = pageleap_migration_context(MigrationContext::new());
        for (given, wanted) in [
            (with(|_| {}), new()),
            (with(|o| o.threads = 3), new().threads(3)),
            (with(|o| o.area_bytes = 8192), new().area_bytes(8192)),
            (with(|o| o.timeout_ns = 5), new().timeout(ns(5))),
            (with(|o| o.wait_budget_ns = 6), new().wait_budget(ns(6))),
            (with(|o| o.rate_limit_bytes_per_s = 7), new().rate_limit(7)),
            (with(|o| o.pin_patience_ns = 8), new().pin_patience(ns(8))),
            (with(|o| o.pin_patience_ns = -1), new().pin_patience(ns(0))),
            (with(|o| o.max_disturbed_copies = 9), new().max_disturbed_copies(9)),
            (with(|o| o.max_disturbed_copies = -1), new().max_disturbed_copies(0)),
            (with(|o| o.max_rounds = 9), new().max_rounds(9)),
            (with(|o| o.max_rounds = -1), new().max_rounds(0)),
            (with(|o| o.reduction_factor = 4), new().reduction_factor(4)),
            (with(|o| o.context = &context), new().context(&context.0)),
        ] {
            assert_eq!(given, format!("{wanted:?}"));
        }
        for engine in Engine::ALL {
            let given = with(|o| o.engine = engine.number());
            assert_eq!(given, format!("{:?}", new().engine(engine)));
        }
    }

    #[test]
    fn engines_have_the_numbers_and_names_that_they_have_elsewhere() {
        for (at, number) in pageleap_engine::ALL.into_iter().enumerate() {
            assert_eq!(number as usize, at);
            // SAFETY: a constant text.
            let name = unsafe { CStr::from_ptr(pageleap_engine_name(at as u32)) };
            assert_eq!(name.to_str().unwrap(), super::name(at as u32));
            // PAGELEAP_ENGINE_WP_SYNC is "wp-sync".
            let spelt = format!("{number:?}").replace("PAGELEAP_ENGINE_", "").replace('_', "-");
            assert_eq!(spelt.to_lowercase(), name.to_str().unwrap());
        }
        for engine in Engine::ALL {
            assert_eq!(pageleap_engine::of(engine.into()) as u32, engine.number());
        }
        for engine in MemoryEngine::ALL {
            assert_eq!(pageleap_engine::of(engine.into()) as u32, engine.number());
        }
    }

    #[test]
    fn an_engine_moves_memory_of_one_kind() {
        for number in 1..pageleap_engine::ALL.len() as u32 {
            let refused = match (engine(number), memory_engine(number)) {
                (Ok(_), Err(refused)) | (Err(refused), Ok(_)) => refused,
                both => panic!("{number}: {both:?}"),
            };
            assert!(matches!(refused, Error::EngineRefused { .. }), "{refused}");
        }
        assert_eq!((engine(0).unwrap(), memory_engine(0).unwrap()), (EngineChoice::Auto, None));
        let more = pageleap_engine::ALL.len() as u32;
        assert!(engine(more).is_err() && memory_engine(more).is_err());
    }
}
