//! The progress of a load and of a job beside it, every few milliseconds.
//!
//! A thread of its own looks at two counters, which others keep anyway. It wakes up 200 times a
//! second, in runs with and without a report alike, so that these are measured in the same way.

use std::time::{Duration, Instant};

use crate::document::{Body, Section, Table, Value, column};
use crate::load::Beside;
use crate::phase::Phase;
use crate::plot::{Axis, Line, Plot, Point, Shape, Span, Unit};

/// The time between two looks.
pub const EVERY: Duration = Duration::from_millis(5);

/// A look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The time since the first look.
    pub at_ns: u64,
    /// The phase of the run.
    pub phase: Phase,
    /// Writes until now.
    pub writes: u64,
    /// Bytes that a job has moved until now.
    pub moved_bytes: u64,
}

/// Looks until the threads of the load are told to end.
pub fn record(beside: &Beside) -> Vec<Moment> {
    let start = Instant::now();
    let mut moments = Vec::new();
    loop {
        let has_stopped = beside.stage.stopped();
        moments.push(Moment {
            at_ns: start.elapsed().as_nanos() as u64,
            phase: beside.stage.phase(),
            writes: beside.completed(),
            moved_bytes: beside.moved_bytes(),
        });
        if has_stopped {
            return moments;
        }
        std::thread::sleep(EVERY);
    }
}

fn name(phase: Phase) -> &'static str {
    match phase {
        Phase::Before => "before",
        Phase::Memcpy => "memcpy",
        Phase::During => "leap",
        Phase::After => "after",
    }
}

/// All looks, for programs.
pub fn section(moments: &[Moment]) -> Section {
    let columns = [
        column("at_ns", "", "", |of: &Moment| Value::Ns(of.at_ns)),
        column("phase", "", "", |of: &Moment| name(of.phase).into()),
        column("writes", "", "", |of: &Moment| Value::Count(of.writes)),
        column("moved_bytes", "", "", |of: &Moment| Value::Bytes(of.moved_bytes)),
    ];
    Section::data("timeline", Body::Table(Table::of(&columns, moments, |_| String::new())))
}

/// Two plots: the writer's rate from look to look, and the share of `bytes` that has moved. The
/// rate is left out if nothing was written.
pub fn plots(moments: &[Moment], bytes: u64) -> Vec<Plot> {
    let rate = |pair: &[Moment]| {
        let seconds = (pair[1].at_ns - pair[0].at_ns) as f64 / 1e9;
        let rate = (pair[1].writes - pair[0].writes) as f64 / seconds;
        (pair[1].at_ns, rate)
    };
    let rates: Vec<(u64, f64)> =
        moments.windows(2).filter(|pair| pair[1].at_ns > pair[0].at_ns).map(rate).collect();
    let moved = moments.iter().map(|of| (of.at_ns, of.moved_bytes as f64 / bytes as f64));
    let moved: Vec<(u64, f64)> = moved.collect();
    let has_writer = rates.iter().any(|(_, rate)| *rate > 0.0);
    let rate = has_writer.then(|| {
        let about = "Higher is better. Each step is the time from one look to the next, some 5 ms.";
        plot("Writes per second, before, beside and after the leap", about, Unit::PerSecond, rates)
    });
    let about = "The part of the table whose pages the job has moved to their destination.";
    let share = plot("Placement: pages that have moved", about, Unit::Share, moved);
    let spans = spans(moments);
    let all = rate.into_iter().chain([share]);
    all.map(|plot| Plot { spans: spans.clone(), ..plot }).collect()
}

fn plot(title: &str, about: &str, unit: Unit, numbers: Vec<(u64, f64)>) -> Plot {
    let label = if unit == Unit::Share { "moved" } else { "writes" };
    let point = |(at, y): (u64, f64)| Point { x: Some(at as f64), y, ..Point::default() };
    let points: Vec<Point> = numbers.into_iter().map(point).collect();
    // A rate that falls to zero is the message: equal distances are equal differences.
    let y = Axis { is_log: false, ..Axis::of(label, unit, std::iter::empty()) };
    let x = Axis::of("time since the load began", Unit::Ns, std::iter::empty());
    let (name, shape) = match unit {
        Unit::PerSecond => (label.to_owned(), Shape::Steps),
        _ => (label.to_owned(), Shape::Curve),
    };
    let line = Line { name, shape, is_theirs: false, is_shown: true, points };
    let (title, about) = (title.to_owned(), about.to_owned());
    Plot { title, about, x, y, lines: vec![line], spans: Vec::new() }
}

/// The stretches beside a memcpy and beside the leap.
fn spans(moments: &[Moment]) -> Vec<Span> {
    let mut spans: Vec<(Phase, Span)> = Vec::new();
    let mut last = None;
    for of in moments {
        let at = of.at_ns as f64;
        if let Some((_, span)) = spans.last_mut().filter(|(phase, _)| Some(*phase) == last) {
            span.range[1] = at;
        }
        if Some(of.phase) != last && matches!(of.phase, Phase::Memcpy | Phase::During) {
            spans.push((of.phase, Span { range: [at; 2], name: name(of.phase).to_owned() }));
        }
        last = Some(of.phase);
    }
    spans.into_iter().map(|(_, span)| span).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(at_ms: u64, phase: Phase, writes: u64, moved_bytes: u64) -> Moment {
        Moment { at_ns: at_ms * 1_000_000, phase, writes, moved_bytes }
    }

    #[test]
    fn rates_are_those_between_looks_and_spans_those_of_phases() {
        let moments = [
            moment(0, Phase::Before, 0, 0),
            moment(10, Phase::Memcpy, 100, 0),
            moment(20, Phase::During, 300, 0),
            moment(25, Phase::During, 300, 50),
            moment(30, Phase::After, 400, 100),
            moment(40, Phase::After, 500, 100),
        ];
        let plots = plots(&moments, 100);
        let points = |plot: usize| -> Vec<(f64, f64)> {
            let points = plots[plot].lines[0].points.iter();
            points.map(|of| (of.x.unwrap() / 1e6, of.y)).collect()
        };
        let rates = [(10.0, 1e4), (20.0, 2e4), (25.0, 0.0), (30.0, 2e4), (40.0, 1e4)];
        assert_eq!(points(0), rates);
        assert_eq!(points(1)[2..5], [(20.0, 0.0), (25.0, 0.5), (30.0, 1.0)]);
        let spans: Vec<(&str, [f64; 2])> =
            plots[0].spans.iter().map(|span| (&*span.name, span.range)).collect();
        assert_eq!(spans, [("memcpy", [10e6, 20e6]), ("leap", [20e6, 30e6])]);
        assert_eq!(self::plots(&[moments[0]; 2], 100).len(), 1);
    }

    #[test]
    fn looks_end_with_the_load() {
        let beside = Beside::new();
        beside.note_moved(7);
        let moments = std::thread::scope(|scope| {
            let looks = scope.spawn(|| record(&beside));
            std::thread::sleep(3 * EVERY);
            beside.stage.stop();
            looks.join().unwrap()
        });
        // The thread may get its first CPU after the end.
        assert!(!moments.is_empty() && moments.iter().all(|of| of.moved_bytes == 7));
        assert!(moments.is_sorted_by_key(|of| of.at_ns));
        assert!(beside.is_recorded());
    }
}
