//! Numbers as people read them.

/// Three significant digits and a unit.
pub fn human_ns(ns: u64) -> String {
    let (value, unit) = match ns {
        0..1_000 => return format!("{ns} ns"),
        1_000..1_000_000 => (ns as f64 / 1e3, "us"),
        1_000_000..1_000_000_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    three_digits(value, unit)
}

/// The same, and `-` for what is not known.
pub fn optional_ns(ns: Option<u64>) -> String {
    ns.map_or_else(|| "-".to_owned(), human_ns)
}

/// Three significant digits and a binary unit.
pub fn human_bytes(bytes: f64) -> String {
    const UNITS: [&str; 6] = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || (value.fract() == 0.0 && value < 1024.0) {
        return format!("{value:.0} {}", UNITS[unit]);
    }
    if value >= 10_000.0 {
        return format!("{value:.1e} {}", UNITS[unit]);
    }
    three_digits(value, UNITS[unit])
}

fn three_digits(value: f64, unit: &str) -> String {
    let digits = match value {
        value if value < 10.0 => 2,
        value if value < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {unit}")
}

/// With commas between groups of three digits.
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
        assert_eq!(human_bytes(1e300), "8.9e284 PiB");
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(6_001_215), "6,001,215");
        assert_eq!(percent(1.0), "100 %");
        assert_eq!(percent(0.9999), "100.0 %");
        assert_eq!(percent(0.0004), "0.040 %");
    }
}
