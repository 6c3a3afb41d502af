//! Settings of the whole machine. Only tests on machines of the lab change them.

use std::fs;

/// The kernel's limit on mappings of a process. It is set back when the value is dropped.
pub struct MappingLimit(String);

impl MappingLimit {
    const FILE: &str = "/proc/sys/vm/max_map_count";

    pub fn lower_to(count: usize) -> MappingLimit {
        let before = fs::read_to_string(Self::FILE).unwrap();
        fs::write(Self::FILE, count.to_string()).unwrap();
        MappingLimit(before)
    }
}

impl Drop for MappingLimit {
    fn drop(&mut self) {
        fs::write(Self::FILE, self.0.trim()).unwrap();
    }
}
