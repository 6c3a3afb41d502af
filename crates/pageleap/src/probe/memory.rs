//! Memory files, their page tables, and the sizes of their pages. Everything is tried on a few
//! pages that are unmapped again.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;

use pageleap_sys::{self as sys, Advice, Errno};

use super::around::Around;
use super::demand::Demand;
use super::finding::{Finding, Remedy, State, Topic, Who};
use super::limits::ask_for_less;
use super::scratch::{Failed, Scratch, Span};
use crate::observe;
use crate::topology::Node;
use crate::units::{BASE_PAGE, PageSize, human_bytes};

/// Bytes of a huge page of shared memory.
const HUGE: usize = 2 << 20;

/// What trying left of memory files.
#[derive(Clone, Debug)]
struct FileTrial {
    /// With `MFD_NOEXEC_SEAL`.
    noexec: Result<(), Errno>,
    /// Without.
    plain: Result<(), Errno>,
    /// Truncating a sealed file.
    truncated: Result<(), Errno>,
}

pub(super) fn findings(around: &Around, room: Option<u64>) -> Vec<Finding> {
    let (files, seals) = memory_files(around);
    vec![files, seals, populate(around), move_page_tables(around), shmem_thp(around, room)]
}

/// Of these the files alone tell something too.
pub(super) fn hugetlb_findings(around: &Around, demand: &Demand, nodes: &[Node]) -> Vec<Finding> {
    [PageSize::Huge2M, PageSize::Huge1G].map(|page| hugetlb(around, demand, nodes, page)).into()
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
    let seen = |result: &Result<(), Errno>| {
        result.map_or_else(|errno| errno.to_string(), |()| "works".into())
    };
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
        seen(&trial.noexec)
    ))
    .saw(format!("memfd_create(MFD_CLOEXEC|MFD_ALLOW_SEALING): {}", seen(&trial.plain)))
    .saw(policy_seen);

    let truncated = format!("ftruncate of a file sealed against it: {}", seen(&trial.truncated));
    let seals = match trial.truncated {
        Err(Errno(libc::EPERM)) => {
            Finding::works(Topic::Seals, "nobody can truncate a pool's file (F_SEAL_SHRINK holds)")
                .saw(truncated)
        }
        Ok(()) => Finding::missing(
            Topic::Seals,
            "seals do not hold",
            "a sealed memory file could be truncated: this is no Linux that pageleap knows",
        )
        .saw(truncated),
        Err(errno) if files.state == State::Missing => Finding::unknown(
            Topic::Seals,
            "not tried",
            format!("there are no memory files ({})", errno.name()),
        ),
        Err(errno) => Finding::missing(
            Topic::Seals,
            "memory files cannot be sized or sealed",
            match errno {
                Errno(libc::EFBIG) => "RLIMIT_FSIZE does not allow a file of one page".to_owned(),
                _ => format!("ftruncate or fcntl(F_ADD_SEALS) fails with {errno}"),
            },
        )
        .saw(truncated)
        .remedy(
            Who::You,
            "ulimit -f unlimited",
            "files of any size for this shell and what it starts",
        ),
    };
    (files, seals)
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
            // The call has unmapped its target: the addresses are no longer ours to unmap.
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
    /// The call says so, and so does smaps: or not.
    Collapsed { seen_in_smaps: bool },
    /// The call failed.
    Refused(Errno),
}

fn shmem_thp(around: &Around, room: Option<u64>) -> Finding {
    /// What 2 MB more may leave to others in a cgroup.
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
        let unreadable = |_| Failed { call: "/proc/self/smaps".into(), errno: Errno(libc::ENOENT) };
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
                     (prctl(PR_SET_THP_DISABLE), inherited from who started it)",
                ),
                Errno(libc::EINVAL) if switch.is_none() => Finding::missing(
                    topic,
                    "no huge pages of shared memory",
                    "the kernel was built without CONFIG_TRANSPARENT_HUGEPAGE, or /sys is not mounted",
                ),
                Errno(libc::EINVAL) if chosen.as_deref() == Some("deny") => Finding::missing(
                    topic,
                    "no huge pages of shared memory",
                    "shmem_enabled forbids them, also to those who ask for them (deny)",
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

/// What trying one page of the hugetlb pool showed.
#[derive(Clone, Debug)]
enum HugeTrial {
    /// A page was mapped, and smaps shows its size, if smaps can be read.
    Mapped { seen: bool },
    /// Mapped, but smaps shows another size.
    WrongSize(usize),
    /// No page of that size is free, so none was tried.
    NoneFree,
    /// A call failed.
    Failed(Failed),
}

/// A node's hugetlb pool.
#[derive(Clone, Debug)]
struct HugePool {
    node: u32,
    total: u64,
    free: u64,
    /// Bytes of ordinary memory that are free there.
    memory: u64,
    /// Relative to the root.
    file: String,
    /// Whether this process could write the number, or why not.
    writable: Result<(), Errno>,
}

fn hugetlb(around: &Around, demand: &Demand, nodes: &[Node], page: PageSize) -> Finding {
    let bytes = page.bytes();
    let folder = |node: u32| {
        format!("sys/devices/system/node/node{node}/hugepages/hugepages-{}kB", bytes >> 10)
    };
    let pools: Vec<HugePool> = nodes
        .iter()
        .filter_map(|node| {
            let file = format!("{}/nr_hugepages", folder(node.id.0));
            let total = around.read_number(&file).0?;
            let free = around.read_number(&format!("{}/free_hugepages", folder(node.id.0))).0?;
            // Opening it changes nothing; writing would.
            let writable = if around.live {
                let opened = OpenOptions::new().write(true).open(around.files.root().join(&file));
                opened.map(drop).map_err(|e| Errno(e.raw_os_error().unwrap_or(libc::EIO)))
            } else {
                Err(Errno(libc::EPERM))
            };
            Some(HugePool { node: node.id.0, total, free, memory: node.free_bytes, file, writable })
        })
        .collect();
    let free = free_of(&pools);
    let trial = around.live.then(|| {
        let bits = bytes.trailing_zeros();
        if let Err(errno) = sys::memfd_create(c"pageleap:probe", Some(bits)) {
            return HugeTrial::Failed(Failed {
                call: format!("memfd_create(MFD_HUGETLB, {})", human_bytes(bytes as u64)),
                errno,
            });
        }
        if free == 0 && !pools.is_empty() {
            return HugeTrial::NoneFree;
        }
        match Scratch::new(bytes, bytes, Some(bits)) {
            Err(failed) => HugeTrial::Failed(failed),
            Ok(scratch) => match scratch.span.advise(Advice::PopulateWrite) {
                Err(errno) => HugeTrial::Failed(Failed {
                    call: "madvise(MADV_POPULATE_WRITE) of a huge page".into(),
                    errno,
                }),
                Ok(()) => match observe::mapped_pages(scratch.span.start, bytes) {
                    Ok(mapped) if mapped.kernel_page_size != bytes => {
                        HugeTrial::WrongSize(mapped.kernel_page_size)
                    }
                    mapped => HugeTrial::Mapped { seen: mapped.is_ok() },
                },
            },
        }
    });
    judge_hugetlb(around, demand, page, &pools, trial)
}

fn judge_hugetlb(
    around: &Around,
    demand: &Demand,
    page: PageSize,
    pools: &[HugePool],
    trial: Option<HugeTrial>,
) -> Finding {
    let topic = if page == PageSize::Huge2M { Topic::Hugetlb2M } else { Topic::Hugetlb1G };
    let size = human_bytes(page.bytes() as u64);
    let free = free_of(pools);
    let on_nodes = pools
        .iter()
        .map(|pool| format!("node {}: {} of {}", pool.node, pool.free, pool.total))
        .collect::<Vec<_>>()
        .join(", ");
    let seen = if pools.is_empty() {
        format!(
            "{}: no pages of {size} counted",
            around.shown("sys/devices/system/node/node*/hugepages")
        )
    } else {
        format!(
            "free pages of {size}, {on_nodes} (node*/hugepages/hugepages-{}kB)",
            page.bytes() >> 10
        )
    };
    // How many a leap takes of each node: on a machine with one node both pools lie there.
    let asked = demand.page == page;
    let wanted = Demand { bytes: demand.bytes.filter(|_| asked), page };
    let per_pool = wanted.pool_bytes() / page.bytes() as u64;
    let needed = if pools.len() > 1 { per_pool } else { 2 * per_pool };
    let short: Vec<&HugePool> = pools.iter().filter(|pool| pool.free < needed).collect();
    let what = wanted
        .bytes
        .map_or("a trial".to_owned(), |bytes| format!("a leap of {}", human_bytes(bytes)));
    let takes = match pools.len() {
        1 => format!("{what} takes {needed}, both pools being on the one node"),
        _ => format!("{what} takes {needed} on each of its two nodes"),
    };
    let hint = match wanted.bytes {
        Some(_) => String::new(),
        None => format!("; for more: pageleap doctor --page-size {page} --size BYTES"),
    };
    // Two nodes are enough, or the one that there is.
    let enough = pools.len() - short.len() >= pools.len().min(2);

    let finding = match trial {
        Some(HugeTrial::Failed(failed)) => {
            let reason = match failed.errno {
                Errno(libc::ENODEV | libc::ENOENT | libc::EINVAL) if pools.is_empty() => {
                    format!(
                        "neither the kernel nor the processor may know pages of {size} \
                     (CONFIG_HUGETLBFS; flags pse, pdpe1gb)"
                    )
                }
                Errno(libc::ENOMEM | libc::EFAULT | libc::ENOSPC) if pools.is_empty() => {
                    "most likely none are free; sysfs, which would tell, is not there".into()
                }
                Errno(libc::ENOMEM | libc::EFAULT | libc::ENOSPC) => {
                    "the free pages are reserved by others, lie on nodes outside the cpuset, or the \
                     hugetlb cgroup (hugetlb.*.max) refuses them"
                        .into()
                }
                other => around.refusal(&failed.call, other),
            };
            return Finding::missing(topic, format!("no pages of {size}"), reason)
                .saw(failed.seen())
                .saw(seen)
                .remedies(if pools.is_empty() {
                    Vec::new()
                } else {
                    reserve(&wanted, pools.iter(), needed)
                });
        }
        Some(HugeTrial::WrongSize(found)) => {
            return Finding::missing(
                topic,
                format!("no pages of {size}"),
                format!("smaps shows pages of {found} bytes"),
            )
            .saw(seen);
        }
        None if pools.is_empty() => {
            return Finding::missing(topic, format!("no pages of {size}"), "no node counts any")
                .saw(seen);
        }
        _ if pools.is_empty() && free == 0 => Finding::unknown(
            topic,
            format!("pages of {size} exist, their number is not known"),
            "sysfs does not tell it",
        ),
        _ if free == 0 => Finding::missing(
            topic,
            format!("no pages of {size} are free"),
            format!("somebody must reserve them first, none are by default; {takes}{hint}"),
        ),
        _ if !enough && asked => Finding::missing(
            topic,
            format!("too few pages of {size} are free"),
            format!("{takes}{hint}"),
        ),
        _ if !short.is_empty() => Finding::limited(
            topic,
            format!("pages of {size} are free on some nodes only, or few"),
            format!("{takes}{hint}"),
        ),
        Some(HugeTrial::Mapped { seen: true }) => Finding::works(
            topic,
            format!("pages of {size}: {free} are free, one was mapped and seen in smaps"),
        ),
        Some(_) => Finding::works(
            topic,
            format!(
                "pages of {size}: {free} are free, one was mapped (its size cannot be verified without smaps)"
            ),
        ),
        None => Finding::works(topic, format!("pages of {size}: {free} are free")),
    };
    let remedies = if finding.state == State::Works {
        Vec::new()
    } else {
        reserve(&wanted, short.into_iter(), needed)
    };
    finding.saw(seen).remedies(remedies)
}

fn free_of(pools: &[HugePool]) -> u64 {
    pools.iter().fold(0, |sum, pool| sum.saturating_add(pool.free))
}

/// The lines that reserve what is missing on each node.
fn reserve<'a>(
    wanted: &Demand,
    pools: impl Iterator<Item = &'a HugePool>,
    needed: u64,
) -> Vec<Remedy> {
    let page = wanted.page;
    let page_bytes = page.bytes() as u64;
    let pools: Vec<&HugePool> = pools.collect();
    if pools.is_empty() {
        return Vec::new();
    }
    let missing = |pool: &HugePool| needed.saturating_sub(pool.free).max(1);
    // Asked for more than there is, the kernel would reserve all that it can find and leave the
    // machine without memory.
    let spare = |pool: &HugePool| pool.memory / 8 * 7;
    if pools.iter().any(|pool| missing(pool).saturating_mul(page_bytes) > spare(pool)) {
        let possible =
            |pool: &&HugePool| spare(pool).saturating_add(pool.free.saturating_mul(page_bytes));
        let pools_per_node = needed / (wanted.pool_bytes() / page_bytes).max(1);
        let most = pools.iter().map(possible).min().unwrap_or(0) / pools_per_node.max(1);
        return ask_for_less(most, wanted).into_iter().collect();
    }
    let lines = pools
        .iter()
        .map(|pool| format!("echo {} > /{}", pool.total.saturating_add(missing(pool)), pool.file));
    let total = pools.iter().fold(0u64, |sum, pool| sum.saturating_add(missing(pool)));
    let bytes = human_bytes(total.saturating_mul(page.bytes() as u64));
    let who = if pools.iter().all(|pool| pool.writable.is_ok()) { Who::You } else { Who::Root };
    let read_only = pools.iter().any(|pool| pool.writable == Err(Errno(libc::EROFS)));
    let mut remedies = vec![Remedy::new(
        who,
        lines.collect::<Vec<_>>().join(" && "),
        format!(
            "takes {bytes} from everything else until the old number is written back. Any user may take them then \
             (memfd_create(MFD_HUGETLB) asks for no privilege){}",
            if read_only {
                ". /sys is read-only here: type it outside of the container"
            } else {
                ""
            }
        ),
    )];
    if page == PageSize::Huge1G {
        let all = pools.iter().fold(total, |sum, pool| sum.saturating_add(pool.total));
        remedies.push(Remedy::new(
            Who::Root,
            format!("hugepagesz=1G hugepages={all}"),
            "on the kernel's command line: the same, spread over all nodes, from the next boot on; \
             later there is seldom 1 GB of contiguous memory",
        ));
    }
    remedies
}

/// A finding about something that could not be tried because an earlier step failed.
pub(super) fn could_not_try(topic: Topic, failed: &Failed) -> Finding {
    Finding::unknown(topic, "not tried", "a call that comes before it failed").saw(failed.seen())
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::probe::tests::around;

    fn pool(node: u32, free: u64, memory: u64) -> HugePool {
        let file =
            format!("sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages");
        HugePool { node, total: 10, free, memory, file, writable: Err(Errno(libc::EACCES)) }
    }

    fn judged(pools: &[HugePool], bytes: u64) -> Finding {
        let demand = Demand { bytes: Some(bytes), page: PageSize::Huge2M };
        judge_hugetlb(
            &around(&[], None),
            &demand,
            PageSize::Huge2M,
            pools,
            Some(HugeTrial::NoneFree),
        )
    }

    #[test]
    fn huge_pages_are_reserved_on_top_of_those_that_are_there_and_on_two_nodes() {
        const GB: u64 = 1 << 30;
        let finding = judged(&[pool(0, 0, 64 * GB), pool(2, 3, 64 * GB)], GB);
        assert_eq!(finding.state, State::Missing);
        let folder = |node| {
            format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages")
        };
        let line = format!("echo 522 > {} && echo 519 > {}", folder(0), folder(2));
        assert_eq!(finding.remedies[0].line, line);
        assert_eq!(finding.remedies[0].who, Who::Root);
        // Both pools on the one node.
        let line = format!("echo 1034 > {}", folder(0));
        assert_eq!(judged(&[pool(0, 0, 64 * GB)], GB).remedies[0].line, line);
        // Two nodes with enough are enough.
        assert_eq!(
            judged(&[pool(0, 512, GB), pool(1, 512, GB), pool(2, 0, GB)], GB).state,
            State::Limited
        );
    }

    #[test]
    fn nobody_is_told_to_reserve_more_than_there_is() {
        let finding = judged(&[pool(0, 0, 16 << 30)], 100 << 30);
        assert_eq!(finding.state, State::Missing);
        // Seven eighths of the memory for two pools.
        assert_eq!(finding.remedies[0].line, "pageleap doctor --page-size 2m --size 7168m");
        assert!(!finding.remedies.iter().any(|r| r.line.contains("echo")), "{finding:?}");
    }

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
