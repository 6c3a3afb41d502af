//! Caches of CPUs.

use std::collections::BTreeMap;

use super::files::SysFiles;
use super::formats::{MAX_CPUS, parse_list};

/// Most caches of a CPU that are read: processors have three levels, and two caches in the first.
const MAX_CACHES: usize = 16;

/// Bytes of the last-level caches of these CPUs together: the largest level, each cache once that
/// several of them share. `None` if the kernel does not say for one of them, as on many virtual
/// machines and on some of arm64.
///
/// ```
/// use pageleap::topology::{SysFiles, last_level_cache_bytes};
///
/// if let Some(bytes) = last_level_cache_bytes(&SysFiles::host(), &[0]) {
///     assert!(bytes > 0);
/// }
/// ```
pub fn last_level_cache_bytes(files: &SysFiles, cpus: &[usize]) -> Option<u64> {
    // By the first CPU that shares it.
    let mut caches: BTreeMap<usize, u64> = BTreeMap::new();
    for cpu in cpus {
        let (first, bytes) = last_level(files, *cpu)?;
        caches.insert(first, bytes);
    }
    (!caches.is_empty()).then(|| caches.values().sum())
}

/// The first CPU that shares the last-level cache of this one, and the bytes of that cache.
fn last_level(files: &SysFiles, cpu: usize) -> Option<(usize, u64)> {
    let text = |index: usize, name: &str| {
        let path = format!("sys/devices/system/cpu/cpu{cpu}/cache/index{index}/{name}");
        files.text_if_there(&path).ok().flatten()
    };
    let mut last: Option<(u64, usize)> = None;
    for index in 0..MAX_CACHES {
        let Some(level) = text(index, "level") else { break };
        let level: u64 = level.trim().parse().ok()?;
        let holds_data = text(index, "type").is_some_and(|kind| kind.trim() != "Instruction");
        if holds_data && last.is_none_or(|(most, _)| level > most) {
            last = Some((level, index));
        }
    }
    let (_, index) = last?;
    let sharing = text(index, "shared_cpu_list")?;
    let first = *parse_list(sharing.trim(), MAX_CPUS).ok()?.first()?;
    Some((first, size(text(index, "size")?.trim())?))
}

/// `260K`, as the kernel writes all sizes of caches (`size_show` in drivers/base/cacheinfo.c).
fn size(text: &str) -> Option<u64> {
    text.strip_suffix('K')?.parse::<u64>().ok()?.checked_mul(1024)
}
