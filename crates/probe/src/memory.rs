//! Memory files, their page tables, and transparent huge pages of them. Everything is tried on a
//! few pages that are unmapped again.

use std::fs::File;
use std::os::fd::AsFd;

use pageleap::for_probe::human_bytes;
use pageleap::{BASE_PAGE, observe};
use pageleap_sys::{self as sys, Advice, Errno};

use crate::around::Around;
use crate::finding::{Finding, State, Topic, Who};
use crate::scratch::{Failed, Scratch, Span};

/// Bytes of a huge page of shared memory.
const HUGE: usize = 2 << 20;

/// The outcomes of the calls on memory files.
#[derive(Clone, Debug)]
struct FileTrial {
    /// With `MFD_NOEXEC_SEAL`.
    noexec: Result<(), Errno>,
    /// Without.
    plain: Result<(), Errno>,
    /// Truncating a sealed file.
    truncated: Result<(), Errno>,
}

pub(crate) fn findings(around: &Around, room: Option<u64>) -> Vec<Finding> {
    let (files, seals) = memory_files(around);
    vec![files, seals, populate(around), move_page_tables(around), shmem_thp(around, room)]
}

fn memory_files(around: &Around) -> (Finding, Finding) {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    let create = |flags| sys::memfd_create_with(c"pageleap:probe", flags);
    let noexec = create(flags | sys::MFD_NOEXEC_SEAL);
    let plain = create(flags);
    let trial = FileTrial {
        noexec: noexec.as_ref().map(drop).map_err(|e| *e),
        plain: plain.as_ref().map(drop).map_err(|e| *e),
        truncated: noexec.or(plain).and_then(|file| {
            sys::memfd_seal(file.as_fd(), BASE_PAGE)?;
            let truncated = File::from(file).set_len(0);
            truncated.map_err(|e| Errno(e.raw_os_error().unwrap_or(libc::EIO)))
        }),
    };
    judge_files(around, &trial)
}

fn judge_files(around: &Around, trial: &FileTrial) -> (Finding, Finding) {
    let (policy, policy_seen) = around.read_number("proc/sys/vm/memfd_noexec");
    let files = match (trial.noexec, trial.plain) {
        (Ok(()), _) => Finding::works(
            Topic::MemoryFiles,
            "memory files can be made, sealable and never executable",
        ),
        (Err(Errno(libc::EINVAL)), Ok(())) => Finding::works(
            Topic::MemoryFiles,
            "memory files can be made, sealable (MFD_NOEXEC_SEAL came with Linux 6.3)",
        ),
        (_, Ok(())) => Finding::limited(
            Topic::MemoryFiles,
            "memory files can be made, but not with MFD_NOEXEC_SEAL, which pools ask for",
            around.refusal("memfd_create(MFD_NOEXEC_SEAL)", trial.noexec.err().unwrap_or(Errno(0))),
        ),
        (Err(errno @ Errno(libc::EMFILE | libc::ENFILE)), _) => Finding::missing(
            Topic::MemoryFiles,
            "no memory files",
            format!("as many files are open as may be ({})", errno.name()),
        )
        .remedy(
            Who::You,
            "ulimit -n 4096",
            "more open files for this shell and what it starts",
        ),
        (Err(Errno(libc::EACCES)), _) if policy == Some(2) => Finding::missing(
            Topic::MemoryFiles,
            "no memory files",
            "vm.memfd_noexec=2 refuses them",
        )
        .remedy(
            Who::Root,
            "sysctl -w vm.memfd_noexec=1",
            "programs may make executable memory files again if they ask",
        ),
        (Err(errno), _) => Finding::missing(
            Topic::MemoryFiles,
            "no memory files",
            around.refusal("memfd_create", errno),
        )
        .filtered("memfd_create"),
    }
    .saw(format!(
        "memfd_create(MFD_CLOEXEC|MFD_ALLOW_SEALING|MFD_NOEXEC_SEAL): {}",
        outcome(&trial.noexec)
    ))
    .saw(format!("memfd_create(MFD_CLOEXEC|MFD_ALLOW_SEALING): {}", outcome(&trial.plain)))
    .saw(policy_seen);

    let seals = judge_seals(trial.truncated, files.state == State::Missing);
    (files, seals)
}

/// Whether seals hold: what truncating a sealed memory file did.
fn judge_seals(truncated: Result<(), Errno>, no_files: bool) -> Finding {
    let seen = format!("ftruncate of a file sealed against it: {}", outcome(&truncated));
    match truncated {
        Err(Errno(libc::EPERM)) => {
            Finding::works(Topic::Seals, "nobody can truncate a pool's file (F_SEAL_SHRINK holds)")
                .saw(seen)
        }
        Ok(()) => Finding::missing(
            Topic::Seals,
            "seals do not hold",
            "a sealed memory file could be truncated: this is no Linux that pageleap knows",
        )
        .saw(seen),
        Err(errno) if no_files => Finding::unknown(
            Topic::Seals,
            "not tried",
            format!("memory files cannot be made ({})", errno.name()),
        ),
        Err(errno) => Finding::missing(
            Topic::Seals,
            "memory files cannot be sized or sealed",
            match errno {
                Errno(libc::EFBIG) => "RLIMIT_FSIZE does not allow a file of one page".to_owned(),
                _ => format!("ftruncate or fcntl(F_ADD_SEALS) fails with {errno}"),
            },
        )
        .saw(seen)
        .remedy(
            Who::You,
            "ulimit -f unlimited",
            "files of any size for this shell and what it starts",
        ),
    }
}

/// A call's outcome as a line shows it.
fn outcome(result: &Result<(), Errno>) -> String {
    result.map_or_else(|errno| errno.to_string(), |()| "works".into())
}

fn populate(around: &Around) -> Finding {
    let tried = Scratch::new(2 * BASE_PAGE, BASE_PAGE, None).map(|scratch| {
        let populated = scratch.span.advise(Advice::PopulateWrite);
        if populated.is_ok() {
            scratch.span.write(BASE_PAGE, 7);
        }
        populated
    });
    judge_populate(around, tried)
}

fn judge_populate(around: &Around, tried: Result<Result<(), Errno>, Failed>) -> Finding {
    let topic = Topic::Populate;
    match tried {
        Err(failed) => could_not_try(topic, &failed),
        Ok(Ok(())) => Finding::works(topic, "page tables can be filled without risking a signal")
            .saw("madvise(MADV_POPULATE_WRITE) of a memory file: works"),
        Ok(Err(errno)) => {
            let finding = match errno {
                Errno(libc::EINVAL) => Finding::missing(
                    topic,
                    "page tables cannot be filled safely",
                    "MADV_POPULATE_WRITE came with Linux 5.14",
                )
                .remedy(Who::Root, "boot Linux 5.14 or later", ""),
                Errno(libc::ENOMEM | libc::EFAULT | libc::EAGAIN) => Finding::missing(
                    topic,
                    "not even two pages could be filled",
                    "the memory cgroup, the machine, or with vm.overcommit_memory=2 its CommitLimit \
                     has run out of memory",
                ),
                other => Finding::missing(
                    topic,
                    "page tables cannot be filled",
                    around.refusal("madvise(MADV_POPULATE_WRITE)", other),
                )
                .filtered("madvise"),
            };
            finding.saw(format!("madvise(MADV_POPULATE_WRITE) of a memory file: {errno}"))
        }
    }
}

fn move_page_tables(around: &Around) -> Finding {
    const LEN: usize = 2 * BASE_PAGE;
    let tried = Scratch::populated(LEN, BASE_PAGE).and_then(|from| {
        let to = Span::reserve(LEN, BASE_PAGE).map_err(Failed::at("mmap(PROT_NONE)"))?;
        from.span.write(0, 0x5a);
        // SAFETY: both ranges are this function's, and apart.
        let moved = unsafe { sys::exchange_page_tables(from.span.start, to.start, LEN) };
        if moved.is_err() && !sys::is_mapped(to.start, LEN) {
            // The call has unmapped its target, so that the probe must not unmap it again.
            std::mem::forget(to);
            return Ok(moved);
        }
        // The page went along, and the old place still maps the file.
        let whole = moved.is_err() || to.read(0) == 0x5a && from.span.read(0) == 0x5a;
        Ok(moved.and(if whole { Ok(()) } else { Err(Errno(libc::EIO)) }))
    });
    let topic = Topic::MovePageTables;
    match tried {
        Err(failed) => could_not_try(topic, &failed),
        Ok(Ok(())) => Finding::works(
            topic,
            "filled page tables move with the data: no page faults after a leap",
        )
        .saw("mremap(MREMAP_DONTUNMAP) of a memory file: works, contents in both places right"),
        Ok(Err(errno)) => Finding::limited(
            topic,
            "page tables cannot be moved: areas are mapped anew, which costs about 50 ms/GB more",
            match errno {
                Errno(libc::EINVAL) => {
                    "MREMAP_DONTUNMAP works on memory files since Linux 5.13".to_owned()
                }
                Errno(libc::ENOMEM) => {
                    "the process has as many mappings or as much address space as it may".to_owned()
                }
                other => around.refusal("mremap(MREMAP_DONTUNMAP)", other),
            },
        )
        .saw(format!("mremap(MREMAP_DONTUNMAP) of a memory file: {errno}")),
    }
}

/// How an attempt to make a huge page of shared memory ended.
#[derive(Clone, Debug)]
enum ThpTrial {
    /// It was huge as soon as it was filled.
    AtOnce,
    /// The call has reported success; smaps agrees or does not.
    Collapsed { seen_in_smaps: bool },
    /// The call failed.
    Refused(Errno),
}

fn shmem_thp(around: &Around, room: Option<u64>) -> Finding {
    /// Bytes that have to be free before 2 MB are tried.
    const ROOM: u64 = 16 << 20;
    if let Some(room) = room.filter(|room| *room < ROOM) {
        return Finding::unknown(
            Topic::ShmemThp,
            "not tried",
            format!("only {} of memory are free", human_bytes(room)),
        );
    }
    let tried = Scratch::populated(HUGE, HUGE).and_then(|scratch| {
        let (start, len) = (scratch.span.start, scratch.span.len);
        let is_huge =
            || observe::mapped_pages(start, len).map(|pages| pages.huge_mapped_ratio > 0.99);
        let unreadable = |_| Failed::at("/proc/self/smaps")(Errno(libc::ENOENT));
        if is_huge().map_err(unreadable)? {
            return Ok(ThpTrial::AtOnce);
        }
        match scratch.span.advise(Advice::Collapse) {
            Ok(()) => Ok(ThpTrial::Collapsed { seen_in_smaps: is_huge().map_err(unreadable)? }),
            Err(errno) => Ok(ThpTrial::Refused(errno)),
        }
    });
    judge_thp(around, tried, sys::thp_disabled().unwrap_or(false))
}

fn judge_thp(around: &Around, tried: Result<ThpTrial, Failed>, switched_off: bool) -> Finding {
    const SWITCH: &str = "sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let topic = Topic::ShmemThp;
    let (switch, seen) = around.read_line(SWITCH);
    let chosen =
        switch.as_deref().and_then(|s| Some(s.split_once('[')?.1.split_once(']')?.0.to_owned()));
    let finding = match tried {
        Err(failed) => return could_not_try(topic, &failed).saw(seen),
        Ok(ThpTrial::AtOnce) => {
            Finding::works(topic, "memory files get huge pages as soon as they are filled")
                .saw("a memory file of 2 MB: ShmemPmdMapped 2048 kB after filling it")
        }
        Ok(ThpTrial::Collapsed { seen_in_smaps: true }) => Finding::works(
            topic,
            match chosen.as_deref() {
                Some("never" | "deny") => {
                    "huge pages of shared memory can be made (MADV_COLLAPSE), although shmem_enabled says no"
                }
                _ => "huge pages of shared memory can be made (MADV_COLLAPSE)",
            },
        )
        .saw("madvise(MADV_COLLAPSE) of 2 MB of a memory file: works, ShmemPmdMapped 2048 kB"),
        Ok(ThpTrial::Collapsed { seen_in_smaps: false }) => Finding::missing(
            topic,
            "MADV_COLLAPSE reports success, and smaps shows no huge page",
            "the kernel split the page again, or maps it by base pages",
        )
        .saw("madvise(MADV_COLLAPSE) of 2 MB of a memory file: works, ShmemPmdMapped below 2048 kB"),
        Ok(ThpTrial::Refused(errno)) => {
            let finding = match errno {
                Errno(libc::EINVAL) if switched_off => Finding::missing(
                    topic,
                    "no huge pages of shared memory",
                    "transparent huge pages are switched off for this process \
                     (prctl(PR_SET_THP_DISABLE), inherited from the process that started it)",
                ),
                Errno(libc::EINVAL) if switch.is_none() => Finding::missing(
                    topic,
                    "no huge pages of shared memory",
                    "the kernel was built without CONFIG_TRANSPARENT_HUGEPAGE, or /sys is not mounted",
                ),
                Errno(libc::EINVAL) if chosen.as_deref() == Some("deny") => Finding::missing(
                    topic,
                    "no huge pages of shared memory",
                    "shmem_enabled forbids them, also to programs that ask for them (deny)",
                )
                .remedy(
                    Who::Root,
                    format!("echo never > /{SWITCH}"),
                    "programs that ask for huge pages of their memory files (MADV_COLLAPSE) get them; no others do",
                ),
                Errno(libc::EINVAL) => Finding::missing(
                    topic,
                    "no huge pages of shared memory",
                    "this kernel refuses MADV_COLLAPSE, which came with Linux 6.1",
                )
                .remedy(
                    Who::Root,
                    format!("echo always > /{SWITCH}"),
                    "memory files and System V shared memory of every program get huge pages, whether they ask or not: fewer TLB misses, more \
                     memory used by sparse ones",
                ),
                Errno(libc::EAGAIN | libc::ENOMEM | libc::EBUSY) => Finding::missing(
                    topic,
                    "no huge page could be made now",
                    "no 2 MB of contiguous memory are free (or a memory cgroup is full)",
                )
                .remedy(
                    Who::Root,
                    "echo 1 > /proc/sys/vm/compact_memory",
                    "nothing; moves pages of all programs together once, which takes CPU time",
                ),
                other => Finding::missing(topic, "no huge pages of shared \
                 memory", around.refusal("madvise(MADV_COLLAPSE)", other)),
            };
            finding.saw(format!("madvise(MADV_COLLAPSE) of 2 MB of a memory file: {errno}"))
        }
    };
    finding.saw(seen)
}

/// A finding about something that could not be tried because an earlier step failed.
pub(crate) fn could_not_try(topic: Topic, failed: &Failed) -> Finding {
    Finding::unknown(topic, "not tried", "a call that comes before it failed").saw(failed.seen())
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::tests::around;

    #[test]
    fn refused_memory_files_are_told_apart() {
        let mut filtered = around(&[("proc/sys/vm/memfd_noexec", "2\n")], None);
        filtered.filtered = Some(true);
        let trial = |noexec, plain| FileTrial { noexec, plain, truncated: Err(Errno(libc::EPERM)) };
        let judge = |noexec, plain| judge_files(&filtered, &trial(noexec, plain)).0;
        assert_eq!(
            judge(Ok(()), Err(Errno(libc::EACCES))).state,
            State::Works,
            "pools ask for the seal"
        );
        assert_eq!(judge(Err(Errno(libc::EINVAL)), Ok(())).state, State::Works, "before Linux 6.3");
        let refused = judge(Err(Errno(libc::EPERM)), Err(Errno(libc::EPERM)));
        assert!(
            refused.reason.contains("seccomp filter") && refused.filtered == Some("memfd_create"),
            "{refused}"
        );
        let files = judge(Err(Errno(libc::EMFILE)), Err(Errno(libc::EMFILE)));
        assert!(files.remedies[0].line.starts_with("ulimit -n"), "{files:?}");
    }

    #[test]
    fn a_huge_page_counts_only_if_smaps_shows_it() {
        let files = [("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [never] deny\n")];
        let around = around(&files, None);
        let judge = |trial, off| judge_thp(&around, Ok(trial), off);
        assert_eq!(judge(ThpTrial::Collapsed { seen_in_smaps: true }, false).state, State::Works);
        assert_eq!(
            judge(ThpTrial::Collapsed { seen_in_smaps: false }, false).state,
            State::Missing
        );
        let old = judge(ThpTrial::Refused(Errno(libc::EINVAL)), false);
        assert!(
            old.reason.contains("6.1") && old.remedies[0].line.starts_with("echo always > /sys/"),
            "{old:?}"
        );
        let off = judge(ThpTrial::Refused(Errno(libc::EINVAL)), true);
        assert!(off.reason.contains("PR_SET_THP_DISABLE") && off.remedies.is_empty(), "{off:?}");
    }
}
