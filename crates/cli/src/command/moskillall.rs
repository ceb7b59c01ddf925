//! `moskillall`: a signal to all processes that mosrun has started for the caller, or to those of one job.
//!
//! A process away is signalled at its home, where its pid is. A number could be another process's by the time that it is
//! used; so what it names is held first, then ternd is asked again whether that is meant.

use crate::tool::Call;
use crate::{Failure, help, job, output};
use clap::{Arg, ArgAction, Command};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};
use std::collections::HashMap;
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use tern_control::{ProcessRow, RefusalKind};

/// How often it looks for what has been started meanwhile: who forks faster than that is not caught by this.
const ROUNDS: usize = 100;

/// The command line. It is read by `read`; this is for people.
pub fn describe() -> Command {
    help::command("moskillall")
        .about("Send a signal to all your processes that were started with mosrun, or to those of a job")
        .long_about(
            "Send a signal to all your processes that were started with mosrun, and to their children, wherever they \
             run; with -J only to those of a job. Also to those that were moved by hand. Of root it goes to \
             everybody's. What nomig has started gets none.\n\nAs of any stopped process, all signals but SIGKILL wait \
             until one that is frozen is continued.",
        )
        .override_usage("moskillall [-SIGNAL] [-J JOB] [--json]")
        .arg(Arg::new("signal").value_name("-SIGNAL").help("By name or number, as in -KILL, -9 [default: TERM]"))
        .arg(Arg::new("job").short('J').value_name("JOB").help("Only those of this job (mosrun -J)"))
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("Print the pids that it was sent to, as a JSON array"),
        )
        .after_help(help::closing("  moskillall\n  moskillall -9 -J 7\n  moskillall -INT", ""))
}

/// What its words say.
#[derive(Debug, PartialEq, Eq)]
struct Words {
    signal: i32,
    job: Option<u32>,
    json: bool,
}

/// `moskillall …`.
///
/// # Errors
/// If there is nothing to signal, or something that may not be.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    match call.args.first().and_then(|word| word.to_str()) {
        Some("--help" | "-h") => return help::print(describe(), call),
        Some("--version" | "-V") => return help::print_version(call),
        _ => {}
    }
    let words = read(call.args).map_err(|message| Failure::usage(call.tool, message))?;
    let no_signal = || Failure::usage(call.tool, format!("{} is no signal", words.signal));
    let signal = Signal::from_named_raw(words.signal).ok_or_else(no_signal)?;
    let sent = signal_all(words.job, signal)?;
    if words.json { output::print_json(&sent) } else { Ok(()) }
}

fn read(args: &[OsString]) -> Result<Words, String> {
    let mut words = Words { signal: libc::SIGTERM, job: None, json: false };
    let mut rest = args.iter();
    while let Some(word) = rest.next() {
        let text = word.to_string_lossy();
        if text == "--json" {
            words.json = true;
        } else if let Some(attached) = text.strip_prefix("-J") {
            let next =
                if attached.is_empty() { rest.next().map(|next| next.to_string_lossy()) } else { None };
            let number = next.as_deref().unwrap_or(attached);
            words.job = Some(number.parse().map_err(|_e| format!("'{number}' after -J is not a number"))?);
        } else if let Some(name) = text.strip_prefix('-') {
            words.signal = number_of(name).ok_or_else(|| format!("unknown option or signal '{text}'"))?;
        } else {
            return Err(format!("'{text}' is not understood: processes are chosen by -J, or are all"));
        }
    }
    Ok(words)
}

/// The number of a signal by its name, with or without SIG, or by its number.
fn number_of(name: &str) -> Option<i32> {
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

/// Signals what there is, looks again, and goes on until there is nothing new: a parent may have forked before it was
/// signalled. Returns the pids.
fn signal_all(job: Option<u32>, signal: Signal) -> Result<Vec<i32>, Failure> {
    let mut sent: Vec<i32> = Vec::new();
    let mut denied = None;
    for _ in 0..ROUNDS {
        let held: HashMap<i32, OwnedFd> = members(job)?
            .iter()
            .map(|row| row.pid.0)
            .filter(|pid| !sent.contains(pid))
            .filter_map(|pid| Some((pid, pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?)))
            .collect();
        if held.is_empty() {
            break;
        }
        // What is meant now and is held has been meant all the time, or has ended: then the signal goes nowhere.
        for row in members(job)? {
            let Some(process) = held.get(&row.pid.0) else { continue };
            match pidfd_send_signal(process, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => denied = Some((row.pid, error)),
            }
            sent.push(row.pid.0);
        }
        // Those that have ended before they were asked for again are none to come back to either.
    }
    if let Some((pid, error)) = denied {
        let said = format!("process {pid} cannot be signalled: {}", output::reason(&error.into()));
        return Err(Failure::new(RefusalKind::NotAllowed, said));
    }
    if sent.is_empty() { Err(job::nothing(job)) } else { Ok(sent) }
}

/// Those that are meant, but for this very process: moskillall may have been started under mosrun too.
fn members(job: Option<u32>) -> Result<Vec<ProcessRow>, Failure> {
    let caller = rustix::process::geteuid().as_raw();
    let mut members = job::members(job::rows()?, job, caller);
    members.retain(|row| row.pid.0 != getpid().as_raw_nonzero().get());
    Ok(members)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mosix_words_are_read() {
        let read = |line: &str| {
            let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            read(&words)
        };
        let words = |signal, job| Ok(Words { signal, job, json: false });
        assert_eq!(read(""), words(libc::SIGTERM, None));
        assert_eq!(read("-9 -J7"), words(libc::SIGKILL, Some(7)));
        assert_eq!(read("-J 7 -SIGINT"), words(libc::SIGINT, Some(7)));
        assert_eq!(read("-usr1"), words(libc::SIGUSR1, None));
        for wrong in ["-J", "-J x", "-0", "-65", "-FLY", "7"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_name_has_a_signal() {
        for number in 1..=31 {
            assert!(Signal::from_named_raw(number).is_some(), "{number}");
        }
    }
}
