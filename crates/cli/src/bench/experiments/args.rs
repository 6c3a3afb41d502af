//! Flags of the experiments.

use std::time::Duration;

use clap::{Args, Subcommand};
use pageleap::{Engine, EngineChoice, PageSize};
use pageleap_measure::experiments::btree::{Mix, Share};
use pageleap_measure::experiments::writes::{self, Writes};
use pageleap_measure::experiments::{About, access, btree, copy, quiet, scale, sustained, tpch};
use pageleap_measure::load::{Rate, Rows};
use pageleap_measure::method::{LEAST_VALUES, Method};

use super::super::memory::once_each;
use crate::bytes;
use crate::export::SampleExports;
use crate::stop::Refusal;
use crate::times;

/// Compare access to local and to remote memory by one thread (Figure 1).
///
/// A thread on a CPU of the node --to reads and writes memory of that node and of the node --from:
/// each word in order, and words at random (10 million, or one for each 64 bytes if that is less).
/// On a machine with one node all memory is local; there the page sizes are compared with each
/// other.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  pageleap bench access
      all page sizes, 1 GB each
  pageleap bench access --from 2 --to 0 --page-size 4k --size 4g
      the paper's size, memory of node 2 by a thread of node 0")]
pub struct AccessArgs {
    #[command(flatten)]
    pub common: ExperimentArgs,
}

/// Compare copies into fresh and into pooled memory with migrations of the same bytes (Figure 2).
///
/// Copies by one thread into memory that is mapped already, and into memory that is mapped
/// meanwhile; a leap of a region; and moves of private memory. Ratios are to the fastest copy into
/// mapped memory. Memory rests meanwhile, and its contents are compared after each migration.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  pageleap bench copy
      all page sizes, 1 GB
  pageleap bench copy --page-size 4k --size 4g --runs 3 --export-json copy.json
      the paper's size and number of runs")]
pub struct CopyArgs {
    #[command(flatten)]
    pub common: ExperimentArgs,
}

/// Compare all ways to move memory while nothing else runs, over the size of areas (Figure 4).
///
/// Ratios are to the fastest copy of the same bytes into mapped memory, in the same round. The
/// contents are compared after each migration.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  pageleap bench quiet
      all engines, over sizes of areas: some minutes for each page size
  pageleap bench quiet --quick --report quiet.html --export-csv quiet.csv
      256 MB, three engines, two sizes of areas; a page with plots, and all samples
  pageleap bench quiet --engine mprotect --area 512k,16m --page-size 4k --size 4g
      the paper's method at its two best sizes")]
pub struct QuietArgs {
    #[command(flatten)]
    pub leaps: LeapArgs,

    #[command(flatten)]
    pub common: ExperimentArgs,
}

/// The engines that are measured, and the sizes of their areas.
#[derive(Args, Clone, Debug)]
pub struct LeapArgs {
    /// Engines that move regions, by comma [default: all; three of them with --quick]
    #[arg(long, value_name = "ENGINES", value_delimiter = ',')]
    pub engine: Option<Vec<EngineChoice>>,

    /// Sizes of areas, by comma [default: those of the figure, 4k to 256m, and below 1m only with
    /// mprotect; 512k and 16m with --quick and --smoke]
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = bytes::region_size)]
    pub area: Option<Vec<u64>>,
}

impl LeapArgs {
    /// Engines with `--quick`.
    const FEW_ENGINES: [Option<Engine>; 3] = [None, Some(Engine::Precopy), Some(Engine::Mprotect)];

    /// The engines, each once.
    pub fn engines(&self, common: &ExperimentArgs) -> Vec<EngineChoice> {
        let few = LeapArgs::FEW_ENGINES.map(|engine| engine.map_or(EngineChoice::Auto, Into::into));
        let default: &[EngineChoice] = if common.quick { &few } else { &EngineChoice::ALL };
        once_each(self.engine.as_deref().unwrap_or(default))
    }

    /// Refuses areas that the memory does not hold.
    pub fn check(&self, common: &ExperimentArgs) -> Result<(), Refusal> {
        let mut areas = self.area.iter().flatten();
        areas.find(|area| **area > common.bytes()).map_or(Ok(()), |area| {
            let why = format!("--area {area}: the memory has {} bytes", common.bytes());
            Err(Refusal::new(why))
        })
    }

    /// The sizes of areas; `None` for those of the figure.
    pub fn areas(&self, common: &ExperimentArgs) -> Option<Vec<usize>> {
        let given = self.area.as_ref();
        let given = given.map(|areas| areas.iter().map(|area| *area as usize).collect());
        let few = common.is_short();
        given.or_else(|| few.then(|| quiet::BEST.to_vec()))
    }
}

/// Compare all ways to move memory while a thread writes to it (Figures 5 and 7).
///
/// A thread on a CPU of the node --to writes random words at a requested rate. The ratio that
/// counts is that to a memcpy beside the same load, in the same round; the ratio to the memcpy at rest
/// stands beside it. A migration ends after 10 s, even if pages are left. All words are compared
/// with the last value that was written to them.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  pageleap bench writes --quick
      256 MB, two engines, two sizes of areas
  pageleap bench writes --page-size 4k --rates 1m,10m --skewed none
      two rates, uniform
  pageleap bench writes --engine mprotect --area 512k,16m --size 4g --runs 3
      the paper's method at its two best sizes, the paper's size and number of runs")]
pub struct WritesArgs {
    /// Writes per second to random words, by comma: numbers such as 100k or 10m, or max [default:
    /// 10k,100k,10m; 10k,100k,100m for huge pages]
    #[arg(long, value_name = "RATES", value_delimiter = ',')]
    pub rates: Option<Vec<Rate>>,

    /// Writes per second of which 75 % go to one part of 32, by comma, or none [default: 100k]
    #[arg(long, value_name = "RATES", value_delimiter = ',', value_parser = skewed)]
    pub skewed: Option<Vec<Option<Rate>>>,

    #[command(flatten)]
    pub leaps: LeapArgs,

    #[command(flatten)]
    pub common: ExperimentArgs,
}

impl WritesArgs {
    /// The loads of memory with pages of this size.
    pub fn loads(&self, page: PageSize) -> Vec<Writes> {
        let of_figure = |rows| {
            let all = Writes::of_figure(page).into_iter();
            all.filter(move |writes| writes.rows == rows).collect::<Vec<Writes>>()
        };
        let given = |rates: &mut dyn Iterator<Item = Rate>, rows| {
            rates.map(|rate| Writes { rate, rows }).collect::<Vec<Writes>>()
        };
        let uniform = self.rates.as_ref().map_or_else(
            || of_figure(Rows::Uniform),
            |rates| given(&mut rates.iter().copied(), Rows::Uniform),
        );
        let skewed = self.skewed.as_ref().map_or_else(
            || of_figure(Rows::Skewed),
            |rates| given(&mut rates.iter().flatten().copied(), Rows::Skewed),
        );
        once_each(&[uniform, skewed].concat())
    }
}

/// Parses a rate of which a share can be kept.
fn number_per_s(text: &str) -> Result<Rate, String> {
    match text.parse()? {
        Rate::PerSecond(0) | Rate::Max => {
            Err("a share of the requested writes needs a number of them, above 0".to_owned())
        }
        rate => Ok(rate),
    }
}

fn skewed(text: &str) -> Result<Option<Rate>, String> {
    if text == "none" { Ok(None) } else { text.parse().map(Some) }
}

/// Measure the overhead of migrations at 100,000 writes per second (Table 2).
///
/// Extra bytes are those that were copied again because they were written meanwhile. Time beyond a
/// memcpy is the time that is left if the time to copy all bytes that were copied, once more and at
/// rest, is subtracted.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  pageleap bench overhead
      the paper's method at the sizes of areas of Table 2, and the library's choice
  pageleap bench overhead --engine auto,precopy,mprotect --size 4g --page-size 4k
      other engines, the paper's size")]
pub struct OverheadArgs {
    #[command(flatten)]
    pub leaps: LeapArgs,

    #[command(flatten)]
    pub common: ExperimentArgs,
}

/// Measure leaps by one to all threads, over the size of the memory.
///
/// Copies by as many threads stand beside them. Ratios are to the fastest copy by one thread. On a
/// machine with two nodes the kernel's `move_pages` stands there, too, which copies by one thread.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  pageleap bench scale
      64 MB to all that fits, by one to all threads
  pageleap bench scale --size 4g --threads 1,8 --page-size thp
      64 MB to 4 GB, by one and by eight threads")]
pub struct ScaleArgs {
    /// Threads that copy, by comma [default: 1, 2, 4 and so on, up to the CPUs of the node --to]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = bytes::threads)]
    pub threads: Option<Vec<usize>>,

    #[command(flatten)]
    pub common: ExperimentArgs,
}

/// Measure how many of the requested writes are done in 10 s, beside a migration (Figure 6).
///
/// Ratios are to memory that stays on its node. Above 1 a migration has paid: it costs writes while
/// it runs, and the memory is local afterwards. On a machine with one node it cannot pay.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  pageleap bench sustained --page-size 4k
      1 to 10 million writes per second
  pageleap bench sustained --rates 6m --window 10s --size 4g --page-size 4k
      one rate, the paper's size")]
pub struct SustainedArgs {
    /// Writes per second, by comma [default: 1m,2m,4m,6m,8m,10m; 1m,6m with --quick]
    #[arg(long, value_name = "RATES", value_delimiter = ',', value_parser = number_per_s)]
    pub rates: Option<Vec<Rate>>,

    /// How long the thread writes [default: 10s; 0.5s with --quick, 0.1s with --smoke]
    #[arg(long, value_name = "TIME", value_parser = times::timeout)]
    pub window: Option<Duration>,

    #[command(flatten)]
    pub leaps: LeapArgs,

    #[command(flatten)]
    pub common: ExperimentArgs,
}

impl SustainedArgs {
    /// The rates, each once.
    pub fn rates(&self) -> Vec<Rate> {
        let few = [sustained::RATES[0], sustained::RATES[3]];
        let default = if self.common.is_short() { &few[..] } else { &sustained::RATES };
        once_each(self.rates.as_deref().unwrap_or(default))
    }

    /// How long the thread writes.
    pub fn window(&self) -> Duration {
        self.window.unwrap_or(match (self.common.quick, self.common.smoke) {
            (true, _) => Duration::from_millis(500),
            (_, true) => Duration::from_millis(100),
            _ => sustained::WINDOW,
        })
    }
}

/// Run TPC-H queries over a table that moves meanwhile (Figure 8).
///
/// A thread on a CPU of the node --to starts a migration of `lineitem`, and then runs Q1 or Q6 five
/// times: with and without a thread that makes ten million writes in all, without delay, into
/// L_ORDERKEY. Ratios are to the table that stays on its node. Notes say from which query on a
/// migration pays; on a machine with one node it cannot. Every answer, and the whole table, are
/// compared afterwards.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  pageleap bench tpch --page-size 4k
      a table of about 1 GB
  pageleap bench tpch --quick --page-size thp
      a table of about 256 MB")]
pub struct TpchArgs {
    #[command(flatten)]
    pub common: ExperimentArgs,
}

/// Query a B+-tree while its leaves move (Figures 3 to 6 of the paper of move_pages2).
///
/// Threads on CPUs of the node --to run a mix of queries like those of YCSB on a tree with
/// optimistic lock coupling, whose nodes have 4 KB. A share of all queries are migrations: the
/// thread moves leaves to the node --to, or back. Ratios are to the same queries without
/// migrations, on the same memory. Every answer is checked, and all entries are compared after each
/// turn. On a machine with one node only regions move, to other frames.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  pageleap bench btree
      mixes a, c and e with 0.01, 25 and 50 % migrations
  pageleap bench btree --mixes c --migrations 0.01 --size 4g
      the load of Figure 6, with batches of 32 to 1024 pages
  pageleap bench btree --engine auto,precopy,wp-sync --pages 64 --quick
      engines of regions, migrations of 64 leaves")]
pub struct BtreeArgs {
    /// Mixes, by comma: a (50 % look-ups, 50 % updates), c (look-ups), e (95 % scans of up to 100
    /// entries, 5 % insertions) [default: a,c,e]
    #[arg(long, value_name = "MIXES", value_delimiter = ',')]
    pub mixes: Option<Vec<Mix>>,

    /// Migrations among all queries in percent, by comma [default: 0.01,25,50; 25 with --quick and
    /// --smoke]
    #[arg(long, value_name = "PERCENT", value_delimiter = ',')]
    pub migrations: Option<Vec<Share>>,

    /// Leaves of a migration. A small tree, or many threads, have fewer [default: 1024]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub pages: Option<u32>,

    /// Threads that query [default: one for each CPU of the node --to, but at most 8]
    #[arg(long, value_name = "N", value_parser = bytes::threads)]
    pub threads: Option<usize>,

    /// Engines that move the region, by comma [default: auto,mprotect; auto with --quick and
    /// --smoke]
    #[arg(long, value_name = "ENGINES", value_delimiter = ',')]
    pub engine: Option<Vec<EngineChoice>>,

    /// How long the threads query in each turn [default: 1s; 0.2s with --quick, 0.05s with --smoke]
    #[arg(long, value_name = "TIME", value_parser = times::timeout)]
    pub window: Option<Duration>,

    #[command(flatten)]
    pub common: ExperimentArgs,
}

impl BtreeArgs {
    /// The most threads without `--threads`. With more, a migration would have fewer leaves.
    pub const USUAL_THREADS: usize = 8;

    /// The experiment with defaults.
    pub fn usual(common: ExperimentArgs) -> BtreeArgs {
        let (mixes, migrations, engine) = (None, None, None);
        BtreeArgs { mixes, migrations, pages: None, threads: None, engine, window: None, common }
    }

    /// Mixes, each once.
    pub fn mixes(&self) -> Vec<Mix> {
        once_each(self.mixes.as_deref().unwrap_or(&Mix::ALL))
    }

    /// Shares of migrations, each once.
    pub fn shares(&self) -> Vec<Share> {
        let default = if self.common.is_short() { &[Share::MEDIUM][..] } else { &Share::ALL };
        once_each(self.migrations.as_deref().unwrap_or(default))
    }

    /// Engines that move the region, each once.
    pub fn engines(&self) -> Vec<EngineChoice> {
        let usual = [EngineChoice::Auto, Engine::Mprotect.into()];
        let default = if self.common.is_short() { &usual[..1] } else { &usual };
        once_each(self.engine.as_deref().unwrap_or(default))
    }

    /// How long the threads query.
    pub fn window(&self) -> Duration {
        self.window.unwrap_or(match (self.common.quick, self.common.smoke) {
            (true, _) => Duration::from_millis(200),
            (_, true) => Duration::from_millis(50),
            _ => btree::WINDOW,
        })
    }
}

/// The experiments, as subcommands of `pageleap bench`.
#[derive(Subcommand, Clone, Debug)]
pub enum ExperimentCommand {
    Access(AccessArgs),
    Btree(BtreeArgs),
    Copy(CopyArgs),
    Overhead(OverheadArgs),
    Quiet(QuietArgs),
    Scale(ScaleArgs),
    Sustained(SustainedArgs),
    Tpch(TpchArgs),
    Writes(WritesArgs),
}

impl ExperimentCommand {
    /// All experiments with the same flags, in the order of the papers.
    pub fn all(common: &ExperimentArgs) -> Vec<ExperimentCommand> {
        let common = || common.clone();
        let leaps = || LeapArgs { engine: None, area: None };
        vec![
            ExperimentCommand::Access(AccessArgs { common: common() }),
            ExperimentCommand::Copy(CopyArgs { common: common() }),
            ExperimentCommand::Quiet(QuietArgs { leaps: leaps(), common: common() }),
            ExperimentCommand::Writes(WritesArgs {
                rates: None,
                skewed: None,
                leaps: leaps(),
                common: common(),
            }),
            ExperimentCommand::Overhead(OverheadArgs { leaps: leaps(), common: common() }),
            ExperimentCommand::Sustained(SustainedArgs {
                rates: None,
                window: None,
                leaps: leaps(),
                common: common(),
            }),
            ExperimentCommand::Tpch(TpchArgs { common: common() }),
            ExperimentCommand::Scale(ScaleArgs { threads: None, common: common() }),
            ExperimentCommand::Btree(BtreeArgs::usual(common())),
        ]
    }

    /// The flags that all experiments have.
    pub fn common(&self) -> &ExperimentArgs {
        match self {
            ExperimentCommand::Access(args) => &args.common,
            ExperimentCommand::Btree(args) => &args.common,
            ExperimentCommand::Copy(args) => &args.common,
            ExperimentCommand::Overhead(args) => &args.common,
            ExperimentCommand::Quiet(args) => &args.common,
            ExperimentCommand::Scale(args) => &args.common,
            ExperimentCommand::Sustained(args) => &args.common,
            ExperimentCommand::Tpch(args) => &args.common,
            ExperimentCommand::Writes(args) => &args.common,
        }
    }

    /// Its name in commands.
    pub fn name(&self) -> &'static str {
        match self {
            ExperimentCommand::Access(_) => access::ABOUT.name,
            ExperimentCommand::Btree(_) => btree::ABOUT.name,
            ExperimentCommand::Copy(_) => copy::ABOUT.name,
            ExperimentCommand::Overhead(_) => writes::OVERHEAD.name,
            ExperimentCommand::Quiet(_) => quiet::ABOUT.name,
            ExperimentCommand::Scale(_) => scale::ABOUT.name,
            ExperimentCommand::Sustained(_) => sustained::ABOUT.name,
            ExperimentCommand::Tpch(_) => tpch::ABOUT.name,
            ExperimentCommand::Writes(_) => writes::ABOUT.name,
        }
    }
}

/// The properties of all experiments, in the order of the papers.
pub const ABOUTS: [&About; 9] = [
    &access::ABOUT,
    &copy::ABOUT,
    &quiet::ABOUT,
    &writes::ABOUT,
    &writes::OVERHEAD,
    &sustained::ABOUT,
    &tpch::ABOUT,
    &scale::ABOUT,
    &btree::ABOUT,
];

/// Run all experiments, one after the other.
///
/// The result has each of them, and the machine once. An experiment that this machine cannot take
/// is named with the reason. Without --quick this takes hours.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  pageleap bench all --quick
      all experiments with 256 MB, in less than ten minutes
  pageleap bench all --smoke --page-size 4k
      each case once, to see that all of it works
  pageleap bench all --report all.html --export-json all.json
      everything, as a page with plots and as data")]
pub struct AllArgs {
    #[command(flatten)]
    pub common: ExperimentArgs,
}

/// Flags of all experiments.
#[derive(Args, Clone, Debug)]
pub struct ExperimentArgs {
    /// Bytes of the memory, such as 256m or 4g; rounded up to whole pages of 2 MB [default: 1g;
    /// 256m with --quick, 16m with --smoke, 4g with --paper]
    #[arg(long, value_name = "BYTES", value_parser = bytes::region_size)]
    pub size: Option<u64>,

    /// Page sizes, by comma: 4k, thp (2 MB, ordinary memory), 2m (reserved huge pages; left out
    /// where too few are free)
    #[arg(long, value_name = "SIZES", default_value = "4k,thp,2m", value_delimiter = ',')]
    #[arg(value_parser = page_size)]
    pub page_size: Vec<PageSize>,

    /// Node on which the memory is at first [default: the first node with memory]
    #[arg(long, value_name = "NODE")]
    pub from: Option<u32>,

    /// Node to which it moves, and on which threads run [default: the next node with memory, or the
    /// same node if it is the only one]
    #[arg(long, value_name = "NODE")]
    pub to: Option<u32>,

    #[command(flatten)]
    pub method: MethodArgs,

    /// Measure less: smaller memory, wider intervals, some seconds for each page size
    #[arg(long)]
    pub quick: bool,

    /// The paper's protocol: 4 GB, three rounds without warm-up, and means. Time-outs of 10 s, areas
    /// that are halved, and threads on CPUs of the destination are the same without it
    #[arg(long, conflicts_with_all = ["quick", "smoke"])]
    #[arg(conflicts_with_all = ["min_runs", "max_runs", "precision", "time_limit"])]
    pub paper: bool,

    /// Measure each case once with little memory, to see that all of it works
    #[arg(long, conflicts_with = "quick")]
    pub smoke: bool,

    /// Seed of contents, random accesses, orders and intervals
    #[arg(long, value_name = "SEED", default_value = "1")]
    pub seed: u64,

    /// Print one JSON object to standard output instead of text, with all samples
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub exports: SampleExports,
}

/// How often an experiment measures each case.
///
/// Each round measures all cases in turns: in random order, and in the reverse order in the next
/// round. Rounds end when all intervals are narrow, or at a bound.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Rounds")]
pub struct MethodArgs {
    /// Exactly N rounds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    #[arg(conflicts_with_all = ["min_runs", "max_runs", "precision", "time_limit"])]
    pub runs: Option<u16>,

    /// Rounds before those, whose results are dropped [default: 1; 0 with --smoke]
    #[arg(long, value_name = "N")]
    pub warmup: Option<u16>,

    /// The fewest rounds. Fewer than 6 have no interval [default: 6]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub min_runs: Option<u16>,

    /// The most rounds [default: 30]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub max_runs: Option<u16>,

    /// Stop when half of each interval (95 %) is at most this percentage of its median [default: 2;
    /// 5 with --quick]
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub precision: Option<f64>,

    /// Begin no round of a table that would probably end after this time [default: 300s, 900s for
    /// tpch, and six rounds for sustained; 18s with --quick]
    #[arg(long, value_name = "TIME", value_parser = times::timeout)]
    pub time_limit: Option<Duration>,
}

fn page_size(text: &str) -> Result<PageSize, String> {
    match text.parse::<PageSize>().map_err(|error| error.to_string())? {
        PageSize::Huge1G => Err("experiments take pages of 4k, thp and 2m".to_owned()),
        page => Ok(page),
    }
}

fn percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(percent / 100.0),
        _ => Err("expected a percentage above 0, up to 100".to_owned()),
    }
}

impl ExperimentArgs {
    /// All pages are multiples of it, and so is the memory.
    const UNIT: u64 = PageSize::Thp.bytes() as u64;

    /// Bytes of the memory.
    pub fn bytes(&self) -> u64 {
        let default = match (self.paper, self.quick, self.smoke) {
            (true, ..) => 4 << 30,
            (_, true, _) => 256 << 20,
            (_, _, true) => 16 << 20,
            _ => 1 << 30,
        };
        self.size.unwrap_or(default).next_multiple_of(ExperimentArgs::UNIT)
    }

    /// Whether measurements that take many seconds are left out.
    pub fn is_short(&self) -> bool {
        self.quick || self.smoke
    }

    /// Another bound of time, unless one is given or it is to be short.
    pub fn within(mut self, limit: Duration) -> ExperimentArgs {
        if !self.is_short() {
            self.method.time_limit.get_or_insert(limit);
        }
        self
    }

    /// No warm-up, unless one is given.
    pub fn not_warmed_up(mut self) -> ExperimentArgs {
        self.method.warmup.get_or_insert(0);
        self
    }

    /// Rounds and their bounds.
    pub fn method(&self) -> Method {
        let args = &self.method;
        let number = |given: Option<u16>, default| given.map_or(default, usize::from);
        if self.paper {
            let (runs, warmups) = (number(args.runs, 3), number(args.warmup, 0));
            return Method { means: true, ..Method::exactly(runs, warmups, self.seed) };
        }
        let warmups = number(args.warmup, if self.smoke { 0 } else { 1 });
        if let Some(runs) = args.runs {
            return Method::exactly(usize::from(runs), warmups, self.seed);
        }
        if self.smoke {
            return Method::exactly(number(args.max_runs, 1), warmups, self.seed);
        }
        let least = number(args.min_runs, LEAST_VALUES);
        let (precision, seconds) = if self.quick { (0.05, 18) } else { (0.02, 300) };
        Method {
            warmups,
            least,
            most: number(args.max_runs, 30).max(least),
            precision: args.precision.unwrap_or(precision),
            means: false,
            limit: Some(args.time_limit.unwrap_or(Duration::from_secs(seconds))),
            seed: self.seed,
        }
    }
}
