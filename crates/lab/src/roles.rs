//! The lab's helper programs. All of them are the `tern` binary under the name `tern-lab-init`.
//!
//! | role | where | what |
//! |---|---|---|
//! | `switch LAB` | new net and mount namespaces | holds the switch and the tmpfs of all layers |
//! | `emulator LAB` | the switch's network namespace | delay, loss, hubs |
//! | `node LAB N` | joins the node's groups, then new namespaces | starts `pid1`, and exits |
//! | `pid1 LAB N` | the node | mounts the node's files, then reaps children |
//! | `enter LAB N PROGRAM …` | the machine | runs a program in the node and exits with its status |
//! | `daemon LAB N PROGRAM …` | the machine | runs `spawn PROGRAM …` in the node |
//! | `spawn PROGRAM …` | the node | starts the program as a child of init |
//! | `watchdog LAB` | the machine | reserves the name, and takes the lab down when its owner dies |
//!
//! Long-running helpers print `ready`, or `failed` and the reason, to standard output, and then
//! close it. The watchdog prints whether the name is reserved instead.

use crate::error::{LabError, Result, WithContext};
use crate::lab::options::LabName;
use crate::lab::watchdog;
use crate::network::{emulator, switch};
use crate::node::enter::{EnterMode, enter};
use crate::node::init;
use crate::process::signals;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// `argv[0]` of the lab's helper programs. A binary started under this name must call
/// [`init_main`].
pub const INIT_NAME: &str = "tern-lab-init";

/// Runs as the helper program that the command line names, and returns the exit code. Must be
/// called first, while the process is single-threaded, when the last component of `argv[0]` is
/// [`INIT_NAME`].
pub fn init_main() -> u8 {
    signals::reset_sigchld();
    let mut words = std::env::args_os().skip(1);
    let role = words.next().unwrap_or_default();
    let rest: Vec<_> = words.collect();
    match run_role(&role.to_string_lossy(), &rest) {
        Ok(code) => code,
        Err(error) => {
            // Standard output is read by the lab, standard error by the user. Either may be closed.
            let _ = writeln!(std::io::stdout(), "failed {error}");
            let _ = writeln!(std::io::stderr(), "tern lab: {error}");
            125
        }
    }
}

/// A command that starts a helper program.
pub(crate) fn command(helper: &Path, role: &str, lab: &LabName) -> Command {
    let mut command = Command::new(helper);
    command.arg0(INIT_NAME).arg(role).arg(lab.as_str());
    command
}

/// Runs the helper program of this role.
fn run_role(role: &str, rest: &[OsString]) -> Result<u8> {
    let (first, more) = rest.split_first().ok_or_else(invalid_call)?;
    if role == "spawn" {
        return init::spawn(first, more);
    }
    let lab: LabName = first.to_string_lossy().parse()?;
    let node = || more.first().and_then(|n| n.to_string_lossy().parse::<u16>().ok()).ok_or_else(invalid_call);
    let program = || more.get(1).map(OsString::as_os_str).ok_or_else(invalid_call);
    let arguments = more.get(2..).unwrap_or_default();
    match role {
        "switch" => switch::main(&lab),
        "emulator" => emulator::main(&lab),
        "node" => init::create_node(&lab, node()?),
        "pid1" => init::main(&lab, node()?),
        "enter" => enter(&lab, node()?, EnterMode::Attached, program()?, arguments),
        "daemon" => enter(&lab, node()?, EnterMode::Detached, program()?, arguments),
        "watchdog" => watchdog::main(&lab),
        _ => Err(invalid_call()),
    }
}

fn invalid_call() -> LabError {
    LabError::BadOption(format!("{INIT_NAME} is only started by the lab; see tern lab --help"))
}

/// Reports success to the owner, and closes the standard files that connect this process with it.
pub(crate) fn report_ready() -> Result<()> {
    // The owner may have died; its watchdog cleans up in that case.
    let _ = writeln!(std::io::stdout(), "ready");
    let null = File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .with_context(|| "open /dev/null".to_owned())?;
    rustix::stdio::dup2_stdin(&null).with_context(|| "close the standard input".to_owned())?;
    rustix::stdio::dup2_stdout(&null).with_context(|| "close the standard output".to_owned())?;
    rustix::stdio::dup2_stderr(&null).with_context(|| "close the standard error".to_owned())
}
