//! The programs `ip` and `tc`, run in a network namespace of the lab.

use crate::error::{LabError, Result, Tried};
use crate::process::Process;
use crate::spaces;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::process::{Command, Output, Stdio};

/// The network namespace of a process of the lab.
pub(crate) fn of(process: Process) -> Result<OwnedFd> {
    let at = format!("/proc/{}/ns/net", process.pid);
    let file = File::open(&at).tried(|| format!("open {at}"))?;
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

    fn missing(self) -> LabError {
        LabError::MissingProgram { program: self.name(), package: "iproute2" }
    }
}

/// Checks that both programs are installed.
pub(crate) fn check_programs() -> Result<()> {
    for program in [Program::Ip, Program::Tc] {
        let run = program.command().arg("-V").output();
        run.map_err(|_e| program.missing())?;
    }
    Ok(())
}

/// Runs all these lines; returns an error for the first that fails.
pub(crate) fn batch(process: Process, program: Program, lines: &[String]) -> Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let mut command = program.command();
    command.args(["-batch", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    spaces::in_network(&mut command, of(process)?);
    let mut child = command.spawn().map_err(|_e| program.missing())?;
    if let Some(mut input) = child.stdin.take() {
        // If the program stops reading, it reports the reason, which is read below.
        let _ = input.write_all((lines.join("\n") + "\n").as_bytes());
    }
    let output = child.wait_with_output().tried(|| format!("wait for {}", program.name()))?;
    if output.status.success() { Ok(()) } else { Err(failed(program, lines, &output)) }
}

/// Runs one command and returns its output.
pub(crate) fn ask(process: Process, program: Program, args: &[&str]) -> Result<String> {
    let mut command = program.command();
    command.args(args);
    spaces::in_network(&mut command, of(process)?);
    let output = command.output().map_err(|_e| program.missing())?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(failed(program, &[args.join(" ")], &output))
    }
}

fn failed(program: Program, lines: &[String], output: &Output) -> LabError {
    let said = String::from_utf8_lossy(&output.stderr);
    // "Command failed -:3" names the line, counted from 1.
    let line = said.rsplit_once("-:").and_then(|(_, n)| n.trim().parse::<usize>().ok()).unwrap_or(1);
    let line = line.checked_sub(1).and_then(|at| lines.get(at)).map_or("", String::as_str);
    let said = said.lines().filter(|l| !l.starts_with("Command failed")).collect::<Vec<_>>().join(", ");
    LabError::Failed { what: format!("{} {line}", program.name()), message: said }
}
