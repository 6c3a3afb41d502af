//! `pageleap_move_pages`: lists of pages of any process, which the kernel moves.

use std::ffi::{c_int, c_ulong, c_void};

use pageleap::{Error, NodeId, PageStatus};

use crate::boundary::{array, bad, run};
use crate::status::pageleap_status;

/// MPOL_MF_MOVE and MPOL_MF_MOVE_ALL of the kernel (linux/mempolicy.h).
const MOVE: c_int = 1 << 1;
const MOVE_ALL: c_int = 1 << 2;

/// Moves pages of a process to nodes, or tells where they lie if `nodes` is NULL. It takes the
/// arguments of numa_move_pages() of libnuma and of move_pages(2), and can stand in their place:
/// pid 0 is this process, pages[i] is any address in a page, nodes[i] its node, and flags is
/// MPOL_MF_MOVE (2), or MPOL_MF_MOVE_ALL (4) to move pages as well that are mapped more than once
/// (needs CAP_SYS_NICE). The memory need not belong to a region.
///
/// The differences from these two: a page that cannot move does not keep others from moving,
/// status[i] is right for each page in any case, and single calls to the kernel take about 20 ms,
/// so that the process is not stuck for long. Pages that are in use are tried four times. A node is
/// not filled beyond its high watermark and a reserve, because the kernel would drop or swap out
/// memory of other programs for it.
///
/// status[i] becomes the node on which the page lies, or a negated errno: -ENOENT no page is
/// present; -EFAULT nothing is mapped, or it is the kernel's zero page; -EACCES the page is mapped
/// more than once, or the cpuset of the process forbids the node; -EBUSY it is in use (pinned,
/// locked, being written back); -ENOMEM the node has no room; -ENODEV there is no such node; -ESRCH
/// the process ended meanwhile. `status` may be NULL.
///
/// Returns how many pages were present and have not moved to their nodes, at most INT_MAX, and 0
/// where `nodes` is NULL. Pages for a node that does not exist count here, too; the kernel's call
/// would fail with ENODEV. Returns -1 if nothing could be done: errno says why, and
/// pageleap_last_error() says it in words.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_move_pages(
    pid: c_int,
    count: c_ulong,
    pages: *const *mut c_void,
    nodes: *const c_int,
    status: *mut c_int,
    flags: c_int,
) -> c_int {
    let mut left = 0;
    let ended = run(|| {
        // SAFETY: forwarded to the caller. An address has the size of a `usize`.
        let pages: &[usize] = unsafe { array(pages.cast(), count as usize, "pages") }?;
        let nodes = match nodes.is_null() {
            true => None,
            // SAFETY: forwarded to the caller.
            false => Some(unsafe { array(nodes, count as usize, "nodes") }?),
        };
        let found = move_pages(pid, pages, nodes, flags)?;
        let refused = match nodes {
            Some(_) => found.iter().filter(|status| has_stayed(status)).count(),
            None => 0,
        };
        left = c_int::try_from(refused).unwrap_or(c_int::MAX);
        if !status.is_null() {
            for (at, found) in found.iter().enumerate() {
                // SAFETY: the caller's array has `count` elements.
                unsafe { status.add(at).write(found.code()) };
            }
        }
        Ok(())
    });
    let errno = match ended {
        pageleap_status::PAGELEAP_OK => return left,
        _ if pid < 0 || !exists(pid) => libc::ESRCH,
        pageleap_status::PAGELEAP_BAD_ARGUMENT => libc::EINVAL,
        _ => libc::EPERM,
    };
    // SAFETY: the C library's variable of this thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}

fn move_pages(
    pid: c_int,
    pages: &[usize],
    nodes: Option<&[c_int]>,
    flags: c_int,
) -> Result<Vec<PageStatus>, Error> {
    let bad_pid = |_| bad("process", format!("{pid} is no process"), "name one that exists");
    let pid = u32::try_from(pid).map_err(bad_pid)?;
    if flags & !(MOVE | MOVE_ALL) != 0 {
        let reason = format!("{flags} has unknown bits");
        return Err(bad("flags", reason, "use MPOL_MF_MOVE or MPOL_MF_MOVE_ALL"));
    }
    // A negative number becomes the id of a node that no machine has. SAFETY: a node id is one
    // number, as in C.
    let nodes: Option<&[NodeId]> = nodes
        .map(|nodes| unsafe { std::slice::from_raw_parts(nodes.as_ptr().cast(), nodes.len()) });
    pageleap::move_pages(pid, pages, nodes, flags & MOVE_ALL != 0)
}

/// Whether the page is present and has not moved to its node. The kernel does not count absent
/// pages either.
fn has_stayed(status: &PageStatus) -> bool {
    use pageleap::Reason::{Absent, SwappedOut, Unmapped, ZeroPage};
    !matches!(status.reason, None | Some(Absent | SwappedOut | Unmapped | ZeroPage))
}

fn exists(pid: c_int) -> bool {
    pid == 0 || std::path::Path::new(&format!("/proc/{pid}")).exists()
}
