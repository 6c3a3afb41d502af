//! `pageleap status`: where the memory of a process lies, by node and by mapping.
//!
//! Names of processes and files may be hostile. The library escapes their control characters.

mod json;
mod page_tables;
mod text;

use std::cell::OnceCell;
use std::io::IsTerminal;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use page_tables::{OfProcess, Tables};
use pageleap::process::{MappingMemory, ProcessMemory};
use pageleap::topology::{self, SysFiles};
use pageleap_measure::export::Format;

use crate::export::Exports;
use crate::kernel_memory::Symbols;
use crate::selection::Selection;
use crate::stop::Stop;
use crate::{output, progress};

/// The most mappings in the table without `--all`.
const MOST_MAPPINGS: usize = 20;

/// Show where the memory of a process lies: by node and by mapping, with page sizes, policy, and
/// what the kernel could move.
///
/// The command reads /proc, and asks the kernel for the nodes of some pages of each mapping
/// (move_pages as a query). It changes nothing, stops nobody, and touches no page. The process goes
/// on meanwhile, so the figures of a busy process are not those of one moment.
///
/// A strip shows where the pages of a mapping lie, from its first address on the left to its last
/// one on the right: 0-9 and a-z are nodes 0 to 35, # is a higher one, * are several, · is not
/// present. A character stands for up to 16 pages that are looked at, and shows the node of three
/// quarters of those that are present.
///
/// Column movable: yes; partly (pages that are mapped once; the others need the privilege
/// CAP_SYS_NICE); no, because the memory is of a device, of the kernel, or secret.
///
/// With --page-tables: the bytes of page tables, of each process and of all processes on each node.
/// Processes of other users are shown too. Root sees the page tables of a process by node and level
/// as well, where the kernel offers its memory for reading (/proc/kcore, on x86-64): the command
/// follows the page tables there, which stops nobody and reads for at most half of the time.
/// Elsewhere they are unknown, and a note says why.
///
/// Examples: `pageleap status 1234`; `pageleap status redis-server --watch`; `pageleap status self
/// --json`; `pageleap status --unit postgresql`; `pageleap status --page-tables 1234`.
///
/// Exit code: 0 shown; 1 a process may not be looked at, or has ended meanwhile; 2 no such process,
/// cgroup or unit.
#[derive(Args, Clone, Debug)]
pub struct StatusArgs {
    #[command(flatten)]
    pub selection: Selection,

    /// Print one JSON object to standard output instead of text; with --watch, one in each line
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub exports: Exports,

    /// Show all mappings with memory, and not only the 20 largest; --json has all mappings anyway
    #[arg(long)]
    pub all: bool,

    /// Show the page tables in place of the memory, for processes of other users too
    #[arg(long, conflicts_with = "all")]
    pub page_tables: bool,

    /// Show it again until Ctrl-C, every 2 seconds or as often as --watch=0.5 says
    #[arg(long, conflicts_with = "Exports", value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "2", value_parser = seconds)]
    pub watch: Option<Duration>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.1..=86_400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "expected 0.1 to 86400 seconds".to_owned())
}

/// A process, with a strip for each of its largest mappings.
struct Shown {
    memory: ProcessMemory,
    /// The largest mappings with memory, each with its strip, if the kernel tells the nodes.
    largest: Vec<(MappingMemory, Option<String>)>,
    /// Why the kernel does not tell the nodes of pages; `None` if it does.
    untold: Option<pageleap::Error>,
}

/// The result of one look.
enum View {
    /// Where the memory of processes lies.
    Memory(Vec<Shown>),
    /// Their page tables.
    PageTables(Tables),
}

impl View {
    /// Looks at processes. The second part has the errors of those that could not be read.
    fn of(
        args: &StatusArgs,
        symbols: &OnceCell<Symbols>,
        pids: &[u32],
    ) -> Result<(View, Vec<pageleap::Error>), Stop> {
        if !args.page_tables {
            let look = |pid| Shown::of(args, pid);
            let (shown, failures) = each(pids, pids.len() > 1, look);
            return Ok((View::Memory(shown), failures));
        }
        let nodes = topology::page_tables(&SysFiles::host())?;
        let spinner = spinner(args, "reading page tables");
        let (processes, failures) = OfProcess::all(pids, &nodes, symbols);
        spinner.inspect(|spinner| spinner.finish_and_clear());
        Ok((View::PageTables(Tables { processes, nodes }), failures))
    }

    fn is_empty(&self) -> bool {
        match self {
            View::Memory(shown) => shown.is_empty(),
            View::PageTables(tables) => tables.processes.is_empty(),
        }
    }

    /// The object of `--json`, on one line.
    fn object(&self) -> anyhow::Result<String> {
        let json = match self {
            View::Memory(shown) => {
                let memories: Vec<&ProcessMemory> =
                    shown.iter().map(|shown| &shown.memory).collect();
                json::text(&memories)?
            }
            View::PageTables(tables) => tables.json()?,
        };
        Ok(json + "\n")
    }

    /// The text. `columns` is the width of the terminal, if there is one.
    fn text(&self, args: &StatusArgs, colours: bool, columns: Option<usize>) -> String {
        match self {
            View::Memory(shown) => text::text(shown, args.all, colours, columns),
            View::PageTables(tables) => tables.text(columns),
        }
    }
}

/// Reads the processes, prints them and exports them.
pub fn run(args: &StatusArgs) -> Result<(), Stop> {
    let exports = args.exports.open()?;
    let (symbols, mut looks) = (OnceCell::new(), 0);
    loop {
        let pids = args.selection.pids().map_err(|stop| later(stop, looks))?;
        let (view, failures) = View::of(args, &symbols, &pids)?;
        if view.is_empty() {
            let no_process = || Stop::Failed(anyhow!("no process is left"));
            let why = failures.into_iter().next().map_or_else(no_process, Stop::from);
            return Err(later(why, looks));
        }
        let printed = print(args, &view);
        // If the reader of standard output has gone, it has seen enough, and the command ends with
        // success.
        let is_gone = printed.as_ref().is_err_and(output::is_broken_pipe);
        let printed = if is_gone { Ok(()) } else { printed };
        exports.write(printed, |format| match format {
            Format::Json => view.object(),
            Format::Text { .. } => Ok(view.text(args, false, None)),
        })?;
        if is_gone {
            return Ok(());
        }
        for failure in &failures {
            output::note(&format!("left out: {failure}"));
        }
        let Some(pause) = args.watch else {
            return match failures.len() {
                0 => Ok(()),
                left_out => Err(Stop::Failed(anyhow!("processes that are left out: {left_out}"))),
            };
        };
        looks += 1;
        std::thread::sleep(pause);
    }
}

/// Turns a refusal into a failure if the process was there at an earlier look: it has ended since,
/// so the request was not wrong.
fn later(stop: Stop, looks: u64) -> Stop {
    match stop {
        Stop::Refused(why) if looks > 0 => Stop::Failed(why.context("it has ended")),
        other => other,
    }
}

impl Shown {
    fn of(args: &StatusArgs, pid: u32) -> Result<Shown, pageleap::Error> {
        let spinner = spinner(args, "reading /proc");
        let memory = ProcessMemory::read(pid);
        if let Some(spinner) = spinner {
            spinner.finish_and_clear();
        }
        let memory = memory?;
        let (largest, untold) = match args.json && !args.exports.has_text() {
            true => (Vec::new(), None),
            false => largest(&memory, args.all),
        };
        Ok(Shown { memory, largest, untold })
    }
}

/// A spinner with the current step. None with `--watch`, which shows results again and again.
fn spinner(args: &StatusArgs, title: &str) -> Option<indicatif::ProgressBar> {
    args.watch.is_none().then(|| progress::moving_spinner(title))
}

/// Looks at each process, of which one may end meanwhile if `may_end`. The second part has the
/// errors of those that could not be read.
fn each<T>(
    pids: &[u32],
    may_end: bool,
    look: impl Fn(u32) -> Result<T, pageleap::Error>,
) -> (Vec<T>, Vec<pageleap::Error>) {
    let (mut shown, mut failures) = (Vec::new(), Vec::new());
    for pid in pids {
        match look(*pid) {
            Ok(one) => shown.push(one),
            // One of several processes may end at any time, which is no error.
            Err(error) if error.is_usage() && may_end => {}
            Err(error) => failures.push(error),
        }
    }
    (shown, failures)
}

/// The largest mappings with memory, and their strips. The second part is the reason why a strip is
/// missing that should be there.
fn largest(
    memory: &ProcessMemory,
    all: bool,
) -> (Vec<(MappingMemory, Option<String>)>, Option<pageleap::Error>) {
    let mut untold = None;
    let mut mappings: Vec<&MappingMemory> =
        memory.mappings.iter().filter(|m| m.resident_bytes + m.swapped_bytes > 0).collect();
    mappings.sort_by_key(|m| (std::cmp::Reverse(m.resident_bytes), m.start));
    mappings.truncate(if all { usize::MAX } else { MOST_MAPPINGS });
    let mut strip = |m: &MappingMemory| {
        text::strip(memory.pid, m).unwrap_or_else(|error| {
            untold.get_or_insert(error);
            None
        })
    };
    let strips: Vec<Option<String>> = mappings.iter().map(|m| strip(m)).collect();
    (mappings.into_iter().cloned().zip(strips).collect(), untold)
}

fn print(args: &StatusArgs, view: &View) -> anyhow::Result<()> {
    let terminal = std::io::stdout().is_terminal();
    let text = if args.json {
        view.object()?
    } else {
        // https://no-color.org
        let colours = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        view.text(args, colours, output::terminal_columns())
    };
    match output::terminal_size().filter(|_| args.watch.is_some() && !args.json) {
        // Each look replaces the last one on the screen. Lines that have scrolled off cannot be
        // replaced, so the text is cut to the rows of the screen.
        Some((rows, _)) => output::write(&format!("\x1b[H\x1b[2J{}", first_lines(&text, rows - 1))),
        None => output::write(&text),
    }
}

/// At most `most` lines of a text. If some are cut, the last line says how many.
fn first_lines(text: &str, most: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    if lines.len() <= most {
        return text.to_owned();
    }
    let shown = &lines[..most.saturating_sub(1)];
    format!("{}\n... {} more lines\n", shown.join("\n"), lines.len() - shown.len())
}

#[cfg(test)]
mod tests {
    use super::first_lines;

    #[test]
    fn a_text_is_cut_to_the_screen() {
        let text = "a\nb\nc\nd\n";
        assert_eq!(first_lines(text, 4), text);
        assert_eq!(first_lines(text, 3), "a\nb\n... 2 more lines\n");
    }
}
