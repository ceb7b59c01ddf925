//! Runs the fuzz target's code in every build: no bytes from a shim may panic.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

#[path = "../fuzz/examine.rs"]
mod examine;

use std::path::Path;
use tern_ids::{Epoch, Fingerprint, HomePid, ShimId};
use tern_image::Layout;
use tern_migrate::departure_failure::Busy;
use tern_migrate::message::{CallRequest, CallResult, Departure, Message};
use tern_syscall::{Arg, ByteBuf, Call, Outcome, Segments};

fn call(nr: i64, args: [Arg; 6]) -> Message {
    let call = Call { nr: nr as u32, args };
    Message::Call(Box::new(CallRequest {
        epoch: Epoch(1),
        number: 7,
        signals: 0,
        restart_code: None,
        prelude: Vec::new(),
        max_prefetch: 0,
        call,
        procfs_view: None,
        to_publish: vec![(1, 2)],
    }))
}

/// Examples of the messages between shims.
fn messages() -> Vec<Message> {
    let (zero, bytes) = (Arg::Value(0), |text: &[u8]| Arg::Bytes(ByteBuf::from(text.to_vec())));
    let z = || zero.clone();
    let segments =
        Segments { lens: vec![3, 0, 4], bytes: ByteBuf::from(b"onetwo!".to_vec()), inaccessible: 0 };
    let buffers = Segments { lens: vec![100, 4096], bytes: ByteBuf::new(), inaccessible: 0 };
    let onward = Departure::Onward {
        epoch: Epoch(3),
        address: "node2:7101".into(),
        shim: ShimId([2; 16]),
        fingerprint: Fingerprint([3; 32]),
    };
    let outcome = Outcome { ret: 3, outs: vec![ByteBuf::from(b"abc".to_vec())] };
    let result = CallResult { child: Some(HomePid(9)), prelude: vec![-28], ..CallResult::new(7, outcome) };
    vec![
        Message::Heartbeat,
        Message::Accepted(Epoch(1), true),
        Message::Declined(Epoch(1), "no room".into()),
        Message::Threads(vec![5, 6]),
        Message::Space(Box::default()),
        Message::RequestFiles(Epoch(1), vec![0, 4]),
        Message::Pages(vec![(4096, 8192)]),
        Message::DiscardPages(vec![(0, 4096), (8192, 4096)]),
        Message::Depart(onward),
        Message::TransferFor(Epoch(3)),
        Message::DepartureFailed(Busy::Forking.into()),
        Message::Signal(3, vec![10; 128]),
        Message::Reattach(Epoch(2), 5),
        Message::Result(Box::new(result)),
        call(libc::SYS_write, [Arg::Value(1), bytes(b"text"), Arg::Value(4), z(), z(), z()]),
        call(libc::SYS_read, [z(), Arg::Output, Arg::Value(65536), z(), z(), z()]),
        call(libc::SYS_writev, [Arg::Value(1), Arg::Segments(segments), Arg::Value(3), z(), z(), z()]),
        call(libc::SYS_readv, [z(), Arg::Segments(buffers), Arg::Value(2), z(), z(), z()]),
        call(libc::SYS_openat, [z(), bytes(b"/etc/hosts\0"), z(), z(), z(), z()]),
        call(libc::SYS_poll, [bytes(&[1; 16]), Arg::Value(2), Arg::Value(100), z(), z(), z()]),
        call(libc::SYS_getsockname, [Arg::Value(3), Arg::Output, bytes(&[16, 0, 0, 0]), z(), z(), z()]),
    ]
}

/// Encodes a message in the form that [`examine::examine`] reads.
fn framed(message: &Message) -> Vec<u8> {
    let body = postcard::to_stdvec(message).unwrap();
    let payload = [&(body.len() as u32).to_le_bytes()[..], &body].concat();
    let cut = payload.len() / 2;
    // In two frames, as a long message arrives.
    let frame = |flags: u8, piece: &[u8]| {
        let length = u16::try_from(piece.len()).unwrap().to_le_bytes();
        [&[flags, 42, length[0], length[1]][..], piece].concat()
    };
    [frame(0x80, &payload[..cut]), frame(0, &payload[cut..])].concat()
}

#[test]
fn messages_decode_and_corruptions_do_not_panic() {
    assert!(Layout::default().check().is_ok());
    for message in messages() {
        let bytes = framed(&message);
        assert_eq!(examine::examine(&bytes), 1, "{message:?}");
        for end in 0..bytes.len() {
            examine::examine(&bytes[..end]);
        }
        for bit in 0..bytes.len() * 8 {
            let mut turned = bytes.clone();
            turned[bit / 8] ^= 1 << (bit % 8);
            examine::examine(&turned);
        }
    }
    let all: Vec<u8> = messages().iter().flat_map(framed).collect();
    assert_eq!(examine::examine(&all), messages().len());
}

#[test]
fn corpus_does_not_panic() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/messages");
    let entries: Vec<_> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    for path in &entries {
        examine::examine(&std::fs::read(path).unwrap());
    }
    assert!(!entries.is_empty());
}
