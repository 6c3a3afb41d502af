//! How property tests choose their cases: many, and the same ones each time, so that a verdict is a
//! function of the code.

use proptest::test_runner::{Config, RngSeed};

/// The seed, unless `PROPTEST_RNG_SEED` gives another one.
const SEED: u64 = 4711;

/// Settings for `cases` cases, or for `under_miri` ones where every access is checked. A case that
/// fails is printed, and written to no file.
pub(crate) fn cases(cases: u32, under_miri: u32) -> Config {
    let config = Config::default();
    let rng_seed = match config.rng_seed {
        RngSeed::Random => RngSeed::Fixed(SEED),
        chosen => chosen,
    };
    let cases = if cfg!(miri) { under_miri } else { cases };
    Config { cases, rng_seed, failure_persistence: None, ..config }
}
