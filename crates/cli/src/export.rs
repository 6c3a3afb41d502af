//! Results in files, besides standard output: `--export-json FILE` and its like.
//!
//! All files are checked before the work begins, so that a run of minutes does not end in
//! `permission denied`. Each file gets the result after standard output. A run that prints no
//! result leaves its files as they were.
//!
//! A regular file is replaced: the result is written to a new file in the same folder, which is
//! then renamed (`rename(2)`). So the old contents stay if anything fails on the way, such as a
//! full disk. Two kinds of files cannot be replaced:
//!
//! * Pipes, devices and terminals are opened beforehand, and written to.
//! * Some regular files have to keep their inode: the folder takes no new file, the folder is
//!   sticky and the file belongs to another user, or the file is a mount point (a container often
//!   has a single file of the host). They are emptied and written to.

use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, ValueHint};
use pageleap_measure::document::Document;
use pageleap_measure::export::{DocumentFormat, Format};

use crate::output;
use crate::stop::{Refusal, Stop};

/// Files that get the result too. Each format has a flag.
#[derive(Args, Clone, Debug)]
pub struct Exports {
    /// Write the object of --json to this file as well, whatever is printed; may be repeated. The
    /// file is checked before the work begins, and replaced when the result has been printed
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, value_parser = file())]
    pub export_json: Vec<PathBuf>,

    /// Write the text of a run without --json to this file as well; may be repeated
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, value_parser = file())]
    pub export_text: Vec<PathBuf>,
}

/// Parses the name of a file. `-` is refused, because standard output has one result already.
fn file() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| match path.as_os_str().as_bytes() {
        b"-" => {
            Err("standard output has the result anyway, with --json as JSON; ./- is a file of \
                     this name")
        }
        _ => Ok(path),
    })
}

/// A page that gets the result too, of commands whose result is a document.
#[derive(Args, Clone, Debug)]
pub struct Reports {
    /// Draw the result in this file: one page of HTML with plots, tables and all samples, which
    /// opens without a network; may be repeated
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, value_parser = file())]
    pub report: Vec<PathBuf>,
}

/// Files with the samples of an experiment.
#[derive(Args, Clone, Debug)]
pub struct SampleExports {
    #[command(flatten)]
    pub exports: Exports,

    /// Write all raw samples to this file as CSV, one in a line; may be repeated
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, value_parser = file())]
    pub export_csv: Vec<PathBuf>,

    #[command(flatten)]
    pub reports: Reports,
}

impl SampleExports {
    /// As [`Exports::open`].
    pub fn open(&self) -> Result<OpenedDocument, Refusal> {
        let csv = ("--export-csv", DocumentFormat::Csv, &*self.export_csv);
        self.exports.open_with(&[csv, self.reports.row()])
    }
}

impl Reports {
    /// Flag, format and files.
    pub fn row(&self) -> (&'static str, DocumentFormat, &[PathBuf]) {
        ("--report", DocumentFormat::Html, &self.report)
    }
}

impl Exports {
    /// Finds out whether each file can be written, without changing any.
    ///
    /// A named pipe is opened, which waits for its reader. So this comes before signals are caught.
    pub fn open(&self) -> Result<Opened, Refusal> {
        let mut taken = Vec::new();
        self.open_among(&mut taken)
    }

    fn open_among(&self, taken: &mut Vec<PathBuf>) -> Result<Opened, Refusal> {
        let mut exports = open_all("--export-json", Format::Json, &self.export_json, taken)?;
        exports.extend(open_all("--export-text", Format::WIDE, &self.export_text, taken)?);
        Ok(Opened(exports))
    }

    /// The same, with files in formats of documents: each flag with its format and its files.
    pub fn open_with(
        &self,
        more: &[(&'static str, DocumentFormat, &[PathBuf])],
    ) -> Result<OpenedDocument, Refusal> {
        let mut taken = Vec::new();
        let any = self.open_among(&mut taken)?;
        let mut documents = Vec::new();
        for (flag, format, paths) in more {
            documents.extend(open_all(flag, *format, paths, &mut taken)?);
        }
        Ok(OpenedDocument { any, documents })
    }

    /// Whether some file gets text.
    pub fn has_text(&self) -> bool {
        !self.export_text.is_empty()
    }
}

/// Opens the files of a flag. `taken` has the files that get another result.
fn open_all<F: Copy>(
    flag: &str,
    format: F,
    paths: &[PathBuf],
    taken: &mut Vec<PathBuf>,
) -> Result<Vec<Export<F>>, Refusal> {
    let open = |path: &PathBuf| {
        let name = format!("{flag} {}", path.display());
        let refused = |why: String| Refusal::new(format!("{name}: {why}"));
        let target = Target::at(path).map_err(refused)?;
        if let Target::Replaced { path, .. } = &target {
            if taken.contains(path) {
                let why = "another result goes to the same file; name another one";
                return Err(refused(why.to_owned()));
            }
            taken.push(path.clone());
        }
        Ok(Export { name, format, target })
    };
    paths.iter().map(open).collect()
}

/// Files that can be written.
pub struct Opened(Vec<Export<Format>>);

/// Files that can be written, for a result that is a document.
pub struct OpenedDocument {
    any: Opened,
    documents: Vec<Export<DocumentFormat>>,
}

struct Export<F> {
    /// Flag and file, for errors.
    name: String,
    format: F,
    target: Target,
}

impl<F> Export<F> {
    fn write(&self, text: &str) -> anyhow::Result<()> {
        let written = self.target.write(text.as_bytes());
        written.with_context(|| format!("{}: the result was not written", self.name))
    }
}

impl OpenedDocument {
    /// As [`Opened::print`].
    pub fn print(&self, document: &Document, json: bool) -> anyhow::Result<()> {
        let printed = self.any.print(document, json);
        let write = |export: &Export<DocumentFormat>| export.write(&export.format.write(document));
        all_errors(std::iter::once(printed).chain(self.documents.iter().map(write)))
    }
}

impl Opened {
    /// Prints a result, and writes it to all files.
    pub fn print(&self, document: &Document, json: bool) -> anyhow::Result<()> {
        self.write(output::print(document, json), |format| Ok(format.write(document)))
    }

    /// Writes a result to each file, even if another one or standard output has failed. `printed` is
    /// the outcome of printing it, and `result` makes it in a format. The error names everything
    /// that failed.
    pub fn write(
        &self,
        printed: anyhow::Result<()>,
        result: impl Fn(Format) -> anyhow::Result<String>,
    ) -> anyhow::Result<()> {
        let write = |export: &Export<Format>| export.write(&result(export.format)?);
        all_errors(std::iter::once(printed).chain(self.0.iter().map(write)))
    }
}

/// One error with the words of all.
fn all_errors(outcomes: impl Iterator<Item = anyhow::Result<()>>) -> anyhow::Result<()> {
    let errors: Vec<String> =
        outcomes.filter_map(Result::err).map(|error| format!("{error:#}")).collect();
    match errors.is_empty() {
        true => Ok(()),
        false => Err(anyhow!(errors.join("\nerror: "))),
    }
}

/// Ends a run whose result was printed and written to files. The end of the work decides the exit
/// code; an error of writing is told in any case.
pub fn conclude(work: Result<(), Stop>, written: anyhow::Result<()>) -> Result<(), Stop> {
    match (work, written) {
        (Ok(()), written) => Ok(written?),
        (Err(stop), Ok(())) => Err(stop),
        (Err(stop), Err(error)) => {
            output::note(&format!("error: {error:#}"));
            Err(stop)
        }
    }
}

/// The file or stream that gets a result.
enum Target {
    /// A regular file, by its path without symbolic links, and the file that has this path now.
    Replaced { path: PathBuf, old: Option<File> },
    /// A regular file that has lost its name: /proc/self/fd has such.
    Emptied(File),
    /// A pipe, a device, or standard output.
    Appended(File),
}

impl Target {
    /// Finds out whether a result can be written to `path`. The error has the reason and a remedy.
    fn at(path: &Path) -> Result<Target, String> {
        match fs::metadata(path) {
            Ok(found) => Target::existing(path, &found),
            Err(error) if error.kind() == ErrorKind::NotFound => Target::new(path),
            Err(error) => Err(reason(&error)),
        }
    }

    fn existing(path: &Path, found: &Metadata) -> Result<Target, String> {
        // A file that is also standard output or standard error is written through that descriptor.
        // Opened by its name, it would be written from its beginning, over the printed result.
        let (out, error) = (io::stdout(), io::stderr());
        for stream in [out.as_fd(), error.as_fd()] {
            if is_same(stream, found) {
                let copy = stream.try_clone_to_owned().map_err(|error| reason(&error))?;
                return Ok(Target::Appended(copy.into()));
            }
        }
        let mut options = OpenOptions::new();
        let opened = options.write(true).custom_flags(libc::O_NOCTTY).open(path);
        let file = opened.map_err(|error| reason(&error))?;
        if !found.is_file() {
            return Ok(Target::Appended(file));
        }
        match fs::canonicalize(path) {
            Ok(path) => Ok(Target::Replaced { path, old: Some(file) }),
            Err(_) => Ok(Target::Emptied(file)),
        }
    }

    /// The target for a file that does not exist yet.
    fn new(path: &Path) -> Result<Target, String> {
        if fs::symlink_metadata(path).is_ok() {
            return Err("it is a link to a file that does not exist; name that file".to_owned());
        }
        let folder = folder_of(path);
        let shown = folder.display();
        let there_is_none =
            || format!("there is no folder {shown}; make it (mkdir -p), or name another file");
        let whole = fs::canonicalize(folder).map_err(|error| match error.kind() {
            ErrorKind::NotFound => there_is_none(),
            _ => reason(&error),
        })?;
        let Some(name) = path.file_name().filter(|_| !path.as_os_str().as_bytes().ends_with(b"/"))
        else {
            return Err("it is the name of a folder; name a file".to_owned());
        };
        let path = whole.join(name);
        match Temporary::beside(&path) {
            Ok(_) => Ok(Target::Replaced { path, old: None }),
            Err(error) => Err(format!("no file can be made in {shown}: {}", reason(&error))),
        }
    }

    fn write(&self, text: &[u8]) -> io::Result<()> {
        match self {
            Target::Replaced { path, old: Some(old) } => match replace(path, Some(old), text) {
                Err(error) if keeps_inode(&error) => overwrite(old, text),
                replaced => replaced,
            },
            Target::Replaced { path, old: None } => replace(path, None, text),
            Target::Emptied(file) => overwrite(file, text),
            Target::Appended(file) => {
                let mut file = file;
                file.write_all(text)
            }
        }
    }
}

/// Whether a file that can be opened for writing cannot be replaced, judged by the error of making
/// or renaming the new file: it is a mount point, it belongs to another user in a sticky folder, or
/// the folder takes no new file.
fn keeps_inode(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ResourceBusy
            | ErrorKind::PermissionDenied
            | ErrorKind::ReadOnlyFilesystem
            | ErrorKind::NotFound
    )
}

/// Whether a descriptor is of this file.
fn is_same(stream: BorrowedFd, found: &Metadata) -> bool {
    let stream = stream.try_clone_to_owned().and_then(|copy| File::from(copy).metadata());
    stream.is_ok_and(|stream| (stream.dev(), stream.ino()) == (found.dev(), found.ino()))
}

/// The reason why a file cannot be written, and a remedy.
fn reason(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::IsADirectory => "it is a folder; name a file in it".to_owned(),
        ErrorKind::NotADirectory => {
            "a part of it is a file and no folder; name another file".into()
        }
        ErrorKind::PermissionDenied => {
            "permission denied; name a file that you may write".to_owned()
        }
        ErrorKind::ReadOnlyFilesystem => {
            "the file system is read-only; name a file elsewhere".to_owned()
        }
        _ => format!("{error}; name another file"),
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Replaces the file `path` by a new file with this text, which gets owner and mode of the old one.
fn replace(path: &Path, old: Option<&File>, text: &[u8]) -> io::Result<()> {
    let mut new = Temporary::beside(path)?;
    new.file.write_all(text)?;
    if let Some(old) = old {
        let old = old.metadata()?;
        // A user who may not give files away stays the owner.
        let _ = fchown(&new.file, Some(old.uid()), Some(old.gid()));
        new.file.set_permissions(Permissions::from_mode(old.mode() & 0o777))?;
    }
    // Some file systems report a full disk only here.
    new.file.sync_all()?;
    new.rename(path)
}

fn overwrite(mut file: &File, text: &[u8]) -> io::Result<()> {
    file.set_len(0)?;
    file.write_all(text)?;
    file.sync_all()
}

/// A new file, which is removed again unless it is renamed.
struct Temporary {
    path: PathBuf,
    file: File,
    is_renamed: bool,
}

impl Temporary {
    /// Makes a file in the same folder.
    fn beside(path: &Path) -> io::Result<Temporary> {
        let process = std::process::id();
        let mut number = 0;
        loop {
            // Processes in other containers may have the same number, so the file may exist
            // already.
            let path = folder_of(path).join(format!(".pageleap-{process}-{number}"));
            match File::create_new(&path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
                made => return made.map(|file| Temporary { path, file, is_renamed: false }),
            }
        }
    }

    fn rename(mut self, to: &Path) -> io::Result<()> {
        fs::rename(&self.path, to)?;
        self.is_renamed = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.is_renamed {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_work_decides_the_exit_code() {
        let full = || Err(anyhow!("the disk is full"));
        let stopped = |signal| Err(Stop::Interrupted { signal, found: String::new() });
        assert!(conclude(Ok(()), Ok(())).is_ok());
        assert!(matches!(conclude(Ok(()), full()), Err(Stop::Failed(_))));
        for written in [Ok(()), full()] {
            let end = conclude(stopped(2), written);
            assert!(matches!(end, Err(Stop::Interrupted { signal: 2, .. })), "{end:?}");
        }
    }
}
