//! The demand on writers: how many writes per second, and to which rows.

use crate::random::SplitMix64;
use std::fmt;
use std::str::FromStr;

/// The hot part of skewed writes is one part of this many: 3.125 %.
const HOT_PART: usize = 32;
/// Highest rate that can be asked for by number.
const HIGHEST_PER_S: u64 = 1_000_000_000;

/// How many writes per second the user asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// This many; 0 means no writer.
    PerSecond(u64),
    /// As many as it can.
    Max,
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Rate, String> {
        if text.eq_ignore_ascii_case("max") {
            return Ok(Rate::Max);
        }
        let expected = "expected a number such as 0, 500, 100k or 10m, or max";
        let (digits, unit) = match text.char_indices().last() {
            Some((at, 'k' | 'K')) => (&text[..at], 1e3),
            Some((at, 'm' | 'M')) => (&text[..at], 1e6),
            _ => (text, 1.0),
        };
        if !digits.starts_with(|first: char| first.is_ascii_digit() || first == '.') {
            return Err(expected.to_owned());
        }
        let rate = digits.parse::<f64>().map_err(|_| expected.to_owned())? * unit;
        if rate > HIGHEST_PER_S as f64 {
            return Err(format!(
                "no writer reaches more than {HIGHEST_PER_S} writes per second; use max"
            ));
        }
        if rate.fract() != 0.0 {
            return Err(format!("{rate} is not a whole number of writes per second"));
        }
        Ok(Rate::PerSecond(rate as u64))
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Rate::Max => f.write_str("max"),
            Rate::PerSecond(rate) => rate.fmt(f),
        }
    }
}

impl Rate {
    /// The share of one writer, if `writers` writers reach this rate together.
    pub fn part(self, writer: usize, writers: usize) -> Rate {
        let until = |rate: u64, writer: usize| rate * writer as u64 / writers as u64;
        match self {
            Rate::PerSecond(rate) => Rate::PerSecond(until(rate, writer + 1) - until(rate, writer)),
            Rate::Max => Rate::Max,
        }
    }
}

/// How writes spread over the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Each row is written equally often.
    Uniform,
    /// 3 of 4 writes go to the first of 32 parts, the others to the rest of the rows.
    Skewed,
}

impl Rows {
    /// The row of the next write.
    pub(super) fn choose(self, random: &mut SplitMix64, rows: usize) -> usize {
        let hot = rows / HOT_PART;
        match self {
            // Fewer than 32 rows have no hot part.
            _ if hot == 0 => random.below(rows),
            Rows::Uniform => random.below(rows),
            Rows::Skewed if random.below(4) < 3 => random.below(hot),
            Rows::Skewed => hot + random.below(rows - hot),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_parse() {
        for (text, rate) in [
            ("0", Rate::PerSecond(0)),
            ("500", Rate::PerSecond(500)),
            ("100k", Rate::PerSecond(100_000)),
            ("1.5M", Rate::PerSecond(1_500_000)),
            ("10m", Rate::PerSecond(10_000_000)),
            ("max", Rate::Max),
            ("MAX", Rate::Max),
        ] {
            assert_eq!(text.parse(), Ok(rate), "{text}");
        }
        for text in
            ["", "k", "-1", "+1", "nan", "inf", "1g", "ten", "0.5", "2000m", "1e400", "1 k", "١"]
        {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
    }

    #[test]
    fn skewed_writes_go_to_the_first_part_three_times_in_four() {
        let mut random = SplitMix64(1);
        let (rows, tries) = (640, 100_000);
        let mut seen = vec![0u32; rows];
        for _ in 0..tries {
            seen[Rows::Skewed.choose(&mut random, rows)] += 1;
        }
        let hot = f64::from(seen[..rows / HOT_PART].iter().sum::<u32>()) / f64::from(tries);
        assert!((0.74..0.76).contains(&hot), "{hot}");
        assert!(seen.iter().all(|times| *times > 0), "every row is written");
        for rows in [1, 31] {
            assert!((0..100).all(|_| Rows::Skewed.choose(&mut random, rows) < rows));
        }
    }
}
