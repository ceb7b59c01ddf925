//! The fuzz targets' corpora, on every build: nothing that a hostile peer says may panic, or hold anybody up.
//!
//! TERN_WRITE_CORPUS=1 writes what is made here into them, for when the words have changed.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::fs;
use std::path::{Path, PathBuf};
use tern_control::shared::SharedRoot;
use tern_control::{Refusal, RefusalKind};
use tern_ids::NodeId;
use tern_mexec::hostile::{Halves, words};
use tern_mexec::outside::hostile::hears;
use tern_mexec::pieces::whole;
use tern_mexec::words::{
    Ask, Ended, Failed, Order, Said, Share, Signal, TOLD, Task, Wait, Where, Who, Why, Window, kind,
};
use tern_wire::encode;
use tern_wire::hostile::spoilt;

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target)
}

fn files(target: &str) -> Vec<Vec<u8>> {
    let all = fs::read_dir(corpus(target)).unwrap();
    all.map(|entry| fs::read(entry.unwrap().path()).unwrap()).collect()
}

fn written(target: &str, name: &str, bytes: &[u8]) {
    if std::env::var_os("TERN_WRITE_CORPUS").is_some() {
        fs::write(corpus(target).join(name), bytes).unwrap();
    }
}

fn task() -> Task {
    Task {
        program: b"sh".to_vec(),
        arguments: vec![b"sh".to_vec(), b"-c".to_vec(), b"gcc\n-c x.c".to_vec()],
        environment: vec![b"A=\xff".to_vec()],
        directory: b"/tmp".to_vec(),
        umask: 0o22,
        limits: vec![(7, 10, u64::MAX)],
        nice: -3,
        signals: (1, 2),
        pid: 77,
        terminal: Some(Window { rows: 24, columns: 80 }),
        input: true,
        joined: true,
        scratch: true,
    }
}

fn said() -> Vec<Said> {
    let node = NodeId(2);
    vec![
        Said::Begun,
        Said::Full,
        Said::Room,
        Said::Refused(Refusal::new(RefusalKind::Unavailable, "no".to_owned())),
        Said::Here,
        Said::Started(node),
        Said::NotStarted(Failed::Program, 2),
        Said::Ended(Ended { status: 7 << 8, cpu: 1, wall: 2 }),
        Said::Lost(node),
        Said::Chosen(node, Why::Again(NodeId(3))),
        Said::Waits(Wait::Room(vec![node])),
    ]
}

/// All words there are, as they come on a socket.
fn all_words() -> Vec<u8> {
    let order = Order {
        task: task(),
        r#where: Where::Among(vec![NodeId(2)]),
        repeatable: true,
        class: "sh gcc".into(),
    };
    let asks = [
        Ask::Begin { version: 2, shared: Vec::new() },
        Ask::Begin {
            version: 2,
            shared: vec![SharedRoot {
                path: b"/nfs/home".to_vec(),
                kind: "nfs4".into(),
                handle: Some((1, vec![7; 28])),
                inode: 2,
                born: Some((1, 2)),
            }],
        },
        Ask::Run(Box::new(task()), Who { uid: 1, gid: 2, groups: vec![3] }),
        Ask::Wait { uid: 1, has: Share { running: 2, lately: 1500 } },
        Ask::Has(Share { running: 0, lately: 70 }),
    ];
    let mut all = whole(kind::ORDER, TOLD, &encode(&order).unwrap());
    asks.iter().for_each(|ask| all.extend(whole(kind::ASK, 0, &encode(ask).unwrap())));
    said().iter().for_each(|said| all.extend(whole(kind::SAID, 0, &encode(said).unwrap())));
    all.extend(whole(kind::DATA, 1, b"output"));
    all.extend(whole(kind::END, 0, b""));
    all.extend(whole(kind::TAKEN, 1, &6u32.to_le_bytes()));
    all.extend(whole(kind::SIGNAL, 0, &encode(&Signal { number: 15, group: true }).unwrap()));
    all.extend(whole(kind::WINDOW, 0, &encode(&Window { rows: 1, columns: 2 }).unwrap()));
    all.extend(whole(kind::BEAT, 0, b""));
    all
}

#[test]
fn whatever_comes_on_a_socket_is_read_or_not() {
    let all = all_words();
    written("words", "whole", &[&[5], &all[..]].concat());
    assert_eq!(words(&all, 5), 23);
    for bytes in spoilt(&all, 1) {
        let _many = words(&bytes, 7);
    }
    for bytes in files("words") {
        let _many = words(&bytes[1..], bytes[0].into());
    }
}

/// A piece for the target `halves`.
fn piece(kind: u8, stream: u8, bytes: &[u8]) -> Vec<u8> {
    let length = u16::try_from(bytes.len()).unwrap().to_le_bytes();
    [&[kind, stream], &length[..], bytes].concat()
}

#[test]
fn whatever_is_said_while_a_command_runs_it_ends() {
    let halves = Halves::new().unwrap();
    let output = [
        piece(kind::BEAT, 0, b""),
        piece(kind::DATA, 1, b"output"),
        piece(kind::DATA, 2, b"error"),
        piece(kind::END, 2, b""),
    ]
    .concat();
    let ended = piece(kind::SAID, 0, &encode(&said()[7]).unwrap());
    let input = [
        piece(kind::DATA, 0, b"input"),
        piece(kind::SIGNAL, 0, &encode(&Signal { number: 10, group: false }).unwrap()),
        piece(kind::END, 0, b""),
    ]
    .concat();
    // What may be run again, and has not ended, nobody hears of; all else its caller does.
    assert_eq!(halves.relay(&output, &input, true).unwrap(), 0);
    assert_eq!(halves.relay(&output, &input, false).unwrap(), 4);
    let whole = [&output[..], &ended].concat();
    for holds in [true, false] {
        assert_eq!(halves.relay(&whole, b"", holds).unwrap(), 5);
    }
    // What takes input is not run again.
    let takes = [&piece(kind::TAKEN, 0, &5u32.to_le_bytes())[..], &output].concat();
    assert_eq!(halves.relay(&takes, &input, true).unwrap(), 5);
    let home = [&input[..], &piece(kind::TAKEN, 1, &6u32.to_le_bytes()), &piece(kind::BEAT, 0, b"")].concat();
    assert!(!halves.job(&piece(kind::ORDER, 0, b""), false).unwrap());
    let _either = halves.job(&home, false).unwrap();
    let relayed = |how: u8| {
        let length = u16::try_from(whole.len()).unwrap().to_le_bytes();
        [&[how], &length[..], &whole, &input].concat()
    };
    let homes = [&[1, 0, 0], &home[..]].concat();
    let clients =
        [&[3, 0, 0][..], &piece(kind::DATA, 0, b"input"), &piece(kind::SIGNAL, 0, b"TERM")].concat();
    for (name, bytes) in
        [("relayed", relayed(0)), ("held", relayed(2)), ("homes", homes), ("clients", clients)]
    {
        written("halves", name, &bytes);
        let _heard = halves.hear(&bytes).unwrap();
        for bytes in spoilt(&bytes, 29) {
            let _heard = halves.hear(&bytes).unwrap();
        }
    }
    for bytes in files("halves") {
        let _heard = halves.hear(&bytes).unwrap();
    }
}

#[test]
fn whatever_a_client_says_is_heard_or_refused() {
    let order = r#"{"argv": ["sh", "-c", "echo \u00ff"], "environment": {"LANG": "C", "_x": ""}, "directory": "a/b", "input": true, "joined": false}"#;
    let proof = r#"{"tern": 1, "client": "laptop", "proof": "00ff"}"#;
    for (name, bytes) in [("order", order), ("proof", proof), ("signal", "TERM")] {
        written("outside", name, bytes.as_bytes());
        assert!(hears(bytes.as_bytes()), "{name}");
        for bytes in spoilt(bytes.as_bytes(), 1) {
            let _heard = hears(&bytes);
        }
    }
    for bytes in files("outside") {
        let _heard = hears(&bytes);
    }
    assert!(!hears(br#"{"argv": ["true"], "environment": {"LD_PRELOAD": "x"}}"#));
    assert!(!hears(br#"{"argv": ["true"], "uid": 0}"#));
}
