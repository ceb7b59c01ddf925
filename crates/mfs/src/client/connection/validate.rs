//! Validates server replies before the lookups in them are counted. The kernel rejects an invalid
//! reply, but then never sends FUSE_FORGET for the lookups in it; so invalid replies are rejected
//! here.

use crate::client::fuse::attributes::file_type;
use crate::message::{Attributes, DirEntry, FileReply, Object, Op, OpenId};
use fuser::FileType;

/// The requirements that a reply to an operation must meet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Expected {
    /// The type of the created file.
    kind: Option<FileType>,
}

impl Expected {
    pub(crate) fn of(op: &Op) -> Self {
        let kind = match op {
            Op::Mknod { mode, .. } => Some(file_type(*mode).unwrap_or(FileType::RegularFile)),
            Op::Mkdir { .. } => Some(FileType::Directory),
            Op::Symlink { .. } => Some(FileType::Symlink),
            Op::Create { .. } => Some(FileType::RegularFile),
            _ => None,
        };
        Self { kind }
    }

    /// Whether the kernel would accept the reply.
    pub(crate) fn accepts(self, reply: &FileReply) -> bool {
        let is_of_kind = |attributes: &Attributes| {
            self.kind.is_none_or(|expected| file_type(attributes.mode) == Some(expected))
        };
        match reply {
            FileReply::Found(found, _) | FileReply::Created(found, ..) => {
                has_valid_size(&found.attributes) && is_of_kind(&found.attributes)
            }
            FileReply::Attributes(attributes) | FileReply::FileOpened(_, attributes) => {
                has_valid_size(attributes)
            }
            FileReply::Entries { entries, .. } => entries.iter().all(is_valid_entry),
            _ => true,
        }
    }
}

/// Whether the size is in the range of a Linux file.
fn has_valid_size(attributes: &Attributes) -> bool {
    i64::try_from(attributes.size).is_ok()
}

/// Whether an entry is valid: `.` and `..` are listed without a lookup.
fn is_valid_entry(entry: &DirEntry) -> bool {
    let is_known = entry.found.is_some_and(|found| has_valid_size(&found.attributes));
    match entry.name.as_os().as_encoded_bytes() {
        b"." | b".." => entry.found.is_none(),
        _ => entry.name.is_component() && (is_known || entry.found.is_none()),
    }
}

/// References in a rejected reply, which must be released: objects, each with one lookup, and an
/// open file.
pub(crate) fn references_in(reply: &FileReply) -> (Vec<Object>, Option<OpenId>) {
    match reply {
        FileReply::Found(found, _) => (vec![found.object], None),
        FileReply::Created(found, opened, _) => (vec![found.object], Some(*opened)),
        FileReply::FileOpened(opened, _) => (Vec::new(), Some(*opened)),
        FileReply::Entries { entries, .. } => {
            (entries.iter().filter_map(|entry| entry.found).map(|found| found.object).collect(), None)
        }
        _ => (Vec::new(), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{FileKey, Found, Name, ROOT, Timespec};
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    fn found(mode: u32, size: u64) -> Found {
        let zero = Timespec { seconds: 0, nanos: 0 };
        let key = FileKey { volume: 1, device: 1, inode: 7 };
        let (atime, mtime, ctime) = (zero, zero, zero);
        let (uid, gid, blocks, block_size, nlink, lease, is_settled) = (0, 0, 0, 4096, 1, 0, true);
        let is_renewable = false;
        let attributes = Attributes {
            key,
            btime: zero,
            mode,
            nlink,
            uid,
            gid,
            size,
            blocks,
            block_size,
            atime,
            mtime,
            ctime,
            lease,
            is_renewable,
            is_settled,
            xattrs: crate::message::XattrKinds::NONE,
        };
        Found { object: Object(7), attributes }
    }

    #[test]
    fn created_file_must_have_the_requested_type() {
        let (file, dir) = (found(libc::S_IFREG, 0), found(libc::S_IFDIR, 0));
        let name = || Name::from(OsStr::new("a"));
        let make = Expected::of(&Op::Mkdir { dir: ROOT, name: name(), mode: 0, umask: 0 });
        assert!(make.accepts(&FileReply::Found(dir, dir.attributes)));
        assert!(!make.accepts(&FileReply::Found(file, dir.attributes)));
        let create = Expected::of(&Op::Create { dir: ROOT, name: name(), mode: 0, umask: 0, flags: 0 });
        assert!(create.accepts(&FileReply::Created(file, OpenId(1), dir.attributes)));
        let reply = FileReply::Created(dir, OpenId(1), dir.attributes);
        assert!(!create.accepts(&reply));
        assert_eq!(references_in(&reply), (vec![Object(7)], Some(OpenId(1))));
        let lookup = Expected::of(&Op::Lookup { dir: ROOT, name: name() });
        assert!(lookup.accepts(&FileReply::Found(file, dir.attributes)));
        assert!(!lookup.accepts(&FileReply::Found(found(libc::S_IFREG, u64::MAX), dir.attributes)));
    }

    #[test]
    fn listed_names_must_be_valid() {
        let accepts = |name: &[u8], found| {
            let name = Name::from(OsStr::from_bytes(name));
            let entry = DirEntry { name, inode: 1, kind: 0, cookie: 1, found };
            let reply = FileReply::Entries { entries: vec![entry], lease: 0, is_end: true };
            Expected::of(&Op::GetAttr { of: ROOT }).accepts(&reply)
        };
        let file = Some(found(libc::S_IFREG, 0));
        assert!(accepts(b"a", file) && accepts(b"a", None) && accepts(b".", None) && accepts(b"..", None));
        for odd in [&b""[..], b".", b"..", b"a/b", b"/", b"a\0", &[b'x'; 256]] {
            assert!(!accepts(odd, file), "{odd:?}");
        }
        assert!(!accepts(b"a", Some(found(libc::S_IFREG, u64::MAX))));
    }
}
