//! The machines of the lab. Each file `lab/topologies/*.toml` becomes options of QEMU and settings
//! of the guest.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// A machine, and the tests that run on it. `two-nodes.toml` explains the fields, and is the file
/// to copy for a new machine.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// The file name without its extension.
    #[serde(skip)]
    pub name: String,
    /// One line that describes the machine.
    pub about: String,
    /// The nodes, by ascending id.
    pub node: Vec<Node>,
    /// The distances, a row and a column for each node. Empty for QEMU's defaults, 10 and 20.
    #[serde(default)]
    pub distances: Vec<Vec<u32>>,
    /// The values of the firmware's HMAT. Empty for a machine without HMAT.
    #[serde(default)]
    pub access: Vec<Access>,
    /// The levels of page tables, 4 or 5. The emulated CPU has five.
    #[serde(default = "five")]
    pub page_table_levels: u32,
    /// The tests that run on this machine: names of test binaries, or beginnings of names
    /// `binary::test`. Empty for all tests.
    #[serde(default)]
    pub tests: Vec<String>,
    /// The expected skips on this machine.
    #[serde(default)]
    pub skip: Vec<ExpectedSkip>,
}

fn five() -> u32 {
    5
}

/// A memory node. A node without memory and CPUs is a hole: its number is never online.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// The number of the node.
    pub id: u32,
    /// Megabytes of memory.
    #[serde(default)]
    pub memory_mb: u64,
    /// Number of CPUs.
    #[serde(default)]
    pub cpus: u32,
    /// Number of huge pages of 2 MB to reserve.
    #[serde(default)]
    pub huge_2m: u64,
    /// Number of huge pages of 1 GB to reserve at boot.
    #[serde(default)]
    pub huge_1g: u64,
    /// The node whose CPUs are nearest to this memory, for HMAT. `None` for the node itself.
    pub initiator: Option<u32>,
}

/// Number of CPUs that could be plugged into a hole.
///
/// With more than eight CPUs in all, the firmware requires that each interrupt goes to a single
/// CPU. With eight or fewer, Linux 6.1 sends interrupts to sets of CPUs. Because of the hole, the
/// numbers of some CPUs differ from their APIC numbers, and those CPUs would lose interrupts.
const HOLE_SOCKETS: u32 = 8;

impl Node {
    fn is_hole(&self) -> bool {
        self.memory_mb == 0 && self.cpus == 0
    }

    fn sockets(&self) -> u32 {
        if self.is_hole() { HOLE_SOCKETS } else { self.cpus }
    }
}

/// The speed at which the CPUs of one node reach the memory of another.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Access {
    /// The node of the CPUs.
    pub from: u32,
    /// The node of the memory.
    pub to: u32,
    /// Latency in nanoseconds.
    pub latency_ns: u32,
    /// Bandwidth in megabytes per second.
    pub bandwidth_mb: u32,
}

/// A skip that is not a failure, even with `--deny-skip`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpectedSkip {
    /// The beginning of the name of the test (`binary::test`) or of the skipped part. A `*` stands
    /// for any text, and the text behind it is the end of the name.
    pub test: String,
    /// The only kernel series for which the entry holds. `None` for all kernels.
    pub kernel: Option<String>,
    /// The reason for the skip.
    pub because: String,
}

impl ExpectedSkip {
    fn is(&self, kernel: &str, name: &str) -> bool {
        let named = match self.test.split_once('*') {
            Some((beginning, end)) => {
                name.strip_prefix(beginning).is_some_and(|rest| rest.ends_with(end))
            }
            None => name.starts_with(&self.test),
        };
        named && self.kernel.as_ref().is_none_or(|only| only == kernel)
    }
}

/// The file with the expected skips of all machines.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CommonSkips {
    skip: Vec<ExpectedSkip>,
}

impl Topology {
    /// Reads all machines of a directory, by name. The file `skips.toml` beside the directory has
    /// the expected skips of all machines.
    pub fn read_all(folder: &Path) -> Result<Vec<Topology>> {
        let path = folder.with_file_name("skips.toml");
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let common: CommonSkips =
            toml::from_str(&text).with_context(|| path.display().to_string())?;
        let entries =
            fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
        let mut all = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "toml") {
                let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                let text = fs::read_to_string(&path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                let mut topology =
                    Topology::parse(&name, &text).with_context(|| path.display().to_string())?;
                topology.skip.extend(common.skip.iter().cloned());
                all.push(topology);
            }
        }
        ensure!(!all.is_empty(), "{} has no topologies", folder.display());
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// Parses a machine, and checks that its values fit together.
    pub fn parse(name: &str, text: &str) -> Result<Topology> {
        let topology = Topology { name: name.to_owned(), ..toml::from_str(text)? };
        let nodes = &topology.node;
        ensure!(nodes.is_sorted_by(|a, b| a.id < b.id), "the ids of the nodes must ascend");
        let online = |id: u32| nodes.iter().any(|node| node.id == id && !node.is_hole());
        ensure!(
            nodes.iter().any(|node| node.cpus > 0 && node.memory_mb > 0),
            "at least one node must have both CPUs and memory"
        );
        let square = topology.distances.iter().all(|row| row.len() == nodes.len());
        ensure!(
            topology.distances.is_empty() || square && topology.distances.len() == nodes.len(),
            "distances must have a row and a column for each node"
        );
        ensure!(
            matches!(topology.page_table_levels, 4 | 5),
            "page tables have 4 or 5 levels on x86-64"
        );
        for access in &topology.access {
            ensure!(
                online(access.from) && online(access.to),
                "an access entry names a node that is not online"
            );
        }
        for node in nodes {
            let huge = node.huge_2m * 2 + node.huge_1g * 1024;
            ensure!(huge <= node.memory_mb, "node {} has more huge pages than memory", node.id);
            ensure!(
                node.initiator.is_none_or(online),
                "the initiator of node {} is not online",
                node.id
            );
        }
        Ok(topology)
    }

    /// The nodes that will be online, in the kernel's list format (`0-1,4`).
    pub fn online(&self) -> String {
        let ids: Vec<u32> =
            self.node.iter().filter(|node| !node.is_hole()).map(|node| node.id).collect();
        let runs = ids.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
            [only] => only.to_string(),
            _ => format!("{}-{}", run[0], run[run.len() - 1]),
        });
        runs.collect::<Vec<_>>().join(",")
    }

    /// The options of QEMU that make the machine. Each CPU is a socket of its own, so that every
    /// CPU can belong to any node.
    pub fn qemu_options(&self) -> Vec<String> {
        let mut options = Vec::new();
        let mut add = |option: &str, value: String| options.extend([option.to_owned(), value]);
        let hmat = !self.access.is_empty();
        add("-machine", format!("q35{}", if hmat { ",hmat=on" } else { "" }));
        add("-m", format!("{}M", self.node.iter().map(|node| node.memory_mb).sum::<u64>()));
        // A hole is the node of a CPU that is not plugged in. The firmware lists CPUs by socket,
        // and the kernel numbers nodes in this order. The sockets therefore go by node, and the
        // CPUs behind the first hole are plugged in as devices.
        let sockets: u32 = self.node.iter().map(Node::sockets).sum();
        let at_once: u32 =
            self.node.iter().take_while(|node| !node.is_hole()).map(|node| node.cpus).sum();
        add(
            "-smp",
            format!("cpus={at_once},maxcpus={sockets},sockets={sockets},cores=1,threads=1"),
        );
        for node in &self.node {
            let mut text = format!("node,nodeid={}", node.id);
            if node.memory_mb > 0 {
                add(
                    "-object",
                    format!("memory-backend-ram,size={}M,id=m{}", node.memory_mb, node.id),
                );
                text += &format!(",memdev=m{}", node.id);
            }
            if hmat && !node.is_hole() {
                text += &format!(",initiator={}", node.initiator.unwrap_or(node.id));
            }
            add("-numa", text);
        }
        let mut socket = 0;
        for node in &self.node {
            for _ in 0..node.sockets() {
                add("-numa", format!("cpu,node-id={},socket-id={socket}", node.id));
                if socket >= at_once && !node.is_hole() {
                    add(
                        "-device",
                        format!("max-x86_64-cpu,socket-id={socket},core-id=0,thread-id=0"),
                    );
                }
                socket += 1;
            }
        }
        for (from, row) in self.node.iter().zip(&self.distances) {
            for (to, distance) in self.node.iter().zip(row) {
                if from.id != to.id {
                    add("-numa", format!("dist,src={},dst={},val={distance}", from.id, to.id));
                }
            }
        }
        for Access { from, to, latency_ns, bandwidth_mb } in &self.access {
            let common =
                format!("hmat-lb,initiator={from},target={to},hierarchy=memory,data-type=access-");
            add("-numa", format!("{common}latency,latency={latency_ns}"));
            add("-numa", format!("{common}bandwidth,bandwidth={bandwidth_mb}M"));
        }
        options
    }

    /// The kernel's boot options. Pages of 1 GB can only be reserved at boot, and levels of page
    /// tables only be chosen then.
    pub fn kernel_options(&self) -> String {
        let with_pages = self.node.iter().filter(|node| node.huge_1g > 0);
        let counts: Vec<String> =
            with_pages.map(|node| format!("{}:{}", node.id, node.huge_1g)).collect();
        let mut options = String::new();
        if !counts.is_empty() {
            options += &format!(" hugepagesz=1G hugepages={}", counts.join(","));
        }
        if self.page_table_levels == 4 {
            options += " no5lvl";
        }
        options
    }

    /// Files that the guest writes before the tests run, with their contents.
    pub fn guest_writes(&self) -> Vec<(String, String)> {
        // The pages of 1 GB are reserved since boot. Writing their number again makes the guest
        // check it.
        let sizes = |node: &Node| {
            [(2048, node.huge_2m), (1 << 20, node.huge_1g)].map(|(kb, pages)| (node.id, kb, pages))
        };
        let reserve = self.node.iter().flat_map(sizes).filter(|(_, _, pages)| *pages > 0);
        let write = |(id, kb, pages): (u32, u64, u64)| {
            let directory = format!("/sys/devices/system/node/node{id}/hugepages/hugepages-{kb}kB");
            (format!("{directory}/nr_hugepages"), pages.to_string())
        };
        reserve.map(write).collect()
    }

    /// The machine as a text that a test in the guest compares with what it sees. The entries are
    /// `node ID CPUS MEGABYTES`, `distance FROM TO VALUE`, and `latency FROM TO NANOSECONDS` for
    /// the nodes that reach a memory fastest.
    pub fn description(&self) -> String {
        let online: Vec<&Node> = self.node.iter().filter(|node| !node.is_hole()).collect();
        let nodes =
            online.iter().map(|node| format!("node {} {} {}", node.id, node.cpus, node.memory_mb));
        let rows = self.node.iter().zip(&self.distances);
        let distances = rows.flat_map(|(from, row)| {
            let cells =
                self.node.iter().zip(row).filter(|(to, _)| !from.is_hole() && !to.is_hole());
            cells
                .map(|(to, distance)| format!("distance {} {} {distance}", from.id, to.id))
                .collect::<Vec<_>>()
        });
        let fastest = |access: &&Access| {
            self.access
                .iter()
                .all(|other| other.to != access.to || other.latency_ns >= access.latency_ns)
        };
        let latencies = self.access.iter().filter(fastest);
        let latencies = latencies.map(|a| format!("latency {} {} {}", a.from, a.to, a.latency_ns));
        nodes.chain(distances).chain(latencies).collect::<Vec<_>>().join(", ")
    }

    /// Whether a test (`binary::test`) runs on this machine.
    pub fn wants(&self, test: &str) -> bool {
        let fits = |wanted: &String| {
            test.starts_with(wanted)
                && (wanted.contains("::") || test[wanted.len()..].starts_with("::"))
        };
        self.tests.is_empty() || self.tests.iter().any(fits)
    }

    /// The reason for a skip if the skip is expected here, else `None`.
    pub fn expects_skip(&self, kernel: &str, name: &str) -> Option<&str> {
        self.skip.iter().find(|skip| skip.is(kernel, name)).map(|skip| skip.because.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPARSE: &str = r#"
        about = "holes"
        distances = [[10, 15, 20], [15, 10, 25], [20, 25, 10]]
        [[node]]
        id = 0
        memory_mb = 512
        cpus = 2
        [[node]]
        id = 1
        [[node]]
        id = 2
        memory_mb = 256
        cpus = 1
        huge_2m = 8
        [[skip]]
        test = "leap::big"
        kernel = "6.1"
        because = "it is old"
        [[skip]]
        test = "nodes::*(2m pages)"
        because = "there are none"
    "#;

    #[test]
    fn a_hole_is_the_node_of_a_cpu_that_is_not_plugged_in() {
        let topology = Topology::parse("sparse", SPARSE).unwrap();
        assert_eq!(topology.online(), "0,2");
        let options = topology.qemu_options().join(" ");
        assert!(options.contains("-smp cpus=2,maxcpus=11,sockets=11"), "{options}");
        assert!(options.contains("-numa cpu,node-id=1,socket-id=2"), "{options}");
        assert!(
            options.contains("-device max-x86_64-cpu,socket-id=10")
                && !options.contains("cpu,socket-id=2"),
            "{options}"
        );
        assert!(options.contains("-m 768M") && !options.contains("id=m1"), "{options}");
        assert!(options.contains("dist,src=1,dst=2,val=25"), "{options}");
        assert_eq!(topology.guest_writes()[0].1, "8");
        let distances = "distance 0 0 10, distance 0 2 20, distance 2 0 20, distance 2 2 10";
        assert_eq!(topology.description(), format!("node 0 2 512, node 2 1 256, {distances}"));
        assert_eq!(topology.expects_skip("6.1", "leap::big (2m pages)"), Some("it is old"));
        assert_eq!(topology.expects_skip("6.12", "leap::big"), None);
        assert_eq!(topology.expects_skip("6.1", "leap::small"), None);
        assert_eq!(topology.expects_skip("6.12", "nodes::a (2m pages)"), Some("there are none"));
        assert_eq!(topology.expects_skip("6.12", "nodes::a"), None);
        assert_eq!(topology.expects_skip("6.12", "leap::a (2m pages)"), None);
        assert!(
            topology.wants("leap::small") && topology.wants("leap_more::x"),
            "a machine without a list of tests runs all of them"
        );
        let topology = Topology { tests: vec!["leap".into(), "nodes::giga".into()], ..topology };
        assert!(topology.wants("leap::small") && topology.wants("nodes::gigabyte"));
        assert!(!topology.wants("leap_more::x") && !topology.wants("nodes::small"));
    }

    #[test]
    fn values_that_do_not_fit_together_are_refused() {
        for (from, to) in [
            ("id = 1", "id = 7"),
            ("huge_2m = 8", "huge_2m = 800"),
            ("[15, 10, 25], ", ""),
            ("cpus = 2", "initiator = 1"),
            ("about", "purpose"),
        ] {
            assert!(Topology::parse("x", &SPARSE.replace(from, to)).is_err(), "{to}");
        }
    }

    #[test]
    fn the_topologies_of_the_repository_are_sound() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../lab/topologies");
        let all = Topology::read_all(&folder).unwrap();
        let online: Vec<_> = all.iter().map(|t| (t.name.as_str(), t.online())).collect();
        for wanted in ["one-node", "two-nodes", "four-nodes", "tier", "sparse", "huge-on-one"] {
            assert!(online.iter().any(|(name, _)| *name == wanted), "{online:?}");
        }
        for topology in &all {
            let modest = |node: &Node| node.memory_mb <= 1536 || node.huge_1g > 0;
            assert!(topology.node.iter().all(modest), "{}: too large", topology.name);
        }
    }
}
