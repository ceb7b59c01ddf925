//! What a command inherits of who calls it.

use super::bytes;
use crate::Failure;
use rustix::fs::{FileType, fstat};
use rustix::process::Resource;
use std::ffi::OsStr;
use std::fs;
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
    let pair = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        [name.into_vec(), b"=".to_vec(), value.into_vec()].concat()
    };
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
        environment: std::env::vars_os().map(pair).collect(),
        directory: directory.into_os_string().into_vec(),
        umask: umask.as_raw_mode(),
        limits: limits.to_vec(),
        nice: rustix::process::getpriority_process(None).unwrap_or(0),
        signals: signals(),
        pid: rustix::process::getpid().as_raw_nonzero().get(),
        terminal: None,
        input: has_input(),
        joined: are_joined(),
        scratch: false,
    })
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

/// Whether something may come from standard input: it is open, and not /dev/null.
fn has_input() -> bool {
    let null = rustix::fs::stat("/dev/null").map(|null| null.st_rdev);
    fstat(rustix::stdio::stdin()).is_ok_and(|input| {
        let device = FileType::from_raw_mode(input.st_mode) == FileType::CharacterDevice;
        !(device && null.is_ok_and(|null| null == input.st_rdev))
    })
}

/// Whether standard output and error are one file: what is written to one is then not to overtake what is written to the other.
fn are_joined() -> bool {
    let (output, error) = (fstat(rustix::stdio::stdout()), fstat(rustix::stdio::stderr()));
    matches!((output, error), (Ok(a), Ok(b)) if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino))
}
