//! `pageleap run --home`: the node on which the program starts, and those over which it grows.

use std::time::Duration;

use anyhow::anyhow;
use pageleap::NodeId;
use pageleap::topology::{SysFiles, Topology};
use pageleap_launch::{Home, Snapshot, choose_home, growth};

use super::args::{Place, RunArgs};
use super::{Unstarted, launch, parsed};
use crate::stop::{Refusal, Stop};

/// The time over which the load of the nodes is measured.
const WATCHED: Duration = Duration::from_millis(200);

/// The home that was asked for.
pub fn of(
    args: &RunArgs,
    topology: &Topology,
    files: &SysFiles,
) -> Result<Option<Home>, Unstarted> {
    let Some(text) = &args.home else { return Ok(None) };
    if matches!(args.place, Some(Place::Sparse | Place::Dense)) {
        let why = "--home has an order of its own; only --place none goes with it";
        return Err(Refusal::new(why.to_owned()).into());
    }
    let before = Snapshot::read(files);
    if text == "auto" {
        std::thread::sleep(WATCHED);
        let loads = Snapshot::read(files).loads_since(&before, topology, files);
        return Ok(Some(choose_home(topology, &loads, args.size.unwrap_or(0)).map_err(launch)?));
    }
    let node = match parsed("--home", topology.parse_nodes_with_cpus(text, None))?[..] {
        [node] => node,
        _ => return Err(Stop::Refused(anyhow!("--home {text}: one node, or auto")).into()),
    };
    let loads = before.loads_since(&before, topology, files);
    let nodes = growth(topology, &loads, node);
    // Nodes without CPUs for this process have no load, and the program does not grow over them.
    if nodes.first() != Some(&node) {
        let why = format!(
            "--home {text}: {node} has no CPU on which this process may run; name another node, or \
             widen the affinity or the cpuset"
        );
        return Err(Refusal::new(why).into());
    }
    let reason = format!("the home is {node}, as it was asked for");
    Ok(Some(Home { nodes, reason, passed_over: Vec::new() }))
}

/// The CPUs of the home on which this process may run.
pub fn cpus(home: &Home, topology: &Topology) -> Vec<usize> {
    let is_home = |node: NodeId| home.nodes.first() == Some(&node);
    let of_home = topology.nodes().iter().filter(|node| is_home(node.id));
    let of_home: Vec<usize> = of_home.flat_map(|node| node.cpus.iter().copied()).collect();
    let mut cpus = topology.allowed_cpus();
    cpus.retain(|cpu| of_home.contains(cpu));
    cpus
}
