//! The birth of a command: its init, in namespaces of the command's own, and the command itself.
//!
//! The room has one thread, so what is forked here may do what any program may. Init is pid 1 of the command's pid namespace: it
//! stays root's, so that the command cannot signal it, waits for whoever is left to it, passes signals on, and ends when the command has
//! ended or the executor has closed its line. Then the kernel ends everybody else in the namespace.

#![allow(unsafe_code, reason = "clone, and what lies between fork and exec")]

use super::{DESCRIPTORS, News, Order};
use crate::words::{Failed, Task, Who};
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

/// How often init looks for who is left to it.
const OFTEN: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Takes this process, which has one thread, into new namespaces.
pub(super) fn leave(flags: UnshareFlags) -> io::Result<()> {
    // SAFETY: the flags used here (mounts) do not unshare memory or descriptors.
    Ok(unsafe { unshare_unsafe(flags) }?)
}

/// The command is killed when this process ends.
pub(super) fn ends_with_us(command: &mut Command) {
    // SAFETY: one system call.
    unsafe {
        command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?));
    }
}

/// Nobody asks how the inits of commands have ended: they have said it.
pub(super) fn reap_by_kernel() {
    // SAFETY: no handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Begins a command.
///
/// # Errors
/// If there can be no process for it.
pub(super) fn bear(order: &Order, scratch: &Path) -> io::Result<()> {
    let flags = libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::SIGCHLD;
    // SAFETY: as fork(2), in a process of one thread.
    match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
        0 => {
            let line = UnixStream::from(match order.descriptors[3].try_clone() {
                Ok(line) => line,
                Err(_) => end(),
            });
            be_init(order, scratch, line)
        }
        failed if failed < 0 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn end() -> ! {
    // SAFETY: ends this process, without what the room has registered to be done at its own end.
    unsafe { libc::_exit(0) }
}

/// The whole life of init.
fn be_init(order: &Order, scratch: &Path, mut line: UnixStream) -> ! {
    // SAFETY: the default, so that the command's end can be waited for.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    let _killed_with_the_room = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    // A number that nobody else of the node has: scripts make names of it.
    let pid = if order.task.pid == 0 { outer_number() } else { order.task.pid };
    let begun = prepare(&order.task, scratch).and_then(|own| fork_command(order, pid, own));
    let news = match begun {
        Err(error) => News::NotStarted(Failed::Setting, error.raw_os_error().unwrap_or(libc::EIO)),
        Ok((command, mut failure)) => match failed(&mut failure) {
            Some(news) => news,
            None => {
                let _gone = line.write_all(&News::Started.to_bytes());
                // Before its number is closed: an owner must not find that somebody else has done it.
                drop(failure);
                close_all_but(line.as_raw_fd());
                match attend(command, &mut line) {
                    Some(news) => news,
                    None => end(),
                }
            }
        },
    };
    let _gone = line.write_all(&news.to_bytes());
    end()
}

/// Mounts what is the command's own, and goes with it; what of its environment says so.
fn prepare(task: &Task, scratch: &Path) -> io::Result<Option<Vec<u8>>> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount("proc", "/proc", "proc", flags | MountFlags::NOEXEC, None)?;
    // What may be run twice leaves nothing there that somebody else looks for: a compiler need not send home what its next step reads.
    if !task.scratch || task.environment.iter().any(|pair| pair.starts_with(b"TMPDIR=")) {
        return Ok(None);
    }
    let is_there = mount("tern", scratch, "tmpfs", flags, Some(c"mode=1777")).is_ok();
    Ok(is_there.then(|| [b"TMPDIR=", scratch.as_os_str().as_bytes()].concat()))
}

/// The number that init has outside of its namespace; 0 if it is not seen.
fn outer_number() -> i32 {
    let own = std::fs::read_link("/proc/self");
    own.ok().and_then(|own| own.to_str()?.parse().ok()).unwrap_or(0)
}

/// What the command's own beginning says of why it failed; nothing once its program has taken over.
fn failed(from: &mut UnixStream) -> Option<News> {
    let mut said = [0; 5];
    from.read_exact(&mut said).ok()?;
    let what = match said[0] {
        0 => Failed::Directory,
        1 => Failed::Program,
        _ => Failed::Setting,
    };
    Some(News::NotStarted(what, i32::from_le_bytes([said[1], said[2], said[3], said[4]])))
}

/// Init keeps nothing of the command's streams: who reads them waits for the last who writes.
fn close_all_but(line: RawFd) {
    let line = line.cast_unsigned();
    // SAFETY: closes descriptors that nothing here uses any more.
    unsafe {
        libc::syscall(libc::SYS_close_range, 0, line.saturating_sub(1), 0);
        libc::syscall(libc::SYS_close_range, line + 1, u32::MAX, 0);
    }
}

/// Waits for the command's end, and passes signals on meanwhile. Nothing if the executor is gone.
fn attend(command: i32, line: &mut UnixStream) -> Option<News> {
    let ended = rustix::process::Pid::from_raw(command)
        .and_then(|pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok());
    loop {
        let (mut status, mut cpu) = (None, 0);
        while let Some((pid, how, used)) = reap() {
            if pid == command {
                (status, cpu) = (Some(how), used);
            }
        }
        if let Some(status) = status {
            return Some(News::Ended(status, cpu));
        }
        let mut fds = vec![PollFd::new(&*line, PollFlags::IN)];
        fds.extend(ended.as_ref().map(|ended| PollFd::new(ended, PollFlags::IN)));
        let _interrupted = poll(&mut fds, Some(&OFTEN));
        if !fds[0].revents().is_empty() {
            let mut said = [0; 5];
            line.read_exact(&mut said).ok()?;
            let number = i32::from_le_bytes([said[1], said[2], said[3], said[4]]);
            // It is the leader of a process group of its own.
            let whom = if said[0] == 0 { command } else { -command };
            // SAFETY: a signal to our own child, which is not waited for yet.
            unsafe { libc::kill(whom, number) };
        }
    }
}

/// One child that has ended: its status, and the CPU time that it used.
fn reap() -> Option<(i32, i32, u64)> {
    let mut status = 0;
    // SAFETY: all-zero is a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both places are valid.
    let pid = unsafe { libc::wait4(-1, &raw mut status, libc::WNOHANG, &raw mut usage) };
    let micros = |time: libc::timeval| time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_usec.unsigned_abs();
    (pid > 0).then(|| (pid, status, micros(usage.ru_utime) + micros(usage.ru_stime)))
}

/// Forks the command; its number, and where it says why it failed.
fn fork_command(order: &Order, pid: i32, own: Option<Vec<u8>>) -> io::Result<(i32, UnixStream)> {
    let (failure, theirs) = UnixStream::pair()?;
    let mut child = clone_as(pid);
    if child < 0 && pid > 1 {
        // Too large a number for this node, or this kernel gives none at will.
        child = clone_as(0);
    }
    match child {
        0 => {
            drop(failure);
            let (what, error) = become_command(&order.task, own, &order.who, &order.descriptors);
            let mut said = [what as u8; 5];
            said[1..].copy_from_slice(&error.raw_os_error().unwrap_or(libc::EIO).to_le_bytes());
            let _gone = (&theirs).write_all(&said);
            end()
        }
        failed if failed < 0 => Err(io::Error::last_os_error()),
        child => Ok((child as i32, failure)),
    }
}

/// Forks, with this number if it is more than 1.
fn clone_as(pid: i32) -> i64 {
    let chosen = [pid];
    // SAFETY: all-zero is valid: a plain fork.
    let mut how: libc::clone_args = unsafe { std::mem::zeroed() };
    how.exit_signal = libc::SIGCHLD as u64;
    if pid > 1 {
        how.set_tid = chosen.as_ptr() as u64;
        how.set_tid_size = 1;
    }
    // SAFETY: as fork(2), in a process of one thread; `how` and `chosen` are valid during the call.
    unsafe { libc::syscall(libc::SYS_clone3, &raw const how, size_of::<libc::clone_args>()) }
}

/// Becomes the command; returns only what failed.
fn become_command(
    task: &Task,
    own: Option<Vec<u8>>,
    who: &Who,
    descriptors: &[OwnedFd; DESCRIPTORS],
) -> (Failed, io::Error) {
    if let Err(error) = settle(task, who, descriptors) {
        return (Failed::Setting, error);
    }
    let text = |bytes: &[u8]| CString::new(bytes).map_err(|_zero| io::Error::from_raw_os_error(libc::EINVAL));
    let enter = text(&task.directory).and_then(|directory| Ok(rustix::process::chdir(directory)?));
    if let Err(error) = enter {
        return (Failed::Directory, error);
    }
    let all = |words: &[Vec<u8>]| words.iter().map(|word| text(word)).collect::<io::Result<Vec<CString>>>();
    let environment: Vec<Vec<u8>> = task.environment.iter().cloned().chain(own).collect();
    let (arguments, environment) = match all(&task.arguments).and_then(|a| Ok((a, all(&environment)?))) {
        Ok(both) => both,
        Err(error) => return (Failed::Program, error),
    };
    (Failed::Program, execute(task, &arguments, &environment))
}

/// As execvp(3), with the PATH of the command's own environment.
fn execute(task: &Task, arguments: &[CString], environment: &[CString]) -> io::Error {
    let pointers = |words: &[CString]| -> Vec<*const libc::c_char> {
        words.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let environment = pointers(environment);
    let path =
        task.environment.iter().find_map(|pair| pair.strip_prefix(b"PATH=")).unwrap_or(b"/bin:/usr/bin");
    let places: Vec<Vec<u8>> = if task.program.contains(&b'/') {
        vec![task.program.clone()]
    } else {
        let within = |place: &[u8]| {
            let place = if place.is_empty() { b"." } else { place };
            [place, b"/", &task.program].concat()
        };
        path.split(|byte| *byte == b':').map(within).collect()
    };
    let mut said = io::Error::from_raw_os_error(libc::ENOENT);
    for place in places {
        let Ok(program) = CString::new(place) else { continue };
        let argv = pointers(arguments);
        // SAFETY: all are terminated strings, and end with a null pointer.
        unsafe { libc::execve(program.as_ptr(), argv.as_ptr(), environment.as_ptr()) };
        let mut error = io::Error::last_os_error();
        if error.raw_os_error() == Some(libc::ENOEXEC) {
            // A script that names no interpreter is the shell's.
            let shell = [c"/bin/sh".as_ptr(), program.as_ptr()];
            let argv: Vec<_> = shell.into_iter().chain(pointers(arguments).into_iter().skip(1)).collect();
            // SAFETY: as above.
            unsafe { libc::execve(shell[0], argv.as_ptr(), environment.as_ptr()) };
            error = io::Error::last_os_error();
        }
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => {}
            // As the shell: what may not be executed is said if nothing else is found.
            Some(libc::EACCES) => said = error,
            _ => return error,
        }
    }
    said
}

/// All that the command inherits, but for its directory; its identity last, since that takes the right to the others.
fn settle(task: &Task, who: &Who, descriptors: &[OwnedFd; DESCRIPTORS]) -> io::Result<()> {
    let check = |outcome: libc::c_int| if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    rustix::process::setsid()?;
    if task.terminal.is_some() {
        rustix::process::ioctl_tiocsctty(&descriptors[0])?;
    }
    for (at, descriptor) in descriptors[..3].iter().enumerate() {
        // Above all of them first: none of these may be one of 0 to 2.
        let high = rustix::io::fcntl_dupfd_cloexec(descriptor, 10)?;
        // SAFETY: makes the standard descriptor a copy, which is not closed on exec.
        check(unsafe { libc::dup2(high.as_raw_fd(), at as RawFd) })?;
    }
    for (resource, soft, hard) in &task.limits {
        let limit = libc::rlimit { rlim_cur: *soft, rlim_max: *hard };
        // SAFETY: a valid limit. One that this kernel does not know is refused, and is none then.
        unsafe { libc::setrlimit(*resource as libc::__rlimit_resource_t, &raw const limit) };
    }
    // SAFETY: numbers.
    check(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, task.nice) })?;
    let (ignored, blocked) = task.signals;
    for signal in 1..=64 {
        let action = if ignored >> (signal - 1) & 1 == 1 { libc::SIG_IGN } else { libc::SIG_DFL };
        // SAFETY: no handler. Those of libc itself, and that cannot be changed, are refused.
        unsafe { libc::signal(signal, action) };
    }
    // SAFETY: eight bytes, as the kernel has them; the old mask is not asked for.
    unsafe {
        let mask = &raw const blocked;
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, mask, std::ptr::null::<u64>(), 8);
    }
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(task.umask & 0o777));
    // The raw calls: this process has one thread.
    // SAFETY: the list is valid for its length; the others are numbers.
    unsafe {
        check(libc::syscall(libc::SYS_setgroups, who.groups.len(), who.groups.as_ptr()) as libc::c_int)?;
        check(libc::syscall(libc::SYS_setresgid, who.gid, who.gid, who.gid) as libc::c_int)?;
        check(libc::syscall(libc::SYS_setresuid, who.uid, who.uid, who.uid) as libc::c_int)
    }
}
