//! A modelled kernel, which gives up half-way as the real one does.

use std::collections::BTreeMap;
use std::sync::{Arc, Barrier, Mutex};

use pageleap_sys::Errno;

use super::call::Calls;
use crate::units::BASE_PAGE;

/// Nodes 0 and 1 have memory.
pub(super) const NODES: i32 = 2;

/// Kinds of folios. A folio moves as a whole: a page, or a huge page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Movable,
    /// It refuses to move this many times, then moves.
    Busy(u32),
    Pinned,
    Shared,
    /// Another process shares it until this process has been refused this many times.
    Snapshot(u32),
    Zero,
}

#[derive(Clone, Debug)]
pub(super) struct Folio {
    pub(super) pages: u64,
    pub(super) node: i32,
    pub(super) kind: Kind,
    pub(super) isolated: bool,
}

/// Memory of a process. `folios`: by their first page.
#[derive(Clone, Default)]
pub(super) struct Memory {
    pub(super) folios: BTreeMap<u64, Folio>,
    moving_calls: u32,
    /// Pages that were queried, and the number of queries.
    asked: u64,
    pub(super) queries: u64,
    /// Whether an absent page gives EFAULT, as on Linux 6.1, instead of ENOENT.
    pub(super) old: bool,
    /// Folios that node 1 can still take.
    pub(super) room: Option<u64>,
    /// After queries of this many pages, the process executes another program, which has no pages
    /// at these addresses.
    pub(super) executes_at: Option<u64>,
    has_ended: bool,
    /// Before this moving call, the model waits twice at the barrier: to announce itself, and to go
    /// on.
    pub(super) pauses_at: Option<(u32, Arc<Barrier>)>,
}

#[derive(Clone)]
pub(super) struct Model(pub(super) Arc<Mutex<Memory>>);

impl Memory {
    fn folio(&mut self, page: u64) -> Option<(u64, &mut Folio)> {
        let (first, folio) = self.folios.range_mut(..=page).next_back()?;
        (page < first + folio.pages).then_some((*first, folio))
    }

    fn status(&mut self, page: u64) -> i32 {
        let absent = if self.old { -libc::EFAULT } else { -libc::ENOENT };
        match self.folio(page) {
            None => absent,
            Some((_, folio)) if folio.kind == Kind::Zero => -libc::EFAULT,
            Some((_, folio)) => folio.node,
        }
    }

    /// Whether the next moving call is to pause.
    fn pause(&mut self) -> Option<Arc<Barrier>> {
        self.pauses_at.take_if(|(call, _)| *call == self.moving_calls).map(|(_, barrier)| barrier)
    }

    /// `add_page_for_migration`: 1 for a page that is queued now.
    fn add(&mut self, page: u64, node: i32, shared: bool, queue: &mut Vec<u64>) -> i32 {
        let status = self.status(page);
        let Some((first, folio)) = self.folio(page) else { return status };
        if status < 0 {
            return status;
        }
        if folio.node == node {
            return 0;
        }
        match &mut folio.kind {
            Kind::Shared if !shared => return -libc::EACCES,
            Kind::Snapshot(times @ 1..) if !shared => {
                *times -= 1;
                return -libc::EACCES;
            }
            _ => {}
        }
        if std::mem::replace(&mut folio.isolated, true) {
            return -libc::EBUSY;
        }
        queue.push(first);
        1
    }

    /// `move_pages_and_store_status`: how many of the batch did not move.
    fn flush(&mut self, queue: &mut Vec<u64>, node: i32) -> Result<u64, Errno> {
        let (mut left, mut full) = (0, false);
        for first in queue.drain(..) {
            let folio = self.folios.get_mut(&first).expect("a queued folio is there");
            folio.isolated = false;
            let room = if node == 1 { self.room.as_mut() } else { None };
            match (&mut folio.kind, room) {
                _ if full => {}
                (_, Some(0)) => full = true,
                (Kind::Pinned, _) => left += 1,
                (Kind::Busy(times @ 1..), _) => {
                    *times -= 1;
                    left += 1;
                }
                (_, room) => {
                    room.into_iter().for_each(|room| *room -= 1);
                    folio.node = node;
                }
            }
        }
        if full { Err(Errno(libc::ENOMEM)) } else { Ok(left) }
    }
}

impl Calls for Model {
    fn query(&self, pages: &[usize], status: &mut [i32]) -> Result<(), Errno> {
        let memory = &mut *self.0.lock().unwrap();
        if memory.executes_at.is_some_and(|at| memory.asked >= at) {
            memory.folios.clear();
            memory.has_ended = true;
        }
        memory.asked += pages.len() as u64;
        memory.queries += 1;
        for (page, status) in pages.iter().zip(status) {
            *status = memory.status((page / BASE_PAGE) as u64);
        }
        Ok(())
    }

    /// `do_pages_move` of mm/migrate.c.
    fn move_pages(
        &self,
        pages: &[usize],
        nodes: &[i32],
        status: &mut [i32],
        shared: bool,
    ) -> Result<u64, Errno> {
        let pause = self.0.lock().unwrap().pause();
        if let Some(barrier) = pause {
            barrier.wait();
            barrier.wait();
        }
        let memory = &mut *self.0.lock().unwrap();
        memory.moving_calls += 1;
        let (mut queue, mut start, mut current) = (Vec::new(), 0, None);
        for (at, page) in pages.iter().enumerate() {
            let node = nodes[at];
            if !(0..NODES).contains(&node) {
                if let Some(current) = current {
                    status[start..at].fill(current);
                }
                memory.flush(&mut queue, current.unwrap_or(0))?;
                return Err(Errno(libc::ENODEV));
            }
            if let Some(before) = current.filter(|before| *before != node) {
                let left = memory.flush(&mut queue, before)?;
                if left > 0 {
                    return Ok(left + (pages.len() - at) as u64);
                }
                status[start..at].fill(before);
                (current, start) = (Some(node), at);
            }
            if current.is_none() {
                (current, start) = (Some(node), at);
            }
            let added = memory.add((page / BASE_PAGE) as u64, node, shared, &mut queue);
            if added > 0 {
                continue;
            }
            status[at] = if added == 0 { node } else { added };
            let left = memory.flush(&mut queue, node)?;
            if left > 0 {
                return Ok(left + (pages.len() - at - 1) as u64);
            }
            status[start..at].fill(node);
            current = None;
        }
        if let Some(node) = current {
            let left = memory.flush(&mut queue, node)?;
            if left > 0 {
                return Ok(left);
            }
            status[start..].fill(node);
        }
        Ok(0)
    }

    fn has_ended(&self) -> bool {
        self.0.lock().unwrap().has_ended
    }
}

impl Model {
    pub(super) fn new(folios: impl IntoIterator<Item = (u64, Folio)>) -> Model {
        let folios = folios.into_iter().collect();
        Model(Arc::new(Mutex::new(Memory { folios, ..Memory::default() })))
    }

    pub(super) fn moving_calls(&self) -> u32 {
        self.0.lock().unwrap().moving_calls
    }

    /// Pages that were queried.
    pub(super) fn asked(&self) -> u64 {
        self.0.lock().unwrap().asked
    }

    pub(super) fn node(&self, page: u64) -> Option<u32> {
        u32::try_from(self.0.lock().unwrap().status(page)).ok()
    }
}

pub(super) fn folio(pages: u64, kind: Kind) -> Folio {
    Folio { pages, node: 0, kind, isolated: false }
}
