use super::delegated::{DelegatedDir, Directory};
use super::scanner::{DirListing, ScanError};
use super::tracking::directory_used;
use super::*;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tern_migrate::names::EntryKind;
use tern_syscall::{Arg, ByteBuf, Call, Outcome};

/// A temporary directory, and a watcher for this process.
struct Fixture {
    at: PathBuf,
    watcher: Watcher,
}

impl Fixture {
    fn new(name: &str) -> Self {
        let at = std::env::temp_dir().join(format!("tern-names-{name}-{}", std::process::id()));
        let _old = fs::remove_dir_all(&at);
        fs::create_dir_all(at.join("deep/er")).unwrap();
        fs::write(at.join("deep/file"), "abc").unwrap();
        std::os::unix::fs::symlink("file", at.join("deep/link")).unwrap();
        std::os::unix::fs::symlink(at.join("deep"), at.join("way")).unwrap();
        Self { at, watcher: Watcher::open(Waker::new().unwrap(), 0).unwrap() }
    }

    fn path(&self, below: &str) -> Vec<u8> {
        format!("{}/{below}", self.at.display()).into_bytes()
    }

    fn scan(&self, directory: Vec<u8>, max_names: usize) -> Result<DirListing, ScanError> {
        let me = HomePid(std::process::id().cast_signed());
        self.watcher.request(ScanRequest {
            pid: me,
            tid: me,
            directory,
            max_names,
            generation: 0,
            changes: 0,
        });
        self.scanned()
    }

    fn scanned(&self) -> Result<DirListing, ScanError> {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(scanned) = self.watcher.scanned() {
                return scanned.listing;
            }
            assert!(Instant::now() < until, "it was not scanned");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A delegated directory, to receive notices of later changes.
    fn delegated(&self, directory: &str) -> (Vec<u8>, Directory) {
        let path = self.path(directory);
        let listing = self.scan(path.clone(), 100).unwrap();
        drop(self.watcher.events());
        (path, delegated_directory(listing.watched))
    }

    fn notices(&self, (path, directory): &mut (Vec<u8>, Directory)) -> Vec<NameNotice> {
        self.watcher.events().iter().filter_map(|event| directory.apply(path, event)).collect()
    }
}

fn delegated_directory(watched: DirWatch) -> Directory {
    let mut directory = Directory::default();
    directory.set_delegated(DelegatedDir { watched, names: 0, changed: BTreeSet::new() });
    directory
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.at);
    }
}

fn names(listing: &DirListing) -> Vec<String> {
    let mut names: Vec<String> = listing
        .entries
        .iter()
        .map(|(name, _)| String::from_utf8_lossy(name.as_slice()).into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn scan_lists_directory_content() {
    let fixture = Fixture::new("seen");
    fs::hard_link(fixture.at.join("deep/file"), fixture.at.join("deep/twin")).unwrap();
    let single = fixture.at.join("deep/single");
    fs::write(&single, "abcd").unwrap();
    let young = fixture.scan(fixture.path("deep/"), 100).unwrap();
    let of_single =
        young.entries.iter().find(|(name, _)| name.as_slice() == b"single").map(|(_, named)| named);
    assert_eq!(of_single, Some(&EntryKind::Other), "it may still be being written");
    while fs::metadata(&single).unwrap().modified().unwrap().elapsed().unwrap() < Duration::from_millis(2100)
    {
        std::thread::sleep(Duration::from_millis(50));
    }
    let mode =
        std::os::unix::fs::MetadataExt::mode(&fs::metadata(fixture.at.join("deep")).unwrap()) as u16 & 0o7777;
    for way in ["deep/", "way/", "way/er/..", "deep/er/../"] {
        let listing = fixture.scan(fixture.path(way), 100).unwrap();
        assert_eq!(names(&listing), ["er", "file", "link", "single", "twin"], "{way}");
        assert_eq!((listing.is_direct, listing.attributes.mode & 0o7777), (way != "way/", mode), "{way}");
        let of = |name: &str| {
            let found = listing.entries.iter().find(|(found, _)| found.as_slice() == name.as_bytes());
            found.map(|(_, named)| named.clone())
        };
        assert!(matches!(of("single"), Some(EntryKind::File(attributes)) if attributes.size == 4));
        assert_eq!(of("link"), Some(EntryKind::Link(ByteBuf::from(b"file".to_vec()))));
        assert_eq!((of("er"), of("twin")), (Some(EntryKind::Other), Some(EntryKind::Other)));
    }
    assert!(matches!(fixture.scan(fixture.path("deep/"), 4), Err(ScanError::Retry)), "more than the limit");
    assert!(matches!(fixture.scan(fixture.path("none/"), 4), Err(ScanError::Retry)));
    assert!(
        matches!(fixture.scan(b"/proc/self/".to_vec(), 4000), Err(ScanError::Never)),
        "changes are not reported"
    );
}

#[test]
fn each_change_is_notified_once() {
    let fixture = Fixture::new("told");
    let mut delegated = fixture.delegated("deep/");
    assert!(fixture.notices(&mut delegated).is_empty());
    let change = |name: &str, change: &dyn Fn(&Path)| change(&fixture.at.join("deep").join(name));
    let mut expect = |name: &str, done: &dyn Fn(&Path), what: &str| {
        change(name, done);
        let notice = NameNotice::Changed(
            ByteBuf::from(fixture.path("deep/")),
            ByteBuf::from(name.as_bytes().to_vec()),
        );
        assert_eq!(fixture.notices(&mut delegated), [notice], "{what}");
    };
    expect("new", &|at| drop(fs::File::create(at)), "made");
    expect("file", &|at| fs::write(at, "xy").unwrap(), "written");
    expect("link", &|at| fs::remove_file(at).unwrap(), "removed");
    expect("er", &|at| fs::remove_dir(at).unwrap(), "gone");
    change("file", &|at| fs::write(at, "xyz").unwrap());
    assert!(fixture.notices(&mut delegated).is_empty(), "this name is invalidated already");
}

#[test]
fn only_file_reads_cause_access_notices() {
    let fixture = Fixture::new("read");
    let mut delegated = fixture.delegated("deep/");
    assert_eq!(fs::read_dir(fixture.at.join("deep")).unwrap().count(), 3);
    assert_eq!(fs::read_dir(fixture.at.join("deep/er")).unwrap().count(), 0);
    assert_eq!(fs::metadata(fixture.at.join("deep/file")).unwrap().len(), 3);
    assert!(fixture.notices(&mut delegated).is_empty());
    drop(fs::read(fixture.at.join("deep/file")).unwrap());
    assert_eq!(fixture.notices(&mut delegated).len(), 1);
}

#[test]
fn change_of_the_path_invalidates_the_directory() {
    type Change = fn(&Path);
    let changes: [(&str, Change); 5] = [
        ("link on the path", |at| {
            fs::remove_file(at.join("way")).unwrap();
        }),
        ("the directory", |at| fs::rename(at.join("deep"), at.join("other")).unwrap()),
        ("above it", |at| {
            let aside = at.with_extension("aside");
            fs::rename(at, &aside).unwrap();
            fs::rename(&aside, at).unwrap();
        }),
        ("its permissions", |at| {
            let rights = std::os::unix::fs::PermissionsExt::from_mode(0o700);
            fs::set_permissions(at.join("deep"), rights).unwrap();
        }),
        ("itself", |at| fs::remove_dir_all(at.join("deep")).unwrap()),
    ];
    for (what, change) in changes {
        let fixture = Fixture::new("way");
        let mut delegated = fixture.delegated("way/");
        fs::write(fixture.at.join("beside"), "").unwrap();
        assert!(fixture.notices(&mut delegated).is_empty(), "beside {what}");
        change(&fixture.at);
        let forget = NameNotice::InvalidateDirectory(ByteBuf::from(fixture.path("way/")));
        assert!(fixture.notices(&mut delegated).contains(&forget), "{what}");
        assert!(delegated.1.delegated.is_none());
    }
}

/// `deep` is a name in a delegated directory, is delegated itself, and is on the path of a scan.
#[test]
fn scan_through_delegated_directory_keeps_it_valid() {
    let fixture = Fixture::new("through");
    let (mut above, mut delegated) = (fixture.delegated(""), fixture.delegated("deep/"));
    drop(fixture.scan(fixture.path("deep/er/"), 10).unwrap());
    drop(fixture.scan(fixture.path("deep/"), 10).unwrap());
    let events = fixture.watcher.events();
    for (path, directory) in [&mut above, &mut delegated] {
        assert!(directory.delegated.is_some());
        assert!(events.iter().all(|event| directory.apply(path, event).is_none()));
    }
}

/// The kernel has one watch for a directory, regardless of the number of users.
#[test]
fn watch_is_released_with_its_last_user() {
    let fixture = Fixture::new("shared");
    let (first, mut second) = (fixture.delegated("deep/"), fixture.delegated("way/"));
    drop(first);
    // When this scan is done the watches of the first have been released.
    drop(fixture.scan(fixture.path("deep/er/"), 10));
    drop(fixture.watcher.events());
    fs::write(fixture.at.join("deep/new"), "").unwrap();
    assert_eq!(fixture.notices(&mut second).len(), 1);
    drop(second);
    drop(fixture.scan(fixture.path("deep/er/"), 10));
    drop(fixture.scan(b"/".to_vec(), 10));
    fs::write(fixture.at.join("deep/newer"), "").unwrap();
    let delegated = fixture.watcher.events();
    assert!(!delegated.iter().any(|event| event.is_of(b"newer")), "no scan uses this watch any more");
}

/// Each change wakes the shim.
#[test]
fn busy_directory_is_not_watched_any_more() {
    let fixture = Fixture::new("busy");
    let mut delegated = fixture.delegated("deep/");
    let mut notices = Vec::new();
    for generation in 0..100_000 {
        // Alternating names: the kernel merges identical events.
        fs::write(fixture.at.join(format!("deep/{}", generation % 2)), "").unwrap();
        notices.extend(fixture.notices(&mut delegated));
        if delegated.1.delegated.is_none() {
            break;
        }
    }
    assert_eq!(notices.len(), 3, "{notices:?}");
    assert!(matches!(notices[2], NameNotice::InvalidateDirectory(_)));
}

#[test]
fn only_permitted_lookups_name_a_directory() {
    let call = |nr: i64, path: &str| {
        let path = Arg::Bytes(ByteBuf::from(format!("{path}\0").into_bytes()));
        let zero = || Arg::Value(0);
        Call { nr: nr as u32, args: [path, Arg::Output, Arg::Value(100), zero(), zero(), zero()] }
    };
    let none = -i64::from(libc::ENOENT);
    let of = |call: &Call, ret: i64| directory_used(call, &Outcome { ret, outs: Vec::new() });
    assert_eq!(of(&call(libc::SYS_lstat, "/a/b"), 0), Some((b"/a/".to_vec(), true)));
    assert_eq!(of(&call(libc::SYS_lstat, "a/b"), none), Some((b"a/".to_vec(), true)));
    assert_eq!(of(&call(libc::SYS_lstat, "a/b"), -i64::from(libc::EACCES)), None);
    assert_eq!(of(&call(libc::SYS_readlink, "b"), -i64::from(libc::EINVAL)), Some((Vec::new(), true)));
    assert_eq!(of(&call(libc::SYS_unlink, "b"), 0), None);
    let attributes = crate::files::attributes::file_attributes(&fs::File::open("/").unwrap().into()).unwrap();
    let like = Outcome { ret: 0, outs: vec![ByteBuf::from(attributes.stat())] };
    assert_eq!(directory_used(&call(libc::SYS_stat, "/a/b"), &like), Some((b"/a/b/".to_vec(), true)));
    let like = Outcome { ret: 0, outs: vec![ByteBuf::from(attributes.statx())] };
    let mut wide = call(libc::SYS_statx, "");
    wide.args.swap(0, 1);
    (wide.args[0], wide.args[1]) = (Arg::Value(0), Arg::Bytes(ByteBuf::from(b"/a/b\0".to_vec())));
    (wide.args[2], wide.args[4]) = (Arg::Value(0), Arg::Output);
    assert_eq!(directory_used(&wide, &like), Some((b"/a/b/".to_vec(), true)));
    let mut open = call(libc::SYS_open, "/a/b");
    open.args[1] = Arg::Value(libc::O_RDONLY as u64);
    assert_eq!(of(&open, 3), Some((b"/a/".to_vec(), false)));
}

/// A listing is sent as scanned, together with the names that have changed since.
#[test]
fn changes_after_the_scan_are_sent_with_the_listing() {
    let fixture = Fixture::new("between");
    let path = fixture.path("deep/");
    let listing = fixture.scan(path.clone(), 100).unwrap();
    let mut directory = Directory::default();
    assert!(directory.listing.replace((listing, BTreeSet::new())).is_none());
    assert!(directory.can_be_sent(Instant::now()));
    fs::remove_file(fixture.at.join("deep/file")).unwrap();
    assert!(fixture.watcher.events().iter().all(|event| directory.apply(&path, event).is_none()));
    let changed = directory.listing.as_ref().map(|(_, changed)| changed.contains(b"file".as_slice()));
    assert_eq!(changed, Some(true));
    fs::rename(fixture.at.join("deep"), fixture.at.join("other")).unwrap();
    fixture.watcher.events().iter().for_each(|event| drop(directory.apply(&path, event)));
    assert!(directory.listing.is_none() && !directory.can_be_sent(Instant::now()));
}

/// A user other than root cannot traverse a private directory.
#[test]
fn private_directory_on_the_path_is_not_traversed() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let fixture = Fixture::new("private");
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    fs::set_permissions(fixture.at.join("deep"), private).unwrap();
    let mut child = std::process::Command::new("sleep");
    let mut child =
        std::os::unix::process::CommandExt::uid(child.arg("100"), 1234).current_dir("/").spawn().unwrap();
    let pid = HomePid(child.id().cast_signed());
    let scan = |directory: &str| {
        let directory = fixture.path(directory);
        fixture.watcher.request(ScanRequest {
            pid,
            tid: pid,
            directory,
            max_names: 100,
            generation: 0,
            changes: 0,
        });
        fixture.scanned()
    };
    let (open, shut, below) = (scan(""), scan("deep/"), scan("deep/er/"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(open.is_ok());
    assert!(matches!((shut, below), (Err(ScanError::Never), Err(ScanError::Never))));
}
