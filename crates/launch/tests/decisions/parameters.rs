//! The parameters of the modelled machines and programs: from the papers' text where it has figures,
//! otherwise assumptions, each with its reason.
//!
//! *002* is the paper on Phoenix, *003* that on latency-aware page-table migration.

/// Parameters. Each is changed by 20 % up and down, one at a time: no decision may depend on that.
#[derive(Clone, Copy, Debug)]
pub struct Parameters {
    /// Nanoseconds of a load from local memory, nobody else around. Assumption: usual for servers.
    /// Only the ratio to other times matters.
    pub local_ns: f64,
    /// By how much longer a load from the other socket of an x86 server takes, as a part of the local
    /// one. 002, 3.2: a remote access takes 1.2 to 1.4 times as long as a local one; the mean is 1.3.
    pub remote_extra: f64,
    /// The same for the other node of a socket of the ARM server. Assumption: 003, 3.4.1 calls it the
    /// closest, with the lowest remote latency; sub-NUMA clusters differ less than sockets do.
    pub near_extra: f64,
    /// The same for the closer node of the other socket of the ARM server. 003, 3.2.1: an access from
    /// node 0 to node 2 takes 2.3 times as long as a local one.
    pub far_extra: f64,
    /// The same for the farther one. Assumption: 003, 3.4.1 calls it the farthest, with the highest
    /// latency.
    pub farthest_extra: f64,
    /// Nanoseconds for which a load occupies a memory controller. Assumption: a third of a load, the
    /// time of a DRAM bank; the rest of the load is on the way. Loads wait as in a queue with random
    /// arrivals (M/M/1): service time * u / (1 - u) at the use u.
    pub controller_ns: f64,
    /// The same for a link between sockets. Assumption: half of the controller's.
    pub link_ns: f64,
    /// The bandwidth that the interference (STREAM) asks for, in parts of all of it. Assumption: more
    /// than there is. 003 runs it on each core of the node, 002 on 32 or 48 of 64.
    pub stream: f64,
    /// The use beyond which no controller or link gets. 002, 2.1 and 6.4: STREAM saturates the memory
    /// bandwidth "up to 90 %", and 16 threads of it "over 90 %".
    pub most_used: f64,
    /// The use of a controller by the program itself. Assumption: the programs of both papers are
    /// bound by latency, and not by bandwidth.
    pub own: f64,
    /// Nanoseconds that a program computes between two loads of random data. Assumption: few
    /// instructions, as of GUPS and hash joins.
    pub compute_ns: f64,
    /// Loads of page-table entries for each load of random data. 002, 3.1: caches reduce the four of a
    /// walk to 1.39 in the mean.
    pub walk_loads: f64,
    /// The same for a program whose translations are in the TLB. 002, 2.2: wrmem's misses are below
    /// 0.05 %.
    pub cached_walk_loads: f64,
    /// Microseconds by which one replica makes a mapping call longer. 002, table 2: 53 to 61 us for
    /// `mremap` with two copies.
    pub replica_us: f64,
    /// Mapping calls per second of a program that hardly makes any. Assumption: databases and
    /// simulations that have taken their memory at the start.
    pub few_calls: f64,
    /// The same of a program that makes many. Assumption: a server that maps a file for each request:
    /// Apache in 002, 2.2 served 50,000 requests of 12 KB.
    pub many_calls: f64,
    /// The part of a program's time that a scan of its page tables takes if each trigger causes one.
    /// 003, 4.1.4: Redis took 13 % longer.
    pub scan_share: f64,
}

impl Parameters {
    pub const PAPERS: Parameters = Parameters {
        local_ns: 100.0,
        remote_extra: 0.3,
        near_extra: 0.3,
        far_extra: 1.3,
        farthest_extra: 1.6,
        controller_ns: 33.0,
        link_ns: 16.0,
        stream: 1.3,
        most_used: 0.9,
        own: 0.2,
        compute_ns: 20.0,
        walk_loads: 1.39,
        cached_walk_loads: 0.0005,
        replica_us: 8.0,
        few_calls: 20.0,
        many_calls: 10_000.0,
        scan_share: 0.13,
    };

    /// Each parameter alone, 20 % larger and 20 % smaller, with its name.
    pub fn changed() -> Vec<(String, Parameters)> {
        let mut all = Vec::new();
        for number in 0.. {
            for factor in [0.8, 1.2] {
                let mut changed = Parameters::PAPERS;
                let Some((name, value)) = changed.each().into_iter().nth(number) else {
                    return all;
                };
                *value *= factor;
                all.push((format!("{name} times {factor}"), changed));
            }
        }
        all
    }

    fn each(&mut self) -> Vec<(&'static str, &mut f64)> {
        macro_rules! all {
            ($($name:ident)*) => {{
                // A parameter that is missing in the list does not compile.
                let Parameters { $($name),* } = self;
                vec![$((stringify!($name), $name)),*]
            }};
        }
        all! {
            local_ns remote_extra near_extra far_extra farthest_extra controller_ns link_ns stream
            most_used own compute_ns walk_loads cached_walk_loads replica_us few_calls many_calls
            scan_share
        }
    }
}
