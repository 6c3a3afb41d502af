//! The numbered claims of the protocol, and the mutants that break them.
//!
//! A claim is *numbered* if its paragraph or list item begins with a bold label of capital letters
//! and a number, such as `**P3. A committed copy is complete and current.**`. Each such claim is
//! named by a mutant, or a row of the document's table [`WITHOUT`] says why none can break it.

use super::{DOCUMENT, Mutant};
use crate::links::prose;

/// The head of the table of claims that no mutant breaks. A row has one claim, or several with
/// commas between them.
const WITHOUT: &str = "| claims without a mutant | why |";

/// A claim's label, and the number of its line.
type Numbered<'a> = (&'a str, usize);

/// The label with which a line begins, if it begins a numbered claim.
fn label(line: &str) -> Option<&str> {
    let (label, _) =
        line.strip_prefix("* ").unwrap_or(line).strip_prefix("**")?.split_once(". ")?;
    let number = label.trim_start_matches(|c: char| c.is_ascii_uppercase());
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    (is_number && number.len() < label.len()).then_some(label)
}

/// All numbered claims of a document.
fn numbered(document: &str) -> Vec<Numbered<'_>> {
    prose(document).filter_map(|(line, text)| Some((label(text)?, line))).collect()
}

/// The claims of which a document says why no mutant breaks them. A row without words gives no
/// reason.
fn reasons(document: &str) -> Vec<Numbered<'_>> {
    let rows = prose(document)
        .skip_while(|(_, text)| *text != WITHOUT)
        .skip(2)
        .take_while(|(_, text)| text.starts_with('|'));
    let cells = rows.filter_map(|(line, text)| {
        let (claims, why) = text.trim_matches('|').split_once('|')?;
        (!why.trim().is_empty()).then_some((line, claims))
    });
    cells
        .flat_map(|(line, claims)| claims.split(',').map(move |claim| (claim.trim(), line)))
        .collect()
}

/// Everything that is wrong with claims and mutants, each with its file and line. `place` says where
/// a row of the list stands.
pub fn problems(
    table: &[Mutant],
    document: &str,
    place: impl Fn(&Mutant) -> String,
) -> Vec<String> {
    let (claims, reasons) = (numbered(document), reasons(document));
    let has = |list: &[Numbered<'_>], claim: &str| list.iter().any(|(label, _)| *label == claim);
    let breaks = |claim: &str| table.iter().find(|mutant| mutant.claims.contains(&claim));
    let mut problems = Vec::new();
    for (index, (claim, line)) in claims.iter().enumerate() {
        if has(&claims[..index], claim) {
            problems.push(format!("{DOCUMENT}:{line}: another claim is called {claim}, too"));
        } else if breaks(claim).is_none() && !has(&reasons, claim) {
            problems.push(format!(
                "{DOCUMENT}:{line}: no mutant breaks {claim}, and the table of claims without a \
                 mutant does not say why"
            ));
        }
    }
    for (index, (claim, line)) in reasons.iter().enumerate() {
        if let Some(mutant) = breaks(claim) {
            let name = mutant.name;
            problems
                .push(format!("{DOCUMENT}:{line}: {claim} has a mutant, {name}: drop the reason"));
        }
        if !has(&claims, claim) {
            problems.push(format!("{DOCUMENT}:{line}: there is no claim {claim}"));
        }
        if has(&reasons[..index], claim) {
            problems.push(format!("{DOCUMENT}:{line}: {claim} has a reason already"));
        }
    }
    for mutant in table {
        let unknown = mutant.claims.iter().filter(|claim| !has(&claims, claim));
        problems.extend(unknown.map(|claim| {
            let (at, name) = (place(mutant), mutant.name);
            format!("{at}: {name}: {DOCUMENT} has no claim {claim}")
        }));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::super::Checker;
    use super::*;

    const ROW: Mutant = Mutant {
        name: "weak-cas",
        file: "src/state.rs",
        find: "a",
        replace: "b",
        why: "the freeze is not ordered",
        claims: &["S1", "PP2"],
        caught_by: Checker::Loom.fails(),
    };

    const TEXT: &str = "\
**S1. Exactly one succeeds.** And more.
* **PP2. No store lands.** See S1.
```
**S9. An example.**
```
**S10. Nothing is lost.**
**Ends.** No claim. **S3. Nor this.**
**S. Nor this.** **3. Nor this.**

| claims without a mutant | why |
|---|---|
| S10 | it follows from S1 |

| S1 | another table |
";

    fn found(table: &[Mutant], document: &str) -> Vec<String> {
        problems(table, document, |_| "rows.rs:7".into())
    }

    #[test]
    fn claims_and_reasons_are_found_with_their_lines() {
        assert_eq!(numbered(TEXT), [("S1", 1), ("PP2", 2), ("S10", 6)]);
        assert_eq!(reasons(TEXT), [("S10", 12)]);
        assert_eq!(found(&[ROW], TEXT), [""; 0]);
    }

    #[test]
    fn a_claim_without_a_mutant_or_a_reason_is_named() {
        let row = Mutant { claims: &["PP2"], ..ROW };
        let problem = found(&[row], TEXT);
        assert!(
            problem.len() == 1 && problem[0].starts_with("docs/protocol.md:1: "),
            "{problem:?}"
        );
        assert!(problem[0].contains("no mutant breaks S1"), "{problem:?}");
        // A row of the table without words is no reason.
        let problem = found(&[ROW], &TEXT.replace("it follows from S1", ""));
        assert!(
            problem.len() == 1 && problem[0].starts_with("docs/protocol.md:6: "),
            "{problem:?}"
        );
    }

    #[test]
    fn a_mutant_of_no_claim_is_named() {
        let row = Mutant { claims: &["S1", "PP2", "PP3"], ..ROW };
        assert_eq!(found(&[row], TEXT), ["rows.rs:7: weak-cas: docs/protocol.md has no claim PP3"]);
    }

    #[test]
    fn a_reason_that_nothing_needs_is_named() {
        let document = |claims: &str| TEXT.replace("| S10 |", claims);
        assert_eq!(
            found(&[ROW], &document("| S10, S1 |")),
            ["docs/protocol.md:12: S1 has a mutant, weak-cas: drop the reason"]
        );
        assert_eq!(
            found(&[ROW], &document("| S10, S11 |")),
            ["docs/protocol.md:12: there is no claim S11"]
        );
        assert_eq!(
            found(&[ROW], &document("| S10, S10 |")),
            ["docs/protocol.md:12: S10 has a reason already"]
        );
    }

    #[test]
    fn two_claims_of_one_name_are_named() {
        let document = TEXT.replace("**PP2.", "**S1.");
        let row = Mutant { claims: &["S1"], ..ROW };
        assert_eq!(
            found(&[row], &document),
            ["docs/protocol.md:2: another claim is called S1, too"]
        );
    }
}
