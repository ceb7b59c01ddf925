//! Caches which kinds of extended attributes a file lacks, so that reading them needs no request.

use crate::client::cache::validity::ValidityStamp;
use crate::client::fuse::inode::Inode;
use crate::lock;
use crate::message::{Attributes, XattrKinds};
use std::sync::Arc;

impl Inode {
    /// Caches the kinds of extended attributes that came with these attributes. Under renewable
    /// leases they are cached with all other attributes.
    pub(crate) fn cache_xattr_kinds(&self, attributes: &Attributes, stamp: &ValidityStamp) {
        if attributes.lease == 0 || self.peer.uses_renewable_leases() {
            return;
        }
        let mut kinds = lock(&self.xattr_kinds);
        // Checked under the mutex: a thread that sets an attribute advances the counter before it
        // clears the cached value.
        if stamp.are_xattrs_unchanged() {
            *kinds = Some((attributes.xattrs, stamp.clone(), attributes.lease));
        }
    }

    /// The kinds of extended attributes that the file may have.
    pub(crate) fn xattr_kinds(self: &Arc<Self>) -> XattrKinds {
        if self.peer.uses_renewable_leases() {
            let attributes =
                self.peer.renewed_stamp(&[self]).and_then(|_| self.renewable_cache.attributes(&self.peer));
            return attributes.map_or(XattrKinds::UNKNOWN, |attributes| attributes.xattrs);
        }
        match &*lock(&self.xattr_kinds) {
            Some((kinds, stamp, lease)) if stamp.is_lease_valid(*lease) => *kinds,
            _ => XattrKinds::UNKNOWN,
        }
    }

    /// This client is about to set an extended attribute, or has set it.
    pub(crate) fn note_xattr_change(&self) {
        self.peer.count_xattr_change();
        *lock(&self.xattr_kinds) = None;
    }
}
