//! Which kinds of extended attributes a file has, so that the client need not ask for one that does
//! not exist: `ls -l`, `chown` and `cp -a` query three for each file, and few files have any.

use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// A set of kinds of extended attributes (xattr(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct XattrKinds(u8);

const ACCESS_ACL: (u8, &[u8]) = (1, b"system.posix_acl_access");
const DEFAULT_ACL: (u8, &[u8]) = (2, b"system.posix_acl_default");
const CAPABILITY: (u8, &[u8]) = (4, b"security.capability");

/// `user.` and `security.` attributes.
const USER_OR_SECURITY: u8 = 8;

/// Any other listed attribute, such as `btrfs.compression`, which the file system defines. A
/// request for its value is always sent to the node. `trusted.` attributes are not recorded.
const FS_SPECIFIC: u8 = 16;

impl XattrKinds {
    /// The file has no attributes that every user can see.
    pub const NONE: Self = Self(0);

    /// The file may have attributes of all kinds.
    pub const UNKNOWN: Self = Self(u8::MAX);

    /// The kinds in a list of names as returned by listxattr(2): each name ends with a NUL byte.
    #[must_use]
    pub fn of(list: &[u8]) -> Self {
        let names = list.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let unlisted = |name: &[u8]| if name.starts_with(b"trusted.") { 0 } else { FS_SPECIFIC };
        Self(names.fold(0, |all, name| all | kind(name).unwrap_or_else(|| unlisted(name))))
    }

    /// Whether the file may have an attribute of this name. Always true for a name of another kind,
    /// such as `trusted.`, which only root can see.
    #[must_use]
    pub fn may_have(self, name: &OsStr) -> bool {
        kind(name.as_bytes()).is_none_or(|kind| self.0 & kind != 0)
    }
}

fn kind(name: &[u8]) -> Option<u8> {
    if let Some((kind, _)) = [ACCESS_ACL, DEFAULT_ACL, CAPABILITY].iter().find(|(_, known)| *known == name) {
        return Some(*kind);
    }
    let is_user_or_security = name.starts_with(b"user.") || name.starts_with(b"security.");
    is_user_or_security.then_some(USER_OR_SECURITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unlisted_attributes_do_not_exist() {
        let list = XattrKinds::of(b"system.posix_acl_access\0trusted.overlay.origin\0");
        let may = |kinds: XattrKinds, name: &str| kinds.may_have(OsStr::new(name));
        assert!(may(list, "system.posix_acl_access") && !may(list, "system.posix_acl_default"));
        assert!(!may(list, "security.capability") && !may(list, "user.a") && !may(list, "security.selinux"));
        let other = XattrKinds::of(b"user.b\0");
        assert!(may(other, "user.a") && may(other, "security.ima") && !may(other, "security.capability"));
        for name in ["trusted.a", "system.nfs4_acl", "nothing", ""] {
            assert!(may(XattrKinds::NONE, name), "{name} must be requested from the node");
        }
        let fs_specific = XattrKinds::of(b"btrfs.compression\0");
        assert!(
            fs_specific != XattrKinds::NONE
                && may(fs_specific, "btrfs.compression")
                && !may(fs_specific, "user.a")
        );
        assert_eq!(XattrKinds::of(b"trusted.a\0"), XattrKinds::NONE);
        assert_eq!(XattrKinds::of(b""), XattrKinds::NONE);
        assert_eq!(XattrKinds::of(b"\0\0"), XattrKinds::NONE);
        assert!(may(XattrKinds::UNKNOWN, "security.capability"));
    }
}
