//! What is done for each of the kernel's asks, without fuser's replies.

use super::attributes::{file, kind, ours};
use super::belief::{Before, Version};
use super::handle::Handle;
use super::inode::Inode;
use super::peer::Heard;
use super::tree::{Below, Link, Tree};
use crate::lock;
use crate::message::{
    Answer, Attributes, Caller, Change, Deed, Entry, Found, MOST_DATA, Name, Object, Release,
};
use fuser::{FileAttr, FileHandle, FileType, FopenFlags, Generation, INodeNo, ReplyDirectory, Request};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};
use tern_wire::limits::MOST_PAYLOAD;

/// How much of a directory is read at once.
const DIRECTORY: u32 = 64 << 10;

/// The most bytes that a deed on an open file takes, and its caller without his groups.
const MOST_WORDS: usize = 128;

/// The number of the tree's own root.
pub(crate) const ROOT: u64 = 1;

/// The tree as fuser calls it.
#[derive(Debug, Clone)]
pub(crate) struct Mounted(pub(crate) Arc<Tree>);

/// What the kernel is told of a file.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) attr: FileAttr,
    pub(crate) generation: Generation,
    /// How long it holds, in milliseconds, and since when; nothing of what is ours.
    lease: Option<(Before, u32)>,
    forgets: Forgets,
}

/// Whether the kernel forgets a file's content when it is told of that file.
#[derive(Debug)]
enum Forgets {
    /// It has only what is right, or nobody looks at it.
    Nothing,
    /// It may be wrong, and stays: so nothing of what is told now may be believed later.
    Later,
    /// It drops all pages.
    Now(Arc<Inode>, Option<Version>),
}

impl Told {
    fn ours(attr: FileAttr) -> Self {
        Self { attr, generation: Generation(0), lease: None, forgets: Forgets::Nothing }
    }

    /// Passes it on, with how long the kernel may believe it.
    pub(crate) fn pass(&self, pass: impl FnOnce(Duration)) {
        let Some((before, lease)) = &self.lease else { return pass(Duration::ZERO) };
        before.pass(*lease, |left| match &self.forgets {
            Forgets::Nothing => pass(left),
            Forgets::Later => pass(Duration::ZERO),
            Forgets::Now(inode, version) => {
                inode.content.becomes(if left.is_zero() { None } else { *version });
                pass(Duration::ZERO);
            }
        });
    }
}

/// A file that was opened: its handle, and how it behaves.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) handle: u64,
    inode: Arc<Inode>,
    is: Attributes,
    /// The kernel may keep of its content.
    keeps: bool,
    before: Before,
}

impl Open {
    /// Passes it on. What is believed by nobody goes to its node at each call; anything else may be kept by the kernel, and
    /// what it has already is used if it is of the same version, and dropped else.
    pub(crate) fn pass(&self, pass: impl FnOnce(FopenFlags)) {
        self.before.pass(self.is.lease, |left| {
            if !self.keeps || left.is_zero() {
                self.inode.content.doubt();
                pass(FopenFlags::FOPEN_DIRECT_IO);
            } else {
                let (content, version) = (&self.inode.content, Version::of(&self.is));
                let is_good = content.is_only(version);
                content.becomes(version);
                pass(if is_good { FopenFlags::FOPEN_KEEP_CACHE } else { FopenFlags::empty() });
            }
        });
    }
}

pub(crate) type Outcome<T> = Result<T, Errno>;

impl Mounted {
    pub(crate) fn who(&self, request: &Request) -> Caller {
        self.0.people.caller(request.pid(), request.uid(), request.gid())
    }

    /// Who writes; the kernel does not say it of what it writes by itself, which is its opener's then.
    pub(crate) fn writer(&self, request: &Request, handle: &Handle) -> Caller {
        if request.uid() == u32::MAX || request.pid() == 0 {
            handle.opener.clone()
        } else {
            self.who(request)
        }
    }

    /// An inode that is a file's: in the root, and of its links, nothing can be done.
    pub(crate) fn inode(&self, number: INodeNo) -> Outcome<Arc<Inode>> {
        if is_ours(number) {
            return Err(Errno::PERM);
        }
        self.0.inode(number.0)
    }

    pub(crate) fn handle(&self, number: FileHandle) -> Outcome<Arc<Handle>> {
        self.0.handle(number.0)
    }

    pub(crate) fn look(&self, request: &Request, parent: INodeNo, name: &OsStr) -> Outcome<Told> {
        let who = self.who(request);
        if parent.0 != ROOT {
            let dir = self.inode(parent)?;
            let before = Before::asking(&dir.peer);
            let heard = self.0.with(&dir, &who, &[], |dir| Deed::Lookup { dir, name: Name::from(name) })?;
            return self.tell(&dir, name, &heard.answer, before);
        }
        match self.0.below(name).ok_or(Errno::NOENT)? {
            Below::Link(link) => Ok(Told::ours(of_link(link))),
            Below::Node(node) => {
                let (inode, attributes, before) = self.0.node(node, &who)?;
                Ok(known(inode, &attributes, before, false))
            }
        }
    }

    /// Tells the kernel of what has this name.
    pub(crate) fn tell(
        &self,
        dir: &Arc<Inode>,
        name: &OsStr,
        answer: &Answer,
        before: Before,
    ) -> Outcome<Told> {
        let (Answer::Found(found) | Answer::Created(found, _)) = answer else { return Err(Errno::IO) };
        let inode = self.told(dir, name, found);
        Ok(known(inode, &found.attributes, before, false))
    }

    pub(crate) fn told(&self, dir: &Arc<Inode>, name: &OsStr, found: &Found) -> Arc<Inode> {
        self.0.inodes.tell(dir.node(), &dir.peer, found, Some((dir, name)))
    }

    pub(crate) fn make(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        deed: impl Fn(Object, Name) -> Deed,
    ) -> Outcome<Told> {
        let dir = self.inode(parent)?;
        let before = Before::asking(&dir.peer);
        let heard = self.0.with(&dir, &self.who(request), &[], |object| deed(object, Name::from(name)))?;
        self.tell(&dir, name, &heard.answer, before)
    }

    /// What a file is like, for who is about to read its content, or not.
    pub(crate) fn attributes(&self, request: &Request, number: INodeNo, reading: bool) -> Outcome<Told> {
        if number.0 == ROOT {
            return Ok(Told::ours(ours(ROOT, FileType::Directory, 0o755, 0)));
        }
        if let Some(link) = Link::of(number.0) {
            return Ok(Told::ours(of_link(link)));
        }
        let inode = self.inode(number)?;
        let before = Before::asking(&inode.peer);
        let heard = self.0.with(&inode, &self.who(request), &[], |of| Deed::Stat { of })?;
        let Answer::Attributes(attributes) = heard.answer else { return Err(Errno::IO) };
        Ok(known(inode, &attributes, before, reading))
    }

    pub(crate) fn set(
        &self,
        request: &Request,
        number: INodeNo,
        handle: Option<FileHandle>,
        change: &Change,
    ) -> Outcome<FileAttr> {
        let inode = self.inode(number)?;
        let who = self.who(request);
        let handle = handle.and_then(|handle| self.handle(handle).ok());
        let is: Attributes = match &handle {
            // The file's own object is found again on the way, if the server has forgotten both.
            Some(handle) if change.size.is_some() => {
                self.0.with(&inode, &who, &[], |of| Deed::Stat { of })?;
                let deed =
                    |opened| Deed::Set { of: inode.object(), opened: Some(opened), change: change.clone() };
                attributes_in(&self.0.with_open(handle, &who, &[], deed)?.answer)?
            }
            _ => {
                let deed = |of| Deed::Set { of, opened: None, change: change.clone() };
                attributes_in(&self.0.with(&inode, &who, &[], deed)?.answer)?
            }
        };
        // The kernel sets its own size by it, and looks again before it believes anything else.
        inode.content.doubt();
        Ok(file(&inode, &is))
    }

    pub(crate) fn link_target(&self, request: &Request, number: INodeNo) -> Outcome<Vec<u8>> {
        if let Some(link) = Link::of(number.0) {
            return self.0.target(link, request.pid());
        }
        let inode = self.inode(number)?;
        Ok(self.0.with(&inode, &self.who(request), &[], |of| Deed::ReadLink { of })?.data().to_vec())
    }

    pub(crate) fn remove(
        &self,
        request: &Request,
        parent: INodeNo,
        deed: impl Fn(Object) -> Deed,
    ) -> Outcome<()> {
        let dir = self.inode(parent)?;
        self.0.with(&dir, &self.who(request), &[], deed).map(drop)
    }

    pub(crate) fn open_file(&self, request: &Request, number: INodeNo, flags: u32) -> Outcome<Open> {
        let who = self.who(request);
        let inode = self.inode(number)?;
        let before = Before::asking(&inode.peer);
        let heard = self.0.with(&inode, &who, &[], |of| Deed::Open { of, flags })?;
        let Answer::Opened(opened, is) = heard.answer else { return Err(Errno::IO) };
        self.0.made(request.pid(), &inode);
        let handle = Handle::new(inode, who, flags, opened, heard.boot);
        Ok(self.opened(handle, is, before))
    }

    pub(crate) fn opened(&self, handle: Handle, is: Attributes, before: Before) -> Open {
        let (inode, flags) = (handle.inode.clone(), OFlags::from_bits_retain(handle.flags));
        let handle = self.0.handles.keep(handle);
        // What is only written, or appended to, is never kept.
        let reads = flags & OFlags::ACCMODE != OFlags::WRONLY && !flags.contains(OFlags::APPEND);
        let keeps = reads && is.lease > 0;
        Open { handle, inode, is, keeps, before }
    }

    pub(crate) fn close(&self, number: FileHandle) {
        let Some(handle) = self.0.handles.remove(number.0) else { return };
        handle.inode.peer.release(Release::File(handle.opened()));
    }

    pub(crate) fn read_at(&self, handle: FileHandle, at: u64, length: u32) -> Outcome<Heard> {
        let handle = self.handle(handle)?;
        self.0.with_open(&handle, &handle.opener, &[], |opened| Deed::Read { opened, at, length })
    }

    pub(crate) fn write_at(
        &self,
        request: &Request,
        handle: FileHandle,
        at: u64,
        data: &[u8],
    ) -> Outcome<u32> {
        let handle = self.handle(handle)?;
        let who = self.writer(request, &handle);
        let append = OFlags::from_bits_retain(handle.flags).contains(OFlags::APPEND);
        let mut done = 0;
        // One piece, but for who has very many groups. To be told of a rest is nothing to the kernel where it writes by itself.
        for piece in data.chunks(most_data(&who)) {
            let at = at + done;
            let heard =
                self.0.with_open(&handle, &who, piece, |opened| Deed::Write { opened, at, append })?;
            handle.inode.content.doubt();
            let count = count_in(&heard.answer, piece.len() as u64)?;
            done += count;
            if count < piece.len() as u64 {
                break;
            }
        }
        u32::try_from(done).map_err(|_large| Errno::IO)
    }

    /// A copy within one node; the kernel reads and writes itself where it cannot be (`EXDEV`).
    pub(crate) fn copy(
        &self,
        request: &Request,
        from: (FileHandle, u64),
        to: (FileHandle, u64),
        length: u64,
    ) -> Outcome<u32> {
        let ((from, at), (to, to_at)) = ((self.handle(from.0)?, from.1), (self.handle(to.0)?, to.1));
        if !Arc::ptr_eq(&from.inode.peer, &to.inode.peer) {
            return Err(Errno::XDEV);
        }
        // What is answered has 32 bits.
        let length = length.min(1 << 30);
        let who = self.writer(request, &to);
        let deed = |to| Deed::Copy { from: from.opened(), at, to, to_at, length };
        let count = count_in(&self.0.with_open(&to, &who, &[], deed)?.answer, length)?;
        u32::try_from(count).map_err(|_large| Errno::IO)
    }

    pub(crate) fn sync(&self, handle: FileHandle, data_only: bool) -> Outcome<()> {
        let handle = self.handle(handle)?;
        let unsaved = &handle.inode.unsaved;
        // What is written while it goes on may be saved or not.
        let writes = unsaved.writes();
        let deed = |opened| Deed::Sync { opened, data_only };
        let heard = self.0.with_open(&handle, &handle.opener, &[], deed)?;
        unsaved.saved(writes, heard.boot);
        if handle.has_lost(heard.boot) { Err(Errno::IO) } else { Ok(()) }
    }

    /// What an entry is, of which the file system did not say it.
    pub(crate) fn kind_of(&self, handle: &Handle, entry: &Entry) -> FileType {
        let deed = |dir| Deed::Lookup { dir, name: entry.name.clone() };
        let heard = self.0.with(&handle.inode, &handle.opener, &[], deed);
        let Ok(Answer::Found(found)) = heard.map(|heard| heard.answer) else { return FileType::RegularFile };
        handle.inode.peer.forget(found.object, 1);
        kind(found.attributes.mode).unwrap_or(FileType::RegularFile)
    }

    /// Entries from this place on; some that were read before, if they are those.
    pub(crate) fn list(&self, handle: FileHandle, after: u64, reply: &mut ReplyDirectory) -> Outcome<()> {
        let handle = self.handle(handle)?;
        let mut ahead = lock(&handle.ahead);
        if after == 0 || ahead.0 != after || ahead.1.is_empty() {
            let deed = |opened| Deed::ReadDir { opened, after, most: DIRECTORY };
            let heard = self.0.with_open(&handle, &handle.opener, &[], deed)?;
            let Answer::Entries(entries) = heard.answer else { return Err(Errno::IO) };
            *ahead = (after, entries.into());
        }
        while let Some(entry) = ahead.1.front() {
            let number = handle.inode.number_of_entry(entry.inode);
            let kind = kind(entry.kind).unwrap_or_else(|| self.kind_of(&handle, entry));
            if reply.add(INodeNo(number), entry.after, kind, entry.name.as_os()) {
                break;
            }
            ahead.0 = entry.after;
            ahead.1.pop_front();
        }
        Ok(())
    }

    /// The root's entries: the nodes, and who is where.
    pub(crate) fn list_root(&self, after: u64, reply: &mut ReplyDirectory) {
        let links = self.0.links().map(|(link, name)| (link.number(), FileType::Symlink, name.to_owned()));
        let own = [".", ".."].map(|name| (ROOT, FileType::Directory, name.to_owned()));
        let nodes = self.0.map().nodes().into_iter();
        // Its number is the server's to say, which a list is not worth asking for.
        let nodes = nodes.map(|node| (Link::Node(node).number(), FileType::Directory, node.to_string()));
        let all = own.into_iter().chain(links).chain(nodes);
        for ((number, kind, name), next) in all.zip(1..).skip(usize::try_from(after).unwrap_or(usize::MAX)) {
            if reply.add(INodeNo(number), next, kind, name) {
                break;
            }
        }
    }

    pub(crate) fn attribute(
        &self,
        request: &Request,
        number: INodeNo,
        deed: impl Fn(Object) -> Deed,
    ) -> Outcome<Vec<u8>> {
        if is_ours(number) {
            return Err(Errno::NODATA);
        }
        let inode = self.inode(number)?;
        Ok(self.0.with(&inode, &self.who(request), &[], deed)?.data().to_vec())
    }
}

/// What is said of a file. If the kernel may have of its content what is of another version, it forgets that before it reads; who
/// only looks is told the truth.
fn known(inode: Arc<Inode>, is: &Attributes, before: Before, reading: bool) -> Told {
    let version = if is.lease > 0 { Version::of(is) } else { None };
    let (mut attr, generation) = (file(&inode, is), Generation(inode.generation()));
    let forgets = if !inode.content.is_open() || inode.content.is_only(version) {
        Forgets::Nothing
    } else if reading {
        // The kernel goes by mtime and size only, and both can be what they were: so it is told another mtime. Nobody sees that,
        // since it does not hold.
        attr.mtime = attr.mtime.checked_add(inode.content.nudge()).unwrap_or(UNIX_EPOCH);
        Forgets::Now(inode, version)
    } else {
        Forgets::Later
    };
    Told { attr, generation, lease: Some((before, is.lease)), forgets }
}

/// How much data fits into one frame with this caller and what he wants done.
fn most_data(who: &Caller) -> usize {
    // A number takes 5 bytes at most.
    MOST_DATA.min((MOST_PAYLOAD - MOST_WORDS).saturating_sub(5 * who.groups.len())).max(1)
}

/// Whether it is the root or one of its links, which are no node's.
pub(crate) fn is_ours(number: INodeNo) -> bool {
    number.0 == ROOT || Link::of(number.0).is_some()
}

fn attributes_in(answer: &Answer) -> Outcome<Attributes> {
    if let Answer::Attributes(attributes) = answer { Ok(*attributes) } else { Err(Errno::IO) }
}

/// So many of as many as there were: more is a server's that cannot be believed.
fn count_in(answer: &Answer, most: u64) -> Outcome<u64> {
    if let Answer::Count(count) = answer
        && *count <= most
    {
        Ok(*count)
    } else {
        Err(Errno::IO)
    }
}

/// A link's target is at most a node's number long, and another one for another caller.
pub(crate) fn of_link(link: Link) -> FileAttr {
    let size = if link == Link::Admin { 0 } else { 5 };
    ours(link.number(), FileType::Symlink, 0o777, size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Ask, Opened};

    #[test]
    fn no_more_is_written_than_there_was() {
        assert_eq!(count_in(&Answer::Count(7), 7), Ok(7));
        for answer in [Answer::Count(8), Answer::Count(u64::MAX), Answer::Done] {
            assert_eq!(count_in(&answer, 7), Err(Errno::IO));
        }
    }

    #[test]
    fn what_is_written_fits_whatever_groups_the_writer_has() {
        for (groups, at) in [(0, 0), (700, u64::MAX), (800, 1 << 40), (65_536, u64::MAX)] {
            let who = Caller { uid: u32::MAX, gid: u32::MAX, groups: vec![u32::MAX; groups] };
            let deed = Deed::Write { opened: Opened(u64::MAX), at, append: true };
            let most = most_data(&who);
            let head = tern_wire::encode(&Ask::Do(who, deed)).unwrap();
            assert!(head.len() + most <= MOST_PAYLOAD, "{groups}");
            assert!(most >= MOST_DATA / 2 && (groups > 750 || most == MOST_DATA), "{groups}");
        }
    }
}
