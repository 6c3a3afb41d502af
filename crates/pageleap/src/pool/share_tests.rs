//! Shares whose alias may have holes.

use super::*;
#[cfg(not(miri))]
use crate::backend::Linux;
use crate::backend::{FailAt, FailMode, Model};
use crate::pool::Pool;
use crate::pool::alias::AliasEvent;

/// Where a call may have left a hole, the pool's own mapping goes with the pool, but memory that
/// another thread has mapped there stays.
#[cfg(not(miri))]
#[test]
fn what_another_thread_has_mapped_into_a_hole_stays_there() {
    const FRAMES: u64 = 4;
    const PAGE: usize = PageSize::Base.bytes();
    let pool = Pool::builder(any_node(), FRAMES * PAGE as u64).threads(1).build().unwrap();
    let [share] = pool.shares() else { panic!("a pool of one node has one share") };
    let run = share.take(1, 1).unwrap()[0];
    let addr = share.0.alias_of(run.first);
    let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the alias of a frame that nobody else has; the hole is there for no moment in which
    // others could map into it.
    let other = unsafe { libc::mmap(addr as *mut _, PAGE, access, flags, -1, 0) }.cast::<u64>();
    assert_eq!(other as usize, addr);
    // SAFETY: just mapped.
    unsafe { *other = 4711 };
    lock(&share.0.state).aliases.note(run, AliasEvent::MapFailed);
    assert_eq!(share.mend_torn(run), Err((Call::Map, Errno(libc::EEXIST))));
    let refused = share.give_back(run).unwrap_err().to_string();
    assert!(refused.contains("EEXIST"), "{refused}");
    share.take(FRAMES, 0).unwrap_err();
    let rest = share.take(FRAMES - 1, 0).unwrap();
    rest.into_iter().for_each(|run| share.give_back(run).unwrap());
    drop(pool);
    // SAFETY: mapped above, and ours to unmap.
    unsafe {
        assert_eq!(*other, 4711);
        pageleap_sys::unmap(addr, PAGE).unwrap();
    }
}

#[cfg(not(miri))]
fn any_node() -> NodeId {
    let topology = crate::topology::Topology::read().unwrap();
    topology.nodes().iter().find(|node| node.total_bytes > 0).unwrap().id
}

/// If there may be a hole and is none, no mapping is left there: one would keep all memory of the
/// pool. The model is asked for it.
#[test]
fn a_pool_goes_with_all_of_its_alias() {
    let model = Arc::new(Model::new());
    let failing = Arc::new(FailAt::new(model.clone(), 1, FailMode::Before, Errno(libc::ENOMEM)));
    let page = PageSize::Base.bytes();
    let pool = Pool::builder(NodeId(0), 4 * page as u64)
        .threads(1)
        .backend(failing.clone())
        .build()
        .unwrap();
    let [share] = pool.shares() else { panic!("a pool of one node has one share") };
    let alias = share.0.alias_of(0);
    lock(&share.0.state).aliases.note(Run { first: 1, frames: 2 }, AliasEvent::MapFailed);
    failing.arm();
    drop(pool);
    assert_eq!(failing.struck(), Some(Call::Map));
    assert!((0..4).all(|i| !model.is_mapped(alias + i * page, page)));
}

/// A number that may stand for another file is not mapped, and existing mappings stay in use.
#[test]
fn nothing_is_mapped_of_a_file_whose_descriptor_is_lost() {
    use crate::{Ended, Migration, Region};
    let model = Arc::new(Model::new());
    let page = PageSize::Base.bytes();
    let pool = |node| {
        let pool = Pool::builder(NodeId(node), 4 * page as u64).threads(1).backend(model.clone());
        pool.build().unwrap()
    };
    let pools = [pool(0), pool(1)];
    let region = Region::new(&pools[0], 2 * page).unwrap();
    let job = |to: &Pool| {
        let job = Migration::new().range(&region, 0..2 * page, to);
        job.start().map(|job| job.wait())
    };
    assert!(job(&pools[1]).unwrap().ended.is_completed());
    model.lose(pools[1].shares()[0].0.file);
    let is_lost = |error| matches!(error, Error::DescriptorLost { is_reused: false, .. });
    assert!(is_lost(job(&pools[0]).unwrap_err()), "frames of a lost file would be left");
    assert!(is_lost(Region::new(&pools[1], page).unwrap_err()));
    // The other pool has lost nothing.
    let other = Region::new(&pools[0], page).unwrap();
    let back = Migration::new().range(&other, 0..page, &pools[0]).start().unwrap();
    assert!(!matches!(back.wait().ended, Ended::Failed(_)));
}

/// Without its file's descriptor no alias can be mapped anew, and the old mapping stays the pool's:
/// it keeps the frames out of circulation, and goes with the pool. The model is asked for mappings
/// that are left.
#[test]
fn an_alias_that_cannot_be_mapped_anew_goes_with_its_pool() {
    let model = Arc::new(Model::new());
    let page = PageSize::Base.bytes();
    let pool = Pool::builder(NodeId(0), 4 * page as u64).threads(1).backend(model.clone());
    let pool = pool.build().unwrap();
    let [share] = pool.shares() else { panic!("a pool of one node has one share") };
    let (alias, run) = (share.0.alias_of(0), Run { first: 0, frames: 4 });
    assert_eq!(share.take(4, 0).unwrap(), [run]);
    model.lose(share.0.file);
    let lost = Err((Call::Map, Errno(libc::EBADF)));
    assert_eq!(share.seat_tables(Run { first: 3, frames: 1 }, NodeId(9), |_| Ok(())), lost);
    share.mark_spoilt(Run { first: 1, frames: 2 });
    let refused = share.give_back(run).unwrap_err().to_string();
    assert!(refused.contains("EBADF"), "{refused}");
    assert_eq!(lock(&share.0.state).unmapped, [run]);
    share.take(1, 0).unwrap_err();
    drop(pool);
    assert!((0..4).all(|i| !model.is_mapped(alias + i * page, page)));
}

/// A repair could not tell such a reservation from the mapping that it expects there.
#[cfg(not(miri))]
#[test]
fn holes_in_pools_and_regions_are_not_used_for_others() {
    const PART: usize = 8 << 20;
    const SMALL: usize = 2 << 20;
    let linux = Linux;
    let check = |start: usize| {
        // SAFETY: unused parts of a pool and of a region of this test, and ranges that it has
        // reserved.
        let release = |addr, len| unsafe { linux.release(addr, len) }.unwrap();
        release(start + PART, PART);
        let is_in_hole = |addr: usize| addr < start + 2 * PART && addr + SMALL > start + PART;
        // The kernel fills gaps from above; whatever lies higher is full when the hole's turn
        // comes.
        let mut others = Vec::new();
        let filled = (0..20_000).any(|_| {
            others.push(linux.reserve(SMALL, SMALL).unwrap());
            is_in_hole(others[others.len() - 1])
        });
        assert!(filled, "the kernel does not give the hole away");
        release(others.pop().unwrap(), SMALL);
        others.push(reserve_aligned(&linux, SMALL).unwrap());
        assert!(!is_in_hole(others[others.len() - 1]));
        others.into_iter().for_each(|addr| release(addr, SMALL));
    };
    let pool = Pool::builder(any_node(), 3 * PART as u64).build().unwrap();
    let [share] = pool.shares() else { panic!("a pool of one node has one share") };
    let frames = (PART / PageSize::Base.bytes()) as u64;
    lock(&share.0.state).aliases.note(Run { first: frames, frames }, AliasEvent::MapFailed);
    check(share.0.alias_of(0));
    let region = crate::Region::reserve(3 * PART, PageSize::Base).unwrap();
    check(region.as_ptr().as_ptr() as usize);
    // The mappings at its addresses are not known any more, so the region must not be dropped.
    std::mem::forget(region);
}

/// Nobody waits for frames whose alias cannot be mapped again, but they can be taken as soon as it
/// can.
#[test]
fn announced_frames_that_cannot_be_given_back_are_not_waited_for() {
    const FRAMES: u64 = 4;
    let failing =
        Arc::new(FailAt::new(Arc::new(Model::new()), 1, FailMode::Before, Errno(libc::ENOMEM)));
    let bytes = FRAMES * PageSize::Base.bytes() as u64;
    let pool = Pool::builder(NodeId(0), bytes).threads(1).backend(failing.clone()).build().unwrap();
    let [share] = pool.shares() else { panic!("a pool of one node has one share") };
    let all = share.take(FRAMES, 0).unwrap();
    let run = all[0];
    share.announce(run);
    lock(&share.0.state).aliases.note(run, AliasEvent::MapFailed);
    failing.arm();
    share.give_back_announced(run).unwrap_err();
    assert_eq!(failing.struck(), Some(Call::Map));
    // If they were still announced, a call that needs more than the pool has would wait for ever.
    assert_eq!(lock(&share.0.state).announced, 0);
    assert_eq!(share.take(FRAMES, 0).unwrap(), all);
    share.give_back(run).unwrap();
    assert_eq!(share.free_bytes(), bytes);
}
