use super::super::budget::Budget;
use super::super::export::Export;
use super::super::session::Session;
use super::super::stat::attributes;
use super::*;
use crate::message::Purpose;
use rustix::fs::{Mode, OFlags, open};
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How long something may take on a busy machine.
const SOON: Duration = Duration::from_secs(20);

struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let place = std::env::temp_dir().join(format!("tern-notice-{name}-{}", std::process::id()));
        fs::create_dir_all(&place).unwrap();
        Self(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}

/// Leases that hear of what local programs do, and somebody who has some; none where the kernel does not tell.
fn heard() -> Option<(Arc<Leases>, Arc<Session>)> {
    let leases = Arc::new(Leases::new(true));
    leases.listen();
    if let Err(error) = Group::new() {
        eprintln!("not here: {error}");
        return None;
    }
    let session = Session::new(&Export::default(), &Budget::new(10), Purpose::All).unwrap();
    session.hears(true);
    Some((leases, session))
}

fn held(path: &Path) -> (OwnedFd, FileKey, FileType) {
    let fd = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let is = attributes(&fd).unwrap();
    (fd, is.key, FileType::from_raw_mode(is.mode))
}

/// Whether a lease of this file is asked back when a program runs, over and over: who was too slow finds it over.
fn is_asked_back(leases: &Leases, session: &Arc<Session>, path: &Path, line: &str) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < SOON {
        let (fd, key, kind) = held(path);
        assert!(leases.grant(session, key));
        leases.watch(session, &fd, key, kind);
        assert!(
            Command::new("sh")
                .args(["-c", line])
                .current_dir(path.parent().unwrap())
                .status()
                .unwrap()
                .success()
        );
        if session.recalled(TERM).unwrap().0.iter().any(|lease| lease.of == key) {
            return true;
        }
    }
    false
}

#[test]
fn what_a_local_program_does_is_noticed() {
    let Some((leases, session)) = heard() else { return };
    let place = Place::new("done");
    let (file, dir) = (place.0.join("file"), place.0.join("dir"));
    fs::write(&file, "one").unwrap();
    fs::create_dir(&dir).unwrap();
    for line in [
        "printf two > file",
        "truncate -s 1 file",
        "chmod 640 file",
        "touch file",
        "ln -f file other",
        "rm -f other",
        "mv file other; mv other file",
        "printf new > new; mv new file",
    ] {
        assert!(is_asked_back(&leases, &session, &file, line), "{line}");
    }
    for line in [
        "touch dir/a",
        "mv dir/a dir/b",
        "rm dir/b",
        "touch c; mv c dir/c",
        "mv dir/c c",
        "mkdir -p dir/d; rmdir dir/d",
        "chmod 750 dir",
    ] {
        assert!(is_asked_back(&leases, &session, &dir, line), "{line}");
    }
}

#[test]
fn what_is_done_by_ourselves_is_no_news() {
    let Some((leases, session)) = heard() else { return };
    let place = Place::new("own");
    let (own, other) = (place.0.join("own"), place.0.join("other"));
    fs::write(&own, "one").unwrap();
    fs::write(&other, "one").unwrap();
    let (own_fd, own_key, kind) = held(&own);
    assert!(leases.grant(&session, own_key));
    leases.watch(&session, &own_fd, own_key, kind);
    fs::write(&own, "two").unwrap();
    // What comes behind it is heard.
    assert!(is_asked_back(&leases, &session, &other, "printf two > other"));
    assert!(session.recalled(Duration::ZERO).unwrap().0.iter().all(|lease| lease.of != own_key));
}

/// Whoever lets go of a removed file last is told to have ended it: that is us, as long as we hold what others know.
#[test]
fn a_file_with_the_number_of_one_that_is_gone_is_watched_as_well() {
    let Some((leases, session)) = heard() else { return };
    let place = Place::new("again");
    let path = |name: usize| place.0.join(format!("{name}"));
    for name in 0..200 {
        fs::write(path(name), "one").unwrap();
        let (fd, key, kind) = held(&path(name));
        assert!(leases.grant(&session, key));
        leases.watch(&session, &fd, key, kind);
        assert!(Command::new("rm").arg(path(name)).status().unwrap().success());
        assert!(session.recalled(SOON).unwrap().0.iter().any(|lease| lease.of == key));
        drop(fd);
        fs::write(path(name + 1), "one").unwrap();
        if held(&path(name + 1)).1 == key {
            let line = format!("printf two >> {}", name + 1);
            assert!(is_asked_back(&leases, &session, &path(name + 1), &line));
            return;
        }
    }
    eprintln!("not here: no file has the number of another one");
}

#[test]
fn a_lease_is_asked_back_once_and_all_of_them_when_notices_were_lost() {
    let leases = Leases::new(true);
    let session = Session::new(&Export::default(), &Budget::new(10), Purpose::All).unwrap();
    session.hears(true);
    let key = |inode| FileKey { volume: 1, device: 1, inode };
    for inode in 0..3 {
        assert!(leases.grant(&session, key(inode)));
    }
    leases.noticed(key(1));
    leases.noticed(key(1));
    leases.noticed(key(7));
    assert_eq!(session.recalled(TERM).unwrap().0.len(), 1);
    leases.noticed_all();
    assert_eq!(session.recalled(TERM).unwrap().0.len(), 2);
    assert!(leases.grant(&session, key(1)));
    leases.noticed(key(1));
    assert_eq!(session.recalled(TERM).unwrap().0.len(), 1, "the next lease is another one");
}

#[test]
fn marks_last_for_longer_than_what_they_are_for() {
    let (Some(_), Ok(group)) = (heard(), Group::new()) else { return };
    let place = Place::new("turn");
    let file = place.0.join("file");
    fs::write(&file, "one").unwrap();
    let notices = Notices::of(Groups { now: group, before: None, local: HashMap::new() });
    let (fd, key, kind) = held(&file);
    notices.watch(&fd, key, kind);
    let handle = Some(Handle::of(&fd, key.volume).unwrap());
    let event = |mask| Event { mask, process: 1, handle: handle.clone() };
    let age = |notices: &Notices| {
        lock(&notices.groups).now.begun = Instant::now().checked_sub(2 * LIFE).unwrap();
        notices.turn();
    };
    notices.turn();
    assert!(lock(&notices.groups).before.is_none(), "it is young");
    age(&notices);
    assert_eq!(notices.sources().len(), 2);
    assert_eq!(notices.file_of(&event(MaskFlags::FAN_MODIFY)), Some(key));
    // Nothing was watched since: what is there goes on.
    age(&notices);
    assert_eq!(notices.file_of(&event(MaskFlags::FAN_MODIFY)), Some(key));
    notices.watch(&fd, key, kind);
    assert!(lock(&notices.groups).now.marked.contains_key(&key));
    assert_eq!(notices.file_of(&event(MaskFlags::FAN_DELETE_SELF)), Some(key));
    assert!(!lock(&notices.groups).now.marked.contains_key(&key), "another one may have its number");
}

#[test]
fn what_nobody_can_believe_is_not_listened_for() {
    let Some((leases, session)) = heard() else { return };
    let place = Place::new("ignored");
    let (quiet, other) = (place.0.join("quiet"), place.0.join("other"));
    fs::write(&quiet, "one").unwrap();
    fs::write(&other, "one").unwrap();
    let (fd, key, kind) = held(&quiet);
    assert!(leases.grant(&session, key));
    leases.watch(&session, &fd, key, kind);
    leases.ignore(&fd, key);
    assert!(Command::new("sh").args(["-c", "printf two >$0"]).arg(&quiet).status().unwrap().success());
    // What comes behind it is heard.
    assert!(is_asked_back(&leases, &session, &other, "printf two > other"));
    assert!(session.recalled(Duration::ZERO).unwrap().0.iter().all(|lease| lease.of != key));
    assert!(is_asked_back(&leases, &session, &quiet, "printf two > quiet"), "it is watched again");
}

#[test]
fn what_lasts_is_watched_for_as_long_as_it_does() {
    let Some((leases, _)) = heard() else { return };
    let place = Place::new("lasts");
    let file = place.0.join("file");
    fs::write(&file, "one").unwrap();
    let session = Session::new(&Export::default(), &Budget::new(10), Purpose::Room).unwrap();
    session.hears(true);
    let (fd, key, kind) = held(&file);
    let hold = super::super::session::Held { fd, key, place: Export::default().root() };
    session.hold(hold).unwrap();
    assert!(leases.grant(&session, key));
    let (fd, ..) = held(&file);
    assert!(leases.watch(&session, &fd, key, kind));
    // Its mark is of the third group before the last now.
    for _ in 0..3 {
        let notices = leases.notices();
        lock(&notices.groups).now.begun = Instant::now().checked_sub(2 * LIFE).unwrap();
        let (last, gone) = notices.turn();
        leases.watch_again(&gone);
        drop(last);
    }
    assert!(session.recalled(Duration::ZERO).unwrap().0.is_empty());
    assert!(Command::new("sh").args(["-c", "printf two >$0"]).arg(&file).status().unwrap().success());
    leases.catch_up();
    assert_eq!(session.recalled(Duration::ZERO).unwrap().0.len(), 1);
}
