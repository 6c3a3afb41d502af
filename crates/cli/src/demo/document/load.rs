//! The effect of the leap on queries and writer: latencies, rates and gaps.

use pageleap_measure::document::{Body, Section, Table, Value, column, fact};
use pageleap_measure::load::Rate;
use pageleap_measure::phase::{Phase, Spread};

use super::super::summary::{Query, Summary};
use super::signed_ns;

impl Summary {
    pub(super) fn query_table(&self) -> Section {
        let rows = [("Q1", &self.q1), ("Q6", &self.q6)];
        let columns = [
            column("", "query", "", |(name, _): &(&str, &Query)| (*name).into()),
            column("", "before", "", |(_, query): &(&str, &Query)| {
                Value::ns(query.median_ns[Phase::Before as usize])
            }),
            column("", "memcpy", "", |(_, query): &(&str, &Query)| {
                Value::ns(query.median_ns[Phase::Memcpy as usize])
            }),
            column("", "leap", "", |(_, query): &(&str, &Query)| {
                Value::ns(query.median_ns[Phase::During as usize])
            }),
            column("", "after", "", |(_, query): &(&str, &Query)| {
                Value::ns(query.median_ns[Phase::After as usize])
            }),
            column("", "runs", "", |(_, query): &(&str, &Query)| {
                Value::List(query.runs.iter().map(|runs| Value::Count(*runs)).collect())
            }),
            column("", "results", "", |(_, query): &(&str, &Query)| {
                if query.equal { "all equal" } else { "DIFFER" }.into()
            }),
        ];
        let table = Table::of(&columns, &rows, |_| String::new());
        Section::new(
            "",
            "Queries: median latency before, beside a memcpy, during the leap, and after it",
            Body::Table(table),
        )
    }

    pub(super) fn query_data(&self) -> Section {
        let facts = vec![fact("q1", "", query_map(&self.q1)), fact("q6", "", query_map(&self.q6))];
        Section::data("queries", Body::Facts(facts))
    }

    pub(super) fn writer(&self) -> Section {
        let writes = &self.writes;
        let asked = match writes.requested {
            Rate::PerSecond(0) => "no writer (--writes-per-s 0)",
            Rate::PerSecond(_) => "writes per second",
            Rate::Max => "as many writes as possible",
        };
        let requested = match writes.requested {
            Rate::PerSecond(rate) => Value::Count(rate),
            Rate::Max => Value::Unknown,
        };
        let compared = match writes.requested {
            Rate::PerSecond(_) => "of what was asked for",
            Rate::Max => "of the rate before the leap",
        };
        let [before, memcpy, during] =
            [Phase::Before, Phase::Memcpy, Phase::During].map(|phase| writes.gaps[phase as usize]);
        let mut facts = vec![
            fact("requested_per_s", "asked for", requested).remark(asked),
            fact("before_per_s", "before the leap", Value::PerSecond(writes.before_per_s)),
            fact("during_per_s", "during the leap", Value::PerSecond(writes.during_per_s)),
            fact("achieved_ratio", "reached", Value::share(writes.achieved_ratio)).remark(compared),
            fact("count", "writes", Value::Count(writes.count)),
            fact("landed_during", "of them in the leap", Value::Count(writes.landed_during)),
            fact("lost", "lost", Value::Count(writes.lost)),
            fact("max_gap_before_ns", "", spread_ns(before, |gaps| gaps.max_ns)),
            fact("max_gap_memcpy_ns", "", spread_ns(memcpy, |gaps| gaps.max_ns)),
            fact("max_gap_ns", "", spread_ns(during, |gaps| gaps.max_ns)),
            fact("p50_gap_ns", "", spread_ns(during, |gaps| gaps.p50_ns)),
            fact("p99_gap_ns", "", spread_ns(during, |gaps| gaps.p99_ns)),
            fact("p999_gap_ns", "", spread_ns(during, |gaps| gaps.p999_ns)),
            fact("memcpy_p50_gap_ns", "", spread_ns(memcpy, |gaps| gaps.p50_ns)),
            fact("memcpy_p99_gap_ns", "", spread_ns(memcpy, |gaps| gaps.p99_ns)),
            fact("memcpy_p999_gap_ns", "", spread_ns(memcpy, |gaps| gaps.p999_ns)),
            fact(
                "gap_beyond_memcpy_ns",
                "gap beyond the memcpy",
                signed_ns(writes.gap_beyond_memcpy_ns),
            )
            .remark("longest gap during the leap, less the longest beside the memcpy"),
        ];
        if !writes.any() {
            facts.iter_mut().skip(1).for_each(|fact| fact.label = "");
        }
        Section::new("writes", "Writer", Body::Facts(facts))
    }

    /// The writer's gaps, for people.
    pub(super) fn gaps(&self) -> Section {
        let phases = [
            ("before", Phase::Before),
            ("beside the memcpy", Phase::Memcpy),
            ("during the leap", Phase::During),
            ("after", Phase::After),
        ];
        let rows = phases.map(|(name, phase)| (name, self.writes.gaps[phase as usize]));
        type Row = (&'static str, Option<Spread>);
        let columns = [
            column("", "gaps", "", |row: &Row| row.0.into()),
            column("", "p50", "", |row: &Row| spread_ns(row.1, |gaps| gaps.p50_ns)),
            column("", "p99", "", |row: &Row| spread_ns(row.1, |gaps| gaps.p99_ns)),
            column("", "p99.9", "", |row: &Row| spread_ns(row.1, |gaps| gaps.p999_ns)),
            column("", "longest", "", |row: &Row| spread_ns(row.1, |gaps| gaps.max_ns)),
        ];
        let title = match self.writes.any() {
            true => "Writer's gaps: from one batch of writes to the next, its own pauses included",
            false => "",
        };
        Section::new("", title, Body::Table(Table::of(&columns, &rows, |_| String::new())))
    }
}

fn spread_ns(gaps: Option<Spread>, figure: fn(&Spread) -> u64) -> Value {
    Value::ns(gaps.as_ref().map(figure))
}

fn query_map(query: &Query) -> Value {
    let entry = |name: &str, value| (name.to_owned(), value);
    let counts = |phase: Phase| {
        let pairs = query.counts[phase as usize].iter();
        Value::List(pairs.map(|(ns, times)| pair(Value::Ns(*ns), Value::Count(*times))).collect())
    };
    Value::Map(vec![
        entry("before_ns", Value::ns(query.median_ns[Phase::Before as usize])),
        entry("memcpy_ns", Value::ns(query.median_ns[Phase::Memcpy as usize])),
        entry("during_ns", Value::ns(query.median_ns[Phase::During as usize])),
        entry("after_ns", Value::ns(query.median_ns[Phase::After as usize])),
        entry("equal", Value::Flag(query.equal)),
        entry("before_ns_counts", counts(Phase::Before)),
        entry("memcpy_ns_counts", counts(Phase::Memcpy)),
        entry("during_ns_counts", counts(Phase::During)),
        entry("after_ns_counts", counts(Phase::After)),
    ])
}

fn pair(one: Value, other: Value) -> Value {
    Value::List(vec![one, other])
}
