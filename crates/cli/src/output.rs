//! Prints text, JSON, numbers and tables.

use crate::Failure;
use serde::Serialize;
use std::io::{self, IsTerminal, Write};

/// Prints text unchanged.
///
/// # Errors
/// Exit code 74 if standard output cannot be written, so that a full disk does not look like
/// success; exit code 141 without a message if the reader has closed the pipe.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Failure::silent(141)),
        Err(error) => Err(Failure::with_code(74, format!("cannot write to standard output: {error}"))),
    }
}

/// Prints a value as one line of JSON.
///
/// # Errors
/// As [`print`].
pub(crate) fn print_json(document: &impl Serialize) -> Result<(), Failure> {
    let mut text = serde_json::to_string(document).map_err(io::Error::from)?;
    text.push('\n');
    print(&text)
}

/// Formats a byte count with decimal units: `12.3 MB` is 12,300,000 bytes.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
    for (size, name) in UNITS {
        // From 999.95 of the smaller unit on, one decimal would show 1000.0.
        if count >= size - size / 20_000 {
            return format!("{:.1} {name}", count as f64 / size as f64);
        }
    }
    format!("{count} B")
}

/// Formats milliseconds: two decimals below 1 ms, one below 10 ms, then none; seconds from 10 s on.
pub(crate) fn milliseconds(time: f64) -> String {
    match time {
        t if t < 1.0 => format!("{t:.2} ms"),
        t if t < 9.95 => format!("{t:.1} ms"),
        t if t < 9_999.5 => format!("{t:.0} ms"),
        t => format!("{:.1} s", t / 1000.0),
    }
}

/// Formats CPU time as ps does: `1:05`, `12:00:00`.
pub(crate) fn cpu_time(seconds: f64) -> String {
    // The value came over a socket: negative or NaN becomes 0, infinity the maximum.
    let whole = seconds as u64;
    let (hours, minutes, seconds) = (whole / 3600, whole / 60 % 60, whole % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

/// Replaces control characters in text from a program or another node, so that it cannot control
/// the terminal.
pub(crate) fn sanitize(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The error's text without Rust's `(os error 19)` suffix, and with a small first letter, for use
/// inside a sentence.
pub(crate) fn error_text(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    // Texts such as `I/O error` keep their capitals.
    let mut letters = text.chars();
    match (letters.next(), letters.next()) {
        (Some(first), Some(second)) if second.is_lowercase() => {
            first.to_lowercase().chain([second]).chain(letters).collect()
        }
        _ => text.to_owned(),
    }
}

/// A table whose columns are as wide as their content; on a terminal, lines are cut at its width.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl Table {
    /// A table with these headings; a heading that begins with `>` right-aligns its column.
    pub(crate) fn new(headings: &[&str]) -> Self {
        let right = headings.iter().map(|h| h.starts_with('>')).collect();
        let names = headings.iter().map(|h| h.trim_start_matches('>').to_owned()).collect();
        Self { rows: vec![names], right }
    }

    /// Appends a row.
    pub(crate) fn push(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Renders the table; lines are cut at `width` columns if given.
    pub(crate) fn render(&self, width: Option<usize>) -> String {
        let widths: Vec<usize> = (0..self.right.len())
            .map(|i| self.rows.iter().filter_map(|r| r.get(i)).map(|c| c.chars().count()).max().unwrap_or(0))
            .collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (i, cell) in row.iter().enumerate() {
                let space = " ".repeat(widths[i] - cell.chars().count());
                let (before, after) = if self.right[i] { (&*space, "") } else { ("", &*space) };
                line.extend([before, cell, after, "  "]);
            }
            let line = line.trim_end();
            match width {
                Some(width) => text.extend(line.chars().take(width)),
                None => text.push_str(line),
            }
            text.push('\n');
        }
        text
    }

    /// Prints the table, cut at the terminal's width.
    ///
    /// # Errors
    /// As [`print`].
    pub(crate) fn print(&self) -> Result<(), Failure> {
        print(&self.render(terminal_width()))
    }
}

/// The width of standard output in columns, if it is a terminal.
fn terminal_width() -> Option<usize> {
    let out = io::stdout();
    let size = out.is_terminal().then(|| rustix::termios::tcgetwinsize(&out).ok()).flatten()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted() {
        let read = [0, 999, 1_000, 12_340_000, 999_960, 5_000_000_000].map(bytes);
        assert_eq!(read, ["0 B", "999 B", "1.0 kB", "12.3 MB", "1.0 MB", "5.0 GB"]);
        let read = [0.25, 7.04, 18.2, 12_345.0].map(milliseconds);
        assert_eq!(read, ["0.25 ms", "7.0 ms", "18 ms", "12.3 s"]);
        let read = [65.9, 43_200.0, -1.0, f64::NAN].map(cpu_time);
        assert_eq!(read, ["1:05", "12:00:00", "0:00", "0:00"]);
    }

    #[test]
    fn tables_are_aligned_and_cut() {
        let mut table = Table::new(&[">PID", "NAME"]);
        table.push(vec!["7".into(), "é".into()]);
        table.push(vec!["1234".into(), "long name".into()]);
        assert_eq!(table.render(None), " PID  NAME\n   7  é\n1234  long name\n");
        assert_eq!(table.render(Some(8)), " PID  NA\n   7  é\n1234  lo\n");
    }

    #[test]
    fn error_texts_are_sentence_parts() {
        let of = |errno| error_text(&io::Error::from_raw_os_error(errno));
        assert_eq!(of(13), "permission denied");
        assert_eq!(error_text(&io::Error::other("TLS failed")), "TLS failed");
    }

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(sanitize("a\x1b[2Jb\n"), "a?[2Jb?");
    }
}
