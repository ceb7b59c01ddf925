//! Which extended attributes a file is known to lack, so that nobody asks its node for them.

use super::belief::Before;
use super::inode::Inode;
use crate::lock;
use crate::message::{Attributes, Extended};
use std::sync::Arc;

impl Inode {
    /// It was like this, and may be known by that to lack extended attributes. Of leases that last it is known with all else.
    pub(crate) fn has_extended(&self, is: &Attributes, before: &Before) {
        if is.lease == 0 || self.peer.is_lasting() {
            return;
        }
        let mut extended = lock(&self.extended);
        // It is looked at with the lock: who gives one from here counts that before he has us forget.
        if before.is_of_all_given() {
            *extended = Some((is.extended, before.clone(), is.lease));
        }
    }

    /// Which extended attributes it has, as far as that is known.
    pub(crate) fn extended(self: &Arc<Self>) -> Extended {
        if self.peer.is_lasting() {
            let is = self.peer.believes(&[self]).and_then(|_| self.lasting.attributes(&self.peer));
            return is.map_or(Extended::UNKNOWN, |is| is.extended);
        }
        match &*lock(&self.extended) {
            Some((extended, before, lease)) if before.holds(*lease) => *extended,
            _ => Extended::UNKNOWN,
        }
    }

    /// It is about to be given one from here, or just was.
    pub(crate) fn is_given_extended(&self) {
        self.peer.count_given();
        *lock(&self.extended) = None;
    }
}
