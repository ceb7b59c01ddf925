//! Replies to the kernel that carry attributes and names, and the times to live (TTL) of both.

use crate::client::cache::validity::{FileVersion, ValidityStamp};
use crate::client::fuse::attributes::{file_attr, synthetic_attr};
use crate::client::fuse::inode::Inode;
use crate::message::{Attributes, Purpose};
use fuser::{FileAttr, FileType, FopenFlags, Generation};
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// TTL of the tree's root and its links. The cluster map rarely changes.
const SYNTHETIC_TTL: Duration = Duration::from_secs(1);

/// Longest TTL of attributes of a file that is open here. When the TTL has ended, the kernel asks
/// again, and gets the cached attributes as long as the lease holds. So the kernel need not be
/// notified when a lease is recalled after the change; the notification would make it ignore
/// replies in flight.
const MAX_OPEN_FILE_TTL: Duration = Duration::from_millis(20);

/// Attributes, and possibly a name, on their way to the kernel.
#[derive(Debug)]
pub(crate) struct EntryReply {
    pub(crate) attr: FileAttr,
    pub(crate) generation: Generation,
    /// Stamp and lease time (ms) of the attributes; none for the tree's root and links.
    lease: Option<(ValidityStamp, u32)>,
    page_drop: PageDrop,
    dentry: Dentry,
    /// The file and its version; none for the tree's root and links.
    target: Option<(Arc<Inode>, FileVersion)>,
}

/// The name under which a file is reported to the kernel, and how long the kernel may cache it.
#[derive(Debug)]
pub(crate) enum Dentry {
    /// Not cacheable: the kernel must revalidate it each time.
    Uncacheable,
    /// A name in the tree's root.
    Synthetic,
    /// No file has the name in this directory; lease time in ms.
    Negative(u32, Arc<Inode>),
    /// Valid for this lease time (ms) in this directory, for this inode, unless the kernel's
    /// dentries are invalidated. The last field is the dentry epoch when the reply was prepared.
    Positive(u32, Arc<Inode>, OsString, Arc<Inode>, u64),
}

impl Dentry {
    /// The TTL of the name. Records that the kernel gets the name with this TTL.
    fn ttl(&self, remaining: &dyn Fn(u32) -> Duration) -> Duration {
        match self {
            Self::Uncacheable => Duration::ZERO,
            Self::Synthetic => SYNTHETIC_TTL,
            Self::Negative(lease, dir) => dir.renewable_cache.dentry_ttl(remaining(*lease)),
            Self::Positive(lease, dir, name, inode, epoch) => {
                let ttl = dir.renewable_cache.dentry_ttl(remaining(*lease));
                if !ttl.is_zero() && inode.dentries.add(dir, name, ttl, *epoch) {
                    ttl
                } else {
                    Duration::ZERO
                }
            }
        }
    }
}

/// Whether the reply makes the kernel drop the file's pages.
#[derive(Debug)]
enum PageDrop {
    /// No: its pages are current, or no process can read them.
    None,
    /// No, although the pages may be outdated. So the attributes in this reply get no TTL.
    Deferred,
    /// Yes: it drops all pages.
    Immediate(Arc<Inode>, Option<FileVersion>),
}

impl EntryReply {
    pub(crate) fn synthetic(attr: FileAttr) -> Self {
        let generation = Generation(0);
        Self {
            attr,
            generation,
            lease: None,
            page_drop: PageDrop::None,
            dentry: Dentry::Synthetic,
            target: None,
        }
    }

    /// No file has the name.
    pub(crate) fn negative(dir: &Arc<Inode>, lease: u32, stamp: ValidityStamp) -> Self {
        let reply = Self::synthetic(synthetic_attr(0, FileType::RegularFile, 0, 0));
        Self { lease: Some((stamp, lease)), dentry: Dentry::Negative(lease, dir.clone()), ..reply }
    }

    /// The same reply with this name.
    pub(crate) fn with_dentry(self, dentry: Dentry) -> Self {
        Self { dentry, ..self }
    }

    /// A reply with a file's attributes. If the kernel may have pages of another version and is
    /// about to read them, the reply makes it drop them; stat(2) gets the true attributes.
    pub(crate) fn for_file(
        inode: Arc<Inode>,
        attributes: &Attributes,
        stamp: ValidityStamp,
        reading: bool,
    ) -> Self {
        inode.cache_xattr_kinds(attributes, &stamp);
        let version = if attributes.lease > 0 { FileVersion::if_settled(attributes) } else { None };
        let target = Some((inode.clone(), FileVersion::new(attributes)));
        let (mut attr, generation) = (file_attr(&inode, attributes), Generation(inode.generation()));
        let page_drop = if !inode.pages.is_open() || inode.pages.has_only(version) {
            PageDrop::None
        } else if reading {
            // The kernel compares only mtime and size, which may be the same for two versions. So
            // the kernel gets a different mtime. No program sees that mtime, since it has no TTL.
            attr.mtime = attr.mtime.checked_add(inode.pages.next_mtime_offset()).unwrap_or(UNIX_EPOCH);
            PageDrop::Immediate(inode, version)
        } else {
            PageDrop::Deferred
        };
        Self {
            attr,
            generation,
            lease: Some((stamp, attributes.lease)),
            page_drop,
            dentry: Dentry::Uncacheable,
            target,
        }
    }

    /// A reply for a directory entry; the content is not about to be read.
    pub(crate) fn for_listing(inode: Arc<Inode>, attributes: &Attributes, stamp: ValidityStamp) -> Self {
        Self::for_file(inode, attributes, stamp, false)
    }

    /// The TTL of the attributes, if the lease holds for `remaining`.
    pub(crate) fn ttl(&self, remaining: Duration) -> Duration {
        match &self.target {
            Some((inode, _)) if inode.lock_events() > 0 => Duration::ZERO,
            // Under renewable leases a late recall notifies the kernel, so a longer TTL is safe.
            Some((inode, _)) if inode.pages.is_open() && !inode.peer.uses_renewable_leases() => {
                remaining.min(MAX_OPEN_FILE_TTL)
            }
            _ => remaining,
        }
    }

    /// Whether the kernel may cache all of the reply.
    pub(crate) fn is_fully_cacheable(&self) -> bool {
        matches!(self.page_drop, PageDrop::None)
    }

    /// Records that the kernel may use these attributes for this time.
    pub(crate) fn note_ttl(&self, ttl: Duration) {
        if let Some((inode, version)) = &self.target {
            inode.note_kernel_version(*version, ttl);
        }
    }

    /// Delivers the reply: `deliver` gets the TTLs of attributes and name.
    pub(crate) fn deliver(&self, deliver: impl FnOnce(Duration, Duration)) {
        let Some((stamp, lease)) = &self.lease else { return deliver(SYNTHETIC_TTL, SYNTHETIC_TTL) };
        stamp.deliver(|remaining| {
            let name_ttl = self.dentry.ttl(remaining);
            let remaining = remaining(*lease);
            match &self.page_drop {
                PageDrop::None => {
                    let ttl = self.ttl(remaining);
                    self.note_ttl(ttl);
                    deliver(ttl, name_ttl);
                }
                PageDrop::Deferred => {
                    self.note_ttl(Duration::ZERO);
                    deliver(Duration::ZERO, name_ttl);
                }
                PageDrop::Immediate(inode, version) => {
                    inode.pages.set_version(if remaining.is_zero() { None } else { *version });
                    self.note_ttl(Duration::ZERO);
                    deliver(Duration::ZERO, name_ttl);
                }
            }
        });
    }
}

/// A file that was opened, on its way to the kernel.
#[derive(Debug)]
pub(crate) struct OpenedFile {
    pub(crate) handle: u64,
    pub(crate) inode: Arc<Inode>,
    pub(crate) attributes: Attributes,
    /// The kernel may cache its pages.
    pub(crate) may_cache: bool,
    /// The kernel is to send no FUSE_FLUSH for it (`FOPEN_NOFLUSH`).
    pub(crate) skips_flush: bool,
    pub(crate) stamp: ValidityStamp,
    pub(crate) dentry: Dentry,
}

impl OpenedFile {
    /// Delivers the reply. Without a lease the kernel sends each read to the node
    /// (`FOPEN_DIRECT_IO`). With a lease the kernel may cache pages; those that it has are kept if
    /// they are of the same version, and dropped otherwise.
    ///
    /// `deliver` also gets the TTL of attributes and name, for FUSE_CREATE.
    pub(crate) fn deliver(&self, deliver: impl FnOnce(FopenFlags, Duration)) {
        self.stamp.deliver(|remaining| {
            let name_ttl = self.dentry.ttl(remaining);
            let remaining = remaining(self.attributes.lease);
            // fuser takes a single TTL for both.
            let ttl = if self.inode.lock_events() > 0 { Duration::ZERO } else { name_ttl.min(remaining) };
            if !matches!(self.dentry, Dentry::Uncacheable) {
                self.inode.note_kernel_version(FileVersion::new(&self.attributes), ttl);
            }
            let mut flags = FopenFlags::empty();
            flags.set(FopenFlags::FOPEN_NOFLUSH, self.skips_flush);
            if !self.may_cache || remaining.is_zero() {
                self.inode.pages.forget_version();
                // A file for guests must be mappable in any case. Each page then shows the file as
                // of the page's first access.
                flags.set(FopenFlags::FOPEN_DIRECT_IO, self.inode.peer.context.purpose != Purpose::Guests);
            } else {
                let (pages, version) = (&self.inode.pages, FileVersion::if_settled(&self.attributes));
                let is_current = pages.has_only(version);
                flags.set(FopenFlags::FOPEN_KEEP_CACHE, is_current);
                if !is_current {
                    pages.note_drop();
                }
                pages.set_version(version);
            }
            deliver(flags, ttl);
        });
    }
}
