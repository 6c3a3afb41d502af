//! The boundary to C: arguments become Rust values, results become C values, and panics end here.
//!
//! Each exported function runs its body in [`run`] or [`value`], which catch panics and keep the
//! error of the calling thread. Pointers are checked for NULL before they are used. A structure
//! begins with its size ([`Grows`]), because the header that a program was compiled with may be
//! older or newer than the library; [`read`] and [`write()`] copy the fields that both have.

use std::ffi::{CStr, c_char, c_int};
use std::mem::{MaybeUninit, size_of};
use std::panic::{AssertUnwindSafe, catch_unwind};

use pageleap::Error;

use crate::status::{note, note_defect, pageleap_status};

/// A field of a structure that is `bool` in the header. It is a byte here, because a program in
/// another language may store any value in it, and a Rust `bool` has only two.
#[allow(non_camel_case_types)]
pub(crate) type flag = u8;

/// Runs the body of an exported function, a block of type `Result<(), Error>`, in [`run`].
macro_rules! boundary {
    ($body:block) => {
        $crate::boundary::run(|| -> Result<(), ::pageleap::Error> { $body })
    };
}

/// Runs the body of an exported function and returns its status. An error is kept for the calling
/// thread; a panic becomes PAGELEAP_DEFECT.
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

/// Disables cancellation of the calling thread (`pthread_setcancelstate`) while Rust runs, because
/// a cancelled thread is unwound, and that must not pass through Rust. A `pthread_cancel` that
/// comes meanwhile takes effect afterwards.
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
        // SAFETY: as above. Enabling cancellation is not a cancellation point.
        unsafe { pthread_setcancelstate(self.0, std::ptr::null_mut()) };
    }
}

/// Runs the body of an exported function that returns a value instead of a status. The value is
/// `otherwise` if the body fails.
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

/// The error of an invalid argument: PAGELEAP_BAD_ARGUMENT.
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

/// The object behind a handle, or the error if the handle is NULL.
///
/// # Safety
/// `pointer` is NULL, or a handle of this type that the library has given out and nobody has freed.
pub(crate) unsafe fn handle<'a, T>(pointer: *const T, what: &'static str) -> Result<&'a T, Error> {
    // SAFETY: forwarded to the caller.
    unsafe { pointer.as_ref() }.ok_or_else(|| null(what))
}

/// Sets the pointer through which a function gives out a handle or an address to NULL, before
/// anything else can fail. So a program never sees an old value after a failure.
///
/// # Safety
/// A pointer that is not NULL may be written to.
pub(crate) unsafe fn nothing_yet<T>(out: *mut *mut T) {
    if !out.is_null() {
        // SAFETY: forwarded to the caller.
        unsafe { out.write(std::ptr::null_mut()) };
    }
}

/// Gives out a new value behind a handle: boxes it, and writes the pointer to `out`. If `out` is
/// NULL, that is the error, and `make` is not called.
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

/// Drops the object behind a handle; does nothing if the handle is NULL.
///
/// # Safety
/// As for [`handle`], and no thread uses the handle any more.
pub(crate) unsafe fn free<T>(pointer: *mut T) {
    if !pointer.is_null() {
        run(|| {
            // SAFETY: `give` has made the pointer of a box, and no thread uses it any more.
            drop(unsafe { Box::from_raw(pointer) });
            Ok(())
        });
    }
}

/// Writes a plain value to `out`, or gives the error if `out` is NULL.
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

/// A string that a program has passed, in UTF-8; an error if it is NULL or something else.
///
/// # Safety
/// A pointer that is not NULL points to a string that ends with a NUL.
pub(crate) unsafe fn string<'a>(text: *const c_char, what: &'static str) -> Result<&'a str, Error> {
    if text.is_null() {
        return Err(null(what));
    }
    // SAFETY: forwarded to the caller.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| bad(what, "it is not UTF-8", "pass text in UTF-8"))
}

/// An array that a program has passed. With a count of 0 the pointer may be NULL.
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
/// The type is `repr(C)`, and its first field is a `usize`. Every bit pattern is a value of its
/// numbers, and null is a value of its pointers. It has no padding behind its last field: a later
/// version appends a field there, and would read the padding, which an older program has not set.
pub(crate) unsafe trait Grows: Copy {
    /// Its size in bytes in the first version of the header that had it: no program has a smaller
    /// one.
    const FIRST_SIZE: usize;
}

/// Declares that a structure [`Grows`], with its size in the first version and its last field.
macro_rules! grows {
    ($name:ty, $size:literal, $last:ident) => {
        // SAFETY: the code below asserts the end and the size. The structures of this crate have
        // numbers, pointers, and, where the library fills them in, enumerations of which 0 is a
        // value.
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

/// The size that a program has set in its structure, or the error if no version had such a size.
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

/// Reads a structure of a program, whose header may be older or newer; `None` for NULL. Fields that
/// an older header lacks are 0. Fields that only a newer header has must be 0, else the structure
/// is refused (PAGELEAP_UNSUPPORTED).
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
    // SAFETY: both structures have at least `shared` bytes.
    unsafe { ours.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(pointer.cast(), shared) };
    // SAFETY: the structure of the program has `theirs` bytes.
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
    // SAFETY: each byte was set, to 0 or to that of the program, and every bit pattern is a value
    // of the fields ([`Grows`]).
    Ok(Some(unsafe { ours.assume_init() }))
}

/// Fills in a structure of a program, whose header may be older or newer. The size stays as the
/// program has set it. Fields that this version does not know become 0.
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
    // SAFETY: both structures have at least `shared` bytes, and that of the program has `theirs`.
    unsafe {
        let (to, from) = (pointer.cast::<u8>(), (&raw const value).cast::<u8>());
        to.add(first).copy_from_nonoverlapping(from.add(first), shared - first);
        to.add(shared).write_bytes(0, theirs - shared);
    }
    Ok(())
}

/// Calls `body` with each structure of an array. The distance from one to the next is the size that
/// each of them states, because the header of the program may be older or newer. Different sizes
/// are an error.
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
        // SAFETY: forwarded to the caller: each structure begins with its size.
        let size = *unsafe { handle(next.cast::<usize>(), what)? };
        if *first_size.get_or_insert(size) != size {
            let reason = format!("one has the size {size}, the first another");
            return Err(bad(what, reason, "set the size of each to the sizeof of the structure"));
        }
        // SAFETY: forwarded to the caller.
        body(&unsafe { read(next) }?.expect("it is not NULL"))?;
        // SAFETY: the next element begins `size` bytes behind this one.
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
            // Memory behind an old structure is not touched.
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
