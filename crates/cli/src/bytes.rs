//! Parses numbers of bytes and of threads on the command line.

use pageleap::MAX_THREADS;

/// Largest size of a pool.
const MOST_POOL_BYTES: u64 = 1 << 46;

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
    bytes.checked_mul(1 << shift).ok_or_else(|| "this is more than 2^64 bytes".to_owned())
}

/// Reads the size of a region for a leap.
pub fn region_size(text: &str) -> Result<u64, String> {
    match parse(text)? {
        0 => Err("a region has at least one page".to_owned()),
        bytes if bytes > MOST_POOL_BYTES => Err("a pool has at most 64 TiB".to_owned()),
        bytes => Ok(bytes),
    }
}

/// Reads a number of threads.
pub fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(threads @ 1..=MAX_THREADS) => Ok(threads),
        _ => Err(format!("expected a number of threads, 1 to {MAX_THREADS}")),
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
    fn sizes_of_regions() {
        assert_eq!(region_size("64g"), Ok(64 << 30));
        for text in ["0", "0k", "-1", "many", "1000t"] {
            assert!(region_size(text).is_err(), "{text}");
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
