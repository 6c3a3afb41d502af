//! The fastest way to copy between two nodes, found by a trial.
//!
//! Which loop is fastest depends on the machine: where memory is slow, streaming stores win, and
//! where it is fast, the C library's `memcpy` in small steps. Before the first attempt a trial
//! copies pieces of the job's own pages into the frames that they will get. So it needs no memory
//! of its own, and measures the memory, the page tables and the CPUs of the job. Its copies are not
//! used: each area is copied again. A trial is made once for each pair of nodes, and takes some
//! milliseconds.
//!
//! The pieces lie apart and each is copied once, so a trial finds none of them in a cache because
//! of an earlier piece. The methods take turns, and the median of each counts.

use std::collections::BTreeMap;

use super::legs::Leg;
use super::site::Site;
use crate::backend::{Backend, CopyLoop, CopyMethod};
use crate::job::report::CopyUse;
use crate::pool;
use crate::sync::monotonic_ns;
use crate::units::{BASE_PAGE, NodeId};

/// The methods from which a trial chooses. The steps of the streaming loop make no difference.
pub const COPY_METHODS: [CopyMethod; 4] = [
    if cfg!(target_arch = "x86_64") {
        CopyMethod { by: CopyLoop::FourPages, step_bytes: 1 << 20 }
    } else {
        CopyMethod { by: CopyLoop::Memcpy, step_bytes: 512 << 10 }
    },
    CopyMethod { by: CopyLoop::Memcpy, step_bytes: 64 << 10 },
    CopyMethod { by: CopyLoop::Memcpy, step_bytes: 256 << 10 },
    CopyMethod { by: CopyLoop::Memcpy, step_bytes: 1 << 20 },
];
/// Bytes of a piece: as large as an area, and the largest step fits in twice.
const PIECE: usize = 2 << 20;
/// How often each method is tried.
const ROUNDS: usize = 4;
/// After this time no further round begins.
const BUDGET_NS: u64 = 12_000_000;
/// Bytes that a trial copies.
const TRIAL_BYTES: usize = ROUNDS * COPY_METHODS.len() * PIECE;
/// Bytes that jobs move between two nodes before a trial is worth its time: eight times as much as
/// it copies.
const WORTH_BYTES: u64 = 8 * TRIAL_BYTES as u64;
/// The least gain by which another method replaces the default: one part in this many. Less is
/// noise.
const GAIN: u64 = 32;

/// The memory in which a trial copies: the start of both ranges, and their length.
#[derive(Clone, Copy)]
struct Ground {
    src: usize,
    dst: usize,
    len: usize,
}

impl Ground {
    /// The start of each of the [`TRIAL_BYTES`] / [`PIECE`] pieces, which lie far apart.
    fn piece(&self, number: usize) -> usize {
        number * (self.len / (ROUNDS * COPY_METHODS.len()) / BASE_PAGE * BASE_PAGE)
    }
}

/// The state of a pair of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// No trial yet: the bytes that the default method has moved, or was to move.
    Bytes(u64),
    /// The winner of the trial.
    Method(CopyMethod),
}

/// The state of all pairs of nodes.
struct Choices(std::sync::Mutex<BTreeMap<(NodeId, NodeId), Known>>);

/// The choices of this process.
static CHOICES: Choices = Choices(std::sync::Mutex::new(BTreeMap::new()));

impl Choices {
    /// The method for a job that moves `bytes` bytes between two nodes, and whether a trial has
    /// found it. `trial` makes the trial; `None` if this job has no memory for one. Meanwhile no
    /// other job makes one.
    fn choose(
        &self,
        pair: (NodeId, NodeId),
        bytes: u64,
        trial: Option<impl FnOnce() -> CopyMethod>,
    ) -> (CopyMethod, bool) {
        let mut all = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let known = all.entry(pair).or_insert(Known::Bytes(0));
        if let Known::Bytes(before) = *known {
            let bytes = before.saturating_add(bytes);
            *known = match trial.filter(|_| bytes >= WORTH_BYTES) {
                Some(trial) => Known::Method(trial()),
                None => Known::Bytes(bytes),
            };
        }
        match *known {
            Known::Bytes(_) => (CopyMethod::DEFAULT, false),
            Known::Method(method) => (method, true),
        }
    }
}

/// Which method is fastest: `rounds` has the times of [`COPY_METHODS`] in each round. The default
/// stays unless another method is clearly faster.
fn fastest(rounds: &[[u64; COPY_METHODS.len()]]) -> CopyMethod {
    let median = |method: usize| {
        let mut times: Vec<u64> = rounds.iter().map(|times| times[method]).collect();
        times.sort_unstable();
        // Of an even number the lower one, because a disturbance only makes copies slower.
        times[(times.len() - 1) / 2]
    };
    let best = (0..COPY_METHODS.len()).filter(|_| !rounds.is_empty()).min_by_key(|at| median(*at));
    let Some(best) = best else { return CopyMethod::DEFAULT };
    match COPY_METHODS.iter().position(|method| *method == CopyMethod::DEFAULT) {
        Some(at) if median(best) > median(at) - median(at) / GAIN => CopyMethod::DEFAULT,
        _ => COPY_METHODS[best],
    }
}

/// Chooses a method for each leg, and returns them with the uses for the report. If the job is
/// large enough, it makes a trial for each pair of nodes that has had none. Called before the first
/// attempt, on the CPUs of the destination. `may_try`: whether it may make trials.
pub(super) fn choose_methods(site: &Site, may_try: bool) -> (Vec<CopyMethod>, Vec<CopyUse>) {
    if !site.backend().is_host_memory() {
        // A modelled machine has one way to copy.
        return (vec![CopyMethod::DEFAULT; site.legs.len()], Vec::new());
    }
    let pair = |leg: &Leg| (leg.from.node(), leg.to.node());
    let mut pairs: BTreeMap<(NodeId, NodeId), (u64, Option<&Leg>)> = BTreeMap::new();
    for leg in &site.legs {
        let (bytes, longest) = pairs.entry(pair(leg)).or_default();
        *bytes += site.bytes_of(leg) as u64;
        if longest.is_none_or(|longest| site.bytes_of(leg) > site.bytes_of(longest)) {
            *longest = Some(leg);
        }
    }
    let uses: Vec<CopyUse> = pairs
        .into_iter()
        .map(|(pair, (bytes, longest))| {
            let ground = longest.filter(|_| may_try).and_then(|leg| ground(site, leg));
            let trial = ground.map(|ground| move || trial(site.backend(), &ground));
            let (method, tried) = CHOICES.choose(pair, bytes, trial);
            CopyUse { from: pair.0, to: pair.1, method, tried }
        })
        .collect();
    let method = |leg: &Leg| {
        let of = uses.iter().find(|of| (of.from, of.to) == pair(leg));
        of.map_or(CopyMethod::DEFAULT, |of| of.method)
    };
    (site.legs.iter().map(method).collect(), uses)
}

/// Where a trial can copy pages of a leg; `None` if the leg is too short, or its pages cannot
/// be read where they are.
fn ground(site: &Site, leg: &Leg) -> Option<Ground> {
    let len = site.bytes_of(leg);
    if len < TRIAL_BYTES || !leg.attributes.prot.readable() {
        return None;
    }
    let new = pool::Run { first: leg.to_frame, frames: leg.pages.end - leg.pages.start };
    leg.to.mend_torn(new).ok()?;
    let src = site.region(leg.item).addr(leg.pages.start);
    Some(Ground { src, dst: leg.to.0.alias_of(leg.to_frame), len })
}

/// Copies pieces by all methods in turns, and returns the fastest one.
fn trial(backend: &dyn Backend, ground: &Ground) -> CopyMethod {
    let skips_memcpy = pageleap_sys::memcpy_is_watched();
    let began = monotonic_ns();
    let mut rounds = Vec::with_capacity(ROUNDS);
    while rounds.len() < ROUNDS && monotonic_ns() - began < BUDGET_NS {
        let round = rounds.len();
        let mut times = [u64::MAX; COPY_METHODS.len()];
        for turn in 0..COPY_METHODS.len() {
            let at = (round + turn) % COPY_METHODS.len();
            if skips_memcpy && COPY_METHODS[at].by == CopyLoop::Memcpy {
                continue;
            }
            let piece = ground.piece(round * COPY_METHODS.len() + turn);
            let (dst, src) = (ground.dst + piece, ground.src + piece);
            let start = monotonic_ns();
            // SAFETY: the source is pages that the job has claimed, and that their user may
            // read. The destination is the alias of the frames that they will get, which only
            // this job accesses. Frames that stay unused are zeroed before their next use.
            unsafe { backend.copy(dst, src, PIECE, COPY_METHODS[at]) };
            times[at] = monotonic_ns() - start;
        }
        rounds.push(times);
    }
    fastest(&rounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMCPY: usize = 2;

    #[test]
    fn the_method_with_the_lowest_median_wins_if_it_is_clearly_faster() {
        let times = |default, memcpy| {
            let mut times = [1000; COPY_METHODS.len()];
            (times[0], times[MEMCPY]) = (default, memcpy);
            times
        };
        // x86-64 begins with this method.
        let chosen = |rounds: &[_]| {
            let method = fastest(rounds);
            COPY_METHODS.iter().position(|of| *of == method)
        };
        if CopyMethod::DEFAULT != COPY_METHODS[0] {
            return;
        }
        assert_eq!(chosen(&[]), Some(0), "nothing was seen");
        assert_eq!(chosen(&[times(500, 400)]), Some(MEMCPY));
        assert_eq!(chosen(&[times(500, 490)]), Some(0), "that is noise");
        assert_eq!(chosen(&[times(400, 500)]), Some(0));
        // One disturbed copy and one lucky copy change nothing.
        let rounds = [times(500, 400), times(500, 9000), times(500, 410), times(10, 400)];
        assert_eq!(chosen(&rounds), Some(MEMCPY));
        // A method that was not tried never wins.
        assert_eq!(chosen(&[times(500, u64::MAX)]), Some(0));
    }

    #[test]
    fn a_trial_is_made_once_for_a_pair_and_only_when_it_is_worth_it() {
        let choices = Choices(std::sync::Mutex::new(BTreeMap::new()));
        let (here, there) = ((NodeId(0), NodeId(1)), (NodeId(1), NodeId(0)));
        let winner = COPY_METHODS[MEMCPY];
        let choose = |pair, bytes, trial: Option<CopyMethod>| {
            choices.choose(pair, bytes, trial.map(|method| move || method))
        };
        let default = (CopyMethod::DEFAULT, false);
        assert_eq!(choose(here, WORTH_BYTES - 2, Some(winner)), default, "too little");
        assert_eq!(choose(here, 1, Some(winner)), default, "still too little, together");
        assert_eq!(choose(here, u64::MAX, None), default, "no place for a trial");
        assert_eq!(choose(here, 1, Some(winner)), (winner, true), "enough by now");
        let again = choices.choose(here, u64::MAX, Some(|| panic!("a second trial")));
        assert_eq!(again, (winner, true));
        assert_eq!(choose(here, 1, None), (winner, true));
        assert_eq!(choose(there, 1, Some(winner)), default, "another pair");
        assert_eq!(choose(there, WORTH_BYTES, Some(COPY_METHODS[1])), (COPY_METHODS[1], true));
        assert_eq!(choose(here, 1, None), (winner, true));
    }

    #[test]
    fn pieces_of_a_trial_lie_apart_and_inside() {
        for len in [TRIAL_BYTES, TRIAL_BYTES + BASE_PAGE, 1 << 30, (1 << 30) + 7 * BASE_PAGE] {
            let ground = Ground { src: 0, dst: 0, len };
            let starts: Vec<usize> =
                (0..ROUNDS * COPY_METHODS.len()).map(|number| ground.piece(number)).collect();
            assert!(starts.windows(2).all(|pair| pair[0] + PIECE <= pair[1]), "{len}");
            assert!(starts.last().unwrap() + PIECE <= len, "{len}");
            assert!(starts.iter().all(|start| start.is_multiple_of(BASE_PAGE)));
        }
    }

    // No step is longer than a piece.
    const _: () = {
        let mut at = 0;
        while at < COPY_METHODS.len() {
            assert!(COPY_METHODS[at].step_bytes <= PIECE);
            at += 1;
        }
    };
}
