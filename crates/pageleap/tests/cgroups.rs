//! Limits of cgroups, seen and hidden: a pool or a job that does not fit is refused by an error, and
//! the kernel kills nobody.
//!
//! Each case runs in a child, in a group of its own.

mod common;
#[path = "common/moving.rs"]
mod moving;
#[path = "common/refusing.rs"]
mod refusing;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{case, check_stamp, leap, migration, nodes, skip, stamp, turn};
use moving::{FINE, cases};
use pageleap::backend::{Call, Errno, Linux};
use pageleap::{BASE_PAGE, Error, PageSize, Pool, Region};
use refusing::Refusing;

const MB: usize = 1 << 20;
/// The limit of the group, and bytes that the process has room for in any case.
const LIMIT: usize = 256 * MB;
const SMALL: usize = 16 * MB;

/// A memory cgroup below that of this process.
struct Group {
    directory: PathBuf,
    /// Where its hierarchy is mounted.
    mount: &'static str,
    /// Names of the files of the limit and of the usage.
    files: [&'static str; 2],
}

impl Group {
    /// Makes one with a limit.
    fn new() -> Result<Group, String> {
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let v1 = own.lines().find_map(|line| line.split_once(":memory:"));
        let (mount, path, files) = match v1 {
            Some((_, path)) => {
                ("/sys/fs/cgroup/memory", path, ["memory.limit_in_bytes", "memory.usage_in_bytes"])
            }
            // The group must have no processes, or it has no groups with controllers.
            None => ("/sys/fs/cgroup", "/", ["memory.max", "memory.current"]),
        };
        let name = format!("pageleap-cgroups-{}", std::process::id());
        let directory = Path::new(mount).join(path.trim_start_matches('/')).join(name);
        let refused = |error| format!("{}: {error}", directory.display());
        fs::create_dir(&directory).map_err(refused)?;
        let group = Group { directory: directory.clone(), mount, files };
        fs::write(directory.join(files[0]), LIMIT.to_string()).map_err(refused)?;
        let _ = fs::write(directory.join("memory.swap.max"), "0");
        Ok(group)
    }

    fn enter(&self) {
        fs::write(self.directory.join("cgroup.procs"), "0").unwrap();
    }

    fn limit_file(&self) -> String {
        self.directory.join(self.files[0]).display().to_string()
    }

    /// Bytes that the limit leaves.
    fn left(&self) -> usize {
        let usage = fs::read_to_string(self.directory.join(self.files[1])).unwrap();
        LIMIT.saturating_sub(usage.trim().parse().unwrap())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.directory);
    }
}

/// Mounts an empty file system over the hierarchy, in a mount namespace of this process.
fn hide(mount: &str) {
    let path = std::ffi::CString::new(mount).unwrap();
    let root = c"/".as_ptr();
    // SAFETY: the paths are C strings, and the namespace is this child's own.
    unsafe {
        assert_eq!(libc::unshare(libc::CLONE_NEWNS), 0);
        let private = libc::MS_REC | libc::MS_PRIVATE;
        let none = std::ptr::null();
        assert_eq!(libc::mount(none, root, none, private, none.cast()), 0);
        let tmpfs = c"tmpfs".as_ptr();
        assert_eq!(libc::mount(tmpfs, path.as_ptr(), tmpfs, 0, none.cast()), 0);
    }
}

fn pool(bytes: usize) -> Result<Pool, Error> {
    Pool::builder(nodes()[0], bytes as u64).page_size(PageSize::Base).build()
}

/// A pool that fits works, also after one that did not fit.
fn small_pools_work() {
    let pools = [pool(SMALL).unwrap(), pool(SMALL).unwrap()];
    let region = Region::new(&pools[0], SMALL).unwrap();
    stamp(&region, 0..SMALL, 1);
    leap(&region, 0..SMALL, &pools[1]);
    check_stamp(&region, 0..SMALL, 1);
}

fn limit_of(result: Result<Pool, Error>) -> String {
    let Err(Error::OutOfMemory { limit, .. }) = result else {
        panic!("{:?}", result.map(|pool| pool.bytes()))
    };
    limit
}

/// The parent's group, by its directory.
fn group() -> Group {
    let parent = std::env::var("PAGELEAP_GROUP").expect("the parent has set it");
    let mount = if parent.starts_with("/sys/fs/cgroup/memory/") {
        "/sys/fs/cgroup/memory"
    } else {
        "/sys/fs/cgroup"
    };
    let files = match mount {
        "/sys/fs/cgroup" => ["memory.max", "memory.current"],
        _ => ["memory.limit_in_bytes", "memory.usage_in_bytes"],
    };
    Group { directory: parent.into(), mount, files }
}

/// The limit is seen.
fn seen() {
    let group = group();
    group.enter();
    assert_eq!(limit_of(pool(2 * LIMIT)), group.limit_file());
    small_pools_work();
    std::mem::forget(group);
}

/// No mount shows the group.
fn covered() {
    let group = group();
    group.enter();
    hide(group.mount);
    let limit = limit_of(pool(2 * LIMIT));
    assert!(limit.contains("cannot see"), "{limit}");
    small_pools_work();
    std::mem::forget(group);
}

/// A cgroup namespace shows a group below the one with the limit.
fn namespace() {
    let group = group();
    let below = group.directory.join("below");
    fs::create_dir(&below).unwrap();
    fs::write(below.join("cgroup.procs"), "0").unwrap();
    // SAFETY: the call takes no pointers, and the namespace is this child's own.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWCGROUP) }, 0);
    let limit = limit_of(pool(2 * LIMIT));
    assert!(limit.contains("cannot see"), "{limit}");
    small_pools_work();
    fs::write(group.directory.join("cgroup.procs"), "0").unwrap();
    fs::remove_dir(&below).unwrap();
    std::mem::forget(group);
}

/// A job is refused before it takes anything, while the group has no room for its page tables and
/// threads, and works when it has.
fn full() {
    let group = group();
    group.enter();
    let pools = [pool(SMALL).unwrap(), pool(SMALL).unwrap()];
    let region = Region::new(&pools[0], SMALL).unwrap();
    stamp(&region, 0..SMALL, 1);
    let mut ballast = Vec::new();
    while group.left() > MB / 4 {
        let mut page = vec![1u8; group.left().min(MB) / 4 / BASE_PAGE * BASE_PAGE];
        page.iter_mut().step_by(BASE_PAGE).for_each(|byte| *byte = 2);
        ballast.push(page);
    }
    let started = migration(&region, 0..SMALL, &pools[1]).start();
    let Err(Error::OutOfMemory { limit, .. }) = started else { panic!("a job has started") };
    assert_eq!(limit, group.limit_file());
    check_stamp(&region, 0..SMALL, 1);
    drop(ballast);
    leap(&region, 0..SMALL, &pools[1]);
    check_stamp(&region, 0..SMALL, 1);
    std::mem::forget(group);
}

/// Blocks of 2 MB and more that are free, in units of 2 MB.
fn free_blocks() -> usize {
    let text = fs::read_to_string("/proc/buddyinfo").unwrap_or_default();
    let of_line = |line: &str| -> usize {
        let counts = line.split_whitespace().skip(4).enumerate();
        let counts =
            counts.filter_map(|(order, count)| Some((order, count.parse::<usize>().ok()?)));
        counts.filter(|(order, _)| *order >= 9).map(|(order, count)| count << (order - 9)).sum()
    };
    text.lines().map(of_line).sum()
}

#[test]
fn limits_of_memory_cgroups_end_in_errors() {
    const NAME: &str = "limits_of_memory_cgroups_end_in_errors";
    let _turn = turn();
    let table = [
        ("seen", seen as fn(), FINE),
        ("covered", covered, FINE),
        ("namespace", namespace, FINE),
        ("full", full, FINE),
    ];
    if case().is_some() {
        return cases(NAME, &table);
    }
    // Hidden limits are found by huge pages.
    let blocks = free_blocks();
    if blocks < LIMIT / (2 * MB) {
        return skip(NAME, &format!("{blocks} free blocks of 2 MB"));
    }
    let group = match Group::new() {
        Ok(group) => group,
        Err(why) => return skip(NAME, &why),
    };
    // SAFETY: this binary has no other thread that reads the environment now.
    unsafe { std::env::set_var("PAGELEAP_GROUP", &group.directory) };
    cases(NAME, &table);
}

/// How many pages of 2 MB are free on all nodes, and how many of these are reserved.
fn huge_pages() -> [usize; 2] {
    ["free", "resv"].map(|kind| {
        let file = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{kind}_hugepages");
        fs::read_to_string(file).map_or(0, |text| text.trim().parse().unwrap())
    })
}

#[test]
fn huge_pages_that_another_mapping_has_reserved_are_not_free() {
    const NAME: &str = "huge_pages_that_another_mapping_has_reserved_are_not_free";
    let _turn = turn();
    let page = PageSize::Huge2M;
    let pool = || Pool::builder(nodes()[0], 4 * page.bytes() as u64).page_size(page).build();
    if let Err(error) = pool() {
        return common::skip_page_size(NAME, page, error);
    }
    let [free, reserved] = huge_pages();
    let bytes = (free - reserved - 2) * page.bytes();
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, which nothing else knows. It reserves its pages, and takes none.
    let other = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
    assert_ne!(other, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    let refused = pool();
    // SAFETY: mapped above.
    assert_eq!(unsafe { libc::munmap(other, bytes) }, 0);
    let limit = limit_of(refused);
    assert!(limit.contains("reserved"), "{limit}");
    pool().unwrap();
}

/// What the kernel refuses although it was free a moment ago: by a group that cannot be seen.
#[test]
fn refused_huge_pages_are_out_of_memory() {
    const NAME: &str = "refused_huge_pages_are_out_of_memory";
    let _turn = turn();
    let page = PageSize::Huge2M;
    let build = |refused: Option<(Call, i32)>| {
        let backend = Arc::new(Refusing::new(Arc::new(Linux), move |request| {
            refused.filter(|(call, _)| *call == request.call).map(|(_, errno)| Errno(errno))
        }));
        let pool = Pool::builder(nodes()[0], page.bytes() as u64).page_size(page);
        pool.backend(backend).build()
    };
    if let Err(error) = build(None) {
        return common::skip_page_size(NAME, page, error);
    }
    for refused in [(Call::Map, libc::ENOMEM), (Call::Populate, libc::EFAULT)] {
        let Err(Error::OutOfMemory { remedy, .. }) = build(Some(refused)) else {
            panic!("{refused:?}")
        };
        assert!(remedy.contains("resv_hugepages") && remedy.contains("cgroup"), "{remedy}");
    }
}
