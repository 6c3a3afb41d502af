//! The processes of the kernel, by its own list of them.

use std::collections::BTreeMap;

use super::core::{Core, KernelAddress};
use super::{Layout, Reason};

/// How often the walk begins again after a process whose memory was freed meanwhile.
const ATTEMPTS: usize = 5;

/// A process, as the kernel keeps it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Task {
    task: KernelAddress,
    /// Its memory (`struct mm_struct`). `None` if it has none, or its main thread has ended.
    memory: Option<KernelAddress>,
    /// Its highest page table.
    pub(super) root: Option<KernelAddress>,
}

/// Finds processes by their numbers in the first pid namespace, among at most `most` processes.
/// Those that are not there are left out.
///
/// The list changes while it is read: a process that has ended may lead astray. Then the walk
/// begins again. A process that is found is compared with what the kernel has at the end of the
/// walk ([`is_unchanged`]).
pub(super) fn find(
    core: &Core,
    layout: &Layout,
    first: KernelAddress,
    pids: &[u32],
    most: usize,
) -> Result<BTreeMap<u32, Task>, Reason> {
    for _ in 0..ATTEMPTS {
        let mut found = BTreeMap::new();
        let mut at = first;
        for _ in 0..most {
            let Some(next) = core.number(at.plus(layout.tasks)) else { break };
            at = KernelAddress(next.wrapping_sub(layout.tasks));
            if at == first {
                return Ok(found);
            }
            let Some(pid) = number(core, layout, at) else { break };
            if pids.contains(&pid) {
                let Some(task) = read(core, layout, at) else { break };
                found.insert(pid, task);
            }
        }
    }
    Err(Reason::new(
        "processes end faster than their list in the memory of the kernel can be read".to_owned(),
    ))
}

/// Whether the kernel still has this process, with the same memory.
pub(super) fn is_unchanged(core: &Core, layout: &Layout, pid: u32, task: &Task) -> bool {
    let is_there = number(core, layout, task.task) == Some(pid);
    is_there && read(core, layout, task.task).is_some_and(|now| now == *task)
}

fn read(core: &Core, layout: &Layout, task: KernelAddress) -> Option<Task> {
    let pointer =
        |at| core.number(at).map(|value| Some(KernelAddress(value)).filter(|_| value != 0));
    let memory = pointer(task.plus(layout.mm))?;
    let root = match memory {
        Some(memory) => pointer(memory.plus(layout.pgd))?,
        None => None,
    };
    Some(Task { task, memory, root })
}

/// The number of a process.
fn number(core: &Core, layout: &Layout, task: KernelAddress) -> Option<u32> {
    let mut bytes = [0; 4];
    core.read(task.plus(layout.tgid), &mut bytes)?;
    Some(u32::from_le_bytes(bytes))
}
