//! The node of a device, in numactl's notation: `netdev:eth0`, `block:sda1`, `file:/data`,
//! `pci:0000:01:00`.
//!
//! A device's own folder in sysfs, or that of a bus above it, has the number of its node
//! (`numa_node`): a partition has that of its disk, and the disk that of its controller.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;

use pageleap::topology::{SysFiles, escaped};

use crate::error::Error;

/// Folders above a device that are looked at. The longest paths of devices in sysfs have some ten
/// folders.
const MOST_FOLDERS: usize = 16;

/// The text itself if it names nodes by number, or the number of a device's node.
///
/// # Errors
/// [`Error::Device`] if there is no such device, or if the kernel does not tell its node.
pub fn node_of_device(text: &str, files: &SysFiles) -> Result<String, Error> {
    let Some((kind, name)) = text.split_once(':') else { return Ok(text.to_owned()) };
    let fail = |reason: &str, remedy| {
        Err(Error::Device { text: escaped(text), reason: reason.to_owned(), remedy })
    };
    let folder = match kind {
        "netdev" | "block" if !is_name(name) => {
            return fail("it is no name of a device", LISTS);
        }
        "netdev" => format!("sys/class/net/{name}"),
        "block" => format!("sys/class/block/{name}"),
        "file" => match device_of_file(name) {
            Ok(device) => format!("sys/dev/block/{device}"),
            Err(reason) => return fail(&reason, "name a file on a disk"),
        },
        "pci" => match pci_address(name) {
            Some(address) => format!("sys/bus/pci/devices/{address}"),
            None => {
                return fail("it is no address", "addresses are [SEGMENT:]BUS:DEVICE[.FUNCTION]");
            }
        },
        "ip" => {
            return fail(
                "the device of a route is not looked up",
                "`ip route get HOST` names the device; then netdev:DEVICE",
            );
        }
        _ => return Ok(text.to_owned()),
    };
    if files.names(&folder).is_err() {
        return fail("there is no such device", LISTS);
    }
    // The path leads over links into the tree of all devices, where `..` is the bus above.
    for up in 0..MOST_FOLDERS {
        let file = format!("{folder}/{}numa_node", "../".repeat(up));
        let Ok(Some(node)) = files.text_if_there(&file) else { continue };
        return match node.trim() {
            // The kernel's NUMA_NO_NODE.
            "-1" => fail("the kernel knows no node of it, as firmware tells none", BY_NUMBER),
            node => Ok(node.to_owned()),
        };
    }
    fail("it is no device of a bus (a virtual one has no node)", BY_NUMBER)
}

const LISTS: &str = "`ls /sys/class/net /sys/class/block /sys/bus/pci/devices` lists them";
const BY_NUMBER: &str = "name the node by its number";

/// Whether a text can be a file's name in sysfs.
fn is_name(text: &str) -> bool {
    !text.is_empty() && text != "." && text != ".." && !text.contains('/')
}

/// The device on which a file lies, as `MAJOR:MINOR`.
fn device_of_file(path: &str) -> Result<String, String> {
    let file = std::fs::metadata(OsStr::new(path)).map_err(|error| error.to_string())?;
    match libc::major(file.dev()) {
        // The kernel's number for file systems without a device.
        0 => Err(
            "it lies on no block device (tmpfs, overlay, btrfs and network file systems have none)"
                .into(),
        ),
        major => Ok(format!("{major}:{}", libc::minor(file.dev()))),
    }
}

/// The name of a PCI device in sysfs, from `[SEGMENT:]BUS:DEVICE[:FUNCTION]`, all hexadecimal; a dot
/// before the function is as good.
fn pci_address(text: &str) -> Option<String> {
    let parts: Option<Vec<u32>> =
        text.split([':', '.']).map(|part| u32::from_str_radix(part, 16).ok()).collect();
    let (segment, bus, device, function) = match (parts?.as_slice(), text.contains('.')) {
        ([bus, device], false) => (0, *bus, *device, 0),
        ([bus, device, function], true) => (0, *bus, *device, *function),
        ([segment, bus, device], false) => (*segment, *bus, *device, 0),
        ([segment, bus, device, function], _) => (*segment, *bus, *device, *function),
        _ => return None,
    };
    Some(format!("{segment:04x}:{bus:02x}:{device:02x}.{function:x}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trees::Tree;

    /// A disk with a partition behind a controller on node 1, and network devices: one behind a
    /// controller without a node, and a virtual one.
    fn machine() -> Tree {
        const BUS: &str = "sys/devices/pci0000:00";
        let tree = Tree::new(&[
            (&format!("{BUS}/0000:00:1f.2/numa_node"), "1\n"),
            (&format!("{BUS}/0000:00:1f.2/ata1/block/sda/sda1/size"), "8\n"),
            (&format!("{BUS}/0000:00:03.0/numa_node"), "-1\n"),
            (&format!("{BUS}/0000:00:03.0/net/eth0/mtu"), "1500\n"),
            ("sys/devices/virtual/net/lo/mtu", "1500\n"),
        ]);
        for (link, target) in [
            ("sys/class/block/sda1", format!("../../../{BUS}/0000:00:1f.2/ata1/block/sda/sda1")),
            ("sys/class/net/eth0", format!("../../../{BUS}/0000:00:03.0/net/eth0")),
            ("sys/class/net/lo", "../../devices/virtual/net/lo".to_owned()),
            ("sys/bus/pci/devices/0000:00:1f.2", format!("../../../../{BUS}/0000:00:1f.2")),
        ] {
            tree.link(link, &target);
        }
        tree
    }

    #[test]
    fn a_device_has_the_node_of_its_bus() {
        let machine = machine();
        let node = |text: &str| node_of_device(text, &machine.files());
        for (text, expected) in [
            ("0,2-3", "0,2-3"),
            ("block:sda1", "1"),
            ("pci:00:1f.2", "1"),
            ("pci:0:0:1f:2", "1"),
            // The parser of nodes refuses it.
            ("disk:sda", "disk:sda"),
        ] {
            assert_eq!(node(text).as_deref(), Ok(expected), "{text}");
        }
        for (text, part) in [
            ("netdev:eth0", "knows no node"),
            ("netdev:lo", "no device of a bus"),
            ("netdev:eth1", "there is no such device"),
            ("netdev:../net/eth0", "no name of a device"),
            ("block:", "no name of a device"),
            ("pci:1f", "no address"),
            ("pci:00:1e.0", "there is no such device"),
            ("file:/proc/self/status", "no block device"),
            ("file:/no/such/file", "No such file"),
            ("ip:example.org", "ip route get"),
        ] {
            let error = node(text).unwrap_err().to_string();
            assert!(error.contains(part) && error.starts_with(text), "{text}: {error}");
        }
    }
}
