//! The file `target/xtask/passed`: which commit has passed the whole list of steps.
//!
//! Anyone who is about to hand in a commit can see whether *this* commit has passed. So the file is
//! written only after a whole list, never after `--only`, and only if HEAD did not move meanwhile.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::commands::output;

/// What a run tests: a commit, and whether the working tree is that commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tested {
    commit: String,
    clean: bool,
}

impl Tested {
    /// Asks git about the working tree at `root`.
    pub fn now(root: &Path) -> Result<Tested> {
        Ok(Tested {
            commit: git(root, &["rev-parse", "HEAD"])?,
            // Untracked files count: cargo compiles tests that nobody has committed.
            clean: git(root, &["status", "--porcelain"])?.is_empty(),
        })
    }
}

fn git(root: &Path, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("git");
    // A checkout that is mounted into a container often belongs to another user.
    command.args(["-c", "safe.directory=*"]).args(arguments).current_dir(root);
    output(command)
}

/// Writes the file below `target`: hash and `clean` or `dirty` on the first line, then a line for
/// everything that was not run. `before` is what [`Tested::now`] said when the run began. A tree
/// that has changed meanwhile is an error, because nobody knows which of its states has passed.
pub fn write(root: &Path, target: &Path, before: &Tested, not_run: &[String]) -> Result<()> {
    let after = Tested::now(root)?;
    ensure!(
        after == *before,
        "the working tree has changed since the run began, so that no commit has passed"
    );
    let state = if before.clean { "clean" } else { "dirty" };
    let mut text = format!("{} {state}\n", before.commit);
    not_run.iter().for_each(|what| text += &format!("not run: {what}\n"));
    let file = target.join("xtask").join("passed");
    fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn a_commit_has_passed_only_if_the_tree_stood_still() {
        let scratch = Scratch::new("passed");
        let (root, target) = (scratch.path().join("root"), scratch.path().join("target"));
        fs::create_dir_all(&root).unwrap();
        fs::create_dir_all(target.join("xtask")).unwrap();
        let commit = |name: &str| {
            fs::write(root.join(name), name).unwrap();
            git(&root, &["add", "."]).unwrap();
            let identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"];
            git(&root, &[&identity[..], &["commit", "--quiet", "-m", name]].concat()).unwrap();
        };
        let passed = || fs::read_to_string(target.join("xtask/passed")).ok();
        git(&root, &["init", "--quiet"]).unwrap();
        commit("one");

        let first = Tested::now(&root).unwrap();
        write(&root, &target, &first, &["step nodes: no QEMU".to_owned()]).unwrap();
        let hash = git(&root, &["rev-parse", "HEAD"]).unwrap();
        assert_eq!(passed().unwrap(), format!("{hash} clean\nnot run: step nodes: no QEMU\n"));

        commit("two");
        fs::remove_file(target.join("xtask/passed")).unwrap();
        assert!(write(&root, &target, &first, &[]).is_err(), "HEAD has moved");
        assert_eq!(passed(), None);

        fs::write(root.join("new"), "").unwrap();
        let second = Tested::now(&root).unwrap();
        write(&root, &target, &second, &[]).unwrap();
        assert!(passed().unwrap().ends_with(" dirty\n"));
    }
}
