//! Hostile servers: invalid replies are rejected, no call blocks on them forever, and nothing
//! leaks.

use super::*;
use crate::client::cache::validity::ValidityStamp;
use crate::client::fuse::inode::InodeTable;
use crate::client::fuse::inode::tests::found;
use crate::message::{Attributes, Found, Name, REPLY_FRAME, REQUEST_FRAME};
use std::ffi::OsStr;
use std::io::Read;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use tern_ids::Credentials;
use tern_wire::{Authority, Frame, LinkError, Preamble};

/// A peer with a server that handles each request by a function, which gets the connection's
/// number.
struct ServedPeer {
    peer: Peer,
    map: PathBuf,
}

impl Drop for ServedPeer {
    fn drop(&mut self) {
        let _gone = std::fs::remove_file(&self.map);
    }
}

fn serve(
    timeout: Duration,
    handle: impl Fn(usize, &mut Link, &Frame) -> Result<(), LinkError> + Send + Sync + 'static,
) -> ServedPeer {
    serve_connections(timeout, usize::MAX, handle)
}

/// A server that accepts this many connections; more stay in its listen queue.
fn serve_connections(
    timeout: Duration,
    limit: usize,
    handle: impl Fn(usize, &mut Link, &Frame) -> Result<(), LinkError> + Send + Sync + 'static,
) -> ServedPeer {
    static MAPS: AtomicUsize = AtomicUsize::new(0);
    let authority = Authority::create("test").unwrap();
    let [client, server] =
        [1, 2].map(|node| Identity::issued_by_authority(&authority, NodeId(node)).unwrap());
    for end in [&client, &server] {
        end.members().set([client.member(), server.member()]);
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let number = MAPS.fetch_add(1, Ordering::Relaxed);
    let map = std::env::temp_dir().join(format!("tern-mfs-peer-{}-{number}", std::process::id()));
    std::fs::write(&map, format!("1 127.0.0.2 1\n2 127.0.0.1:{port} 1\n")).unwrap();
    let handle = Arc::new(handle);
    // The threads end with the test process.
    std::thread::spawn(move || {
        for (connection, socket) in listener.incoming().take(limit).enumerate() {
            let (handle, tls) = (handle.clone(), server.cluster_server().unwrap());
            std::thread::spawn(move || -> Result<(), LinkError> {
                let (mut socket, deadline) = (socket?, Instant::now() + Duration::from_secs(60));
                socket.read_exact(&mut vec![0; Preamble::Files.to_bytes().len()])?;
                let mut link = Link::accept(socket, &tls, deadline)?;
                let begin = link.recv(deadline)?;
                send_reply(
                    &mut link,
                    begin.tag,
                    &FileReply::Begun { is_new: connection == 0, boot_id: "boot".into() },
                )?;
                loop {
                    let request = link.recv(deadline)?;
                    handle(connection, &mut link, &request)?;
                }
            });
        }
        // A closed listener would refuse the connections in the queue.
        std::thread::sleep(Duration::from_secs(60));
        drop(listener);
    });
    let context = MountContext {
        identity: client,
        map: map.clone(),
        session: [0; 16],
        timeout,
        purpose: crate::message::Purpose::Container,
        invalidator: Invalidator::default(),
    };
    ServedPeer { peer: Peer::new(NodeId(2), Arc::new(context)), map }
}

fn send_reply(link: &mut Link, tag: u64, reply: &FileReply) -> Result<(), LinkError> {
    let bytes = tern_wire::encode(&(0_u64, reply)).unwrap();
    link.send(REPLY_FRAME, tag, &[&bytes], Instant::now() + PROBE_INTERVAL)
}

fn call(peer: &Peer, op: Op) -> Result<Response, CallError> {
    peer.call(&Credentials { uid: 0, gid: 0, groups: Vec::new() }, Vec::new(), op, &[])
}

const STAT: Op = Op::StatFs { of: crate::message::ROOT };

/// Sends a frame that is not a reply to this request.
fn send_invalid(which: usize, link: &mut Link, tag: u64) -> Result<(), LinkError> {
    let done = tern_wire::encode(&(0_u64, FileReply::Done)).unwrap();
    let (kind, tag, bytes) = match which {
        0 => (REPLY_FRAME, tag + 1, &done[..]),
        1 => (REPLY_FRAME, tag - 1, &done[..]),
        2 => (REPLY_FRAME, u64::MAX, &done[..]),
        3 => (REQUEST_FRAME, tag, &done[..]),
        4 => (REPLY_FRAME, tag, &[0xff; 9][..]),
        _ => (REPLY_FRAME, tag, &[][..]),
    };
    link.send(kind, tag, &[bytes], Instant::now() + PROBE_INTERVAL)
}

#[test]
fn invalid_reply_makes_the_client_use_another_connection() {
    for which in 0..6 {
        let served = serve(Duration::from_secs(60), move |connection, link, request| match connection {
            0 => send_invalid(which, link, request.tag),
            _ => send_reply(link, request.tag, &FileReply::Count(request.tag)),
        });
        let response = call(&served.peer, STAT).unwrap();
        assert_eq!(response.reply, FileReply::Count(1), "{which}");
        assert_eq!(call(&served.peer, STAT).unwrap().reply, FileReply::Count(2), "the next one");
    }
}

#[test]
fn only_invalid_replies_make_the_call_fail() {
    for which in 0..6 {
        // Sends invalid replies until the connection is full.
        let served = serve(Duration::from_secs(1), move |_, link, request| {
            loop {
                send_invalid(which, link, request.tag)?;
            }
        });
        assert_eq!(call(&served.peer, STAT).unwrap_err(), CallError::Errno(Errno::IO), "{which}");
    }
}

#[test]
fn rejected_reply_releases_its_objects() {
    let Found { object, attributes } = found(6, 0);
    let is = Attributes { size: u64::MAX, ..attributes };
    let rejected = FileReply::Found(Found { object, attributes: is }, is);
    let served =
        serve(Duration::from_secs(60), move |_, link, request| send_reply(link, request.tag, &rejected));
    let lookup = Op::Lookup { dir: crate::message::ROOT, name: Name::from(OsStr::new("a")) };
    assert_eq!(call(&served.peer, lookup).unwrap_err(), CallError::Errno(Errno::IO));
    assert_eq!(served.peer.pending_releases.take().piggyback.forgotten, [(Object(7), 1)]);
}

#[test]
fn slow_first_reply_does_not_make_the_node_lost() {
    // Longer than two probes, the second of which is never accepted.
    let slow = PROBE_INTERVAL * 2 + PROBE_INTERVAL / 2;
    let served = serve_connections(2 * slow, 1, move |_, link, request| {
        std::thread::sleep(slow);
        send_reply(link, request.tag, &FileReply::Count(request.tag))
    });
    assert_eq!(call(&served.peer, STAT).unwrap().reply, FileReply::Count(1));
}

/// A command whose home was lost for a moment must start: the request for it came from there.
#[test]
fn renewal_on_demand_reaches_a_node_that_counts_as_lost() {
    let served =
        serve(Duration::from_secs(60), |_, link, request| send_reply(link, request.tag, &FileReply::Done));
    served.peer.state().lost_until = Some(Instant::now() + Duration::from_secs(3600));
    assert_eq!(call(&served.peer, STAT).unwrap_err(), CallError::Errno(Errno::IO));
    assert_eq!(served.peer.send_renewal(WhenLost::Fail), Err(Errno::IO));
    assert_eq!(served.peer.send_renewal(WhenLost::Probe), Ok(()));
    assert_eq!(served.peer.send_renewal(WhenLost::Fail), Ok(()), "it counts as up again");
}

/// A client that receives no recalls does not wait for them at a barrier, so nothing may be cached.
#[test]
fn nothing_is_cached_while_no_recalls_are_received() {
    let served = serve(Duration::from_secs(1), |_, _, _| Ok(()));
    let peer = Arc::new(Peer::new(NodeId(2), served.peer.context.clone()));
    let stamp = ValidityStamp::now(&peer);
    assert!(!stamp.is_lease_valid(60_000));
    peer.renewal.set_processed_recalls(0);
    assert!(stamp.is_lease_valid(60_000));
    peer.renewal.invalidate();
    assert!(!stamp.is_lease_valid(60_000));
}

/// A mount waits for the first reply on the callback channel. From then on, barriers wait for recalls.
#[test]
fn recalls_are_received_when_the_callback_channel_is_ready() {
    let served = serve(Duration::from_secs(60), |_, link, request| {
        if request.tag == 1 {
            send_reply(link, request.tag, &FileReply::Recalled(Vec::new()))?;
        }
        Ok(())
    });
    let peer = Arc::new(Peer::new(NodeId(2), served.peer.context.clone()));
    let (ready, first) = std::sync::mpsc::channel();
    let channel = peer.clone();
    // The thread ends with the test process.
    std::thread::spawn(move || {
        callback::run_callback_channel(&channel, &InodeTable::default(), &Invalidator::default(), &ready)
    });
    first.recv().unwrap();
    assert!(peer.receives_recalls());
}
