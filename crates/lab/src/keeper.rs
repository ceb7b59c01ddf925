//! The keeper: a process outside the lab that holds the other end of its owner's pipe, and takes the lab down
//! if the owner dies without having done so, of whatever.

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
    /// Starts one for this lab.
    pub(crate) fn start(helper: &Path, lab: &Name) -> Result<Self> {
        let mut command = init::command(helper, "keeper", lab);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/");
        // Whoever kills our process group, or hangs up our terminal, shall not get it as well.
        spaces::in_own_session(&mut command);
        let mut child = command.spawn().tried(|| format!("start {}", helper.display()))?;
        let line = child.stdin.take();
        Ok(Self { child, line })
    }

    /// The lab is to stay, or is gone: nothing to keep. Returns when the keeper has ended.
    pub(crate) fn dismiss(&mut self) {
        if let Some(mut line) = self.line.take() {
            // If it is gone, so be it.
            let _ = line.write_all(b".");
            drop(line);
            let _ = self.child.wait();
        }
    }
}

/// The keeper's side.
pub(crate) fn main(lab: &Name) -> Result<u8> {
    let mut byte = [0];
    // A byte dismisses it; the end of the pipe, or an error of it, means that the owner has died.
    if !matches!(std::io::stdin().read(&mut byte), Ok(1)) {
        lab::down(lab)?;
    }
    Ok(0)
}
