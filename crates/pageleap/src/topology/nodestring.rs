//! Sets of nodes and of CPUs in the notation of numactl's command line (numactl(8),
//! `numa_parse_nodestring` and `numa_parse_cpustring` of libnuma 2.0.16).

use super::formats::{MAX_CPUS, id_list, parse_id};
use super::shown::shortened;
use super::{MAX_NODES, Topology};
use crate::error::Error;
use crate::units::NodeId;

/// Bytes of the longest text that is parsed. A list of all 1024 nodes that Linux can have is far
/// shorter.
const MAX_TEXT: usize = 8192;

impl Topology {
    /// Parses a set of nodes as `numactl` does. Returns the nodes in ascending order, each node
    /// once.
    ///
    /// | text | nodes |
    /// |---|---|
    /// | `0,2-3` | these nodes; a range skips nodes that are not allowed, but must not end at one |
    /// | `all` | all nodes that the process may use ([`allowed_nodes`](Topology::allowed_nodes)) |
    /// | `+0,2-3` | positions among the allowed nodes: `+0` is the first of them |
    /// | `!1`, `!+1` | all allowed nodes except these; `!` and `+` apply to the whole text |
    /// | `same` | the nodes of the argument `same`: the set that was given before this one |
    ///
    /// libnuma accepts some texts that are likely mistakes, and this function refuses them: an
    /// empty text or set, ranges that run backwards, octal and hexadecimal numbers, and white
    /// space. `!` gives only nodes that the process may use. libnuma counts up to the number of
    /// nodes instead, which fails for sparse ids. The names of devices, files and hosts that
    /// numactl resolves are not supported.
    ///
    /// # Errors
    /// [`Error::BadArgument`] names the wrong part of the text, and lists the nodes that the
    /// process may use.
    #[doc(alias = "numa_parse_nodestring")]
    pub fn parse_nodes(&self, text: &str, same: Option<&[NodeId]>) -> Result<Vec<NodeId>, Error> {
        self.parse_node_set(text, same, &self.allowed_nodes(), Scope::Allowed)
    }

    /// Parses a set of nodes as [`parse_nodes`](Topology::parse_nodes) does, but among all online
    /// nodes, including nodes without memory and nodes that the process may not use. This is for
    /// programs that show nodes or their contents, and take no memory from them.
    ///
    /// # Errors
    /// [`Error::BadArgument`] names the wrong part of the text, and lists the online nodes.
    pub fn parse_online_nodes(
        &self,
        text: &str,
        same: Option<&[NodeId]>,
    ) -> Result<Vec<NodeId>, Error> {
        let online: Vec<NodeId> = self.nodes().iter().map(|node| node.id).collect();
        self.parse_node_set(text, same, &online, Scope::Online)
    }

    /// Parses a set of nodes as [`parse_nodes`](Topology::parse_nodes) does, but among the nodes
    /// with CPUs to run on: those from which the process may take memory, and those without memory.
    /// The affinity of the process does not matter, as in numactl.
    ///
    /// # Errors
    /// [`Error::BadArgument`] names the wrong part of the text, and lists the nodes with CPUs.
    #[doc(alias = "cpunodebind")]
    pub fn parse_nodes_with_cpus(
        &self,
        text: &str,
        same: Option<&[NodeId]>,
    ) -> Result<Vec<NodeId>, Error> {
        let may_run = |node: &&super::Node| {
            !node.cpus.is_empty() && (node.total_bytes == 0 || self.is_allowed(node.id))
        };
        let nodes: Vec<NodeId> = self.nodes().iter().filter(may_run).map(|node| node.id).collect();
        self.parse_node_set(text, same, &nodes, Scope::Running)
    }

    /// Parses a set of CPUs in the same notation as [`parse_nodes`](Topology::parse_nodes), among
    /// the CPUs on which this process may run ([`allowed_cpus`](Topology::allowed_cpus)). `same` is
    /// not known.
    ///
    /// # Errors
    /// [`Error::BadArgument`] names the wrong part of the text, and lists the CPUs on which the
    /// process may run.
    #[doc(alias = "numa_parse_cpustring")]
    pub fn parse_cpus(&self, text: &str) -> Result<Vec<usize>, Error> {
        self.parse_cpu_set(text, &self.allowed_cpus(), Scope::Running)
    }

    /// Parses a set of CPUs as [`parse_cpus`](Topology::parse_cpus) does, but among all online
    /// CPUs.
    ///
    /// # Errors
    /// [`Error::BadArgument`] names the wrong part of the text, and lists the online CPUs.
    #[doc(alias = "numa_parse_cpustring_all")]
    pub fn parse_online_cpus(&self, text: &str) -> Result<Vec<usize>, Error> {
        self.parse_cpu_set(text, &self.online_cpus(), Scope::Online)
    }

    fn parse_node_set(
        &self,
        text: &str,
        same: Option<&[NodeId]>,
        nodes: &[NodeId],
        scope: Scope,
    ) -> Result<Vec<NodeId>, Error> {
        let why = |id: usize| {
            let node = self.nodes().iter().find(|known| known.id.0 as usize == id);
            match (scope, node) {
                (_, None) => "does not exist or is offline",
                (Scope::Running, Some(node)) if node.cpus.is_empty() => "has no CPUs",
                (Scope::Allowed, Some(node)) if node.total_bytes == 0 => "has no memory",
                (_, Some(_)) => "is outside the cpuset of this process",
            }
        };
        let ids = |nodes: &[NodeId]| nodes.iter().map(|node| node.0 as usize).collect::<Vec<_>>();
        let (ids, same) = (ids(nodes), same.map(ids));
        let among = Among { ids: &ids, noun: "node", scope, end: MAX_NODES, why: &why };
        let found = parse(text, same.as_deref(), &among)?;
        Ok(found.into_iter().map(|id| NodeId(id as u32)).collect())
    }

    fn parse_cpu_set(&self, text: &str, cpus: &[usize], scope: Scope) -> Result<Vec<usize>, Error> {
        let why = |id: usize| match self.online_cpus().binary_search(&id) {
            Ok(_) => "is outside the cpuset or the affinity of this process",
            Err(_) => "does not exist or is offline",
        };
        parse(text, None, &Among { ids: cpus, noun: "CPU", scope, end: MAX_CPUS, why: &why })
    }
}

/// Which nodes or CPUs a text may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    /// Nodes from which the process may take memory.
    Allowed,
    /// Nodes and CPUs on which the process may run.
    Running,
    /// All that are online.
    Online,
}

impl Scope {
    fn word(self) -> &'static str {
        if self == Scope::Online { "online" } else { "allowed" }
    }
}

/// The ids that a text may name.
struct Among<'a> {
    /// In ascending order.
    ids: &'a [usize],
    /// What the ids are, for messages: `node` or `CPU`.
    noun: &'static str,
    scope: Scope,
    /// No id reaches this number.
    end: usize,
    /// Why an id is not among them.
    why: &'a dyn Fn(usize) -> &'static str,
}

impl Among<'_> {
    /// The ids that may be named, as a part of a sentence.
    fn listed(&self) -> String {
        let noun = self.noun;
        let ids = match self.ids {
            [] if self.scope == Scope::Allowed => "no node with memory".to_owned(),
            [] => format!("no {noun}"),
            [one] => format!("{noun} {one}"),
            ids => format!("the {noun}s {}", id_list(ids.iter().copied())),
        };
        match self.scope {
            Scope::Allowed => format!("this process may use {ids}"),
            Scope::Running => format!("this process may run on {ids}"),
            Scope::Online if self.ids.len() == 1 => format!("{ids} is online"),
            Scope::Online => format!("{ids} are online"),
        }
    }
}

/// Parses the set that a text names. Returns it in ascending order, each id once.
fn parse(text: &str, same: Option<&[usize]>, among: &Among) -> Result<Vec<usize>, Error> {
    let ids = match (text, same) {
        ("same", Some(same)) => Ok(same.to_vec()),
        ("same", None) => Err(format!("no set of {}s was given before", among.noun)),
        _ => parse_set(text, among),
    };
    let ids = ids.and_then(|mut ids| {
        ids.sort_unstable();
        ids.dedup();
        if ids.is_empty() { Err("the set is empty".to_owned()) } else { Ok(ids) }
    });
    ids.map_err(|reason| Error::BadArgument {
        what: if among.noun == "node" { "nodes" } else { "CPUs" },
        reason: format!("`{}`: {reason}", shortened(text)),
        remedy: format!("{}; numactl(8) describes the notation", among.listed()),
    })
}

fn parse_set(text: &str, among: &Among) -> Result<Vec<usize>, String> {
    if text.len() > MAX_TEXT {
        return Err(format!("the text has more than {MAX_TEXT} characters"));
    }
    let (inverse, rest) = text.strip_prefix('!').map_or((false, text), |rest| (true, rest));
    let (relative, rest) = rest.strip_prefix('+').map_or((false, rest), |rest| (true, rest));
    // One flag per id, so that order and repetition do not matter.
    let mut named = vec![rest == "all"; among.ids.len()];
    for part in rest.split(',').filter(|_| rest != "all") {
        let position = |number: &str| position(number, part, relative, among);
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (position(first)?, position(last)?),
            None => (position(part)?, position(part)?),
        };
        if first > last {
            return Err(format!("the range `{}` runs backwards", shortened(part)));
        }
        named[first..=last].fill(true);
    }
    let ids = among.ids.iter().zip(named).filter(|(_, named)| *named != inverse);
    Ok(ids.map(|(id, _)| *id).collect())
}

/// The position of the id `number` among those that may be named.
fn position(number: &str, part: &str, relative: bool, among: &Among) -> Result<usize, String> {
    let (noun, word) = (among.noun, among.scope.word());
    let within = if number == part { String::new() } else { format!(" in `{}`", shortened(part)) };
    let number = parse_id(number, among.end).map_err(|_| match number {
        "" if part.is_empty() => "a number is missing".to_owned(),
        "" => format!("a number is missing{within}"),
        "all" | "same" => format!("`{number}` cannot be combined with other {noun}s"),
        _ => format!("`{}`{within} is not a {noun}", shortened(number)),
    })?;
    if relative {
        return (number < among.ids.len()).then_some(number).ok_or_else(|| {
            let end = match among.ids.len() {
                0 => format!("there is no {word} {noun}"),
                1 => format!("only `+0` is an {word} {noun}"),
                many => format!("`+{}` is the last {word} {noun}", many - 1),
            };
            format!("`+{number}`{within} does not exist: {end}")
        });
    }
    let found = among.ids.binary_search(&number);
    found.map_err(|_| format!("{noun} {number}{within} {}", (among.why)(number)))
}

#[cfg(test)]
mod tests {
    use super::super::tests::machine;
    use super::*;
    use crate::cases::cases;
    use proptest::prelude::*;

    /// Nodes 0, 2, 3, 5 and 8 have memory, and the process may use all of them except 3. Node 6 has
    /// only CPUs.
    fn sparse() -> Topology {
        let nodes: [(u32, &[usize], u64); 6] =
            [(0, &[0], 1), (2, &[1], 1), (3, &[], 1), (5, &[], 1), (6, &[2], 0), (8, &[3], 1)];
        machine(&nodes, Some(&[0, 1, 2, 5, 6, 8]))
    }

    fn parse(text: &str) -> Result<Vec<u32>, String> {
        let same = [NodeId(5), NodeId(0), NodeId(5)];
        let nodes = sparse().parse_nodes(text, Some(&same)).map_err(|error| {
            assert!(error.is_usage());
            error.to_string()
        })?;
        Ok(nodes.into_iter().map(|node| node.0).collect())
    }

    #[test]
    fn the_notation_of_numactl_is_accepted() {
        let cases: [(&str, &[u32]); 17] = [
            ("0", &[0]),
            ("8,0,0", &[0, 8]),
            ("0,2-8", &[0, 2, 5, 8]),
            ("0-2,2-5", &[0, 2, 5]),
            ("5-5", &[5]),
            ("all", &[0, 2, 5, 8]),
            ("+0", &[0]),
            ("+1-2", &[2, 5]),
            ("+3,0", &[0, 8]),
            ("!0", &[2, 5, 8]),
            ("!2-5", &[0, 8]),
            ("!+0-1", &[5, 8]),
            ("!+3", &[0, 2, 5]),
            ("+all", &[0, 2, 5, 8]),
            ("same", &[0, 5]),
            ("05", &[5]),
            ("!0,8", &[2, 5]),
        ];
        for (text, nodes) in cases {
            assert_eq!(parse(text).as_deref(), Ok(nodes), "{text}");
        }
    }

    #[test]
    fn errors_name_the_wrong_part_and_list_the_allowed_nodes() {
        let cases = [
            ("", "a number is missing"),
            ("0,", "a number is missing"),
            ("0,,2", "a number is missing"),
            ("0,2-", "a number is missing in `2-`"),
            ("-2", "a number is missing in `-2`"),
            ("0,x", "`x` is not a node"),
            ("0-y", "`y` in `0-y` is not a node"),
            ("0-2-3", "`2-3` in `0-2-3` is not a node"),
            ("0x1", "`0x1` is not a node"),
            ("0, 2", "` 2` is not a node"),
            ("1024", "`1024` is not a node"),
            (
                "0-99999999999999999999",
                "`99999999999999999999` in `0-99999999999999999999` is not a node",
            ),
            ("0,4", "node 4 does not exist or is offline"),
            ("0-4", "node 4 in `0-4` does not exist"),
            ("6", "node 6 has no memory"),
            ("3", "node 3 is outside the cpuset"),
            ("8-0", "`8-0` runs backwards"),
            ("+4", "`+4` does not exist: `+3` is the last allowed node"),
            ("+2-7", "`+7` in `2-7` does not exist"),
            ("0,+1", "`+1` is not a node"),
            ("+!1", "`!1` is not a node"),
            ("!!1", "`!1` is not a node"),
            ("0,all", "`all` cannot be combined"),
            ("!same", "`same` cannot be combined"),
            ("!all", "the set is empty"),
            ("!0-8", "the set is empty"),
            ("netdev:eth0", "`netdev:eth0` is not a node"),
            ("\x1b[2J", "is not a node"),
        ];
        for (text, part) in cases {
            let error = parse(text).unwrap_err();
            assert!(
                error.contains(part) && error.contains("0,2,5,8") && !error.contains('\x1b'),
                "{text}: {error}"
            );
        }
        let none_before = sparse().parse_nodes("same", None).unwrap_err().to_string();
        assert!(none_before.contains("no set of nodes was given before"), "{none_before}");
        assert!(sparse().parse_nodes("same", Some(&[])).is_err());
        let long = parse(&"0,".repeat(MAX_TEXT)).unwrap_err();
        assert!(long.contains("more than 8192 characters") && long.len() < 400, "{long}");
    }

    #[test]
    fn all_online_nodes_can_be_shown() {
        let machine = sparse();
        let parse = |text| machine.parse_online_nodes(text, None);
        for (text, nodes) in [
            ("all", &[0, 2, 3, 5, 6, 8][..]),
            ("3", &[3]),
            ("6", &[6]),
            ("2-6", &[2, 3, 5, 6]),
            ("!3", &[0, 2, 5, 6, 8]),
            ("+2,4", &[3, 6]),
        ] {
            let found: Vec<u32> = parse(text).unwrap().iter().map(|node| node.0).collect();
            assert_eq!(found, nodes, "{text}");
        }
        for (text, part) in [
            ("4", "node 4 does not exist or is offline; the nodes 0,2-3,5-6,8 are online"),
            ("+6", "`+5` is the last online node"),
            ("same", "no set of nodes was given before"),
            ("", "a number is missing"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.is_usage() && error.to_string().contains(part), "{text}: {error}");
        }
        assert!(parse(&"0,".repeat(MAX_TEXT)).is_err());
        let same = machine.parse_online_nodes("same", Some(&[NodeId(6), NodeId(3)]));
        assert_eq!(same.unwrap(), [NodeId(3), NodeId(6)]);
    }

    #[test]
    fn a_process_may_have_one_node_or_none() {
        let nodes: [(u32, &[usize], u64); 2] = [(0, &[0], 1), (1, &[1], 0)];
        for (allowed, remedy) in
            [(&[0][..], "use node 0; numactl"), (&[1], "use no node with memory; numactl")]
        {
            let error = machine(&nodes, Some(allowed)).parse_nodes("7", None).unwrap_err();
            assert!(error.to_string().contains(remedy), "{error}");
        }
        let only = machine(&nodes, Some(&[0])).parse_nodes("+1", None).unwrap_err();
        assert!(only.to_string().contains("only `+0` is an allowed node"), "{only}");
        let none = machine(&nodes, Some(&[1])).parse_nodes("+0", None).unwrap_err();
        assert!(none.to_string().contains("there is no allowed node"), "{none}");
    }

    #[test]
    fn nodes_to_run_on_have_cpus_and_may_have_no_memory() {
        let nodes: [(u32, &[usize], u64); 4] =
            [(0, &[0, 1], 1), (2, &[], 1), (5, &[4], 0), (7, &[6], 1)];
        let mut machine = machine(&nodes, Some(&[0]));
        // An affinity does not matter.
        machine.allowed.cpus = Some(vec![1]);
        let parse = |text| machine.parse_nodes_with_cpus(text, Some(&[NodeId(5)]));
        assert_eq!(parse("all").unwrap(), [NodeId(0), NodeId(5)]);
        assert_eq!(parse("+1").unwrap(), [NodeId(5)]);
        assert_eq!(parse("same").unwrap(), [NodeId(5)]);
        for (text, part) in [
            ("2", "node 2 has no CPUs; this process may run on the nodes 0,5;"),
            ("7", "node 7 is outside the cpuset of this process"),
            ("1", "node 1 does not exist or is offline"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.is_usage() && error.to_string().contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn cpus_have_the_notation_of_nodes() {
        let nodes: [(u32, &[usize], u64); 2] = [(0, &[0, 1, 2, 5], 1), (1, &[8, 9], 1)];
        let mut machine = machine(&nodes, None);
        machine.allowed.cpus = Some(vec![1, 2, 5, 8]);
        for (text, cpus) in [
            ("all", &[1, 2, 5, 8][..]),
            ("1-5", &[1, 2, 5]),
            ("+0,2", &[1, 5]),
            ("!2-5", &[1, 8]),
            ("!+3", &[1, 2, 5]),
        ] {
            assert_eq!(machine.parse_cpus(text).unwrap(), cpus, "{text}");
        }
        assert_eq!(machine.parse_online_cpus("0-2,9").unwrap(), [0, 1, 2, 9]);
        for (text, part) in [
            ("0", "CPU 0 is outside the cpuset or the affinity of this process; this process may"),
            ("3", "CPU 3 does not exist or is offline"),
            ("+4", "`+3` is the last allowed CPU"),
            ("same", "no set of CPUs was given before"),
            ("x", "bad CPUs: `x`: `x` is not a CPU; this process may run on the CPUs 1-2,5,8;"),
        ] {
            let error = machine.parse_cpus(text).unwrap_err();
            assert!(error.is_usage() && error.to_string().contains(part), "{text}: {error}");
        }
        let error = machine.parse_online_cpus("7").unwrap_err().to_string();
        assert!(error.contains("the CPUs 0-2,5,8-9 are online"), "{error}");
    }

    proptest! {
        #![proptest_config(cases(512, 8))]

        #[test]
        fn any_text_gives_allowed_nodes_or_is_refused(
            text in prop_oneof![".{0,40}", "!?\\+?[0-9,\\-]{0,12}"]
        ) {
            let machine = sparse();
            if let Ok(nodes) = machine.parse_nodes(&text, None) {
                prop_assert!(!nodes.is_empty() && nodes.is_sorted_by(|a, b| a < b));
                prop_assert!(nodes.iter().all(|node| machine.allowed_nodes().contains(node)));
            }
        }

        #[test]
        fn a_set_parses_to_the_same_nodes_in_every_notation(
            chosen in proptest::collection::btree_set(0usize..4, 1..4)
        ) {
            let machine = sparse();
            let allowed = machine.allowed_nodes();
            let nodes: Vec<NodeId> = chosen.iter().map(|position| allowed[*position]).collect();
            let others = allowed.iter().filter(|node| !nodes.contains(node));
            let others = others.map(|node| node.0 as usize);
            let texts = [
                id_list(nodes.iter().map(|node| node.0 as usize)),
                format!("+{}", id_list(chosen)),
                format!("!{}", id_list(others)),
            ];
            for text in texts {
                prop_assert_eq!(&machine.parse_nodes(&text, None).unwrap(), &nodes, "{}", text);
            }
        }
    }
}
