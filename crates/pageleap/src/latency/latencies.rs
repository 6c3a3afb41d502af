//! Latencies by pair of nodes.

use std::collections::BTreeMap;

use crate::units::NodeId;

/// The latency of a load from each node to each node, as it was last seen.
///
/// ```
/// use pageleap::NodeId;
/// use pageleap::latency::Latencies;
///
/// let mut seen = Latencies::default();
/// seen.set(NodeId(0), NodeId(0), 190.0); // a crowded memory controller
/// seen.set(NodeId(0), NodeId(1), 140.0);
/// assert_eq!(seen.lowest(NodeId(0)), Some((NodeId(1), 140.0)));
/// assert_eq!(seen.get(NodeId(1), NodeId(0)), None);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Latencies {
    pairs: BTreeMap<(NodeId, NodeId), Result<f64, String>>,
}

impl Latencies {
    /// Nanoseconds of a load from CPUs of one node to the memory of another; `None` if that is not
    /// known.
    pub fn get(&self, from: NodeId, to: NodeId) -> Option<f64> {
        self.pairs.get(&(from, to))?.as_ref().ok().copied()
    }

    /// The node whose memory has the lowest latency from CPUs of a node, with its nanoseconds. If
    /// several have the same, the node itself comes first, and then the lower number.
    pub fn lowest(&self, from: NodeId) -> Option<(NodeId, f64)> {
        let of_node = self.iter().filter(|(pair, _)| pair.0 == from);
        let before = |(one, its): &(NodeId, f64), (other, others): &(NodeId, f64)| {
            its.total_cmp(others).then((*one != from).cmp(&(*other != from))).then(one.cmp(other))
        };
        of_node.map(|(pair, ns)| (pair.1, ns)).min_by(before)
    }

    /// All known latencies: initiator, target, and nanoseconds.
    pub fn iter(&self) -> impl Iterator<Item = ((NodeId, NodeId), f64)> {
        self.pairs.iter().filter_map(|(pair, ns)| Some((*pair, *ns.as_ref().ok()?)))
    }

    /// The pairs that could not be probed the last time, each with a sentence that says why.
    pub fn unknown(&self) -> impl Iterator<Item = ((NodeId, NodeId), &str)> {
        self.pairs.iter().filter_map(|(pair, ns)| Some((*pair, &**ns.as_ref().err()?)))
    }

    /// Notes a latency, such as one that was measured in another way.
    pub fn set(&mut self, from: NodeId, to: NodeId, ns: f64) {
        self.pairs.insert((from, to), Ok(ns));
    }

    /// Notes why a latency is not known.
    pub(super) fn set_unknown(&mut self, from: NodeId, to: NodeId, why: String) {
        self.pairs.insert((from, to), Err(why));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_equal_nodes_the_own_one_is_the_lowest() {
        let mut seen = Latencies::default();
        assert_eq!(seen.lowest(NodeId(1)), None);
        for to in [2, 0, 1] {
            seen.set(NodeId(1), NodeId(to), 100.0);
        }
        assert_eq!(seen.lowest(NodeId(1)), Some((NodeId(1), 100.0)));
        seen.set(NodeId(1), NodeId(1), 101.0);
        assert_eq!(seen.lowest(NodeId(1)), Some((NodeId(0), 100.0)));
        seen.set_unknown(NodeId(1), NodeId(0), "it is offline".to_owned());
        assert_eq!(seen.lowest(NodeId(1)), Some((NodeId(2), 100.0)));
        assert_eq!(seen.get(NodeId(1), NodeId(0)), None);
        let unknown: Vec<_> = seen.unknown().collect();
        assert_eq!(unknown, [((NodeId(1), NodeId(0)), "it is offline")]);
        assert_eq!(seen.iter().count(), 2);
    }
}
