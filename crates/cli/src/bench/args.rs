//! Flags of `pageleap bench engines`, and the values that each accepts.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use pageleap::{BASE_PAGE, EngineChoice, MemoryEngine, PageSize};
use pageleap_measure::jobs::{SCATTERED, SMALL, Shape};
use pageleap_measure::load::{Pattern, Rate, Rows, Work, Writing};

use super::memory::once_each;
use crate::bytes;
use crate::engine::Asked;
use crate::export::Exports;
use crate::times::wait_budget;

/// Compare the engines with a memcpy of the same bytes, without load and while a thread writes.
///
/// Each run times a memcpy by one thread, and then one leap with each engine, in turns and in this
/// process. The memcpy is timed in steps of several sizes, and beside it the library's own copy
/// loop; the fastest of them is the base line. The table shows medians over the runs; --json has
/// the figures of each run, too. Each leap goes from one pool to another and back; the way back is
/// not measured. On a machine with one node both pools lie on that node: frames are new, the node
/// is the same, and no time here is a NUMA speed-up.
///
/// Private memory (anon-4k, anon-thp) moves in place into a reserve that is populated before each
/// leap. The time to populate it has a column of its own (fresh).
///
/// The writer keeps a shadow copy, which is compared with the region after every leap. Beside the
/// writer, the kernel writes words of 64 pages every 5 ms (preadv), and these are compared, too.
/// Rates and gaps are those from the start of a job to its end, recycling of vacated frames
/// included. Writers and readers time their own gaps, also beside a memcpy in the same run. Threads
/// are not bound to CPUs; use `numactl` for that.
///
/// The loads small and scattered are short jobs of base pages, while nothing else runs. Each is
/// measured twice, directly after copies of the same bytes: by `Migration::start` and `Job::wait`,
/// and by `Migration::run` with a context, which keeps threads and trackers. As many pages of
/// private memory move by the kernel (`move_pages`), if the machine has two nodes.
///
/// Without flags this takes at most two minutes on an ordinary machine. --all measures more loads,
/// rates, sizes of areas, and runs. A flag that is given wins over --all.
///
/// Exit code: 0 measured, and every write is present; 1 a write was lost, or a failure; 2 a request
/// that this machine or this program cannot take; 130 interrupted by Ctrl-C (rows that are complete
/// are printed and exported).
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct EnginesArgs {
    /// Measure everything: loads quiet, uniform, skewed and changing, rates 100k and 10m, 5 runs,
    /// and areas of 512k and 16m besides
    #[arg(long)]
    pub all: bool,

    /// Engines to measure
    #[arg(long, value_name = "ENGINES", value_delimiter = ',', help = engine_help())]
    pub engine: Option<Vec<EngineChoice>>,

    /// Bytes that leap, such as 64m or 1g; rounded up to whole pages
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "1g",
        allow_hyphen_values = true,
        value_parser = bytes::region_size
    )]
    pub size: u64,

    /// Page sizes, by comma: 4k, thp (2 MB, ordinary memory), 2m and 1g (reserved huge pages;
    /// skipped where too few are free) of a region; anon-4k and anon-thp of private memory as
    /// malloc gives it, which moves in place
    #[arg(
        long,
        value_name = "SIZES",
        default_value = "4k,thp,anon-4k,anon-thp",
        value_delimiter = ','
    )]
    pub page_size: Vec<Kind>,

    /// Loads, by comma: quiet (nothing else runs), uniform (writes to random words), skewed (75 %
    /// of the writes to 3.125 % of the region), changing (spells of random length, 30 ms on
    /// average: no writes, 100k per second, or as many as possible, uniform or skewed), bystander
    /// (a thread maps, faults and unmaps other memory); small (jobs of one range of 4 KB to 16 MB)
    /// and scattered (jobs of 128 to 2048 ranges that do not touch each other), whatever --size
    /// says [default: quiet,uniform,changing]
    #[arg(long, value_name = "LOADS", value_delimiter = ',', hide_possible_values = true)]
    pub load: Option<Vec<LoadKind>>,

    /// Writes per second of uniform and skewed, by comma: numbers such as 100k or 10m, or max
    /// [default: 100k]
    #[arg(
        long,
        value_name = "RATES",
        value_delimiter = ',',
        allow_hyphen_values = true,
        value_parser = rate
    )]
    pub rates: Option<Vec<Rate>>,

    /// Runs, each with one leap of every row [default: 3; 20 of small and scattered]
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = runs)]
    pub runs: Option<usize>,

    /// Threads that write with uniform, skewed and changing: each to its part of the region, at its
    /// part of the rate
    #[arg(
        long,
        value_name = "N",
        default_value = "1",
        allow_hyphen_values = true,
        value_parser = bytes::threads
    )]
    pub writers: usize,

    /// Threads that read the region all the time beside the writers
    #[arg(
        long,
        value_name = "N",
        default_value = "0",
        value_parser = clap::value_parser!(u8).range(..=64)
    )]
    pub readers: u8,

    /// Threads that copy during a leap; the memcpy always has one
    #[arg(
        long,
        value_name = "N",
        default_value = "1",
        allow_hyphen_values = true,
        value_parser = bytes::threads
    )]
    pub threads: usize,

    /// Longest time for which a thread should wait for a leap, such as 200us or 1ms [default: the
    /// library's: 1ms, and 500us for private memory]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true, value_parser = wait_budget)]
    pub wait_budget: Option<Duration>,

    /// Threads that start the jobs, by comma: ordinary, batch (SCHED_BATCH), nice19, idle
    /// (SCHED_IDLE); small and scattered have ordinary ones only. With --engine auto, --load uniform
    /// and --rates max the gaps show how long a store is held up by a job that others keep from the
    /// CPU
    #[arg(
        long,
        value_name = "STARTERS",
        default_value = "ordinary",
        value_delimiter = ',',
        hide_possible_values = true
    )]
    pub starter: Vec<Starter>,

    /// Node that the region starts on [default: the first node with memory]
    #[arg(long, value_name = "NODE")]
    pub from: Option<u32>,

    /// Node to leap to [default: the next node with memory, or the same node if it is the only one]
    #[arg(long, value_name = "NODE")]
    pub to: Option<u32>,

    /// Seed of the writer's choice of words, and of the spells of changing. In each run all engines
    /// and the memcpy meet the same spells
    #[arg(long, value_name = "SEED", default_value = "1")]
    pub seed: u64,

    /// Print one JSON object to standard output instead of text: the setting, the rows, and the
    /// figures of each run
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub exports: Exports,
}

const EXAMPLES: &str = "\
Examples:
  pageleap bench engines
      the default: all engines, quiet, at 100,000 writes per second, and beside a changing load
  pageleap bench engines --engine auto,mprotect --size 256m --runs 9
      two engines, a smaller region, more runs
  pageleap bench engines --load uniform --rates 1m,max --writers 4
      four threads that write as fast as they can
  pageleap bench engines --load small,scattered --engine auto --runs 40
      jobs of one page to 16 MB, and of many pages that do not touch each other
  pageleap bench engines --all --json > engines.json
      everything, with the figures of each run
  pageleap bench engines --export-json engines.json --export-text engines.txt
      the default, shown and kept in two files";

/// The kind of memory that leaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// The page size.
    pub page: PageSize,
    /// Private anonymous memory, which moves in place, and no region.
    pub private: bool,
}

impl Kind {
    /// The prefix of the page size of private memory.
    const PRIVATE: &str = "anon-";
}

impl From<PageSize> for Kind {
    fn from(page: PageSize) -> Kind {
        Kind { page, private: false }
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Kind, String> {
        let (page, private) = match text.strip_prefix(Kind::PRIVATE) {
            Some(page) => (page, true),
            None => (text, false),
        };
        match page.parse::<PageSize>().map_err(|error| error.to_string())? {
            page if private && page.is_hugetlb() => {
                Err("private memory moves in place in pages of anon-4k or anon-thp".into())
            }
            page => Ok(Kind { page, private }),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}{}", if self.private { Kind::PRIVATE } else { "" }, self.page)
    }
}

/// A kind of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LoadKind {
    /// Nothing else runs.
    Quiet,
    /// Writes to random words.
    Uniform,
    /// Most writes go to a small part.
    Skewed,
    /// Rate and rows change at random.
    Changing,
    /// A thread maps and faults other memory.
    Bystander,
    /// Nothing else runs, and jobs have one range.
    Small,
    /// Nothing else runs, and jobs have many ranges.
    Scattered,
}

impl LoadKind {
    /// The shapes of the jobs of this load; `None` if all of the memory leaps beside the load.
    pub fn shapes(self) -> Option<&'static [Shape]> {
        match self {
            LoadKind::Small => Some(&SMALL),
            LoadKind::Scattered => Some(&SCATTERED),
            _ => None,
        }
    }
}

impl fmt::Display for LoadKind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            LoadKind::Quiet => "quiet",
            LoadKind::Uniform => "uniform",
            LoadKind::Skewed => "skewed",
            LoadKind::Changing => "changing",
            LoadKind::Bystander => "bystander",
            LoadKind::Small => "small",
            LoadKind::Scattered => "scattered",
        })
    }
}

/// A kind of load, at a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedLoad {
    /// The kind of the load.
    pub kind: LoadKind,
    /// The work of the load's threads beside the leap.
    pub work: Work,
}

/// The engine of a row, with its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineRow {
    /// The engine.
    pub choice: Asked,
    /// Size of areas; `None` for the library's default.
    pub area: Option<usize>,
    /// The priority of the thread that starts the job.
    pub starter: Starter,
}

/// The priority of a thread that starts a job, and that the job inherits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Starter {
    /// As the command was started.
    #[default]
    Ordinary,
    /// SCHED_BATCH.
    Batch,
    /// A nice value of 19.
    Nice19,
    /// SCHED_IDLE.
    Idle,
}

impl Starter {
    /// Runs `start` in a thread of this priority.
    ///
    /// # Errors
    /// Those of `start`. A priority may always be lowered.
    pub fn run<T: Send>(self, start: impl FnOnce() -> T + Send) -> T {
        let become_so = move || {
            let (policy, nice) = match self {
                Starter::Ordinary => return,
                Starter::Batch => (libc::SCHED_BATCH, None),
                Starter::Nice19 => (libc::SCHED_OTHER, Some(19)),
                Starter::Idle => (libc::SCHED_IDLE, None),
            };
            let parameter = libc::sched_param { sched_priority: 0 };
            // SAFETY: the calls change the calling thread only; the first one reads one structure.
            unsafe {
                libc::sched_setscheduler(0, policy, &parameter);
                nice.map(|nice| libc::setpriority(libc::PRIO_PROCESS, 0, nice));
            }
        };
        std::thread::scope(|scope| {
            let starts = scope.spawn(move || {
                become_so();
                start()
            });
            starts.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl fmt::Display for Starter {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Starter::Ordinary => "ordinary",
            Starter::Batch => "batch",
            Starter::Nice19 => "nice19",
            Starter::Idle => "idle",
        })
    }
}

/// Sizes of areas that --all measures besides the default one, for engines whose areas do not grow
/// by themselves.
const MORE_AREAS: [usize; 2] = [512 << 10, 16 << 20];

impl EnginesArgs {
    /// Runs of each row.
    pub fn runs(&self) -> usize {
        self.runs.unwrap_or(if self.all { 5 } else { 3 })
    }

    /// Runs of each short job: one run says less than one of a large region.
    pub fn job_runs(&self) -> usize {
        self.runs.unwrap_or(20)
    }

    /// The engines of regions, each once.
    pub fn choices(&self) -> Vec<EngineChoice> {
        self.engine.as_deref().map_or(EngineChoice::ALL.to_vec(), once_each)
    }

    /// The rows of each table of regions, in the order of the library's list of engines.
    pub fn rows(&self) -> Vec<EngineRow> {
        let mut rows = Vec::new();
        for choice in self.choices() {
            let mut areas = vec![None];
            if self.all && choice.forced().is_some_and(|engine| !engine.areas_grow()) {
                areas.extend(MORE_AREAS.map(Some));
            }
            let of_area = |area| {
                self.starters().map(move |starter| EngineRow {
                    choice: choice.into(),
                    area,
                    starter,
                })
            };
            rows.extend(areas.into_iter().flat_map(of_area));
        }
        rows
    }

    /// The first starter that is no ordinary thread, if there is one.
    pub fn other_starter(&self) -> Option<Starter> {
        self.starters().find(|starter| *starter != Starter::Ordinary)
    }

    fn starters(&self) -> impl Iterator<Item = Starter> {
        once_each(&self.starter).into_iter()
    }

    /// Threads that write to a region of so many bytes: each base page has one writer.
    pub fn writers_of(&self, bytes: u64) -> usize {
        self.writers.min((bytes / BASE_PAGE as u64) as usize)
    }

    /// Threads of the largest load.
    pub fn load_threads(&self) -> usize {
        let threads = |load: &NamedLoad| match load.work {
            Work::Rest => 0,
            Work::Map => 1,
            Work::Write(writing) => writing.writers + writing.readers,
        };
        self.loads(u64::MAX).iter().map(threads).max().unwrap_or(0)
    }

    /// The loads that threads put on a region of `region_bytes`, each once. The loads `small` and
    /// `scattered` are measured at rest, and are not in the list.
    pub fn loads(&self, region_bytes: u64) -> Vec<NamedLoad> {
        self.load_kinds().into_iter().flat_map(|kind| self.loads_of(kind, region_bytes)).collect()
    }

    /// The kinds of short jobs, each once.
    pub fn jobs(&self) -> Vec<LoadKind> {
        self.load_kinds().into_iter().filter(|kind| kind.shapes().is_some()).collect()
    }

    fn load_kinds(&self) -> Vec<LoadKind> {
        self.load.as_deref().map_or_else(|| self.default_kinds(), once_each)
    }

    fn default_kinds(&self) -> Vec<LoadKind> {
        let mut kinds = vec![LoadKind::Quiet, LoadKind::Uniform];
        if self.all {
            kinds.push(LoadKind::Skewed);
        }
        kinds.push(LoadKind::Changing);
        kinds
    }

    fn default_rates(&self) -> Vec<Rate> {
        let mut rates = vec![Rate::PerSecond(100_000)];
        if self.all {
            rates.push(Rate::PerSecond(10_000_000));
        }
        rates
    }

    /// One load for each rate, if the kind has rates.
    fn loads_of(&self, kind: LoadKind, region_bytes: u64) -> Vec<NamedLoad> {
        let writes = |pattern| {
            let work = Work::Write(Writing {
                pattern,
                writers: self.writers_of(region_bytes),
                readers: usize::from(self.readers),
                kernel: true,
                writer_cpu: None,
                total: None,
            });
            NamedLoad { kind, work }
        };
        let rows = match kind {
            LoadKind::Quiet => return vec![NamedLoad { kind, work: Work::Rest }],
            LoadKind::Bystander => return vec![NamedLoad { kind, work: Work::Map }],
            LoadKind::Small | LoadKind::Scattered => return vec![],
            LoadKind::Changing => return vec![writes(Pattern::Changing)],
            LoadKind::Uniform => Rows::Uniform,
            LoadKind::Skewed => Rows::Skewed,
        };
        let rates = self.rates.as_deref().map_or_else(|| self.default_rates(), once_each);
        rates.into_iter().map(|rate| writes(Pattern::Steady { rate, rows })).collect()
    }

    /// All kinds of memory, each once.
    pub fn kinds(&self) -> Vec<Kind> {
        once_each(&self.page_size)
    }

    /// The rows of each table of this kind of memory.
    pub fn rows_of(&self, kind: Kind) -> Vec<EngineRow> {
        let rows = |engine: MemoryEngine| {
            let (choice, area) = (Asked::Memory(engine), None);
            self.starters().map(move |starter| EngineRow { choice, area, starter })
        };
        match kind.private {
            true => MemoryEngine::ALL.into_iter().flat_map(rows).collect(),
            false => self.rows(),
        }
    }

    /// Bytes of the region with pages of this size.
    pub fn region_bytes(&self, page: PageSize) -> u64 {
        self.size.next_multiple_of(page.bytes() as u64)
    }
}

/// The help of `--engine`, with the engines that the library has.
fn engine_help() -> String {
    let known = EngineChoice::ALL.map(|choice| choice.to_string()).join(", ");
    format!(
        "Engines that move regions, by comma: {known} [default: all]; private memory moves by {} \
         and {}",
        MemoryEngine::UffdMove,
        MemoryEngine::Kernel
    )
}

fn rate(text: &str) -> Result<Rate, String> {
    match text.parse()? {
        Rate::PerSecond(0) => Err("0 writes per second: use --load quiet".to_owned()),
        rate => Ok(rate),
    }
}

fn runs(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(runs @ 1..=1000) => Ok(runs),
        Ok(_) => Err("use 1 to 1000 runs".to_owned()),
        Err(_) => Err("expected a number of runs, 1 to 1000".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: EnginesArgs,
    }

    fn parse(flags: &[&str]) -> Result<EnginesArgs, String> {
        Line::try_parse_from(["engines"].iter().chain(flags))
            .map(|line| line.args)
            .map_err(|error| error.to_string())
    }

    fn writes(kind: LoadKind, rate: Rate) -> NamedLoad {
        let rows = if kind == LoadKind::Skewed { Rows::Skewed } else { Rows::Uniform };
        written(kind, Pattern::Steady { rate, rows })
    }

    fn written(kind: LoadKind, pattern: Pattern) -> NamedLoad {
        let writing = Writing {
            pattern,
            writers: 1,
            readers: 0,
            kernel: true,
            writer_cpu: None,
            total: None,
        };
        NamedLoad { kind, work: Work::Write(writing) }
    }

    const QUIET: NamedLoad = NamedLoad { kind: LoadKind::Quiet, work: Work::Rest };
    const SLOW: Rate = Rate::PerSecond(100_000);
    const FAST: Rate = Rate::PerSecond(10_000_000);

    #[test]
    fn defaults() {
        let args = parse(&[]).unwrap();
        assert_eq!((args.size, args.runs(), args.threads), (1 << 30, 3, 1));
        assert_eq!((args.writers, args.readers), (1, 0));
        let kinds: Vec<String> = args.kinds().iter().map(Kind::to_string).collect();
        assert_eq!(kinds, ["4k", "thp", "anon-4k", "anon-thp"]);
        let engines = MemoryEngine::ALL.map(Asked::Memory);
        let of_private = args.rows_of(args.kinds()[3]);
        assert_eq!(of_private.iter().map(|row| row.choice).collect::<Vec<_>>(), engines);
        let changing = written(LoadKind::Changing, Pattern::Changing);
        assert_eq!(args.loads(1 << 30), [QUIET, writes(LoadKind::Uniform, SLOW), changing]);
        let rows = args.rows();
        assert!(rows.iter().all(|row| row.area.is_none()));
        let of_region: Vec<_> = Asked::of_region().collect();
        assert_eq!(rows.iter().map(|row| row.choice).collect::<Vec<_>>(), of_region);
    }

    #[test]
    fn all_has_every_load_and_more_areas_and_flags_win_over_it() {
        let args = parse(&["--all"]).unwrap();
        assert_eq!(args.runs(), 5);
        let [uniform, skewed] = [LoadKind::Uniform, LoadKind::Skewed];
        let expected = [(uniform, SLOW), (uniform, FAST), (skewed, SLOW), (skewed, FAST)];
        let expected = expected.map(|(kind, rate)| writes(kind, rate));
        let changing = written(LoadKind::Changing, Pattern::Changing);
        assert_eq!(args.loads(1 << 30), [&[QUIET], &expected[..], &[changing]].concat());
        let areas: Vec<_> = args.rows().iter().filter_map(|row| row.area).collect();
        assert!(!areas.is_empty() && areas.len().is_multiple_of(MORE_AREAS.len()), "{areas:?}");
        let flags = ["--all", "--load", "quiet", "--runs", "1", "--engine", "auto"];
        let args = parse(&flags).unwrap();
        assert_eq!((args.runs(), args.loads(1 << 30)), (1, vec![QUIET]));
        assert_eq!(
            args.rows(),
            [EngineRow { choice: Asked::Auto, area: None, starter: Starter::Ordinary }]
        );
    }

    #[test]
    fn lists_have_each_item_once_in_the_order_asked_for() {
        let flags = ["--page-size", "thp,4k,thp", "--load", "skewed,skewed", "--rates", "5,max,5"];
        let args = parse(&flags).unwrap();
        assert_eq!(args.kinds(), [PageSize::Thp, PageSize::Base].map(Kind::from));
        let rates = [Rate::PerSecond(5), Rate::Max].map(|rate| writes(LoadKind::Skewed, rate));
        assert_eq!(args.loads(1 << 30), rates);
        let last = EngineChoice::ALL[EngineChoice::ALL.len() - 1];
        let args = parse(&["--engine", &format!("{last},auto,{last}")]).unwrap();
        let choices: Vec<_> = args.rows().iter().map(|row| row.choice).collect();
        assert_eq!(choices, [last, EngineChoice::Auto].map(Asked::from));
    }

    #[test]
    fn short_jobs_are_asked_for_by_name_and_are_no_load_of_a_region() {
        for flags in [&[][..], &["--all"]] {
            assert!(parse(flags).unwrap().jobs().is_empty());
        }
        let args = parse(&["--load", "scattered,quiet,small,small"]).unwrap();
        assert_eq!(args.jobs(), [LoadKind::Scattered, LoadKind::Small]);
        assert_eq!(args.loads(1 << 30), [QUIET]);
        assert_eq!((args.runs(), args.job_runs()), (3, 20));
        let args = parse(&["--load", "small", "--engine", "auto,auto", "--runs", "7"]).unwrap();
        assert_eq!((args.choices(), args.job_runs()), (vec![EngineChoice::Auto], 7));
        assert!(args.loads(1 << 30).is_empty() && args.load_threads() == 0);
    }

    #[test]
    fn a_small_region_has_fewer_writers_than_asked_for() {
        let args = parse(&["--writers", "9", "--load", "uniform"]).unwrap();
        let writers = |bytes| match args.loads(bytes)[0].work {
            Work::Write(writing) => writing.writers,
            _ => 0,
        };
        assert_eq!([writers(1 << 30), writers(2 * BASE_PAGE as u64)], [9, 2]);
        assert_eq!(args.load_threads(), 9);
    }

    #[test]
    fn a_region_has_whole_pages() {
        let args = parse(&["--size", "5000"]).unwrap();
        assert_eq!(args.region_bytes(PageSize::Base), 8192);
        assert_eq!(args.region_bytes(PageSize::Thp), 2 << 20);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (flag, values) in [
            ("--size", ["0", "-1", "1.5g", "1000t", ""].as_slice()),
            ("--page-size", &["3k", "", "4k,", "4k;thp", "anon-", "anon-2m", "anon"]),
            ("--engine", &["magic", "", "auto,", "auto;mprotect"]),
            ("--load", &["loud", "", "quiet,loud"]),
            ("--rates", &["0", "-1", "fast", "100k,0"]),
            ("--runs", &["0", "1001", "-1", "many"]),
            ("--threads", &["0", "65"]),
            ("--wait-budget", &["0us", "-1ms", "1", "ms", "1s", "99999999999999999999ms"]),
            ("--writers", &["0", "65"]),
            ("--readers", &["x", "65"]),
            ("--from", &["one", "1.5"]),
            ("--to", &["0,1"]),
            ("--seed", &["x"]),
        ] {
            for value in values {
                let error = parse(&[flag, value]).unwrap_err();
                assert!(error.contains(flag), "{flag} {value}: {error}");
            }
        }
    }
}
