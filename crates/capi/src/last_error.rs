//! The last error of each thread, as C reads it.

use std::ffi::{CStr, c_char, c_int};

use crate::boundary::write;
use crate::status::{Last, last, pageleap_status};

/// An error, with its parts in fields.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pageleap_error {
    /// sizeof(pageleap_error).
    pub size: usize,
    /// The kind; PAGELEAP_OK if no call of this thread has failed yet.
    pub status: pageleap_status,
    /// errno of the system call that failed, or 0.
    pub error_number: c_int,
    /// The name of that system call, or NULL. Constant.
    pub call: *const c_char,
    /// The first byte that the error is about. With PAGELEAP_BAD_RANGE and PAGELEAP_RANGE_BUSY
    /// it is an offset in the region, else an address. 0 if the error is about no bytes.
    pub start: usize,
    /// How many bytes the error is about.
    pub length: usize,
    /// The whole text, in English: what was tried, on which range, what went wrong and why, and
    /// after a semicolon what to do. Valid until the next call of this thread fails, or the
    /// thread ends.
    pub message: *const c_char,
}

grows!(pageleap_error, 48, message);

/// The text of the last error of this thread, in English: what was tried, on which range, what
/// went wrong and why, and what to do. Empty if no call of this thread has failed yet; never
/// NULL. Calls that succeed leave the text as it is. Valid until the next call of this thread
/// fails, or the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn pageleap_last_error() -> *const c_char {
    last(|last| last.message.as_ptr()).unwrap_or(c"".as_ptr())
}

/// Fills in `error` with the last error of this thread. The returned status is that of this call
/// and not the last error: PAGELEAP_OK means that `error` was filled in.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_last_error_detail(error: *mut pageleap_error) -> pageleap_status {
    boundary!({
        let nothing = pageleap_error {
            size: 0,
            status: pageleap_status::PAGELEAP_OK,
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
        // SAFETY: forwarded to the caller.
        unsafe { write(error, last(of).unwrap_or(nothing)) }
    })
}
