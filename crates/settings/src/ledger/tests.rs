//! The rules of values, on a machine made of files. Users are processes of this machine; crashes
//! are made by hand, by leaving note and setting as a crash would.

use super::*;
use crate::settled::Outcome;
use crate::sleeper::Sleeper;

const THP: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
const BALANCING: &str = "/proc/sys/kernel/numa_balancing";

/// Files of a machine below a folder, which goes with the value.
struct Machine {
    root: PathBuf,
    ledger: Ledger,
}

impl Machine {
    fn new(name: &str) -> Machine {
        let name = format!("pageleap-settings-{name}-{}", std::process::id());
        let root = std::env::temp_dir().join(name);
        // Nobody waits for these users: the tests settle themselves.
        let keeper = Keeper::new("true".into(), Vec::new());
        let machine = Machine { ledger: Ledger::below(&root).with_keeper(keeper), root };
        for (file, text) in [(THP, "always [madvise] never\n"), (BALANCING, "1\n")] {
            fs::create_dir_all(machine.path(file).parent().unwrap()).unwrap();
            fs::write(machine.path(file), text).unwrap();
        }
        machine
    }

    fn path(&self, file: &str) -> PathBuf {
        self.root.join(file.trim_start_matches('/'))
    }

    fn set(&self, file: &str, value: &str) {
        fs::write(self.path(file), value).unwrap();
    }

    fn value(&self, file: &str) -> String {
        self.ledger.settings.read(file).unwrap()
    }

    /// Borrows one setting for a user, who does not give it back in order.
    fn borrow(&self, user: &Sleeper, file: &str, value: &str) -> Result<(), Error> {
        let borrowed = self.ledger.borrow(&user.user(), &[Wish::new(file, value, "a test")]);
        borrowed.map(Borrowed::leave_to_keeper)
    }

    /// The sentences of the next command.
    fn settle(&self) -> Vec<String> {
        self.ledger.settle().iter().map(Settled::to_string).collect()
    }

    /// The notes about values.
    fn notes(&self) -> Vec<PathBuf> {
        self.ledger.folder.notes("value").unwrap()
    }

    /// Changes the text of the only note.
    fn edit(&self, change: impl Fn(String) -> String) {
        let notes = self.notes();
        let [note] = &notes[..] else { panic!("{notes:?}") };
        fs::write(note, change(fs::read_to_string(note).unwrap())).unwrap();
    }

    /// Nothing is noted, and all settings have their first values.
    #[track_caller]
    fn is_as_before(&self) {
        assert_eq!((self.value(THP), self.value(BALANCING)), ("madvise".into(), "1".into()));
        assert_eq!(self.notes(), [] as [PathBuf; 0]);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

#[test]
fn users_with_one_wish_share_a_setting_until_the_last_one_ends() {
    for first_ends_first in [true, false] {
        let machine = Machine::new(&format!("joining-{first_ends_first}"));
        let users = [Sleeper::new(), Sleeper::new()];
        for user in &users {
            machine.borrow(user, THP, "never").unwrap();
        }
        assert_eq!(machine.notes().len(), 1);
        let [first, second] = users;
        let (one, other) = if first_ends_first { (first, second) } else { (second, first) };
        drop(one);
        assert_eq!(machine.settle(), [] as [&str; 0]);
        assert_eq!(machine.value(THP), "never", "the other one still needs it");
        assert_eq!(machine.ledger.list().unwrap().borrowed[0].users.len(), 1);
        let name = other.user().to_string();
        drop(other);
        let told = machine.settle();
        assert_eq!(told, [format!("put back {THP}: madvise, which {name} had set to never")]);
        machine.is_as_before();
        assert_eq!(machine.settle(), [] as [&str; 0], "what was put back is noted no more");
    }
}

#[test]
fn another_wish_is_refused_while_a_user_lives() {
    let machine = Machine::new("conflict");
    let (first, second) = (Sleeper::new(), Sleeper::new());
    machine.borrow(&first, THP, "never").unwrap();
    let error = machine.borrow(&second, THP, "always").unwrap_err();
    let expected = format!("{THP} cannot become always: sleep ({}) needs never", first.0.id());
    assert!(error.is_usage() && error.to_string().starts_with(&expected), "{error}");
    assert_eq!(machine.value(THP), "never");
    // A link is another name of the same setting.
    let link = machine.path("/sys/link");
    std::os::unix::fs::symlink(machine.path(THP), link).unwrap();
    assert!(machine.borrow(&second, "/sys/link", "always").is_err());
    drop(first);
    machine.borrow(&second, "/sys/link", "always").unwrap();
    assert_eq!(machine.value(THP), "always");
    drop(second);
    machine.settle();
    machine.is_as_before();
}

#[test]
fn a_wish_for_the_present_value_is_noted_and_changes_nothing() {
    let machine = Machine::new("present");
    let (first, second) = (Sleeper::new(), Sleeper::new());
    machine.borrow(&first, THP, "madvise").unwrap();
    assert_eq!(fs::read_to_string(machine.path(THP)).unwrap(), "always [madvise] never\n");
    assert!(machine.borrow(&second, THP, "never").is_err());
    drop(first);
    assert_eq!(machine.settle(), [] as [&str; 0]);
    machine.is_as_before();
}

#[test]
fn a_later_value_of_somebody_else_stays() {
    let machine = Machine::new("later");
    let user = Sleeper::new();
    let name = user.user();
    machine.borrow(&user, THP, "never").unwrap();
    machine.set(THP, "[always] madvise never\n");
    drop(user);
    let told = machine.settle();
    assert_eq!(
        told,
        [format!(
            "left {THP} as it is: always, which somebody has written since {name} had set it to \
             never (before: madvise)"
        )]
    );
    assert_eq!((machine.value(THP).as_str(), machine.notes().len()), ("always", 0));
}

#[test]
fn a_later_value_is_what_comes_back_after_users_that_joined() {
    let machine = Machine::new("later-joined");
    let users = [Sleeper::new(), Sleeper::new()];
    machine.borrow(&users[0], THP, "never").unwrap();
    machine.set(THP, "always");
    machine.borrow(&users[1], THP, "never").unwrap();
    assert_eq!(machine.value(THP), "never");
    drop(users);
    machine.settle();
    assert_eq!((machine.value(THP).as_str(), machine.notes().len()), ("always", 0));
}

#[test]
fn a_crash_leaves_a_machine_that_the_next_command_mends() {
    // The value of the setting that the crash leaves, and whether something is to be put back.
    for (at, left, puts_back) in [
        ("between note and change", "always [madvise] never\n", false),
        ("after the change", "always madvise [never]\n", true),
        ("between putting back and removing the note", "always [madvise] never\n", false),
    ] {
        let machine = Machine::new(&at.replace(' ', "-"));
        let user = Sleeper::new();
        machine.borrow(&user, THP, "never").unwrap();
        drop(user);
        machine.set(THP, left);
        assert_eq!(machine.settle().len(), usize::from(puts_back), "{at}");
        machine.is_as_before();
    }
    let machine = Machine::new("half-a-note");
    let user = Sleeper::new();
    machine.borrow(&user, BALANCING, "0").unwrap();
    drop(user);
    fs::write(machine.notes()[0].with_extension("new"), "{\"boot\":\"th").unwrap();
    assert_eq!(machine.settle().len(), 1);
    machine.is_as_before();
    assert_eq!(machine.ledger.folder.notes("new").unwrap().len(), 0);
}

#[test]
fn a_reused_pid_is_not_the_user() {
    let machine = Machine::new("reuse");
    let user = Sleeper::new();
    machine.borrow(&user, THP, "never").unwrap();
    let started = user.user().started();
    let number = |started: u64| format!("\"started\":{started}");
    machine.edit(|note| note.replace(&number(started), &number(started - 1)));
    assert_eq!(machine.settle().len(), 1);
    machine.is_as_before();
}

#[test]
fn a_user_that_cannot_be_seen_counts_as_living() {
    let machine = Machine::new("unseen");
    let user = Sleeper::new();
    machine.borrow(&user, THP, "never").unwrap();
    let namespace = namespace_in(&fs::read_to_string(&machine.notes()[0]).unwrap());
    // A namespace without processes: in the first namespace it has ended, elsewhere nobody knows.
    machine.edit(|note| note.replace(&namespace, "\"pid_namespace\":17"));
    drop(user);
    let life = machine.ledger.list().unwrap().borrowed[0].users[0].life;
    let settled = machine.settle();
    match life {
        Life::Ended => machine.is_as_before(),
        Life::Lives => panic!("namespace 17 has no process"),
        Life::Unknown => {
            assert_eq!((settled, machine.value(THP).as_str()), (vec![], "never"));
            assert_eq!(machine.ledger.restore(true).unwrap().len(), 1);
            machine.is_as_before();
        }
    }
}

fn namespace_in(note: &str) -> String {
    let from = note.find("\"pid_namespace\":").unwrap();
    note[from..].split(',').next().unwrap().to_owned()
}

#[test]
fn a_note_of_another_boot_counts_for_nothing() {
    let machine = Machine::new("boot");
    let user = Sleeper::new();
    machine.borrow(&user, THP, "never").unwrap();
    let boot = machine.ledger.boot.clone();
    machine.edit(|note| note.replace(&boot, "an earlier one"));
    assert!(machine.ledger.list().unwrap().borrowed.is_empty());
    assert_eq!(machine.settle(), [] as [&str; 0]);
    assert_eq!((machine.value(THP).as_str(), machine.notes().len()), ("never", 0));
}

#[test]
fn a_damaged_note_stays_and_keeps_its_setting_from_being_borrowed() {
    for damage in ["", "{\"boot\":\"th", "[1]", "\u{0}"] {
        let machine = Machine::new(&format!("damaged-{}", damage.len()));
        let user = Sleeper::new();
        machine.borrow(&user, THP, "never").unwrap();
        machine.edit(|_| damage.to_owned());
        let error = machine.borrow(&user, THP, "never").unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error}");
        machine.borrow(&user, BALANCING, "0").unwrap();
        drop(user);
        assert_eq!(machine.settle().len(), 1, "the sound note is settled");
        assert_eq!(machine.ledger.list().unwrap().damaged.len(), 1);
        assert_eq!(machine.ledger.restore(false).unwrap(), []);
        let removed = machine.ledger.restore(true).unwrap();
        assert!(matches!(removed[0].outcome, Outcome::NoteRemoved { .. }), "{removed:?}");
        assert_eq!((machine.value(THP).as_str(), machine.notes().len()), ("never", 0));
    }
}

#[test]
fn a_note_under_another_name_restores_nothing() {
    let machine = Machine::new("renamed");
    let user = Sleeper::new();
    machine.borrow(&user, THP, "never").unwrap();
    let note = machine.notes().remove(0);
    fs::copy(&note, note.with_file_name("copy.value")).unwrap();
    assert_eq!(machine.ledger.list().unwrap().damaged.len(), 1);
    drop(user);
    assert_eq!(machine.settle().len(), 1);
}

#[test]
fn wishes_are_fulfilled_all_or_none() {
    let machine = Machine::new("all-or-none");
    let user = User::this_process().unwrap();
    let first = Wish::new(BALANCING, "0", "a test");
    let refused = |second: Wish, expected: &str| {
        let wishes = [first.clone(), second];
        let error = machine.ledger.borrow(&user, &wishes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        machine.is_as_before();
    };
    // Refused before anything is changed.
    refused(Wish::new("/sys/no/such", "1", "a test"), "open /sys/no/such");
    refused(Wish::new("/etc/passwd", "1", "a test"), "/etc/passwd");
    refused(Wish::new(BALANCING, "1", "a test"), "cannot become 1");
    // The file was changed by then: it reads `b` after `[b]` was written.
    let file = "/sys/folded";
    fs::write(machine.path(file), "a").unwrap();
    refused(Wish::new(file, "[[b]]", "a test"), "/sys/folded becomes b when [b] is written");
    assert_eq!(machine.value(file), "a");
}

#[test]
fn a_setting_that_nobody_may_write_is_refused_with_a_remedy() {
    const READ_ONLY: &str = "/proc/sys/kernel/osrelease";
    let machine = Machine::new("read-only");
    let ledger = Ledger { settings: Settings::below("/".into()), ..machine.ledger.clone() };
    let user = User::this_process().unwrap();
    let error = ledger.borrow(&user, &[Wish::new(READ_ONLY, "1", "a test")]).unwrap_err();
    let error = error.to_string();
    assert!(error.starts_with(&format!("open {READ_ONLY}: ")), "{error}");
    assert!(error.contains("run as root") || error.contains("read-only"), "{error}");
    machine.is_as_before();
}

#[test]
fn nothing_changes_without_a_ledger_or_a_keeper() {
    let machine = Machine::new("no-ledger");
    let user = User::this_process().unwrap();
    let wishes = [Wish::new(THP, "never", "a test")];
    let keeper = Keeper::new("/no/such/program".into(), Vec::new());
    let error = machine.ledger.clone().with_keeper(keeper).borrow(&user, &wishes).unwrap_err();
    assert!(matches!(error, Error::Keeper(_)), "{error}");
    machine.is_as_before();
    fs::remove_dir_all(machine.root.join("run")).unwrap();
    fs::write(machine.root.join("run"), "no folder").unwrap();
    let error = machine.ledger.borrow(&user, &wishes).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Ledger { call: "mkdir", .. }), "{text}");
    assert!(text.contains("/run: ") && text.contains("run as root"), "{text}");
    assert_eq!(machine.value(THP), "madvise");
}

#[test]
fn a_wait_for_the_ledger_is_told_and_ends() {
    thread_local!(static TOLD: std::cell::RefCell<Vec<String>> = const { std::cell::RefCell::new(Vec::new()) });
    let machine = Machine::new("busy");
    let folder = machine.ledger.folder.clone();
    let folder = folder.telling(|line| TOLD.with(|told| told.borrow_mut().push(line.to_owned())));
    let turn = folder.lock().unwrap();
    // The lock is the file's, so it excludes this process, too.
    let error = folder.lock_within(folder::SILENT + Duration::from_millis(50)).err().unwrap();
    assert!(matches!(error, Error::Busy { .. }), "{error}");
    let own = format!("({})", std::process::id());
    let told = TOLD.with(|told| told.borrow().clone());
    let lock = folder.path().join("lock").display().to_string();
    // A container may hide the locks of its processes.
    let holder = error.to_string();
    assert!(holder.starts_with(&lock), "{holder}");
    assert!(holder.contains(&own) || holder.contains("another process"), "{holder}");
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].starts_with(&format!("waiting for {lock}, which ")), "{told:?}");
    let waiter = std::thread::spawn({
        let folder = folder.clone();
        move || folder.lock_within(Duration::MAX).is_ok()
    });
    drop(turn);
    assert!(waiter.join().unwrap());
}

#[test]
fn a_setting_that_is_shared_stays_until_both_have_ended() {
    for first_ends_first in [true, false] {
        let machine = Machine::new(&format!("shared-{first_ends_first}"));
        let (first, second) = (Sleeper::new(), Sleeper::new());
        let wishes = [Wish::new(THP, "never", "a test"), Wish::new(BALANCING, "0", "a test")];
        let mut borrowed = machine.ledger.borrow(&first.user(), &wishes).unwrap();
        borrowed.share_with(&second.user()).unwrap();
        borrowed.leave_to_keeper();
        let (one, other) = if first_ends_first { (first, second) } else { (second, first) };
        drop(one);
        assert_eq!(machine.settle(), [] as [&str; 0]);
        assert_eq!((machine.value(THP), machine.value(BALANCING)), ("never".into(), "0".into()));
        drop(other);
        assert_eq!(machine.settle().len(), 2);
        machine.is_as_before();
    }
    // What is given back in order waits for none of them.
    let machine = Machine::new("shared-and-given-back");
    let (first, second) = (Sleeper::new(), Sleeper::new());
    let wish = [Wish::new(THP, "never", "a test")];
    let mut borrowed = machine.ledger.borrow(&first.user(), &wish).unwrap();
    borrowed.share_with(&second.user()).unwrap();
    assert_eq!(borrowed.give_back().len(), 1);
    machine.is_as_before();
}

#[test]
fn only_own_folders_of_the_ledger_are_made_and_trusted() {
    use std::os::unix::fs::PermissionsExt;
    let machine = Machine::new("folders");
    let base = machine.root.join("missing");
    let folder = Folder::below(base.clone(), FOLDER);
    assert!(folder.lock().is_err() && !base.exists());
    fs::create_dir(&base).unwrap();
    folder.lock().unwrap();
    let own = base.join("pageleap");
    assert_eq!(fs::metadata(&own).unwrap().permissions().mode() & 0o777, 0o700);
    fs::set_permissions(&own, fs::Permissions::from_mode(0o777)).unwrap();
    assert!(folder.lock().is_err());
}

#[test]
fn a_folder_of_the_environment_that_others_may_write_to_has_no_ledger() {
    use std::os::unix::fs::PermissionsExt;
    let machine = Machine::new("open-base");
    fs::set_permissions(&machine.root, fs::Permissions::from_mode(0o777)).unwrap();
    let error = machine.ledger.folder.lock().err().unwrap().to_string();
    assert!(error.starts_with(&format!("open {}: others may", machine.root.display())), "{error}");
    for mode in [0o755, 0o1777] {
        fs::set_permissions(&machine.root, fs::Permissions::from_mode(mode)).unwrap();
        assert!(machine.ledger.folder.lock().is_ok());
    }
}

#[test]
fn an_unfinished_note_alone_is_removed() {
    let machine = Machine::new("unfinished");
    drop(machine.ledger.folder.lock().unwrap());
    fs::write(machine.ledger.folder.note("x.new"), "").unwrap();
    machine.ledger.restore(false).unwrap();
    assert!(machine.ledger.folder.unfinished().is_empty());
}

#[test]
fn a_user_gives_back_in_order_what_nobody_else_needs() {
    let machine = Machine::new("order");
    let other = Sleeper::new();
    machine.borrow(&other, BALANCING, "0").unwrap();
    let wishes = [Wish::new(THP, "never", "a test"), Wish::new(BALANCING, "0", "a test")];
    let user = User::this_process().unwrap();
    let borrowed = machine.ledger.borrow(&user, &wishes).unwrap();
    let given = borrowed.give_back();
    assert_eq!(given.len(), 1, "{given:?}");
    assert_eq!((machine.value(THP).as_str(), machine.value(BALANCING).as_str()), ("madvise", "0"));
    drop(other);
    drop(machine.ledger.borrow(&user, &wishes).unwrap());
    machine.is_as_before();
}

#[test]
fn force_takes_settings_from_living_users_and_names_them() {
    let machine = Machine::new("force");
    let user = Sleeper::new();
    machine.borrow(&user, THP, "never").unwrap();
    assert_eq!(machine.ledger.restore(false).unwrap(), []);
    let forced = machine.ledger.restore(true).unwrap();
    assert_eq!(forced[0].users, [user.user()]);
    machine.is_as_before();
    drop(user);
    assert_eq!(machine.settle(), [] as [&str; 0]);
}

#[test]
fn a_setting_that_cannot_be_put_back_stays_noted() {
    let machine = Machine::new("stays");
    let user = Sleeper::new();
    machine.borrow(&user, THP, "never").unwrap();
    drop(user);
    // As if /sys were not mounted.
    let (here, away) = (machine.root.join("sys"), machine.root.join("away"));
    fs::rename(&here, &away).unwrap();
    let told = machine.settle();
    assert!(told[0].contains("could not be put back"), "{told:?}");
    assert_eq!(machine.notes().len(), 1);
    fs::rename(&away, &here).unwrap();
    assert_eq!(machine.settle().len(), 1);
    machine.is_as_before();
}

#[test]
fn a_value_that_could_not_be_put_back_binds_nobody() {
    let machine = Machine::new("binds-nobody");
    let (first, second) = (Sleeper::new(), Sleeper::new());
    machine.borrow(&first, BALANCING, "0").unwrap();
    // The file never reads like this, as if the kernel refused the value.
    machine.edit(|note| note.replace("\"before\":\"1\"", "\"before\":\"[[1]]\""));
    drop(first);
    assert!(machine.settle()[0].contains("could not be put back"));
    machine.borrow(&second, BALANCING, "2").unwrap();
    assert_eq!(machine.value(BALANCING), "2");
}

#[test]
fn the_first_process_of_a_container_has_no_keeper() {
    let machine = Machine::new("first-process");
    let wish = Wish::new(THP, "never", "a test");
    let error = machine.ledger.borrow(&User::of(1).unwrap(), &[wish]).unwrap_err();
    assert!(error.to_string().contains("docker run --init"), "{error}");
    machine.is_as_before();
}
