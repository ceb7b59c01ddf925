//! Files that are opened for guests of this node: a program of another node that works here on a file of ours gets that itself,
//! and not what home sees of it through MFS (docs/design/direct.md).
//!
//! Its shim asks for it, by our door, and the same rules hold as for home: whoever it is has to get to the file step by step, as he
//! would from there. The file counts as open, in a session of this node's own, until the shim has closed its socket; so other
//! nodes believe nothing of what is written there.

use super::acting::Acting;
use super::perform::{Fault, Performance, writes};
use super::session::{OpenFile, Session};
use super::{Connected, Serving, release};
use crate::lock;
use crate::message::{Answer, Attributes, Caller, Deed, Name, Opened, Purpose, ROOT, Release};
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
use tern_control::door;
use tern_control::shim::{ShimReply, ShimRequest};
use tern_control::{Refusal, RefusalKind};

/// The session of this node's guests; those of mounted trees have numbers chosen at random.
const GUESTS: [u8; 16] = [0; 16];

/// The most files that are open for guests; each has a thread.
const MOST: usize = 512;

/// A path is no deeper: each step costs.
const DEEPEST: usize = 200;

/// The files that guests have open here.
#[derive(Debug, Default)]
pub(super) struct Guests {
    count: AtomicUsize,
    /// How their shims hear that they are to let go.
    sockets: Mutex<HashMap<Opened, UnixStream>>,
}

impl Guests {
    /// Has all of them let go of their files: at their next calls, which go home then, and are refused there.
    pub(super) fn send_home(&self) {
        for socket in lock(&self.sockets).values() {
            // One that has gone by itself.
            let _gone = socket.shutdown(Shutdown::Both);
        }
    }
}

/// A file for a guest, among all.
struct Counted(Arc<Serving>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.guests.count.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Serving {
    /// Opens a file for a guest, in a thread of its own, which ends when the file is let go.
    pub(super) fn open_for_guest(self: &Arc<Self>, caller: door::Caller) {
        if self.guests.count.load(Ordering::Acquire) >= MOST {
            return caller.answer(&refusal("too many files are open for guests"));
        }
        self.guests.count.fetch_add(1, Ordering::AcqRel);
        let counted = Counted(self.clone());
        let work = move || counted.0.serve_guest(caller);
        if let Err(error) = std::thread::Builder::new().name("guest".into()).stack_size(256 << 10).spawn(work)
        {
            tracing::warn!(%error, "no thread for a guest's file");
        }
    }

    fn serve_guest(&self, caller: door::Caller) {
        if matches!(caller.request(), ShimRequest::OpenShared { .. }) {
            return self.serve_shared(caller);
        }
        let session = match self.guests() {
            Ok(session) => session,
            Err(error) => return caller.answer(&refusal(&error.to_string())),
        };
        let opened = match self.open_near(&session.0, caller.request()) {
            Ok(opened) => opened,
            Err(error) => return caller.answer(&refusal(&error.to_string())),
        };
        if let Some(file) = session.0.file(opened)
            && let Ok(mut socket) = self.give(caller, &session.0, &file)
            && let Ok(other) = socket.try_clone()
        {
            lock(&self.guests.sockets).insert(opened, other);
            // Those that were there when others were shut out have heard it.
            if !self.open.load(Ordering::Acquire) {
                self.guests.send_home();
            }
            // However long its guest works on it.
            let _blocks = socket.set_read_timeout(None);
            while socket.read(&mut [0]).map_or_else(|e| e.kind() == ErrorKind::Interrupted, |read| read > 0) {
            }
            lock(&self.guests.sockets).remove(&opened);
        }
        release::release(&session.0, &self.leases, Release::File(opened));
    }

    /// Gives a guest the file, of whose writing from now on nobody is told: it has been opened, so that nobody believes anything of it, until
    /// it is closed, by this thread. Our session is one that hears nothing, and gets no lease itself.
    fn give(&self, caller: door::Caller, session: &Session, file: &OpenFile) -> io::Result<UnixStream> {
        if writes(file.flags) && !session.listens() {
            self.leases.ignore(&file.fd, file.key);
        }
        caller.give(file.fd.as_fd())
    }

    /// Whether it is the file of that number, and home has it open: otherwise another file may have got its number since.
    fn is_it(&self, is: &Attributes, number: u64) -> bool {
        let is_open = || lock(&self.sessions).iter().any(|((_, id), s)| *id != GUESTS && s.has_open(is.key));
        tern_ids::number::of(self.node, is.key.volume, is.key.inode) == number && is_open()
    }

    fn guests(&self) -> Result<Connected, Errno> {
        let mut sessions = lock(&self.sessions);
        let session = match sessions.get(&(self.node, GUESTS)) {
            Some(session) => session.clone(),
            None => {
                let new = Session::new(&self.export, &self.budget, Purpose::All)?;
                sessions.insert((self.node, GUESTS), new.clone());
                new
            }
        };
        // Before the sessions can be tidied.
        Ok(Connected::new(session))
    }

    fn open_near(&self, session: &Arc<Session>, request: &ShimRequest) -> Result<Opened, Errno> {
        let ShimRequest::OpenFile { path, number, who, flags } = request else { return Err(Errno::INVAL) };
        if !self.config.file.mfs.unwrap_or(true) || !self.open.load(Ordering::Acquire) {
            return Err(Errno::ACCESS);
        }
        let (uid, gid, groups) = who.clone();
        let mut acting = Acting::new();
        acting.for_caller(&self.as_here(Caller { uid, gid, groups }))?;
        let performance = Performance { session, export: &self.export, leases: &self.leases };
        let perform = |deed| match performance.perform(&[], deed, &[], &mut Vec::new()) {
            Ok(answer) => Ok(answer),
            Err(Fault::Errno(errno)) => Err(errno),
            Err(Fault::Forgotten) => Err(Errno::STALE),
        };
        let names: Vec<Name> =
            path.split(|byte| *byte == b'/').map(|n| OsStr::from_bytes(n).into()).collect();
        if names.len() > DEEPEST {
            return Err(Errno::NAMETOOLONG);
        }
        let (mut at, mut is_it) = (ROOT, false);
        for name in names {
            let found = perform(Deed::Lookup { dir: at, name });
            session.forget(at, u64::from(at != ROOT));
            let Answer::Found(found, _) = found? else { return Err(Errno::IO) };
            (at, is_it) = (found.object, self.is_it(&found.attributes, *number));
        }
        let flags = (OFlags::from_bits_retain(*flags) & OFlags::ACCMODE).bits();
        let opened =
            if is_it { perform(Deed::Open { of: at, flags, content: false }) } else { Err(Errno::STALE) };
        session.forget(at, u64::from(at != ROOT));
        match opened? {
            Answer::Opened(opened, is)
                if self.is_it(&is, *number) && FileType::from_raw_mode(is.mode) == FileType::RegularFile =>
            {
                Ok(opened)
            }
            Answer::Opened(opened, _) => {
                release::release(session, &self.leases, Release::File(opened));
                Err(Errno::STALE)
            }
            _ => Err(Errno::IO),
        }
    }
}

pub(super) fn refusal(why: &str) -> ShimReply {
    ShimReply::Refused(Refusal::new(RefusalKind::NotFound, why))
}
