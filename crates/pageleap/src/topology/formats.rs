//! The kernel's text formats: lists of ids, meminfo, distances. All functions are pure. Each parses
//! or refuses any text, in time and memory that the length of the text and the largest id limit.

use super::files::shortened;

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

/// Parses one id below `end`. Only digits are allowed, and no sign.
pub(super) fn parse_id(text: &str, end: usize) -> Result<usize, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let id = digits.then(|| text.parse().ok()).flatten().filter(|id| *id < end);
    id.ok_or_else(|| format!("`{}` is not an id below {end}", shortened(text)))
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
            return Err(format!("more distances than the {nodes} online nodes"));
        }
        found.push(distance);
    }
    if found.len() == nodes {
        Ok(found)
    } else {
        Err(format!("{} distances for {nodes} online nodes", found.len()))
    }
}

/// Total and allocatable bytes of a meminfo text. The text is that of the machine, or of a node,
/// where each line begins with `Node N`.
pub(super) fn meminfo(text: &str) -> (u64, u64) {
    let bytes = |name: &str| {
        let kb = text.lines().find_map(|line| {
            let (head, value) = line.split_once(':')?;
            (head.split_whitespace().next_back()? == name)
                .then(|| value.split_whitespace().next()?.parse::<u64>().ok())?
        });
        kb.unwrap_or(0).saturating_mul(1024)
    };
    let free = ["MemFree", "Active(file)", "Inactive(file)", "SReclaimable"].map(bytes);
    (bytes("MemTotal"), free.into_iter().fold(0, u64::saturating_add))
}

/// The kernel's estimate of the bytes that can be allocated without swapping (`MemAvailable`, Linux
/// 3.14).
pub(crate) fn available(meminfo: &str) -> u64 {
    let kb = meminfo.lines().find_map(|line| {
        line.strip_prefix("MemAvailable:")?.split_whitespace().next()?.parse::<u64>().ok()
    });
    kb.unwrap_or(0).saturating_mul(1024)
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
    fn meminfo_of_a_node_and_of_the_machine_is_parsed() {
        let node = "Node 0 MemTotal:  1000 kB\nNode 0 MemFree:  300 kB\n\
                    Node 0 Active(file):  20 kB\nNode 0 SReclaimable: 1 kB\n";
        assert_eq!(meminfo(node), (1000 << 10, 321 << 10));
        assert_eq!(meminfo("MemTotal: 5 kB\nMemFree: 2 kB\n"), (5 << 10, 2 << 10));
        assert_eq!(meminfo("nonsense"), (0, 0));
        let most = format!("MemTotal: {0} kB\nMemFree: {0} kB\nActive(file): {0} kB\n", u64::MAX);
        assert_eq!(meminfo(&most), (u64::MAX, u64::MAX));
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
