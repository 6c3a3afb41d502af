//! What cargo has built, and where: as its messages name it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// Programs by name.
pub type Programs = BTreeMap<String, PathBuf>;

/// What an executable is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A program.
    Program,
    /// A file of a crate's `tests` folder.
    IntegrationTest,
    /// Tests inside a library or a program, and examples.
    Other,
}

/// An executable that cargo has built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Executable {
    /// Name of its target.
    pub name: String,
    /// What it is for.
    pub kind: Kind,
    /// Where it is.
    pub path: PathBuf,
}

/// What cargo says about something that it has built.
#[derive(Debug, Deserialize)]
struct Message {
    reason: String,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
    #[serde(default)]
    filenames: Vec<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Profile {
    test: bool,
}

/// Runs a cargo command that builds, and returns the executables.
pub fn executables(command: Command) -> Result<Vec<Executable>> {
    Ok(messages(command)?.into_iter().filter_map(executable).collect())
}

/// Runs a cargo command that builds, and returns the static library that it has built.
pub fn archive(command: Command) -> Result<PathBuf> {
    let files = messages(command)?.into_iter().flat_map(|message| message.filenames);
    let mut archives = files.filter(|file| file.extension().is_some_and(|end| end == "a"));
    let first = archives.next().context("cargo has built no static library")?;
    ensure!(archives.all(|other| other == first), "cargo has built several static libraries");
    Ok(first)
}

fn messages(mut command: Command) -> Result<Vec<Message>> {
    command
        .arg("--message-format=json-render-diagnostics")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    let output = command.output().context("cannot start cargo")?;
    ensure!(output.status.success(), "{command:?} failed: {}", output.status);
    parse(&String::from_utf8_lossy(&output.stdout))
}

/// The only executable of this name and kind.
pub fn one(executables: &[Executable], kind: Kind, name: &str) -> Result<PathBuf> {
    let is_it = |found: &&Executable| found.kind == kind && found.name == name;
    let mut found = executables.iter().filter(is_it);
    let first = found.next().with_context(|| format!("cargo has built no {name}"))?;
    ensure!(found.next().is_none(), "cargo has built several executables with the name {name}");
    Ok(first.path.clone())
}

/// What cargo says of all that it has built.
fn parse(messages: &str) -> Result<Vec<Message>> {
    let message = |line| {
        serde_json::from_str(line)
            .with_context(|| format!("cargo said something that is no message: {line}"))
    };
    let mut parsed = messages.lines().map(message).collect::<Result<Vec<Message>>>()?;
    parsed.retain(|message| message.reason == "compiler-artifact");
    Ok(parsed)
}

/// The executable of a message.
fn executable(message: Message) -> Option<Executable> {
    let (target, path) = (message.target?, message.executable?);
    let is_test = message.profile.is_some_and(|profile| profile.test);
    let kind = match (target.kind.first().map(String::as_str), is_test) {
        (Some("bin"), false) => Kind::Program,
        (Some("test"), true) => Kind::IntegrationTest,
        _ => Kind::Other,
    };
    Some(Executable { name: target.name, kind, path })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_are_found_among_the_messages() {
        let message = |name: &str, kind: &str, is_test: bool, path: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","target":{{"name":"{name}","kind":["{kind}"]}},"#
            ) + &format!(r#""profile":{{"test":{is_test}}},"executable":{path}}}"#)
        };
        let text = [
            message("pageleap", "lib", false, "null"),
            message("pageleap", "lib", true, r#""/t/pageleap-1""#),
            message("pageleap", "bin", false, r#""/t/pageleap""#),
            message("leap", "test", true, r#""/t/leap-1""#),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ];
        let parsed = parse(&text.join("\n")).unwrap();
        let found: Vec<Executable> = parsed.into_iter().filter_map(executable).collect();
        assert_eq!(found.len(), 3);
        let path = |kind, name| one(&found, kind, name).ok();
        assert_eq!(path(Kind::Program, "pageleap"), Some("/t/pageleap".into()));
        assert_eq!(path(Kind::IntegrationTest, "leap"), Some("/t/leap-1".into()));
        assert_eq!(path(Kind::IntegrationTest, "pageleap"), None);
        let twice = [found.clone(), found].concat();
        assert!(one(&twice, Kind::Program, "pageleap").is_err());
        assert!(parse("Compiling").is_err());
    }
}
