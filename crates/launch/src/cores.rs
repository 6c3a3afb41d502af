//! Cores of a processor: CPUs that share one are sibling hyper-threads.

use std::collections::BTreeMap;

use pageleap::topology::SysFiles;

/// The cores of these CPUs, in ascending order of their first CPU, each with its CPUs in ascending
/// order. A CPU whose siblings the kernel does not tell is a core of its own.
pub fn cores_of(cpus: &[usize], files: &SysFiles) -> Vec<Vec<usize>> {
    let mut cores: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    let mut cpus = cpus.to_vec();
    cpus.sort_unstable();
    cpus.dedup();
    for cpu in cpus {
        let file = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        // The list itself names the core: it is the same for all of its CPUs.
        let siblings = files.text(&file).map(|text| text.trim().to_owned());
        let core = siblings.ok().filter(|list| !list.is_empty());
        cores.entry(core.unwrap_or_else(|| format!("{cpu} alone"))).or_default().push(cpu);
    }
    let mut cores: Vec<Vec<usize>> = cores.into_values().collect();
    cores.sort_unstable();
    cores
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
