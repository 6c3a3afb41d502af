//! The command line of `pageleap run` as numactl's users type it.
//!
//! Three habits need a look at the words before they are parsed:
//!
//! * Options end at the first word that is not an option: `pageleap run -m 0 ls -l`. A `--` is put
//!   there.
//! * `same` stands for the nodes that were named last: `-N 0 -m same`. It becomes
//!   `same:cpunodebind`, because a text such as `+0` stands for other nodes after another option.
//! * `--balancing` takes no value in numactl, and may be followed by the program. Here `on` and
//!   `off` may follow, too: they become `--balancing=off`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use clap::{Arg, Command};

/// The options that name nodes, for which `same` stands.
const OF_NODES: [&str; 6] =
    ["interleave", "weighted_interleave", "membind", "preferred", "preferred_many", "cpunodebind"];
/// Begins a value that stands for the nodes of the option behind it.
pub const SAME: &str = "same:";
const BALANCING: &str = "balancing";

/// The words after `pageleap run`, as clap takes them. `command` has the options.
pub fn for_clap(words: Vec<OsString>, command: &Command) -> Vec<OsString> {
    let mut spelled = Spelled { command, out: Vec::new(), last_nodes: None };
    let mut words = words.into_iter().peekable();
    while let Some(word) = words.next() {
        match word.as_bytes() {
            b"--" => {
                spelled.out.push(word);
                break;
            }
            [b'-', _, ..] => {
                let next = words.peek().cloned();
                if spelled.option(&word, next) == Taken::WithNext {
                    words.next();
                }
            }
            _ => {
                spelled.out.extend(["--".into(), word]);
                break;
            }
        }
    }
    spelled.out.extend(words);
    spelled.out
}

/// How many words an option has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken {
    Itself,
    WithNext,
}

struct Spelled<'a> {
    command: &'a Command,
    out: Vec<OsString>,
    /// The option by which nodes were named last.
    last_nodes: Option<&'static str>,
}

impl Spelled<'_> {
    /// Takes a word that is an option, or several letters, and perhaps the word after it as its
    /// value.
    fn option(&mut self, word: &OsStr, next: Option<OsString>) -> Taken {
        let (arg, glued) = match word.as_bytes().strip_prefix(b"--") {
            Some(long) => self.long(long),
            None => self.letters(&word.as_bytes()[1..]),
        };
        let Some(arg) = arg else {
            self.out.push(word.to_owned());
            return Taken::Itself;
        };
        if arg.get_id() == BALANCING {
            let switch = next.filter(|next| glued.is_none() && is_switch(next));
            let mut word = word.to_owned();
            if let Some(switch) = &switch {
                word.push("=");
                word.push(switch);
            }
            self.out.push(word);
            return if switch.is_some() { Taken::WithNext } else { Taken::Itself };
        }
        if !arg.get_action().takes_values() {
            self.out.push(word.to_owned());
            return Taken::Itself;
        }
        let id = arg.get_id().to_string();
        match glued {
            Some(glued) => {
                let head = &word.as_bytes()[..word.len() - glued.len()];
                let value = self.value(&id, glued);
                let whole = [head, value.as_bytes()].concat();
                self.out.push(OsString::from_vec(whole));
                Taken::Itself
            }
            None => {
                self.out.push(word.to_owned());
                let Some(next) = next else { return Taken::Itself };
                let value = self.value(&id, next);
                self.out.push(value);
                Taken::WithNext
            }
        }
    }

    /// The option that a long name stands for, also if it is cut short, and the value behind `=`.
    fn long(&self, text: &[u8]) -> (Option<Arg>, Option<OsString>) {
        let cut = text.iter().position(|byte| *byte == b'=');
        let (name, value) = match cut {
            Some(at) => (&text[..at], Some(OsString::from_vec(text[at + 1..].to_vec()))),
            None => (text, None),
        };
        let names = |arg: &Arg| -> Vec<String> {
            let aliases = arg.get_all_aliases().unwrap_or_default();
            let all = arg.get_long().into_iter().chain(aliases);
            all.map(str::to_owned).collect()
        };
        let mut args = self.command.get_arguments();
        let exact = args.find(|arg| names(arg).iter().any(|one| one.as_bytes() == name)).cloned();
        let begun = || {
            let is_begun =
                |arg: &&Arg| names(arg).iter().any(|one| one.as_bytes().starts_with(name));
            let mut found = self.command.get_arguments().filter(is_begun);
            found.next().filter(|_| found.next().is_none()).cloned()
        };
        (exact.or_else(begun), value)
    }

    /// The last option of a word with letters: the first that takes a value, and the value if it is
    /// in the same word.
    fn letters(&self, letters: &[u8]) -> (Option<Arg>, Option<OsString>) {
        let mut last = None;
        for (at, letter) in letters.iter().enumerate() {
            let is_it = |arg: &&Arg| {
                let aliases = arg.get_all_short_aliases().unwrap_or_default();
                arg.get_short()
                    .into_iter()
                    .chain(aliases)
                    .any(|one| one as u32 == u32::from(*letter))
            };
            let Some(arg) = self.command.get_arguments().find(is_it).cloned() else {
                return (None, None);
            };
            let rest = letters[at + 1..].to_vec();
            let takes_value = arg.get_action().takes_values() && arg.get_id() != BALANCING;
            if takes_value || rest.first() == Some(&b'=') {
                let glued = Some(OsString::from_vec(rest)).filter(|rest| !rest.is_empty());
                return (Some(arg), glued);
            }
            last = Some(arg);
        }
        (last, None)
    }

    /// The value of an option, with `same` replaced.
    fn value(&mut self, id: &str, value: OsString) -> OsString {
        let Some(option) = OF_NODES.into_iter().find(|option| *option == id) else { return value };
        let bare = value.as_bytes().strip_prefix(b"=").unwrap_or(value.as_bytes());
        match self.last_nodes {
            Some(last) if bare == b"same" => format!("{SAME}{last}").into(),
            _ => {
                self.last_nodes = Some(option);
                value
            }
        }
    }
}

fn is_switch(word: &OsStr) -> bool {
    word == "on" || word == "off"
}

#[cfg(test)]
mod tests {
    use clap::Args;

    use super::*;
    use crate::run::args::RunArgs;

    fn spelled(line: &str) -> String {
        let mut command = RunArgs::augment_args(Command::new("run"));
        command.build();
        let words = line.split_whitespace().map(OsString::from).collect();
        let words = for_clap(words, &command);
        words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn options_end_at_the_first_word_that_is_none() {
        for (line, words) in [
            ("ls -l", "-- ls -l"),
            ("-m 0 ls -m 1", "-m 0 -- ls -m 1"),
            ("-m0 ls -l", "-m0 -- ls -l"),
            ("--membind=0 ls --all", "--membind=0 -- ls --all"),
            ("--membind 0 -- -ls", "--membind 0 -- -ls"),
            ("-al -C 0-1 ls", "-al -C 0-1 -- ls"),
            ("-ai all ls", "-ai all -- ls"),
            ("-aiall ls", "-aiall -- ls"),
            ("--interl 0 ls -x", "--interl 0 -- ls -x"),
            ("-c 0 ls", "-c 0 -- ls"),
            ("--cpubind 0 ls", "--cpubind 0 -- ls"),
            ("--thp off ls", "--thp off -- ls"),
            ("-b ls", "-b -- ls"),
            ("-S key ls", "-S key -- ls"),
            // clap refuses them.
            ("--membnd 0 ls", "--membnd -- 0 ls"),
            ("-m", "-m"),
            ("", ""),
        ] {
            assert_eq!(spelled(line), words, "{line}");
        }
    }

    #[test]
    fn same_stands_for_the_nodes_that_were_named_last() {
        for (line, words) in [
            ("-N 1 -m same ls", "-N 1 -m same:cpunodebind -- ls"),
            ("-N1 -msame ls", "-N1 -msame:cpunodebind -- ls"),
            ("-N1 -m=same ls", "-N1 -msame:cpunodebind -- ls"),
            ("--cpunodebind=!0 --inter=same ls", "--cpunodebind=!0 --inter=same:cpunodebind -- ls"),
            ("-m 0 -N +1 -P same ls same", "-m 0 -N +1 -P same:cpunodebind -- ls same"),
            ("-m 0 -N same -P same ls", "-m 0 -N same:membind -P same:membind -- ls"),
            // CPUs are no nodes; and without nodes before, the parser of nodes refuses it.
            ("-C 0 -m same ls", "-C 0 -m same -- ls"),
            ("-N 1 -C same ls", "-N 1 -C same -- ls"),
        ] {
            assert_eq!(spelled(line), words, "{line}");
        }
    }

    #[test]
    fn balancing_has_a_value_only_if_it_is_one() {
        for (line, words) in [
            ("--balancing -m 0 ls", "--balancing -m 0 -- ls"),
            ("--balancing ls off", "--balancing -- ls off"),
            ("--balancing off ls", "--balancing=off -- ls"),
            ("--balancing on ls", "--balancing=on -- ls"),
            ("--balancing=off on", "--balancing=off -- on"),
            ("-b off ls", "-b=off -- ls"),
            ("-ab -m0 ls", "-ab -m0 -- ls"),
        ] {
            assert_eq!(spelled(line), words, "{line}");
        }
    }
}
