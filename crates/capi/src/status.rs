//! Statuses, and the last error of each thread: functions return a status, and keep the error
//! itself for the calling thread, as `errno` is kept.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::{Mutex, PoisonError};

use pageleap::Error;

/// The kind of an error. The text, pageleap_last_error(), says the rest.
///
/// Later versions may add kinds: treat a kind that you do not know as an error like any other.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum pageleap_status {
    /// The function has done what was asked.
    PAGELEAP_OK = 0,
    /// An argument is not possible, or a pointer that must not be NULL is NULL. Nothing was
    /// attempted.
    PAGELEAP_BAD_ARGUMENT = 1,
    /// A byte range is not inside the region, or not as the function demands it: whole pages, not
    /// empty, with memory throughout, or without any memory.
    PAGELEAP_BAD_RANGE = 2,
    /// The machine has no such node, or the node has no memory or is offline.
    PAGELEAP_UNKNOWN_NODE = 3,
    /// The cpuset of the process does not allow memory of the node.
    PAGELEAP_NODE_NOT_ALLOWED = 4,
    /// The kernel did not make pages of the size asked for.
    PAGELEAP_NOT_HUGE = 5,
    /// A job or another call works on part of the range.
    PAGELEAP_RANGE_BUSY = 6,
    /// A guard keeps pages of the range in their frames.
    PAGELEAP_PINNED = 7,
    /// The pool has fewer free frames than needed.
    PAGELEAP_POOL_EXHAUSTED = 8,
    /// The machine, the node or the memory cgroup has too little free memory.
    PAGELEAP_OUT_OF_MEMORY = 9,
    /// Pages are not on the node for which they were asked.
    PAGELEAP_MISPLACED = 10,
    /// The engine cannot work here.
    PAGELEAP_ENGINE_REFUSED = 11,
    /// A system call failed. pageleap_last_error_detail() has its name, its addresses and its
    /// errno.
    PAGELEAP_SYSTEM_CALL = 12,
    /// A file of /proc or /sys could not be read, or its contents could not be understood.
    PAGELEAP_SYSTEM_FILE = 13,
    /// The library cannot work on this machine, or does not know a structure of a newer header.
    PAGELEAP_UNSUPPORTED = 14,
    /// A fixed limit of the library was reached.
    PAGELEAP_LIMIT = 15,
    /// A defect of the library. It was caught where it would have ended the process. Please
    /// report the text.
    PAGELEAP_DEFECT = 16,
    /// Other code of this process has closed a descriptor of the library's. Its number may stand
    /// for another file now, which is not touched.
    PAGELEAP_DESCRIPTOR_LOST = 17,
    /// A thread that the work needs could not be started. pageleap_last_error_detail() has the
    /// errno of pthread_create. With EAGAIN another thread of the process may be in execve: the
    /// kernel starts no thread during execve, and if execve fails, the next call succeeds.
    PAGELEAP_NO_THREAD = 18,
}

use pageleap_status::*;

/// The last error of a thread, with the fields of
/// [`pageleap_error`](crate::last_error::pageleap_error).
pub(crate) struct Last {
    pub(crate) status: pageleap_status,
    pub(crate) call: Option<&'static CStr>,
    pub(crate) error_number: c_int,
    pub(crate) start: usize,
    pub(crate) length: usize,
    pub(crate) message: CString,
}

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

/// Keeps an error for the calling thread, and returns its kind.
pub(crate) fn note(error: &Error) -> pageleap_status {
    let range = match error {
        Error::BadRange { start, end, .. } | Error::RangeBusy { start, end } => *start..*end,
        Error::NotHuge { range, .. } | Error::Pinned { range } | Error::Call { range, .. } => {
            range.0.clone()
        }
        _ => 0..0,
    };
    let (call, error_number) = match error {
        Error::Call { call, errno, .. } => (Some(constant(call.name())), errno.0),
        Error::NoThread { errno, .. } => (Some(c"pthread_create"), errno.0),
        _ => (None, 0),
    };
    let (status, message) = (kind(error), text(error.to_string()));
    let last =
        Last { status, call, error_number, start: range.start, length: range.len(), message };
    keep(last);
    status
}

/// Keeps an error for the calling thread, unless the thread is ending and its place for errors
/// is gone.
fn keep(last: Last) {
    let _ = LAST.try_with(|slot| *slot.borrow_mut() = Some(last));
}

/// Calls `look` with the last error of the calling thread, and returns its result. `None` if no
/// call has failed yet, or the thread is ending.
pub(crate) fn last<T>(look: impl FnOnce(&Last) -> T) -> Option<T> {
    LAST.try_with(|slot| slot.borrow().as_ref().map(look)).ok().flatten()
}

/// A name as a C string that is never freed. Each name is leaked once, and there are few names.
pub(crate) fn constant(name: &'static str) -> &'static CStr {
    static KEPT: Mutex<BTreeMap<&'static str, &'static CStr>> = Mutex::new(BTreeMap::new());
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    kept.entry(name).or_insert_with(|| Box::leak(text(name).into_boxed_c_str()))
}

/// Keeps a defect of the library, a panic, as the error of the calling thread.
pub(crate) fn note_defect(what: &str) -> pageleap_status {
    let message =
        text(format!("a defect of pageleap: {what}; please report it, with what was called"));
    let last =
        Last { status: PAGELEAP_DEFECT, call: None, error_number: 0, start: 0, length: 0, message };
    keep(last);
    PAGELEAP_DEFECT
}

fn kind(error: &Error) -> pageleap_status {
    match error {
        Error::BadArgument { .. } => PAGELEAP_BAD_ARGUMENT,
        Error::BadRange { .. } => PAGELEAP_BAD_RANGE,
        Error::UnknownNode { .. } => PAGELEAP_UNKNOWN_NODE,
        Error::NodeNotAllowed { .. } => PAGELEAP_NODE_NOT_ALLOWED,
        Error::NotHuge { .. } => PAGELEAP_NOT_HUGE,
        Error::RangeBusy { .. } => PAGELEAP_RANGE_BUSY,
        Error::Pinned { .. } => PAGELEAP_PINNED,
        Error::PoolExhausted { .. } => PAGELEAP_POOL_EXHAUSTED,
        Error::OutOfMemory { .. } => PAGELEAP_OUT_OF_MEMORY,
        Error::Misplaced { .. } => PAGELEAP_MISPLACED,
        Error::EngineRefused { .. } => PAGELEAP_ENGINE_REFUSED,
        Error::Call { .. } => PAGELEAP_SYSTEM_CALL,
        Error::SystemFile { .. } => PAGELEAP_SYSTEM_FILE,
        Error::Limit { .. } => PAGELEAP_LIMIT,
        Error::DescriptorLost { .. } => PAGELEAP_DESCRIPTOR_LOST,
        Error::NoThread { .. } => PAGELEAP_NO_THREAD,
        // Kinds that are younger than this interface.
        _ => PAGELEAP_UNSUPPORTED,
    }
}

/// Text as a C string, cut at the first NUL. No text of the library has a NUL.
pub(crate) fn text(text: impl Into<String>) -> CString {
    let mut bytes = text.into().into_bytes();
    bytes.truncate(bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len()));
    CString::new(bytes).unwrap_or_default()
}

/// The name of a status, such as "PAGELEAP_RANGE_BUSY"; "unknown" for other numbers. Constant.
#[unsafe(no_mangle)]
pub extern "C" fn pageleap_status_name(status: u32) -> *const c_char {
    const NAMES: [&CStr; 19] = [
        c"PAGELEAP_OK",
        c"PAGELEAP_BAD_ARGUMENT",
        c"PAGELEAP_BAD_RANGE",
        c"PAGELEAP_UNKNOWN_NODE",
        c"PAGELEAP_NODE_NOT_ALLOWED",
        c"PAGELEAP_NOT_HUGE",
        c"PAGELEAP_RANGE_BUSY",
        c"PAGELEAP_PINNED",
        c"PAGELEAP_POOL_EXHAUSTED",
        c"PAGELEAP_OUT_OF_MEMORY",
        c"PAGELEAP_MISPLACED",
        c"PAGELEAP_ENGINE_REFUSED",
        c"PAGELEAP_SYSTEM_CALL",
        c"PAGELEAP_SYSTEM_FILE",
        c"PAGELEAP_UNSUPPORTED",
        c"PAGELEAP_LIMIT",
        c"PAGELEAP_DEFECT",
        c"PAGELEAP_DESCRIPTOR_LOST",
        c"PAGELEAP_NO_THREAD",
    ];
    NAMES.get(status as usize).copied().unwrap_or(c"unknown").as_ptr()
}

/// The version of the library, such as "0.1.0". Constant.
#[unsafe(no_mangle)]
pub extern "C" fn pageleap_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// The version of the library as one number, which PAGELEAP_MAKE_VERSION makes of its parts.
#[unsafe(no_mangle)]
pub extern "C" fn pageleap_version_number() -> u32 {
    const fn part(text: &str) -> u32 {
        match u32::from_str_radix(text, 10) {
            // Larger parts would run into each other.
            Ok(part) if part < 1000 => part,
            _ => panic!("a part of a version is a number below 1000"),
        }
    }
    const MAJOR: u32 = part(env!("CARGO_PKG_VERSION_MAJOR"));
    const MINOR: u32 = part(env!("CARGO_PKG_VERSION_MINOR"));
    const PATCH: u32 = part(env!("CARGO_PKG_VERSION_PATCH"));
    MAJOR * 1_000_000 + MINOR * 1_000 + PATCH
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_has_its_name() {
        // The last one, which has to be changed with the enumeration.
        let last = PAGELEAP_NO_THREAD;
        for number in 0..=last as u32 {
            // SAFETY: the numbers of the enumeration have no gap.
            let status = unsafe { std::mem::transmute::<u32, pageleap_status>(number) };
            // SAFETY: a constant text.
            let name = unsafe { CStr::from_ptr(pageleap_status_name(number)) };
            assert_eq!(name.to_str(), Ok(format!("{status:?}").as_str()));
        }
        // SAFETY: a constant text.
        assert_eq!(unsafe { CStr::from_ptr(pageleap_status_name(last as u32 + 1)) }, c"unknown");
    }

    #[test]
    fn a_thread_that_was_refused_is_told_with_its_call() {
        let remedy = "end some";
        let errno = pageleap::Errno(libc::EAGAIN);
        assert_eq!(note(&Error::NoThread { what: "one", errno, remedy }), PAGELEAP_NO_THREAD);
        LAST.with_borrow(|last| {
            let last = last.as_ref().unwrap();
            assert_eq!((last.error_number, last.call), (libc::EAGAIN, Some(c"pthread_create")));
        });
    }
}
