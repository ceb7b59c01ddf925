use super::super::budget::FdBudget;
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
const TIMEOUT: Duration = Duration::from_secs(20);

struct TempDir(PathBuf);

impl TempDir {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("tern-notice-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}

/// Leases with fanotify, and a session with a callback channel; `None` if fanotify is not
/// available.
fn watched_leases() -> Option<(Arc<LeaseTable>, Arc<Session>)> {
    let leases = Arc::new(LeaseTable::new(true));
    leases.watch_local_changes();
    if let Err(error) = Group::new() {
        eprintln!("fanotify is not available: {error}");
        return None;
    }
    let session = Session::new(&Export::default(), &FdBudget::new(10), Purpose::All).unwrap();
    session.set_callback(true);
    Some((leases, session))
}

fn open_path(path: &Path) -> (OwnedFd, FileKey, FileType) {
    let fd = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let attributes = attributes(&fd).unwrap();
    (fd, attributes.key, FileType::from_raw_mode(attributes.mode))
}

/// Whether a lease of this file is recalled when a command runs. Repeated, since a slow command may
/// end after the lease.
fn is_recalled_by(leases: &LeaseTable, session: &Arc<Session>, path: &Path, command: &str) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < TIMEOUT {
        let (fd, key, kind) = open_path(path);
        assert!(leases.grant(session, key));
        leases.watch(session, &fd, key, kind);
        assert!(
            Command::new("sh")
                .args(["-c", command])
                .current_dir(path.parent().unwrap())
                .status()
                .unwrap()
                .success()
        );
        if session.next_recalls(TERM).unwrap().0.iter().any(|lease| lease.file == key) {
            return true;
        }
    }
    false
}

#[test]
fn change_by_a_local_program_recalls_leases() {
    let Some((leases, session)) = watched_leases() else { return };
    let temp = TempDir::new("done");
    let (file, dir) = (temp.0.join("file"), temp.0.join("dir"));
    fs::write(&file, "one").unwrap();
    fs::create_dir(&dir).unwrap();
    for command in [
        "printf two > file",
        "truncate -s 1 file",
        "chmod 640 file",
        "touch file",
        "ln -f file other",
        "rm -f other",
        "mv file other; mv other file",
        "printf new > new; mv new file",
    ] {
        assert!(is_recalled_by(&leases, &session, &file, command), "{command}");
    }
    for command in [
        "touch dir/a",
        "mv dir/a dir/b",
        "rm dir/b",
        "touch c; mv c dir/c",
        "mv dir/c c",
        "mkdir -p dir/d; rmdir dir/d",
        "chmod 750 dir",
    ] {
        assert!(is_recalled_by(&leases, &session, &dir, command), "{command}");
    }
}

#[test]
fn own_change_is_ignored() {
    let Some((leases, session)) = watched_leases() else { return };
    let temp = TempDir::new("own");
    let (own, other) = (temp.0.join("own"), temp.0.join("other"));
    fs::write(&own, "one").unwrap();
    fs::write(&other, "one").unwrap();
    let (own_fd, own_key, kind) = open_path(&own);
    assert!(leases.grant(&session, own_key));
    leases.watch(&session, &own_fd, own_key, kind);
    fs::write(&own, "two").unwrap();
    // Wait until a later change is reported.
    assert!(is_recalled_by(&leases, &session, &other, "printf two > other"));
    assert!(session.next_recalls(Duration::ZERO).unwrap().0.iter().all(|lease| lease.file != own_key));
}

/// The event for a removed file names the process that dropped the last descriptor: the server, if
/// it held the object.
#[test]
fn file_with_a_reused_inode_number_is_watched() {
    let Some((leases, session)) = watched_leases() else { return };
    let temp = TempDir::new("again");
    let path = |name: usize| temp.0.join(format!("{name}"));
    for name in 0..200 {
        fs::write(path(name), "one").unwrap();
        let (fd, key, kind) = open_path(&path(name));
        assert!(leases.grant(&session, key));
        leases.watch(&session, &fd, key, kind);
        assert!(Command::new("rm").arg(path(name)).status().unwrap().success());
        assert!(session.next_recalls(TIMEOUT).unwrap().0.iter().any(|lease| lease.file == key));
        drop(fd);
        fs::write(path(name + 1), "one").unwrap();
        if open_path(&path(name + 1)).1 == key {
            let command = format!("printf two >> {}", name + 1);
            assert!(is_recalled_by(&leases, &session, &path(name + 1), &command));
            return;
        }
    }
    eprintln!("no inode number was reused");
}

#[test]
fn lease_is_recalled_once_and_all_leases_on_event_overflow() {
    let leases = LeaseTable::new(true);
    let session = Session::new(&Export::default(), &FdBudget::new(10), Purpose::All).unwrap();
    session.set_callback(true);
    let key = |inode| FileKey { volume: 1, device: 1, inode };
    for inode in 0..3 {
        assert!(leases.grant(&session, key(inode)));
    }
    leases.recall_changed(key(1));
    leases.recall_changed(key(1));
    leases.recall_changed(key(7));
    assert_eq!(session.next_recalls(TERM).unwrap().0.len(), 1);
    leases.recall_all_changed();
    assert_eq!(session.next_recalls(TERM).unwrap().0.len(), 2);
    assert!(leases.grant(&session, key(1)));
    leases.recall_changed(key(1));
    assert_eq!(session.next_recalls(TERM).unwrap().0.len(), 1, "the next lease is recalled too");
}

#[test]
fn marks_outlive_the_leases_they_are_for() {
    let (Some(_), Ok(group)) = (watched_leases(), Group::new()) else { return };
    let temp = TempDir::new("turn");
    let file = temp.0.join("file");
    fs::write(&file, "one").unwrap();
    let watcher = ChangeWatcher::new(Groups { current: group, previous: None, is_local: HashMap::new() });
    let (fd, key, kind) = open_path(&file);
    watcher.watch(&fd, key, kind);
    let handle = Some(Handle::of(&fd, key.volume).unwrap());
    let event = |mask| Event { mask, process: 1, handle: handle.clone() };
    let age = |watcher: &ChangeWatcher| {
        lock(&watcher.groups).current.created = Instant::now().checked_sub(2 * GROUP_LIFETIME).unwrap();
        watcher.rotate();
    };
    watcher.rotate();
    assert!(lock(&watcher.groups).previous.is_none(), "the group is young");
    age(&watcher);
    assert_eq!(watcher.sources().len(), 2);
    assert_eq!(watcher.file_of(&event(MaskFlags::FAN_MODIFY)), Some(key));
    // Nothing was marked since, so the group stays current.
    age(&watcher);
    assert_eq!(watcher.file_of(&event(MaskFlags::FAN_MODIFY)), Some(key));
    watcher.watch(&fd, key, kind);
    assert!(lock(&watcher.groups).current.handles.contains_key(&key));
    assert_eq!(watcher.file_of(&event(MaskFlags::FAN_DELETE_SELF)), Some(key));
    assert!(!lock(&watcher.groups).current.handles.contains_key(&key), "the mark is gone with the file");
}

#[test]
fn unwatched_file_causes_no_recall_until_watched_again() {
    let Some((leases, session)) = watched_leases() else { return };
    let temp = TempDir::new("ignored");
    let (unwatched, other) = (temp.0.join("unwatched"), temp.0.join("other"));
    fs::write(&unwatched, "one").unwrap();
    fs::write(&other, "one").unwrap();
    let (fd, key, kind) = open_path(&unwatched);
    assert!(leases.grant(&session, key));
    leases.watch(&session, &fd, key, kind);
    leases.unwatch(&fd, key);
    assert!(Command::new("sh").args(["-c", "printf two >$0"]).arg(&unwatched).status().unwrap().success());
    // Wait until a later change is reported.
    assert!(is_recalled_by(&leases, &session, &other, "printf two > other"));
    assert!(session.next_recalls(Duration::ZERO).unwrap().0.iter().all(|lease| lease.file != key));
    assert!(
        is_recalled_by(&leases, &session, &unwatched, "printf two > unwatched"),
        "the next lease marks the file again"
    );
}

#[test]
fn renewable_lease_stays_watched_across_groups() {
    let Some((leases, _)) = watched_leases() else { return };
    let temp = TempDir::new("lasts");
    let file = temp.0.join("file");
    fs::write(&file, "one").unwrap();
    let session = Session::new(&Export::default(), &FdBudget::new(10), Purpose::Container).unwrap();
    session.set_callback(true);
    let (fd, key, kind) = open_path(&file);
    let held = super::super::session::HeldObject { fd, key, position: Export::default().root() };
    session.hold(held).unwrap();
    assert!(leases.grant(&session, key));
    let (fd, ..) = open_path(&file);
    assert!(leases.watch(&session, &fd, key, kind));
    // These rotations close the group of the file's first mark.
    for _ in 0..3 {
        let watcher = leases.watcher();
        lock(&watcher.groups).current.created = Instant::now().checked_sub(2 * GROUP_LIFETIME).unwrap();
        let (closing, unmarked) = watcher.rotate();
        leases.rewatch(&unmarked);
        drop(closing);
    }
    assert!(session.next_recalls(Duration::ZERO).unwrap().0.is_empty());
    assert!(Command::new("sh").args(["-c", "printf two >$0"]).arg(&file).status().unwrap().success());
    leases.drain_events();
    assert_eq!(session.next_recalls(Duration::ZERO).unwrap().0.len(), 1);
}
