//! Formats numbers.

/// Formats bytes: `12.3 MB` is 12,300,000 bytes.
#[must_use]
pub fn bytes(count: u64) -> String {
    let (figure, unit) = scaled(count);
    if unit.is_empty() { format!("{figure} B") } else { format!("{figure} {unit}B") }
}

/// Formats a part of a whole: `6.0 of 8.0 GB`.
#[must_use]
pub fn bytes_of(part: u64, whole: u64) -> String {
    let ((figure, unit), (_, whole_unit)) = (scaled(part), scaled(whole));
    if unit == whole_unit {
        format!("{figure} of {}", bytes(whole))
    } else {
        format!("{} of {}", bytes(part), bytes(whole))
    }
}

/// Formats bytes: `12.3M`. Below 10,000 TB this takes at most five columns.
#[must_use]
pub fn short_bytes(count: u64) -> String {
    let (figure, unit) = scaled(count);
    // From 100 on, no decimal fits.
    let figure = if figure.len() > 4 { figure.split('.').next().unwrap_or_default() } else { &figure };
    format!("{figure}{unit}")
}

fn scaled(count: u64) -> (String, &'static str) {
    const UNITS: [(u64, &str); 4] =
        [(1_000_000_000_000, "T"), (1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")];
    for (size, name) in UNITS {
        // From 999.95 of the smaller unit on, one decimal would show 1000.0.
        if count >= size - size / 20_000 {
            return (format!("{:.1}", count as f64 / size as f64), name);
        }
    }
    (count.to_string(), "")
}

/// Formats a value from 0 to 999 million in at most four columns, with as many decimals as fit, but
/// at most two.
#[must_use]
pub fn four_columns(value: f64) -> String {
    match value {
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v if v < 9_999.5 => format!("{v:.0}"),
        v if v < 999_500.0 => format!("{:.0}k", v / 1e3),
        v => format!("{:.0}M", v / 1e6),
    }
}

/// Formats milliseconds: one decimal below ten, none above, seconds from 10 s on.
#[must_use]
pub fn milliseconds(time: f64) -> String {
    match time {
        t if t < 9.95 => format!("{t:.1} ms"),
        t if t < 9_999.5 => format!("{t:.0} ms"),
        t => format!("{:.1} s", t / 1000.0),
    }
}

/// Formats a time span in milliseconds as seconds, minutes or hours.
#[must_use]
pub fn ago(ms: u64) -> String {
    match ms / 1000 {
        s if s < 10 => format!("{:.1} s", ms as f64 / 1000.0),
        s if s < 120 => format!("{s} s"),
        s if s < 7_200 => format!("{} min", s / 60),
        s => format!("{} h", s / 3_600),
    }
}

/// Formats CPU time as ps does: `1:05`, `12:00:00`.
#[must_use]
pub fn cpu_time(seconds: f64) -> String {
    // The value came over a socket: negative or NaN becomes 0, infinity the maximum.
    let whole = seconds as u64;
    let (hours, minutes, seconds) = (whole / 3600, whole / 60 % 60, whole % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

/// Formats a number with a noun: `1 guest`, `2 guests`.
#[must_use]
pub fn count(number: u64, what: &str) -> String {
    let plural = match what {
        "process" => "es",
        _ => "s",
    };
    format!("{number} {what}{}", if number == 1 { "" } else { plural })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted() {
        let read = [0, 999, 12_340_000, 999_960_000, 5_000_000_000].map(bytes);
        assert_eq!(read, ["0 B", "999 B", "12.3 MB", "1.0 GB", "5.0 GB"]);
        let read = [0, 12_340_000, 999_940_000, 540_000_000_000, u64::MAX].map(short_bytes);
        assert_eq!(read, ["0", "12.3M", "999M", "540G", "18446744T"]);
        assert_eq!(bytes_of(6_000_000_000, 8_000_000_000), "6.0 of 8.0 GB");
        assert_eq!(bytes_of(0, 8_000_000_000), "0 B of 8.0 GB");
        let read = [0.0, 1.5, 9.999, 99.96, 12_345.0, f64::INFINITY].map(four_columns);
        assert_eq!(read, ["0.00", "1.50", "10.0", "100", "12k", "infM"]);
        let read = [400, 61_000, 130_000, 7_300_000].map(ago);
        assert_eq!(read, ["0.4 s", "61 s", "2 min", "2 h"]);
        let read = [65.9, 43_200.0, -1.0, f64::NAN].map(cpu_time);
        assert_eq!(read, ["1:05", "12:00:00", "0:00", "0:00"]);
        assert_eq!(count(1, "process") + &count(0, "guest"), "1 process0 guests");
    }
}
