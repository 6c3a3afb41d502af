//! Guards.

use pageleap::PinGuard;

use crate::boundary::{free, give, handle, nothing_yet};
use crate::region::{bytes, pageleap_region};
use crate::status::pageleap_status;

/// A guard: keeps pages of a region in their frames.
pub struct pageleap_guard(#[allow(dead_code, reason = "dropping it is its use")] PinGuard);

/// Makes a guard, which keeps the pages of a part in their frames until it is dropped. Drivers
/// of devices need one from before the submission until after the completion or unregistration
/// of O_DIRECT, RDMA, MSG_ZEROCOPY, vmsplice, process_vm_writev, or registered io_uring buffers,
/// in either direction. The part may be any bytes that have memory; the guard is on the pages
/// that they touch. The call returns once no job moves these pages. Jobs move everything else
/// meanwhile. Guards may overlap.
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
