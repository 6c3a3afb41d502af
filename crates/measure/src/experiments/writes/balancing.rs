//! Automatic NUMA balancing beside a load: memory without a policy, and the switch of the kernel.

use std::any::Any;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use pageleap::{BASE_PAGE, NodeId, PageSize};
use pageleap_sys::Advice;

use crate::Error;
use crate::load::Shadow;
use crate::rivals::balancing::{Balanced, Unbound, await_balanced, poll};
use crate::rivals::can_move;

/// Turns automatic NUMA balancing on until its result is dropped, or tells why it cannot.
pub type Switch = Box<dyn Fn() -> Result<Box<dyn Any>, String>>;

/// Memory that the kernel moves towards the threads that access it.
pub(in crate::experiments) struct Balancing {
    memory: Unbound,
    /// The expected words.
    pub shadow: Option<Shadow>,
    nodes: [NodeId; 2],
    switch: Switch,
}

impl Balancing {
    /// Its name in tables.
    pub const NAME: &str = "automatic balancing";

    /// Memory on the first node. The switch is tried once.
    pub fn new(
        bytes: usize,
        page: PageSize,
        [from, to]: [NodeId; 2],
        switch: Switch,
    ) -> Result<Balancing, String> {
        can_move(from, to)?;
        drop(switch()?);
        let memory = Unbound::new(bytes, page, from).map_err(|error| error.to_string())?;
        if page == PageSize::Thp {
            memory.memory().check_huge().map_err(|error| error.to_string())?;
        }
        Ok(Balancing { memory, shadow: None, nodes: [from, to], switch })
    }

    /// Turns balancing on until the result is dropped.
    pub fn on(&self) -> Result<Box<dyn Any>, Error> {
        (self.switch)().map_err(|reason| Error::Rival { rival: Balancing::NAME, reason })
    }

    /// The memory as words.
    pub fn words(&self) -> &[AtomicU64] {
        self.memory.memory().words()
    }

    /// Waits until all pages have come to the second node, or until the limit.
    pub fn wait(&self, limit: Duration, stopped: &dyn Fn() -> bool) -> Result<Balanced, Error> {
        await_balanced(&self.memory, self.nodes[1], limit, stopped)
    }

    /// Moves the pages to the first node, while no thread accesses them. The memory has no policy
    /// afterwards.
    pub fn bring_back(&self) -> Result<(), Error> {
        let (start, len) = (self.memory.memory().as_ptr().addr(), self.memory.memory().len());
        let pages: Vec<usize> = (start..start + len).step_by(BASE_PAGE).collect();
        pageleap::move_pages(0, &pages, Some(&vec![self.nodes[0]; pages.len()]), false)?;
        if self.memory.memory().page() == PageSize::Thp {
            // Joins pages that were split. A kernel before 6.1 cannot.
            // SAFETY: the range is the memory's own, and the advice keeps its contents.
            let _ = unsafe { pageleap_sys::set_advice(start, len, Advice::Collapse) };
        }
        let placement = poll(&self.memory, self.nodes[0])?;
        match placement.is_complete() {
            true => Ok(()),
            false => Err(Error::Stayed {
                stayed: placement.elsewhere + placement.absent,
                pages: placement.pages(),
            }),
        }
    }
}
