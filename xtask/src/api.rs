//! The public interface of the libraries, listed in a file beside each, so that a change of it is
//! seen in review: `cargo xtask api` writes the files, and a test keeps them current.
//!
//! The list is made of the sources. The compiler's own description, rustdoc's JSON, would be more
//! exact, but its format changes with the toolchain and needs an unstable option: on a machine with
//! a newer compiler the test would fail without a change of the interface. What the list does not
//! see: auto traits, what a type is behind the name that the source uses, and what macros make (a
//! call of a macro between items is listed as it stands).

mod crate_tree;
mod outline;

use std::path::Path;

use anyhow::Result;

use crate::commands::Workspace;
use crate::files::{read, write};
use crate_tree::CrateTree;

/// The folders of the crates whose interface other projects program against.
const CRATES: [&str; 2] = ["crates/pageleap", "crates/alloc"];

/// The list, in the folder of its crate.
const FILE: &str = "public-api.txt";

/// Writes the lists anew, or, with `check`, says whether they are current.
pub fn run(workspace: &Workspace, check: bool) -> Result<bool> {
    let mut current = true;
    for folder in CRATES {
        let folder = workspace.root.join(folder);
        let (file, wanted) = (folder.join(FILE), text(&folder)?);
        let found = read(&file).unwrap_or_default();
        if !check && found != wanted {
            write(&file, &wanted)?;
        } else if check && found != wanted {
            println!("{}", difference(&found, &wanted));
            println!("{} is out of date; type: cargo xtask api", file.display());
            current = false;
        } else {
            println!("{} is current", file.display());
        }
    }
    Ok(current)
}

/// The list of a crate.
fn text(folder: &Path) -> Result<String> {
    let tree = CrateTree::load(&folder.join("src"))?;
    let list = outline::of(&tree)?;
    Ok(format!(
        "// What other crates can use of this one. Written by: cargo xtask api\n\
         // A change here is a change of the interface: say it in CHANGELOG.md.\n\n{list}"
    ))
}

/// The lines that only one of two texts has.
fn difference(found: &str, wanted: &str) -> String {
    let only = |mark: char, of: &str, other: &str| -> Vec<String> {
        let lines = of.lines().filter(|line| !other.lines().any(|one| one == *line));
        lines.map(|line| format!("{mark} {line}")).collect()
    };
    [only('-', found, wanted), only('+', wanted, found)].concat().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_are_current() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for folder in CRATES {
            let (found, wanted) =
                (read(&root.join(folder).join(FILE)).unwrap(), text(&root.join(folder)).unwrap());
            let difference = difference(&found, &wanted);
            assert!(found == wanted, "{folder}: type: cargo xtask api\n{difference}");
        }
    }
}
