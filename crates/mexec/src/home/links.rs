//! Connections to the away halves of other nodes. A connection whose command has ended normally is
//! kept for the next one, since a handshake would cost each command some milliseconds.

use crate::heartbeat::Heartbeat;
use crate::lock;
use crate::messages::{ExecReply, ExecRequest, VERSION, kind};
use crate::shared_dirs::SharedDirs;
use anyhow::{Context, Result, bail};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tern_ids::NodeId;
use tern_node::Config;
use tern_node::map::Map;
use tern_wire::{Identity, Link, LinkError, Preamble};

/// Time limit for connecting to a node, and how often a connection is tried again after a timeout.
/// ternd may have to start the executor there first.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const MAX_TIMEOUT_RETRIES: u32 = 2;

/// How often a connection that the node has closed at once is tried again, and the pause before
/// each retry.
const MAX_CLOSED_RETRIES: u32 = 10;
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// How long an idle connection is kept: less than the away half keeps it.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);

/// The maximum number of idle connections to a node.
const MAX_IDLE_LINKS: usize = 64;

/// The idle connections.
#[derive(Debug)]
pub(super) struct NodeLinks {
    identity: Identity,
    map: PathBuf,
    shared: SharedDirs,
    idle: Mutex<HashMap<NodeId, Vec<(Link, Instant)>>>,
}

impl NodeLinks {
    pub(super) fn new(config: &Config, identity: Identity) -> Self {
        Self { identity, map: config.map.clone(), shared: SharedDirs::new(config), idle: Mutex::default() }
    }

    /// A connection that is ready for a request.
    ///
    /// # Errors
    /// If the node cannot be reached, or refuses.
    pub(super) fn get(&self, node: NodeId) -> Result<Link> {
        while let Some((mut link, since)) = lock(&self.idle).get_mut(&node).and_then(Vec::pop) {
            // A closed connection returns an error here.
            if since.elapsed() < IDLE_TIMEOUT && matches!(link.receive(), Ok(None)) {
                return Ok(link);
            }
        }
        let (mut closed_retries, mut timeout_retries) = (MAX_CLOSED_RETRIES, MAX_TIMEOUT_RETRIES);
        loop {
            match self.connect(node) {
                // A busy port closes some connections when many arrive at once.
                Err(error)
                    if closed_retries > 0 && matches!(error.downcast_ref(), Some(LinkError::Closed)) =>
                {
                    closed_retries -= 1;
                    std::thread::sleep(RETRY_DELAY);
                }
                Err(error)
                    if timeout_retries > 0 && matches!(error.downcast_ref(), Some(LinkError::Timeout)) =>
                {
                    timeout_retries -= 1;
                }
                result => {
                    return result.inspect_err(
                        |error| tracing::info!(%node, "cannot be reached to run a command: {error:#}"),
                    );
                }
            }
        }
    }

    fn connect(&self, node: NodeId) -> Result<Link> {
        let address = Map::read(&self.map)?.address(node)?;
        let hello = ExecRequest::Hello { version: VERSION, shared: self.shared.all() };
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let mut link =
            Link::connect(&address, Preamble::Exec, &self.identity.cluster_client(node)?, deadline)?;
        match call(&mut link, &hello, deadline)? {
            ExecReply::HelloOk => Ok(link),
            ExecReply::Refused(refusal) => Err(refusal.into()),
            reply => bail!("it sent an unexpected reply to the handshake: {reply:?}"),
        }
    }

    /// Keeps a connection that carries no command.
    pub(super) fn put_back(&self, node: NodeId, link: Link) {
        let mut idle = lock(&self.idle);
        let kept = idle.entry(node).or_default();
        kept.retain(|(_, since)| since.elapsed() < IDLE_TIMEOUT);
        if kept.len() < MAX_IDLE_LINKS {
            kept.push((link, Instant::now()));
        }
    }
}

/// Sends a request and waits for the reply.
///
/// # Errors
/// Those of the link, or if anything but a reply or a heartbeat arrives.
pub(super) fn call(link: &mut Link, request: &ExecRequest, deadline: Instant) -> Result<ExecReply> {
    let bytes = tern_wire::encode(request).context("the request is too long")?;
    link.send(kind::EXEC_REQUEST, 0, &[&bytes], deadline)?;
    loop {
        // The away half may take long to reply, and meanwhile must see that this half is alive.
        let frame = match link.recv(deadline.min(Instant::now() + Heartbeat::INTERVAL)) {
            Err(LinkError::Timeout) if Instant::now() < deadline => {
                link.send(kind::HEARTBEAT, 0, &[], deadline)?;
                continue;
            }
            frame => frame?,
        };
        match frame.kind {
            kind::EXEC_REPLY => return Ok(tern_wire::decode(&frame.payload)?),
            kind::HEARTBEAT => {}
            other => bail!("a frame of kind {other} instead of a reply"),
        }
    }
}
