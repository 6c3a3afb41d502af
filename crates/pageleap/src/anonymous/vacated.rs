//! Hands vacated pages to the watcher, which gives them back beside the worker, because giving back
//! base pages takes two thirds of the time of their copy.
//!
//! There are several parking places: while windows fill some, the watcher empties others. Waking
//! the watcher costs as much as moving some hundred pages, so it is woken only when half of the
//! places are full. The worker never waits for it: if no place is empty, it empties one that the
//! watcher has not begun with.

use std::ops::Range;
use std::sync::PoisonError;
use std::time::Duration;

use pageleap_sys as sys;

use super::HUGE;
use crate::sync::{Condvar, Mutex, lock};

/// Pages that the worker has left in a parking place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Left {
    /// The number of the place.
    pub(super) place: usize,
    pub(super) pages: Range<usize>,
}

impl Left {
    /// Gives the pages back.
    ///
    /// # Safety
    /// The pages are the library's own, not registered, and nobody needs them.
    pub(super) unsafe fn give_back(&self) {
        // SAFETY: forwarded to the caller. If the call fails, the pages go when the job ends.
        let _ = unsafe { sys::discard(self.pages.start, self.pages.len()) };
    }
}

/// The most parking places.
const MOST_PLACES: usize = 8;

/// The number of parking places for ranges of `bytes` bytes: small ranges fill few. At least two,
/// because the watcher may be working on one.
pub(super) fn places_for(bytes: usize) -> usize {
    (bytes / HUGE).clamp(2, MOST_PLACES)
}

/// The contents of a parking place.
#[derive(Clone, Debug, Default)]
enum Content {
    #[default]
    Nothing,
    /// To be given back, by the watcher or by the worker.
    Pages(Range<usize>),
    /// The watcher is giving them back.
    UnderWay,
}

impl Content {
    fn take_pages(&mut self) -> Option<Range<usize>> {
        let Content::Pages(pages) = self else { return None };
        let pages = pages.clone();
        *self = Content::Nothing;
        Some(pages)
    }
}

#[derive(Debug, Default)]
struct State {
    places: [Content; MOST_PLACES],
    over: bool,
}

impl State {
    /// Takes the pages of a place, to give them back.
    fn take(&mut self) -> Option<Left> {
        let mut places = self.places.iter_mut().enumerate();
        places.find_map(|(place, content)| Some(Left { place, pages: content.take_pages()? }))
    }
}

/// The state of all parking places, shared by worker and watcher. Nothing here is on the heap.
pub(super) struct Vacated {
    count: usize,
    state: Mutex<State>,
    changed: Condvar,
}

impl Vacated {
    pub(super) fn new(count: usize) -> Vacated {
        Vacated { count, state: Mutex::new(State::default()), changed: Condvar::new() }
    }

    /// How many places there are.
    pub(super) fn places(&self) -> usize {
        self.count
    }

    /// A place for the next window. If it is not empty, also the pages in it, which the caller
    /// gives back first.
    pub(super) fn place(&self) -> (usize, Option<Left>) {
        let mut state = lock(&self.state);
        let is_empty = |content: &Content| matches!(content, Content::Nothing);
        let empty = state.places[..self.count].iter().position(is_empty);
        empty.map(|place| (place, None)).unwrap_or_else(|| {
            let left = state.take().expect("the watcher is at one place");
            (left.place, Some(left))
        })
    }

    /// Leaves pages to the watcher.
    pub(super) fn leave(&self, left: Left) {
        let mut state = lock(&self.state);
        state.places[left.place] = Content::Pages(left.pages);
        let has_pages = |content: &&Content| matches!(content, Content::Pages(_));
        let full = state.places.iter().filter(has_pages).count();
        drop(state);
        if full >= self.count.div_ceil(2) {
            self.changed.notify_one();
        }
    }

    /// Ends the watcher.
    pub(super) fn end(&self) {
        lock(&self.state).over = true;
        self.changed.notify_one();
    }

    /// Gives pages back until the end. Calls `look` after each `tick` in which no pages came.
    pub(super) fn watch(&self, tick: Duration, give_back: impl Fn(&Left), mut look: impl FnMut()) {
        let mut state = lock(&self.state);
        while !state.over {
            if let Some(left) = state.take() {
                state.places[left.place] = Content::UnderWay;
                drop(state);
                give_back(&left);
                state = lock(&self.state);
                state.places[left.place] = Content::Nothing;
                continue;
            }
            let waited = self.changed.wait_timeout(state, tick);
            let (now, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state = now;
            if timeout.timed_out() {
                drop(state);
                look();
                state = lock(&self.state);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    #[cfg(shuttle)]
    use crate::schedules::explore::{at_random, explore, with_few_switches};
    use crate::sync::{AtomicU64, Ordering::Relaxed};
    #[cfg(shuttle)]
    use shuttle::thread;
    #[cfg(not(shuttle))]
    use std::thread;

    const WINDOWS: usize = MOST_PLACES + 2;
    const PAGES: u64 = 1;
    const GIVING: u64 = 2;

    /// Parking places with modelled contents.
    struct Scene {
        vacated: Vacated,
        places: [AtomicU64; MOST_PLACES],
    }

    impl Scene {
        fn give_back(&self, left: &Left) {
            assert_eq!(self.places[left.place].fetch_add(GIVING, Relaxed), PAGES);
            thread::yield_now();
            assert_eq!(self.places[left.place].swap(0, Relaxed), PAGES + GIVING);
        }
    }

    fn windows_find_empty_places(count: usize) {
        let places = std::array::from_fn(|_| AtomicU64::new(0));
        let scene = Arc::new(Scene { vacated: Vacated::new(count), places });
        let other = scene.clone();
        let watcher = thread::spawn(move || {
            let tick = Duration::from_millis(1);
            other.vacated.watch(tick, |left| other.give_back(left), || ());
        });
        for _ in 0..WINDOWS {
            let (place, left) = scene.vacated.place();
            left.inspect(|left| scene.give_back(left));
            assert_eq!(scene.places[place].swap(PAGES, Relaxed), 0, "pages in the place");
            scene.vacated.leave(Left { place, pages: 0..1 });
        }
        scene.vacated.end();
        watcher.join().unwrap();
    }

    #[cfg(shuttle)]
    #[test]
    fn shuttle_vacated() {
        for (count, run) in [2, MOST_PLACES].into_iter().flat_map(|n| (0..5).map(move |r| (n, r))) {
            explore(at_random(run), move || windows_find_empty_places(count));
            explore(with_few_switches(3, run), move || windows_find_empty_places(count));
        }
    }

    #[cfg(not(shuttle))]
    #[test]
    fn places_are_empty_when_a_window_takes_them() {
        for count in [2, MOST_PLACES] {
            (0..if cfg!(miri) { 2 } else { 500 }).for_each(|_| windows_find_empty_places(count));
        }
    }
}
