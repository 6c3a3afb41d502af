//! Numbers of bytes and of threads on the command line.

use pageleap::MAX_THREADS;

/// Reads a number of bytes such as `65536`, `512k`, `16m`, `1g` or `2t` (binary units).
pub fn parse(text: &str) -> Result<u64, String> {
    let expected = "expected bytes such as 65536, 512k, 16m or 1g";
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        Some((at, 't' | 'T')) => (&text[..at], 40),
        _ => (text, 0),
    };
    if !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err(expected.to_owned());
    }
    let bytes = digits.parse::<u64>().map_err(|_| expected.to_owned())?;
    bytes.checked_mul(1 << shift).ok_or_else(|| "more bytes than the address space has".to_owned())
}

/// Reads how many threads copy.
pub fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("at least one thread must copy".to_owned()),
        Ok(threads) if threads > MAX_THREADS => {
            Err(format!("at most {MAX_THREADS} threads can copy"))
        }
        Ok(threads) => Ok(threads),
        Err(_) => Err("expected a number of threads, at least 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_binary_and_nothing_overflows() {
        for (text, bytes) in
            [("0", 0), ("4096", 4096), ("512k", 512 << 10), ("16M", 16 << 20), ("2t", 2 << 40)]
        {
            assert_eq!(parse(text), Ok(bytes));
        }
        for text in ["", "k", "-1", "1.5m", "99999999999g", "16mb", "+4k", "18446744073709551616"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn thread_counts() {
        assert_eq!(threads("3"), Ok(3));
        assert_eq!(threads("64"), Ok(64));
        for text in ["0", "65", "-1", "two", "1.5", ""] {
            assert!(threads(text).is_err(), "{text}");
        }
    }
}
