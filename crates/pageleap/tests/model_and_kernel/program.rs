//! Random programs: their steps, how they are generated, and how they are printed.

use std::fmt;
use std::ops::Range;

use pageleap::BASE_PAGE;
use pageleap::backend::FailMode;
use proptest::prelude::*;

use crate::{POOLS, REGIONS, STEPS};

/// One step of a program. Pools and regions have numbered places. At the start all places are
/// occupied but the one of the last pool. A step on a missing region does nothing. Parts are in
/// bytes.
#[derive(Clone, Debug)]
pub enum Step {
    NewPool {
        pool: usize,
        pages: usize,
    },
    NewRegion {
        region: usize,
        pool: usize,
        bytes: usize,
    },
    Reserve {
        region: usize,
        bytes: usize,
    },
    Grow {
        region: usize,
        bytes: usize,
        pool: usize,
    },
    Back {
        region: usize,
        part: Range<usize>,
        pool: usize,
    },
    Discard {
        region: usize,
        part: Range<usize>,
    },
    DropRegion {
        region: usize,
    },
    Write {
        region: usize,
        part: Range<usize>,
        value: u64,
    },
    Set {
        region: usize,
        part: Range<usize>,
        what: Attribute,
    },
    Migrate {
        moves: Vec<Move>,
        area_bytes: usize,
        threads: usize,
        hold: bool,
        follow: bool,
        end: End,
    },
}

/// A range of a job, and the pool where it goes.
#[derive(Clone, Debug)]
pub struct Move {
    pub region: usize,
    pub part: Range<usize>,
    pub to: usize,
}

/// An attribute that a user may set on pages.
#[derive(Clone, Copy, Debug)]
pub enum Attribute {
    NoAccess,
    ReadOnly,
    ReadWrite,
    DontFork,
    DoFork,
    DontDump,
    DoDump,
    Lock,
    Unlock,
}

/// How a job ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum End {
    Wait,
    Cancel,
    DropJob,
    DropRegion,
}

/// A program. Its debug format is Rust code.
#[derive(Clone)]
pub struct Program {
    /// The number of the call that fails, and how it fails.
    pub refused: Option<(u64, FailMode)>,
    pub steps: Vec<Step>,
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Program {{ refused: {:?}, steps: vec![", self.refused)?;
        self.steps.iter().try_for_each(|step| writeln!(f, "    {step:?},"))?;
        write!(f, "] }}")
    }
}

fn a_pool() -> impl Strategy<Value = usize> {
    0..POOLS
}

fn a_region() -> impl Strategy<Value = usize> {
    prop_oneof![1 => Just(0), 1 => 0..REGIONS]
}

fn bytes() -> impl Strategy<Value = usize> {
    prop_oneof![20 => (4..10usize).prop_map(|pages| pages * BASE_PAGE), 1 => 0..5 * BASE_PAGE]
}

fn a_part() -> impl Strategy<Value = Range<usize>> {
    let stray = prop_oneof![60 => Just(0), 1 => Just(8usize)];
    (0..4usize, prop_oneof![60 => 1..3usize, 1 => Just(0)], stray)
        .prop_map(|(first, pages, stray)| first * BASE_PAGE + stray..(first + pages) * BASE_PAGE)
}

fn a_job() -> impl Strategy<Value = Step> {
    let moves =
        (a_region(), a_part(), a_pool()).prop_map(|(region, part, to)| Move { region, part, to });
    let end = prop_oneof![
        8 => Just(End::Wait),
        2 => Just(End::Cancel),
        1 => Just(End::DropJob),
        1 => Just(End::DropRegion)
    ];
    let area =
        prop_oneof![30 => (1..4usize).prop_map(|pages| pages * BASE_PAGE), 1 => 0..2 * BASE_PAGE];
    let threads = prop_oneof![30 => 1..3usize, 1 => Just(0)];
    let moves = prop::collection::vec(moves, 1..3);
    (moves, area, threads, any::<(bool, bool)>(), end).prop_map(
        |(moves, area_bytes, threads, (hold, follow), end)| Step::Migrate {
            moves,
            area_bytes,
            threads,
            hold,
            follow,
            end,
        },
    )
}

fn a_step() -> impl Strategy<Value = Step> {
    use Attribute::*;
    // Attributes that only one other step undoes are listed twice.
    let attributes = [
        NoAccess, ReadOnly, ReadWrite, ReadWrite, DontFork, DoFork, DontDump, DoDump, Lock, Lock,
        Unlock, Unlock,
    ];
    let new_pool = (a_pool(), 6..20usize).prop_map(|(pool, pages)| Step::NewPool { pool, pages });
    let new_region = (a_region(), a_pool(), bytes())
        .prop_map(|(region, pool, bytes)| Step::NewRegion { region, pool, bytes });
    let reserve = (a_region(), bytes()).prop_map(|(region, bytes)| Step::Reserve { region, bytes });
    let grow = (a_region(), bytes(), a_pool()).prop_map(|(region, bytes, pool)| Step::Grow {
        region,
        bytes,
        pool,
    });
    let back = (a_region(), a_part(), a_pool()).prop_map(|(region, part, pool)| Step::Back {
        region,
        part,
        pool,
    });
    let discard = (a_region(), a_part()).prop_map(|(region, part)| Step::Discard { region, part });
    let write = (a_region(), a_part(), 1..u64::MAX).prop_map(|(region, part, value)| Step::Write {
        region,
        part,
        value,
    });
    let set = (a_region(), a_part(), prop::sample::select(attributes.to_vec()))
        .prop_map(|(region, part, what)| Step::Set { region, part, what });
    prop_oneof![
        1 => new_pool,
        2 => new_region,
        1 => reserve,
        2 => grow,
        3 => back,
        3 => discard,
        1 => a_region().prop_map(|region| Step::DropRegion { region }),
        6 => write,
        8 => set,
        8 => a_job(),
    ]
}

/// Programs in which no call is refused.
pub fn programs() -> impl Strategy<Value = Program> {
    prop::collection::vec(a_step(), 1..STEPS).prop_map(|steps| Program { refused: None, steps })
}

/// Programs in which one call fails. Their jobs have one thread and run to their end, so that each
/// call has the same number on both machines.
pub fn refused_programs() -> impl Strategy<Value = Program> {
    /// The last call that may fail. Most programs make more calls.
    const LATEST: u64 = 80;
    let mode = prop::sample::select(vec![FailMode::Before, FailMode::After, FailMode::Partial]);
    (programs(), 1..LATEST, mode).prop_map(|(mut program, call, mode)| {
        for step in &mut program.steps {
            if let Step::Migrate { threads, end, .. } = step {
                (*threads, *end) = (1, End::Wait);
            }
        }
        Program { refused: Some((call, mode)), ..program }
    })
}
