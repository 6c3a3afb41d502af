//! Which engine moves areas while another process traces the threads of the job
//! ([`tracer`](crate::tracer)). Pure: what takes system calls is asked by the caller.

use super::Engine;
use super::choice::try_engine;
use crate::backend::{Ability, Call, Errno};
use crate::units::PageSize;

/// The engine in whose windows readers go on, in place of a job's engine in whose windows they
/// wait, and what `open` has opened for it. System calls that the job's engine keeps whole stay
/// whole, so an engine that raises signals does not take the place of one that raises none: then
/// there may be no such engine, and the pages stay.
pub(crate) fn engine_for<T>(
    engine: Engine,
    page: PageSize,
    mut open: impl FnMut(Ability) -> Result<T, (Call, Errno)>,
) -> Result<(Engine, Option<T>), String> {
    let fits = |other: &Engine| !other.readers_wait() && (engine.signals() || !other.signals());
    let mut why_not = Vec::new();
    for other in Engine::ALL.into_iter().filter(fits) {
        match try_engine(other, page, &mut open) {
            Ok(opened) => return Ok((other, opened)),
            Err((reason, _)) => why_not.push(reason),
        }
    }
    Err(why_not.join("; "))
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    /// The engines whose readers wait.
    fn waiting() -> Vec<Engine> {
        Engine::ALL.into_iter().filter(|engine| engine.readers_wait()).collect()
    }

    #[test]
    fn readers_wait_where_page_tables_are_taken_away() {
        assert_eq!(waiting(), [Engine::Precopy, Engine::StopCopy]);
        assert!(Engine::UffdMove.readers_wait() && !Engine::Kernel.readers_wait());
    }

    #[test]
    fn an_engine_whose_readers_go_on_takes_the_place_and_keeps_system_calls_whole() {
        for (engine, page) in waiting()
            .into_iter()
            .flat_map(|engine| [PageSize::Base, PageSize::Thp].map(|p| (engine, p)))
        {
            let (other, opened) = engine_for(engine, page, Ok).unwrap();
            assert_eq!((other, opened), (Engine::WpSync, Engine::WpSync.needs()));
            assert!(!other.readers_wait() && !other.signals() && other.moves(page));
        }
    }

    #[test]
    fn without_such_an_engine_there_is_a_reason() {
        let refuse = |_| Err::<(), _>((Call::OpenTracker, Errno(libc::EMFILE)));
        for engine in waiting() {
            let why = engine_for(engine, PageSize::Base, refuse).unwrap_err();
            assert!(why.contains("wp-sync") && !why.contains("protect,"), "{why}");
        }
        // An engine that raises signals itself may be replaced by one.
        let (other, opened) = engine_for(Engine::Mprotect, PageSize::Base, refuse).unwrap();
        assert_eq!((other, opened), (Engine::Mprotect, None));
    }
}
