//! Flags of `pageleap bench engines`, and what each accepts.

use std::fmt;

use clap::{Args, Subcommand, ValueEnum};
use pageleap::{BASE_PAGE, EngineChoice, PageSize};

use crate::bytes;
use crate::writer::{Rate, Rows};

/// Measure what a leap costs on this machine.
#[derive(Args, Clone, Debug)]
#[command(arg_required_else_help = true)]
pub struct BenchArgs {
    /// What is measured
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// What can be measured.
#[derive(Subcommand, Clone, Debug)]
pub enum BenchCommand {
    Engines(Box<EnginesArgs>),
}

/// Compare the engines with a one-thread memcpy of the same bytes, without load and while a thread
/// writes.
///
/// For each page size and each load, every run times a memcpy, and then one leap with each engine
/// and size of areas, in turns and in this process; shown are medians over the runs. Each leap goes
/// from the same pool to the other one and back, the way back unmeasured. On a machine with one
/// node both pools lie on it: frames are new, the node is the same, and nothing here is a NUMA
/// speed-up.
///
/// The writer keeps a shadow copy, which is compared with the region after every leap, and so does
/// a thread beside it for which the kernel writes words of 64 pages every 5 ms (preadv). They end
/// with the job, so that rates and gaps include the recycling of vacated frames. Threads are not
/// bound to CPUs; use `numactl` for that.
///
/// Exit code: 0 measured, and every write is present; 1 a write was lost, or a failure; 2 a request
/// that this machine or this program cannot take; 130 interrupted by Ctrl-C (what is complete until
/// then is shown).
#[derive(Args, Clone, Debug)]
pub struct EnginesArgs {
    /// Bytes that leap, such as 64m or 1g; rounded up to whole pages
    #[arg(long, value_name = "BYTES", default_value = "1g", allow_hyphen_values = true, value_parser = size)]
    pub size: u64,

    /// Page sizes, by comma: 4k, thp (2 MB, ordinary memory), 2m and 1g (reserved huge pages;
    /// skipped where too few are free)
    #[arg(long, value_name = "SIZES", default_value = "4k,thp", value_delimiter = ',')]
    pub page_size: Vec<PageSize>,

    /// Loads, by comma: quiet (nobody writes), uniform (random words), skewed (75 % of the writes
    /// to 3.125 % of the region), bystander (nobody writes, a thread maps, faults and unmaps other
    /// memory all the time)
    #[arg(
        long,
        value_name = "LOADS",
        default_value = "quiet,uniform,skewed",
        value_delimiter = ',',
        hide_possible_values = true
    )]
    pub load: Vec<LoadKind>,

    /// Writes per second of uniform and skewed, by comma: numbers such as 100k or 10m, or max
    #[arg(long, value_name = "RATES", default_value = "100k,10m", value_delimiter = ',', allow_hyphen_values = true, value_parser = rate)]
    pub rates: Vec<Rate>,

    /// Runs, each with one leap of every row
    #[arg(long, value_name = "N", default_value = "5", allow_hyphen_values = true, value_parser = runs)]
    pub runs: usize,

    /// Threads that write, where any do: each to its part of the region, and at its part of the
    /// rate
    #[arg(long, value_name = "N", default_value = "1", allow_hyphen_values = true, value_parser = bytes::threads)]
    pub writers: usize,

    /// Threads that read the region all the time beside those who write
    #[arg(long, value_name = "N", default_value = "0", value_parser = clap::value_parser!(u8).range(..=64))]
    pub readers: u8,

    /// Threads that copy during a leap; the memcpy it is compared with always has one
    #[arg(long, value_name = "N", default_value = "1", allow_hyphen_values = true, value_parser = bytes::threads)]
    pub threads: usize,

    /// Node that the region starts on [default: the first node with memory]
    #[arg(long, value_name = "NODE")]
    pub from: Option<u32>,

    /// Node to leap to [default: the next node with memory, or the same one if there is no other]
    #[arg(long, value_name = "NODE")]
    pub to: Option<u32>,

    /// Seed of the writer's choice of words
    #[arg(long, value_name = "SEED", default_value = "1")]
    pub seed: u64,

    /// Print a JSON array with one object per row to standard output instead of text
    #[arg(long)]
    pub json: bool,
}

/// A kind of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LoadKind {
    /// Nobody writes.
    Quiet,
    /// Writes to random words.
    Uniform,
    /// Most writes to a small part.
    Skewed,
    /// Nobody writes; somebody maps and faults other memory.
    Bystander,
}

impl fmt::Display for LoadKind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            LoadKind::Quiet => "quiet",
            LoadKind::Uniform => "uniform",
            LoadKind::Skewed => "skewed",
            LoadKind::Bystander => "bystander",
        })
    }
}

/// A load: a kind, at a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Its kind.
    pub kind: LoadKind,
    /// What goes on beside the leap.
    pub work: Work,
}

/// What a thread does while pages leap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// There is none.
    Rest,
    /// It writes to the region, and so does the kernel for another one.
    Write(Rate, Rows),
    /// It maps and faults memory that has nothing to do with the region.
    Map,
}

/// An engine and how it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineRow {
    /// What is asked of the library.
    pub choice: EngineChoice,
    /// Size of areas; `None` for the library's default.
    pub area: Option<usize>,
}

/// The rows of every table: `auto`, and each engine of the library. An engine whose areas keep
/// their size has a row for a small one and one for a large one.
pub fn engine_rows() -> Vec<EngineRow> {
    const FIXED: [Option<usize>; 2] = [Some(512 << 10), Some(16 << 20)];
    let areas = |choice: EngineChoice| match choice.forced() {
        Some(engine) if engine.needs().is_none() => &FIXED[..],
        _ => &[None],
    };
    let rows = |choice| areas(choice).iter().map(move |area| EngineRow { choice, area: *area });
    EngineChoice::ALL.into_iter().flat_map(rows).collect()
}

impl EnginesArgs {
    /// Threads that write to a region of so many bytes: each base page is one thread's.
    pub fn writers_of(&self, bytes: u64) -> usize {
        self.writers.min((bytes / BASE_PAGE as u64) as usize)
    }

    /// Threads of the largest load.
    pub fn load_threads(&self) -> usize {
        let threads = |load: &Load| match load.work {
            Work::Rest => 0,
            Work::Map => 1,
            Work::Write(..) => self.writers + usize::from(self.readers),
        };
        self.loads().iter().map(threads).max().unwrap_or(0)
    }

    /// All loads, each once.
    pub fn loads(&self) -> Vec<Load> {
        let mut loads = Vec::new();
        for kind in once_each(&self.load) {
            let rows = match kind {
                LoadKind::Quiet => {
                    loads.push(Load { kind, work: Work::Rest });
                    continue;
                }
                LoadKind::Bystander => {
                    loads.push(Load { kind, work: Work::Map });
                    continue;
                }
                LoadKind::Uniform => Rows::Uniform,
                LoadKind::Skewed => Rows::Skewed,
            };
            loads.extend(
                once_each(&self.rates)
                    .into_iter()
                    .map(|rate| Load { kind, work: Work::Write(rate, rows) }),
            );
        }
        loads
    }

    /// All page sizes, each once.
    pub fn page_sizes(&self) -> Vec<PageSize> {
        once_each(&self.page_size)
    }

    /// Bytes of the region with pages of this size.
    pub fn region_bytes(&self, page: PageSize) -> u64 {
        self.size.next_multiple_of(page.bytes() as u64)
    }
}

fn once_each<T: Copy + PartialEq>(items: &[T]) -> Vec<T> {
    let mut kept = Vec::new();
    for item in items {
        if !kept.contains(item) {
            kept.push(*item);
        }
    }
    kept
}

fn size(text: &str) -> Result<u64, String> {
    match bytes::parse(text)? {
        0 => Err("a leap moves at least one page".to_owned()),
        bytes if bytes > 1 << 46 => Err("a pool has at most 2^46 bytes".to_owned()),
        bytes => Ok(bytes),
    }
}

fn rate(text: &str) -> Result<Rate, String> {
    match text.parse()? {
        Rate::PerSecond(0) => Err("a writer that never writes is --load quiet".to_owned()),
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

    #[test]
    fn defaults() {
        let args = parse(&[]).unwrap();
        assert_eq!((args.size, args.runs, args.threads), (1 << 30, 5, 1));
        assert_eq!((args.writers, args.readers), (1, 0));
        assert_eq!(args.page_sizes(), [PageSize::Base, PageSize::Thp]);
        let (slow, fast) = (Rate::PerSecond(100_000), Rate::PerSecond(10_000_000));
        let mut expected = vec![Load { kind: LoadKind::Quiet, work: Work::Rest }];
        for (kind, rows) in [(LoadKind::Uniform, Rows::Uniform), (LoadKind::Skewed, Rows::Skewed)] {
            expected.extend([slow, fast].map(|rate| Load { kind, work: Work::Write(rate, rows) }));
        }
        assert_eq!(args.loads(), expected);
    }

    #[test]
    fn lists_have_each_item_once_in_the_order_asked_for() {
        let args =
            parse(&["--page-size", "thp,4k,thp", "--load", "skewed,skewed", "--rates", "5,max,5"])
                .unwrap();
        assert_eq!(args.page_sizes(), [PageSize::Thp, PageSize::Base]);
        assert_eq!(
            args.loads(),
            [Rate::PerSecond(5), Rate::Max]
                .map(|rate| Load { kind: LoadKind::Skewed, work: Work::Write(rate, Rows::Skewed) })
        );
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
            ("--page-size", &["3k", "", "4k,", "4k;thp"]),
            ("--load", &["loud", "", "quiet,loud"]),
            ("--rates", &["0", "-1", "fast", "100k,0"]),
            ("--runs", &["0", "1001", "-1", "many"]),
            ("--threads", &["0", "65"]),
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
