//! A hostile client: it is refused or its connection ends, others are served, and none of its state
//! remains.

use super::*;
use crate::message::{AttributeChange, FileKey, LockKind, Name, Object, Op, OpenId, ROOT, Release};
use rustix::fs::OFlags;
use std::ffi::OsStr;
use std::io::Read;
use std::net::TcpListener;
use std::path::PathBuf;
use tern_ids::Credentials;
use tern_wire::{Authority, Preamble};

const LONG: Duration = Duration::from_secs(60);

struct TestServer {
    server: Arc<Server>,
    client: Identity,
    dir: PathBuf,
}

impl Drop for TestServer {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.dir);
    }
}

impl TestServer {
    fn new() -> Self {
        let dir = std::env::temp_dir().join(format!("tern-server-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let authority = Authority::create("test").unwrap();
        let [client, identity] =
            [1, 2].map(|node| Identity::issued_by_authority(&authority, NodeId(node)).unwrap());
        for end in [&client, &identity] {
            end.members().set([client.member(), identity.member()]);
        }
        let mut config = Config::load(&dir).unwrap();
        config.map = dir.join("map");
        std::fs::write(&config.map, "1 127.0.0.1 1\n2 127.0.0.2 1\n").unwrap();
        let server = Server {
            node: NodeId(2),
            export: Export { paths: vec![dir.clone()], ..Export::default() },
            leases: Arc::new(LeaseTable::new(true)),
            members: identity.members().clone(),
            tls: identity.cluster_server().unwrap(),
            budget: FdBudget::new(64),
            boot_id: "boot".into(),
            session_timeout: Duration::ZERO,
            sessions: Mutex::default(),
            is_exporting: AtomicBool::new(true),
            connection_count: AtomicUsize::new(0),
            guests: GuestFiles::default(),
            config,
        };
        Self { server: Arc::new(server), client, dir }
    }

    fn connect(&self) -> Link {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let tls = self.client.cluster_client(NodeId(2)).unwrap();
        std::thread::scope(|scope| {
            let link = scope.spawn(move || {
                Link::connect(&address, Preamble::Files, &tls, Instant::now() + LONG).unwrap()
            });
            let mut socket = listener.accept().unwrap().0;
            socket.read_exact(&mut vec![0; Preamble::Files.to_bytes().len()]).unwrap();
            self.server.accept(socket);
            link.join().unwrap()
        })
    }

    /// A connection attached to a session.
    fn attach(&self) -> Link {
        let mut link = self.connect();
        assert!(matches!(call(&mut link, 0, &begin(VERSION, 0, 0)), Some(FileReply::Begun { .. })));
        link
    }
}

fn begin(version: u16, connection: u16, abandoned: u64) -> FileRequest {
    let (session, is_callback, purpose) = ([7; 16], false, Purpose::Container);
    FileRequest::Begin { version, session, connection, abandoned, is_callback, purpose }
}

fn request_for(op: Op) -> FileRequest {
    let caller = Credentials {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: Vec::new(),
    };
    FileRequest::Call { caller, checks: Vec::new(), piggyback: Piggyback::default(), op }
}

/// The reply, or `None` if the connection ends.
fn call(link: &mut Link, tag: u64, request: &FileRequest) -> Option<FileReply> {
    exchange(link, REQUEST_FRAME, tag, &tern_wire::encode(request).unwrap())
}

fn exchange(link: &mut Link, kind: u8, tag: u64, bytes: &[u8]) -> Option<FileReply> {
    link.send(kind, tag, &[bytes], Instant::now() + LONG).ok()?;
    match link.recv(Instant::now() + LONG) {
        Ok(frame) => {
            assert_eq!((frame.kind, frame.tag), (REPLY_FRAME, tag));
            Some(tern_wire::decode::<(u64, FileReply)>(&frame.payload).unwrap().1)
        }
        Err(LinkError::Timeout) => panic!("no reply"),
        Err(_) => None,
    }
}

#[test]
fn hostile_client_harms_only_its_own_connection() {
    let test = TestServer::new();
    // Before the connection is attached to a session.
    assert_eq!(call(&mut test.connect(), 1, &request_for(Op::GetAttr { of: ROOT })), None);
    assert_eq!(exchange(&mut test.connect(), REQUEST_FRAME, 0, &[0xff; 40]), None);
    assert_eq!(exchange(&mut test.connect(), REQUEST_FRAME, 0, &[]), None);
    for wrong in [begin(VERSION + 1, 0, 0), begin(VERSION, u16::MAX, 0)] {
        assert!(matches!(call(&mut test.connect(), 0, &wrong), Some(FileReply::Refused(_))), "{wrong:?}");
    }
    // Afterwards.
    let stat = tern_wire::encode(&request_for(Op::GetAttr { of: ROOT })).unwrap();
    assert_eq!(call(&mut test.attach(), 1, &begin(VERSION, 0, 0)), None);
    assert_eq!(exchange(&mut test.attach(), REPLY_FRAME, 1, &stat), None);
    assert_eq!(exchange(&mut test.attach(), 99, 1, &stat), None);
    for cut in [0, 1, stat.len() / 2, stat.len() - 1] {
        assert_eq!(exchange(&mut test.attach(), REQUEST_FRAME, 1, &stat[..cut]), None, "{cut}");
    }
    let mut link = test.attach();
    let session = Arc::downgrade(lock(&test.server.sessions).values().next().unwrap());
    assert!(matches!(exchange(&mut link, REQUEST_FRAME, 5, &stat), Some(FileReply::Attributes(_))));
    assert_eq!(exchange(&mut link, REQUEST_FRAME, 4, &stat), None, "an old request number");
    let mut abandoning = test.connect();
    assert!(matches!(call(&mut abandoning, 0, &begin(VERSION, 1, u64::MAX)), Some(FileReply::Begun { .. })));
    assert_eq!(exchange(&mut abandoning, REQUEST_FRAME, 1, &stat), None, "an abandoned request");
    // Numbers that were never assigned, and the greatest.
    let mut link = test.connect();
    assert!(matches!(call(&mut link, 0, &begin(VERSION, 2, 0)), Some(FileReply::Begun { .. })));
    let mut tag = 0;
    for number in [99, u64::MAX] {
        let (object, opened, name) = (Object(number), OpenId(number), Name::from(OsStr::new("a")));
        let key = FileKey { volume: number, device: number, inode: number };
        let (owner, kind, start, end) = (number, LockKind::Exclusive, 0, u64::MAX);
        for op in [
            Op::Lookup { dir: object, name: name.clone() },
            Op::Open { of: object, flags: u32::MAX, content: true },
            Op::Create { dir: object, name, mode: u32::MAX, umask: 0, flags: u32::MAX },
            Op::Read { opened, at: number, length: u32::MAX },
            Op::Write { opened, at: number, append: true },
            Op::Fsync { opened, data_only: true },
            Op::ReadDir { opened, cookie: number, max_bytes: u32::MAX, lookup: true },
            Op::CopyFileRange { from: opened, at: 0, to: opened, to_at: 0, length: number },
            Op::SetLock { opened, owner, kind, start, end },
            Op::SetAttr { of: object, opened: Some(opened), change: AttributeChange::default() },
        ] {
            tag += 1;
            let reply = call(&mut link, tag, &request_for(op.clone()));
            assert!(matches!(reply, Some(FileReply::Forgotten | FileReply::Failed(_))), "{op:?}: {reply:?}");
        }
        let piggyback = Piggyback {
            forgotten: vec![(object, u64::MAX), (ROOT, u64::MAX)],
            released: vec![Release::File(opened), Release::LockOwner(key, owner)],
        };
        tag += 1;
        assert_eq!(call(&mut link, tag, &FileRequest::Release(piggyback)), Some(FileReply::Done));
    }
    // The session is unharmed, and is dropped after its last connection.
    tag += 1;
    assert!(matches!(exchange(&mut link, REQUEST_FRAME, tag, &stat), Some(FileReply::Attributes(_))));
    drop((link, abandoning));
    while test.server.connection_count.load(Ordering::Acquire) > 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    test.server.expire_sessions();
    assert!(lock(&test.server.sessions).is_empty());
    assert_eq!(session.strong_count(), 0);
}

/// A creation succeeds even if few objects can be held. After the reply `Forgotten` the client
/// would repeat it, and find the file that it has created.
#[test]
fn creation_succeeds_though_objects_are_evicted() {
    let test = TestServer::new();
    let (mut link, mut tag, mut dir) = (test.attach(), 0, ROOT);
    let mut call = |request: &FileRequest| {
        tag += 1;
        self::call(&mut link, tag, request).unwrap()
    };
    for name in test.dir.strip_prefix("/").unwrap() {
        let FileReply::Found(found, _) = call(&request_for(Op::Lookup { dir, name: name.into() })) else {
            panic!()
        };
        dir = found.object;
    }
    for number in 0..200 {
        let name = |kind: &str| Name::from(OsStr::new(&format!("{kind}{number}")));
        let created = call(&request_for(Op::Mkdir { dir, name: name("d"), mode: 0o755, umask: 0 }));
        assert!(matches!(created, FileReply::Found(..)), "{number}: {created:?}");
        let flags = (OFlags::RDWR | OFlags::EXCL).bits();
        let created = call(&request_for(Op::Create { dir, name: name("f"), mode: 0o644, umask: 0, flags }));
        let FileReply::Created(_, opened, _) = created else { panic!("{number}: {created:?}") };
        let released = vec![Release::File(opened)];
        assert_eq!(
            call(&FileRequest::Release(Piggyback { released, ..Piggyback::default() })),
            FileReply::Done
        );
    }
}
