//! Files of this node that are opened for its guests. If a guest's home has a file of the guest's
//! own node open, the guest gets a descriptor of that file, and does not access it through its home
//! and MFS (docs/design/delegation.md).
//!
//! The guest's shim requests the descriptor over the server's control socket. The same rules hold
//! as for the guest's home: the user must be allowed to look up each component of the path. The
//! file counts as open, in a session for this node's guests, until the shim closes its socket; so
//! other nodes get no leases of a file that is open for writing.

use super::impersonate::Impersonation;
use super::perform::{OpContext, OpError, opens_for_writing};
use super::session::{OpenFile, Session};
use super::{Server, SessionGuard, release};
use crate::lock;
use crate::message::{Attributes, FileReply, Name, Op, OpenId, Purpose, ROOT, Release};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{self, ErrorKind, Read};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tern_control::control_socket;
use tern_control::shim::{ShimReply, ShimRequest};
use tern_control::{Refusal, RefusalKind};

/// ID of the session for this node's guests. The session IDs of mounted trees are random.
const GUEST_SESSION: [u8; 16] = [0; 16];

/// Maximum number of files open for guests; each has a thread.
const MAX_GUEST_FILES: usize = 512;

/// Maximum number of components of a path, since each takes a lookup.
const MAX_PATH_DEPTH: usize = 200;

/// The files that are open for guests.
#[derive(Debug, Default)]
pub(super) struct GuestFiles {
    count: AtomicUsize,
    /// The sockets of the shims that have the files open. Shutting one down makes its shim close
    /// the file.
    sockets: Mutex<HashMap<OpenId, UnixStream>>,
}

impl GuestFiles {
    /// Makes all shims close their files. Their next calls go home, which refuses them.
    pub(super) fn revoke_all(&self) {
        for socket in lock(&self.sockets).values() {
            // The shim may have closed its end already.
            let _closed = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Counts a file that is open for a guest.
struct CountGuard(Arc<Server>);

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.guests.count.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Server {
    /// Opens a file for a guest, in a thread of its own, which ends when the file is released.
    pub(super) fn open_for_guest(self: &Arc<Self>, caller: control_socket::PendingRequest) {
        if self.guests.count.load(Ordering::Acquire) >= MAX_GUEST_FILES {
            return caller.reply(&refusal("too many files are open for guests"));
        }
        self.guests.count.fetch_add(1, Ordering::AcqRel);
        let guard = CountGuard(self.clone());
        let serve = move || guard.0.serve_guest(caller);
        if let Err(error) =
            std::thread::Builder::new().name("guest".into()).stack_size(256 << 10).spawn(serve)
        {
            tracing::warn!(%error, "cannot start a thread for a guest's file");
        }
    }

    fn serve_guest(&self, caller: control_socket::PendingRequest) {
        if matches!(caller.request(), ShimRequest::OpenShared { .. }) {
            return self.serve_shared(caller);
        }
        let session = match self.guest_session() {
            Ok(session) => session,
            Err(error) => return caller.reply(&refusal(&error.to_string())),
        };
        let opened = match self.open_local(&session.0, caller.request()) {
            Ok(opened) => opened,
            Err(error) => return caller.reply(&refusal(&error.to_string())),
        };
        if let Some(file) = session.0.open_file(opened)
            && let Ok(mut socket) = self.send_file(caller, &session.0, &file)
            && let Ok(duplicate) = socket.try_clone()
        {
            lock(&self.guests.sockets).insert(opened, duplicate);
            // `revoke_all` has not seen this file if access was revoked before the insertion.
            if !self.is_exporting.load(Ordering::Acquire) {
                self.guests.revoke_all();
            }
            // Wait until the shim closes the socket, or `revoke_all` shuts it down.
            let _blocking = socket.set_read_timeout(None);
            while socket.read(&mut [0]).map_or_else(|e| e.kind() == ErrorKind::Interrupted, |read| read > 0) {
            }
            lock(&self.guests.sockets).remove(&opened);
        }
        release::release(&session.0, &self.leases, Release::File(opened));
    }

    /// Sends the file to a guest. If the file is open for writing, changes of it are not watched
    /// from now on: no other session gets a lease of the file until this thread closes it. The
    /// guests' session has no callback channel, and so gets no leases itself.
    fn send_file(
        &self,
        caller: control_socket::PendingRequest,
        session: &Session,
        file: &OpenFile,
    ) -> io::Result<UnixStream> {
        if opens_for_writing(file.flags) && !session.has_callback() {
            self.leases.unwatch(&file.fd, file.key);
        }
        caller.reply_with_fd(file.fd.as_fd())
    }

    /// Whether this file has the expected inode number, and is open through a mounted tree. The
    /// guest's home has the expected file open through its tree. If no tree had it open, another
    /// file might have got the number.
    fn is_expected_file(&self, attributes: &Attributes, number: u64) -> bool {
        let is_open = || {
            lock(&self.sessions).iter().any(|((_, id), s)| *id != GUEST_SESSION && s.is_open(attributes.key))
        };
        tern_ids::inode_number::of(self.node, attributes.key.volume, attributes.key.inode) == number
            && is_open()
    }

    fn guest_session(&self) -> Result<SessionGuard, Errno> {
        let mut sessions = lock(&self.sessions);
        let session = match sessions.get(&(self.node, GUEST_SESSION)) {
            Some(session) => session.clone(),
            None => {
                let new = Session::new(&self.export, &self.budget, Purpose::All)?;
                sessions.insert((self.node, GUEST_SESSION), new.clone());
                new
            }
        };
        // Under the lock, so that `expire_sessions` cannot remove the session first.
        Ok(SessionGuard::new(session))
    }

    fn open_local(&self, session: &Arc<Session>, request: &ShimRequest) -> Result<OpenId, Errno> {
        let ShimRequest::OpenFile { path, number, credentials, flags } = request else {
            return Err(Errno::INVAL);
        };
        if !self.config.file.mfs.unwrap_or(true) || !self.is_exporting.load(Ordering::Acquire) {
            return Err(Errno::ACCESS);
        }
        let mut impersonation = Impersonation::new();
        impersonation.assume(&self.map_credentials(credentials.clone()))?;
        let context = OpContext { session, export: &self.export, leases: &self.leases };
        let perform = |op| match context.perform(&[], op, &[], &mut Vec::new()) {
            Ok(reply) => Ok(reply),
            Err(OpError::Errno(errno)) => Err(errno),
            Err(OpError::Forgotten) => Err(Errno::STALE),
        };
        let names: Vec<Name> =
            path.split(|byte| *byte == b'/').map(|n| OsStr::from_bytes(n).into()).collect();
        if names.len() > MAX_PATH_DEPTH {
            return Err(Errno::NAMETOOLONG);
        }
        let (mut at, mut is_expected) = (ROOT, false);
        for name in names {
            let found = perform(Op::Lookup { dir: at, name });
            session.forget(at, u64::from(at != ROOT));
            let FileReply::Found(found, _) = found? else { return Err(Errno::IO) };
            (at, is_expected) = (found.object, self.is_expected_file(&found.attributes, *number));
        }
        let flags = (OFlags::from_bits_retain(*flags) & OFlags::ACCMODE).bits();
        let opened =
            if is_expected { perform(Op::Open { of: at, flags, content: false }) } else { Err(Errno::STALE) };
        session.forget(at, u64::from(at != ROOT));
        match opened? {
            FileReply::FileOpened(opened, attributes)
                if self.is_expected_file(&attributes, *number)
                    && FileType::from_raw_mode(attributes.mode) == FileType::RegularFile =>
            {
                Ok(opened)
            }
            FileReply::FileOpened(opened, _) => {
                release::release(session, &self.leases, Release::File(opened));
                Err(Errno::STALE)
            }
            _ => Err(Errno::IO),
        }
    }
}

pub(super) fn refusal(reason: &str) -> ShimReply {
    ShimReply::Refused(Refusal::new(RefusalKind::NotFound, reason))
}
