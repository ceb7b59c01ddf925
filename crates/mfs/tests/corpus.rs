//! The fuzz targets' corpora, on every build: nothing that a hostile peer says may panic.
//!
//! TERN_WRITE_CORPUS=1 writes the two that are made here into them, for when the messages have changed.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use tern_mfs::client::hostile::Client;
use tern_mfs::message::{
    Answer, Ask, Attributes, Beside, Caller, Change, Deed, Entry, Extended, FileKey, Found, Lease, LockKind,
    Moment, Name, Object, Opened, ROOT, Release, Step,
};
use tern_mfs::serve::hostile;
use tern_wire::hostile::spoilt;

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target)
}

/// A directory for the asks, which goes with the test.
struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}

fn framed<T: serde::Serialize>(said: &T, data: &[u8]) -> Vec<u8> {
    let frame = [&tern_wire::encode(said).unwrap(), data].concat();
    [&u16::try_from(frame.len()).unwrap().to_le_bytes(), &frame[..]].concat()
}

/// What a client might ask that knows that its objects are counted from 1, of a place two steps below the root.
fn asks(place: &Path) -> Vec<u8> {
    let name = |name: &str| Name::from(OsStr::new(name));
    let (dir, file) = (Object(2), Object(3));
    let (opened, made, kind) = (Opened(2), Opened(3), LockKind::Exclusive);
    let key = FileKey { volume: 1, device: 2, inode: 3 };
    let change = Change { size: Some(100), mode: Some(0o640), ..Change::default() };
    let deeds = vec![
        Deed::Lookup { dir: ROOT, name: name("tmp") },
        Deed::Lookup { dir: Object(1), name: Name::from(place.file_name().unwrap()) },
        Deed::Lookup { dir, name: name("a") },
        Deed::Open { of: file, flags: 2, content: true },
        Deed::Create { dir, name: name("new"), mode: 0o644, umask: 0o22, flags: 2 },
        Deed::Write { opened, at: 4, append: false },
        Deed::Read { opened, at: 0, length: 100 },
        Deed::Copy { from: opened, at: 0, to: made, to_at: 7, length: 100 },
        Deed::Set { of: file, opened: Some(opened), change },
        Deed::Allocate { opened, mode: 0, at: 0, length: 1000 },
        Deed::Seek { opened, at: 1, data: true },
        Deed::Lock { opened, owner: 1, kind, start: 0, end: 9 },
        Deed::TestLock { opened, owner: 2, kind, start: 0, end: 9 },
        Deed::Flock { opened, kind },
        Deed::Sync { opened, data_only: true },
        Deed::MakeDir { dir, name: name("e"), mode: 0o755, umask: 0 },
        Deed::MakeLink { dir, name: name("m"), target: name("../..") },
        Deed::MakeNode { dir, name: name("q"), mode: 0o010_644, umask: 0 },
        Deed::Link { of: file, dir, name: name("b") },
        Deed::Rename { dir, name: name("b"), to: dir, new: name("c"), flags: 0 },
        Deed::SetAttribute { of: file, name: name("user.x"), flags: 0 },
        Deed::GetAttribute { of: file, name: name("user.x") },
        Deed::ListAttributes { of: file },
        Deed::RemoveAttribute { of: file, name: name("user.x") },
        Deed::Lookup { dir, name: name("l") },
        Deed::ReadLink { of: Object(5) },
        Deed::Open { of: dir, flags: 0, content: false },
        Deed::ReadDir { opened: Opened(4), after: 0, most: 4096, look: true },
        Deed::StatFs { of: dir },
        Deed::Stat { of: file },
        Deed::Unlink { dir, name: name("c") },
        Deed::RemoveDir { dir, name: name("e") },
    ];
    let caller = Caller { uid: 0, gid: 0, groups: vec![7] };
    let steps = vec![Step { dir: ROOT, name: name("tmp"), is: Object(1) }];
    let asked = |deed| {
        let (caller, steps, beside) = (caller.clone(), steps.clone(), Beside::default());
        framed(&Ask::Do { caller, steps, beside, deed }, b"some bytes")
    };
    let mut all: Vec<_> = deeds.into_iter().map(asked).collect();
    let lease = Lease { of: key, number: 1, is_late: false };
    for ask in [
        Ask::Renew,
        Ask::Hear { given_back: vec![lease] },
        Ask::Release(Beside {
            forgotten: vec![(file, 1), (ROOT, u64::MAX)],
            released: vec![Release::File(opened), Release::File(opened), Release::Owner(key, 1)],
        }),
    ] {
        all.push(framed(&ask, &[]));
    }
    all.concat()
}

fn answers() -> Vec<u8> {
    let moment = Moment { seconds: -5, nanos: 7 };
    let is = Attributes {
        key: FileKey { volume: 1, device: 2, inode: 3 },
        born: moment,
        mode: 0o040_755,
        links: 1,
        uid: 0,
        gid: 0,
        size: 10,
        blocks: 8,
        block_size: 4096,
        read: moment,
        written: Moment { seconds: i64::MIN, nanos: u32::MAX },
        changed: Moment { seconds: i64::MAX, nanos: u32::MAX },
        lease: 1000,
        lasts: true,
        extended: Extended::of(b"user.a\0system.posix_acl_access\0"),
        settled: true,
    };
    let found = Found { object: Object(7), attributes: is };
    let name = |name: &str| Name::from(OsStr::new(name));
    let entry = |name| Entry { name, inode: 3, kind: 0o100_000, after: u64::MAX, found: None };
    [
        Answer::Nothing(is),
        Answer::Found(found, is),
        Answer::Created(Found { object: Object(8), ..found }, Opened(1), is),
        Answer::Opened(Opened(2), is),
        Answer::Attributes(is),
        Answer::Entries {
            entries: vec![
                entry(name("a")),
                entry(name("../x")),
                Entry { found: Some(found), ..entry(name("")) },
            ],
            lease: 1000,
            ends: false,
        },
        Answer::Renamed { moved: Some(is.key), back: Some(is.key), gone: Some(is.key), dirs: [is; 2] },
        Answer::Recalled(vec![Lease { of: is.key, number: 1, is_late: true }]),
        Answer::Count(u64::MAX),
        Answer::Failed(-1),
        Answer::InTheWay { kind: LockKind::Shared, start: 9, end: 0 },
        Answer::Begun { fresh: true, boot: "x".into() },
        Answer::Refused("no".into()),
        Answer::Forgotten,
        Answer::Done,
    ]
    .iter()
    .map(|answer| framed(answer, b"data"))
    .collect::<Vec<_>>()
    .concat()
}

fn files(target: &str) -> Vec<Vec<u8>> {
    let all = fs::read_dir(corpus(target)).unwrap();
    all.map(|entry| fs::read(entry.unwrap().path()).unwrap()).collect()
}

#[test]
fn whatever_a_client_asks_is_answered_or_refused() {
    let place = Place(Path::new("/tmp").join(format!("tern-hostile-{}", std::process::id())));
    let all = asks(&place.0);
    if std::env::var_os("TERN_WRITE_CORPUS").is_some() {
        fs::write(corpus("asks").join("whole"), asks(Path::new("/tmp/tern-asks"))).unwrap();
    }
    assert_eq!(hostile::hear(&place.0, &all).unwrap(), 35);
    for bytes in files("asks").into_iter().chain(spoilt(&all, 41)) {
        hostile::hear(&place.0, &bytes).unwrap();
    }
}

#[test]
fn whatever_a_server_answers_is_taken_or_not() {
    let (client, all) = (Client::new().unwrap(), answers());
    if std::env::var_os("TERN_WRITE_CORPUS").is_some() {
        fs::write(corpus("answers").join("whole"), &all).unwrap();
    }
    assert_eq!(client.hear(&all), 15);
    for bytes in files("answers").into_iter().chain(spoilt(&all, 1)) {
        let _many = client.hear(&bytes);
    }
}
