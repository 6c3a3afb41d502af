//! Where members lie in structures of the running kernel, by its own description of its types
//! (BTF, `Documentation/bpf/btf.rst` of Linux).
//!
//! Reads as much of the format as that takes. The kept library for it (btf-rs) is under the LGPL,
//! which a statically linked command cannot take on.

use super::Reason;

/// The first two bytes of a description (`BTF_MAGIC`).
const MAGIC: u16 = 0xEB9F;

/// The bytes of `struct btf_header`, of `struct btf_type` and of `struct btf_member`.
const HEADER_BYTES: usize = 24;
const TYPE_BYTES: usize = 12;
const MEMBER_BYTES: usize = 12;

/// Kinds of types (`BTF_KIND_*`).
const STRUCT: u32 = 4;
const UNION: u32 = 5;

/// The most unnamed structures within each other that are searched for a member.
const DEPTH: u32 = 8;

/// The types of a kernel.
pub(super) struct Types<'a> {
    types: &'a [u8],
    names: &'a [u8],
    /// Where each type begins in `types`, by its number. Number 0 is `void`, which has no place.
    starts: Vec<usize>,
}

/// A type, without the parts that follow it.
#[derive(Clone, Copy)]
struct Head {
    name: u32,
    kind: u32,
    /// The number of its members.
    members: usize,
    /// Whether offsets of members have the width of bit fields in their upper 8 bits.
    has_bit_fields: bool,
    /// Where its members begin in `types`.
    at: usize,
}

impl<'a> Types<'a> {
    /// Reads a description, as `/sys/kernel/btf/vmlinux` has it.
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Types<'a>, Reason> {
        let header = bytes.get(..HEADER_BYTES).ok_or_else(damaged)?;
        if u16::from_le_bytes([header[0], header[1]]) != MAGIC {
            return Err(damaged());
        }
        let field = |at| number(header, at).map(|value| value as usize);
        let [begin, types, types_bytes, names, names_bytes] =
            [field(4)?, field(8)?, field(12)?, field(16)?, field(20)?];
        let part = |offset: usize, length: usize| {
            let start = begin.checked_add(offset)?;
            bytes.get(start..start.checked_add(length)?)
        };
        let types = part(types, types_bytes).ok_or_else(damaged)?;
        let names = part(names, names_bytes).ok_or_else(damaged)?;
        let mut starts = vec![usize::MAX];
        let mut at = 0;
        while at < types.len() {
            starts.push(at);
            let head = head(types, at)?;
            at = head.at + following_bytes(&head)?;
        }
        Ok(Types { types, names, starts })
    }

    /// The offset of a member in bytes. Members of unnamed structures count as members of the
    /// structure around them, as in C.
    pub(super) fn offset(&self, structure: &str, member: &str) -> Result<u64, Reason> {
        let missing = || {
            Reason::new(format!(
                "the kernel's description of its types (BTF) has no member {member} in struct \
                 {structure}"
            ))
        };
        for start in self.starts.iter().skip(1) {
            let head = head(self.types, *start)?;
            let is_it = head.kind == STRUCT && head.members > 0;
            if is_it && self.is_called(head.name, structure) {
                let bits = self.bits(head, member, DEPTH)?.ok_or_else(missing)?;
                return Ok(u64::from(bits / 8));
            }
        }
        Err(missing())
    }

    /// The offset of a member in bits.
    fn bits(&self, of: Head, member: &str, depth: u32) -> Result<Option<u32>, Reason> {
        for index in 0..of.members {
            let at = of.at + index * MEMBER_BYTES;
            let [name, kind, offset] = [0, 4, 8].map(|field| number(self.types, at + field));
            let (name, offset) = (name?, offset?);
            let offset = if of.has_bit_fields { offset & 0x00FF_FFFF } else { offset };
            if name != 0 {
                if self.is_called(name, member) {
                    return Ok(Some(offset));
                }
                continue;
            }
            let start = *self.starts.get(kind? as usize).ok_or_else(damaged)?;
            let inner = head(self.types, start)?;
            if depth == 0 || !matches!(inner.kind, STRUCT | UNION) {
                continue;
            }
            if let Some(inside) = self.bits(inner, member, depth - 1)? {
                return offset.checked_add(inside).map(Some).ok_or_else(damaged);
            }
        }
        Ok(None)
    }

    fn is_called(&self, name: u32, text: &str) -> bool {
        let rest = self.names.get(name as usize..).unwrap_or_default();
        rest.strip_prefix(text.as_bytes()).is_some_and(|rest| rest.first() == Some(&0))
    }
}

fn head(types: &[u8], at: usize) -> Result<Head, Reason> {
    let info = number(types, at.saturating_add(4))?;
    Ok(Head {
        name: number(types, at)?,
        kind: info >> 24 & 0x1F,
        members: (info & 0xFFFF) as usize,
        has_bit_fields: info >> 31 == 1,
        at: at + TYPE_BYTES,
    })
}

/// The bytes that follow a type.
fn following_bytes(head: &Head) -> Result<usize, Reason> {
    Ok(match head.kind {
        // A pointer, a forward declaration, a typedef, volatile, const, restrict, a function, a
        // floating-point type, a type tag.
        2 | 7..=12 | 16 | 18 => 0,
        // An integer, a variable, a declaration tag.
        1 | 14 | 17 => 4,
        // An array.
        3 => 12,
        // A structure, a union, a section of data, an enumeration of 64 bits.
        STRUCT | UNION | 15 | 19 => head.members * 12,
        // An enumeration, the parameters of a function.
        6 | 13 => head.members * 8,
        unknown => {
            return Err(Reason::new(format!(
                "the kernel's description of its types (BTF) has a kind of type, {unknown}, that \
                 this version of pageleap does not know"
            )));
        }
    })
}

fn number(bytes: &[u8], at: usize) -> Result<u32, Reason> {
    let field = at.checked_add(4).and_then(|end| bytes.get(at..end)).ok_or_else(damaged)?;
    Ok(u32::from_le_bytes(field.try_into().expect("four bytes")))
}

fn damaged() -> Reason {
    Reason::new("the kernel's description of its types (BTF) is damaged".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A description with these types and names.
    fn described(types: &[u32], names: &[u8]) -> Vec<u8> {
        let words = |words: &[u32]| -> Vec<u8> {
            words.iter().flat_map(|word| word.to_le_bytes()).collect()
        };
        let types = words(types);
        let mut bytes = vec![0x9F, 0xEB, 1, 0];
        bytes.extend(words(&[24, 0, types.len() as u32, types.len() as u32, names.len() as u32]));
        bytes.extend(&types);
        bytes.extend(names);
        bytes
    }

    const NAMES: &[u8] = b"\0mm_struct\0pgd\0map_count\0";

    /// `struct mm_struct { struct { int; union { pgd } }; map_count : 3 }`, after an integer, an
    /// enumeration with two values, and a forward declaration of the same name.
    fn example() -> Vec<u8> {
        let (int, pgd, map_count) = (1, 11, 15);
        let mut types = vec![0, 1 << 24, 4, 32]; // 1: an integer
        types.extend([0, 6 << 24 | 2, 4, 0, 0, 0, 1]); // 2: an enumeration
        types.extend([1, 7 << 24, 0]); // 3: a forward declaration of mm_struct
        types.extend([0, 5 << 24 | 1, 8, pgd, int, 0]); // 4: a union
        types.extend([0, 4 << 24 | 2, 16, 15, int, 0, 0, 4, 64]); // 5: an unnamed structure
        types.extend([1, 1 << 31 | 4 << 24 | 2, 32, 0, 5, 128, map_count, int, 3 << 24 | 256]);
        described(&types, NAMES)
    }

    #[test]
    fn a_member_is_found_in_unnamed_structures() {
        let bytes = example();
        let types = Types::parse(&bytes).unwrap();
        assert_eq!(types.offset("mm_struct", "pgd").unwrap(), 16 + 8);
        // The first one of that name, in the unnamed structure.
        assert_eq!(types.offset("mm_struct", "map_count").unwrap(), 16);
        for (structure, member) in [("mm_struct", "pg"), ("mm_struc", "pgd"), ("pgd", "pgd")] {
            let reason = types.offset(structure, member).unwrap_err().to_string();
            assert!(reason.contains(&format!("no member {member} in struct {structure}")));
        }
    }

    #[test]
    fn damage_is_told() {
        let bytes = example();
        for length in [0, 10, HEADER_BYTES, bytes.len() - 1] {
            assert!(Types::parse(&bytes[..length]).is_err(), "{length} bytes");
        }
        let mut other = bytes.clone();
        other[0] = 0;
        assert!(Types::parse(&other).is_err());
        let mut unknown = bytes;
        unknown[HEADER_BYTES + 7] = 31;
        let reason = Types::parse(&unknown).err().unwrap().to_string();
        assert!(reason.contains("kind of type, 31"), "{reason}");
    }

    #[test]
    fn the_running_kernel_has_what_a_walk_needs() {
        let Ok(bytes) = std::fs::read("/sys/kernel/btf/vmlinux") else {
            return; // a kernel without BTF; `doctor` and `status` say so
        };
        let types = Types::parse(&bytes).unwrap();
        for (structure, member) in super::super::MEMBERS {
            types.offset(structure, member).unwrap_or_else(|reason| panic!("{reason}"));
        }
        // Two pointers of 8 bytes.
        assert_eq!(types.offset("list_head", "prev").unwrap(), 8);
    }
}
