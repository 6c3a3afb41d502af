//! The memory of the kernel as `/proc/kcore` shows it: an ELF core file whose segments are the
//! kernel's image and all memory.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use elf::abi::{PT_LOAD, PT_NOTE};
use elf::endian::LittleEndian;
use elf::note::{Note, NoteIterator};
use elf::{ElfStream, file::Class};
use pageleap::BASE_PAGE;

use super::Reason;

/// Where the kernel's image begins (`__START_KERNEL_map`). Below it the kernel addresses all
/// memory.
const IMAGE: u64 = 0xFFFF_FFFF_8000_0000;

/// Reads between two pauses. A pause lasts as long as the reads took, so that reading takes at most
/// half of the time.
const READS_AT_ONCE: u32 = 64;

/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// An address of the kernel. It has no text form, because addresses of the kernel are a secret that
/// protects it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct KernelAddress(pub(super) u64);

impl KernelAddress {
    /// The address that lies `bytes` behind it.
    pub(super) fn plus(self, bytes: u64) -> KernelAddress {
        KernelAddress(self.0.wrapping_add(bytes))
    }
}

/// An open core file.
pub(super) struct Core {
    file: File,
    segments: Vec<Segment>,
    /// Reads since the last pause, and its end.
    pace: Cell<(u32, Instant)>,
    /// Whether page tables have five levels and not four.
    pub(super) has_five_levels: bool,
    /// The bits of entries that AMD's memory encryption sets (`sme_mask`).
    pub(super) encryption_bits: u64,
}

/// Memory that lies in one piece, as the kernel addresses it and in the file.
struct Segment {
    address: u64,
    bytes: u64,
    offset: u64,
    /// The physical address of its beginning, if the kernel tells it.
    physical: Option<u64>,
}

impl Core {
    /// Opens a core file and reads its head.
    ///
    /// `lockdown` is the file with the state of the kernel's lockdown.
    pub(super) fn open(path: &Path, lockdown: &Path) -> Result<Core, Reason> {
        let opened = || File::open(path).map_err(|error| refused(path, &error, lockdown));
        let file = opened()?;
        let name = path.display();
        let damaged =
            |what: &str| Reason::new(format!("{name} is not what the kernel makes: it has {what}"));
        // The messages of the library may have addresses in them.
        let mut elf =
            ElfStream::<LittleEndian, File>::open_stream(opened()?).map_err(
                |_| match fs::metadata(path).is_ok_and(|found| found.len() == 0) {
                    true => Reason::new(format!("{name} is empty, as containers make it")),
                    false => damaged("no head of an ELF file"),
                },
            )?;
        let loads = elf.segments().iter().filter(|segment| segment.p_type == PT_LOAD);
        let segments: Vec<Segment> = loads
            .map(|load| Segment {
                address: load.p_vaddr,
                bytes: load.p_memsz,
                offset: load.p_offset,
                // `(elf_addr_t)-1` for memory that has none.
                physical: Some(load.p_paddr).filter(|physical| *physical != u64::MAX),
            })
            .collect();
        let notes = elf.segments().iter().find(|segment| segment.p_type == PT_NOTE).copied();
        let notes = notes.ok_or_else(|| damaged("no notes"))?;
        let notes = elf.segment_data(&notes).map_err(|_| damaged("notes that cannot be read"))?;
        // The kernel's notes are aligned to 4 bytes; Linux before 6.10 does not say so in the file.
        let info =
            NoteIterator::new(LittleEndian, Class::ELF64, 4, notes).find_map(|note| match note {
                Note::Unknown(note) if note.name.starts_with(b"VMCOREINFO") => {
                    Some(String::from_utf8_lossy(note.desc).into_owned())
                }
                _ => None,
            });
        let info = info.ok_or_else(|| damaged("no note VMCOREINFO (Linux 4.19)"))?;
        let levels = value(&info, "NUMBER(pgtable_l5_enabled)");
        let levels = levels.ok_or_else(|| damaged("no number of levels of page tables"))?;
        let encryption_bits = value(&info, "NUMBER(sme_mask)").unwrap_or(0) as u64;
        let pace = Cell::new((0, Instant::now()));
        Ok(Core { file, segments, pace, has_five_levels: levels != 0, encryption_bits })
    }

    /// Reads at an address of the kernel, and pauses from time to time. `None`: there is no memory,
    /// or not all of it.
    pub(super) fn read(&self, at: KernelAddress, into: &mut [u8]) -> Option<()> {
        let (reads, since) = self.pace.get();
        self.pace.set((reads + 1, since));
        if reads >= READS_AT_ONCE {
            std::thread::sleep(since.elapsed().min(LONGEST_PAUSE));
            self.pace.set((0, Instant::now()));
        }
        let segment = self.segments.iter().find(|segment| segment.has(at, into.len() as u64))?;
        self.file.read_exact_at(into, segment.offset.checked_add(at.0 - segment.address)?).ok()
    }

    /// Reads a number of 8 bytes.
    pub(super) fn number(&self, at: KernelAddress) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(at, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    }

    /// The physical address of memory that the kernel addresses so.
    pub(super) fn physical(&self, at: KernelAddress) -> Option<u64> {
        let is_told = |segment: &&Segment| segment.physical.is_some() && segment.has(at, 1);
        let segment = self.segments.iter().find(is_told)?;
        segment.physical?.checked_add(at.0 - segment.address)
    }

    /// The address of the kernel for the page with this physical address. `None`: no memory.
    ///
    /// Not in the kernel's image: that has parts whose memory was given back, and which the kernel
    /// no longer addresses there.
    pub(super) fn page(&self, physical: u64) -> Option<KernelAddress> {
        let mut of_memory = self.segments.iter().filter(|segment| segment.address < IMAGE);
        of_memory.find_map(|segment| {
            let offset = physical.checked_sub(segment.physical?)?;
            let at = KernelAddress(segment.address.wrapping_add(offset));
            segment.has(at, BASE_PAGE as u64).then_some(at)
        })
    }
}

impl Segment {
    fn has(&self, at: KernelAddress, bytes: u64) -> bool {
        let left = at.0.checked_sub(self.address).and_then(|offset| self.bytes.checked_sub(offset));
        left.is_some_and(|left| left >= bytes)
    }
}

/// A line `KEY=NUMBER` of VMCOREINFO.
fn value(info: &str, key: &str) -> Option<i64> {
    let line = info.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))?;
    line.trim().parse().ok()
}

/// Why the file cannot be opened, and what would help.
pub(super) fn refused(path: &Path, error: &std::io::Error, lockdown: &Path) -> Reason {
    let name = path.display();
    let is_locked = || {
        let state = fs::read_to_string(lockdown).unwrap_or_default();
        state.contains("[confidentiality]")
    };
    Reason::new(match error.kind() {
        ErrorKind::NotFound => {
            format!("there is no {name}: the kernel was built without it (CONFIG_PROC_KCORE)")
        }
        ErrorKind::PermissionDenied if is_locked() => {
            "the kernel is in the lockdown mode `confidentiality`, in which nobody may read its \
             memory"
                .to_owned()
        }
        ErrorKind::PermissionDenied => {
            format!(
                "{name} may be read by root only, with the privilege CAP_SYS_RAWIO, and by nobody if \
                 the kernel is in the lockdown mode `confidentiality`"
            )
        }
        _ => format!("{name} cannot be opened: {error}"),
    })
}
