//! What broken guests have sent and printed, recorded once from real guests, and what the reader
//! has to say of it. Guests that panic, hang or run out of time are real: see
//! [`broken`](super::broken).

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use super::transcript::{DONE, Expected, Judged, Outcome, TestId, Transcript};
use crate::process::Ending;

/// A guest with one test.
struct Recorded {
    nonce: &'static str,
    /// The lines of its second serial port.
    results: &'static str,
    /// Lines of its console.
    console: &'static str,
    /// QEMU's exit code.
    exit: i32,
}

/// Its first process took memory until none was left, when the test had begun.
const WITHOUT_MEMORY: Recorded = Recorded {
    nonce: "18eb30f7ed47a6b4-5e2c-3",
    results: "@hello 18eb30f7ed47a6b4-5e2c-3 6.12.117+deb12-cloud-amd64 0\n\
              @begin 0\n@beat\n@beat\n",
    console: "\
[    8.623407] RIP: 0033:0x7f51e619a54a
[    8.640078] Out of memory and no killable processes...
[    8.640301] Kernel panic - not syncing: System is deadlocked on memory
[    8.643136]  panic+0x344/0x3a0
[    8.644334] RIP: 0033:0x7f51e619a54a
[    8.646774] RSP: 002b:00007fff23a7b598 EFLAGS: 00000206
[    8.647505]  </TASK>
[    8.647988] Kernel Offset: disabled
",
    exit: 0,
};

/// The results stop in the middle of a line. The machine then ends as after success.
const CUT: Recorded = Recorded {
    nonce: "18eb30fb3c0491ec-5e2c-4",
    results: "@hello 18eb30fb3c0491ec-5e2c-4 6.12.117+deb12-cloud-amd64 0\n@begin 0\n@end 0 exi",
    console: "\
[    0.056000] tsc: Unable to calibrate against PIT
[    2.302569] amd_pstate: the _CPC object is not present in SBIOS or ACPI disabled
",
    exit: DONE,
};

/// It ended as after success, before anything was done.
const EARLY: Recorded = Recorded {
    nonce: "18eb30fde27c0b88-5e2c-5",
    results: "@hello 18eb30fde27c0b88-5e2c-5 6.12.117+deb12-cloud-amd64 0\n",
    console: "\
[    0.052000] tsc: Unable to calibrate against PIT
[    2.288525] amd_pstate: the _CPC object is not present in SBIOS or ACPI disabled
",
    exit: DONE,
};

/// The kernel printed a warning. The guest itself has noticed nothing.
const WARNING: Recorded = Recorded {
    nonce: "18eb30ffe0e716a3-5e2c-6",
    results: "@hello 18eb30ffe0e716a3-5e2c-6 6.12.117+deb12-cloud-amd64 0\n\
              @bye 18eb30ffe0e716a3-5e2c-6\n@beat\n",
    console: "\
[    0.044000] tsc: Unable to calibrate against PIT
[    2.282982] amd_pstate: the _CPC object is not present in SBIOS or ACPI disabled
[    4.055461] WARNING: CPU: 0 PID: 1 at mm/nowhere.c:1
",
    exit: DONE,
};

const NOT_DONE: &str = "the guest did not report that it had done everything";

/// Judges the guest. It has exactly these problems, and its test failed for this reason.
fn check(guest: &Recorded, problems: &[&str], failed: &str) -> Judged {
    let mut transcript = Transcript::default();
    guest.results.lines().for_each(|line| drop(transcript.line(line)));
    let expected = Expected {
        nonce: guest.nonce.into(),
        release: "6.12.117+deb12-cloud-amd64".into(),
        nodes: "0".into(),
        tests: vec![TestId { binary: "broken".into(), name: "first".into() }],
    };
    let ending = Ending::Exited(ExitStatus::from_raw(guest.exit << 8));
    let judged = transcript.judge(&expected, ending, "", guest.console);
    assert_eq!(judged.problems, problems);
    assert_eq!(judged.rows[0].outcome, Outcome::Failed(failed.into(), Vec::new()));
    judged
}

#[test]
fn a_guest_without_memory_is_noticed() {
    let panic = "[    8.640301] Kernel panic - not syncing: System is deadlocked on memory";
    let complaint = format!("the kernel complained: {panic}");
    let reset = "the guest was reset: a kernel panic, or no process was left to kill";
    let problems = [NOT_DONE, reset, &complaint];
    let judged = check(&WITHOUT_MEMORY, &problems, "the guest ended while the test ran");
    assert!(judged.console.iter().any(|line| line == panic), "{:?}", judged.console);
    assert_eq!(judged.impossible, None);
}

#[test]
fn truncated_results_are_noticed() {
    let cut = "1 unknown line(s), the last: @end 0 exi";
    check(&CUT, &[NOT_DONE, cut], "the guest ended while the test ran");
}

#[test]
fn an_early_end_is_noticed() {
    check(&EARLY, &[NOT_DONE], "the guest ended before the test began");
}

#[test]
fn a_warning_of_the_kernel_is_noticed() {
    let warning = "[    4.055461] WARNING: CPU: 0 PID: 1 at mm/nowhere.c:1";
    let complaint = format!("the kernel complained: {warning}");
    let judged = check(&WARNING, &[&complaint], "the guest ended before the test began");
    assert!(judged.console.iter().any(|line| line == warning), "{:?}", judged.console);
}
