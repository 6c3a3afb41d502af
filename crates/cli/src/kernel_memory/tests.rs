//! Walks through core files that these tests write: page tables of four and of five levels, in
//! memory of two nodes.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::tables::ByNode;
use super::*;

/// Where the kernel addresses all memory (`__PAGE_OFFSET_BASE_L4`), and its image.
const ALL_MEMORY: u64 = 0xFFFF_8880_0000_0000;
const IMAGE: u64 = 0xFFFF_FFFF_8100_0000;

/// Where the file has both, and their sizes.
const MEMORY_AT: u64 = 0x1_0000;
const MEMORY_BYTES: u64 = 64 << 12;
const IMAGE_AT: u64 = MEMORY_AT + MEMORY_BYTES;
const IMAGE_BYTES: u64 = 0x2000;

const LAYOUT: Layout = Layout { tasks: 0x100, tgid: 0x20, mm: 0x40, pgd: 0x18 };

/// Entries: a page of page table, a page of 2 MB or 1 GB, a page that is not present.
const TABLE: u64 = 1 << 63 | 0x67;
const HUGE: u64 = 0xE7;

struct Model {
    folder: tempfile::TempDir,
    file: File,
}

impl Model {
    /// A core file with a first process, which has no memory.
    fn new(has_five_levels: bool) -> Model {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kcore");
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        let model = Model { folder, file: file.unwrap() };
        let info = format!(
            "OSRELEASE=6.12.0\nNUMBER(pgtable_l5_enabled)={}\nNUMBER(sme_mask)={}\n",
            u8::from(has_five_levels),
            1_u64 << 47
        );
        let mut head = b"\x7FELF\x02\x01\x01".to_vec();
        head.resize(16, 0);
        head.extend([4, 0, 62, 0, 1, 0, 0, 0]); // a core file, x86-64
        head.extend([0, 64, 0].map(u64::to_le_bytes).concat());
        head.extend([0, 0, 0, 0, 64, 0, 56, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
        let notes = note("CORE", b"123").into_iter().chain(note("VMCOREINFO", info.as_bytes()));
        let notes: Vec<u8> = notes.collect();
        let segment = |kind: u32, offset: u64, address: u64, physical: u64, bytes: u64| {
            let mut header = [kind, 7].map(u32::to_le_bytes).concat();
            header.extend(
                [offset, address, physical, bytes, bytes, 0].map(u64::to_le_bytes).concat(),
            );
            header
        };
        head.extend(segment(4, 0x1000, 0, 0, notes.len() as u64));
        // The image lies in memory that has other contents at its usual address: page 20.
        head.extend(segment(1, IMAGE_AT, IMAGE, 20 << 12, IMAGE_BYTES));
        head.extend(segment(1, MEMORY_AT, ALL_MEMORY, 0, MEMORY_BYTES));
        model.file.set_len(IMAGE_AT + IMAGE_BYTES).unwrap();
        model.file.write_all_at(&head, 0).unwrap();
        model.file.write_all_at(&notes, 0x1000).unwrap();
        model.list(&[]);
        model
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("kcore")
    }

    /// Writes a number at a physical address, or in the kernel's image.
    fn put(&self, at: u64, value: u64) {
        let at = if at >= IMAGE { at - IMAGE + IMAGE_AT } else { at + MEMORY_AT };
        self.file.write_all_at(&value.to_le_bytes(), at).unwrap();
    }

    /// An entry of a page of page table.
    fn entry(&self, table: u64, index: u64, value: u64) {
        self.put((table << 12) + index * 8, value);
    }

    /// A page of page table below another one.
    fn table(&self, table: u64, index: u64, below: u64) {
        self.entry(table, index, below << 12 | TABLE);
    }

    /// Lists processes behind the first one: their number, the page with their `task_struct`, the
    /// page with their `mm_struct`.
    fn list(&self, processes: &[(u64, u64, Option<u64>)]) {
        let mut last = IMAGE;
        for (pid, task, memory) in processes {
            self.put(last + LAYOUT.tasks, ALL_MEMORY + (task << 12) + LAYOUT.tasks);
            last = task << 12;
            self.put(last + LAYOUT.tgid, *pid);
            self.put(last + LAYOUT.mm, memory.map_or(0, |memory| ALL_MEMORY + (memory << 12)));
        }
        self.put(last + LAYOUT.tasks, IMAGE + LAYOUT.tasks);
    }

    /// The highest page table of an `mm_struct`.
    fn root(&self, memory: u64, table: u64) {
        self.put((memory << 12) + LAYOUT.pgd, ALL_MEMORY + (table << 12));
    }

    /// Looks for processes and walks through their page tables.
    fn walk(&self, pids: &[u32], nodes: NodesOfMemory) -> Result<Vec<Walked>, Reason> {
        let core = Core::open(&self.path(), Path::new("/none"))?;
        let symbols = Symbols { layout: LAYOUT, first: KernelAddress(IMAGE) };
        let kernel = KernelMemory { core, nodes, symbols: &symbols, most_processes: 100 };
        let tasks = kernel.find(pids)?;
        Ok(pids.iter().map(|pid| kernel.page_tables(*pid, tasks.get(pid))).collect())
    }
}

type Walked = Result<TablesOfProcess, Reason>;

/// 32 pages on each node.
fn two_nodes() -> NodesOfMemory {
    NodesOfMemory::of_blocks(32 << 12, &[(0, 0), (1, 1)])
}

fn note(name: &str, text: &[u8]) -> Vec<u8> {
    let mut note = [name.len() as u32 + 1, text.len() as u32, 0].map(u32::to_le_bytes).concat();
    note.extend(name.bytes());
    note.push(0);
    note.resize(note.len().next_multiple_of(4), 0);
    note.extend(text);
    note.resize(note.len().next_multiple_of(4), 0);
    note
}

/// The process of most tests.
const PID: u32 = 4711;

/// The pages of a walk through its page tables, by node.
fn walked(model: &Model) -> TablesOfProcess {
    let all = model.walk(&[PID], two_nodes());
    all.and_then(|mut all| all.remove(0)).unwrap_or_else(|reason| panic!("{reason}"))
}

/// A process with page tables below a PUD in page 10: two PMDs with three pages of PTEs. Pages of
/// 32 and more lie on node 1.
fn some_tables(model: &Model) {
    model.list(&[(7, 1, None), (PID.into(), 2, Some(3)), (9, 4, Some(5))]);
    for (index, pmd) in [(0, 11), (511, 40)] {
        model.table(10, index, pmd);
    }
    model.entry(10, 1, 50 << 12 | HUGE); // a page of 1 GB
    model.table(11, 0, 12);
    model.table(11, 7, 41);
    model.entry(11, 8, 51 << 12 | HUGE); // a page of 2 MB
    model.entry(11, 9, 52 << 12 | HUGE & !1); // one that is not present
    model.table(40, 511, 42);
}

#[test]
fn four_levels_are_counted() {
    let model = Model::new(false);
    some_tables(&model);
    model.root(3, 20);
    model.table(20, 255, 10);
    model.table(20, 256, 13); // of the kernel
    let found = walked(&model);
    let by_node = [(0, [1, 1, 1, 0, 1]), (1, [2, 1, 0, 0, 0])];
    let by_node = by_node.map(|(node, levels)| (Some(NodeId(node)), levels));
    let tables = TablesOfProcess { by_node: by_node.into(), ..Default::default() };
    assert_eq!(found, tables);
    assert_eq!(found.counted_bytes(), 6 << 12);
}

#[test]
fn five_levels_are_counted() {
    let model = Model::new(true);
    some_tables(&model);
    model.root(3, 20);
    model.entry(20, 0, 33 << 12 | TABLE | 1 << 47); // with the bit of encryption
    model.table(33, 511, 10);
    let found = walked(&model);
    let by_node = [(0, [1, 1, 1, 0, 1]), (1, [2, 1, 0, 1, 0])];
    let by_node = by_node.map(|(node, levels)| (Some(NodeId(node)), levels));
    assert_eq!(found.by_node, by_node.into());
    assert!(found.has_five_levels && found.changed == 0 && !found.is_cut_off, "{found:?}");
    // P4Ds are not in VmPTE.
    assert_eq!(found.counted_bytes(), 6 << 12);
}

#[test]
fn entries_that_point_nowhere_are_left_out() {
    let model = Model::new(false);
    some_tables(&model);
    model.root(3, 20);
    model.table(20, 0, 10);
    model.table(20, 1, 1 << 20); // no such memory
    model.table(40, 0, 1 << 20);
    let found = walked(&model);
    assert_eq!((found.changed, found.counted_bytes()), (2, 6 << 12));
}

#[test]
fn pages_that_were_freed_meanwhile_are_left_out() {
    let nodes = two_nodes();
    let part = |pages| ByNode::from([(Some(NodeId(0)), [pages, 0, 0, 0, 0])]);
    let parts =
        || vec![(0, 11 << 12, part(1)), (3, 12 << 12, part(20)), (511, 40 << 12, part(300))];
    let mut now = vec![None; 512];
    (now[0], now[3], now[511]) = (Some(11 << 12), Some(12 << 12), Some(40 << 12));
    let pmds = |pages, more| [(Some(NodeId(0)), [321, pages, 0, 0, 0]), (Some(NodeId(1)), more)];
    let all = ByNode::from(pmds(2, [0, 1, 0, 0, 0]));
    assert_eq!(tables::still_linked(parts(), &now, 1, &nodes), (all, 0));
    // One is freed, and one makes room for another.
    (now[3], now[511]) = (None, Some(41 << 12));
    let all = ByNode::from([(Some(NodeId(0)), [1, 1, 0, 0, 0])]);
    assert_eq!(tables::still_linked(parts(), &now, 1, &nodes), (all, 2));
}

#[test]
fn memory_of_an_unknown_node_is_counted_as_such() {
    let model = Model::new(false);
    some_tables(&model);
    model.root(3, 20);
    model.table(20, 0, 10);
    let nodes = NodesOfMemory::of_blocks(32 << 12, &[(0, 0), (2, 0), (1, 1)]);
    let found = model.walk(&[PID], nodes).unwrap().remove(0).unwrap();
    assert_eq!(found.by_node.get(&None), Some(&[1, 1, 1, 0, 1]));
}

#[test]
fn processes_are_told_apart() {
    let model = Model::new(false);
    some_tables(&model);
    model.root(3, 20);
    model.table(20, 0, 10);
    // The second one has no memory, and the third one is not in the list.
    model.list(&[(PID.into(), 1, Some(3)), (5, 2, None)]);
    let all = model.walk(&[PID, 5, 6], two_nodes()).unwrap();
    let told: Vec<String> = all
        .into_iter()
        .map(|one| one.map_or_else(|why| why.to_string(), |found| format!("{found:?}")))
        .collect();
    let parts = ["[1, 1, 1, 0, 1]", "no memory of its own", "not in the kernel's list"];
    assert!(told.iter().zip(parts).all(|(told, part)| told.contains(part)), "{told:?}");
}

#[test]
fn a_process_that_runs_another_program_meanwhile_is_seen() {
    let model = Model::new(false);
    some_tables(&model);
    model.root(3, 20);
    let core = Core::open(&model.path(), Path::new("/none")).ok().unwrap();
    let task =
        |pid: u32| tasks::find(&core, &LAYOUT, KernelAddress(IMAGE), &[pid], 100).ok().unwrap();
    let task = task(PID)[&PID];
    let is_unchanged = || tasks::is_unchanged(&core, &LAYOUT, PID, &task);
    assert!(is_unchanged());
    model.root(3, 21);
    assert!(!is_unchanged());
    model.root(3, 20);
    // Another process has its place.
    model.put((2 << 12) + LAYOUT.tgid, 8);
    assert!(!is_unchanged());
}

#[test]
fn lists_that_lead_astray_end() {
    let model = Model::new(false);
    some_tables(&model);
    // Memory that has been freed, memory that is not there, a circle without the first process.
    let ends = [0, ALL_MEMORY + (1 << 40), ALL_MEMORY + (1 << 12) + LAYOUT.tasks];
    for end in ends {
        model.put((4 << 12) + LAYOUT.tasks, end);
        let reason = model.walk(&[1], two_nodes()).unwrap_err().to_string();
        assert!(reason.contains("processes end faster"), "{reason}");
    }
}

#[test]
fn a_walk_ends_after_so_many_reads() {
    let model = Model::new(false);
    some_tables(&model);
    model.root(3, 20);
    model.table(20, 0, 10);
    let core = Core::open(&model.path(), Path::new("/none")).ok().unwrap();
    let root = KernelAddress(ALL_MEMORY + (20 << 12));
    let count = |reads| tables::count_with(&core, &two_nodes(), root, reads).ok().unwrap();
    assert_eq!(count(100), walked(&model));
    // The highest one, that of PUDs, and the first one of PMDs with its two of PTEs.
    let found = count(3);
    assert!(found.is_cut_off && found.counted_bytes() == 4 << 12, "{found:?}");
}

#[test]
fn other_files_are_refused() {
    let reason = |path: &Path| Core::open(path, Path::new("/none")).err().unwrap().to_string();
    assert!(reason(Path::new("/no such file")).contains("CONFIG_PROC_KCORE"));
    // As a container covers it.
    assert!(reason(Path::new("/dev/null")).contains("empty"));
    let model = Model::new(false);
    model.file.write_all_at(b"VMCOREINF0", 0x1000 + 20 + 12).unwrap();
    assert!(reason(&model.path()).contains("no note VMCOREINFO"));
    model.file.write_all_at(b"!", 0).unwrap();
    assert!(reason(&model.path()).contains("no head"));
}

#[test]
fn a_refusal_tells_lockdown_from_privilege() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("lockdown");
    let refused = |state: &Path| {
        let denied = ErrorKind::PermissionDenied.into();
        core::refused(Path::new("/proc/kcore"), &denied, state).to_string()
    };
    assert!(refused(&state).contains("CAP_SYS_RAWIO"));
    fs::write(&state, "none [integrity] confidentiality\n").unwrap();
    assert!(refused(&state).contains("CAP_SYS_RAWIO"));
    fs::write(&state, "none integrity [confidentiality]\n").unwrap();
    assert!(refused(&state).starts_with("the kernel is in the lockdown mode"));
}

#[test]
fn a_folder_tells_whether_its_process_lives() {
    assert!(Folder::open(std::process::id()).is_alive().is_ok());
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let folder = Folder::open(child.id());
    assert!(folder.is_alive().is_ok());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(folder.is_alive().unwrap_err().to_string().contains("ended"));
    assert!(Folder::open(child.id()).is_alive().is_err());
}

#[test]
fn symbols_have_addresses_unless_they_are_hidden() {
    let find = |lines: &str| address_of("init_task", lines.as_bytes());
    let lines = "ffffffff82000000 D init_task_ext\nffffffff82001000 d init_task [module]\n\
                 ffffffff82a0c940 D init_task\n";
    assert!(find(lines).is_ok_and(|found| found == KernelAddress(0xFFFF_FFFF_82A0_C940)));
    let reason = find("0000000000000000 D init_task\n").err().unwrap().to_string();
    assert!(reason.contains("kptr_restrict"), "{reason}");
    let reason = find("ffffffff82000000 T _text\n").err().unwrap().to_string();
    assert!(reason.contains("KALLSYMS_ALL"), "{reason}");
}
