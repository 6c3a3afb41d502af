//! Limits of the process that the library checks before it goes to work.

use crate::backend::Backend;
use crate::error::Error;
use crate::units::BASE_PAGE;

/// Checks RLIMIT_AS: whether `threads` more threads fit into the address space that is left, or,
/// for 0, whether the process is within its limit at all. A thread that allocates without address
/// space would end the process. A model has room for all.
pub(crate) fn check_address_space(backend: &dyn Backend, threads: usize) -> Result<(), Error> {
    /// Bytes for a thread's stack, guard page and allocator arena, generously.
    const PER_THREAD: u64 = 4 << 20;
    let needed = PER_THREAD * threads as u64;
    if backend.is_host_memory() && pageleap_sys::is_over_address_space_limit(BASE_PAGE, needed) {
        let what = match needed >> 20 {
            0 => "the process has more address space than RLIMIT_AS allows".to_owned(),
            more => format!("RLIMIT_AS leaves the process less than {more} MB of address space"),
        };
        return Err(Error::Unsupported {
            what,
            remedy: "raise the limit (ulimit -v), or unmap memory that is no longer used",
        });
    }
    Ok(())
}
