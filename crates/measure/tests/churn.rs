//! The churn of allocators, in a process that does nothing else, because it measures the memory of
//! the whole process.

use pageleap_measure::churn::{Churn, SLOTS};

#[test]
fn memory_that_was_asked_for_is_resident() {
    let churned = Churn { threads: 2, operations: 400_000, seed: 1 }.run().unwrap();
    // About half of the slots have an item, of 80 bytes in the mean.
    let expected = 2.0 * SLOTS as f64 / 2.0 * 80.0;
    let requested = churned.requested_bytes as f64;
    assert!((0.7..1.5).contains(&(requested / expected)), "{churned:?}");
    // The C library needs more than what was asked for, and not many times as much.
    assert!((1.0..20.0).contains(&churned.overhead()), "{churned:?}");
    assert!(churned.allocator.contains("libc"), "{churned:?}");
    // The same requests again.
    let again = Churn { threads: 2, operations: 400_000, seed: 1 }.run().unwrap();
    assert_eq!(again.requested_bytes, churned.requested_bytes);
}
