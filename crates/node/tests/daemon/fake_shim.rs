//! A shim that moves nothing, but uses the real protocol with ternd and with its peer. It is this
//! test program itself, started by a small script that keeps the output of the test harness off the
//! pipe.

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::fs;
use std::io::{IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};
use tern_control::{
    Destination, MigrationReport, ProcessRow, Refusal, RefusalKind, Reply, Request, ShimReply, ShimRequest,
    ShimRole, ShimStart, Usage, stream,
};
use tern_ids::{HomePid, MigrationId};
use tern_wire::{Ephemeral, Link, Preamble, pinned_client, pinned_server};

pub(crate) fn write_program(path: &Path) {
    let own = std::env::current_exe().unwrap();
    let script = format!(
        "#!/bin/sh\nexec 3>&1 >/dev/null\nFAKE_SHIM=1 exec {own:?} --exact fake_shim::shim --ignored --nocapture\n"
    );
    // Written under another name first: if a parallel test forks while the file is open for
    // writing, exec fails.
    let fresh = path.with_extension("new");
    fs::write(&fresh, script).unwrap();
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(fresh, path).unwrap();
}

#[test]
#[ignore = "no test, but the program that ternd starts as a shim"]
fn shim() {
    if std::env::var_os("FAKE_SHIM").is_none() {
        return;
    }
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).unwrap();
    let start: ShimStart = serde_json::from_str(&text).unwrap();
    let own = Ephemeral::generate().unwrap();
    let listener = UnixListener::bind(start.run_dir.join(format!("shims/{}.sock", start.id))).unwrap();
    listener.set_nonblocking(true).unwrap();
    let hex: String = own.fingerprint().0.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut message = fs::OpenOptions::new().write(true).open("/proc/self/fd/3").unwrap();
    writeln!(message, "ready {hex}").unwrap();
    drop(message);
    while start.run_dir.exists() {
        match listener.accept() {
            Ok((socket, _)) => {
                socket.set_nonblocking(false).unwrap();
                serve(&start, &own, socket);
            }
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn serve(start: &ShimStart, own: &Ephemeral, mut socket: UnixStream) {
    let Ok(request) = stream::read(&mut socket) else { return };
    let reply = match (request, &start.role) {
        (ShimRequest::Processes, _) => ShimReply::Processes(vec![row(start)]),
        (ShimRequest::Owns { pid }, ShimRole::Deputy { pid: held }) if pid == *held => ShimReply::Done,
        // Its first epoch is over.
        (ShimRequest::IsGuestAwaited { pid, epoch }, ShimRole::Deputy { pid: held })
            if pid == *held && epoch.0 > 1 =>
        {
            ShimReply::Done
        }
        (ShimRequest::AtExec { pid, .. }, ShimRole::Deputy { pid: held }) if pid == *held => ShimReply::Done,
        (ShimRequest::Migrate { pid, to: Destination::Node(to), .. }, ShimRole::Deputy { .. }) => {
            migrate(start, own, pid, to)
        }
        (ShimRequest::Connection, ShimRole::Guest { accepted_keys, .. }) => {
            let connection = receive(&socket);
            stream::write(&mut socket, &ShimReply::Done).unwrap();
            let deadline = Instant::now() + Duration::from_secs(5);
            if let Ok(mut link) =
                Link::accept(connection, &pinned_server(own, accepted_keys).unwrap(), deadline)
            {
                let frame = link.recv(deadline).unwrap();
                link.send(frame.kind, frame.tag, &[b"guest of ", &frame.payload], deadline).unwrap();
            }
            return;
        }
        _ => ShimReply::Refused(Refusal::new(RefusalKind::NotFound, "not mine")),
    };
    let _gone = stream::write(&mut socket, &reply);
}

fn row(start: &ShimStart) -> ProcessRow {
    let (pid, from) = match start.role {
        ShimRole::Deputy { pid } => (pid, None),
        ShimRole::Guest { home, .. } => (HomePid(1), Some(home)),
    };
    ProcessRow {
        pid,
        uid: 0,
        r#where: Some(start.node),
        from,
        state: "running".into(),
        cpu_seconds: 0.0,
        migrations: 0,
        reason: String::new(),
        command: "fake".into(),
        usage: Usage::default(),
        started: None,
    }
}

/// Prepares the destination and exchanges a message with the shim there; this stands for a move.
fn migrate(start: &ShimStart, own: &Ephemeral, pid: HomePid, to: tern_ids::NodeId) -> ShimReply {
    let migration = MigrationId([7; 16]);
    let mut control = UnixStream::connect(start.run_dir.join("control")).unwrap();
    let accepted_keys = vec![own.fingerprint()];
    stream::write(
        &mut control,
        &Request::Prepare { node: to, migration, accepted_keys, uid: 0, gid: 0, group: vec![] },
    )
    .unwrap();
    let (address, shim, fingerprint) = match stream::read(&mut control).unwrap() {
        Reply::Prepared { address, shim, fingerprint } => (address, shim, fingerprint),
        Reply::Refused(refusal) => return ShimReply::Refused(refusal),
        other => panic!("{other:?}"),
    };
    let deadline = Instant::now() + Duration::from_secs(5);
    let tls = pinned_client(own, fingerprint).unwrap();
    let mut link = Link::connect(&address, Preamble::Shim(shim), &tls, deadline).unwrap();
    link.send(1, 42, &[format!("node {}", start.node).as_bytes()], deadline).unwrap();
    let frame = link.recv(deadline).unwrap();
    assert_eq!(frame.tag, 42);
    ShimReply::Migrated(MigrationReport {
        pid,
        command: String::from_utf8(frame.payload).unwrap(),
        migration,
        from: start.node,
        to,
        bytes: 0,
        freeze_ms: 0.0,
        total_ms: 0.0,
    })
}

fn receive(socket: &UnixStream) -> TcpStream {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC).unwrap();
    let mut descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    descriptors.next().unwrap().next().unwrap().into()
}
