//! Starts programs that nobody will change: with a memory policy, on CPUs, and with settings of
//! their own.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use pageleap::topology::Topology;
//! use pageleap_launch::{MemoryPolicy, Mode, Program, Settings, ThisThread, apply};
//!
//! let topology = Topology::read()?;
//! let settings = Settings {
//!     memory: Some(MemoryPolicy::new(Mode::Interleave, topology.parse_nodes("all", None)?)),
//!     ..Settings::default()
//! };
//! let applied = apply(&settings, Some(&topology), &mut ThisThread, false)?;
//! applied.notes.iter().for_each(|note| eprintln!("{note}"));
//! // Becomes the program, and returns only if that fails.
//! let error = Program::find("sort".into(), vec!["table.csv".into()])?.exec(&[]);
//! # Err(error.into())
//! # }
//! ```
//!
//! Three parts, one after the other:
//!
//! 1. [`Settings`] is the request, in the kernel's terms.
//! 2. [`apply`] gives it to the calling thread, and reads it back. The kernel, or a filter of a
//!    container, may refuse a part; then the *fallbacks* of [`apply`] stand in, each with a note.
//! 3. [`Program::exec`] becomes the program, which inherits the settings; or a [`Parent`] stays
//!    behind, and passes on signals, stops and the exit status.
//!
//! Threads come to CPUs in the order of [`places`]. A library that the program preloads pins them
//! ([`preloaded`]), or a [`Poller`] in the parent where the loader preloads nothing
//! ([`not_preloaded`]).
//!
//! [`advice`] tells which settings suit a program on a machine.
//!
//! Deciding is apart from doing: [`apply`] works on the trait [`Calls`], which tests implement.

#![cfg_attr(not(test), warn(clippy::excessive_nesting, clippy::too_many_lines))]
#![cfg(target_os = "linux")]

pub mod advice;
mod allocators;
mod apply;
mod balancing;
mod binary;
mod calls;
mod cores;
mod devices;
mod error;
mod home;
mod huge_pages;
mod inherited;
mod library;
mod load;
mod parent;
mod place;
mod policy;
mod poller;
// The preloaded library, which build.rs compiles by itself. Tests try its parts; the loader, which
// calls the rest, has no part in them.
#[cfg(test)]
#[allow(dead_code)]
mod preload;
mod program;
mod settings;
#[cfg(test)]
mod trees;

pub use allocators::{Allocator, NOT_AVAILABLE, preloaded_first, without_allocators};
pub use apply::{Applied, apply};
pub use balancing::balance;
pub use binary::{NotPreloaded, is_library, not_preloaded};
pub use calls::{Calls, ThisThread};
pub use cores::cores_of;
pub use devices::node_of_device;
pub use error::Error;
pub use home::{Home, choose_home, growth};
pub use huge_pages::{HugePages, ask_for_huge_pages};
pub use library::preloaded;
pub use load::{NodeLoad, Snapshot};
pub use parent::{Outcome, Parent};
pub use place::{Placement, places, places_by_growth};
pub use policy::{MemoryPolicy, Mode};
pub use poller::{HostTasks, Poller, Tasks};
pub use program::Program;
pub use settings::Settings;
