//! The advice as text: the machine, one paragraph for each topic, and the command.

use pageleap::topology::{escaped, id_list};
use pageleap_launch::advice::{Advice, Facts, PAPER};

use super::json::{balancing, huge_pages};
use super::{Advised, RUNNING};
use crate::output::hanging;

/// Column in which text begins.
const INDENT: usize = 14;
const UNKNOWN: &str = "not known";

/// The advice as text. Lines to type are never broken.
pub fn text(advised: &Advised, width: usize) -> String {
    let mut out = machine(&advised.facts, width);
    for advice in &advised.advice {
        out += "\n";
        out += &paragraph(advice, width);
    }
    out += "\n";
    out += &match &advised.command {
        Some(command) => format!("All of it\n  {command}\n"),
        None => "There is nothing to set: start the program as you are.\n".to_owned(),
    };
    let is_open = |one: &&Advice| one.condition.is_some() && !one.options.is_empty();
    let open = advised.advice.iter().filter(is_open).map(|one| one.options.join(" "));
    let open: Vec<String> = open.collect();
    if !open.is_empty() {
        let text = format!("leave out what does not apply: {}", open.join(", "));
        out += &hanging("  ", &text, Some(width));
    }
    out += "\n";
    out += &hanging("", RUNNING, Some(width));
    out += &hanging("Paper: ", PAPER, Some(width));
    for warning in &advised.warnings {
        out += &format!("\nleft out: {warning}\n");
    }
    out
}

/// The facts, a line for each group.
fn machine(facts: &Facts, width: usize) -> String {
    let nodes = id_list(facts.memory.iter().map(|node| node.node.0 as usize));
    let of_all = match facts.nodes_with_memory {
        all if all == facts.memory.len() => String::new(),
        all => format!(" of {all}"),
    };
    let mut memory = format!(
        "{}{of_all} with memory that may be used: {nodes}",
        counted(facts.memory.len(), "node")
    );
    if let Some((near, far)) = facts.distances {
        memory += &match near == far {
            true => format!(", at distance {near}"),
            false => format!(", at distances {near} to {far}"),
        };
    }
    let cpus = format!(
        "{} that may be used, {}, {}",
        counted(facts.cpus, "CPU"),
        counted(facts.cores, "core"),
        counted(facts.nodes_with_cpus, "node")
    );
    let found = facts.allocators.as_ref().map(|all| {
        let names: Vec<&str> = all.iter().map(|one| one.name()).collect();
        names.join(", ")
    });
    let kernel = facts.kernel.as_deref().map(escaped);
    let rows = [
        ("Linux", kernel.as_deref().unwrap_or(UNKNOWN).to_owned()),
        ("memory", memory),
        ("CPUs", cpus),
        ("balancing", balancing(facts.balancing).unwrap_or(UNKNOWN).to_owned()),
        ("huge pages", huge_pages(facts.huge_pages).unwrap_or(UNKNOWN).to_owned()),
        ("allocators", found.unwrap_or_else(|| UNKNOWN.to_owned())),
    ];
    let line = |(label, text): &(&str, String)| {
        hanging(&format!("{:INDENT$}", format!("  {label}")), text, Some(width))
    };
    "Machine\n".to_owned() + &rows.iter().map(line).collect::<String>()
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn paragraph(advice: &Advice, width: usize) -> String {
    let head = format!("{}: ", advice.topic.name().replace('-', " "));
    let head = head[..1].to_uppercase() + &head[1..];
    let verdict = format!("{}: {}", advice.verdict.text(), advice.summary);
    let mut out = hanging(&head, &verdict, Some(width));
    let line = advice.line.as_ref().map(|line| format!("{:INDENT$}{line}\n", "  type"));
    out += &line.unwrap_or_default();
    let rows = [
        ("if", advice.condition.as_deref().map(|text| text.strip_prefix("if ").unwrap_or(text))),
        ("why", Some(advice.why.as_str())),
        ("costs", advice.costs.as_deref()),
        ("differs", advice.differs.as_deref()),
        ("source", Some(advice.source)),
    ];
    for (label, text) in rows {
        let Some(text) = text else { continue };
        out += &hanging(&format!("{:INDENT$}", format!("  {label}")), text, Some(width));
    }
    out
}
