//! Makes text of unknown origin fit to be shown in errors and warnings.

/// Characters of damaged text that an error shows.
const MAX_SHOWN: usize = 40;

/// The text with control characters escaped, because they could steer a terminal. Errors and
/// warnings show text of files so; a program that prints what [`SysFiles`](super::SysFiles) reads
/// needs it too.
pub fn escaped(text: &str) -> String {
    /// Line and paragraph separators, and characters that change the direction of text.
    const MISLEADING: [std::ops::RangeInclusive<char>; 3] =
        ['\u{200e}'..='\u{200f}', '\u{2028}'..='\u{202e}', '\u{2066}'..='\u{2069}'];
    text.chars().fold(String::new(), |mut out, c| {
        if c.is_control() || MISLEADING.iter().any(|range| range.contains(&c)) {
            out.extend(c.escape_default())
        } else {
            out.push(c)
        }
        out
    })
}

/// The beginning of damaged text, with control characters escaped, for errors.
pub(super) fn shortened(text: &str) -> String {
    let mut out = escaped(&text.chars().take(MAX_SHOWN).collect::<String>());
    if text.chars().nth(MAX_SHOWN).is_some() {
        out.push('…');
    }
    out
}
