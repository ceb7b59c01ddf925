//! Asking for what may take long: on a terminal one sees that it is still under way.

use crate::{Failure, client};
use std::io::{IsTerminal, Write};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tern_control::{Reply, Request};

/// How long an answer may take before its user hears that it is still awaited.
const PATIENCE: Duration = Duration::from_secs(2);

/// Asks, and while the answer takes long says so on standard error, if that is a terminal, in one line that goes away
/// again.
///
/// # Errors
/// As [`client::ask`].
pub fn ask(request: Request, doing: &str) -> Result<Reply, Failure> {
    if !std::io::stderr().is_terminal() {
        return client::ask(&request);
    }
    let (sender, answer) = mpsc::channel();
    std::thread::spawn(move || sender.send(client::ask(&request)));
    show_until(&answer, doing, PATIENCE, &mut std::io::stderr())
}

/// Waits for an answer; from `patience` on shows the time that has passed, each second.
fn show_until(
    answer: &Receiver<Result<Reply, Failure>>,
    doing: &str,
    patience: Duration,
    out: &mut impl Write,
) -> Result<Reply, Failure> {
    let begun = Instant::now();
    let mut wait = patience;
    let mut shown = false;
    loop {
        match answer.recv_timeout(wait) {
            Ok(reply) => {
                if shown {
                    let _ = write!(out, "\r\x1b[K");
                }
                return reply;
            }
            Err(RecvTimeoutError::Timeout) => {
                // A terminal that takes nothing is no reason to give the answer up.
                let _ = write!(out, "\r\x1b[K{doing} … {} s", begun.elapsed().as_secs());
                let _ = out.flush();
                shown = true;
                wait = Duration::from_secs(1);
            }
            // The thread that asks has panicked, and has said so.
            Err(RecvTimeoutError::Disconnected) => return Err(Failure::silent(70)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_moves_are_shown_and_the_line_is_taken_away() {
        let (sender, answer) = mpsc::channel();
        sender.send(Ok(Reply::Done)).unwrap();
        let mut shown = Vec::new();
        show_until(&answer, "moving", Duration::from_secs(60), &mut shown).unwrap();
        assert_eq!(shown, b"", "a quick move shows nothing");

        // The answer comes once the line has been seen.
        struct Seen(mpsc::Sender<Result<Reply, Failure>>, Vec<u8>);
        impl Write for Seen {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.1.extend_from_slice(bytes);
                let _ = self.0.send(Ok(Reply::Done));
                Ok(bytes.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let mut seen = Seen(sender, Vec::new());
        show_until(&answer, "moving", Duration::from_millis(1), &mut seen).unwrap();
        let text = String::from_utf8(seen.1).unwrap();
        assert!(text.contains("moving … 0 s") && text.ends_with("\r\x1b[K"), "{text:?}");
    }
}
