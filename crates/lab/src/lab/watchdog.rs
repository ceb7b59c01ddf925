//! The watchdog: a process outside the lab that holds the other end of a pipe to the lab's owner,
//! and takes the lab down if the owner dies, for any reason, before it has taken the lab down
//! itself.

use crate::error::{Result, WithContext};
use crate::lab;
use crate::lab::options::LabName;
use crate::process::namespaces;
use crate::roles;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Stdio};

/// The owner's side.
#[derive(Debug)]
pub(crate) struct Watchdog {
    child: Child,
    pipe: Option<ChildStdin>,
}

impl Watchdog {
    /// Starts a watchdog for this lab.
    pub(crate) fn start(helper: &Path, lab: &LabName) -> Result<Self> {
        let mut command = roles::command(helper, "watchdog", lab);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/");
        // A signal to the owner's process group, or a hangup of its terminal, must not reach the
        // watchdog.
        namespaces::set_new_session(&mut command);
        let mut child = command.spawn().with_context(|| format!("start {}", helper.display()))?;
        let pipe = child.stdin.take();
        Ok(Self { child, pipe })
    }

    /// Ends the watchdog, because the lab is to stay up or is already gone. Returns when the
    /// watchdog has exited.
    pub(crate) fn stop(&mut self) {
        if let Some(mut pipe) = self.pipe.take() {
            // An error means that the watchdog has exited already.
            let _ = pipe.write_all(b".");
            drop(pipe);
            let _ = self.child.wait();
        }
    }
}

/// The watchdog's side.
pub(crate) fn main(lab: &LabName) -> Result<u8> {
    let mut byte = [0];
    // A byte ends the watchdog. End of file or an error means that the owner has died.
    if !matches!(std::io::stdin().read(&mut byte), Ok(1)) {
        lab::down(lab)?;
    }
    Ok(0)
}
