//! A mounted tree: the nodes below its root, and calls to their servers.

use crate::client::cache::dentries::dentry_checks;
use crate::client::cache::invalidator::Invalidator;
use crate::client::cache::path_retry::PathRetries;
use crate::client::cache::pins::Pins;
use crate::client::cache::validity::ValidityStamp;
use crate::client::caller::create_intent::TreeDevice;
use crate::client::caller::magic::MagicLink;
use crate::client::caller::{CallerCache, has_same_root, node_meant_by};
use crate::client::cluster_map::CachedMap;
use crate::client::connection::peer::callback::run_callback_channel;
use crate::client::connection::peer::{CallError, MountContext, PROBE_INTERVAL, Peer, Response, WhenLost};
use crate::client::connection::pending_release::PendingReleases;
use crate::client::fuse::handle::{Handle, HandleTable};
use crate::client::fuse::inode::{Inode, InodeTable};
use crate::client::fuse::interrupts::Interrupts;
use crate::client::root_links::{RootLink, RootName};
use crate::client::traffic::Traffic;
use crate::lock;
use crate::message::{Attributes, DentryCheck, FileReply, Found, Object, Op, OpenId, Purpose, ROOT, Release};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use tern_control::SymbolicNode;
use tern_ids::{Credentials, NodeId};
use tern_node::Config;
use tern_node::map::Map;

/// Number of attempts for a call whose objects or open files the server has lost.
const MAX_ATTEMPTS: usize = 3;

/// A mounted tree.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) context: Arc<MountContext>,
    map: CachedMap,
    pub(crate) run_dir: PathBuf,
    /// Where the administration tree is mounted.
    admin: Option<PathBuf>,
    /// A guest on a file's own node may open it directly.
    pub(crate) dfsa: bool,
    /// The tree's device as programs see it.
    pub(crate) device: TreeDevice,
    magic_link: MagicLink,
    peers: Mutex<HashMap<NodeId, Arc<Peer>>>,
    pub(crate) inodes: Arc<InodeTable>,
    pub(crate) invalidator: Invalidator,
    pub(crate) handles: HandleTable,
    pub(crate) callers: CallerCache,
    pub(crate) pins: Pins,
    pub(crate) interrupts: Arc<Interrupts>,
    pub(crate) path_retries: PathRetries,
    pub(crate) traffic: Traffic,
}

/// How the kernel reached the objects of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Via {
    /// Through an open file, or without any name.
    OpenFile,
    /// By a path that this thread has walked, partly from the kernel's dentries.
    Path(u32),
}

impl Tree {
    pub(crate) fn new(context: MountContext, config: &Config, dfsa: bool) -> Self {
        let invalidator = context.invalidator.clone();
        Self {
            map: CachedMap::new(context.map.clone()),
            context: Arc::new(context),
            run_dir: config.run_dir.clone(),
            admin: config.admin_tree.clone(),
            dfsa,
            device: TreeDevice::default(),
            magic_link: MagicLink::default(),
            peers: Mutex::default(),
            inodes: Arc::default(),
            invalidator,
            handles: HandleTable::default(),
            callers: CallerCache::default(),
            pins: Pins::default(),
            interrupts: Arc::default(),
            path_retries: PathRetries::default(),
            traffic: Traffic::default(),
        }
    }

    fn local_node(&self) -> NodeId {
        self.context.identity.node()
    }

    /// Whether this node's own files are a link to `/`, so that each file has one device and inode
    /// number under all its names (docs/design/own-files.md). In the tree of a container, `/` is
    /// another node's.
    fn own_files_are_native(&self) -> bool {
        self.context.purpose == Purpose::All
    }

    /// The current cluster map.
    pub(crate) fn map(&self) -> Arc<Map> {
        self.map.current()
    }

    /// Resolves a name in the root.
    pub(crate) fn resolve_root_name(&self, name: &OsStr) -> Option<RootName> {
        let name = name.to_str()?;
        if let Some((link, _)) = self.links().find(|(_, known)| *known == name) {
            return Some(RootName::Link(link));
        }
        if name == "0" {
            return Some(RootName::Link(RootLink::Node(self.local_node())));
        }
        let map = self.map();
        match name.parse::<u16>() {
            Ok(number) if number.to_string() == name => {
                let node = NodeId(number);
                map.contains(node).then(|| self.root_entry(node))
            }
            _ => map.find(name).map(|node| RootName::Link(RootLink::Node(node))),
        }
    }

    /// The meaning of a node's number in the root.
    pub(crate) fn root_entry(&self, node: NodeId) -> RootName {
        if node == self.local_node() && self.own_files_are_native() {
            RootName::Link(RootLink::OwnFiles)
        } else {
            RootName::Node(node)
        }
    }

    /// The links in the root that have fixed names.
    pub(crate) fn links(&self) -> impl Iterator<Item = (RootLink, &'static str)> {
        RootLink::NAMED.into_iter().filter(|(link, _)| *link != RootLink::Admin || self.admin.is_some())
    }

    /// The target of a link for this thread.
    ///
    /// # Errors
    /// `EIO` if ternd is needed and does not respond. `EACCES` for this node's own files if the
    /// thread has another root directory, where `/` would lead to other files.
    pub(crate) fn link_target(&self, link: RootLink, tid: u32) -> Result<Vec<u8>, Errno> {
        let node_meant_by = |of| node_meant_by(&self.run_dir, self.local_node(), tid, of);
        let node = match link {
            RootLink::Here => node_meant_by(SymbolicNode::Here)?,
            // The home of a process that calls this kernel is this node; for a process that is
            // away, its deputy makes the call.
            RootLink::Home => self.local_node(),
            RootLink::Selected => node_meant_by(SymbolicNode::Selected)?,
            RootLink::Magic => {
                let is_native = self.own_files_are_native();
                self.magic_link.target(&self.run_dir, self.local_node(), tid, is_native)?
            }
            RootLink::LastExec => node_meant_by(SymbolicNode::LastExec)?,
            RootLink::Admin => {
                let admin = self.admin.as_ref().ok_or(Errno::NOENT)?;
                return Ok(admin.as_os_str().as_encoded_bytes().to_vec());
            }
            RootLink::OwnFiles if has_same_root(tid) => return Ok(b"/".to_vec()),
            RootLink::OwnFiles => return Err(Errno::ACCESS),
            RootLink::Node(node) => node,
        };
        Ok(node.to_string().into_bytes())
    }

    /// Records for the `magic` link that a thread has created or opened this file.
    pub(crate) fn note_created(&self, tid: u32, inode: &Inode) {
        self.magic_link.note_created(&self.run_dir, tid, inode.node());
    }

    pub(crate) fn peer(&self, node: NodeId) -> Arc<Peer> {
        let mut peers = lock(&self.peers);
        if let Some(peer) = peers.get(&node) {
            return peer.clone();
        }
        let peer = Arc::new(Peer::new(node, self.context.clone()));
        peers.insert(node, peer.clone());
        drop(peers);
        let (recalled, inodes, invalidator) = (peer.clone(), self.inodes.clone(), self.invalidator.clone());
        let (tried, first_attempt) = std::sync::mpsc::channel();
        let releases = std::thread::Builder::new().name("releases".into());
        let releasing = peer.clone();
        if let Err(error) = releases.spawn(move || PendingReleases::run(&releasing)) {
            tracing::warn!(%error, "cannot start a thread to send releases; they are sent with other requests");
        }
        let callbacks = std::thread::Builder::new().name("callback".into());
        match callbacks.spawn(move || run_callback_channel(&recalled, &inodes, &invalidator, &tried)) {
            // Wait for the first attempt to connect: files opened before that get no lease.
            Ok(_) => drop(first_attempt.recv_timeout(PROBE_INTERVAL)),
            // Without it there are no leases, and nothing is cached.
            Err(error) => {
                tracing::warn!(%error, "cannot start the callback thread; nothing of this node is cached");
            }
        }
        peer
    }

    /// The root directory of a node; counts a lookup by the kernel.
    pub(crate) fn node_root(
        &self,
        node: NodeId,
        caller: &Credentials,
    ) -> Result<(Arc<Inode>, Attributes, ValidityStamp), Errno> {
        let peer = self.peer(node);
        let stamp = ValidityStamp::now(&peer);
        match peer.call(caller, Vec::new(), Op::GetAttr { of: ROOT }, &[]) {
            Ok(Response { reply: FileReply::Attributes(attributes), .. }) => {
                let found = Found { object: ROOT, attributes };
                Ok((self.inodes.add_lookup(node, &peer, &found, None), attributes, stamp))
            }
            Err(CallError::Errno(errno)) => Err(errno),
            _ => Err(Errno::IO),
        }
    }

    /// An inode that the kernel has.
    pub(crate) fn inode(&self, number: u64) -> Result<Arc<Inode>, Errno> {
        self.inodes.get(number).ok_or(Errno::STALE)
    }

    pub(crate) fn handle(&self, number: u64) -> Result<Arc<Handle>, Errno> {
        self.handles.get(number).ok_or(Errno::BADF)
    }

    /// Calls an operation on an object that was not reached by name.
    pub(crate) fn call_without_path(
        &self,
        inode: &Arc<Inode>,
        caller: &Credentials,
        data: &[u8],
        op: impl Fn(Object) -> Op,
    ) -> Result<Response, Errno> {
        self.call_on_all(Via::OpenFile, &[inode], caller, data, |objects| op(objects[0]))
    }

    /// Calls an operation on an object at the end of a path.
    pub(crate) fn call_at_path_end(
        &self,
        tid: u32,
        inode: &Arc<Inode>,
        caller: &Credentials,
        data: &[u8],
        op: impl Fn(Object) -> Op,
    ) -> Result<Response, Errno> {
        self.call_on_all(Via::Path(tid), &[inode], caller, data, |objects| op(objects[0]))
    }

    /// Calls an operation on objects of one node.
    ///
    /// # Errors
    /// The server's; `EXDEV` if the objects are on several nodes; `ESTALE` if a dentry on the path
    /// is stale, whereupon the kernel walks the path again.
    pub(crate) fn call_on_all(
        &self,
        via: Via,
        inodes: &[&Arc<Inode>],
        caller: &Credentials,
        data: &[u8],
        op: impl Fn(&[Object]) -> Op,
    ) -> Result<Response, Errno> {
        let Some(first) = inodes.first() else { return Err(Errno::INVAL) };
        if inodes.iter().any(|inode| !Arc::ptr_eq(&inode.peer, &first.peer)) {
            return Err(Errno::XDEV);
        }
        for _ in 0..MAX_ATTEMPTS {
            let objects: Vec<Object> = inodes.iter().map(|inode| inode.object()).collect();
            let op = op(&objects);
            let (is_change, is_lookup) = (op.modifies(), matches!(op, Op::Lookup { .. }));
            let is_mid_path = op.is_path_walk();
            let names = if is_change && self.context.purpose == Purpose::Container {
                op.changed_names()
            } else {
                Vec::new()
            };
            let Some(checks) = self.checks_for(via, is_mid_path, inodes) else {
                return Err(self.reject_stale_path(via, is_lookup));
            };
            if is_change {
                inodes.iter().for_each(|inode| inode.note_local_change());
            }
            let done = first.peer.call(caller, checks, op, data);
            if is_change {
                // Counted also after an error, since the operation may have been performed.
                first.peer.count_local_change();
                for inode in inodes {
                    inode.renewable_cache.note_local_change();
                    inode.renewable_cache.invalidate_names(&names);
                }
            }
            if let Via::Path(tid) = via
                && !is_mid_path
                && matches!(done, Ok(_) | Err(CallError::Errno(_)))
            {
                self.path_retries.finish(tid);
            }
            match done {
                Ok(response) => {
                    if is_change {
                        inodes.iter().for_each(|inode| inode.unsynced.note_write(response.boot));
                    }
                    return Ok(response);
                }
                Err(CallError::Errno(errno)) => return Err(errno),
                Err(CallError::StalePath) => return Err(self.reject_stale_path(via, is_lookup)),
                Err(CallError::Expired) => {
                    for inode in inodes {
                        inode.look_up_again(caller)?;
                    }
                }
            }
        }
        Err(Errno::STALE)
    }

    /// The dentry checks to send; `None` if they do not fit into a request. While the thread walks
    /// its path again no check is needed, since the kernel looks up each component then.
    fn checks_for(&self, via: Via, is_mid_path: bool, inodes: &[&Arc<Inode>]) -> Option<Vec<DentryCheck>> {
        match via {
            // In the middle of a path, these inodes need not have been looked up in the second
            // walk: the operation at the path's end requires that.
            Via::Path(tid) if is_mid_path && self.path_retries.is_retrying_to(tid, &[]) => Some(Vec::new()),
            Via::Path(tid) if !is_mid_path && self.path_retries.is_retrying_to(tid, inodes) => {
                Some(Vec::new())
            }
            Via::Path(_) => dentry_checks(inodes, self.invalidator.first_epoch_to_check()),
            Via::OpenFile => Some(Vec::new()),
        }
    }

    fn reject_stale_path(&self, via: Via, is_lookup: bool) -> Errno {
        // Invalidated so that no later request sends the stale dentry again.
        self.invalidator.invalidate_dentries();
        if let Via::Path(tid) = via
            && !is_lookup
        {
            self.path_retries.fail_at_end(tid);
        }
        Errno::STALE
    }

    /// Calls an operation on an open file.
    pub(crate) fn call_on_open(
        &self,
        handle: &Handle,
        caller: &Credentials,
        data: &[u8],
        op: impl Fn(OpenId) -> Op,
    ) -> Result<Response, Errno> {
        self.call_on_all_open([handle], caller, data, |[opened]| op(opened))
    }

    /// Calls an operation on several open files of one node, of which only the first may be
    /// changed.
    pub(crate) fn call_on_all_open<const N: usize>(
        &self,
        handles: [&Handle; N],
        caller: &Credentials,
        data: &[u8],
        op: impl Fn([OpenId; N]) -> Op,
    ) -> Result<Response, Errno> {
        let handle = handles[0];
        for _ in 0..MAX_ATTEMPTS {
            let opened = handles.map(Handle::server_file);
            let op = op(opened);
            let is_change = op.modifies();
            let done = handle.inode.peer.call(caller, Vec::new(), op, data);
            if is_change {
                // Replies to requests sent meanwhile may be older than the change.
                handle.inode.note_local_change();
                handle.inode.peer.count_local_change();
            }
            match done {
                Ok(response) => {
                    if is_change {
                        handle.inode.unsynced.note_write(response.boot);
                    }
                    return Ok(response);
                }
                Err(CallError::Errno(errno)) => return Err(errno),
                Err(CallError::StalePath) => return Err(Errno::STALE),
                // The server does not say which of them it has lost.
                Err(CallError::Expired) => {
                    for (handle, was) in handles.iter().zip(opened) {
                        self.reopen(handle, was)?;
                    }
                }
            }
        }
        Err(Errno::STALE)
    }

    /// Opens a file again that the server has lost, with the opener's credentials.
    ///
    /// # Errors
    /// `ESTALE` if it is gone, or was locked here (another program may have held the lock
    /// meanwhile); `EIO` if it is open for writing, and unsynced writes may have been lost with the
    /// node's memory.
    pub(crate) fn reopen(&self, handle: &Handle, was: OpenId) -> Result<(), Errno> {
        let mut opened = lock(&handle.server_file);
        if *opened != was {
            return Ok(());
        }
        if handle.inode.lock_owners.any_has_lock() || handle.has_flock.load(Ordering::Acquire) {
            return Err(Errno::STALE);
        }
        let flags = handle.flags & !(OFlags::CREATE | OFlags::EXCL | OFlags::TRUNC).bits();
        let response = self.call_without_path(&handle.inode, &handle.opener, &[], |of| Op::Open {
            of,
            flags,
            content: false,
        })?;
        let FileReply::FileOpened(new, _) = response.reply else { return Err(Errno::IO) };
        let writes = OFlags::from_bits_retain(handle.flags) & OFlags::ACCMODE != OFlags::RDONLY;
        if writes && handle.has_lost_writes(response.boot) {
            handle.inode.peer.pending_releases.release(Release::File(new), true);
            return Err(Errno::IO);
        }
        *opened = new;
        drop(opened);
        drop(lock(&handle.cached_open).take());
        // The server may have lost the object or another file, and still hold this one.
        handle.inode.peer.pending_releases.release(Release::File(was), true);
        Ok(())
    }

    /// Replaces the open file that a handle shares with others by one of its own, since a lock is
    /// requested on the handle.
    ///
    /// # Errors
    /// The server's.
    pub(crate) fn open_privately(&self, handle: &Handle) -> Result<(), Errno> {
        let mut opened = lock(&handle.server_file);
        if lock(&handle.cached_open).is_none() {
            return Ok(());
        }
        let flags = handle.flags;
        let response = self.call_without_path(&handle.inode, &handle.opener, &[], |of| Op::Open {
            of,
            flags,
            content: false,
        })?;
        let FileReply::FileOpened(new, _) = response.reply else { return Err(Errno::IO) };
        *opened = new;
        drop(opened);
        drop(lock(&handle.cached_open).take());
        Ok(())
    }

    /// Renews all renewable leases. When this returns, the tree shows all changes made on its nodes
    /// before the call. A node that counts as lost is tried again: the caller has just received
    /// something from that node, so it is up, even if this tree has not noticed yet.
    ///
    /// # Errors
    /// `EIO` if a node does not respond within the timeout.
    pub(crate) fn renew_all_leases(&self) -> Result<(), Errno> {
        let peers: Vec<_> = lock(&self.peers).values().cloned().collect();
        let mut renewable = peers.iter().filter(|peer| peer.uses_renewable_leases());
        renewable.try_for_each(|peer| peer.renew_leases(WhenLost::Probe))
    }
}
