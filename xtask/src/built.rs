//! What cargo has built, and where: as its messages name it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// Programs by name.
pub type Programs = BTreeMap<String, PathBuf>;

/// What cargo says about something that it has built.
#[derive(Debug, Deserialize)]
struct Message {
    reason: String,
    target: Option<Target>,
    executable: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Target {
    name: String,
}

/// Runs a cargo command that builds, and returns the executables.
pub fn executables(mut command: Command) -> Result<Programs> {
    command
        .arg("--message-format=json-render-diagnostics")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    let output = command.output().context("cannot start cargo")?;
    ensure!(output.status.success(), "{command:?} failed: {}", output.status);
    parse(&String::from_utf8_lossy(&output.stdout))
}

/// The executables that cargo's messages name.
fn parse(messages: &str) -> Result<Programs> {
    let mut programs = Programs::new();
    for line in messages.lines() {
        let message: Message = serde_json::from_str(line)
            .with_context(|| format!("cargo said something that is no message: {line}"))?;
        if message.reason == "compiler-artifact"
            && let (Some(target), Some(executable)) = (message.target, message.executable)
        {
            programs.insert(target.name, executable);
        }
    }
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_are_found_among_the_messages() {
        let text = concat!(
            r#"{"reason":"compiler-artifact","target":{"name":"pageleap"},"executable":null}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"name":"leap"},"executable":"/t/leap-1","fresh":true}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        let programs = parse(text).unwrap();
        assert_eq!(
            programs.into_iter().collect::<Vec<_>>(),
            [("leap".to_owned(), "/t/leap-1".into())]
        );
        assert!(parse("Compiling").is_err());
    }
}
