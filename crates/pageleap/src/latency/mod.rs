//! The latency of memory, measured by loads: a [`Chain`] over a large buffer, a [`Probe`] that takes
//! half a millisecond, or a [`Prober`] that probes from time to time.

mod chain;
mod latencies;
mod probe;
mod prober;

pub use chain::{Chain, Order};
pub use latencies::Latencies;
pub use probe::Probe;
pub use prober::{PROBE_INTERVAL, ProbeCost, Prober, ProberBuilder};
