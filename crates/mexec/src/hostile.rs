//! Entry points for fuzzing and tests that feed the two halves with input of hostile peers:
//! `crates/mexec/fuzz`.
//!
//! The input of a peer is encoded as frames with a short header: kind, stream and length (two
//! bytes, little endian).

use crate::away::containers::Container;
use crate::away::{HomePeer, job::Job};
use crate::container::{InitEvent, LaunchRequest};
use crate::frames::{self, FrameReader, LocalFrame};
use crate::gatekeeper::ClientPeer;
use crate::home::RunOutcome;
use crate::home::relay::relay;
use crate::messages::{ExecReply, ExecRequest, JobRequest, Signal, Task, WindowSize, kind};
use anyhow::{Context, Result, ensure};
use serde::{Serialize, de::DeserializeOwned};
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tern_ids::{Credentials, NodeId};
use tern_wire::limits::PREAMBLE_LEN;
use tern_wire::{Authority, ClientTls, Identity, Link, Preamble, ServerTls};

/// Time limit for operations between two ends on one machine.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The node that plays all roles.
const NODE: NodeId = NodeId(1);

/// Decodes the frames of such input. An incomplete frame at the end is ignored.
fn decode_frames(mut bytes: &[u8]) -> impl Iterator<Item = LocalFrame> {
    std::iter::from_fn(move || {
        let ([kind, stream, low, high], rest) = bytes.split_first_chunk::<4>()?;
        let (payload, rest) = rest.split_at_checked(u16::from_le_bytes([*low, *high]).into())?;
        bytes = rest;
        Some(LocalFrame { kind: *kind, stream: *stream, payload: payload.to_vec() })
    })
}

/// Parses the bytes as received from a socket, once in parts of this size and once as a whole, and
/// checks that both give the same frames. Decodes each frame by its kind. Returns the number of
/// frames.
///
/// # Panics
/// If the parser misbehaves.
#[must_use]
pub fn parse(bytes: &[u8], size: usize) -> usize {
    let (mut reader, mut frames) = (FrameReader::default(), Vec::new());
    'all: for mut part in bytes.chunks(size.max(1)) {
        while !part.is_empty() {
            assert!(reader.fill(&mut part).is_ok_and(|open| open));
            loop {
                match reader.next_frame() {
                    Ok(Some(frame)) => frames.push(frame),
                    Ok(None) => break,
                    Err(_) => break 'all,
                }
            }
        }
    }
    let mut rest = bytes;
    for frame in &frames {
        assert!(frames::read_frame(&mut rest).is_ok_and(|read| read == *frame));
        let _valid = frame.is_valid();
        match frame.kind {
            kind::JOB_REQUEST => {
                round_trip::<JobRequest>(&frame.payload, |request| drop(request.task.summary(99)));
            }
            kind::EXEC_REQUEST => round_trip::<ExecRequest>(&frame.payload, |_| {}),
            kind::EXEC_REPLY => round_trip::<ExecReply>(&frame.payload, |_| {}),
            kind::SIGNAL => round_trip::<Signal>(&frame.payload, |_| {}),
            kind::WINDOW => round_trip::<WindowSize>(&frame.payload, |_| {}),
            _ => {}
        }
    }
    assert!(frames::read_frame(&mut rest).is_err());
    frames.len()
}

/// Checks that a message, if it can be decoded, survives encoding.
fn round_trip<T: Serialize + DeserializeOwned + PartialEq>(bytes: &[u8], inspect: impl FnOnce(&T)) {
    let Ok(message) = frames::decode::<T>(bytes) else { return };
    inspect(&message);
    let again = tern_wire::encode(&message).ok().and_then(|bytes| frames::decode::<T>(&bytes).ok());
    assert!(again.is_some_and(|again| again == message));
}

/// Both halves, each of which is fed with input instead of the other's messages.
#[derive(Debug)]
pub struct Halves {
    listener: TcpListener,
    client: ClientTls,
    server: ServerTls,
    container: Arc<Container>,
}

impl Halves {
    /// Both halves on this machine.
    ///
    /// # Errors
    /// If an identity or a connection cannot be created.
    pub fn new() -> Result<Self> {
        let identity = Identity::issued_by_authority(&Authority::create("hostile")?, NODE)?;
        identity.members().set([identity.member()]);
        let (socket, container_end) = UnixStream::pair()?;
        thread::spawn(move || fake_container(container_end));
        let process = Command::new("true").stdin(Stdio::null()).spawn()?;
        Ok(Self {
            listener: TcpListener::bind("127.0.0.1:0")?,
            client: identity.cluster_client(NODE)?,
            server: identity.cluster_server()?,
            container: Arc::new(Container::new(socket, None, process)),
        })
    }

    /// The two ends of a new link.
    pub(crate) fn link(&self) -> Result<(Link, Link)> {
        let address = self.listener.local_addr()?.to_string();
        thread::scope(|scope| {
            let client_end = scope.spawn(move || {
                Link::connect(&address, Preamble::Exec, &self.client, Instant::now() + TIMEOUT)
            });
            let (mut socket, _) = self.listener.accept()?;
            socket.read_exact(&mut [0; PREAMBLE_LEN])?;
            let server_end = Link::accept(socket, &self.server, Instant::now() + TIMEOUT)?;
            Ok((client_end.join().ok().context("no end of a link")??, server_end))
        })
    }

    /// Feeds input to one of the halves. Bit 0 of the first byte selects a job or a relay; bit 1
    /// makes the job's peer an outside client, or the relay hold output back. The next two bytes
    /// are the length of the node's input to a relay, which precedes the caller's. Returns whether
    /// the input had any effect.
    ///
    /// # Errors
    /// If the half misbehaves.
    pub fn feed(&self, bytes: &[u8]) -> Result<bool> {
        let Some(([flags, low, high], rest)) = bytes.split_first_chunk::<3>() else { return Ok(false) };
        if flags & 1 == 1 {
            return self.job(rest, flags & 2 == 2);
        }
        let (node, caller) = rest.split_at(rest.len().min(u16::from_le_bytes([*low, *high]).into()));
        Ok(self.relay(node, caller, flags & 2 == 2)? > 0)
    }

    /// Relays input of a node that runs a command, and of the command's caller. Returns the number
    /// of frames that have reached the caller.
    ///
    /// # Errors
    /// If the relay misbehaves.
    pub fn relay(&self, node: &[u8], caller: &[u8], holds_output: bool) -> Result<usize> {
        let (mut local_end, mut remote_end) = self.link()?;
        for frame in decode_frames(node) {
            remote_end.queue(frame.kind, frame.stream.into(), &[&frame.payload])?;
        }
        drop(remote_end);
        let (mut socket, mut caller_end) = UnixStream::pair()?;
        for frame in decode_frames(caller) {
            caller_end.write_all(&frames::encode_frame(frame.kind, frame.stream, &frame.payload))?;
        }
        let mut caller_reader = caller_end.try_clone()?;
        let received = thread::spawn(move || {
            let mut all = Vec::new();
            caller_reader.read_to_end(&mut all).map(|_| all)
        });
        let outcome = relay(&mut local_end, &mut socket, ExecReply::Started(NODE), holds_output);
        drop(socket);
        let received = received.join().ok().context("the reader has panicked")??;
        let (mut rest, mut count) = (&received[..], 0);
        while !rest.is_empty() {
            frames::read_frame(&mut rest)?;
            count += 1;
        }
        let is_lost = matches!(outcome, Ok((RunOutcome::NodeLost, _)));
        ensure!(!is_lost || holds_output && count == 0, "output of a repeatable command was relayed");
        Ok(count)
    }

    /// Feeds input of a command's home (or of an outside client) to the job that runs the command.
    /// Returns whether the job has reported its exit.
    ///
    /// # Errors
    /// If no link or job can be created.
    pub fn job(&self, home: &[u8], is_outside: bool) -> Result<bool> {
        let (mut local_end, mut remote_end) = self.link()?;
        for frame in decode_frames(home) {
            local_end.queue(frame.kind, frame.stream.into(), &[&frame.payload])?;
        }
        let credentials = Credentials { uid: 0, gid: 0, groups: Vec::new() };
        let mut job = Job::start(
            &Task { forwards_stdin: true, ..task(&["cat"]) },
            &credentials,
            self.container.clone(),
        )?;
        let reply = thread::scope(|scope| {
            // Reads what the job sends, until the link is closed.
            scope.spawn(move || while local_end.recv(Instant::now() + TIMEOUT).is_ok() {});
            let reply = match is_outside {
                true => job.run(&mut remote_end, &ClientPeer::default()),
                false => job.run(&mut remote_end, &HomePeer(NODE)),
            };
            drop(remote_end);
            reply
        });
        Ok(matches!(reply, Ok(ExecReply::Exited(_))))
    }
}

/// A command with nothing but its arguments.
pub(crate) fn task(words: &[&str]) -> Task {
    Task {
        program: words[0].into(),
        arguments: words.iter().map(|word| word.as_bytes().to_vec()).collect(),
        environment: Vec::new(),
        directory: b"/".to_vec(),
        umask: 0,
        limits: Vec::new(),
        nice: 0,
        ignored_signals: 0,
        blocked_signals: 0,
        pid: 1,
        terminal: None,
        forwards_stdin: false,
        merges_stderr: false,
        private_tmp: false,
    }
}

/// A fake container, in which each command writes some output, reads signals for a moment, and
/// exits.
fn fake_container(mut executor: UnixStream) {
    while let Ok(Some(request)) = LaunchRequest::receive(&mut executor) {
        thread::spawn(move || {
            let [input, output, error, init] = request.fds;
            let mut init = UnixStream::from(init);
            let _gone = init.write_all(&InitEvent::Started.to_bytes());
            let _gone = File::from(output).write_all(b"output");
            drop(error);
            let mut signal = [0; 5];
            let _none = init.set_read_timeout(Some(Duration::from_millis(2)));
            let _none = init.read(&mut signal);
            drop(input);
            let _gone = init.write_all(&InitEvent::Exited(7 << 8, 1).to_bytes());
        });
    }
}
