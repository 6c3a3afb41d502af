//! Messages of `pageleap run` itself, apart from the program's output.

use std::cell::RefCell;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use crate::output;
use crate::stop::Refusal;

/// Where messages go: to standard error, or to the file of `--report-file`, which is closed when the
/// program starts.
pub struct Words(Option<RefCell<File>>);

impl Words {
    /// Opens the file, which is emptied.
    pub fn open(file: Option<&Path>) -> Result<Words, Refusal> {
        let Some(path) = file else { return Ok(Words(None)) };
        match File::create(path) {
            Ok(file) => Ok(Words(Some(RefCell::new(file)))),
            Err(error) => Err(Refusal::new(format!("--report-file {}: {error}", path.display()))),
        }
    }

    /// Says one line. If nobody can read it, nothing happens, because the program counts more.
    pub fn say(&self, line: &str) {
        let line = format!("pageleap run: {line}");
        match &self.0 {
            None => output::note(&line),
            Some(file) => drop(writeln!(file.borrow_mut(), "{line}")),
        }
    }
}
