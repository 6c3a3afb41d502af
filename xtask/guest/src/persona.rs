//! A test binary that misbehaves on purpose, under the name [`NAME`], to prove that the lab
//! notices. Its tests are:
//!
//! * `passes`: prints what a harness prints for a test that has passed; the control.
//! * `sleeps`: never ends.
//! * `eats`: takes memory until the kernel kills it.
//! * `dies`: panics after some output.
//! * `nothing`: ends well without running anything, as a harness does when no test has the name.

use std::path::Path;

use crate::exit;

/// File name of the binary below `/lab/bin`.
const NAME: &str = "broken";

/// Whether this process was started as [`NAME`], and by the first process of a guest.
pub fn is_wanted() -> bool {
    let program = std::env::args().next().unwrap_or_default();
    // SAFETY: the call takes no arguments and cannot fail.
    let parent = unsafe { libc::getppid() };
    parent == 1 && Path::new(crate::PLAN).exists() && Path::new(&program).ends_with(NAME)
}

/// Runs the test that the arguments name (`--exact NAME …`).
pub fn play() -> ! {
    match std::env::args().nth(2).as_deref() {
        Some("passes") => {
            println!("test passes ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored")
        }
        Some("sleeps") => exit::stop(),
        Some("eats") => exhaust(),
        Some("dies") => panic!("as it should"),
        _ => println!("test result: ok. 0 passed; 0 failed; 0 ignored"),
    }
    std::process::exit(0)
}

/// Takes memory until the kernel has none left.
fn exhaust() -> ! {
    const PIECE: usize = 1 << 20;
    loop {
        let piece = vec![1u8; PIECE];
        std::hint::black_box(&piece);
        std::mem::forget(piece);
    }
}
