//! The library that `pageleap run --place` preloads into a program: it gives each new thread a CPU.
//!
//! `build.rs` compiles this folder by itself, as a shared library without the standard library. The
//! loader puts its `pthread_create` before that of the C library, which it calls in turn:
//!
//! ```text
//! creating thread                          new thread
//! ───────────────                          ──────────
//! takes the place with the fewest
//! living threads (count + 1)
//! calls the real pthread_create  ───────▶  start: waits for the creator
//! pins the new thread to one CPU
//! tells the new thread           ───────▶  the program's function
//!                                          key's destructor: gives the place back (count - 1)
//! ```
//!
//! *Places* are CPUs in an order that the launcher has chosen ([`prepare::VARIABLE`]). Among equal
//! counts the first place wins, so the order is the order in which a program's threads come to CPUs.
//!
//! **A home** ([`prepare::HOME`]) is the part of the places on which the program starts. Its threads
//! come to the places all the same, whose order begins with the home's.
//!
//! **Whose choice stands.** A thread is pinned once, before its function runs and before
//! `pthread_create` returns. If the thread or its creator sets CPUs later, these count, also if it is
//! the same CPU. A thread is left alone if its attributes have an affinity, or if its creator's
//! affinity is neither the one that the launcher has set nor the pin of this library: then the
//! program, or a tool like taskset, has chosen CPUs that the thread inherits. If the kernel refuses a
//! pin because the cpuset has changed, the thread runs unpinned. A program that forbids
//! `sched_setaffinity` to itself by a filter that kills is killed when it creates a thread.
//!
//! **Main threads** are never pinned, because children inherit their affinity. So a child of a pinned
//! thread gets the CPUs of the program's start again: by the handler of `fork`, and by `posix_spawn`,
//! `system`, `popen` and the functions of `exec`, which drop the pin for the time of the call.
//!
//! **Orderings.** Atomics are relaxed, except the one by which a creator tells the new thread. A
//! count is a hint about where to run, and nothing else is read because of its value. The list of
//! places is written before the first thread is created, and creating a thread orders everything
//! that came before it. Nothing here takes a lock, so `fork` cannot leave one locked.
//!
//! A module imports only from those above it in this table, and from `core`:
//!
//! | module | content |
//! |---|---|
//! | `functions` | functions of the C library, found by name |
//! | `places` | the places, and the choice of one for a thread |
//! | `value` | the place of each thread; the end of a thread gives it back |
//! | `affinity` | the CPUs of a thread: asked, pinned, unpinned |
//! | `beginning` | a new thread waits until its creator has pinned it |
//! | `prepare` | the start: the list of places is read; the start of a forked child |
//! | `interposed` | the functions that the loader finds before those of the C library |

mod affinity;
mod beginning;
mod functions;
mod interposed;
mod places;
mod prepare;
mod value;
