//! How writers write: steadily, or in spells.
//!
//! A *spell* is a time in which a writer keeps its rate and its choice of rows. A steady load has
//! one spell without an end. A changing load has spells of random rates, rows and lengths, so that
//! pageleap cannot predict them, as with a user's program. The sequence depends only on the seed,
//! and follows the clock and not the leap. So all loads of one seed have the same spells, and leaps
//! by different engines can be compared.

use std::time::Duration;

use super::demand::{Rate, Rows};
use crate::random::SplitMix64;

/// Mean length of the spells of a changing load, chosen so that a leap of a gigabyte meets several.
pub const MEAN_SPELL: Duration = Duration::from_millis(30);
/// The rates of a changing load. Each spell has another rate than the one before.
const RATES: [Rate; 3] = [Rate::PerSecond(0), Rate::PerSecond(100_000), Rate::Max];

/// How writers write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// In one way all the time.
    Steady {
        /// Writes per second of all writers together.
        rate: Rate,
        /// Which words.
        rows: Rows,
    },
    /// In spells of random lengths ([`MEAN_SPELL`]): without writes, at 100,000 writes per second
    /// of all writers together, or at full speed, and with uniform or skewed rows.
    Changing,
}

/// A time in which a writer keeps its rate and its choice of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spell {
    /// Writes per second.
    pub rate: Rate,
    /// Which rows.
    pub rows: Rows,
    /// The time from the end of the previous spell; [`Duration::MAX`] if it does not end.
    pub length: Duration,
}

impl Spell {
    /// Whether nothing is to be written.
    pub fn is_quiet(self) -> bool {
        self.rate == Rate::PerSecond(0)
    }
}

/// The spells of one writer, one after the other.
#[derive(Debug)]
pub(super) struct Spells {
    pattern: Pattern,
    random: SplitMix64,
    /// Index of the last rate in [`RATES`]; `None` before the first spell.
    last: Option<usize>,
    /// Number of this writer, and how many writers there are.
    part: (usize, usize),
}

impl Spells {
    /// The spells of one writer out of `writers`. All writers of a seed change at the same time.
    pub fn new(pattern: Pattern, seed: u64, writer: usize, writers: usize) -> Spells {
        Spells { pattern, random: SplitMix64(seed), last: None, part: (writer, writers) }
    }

    /// Whether the rate changes.
    pub fn change(&self) -> bool {
        self.pattern == Pattern::Changing
    }

    /// The next spell.
    pub fn next(&mut self) -> Spell {
        let (writer, writers) = self.part;
        let (rate, rows, length) = match self.pattern {
            Pattern::Steady { rate, rows } => (rate, rows, Duration::MAX),
            Pattern::Changing => self.random_spell(),
        };
        Spell { rate: rate.part(writer, writers), rows, length }
    }

    fn random_spell(&mut self) -> (Rate, Rows, Duration) {
        let rate = match self.last {
            None => self.random.below(RATES.len()),
            Some(last) => (last + 1 + self.random.below(RATES.len() - 1)) % RATES.len(),
        };
        self.last = Some(rate);
        let rows = [Rows::Uniform, Rows::Skewed][self.random.below(2)];
        (RATES[rate], rows, self.random.exponential(MEAN_SPELL))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changing(seed: u64, writer: usize, writers: usize) -> Vec<Spell> {
        let mut spells = Spells::new(Pattern::Changing, seed, writer, writers);
        (0..3000).map(|_| spells.next()).collect()
    }

    #[test]
    fn spells_have_all_rates_and_rows_and_every_rate_differs_from_the_one_before() {
        let spells = changing(1, 0, 1);
        for rate in RATES {
            for rows in [Rows::Uniform, Rows::Skewed] {
                let of = |spell: &&Spell| (spell.rate, spell.rows) == (rate, rows);
                let share = spells.iter().filter(of).count() as f64 / spells.len() as f64;
                assert!((share - 1.0 / 6.0).abs() < 0.03, "{rate} {rows:?}: {share}");
            }
        }
        assert!(spells.windows(2).all(|pair| pair[0].rate != pair[1].rate));
        let mean = spells.iter().map(|spell| spell.length).sum::<Duration>() / 3000;
        assert!(mean.abs_diff(MEAN_SPELL) < MEAN_SPELL / 5, "{mean:?}");
    }

    #[test]
    fn the_seed_decides_and_all_writers_change_together() {
        assert_eq!(changing(1, 0, 1), changing(1, 0, 1));
        assert_ne!(changing(1, 0, 1), changing(2, 0, 1));
        for (one, other) in changing(3, 0, 2).into_iter().zip(changing(3, 1, 2)) {
            assert_eq!((one.length, one.rows), (other.length, other.rows));
            match (one.rate, other.rate) {
                (Rate::PerSecond(one), Rate::PerSecond(other)) => {
                    assert!([0, 100_000].contains(&(one + other)));
                }
                (one, other) => assert_eq!((one, other), (Rate::Max, Rate::Max)),
            }
        }
    }

    #[test]
    fn a_steady_load_has_one_spell() {
        let pattern = Pattern::Steady { rate: Rate::PerSecond(7), rows: Rows::Skewed };
        let mut spells = Spells::new(pattern, 1, 0, 1);
        let spell = spells.next();
        assert_eq!((spell.rate, spell.rows), (Rate::PerSecond(7), Rows::Skewed));
        assert_eq!((spell.length, spell.is_quiet()), (Duration::MAX, false));
        assert!(!spells.change());
    }
}
