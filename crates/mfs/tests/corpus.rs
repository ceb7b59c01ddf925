//! Runs the corpora of the fuzz targets with every build: no message of a hostile peer may cause a
//! panic.
//!
//! Set TERN_WRITE_CORPUS=1 to write the two corpora that are generated here, after the messages
//! have changed.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use tern_ids::Credentials;
use tern_mfs::client::hostile::Client;
use tern_mfs::message::{
    AttributeChange, Attributes, DentryCheck, DirEntry, FileKey, FileReply, FileRequest, Found, Lease,
    LockKind, Name, Object, Op, OpenId, Piggyback, ROOT, Release, Timespec, XattrKinds,
};
use tern_mfs::serve::hostile;
use tern_wire::corrupt::corrupted_variants;

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target)
}

/// A temporary directory for the requests.
struct TempDir(PathBuf);

impl Drop for TempDir {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}

fn framed<T: serde::Serialize>(message: &T, data: &[u8]) -> Vec<u8> {
    let frame = [&tern_wire::encode(message).unwrap(), data].concat();
    [&u16::try_from(frame.len()).unwrap().to_le_bytes(), &frame[..]].concat()
}

/// Requests of a client that knows that objects are numbered from 1, for a directory two levels
/// below the root.
fn requests(exported: &Path) -> Vec<u8> {
    let name = |name: &str| Name::from(OsStr::new(name));
    let (dir, file) = (Object(2), Object(3));
    let (opened, created, kind) = (OpenId(2), OpenId(3), LockKind::Exclusive);
    let key = FileKey { volume: 1, device: 2, inode: 3 };
    let change = AttributeChange { size: Some(100), mode: Some(0o640), ..AttributeChange::default() };
    let ops = vec![
        Op::Lookup { dir: ROOT, name: name("tmp") },
        Op::Lookup { dir: Object(1), name: Name::from(exported.file_name().unwrap()) },
        Op::Lookup { dir, name: name("a") },
        Op::Open { of: file, flags: 2, content: true },
        Op::Create { dir, name: name("new"), mode: 0o644, umask: 0o22, flags: 2 },
        Op::Write { opened, at: 4, append: false },
        Op::Read { opened, at: 0, length: 100 },
        Op::CopyFileRange { from: opened, at: 0, to: created, to_at: 7, length: 100 },
        Op::SetAttr { of: file, opened: Some(opened), change },
        Op::Fallocate { opened, mode: 0, at: 0, length: 1000 },
        Op::Lseek { opened, at: 1, data: true },
        Op::SetLock { opened, owner: 1, kind, start: 0, end: 9 },
        Op::GetLock { opened, owner: 2, kind, start: 0, end: 9 },
        Op::Flock { opened, kind },
        Op::Fsync { opened, data_only: true },
        Op::Mkdir { dir, name: name("e"), mode: 0o755, umask: 0 },
        Op::Symlink { dir, name: name("m"), target: name("../..") },
        Op::Mknod { dir, name: name("q"), mode: 0o010_644, umask: 0 },
        Op::Link { of: file, dir, name: name("b") },
        Op::Rename { dir, name: name("b"), to: dir, new: name("c"), flags: 0 },
        Op::SetXattr { of: file, name: name("user.x"), flags: 0 },
        Op::GetXattr { of: file, name: name("user.x") },
        Op::ListXattr { of: file },
        Op::RemoveXattr { of: file, name: name("user.x") },
        Op::Lookup { dir, name: name("l") },
        Op::ReadLink { of: Object(5) },
        Op::Open { of: dir, flags: 0, content: false },
        Op::ReadDir { opened: OpenId(4), cookie: 0, max_bytes: 4096, lookup: true },
        Op::StatFs { of: dir },
        Op::GetAttr { of: file },
        Op::Unlink { dir, name: name("c") },
        Op::Rmdir { dir, name: name("e") },
    ];
    let caller = Credentials { uid: 0, gid: 0, groups: vec![7] };
    let checks = vec![DentryCheck { dir: ROOT, name: name("tmp"), object: Object(1) }];
    let call = |op| {
        let (caller, checks, piggyback) = (caller.clone(), checks.clone(), Piggyback::default());
        framed(&FileRequest::Call { caller, checks, piggyback, op }, b"some bytes")
    };
    let mut all: Vec<_> = ops.into_iter().map(call).collect();
    let lease = Lease { file: key, number: 1, is_after_change: false };
    for request in [
        FileRequest::Renew,
        FileRequest::WaitForRecalls { returned: vec![lease] },
        FileRequest::Release(Piggyback {
            forgotten: vec![(file, 1), (ROOT, u64::MAX)],
            released: vec![Release::File(opened), Release::File(opened), Release::LockOwner(key, 1)],
        }),
    ] {
        all.push(framed(&request, &[]));
    }
    all.concat()
}

fn replies() -> Vec<u8> {
    let time = Timespec { seconds: -5, nanos: 7 };
    let attributes = Attributes {
        key: FileKey { volume: 1, device: 2, inode: 3 },
        btime: time,
        mode: 0o040_755,
        nlink: 1,
        uid: 0,
        gid: 0,
        size: 10,
        blocks: 8,
        block_size: 4096,
        atime: time,
        mtime: Timespec { seconds: i64::MIN, nanos: u32::MAX },
        ctime: Timespec { seconds: i64::MAX, nanos: u32::MAX },
        lease: 1000,
        is_renewable: true,
        xattrs: XattrKinds::of(b"user.a\0system.posix_acl_access\0"),
        is_settled: true,
    };
    let found = Found { object: Object(7), attributes };
    let name = |name: &str| Name::from(OsStr::new(name));
    let entry = |name| DirEntry { name, inode: 3, kind: 0o100_000, cookie: u64::MAX, found: None };
    [
        FileReply::NotFound(attributes),
        FileReply::Found(found, attributes),
        FileReply::Created(Found { object: Object(8), ..found }, OpenId(1), attributes),
        FileReply::FileOpened(OpenId(2), attributes),
        FileReply::Attributes(attributes),
        FileReply::Entries {
            entries: vec![
                entry(name("a")),
                entry(name("../x")),
                DirEntry { found: Some(found), ..entry(name("")) },
            ],
            lease: 1000,
            is_end: false,
        },
        FileReply::Renamed {
            moved: Some(attributes.key),
            exchanged: Some(attributes.key),
            replaced: Some(attributes.key),
            dirs: [attributes; 2],
        },
        FileReply::Recalled(vec![Lease { file: attributes.key, number: 1, is_after_change: true }]),
        FileReply::Count(u64::MAX),
        FileReply::Failed(-1),
        FileReply::LockConflict { kind: LockKind::Shared, start: 9, end: 0 },
        FileReply::Begun { is_new: true, boot_id: "x".into() },
        FileReply::Refused("no".into()),
        FileReply::Forgotten,
        FileReply::Done,
    ]
    .iter()
    .map(|reply| framed(reply, b"data"))
    .collect::<Vec<_>>()
    .concat()
}

fn files(target: &str) -> Vec<Vec<u8>> {
    let all = fs::read_dir(corpus(target)).unwrap();
    all.map(|entry| fs::read(entry.unwrap().path()).unwrap()).collect()
}

#[test]
fn every_request_gets_a_reply_or_is_refused() {
    let exported = TempDir(Path::new("/tmp").join(format!("tern-hostile-{}", std::process::id())));
    let all = requests(&exported.0);
    if std::env::var_os("TERN_WRITE_CORPUS").is_some() {
        fs::write(corpus("requests").join("whole"), requests(Path::new("/tmp/tern-asks"))).unwrap();
    }
    assert_eq!(hostile::perform_all(&exported.0, &all).unwrap(), 35);
    for bytes in files("requests").into_iter().chain(corrupted_variants(&all, 41)) {
        hostile::perform_all(&exported.0, &bytes).unwrap();
    }
}

#[test]
fn every_reply_is_accepted_or_rejected() {
    let (client, all) = (Client::new().unwrap(), replies());
    if std::env::var_os("TERN_WRITE_CORPUS").is_some() {
        fs::write(corpus("replies").join("whole"), &all).unwrap();
    }
    assert_eq!(client.receive(&all), 15);
    for bytes in files("replies").into_iter().chain(corrupted_variants(&all, 1)) {
        let _count = client.receive(&bytes);
    }
}
