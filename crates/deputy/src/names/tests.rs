use super::known::Directory;
use super::*;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tern_migrate::names::Named;

/// A directory of its own, and eyes for this process.
struct Bed {
    at: PathBuf,
    eyes: Eyes,
}

impl Bed {
    fn new(name: &str) -> Self {
        let at = std::env::temp_dir().join(format!("tern-names-{name}-{}", std::process::id()));
        let _old = fs::remove_dir_all(&at);
        fs::create_dir_all(at.join("deep/er")).unwrap();
        fs::write(at.join("deep/file"), "abc").unwrap();
        std::os::unix::fs::symlink("file", at.join("deep/link")).unwrap();
        std::os::unix::fs::symlink(at.join("deep"), at.join("way")).unwrap();
        Self { at, eyes: Eyes::open(Bell::new().unwrap()).unwrap() }
    }

    fn path(&self, below: &str) -> Vec<u8> {
        format!("{}/{below}", self.at.display()).into_bytes()
    }

    fn look(&self, directory: Vec<u8>, most: usize) -> Result<Seen, Why> {
        let me = HomePid(std::process::id().cast_signed());
        self.eyes.ask(Ask { pid: me, tid: me, directory, most, turn: 0, changes: 0 });
        self.looked()
    }

    fn looked(&self) -> Result<Seen, Why> {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(looked) = self.eyes.looked() {
                return looked.seen;
            }
            assert!(Instant::now() < until, "it has not been looked at");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A directory that has been told, and what its process is told of what has changed since.
    fn told(&self, directory: &str) -> (Vec<u8>, Directory) {
        let path = self.path(directory);
        let seen = self.look(path.clone(), 100).unwrap();
        drop(self.eyes.events());
        (path, knows(seen.watched))
    }

    fn words(&self, (path, directory): &mut (Vec<u8>, Directory)) -> Vec<NameWord> {
        self.eyes.events().iter().filter_map(|event| directory.hear(path, event)).collect()
    }
}

fn knows(watched: Watched) -> Directory {
    let mut directory = Directory::default();
    directory.is_told(Told { watched, names: 0, changed: BTreeSet::new() });
    directory
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.at);
    }
}

fn names(seen: &Seen) -> Vec<String> {
    let mut names: Vec<String> =
        seen.names.iter().map(|(name, _)| String::from_utf8_lossy(name.as_slice()).into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_directory_is_seen_with_what_is_in_it() {
    let bed = Bed::new("seen");
    fs::hard_link(bed.at.join("deep/file"), bed.at.join("deep/twin")).unwrap();
    let single = bed.at.join("deep/single");
    fs::write(&single, "abcd").unwrap();
    let young = bed.look(bed.path("deep/"), 100).unwrap();
    let of_single = young.names.iter().find(|(name, _)| name.as_slice() == b"single").map(|(_, named)| named);
    assert_eq!(of_single, Some(&Named::Other), "it may be written just now");
    while fs::metadata(&single).unwrap().modified().unwrap().elapsed().unwrap() < Duration::from_millis(2100)
    {
        std::thread::sleep(Duration::from_millis(50));
    }
    let mode =
        std::os::unix::fs::MetadataExt::mode(&fs::metadata(bed.at.join("deep")).unwrap()) as u16 & 0o7777;
    for way in ["deep/", "way/", "way/er/..", "deep/er/../"] {
        let seen = bed.look(bed.path(way), 100).unwrap();
        assert_eq!(names(&seen), ["er", "file", "link", "single", "twin"], "{way}");
        assert_eq!((seen.direct, seen.about.mode & 0o7777), (way != "way/", mode), "{way}");
        let of = |name: &str| {
            let found = seen.names.iter().find(|(found, _)| found.as_slice() == name.as_bytes());
            found.map(|(_, named)| named.clone())
        };
        assert!(matches!(of("single"), Some(Named::File(about)) if about.size == 4));
        assert_eq!(of("link"), Some(Named::Link(ByteBuf::from(b"file".to_vec()))));
        assert_eq!((of("er"), of("twin")), (Some(Named::Other), Some(Named::Other)));
    }
    assert!(matches!(bed.look(bed.path("deep/"), 4), Err(Why::Now)), "more than it is worth");
    assert!(matches!(bed.look(bed.path("none/"), 4), Err(Why::Now)));
    assert!(matches!(bed.look(b"/proc/self/".to_vec(), 4000), Err(Why::Never)), "changes without a word");
}

#[test]
fn what_changes_is_told_once_and_what_does_not_is_not() {
    let bed = Bed::new("told");
    let mut told = bed.told("deep/");
    assert!(bed.words(&mut told).is_empty());
    let change = |name: &str, change: &dyn Fn(&Path)| change(&bed.at.join("deep").join(name));
    let mut expect = |name: &str, done: &dyn Fn(&Path), what: &str| {
        change(name, done);
        let word =
            NameWord::Changed(ByteBuf::from(bed.path("deep/")), ByteBuf::from(name.as_bytes().to_vec()));
        assert_eq!(bed.words(&mut told), [word], "{what}");
    };
    expect("new", &|at| drop(fs::File::create(at)), "made");
    expect("file", &|at| fs::write(at, "xy").unwrap(), "written");
    expect("link", &|at| fs::remove_file(at).unwrap(), "removed");
    expect("er", &|at| fs::remove_dir(at).unwrap(), "gone");
    change("file", &|at| fs::write(at, "xyz").unwrap());
    assert!(bed.words(&mut told).is_empty(), "that is known to be unknown");
}

#[test]
fn a_look_or_a_read_changes_times_of_access_only() {
    let bed = Bed::new("read");
    let mut told = bed.told("deep/");
    assert_eq!(fs::read_dir(bed.at.join("deep")).unwrap().count(), 3);
    assert_eq!(fs::read_dir(bed.at.join("deep/er")).unwrap().count(), 0);
    assert_eq!(fs::metadata(bed.at.join("deep/file")).unwrap().len(), 3);
    assert!(bed.words(&mut told).is_empty());
    drop(fs::read(bed.at.join("deep/file")).unwrap());
    assert_eq!(bed.words(&mut told).len(), 1);
}

#[test]
fn another_directory_on_the_way_is_another_one() {
    type Change = fn(&Path);
    let changes: [(&str, Change); 5] = [
        ("the link", |at| {
            fs::remove_file(at.join("way")).unwrap();
        }),
        ("the directory", |at| fs::rename(at.join("deep"), at.join("other")).unwrap()),
        ("above it", |at| {
            let aside = at.with_extension("aside");
            fs::rename(at, &aside).unwrap();
            fs::rename(&aside, at).unwrap();
        }),
        ("its rights", |at| {
            let rights = std::os::unix::fs::PermissionsExt::from_mode(0o700);
            fs::set_permissions(at.join("deep"), rights).unwrap();
        }),
        ("itself", |at| fs::remove_dir_all(at.join("deep")).unwrap()),
    ];
    for (what, change) in changes {
        let bed = Bed::new("way");
        let mut told = bed.told("way/");
        fs::write(bed.at.join("beside"), "").unwrap();
        assert!(bed.words(&mut told).is_empty(), "beside {what}");
        change(&bed.at);
        let forget = NameWord::Forget(ByteBuf::from(bed.path("way/")));
        assert!(bed.words(&mut told).contains(&forget), "{what}");
        assert!(told.1.told.is_none());
    }
}

/// A directory that is itself a name in one that is told, and on the way to another that is looked at.
#[test]
fn to_be_looked_through_changes_nothing() {
    let bed = Bed::new("through");
    let (mut above, mut told) = (bed.told(""), bed.told("deep/"));
    drop(bed.look(bed.path("deep/er/"), 10).unwrap());
    drop(bed.look(bed.path("deep/"), 10).unwrap());
    let events = bed.eyes.events();
    for (path, directory) in [&mut above, &mut told] {
        assert!(directory.told.is_some());
        assert!(events.iter().all(|event| directory.hear(path, event).is_none()));
    }
}

/// The kernel has one watch for a directory, however many need it.
#[test]
fn watches_last_as_long_as_somebody_needs_them() {
    let bed = Bed::new("shared");
    let (first, mut second) = (bed.told("deep/"), bed.told("way/"));
    drop(first);
    // When this has been seen the end of the first has been.
    drop(bed.look(bed.path("deep/er/"), 10));
    drop(bed.eyes.events());
    fs::write(bed.at.join("deep/new"), "").unwrap();
    assert_eq!(bed.words(&mut second).len(), 1);
    drop(second);
    drop(bed.look(bed.path("deep/er/"), 10));
    drop(bed.look(b"/".to_vec(), 10));
    fs::write(bed.at.join("deep/newer"), "").unwrap();
    let told = bed.eyes.events();
    assert!(!told.iter().any(|event| event.is_of(b"newer")), "nobody looks there any more");
}

/// Each change wakes us.
#[test]
fn a_directory_in_which_very_much_happens_is_left() {
    let bed = Bed::new("busy");
    let mut told = bed.told("deep/");
    let mut words = Vec::new();
    for turn in 0..100_000 {
        // Not the same twice, which the kernel tells as one.
        fs::write(bed.at.join(format!("deep/{}", turn % 2)), "").unwrap();
        words.extend(bed.words(&mut told));
        if told.1.told.is_none() {
            break;
        }
    }
    assert_eq!(words.len(), 3, "{words:?}");
    assert!(matches!(words[2], NameWord::Forget(_)));
}

#[test]
fn only_calls_that_were_let_show_a_way() {
    let call = |nr: i64, path: &str| {
        let path = Arg::Bytes(ByteBuf::from(format!("{path}\0").into_bytes()));
        let zero = || Arg::Value(0);
        Call { nr: nr as u32, args: [path, Arg::Room, Arg::Value(100), zero(), zero(), zero()] }
    };
    let none = -i64::from(libc::ENOENT);
    let of = |call: &Call, ret: i64| looked_in(call, &Outcome { ret, outs: Vec::new() });
    assert_eq!(of(&call(libc::SYS_lstat, "/a/b"), 0), Some((b"/a/".to_vec(), true)));
    assert_eq!(of(&call(libc::SYS_lstat, "a/b"), none), Some((b"a/".to_vec(), true)));
    assert_eq!(of(&call(libc::SYS_lstat, "a/b"), -i64::from(libc::EACCES)), None);
    assert_eq!(of(&call(libc::SYS_readlink, "b"), -i64::from(libc::EINVAL)), Some((Vec::new(), true)));
    assert_eq!(of(&call(libc::SYS_unlink, "b"), 0), None);
    let about = crate::begins::about(&fs::File::open("/").unwrap().into()).unwrap();
    let like = Outcome { ret: 0, outs: vec![ByteBuf::from(about.stat())] };
    assert_eq!(looked_in(&call(libc::SYS_stat, "/a/b"), &like), Some((b"/a/b/".to_vec(), true)));
    let like = Outcome { ret: 0, outs: vec![ByteBuf::from(about.statx())] };
    let mut wide = call(libc::SYS_statx, "");
    wide.args.swap(0, 1);
    (wide.args[0], wide.args[1]) = (Arg::Value(0), Arg::Bytes(ByteBuf::from(b"/a/b\0".to_vec())));
    (wide.args[2], wide.args[4]) = (Arg::Value(0), Arg::Room);
    assert_eq!(looked_in(&wide, &like), Some((b"/a/b/".to_vec(), true)));
    let mut open = call(libc::SYS_open, "/a/b");
    open.args[1] = Arg::Value(libc::O_RDONLY as u64);
    assert_eq!(of(&open, 3), Some((b"/a/".to_vec(), false)));
}

/// What has been seen is told as it was, and what has changed since with it; not what is looked at long after.
#[test]
fn what_changes_before_it_is_told_is_told_with_it() {
    let bed = Bed::new("between");
    let path = bed.path("deep/");
    let seen = bed.look(path.clone(), 100).unwrap();
    let mut directory = Directory::default();
    assert!(directory.seen.replace((seen, BTreeSet::new())).is_none());
    assert!(directory.is_to_be_told(Instant::now()));
    fs::remove_file(bed.at.join("deep/file")).unwrap();
    assert!(bed.eyes.events().iter().all(|event| directory.hear(&path, event).is_none()));
    let changed = directory.seen.as_ref().map(|(_, changed)| changed.contains(b"file".as_slice()));
    assert_eq!(changed, Some(true));
    fs::rename(bed.at.join("deep"), bed.at.join("other")).unwrap();
    bed.eyes.events().iter().for_each(|event| drop(directory.hear(&path, event)));
    assert!(directory.seen.is_none() && !directory.is_to_be_told(Instant::now()));
}

/// A user that is not root, and what he may go through.
#[test]
fn a_private_directory_on_the_way_is_not_gone_through() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let bed = Bed::new("private");
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    fs::set_permissions(bed.at.join("deep"), private).unwrap();
    let mut child = std::process::Command::new("sleep");
    let mut child =
        std::os::unix::process::CommandExt::uid(child.arg("100"), 1234).current_dir("/").spawn().unwrap();
    let pid = HomePid(child.id().cast_signed());
    let look = |directory: &str| {
        let directory = bed.path(directory);
        bed.eyes.ask(Ask { pid, tid: pid, directory, most: 100, turn: 0, changes: 0 });
        bed.looked()
    };
    let (open, shut, below) = (look(""), look("deep/"), look("deep/er/"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(open.is_ok());
    assert!(matches!((shut, below), (Err(Why::Never), Err(Why::Never))));
}
