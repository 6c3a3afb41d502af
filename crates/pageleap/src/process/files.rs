//! The files of a process in `/proc`, and the thread through which its memory is read.
//!
//! A main thread may end while other threads go on (`pthread_exit` in `main`). It stays a zombie,
//! and the kernel takes its memory away: `/proc/PID/smaps` is empty, and `move_pages(2)` of its
//! number fails with EINVAL. Both still work with the number of any other thread of the process
//! (`find_mm_struct` in mm/migrate.c, `proc_mem_open` in fs/proc/base.c), because all threads share
//! the memory.

use std::fs::File;
use std::io::{ErrorKind, Read};

use crate::error::Error;

/// Identity of the program that a process runs: the start time of the process, and the addresses of
/// code and stack. The kernel puts those of the next program elsewhere, and has none for a process
/// that has ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Image {
    /// The thread by whose number the kernel finds the memory: the main thread, while it lives.
    pub(crate) thread: u32,
    /// Start time of the main thread, in ticks since the machine started. It stays when that thread
    /// ends, and differs if the number belongs to another process now.
    start_time: u64,
    places: [u64; 2],
}

impl Image {
    /// The image of no process.
    #[cfg(test)]
    pub(crate) const NONE: Image = Image { thread: 0, start_time: 0, places: [0; 2] };

    /// Whether it may still be the same program. The kernel hides the addresses from a process that
    /// may not (or no longer) look at them.
    pub(crate) fn may_be(&self, now: &Image) -> bool {
        /// The values that the kernel shows instead of hidden addresses (`do_task_stat` in
        /// fs/proc/array.c).
        const HIDDEN: [u64; 2] = [1, 0];
        self.start_time == now.start_time && (self.places == now.places || now.places == HIDDEN)
    }

    /// The image of a process at this moment.
    pub(crate) fn of(pid: u32) -> Result<Image, Error> {
        let stat = text_of(pid, "stat")?;
        let start_time = stat_field(&stat, 22).and_then(|text| text.parse().ok());
        let start_time = start_time.ok_or_else(|| ended(pid))?;
        let main = Image { thread: pid, start_time, places: places(&stat) };
        if !has_ended(&stat) {
            return Ok(main);
        }
        let other = threads(pid).into_iter().filter(|thread| *thread != pid).find_map(|thread| {
            let places = places(&text(pid, &by_thread(pid, thread, "stat")).ok()?);
            // The first address is 0 only without memory.
            (places[0] != 0).then_some(Image { thread, start_time, places })
        });
        Ok(other.unwrap_or(main))
    }

    /// Whether both addresses are set. Half-way through an exec they are not.
    pub(super) fn is_settled(&self) -> bool {
        !self.places.contains(&0)
    }

    /// Whether both are of one process, even if it runs another program.
    pub(super) fn is_of_same_process(&self, later: &Image) -> bool {
        self.start_time == later.start_time
    }
}

/// The addresses of code and stack (`start_code`, `start_stack`); 0 without memory.
fn places(stat: &str) -> [u64; 2] {
    let field = |number| stat_field(stat, number).and_then(|text| text.parse().ok());
    [26, 28].map(|number| field(number).unwrap_or(0))
}

/// Whether a thread with this `stat` is a zombie, or is about to be reaped.
fn has_ended(stat: &str) -> bool {
    stat_field(stat, 3).is_some_and(|state| state.starts_with(['Z', 'X']))
}

/// The numbers of all threads of a process; none if they cannot be read.
pub(super) fn threads(pid: u32) -> Vec<u32> {
    let entries = std::fs::read_dir(path(pid, "task")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

pub(crate) fn path(pid: u32, file: &str) -> String {
    format!("/proc/{pid}/{file}")
}

/// The path of a file about memory, which has to be read through a thread that has not ended.
pub(crate) fn by_thread(pid: u32, thread: u32, file: &str) -> String {
    match thread == pid {
        true => path(pid, file),
        false => format!("/proc/{pid}/task/{thread}/{file}"),
    }
}

pub(super) fn open(pid: u32, path: &str) -> Result<File, Error> {
    File::open(path).map_err(|e| unreadable(pid, path, &e))
}

pub(super) fn text_of(pid: u32, file: &str) -> Result<String, Error> {
    text(pid, &path(pid, file))
}

pub(super) fn text(pid: u32, path: &str) -> Result<String, Error> {
    let mut bytes = Vec::new();
    open(pid, path)?.read_to_end(&mut bytes).map_err(|e| unreadable(pid, path, &e))?;
    // A process may have a name that is not UTF-8.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

pub(super) fn unreadable(pid: u32, file: &str, error: &std::io::Error) -> Error {
    let gone = error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH);
    if gone && !std::path::Path::new(&path(pid, "")).exists() {
        return Error::BadArgument {
            what: "process",
            reason: format!("there is no process {pid} here"),
            remedy: "name one that `ps -e` shows, in this pid namespace".into(),
        };
    }
    Error::SystemFile {
        path: file.to_owned(),
        reason: error.to_string(),
        remedy: match error.kind() {
            ErrorKind::PermissionDenied => {
                "run as root, as the user of the process, or with CAP_SYS_PTRACE"
            }
            _ => "try again; the process may have ended",
        },
    }
}

/// The name of a process (`/proc/PID/comm`), which may have any characters.
pub(super) fn name_of(pid: u32) -> Result<String, Error> {
    let text = text_of(pid, "comm")?;
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

/// The error for a process that has ended: the same as for one that never was.
pub(crate) fn ended(pid: u32) -> Error {
    Error::BadArgument {
        what: "process",
        reason: format!("process {pid} has ended, or runs another program now"),
        remedy: "read its memory again, if it still runs".into(),
    }
}

/// Whether the main thread of a process has ended.
pub(super) fn main_thread_has_ended(pid: u32) -> bool {
    text_of(pid, "stat").is_ok_and(|stat| has_ended(&stat))
}

/// A field of `/proc/PID/stat`, by its number from 3 on. Field 2 is the name in parentheses, which
/// may contain spaces and parentheses.
fn stat_field(stat: &str, number: usize) -> Option<&str> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(number - 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_hides_no_field() {
        let stat = "7 (a) R) b) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 99";
        assert_eq!((stat_field(stat, 3), stat_field(stat, 22)), (Some("S"), Some("4711")));
        assert_eq!(stat_field("", 3), None);
    }
}
