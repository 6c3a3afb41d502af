//! Mixes of queries, choices of keys, and the thread that runs queries.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use rand_distr::{Distribution, Zipf};

use super::keys::{GAP_BITS, is_right, loaded_key, value};
use super::ways::{Moved, Mover};
use crate::Error;
use crate::olc::{Broken, Inserted, Tree};
use crate::phase::{Phase, Stage, Times};
use crate::random::{SplitMix64, scattered};

/// The exponent of Zipfian keys, as in YCSB.
const EXPONENT: f64 = 0.99;
/// The most entries of a scan, as in YCSB.
const LONGEST_SCAN: usize = 100;
/// Queries for each one that is timed.
const SAMPLED: u64 = 16;
/// Queries between two looks at the flag to stop, without a migration.
const LOOK_EVERY: u64 = 32;
/// A turn ends when a thread has recorded this number of updates (128 MB), however long its window is.
const MOST_UPDATES: usize = 1 << 24;
/// The parts of a whole in which shares are drawn.
const WHOLE: usize = 10_000;

/// A mix of queries, by its letter in YCSB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// 50 % look-ups, 50 % updates.
    A,
    /// Look-ups only.
    C,
    /// 95 % scans of 1 to 100 entries, 5 % insertions.
    E,
}

impl Mix {
    /// The mixes of the paper.
    pub const ALL: [Mix; 3] = [Mix::A, Mix::C, Mix::E];

    /// Whether it changes the tree.
    pub(super) fn writes(self) -> bool {
        self != Mix::C
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl FromStr for Mix {
    type Err = String;

    fn from_str(text: &str) -> Result<Mix, String> {
        let found = Mix::ALL.into_iter().find(|mix| mix.to_string().eq_ignore_ascii_case(text));
        found.ok_or_else(|| "expected a, c or e".to_owned())
    }
}

/// The share of migration queries among all queries, in parts of 10,000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u16);

impl Share {
    /// The shares of the paper: 0.01, 25 and 50 %.
    pub const ALL: [Share; 3] = [Share(1), Share(2500), Share(5000)];

    /// The middle one.
    pub const MEDIUM: Share = Share::ALL[1];

    /// From this share on, each thread migrates at least once.
    const SURE: Share = Share(100);
}

impl fmt::Display for Share {
    /// As in the paper: other queries, and migrations, in percent.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |part: u16| f64::from(part) / 100.0;
        write!(f, "{}/{}", percent(WHOLE as u16 - self.0), percent(self.0))
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Share, String> {
        let percent = text.trim_end_matches('%').parse::<f64>().ok();
        let parts = percent.map(|percent| (percent * 100.0).round());
        match parts.filter(|parts| (1.0..=WHOLE as f64).contains(parts)) {
            Some(parts) => Ok(Share(parts as u16)),
            None => Err("expected a percentage from 0.01 to 100".to_owned()),
        }
    }
}

/// The order to a thread.
pub(super) struct Orders<'a> {
    pub tree: Tree<'a>,
    /// Keys that are loaded.
    pub keys: u64,
    pub mix: Mix,
    /// The share of migration queries.
    pub share: Share,
    /// The code that migrates; `None`: no migrations.
    pub mover: Option<Mover<'a>>,
    /// The number of the thread, and how many there are.
    pub nth: usize,
    pub threads: usize,
    pub seed: u64,
    pub stage: &'a Stage,
}

/// The results of a thread.
#[derive(Debug)]
pub(super) struct Worked {
    /// Queries that are no migrations.
    pub queries: u64,
    pub elapsed: Duration,
    /// Answers that were wrong.
    pub wrong: u64,
    /// Times of some queries.
    pub times: Times,
    /// The place of a loaded key for each of its updates.
    pub updated: Vec<u64>,
    /// Keys that were inserted.
    pub inserted: Vec<u64>,
    pub migrations: u64,
    pub moved: Moved,
    /// Why it ended early.
    pub failed: Option<Error>,
}

impl Worked {
    /// Whether nothing has failed, and no answer was wrong.
    fn is_well(&self) -> bool {
        self.failed.is_none() && self.wrong == 0
    }
}

/// A thread that runs queries.
struct Worker<'a> {
    tree: Tree<'a>,
    keys: u64,
    zipf: Zipf<f64>,
    random: SplitMix64,
    found: Vec<(u64, u64)>,
    nth: u64,
    threads: u64,
    /// Insertions so far.
    insertions: u64,
    /// Whether the tree takes no further entry.
    is_full: bool,
    /// One query of this many is timed.
    timed: u64,
    worked: Worked,
}

/// Runs queries until it is stopped, or something fails.
pub(super) fn run(orders: Orders<'_>) -> Worked {
    let Orders { tree, keys, mix, share, mut mover, nth, threads, seed, stage } = orders;
    let mut worker = Worker {
        tree,
        keys,
        zipf: Zipf::new(keys as f64, EXPONENT).expect("there are keys, and the exponent is valid"),
        random: SplitMix64(seed.wrapping_add(nth as u64).wrapping_mul(0xd1b5_4a32_d192_ed03)),
        found: Vec::with_capacity(LONGEST_SCAN),
        nth: nth as u64,
        threads: threads as u64,
        insertions: 0,
        is_full: false,
        timed: if share >= Share::SURE { 1 } else { SAMPLED },
        worked: Worked {
            queries: 0,
            elapsed: Duration::ZERO,
            wrong: 0,
            times: Times::new(),
            updated: Vec::new(),
            inserted: Vec::new(),
            migrations: 0,
            moved: Moved::default(),
            failed: None,
        },
    };
    let began = Instant::now();
    // However short the window is on a busy machine, both kinds of queries have a time.
    worker.query(mix);
    if let Some(mover) = &mut mover
        && share >= Share::SURE
    {
        worker.worked.failed = worker.migrate(mover).err();
    }
    while !stage.stopped() && worker.may_go_on() {
        for _ in 0..LOOK_EVERY {
            if !worker.may_go_on() {
                break;
            }
            if let Some(mover) = &mut mover
                && worker.random.below(WHOLE) < usize::from(share.0)
            {
                let migrated = worker.migrate(mover);
                if migrated.is_err() || stage.stopped() {
                    worker.worked.failed = migrated.err();
                    break;
                }
                continue;
            }
            worker.query(mix);
        }
    }
    if !worker.may_go_on() {
        stage.stop();
    }
    worker.worked.elapsed = began.elapsed();
    worker.worked
}

impl Worker<'_> {
    /// Whether nothing is wrong, and there is room for further records and entries.
    fn may_go_on(&self) -> bool {
        self.worked.is_well() && !self.is_full && self.worked.updated.len() < MOST_UPDATES
    }

    fn migrate(&mut self, mover: &mut Mover<'_>) -> Result<(), Error> {
        let moved = mover.migrate(&mut self.random)?;
        self.worked.migrations += 1;
        self.worked.moved.add(moved);
        Ok(())
    }

    fn query(&mut self, mix: Mix) {
        self.worked.queries += 1;
        let answered = if (self.worked.queries - 1).is_multiple_of(self.timed) {
            let began = Instant::now();
            let answered = self.ask(mix);
            self.worked.times.add(Phase::During, began.elapsed());
            answered
        } else {
            self.ask(mix)
        };
        self.worked.wrong += u64::from(answered != Ok(true));
    }

    /// A query. Returns whether its answer was right.
    fn ask(&mut self, mix: Mix) -> Result<bool, Broken> {
        let choice = self.random.below(100);
        match mix {
            Mix::C => self.look_up(),
            Mix::A if choice < 50 => self.look_up(),
            Mix::A => self.update(),
            Mix::E if choice < 95 => self.scan(),
            Mix::E => self.insert(),
        }
    }

    /// The place of a key. The most frequent ones are scattered over all places.
    fn place(&mut self) -> u64 {
        let rank = self.zipf.sample(&mut self.random) as u64;
        scattered(rank) % self.keys
    }

    fn look_up(&mut self) -> Result<bool, Broken> {
        let key = loaded_key(self.place());
        Ok(self.tree.get(key)?.is_some_and(|found| is_right(key, found)))
    }

    fn update(&mut self) -> Result<bool, Broken> {
        let place = self.place();
        let key = loaded_key(place);
        let before = self.tree.update(key, |value| value.wrapping_add(1))?;
        if before.is_some() {
            self.worked.updated.push(place);
        }
        Ok(before.is_some_and(|before| is_right(key, before)))
    }

    fn scan(&mut self) -> Result<bool, Broken> {
        let first = loaded_key(self.place());
        let most = 1 + self.random.below(LONGEST_SCAN);
        self.found.clear();
        self.tree.scan(first, most, &mut self.found)?;
        let found = &self.found;
        // Only the last leaf may end a scan early.
        let left = self.keys - (first >> GAP_BITS) + 1;
        Ok(found.first().is_some_and(|(key, _)| *key == first)
            && found.len() as u64 >= left.min(most as u64)
            && found.is_sorted_by(|(one, _), (other, _)| one < other)
            && has_no_gap(found)
            && found.iter().all(|(key, value)| is_right(*key, *value)))
    }

    /// Inserts a key somewhere between two loaded ones. No other thread has the same.
    fn insert(&mut self) -> Result<bool, Broken> {
        let unique = self.insertions * self.threads + self.nth + 1;
        let place = self.random.below(self.keys as usize) as u64;
        if unique >= 1 << GAP_BITS {
            self.is_full = true;
            return self.scan();
        }
        self.insertions += 1;
        let key = loaded_key(place) + unique;
        match self.tree.insert(key, value(key, 0))? {
            Inserted::New => self.worked.inserted.push(key),
            Inserted::Exists => return Ok(false),
            Inserted::Full => {
                self.is_full = true;
                return self.scan();
            }
        }
        Ok(true)
    }
}

/// Whether no key that was loaded is missing between those that were.
fn has_no_gap(found: &[(u64, u64)]) -> bool {
    let mut loaded = found.iter().map(|(key, _)| *key).filter(|key| key % (1 << GAP_BITS) == 0);
    let Some(mut last) = loaded.next() else { return false };
    loaded.all(|key| std::mem::replace(&mut last, key) + (1 << GAP_BITS) == key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scan_that_skips_a_loaded_key_is_wrong() {
        let found = |places: &[u64]| -> Vec<(u64, u64)> {
            let keys = places.iter().flat_map(|place| [loaded_key(*place), loaded_key(*place) + 5]);
            keys.map(|key| (key, value(key, 0))).collect()
        };
        assert!(has_no_gap(&found(&[7, 8, 9])));
        assert!(!has_no_gap(&found(&[7, 9])));
    }

    #[test]
    fn shares_and_mixes_have_the_names_of_the_paper() {
        let names = Share::ALL.map(|share| share.to_string());
        assert_eq!(names, ["99.99/0.01", "75/25", "50/50"]);
        assert_eq!("0.01".parse(), Ok(Share::ALL[0]));
        assert_eq!("25%".parse(), Ok(Share::MEDIUM));
        for text in ["0", "101", "-5", "0.001", "many", "nan"] {
            assert!(text.parse::<Share>().is_err(), "{text}");
        }
        assert_eq!("e".parse(), Ok(Mix::E));
        assert!("b".parse::<Mix>().is_err());
    }

    #[test]
    fn a_few_keys_get_most_queries() {
        let (keys, tries) = (10_000, 50_000);
        let zipf = Zipf::new(keys as f64, EXPONENT).unwrap();
        let mut random = SplitMix64(1);
        let ranks: Vec<f64> = (0..tries).map(|_| zipf.sample(&mut random)).collect();
        assert!(ranks.iter().all(|rank| (1.0..=keys as f64).contains(rank)));
        let among = |most: f64| ranks.iter().filter(|rank| **rank <= most).count() as f64;
        // The sums of 1 / rank^0.99: the first 100 of 10,000 ranks have 5.29 of 10.22.
        let share = among(100.0) / f64::from(tries);
        assert!((0.50..0.55).contains(&share), "{share}");
    }
}
