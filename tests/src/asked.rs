//! A program on a node that does what each line says, and answers each with a line.

use anyhow::{Context, Result};
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// One such program. Its input ends when it is dropped, and it is waited for: it has to end by that.
#[derive(Debug)]
pub struct Asked {
    child: Child,
    ask: Option<ChildStdin>,
    said: Lines<BufReader<ChildStdout>>,
}

impl Asked {
    /// Starts it.
    ///
    /// # Errors
    /// If that cannot be.
    pub fn start(command: &mut Command) -> Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let said = BufReader::new(child.stdout.take().context("no pipe")?).lines();
        Ok(Self { ask: child.stdin.take(), said, child })
    }

    /// Has it do this; what it says, or why it says nothing.
    pub fn does(&mut self, line: &str) -> String {
        let mut ask = || -> Result<String> {
            writeln!(self.ask.as_mut().context("it was let go")?, "{line}")?;
            Ok(self.said.next().context("it has ended")??)
        };
        ask().unwrap_or_else(|error| format!("{error:#}"))
    }

    /// Kills what was started, and nothing that this has started.
    ///
    /// # Errors
    /// If it cannot be killed.
    pub fn kill(&mut self) -> Result<()> {
        Ok(self.child.kill()?)
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        drop(self.ask.take());
        let _ended = self.child.wait();
    }
}
