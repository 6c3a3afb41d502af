//! Guards that keep pages in their frames while a device, or the kernel for it, uses the frames.
//!
//! A device reads and writes a pinned frame by its number, whatever is mapped at the address, and
//! no system call tells whether a frame is pinned. So attempts and guards exclude each other. Pages
//! under a guard are not moved, and a guard is given only after the attempts that are moving its
//! pages. Then no frame is ever vacated under a guard, and no frame has to wait for a guard before
//! it gets its next owner.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use super::RegionInner;
use crate::sync::{Condvar, Mutex, lock};

/// The pages of a region that guards keep in their frames, and those that are being moved.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    state: Mutex<State>,
    /// Signalled when pages have been moved.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    guards: Counts,
    /// The pages of each attempt that is under way.
    moving: Vec<Range<u64>>,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// The number of guards of each page: disjoint runs of pages with at least one guard, by their
/// first page.
#[derive(Debug, Default)]
struct Counts(BTreeMap<u64, (u64, usize)>);

impl Counts {
    /// The first run of pages in `pages` that have guards.
    fn first_in(&self, pages: &Range<u64>) -> Option<Range<u64>> {
        let before =
            self.0.range(..pages.start).next_back().filter(|(_, (end, _))| *end > pages.start);
        let (start, (end, _)) = before.or_else(|| self.0.range(pages.clone()).next())?;
        let mut piece = *start.max(&pages.start)..*end;
        // Neighbouring runs count as one piece, however many guards each has.
        for (start, (end, _)) in self.0.range(piece.end..pages.end.max(piece.end)) {
            if *start != piece.end {
                break;
            }
            piece.end = *end;
        }
        Some(piece.start..piece.end.min(pages.end))
    }

    /// Cuts the run that contains `page`, so that a run begins there.
    fn cut(&mut self, page: u64) {
        let Some((_, (end, count))) = self.0.range_mut(..page).next_back() else { return };
        if *end > page {
            let rest = (std::mem::replace(end, page), *count);
            self.0.insert(page, rest);
        }
    }

    fn add(&mut self, pages: &Range<u64>) {
        self.cut(pages.start);
        self.cut(pages.end);
        let mut unguarded = pages.start;
        let mut fresh = Vec::new();
        for (start, (end, count)) in self.0.range_mut(pages.clone()) {
            *count += 1;
            fresh.push(unguarded..*start);
            unguarded = *end;
        }
        fresh.push(unguarded..pages.end);
        self.0.extend(
            fresh.into_iter().filter(|run| !run.is_empty()).map(|run| (run.start, (run.end, 1))),
        );
    }

    /// Removes a guard that has been added.
    fn remove(&mut self, pages: &Range<u64>) {
        let mut gone = Vec::new();
        for (start, (_, count)) in self.0.range_mut(pages.clone()) {
            *count -= 1;
            if *count == 0 {
                gone.push(*start);
            }
        }
        for start in gone {
            self.0.remove(&start);
        }
        // Runs that its ends have cut stay cut, until their own guards are removed.
    }
}

impl Pins {
    /// Marks pages as being moved. If pages are under a guard, returns the first run of them.
    pub(crate) fn start_moving(&self, pages: &Range<u64>) -> Result<Moving<'_>, Range<u64>> {
        let mut state = lock(&self.state);
        if let Some(first) = state.guards.first_in(pages) {
            return Err(first);
        }
        state.moving.push(pages.clone());
        Ok(Moving { pins: self, pages: pages.clone() })
    }

    /// Adds a guard, and waits until none of its pages is being moved.
    fn guard(&self, pages: &Range<u64>) {
        let mut state = lock(&self.state);
        state.guards.add(pages);
        while state.moving.iter().any(|moving| overlap(moving, pages)) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether any of the pages is under a guard.
    pub(crate) fn any(&self, pages: &Range<u64>) -> bool {
        lock(&self.state).guards.first_in(pages).is_some()
    }
}

/// Pages that are being moved, until the value is dropped.
pub(crate) struct Moving<'a> {
    pins: &'a Pins,
    pages: Range<u64>,
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        let State { moving, guards } = &mut *lock(&self.pins.state);
        let at = moving.iter().position(|pages| *pages == self.pages).expect("it was put there");
        moving.swap_remove(at);
        // A thread that waits for these pages has added its guard already.
        if guards.first_in(&self.pages).is_some() {
            self.pins.changed.notify_all();
        }
    }
}

/// Keeps pages of a region in their frames until it is dropped: see
/// [`Region::pin`](super::Region::pin).
#[must_use = "dropping a guard lets the pages move"]
pub struct PinGuard {
    region: Arc<RegionInner>,
    pages: Range<u64>,
}

impl PinGuard {
    pub(super) fn new(region: &Arc<RegionInner>, pages: Range<u64>) -> Self {
        region.pins.guard(&pages);
        PinGuard { region: region.clone(), pages }
    }
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        if self.region.process != std::process::id() {
            return; // in a child made by `fork` the thread that held the lock does not exist
        }
        lock(&self.region.pins.state).guards.remove(&self.pages);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cases::cases;

    #[test]
    fn an_attempt_on_guarded_pages_is_refused() {
        let pins = Pins::default();
        lock(&pins.state).guards.add(&(2..4));
        let refused = pins.start_moving(&(1..5)).err();
        assert_eq!(refused, Some(2..4), "guarded pages move");
        assert!(pins.start_moving(&(4..6)).is_ok());
    }

    #[cfg(shuttle)]
    #[test]
    fn shuttle_directed_a_guard_is_given_after_the_attempt() {
        use crate::schedules::bounded::each_schedule;
        use crate::sync::{AtomicU64, Ordering, thread};

        each_schedule(2, "a guard waits for an attempt that has ended", || {
            let shared = Arc::new((Pins::default(), AtomicU64::new(0)));
            let attempt = shared.clone();
            let attempt = thread::spawn(move || {
                let (pins, moving) = &*attempt;
                if let Ok(_moving) = pins.start_moving(&(0..2)) {
                    moving.store(1, Ordering::SeqCst);
                    moving.store(0, Ordering::SeqCst);
                }
            });
            let (pins, moving) = &*shared;
            pins.guard(&(1..3));
            let is_moving = moving.load(Ordering::SeqCst) == 1;
            assert!(!is_moving, "a guard is given while an attempt moves its pages");
            attempt.join().unwrap();
        });
    }

    proptest! {
        #![proptest_config(cases(256, 4))]
        /// Compares with a counter for each page.
        #[test]
        fn guards_are_counted_by_page(steps in prop::collection::vec((0u64..40, 1u64..12, any::<prop::sample::Index>()), 1..if cfg!(miri) { 8 } else { 60 })) {
            let mut counts = Counts::default();
            let mut guards: Vec<Range<u64>> = Vec::new();
            let mut plain = [0usize; 64];
            for (start, len, pick) in steps {
                if start % 3 == 0 && !guards.is_empty() {
                    let gone = guards.swap_remove(pick.index(guards.len()));
                    counts.remove(&gone);
                    gone.for_each(|page| plain[page as usize] -= 1);
                } else {
                    let new = start..start + len;
                    counts.add(&new);
                    guards.push(new.clone());
                    new.for_each(|page| plain[page as usize] += 1);
                }
                for (page, count) in plain.iter().enumerate() {
                    let page = page as u64;
                    let run = counts.0.range(..=page).next_back().filter(|(_, (end, _))| *end > page);
                    prop_assert_eq!(run.map_or(0, |(_, (_, count))| *count), *count);
                    let first = (page..64).find(|page| plain[*page as usize] > 0);
                    let found = counts.first_in(&(page..64));
                    prop_assert_eq!(found.as_ref().map(|run| run.start), first);
                    let beyond = first.and_then(|first| (first..64).find(|page| plain[*page as usize] == 0));
                    prop_assert_eq!(found.map(|run| run.end), first.map(|_| beyond.unwrap_or(64)));
                }
            }
        }
    }
}
