//! The half at home. The processes of this node have the sockets open; their connections may be on
//! other nodes.
//!
//! ```text
//!              Take             Commit
//!       Home ────────▶ Leaving ────────▶ Away
//!        ▲ ◀───Cancel───┘        ┌────────┤ ▲
//!        │                       │ Recall │ Keep
//!        └──────Return───────────┴────────▼ │
//!                                      Returning
//! ```
//!
//! A guest's node that does not go on is not waited for: after [`STEP_TIMEOUT`] a connection that is
//! leaving continues here, and one that is returning continues there. A later `Commit` is then
//! refused; the guest's node lets no packet of a connection out before its `Commit` is done. A later
//! `Return` still takes effect.

pub(crate) mod tunnels;

use self::tunnels::Tunnels;
use crate::link;
use crate::message::{NetReply, NetRequest, Step};
use crate::packets::{Packets, ends};
use crate::path::Path;
use anyhow::{Result, anyhow, bail, ensure};
use rustix::net::{getpeername, getsockname};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tern_ids::{ConnectionToken, NodeId};
use tern_redirect::Hold;
use tern_wire::Link;

/// How long a connection is held for the next step of the guest's node.
const STEP_TIMEOUT: Duration = Duration::from_secs(5);

/// Limit for sending a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// How long an offer may be on its way from the shim when the guest's node asks for it.
const OFFER_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the packets of a connection are sent on after its process has ended here: until the
/// kernel of the guest's node has closed it, at most.
const LINGER_TIMEOUT: Duration = Duration::from_secs(180);

/// Maximum number of offers.
const MAX_OFFERS: usize = 4096;

/// The sockets of this node that are offered to others.
#[derive(Debug)]
pub struct Home {
    packets: Arc<Packets>,
    tunnels: Tunnels,
    offers: Mutex<HashMap<ConnectionToken, Arc<Mutex<Offer>>>>,
    /// Signalled when an offer arrives.
    arrived: Condvar,
}

#[derive(Debug)]
struct Offer {
    /// The node that may take it.
    node: NodeId,
    socket: OwnedFd,
    place: Place,
    /// Number of moves so far.
    moves: u64,
    /// Since when its process has not had the socket open any more.
    withdrawn: Option<Instant>,
}

#[derive(Debug)]
enum Place {
    Home,
    Leaving { connection: Box<tern_tcp::Connection>, hold: Option<Hold>, since: Instant },
    Away { connection: tern_redirect::Ends, path: Path },
    Returning { connection: tern_redirect::Ends, path: Path, hold: Option<Hold>, since: Instant },
}

impl Home {
    /// A node without offers.
    #[must_use]
    pub fn new(packets: Arc<Packets>) -> Self {
        let tunnels = Tunnels::new(packets.clone());
        Self { packets, tunnels, offers: Mutex::default(), arrived: Condvar::new() }
    }

    fn offers(&self) -> MutexGuard<'_, HashMap<ConnectionToken, Arc<Mutex<Offer>>>> {
        self.offers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Offers a socket to a node.
    ///
    /// # Errors
    /// If there are too many offers, or one of this name.
    pub fn offer(&self, token: ConnectionToken, node: NodeId, socket: OwnedFd) -> Result<()> {
        let mut offers = self.offers();
        ensure!(offers.len() < MAX_OFFERS, "this node offers {MAX_OFFERS} connections already");
        ensure!(!offers.contains_key(&token), "there is an offer of this name");
        tracing::debug!(%token, %node, "a connection is offered");
        let offer = Offer { node, socket, place: Place::Home, moves: 0, withdrawn: None };
        offers.insert(token, Arc::new(Mutex::new(offer)));
        self.arrived.notify_all();
        Ok(())
    }

    /// Ends an offer: the process has closed its socket, or has ended. If the connection is on the
    /// guest's node, its packets go there until it is closed there.
    pub fn withdraw(&self, token: ConnectionToken) {
        tracing::debug!(%token, "an offer has ended");
        let Some(offer) = self.offers().get(&token).cloned() else { return };
        let mut offer = lock(&offer);
        offer.withdrawn = Some(Instant::now());
        if matches!(offer.place, Place::Leaving { .. }) {
            self.cancel(&mut offer);
        }
        if matches!(offer.place, Place::Home) {
            self.offers().remove(&token);
        }
    }

    /// Makes a link of this node, which has requested it, the link of its tunnel. Returns when it breaks
    /// or the node has another one.
    ///
    /// # Errors
    /// If it breaks, or there can be no tunnel.
    pub fn serve_tunnel(&self, node: NodeId, link: &mut Link) -> Result<()> {
        match self.tunnels.begin(node) {
            Ok(new) => {
                link::send(link, &NetReply::Done, REPLY_TIMEOUT)?;
                new.carry(link)
            }
            Err(error) => {
                link::send(link, &NetReply::Refused(format!("{error:#}")), REPLY_TIMEOUT)?;
                Err(error)
            }
        }
    }

    /// Performs a request of a guest's node, which reaches this one from `address`.
    pub fn handle(&self, from: NodeId, address: IpAddr, request: NetRequest) -> NetReply {
        let done = match request {
            NetRequest::Begin { .. } => Ok(NetReply::Done),
            NetRequest::Examine { address: own, token } => self.tunnels.examine(from, address, own, token),
            NetRequest::HasArrived { token } => self.tunnels.has_arrived(from, token),
            NetRequest::Tunnel => Err(anyhow!("this link cannot become a tunnel")),
            NetRequest::Take(token) => self.take(from, token),
            NetRequest::Cancel(token) => self.act(from, token, None, |offer| {
                self.cancel(offer);
                Ok(())
            }),
            NetRequest::Step(token, _, Step::Gone) if self.find(from, token).is_err() => Ok(NetReply::Done),
            NetRequest::Step(token, number, step) => {
                self.act(from, token, Some(number), |offer| match step {
                    Step::Commit { tunnel: false } => self.commit(offer, Path::Direct(address)),
                    Step::Commit { tunnel: true } => {
                        let tunnel = self.tunnels.get(from)?;
                        self.commit(offer, Path::Tunnel(tunnel))
                    }
                    Step::Recall => self.recall(offer),
                    Step::Return(connection) => self.take_back(offer, &connection),
                    Step::Keep => self.keep(offer),
                    Step::Gone => {
                        self.end(offer);
                        offer.withdrawn = Some(Instant::now());
                        offer.place = Place::Home;
                        Ok(())
                    }
                })
            }
        };
        done.unwrap_or_else(|error| {
            tracing::info!(node = %from, "a move of a connection was refused: {error:#}");
            NetReply::Refused(format!("{error:#}"))
        })
    }

    fn find(&self, from: NodeId, token: ConnectionToken) -> Result<Arc<Mutex<Offer>>> {
        let offer = self.offers().get(&token).cloned();
        match offer {
            Some(offer) if lock(&offer).node == from => Ok(offer),
            _ => bail!("home does not offer this connection"),
        }
    }

    /// Acts on an offer, if the move with this number is its last one.
    fn act(
        &self,
        from: NodeId,
        token: ConnectionToken,
        number: Option<u64>,
        act: impl FnOnce(&mut Offer) -> Result<()>,
    ) -> Result<NetReply> {
        let offer = self.find(from, token)?;
        let mut offer = lock(&offer);
        ensure!(number.is_none_or(|number| number == offer.moves), "a later move has begun");
        act(&mut offer)?;
        if offer.withdrawn.is_some() && matches!(offer.place, Place::Home) {
            self.offers().remove(&token);
        }
        Ok(NetReply::Done)
    }

    fn take(&self, from: NodeId, token: ConnectionToken) -> Result<NetReply> {
        let offers = self.offers();
        // The shim has sent the offer to this program and the token to the guest at the same time.
        let waits = |offers: &mut HashMap<_, _>| !offers.contains_key(&token);
        let waited = self.arrived.wait_timeout_while(offers, OFFER_TIMEOUT, waits);
        drop(waited);
        let offer = self.find(from, token)?;
        let mut offer = lock(&offer);
        match &offer.place {
            Place::Home => {}
            // The reply to an earlier request was lost.
            Place::Leaving { connection, .. } => {
                let packets = ends(connection.peer, connection.local)?;
                let route = self.packets.client_route(packets)?;
                return Ok(NetReply::Taken(offer.moves, connection.clone(), route));
            }
            _ => bail!("the connection is not at home"),
        }
        ensure!(offer.withdrawn.is_none(), "its process has ended");
        let own = SocketAddr::try_from(getsockname(&offer.socket)?)?;
        let peer = getpeername(&offer.socket)?.ok_or(rustix::io::Errno::NOTCONN)?;
        let packets = ends(SocketAddr::try_from(peer)?, own)?;
        let route = self.packets.client_route(packets)?;
        let hold = self.packets.hold(packets)?;
        match tern_tcp::capture(&offer.socket) {
            Ok(connection) => {
                // In repair mode the timers of the socket would still send.
                if let Err(error) = tern_tcp::discard(&offer.socket, &connection) {
                    tracing::warn!(%error, "the socket of a moved connection keeps no port");
                }
                let connection = Box::new(connection);
                let (hold, since) = (Some(hold), Instant::now());
                offer.place = Place::Leaving { connection: connection.clone(), hold, since };
                offer.moves += 1;
                Ok(NetReply::Taken(offer.moves, connection, route))
            }
            Err(error) => {
                self.packets.keep_local(Some(hold), packets, None)?;
                Err(error.into())
            }
        }
    }

    fn commit(&self, offer: &mut Offer, path: Path) -> Result<()> {
        let place = &mut offer.place;
        match place {
            Place::Away { .. } => Ok(()),
            Place::Leaving { connection, hold, .. } => {
                let packets = ends(connection.peer, connection.local)?;
                // If the rules cannot be changed, the connection is still here.
                self.packets.forward(hold.take(), packets, &path)?;
                *place = Place::Away { connection: packets, path };
                Ok(())
            }
            Place::Home | Place::Returning { .. } => bail!("the connection has continued at home"),
        }
    }

    /// Continues a connection that has not left yet.
    fn cancel(&self, offer: &mut Offer) {
        let Place::Leaving { connection, hold, .. } = &mut offer.place else { return };
        if let Err(error) = tern_tcp::restore_into(&offer.socket, connection) {
            tracing::error!(%error, "a connection is lost: it could not be restored");
        }
        let kept = ends(connection.peer, connection.local)
            .and_then(|packets| self.packets.keep_local(hold.take(), packets, None));
        if let Err(error) = kept {
            tracing::error!("the packets of a connection are lost: {error:#}");
        }
        offer.place = Place::Home;
    }

    fn recall(&self, offer: &mut Offer) -> Result<()> {
        match &offer.place {
            Place::Returning { .. } => Ok(()),
            Place::Away { connection, path } => {
                let (connection, path) = (*connection, path.clone());
                let (hold, since) = (Some(self.packets.hold(connection)?), Instant::now());
                offer.place = Place::Returning { connection, path, hold, since };
                Ok(())
            }
            Place::Home | Place::Leaving { .. } => bail!("the connection is at home"),
        }
    }

    fn take_back(&self, offer: &mut Offer, returned: &tern_tcp::Connection) -> Result<()> {
        let Offer { socket, place, .. } = offer;
        let (connection, path, hold) = match place {
            // The reply to an earlier request was lost.
            Place::Home => return Ok(()),
            Place::Away { connection, path } => (*connection, path.clone(), None),
            Place::Returning { connection, path, hold, .. } => (*connection, path.clone(), hold.take()),
            Place::Leaving { .. } => bail!("the connection is at home"),
        };
        ensure!(ends(returned.peer, returned.local)? == connection, "another connection was returned");
        let restored = tern_tcp::restore_into(socket, returned);
        if let Err(error) = restored {
            if let Place::Returning { hold: kept, .. } = place {
                *kept = hold;
            }
            return Err(error.into());
        }
        *place = Place::Home;
        if let Err(error) = self.packets.keep_local(hold, connection, Some(&path)) {
            tracing::error!("the packets of a connection are lost: {error:#}");
        }
        Ok(())
    }

    fn keep(&self, offer: &mut Offer) -> Result<()> {
        match &mut offer.place {
            Place::Away { .. } => Ok(()),
            Place::Returning { connection, path, hold, .. } => {
                let (connection, path) = (*connection, path.clone());
                self.packets.forward(hold.take(), connection, &path)?;
                offer.place = Place::Away { connection, path };
                Ok(())
            }
            Place::Home | Place::Leaving { .. } => bail!("the connection is at home"),
        }
    }

    /// Removes the rules of an offer that ends.
    fn end(&self, offer: &Offer) {
        if let Place::Away { connection, path } | Place::Returning { connection, path, .. } = &offer.place
            && let Err(error) = self.packets.keep_local(None, *connection, Some(path))
        {
            tracing::warn!("the rules of a connection could not be removed: {error:#}");
        }
    }

    /// Continues moves that the guest's node does not continue, and forgets connections whose process
    /// has ended long ago. The server calls it each second.
    pub fn expire(&self) {
        self.tunnels.expire();
        let all: Vec<_> = self.offers().iter().map(|(token, offer)| (*token, offer.clone())).collect();
        for (token, offer) in all {
            let mut offer = lock(&offer);
            match offer.place {
                Place::Leaving { since, .. } if since.elapsed() > STEP_TIMEOUT => {
                    tracing::warn!(node = %offer.node, "a node does not continue the move of a connection");
                    self.cancel(&mut offer);
                }
                Place::Returning { since, .. } if since.elapsed() > STEP_TIMEOUT => {
                    tracing::warn!(node = %offer.node, "a node does not return a connection");
                    if let Err(error) = self.keep(&mut offer) {
                        tracing::error!("the packets of a connection are lost: {error:#}");
                    }
                }
                _ => {}
            }
            if offer.withdrawn.is_some_and(|since| since.elapsed() > LINGER_TIMEOUT) {
                self.end(&offer);
                self.offers().remove(&token);
            }
        }
    }

    /// Number of offers, for tests and the log.
    #[must_use]
    pub fn count(&self) -> usize {
        self.offers().len()
    }
}

fn lock(offer: &Mutex<Offer>) -> MutexGuard<'_, Offer> {
    offer.lock().unwrap_or_else(PoisonError::into_inner)
}
