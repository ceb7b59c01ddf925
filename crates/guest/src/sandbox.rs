//! The namespaces that hold a family's guests, and the helper that is their first process.
//!
//! ```text
//!  shim ──fork──▶ helper: pid 1 of the family's pid namespace; user, mount, network, ipc, uts, cgroup and
//!    │              │     time namespaces of its own; an empty root; identity of the moved user
//!    │ptrace        └─fork─▶ guest (its pid chosen through ns_last_pid)
//!    └─socket: commands of five bytes, replies of one
//! ```
//! The helper is traced with EXITKILL: when the shim dies, the kernel kills the helper. The helper is
//! pid 1 of the namespace, so the kernel then kills all guests. Until then no trapped call of a guest
//! may fail with ENOSYS, so the helper holds a second descriptor of each seccomp notification fd.

#![allow(unsafe_code, reason = "namespaces and the helper's bare system calls")]

pub(crate) mod clone;
pub(crate) mod empty;

use std::fmt::Write;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use tern_image::Unmovable;
use tern_tracee::stop::{self, EXIT_KILL, FOLLOW, Stop, Stopped, WaitEvent};

/// The uid and gid (nobody) of guests whose user is root at home.
const NOBODY: u32 = 65534;

/// A family's namespaces.
#[derive(Debug)]
pub(crate) struct Sandbox {
    helper: i32,
    commands: OwnedFd,
}

/// Command: the next process that is forked in the namespace gets this pid.
const SET_NEXT_PID: u8 = b'l';
/// Command: fork a process with this pid.
const FORK: u8 = b'f';
/// Command: keep the descriptor that is sent with it. The first command of any kind only makes the
/// helper set up the namespaces, and is sent without a descriptor.
const KEEP: u8 = b'k';

impl Sandbox {
    /// Creates the namespaces. Guests see the monotonic and boot clocks shifted by `clock_offset`
    /// nanoseconds, unless the kernel refuses a time namespace: then they see this node's clocks.
    ///
    /// # Errors
    /// If a namespace cannot be created here; nothing remains.
    pub(crate) fn create(uid: u32, gid: u32, clock_offset: [i64; 2]) -> io::Result<Self> {
        let (ours, theirs) = socket_pair()?;
        let namespaces = libc::CLONE_NEWUSER
            | libc::CLONE_NEWPID
            | libc::CLONE_NEWNS
            | libc::CLONE_NEWNET
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUTS
            | libc::CLONE_NEWCGROUP;
        // SAFETY: as fork(2). Other threads may hold locks, the allocator's among them, which stay
        // locked in the child. So the child runs only `helper_main`, which takes no lock and
        // allocates nothing.
        let helper = unsafe { libc::syscall(libc::SYS_clone, namespaces | libc::SIGCHLD, 0, 0, 0, 0) } as i32;
        if helper < 0 {
            return Err(io::Error::last_os_error());
        }
        if helper == 0 {
            drop(ours);
            helper_main(theirs.as_raw_fd(), clock_offset);
        }
        drop(theirs);
        let sandbox = Self { helper, commands: ours };
        // From here on a failure drops `sandbox`, which kills the helper.
        // The helper inherits the shim's short time slices. Its children, the guests, must have
        // the default ones.
        let _refused = tern_tracee::time_slice::set(helper, None);
        let root = uid == 0;
        let (uid, gid) = if root { (NOBODY, NOBODY) } else { (uid, gid) };
        let write = |what: &str, text: String| fs::write(format!("/proc/{helper}/{what}"), text);
        write("setgroups", "deny".into())?;
        write("uid_map", format!("0 {uid} 1\n"))?;
        write("gid_map", format!("0 {gid} 1\n"))?;
        stop::seize(helper, FOLLOW | EXIT_KILL).map_err(io::Error::other)?;
        sandbox.send_command(KEEP, 0)?;
        Ok(sandbox)
    }

    /// The helper's pid on this node.
    #[must_use]
    pub(crate) fn helper(&self) -> i32 {
        self.helper
    }

    /// Sends a command to the helper and waits for the reply. Meanwhile its ptrace stops are
    /// handled. A child that it forks is returned, stopped before its first instruction.
    fn run_command(&self, command: u8, pid: i32) -> io::Result<Option<Stopped>> {
        let mut bytes = [command, 0, 0, 0, 0];
        bytes[1..].copy_from_slice(&pid.to_le_bytes());
        rustix::io::write(&self.commands, &bytes)?;
        let mut child = None;
        loop {
            // Waits for the reply and for stops at once: the helper may stop before it replies.
            let mut poll = libc::pollfd { fd: self.commands.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            let awaits_fork = child.is_none() && command == FORK;
            // SAFETY: one valid pollfd.
            unsafe { libc::poll(&raw mut poll, 1, if awaits_fork { 0 } else { 1 }) };
            match stop::wait(self.helper, false).map_err(io::Error::other)? {
                Some((_, WaitEvent::Stopped(stopped))) => {
                    if stopped.stop == Stop::Fork {
                        let forked = stopped.message().map_err(io::Error::other)? as i32;
                        child = Some(stop::wait_stop(forked).map_err(io::Error::other)?);
                    }
                    stopped.resume(0).map_err(io::Error::other)?;
                    continue;
                }
                Some(_) => return Err(io::Error::other("the guests' helper ended")),
                None => {}
            }
            // After a fork the helper replies only once this loop has resumed it from its fork
            // stop. So `child` is set by then, unless the fork failed.
            if poll.revents & (libc::POLLIN | libc::POLLHUP) == 0 {
                continue;
            }
            let mut reply = [0];
            rustix::io::read(&self.commands, &mut reply)?;
            return match reply {
                [0] => Ok(child),
                [errno] => Err(io::Error::from_raw_os_error(i32::from(errno))),
            };
        }
    }

    fn send_command(&self, command: u8, pid: i32) -> io::Result<()> {
        self.run_command(command, pid).map(drop)
    }

    /// Forks a process with this pid in the namespace. It is a copy of this program, stopped and
    /// traced.
    ///
    /// # Errors
    /// If the pid is in use in the namespace, or above its limit.
    pub(crate) fn fork(&self, pid: i32) -> io::Result<Stopped> {
        let not_given = || io::Error::other(Unmovable::Pid(pid));
        let child = self.run_command(FORK, pid).map_err(|error| match error.kind() {
            // The kernel's reply to a pid above pid_max.
            io::ErrorKind::InvalidInput => not_given(),
            _ => error,
        })?;
        let child = child.ok_or_else(|| io::Error::other("the helper did not fork"))?;
        let status = tern_tracee::procfs::status(child.pid()).map_err(io::Error::other)?;
        if status.own_pid != pid {
            tern_tracee::pidfd::kill(child.pid());
            return Err(not_given());
        }
        Ok(child)
    }

    /// Sets the pid of the next process that is forked in the namespace.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn set_next_pid(&self, pid: i32) -> io::Result<()> {
        self.send_command(SET_NEXT_PID, pid)
    }

    /// Has the helper hold a copy of a descriptor.
    ///
    /// # Errors
    /// If it cannot be passed.
    pub(crate) fn keep_fd(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
        let fds = [fd];
        control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds));
        let command = [KEEP, 0, 0, 0, 0];
        let parts = [io::IoSlice::new(&command)];
        rustix::net::sendmsg(&self.commands, &parts, &mut control, rustix::net::SendFlags::empty())?;
        let mut reply = [0];
        rustix::io::read(&self.commands, &mut reply)?;
        Ok(())
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        tern_tracee::pidfd::kill(self.helper);
        // The end of pid 1 ends all guests. Wait for it, so that nothing remains when the shim is
        // gone. The helper can end only after every guest has been reaped, which is the task of
        // their tracer, this process.
        loop {
            match stop::wait(-1, true) {
                Ok(Some((pid, WaitEvent::Exited(_) | WaitEvent::Killed(..)))) if pid == self.helper => break,
                Ok(_) => {}
                Err(_) => break,
            }
        }
    }
}

fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: room for two descriptors.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us both.
    Ok(unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) })
}

fn errno() -> u8 {
    io::Error::last_os_error().raw_os_error().and_then(|e| u8::try_from(e).ok()).unwrap_or(255)
}

/// A short text that needs no allocator.
struct Text {
    bytes: [u8; 128],
    len: usize,
}

impl Text {
    fn of(words: std::fmt::Arguments<'_>) -> Self {
        let mut text = Self { bytes: [0; 128], len: 0 };
        let _what_does_not_fit_is_refused_by_the_kernel = text.write_fmt(words);
        text
    }
}

impl std::fmt::Write for Text {
    fn write_str(&mut self, piece: &str) -> std::fmt::Result {
        let end = self.len + piece.len();
        self.bytes.get_mut(self.len..end).ok_or(std::fmt::Error)?.copy_from_slice(piece.as_bytes());
        self.len = end;
        Ok(())
    }
}

/// The helper's main function. It makes only plain system calls, and must not allocate or take a
/// lock.
fn helper_main(commands: i32, clock_offset: [i64; 2]) -> ! {
    let mut next_pid_file = -1;
    let mut ready = false;
    // The shim's links must close when the shim ends, so the helper must not hold copies.
    // SAFETY: closes descriptors that only the shim's copy of this code would use.
    unsafe {
        libc::syscall(libc::SYS_close_range, 0, commands - 1, 0);
        libc::syscall(libc::SYS_close_range, commands + 1, u32::MAX, 0);
    }
    loop {
        let mut command = [0u8; 5];
        // SAFETY: the buffer is valid; a descriptor that comes along is kept open on purpose.
        let got = unsafe { receive(commands, &mut command) };
        if got != 5 {
            // The shim is gone.
            // SAFETY: ends this process, and with it the namespace.
            unsafe { libc::_exit(0) };
        }
        let reply = if ready {
            execute_command(command, next_pid_file)
        } else {
            // The first command is sent after the identity maps are written.
            ready = true;
            match set_up_namespaces(clock_offset) {
                Ok(fd) => {
                    next_pid_file = fd;
                    0
                }
                Err(code) => code,
            }
        };
        // SAFETY: one byte from a valid place.
        unsafe { libc::send(commands, (&raw const reply).cast(), 1, libc::MSG_NOSIGNAL) };
    }
}

/// # Safety
/// `commands` is a socket.
unsafe fn receive(commands: i32, command: &mut [u8; 5]) -> isize {
    let mut control = [0u64; 4];
    let mut part = libc::iovec { iov_base: command.as_mut_ptr().cast(), iov_len: 5 };
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    loop {
        // SAFETY: all the pointers in `message` are to places above.
        let got = unsafe { libc::recvmsg(commands, &raw mut message, libc::MSG_CMSG_CLOEXEC) };
        if got >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return got;
        }
    }
}

fn execute_command(command: [u8; 5], next_pid_file: i32) -> u8 {
    let [what, p0, p1, p2, p3] = command;
    let pid = i32::from_le_bytes([p0, p1, p2, p3]);
    if what == KEEP {
        return 0;
    }
    let text = Text::of(format_args!("{}", pid.wrapping_sub(1)));
    // SAFETY: the text is valid for its length; sysctl files are written as a whole at offset 0.
    if unsafe { libc::pwrite(next_pid_file, text.bytes.as_ptr().cast(), text.len, 0) } < 0 {
        return errno();
    }
    if what == SET_NEXT_PID {
        return 0;
    }
    // SAFETY: a plain fork of a process with one thread. The child is stopped before its first
    // instruction here, and never executes it: it becomes a guest.
    match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
        0 => loop {
            // SAFETY: sleeps.
            unsafe { libc::pause() };
        },
        child if child < 0 => errno(),
        _ => 0,
    }
}

/// Sets up the namespaces. Returns the descriptor by which pids are chosen.
fn set_up_namespaces(clock_offset: [i64; 2]) -> Result<i32, u8> {
    let check = |ret: i64| if ret < 0 { Err(errno()) } else { Ok(ret) };
    let call = |nr, a: u64, b: u64, c: u64| {
        // SAFETY: system calls with integers only.
        check(unsafe { libc::syscall(nr, a, b, c) })
    };
    call(libc::SYS_setresgid, 0, 0, 0)?;
    call(libc::SYS_setresuid, 0, 0, 0)?;
    call(libc::SYS_prctl, libc::PR_SET_PDEATHSIG as u64, libc::SIGKILL as u64, 0)?;
    // The change of user has made /proc/self inaccessible to this process. This call makes it
    // accessible. The last call below makes it inaccessible again, to the user's other processes.
    call(libc::SYS_prctl, libc::PR_SET_DUMPABLE as u64, 1, 0)?;
    // SAFETY: integers.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    // SAFETY: as above.
    let next_pid_file = check(
        unsafe { libc::open(c"/proc/sys/kernel/ns_last_pid".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) }
            .into(),
    )?;
    if call(libc::SYS_unshare, libc::CLONE_NEWTIME as u64, 0, 0).is_ok() {
        let [monotonic, boot] =
            clock_offset.map(|ns| (ns.div_euclid(1_000_000_000), ns.rem_euclid(1_000_000_000)));
        let text = Text::of(format_args!(
            "monotonic {} {}\nboottime {} {}\n",
            monotonic.0, monotonic.1, boot.0, boot.1
        ));
        // SAFETY: as above.
        let file =
            check(unsafe { libc::open(c"/proc/self/timens_offsets".as_ptr(), libc::O_WRONLY) }.into())?;
        // SAFETY: the text is valid for its length.
        check(unsafe { libc::write(file as i32, text.bytes.as_ptr().cast(), text.len) } as i64)?;
        call(libc::SYS_close, file as u64, 0, 0)?;
    }
    // An empty root. Guests cannot make calls that name files, and this is the second barrier.
    let none = c"none".as_ptr();
    let tmp = c"/tmp".as_ptr();
    let dot = c".".as_ptr();
    // SAFETY: as above.
    unsafe {
        check(
            libc::mount(
                none,
                c"/".as_ptr(),
                std::ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                std::ptr::null(),
            )
            .into(),
        )?;
        let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
        check(libc::mount(none, tmp, c"tmpfs".as_ptr(), flags, c"size=4k,mode=0".as_ptr().cast()).into())?;
        check(libc::chdir(tmp).into())?;
        check(libc::syscall(libc::SYS_pivot_root, dot, dot))?;
        check(libc::umount2(dot, libc::MNT_DETACH).into())?;
        check(libc::chdir(c"/".as_ptr()).into())?;
    }
    call(libc::SYS_prctl, libc::PR_SET_DUMPABLE as u64, 0, 0)?;
    Ok(next_pid_file as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pids_are_chosen_and_no_process_remains() {
        let sandbox = Sandbox::create(1000, 1000, [5_000_000_000, 0]).unwrap();
        let helper = sandbox.helper();
        let guest = sandbox.fork(4711).unwrap();
        assert_eq!(tern_tracee::procfs::status(guest.pid()).unwrap().own_pid, 4711);
        assert_eq!(tern_tracee::procfs::status(guest.pid()).unwrap().uid, [1000; 4]);
        assert!(
            fs::read_dir(format!("/proc/{}/root/", guest.pid())).unwrap().next().is_none(),
            "nothing is mounted"
        );
        for (taken_or_too_large, why) in [(4711, "taken"), (i32::MAX, "too large")] {
            let refused = sandbox.fork(taken_or_too_large).unwrap_err().to_string();
            assert!(refused.starts_with("pid: "), "{why}: {refused}");
        }
        let pid = guest.pid();
        drop(sandbox);
        let gone = |pid| {
            !std::path::Path::new(&format!("/proc/{pid}/ns")).exists()
                || fs::read_link(format!("/proc/{pid}/ns/pid")).is_err()
        };
        assert!(gone(helper) && gone(pid));
    }
}
