//! The ledger: borrows settings, gives them back, and lists the borrowed ones.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use pageleap::{NodeId, PageSize};
use serde::Serialize;

use crate::error::Error;
use crate::folder::{self, Folder};
use crate::huge_pages::{BorrowedPages, Runs, ThisMachine};
use crate::keeper::{self, Keeper};
use crate::setting::Settings;
use crate::settled::Settled;
use crate::user::{Life, User};
use crate::values::{Values, Wish};

/// Identifies a boot of the machine. A reboot has reset all that notes of another boot are about.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The folder of the ledger, below `/run` or XDG_RUNTIME_DIR.
const FOLDER: &str = "pageleap/settings";

/// The hidden command of the keeper.
const KEEP: &str = "keep-settings";

/// The notes of all borrowed settings of a machine.
///
/// ```
/// use pageleap_settings::{Ledger, User, Wish};
///
/// # let root = std::env::temp_dir().join(format!("ledger-example-{}", std::process::id()));
/// # std::fs::create_dir_all(root.join("proc/sys/kernel")).unwrap();
/// # std::fs::write(root.join("proc/sys/kernel/numa_balancing"), "1\n").unwrap();
/// # let keeper = pageleap_settings::Keeper::new("true".into(), vec![]);
/// let ledger = Ledger::of_user();
/// # let ledger = Ledger::below(&root).with_keeper(keeper);
/// let wish = Wish::new("/proc/sys/kernel/numa_balancing", "0", "run --no-balancing");
/// let borrowed = ledger.borrow(&User::this_process()?, &[wish])?;
/// // The kernel leaves pages where they are, until `borrowed` is dropped or the process ends.
/// let back = borrowed.give_back();
/// assert!(back[0].to_string().starts_with("put back /proc/sys/kernel/numa_balancing: 1"));
/// # std::fs::remove_dir_all(&root).unwrap();
/// # Ok::<(), pageleap_settings::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Ledger {
    folder: Folder,
    settings: Settings,
    keeper: Keeper,
    boot: String,
}

impl Ledger {
    /// The ledger of this user for this machine: below `/run` for root, who alone may change
    /// settings as a rule, else below XDG_RUNTIME_DIR. The keeper is the running program with the
    /// hidden command `keep-settings`.
    pub fn of_user() -> Ledger {
        // SAFETY: the call takes no arguments.
        let is_root = unsafe { libc::geteuid() } == 0;
        let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let own = own.filter(|path| path.is_absolute() && !is_root);
        let folder = own.unwrap_or_else(|| PathBuf::from("/run"));
        Ledger::at(Folder::below(folder, FOLDER), "/".into(), vec![KEEP.into()])
    }

    /// A ledger for a copy of a machine's files, with all of it below `root`: the notes in `run`,
    /// the settings in `sys` and `proc/sys`. Huge pages are those of this machine all the same.
    pub fn below(root: impl Into<PathBuf>) -> Ledger {
        // The keeper works in another folder.
        let root = std::path::absolute(root.into()).unwrap_or_default();
        let arguments = vec![KEEP.into(), "--sysroot".into(), root.clone().into()];
        Ledger::at(Folder::below(root.clone(), &format!("run/{FOLDER}")), root, arguments)
    }

    fn at(folder: Folder, root: PathBuf, arguments: Vec<std::ffi::OsString>) -> Ledger {
        Ledger {
            folder,
            settings: Settings::below(root),
            keeper: Keeper::new("/proc/self/exe".into(), arguments),
            boot: fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned(),
        }
    }

    /// The same ledger, which says that it waits when others hold its lock for longer than 2 s.
    pub fn telling(self, waits: fn(&str)) -> Ledger {
        Ledger { folder: self.folder.telling(waits), ..self }
    }

    /// The same ledger with another program as its keeper.
    pub fn with_keeper(self, keeper: Keeper) -> Ledger {
        Ledger { keeper, ..self }
    }

    /// Borrows settings for a process: all or none. The settings are given back when the returned
    /// value is dropped, and at the latest when the process ends, whatever program it executes
    /// until then. A user with the same wish joins the ones before it.
    ///
    /// # Errors
    /// The user is the first process of a pid namespace, with which its keeper would end. A wish
    /// names no setting, or a file that cannot be written. A living process needs another value. The ledger cannot be written, or has a damaged note about the setting. The keeper
    /// cannot be started. No setting has changed then; settings that could not be put back again
    /// are named in the error, and stay noted.
    pub fn borrow(&self, user: &User, wishes: &[Wish]) -> Result<Borrowed, Error> {
        user.check_that_others_outlive_it()?;
        let _turn = self.folder.lock()?;
        let settled = self.settle_in_turn();
        let paths = self.values().borrow(user, wishes, || self.keeper.start(user))?;
        let (ledger, users, process) = (self.clone(), vec![user.clone()], std::process::id());
        Ok(Borrowed { ledger, users, paths, process, settled })
    }

    /// Adds reserved huge pages for this process, however many are free. Each node is named once.
    /// Dropping the value puts them back; the end of the process does, too.
    ///
    /// # Errors
    /// The ledger cannot be written, the keeper cannot be started, or the kernel finds no pages.
    /// Pages that were added are put back then.
    pub fn add_huge_pages(
        &self,
        page: PageSize,
        demands: &[(NodeId, u64)],
    ) -> Result<BorrowedPages, Error> {
        let user = User::this_process()?;
        let turn = self.folder.lock()?;
        let settled = self.settle_in_turn();
        let runs = self.runs();
        let mut pages = BorrowedPages::begin(&runs, user.clone(), settled)?;
        let added = self.keeper.start(&user).and_then(|()| {
            demands.iter().try_for_each(|(node, count)| pages.add_on(&runs, page, *node, *count))
        });
        // Released first, because putting pages back locks the ledger again.
        drop(turn);
        added.map(|()| pages)
    }

    /// Puts back all that ended processes have left, for example because their keepers were killed,
    /// too. Without anything to put back, this only reads the ledger. A user who may not read the
    /// ledger may not change the settings either, so that is no error. If others hold the ledger for
    /// 2 s, they or the next command do it.
    pub fn settle(&self) -> Vec<Settled> {
        self.settle_within(folder::SILENT)
    }

    fn settle_within(&self, limit: Duration) -> Vec<Settled> {
        let is_clean = self.folder.unfinished().is_empty();
        if is_clean && !self.runs().has_ended() && !self.values().has_ended() {
            return Vec::new();
        }
        match self.folder.lock_within(limit) {
            Ok(_turn) => self.settle_in_turn(),
            Err(_) => Vec::new(),
        }
    }

    /// The task of the keeper: waits until the process with this number and start time has ended,
    /// then settles.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn keep(&self, pid: u32, started: u64) -> Result<Vec<Settled>, Error> {
        keeper::wait_for_end(&User::noted(pid, started)?);
        Ok(self.settle_within(Duration::MAX))
    }

    /// Puts back all that ended processes have left. With `force` also the settings of processes
    /// that live, and notes that make no sense or whose settings are gone are removed. Huge pages
    /// of living processes stay, because these processes take them back themselves.
    ///
    /// # Errors
    /// The ledger cannot be read or locked.
    pub fn restore(&self, force: bool) -> Result<Vec<Settled>, Error> {
        let listed = self.list()?;
        let is_clean = self.folder.unfinished().is_empty();
        if is_clean && listed.borrowed.is_empty() && listed.damaged.is_empty() {
            return Ok(Vec::new());
        }
        let _turn = self.folder.lock()?;
        let mut settled = self.settle_in_turn();
        if force {
            settled.retain(Settled::is_settled);
            settled.extend(self.values().settle(&|_| true));
            settled.extend(self.values().remove_damaged()?);
        }
        Ok(settled)
    }

    /// All that is borrowed, and by whom. Changes nothing.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn list(&self) -> Result<Listed, Error> {
        let (notes, damaged) = self.values().notes()?;
        let notes = notes.into_values().filter(|note| note.boot == self.boot);
        let mut borrowed: Vec<Entry> = notes
            .map(|note| Entry {
                now: self.settings.read(&note.file).ok(),
                setting: note.file,
                before: note.before,
                value: note.value,
                users: note.users.into_iter().map(|one| UserEntry::of(one.user, one.why)).collect(),
            })
            .collect();
        let runs = self.runs();
        for (path, ended) in runs.all() {
            borrowed.extend(runs.notes(&path).into_iter().filter(|note| note.added > 0).map(
                |note| {
                    let life = if ended { Life::Ended } else { Life::Lives };
                    let why = "huge pages".to_owned();
                    Entry {
                        setting: note.setting(),
                        before: "+0".to_owned(),
                        value: format!("+{}", note.added),
                        now: None,
                        users: vec![UserEntry { user: note.user, why, life }],
                    }
                },
            ));
        }
        Ok(Listed { borrowed, damaged })
    }

    fn settle_in_turn(&self) -> Vec<Settled> {
        let mut settled = self.runs().settle(&ThisMachine);
        settled.extend(self.values().settle(&User::has_ended));
        settled
    }

    fn values(&self) -> Values<'_> {
        Values { folder: &self.folder, settings: &self.settings, boot: &self.boot }
    }

    fn runs(&self) -> Runs<'_> {
        Runs { folder: &self.folder, boot: &self.boot }
    }
}

/// All borrowed settings.
#[derive(Debug)]
pub struct Listed {
    /// One entry for each setting, by name; then one for each reservation of huge pages.
    pub borrowed: Vec<Entry>,
    /// Notes that make no sense.
    pub damaged: Vec<Error>,
}

/// A borrowed setting.
#[derive(Clone, Debug, Serialize)]
pub struct Entry {
    /// The file, or `huge pages of 2m on node 0`.
    pub setting: String,
    /// The value before; `+0` for huge pages.
    pub before: String,
    /// The borrowed value; `+N` for N huge pages.
    pub value: String,
    /// The value now, if it can be read; none for huge pages, of which others may have some.
    pub now: Option<String>,
    /// The processes that need it, in the order in which they came.
    pub users: Vec<UserEntry>,
}

/// A process that uses a setting.
#[derive(Clone, Debug, Serialize)]
pub struct UserEntry {
    /// The process.
    #[serde(flatten)]
    pub user: User,
    /// The purpose of the setting.
    pub why: String,
    /// Whether it lives.
    pub life: Life,
}

impl UserEntry {
    fn of(user: User, why: String) -> UserEntry {
        UserEntry { life: user.life(), user, why }
    }
}

/// Settings that a process has borrowed. Dropping the value gives them back. A child made by `fork`
/// gives nothing back.
#[derive(Debug)]
#[must_use = "the settings are given back when it is dropped"]
pub struct Borrowed {
    ledger: Ledger,
    users: Vec<User>,
    /// Notes.
    paths: Vec<PathBuf>,
    /// The process that has borrowed them.
    process: u32,
    settled: Vec<Settled>,
}

impl Borrowed {
    /// Settings that ended processes had left, and how each was settled before this was borrowed.
    pub fn settled(&self) -> &[Settled] {
        &self.settled
    }

    /// Lets another process use the settings as well, until it ends or they are given back. It has a
    /// keeper of its own then.
    ///
    /// # Errors
    /// The ledger cannot be written or locked, or the keeper cannot be started. The process may use
    /// some of the settings then.
    pub fn share_with(&mut self, user: &User) -> Result<(), Error> {
        let _turn = self.ledger.folder.lock_within(folder::SILENT)?;
        self.ledger.keeper.start(user)?;
        let values = self.ledger.values();
        values.share(&self.paths, &self.users[0], user)?;
        self.users.push(user.clone());
        Ok(())
    }

    /// Gives the settings back now. A setting that others still use stays until they have ended.
    /// Returns an entry for each setting that was changed, or could not be.
    pub fn give_back(mut self) -> Vec<Settled> {
        self.give_back_now()
    }

    /// Leaves the settings to their keeper: they come back when the user has ended, also if this
    /// process ends before.
    pub fn leave_to_keeper(mut self) {
        self.paths.clear();
    }

    fn give_back_now(&mut self) -> Vec<Settled> {
        let paths = std::mem::take(&mut self.paths);
        if paths.is_empty() || self.process != std::process::id() {
            return Vec::new();
        }
        match self.ledger.folder.lock() {
            Ok(_turn) => self.ledger.values().give_back(&self.users, &paths),
            // The keeper tries again at the end of the user.
            Err(_) => Vec::new(),
        }
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        self.give_back_now();
    }
}

#[cfg(test)]
mod tests;
