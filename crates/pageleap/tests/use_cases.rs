//! Two uses of leaps in a database, as the examples `two_tiers` and `external_sort` have them:
//! they verify all their data. On a machine with several nodes the slow tier is the node that is
//! farthest.

#![expect(clippy::duplicate_mod, reason = "each example is a program of its own")]

#[expect(dead_code, reason = "an example has a command line, too")]
#[path = "../examples/external_sort.rs"]
mod external_sort;
#[path = "../examples/common/tiers.rs"]
mod tiers;
#[expect(dead_code, reason = "an example has a command line, too")]
#[path = "../examples/two_tiers.rs"]
mod two_tiers;

#[test]
fn blocks_find_their_tier_and_find_it_again_when_others_become_hot() {
    let [fast, slow] = tiers::tiers().unwrap();
    let setting = two_tiers::Setting { bytes: 32 << 20, operations: 50_000, fast, slow };
    let outcome = two_tiers::run(setting).unwrap();
    assert_eq!(outcome.wrong, 0, "{outcome:?}");
    assert!(outcome.promoted > outcome.demoted && outcome.demoted > 0, "{outcome:?}");
    // A quarter of the blocks gets more than four fifths of the operations by Zipf's law, and one
    // that is placed without regard to use would get a quarter.
    let [first, found, changed, last] = outcome.fast_shares;
    assert!(first == 0.0 && found > 0.5 && changed < found && last > 0.5, "{outcome:?}");
}

#[test]
fn a_sort_that_spills_to_the_slow_tier_loses_nothing() {
    let [fast, slow] = tiers::tiers().unwrap();
    let (bytes, fast_bytes) = (32 << 20, 8 << 20);
    let setting = external_sort::Setting { bytes, fast_bytes, fast, slow };
    let outcome = external_sort::run(setting).unwrap();
    assert_eq!((outcome.wrong, outcome.runs), (0, 8), "{outcome:?}");
    // Each byte is spilled twice, as a run and as output, and fetched once.
    assert_eq!((outcome.spilled, outcome.fetched), (64 << 20, 32 << 20), "{outcome:?}");
}
