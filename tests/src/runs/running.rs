//! A running program whose output is captured as it comes.

use crate::cluster::Cluster;
use crate::runs::outcome::Outcome;
use anyhow::{Context, Result, bail};
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Prints its pid on the first line of standard error, then executes the given command: the pid is
/// thus in the numbering of the program's own node.
pub const ANNOUNCE: &str = r#"echo "$$" >&2; exec "$@""#;

/// The bytes read from a stream so far, and whether it has ended.
#[derive(Debug, Default)]
struct Stream {
    so_far: Mutex<(Vec<u8>, bool)>,
    news: Condvar,
}

impl Stream {
    fn follow(mut from: impl Read + Send + 'static) -> Arc<Self> {
        let stream = Arc::new(Self::default());
        let copy = Arc::clone(&stream);
        thread::spawn(move || {
            let mut buffer = [0; 65536];
            loop {
                let count = from.read(&mut buffer).unwrap_or(0);
                let mut so_far = copy.so_far.lock().unwrap_or_else(PoisonError::into_inner);
                so_far.0.extend_from_slice(&buffer[..count]);
                so_far.1 |= count == 0;
                copy.news.notify_all();
                if count == 0 {
                    return;
                }
            }
        });
        stream
    }

    /// Waits until `enough` accepts the bytes read, or the stream has ended; returns them.
    fn wait(&self, until: Instant, enough: impl Fn(&[u8]) -> bool) -> Result<Vec<u8>> {
        let mut so_far = self.so_far.lock().unwrap_or_else(PoisonError::into_inner);
        while !enough(&so_far.0) && !so_far.1 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("timed out; its output so far: {:?}", String::from_utf8_lossy(&so_far.0));
            }
            so_far = self.news.wait_timeout(so_far, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(so_far.0.clone())
    }
}

/// A started program. Dropping it kills it if it still runs.
#[derive(Debug)]
pub struct Running {
    child: Child,
    out: Arc<Stream>,
    err: Arc<Stream>,
    /// Its pid, as its own node numbers it.
    pub pid: i32,
    /// Standard output and standard error are one terminal, so the pid is on standard output.
    terminal: bool,
}

impl Running {
    /// Starts it; the command must run `ANNOUNCE`. With `terminal`, standard error arrives on
    /// standard output.
    ///
    /// # Errors
    /// If it cannot be started, or has not printed its pid within 20 s.
    pub fn start(command: &mut Command, terminal: bool) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let (Some(out), Some(err)) = (child.stdout.take(), child.stderr.take()) else {
            bail!("no streams of the child");
        };
        let (out, err) = (Stream::follow(out), Stream::follow(err));
        let mut running = Self { child, out, err, pid: 0, terminal };
        let first = if terminal { &running.out } else { &running.err };
        let said = first.wait(Instant::now() + Duration::from_secs(20), |text| text.contains(&b'\n'))?;
        let line = String::from_utf8_lossy(&said);
        let line = line.lines().next().unwrap_or_default().trim();
        running.pid = line.parse().with_context(|| format!("instead of its pid it printed {line:?}"))?;
        Ok(running)
    }

    /// Starts a Python program on node 1 under `mosrun` with these options, and waits until it has
    /// printed a line with these words.
    ///
    /// # Errors
    /// As [`start`](Self::start) and [`await_output`](Self::await_output).
    pub fn python(cluster: &Cluster, options: &[&str], program: &str, words: &str) -> Result<Self> {
        let mut command = cluster.command(1, "sh");
        command.args(["-c", ANNOUNCE, "sh", "mosrun"]).args(options);
        command.args(["/usr/bin/python3", "-c", program]);
        let running = Self::start(&mut command, false)?;
        running.await_output(words)?;
        Ok(running)
    }

    /// Writes text to its standard input.
    ///
    /// # Errors
    /// If its input is closed.
    pub fn send_input(&mut self, text: &str) -> Result<()> {
        let stdin = self.child.stdin.as_mut().context("its input is closed")?;
        stdin.write_all(text.as_bytes()).context("cannot write to its input")?;
        Ok(stdin.flush()?)
    }

    /// Waits until it has printed a complete line with these words on standard output.
    ///
    /// # Errors
    /// If it has not within 20 s, or ends before.
    pub fn await_output(&self, words: &str) -> Result<()> {
        let has = |text: &[u8]| {
            let text = String::from_utf8_lossy(text);
            text.rfind(words).is_some_and(|at| text[at..].contains('\n'))
        };
        let text = self.out.wait(Instant::now() + Duration::from_secs(20), has)?;
        if !has(&text) {
            bail!("it ended instead of printing {words:?}");
        }
        Ok(())
    }

    /// Closes its standard input.
    pub fn close_input(&mut self) {
        self.child.stdin = None;
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for its end, and returns its outcome without the first line, which is its pid.
    ///
    /// # Errors
    /// If it has not ended within this time; it still runs in that case.
    pub fn finish(&mut self, within: Duration) -> Result<Outcome> {
        let until = Instant::now() + within;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if Instant::now() > until {
                bail!("it has not ended within {} s", within.as_secs());
            }
            thread::sleep(Duration::from_millis(5));
        };
        // Orphaned children may hold the streams open a little longer.
        let until = until.max(Instant::now() + Duration::from_secs(5));
        let (mut out, mut err) = (self.out.wait(until, |_| false)?, self.err.wait(until, |_| false)?);
        let first = if self.terminal { &mut out } else { &mut err };
        let line = first.iter().position(|b| *b == b'\n').map_or(first.len(), |at| at + 1);
        first.drain(..line);
        let status = status.code().or_else(|| status.signal().map(|s| s + 128)).unwrap_or(-1);
        Ok(Outcome { out, err, status })
    }

    /// Its output so far on standard output and standard error.
    pub fn output_so_far(&self) -> String {
        let text = |stream: &Stream| {
            let so_far = stream.so_far.lock().unwrap_or_else(PoisonError::into_inner);
            String::from_utf8_lossy(&so_far.0).into_owned()
        };
        format!("stdout {:?}, stderr {:?}", text(&self.out), text(&self.err))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.has_ended() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_status_and_pid_are_captured() {
        let mut command = Command::new("sh");
        command.args(["-c", ANNOUNCE, "sh", "sh", "-c", "echo out; echo err >&2; kill -TERM $$"]);
        let mut running = Running::start(&mut command, false).unwrap();
        assert_eq!(running.pid, running.child.id() as i32);
        let end = running.finish(Duration::from_secs(10)).unwrap();
        assert_eq!((&*end.out, &*end.err, end.status), (&b"out\n"[..], &b"err\n"[..], 143));
    }

    #[test]
    fn hung_program_is_reported_and_killed() {
        let mut command = Command::new("sh");
        command.args(["-c", ANNOUNCE, "sh", "sleep", "1000"]);
        let mut running = Running::start(&mut command, false).unwrap();
        let pid = running.pid;
        assert!(running.finish(Duration::from_millis(50)).is_err());
        drop(running);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}
