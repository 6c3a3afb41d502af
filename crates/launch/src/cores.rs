//! Cores of a processor: CPUs that share one are sibling hyper-threads.

use std::collections::BTreeMap;

use pageleap::topology::SysFiles;

/// The cores of these CPUs, in ascending order of their first CPU, each with its CPUs in ascending
/// order. A CPU whose siblings the kernel does not tell is a core of its own.
pub fn cores_of(cpus: &[usize], files: &SysFiles) -> Vec<Vec<usize>> {
    let mut cores: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    let mut cpus = cpus.to_vec();
    cpus.sort_unstable();
    cpus.dedup();
    for cpu in cpus {
        // The first of its CPUs names a core, whether that one may be used or not.
        let first = siblings(files, cpu).into_iter().min().unwrap_or(cpu);
        cores.entry(first).or_default().push(cpu);
    }
    let mut cores: Vec<Vec<usize>> = cores.into_values().collect();
    cores.sort_unstable();
    cores
}

/// The hyper-threads of a CPU's core, itself among them. None are known where the kernel does not
/// say.
pub(crate) fn siblings(files: &SysFiles, cpu: usize) -> Vec<usize> {
    let path = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let text = files.text_if_there(&path).ok().flatten().unwrap_or_default();
    let mut ids = Vec::new();
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else {
            return Vec::new();
        };
        // No core has so many.
        ids.extend((first..=last).take(1024));
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trees::Tree;

    #[test]
    fn siblings_are_one_core() {
        let file =
            |cpu: usize| format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let names = [0, 1, 10, 11].map(file);
        let lists = ["0,10\n", "1,11\n", "0,10\n", "1,11\n"];
        let files: Vec<(&str, &str)> = names.iter().map(String::as_str).zip(lists).collect();
        let tree = Tree::new(&files);
        let cores = |cpus: &[usize]| cores_of(cpus, &tree.files());
        assert_eq!(cores(&[11, 0, 1, 10]), [vec![0, 10], vec![1, 11]]);
        // CPUs that may not be used are no part of it, and unknown ones are alone.
        assert_eq!(cores(&[1, 10, 12, 13]), [vec![1], vec![10], vec![12], vec![13]]);
    }
}
