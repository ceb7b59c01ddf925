//! A shim's door: the socket on which its node's daemon speaks to it, and the wait for everything else.
//!
//! Only the user who runs the node is let in; who that is, the kernel says.

use crate::report::{Refusal, RefusalKind};
use crate::shim::{ShimReply, ShimRequest};
use crate::stream;
use rustix::event::{PollFd, PollFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};
use std::cell::Cell;
use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tern_ids::ShimId;

/// How long the daemon may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(1);

/// A shim's door. The socket file is removed with it; who has come before that, and has not been let in, is told that nothing is
/// held here.
#[derive(Debug)]
pub struct Door {
    listener: UnixListener,
    path: PathBuf,
    /// Shows changes of children and tracees, if somebody looks after them.
    children: Option<OwnedFd>,
    /// Whether the last wait showed a caller, and a change of a child.
    ready: Cell<(bool, bool)>,
}

impl Door {
    /// Opens `RUN/shims/ID.sock`, and has changes of children and tracees of this thread shown by a descriptor
    /// (SIGCHLD is blocked for it).
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn open(run_dir: &Path, id: ShimId) -> io::Result<Self> {
        let dir = run_dir.join("shims");
        fs::create_dir_all(&dir)?;
        let mut door = Self::at(dir.join(format!("{id}.sock")))?;
        door.children = Some(children()?);
        Ok(door)
    }

    /// Opens a door at a path of its own, that shows no changes of children.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn at(path: PathBuf) -> io::Result<Self> {
        let listener = UnixListener::bind(&path)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, path, children: None, ready: Cell::new((true, true)) })
    }

    /// Has [`wait`](Self::wait) rest until the next change of a child. To be called before the changes are
    /// looked at, so that none falls between.
    ///
    /// # Errors
    /// None that matter; there was nothing then.
    pub fn clear_children(&self) -> io::Result<()> {
        let mut info = [0u8; 128];
        if let Some(children) = &self.children {
            rustix::io::read(children, &mut info)?;
        }
        Ok(())
    }

    /// Whether a child or tracee has changed before the last [`wait`](Self::wait) ended.
    #[must_use]
    pub fn has_changes(&self) -> bool {
        self.ready.get().1
    }

    /// Waits until somebody comes, a child changes, one of these is ready, or the time is over.
    ///
    /// # Errors
    /// None in practice; being interrupted counts as ready.
    pub fn wait(&self, others: &[(BorrowedFd<'_>, i16)], most: Duration) -> io::Result<Vec<bool>> {
        let flags = |events: i16| PollFlags::from_bits_truncate(events.cast_unsigned());
        let mut all = vec![PollFd::new(&self.listener, PollFlags::IN)];
        all.extend(others.iter().map(|(fd, events)| PollFd::new(fd, flags(*events))));
        all.extend(self.children.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let time = rustix::time::Timespec {
            tv_sec: most.as_secs().cast_signed(),
            tv_nsec: i64::from(most.subsec_nanos()),
        };
        match rustix::event::poll(&mut all, Some(&time)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => {
                self.ready.set((true, true));
                return Ok(vec![true; others.len()]);
            }
            Err(error) => return Err(error.into()),
        }
        let mut ready = all.iter().map(|fd| !fd.revents().is_empty());
        let came = ready.next().unwrap_or(false);
        let others = ready.by_ref().take(others.len()).collect();
        self.ready.set((came, ready.next().unwrap_or(false)));
        Ok(others)
    }

    /// The next who has come with a request, if somebody has.
    pub fn next(&self) -> Option<Caller> {
        if !self.ready.get().0 {
            return None;
        }
        loop {
            let (stream, _) = self.listener.accept().ok()?;
            match Caller::hear(stream) {
                Ok(caller) => return Some(caller),
                // Whoever it was has not spoken properly; the next one may.
                Err(_) => continue,
            }
        }
    }
}

impl AsFd for Door {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        let _gone = fs::remove_file(&self.path);
        self.ready.set((true, false));
        while let Some(late) = self.next() {
            late.answer(&not_here());
        }
    }
}

/// One request and the way to answer it.
#[derive(Debug)]
pub struct Caller {
    stream: UnixStream,
    request: ShimRequest,
}

impl Caller {
    fn hear(mut stream: UnixStream) -> io::Result<Self> {
        let peer = rustix::net::sockopt::socket_peercred(&stream)?;
        if peer.uid != rustix::process::geteuid() && !peer.uid.is_root() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let request = stream::read(&mut stream)?;
        Ok(Self { stream, request })
    }

    /// What is asked.
    #[must_use]
    pub fn request(&self) -> &ShimRequest {
        &self.request
    }

    /// Answers; a caller who has gone away is no concern of ours.
    pub fn answer(mut self, reply: &ShimReply) {
        let _gone = stream::write(&mut self.stream, reply);
    }

    /// Whether the caller has gone away without waiting for the answer.
    #[must_use]
    pub fn has_left(&self) -> bool {
        has_closed(&self.stream)
    }

    /// Takes the connection that comes with [`ShimRequest::Connection`], and acknowledges it.
    pub fn connection(self) -> Option<TcpStream> {
        let fd = receive(&self.stream).ok()?;
        self.answer(&ShimReply::Done);
        Some(TcpStream::from(fd))
    }

    /// Answers with a descriptor. What comes back is readable when the caller has closed his end.
    ///
    /// # Errors
    /// If he has gone; he has not got it then.
    pub fn give(mut self, fd: BorrowedFd<'_>) -> io::Result<UnixStream> {
        stream::write(&mut self.stream, &ShimReply::Done)?;
        pass(&self.stream, fd)?;
        Ok(self.stream)
    }
}

/// Whether the other end of a connection through a door has been closed.
#[must_use]
pub fn has_closed(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Connects to a door without waiting: who hangs behind it must not hang us.
///
/// # Errors
/// If nobody listens, or too many have come already.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let socket = UnixStream::from(socket);
    socket.set_nonblocking(false)?;
    Ok(socket)
}

/// Asks for a descriptor behind a door, which [`Caller::give`] gives; with it comes the connection, by which each end sees when the
/// other lets go of it.
///
/// # Errors
/// Those of the socket, the refusal's own sentence, or that nothing is said within this time.
pub fn ask_for(path: &Path, request: &ShimRequest, within: Duration) -> io::Result<(OwnedFd, UnixStream)> {
    let mut socket = connect(path)?;
    socket.set_read_timeout(Some(within))?;
    socket.set_write_timeout(Some(within))?;
    stream::write(&mut socket, request)?;
    match stream::read(&mut socket)? {
        ShimReply::Done => Ok((receive(&socket)?, socket)),
        ShimReply::Refused(refusal) => Err(io::Error::other(refusal.message)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Sends a descriptor, with a byte of data.
///
/// # Errors
/// Those of the socket.
pub fn pass(socket: &UnixStream, fd: BorrowedFd<'_>) -> io::Result<()> {
    let descriptors = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::Error::other("no room for a descriptor"));
    }
    sendmsg(socket, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a descriptor.
///
/// # Errors
/// Those of the socket, or that there was none.
pub fn receive(socket: &UnixStream) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = control.drain().filter_map(|m| match m {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    fds.next().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// The answer to what is not ours.
#[must_use]
pub fn not_here() -> ShimReply {
    ShimReply::Refused(Refusal::new(RefusalKind::NotFound, "this shim does not hold it"))
}

#[allow(unsafe_code, reason = "signalfd has no safe wrapper here")]
fn children() -> io::Result<OwnedFd> {
    // SAFETY: all-zero is a valid set, and is filled by the next call anyway.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is valid.
    unsafe { libc::sigemptyset(&raw mut set) };
    // SAFETY: `set` is valid.
    unsafe { libc::sigaddset(&raw mut set, libc::SIGCHLD) };
    // SAFETY: `set` is valid; the old mask is not asked for.
    if unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `set` is valid.
    let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    debug_assert!(fd.as_raw_fd() >= 0);
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::HomePid;

    /// To this thread alone: other threads of a test would take a real one's.
    #[allow(unsafe_code, reason = "nothing safe signals a thread")]
    fn a_child_has_changed() {
        let (process, thread) = (std::process::id(), rustix::thread::gettid().as_raw_nonzero().get());
        // SAFETY: it has no pointers, and SIGCHLD ends nobody.
        let sent = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGCHLD) };
        assert_eq!(sent, 0);
    }

    #[test]
    fn only_who_looks_after_children_is_woken_by_them() {
        let place = std::env::temp_dir().join(format!("tern-door-children-{}", std::process::id()));
        let door = Door::open(&place, ShimId([8; 16])).unwrap();
        let other = Door::at(place.join("other")).unwrap();
        a_child_has_changed();
        // As who never clears it would be for ever after.
        assert!(other.wait(&[], Duration::ZERO).unwrap().is_empty() && !other.has_changes());
        assert!(door.wait(&[], Duration::ZERO).unwrap().is_empty() && door.has_changes());
        door.clear_children().unwrap();
        assert!(door.wait(&[], Duration::ZERO).unwrap().is_empty() && !door.has_changes());
        drop((door, other));
        fs::remove_dir_all(place).unwrap();
    }

    #[test]
    fn who_comes_too_late_is_told_so() {
        let place = std::env::temp_dir().join(format!("tern-door-{}", std::process::id()));
        let id = ShimId([7; 16]);
        let door = Door::open(&place, id).unwrap();
        let path = place.join(format!("shims/{id}.sock"));
        let mut caller = UnixStream::connect(&path).unwrap();
        stream::write(&mut caller, &ShimRequest::Owns { pid: HomePid(1) }).unwrap();
        drop(door);
        let said: ShimReply = stream::read(&mut caller).unwrap();
        assert!(matches!(said, ShimReply::Refused(refusal) if refusal.kind == RefusalKind::NotFound));
        assert!(!path.exists());
        fs::remove_dir_all(place).unwrap();
    }
}
