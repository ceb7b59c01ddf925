//! Lookups, reads and writes in the tree, independent of fuser's reply types, except for a write
//! that is answered later.

use crate::action::{self, WriteAction};
use crate::inode::{Dir, Inode, TOP};
use crate::ternd::{Opener, Ternd};
use crate::wait_limit::{WaitLimit, wait, wait_uninterruptibly};
use crate::{content, lock, procfs};
use fuser::{FileAttr, FileHandle, FileType, INodeNo, OpenFlags, ReplyWrite, Request};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use tern_control::{Destination, Evacuation, Reply, Request as TerndRequest};
use tern_ids::HomePid;

/// How long a write that moves the writing process itself waits for a refusal. The process cannot
/// be frozen while it waits for this write.
const SELF_MOVE_TIMEOUT: Duration = Duration::from_millis(50);

/// How long a write that starts an evacuation waits for a refusal.
const START_TIMEOUT: Duration = Duration::from_millis(200);

pub(crate) type Outcome<T> = Result<T, Errno>;

/// The file system, as called by fuser.
#[derive(Debug)]
pub(crate) struct Tree {
    ternd: Ternd,
    handles: Mutex<HashMap<u64, Arc<Handle>>>,
    next_handle: AtomicU64,
    wait_limit: Arc<WaitLimit>,
    /// An evacuation that was started by a write to `bring` is in progress.
    is_bringing: Arc<AtomicBool>,
    /// As `is_bringing`, for a write to `expel`.
    is_expelling: Arc<AtomicBool>,
}

/// An open file.
#[derive(Debug)]
struct Handle {
    inode: Inode,
    /// The user that opened it.
    opener: Opener,
    opened_by: Option<HomePid>,
    /// Start time of the process that the file is about, to detect that its pid was reused.
    start_time: Option<u64>,
    /// Content when the file was last read from offset 0.
    content: Mutex<Vec<u8>>,
}

pub(crate) fn error(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno.raw_os_error())
}

pub(crate) fn inode(number: INodeNo) -> Outcome<Inode> {
    Inode::from_number(number.0).ok_or(Errno::STALE)
}

/// Type of an inode.
pub(crate) fn file_type(inode: Inode) -> FileType {
    match inode {
        Inode { dir: Dir::SelfLink, .. } => FileType::Symlink,
        Inode { leaf: None, .. } => FileType::Directory,
        _ => FileType::RegularFile,
    }
}

fn pid_of(inode: Inode) -> Option<HomePid> {
    if let Dir::Process(pid) = inode.dir { Some(pid) } else { None }
}

impl Tree {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self {
            ternd: Ternd::new(run_dir),
            handles: Mutex::default(),
            next_handle: AtomicU64::new(1),
            wait_limit: Arc::default(),
            is_bringing: Arc::default(),
            is_expelling: Arc::default(),
        }
    }

    /// Looks up an entry.
    pub(crate) fn lookup_entry(&self, parent: Inode, name: &OsStr) -> Outcome<Inode> {
        let name = name.to_str().ok_or(Errno::NOENT)?;
        if parent.leaf.is_some() {
            return Err(Errno::NOTDIR);
        }
        let number = || name.parse::<u16>().ok().filter(|number| number.to_string() == name);
        let dir = match parent.dir {
            Dir::Root => TOP.into_iter().find(|(_, known)| *known == name).map(|(dir, _)| dir),
            Dir::Proc if name == "self" => Some(Dir::SelfLink),
            Dir::Proc => {
                let pid = name.parse().ok().filter(|pid: &i32| pid.to_string() == name).map(HomePid);
                pid.filter(|pid| procfs::is_process(*pid)).map(Dir::Process)
            }
            Dir::Nodes => {
                let Some(number) = number() else { return Err(Errno::NOENT) };
                let nodes = content::cluster(&self.ternd)?.nodes;
                let node = nodes.iter().find(|node| node.node.0 == number);
                node.map(|node| Dir::Node(node.node))
            }
            Dir::Remote => {
                let rows = content::guests(&self.ternd)?;
                let row = rows.iter().find(|row| content::guest_name(&rows, row) == name);
                row.and_then(|row| Some(Dir::Guest(row.from?, row.pid)))
            }
            dir => {
                let file = Inode::files(dir).find(|(_, known)| *known == name);
                return file.map(|(inode, _)| inode).ok_or(Errno::NOENT);
            }
        };
        dir.map(Inode::of_dir).ok_or(Errno::NOENT)
    }

    /// Attributes of an inode.
    pub(crate) fn attr(inode: Inode) -> Outcome<FileAttr> {
        let (uid, gid) = match pid_of(inode) {
            Some(pid) => procfs::owner(pid).ok_or(Errno::NOENT)?,
            None => (0, 0),
        };
        let kind = file_type(inode);
        let now = SystemTime::now();
        Ok(FileAttr {
            ino: INodeNo(inode.number()),
            // As in /proc: the size is known only when the file is read.
            size: 0,
            blocks: 0,
            atime: now,
            mtime: now,
            ctime: now,
            crtime: now,
            kind,
            perm: inode.mode(),
            nlink: if kind == FileType::Directory { 2 } else { 1 },
            uid,
            gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    /// The entries of a directory, each with its cookie, in ascending order.
    pub(crate) fn entries(&self, inode: Inode) -> Outcome<Vec<(u64, Inode, String)>> {
        // Cookies 1 and 2 belong to `.` and `..`.
        let numbered = |entries: &mut dyn Iterator<Item = (Inode, String)>| {
            entries.zip(3..).map(|((inode, name), cookie)| (cookie, inode, name)).collect()
        };
        Ok(match inode.dir {
            Dir::Root => numbered(&mut TOP.into_iter().map(|(dir, name)| (Inode::of_dir(dir), name.into()))),
            Dir::Proc => {
                let processes = procfs::all_pids().into_iter().map(|pid| {
                    (u64::from(pid.0.unsigned_abs()) + 3, Inode::of_dir(Dir::Process(pid)), pid.to_string())
                });
                std::iter::once((3, Inode::of_dir(Dir::SelfLink), "self".into())).chain(processes).collect()
            }
            Dir::Nodes => {
                let nodes = content::cluster(&self.ternd)?.nodes.into_iter();
                let nodes = nodes.map(|node| (Inode::of_dir(Dir::Node(node.node)), node.node.to_string()));
                numbered(&mut { nodes })
            }
            Dir::Remote => {
                let rows = content::guests(&self.ternd)?;
                let guests = rows.iter().filter_map(|row| {
                    Some((Inode::of_dir(Dir::Guest(row.from?, row.pid)), content::guest_name(&rows, row)))
                });
                numbered(&mut { guests })
            }
            dir => numbered(&mut Inode::files(dir).map(|(inode, name)| (inode, name.to_owned()))),
        })
    }

    /// Opens a file for the calling user. Returns the handle's number.
    pub(crate) fn open_file(&self, request: &Request, number: INodeNo, flags: OpenFlags) -> Outcome<u64> {
        let inode = inode(number)?;
        if inode.leaf.is_none() {
            return Err(Errno::ISDIR);
        }
        let access = OFlags::from_bits_retain(flags.0.cast_unsigned()) & OFlags::ACCMODE;
        // Root bypasses file modes, but some files are not writable at all.
        if access != OFlags::RDONLY && !inode.is_writable() {
            return Err(Errno::ACCESS);
        }
        let handle = Handle {
            inode,
            opener: Opener { uid: request.uid(), gid: request.gid() },
            opened_by: procfs::process_of(request.pid()),
            start_time: pid_of(inode).map_or(Ok(None), procfs::start_time)?,
            content: Mutex::default(),
        };
        let number = self.next_handle.fetch_add(1, Ordering::Relaxed);
        lock(&self.handles).insert(number, Arc::new(handle));
        Ok(number)
    }

    /// Closes an open file.
    pub(crate) fn close(&self, number: FileHandle) {
        lock(&self.handles).remove(&number.0);
    }

    fn handle(&self, number: FileHandle) -> Outcome<Arc<Handle>> {
        let handle = lock(&self.handles).get(&number.0).cloned().ok_or(Errno::BADF)?;
        match pid_of(handle.inode) {
            Some(pid) if procfs::start_time(pid)? != handle.start_time => Err(Errno::SRCH),
            _ => Ok(handle),
        }
    }

    /// Reads a file. Its content is generated when it is read from offset 0.
    pub(crate) fn read_at(&self, number: FileHandle, at: u64, size: u32) -> Outcome<Vec<u8>> {
        let handle = self.handle(number)?;
        let mut bytes = lock(&handle.content);
        if at == 0 {
            let evacuating =
                (self.is_bringing.load(Ordering::Acquire), self.is_expelling.load(Ordering::Acquire));
            *bytes = content::content(&self.ternd, handle.inode, evacuating)?.into_bytes();
        }
        let at = usize::try_from(at).unwrap_or(usize::MAX).min(bytes.len());
        let end = at.saturating_add(size as usize).min(bytes.len());
        Ok(bytes[at..end].to_vec())
    }

    /// Performs a write. Sends the reply at once, or when the write is done.
    pub(crate) fn write_to(&self, request: &Request, number: FileHandle, data: &[u8], reply: ReplyWrite) {
        let count = u32::try_from(data.len()).unwrap_or(u32::MAX);
        match self.start_write(request, number, data) {
            Ok(WriteState::Done) => reply.written(count),
            Ok(WriteState::Waiting(wait)) => {
                let wait = move || match wait() {
                    Ok(()) => reply.written(count),
                    Err(errno) => reply.error(error(errno)),
                };
                // If no thread can be created, the reply is dropped, which fuser turns into EIO.
                if let Err(error) = spawn(wait) {
                    tracing::warn!(%error, "cannot start a thread to wait for ternd");
                }
            }
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn start_write(&self, request: &Request, number: FileHandle, data: &[u8]) -> Outcome<WriteState> {
        let handle = self.handle(number)?;
        let opener = handle.opener;
        match action::parse(handle.inode, data, handle.opened_by)? {
            WriteAction::Nothing => {}
            WriteAction::Immediate(request) => drop(self.ternd.request_for(opener, request)?),
            WriteAction::SetDecay(leaf, value) => {
                let Reply::Settings(current) = self.ternd.request(&TerndRequest::Settings)? else {
                    return Err(Errno::IO);
                };
                let request = action::decay_request(current.decay, leaf, value)?;
                drop(self.ternd.request_for(opener, request)?);
            }
            WriteAction::Start(what, request) => self.evacuate(opener, what, request)?,
            WriteAction::Move(pid, ternd_request) => {
                let permit = self.wait_limit.acquire(opener.uid)?;
                let to_result = move_result(pid, &ternd_request);
                let pending = self.ternd.send_for(opener, ternd_request)?;
                let tid = request.pid();
                if procfs::process_of(tid) != Some(pid) {
                    return Ok(WriteState::Waiting(Box::new(move || {
                        let _permit = permit;
                        to_result(wait(pending, tid))
                    })));
                }
                // The writer itself is to move, and cannot be frozen while it waits for this write.
                if pending.is_ready_within(SELF_MOVE_TIMEOUT) {
                    to_result(pending.receive())?;
                } else {
                    let wait = move || {
                        let _permit = permit;
                        drop(wait_uninterruptibly(pending));
                    };
                    spawn(wait).map_err(|_none| Errno::AGAIN)?;
                }
            }
        }
        Ok(WriteState::Done)
    }

    /// Starts an evacuation, which may take unlimited time.
    fn evacuate(&self, opener: Opener, what: Evacuation, request: TerndRequest) -> Outcome<()> {
        let is_running =
            if what == Evacuation::Bring { self.is_bringing.clone() } else { self.is_expelling.clone() };
        if is_running.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let started = self
            .wait_limit
            .acquire(opener.uid)
            .and_then(|permit| Ok((permit, self.ternd.send_for(opener, request)?)));
        let (permit, pending) = started.inspect_err(|_| is_running.store(false, Ordering::Release))?;
        if pending.is_ready_within(START_TIMEOUT) {
            is_running.store(false, Ordering::Release);
            return pending.receive().map(drop);
        }
        let flag = is_running.clone();
        let wait = move || {
            let _permit = permit;
            drop(wait_uninterruptibly(pending));
            flag.store(false, Ordering::Release);
        };
        spawn(wait).map_err(|_none| Errno::AGAIN).inspect_err(|_| is_running.store(false, Ordering::Release))
    }
}

/// Result of starting a write.
enum WriteState {
    Done,
    /// The write is done when this function, run in another thread, returns.
    Waiting(Box<dyn FnOnce() -> Outcome<()> + Send>),
}

fn spawn(run: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name("wait".into()).stack_size(256 << 10).spawn(run).map(drop)
}

/// Converts the reply to a request for a migration. If the process is already at a given
/// destination, that is not an error.
fn move_result(
    pid: HomePid,
    request: &TerndRequest,
) -> impl Fn(Outcome<Reply>) -> Outcome<()> + Send + use<> {
    let has_destination =
        matches!(request, TerndRequest::Migrate { to: Destination::Home | Destination::Node(_), .. });
    let is_migrate = matches!(request, TerndRequest::Migrate { .. });
    move |reply| match reply {
        Ok(_) => Ok(()),
        Err(Errno::INVAL) if has_destination => Ok(()),
        Err(Errno::NXIO) if !is_migrate || !procfs::is_process(pid) => Err(Errno::SRCH),
        Err(errno) => Err(errno),
    }
}
