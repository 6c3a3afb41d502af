//! Transparent huge pages for one program.
//!
//! The system's setting, `/sys/kernel/mm/transparent_hugepage/enabled`, has three values. A program
//! can do without huge pages under each of them (PR_SET_THP_DISABLE). To get them, `always` needs
//! nothing, and under `madvise` its allocator has to ask (MADV_HUGEPAGE), which some do if an
//! environment variable tells them to. Under `never` there are none.

use std::ffi::{OsStr, OsString};

use pageleap::topology::SysFiles;

/// The system's setting, with brackets around the value: `always [madvise] never`.
const SETTING: &str = "sys/kernel/mm/transparent_hugepage/enabled";

/// Environment variables by which allocators are told to ask for huge pages: name, separator of
/// several settings in one variable, name of the setting, its value, and the allocator.
const ALLOCATORS: [(&str, &str, &str, &str, &str); 2] = [
    ("GLIBC_TUNABLES", ":", "glibc.malloc.hugetlb", "=1", "glibc 2.35 or newer"),
    ("MALLOC_CONF", ",", "thp", ":always", "jemalloc 5 or newer"),
];

/// How a program gets huge pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HugePages {
    /// Changes of its environment.
    pub environment: Vec<(OsString, Option<OsString>)>,
    /// How its allocator is told to ask for them, if it has to.
    pub told: Option<String>,
    /// Why it gets none.
    pub without_effect: Option<String>,
}

/// How a program gets transparent huge pages on this system. `inherited` tells the present values of
/// environment variables. A setting that the user has made for an allocator stays.
pub fn ask_for_huge_pages(
    files: &SysFiles,
    inherited: impl Fn(&str) -> Option<OsString>,
) -> HugePages {
    let setting = files.text(SETTING).unwrap_or_default();
    let value = setting.split_once('[').and_then(|(_, rest)| Some(rest.split_once(']')?.0));
    let mut asked = HugePages::default();
    match value {
        Some("always") => {}
        Some("madvise") => {
            let mut by = Vec::new();
            for (name, between, setting, value, allocator) in ALLOCATORS {
                let before = inherited(name).unwrap_or_default();
                by.push(match added(&before, between, setting, value) {
                    Some(after) => {
                        let shown = after.to_string_lossy().into_owned();
                        asked.environment.push((name.into(), Some(after)));
                        format!("{name}={shown} ({allocator})")
                    }
                    None => format!("{name} as you have set it ({})", before.to_string_lossy()),
                });
            }
            asked.told = Some(format!(
                "huge pages are for memory that a program asks for (/{SETTING} is madvise); malloc is \
                 told by {}",
                by.join(" and ")
            ));
        }
        other => {
            let why = other.map_or("this kernel has none".into(), |v| format!("/{SETTING} is {v}"));
            asked.without_effect = Some(format!("the program gets no huge pages: {why}"));
        }
    }
    asked
}

/// The value of a variable with one more setting; `None` if it has the setting.
fn added(before: &OsStr, between: &str, setting: &str, value: &str) -> Option<OsString> {
    let text = before.to_string_lossy();
    let sign = &value[..1];
    let is_it = |one: &str| one.strip_prefix(setting).is_some_and(|rest| rest.starts_with(sign));
    if text.split(between).any(is_it) {
        return None;
    }
    let mut after = before.to_owned();
    if !after.is_empty() {
        after.push(between);
    }
    after.push(setting);
    after.push(value);
    Some(after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trees::Tree;

    fn asked(setting: &str, inherited: &[(&str, &str)]) -> HugePages {
        let tree = Tree::new(&[(SETTING, setting)]);
        let value = |name: &str| {
            inherited.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into())
        };
        ask_for_huge_pages(&tree.files(), value)
    }

    fn value(asked: &HugePages, name: &str) -> Option<OsString> {
        asked.environment.iter().find(|(known, _)| known == name)?.1.clone()
    }

    #[test]
    fn under_madvise_allocators_are_told_to_ask() {
        let plain = asked("always [madvise] never\n", &[]);
        assert_eq!(value(&plain, "GLIBC_TUNABLES"), Some("glibc.malloc.hugetlb=1".into()));
        assert_eq!(value(&plain, "MALLOC_CONF"), Some("thp:always".into()));
        let told = plain.told.unwrap();
        assert!(told.contains("MALLOC_CONF=thp:always (jemalloc 5 or newer)"), "{told}");
        // The user's value of the same setting stays, and so do other settings of the variable.
        let set = [("GLIBC_TUNABLES", "glibc.malloc.hugetlb=2"), ("MALLOC_CONF", "narenas:4")];
        let kept = asked("always [madvise] never\n", &set);
        assert_eq!(value(&kept, "GLIBC_TUNABLES"), None);
        assert_eq!(value(&kept, "MALLOC_CONF"), Some("narenas:4,thp:always".into()));
        let several = [("GLIBC_TUNABLES", "glibc.malloc.check=3")];
        let several = asked("always [madvise] never\n", &several);
        let both = "glibc.malloc.check=3:glibc.malloc.hugetlb=1";
        assert_eq!(value(&several, "GLIBC_TUNABLES"), Some(both.into()));
    }

    #[test]
    fn the_other_settings_need_nothing_or_help_nothing() {
        assert_eq!(asked("[always] madvise never\n", &[]), HugePages::default());
        for (setting, part) in [("always madvise [never]\n", "is never"), ("", "has none")] {
            let none = asked(setting, &[]);
            let why = none.without_effect.unwrap();
            assert!(none.environment.is_empty() && why.contains(part), "{why}");
        }
    }
}
