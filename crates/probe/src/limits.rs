//! Judges limits for a leap of the requested size. Pools and jobs check the same limits again, step
//! by step.

use pageleap::for_probe::{MARGIN, human_bytes, mappings_apart, memory_limits};
use pageleap::topology::{Node, escaped};
use pageleap::{BASE_PAGE, DEFAULT_AREA_BYTES, observe};
use pageleap_sys::{self as sys, Errno, Resource, ResourceLimit};

use crate::around::{Around, drop_in, typed};
use crate::demand::Demand;
use crate::finding::{Finding, Remedy, Topic, Who};
use crate::placement::Allowed;

/// Mappings that every running leap takes besides those of its areas: reservations, aliases,
/// attributes, threads.
const SPARE_MAPPINGS: u64 = 64;
/// Address space that a leap takes besides pools and regions: threads with their stacks, and tables
/// of frames.
const SPARE_ADDRESS_SPACE: u64 = 64 << 20;

pub(crate) fn findings(
    around: &Around,
    demand: &Demand,
    nodes: &[Node],
    allowed: &Allowed,
) -> Vec<Finding> {
    let mut findings = vec![
        mappings(around, demand),
        free_memory(around, demand, nodes, allowed),
        cgroup_memory(around, demand),
        overcommit(around, demand),
        swap(around),
    ];
    if around.live {
        findings.extend([address_space(demand), file_size(demand), locked_memory(around, demand)]);
    }
    findings
}

/// Bytes of all pools of a leap.
fn both_pools(demand: &Demand) -> u64 {
    demand.pool_bytes().saturating_mul(2)
}

/// A remedy that asks for the largest leap that fits; `None` if no leap fits.
pub(crate) fn ask_for_less(bytes: u64, demand: &Demand) -> Option<Remedy> {
    let page_mb = (demand.page.bytes() as u64 >> 20).max(1);
    let mb = bytes >> 20;
    let mb = mb - mb % page_mb;
    (mb > 0).then(|| {
        let line = format!("pageleap doctor --page-size {} --size {mb}m", demand.page);
        Remedy::new(Who::You, line, "the largest that fits now")
    })
}

/// The most mappings that a leap can need. If no two neighbouring areas are in the same state, each
/// area needs two mappings: one of the region, and one of the alias of the frames that it vacates.
fn worst_mappings(demand: &Demand) -> u64 {
    let area = (DEFAULT_AREA_BYTES as u64).max(demand.page.bytes() as u64);
    demand.pool_bytes().div_ceil(area).saturating_mul(2).saturating_add(SPARE_MAPPINGS)
}

fn mappings(around: &Around, demand: &Demand) -> Finding {
    const FILE: &str = "proc/sys/vm/max_map_count";
    let topic = Topic::Mappings;
    let (limit, seen) = around.read_number(FILE);
    let Some(limit) = limit else {
        return Finding::unknown(
            topic,
            "the limit of mappings is not known",
            "vm.max_map_count cannot be read",
        )
        .saw(seen);
    };
    let in_use = if around.live { observe::mapping_count().unwrap_or(0) as u64 } else { 0 };
    // The mappings that a job asks for before it begins.
    let apart = match demand.page.is_hugetlb() {
        true => mappings_apart(&[demand.pool_bytes() / demand.page.bytes() as u64]),
        false => (0, 0),
    };
    let spare = SPARE_MAPPINGS.saturating_add(apart.0).saturating_add(apart.1);
    let worst = in_use.saturating_add(worst_mappings(demand));
    let most = human_bytes(
        (limit.saturating_sub(in_use + SPARE_MAPPINGS) / 2)
            .saturating_mul(DEFAULT_AREA_BYTES as u64),
    );
    let raised = worst.saturating_mul(2).max(262_144).min(i32::MAX as u64);
    let grants = "every process of the machine may have as many; each costs the kernel about 200 \
     bytes that cannot be swapped out";
    let line = format!("sysctl -w vm.max_map_count={raised}");
    let finding = if limit < in_use.saturating_add(spare) {
        Finding::missing(
            topic,
            format!("{} mappings are left", limit.saturating_sub(in_use)),
            format!(
                "the leap takes up to {spare} for a while, besides those of areas that are held up"
            ),
        )
        .remedy(Who::Root, line, grants)
    } else if limit < worst {
        Finding::limited(
            topic,
            format!("enough mappings for {}, unless it is disturbed throughout", demand),
            format!(
                "mappings of finished neighbours are joined again, so few are in use at a time; if every other area of 2 MB \
                 were held up, it would take {worst}. An area that finds none stays where it is, and the report says so"
            ),
        )
        .remedy(Who::Root, line, grants)
    } else {
        Finding::works(
            topic,
            format!("mappings suffice for leaps of up to {most}, however much they are disturbed"),
        )
    };
    let used = if around.live {
        format!("{in_use} mappings in use; at worst {worst} during {}", demand)
    } else {
        format!("at worst {worst} during {}", demand)
    };
    finding.saw(seen).saw(used)
}

/// A limit of the process, and how to raise it.
struct Limit {
    resource: Resource,
    /// Its letter for `ulimit`.
    ulimit: char,
    /// Its name for `prlimit`. In capitals after `RLIMIT_`, it is the name in the kernel's man
    /// pages.
    name: &'static str,
}

const ADDRESS_SPACE: Limit = Limit { resource: Resource::AddressSpace, ulimit: 'v', name: "as" };
const FILE_SIZE: Limit = Limit { resource: Resource::FileSize, ulimit: 'f', name: "fsize" };
const LOCKED_MEMORY: Limit =
    Limit { resource: Resource::LockedMemory, ulimit: 'l', name: "memlock" };

impl Limit {
    fn seen(&self, limit: ResourceLimit) -> String {
        let text = |bytes: Option<u64>| bytes.map_or("unlimited".to_owned(), human_bytes);
        let name = self.name.to_uppercase();
        format!("RLIMIT_{name}: {}; may be raised to {}", text(limit.soft), text(limit.hard))
    }

    /// The remedies that raise the limit to `needed` bytes.
    fn raise(&self, limit: ResourceLimit, needed: u64, grants: &str) -> Vec<Remedy> {
        let (flag, name) = (self.ulimit, self.name);
        let by_user = if limit.hard.is_none() {
            Some(format!("ulimit -S -{flag} unlimited"))
        } else {
            // Units of 1 KB, which bash and dash use for these limits (dash: 512 bytes for files).
            limit
                .hard
                .filter(|hard| *hard >= needed)
                .map(|_| format!("ulimit -S -{flag} {}", needed.div_ceil(1024)))
        };
        let first = match by_user {
            Some(line) => {
                Remedy::new(Who::You, line, format!("{grants}, for this shell and what it starts"))
            }
            None => Remedy::new(
                Who::Root,
                format!("prlimit --pid <PID OF THE SHELL> --{name}={needed}"),
                format!("{grants}, for that shell and what it starts from then on"),
            ),
        };
        let service = format!("Limit{}={needed}", name.to_uppercase());
        vec![first, Remedy::new(Who::Starter, drop_in(&service), "the same for a service")]
    }
}

fn unknown_limit(topic: Topic, errno: Errno) -> Finding {
    Finding::unknown(topic, "the limit is not known", format!("getrlimit fails with {errno}"))
}

fn address_space(demand: &Demand) -> Finding {
    let topic = Topic::AddressSpace;
    let limit = match sys::resource_limit(ADDRESS_SPACE.resource) {
        Ok(limit) => limit,
        Err(errno) => return unknown_limit(topic, errno),
    };
    let seen = ADDRESS_SPACE.seen(limit);
    // A leap takes two aliases and the region. Each is aligned: to 1 GB if it is that large, else
    // to 2 MB.
    let pool = demand.pool_bytes();
    let alignment = if pool >= 1 << 30 { 1 << 30 } else { 2 << 20 };
    let needed =
        pool.saturating_add(alignment).saturating_mul(3).saturating_add(SPARE_ADDRESS_SPACE);
    let finding = if limit.soft.is_none() {
        Finding::works(topic, "address space is not limited")
    } else if !sys::is_over_address_space_limit(BASE_PAGE, needed) {
        Finding::works(topic, format!("address space suffices for {demand}"))
    } else {
        // The address space in use is below the limit, or nothing would run. So limit plus need
        // suffices.
        let raised = needed.saturating_add(limit.soft.unwrap_or(0));
        Finding::missing(
            topic,
            format!("{demand} does not fit into the address space"),
            format!("it takes {} more: two pools, the region, and threads", human_bytes(needed)),
        )
        .remedies(ADDRESS_SPACE.raise(
            limit,
            raised,
            "more address space, which costs nothing by itself",
        ))
    };
    finding.saw(seen)
}

fn file_size(demand: &Demand) -> Finding {
    let topic = Topic::FileSize;
    let limit = match sys::resource_limit(FILE_SIZE.resource) {
        Ok(limit) => limit,
        Err(errno) => return unknown_limit(topic, errno),
    };
    let needed = demand.pool_bytes();
    let finding = match limit.soft {
        None => Finding::works(topic, "the size of files is not limited"),
        Some(bytes) if bytes >= needed => Finding::works(
            topic,
            format!("files may have {}, memory files included", human_bytes(bytes)),
        ),
        Some(_) => Finding::missing(
            topic,
            format!("a pool for {demand} is larger than files may be"),
            format!(
                "a pool is one memory file, here of {}, and RLIMIT_FSIZE counts for it",
                human_bytes(needed)
            ),
        )
        .remedies(FILE_SIZE.raise(limit, needed, "larger files")),
    };
    finding.saw(FILE_SIZE.seen(limit))
}

fn locked_memory(around: &Around, demand: &Demand) -> Finding {
    let topic = Topic::LockedMemory;
    let limit = match sys::resource_limit(LOCKED_MEMORY.resource) {
        Ok(limit) => limit,
        Err(errno) => return unknown_limit(topic, errno),
    };
    let needed = both_pools(demand);
    let can = around.can(sys::capability::IPC_LOCK);
    let held = match can {
        Some(true) => "yes",
        Some(false) => "no",
        None => "perhaps only in a user namespace, where it does not count",
    };
    let finding = match limit.soft {
        _ if can == Some(true) => Finding::works(topic, "any amount of memory may be locked"),
        None => Finding::works(topic, "any amount of memory may be locked"),
        Some(bytes) if bytes >= needed => Finding::works(
            topic,
            format!(
                "{} may be locked, enough for the pools of \
             {demand}",
                human_bytes(bytes)
            ),
        ),
        Some(bytes) => Finding::limited(
            topic,
            format!("{} may be locked", human_bytes(bytes)),
            format!(
                "the pools of {demand} take {}, and only locked memory is sure to stay resident; \
                 leaps themselves do without",
                human_bytes(needed)
            ),
        )
        .remedies(LOCKED_MEMORY.raise(
            limit,
            needed,
            &format!(
                "{} that cannot be swapped \
         out",
                human_bytes(needed)
            ),
        ))
        .remedy(
            Who::Root,
            format!(
                "echo '{} - memlock {}' > /etc/security/limits.d/60-pageleap.conf",
                around.user.as_deref().unwrap_or("<USER>"),
                needed.div_ceil(1024)
            ),
            format!(
                "from the next login on each process of this user may keep {} from being swapped \
             out",
                human_bytes(needed)
            ),
        )
        .remedy(
            Who::Starter,
            format!("docker run --ulimit memlock={needed} <IMAGE>"),
            "the same for \
         each process of a container",
        ),
    };
    finding.saw(LOCKED_MEMORY.seen(limit)).saw(format!("CAP_IPC_LOCK: {held}"))
}

fn free_memory(around: &Around, demand: &Demand, nodes: &[Node], allowed: &Allowed) -> Finding {
    const RESERVE: &str = "proc/sys/vm/min_free_kbytes";
    let topic = Topic::FreeMemory;
    if demand.page.is_hugetlb() {
        return Finding::works(
            topic,
            "huge pages come from their own pool, which is looked at there",
        );
    }
    let usable: Vec<&Node> =
        nodes.iter().filter(|node| allowed.allowed.contains(&node.id)).collect();
    if usable.is_empty() {
        return Finding::unknown(
            topic,
            "free memory is not known",
            "no node with memory is known that may be used",
        );
    }
    let reserve = around.read_number(RESERVE).0.unwrap_or(0).saturating_mul(1024);
    let kept = reserve.saturating_add(MARGIN);
    let per_node = if usable.len() > 1 { demand.pool_bytes() } else { both_pools(demand) };
    let free = |node: &Node| node.free_bytes.saturating_sub(kept);
    let (enough, short): (Vec<&Node>, Vec<&Node>) =
        usable.iter().partition(|node| free(node) >= per_node);
    let seen = usable.iter().map(|node| {
        format!(
            "node {}: {} free of {}",
            node.id.0,
            human_bytes(node.free_bytes),
            human_bytes(node.total_bytes)
        )
    });
    let names =
        |nodes: &[&Node]| nodes.iter().map(|n| n.id.0.to_string()).collect::<Vec<_>>().join(", ");
    let where_to = if usable.len() > 1 { "on each of its two nodes" } else { "on the one node" };
    let needs = format!(
        "{demand} takes {} {where_to}, and {} stay free",
        human_bytes(per_node),
        human_bytes(kept)
    );
    let enough_nodes = if usable.len() > 1 { 2 } else { 1 };
    let finding = if short.is_empty() {
        Finding::works(topic, format!("free memory suffices for {}", demand))
    } else if enough.len() >= enough_nodes {
        Finding::limited(topic, format!("node {} has too little free memory", names(&short)), needs)
    } else {
        Finding::missing(topic, format!("too little free memory for {}", demand), needs)
    };
    let largest = usable.iter().map(|node| free(node)).max().unwrap_or(0)
        / if usable.len() > 1 { 1 } else { 2 };
    let finding = if finding.reason.is_empty() {
        finding
    } else {
        finding.remedies(ask_for_less(largest, demand))
    };
    seen.fold(finding, Finding::saw)
}

/// The bytes that the strictest memory cgroup leaves; `None` without a limit.
pub(crate) fn cgroup_room(around: &Around) -> Option<u64> {
    memory_limits(&around.files).seen.into_iter().map(|limit| limit.left).min()
}

fn cgroup_memory(around: &Around, demand: &Demand) -> Finding {
    let topic = Topic::CgroupMemory;
    let (membership, membership_seen) = around.read_line("proc/self/cgroup");
    if membership.is_none() {
        return Finding::unknown(
            topic,
            "memory cgroups are not known",
            "/proc/self/cgroup cannot be read",
        )
        .saw(membership_seen);
    }
    let limits = memory_limits(&around.files);
    let hidden = limits.hidden.as_deref();
    let Some(tightest) = limits.seen.iter().min_by_key(|limit| limit.left) else {
        return match hidden {
            None => Finding::works(topic, "no memory cgroup limits this process"),
            Some(why) => unseen(topic, "the limits of memory cgroups are not known", why)
                .saw(membership_seen),
        };
    };
    let seen = format!(
        "{}: {}, of which {} are left",
        around.shown(&tightest.file),
        human_bytes(tightest.max),
        human_bytes(tightest.left)
    );
    let needed = if demand.page.is_hugetlb() { 0 } else { both_pools(demand) };
    let left = tightest.left.saturating_sub(MARGIN);
    if left >= needed {
        let enough = format!("the memory cgroup leaves enough for {demand}");
        return match hidden {
            None => Finding::works(topic, enough),
            Some(why) => unseen(topic, format!("{enough}; further limits are not known"), why),
        }
        .saw(seen);
    }
    let more = tightest.max.saturating_add(needed - left);
    Finding::missing(
        topic,
        format!("the memory cgroup leaves too little for {}", demand),
        format!(
            "both pools take {}, and {} stay free; the kernel would kill processes in it",
            human_bytes(needed),
            human_bytes(MARGIN)
        ),
    )
    .saw(seen)
    .remedies(ask_for_less(left / 2, demand))
    .remedy(
        Who::Starter,
        format!("docker run --memory {more} <IMAGE>"),
        "the container may take that much from everybody else (systemd: MemoryMax=)",
    )
    .remedy(
        Who::Root,
        format!(
            "echo {more} > /{}",
            typed(&tightest.file).unwrap_or("sys/fs/cgroup/<CGROUP>/memory.max")
        ),
        "the same, at once",
    )
}

/// What limits mean that this process cannot see.
fn unseen(topic: Topic, title: impl Into<String>, why: &str) -> Finding {
    let reason = format!(
        "{why}; where a group allows less memory than this, the kernel kills processes of the \
         group, so pools are taken in steps, and before each step huge pages of its size show \
         whether it fits (Linux 6.1)"
    );
    Finding::unknown(topic, title, reason)
}

fn overcommit(around: &Around, demand: &Demand) -> Finding {
    const FILE: &str = "proc/sys/vm/overcommit_memory";
    let topic = Topic::Overcommit;
    let (mode, seen) = around.read_number(FILE);
    let Some(mode) = mode else {
        return Finding::unknown(
            topic,
            "the overcommit mode is not known",
            "vm.overcommit_memory cannot be read",
        )
        .saw(seen);
    };
    if mode != 2 || demand.page.is_hugetlb() {
        return Finding::works(topic, "no commit limit stands in the way").saw(seen);
    }
    let meminfo = around.files.text_if_there("proc/meminfo").ok().flatten().unwrap_or_default();
    let kb = |name: &str| {
        meminfo
            .lines()
            .find_map(|l| l.strip_prefix(name)?.split_whitespace().next()?.parse::<u64>().ok())
    };
    let (Some(limit), Some(used)) = (kb("CommitLimit:"), kb("Committed_AS:")) else {
        return Finding::unknown(
            topic,
            "the commit limit is not known",
            "/proc/meminfo does not tell it",
        )
        .saw(seen);
    };
    let (limit, used) = (limit.saturating_mul(1024), used.saturating_mul(1024));
    let left = limit.saturating_sub(used);
    let seen_limit = format!(
        "{}: CommitLimit {}, Committed_AS {}",
        around.shown("proc/meminfo"),
        human_bytes(limit),
        human_bytes(used)
    );
    let needed = both_pools(demand);
    // Memory that other processes take meanwhile, and memory that the kernel keeps for root and for
    // users (vm.admin_reserve_kbytes, vm.user_reserve_kbytes).
    let slack = needed / 32 + (256 << 20);
    let finding = if left >= needed {
        Finding::works(topic, format!("the commit limit leaves enough for {}", demand))
    } else {
        Finding::missing(
            topic,
            format!("the commit limit leaves too little for {}", demand),
            format!(
                "with vm.overcommit_memory=2 the kernel promises {} more, and both pools take \
             {}",
                human_bytes(left),
                human_bytes(needed)
            ),
        )
        .remedies(ask_for_less(left / 2, demand))
        .remedy(
            Who::Root,
            format!("sysctl -w vm.overcommit_kbytes={}", limit.saturating_add(needed - left).saturating_add(slack) >> 10),
            "vm.overcommit_ratio no longer counts; all processes together may be promised that much; above what the machine has, the OOM \
             killer is possible again",
        )
    };
    finding.saw(seen).saw(seen_limit)
}

fn swap(around: &Around) -> Finding {
    let topic = Topic::Swap;
    let Ok(Some(swaps)) = around.files.text_if_there("proc/swaps") else {
        return Finding::unknown(topic, "swap is not known", "/proc/swaps cannot be read");
    };
    let devices: Vec<&str> =
        swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    let zswap =
        around.read_line("sys/module/zswap/parameters/enabled").0.is_some_and(|on| on == "Y");
    let seen = format!(
        "{}: {}",
        around.shown("proc/swaps"),
        if devices.is_empty() { "none".to_owned() } else { escaped(&devices.join(", ")) }
    );
    if devices.is_empty() {
        return Finding::works(topic, "no swap: pages of pools stay in memory").saw(seen);
    }
    Finding::limited(
        topic,
        "pages of pools of 4k and thp can be swapped out",
        format!(
            "memory that was faulted in is not memory that stays{}; a leap reads what it moves back in, and a swapped page is on no node until then. \
             hugetlb pages are never swapped",
            if zswap { " (zswap compresses it first)" } else { "" }
        ),
    )
    .saw(seen)
    .remedy(Who::You, "PoolBuilder::locked, in the program", "that memory is taken from \
     everybody else; locked-memory says how much may be")
    .remedy(Who::Starter, "systemd-run -p MemorySwapMax=0 <PROGRAM>", "nothing; the program meets its \
     memory limit instead of swapping (docker run --memory-swap equal to --memory)")
    .remedy(Who::Root, "swapoff -a", "the machine kills processes where it would have swapped; needs \
     as much free memory as is swapped out now")
}

#[cfg(all(test, not(miri)))]
mod tests {
    use pageleap::PageSize;

    use super::*;
    use crate::State;
    use crate::tests::around;

    const MAPS: &str = "proc/sys/vm/max_map_count";

    fn of(gb: u64, page: PageSize) -> Demand {
        Demand { bytes: Some(gb << 30), page }
    }

    #[test]
    fn mappings_are_counted_against_the_size() {
        let around = around(&[(MAPS, "65530\n")], None);
        assert_eq!(mappings(&around, &Demand::default()).state, State::Works);
        assert_eq!(mappings(&around, &of(60, PageSize::Base)).state, State::Works);
        let large = mappings(&around, &of(128, PageSize::Huge2M));
        assert_eq!(large.state, State::Limited);
        // 65,536 areas with two mappings each, plus the spare mappings, and the sum doubled.
        assert_eq!(
            large.remedies[0].line,
            format!("sysctl -w vm.max_map_count={}", 2 * (2 * 65_536 + 64))
        );
        let huge = mappings(&around, &Demand { bytes: Some(u64::MAX), page: PageSize::Base });
        assert!(huge.remedies[0].line.ends_with(&format!("={}", i32::MAX)), "{huge:?}");
        let none = crate::tests::around(&[(MAPS, "10\n")], None);
        assert_eq!(mappings(&none, &Demand::default()).state, State::Missing);
    }

    #[test]
    fn the_tightest_cgroup_is_named() {
        let around = around(
            &[
                ("proc/self/cgroup", "9:cpu:/x\n4:memory:/c\n0::/a/b\n"),
                ("sys/fs/cgroup/a/memory.max", "max\n"),
                ("sys/fs/cgroup/a/memory.current", "5\n"),
                ("sys/fs/cgroup/a/b/memory.max", "1000000\n"),
                ("sys/fs/cgroup/a/b/memory.current", "900000\n"),
                (
                    "sys/fs/cgroup/a/b/memory.stat",
                    "anon 1\ninactive_file 50000\nactive_file 1000\n",
                ),
                ("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "100\n"),
                ("sys/fs/cgroup/memory/c/memory.usage_in_bytes", "90\n"),
                (
                    "sys/fs/cgroup/memory/c/memory.stat",
                    "inactive_file 7\ntotal_inactive_file 30\ntotal_active_file 5\n",
                ),
            ],
            None,
        );
        let finding = cgroup_memory(&around, &of(1, PageSize::Base));
        assert_eq!(finding.state, State::Missing);
        assert!(finding.remedies[1].line.contains("memory/c/memory.limit_in_bytes"), "{finding:?}");
        assert_eq!(cgroup_memory(&around, &of(1, PageSize::Huge2M)).state, State::Works);
        let membership = ("proc/self/cgroup", "0::/\n");
        let unmounted = crate::tests::around(&[membership], None);
        assert_eq!(cgroup_memory(&unmounted, &of(1, PageSize::Base)).state, State::Unknown);
        let unlimited = crate::tests::around(
            &[membership, ("sys/fs/cgroup/cgroup.controllers", "memory\n")],
            None,
        );
        assert_eq!(cgroup_memory(&unlimited, &of(1, PageSize::Base)).state, State::Works);
    }

    #[test]
    fn a_strict_commit_limit_is_compared_with_both_pools() {
        let files = [
            ("proc/sys/vm/overcommit_memory", "2\n"),
            ("proc/meminfo", "CommitLimit: 3145728 kB\nCommitted_AS: 1048576 kB\n"),
        ];
        let around = around(&files, None);
        assert_eq!(overcommit(&around, &of(1, PageSize::Base)).state, State::Works);
        let finding = overcommit(&around, &of(2, PageSize::Base));
        assert_eq!(finding.state, State::Missing);
        // 1 GB in use, 4 GB of pools, and slack for other processes.
        let more = (256 << 10) + (4 << 20) / 32;
        assert_eq!(
            finding.remedies[1].line,
            format!("sysctl -w vm.overcommit_kbytes={}", (5 << 20) + more)
        );
    }

    #[test]
    fn swap_is_named_with_its_devices() {
        const HEAD: &str = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        let with = around(&[("proc/swaps", &format!("{HEAD}/dev/vda2 partition 1 0 -2\n"))], None);
        let finding = swap(&with);
        assert!(
            finding.state == State::Limited && finding.observed[0].contains("/dev/vda2"),
            "{finding:?}"
        );
        assert_eq!(swap(&around(&[("proc/swaps", HEAD)], None)).state, State::Works);
        assert_eq!(swap(&around(&[], None)).state, State::Unknown);
    }
}
