//! The half on a guest's node: connections that guests of this node have taken from their homes.
//!
//! A connection that was taken is silent here until home has committed the move: no packet of it
//! leaves its home's namespace. So it is never active in two places, whatever breaks meanwhile. If a
//! link breaks after the question that decides a move, the question is repeated. If home has not
//! answered after [`DECISION_TIMEOUT`], the connection does not continue here.

pub(crate) mod paths;

use self::paths::Paths;
use crate::link::Homes;
use crate::message::{ClientRoute, NetReply, NetRequest, Step};
use crate::packets::{Packets, ends};
use crate::path::Path;
use anyhow::{Context, Result, bail, ensure};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tern_ids::{ConnectionToken, NodeId};
use tern_redirect::{Ends, Hold, NetworkNamespace};

/// How long home is asked how a move was decided. Two such questions, and the calls in between, take
/// less time than the shim waits.
const DECISION_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval of these questions.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Interval at which the end of a closed connection is looked for.
const END_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// How long a closed connection may take to end: the kernel's limit for closing, and TIME-WAIT.
const END_TIMEOUT: Duration = Duration::from_secs(150);

/// How long packets that are in a tunnel are waited for, twice, before a connection returns. Home waits
/// for the return for 5 s.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum number of connections of guests.
const MAX_CONNECTIONS: usize = 4096;

/// The connections of this node's guests.
#[derive(Debug)]
pub struct Guests<H> {
    homes: Arc<H>,
    paths: Arc<Paths<H>>,
    packets: Arc<Packets>,
    taken: Mutex<HashMap<(NodeId, ConnectionToken), Taken>>,
}

#[derive(Debug, Clone)]
struct Taken {
    /// The number of the move.
    number: u64,
    connection: Ends,
    /// The path of its packets.
    path: Path,
    inside: Arc<NetworkNamespace>,
}

impl<H: Homes + 'static> Guests<H> {
    /// A node whose guests have no connections.
    #[must_use]
    pub fn new(homes: H, packets: Arc<Packets>) -> Self {
        let homes = Arc::new(homes);
        let paths = Arc::new(Paths::new(homes.clone(), packets.clone()));
        Self { homes, paths, packets, taken: Mutex::default() }
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<(NodeId, ConnectionToken), Taken>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a connection from a home, which this node reaches at `address`. Returns its socket, and
    /// the number of the move for [`release`](Self::release).
    ///
    /// # Errors
    /// The connection is at home then.
    pub fn take(&self, home: NodeId, address: IpAddr, token: ConnectionToken) -> Result<(OwnedFd, u64)> {
        ensure!(
            self.taken().len() < MAX_CONNECTIONS,
            "this node has {MAX_CONNECTIONS} connections of guests"
        );
        let direct = self.paths.is_direct(home, address)?;
        if !direct {
            self.paths.tunnel(home)?;
        }
        let direct = direct.then_some(address);
        let (number, captured, route) = match self.homes.call(home, &NetRequest::Take(token)) {
            Ok(NetReply::Taken(number, captured, route)) => (number, captured, route),
            Ok(NetReply::Refused(why)) => bail!(why),
            Ok(NetReply::Done) => bail!("home sent an unexpected reply"),
            // Home may have sent it. It continues there after a while in any case.
            Err(error) => {
                let _unreachable = self.homes.call(home, &NetRequest::Cancel(token));
                return Err(error);
            }
        };
        let restored = self.restore(home, direct, number, &captured, route);
        let (taken, socket) = match restored {
            Ok(restored) => restored,
            Err(error) => {
                let _continues_later = self.homes.call(home, &NetRequest::Cancel(token));
                return Err(error);
            }
        };
        let connection = taken.connection;
        let commit = Step::Commit { tunnel: matches!(taken.path, Path::Tunnel(_)) };
        if let Err(undone) = self.decide(home, &NetRequest::Step(token, number, commit)) {
            self.drop_silently(home, &taken, socket);
            if matches!(undone, Undone::Refused(_)) {
                // The program is to use it at home at once.
                let _continues_later = self.homes.call(home, &NetRequest::Cancel(token));
            }
            return Err(undone.into());
        }
        self.taken().insert((home, token), taken.clone());
        // From here on the connection is here, and is returned if it cannot be used.
        let goes_on = self
            .packets
            .answer(home, &taken.path, connection)
            .and_then(|()| Ok(taken.inside.run(|| tern_tcp::resume(&socket, &captured))??));
        match goes_on {
            Ok(()) => Ok((socket, number)),
            Err(error) => {
                if self.give_back(home, token, &socket).is_err() {
                    drop(socket);
                    self.release(home, token, number);
                }
                Err(error)
            }
        }
    }

    /// Makes the socket of a connection that home has sent. It is silent. `direct`: the address at which
    /// this node reaches home, if packets may go directly.
    fn restore(
        &self,
        home: NodeId,
        direct: Option<IpAddr>,
        number: u64,
        captured: &tern_tcp::Connection,
        route: ClientRoute,
    ) -> Result<(Taken, OwnedFd)> {
        let connection = ends(captured.peer, captured.local)?;
        let own: SocketAddr = connection.home();
        ensure!(!own.ip().is_loopback(), "connections of the loopback interface stay at home");
        let path = match direct {
            Some(address) if self.packets.answers_directly(address, connection, route)? => {
                Path::Direct(address)
            }
            _ => Path::Tunnel(self.paths.tunnel(home)?),
        };
        let inside = Arc::new(self.packets.enter(home, &path, connection, route)?);
        let restored = inside.run(|| tern_tcp::restore(captured)).map_err(anyhow::Error::from);
        match restored.and_then(|restored| Ok(restored?)) {
            Ok(socket) => Ok((Taken { number, connection, path, inside }, socket)),
            Err(error) => {
                self.packets.leave(home, connection);
                Err(error)
            }
        }
    }

    /// Asks home to make the step that decides where a connection is, until it answers.
    fn decide(&self, home: NodeId, request: &NetRequest) -> Result<(), Undone> {
        let until = Instant::now() + DECISION_TIMEOUT;
        loop {
            match self.homes.call(home, request) {
                Ok(NetReply::Done) => return Ok(()),
                Ok(NetReply::Refused(why)) => return Err(Undone::Refused(why)),
                Ok(NetReply::Taken(..)) => return Err(Undone::Unknown("an unexpected reply".into())),
                Err(error) if Instant::now() > until => return Err(Undone::Unknown(format!("{error:#}"))),
                Err(error) => {
                    tracing::info!(%home, "it is unknown where a connection is: {error:#}");
                    std::thread::sleep(RETRY_INTERVAL);
                }
            }
        }
    }

    /// Closes a socket whose connection continues at home. No packet of it leaves.
    fn drop_silently(&self, home: NodeId, taken: &Taken, socket: OwnedFd) {
        let closed = taken.inside.run(|| {
            let captured = tern_tcp::capture(&socket).map(drop);
            drop(socket);
            captured
        });
        if !matches!(closed, Ok(Ok(()))) {
            tracing::debug!("a restored socket was closed with a packet, which is dropped");
        }
        self.packets.leave(home, taken.connection);
    }

    /// Returns a connection to its home. The socket is of no use afterwards. Its last descriptor may
    /// be closed at any time; that sends nothing.
    ///
    /// # Errors
    /// The connection is still here. If home does not answer, it may be at home, and does not continue
    /// here.
    pub fn give_back(&self, home: NodeId, token: ConnectionToken, socket: &OwnedFd) -> Result<()> {
        let taken = self.taken().get(&(home, token)).cloned();
        let taken = taken.context("this node does not have this connection")?;
        let connection = taken.connection;
        let hold = self.packets.watch(&taken.path, connection)?;
        let step = |step| NetRequest::Step(token, taken.number, step);
        self.decide(home, &step(Step::Recall))?;
        // The packets that the client has sent before arrive here, and are captured.
        let flushed = taken.path.flush(FLUSH_TIMEOUT);
        let captured = self
            .packets
            .stop(connection)
            .and_then(|()| Ok(taken.inside.run(|| tern_tcp::capture(socket))??));
        let captured = match captured {
            Ok(captured) => {
                // In repair mode the timers of the socket would still send, and after that the kernel
                // answers for it.
                let silenced = self.packets.silence(home, connection);
                let discarded = taken.inside.run(|| tern_tcp::discard(socket, &captured));
                if !matches!((&silenced, &discarded), (Ok(()), Ok(Ok(())))) {
                    tracing::warn!(?silenced, ?discarded, "a socket that was returned may still send");
                }
                captured
            }
            Err(error) => {
                self.keep(home, &step(Step::Keep), hold, connection);
                return Err(error);
            }
        };
        // The last answers arrive at home, which lets none through any more after the return.
        let _flushed = flushed && taken.path.flush(FLUSH_TIMEOUT);
        let captured = Box::new(captured);
        if let Err(undone) = self.decide(home, &step(Step::Return(captured.clone()))) {
            if matches!(undone, Undone::Unknown(_)) {
                // It may be at home, so it must not continue here.
                return Err(undone.into());
            }
            let answers = self.packets.answer(home, &taken.path, connection);
            let restored = taken.inside.run(|| tern_tcp::restore_into(socket, &captured));
            if !matches!((&answers, &restored), (Ok(()), Ok(Ok(())))) {
                tracing::error!(?answers, ?restored, "a connection is lost: it could not be restored");
            }
            self.keep(home, &step(Step::Keep), hold, connection);
            return Err(undone.into());
        }
        self.taken().remove(&(home, token));
        if let Err(error) = self.packets.send_back(&taken.path, hold, connection) {
            tracing::debug!("late packets of a connection were dropped: {error:#}");
        }
        self.packets.leave(home, connection);
        Ok(())
    }

    /// Continues a connection here that could not be returned.
    fn keep(&self, home: NodeId, request: &NetRequest, hold: Hold, connection: Ends) {
        let kept = self.packets.go_on(home, hold, connection).and_then(|()| self.homes.call(home, request));
        if let Err(error) = kept {
            tracing::warn!("a connection may continue late: {error:#}");
        }
    }

    /// The shim of a guest does not use a connection any more. If it was not returned, its process
    /// has ended: waits until this node's kernel has closed it, and informs home. Returns after
    /// minutes at the latest.
    pub fn release(&self, home: NodeId, token: ConnectionToken, number: u64) {
        let taken = self.taken().get(&(home, token)).cloned();
        let Some(taken) = taken.filter(|taken| taken.number == number) else { return };
        let until = Instant::now() + END_TIMEOUT;
        while Instant::now() < until
            && taken.inside.run(|| is_known(taken.connection)).is_ok_and(|known| known)
        {
            std::thread::sleep(END_CHECK_INTERVAL);
        }
        self.taken().remove(&(home, token));
        self.packets.leave(home, taken.connection);
        // If home cannot be reached, it forgets the connection itself.
        let _forgotten_later = self.homes.call(home, &NetRequest::Step(token, number, Step::Gone));
    }

    /// Has a thread examine the path to a home, if that was long ago.
    pub fn begin_examination(&self, home: NodeId, address: IpAddr) {
        self.paths.begin_examination(home, address);
    }

    /// Whether the path to a home is direct. Waits up to `limit` for an examination that has begun.
    ///
    /// # Errors
    /// If it could not be examined.
    pub fn is_direct(&self, home: NodeId, address: IpAddr, limit: Duration) -> Result<bool> {
        self.paths.last_examination(home, address, limit)
    }

    /// Number of connections from this home that use a tunnel.
    #[must_use]
    pub fn count_in_tunnel(&self, home: NodeId) -> usize {
        let taken = self.taken();
        let uses = |taken: &Taken| matches!(taken.path, Path::Tunnel(_));
        taken.iter().filter(|((node, _), taken)| *node == home && uses(taken)).count()
    }

    /// Number of connections that are here.
    #[must_use]
    pub fn count(&self) -> usize {
        self.taken().len()
    }
}

/// Why a step of a move was not made.
#[derive(Debug, thiserror::Error)]
enum Undone {
    /// Home has refused it.
    #[error("{0}")]
    Refused(String),
    /// It may have been made.
    #[error("home does not answer: {0}")]
    Unknown(String),
}

/// Whether the calling thread's network namespace has a socket with these ends, in any state
/// (proc_net_tcp: addresses in the byte order of the machine, in hexadecimal).
fn is_known(connection: Ends) -> bool {
    let ports = format!(":{:04X} ", connection.home().port());
    let peer = format!(":{:04X} ", connection.client().port());
    ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"].iter().any(|table| {
        let rows = std::fs::read_to_string(table).unwrap_or_default();
        // A namespace has the sockets of one address of home, so that the ports identify it unless
        // two clients use the same. Then this one is regarded as open for longer.
        rows.lines().skip(1).any(|row| row.contains(&ports) && row.contains(&peer))
    })
}
