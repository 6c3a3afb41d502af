//! The times of the leaps, without load and under load, beside those of the memcpys.

use pageleap::{CopyMethod, CopyUse};
use pageleap_measure::document::{Body, Fact, Section, Table, Value, column, fact};
use pageleap_measure::figures::{human_bytes, human_ns};
use pageleap_measure::memcpy::{Copies, METHODS};

use super::super::args::Memory;
use super::super::summary::Summary;
use super::signed_ns;

impl Summary {
    /// The facts that all leaps have in common.
    pub(super) fn move_section(&self) -> Section {
        let leap = &self.leap;
        let mut facts = vec![
            fact("from", "from node", Value::count(leap.from)),
            fact("to", "to node", Value::count(leap.to)).remark(self.same_node()),
            fact("copy_threads", "threads that copy", Value::count(leap.threads)),
        ];
        if let Some(CopyUse { method, tried, .. }) = leap.copies {
            let how = if tried { "the fastest in a trial" } else { "by default" };
            facts.extend([
                fact("copy_loop", "copied by", method.by.name()).remark(format!("{method}, {how}")),
                fact("copy_step_bytes", "", Value::count(method.step_bytes)),
                fact("copy_tried", "", Value::Flag(tried)),
            ]);
        }
        Section::new("", "Leaps of the whole table", Body::Facts(facts))
    }

    /// The remark on a leap whose source and destination are the same node.
    fn same_node(&self) -> String {
        if self.leap.from != self.leap.to {
            return String::new();
        }
        let why = match self.machine.nodes {
            1 => "the machine has one node",
            _ => "the same node was asked for",
        };
        let what = match self.table.memory {
            Memory::Pool => "leaps between two pools of",
            Memory::Malloc => "leaps within",
        };
        format!(
            "{why}: {what} node {}; new frames, same node; this is no NUMA speed-up",
            self.leap.from
        )
    }

    /// The time to populate the memory that a leap copied into.
    fn reserve(&self, key: &'static str, ns: Option<u64>, when: &str) -> Fact {
        let label = match self.table.memory {
            Memory::Pool => "",
            Memory::Malloc => "reserve",
        };
        let remark = match ns {
            Some(ns) => {
                format!("{}; populated {when}, no part of it", throughput(self.table.bytes, ns))
            }
            None => "none: the kernel's engine takes fresh memory meanwhile".to_owned(),
        };
        fact(key, label, Value::ns(ns)).remark(remark)
    }

    /// Leaps and memcpys without load, for people.
    pub(super) fn quiet_section(&self) -> Section {
        let (quiet, memcpy) = (&self.quiet, &self.memcpy);
        let [median, min, max] =
            [quiet.ns.median, quiet.ns.min, quiet.ns.max].map(|ns| ns.round() as u64);
        let leap = format!(
            "{}; median of {}, there and back: {} to {}",
            throughput(self.table.bytes, median),
            quiet.ns.count,
            human_ns(min),
            human_ns(max)
        );
        let copy = format!(
            "{}; one thread, the same bytes, faulted memory, by {}, the fastest of {} methods",
            throughput(self.table.bytes, memcpy.ns),
            memcpy.method,
            METHODS.len()
        );
        let facts = vec![
            fact("", "engine", quiet.engine.as_str()).remark(&quiet.engine_reason),
            fact("", "leap", Value::Ns(median)).remark(leap),
            self.reserve("", quiet.reserve_ns, "before each leap"),
            fact("memcpy_ns", "memcpy", Value::Ns(memcpy.ns)).remark(copy),
            fact("memcpy_loop", "", memcpy.method.by.name()),
            fact("memcpy_step_bytes", "", Value::count(memcpy.method.step_bytes)),
            fact("memcpy_cpu_ns", "", Value::ns(memcpy.cpu_ns)),
            fact("", "ratio", Value::Ratio(self.quiet_ratio())).remark("leap / memcpy"),
            fact("", "CPU ratio", Value::ratio(self.quiet_cpu_ratio()))
                .remark("CPU time of leap and recycling / CPU time of the memcpy"),
        ];
        Section::new("", "Without load: the leap and the fastest memcpy", Body::Facts(facts))
    }

    /// Leaps without load, for programs.
    pub(super) fn quiet_data(&self) -> Section {
        let quiet = &self.quiet;
        let ns = |ns: f64| Value::Ns(ns.round() as u64);
        let times = quiet.samples_ns.iter().map(|ns| Value::Ns(*ns)).collect();
        let facts = vec![
            fact("migrate_ns", "", ns(quiet.ns.median)),
            fact("migrate_ns_min", "", ns(quiet.ns.min)),
            fact("migrate_ns_max", "", ns(quiet.ns.max)),
            fact("reserve_ns", "", Value::ns(quiet.reserve_ns)),
            fact("ratio_to_memcpy", "", Value::Ratio(self.quiet_ratio())),
            fact("cpu_to_memcpy_ratio", "", Value::ratio(self.quiet_cpu_ratio())),
            fact("cpu_ns", "", Value::ns(quiet.cpu_ns)),
            fact("engine", "", quiet.engine.as_str()),
            fact("engine_reason", "", quiet.engine_reason.as_str()),
            fact("samples_ns", "", Value::List(times)),
        ];
        Section::data("quiet", Body::Facts(facts))
    }

    /// The leap beside queries and writes, and the cost of that load for the leap and for a memcpy.
    pub(super) fn under_load(&self) -> Section {
        let leap = &self.leap;
        let rate = throughput(leap.moved_bytes, leap.migrate_ns);
        let recycling = human_ns(leap.recycle_ns);
        let time = match self.table.memory {
            Memory::Pool => format!("{rate}; then {recycling} to recycle the vacated frames"),
            Memory::Malloc => format!("{rate}; then {recycling} until the job had ended"),
        };
        let by = leap.moved_by.iter().map(|(name, bytes)| ((*name).into(), Value::Bytes(*bytes)));
        let copy = self.memcpy_under_load_ns.map_or(String::new(), |ns| {
            format!("{}; one copy beside the same load", throughput(self.table.bytes, ns))
        });
        let ratio = self.ratio_to_memcpy();
        let none = |why: &'static str| if ratio.is_some() { why } else { "not everything moved" };
        let mut facts = vec![
            fact("engine", "engine", leap.engine.as_str()).remark(&leap.engine_reason),
            fact("engine_reason", "", leap.engine_reason.as_str()),
            fact("moved_by", "moved by", Value::Map(by.collect())),
            fact("area_bytes", "areas of up to", Value::Bytes(leap.area_bytes)),
            fact("migrate_ns", "leap", Value::Ns(leap.migrate_ns)).remark(time),
            fact("recycle_ns", "", Value::Ns(leap.recycle_ns)),
            self.reserve("reserve_ns", leap.reserve_ns, "before the leap"),
            fact("reserve_left_bytes", "", Value::bytes(leap.reserve_left_bytes)),
            fact("memcpy_under_load_ns", "memcpy", Value::ns(self.memcpy_under_load_ns))
                .remark(copy),
            fact("ratio_to_memcpy_under_load", "ratio", Value::ratio(self.ratio_under_load()))
                .remark(none("leap / memcpy, both beside the load")),
            fact("ratio_to_memcpy", "ratio, quiet memcpy", Value::ratio(ratio))
                .remark(none("leap beside the load / memcpy without load")),
            fact("leap_load_cost_ns", "load costs the leap", signed_ns(self.leap_load_cost_ns()))
                .remark(format!("more than without load{}", self.sharing())),
            fact(
                "memcpy_load_cost_ns",
                "load costs the memcpy",
                signed_ns(self.memcpy_load_cost_ns()),
            )
            .remark("more than the fastest memcpy without load"),
            fact("cpu_to_memcpy_ratio", "CPU ratio", Value::ratio(self.cpu_to_memcpy_ratio()))
                .remark("CPU time of leap and recycling / CPU time of the memcpy without load"),
            fact("cpu_ns", "", Value::ns(leap.cpu_ns)),
            fact("extra_copied_ratio", "copied again", Value::Share(leap.extra_copied_ratio))
                .remark("threads wrote to it during its copy"),
            fact("max_wait_ns", "longest wait", Value::Ns(leap.max_wait_ns))
                .remark("longest time that the library held back a thread"),
        ];
        if let Some(why) = &leap.ended_early {
            let [moved, all] = [leap.moved_bytes, self.table.bytes].map(|b| human_bytes(b as f64));
            let remark = format!("{moved} of {all} moved");
            facts.push(fact("ended_early", "ended early", why.as_str()).remark(remark));
        }
        let title = match self.writes.any() {
            true => "Under load: queries read the table, and a thread writes it",
            false => "Under load: queries read the table",
        };
        Section::new("", title, Body::Facts(facts))
    }

    /// The reason why the load costs time: threads share CPUs, if there are fewer CPUs than busy
    /// threads. Query thread, writer and copy threads are busy; the library's own waiting threads
    /// hardly run and do not count.
    fn sharing(&self) -> String {
        let busy = 1 + usize::from(self.writes.any()) + self.leap.threads;
        let cpus = self.machine.cpus;
        if cpus >= busy {
            return String::new();
        }
        let s = if cpus == 1 { "" } else { "s" };
        format!("; {busy} threads share {cpus} CPU{s}, and wait for a CPU")
    }
}

fn throughput(bytes: u64, ns: u64) -> String {
    format!("{}/s", human_bytes(bytes as f64 * 1e9 / ns.max(1) as f64))
}

/// The time of each memcpy, for the JSON output only.
pub(super) fn memcpy_samples(runs: &[Copies]) -> Section {
    let each = runs.iter().enumerate().flat_map(|(run, copies)| {
        METHODS.into_iter().zip(copies).map(move |(method, copy)| (run, method, *copy))
    });
    let rows: Vec<_> = each.collect();
    type Row = (usize, CopyMethod, pageleap_measure::memcpy::Copy);
    let columns = [
        column("run", "", "", |row: &Row| Value::count(row.0)),
        column("loop", "", "", |row: &Row| row.1.by.name().into()),
        column("step_bytes", "", "", |row: &Row| Value::count(row.1.step_bytes)),
        column("ns", "", "", |row: &Row| Value::Ns(row.2.ns)),
        column("cpu_ns", "", "", |row: &Row| Value::ns(row.2.cpu_ns)),
    ];
    Section::data("memcpy_samples", Body::Table(Table::of(&columns, &rows, |_| String::new())))
}
