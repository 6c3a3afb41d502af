//! Small jobs beside one more thread, under each schedule with one departure. The thread yields
//! where the job is to begin, so that the departure is left for the place that matters.

use std::sync::Arc;

use shuttle::thread;

use super::bounded::each_schedule;
use crate::backend::{Backend, Model};
use crate::sync::lock;
use crate::{BASE_PAGE, Engine, Error, Job, Migration, NodeId, PageSize, Pool, Region, audit};

const ASLEEP: &str = "threads of a small job wait for one another for ever";

/// Two pools of one page each, and a region of one page in the first of them.
struct Scene {
    model: Arc<Model>,
    pools: [Pool; 2],
    region: Region,
}

impl Scene {
    fn new() -> Scene {
        let model = Arc::new(Model::new());
        let backend: Arc<dyn Backend> = model.clone();
        let pools = [0, 1].map(|node| {
            let pool = Pool::builder(NodeId(node), BASE_PAGE as u64).threads(1);
            pool.backend(backend.clone()).build().unwrap()
        });
        let region = Region::reserve_with(backend, BASE_PAGE, PageSize::Base).unwrap();
        region.grow(BASE_PAGE, &pools[0]).unwrap();
        Scene { model, pools, region }
    }

    fn start(&self, to: usize) -> Result<Job, Error> {
        let job = Migration::new().range(&self.region, 0..BASE_PAGE, &self.pools[to]);
        job.engine(Engine::Mprotect).threads(1).start()
    }

    fn frame(&self) -> impl PartialEq + std::fmt::Debug {
        self.model.frame_at(self.region.as_ptr().as_ptr() as usize)
    }
}

#[test]
fn shuttle_directed_a_guarded_page_keeps_its_frame() {
    each_schedule(1, ASLEEP, || {
        let scene = Scene::new();
        let job = scene.start(1).unwrap();
        thread::yield_now();
        let guard = scene.region.pin(0..BASE_PAGE).unwrap();
        let first = scene.frame();
        thread::yield_now();
        assert_eq!(scene.frame(), first, "a page got another frame under a guard");
        drop(guard);
        assert!(job.wait().ended.is_completed());
    });
}

#[test]
fn shuttle_directed_a_guarded_page_is_not_discarded() {
    each_schedule(1, ASLEEP, || {
        let scene = Arc::new(Scene::new());
        let other = scene.clone();
        let discard = thread::spawn(move || {
            // SAFETY: nobody accesses the memory of a model.
            unsafe { other.region.discard_shared(0..BASE_PAGE) }.is_ok()
        });
        thread::yield_now();
        let guard = scene.region.pin(0..BASE_PAGE);
        let gone = discard.join().unwrap();
        let is_backed = lock(&scene.region.inner().extents).backs_all(0..1);
        assert!(guard.is_err() || is_backed, "the frame of a guarded page was given back");
        assert_eq!(gone, !is_backed);
    });
}

/// A caller that can claim the range that a job has moved also gets the frame that it has vacated.
#[test]
fn shuttle_directed_who_may_leap_back_finds_frames() {
    each_schedule(1, ASLEEP, || {
        let scene = Scene::new();
        let there = scene.start(1).unwrap();
        let back = loop {
            thread::yield_now();
            match scene.start(0) {
                Ok(job) => break job,
                Err(Error::RangeBusy { .. }) => {}
                Err(error) => panic!("the range is free and its old frame is not: {error}"),
            }
        };
        assert!(back.wait().ended.is_completed());
        drop(there.wait());
        audit(&[&scene.pools[0], &scene.pools[1]], &[&scene.region]).unwrap();
    });
}
