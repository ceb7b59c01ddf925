//! The cache of directories: calls that look up names of home's files are answered without a round
//! trip (docs/design/delegation.md, "Names").
//!
//! Home sends the entries of a directory, and from then on each change in it, before any message by
//! which a process could observe that change. Without a report from home the entries are valid for
//! one second. Attributes of files are valid for one second in any case: a file can change through
//! another hard link or a mapping, of which home sends no notice.

use crate::files::limits::CACHE_TERM;
use crate::process::memory::GuestMemory;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tern_migrate::names::{
    EntryKind, Listing, MAX_LISTED_NAMES, NameNotice, PathCall, PathQuery, split_last,
};
use tern_migrate::prefetch::FileAttributes;
use tern_syscall::{UserMemory, read_c_string};
use tern_tracee::Memory;
use tern_tracee::listener::Notification;

/// Paths of this length or more are sent home.
const MAX_PATH_LEN: usize = 1024;

/// The cached directories of a process.
#[derive(Debug, Default)]
pub(crate) struct NameCache {
    directories: HashMap<Vec<u8>, CachedDir>,
    /// When the last call whose result has arrived was sent home.
    last_confirmed: Option<Instant>,
}

#[derive(Debug)]
struct CachedDir {
    /// The directory's attributes; none after a change in it.
    attributes: Option<Box<FileAttributes>>,
    /// Its path is not a symbolic link, so its attributes are valid for lstat too.
    path_is_no_symlink: bool,
    names: HashMap<Vec<u8>, EntryKind>,
    listed_at: Instant,
}

/// The reply to a call.
#[derive(Debug, PartialEq, Eq)]
enum NameReply {
    Number(i64),
    /// These bytes, at an address; and the result.
    Bytes(u64, Vec<u8>, i64),
}

impl NameCache {
    /// Handles a notice from home.
    pub(crate) fn handle_notice(&mut self, notice: NameNotice) {
        match notice {
            NameNotice::Listed(listing) => self.store_listing(*listing),
            NameNotice::Changed(directory, name) => {
                if let Some(directory) = self.directories.get_mut(directory.as_slice()) {
                    directory.attributes = None;
                    directory.names.insert(name.as_slice().to_vec(), EntryKind::Unknown);
                }
            }
            NameNotice::InvalidateDirectory(directory) => drop(self.directories.remove(directory.as_slice())),
            NameNotice::InvalidateAll => self.directories.clear(),
        }
    }

    fn store_listing(&mut self, listing: Listing) {
        let age = Duration::from_micros(listing.age_us.into());
        let names = listing.entries.into_iter().take(MAX_LISTED_NAMES);
        let names = names.map(|(name, kind)| (name.as_slice().to_vec(), kind)).collect();
        if let Some(listed_at) = Instant::now().checked_sub(age) {
            let (attributes, path_is_no_symlink) = (Some(listing.attributes), listing.is_direct);
            let directory = CachedDir { attributes, path_is_no_symlink, names, listed_at };
            self.directories.insert(listing.directory.as_slice().to_vec(), directory);
        }
    }

    /// Records that the result of a call that was sent at `sent_at` has arrived.
    pub(crate) fn confirm(&mut self, sent_at: Instant) {
        self.last_confirmed = self.last_confirmed.max(Some(sent_at));
    }

    /// Drops everything: the link to home is lost.
    pub(crate) fn clear(&mut self) {
        self.directories.clear();
    }

    fn is_unusable(&self) -> bool {
        self.directories.is_empty()
            || self.last_confirmed.is_none_or(|last_confirmed| last_confirmed.elapsed() >= CACHE_TERM)
    }

    /// Replies to a call about a cached name; returns none if it is another call, or home must make
    /// it.
    pub(crate) fn reply_to(&self, trap: &Notification, memory: &Memory) -> Option<i64> {
        if self.is_unusable() {
            return None;
        }
        let on = PathCall::classify(trap.nr, &trap.args)?;
        let mut memory = GuestMemory(memory);
        let path = read_c_string(&mut memory, trap.args[on.path], MAX_PATH_LEN).ok()?;
        let path = path.strip_suffix(b"\0").filter(|path| on.is_anchored(&trap.args, path))?;
        match self.reply(on.query, path, &trap.args)? {
            NameReply::Number(ret) => Some(ret),
            NameReply::Bytes(at, bytes, ret) => memory.write(at, &bytes).is_ok().then_some(ret),
        }
    }

    /// The reply to a call with a path; none if home must make it.
    fn reply(&self, query: PathQuery, path: &[u8], args: &[u64; 6]) -> Option<NameReply> {
        let (directory, name) = split_last(path)?;
        if matches!(query, PathQuery::Stat(..) | PathQuery::Statx(_))
            && let Some(itself) = self.directories.get([path, b"/"].concat().as_slice())
            && let Some(reply) = itself.reply(query, args)
        {
            return Some(reply);
        }
        let directory = self.directories.get(directory)?;
        let Some(kind) = directory.names.get(name) else {
            return Some(NameReply::Number(-i64::from(libc::ENOENT)));
        };
        match (query, kind) {
            (_, EntryKind::Unknown) => None,
            (PathQuery::Exists, EntryKind::File(_) | EntryKind::Other) => Some(NameReply::Number(0)),
            (PathQuery::ReadLink(at), EntryKind::Link(to)) => {
                // The kernel takes the size of the buffer as an int.
                let max_len = usize::try_from(*args.get(at + 1)? as i32).ok()?;
                let to = &to.as_slice()[..to.len().min(max_len)];
                Some(NameReply::Bytes(args[at], to.to_vec(), to.len() as i64))
            }
            (PathQuery::ReadLink(_), _) => Some(NameReply::Number(-i64::from(libc::EINVAL))),
            (_, EntryKind::File(_)) if directory.listed_at.elapsed() >= CACHE_TERM => None,
            (_, EntryKind::File(attributes)) => attribute_reply(attributes, query, args),
            _ => None,
        }
    }
}

/// The reply to a call that asks for these attributes.
fn attribute_reply(attributes: &FileAttributes, query: PathQuery, args: &[u64; 6]) -> Option<NameReply> {
    match query {
        PathQuery::Stat(at, _) => Some(NameReply::Bytes(args[at], attributes.stat(), 0)),
        PathQuery::Statx(_) => Some(NameReply::Bytes(args[4], attributes.statx(), 0)),
        _ => None,
    }
}

impl CachedDir {
    /// The reply to a call about the directory itself. A call that does not follow symbolic links
    /// gets the directory's attributes only if the path is not a symbolic link.
    fn reply(&self, query: PathQuery, args: &[u64; 6]) -> Option<NameReply> {
        let by_name = matches!(query, PathQuery::Stat(_, true) | PathQuery::Statx(true));
        self.attributes
            .as_ref()
            .filter(|_| self.path_is_no_symlink || !by_name)
            .and_then(|attributes| attribute_reply(attributes, query, args))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::cache;
    use tern_syscall::ByteBuf;

    fn bytes(of: &str) -> ByteBuf {
        ByteBuf::from(of.as_bytes().to_vec())
    }

    fn attributes() -> Box<FileAttributes> {
        Box::new(cache::tests::attributes(3))
    }

    fn cached_names() -> NameCache {
        let mut names = NameCache::default();
        let listed = vec![
            (bytes("file"), EntryKind::File(attributes())),
            (bytes("link"), EntryKind::Link(bytes("file"))),
            (bytes("directory"), EntryKind::Other),
        ];
        let (directory, attributes) =
            (bytes("/d/"), Box::new(FileAttributes { mode: 0o040_755, ..*attributes() }));
        let listing = Listing { directory, attributes, is_direct: false, entries: listed, age_us: 0 };
        names.handle_notice(NameNotice::Listed(Box::new(listing)));
        names.confirm(Instant::now());
        names
    }

    #[test]
    fn cached_names_are_served_and_others_forwarded() {
        let names = cached_names();
        assert!(!names.is_unusable());
        let args = [0, 100, 200, 2, 500, 0];
        let of = |query, path: &str| names.reply(query, path.as_bytes(), &args);
        let number = |errno: i32| Some(NameReply::Number(-i64::from(errno)));
        assert_eq!(of(PathQuery::Open, "/d/none"), number(libc::ENOENT));
        assert_eq!(of(PathQuery::Open, "/d/file"), None, "home must open it");
        assert_eq!(of(PathQuery::Exists, "/d/file"), number(0));
        assert_eq!(of(PathQuery::Exists, "/d/link"), None, "its target may not be cached");
        assert_eq!(of(PathQuery::ReadLink(1), "/d/file"), number(libc::EINVAL));
        assert_eq!(of(PathQuery::ReadLink(2), "/d/link"), Some(NameReply::Bytes(200, b"fi".to_vec(), 2)));
        assert_eq!(
            of(PathQuery::Stat(1, true), "/d/file"),
            Some(NameReply::Bytes(100, attributes().stat(), 0))
        );
        assert_eq!(
            of(PathQuery::Statx(false), "/d/file"),
            Some(NameReply::Bytes(500, attributes().statx(), 0))
        );
        assert_eq!(of(PathQuery::Stat(1, true), "/d/link"), None);
        assert_eq!(of(PathQuery::Stat(1, true), "/d/directory"), None);
        assert_eq!(of(PathQuery::Open, "/e/none"), None);
        assert!(matches!(of(PathQuery::Stat(1, false), "/d"), Some(NameReply::Bytes(100, ..))));
        assert_eq!(of(PathQuery::Stat(1, true), "/d"), None, "it may be a symbolic link");
        assert_eq!(of(PathQuery::Open, "/d/./none"), None, "only the exact path of the directory matches");
    }

    #[test]
    fn changed_names_are_not_served() {
        let mut names = cached_names();
        let args = [0, 100, 200, 2, 500, 0];
        names.handle_notice(NameNotice::Changed(bytes("/d/"), bytes("new")));
        assert_eq!(names.reply(PathQuery::Open, b"/d/new", &args), None);
        assert_eq!(names.reply(PathQuery::Stat(1, false), b"/d", &args), None, "its times have changed");
        assert!(names.reply(PathQuery::Open, b"/d/other", &args).is_some());
        names.handle_notice(NameNotice::InvalidateDirectory(bytes("/d/")));
        assert_eq!(names.reply(PathQuery::Open, b"/d/other", &args), None);
        assert!(names.is_unusable());
    }

    #[test]
    fn names_expire_without_reports() {
        let mut names = cached_names();
        names.last_confirmed = Instant::now().checked_sub(CACHE_TERM);
        assert!(names.is_unusable());
        names.confirm(Instant::now());
        let directory = names.directories.get_mut(b"/d/".as_slice()).unwrap();
        directory.listed_at = Instant::now().checked_sub(CACHE_TERM).unwrap();
        let args = [0, 100, 200, 2, 500, 0];
        assert_eq!(names.reply(PathQuery::Stat(1, true), b"/d/file", &args), None);
        assert_eq!(names.reply(PathQuery::Exists, b"/d/file", &args), Some(NameReply::Number(0)));
    }
}
