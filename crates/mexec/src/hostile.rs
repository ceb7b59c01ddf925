//! What hostile peers may say, as the fuzz targets and the tests have it said: `crates/mexec/fuzz`.
//!
//! Bytes are what a peer says: pieces, each with its kind, its stream and its length (two bytes, the lower one first) before it.

use crate::away::job::Job;
use crate::away::{ToHome, rooms::Room};
use crate::home::Outcome;
use crate::home::relay::relay;
use crate::outside::FromOutside;
use crate::pieces::{self, Inbox, Piece};
use crate::room::{News, Order};
use crate::words::{Ask, Said, Signal, Task, Who, Window, kind};
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
use tern_ids::NodeId;
use tern_wire::limits::PREAMBLE;
use tern_wire::{Authority, ClientTls, Identity, Link, Preamble, ServerTls};

/// How long two ends of one machine may take.
const SOON: Duration = Duration::from_secs(20);

/// Whose files and commands it is about.
const NODE: NodeId = NodeId(1);

/// The pieces in these bytes; what is cut off is left.
fn split(mut bytes: &[u8]) -> impl Iterator<Item = Piece> {
    std::iter::from_fn(move || {
        let ([kind, stream, low, high], rest) = bytes.split_first_chunk::<4>()?;
        let (payload, rest) = rest.split_at_checked(u16::from_le_bytes([*low, *high]).into())?;
        bytes = rest;
        Some(Piece { kind: *kind, stream: *stream, bytes: payload.to_vec() })
    })
}

/// Reads the bytes as those of a socket, in parts of this size and all at once: both find the same. Each piece is read as what its kind
/// says; how many there were.
///
/// # Panics
/// If something is wrong with what reads them.
#[must_use]
pub fn words(bytes: &[u8], size: usize) -> usize {
    let (mut inbox, mut found) = (Inbox::default(), Vec::new());
    'all: for mut part in bytes.chunks(size.max(1)) {
        while !part.is_empty() {
            assert!(inbox.fill(&mut part).is_ok_and(|open| open));
            loop {
                match inbox.piece() {
                    Ok(Some(piece)) => found.push(piece),
                    Ok(None) => break,
                    Err(_) => break 'all,
                }
            }
        }
    }
    let mut rest = bytes;
    for piece in &found {
        assert!(pieces::hear(&mut rest).is_ok_and(|heard| heard == *piece));
        let _sound = piece.is_sound();
        match piece.kind {
            kind::ORDER => survives::<crate::words::Order>(&piece.bytes, |order| drop(order.task.shown(99))),
            kind::ASK => survives::<Ask>(&piece.bytes, |_| {}),
            kind::SAID => survives::<Said>(&piece.bytes, |_| {}),
            kind::SIGNAL => survives::<Signal>(&piece.bytes, |_| {}),
            kind::WINDOW => survives::<Window>(&piece.bytes, |_| {}),
            _ => {}
        }
    }
    assert!(pieces::hear(&mut rest).is_err());
    found.len()
}

/// What can be read is read as the same when it is said again.
fn survives<T: Serialize + DeserializeOwned + PartialEq>(bytes: &[u8], look: impl FnOnce(&T)) {
    let Ok(message) = pieces::read::<T>(bytes) else { return };
    look(&message);
    let again = tern_wire::encode(&message).ok().and_then(|bytes| pieces::read::<T>(&bytes).ok());
    assert!(again.is_some_and(|again| again == message));
}

/// Two halves, each of which hears what is said instead of the other.
#[derive(Debug)]
pub struct Halves {
    listener: TcpListener,
    client: ClientTls,
    server: ServerTls,
    room: Arc<Room>,
}

impl Halves {
    /// Halves of nodes that are on this machine.
    ///
    /// # Errors
    /// If there can be no identity, or no connection.
    pub fn new() -> Result<Self> {
        let identity = Identity::issued_by(&Authority::create("hostile")?, NODE)?;
        let (orders, theirs) = UnixStream::pair()?;
        thread::spawn(move || be_room(theirs));
        let process = Command::new("true").stdin(Stdio::null()).spawn()?;
        Ok(Self {
            listener: TcpListener::bind("127.0.0.1:0")?,
            client: identity.cluster_client(NODE)?,
            server: identity.cluster_server()?,
            room: Arc::new(Room::of(orders, None, process)),
        })
    }

    /// Two ends of a link.
    pub(crate) fn link(&self) -> Result<(Link, Link)> {
        let address = self.listener.local_addr()?.to_string();
        thread::scope(|scope| {
            let near = scope
                .spawn(move || Link::connect(&address, Preamble::Exec, &self.client, Instant::now() + SOON));
            let (mut socket, _) = self.listener.accept()?;
            socket.read_exact(&mut [0; PREAMBLE])?;
            let far = Link::accept(socket, &self.server, Instant::now() + SOON)?;
            Ok((near.join().ok().context("no end of a link")??, far))
        })
    }

    /// The first byte says whom these are said to: a relay, with what the caller says after what its node says, or a job; whether anything
    /// became of it.
    ///
    /// # Errors
    /// If something is wrong with who hears them.
    pub fn hear(&self, bytes: &[u8]) -> Result<bool> {
        let Some(([how, low, high], rest)) = bytes.split_first_chunk::<3>() else { return Ok(false) };
        if how & 1 == 1 {
            return self.job(rest, how & 2 == 2);
        }
        let (node, caller) = rest.split_at(rest.len().min(u16::from_le_bytes([*low, *high]).into()));
        Ok(self.relay(node, caller, how & 2 == 2)? > 0)
    }

    /// The node that runs a command says the first of these, and its caller the second; how many pieces have reached the caller.
    ///
    /// # Errors
    /// If something is wrong with the relay.
    pub fn relay(&self, node: &[u8], caller: &[u8], holds: bool) -> Result<usize> {
        let (mut near, mut far) = self.link()?;
        for piece in split(node) {
            far.queue(piece.kind, piece.stream.into(), &[&piece.bytes])?;
        }
        drop(far);
        let (mut socket, mut theirs) = UnixStream::pair()?;
        for piece in split(caller) {
            theirs.write_all(&pieces::whole(piece.kind, piece.stream, &piece.bytes))?;
        }
        let mut takes = theirs.try_clone()?;
        let taken = thread::spawn(move || {
            let mut all = Vec::new();
            takes.read_to_end(&mut all).map(|_| all)
        });
        let outcome = relay(&mut near, &mut socket, Said::Started(NODE), holds);
        drop(socket);
        let taken = taken.join().ok().context("nobody takes it")??;
        let (mut rest, mut count) = (&taken[..], 0);
        while !rest.is_empty() {
            pieces::hear(&mut rest)?;
            count += 1;
        }
        let is_lost = matches!(outcome, Ok((Outcome::Lost, _)));
        ensure!(!is_lost || holds && count == 0, "of what may be run again somebody has heard");
        Ok(count)
    }

    /// The home of a command, or a client outside, says these to the node that runs it; whether that has heard of its end.
    ///
    /// # Errors
    /// If there is no link or no command.
    pub fn job(&self, home: &[u8], is_outside: bool) -> Result<bool> {
        let (mut near, mut far) = self.link()?;
        for piece in split(home) {
            near.queue(piece.kind, piece.stream.into(), &[&piece.bytes])?;
        }
        let who = Who { uid: 0, gid: 0, groups: Vec::new() };
        let mut job = Job::begin(&Task { input: true, ..task(&["cat"]) }, &who, self.room.clone())?;
        let said = thread::scope(|scope| {
            // Takes what it says until it ends.
            scope.spawn(move || while near.recv(Instant::now() + SOON).is_ok() {});
            let said = match is_outside {
                true => job.attend(&mut far, &FromOutside::default()),
                false => job.attend(&mut far, &ToHome(NODE)),
            };
            drop(far);
            said
        });
        Ok(matches!(said, Ok(Said::Ended(_))))
    }
}

/// A command with nothing but its words.
pub(crate) fn task(words: &[&str]) -> Task {
    Task {
        program: words[0].into(),
        arguments: words.iter().map(|word| word.as_bytes().to_vec()).collect(),
        environment: Vec::new(),
        directory: b"/".to_vec(),
        umask: 0,
        limits: Vec::new(),
        nice: 0,
        signals: (0, 0),
        pid: 1,
        terminal: None,
        input: false,
        joined: false,
        scratch: false,
    }
}

/// Stands for a room: its commands say something, take what comes within a moment, and end.
fn be_room(mut executor: UnixStream) {
    while let Ok(Some(order)) = Order::hear(&mut executor) {
        thread::spawn(move || {
            let [input, output, error, line] = order.descriptors;
            let mut line = UnixStream::from(line);
            let _gone = line.write_all(&News::Started.to_bytes());
            let _gone = File::from(output).write_all(b"output");
            drop(error);
            let mut signal = [0; 5];
            let _none = line.set_read_timeout(Some(Duration::from_millis(2)));
            let _none = line.read(&mut signal);
            drop(input);
            let _gone = line.write_all(&News::Ended(7 << 8, 1).to_bytes());
        });
    }
}
