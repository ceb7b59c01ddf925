//! A hostile client on a link of its own: it is refused or its connection ends, others are served, and nothing stays of it.

use super::*;
use crate::message::{Change, Deed, FileKey, LockKind, Name, Object, Opened, ROOT, Release};
use rustix::fs::OFlags;
use std::ffi::OsStr;
use std::io::Read;
use std::net::TcpListener;
use std::path::PathBuf;
use tern_wire::{Authority, Preamble};

const LONG: Duration = Duration::from_secs(60);

struct Served {
    serving: Arc<Serving>,
    client: Identity,
    place: PathBuf,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.place);
    }
}

impl Served {
    fn new() -> Self {
        let place = std::env::temp_dir().join(format!("tern-served-{}", std::process::id()));
        std::fs::create_dir_all(&place).unwrap();
        let authority = Authority::create("test").unwrap();
        let [client, server] = [1, 2].map(|node| Identity::issued_by(&authority, NodeId(node)).unwrap());
        let mut config = Config::load(&place).unwrap();
        config.map = place.join("map");
        std::fs::write(&config.map, "1 127.0.0.1 1\n2 127.0.0.2 1\n").unwrap();
        let serving = Serving {
            node: NodeId(2),
            export: Export { paths: vec![place.clone()], ..Export::default() },
            leases: Arc::new(Leases::new(true)),
            tls: server.cluster_server().unwrap(),
            budget: Budget::new(64),
            boot: "boot".into(),
            patience: Duration::ZERO,
            sessions: Mutex::default(),
            open: AtomicBool::new(true),
            connections: AtomicUsize::new(0),
            guests: Guests::default(),
            config,
        };
        Self { serving: Arc::new(serving), client, place }
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
            self.serving.take(socket);
            link.join().unwrap()
        })
    }

    /// A connection that has begun.
    fn begun(&self) -> Link {
        let mut link = self.connect();
        assert!(matches!(heard(&mut link, 0, &begin(VERSION, 0, 0)), Some(Answer::Begun { .. })));
        link
    }
}

fn begin(version: u16, lane: u16, given_up: u64) -> Ask {
    Ask::Begin { version, session: [7; 16], lane, given_up, ear: false, purpose: Purpose::Room }
}

fn to_do(deed: Deed) -> Ask {
    let caller = Caller {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: Vec::new(),
    };
    Ask::Do { caller, steps: Vec::new(), beside: Beside::default(), deed }
}

/// The answer, or none if the connection ends.
fn heard(link: &mut Link, tag: u64, ask: &Ask) -> Option<Answer> {
    said(link, ASK, tag, &tern_wire::encode(ask).unwrap())
}

fn said(link: &mut Link, kind: u8, tag: u64, bytes: &[u8]) -> Option<Answer> {
    link.send(kind, tag, &[bytes], Instant::now() + LONG).ok()?;
    match link.recv(Instant::now() + LONG) {
        Ok(frame) => {
            assert_eq!((frame.kind, frame.tag), (ANSWER, tag));
            Some(tern_wire::decode::<(u64, Answer)>(&frame.payload).unwrap().1)
        }
        Err(LinkError::Timeout) => panic!("it hangs"),
        Err(_) => None,
    }
}

#[test]
fn a_hostile_client_harms_nobody_but_its_connection() {
    let served = Served::new();
    // Before it begins.
    assert_eq!(heard(&mut served.connect(), 1, &to_do(Deed::Stat { of: ROOT })), None);
    assert_eq!(said(&mut served.connect(), ASK, 0, &[0xff; 40]), None);
    assert_eq!(said(&mut served.connect(), ASK, 0, &[]), None);
    for wrong in [begin(VERSION + 1, 0, 0), begin(VERSION, u16::MAX, 0)] {
        assert!(matches!(heard(&mut served.connect(), 0, &wrong), Some(Answer::Refused(_))), "{wrong:?}");
    }
    // Afterwards.
    let stat = tern_wire::encode(&to_do(Deed::Stat { of: ROOT })).unwrap();
    assert_eq!(heard(&mut served.begun(), 1, &begin(VERSION, 0, 0)), None);
    assert_eq!(said(&mut served.begun(), ANSWER, 1, &stat), None);
    assert_eq!(said(&mut served.begun(), 99, 1, &stat), None);
    for cut in [0, 1, stat.len() / 2, stat.len() - 1] {
        assert_eq!(said(&mut served.begun(), ASK, 1, &stat[..cut]), None, "{cut}");
    }
    let mut link = served.begun();
    let session = Arc::downgrade(lock(&served.serving.sessions).values().next().unwrap());
    assert!(matches!(said(&mut link, ASK, 5, &stat), Some(Answer::Attributes(_))));
    assert_eq!(said(&mut link, ASK, 4, &stat), None, "an ask of long ago");
    let mut giving_up = served.connect();
    assert!(matches!(heard(&mut giving_up, 0, &begin(VERSION, 1, u64::MAX)), Some(Answer::Begun { .. })));
    assert_eq!(said(&mut giving_up, ASK, 1, &stat), None, "given up already");
    // Numbers that were never given, and the greatest.
    let mut link = served.connect();
    assert!(matches!(heard(&mut link, 0, &begin(VERSION, 2, 0)), Some(Answer::Begun { .. })));
    let mut tag = 0;
    for number in [99, u64::MAX] {
        let (object, opened, name) = (Object(number), Opened(number), Name::from(OsStr::new("a")));
        let key = FileKey { volume: number, device: number, inode: number };
        let (owner, kind, start, end) = (number, LockKind::Exclusive, 0, u64::MAX);
        for deed in [
            Deed::Lookup { dir: object, name: name.clone() },
            Deed::Open { of: object, flags: u32::MAX, content: true },
            Deed::Create { dir: object, name, mode: u32::MAX, umask: 0, flags: u32::MAX },
            Deed::Read { opened, at: number, length: u32::MAX },
            Deed::Write { opened, at: number, append: true },
            Deed::Sync { opened, data_only: true },
            Deed::ReadDir { opened, after: number, most: u32::MAX, look: true },
            Deed::Copy { from: opened, at: 0, to: opened, to_at: 0, length: number },
            Deed::Lock { opened, owner, kind, start, end },
            Deed::Set { of: object, opened: Some(opened), change: Change::default() },
        ] {
            tag += 1;
            let answer = heard(&mut link, tag, &to_do(deed.clone()));
            assert!(matches!(answer, Some(Answer::Forgotten | Answer::Failed(_))), "{deed:?}: {answer:?}");
        }
        let beside = Beside {
            forgotten: vec![(object, u64::MAX), (ROOT, u64::MAX)],
            released: vec![Release::File(opened), Release::Owner(key, owner)],
        };
        tag += 1;
        assert_eq!(heard(&mut link, tag, &Ask::Release(beside)), Some(Answer::Done));
    }
    // The session is as it was, and goes with its last connection.
    tag += 1;
    assert!(matches!(said(&mut link, ASK, tag, &stat), Some(Answer::Attributes(_))));
    drop((link, giving_up));
    while served.serving.connections.load(Ordering::Acquire) > 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    served.serving.tidy();
    assert!(lock(&served.serving.sessions).is_empty());
    assert_eq!(session.strong_count(), 0);
}

/// However few objects are held at a time: who is told that a directory is forgotten asks for what he wanted made once more, and finds it.
#[test]
fn what_was_made_is_said_to_have_been() {
    let served = Served::new();
    let (mut link, mut tag, mut dir) = (served.begun(), 0, ROOT);
    let mut ask = |ask: &Ask| {
        tag += 1;
        heard(&mut link, tag, ask).unwrap()
    };
    for name in served.place.strip_prefix("/").unwrap() {
        let Answer::Found(found, _) = ask(&to_do(Deed::Lookup { dir, name: name.into() })) else { panic!() };
        dir = found.object;
    }
    for number in 0..200 {
        let name = |kind: &str| Name::from(OsStr::new(&format!("{kind}{number}")));
        let made = ask(&to_do(Deed::MakeDir { dir, name: name("d"), mode: 0o755, umask: 0 }));
        assert!(matches!(made, Answer::Found(..)), "{number}: {made:?}");
        let flags = (OFlags::RDWR | OFlags::EXCL).bits();
        let made = ask(&to_do(Deed::Create { dir, name: name("f"), mode: 0o644, umask: 0, flags }));
        let Answer::Created(_, opened, _) = made else { panic!("{number}: {made:?}") };
        let released = vec![Release::File(opened)];
        assert_eq!(ask(&Ask::Release(Beside { released, ..Beside::default() })), Answer::Done);
    }
}
