//! What is looked up, read and written in the tree, without fuser's replies but one: who waits is answered when it is over.

use crate::asking::{Asker, Ternd};
use crate::item::{Item, TOP, Whose};
use crate::order::{self, Order};
use crate::waiting::{Waiting, wait, wait_alone};
use crate::{lock, show, tasks};
use fuser::{FileAttr, FileHandle, FileType, INodeNo, OpenFlags, ReplyWrite, Request};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use tern_control::{Destination, Evacuation, Reply, Request as Ask};
use tern_ids::HomePid;

/// How long who moves himself may be kept from it by waiting for a refusal: he cannot stand still while he waits for us.
const SELF: Duration = Duration::from_millis(50);

/// How long who begins what goes on by itself waits for a refusal.
const BEGIN: Duration = Duration::from_millis(200);

pub(crate) type Outcome<T> = Result<T, Errno>;

/// The tree as fuser calls it.
#[derive(Debug)]
pub(crate) struct Tree {
    ternd: Ternd,
    handles: Mutex<HashMap<u64, Arc<Handle>>>,
    next: AtomicU64,
    waiting: Arc<Waiting>,
    /// What goes on by itself.
    bringing: Arc<AtomicBool>,
    expelling: Arc<AtomicBool>,
}

/// An open file.
#[derive(Debug)]
struct Handle {
    item: Item,
    /// Who has opened it.
    who: Asker,
    process: Option<HomePid>,
    /// When the process that it is about started: another one of its number is another one.
    start: Option<u64>,
    /// What it said when it was read from its beginning.
    said: Mutex<Vec<u8>>,
}

pub(crate) fn error(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno.raw_os_error())
}

pub(crate) fn item(number: INodeNo) -> Outcome<Item> {
    Item::of(number.0).ok_or(Errno::STALE)
}

/// What kind of file it is.
pub(crate) fn kind(item: Item) -> FileType {
    match item {
        Item { whose: Whose::Me, .. } => FileType::Symlink,
        Item { leaf: None, .. } => FileType::Directory,
        _ => FileType::RegularFile,
    }
}

fn of_process(item: Item) -> Option<HomePid> {
    if let Whose::Process(pid) = item.whose { Some(pid) } else { None }
}

impl Tree {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self {
            ternd: Ternd::of(run_dir),
            handles: Mutex::default(),
            next: AtomicU64::new(1),
            waiting: Arc::default(),
            bringing: Arc::default(),
            expelling: Arc::default(),
        }
    }

    /// What has this name.
    pub(crate) fn find(&self, parent: Item, name: &OsStr) -> Outcome<Item> {
        let name = name.to_str().ok_or(Errno::NOENT)?;
        if parent.leaf.is_some() {
            return Err(Errno::NOTDIR);
        }
        let number = || name.parse::<u16>().ok().filter(|number| number.to_string() == name);
        let whose = match parent.whose {
            Whose::Root => TOP.into_iter().find(|(_, known)| *known == name).map(|(whose, _)| whose),
            Whose::Proc if name == "self" => Some(Whose::Me),
            Whose::Proc => {
                let pid = name.parse().ok().filter(|pid: &i32| pid.to_string() == name).map(HomePid);
                pid.filter(|pid| tasks::is_process(*pid)).map(Whose::Process)
            }
            Whose::Nodes => {
                let Some(number) = number() else { return Err(Errno::NOENT) };
                let nodes = show::cluster(&self.ternd)?.nodes;
                let node = nodes.iter().find(|node| node.node.0 == number);
                node.map(|node| Whose::Node(node.node))
            }
            Whose::Remote => {
                let rows = show::guests(&self.ternd)?;
                let row = rows.iter().find(|row| show::guest_name(&rows, row) == name);
                row.and_then(|row| Some(Whose::Guest(row.from?, row.pid)))
            }
            whose => {
                let file = Item::files(whose).find(|(_, known)| *known == name);
                return file.map(|(item, _)| item).ok_or(Errno::NOENT);
            }
        };
        whose.map(Item::own).ok_or(Errno::NOENT)
    }

    /// What it is like.
    pub(crate) fn attr(item: Item) -> Outcome<FileAttr> {
        let (uid, gid) = match of_process(item) {
            Some(pid) => tasks::owner(pid).ok_or(Errno::NOENT)?,
            None => (0, 0),
        };
        let kind = kind(item);
        let now = SystemTime::now();
        Ok(FileAttr {
            ino: INodeNo(item.number()),
            // As in /proc: what it is, reading says.
            size: 0,
            blocks: 0,
            atime: now,
            mtime: now,
            ctime: now,
            crtime: now,
            kind,
            perm: item.mode(),
            nlink: if kind == FileType::Directory { 2 } else { 1 },
            uid,
            gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    /// The entries of a directory, each with a number that stays its own, in the order of these.
    pub(crate) fn entries(&self, item: Item) -> Outcome<Vec<(u64, Item, String)>> {
        // `.` and `..` have the first two.
        let counted = |all: &mut dyn Iterator<Item = (Item, String)>| {
            all.zip(3..).map(|((item, name), place)| (place, item, name)).collect()
        };
        Ok(match item.whose {
            Whose::Root => counted(&mut TOP.into_iter().map(|(whose, name)| (Item::own(whose), name.into()))),
            Whose::Proc => {
                let processes = tasks::all().into_iter().map(|pid| {
                    (u64::from(pid.0.unsigned_abs()) + 3, Item::own(Whose::Process(pid)), pid.to_string())
                });
                std::iter::once((3, Item::own(Whose::Me), "self".into())).chain(processes).collect()
            }
            Whose::Nodes => {
                let nodes = show::cluster(&self.ternd)?.nodes.into_iter();
                let nodes = nodes.map(|node| (Item::own(Whose::Node(node.node)), node.node.to_string()));
                counted(&mut { nodes })
            }
            Whose::Remote => {
                let rows = show::guests(&self.ternd)?;
                let guests = rows.iter().filter_map(|row| {
                    Some((Item::own(Whose::Guest(row.from?, row.pid)), show::guest_name(&rows, row)))
                });
                counted(&mut { guests })
            }
            whose => counted(&mut Item::files(whose).map(|(item, name)| (item, name.to_owned()))),
        })
    }

    /// Opens a file for whoever asks; the number of the handle.
    pub(crate) fn open_file(&self, request: &Request, number: INodeNo, flags: OpenFlags) -> Outcome<u64> {
        let item = item(number)?;
        if item.leaf.is_none() {
            return Err(Errno::ISDIR);
        }
        let wants = OFlags::from_bits_retain(flags.0.cast_unsigned()) & OFlags::ACCMODE;
        // Root may open all; some of it is not for writing at all.
        if wants != OFlags::RDONLY && !item.is_written() {
            return Err(Errno::ACCESS);
        }
        let handle = Handle {
            item,
            who: Asker { uid: request.uid(), gid: request.gid() },
            process: tasks::process_of(request.pid()),
            start: of_process(item).and_then(tasks::start),
            said: Mutex::default(),
        };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.handles).insert(number, Arc::new(handle));
        Ok(number)
    }

    /// The file is closed.
    pub(crate) fn close(&self, number: FileHandle) {
        lock(&self.handles).remove(&number.0);
    }

    fn handle(&self, number: FileHandle) -> Outcome<Arc<Handle>> {
        let handle = lock(&self.handles).get(&number.0).cloned().ok_or(Errno::BADF)?;
        match of_process(handle.item) {
            Some(pid) if tasks::start(pid) != handle.start => Err(Errno::SRCH),
            _ => Ok(handle),
        }
    }

    /// What a file says, as it was when it was read from its beginning.
    pub(crate) fn read_at(&self, number: FileHandle, at: u64, size: u32) -> Outcome<Vec<u8>> {
        let handle = self.handle(number)?;
        let mut said = lock(&handle.said);
        if at == 0 {
            let goes_on = (self.bringing.load(Ordering::Acquire), self.expelling.load(Ordering::Acquire));
            *said = show::content(&self.ternd, handle.item, goes_on)?.into_bytes();
        }
        let at = usize::try_from(at).unwrap_or(usize::MAX).min(said.len());
        let end = at.saturating_add(size as usize).min(said.len());
        Ok(said[at..end].to_vec())
    }

    /// Does what was written; answers itself, now or when it is done.
    pub(crate) fn written(&self, request: &Request, number: FileHandle, data: &[u8], reply: ReplyWrite) {
        let count = u32::try_from(data.len()).unwrap_or(u32::MAX);
        match self.begin(request, number, data) {
            Ok(Begun::Done) => reply.written(count),
            Ok(Begun::Wait(waits)) => {
                let waits = move || match waits() {
                    Ok(()) => reply.written(count),
                    Err(errno) => reply.error(error(errno)),
                };
                // Without a thread the reply is dropped, which says EIO.
                if let Err(error) = thread(waits) {
                    tracing::warn!(%error, "no thread to wait");
                }
            }
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn begin(&self, request: &Request, number: FileHandle, data: &[u8]) -> Outcome<Begun> {
        let handle = self.handle(number)?;
        let who = handle.who;
        match order::of(handle.item, data, handle.process)? {
            Order::Nothing => {}
            Order::Soon(ask) => drop(self.ternd.ask_for(who, ask)?),
            Order::Decay(leaf, value) => {
                let Reply::Settings(now) = self.ternd.ask(&Ask::Settings)? else { return Err(Errno::IO) };
                drop(self.ternd.ask_for(who, order::decay(now.decay, leaf, value)?)?);
            }
            Order::Begin(what, ask) => self.evacuate(who, what, ask)?,
            Order::Move(pid, ask) => {
                let turn = self.waiting.take(who.uid)?;
                let settled = settled(pid, &ask);
                let asked = self.ternd.send_for(who, ask)?;
                let tid = request.pid();
                if tasks::process_of(tid) != Some(pid) {
                    return Ok(Begun::Wait(Box::new(move || {
                        let _turn = turn;
                        settled(wait(asked, tid))
                    })));
                }
                // It is the writer himself, who cannot be frozen as long as he waits for us.
                if asked.comes_within(SELF) {
                    settled(asked.answer())?;
                } else {
                    let waits = move || {
                        let _turn = turn;
                        drop(wait_alone(asked));
                    };
                    thread(waits).map_err(|_none| Errno::AGAIN)?;
                }
            }
        }
        Ok(Begun::Done)
    }

    /// Begins to empty the node, which may take for ever.
    fn evacuate(&self, who: Asker, what: Evacuation, ask: Ask) -> Outcome<()> {
        let goes_on = if what == Evacuation::Bring { self.bringing.clone() } else { self.expelling.clone() };
        if goes_on.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let begun = self.waiting.take(who.uid).and_then(|turn| Ok((turn, self.ternd.send_for(who, ask)?)));
        let (turn, asked) = begun.inspect_err(|_| goes_on.store(false, Ordering::Release))?;
        if asked.comes_within(BEGIN) {
            goes_on.store(false, Ordering::Release);
            return asked.answer().map(drop);
        }
        let over = goes_on.clone();
        let waits = move || {
            let _turn = turn;
            drop(wait_alone(asked));
            over.store(false, Ordering::Release);
        };
        thread(waits).map_err(|_none| Errno::AGAIN).inspect_err(|_| goes_on.store(false, Ordering::Release))
    }
}

/// What has become of a write.
enum Begun {
    Done,
    /// To be waited for.
    Wait(Box<dyn FnOnce() -> Outcome<()> + Send>),
}

fn thread(run: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name("wait".into()).stack_size(256 << 10).spawn(run).map(drop)
}

/// What the answer to a move comes to: that it is where it was to go is no error.
fn settled(pid: HomePid, ask: &Ask) -> impl Fn(Outcome<Reply>) -> Outcome<()> + Send + use<> {
    let is_place = matches!(ask, Ask::Migrate { to: Destination::Home | Destination::Node(_), .. });
    let is_own = matches!(ask, Ask::Migrate { .. });
    move |answer| match answer {
        Ok(_) => Ok(()),
        Err(Errno::INVAL) if is_place => Ok(()),
        Err(Errno::NXIO) if !is_own || !tasks::is_process(pid) => Err(Errno::SRCH),
        Err(errno) => Err(errno),
    }
}
