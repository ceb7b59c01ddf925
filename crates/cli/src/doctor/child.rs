//! Runs a probe in a child process, for changes that a process cannot undo: filters, namespaces,
//! disabled instructions.
#![expect(unsafe_code, reason = "fork, and the end of the child without this process's exit handlers")]

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// How long a probe may take before it is killed.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs `probe` in a child process and returns its result.
///
/// # Errors
/// The probe's own error, by its errno; `TimedOut` if it hung; `Other` if the child died or
/// panicked.
pub(super) fn in_child(probe: impl FnOnce() -> io::Result<u64>) -> io::Result<u64> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    // SAFETY: the child runs `probe` and leaves by _exit. The tools have one thread when they
    // probe, so no lock is held by a thread that does not exist in the child (tests have several
    // threads; glibc makes its allocator safe across fork).
    let pid = unsafe { libc::fork() };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(read);
            send_result(probe, write);
            // SAFETY: ends the child at once; no exit handler runs and no buffer of the parent is
            // flushed.
            unsafe { libc::_exit(0) }
        }
        pid => {
            drop(write);
            let result = receive_result(read);
            // SAFETY: the child has not been waited for, so its pid cannot have been reused.
            unsafe {
                libc::kill(pid, libc::SIGKILL);
                libc::waitpid(pid, std::ptr::null_mut(), 0);
            }
            result
        }
    }
}

/// In the child: sends the result as an errno (0 on success) and a value.
fn send_result(probe: impl FnOnce() -> io::Result<u64>, pipe: OwnedFd) {
    let (errno, value) = match catch_unwind(AssertUnwindSafe(probe)) {
        Ok(Ok(value)) => (0, value),
        Ok(Err(error)) => (error.raw_os_error().unwrap_or(libc::EIO), 0),
        Err(_panic) => return,
    };
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&errno.to_ne_bytes());
    bytes[4..].copy_from_slice(&value.to_ne_bytes());
    // If the parent is gone, nothing needs the result.
    let _ = std::fs::File::from(pipe).write_all(&bytes);
}

fn receive_result(pipe: OwnedFd) -> io::Result<u64> {
    let mut fds = [rustix::event::PollFd::new(&pipe, rustix::event::PollFlags::IN)];
    let timeout = PROBE_TIMEOUT.try_into().map_err(io::Error::other)?;
    if rustix::event::poll(&mut fds, Some(&timeout))? == 0 {
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

/// The result of a libc call that returns -1 and sets errno on failure.
pub(super) fn checked(result: i64) -> io::Result<u64> {
    u64::try_from(result).map_err(|_negative| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_errors_and_deaths_are_reported() {
        assert_eq!(in_child(|| Ok(u64::MAX)).unwrap(), u64::MAX);
        let refused = in_child(|| Err(io::Error::from_raw_os_error(libc::EPERM)));
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EPERM));
        let dies = in_child(|| std::process::abort());
        assert!(dies.unwrap_err().to_string().starts_with("the probe was killed"));
    }
}
