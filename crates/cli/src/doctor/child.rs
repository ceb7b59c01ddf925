//! A probe in a child process, for what a process cannot take back: filters, namespaces, lost instructions.
#![expect(unsafe_code, reason = "fork, and the end of the child without this process's exit handlers")]

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// How long a probe may take; one that hangs is killed.
const PATIENCE: Duration = Duration::from_secs(5);

/// Runs `probe` in a child and returns its answer.
///
/// # Errors
/// The probe's own, by its errno; `TimedOut` if it hung; `Other` if the child died or panicked.
pub(super) fn in_child(probe: impl FnOnce() -> io::Result<u64>) -> io::Result<u64> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    // SAFETY: the child runs `probe` and leaves by _exit. The tools have one thread when they probe, so that
    // no lock is held by a thread which the child does not have (tests have more; glibc's own allocator is
    // made ready for a fork by glibc).
    let pid = unsafe { libc::fork() };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(read);
            answer(probe, write);
            // SAFETY: ends the child at once; nothing of the parent's is flushed or run twice.
            unsafe { libc::_exit(0) }
        }
        pid => {
            drop(write);
            let answer = listen(read);
            // SAFETY: a child of ours that nobody else waits for, so that its pid cannot be another's.
            unsafe {
                libc::kill(pid, libc::SIGKILL);
                libc::waitpid(pid, std::ptr::null_mut(), 0);
            }
            answer
        }
    }
}

/// In the child: the answer as errno (0 if none) and value.
fn answer(probe: impl FnOnce() -> io::Result<u64>, pipe: OwnedFd) {
    let (errno, value) = match catch_unwind(AssertUnwindSafe(probe)) {
        Ok(Ok(value)) => (0, value),
        Ok(Err(error)) => (error.raw_os_error().unwrap_or(libc::EIO), 0),
        Err(_panic) => return,
    };
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&errno.to_ne_bytes());
    bytes[4..].copy_from_slice(&value.to_ne_bytes());
    // If the parent is gone, so is the question.
    let _ = std::fs::File::from(pipe).write_all(&bytes);
}

fn listen(pipe: OwnedFd) -> io::Result<u64> {
    let mut ready = [rustix::event::PollFd::new(&pipe, rustix::event::PollFlags::IN)];
    let patience = PATIENCE.try_into().map_err(io::Error::other)?;
    if rustix::event::poll(&mut ready, Some(&patience))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let mut bytes = [0; 12];
    std::fs::File::from(pipe)
        .read_exact(&mut bytes)
        .map_err(|error| io::Error::other(format!("the probe was killed ({error})")))?;
    let (errno, value) = bytes.split_at(4);
    let errno = errno.try_into().map(i32::from_ne_bytes).map_err(io::Error::other)?;
    let value = value.try_into().map(u64::from_ne_bytes).map_err(io::Error::other)?;
    if errno == 0 { Ok(value) } else { Err(io::Error::from_raw_os_error(errno)) }
}

/// The result of a libc call that answers -1 and sets errno.
pub(super) fn checked(result: i64) -> io::Result<u64> {
    u64::try_from(result).map_err(|_negative| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_and_errors_come_back_and_deaths_are_noticed() {
        assert_eq!(in_child(|| Ok(u64::MAX)).unwrap(), u64::MAX);
        let refused = in_child(|| Err(io::Error::from_raw_os_error(libc::EPERM)));
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EPERM));
        let dies = in_child(|| std::process::abort());
        assert!(dies.unwrap_err().to_string().starts_with("the probe was killed"));
    }
}
