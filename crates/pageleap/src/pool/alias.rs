//! The state of each frame's alias. Pure bookkeeping: no system calls, no locks.
//!
//! The alias is the mapping through which a share reaches its frames. A free frame's alias is
//! `Filled`. While a frame is used, a migration may change its alias, and before the frame is free
//! again the share repairs the alias by the cheapest call that does.
//!
//! Words at the ends of arrows are states ([`AliasState`]), words on arrows are events
//! ([`AliasEvent`]):
//!
//! ```text
//!            TablesTaken                 Lent
//!   Filled --------------> Hollow --------------> Borrowed <------ Filled
//!     ^                      |    <--------------     |      Lent
//!     |                      |      TablesTaken       |
//!     +------- Mended -------+                        | Reclaimed
//!     |                                               v
//!     +------- Mended ---------------------------- Reclaimed
//!
//!   Filled, Hollow, Borrowed, Reclaimed --- Spoilt ----> Spoilt
//!   any state ----------------- Mapped ----> Filled
//!   any state ----------------- MapFailed -> Torn
//! ```
//!
//! Only the attempt to map it anew leads out of `Spoilt` and `Torn`: `Mapped` to `Filled`,
//! `MapFailed` to `Torn`.

use super::frames::Run;

/// The state of one frame's alias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AliasState {
    /// Its page tables are filled, and it has the access and the attributes of an alias. The
    /// aliases of all free frames are in this state.
    Filled,
    /// Its page tables have gone to a region, and it may have the access and the attributes of one.
    /// It has to be filled again.
    Hollow,
    /// Its page tables are filled, but it has the access and the attributes of a region. It has to
    /// be given back those of an alias.
    Borrowed,
    /// It has its own access and attributes again, except perhaps for advice that no call takes
    /// back. A look has to find that out.
    Reclaimed,
    /// It has attributes or page tables that no call takes back. It has to be mapped anew.
    Spoilt,
    /// It may be a hole, because a call failed, and another thread may have mapped memory into the
    /// hole. It has to be mapped with care (`Backend::map_own`).
    Torn,
}

/// An event that changes the state of a frame's alias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AliasEvent {
    /// Its page tables have gone to a region.
    TablesTaken,
    /// It has got page tables, and the access and attributes of a region.
    Lent,
    /// It has got attributes or page tables that no call takes back, or a repair has failed.
    Spoilt,
    /// It has got back its own access and attributes, as far as calls can give them.
    Reclaimed,
    /// A repair has succeeded, or a look has found that none is needed.
    Mended,
    /// It has been mapped anew.
    Mapped,
    /// Mapping it anew has failed, and may have left a hole.
    MapFailed,
}

impl AliasState {
    /// The state after an event.
    fn after(self, event: AliasEvent) -> AliasState {
        match (self, event) {
            (_, AliasEvent::Mapped) => AliasState::Filled,
            (_, AliasEvent::MapFailed) => AliasState::Torn,
            (AliasState::Torn, _) => AliasState::Torn,
            (AliasState::Spoilt, _) | (_, AliasEvent::Spoilt) => AliasState::Spoilt,
            (_, AliasEvent::TablesTaken) => AliasState::Hollow,
            (_, AliasEvent::Lent) => AliasState::Borrowed,
            (_, AliasEvent::Reclaimed) => AliasState::Reclaimed,
            (_, AliasEvent::Mended) => AliasState::Filled,
        }
    }
}

/// The states of all frames of a share, a byte for each.
#[derive(Debug)]
pub(crate) struct Aliases(Vec<AliasState>);

impl Aliases {
    /// The states of a new share: all filled, because a share is made by filling all of its frames.
    pub(crate) fn new(frames: u64) -> Self {
        Aliases(vec![AliasState::Filled; frames as usize])
    }

    /// Notes that an event has happened to all frames of `run`.
    pub(crate) fn note(&mut self, run: Run, event: AliasEvent) {
        for state in &mut self.0[run.first as usize..run.end() as usize] {
            *state = state.after(event);
        }
    }

    /// The parts of `run` in that state, in ascending order.
    pub(crate) fn runs_in(&self, run: Run, state: AliasState) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for frame in (run.first..run.end()).filter(|frame| self.0[*frame as usize] == state) {
            match runs.last_mut() {
                Some(last) if last.end() == frame => last.frames += 1,
                _ => runs.push(Run { first: frame, frames: 1 }),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::AliasEvent::{Lent, MapFailed, Mapped, Mended, Reclaimed, Spoilt, TablesTaken};
    use super::*;
    use crate::cases::cases;

    /// One mark for each defect that an alias may have. Several may be set at once, and each event
    /// sets and clears marks one by one.
    #[derive(Clone, Copy, Debug, Default)]
    struct Marks {
        hollow: bool,
        borrowed: bool,
        doubtful: bool,
        spoilt: bool,
        torn: bool,
    }

    impl Marks {
        fn note(&mut self, event: AliasEvent) {
            let less = Marks { spoilt: self.spoilt, torn: self.torn, ..Marks::default() };
            match event {
                TablesTaken => *self = Marks { hollow: true, ..less },
                Lent => *self = Marks { borrowed: true, ..less },
                Reclaimed => *self = Marks { doubtful: true, ..less },
                Spoilt => *self = Marks { spoilt: true, ..less },
                Mended => *self = less,
                Mapped => *self = Marks::default(),
                MapFailed => *self = Marks { torn: true, ..Marks::default() },
            }
        }

        /// The state whose repair clears all marks: a careful new mapping repairs all that a new
        /// mapping repairs, and a new mapping all that other calls repair.
        fn worst(self) -> AliasState {
            match self {
                Marks { torn: true, .. } => AliasState::Torn,
                Marks { spoilt: true, .. } => AliasState::Spoilt,
                Marks { hollow: true, .. } => AliasState::Hollow,
                Marks { borrowed: true, .. } => AliasState::Borrowed,
                Marks { doubtful: true, .. } => AliasState::Reclaimed,
                _ => AliasState::Filled,
            }
        }
    }

    #[test]
    fn only_a_new_mapping_leads_out_of_what_no_call_repairs() {
        for state in [AliasState::Spoilt, AliasState::Torn] {
            for event in [TablesTaken, Lent, Reclaimed, Spoilt, Mended] {
                assert_eq!(state.after(event), state, "{event:?}");
            }
            assert_eq!(state.after(Mapped), AliasState::Filled);
            assert_eq!(state.after(MapFailed), AliasState::Torn);
        }
    }

    fn event() -> impl Strategy<Value = AliasEvent> {
        prop::sample::select(vec![TablesTaken, Lent, Reclaimed, Spoilt, Mended, Mapped, MapFailed])
    }

    proptest! {
        #![proptest_config(cases(256, 4))]
        /// Compares with the marks of each frame: after any events the state is the worst of them.
        #[test]
        fn a_state_is_the_worst_of_all_marks(steps in prop::collection::vec((0u64..40, 0u64..12, event()), 1..60)) {
            let mut aliases = Aliases::new(52);
            let mut marks = [Marks::default(); 52];
            for (first, frames, event) in steps {
                let run = Run { first, frames };
                aliases.note(run, event);
                marks[first as usize..run.end() as usize].iter_mut().for_each(|m| m.note(event));
                let all = Run { first: 0, frames: 52 };
                use AliasState::{Borrowed, Filled, Hollow, Spoilt, Torn};
                for state in [Filled, Hollow, Borrowed, AliasState::Reclaimed, Spoilt, Torn] {
                    let mut of_state = [false; 52];
                    let runs = aliases.runs_in(all, state);
                    prop_assert!(runs.windows(2).all(|w| w[0].end() < w[1].first), "{:?}", runs);
                    for run in runs {
                        of_state[run.first as usize..run.end() as usize].fill(true);
                    }
                    for (frame, marks) in marks.iter().enumerate() {
                        prop_assert_eq!(of_state[frame], marks.worst() == state, "{} {:?}", frame, marks);
                    }
                }
            }
        }
    }
}
