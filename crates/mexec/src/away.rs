//! The half that runs commands of other nodes, for their users.
//!
//! ```text
//!  ternd ──socket──▶ door ──▶ one thread a connection: begin, and then command after command
//!                                ├▶ slots   whether there is room, and whose turn it is
//!                                ├▶ owner   whether who owns the node leaves any
//!                                ├▶ rooms   what the commands of its home see
//!                                └▶ job     streams, signals and the end of one command
//! ```

pub(crate) mod job;
mod owner;
pub(crate) mod rooms;
mod slots;

use crate::board::Board;
use crate::shared::Shared;
use crate::words::{Ask, Said, Signal, VERSION, Who, kind};
use anyhow::{Context, Result, bail};
use job::{Dialect, Job};
use owner::Owner;
use rooms::Rooms;
use slots::{Claim, Slot, Slots};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_control::shared::SharedRoot;
use tern_control::{Refusal, RefusalKind};
use tern_ids::NodeId;
use tern_node::Config;
use tern_node::map::Map;
use tern_wire::{Identity, Link, LinkError, ServerTls};

/// How long a handshake may take, and a word to leave.
const SOON: Duration = Duration::from_secs(10);

/// How long a connection that runs nothing is kept: longer than the other half keeps it.
const IDLE: Duration = Duration::from_secs(300);

/// How often who waits for room looks whether he is still waited for.
const LOOK: Duration = Duration::from_millis(100);

/// The away half of a node.
#[derive(Debug)]
pub(crate) struct Away {
    node: NodeId,
    config: Config,
    tls: ServerTls,
    rooms: Rooms,
    slots: Arc<Slots>,
    owner: Owner,
    shared: Shared,
    board: Arc<Board>,
}

impl Away {
    /// That of this node.
    pub(crate) fn new(config: Config, identity: &Identity, board: Arc<Board>) -> Result<Self> {
        let (jobs, user_jobs) = (config.file.mexec_jobs, config.file.mexec_user_jobs);
        let slots = Arc::new(Slots::new(jobs, user_jobs, config.guest_cpus));
        Ok(Self {
            node: identity.node(),
            tls: identity.cluster_server()?,
            rooms: Rooms::new(config.clone()),
            slots,
            owner: Owner::new(&config),
            shared: Shared::new(&config),
            board,
            config,
        })
    }

    /// Ends what is not used any more. To be called now and then.
    pub(crate) fn tidy(&self) {
        self.rooms.tidy();
    }

    /// One connection, from its handshake to its end.
    pub(crate) fn serve(&self, socket: TcpStream) -> Result<()> {
        let mut link = Link::accept(socket, &self.tls, Instant::now() + SOON)?;
        let home = link.peer_node().context("the peer is no node")?;
        let shared = match ask(&mut link, SOON)? {
            Some(Ask::Begin { version: VERSION, shared }) => shared,
            Some(Ask::Begin { version, .. }) => {
                let said =
                    format!("node {} speaks version {VERSION} of mexec, the other {version}", self.node);
                return say(&mut link, &Said::Refused(Refusal::new(RefusalKind::Unsupported, said)));
            }
            _ => bail!("it does not begin"),
        };
        say(&mut link, &Said::Begun)?;
        let mut claim = None;
        loop {
            match ask(&mut link, IDLE)? {
                Some(Ask::Run(task, who)) => {
                    let who = self.as_here(who);
                    self.slots.close(!self.owner.spares());
                    let turn = claim.take().and_then(Claim::slot).or_else(|| self.slots.take(who.uid));
                    match self.admit(home, &who) {
                        Err(refusal) => say(&mut link, &Said::Refused(refusal))?,
                        Ok(()) => match turn {
                            None => say(&mut link, &Said::Full)?,
                            Some(slot) => self.run(&mut link, (home, &shared), &task, &who, slot)?,
                        },
                    }
                }
                Some(Ask::Wait { uid, has }) => {
                    let waiting = self.slots.wait(uid, has);
                    while !waiting.has_come(LOOK) {
                        self.slots.close(!self.owner.spares());
                        // Who gives up closes the connection.
                        let Some(frame) = link.receive()? else { continue };
                        match (frame.kind, tern_wire::decode(&frame.payload)) {
                            (kind::ASK, Ok(Ask::Has(has))) => self.slots.hear(uid, has),
                            _ => bail!("it says something else while it waits"),
                        }
                    }
                    claim = Some(waiting);
                    say(&mut link, &Said::Room)?;
                }
                Some(Ask::Has(_)) => {}
                Some(Ask::Begin { .. }) => bail!("it begins twice"),
                None => return Ok(()),
            }
        }
    }

    /// Who somebody of another node is here: as with files, nobody has root's group if nobody is root.
    fn as_here(&self, who: Who) -> Who {
        // That root himself runs nothing is said to him.
        if who.uid != 0 && self.config.file.mfs_squash_root.unwrap_or(false) {
            let (uid, gid, groups) = tern_node::without_root((who.uid, who.gid, who.groups));
            return Who { uid, gid, groups };
        }
        who
    }

    /// Whether a command of this user from that node is run here.
    fn admit(&self, home: NodeId, who: &Who) -> Result<(), Refusal> {
        let me = self.node;
        let refused = |said: String| Refusal::new(RefusalKind::Unavailable, said);
        if !self.config.guests || tern_node::settings(&self.config.run_dir).block {
            let hint = "mosctl noblock, on that node, or guests = true in its ternd.toml";
            return Err(refused(format!("node {me} takes no work of other nodes")).hint(hint));
        }
        if !Map::read(&self.config.map).is_ok_and(|map| map.contains(home)) {
            return Err(refused(format!("node {home} is not in node {me}'s map")).hint("tern status"));
        }
        if !rustix::process::geteuid().is_root() && rustix::process::geteuid().as_raw() != who.uid {
            let said = format!("node {me} is a plain user's, and runs his commands only");
            return Err(Refusal::new(RefusalKind::NotAllowed, said));
        }
        if who.uid == 0 && self.config.file.mfs_squash_root.unwrap_or(false) {
            let said = format!("root of another node is nobody on node {me}");
            return Err(Refusal::new(RefusalKind::NotAllowed, said).hint("mfs_squash_root in its ternd.toml"));
        }
        Ok(())
    }

    fn run(
        &self,
        link: &mut Link,
        (home, shared): (NodeId, &[SharedRoot]),
        task: &crate::words::Task,
        who: &Who,
        slot: Slot,
    ) -> Result<()> {
        let room = self.rooms.of(home, || self.shared.same(shared));
        let begun = room.and_then(|room| Job::begin(task, who, room));
        let mut job = match begun {
            Ok(job) => job,
            Err(error) => {
                tracing::warn!(%home, "a command cannot be begun: {error:#}");
                let said = format!("node {} cannot run it: {error:#}", self.node);
                return say(link, &Said::Refused(Refusal::new(RefusalKind::Unavailable, said)));
            }
        };
        let entry = self.board.add(task, who.uid, Some(home));
        entry.runs(self.node);
        let said = job.attend(link, &ToHome(self.node))?;
        drop(entry);
        // Before its home hears of the end, and asks for room for the next.
        drop(slot);
        say(link, &said)
    }
}

/// How a command's home is spoken to from this node.
pub(crate) struct ToHome(pub(crate) NodeId);

impl Dialect for ToHome {
    fn started(&self) -> Result<(u8, Vec<u8>)> {
        Ok((kind::SAID, tern_wire::encode(&Said::Started(self.0))?))
    }

    fn signal(&self, said: &[u8]) -> Result<Signal> {
        Ok(tern_wire::decode(said)?)
    }
}

/// The next ask; none if the other half has ended the connection, or was silent for so long.
fn ask(link: &mut Link, patience: Duration) -> Result<Option<Ask>> {
    loop {
        let frame = match link.recv(Instant::now() + patience) {
            Err(LinkError::Closed | LinkError::Timeout) => return Ok(None),
            frame => frame?,
        };
        match frame.kind {
            kind::ASK => return Ok(Some(tern_wire::decode(&frame.payload)?)),
            // What was under way when its command ended.
            kind::DATA | kind::END | kind::TAKEN | kind::SIGNAL | kind::WINDOW | kind::BEAT => {}
            other => bail!("a piece of kind {other} where something is asked"),
        }
    }
}

fn say(link: &mut Link, said: &Said) -> Result<()> {
    let bytes = tern_wire::encode(said)?;
    Ok(link.send(kind::SAID, 0, &[&bytes], Instant::now() + SOON)?)
}
