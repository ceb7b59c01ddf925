//! Answers that the kernel would not take. It refuses what cannot be, but never says then that it knows nothing of what came with
//! it: so that is refused before we count it as known.

use super::attributes::kind;
use crate::message::{Answer, Attributes, Deed, Entry, Object, Opened};
use fuser::FileType;

/// What an answer has to bring.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    /// What is made is of this kind.
    kind: Option<FileType>,
}

impl Wanted {
    pub(crate) fn of(deed: &Deed) -> Self {
        let kind = match deed {
            Deed::MakeNode { mode, .. } => Some(kind(*mode).unwrap_or(FileType::RegularFile)),
            Deed::MakeDir { .. } => Some(FileType::Directory),
            Deed::MakeLink { .. } => Some(FileType::Symlink),
            Deed::Create { .. } => Some(FileType::RegularFile),
            _ => None,
        };
        Self { kind }
    }

    /// Whether the kernel can be told all that.
    pub(crate) fn is_met(self, answer: &Answer) -> bool {
        let is_of_kind = |is: &Attributes| self.kind.is_none_or(|wanted| kind(is.mode) == Some(wanted));
        match answer {
            Answer::Found(found, _) | Answer::Created(found, ..) => {
                is_file(&found.attributes) && is_of_kind(&found.attributes)
            }
            Answer::Attributes(is) | Answer::Opened(_, is) => is_file(is),
            Answer::Entries { entries, .. } => entries.iter().all(is_entry),
            _ => true,
        }
    }
}

/// No file of Linux is longer.
fn is_file(is: &Attributes) -> bool {
    i64::try_from(is.size).is_ok()
}

/// The directory itself and the one above are listed, and not told of.
fn is_entry(entry: &Entry) -> bool {
    let is_known = entry.found.is_some_and(|found| is_file(&found.attributes));
    match entry.name.as_os().as_encoded_bytes() {
        b"." | b".." => entry.found.is_none(),
        _ => entry.name.is_one_step() && (is_known || entry.found.is_none()),
    }
}

/// What came with an answer, to be let go: objects, each looked up once, and what was opened.
pub(crate) fn brought(answer: &Answer) -> (Vec<Object>, Option<Opened>) {
    match answer {
        Answer::Found(found, _) => (vec![found.object], None),
        Answer::Created(found, opened, _) => (vec![found.object], Some(*opened)),
        Answer::Opened(opened, _) => (Vec::new(), Some(*opened)),
        Answer::Entries { entries, .. } => {
            (entries.iter().filter_map(|entry| entry.found).map(|found| found.object).collect(), None)
        }
        _ => (Vec::new(), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{FileKey, Found, Moment, Name, ROOT};
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    fn found(mode: u32, size: u64) -> Found {
        let zero = Moment { seconds: 0, nanos: 0 };
        let key = FileKey { volume: 1, device: 1, inode: 7 };
        let (read, written, changed) = (zero, zero, zero);
        let (uid, gid, blocks, block_size, links, lease, settled) = (0, 0, 0, 4096, 1, 0, true);
        let lasts = false;
        let attributes = Attributes {
            key,
            born: zero,
            mode,
            links,
            uid,
            gid,
            size,
            blocks,
            block_size,
            read,
            written,
            changed,
            lease,
            lasts,
            settled,
            extended: crate::message::Extended::NONE,
        };
        Found { object: Object(7), attributes }
    }

    #[test]
    fn what_was_made_is_what_was_asked_for() {
        let (file, dir) = (found(libc::S_IFREG, 0), found(libc::S_IFDIR, 0));
        let name = || Name::from(OsStr::new("a"));
        let make = Wanted::of(&Deed::MakeDir { dir: ROOT, name: name(), mode: 0, umask: 0 });
        assert!(make.is_met(&Answer::Found(dir, dir.attributes)));
        assert!(!make.is_met(&Answer::Found(file, dir.attributes)));
        let create = Wanted::of(&Deed::Create { dir: ROOT, name: name(), mode: 0, umask: 0, flags: 0 });
        assert!(create.is_met(&Answer::Created(file, Opened(1), dir.attributes)));
        let answer = Answer::Created(dir, Opened(1), dir.attributes);
        assert!(!create.is_met(&answer));
        assert_eq!(brought(&answer), (vec![Object(7)], Some(Opened(1))));
        let look = Wanted::of(&Deed::Lookup { dir: ROOT, name: name() });
        assert!(look.is_met(&Answer::Found(file, dir.attributes)));
        assert!(!look.is_met(&Answer::Found(found(libc::S_IFREG, u64::MAX), dir.attributes)));
    }

    #[test]
    fn only_names_are_listed() {
        let is_met = |name: &[u8], found| {
            let name = Name::from(OsStr::from_bytes(name));
            let entry = Entry { name, inode: 1, kind: 0, after: 1, found };
            let answer = Answer::Entries { entries: vec![entry], lease: 0, ends: true };
            Wanted::of(&Deed::Stat { of: ROOT }).is_met(&answer)
        };
        let file = Some(found(libc::S_IFREG, 0));
        assert!(is_met(b"a", file) && is_met(b"a", None) && is_met(b".", None) && is_met(b"..", None));
        for odd in [&b""[..], b".", b"..", b"a/b", b"/", b"a\0", &[b'x'; 256]] {
            assert!(!is_met(odd, file), "{odd:?}");
        }
        assert!(!is_met(b"a", Some(found(libc::S_IFREG, u64::MAX))));
    }
}
