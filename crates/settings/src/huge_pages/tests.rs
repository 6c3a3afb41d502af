//! Which pages are taken back after the end of runs, on a machine with one node.

use std::cell::Cell;

use super::*;

const BOOT: &str = "this one";
const PAGE: u64 = 2 << 20;

/// A machine with one node.
struct Fake(Cell<u64>);

impl Machine for Fake {
    fn total(&self, _node: u32, _page_bytes: u64) -> Result<u64, Error> {
        Ok(self.0.get())
    }

    fn take_back(&self, _node: u32, _page_bytes: u64, pages: u64) -> Result<(), Error> {
        self.0.set(self.0.get() - pages);
        Ok(())
    }
}

/// A ledger in a folder of its own, which goes with the value.
struct Scratch(Folder);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let name = format!("pageleap-ledger-{name}-{}", std::process::id());
        let folder = Folder::below(std::env::temp_dir(), &name);
        drop(folder.lock().unwrap());
        Scratch(folder)
    }

    fn runs(&self) -> Runs<'_> {
        Runs { folder: &self.0, boot: BOOT }
    }

    /// A run that has added pages. It lives until the file is dropped.
    fn run(&self, name: &str, others: u64, added: u64, is_done: bool, boot: &str) -> File {
        let path = self.0.note(&format!("{name}.run"));
        let mut file = open(&path, OpenOptions::new().create_new(true)).unwrap();
        lock(&file, libc::LOCK_EX).unwrap();
        let (boot, user) = (boot.to_owned(), User::this_process().unwrap());
        let mut note =
            Note { boot, node: 0, page_bytes: PAGE, others, added, is_done: false, user };
        writeln!(file, "{}", serde_json::to_string(&note).unwrap()).unwrap();
        if is_done {
            note.is_done = true;
            writeln!(file, "{}", serde_json::to_string(&note).unwrap()).unwrap();
        }
        file
    }

    /// The total after the next command has begun.
    fn settled(&self, total: u64) -> u64 {
        let machine = Fake(Cell::new(total));
        let _turn = self.0.lock().unwrap();
        self.runs().settle(&machine);
        machine.0.get()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(self.0.path()).unwrap();
    }
}

/// A child that another test is starting may have the file open for a moment longer.
fn ended(run: File) {
    lock(&run, libc::LOCK_UN).unwrap();
}

#[test]
fn an_ended_run_is_taken_back_and_a_living_one_is_not() {
    let scratch = Scratch::new("living");
    let living = scratch.run("1-0", 10, 4, true, BOOT);
    ended(scratch.run("2-0", 10, 8, true, BOOT));
    assert_eq!(scratch.settled(22), 14);
    assert_eq!(scratch.settled(14), 14, "what was taken back is noted no more");
    ended(living);
    assert_eq!(scratch.settled(14), 10);
}

#[test]
fn what_others_have_reserved_meanwhile_stays() {
    for (total, left) in [
        (18, 10),
        // Somebody has reserved more.
        (118, 110),
        // Somebody has written a smaller number, which stays.
        (17, 17),
        (10, 10),
        (0, 0),
    ] {
        let scratch = Scratch::new(&format!("others-{total}"));
        ended(scratch.run("1-0", 10, 8, true, BOOT));
        assert_eq!(scratch.settled(total), left, "of {total}");
        assert_eq!(scratch.settled(100), 100, "the note has gone");
    }
}

#[test]
fn runs_that_ended_in_any_order_are_told_apart_from_others() {
    let scratch = Scratch::new("order");
    // The first one had added 4 when the second one added 8, and has put them back since.
    ended(scratch.run("2-0", 10, 8, true, BOOT));
    assert_eq!(scratch.settled(18), 10);
    let first = scratch.run("1-0", 10, 4, true, BOOT);
    ended(scratch.run("2-0", 10, 8, true, BOOT));
    ended(first);
    assert_eq!(scratch.settled(22), 10);
}

#[test]
fn a_run_that_was_killed_while_it_added_leaves_some_or_none() {
    for (total, left) in [(10, 10), (13, 10), (18, 10), (21, 13)] {
        let scratch = Scratch::new(&format!("adding-{total}"));
        ended(scratch.run("1-0", 10, 8, false, BOOT));
        assert_eq!(scratch.settled(total), left, "of {total}");
    }
}

#[test]
fn notes_of_another_boot_and_torn_ones_count_for_nothing() {
    let scratch = Scratch::new("boot");
    ended(scratch.run("1-0", 0, 8, true, "an earlier one"));
    fs::write(scratch.0.note("2-0.run"), "{\"boot\":\"this one\",\"no").unwrap();
    assert_eq!(scratch.settled(18), 18);
    assert!(scratch.runs().all().is_empty());
}
