//! Sets of nodes in the notation of numactl's command line (numactl(8), `numa_parse_nodestring` of
//! libnuma 2.0.16).

use super::files::shortened;
use super::formats::{id_list, parse_id};
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
        let known = id_list(allowed.iter().map(|node| node.0 as usize));
        let refuse = |reason: String| Error::BadArgument {
            what: "nodes",
            reason: format!("`{}`: {reason}", shortened(text)),
            remedy: format!(
                "this process may use the nodes {known}; numactl(8) describes the notation"
            ),
        };
        let nodes = match text {
            "same" => {
                let mut nodes =
                    same.ok_or_else(|| refuse("no set of nodes was given before".into()))?.to_vec();
                nodes.sort_unstable();
                nodes.dedup();
                nodes
            }
            _ if text.len() > MAX_TEXT => {
                return Err(refuse(format!("the text has more than {MAX_TEXT} characters")));
            }
            _ => self.parse_set(text, &allowed).map_err(refuse)?,
        };
        if nodes.is_empty() { Err(refuse("the set is empty".into())) } else { Ok(nodes) }
    }

    fn parse_set(&self, text: &str, allowed: &[NodeId]) -> Result<Vec<NodeId>, String> {
        let (inverse, rest) = text.strip_prefix('!').map_or((false, text), |rest| (true, rest));
        let (relative, rest) = rest.strip_prefix('+').map_or((false, rest), |rest| (true, rest));
        // One flag per allowed node, so that order and repetition do not matter.
        let mut named = vec![rest == "all"; allowed.len()];
        for part in rest.split(',').filter(|_| rest != "all") {
            let position = |number: &str| self.position(number, part, relative, allowed);
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (position(first)?, position(last)?),
                None => (position(part)?, position(part)?),
            };
            if first > last {
                return Err(format!("the range `{}` runs backwards", shortened(part)));
            }
            named[first..=last].fill(true);
        }
        Ok(allowed
            .iter()
            .zip(named)
            .filter(|(_, named)| *named != inverse)
            .map(|(node, _)| *node)
            .collect())
    }

    /// The position of the node `number` among the allowed nodes.
    fn position(
        &self,
        number: &str,
        part: &str,
        relative: bool,
        allowed: &[NodeId],
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
            return (number < allowed.len()).then_some(number).ok_or_else(|| {
                format!("`+{number}`{within} is beyond the {} allowed nodes", allowed.len())
            });
        }
        let node = NodeId(number as u32);
        allowed.binary_search(&node).map_err(|_| {
            let why = match self.nodes().iter().find(|known| known.id == node) {
                None => "does not exist or is offline",
                Some(known) if known.total_bytes == 0 => "has no memory",
                Some(_) => "is outside the cpuset of this process",
            };
            format!("{node}{within} {why}")
        })
    }
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
            ("+4", "`+4` is beyond the 4 allowed nodes"),
            ("+2-7", "`+7` in `2-7` is beyond"),
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
