//! Starts a command: first its init, in namespaces of the command's own, then the command itself.
//!
//! The container has one thread, so its forked children may run any code. Init is pid 1 of the
//! command's pid namespace. It stays root, so that the command cannot signal it. It reaps orphans,
//! forwards signals, and exits when the command has ended or the executor has closed its socket.
//! The kernel then kills all other processes of the namespace.

#![allow(unsafe_code, reason = "clone, and what lies between fork and exec")]

use super::{InitEvent, LAUNCH_FDS, LaunchRequest};
use crate::messages::{StartFailure, Task};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::{MountFlags, mount};
use rustix::process::Signal;
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::ffi::CString;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use tern_ids::Credentials;

/// How often init reaps orphans.
const REAP_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Moves this process, which has one thread, into new namespaces.
pub(super) fn unshare(flags: UnshareFlags) -> io::Result<()> {
    // SAFETY: the flags used here (mounts) do not unshare memory or descriptors.
    Ok(unsafe { unshare_unsafe(flags) }?)
}

/// Makes the kernel kill the command's process when this process ends.
pub(super) fn kill_with_parent(command: &mut Command) {
    // SAFETY: the closure makes one system call, and allocates nothing.
    unsafe {
        command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?));
    }
}

/// Lets the kernel reap the inits of commands. Their exit status is not needed, since they report
/// by message.
pub(super) fn reap_automatically() {
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Starts a command.
///
/// # Errors
/// If its init cannot be forked; the executor has been notified, as of any failure to start.
pub(super) fn start(request: &LaunchRequest, tmp_dir: &Path) -> io::Result<()> {
    let flags = libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::SIGCHLD;
    // SAFETY: as fork(2), in a process with one thread.
    match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
        0 => {
            let executor = UnixStream::from(match request.fds[3].try_clone() {
                Ok(executor) => executor,
                Err(_) => exit(),
            });
            run_init(request, tmp_dir, executor)
        }
        failed if failed < 0 => {
            let error = io::Error::last_os_error();
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            let event = InitEvent::StartFailed(StartFailure::Setup, errno);
            let _executor_gone = rustix::io::write(&request.fds[3], &event.to_bytes());
            Err(error)
        }
        _ => Ok(()),
    }
}

fn exit() -> ! {
    // SAFETY: exits at once, without running the container's exit handlers.
    unsafe { libc::_exit(0) }
}

/// The main function of init.
fn run_init(request: &LaunchRequest, tmp_dir: &Path, mut executor: UnixStream) -> ! {
    // SAFETY: restores the default disposition, so that the command can be waited for.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    let _killed_with_the_container = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    // A pid that is unique on the node: scripts use it in file names.
    let pid = if request.task.pid == 0 { outer_pid() } else { request.task.pid };
    let started = mount_private(&request.task, tmp_dir).and_then(|tmp| fork_command(request, pid, tmp));
    let event = match started {
        Err(error) => InitEvent::StartFailed(StartFailure::Setup, error.raw_os_error().unwrap_or(libc::EIO)),
        Ok((command, mut failure)) => match read_start_failure(&mut failure) {
            Some(event) => event,
            None => {
                let _gone = executor.write_all(&InitEvent::Started.to_bytes());
                // Dropped before `close_all_but` would close its descriptor: an owned descriptor
                // must not be closed by anything but its owner.
                drop(failure);
                close_all_but(executor.as_raw_fd());
                match supervise(command, &mut executor) {
                    Some(event) => event,
                    None => exit(),
                }
            }
        },
    };
    let _gone = executor.write_all(&event.to_bytes());
    exit()
}

/// Mounts what is private to the command, until it ends. Returns the variable to add to its
/// environment, if any.
fn mount_private(task: &Task, tmp_dir: &Path) -> io::Result<Option<Vec<u8>>> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount("proc", "/proc", "proc", flags | MountFlags::NOEXEC, None)?;
    // No other command looks for the temporary files of a repeatable command, so they need not be
    // sent home: a compiler's next step reads them here.
    if !task.private_tmp || task.environment.iter().any(|pair| pair.starts_with(b"TMPDIR=")) {
        return Ok(None);
    }
    let is_mounted = mount("tern", tmp_dir, "tmpfs", flags, Some(c"mode=1777")).is_ok();
    Ok(is_mounted.then(|| [b"TMPDIR=", tmp_dir.as_os_str().as_bytes()].concat()))
}

/// The pid of init outside of its namespace; 0 if it cannot be determined.
fn outer_pid() -> i32 {
    let link = std::fs::read_link("/proc/self");
    link.ok().and_then(|pid| pid.to_str()?.parse().ok()).unwrap_or(0)
}

/// The start failure that the command's process reports; `None` once it has executed its program.
fn read_start_failure(from: &mut UnixStream) -> Option<InitEvent> {
    let mut message = [0; 5];
    from.read_exact(&mut message).ok()?;
    let step = match message[0] {
        0 => StartFailure::Directory,
        1 => StartFailure::Program,
        _ => StartFailure::Setup,
    };
    Some(InitEvent::StartFailed(step, i32::from_le_bytes([message[1], message[2], message[3], message[4]])))
}

/// Closes all descriptors but one in init. A reader of the command's output gets EOF only when the
/// last writer has closed it.
fn close_all_but(kept: RawFd) {
    let kept = kept.cast_unsigned();
    // SAFETY: closes descriptors that nothing here uses any more.
    unsafe {
        libc::syscall(libc::SYS_close_range, 0, kept.saturating_sub(1), 0);
        libc::syscall(libc::SYS_close_range, kept + 1, u32::MAX, 0);
    }
}

/// Waits for the command's end, and forwards signals until then. `None` if the executor is gone.
fn supervise(command: i32, executor: &mut UnixStream) -> Option<InitEvent> {
    let pidfd = rustix::process::Pid::from_raw(command)
        .and_then(|pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok());
    loop {
        let (mut status, mut cpu_us) = (None, 0);
        while let Some((pid, child_status, used)) = reap() {
            if pid == command {
                (status, cpu_us) = (Some(child_status), used);
            }
        }
        if let Some(status) = status {
            return Some(InitEvent::Exited(status, cpu_us));
        }
        let mut fds = vec![PollFd::new(&*executor, PollFlags::IN)];
        fds.extend(pidfd.as_ref().map(|pidfd| PollFd::new(pidfd, PollFlags::IN)));
        let _interrupted = poll(&mut fds, Some(&REAP_INTERVAL));
        if !fds[0].revents().is_empty() {
            let mut message = [0; 5];
            executor.read_exact(&mut message).ok()?;
            let number = i32::from_le_bytes([message[1], message[2], message[3], message[4]]);
            // The command is the leader of its own process group.
            let target = if message[0] == 0 { command } else { -command };
            // SAFETY: no pointers. The target is our own child, which was not reaped yet.
            unsafe { libc::kill(target, number) };
        }
    }
}

/// Reaps one child that has ended: its pid, wait status and CPU time in microseconds.
fn reap() -> Option<(i32, i32, u64)> {
    let mut status = 0;
    // SAFETY: all-zero is a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are valid.
    let pid = unsafe { libc::wait4(-1, &raw mut status, libc::WNOHANG, &raw mut usage) };
    let micros = |time: libc::timeval| time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_usec.unsigned_abs();
    (pid > 0).then(|| (pid, status, micros(usage.ru_utime) + micros(usage.ru_stime)))
}

/// Forks the command. Returns its pid, and the socket on which it reports a failure to start.
fn fork_command(request: &LaunchRequest, pid: i32, tmp: Option<Vec<u8>>) -> io::Result<(i32, UnixStream)> {
    let (failure, child_end) = UnixStream::pair()?;
    let mut child = clone_with_pid(pid);
    if child < 0 && pid > 1 {
        // This pid is too large for this node, or the kernel does not support set_tid.
        child = clone_with_pid(0);
    }
    match child {
        0 => {
            drop(failure);
            let (step, error) = exec_command(&request.task, tmp, &request.credentials, &request.fds);
            let mut message = [step as u8; 5];
            message[1..].copy_from_slice(&error.raw_os_error().unwrap_or(libc::EIO).to_le_bytes());
            let _gone = (&child_end).write_all(&message);
            exit()
        }
        failed if failed < 0 => Err(io::Error::last_os_error()),
        child => Ok((child as i32, failure)),
    }
}

/// Forks, with this pid in the current namespace if it is more than 1.
fn clone_with_pid(pid: i32) -> i64 {
    let set_tid = [pid];
    // SAFETY: all-zero is valid: a plain fork.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.exit_signal = libc::SIGCHLD as u64;
    if pid > 1 {
        args.set_tid = set_tid.as_ptr() as u64;
        args.set_tid_size = 1;
    }
    // SAFETY: as fork(2), in a process with one thread; `args` and `set_tid` are valid for the
    // call.
    unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) }
}

/// Executes the command. Returns only on failure.
fn exec_command(
    task: &Task,
    tmp: Option<Vec<u8>>,
    credentials: &Credentials,
    fds: &[OwnedFd; LAUNCH_FDS],
) -> (StartFailure, io::Error) {
    if let Err(error) = set_up_process(task, credentials, fds) {
        return (StartFailure::Setup, error);
    }
    let c_string =
        |bytes: &[u8]| CString::new(bytes).map_err(|_zero| io::Error::from_raw_os_error(libc::EINVAL));
    let entered = c_string(&task.directory).and_then(|directory| Ok(rustix::process::chdir(directory)?));
    if let Err(error) = entered {
        return (StartFailure::Directory, error);
    }
    let c_strings =
        |words: &[Vec<u8>]| words.iter().map(|word| c_string(word)).collect::<io::Result<Vec<CString>>>();
    let environment: Vec<Vec<u8>> = task.environment.iter().cloned().chain(tmp).collect();
    let (arguments, environment) =
        match c_strings(&task.arguments).and_then(|arguments| Ok((arguments, c_strings(&environment)?))) {
            Ok(both) => both,
            Err(error) => return (StartFailure::Program, error),
        };
    (StartFailure::Program, execute(task, &arguments, &environment))
}

/// Like execvp(3), with the PATH of the command's own environment.
fn execute(task: &Task, arguments: &[CString], environment: &[CString]) -> io::Error {
    let pointers = |words: &[CString]| -> Vec<*const libc::c_char> {
        words.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let environment = pointers(environment);
    let path =
        task.environment.iter().find_map(|pair| pair.strip_prefix(b"PATH=")).unwrap_or(b"/bin:/usr/bin");
    let candidates: Vec<Vec<u8>> = if task.program.contains(&b'/') {
        vec![task.program.clone()]
    } else {
        let in_dir = |dir: &[u8]| {
            let dir = if dir.is_empty() { b"." } else { dir };
            [dir, b"/", &task.program].concat()
        };
        path.split(|byte| *byte == b':').map(in_dir).collect()
    };
    let mut reported = io::Error::from_raw_os_error(libc::ENOENT);
    for candidate in candidates {
        let Ok(program) = CString::new(candidate) else { continue };
        let argv = pointers(arguments);
        // SAFETY: all strings are NUL-terminated, and the arrays end with a null pointer.
        unsafe { libc::execve(program.as_ptr(), argv.as_ptr(), environment.as_ptr()) };
        let mut error = io::Error::last_os_error();
        if error.raw_os_error() == Some(libc::ENOEXEC) {
            // A script without an interpreter line is run by the shell.
            let shell = [c"/bin/sh".as_ptr(), program.as_ptr()];
            let argv: Vec<_> = shell.into_iter().chain(pointers(arguments).into_iter().skip(1)).collect();
            // SAFETY: as above.
            unsafe { libc::execve(shell[0], argv.as_ptr(), environment.as_ptr()) };
            error = io::Error::last_os_error();
        }
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => {}
            // As a shell does: EACCES is reported only if no other candidate is found.
            Some(libc::EACCES) => reported = error,
            _ => return error,
        }
    }
    reported
}

/// Sets up what the command inherits, except for its directory. Its identity comes last, since the
/// rest needs root's rights.
fn set_up_process(task: &Task, credentials: &Credentials, fds: &[OwnedFd; LAUNCH_FDS]) -> io::Result<()> {
    let check = |result: libc::c_int| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    rustix::process::setsid()?;
    if task.terminal.is_some() {
        rustix::process::ioctl_tiocsctty(&fds[0])?;
    }
    for (at, fd) in fds[..3].iter().enumerate() {
        // Duplicate to high numbers first, since a source descriptor may be one of 0 to 2.
        let high = rustix::io::fcntl_dupfd_cloexec(fd, 10)?;
        // SAFETY: replaces a standard descriptor by a copy that is not closed on exec.
        check(unsafe { libc::dup2(high.as_raw_fd(), at as RawFd) })?;
    }
    for (resource, soft, hard) in &task.limits {
        let limit = libc::rlimit { rlim_cur: *soft, rlim_max: *hard };
        // SAFETY: `limit` is valid. A resource unknown to this kernel is refused and ignored.
        unsafe { libc::setrlimit(*resource as libc::__rlimit_resource_t, &raw const limit) };
    }
    // SAFETY: no pointers.
    check(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, task.nice) })?;
    let (ignored, blocked) = (task.ignored_signals, task.blocked_signals);
    for signal in 1..=64 {
        let action = if ignored >> (signal - 1) & 1 == 1 { libc::SIG_IGN } else { libc::SIG_DFL };
        // SAFETY: no handler is installed. Signals of libc and those that cannot be changed are
        // refused.
        unsafe { libc::signal(signal, action) };
    }
    // SAFETY: the mask has eight bytes, as the kernel requires; the old mask is not requested.
    unsafe {
        let mask = &raw const blocked;
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, mask, std::ptr::null::<u64>(), 8);
    }
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(task.umask & 0o777));
    // Raw system calls, which affect one thread only. This process has no other.
    // SAFETY: the list is valid for its length; the other arguments are numbers.
    unsafe {
        check(libc::syscall(libc::SYS_setgroups, credentials.groups.len(), credentials.groups.as_ptr())
            as libc::c_int)?;
        check(libc::syscall(libc::SYS_setresgid, credentials.gid, credentials.gid, credentials.gid)
            as libc::c_int)?;
        check(libc::syscall(libc::SYS_setresuid, credentials.uid, credentials.uid, credentials.uid)
            as libc::c_int)
    }
}
