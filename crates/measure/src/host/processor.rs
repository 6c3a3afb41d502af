//! The model of the CPUs, and whether the machine is a virtual one. Pure.

use super::lines::shown;

/// Facts in `/proc/cpuinfo` about its first CPU.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Processor {
    /// The model. On arm64 the kernel knows numbers only: those of implementer and part.
    pub(super) model: Option<String>,
    /// The version of the microcode (x86).
    pub(super) microcode: Option<String>,
    /// Whether the CPU has the flag `hypervisor`. `None` on a CPU that has no such flag (not x86).
    pub(super) has_hypervisor: Option<bool>,
}

impl Processor {
    /// Parses the text of `/proc/cpuinfo`.
    pub(super) fn of(cpuinfo: &str) -> Processor {
        let value = |name: &str| {
            cpuinfo.lines().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                (key.trim() == name).then(|| shown(value))?
            })
        };
        let arm = || {
            let (implementer, part) = (value("CPU implementer")?, value("CPU part")?);
            Some(format!("implementer {implementer}, part {part}"))
        };
        // x86 and 32-bit Arm; LoongArch; POWER.
        let named = ["model name", "Model Name", "cpu"].into_iter().find_map(value);
        // The text of `flags` is longer than a value may be shown.
        let flags = cpuinfo.lines().find_map(|line| {
            let (key, flags) = line.split_once(':')?;
            (key.trim() == "flags").then_some(flags)
        });
        Processor {
            model: named.or_else(arm),
            microcode: value("microcode"),
            has_hypervisor: flags
                .map(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor")),
        }
    }
}

/// Parts of the vendor's and product's names of virtual machines, as DMI gives them.
const VIRTUAL: [&str; 13] = [
    "Amazon EC2",
    "Apple Virtualization",
    "BHYVE",
    "Bochs",
    "Google Compute Engine",
    "KVM",
    "KubeVirt",
    "OpenStack",
    "Parallels",
    "QEMU",
    "VMware",
    "VirtualBox",
    "Xen",
];

/// Whether the machine is a virtual one. A hypervisor can hide its flag, but no physical CPU has
/// it. On other CPUs than x86 a known name proves a virtual machine; other names prove nothing.
///
/// `product` is the vendor and the product of DMI, and `hypervisor` that of `/sys/hypervisor/type`.
pub(super) fn is_virtual(
    has_flag: Option<bool>,
    hypervisor: Option<&str>,
    product: Option<&str>,
) -> Option<bool> {
    let is_named = |product: &str| {
        // Microsoft sells physical machines, too, and Amazon rents them out.
        (VIRTUAL.iter().any(|name| product.contains(name)) && !product.ends_with(".metal"))
            || product == "Microsoft Corporation Virtual Machine"
    };
    let is_found = hypervisor.is_some() || product.is_some_and(is_named);
    has_flag.or_else(|| is_found.then_some(true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpuinfo_names_the_model_and_a_hypervisor() {
        let x86 = "processor\t: 0\nmodel\t\t: 143\nmodel name\t: Xeon 8480\nmicrocode\t: 0x2b\n\
                   flags\t\t: fpu hypervisor lm\n\nprocessor\t: 1\nmodel name\t: Other\n";
        let parsed = Processor::of(x86);
        assert_eq!(parsed.model.as_deref(), Some("Xeon 8480"));
        assert_eq!(parsed.microcode.as_deref(), Some("0x2b"));
        assert_eq!(parsed.has_hypervisor, Some(true));
        // Flags count as whole words, wherever they stand.
        let many = "fpu ".repeat(300);
        assert_eq!(
            Processor::of(&format!("flags : {many}hypervisor\n")).has_hypervisor,
            Some(true)
        );
        assert_eq!(Processor::of("flags : fpu hypervisors\n").has_hypervisor, Some(false));
        let arm = Processor::of("Features : fp\nCPU implementer : 0x41\nCPU part\t: 0xd0c\n");
        assert_eq!(arm.model.as_deref(), Some("implementer 0x41, part 0xd0c"));
        assert_eq!((arm.microcode, arm.has_hypervisor), (None, None));
        assert_eq!(Processor::of("cpu\t: POWER9\n").model.as_deref(), Some("POWER9"));
        for text in ["", "nonsense", "model name :\n", ":::\n", "CPU part : 0xd0c\n"] {
            assert_eq!(Processor::of(text), Processor::default(), "{text}");
        }
    }

    #[test]
    fn only_the_flag_proves_a_physical_machine() {
        for flag in [true, false] {
            assert_eq!(is_virtual(Some(flag), None, Some("QEMU")), Some(flag));
        }
        assert_eq!(is_virtual(None, None, None), None);
        assert_eq!(is_virtual(None, Some("xen"), None), Some(true));
        for (product, is) in [
            ("QEMU KVM Virtual Machine", Some(true)),
            ("Microsoft Corporation Virtual Machine", Some(true)),
            ("Microsoft Corporation C2030", None),
            ("Amazon EC2 m6g.large", Some(true)),
            ("Amazon EC2 m6g.metal", None),
            ("Supermicro R12SPD", None),
        ] {
            assert_eq!(is_virtual(None, None, Some(product)), is, "{product}");
        }
    }
}
