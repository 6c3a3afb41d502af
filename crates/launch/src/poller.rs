//! Pins threads of a program from outside, where the loader preloads no library.
//!
//! Nobody tells of a new thread: the poller reads `/proc/PID/task` from time to time. So a thread runs
//! anywhere for up to [`Poller::EVERY`], and its first touches may place memory on another node. Child
//! processes of the program are not followed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pageleap_sys::Errno;

/// The calls of a poller. Tests have a kernel of their own.
pub trait Tasks {
    /// The threads of a process, or none if it has ended.
    fn of(&self, process: i32) -> Vec<i32>;

    /// The CPUs on which a thread may run.
    ///
    /// # Errors
    /// The kernel's error number.
    fn cpus(&self, thread: i32) -> Result<Vec<usize>, Errno>;

    /// Lets a thread run on this CPU only.
    ///
    /// # Errors
    /// The kernel's error number.
    fn pin(&mut self, thread: i32, cpu: usize) -> Result<(), Errno>;
}

/// The kernel's.
#[derive(Clone, Copy, Debug)]
pub struct HostTasks;

impl Tasks for HostTasks {
    fn of(&self, process: i32) -> Vec<i32> {
        let Ok(entries) = std::fs::read_dir(format!("/proc/{process}/task")) else {
            return Vec::new();
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter_map(|name| name.parse().ok()).collect()
    }

    fn cpus(&self, thread: i32) -> Result<Vec<usize>, Errno> {
        pageleap_sys::affinity(thread)
    }

    fn pin(&mut self, thread: i32, cpu: usize) -> Result<(), Errno> {
        pageleap_sys::set_affinity(thread, &[cpu])
    }
}

/// Pins each new thread of one process to the place with the fewest living threads, once.
///
/// The main thread is never pinned: children inherit its affinity, and programs ask it how many CPUs
/// there are. A thread keeps its CPUs if they are neither those of the program at its start nor a pin
/// that it has inherited from the thread that created it: then it has chosen them. A thread with one
/// CPU has inherited a pin if the look before has left a thread on that CPU, which was pinned there
/// and still is, and the main thread is elsewhere.
#[derive(Debug)]
pub struct Poller<T> {
    tasks: T,
    places: Vec<usize>,
    /// The CPUs of the program at its start.
    start: Vec<usize>,
    /// The threads that were looked at, with their place.
    seen: BTreeMap<i32, Option<usize>>,
    was_refused: bool,
}

impl<T: Tasks> Poller<T> {
    /// The time from one look to the next: the longest delay until a thread has its place.
    pub const EVERY: Duration = Duration::from_millis(50);

    /// A poller for a program that starts with these CPUs.
    pub fn new(tasks: T, places: Vec<usize>, start: Vec<usize>) -> Poller<T> {
        Poller { tasks, places, start, seen: BTreeMap::new(), was_refused: false }
    }

    /// Looks once. The result is a sentence if the kernel refuses a pin, the first time.
    pub fn look(&mut self, process: i32) -> Option<String> {
        let mut now = self.tasks.of(process);
        now.sort_unstable();
        let pins = self.pins(process);
        self.seen.retain(|thread, _| now.binary_search(thread).is_ok());
        let mut refused = None;
        for thread in now.into_iter().filter(|thread| *thread != process) {
            if self.seen.contains_key(&thread) {
                continue;
            }
            let place = match self.place(thread, &pins) {
                Ok(place) => place,
                // It has ended.
                Err(Errno(libc::ESRCH)) => continue,
                Err(errno) => {
                    refused = Some(errno);
                    None
                }
            };
            self.seen.insert(thread, place);
        }
        let errno = refused.filter(|_| !self.was_refused)?;
        self.was_refused = true;
        Some(format!(
            "sched_setaffinity(thread of {process}): {errno}: the thread stays unpinned; the program \
             belongs to another user, or its cpuset has changed"
        ))
    }

    /// The CPUs of living or just ended threads with a pin, which threads that they have created
    /// inherit, but no threads that the main thread has created.
    fn pins(&self, process: i32) -> BTreeSet<usize> {
        let of_main = self.tasks.cpus(process).unwrap_or_default();
        let pinned = self.seen.iter().filter_map(|(thread, place)| Some((*thread, (*place)?)));
        let pinned = pinned.filter_map(|(thread, place)| {
            let cpu = *self.places.get(place)?;
            // A thread that has ended has kept its pin, as far as is known.
            let is_kept = self.tasks.cpus(thread).map_or(true, |cpus| cpus == [cpu]);
            Some(cpu).filter(|cpu| is_kept && of_main != [*cpu])
        });
        pinned.collect()
    }

    /// Gives a new thread a place, unless it has chosen CPUs.
    fn place(&mut self, thread: i32, pins: &BTreeSet<usize>) -> Result<Option<usize>, Errno> {
        let cpus = self.tasks.cpus(thread)?;
        let is_inherited = matches!(cpus[..], [cpu] if pins.contains(&cpu));
        if cpus != self.start && !is_inherited {
            return Ok(None);
        }
        let living = |place: usize| self.seen.values().filter(|one| **one == Some(place)).count();
        let place = (0..self.places.len()).min_by_key(|place| (living(*place), *place));
        if let Some(place) = place {
            self.tasks.pin(thread, self.places[place])?;
        }
        Ok(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads with their CPUs, and the number of the error by which pins are refused.
    #[derive(Default)]
    struct Modelled {
        threads: BTreeMap<i32, Vec<usize>>,
        refuses: Option<i32>,
    }

    impl Tasks for Modelled {
        fn of(&self, _process: i32) -> Vec<i32> {
            self.threads.keys().copied().collect()
        }

        fn cpus(&self, thread: i32) -> Result<Vec<usize>, Errno> {
            self.threads.get(&thread).cloned().ok_or(Errno(libc::ESRCH))
        }

        fn pin(&mut self, thread: i32, cpu: usize) -> Result<(), Errno> {
            if let Some(number) = self.refuses {
                return Err(Errno(number));
            }
            self.threads.insert(thread, vec![cpu]);
            Ok(())
        }
    }

    fn poller() -> Poller<Modelled> {
        let mut poller = Poller::new(Modelled::default(), vec![0, 2, 1], vec![0, 1, 2]);
        poller.tasks.threads.insert(10, vec![0, 1, 2]);
        poller
    }

    #[test]
    fn new_threads_are_pinned_once_to_the_emptiest_place() {
        let mut poller = poller();
        let all = vec![0, 1, 2];
        poller.tasks.threads.extend((11..15).map(|thread| (thread, all.clone())));
        assert_eq!(poller.look(10), None);
        let cpus = |poller: &Poller<Modelled>| -> Vec<Vec<usize>> {
            poller.tasks.threads.values().cloned().collect()
        };
        assert_eq!(cpus(&poller), [all.clone(), vec![0], vec![2], vec![1], vec![0]]);
        // A thread that moves later stays there, and the place of one that has ended is free.
        poller.tasks.threads.insert(11, vec![1, 2]);
        poller.tasks.threads.remove(&12);
        poller.tasks.threads.insert(16, all.clone());
        assert_eq!(poller.look(10), None);
        assert_eq!(cpus(&poller), [all, vec![1, 2], vec![1], vec![0], vec![2]]);
    }

    #[test]
    fn a_choice_stands_and_an_inherited_pin_is_none() {
        let mut poller = poller();
        for (thread, cpus) in [(11, vec![0, 1]), (12, vec![7]), (13, vec![0]), (14, vec![0])] {
            poller.tasks.threads.insert(thread, cpus);
        }
        assert_eq!(poller.look(10), None);
        let cpus: Vec<_> = poller.tasks.threads.values().skip(1).cloned().collect();
        // No thread was pinned before.
        assert_eq!(cpus, [vec![0, 1], vec![7], vec![0], vec![0]]);
        let cpus_of = |poller: &Poller<Modelled>, thread| poller.tasks.threads[&thread].clone();
        poller.tasks.threads.insert(15, vec![0, 1, 2]);
        assert_eq!((poller.look(10), cpus_of(&poller, 15)), (None, vec![0]));
        // Thread 15 is pinned to CPU 0, and nobody to CPU 2.
        poller.tasks.threads.extend([(16, vec![0]), (17, vec![2])]);
        assert_eq!(poller.look(10), None);
        assert_eq!([16, 17].map(|thread| cpus_of(&poller, thread)), [vec![2], vec![2]]);
        assert_eq!(poller.seen[&17], None);
        // It moves, and then the main thread chooses the CPU of thread 16.
        poller.tasks.threads.extend([(15, vec![1]), (18, vec![0])]);
        assert_eq!((poller.look(10), poller.seen[&18]), (None, None));
        poller.tasks.threads.extend([(10, vec![2]), (19, vec![2])]);
        assert_eq!((poller.look(10), poller.seen[&19]), (None, None));
    }

    #[test]
    fn a_refusal_is_said_once() {
        let mut poller = poller();
        poller.tasks.refuses = Some(libc::EPERM);
        poller.tasks.threads.extend([(11, vec![0, 1, 2]), (12, vec![0, 1, 2])]);
        let said = poller.look(10).unwrap();
        assert!(said.contains("EPERM") && said.contains("another user"), "{said}");
        poller.tasks.threads.insert(13, vec![0, 1, 2]);
        assert_eq!(poller.look(10), None);
        poller.tasks.refuses = Some(libc::ESRCH);
        poller.tasks.threads.insert(14, vec![0, 1, 2]);
        assert_eq!((poller.look(10), poller.seen.contains_key(&14)), (None, false));
    }
}
