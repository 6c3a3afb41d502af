//! Compiles `src/preload` into a shared library that the crate embeds, so that an installed
//! command is one file.
//!
//! It is compiled by itself, without the standard library and without libc as a dependency: the
//! loader then resolves its few symbols in whatever C library the program has, glibc or musl, of any
//! version.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of the library's modules.
const SOURCE: &str = "src/preload";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={SOURCE}");
    let out = PathBuf::from(variable("OUT_DIR"));
    let library = out.join("libpageleap-place.so");
    if variable("CARGO_CFG_TARGET_OS") != "linux" {
        // The crate is empty there.
        return;
    }
    // rustc looks for the parts of a `#[path]` beside it, as for those of a file named mod.rs.
    let source = Path::new(&variable("CARGO_MANIFEST_DIR")).join(SOURCE).join("mod.rs");
    let root = out.join("root.rs");
    let text = format!(
        "#![no_std]\n#[path = {source:?}]\nmod preload;\n#[panic_handler]\nfn panic(_: \
         &core::panic::PanicInfo) -> ! {{ loop {{}} }}\n"
    );
    fs::write(&root, text).unwrap_or_else(|error| panic!("{}: {error}", root.display()));
    let mut rustc = Command::new(variable("RUSTC"));
    rustc.args(["--crate-name", "pageleap_place", "--crate-type", "cdylib", "--edition", "2024"]);
    rustc.arg("--target").arg(variable("TARGET"));
    // The tables of frames are there for pthread_exit and cancellation, which unwind the stack.
    for option in ["panic=abort", "opt-level=2", "codegen-units=1", "force-unwind-tables=yes"] {
        rustc.args(["-C", option]);
    }
    rustc.args(["-C", "strip=symbols", "-C", "link-arg=-nostartfiles"]);
    // Programs for musl are static by default, and static targets have no shared libraries.
    if variable("CARGO_CFG_TARGET_ENV") == "musl" {
        rustc.args(["-C", "target-feature=-crt-static"]);
    }
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        let mut option = OsString::from("linker=");
        option.push(linker);
        rustc.arg("-C").arg(option);
    }
    rustc.arg("-o").arg(library).arg(root);
    let status = rustc.status().unwrap_or_else(|error| panic!("{rustc:?}: {error}"));
    assert!(status.success(), "the preloaded library of `pageleap run --place` does not compile");
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|error| panic!("{name}: {error}"))
}
