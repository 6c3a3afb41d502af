//! Huge pages of hugetlb: how many are free on each node, and whether one can be mapped.

use std::fs::OpenOptions;

use pageleap::for_probe::{huge_page_limits, human_bytes};
use pageleap::topology::{Node, unreserved_huge_pages};
use pageleap::{PageSize, observe};
use pageleap_sys::{self as sys, Advice, Errno};

use crate::around::{Around, typed};
use crate::demand::Demand;
use crate::finding::{Finding, Remedy, State, Topic, Who};
use crate::limits::ask_for_less;
use crate::scratch::{Failed, Scratch};

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

/// What is found of both sizes. The files alone tell something too.
pub(crate) fn findings(around: &Around, demand: &Demand, nodes: &[Node]) -> Vec<Finding> {
    let of_size = |page: PageSize| {
        let pools = pools(around, nodes, page);
        let trial = around.live.then(|| try_page(page, &pools));
        judge(around, demand, page, &pools, trial)
    };
    [PageSize::Huge2M, PageSize::Huge1G].map(of_size).into()
}

/// The hugetlb pools of the nodes that have one for this size.
fn pools(around: &Around, nodes: &[Node], page: PageSize) -> Vec<HugePool> {
    let pool = |node: &Node| {
        let kilobytes = page.bytes() >> 10;
        let number = node.id.0;
        let folder =
            format!("sys/devices/system/node/node{number}/hugepages/hugepages-{kilobytes}kB");
        let file = format!("{folder}/nr_hugepages");
        let total = around.read_number(&file).0?;
        let free = around.read_number(&format!("{folder}/free_hugepages")).0?;
        // Opening the file changes nothing; writing would.
        let writable = if around.live {
            let opened = OpenOptions::new().write(true).open(around.files.root().join(&file));
            opened.map(drop).map_err(|e| Errno(e.raw_os_error().unwrap_or(libc::EIO)))
        } else {
            Err(Errno(libc::EPERM))
        };
        Some(HugePool { node: number, total, free, memory: node.free_bytes, file, writable })
    };
    nodes.iter().filter_map(pool).collect()
}

/// Maps one page, if one is free.
fn try_page(page: PageSize, pools: &[HugePool]) -> HugeTrial {
    let bytes = page.bytes();
    let bits = bytes.trailing_zeros();
    let failed = |call: &str, errno| HugeTrial::Failed(Failed::at(call)(errno));
    if let Err(errno) = sys::memfd_create(c"pageleap:probe", Some(bits)) {
        let size = human_bytes(bytes as u64);
        return failed(&format!("memfd_create(MFD_HUGETLB, {size})"), errno);
    }
    if free_of(pools) == 0 && !pools.is_empty() {
        return HugeTrial::NoneFree;
    }
    let scratch = match Scratch::new(bytes, bytes, Some(bits)) {
        Ok(scratch) => scratch,
        Err(failed) => return HugeTrial::Failed(failed),
    };
    if let Err(errno) = scratch.span.advise(Advice::PopulateWrite) {
        return failed("madvise(MADV_POPULATE_WRITE) of a huge page", errno);
    }
    match observe::mapped_pages(scratch.span.start, bytes) {
        Ok(mapped) if mapped.kernel_page_size != bytes => {
            HugeTrial::WrongSize(mapped.kernel_page_size)
        }
        mapped => HugeTrial::Mapped { seen: mapped.is_ok() },
    }
}

/// What a leap needs of the huge pages of each node.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    demand: Demand,
    /// Whether the user has asked for pages of this size.
    asked: bool,
    /// Free pages that a node must have. On a machine with one node both pools lie there.
    per_node: u64,
    nodes: usize,
}

impl Wanted {
    fn new(demand: &Demand, page: PageSize, nodes: usize) -> Wanted {
        let asked = demand.page == page;
        let demand = Demand { bytes: demand.bytes.filter(|_| asked), page };
        let per_pool = demand.pool_bytes() / page.bytes() as u64;
        Wanted { demand, asked, per_node: if nodes > 1 { per_pool } else { 2 * per_pool }, nodes }
    }

    /// Pages on all nodes together.
    fn all_pages(&self) -> u64 {
        self.per_node.saturating_mul(self.nodes.min(2) as u64)
    }

    fn topic(&self) -> Topic {
        if self.demand.page == PageSize::Huge2M { Topic::Hugetlb2M } else { Topic::Hugetlb1G }
    }

    fn size(&self) -> String {
        human_bytes(self.demand.page.bytes() as u64)
    }

    /// How many pages a leap takes, and how to ask about another leap.
    fn takes(&self) -> String {
        let Wanted { demand, per_node, .. } = self;
        let what = demand
            .bytes
            .map_or("a trial".to_owned(), |bytes| format!("a leap of {}", human_bytes(bytes)));
        let takes = match self.nodes {
            1 => format!("{what} takes {per_node}, both pools being on the one node"),
            _ => format!("{what} takes {per_node} on each of its two nodes"),
        };
        match demand.bytes {
            Some(_) => takes,
            None => {
                let page = demand.page;
                format!("{takes}; for more: pageleap doctor --page-size {page} --size BYTES")
            }
        }
    }
}

fn judge(
    around: &Around,
    demand: &Demand,
    page: PageSize,
    pools: &[HugePool],
    trial: Option<HugeTrial>,
) -> Finding {
    let wanted = Wanted::new(demand, page, pools.len());
    let seen = counted(around, page, pools);
    let none = format!("no pages of {}", wanted.size());
    match trial {
        Some(HugeTrial::Failed(failed)) => {
            let reason = failure(around, &wanted, pools, &failed);
            Finding::missing(wanted.topic(), none, reason)
                .saw(failed.seen())
                .saw(seen)
                .remedies(reserve(&wanted, pools.iter()))
        }
        Some(HugeTrial::WrongSize(found)) => {
            let reason = format!("smaps shows pages of {found} bytes");
            Finding::missing(wanted.topic(), none, reason).saw(seen)
        }
        None if pools.is_empty() => {
            Finding::missing(wanted.topic(), none, "no node counts any").saw(seen)
        }
        trial => {
            let short: Vec<&HugePool> =
                pools.iter().filter(|pool| pool.free < wanted.per_node).collect();
            let finding = judge_free(&wanted, pools, short.len(), trial.as_ref());
            if let (State::Works, Some(held)) = (finding.state, HeldBack::of(around, page))
                && held.left < wanted.all_pages()
            {
                return held.finding(&wanted, free_of(pools)).saw(seen);
            }
            let remedies = match finding.state {
                State::Works => Vec::new(),
                _ => reserve(&wanted, short.into_iter()),
            };
            finding.saw(seen).remedies(remedies)
        }
    }
}

/// A limit beside the number of free pages: reservations of other mappings, or a cgroup.
struct HeldBack {
    /// Pages that this process may still have.
    left: u64,
    why: String,
    seen: String,
    /// The file with the limit of a cgroup.
    group: Option<String>,
}

impl HeldBack {
    /// The limit that leaves the fewest pages.
    fn of(around: &Around, page: PageSize) -> Option<HeldBack> {
        let page_bytes = page.bytes() as u64;
        let folder = format!("sys/kernel/mm/hugepages/hugepages-{}kB", page_bytes >> 10);
        let reserved = unreserved_huge_pages(&around.files, page_bytes).map(|left| HeldBack {
            left,
            why: "mappings of other programs have reserved the others and not touched them yet"
                .into(),
            seen: format!("{}: {left} more are free than reserved", around.shown(&folder)),
            group: None,
        });
        let limits = huge_page_limits(&around.files, page_bytes).seen.into_iter();
        let limits = limits.map(|limit| HeldBack {
            left: limit.left / page_bytes,
            why: format!("the hugetlb cgroup leaves {}", human_bytes(limit.left)),
            seen: format!("{}: {}", around.shown(&limit.file), human_bytes(limit.max)),
            group: Some(limit.file),
        });
        limits.chain(reserved).min_by_key(|held| held.left)
    }

    fn finding(self, wanted: &Wanted, free: u64) -> Finding {
        let size = wanted.size();
        let summary = format!("{} of {free} free pages of {size} may be taken", self.left);
        let reason = format!("{}; {}", self.why, wanted.takes());
        let judged = match wanted.asked || self.left == 0 {
            true => Finding::missing(wanted.topic(), summary, reason),
            false => Finding::limited(wanted.topic(), summary, reason),
        };
        let remedy = match self.group {
            Some(file) => Remedy::new(
                Who::Root,
                format!("echo max > /{}", typed(&file).unwrap_or("sys/fs/cgroup/<CGROUP>")),
                "lets processes of the group take all huge pages of the machine",
            ),
            None => {
                let kilobytes = wanted.demand.page.bytes() >> 10;
                let file = format!("/sys/kernel/mm/hugepages/hugepages-{kilobytes}kB/nr_hugepages");
                let more = wanted.all_pages() - self.left;
                Remedy::new(
                    Who::Root,
                    format!("echo $(( $(cat {file}) + {more} )) > {file}"),
                    "takes memory from everything else until the old number is written back",
                )
            }
        };
        judged.saw(self.seen).remedies([remedy])
    }
}

/// What the files of the nodes count.
fn counted(around: &Around, page: PageSize, pools: &[HugePool]) -> String {
    let size = human_bytes(page.bytes() as u64);
    if pools.is_empty() {
        let folder = around.shown("sys/devices/system/node/node*/hugepages");
        return format!("{folder}: no pages of {size} counted");
    }
    let on_nodes: Vec<String> = pools
        .iter()
        .map(|pool| format!("node {}: {} of {}", pool.node, pool.free, pool.total))
        .collect();
    let kilobytes = page.bytes() >> 10;
    format!(
        "free pages of {size}, {} (node*/hugepages/hugepages-{kilobytes}kB)",
        on_nodes.join(", ")
    )
}

/// Why trying one page has failed.
fn failure(around: &Around, wanted: &Wanted, pools: &[HugePool], failed: &Failed) -> String {
    match failed.errno {
        Errno(libc::ENODEV | libc::ENOENT | libc::EINVAL) if pools.is_empty() => format!(
            "neither the kernel nor the processor may know pages of {} (CONFIG_HUGETLBFS; flags \
             pse, pdpe1gb)",
            wanted.size()
        ),
        Errno(libc::ENOMEM | libc::EFAULT | libc::ENOSPC) if pools.is_empty() => {
            "most likely none are free; sysfs, which would tell, is not mounted".into()
        }
        Errno(libc::ENOMEM | libc::EFAULT | libc::ENOSPC) => {
            "the free pages are reserved by others, lie on nodes outside the cpuset, or the \
             hugetlb cgroup (hugetlb.*.max) refuses them"
                .into()
        }
        other => around.refusal(&failed.call, other),
    }
}

/// Judges how many pages are free; `short` nodes have fewer than are wanted.
fn judge_free(
    wanted: &Wanted,
    pools: &[HugePool],
    short: usize,
    trial: Option<&HugeTrial>,
) -> Finding {
    let (topic, size, free) = (wanted.topic(), wanted.size(), free_of(pools));
    // Two nodes are enough, or the one that there is.
    let enough = pools.len() - short >= pools.len().min(2);
    if pools.is_empty() {
        let summary = format!("pages of {size} exist, their number is not known");
        Finding::unknown(topic, summary, "sysfs does not tell it")
    } else if free == 0 {
        let reason = format!("by default none are reserved; {}", wanted.takes());
        Finding::missing(topic, format!("no pages of {size} are free"), reason)
    } else if !enough && wanted.asked {
        Finding::missing(topic, format!("too few pages of {size} are free"), wanted.takes())
    } else if short > 0 {
        let summary = format!("pages of {size} are free on some nodes only, or few");
        Finding::limited(topic, summary, wanted.takes())
    } else {
        let tried = match trial {
            Some(HugeTrial::Mapped { seen: true }) => ", one was mapped and seen in smaps",
            Some(_) => ", one was mapped (its size cannot be verified without smaps)",
            None => "",
        };
        Finding::works(topic, format!("pages of {size}: {free} are free{tried}"))
    }
}

fn free_of(pools: &[HugePool]) -> u64 {
    pools.iter().fold(0, |sum, pool| sum.saturating_add(pool.free))
}

/// The lines that reserve what is missing on each node.
fn reserve<'a>(wanted: &Wanted, pools: impl Iterator<Item = &'a HugePool>) -> Vec<Remedy> {
    let Wanted { demand, per_node: needed, .. } = *wanted;
    let page = demand.page;
    let page_bytes = page.bytes() as u64;
    let pools: Vec<&HugePool> = pools.collect();
    if pools.is_empty() {
        return Vec::new();
    }
    let missing = |pool: &HugePool| needed.saturating_sub(pool.free).max(1);
    // If asked for more than the node has, the kernel would reserve all that it finds, and leave
    // the machine without memory.
    let spare = |pool: &HugePool| pool.memory / 8 * 7;
    if pools.iter().any(|pool| missing(pool).saturating_mul(page_bytes) > spare(pool)) {
        let possible =
            |pool: &&HugePool| spare(pool).saturating_add(pool.free.saturating_mul(page_bytes));
        let pools_per_node = needed / (demand.pool_bytes() / page_bytes).max(1);
        let most = pools.iter().map(possible).min().unwrap_or(0) / pools_per_node.max(1);
        return ask_for_less(most, &demand).into_iter().collect();
    }
    let lines = pools
        .iter()
        .map(|pool| format!("echo {} > /{}", pool.total.saturating_add(missing(pool)), pool.file));
    let total = pools.iter().fold(0u64, |sum, pool| sum.saturating_add(missing(pool)));
    let bytes = human_bytes(total.saturating_mul(page_bytes));
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

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::tests::around;

    fn pool(node: u32, free: u64, memory: u64) -> HugePool {
        let file =
            format!("sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages");
        HugePool { node, total: 10, free, memory, file, writable: Err(Errno(libc::EACCES)) }
    }

    fn judged(pools: &[HugePool], bytes: u64) -> Finding {
        let demand = Demand { bytes: Some(bytes), page: PageSize::Huge2M };
        let none_free = Some(HugeTrial::NoneFree);
        judge(&around(&[], None), &demand, PageSize::Huge2M, pools, none_free)
    }

    #[test]
    fn pages_that_others_have_reserved_or_a_cgroup_refuses_are_not_free() {
        let demand = Demand { bytes: Some(8 << 20), page: PageSize::Huge2M };
        let judged = |files: &[(&str, &str)]| {
            let pools = [pool(0, 100, 1 << 30), pool(1, 100, 1 << 30)];
            judge(&around(files, None), &demand, PageSize::Huge2M, &pools, None)
        };
        let folder = "sys/kernel/mm/hugepages/hugepages-2048kB";
        let [free, reserved] = ["free", "resv"].map(|kind| format!("{folder}/{kind}_hugepages"));
        let counted = |number| judged(&[(&free, "200\n"), (&reserved, number)]);
        assert_eq!(counted("192\n").state, State::Works);
        let finding = counted("193\n");
        assert_eq!(finding.state, State::Missing, "{finding}");
        assert!(finding.summary.contains("7 of 200"), "{finding}");
        assert!(finding.reason.contains("other programs have reserved"), "{finding}");
        let group = |max| {
            let limit = ("sys/fs/cgroup/a/hugetlb.2MB.rsvd.max", max);
            let usage = ("sys/fs/cgroup/a/hugetlb.2MB.rsvd.current", "0\n");
            judged(&[("proc/self/cgroup", "0::/a\n"), limit, usage])
        };
        assert_eq!(group("16777216\n").state, State::Works);
        let finding = group("16777215\n");
        assert_eq!(finding.state, State::Missing, "{finding}");
        assert!(finding.remedies[0].line.contains("hugetlb.2MB.rsvd.max"), "{finding:?}");
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
}
