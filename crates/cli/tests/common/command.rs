//! Runs the command pageleap as a user would, and reads its output.

#![allow(dead_code)] // each test binary uses a part of it

use std::process::{Command, Output};

use serde_json::Value;

/// A command of pageleap, such as `topology`, with these flags.
pub fn pageleap(name: &str, flags: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pageleap"));
    command.arg(name).args(flags);
    command
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Checks the exit code, and shows the whole output if it is another one.
#[track_caller]
pub fn check_code(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "{}{}", stdout(output), stderr(output));
}

/// The standard output of a run that succeeds and writes nothing to standard error.
#[track_caller]
pub fn text(mut command: Command) -> String {
    let output = command.output().expect("pageleap starts");
    let outcome = (output.status.code(), stderr(&output));
    assert_eq!(outcome, (Some(0), String::new()), "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The object that such a run prints.
#[track_caller]
pub fn json(command: Command) -> Value {
    serde_json::from_str(&text(command)).unwrap()
}

/// The error message of a run that fails with `code` and prints no result.
#[track_caller]
pub fn failure(mut command: Command, code: i32) -> String {
    let output = command.output().expect("pageleap starts");
    let outcome = (output.status.code(), stdout(&output));
    assert_eq!(outcome, (Some(code), String::new()), "{command:?}: {}", stderr(&output));
    stderr(&output)
}
