//! The library that `pageleap run --place` preloads into a program: it gives each new thread a CPU.
//!
//! `build.rs` compiles this file by itself, as a shared library without the standard library. The
//! loader puts its `pthread_create` before that of the C library, which it calls in turn:
//!
//! ```text
//! creating thread                          new thread
//! ───────────────                          ──────────
//! takes the place with the fewest
//! living threads (count + 1)
//! calls the real pthread_create  ───────▶  start: waits for the creator
//! pins the new thread to one CPU
//! tells the new thread           ───────▶  the program's function
//!                                          key's destructor: gives the place back (count - 1)
//! ```
//!
//! *Places* are CPUs in an order that the launcher has chosen ([`VARIABLE`]). Among equal counts the
//! first place wins, so the order is the order in which a program's threads come to CPUs.
//!
//! **A home** ([`HOME`]) is the part of the places on which the program starts. Its threads come to the
//! places all the same, whose order begins with the home's.
//!
//! **Whose choice stands.** A thread is pinned once, before its function runs and before
//! `pthread_create` returns; what the thread or its creator sets later counts, also if it is the same
//! CPU. A thread is left alone if its attributes have an affinity, or if its creator's affinity
//! is neither what the launcher has set nor the pin of this library: then the program, or a tool
//! like taskset, has chosen CPUs that the thread inherits. If the kernel refuses a pin because the
//! cpuset has changed, the thread runs unpinned. A program that forbids `sched_setaffinity` to itself
//! by a filter that kills is killed when it creates a thread.
//!
//! **Waiting.** The new thread waits instead of the creator, which runs already and needs a few
//! microseconds. If it does not come back from the real function (a signal handler jumps away), the
//! new thread goes on after a second.
//!
//! **Main threads** are never pinned, because children inherit their affinity. So a child of a pinned
//! thread gets all places again: by the handler of `fork`, and by `posix_spawn`, `system`, `popen` and
//! the functions of `exec`, which drop the pin for the time of the call.
//!
//! **Counting CPUs.** Programs call `sched_getaffinity` to learn how many threads to start, and some
//! ask in a thread that they have created: Java's main function runs in one. The answer would be one
//! CPU. So a thread with a pin is told all places, which are the CPUs of the program. The kernel tells
//! the pin in `/proc/thread-self/status`.
//!
//! **The end of a thread** is the destructor of a thread-specific value, because it runs however the
//! thread ends: by returning, by `pthread_exit`, or by cancellation. Counts may be too low for a
//! moment, between this destructor and the real end.
//!
//! **Stacks.** Programs start others from a child that shares their memory and has a stack of a page
//! or two. So sets of CPUs are compared word by word, and the only one on the stack has 128 bytes,
//! unless the machine may have more than 1,024 CPUs.
//!
//! **Orderings.** Atomics are relaxed, except the one by which a creator tells the new thread. A count
//! is a hint about where to run, and nothing else is read because of its value. The list of places is written before the first thread is created, and
//! creating a thread orders what came before it. Nothing here takes a lock, so `fork` cannot leave
//! one locked.

use core::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use core::mem::transmute;
use core::ptr;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};

/// The environment variable with the CPUs in the order of places: `0,4,1,5`.
const VARIABLE: &CStr = c"PAGELEAP_PLACES";
/// The environment variable with the CPUs on which the program starts, if these are fewer than the
/// places: those of its home.
const HOME: &CStr = c"PAGELEAP_HOME";
/// The most CPUs that Linux knows on most architectures (`CONFIG_NR_CPUS`).
const MOST_CPUS: usize = 8192;
const BITS: usize = c_ulong::BITS as usize;
const WORDS: usize = MOST_CPUS / BITS;
/// The words of a set of 1,024 CPUs.
const FEW: usize = 1024 / BITS;

/// CPUs as the kernel takes them.
type Mask = [c_ulong; WORDS];

unsafe extern "C" {
    fn dlsym(object: *mut c_void, name: *const c_char) -> *mut c_void;
    fn getenv(name: *const c_char) -> *const c_char;
    fn malloc(bytes: usize) -> *mut c_void;
    fn free(memory: *mut c_void);
    fn pthread_self() -> usize;
    fn sched_yield() -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
}

/// CPUs in an order, with the number of living threads on each.
struct Places {
    number: AtomicUsize,
    cpus: [AtomicU32; MOST_CPUS],
    living: [AtomicU32; MOST_CPUS],
    /// The CPUs on which the program starts, and its child processes: those of its home, or of all
    /// places.
    start: [AtomicUsize; WORDS],
}

impl Places {
    const fn new() -> Places {
        Places {
            number: AtomicUsize::new(0),
            cpus: [const { AtomicU32::new(0) }; MOST_CPUS],
            living: [const { AtomicU32::new(0) }; MOST_CPUS],
            start: [const { AtomicUsize::new(0) }; WORDS],
        }
    }

    /// Takes the places from a text, and the CPUs of the home from another, if there is one. A text
    /// that is no list of CPUs has none.
    fn fill(&self, text: &[u8], home: &[u8]) {
        let mut number = 0;
        for word in text.split(|byte| *byte == b',') {
            let (Some(cpu), Some(place)) = (decimal(word), self.cpus.get(number)) else { return };
            place.store(cpu, Relaxed);
            number += 1;
        }
        let of_home = || home.split(|byte| *byte == b',').map(decimal);
        if of_home().all(|cpu| cpu.is_some()) {
            of_home().flatten().for_each(|cpu| self.add_to_start(cpu));
        } else {
            self.cpus.iter().take(number).for_each(|cpu| self.add_to_start(cpu.load(Relaxed)));
        }
        self.number.store(number, Relaxed);
    }

    fn add_to_start(&self, cpu: u32) {
        if let Some(word) = self.start.get(cpu as usize / BITS) {
            word.fetch_or(1 << (cpu as usize % BITS), Relaxed);
        }
    }

    /// A word of the set of CPUs on which the program starts.
    fn start(&self, at: usize) -> c_ulong {
        self.start.get(at).map_or(0, |word| word.load(Relaxed) as c_ulong)
    }

    fn number(&self) -> usize {
        self.number.load(Relaxed)
    }

    /// The CPU of a place.
    fn cpu(&self, place: usize) -> Option<usize> {
        Some(self.cpus.get(place)?.load(Relaxed) as usize)
    }

    /// The place with the fewest living threads, the first of several. It has one thread more.
    fn take(&self) -> Option<usize> {
        let living = self.living.get(..self.number())?;
        loop {
            let mut best: Option<(usize, u32)> = None;
            for (place, count) in living.iter().enumerate() {
                let count = count.load(Relaxed);
                if best.is_none_or(|(_, fewest)| count < fewest) {
                    best = Some((place, count));
                }
                if count == 0 {
                    break;
                }
            }
            let (place, count) = best?;
            // Another thread may have taken it meanwhile.
            let taken =
                living.get(place)?.compare_exchange(count, count.wrapping_add(1), Relaxed, Relaxed);
            if taken.is_ok() {
                return Some(place);
            }
        }
    }

    fn give_back(&self, place: usize) {
        if let Some(count) = self.living.get(place) {
            let _ = count.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
        }
    }

    /// Forgets all threads.
    fn forget(&self) {
        for count in self.living.iter().take(self.number()) {
            count.store(0, Relaxed);
        }
    }
}

/// CPUs that this library sets, and compares.
#[derive(Clone, Copy)]
enum Cpus {
    /// Those on which the program starts.
    Start,
    /// One alone.
    One(usize),
}

impl Cpus {
    /// A word of their set.
    fn word(self, at: usize) -> c_ulong {
        match self {
            Cpus::Start => PLACES.start(at),
            Cpus::One(cpu) if cpu / BITS == at => 1 << (cpu % BITS),
            Cpus::One(_) => 0,
        }
    }
}

/// A number of a CPU.
fn decimal(word: &[u8]) -> Option<u32> {
    let mut number: Option<u32> = None;
    for byte in word {
        let digit = byte.wrapping_sub(b'0');
        let before = number.unwrap_or(0);
        let is_valid = digit <= 9 && before < MOST_CPUS as u32;
        number = Some(before.wrapping_mul(10).wrapping_add(digit.into()));
        if !is_valid {
            return None;
        }
    }
    number.filter(|cpu| *cpu < MOST_CPUS as u32)
}

static PLACES: Places = Places::new();
/// The key of the value by which the end of a thread is noticed. The value is the place of the
/// thread plus one, and [`CHOSEN`] if the thread has chosen CPUs.
static KEY: AtomicU32 = AtomicU32::new(0);
const CHOSEN: usize = 1 << (usize::BITS - 1);
/// Whether the kernel's sets of CPUs have no more than [`FEW`] words.
static ARE_FEW: AtomicBool = AtomicBool::new(false);
static IS_READY: AtomicBool = AtomicBool::new(false);

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
        fn $name() -> Option<$kind> {
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
type Routine = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type Handler = unsafe extern "C" fn();
/// Strings up to a null pointer.
type Words = *const *const c_char;

/// The loader calls functions of this section before `main`.
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = prepare;

/// Reads the list of places, once. Constructors of other libraries may create threads before that of
/// this one runs, so each creation asks for it; the first one finds no second thread.
extern "C" fn prepare() {
    if IS_READY.swap(true, Relaxed) {
        return;
    }
    // SAFETY: the name ends with zero, and the value too, if there is one. No thread changes the
    // environment meanwhile, because there is only one.
    let value = |name: &CStr| unsafe {
        let value = getenv(name.as_ptr());
        if value.is_null() { None } else { Some(CStr::from_ptr(value).to_bytes()) }
    };
    let Some(text) = value(VARIABLE) else { return };
    find_all();
    let mut key = 0;
    // SAFETY: the call writes the key; the destructor is a function of this library, which is never
    // unloaded.
    let made = key_create().map(|create| unsafe { create(&raw mut key, ended) });
    if made == Some(0) {
        KEY.store(key, Relaxed);
        ARE_FEW.store(compare::<FEW>(Cpus::Start).is_some(), Relaxed);
        PLACES.fill(text, value(HOME).unwrap_or_default());
    }
    let handler: Option<Handler> = Some(forked);
    // SAFETY: the handler is a function of this library, which is never unloaded.
    unsafe {
        match (register_atfork(), pthread_atfork()) {
            (Some(register), _) => register(None, None, handler, ptr::null_mut()),
            (None, Some(register)) => register(None, None, handler),
            (None, None) => 0,
        }
    };
}

/// Finds the functions that a child of `fork` or `vfork` calls: `dlsym` takes a lock of the loader,
/// which another thread may hold for ever in such a child.
fn find_all() {
    let _ = (get_specific(), set_specific());
    let _ = (real_sched_getaffinity(), real_sched_setaffinity(), thread_number());
    let _ = (real_posix_spawn(), real_posix_spawnp(), real_system(), real_popen());
    let _ = (real_execve(), real_execv(), real_execvp(), real_execvpe());
}

/// Notices the end of a thread.
unsafe extern "C" fn ended(value: *mut c_void) {
    PLACES.give_back((value.addr() & !CHOSEN).wrapping_sub(1));
}

/// Runs in a forked child, whose only thread is its main thread from now on.
unsafe extern "C" fn forked() {
    PLACES.forget();
    if own_value() != 0 {
        unpin();
        set_value(0);
    }
}

/// The place of the calling thread, unless it has chosen CPUs since.
fn own_place() -> Option<usize> {
    own_value().checked_sub(1).filter(|place| place & CHOSEN == 0)
}

/// The value of the calling thread; zero if it has no place.
fn own_value() -> usize {
    let Some(get) = get_specific().filter(|_| PLACES.number() > 0) else { return 0 };
    // SAFETY: the key is one that was made, because there are places.
    unsafe { get(KEY.load(Relaxed)) }.addr()
}

/// Notes a value for the calling thread, and returns whether it is noted.
fn set_value(value: usize) -> bool {
    let value = ptr::without_provenance(value);
    // SAFETY: the key is one that was made, because there are places.
    set_specific().is_some_and(|set| unsafe { set(KEY.load(Relaxed), value) } == 0)
}

/// Notes that the calling thread has chosen CPUs.
fn note_choice() {
    let value = own_value();
    if value != 0 {
        set_value(value | CHOSEN);
    }
}

/// Whether the calling thread may run on these CPUs and no others; `None` if the kernel does not
/// tell.
fn runs_on(cpus: Cpus) -> Option<bool> {
    match ARE_FEW.load(Relaxed) {
        true => compare::<FEW>(cpus),
        false => compare::<WORDS>(cpus),
    }
}

#[inline(never)]
fn compare<const N: usize>(cpus: Cpus) -> Option<bool> {
    let mut mask: [c_ulong; N] = [0; N];
    // SAFETY: the call writes at most the bytes of the mask.
    let told = unsafe { real_sched_getaffinity()?(0, size_of_val(&mask), mask.as_mut_ptr()) };
    (told == 0).then(|| mask.iter().enumerate().all(|(at, word)| *word == cpus.word(at)))
}

/// Lets the calling thread, or another one, run on these CPUs only, and returns whether it does.
fn set_affinity(thread: Option<usize>, cpus: Cpus) -> bool {
    match ARE_FEW.load(Relaxed) {
        true => set::<FEW>(thread, cpus),
        false => set::<WORDS>(thread, cpus),
    }
}

#[inline(never)]
fn set<const N: usize>(thread: Option<usize>, cpus: Cpus) -> bool {
    let mut mask: [c_ulong; N] = [0; N];
    mask.iter_mut().enumerate().for_each(|(at, word)| *word = cpus.word(at));
    let (bytes, mask) = (size_of_val(&mask), mask.as_ptr());
    // SAFETY: the calls read the bytes of the mask, and another thread waits for this one.
    let failed = unsafe {
        match thread {
            None => real_sched_setaffinity().map(|set| set(0, bytes, mask)),
            Some(thread) => real_pthread_setaffinity().map(|set| set(thread, bytes, mask)),
        }
    };
    failed == Some(0)
}

/// The CPU to which the calling thread is pinned, unless it has chosen CPUs since.
fn own_pin() -> Option<Cpus> {
    let pin = Cpus::One(PLACES.cpu(own_place()?)?);
    Some(pin).filter(|pin| runs_on(*pin) == Some(true))
}

/// Takes the pin from the calling thread, and returns it.
fn unpin() -> Option<Cpus> {
    own_pin().filter(|_| set_affinity(None, Cpus::Start))
}

/// Calls a function that makes a process, or becomes one, without the pin. Whoever gives the thread
/// other CPUs meanwhile has chosen them.
fn without_pin<T>(call: impl FnOnce() -> T) -> T {
    let pin = if PLACES.number() > 0 { unpin() } else { None };
    let result = call();
    if let Some(pin) = pin
        && runs_on(Cpus::Start) == Some(true)
    {
        set_affinity(None, pin);
    }
    result
}

/// Whether threads that the calling thread creates would inherit CPUs that nobody has chosen for
/// them: those of the start, or the pin of the creator.
fn inherits_no_choice() -> bool {
    own_pin().is_some() || runs_on(Cpus::Start).unwrap_or(true)
}

/// Whether attributes of a thread have an affinity.
///
/// # Safety
/// They are null, or initialised.
#[inline(never)]
unsafe fn have_affinity(attributes: *const c_void) -> bool {
    let Some(ask) = attributes_affinity().filter(|_| !attributes.is_null()) else { return false };
    let mut mask: Mask = [0; WORDS];
    // SAFETY: forwarded to the caller; the call writes at most the bytes of the mask. Without an
    // affinity it sets them all.
    let told = unsafe { ask(attributes, size_of::<Mask>(), mask.as_mut_ptr()) };
    told != 0 || mask.iter().any(|word| *word != c_ulong::MAX)
}

/// The beginning of a thread: what it is to run, and where. The creator owns it until it sets the
/// state to [`SETTLED`], and then the thread.
struct Beginning {
    routine: Routine,
    argument: *mut c_void,
    place: usize,
    is_pinned: bool,
    state: AtomicU32,
}

/// The creator is at work.
const CREATED: u32 = 0;
/// The creator is at work, and the new thread sleeps.
const SLEEPS: u32 = 1;
/// The creator has done its work.
const SETTLED: u32 = 2;

/// Seconds and nanoseconds as the kernel takes them.
#[repr(C)]
struct Time(c_long, c_long);

/// The number of `futex(2)`, on machines where it takes a [`Time`].
const FUTEX: Option<c_long> = if cfg!(not(target_pointer_width = "64")) {
    None
} else if cfg!(target_arch = "x86_64") {
    Some(202)
} else if cfg!(any(target_arch = "aarch64", target_arch = "riscv64")) {
    Some(98)
} else {
    None
};
/// `FUTEX_WAIT` and `FUTEX_WAKE` among threads of one process.
const WAIT: c_int = 128;
const WAKE: c_int = 129;

/// Waits until the creator has done its work, and returns whether it has. It is no point of
/// cancellation.
fn is_settled(state: &AtomicU32) -> bool {
    if state.compare_exchange(CREATED, SLEEPS, Acquire, Acquire).is_err() {
        return true;
    }
    let most = Time(0, 10_000_000);
    // Signals interrupt the sleep.
    for _ in 0..if FUTEX.is_some() { 100 } else { 1_000_000 } {
        // SAFETY: the one call reads the state and the time, and the other takes no pointers.
        unsafe {
            match FUTEX {
                Some(futex) => syscall(futex, state.as_ptr(), WAIT, SLEEPS, &raw const most),
                None => sched_yield().into(),
            };
        }
        if state.load(Acquire) == SETTLED {
            return true;
        }
    }
    false
}

impl Beginning {
    /// A beginning for a thread with these attributes; `None` if it is left alone.
    ///
    /// # Safety
    /// The attributes are null, or initialised.
    unsafe fn of(
        attributes: *const c_void,
        routine: Routine,
        argument: *mut c_void,
    ) -> Option<*mut Beginning> {
        // SAFETY: forwarded to the caller.
        if PLACES.number() == 0 || unsafe { have_affinity(attributes) } || !inherits_no_choice() {
            return None;
        }
        // SAFETY: the call takes no pointers.
        let memory = unsafe { malloc(size_of::<Beginning>()) }.cast::<Beginning>();
        let place = PLACES.take().filter(|_| !memory.is_null());
        let Some(place) = place else {
            // SAFETY: the memory is from malloc, or null.
            unsafe { free(memory.cast()) };
            return None;
        };
        // SAFETY: malloc returns memory of this size, aligned for every type.
        unsafe {
            memory.write(Beginning {
                routine,
                argument,
                place,
                is_pinned: false,
                state: AtomicU32::new(CREATED),
            });
        }
        Some(memory)
    }

    /// Undoes the beginning of a thread that was not created.
    ///
    /// # Safety
    /// It is from [`Beginning::of`], and is used nowhere else.
    unsafe fn drop(this: *mut Beginning) {
        // SAFETY: forwarded to the caller.
        unsafe {
            PLACES.give_back((*this).place);
            free(this.cast());
        }
    }

    /// Pins the new thread, which waits for that, and lets it go on.
    ///
    /// # Safety
    /// It is from [`Beginning::of`], the thread was created with it, and this is called once.
    #[inline(never)]
    unsafe fn settle(this: *mut Beginning, thread: usize) {
        // SAFETY: the thread only reads the state until that is set. After that it owns the memory,
        // whose address alone is used.
        unsafe {
            let cpu = PLACES.cpu((*this).place);
            (*this).is_pinned = cpu.is_some_and(|cpu| set_affinity(Some(thread), Cpus::One(cpu)));
            let state = &raw const (*this).state;
            let before = (*state).swap(SETTLED, Release);
            if let Some(futex) = FUTEX.filter(|_| before == SLEEPS) {
                syscall(futex, state, WAKE, 1);
            }
        }
    }

    /// Waits for the pin of the calling thread, and returns its function and the argument.
    ///
    /// # Safety
    /// It is from [`Beginning::of`], and the calling thread was created with it.
    #[inline(never)]
    unsafe fn begin(this: *mut c_void) -> (Routine, *mut c_void) {
        let this = this.cast::<Beginning>();
        // SAFETY: forwarded to the caller. The creator writes none of these fields.
        let (routine, argument, place) =
            unsafe { ((*this).routine, (*this).argument, (*this).place) };
        // SAFETY: forwarded to the caller. Memory that the creator may still use is lost.
        let is_pinned = unsafe {
            let is_settled = is_settled(&(*this).state);
            let is_pinned = is_settled && (*this).is_pinned;
            if is_settled {
                free(this.cast());
            }
            is_pinned
        };
        if !is_pinned || !set_value(place + 1) {
            PLACES.give_back(place);
        }
        (routine, argument)
    }
}

/// The function of each pinned thread.
unsafe extern "C" fn start(beginning: *mut c_void) -> *mut c_void {
    // SAFETY: the thread was created with a beginning of its own.
    let (routine, argument) = unsafe { Beginning::begin(beginning) };
    // SAFETY: the program has asked for this call. Nothing is dropped if it unwinds, which
    // pthread_exit does.
    unsafe { routine(argument) }
}

/// Creates a thread by `create`, which gets the routine and its argument, and writes the thread's
/// handle.
///
/// # Safety
/// The attributes are null, or initialised, and `thread` has room for a handle.
unsafe fn created(
    thread: *const c_void,
    attributes: *const c_void,
    routine: Routine,
    argument: *mut c_void,
    create: impl FnOnce(Routine, *mut c_void) -> c_int,
) -> c_int {
    // SAFETY: forwarded to the caller.
    match unsafe { Beginning::of(attributes, routine, argument) } {
        None => create(routine, argument),
        Some(beginning) => {
            let failed = create(start, beginning.cast());
            // SAFETY: no thread was created that uses the beginning, or one that waits for its pin,
            // whose handle the call has written. Handles of C11 are those of POSIX.
            unsafe {
                match failed {
                    0 => Beginning::settle(beginning, thread.cast::<usize>().read()),
                    _ => Beginning::drop(beginning),
                }
            }
            failed
        }
    }
}

/// Tells the calling thread the CPUs on which the program has started, if it has the pin of this library.
///
/// # Safety
/// The memory has `bytes` bytes, which the kernel has written.
unsafe fn tell_all(bytes: usize, memory: *mut c_ulong) {
    if PLACES.number() > 0 && own_pin().is_some() {
        let all = PLACES.start.as_ptr();
        let bytes = if bytes < size_of::<Mask>() { bytes } else { size_of::<Mask>() };
        // SAFETY: forwarded to the caller, and no more bytes than the mask has.
        unsafe { ptr::copy_nonoverlapping(all.cast::<u8>(), memory.cast(), bytes) };
    }
}

/// The CPUs of a thread; those of the program's start for a pinned thread that asks about itself.
///
/// # Safety
/// As `sched_getaffinity(2)` of the C library.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sched_getaffinity(
    thread: c_int,
    bytes: usize,
    mask: *mut c_ulong,
) -> c_int {
    let Some(real) = real_sched_getaffinity() else { return FAILED };
    // SAFETY: forwarded to the caller.
    unsafe {
        let result = real(thread, bytes, mask);
        if result == 0 && thread == 0 {
            tell_all(bytes, mask);
        }
        result
    }
}

/// As [`sched_getaffinity`], for a thread of this process.
///
/// # Safety
/// As `pthread_getaffinity_np(3)` of the C library.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pthread_getaffinity_np(
    thread: usize,
    bytes: usize,
    mask: *mut c_ulong,
) -> c_int {
    let Some(real) = real_pthread_getaffinity() else { return EAGAIN };
    // SAFETY: forwarded to the caller.
    unsafe {
        let result = real(thread, bytes, mask);
        if result == 0 && thread == pthread_self() {
            tell_all(bytes, mask);
        }
        result
    }
}

/// Sets the CPUs of a thread. The calling thread has chosen them from now on.
///
/// # Safety
/// As `sched_setaffinity(2)` of the C library.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sched_setaffinity(
    thread: c_int,
    bytes: usize,
    mask: *const c_ulong,
) -> c_int {
    let Some(real) = real_sched_setaffinity() else { return FAILED };
    // SAFETY: forwarded to the caller; the other call takes no pointers.
    let (result, is_own) = unsafe {
        let is_own = thread == 0 || thread_number().is_some_and(|own| own() == thread);
        (real(thread, bytes, mask), is_own)
    };
    if result == 0 && is_own {
        note_choice();
    }
    result
}

/// As [`sched_setaffinity`], for a thread of this process.
///
/// # Safety
/// As `pthread_setaffinity_np(3)` of the C library.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pthread_setaffinity_np(
    thread: usize,
    bytes: usize,
    mask: *const c_ulong,
) -> c_int {
    let Some(real) = real_pthread_setaffinity() else { return EAGAIN };
    // SAFETY: forwarded to the caller; the other call takes no pointers.
    let (result, is_own) = unsafe { (real(thread, bytes, mask), thread == pthread_self()) };
    if result == 0 && is_own {
        note_choice();
    }
    result
}

/// EAGAIN of Linux, which `pthread_create` returns if it lacks something.
const EAGAIN: c_int = 11;
/// `thrd_error` of C11 in glibc and musl.
const THRD_ERROR: c_int = 2;
/// EINVAL and ENOSYS belong to other failures: a function that another object lacks has this one.
const FAILED: c_int = -1;

/// Creates a thread with a place.
///
/// # Safety
/// As `pthread_create(3)` of the C library.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pthread_create(
    thread: *mut c_void,
    attributes: *const c_void,
    routine: Routine,
    argument: *mut c_void,
) -> c_int {
    prepare();
    let Some(real) = real_pthread_create() else { return EAGAIN };
    // SAFETY: forwarded to the caller.
    unsafe {
        created(thread, attributes, routine, argument, |routine, argument| {
            real(thread, attributes, routine, argument)
        })
    }
}

/// Creates a thread with a place. That of glibc does not come by `pthread_create`.
///
/// # Safety
/// As `thrd_create(3)` of the C library.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn thrd_create(
    thread: *mut c_void,
    routine: Routine,
    argument: *mut c_void,
) -> c_int {
    prepare();
    let Some(real) = real_thrd_create() else { return THRD_ERROR };
    // SAFETY: forwarded to the caller.
    unsafe {
        created(thread, ptr::null(), routine, argument, |routine, argument| {
            real(thread, routine, argument)
        })
    }
}

macro_rules! processes {
    ($($name:ident by $real:ident ($($argument:ident: $kind:ty),*) -> $result:ty, $failed:expr;)*) => {$(
        /// Makes or becomes a process whose main thread may run on all places.
        ///
        /// # Safety
        /// As the function of this name in the C library.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> $result {
            let Some(real) = $real() else { return $failed };
            // SAFETY: forwarded to the caller.
            without_pin(|| unsafe { real($($argument),*) })
        }
    )*};
}

processes! {
    posix_spawn by real_posix_spawn (child: *mut c_int, path: *const c_char, actions: *const c_void,
        attributes: *const c_void, words: Words, environment: Words) -> c_int, EAGAIN;
    posix_spawnp by real_posix_spawnp (child: *mut c_int, name: *const c_char,
        actions: *const c_void, attributes: *const c_void, words: Words, environment: Words)
        -> c_int, EAGAIN;
    system by real_system (line: *const c_char) -> c_int, FAILED;
    popen by real_popen (line: *const c_char, mode: *const c_char) -> *mut c_void, ptr::null_mut();
    execve by real_execve (path: *const c_char, words: Words, environment: Words) -> c_int, FAILED;
    execv by real_execv (path: *const c_char, words: Words) -> c_int, FAILED;
    execvp by real_execvp (name: *const c_char, words: Words) -> c_int, FAILED;
    execvpe by real_execvpe (name: *const c_char, words: Words, environment: Words)
        -> c_int, FAILED;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(text: &str) -> Places {
        let places = Places::new();
        places.fill(text.as_bytes(), b"");
        places
    }

    #[test]
    fn a_list_of_cpus_is_read_or_there_are_no_places() {
        let read = |text: &str| {
            let places = places(text);
            (0..places.number()).map(|place| places.cpu(place).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(read("0,4,1,5"), [0, 4, 1, 5]);
        assert_eq!(read("8191"), [8191]);
        for wrong in ["", "0,", ",0", "0,x", "-1", "0-3", "8192", "99999999999999999999", " 0"] {
            assert!(read(wrong).is_empty(), "{wrong}");
        }
        let all = (0..MOST_CPUS).map(|cpu| cpu.to_string()).collect::<Vec<_>>().join(",");
        assert_eq!(read(&all).len(), MOST_CPUS);
        assert!(read(&format!("{all},0")).is_empty(), "more places than there can be");
    }

    #[test]
    fn the_place_with_the_fewest_threads_is_taken_and_the_first_of_several() {
        let places = places("3,7,5");
        let take = || places.take().unwrap();
        assert_eq!([take(), take(), take(), take(), take()], [0, 1, 2, 0, 1]);
        places.give_back(1);
        assert_eq!([take(), take(), take()], [1, 2, 0]);
        places.forget();
        assert_eq!(take(), 0);
        // A thread of before that ends now is not counted twice.
        [0, 0, 0, 1, 3, usize::MAX].iter().for_each(|place| places.give_back(*place));
        assert_eq!([take(), take(), take(), take()], [0, 1, 2, 0]);
        assert_eq!(super::Places::new().take(), None);
    }

    #[test]
    fn many_threads_that_take_places_at_once_are_counted_right() {
        static PLACES: Places = Places::new();
        PLACES.fill(b"0,1,2", b"");
        let threads: Vec<_> = (0..4)
            .map(|_| {
                std::thread::spawn(|| {
                    for _ in 0..1000 {
                        let place = PLACES.take().unwrap();
                        PLACES.give_back(place);
                    }
                    (0..300).for_each(|_| assert!(PLACES.take().is_some()));
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let living: Vec<u32> = (0..3).map(|place| PLACES.living[place].load(Relaxed)).collect();
        assert_eq!(living.iter().sum::<u32>(), 1200);
    }

    #[test]
    fn a_program_with_a_home_starts_there() {
        let with = |home: &str| {
            let places = Places::new();
            places.fill(b"0,1,2,3", home.as_bytes());
            places.start(0)
        };
        assert_eq!(with("1,3"), 0b1010);
        for wrong in ["", "1,x", "1-3"] {
            assert_eq!(with(wrong), 0b1111, "{wrong}");
        }
    }

    #[test]
    fn a_new_thread_waits_for_its_creator_but_not_for_ever() {
        let state = AtomicU32::new(SETTLED);
        assert!(is_settled(&state));
        state.store(CREATED, Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while state.load(Relaxed) != SLEEPS {
                    std::thread::yield_now();
                }
                state.store(SETTLED, Release);
            });
            assert!(is_settled(&state));
        });
        state.store(CREATED, Relaxed);
        assert!(!is_settled(&state), "the creator never comes back");
    }

    #[test]
    fn masks_have_the_cpus_of_the_places() {
        let places = places("0,63,64,8191");
        let words: Vec<c_ulong> = (0..=WORDS).map(|at| places.start(at)).collect();
        assert_eq!((words[0], words[1], words[WORDS - 1]), (1 << 63 | 1, 1, 1 << 63));
        assert_eq!(words.iter().map(|word| word.count_ones()).sum::<u32>(), 4);
        assert_eq!([0, 1, 2].map(|at| Cpus::One(64).word(at)), [0, 1, 0]);
    }
}
