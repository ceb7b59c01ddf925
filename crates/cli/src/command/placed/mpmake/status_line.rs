//! A status line below the output of make and its recipes, on a terminal.
//!
//! make and its recipes write to the terminal themselves, as they must: they query its size,
//! colours and keys. So the terminal's scroll region is set to all lines but the last, and the last
//! line is written with the cursor saved and restored, in one write. The output of make and its
//! recipes is not changed. If it overwrites the line, the next update repairs the line.

use rustix::termios::{LocalModes, isatty, tcgetattr, tcgetpgrp, tcgetwinsize};
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// A build that ends sooner shows no status line.
const SHOW_DELAY: Duration = Duration::from_secs(2);

/// How often an unchanged line is rewritten.
const REWRITE_INTERVAL: Duration = Duration::from_secs(1);

/// The minimum number of rows and columns of a terminal for a status line.
const MIN_SIZE: (u16, u16) = (5, 30);

/// The status line.
#[derive(Debug)]
pub(super) struct StatusLine {
    started: Instant,
    /// The number of rows of the terminal while the line is shown.
    shown_rows: Option<u16>,
    last: (String, Option<Instant>),
}

impl StatusLine {
    /// Creates the line, which shows nothing yet; `None` if standard error is not a terminal that
    /// supports it.
    pub(super) fn new() -> Option<Self> {
        let term = std::env::var("TERM").unwrap_or_default();
        let is_supported = isatty(rustix::stdio::stderr()) && !["", "dumb", "unknown"].contains(&&*term);
        is_supported.then(|| Self { started: Instant::now(), shown_rows: None, last: (String::new(), None) })
    }

    /// Shows the line that `line` makes for a number of columns, unless another program uses the
    /// terminal now.
    pub(super) fn show(&mut self, line: impl FnOnce(usize) -> String) {
        if self.started.elapsed() < SHOW_DELAY {
            return;
        }
        let Some((rows, columns)) = usable_size() else {
            // A program that has taken the terminal over has set it up, so it must be left
            // unchanged.
            self.shown_rows = None;
            return;
        };
        let line = line(usize::from(columns) - 1);
        let is_current = self.last.1.is_some_and(|at| at.elapsed() < REWRITE_INTERVAL) && self.last.0 == line;
        if is_current && self.shown_rows == Some(rows) {
            return;
        }
        write(&show_sequence(&line, rows, self.shown_rows));
        (self.shown_rows, self.last) = (Some(rows), (line, Some(Instant::now())));
    }

    /// Removes the line and restores the scroll region.
    pub(super) fn clear(&mut self) {
        if let Some(rows) = self.shown_rows.take() {
            write(&clear_sequence(rows));
        }
        self.last.1 = None;
    }
}

impl Drop for StatusLine {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Rows and columns, if this process is in the terminal's foreground group and no full-screen
/// program runs.
fn usable_size() -> Option<(u16, u16)> {
    let terminal = rustix::stdio::stderr();
    let is_foreground = tcgetpgrp(terminal).is_ok_and(|group| group == rustix::process::getpgrp());
    // Editors and menus switch off canonical mode.
    let is_canonical = tcgetattr(terminal).is_ok_and(|modes| modes.local_modes.contains(LocalModes::ICANON));
    let size = tcgetwinsize(terminal).ok()?;
    (is_foreground && is_canonical && size.ws_row >= MIN_SIZE.0 && size.ws_col >= MIN_SIZE.1)
        .then_some((size.ws_row, size.ws_col))
}

/// The escape sequences that show the line in the last of `rows` rows; `shown_rows` is the row
/// count of a line already shown.
fn show_sequence(line: &str, rows: u16, shown_rows: Option<u16>) -> String {
    let before = match shown_rows {
        Some(shown) if shown == rows => String::new(),
        // Scrolls the last row up if it is in use; the cursor keeps its column.
        None => "\x1bD\x1b[A".into(),
        Some(old) => clear_sequence(old) + "\x1bD\x1b[A",
    };
    format!("{before}\x1b7\x1b[1;{}r\x1b[{rows};1H\x1b[0;7m{line}\x1b[0m\x1b[K\x1b8", rows - 1)
}

/// The escape sequences that remove the line.
fn clear_sequence(rows: u16) -> String {
    format!("\x1b7\x1b[r\x1b[{rows};1H\x1b[0m\x1b[2K\x1b8")
}

fn write(text: &str) {
    // A terminal that is gone must not stop the build.
    let _gone = io::stderr().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An emulation of the terminal, as far as these tests need it.
    struct Screen {
        rows: Vec<String>,
        at: (usize, usize),
        saved: (usize, usize),
        /// The last row of the scroll region.
        last: usize,
        /// The rows that have scrolled off the top.
        gone: Vec<String>,
    }

    impl Screen {
        fn new(rows: usize) -> Self {
            Self {
                rows: vec![String::new(); rows],
                at: (0, 0),
                saved: (0, 0),
                last: rows - 1,
                gone: Vec::new(),
            }
        }

        fn down(&mut self) {
            if self.at.0 == self.last {
                let first = self.rows.remove(0);
                self.gone.push(first);
                self.rows.insert(self.last, String::new());
            } else if self.at.0 + 1 < self.rows.len() {
                self.at.0 += 1;
            }
        }

        fn put(&mut self, c: char) {
            let row = &mut self.rows[self.at.0];
            while row.chars().count() <= self.at.1 {
                row.push(' ');
            }
            *row = row.chars().enumerate().map(|(at, old)| if at == self.at.1 { c } else { old }).collect();
            self.at.1 += 1;
        }

        fn take(&mut self, text: &str) {
            let mut chars = text.chars();
            while let Some(c) = chars.next() {
                match c {
                    '\n' => {
                        self.down();
                        self.at.1 = 0;
                    }
                    '\x1b' => match chars.next().unwrap() {
                        '7' => self.saved = self.at,
                        '8' => self.at = self.saved,
                        'D' => self.down(),
                        '[' => {
                            let mut words = String::new();
                            let end = loop {
                                match chars.next().unwrap() {
                                    c if c.is_ascii_alphabetic() => break c,
                                    c => words.push(c),
                                }
                            };
                            self.apply_sequence(end, &words);
                        }
                        other => panic!("ESC {other}"),
                    },
                    c => self.put(c),
                }
            }
        }

        fn apply_sequence(&mut self, end: char, words: &str) {
            let numbers: Vec<usize> = words.split(';').filter_map(|word| word.parse().ok()).collect();
            match (end, &numbers[..]) {
                ('A', []) => self.at.0 = self.at.0.saturating_sub(1),
                ('r', [1, last]) => (self.last, self.at) = (last - 1, (0, 0)),
                ('r', []) => (self.last, self.at) = (self.rows.len() - 1, (0, 0)),
                ('H', [row, column]) => self.at = (row - 1, column - 1),
                ('K', [2]) => self.rows[self.at.0].clear(),
                ('K', []) => self.rows[self.at.0] = self.rows[self.at.0].chars().take(self.at.1).collect(),
                ('m', _) => {}
                other => panic!("{other:?}"),
            }
        }

        fn text(&self) -> Vec<&str> {
            self.gone
                .iter()
                .chain(&self.rows)
                .map(|row| row.trim_end())
                .filter(|row| !row.is_empty())
                .collect()
        }
    }

    #[test]
    fn output_of_others_stays_complete_and_in_order() {
        for first in [0, 3, 9] {
            let mut screen = Screen::new(6);
            let mut expected = Vec::new();
            for n in 0..first {
                screen.take(&format!("before {n}\n"));
                expected.push(format!("before {n}"));
            }
            let mut shown_rows = None;
            for n in 0..9 {
                // Also in the middle of a line.
                screen.take("line ");
                screen.take(&show_sequence(&format!("status {n}"), 6, shown_rows));
                shown_rows = Some(6);
                assert_eq!(screen.rows[5], format!("status {n}"));
                screen.take(&format!("{n}\n"));
                expected.push(format!("line {n}"));
            }
            screen.take(&clear_sequence(6));
            screen.take("after\n");
            expected.push("after".into());
            assert_eq!(screen.text(), expected, "from row {first} on");
            assert_eq!(screen.last, 5);
        }
    }

    #[test]
    fn resized_terminal_moves_the_line() {
        let mut screen = Screen::new(6);
        screen.take("first\n");
        screen.take(&show_sequence("status", 6, None));
        // The terminal has grown; its lines have not moved.
        screen.rows.extend([String::new(), String::new()]);
        screen.take(&show_sequence("status", 8, Some(6)));
        assert_eq!((screen.rows[7].as_str(), screen.text()), ("status", vec!["first", "status"]));
        screen.take(&clear_sequence(8));
        assert_eq!(screen.text(), ["first"]);
    }
}
