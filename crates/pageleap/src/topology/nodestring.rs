//! Sets of nodes in the notation of numactl's command line (numactl(8), `numa_parse_nodestring` of
//! libnuma 2.0.16).

use super::formats::{id_list, parse_id};
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
        let allowed = self.allowed_nodes();
        let known = match id_list(allowed.iter().map(|node| node.0 as usize)) {
            none if none.is_empty() => "this process may use no node with memory".to_owned(),
            known if allowed.len() == 1 => format!("this process may use node {known}"),
            known => format!("this process may use the nodes {known}"),
        };
        self.parse_among(text, same, Among { nodes: &allowed, word: "allowed" }, known)
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
        let known = id_list(online.iter().map(|node| node.0 as usize));
        let known = match online.len() {
            1 => format!("node {known} is online"),
            _ => format!("the nodes {known} are online"),
        };
        self.parse_among(text, same, Among { nodes: &online, word: "online" }, known)
    }

    /// Parses the set that a text names. Returns it in ascending order, each node once. `known`:
    /// the part of an error that lists the nodes that may be named.
    fn parse_among(
        &self,
        text: &str,
        same: Option<&[NodeId]>,
        among: Among,
        known: String,
    ) -> Result<Vec<NodeId>, Error> {
        let nodes = match (text, same) {
            ("same", Some(same)) => Ok(same.to_vec()),
            ("same", None) => Err("no set of nodes was given before".into()),
            _ => self.parse_set(text, among),
        };
        let nodes = nodes.and_then(|mut nodes| {
            nodes.sort_unstable();
            nodes.dedup();
            if nodes.is_empty() { Err("the set is empty".to_owned()) } else { Ok(nodes) }
        });
        nodes.map_err(|reason| Error::BadArgument {
            what: "nodes",
            reason: format!("`{}`: {reason}", shortened(text)),
            remedy: format!("{known}; numactl(8) describes the notation"),
        })
    }

    fn parse_set(&self, text: &str, among: Among) -> Result<Vec<NodeId>, String> {
        if text.len() > MAX_TEXT {
            return Err(format!("the text has more than {MAX_TEXT} characters"));
        }
        let (inverse, rest) = text.strip_prefix('!').map_or((false, text), |rest| (true, rest));
        let (relative, rest) = rest.strip_prefix('+').map_or((false, rest), |rest| (true, rest));
        // One flag per node, so that order and repetition do not matter.
        let mut named = vec![rest == "all"; among.nodes.len()];
        for part in rest.split(',').filter(|_| rest != "all") {
            let position = |number: &str| self.position(number, part, relative, among);
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (position(first)?, position(last)?),
                None => (position(part)?, position(part)?),
            };
            if first > last {
                return Err(format!("the range `{}` runs backwards", shortened(part)));
            }
            named[first..=last].fill(true);
        }
        Ok(among
            .nodes
            .iter()
            .zip(named)
            .filter(|(_, named)| *named != inverse)
            .map(|(node, _)| *node)
            .collect())
    }

    /// The position of the node `number` among the nodes that may be named.
    fn position(
        &self,
        number: &str,
        part: &str,
        relative: bool,
        among: Among,
    ) -> Result<usize, String> {
        let within =
            if number == part { String::new() } else { format!(" in `{}`", shortened(part)) };
        let number = parse_id(number, MAX_NODES).map_err(|_| match number {
            "" if part.is_empty() => "a number is missing".to_owned(),
            "" => format!("a number is missing{within}"),
            "all" | "same" => format!("`{number}` cannot be combined with other nodes"),
            _ => format!("`{}`{within} is not a node", shortened(number)),
        })?;
        if relative {
            return (number < among.nodes.len()).then_some(number).ok_or_else(|| {
                let end = match among.nodes.len() {
                    0 => format!("there is no {} node", among.word),
                    1 => format!("only `+0` is an {} node", among.word),
                    many => format!("`+{}` is the last {} node", many - 1, among.word),
                };
                format!("`+{number}`{within} does not exist: {end}")
            });
        }
        let node = NodeId(number as u32);
        among.nodes.binary_search(&node).map_err(|_| {
            let why = match self.nodes().iter().find(|known| known.id == node) {
                None => "does not exist or is offline",
                Some(known) if known.total_bytes == 0 => "has no memory",
                Some(_) => "is outside the cpuset of this process",
            };
            format!("{node}{within} {why}")
        })
    }
}

/// The nodes that a text may name.
#[derive(Clone, Copy)]
struct Among<'a> {
    nodes: &'a [NodeId],
    /// Their description, for messages.
    word: &'static str,
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
