//! How a guest ends.

use std::time::Duration;

/// Everything of the plan was done. QEMU's exit code becomes `(code << 1) | 1`, 129, which no other
/// ending has.
pub const DONE: u8 = 0x40;

/// The plan could not be carried out.
pub const BROKEN: u8 = 0x41;

/// Ends the machine with a code.
pub fn machine(code: u8) -> ! {
    // What is under way on the serial ports has to leave the guest first.
    // SAFETY: plain calls on descriptors of ours; the strings are constants.
    unsafe {
        for port in [c"/dev/ttyS0", c"/dev/ttyS1"] {
            let descriptor = libc::open(port.as_ptr(), libc::O_WRONLY | libc::O_NOCTTY);
            libc::tcdrain(descriptor);
        }
    }
    debug_exit(code);
    // Without the device QEMU ends with an exit code that the host does not take for success.
    // SAFETY: a plain call.
    unsafe { libc::reboot(libc::RB_AUTOBOOT) };
    stop()
}

/// Tells QEMU's device `isa-debug-exit` the code; returns only if there is none.
#[cfg(target_arch = "x86_64")]
fn debug_exit(code: u8) {
    /// Where the host places the device.
    const PORT: u16 = 0xf4;
    // SAFETY: the port belongs to the device that ends the machine, or to nobody; no memory is
    // touched.
    unsafe {
        if libc::iopl(3) == 0 {
            std::arch::asm!("out dx, al", in("dx") PORT, in("al") code, options(nomem, nostack, preserves_flags));
        }
    }
}

/// The device exists for x86 only.
#[cfg(not(target_arch = "x86_64"))]
fn debug_exit(_code: u8) {}

/// Does nothing for ever.
pub fn stop() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}
