//! The tables of `docs/kernel-policy.md`: the findings of `pageleap doctor` on each kernel of the
//! lab, as each user.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::command::{self, WHO};
use super::{
    Flags, kernel_folder,
    kernels::{self, SERIES},
};
use crate::commands::Workspace;
use crate::marked;

/// The topology with huge pages of all sizes.
const TOPOLOGY: &str = "gigabyte";

/// Page sizes for which doctor tries a leap.
const PAGE_SIZES: [&str; 4] = ["4k", "thp", "2m", "1g"];

/// The findings of doctor that depend on the kernel or the user: their ids, and their text in the
/// table.
const FEATURES: [(&str, &str); 19] = [
    ("memfd", "memory files that are sealable and never executable"),
    ("memfd-seals", "seals that keep a pool's file from being truncated"),
    ("populate", "page tables filled without a signal (`MADV_POPULATE_WRITE`)"),
    ("move-page-tables", "page tables that move with the data (`MREMAP_DONTUNMAP`)"),
    ("mbind", "memory bound to a node (`mbind`)"),
    ("page-table-placement", "page tables on a chosen node (`set_mempolicy`)"),
    ("placement-query", "asking where a page lies (`move_pages`)"),
    ("thp", "transparent huge pages of memory files (`MADV_COLLAPSE`)"),
    ("pagemap-scan", "scanning for written pages (`PAGEMAP_SCAN`)"),
    ("frame-numbers", "frame numbers (`/proc/self/pagemap`)"),
    ("userfaultfd", "`userfaultfd()`"),
    ("userfaultfd-device", "`/dev/userfaultfd`"),
    ("userfaultfd-user-mode", "`userfaultfd(UFFD_USER_MODE_ONLY)`"),
    ("write-tracking", "writes tracked without a fault handler"),
    ("write-barrier", "writers held back, the kernel's writes included"),
    ("hold", "pages that are taken away held against user code and kernel"),
    ("hold-hugetlb", "the same of hugetlb pages of 2 MB"),
    ("freeze", "a range held against user code and kernel"),
    ("memory-in-place", "memory of `malloc` and `mmap` moved in place (`UFFDIO_MOVE`)"),
];

/// The mark for a finding that is unknown or absent.
const UNKNOWN: &str = "?";

/// The command that writes the tables, as it stands in the markers of the document.
const COMMAND: &str = "cargo xtask lab policy";

/// The findings of doctor on one kernel, as one user.
#[derive(Debug, Default)]
struct Column {
    /// The result of the trial leap by page size: the engine in backquotes if it succeeded, else
    /// the state.
    leaps: BTreeMap<&'static str, String>,
    /// The states of the other findings, by id.
    states: BTreeMap<String, String>,
    /// The features of userfaultfd by name: the version that brought it, and whether the system
    /// call offers it.
    userfaultfd: BTreeMap<String, (String, bool)>,
}

/// Boots each kernel for each user, and writes the tables into the document.
pub fn write(workspace: &Workspace, flags: &Flags) -> Result<()> {
    let path = workspace.root.join("docs/kernel-policy.md");
    let document =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let (mut releases, mut heads, mut columns) = (Vec::new(), Vec::new(), Vec::new());
    for series in SERIES {
        let release = kernels::get(&kernel_folder(workspace), series)?.release;
        releases.push(format!("{series} is {release}"));
        for who in WHO {
            heads.push(format!("{series}, {who}"));
            columns.push(ask(workspace, flags, series, who)?);
        }
    }
    let tables = format!("{}.\n\n{}", releases.join(", "), tables(&heads, &columns));
    ensure!(
        !tables.contains(UNKNOWN),
        "doctor has left a finding open, so the tables would have a `{UNKNOWN}`:\n{tables}"
    );
    print!("{tables}");
    fs::write(&path, marked::replace(&document, COMMAND, &tables)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    println!("lab: written to {}", path.display());
    Ok(())
}

/// Boots one guest, which prints a line of JSON for each page size.
fn ask(workspace: &Workspace, flags: &Flags, series: &str, who: &str) -> Result<Column> {
    let flags = Flags {
        action: None,
        topology: vec![TOPOLOGY.to_owned()],
        kernel: vec![series.to_owned()],
        ..flags.clone()
    };
    let script = format!(
        "for size in {}; do pageleap doctor --json --page-size $size | tr -d '\\n'; echo; done",
        PAGE_SIZES.join(" ")
    );
    let mut lines = Vec::new();
    let command = ["sh", "-c", &script].map(str::to_owned);
    let done =
        command::in_guest(workspace, &flags, who, &command, |line| lines.push(line.to_owned()))?;
    ensure!(
        done.judged.problems.is_empty(),
        "{series} as {who}: {}",
        done.judged.problems.join("; ")
    );
    column(&lines).with_context(|| format!("{series} as {who}: {}", lines.join("\n")))
}

fn column(lines: &[String]) -> Result<Column> {
    ensure!(
        lines.len() == PAGE_SIZES.len(),
        "{} lines instead of {}",
        lines.len(),
        PAGE_SIZES.len()
    );
    let mut column = Column::default();
    for (size, line) in PAGE_SIZES.into_iter().zip(lines) {
        let value: Value = serde_json::from_str(line).context("the line is not JSON")?;
        for finding in value["findings"].as_array().context("`findings` is missing")? {
            let id = finding["id"].as_str().context("a finding has no id")?;
            let state = finding["state"].as_str().context("a finding has no state")?.to_owned();
            if id == "leap" {
                let saw =
                    finding["observed"].as_array().into_iter().flatten().filter_map(Value::as_str);
                let engine =
                    saw.filter_map(|line| line.strip_prefix("engine ")?.split(':').next()).next();
                column.leaps.insert(size, engine.map_or(state, |engine| format!("`{engine}`")));
            } else {
                column.states.insert(id.to_owned(), state);
            }
        }
        for feature in value["userfaultfd"].as_array().context("`userfaultfd` is missing")? {
            let name = feature["name"].as_str().context("a feature has no name")?.to_owned();
            let since = feature["since"].as_str().context("a feature has no version")?.to_owned();
            column.userfaultfd.insert(name, (since, feature["call"] == Value::Bool(true)));
        }
    }
    Ok(column)
}

fn mark(state: Option<&String>) -> &str {
    match state.map(String::as_str) {
        Some(engine) if engine.starts_with('`') => engine,
        Some("works") => "yes",
        Some("limited") => "partly",
        Some("missing") => "no",
        _ => UNKNOWN,
    }
}

fn tables(heads: &[String], columns: &[Column]) -> String {
    let mut out = String::new();
    let mut row = |cells: &mut dyn Iterator<Item = String>| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "| {} |", cells.collect::<Vec<_>>().join(" | "));
    };
    let rule = |count: usize| std::iter::repeat_n("---".to_owned(), count);
    row(&mut ["what".to_owned()].into_iter().chain(heads.iter().cloned()));
    row(&mut rule(heads.len() + 1));
    for size in PAGE_SIZES {
        let cells = columns.iter().map(|column| mark(column.leaps.get(size)).to_owned());
        row(&mut [format!("**engine for pages of {size}**")].into_iter().chain(cells));
    }
    for (id, words) in FEATURES {
        let cells = columns.iter().map(|column| mark(column.states.get(id)).to_owned());
        row(&mut [words.to_owned()].into_iter().chain(cells));
    }
    let _ = writeln!(out, "\nFeatures of `userfaultfd()`, as root:\n");
    // Root is the first user of each kernel.
    let kernels: Vec<(&str, &Column)> = heads
        .iter()
        .zip(columns)
        .step_by(WHO.len())
        .map(|(head, column)| (head.split(',').next().unwrap_or_default(), column))
        .collect();
    let names: BTreeMap<&String, &String> = kernels
        .iter()
        .flat_map(|(_, column)| &column.userfaultfd)
        .map(|(name, (since, _))| (name, since))
        .collect();
    let mut names: Vec<_> = names.into_iter().collect();
    names.sort_by_key(|(name, since)| {
        (since.split('.').filter_map(|part| part.parse::<u32>().ok()).collect::<Vec<_>>(), *name)
    });
    let mut row = |cells: &mut dyn Iterator<Item = String>| {
        let _ = writeln!(out, "| {} |", cells.collect::<Vec<_>>().join(" | "));
    };
    row(&mut ["feature", "since"]
        .map(str::to_owned)
        .into_iter()
        .chain(kernels.iter().map(|(kernel, _)| (*kernel).to_owned())));
    row(&mut rule(kernels.len() + 2));
    for (name, since) in names {
        let offers = kernels.iter().map(|(_, column)| {
            if column.userfaultfd.get(name).is_some_and(|(_, offered)| *offered) {
                "yes"
            } else {
                "no"
            }
            .to_owned()
        });
        row(&mut [format!("`{name}`"), since.clone()].into_iter().chain(offers));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"findings": [{"id": "leap", "state": "STATE", "observed": ["SAW"]}, {"id": "mbind", "state": "limited"}],
        "userfaultfd": [{"name": "WP_ASYNC", "since": "6.7", "call": false}, {"name": "SIGBUS", "since": "4.14", "call": true}]}"#;

    #[test]
    fn findings_become_rows() {
        let lines = ["works", "missing", "unknown", "works"].map(|state| {
            let saw = if state == "works" { "engine wp-sync: a reason" } else { "" };
            LINE.replace("STATE", state).replace("SAW", saw)
        });
        let text = tables(&["6.1.0, root".to_owned()], &[column(&lines).unwrap()]);
        for row in [
            "| what | 6.1.0, root |",
            "| **engine for pages of 4k** | `wp-sync` |",
            "| **engine for pages of thp** | no |",
            "| **engine for pages of 2m** | ? |",
            "| memory bound to a node (`mbind`) | partly |",
            "| asking where a page lies (`move_pages`) | ? |",
            "| feature | since | 6.1.0 |\n| --- | --- | --- |\n| `SIGBUS` | 4.14 | yes |\n| `WP_ASYNC` | 6.7 | no |",
        ] {
            assert!(text.contains(row), "{row} is not in\n{text}");
        }
        assert!(
            column(&lines[1..]).is_err()
                && column(&["x".into(), "".into(), "".into(), "".into()]).is_err()
        );
    }

    #[test]
    fn every_test_that_the_document_names_exists() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let sources = fs::read_dir(root.join("crates/pageleap/tests")).unwrap().flatten();
        let sources: String =
            sources.filter_map(|entry| fs::read_to_string(entry.path()).ok()).collect();
        let document = fs::read_to_string(root.join("docs/kernel-policy.md")).unwrap();
        let rows = document.lines().skip_while(|line| !line.contains("| tested by |")).skip(2);
        let named: Vec<&str> = rows
            .take_while(|line| line.starts_with('|'))
            .filter_map(|line| line.rsplit('|').nth(1))
            .flat_map(|cell| cell.split('`').skip(1).step_by(2))
            .filter(|name| name.contains('_'))
            .collect();
        assert!(named.len() > 8, "{named:?}");
        for name in named {
            assert!(sources.contains(&format!("fn {name}")), "the test {name} does not exist");
        }
    }
}
