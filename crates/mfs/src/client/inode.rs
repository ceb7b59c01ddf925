//! What the kernel here knows of another node's files: inodes by number, each with the server's object behind it.
//!
//! The number is made of the node, the file system and the file's number there, so that it is the same whenever the file is seen
//! again (`st_ino`; tar, git and make go by it), and a file of two names is one. When the server holds the object no more, it
//! is looked up again from its parent by the name that it was last known by, and must prove to be the same file.

use super::belief::{Before, Version};
use super::content::Content;
use super::lasting::Lasting;
use super::listing::Looks;
use super::locks::Owners;
use super::maker::Maker;
use super::names::Names;
use super::passthrough::Passage;
use super::peer::{Peer, Unheard};
use super::unsaved::Unsaved;
use super::ways::Ways;
use crate::lock;
use crate::message::{
    Attributes, Caller, Deed, Extended, FileKey, Found, Moment, Name, Object, ROOT, Release,
};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;
use tern_ids::{NodeId, number};

/// How deep a file may be that is found again.
const DEEPEST: u32 = 200;

/// Which file it is, as its node tells files apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Same {
    node: NodeId,
    key: FileKey,
    born: (i64, u32),
}

impl Same {
    pub(crate) fn new(node: NodeId, attributes: &Attributes) -> Self {
        let Moment { seconds, nanos } = attributes.born;
        Self { node, key: attributes.key, born: (seconds, nanos) }
    }
}

/// One file, directory or link.
#[derive(Debug)]
pub(crate) struct Inode {
    pub(crate) number: u64,
    pub(crate) peer: Arc<Peer>,
    same: Same,
    hold: Mutex<Hold>,
    /// Who here may have record locks on it.
    pub(crate) owners: Owners,
    pub(crate) unsaved: Unsaved,
    pub(crate) content: Content,
    /// How the kernel may come to it without asking.
    pub(crate) ways: Ways,
    /// Names are looked up in it.
    pub(crate) looks: Looks,
    /// What is below it, where the kernel asks each time.
    pub(crate) names: Names,
    /// What is believed of it for longer than a term.
    pub(crate) lasting: Lasting,
    /// Who makes files in it.
    pub(crate) maker: Maker,
    /// Whether this kernel reads and writes it itself.
    pub(crate) passage: Passage,
    /// What it is like since something was done in it, for when the kernel asks that.
    after: Mutex<Option<(Attributes, Before)>>,
    /// What it was like when somebody was about to read it.
    kept: Mutex<Option<(Attributes, Before)>>,
    /// How often somebody here has wanted a lock on it for the first time, or got one.
    locks: AtomicU64,
    /// What the kernel was told that it is like, and until when it believes that.
    told: Mutex<Option<(Version, Instant)>>,
    /// Which extended attributes it has, for as long as the lease holds that came with that.
    pub(super) extended: Mutex<Option<(Extended, Before, u32)>>,
}

/// How long what is known of a directory after a deed is good for an answer: not for one who may not look into it, and wants to
/// know whether that is still so.
const AFTER: std::time::Duration = std::time::Duration::from_millis(100);

#[derive(Debug)]
struct Hold {
    object: Object,
    /// How often the server has counted us.
    count: u64,
    /// The name by which it was last seen; none of the root.
    name: Option<(Arc<Inode>, OsString)>,
}

/// How much longer the kernel may believe what it was told: it counts from when it takes the answer.
pub(super) const LONGER: std::time::Duration = std::time::Duration::from_millis(500);

impl Inode {
    /// The server's number of it, as far as we know.
    pub(crate) fn object(&self) -> Object {
        self.hold().object
    }

    /// Where it was seen last; nothing of a node's root.
    pub(crate) fn place(&self) -> Option<(Arc<Self>, OsString)> {
        self.hold().name.clone()
    }

    /// Its node.
    pub(crate) fn node(&self) -> NodeId {
        self.same.node
    }

    /// Its file system.
    pub(crate) fn volume(&self) -> u64 {
        self.same.key.volume
    }

    /// The number with which an entry of this directory is listed: as that of the file itself, unless something is mounted
    /// there.
    pub(crate) fn number_of_entry(&self, inode: u64) -> u64 {
        number::of(self.same.node, self.same.key.volume, inode)
    }

    /// A number that changes when another file gets the same `number`.
    pub(crate) fn generation(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.same.born.hash(&mut hasher);
        hasher.finish()
    }

    /// Something is done in it from here: what it was like is over, for the kernel too.
    pub(crate) fn changes(&self) {
        *lock(&self.after) = None;
        *lock(&self.told) = None;
        self.lasting.changes();
    }

    /// The kernel is told that it is like this, and may believe it for so long. What it was told before it goes on believing if it has asked for
    /// this earlier.
    pub(crate) fn tells(&self, is: Version, left: std::time::Duration) {
        let until = Instant::now() + left;
        let mut told = lock(&self.told);
        *told = match *told {
            Some((was, later)) if later > until => Some((if left.is_zero() { was } else { is }, later)),
            _ => (!left.is_zero()).then_some((is, until)),
        };
    }

    /// The kernel believes no more what it was told that it is like; whether it may have until now, and is to be told so.
    pub(crate) fn untell(&self) -> bool {
        lock(&self.told).take().is_some_and(|(_, until)| Instant::now() < until + LONGER)
    }

    /// Whether the kernel may believe something else.
    pub(crate) fn is_believed_to_differ(&self, is: Version) -> bool {
        lock(&self.told).is_some_and(|(told, until)| told != is && Instant::now() < until + LONGER)
    }

    /// It is like this after something was done in it.
    pub(crate) fn changed(&self, is: Attributes, before: Before) {
        if is.lease > 0 && is.key == self.same.key {
            *lock(&self.after) = Some((is, before));
        }
    }

    /// What it is like after something was done in it, once.
    pub(crate) fn after(&self) -> Option<(Attributes, Before)> {
        let after = lock(&self.after).take();
        after.filter(|(is, before)| before.age() < AFTER && before.holds(is.lease))
    }

    /// It is like this, for whoever reads it; so many [`locks`](Self::locks) there were before it was asked for.
    pub(crate) fn keeps(&self, is: Attributes, before: Before, locks: u64) {
        let by_kernel = self.passage.is_taken();
        let mut kept = lock(&self.kept);
        *kept = (!by_kernel && is.lease > 0 && locks == self.locks()).then_some((is, before));
    }

    /// A count of the locks that programs here got on it. As soon as one wants one it is not nothing, and the kernel believes nothing that
    /// it is told of it.
    pub(crate) fn locks(&self) -> u64 {
        self.locks.load(Ordering::Acquire)
    }

    /// Somebody wants a lock on it; whether he is the first.
    pub(crate) fn wants_lock(&self) -> bool {
        if self.locks() > 0 {
            return false;
        }
        // What has been told already is with the kernel then, and what is told later is told so.
        self.peer.with_nothing_on_its_way(|| {
            self.locks.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_ok()
        })
    }

    /// Somebody has got one, and is about to be told: what was asked for before that is void.
    pub(crate) fn has_lock(&self) {
        let mut kept = lock(&self.kept);
        self.locks.fetch_add(1, Ordering::AcqRel);
        *kept = None;
        *lock(&self.after) = None;
        self.lasting.changes();
    }

    /// What it is like, if that is known for sure: no lease of its node was asked back since, and nothing changed there from here. What the kernel
    /// itself writes to (passthrough) nobody here has a count of.
    pub(crate) fn kept(&self) -> Option<(Attributes, Before)> {
        let kept = if self.passage.is_taken() { None } else { lock(&self.kept).clone() };
        kept.filter(|(is, before)| before.stands(is.lease))
    }

    /// This owner of locks has closed a descriptor of it, and has none any more.
    pub(crate) fn disown(&self, owner: u64) {
        if let Some(number) = self.owners.remove(owner) {
            self.release_owner(number);
        }
    }

    /// The locks of this number are nobody's.
    pub(crate) fn release_owner(&self, number: u64) {
        self.peer.release_now(Release::Owner(self.same.key, number));
    }

    fn hold(&self) -> MutexGuard<'_, Hold> {
        lock(&self.hold)
    }

    /// Whether a directory is it, or in it, as far as we know. A hostile server may say so of one that is above it, and both would hold each
    /// other for ever.
    fn is_above(&self, dir: &Arc<Self>) -> bool {
        let mut at = dir.clone();
        for _ in 0..DEEPEST {
            if std::ptr::eq(Arc::as_ptr(&at), self) {
                return true;
            }
            let parent = at.hold().name.as_ref().map(|(parent, _)| parent.clone());
            match parent {
                Some(parent) => at = parent,
                None => return false,
            }
        }
        true
    }

    fn seen(&self, object: Object, name: Option<(Arc<Inode>, OsString)>) {
        let name = name.filter(|(parent, _)| !self.is_above(parent));
        let mut hold = self.hold();
        if hold.object == object {
            hold.count += 1;
        } else {
            // The server had forgotten it meanwhile.
            (hold.object, hold.count) = (object, 1);
        }
        if name.is_some() {
            hold.name = name;
        }
    }

    /// Looks the file up again, since the server holds it no more.
    ///
    /// # Errors
    /// `ESTALE` if another one has its name now, or none.
    pub(crate) fn find_again(&self, who: &Caller) -> Result<(), Errno> {
        self.find_again_below(who, DEEPEST)
    }

    /// The same, through so many parents at most: names that are old may lead in a circle.
    fn find_again_below(&self, who: &Caller, deepest: u32) -> Result<(), Errno> {
        let deepest = deepest.checked_sub(1).ok_or(Errno::STALE)?;
        let Some((parent, name)) = self.hold().name.clone() else { return Ok(()) };
        for _ in 0..2 {
            let deed = Deed::Lookup { dir: parent.object(), name: Name::from(&*name) };
            match self.peer.call(who, Vec::new(), deed, &[]) {
                Ok(heard) => {
                    let found = match heard.answer {
                        crate::message::Answer::Found(found, _) => found,
                        crate::message::Answer::Nothing(_) => return Err(Errno::STALE),
                        _ => return Err(Errno::IO),
                    };
                    if Same::new(self.same.node, &found.attributes) != self.same {
                        self.peer.forget(found.object, 1);
                        return Err(Errno::STALE);
                    }
                    self.seen(found.object, None);
                    return Ok(());
                }
                Err(Unheard::Forgotten) => parent.find_again_below(who, deepest)?,
                Err(Unheard::Elsewhere | Unheard::Errno(Errno::NOENT)) => return Err(Errno::STALE),
                Err(Unheard::Errno(errno)) => return Err(errno),
            }
        }
        Err(Errno::STALE)
    }
}

impl Drop for Inode {
    fn drop(&mut self) {
        let (object, count) = {
            let hold = self.hold();
            (hold.object, hold.count)
        };
        if object != ROOT {
            self.peer.forget(object, count);
        }
    }
}

/// All inodes that the kernel knows.
#[derive(Debug, Default)]
pub(crate) struct Inodes {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// By number, with how often the kernel was told of each.
    inodes: HashMap<u64, (Arc<Inode>, u64)>,
    /// The numbers that stand for a file: one, but for the like of a file that is gone and still open here.
    numbers: HashMap<(NodeId, FileKey), Vec<u64>>,
}

impl Inodes {
    /// The inode of this number.
    pub(crate) fn get(&self, number: u64) -> Option<Arc<Inode>> {
        lock(&self.known).inodes.get(&number).map(|(inode, _)| inode.clone())
    }

    /// The inodes that stand for this file.
    pub(crate) fn of(&self, node: NodeId, key: &FileKey) -> Vec<Arc<Inode>> {
        let known = lock(&self.known);
        let numbers = known.numbers.get(&(node, *key)).into_iter().flatten();
        numbers.filter_map(|number| known.inodes.get(number)).map(|(inode, _)| inode.clone()).collect()
    }

    /// A file is known by the second name in the second directory now, and no more by the first.
    pub(crate) fn rename(
        &self,
        file: Option<FileKey>,
        (was, old): (&Arc<Inode>, &OsStr),
        (dir, name): (&Arc<Inode>, &OsStr),
    ) {
        let Some(key) = file else { return };
        for inode in self.of(dir.node(), &key) {
            inode.ways.remove(was, old);
            if inode.is_above(dir) {
                continue;
            }
            let last = inode.hold().name.replace((dir.clone(), name.to_owned()));
            // It may have been the last to hold that directory, whose end wants locks of its own.
            drop(last);
        }
    }

    /// The inode of what was found, of which the kernel is told now.
    pub(crate) fn tell(
        &self,
        node: NodeId,
        peer: &Arc<Peer>,
        found: &Found,
        name: Option<(&Arc<Inode>, &OsStr)>,
    ) -> Arc<Inode> {
        let same = Same::new(node, &found.attributes);
        let name = name.map(|(parent, name)| (parent.clone(), name.to_owned()));
        let mut known = lock(&self.known);
        let Known { inodes, numbers } = &mut *known;
        let numbers = numbers.entry((node, same.key)).or_default();
        for number in &*numbers {
            if let Some((inode, told)) = inodes.get_mut(number).filter(|(inode, _)| inode.same == same) {
                *told += 1;
                inode.seen(found.object, name);
                return inode.clone();
            }
        }
        let mut number = number::of(node, same.key.volume, same.key.inode);
        // Another file's: two of one number by chance, or one that is gone but still open here.
        while inodes.contains_key(&number) {
            number = number::next(number);
        }
        numbers.push(number);
        let hold = Hold { object: found.object, count: 1, name };
        let (owners, content) = (Owners::default(), Content::default());
        let (hold, unsaved) = (Mutex::new(hold), Unsaved::default());
        let (peer, ways, names) = (peer.clone(), Ways::default(), Names::default());
        let looks = Looks::default();
        let (maker, lasting, passage) = (Maker::default(), Lasting::default(), Passage::default());
        let (after, kept) = (Mutex::default(), Mutex::default());
        let (extended, told, locks) = (Mutex::default(), Mutex::default(), AtomicU64::new(0));
        let inode = Arc::new(Inode {
            number,
            peer,
            same,
            hold,
            owners,
            unsaved,
            content,
            ways,
            looks,
            names,
            lasting,
            maker,
            passage,
            after,
            kept,
            locks,
            extended,
            told,
        });
        inodes.insert(number, (inode.clone(), 1));
        inode
    }

    /// The kernel is told of an inode once more, which it was not asked for; false if it knows it no more.
    pub(crate) fn tell_again(&self, inode: &Arc<Inode>) -> bool {
        match lock(&self.known).inodes.get_mut(&inode.number) {
            Some((known, told)) if Arc::ptr_eq(known, inode) => {
                *told += 1;
                true
            }
            _ => false,
        }
    }

    /// The kernel forgets so many tellings.
    pub(crate) fn forget(&self, number: u64, count: u64) {
        let mut known = lock(&self.known);
        let Some((inode, told)) = known.inodes.get_mut(&number) else { return };
        *told = told.saturating_sub(count);
        if *told > 0 {
            return;
        }
        let of = (inode.same.node, inode.same.key);
        let gone = known.inodes.remove(&number);
        if let Some(numbers) = known.numbers.get_mut(&of) {
            numbers.retain(|other| *other != number);
            if numbers.is_empty() {
                known.numbers.remove(&of);
            }
        }
        // What it holds on to may go with it, and each of these wants the peer's lock only.
        drop(known);
        if let Some((inode, _)) = &gone {
            inode.ways.clear();
        }
        drop(gone);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::belief::Forgetting;
    use super::super::peer::Common;
    use super::*;

    const NODE: NodeId = NodeId(2);

    /// An empty file of that number, as a server tells of it.
    pub(in crate::client) fn found(inode: u64, born: i64) -> Found {
        let zero = Moment { seconds: 0, nanos: 0 };
        let key = FileKey { volume: 1, device: 1, inode };
        let attributes = Attributes {
            key,
            born: Moment { seconds: born, nanos: 0 },
            mode: 0o100_644,
            links: 1,
            uid: 0,
            gid: 0,
            size: 0,
            blocks: 0,
            block_size: 4096,
            read: zero,
            written: zero,
            changed: zero,
            lease: 0,
            lasts: false,
            settled: true,
            extended: Extended::NONE,
        };
        Found { object: Object(inode + 1), attributes }
    }

    #[test]
    fn a_file_is_one_inode_whatever_stood_beside_it() {
        let authority = tern_wire::Authority::create("test").unwrap();
        let identity = tern_wire::Identity::issued_by(&authority, NodeId(1)).unwrap();
        let patience = std::time::Duration::from_secs(1);
        let common = Common {
            identity,
            map: "/dev/null".into(),
            session: [0; 16],
            patience,
            purpose: crate::message::Purpose::Room,
            forgetting: Forgetting::default(),
        };
        let peer = Arc::new(Peer::new(NODE, common.into()));
        let inodes = Inodes::default();
        let tell = |file: &Found| inodes.tell(NODE, &peer, file, None);
        // Three of the same number, of which the first two are gone and still open here.
        let files = [1, 2, 3].map(|born| found(7, born));
        let told = files.map(|file| tell(&file));
        let key = &files[0].attributes.key;
        assert_eq!(inodes.of(NODE, key).len(), 3);
        inodes.forget(told[1].number, 1);
        // A recall reaches all that are left, and what is told again is the same.
        let left: Vec<_> = inodes.of(NODE, key).iter().map(|inode| inode.number).collect();
        assert_eq!(left, [told[0].number, told[2].number]);
        assert_eq!(tell(&files[2]).number, told[2].number);
        for (number, count) in [(told[0].number, 1), (told[2].number, 2)] {
            inodes.forget(number, count);
        }
        assert!(inodes.of(NODE, key).is_empty());
        assert!(lock(&inodes.known).numbers.is_empty());
        assert_eq!(tell(&files[1]).number, told[0].number, "the number that it has as a rule");
    }
}
