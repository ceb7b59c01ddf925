//! The away half: runs commands of other nodes, as their users.
//!
//! ```text
//!  ternd ──connection──▶ control socket ──▶ one thread each: a handshake, then command by command
//!                                            ├▶ slots       free slots, and their queue
//!                                            ├▶ capacity    what the node's owner leaves free
//!                                            ├▶ containers  the containers of the homes
//!                                            └▶ job         streams, signals, end of a command
//! ```

mod capacity;
pub(crate) mod containers;
pub(crate) mod job;
mod slots;

use crate::job_table::JobTable;
use crate::messages::{ExecReply, ExecRequest, Signal, Task, VERSION, kind};
use crate::shared_dirs::SharedDirs;
use anyhow::{Context, Result, bail};
use capacity::OwnerCapacity;
use containers::Containers;
use job::{Job, PeerProtocol};
use slots::{QueuedSlot, Slot, Slots};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_control::shared::SharedDirId;
use tern_control::{Refusal, RefusalKind};
use tern_ids::{Credentials, NodeId};
use tern_node::Config;
use tern_node::map::Map;
use tern_wire::{Identity, Link, LinkError, ServerTls};

/// Time limit for the handshake, and for sending a reply.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// How long an idle connection is kept: longer than the home half keeps it.
const IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// How often a queued request checks whether its home has disconnected.
const QUEUE_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The away half of a node.
#[derive(Debug)]
pub(crate) struct Away {
    node: NodeId,
    config: Config,
    tls: ServerTls,
    containers: Containers,
    slots: Arc<Slots>,
    capacity: OwnerCapacity,
    shared: SharedDirs,
    jobs: Arc<JobTable>,
}

impl Away {
    /// The away half of this node.
    pub(crate) fn new(config: Config, identity: &Identity, jobs: Arc<JobTable>) -> Result<Self> {
        let (max, max_per_user) = (config.file.mexec_jobs, config.file.mexec_user_jobs);
        let slots = Arc::new(Slots::new(max, max_per_user, config.guest_cpus));
        Ok(Self {
            node: identity.node(),
            tls: identity.cluster_server()?,
            containers: Containers::new(config.clone()),
            slots,
            capacity: OwnerCapacity::new(&config),
            shared: SharedDirs::new(&config),
            jobs,
            config,
        })
    }

    /// Stops containers that are not used any more. Call this periodically.
    pub(crate) fn reap_idle(&self) {
        self.containers.reap_idle();
    }

    /// Serves one connection, from its handshake to its end.
    pub(crate) fn serve(&self, socket: TcpStream) -> Result<()> {
        let mut link = Link::accept(socket, &self.tls, Instant::now() + SEND_TIMEOUT)?;
        let home = link.peer_node().context("the peer is no node")?;
        let shared = match receive(&mut link, SEND_TIMEOUT)? {
            Some(ExecRequest::Hello { version: VERSION, shared }) => shared,
            Some(ExecRequest::Hello { version, .. }) => {
                let message =
                    format!("node {} speaks version {VERSION} of mexec, the other {version}", self.node);
                return send(&mut link, &ExecReply::Refused(Refusal::new(RefusalKind::Unsupported, message)));
            }
            _ => bail!("its first frame is no handshake"),
        };
        send(&mut link, &ExecReply::HelloOk)?;
        let mut queued = None;
        loop {
            match receive(&mut link, IDLE_TIMEOUT)? {
                Some(ExecRequest::Run(task, credentials)) => {
                    let credentials = self.squash_root_groups(credentials);
                    self.slots.set_closed(!self.capacity.is_available());
                    let slot = queued
                        .take()
                        .and_then(QueuedSlot::accept)
                        .or_else(|| self.slots.try_acquire(credentials.uid));
                    match self.admit(home, &credentials) {
                        Err(refusal) => send(&mut link, &ExecReply::Refused(refusal))?,
                        Ok(()) => match slot {
                            None => send(&mut link, &ExecReply::NoSlot)?,
                            Some(slot) => self.run(&mut link, (home, &shared), &task, &credentials, slot)?,
                        },
                    }
                }
                Some(ExecRequest::WaitForSlot { uid, usage }) => {
                    let waiting = self.slots.enqueue(uid, usage);
                    while !waiting.wait_for_offer(QUEUE_CHECK_INTERVAL) {
                        self.slots.set_closed(!self.capacity.is_available());
                        // A home that does not wait any more closes the connection.
                        let Some(frame) = link.receive()? else { continue };
                        match (frame.kind, tern_wire::decode(&frame.payload)) {
                            (kind::EXEC_REQUEST, Ok(ExecRequest::UpdateUsage(usage))) => {
                                self.slots.update_usage(uid, usage);
                            }
                            _ => bail!("it sent another request while it waits"),
                        }
                    }
                    queued = Some(waiting);
                    send(&mut link, &ExecReply::SlotOffered)?;
                }
                Some(ExecRequest::UpdateUsage(_)) => {}
                Some(ExecRequest::Hello { .. }) => bail!("it sent a second handshake"),
                None => return Ok(()),
            }
        }
    }

    /// The identity of another node's user on this node. As MFS does for files, drops root's groups
    /// if root is squashed.
    fn squash_root_groups(&self, credentials: Credentials) -> Credentials {
        // Root itself is kept here, and refused in `admit`, with a message.
        if credentials.uid != 0 && self.config.file.mfs_squash_root.unwrap_or(false) {
            return tern_node::squash_root(credentials);
        }
        credentials
    }

    /// Whether this node runs a command of this user from that home.
    fn admit(&self, home: NodeId, credentials: &Credentials) -> Result<(), Refusal> {
        let me = self.node;
        let unavailable = |message: String| Refusal::new(RefusalKind::Unavailable, message);
        if !self.config.guests || tern_node::read_settings(&self.config.run_dir).block {
            let hint = "mosctl noblock, on that node, or guests = true in its ternd.toml";
            return Err(unavailable(format!("node {me} takes no work of other nodes")).hint(hint));
        }
        if !Map::read(&self.config.map).is_ok_and(|map| map.contains(home)) {
            return Err(unavailable(format!("node {home} is not in node {me}'s map")).hint("tern status"));
        }
        if !rustix::process::geteuid().is_root() && rustix::process::geteuid().as_raw() != credentials.uid {
            let message = format!("node {me} runs as a plain user, and runs that user's commands only");
            return Err(Refusal::new(RefusalKind::NotAllowed, message));
        }
        if credentials.uid == 0 && self.config.file.mfs_squash_root.unwrap_or(false) {
            let message = format!("root of another node is nobody on node {me}");
            return Err(
                Refusal::new(RefusalKind::NotAllowed, message).hint("mfs_squash_root in its ternd.toml")
            );
        }
        Ok(())
    }

    fn run(
        &self,
        link: &mut Link,
        (home, shared): (NodeId, &[SharedDirId]),
        task: &Task,
        credentials: &Credentials,
        slot: Slot,
    ) -> Result<()> {
        let container = self.containers.get(home, || self.shared.common_with(shared));
        let started = container.and_then(|container| Job::start(task, credentials, container));
        let mut job = match started {
            Ok(job) => job,
            Err(error) => {
                tracing::warn!(%home, "a command cannot be started: {error:#}");
                let message = format!("node {} cannot run it: {error:#}", self.node);
                return send(link, &ExecReply::Refused(Refusal::new(RefusalKind::Unavailable, message)));
            }
        };
        let entry = self.jobs.add(task, credentials.uid, Some(home));
        entry.set_running(self.node);
        let reply = job.run(link, &HomePeer(self.node))?;
        drop(entry);
        // The slot must be free before home receives the reply and asks for one for its next
        // command.
        drop(slot);
        send(link, &reply)
    }
}

/// The protocol towards the home node of a command. Holds the number of this node.
pub(crate) struct HomePeer(pub(crate) NodeId);

impl PeerProtocol for HomePeer {
    fn encode_started(&self) -> Result<(u8, Vec<u8>)> {
        Ok((kind::EXEC_REPLY, tern_wire::encode(&ExecReply::Started(self.0))?))
    }

    fn decode_signal(&self, payload: &[u8]) -> Result<Signal> {
        Ok(tern_wire::decode(payload)?)
    }
}

/// The next request; `None` if the home half has closed the connection, or was silent for
/// `timeout`.
fn receive(link: &mut Link, timeout: Duration) -> Result<Option<ExecRequest>> {
    loop {
        let frame = match link.recv(Instant::now() + timeout) {
            Err(LinkError::Closed | LinkError::Timeout) => return Ok(None),
            frame => frame?,
        };
        match frame.kind {
            kind::EXEC_REQUEST => return Ok(Some(tern_wire::decode(&frame.payload)?)),
            // Frames that were in flight when the command ended.
            kind::DATA | kind::END | kind::CREDIT | kind::SIGNAL | kind::WINDOW | kind::HEARTBEAT => {}
            other => bail!("a frame of kind {other} instead of a request"),
        }
    }
}

fn send(link: &mut Link, reply: &ExecReply) -> Result<()> {
    let bytes = tern_wire::encode(reply)?;
    Ok(link.send(kind::EXEC_REPLY, 0, &[&bytes], Instant::now() + SEND_TIMEOUT)?)
}
