//! Migration contexts keep threads and descriptors for jobs that follow one another.

use pageleap::MigrationContext;

use crate::boundary::{free, give, nothing_yet};
use crate::status::pageleap_status;

/// A migration context keeps threads and userfaultfd descriptors of a job for the next job. Many
/// small jobs, one after the other, take a fraction of the time with a context, because no job has
/// to make these anew. Without a context each job makes its own, and between two jobs the process
/// has no thread and no descriptor of a job.
///
/// The field context of pageleap_job_options gives a context to a job. The context makes nothing
/// before the first job needs it. Then it has about as many threads as jobs have run at the same
/// time, up to three more that read messages of userfaultfds, and at most ten descriptors. Between
/// jobs the threads sleep. Jobs of several threads may use a context at the same time.
///
/// A kept thread has the scheduling policy, nice value, affinity, memory policy and cgroup of the
/// thread that started the job for which it was made. The thread that starts a later job passes
/// none of these on to it. A program whose threads differ in these makes several contexts.
///
/// A context works only in the process that has made it. In a child made by fork() it keeps
/// nothing, and a job with this context works as without one. The child may free it.
pub struct pageleap_migration_context(pub(crate) MigrationContext);

/// Makes a migration context that keeps nothing yet. It is freed with
/// pageleap_migration_context_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_migration_context_new(
    context: *mut *mut pageleap_migration_context,
) -> pageleap_status {
    // SAFETY: forwarded to the caller.
    unsafe { nothing_yet(context) };
    boundary!({
        let make = || Ok(pageleap_migration_context(MigrationContext::new()));
        // SAFETY: forwarded to the caller.
        unsafe { give(context, "context", make) }
    })
}

/// Frees a migration context; NULL is allowed. The call does not wait for jobs that use the
/// context: they keep their threads and descriptors until they end. Sleeping threads of the context
/// end soon after the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_migration_context_free(context: *mut pageleap_migration_context) {
    // SAFETY: forwarded to the caller.
    unsafe { free(context) };
}
