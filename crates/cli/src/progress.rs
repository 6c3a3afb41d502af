//! Progress on standard error. A terminal shows bars; elsewhere, long tables report a line per row.

use std::cell::Cell;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pageleap_measure::figures::human_bytes;

/// Width of the titles, so that the bars of successive steps start in one column.
const TITLE_WIDTH: usize = 22;
/// A table that takes less time than this shows no bar.
const QUIET_FOR: Duration = Duration::from_secs(2);

/// A bar over bytes.
pub fn bytes(title: &str, total: u64) -> ProgressBar {
    bar(title, total, "{prefix} [{bar:16}] {bytes} of {total_bytes}  {elapsed}")
}

/// A bar over bytes that move, with the message [`transferred`]. It appears when it is drawn for
/// the first time.
pub fn transfer(total: u64) -> ProgressBar {
    bar("", total, "moving [{bar:8}] {wide_msg}")
}

/// The state of a transfer in words: bytes done, the average rate, and the longest time left at
/// that rate. The time is the longest because `total` is an upper bound of the bytes to move.
pub fn transferred(done: u64, total: u64, took: Duration) -> String {
    let [done_text, total_text] = [done, total].map(|bytes| human_bytes(bytes as f64));
    let so_far = format!("{done_text} of {total_text} at most");
    let rate = done as f64 / took.as_secs_f64();
    if done == 0 || !rate.is_finite() {
        return format!("{so_far}, nothing per second, the time left is not known");
    }
    let left = Duration::try_from_secs_f64(total.saturating_sub(done) as f64 / rate);
    let left = left.map_or_else(|_| "for ever".to_owned(), clock);
    format!("{so_far}, {} per second, {left} left", human_bytes(rate))
}

/// A time in whole seconds, rounded up.
pub fn clock(time: Duration) -> String {
    match time.as_secs_f64().ceil() as u64 {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        seconds => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

/// A bar over rows.
pub fn rows(title: &str, total: u64) -> ProgressBar {
    bar(title, total, "{prefix} [{bar:16}] {human_pos} of {human_len} rows  {elapsed}")
}

/// A spinner for a step of unknown length. It moves when the caller ticks it.
pub fn spinner(title: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{prefix} {spinner} {elapsed}").expect("valid template");
    prefixed(
        ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()).with_style(style),
        title,
    )
}

/// A spinner for a step that cannot tick it. A thread draws it until the caller clears it, so it
/// must not run during a measurement.
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

/// Progress of a table whose rows take several steps each. On a terminal it is a bar, which appears
/// once the steps have taken [`QUIET_FOR`]. Elsewhere it is one line per row.
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
        let template = "{prefix} [{bar:16}] {pos} of {len}  {elapsed}  {wide_msg}";
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

    /// Shows which step runs now.
    pub fn now(&self, what: String) {
        self.bar.set_message(what);
        self.show();
    }

    /// Counts one step as done.
    pub fn done(&self) {
        self.bar.inc(1);
        self.show();
    }

    /// Counts one row as done and reports its result in short.
    pub fn row_done(&mut self, result: &str) {
        self.rows_done += 1;
        self.line(&format!("row {} of {}: {result}", self.rows_done, self.rows));
    }

    /// Removes rows that will not be measured from the total.
    pub fn leave_out(&mut self, rows: usize) {
        self.rows -= rows;
        self.bar.set_length((self.rows * self.steps_per_row) as u64);
    }

    /// Writes a line to standard error, unless a terminal shows the bar.
    pub fn line(&self, text: &str) {
        if !self.is_terminal {
            crate::output::note(text);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_has_a_rate_and_a_time_that_is_left() {
        const MIB: u64 = 1 << 20;
        let line = |done, total, seconds| transferred(done, total, Duration::from_secs(seconds));
        let half = line(500 * MIB, 1000 * MIB, 5);
        assert_eq!(half, "500 MiB of 1000 MiB at most, 100 MiB per second, 5 s left");
        let end = line(8 * MIB, 8 * MIB, 4);
        assert_eq!(end, "8 MiB of 8 MiB at most, 2 MiB per second, 0 s left");
        for (left, words) in [(90, "1 min 30 s left"), (7260, "2 h 1 min left")] {
            let line = line(MIB, MIB + left * MIB, 1);
            assert!(line.ends_with(&format!("1 MiB per second, {words}")), "{line}");
        }
        let none = line(0, 8 * MIB, 5);
        assert!(
            none.ends_with("at most, nothing per second, the time left is not known"),
            "{none}"
        );
        assert!(line(8 * MIB, 8 * MIB, 0).ends_with("not known"));
    }
}
