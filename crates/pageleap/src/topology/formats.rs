//! The kernel's text formats: lists of ids, meminfo, distances and others. All functions are pure. A
//! parser takes or refuses any text, in time and memory bounded by the length of the text and the
//! largest id.

use super::shown::shortened;
use crate::units::NodeId;

/// Every CPU number is below this limit (`NR_CPUS` is at most 8192, `CONFIG_MAXSMP` on x86).
pub(super) const MAX_CPUS: usize = 8192;

/// Parses the kernel's list format, such as `0,2-3` (Documentation/admin-guide/cputopology.rst). An
/// empty text is an empty list.
///
/// Every id is below `end` and larger than the id before it, as the kernel writes them. A list
/// therefore never has more than `end` ids.
pub(crate) fn parse_list(text: &str, end: usize) -> Result<Vec<usize>, String> {
    let mut ids: Vec<usize> = Vec::new();
    for part in text.trim_ascii().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (parse_id(first, end)?, parse_id(last, end)?),
            None => (parse_id(part, end)?, parse_id(part, end)?),
        };
        if first > last {
            return Err(format!("the range `{}` runs backwards", shortened(part)));
        }
        if ids.last().is_some_and(|before| *before >= first) {
            return Err(format!("`{}` is out of order", shortened(part)));
        }
        ids.extend(first..=last);
    }
    Ok(ids)
}

/// Parses the kernel's bitmap format, such as `00000001,0000000f`: 32 bits in each word, the word
/// of the lowest ids last. Every id is below `end`.
pub(super) fn parse_map(text: &str, end: usize) -> Result<Vec<usize>, String> {
    let text = text.trim_ascii();
    let mut ids = Vec::new();
    let (first, rest) = text.split_once(',').unwrap_or((text, ""));
    let whole = |word: &str| word.len() == 8;
    if first.is_empty() || text.contains(',') && !(first.len() <= 8 && rest.split(',').all(whole)) {
        return Err(format!("`{}` is not a map", shortened(text)));
    }
    let digits = text.chars().rev().filter(|digit| *digit != ',');
    for (place, digit) in digits.enumerate() {
        let bits = digit.to_digit(16);
        let bits = bits.ok_or_else(|| format!("`{}` is not a map", shortened(text)))?;
        let set = (0..4).filter(|bit| bits >> bit & 1 == 1).map(|bit| place * 4 + bit);
        ids.extend(set);
        if ids.last().is_some_and(|last| *last >= end) {
            return Err(format!("`{}` has bits from {end} on", shortened(text)));
        }
    }
    Ok(ids)
}

/// The numbers in names that consist of `prefix` and digits, in ascending order. Other names are
/// skipped. Every number is below `end`.
pub(super) fn numbered(names: &[String], prefix: &str, end: usize) -> Result<Vec<usize>, String> {
    let digits = names.iter().filter_map(|name| {
        let digits = name.strip_prefix(prefix)?;
        digits.bytes().next().is_some_and(|first| first.is_ascii_digit()).then_some((name, digits))
    });
    let number = |(name, digits): (&String, &str)| {
        parse_id(digits, end).map_err(|_| {
            format!("`{}` is not `{prefix}` with a number below {end}", shortened(name))
        })
    };
    let mut numbers = digits.map(number).collect::<Result<Vec<_>, _>>()?;
    numbers.sort_unstable();
    numbers.dedup();
    numbers.shrink_to_fit();
    Ok(numbers)
}

/// A line of `/proc/PID/mountinfo` (proc_pid_mountinfo(5)), with its escapes:
/// `36 35 98:0 /top /place rw - cgroup cgroup rw,cpuset`.
pub(crate) struct MountLine<'a> {
    /// The path inside the file system that is the top of the mount.
    pub(crate) top: &'a str,
    /// Where it is mounted.
    pub(crate) place: &'a str,
    pub(crate) filesystem: &'a str,
    /// The options of the file system, not of the mount.
    pub(crate) options: &'a str,
}

impl<'a> MountLine<'a> {
    pub(crate) fn parse(line: &'a str) -> Option<MountLine<'a>> {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (top, place) = (mount.next()?, mount.next()?);
        let mut filesystem = filesystem.split(' ');
        let (name, options) = (filesystem.next()?, filesystem.nth(1)?);
        Some(MountLine { top, place, filesystem: name, options })
    }
}

/// A path of `mounts`, in which the kernel writes spaces and the like as `\040`.
pub(crate) fn unescaped(path: &str) -> String {
    let escapes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    escapes.iter().fold(path.to_owned(), |path, (escape, plain)| path.replace(escape, plain))
}

/// Parses one id below `end`. Only digits are allowed, and no sign.
pub(super) fn parse_id(text: &str, end: usize) -> Result<usize, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let id = digits.then(|| text.parse().ok()).flatten().filter(|id| *id < end);
    id.ok_or_else(|| format!("`{}` is not an id below {end}", shortened(text)))
}

/// Ids as those of nodes.
pub(super) fn node_ids(ids: Vec<usize>) -> Vec<NodeId> {
    ids.into_iter().map(|id| NodeId(id as u32)).collect()
}

/// Writes ids in the kernel's list format, such as `0,2-3`. Consecutive ids become a range if `ids`
/// is in ascending order.
pub fn id_list(ids: impl IntoIterator<Item = usize>) -> String {
    let mut ids = ids.into_iter().peekable();
    let mut out = String::new();
    while let Some(first) = ids.next() {
        let mut last = first;
        while let Some(next) = ids.next_if(|next| last.checked_add(1) == Some(*next)) {
            last = next;
        }
        let comma = if out.is_empty() { "" } else { "," };
        out += &if first == last {
            format!("{comma}{first}")
        } else {
            format!("{comma}{first}-{last}")
        };
    }
    out
}

/// Parses the `distance` file of a node: one number for each online node, in the order of the
/// nodes.
pub(super) fn distances(text: &str, nodes: usize) -> Result<Vec<u32>, String> {
    let mut found = Vec::new();
    for word in text.split_ascii_whitespace() {
        let distance =
            word.parse().map_err(|_| format!("`{}` is not a distance", shortened(word)))?;
        if found.len() == nodes {
            return Err(format!("there are more distances than online nodes ({nodes})"));
        }
        found.push(distance);
    }
    if found.len() == nodes {
        Ok(found)
    } else {
        Err(format!("the number of distances is {}, that of online nodes {nodes}", found.len()))
    }
}

/// Total and allocatable bytes of a meminfo text. The text is that of the machine, or of a node,
/// where each line begins with `Node N`.
pub(super) fn meminfo(text: &str) -> Result<(u64, u64), String> {
    let bytes = |name: &str| bytes_of(text, name);
    let needed = |name: &str| bytes(name)?.ok_or_else(|| format!("it has no {name}"));
    let total = needed("MemTotal")?;
    let mut free = needed("MemFree")?;
    // Older kernels lack some of these.
    for name in ["Active(file)", "Inactive(file)", "SReclaimable"] {
        free = free.saturating_add(bytes(name)?.unwrap_or(0));
    }
    Ok((total, free.min(total)))
}

/// Bytes of page tables in a meminfo text, and of secondary page tables, which older kernels do not
/// count.
pub(super) fn page_tables(meminfo: &str) -> Result<(u64, Option<u64>), String> {
    let bytes = bytes_of(meminfo, "PageTables")?;
    Ok((bytes.ok_or("it has no PageTables")?, bytes_of(meminfo, "SecPageTables")?))
}

/// The kernel's estimate of the bytes that can be allocated without swapping (`MemAvailable`, Linux
/// 3.14).
pub(crate) fn available(meminfo: &str) -> Result<u64, String> {
    let value = bytes_of(meminfo, "MemAvailable")?;
    value.ok_or_else(|| "it has no MemAvailable".to_owned())
}

/// The bytes in the line of a meminfo text about `name`, if there is one.
fn bytes_of(text: &str, name: &str) -> Result<Option<u64>, String> {
    let value = text.lines().find_map(|line| {
        let (head, value) = line.split_once(':')?;
        (head.split_whitespace().next_back()? == name).then_some(value)
    });
    let Some(value) = value else { return Ok(None) };
    let kb = value.split_whitespace().next().and_then(|kb| kb.parse::<u64>().ok());
    let kb =
        kb.ok_or_else(|| format!("`{}` of {name} is not a number", shortened(value.trim_ascii())))?;
    Ok(Some(kb.saturating_mul(1024)))
}

/// The value in the line `name:` of `/proc/self/status`.
pub(crate) fn status_value<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
}

/// The page size in bytes, from the name of a directory of huge pages such as `hugepages-2048kB`.
pub(super) fn huge_page_bytes(name: &str) -> Option<u64> {
    let kb = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
    let bytes = kb.parse::<u64>().ok()?.checked_mul(1024)?;
    bytes.is_power_of_two().then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::cases;
    use proptest::prelude::*;

    const END: usize = 1000;

    #[test]
    fn lists_are_parsed_and_anything_else_is_refused() {
        assert_eq!(parse_list("0,2-3\n", END).unwrap(), [0, 2, 3]);
        assert_eq!(parse_list("\n", END).unwrap(), Vec::<usize>::new());
        assert_eq!(parse_list("999", END).unwrap(), [999]);
        let bad = [
            "x",
            "3-1",
            "-1",
            "0--1",
            "+1",
            "1000",
            "0-99999999",
            "0-99999999999999999999",
            "1-2-3",
            "2,1",
            "0-3,3",
            "0x1",
            "1 2",
        ];
        for text in bad {
            assert!(parse_list(text, END).is_err(), "{text}");
        }
    }

    #[test]
    fn maps_are_parsed_and_anything_else_is_refused() {
        for (text, ids) in [
            ("00000003\n", vec![0, 1]),
            ("0\n", vec![]),
            ("f0", vec![4, 5, 6, 7]),
            ("00000001,80000000", vec![31, 32]),
            ("1,00000000,00000001\n", vec![0, 64]),
            ("00000000,00000000,00000000,00000000,00000000,00000002", vec![1]),
            ("0000000100000001", vec![0, 32]),
        ] {
            assert_eq!(parse_map(text, 65), Ok(ids), "{text}");
        }
        for text in ["", "x", "0x1", "1,2", ",00000001", "1,", "-1", "2,00000000,00000000"] {
            assert!(parse_map(text, 65).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_are_taken_from_names_of_one_kind() {
        let names = ["node10", "node2", "nodes", "node", "power", "has_cpu", "xnode1"];
        let names = names.map(str::to_owned);
        assert_eq!(numbered(&names, "node", END), Ok(vec![2, 10]));
        for name in ["node1000", "node1x", "node99999999999999999999"] {
            assert!(numbered(&[name.to_owned()], "node", END).is_err(), "{name}");
        }
    }

    #[test]
    fn paths_of_mounts_are_unescaped() {
        assert_eq!(unescaped(r"/a\040b\134c"), r"/a b\c");
    }

    #[test]
    fn consecutive_ids_are_written_as_ranges() {
        assert_eq!(id_list([]), "");
        assert_eq!(id_list([0, 2, 3, 4, 7, 9, 10]), "0,2-4,7,9-10");
        assert_eq!(
            id_list([usize::MAX - 1, usize::MAX, 0]),
            format!("{}-{},0", usize::MAX - 1, usize::MAX)
        );
    }

    #[test]
    fn a_row_of_distances_has_one_for_each_node() {
        assert_eq!(distances("10 21\n", 2).unwrap(), [10, 21]);
        for text in ["", "10", "10 21 31", "10 x", "10 -1", "10 99999999999"] {
            assert!(distances(text, 2).is_err(), "{text}");
        }
    }

    #[test]
    fn page_tables_are_found_and_the_secondary_ones_if_they_are_counted() {
        let node = "Node 1 PageTables:  12 kB\nNode 1 SecPageTables:  4 kB\n";
        assert_eq!(page_tables(node), Ok((12 << 10, Some(4 << 10))));
        assert_eq!(page_tables("PageTables: 8 kB\n"), Ok((8 << 10, None)));
        assert_eq!(page_tables("SecPageTables: 8 kB\n"), Err("it has no PageTables".to_owned()));
    }

    #[test]
    fn meminfo_of_a_node_and_of_the_machine_is_parsed() {
        let node = "Node 0 MemTotal:  1000 kB\nNode 0 MemFree:  300 kB\n\
                    Node 0 Active(file):  20 kB\nNode 0 SReclaimable: 1 kB\n";
        assert_eq!(meminfo(node), Ok((1000 << 10, 321 << 10)));
        assert_eq!(meminfo("MemTotal: 5 kB\nMemFree: 2 kB\n"), Ok((5 << 10, 2 << 10)));
        assert_eq!(available("MemTotal: 9 kB\nMemAvailable:  7 kB\n"), Ok(7 << 10));
        assert!(available("MemTotal: 9 kB\n").is_err() && available("MemAvailable: x\n").is_err());
        assert_eq!(meminfo("Node 3 MemTotal: 0 kB\nNode 3 MemFree: 0 kB\n"), Ok((0, 0)));
        // A counter that lags behind does not make more memory free than there is.
        let ahead = "MemTotal: 5 kB\nMemFree: 5 kB\nSReclaimable: 1 kB\n";
        assert_eq!(meminfo(ahead), Ok((5 << 10, 5 << 10)));
        for (text, reason) in [
            ("", "it has no MemTotal"),
            ("nonsense", "it has no MemTotal"),
            ("Total: 5 kB\nMemFree: 2 kB\n", "it has no MemTotal"),
            ("MemTotal: 5 kB\n", "it has no MemFree"),
            ("MemTotal: -5 kB\nMemFree: 2 kB\n", "`-5 kB` of MemTotal is not a number"),
            ("MemTotal:\nMemFree: 2 kB\n", "`` of MemTotal is not a number"),
            ("MemTotal: 5 kB\nMemFree: x\n", "`x` of MemFree is not a number"),
            ("MemTotal: 5 kB\nMemFree: 2 kB\nSReclaimable: ? kB\n", "`? kB` of SReclaimable"),
        ] {
            let damaged = meminfo(text).unwrap_err();
            assert!(damaged.starts_with(reason), "{text}: {damaged}");
        }
        let most = format!("MemTotal: {0} kB\nMemFree: {0} kB\nActive(file): {0} kB\n", u64::MAX);
        assert_eq!(meminfo(&most), Ok((u64::MAX, u64::MAX)));
    }

    #[test]
    fn page_sizes_are_taken_from_names_of_directories() {
        assert_eq!(huge_page_bytes("hugepages-2048kB"), Some(2 << 20));
        assert_eq!(huge_page_bytes("hugepages-1048576kB"), Some(1 << 30));
        for name in [
            "hugepages-kB",
            "hugepages-3kB",
            "hugepages-0kB",
            "hugepages-2048",
            "x",
            "hugepages-18446744073709551615kB",
        ] {
            assert_eq!(huge_page_bytes(name), None, "{name}");
        }
    }

    /// Texts as hostile files may contain them: any text, and often pieces of the formats.
    fn texts() -> impl Strategy<Value = String> {
        prop_oneof![
            ".{0,40}",
            "[0-9,\\-+! \n]{0,60}",
            "(Node 0 )?[A-Z][a-z]{2,9}(Total|Free)?: *[0-9]{0,25} kB\n"
        ]
    }

    proptest! {
        #![proptest_config(cases(512, 8))]

        #[test]
        fn any_text_is_parsed_or_refused(text in texts(), nodes in 0usize..5) {
            if let Ok(ids) = parse_list(&text, END) {
                prop_assert!(ids.is_sorted_by(|a, b| a < b) && ids.iter().all(|id| *id < END));
            }
            if let Ok(found) = distances(&text, nodes) {
                prop_assert_eq!(found.len(), nodes);
            }
            if let Ok(ids) = parse_map(&text, END) {
                prop_assert!(ids.is_sorted_by(|a, b| a < b) && ids.iter().all(|id| *id < END));
            }
            let _ = (meminfo(&text), available(&text));
            let _ = (status_value(&text, "Node 0 MemTotal"), huge_page_bytes(&text));
        }

        #[test]
        fn written_lists_parse_to_the_same_ids(
            ids in proptest::collection::btree_set(0..END, 0..60)
        ) {
            let text = id_list(ids.iter().copied());
            prop_assert_eq!(parse_list(&text, END).unwrap(), ids.into_iter().collect::<Vec<_>>());
        }
    }
}
