//! A table of TPC-H, and two of its queries: the data of `demo` and of `bench tpch`.

pub mod lineitem;
pub mod queries;

use std::ops::Range;
use std::sync::atomic::AtomicU64;

use pageleap::Plain;

use self::lineitem::{Array, Layout};
use self::queries::Columns;

/// The columns that the queries read, of a table in `words`.
///
/// # Safety
/// The table has been written, and no thread writes to these columns while they are borrowed. Their
/// pages may move: leaps promise that readers see the same bytes throughout.
///
/// # Panics
/// If `words` is smaller than the table.
pub unsafe fn columns<'a>(words: &'a [AtomicU64], layout: &Layout) -> Columns<'a> {
    let range = |array| -> Range<usize> { layout.range(array) };
    // SAFETY: the columns contain elements of these types, and the caller keeps writers away.
    unsafe {
        Columns {
            quantity: slice(words, range(Array::Quantity)),
            extended_price: slice(words, range(Array::ExtendedPrice)),
            discount: slice(words, range(Array::Discount)),
            tax: slice(words, range(Array::Tax)),
            return_flag: slice(words, range(Array::ReturnFlag)),
            line_status: slice(words, range(Array::LineStatus)),
            ship_date: slice(words, range(Array::ShipDate)),
        }
    }
}

/// The column that writers change: no query reads it.
///
/// # Panics
/// If `words` is smaller than the table.
pub fn order_keys<'a>(words: &'a [AtomicU64], layout: &Layout) -> &'a [AtomicU64] {
    let Range { start, end } = layout.range(Array::OrderKey);
    &words[start / size_of::<u64>()..end / size_of::<u64>()]
}

/// Every byte after the column that writers change.
///
/// # Safety
/// No thread writes to them while they are borrowed.
///
/// # Panics
/// If `words` is smaller than the table.
pub unsafe fn other_columns<'a>(words: &'a [AtomicU64], layout: &Layout) -> &'a [u64] {
    let range = layout.range(Array::PartKey).start..size_of_val(words);
    // SAFETY: the caller keeps writers away.
    unsafe { slice(words, range) }
}

/// A part of the words as elements of a type.
///
/// # Safety
/// No thread writes to the part while the slice is borrowed.
unsafe fn slice<T: Plain>(words: &[AtomicU64], range: Range<usize>) -> &[T] {
    assert!(range.start <= range.end && range.end <= size_of_val(words));
    assert!([range.start, range.len()].iter().all(|bytes| bytes.is_multiple_of(size_of::<T>())));
    // SAFETY: the part lies in the words, which are initialized and start at a page, and elements
    // are aligned to their size. All bit patterns of `T` are valid. The caller keeps writers away.
    unsafe {
        let start = words.as_ptr().cast::<u8>().add(range.start);
        std::slice::from_raw_parts(start.cast(), range.len() / size_of::<T>())
    }
}
