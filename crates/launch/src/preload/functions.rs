//! Functions of the C library: those that every program has, and those that are looked up by name
//! when they are first called, because this library stands before them or because not every C
//! library has them.

use core::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use core::mem::transmute;
use core::ptr;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

unsafe extern "C" {
    pub(super) fn dlsym(object: *mut c_void, name: *const c_char) -> *mut c_void;
    pub(super) fn getenv(name: *const c_char) -> *const c_char;
    pub(super) fn malloc(bytes: usize) -> *mut c_void;
    pub(super) fn free(memory: *mut c_void);
    pub(super) fn pthread_self() -> usize;
    pub(super) fn sched_yield() -> c_int;
    pub(super) fn syscall(number: c_long, ...) -> c_long;
}

/// A function of another object, found by its name.
struct Function {
    name: &'static CStr,
    address: AtomicUsize,
}

impl Function {
    const fn new(name: &'static CStr) -> Function {
        Function { name, address: AtomicUsize::new(0) }
    }

    /// Its address, or zero. With [`NEXT`] it is the one that would be called without this library.
    fn find(&self, object: *mut c_void) -> usize {
        let known = self.address.load(Relaxed);
        if known != 0 {
            return known;
        }
        // SAFETY: the call reads a string that ends with zero. It finds out by its return address
        // which object asks; the address is used below, so this is no tail call.
        let found = unsafe { dlsym(object, self.name.as_ptr()) }.expose_provenance();
        self.address.store(found, Relaxed);
        found
    }
}

/// The objects behind this library in the loader's order (`RTLD_NEXT`).
const NEXT: *mut c_void = ptr::without_provenance_mut(usize::MAX);
/// All objects (`RTLD_DEFAULT`).
const ANY: *mut c_void = ptr::null_mut();

macro_rules! functions {
    ($($name:ident: $kind:ident = $object:ident $text:literal, ($($argument:ty),*) -> $result:ty;)*) => {$(
        type $kind = unsafe extern "C" fn($($argument),*) -> $result;
        /// The function of this name, if there is one.
        pub(super) fn $name() -> Option<$kind> {
            static FUNCTION: Function = Function::new($text);
            let address: *const c_void = ptr::with_exposed_provenance(FUNCTION.find($object));
            // SAFETY: the C library, or a library between, gives the function these types. Null is
            // `None`.
            unsafe { transmute::<*const c_void, Option<$kind>>(address) }
        }
    )*};
}

functions! {
    real_pthread_create: PthreadCreate = NEXT c"pthread_create",
        (*mut c_void, *const c_void, Routine, *mut c_void) -> c_int;
    real_thrd_create: ThrdCreate = NEXT c"thrd_create", (*mut c_void, Routine, *mut c_void) -> c_int;
    key_create: KeyCreate = ANY c"pthread_key_create",
        (*mut c_uint, unsafe extern "C" fn(*mut c_void)) -> c_int;
    set_specific: SetSpecific = ANY c"pthread_setspecific", (c_uint, *const c_void) -> c_int;
    get_specific: GetSpecific = ANY c"pthread_getspecific", (c_uint) -> *mut c_void;
    attributes_affinity: AttributesAffinity = ANY c"pthread_attr_getaffinity_np",
        (*const c_void, usize, *mut c_ulong) -> c_int;
    // glibc's pthread_atfork is a part of each program instead of the library.
    register_atfork: RegisterAtfork = ANY c"__register_atfork",
        (Option<Handler>, Option<Handler>, Option<Handler>, *mut c_void) -> c_int;
    pthread_atfork: PthreadAtfork = ANY c"pthread_atfork",
        (Option<Handler>, Option<Handler>, Option<Handler>) -> c_int;
    real_sched_getaffinity: SchedGetaffinity = NEXT c"sched_getaffinity",
        (c_int, usize, *mut c_ulong) -> c_int;
    real_pthread_getaffinity: PthreadGetaffinity = NEXT c"pthread_getaffinity_np",
        (usize, usize, *mut c_ulong) -> c_int;
    real_sched_setaffinity: SchedSetaffinity = NEXT c"sched_setaffinity",
        (c_int, usize, *const c_ulong) -> c_int;
    real_pthread_setaffinity: PthreadSetaffinity = NEXT c"pthread_setaffinity_np",
        (usize, usize, *const c_ulong) -> c_int;
    thread_number: ThreadNumber = ANY c"gettid", () -> c_int;
    real_posix_spawn: PosixSpawn = NEXT c"posix_spawn",
        (*mut c_int, *const c_char, *const c_void, *const c_void, Words, Words) -> c_int;
    real_posix_spawnp: PosixSpawnp = NEXT c"posix_spawnp",
        (*mut c_int, *const c_char, *const c_void, *const c_void, Words, Words) -> c_int;
    real_system: System = NEXT c"system", (*const c_char) -> c_int;
    real_popen: Popen = NEXT c"popen", (*const c_char, *const c_char) -> *mut c_void;
    real_execve: Execve = NEXT c"execve", (*const c_char, Words, Words) -> c_int;
    real_execv: Execv = NEXT c"execv", (*const c_char, Words) -> c_int;
    real_execvp: Execvp = NEXT c"execvp", (*const c_char, Words) -> c_int;
    real_execvpe: Execvpe = NEXT c"execvpe", (*const c_char, Words, Words) -> c_int;
}

/// The function of a thread. C11 threads return an `int`, which the same register carries.
pub(super) type Routine = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
pub(super) type Handler = unsafe extern "C" fn();
/// Strings up to a null pointer.
pub(super) type Words = *const *const c_char;
