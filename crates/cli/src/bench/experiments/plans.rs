//! The scenes of each experiment on this machine.

use std::any::Any;
use std::time::Duration;

use pageleap::{BASE_PAGE, Engine, EngineChoice, PageSize};
use pageleap_measure::document::{Fact, Value, fact};
use pageleap_measure::experiments::access::{self, Access};
use pageleap_measure::experiments::btree::{self, Mix, Share, Trees};
use pageleap_measure::experiments::tpch::Tables;
use pageleap_measure::experiments::ways::{self, Way, Ways};
use pageleap_measure::experiments::writes::{self, Loaded, Purpose, Switch, Writes};
use pageleap_measure::experiments::{About, Position, Scene, copy, quiet, scale, sustained, tpch};
use pageleap_measure::figures::human_bytes;
use pageleap_measure::load::{Rate, Rows};
use pageleap_measure::method::LEAST_VALUES;
use pageleap_measure::rivals::can_move;
use pageleap_settings::{User, Wish};

use super::super::memory::{missing_huge_pages, once_each, stop_between_leaps};
use super::args::{
    BtreeArgs, ExperimentArgs, ExperimentCommand, OverheadArgs, QuietArgs, ScaleArgs,
    SustainedArgs, WritesArgs,
};
use super::nodes::Nodes;
use crate::stop::{Refusal, Stop};
use crate::{progress, settings};

/// A note on rivals.
const ONE_NODE: &str = "move_pages, mbind and automatic balancing need a second node: pages that \
                        are on the node already stay. On one node, `bench copy` of 1 GB or more \
                        times the kernel's own migration by compaction.";
/// Another one.
const SHORT: &str = "automatic balancing waits for a time-out of 10 s in most rounds, and is left \
                     out with --quick.";

/// Another one.
const NO_ACCESS: &str = "automatic balancing moves nothing while nothing accesses the memory.";
/// Another one.
const NO_WRITER: &str = "automatic balancing is left out: it moves pages towards the thread that \
                         accesses them, for which the destination has no CPU.";

/// Makes a scene when its turn has come.
pub type Build = Box<dyn FnOnce() -> Result<Box<dyn Scene>, Stop>>;

/// A scene that is to be measured.
pub struct Planned {
    pub heading: String,
    /// Bytes that move.
    pub bytes: u64,
    /// Bytes that it needs on the source and on the destination.
    pub needs: [u64; 2],
    /// Whether the experiment goes on without it.
    pub may_lack: bool,
    /// Its position among the scenes.
    pub position: Position,
    pub build: Build,
}

/// An experiment on this machine.
pub struct Plan {
    pub about: &'static About,
    /// The arguments, with the size that was chosen.
    pub args: ExperimentArgs,
    pub scenes: Vec<Planned>,
    pub notes: Vec<String>,
    /// Settings of this experiment alone.
    pub facts: Vec<Fact>,
}

/// The plan of a command.
pub fn plan(command: &ExperimentCommand, nodes: &Nodes) -> Result<Plan, Stop> {
    match command {
        ExperimentCommand::Access(args) => access(&args.common, nodes),
        ExperimentCommand::Btree(args) => btree(args, nodes),
        ExperimentCommand::Copy(args) => copy(&args.common, nodes),
        ExperimentCommand::Overhead(args) => overhead(args, nodes),
        ExperimentCommand::Quiet(args) => quiet(args, nodes),
        ExperimentCommand::Scale(args) => scale(args, nodes),
        ExperimentCommand::Sustained(args) => sustained(args, nodes),
        ExperimentCommand::Tpch(args) => tpch(&args.common, nodes),
        ExperimentCommand::Writes(args) => writes(args, nodes),
    }
}

fn access(common: &ExperimentArgs, nodes: &Nodes) -> Result<Plan, Stop> {
    let remote = (nodes.from != nodes.to).then_some(nodes.from);
    let mut notes = Vec::new();
    let pages = once_each(&common.page_size);
    let ordinary = pages.iter().filter(|page| !page.is_hugetlb()).count();
    let each = ordinary as u64 * common.bytes();
    let needs = if remote.is_some() { [each; 2] } else { [each, 0] };
    nodes.check(common, needs)?;
    if remote.is_none() {
        notes.push(
            "This needs a second node to compare local with remote memory. On one node it compares \
             page sizes."
                .to_owned(),
        );
    }
    let setting = access::Setting {
        bytes: common.bytes(),
        pages,
        remote,
        local: nodes.to,
        cpu: nodes.cpu(),
        seed: common.seed,
    };
    let build = move || Ok(Box::new(Access::new(setting, stop_between_leaps)?) as Box<dyn Scene>);
    let heading = "all page sizes".to_owned();
    let (bytes, position) = (common.bytes(), Position::default());
    let scene =
        Planned { heading, bytes, needs, may_lack: false, position, build: Box::new(build) };
    let scenes = vec![scene];
    Ok(Plan { about: &access::ABOUT, args: common.clone(), scenes, notes, facts: Vec::new() })
}

fn copy(args: &ExperimentArgs, nodes: &Nodes) -> Result<Plan, Stop> {
    of_ways(&copy::ABOUT, args, nodes, &|page| {
        let mut all = vec![(String::new(), copy::ways())];
        // Compaction takes 8 GB, however small the memory is.
        let is_large = args.bytes() >= 1 << 30;
        if page == PageSize::Base && nodes.from == nodes.to && is_large {
            all.push((", the kernel's own migration".to_owned(), copy::by_compaction()));
        }
        all
    })
}

fn quiet(args: &QuietArgs, nodes: &Nodes) -> Result<Plan, Stop> {
    args.leaps.check(&args.common)?;
    let (engines, areas) = (args.leaps.engines(&args.common), args.leaps.areas(&args.common));
    let bytes = args.common.bytes();
    of_ways(&quiet::ABOUT, &args.common, nodes, &|page| {
        vec![(String::new(), quiet::ways(page, bytes, &engines, areas.as_deref()))]
    })
}

fn writes(args: &WritesArgs, nodes: &Nodes) -> Result<Plan, Stop> {
    args.leaps.check(&args.common)?;
    let common = &args.common;
    let (engines, areas) = (args.leaps.engines(common), args.leaps.areas(common));
    let (bytes, all_sized) = (common.bytes(), args.leaps.area.is_some());
    of_loads(&writes::ABOUT, common, nodes, Purpose::Migrations, &|page| {
        (args.loads(page), writes::ways(page, bytes, &engines, areas.as_deref(), all_sized))
    })
}

fn scale(args: &ScaleArgs, nodes: &Nodes) -> Result<Plan, Stop> {
    let common = &args.common;
    let threads = args.threads.as_deref().map_or(scale::threads(nodes.cpus.len()), once_each);
    let ways = scale::ways(&threads);
    // Without --size, a quarter of the free memory stays free.
    let fits = nodes.fitting(&|bytes| Ways::needs(bytes, &ways), 0.75);
    let is_given = common.size.is_some() || common.is_short();
    let largest = if is_given { common.bytes() } else { fits };
    let common = ExperimentArgs { size: Some(largest), ..common.clone() };
    of_pages(&scale::ABOUT, &common, nodes, &|page| {
        let scene = |bytes: u64| {
            let bytes = bytes.next_multiple_of(page.bytes() as u64);
            let setting = ways::Setting { bytes, ..nodes.setting(&common, page) };
            let (ways, needs) = (ways.clone(), ordinary(page, Ways::needs(bytes, &ways), 0));
            let heading = format!("pages of {page}, {}", human_bytes(bytes as f64));
            let build = move || {
                let scene = Ways::new(setting, &ways, stop_between_leaps)?;
                Ok(Box::new(scene) as Box<dyn Scene>)
            };
            let position = Position { page: None, at: Some(bytes as f64) };
            Planned { heading, bytes, needs, may_lack: false, position, build: Box::new(build) }
        };
        scale::sizes(largest).into_iter().map(scene).collect()
    })
}

fn sustained(args: &SustainedArgs, nodes: &Nodes) -> Result<Plan, Stop> {
    args.leaps.check(&args.common)?;
    let common = &args.common;
    let few = [EngineChoice::Auto, Engine::Mprotect.into()];
    let engines = args.leaps.engine.as_deref().map_or(few.to_vec(), once_each);
    let areas = args.leaps.area.as_ref();
    let areas: Vec<usize> = areas
        .map_or(quiet::BEST.to_vec(), |areas| areas.iter().map(|area| *area as usize).collect());
    // No window needs a warm-up. The time is that of as many rounds as an interval needs.
    let ways = writes::ways(PageSize::Base, common.bytes(), &engines, Some(&areas), false).len();
    let rounds = (ways as u32 + 2) * (LEAST_VALUES as u32 + 1);
    let common = &common.clone().within(args.window() * rounds).not_warmed_up();
    let uniform = |rate| Writes { rate, rows: Rows::Uniform };
    let loads: Vec<Writes> = args.rates().into_iter().map(uniform).collect();
    let plan =
        of_loads(&sustained::ABOUT, common, nodes, Purpose::Window(args.window()), &|page| {
            (
                loads.clone(),
                writes::ways(
                    page,
                    common.bytes(),
                    &engines,
                    Some(&areas),
                    args.leaps.area.is_some(),
                ),
            )
        })?;
    let window = Value::Ns(args.window().as_nanos() as u64);
    Ok(Plan { facts: vec![fact("window_ns", "the thread writes for", window)], ..plan })
}

fn tpch(args: &ExperimentArgs, nodes: &Nodes) -> Result<Plan, Stop> {
    // Six rounds of all queries take longer than rounds of the other experiments.
    let args = &args.clone().within(Duration::from_secs(900));
    of_pages(&tpch::ABOUT, args, nodes, &|page| {
        let is_balanced = nodes.is_balanced(args);
        let setting = nodes.setting(args, page);
        let writer_cpu = nodes.writer_cpu;
        let shadows = Tables::beside(args.bytes());
        let needs = ordinary(page, Tables::needs(args.bytes(), is_balanced), shadows);
        let build = move || {
            let spinner = progress::moving_spinner("making lineitem");
            let switch = is_balanced.then(|| Box::new(balancing_on) as Switch);
            let scene = Tables::new(setting, writer_cpu, switch, stop_between_leaps);
            spinner.finish_and_clear();
            Ok(Box::new(scene?) as Box<dyn Scene>)
        };
        let heading = format!("pages of {page}");
        vec![Planned {
            heading,
            bytes: args.bytes(),
            needs,
            may_lack: false,
            position: Position::default(),
            build: Box::new(build),
        }]
    })
}

/// The nodes of a tree for each thread, so that it has some sets of leaves to choose from.
const NODES_OF_A_THREAD: u64 = 16;

/// Each mix with each share of migrations.
fn btree(args: &BtreeArgs, nodes: &Nodes) -> Result<Plan, Stop> {
    let common = &args.common;
    if !common.page_size.contains(&PageSize::Base) {
        let why = "nodes of a tree have 4 KB, and move one by one: use --page-size 4k";
        return Err(Refusal::new(why.to_owned()).into());
    }
    let sample = tree(args, nodes, Mix::C, Share::MEDIUM);
    let (threads, most) =
        (sample.cpus.len() as u64, sample.bytes / BASE_PAGE as u64 / NODES_OF_A_THREAD);
    if threads > most {
        let why = format!("--threads {threads}: a tree of this size takes {most}; or use --size");
        return Err(Refusal::new(why).into());
    }
    nodes.check(common, sample.needs())?;
    let ways = btree::ways(&args.engines(), common.is_short());
    let scene = |(share, mix): (Share, Mix)| {
        let (setting, ways) = (tree(args, nodes, mix, share), ways.clone());
        let (heading, needs) = (format!("mix {mix}, {share}"), setting.needs());
        let build = move || {
            let spinner = progress::moving_spinner("loading the tree");
            let scene = Trees::new(setting, &ways, stop_between_leaps);
            spinner.finish_and_clear();
            Ok(Box::new(scene?) as Box<dyn Scene>)
        };
        let (bytes, position) = (common.bytes(), Position::default());
        Planned { heading, bytes, needs, may_lack: false, position, build: Box::new(build) }
    };
    let all = args.shares().into_iter();
    let all = all.flat_map(|share| args.mixes().into_iter().map(move |mix| (share, mix)));
    let scenes = all.map(scene).collect();
    let (entries, moved) = (sample.entries(), sample.migration_pages());
    let note = format!(
        "{threads} threads query. The tree has {entries} entries at first, and nodes of 4 KB. A \
         migration moves {moved} leaves."
    );
    let facts = vec![
        fact("threads", "threads that query", Value::count(sample.cpus.len())),
        fact("pages", "leaves of a migration", Value::count(moved)),
        fact("window_ns", "a turn takes", Value::Ns(args.window().as_nanos() as u64)),
    ];
    Ok(Plan { about: &btree::ABOUT, args: common.clone(), scenes, notes: vec![note], facts })
}

/// A tree and its queries. The threads take the CPUs in turn.
fn tree(args: &BtreeArgs, nodes: &Nodes, mix: Mix, share: Share) -> btree::Setting {
    let threads = args.threads.unwrap_or(nodes.cpus.len().min(BtreeArgs::USUAL_THREADS));
    btree::Setting {
        bytes: args.common.bytes(),
        from: nodes.from,
        to: nodes.to,
        cpus: nodes.cpus.iter().copied().cycle().take(threads).collect(),
        mix,
        share,
        pages: args.pages.map_or(btree::PAGES, |pages| pages as usize),
        window: args.window(),
        seed: args.common.seed,
        can_move: can_move(nodes.from, nodes.to),
    }
}

fn overhead(args: &OverheadArgs, nodes: &Nodes) -> Result<Plan, Stop> {
    args.leaps.check(&args.common)?;
    let common = &args.common;
    let paper = [EngineChoice::Auto, Engine::Mprotect.into()];
    let engines = args.leaps.engine.as_deref().map_or(paper.to_vec(), once_each);
    let areas = args.leaps.areas(common).unwrap_or(writes::TABLE_2.to_vec());
    let load = Writes { rate: Rate::PerSecond(100_000), rows: Rows::Uniform };
    of_loads(&writes::OVERHEAD, common, nodes, Purpose::Migrations, &|page| {
        (
            vec![load],
            writes::ways(page, common.bytes(), &engines, Some(&areas), args.leaps.area.is_some()),
        )
    })
}

/// Ways with the rest of the heading of their scene.
type Headed = (String, Vec<Way>);

/// Ways to move memory while nothing else runs. `scenes`: those of a page size.
fn of_ways(
    about: &'static About,
    args: &ExperimentArgs,
    nodes: &Nodes,
    scenes: &dyn Fn(PageSize) -> Vec<Headed>,
) -> Result<Plan, Stop> {
    of_pages(about, args, nodes, &|page| {
        let scene = |(heading, ways): Headed| {
            let setting = nodes.setting(args, page);
            let needs = ordinary(page, Ways::needs(setting.bytes, &ways), 0);
            let build = move || {
                let scene = Ways::new(setting, &ways, stop_between_leaps)?;
                // Without a compaction, a scene that is for it says nothing new.
                if ways.contains(&Way::Compaction) && !scene.left_out().is_empty() {
                    return Err(Refusal::new(scene.left_out().join("; ")).into());
                }
                Ok(Box::new(scene) as Box<dyn Scene>)
            };
            let may_lack = !heading.is_empty();
            let heading = format!("pages of {page}{heading}");
            let (bytes, position) = (args.bytes(), Position::default());
            Planned { heading, bytes, needs, may_lack, position, build: Box::new(build) }
        };
        scenes(page).into_iter().map(scene).collect()
    })
}

/// Ways to move memory while a thread writes to it, a scene for each load.
fn of_loads(
    about: &'static About,
    args: &ExperimentArgs,
    nodes: &Nodes,
    purpose: Purpose,
    all: &dyn Fn(PageSize) -> (Vec<Writes>, Vec<Way>),
) -> Result<Plan, Stop> {
    of_pages(about, args, nodes, &|page| {
        let (loads, ways) = all(page);
        let scene = |writes: Writes| {
            let is_balanced = nodes.is_balanced(args);
            let shadows = Loaded::shadows(args.bytes(), &ways, is_balanced);
            let needs = Loaded::needs(args.bytes(), &ways, is_balanced);
            let (ways, needs) = (ways.clone(), ordinary(page, needs, shadows));
            let setting = writes::Setting {
                ways: nodes.setting(args, page),
                writes,
                writer_cpu: nodes.writer_cpu,
                local_cpu: nodes.local_cpu,
                purpose,
            };
            let build = move || {
                let switch = is_balanced.then(|| Box::new(balancing_on) as Switch);
                let scene = Loaded::new(setting, &ways, switch, stop_between_leaps)?;
                Ok(Box::new(scene) as Box<dyn Scene>)
            };
            let heading = format!("pages of {page}, {}", writes.name());
            let at = match writes.rate {
                Rate::PerSecond(rate) => Some(rate as f64),
                Rate::Max => None,
            };
            let (bytes, position) = (args.bytes(), Position { page: None, at });
            Planned { heading, bytes, needs, may_lack: false, position, build: Box::new(build) }
        };
        loads.into_iter().map(scene).collect()
    })
}

/// The part of the needs that is not of the hugetlb pool: all of it for other pages, and shadow
/// copies on the destination otherwise.
fn ordinary(page: PageSize, needs: [u64; 2], shadows: u64) -> [u64; 2] {
    if page.is_hugetlb() { [0, shadows] } else { needs }
}

/// Borrows the setting that turns automatic NUMA balancing on. It is put back when the result is
/// dropped, and at the latest by its keeper when this process ends.
fn balancing_on() -> Result<Box<dyn Any>, String> {
    const WHY: &str = "pageleap bench";
    let user = User::this_process().map_err(|error| error.to_string())?;
    let wish = Wish::new("/proc/sys/kernel/numa_balancing", "1", WHY);
    let borrowed = settings::ledger(None).borrow(&user, &[wish]);
    Ok(Box::new(borrowed.map_err(|error| error.to_string())?))
}

/// The scenes of all page sizes.
fn of_pages(
    about: &'static About,
    args: &ExperimentArgs,
    nodes: &Nodes,
    of_page: &dyn Fn(PageSize) -> Vec<Planned>,
) -> Result<Plan, Stop> {
    let mut notes = Vec::new();
    let has_load =
        [writes::ABOUT.name, writes::OVERHEAD.name, sustained::ABOUT.name, tpch::ABOUT.name];
    let note = match (nodes.from == nodes.to, has_load.contains(&about.name)) {
        (true, _) => Some(ONE_NODE),
        (false, false) => Some(NO_ACCESS),
        (false, true) if args.quick => Some(SHORT),
        (false, true) if nodes.local_cpu.is_none() => Some(NO_WRITER),
        (false, true) => None,
    };
    notes.extend(note.map(str::to_owned));
    let mut scenes: Vec<Planned> = Vec::new();
    for page in once_each(&args.page_size) {
        let [from, to] = [nodes.from.0, nodes.to.0];
        for scene in of_page(page) {
            if let Some(why) = missing_huge_pages(scene.bytes, page, &nodes.all, from, to) {
                notes.push(format!("left out: {}: {why}", scene.heading));
                continue;
            }
            nodes.check(args, scene.needs)?;
            let may_lack = scene.may_lack || page != PageSize::Base;
            let position = Position { page: Some(page.to_string()), ..scene.position };
            scenes.push(Planned { may_lack, position, ..scene });
        }
    }
    Ok(Plan { about, args: args.clone(), scenes, notes, facts: Vec::new() })
}
