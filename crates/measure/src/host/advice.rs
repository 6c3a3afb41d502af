//! Warnings about a machine before anything is measured. Pure.

use super::manifest::Host;
use super::noise::MOST_OTHERS;

/// The least load average that causes a warning. The average forgets by a factor of e each minute,
/// so one task that ran throughout the last minute leaves 0.63.
const LEAST_LOAD: f64 = 0.5;

/// One sentence for each property of the machine that makes figures unsteady, or those of another
/// machine: the finding and the remedy.
pub fn before(host: &Host) -> Vec<String> {
    [load(host), governor(host), balancing(host), hypervisor(host)].into_iter().flatten().collect()
}

/// A load average of N stands for N busy CPUs. The bound is the share of the CPUs that others may
/// use during a measurement, but at least [`LEAST_LOAD`]: 5 % of a
/// few CPUs are less than one task.
fn load(host: &Host) -> Option<String> {
    let load = host.load_average?;
    let cpus = host.cpus_online.as_ref().map_or(0, Vec::len);
    let bound = LEAST_LOAD.max(MOST_OTHERS * cpus as f64);
    (load > bound).then(|| {
        format!(
            "the load average of the last minute is {load:.2} (bound {bound:.2}): other tasks may \
             be running; stop them, or wait a minute if they have just ended"
        )
    })
}

/// Other governors than `performance` choose frequencies by the load of the moments before.
fn governor(host: &Host) -> Option<String> {
    let governors = host.governors.as_ref()?;
    let others: Vec<&str> =
        governors.iter().map(String::as_str).filter(|name| *name != "performance").collect();
    (!others.is_empty()).then(|| {
        format!(
            "the frequency of CPUs follows the governor {}, so that short runs are slower than \
             long ones; cpupower frequency-set -g performance",
            others.join(", ")
        )
    })
}

/// Even where it has nothing to move, it unmaps pages from time to time, to see their accesses as
/// faults.
fn balancing(host: &Host) -> Option<String> {
    let mode = host.numa_balancing.filter(|mode| *mode != 0)?;
    Some(format!(
        "kernel.numa_balancing is {mode}: the kernel moves pages by itself while one measures; \
         sysctl -w kernel.numa_balancing=0"
    ))
}

fn hypervisor(host: &Host) -> Option<String> {
    host.is_virtual.filter(|is_virtual| *is_virtual)?;
    let product = host.product.as_ref().map(|product| format!(" ({product})")).unwrap_or_default();
    Some(format!(
        "this is a virtual machine{product}: its nodes may lie anywhere on the host, and its page \
         tables cost more; to learn the times of the hardware, measure on a physical machine"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine without any property to warn about.
    fn fit(cpus: usize) -> Host {
        Host {
            cpus_online: Some((0..cpus).collect()),
            load_average: Some(0.5),
            governors: Some(vec!["performance".to_owned()]),
            numa_balancing: Some(0),
            is_virtual: Some(false),
            ..Host::default()
        }
    }

    #[test]
    fn a_fit_and_an_unknown_machine_cause_no_warning() {
        assert_eq!(before(&fit(2)), [""; 0]);
        assert_eq!(before(&Host::default()), [""; 0]);
    }

    #[test]
    fn the_bound_on_the_load_grows_with_the_cpus() {
        let warned =
            |cpus, load| !before(&Host { load_average: Some(load), ..fit(cpus) }).is_empty();
        assert!(warned(2, 0.51));
        assert!(!warned(64, 3.2) && warned(64, 3.21));
        let unknown = Host { cpus_online: None, load_average: Some(0.51), ..fit(64) };
        assert_eq!(before(&unknown).len(), 1);
    }

    #[test]
    fn each_property_is_named_with_its_remedy() {
        let governors = ["performance", "powersave"].map(str::to_owned).to_vec();
        let product = Some("QEMU Standard PC".to_owned());
        for (host, parts) in [
            (Host { load_average: Some(2.0), ..fit(2) }, ["is 2.00 (bound 0.50)", "wait a minute"]),
            (Host { governors: Some(governors), ..fit(2) }, ["governor powersave,", "cpupower"]),
            (Host { numa_balancing: Some(2), ..fit(2) }, ["is 2:", "kernel.numa_balancing=0"]),
            (Host { is_virtual: Some(true), ..fit(2) }, ["virtual machine:", "physical"]),
            (
                Host { is_virtual: Some(true), product, ..fit(2) },
                ["machine (QEMU Standard PC):", "physical"],
            ),
        ] {
            let warnings = before(&host);
            assert_eq!(warnings.len(), 1, "{warnings:?}");
            assert!(parts.iter().all(|part| warnings[0].contains(part)), "{warnings:?}");
        }
    }
}
