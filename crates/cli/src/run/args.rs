//! The options of `pageleap run`: numactl's letters with numactl's meaning, and options that numactl
//! lacks.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::ValueParser;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, ValueEnum, ValueHint};

use super::alloc::Alloc;
use crate::bytes;

/// Start a program with a memory policy, on CPUs, and with settings of its own.
///
/// The letters are those of numactl, and mean the same; options end at the first word that is not an
/// option. The command becomes the program (execve), unless something has to stay behind. The kernel
/// drops nodes and CPUs outside of the cpuset in silence, so the settings are read back, and dropped
/// nodes and CPUs are named. Where the kernel or a container refuses a setting, the nearest one
/// stands in, and one line on standard error says so; --no-fallback refuses instead.
///
/// Exit code: that of the program; 125 the program was not started, 126 it cannot be executed, 127
/// there is no such program.
#[derive(Args, Clone, Debug)]
#[command(infer_long_args = true, args_override_self = true)]
#[command(after_help = EXAMPLES, override_usage = "pageleap run [OPTIONS] COMMAND [ARGUMENTS]...")]
pub struct RunArgs {
    /// Take memory from these nodes in turn
    #[arg(short, long, value_name = "NODES", group = "policy")]
    pub interleave: Option<String>,

    /// Take memory from these nodes in turn, by the weights of the kernel
    /// (/sys/kernel/mm/mempolicy/weighted_interleave, Linux 6.9)
    #[arg(short, long, value_name = "NODES", group = "policy")]
    pub weighted_interleave: Option<String>,

    /// Take memory from these nodes only
    #[arg(short, long, value_name = "NODES", group = "policy")]
    pub membind: Option<String>,

    /// Take memory from this node while it has some
    #[arg(short, long, value_name = "NODE", group = "policy")]
    pub preferred: Option<String>,

    /// Take memory from these nodes while they have some, from the nearest first (Linux 5.15)
    #[arg(short = 'P', long, value_name = "NODES", group = "policy")]
    pub preferred_many: Option<String>,

    /// Take memory from the node of the CPU that first touches it, and keep it there
    #[arg(short, long, group = "policy")]
    pub localalloc: bool,

    /// Run on the CPUs of these nodes only
    #[arg(short = 'N', long, value_name = "NODES", overrides_with = "physcpubind")]
    #[arg(alias = "cpubind", short_alias = 'c')]
    pub cpunodebind: Option<String>,

    /// Run on these CPUs only
    #[arg(short = 'C', long, value_name = "CPUS", overrides_with = "cpunodebind")]
    pub physcpubind: Option<String>,

    /// Whether the kernel moves the program's pages to the CPUs that use them (automatic NUMA
    /// balancing); -b is on
    #[arg(short, long, value_name = "on|off", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "on", hide_possible_values = true)]
    pub balancing: Option<Switch>,

    /// Nodes and CPUs may be outside of the affinity of this shell: + counts all that are online
    #[arg(short, long)]
    pub all: bool,

    /// Whether the program gets transparent huge pages
    #[arg(long, value_name = "on|off", hide_possible_values = true)]
    pub thp: Option<Switch>,

    /// Give each new thread a CPU of its own: one node after the other (sparse), or one node filled
    /// before the next (dense); sibling hyper-threads last. Threads that choose CPUs keep them. A
    /// small library that the program preloads does it; threads of static programs are pinned by this
    /// command, which stays, within 50 ms
    #[arg(long, value_name = "sparse|dense|none", hide_possible_values = true)]
    pub place: Option<Place>,

    /// Start on one node and grow from there: auto is the node whose CPUs move the fewest bytes
    /// (where resctrl tells them), then the one with the most idle cores. New threads come to the
    /// cores of the home, then to those of the nearest node, and to sibling hyper-threads last
    #[arg(long, value_name = "auto|NODE", conflicts_with_all = ["cpunodebind", "physcpubind"])]
    pub home: Option<String>,

    /// With --home auto: bytes of memory that the program needs, such as 64g; nodes on which fewer
    /// are free are passed over
    #[arg(long, value_name = "BYTES", requires = "home", value_parser = bytes::parse)]
    pub size: Option<u64>,

    /// Set --thp and --balancing for the whole machine instead of the program, until it has ended
    /// (root); `pageleap restore` puts back what a killed command has left
    #[arg(long)]
    pub system: bool,

    /// Allocator in the place of the C library's malloc: glibc, jemalloc, tcmalloc, mimalloc,
    /// tbbmalloc, or the path of a library (LD_PRELOAD)
    #[arg(long, value_name = "ALLOCATOR")]
    pub alloc: Option<Alloc>,

    /// Refuse where the kernel or a container refuses a setting, or drops a node or a CPU
    #[arg(long)]
    pub no_fallback: bool,

    /// Set nothing but for a trial, start nothing, and print the commands that do the same
    #[arg(long)]
    pub dry_run: bool,

    /// With --dry-run: print one JSON object instead of commands
    #[arg(long, requires = "dry_run")]
    pub json: bool,

    /// Say what was set, stay behind, and say what the kernel tells of the program
    #[arg(short, long)]
    pub verbose: bool,

    /// Write what this command says to this file instead of standard error
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub report_file: Option<PathBuf>,

    #[command(flatten)]
    pub of_numactl: OfNumactl,

    /// The program and its arguments
    #[arg(value_name = "COMMAND", num_args = 1.., trailing_var_arg = true)]
    #[arg(value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<OsString>,
}

const EXAMPLES: &str = "\
Nodes and CPUs: 0,2-3 these; all; !1 all but these; +0-1 the first two of those that may be used;
same the nodes that were named before.

Examples:
  pageleap run -i all redis-server             interleave its memory over all nodes
  pageleap run -N 0 -m same postgres -D data   threads and memory on node 0
  pageleap run -m 0-1 -b ./query               node 0 or 1, as the kernel sees fit
  pageleap run --thp off --balancing off ./q   neither huge pages nor moved pages
  pageleap run --place sparse -i all ./query   each thread on a CPU, its memory everywhere
  pageleap run --system --thp off ./query      no huge pages on the whole machine meanwhile
  pageleap run --home auto --size 8g ./query   on the node that has the most to spare
  pageleap run --alloc jemalloc ./query        another malloc
  pageleap run --dry-run -w all ./query        what would be set here";

impl RunArgs {
    /// Whether the nodes and CPUs of the machine matter.
    pub fn names_nodes_or_cpus(&self) -> bool {
        let named = [
            &self.interleave,
            &self.weighted_interleave,
            &self.membind,
            &self.preferred,
            &self.preferred_many,
            &self.cpunodebind,
            &self.physcpubind,
        ];
        let is_placed = matches!(self.place, Some(Place::Sparse | Place::Dense));
        is_placed || self.home.is_some() || named.into_iter().any(Option::is_some)
    }
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

/// The order in which threads come to CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Place {
    /// One node after the other.
    Sparse,
    /// A node is filled before the next one.
    Dense,
    /// As the kernel does it; takes back what an outer `pageleap run --place` has set.
    None,
}

/// An option that only numactl has, with the reason why it is refused. All of them are known, so
/// that nobody takes one for a part of the program's command.
#[derive(Clone, Debug)]
pub struct OfNumactl(pub Option<String>);

/// Name, letter, whether it takes a value, and the reason or an alternative.
const REFUSED: [(&str, char, bool, &str); 14] = [
    (
        "show",
        's',
        false,
        "`numactl --show` tells the policy of the shell, and `pageleap status` that of a process",
    ),
    ("hardware", 'H', false, "`pageleap topology` shows the nodes"),
    ("shm", 'S', true, SHARED),
    ("file", 'f', true, SHARED),
    ("offset", 'o', true, SHARED),
    ("length", 'L', true, SHARED),
    ("shmmode", 'M', true, SHARED),
    ("dump", 'd', false, SHARED),
    ("dump-nodes", 'D', false, SHARED),
    ("shmid", 'I', true, SHARED),
    ("huge", 'u', false, SHARED),
    ("touch", 'T', false, SHARED),
    ("verify", 'V', false, SHARED),
    (
        "strict",
        't',
        false,
        "numactl ignores it for programs, and --no-fallback is strict about them",
    ),
];
const SHARED: &str = "numactl sets policies of shared memory segments and files";

impl Args for OfNumactl {
    fn augment_args(command: Command) -> Command {
        REFUSED.iter().fold(command, |command, (name, letter, has_value, _)| {
            let arg = Arg::new(*name).long(*name).short(*letter).hide(true);
            command.arg(match has_value {
                true => arg.action(ArgAction::Set).value_parser(ValueParser::os_string()),
                false => arg.action(ArgAction::SetTrue),
            })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        OfNumactl::augment_args(command)
    }
}

impl FromArgMatches for OfNumactl {
    fn from_arg_matches(matches: &ArgMatches) -> Result<OfNumactl, clap::Error> {
        let given = |name: &str| matches.value_source(name) == Some(ValueSource::CommandLine);
        let first = REFUSED.iter().find(|(name, ..)| given(name));
        Ok(OfNumactl(first.map(|(name, letter, _, instead)| {
            format!("--{name} (-{letter}) is an option of numactl only: {instead}")
        })))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = OfNumactl::from_arg_matches(matches)?;
        Ok(())
    }
}
