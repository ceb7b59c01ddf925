//! What a mounted tree is: the nodes below its root, and how to have something done at one of them.

use super::belief::{Before, Forgetting, listen};
use super::handle::{Handle, Handles};
use super::inode::{Inode, Inodes};
use super::interrupts::Interrupts;
use super::magic::Magic;
use super::maker::Device;
use super::map::KeptMap;
use super::owed::Owed;
use super::passthrough::Passing;
use super::peer::{Common, Heard, LOOK, Peer, Unheard};
use super::people::{People, means};
use super::pins::Pins;
use super::traffic::Traffic;
use super::ways::{Refused, steps};
use crate::lock;
use crate::mapped::Mapped;
use crate::message::{Answer, Attributes, Caller, Deed, Found, Object, Opened, Purpose, ROOT, Release, Step};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};
use tern_control::Place;
use tern_ids::NodeId;
use tern_node::Config;
use tern_node::map::Map;

/// How often something is done anew because the server has forgotten what it was about.
const TRIES: usize = 3;

/// A name of ours below the root: a link to a node, which may depend on who reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    /// Where the calling process runs.
    Here,
    /// Its home.
    Home,
    /// What it has chosen.
    Selected,
    /// Where it makes files now, or has made one last.
    Magic,
    /// Where it has executed its program.
    LastExec,
    /// The administration's tree, which is none of a node's.
    Admin,
    /// This node (`0`, and by other names).
    Node(NodeId),
}

/// The numbers of these links; files have others.
const NODES: u64 = 1 << 20;

impl Link {
    /// Those that go by who asks, as they are named, and the administration's tree.
    pub(crate) const NAMED: [(Self, &'static str); 6] = [
        (Self::Here, "here"),
        (Self::Home, "home"),
        (Self::Selected, "selected"),
        (Self::Magic, "magic"),
        (Self::LastExec, "lastexec"),
        (Self::Admin, ".mosix"),
    ];

    /// As an inode.
    pub(crate) fn number(self) -> u64 {
        match self {
            Self::Here => 2,
            Self::Home => 3,
            Self::Selected => 4,
            Self::Magic => 5,
            Self::LastExec => 6,
            Self::Admin => 7,
            Self::Node(node) => NODES + u64::from(node.0),
        }
    }

    /// The link of this number.
    pub(crate) fn of(number: u64) -> Option<Self> {
        let named = Self::NAMED.into_iter().map(|(link, _)| link);
        named
            .into_iter()
            .find(|link| link.number() == number)
            .or_else(|| u16::try_from(number.checked_sub(NODES)?).ok().map(|node| Self::Node(NodeId(node))))
    }
}

/// What a name below the root is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Below {
    /// A node's own number: its files.
    Node(NodeId),
    /// One of the links.
    Link(Link),
}

/// A mounted tree.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) common: Arc<Common>,
    map: KeptMap,
    pub(crate) run_dir: PathBuf,
    /// Where the server of this node's files listens.
    pub(crate) door: PathBuf,
    /// If this kernel reads and writes files of this node itself ([`super::passthrough`]): those that are closed, and may be mapped.
    pub(crate) mapped: OnceLock<Mapped<Passing>>,
    /// The file systems of which it does not.
    pub(crate) unpassed: Mutex<HashSet<u64>>,
    /// Where the administration's tree is.
    admin: Option<PathBuf>,
    /// A guest on a file's own node may have that open itself.
    pub(crate) dfsa: bool,
    /// What programs see it as.
    pub(crate) device: Device,
    magic: Magic,
    peers: Mutex<HashMap<NodeId, Arc<Peer>>>,
    pub(crate) inodes: Arc<Inodes>,
    pub(crate) forgetting: Forgetting,
    pub(crate) handles: Handles,
    pub(crate) people: People,
    pub(crate) pins: Pins,
    pub(crate) interrupts: Arc<Interrupts>,
    pub(crate) refused: Refused,
    pub(crate) traffic: Traffic,
}

/// How the kernel came to what it wants something done with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// By a file that is open, or not by any name.
    Hand,
    /// By a path that this thread has gone, of which it may have believed some.
    Path(u32),
}

impl Tree {
    pub(crate) fn new(common: Common, config: &Config, dfsa: bool) -> Self {
        let forgetting = common.forgetting.clone();
        Self {
            map: KeptMap::at(common.map.clone()),
            common: Arc::new(common),
            run_dir: config.run_dir.clone(),
            door: config.mfs_door(),
            mapped: OnceLock::new(),
            unpassed: Mutex::default(),
            admin: config.admin_tree.clone(),
            dfsa,
            device: Device::default(),
            magic: Magic::default(),
            peers: Mutex::default(),
            inodes: Arc::default(),
            forgetting,
            handles: Handles::default(),
            people: People::default(),
            pins: Pins::default(),
            interrupts: Arc::default(),
            refused: Refused::default(),
            traffic: Traffic::default(),
        }
    }

    fn me(&self) -> NodeId {
        self.common.identity.node()
    }

    /// Whether this kernel may be told of what is behind a file.
    pub(crate) fn passes(&self, inode: &Inode) -> bool {
        self.mapped.get().is_some() && inode.node() == self.me() && self.common.purpose != Purpose::Room
    }

    /// The cluster as it is now.
    pub(crate) fn map(&self) -> Arc<Map> {
        self.map.now()
    }

    /// What a name below the root means.
    pub(crate) fn below(&self, name: &OsStr) -> Option<Below> {
        let name = name.to_str()?;
        if let Some((link, _)) = self.links().find(|(_, known)| *known == name) {
            return Some(Below::Link(link));
        }
        if name == "0" {
            return Some(Below::Link(Link::Node(self.me())));
        }
        let map = self.map();
        match name.parse::<u16>() {
            Ok(number) if number.to_string() == name => {
                let node = NodeId(number);
                map.contains(node).then_some(Below::Node(node))
            }
            _ => map.find(name).map(|node| Below::Link(Link::Node(node))),
        }
    }

    /// The links below the root that have names of their own.
    pub(crate) fn links(&self) -> impl Iterator<Item = (Link, &'static str)> {
        Link::NAMED.into_iter().filter(|(link, _)| *link != Link::Admin || self.admin.is_some())
    }

    /// Where a link leads for this thread.
    ///
    /// # Errors
    /// `EIO` if that is for ternd to know, and it does not answer.
    pub(crate) fn target(&self, link: Link, tid: u32) -> Result<Vec<u8>, Errno> {
        let means = |of| means(&self.run_dir, self.me(), tid, of);
        let node = match link {
            Link::Here => means(Place::Here)?,
            // What asks the kernel here is at home here: of a process that is away, the deputy asks.
            Link::Home => self.me(),
            Link::Selected => means(Place::Selected)?,
            Link::Magic => self.magic.target(&self.run_dir, self.me(), tid)?,
            Link::LastExec => means(Place::LastExec)?,
            Link::Admin => {
                let admin = self.admin.as_ref().ok_or(Errno::NOENT)?;
                return Ok(admin.as_os_str().as_encoded_bytes().to_vec());
            }
            Link::Node(node) => node,
        };
        Ok(node.to_string().into_bytes())
    }

    /// A thread has made or opened a file of this node.
    pub(crate) fn made(&self, tid: u32, inode: &Inode) {
        self.magic.made(&self.run_dir, tid, inode.node());
    }

    pub(crate) fn peer(&self, node: NodeId) -> Arc<Peer> {
        let mut peers = lock(&self.peers);
        if let Some(peer) = peers.get(&node) {
            return peer.clone();
        }
        let peer = Arc::new(Peer::new(node, self.common.clone()));
        peers.insert(node, peer.clone());
        drop(peers);
        let (own, inodes, forgetting) = (peer.clone(), self.inodes.clone(), self.forgetting.clone());
        let (tell, tried) = std::sync::mpsc::channel();
        let porter = std::thread::Builder::new().name("owed".into());
        let told = peer.clone();
        if let Err(error) = porter.spawn(move || Owed::say(&told)) {
            tracing::warn!(%error, "no thread to tell a node what is closed here");
        }
        let ear = std::thread::Builder::new().name("ear".into());
        match ear.spawn(move || listen(&own, &inodes, &forgetting, &tell)) {
            // What is opened before it listens would not be kept for as long as it is open.
            Ok(_) => drop(tried.recv_timeout(LOOK)),
            // Without it there are no leases, and all is asked for anew.
            Err(error) => tracing::warn!(%error, "no thread to listen to a node"),
        }
        peer
    }

    /// The directory of a node, of which the kernel is told now.
    pub(crate) fn node(&self, node: NodeId, who: &Caller) -> Result<(Arc<Inode>, Attributes, Before), Errno> {
        let peer = self.peer(node);
        let before = Before::asking(&peer);
        match peer.call(who, Vec::new(), Deed::Stat { of: ROOT }, &[]) {
            Ok(Heard { answer: Answer::Attributes(attributes), .. }) => {
                let found = Found { object: ROOT, attributes };
                Ok((self.inodes.tell(node, &peer, &found, None), attributes, before))
            }
            Err(Unheard::Errno(errno)) => Err(errno),
            _ => Err(Errno::IO),
        }
    }

    /// An inode that the kernel knows.
    pub(crate) fn inode(&self, number: u64) -> Result<Arc<Inode>, Errno> {
        self.inodes.get(number).ok_or(Errno::STALE)
    }

    pub(crate) fn handle(&self, number: u64) -> Result<Arc<Handle>, Errno> {
        self.handles.get(number).ok_or(Errno::BADF)
    }

    /// Has something done with an object that was not come to by a name.
    pub(crate) fn with(
        &self,
        inode: &Arc<Inode>,
        who: &Caller,
        data: &[u8],
        deed: impl Fn(Object) -> Deed,
    ) -> Result<Heard, Errno> {
        self.with_all(By::Hand, &[inode], who, data, |objects| deed(objects[0]))
    }

    /// Has something done with an object at the end of a path.
    pub(crate) fn at_end(
        &self,
        tid: u32,
        inode: &Arc<Inode>,
        who: &Caller,
        data: &[u8],
        deed: impl Fn(Object) -> Deed,
    ) -> Result<Heard, Errno> {
        self.with_all(By::Path(tid), &[inode], who, data, |objects| deed(objects[0]))
    }

    /// Has something done with objects, all of one node.
    ///
    /// # Errors
    /// The server's, and `ESTALE` if a step of the path leads elsewhere: the kernel goes it again then.
    pub(crate) fn with_all(
        &self,
        by: By,
        inodes: &[&Arc<Inode>],
        who: &Caller,
        data: &[u8],
        deed: impl Fn(&[Object]) -> Deed,
    ) -> Result<Heard, Errno> {
        let Some(first) = inodes.first() else { return Err(Errno::INVAL) };
        if inodes.iter().any(|inode| !Arc::ptr_eq(&inode.peer, &first.peer)) {
            return Err(Errno::XDEV);
        }
        for _ in 0..TRIES {
            let objects: Vec<Object> = inodes.iter().map(|inode| inode.object()).collect();
            let deed = deed(&objects);
            let (changes, looks) = (deed.changes(), matches!(deed, Deed::Lookup { .. }));
            let on_the_way = deed.is_on_the_way();
            let names =
                if changes && self.common.purpose == Purpose::Room { deed.names() } else { Vec::new() };
            let Some(steps) = self.steps(by, on_the_way, inodes) else { return Err(self.refuse(by, looks)) };
            if changes {
                inodes.iter().for_each(|inode| inode.changes());
            }
            let done = first.peer.call(who, steps, deed, data);
            if changes {
                // Done or not, as far as we know.
                first.peer.count_change();
                for inode in inodes {
                    inode.lasting.changes();
                    inode.lasting.forget(&names);
                }
            }
            if let By::Path(tid) = by
                && !on_the_way
                && matches!(done, Ok(_) | Err(Unheard::Errno(_)))
            {
                self.refused.remove(tid);
            }
            match done {
                Ok(heard) => {
                    if changes {
                        inodes.iter().for_each(|inode| inode.unsaved.written(heard.boot));
                    }
                    return Ok(heard);
                }
                Err(Unheard::Errno(errno)) => return Err(errno),
                Err(Unheard::Elsewhere) => return Err(self.refuse(by, looks)),
                Err(Unheard::Forgotten) => {
                    for inode in inodes {
                        inode.find_again(who)?;
                    }
                }
            }
        }
        Err(Errno::STALE)
    }

    /// The steps that must stand. Who goes his path again asks at each of them.
    fn steps(&self, by: By, on_the_way: bool, inodes: &[&Arc<Inode>]) -> Option<Vec<Step>> {
        match by {
            // What he comes by on the way is looked at when he is at the end.
            By::Path(tid) if on_the_way && self.refused.goes_again(tid, &[]) => Some(Vec::new()),
            By::Path(tid) if !on_the_way && self.refused.goes_again(tid, inodes) => Some(Vec::new()),
            By::Path(_) => steps(inodes, self.forgetting.said_from()),
            By::Hand => Some(Vec::new()),
        }
    }

    fn refuse(&self, by: By, looks: bool) -> Errno {
        // So that no step is said again that is known to be wrong.
        self.forgetting.forget_names();
        if let By::Path(tid) = by
            && !looks
        {
            self.refused.at_end(tid);
        }
        Errno::STALE
    }

    /// Has something done with an open file.
    pub(crate) fn with_open(
        &self,
        handle: &Handle,
        who: &Caller,
        data: &[u8],
        deed: impl Fn(Opened) -> Deed,
    ) -> Result<Heard, Errno> {
        self.with_all_open([handle], who, data, |[opened]| deed(opened))
    }

    /// The same with several open files of one node, of which only the first may be changed.
    pub(crate) fn with_all_open<const N: usize>(
        &self,
        handles: [&Handle; N],
        who: &Caller,
        data: &[u8],
        deed: impl Fn([Opened; N]) -> Deed,
    ) -> Result<Heard, Errno> {
        let handle = handles[0];
        for _ in 0..TRIES {
            let opened = handles.map(Handle::opened);
            let deed = deed(opened);
            let changes = deed.changes();
            let done = handle.inode.peer.call(who, Vec::new(), deed, data);
            if changes {
                // What was asked for meanwhile may be of before it.
                handle.inode.changes();
                handle.inode.peer.count_change();
            }
            match done {
                Ok(heard) => {
                    if changes {
                        handle.inode.unsaved.written(heard.boot);
                    }
                    return Ok(heard);
                }
                Err(Unheard::Errno(errno)) => return Err(errno),
                Err(Unheard::Elsewhere) => return Err(Errno::STALE),
                // Which of them it is that the server holds no more it does not say.
                Err(Unheard::Forgotten) => {
                    for (handle, was) in handles.iter().zip(opened) {
                        self.open_again(handle, was)?;
                    }
                }
            }
        }
        Err(Errno::STALE)
    }

    /// Opens a file again that the server holds no more, for whoever opened it.
    ///
    /// # Errors
    /// `ESTALE` if it is gone, or it was locked here, which somebody else may have had meanwhile; `EIO` if it is open for
    /// writing, and what was written since may have gone with the node's memory.
    pub(crate) fn open_again(&self, handle: &Handle, was: Opened) -> Result<(), Errno> {
        let mut opened = lock(&handle.opened);
        if *opened != was {
            return Ok(());
        }
        if handle.inode.owners.have_some() || handle.is_locked.load(Ordering::Acquire) {
            return Err(Errno::STALE);
        }
        let flags = handle.flags & !(OFlags::CREATE | OFlags::EXCL | OFlags::TRUNC).bits();
        let heard =
            self.with(&handle.inode, &handle.opener, &[], |of| Deed::Open { of, flags, content: false })?;
        let Answer::Opened(new, _) = heard.answer else { return Err(Errno::IO) };
        let writes = OFlags::from_bits_retain(handle.flags) & OFlags::ACCMODE != OFlags::RDONLY;
        if writes && handle.has_lost(heard.boot) {
            handle.inode.peer.owed.release(Release::File(new), true);
            return Err(Errno::IO);
        }
        *opened = new;
        drop(opened);
        drop(lock(&handle.kept).take());
        // It may have been something else that was not held.
        handle.inode.peer.owed.release(Release::File(was), true);
        Ok(())
    }

    /// Opens for itself what several have open as one, since it is to have a lock.
    ///
    /// # Errors
    /// The server's.
    pub(crate) fn have_own(&self, handle: &Handle) -> Result<(), Errno> {
        let mut opened = lock(&handle.opened);
        if lock(&handle.kept).is_none() {
            return Ok(());
        }
        let flags = handle.flags;
        let heard =
            self.with(&handle.inode, &handle.opener, &[], |of| Deed::Open { of, flags, content: false })?;
        let Answer::Opened(new, _) = heard.answer else { return Err(Errno::IO) };
        *opened = new;
        drop(opened);
        drop(lock(&handle.kept).take());
        Ok(())
    }

    /// All that was done on the nodes of this tree until now is seen in it from now on.
    ///
    /// # Errors
    /// `EIO` if one does not answer.
    pub(crate) fn catch_up(&self) -> Result<(), Errno> {
        let peers: Vec<_> = lock(&self.peers).values().cloned().collect();
        peers.iter().filter(|peer| peer.is_lasting()).try_for_each(|peer| peer.catches_up())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_have_numbers_of_their_own() {
        let named = Link::NAMED.into_iter().map(|(link, _)| link);
        for link in named.chain([Link::Node(NodeId(1)), Link::Node(NodeId(u16::MAX))]) {
            assert_eq!(Link::of(link.number()), Some(link));
        }
        for number in [0, 1, 8, NODES - 1, NODES + 65_536, 1 << 61] {
            assert_eq!(Link::of(number), None, "{number}");
        }
    }
}
