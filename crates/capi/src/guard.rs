//! Guards.

use pageleap::PinGuard;

use crate::boundary::{free, give, handle, nothing_yet};
use crate::region::{bytes, pageleap_region};
use crate::status::pageleap_status;

/// Keeps pages of a region in their frames.
pub struct pageleap_guard(#[allow(dead_code, reason = "dropping it is its use")] PinGuard);

/// Keeps the pages of a part in their frames until the guard is dropped: from before the
/// submission of O_DIRECT, RDMA, MSG_ZEROCOPY, vmsplice, process_vm_writev or the registration
/// of an io_uring buffer, in either direction, until after its completion or unregistration. Any
/// bytes that have memory will do; the guard is on the pages that they touch. Returns once none
/// of these is being moved. Jobs move everything else meanwhile. Guards may overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_region_pin(
    region: *const pageleap_region,
    offset: usize,
    length: usize,
    guard: *mut *mut pageleap_guard,
) -> pageleap_status {
    // SAFETY: forwarded to the caller.
    unsafe { nothing_yet(guard) };
    boundary!({
        // SAFETY: forwarded to the caller.
        let region = &unsafe { handle(region, "region") }?.0;
        let part = bytes(region, offset, length)?;
        // SAFETY: forwarded to the caller.
        unsafe { give(guard, "guard", || Ok(pageleap_guard(region.pin(part)?))) }
    })
}

/// Drops a guard, so that its pages may move; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_guard_drop(guard: *mut pageleap_guard) {
    // SAFETY: forwarded to the caller.
    unsafe { free(guard) };
}
