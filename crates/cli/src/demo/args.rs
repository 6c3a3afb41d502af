//! The flags of `pageleap demo` and the values that each flag accepts.

use std::time::Duration;

use clap::{Args, ValueEnum};
use pageleap::PageSize;
use pageleap_measure::load::{Load, Pattern, Rate, Rows, Work, Writing};

use crate::bytes;
use crate::engine::{Asked, names};
use crate::export::{Exports, Reports};
use crate::times::timeout;
use pageleap_measure::tpch::lineitem::MIN_SCALE_FACTOR;

/// Largest scale factor. Its table has 0.84 EB; above it the figures in messages stop making sense.
const MAX_SCALE_FACTOR: f64 = 1e9;

/// Move a live TPC-H table to another memory node while queries read it and a thread writes it.
///
/// The demo generates lineitem and keeps all its columns in a region on one node. First nothing
/// else runs, and the region moves there and back. Then one thread repeats Q1 and Q6, another
/// writes L_ORDERKEY of random rows, and meanwhile the region moves. The demo compares each move
/// with a memcpy of the same bytes under the same conditions. Then it verifies that all query
/// results are equal, that every write is present, and that the physical frames have changed. On a
/// machine with one node, the region moves to a second pool on that node: the frames are new, the
/// node is the same.
///
/// With --memory malloc the columns lie in a block of the allocator, and move in place. A reserve
/// of the destination is populated before each move; its time is a figure of its own.
///
/// The demo does not bind its threads to CPUs; `numactl --cpunodebind=N pageleap demo` binds them
/// to a node.
///
/// Exit code: 0 everything verified; 1 a mismatch or a failure; 2 a request that this machine or
/// this program cannot take; 130 interrupted by Ctrl-C.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct DemoArgs {
    /// Memory of the table: a region of a pool, or a block of malloc, which moves in place
    #[arg(long, value_name = "MEMORY", default_value = "pool", value_enum)]
    pub memory: Memory,

    /// TPC-H scale factor; 1 makes 6 million rows, 0.84 GB
    #[arg(long, value_name = "F", default_value = "1", allow_hyphen_values = true, value_parser = scale_factor)]
    pub scale_factor: f64,

    /// Node that the table starts on [default: the first node with memory]
    #[arg(long, value_name = "NODE")]
    pub from: Option<u32>,

    /// Node to move the table to [default: the next node with memory, or the same node on a machine
    /// with one]
    #[arg(long, value_name = "NODE")]
    pub to: Option<u32>,

    /// Page size: 4k, thp (2 MB, ordinary memory), or 2m or 1g (reserved huge pages, of pools only)
    #[arg(long, value_name = "SIZE", default_value = "4k")]
    pub page_size: PageSize,

    /// Writes per second to L_ORDERKEY: a number such as 0, 100k or 10m, or max
    #[arg(long, value_name = "RATE", default_value = "100k", allow_hyphen_values = true)]
    pub writes_per_s: Rate,

    /// Bytes that one migration step of a region works on, such as 512k or 16m [default: the
    /// engine's]
    #[arg(long, value_name = "BYTES", allow_hyphen_values = true, value_parser = area)]
    pub area: Option<usize>,

    /// The engine that moves the pages
    #[arg(long, value_name = "ENGINE", default_value = "auto", help = engine_help(), value_parser = Asked::named)]
    pub engine: Asked,

    /// Threads that copy during the migration of a region; memory of malloc has one, and so has the
    /// memcpy in the comparison
    #[arg(long, value_name = "N", default_value = "1", allow_hyphen_values = true, value_parser = bytes::threads)]
    pub threads: usize,

    /// Give up the migration after this time, such as 10, 0.5s or 250ms [default: never]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true, value_parser = timeout)]
    pub timeout: Option<Duration>,

    /// Seed for the writer's random choice of rows
    #[arg(long, value_name = "SEED", default_value = "1")]
    pub seed: u64,

    /// With --page-size 2m or 1g: reserve the huge pages for the run and release them afterwards,
    /// however it ends (needs root)
    #[arg(long)]
    pub reserve_huge_pages: bool,

    /// Print one JSON object to standard output instead of text
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub exports: Exports,

    #[command(flatten)]
    pub reports: Reports,
}

const EXAMPLES: &str = "\
Examples:
  pageleap demo
      a region of a pool leaps
  pageleap demo --report demo.html
      the same, with a page that draws the writer's rate and the placement over time
  pageleap demo --memory malloc --page-size thp
      ordinary memory leaps in place, in transparent huge pages
  pageleap demo --memory malloc --scale-factor 0.1 --writes-per-s 1m --json
      a small table, many writes, and one JSON object";

/// Memory of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Memory {
    /// A region of a pool.
    Pool,
    /// A block of the program's allocator.
    Malloc,
}

impl Memory {
    /// Its name in the flag and in the output.
    pub fn name(self) -> &'static str {
        match self {
            Memory::Pool => "pool",
            Memory::Malloc => "malloc",
        }
    }

    /// The engines that can move this memory.
    fn engines(self) -> Vec<Asked> {
        match self {
            Memory::Pool => Asked::of_region().collect(),
            Memory::Malloc => Asked::of_memory().collect(),
        }
    }
}

impl DemoArgs {
    /// Checks flags against each other. The parser of each flag has checked its value already.
    pub fn check(&self) -> Result<(), String> {
        self.check_memory()?;
        if self.reserve_huge_pages && !self.page_size.is_hugetlb() {
            return Err(format!(
                "--reserve-huge-pages has no meaning with --page-size {}; use --page-size 2m or 1g",
                self.page_size
            ));
        }
        let page = self.page_size.bytes();
        if let Some(area) = self.area
            && area % page != 0
        {
            return Err(format!(
                "--area {area}: an area consists of whole pages; use a multiple of {page} bytes with --page-size {}",
                self.page_size
            ));
        }
        Ok(())
    }

    /// Checks flags that do not fit the kind of memory.
    fn check_memory(&self) -> Result<(), String> {
        let memory = self.memory.name();
        let fits = self.memory.engines();
        if !fits.contains(&self.engine) {
            let (what, other) = match self.memory {
                Memory::Pool => ("does not move regions", "malloc"),
                Memory::Malloc => ("moves regions only", "pool"),
            };
            return Err(format!(
                "--engine {} {what}; use one of {} with --memory {memory}, or --memory {other}",
                self.engine,
                names(fits)
            ));
        }
        if self.memory == Memory::Pool {
            return Ok(());
        }
        if self.page_size.is_hugetlb() {
            return Err(format!(
                "--page-size {}: malloc gives no reserved huge pages; use --page-size 4k or thp, \
                 or --memory pool",
                self.page_size
            ));
        }
        if self.reserve_huge_pages {
            return Err(
                "--reserve-huge-pages: malloc gives no reserved huge pages; leave it out, \
                        or use --memory pool with --page-size 2m or 1g"
                    .to_owned(),
            );
        }
        if self.threads > 1 {
            return Err(format!(
                "--threads {}: one thread moves memory of malloc; leave it out, or use --memory \
                 pool",
                self.threads
            ));
        }
        if self.area.is_some() {
            return Err("--area: memory of malloc moves in areas that the library chooses; leave \
                        it out, or use --memory pool"
                .to_owned());
        }
        Ok(())
    }
}

/// The help text of `--engine`, which lists the engines of the library.
fn engine_help() -> String {
    format!(
        "The engine that moves the pages: {}; of malloc: {}",
        names(Asked::of_region()),
        names(Asked::of_memory())
    )
}

impl DemoArgs {
    /// The load that runs beside the leap and the queries.
    pub fn load(&self) -> Load {
        let writing = Writing {
            pattern: Pattern::Steady { rate: self.writes_per_s, rows: Rows::Uniform },
            writers: 1,
            readers: 0,
            kernel: false,
            writer_cpu: None,
            total: None,
        };
        let work = match self.writes_per_s {
            Rate::PerSecond(0) => Work::Rest,
            _ => Work::Write(writing),
        };
        Load { work, seed: self.seed }
    }
}

fn scale_factor(text: &str) -> Result<f64, String> {
    let factor: f64 = text.parse().map_err(|_| "expected a number such as 1 or 0.1".to_owned())?;
    if !factor.is_finite() || factor <= 0.0 {
        return Err("expected a finite number above 0".to_owned());
    }
    if factor > MAX_SCALE_FACTOR {
        return Err(format!("no machine has memory for more than scale factor {MAX_SCALE_FACTOR}"));
    }
    if factor < MIN_SCALE_FACTOR {
        return Err(format!(
            "the smallest table that TPC-H can generate has scale factor {MIN_SCALE_FACTOR}"
        ));
    }
    Ok(factor)
}

fn area(text: &str) -> Result<usize, String> {
    match usize::try_from(bytes::parse(text)?) {
        Ok(0) => Err("an area has at least one page".to_owned()),
        Ok(bytes) => Ok(bytes),
        Err(_) => Err("more bytes than the address space has".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: DemoArgs,
    }

    fn parse(flags: &[&str]) -> Result<DemoArgs, String> {
        let line = Line::try_parse_from(["demo"].iter().chain(flags))
            .map_err(|error| error.to_string())?;
        line.args.check()?;
        Ok(line.args)
    }

    #[test]
    fn defaults() {
        let args = parse(&[]).unwrap();
        assert_eq!(args.scale_factor, 1.0);
        assert_eq!((args.from, args.to, args.area, args.timeout), (None, None, None, None));
        assert_eq!(args.page_size, PageSize::Base);
        assert_eq!(args.writes_per_s, Rate::PerSecond(100_000));
        assert_eq!(args.threads, 1);
        assert!(!args.json && !args.reserve_huge_pages);
        assert_eq!(args.memory, Memory::Pool);
    }

    #[test]
    fn scale_factors() {
        assert_eq!(scale_factor("0.01"), Ok(0.01));
        assert_eq!(scale_factor("1e3"), Ok(1000.0));
        for text in ["0", "-1", "nan", "inf", "-inf", "1e-9", "1e10", "", "one", "1,5"] {
            assert!(scale_factor(text).is_err(), "{text}");
        }
        assert!(parse(&["--scale-factor", "-1"]).unwrap_err().contains("above 0"));
    }

    #[test]
    fn areas() {
        for (text, bytes) in
            [("4096", 4096), ("512k", 512 << 10), ("16M", 16 << 20), ("1g", 1 << 30)]
        {
            assert_eq!(area(text), Ok(bytes));
        }
        for text in ["0", "0k", "", "k", "-1", "1.5m", "99999999999g", "16mb", "+4k"] {
            assert!(area(text).is_err(), "{text}");
        }
        assert!(parse(&["--area", "5000"]).unwrap_err().contains("multiple of 4096"));
        assert!(
            parse(&["--area", "512k", "--page-size", "2m"])
                .unwrap_err()
                .contains("multiple of 2097152")
        );
        assert_eq!(parse(&["--area", "2m", "--page-size", "2m"]).unwrap().area, Some(2 << 20));
    }

    #[test]
    fn timeouts() {
        for (text, time) in [("10", 10_000), ("10s", 10_000), ("0.5", 500), ("250ms", 250)] {
            assert_eq!(timeout(text), Ok(Duration::from_millis(time)));
        }
        for text in ["0", "0s", "-1", "nan", "inf", "1e-30", "1e300", "", "s", "ms", "soon"] {
            assert!(timeout(text).is_err(), "{text}");
        }
    }

    #[test]
    fn other_flags_refuse_what_they_cannot_take() {
        for flags in [
            ["--page-size", "3k"],
            ["--engine", "magic"],
            ["--from", "-1"],
            ["--to", "one"],
            ["--writes-per-s", "-5"],
            ["--seed", "x"],
        ] {
            assert!(parse(&flags).is_err(), "{flags:?}");
        }
        assert!(parse(&["--reserve-huge-pages"]).unwrap_err().contains("--page-size 2m"));
    }

    #[test]
    fn each_engine_fits_one_kind_of_memory() {
        for asked in Asked::of_region().chain(Asked::of_memory()).filter(|one| *one != Asked::Auto)
        {
            let name = asked.to_string();
            let of = |memory| parse(&["--memory", memory, "--engine", &name]);
            let fits = [Memory::Pool, Memory::Malloc].map(|memory| of(memory.name()).is_ok());
            assert_eq!(fits, [asked.for_region().is_some(), asked.memory_engine().is_some()]);
            assert!(engine_help().contains(&name));
        }
        for memory in ["pool", "malloc"] {
            assert_eq!(parse(&["--memory", memory]).unwrap().engine, Asked::Auto);
        }
        let refused = parse(&["--engine", "uffd-move"]).unwrap_err();
        assert!(refused.contains("or --memory malloc"), "{refused}");
    }

    #[test]
    fn memory_of_malloc_refuses_what_only_pools_have() {
        for (flags, remedy) in [
            (["--page-size", "2m"].as_slice(), "use --page-size 4k or thp, or --memory pool"),
            (&["--page-size", "1g", "--reserve-huge-pages"], "use --page-size 4k or thp"),
            (&["--reserve-huge-pages"], "use --memory pool with --page-size 2m or 1g"),
            (&["--threads", "2"], "leave it out, or use --memory pool"),
            (&["--area", "1m"], "leave it out, or use --memory pool"),
            (
                &["--engine", "mprotect"],
                "auto, uffd-move, kernel with --memory malloc, or --memory",
            ),
        ] {
            let refused = parse(&[&["--memory", "malloc"], flags].concat()).unwrap_err();
            assert!(refused.contains(flags[0]) && refused.contains(remedy), "{refused}");
        }
        parse(&["--memory", "malloc", "--page-size", "thp", "--threads", "1"]).unwrap();
        assert!(parse(&["--memory", "disk"]).is_err());
    }
}
