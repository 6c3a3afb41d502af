//! The loads `small` and `scattered`: short jobs of base pages, while nothing else runs.
//!
//! For each shape of jobs two pools and a region are made, and all engines take turns. In each run
//! an engine does the same job in two ways: started and waited for, and in the calling thread.

use anyhow::anyhow;
use pageleap::{EngineChoice, Migration, NodeId, PageSize};
use pageleap_measure::experiments::memory::Pools;
use pageleap_measure::jobs::{JobSample, KernelScene, Scene, Way};
use pageleap_measure::method;

use super::Bench;
use super::args::{EnginesArgs, Kind, LoadKind};
use super::job_rows::in_short;
use super::memory::stop_between_leaps;
use super::rows::JobGroup;
use crate::interrupt;
use crate::progress::Steps;
use crate::stop::Stop;

/// Measures all short jobs that are asked for.
pub fn measure_all(args: &EnginesArgs, bench: &mut Bench) -> Result<(), Stop> {
    let loads = args.jobs();
    if loads.is_empty() {
        return Ok(());
    }
    let shapes = loads.iter().flat_map(|load| load.shapes().unwrap_or(&[]).iter().copied());
    let shapes = shapes.count();
    let mut steps = Steps::new("short jobs", shapes * args.choices().len(), args.job_runs());
    if !args.kinds().contains(&Kind::from(PageSize::Base)) {
        let names: Vec<String> = loads.iter().map(LoadKind::to_string).collect();
        let why = "jobs have base pages of a region; add 4k to --page-size";
        super::skip(bench, &steps, format!("{}: {why}", names.join(", ")));
        return Ok(());
    }
    let choices = fit_engines(args, bench, &steps)?;
    steps.leave_out(shapes * (args.choices().len() - choices.len()));
    if choices.is_empty() {
        return Ok(());
    }
    for load in loads {
        for shape in load.shapes().unwrap_or(&[]) {
            let kernel = bench.setting.kernel_of_jobs();
            let samples = vec![Vec::new(); choices.len()];
            let choices = choices.clone();
            let mut group = JobGroup { load, shape: *shape, choices, samples, kernel };
            let ended = measure(args, bench, &mut group, &mut steps);
            // An incomplete group is kept only if writes were lost in it.
            if ended.is_ok() || group.lost() > 0 {
                bench.jobs.push(group);
            }
            ended?;
        }
    }
    Ok(())
}

/// The engines that can move a page here. For each other engine a note says why it cannot.
fn fit_engines(
    args: &EnginesArgs,
    bench: &mut Bench,
    steps: &Steps,
) -> Result<Vec<EngineChoice>, Stop> {
    let page = PageSize::Base.bytes() as u64;
    let (from, to) = (NodeId(bench.setting.from), NodeId(bench.setting.to));
    let pools = Pools::build([page; 2], PageSize::Base, [from, to], stop_between_leaps)?;
    let mut fit = Vec::new();
    for choice in args.choices() {
        match pools.unfit(choice)? {
            None => fit.push(choice),
            Some(why) => super::skip(bench, steps, format!("{choice} with short jobs: {why}")),
        }
    }
    Ok(fit)
}

/// Measures jobs of one shape, one run after the other.
fn measure(
    args: &EnginesArgs,
    bench: &Bench,
    group: &mut JobGroup,
    steps: &mut Steps,
) -> Result<(), Stop> {
    steps.now(group.heading());
    let shape = group.shape;
    let (from, to) = (NodeId(bench.setting.from), NodeId(bench.setting.to));
    // The destination has frames for the pages of a job, and as many for the target of memcpys.
    let bytes = [shape.span_bytes(), 2 * shape.bytes()].map(|bytes| bytes as u64);
    let pools = Pools::build(bytes, PageSize::Base, [from, to], stop_between_leaps)?;
    let scene = Scene::new(&pools.region, [&pools.source, &pools.destination], shape)?;
    let kernel = group.kernel.is_ok().then(|| KernelScene::new(shape, [from, to])).transpose();
    let kernel = kernel.unwrap_or_else(|error| {
        group.kernel = Err(format!("{}: {error}", group.heading()));
        None
    });
    for run in 0..args.job_runs() {
        for at in method::order(args.seed, run, group.choices.len()) {
            // Each run begins with the other of the two ways.
            let mut ways = [Way::Start, Way::Run];
            ways.rotate_left(run % 2);
            for way in ways {
                let sample = job(args, &scene, run, way, group.choices[at])?;
                group.samples[at].push(sample);
            }
            steps.done();
        }
        by_kernel(group, kernel.as_ref());
    }
    // Only here: a signal during the last run still discards the whole group.
    for at in 0..group.choices.len() {
        steps.row_done(&in_short(group, at));
    }
    Ok(())
}

fn job(
    args: &EnginesArgs,
    scene: &Scene,
    run: usize,
    way: Way,
    choice: EngineChoice,
) -> Result<JobSample, Stop> {
    stop_if_received()?;
    let stopped = || interrupt::received().is_some();
    let sample = scene.sample(run, way, &|job| asked(job, args, choice), &stopped)?;
    stop_if_received()?;
    // The sample is missing only after a signal, and then the line above has returned.
    sample.ok_or_else(|| anyhow!("the memcpy was interrupted").into())
}

fn asked<'a>(job: Migration<'a>, args: &EnginesArgs, choice: EngineChoice) -> Migration<'a> {
    let job = job.engine(choice).threads(args.threads);
    args.wait_budget.into_iter().fold(job, Migration::wait_budget)
}

/// Times `move_pages(2)` of the same pages. If the kernel cannot move them, now or in general, the
/// reason stands in place of the times.
fn by_kernel(group: &mut JobGroup, scene: Option<&KernelScene>) {
    let (Some(scene), Ok(samples)) = (scene, &mut group.kernel) else { return };
    match scene.sample() {
        Ok(sample) => samples.push(sample),
        Err(error) => group.kernel = Err(format!("{}: {error}", group.heading())),
    }
}

/// Ends the measurement if a signal has arrived. Nothing is left to check then, because each job
/// was checked at its end.
fn stop_if_received() -> Result<(), Stop> {
    interrupt::stop_if_received(|| "no write was lost in jobs that had ended".to_owned())
}
