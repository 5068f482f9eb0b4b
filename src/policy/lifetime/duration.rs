//! Durations as Go programs write them: `72h`, `1h30m`, `1.5s`, `250ms`.

use std::time::Duration;

/// The longest duration: a hundred years. Anything longer is a typing error.
const LONGEST: Duration = Duration::from_secs(100 * 366 * 24 * 3600);

/// Parses a duration; none if the text is no duration, or a negative one.
pub(crate) fn parse_duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    if text.is_empty() {
        return None;
    }
    let mut rest = text;
    let mut nanos: u128 = 0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(digits);
        let unit = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit);
        nanos = nanos.checked_add(amount(number, unit_nanos(unit)?)?)?;
        rest = tail;
    }
    let duration = Duration::new(u64::try_from(nanos / 1_000_000_000).ok()?, (nanos % 1_000_000_000) as u32);
    (duration <= LONGEST).then_some(duration)
}

fn unit_nanos(unit: &str) -> Option<u128> {
    Some(match unit {
        "ns" => 1,
        "us" | "µs" | "μs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60 * 1_000_000_000,
        "h" => 3600 * 1_000_000_000,
        _ => return None,
    })
}

/// A decimal number of units in nanoseconds, rounded down.
fn amount(number: &str, unit: u128) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') || number.len() > 24 {
        return None;
    }
    let whole: u128 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let mut place = unit;
    fraction.bytes().try_fold(whole.checked_mul(unit)?, |nanos, digit| {
        place /= 10;
        nanos.checked_add(u128::from(digit - b'0') * place)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_as_go_reads_them() {
        for (text, seconds, nanos) in [
            ("72h", 72 * 3600, 0),
            ("30m", 1800, 0),
            ("1h30m", 5400, 0),
            ("1.5s", 1, 500_000_000),
            ("250ms", 0, 250_000_000),
            ("2µs", 0, 2_000),
            ("0", 0, 0),
            ("0s", 0, 0),
            (".5h", 1800, 0),
        ] {
            assert_eq!(parse_duration(text), Some(Duration::new(seconds, nanos)), "{text}");
        }
    }

    #[test]
    fn what_go_refuses_is_refused_and_so_are_negative_and_endless_ones() {
        for text in
            ["", "5", "-1h", "+1h", "3d", "h", ".h", "1.2.3s", "1h 30m", "1H", "99999999999999999999999h"]
        {
            assert_eq!(parse_duration(text), None, "{text:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[0-9.hmsnuµ-]{0,40}") {
            let _ = parse_duration(&text);
        }
    }
}
