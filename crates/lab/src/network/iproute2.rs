//! The programs `ip` and `tc`, run in a network namespace of the lab.

use crate::error::{LabError, Result, WithContext};
use crate::process::Process;
use crate::process::namespaces;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::process::{Command, Output, Stdio};

/// The network namespace of a process of the lab.
pub(crate) fn open_network_namespace(process: Process) -> Result<OwnedFd> {
    let at = format!("/proc/{}/ns/net", process.pid);
    let file = File::open(&at).with_context(|| format!("open {at}"))?;
    Ok(file.into())
}

/// One of the two programs.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Program {
    Ip,
    Tc,
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Self::Ip => "ip",
            Self::Tc => "tc",
        }
    }

    fn command(self) -> Command {
        let mut command = Command::new(self.name());
        // They are in sbin, which may be missing from PATH when a user runs sudo.
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{path}:/usr/sbin:/sbin")).stdin(Stdio::null());
        command
    }

    fn missing_error(self) -> LabError {
        LabError::MissingProgram { program: self.name(), package: "iproute2" }
    }
}

/// Checks that both programs are installed.
pub(crate) fn check_programs() -> Result<()> {
    for program in [Program::Ip, Program::Tc] {
        let run = program.command().arg("-V").output();
        run.map_err(|_e| program.missing_error())?;
    }
    Ok(())
}

/// Runs all these lines; returns an error for the first that fails.
pub(crate) fn run_batch(process: Process, program: Program, lines: &[String]) -> Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let mut command = program.command();
    command.args(["-batch", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    namespaces::set_network(&mut command, open_network_namespace(process)?);
    let mut child = command.spawn().map_err(|_e| program.missing_error())?;
    if let Some(mut input) = child.stdin.take() {
        // If the program stops reading, it reports the reason, which is read below.
        let _ = input.write_all((lines.join("\n") + "\n").as_bytes());
    }
    let output = child.wait_with_output().with_context(|| format!("wait for {}", program.name()))?;
    if output.status.success() { Ok(()) } else { Err(failure(program, lines, &output)) }
}

/// Runs one command and returns its output.
pub(crate) fn output(process: Process, program: Program, args: &[&str]) -> Result<String> {
    let mut command = program.command();
    command.args(args);
    namespaces::set_network(&mut command, open_network_namespace(process)?);
    let output = command.output().map_err(|_e| program.missing_error())?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(failure(program, &[args.join(" ")], &output))
    }
}

fn failure(program: Program, lines: &[String], output: &Output) -> LabError {
    let stderr = String::from_utf8_lossy(&output.stderr);
    // "Command failed -:3" names the line, counted from 1.
    let line = stderr.rsplit_once("-:").and_then(|(_, n)| n.trim().parse::<usize>().ok()).unwrap_or(1);
    let line = line.checked_sub(1).and_then(|at| lines.get(at)).map_or("", String::as_str);
    let stderr = stderr.lines().filter(|l| !l.starts_with("Command failed")).collect::<Vec<_>>().join(", ");
    LabError::Failed { what: format!("{} {line}", program.name()), message: stderr }
}
