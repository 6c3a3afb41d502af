//! Which rows of an experiment become which plot, and the published numbers beside them.
//!
//! Each experiment lists its [`Drawing`]s in its `About`. A published number is one that the text
//! or a table of the paper has: none is read off a picture. It was measured on another machine, so
//! it shows an order of magnitude and no winner.

/// A kind of plot. An experiment has one for each part, or one over several parts.
#[derive(Clone, Copy, Debug)]
pub struct Drawing {
    /// The question that it answers.
    pub title: &'static str,
    /// How to read it. May be empty.
    pub about: &'static str,
    /// The horizontal axis.
    pub over: Over,
    /// The vertical axis.
    pub of: Of,
    /// Labels of which each value gets a plot of its own.
    pub split: &'static [&'static str],
    /// Published numbers.
    pub theirs: &'static [Theirs],
}

/// The horizontal axis of a plot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// A label with a number of bytes. Rows without this number are levels.
    Label(&'static str),
    /// The position of a part, such as the requested rate: one plot over all parts with pages of a
    /// size. It has this name.
    Part(&'static str),
    /// The rows, one beside the other.
    Rows,
    /// Metrics of one unit, each with its name.
    Metrics(&'static [(&'static str, &'static str)]),
}

/// The vertical axis of a plot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// The metric with this key.
    Metric(&'static str),
    /// The ratio to the base.
    Ratio,
    /// The time beyond a memcpy of all bytes that were copied.
    Beyond,
}

/// The pages that a published number is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Of 4 KB.
    Small,
    /// Of 2 MB. The paper has hugetlb pages, so its numbers stand beside transparent ones, too.
    Huge,
}

impl Pages {
    /// Whether these are pages of this size.
    pub fn include(self, page: &str) -> bool {
        (page == "4k") == (self == Pages::Small)
    }
}

/// Published numbers of one kind.
#[derive(Clone, Copy, Debug)]
pub struct Theirs {
    /// The way to move the memory, in the words of the paper.
    pub name: &'static str,
    /// The figure, table or section that has them.
    pub source: &'static str,
    /// The pages that they are about.
    pub pages: Pages,
    /// The numbers.
    pub numbers: Published,
}

/// Where published numbers stand.
#[derive(Clone, Copy, Debug)]
pub enum Published {
    /// All over the horizontal axis.
    Level(f64),
    /// Places on the horizontal axis, each with its number.
    At(&'static [(f64, f64)]),
}

impl Theirs {
    /// Its name in a legend.
    pub fn words(&self) -> String {
        format!("{}, Taking the Leap, {} (their machine)", self.name, self.source)
    }
}

/// `move_pages` of 4 GB compared with a memcpy into faulted memory: 82 % more time with small
/// pages, and 46 % more with huge ones.
pub const MOVE_PAGES: [Theirs; 2] = [
    Theirs {
        name: "move_pages()",
        source: "Fig. 2",
        pages: Pages::Small,
        numbers: Published::Level(1.82),
    },
    Theirs {
        name: "move_pages()",
        source: "Fig. 2",
        pages: Pages::Huge,
        numbers: Published::Level(1.46),
    },
];

/// Times until the last page had moved, over the size of areas.
pub const TIME_OVER_AREAS: Drawing = Drawing {
    title: "Time over the size of areas",
    about: "Lower is better. A way without a size of areas of its own is a level, with its samples at \
            the right end.",
    over: Over::Label("area_bytes"),
    of: Of::Metric("time"),
    split: &[],
    theirs: &[],
};

/// Waits of the writer.
pub const WAITS: Drawing = Drawing {
    title: "Waits of the writer",
    about: "Lower is better. A wait is the time from one batch of writes to the next. Of all waits \
            of a run, half are at most p50, and 1 of 1,000 is longer than p99.9.",
    over: Over::Metrics(&[
        ("gap_p50", "p50"),
        ("gap_p99", "p99"),
        ("gap_p999", "p99.9"),
        ("gap_max", "longest"),
    ]),
    of: Of::Metric("gap_max"),
    split: &[],
    theirs: &[],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_numbers_stand_beside_pages_of_their_size() {
        let fits = |pages: Pages| ["4k", "thp", "2m"].map(|page| pages.include(page));
        assert_eq!(fits(Pages::Small), [true, false, false]);
        assert_eq!(fits(Pages::Huge), [false, true, true]);
        assert_eq!(MOVE_PAGES[0].words(), "move_pages(), Taking the Leap, Fig. 2 (their machine)");
    }
}
