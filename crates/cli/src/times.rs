//! Parses times on the command line.

use std::time::Duration;

/// Reads a time-out: seconds or milliseconds.
pub fn timeout(text: &str) -> Result<Duration, String> {
    let (digits, unit) = match text.strip_suffix("ms") {
        Some(digits) => (digits, 1e-3),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    let seconds: f64 =
        digits.parse().map_err(|_| "expected seconds such as 10, 0.5s or 250ms".to_owned())?;
    if seconds.is_nan() || seconds <= 0.0 {
        return Err("a timeout must be longer than 0; leave it out to wait for ever".to_owned());
    }
    match Duration::try_from_secs_f64(seconds * unit) {
        Ok(Duration::ZERO) => Err("a timeout must be at least one nanosecond".to_owned()),
        Ok(timeout) => Ok(timeout),
        Err(_) => {
            Err("longer than this program can count; leave it out to wait for ever".to_owned())
        }
    }
}

/// Reads a time of whole microseconds or milliseconds.
pub fn wait_budget(text: &str) -> Result<Duration, String> {
    let (digits, unit) = match (text.strip_suffix("us"), text.strip_suffix("ms")) {
        (Some(digits), _) => (digits, 1_000),
        (_, Some(digits)) => (digits, 1_000_000),
        _ => ("", 0),
    };
    match digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit)) {
        Some(ns @ 1..) => Ok(Duration::from_nanos(ns)),
        _ => Err("expected a time such as 200us or 1ms".to_owned()),
    }
}
