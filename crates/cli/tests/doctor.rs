//! Runs `pageleap doctor` as other users, under seccomp filters, limits and changed mounts. The
//! tests make the same calls in the same surroundings and compare the results with the report.

#[path = "../../pageleap/tests/common/filter.rs"]
mod filter;
#[path = "doctor/machine.rs"]
mod machine;

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use filter::{Action, check, install_filter};
use machine::{Tree, another_machine};
use serde_json::Value;

/// The unprivileged user that every system has.
const NOBODY: u32 = 65534;

/// The surroundings in which a command runs.
#[derive(Clone, Debug)]
struct Place {
    name: &'static str,
    user: Option<u32>,
    filter: Option<(Action, &'static [i64])>,
    /// The resource and its limit, in the unit of the resource.
    limit: Option<(u32, u64)>,
    mounts: Option<Call>,
}

const HERE: Place = Place { name: "here", user: None, filter: None, limit: None, mounts: None };

const REFUSED: &[i64] = &[libc::SYS_mbind, libc::SYS_userfaultfd, libc::SYS_set_mempolicy];

/// A command that will run in a place.
fn command(place: &Place, program: &Path) -> Command {
    let mut command = Command::new(program);
    if let Some(user) = place.user {
        command.uid(user).gid(user);
    }
    let (filter, limit, mounts) = (place.filter, place.limit, place.mounts);
    let prepare = move || {
        if let Some(mounts) = mounts {
            mounts()?;
        }
        if let Some((resource, value)) = limit {
            let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
            // SAFETY: reads one struct.
            check(unsafe { libc::setrlimit(resource as _, &limit) }.into())?;
        }
        filter.map_or(Ok(()), |(action, calls)| install_filter(action, calls))
    };
    // SAFETY: `prepare` makes system calls only.
    unsafe { command.pre_exec(prepare) };
    command
}

/// A copy of the program that every user can run. Dropping it deletes the copy.
struct Program(PathBuf);

impl Program {
    fn new() -> Program {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("pageleap-doctor-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        // Another process copies. Otherwise a child of another test could inherit a descriptor that
        // writes to the copy, and the copy could not be run.
        let copied = Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_pageleap"))
            .arg(folder.join("pageleap"))
            .status();
        assert!(copied.unwrap().success());
        fs::set_permissions(folder.join("pageleap"), fs::Permissions::from_mode(0o755)).unwrap();
        Program(folder)
    }

    fn run(&self, place: &Place, flags: &[&str]) -> Output {
        let mut command = command(place, &self.0.join("pageleap"));
        command.args(flags).output().unwrap_or_else(|error| panic!("{}: {error}", place.name))
    }

    /// Runs the doctor in a place. Returns its JSON object and its exit code.
    fn doctor(&self, place: &Place, flags: &[&str]) -> (Value, i32) {
        let output = self.run(place, &[&["doctor", "--json"], flags].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        let code = output
            .status
            .code()
            .unwrap_or_else(|| panic!("{}: {:?} {said}", place.name, output.status));
        let value: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{}: {error}: {said}", place.name));
        assert_eq!(value["leap_possible"], code == 0, "{}: exit code {code}", place.name);
        let blocked = !value["blockers"].as_array().unwrap().is_empty();
        assert!(blocked == (code != 0) || value["calls_tried"] == false, "{}", place.name);
        (value, code)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What the doctor, or a leap, says if no huge page can be made of free memory at that time.
const NO_HUGE_PAGES: [&str; 4] = [
    "no huge page could be made now",
    "madvise(COLLAPSE) failed with EAGAIN",
    "madvise(COLLAPSE) failed with EBUSY",
    "madvise(COLLAPSE) failed with ENOMEM",
];

/// What depends on free memory and on huge pages. Other processes take and return them at any time,
/// so it may differ from one run of the doctor to the next.
const OF_MEMORY: [&str; 6] =
    ["thp", "hugetlb-2m", "hugetlb-1g", "free-memory", "cgroup-memory", "overcommit"];

fn finding<'a>(value: &'a Value, id: &str) -> &'a Value {
    let all = value["findings"].as_array().unwrap();
    all.iter().find(|finding| finding["id"] == id).unwrap_or_else(|| panic!("no finding {id}"))
}

fn state<'a>(value: &'a Value, id: &str) -> &'a str {
    finding(value, id)["state"].as_str().unwrap()
}

fn lines(value: &Value, id: &str) -> Vec<String> {
    let remedies = finding(value, id)["remedies"].as_array().unwrap();
    remedies.iter().map(|remedy| remedy["line"].as_str().unwrap().to_owned()).collect()
}

fn names(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect()
}

fn is_root() -> bool {
    // SAFETY: returns a number.
    unsafe { libc::geteuid() == 0 }
}

fn skip(test: &str, reason: &str) {
    eprintln!("SKIP {test}: {reason}");
    if let Ok(path) = std::env::var("PAGELEAP_SKIP_LOG") {
        use io::Write;
        let file = fs::OpenOptions::new().append(true).create(true).open(path);
        // In one call: other tests skip at the same time.
        let line = format!("{test}: {reason}\n");
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the skip log");
    }
}

/// Makes one call in a place and returns the error number that it got there.
fn truth(place: &Place, call: Call) -> Result<(), i32> {
    let mut command = command(place, Path::new("/bin/true"));
    // SAFETY: each of the calls below makes system calls only. `status` returns the error of the
    // call.
    unsafe { command.pre_exec(call) };
    match command.status() {
        Ok(status) => {
            assert!(status.success(), "{}: {status}", place.name);
            Ok(())
        }
        Err(error) => Err(error.raw_os_error().unwrap_or_else(|| panic!("{error}"))),
    }
}

/// A page of the calling process.
fn page() -> io::Result<usize> {
    let (prot, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: the mapping is new and is written once. It ends with the process.
    unsafe {
        let page = libc::mmap(std::ptr::null_mut(), 4096, prot, flags | libc::MAP_POPULATE, -1, 0);
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(page as usize)
    }
}

const NODE_0: [u64; 16] = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const PREFERRED: i32 = 1;

type Call = fn() -> io::Result<()>;

/// The calls that the doctor judges. Here the test makes them itself.
const CALLS: [(&str, Call); 6] = [
    ("mbind", || {
        let page = page()?;
        // SAFETY: a page of our own and a constant mask.
        check(unsafe {
            libc::syscall(libc::SYS_mbind, page, 4096, PREFERRED, NODE_0.as_ptr(), 1025, 0)
        })
    }),
    ("page-table-placement", || {
        // SAFETY: a constant mask; the process ends soon.
        check(unsafe { libc::syscall(libc::SYS_set_mempolicy, PREFERRED, NODE_0.as_ptr(), 1025) })
    }),
    ("placement-query", || {
        let pages = [page()?];
        let mut status = [0i32];
        let none = std::ptr::null::<i32>();
        // SAFETY: both arrays have one entry.
        check(unsafe {
            libc::syscall(libc::SYS_move_pages, 0, 1, pages.as_ptr(), none, status.as_mut_ptr(), 0)
        })
    }),
    ("userfaultfd", || {
        // SAFETY: no pointers.
        check(unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) })
    }),
    ("userfaultfd-user-mode", || {
        // SAFETY: no pointers.
        check(unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1) })
    }),
    ("userfaultfd-device", || {
        // SAFETY: a constant path, and a request without a pointer.
        unsafe {
            let device = libc::open(c"/dev/userfaultfd".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            check(device.into())?;
            check(libc::ioctl(device, 0xaa00, libc::O_CLOEXEC).into())
        }
    }),
];

/// The places to test. Without root, places that need root are left out and a skip is noted.
fn places(test: &str) -> Vec<Place> {
    let eperm = Some((Action::Errno(libc::EPERM), REFUSED));
    let enosys = Some((Action::Errno(libc::ENOSYS), REFUSED));
    let mut places = vec![
        HERE,
        Place { name: "filter with EPERM", filter: eperm, ..HERE },
        Place { name: "filter with ENOSYS", filter: enosys, ..HERE },
        Place {
            name: "filter of queries",
            filter: Some((Action::Errno(libc::EPERM), &[libc::SYS_move_pages])),
            ..HERE
        },
    ];
    if is_root() {
        let nobody = Place { name: "nobody", user: Some(NOBODY), ..HERE };
        places.extend([
            Place { name: "nobody, filter with EPERM", filter: eperm, ..nobody.clone() },
            Place { name: "nobody, filter with ENOSYS", filter: enosys, ..nobody.clone() },
            nobody,
        ]);
    } else {
        skip(test, "other users can only be tried as root");
    }
    places
}

#[test]
fn what_it_states_about_calls_is_true_for_each_user_and_filter() {
    let program = Program::new();
    for place in places("what_it_states_about_calls_is_true_for_each_user_and_filter") {
        let (value, _) = program.doctor(&place, &[]);
        for (id, call) in CALLS {
            let (stated, truth) = (state(&value, id), truth(&place, call));
            let context = format!("{}, {id}: stated {stated}, found {truth:?}", place.name);
            match truth {
                Ok(()) => assert!(["works", "limited"].contains(&stated), "{context}"),
                Err(errno) => {
                    // The kernel offers another way to ask.
                    let expected = if id == "placement-query" { "limited" } else { "missing" };
                    assert_eq!(stated, expected, "{context}");
                    let seen = finding(&value, id)["observed"].to_string();
                    let name = match errno {
                        libc::EPERM => "EPERM",
                        libc::EACCES => "EACCES",
                        libc::ENOSYS => "ENOSYS",
                        libc::ENOENT => "ENOENT",
                        other => panic!("{context}: error {other}"),
                    };
                    assert!(seen.contains(name), "{context}: {seen}");
                }
            }
            let number = [
                ("mbind", libc::SYS_mbind),
                ("page-table-placement", libc::SYS_set_mempolicy),
                ("placement-query", libc::SYS_move_pages),
                ("userfaultfd", libc::SYS_userfaultfd),
                ("userfaultfd-user-mode", libc::SYS_userfaultfd),
            ];
            let number = number.iter().find(|(name, _)| *name == id).map(|(_, number)| number);
            let refused =
                place.filter.zip(number).is_some_and(|((_, calls), number)| calls.contains(number));
            let reason = finding(&value, id)["reason"].to_string();
            assert_eq!(reason.contains("seccomp"), refused, "{context}: {reason}");
        }
    }
}

/// Moves a page of private memory to another address, by a userfaultfd that holds up the kernel.
/// EINVAL: the kernel cannot.
fn move_a_page() -> io::Result<()> {
    const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
    const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
    const UFFDIO_MOVE: libc::c_ulong = 0xc028_aa05;
    // MOVE, EVENT_REMOVE and EVENT_UNMAP.
    const FEATURES: u64 = 1 << 16 | 1 << 3 | 1 << 6;
    const MISSING: u64 = 1;
    let (prot, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: both mappings are new, and end with the process. Each request gets its structure, an
    // array of words that outlives it.
    unsafe {
        let mut uffd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC);
        if uffd < 0 {
            let device = libc::open(c"/dev/userfaultfd".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            check(device.into())?;
            uffd = libc::ioctl(device, 0xaa00, libc::O_CLOEXEC).into();
            check(uffd)?;
        }
        let request = |number: libc::c_ulong, words: &mut [u64]| {
            check(libc::ioctl(uffd as i32, number as _, words.as_mut_ptr()).into())
        };
        let mut api = [0xaa, FEATURES, 0];
        request(UFFDIO_API, &mut api)?;
        if api[1] & FEATURES != FEATURES {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let map = || libc::mmap(std::ptr::null_mut(), 4096, prot, flags, -1, 0).cast::<u8>();
        let (from, to) = (map(), map());
        from.write(7);
        request(UFFDIO_REGISTER, &mut [to as u64, 4096, MISSING, 0])?;
        request(UFFDIO_MOVE, &mut [to as u64, from as u64, 4096, 0, 0])?;
        if to.read() == 7 { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EIO)) }
    }
}

#[test]
fn memory_moves_in_place_where_it_says_so() {
    let program = Program::new();
    for place in places("memory_moves_in_place_where_it_says_so") {
        let (value, _) = program.doctor(&place, &[]);
        let found = finding(&value, "memory-in-place");
        let reason = found["reason"].as_str().unwrap_or_default();
        // Each engine that moves memory of malloc asks where pages lie, and sets policies.
        let refused = ["mbind", "placement-query"]
            .map(|id| CALLS.iter().find(|(name, _)| *name == id).unwrap())
            .into_iter()
            .find(|(_, call)| truth(&place, *call).is_err());
        if let Some((id, _)) = refused {
            assert_eq!(found["state"], "missing", "{}: {found}", place.name);
            assert!(reason.ends_with(&format!("see {id}")), "{}: {found}", place.name);
            continue;
        }
        let truth = truth(&place, move_a_page);
        let context = format!("{}: found {truth:?}, stated {found}", place.name);
        assert_eq!(found["state"], if truth.is_ok() { "works" } else { "missing" }, "{context}");
        let Err(errno) = truth else { continue };
        assert!(found["summary"].as_str().unwrap().contains("engine kernel"), "{context}");
        let lacks = reason.contains("UFFDIO_MOVE, which came with Linux 6.8");
        assert_eq!(lines(&value, "memory-in-place").len(), usize::from(lacks), "{context}");
        match errno {
            libc::EINVAL => assert!(lacks, "{context}"),
            _ => assert!(reason.contains("under userfaultfd-device"), "{context}"),
        }
    }
}

#[test]
fn its_verdict_is_what_a_leap_shows() {
    const TEST: &str = "its_verdict_is_what_a_leap_shows";
    let program = Program::new();
    let small = ["demo", "--scale-factor", "0.01", "--writes-per-s", "0", "--json"];
    for place in places(TEST) {
        // Filters and users have the same effect for every page size, so one size is enough there.
        let pages: &[&str] = if place.name == HERE.name { &["4k", "thp"] } else { &["4k"] };
        for page in pages {
            let (value, code) = program.doctor(&place, &["--page-size", page]);
            let leap = program.run(&place, &[&small, &["--page-size", page][..]].concat());
            let said = String::from_utf8_lossy(&leap.stderr);
            let verdict = finding(&value, "leap");
            // The doctor takes fewer huge pages than the leap, and takes them at another time.
            let short = |said: &str| NO_HUGE_PAGES.iter().any(|why| said.contains(why));
            if *page == "thp" && (short(&said) || short(&value.to_string())) {
                skip(TEST, "thp: free memory is in pieces too small for huge pages");
                continue;
            }
            assert_eq!(
                code == 0,
                leap.status.success(),
                "{}, {page}: {verdict} {said}",
                place.name
            );
        }
    }
}

#[test]
fn groups_come_before_sysctls_and_lines_can_be_typed() {
    if !is_root() {
        return skip(
            "groups_come_before_sysctls_and_lines_can_be_typed",
            "other users can only be tried as root",
        );
    }
    let program = Program::new();
    let nobody = Place { name: "nobody", user: Some(NOBODY), ..HERE };
    let (value, _) = program.doctor(&nobody, &["--size", "1g", "--page-size", "2m"]);
    let refused = truth(&nobody, CALLS[3].1) == Err(libc::EPERM);
    let closed = truth(&nobody, CALLS[5].1) == Err(libc::EACCES);
    if refused && closed {
        let lines = lines(&value, "userfaultfd");
        let place = |text: &str| {
            lines.iter().position(|line| line.contains(text)).unwrap_or_else(|| panic!("{lines:?}"))
        };
        assert!(
            place("chmod 0660") < place("udev")
                && place("udev") < place("sysctl")
                && place("sysctl") < place("setcap")
        );
    }
    // The shell must accept every remedy that is a command line, once its placeholders are filled
    // in.
    for finding in value["findings"].as_array().unwrap() {
        for remedy in finding["remedies"].as_array().unwrap() {
            let line = remedy["line"].as_str().unwrap();
            assert!(
                !remedy["grants"].as_str().unwrap().is_empty() || line.starts_with("boot "),
                "{line}"
            );
            let filled = line.replace(['<', '>'], "_");
            let parsed = Command::new("sh").args(["-n", "-c", &filled]).output().unwrap();
            assert!(parsed.status.success(), "{line}: {}", String::from_utf8_lossy(&parsed.stderr));
        }
    }
}

#[test]
fn a_filter_that_kills_is_survived_and_named() {
    let program = Program::new();
    const CALLS: [(&str, &[i64]); 4] = [
        ("mbind", &[libc::SYS_mbind]),
        ("page-table-placement", &[libc::SYS_set_mempolicy]),
        ("placement-query", &[libc::SYS_move_pages]),
        ("userfaultfd", &[libc::SYS_userfaultfd]),
    ];
    for (id, call) in CALLS {
        let place = Place { name: id, filter: Some((Action::Kill, call)), ..HERE };
        let (value, code) = program.doctor(&place, &[]);
        assert_eq!((code, state(&value, id)), (1, "missing"), "{id}");
        assert!(finding(&value, id)["observed"].to_string().contains("SIGSYS"), "{id}");
        assert!(finding(&value, "leap")["reason"].as_str().unwrap().contains("seccomp"), "{id}");
    }
}

#[test]
fn limits_are_compared_with_the_size() {
    let program = Program::new();
    let place = |name, resource: u32, value| Place { name, limit: Some((resource, value)), ..HERE };
    let low = place("little address space", libc::RLIMIT_AS, 300 << 20);
    assert_eq!(program.doctor(&low, &[]).1, 0, "a few pages fit");
    let (value, code) = program.doctor(&low, &["--size", "320m"]);
    assert_eq!((code, state(&value, "leap")), (1, "works"));
    let blockers = names(&value["blockers"]);
    assert!(blockers.contains(&"address-space"), "{blockers:?}");
    assert!(
        blockers.iter().all(|id| *id == "address-space" || OF_MEMORY.contains(id)),
        "{blockers:?}"
    );
    let (value, code) = program.doctor(&place("hardly any", libc::RLIMIT_AS, 24 << 20), &[]);
    assert_eq!((code, state(&value, "leap")), (1, "missing"));
    let (value, code) =
        program.doctor(&place("small files", libc::RLIMIT_FSIZE, 1 << 20), &["--size", "2m"]);
    assert_eq!((code, state(&value, "file-size")), (1, "missing"));
    let (value, code) = program.doctor(&HERE, &["--size", "64t"]);
    assert_eq!(
        (code, state(&value, "free-memory"), state(&value, "mappings")),
        (1, "missing", "limited")
    );
    // With few descriptors the doctor must still report, whatever it finds.
    program.doctor(&place("few descriptors", libc::RLIMIT_NOFILE, 8), &[]);
    if !is_root() {
        return skip("limits_are_compared_with_the_size", "other users can only be tried as root");
    }
    let user = Some(NOBODY);
    let unlocked = Place { user, ..place("nothing to lock", libc::RLIMIT_MEMLOCK, 4096) };
    let (value, code) = program.doctor(&unlocked, &[]);
    assert_eq!((code, state(&value, "locked-memory")), (0, "limited"));
    let alone = Place { user, ..place("no more threads", libc::RLIMIT_NPROC, 1) };
    let (value, code) = program.doctor(&alone, &[]);
    assert_eq!((code, state(&value, "leap")), (1, "missing"));
}

/// Enters a new mount namespace, so that no change of mounts reaches another process.
fn own_mounts() -> io::Result<()> {
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: constant paths.
    unsafe {
        check(libc::unshare(libc::CLONE_NEWNS).into())?;
        let private = libc::MS_REC | libc::MS_PRIVATE;
        check(libc::mount(none, c"/".as_ptr(), none, private, none.cast()).into())
    }
}

fn without(path: &std::ffi::CStr) -> io::Result<()> {
    own_mounts()?;
    // SAFETY: a C string.
    check(unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) }.into())
}

fn read_only_sysfs() -> io::Result<()> {
    own_mounts()?;
    let none = std::ptr::null::<libc::c_char>();
    let flags = libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY;
    // SAFETY: a C string.
    check(unsafe { libc::mount(none, c"/sys".as_ptr(), none, flags, none.cast()) }.into())
}

/// Hides a file of the process and its copy of the main thread behind an empty one, as container
/// runtimes do.
fn masked(paths: [&std::ffi::CStr; 2]) -> io::Result<()> {
    own_mounts()?;
    let none = std::ptr::null::<libc::c_char>();
    paths.into_iter().try_for_each(|path| {
        // SAFETY: constant paths.
        let masked = unsafe {
            libc::mount(c"/dev/null".as_ptr(), path.as_ptr(), none, libc::MS_BIND, none.cast())
        };
        check(masked.into())
    })
}

#[test]
fn missing_and_read_only_mounts_are_named() {
    const TEST: &str = "missing_and_read_only_mounts_are_named";
    let place = |name, mounts| Place { name, mounts: Some(mounts), ..HERE };
    if let Err(errno) = truth(&place("own mounts", own_mounts), || Ok(())) {
        return skip(TEST, &format!("no mount namespace of its own (error {errno})"));
    }
    let program = Program::new();
    let (value, code) = program.doctor(&place("no /proc", || without(c"/proc")), &[]);
    assert_eq!(
        (code, state(&value, "procfs"), state(&value, "pagemap-scan")),
        (1, "missing", "missing")
    );
    assert_eq!(lines(&value, "procfs"), ["mount -t proc proc /proc"]);
    for id in ["cpuset", "mappings", "autonuma", "swap", "overcommit", "cgroup-memory"] {
        assert_eq!(state(&value, id), "unknown", "{id} cannot be known without /proc");
    }
    // Without smaps, a leap cannot preserve the attributes of the memory. So it must fail, and must
    // not only seem to succeed.
    let demo = ["demo", "--scale-factor", "0.01", "--writes-per-s", "0", "--json"];
    let smaps = place("masked smaps", || masked([c"/proc/self/smaps", c"/proc/thread-self/smaps"]));
    let leap = program.run(&smaps, &demo);
    let said = String::from_utf8_lossy(&leap.stderr);
    assert!(!leap.status.success() && said.contains("/proc/self/smaps"), "{said}");
    assert_eq!(program.doctor(&smaps, &[]).1, 1);
    let pagemap =
        place("masked pagemap", || masked([c"/proc/self/pagemap", c"/proc/thread-self/pagemap"]));
    let leap = program.run(&pagemap, &demo);
    assert_eq!(leap.status.success(), program.doctor(&pagemap, &[]).1 == 0);
    assert!(
        leap.status.success(),
        "frame numbers only verify: {}",
        String::from_utf8_lossy(&leap.stderr)
    );
    if state(&program.doctor(&HERE, &[]).0, "memory-in-place") == "works" {
        let (value, _) = program.doctor(&pagemap, &[]);
        let found = finding(&value, "memory-in-place");
        assert_eq!(found["state"], "missing", "{found}");
        assert!(found["reason"].as_str().unwrap().contains("pagemap-scan"), "{found}");
    }
    let (value, code) = program.doctor(&place("no /sys", || without(c"/sys")), &[]);
    assert_eq!((code, state(&value, "sysfs"), state(&value, "nodes")), (1, "missing", "unknown"));
    let (value, code) = program.doctor(&place("read-only /sys", read_only_sysfs), &[]);
    assert_eq!(code, program.doctor(&HERE, &[]).1, "a leap writes nothing there");
    let one_gb = finding(&value, "hugetlb-1g");
    if one_gb["state"] == "missing" && !one_gb["remedies"].as_array().unwrap().is_empty() {
        assert!(one_gb["remedies"].to_string().contains("read-only"), "{one_gb}");
    }
}

#[test]
fn another_machines_files_are_read_and_its_calls_are_not_guessed() {
    let tree = another_machine();
    let program = Program::new();
    let (value, code) = program.doctor(&HERE, &[&tree.flag(), "--size", "1g", "--page-size", "2m"]);
    assert_eq!((code, &value["calls_tried"]), (1, &Value::Bool(false)));
    assert!(finding(&value, "kernel")["summary"].to_string().contains("5.14.0-test"));
    for (id, expected) in [
        ("nodes", "works"),
        ("cpuset", "limited"),
        ("autonuma", "limited"),
        ("swap", "limited"),
        ("hugetlb-2m", "missing"),
        ("mbind", "unknown"),
        ("userfaultfd", "unknown"),
        ("memory-in-place", "unknown"),
        ("leap", "unknown"),
        ("thp", "unknown"),
    ] {
        assert_eq!(state(&value, id), expected, "{id}: {}", finding(&value, id));
    }
    assert!(value["userfaultfd"].is_null());
    assert!(finding(&value, "swap")["observed"].to_string().contains("/dev/sdz9"));
    // Two pools of 512 pages on the one node that the cpuset allows. The node has 7 huge pages, 5
    // of them free.
    let line = "echo 1026 > /sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages";
    assert_eq!(lines(&value, "hugetlb-2m")[0], line);
    let (value, _) = program.doctor(&HERE, &[&tree.flag(), "--size", "1g"]);
    assert_eq!(state(&value, "cgroup-memory"), "missing");
    assert_eq!(state(&value, "mappings"), "limited");
}

#[test]
fn folders_that_are_empty_missing_or_closed() {
    let program = Program::new();
    let empty = Tree::new(&[]);
    let (value, code) = program.doctor(&HERE, &[&empty.flag()]);
    assert_eq!((code, &value["calls_tried"]), (1, &Value::Bool(false)));
    assert!(
        value["findings"].as_array().unwrap().iter().all(|finding| finding["state"] != "limited"),
        "{value}"
    );
    let refused = |place: &Place, flag: &str| {
        let output = program.run(place, &["doctor", flag]);
        assert_eq!(output.status.code(), Some(2), "{flag}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("--sysroot") && output.stdout.is_empty(), "{said}");
    };
    refused(&HERE, "--sysroot=/nonexistent/folder");
    refused(&HERE, "--sysroot=/etc/passwd");
    if !is_root() {
        return skip(
            "folders_that_are_empty_missing_or_closed",
            "other users can only be tried as root",
        );
    }
    let closed = Tree::new(&[]);
    fs::set_permissions(&closed.0, fs::Permissions::from_mode(0o700)).unwrap();
    refused(&Place { name: "nobody", user: Some(NOBODY), ..HERE }, &closed.flag());
}

#[test]
fn bad_requests_are_refused_by_name() {
    let program = Program::new();
    for flags in [
        ["--size", "0"],
        ["--size", "-1"],
        ["--size", "much"],
        ["--size", "999999t"],
        ["--page-size", "3k"],
    ] {
        let output = program.run(&HERE, &[&["doctor"], &flags[..]].concat());
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(flags[0]), "{flags:?}");
        assert!(output.stdout.is_empty(), "{flags:?}");
    }
}

#[test]
fn text_begins_with_the_verdict_and_never_breaks_a_line_to_type() {
    let program = Program::new();
    let tree = another_machine();
    let elsewhere = tree.flag();
    // Remedies that name what is free, or how many mappings the doctor has. Nobody changes the
    // files of the other machine, so the two runs agree on everything there.
    let changing = [&OF_MEMORY[..], &["mappings"]].concat();
    for (flags, verdict, changing) in [
        (
            vec!["--size", "64t"],
            "A leap of 64 TiB in pages of 4k is possible here: no",
            &changing[..],
        ),
        (
            vec![&*elsewhere, "--size", "1g"],
            "A leap of 1 GiB in pages of 4k is possible here: not tried",
            &[],
        ),
        (
            vec![&*elsewhere, "--size", "1g", "--page-size", "2m"],
            "A leap of 1 GiB in pages of 2m is possible here: not tried",
            &[],
        ),
    ] {
        let (value, code) = program.doctor(&HERE, &flags);
        let output = program.run(&HERE, &[&["doctor"], &flags[..]].concat());
        assert_eq!((output.status.code(), code), (Some(1), 1), "{flags:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(text.lines().next(), Some(verdict), "{flags:?}");
        let findings = value["findings"].as_array().unwrap();
        for id in findings.iter().map(|finding| finding["id"].as_str().unwrap()) {
            assert!(text.contains(&format!("\n  {id}")), "{id} is not told");
            for line in lines(&value, id).iter().filter(|_| !changing.contains(&id)) {
                assert!(text.lines().any(|told| told.contains(line)), "{flags:?}: {line}: {text}");
            }
        }
    }
}
