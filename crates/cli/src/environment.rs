//! The machine of a measurement, and its noise, as parts of a result.

use pageleap::topology::SysFiles;
use pageleap_measure::document::{Body, Document, Section};
use pageleap_measure::host::{Host, Watch, before};

/// The machine at the start of a measurement.
pub struct Environment {
    host: Host,
    watch: Watch,
}

impl Environment {
    /// Reads the machine's files. The measurement begins now.
    pub fn start() -> Environment {
        let files = SysFiles::host();
        Environment { host: Host::read(&files), watch: Watch::start(&files) }
    }

    /// Adds the machine, the noise until now, and warnings about both to a result.
    pub fn add_to(&self, mut document: Document) -> Document {
        let noise = self.watch.so_far();
        let mut warnings = before(&self.host);
        warnings.extend(noise.warnings());
        let title = if warnings.is_empty() { "" } else { "Warnings about this machine" };
        document.sections.extend([
            self.host.section(),
            noise.section(),
            Section::new("warnings", title, Body::Notes(warnings)),
        ]);
        document
    }

    /// The same for programs only.
    pub fn add_data_to(&self, document: Document) -> Document {
        let shown = document.sections.len();
        let mut document = self.add_to(document);
        document.sections[shown..].iter_mut().for_each(|section| section.title.clear());
        document
    }
}
