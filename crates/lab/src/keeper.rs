//! The keeper: a process outside the lab that holds the other end of a pipe to the lab's owner, and
//! takes the lab down if the owner dies, for any reason, without having done so.

use crate::error::{Result, Tried};
use crate::options::Name;
use crate::{init, lab, spaces};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Stdio};

/// The owner's side.
#[derive(Debug)]
pub(crate) struct Keeper {
    child: Child,
    line: Option<ChildStdin>,
}

impl Keeper {
    /// Starts a keeper for this lab.
    pub(crate) fn start(helper: &Path, lab: &Name) -> Result<Self> {
        let mut command = init::command(helper, "keeper", lab);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/");
        // A signal to our process group, or a hangup of our terminal, must not reach the keeper.
        spaces::in_own_session(&mut command);
        let mut child = command.spawn().tried(|| format!("start {}", helper.display()))?;
        let line = child.stdin.take();
        Ok(Self { child, line })
    }

    /// Ends the keeper, because the lab is to stay up or is already gone. Returns when the keeper
    /// has exited.
    pub(crate) fn dismiss(&mut self) {
        if let Some(mut line) = self.line.take() {
            // An error means that the keeper has exited already.
            let _ = line.write_all(b".");
            drop(line);
            let _ = self.child.wait();
        }
    }
}

/// The keeper's side.
pub(crate) fn main(lab: &Name) -> Result<u8> {
    let mut byte = [0];
    // A byte dismisses the keeper. End of file or an error means that the owner has died.
    if !matches!(std::io::stdin().read(&mut byte), Ok(1)) {
        lab::down(lab)?;
    }
    Ok(0)
}
