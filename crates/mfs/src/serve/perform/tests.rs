use super::*;
use crate::message::{LockKind, Purpose, ROOT, Release};
use crate::serve::budget::FdBudget;
use crate::serve::leases;
use crate::serve::release;
use crate::serve::session::ReplyCache;
use rand::prelude::*;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// A temporary directory, which is the only export.
struct Exported {
    path: PathBuf,
    export: Export,
    session: Arc<Session>,
    leases: LeaseTable,
}

impl Exported {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tern-mfs-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        let path = path.canonicalize().unwrap();
        let export = Export { paths: vec![path.clone()], ..Export::default() };
        let session = Session::new(&export, &FdBudget::new(1000), Purpose::All).unwrap();
        Self { path, export, session, leases: LeaseTable::new(true) }
    }

    fn perform(&self, op: Op, data: &[u8]) -> Result<(FileReply, Vec<u8>), OpError> {
        self.perform_checked(&[], op, data)
    }

    fn perform_checked(
        &self,
        checks: &[DentryCheck],
        op: Op,
        data: &[u8],
    ) -> Result<(FileReply, Vec<u8>), OpError> {
        let mut out = Vec::new();
        let context = OpContext { session: &self.session, export: &self.export, leases: &self.leases };
        context.perform(checks, op, data, &mut out).map(|reply| (reply, out))
    }

    fn object(&self, path: &Path) -> Object {
        path.iter().skip(1).fold(ROOT, |dir, name| {
            match self.perform(Op::Lookup { dir, name: Name::from(name) }, &[]).unwrap().0 {
                FileReply::Found(found, _) => found.object,
                other => panic!("{other:?}"),
            }
        })
    }
}

impl Drop for Exported {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.path);
    }
}

#[test]
fn only_the_way_down_is_visible_above_an_export() {
    let exported = Exported::new("above");
    let ancestor = exported.object(exported.path.parent().unwrap());
    let name = || Name::from(OsStr::new("new"));
    for op in [
        Op::Mkdir { dir: ancestor, name: name(), mode: 0o700, umask: 0 },
        Op::Create { dir: ancestor, name: name(), mode: 0o600, umask: 0, flags: 1 },
        Op::Unlink { dir: ancestor, name: Name::from(exported.path.file_name().unwrap()) },
        Op::SetAttr {
            of: ancestor,
            opened: None,
            change: AttributeChange { mode: Some(0o777), ..AttributeChange::default() },
        },
        Op::GetXattr { of: ancestor, name: name() },
    ] {
        let result = exported.perform(op.clone(), &[]);
        assert!(matches!(result, Err(OpError::Errno(Errno::ACCESS))), "{op:?}: {result:?}");
    }
    let opened = exported.perform(Op::Open { of: ancestor, flags: 0, content: true }, &[]).unwrap().0;
    let FileReply::FileOpened(opened, _) = opened else { panic!("{opened:?}") };
    let listed =
        exported.perform(Op::ReadDir { opened, cookie: 0, max_bytes: 65_536, lookup: true }, &[]).unwrap().0;
    let FileReply::Entries { entries, .. } = listed else { panic!("{listed:?}") };
    let names: Vec<_> =
        entries.iter().map(|entry| entry.name.as_os()).filter(|name| *name != "." && *name != "..").collect();
    assert_eq!(names, [exported.path.file_name().unwrap()]);
}

#[test]
fn names_must_be_single_components() {
    let exported = Exported::new("steps");
    let dir = exported.object(&exported.path);
    for wrong in ["..", ".", "", "../x", "/etc", "a/b", "a\0b"] {
        let name = || Name::from(OsStr::new(wrong));
        for op in [
            Op::Lookup { dir, name: name() },
            Op::Mkdir { dir, name: name(), mode: 0o700, umask: 0 },
            Op::Create { dir, name: name(), mode: 0o600, umask: 0, flags: 1 },
            Op::Link { of: dir, dir, name: name() },
            Op::Rename { dir, name: name(), to: dir, new: Name::from(OsStr::new("b")), flags: 0 },
            Op::Rename { dir, name: Name::from(OsStr::new("b")), to: dir, new: name(), flags: 0 },
        ] {
            let result = exported.perform(op.clone(), &[]);
            assert!(matches!(result, Err(OpError::Errno(Errno::INVAL))), "{op:?}: {result:?}");
        }
    }
}

fn create(exported: &Exported, dir: Object, name: &str) -> (Found, OpenId) {
    let op = Op::Create { dir, name: Name::from(OsStr::new(name)), mode: 0o600, umask: 0, flags: 2 };
    match exported.perform(op, &[]).unwrap().0 {
        FileReply::Created(found, opened, _) => (found, opened),
        other => panic!("{other:?}"),
    }
}

#[test]
fn nothing_is_performed_if_a_dentry_check_fails() {
    let exported = Exported::new("backing_file");
    let at = |name: &str| exported.path.join(name);
    std::fs::create_dir(at("a")).unwrap();
    std::fs::write(at("a/f"), "text").unwrap();
    let [dir, a, f] = ["", "a", "a/f"].map(|path| exported.object(&at(path)));
    let check = |dir, name: &str, object| DentryCheck { dir, name: Name::from(OsStr::new(name)), object };
    let checks = [check(a, "f", f), check(dir, "a", a)];
    let name = |name: &str| Name::from(OsStr::new(name));
    let ops = [
        Op::Open { of: f, flags: 0, content: true },
        Op::Mkdir { dir: a, name: name("d"), mode: 0o700, umask: 0 },
        Op::Unlink { dir: a, name: name("d") },
        Op::Lookup { dir: a, name: name("none") },
    ];
    let perform = |op: &Op| exported.perform_checked(&checks, op.clone(), &[]).map(|(reply, _)| reply);
    let Ok((FileReply::FileOpened(_, attributes), content)) =
        exported.perform_checked(&checks, ops[0].clone(), &[])
    else {
        panic!("not opened")
    };
    assert_eq!((attributes.size, content.len()), (4, 0), "content without a lease");
    exported.session.set_callback(true);
    let content = exported.perform_checked(&checks, ops[0].clone(), &[]).unwrap().1;
    assert_eq!(content, b"text");
    assert!(matches!(perform(&ops[3]), Err(OpError::Errno(Errno::NOENT))));
    std::fs::rename(at("a"), at("b")).unwrap();
    for op in &ops {
        assert_eq!(perform(op).unwrap(), FileReply::StaleDentry, "{op:?}");
    }
    // A lookup that succeeds is checked by the operation at the end of the path.
    let found = perform(&Op::Lookup { dir: a, name: name("f") });
    assert!(matches!(found, Ok(FileReply::Found(..))));
    std::fs::rename(at("b"), at("a")).unwrap();
    std::fs::write(at("a/new"), "").unwrap();
    std::fs::rename(at("a/new"), at("a/f")).unwrap();
    assert_eq!(perform(&ops[0]).unwrap(), FileReply::StaleDentry, "another file of the same name");
    // An object that is not held cannot be checked; and the number of checks is limited.
    let unknown = [check(dir, "a", Object(12))];
    let reply = exported.perform_checked(&unknown, ops[0].clone(), &[]).unwrap().0;
    assert_eq!(reply, FileReply::StaleDentry);
    let many = vec![check(dir, "a", a); crate::message::MAX_DENTRY_CHECKS + 1];
    let refused = exported.perform_checked(&many, ops[0].clone(), &[]);
    assert!(matches!(refused, Err(OpError::Errno(Errno::INVAL))));
}

#[test]
fn abandoned_reply_leaves_nothing_open() {
    let exported = Exported::new("release_undelivered");
    let dir = exported.object(&exported.path);
    let (found, opened) = create(&exported, dir, "a");
    let other = Session::new(&exported.export, &FdBudget::new(1000), Purpose::All).unwrap();
    other.set_callback(true);
    assert!(!exported.leases.grant(&other, found.attributes.key), "it is open for writing");
    let reply = FileReply::Created(found, opened, found.attributes);
    let encoded = tern_wire::encode(&reply).unwrap();
    let mut cache = ReplyCache { newest: 7, piggyback_applied: 7, number: Some(7), reply: encoded };
    assert_eq!(cache.abandon(6), None, "the client has received that reply");
    let abandoned = cache.abandon(7).unwrap();
    assert_eq!(abandoned, reply);
    release::release_undelivered(&exported.session, &exported.leases, &abandoned);
    assert!(exported.session.open_file(opened).is_none());
    assert!(exported.session.object(found.object).is_none());
    assert!(exported.leases.grant(&other, found.attributes.key));
    assert_eq!(cache.abandon(7), None, "released twice");
    assert_eq!(cache.newest, 8, "the abandoned request may still be performed");
}

#[test]
fn releasing_twice_releases_once() {
    let exported = Exported::new("twice");
    let dir = exported.object(&exported.path);
    let (found, opened) = create(&exported, dir, "a");
    let again = exported.perform(Op::Open { of: found.object, flags: 2, content: false }, &[]).unwrap().0;
    let FileReply::FileOpened(again, _) = again else { panic!("{again:?}") };
    let lock = |owner| Op::SetLock { opened: again, owner, kind: LockKind::Exclusive, start: 0, end: 9 };
    exported.perform(lock(1), &[]).unwrap();
    assert!(matches!(exported.perform(lock(2), &[]), Err(OpError::Errno(Errno::AGAIN))));
    for _ in 0..2 {
        for resource in [Release::LockOwner(found.attributes.key, 1), Release::File(opened)] {
            release::release(&exported.session, &exported.leases, resource);
        }
    }
    exported.perform(lock(2), &[]).unwrap();
    let other = Session::new(&exported.export, &FdBudget::new(1000), Purpose::All).unwrap();
    other.set_callback(true);
    assert!(!exported.leases.grant(&other, found.attributes.key), "the file is still open");
}

#[test]
fn rename_reports_which_file_has_which_name() {
    let exported = Exported::new("renames");
    let dir = exported.object(&exported.path);
    let [a, b] = ["a", "b"].map(|name| create(&exported, dir, name).0.attributes.key);
    let rename = |flags| {
        let [name, new] = ["a", "b"].map(|name| Name::from(OsStr::new(name)));
        exported.perform(Op::Rename { dir, name, to: dir, new, flags }, &[]).unwrap().0
    };
    let renamed = |flags| match rename(flags) {
        FileReply::Renamed { moved, exchanged, replaced, .. } => (moved, exchanged, replaced),
        other => panic!("{other:?}"),
    };
    assert_eq!(renamed(RenameFlags::EXCHANGE.bits()), (Some(a), Some(b), Some(b)));
    assert_eq!(renamed(0), (Some(b), None, Some(a)));
}

#[test]
fn create_examines_an_existing_file_before_opening_it() {
    let exported = Exported::new("there");
    let dir = exported.object(&exported.path);
    let create = |name: &str, flags: OFlags| {
        let (name, flags) = (Name::from(OsStr::new(name)), flags.bits());
        exported.perform(Op::Create { dir, name, mode: 0o600, umask: 0, flags }, &[]).map(|(reply, _)| reply)
    };
    let errno = |result| if let Err(OpError::Errno(errno)) = result { errno } else { panic!("{result:?}") };
    let kind = FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, exported.path.join("pipe"), kind, Mode::RWXU, 0).unwrap();
    std::fs::create_dir(exported.path.join("dir")).unwrap();
    std::os::unix::fs::symlink("file", exported.path.join("link")).unwrap();
    std::fs::write(exported.path.join("file"), "something").unwrap();
    let watch = rustix::fs::inotify::init(rustix::fs::inotify::CreateFlags::NONBLOCK).unwrap();
    let opens = rustix::fs::inotify::WatchFlags::OPEN;
    rustix::fs::inotify::add_watch(&watch, exported.path.join("pipe"), opens).unwrap();
    assert_eq!(errno(create("pipe", OFlags::RDONLY)), Errno::NXIO);
    let of = exported.object(&exported.path.join("pipe"));
    let change = AttributeChange { size: Some(0), ..AttributeChange::default() };
    assert_eq!(
        errno(exported.perform(Op::SetAttr { of, opened: None, change }, &[]).map(|set| set.0)),
        Errno::INVAL
    );
    assert_eq!(rustix::io::read(&watch, &mut [0; 100]), Err(Errno::AGAIN), "the pipe was opened");
    assert_eq!(errno(create("dir", OFlags::RDONLY)), Errno::ISDIR);
    assert_eq!(errno(create("link", OFlags::RDWR)), Errno::LOOP);
    assert_eq!(errno(create("file", OFlags::RDWR | OFlags::EXCL)), Errno::EXIST);
    std::fs::set_permissions(&exported.path, PermissionsExt::from_mode(0o1777)).unwrap();
    if rustix::process::geteuid().is_root() {
        std::fs::write(exported.path.join("other"), "another's").unwrap();
        std::os::unix::fs::chown(exported.path.join("other"), Some(1234), None).unwrap();
        assert_eq!(errno(create("other", OFlags::RDWR)), Errno::STALE);
    }
    let object = exported.object(&exported.path.join("file"));
    let FileReply::Created(found, ..) = create("file", OFlags::RDONLY).unwrap() else { panic!("not opened") };
    assert_eq!((found.object, found.attributes.size), (object, 9));
    // Leases of other sessions are recalled.
    let reader = Session::new(&exported.export, &FdBudget::new(1000), Purpose::All).unwrap();
    reader.set_callback(true);
    assert!(exported.leases.grant(&reader, found.attributes.key));
    let FileReply::Created(found, ..) = create("file", OFlags::RDWR | OFlags::TRUNC).unwrap() else {
        panic!("not opened for writing")
    };
    assert_eq!((found.object, found.attributes.size), (object, 0));
    assert_eq!(reader.next_recalls(leases::TERM).unwrap().0[0].file, found.attributes.key);
    assert!(!exported.leases.grant(&reader, found.attributes.key), "it is open for writing");
}

#[test]
fn waiting_for_leases_does_not_change_another_file() {
    let exported = Exported::new("waits");
    let dir = exported.object(&exported.path);
    let [old, new] = ["old", "new"].map(|name| {
        std::fs::write(exported.path.join(name), name).unwrap();
        let object = exported.object(&exported.path.join(name));
        exported.session.object(object).unwrap().key
    });
    let reader = Session::new(&exported.export, &FdBudget::new(1000), Purpose::All).unwrap();
    reader.set_callback(true);
    assert!(exported.leases.grant(&reader, old));
    std::thread::scope(|scope| {
        let unlink = Op::Unlink { dir, name: Name::from(OsStr::new("old")) };
        let unlinking = scope.spawn(|| exported.perform(unlink, &[]).map(drop));
        let first = reader.next_recalls(leases::TERM).unwrap().0;
        assert_eq!(first[0].file, old);
        assert!(exported.leases.grant(&reader, new));
        std::fs::rename(exported.path.join("new"), exported.path.join("old")).unwrap();
        exported.leases.return_leases(&reader, &first);
        assert_eq!(reader.next_recalls(leases::TERM).unwrap().0[0].file, new);
        unlinking.join().unwrap().unwrap();
    });
    assert!(!exported.path.join("old").exists());
}

/// Any operation on any object returns a reply or an error, without a panic.
#[test]
fn any_operation_gets_a_reply() {
    let exported = Exported::new("any");
    let mut rng = StdRng::seed_from_u64(7);
    let mut objects = vec![ROOT, exported.object(&exported.path), Object(12)];
    let mut files = vec![OpenId(0)];
    let names = ["a", "b", "c", "..", "", "x/y", "d"];
    let mut performed = 0;
    for _ in 0..20_000 {
        let name = || Name::from(OsStr::new(names.choose(&mut rand::rng()).unwrap()));
        let (dir, of) = (*objects.choose(&mut rng).unwrap(), *objects.choose(&mut rng).unwrap());
        let opened = *files.choose(&mut rng).unwrap();
        let at = *[0, 1, 4095, 1 << 20, 1 << 40, u64::MAX - 3, u64::MAX].choose(&mut rng).unwrap();
        let (flags, mode) = (rng.random::<u32>(), rng.random::<u32>());
        let kind = *[LockKind::Shared, LockKind::Exclusive, LockKind::Unlocked].choose(&mut rng).unwrap();
        let owner = rng.random_range(0..4);
        let size = rng.random_bool(0.3).then_some(at.min(1 << 20));
        let op = match rng.random_range(0..26) {
            0 => Op::Lookup { dir, name: name() },
            1 => Op::GetAttr { of },
            2 => Op::SetAttr {
                of,
                opened: Some(opened),
                change: AttributeChange { size, ..AttributeChange::default() },
            },
            3 => Op::ReadLink { of },
            4 => Op::Mknod { dir, name: name(), mode, umask: 0 },
            5 => Op::Mkdir { dir, name: name(), mode, umask: 0 },
            6 => Op::Symlink { dir, name: name(), target: name() },
            7 => Op::Unlink { dir, name: name() },
            8 => Op::Rmdir { dir, name: name() },
            9 => Op::Rename { dir, name: name(), to: of, new: name(), flags: flags & 7 },
            10 => Op::Link { of, dir, name: name() },
            11 => Op::Open { of, flags, content: true },
            12 | 13 => Op::Create { dir, name: name(), mode: mode | 0o600, umask: 0, flags },
            14 => Op::Read { opened, at, length: flags },
            15 => Op::Write { opened, at: at.min(1 << 20), append: false },
            16 => {
                release::release(&exported.session, &exported.leases, Release::File(opened));
                release::release(
                    &exported.session,
                    &exported.leases,
                    Release::LockOwner(FileKey { volume: 0, device: 0, inode: 0 }, owner),
                );
                continue;
            }
            17 => Op::Fsync { opened, data_only: true },
            18 => Op::ReadDir { opened, cookie: at, max_bytes: flags, lookup: at == 1 },
            19 => Op::StatFs { of },
            20 => Op::GetXattr { of, name: name() },
            21 => Op::Lseek { opened, at, data: true },
            22 => Op::SetLock { opened, owner, kind, start: at, end: at.wrapping_add(5) },
            23 => Op::GetLock { opened, owner, kind, start: at, end: at.wrapping_add(5) },
            24 => Op::Flock { opened, kind },
            _ => Op::CopyFileRange { from: opened, at: at.min(1 << 20), to: opened, to_at: 0, length: 4096 },
        };
        let Ok((reply, _)) = exported.perform(op, b"some bytes") else { continue };
        performed += 1;
        match reply {
            FileReply::Found(found, _) => objects.push(found.object),
            FileReply::FileOpened(new, _) => files.push(new),
            FileReply::Created(found, new, _) => {
                objects.push(found.object);
                files.push(new);
            }
            _ => {}
        }
    }
    assert!(performed > 1000, "only {performed} succeeded");
}
