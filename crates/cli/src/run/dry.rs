//! `pageleap run --dry-run`: the commands that do the same, and the object of `--json`.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use anyhow::Context;
use pageleap_launch::{Applied, Mode, Settings};
use serde::Serialize;

use super::Plan;

/// The settings and the command.
#[derive(Serialize)]
struct JsonRun<'a> {
    /// The program and its arguments.
    command: Vec<String>,
    /// The memory policy as the kernel has told it; null if the program inherits its policy.
    memory: Option<JsonPolicy<'a>>,
    /// The CPUs as the kernel has told them; null if the program inherits them.
    cpus: Option<&'a [usize]>,
    /// Whether transparent huge pages are off for the program; null if it inherits that.
    thp_disabled: Option<bool>,
    /// The CPUs in the order in which threads come to them; null if threads are not placed.
    places: Option<&'a [usize]>,
    /// Settings of the whole machine that are borrowed until the program has ended, with their values.
    system: BTreeMap<&'a str, &'a str>,
    /// Environment variables that change, with their new values.
    environment: BTreeMap<String, Option<String>>,
    /// A sentence for each setting that is not as it was asked for, or has no effect.
    notes: Vec<&'a str>,
    /// The lines of the text.
    commands: Vec<String>,
}

/// A memory policy.
#[derive(Serialize)]
struct JsonPolicy<'a> {
    /// The kernel's constant.
    mode: &'a str,
    nodes: Vec<u32>,
    /// Whether automatic balancing may move pages among the nodes.
    is_balanced: bool,
}

/// The commands that do the same, one on each line.
pub fn text(applied: &Applied, plan: &Plan) -> String {
    lines(applied, plan).iter().map(|line| format!("{line}\n")).collect()
}

/// The object of `--json`, on one line.
pub fn json(applied: &Applied, plan: &Plan) -> anyhow::Result<String> {
    let lossy = |text: &OsStr| text.to_string_lossy().into_owned();
    let Settings { memory, cpus, is_thp_disabled, .. } = &applied.settings;
    let run = JsonRun {
        command: plan.command.iter().map(|word| lossy(word)).collect(),
        memory: memory.as_ref().map(|policy| JsonPolicy {
            mode: policy.mode.constant(),
            nodes: policy.nodes.iter().map(|node| node.0).collect(),
            is_balanced: policy.is_balanced,
        }),
        cpus: cpus.as_deref(),
        thp_disabled: *is_thp_disabled,
        places: Some(&plan.placed.places[..]).filter(|places| !places.is_empty()),
        system: plan.system.iter().copied().collect(),
        environment: plan
            .environment
            .iter()
            .map(|(name, value)| (lossy(name), value.as_deref().map(lossy)))
            .collect(),
        notes: plan.notes.iter().chain(&applied.notes).map(String::as_str).collect(),
        commands: lines(applied, plan),
    };
    let text = serde_json::to_string(&run).context("the result could not be written as JSON")?;
    Ok(text + "\n")
}

/// The commands. A setting that no command of a system can make is a comment.
fn lines(applied: &Applied, plan: &Plan) -> Vec<String> {
    let mut lines = Vec::new();
    match applied.settings.is_thp_disabled {
        Some(true) => lines.push(
            "# before: prctl(PR_SET_THP_DISABLE, 1); or `pageleap run --thp off` before the next line"
                .to_owned(),
        ),
        Some(false) => lines.push("# before: prctl(PR_SET_THP_DISABLE, 0)".to_owned()),
        None => {}
    }
    if applied.settings.memory.as_ref().is_some_and(|policy| policy.mode == Mode::Default) {
        lines.push("# before: set_mempolicy(MPOL_DEFAULT)".to_owned());
    }
    for (file, value) in &plan.system {
        lines.push(format!("echo {value} > {file}   # until it has ended"));
    }
    if plan.placed.poller.is_some() {
        lines.push(
            "# meanwhile: `pageleap run --place` pins the threads; no command of a system does it"
                .to_owned(),
        );
    }
    let mut words: Vec<String> = Vec::new();
    // env(1) takes the variables to unset first.
    let unset = plan.environment.iter().filter(|(_, value)| value.is_none());
    unset.for_each(|(name, _)| words.extend(["-u".to_owned(), quoted(name)]));
    for (name, value) in &plan.environment {
        let Some(value) = value else { continue };
        words.push(format!("{}={}", quoted(name), quoted(value)));
    }
    if !words.is_empty() {
        words.insert(0, "env".to_owned());
    }
    words.extend(applied.settings.numactl());
    // numactl and env would take it for an option of their own.
    let is_option = plan.command.first().is_some_and(|word| word.as_bytes().starts_with(b"-"));
    if is_option && !words.is_empty() {
        words.push("--".to_owned());
    }
    words.extend(plan.command.iter().map(|word| quoted(word)));
    lines.push(words.join(" "));
    lines
}

/// A word as a shell takes it.
fn quoted(word: &OsStr) -> String {
    if let Some(quoted) = word.to_str().and_then(|word| shlex::try_quote(word).ok()) {
        return quoted.into_owned();
    }
    let byte = |byte: &u8| match byte {
        b'\'' | b'\\' => format!("\\{}", char::from(*byte)),
        b' '..=b'~' => char::from(*byte).to_string(),
        _ => format!("\\x{byte:02x}"),
    };
    format!("$'{}'", word.as_bytes().iter().map(byte).collect::<String>())
}
