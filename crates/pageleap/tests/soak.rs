//! Everything at once, for any length of time. Jobs of all engines on all page sizes are started,
//! stopped, refused and made to fail. Meanwhile threads write and read, system calls do so for
//! them, devices access pages under guards, processes are forked, and signals arrive. All actors
//! pause at intervals, and everything is checked.
//!
//! The test consists of rounds. The load of a round and the random numbers of each actor follow
//! from the seed and the round's number. The system decides which thread runs when. So a seed
//! repeats the load, not the schedule. Seed and round are printed with each failure.
//!
//! `PAGELEAP_SOAK_SECONDS` sets the duration, `PAGELEAP_SOAK_SEED` the seed, `PAGELEAP_SOAK_ROUND`
//! the first round. `PAGELEAP_SOAK_AGAIN=1` repeats that round. `cargo xtask soak` sets these
//! variables from its options. SIGINT ends the test with a summary.

#[path = "soak/actors.rs"]
mod actors;
#[path = "common/calls.rs"]
mod calls;
#[path = "common/children.rs"]
mod children;
mod common;
#[path = "common/load.rs"]
mod load;
#[path = "soak/movers.rs"]
mod movers;
#[path = "common/refusing.rs"]
mod refusing;
#[path = "soak/round.rs"]
mod round;
#[path = "soak/scene.rs"]
mod scene;
#[path = "soak/watch.rs"]
mod watch;

use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use actors::Part;
use common::{StopOnDrop, skip, skip_page_size};
use pageleap::{EngineChoice, PageSize};
use round::{Kind, MOST_WRITERS, Round, is_known_to_work};
use scene::Scene;
use watch::{Alive, Count, Interrupt, Watchdog, counted, counts, interrupted};

/// Parts of a round. After each part everything is checked.
const PARTS: u64 = 3;
/// The length of a part in a long soak. In a short soak parts are shorter, so that each kind of
/// round comes once.
const LONGEST_PART: Duration = Duration::from_millis(1500);
const SHORTEST_PART: Duration = Duration::from_millis(100);

/// A number from the environment.
fn setting(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text}: not a number")),
        Err(_) => default,
    }
}

#[test]
fn everything_at_once_loses_nothing() {
    const NAME: &str = "everything_at_once_loses_nothing";
    let seconds = setting("PAGELEAP_SOAK_SECONDS", 6);
    let seed = setting("PAGELEAP_SOAK_SEED", 1);
    let first = setting("PAGELEAP_SOAK_ROUND", 0);
    let again = setting("PAGELEAP_SOAK_AGAIN", 0) != 0;
    let _interrupt = Interrupt::expect();
    let kinds = Kind::all();
    for engine in EngineChoice::ALL.into_iter().filter(|engine| !is_known_to_work(*engine)) {
        skip(&format!("{NAME} ({engine})"), &"the engine does not work here, or cannot be probed");
    }
    eprintln!("soak: seed {seed}, from round {first}, for {seconds} s");
    let length = Duration::from_secs(seconds);
    let part = (length / (kinds.len() as u64 * PARTS) as u32).clamp(SHORTEST_PART, LONGEST_PART);
    let (began, mut number) = (Instant::now(), first);
    let mut missing: Vec<PageSize> = Vec::new();
    {
        let _watchdog = Watchdog::start();
        let alive = Alive::new("main");
        let every_kind = first + kinds.len() as u64;
        while !interrupted() && (began.elapsed() < length || !again && number < every_kind) {
            let round = Round::draw(seed, number, &kinds);
            // If the process ends, the last of these lines names the round.
            eprintln!("  {round:?}");
            watch::now(format!(
                "this round; to repeat it: \
                 cargo xtask soak --seed {seed} --round {number} --again\n  {round:?}"
            ));
            number += u64::from(!again);
            let page = round.kind.page;
            if missing.contains(&page) {
                continue;
            }
            match Scene::build(round) {
                Ok(scene) => run(scene, part, &alive),
                Err(error) => {
                    skip_page_size(NAME, page, error);
                    missing.push(page);
                }
            }
        }
    }
    let ended = if interrupted() { "interrupted" } else { "done" };
    eprintln!("soak: {ended} after {} s, seed {seed}: {}", began.elapsed().as_secs(), counts());
    assert!(interrupted() || counted(Count::Leaps) > 0, "no job has run");
}

/// Runs a round: its parts, and checks after each part.
fn run(scene: Scene, length: Duration, alive: &Alive) {
    for part in 0..PARTS {
        play(&scene, part, length, alive);
        alive.beat();
        scene.check();
        alive.beat();
        if interrupted() {
            break;
        }
    }
    scene.end();
}

/// Runs all actors of a round for some time.
fn play(scene: &Scene, part: u64, length: Duration, alive: &Alive) {
    let round = &scene.round;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        let mut actor = 0;
        let mut cast = |name: &str, number: usize, body: Box<dyn FnOnce(Part) + Send>| {
            actor += 1;
            let (random, name, stop) =
                (round.random(actor, part), format!("{name} {number}"), &stop);
            let alive = name.clone();
            let body = move || body(Part { scene, random, stop, alive: Alive::new(alive) });
            thread::Builder::new().name(name).spawn_scoped(scope, body).unwrap();
        };
        for owner in 0..round.writers {
            cast("writer", owner, Box::new(move |part| actors::write(part, owner)));
        }
        for number in 0..round.readers {
            cast("reader", number, Box::new(actors::read));
        }
        for number in 0..round.kernel_writers {
            let owner = MOST_WRITERS + number;
            cast(
                "kernel writer",
                owner,
                Box::new(move |part| actors::let_kernel_write(part, owner)),
            );
        }
        for number in 0..round.movers {
            cast("mover", number, Box::new(move |part| movers::start_jobs(part, number)));
        }
        let mut cast_if = |wanted: bool, name: &str, body: fn(Part)| {
            if wanted {
                cast(name, 0, Box::new(body));
            }
        };
        cast_if(round.kernel_reader, "kernel reader", actors::let_kernel_read);
        cast_if(round.guards, "guard", actors::guard);
        cast_if(round.children, "parent", actors::fork);
        cast_if(round.bystander, "bystander", actors::stand_by);
        cast_if(round.forgets, "forgetter", actors::forget);
        cast_if(round.tenant, "tenant", movers::be_a_tenant);
        cast_if(round.faults.is_some(), "falsifier", movers::falsify);
        if let Some(restart) = round.signals {
            cast("sender", 0, Box::new(move |part| actors::send_signals(part, restart)));
        }
        let end = Instant::now() + length;
        while Instant::now() < end && !interrupted() {
            thread::sleep(Duration::from_millis(10));
            alive.beat();
        }
    });
}
