//! Progress on standard error: bars on a terminal, and for long tables lines elsewhere.

use std::cell::Cell;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Width of the titles, so that the bars of successive steps start in one column.
const TITLE_WIDTH: usize = 22;
/// Steps that take less time than this need no bar.
const QUIET_FOR: Duration = Duration::from_secs(2);

/// A bar over bytes.
pub fn bytes(title: &str, total: u64) -> ProgressBar {
    bar(title, total, "{prefix} [{bar:32}] {bytes} of {total_bytes}  {elapsed}")
}

/// A bar over rows.
pub fn rows(title: &str, total: u64) -> ProgressBar {
    bar(title, total, "{prefix} [{bar:32}] {human_pos} of {human_len} rows  {elapsed}")
}

/// For a step whose length is not known; moves whenever the caller ticks it.
pub fn spinner(title: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{prefix} {spinner} {elapsed}").expect("valid template");
    prefixed(
        ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()).with_style(style),
        title,
    )
}

/// For a step that cannot tick: moves by itself until it is cleared. A thread draws it, so it must
/// not run while anything is measured.
pub fn moving_spinner(title: &str) -> ProgressBar {
    let spinner = spinner(title);
    if !spinner.is_hidden() {
        spinner.enable_steady_tick(Duration::from_millis(200));
    }
    spinner
}

fn bar(title: &str, total: u64, template: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template(template).expect("valid template").progress_chars("=> ");
    prefixed(
        ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr()).with_style(style),
        title,
    )
}

fn prefixed(bar: ProgressBar, title: &str) -> ProgressBar {
    bar.with_prefix(format!("{title:TITLE_WIDTH$}"))
}

/// Progress of a table whose rows take several steps each. On a terminal it is a bar, which shows
/// itself when the steps take longer than [`QUIET_FOR`]; elsewhere it is a line for each row.
pub struct Steps {
    bar: ProgressBar,
    start: Instant,
    shown: Cell<bool>,
    is_terminal: bool,
    steps_per_row: usize,
    rows: usize,
    rows_done: usize,
}

impl Steps {
    /// A table of `rows` rows.
    pub fn new(title: &str, rows: usize, steps_per_row: usize) -> Steps {
        let template = "{prefix} [{bar:32}] {pos} of {len}  {msg}  {elapsed}";
        let style =
            ProgressStyle::with_template(template).expect("valid template").progress_chars("=> ");
        let steps = (rows * steps_per_row) as u64;
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::hidden())
            .with_style(style);
        Steps {
            bar: prefixed(bar, title),
            start: Instant::now(),
            shown: Cell::new(false),
            is_terminal: io::stderr().is_terminal(),
            steps_per_row,
            rows,
            rows_done: 0,
        }
    }

    /// Says what comes now.
    pub fn now(&self, what: String) {
        self.bar.set_message(what);
        self.show();
    }

    /// One step is done.
    pub fn done(&self) {
        self.bar.inc(1);
        self.show();
    }

    /// All steps of a row are done, and this is the result in short.
    pub fn row_done(&mut self, result: &str) {
        self.rows_done += 1;
        self.line(&format!("row {} of {}: {result}", self.rows_done, self.rows));
    }

    /// Rows that will not be measured.
    pub fn leave_out(&mut self, rows: usize) {
        self.rows -= rows;
        self.bar.set_length((self.rows * self.steps_per_row) as u64);
    }

    /// A line on standard error, unless a terminal shows the bar.
    pub fn line(&self, text: &str) {
        if !self.is_terminal {
            eprintln!("{text}");
        }
    }

    fn show(&self) {
        if !self.shown.get() && self.start.elapsed() >= QUIET_FOR {
            self.shown.set(true);
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
