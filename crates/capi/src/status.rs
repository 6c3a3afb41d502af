//! Error numbers, and the text of the last error of each thread.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::{Mutex, PoisonError};

use pageleap::Error;

use crate::boundary::write;

/// Which kind of error a function has met. The text, pageleap_last_error(), says the rest.
///
/// Later versions may add kinds: treat one that you do not know as an error like any other.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum pageleap_status {
    /// Done.
    PAGELEAP_OK = 0,
    /// An argument makes no sense, or a pointer is NULL that must not be; nothing was
    /// attempted.
    PAGELEAP_BAD_ARGUMENT = 1,
    /// A byte range is not inside the region; or, where the function demands these, it is not
    /// whole pages, is empty, or does not have (or lack) memory throughout.
    PAGELEAP_BAD_RANGE = 2,
    /// There is no such node, or the node has no memory or is offline.
    PAGELEAP_UNKNOWN_NODE = 3,
    /// The cpuset of the process does not allow memory of the node.
    PAGELEAP_NODE_NOT_ALLOWED = 4,
    /// The kernel did not make pages of the size asked for.
    PAGELEAP_NOT_HUGE = 5,
    /// A job or another call works on part of the range.
    PAGELEAP_RANGE_BUSY = 6,
    /// A guard keeps pages where they are.
    PAGELEAP_PINNED = 7,
    /// The pool has fewer free frames than needed.
    PAGELEAP_POOL_EXHAUSTED = 8,
    /// The machine, the node or the memory cgroup has too little free memory.
    PAGELEAP_OUT_OF_MEMORY = 9,
    /// Pages are not on the node that they were asked for on.
    PAGELEAP_MISPLACED = 10,
    /// The engine cannot work here.
    PAGELEAP_ENGINE_REFUSED = 11,
    /// A system call failed: pageleap_last_error_detail() says which, on which addresses, with
    /// which errno.
    PAGELEAP_SYSTEM_CALL = 12,
    /// A file of /proc or /sys could not be read or made no sense.
    PAGELEAP_SYSTEM_FILE = 13,
    /// This library cannot work on this machine, or with this structure of a newer header.
    PAGELEAP_UNSUPPORTED = 14,
    /// A fixed limit of this library was reached.
    PAGELEAP_LIMIT = 15,
    /// A defect of this library, caught where it would have ended the process. Please report
    /// the text.
    PAGELEAP_DEFECT = 16,
}

use pageleap_status::*;

/// What is known of an error.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_error {
    /// sizeof(pageleap_error).
    pub size: usize,
    /// Its kind; PAGELEAP_OK if no call of this thread has failed yet.
    pub status: pageleap_status,
    /// errno of the system call that failed, or 0.
    pub error_number: c_int,
    /// The name of that system call, or NULL. Constant.
    pub call: *const c_char,
    /// The first byte concerned: an address or, with PAGELEAP_BAD_RANGE and PAGELEAP_RANGE_BUSY,
    /// an offset in the region. 0 if no bytes are concerned.
    pub start: usize,
    /// How many bytes that is.
    pub length: usize,
    /// The whole text, in English: what was tried, on which range, what went wrong and why, and
    /// after a semicolon what to do. Valid until the next call of this thread fails, or it ends.
    pub message: *const c_char,
}

grows!(pageleap_error, 48, message);

/// The last error of a thread.
struct Last {
    status: pageleap_status,
    call: Option<&'static CStr>,
    error_number: c_int,
    start: usize,
    length: usize,
    message: CString,
}

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

/// Notes an error for the thread, and says of which kind it is.
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
        _ => (None, 0),
    };
    let (status, message) = (kind(error), text(error.to_string()));
    let last =
        Last { status, call, error_number, start: range.start, length: range.len(), message };
    keep(last);
    status
}

/// Where a thread is ending, and its place for errors is gone, they have no text.
fn keep(last: Last) {
    let _ = LAST.try_with(|slot| *slot.borrow_mut() = Some(last));
}

/// A name that stays where it is. There are few, and each is kept once.
fn constant(name: &'static str) -> &'static CStr {
    static KEPT: Mutex<BTreeMap<&'static str, &'static CStr>> = Mutex::new(BTreeMap::new());
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    kept.entry(name).or_insert_with(|| Box::leak(text(name).into_boxed_c_str()))
}

/// Notes that a call has met a defect of this library.
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
        // Kinds that are younger than this interface.
        _ => PAGELEAP_UNSUPPORTED,
    }
}

/// Text for C: whatever follows a NUL, which no text of ours has, is cut off.
pub(crate) fn text(text: impl Into<String>) -> CString {
    let mut bytes = text.into().into_bytes();
    bytes.truncate(bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len()));
    CString::new(bytes).unwrap_or_default()
}

/// The text of the last error of this thread, in English: what was tried, on which range, what
/// went wrong and why, and what to do. Empty if no call of this thread has failed yet; never
/// NULL. Calls that succeed leave it as it is. Valid until the next call of this thread fails,
/// or it ends.
#[unsafe(no_mangle)]
pub extern "C" fn pageleap_last_error() -> *const c_char {
    let message =
        |slot: &RefCell<Option<Last>>| slot.borrow().as_ref().map(|last| last.message.as_ptr());
    LAST.try_with(message).ok().flatten().unwrap_or(c"".as_ptr())
}

/// The last error of this thread, in parts. The status returned is that of this call:
/// PAGELEAP_OK if `error` was filled in, whatever the last error was.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_last_error_detail(error: *mut pageleap_error) -> pageleap_status {
    boundary!({
        let nothing = pageleap_error {
            size: 0,
            status: PAGELEAP_OK,
            error_number: 0,
            call: std::ptr::null(),
            start: 0,
            length: 0,
            message: c"".as_ptr(),
        };
        let of = |last: &Last| pageleap_error {
            size: 0,
            status: last.status,
            error_number: last.error_number,
            call: last.call.map_or(std::ptr::null(), CStr::as_ptr),
            start: last.start,
            length: last.length,
            message: last.message.as_ptr(),
        };
        let detail =
            LAST.try_with(|slot| slot.borrow().as_ref().map(of)).ok().flatten().unwrap_or(nothing);
        // SAFETY: forwarded to the caller.
        unsafe { write(error, detail) }
    })
}

/// The name of a status, such as "PAGELEAP_RANGE_BUSY"; "unknown" for other numbers. Constant.
#[unsafe(no_mangle)]
pub extern "C" fn pageleap_status_name(status: u32) -> *const c_char {
    const NAMES: [&CStr; 17] = [
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
