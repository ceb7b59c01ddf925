//! Sends requests that may take long, and shows on a terminal that the reply is pending.

use crate::{Failure, client};
use std::io::{IsTerminal, Write};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tern_control::{Reply, Request};

/// How long a reply may take before progress is shown.
const PROGRESS_DELAY: Duration = Duration::from_secs(2);

/// Sends a request. If the reply takes longer than `PROGRESS_DELAY` and standard error is a
/// terminal, shows `doing` and the elapsed time there, in one line that is erased when the reply
/// arrives.
///
/// # Errors
/// As [`client::request`].
pub(crate) fn request(request: Request, doing: &str) -> Result<Reply, Failure> {
    if !std::io::stderr().is_terminal() {
        return client::request(&request);
    }
    let (sender, replies) = mpsc::channel();
    std::thread::spawn(move || sender.send(client::request(&request)));
    wait_with_progress(&replies, doing, PROGRESS_DELAY, &mut std::io::stderr())
}

/// Waits for the reply; from `delay` on, shows the elapsed time once a second.
fn wait_with_progress(
    replies: &Receiver<Result<Reply, Failure>>,
    doing: &str,
    delay: Duration,
    out: &mut impl Write,
) -> Result<Reply, Failure> {
    let started = Instant::now();
    let mut wait = delay;
    let mut shown = false;
    loop {
        match replies.recv_timeout(wait) {
            Ok(reply) => {
                if shown {
                    let _ = write!(out, "\r\x1b[K");
                }
                return reply;
            }
            Err(RecvTimeoutError::Timeout) => {
                // A terminal that cannot be written does not end the wait.
                let _ = write!(out, "\r\x1b[K{doing} … {} s", started.elapsed().as_secs());
                let _ = out.flush();
                shown = true;
                wait = Duration::from_secs(1);
            }
            // The requesting thread has panicked and reported it.
            Err(RecvTimeoutError::Disconnected) => return Err(Failure::silent(70)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_request_shows_progress_line_and_erases_it() {
        let (sender, replies) = mpsc::channel();
        sender.send(Ok(Reply::Done)).unwrap();
        let mut shown = Vec::new();
        wait_with_progress(&replies, "moving", Duration::from_secs(60), &mut shown).unwrap();
        assert_eq!(shown, b"", "a quick move shows nothing");

        // The reply is sent once the line has been written.
        struct ReplyOnWrite(mpsc::Sender<Result<Reply, Failure>>, Vec<u8>);
        impl Write for ReplyOnWrite {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.1.extend_from_slice(bytes);
                let _ = self.0.send(Ok(Reply::Done));
                Ok(bytes.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let mut writer = ReplyOnWrite(sender, Vec::new());
        wait_with_progress(&replies, "moving", Duration::from_millis(1), &mut writer).unwrap();
        let text = String::from_utf8(writer.1).unwrap();
        assert!(text.contains("moving … 0 s") && text.ends_with("\r\x1b[K"), "{text:?}");
    }
}
