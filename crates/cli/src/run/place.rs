//! `pageleap run --place`: the places of the program's threads, and who pins them.

use std::ffi::OsString;

use pageleap::topology::{SysFiles, Topology, escaped};
use pageleap_launch::{
    Calls, HostTasks, Placement, Poller, Program, ThisThread, not_preloaded, places,
    places_by_growth, preloaded,
};

use super::args::{Place, RunArgs};
use super::{Plan, Unstarted, launch};
use crate::stop::Refusal;

/// How the program's threads come to CPUs.
#[derive(Default)]
pub struct Placed {
    /// The CPUs in the order of places; empty if threads are not placed.
    pub places: Vec<usize>,
    /// Changes of the program's environment.
    pub environment: Vec<(OsString, Option<OsString>)>,
    /// Messages for the user: why threads are not placed, or are pinned from outside.
    pub notes: Vec<String>,
    /// The one who pins threads from outside, if nothing is preloaded.
    pub poller: Option<Poller<HostTasks>>,
}

impl Placed {
    /// Places for the CPUs on which this process may run, as the settings have left them. Nothing is
    /// known of the program in a trial without one.
    pub fn of(
        plan: &Plan,
        args: &RunArgs,
        topology: Option<&Topology>,
        files: &SysFiles,
        program: Option<&Program>,
    ) -> Result<Placed, Unstarted> {
        let inherited = &plan.inherited();
        let placement = match (args.place, &plan.home) {
            (None, None) => return Ok(Placed::default()),
            (Some(Place::None), _) => {
                let environment = preloaded(None, None, inherited).map_err(launch)?;
                return Ok(Placed { environment, ..Placed::default() });
            }
            (_, Some(_)) => None,
            (Some(Place::Sparse), None) => Some(Placement::Sparse),
            (Some(Place::Dense), None) => Some(Placement::Dense),
        };
        let Some(topology) = topology else { return Ok(Placed::default()) };
        let cpus = ThisThread.cpus().unwrap_or_else(|_| topology.allowed_cpus());
        // The program inherits the filters of this process, so a refusal here is one there, too.
        if let Err(errno) = ThisThread.set_cpus(&cpus) {
            let why = format!(
                "--place, --home: sched_setaffinity: {errno}: a filter of the container refuses it; threads \
                 run where they would run without it"
            );
            if args.no_fallback {
                return Err(Refusal::new(format!("{why} (--no-fallback)")).into());
            }
            return Ok(Placed { notes: vec![why], ..Placed::default() });
        }
        let (places, home) = match (placement, &plan.home) {
            (Some(placement), _) => (places(placement, topology, files, &cpus), None),
            (None, home) => {
                let nodes = home.as_ref().map_or(&[][..], |home| &home.nodes);
                let all = topology.allowed_cpus();
                (places_by_growth(nodes, topology, files, &all), Some(&cpus[..]))
            }
        };
        let mut placed = Placed::default();
        match program.and_then(|program| Some((program, not_preloaded(program.path())?))) {
            None => {
                placed.environment = preloaded(Some(&places), home, inherited).map_err(launch)?;
            }
            Some((program, why)) => {
                let every = Poller::<HostTasks>::EVERY.as_millis();
                let name = escaped(&program.path().to_string_lossy());
                placed.notes.push(format!(
                    "{name} {}, so this command stays, and pins each new thread up to {every} ms \
                     after it has started; child processes are not followed",
                    why.reason()
                ));
                placed.poller = Some(Poller::new(HostTasks, places.clone(), cpus));
            }
        }
        placed.places = places;
        Ok(placed)
    }

    /// The order of places, for `--verbose`.
    pub fn told(&self) -> Option<String> {
        let places: Vec<String> = self.places.iter().map(usize::to_string).collect();
        (!places.is_empty()).then(|| format!("threads come to these CPUs: {}", places.join(",")))
    }
}
