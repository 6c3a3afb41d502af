//! The actors that use regions while these leap: threads that write and read, directly and by
//! system calls; accesses by frames, as devices make them; children; signal handlers.

use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::calls::{Ends, READING, WRITING, pipe, process_vm, splice};
use crate::children::mapped_in_a_child;
use crate::common::{Random, places_in, rest};
use crate::load::{use_other_memory, word_of};
use crate::round::{FRAME_WRITER, MOST_WRITERS, OWNERS};
use crate::scene::{Field, Scene, increment_the_word};
use crate::watch::{Alive, Count, count, signal_an_actor};

/// What an actor needs for its part.
pub struct Part<'a> {
    pub scene: &'a Scene,
    pub random: Random,
    pub stop: &'a AtomicBool,
    pub alive: Alive,
}

impl<'a> Part<'a> {
    /// Whether the actor goes on. Also notes that it has made a step.
    pub fn goes_on(&self) -> bool {
        self.alive.beat();
        !self.stop.load(Relaxed)
    }

    /// A random region.
    pub fn field(&mut self) -> &'a Field {
        &self.scene.fields[self.random.below(self.scene.fields.len() as u64) as usize]
    }

    /// Pauses for a random time, shorter than `most_us` microseconds.
    pub fn pause(&mut self, most_us: u64) {
        std::thread::sleep(Duration::from_micros(self.random.below(most_us)));
    }
}

/// Words between two checks whether to go on.
const AT_A_TIME: u64 = 64;

/// Stores rising values to the words of an owner.
pub fn write(mut part: Part, owner: usize) {
    let scene = part.scene;
    let words: Vec<&[AtomicU64]> = scene.fields.iter().map(Field::words).collect();
    let mut value = scene.last[owner].load(Relaxed);
    while part.goes_on() {
        for _ in 0..AT_A_TIME {
            let field = part.random.below(words.len() as u64) as usize;
            let at = word_of(&mut part.random, words[field].len(), OWNERS, owner, scene.round.skew);
            value += 1;
            words[field][at].store(value, Relaxed);
            scene.fields[field].note(at, value);
            (0..scene.round.pause).for_each(|_| std::hint::spin_loop());
        }
        count(Count::Writes, AT_A_TIME);
    }
    scene.last[owner].store(value, Relaxed);
}

/// Checks that no word is older than its last store. Words that the kernel writes are left out:
/// they may be half written.
pub fn read(mut part: Part) {
    let scene = part.scene;
    let words: Vec<&[AtomicU64]> = scene.fields.iter().map(Field::words).collect();
    while part.goes_on() {
        for _ in 0..AT_A_TIME {
            let number = part.random.below(words.len() as u64) as usize;
            let (words, field) = (words[number], &scene.fields[number]);
            let owner = part.random.below(MOST_WRITERS as u64) as usize;
            let at = word_of(&mut part.random, words.len(), OWNERS, owner, scene.round.skew);
            check_word(field, at, field.noted(at), words[at].load(Relaxed));
        }
        std::thread::yield_now();
    }
}

fn check_word(field: &Field, at: usize, noted: u64, value: u64) {
    assert!(value >= noted, "LOST: word {at} of {:?} fell from {noted} to {value}", field.region);
}

/// Lets the kernel write the words of an owner, by random calls.
pub fn let_kernel_write(mut part: Part, owner: usize) {
    let scene = part.scene;
    let may_fail = scene.round.lets_system_calls_fail();
    let mut ends = Ends::new();
    let has_ring = ends.ring.is_some();
    let fit =
        |call: &&crate::calls::Writing| (call.keeps || !may_fail) && (!call.by_ring || has_ring);
    let calls: Vec<_> = WRITING.iter().filter(fit).collect();
    let mut value = scene.last[owner].load(Relaxed);
    while part.goes_on() {
        let call = calls[part.random.below(calls.len() as u64) as usize];
        let field = part.field();
        let at = word_of(&mut part.random, field.words().len(), OWNERS, owner, scene.round.skew);
        let word = &field.words()[at];
        value += 1;
        let data = value.to_ne_bytes();
        (call.feed)(&mut ends, &data);
        let mut done = 0;
        while done < data.len() {
            let to = word.as_ptr().cast::<u8>().wrapping_add(done);
            match (call.take)(&mut ends, to, data.len() - done, done) {
                Ok(0) => panic!("{} has found nothing to write", call.name),
                Ok(more) => done += more,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    let excused = may_fail && error.raw_os_error() == Some(libc::EFAULT);
                    assert!(excused, "{} failed because of a leap: {error}", call.name);
                    count(Count::Efaults, 1);
                    rest();
                }
            }
        }
        assert_eq!(word.load(Relaxed), value, "LOST what {} has written to word {at}", call.name);
        field.note(at, value);
        count(Count::SystemCalls, 1);
    }
    scene.last[owner].store(value, Relaxed);
}

/// Lets the kernel read words, by random calls. No call may fail.
pub fn let_kernel_read(mut part: Part) {
    const MOST_WORDS: u64 = 1500;
    let mut ends = Ends::new();
    let has_ring = ends.ring.is_some();
    let calls: Vec<_> = READING.iter().filter(|call| !call.by_ring || has_ring).collect();
    while part.goes_on() {
        let call = calls[part.random.below(calls.len() as u64) as usize];
        let field = part.field();
        let len = 1 + part.random.below(MOST_WORDS) as usize;
        let first = part.random.below((field.words().len() - len) as u64) as usize;
        let noted: Vec<u64> = (first..first + len).map(|at| field.noted(at)).collect();
        let from = field.words()[first].as_ptr().cast();
        let done = loop {
            match (call.take)(&mut ends, from, len * 8) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                done => break done,
            }
        };
        assert!(
            matches!(done, Ok(bytes) if bytes == len * 8),
            "{} of {len} words: {done:?}",
            call.name
        );
        let seen = ends.contents();
        for (i, (bytes, noted)) in seen.chunks_exact(8).zip(noted).enumerate() {
            let at = first + i;
            if at % OWNERS < MOST_WRITERS {
                check_word(field, at, noted, u64::from_ne_bytes(bytes.try_into().unwrap()));
            }
        }
        count(Count::SystemCalls, 1);
    }
}

/// Lets the kernel access pages by their frames, as devices do, under guards.
pub fn guard(mut part: Part) {
    let scene = part.scene;
    let page = scene.round.kind.page.bytes();
    let (mut from, to) = pipe();
    let mut value = scene.last[FRAME_WRITER].load(Relaxed);
    while part.goes_on() {
        let field = part.field();
        let pages = field.region.len() / page;
        let first = part.random.below(pages as u64) as usize;
        let range = first * page..(first + 1 + part.random.below(3) as usize).min(pages) * page;
        let guard = field.region.pin(range.clone()).unwrap();
        count(Count::Guards, 1);
        let start = field.address();
        let frames = || places_in(start + range.start..start + range.end, page);
        let before = frames();
        let at = (range.start / 8).next_multiple_of(OWNERS) + FRAME_WRITER;
        let word = &field.words()[at];
        match part.random.below(3) {
            0 => {
                value += 1;
                // SAFETY: the word lies in a region that lives, and all accesses to it are atomic.
                match unsafe { process_vm(word.as_ptr().cast(), &mut value.to_ne_bytes(), true) } {
                    Ok(8) => {
                        assert_eq!(word.load(Relaxed), value, "LOST what was written by a frame");
                        field.note(at, value);
                    }
                    // A container may forbid the call.
                    Err(error) if error.raw_os_error() == Some(libc::EPERM) => {}
                    other => panic!("process_vm_writev: {other:?}"),
                }
            }
            1 => {
                const LEN: usize = 4096;
                // SAFETY: the page belongs to a region that lives.
                let spliced =
                    unsafe { splice((field.address() + range.start) as *mut u8, LEN, &to) };
                assert_eq!(spliced.unwrap(), LEN);
                part.pause(1000);
                let mut back = [0; LEN];
                from.read_exact(&mut back).unwrap();
                let in_page = at * 8 - range.start;
                let seen = u64::from_ne_bytes(back[in_page..in_page + 8].try_into().unwrap());
                assert_eq!(seen, word.load(Relaxed), "the pipe has the bytes of another owner");
            }
            _ => part.pause(20_000),
        }
        assert_eq!(before, frames(), "a guarded page has moved");
        drop(guard);
        part.pause(2000);
    }
    scene.last[FRAME_WRITER].store(value, Relaxed);
}

/// Forks children, which must not inherit regions, and starts programs.
pub fn fork(mut part: Part) {
    let scene = part.scene;
    while part.goes_on() {
        if part.random.below(4) == 0 {
            let ended = Command::new("true").stdin(Stdio::null()).status().unwrap();
            assert!(ended.success(), "{ended}");
            count(Count::Programs, 1);
        } else {
            let page = scene.round.kind.page;
            let mut pages_of = |range: &Range<usize>| -> Vec<usize> {
                let pages = (range.len() / page.bytes()) as u64;
                (0..4)
                    .map(|_| range.start + part.random.below(pages) as usize * page.bytes())
                    .collect()
            };
            let views: Vec<usize> =
                scene.fields.iter().flat_map(|field| pages_of(&field.range())).collect();
            let aliases: Vec<usize> = scene.aliases.iter().flat_map(&mut pages_of).collect();
            let inherited = [mapped_in_a_child(&views), mapped_in_a_child(&aliases)];
            // A child can inherit pages of hugetlb between two calls that move them
            // (docs/protocol.md, section 10).
            let wrong = inherited[1] != 0 || inherited[0] != 0 && !page.is_hugetlb();
            // If the call that hides a mapping from children was made to fail, they may inherit it.
            assert!(
                !wrong || scene.injected.is_some(),
                "a child has {inherited:?} of views and aliases"
            );
            count(Count::Forks, 2);
        }
        part.pause(10_000);
    }
}

/// Sends signals to actors, and lets a timer interrupt any thread.
pub fn send_signals(mut part: Part, restart: bool) {
    for signal in [libc::SIGUSR1, libc::SIGALRM] {
        // SAFETY: a zeroed action with an empty mask is valid, and the handler uses atomics only.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = increment_the_word as *const () as usize;
            action.sa_flags = if restart { libc::SA_RESTART } else { 0 };
            assert_eq!(libc::sigaction(signal, &action, std::ptr::null_mut()), 0);
        }
    }
    part.scene.let_handlers_write();
    set_timer(1 + part.random.below(20_000) as i64);
    while part.goes_on() {
        let actor = part.random.next();
        signal_an_actor(actor, libc::SIGUSR1);
        part.pause(500);
    }
    set_timer(0);
    part.scene.stop_handlers();
}

/// Lets SIGALRM arrive every `every_us` microseconds. 0 stops it.
fn set_timer(every_us: i64) {
    let time = libc::timeval { tv_sec: 0, tv_usec: every_us };
    let timer = libc::itimerval { it_interval: time, it_value: time };
    // SAFETY: the call reads one structure.
    assert_eq!(unsafe { libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) }, 0);
}

/// Uses memory outside all regions.
pub fn stand_by(mut part: Part) {
    let mut round = 0;
    while part.goes_on() {
        use_other_memory(round);
        round += 1;
        part.pause(400);
    }
}

/// Lets the kernel drop page table entries of regions, as it does to swap. The contents of the
/// frames stay.
pub fn forget(mut part: Part) {
    const BYTES: usize = 64 << 10;
    while part.goes_on() {
        let field = part.field();
        let (start, parts) = (field.address(), field.region.len() / BYTES);
        let at = start + part.random.below(parts.max(1) as u64) as usize * BYTES;
        let len = BYTES.min(start + part.scene.round.region_bytes() - at);
        // SAFETY: the call drops entries of a shared mapping, whose bytes stay in the file. For
        // locked pages it fails.
        let dropped = unsafe { libc::madvise(at as *mut libc::c_void, len, libc::MADV_DONTNEED) };
        count(Count::Forgotten, u64::from(dropped == 0));
        part.pause(1000);
    }
}
