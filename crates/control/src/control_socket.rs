//! The control socket of a shim or other helper daemon, on which the node's daemon and the shims
//! send it requests. The owner's main loop also waits for its other descriptors with
//! [`ControlSocket::wait`].
//!
//! Only root and the user who runs the node may connect. The kernel's peer credentials decide.

use crate::report::{Refusal, RefusalKind};
use crate::shim::{ShimReply, ShimRequest};
use crate::stream;
use rustix::event::{PollFd, PollFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};
use std::cell::{Cell, RefCell};
use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tern_ids::ShimId;

/// Time limit for a caller to send the rest of a request that has begun to arrive, and for the reply
/// to be written.
const CALLER_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit for a connected caller to begin its request. On a busy machine a caller may get no
/// CPU for seconds. Other callers do not wait for it meanwhile.
const SILENT_CALLER_TIMEOUT: Duration = Duration::from_secs(60);

/// A listening control socket. Dropping it removes the socket file, and refuses the requests of
/// callers that have connected but were not accepted, with [`not_held`].
#[derive(Debug)]
pub struct ControlSocket {
    listener: UnixListener,
    path: PathBuf,
    /// A signalfd that is readable after changes of children and tracees, if they are watched.
    children: Option<OwnedFd>,
    /// Whether the last wait found a caller that connects or has sent something, and whether it
    /// found a change of a child.
    ready: Cell<(bool, bool)>,
    /// Callers that have connected and not sent a request yet, and when they were accepted.
    silent: RefCell<Vec<(Instant, UnixStream)>>,
}

impl ControlSocket {
    /// Listens at `RUN/shims/ID.sock`, and watches children and tracees through a signalfd, for
    /// which SIGCHLD is blocked in this thread.
    ///
    /// # Errors
    /// If the socket cannot be created.
    pub fn open_for_shim(run_dir: &Path, id: ShimId) -> io::Result<Self> {
        let dir = run_dir.join("shims");
        fs::create_dir_all(&dir)?;
        let mut socket = Self::bind(dir.join(format!("{id}.sock")))?;
        socket.children = Some(watch_children()?);
        Ok(socket)
    }

    /// Listens at `path`, without watching children.
    ///
    /// # Errors
    /// If the socket cannot be created.
    pub fn bind(path: PathBuf) -> io::Result<Self> {
        let listener = UnixListener::bind(&path)?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            path,
            children: None,
            ready: Cell::new((true, true)),
            silent: RefCell::default(),
        })
    }

    /// Consumes the pending child event, so that [`wait`](Self::wait) sleeps until the next one.
    /// Call this before examining the children, so that no change is missed in between.
    ///
    /// # Errors
    /// `EAGAIN` if no event was pending; it can be ignored.
    pub fn clear_child_event(&self) -> io::Result<()> {
        let mut info = [0u8; 128];
        if let Some(children) = &self.children {
            rustix::io::read(children, &mut info)?;
        }
        Ok(())
    }

    /// Whether the last [`wait`](Self::wait) found a change of a child or tracee.
    #[must_use]
    pub fn has_child_event(&self) -> bool {
        self.ready.get().1
    }

    /// Waits until a caller connects, a child changes, one of `others` is ready, or the time is
    /// over. Returns which of `others` are ready.
    ///
    /// # Errors
    /// None in practice. If a signal interrupts the wait, everything counts as ready.
    pub fn wait(&self, others: &[(BorrowedFd<'_>, i16)], timeout: Duration) -> io::Result<Vec<bool>> {
        let flags = |events: i16| PollFlags::from_bits_truncate(events.cast_unsigned());
        let mut silent = self.silent.take();
        silent.retain(|(since, _)| since.elapsed() < SILENT_CALLER_TIMEOUT);
        let mut all = vec![PollFd::new(&self.listener, PollFlags::IN)];
        all.extend(silent.iter().map(|(_, caller)| PollFd::new(caller, PollFlags::IN)));
        let callers = all.len();
        all.extend(others.iter().map(|(fd, events)| PollFd::new(fd, flags(*events))));
        all.extend(self.children.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let time = rustix::time::Timespec {
            tv_sec: timeout.as_secs().cast_signed(),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let polled = rustix::event::poll(&mut all, Some(&time));
        let ready: Vec<bool> = all.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(all);
        self.silent.replace(silent);
        match polled {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => {
                self.ready.set((true, true));
                return Ok(vec![true; others.len()]);
            }
            Err(error) => return Err(error.into()),
        }
        let (callers, rest) = ready.split_at(callers);
        let (others, children) = rest.split_at(others.len());
        self.ready.set((callers.contains(&true), children.contains(&true)));
        Ok(others.to_vec())
    }

    /// Accepts all callers that have connected, and returns the next request that has arrived.
    pub fn accept(&self) -> Option<PendingRequest> {
        if !self.ready.get().0 {
            return None;
        }
        let mut silent = self.accept_all();
        let request = loop {
            let arrived = silent.iter().position(|(_, caller)| is_readable(caller));
            let Some(caller) = arrived.map(|at| silent.remove(at).1) else { break None };
            // If a request is malformed, or its caller has ended, the next caller is tried.
            if let Ok(request) = PendingRequest::receive(caller) {
                break Some(request);
            }
        };
        self.silent.replace(silent);
        request
    }

    /// Accepts all callers that have connected. Returns those whose request is not read yet.
    fn accept_all(&self) -> Vec<(Instant, UnixStream)> {
        let mut silent = self.silent.take();
        while let Ok((caller, _)) = self.listener.accept() {
            silent.push((Instant::now(), caller));
        }
        silent
    }
}

impl AsFd for ControlSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        let _gone = fs::remove_file(&self.path);
        for (_, caller) in self.accept_all() {
            if let Ok(late) = PendingRequest::receive(caller) {
                late.reply(&not_held());
            }
        }
    }
}

/// A received request, and the connection for its reply.
#[derive(Debug)]
pub struct PendingRequest {
    stream: UnixStream,
    request: ShimRequest,
}

impl PendingRequest {
    fn receive(mut stream: UnixStream) -> io::Result<Self> {
        let peer = rustix::net::sockopt::socket_peercred(&stream)?;
        if peer.uid != rustix::process::geteuid() && !peer.uid.is_root() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(CALLER_TIMEOUT))?;
        stream.set_write_timeout(Some(CALLER_TIMEOUT))?;
        let request = stream::read(&mut stream)?;
        Ok(Self { stream, request })
    }

    /// The request.
    #[must_use]
    pub fn request(&self) -> &ShimRequest {
        &self.request
    }

    /// Sends the reply. A caller that has disconnected is ignored.
    pub fn reply(mut self, reply: &ShimReply) {
        let _gone = stream::write(&mut self.stream, reply);
    }

    /// Whether the caller has disconnected without waiting for the reply.
    #[must_use]
    pub fn has_disconnected(&self) -> bool {
        is_closed(&self.stream)
    }

    /// Receives the connection that comes with [`ShimRequest::Connection`], and acknowledges it.
    pub fn receive_connection(self) -> Option<TcpStream> {
        let fd = receive_fd(&self.stream).ok()?;
        self.reply(&ShimReply::Done);
        Some(TcpStream::from(fd))
    }

    /// Receives the descriptor that comes with a request.
    ///
    /// # Errors
    /// Those of the socket, or if no descriptor arrives in time.
    pub fn receive_descriptor(&self) -> io::Result<OwnedFd> {
        receive_fd(&self.stream)
    }

    /// Sends the reply. The returned stream becomes readable when the caller closes its end.
    ///
    /// # Errors
    /// If the caller has disconnected.
    pub fn reply_and_keep(mut self, reply: &ShimReply) -> io::Result<UnixStream> {
        stream::write(&mut self.stream, reply)?;
        Ok(self.stream)
    }

    /// Replies with a descriptor. The returned stream becomes readable when the caller closes its
    /// end.
    ///
    /// # Errors
    /// If the caller has disconnected. It has not received the descriptor then.
    pub fn reply_with_fd(mut self, fd: BorrowedFd<'_>) -> io::Result<UnixStream> {
        stream::write(&mut self.stream, &ShimReply::Done)?;
        send_fd(&self.stream, fd)?;
        Ok(self.stream)
    }
}

/// Whether the peer has closed its end of the connection.
#[must_use]
pub fn is_closed(stream: &UnixStream) -> bool {
    has_event(stream, PollFlags::RDHUP)
}

/// Whether the peer has sent something, or closed its end.
fn is_readable(stream: &UnixStream) -> bool {
    has_event(stream, PollFlags::IN)
}

fn has_event(stream: &UnixStream, event: PollFlags) -> bool {
    let mut fds = [PollFd::new(stream, event)];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Connects to a control socket without blocking, so that a hung server cannot block the caller.
///
/// # Errors
/// If no process listens, or its backlog is full.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let socket = UnixStream::from(socket);
    socket.set_nonblocking(false)?;
    Ok(socket)
}

/// Requests a descriptor, which the server sends with [`PendingRequest::reply_with_fd`]. Returns
/// the descriptor and the connection. Each end closes the connection when it releases the
/// descriptor, which the other end notices.
///
/// # Errors
/// Those of the socket, the refusal's message, or a timeout.
pub fn request_fd(
    path: &Path,
    request: &ShimRequest,
    timeout: Duration,
) -> io::Result<(OwnedFd, UnixStream)> {
    let mut socket = connect(path)?;
    socket.set_read_timeout(Some(timeout))?;
    socket.set_write_timeout(Some(timeout))?;
    stream::write(&mut socket, request)?;
    match stream::read(&mut socket)? {
        ShimReply::Done => Ok((receive_fd(&socket)?, socket)),
        ShimReply::Refused(refusal) => Err(io::Error::other(refusal.message)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Sends a request with a descriptor, and does not wait for the reply. The caller may read it from
/// the returned stream, which it closes to end what it requested.
///
/// # Errors
/// If no process listens, or its queue of requests is full.
pub fn send_request_with_fd(
    path: &Path,
    request: &ShimRequest,
    fd: BorrowedFd<'_>,
    timeout: Duration,
) -> io::Result<UnixStream> {
    let mut socket = connect(path)?;
    // The request and the descriptor fit into an empty socket buffer.
    socket.set_write_timeout(Some(timeout))?;
    socket.set_read_timeout(Some(timeout))?;
    stream::write(&mut socket, request)?;
    send_fd(&socket, fd)?;
    Ok(socket)
}

/// As [`send_request_with_fd`], and waits until the request is done.
///
/// # Errors
/// As [`send_request_with_fd`], the refusal's message, or a timeout.
pub fn request_with_fd(
    path: &Path,
    request: &ShimRequest,
    fd: BorrowedFd<'_>,
    timeout: Duration,
) -> io::Result<()> {
    let mut socket = send_request_with_fd(path, request, fd, timeout)?;
    match stream::read(&mut socket)? {
        ShimReply::Done => Ok(()),
        ShimReply::Refused(refusal) => Err(io::Error::other(refusal.message)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Sends a descriptor, with one byte of data.
///
/// # Errors
/// Those of the socket.
pub fn send_fd(socket: &UnixStream, fd: BorrowedFd<'_>) -> io::Result<()> {
    let descriptors = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::Error::other("no space for a descriptor"));
    }
    sendmsg(socket, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a descriptor.
///
/// # Errors
/// Those of the socket; `UnexpectedEof` if the message carried no descriptor.
pub fn receive_fd(socket: &UnixStream) -> io::Result<OwnedFd> {
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

/// The refusal of a request about something that this shim does not hold.
#[must_use]
pub fn not_held() -> ShimReply {
    ShimReply::Refused(Refusal::new(RefusalKind::NotFound, "this shim does not hold it"))
}

#[allow(unsafe_code, reason = "signalfd has no safe wrapper here")]
fn watch_children() -> io::Result<OwnedFd> {
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
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    debug_assert!(fd.as_raw_fd() >= 0);
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::HomePid;

    /// Signals this thread only. Another test thread would receive a real SIGCHLD.
    #[allow(unsafe_code, reason = "nothing safe signals a thread")]
    fn raise_sigchld() {
        let (process, thread) = (std::process::id(), rustix::thread::gettid().as_raw_nonzero().get());
        // SAFETY: no pointers are passed, and the default action of SIGCHLD is to be ignored.
        let sent = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGCHLD) };
        assert_eq!(sent, 0);
    }

    #[test]
    fn only_the_shim_socket_reports_child_events() {
        let dir = std::env::temp_dir().join(format!("tern-door-children-{}", std::process::id()));
        let socket = ControlSocket::open_for_shim(&dir, ShimId([8; 16])).unwrap();
        let other = ControlSocket::bind(dir.join("other")).unwrap();
        raise_sigchld();
        // `other` has no signalfd that could stay readable for ever.
        assert!(other.wait(&[], Duration::ZERO).unwrap().is_empty() && !other.has_child_event());
        assert!(socket.wait(&[], Duration::ZERO).unwrap().is_empty() && socket.has_child_event());
        socket.clear_child_event().unwrap();
        assert!(socket.wait(&[], Duration::ZERO).unwrap().is_empty() && !socket.has_child_event());
        drop((socket, other));
        fs::remove_dir_all(dir).unwrap();
    }

    /// On a busy machine a caller may get no CPU between connecting and sending its request.
    #[test]
    fn silent_caller_delays_no_other_and_is_not_refused() {
        let dir = std::env::temp_dir().join(format!("tern-door-silent-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("socket");
        let socket = ControlSocket::bind(path.clone()).unwrap();
        let mut callers = [0, 1].map(|_| UnixStream::connect(&path).unwrap());
        let next = || {
            socket.wait(&[], Duration::from_secs(60)).unwrap();
            match socket.accept()?.request() {
                ShimRequest::Owns { pid } => Some(pid.0),
                _ => None,
            }
        };
        assert_eq!(next(), None);
        // The one that connected last sends its request first.
        for (pid, caller) in (0..2).zip(&mut callers).rev() {
            stream::write(caller, &ShimRequest::Owns { pid: HomePid(pid) }).unwrap();
            assert_eq!(next(), Some(pid));
        }
        drop(callers);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn unaccepted_caller_is_refused_on_drop() {
        let dir = std::env::temp_dir().join(format!("tern-door-{}", std::process::id()));
        let id = ShimId([7; 16]);
        let socket = ControlSocket::open_for_shim(&dir, id).unwrap();
        let path = dir.join(format!("shims/{id}.sock"));
        let mut caller = UnixStream::connect(&path).unwrap();
        stream::write(&mut caller, &ShimRequest::Owns { pid: HomePid(1) }).unwrap();
        drop(socket);
        let reply: ShimReply = stream::read(&mut caller).unwrap();
        assert!(matches!(reply, ShimReply::Refused(refusal) if refusal.kind == RefusalKind::NotFound));
        assert!(!path.exists());
        fs::remove_dir_all(dir).unwrap();
    }
}
