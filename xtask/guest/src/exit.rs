//! How a guest ends, and the exit codes by which the host can tell.

use std::time::Duration;

/// The guest has done everything in the plan. QEMU exits with `(code << 1) | 1`, here 129, and no
/// other ending has this exit code.
pub const DONE: u8 = 0x40;

/// The guest could not carry out the plan.
pub const BROKEN: u8 = 0x41;

/// Ends the machine with an exit code.
pub fn machine(code: u8) -> ! {
    // The output that is still in the serial ports has to leave the guest first. SAFETY: the calls
    // work on new descriptors, and the paths are constants.
    unsafe {
        for port in [c"/dev/ttyS0", c"/dev/ttyS1"] {
            let descriptor = libc::open(port.as_ptr(), libc::O_WRONLY | libc::O_NOCTTY);
            libc::tcdrain(descriptor);
        }
    }
    debug_exit(code);
    // Without the device the machine is reset, and QEMU ends with another exit code than `DONE`.
    // SAFETY: the call takes no pointers.
    unsafe { libc::reboot(libc::RB_AUTOBOOT) };
    stop()
}

/// Writes the exit code to QEMU's device `isa-debug-exit`. Returns only if the device does not
/// exist.
#[cfg(target_arch = "x86_64")]
fn debug_exit(code: u8) {
    /// The port at which the host places the device.
    const PORT: u16 = 0xf4;
    // SAFETY: the port belongs to the device that ends the machine, or to no device. The
    // instruction touches no memory.
    unsafe {
        if libc::iopl(3) == 0 {
            std::arch::asm!(
                "out dx, al",
                in("dx") PORT,
                in("al") code,
                options(nomem, nostack, preserves_flags)
            );
        }
    }
}

/// Does nothing: the device exists only on x86.
#[cfg(not(target_arch = "x86_64"))]
fn debug_exit(_code: u8) {}

/// Sleeps forever.
pub fn stop() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}
