//! Files of the guest's own node: there it has them open itself, and its kernel makes its calls on them.
//!
//! Home has such a file open through MFS, and says so of one that is in hand ([`FileWord::Near`](tern_migrate::message::FileWord)).
//! When the guest first reads or writes it, the server of this node's files opens it under the rights that home names, and makes sure that it
//! is that file; the guest gets a descriptor of that under its own number for it, and calls on it are let through. Nobody can change which
//! descriptor a trapped call is about: it is in a register, and the process has one thread.
//!
//! With calls that do not stop ([`crate::hot`]) those that are made often do not even trap.
//!
//! A call that was let through is over when the program makes its next one, or stands in our hand; before that nobody can say what the offset
//! is. So who is to leave in the middle of one is stopped for a moment first.
//!
//! **A file that nodes share** ([`FileWord::Shared`](tern_migrate::message::FileWord)) is opened in the same way by the same server, if this node declares that
//! directory too, and only to be read. What this kernel has of it may be old, as what is read ahead may be: so it is read here only as long as
//! home has said that it is steady since the program has last heard of anything, and for a second. Then home is asked again.
//!
//! Of what is this node's own there is nothing to be read ahead, or written behind, and nothing that could be old. The offset is the kernel's, and goes home with
//! each call that is made there, as that of other files in hand. A descriptor that is not in hand any more stays the guest's until its next call
//! goes home: then another file takes its place, before that call can give it to a child. Calls on it go home whatever it is here.

use crate::direct::Wanted;
use crate::forward::Failed;
use crate::homes::Homes;
use crate::inhand::Files;
use crate::member::Process;
use crate::space::MAPPED_FILE;
use crate::thread::Thread;
use rustix::fs::{Mode, OFlags, SeekFrom, StatVfsMountFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tern_control::door;
use tern_control::shim::ShimRequest;
use tern_ids::NodeId;
use tern_image::content::Holder;
use tern_image::place::Place;
use tern_migrate::message::{InHand, SharedPlace};
use tern_tracee::listener::Notification;
use tern_wire::Link;

/// How long this node's server may take to open a file: all guests of the family wait for it.
const PATIENCE: Duration = Duration::from_secs(1);

/// What is beside the guests of a shim: their node, and the door of the server of its files.
#[derive(Debug, Clone)]
pub struct Beside {
    node: NodeId,
    door: Arc<Path>,
    /// The directories that it declares to be the same on other nodes.
    shared: Arc<[PathBuf]>,
    homes: Rc<Homes>,
}

impl Beside {
    /// Of a shim on this node, whose run directory this is.
    #[must_use]
    pub fn new(node: NodeId, run_dir: &Path, shared: &[PathBuf]) -> Self {
        let homes = Rc::new(Homes::new(run_dir));
        Self { node, door: PathBuf::from(run_dir).join("mfs.sock").into(), shared: shared.into(), homes }
    }

    /// How a guest gets a file that it maps without its being sent: one of this node's own, or of its home, which is on that one.
    pub(crate) fn files_to_map(&self, home: NodeId) -> tern_image::content::Open {
        let Self { node, door, homes, .. } = self.clone();
        Box::new(move |place| {
            let told = |error: &io::Error| tracing::info!(%error, "a file is mapped as home sends it");
            if place.node == home {
                return homes.open(place).inspect_err(told).map(|(file, tree)| (file, Holder::Tree(tree)));
            }
            if place.node != node {
                return Err(io::ErrorKind::NotFound.into());
            }
            let (file, server) = open_own(&door, place, OFlags::RDONLY).inspect_err(told)?;
            // Home may be allowed to run what is mapped.
            if rustix::fs::fstatvfs(&file)?.f_flag.contains(StatVfsMountFlags::NOEXEC) {
                return Err(io::ErrorKind::PermissionDenied.into());
            }
            Ok((file, Holder::Server(server)))
        })
    }
}

/// A file in hand that is this node's own.
#[derive(Debug)]
pub(crate) enum Near {
    /// It can be opened there.
    Offered(Box<Place>, Arc<Path>),
    /// The nodes share it, and it can be opened here as well.
    Shared(Box<SharedPlace>, Arc<Path>),
    /// The guest has it open. The server knows of it until the socket is closed, if it is this node's own.
    Open(OwnedFd, Option<UnixStream>),
}

impl Near {
    /// What home says is somewhere, if that is here.
    pub(crate) fn offered(place: &Place, beside: &Beside) -> Option<Self> {
        (place.node == beside.node).then(|| Self::Offered(Box::new(place.clone()), Arc::clone(&beside.door)))
    }

    /// What home says nodes share, if this one does.
    pub(crate) fn shared(place: &SharedPlace, beside: &Beside) -> Option<Self> {
        let is_ours = beside.shared.iter().any(|root| root.as_os_str().as_bytes() == &**place.root);
        is_ours.then(|| Self::Shared(Box::new(place.clone()), Arc::clone(&beside.door)))
    }

    /// Whether it is a file that nodes share.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self, Self::Shared(..) | Self::Open(_, None))
    }

    pub(crate) fn is_open(&self) -> bool {
        matches!(self, Self::Open(..))
    }

    /// Where the guest reads and writes it next.
    pub(crate) fn offset(&self) -> Option<u64> {
        match self {
            Self::Open(file, _) => rustix::fs::tell(file).ok(),
            Self::Offered(..) | Self::Shared(..) => None,
        }
    }

    pub(crate) fn seek(&self, to: u64) {
        if let Self::Open(file, _) = self {
            // Home's kernel has been there.
            let _same_file = rustix::fs::seek(file, SeekFrom::Start(to));
        }
    }

    /// Whether the server has let go of it, as when it was killed.
    fn is_forgotten(&self) -> bool {
        let Self::Open(_, Some(server)) = self else { return false };
        door::has_closed(server)
    }

    /// Opens it.
    fn open(&self, known: InHand) -> io::Result<Self> {
        let flags = match (known.reads, known.writes) {
            (_, false) => OFlags::RDONLY,
            (false, true) => OFlags::WRONLY,
            (true, true) => OFlags::RDWR,
        };
        let (file, server) = match self {
            Self::Offered(place, door) => open_own(door, place, flags)?,
            Self::Shared(place, door) => {
                let SharedPlace { root, path, file, who } = &**place;
                let (root, path, file, who) = (root.to_vec(), path.to_vec(), file.clone(), who.clone());
                door::ask_for(door, &ShimRequest::OpenShared { root, path, file, who }, PATIENCE)?
            }
            Self::Open(..) => return Err(io::ErrorKind::AlreadyExists.into()),
        };
        rustix::fs::seek(&file, SeekFrom::Start(known.offset))?;
        Ok(Self::Open(file, (!self.is_shared()).then_some(server)))
    }
}

/// Has the server of this node's files open one.
fn open_own(door: &Path, place: &Place, flags: OFlags) -> io::Result<(OwnedFd, UnixStream)> {
    let (path, number, who) = (place.path.clone(), place.number, place.who.clone());
    door::ask_for(door, &ShimRequest::OpenFile { path, number, who, flags: flags.bits() }, PATIENCE)
}

impl Thread {
    /// Lets a call through on a file that is this node's own, or that nodes share; false if it is not, or home is to make the call.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn passed_to_near(
        &mut self,
        trap: &Notification,
        process: &mut Process,
        home: Option<&mut Link>,
    ) -> std::result::Result<bool, Failed> {
        let (fd, files) = (trap.args[0] as i32, &mut process.files);
        let Some(file) = files.get(fd) else { return Ok(false) };
        let Some(near) = file.near.as_ref().filter(|_| is_of_content(trap.nr)) else { return Ok(false) };
        if near.is_shared() && !file.is_vouched() {
            // Something has been heard since home has looked at it.
            return self.wait_for_errand(*trap, Some(Wanted::Word(fd)), process, home);
        }
        if near.is_open() {
            // A server that follows another one does not know of it: so others would believe what is written here.
            if near.is_forgotten() {
                files.put_down_near(fd);
                return Ok(false);
            }
        } else {
            // What is standard input is not worth a number of its own for what is mapped.
            if !file.is_written() || self.errand.is_some() || fd == MAPPED_FILE {
                return Ok(false);
            }
            let opened = near.open(file.known).and_then(|near| {
                if let Near::Open(own, _) = &near {
                    self.listener.give(trap.id, own.as_fd(), fd)?;
                }
                Ok(near)
            });
            match opened {
                Ok(near) => {
                    file.near = Some(near);
                    files.is_given(fd);
                }
                Err(error) => {
                    tracing::info!(%error, fd, "a file is read and written through home that could be here");
                    file.near = None;
                    return Ok(false);
                }
            }
        }
        self.talk.resumes = None;
        process.passes(trap)?;
        self.pass(trap.id)?;
        Ok(true)
    }

    /// Takes from the guest the descriptors of files that are not in hand any more. It waits in this call.
    pub(crate) fn take_back(&self, trap: &Notification, files: &mut Files) {
        for fd in files.take_stale() {
            let nothing = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
            // If it cannot be it is a descriptor that no call of the guest reaches.
            let taken =
                nothing.map_err(io::Error::from).and_then(|n| self.listener.give(trap.id, n.as_fd(), fd));
            if let Err(error) = taken {
                tracing::warn!(%error, fd, "a file stays open here");
                files.is_stale(fd);
            }
        }
    }
}

/// Calls on an open file that are about its content and its offset, and about nothing else that home has.
fn is_of_content(nr: u32) -> bool {
    matches!(
        i64::from(nr),
        libc::SYS_read
            | libc::SYS_write
            | libc::SYS_pread64
            | libc::SYS_pwrite64
            | libc::SYS_readv
            | libc::SYS_writev
            | libc::SYS_preadv
            | libc::SYS_pwritev
            | libc::SYS_preadv2
            | libc::SYS_pwritev2
            | libc::SYS_lseek
            | libc::SYS_ftruncate
            | libc::SYS_fallocate
            | libc::SYS_fadvise64
    )
}
