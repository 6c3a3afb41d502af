//! `pageleap run --system`: settings of the whole machine, for as long as the program runs.
//!
//! The command borrows them before the program starts, stays as its parent, and puts them back when
//! the program has ended. If it is killed, the program is killed with it, and the keeper of the
//! ledger puts them back ([`pageleap_settings`]).

use pageleap_settings::{Borrowed, User, Wish};

use super::Unstarted;
use super::args::{RunArgs, Switch};
use super::words::Words;
use crate::settings;
use crate::stop::{Refusal, Stop};

const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
const WHY: &str = "run --system";

/// The settings that the options name, each with its value; none without --system.
pub fn wishes(args: &RunArgs) -> Result<Vec<(&'static str, &'static str)>, Refusal> {
    if !args.system {
        return Ok(Vec::new());
    }
    let huge_pages = args.thp.map(|switch| match switch {
        Switch::On => (HUGE_PAGES, "always"),
        Switch::Off => (HUGE_PAGES, "never"),
    });
    let balancing = args.balancing.map(|switch| match switch {
        Switch::On => (BALANCING, "1"),
        Switch::Off => (BALANCING, "0"),
    });
    let wishes: Vec<_> = huge_pages.into_iter().chain(balancing).collect();
    match wishes.is_empty() {
        true => Err(Refusal::new("--system goes with --thp or --balancing".to_owned())),
        false => Ok(wishes),
    }
}

/// Lets the program use the settings, too. It may outlive a parent that is killed, for example if it
/// has changed its user.
pub fn share(borrowed: &mut Borrowed, child: i32, program: &str, words: &Words) {
    // One that has ended needs nothing.
    let Ok(user) = User::of(child.unsigned_abs()) else { return };
    if let Err(error) = borrowed.share_with(&user.about_to_execute(program)) {
        words.say(&format!("if this process is killed, the settings go before {program}: {error}"));
    }
}

/// Borrows the settings for a program of this name, until the value is dropped.
pub fn borrow(
    wishes: &[(&'static str, &'static str)],
    program: &str,
    words: &Words,
) -> Result<Option<Borrowed>, Unstarted> {
    if wishes.is_empty() {
        return Ok(None);
    }
    let user = User::this_process().map_err(pageleap_settings::Error::from).map_err(Stop::from)?;
    let wishes: Vec<Wish> =
        wishes.iter().map(|(file, value)| Wish::new(*file, value, WHY)).collect();
    let borrowed = settings::ledger(None)
        .borrow(&user.about_to_execute(program), &wishes)
        .map_err(Stop::from)?;
    borrowed.settled().iter().for_each(|one| words.say(&one.to_string()));
    Ok(Some(borrowed))
}
