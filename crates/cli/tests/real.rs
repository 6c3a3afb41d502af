//! Programs that nobody has changed move from node to node while they serve: Redis, memcached and
//! PostgreSQL. A program in C++ leaps its own memory.
//!
//! Clients go on meanwhile, check each answer, and note how long they waited. The machine is
//! emulated, so that only the stalls of one run can be compared with each other.

#[path = "../../pageleap/tests/common/mod.rs"]
mod common;
#[path = "real/mover.rs"]
mod mover;
#[path = "../../pageleap/tests/common/nodes.rs"]
mod nodes;

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use common::skip;
use mover::{Mover, arrived, middle, nothing_stays_without_a_reason};
use nodes::several;
use pageleap::NodeId;
use pageleap::process::{MappingKind, ProcessMemory};

/// Bytes of an entry of a data set.
const BYTES: usize = 1000;
/// Clients that ask beside the move, and requests that they complete meanwhile: half-way the move
/// waits for them. The program's own benchmark completes as many.
const CLIENTS: usize = 3;
const LEAST_REQUESTS: u64 = 1000;
/// How long a move takes, at least, besides: its rate follows from it.
const SECONDS: usize = 10;
/// The user and group `nobody`.
const NOBODY: u32 = 65_534;
/// How long a server may take to start, and an answer to come.
const PATIENCE: Duration = Duration::from_secs(120);

/// A program of the guest; on other machines, one of the path.
fn program(name: &str) -> Option<PathBuf> {
    let folders = ["/lab/bin", "/usr/bin", "/usr/sbin", "/bin"];
    folders.iter().map(|folder| Path::new(folder).join(name)).find(|path| path.is_file())
}

/// A server over a socket. It is killed at the end.
struct Server {
    /// Entries of its data set.
    entries: usize,
    child: Child,
    socket: PathBuf,
}

impl Server {
    /// Starts a server as `nobody` that takes its memory from a node. `arguments` may name the
    /// socket by `{}`.
    fn start(program: &Path, arguments: &[&str], node: NodeId, entries: usize) -> Server {
        let name = program.file_name().unwrap().to_string_lossy();
        let folder = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::set_permissions(&folder, Permissions::from_mode(0o777)).unwrap();
        let socket = folder.join("socket");
        Server::start_at(program, arguments, node, entries, socket)
    }

    /// The same with a socket of its own choice.
    fn start_at(
        program: &Path,
        arguments: &[&str],
        node: NodeId,
        entries: usize,
        socket: PathBuf,
    ) -> Server {
        let path = socket.to_string_lossy().into_owned();
        let mut command = Command::new(program);
        command.args(arguments.iter().map(|argument| argument.replace("{}", &path)));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.current_dir(socket.parent().expect("a folder of its own"));
        if common::is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        // SAFETY: the closure makes two system calls, which take numbers and one word.
        unsafe {
            command.pre_exec(move || {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                let mask = 1u64 << node.0;
                let set = libc::SYS_set_mempolicy;
                libc::syscall(set, libc::MPOL_PREFERRED, &raw const mask, 65usize);
                Ok(())
            });
        }
        let mut child = command.spawn().unwrap();
        let began = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            assert!(child.try_wait().unwrap().is_none(), "{} has ended", program.display());
            assert!(began.elapsed() < PATIENCE, "{} does not start", program.display());
            thread::sleep(Duration::from_millis(20));
        }
        Server { entries, child, socket }
    }

    fn client(&self) -> Client {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client(BufReader::new(stream))
    }

    /// Bytes of its own memory on a node.
    fn on(&self, node: NodeId) -> u64 {
        let memory = ProcessMemory::read(self.child.id()).unwrap();
        let own =
            memory.on_nodes_of(|m| matches!(m.kind, MappingKind::Heap | MappingKind::Anonymous));
        own.get(&node).copied().unwrap_or(0)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(self.socket.parent().expect("a folder of its own"));
    }
}

/// A connection to a server.
struct Client(BufReader<UnixStream>);

impl Client {
    fn send(&mut self, text: &str) {
        self.0.get_mut().write_all(text.as_bytes()).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        assert!(line.ends_with("\r\n"), "the server has hung up: {line:?}");
        line.truncate(line.len() - 2);
        line
    }

    fn bytes(&mut self, count: usize) -> String {
        let mut bytes = vec![0; count + 2];
        self.0.read_exact(&mut bytes).unwrap();
        bytes.truncate(count);
        String::from_utf8(bytes).unwrap()
    }
}

/// What a client can ask.
trait Protocol: Sync {
    fn set(&self, client: &mut Client, key: &str, value: &str);
    fn get(&self, client: &mut Client, key: &str) -> Option<String>;
}

struct Redis;

impl Redis {
    /// A command whose answer is one line, or text of a length.
    fn ask(&self, client: &mut Client, command: &str) -> Option<String> {
        client.send(&format!("{command}\r\n"));
        let line = client.line();
        match line.split_at(1) {
            ("+" | ":", rest) => Some(rest.to_owned()),
            ("$", "-1") => None,
            ("$", count) => Some(client.bytes(count.parse().unwrap())),
            _ => panic!("{command}: {line}"),
        }
    }
}

impl Protocol for Redis {
    fn set(&self, client: &mut Client, key: &str, value: &str) {
        assert_eq!(self.ask(client, &format!("SET {key} {value}")).as_deref(), Some("OK"));
    }

    fn get(&self, client: &mut Client, key: &str) -> Option<String> {
        self.ask(client, &format!("GET {key}"))
    }
}

struct Memcached;

impl Protocol for Memcached {
    fn set(&self, client: &mut Client, key: &str, value: &str) {
        client.send(&format!("set {key} 0 0 {}\r\n{value}\r\n", value.len()));
        assert_eq!(client.line(), "STORED");
    }

    fn get(&self, client: &mut Client, key: &str) -> Option<String> {
        client.send(&format!("get {key}\r\n"));
        let head = client.line();
        if head == "END" {
            return None;
        }
        let count = head.rsplit(' ').next().unwrap().parse().unwrap();
        let value = client.bytes(count);
        assert_eq!(client.line(), "END");
        Some(value)
    }
}

/// What clients saw while something else was done.
#[derive(Debug)]
struct Seen {
    requests: u64,
    longest: Duration,
}

/// Lets clients ask while `work` runs, which can ask how many requests have been completed since it
/// began. Each answer is checked: what the client has set, and an entry of the data set.
fn beside<P: Protocol>(
    server: &Server,
    protocol: &P,
    is_entry: &(dyn Fn(usize, &str) -> bool + Sync),
    work: impl FnOnce(&dyn Fn() -> u64),
) -> Seen {
    let (stop, requests, longest) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let client = |number: usize| {
        let mut client = server.client();
        let mut round = number;
        while !stop.load(Relaxed) {
            let mut timed = |ask: &mut dyn FnMut(&mut Client)| {
                let began = Instant::now();
                ask(&mut client);
                longest.fetch_max(began.elapsed().as_nanos() as u64, Relaxed);
                requests.fetch_add(1, Relaxed);
            };
            let (key, value) = (format!("own-{number}-{}", round % 50), format!("value-{round}"));
            timed(&mut |client| protocol.set(client, &key, &value));
            timed(&mut |client| assert_eq!(protocol.get(client, &key).as_ref(), Some(&value)));
            let entry = round * 7919 % server.entries;
            timed(&mut |client| {
                let found = protocol.get(client, &format!("key:{entry}")).expect("LOST an entry");
                assert!(is_entry(entry, &found), "LOST: entry {entry} is {found}");
            });
            round += 1;
        }
    };
    thread::scope(|scope| {
        let clients: Vec<_> =
            (0..CLIENTS).map(|number| scope.spawn(move || client(number))).collect();
        // All of them work before the move begins.
        while requests.load(Relaxed) < CLIENTS as u64 * 3 {
            thread::sleep(Duration::from_millis(5));
            assert!(!clients.iter().any(|client| client.is_finished()), "a client has failed");
        }
        longest.store(0, Relaxed);
        let before = requests.load(Relaxed);
        let completed = || requests.load(Relaxed) - before;
        let worked = catch_unwind(AssertUnwindSafe(|| work(&completed)));
        let seen =
            Seen { requests: completed(), longest: Duration::from_nanos(longest.load(Relaxed)) };
        stop.store(true, Relaxed);
        worked.unwrap_or_else(|panic| resume_unwind(panic));
        clients.into_iter().for_each(|client| client.join().unwrap());
        seen
    })
}

/// Moves a server there while clients ask, and back by `migratepages` in the same way. The load of
/// another program has completed `others` requests so far.
fn moves_while_it_serves<P: Protocol>(
    test: &str,
    server: &Server,
    protocol: &P,
    is_entry: &(dyn Fn(usize, &str) -> bool + Sync),
    others: Option<&dyn Fn() -> u64>,
    [from, to]: [NodeId; 2],
) {
    let data = (server.entries * BYTES) as u64;
    assert!(server.on(from) >= data, "{} bytes on {from}", server.on(from));
    let own = [MappingKind::Heap, MappingKind::Anonymous];
    let middle = middle(server.child.id(), from, &own);
    let others_before = others.map_or(0, |others| others());
    let of_others = || others.map(|others| others() - others_before);
    let seen = beside(server, protocol, is_entry, |completed| {
        let rate = (server.entries * BYTES / SECONDS).to_string();
        let (pid, node) = (server.child.id().to_string(), to.0.to_string());
        let mut mover = Mover::start(&[&pid, "--to", &node, "--rate", &rate]);
        mover.hold(middle, to, &|| {
            let all = [Some(completed()), of_others()];
            all.into_iter().flatten().all(|requests| requests >= LEAST_REQUESTS)
        });
        let summary = mover.end();
        assert!(arrived(&summary) >= data, "{summary}");
    });
    // What is new since then follows the server's policy.
    assert!(server.on(to) >= data && server.on(from) < data / 20, "{} left", server.on(from));
    assert!(seen.requests >= LEAST_REQUESTS, "{seen:?}");
    let of_others = of_others();
    assert!(of_others.is_none_or(|requests| requests >= LEAST_REQUESTS), "{of_others:?}");
    println!(
        "pageleap move: {} requests and {of_others:?} of others, the longest took {:?}",
        seen.requests, seen.longest
    );
    let summary = nothing_stays_without_a_reason(&[server.child.id()], [from, to], &[]);
    assert_eq!(server.on(from), 0, "{summary}");
    let Some(other) = program("migratepages") else {
        return skip(&format!("{test} (migratepages)"), &"migratepages is not installed");
    };
    let seen = beside(server, protocol, is_entry, |_| {
        let pages = [server.child.id(), to.0, from.0].map(|number| number.to_string());
        assert!(Command::new(other).args(pages).status().unwrap().success());
    });
    println!("migratepages: {} requests, the longest took {:?}", seen.requests, seen.longest);
}

/// The first two nodes and a server, unless there is only one node, or no such server.
fn scene(test: &str, name: &str) -> Option<([NodeId; 2], PathBuf)> {
    let nodes = several(test)?;
    let Some(path) = program(name) else {
        skip(test, &format!("{name} is not installed"));
        return None;
    };
    Some(([nodes[0], nodes[1]], path))
}

#[test]
fn redis_moves_while_it_serves() {
    const NAME: &str = "redis_moves_while_it_serves";
    let Some((nodes, path)) = scene(NAME, "redis-server") else { return };
    let arguments = ["--port", "0", "--unixsocket", "{}", "--save", "", "--enable-debug-command"];
    let server = Server::start(&path, &[&arguments[..], &["yes"]].concat(), nodes[0], 400_000);
    let mut client = server.client();
    let mut ask = |command: &str| Redis.ask(&mut client, command).unwrap();
    ask(&format!("DEBUG POPULATE {} key {BYTES}", server.entries));
    let digest = ask("DEBUG DIGEST");
    // Redis' own benchmark, with keys of another database, and by commands of which no other client
    // makes use.
    let load = program("redis-benchmark").map(|path| {
        let mut command = Command::new(path);
        command.arg("-s").arg(&server.socket).args(["-q", "-l", "-t", "incr,hset", "-c", "4"]);
        command.args(["-r", "1000", "--dbnum", "9"]).stdout(Stdio::null()).spawn().unwrap()
    });
    if load.is_none() {
        skip(&format!("{NAME} (redis-benchmark)"), &"redis-benchmark is not installed");
    }
    let of_the_benchmark = || {
        let told = Redis.ask(&mut server.client(), "INFO commandstats").unwrap();
        let of = |command: &str| {
            let line = told.lines().find_map(|line| line.strip_prefix(command));
            let calls = line.map(|line| line.split(',').next().unwrap());
            calls.map_or(0, |calls| calls.parse::<u64>().unwrap())
        };
        of("cmdstat_incr:calls=") + of("cmdstat_hset:calls=")
    };
    let is_entry = |entry: usize, found: &str| {
        found.len() == BYTES && found.starts_with(&format!("value:{entry}"))
    };
    let others: &dyn Fn() -> u64 = &of_the_benchmark;
    moves_while_it_serves(NAME, &server, &Redis, &is_entry, load.as_ref().map(|_| others), nodes);
    if let Some(mut load) = load {
        assert!(load.try_wait().unwrap().is_none(), "redis-benchmark has failed");
        load.kill().unwrap();
        load.wait().unwrap();
    }
    // Without what clients have written, it is the same data set.
    let mut ask = |command: &str| Redis.ask(&mut client, command).unwrap();
    for number in 0..CLIENTS {
        (0..50).for_each(|key| drop(ask(&format!("DEL own-{number}-{key}"))));
    }
    ask("SELECT 9");
    ask("FLUSHDB");
    assert_eq!(ask("DEBUG DIGEST"), digest, "LOST");
}

#[test]
fn memcached_moves_while_it_serves() {
    const NAME: &str = "memcached_moves_while_it_serves";
    let Some((nodes, path)) = scene(NAME, "memcached") else { return };
    let arguments = ["-m", "512", "-t", "2", "-s", "{}"];
    let server = Server::start(&path, &arguments, nodes[0], 60_000);
    let value = |entry: usize| format!("{entry:0>BYTES$}");
    let mut client = server.client();
    for entry in 0..server.entries {
        client.send(&format!("set key:{entry} 0 0 {BYTES} noreply\r\n{}\r\n", value(entry)));
    }
    let is_entry = |entry: usize, found: &str| found == value(entry);
    moves_while_it_serves(NAME, &server, &Memcached, &is_entry, None, nodes);
    for entry in 0..server.entries {
        let found = Memcached.get(&mut client, &format!("key:{entry}")).expect("LOST an entry");
        assert!(is_entry(entry, &found), "LOST: entry {entry} is {found}");
    }
}

/// PostgreSQL: several processes with one segment of shared buffers.
struct Postgresql {
    server: Server,
    folder: PathBuf,
}

/// Where the lab puts a new database.
const DATABASE: &str = "/lab/database";
/// What no server of the lab needs, and what makes it use memory instead of disks.
const SETTINGS: [&str; 9] = [
    "huge_pages=off",
    "listen_addresses=",
    "shared_buffers=96MB",
    "dynamic_shared_memory_type=mmap",
    "fsync=off",
    "autovacuum=off",
    "max_connections=16",
    "timezone=GMT",
    "log_timezone=GMT",
];

impl Postgresql {
    /// Starts it as `nobody`, who gets the folder. `None` if there is no database.
    fn start(program: &Path, node: NodeId) -> Option<Postgresql> {
        let folder = PathBuf::from(DATABASE);
        if !folder.join("postgresql.conf").exists() {
            return None;
        }
        give_to_nobody(&folder);
        let sockets = format!("unix_socket_directories={DATABASE}");
        let mut arguments = vec!["-D", DATABASE, "-c", &sockets];
        SETTINGS.iter().for_each(|setting| arguments.extend(["-c", setting]));
        let server = Server::start_at(program, &arguments, node, 0, folder.join(".s.PGSQL.5432"));
        let base = Postgresql { server, folder };
        let script = base.folder.join("ready.sql");
        std::fs::write(&script, "SELECT 1;\n").unwrap();
        let began = Instant::now();
        let is_ready = || {
            let mut ask = base.pgbench(&["-t", "1", "-f", script.to_str().unwrap()]);
            ask.stderr(Stdio::null()).status().unwrap().success()
        };
        // It refuses clients at first.
        while !is_ready() {
            assert!(began.elapsed() < PATIENCE, "PostgreSQL does not start");
            thread::sleep(Duration::from_millis(50));
        }
        Some(base)
    }

    /// `pgbench` with these arguments, as `nobody`.
    fn pgbench(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program("pgbench").expect("it comes with the server"));
        command.args(["-h", DATABASE, "-U", "nobody", "-n"]).args(arguments).arg("postgres");
        command.uid(NOBODY).gid(NOBODY).current_dir(&self.folder).stdout(Stdio::null());
        command
    }

    /// Runs statements once. A statement that fails fails the test.
    fn run(&self, statements: &str) {
        let script = self.folder.join("script.sql");
        std::fs::write(&script, statements).unwrap();
        let ended = self.pgbench(&["-t", "1", "-f", script.to_str().unwrap()]).status().unwrap();
        assert!(ended.success(), "{statements}");
    }

    /// All its processes, the first one first.
    fn pids(&self) -> Vec<u32> {
        pageleap::process::descendants(self.server.child.id()).unwrap()
    }

    /// Bytes of shared memory on a node, in all processes.
    fn shared_on(&self, node: NodeId) -> u64 {
        let memories = self.pids().into_iter().filter_map(|pid| ProcessMemory::read(pid).ok());
        let on = memories.map(|memory| {
            let shared = memory.on_nodes_of(|m| m.kind == MappingKind::Shared);
            shared.get(&node).copied().unwrap_or(0)
        });
        on.sum()
    }
}

/// Makes a user the owner of a folder and of all that is in it, and hides it from others.
fn give_to_nobody(path: &Path) {
    std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    if path.is_dir() {
        std::fs::set_permissions(path, Permissions::from_mode(0o700)).unwrap();
        std::fs::read_dir(path).unwrap().for_each(|entry| give_to_nobody(&entry.unwrap().path()));
    }
}

/// Fails unless two questions have one answer.
fn same(one: &str, other: &str) -> String {
    format!("SELECT 1 / (({one}) IS NOT DISTINCT FROM ({other}))::int;\n")
}

#[test]
fn postgresql_moves_while_it_serves() {
    const NAME: &str = "postgresql_moves_while_it_serves";
    let Some(([from, to], path)) = scene(NAME, "postgres") else { return };
    let Some(base) = Postgresql::start(&path, from) else {
        return skip(NAME, &"there is no new database, which the lab makes as root");
    };
    let made = base.pgbench(&["-i", "-q", "-s", "2"]).status().unwrap();
    assert!(made.success(), "pgbench -i has failed");
    // What the load does not change, and what it keeps equal.
    let rows = "SELECT md5(string_agg(aid || filler, ',' ORDER BY aid)) FROM pgbench_accounts";
    base.run(&format!("CREATE TABLE digest AS {rows};\n"));
    let mut load =
        base.pgbench(&["-c", "4", "-T", "600", "-l", "-b", "select-only@9", "-b", "tpcb-like@1"]);
    let mut load = load.stderr(Stdio::null()).spawn().unwrap();
    let requests = || -> Vec<u64> {
        let logs = std::fs::read_dir(&base.folder).unwrap().flatten().map(|entry| entry.path());
        let logs =
            logs.filter(|p| p.file_name().unwrap().to_string_lossy().starts_with("pgbench_log"));
        let text: String = logs.map(|path| std::fs::read_to_string(path).unwrap()).collect();
        // client, transaction, latency in us, script, seconds, microseconds
        text.lines().filter_map(|line| line.split(' ').nth(2)?.parse::<u64>().ok()).collect()
    };
    let soon = |least: usize| {
        let began = Instant::now();
        loop {
            let seen: Vec<u64> = requests();
            if seen.len() >= least {
                return seen;
            }
            assert!(began.elapsed() < PATIENCE, "{} requests", seen.len());
            thread::sleep(Duration::from_millis(200));
        }
    };
    let began = Instant::now();
    // Each process is told what it has touched.
    while base.shared_on(from) <= 20 << 20 {
        assert!(began.elapsed() < PATIENCE, "{} bytes", base.shared_on(from));
        thread::sleep(Duration::from_millis(200));
    }
    let before = soon(100).len();
    let of_shared = |pid: &u32| {
        let memory = ProcessMemory::read(*pid).ok();
        memory.map(|memory| memory.on_nodes_of(|m| m.kind == MappingKind::Shared))
    };
    let largest = base.pids().into_iter().max_by_key(|pid| of_shared(pid)?.get(&from).copied());
    let middle = middle(largest.unwrap(), from, &[MappingKind::Shared]);
    let (pid, node) = (base.server.child.id().to_string(), to.0.to_string());
    let tree = ["--tree", "--shared"];
    let mut mover = Mover::start(&[&[&*pid, "--to", &*node, "--rate", "4m"], &tree[..]].concat());
    let is_enough = || requests().len() - before >= LEAST_REQUESTS as usize;
    mover.hold(middle, to, &is_enough);
    mover.end();
    let seen: Vec<u64> = requests();
    let (done, seen) = (seen.len(), &seen[before..]);
    assert!(seen.len() as u64 >= LEAST_REQUESTS, "{} requests", seen.len());
    println!("pageleap move: {} requests, the longest took {:?} us", seen.len(), seen.iter().max());
    // What was touched first since then follows the policy of the server.
    let [old, new] = [from, to].map(|node| base.shared_on(node));
    assert!(old < new, "{old} bytes of shared memory left, {new} arrived");
    if let Some(other) = program("migratepages") {
        for pid in base.pids() {
            let pages = [pid, to.0, from.0].map(|number| number.to_string());
            // The process may have ended meanwhile.
            let _ = Command::new(&other).args(pages).stderr(Stdio::null()).status();
        }
        let seen = &soon(done + 1)[done..];
        println!(
            "migratepages: {} requests, the longest took {:?} us",
            seen.len(),
            seen.iter().max()
        );
    } else {
        skip(&format!("{NAME} (migratepages)"), &"migratepages is not installed");
    }
    // A client that met an error has ended.
    assert!(load.try_wait().unwrap().is_none(), "pgbench has failed");
    // SAFETY: a child of this test, which has not been waited for.
    unsafe { libc::kill(load.id() as i32, libc::SIGINT) };
    load.wait().unwrap();
    // The processes that have served pgbench end.
    let serves = |pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|c| c.contains("[local]"))
    };
    let began = Instant::now();
    while base.pids().iter().any(serves) {
        assert!(began.elapsed() < PATIENCE, "processes of PostgreSQL do not end");
        thread::sleep(Duration::from_millis(20));
    }
    nothing_stays_without_a_reason(&base.pids(), [from, to], &tree);
    let old = base.shared_on(from);
    assert_eq!(old, 0, "{old} bytes of shared memory left at rest");
    let sum = |column: &str, table: &str| format!("SELECT sum({column}) FROM pgbench_{table}");
    let balances = ["accounts", "tellers", "branches"]
        .map(|table| sum(&format!("{}balance", &table[..1]), table));
    let delta = "SELECT coalesce(sum(delta), 0) FROM pgbench_history";
    base.run(&same(rows, "SELECT * FROM digest"));
    balances.iter().for_each(|balance| base.run(&same(balance, delta)));
}

/// `crates/capi/tests/ordinary_memory.cpp`: it leaps its containers, verifies them, and asks the
/// kernel where their pages lie.
#[test]
fn ordinary_memory_leaps_while_threads_use_it() {
    const NAME: &str = "ordinary_memory_leaps_while_threads_use_it";
    /// Fewer than on a machine that is not emulated.
    const LEAPS: &str = "4";
    let Some(nodes) = several(NAME) else { return };
    let Some(path) = program("ordinary_memory") else {
        return skip(NAME, &"the lab builds the program, where it finds g++");
    };
    let output = Command::new(path).arg(LEAPS).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{said}");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} {errors}", output.status);
    for node in &nodes[..2] {
        assert!(said.contains(&format!("pages lie on {node}\n")), "not checked: {said}");
    }
}
