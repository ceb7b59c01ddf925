//! A hostile server: what it sends is no answer, nobody waits for it for ever, and nothing stays of it.

use super::*;
use crate::client::inode::tests::found;
use crate::message::{Attributes, Found, Name};
use std::ffi::OsStr;
use std::io::Read;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use tern_wire::{Authority, Frame};

/// A peer whose server does this with each ask; it is told how many connections have begun.
struct Faced {
    peer: Peer,
    map: PathBuf,
}

impl Drop for Faced {
    fn drop(&mut self) {
        let _gone = std::fs::remove_file(&self.map);
    }
}

fn faced(
    patience: Duration,
    does: impl Fn(usize, &mut Link, &Frame) -> Result<(), LinkError> + Send + Sync + 'static,
) -> Faced {
    faced_by(patience, usize::MAX, does)
}

/// One who takes so many connections; all others wait in his kernel.
fn faced_by(
    patience: Duration,
    most: usize,
    does: impl Fn(usize, &mut Link, &Frame) -> Result<(), LinkError> + Send + Sync + 'static,
) -> Faced {
    static MAPS: AtomicUsize = AtomicUsize::new(0);
    let authority = Authority::create("test").unwrap();
    let [one, two] = [1, 2].map(|node| Identity::issued_by(&authority, NodeId(node)).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let number = MAPS.fetch_add(1, Ordering::Relaxed);
    let map = std::env::temp_dir().join(format!("tern-faced-{}-{number}", std::process::id()));
    std::fs::write(&map, format!("1 127.0.0.2 1\n2 127.0.0.1:{port} 1\n")).unwrap();
    let does = Arc::new(does);
    // They end with the test's process.
    std::thread::spawn(move || {
        for (connection, socket) in listener.incoming().take(most).enumerate() {
            let (does, tls) = (does.clone(), two.cluster_server().unwrap());
            std::thread::spawn(move || -> Result<(), LinkError> {
                let (mut socket, long) = (socket?, Instant::now() + Duration::from_secs(60));
                socket.read_exact(&mut vec![0; Preamble::Files.to_bytes().len()])?;
                let mut link = Link::accept(socket, &tls, long)?;
                let begin = link.recv(long)?;
                say(&mut link, begin.tag, &Answer::Begun { fresh: connection == 0, boot: "boot".into() })?;
                loop {
                    let ask = link.recv(long)?;
                    does(connection, &mut link, &ask)?;
                }
            });
        }
        // Without it they would be refused.
        std::thread::sleep(Duration::from_secs(60));
        drop(listener);
    });
    let common = Common {
        identity: one,
        map: map.clone(),
        session: [0; 16],
        patience,
        purpose: crate::message::Purpose::Room,
        forgetting: Forgetting::default(),
    };
    Faced { peer: Peer::new(NodeId(2), Arc::new(common)), map }
}

fn say(link: &mut Link, tag: u64, answer: &Answer) -> Result<(), LinkError> {
    let bytes = tern_wire::encode(&(0_u64, answer)).unwrap();
    link.send(ANSWER, tag, &[&bytes], Instant::now() + LOOK)
}

fn ask(peer: &Peer, deed: Deed) -> Result<Heard, Unheard> {
    peer.call(&Caller { uid: 0, gid: 0, groups: Vec::new() }, Vec::new(), deed, &[])
}

const STAT: Deed = Deed::StatFs { of: crate::message::ROOT };

/// Something that is no answer to this ask.
fn nonsense(which: usize, link: &mut Link, tag: u64) -> Result<(), LinkError> {
    let done = tern_wire::encode(&(0_u64, Answer::Done)).unwrap();
    let (kind, tag, bytes) = match which {
        0 => (ANSWER, tag + 1, &done[..]),
        1 => (ANSWER, tag - 1, &done[..]),
        2 => (ANSWER, u64::MAX, &done[..]),
        3 => (ASK, tag, &done[..]),
        4 => (ANSWER, tag, &[0xff; 9][..]),
        _ => (ANSWER, tag, &[][..]),
    };
    link.send(kind, tag, &[bytes], Instant::now() + LOOK)
}

#[test]
fn who_hears_nonsense_asks_on_another_connection() {
    for which in 0..6 {
        let faced = faced(Duration::from_secs(60), move |connection, link, ask| match connection {
            0 => nonsense(which, link, ask.tag),
            _ => say(link, ask.tag, &Answer::Count(ask.tag)),
        });
        let heard = ask(&faced.peer, STAT).unwrap();
        assert_eq!(heard.answer, Answer::Count(1), "{which}");
        assert_eq!(ask(&faced.peer, STAT).unwrap().answer, Answer::Count(2), "the next one");
    }
}

#[test]
fn who_hears_nothing_but_nonsense_gives_up() {
    for which in 0..6 {
        // As much of it as goes.
        let faced = faced(Duration::from_secs(1), move |_, link, ask| {
            loop {
                nonsense(which, link, ask.tag)?;
            }
        });
        assert_eq!(ask(&faced.peer, STAT).unwrap_err(), Unheard::Errno(Errno::IO), "{which}");
    }
}

#[test]
fn what_the_kernel_would_not_take_is_let_go() {
    let Found { object, attributes } = found(6, 0);
    let is = Attributes { size: u64::MAX, ..attributes };
    let answer = Answer::Found(Found { object, attributes: is }, is);
    let faced = faced(Duration::from_secs(60), move |_, link, ask| say(link, ask.tag, &answer));
    let look = Deed::Lookup { dir: crate::message::ROOT, name: Name::from(OsStr::new("a")) };
    assert_eq!(ask(&faced.peer, look).unwrap_err(), Unheard::Errno(Errno::IO));
    assert_eq!(faced.peer.owed.take().beside.forgotten, [(Object(7), 1)]);
}

#[test]
fn a_node_whose_first_answer_takes_long_is_not_lost() {
    // Longer than two looks, of which nobody hears the second.
    let slow = LOOK * 2 + LOOK / 2;
    let faced = faced_by(2 * slow, 1, move |_, link, ask| {
        std::thread::sleep(slow);
        say(link, ask.tag, &Answer::Count(ask.tag))
    });
    assert_eq!(ask(&faced.peer, STAT).unwrap().answer, Answer::Count(1));
}
