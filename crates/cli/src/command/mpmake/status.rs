//! A line below all that make and its recipes write, on a terminal.
//!
//! They write there themselves, which they must, since they ask it for its size, its colours and its keys. So the terminal is
//! told to scroll all of its lines but the last, and the last is written with the cursor put away and brought back, all in
//! one write. Nothing of what others write is touched, and however they move, the next write of this line sets it right.

use rustix::termios::{LocalModes, isatty, tcgetattr, tcgetpgrp, tcgetwinsize};
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// A build that is over sooner shows nothing.
const PATIENCE: Duration = Duration::from_secs(2);

/// How often it is written if it says the same.
const AGAIN: Duration = Duration::from_secs(1);

/// The fewest lines and columns of a terminal in which one may be taken.
const LEAST: (u16, u16) = (5, 30);

/// The line.
#[derive(Debug)]
pub(super) struct Status {
    begun: Instant,
    /// While a line is taken: how many the terminal has.
    taken: Option<u16>,
    said: (String, Option<Instant>),
}

impl Status {
    /// Shows nothing yet; nothing at all where there is no terminal that could.
    pub(super) fn new() -> Option<Self> {
        let term = std::env::var("TERM").unwrap_or_default();
        let can = isatty(rustix::stdio::stderr()) && !["", "dumb", "unknown"].contains(&&*term);
        can.then(|| Self { begun: Instant::now(), taken: None, said: (String::new(), None) })
    }

    /// Says something new, made for so many columns; or nothing, while the terminal is somebody else's.
    pub(super) fn say(&mut self, line: impl FnOnce(usize) -> String) {
        if self.begun.elapsed() < PATIENCE {
            return;
        }
        let Some((rows, columns)) = room() else {
            // Who has taken the terminal over has it as he wants it, and leaves it so.
            self.taken = None;
            return;
        };
        let line = line(usize::from(columns) - 1);
        let shown = self.said.1.is_some_and(|at| at.elapsed() < AGAIN) && self.said.0 == line;
        if shown && self.taken == Some(rows) {
            return;
        }
        write(&drawn(&line, rows, self.taken));
        (self.taken, self.said) = (Some(rows), (line, Some(Instant::now())));
    }

    /// Gives the line back: the terminal is as it was.
    pub(super) fn clear(&mut self) {
        if let Some(rows) = self.taken.take() {
            write(&cleared(rows));
        }
        self.said.1 = None;
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Rows and columns, if this is the terminal's foreground and nobody draws on all of it.
fn room() -> Option<(u16, u16)> {
    let terminal = rustix::stdio::stderr();
    let own = tcgetpgrp(terminal).is_ok_and(|group| group == rustix::process::getpgrp());
    // An editor or a menu takes keys as they are typed.
    let lines = tcgetattr(terminal).is_ok_and(|modes| modes.local_modes.contains(LocalModes::ICANON));
    let size = tcgetwinsize(terminal).ok()?;
    (own && lines && size.ws_row >= LEAST.0 && size.ws_col >= LEAST.1).then_some((size.ws_row, size.ws_col))
}

/// What shows the line in the last of so many rows; before it, that may have been another.
fn drawn(line: &str, rows: u16, taken: Option<u16>) -> String {
    let before = match taken {
        Some(taken) if taken == rows => String::new(),
        // Whatever is in the last row moves up, and the cursor with it, in its column.
        None => "\x1bD\x1b[A".into(),
        Some(old) => cleared(old) + "\x1bD\x1b[A",
    };
    format!("{before}\x1b7\x1b[1;{}r\x1b[{rows};1H\x1b[0;7m{line}\x1b[0m\x1b[K\x1b8", rows - 1)
}

/// What takes it away.
fn cleared(rows: u16) -> String {
    format!("\x1b7\x1b[r\x1b[{rows};1H\x1b[0m\x1b[2K\x1b8")
}

fn write(text: &str) {
    // A terminal that is gone is no reason to stop the build.
    let _gone = io::stderr().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So much of a terminal as is needed here.
    struct Screen {
        rows: Vec<String>,
        at: (usize, usize),
        saved: (usize, usize),
        /// The last row of those that scroll.
        last: usize,
        /// What has left at the top.
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
                            self.order(end, &words);
                        }
                        other => panic!("ESC {other}"),
                    },
                    c => self.put(c),
                }
            }
        }

        fn order(&mut self, end: char, words: &str) {
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
    fn what_others_write_stays_whole_and_in_order() {
        for first in [0, 3, 9] {
            let mut screen = Screen::new(6);
            let mut expected = Vec::new();
            for n in 0..first {
                screen.take(&format!("before {n}\n"));
                expected.push(format!("before {n}"));
            }
            let mut taken = None;
            for n in 0..9 {
                // In the middle of a line, too.
                screen.take("line ");
                screen.take(&drawn(&format!("status {n}"), 6, taken));
                taken = Some(6);
                assert_eq!(screen.rows[5], format!("status {n}"));
                screen.take(&format!("{n}\n"));
                expected.push(format!("line {n}"));
            }
            screen.take(&cleared(6));
            screen.take("after\n");
            expected.push("after".into());
            assert_eq!(screen.text(), expected, "from row {first} on");
            assert_eq!(screen.last, 5);
        }
    }

    #[test]
    fn another_size_is_another_last_line() {
        let mut screen = Screen::new(6);
        screen.take("first\n");
        screen.take(&drawn("status", 6, None));
        // The terminal has grown, and its lines were pushed down by none.
        screen.rows.extend([String::new(), String::new()]);
        screen.take(&drawn("status", 8, Some(6)));
        assert_eq!((screen.rows[7].as_str(), screen.text()), ("status", vec!["first", "status"]));
        screen.take(&cleared(8));
        assert_eq!(screen.text(), ["first"]);
    }
}
