//! How numbers and tables are printed.

use crate::Failure;
use serde::Serialize;
use std::io::{self, IsTerminal, Write};

/// Prints text, as it is.
///
/// # Errors
/// If standard output does not take it: a full disk must not look like success. A closed pipe ends quietly.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Failure::silent(141)),
        Err(error) => Err(Failure {
            code: 74,
            message: format!("cannot write to standard output: {error}"),
            hint: None,
        }),
    }
}

/// Prints a document as one line of JSON.
///
/// # Errors
/// As `print`.
pub fn print_json(document: &impl Serialize) -> Result<(), Failure> {
    let mut text = serde_json::to_string(document).map_err(io::Error::from)?;
    text.push('\n');
    print(&text)
}

/// Bytes as people say them: `12.3 MB` is 12,300,000 bytes.
pub fn bytes(count: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
    for (size, name) in UNITS {
        // From 999,950 on, one decimal would read 1000.0 of the smaller unit.
        if count >= size - size / 20_000 {
            return format!("{:.1} {name}", count as f64 / size as f64);
        }
    }
    format!("{count} B")
}

/// Milliseconds: two digits that matter below ten, none after the point above.
pub fn milliseconds(time: f64) -> String {
    match time {
        t if t < 1.0 => format!("{t:.2} ms"),
        t if t < 9.95 => format!("{t:.1} ms"),
        t if t < 9_999.5 => format!("{t:.0} ms"),
        t => format!("{:.1} s", t / 1000.0),
    }
}

/// CPU time as ps prints it: `1:05`, `12:00:00`.
pub fn cpu_time(seconds: f64) -> String {
    // Whatever came over the socket: a negative or endless time becomes 0 or the greatest.
    let whole = seconds as u64;
    let (hours, minutes, seconds) = (whole / 3600, whole / 60 % 60, whole % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

/// Text that came from a program or another node, with nothing in it that could command a terminal.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// What went wrong, without Rust's `(os error 19)` behind it, and begun as the middle of a sentence.
pub fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    // `I/O error` and the like keep their capitals.
    let mut letters = text.chars();
    match (letters.next(), letters.next()) {
        (Some(first), Some(second)) if second.is_lowercase() => {
            first.to_lowercase().chain([second]).chain(letters).collect()
        }
        _ => text.to_owned(),
    }
}

/// A table whose columns are as wide as their content; the last one takes what is left of the terminal.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl Table {
    /// A table with these headings; those that begin with `>` head columns of numbers, set to the right.
    pub fn new(headings: &[&str]) -> Self {
        let right = headings.iter().map(|h| h.starts_with('>')).collect();
        let names = headings.iter().map(|h| h.trim_start_matches('>').to_owned()).collect();
        Self { rows: vec![names], right }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The text; lines are cut at `width` columns if one is given.
    pub fn render(&self, width: Option<usize>) -> String {
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

    /// Prints it.
    ///
    /// # Errors
    /// As `print`.
    pub fn print(&self) -> Result<(), Failure> {
        print(&self.render(terminal_width()))
    }
}

/// How wide standard output is, if it is a terminal.
fn terminal_width() -> Option<usize> {
    let out = io::stdout();
    let size = out.is_terminal().then(|| rustix::termios::tcgetwinsize(&out).ok()).flatten()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        let read = [0, 999, 1_000, 12_340_000, 999_960, 5_000_000_000].map(bytes);
        assert_eq!(read, ["0 B", "999 B", "1.0 kB", "12.3 MB", "1.0 MB", "5.0 GB"]);
        let read = [0.25, 7.04, 18.2, 12_345.0].map(milliseconds);
        assert_eq!(read, ["0.25 ms", "7.0 ms", "18 ms", "12.3 s"]);
        let read = [65.9, 43_200.0, -1.0, f64::NAN].map(cpu_time);
        assert_eq!(read, ["1:05", "12:00:00", "0:00", "0:00"]);
    }

    #[test]
    fn tables_align_and_are_cut() {
        let mut table = Table::new(&[">PID", "NAME"]);
        table.row(vec!["7".into(), "é".into()]);
        table.row(vec!["1234".into(), "long name".into()]);
        assert_eq!(table.render(None), " PID  NAME\n   7  é\n1234  long name\n");
        assert_eq!(table.render(Some(8)), " PID  NA\n   7  é\n1234  lo\n");
    }

    #[test]
    fn reasons_are_sentence_parts() {
        let of = |errno| reason(&io::Error::from_raw_os_error(errno));
        assert_eq!(of(13), "permission denied");
        assert_eq!(reason(&io::Error::other("TLS failed")), "TLS failed");
    }

    #[test]
    fn nothing_commands_the_terminal() {
        assert_eq!(plain("a\x1b[2Jb\n"), "a?[2Jb?");
    }
}
