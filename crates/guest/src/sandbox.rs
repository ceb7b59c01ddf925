//! The namespaces that hold a family's guests, and the helper that is their first process.
//!
//! ```text
//!  shim ──fork──▶ helper: pid 1 of the family's pid namespace; user, mount, network, ipc, uts, cgroup and
//!    │              │     time namespaces of its own; nothing mounted; identity of the moved user
//!    │ptrace        └─fork─▶ guest (its pid chosen through ns_last_pid)
//!    └─socket: orders of five bytes, answers of one
//! ```
//! The helper is traced with EXITKILL: when the shim dies it dies, and with the first process of a pid
//! namespace everybody in it. It holds a second descriptor of every listener, so that until then no
//! trapped call falls through with ENOSYS.

#![allow(unsafe_code, reason = "namespaces and the helper's bare system calls")]

use std::fmt::Write;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use tern_image::Unmovable;
use tern_tracee::stop::{self, Change, EXIT_KILL, FOLLOW, Stop, Stopped};

/// The identity of guests whose user is root at home: nobody.
const NOBODY: u32 = 65534;

/// A family's namespaces.
#[derive(Debug)]
pub struct Sandbox {
    helper: i32,
    orders: OwnedFd,
}

/// Order: the next process to be forked in the namespace gets this pid.
const LAST_PID: u8 = b'l';
/// Order: fork a process with this pid.
const FORK: u8 = b'f';
/// Order: keep the descriptor that comes with it.
const KEEP: u8 = b'k';

impl Sandbox {
    /// Makes the namespaces. Guests will see the monotonic and boot clocks shifted by these nanoseconds.
    ///
    /// # Errors
    /// If a namespace cannot be made here; nothing is left.
    pub fn make(uid: u32, gid: u32, clock_shift: [i64; 2]) -> io::Result<Self> {
        let (ours, theirs) = socket_pair()?;
        let namespaces = libc::CLONE_NEWUSER
            | libc::CLONE_NEWPID
            | libc::CLONE_NEWNS
            | libc::CLONE_NEWNET
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUTS
            | libc::CLONE_NEWCGROUP;
        // SAFETY: as fork(2). Other threads may hold locks, the allocator's among them, which the child would find
        // locked for ever: it runs only `help`, which takes none and allocates nothing.
        let helper = unsafe { libc::syscall(libc::SYS_clone, namespaces | libc::SIGCHLD, 0, 0, 0, 0) } as i32;
        if helper < 0 {
            return Err(io::Error::last_os_error());
        }
        if helper == 0 {
            drop(ours);
            help(theirs.as_raw_fd(), clock_shift);
        }
        drop(theirs);
        let sandbox = Self { helper, orders: ours };
        // From here on a failure drops `sandbox`, which kills the helper.
        // It is born with the short turns of its shim; guests, which it bears, have those of all who compute.
        let _refused = tern_tracee::turn::set(helper, None);
        let root = uid == 0;
        let (uid, gid) = if root { (NOBODY, NOBODY) } else { (uid, gid) };
        let write = |what: &str, text: String| fs::write(format!("/proc/{helper}/{what}"), text);
        let _not_everywhere = write("setgroups", "deny".into());
        write("uid_map", format!("0 {uid} 1\n"))?;
        write("gid_map", format!("0 {gid} 1\n"))?;
        stop::seize(helper, FOLLOW | EXIT_KILL).map_err(io::Error::other)?;
        sandbox.order(KEEP, 0)?;
        Ok(sandbox)
    }

    /// The helper's pid here.
    #[must_use]
    pub fn helper(&self) -> i32 {
        self.helper
    }

    /// Has the helper carry an order out. Its ptrace stops are answered meanwhile; a child that it forks is
    /// returned, stopped before its first instruction.
    fn order_and_wait(&self, order: u8, pid: i32) -> io::Result<Option<Stopped>> {
        let mut bytes = [order, 0, 0, 0, 0];
        bytes[1..].copy_from_slice(&pid.to_le_bytes());
        rustix::io::write(&self.orders, &bytes)?;
        let mut child = None;
        loop {
            // Both its answer and its stops can come first.
            let mut poll = libc::pollfd { fd: self.orders.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            let answered = child.is_none() && order == FORK;
            // SAFETY: one valid pollfd.
            unsafe { libc::poll(&raw mut poll, 1, if answered { 0 } else { 1 }) };
            match stop::wait(self.helper, false).map_err(io::Error::other)? {
                Some((_, Change::Stopped(stopped))) => {
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
            // It answers only after its fork, whose stop has been seen above, or without one if it could not.
            if poll.revents & (libc::POLLIN | libc::POLLHUP) == 0 {
                continue;
            }
            let mut answer = [0];
            rustix::io::read(&self.orders, &mut answer)?;
            return match answer {
                [0] => Ok(child),
                [errno] => Err(io::Error::from_raw_os_error(i32::from(errno))),
            };
        }
    }

    fn order(&self, order: u8, pid: i32) -> io::Result<()> {
        self.order_and_wait(order, pid).map(drop)
    }

    /// Makes a process with this pid in the namespace. It is stopped, traced, and a copy of this program.
    ///
    /// # Errors
    /// If the pid is in use there, or beyond what the namespace gives.
    pub fn fork(&self, pid: i32) -> io::Result<Stopped> {
        let not_given = || io::Error::other(Unmovable::Pid(pid));
        let child = self.order_and_wait(FORK, pid).map_err(|error| match error.kind() {
            // What the kernel says to a number beyond its largest.
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

    /// Lets the next process forked in the namespace have this pid.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn next_pid(&self, pid: i32) -> io::Result<()> {
        self.order(LAST_PID, pid)
    }

    /// Has the helper hold a copy of a descriptor.
    ///
    /// # Errors
    /// If it cannot be passed.
    pub fn keep(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
        let fds = [fd];
        control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds));
        let order = [KEEP, 0, 0, 0, 0];
        let parts = [io::IoSlice::new(&order)];
        rustix::net::sendmsg(&self.orders, &parts, &mut control, rustix::net::SendFlags::empty())?;
        let mut answer = [0];
        rustix::io::read(&self.orders, &mut answer)?;
        Ok(())
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        tern_tracee::pidfd::kill(self.helper);
        // Its end is the end of all guests: wait for it, so that nothing is left when we are gone. It cannot end
        // before every guest's end has been taken note of, which is up to us as well, their tracer.
        loop {
            match stop::wait(-1, true) {
                Ok(Some((pid, Change::Exited(_) | Change::Killed(..)))) if pid == self.helper => break,
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

/// The helper's whole life. Only plain system calls from here on: no allocation, and nothing that takes a lock.
fn help(orders: i32, clock_shift: [i64; 2]) -> ! {
    let mut last_pid = -1;
    let mut ready = false;
    // Nothing of the shim's is ours: its links must be closed when it is gone.
    // SAFETY: closes descriptors that only the shim's copy of this code would use.
    unsafe {
        libc::syscall(libc::SYS_close_range, 0, orders - 1, 0);
        libc::syscall(libc::SYS_close_range, orders + 1, u32::MAX, 0);
    }
    loop {
        let mut order = [0u8; 5];
        // SAFETY: the buffer is valid; a descriptor that comes along is kept open on purpose.
        let got = unsafe { receive(orders, &mut order) };
        if got != 5 {
            // The shim is gone.
            // SAFETY: ends this process, and with it the namespace.
            unsafe { libc::_exit(0) };
        }
        let answer = if ready {
            obey(order, last_pid)
        } else {
            // The first order comes when the identity maps are written.
            ready = true;
            match settle(clock_shift) {
                Ok(fd) => {
                    last_pid = fd;
                    0
                }
                Err(code) => code,
            }
        };
        // SAFETY: one byte from a valid place.
        unsafe { libc::send(orders, (&raw const answer).cast(), 1, libc::MSG_NOSIGNAL) };
    }
}

/// # Safety
/// `orders` is a socket.
unsafe fn receive(orders: i32, order: &mut [u8; 5]) -> isize {
    let mut control = [0u64; 4];
    let mut part = libc::iovec { iov_base: order.as_mut_ptr().cast(), iov_len: 5 };
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    loop {
        // SAFETY: all the pointers in `message` are to places above.
        let got = unsafe { libc::recvmsg(orders, &raw mut message, libc::MSG_CMSG_CLOEXEC) };
        if got >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return got;
        }
    }
}

fn obey(order: [u8; 5], last_pid: i32) -> u8 {
    let [what, p0, p1, p2, p3] = order;
    let pid = i32::from_le_bytes([p0, p1, p2, p3]);
    if what == KEEP {
        return 0;
    }
    let text = Text::of(format_args!("{}", pid.wrapping_sub(1)));
    // SAFETY: the text is valid for its length; sysctl files are written as a whole at offset 0.
    if unsafe { libc::pwrite(last_pid, text.bytes.as_ptr().cast(), text.len, 0) } < 0 {
        return errno();
    }
    if what == LAST_PID {
        return 0;
    }
    // SAFETY: a plain fork of a process with one thread. The child is stopped before its first instruction
    // here, and never gets to it: it becomes a guest.
    match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
        0 => loop {
            // SAFETY: sleeps.
            unsafe { libc::pause() };
        },
        child if child < 0 => errno(),
        _ => 0,
    }
}

/// Settles in the namespaces; returns the descriptor by which pids are chosen.
fn settle(clock_shift: [i64; 2]) -> Result<i32, u8> {
    let check = |ret: i64| if ret < 0 { Err(errno()) } else { Ok(ret) };
    let call = |nr, a: u64, b: u64, c: u64| {
        // SAFETY: system calls with integers only.
        check(unsafe { libc::syscall(nr, a, b, c) })
    };
    call(libc::SYS_setresgid, 0, 0, 0)?;
    call(libc::SYS_setresuid, 0, 0, 0)?;
    call(libc::SYS_prctl, libc::PR_SET_PDEATHSIG as u64, libc::SIGKILL as u64, 0)?;
    // Changing the user has closed our own /proc to us; it is closed again below, to that user's other processes.
    call(libc::SYS_prctl, libc::PR_SET_DUMPABLE as u64, 1, 0)?;
    // SAFETY: integers.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    // SAFETY: as above.
    let last_pid = check(
        unsafe { libc::open(c"/proc/sys/kernel/ns_last_pid".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) }
            .into(),
    )?;
    if call(libc::SYS_unshare, libc::CLONE_NEWTIME as u64, 0, 0).is_ok() {
        let [monotonic, boot] =
            clock_shift.map(|ns| (ns.div_euclid(1_000_000_000), ns.rem_euclid(1_000_000_000)));
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
    // An empty root: guests have no way to name a file, and this makes sure of it.
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
    Ok(last_pid as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pids_are_chosen_and_nothing_is_left() {
        let sandbox = Sandbox::make(1000, 1000, [5_000_000_000, 0]).unwrap();
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
