//! Replaces this process by a program with execve, and reports why that failed.

use crate::{Failure, output};
use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;

/// Replaces this process by the program, which is searched for as the shell does. The environment,
/// descriptors, signal dispositions, umask and limits of this process are passed on unchanged.
///
/// Returns only on failure: exit code 127 if the program does not exist, 126 if it cannot be
/// executed.
pub(crate) fn replace_process(program: &OsStr, arguments: &[&OsStr]) -> Failure {
    let name_text = program.to_string_lossy();
    let c_string = |word: &OsStr| CString::new(word.as_bytes());
    let words: Result<Vec<_>, _> = arguments.iter().map(|word| c_string(word)).collect();
    let (Ok(name), Ok(words)) = (c_string(program), words) else {
        // Arguments from argv contain no NUL byte; only a caller inside this program could pass
        // one.
        return failure(126, &name_text, &io::Error::from(io::ErrorKind::InvalidInput));
    };
    let mut argv: Vec<_> = words.iter().map(|word| word.as_ptr()).collect();
    argv.push(std::ptr::null());
    #[expect(
        unsafe_code,
        reason = "std's Command::exec resets SIGPIPE, which must stay as the caller set it"
    )]
    // SAFETY: name and words are terminated strings that outlive the call; argv ends with a null
    // pointer. This is the only thread, so the environment does not change while it is read.
    unsafe {
        libc::execvp(name.as_ptr(), argv.as_ptr());
    }
    let error = io::Error::last_os_error();
    failure(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 }, &name_text, &error)
}

/// Forks. Returns the child's pid in the parent, and `None` in the child.
///
/// This process must have one thread. The child must end with [`replace_process`] or exit.
///
/// # Errors
/// If the kernel cannot create a process.
pub(crate) fn fork() -> io::Result<Option<rustix::process::Pid>> {
    #[expect(unsafe_code, reason = "std's Command changes the child's signals")]
    // SAFETY: with one thread no lock can be held, so the child may call whatever this process may.
    let child = unsafe { libc::fork() };
    match child {
        -1 => Err(io::Error::last_os_error()),
        child => Ok(rustix::process::Pid::from_raw(child)),
    }
}

fn failure(code: u8, program: &str, error: &io::Error) -> Failure {
    Failure::with_code(code, format!("{program}: {}", output::error_text(error)))
}

/// The argv of a program: its name, then its arguments.
pub(crate) fn argv_of<'a>(program: &'a OsStr, rest: &'a [OsString]) -> Vec<&'a OsStr> {
    std::iter::once(program).chain(rest.iter().map(OsString::as_os_str)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_have_the_shells_codes() {
        let run = |name: &str| replace_process(OsStr::new(name), &[OsStr::new("x")]);
        let missing = run("/nonexistent/program");
        assert_eq!(
            (missing.code, &*missing.message),
            (127, "/nonexistent/program: no such file or directory")
        );
        let directory = run("/");
        assert_eq!((directory.code, &*directory.message), (126, "/: permission denied"));
    }
}
