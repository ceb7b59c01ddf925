//! Collects the state that a command inherits from its caller.

use super::bytes;
use crate::Failure;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};
use rustix::process::Resource;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use tern_control::RefusalKind;
use tern_mexec::messages::Task;

/// All resource limits, by their numbers in setrlimit(2).
const LIMITS: [(u32, Resource); 16] = [
    (0, Resource::Cpu),
    (1, Resource::Fsize),
    (2, Resource::Data),
    (3, Resource::Stack),
    (4, Resource::Core),
    (5, Resource::Rss),
    (6, Resource::Nproc),
    (7, Resource::Nofile),
    (8, Resource::Memlock),
    (9, Resource::As),
    (10, Resource::Locks),
    (11, Resource::Sigpending),
    (12, Resource::Msgqueue),
    (13, Resource::Nice),
    (14, Resource::Rtprio),
    (15, Resource::Rttime),
];

/// The command with everything that it would inherit from this process.
///
/// # Errors
/// If the current directory no longer exists.
pub(super) fn task(program: &OsStr, arguments: &[&OsStr]) -> Result<Task, Failure> {
    let directory = std::env::current_dir().map_err(|error| {
        Failure::new(RefusalKind::NotFound, format!("the current directory no longer exists: {error}"))
            .hint("cd to an existing directory")
    })?;
    let assignment =
        |(name, value): (OsString, OsString)| [name.into_vec(), b"=".to_vec(), value.into_vec()].concat();
    let umask = rustix::process::umask(rustix::fs::Mode::empty());
    rustix::process::umask(umask);
    let or_unlimited = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
    let limits = LIMITS.map(|(number, resource)| {
        let limit = rustix::process::getrlimit(resource);
        (number, or_unlimited(limit.current), or_unlimited(limit.maximum))
    });
    let (ignored_signals, blocked_signals) = signals();
    Ok(Task {
        program: bytes(program),
        arguments: arguments.iter().map(|word| bytes(word)).collect(),
        environment: std::env::vars_os().filter_map(without_jobserver).map(assignment).collect(),
        directory: directory.into_os_string().into_vec(),
        umask: umask.as_raw_mode(),
        limits: limits.to_vec(),
        nice: rustix::process::getpriority_process(None).unwrap_or(0),
        ignored_signals,
        blocked_signals,
        pid: rustix::process::getpid().as_raw_nonzero().get(),
        terminal: None,
        forwards_stdin: has_input(rustix::stdio::stdin()),
        merges_stderr: outputs_are_one_file(),
        private_tmp: false,
    })
}

/// The variables in which make and cargo pass their jobserver to the programs they run.
const JOBSERVER: [&str; 3] = ["CARGO_MAKEFLAGS", "MAKEFLAGS", "MFLAGS"];

/// Removes the jobserver and the number of jobs from a variable: descriptors above 2 and named
/// pipes are not available on another node, and rustc warns about each missing one. Without a
/// jobserver make runs one job at a time, and rustc chooses its own parallelism.
fn without_jobserver((name, value): (OsString, OsString)) -> Option<(OsString, OsString)> {
    let Some(flags) = value.to_str().filter(|flags| {
        JOBSERVER.iter().any(|jobserver| name == *jobserver) && flags.contains("--jobserver-")
    }) else {
        return Some((name, value));
    };
    // The words after ` -- ` are variables set by the user.
    let (flags, set) = flags.split_once(" -- ").map_or((flags, None), |(flags, set)| (flags, Some(set)));
    let belongs_to_jobserver = |word: &str| {
        word.starts_with("--jobserver-")
            || word.strip_prefix("-j").is_some_and(|jobs| jobs.chars().all(|c| c.is_ascii_digit()))
    };
    let mut kept = flags.split(' ').filter(|word| !belongs_to_jobserver(word)).collect::<Vec<_>>().join(" ");
    if let Some(set) = set {
        kept = kept + " -- " + set;
    }
    (!kept.is_empty()).then(|| (name, kept.into()))
}

/// The masks of ignored and of blocked signals.
pub(super) fn signals() -> (u64, u64) {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
    };
    (mask("SigIgn:"), mask("SigBlk:"))
}

/// Whether this standard input may provide data: it is open, not /dev/null, and not an empty pipe
/// without writers, which is what make gives to all jobs but one.
fn has_input(input: impl AsFd) -> bool {
    let null = rustix::fs::stat("/dev/null").map(|null| null.st_rdev);
    fstat(&input).is_ok_and(|file| {
        let device = FileType::from_raw_mode(file.st_mode) == FileType::CharacterDevice;
        !(device && null.is_ok_and(|null| null == file.st_rdev) || is_at_end(input))
    })
}

fn is_at_end(input: impl AsFd) -> bool {
    let mut fds = [PollFd::new(&input, PollFlags::IN)];
    let result = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    result.is_ok() && fds[0].revents() == PollFlags::HUP
}

/// Whether standard output and standard error are the same file, so that the order of writes to
/// both must be kept.
fn outputs_are_one_file() -> bool {
    let (output, error) = (fstat(rustix::stdio::stdout()), fstat(rustix::stdio::stderr()));
    matches!((output, error), (Ok(a), Ok(b)) if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_closed_pipe_and_dev_null_have_no_input() {
        let (reader, writer) = std::io::pipe().unwrap();
        assert!(has_input(&reader));
        std::io::Write::write_all(&mut &writer, b"x").unwrap();
        drop(writer);
        assert!(has_input(&reader), "something is in it");
        std::io::Read::read_exact(&mut &reader, &mut [0]).unwrap();
        assert!(!has_input(&reader));
        assert!(!has_input(fs::File::open("/dev/null").unwrap()));
        assert!(has_input(fs::File::open("/dev/zero").unwrap()));
    }

    #[test]
    fn jobserver_is_removed_from_variables() {
        let kept = |name: &str, value: &str| {
            without_jobserver((name.into(), value.into())).map(|(_, value)| value.into_string().unwrap())
        };
        assert_eq!(kept("CARGO_MAKEFLAGS", "-j --jobserver-fds=6,7 --jobserver-auth=6,7"), None);
        assert_eq!(
            kept("MAKEFLAGS", "ks -j8 --jobserver-auth=fifo:/tmp/x --no-print-directory -- CC=a\\ -j2"),
            Some("ks --no-print-directory -- CC=a\\ -j2".into())
        );
        for (name, value) in
            [("MAKEFLAGS", "k -j8"), ("CFLAGS", "-j8 --jobserver-auth=3,4"), ("MAKEFLAGS", "")]
        {
            assert_eq!(kept(name, value).as_deref(), Some(value));
        }
    }
}
