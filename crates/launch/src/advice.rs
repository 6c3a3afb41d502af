//! Advises settings for a program on this machine: the rules of a paper as a decision tree.
//!
//! The paper is Memarzia, Ray and Bhavsar, "The Art of Efficient In-memory Query Processing on NUMA
//! Systems: a Systematic Approach" (2019). It measures automatic balancing, huge pages, memory
//! policies, thread placement and allocators on three machines with four or eight nodes, and sums up
//! in section 4.6. [`advise`] walks its conditions with the [`Facts`] of a machine and the
//! [`Workload`] of a program. A fact or a trait that is not known leaves its condition in words
//! ([`Advice::condition`]).
//!
//! Nothing is measured or changed here. Each figure is in the paper or in `docs/figures.md`.

mod facts;
mod rules;
#[cfg(test)]
mod tests;

pub use facts::{Balancing, Facts, HugePageSetting, Speed};

/// The paper whose sections the advice names.
pub const PAPER: &str = "Memarzia, Ray, Bhavsar: The Art of Efficient In-memory Query Processing on \
                         NUMA Systems: a Systematic Approach, 2019";

/// The setting that a piece of advice is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topic {
    /// Automatic NUMA balancing by the kernel.
    Balancing,
    /// Transparent huge pages.
    HugePages,
    /// The nodes from which memory comes.
    Policy,
    /// The CPUs to which threads come.
    Placement,
    /// The allocator in the place of the C library's `malloc`.
    Allocator,
}

impl Topic {
    /// Its name, as in options and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Topic::Balancing => "balancing",
            Topic::HugePages => "huge-pages",
            Topic::Policy => "policy",
            Topic::Placement => "placement",
            Topic::Allocator => "allocator",
        }
    }
}

/// The answer of a piece of advice: whether the setting should be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// To set something.
    Do,
    /// To leave a setting alone that others recommend.
    DoNot,
    /// Nothing has to be set: it is as it should be.
    AsYouAre,
    /// The setting has no effect on this machine or for this program.
    MeansNothingHere,
}

impl Verdict {
    /// Its name in words.
    pub fn text(self) -> &'static str {
        match self {
            Verdict::Do => "do",
            Verdict::DoNot => "do not",
            Verdict::AsYouAre => "as you are",
            Verdict::MeansNothingHere => "means nothing here",
        }
    }
}

/// One piece of advice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// The setting that it is about.
    pub topic: Topic,
    /// Whether the setting should be made.
    pub verdict: Verdict,
    /// The advice in a few words.
    pub summary: String,
    /// When it holds, if a fact or a trait that decides is not known.
    pub condition: Option<String>,
    /// The line to type. Words in capitals are to be filled in.
    pub line: Option<String>,
    /// The options of `pageleap run` that do it; empty if none does.
    pub options: Vec<String>,
    /// The reason, with figures.
    pub why: String,
    /// Sections of the paper, and documents of this project.
    pub source: &'static str,
    /// Its price, and the programs that it affects.
    pub costs: Option<String>,
    /// Where measurements of this project, or newer kernels and libraries, differ from the paper.
    pub differs: Option<String>,
}

impl Advice {
    fn new(topic: Topic, verdict: Verdict, summary: impl Into<String>) -> Advice {
        Advice {
            topic,
            verdict,
            summary: summary.into(),
            condition: None,
            line: None,
            options: Vec::new(),
            why: String::new(),
            source: "",
            costs: None,
            differs: None,
        }
    }

    /// Advice to start the program with these options of `pageleap run`.
    fn options(mut self, options: &[&str]) -> Advice {
        self.options = options.iter().map(|option| (*option).to_owned()).collect();
        self.line = Some(run_line(&self.options));
        self
    }

    fn because(mut self, source: &'static str, why: impl Into<String>) -> Advice {
        (self.source, self.why) = (source, why.into());
        self
    }

    fn costs(mut self, costs: impl Into<String>) -> Advice {
        self.costs = Some(costs.into());
        self
    }

    fn differs(mut self, differs: impl Into<String>) -> Advice {
        self.differs = Some(differs.into());
        self
    }

    fn given(mut self, condition: Option<impl Into<String>>) -> Advice {
        self.condition = condition.map(Into::into);
        self
    }
}

/// How a program goes through its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Such as hash tables and indexes.
    Random,
    /// Such as scans of columns.
    Sequential,
}

/// Traits of a program, as its user knows them. A trait that is not known is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workload {
    /// Threads that work at the same time.
    pub threads: Option<usize>,
    /// Whether several threads often allocate memory at the same time: the question of section 4.6.
    pub allocates_often: Option<bool>,
    /// Whether threads use memory that others have written first, such as a common hash table.
    pub shares_data: Option<bool>,
    /// How it goes through its memory.
    pub pattern: Option<Pattern>,
}

impl Workload {
    /// Whether memory of all nodes is used by threads of all nodes. One thread shares with nobody.
    fn shares(&self) -> Option<bool> {
        if self.threads == Some(1) { Some(false) } else { self.shares_data }
    }

    /// Whether threads allocate at the same time. One thread does not.
    fn allocates(&self) -> Option<bool> {
        if self.threads == Some(1) { Some(false) } else { self.allocates_often }
    }
}

/// Advises settings for such a program on such a machine: one piece of advice for each topic.
pub fn advise(facts: &Facts, workload: &Workload) -> Vec<Advice> {
    vec![
        rules::balancing(facts),
        rules::huge_pages(facts, workload),
        rules::policy(facts, workload),
        rules::placement(facts, workload),
        rules::allocator(facts, workload),
    ]
}

/// All advice in one command; `None` if there is nothing to set.
pub fn combined(advice: &[Advice]) -> Option<String> {
    let options: Vec<String> = advice.iter().flat_map(|one| one.options.iter().cloned()).collect();
    (!options.is_empty()).then(|| run_line(&options))
}

fn run_line(options: &[String]) -> String {
    format!("pageleap run {} COMMAND", options.join(" "))
}
