//! What the kernel is told of a file, and for how long it may believe which part of that.

use super::attributes::{file, ours};
use super::belief::{Before, Version};
use super::inode::Inode;
use crate::message::{Attributes, Purpose};
use fuser::{FileAttr, FileType, FopenFlags, Generation};
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// How long the kernel believes what is ours: the cluster's map changes rarely.
const OURS: Duration = Duration::from_secs(1);

/// How long it believes what a file is like that somebody here has open. Then it asks, and is answered from here as long as the lease
/// holds: so a lease that comes back late, for a change that has been made already, is no news to the kernel. To tell it that would
/// throw away what it has asked for meanwhile.
const OPEN: Duration = Duration::from_millis(20);

/// What the kernel is told of a file.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) attr: FileAttr,
    pub(crate) generation: Generation,
    /// How long it holds, in milliseconds, and since when; nothing of what is ours.
    lease: Option<(Before, u32)>,
    forgets: Forgets,
    name: Named,
    /// Of what, and what of it; nothing of what is ours.
    of: Option<(Arc<Inode>, Version)>,
}

/// The name by which the kernel was told of a file.
#[derive(Debug)]
pub(crate) enum Named {
    /// It is to be asked for each time.
    Anew,
    /// It is ours.
    Ours,
    /// Nothing has it, for so many milliseconds, in this directory.
    Nothing(u32, Arc<Inode>),
    /// It holds for so many milliseconds, in this directory, of this inode, if the kernel is not told to forget all names: so
    /// often it had been.
    Under(u32, Arc<Inode>, OsString, Arc<Inode>, u64),
}

impl Named {
    /// How long the kernel may believe it, which is noted.
    fn believed(&self, left: &dyn Fn(u32) -> Duration) -> Duration {
        match self {
            Self::Anew => Duration::ZERO,
            Self::Ours => OURS,
            Self::Nothing(lease, dir) => dir.lasting.believable(left(*lease)),
            Self::Under(lease, dir, name, inode, epoch) => {
                let left = dir.lasting.believable(left(*lease));
                if !left.is_zero() && inode.ways.add(dir, name, left, *epoch) { left } else { Duration::ZERO }
            }
        }
    }
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
    pub(crate) fn ours(attr: FileAttr) -> Self {
        let generation = Generation(0);
        Self { attr, generation, lease: None, forgets: Forgets::Nothing, name: Named::Ours, of: None }
    }

    /// That there is nothing.
    pub(crate) fn nothing(dir: &Arc<Inode>, lease: u32, before: Before) -> Self {
        let nothing = Self::ours(ours(0, FileType::RegularFile, 0, 0));
        Self { lease: Some((before, lease)), name: Named::Nothing(lease, dir.clone()), ..nothing }
    }

    /// By this name.
    pub(crate) fn named(self, name: Named) -> Self {
        Self { name, ..self }
    }

    /// What was found, for who does not want to read it now.
    pub(crate) fn found(inode: Arc<Inode>, is: &Attributes, before: Before) -> Self {
        known(inode, is, before, false)
    }

    /// How long the kernel believes it, of which so much is left.
    pub(crate) fn believed(&self, left: Duration) -> Duration {
        match &self.of {
            Some((inode, _)) if inode.locks() > 0 => Duration::ZERO,
            // Under leases that last it is told when one comes back late.
            Some((inode, _)) if inode.content.is_open() && !inode.peer.is_lasting() => left.min(OPEN),
            _ => left,
        }
    }

    /// Whether the kernel may believe all of it later.
    pub(crate) fn is_all(&self) -> bool {
        matches!(self.forgets, Forgets::Nothing)
    }

    /// The kernel is going to believe it for so long.
    pub(crate) fn tells(&self, left: Duration) {
        if let Some((inode, version)) = &self.of {
            inode.tells(*version, left);
        }
    }

    /// Passes it on, with how long the kernel may believe that, and the name.
    pub(crate) fn pass(&self, pass: impl FnOnce(Duration, Duration)) {
        let Some((before, lease)) = &self.lease else { return pass(OURS, OURS) };
        before.pass(|left| {
            let name = self.name.believed(left);
            let left = left(*lease);
            match &self.forgets {
                Forgets::Nothing => {
                    let left = self.believed(left);
                    self.tells(left);
                    pass(left, name);
                }
                Forgets::Later => {
                    self.tells(Duration::ZERO);
                    pass(Duration::ZERO, name);
                }
                Forgets::Now(inode, version) => {
                    inode.content.becomes(if left.is_zero() { None } else { *version });
                    self.tells(Duration::ZERO);
                    pass(Duration::ZERO, name);
                }
            }
        });
    }
}

/// A file that was opened: its handle, and how it behaves.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) handle: u64,
    pub(crate) inode: Arc<Inode>,
    pub(crate) is: Attributes,
    /// The kernel may keep of its content.
    pub(crate) keeps: bool,
    /// The kernel need not say who closes it.
    pub(crate) is_unflushed: bool,
    pub(crate) before: Before,
    pub(crate) name: Named,
}

impl Open {
    /// Passes it on. What is believed by nobody goes to its node at each call; anything else may be kept by the kernel, and
    /// what it has already is used if it is of the same version, and dropped else.
    ///
    /// It is told how long the kernel may believe the file's attributes and its name as well.
    pub(crate) fn pass(&self, pass: impl FnOnce(FopenFlags, Duration)) {
        self.before.pass(|left| {
            let name = self.name.believed(left);
            let left = left(self.is.lease);
            // fuser has one time for both.
            let believed = if self.inode.locks() > 0 { Duration::ZERO } else { name.min(left) };
            if !matches!(self.name, Named::Anew) {
                self.inode.tells(Version::seen(&self.is), believed);
            }
            let mut how = FopenFlags::empty();
            how.set(FopenFlags::FOPEN_NOFLUSH, self.is_unflushed);
            if !self.keeps || left.is_zero() {
                self.inode.content.doubt();
                // What guests map is mapped in any case: each page is as it is when one of them looks at it first.
                how.set(FopenFlags::FOPEN_DIRECT_IO, self.inode.peer.common.purpose != Purpose::Guests);
            } else {
                let (content, version) = (&self.inode.content, Version::of(&self.is));
                let is_good = content.is_only(version);
                how.set(FopenFlags::FOPEN_KEEP_CACHE, is_good);
                if !is_good {
                    content.drops();
                }
                content.becomes(version);
            }
            pass(how, believed);
        });
    }
}

/// What is said of a file. If the kernel may have of its content what is of another version, it forgets that before it reads; who
/// only looks is told the truth.
pub(crate) fn known(inode: Arc<Inode>, is: &Attributes, before: Before, reading: bool) -> Told {
    inode.has_extended(is, &before);
    let version = if is.lease > 0 { Version::of(is) } else { None };
    let of = Some((inode.clone(), Version::seen(is)));
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
    Told { attr, generation, lease: Some((before, is.lease)), forgets, name: Named::Anew, of }
}
