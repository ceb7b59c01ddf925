//! What is done for each of the kernel's asks, without fuser's replies.

use super::attributes::ours;
use super::belief::Before;
use super::handle::{Handle, Read};
use super::inode::Inode;
use super::maker::makes_only;
use super::names::makes_nothing;
use super::peer::Heard;
use super::told::{Named, Told, known};
use super::tree::{Below, Link, Tree};
use super::ways::{Look, may_be_believed, may_begin};
use crate::message::{Answer, Attributes, Caller, Deed, Found, MOST_DATA, Name, Object, Opened};
use fuser::{FileAttr, FileHandle, FileType, INodeNo, Request};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::Duration;
use tern_wire::limits::MOST_PAYLOAD;

/// The most bytes that a deed on an open file takes, and its caller without his groups.
const MOST_WORDS: usize = 128;

/// How many milliseconds a lease holds that lasts, from when it was renewed.
const LEASE: u32 = 1000;

/// The number of the tree's own root.
pub(crate) const ROOT: u64 = 1;

/// The tree as fuser calls it.
#[derive(Debug, Clone)]
pub(crate) struct Mounted(pub(crate) Arc<Tree>);

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
            dir.looks.note();
            let before = Before::asking(&dir.peer);
            let deed = |dir| Deed::Lookup { dir, name: Name::from(name) };
            let tid = request.pid();
            let refused = &self.0.refused;
            let heard = match refused.looks(tid, dir.number, name) {
                Look::Perhaps if !may_begin(tid, &dir) => {
                    refused.at_name(tid, dir.number, name, true);
                    return Err(Errno::STALE);
                }
                Look::First => {
                    let known_here = self.lasting_name(&dir, name);
                    if let Some(told) = known_here.or_else(|| self.kept_name(tid, &dir, name)) {
                        return Ok(told);
                    }
                    if makes_only(tid, &who, &self.0.device, &dir, name) {
                        return Err(Errno::NOENT);
                    }
                    self.0.at_end(tid, &dir, &who, &[], deed).inspect_err(|errno| {
                        if *errno == Errno::STALE {
                            refused.at_name(tid, dir.number, name, false);
                        }
                    })
                }
                how => {
                    if how == Look::Perhaps {
                        refused.begins(tid, dir.number);
                    }
                    self.0.with(&dir, &who, &[], deed)
                }
            };
            let heard = heard.inspect_err(|errno| {
                if *errno != Errno::STALE {
                    refused.sees(tid, None);
                }
            })?;
            if let Answer::Nothing(under) = &heard.answer {
                refused.sees(tid, None);
                dir.lasting.has(&dir.peer, under, &before, name, None);
                return Ok(self.nothing(&dir, under.lease, before));
            }
            let told = self.tell(&dir, name, &heard.answer, before)?;
            refused.sees(tid, Some(told.attr.ino.0));
            return Ok(told);
        }
        match self.0.below(name).ok_or(Errno::NOENT)? {
            Below::Link(link) => Ok(Told::ours(of_link(link))),
            Below::Node(node) => {
                let (inode, attributes, before) = self.0.node(node, &who)?;
                Ok(known(inode, &attributes, before, false).named(Named::Ours))
            }
        }
    }

    /// What has a name, if it is believed here in the kernel's place; that is noted first, as where the kernel believes it.
    fn kept_name(&self, tid: u32, dir: &Arc<Inode>, name: &OsStr) -> Option<Told> {
        let epoch = self.0.forgetting.epoch();
        let (inode, like, before) = dir.names.get(name, epoch)?;
        let left = before.pass(|left| left(like.lease));
        if !makes_nothing(tid) || !inode.ways.add(dir, name, left, epoch) || !self.0.inodes.tell_again(&inode)
        {
            return None;
        }
        Some(known(inode, &like, before, false))
    }

    /// What has a name, or that nothing has, by leases that last.
    fn lasting_name(&self, dir: &Arc<Inode>, name: &OsStr) -> Option<Told> {
        let peer = &dir.peer;
        let before = peer.believes(&[dir])?;
        let Some(inode) = dir.lasting.named(peer, name)? else {
            return Some(self.nothing(dir, LEASE, before));
        };
        let before = peer.believes(&[dir, &inode])?;
        let is_still = dir.lasting.named(peer, name)?.is_some_and(|still| Arc::ptr_eq(&still, &inode));
        let is = inode.lasting.attributes(peer).filter(|_| is_still)?;
        let epoch = self.0.forgetting.epoch();
        let may = may_be_believed(dir, epoch) && self.0.forgetting.forgets_names();
        if !inode.ways.add(dir, name, Duration::ZERO, epoch) || !self.0.inodes.tell_again(&inode) {
            return None;
        }
        let named =
            Named::Under(if may { LEASE } else { 0 }, dir.clone(), name.to_owned(), inode.clone(), epoch);
        Some(known(inode, &is, before, false).named(named))
    }

    /// Nothing has a name, which the kernel may believe if it can forget it.
    fn nothing(&self, dir: &Arc<Inode>, lease: u32, before: Before) -> Told {
        Told::nothing(dir, if self.0.forgetting.forgets_names() { lease } else { 0 }, before)
    }

    /// Tells the kernel of what has this name.
    pub(crate) fn tell(
        &self,
        dir: &Arc<Inode>,
        name: &OsStr,
        answer: &Answer,
        before: Before,
    ) -> Outcome<Told> {
        let Answer::Found(found, under) = answer else { return Err(Errno::IO) };
        let inode = self.told(dir, name, found);
        inode.lasting.is(&dir.peer, &found.attributes, &before);
        dir.lasting.has(&dir.peer, under, &before, name, Some(&inode));
        let name = self.named(dir, name, &inode, found, under.lease, &before);
        Ok(known(inode, &found.attributes, before, false).named(name))
    }

    /// The name of what was found, which the kernel may believe as long as the directory's lease holds. If it cannot forget names it is
    /// believed here.
    pub(crate) fn named(
        &self,
        dir: &Arc<Inode>,
        name: &OsStr,
        inode: &Arc<Inode>,
        found: &Found,
        under: u32,
        before: &Before,
    ) -> Named {
        use rustix::fs::FileType::{Directory, RegularFile, Symlink};
        let kind = rustix::fs::FileType::from_raw_mode(found.attributes.mode);
        let epoch = self.0.forgetting.epoch();
        // Believed or not: it may be the last step of a way whose others were.
        inode.ways.add(dir, name, Duration::ZERO, epoch);
        // Of others, what is opened is here, and nobody there is asked.
        if !matches!(kind, RegularFile | Directory | Symlink) || !may_be_believed(dir, epoch) {
            return Named::Anew;
        }
        if self.0.forgetting.forgets_names() {
            return Named::Under(under, dir.clone(), name.to_owned(), inode.clone(), epoch);
        }
        let lease = under.min(found.attributes.lease);
        dir.names.keep(name, inode, Attributes { lease, ..found.attributes }, before, epoch);
        Named::Anew
    }

    pub(crate) fn told(&self, dir: &Arc<Inode>, name: &OsStr, found: &Found) -> Arc<Inode> {
        dir.maker.tells(name);
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
        let deed = |object| deed(object, Name::from(name));
        let heard = self.0.at_end(request.pid(), &dir, &self.who(request), &[], deed)?;
        if let Answer::Found(_, under) = &heard.answer {
            dir.changed(*under, before.clone());
        }
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
        if let Some(before) = inode.peer.believes(&[&inode])
            && let Some(is) = inode.lasting.attributes(&inode.peer)
        {
            return Ok(known(inode, &is, before, reading));
        }
        let known_here = if reading { inode.kept() } else { inode.after() };
        if let Some((attributes, before)) = known_here {
            return Ok(known(inode, &attributes, before, reading));
        }
        let (before, locks) = (Before::of(&inode), inode.locks());
        let deed = |of| Deed::Stat { of };
        let heard = if reading {
            self.0.with(&inode, &self.who(request), &[], deed)?
        } else {
            // It may be about to deny somebody something by that, or have done so: perhaps of a file that has lost its name.
            self.by_hand_or_path(request, &inode, &self.who(request), &[], deed)?
        };
        let Answer::Attributes(attributes) = heard.answer else { return Err(Errno::IO) };
        if reading && !inode.peer.is_lasting() {
            inode.keeps(attributes, before.clone(), locks);
        }
        inode.lasting.is(&inode.peer, &attributes, &before);
        Ok(known(inode, &attributes, before, reading))
    }

    pub(crate) fn link_target(&self, request: &Request, number: INodeNo) -> Outcome<Vec<u8>> {
        if let Some(link) = Link::of(number.0) {
            return self.0.target(link, request.pid());
        }
        let inode = self.inode(number)?;
        if inode.peer.believes(&[]).is_some()
            && let Some(target) = inode.lasting.target(&inode.peer)
        {
            return Ok(target);
        }
        let before = Before::of(&inode);
        let deed = |of| Deed::ReadLink { of };
        let heard = self.0.at_end(request.pid(), &inode, &self.who(request), &[], deed)?;
        inode.lasting.leads(&inode.peer, &before, heard.data());
        Ok(heard.data().to_vec())
    }

    /// Has something done with what may have been named by a path or by a file that is open, which the kernel does not say.
    ///
    /// Who has it open would not try again if a step leads elsewhere; so it is done all the same then, if somebody has.
    pub(crate) fn by_hand_or_path(
        &self,
        request: &Request,
        inode: &Arc<Inode>,
        who: &Caller,
        data: &[u8],
        deed: impl Fn(Object) -> Deed,
    ) -> Outcome<Heard> {
        match self.0.at_end(request.pid(), inode, who, data, &deed) {
            Err(Errno::STALE) if inode.content.is_open() => {
                self.0.refused.remove(request.pid());
                self.0.with(inode, who, data, deed)
            }
            done => done,
        }
    }

    /// An extended attribute was changed: if it is an access list, others may look up names there than did, which the kernel
    /// here cannot know.
    pub(crate) fn lists_may_differ(&self, of: &Inode, name: &OsStr) {
        of.maker.rights_change();
        if name.as_encoded_bytes().starts_with(b"system.posix_acl") {
            self.0.forgetting.forget_names();
        }
    }

    pub(crate) fn remove(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        deed: impl Fn(Object) -> Deed,
    ) -> Outcome<()> {
        let dir = self.inode(parent)?;
        let before = Before::asking(&dir.peer);
        let heard = self.0.at_end(request.pid(), &dir, &self.who(request), &[], deed)?;
        dir.maker.took(name);
        if let Answer::Removed { gone, dir: is } = heard.answer {
            dir.changed(is, before);
            for inode in gone.into_iter().flat_map(|gone| self.0.inodes.of(dir.node(), &gone)) {
                inode.lasting.changes();
                inode.ways.remove(&dir, name);
            }
        }
        Ok(())
    }

    pub(crate) fn read_at(
        &self,
        request: &Request,
        handle: FileHandle,
        at: u64,
        length: u32,
    ) -> Outcome<Read> {
        let handle = self.handle(handle)?;
        if let Some(read) = handle.early(at, length) {
            return Ok(read);
        }
        let deed = |opened| Deed::Read { opened, at, length };
        let heard = self.0.with_open(&handle, &handle.opener, &[], deed)?;
        self.0.traffic.count(request.pid(), handle.inode.node(), heard.data().len());
        Ok(Read::All(heard))
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
            self.0.traffic.count(request.pid(), handle.inode.node(), piece.len());
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
        let deed = |[to, from]: [Opened; 2]| Deed::Copy { from, at, to, to_at, length };
        let count = count_in(&self.0.with_all_open([&to, &from], &who, &[], deed)?.answer, length)?;
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

    /// The value of an extended attribute, or their names.
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

/// How much data fits into one frame with this caller and what he wants done.
fn most_data(who: &Caller) -> usize {
    // A number takes 5 bytes at most.
    MOST_DATA.min((MOST_PAYLOAD - MOST_WORDS).saturating_sub(5 * who.groups.len())).max(1)
}

/// Whether it is the root or one of its links, which are no node's.
pub(crate) fn is_ours(number: INodeNo) -> bool {
    number.0 == ROOT || Link::of(number.0).is_some()
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
    use crate::message::{Ask, Beside, Opened};

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
            let head =
                tern_wire::encode(&Ask::Do { caller: who, steps: vec![], beside: Beside::default(), deed })
                    .unwrap();
            assert!(head.len() + most <= MOST_PAYLOAD, "{groups}");
            assert!(most >= MOST_DATA / 2 && (groups > 750 || most == MOST_DATA), "{groups}");
        }
    }
}
