//! Stands in for a test binary that misbehaves, under the name [`NAME`]: proof that the lab
//! notices. Tests of it, by name:
//!
//! * `passes`: what a harness prints for a test that has passed; the control,
//! * `sleeps`: never ends,
//! * `eats`: takes memory until the kernel kills it,
//! * `dies`: ends with a panic after some output,
//! * `nothing`: ends well without having run anything, as a harness does when no test has the name.

use std::path::Path;

use crate::exit;

/// Name below `/lab/bin`.
const NAME: &str = "broken";

/// Whether this process was started under that name, as a child of the guest's first process.
pub fn is_wanted() -> bool {
    let program = std::env::args().next().unwrap_or_default();
    // SAFETY: a plain call.
    let parent = unsafe { libc::getppid() };
    parent == 1 && Path::new(crate::PLAN).exists() && Path::new(&program).ends_with(NAME)
}

/// Plays the part that the arguments name (`--exact NAME …`).
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

/// Takes memory until the kernel has none left to give.
pub fn exhaust() -> ! {
    const PIECE: usize = 1 << 20;
    loop {
        let piece = vec![1u8; PIECE];
        std::hint::black_box(&piece);
        std::mem::forget(piece);
    }
}
