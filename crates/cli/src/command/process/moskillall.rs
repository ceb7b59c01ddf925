//! `moskillall`: sends a signal to all movable processes of the caller (`job::members`), or to
//! those of one job.
//!
//! A process that is away is signalled at home, where its pid is. A pid can be reused before the
//! signal is sent, so each process is first opened as a pidfd, and then ternd is asked again
//! whether the pid still belongs to the job.

use crate::tool::Invocation;
use crate::{Failure, help, job, output};
use clap::{Arg, ArgAction, Command};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};
use std::collections::HashMap;
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use tern_control::{ProcessRow, RefusalKind};

/// The maximum number of rounds that look for processes started meanwhile. Processes that still
/// fork after the last round can escape.
const MAX_ROUNDS: usize = 100;

/// Describes the command line for the help; `parse` parses it.
pub(crate) fn describe() -> Command {
    help::command("moskillall")
        .about("Send a signal to all your processes started with mosrun, or to those of a job")
        .long_about(
            "Send a signal to all your processes started with mosrun and to their children, wherever they run; with \
             -J only to those of a job. Processes that were moved by hand are included, those started by nomig \
             are not. For root it is sent to the processes of all users.\n\nA frozen process receives signals \
             other than SIGKILL when it is continued, as any stopped process does.",
        )
        .override_usage("moskillall [-SIGNAL] [-J JOB] [--json]")
        .arg(Arg::new("signal").value_name("-SIGNAL").help("The signal by name or number, as in -KILL or -9 [default: TERM]"))
        .arg(Arg::new("job").short('J').value_name("JOB").help("Only processes of this job (mosrun -J)"))
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("Print the pids of the signalled processes as a JSON array"),
        )
        .after_help(help::after_help("  moskillall\n  moskillall -9 -J 7\n  moskillall -INT", ""))
}

/// The command-line options.
#[derive(Debug, PartialEq, Eq)]
struct Options {
    signal: i32,
    job: Option<u32>,
    json: bool,
}

/// `moskillall …`.
///
/// # Errors
/// If there is no process to signal, or a signal is not permitted.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    match invocation.args.first().and_then(|word| word.to_str()) {
        Some("--help" | "-h") => return help::print(describe(), invocation),
        Some("--version" | "-V") => return help::print_version(invocation),
        _ => {}
    }
    let options = parse(invocation.args).map_err(|message| Failure::usage(invocation.tool, message))?;
    let no_signal = || Failure::usage(invocation.tool, format!("{} is not a signal", options.signal));
    let signal = Signal::from_named_raw(options.signal).ok_or_else(no_signal)?;
    let sent = signal_all(options.job, signal)?;
    if options.json { output::print_json(&sent) } else { Ok(()) }
}

fn parse(args: &[OsString]) -> Result<Options, String> {
    let mut options = Options { signal: libc::SIGTERM, job: None, json: false };
    let mut rest = args.iter();
    while let Some(word) = rest.next() {
        let text = word.to_string_lossy();
        if text == "--json" {
            options.json = true;
        } else if let Some(attached) = text.strip_prefix("-J") {
            let next =
                if attached.is_empty() { rest.next().map(|next| next.to_string_lossy()) } else { None };
            let number = next.as_deref().unwrap_or(attached);
            options.job = Some(number.parse().map_err(|_e| format!("'{number}' after -J is not a number"))?);
        } else if let Some(name) = text.strip_prefix('-') {
            options.signal =
                signal_number(name).ok_or_else(|| format!("unknown option or signal '{text}'"))?;
        } else {
            return Err(format!("unexpected argument '{text}': processes can only be selected with -J"));
        }
    }
    Ok(options)
}

/// The number of a signal, given by name with or without SIG, or by number.
fn signal_number(name: &str) -> Option<i32> {
    const NAMES: [(&str, i32); 20] = [
        ("HUP", libc::SIGHUP),
        ("INT", libc::SIGINT),
        ("QUIT", libc::SIGQUIT),
        ("ABRT", libc::SIGABRT),
        ("KILL", libc::SIGKILL),
        ("USR1", libc::SIGUSR1),
        ("USR2", libc::SIGUSR2),
        ("PIPE", libc::SIGPIPE),
        ("ALRM", libc::SIGALRM),
        ("TERM", libc::SIGTERM),
        ("CHLD", libc::SIGCHLD),
        ("CONT", libc::SIGCONT),
        ("STOP", libc::SIGSTOP),
        ("TSTP", libc::SIGTSTP),
        ("TTIN", libc::SIGTTIN),
        ("TTOU", libc::SIGTTOU),
        ("URG", libc::SIGURG),
        ("XCPU", libc::SIGXCPU),
        ("IO", libc::SIGIO),
        ("WINCH", libc::SIGWINCH),
    ];
    let upper = name.to_uppercase();
    let bare = upper.strip_prefix("SIG").unwrap_or(&upper);
    let by_name = NAMES.iter().find(|(known, _)| *known == bare).map(|(_, number)| *number);
    by_name.or_else(|| name.parse().ok().filter(|number| (1..=31).contains(number)))
}

/// Signals all matching processes, then looks again until there are no new ones, because a parent
/// may have forked before it was signalled. Returns the pids.
fn signal_all(job: Option<u32>, signal: Signal) -> Result<Vec<i32>, Failure> {
    let mut sent: Vec<i32> = Vec::new();
    let mut denied = None;
    for _ in 0..MAX_ROUNDS {
        let pidfds: HashMap<i32, OwnedFd> = members(job)?
            .iter()
            .map(|row| row.pid.0)
            .filter(|pid| !sent.contains(pid))
            .filter_map(|pid| Some((pid, pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?)))
            .collect();
        if pidfds.is_empty() {
            break;
        }
        // If a pid is still listed, its pidfd refers to the listed process, or to an earlier one
        // with this pid, which has ended; the signal has no effect then.
        for row in members(job)? {
            let Some(pidfd) = pidfds.get(&row.pid.0) else { continue };
            match pidfd_send_signal(pidfd, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => denied = Some((row.pid, error)),
            }
            sent.push(row.pid.0);
        }
        // Processes that ended before the second request are neither signalled nor counted.
    }
    if let Some((pid, error)) = denied {
        let text = format!("process {pid} cannot be signalled: {}", output::error_text(&error.into()));
        return Err(Failure::new(RefusalKind::NotAllowed, text));
    }
    if sent.is_empty() { Err(job::none_found(job)) } else { Ok(sent) }
}

/// The matching processes without this one: moskillall may itself have been started with mosrun.
fn members(job: Option<u32>) -> Result<Vec<ProcessRow>, Failure> {
    let caller = rustix::process::geteuid().as_raw();
    let mut members = job::members(job::processes()?, job, caller);
    members.retain(|row| row.pid.0 != getpid().as_raw_nonzero().get());
    Ok(members)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mosix_arguments_are_parsed() {
        let parse_line = |line: &str| {
            let args: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            parse(&args)
        };
        let options = |signal, job| Ok(Options { signal, job, json: false });
        assert_eq!(parse_line(""), options(libc::SIGTERM, None));
        assert_eq!(parse_line("-9 -J7"), options(libc::SIGKILL, Some(7)));
        assert_eq!(parse_line("-J 7 -SIGINT"), options(libc::SIGINT, Some(7)));
        assert_eq!(parse_line("-usr1"), options(libc::SIGUSR1, None));
        for wrong in ["-J", "-J x", "-0", "-65", "-FLY", "7"] {
            assert!(parse_line(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_number_is_a_signal() {
        for number in 1..=31 {
            assert!(Signal::from_named_raw(number).is_some(), "{number}");
        }
    }
}
