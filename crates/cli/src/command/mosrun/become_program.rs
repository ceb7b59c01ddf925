//! execve, and what to say if it fails.

use crate::{Failure, output};
use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;

/// Replaces this process by the program, which is searched for as the shell does. Everything else that the
/// program inherits (environment, descriptors, signals, umask, limits) is as this process got it.
///
/// Returns only on failure: exit code 127 if there is no such program, 126 if it cannot be executed.
pub fn become_program(program: &OsStr, arguments: &[&OsStr]) -> Failure {
    let shown = program.to_string_lossy();
    let terminated = |word: &OsStr| CString::new(word.as_bytes());
    let words: Result<Vec<_>, _> = arguments.iter().map(|word| terminated(word)).collect();
    let (Ok(name), Ok(words)) = (terminated(program), words) else {
        // argv cannot hold one; only a caller within this program could.
        return failed(126, &shown, &io::Error::from(io::ErrorKind::InvalidInput));
    };
    let mut argv: Vec<_> = words.iter().map(|word| word.as_ptr()).collect();
    argv.push(std::ptr::null());
    #[expect(
        unsafe_code,
        reason = "std's Command::exec resets SIGPIPE, which must stay as the caller set it"
    )]
    // SAFETY: name and words are terminated strings that outlive the call; argv ends with a null pointer.
    // This is the only thread, so that nobody changes the environment while it is read.
    unsafe {
        libc::execvp(name.as_ptr(), argv.as_ptr());
    }
    let error = io::Error::last_os_error();
    failed(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 }, &shown, &error)
}

/// Makes a child that is as this process is: its pid, or nothing in the child.
///
/// Preconditions: this process has one thread. The child ends with [`become_program`], or by exit.
///
/// # Errors
/// If there cannot be one more process.
pub fn fork() -> io::Result<Option<rustix::process::Pid>> {
    #[expect(unsafe_code, reason = "std's Command changes the child's signals")]
    // SAFETY: with one thread nobody holds a lock, so that the child may do whatever this process may.
    let child = unsafe { libc::fork() };
    match child {
        -1 => Err(io::Error::last_os_error()),
        child => Ok(rustix::process::Pid::from_raw(child)),
    }
}

fn failed(code: u8, program: &str, error: &io::Error) -> Failure {
    Failure { code, message: format!("{program}: {}", output::reason(error)), hint: None }
}

/// What programs get as their arguments: their own name first.
pub fn arguments<'a>(program: &'a OsStr, rest: &'a [OsString]) -> Vec<&'a OsStr> {
    std::iter::once(program).chain(rest.iter().map(OsString::as_os_str)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_have_the_shell_s_codes() {
        let fails = |name: &str| become_program(OsStr::new(name), &[OsStr::new("x")]);
        let missing = fails("/nonexistent/program");
        assert_eq!(
            (missing.code, &*missing.message),
            (127, "/nonexistent/program: no such file or directory")
        );
        let directory = fails("/");
        assert_eq!((directory.code, &*directory.message), (126, "/: permission denied"));
    }
}
