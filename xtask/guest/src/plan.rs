//! The plan that the host gives to a guest: lines of a word and its value.

/// The kind of a run. The `Broken` kinds exist to prove that the host notices them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Run the tests of the plan.
    Tests,
    /// Run one command.
    Command,
    /// A shell on the console.
    Shell,
    /// Make the kernel panic.
    BrokenPanic,
    /// Hang without a sign of life.
    BrokenHang,
}

/// The user that runs the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// Root.
    Root,
    /// A user without privileges.
    Nobody,
    /// A user without privileges, under a seccomp filter that refuses what Docker's default profile
    /// refuses.
    Container,
}

/// One test of a test binary.
#[derive(Debug, PartialEq, Eq)]
pub struct Test {
    /// Time limit of the test, in seconds.
    pub seconds: u64,
    /// File name of the binary below `/lab/bin`.
    pub binary: String,
    /// Name of the test in the binary.
    pub name: String,
}

/// Everything that the guest has to do.
#[derive(Debug)]
pub struct Plan {
    /// A number that the guest repeats. It tells the results of this run from those of another run.
    pub nonce: String,
    /// The kind of the run.
    pub mode: Mode,
    /// The user that runs the command.
    pub who: Who,
    /// Environment variables of the tests, the command or the shell.
    pub variables: Vec<(String, String)>,
    /// Files to write first, with their contents.
    pub writes: Vec<(String, String)>,
    /// Symbolic links to make first, with their targets.
    pub links: Vec<(String, String)>,
    /// The tests, in order.
    pub tests: Vec<Test>,
    /// The command with its arguments.
    pub arguments: Vec<String>,
}

impl Plan {
    /// Parses the text of a plan. An error contains the wrong line.
    pub fn parse(text: &str) -> Result<Plan, String> {
        let mut plan = Plan {
            nonce: String::new(),
            mode: Mode::Tests,
            who: Who::Root,
            variables: Vec::new(),
            writes: Vec::new(),
            links: Vec::new(),
            tests: Vec::new(),
            arguments: Vec::new(),
        };
        for line in text.lines() {
            let bad = || format!("the plan has an unknown line: {line}");
            let (word, value) = line.split_once(' ').ok_or_else(bad)?;
            let pair = || {
                let (left, right) = value.split_once('=')?;
                Some((left.to_owned(), right.to_owned()))
            };
            match word {
                "nonce" => plan.nonce = value.to_owned(),
                "mode" => plan.mode = mode(value).ok_or_else(bad)?,
                "as" => plan.who = who(value).ok_or_else(bad)?,
                "env" => plan.variables.push(pair().ok_or_else(bad)?),
                "write" => plan.writes.push(pair().ok_or_else(bad)?),
                "link" => plan.links.push(pair().ok_or_else(bad)?),
                "arg" => plan.arguments.push(value.to_owned()),
                "test" => {
                    let mut words = value.splitn(3, ' ');
                    let seconds = words.next().and_then(|word| word.parse().ok());
                    let (Some(seconds), Some(binary), Some(name)) =
                        (seconds, words.next(), words.next())
                    else {
                        return Err(bad());
                    };
                    plan.tests.push(Test {
                        seconds,
                        binary: binary.to_owned(),
                        name: name.to_owned(),
                    });
                }
                _ => return Err(bad()),
            }
        }
        Ok(plan)
    }
}

fn mode(name: &str) -> Option<Mode> {
    Some(match name {
        "tests" => Mode::Tests,
        "command" => Mode::Command,
        "shell" => Mode::Shell,
        "broken-panic" => Mode::BrokenPanic,
        "broken-hang" => Mode::BrokenHang,
        _ => return None,
    })
}

fn who(name: &str) -> Option<Who> {
    Some(match name {
        "root" => Who::Root,
        "nobody" => Who::Nobody,
        "container" => Who::Container,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_parsed_into_a_plan() {
        let plan = Plan::parse(
            "nonce 7f\nmode command\nas nobody\nenv A=b=c\nwrite /sys/x=1\nlink /a=/b\ntest 9 leap m::t\narg a b",
        );
        let plan = plan.unwrap();
        assert_eq!((plan.nonce.as_str(), plan.mode, plan.who), ("7f", Mode::Command, Who::Nobody));
        assert_eq!(plan.variables, [("A".to_owned(), "b=c".to_owned())]);
        assert_eq!(plan.writes, [("/sys/x".to_owned(), "1".to_owned())]);
        assert_eq!(plan.links, [("/a".to_owned(), "/b".to_owned())]);
        assert_eq!(plan.tests, [Test { seconds: 9, binary: "leap".into(), name: "m::t".into() }]);
        assert_eq!(plan.arguments, ["a b"]);
    }

    #[test]
    fn unknown_lines_are_refused() {
        for text in [
            "nonsense",
            "mode nothing",
            "as somebody",
            "test x leap t",
            "test 1 leap",
            "env A",
            "colour red",
        ] {
            assert!(Plan::parse(text).unwrap_err().contains(text), "{text}");
        }
    }
}
