//! What a command inherits of who calls it.

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
use tern_mexec::words::Task;

/// All limits, by their numbers in setrlimit(2).
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

/// The command with everything that this process would hand down to it.
///
/// # Errors
/// If there is no such thing as its directory any more.
pub(super) fn task(program: &OsStr, arguments: &[&OsStr]) -> Result<Task, Failure> {
    let directory = std::env::current_dir().map_err(|error| {
        Failure::new(RefusalKind::NotFound, format!("this directory has no name any more: {error}"))
            .hint("cd to one that has")
    })?;
    let pair =
        |(name, value): (OsString, OsString)| [name.into_vec(), b"=".to_vec(), value.into_vec()].concat();
    let umask = rustix::process::umask(rustix::fs::Mode::empty());
    rustix::process::umask(umask);
    let none = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
    let limits = LIMITS.map(|(number, resource)| {
        let limit = rustix::process::getrlimit(resource);
        (number, none(limit.current), none(limit.maximum))
    });
    Ok(Task {
        program: bytes(program),
        arguments: arguments.iter().map(|word| bytes(word)).collect(),
        environment: std::env::vars_os().filter_map(without_jobserver).map(pair).collect(),
        directory: directory.into_os_string().into_vec(),
        umask: umask.as_raw_mode(),
        limits: limits.to_vec(),
        nice: rustix::process::getpriority_process(None).unwrap_or(0),
        signals: signals(),
        pid: rustix::process::getpid().as_raw_nonzero().get(),
        terminal: None,
        input: has_input(rustix::stdio::stdin()),
        joined: are_joined(),
        scratch: false,
    })
}

/// The variables by which make and cargo tell what they run of their jobserver.
const JOBSERVER: [&str; 3] = ["CARGO_MAKEFLAGS", "MAKEFLAGS", "MFLAGS"];

/// A variable without the jobserver and the number of its jobs: descriptors above 2 and named pipes do not cross, and rustc warns of
/// each one that is not there. Whoever has no jobserver does one thing at a time (make) or what he thinks right (rustc).
fn without_jobserver((name, value): (OsString, OsString)) -> Option<(OsString, OsString)> {
    let Some(flags) = value.to_str().filter(|flags| {
        JOBSERVER.iter().any(|jobserver| name == *jobserver) && flags.contains("--jobserver-")
    }) else {
        return Some((name, value));
    };
    // What comes after that is what the user has set.
    let (flags, set) = flags.split_once(" -- ").map_or((flags, None), |(flags, set)| (flags, Some(set)));
    let is_of_it = |word: &str| {
        word.starts_with("--jobserver-")
            || word.strip_prefix("-j").is_some_and(|jobs| jobs.chars().all(|c| c.is_ascii_digit()))
    };
    let mut kept = flags.split(' ').filter(|word| !is_of_it(word)).collect::<Vec<_>>().join(" ");
    if let Some(set) = set {
        kept = kept + " -- " + set;
    }
    (!kept.is_empty()).then(|| (name, kept.into()))
}

/// The signals that are ignored, and those that are blocked.
pub(super) fn signals() -> (u64, u64) {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
    };
    (mask("SigIgn:"), mask("SigBlk:"))
}

/// Whether something may come from this standard input: it is open, not /dev/null, and no pipe that nobody writes to any more: make gives
/// such ones to all jobs but one.
fn has_input(input: impl AsFd) -> bool {
    let null = rustix::fs::stat("/dev/null").map(|null| null.st_rdev);
    fstat(&input).is_ok_and(|file| {
        let device = FileType::from_raw_mode(file.st_mode) == FileType::CharacterDevice;
        !(device && null.is_ok_and(|null| null == file.st_rdev) || is_over(input))
    })
}

fn is_over(input: impl AsFd) -> bool {
    let mut fds = [PollFd::new(&input, PollFlags::IN)];
    let said = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    said.is_ok() && fds[0].revents() == PollFlags::HUP
}

/// Whether standard output and error are one file: what is written to one is then not to overtake what is written to the other.
fn are_joined() -> bool {
    let (output, error) = (fstat(rustix::stdio::stdout()), fstat(rustix::stdio::stderr()));
    matches!((output, error), (Ok(a), Ok(b)) if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_that_is_over_and_dev_null_have_no_input() {
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
    fn a_jobserver_does_not_cross() {
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
