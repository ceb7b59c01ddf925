//! Reading directories: what was read ahead, and looked up on the way, is shown when the kernel asks on.

use super::attributes::{kind, ours};
use super::belief::Before;
use super::calls::{Mounted, Outcome, ROOT};
use super::handle::Handle;
use super::inode::Inode;
use super::told::Told;
use super::tree::Link;
use crate::lock;
use crate::message::{Answer, Deed, Entry, MOST_LOOKED_UP};
use fuser::{FileAttr, FileHandle, FileType, INodeNo, ReplyDirectoryPlus};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How much of a directory is read at once, and of one whose entries nobody is expected to look at: not much more than is looked up at once,
/// for who does.
const DIRECTORY: u32 = 64 << 10;
const NAMES_ONLY: u32 = 16 << 10;

/// How long after somebody has looked a name up in a directory others are expected to.
const LOOKED: Duration = Duration::from_secs(60);

/// When a name was looked up last in a directory.
#[derive(Debug, Default)]
pub(crate) struct Looks(Mutex<Option<Instant>>);

impl Looks {
    pub(crate) fn note(&self) {
        *lock(&self.0) = Some(Instant::now());
    }

    fn are_recent(&self) -> bool {
        lock(&self.0).is_some_and(|last| last.elapsed() < LOOKED)
    }
}

/// What was read of a directory and not shown yet.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    /// Where the first of them is.
    from: u64,
    entries: VecDeque<Next>,
    /// They were looked up, as things stood before that, and their names hold for so many milliseconds.
    looked: Option<(Before, u32)>,
    /// There were no more after these, when they were read. Believed once: somebody may look again later.
    ends: bool,
}

#[derive(Debug)]
struct Next {
    entry: Entry,
    /// It is known to be this, and the kernel has not been told yet.
    told: Option<Arc<Inode>>,
}

impl Ahead {
    /// Whether it was read to its end just now, and all was shown.
    fn is_at_end(&mut self, after: u64) -> bool {
        after != 0 && after == self.from && self.entries.is_empty() && std::mem::take(&mut self.ends)
    }
}

impl Mounted {
    /// Entries from this place on; some that were read before, if they are those. With what each is: of the first, and of all if somebody looks at some. Who lists a directory mostly does, often when he
    /// has read it all (find, rm, git); the kernel's own guess (`FUSE_READDIRPLUS_AUTO`) is only the first twenty then, and each other one
    /// is a trip. To look an entry up costs the server some 20 µs, which who wants but names pays for those.
    ///
    /// The kernel takes what it is told for as new as its ask: what was read ahead is read again if something was changed from here since.
    pub(crate) fn list_looked_up(
        &self,
        handle: FileHandle,
        after: u64,
        mut reply: ReplyDirectoryPlus,
    ) -> Result<(), (ReplyDirectoryPlus, Errno)> {
        let handle = match self.handle(handle) {
            Ok(handle) => handle,
            Err(errno) => return Err((reply, errno)),
        };
        let mut ahead = lock(&handle.ahead);
        if ahead.is_at_end(after) {
            reply.ok();
            return Ok(());
        }
        let stands = ahead.looked.as_ref().is_none_or(|(before, lease)| before.stands(*lease));
        if after == 0 || ahead.from != after || ahead.entries.is_empty() || !stands {
            let look = after == 0 || handle.inode.looks.are_recent();
            if let Err(errno) = self.read_ahead(&handle, &mut ahead, after, look) {
                return Err((reply, errno));
            }
        }
        let looked = ahead.looked.clone();
        let mut all = |show: &mut dyn FnMut(&mut Next) -> bool| {
            while let Some(next) = ahead.entries.front_mut()
                && show(next)
            {
                let after = next.entry.after;
                ahead.entries.pop_front();
                ahead.from = after;
            }
        };
        if let Some((before, lease)) = looked {
            before.pass(|left| {
                all(&mut |next| self.show(&handle, next, lease, left, &before, &mut reply));
                reply.ok();
                self.0.forgetting.listed();
            });
        } else {
            all(&mut |next| {
                let entry = &next.entry;
                let kind = kind(entry.kind).unwrap_or_else(|| self.kind_of(&handle, entry));
                show_name(&handle, entry, kind, &mut reply)
            });
            reply.ok();
        }
        Ok(())
    }

    /// Shows one entry, and tells the kernel what it is; whether there was room.
    fn show(
        &self,
        handle: &Handle,
        next: &mut Next,
        lease: u32,
        left: &dyn Fn(u32) -> Duration,
        before: &Before,
        reply: &mut ReplyDirectoryPlus,
    ) -> bool {
        let entry = &next.entry;
        let Some(found) = &entry.found else {
            return show_name(handle, entry, kind(entry.kind).unwrap_or(FileType::RegularFile), reply);
        };
        let inode = next.told.get_or_insert_with(|| self.told(&handle.inode, entry.name.as_os(), found));
        let told = Told::found(inode.clone(), &found.attributes, before.clone());
        let holds =
            handle.inode.lasting.believable(left(lease)).min(told.believed(left(found.attributes.lease)));
        let believed = told.is_all()
            && self.0.forgetting.forgets_names()
            && super::ways::may_be_believed(&handle.inode, self.0.forgetting.epoch())
            && !holds.is_zero()
            && inode.ways.add(&handle.inode, entry.name.as_os(), holds, super::ways::LISTED);
        let ttl = if believed { holds } else { Duration::ZERO };
        if !self.0.forgetting.forgets_names() {
            self.named(&handle.inode, entry.name.as_os(), inode, found, lease, before);
        }
        told.tells(ttl);
        !reply.add(INodeNo(inode.number), entry.after, entry.name.as_os(), &ttl, &told.attr, told.generation)
    }

    fn read_ahead(&self, handle: &Arc<Handle>, ahead: &mut Ahead, after: u64, look: bool) -> Outcome<()> {
        self.drop_ahead(handle, ahead);
        let before = Before::asking(&handle.inode.peer);
        let most = if after == 0 || look { DIRECTORY } else { NAMES_ONLY };
        let deed = |opened| Deed::ReadDir { opened, after, most, look };
        let heard = self.0.with_open(handle, &handle.opener, &[], deed)?;
        let Answer::Entries { entries, lease, ends } = heard.answer else { return Err(Errno::IO) };
        ahead.from = after;
        ahead.entries =
            entries.into_iter().take(most_entries(look)).map(|entry| Next { entry, told: None }).collect();
        (ahead.looked, ahead.ends) = (look.then_some((before, lease)), ends);
        Ok(())
    }

    /// The kernel is not going to be told of these.
    pub(crate) fn drop_ahead(&self, handle: &Handle, ahead: &mut Ahead) {
        for next in ahead.entries.drain(..) {
            self.let_go(handle, next);
        }
    }

    fn let_go(&self, handle: &Handle, next: Next) {
        match (next.told, next.entry.found) {
            (Some(inode), _) => self.0.inodes.forget(inode.number, 1),
            (None, Some(found)) => handle.inode.peer.forget(found.object, 1),
            (None, None) => {}
        }
    }

    /// What an entry is, of which the file system did not say it.
    fn kind_of(&self, handle: &Handle, entry: &Entry) -> FileType {
        let deed = |dir| Deed::Lookup { dir, name: entry.name.clone() };
        let heard = self.0.with(&handle.inode, &handle.opener, &[], deed);
        let Ok(Answer::Found(found, _)) = heard.map(|heard| heard.answer) else {
            return FileType::RegularFile;
        };
        handle.inode.peer.forget(found.object, 1);
        kind(found.attributes.mode).unwrap_or(FileType::RegularFile)
    }

    /// The root's entries: the nodes, and who is where.
    pub(crate) fn list_root(&self, after: u64, mut add: impl FnMut(u64, u64, FileType, &str) -> bool) {
        let links = self.0.links().map(|(link, name)| (link.number(), FileType::Symlink, name.to_owned()));
        let own = [".", ".."].map(|name| (ROOT, FileType::Directory, name.to_owned()));
        let nodes = self.0.map().nodes().into_iter();
        // Its number is the server's to say, which a list is not worth asking for.
        let nodes = nodes.map(|node| (Link::Node(node).number(), FileType::Directory, node.to_string()));
        let all = own.into_iter().chain(links).chain(nodes);
        for ((number, kind, name), next) in all.zip(1..).skip(usize::try_from(after).unwrap_or(usize::MAX)) {
            if add(number, next, kind, &name) {
                break;
            }
        }
    }
}

/// An entry of which only number and kind are known. Whoever wants to know more looks it up himself, and hears why it cannot be. It is shown
/// with no inode: the kernel would take what is said here for what the file is like.
pub(crate) fn not_looked_up(number: u64, kind: FileType) -> FileAttr {
    ours(number, kind, 0, 0)
}

/// Shows one entry that was not looked up; whether there was room.
fn show_name(handle: &Handle, entry: &Entry, kind: FileType, reply: &mut ReplyDirectoryPlus) -> bool {
    let attr = not_looked_up(handle.inode.number_of_entry(entry.inode), kind);
    let (ttl, none) = (Duration::ZERO, fuser::Generation(0));
    !reply.add(INodeNo(0), entry.after, entry.name.as_os(), &ttl, &attr, none)
}

/// How many entries of an answer are taken.
fn most_entries(look: bool) -> usize {
    if look { MOST_LOOKED_UP } else { usize::MAX }
}
