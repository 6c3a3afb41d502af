//! Threads that outlive a job and run the next one, for contexts.

use std::sync::{Arc, PoisonError};

use crate::backend::Errno;
use crate::sync::{Condvar, Mutex, lock, thread};

type Task = Box<dyn FnOnce() + Send>;

/// As many threads as jobs have run at the same time, or a few more: a new one is started if the
/// thread of the previous job is not waiting yet. Dropping this ends waiting threads at once, and
/// the others after their job.
pub(crate) struct LastingThreads {
    shared: Arc<Shared>,
    /// The process that owns the threads.
    process: u32,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when there is a task, or no more will come.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The tasks of waiting threads: never more than there are such threads.
    tasks: Vec<Task>,
    waiting: usize,
    over: bool,
}

impl Default for LastingThreads {
    fn default() -> Self {
        LastingThreads { shared: Arc::default(), process: std::process::id() }
    }
}

impl LastingThreads {
    /// Whether this is the process that owns the threads. A child made by `fork` has none of them.
    pub(crate) fn are_of_this_process(&self) -> bool {
        self.process == std::process::id()
    }

    /// Runs `task` in a waiting thread, or else in a new one.
    ///
    /// # Errors
    /// Those of [`thread::start`]; then `task` was dropped.
    pub(crate) fn run(&self, task: impl FnOnce() + Send + 'static) -> Result<(), Errno> {
        let task: Task = Box::new(task);
        {
            let state = &mut *lock(&self.shared.state);
            if state.waiting > state.tasks.len() {
                state.tasks.push(task);
                self.shared.changed.notify_one();
                return Ok(());
            }
        }
        let shared = self.shared.clone();
        thread::start(c"pageleap", move || shared.work(task))
    }
}

impl Shared {
    /// Runs tasks in the calling thread, beginning with `first`, until [`LastingThreads`] is
    /// dropped.
    fn work(&self, first: Task) {
        let mut task = first;
        loop {
            task();
            let mut state = lock(&self.state);
            state.waiting += 1;
            while state.tasks.is_empty() && !state.over {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state.waiting -= 1;
            match state.tasks.pop() {
                Some(next) => task = next,
                None => return,
            }
        }
    }
}

impl Drop for LastingThreads {
    fn drop(&mut self) {
        // In a child made by `fork`, no thread would ever release a lock that was held at that time.
        if self.are_of_this_process() {
            lock(&self.shared.state).over = true;
            self.shared.changed.notify_all();
        }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    #[cfg(not(any(loom, miri)))]
    fn dropping_it_in_a_child_waits_for_no_lock_that_was_held_at_the_fork() {
        let threads = LastingThreads::default();
        let shared = threads.shared.clone();
        let held = lock(&shared.state);
        // SAFETY: the child drops what has no other owner there, and ends without returning.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above. A child that waits for the lock is killed.
            unsafe {
                libc::alarm(20);
                drop(threads);
                libc::_exit(0);
            }
        }
        let mut status = -1;
        // SAFETY: the call writes one number.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child waits for a thread that it does not have");
        drop(held);
    }

    #[test]
    fn a_thread_runs_one_task_after_the_other_and_as_many_as_there_are_at_a_time() {
        let threads = LastingThreads::default();
        let (say, said) = channel();
        let mut seen = BTreeSet::new();
        for _ in 0..50 {
            let say = say.clone();
            threads.run(move || say.send(std::thread::current().id()).unwrap()).unwrap();
            seen.insert(format!("{:?}", said.recv().unwrap()));
            while lock(&threads.shared.state).waiting == 0 {
                std::thread::yield_now();
            }
        }
        assert_eq!(seen.len(), 1);
        // Two that wait for each other.
        let (one, other) = (channel(), channel());
        threads.run(move || (one.0.send(()).unwrap(), other.1.recv().unwrap()).1).unwrap();
        threads.run(move || (one.1.recv().unwrap(), other.0.send(()).unwrap()).1).unwrap();
        while lock(&threads.shared.state).waiting < 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let shared = Arc::downgrade(&threads.shared);
        drop(threads);
        while shared.strong_count() > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(all(test, shuttle))]
mod schedules {
    use super::*;
    use crate::schedules::bounded::each_schedule;
    use crate::sync::{AtomicU32, Ordering};

    #[test]
    fn shuttle_directed_every_task_is_run_once_and_threads_end() {
        each_schedule(2, "tasks come while threads begin to wait, and end", || {
            let (threads, count) = (LastingThreads::default(), Arc::new(AtomicU32::new(0)));
            for _ in 0..2 {
                let count = count.clone();
                threads.run(move || _ = count.fetch_add(1, Ordering::SeqCst)).unwrap();
            }
            drop(threads);
            while count.load(Ordering::SeqCst) < 2 {
                thread::yield_now();
            }
        });
    }
}
