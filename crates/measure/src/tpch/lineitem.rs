//! TPC-H `lineitem` with all 16 columns, stored as arrays in one contiguous range of memory.
//!
//! ```text
//! base                                                          base + bytes()
//! |L_ORDERKEY i64 x rows|..|L_PARTKEY i64 x rows|..| ... |..|L_COMMENT text|
//! ^ 0                      ^ multiple of 64              padding of < 64 bytes
//! ```
//!
//! Decimals are hundredths in an `i64`. Dates are days since 1970-01-01 in an `i32`. Flags are one
//! byte. Spaces pad the two short texts to their declared width. `L_COMMENT` takes two arrays. One
//! has the start of each row's text, and one more entry for the end. The other has the texts one
//! after the other. A start is 4 bytes wide, or 8 bytes if the texts exceed 4 GiB.
//!
//! The generator runs twice. The first pass counts the rows and the comment bytes of each part, and
//! the second pass writes the rows. The extra pass costs a second or two at scale factor 1 and
//! saves a second copy of the table. So only the two pools limit the largest table that fits a
//! machine.

use std::ops::Range;
use std::panic::resume_unwind;
use std::ptr::NonNull;
use std::thread;

use tpchgen::distribution::Distributions;
use tpchgen::generators::{LineItem, LineItemGenerator};
use tpchgen::text::TextPool;

/// Every array starts at a multiple of this many bytes: one cache line.
pub const ARRAY_ALIGN: usize = 64;

/// Size of the text that the generator cuts comments from. The TPC-H generator prescribes this
/// size.
pub const TEXT_POOL_BYTES: u64 = 300 << 20;

/// Smallest scale factor. A smaller table would have less than one supplier, which the generator
/// cannot express.
pub const MIN_SCALE_FACTOR: f64 = 0.0001;

/// Rows of `lineitem` at scale factor 1. At other factors the number differs from a multiple of
/// this by chance only.
pub const ROWS_AT_SF1: u64 = 6_001_215;

/// Orders at scale factor 1. Their number is exact at every scale, and `lineitem` has 1 to 7 rows
/// for each.
const ORDERS_AT_SF1: f64 = 1_500_000.0;

/// Average bytes of a row over all arrays at scale factor 1, rounded up.
const BYTES_PER_ROW: f64 = 140.0;

/// Rows between two calls of the watch function.
const ROWS_PER_WATCH: u64 = 8192;

const SHIP_INSTRUCT_BYTES: usize = 25;
const SHIP_MODE_BYTES: usize = 10;
const ARRAYS: usize = 17;

/// The arrays, in the order in which they lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Array {
    /// `L_ORDERKEY`, `i64`; the column that the demo's writer changes.
    OrderKey,
    /// `L_PARTKEY`, `i64`.
    PartKey,
    /// `L_SUPPKEY`, `i64`.
    SuppKey,
    /// `L_LINENUMBER`, `i32`.
    LineNumber,
    /// `L_QUANTITY`, `i64`, whole units.
    Quantity,
    /// `L_EXTENDEDPRICE`, `i64`, hundredths.
    ExtendedPrice,
    /// `L_DISCOUNT`, `i64`, hundredths.
    Discount,
    /// `L_TAX`, `i64`, hundredths.
    Tax,
    /// `L_RETURNFLAG`, one byte.
    ReturnFlag,
    /// `L_LINESTATUS`, one byte.
    LineStatus,
    /// `L_SHIPDATE`, `i32`, days since 1970-01-01.
    ShipDate,
    /// `L_COMMITDATE`, `i32`, days since 1970-01-01.
    CommitDate,
    /// `L_RECEIPTDATE`, `i32`, days since 1970-01-01.
    ReceiptDate,
    /// `L_SHIPINSTRUCT`, 25 bytes, padded with spaces.
    ShipInstruct,
    /// `L_SHIPMODE`, 10 bytes, padded with spaces.
    ShipMode,
    /// Where each row's `L_COMMENT` starts, and where the last one ends.
    CommentStart,
    /// The `L_COMMENT` texts.
    CommentText,
}

impl Array {
    /// All arrays, in memory order.
    pub const ALL: [Array; ARRAYS] = [
        Array::OrderKey,
        Array::PartKey,
        Array::SuppKey,
        Array::LineNumber,
        Array::Quantity,
        Array::ExtendedPrice,
        Array::Discount,
        Array::Tax,
        Array::ReturnFlag,
        Array::LineStatus,
        Array::ShipDate,
        Array::CommitDate,
        Array::ReceiptDate,
        Array::ShipInstruct,
        Array::ShipMode,
        Array::CommentStart,
        Array::CommentText,
    ];
}

/// The place of each array, in bytes from the base.
#[derive(Clone, Debug)]
pub struct Layout {
    rows: usize,
    wide_starts: bool,
    ranges: [Range<usize>; ARRAYS],
}

impl Layout {
    /// The layout for `rows` rows with `comment_bytes` bytes of comments in total.
    pub fn new(rows: usize, comment_bytes: usize) -> Layout {
        let wide_starts = u32::try_from(comment_bytes).is_err();
        let mut next = 0;
        let ranges = Array::ALL.map(|array| {
            let len = match array {
                Array::OrderKey
                | Array::PartKey
                | Array::SuppKey
                | Array::Quantity
                | Array::ExtendedPrice
                | Array::Discount
                | Array::Tax => rows * size_of::<i64>(),
                Array::LineNumber | Array::ShipDate | Array::CommitDate | Array::ReceiptDate => {
                    rows * size_of::<i32>()
                }
                Array::ReturnFlag | Array::LineStatus => rows,
                Array::ShipInstruct => rows * SHIP_INSTRUCT_BYTES,
                Array::ShipMode => rows * SHIP_MODE_BYTES,
                Array::CommentStart => {
                    (rows + 1) * if wide_starts { size_of::<u64>() } else { size_of::<u32>() }
                }
                Array::CommentText => comment_bytes,
            };
            let start = next;
            next = (start + len).next_multiple_of(ARRAY_ALIGN);
            start..start + len
        });
        Layout { rows, wide_starts, ranges }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes from the base that `array` occupies.
    pub fn range(&self, array: Array) -> Range<usize> {
        self.ranges[array as usize].clone()
    }

    /// Bytes from the base to the end of the last array.
    pub fn bytes(&self) -> usize {
        self.ranges[ARRAYS - 1].end
    }

    fn at(&self, array: Array, row: usize, width: usize) -> usize {
        self.ranges[array as usize].start + row * width
    }
}

/// Bytes that the table will take at `scale_factor`, to about one percent. Generates no rows.
pub fn estimate_bytes(scale_factor: f64) -> f64 {
    scale_factor * ROWS_AT_SF1 as f64 * BYTES_PER_ROW
}

/// Receives the number of rows produced since its last call. Returns `false` to stop the
/// generation.
pub type Watch<'a> = &'a (dyn Fn(u64) -> bool + Sync);

/// Rows and comment bytes of one part of the table.
#[derive(Clone, Copy, Debug)]
struct PartSize {
    rows: usize,
    comment_bytes: usize,
}

/// Makes the text that the generator cuts comments from. The caller owns the text and can free its
/// memory before the measurement.
pub fn text_pool() -> TextPool {
    TextPool::new(TEXT_POOL_BYTES as i32, Distributions::static_default())
}

/// A table of one scale factor, sized and ready to be written.
pub struct Generator<'a> {
    scale_factor: f64,
    text: &'a TextPool,
    parts: Vec<PartSize>,
}

impl<'a> Generator<'a> {
    /// About how many rows [`size`](Self::size) will report to its watch.
    pub fn expected_rows(scale_factor: f64) -> u64 {
        (scale_factor * ROWS_AT_SF1 as f64) as u64
    }

    /// Generates every row once, in `threads` parts, to learn the sizes of the parts. `None` if the
    /// watch stopped the generation.
    pub fn size(
        text: &'a TextPool,
        scale_factor: f64,
        threads: usize,
        watch: Watch,
    ) -> Option<Generator<'a>> {
        let orders = (ORDERS_AT_SF1 * scale_factor) as usize;
        let parts = threads.clamp(1, orders.max(1));
        let sizes = in_parallel(parts, |part| {
            let mut size = PartSize { rows: 0, comment_bytes: 0 };
            let stopped = !for_each_row(text, scale_factor, part, parts, watch, |row| {
                size.rows += 1;
                size.comment_bytes += row.l_comment.len();
            });
            (!stopped).then_some(size)
        });
        let parts = sizes.into_iter().collect::<Option<Vec<_>>>()?;
        Some(Generator { scale_factor, text, parts })
    }

    /// The layout that this table needs.
    pub fn layout(&self) -> Layout {
        Layout::new(
            self.parts.iter().map(|part| part.rows).sum(),
            self.parts.iter().map(|part| part.comment_bytes).sum(),
        )
    }

    /// Generates the rows again and writes them. `false` if the watch stopped the generation
    /// half-way.
    ///
    /// # Safety
    ///
    /// `base` is aligned to [`ARRAY_ALIGN`]. The [`Layout::bytes`] bytes from `base` on are mapped
    /// and writable, and nothing else reads or writes them during the call.
    pub unsafe fn write(&self, base: NonNull<u8>, watch: Watch) -> bool {
        let layout = self.layout();
        let target = Target { base: base.as_ptr(), layout: &layout };
        let parts = self.parts.len();
        let finished = in_parallel(parts, |part| {
            let before = &self.parts[..part];
            let mut row_index: usize = before.iter().map(|part| part.rows).sum();
            let mut text_at: usize = before.iter().map(|part| part.comment_bytes).sum();
            for_each_row(self.text, self.scale_factor, part, parts, watch, |row| {
                // SAFETY: each part starts where the sizes of the parts before it end, and the
                // generator is deterministic. So every row index is below `rows`, every text lies
                // inside the text array, and no two threads write the same row.
                unsafe { target.write_row(row_index, text_at, row) };
                row_index += 1;
                text_at += row.l_comment.len();
            })
        });
        let end = self.parts.iter().map(|part| part.comment_bytes).sum();
        // SAFETY: the starts have `rows + 1` entries; the threads have ended.
        unsafe { target.write_start(layout.rows(), end) };
        finished.into_iter().all(|finished| finished)
    }
}

/// Runs `work` for each number of 0..parts, each on its own thread. The results are in the order of
/// the numbers.
fn in_parallel<T: Send>(parts: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..parts).map(|part| scope.spawn(move || work(part))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    })
}

/// Passes every row of one part to `take`. `false` if the watch stopped the generation.
fn for_each_row(
    text: &TextPool,
    scale_factor: f64,
    part: usize,
    parts: usize,
    watch: Watch,
    mut take: impl FnMut(&LineItem),
) -> bool {
    // The generator counts parts from 1.
    let (part, parts) = (part as i32 + 1, parts as i32);
    let generator = LineItemGenerator::new_with_distributions_and_text_pool(
        scale_factor,
        part,
        parts,
        Distributions::static_default(),
        text,
    );
    let mut since_watch = 0;
    for row in generator.iter() {
        take(&row);
        since_watch += 1;
        if since_watch == ROWS_PER_WATCH {
            if !watch(since_watch) {
                return false;
            }
            since_watch = 0;
        }
    }
    watch(since_watch)
}

/// The memory that receives a table.
struct Target<'a> {
    base: *mut u8,
    layout: &'a Layout,
}

// SAFETY: the threads of `Generator::write` write disjoint rows through a `Target` and read
// nothing.
unsafe impl Sync for Target<'_> {}

impl Target<'_> {
    /// # Safety
    ///
    /// As for [`Generator::write`]; `row < rows`; the row's text fits at `text_at`.
    unsafe fn write_row(&self, row: usize, text_at: usize, item: &LineItem) {
        // SAFETY: every array has an element for each row, and each element starts its own size
        // after the previous one.
        unsafe {
            self.put(Array::OrderKey, row, item.l_orderkey);
            self.put(Array::PartKey, row, item.l_partkey);
            self.put(Array::SuppKey, row, item.l_suppkey);
            self.put(Array::LineNumber, row, item.l_linenumber);
            self.put(Array::Quantity, row, item.l_quantity);
            self.put(Array::ExtendedPrice, row, item.l_extendedprice.into_inner());
            self.put(Array::Discount, row, item.l_discount.into_inner());
            self.put(Array::Tax, row, item.l_tax.into_inner());
            self.put(Array::ReturnFlag, row, item.l_returnflag.as_bytes()[0]);
            self.put(Array::LineStatus, row, item.l_linestatus.as_bytes()[0]);
            self.put(Array::ShipDate, row, item.l_shipdate.to_unix_epoch());
            self.put(Array::CommitDate, row, item.l_commitdate.to_unix_epoch());
            self.put(Array::ReceiptDate, row, item.l_receiptdate.to_unix_epoch());
            self.put(Array::ShipInstruct, row, padded::<SHIP_INSTRUCT_BYTES>(item.l_shipinstruct));
            self.put(Array::ShipMode, row, padded::<SHIP_MODE_BYTES>(item.l_shipmode));
            self.write_start(row, text_at);
            let text = self.layout.range(Array::CommentText).start + text_at;
            self.base
                .add(text)
                .copy_from_nonoverlapping(item.l_comment.as_ptr(), item.l_comment.len());
        }
    }

    /// # Safety
    ///
    /// As for [`Generator::write`]; `row <= rows`.
    unsafe fn write_start(&self, row: usize, text_at: usize) {
        // SAFETY: the caller keeps the conditions of `put`. `wide_starts` says which width the
        // layout gave the array.
        unsafe {
            if self.layout.wide_starts {
                self.put(Array::CommentStart, row, text_at as u64);
            } else {
                self.put(Array::CommentStart, row, text_at as u32);
            }
        }
    }

    /// # Safety
    ///
    /// As for [`Generator::write`]; `array` has more than `row` elements, and each has the size of
    /// `T`.
    unsafe fn put<T>(&self, array: Array, row: usize, value: T) {
        let at = self.layout.at(array, row, size_of::<T>());
        // SAFETY: the precondition keeps the address inside the array. The address is aligned,
        // because arrays start at a multiple of 64 and elements are their own size apart.
        unsafe { self.base.add(at).cast::<T>().write(value) };
    }
}

fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [b' '; N];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    bytes
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A cache line, so that a vector of lines has the alignment that the arrays need.
    #[derive(Clone, Copy)]
    #[repr(C, align(64))]
    struct Line([u8; ARRAY_ALIGN]);

    /// A table in ordinary memory.
    pub struct Table {
        pub layout: Layout,
        memory: Vec<Line>,
    }

    /// One text for all tests, because making the text takes longer than most tests.
    fn shared_text() -> &'static TextPool {
        let text = TextPool::get_or_init_default();
        assert_eq!(text.size() as u64, TEXT_POOL_BYTES);
        text
    }

    impl Table {
        pub fn new(scale_factor: f64, threads: usize) -> Table {
            let generator =
                Generator::size(shared_text(), scale_factor, threads, &|_| true).unwrap();
            let layout = generator.layout();
            let mut memory = vec![Line([0xAA; ARRAY_ALIGN]); layout.bytes().div_ceil(ARRAY_ALIGN)];
            let base = NonNull::new(memory.as_mut_ptr().cast::<u8>()).unwrap();
            // SAFETY: `memory` is large enough, aligned, and owned by this function.
            assert!(unsafe { generator.write(base, &|_| true) });
            Table { layout, memory }
        }

        pub fn array<T: Copy>(&self, array: Array) -> &[T] {
            let range = self.layout.range(array);
            // SAFETY: the array was written, and the callers choose `T` to match its elements.
            unsafe {
                let start = self.memory.as_ptr().cast::<u8>().add(range.start);
                std::slice::from_raw_parts(start.cast::<T>(), range.len() / size_of::<T>())
            }
        }
    }

    #[test]
    fn arrays_are_aligned_ordered_and_disjoint() {
        for (rows, text) in [(0, 0), (1, 5), (63, 64), (1000, 27_001), (7, 5 << 30)] {
            let layout = Layout::new(rows, text);
            let mut end = 0;
            for array in Array::ALL {
                let range = layout.range(array);
                assert!(range.start >= end && range.start - end < ARRAY_ALIGN, "{array:?}");
                assert_eq!(range.start % ARRAY_ALIGN, 0, "{array:?}");
                end = range.end;
            }
            assert_eq!(end, layout.bytes());
        }
    }

    #[test]
    fn comment_starts_widen_only_above_4_gib() {
        let width = |text| Layout::new(9, text).range(Array::CommentStart).len() / 10;
        assert_eq!(width(u32::MAX as usize), 4);
        assert_eq!(width(u32::MAX as usize + 1), 8);
    }

    #[test]
    fn every_column_of_every_row_reads_back() {
        let scale_factor = 0.001;
        for threads in [1, 3] {
            let table = Table::new(scale_factor, threads);
            let starts = table.array::<u32>(Array::CommentStart);
            let text = table.array::<u8>(Array::CommentText);
            let mut rows = 0;
            for (row, item) in LineItemGenerator::new(scale_factor, 1, 1).iter().enumerate() {
                let fixed = |array, width: usize| {
                    let bytes = &table.array::<u8>(array)[row * width..][..width];
                    std::str::from_utf8(bytes).unwrap().trim_end().to_owned()
                };
                assert_eq!(table.array::<i64>(Array::OrderKey)[row], item.l_orderkey);
                assert_eq!(table.array::<i64>(Array::PartKey)[row], item.l_partkey);
                assert_eq!(table.array::<i64>(Array::SuppKey)[row], item.l_suppkey);
                assert_eq!(table.array::<i32>(Array::LineNumber)[row], item.l_linenumber);
                assert_eq!(table.array::<i64>(Array::Quantity)[row], item.l_quantity);
                assert_eq!(table.array::<i64>(Array::ExtendedPrice)[row], item.l_extendedprice.0);
                assert_eq!(table.array::<i64>(Array::Discount)[row], item.l_discount.0);
                assert_eq!(table.array::<i64>(Array::Tax)[row], item.l_tax.0);
                assert_eq!(fixed(Array::ReturnFlag, 1), item.l_returnflag);
                assert_eq!(fixed(Array::LineStatus, 1), item.l_linestatus);
                assert_eq!(
                    table.array::<i32>(Array::ShipDate)[row],
                    item.l_shipdate.to_unix_epoch()
                );
                assert_eq!(
                    table.array::<i32>(Array::CommitDate)[row],
                    item.l_commitdate.to_unix_epoch()
                );
                assert_eq!(
                    table.array::<i32>(Array::ReceiptDate)[row],
                    item.l_receiptdate.to_unix_epoch()
                );
                assert_eq!(fixed(Array::ShipInstruct, SHIP_INSTRUCT_BYTES), item.l_shipinstruct);
                assert_eq!(fixed(Array::ShipMode, SHIP_MODE_BYTES), item.l_shipmode);
                let comment = &text[starts[row] as usize..starts[row + 1] as usize];
                assert_eq!(comment, item.l_comment.as_bytes());
                rows += 1;
            }
            assert_eq!(rows, table.layout.rows());
        }
    }

    #[test]
    fn estimate_is_close_to_the_exact_size() {
        let exact =
            Generator::size(shared_text(), 0.01, 2, &|_| true).unwrap().layout().bytes() as f64;
        let ratio = estimate_bytes(0.01) / exact;
        assert!((0.98..1.03).contains(&ratio), "{ratio}");
    }

    #[test]
    fn the_watch_stops_the_generation() {
        assert!(Generator::size(shared_text(), 0.01, 2, &|_| false).is_none());
    }

    #[test]
    fn the_smallest_scale_factor_works() {
        assert!(Table::new(MIN_SCALE_FACTOR, 2).layout.rows() >= 150);
    }
}
