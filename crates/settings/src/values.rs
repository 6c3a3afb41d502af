//! Settings with one value: notes of borrowed ones, and the rules by which they come back.
//!
//! A setting has one note, a JSON object that is always replaced whole: the value before, the
//! borrowed value, and its users. See the crate's documentation for the order of writes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::folder::Folder;
use crate::setting::{Settings, value_of};
use crate::settled::{Outcome, Settled};
use crate::user::User;

/// The ending of a note's name.
const END: &str = "value";

/// A value that a process needs a setting to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// The file, such as `/proc/sys/kernel/numa_balancing`.
    pub file: PathBuf,
    /// The value, as it is written to the file.
    pub value: String,
    /// The purpose, in the words of the command.
    pub why: String,
}

impl Wish {
    /// A wish.
    pub fn new(file: impl Into<PathBuf>, value: &str, why: &str) -> Wish {
        Wish { file: file.into(), value: value.into(), why: why.into() }
    }
}

/// A user of a setting.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub(crate) struct Use {
    #[serde(flatten)]
    pub user: User,
    pub why: String,
}

/// A borrowed setting.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub(crate) struct Note {
    /// The boot at which it was borrowed. The next one has made the value void.
    pub boot: String,
    pub file: String,
    pub before: String,
    pub value: String,
    pub users: Vec<Use>,
}

impl Note {
    /// Reads a note. `None`: somebody has removed it meanwhile.
    fn read(path: &Path) -> Result<Option<Note>, Error> {
        let damaged = |reason: String| Error::Damaged { path: path.to_owned(), reason };
        let bytes = match fs::read(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            bytes => bytes.map_err(|error| damaged(error.to_string()))?,
        };
        let note: Note =
            serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
        // A copy under another name would restore a setting for which nobody looks here.
        match path.file_name().and_then(|name| name.to_str()) == Some(&name_of(&note.file)) {
            true => Ok(Some(note)),
            false => Err(damaged(format!("it is about {}", note.file))),
        }
    }

    /// How the loan has to end at the end of the last user, when the setting has the value `now`.
    fn ending(&self, now: &str) -> Ending {
        match now {
            now if now == self.before => Ending::Nothing,
            now if now == self.value => Ending::PutBack,
            _ => Ending::LeaveAlone,
        }
    }
}

/// How a loan ends at the end of the setting's last user.
#[derive(Debug, PartialEq)]
enum Ending {
    /// It was never changed, or somebody has put it back.
    Nothing,
    PutBack,
    LeaveAlone,
}

/// The name of the note about a setting. Different settings have different names.
fn name_of(file: &str) -> String {
    let mut name = String::new();
    for byte in file.trim_start_matches('/').bytes() {
        match byte {
            b'/' => name.push('-'),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' => name.push(byte.into()),
            _ => name += &format!("%{byte:02x}"),
        }
    }
    format!("{name}.{END}")
}

/// A wish that has been checked, with the values that undo it.
struct Plan {
    path: PathBuf,
    /// The value that the setting has now.
    found: String,
    /// The note without this user.
    earlier: Option<Note>,
    note: Note,
}

/// The notes of all settings with one value, and the settings themselves. The caller of each
/// function that changes something has locked the ledger.
pub(crate) struct Values<'a> {
    pub folder: &'a Folder,
    pub settings: &'a Settings,
    pub boot: &'a str,
}

impl Values<'_> {
    /// All notes, and those that cannot be read.
    pub fn notes(&self) -> Result<(BTreeMap<PathBuf, Note>, Vec<Error>), Error> {
        let (mut notes, mut damaged) = (BTreeMap::new(), Vec::new());
        for path in self.folder.notes(END)? {
            match Note::read(&path) {
                Ok(note) => notes.extend(note.map(|note| (path, note))),
                Err(error) => damaged.push(error),
            }
        }
        Ok((notes, damaged))
    }

    /// Whether a note has something to settle. Needs no lock.
    pub fn has_ended(&self) -> bool {
        let is_over = |note: &Note| {
            note.boot != self.boot || note.users.iter().any(|one| one.user.has_ended())
        };
        self.notes().is_ok_and(|(notes, _)| notes.values().any(is_over))
    }

    /// Drops the users that are over, and puts settings without users back.
    pub fn settle(&self, is_over: &dyn Fn(&User) -> bool) -> Vec<Settled> {
        let notes = self.notes().map(|(notes, _)| notes).unwrap_or_default();
        notes.into_iter().filter_map(|(path, note)| self.settle_one(&path, note, is_over)).collect()
    }

    /// The same for some users and settings, whether the users have ended or not.
    pub fn give_back(&self, users: &[User], paths: &[PathBuf]) -> Vec<Settled> {
        let is_over = |other: &User| {
            users.iter().any(|user| user.is_same_process(other)) || other.has_ended()
        };
        let note = |path: &PathBuf| Some((path.clone(), Note::read(path).ok()??));
        let notes = paths.iter().filter_map(note);
        notes.filter_map(|(path, note)| self.settle_one(&path, note, &is_over)).collect()
    }

    /// Lets a second user have the settings of a first one, for as long as it lives.
    pub fn share(&self, paths: &[PathBuf], first: &User, second: &User) -> Result<(), Error> {
        for path in paths {
            // Without a note, somebody has put the setting back by `restore --force`.
            let Some(mut note) = Note::read(path)? else { continue };
            let of_first = note.users.iter().find(|one| one.user.is_same_process(first));
            let Some(why) = of_first.map(|one| one.why.clone()) else { continue };
            note.users.push(Use { user: second.clone(), why });
            write(self.folder, path, &note)?;
        }
        Ok(())
    }

    fn settle_one(
        &self,
        path: &Path,
        mut note: Note,
        is_over: &dyn Fn(&User) -> bool,
    ) -> Option<Settled> {
        if note.boot != self.boot {
            let _ = self.folder.remove(path);
            return None;
        }
        let all = note.users.len();
        let (ended, users): (Vec<Use>, Vec<Use>) =
            note.users.iter().cloned().partition(|one| is_over(&one.user));
        if !users.is_empty() {
            if users.len() < all {
                note.users = users;
                // If this fails, the ended ones are dropped by the next command.
                let _ = write(self.folder, path, &note);
            }
            return None;
        }
        let outcome = match self.put_back(&note) {
            Ok(outcome) => self.folder.remove(path).map(|()| outcome),
            Err(error) => Err(error),
        };
        let outcome = outcome.unwrap_or_else(|e| Some(Outcome::Stays { why: e.to_string() }))?;
        let users = ended.into_iter().map(|one| one.user).collect();
        Some(Settled { setting: note.file, outcome, users })
    }

    /// Puts a setting back, if it still has the borrowed value. `None`: it has the value before.
    fn put_back(&self, note: &Note) -> Result<Option<Outcome>, Error> {
        let now = self.settings.read(&note.file)?;
        let (set, before) = (note.value.clone(), note.before.clone());
        match note.ending(&now) {
            Ending::Nothing => Ok(None),
            Ending::LeaveAlone => Ok(Some(Outcome::ChangedSince { now, set, before })),
            Ending::PutBack => {
                self.settings.write(&note.file, &before)?;
                Ok(Some(Outcome::PutBack { from: set, to: before }))
            }
        }
    }

    /// Removes notes that make no sense, and those of settings that are not there any more.
    pub fn remove_damaged(&self) -> Result<Vec<Settled>, Error> {
        let (notes, damaged) = self.notes()?;
        let missing = notes.into_iter().filter(|(_, note)| self.settings.is_missing(&note.file));
        let missing = missing.map(|(path, note)| (path, format!("{} is not there", note.file)));
        let damaged = damaged.into_iter().filter_map(|error| match error {
            Error::Damaged { path, reason } => Some((path, reason)),
            _ => None,
        });
        let mut removed = Vec::new();
        for (path, why) in damaged.chain(missing) {
            self.folder.remove(&path)?;
            let outcome = Outcome::NoteRemoved { why };
            let setting = path.display().to_string();
            removed.push(Settled { setting, outcome, users: Vec::new() });
        }
        Ok(removed)
    }

    /// Checks all wishes, runs `before_changes`, and fulfils all wishes or none. Returns the paths
    /// of their notes.
    pub fn borrow(
        &self,
        user: &User,
        wishes: &[Wish],
        before_changes: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Vec<PathBuf>, Error> {
        let mut plans: Vec<Plan> = Vec::new();
        for wish in wishes {
            let plan = self.plan(user, wish)?;
            match plans.iter().find(|earlier| earlier.path == plan.path) {
                None => plans.push(plan),
                Some(earlier) if earlier.note.value == plan.note.value => {}
                Some(earlier) => return Err(conflict(&earlier.note, &plan.note.value)),
            }
        }
        before_changes()?;
        for (nth, plan) in plans.iter().enumerate() {
            if let Err(error) = self.fulfil(plan) {
                // In reverse: a kernel may refuse the first value as long as the second one is set.
                let undone = plans[..=nth].iter().rev();
                let left = undone.filter(|plan| self.undo(plan).is_err());
                return Err(error.with_left(left.map(|plan| plan.note.file.clone()).collect()));
            }
        }
        Ok(plans.into_iter().map(|plan| plan.path).collect())
    }

    /// Checks a wish against the ledger and the setting. Changes nothing.
    fn plan(&self, user: &User, wish: &Wish) -> Result<Plan, Error> {
        let file = self.settings.name(&wish.file)?;
        let path = self.folder.note(&name_of(&file));
        let found = self.settings.read(&file)?;
        let value = value_of(&wish.value);
        let earlier = Note::read(&path)?;
        // The ended ones have left a value that could not be put back; nobody needs it.
        let living = |note: &Note| -> Vec<Use> {
            note.users.iter().filter(|one| !one.user.has_ended()).cloned().collect()
        };
        let mut users = earlier.as_ref().map_or_else(Vec::new, living);
        if let Some(earlier) = &earlier
            && earlier.value != value
            && !users.is_empty()
        {
            return Err(conflict(&Note { users, ..earlier.clone() }, &value));
        }
        if found != value {
            self.settings.check_writable(&file)?;
        }
        // A value that somebody else has written since comes back in the end.
        let before = match &earlier {
            Some(earlier) if found == earlier.value => earlier.before.clone(),
            _ => found.clone(),
        };
        if !users.iter().any(|one| one.user.is_same_process(user)) {
            users.push(Use { user: user.clone(), why: wish.why.clone() });
        }
        let note = Note { boot: self.boot.to_owned(), file, before, value, users };
        Ok(Plan { path, found, earlier, note })
    }

    /// Notes the setting, then changes it.
    fn fulfil(&self, plan: &Plan) -> Result<(), Error> {
        write(self.folder, &plan.path, &plan.note)?;
        if plan.found == plan.note.value {
            return Ok(());
        }
        self.settings.write(&plan.note.file, &plan.note.value)
    }

    /// Puts setting and note back as they were found. If the setting does not go back, the note
    /// stays.
    fn undo(&self, plan: &Plan) -> Result<(), Error> {
        if self.settings.read(&plan.note.file)? != plan.found {
            self.settings.write(&plan.note.file, &plan.found)?;
        }
        match &plan.earlier {
            Some(earlier) => write(self.folder, &plan.path, earlier),
            None => self.folder.remove(&plan.path),
        }
    }
}

fn write(folder: &Folder, path: &Path, note: &Note) -> Result<(), Error> {
    let text = serde_json::to_string(note).expect("strings and numbers are JSON");
    folder.replace(path, &text)
}

fn conflict(note: &Note, wanted: &str) -> Error {
    Error::Conflict {
        file: note.file.clone(),
        wanted: wanted.to_owned(),
        value: note.value.clone(),
        users: note.users.iter().map(|one| one.user.clone()).collect(),
    }
}
