//! The part of `pageleap bench page-tables` on views: what they cost, against their number.

use pageleap::NodeId;
use pageleap::topology::Topology;
use pageleap_measure::document::{Body, Column, Section, Table, Value, column};
use pageleap_measure::statistics::Summary;
use pageleap_measure::views::{Figures, MappingCall, Run, Step, part_bytes};

use super::summaries::{middle, ns, ratio, span};

/// The most views that the command makes.
pub const MOST: u8 = 16;

/// The nodes of `views` views: each node with CPUs and memory once, and then again. Empty without
/// such a node.
pub fn nodes(topology: &Topology, views: u8) -> Vec<NodeId> {
    let fits = |id| topology.is_allowed(id);
    let with_cpus: Vec<NodeId> = topology
        .nodes()
        .iter()
        .filter(|node| !node.cpus.is_empty() && node.total_bytes > 0 && fits(node.id))
        .map(|node| node.id)
        .collect();
    with_cpus.into_iter().cycle().take(views.into()).collect()
}

/// The tables of complete runs, with their notes. `size`: bytes of the region.
pub fn sections(runs: &[Run], size: u64) -> Vec<Section> {
    let steps: Vec<Row> = of_each(&Step::ALL)
        .flat_map(|(at, step)| {
            let part =
                if matches!(step, Step::Replicate | Step::Leap) { size } else { part_bytes(size) };
            let gbs = part as f64 / (1 << 30) as f64;
            let name = step.name();
            rows(runs, name, 1e6 * gbs, move |of| of.steps_ns[at])
        })
        .filter(|row| row.views > 0 || row.name != Step::Replicate.name())
        .collect();
    let calls: Vec<Row> = of_each(&MappingCall::ALL)
        .flat_map(|(at, call)| rows(runs, call.name(), 1e3, move |of| Some(of.calls_ns[at])))
        .collect();
    let by_name = |row: &Row| row.name.to_owned();
    let of_steps = Table::of(&step_columns(), &steps, by_name);
    let of_calls = Table::of(&call_columns(), &calls, by_name);
    vec![
        Section::new("views", "Views, by their number (medians)", Body::Table(of_steps)),
        Section::new(
            "mapping_calls",
            "Calls on plain mappings of one file (medians)",
            Body::Table(of_calls),
        ),
        Section::new("views_notes", "Notes on views", Body::Notes(notes(runs, size))),
    ]
}

fn of_each<T: Copy>(all: &[T]) -> impl Iterator<Item = (usize, T)> {
    all.iter().copied().enumerate()
}

/// One step or call with one number of views.
struct Row {
    name: &'static str,
    views: usize,
    /// In the unit of the table.
    time: Option<Summary>,
    /// Time / time without views.
    ratio: Option<Summary>,
    table_bytes: u64,
}

/// A row for each number of views. Times are divided by `unit_ns`.
fn rows(
    runs: &[Run],
    name: &'static str,
    unit_ns: f64,
    time_ns: impl Fn(&Figures) -> Option<u64>,
) -> Vec<Row> {
    let numbers = runs.first().map_or(0, |run| run.figures.len());
    let summary = |of: &dyn Fn(&Run) -> Option<f64>| {
        let all: Option<Vec<f64>> = runs.iter().map(of).collect();
        all.and_then(|all| Summary::of(&all))
    };
    let time = |run: &Run, at: usize| Some(time_ns(&run.figures[at])? as f64);
    let row = |at: usize| Row {
        name,
        views: runs[0].figures[at].views,
        time: summary(&|run| Some(time(run, at)? / unit_ns)),
        ratio: summary(&|run| Some(time(run, at)? / time(run, 0)?.max(1.0))),
        table_bytes: runs[0].figures[at].table_bytes,
    };
    (0..numbers).map(row).collect()
}

fn step_columns() -> Vec<Column<Row>> {
    vec![
        column("step", "", "", |row: &Row| row.name.into()),
        column("views", "views", "beside the region's own mapping", |row: &Row| {
            Value::count(row.views)
        }),
        column(
            "",
            "time",
            "ms for each GB of the region; of the part for discard, back and grow",
            |row| middle(row.time),
        ),
        column("", "min to max", "", |row: &Row| span(row.time)),
        column("", "/ none", "time / time without views in the same run", |row: &Row| {
            middle(row.ratio)
        }),
        column("", "min to max", "", |row: &Row| span(row.ratio)),
        column("page_table_bytes", "tables", "page tables of all views", |row: &Row| {
            Value::Bytes(row.table_bytes)
        }),
        column("ns_per_gb", "", "", |row: &Row| ns(row.time, 1e6, |of| of.median)),
        column("ns_per_gb_min", "", "", |row: &Row| ns(row.time, 1e6, |of| of.min)),
        column("ns_per_gb_max", "", "", |row: &Row| ns(row.time, 1e6, |of| of.max)),
        column("to_no_views_ratio", "", "", |row: &Row| ratio(row.ratio, |of| of.median)),
        column("to_no_views_ratio_min", "", "", |row: &Row| ratio(row.ratio, |of| of.min)),
        column("to_no_views_ratio_max", "", "", |row: &Row| ratio(row.ratio, |of| of.max)),
    ]
}

fn call_columns() -> Vec<Column<Row>> {
    vec![
        column("call", "", "", |row: &Row| row.name.into()),
        column("mappings", "mappings", "of the same file, all of them changed", |row: &Row| {
            Value::count(1 + row.views)
        }),
        column("", "time", "us for all mappings; mprotect and mremap: two calls for each", |row| {
            middle(row.time)
        }),
        column("", "min to max", "", |row: &Row| span(row.time)),
        column("", "/ one", "time / time of one mapping in the same run", |row: &Row| {
            middle(row.ratio)
        }),
        column("", "min to max", "", |row: &Row| span(row.ratio)),
        column("ns", "", "", |row: &Row| ns(row.time, 1e3, |of| of.median)),
        column("ns_min", "", "", |row: &Row| ns(row.time, 1e3, |of| of.min)),
        column("ns_max", "", "", |row: &Row| ns(row.time, 1e3, |of| of.max)),
        column("to_one_mapping_ratio", "", "", |row: &Row| ratio(row.ratio, |of| of.median)),
        column("to_one_mapping_ratio_min", "", "", |row: &Row| ratio(row.ratio, |of| of.min)),
        column("to_one_mapping_ratio_max", "", "", |row: &Row| ratio(row.ratio, |of| of.max)),
    ]
}

fn notes(runs: &[Run], size: u64) -> Vec<String> {
    let mb = part_bytes(size) as f64 / f64::from(1 << 20);
    let mut notes = vec![
        format!(
            "discard, back and grow: {mb} MB. discard also maps the frames for the pool again, and back and grow \
             zero them. mmap (populated), mprotect (read-only and back), mremap (to other addresses, \
             twice) and munmap: a file of {mb} MB, outside of any region."
        ),
        "Views are mappings of one process, so each change is repeated for each of them: its cost grows \
         with their number. Mitosis changes all replicas of page tables inside one call of a changed \
         kernel. Phoenix (Siavashi et al.) reports for Mitosis on 2 sockets, in us for each call, Linux -> \
         Mitosis: mremap 53 -> 61, mprotect 21 -> 23, mmap 25 -> 28, munmap 30 -> 30 (Table 2), a ratio of \
         1.15, 1.10, 1.12 and 1.00; and an overhead of 3.2 % to 7.8 % on 4 sockets (Fig. 4). Its times \
         cannot be compared with these, since the machine and the size of its calls differ."
            .to_owned(),
    ];
    if let Some(reason) = runs.iter().find_map(|run| run.refused.as_ref()) {
        notes.push(format!("leap: not measured: {reason}"));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(scale: u64) -> Run {
        let figures = [0, 1, 2].map(|views: u64| {
            let ns = scale * (1 + views);
            let replicate = (views > 0).then_some(ns);
            Figures {
                views: views as usize,
                steps_ns: [replicate, None, Some(ns), Some(ns), Some(ns)],
                calls_ns: [ns; 4],
                table_bytes: views * 4096,
            }
        });
        Run { figures: figures.into(), refused: Some("no userfaultfd".to_owned()), lost: 0 }
    }

    #[test]
    fn ratios_are_of_the_same_run_and_unknown_where_a_run_lacks_a_time() {
        let runs = [run(10), run(1000), run(100)];
        let discard = rows(&runs, "discard", 1.0, |of| of.steps_ns[2]);
        let medians: Vec<_> = discard.iter().map(|row| row.time.unwrap().median).collect();
        assert_eq!(medians, [100.0, 200.0, 300.0]);
        let ratio = discard[2].ratio.unwrap();
        assert_eq!((ratio.min, ratio.median, ratio.max), (3.0, 3.0, 3.0));
        assert!(rows(&runs, "leap", 1.0, |of| of.steps_ns[1]).iter().all(|row| row.time.is_none()));
    }

    #[test]
    fn a_leap_that_was_refused_is_named_with_its_reason() {
        let sections = sections(&[run(10)], 4 << 20);
        let Body::Table(steps) = &sections[0].body else { panic!("no table") };
        let groups = ["replicate", "leap", "discard", "back", "grow"]
            .map(|name| steps.groups.iter().filter(|group| *group == name).count());
        assert_eq!(groups, [2, 3, 3, 3, 3]);
        let Body::Notes(notes) = &sections[2].body else { panic!("no notes") };
        assert!(notes.iter().any(|note| note == "leap: not measured: no userfaultfd"), "{notes:?}");
        assert!(notes[0].contains("grow: 1 MB"), "{notes:?}");
    }
}
