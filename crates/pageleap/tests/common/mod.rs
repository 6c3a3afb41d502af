//! What several test binaries need: pools on the first node, skips that leave a trace, and reproducible random numbers.

#![allow(dead_code)] // each test binary uses a part of it

use std::fmt::Display;
use std::io::Write;

use pageleap::{Error, NodeId, PageSize, Pool, topology::Topology};

/// Two pools of the same size, on two nodes where the machine has them, else on one.
pub fn pools(page: PageSize, bytes: u64) -> Result<[Pool; 2], Error> {
    let topology = Topology::read()?;
    let nodes: Vec<NodeId> = topology.nodes().iter().filter(|n| n.total_bytes > 0).map(|n| n.id).collect();
    let build = |node| Pool::builder(node, bytes).page_size(page).build();
    Ok([build(nodes[0])?, build(*nodes.get(1).unwrap_or(&nodes[0]))?])
}

/// Says why a test does not run here, on stderr and in the file that `PAGELEAP_SKIP_LOG` names.
pub fn skip(test: &str, reason: &dyn Display) {
    eprintln!("SKIP {test}: {reason}");
    if let Ok(path) = std::env::var("PAGELEAP_SKIP_LOG") {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
        writeln!(file.expect("the skip log can be written"), "{test}: {reason}")
            .expect("the skip log can be written");
    }
}

/// The process' mappings of pools, by regions and aliases, as the kernel lists them.
pub fn pool_mappings() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:pageleap")).map(str::to_owned).collect()
}

/// Seconds that each stress case runs.
pub fn stress_seconds() -> u64 {
    std::env::var("PAGELEAP_STRESS_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(3)
}

/// Numbers that look random and repeat with the seed (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Less than `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }
}
