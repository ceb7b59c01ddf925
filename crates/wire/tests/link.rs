//! Links over loopback: authentication, and delivery of frames.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};
use tern_ids::{NodeId, ShimId};
use tern_wire::limits::{HANDSHAKE_TIMEOUT, HEADER_LEN, MAX_PAYLOAD, MAX_UNSENT, PREAMBLE_LEN};
use tern_wire::*;

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// Connects a client to a server, and returns the result of each side.
fn meet(client: &ClientTls, server: &ServerTls) -> (Result<Link, LinkError>, Result<Link, LinkError>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let (mut socket, _) = listener.accept().unwrap();
            let mut bytes = [0; PREAMBLE_LEN];
            socket.read_exact(&mut bytes).unwrap();
            assert_eq!(Preamble::from_bytes(&bytes), Ok(Preamble::Node));
            Link::accept(socket, server, deadline())
        });
        let connected = Link::connect(&address, Preamble::Node, client, deadline());
        (connected, accepted.join().unwrap())
    })
}

fn pair() -> (Link, Link) {
    let (a, b) = (Ephemeral::generate().unwrap(), Ephemeral::generate().unwrap());
    let client = pinned_client(&a, b.fingerprint()).unwrap();
    let (a, b) = meet(&client, &pinned_server(&b, &[a.fingerprint()]).unwrap());
    (a.unwrap(), b.unwrap())
}

/// Asserts that the server refuses the client. The client receives the refusal at its first read at
/// the latest.
fn assert_refused(client: &ClientTls, server: &ServerTls) {
    let (client, server) = meet(client, server);
    assert!(matches!(server, Err(LinkError::Tls(_) | LinkError::Closed)), "{server:?}");
    if let Ok(mut link) = client {
        let outcome = link.recv(deadline());
        assert!(matches!(outcome, Err(LinkError::Tls(_) | LinkError::Closed)), "{outcome:?}");
    }
}

/// A node that knows only itself.
fn member(authority: &Authority, node: u16) -> Identity {
    let identity = Identity::issued_by_authority(authority, NodeId(node)).unwrap();
    identity.members().set([identity.member()]);
    identity
}

/// Two nodes that know each other.
fn members(authority: &Authority) -> (Identity, Identity) {
    let (one, two) = (member(authority, 1), member(authority, 2));
    for identity in [&one, &two] {
        identity.members().set([one.member(), two.member()]);
    }
    (one, two)
}

#[test]
fn members_authenticate_each_other() {
    let authority = Authority::create("alpha").unwrap();
    let (one, two) = members(&authority);
    let (mut a, mut b) = {
        let (a, b) = meet(&one.cluster_client(NodeId(2)).unwrap(), &two.cluster_server().unwrap());
        (a.unwrap(), b.unwrap())
    };
    assert_eq!((a.peer_node(), b.peer_node()), (Some(NodeId(2)), Some(NodeId(1))));
    a.send(3, 99, &[b"hel", b"", b"lo"], deadline()).unwrap();
    let frame = b.recv(deadline()).unwrap();
    assert_eq!((frame.kind, frame.flags, frame.tag, &frame.payload[..]), (3, 0, 99, &b"hello"[..]));
}

#[test]
fn another_member_is_refused() {
    let authority = Authority::create("alpha").unwrap();
    let (one, two) = members(&authority);
    let (a, _) = meet(&one.cluster_client(NodeId(3)).unwrap(), &two.cluster_server().unwrap());
    assert!(matches!(a, Err(LinkError::Tls(_))), "{a:?}");
}

/// A certificate proves that a machine was a member once. The map says who is one now.
#[test]
fn number_that_is_bound_to_another_key_is_refused() {
    let authority = Authority::create("alpha").unwrap();
    let (one, two) = members(&authority);
    let meet = || meet(&one.cluster_client(NodeId(2)).unwrap(), &two.cluster_server().unwrap());
    for keys in [vec![two.member()], vec![two.member(), (NodeId(1), two.key())]] {
        two.members().set(keys);
        let (client, server) = meet();
        assert!(matches!(server, Err(LinkError::NotInMap(NodeId(1)))), "{server:?}");
        let answer = client.and_then(|mut link| link.recv(deadline()));
        assert!(matches!(answer, Err(LinkError::Closed)), "{answer:?}");
    }
    two.members().set([one.member(), two.member()]);
    assert!(meet().1.is_ok());
    one.members().set([one.member()]);
    assert!(matches!(meet().0, Err(LinkError::NotInMap(NodeId(2)))));
}

/// All open links with a node end when it is removed, at both of its ends.
#[test]
fn removed_node_loses_its_links() {
    let authority = Authority::create("alpha").unwrap();
    let (one, two) = members(&authority);
    let meet = || meet(&one.cluster_client(NodeId(2)).unwrap(), &two.cluster_server().unwrap());
    let (both, waiting) = (meet(), meet());
    let (mut first, mut second) = (both.0.unwrap(), both.1.unwrap());
    let (mut other_end, mut waiting) = (waiting.0.unwrap(), waiting.1.unwrap());
    // The keys of others change nothing.
    two.members().set([one.member(), two.member(), (NodeId(3), one.key())]);
    second.send(1, 1, &[b"still"], deadline()).unwrap();
    assert_eq!(first.recv(deadline()).unwrap().payload, b"still");
    let waits = thread::spawn(move || waiting.recv(deadline()));
    two.members().set([two.member()]);
    assert!(second.send(1, 1, &[b"no more"], deadline()).is_err() || second.recv(deadline()).is_err());
    assert!(matches!(first.recv(deadline()), Err(LinkError::Closed)));
    assert!(waits.join().unwrap().is_err());
    assert!(other_end.recv(deadline()).is_err());
}

#[test]
fn another_cluster_is_refused_even_if_it_has_the_same_name() {
    let (alpha, imposter) = (Authority::create("alpha").unwrap(), Authority::create("alpha").unwrap());
    let (ours, theirs) = (member(&alpha, 1), member(&imposter, 2));
    // As a client …
    let client = theirs.cluster_client(NodeId(1)).unwrap();
    let (_, server) = meet(&client, &ours.cluster_server().unwrap());
    assert!(matches!(server, Err(LinkError::Tls(_) | LinkError::Closed)), "{server:?}");
    // … and as a server.
    let client = ours.cluster_client(NodeId(2)).unwrap();
    let (client, _) = meet(&client, &theirs.cluster_server().unwrap());
    assert!(matches!(client, Err(LinkError::Tls(_))), "{client:?}");
}

#[test]
fn client_without_certificate_is_refused() {
    let authority = Authority::create("alpha").unwrap();
    let client = join_client(authority.fingerprint(), NodeId(1)).unwrap();
    // A cluster server does not send the authority's certificate, so this client refuses it too.
    // The second part uses a client that accepts the server.
    let one = member(&authority, 1);
    let (client, server) = meet(&client, &one.cluster_server().unwrap());
    assert!(client.is_err() && server.is_err());
    let shim = Ephemeral::generate().unwrap();
    assert_refused(&pinned_client(&shim, fingerprint_of_node(&one)).unwrap(), &one.cluster_server().unwrap());
}

/// The fingerprint of a node's certificate, as a client receives it.
fn fingerprint_of_node(node: &Identity) -> tern_ids::Fingerprint {
    let (client, _server) = meet(&node.cluster_client(node.node()).unwrap(), &node.cluster_server().unwrap());
    client.unwrap().peer_fingerprint().unwrap()
}

#[test]
fn joining_machine_pins_authority_and_node() {
    let authority = Authority::create("alpha").unwrap();
    let one = member(&authority, 1);
    let server = one.join_server().unwrap();
    let (client, accepted) = meet(&join_client(authority.fingerprint(), NodeId(1)).unwrap(), &server);
    assert_eq!((client.unwrap().peer_node(), accepted.unwrap().peer_fingerprint()), (None, None));
    let wrong = Authority::create("alpha").unwrap().fingerprint();
    let (client, _) = meet(&join_client(wrong, NodeId(1)).unwrap(), &server);
    assert!(matches!(client, Err(LinkError::Tls(_))), "{client:?}");
    let (client, _) = meet(&join_client(authority.fingerprint(), NodeId(2)).unwrap(), &server);
    assert!(matches!(client, Err(LinkError::Tls(_))), "{client:?}");
}

#[test]
fn shims_pin_each_other() {
    let [a, b, c] = [0; 3].map(|_| Ephemeral::generate().unwrap());
    let server = pinned_server(&b, &[c.fingerprint(), a.fingerprint()]).unwrap();
    let (client, accepted) = meet(&pinned_client(&a, b.fingerprint()).unwrap(), &server);
    assert_eq!(client.unwrap().peer_fingerprint(), Some(b.fingerprint()));
    let accepted = accepted.unwrap();
    assert_eq!((accepted.peer_fingerprint(), accepted.peer_node()), (Some(a.fingerprint()), None));
    // The client expects another server.
    let (client, _) = meet(&pinned_client(&a, c.fingerprint()).unwrap(), &server);
    assert!(matches!(client, Err(LinkError::Tls(_))), "{client:?}");
    // The server expects other clients.
    let server = pinned_server(&b, &[c.fingerprint()]).unwrap();
    assert_refused(&pinned_client(&a, b.fingerprint()).unwrap(), &server);
    // The server accepts no clients.
    assert_refused(&pinned_client(&c, b.fingerprint()).unwrap(), &pinned_server(&b, &[]).unwrap());
}

#[test]
fn garbage_instead_of_tls_is_an_error() {
    let own = Ephemeral::generate().unwrap();
    let tls = pinned_server(&own, &[]).unwrap();
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0x16, 3, 1, 0xff, 0xff], &[0; 4096], &[0xff; 70_000]] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        peer.write_all(garbage).unwrap();
        peer.shutdown(std::net::Shutdown::Write).unwrap();
        let outcome = Link::accept(listener.accept().unwrap().0, &tls, deadline());
        assert!(matches!(outcome, Err(LinkError::Tls(_) | LinkError::Closed)), "{outcome:?}");
    }
}

#[test]
fn silent_peer_times_out() {
    let tls = pinned_server(&Ephemeral::generate().unwrap(), &[]).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let _peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let deadline = Instant::now() + Duration::from_millis(50);
    let outcome = Link::accept(listener.accept().unwrap().0, &tls, deadline);
    assert!(matches!(outcome, Err(LinkError::Timeout)), "{outcome:?}");
}

/// The machine of this shim acknowledges, but the shim has no CPU for longer than a handshake takes
/// elsewhere.
#[test]
fn slow_shim_is_waited_for() {
    let (a, b) = (Ephemeral::generate().unwrap(), Ephemeral::generate().unwrap());
    let client = pinned_client(&a, b.fingerprint()).unwrap();
    let server = pinned_server(&b, &[a.fingerprint()]).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let (mut socket, _) = listener.accept().unwrap();
            thread::sleep(HANDSHAKE_TIMEOUT + Duration::from_millis(500));
            socket.read_exact(&mut [0; PREAMBLE_LEN]).unwrap();
            Link::accept(socket, &server, deadline())
        });
        Link::connect_to_shim(&address, ShimId([7; 16]), &client).unwrap();
        accepted.join().unwrap().unwrap();
    });
}

#[test]
fn closed_link_is_reported_after_its_last_frame() {
    let (mut a, mut b) = pair();
    a.send(1, 1, &[b"last"], deadline()).unwrap();
    drop(a);
    assert_eq!(b.recv(deadline()).unwrap().payload, b"last");
    assert!(matches!(b.recv(deadline()), Err(LinkError::Closed)));
    assert!(matches!(b.receive(), Err(LinkError::Closed)));
}

/// The read that returned the last frame may have emptied the socket. The next `receive` must read
/// again all the same, since the peer may have closed the link meanwhile.
#[test]
fn end_of_an_idle_link_is_seen_by_the_first_look() {
    let (mut a, mut b) = pair();
    a.send(1, 7, &[b"last"], deadline()).unwrap();
    assert_eq!(&b.recv(deadline()).unwrap().payload[..], b"last");
    drop(a);
    let mut fds = [PollFd::new(&b, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 10, tv_nsec: 0 })).unwrap();
    assert!(matches!(b.receive(), Err(LinkError::Closed)));
}

#[test]
fn finish_loses_nothing_while_the_peer_sends() {
    let (mut a, mut b) = pair();
    b.queue(9, 0, &[&[7; 100_000]]).unwrap();
    a.queue(1, 1, &[b"last"]).unwrap();
    thread::scope(|scope| {
        let finished = scope.spawn(move || a.finish(deadline()));
        assert_eq!(b.recv(deadline()).unwrap().payload, b"last");
        assert!(matches!(b.recv(deadline()), Err(LinkError::Closed)));
        drop(b);
        finished.join().unwrap().unwrap();
    });
}

#[test]
fn receive_does_not_block() {
    let (mut a, mut b) = pair();
    assert!(a.receive().unwrap().is_none() && b.receive().unwrap().is_none());
    let short = Instant::now() + Duration::from_millis(20);
    assert!(matches!(a.recv(short), Err(LinkError::Timeout)));
    b.queue(5, 6, &[]).unwrap();
    assert_eq!(a.recv(deadline()).unwrap().tag, 6);
}

#[test]
fn frames_of_all_sizes_arrive_whole() {
    let (mut a, mut b) = pair();
    let record = 16 << 10;
    let sizes =
        [0, 1, HEADER_LEN, record - HEADER_LEN - 1, record - HEADER_LEN, record, record + 1, 3 * record + 7];
    let sizes = sizes.into_iter().chain([MAX_PAYLOAD - 1, MAX_PAYLOAD]);
    thread::scope(|scope| {
        scope.spawn({
            let sizes = sizes.clone();
            move || {
                for (tag, size) in sizes.enumerate() {
                    let payload: Vec<u8> = (0..size).map(|at| (at * 31 + tag) as u8).collect();
                    let (head, tail) = payload.split_at(size / 3);
                    a.send(1, tag as u64, &[head, tail], deadline()).unwrap();
                }
                a.finish(deadline()).unwrap();
            }
        });
        for (tag, size) in sizes.enumerate() {
            let frame = b.recv(deadline()).unwrap();
            assert_eq!((frame.tag, frame.payload.len()), (tag as u64, size));
            assert!(frame.payload.iter().enumerate().all(|(at, byte)| *byte == (at * 31 + tag) as u8));
            b.recycle(frame.payload);
        }
        drop(b);
    });
}

#[test]
fn too_long_payload_is_refused_and_link_stays_usable() {
    let (mut a, mut b) = pair();
    let long = vec![0; MAX_PAYLOAD + 1];
    assert!(matches!(a.queue(1, 0, &[&long]), Err(LinkError::Frame(FrameError::TooLong(_)))));
    a.queue(1, 0, &[b"fine"]).unwrap();
    assert_eq!(b.recv(deadline()).unwrap().payload, b"fine");
}

#[test]
fn unsent_bytes_are_bounded() {
    let (mut a, mut b) = pair();
    let payload = vec![1; 1 << 20];
    let mut queued = 0;
    let refused = loop {
        match a.queue(1, queued, &[&payload]) {
            Ok(()) => queued += 1,
            Err(e) => break e,
        }
        assert!(queued < 1000);
    };
    assert!(matches!(refused, LinkError::Full), "{refused:?}");
    assert!(a.unsent() <= MAX_UNSENT + (1 << 20) && a.wants_write());
    // All queued frames still arrive, in order, and the link stays usable.
    thread::scope(|scope| {
        scope.spawn(move || a.drain(deadline()).unwrap());
        for tag in 0..queued {
            assert_eq!(b.recv(deadline()).unwrap().tag, tag);
        }
    });
}

#[test]
fn bulk_both_ways_does_not_deadlock_when_blocking() {
    let (mut a, mut b) = pair();
    let run = |link: &mut Link| {
        let payload = vec![1; 1 << 20];
        for tag in 0..12 {
            link.send(1, tag, &[&payload], deadline()).unwrap();
        }
        for tag in 0..12 {
            assert_eq!(link.recv(deadline()).unwrap().tag, tag);
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| run(&mut a));
        run(&mut b);
    });
}

#[test]
fn bulk_both_ways_does_not_deadlock_when_polling() {
    let (mut a, mut b) = pair();
    let payload = vec![1; 256 << 10];
    let (mut sent, mut got) = ([0u64; 2], [0u64; 2]);
    let end = deadline();
    while got != [400, 400] {
        assert!(Instant::now() < end, "stuck at {sent:?} sent, {got:?} received");
        for (at, link) in [&mut a, &mut b].into_iter().enumerate() {
            if sent[at] < 400 && link.unsent() < 4 << 20 {
                link.queue(1, sent[at], &[&payload]).unwrap();
                sent[at] += 1;
            }
            link.flush().unwrap();
            while let Some(frame) = link.receive().unwrap() {
                assert_eq!(frame.tag, got[at]);
                got[at] += 1;
                link.recycle(frame.payload);
            }
        }
    }
}

/// A stream damaged inside of TLS ends the link with an error.
#[test]
fn damaged_tls_stream_is_an_error() {
    // Frames damaged before encryption are tested in tests/corpus.rs. Here the encrypted stream is
    // damaged on the way.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (own, peer) = (Ephemeral::generate().unwrap(), Ephemeral::generate().unwrap());
    let server = pinned_server(&own, &[peer.fingerprint()]).unwrap();
    let client = pinned_client(&peer, own.fingerprint()).unwrap();
    let middle = TcpListener::bind("127.0.0.1:0").unwrap();
    let through = middle.local_addr().unwrap().to_string();
    let address = listener.local_addr().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut near, _) = middle.accept().unwrap();
            let mut far = TcpStream::connect(address).unwrap();
            let (mut near_back, mut far_back) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            scope.spawn(move || {
                let _ended = std::io::copy(&mut far_back, &mut near_back);
            });
            // The preamble and the handshake pass unchanged, then one bit of the bulk data is
            // flipped.
            let (mut passed, mut piece) = (0, [0; 4096]);
            while let Ok(count @ 1..) = near.read(&mut piece) {
                if passed < 40_000 && passed + count >= 40_000 {
                    piece[count / 2] ^= 1;
                }
                passed += count;
                if far.write_all(&piece[..count]).is_err() {
                    return;
                }
            }
        });
        let accepted = scope.spawn(|| {
            let (mut socket, _) = listener.accept().unwrap();
            socket.read_exact(&mut [0; PREAMBLE_LEN]).unwrap();
            let mut link = Link::accept(socket, &server, deadline()).unwrap();
            loop {
                if let Err(e) = link.recv(deadline()) {
                    return e;
                }
            }
        });
        let mut link = Link::connect(&through, Preamble::Shim(ShimId([1; 16])), &client, deadline()).unwrap();
        let mut outcome = Ok(());
        for tag in 0..100 {
            outcome = link.send(1, tag, &[&[3; 5000]], deadline());
            if outcome.is_err() {
                break;
            }
        }
        let seen = accepted.join().unwrap();
        assert!(matches!(seen, LinkError::Tls(_)), "{seen:?}, {outcome:?}");
        drop(link);
    });
}
