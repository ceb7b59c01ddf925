//! A line-driven helper program on a node: for each request line it performs an operation and
//! replies with one line.

use anyhow::{Context, Result};
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A running helper program. Dropping it closes its input and waits for it: the program must exit
/// at end of input.
#[derive(Debug)]
pub struct LineClient {
    child: Child,
    input: Option<ChildStdin>,
    replies: Lines<BufReader<ChildStdout>>,
}

impl LineClient {
    /// Starts the program.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let replies = BufReader::new(child.stdout.take().context("no pipe")?).lines();
        Ok(Self { input: child.stdin.take(), replies, child })
    }

    /// Sends a request line; returns the reply, or the error text if there is none.
    pub fn request(&mut self, line: &str) -> String {
        let mut input = || -> Result<String> {
            writeln!(self.input.as_mut().context("its input is closed")?, "{line}")?;
            self.reply()
        };
        input().unwrap_or_else(|error| format!("{error:#}"))
    }

    /// The next line that the program prints by itself.
    ///
    /// # Errors
    /// If it has ended.
    pub fn reply(&mut self) -> Result<String> {
        Ok(self.replies.next().context("it has ended")??)
    }

    /// Kills the process that was started, but not its children.
    ///
    /// # Errors
    /// If it cannot be killed.
    pub fn kill(&mut self) -> Result<()> {
        Ok(self.child.kill()?)
    }
}

impl Drop for LineClient {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ended = self.child.wait();
    }
}
