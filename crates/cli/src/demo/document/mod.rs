//! Turns the demo's summary into a document of sections: the table and where its pages are, the
//! times of leaps and memcpys ([`leaps`]), and the effect on queries and writer ([`load`]).

mod leaps;
mod load;

use pageleap_measure::document::{Body, Document, Fact, Section, Value, fact};
use pageleap_measure::figures::{grouped, human_bytes, human_ns, percent, three_digits};
use pageleap_measure::timeline;

use pageleap_measure::load::Rate;
use pageleap_measure::phase::Phase;

use super::args::Memory;
use super::home::NodePages;
use super::summary::{Summary, Table};
use leaps::memcpy_samples;

impl Summary {
    /// All sections.
    pub fn document(&self) -> Document {
        let mut sections = vec![
            self.table_section(),
            self.move_section(),
            self.quiet_section(),
            self.quiet_data(),
            self.under_load(),
            self.query_table(),
            self.query_data(),
            self.writer(),
            self.gaps(),
            Section::new("pages", "Pages", Body::Facts(self.page_counts())),
            self.placement(),
            self.mappings(),
            memcpy_samples(&self.memcpy.runs),
            timeline::section(&self.timeline),
            Section::data("", Body::Plots(timeline::plots(&self.timeline, self.table.bytes))),
            Section::data("summary", Body::Notes(self.in_short())),
        ];
        let title = if self.warnings.is_empty() { "" } else { "Warnings" };
        sections.push(Section::new("notes", title, Body::Notes(self.warnings.clone())));
        sections.push(Section::new("", "Verdict", Body::Notes(self.verdict())));
        Document { sections }
    }

    /// The main results in sentences, the losses included.
    fn in_short(&self) -> Vec<String> {
        let mut all = Vec::new();
        if self.leap.from == self.leap.to {
            all.push(
                "One memory node takes part: the table leaps to new frames of the same node, so no \
                 time here is a NUMA speed-up."
                    .to_owned(),
            );
        }
        let time = human_ns(self.leap.migrate_ns);
        let beside = match self.ratio_under_load() {
            Some(ratio) => format!(
                "Beside the load one leap of {} took {time}, {} times as long as one memcpy beside \
                 the same load.",
                human_bytes(self.table.bytes as f64),
                three_digits(ratio)
            ),
            None => format!("The leap beside the load took {time}, and is not compared."),
        };
        all.push(format!(
            "{beside} Without load it took {} times as long as the fastest memcpy.",
            three_digits(self.quiet_ratio())
        ));
        if let (Some(share), Some(longest)) =
            (self.writes.achieved_ratio, self.writes.gaps[Phase::During as usize])
        {
            let of = match self.writes.requested {
                Rate::PerSecond(_) => "requested rate",
                Rate::Max => "rate before the leap",
            };
            all.push(format!(
                "During the leap the writer reached {} of the {of}; its longest wait was {}. Lost \
                 writes: {}.",
                percent(share),
                human_ns(longest.max_ns),
                self.writes.lost
            ));
        }
        all
    }

    fn table_section(&self) -> Section {
        let table = &self.table;
        let pages = format!(
            "{} pages of {}",
            grouped(table.bytes / table.page_size),
            human_bytes(table.page_size as f64)
        );
        let title = format!("Table: TPC-H lineitem, scale factor {}", table.scale_factor);
        let facts = vec![
            fact("title", "", "A leap of a TPC-H table that is queried and written"),
            fact("rows", "rows", Value::Count(table.rows)).remark("16 columns"),
            fact("bytes", "size", Value::Bytes(table.bytes)).remark(pages),
            fact("memory", "memory", table.memory.name()).remark(match table.memory {
                Memory::Pool => "a region of a pool",
                Memory::Malloc => "a block of the allocator, which moves in place",
            }),
            fact("page_size", "", Value::Bytes(table.page_size)),
            fact("counted_page_size", "", Value::Bytes(table.counted_page_size)),
            fact("kernel", "Linux", self.machine.kernel.as_str()),
            fact("cpus", "CPUs", Value::count(self.machine.cpus)),
            fact("nodes", "nodes with memory", Value::count(self.machine.nodes)),
        ];
        Section::new("", title, Body::Facts(facts))
    }

    fn page_counts(&self) -> Vec<Fact> {
        let counts = self.pages.counts;
        let Table { page_size, counted_page_size: counted, .. } = self.table;
        let unit = match counted == page_size {
            true => String::new(),
            false => format!("counted in pages of {}", human_bytes(counted as f64)),
        };
        vec![
            fact("migrated", "migrated", Value::Count(counts.migrated)).remark(unit),
            fact("unchanged", "unchanged", Value::Count(counts.unchanged)),
            fact("busy", "busy", Value::Count(counts.busy)),
            fact("failed", "failed", Value::Count(counts.failed)),
            fact("not_attempted", "not attempted", Value::Count(counts.not_attempted)),
        ]
    }

    fn placement(&self) -> Section {
        let facts = vec![
            fact("before", "before", by_node(&self.pages.before)),
            fact("after", "after", by_node(&self.pages.after)),
        ];
        Section::new("placement", "Pages by node, as the kernel reports them", Body::Facts(facts))
    }

    fn mappings(&self) -> Section {
        let pages = &self.pages;
        let [before, peak, after] = pages.mappings;
        let numbers = [("before", before), ("peak", peak), ("after", after)];
        let numbers = numbers.map(|(name, number)| (name.to_owned(), Value::count(number)));
        let of = match self.table.memory {
            Memory::Pool => "of region and pools",
            Memory::Malloc => "of the process, with stacks of threads",
        };
        let frames =
            fact("frames_changed_ratio", "new frames", Value::share(pages.frames_changed_ratio));
        let facts = vec![
            fact("kernel_page_size", "kernel's page size", Value::Bytes(pages.kernel_page_size)),
            fact("huge_mapped_ratio", "by huge pages", Value::Share(pages.huge_mapped_ratio)),
            fact("mappings", "mappings", Value::Map(numbers.into())).remark(of),
            match frames.value {
                Value::Unknown => frames.remark(
                    "frames not checked: the kernel hides frame numbers from processes without \
                     CAP_SYS_ADMIN",
                ),
                _ => frames.remark("pages in another frame (/proc/self/pagemap)"),
            },
        ];
        Section::new("", "Mapping", Body::Facts(facts))
    }

    fn verdict(&self) -> Vec<String> {
        if !self.mismatches.is_empty() {
            return vec!["FAILED: see the messages on standard error".to_owned()];
        }
        let frames = match self.pages.frames_changed_ratio {
            Some(_) => "every migrated page has a new frame",
            None => "frames not checked",
        };
        let writes = match self.writes.any() {
            true => "every write present (shadow copy)",
            false => "no writes to check",
        };
        let mut verdict = vec![format!(
            "verified: query results equal; {writes}; other columns unchanged; {frames}"
        )];
        if let Some((true, revenue)) = self.published {
            verdict.push(format!(
                "Q6's revenue {revenue} and the counts of Q1 are as the TPC publishes them for \
                 this scale"
            ));
        }
        verdict
    }
}

fn by_node(pages: &NodePages) -> Value {
    let nodes = pages.iter().map(|(node, pages)| (node.to_string(), Value::Count(*pages)));
    Value::Map(nodes.collect())
}

fn signed_ns(ns: Option<i64>) -> Value {
    ns.map_or(Value::Unknown, Value::SignedNs)
}

#[cfg(test)]
mod tests;
