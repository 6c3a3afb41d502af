//! Numbers as people read them.

/// A time with three significant digits and a unit.
pub fn human_ns(ns: u64) -> String {
    let (value, unit) = match ns {
        0..1_000 => return format!("{ns} ns"),
        1_000..1_000_000 => (ns as f64 / 1e3, "us"),
        1_000_000..1_000_000_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    format!("{} {unit}", three_digits(value))
}

/// A size with three significant digits and a binary unit. A number that is whole in three digits
/// has no decimals: otherwise `8 GiB` and `8.00 GiB` would stand side by side.
pub fn human_bytes(bytes: f64) -> String {
    const UNITS: [&str; 6] = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit > 0 && value >= 10_000.0 {
        return format!("{value:.1e} {}", UNITS[unit]);
    }
    let digits = if unit == 0 { format!("{value:.0}") } else { three_digits(value) };
    let digits = match digits.split_once('.') {
        Some((whole, decimals)) if decimals.bytes().all(|digit| digit == b'0') => whole,
        _ => &digits,
    };
    format!("{digits} {}", UNITS[unit])
}

/// A number of things: `1 run`, `2 runs`.
pub fn plural(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// A number with three significant digits, but at most two decimals: 0.12, 1.23, 12.3, 123, 1234.
pub fn three_digits(value: f64) -> String {
    let digits = match value {
        value if value >= 99.95 => 0,
        value if value >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.digits$}")
}

/// A number with three significant digits, and k or m for thousands or millions.
pub fn short(number: f64) -> String {
    let (value, unit) = match number {
        number if number >= 999_500.0 => (number / 1e6, "m"),
        number if number >= 1e3 => (number / 1e3, "k"),
        number => (number, ""),
    };
    if value.fract() == 0.0 { format!("{value}{unit}") } else { three_digits(value) + unit }
}

/// A number with commas between groups of three digits.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A share in percent.
pub fn percent(ratio: f64) -> String {
    match ratio {
        ratio if ratio == 0.0 || ratio == 1.0 => format!("{:.0} %", ratio * 100.0),
        ratio if ratio < 0.001 => format!("{:.3} %", ratio * 100.0),
        ratio => format!("{:.1} %", ratio * 100.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_readable() {
        assert_eq!(human_ns(999), "999 ns");
        assert_eq!(human_ns(61_234_567), "61.2 ms");
        assert_eq!(human_ns(1_500_000_000), "1.50 s");
        assert_eq!(human_bytes(512.0 * 1024.0), "512 KiB");
        assert_eq!(human_bytes(844_800_000.0), "806 MiB");
        assert_eq!(human_bytes(8e9 + 589_934_593.0), "8 GiB");
        assert_eq!(human_bytes(7.9f64 * 1024.0), "7.90 KiB");
        assert_eq!(human_bytes(10.0 * 1024.0 + 1.0), "10 KiB");
        assert_eq!(human_bytes(1000.0 * 1024.0), "1000 KiB");
        assert_eq!(human_bytes(1e300), "8.9e284 PiB");
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(6_001_215), "6,001,215");
        assert_eq!(percent(1.0), "100 %");
        assert_eq!(percent(0.9999), "100.0 %");
        assert_eq!(percent(0.0004), "0.040 %");
    }
    #[test]
    fn rates_are_short() {
        for (number, text) in [
            (5.0, "5"),
            (999.4, "999"),
            (99.97, "100"),
            (9.999, "10.0"),
            (1.5, "1.50"),
            (100_000.0, "100k"),
            (99_876.0, "99.9k"),
            (999_900.0, "1.00m"),
            (1e7, "10m"),
        ] {
            assert_eq!(short(number), text);
        }
    }
}
