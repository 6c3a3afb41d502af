//! Guards keep pages of a region in their frames while a device uses these frames.

use pageleap::PinGuard;

use crate::boundary::{free, give, handle, nothing_yet};
use crate::region::{bytes, pageleap_region};
use crate::status::pageleap_status;

/// A guard: keeps pages of a region in their frames.
pub struct pageleap_guard(#[allow(dead_code, reason = "dropping it is its use")] PinGuard);

/// Makes a guard, which keeps the pages of a part of a region in their frames until
/// pageleap_guard_drop(). Hold a guard as long as a device, or the kernel for a device, may use the
/// frames: from before the submission of O_DIRECT, RDMA, MSG_ZEROCOPY, vmsplice or
/// process_vm_writev until after its completion, and from before the registration of an io_uring
/// buffer until after its unregistration, in either direction. Once such a page is pinned, its
/// frame is used directly, whatever the page tables say, and no engine can notice the writes. The
/// part may be any bytes that have memory; the guard is on the pages that they touch. The call
/// returns once no job moves these pages. Jobs move everything else meanwhile. Guards may overlap.
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
