//! The watchdog: a process outside the lab that reserves the lab's name, holds the other end of a
//! pipe to the lab's owner, and takes the lab down if the owner dies, for any reason, before it has
//! taken the lab down itself.
//!
//! The watchdog reserves the name, and not the owner: an owner that was killed between the
//! reservation and the start of its watchdog would leave the lab's directory behind.

use crate::error::{LabError, Result, WithContext};
use crate::lab::boot::read_line_after;
use crate::lab::options::LabName;
use crate::lab::state;
use crate::lab::teardown::down;
use crate::process::cgroup::Hierarchies;
use crate::process::namespaces;
use crate::roles;
use std::io::{BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Stdio};
use std::time::Duration;

/// The watchdog's report: the name is [`RESERVED`], or else another lab has it.
const REPORT: &str = "name";
const RESERVED: &str = "reserved";

/// The owner's side.
#[derive(Debug)]
pub(crate) struct Watchdog {
    child: Child,
    pipe: Option<ChildStdin>,
}

impl Watchdog {
    /// Starts a watchdog, which reserves the name of this lab. After an error nothing is
    /// reserved, unless the watchdog was killed: the next start of a lab of this name cleans up.
    pub(crate) fn reserve(helper: &Path, lab: &LabName) -> Result<Self> {
        let mut command = roles::command(helper, "watchdog", lab);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).current_dir("/");
        // A signal to the owner's process group, or a hangup of its terminal, must not reach the
        // watchdog.
        namespaces::set_new_session(&mut command);
        let mut child = command.spawn().with_context(|| format!("start {}", helper.display()))?;
        let (pipe, output) = (child.stdin.take(), child.stdout.take());
        let mut watchdog = Self { child, pipe };
        let report = match output {
            Some(output) => read_line_after(&mut BufReader::new(output), REPORT),
            None => Ok(String::new()),
        };
        let error = match report {
            Ok(report) if report == RESERVED => return Ok(watchdog),
            Ok(_) => LabError::AlreadyUp(lab.clone()),
            Err(error) => error,
        };
        // The end of the pipe removes the name if it was reserved in spite of the error.
        watchdog.pipe = None;
        let _ = watchdog.child.wait();
        Err(error)
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
    let report = |name_is: &str| {
        // The owner may have died, which its pipe tells below.
        let _ = writeln!(std::io::stdout(), "{REPORT} {name_is}");
    };
    match reserve_name(lab) {
        Ok(()) => report(RESERVED),
        Err(LabError::AlreadyUp(_)) => {
            report("taken");
            return Ok(0);
        }
        Err(error) => return Err(error),
    }
    let mut byte = [0];
    // A byte ends the watchdog. End of file or an error means that the owner has died.
    if !matches!(std::io::stdin().read(&mut byte), Ok(1)) {
        down(lab)?;
    }
    Ok(0)
}

/// Reserves the name. Remains of a crashed lab of that name are removed first.
fn reserve_name(name: &LabName) -> Result<()> {
    let already_up = || LabError::AlreadyUp(name.clone());
    // Checked before the directory: inside a node of this lab the directory is not visible.
    if Hierarchies::find()?.lab_group(name).has_processes() {
        return Err(already_up());
    }
    if state::create_directory(name)? {
        return Ok(());
    }
    // Another process may be creating the lab right now.
    if state::lock(name, Duration::ZERO)?.is_none() {
        return Err(already_up());
    }
    down(name)?;
    if state::create_directory(name)? { Ok(()) } else { Err(already_up()) }
}
