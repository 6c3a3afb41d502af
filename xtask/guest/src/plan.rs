//! What the host wants done: a text of lines, each a word and its value.

/// What kind of run it is. The `Broken` ones exist to prove that the host notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Run the tests of the plan.
    Tests,
    /// Run one command.
    Command,
    /// A shell on the console.
    Shell,
    /// The kernel panics.
    BrokenPanic,
    /// Nothing happens any more.
    BrokenHang,
    /// Memory runs out.
    BrokenMemory,
    /// The results stop in the middle of a line.
    BrokenCut,
    /// The machine ends well before anything was done.
    BrokenEarly,
    /// The kernel warns of itself.
    BrokenWarning,
}

/// Who runs the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// Root.
    Root,
    /// A user without rights.
    Nobody,
    /// The same under a seccomp filter that refuses what Docker's default profile refuses.
    Container,
}

/// One test of a test binary.
#[derive(Debug, PartialEq, Eq)]
pub struct Test {
    /// Seconds after which it is ended.
    pub seconds: u64,
    /// Name of the binary below `/lab/bin`.
    pub binary: String,
    /// Name of the test in it.
    pub name: String,
}

/// See the module.
#[derive(Debug)]
pub struct Plan {
    /// Echoed, so that results of another run cannot be taken for this one's.
    pub nonce: String,
    /// What kind of run.
    pub mode: Mode,
    /// Who runs the command.
    pub who: Who,
    /// Environment variables of whatever is run.
    pub variables: Vec<(String, String)>,
    /// Files to write before that, with their contents.
    pub writes: Vec<(String, String)>,
    /// Links to make, with what they lead to.
    pub links: Vec<(String, String)>,
    /// The tests, in order.
    pub tests: Vec<Test>,
    /// The command with its arguments.
    pub arguments: Vec<String>,
}

impl Plan {
    /// Reads the text; an error names the line.
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
            let bad = || format!("the plan has a line that is none: {line}");
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
        "broken-memory" => Mode::BrokenMemory,
        "broken-cut" => Mode::BrokenCut,
        "broken-early" => Mode::BrokenEarly,
        "broken-warning" => Mode::BrokenWarning,
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
    fn lines_become_a_plan() {
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
    fn what_is_no_plan_is_refused() {
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
