//! Finds the node of a page frame by its number.
//!
//! `move_pages(2)` without nodes tells where pages lie, in 0.15 us for each. A process with
//! CAP_SYS_ADMIN is faster without it: pagemap, which is read anyway, contains frame numbers then,
//! and `/proc/zoneinfo` the frames of each node's zones.

use std::ops::Range;

/// The frames of each zone with its node, ascending. Frames that zones of several nodes span are
/// left out.
#[derive(Debug, Default)]
pub(super) struct FrameNodes(Vec<(Range<u64>, i32)>);

impl FrameNodes {
    /// Reads `/proc/zoneinfo`. If that fails, the node of every frame is unknown.
    pub(super) fn read() -> FrameNodes {
        FrameNodes::parse(&std::fs::read_to_string("/proc/zoneinfo").unwrap_or_default())
    }

    /// Parses the node, `spanned` and `start_pfn` of each zone.
    fn parse(text: &str) -> FrameNodes {
        let (mut node, mut spanned) = (None, 0);
        let mut zones = Vec::new();
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["Node", number, "zone", ..] => {
                    (node, spanned) = (number.trim_end_matches(',').parse().ok(), 0);
                }
                ["spanned", pages] => spanned = pages.parse().unwrap_or(0),
                ["start_pfn:", first] => {
                    if let (Some(node), Ok(first)) = (node, first.parse::<u64>()) {
                        zones.push((first..first.saturating_add(spanned), node));
                    }
                }
                _ => {}
            }
        }
        let mut bounds: Vec<u64> =
            zones.iter().flat_map(|(frames, _)| [frames.start, frames.end]).collect();
        bounds.sort_unstable();
        bounds.dedup();
        let mut known: Vec<(Range<u64>, i32)> = Vec::new();
        for pair in bounds.windows(2) {
            let mut nodes =
                zones.iter().filter(|(frames, _)| frames.contains(&pair[0])).map(|(_, node)| *node);
            let Some(node) = nodes.next() else { continue };
            if nodes.any(|other| other != node) {
                continue;
            }
            match known.last_mut() {
                Some((last, of)) if last.end == pair[0] && *of == node => last.end = pair[1],
                _ => known.push((pair[0]..pair[1], node)),
            }
        }
        FrameNodes(known)
    }

    /// The node of a frame, if it is known.
    pub(super) fn node(&self, frame: u64) -> Option<i32> {
        let found = self.0.partition_point(|(frames, _)| frames.end <= frame);
        self.0.get(found).filter(|(frames, _)| frames.start <= frame).map(|(_, node)| *node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_have_the_nodes_of_their_zones() {
        let zone = |node: i32, start: u64, spanned: u64| {
            format!(
                "Node {node}, zone   Normal\n  pages free     7\n        spanned  {spanned}\n        \
                 present  3\n  pagesets\n    cpu: 0\n              count: 1\n  start_pfn:           \
                 {start}\n"
            )
        };
        let zones = [(0, 1, 99), (0, 100, 100), (1, 200, 100), (2, 250, 100), (3, 0, 0)];
        let text: String = zones.iter().map(|(node, at, len)| zone(*node, *at, *len)).collect();
        let nodes = FrameNodes::parse(&text);
        let of = [0, 1, 100, 199, 200, 249, 250, 299, 300, 349, 350].map(|frame| nodes.node(frame));
        let (a, b, c) = (Some(0), Some(1), Some(2));
        assert_eq!(of, [None, a, a, a, b, b, None, None, c, c, None]);
        assert_eq!(nodes.0.len(), 3, "neighbours of one node are joined: {nodes:?}");
        assert_eq!(FrameNodes::parse("").node(1), None);
        assert_eq!(FrameNodes::parse("Node x, zone DMA\nspanned a\nstart_pfn: 4\n").node(4), None);
    }
}
