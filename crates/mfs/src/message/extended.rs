//! Which extended attributes a file has, so that who asks for one that is not there need not ask its node: `ls -l`, `chown` and `cp -a` ask
//! for three of each file, and hardly any has one.

use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// Kinds of extended attributes, as many as can be told apart by who may see them (xattr(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extended(u8);

const ACCESS_LIST: (u8, &[u8]) = (1, b"system.posix_acl_access");
const DEFAULT_LIST: (u8, &[u8]) = (2, b"system.posix_acl_default");
const CAPABILITY: (u8, &[u8]) = (4, b"security.capability");

/// A user's, or a security module's.
const OTHERS: u8 = 8;

/// A file system's own, as `btrfs.compression`: listed, and for its node to say.
const STRANGE: u8 = 16;

impl Extended {
    /// None that everybody can see.
    pub const NONE: Self = Self(0);

    /// Any.
    pub const UNKNOWN: Self = Self(u8::MAX);

    /// Those of a list, as listxattr(2) gives it: each name ends with a zero byte.
    #[must_use]
    pub fn of(list: &[u8]) -> Self {
        let names = list.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let rest = |name: &[u8]| if name.starts_with(b"trusted.") { 0 } else { STRANGE };
        Self(names.fold(0, |all, name| all | kind(name).unwrap_or_else(|| rest(name))))
    }

    /// Whether it may have one of this name. Of those that only root can see (`trusted.`) it always may.
    #[must_use]
    pub fn may_have(self, name: &OsStr) -> bool {
        kind(name.as_bytes()).is_none_or(|kind| self.0 & kind != 0)
    }
}

fn kind(name: &[u8]) -> Option<u8> {
    if let Some((kind, _)) = [ACCESS_LIST, DEFAULT_LIST, CAPABILITY].iter().find(|(_, known)| *known == name)
    {
        return Some(*kind);
    }
    let is_others = name.starts_with(b"user.") || name.starts_with(b"security.");
    is_others.then_some(OTHERS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_listed_is_not_there() {
        let list = Extended::of(b"system.posix_acl_access\0trusted.overlay.origin\0");
        let may = |extended: Extended, name: &str| extended.may_have(OsStr::new(name));
        assert!(may(list, "system.posix_acl_access") && !may(list, "system.posix_acl_default"));
        assert!(!may(list, "security.capability") && !may(list, "user.a") && !may(list, "security.selinux"));
        let other = Extended::of(b"user.b\0");
        assert!(may(other, "user.a") && may(other, "security.ima") && !may(other, "security.capability"));
        for name in ["trusted.a", "system.nfs4_acl", "nothing", ""] {
            assert!(may(Extended::NONE, name), "{name} is for its node to say");
        }
        let strange = Extended::of(b"btrfs.compression\0");
        assert!(strange != Extended::NONE && may(strange, "btrfs.compression") && !may(strange, "user.a"));
        assert_eq!(Extended::of(b"trusted.a\0"), Extended::NONE);
        assert_eq!(Extended::of(b""), Extended::NONE);
        assert_eq!(Extended::of(b"\0\0"), Extended::NONE);
        assert!(may(Extended::UNKNOWN, "security.capability"));
    }
}
