use super::*;
use crate::message::{LockKind, Purpose, ROOT, Release};
use crate::serve::budget::Budget;
use crate::serve::leases;
use crate::serve::release;
use crate::serve::session::Lane;
use rand::prelude::*;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// A directory that goes with the test, and is all that is exported.
struct Exported {
    path: PathBuf,
    export: Export,
    session: Arc<Session>,
    leases: Leases,
}

impl Exported {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tern-mfs-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        let path = path.canonicalize().unwrap();
        let export = Export { paths: vec![path.clone()], ..Export::default() };
        let session = Session::new(&export, &Budget::new(1000), Purpose::All).unwrap();
        Self { path, export, session, leases: Leases::new(true) }
    }

    fn perform(&self, deed: Deed, data: &[u8]) -> Result<(Answer, Vec<u8>), Fault> {
        self.perform_behind(&[], deed, data)
    }

    fn perform_behind(&self, steps: &[Step], deed: Deed, data: &[u8]) -> Result<(Answer, Vec<u8>), Fault> {
        let mut out = Vec::new();
        let performance = Performance { session: &self.session, export: &self.export, leases: &self.leases };
        performance.perform(steps, deed, data, &mut out).map(|answer| (answer, out))
    }

    fn object(&self, path: &Path) -> Object {
        path.iter().skip(1).fold(ROOT, |dir, name| {
            match self.perform(Deed::Lookup { dir, name: Name::from(name) }, &[]).unwrap().0 {
                Answer::Found(found, _) => found.object,
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
fn above_what_is_exported_only_the_way_down_is_there() {
    let exported = Exported::new("above");
    let above = exported.object(exported.path.parent().unwrap());
    let name = || Name::from(OsStr::new("new"));
    for deed in [
        Deed::MakeDir { dir: above, name: name(), mode: 0o700, umask: 0 },
        Deed::Create { dir: above, name: name(), mode: 0o600, umask: 0, flags: 1 },
        Deed::Unlink { dir: above, name: Name::from(exported.path.file_name().unwrap()) },
        Deed::Set { of: above, opened: None, change: Change { mode: Some(0o777), ..Change::default() } },
        Deed::GetAttribute { of: above, name: name() },
    ] {
        let done = exported.perform(deed.clone(), &[]);
        assert!(matches!(done, Err(Fault::Errno(Errno::ACCESS))), "{deed:?}: {done:?}");
    }
    let opened = exported.perform(Deed::Open { of: above, flags: 0, content: true }, &[]).unwrap().0;
    let Answer::Opened(opened, _) = opened else { panic!("{opened:?}") };
    let listed =
        exported.perform(Deed::ReadDir { opened, after: 0, most: 65_536, look: true }, &[]).unwrap().0;
    let Answer::Entries { entries, .. } = listed else { panic!("{listed:?}") };
    let names: Vec<_> =
        entries.iter().map(|entry| entry.name.as_os()).filter(|name| *name != "." && *name != "..").collect();
    assert_eq!(names, [exported.path.file_name().unwrap()]);
}

#[test]
fn a_name_is_one_step_wherever_it_is_said() {
    let exported = Exported::new("steps");
    let dir = exported.object(&exported.path);
    for wrong in ["..", ".", "", "../x", "/etc", "a/b", "a\0b"] {
        let name = || Name::from(OsStr::new(wrong));
        for deed in [
            Deed::Lookup { dir, name: name() },
            Deed::MakeDir { dir, name: name(), mode: 0o700, umask: 0 },
            Deed::Create { dir, name: name(), mode: 0o600, umask: 0, flags: 1 },
            Deed::Link { of: dir, dir, name: name() },
            Deed::Rename { dir, name: name(), to: dir, new: Name::from(OsStr::new("b")), flags: 0 },
            Deed::Rename { dir, name: Name::from(OsStr::new("b")), to: dir, new: name(), flags: 0 },
        ] {
            let done = exported.perform(deed.clone(), &[]);
            assert!(matches!(done, Err(Fault::Errno(Errno::INVAL))), "{deed:?}: {done:?}");
        }
    }
}

fn create(exported: &Exported, dir: Object, name: &str) -> (Found, Opened) {
    let deed = Deed::Create { dir, name: Name::from(OsStr::new(name)), mode: 0o600, umask: 0, flags: 2 };
    match exported.perform(deed, &[]).unwrap().0 {
        Answer::Created(found, opened, _) => (found, opened),
        other => panic!("{other:?}"),
    }
}

#[test]
fn nothing_is_done_behind_a_step_that_leads_elsewhere() {
    let exported = Exported::new("behind");
    let at = |name: &str| exported.path.join(name);
    std::fs::create_dir(at("a")).unwrap();
    std::fs::write(at("a/f"), "text").unwrap();
    let [dir, a, f] = ["", "a", "a/f"].map(|path| exported.object(&at(path)));
    let step = |dir, name: &str, is| Step { dir, name: Name::from(OsStr::new(name)), is };
    let steps = [step(a, "f", f), step(dir, "a", a)];
    let named = |name: &str| Name::from(OsStr::new(name));
    let deeds = [
        Deed::Open { of: f, flags: 0, content: true },
        Deed::MakeDir { dir: a, name: named("d"), mode: 0o700, umask: 0 },
        Deed::Unlink { dir: a, name: named("d") },
        Deed::Lookup { dir: a, name: named("none") },
    ];
    let done = |deed: &Deed| exported.perform_behind(&steps, deed.clone(), &[]).map(|(answer, _)| answer);
    let Ok((Answer::Opened(_, is), content)) = exported.perform_behind(&steps, deeds[0].clone(), &[]) else {
        panic!("it is not opened")
    };
    assert_eq!((is.size, content.len()), (4, 0), "without a lease nothing comes with it");
    exported.session.hears(true);
    let content = exported.perform_behind(&steps, deeds[0].clone(), &[]).unwrap().1;
    assert_eq!(content, b"text");
    assert!(matches!(done(&deeds[3]), Err(Fault::Errno(Errno::NOENT))));
    std::fs::rename(at("a"), at("b")).unwrap();
    for deed in &deeds {
        assert_eq!(done(deed).unwrap(), Answer::Elsewhere, "{deed:?}");
    }
    // What is there is found, and looked at when it is opened.
    let found = done(&Deed::Lookup { dir: a, name: named("f") });
    assert!(matches!(found, Ok(Answer::Found(..))));
    std::fs::rename(at("b"), at("a")).unwrap();
    std::fs::write(at("a/new"), "").unwrap();
    std::fs::rename(at("a/new"), at("a/f")).unwrap();
    assert_eq!(done(&deeds[0]).unwrap(), Answer::Elsewhere, "another file of the same name");
    // What it does not hold it cannot vouch for; and no more than so many.
    let unknown = [step(dir, "a", Object(12))];
    let answer = exported.perform_behind(&unknown, deeds[0].clone(), &[]).unwrap().0;
    assert_eq!(answer, Answer::Elsewhere);
    let many = vec![step(dir, "a", a); crate::message::MOST_STEPS + 1];
    let refused = exported.perform_behind(&many, deeds[0].clone(), &[]);
    assert!(matches!(refused, Err(Fault::Errno(Errno::INVAL))));
}

#[test]
fn an_answer_that_nobody_hears_leaves_nothing_open() {
    let exported = Exported::new("unheard");
    let dir = exported.object(&exported.path);
    let (found, opened) = create(&exported, dir, "a");
    let other = Session::new(&exported.export, &Budget::new(1000), Purpose::All).unwrap();
    other.hears(true);
    assert!(!exported.leases.grant(&other, found.attributes.key), "it is open for writing");
    let answer = Answer::Created(found, opened, found.attributes);
    let mut lane = Lane { newest: 7, heard: 7, last: Some(7), answer: tern_wire::encode(&answer).unwrap() };
    assert_eq!(lane.give_up(6), None, "the client has heard the answers to others");
    let given_up = lane.give_up(7).unwrap();
    assert_eq!(given_up, answer);
    release::unheard(&exported.session, &exported.leases, &given_up);
    assert!(exported.session.file(opened).is_none());
    assert!(exported.session.object(found.object).is_none());
    assert!(exported.leases.grant(&other, found.attributes.key));
    assert_eq!(lane.give_up(7), None, "once");
    assert_eq!(lane.newest, 8, "it is not done late");
}

#[test]
fn what_is_let_go_twice_is_let_go_once() {
    let exported = Exported::new("twice");
    let dir = exported.object(&exported.path);
    let (found, opened) = create(&exported, dir, "a");
    let again = exported.perform(Deed::Open { of: found.object, flags: 2, content: false }, &[]).unwrap().0;
    let Answer::Opened(again, _) = again else { panic!("{again:?}") };
    let lock = |owner| Deed::Lock { opened: again, owner, kind: LockKind::Exclusive, start: 0, end: 9 };
    exported.perform(lock(1), &[]).unwrap();
    assert!(matches!(exported.perform(lock(2), &[]), Err(Fault::Errno(Errno::AGAIN))));
    for _ in 0..2 {
        for what in [Release::Owner(found.attributes.key, 1), Release::File(opened)] {
            release::release(&exported.session, &exported.leases, what);
        }
    }
    exported.perform(lock(2), &[]).unwrap();
    let other = Session::new(&exported.export, &Budget::new(1000), Purpose::All).unwrap();
    other.hears(true);
    assert!(!exported.leases.grant(&other, found.attributes.key), "it is open once more");
}

#[test]
fn a_rename_says_what_has_which_name_now() {
    let exported = Exported::new("renames");
    let dir = exported.object(&exported.path);
    let [a, b] = ["a", "b"].map(|name| create(&exported, dir, name).0.attributes.key);
    let rename = |flags| {
        let [name, new] = ["a", "b"].map(|name| Name::from(OsStr::new(name)));
        exported.perform(Deed::Rename { dir, name, to: dir, new, flags }, &[]).unwrap().0
    };
    let renamed = |flags| match rename(flags) {
        Answer::Renamed { moved, back, gone, .. } => (moved, back, gone),
        other => panic!("{other:?}"),
    };
    assert_eq!(renamed(RenameFlags::EXCHANGE.bits()), (Some(a), Some(b), Some(b)));
    assert_eq!(renamed(0), (Some(b), None, Some(a)));
}

#[test]
fn what_is_there_is_looked_at_before_it_is_opened() {
    let exported = Exported::new("there");
    let dir = exported.object(&exported.path);
    let create = |name: &str, flags: OFlags| {
        let (name, flags) = (Name::from(OsStr::new(name)), flags.bits());
        exported
            .perform(Deed::Create { dir, name, mode: 0o600, umask: 0, flags }, &[])
            .map(|(answer, _)| answer)
    };
    let errno = |done| if let Err(Fault::Errno(errno)) = done { errno } else { panic!("{done:?}") };
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
    let change = Change { size: Some(0), ..Change::default() };
    assert_eq!(
        errno(exported.perform(Deed::Set { of, opened: None, change }, &[]).map(|set| set.0)),
        Errno::INVAL
    );
    assert_eq!(rustix::io::read(&watch, &mut [0; 100]), Err(Errno::AGAIN), "it was opened");
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
    let Answer::Created(found, ..) = create("file", OFlags::RDONLY).unwrap() else {
        panic!("nothing created")
    };
    assert_eq!((found.object, found.attributes.size), (object, 9));
    // Who believes something of it is asked to forget that.
    let reader = Session::new(&exported.export, &Budget::new(1000), Purpose::All).unwrap();
    reader.hears(true);
    assert!(exported.leases.grant(&reader, found.attributes.key));
    let Answer::Created(found, ..) = create("file", OFlags::RDWR | OFlags::TRUNC).unwrap() else {
        panic!("nor now")
    };
    assert_eq!((found.object, found.attributes.size), (object, 0));
    assert_eq!(reader.recalled(leases::TERM).unwrap().0[0].of, found.attributes.key);
    assert!(!exported.leases.grant(&reader, found.attributes.key), "it is open for writing");
}

#[test]
fn who_waits_for_one_file_does_not_change_another() {
    let exported = Exported::new("waits");
    let dir = exported.object(&exported.path);
    let [old, new] = ["old", "new"].map(|name| {
        std::fs::write(exported.path.join(name), name).unwrap();
        let object = exported.object(&exported.path.join(name));
        exported.session.object(object).unwrap().key
    });
    let reader = Session::new(&exported.export, &Budget::new(1000), Purpose::All).unwrap();
    reader.hears(true);
    assert!(exported.leases.grant(&reader, old));
    std::thread::scope(|scope| {
        let unlink = Deed::Unlink { dir, name: Name::from(OsStr::new("old")) };
        let unlinking = scope.spawn(|| exported.perform(unlink, &[]).map(drop));
        let first = reader.recalled(leases::TERM).unwrap().0;
        assert_eq!(first[0].of, old);
        assert!(exported.leases.grant(&reader, new));
        std::fs::rename(exported.path.join("new"), exported.path.join("old")).unwrap();
        exported.leases.given_back(&reader, &first);
        assert_eq!(reader.recalled(leases::TERM).unwrap().0[0].of, new);
        unlinking.join().unwrap().unwrap();
    });
    assert!(!exported.path.join("old").exists());
}

/// Whatever a client asks, and of whatever it names: an answer, and nothing outside of the export.
#[test]
fn any_deed_is_answered() {
    let exported = Exported::new("any");
    let mut chance = StdRng::seed_from_u64(7);
    let mut objects = vec![ROOT, exported.object(&exported.path), Object(12)];
    let mut files = vec![Opened(0)];
    let names = ["a", "b", "c", "..", "", "x/y", "d"];
    let mut done = 0;
    for _ in 0..20_000 {
        let name = || Name::from(OsStr::new(names.choose(&mut rand::rng()).unwrap()));
        let (dir, of) = (*objects.choose(&mut chance).unwrap(), *objects.choose(&mut chance).unwrap());
        let opened = *files.choose(&mut chance).unwrap();
        let at = *[0, 1, 4095, 1 << 20, 1 << 40, u64::MAX - 3, u64::MAX].choose(&mut chance).unwrap();
        let (flags, mode) = (chance.random::<u32>(), chance.random::<u32>());
        let kind = *[LockKind::Shared, LockKind::Exclusive, LockKind::Unlocked].choose(&mut chance).unwrap();
        let owner = chance.random_range(0..4);
        let size = chance.random_bool(0.3).then_some(at.min(1 << 20));
        let deed = match chance.random_range(0..26) {
            0 => Deed::Lookup { dir, name: name() },
            1 => Deed::Stat { of },
            2 => Deed::Set { of, opened: Some(opened), change: Change { size, ..Change::default() } },
            3 => Deed::ReadLink { of },
            4 => Deed::MakeNode { dir, name: name(), mode, umask: 0 },
            5 => Deed::MakeDir { dir, name: name(), mode, umask: 0 },
            6 => Deed::MakeLink { dir, name: name(), target: name() },
            7 => Deed::Unlink { dir, name: name() },
            8 => Deed::RemoveDir { dir, name: name() },
            9 => Deed::Rename { dir, name: name(), to: of, new: name(), flags: flags & 7 },
            10 => Deed::Link { of, dir, name: name() },
            11 => Deed::Open { of, flags, content: true },
            12 | 13 => Deed::Create { dir, name: name(), mode: mode | 0o600, umask: 0, flags },
            14 => Deed::Read { opened, at, length: flags },
            15 => Deed::Write { opened, at: at.min(1 << 20), append: false },
            16 => {
                release::release(&exported.session, &exported.leases, Release::File(opened));
                release::release(
                    &exported.session,
                    &exported.leases,
                    Release::Owner(FileKey { volume: 0, device: 0, inode: 0 }, owner),
                );
                continue;
            }
            17 => Deed::Sync { opened, data_only: true },
            18 => Deed::ReadDir { opened, after: at, most: flags, look: at == 1 },
            19 => Deed::StatFs { of },
            20 => Deed::GetAttribute { of, name: name() },
            21 => Deed::Seek { opened, at, data: true },
            22 => Deed::Lock { opened, owner, kind, start: at, end: at.wrapping_add(5) },
            23 => Deed::TestLock { opened, owner, kind, start: at, end: at.wrapping_add(5) },
            24 => Deed::Flock { opened, kind },
            _ => Deed::Copy { from: opened, at: at.min(1 << 20), to: opened, to_at: 0, length: 4096 },
        };
        let Ok((answer, _)) = exported.perform(deed, b"some bytes") else { continue };
        done += 1;
        match answer {
            Answer::Found(found, _) => objects.push(found.object),
            Answer::Opened(new, _) => files.push(new),
            Answer::Created(found, new, _) => {
                objects.push(found.object);
                files.push(new);
            }
            _ => {}
        }
    }
    assert!(done > 1000, "only {done} were done");
}
