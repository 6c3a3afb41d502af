//! What every function does with the values that C passes. Pointers are checked, structures may be
//! of older or newer headers, and panics end here.

use std::ffi::{CStr, c_char, c_int};
use std::mem::{MaybeUninit, size_of};
use std::panic::{AssertUnwindSafe, catch_unwind};

use pageleap::Error;

use crate::status::{note, note_defect, pageleap_status};

/// A `bool` of a structure, which is `bool` in the header. A program in another language may
/// store any value in it.
#[allow(non_camel_case_types)]
pub(crate) type flag = u8;

/// Runs the body of a function, which gives `Result<(), Error>`.
macro_rules! boundary {
    ($body:block) => {
        $crate::boundary::run(|| -> Result<(), ::pageleap::Error> { $body })
    };
}

/// Runs the body of a function, and keeps its error for the thread.
pub(crate) fn run(body: impl FnOnce() -> Result<(), Error>) -> pageleap_status {
    let _uncancelled = Uncancelled::new();
    let ended = catch_unwind(AssertUnwindSafe(|| match body() {
        Ok(()) => pageleap_status::PAGELEAP_OK,
        Err(error) => note(&error),
    }));
    ended.unwrap_or_else(|panic| {
        let defect = catch_unwind(AssertUnwindSafe(|| note_defect(&panic_text(&*panic))));
        defect.unwrap_or(pageleap_status::PAGELEAP_DEFECT)
    })
}

/// Holds `pthread_cancel` back while Rust runs, because it must not unwind through Rust. It
/// takes effect afterwards.
struct Uncancelled(c_int);

unsafe extern "C" {
    // pthread.h; 1 is PTHREAD_CANCEL_DISABLE.
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

impl Uncancelled {
    fn new() -> Uncancelled {
        let mut before = 0;
        // SAFETY: changes the state of the calling thread only.
        unsafe { pthread_setcancelstate(1, &mut before) };
        Uncancelled(before)
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: as above. Enabling it is not a cancellation point.
        unsafe { pthread_setcancelstate(self.0, std::ptr::null_mut()) };
    }
}

/// Runs the body of a function that returns a value; returns `otherwise` if the body fails.
pub(crate) fn value<T>(otherwise: T, body: impl FnOnce() -> Result<T, Error>) -> T {
    let mut result = otherwise;
    run(|| {
        result = body()?;
        Ok(())
    });
    result
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

/// The error of an argument that is not possible.
pub(crate) fn bad(
    what: &'static str,
    reason: impl Into<String>,
    remedy: impl Into<String>,
) -> Error {
    Error::BadArgument { what, reason: reason.into(), remedy: remedy.into() }
}

fn null(what: &'static str) -> Error {
    bad(what, "it is NULL", "pass a pointer")
}

/// What a handle points to.
///
/// # Safety
/// A pointer that is not NULL is one that this library has given out as such, and not
/// freed.
pub(crate) unsafe fn handle<'a, T>(pointer: *const T, what: &'static str) -> Result<&'a T, Error> {
    // SAFETY: forwarded to the caller.
    unsafe { pointer.as_ref() }.ok_or_else(|| null(what))
}

/// Sets the place for what a function gives out to NULL, before anything else can fail.
///
/// # Safety
/// A pointer that is not NULL may be written to.
pub(crate) unsafe fn nothing_yet<T>(out: *mut *mut T) {
    if !out.is_null() {
        // SAFETY: forwarded to the caller.
        unsafe { out.write(std::ptr::null_mut()) };
    }
}

/// Gives out a value behind a handle. If `out` is NULL, makes nothing.
///
/// # Safety
/// A pointer that is not NULL may be written to.
pub(crate) unsafe fn give<T>(
    out: *mut *mut T,
    what: &'static str,
    make: impl FnOnce() -> Result<T, Error>,
) -> Result<(), Error> {
    if out.is_null() {
        return Err(null(what));
    }
    let made = Box::into_raw(Box::new(make()?));
    // SAFETY: forwarded to the caller.
    unsafe { out.write(made) };
    Ok(())
}

/// Drops what a handle points to; does nothing if it is NULL.
///
/// # Safety
/// As [`handle`], and nothing uses the handle any more.
pub(crate) unsafe fn free<T>(pointer: *mut T) {
    if !pointer.is_null() {
        run(|| {
            // SAFETY: `give` has made it of a box.
            drop(unsafe { Box::from_raw(pointer) });
            Ok(())
        });
    }
}

/// Writes a plain value.
///
/// # Safety
/// A pointer that is not NULL may be written to.
pub(crate) unsafe fn put<T>(out: *mut T, value: T, what: &'static str) -> Result<(), Error> {
    match out.is_null() {
        true => Err(null(what)),
        false => {
            // SAFETY: forwarded to the caller.
            unsafe { out.write(value) };
            Ok(())
        }
    }
}

/// Text that a program has passed.
///
/// # Safety
/// A pointer that is not NULL points to a string.
pub(crate) unsafe fn string<'a>(text: *const c_char, what: &'static str) -> Result<&'a str, Error> {
    if text.is_null() {
        return Err(null(what));
    }
    // SAFETY: forwarded to the caller.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| bad(what, "it is not UTF-8", "pass text in UTF-8"))
}

/// An array that a program has passed.
///
/// # Safety
/// A pointer that is not NULL points to `count` values.
pub(crate) unsafe fn array<'a, T>(
    first: *const T,
    count: usize,
    what: &'static str,
) -> Result<&'a [T], Error> {
    match (first.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(null(what)),
        (false, _) if count > isize::MAX as usize / size_of::<T>().max(1) => {
            Err(bad(what, format!("no array has {count} elements"), "pass the number of elements"))
        }
        // SAFETY: forwarded to the caller.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(first, count) }),
    }
}

/// Writes the first `capacity` values into an array, and the number of all values to `count`.
///
/// # Safety
/// `out` points to room for `capacity` values, or `capacity` is 0. `count` may be
/// written to unless it is NULL.
pub(crate) unsafe fn list<T: Copy>(
    values: &[T],
    out: *mut T,
    capacity: usize,
    count: *mut usize,
    what: &'static str,
) -> Result<(), Error> {
    let shown = values.len().min(capacity);
    if shown > 0 {
        if out.is_null() {
            return Err(null(what));
        }
        // SAFETY: forwarded to the caller.
        unsafe { out.copy_from_nonoverlapping(values.as_ptr(), shown) };
    }
    if !count.is_null() {
        // SAFETY: forwarded to the caller.
        unsafe { count.write(values.len()) };
    }
    Ok(())
}

/// A structure whose first field is its size, so that later versions can append fields to it.
///
/// # Safety
/// It is `repr(C)`, its first field is a `usize`, all bytes are values of its numbers, and null is
/// one of its pointers. It ends where its last field does: what a later version appends must not
/// lie where an earlier one had nothing.
pub(crate) unsafe trait Grows: Copy {
    /// Its size in the first version that had it: nobody has a smaller one.
    const FIRST_SIZE: usize;
}

/// Declares that a structure [`Grows`], with its size in the first version and its last field.
macro_rules! grows {
    ($name:ty, $size:literal, $last:ident) => {
        // SAFETY: asserted, as far as it can be; the structures of this crate have numbers,
        // enumerations of which 0 is a value, and pointers.
        unsafe impl $crate::boundary::Grows for $name {
            const FIRST_SIZE: usize = {
                const fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
                    ::std::mem::size_of::<F>()
                }
                let last = size_of_field(|of: &$name| &of.$last);
                assert!(
                    ::std::mem::offset_of!($name, $last) + last == ::std::mem::size_of::<$name>()
                );
                assert!(::std::mem::size_of::<$name>() >= $size);
                $size
            };
        }
    };
}

/// The size that a program has set in its structure.
///
/// # Safety
/// `pointer` points to at least a `usize`.
unsafe fn size_of_theirs<T: Grows>(pointer: *const T) -> Result<usize, Error> {
    // SAFETY: forwarded to the caller; the first field is the size.
    let size = unsafe { pointer.cast::<usize>().read() };
    /// A larger number is not a size: the program has not initialised it.
    const MOST: usize = 1024;
    if size < T::FIRST_SIZE || size > MOST || !size.is_multiple_of(align_of::<T>()) {
        let reason = format!("its first field, size, is {size}");
        return Err(bad(
            "structure",
            reason,
            "set it to the sizeof of the structure: PAGELEAP_INIT does",
        ));
    }
    Ok(size)
}

/// Reads a structure of a program, whose header may be older or newer. Fields that it does not
/// have are 0.
///
/// # Safety
/// A pointer that is not NULL points to a structure of the size that it says.
pub(crate) unsafe fn read<T: Grows>(pointer: *const T) -> Result<Option<T>, Error> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: forwarded to the caller.
    let theirs = unsafe { size_of_theirs(pointer) }?;
    let mut ours = MaybeUninit::<T>::zeroed();
    let shared = theirs.min(size_of::<T>());
    // SAFETY: both have so many bytes.
    unsafe { ours.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(pointer.cast(), shared) };
    // SAFETY: theirs has so many bytes.
    let rest =
        unsafe { std::slice::from_raw_parts(pointer.cast::<u8>().add(shared), theirs - shared) };
    if rest.iter().any(|byte| *byte != 0) {
        return Err(Error::Unsupported {
            what:
                "a structure of a newer pageleap.h has fields set that this version does not know"
                    .into(),
            remedy: "use a newer libpageleap, or leave these fields 0",
        });
    }
    // SAFETY: all zero is a value, and what was copied is the program's; fields are plain numbers
    // and pointers.
    Ok(Some(unsafe { ours.assume_init() }))
}

/// Fills a structure of a program, whose header may be older or newer, and keeps its size.
/// Fields that this version does not know become 0.
///
/// # Safety
/// A pointer that is not NULL points to a structure of the size that it says.
pub(crate) unsafe fn write<T: Grows>(pointer: *mut T, value: T) -> Result<(), Error> {
    if pointer.is_null() {
        return Err(null("structure"));
    }
    // SAFETY: forwarded to the caller.
    let theirs = unsafe { size_of_theirs(pointer) }?;
    let (first, shared) = (size_of::<usize>(), theirs.min(size_of::<T>()));
    // SAFETY: both have so many bytes.
    unsafe {
        let (to, from) = (pointer.cast::<u8>(), (&raw const value).cast::<u8>());
        to.add(first).copy_from_nonoverlapping(from.add(first), shared - first);
        to.add(shared).write_bytes(0, theirs - shared);
    }
    Ok(())
}

/// Reads the structures of an array one after the other. A program may have an older or newer
/// header, so each says how far the next one is.
///
/// # Safety
/// A pointer that is not NULL points to `count` structures of the size that they say.
pub(crate) unsafe fn each<T: Grows>(
    first: *const T,
    count: usize,
    what: &'static str,
    mut body: impl FnMut(&T) -> Result<(), Error>,
) -> Result<(), Error> {
    let (mut next, mut first_size) = (first, None);
    for _ in 0..count {
        // SAFETY: forwarded to the caller: each begins with its size, whatever that is.
        let size = *unsafe { handle(next.cast::<usize>(), what)? };
        if *first_size.get_or_insert(size) != size {
            let reason = format!("one has the size {size}, the first another");
            return Err(bad(what, reason, "set the size of each to the sizeof of the structure"));
        }
        // SAFETY: forwarded to the caller.
        body(&unsafe { read(next) }?.expect("it is not NULL"))?;
        // SAFETY: elements are as far apart as each of them says.
        next = unsafe { next.byte_add(size) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Default)]
    struct Old {
        size: usize,
        first: u64,
    }
    grows!(Old, 16, first);

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Default)]
    struct New {
        size: usize,
        first: u64,
        second: u64,
    }
    // As if `second` had come later.
    grows!(New, 16, second);

    #[test]
    fn structures_of_other_headers() {
        let old = Old { size: size_of::<Old>(), first: 7 };
        let mut new = New { size: size_of::<New>(), first: 7, second: 0 };
        // SAFETY: structures of the size that they say.
        unsafe {
            let read_old = read((&raw const old).cast::<New>()).unwrap().unwrap();
            assert_eq!((read_old.first, read_old.second), (7, 0));
            let read_new = read((&raw const new).cast::<Old>()).unwrap().unwrap();
            assert_eq!(read_new.first, 7);
            new.second = 1;
            assert!(matches!(read((&raw const new).cast::<Old>()), Err(Error::Unsupported { .. })));
            write((&raw mut new).cast::<Old>(), Old { size: 0, first: 9 }).unwrap();
            assert_eq!(new, New { size: size_of::<New>(), first: 9, second: 0 });
            // What lies behind an old structure is not touched.
            let mut pair = [Old { size: size_of::<Old>(), first: 1 }, Old { size: 3, first: 3 }];
            write(pair.as_mut_ptr().cast::<New>(), New { size: 0, first: 5, second: 6 }).unwrap();
            assert_eq!(pair, [Old { size: size_of::<Old>(), first: 5 }, Old { size: 3, first: 3 }]);
            assert!(read(pair.as_ptr().add(1)).unwrap_err().to_string().contains("size, is 3"));
            assert_eq!(read(std::ptr::null::<Old>()).unwrap(), None);
            assert!(write(std::ptr::null_mut(), old).is_err());
        }
    }

    #[test]
    fn sizes_of_no_version_are_refused() {
        for size in [0, 8, 12, 17, 1032] {
            let wrong = Old { size, first: 0 };
            // SAFETY: refused by the size, before anything else is looked at.
            assert!(unsafe { read(&raw const wrong) }.is_err(), "{size}");
        }
    }

    #[test]
    fn a_panic_becomes_a_status() {
        let quiet = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let status = run(|| panic!("of {}", "purpose"));
        std::panic::set_hook(quiet);
        assert_eq!(status, pageleap_status::PAGELEAP_DEFECT);
        // SAFETY: our own text.
        let text = unsafe { CStr::from_ptr(crate::last_error::pageleap_last_error()) };
        assert!(text.to_str().unwrap().contains("of purpose"), "{text:?}");
    }
}
