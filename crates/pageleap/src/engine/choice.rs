//! Which engine a job gets, and which engine moves an area of it. Pure: the caller makes the system
//! calls.

use std::fmt;
use std::str::FromStr;

use super::{Engine, Hold, Profile, TrackerNeed};
use crate::backend::{Ability, Call, Errno};
use crate::error::{Error, closed_pagemap};
use crate::units::PageSize;

/// After this many refused calls an area is moved by [another engine](stand_in), which depends on
/// fewer calls.
const MOST_REFUSALS: u32 = 2;

/// Which engine to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// Chooses the best engine that works here, for each area anew. While contention is low (few
    /// threads wait in windows), it is an engine that closes areas before it copies them
    /// ([`Engine::StopCopy`], or [`Engine::Mprotect`] with writers held); otherwise it is one that
    /// tracks writes. If an engine is permitted under which no system call fails, no other kind is
    /// used. While another process traces the job's threads (`ptrace`), it is one whose
    /// [readers never wait](Engine::readers_wait). The rules and their reasons: `docs/protocol.md`,
    /// section 3.6.
    #[default]
    Auto,
    /// Uses this engine, or fails with an error. Areas that it cannot move stay, *failed*; so do
    /// all areas while the job is traced, if the engine makes readers wait. One exception: an area
    /// that nobody may write is moved by [`Engine::Mprotect`] whichever engine is asked for,
    /// because there are no writes to track and it costs least. Reports name it.
    Only(Engine),
}

impl EngineChoice {
    /// All choices: [`EngineChoice::Auto`], then the engines in the order of [`Engine::ALL`].
    pub const ALL: [EngineChoice; Engine::ALL.len() + 1] = {
        let mut all = [EngineChoice::Auto; Engine::ALL.len() + 1];
        let mut at = 0;
        while at < Engine::ALL.len() {
            all[at + 1] = EngineChoice::Only(Engine::ALL[at]);
            at += 1;
        }
        all
    };

    /// The engine that is asked for by name; `None` for `auto`.
    pub fn forced(self) -> Option<Engine> {
        match self {
            EngineChoice::Auto => None,
            EngineChoice::Only(engine) => Some(engine),
        }
    }
}

impl From<Engine> for EngineChoice {
    fn from(engine: Engine) -> Self {
        EngineChoice::Only(engine)
    }
}

impl FromStr for EngineChoice {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|choice| choice.to_string() == s);
        found.ok_or_else(|| Error::BadArgument {
            what: "engine",
            reason: format!("no engine is called `{s}`"),
            remedy: format!("use {}", Self::ALL.map(|choice| choice.to_string()).join(", ")),
        })
    }
}

impl fmt::Display for EngineChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.forced() {
            None => f.write_str("auto"),
            Some(engine) => engine.fmt(f),
        }
    }
}

/// The engine for a job.
#[derive(Debug)]
pub(crate) struct Chosen<T> {
    pub(crate) engine: Engine,
    /// The reason for this engine, in words.
    pub(crate) reason: String,
    /// The tracker that was opened for it, if it needs one.
    pub(crate) tracker: Option<T>,
    /// The engine for areas with low contention, and the tracker that was opened for it.
    pub(crate) at_low_contention: Option<(Engine, Option<T>)>,
}

/// Chooses the engine for a job: the one that is asked for, or the first in `auto`'s order that
/// moves such pages and whose tracker `open` opens. Engines that raise signals are left out if
/// `handler` says that the library's SIGSEGV handler is not in place. They are also left out if an
/// engine without signals is permitted and only lacks a resource at the moment (`EMFILE`, `ENFILE`,
/// `ENOMEM`): then the result is an error.
pub(crate) fn for_job<T>(
    choice: EngineChoice,
    page: PageSize,
    handler: &Result<(), Error>,
    mut open: impl FnMut(Ability) -> Result<T, (Call, Errno)>,
) -> Result<Chosen<T>, Error> {
    let forced = choice.forced();
    let mut why_not = Vec::new();
    let mut short = None;
    for (engine, is_again) in to_try(forced, page) {
        if is_again && short.is_none() {
            continue;
        }
        if let Some((engine, reason)) = short.take_if(|_| forced.is_none() && engine.signals()) {
            return Err(short_of(engine, reason));
        }
        if let (true, Err(error)) = (engine.signals(), handler) {
            if forced.is_some() || engine == Engine::LAST_RESORT {
                return Err(error.clone());
            }
            why_not.push(format!("the engine {engine} needs pageleap's SIGSEGV handler"));
            continue;
        }
        let found = try_engine(engine, page, &mut open);
        match found {
            Ok(tracker) => {
                let mut at_low_contention = None;
                let other = engine.at_low_contention(page);
                if let Some(other) = other.filter(|_| forced.is_none()) {
                    match try_engine(other, page, &mut open) {
                        Ok(tracker) => at_low_contention = Some((other, tracker)),
                        Err(refused) => why_not.push(refused.reason),
                    }
                }
                let reason = match forced {
                    Some(_) => "asked for".into(),
                    None if why_not.is_empty() => "follows writes without signals".into(),
                    None => why_not.join("; "),
                };
                return Ok(Chosen { engine, reason, tracker, at_low_contention });
            }
            Err(Unusable { reason, remedy, .. }) if forced.is_some() => {
                return Err(Error::EngineRefused {
                    engine: engine.name(),
                    reason,
                    remedy: remedy.into(),
                });
            }
            Err(Unusable { reason, is_short, .. }) => {
                if is_short {
                    short.get_or_insert((engine, reason.clone()));
                }
                if !why_not.contains(&reason) {
                    why_not.push(reason);
                }
            }
        }
    }
    unreachable!("the last resort needs nothing that could be refused")
}

/// The engines to try, in order; `true` marks a second try of an engine without signals, because a
/// shortage may be over by then.
fn to_try(forced: Option<Engine>, page: PageSize) -> impl Iterator<Item = (Engine, bool)> {
    let all = Engine::preferred(page);
    let of = move |signals| all.into_iter().filter(move |engine| engine.signals() == signals);
    let again = of(false).filter(move |_| forced.is_none()).map(|engine| (engine, true));
    let first = |engine| (engine, false);
    let all = of(false).map(first).chain(again).chain(of(true).map(first));
    all.filter(move |(one, _)| forced.is_none_or(|forced| forced == *one))
}

/// The error if no engine without signals could be opened because of a shortage. An engine that
/// raises signals would work, but is not taken: the process may use one under which no system call
/// fails.
fn short_of(engine: Engine, reason: String) -> Error {
    let remedy = "raise the limit (open files: ulimit -n; memory: that of the cgroup), or ask for an \
                  engine that needs less by name (precopy-protect, mprotect), which lets system calls \
                  of the program fail"
        .into();
    Error::EngineRefused { engine: engine.name(), reason, remedy }
}

/// The reason why an engine cannot work.
struct Unusable {
    reason: String,
    remedy: &'static str,
    /// Whether a resource is short that may be available later. If the engine is not permitted or
    /// not known, the kernel reports that first.
    is_short: bool,
}

/// Opens the tracker that an engine needs, or returns why it cannot work, and the remedy.
fn try_engine<T>(
    engine: Engine,
    page: PageSize,
    open: &mut impl FnMut(Ability) -> Result<T, (Call, Errno)>,
) -> Result<Option<T>, Unusable> {
    if !engine.moves(page) {
        let which = match engine.moves(PageSize::Huge2M) {
            true => "4k, thp and 2m",
            false => "4k and thp",
        };
        let reason = format!("the engine {engine} moves pages of {which}, not {page}");
        let remedy = "let the engine be chosen (auto)";
        return Err(Unusable { reason, remedy, is_short: false });
    }
    let need = engine.profile().tracker.zip(engine.needs_for(page));
    let Some((TrackerNeed { words, .. }, ability)) = need else {
        return Ok(None);
    };
    open(ability).map(Some).map_err(|(call, errno)| {
        let reason = format!("the engine {engine} needs {words}, and {call} failed with {errno}");
        // The remedy is not `pageleap doctor`: it is another process, which may be able to open the
        // file.
        if let Some((why, remedy)) = closed_pagemap(call, errno) {
            let reason = format!("{reason}: {why}; {remedy}");
            let remedy = "or let the engine be chosen (auto)";
            return Unusable { reason, remedy, is_short: false };
        }
        let remedy = "`pageleap doctor` tells how to allow it; or let the engine be chosen (auto)";
        Unusable { reason, remedy, is_short: is_shortage(errno) }
    })
}

/// Whether a call failed for lack of descriptors or kernel memory, which may be available later.
pub(crate) fn is_shortage(errno: Errno) -> bool {
    matches!(errno.0, libc::EMFILE | libc::ENFILE | libc::ENOMEM)
}

/// The facts about an area and its job that select the engine of an attempt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Situation {
    /// The job's engine.
    pub(crate) engine: Engine,
    /// Whether areas that this engine cannot move may be moved by another one.
    pub(crate) may_fall_back: bool,
    /// The [engine](stand_in) for such areas, if it can be used.
    pub(crate) stand_in: Option<Engine>,
    /// Whether the job has a tracker and, if the engine needs it, a thread that reads the tracker's
    /// messages.
    pub(crate) has_tracker: bool,
    /// Whether the kernel has refused to exchange page tables, and will do so again.
    pub(crate) exchange_unsupported: bool,
    /// How many attempts at this area have ended with a refused call.
    pub(crate) refused: u32,
    /// Whether the user may write to the area.
    pub(crate) writable: bool,
    pub(crate) page: PageSize,
    /// Whether its writers are to be held from the start.
    pub(crate) hold: bool,
    /// The job's engine for areas with low contention.
    pub(crate) at_low_contention: Option<Engine>,
    /// Whether contention for this area is low (few threads would wait in its window).
    pub(crate) low_contention: bool,
}

/// The engine that moves an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AreaEngine {
    pub(crate) engine: Engine,
    pub(crate) why: Why,
}

/// The reason why an area is moved by its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Why {
    /// It is the job's engine.
    AsChosen,
    /// The job's engine was refused, so another one takes its place.
    NotFollowed,
    /// Contention is low, so the area is closed before it is copied.
    LowContention,
    /// Contention is high: too many threads would wait if the area was closed before it is copied.
    Contended,
    /// A tracer (`ptrace`) follows the job's threads, and readers would wait with the job's engine.
    Traced,
    /// Another reason, in words, from which the job concludes nothing.
    Because(&'static str),
}

impl Why {
    /// Writers were held from the start.
    pub(crate) const HELD: Why = Why::Because(
        "writers were held back: as asked for, or because copies beside them had to be made again \
         too often",
    );
    /// Nobody may write to the area.
    pub(crate) const READ_ONLY: Why =
        Why::Because("nobody may write there, so there is nothing to follow");
}

/// The stand-in: the engine for areas that the job's engine cannot move. An engine under which no
/// system call fails is replaced only by another such engine. A program that relies on that promise
/// does not repeat failed calls, and may block SIGSEGV.
pub(crate) fn stand_in(engine: Engine) -> Option<Engine> {
    if engine.signals() {
        return Some(Engine::LAST_RESORT);
    }
    let whole = |one: &Engine| !one.signals() && !one.profile().needs_exchange;
    Engine::ALL.into_iter().find(whole).filter(|one| *one != engine)
}

/// Chooses the engine for one attempt on an area.
pub(crate) fn for_area(situation: &Situation) -> AreaEngine {
    let Situation { engine, may_fall_back, has_tracker, exchange_unsupported, .. } = *situation;
    let Situation { refused, writable, page, hold, at_low_contention, low_contention, .. } =
        *situation;
    let profile = engine.profile();
    let given_up = profile.needs_exchange && exchange_unsupported || refused >= MOST_REFUSALS;
    let last_resort = |why| AreaEngine { engine: Engine::LAST_RESORT, why };
    if !writable {
        return last_resort(Why::READ_ONLY);
    }
    if profile.tracker.is_some() && (!has_tracker || may_fall_back && given_up) {
        return instead(situation);
    }
    let other = at_low_contention
        .filter(|other| refused == 0 && !(other.profile().needs_exchange && exchange_unsupported));
    if let Some(other) = other {
        let why = if low_contention { Why::LowContention } else { Why::Contended };
        return AreaEngine { engine: if low_contention { other } else { engine }, why };
    }
    match profile.hold {
        Hold::Areas | Hold::Pages if hold => AreaEngine { engine, why: Why::HELD },
        Hold::HugetlbByLastResort if hold && page.is_hugetlb() => last_resort(Why::HELD),
        _ => AreaEngine { engine, why: Why::AsChosen },
    }
}

/// The engine for an area that the job's engine cannot move. Without another engine, the job's own
/// is tried until the area is given up.
fn instead(situation: &Situation) -> AreaEngine {
    let Situation { engine, stand_in, has_tracker, exchange_unsupported, .. } = *situation;
    // An engine that closes areas first has a tracker of its own, whose messages no thread has to
    // read.
    let closing = situation.at_low_contention.filter(|other| {
        let Profile { signals, needs_exchange, .. } = *other.profile();
        !(signals || needs_exchange && exchange_unsupported)
    });
    let other = if has_tracker { stand_in.or(closing) } else { closing.or(stand_in) };
    let why = if other.is_some() { Why::NotFollowed } else { Why::AsChosen };
    AreaEngine { engine: other.unwrap_or(engine), why }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    const CALM: Situation = Situation {
        engine: Engine::LAST_RESORT,
        may_fall_back: true,
        stand_in: None,
        has_tracker: true,
        exchange_unsupported: false,
        refused: 0,
        writable: true,
        page: PageSize::Base,
        hold: false,
        at_low_contention: None,
        low_contention: false,
    };

    #[test]
    fn readers_go_on_while_the_stand_in_moves_an_area_and_system_calls_stay_whole() {
        for engine in Engine::ALL.into_iter().filter(|engine| engine.readers_wait()) {
            let other = stand_in(engine).unwrap();
            assert!(!other.readers_wait() && !other.signals(), "{other}");
            assert!([PageSize::Base, PageSize::Thp].into_iter().all(|page| other.moves(page)));
        }
    }

    /// All engines that need something.
    fn demanding() -> impl Iterator<Item = Engine> {
        Engine::ALL.into_iter().filter(|engine| engine.needs().is_some())
    }

    #[test]
    fn engines_that_raise_signals_are_left_out_without_the_handler() {
        let taken = Err(Error::EngineRefused {
            engine: "mprotect",
            reason: "another handler".into(),
            remedy: String::new(),
        });
        for page in [PageSize::Base, PageSize::Huge2M] {
            let auto = for_job(EngineChoice::Auto, page, &taken, |_| Ok(())).unwrap();
            assert!(!auto.engine.signals());
            let refused = for_job(EngineChoice::Auto, page, &taken, |_| {
                Err::<(), _>((Call::OpenTracker, Errno(libc::EPERM)))
            });
            assert!(refused.unwrap_err().to_string().contains("another handler"));
        }
        for engine in Engine::ALL.into_iter().filter(|engine| engine.moves(PageSize::Base)) {
            let asked = for_job(engine.into(), PageSize::Base, &taken, |_| Ok(()));
            assert_eq!(asked.is_ok(), !engine.signals(), "{engine}");
        }
    }

    #[test]
    fn auto_takes_the_first_engine_whose_tracker_opens() {
        let works = |_| Ok(());
        let auto = for_job(EngineChoice::Auto, PageSize::Base, &Ok(()), works).unwrap();
        assert_eq!((auto.engine, auto.tracker), (Engine::ALL[0], Some(())));
        assert_eq!(auto.reason, "follows writes without signals");
        for engine in Engine::ALL {
            let only = |ability| {
                let opens = Some(ability) == engine.needs();
                opens.then_some(()).ok_or((Call::OpenTracker, Errno(libc::EPERM)))
            };
            let found = for_job(EngineChoice::Auto, PageSize::Base, &Ok(()), only).unwrap();
            assert_eq!((found.engine, found.tracker.is_some()), (engine, engine.needs().is_some()));
            for before in Engine::ALL.into_iter().take_while(|before| *before != engine) {
                assert!(found.reason.contains(before.name()), "{}", found.reason);
            }
            let asked = for_job(engine.into(), PageSize::Base, &Ok(()), works).unwrap();
            assert_eq!((asked.engine, &*asked.reason), (engine, "asked for"));
            let refused = for_job::<()>(engine.into(), PageSize::Base, &Ok(()), |_| {
                Err((Call::OpenTracker, Errno(libc::EPERM)))
            });
            assert_eq!(refused.is_err(), engine.needs().is_some(), "{refused:?}");
        }
        for engine in Engine::ALL {
            let asked = for_job(engine.into(), PageSize::Huge2M, &Ok(()), works);
            assert_eq!(asked.is_ok(), engine.moves(PageSize::Huge2M), "{asked:?}");
        }
    }

    #[test]
    fn an_area_is_moved_by_the_engine_of_its_job_unless_that_is_refused() {
        for engine in Engine::ALL {
            let calm = Situation { engine, ..CALM };
            let at = |situation: Situation| for_area(&situation);
            assert_eq!(at(calm), AreaEngine { engine, why: Why::AsChosen });
            assert_eq!(
                at(Situation { writable: false, hold: true, ..calm }),
                AreaEngine { engine: Engine::LAST_RESORT, why: Why::READ_ONLY }
            );
            let once = at(Situation { refused: MOST_REFUSALS - 1, ..calm });
            assert_eq!(once.why, Why::AsChosen);
        }
        for engine in demanding() {
            let stand_in = Some(Engine::LAST_RESORT);
            let calm = Situation { engine, stand_in, ..CALM };
            let fallen = AreaEngine { engine: Engine::LAST_RESORT, why: Why::NotFollowed };
            let twice = Situation { refused: MOST_REFUSALS, hold: true, ..calm };
            assert_eq!(for_area(&twice), fallen);
            assert_eq!(for_area(&Situation { has_tracker: false, ..calm }), fallen);
            let forced = Situation { may_fall_back: false, hold: false, ..twice };
            assert_eq!(for_area(&forced).engine, engine);
            let apart = Situation { exchange_unsupported: true, ..calm };
            assert_eq!(for_area(&apart) == fallen, engine.profile().needs_exchange);
        }
    }

    /// In each situation that a job can meet.
    #[test]
    fn an_engine_that_keeps_system_calls_whole_is_replaced_by_such_a_one_or_by_none() {
        let flags = [false, true];
        for engine in Engine::ALL.into_iter().filter(|engine| !engine.signals()) {
            assert!(stand_in(engine).is_none_or(|other| !other.signals()));
            for bits in 0..1 << 7 {
                let [has, apart, hold, low_contention, huge, opened, fewer] =
                    [0, 1, 2, 3, 4, 5, 6].map(|bit| flags[bits >> bit & 1]);
                let page = if huge { PageSize::Huge2M } else { PageSize::Base };
                for refused in 0..4 {
                    let by = for_area(&Situation {
                        engine,
                        stand_in: stand_in(engine).filter(|_| opened),
                        has_tracker: has,
                        exchange_unsupported: apart,
                        refused,
                        page,
                        hold,
                        at_low_contention: engine.at_low_contention(page).filter(|_| fewer),
                        low_contention,
                        ..CALM
                    });
                    assert!(!by.engine.signals(), "{engine} {bits:b} {refused}: {by:?}");
                }
            }
        }
        for engine in Engine::ALL.into_iter().filter(|engine| engine.signals()) {
            assert_eq!(stand_in(engine), Some(Engine::LAST_RESORT));
        }
    }

    #[test]
    fn what_the_jobs_engine_cannot_move_is_moved_by_the_next_that_can() {
        let (engine, closing) = (Engine::Precopy, Engine::StopCopy);
        let other = stand_in(engine);
        let job = Situation { engine, stand_in: other, at_low_contention: Some(closing), ..CALM };
        let by = |situation: Situation| {
            let AreaEngine { engine, why } = for_area(&situation);
            (engine, why == Why::NotFollowed)
        };
        let twice = Situation { refused: MOST_REFUSALS, ..job };
        assert_eq!(by(twice), (Engine::WpSync, true));
        assert_eq!(by(Situation { stand_in: None, ..twice }), (closing, true));
        let alone = Situation { stand_in: None, at_low_contention: None, ..twice };
        assert_eq!(by(alone), (engine, false), "it is tried until it is given up");
        // Without a thread that reads messages only the engine works that needs none.
        let unserved = Situation { has_tracker: false, ..job };
        assert_eq!(by(unserved), (closing, true));
        // Without exchanges neither of the two works.
        let apart = Situation { exchange_unsupported: true, ..job };
        assert_eq!(by(apart), (Engine::WpSync, true));
        assert_eq!(by(Situation { stand_in: None, ..apart }), (engine, false));
    }

    /// A process that may use an engine which lets no system call fail does not get another one
    /// because it has too many open files at the moment.
    #[test]
    fn a_shortage_is_an_error_and_no_reason_for_signals() {
        for (errno, page) in [libc::EMFILE, libc::ENFILE, libc::ENOMEM]
            .into_iter()
            .flat_map(|errno| [PageSize::Base, PageSize::Huge2M].map(|page| (errno, page)))
        {
            let short = |_| Err::<(), _>((Call::OpenTracker, Errno(errno)));
            let error = for_job(EngineChoice::Auto, page, &Ok(()), short).unwrap_err();
            let Error::EngineRefused { reason, .. } = error else { panic!("{error}") };
            assert!(reason.contains(&Errno(errno).to_string()), "{reason}");
            // A shortage that is over a moment later is none.
            let whole = |one: &Engine| !one.signals() && one.moves(page);
            let mut refusals = Engine::ALL.into_iter().filter(whole).count();
            let soon = |_| match refusals.checked_sub(1) {
                Some(left) => {
                    refusals = left;
                    Err((Call::OpenTracker, Errno(errno)))
                }
                None => Ok(()),
            };
            let chosen = for_job(EngineChoice::Auto, page, &Ok(()), soon).unwrap();
            assert!(!chosen.engine.signals(), "{chosen:?}");
        }
        // If some engine works, a shortage that the others met does not matter.
        let only_last = |ability| match ability {
            Ability::HoldWriters => Ok(()),
            _ => Err((Call::OpenTracker, Errno(libc::EMFILE))),
        };
        let chosen = for_job(EngineChoice::Auto, PageSize::Base, &Ok(()), only_last).unwrap();
        assert_eq!(chosen.engine, Engine::WpSync);
    }

    #[test]
    fn auto_opens_what_it_needs_while_few_threads_wait_and_does_without() {
        let works = |ability| Ok(ability);
        for page in [PageSize::Base, PageSize::Thp, PageSize::Huge2M, PageSize::Huge1G] {
            let chosen = for_job(EngineChoice::Auto, page, &Ok(()), works).unwrap();
            let other = chosen.engine.at_low_contention(page);
            assert_eq!(other.is_some(), page != PageSize::Huge1G, "{page}");
            assert_eq!(chosen.at_low_contention, other.map(|other| (other, other.needs_for(page))));
            let asked = for_job(chosen.engine.into(), page, &Ok(()), works).unwrap();
            assert_eq!(asked.at_low_contention, None, "nothing else was asked for");
        }
        let first = Engine::ALL[0];
        let other = first.at_low_contention(PageSize::Base).unwrap();
        let only_first = |ability| {
            let opens = Some(ability) != other.needs();
            opens.then_some(()).ok_or((Call::OpenTracker, Errno(libc::EMFILE)))
        };
        let chosen = for_job(EngineChoice::Auto, PageSize::Base, &Ok(()), only_first).unwrap();
        assert_eq!((chosen.engine, chosen.at_low_contention), (first, None));
        assert!(chosen.reason.contains(other.name()), "{}", chosen.reason);
    }

    #[test]
    fn areas_for_which_few_threads_wait_are_closed_first() {
        let pages = [PageSize::Base, PageSize::Huge2M];
        let mut pairs = Vec::new();
        for (page, engine) in pages.into_iter().flat_map(|page| Engine::ALL.map(|e| (page, e))) {
            let Some(other) = engine.at_low_contention(page) else { continue };
            pairs.push((page, engine, other));
            let few = Situation {
                engine,
                page,
                at_low_contention: Some(other),
                low_contention: true,
                ..CALM
            };
            let at = |situation: Situation| for_area(&situation);
            assert_eq!(at(few), AreaEngine { engine: other, why: Why::LowContention });
            let many = Situation { low_contention: false, ..few };
            assert_eq!(at(many), AreaEngine { engine, why: Why::Contended });
            // An area that was refused once is tried as it always was.
            assert_eq!(at(Situation { refused: 1, ..few }).why, Why::AsChosen);
            assert_eq!(at(Situation { writable: false, ..few }).why, Why::READ_ONLY);
            let apart = at(Situation { exchange_unsupported: true, ..few });
            assert_eq!(apart.why == Why::LowContention, !other.profile().needs_exchange);
        }
        let (base, huge) = (PageSize::Base, PageSize::Huge2M);
        let wanted = [
            (base, Engine::Precopy, Engine::StopCopy),
            (base, Engine::PrecopyProtect, Engine::Mprotect),
            (huge, Engine::WpSync, Engine::StopCopy),
        ];
        assert_eq!(pairs, wanted);
    }

    /// Kernels differ in their abilities. Only with the last two engines may a system call fail.
    #[test]
    fn hugetlb_pages_are_stopped_and_copied_where_nothing_better_opens() {
        let only = |wanted: Ability| {
            move |ability| {
                let opens = ability == wanted;
                opens.then_some(()).ok_or((Call::OpenTracker, Errno(libc::EINVAL)))
            }
        };
        let engine = |page, open: &dyn Fn(Ability) -> Result<(), (Call, Errno)>| {
            let chosen = for_job(EngineChoice::Auto, page, &Ok(()), open).unwrap();
            (chosen.engine, chosen.at_low_contention.map(|(engine, _)| engine))
        };
        // Linux 6.1: no write-protection that is whole.
        let holds = only(Ability::HoldHugetlb);
        assert_eq!(engine(PageSize::Huge2M, &holds), (Engine::StopCopy, None));
        assert_eq!(engine(PageSize::Huge1G, &holds), (Engine::LAST_RESORT, None));
        // The tracker for base pages is of no use.
        assert_eq!(engine(PageSize::Huge2M, &only(Ability::Hold)), (Engine::LAST_RESORT, None));
        let both = |ability| holds(ability).or_else(|_| only(Ability::HoldWriters)(ability));
        assert_eq!(engine(PageSize::Huge2M, &both), (Engine::WpSync, Some(Engine::StopCopy)));
        assert_eq!(engine(PageSize::Huge1G, &both), (Engine::WpSync, None));
    }

    #[test]
    fn writers_are_held_back_as_the_engine_can() {
        for (page, engine) in [PageSize::Base, PageSize::Huge2M]
            .into_iter()
            .flat_map(|page| Engine::ALL.map(|e| (page, e)))
        {
            let found = for_area(&Situation { engine, page, hold: true, ..CALM });
            let (wanted, why) = match engine.profile().hold {
                Hold::Areas | Hold::Pages => (engine, Why::HELD),
                Hold::HugetlbByLastResort if page.is_hugetlb() => (Engine::LAST_RESORT, Why::HELD),
                Hold::No | Hold::HugetlbByLastResort => (engine, Why::AsChosen),
            };
            assert_eq!(found, AreaEngine { engine: wanted, why });
        }
    }
}
