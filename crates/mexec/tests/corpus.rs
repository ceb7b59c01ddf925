//! Runs the fuzz targets' corpora on every build: no input of a hostile peer may cause a panic or a
//! hang.
//!
//! TERN_WRITE_CORPUS=1 writes the inputs made here to the corpora, to be used after a change of the
//! messages.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::fs;
use std::path::{Path, PathBuf};
use tern_control::shared::SharedDirId;
use tern_control::{Refusal, RefusalKind};
use tern_ids::{Credentials, NodeId};
use tern_mexec::frames::encode_frame;
use tern_mexec::gatekeeper::hostile::accepts;
use tern_mexec::hostile::{Halves, parse};
use tern_mexec::messages::{
    ExecReply, ExecRequest, ExitReport, JobRequest, NodeChoice, PendingReason, PlacementReason, Signal,
    StartFailure, Task, UserUsage, WANTS_PROGRESS, WindowSize, kind,
};
use tern_wire::corrupt::corrupted_variants;
use tern_wire::encode;

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target)
}

fn files(target: &str) -> Vec<Vec<u8>> {
    let all = fs::read_dir(corpus(target)).unwrap();
    all.map(|entry| fs::read(entry.unwrap().path()).unwrap()).collect()
}

fn update_corpus(target: &str, name: &str, bytes: &[u8]) {
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
        ignored_signals: 1,
        blocked_signals: 2,
        pid: 77,
        terminal: Some(WindowSize { rows: 24, columns: 80 }),
        forwards_stdin: true,
        merges_stderr: true,
        private_tmp: true,
    }
}

fn replies() -> Vec<ExecReply> {
    let node = NodeId(2);
    vec![
        ExecReply::HelloOk,
        ExecReply::NoSlot,
        ExecReply::SlotOffered,
        ExecReply::Refused(Refusal::new(RefusalKind::Unavailable, "no".to_owned())),
        ExecReply::RunLocally,
        ExecReply::Started(node),
        ExecReply::StartFailed(StartFailure::Program, 2),
        ExecReply::Exited(ExitReport { status: 7 << 8, cpu_us: 1, wall_us: 2 }),
        ExecReply::NodeLost(node),
        ExecReply::Placed(node, PlacementReason::Requeued(NodeId(3))),
        ExecReply::Pending(PendingReason::Slot(vec![node])),
    ]
}

/// One frame of each message, as received from a socket.
fn all_messages() -> Vec<u8> {
    let request = JobRequest {
        task: task(),
        nodes: NodeChoice::Among(vec![NodeId(2)]),
        repeatable: true,
        class: "sh gcc".into(),
    };
    let exec_requests = [
        ExecRequest::Hello { version: 2, shared: Vec::new() },
        ExecRequest::Hello {
            version: 2,
            shared: vec![SharedDirId {
                path: b"/nfs/home".to_vec(),
                kind: "nfs4".into(),
                handle: Some((1, vec![7; 28])),
                inode: 2,
                born: Some((1, 2)),
            }],
        },
        ExecRequest::Run(Box::new(task()), Credentials { uid: 1, gid: 2, groups: vec![3] }),
        ExecRequest::WaitForSlot { uid: 1, usage: UserUsage { running: 2, recent_cpu: 1500 } },
        ExecRequest::UpdateUsage(UserUsage { running: 0, recent_cpu: 70 }),
    ];
    let mut all = encode_frame(kind::JOB_REQUEST, WANTS_PROGRESS, &encode(&request).unwrap());
    exec_requests
        .iter()
        .for_each(|request| all.extend(encode_frame(kind::EXEC_REQUEST, 0, &encode(request).unwrap())));
    replies().iter().for_each(|reply| all.extend(encode_frame(kind::EXEC_REPLY, 0, &encode(reply).unwrap())));
    all.extend(encode_frame(kind::DATA, 1, b"output"));
    all.extend(encode_frame(kind::END, 0, b""));
    all.extend(encode_frame(kind::CREDIT, 1, &6u32.to_le_bytes()));
    all.extend(encode_frame(kind::SIGNAL, 0, &encode(&Signal { number: 15, group: true }).unwrap()));
    all.extend(encode_frame(kind::WINDOW, 0, &encode(&WindowSize { rows: 1, columns: 2 }).unwrap()));
    all.extend(encode_frame(kind::HEARTBEAT, 0, b""));
    all
}

#[test]
fn socket_input_is_parsed_or_refused() {
    let all = all_messages();
    update_corpus("messages", "whole", &[&[5], &all[..]].concat());
    assert_eq!(parse(&all, 5), 23);
    for bytes in corrupted_variants(&all, 1) {
        let _count = parse(&bytes, 7);
    }
    for bytes in files("messages") {
        let _count = parse(&bytes[1..], bytes[0].into());
    }
}

/// A frame in the encoding of the target `halves`.
fn frame(kind: u8, stream: u8, bytes: &[u8]) -> Vec<u8> {
    let length = u16::try_from(bytes.len()).unwrap().to_le_bytes();
    [&[kind, stream], &length[..], bytes].concat()
}

#[test]
fn command_ends_whatever_its_peers_send() {
    let halves = Halves::new().unwrap();
    let output = [
        frame(kind::HEARTBEAT, 0, b""),
        frame(kind::DATA, 1, b"output"),
        frame(kind::DATA, 2, b"error"),
        frame(kind::END, 2, b""),
    ]
    .concat();
    let ended = frame(kind::EXEC_REPLY, 0, &encode(&replies()[7]).unwrap());
    let input = [
        frame(kind::DATA, 0, b"input"),
        frame(kind::SIGNAL, 0, &encode(&Signal { number: 10, group: false }).unwrap()),
        frame(kind::END, 0, b""),
    ]
    .concat();
    // The output of a repeatable command that has not ended is held back; all other output is
    // relayed.
    assert_eq!(halves.relay(&output, &input, true).unwrap(), 0);
    assert_eq!(halves.relay(&output, &input, false).unwrap(), 4);
    let whole = [&output[..], &ended].concat();
    for holds_output in [true, false] {
        assert_eq!(halves.relay(&whole, b"", holds_output).unwrap(), 5);
    }
    // A command that consumes input is not repeated.
    let consuming = [&frame(kind::CREDIT, 0, &5u32.to_le_bytes())[..], &output].concat();
    assert_eq!(halves.relay(&consuming, &input, true).unwrap(), 5);
    let home =
        [&input[..], &frame(kind::CREDIT, 1, &6u32.to_le_bytes()), &frame(kind::HEARTBEAT, 0, b"")].concat();
    assert!(!halves.job(&frame(kind::JOB_REQUEST, 0, b""), false).unwrap());
    let _either = halves.job(&home, false).unwrap();
    let relayed = |flags: u8| {
        let length = u16::try_from(whole.len()).unwrap().to_le_bytes();
        [&[flags], &length[..], &whole, &input].concat()
    };
    let homes = [&[1, 0, 0], &home[..]].concat();
    let clients =
        [&[3, 0, 0][..], &frame(kind::DATA, 0, b"input"), &frame(kind::SIGNAL, 0, b"TERM")].concat();
    for (name, bytes) in
        [("relayed", relayed(0)), ("held", relayed(2)), ("homes", homes), ("clients", clients)]
    {
        update_corpus("halves", name, &bytes);
        let _any = halves.feed(&bytes).unwrap();
        for bytes in corrupted_variants(&bytes, 29) {
            let _any = halves.feed(&bytes).unwrap();
        }
    }
    for bytes in files("halves") {
        let _any = halves.feed(&bytes).unwrap();
    }
}

#[test]
fn client_input_is_accepted_or_refused() {
    let order = r#"{"argv": ["sh", "-c", "echo \u00ff"], "environment": {"LANG": "C", "_x": ""}, "directory": "a/b", "input": true, "joined": false}"#;
    let proof = r#"{"tern": 1, "client": "laptop", "proof": "00ff"}"#;
    for (name, bytes) in [("order", order), ("proof", proof), ("signal", "TERM")] {
        update_corpus("gatekeeper", name, bytes.as_bytes());
        assert!(accepts(bytes.as_bytes()), "{name}");
        for bytes in corrupted_variants(bytes.as_bytes(), 1) {
            let _any = accepts(&bytes);
        }
    }
    for bytes in files("gatekeeper") {
        let _any = accepts(&bytes);
    }
    assert!(!accepts(br#"{"argv": ["true"], "environment": {"LD_PRELOAD": "x"}}"#));
    assert!(!accepts(br#"{"argv": ["true"], "uid": 0}"#));
}
