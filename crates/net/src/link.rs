//! Links to the tern-net of a home, and the frames on them. A message longer than one frame is split;
//! all frames but the last are flagged.

use crate::message::{NetReply, NetRequest, VERSION};
use anyhow::{Context, Result, bail, ensure};
use serde::{Serialize, de::DeserializeOwned};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tern_ids::NodeId;
use tern_node::Config;
use tern_node::map::Map;
use tern_wire::{Identity, Link, Preamble};

/// Frame kind of all messages.
const KIND: u8 = 1;

/// Frame flag: the message continues in the next frame.
const MORE: u16 = 1;

/// Payload of a frame, in bytes.
const PIECE: usize = 1 << 20;

/// Maximum length of a message, in bytes: both queues of a connection, and its description.
const MAX_MESSAGE: usize = tern_tcp::connection::MAX_QUEUED + (1 << 20);

/// Bytes that a link carries in a millisecond at least: a third of 100 Mbit/s.
const MIN_RATE: usize = 4 << 10;

/// Limit for connecting to a node. ternd may have to start tern-net there first.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Limit for a request and its reply. Both sides hold a connection's packets meanwhile.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// How long an idle link is kept: less than home keeps it.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);

/// Maximum number of idle links to a node.
const MAX_IDLE: usize = 8;

/// Sends a message within `timeout`, and the time that its length takes.
///
/// # Errors
/// Those of the link.
pub(crate) fn send<T: Serialize>(link: &mut Link, message: &T, timeout: Duration) -> Result<()> {
    let bytes = postcard::to_stdvec(message).context("the message cannot be encoded")?;
    let mut rest = bytes.as_slice();
    while let Some((piece, more)) = rest.split_at_checked(PIECE).filter(|(_, more)| !more.is_empty()) {
        link.queue_flagged(KIND, MORE, 0, &[piece])?;
        rest = more;
    }
    link.queue(KIND, 0, &[rest])?;
    let transfer = Duration::from_millis((bytes.len() / MIN_RATE) as u64);
    Ok(link.drain(Instant::now() + timeout + transfer)?)
}

/// Receives a message, each frame of it within `timeout`.
///
/// # Errors
/// Those of the link, or if the message is malformed or too long.
pub(crate) fn receive<T: DeserializeOwned>(link: &mut Link, timeout: Duration) -> Result<T> {
    let mut bytes = Vec::new();
    loop {
        let frame = link.recv(Instant::now() + timeout)?;
        ensure!(frame.kind == KIND && frame.flags & !MORE == 0, "a frame of kind {}", frame.kind);
        ensure!(bytes.len() + frame.payload.len() <= MAX_MESSAGE, "a message is too long");
        bytes.extend_from_slice(&frame.payload);
        if frame.flags & MORE == 0 {
            return Ok(tern_wire::decode(&bytes)?);
        }
    }
}

/// A way to send requests to homes.
pub trait Homes: Sync + Send {
    /// Sends a request to a home, and waits for the reply.
    ///
    /// # Errors
    /// If the home cannot be reached, or the link breaks. It is then unknown whether the request was
    /// performed.
    fn call(&self, home: NodeId, request: &NetRequest) -> Result<NetReply>;

    /// A link to a home that has become a tunnel.
    ///
    /// # Errors
    /// If the home cannot be reached, or refuses.
    fn tunnel(&self, home: NodeId) -> Result<Link>;
}

/// Links to the tern-nets of other nodes.
#[derive(Debug)]
pub struct HomeLinks {
    identity: Identity,
    map: PathBuf,
    idle: Mutex<HashMap<NodeId, Vec<(Link, Instant)>>>,
}

impl HomeLinks {
    /// For the node with this configuration and identity.
    #[must_use]
    pub fn new(config: &Config, identity: Identity) -> Self {
        Self { identity, map: config.map.clone(), idle: Mutex::default() }
    }

    fn get(&self, home: NodeId) -> Result<Link> {
        let pop = || {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.get_mut(&home).and_then(Vec::pop)
        };
        while let Some((mut link, since)) = pop() {
            // A closed link returns an error here.
            if since.elapsed() < IDLE_TIMEOUT && matches!(link.receive(), Ok(None)) {
                return Ok(link);
            }
        }
        self.connect(home)
    }

    fn connect(&self, home: NodeId) -> Result<Link> {
        let address = Map::read(&self.map)?.address(home)?;
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let mut link =
            Link::connect(&address, Preamble::Net, &self.identity.cluster_client(home)?, deadline)?;
        send(&mut link, &NetRequest::Begin { version: VERSION }, CONNECT_TIMEOUT)?;
        match receive(&mut link, CONNECT_TIMEOUT)? {
            NetReply::Done => Ok(link),
            NetReply::Refused(why) => bail!(why),
            NetReply::Taken(..) => bail!("node {home} sent an unexpected reply"),
        }
    }

    fn put_back(&self, home: NodeId, link: Link) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = idle.entry(home).or_default();
        kept.retain(|(_, since)| since.elapsed() < IDLE_TIMEOUT);
        if kept.len() < MAX_IDLE {
            kept.push((link, Instant::now()));
        }
    }
}

impl Homes for HomeLinks {
    fn call(&self, home: NodeId, request: &NetRequest) -> Result<NetReply> {
        let mut link = self.get(home)?;
        send(&mut link, request, CALL_TIMEOUT)?;
        let reply = receive(&mut link, CALL_TIMEOUT)?;
        self.put_back(home, link);
        Ok(reply)
    }

    fn tunnel(&self, home: NodeId) -> Result<Link> {
        let mut link = self.connect(home)?;
        send(&mut link, &NetRequest::Tunnel, CONNECT_TIMEOUT)?;
        match receive(&mut link, CONNECT_TIMEOUT)? {
            NetReply::Done => Ok(link),
            NetReply::Refused(why) => bail!(why),
            NetReply::Taken(..) => bail!("node {home} sent an unexpected reply"),
        }
    }
}
