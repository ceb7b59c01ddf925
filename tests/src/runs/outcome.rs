//! The outcome of a run, and the difference between two outcomes.

use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::process::Output;

/// The output and exit status of a program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Its standard output.
    pub out: Vec<u8>,
    /// Its standard error.
    pub err: Vec<u8>,
    /// Exit status, or 128 + the signal that killed it, as in a shell.
    pub status: i32,
}

/// Exit status, standard output and standard error of a command.
pub fn result_of(end: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (end.status.code(), text(&end.stdout), text(&end.stderr))
}

impl Outcome {
    /// How this run differs from the one without migration; `None` if it does not.
    pub fn difference(&self, native: &Self) -> Option<String> {
        let mut text = String::new();
        if self.status != native.status {
            let _ = writeln!(text, "exit status {} instead of {}", self.status, native.status);
        }
        first_difference(&mut text, "stdout", &self.out, &native.out);
        first_difference(&mut text, "stderr", &self.err, &native.err);
        (!text.is_empty()).then_some(text)
    }
}

fn first_difference(text: &mut String, name: &str, got: &[u8], wanted: &[u8]) {
    if got == wanted {
        return;
    }
    let at = got.iter().zip(wanted).take_while(|(a, b)| a == b).count();
    let line = 1 + got[..at].iter().filter(|b| **b == b'\n').count();
    let start = got[..at].iter().rposition(|b| *b == b'\n').map_or(0, |newline| newline + 1);
    let shown =
        |bytes: &[u8]| String::from_utf8_lossy(&bytes[start..bytes.len().min(start + 300)]).into_owned();
    let _ = writeln!(
        text,
        "{name} differs from byte {at} (line {line}) on; {} bytes instead of {}\n  got    {:?}\n  wanted {:?}",
        got.len(),
        wanted.len(),
        shown(got),
        shown(wanted)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn difference_is_found_and_shown() {
        let native = Outcome { out: b"one\ntwo\nPASS\n".to_vec(), err: Vec::new(), status: 0 };
        assert_eq!(native.difference(&native), None);
        let cut = Outcome { out: b"one\ntw".to_vec(), status: 137, ..native.clone() };
        let text = cut.difference(&native).unwrap();
        assert!(text.contains("137 instead of 0") && text.contains("byte 6 (line 2)"), "{text}");
        let noisy = Outcome { err: b"x".to_vec(), ..native.clone() };
        assert!(noisy.difference(&native).unwrap().contains("stderr"));
    }
}
