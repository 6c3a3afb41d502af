//! Progress bars on standard error; invisible where it is not a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Width of the titles, so that the bars of successive steps start in one column.
const TITLE_WIDTH: usize = 22;

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
    let style = ProgressStyle::with_template("{prefix} {spinner} {elapsed}").expect("valid template");
    prefixed(ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()).with_style(style), title)
}

/// For a step that cannot tick: moves by itself until it is cleared. Not while anything is measured, because a
/// thread draws it.
pub fn moving_spinner(title: &str) -> ProgressBar {
    let spinner = spinner(title);
    if !spinner.is_hidden() {
        spinner.enable_steady_tick(Duration::from_millis(200));
    }
    spinner
}

fn bar(title: &str, total: u64, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).expect("valid template").progress_chars("=> ");
    prefixed(
        ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr()).with_style(style),
        title,
    )
}

fn prefixed(bar: ProgressBar, title: &str) -> ProgressBar {
    bar.with_prefix(format!("{title:TITLE_WIDTH$}"))
}
