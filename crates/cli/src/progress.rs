//! Progress bars on standard error; invisible where it is not a terminal.

use std::cell::Cell;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Width of the titles, so that the bars of successive steps start in one column.
const TITLE_WIDTH: usize = 22;
/// What takes no longer needs no progress.
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

/// For a step that cannot tick: moves by itself until it is cleared. Not while anything is
/// measured, because a thread draws it.
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

/// A bar over steps that shows itself only when they take longer than [`QUIET_FOR`].
pub struct Steps {
    bar: ProgressBar,
    start: Instant,
    shown: Cell<bool>,
}

impl Steps {
    /// So many steps.
    pub fn new(title: &str, total: u64) -> Steps {
        let template = "{prefix} [{bar:32}] {pos} of {len}  {msg}  {elapsed}";
        let style =
            ProgressStyle::with_template(template).expect("valid template").progress_chars("=> ");
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden())
            .with_style(style);
        Steps { bar: prefixed(bar, title), start: Instant::now(), shown: Cell::new(false) }
    }

    /// What comes now.
    pub fn now(&self, what: String) {
        self.bar.set_message(what);
        self.show();
    }

    /// One is done.
    pub fn done(&self) {
        self.bar.inc(1);
        self.show();
    }

    /// So many will not be done.
    pub fn leave_out(&self, steps: u64) {
        self.bar.set_length(self.bar.length().unwrap_or(0).saturating_sub(steps));
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
