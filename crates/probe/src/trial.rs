//! The proof: a leap of a few pages, by the library itself, to every node that the process may use.

use std::sync::atomic::Ordering::Relaxed;

use pageleap::for_probe::human_bytes;
use pageleap::{BASE_PAGE, Error, Migration, NodeId, Pool, Region};

use crate::Capabilities;
use crate::demand::Demand;
use crate::finding::{Finding, State, Topic, Who};

/// Address space that pools, a region and their threads take in a trial. Without that much, an
/// allocation would end the process.
const ADDRESS_SPACE: u64 = 64 << 20;

/// Topics whose calls a leap makes, of those that a filter may answer by ending the process.
const TAKEN: [Topic; 5] = [
    Topic::Mbind,
    Topic::PlacementQuery,
    Topic::PageTablePlacement,
    Topic::Userfaultfd,
    Topic::UserfaultfdUserMode,
];

impl Capabilities {
    /// Moves a few pages of the demanded size from the first node to each other one that the
    /// process may use, and back (on a machine with one node, between two pools), checks that every
    /// word is as it was, and says how it went. Installs the library's SIGSEGV handler, as every
    /// leap does; everything else is given back.
    pub fn try_leap(&self, demand: &Demand) -> Finding {
        let topic = Topic::Leap;
        if !self.is_live() {
            return Finding::unknown(
                topic,
                "not tried",
                "the files are those of another root, and a leap would happen on this machine",
            );
        }
        // A filter that ends the caller would end this process too.
        for wanted in TAKEN {
            if let Some(fatal) = self.get(wanted).filter(|finding| finding.ends_process) {
                let summary = "not tried: it would end the process";
                return Finding::missing(topic, summary, fatal.reason.clone())
                    .ends_process()
                    .remedies(fatal.remedies.clone());
            }
        }
        let space = ADDRESS_SPACE + 4 * demand.trial_bytes() as u64;
        if pageleap_sys::is_over_address_space_limit(BASE_PAGE, space) {
            return Finding::missing(
                topic,
                "not tried: too little address space is left",
                "RLIMIT_AS leaves less than a few threads and pools take",
            )
            .remedy(
                Who::You,
                "ulimit -v unlimited",
                "as much address space as the processor has, for this shell and what it starts",
            );
        }
        match self.leap_around(demand) {
            Ok((stops, chosen)) => {
                let route =
                    stops.iter().map(|node| node.0.to_string()).collect::<Vec<_>>().join(" to ");
                let same = if stops.iter().all(|node| *node == stops[0]) {
                    " (one node: between two pools of it)"
                } else {
                    ""
                };
                Finding::works(
                    topic,
                    format!(
                        "{} in pages of {} leapt from node {route}{same}, contents right",
                        human_bytes(demand.trial_bytes() as u64),
                        demand.page
                    ),
                )
                .saw(chosen)
            }
            Err(Failure::Error(Error::OutOfMemory { .. })) if demand.page.is_hugetlb() => {
                Finding::missing(
                    topic,
                    "not possible with so few pages",
                    format!("too few huge pages are free: see hugetlb-{}", demand.page),
                )
            }
            Err(Failure::Error(error)) => {
                Finding::missing(topic, "a leap of a few pages failed", error.to_string())
            }
            Err(Failure::Wrong(what)) => {
                Finding::missing(topic, "a leap of a few pages went wrong", what).remedy(
                    Who::You,
                    "report this with the kernel version and the output of this command",
                    "",
                )
            }
        }
    }

    /// Returns the nodes in the order in which the region was on them, and which engine was chosen,
    /// and why.
    fn leap_around(&self, demand: &Demand) -> Result<(Vec<NodeId>, String), Failure> {
        let nodes = self.allowed_nodes();
        let home = *nodes.first().unwrap_or(&NodeId(0));
        let bytes = demand.trial_bytes();
        let pool =
            |node| Pool::builder(node, bytes as u64).page_size(demand.page).threads(1).build();
        let first = pool(home)?;
        let region = Region::new(&first, bytes)?;
        let words = region.atomics_u64(0..region.len())?;
        // A word in each base page, and the last.
        let marked = || (0..words.len()).step_by(BASE_PAGE / 8).chain([words.len() - 1]);
        let value = |word: usize| word as u64 * 0x9e37_79b9 + 1;
        marked().for_each(|word| words[word].store(value(word), Relaxed));
        let (mut stops, mut chosen) = (vec![home], String::new());
        let mut leap = |to: &Pool, node: NodeId| -> Result<(), Failure> {
            let report =
                Migration::new().range(&region, 0..region.len(), to).threads(1).start()?.wait();
            if !report.ended.is_completed() || report.pages.migrated != report.pages.total() {
                return Err(Failure::Wrong(report.to_string()));
            }
            if let Some(word) = marked().find(|word| words[*word].load(Relaxed) != value(*word)) {
                return Err(Failure::Wrong(format!("word {word} changed on the way to {node}")));
            }
            stops.push(node);
            chosen = format!("engine {}: {}", report.engine, report.engine_reason);
            Ok(())
        };
        let others: Vec<NodeId> = nodes.iter().copied().filter(|node| *node != home).collect();
        for node in if others.is_empty() { vec![home] } else { others } {
            leap(&pool(node)?, node)?;
            leap(&first, home)?;
        }
        Ok((stops, chosen))
    }
}

/// Why a trial did not succeed.
enum Failure {
    /// The library refused.
    Error(Error),
    /// It did not do what it should.
    Wrong(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Error(error)
    }
}

/// The findings that stand in the way of a leap. Those that the trial has disproved do not count.
pub(crate) fn blockers<'a>(
    demand: &Demand,
    findings: &'a [Finding],
    trial: &'a Finding,
) -> Vec<&'a Finding> {
    let proven = trial.state == State::Works;
    let settled = |finding: &Finding| proven && !finding.topic.depends_on_size();
    let mut blockers: Vec<&Finding> = findings
        .iter()
        .filter(|finding| demand.is_blocked_by(finding) && !settled(finding))
        .collect();
    if trial.state == State::Missing {
        blockers.insert(0, trial);
    }
    blockers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::around::Killed;

    #[test]
    fn a_leap_that_would_end_the_process_is_not_tried() {
        for topic in TAKEN {
            let fatal = Killed::new("a call", libc::SIGSYS).finding(topic, "");
            let found = Capabilities {
                findings: vec![fatal.clone()],
                userfaultfd: Vec::new(),
                allowed: Vec::new(),
                user: String::new(),
                live: true,
            };
            let leap = found.try_leap(&Demand::default());
            assert!(leap.state == State::Missing && leap.ends_process, "{leap}");
            assert_eq!(leap.reason, fatal.reason);
        }
    }
}
