//! Names in directories that a guest may cache: the notices that home sends about them, and the
//! calls that they answer (docs/design/delegation.md, "Names").

use crate::prefetch::{FileAttributes, SUPPORTED_STATX};
use serde::{Deserialize, Serialize};
use tern_syscall::ByteBuf;

/// A notice about cached names. A directory is identified by the text of a path before its last
/// component, as the program writes it: `/usr/include/` for `/usr/include/stdio.h`, and the empty
/// text for `stdio.h`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NameNotice {
    /// The complete list of a directory's names. From now on home sends a notice for each change.
    Listed(Box<Listing>),
    /// Invalidates one name (second) of a directory (first).
    Changed(ByteBuf, ByteBuf),
    /// Invalidates a directory.
    InvalidateDirectory(ByteBuf),
    /// Invalidates all directories.
    InvalidateAll,
}

/// The content of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    /// The directory.
    pub directory: ByteBuf,
    /// Its own attributes, valid until something changes in it.
    pub attributes: Box<FileAttributes>,
    /// The last component of its path is not a symbolic link, so `attributes` also answers calls
    /// that do not follow links.
    pub is_direct: bool,
    /// Its names.
    pub entries: Vec<(ByteBuf, EntryKind)>,
    /// How long before this message was sent the directory was read, in microseconds.
    pub age_us: u32,
}

/// The file that a name refers to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryKind {
    /// A regular file with no other hard link.
    File(Box<FileAttributes>),
    /// A symbolic link, and its target.
    Link(ByteBuf),
    /// Another file that is not a symbolic link. Its attributes must be requested from home; those
    /// of a directory are also in that directory's own listing.
    Other,
    /// Unknown: every call on the name is forwarded.
    Unknown,
}

/// Maximum number of names in a listing.
pub const MAX_LISTED_NAMES: usize = 4096;

/// A call that takes a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathCall {
    /// Index of the argument that holds the path.
    pub path: usize,
    /// The information requested.
    pub query: PathQuery,
}

/// The information that a call on a path requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathQuery {
    /// A descriptor of an existing file.
    Open,
    /// Whether the name exists.
    Exists,
    /// The target of a symbolic link: index of the argument for the result.
    ReadLink(usize),
    /// A `struct stat`: index of the argument for the result, and whether a symbolic link itself is
    /// examined.
    Stat(usize, bool),
    /// A `struct statx` in the fifth argument: whether a symbolic link itself is examined.
    Statx(bool),
}

/// `AT_` flags that do not change the answer for a file that exists.
const HARMLESS_FLAGS: u64 = (libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT) as u64;
/// Open flags that create a file.
const CREATING_FLAGS: u64 = (libc::O_CREAT | libc::O_TMPFILE) as u64;

impl PathCall {
    /// Classifies a call: `None` if a listing cannot answer it.
    #[must_use]
    pub fn classify(nr: u32, args: &[u64; 6]) -> Option<Self> {
        let [_, second, third, fourth, fifth, _] = *args;
        let on = |path, query| Some(Self { path, query });
        let nofollow = |flags: u64| flags & libc::AT_SYMLINK_NOFOLLOW as u64 != 0;
        let exists = |mode: u64| mode == libc::F_OK as u64;
        match i64::from(nr) {
            libc::SYS_open if second & CREATING_FLAGS == 0 => on(0, PathQuery::Open),
            libc::SYS_openat if third & CREATING_FLAGS == 0 => on(1, PathQuery::Open),
            libc::SYS_stat => on(0, PathQuery::Stat(1, false)),
            libc::SYS_lstat => on(0, PathQuery::Stat(1, true)),
            libc::SYS_newfstatat if fourth & !HARMLESS_FLAGS == 0 => {
                on(1, PathQuery::Stat(2, nofollow(fourth)))
            }
            libc::SYS_statx
                if third & !HARMLESS_FLAGS == 0 && fourth as u32 & !SUPPORTED_STATX == 0 && fifth != 0 =>
            {
                on(1, PathQuery::Statx(nofollow(third)))
            }
            libc::SYS_access if exists(second) => on(0, PathQuery::Exists),
            libc::SYS_faccessat if exists(third) => on(1, PathQuery::Exists),
            libc::SYS_faccessat2 if exists(third) && fourth == 0 => on(1, PathQuery::Exists),
            libc::SYS_readlink if third as i32 > 0 => on(0, PathQuery::ReadLink(1)),
            libc::SYS_readlinkat if fourth as i32 > 0 => on(1, PathQuery::ReadLink(2)),
            _ => None,
        }
    }

    /// Whether the path, as an argument of this call, is absolute or relative to the working
    /// directory.
    #[must_use]
    pub fn is_anchored(&self, args: &[u64; 6], path: &[u8]) -> bool {
        path.first() == Some(&b'/') || self.path == 0 || args[0] as i32 == libc::AT_FDCWD
    }
}

/// Splits a path into its directory and last component. `None` if the last component is empty, `.`,
/// `..` or too long.
#[must_use]
pub fn split_last(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = path.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let (directory, name) = path.split_at(at);
    let plain = !matches!(name, b"" | b"." | b"..") && name.len() <= 255;
    plain.then_some((directory, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_splits_into_directory_and_name() {
        let parts: &[(&[u8], &[u8], &[u8])] =
            &[(b"a", b"", b"a"), (b"/a", b"/", b"a"), (b"./b//c", b"./b//", b"c"), (b"../x", b"../", b"x")];
        for (path, directory, name) in parts {
            assert_eq!(split_last(path), Some((*directory, *name)));
        }
        for path in ["", "/", "a/", ".", "..", "a/.", "b/..", &"x".repeat(256)] {
            assert_eq!(split_last(path.as_bytes()), None, "{path}");
        }
    }

    #[test]
    fn only_answerable_calls_are_classified() {
        let of = |nr: i64, args: [u64; 6]| PathCall::classify(nr as u32, &args).map(|on| on.query);
        let cwd = u64::from(libc::AT_FDCWD.cast_unsigned());
        assert_eq!(of(libc::SYS_open, [1, libc::O_RDONLY as u64, 0, 0, 0, 0]), Some(PathQuery::Open));
        assert_eq!(of(libc::SYS_open, [1, libc::O_CREAT as u64, 0, 0, 0, 0]), None);
        assert_eq!(of(libc::SYS_openat, [cwd, 1, libc::O_TMPFILE as u64, 0, 0, 0]), None);
        assert_eq!(of(libc::SYS_newfstatat, [cwd, 1, 2, 0, 0, 0]), Some(PathQuery::Stat(2, false)));
        let empty = libc::AT_EMPTY_PATH as u64;
        assert_eq!(of(libc::SYS_newfstatat, [3, 1, 2, empty, 0, 0]), None);
        assert_eq!(of(libc::SYS_statx, [cwd, 1, 0x100, 0xfff, 5, 0]), Some(PathQuery::Statx(true)));
        assert_eq!(of(libc::SYS_statx, [cwd, 1, 0x2000, 0xfff, 5, 0]), None, "asks its server anew");
        assert_eq!(of(libc::SYS_access, [1, libc::R_OK as u64, 0, 0, 0, 0]), None);
        assert_eq!(of(libc::SYS_readlink, [1, 2, 0, 0, 0, 0]), None, "no room is an error");
    }

    #[test]
    fn relative_paths_are_anchored_at_cwd_only() {
        let (cwd, three) = ([u64::from(libc::AT_FDCWD.cast_unsigned()), 1, 0, 0, 0, 0], [3, 1, 0, 0, 0, 0]);
        let on = PathCall::classify(libc::SYS_openat as u32, &cwd).unwrap();
        assert!(on.is_anchored(&cwd, b"a") && !on.is_anchored(&three, b"a") && on.is_anchored(&three, b"/a"));
        let old = PathCall::classify(libc::SYS_open as u32, &three).unwrap();
        assert!(old.is_anchored(&three, b"a"));
    }
}
