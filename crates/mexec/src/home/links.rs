//! Connections to the away halves of other nodes. One that has seen its command to the end is kept for the next: a handshake
//! would cost each command some milliseconds.

use crate::lock;
use crate::lock_step::Beat;
use crate::shared::Shared;
use crate::words::{Ask, Said, VERSION, kind};
use anyhow::{Context, Result, bail};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tern_ids::NodeId;
use tern_node::Config;
use tern_node::map::Map;
use tern_wire::{Identity, Link, LinkError, Preamble};

/// How long a node may take to be reached, and how often one that is there and is late is tried again: what runs commands there may have to
/// be started first.
const REACH: Duration = Duration::from_secs(3);
const LATE: u32 = 2;

/// How often a node that closes a new connection is tried again, and after how long.
const TRIES: u32 = 10;
const PAUSE: Duration = Duration::from_millis(100);

/// How long one is kept: less than the other half waits.
const IDLE: Duration = Duration::from_secs(120);

/// The most that are kept to one node.
const MOST: usize = 64;

/// All that are kept.
#[derive(Debug)]
pub(super) struct Links {
    identity: Identity,
    map: PathBuf,
    shared: Shared,
    idle: Mutex<HashMap<NodeId, Vec<(Link, Instant)>>>,
}

impl Links {
    pub(super) fn new(config: &Config, identity: Identity) -> Self {
        Self { identity, map: config.map.clone(), shared: Shared::new(config), idle: Mutex::default() }
    }

    /// A connection on which something can be asked.
    ///
    /// # Errors
    /// If the node cannot be reached, or refuses.
    pub(super) fn to(&self, node: NodeId) -> Result<Link> {
        while let Some((mut link, since)) = lock(&self.idle).get_mut(&node).and_then(Vec::pop) {
            // One whose other end has gone says so.
            if since.elapsed() < IDLE && matches!(link.receive(), Ok(None)) {
                return Ok(link);
            }
        }
        let (mut tries, mut late) = (TRIES, LATE);
        loop {
            match self.reach(node) {
                // A port to which many come at once closes some.
                Err(error) if tries > 0 && matches!(error.downcast_ref(), Some(LinkError::Closed)) => {
                    tries -= 1;
                    std::thread::sleep(PAUSE);
                }
                Err(error) if late > 0 && matches!(error.downcast_ref(), Some(LinkError::Timeout)) => {
                    late -= 1;
                }
                reached => {
                    return reached.inspect_err(
                        |error| tracing::info!(%node, "cannot be asked to run a command: {error:#}"),
                    );
                }
            }
        }
    }

    fn reach(&self, node: NodeId) -> Result<Link> {
        let address = Map::read(&self.map)?.address(node)?;
        let begin = Ask::Begin { version: VERSION, shared: self.shared.roots() };
        let until = Instant::now() + REACH;
        let mut link = Link::connect(&address, Preamble::Exec, &self.identity.cluster_client(node)?, until)?;
        match ask(&mut link, &begin, until)? {
            Said::Begun => Ok(link),
            Said::Refused(refusal) => Err(refusal.into()),
            said => bail!("it says {said:?} where it was to begin"),
        }
    }

    /// Keeps one that is in no command.
    pub(super) fn keep(&self, node: NodeId, link: Link) {
        let mut idle = lock(&self.idle);
        let kept = idle.entry(node).or_default();
        kept.retain(|(_, since)| since.elapsed() < IDLE);
        if kept.len() < MOST {
            kept.push((link, Instant::now()));
        }
    }
}

/// Asks, and waits for what is said.
///
/// # Errors
/// Those of the link, or that something else comes.
pub(super) fn ask(link: &mut Link, ask: &Ask, until: Instant) -> Result<Said> {
    let bytes = tern_wire::encode(ask).context("it is too long to be sent")?;
    link.send(kind::ASK, 0, &[&bytes], until)?;
    loop {
        // The other end, which may be long about it, is to know that it is waited for.
        let frame = match link.recv(until.min(Instant::now() + Beat::OFTEN)) {
            Err(LinkError::Timeout) if Instant::now() < until => {
                link.send(kind::BEAT, 0, &[], until)?;
                continue;
            }
            frame => frame?,
        };
        match frame.kind {
            kind::SAID => return Ok(tern_wire::decode(&frame.payload)?),
            kind::BEAT => {}
            other => bail!("a piece of kind {other} where something was asked"),
        }
    }
}
