//! `pageleap move` under way: it is held until clients have asked enough, and its summary has to
//! account for every byte.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use pageleap::process::{MappingKind, ProcessMemory, nodes_of_pages};
use pageleap::{BASE_PAGE, NodeId};
use serde_json::Value;

/// `pageleap move` under way.
pub struct Mover(Child);

impl Mover {
    pub fn start(arguments: &[&str]) -> Mover {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pageleap"));
        command.arg("move").args(arguments).arg("--json");
        Mover(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Holds it half-way until there is enough: when this page of a process has arrived.
    pub fn hold(&mut self, (pid, page): (u32, usize), to: NodeId, is_enough: &dyn Fn() -> bool) {
        let began = Instant::now();
        while nodes_of_pages(pid, &[page]).unwrap() != [Some(to)] {
            assert!(
                self.0.try_wait().unwrap().is_none(),
                "it has ended, and has not come half-way"
            );
            assert!(began.elapsed() < crate::PATIENCE, "the move does not come half-way");
            thread::sleep(Duration::from_millis(5));
        }
        send(self.0.id(), libc::SIGSTOP);
        assert!(self.0.try_wait().unwrap().is_none(), "it has ended before it could be held");
        let began = Instant::now();
        while !is_enough() {
            assert!(began.elapsed() < 2 * crate::PATIENCE, "clients complete too few requests");
            thread::sleep(Duration::from_millis(50));
        }
        send(self.0.id(), libc::SIGCONT);
    }

    /// Its summary. It has to succeed, and to leave nothing that was to move.
    pub fn end(mut self) -> Value {
        let (mut text, mut errors) = (String::new(), String::new());
        self.0.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        self.0.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        assert!(self.0.wait().unwrap().success(), "{text} {errors}");
        let summary: Value = serde_json::from_str(&text).unwrap();
        assert!(summary["left"].as_array().unwrap().is_empty(), "{text}");
        summary
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn send(pid: u32, signal: i32) {
    // SAFETY: a process of this test that nobody has waited for.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
}

/// The page in the middle of those that a process has on a node, in its mappings of these kinds.
pub fn middle(pid: u32, node: NodeId, kinds: &[MappingKind]) -> (u32, usize) {
    let memory = ProcessMemory::read(pid).unwrap();
    let mappings = memory.mappings.iter().filter(|mapping| kinds.contains(&mapping.kind));
    let pages: Vec<usize> = mappings.flat_map(|m| (m.start..m.end).step_by(BASE_PAGE)).collect();
    let on = nodes_of_pages(pid, &pages).unwrap();
    let there: Vec<usize> = pages
        .into_iter()
        .zip(on)
        .filter(|(_, on)| *on == Some(node))
        .map(|(page, _)| page)
        .collect();
    (pid, *there.get(there.len() / 2).expect("it has pages there"))
}

/// Bytes of a summary that have arrived, or were there: khugepaged collapses blocks that have half
/// arrived, and what it copies lies there before us.
pub fn arrived(summary: &Value) -> u64 {
    let is_there = |outcome: &&Value| {
        let unchanged = outcome["outcome"] == "unchanged" && outcome["reason"].is_null();
        outcome["outcome"] == "migrated" || unchanged
    };
    let outcomes = summary["outcomes"].as_array().unwrap().iter().filter(is_there);
    outcomes.map(|outcome| outcome["bytes"].as_u64().unwrap()).sum()
}

/// Stops a process. Returns whether it has stopped: it may have ended before, and wait for its parent
/// to take note, which a stopped one does not.
fn stop(pid: u32) -> bool {
    // SAFETY: a process of this test, unless it has ended just now, which the call then says.
    unsafe { libc::kill(pid as i32, libc::SIGSTOP) };
    let began = Instant::now();
    loop {
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
        if stat.contains(") T ") || stat.contains(") Z ") {
            return stat.contains(") T ");
        }
        assert!(began.elapsed() < crate::PATIENCE, "it does not stop: {stat}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Stops processes, so that none of their pages is in use and none is new. Moves all that can move,
/// and checks that nothing lies on `from` but what the summary names with its reason. Pages that
/// are not present lie nowhere.
pub fn nothing_stays_without_a_reason(
    pids: &[u32],
    [from, to]: [NodeId; 2],
    arguments: &[&str],
) -> Value {
    let pids: Vec<u32> = pids.iter().copied().filter(|pid| stop(*pid)).collect();
    let (server, node) = (pids[0].to_string(), to.0.to_string());
    let all = [&[&*server, "--to", &*node], arguments].concat();
    let summary = Mover::start(&all).end();
    let stays = |outcome: &&Value| {
        let reason = outcome["reason"].as_str().unwrap_or_default();
        let lies_nowhere = ["no page is present", "swapped", "zeros"];
        !reason.is_empty() && !lies_nowhere.iter().any(|part| reason.contains(part))
    };
    let outcomes = summary["outcomes"].as_array().unwrap();
    let named: u64 = outcomes.iter().filter(stays).map(|o| o["bytes"].as_u64().unwrap()).sum();
    let stayed = pids.iter().map(|pid| {
        let memory = ProcessMemory::read(*pid).unwrap();
        memory.on_nodes_of(|m| m.kind != MappingKind::Special).get(&from).copied().unwrap_or(0)
    });
    assert_eq!(stayed.sum::<u64>(), named, "{summary}");
    pids.iter().for_each(|pid| send(*pid, libc::SIGCONT));
    summary
}
