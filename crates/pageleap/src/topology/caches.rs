//! Caches of CPUs.

use std::collections::BTreeMap;

use super::files::SysFiles;
use super::formats::{MAX_CPUS, parse_list};

/// Most caches of a CPU that are read: processors have three levels, and two caches in the first.
const MAX_CACHES: usize = 16;

/// A cache of a CPU that holds data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// 1 is nearest to the CPU.
    pub level: u32,
    /// Bytes of the cache.
    pub bytes: u64,
}

/// The caches of these CPUs that hold data, each once that several of them share. `None` if the
/// kernel does not tell those of one CPU, as on some virtual machines and on some of arm64.
///
/// ```
/// use pageleap::topology::{SysFiles, data_caches};
///
/// if let Some(caches) = data_caches(&SysFiles::host(), &[0]) {
///     let last = caches.iter().map(|cache| cache.level).max();
///     println!("{} bytes in {last:?} levels", caches.iter().map(|cache| cache.bytes).sum::<u64>());
/// }
/// ```
pub fn data_caches(files: &SysFiles, cpus: &[usize]) -> Option<Vec<Cache>> {
    // By level, and by the first CPU that shares it.
    let mut caches: BTreeMap<(u32, usize), u64> = BTreeMap::new();
    for cpu in cpus {
        let mut is_known = false;
        for index in 0..MAX_CACHES {
            let Some(one) = cache(files, *cpu, index)? else { break };
            is_known = true;
            if one.holds_data {
                caches.insert((one.level, one.first_cpu), one.bytes);
            }
        }
        if !is_known {
            return None;
        }
    }
    Some(caches.into_iter().map(|((level, _), bytes)| Cache { level, bytes }).collect())
}

/// A cache as its files describe it.
struct Described {
    level: u32,
    /// The first CPU that shares it.
    first_cpu: usize,
    holds_data: bool,
    bytes: u64,
}

/// One cache of a CPU. `None` if its files are damaged; `Some(None)` if the CPU has no such cache.
fn cache(files: &SysFiles, cpu: usize, index: usize) -> Option<Option<Described>> {
    let text = |name: &str| {
        let path = format!("sys/devices/system/cpu/cpu{cpu}/cache/index{index}/{name}");
        files.text_if_there(&path).ok().flatten()
    };
    let Some(level) = text("level") else { return Some(None) };
    Some(Some(Described {
        level: level.trim().parse().ok()?,
        first_cpu: *parse_list(text("shared_cpu_list")?.trim(), MAX_CPUS).ok()?.first()?,
        holds_data: text("type")?.trim() != "Instruction",
        bytes: size(text("size")?.trim())?,
    }))
}

/// `260K`, as the kernel writes all sizes of caches (`size_show` in drivers/base/cacheinfo.c).
fn size(text: &str) -> Option<u64> {
    text.strip_suffix('K')?.parse::<u64>().ok()?.checked_mul(1024)
}
