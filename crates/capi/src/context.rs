//! Contexts: resources that several jobs use one after the other.

use pageleap::MigrationContext;

use crate::boundary::{free, give, nothing_yet};
use crate::status::pageleap_status;

/// A migration context keeps what jobs need besides their frames for the next job: threads, and the
/// descriptors through which the kernel tells of writes and holds threads up (userfaultfd). With a
/// context many small jobs, one after the other, take a fraction of the time, because no job has to
/// make them. Without one each job makes its own, and between two jobs the process has no thread and
/// no descriptor of a job.
///
/// A job is given a context by the field context of pageleap_job_options. The context makes nothing
/// before the first job needs it. Then it has about as many threads as jobs have run at the same time, up
/// to three more that read messages of the kernel, and at most ten descriptors. Between jobs the
/// threads sleep. Jobs of several threads may use a context at the same time.
///
/// A job that a kept thread runs inherits scheduling policy, nice value, affinity, memory policy and
/// cgroup from the thread that started the job for which the kept thread was made, and not from the
/// thread that starts this job. A program whose threads differ in these makes several contexts.
///
/// A context serves the process that has made it. In a child made by fork() it keeps nothing: a job
/// that is given it works as without one. The child may free it.
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

/// Frees a migration context; NULL is allowed. The call does not wait for jobs: those that use the
/// context keep what they use until they end. Threads that sleep end soon after the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageleap_migration_context_free(context: *mut pageleap_migration_context) {
    // SAFETY: forwarded to the caller.
    unsafe { free(context) };
}
