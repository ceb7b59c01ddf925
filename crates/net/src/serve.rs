//! The server of one node: requests of its shims, and of the tern-nets of other nodes. Each has a
//! thread, within limits, since each may wait for another node.

use crate::guest::Guests;
use crate::home::Home;
use crate::link::{self, HomeLinks};
use crate::message::{NetReply, NetRequest, VERSION};
use crate::packets::Packets;
use anyhow::{Context, Result, bail, ensure};
use std::io::{ErrorKind, Read};
use std::net::{IpAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tern_control::control_socket::{self, ControlSocket, PendingRequest, not_held};
use tern_control::shim::{ShimReply, ShimRequest};
use tern_control::{NetworkPath, PathRow, Refusal, RefusalKind};
use tern_ids::NodeId;
use tern_node::Config;
use tern_node::map::Map;
use tern_wire::{Identity, Link, LinkError, ServerTls};

/// Name of the table of rules.
const TABLE: &str = "tern";

/// Limit for a handshake, and for sending a reply.
const IO_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a link may be idle.
const IDLE_TIMEOUT: Duration = Duration::from_secs(150);

/// Limit for examining the paths to all nodes, for a list.
const PATHS_TIMEOUT: Duration = Duration::from_secs(6);

/// Maximum number of threads that serve requests: one for each connection that is offered or taken,
/// and one for each link.
const MAX_THREADS: usize = 4096;

/// Bytes of stack of such a thread.
const STACK_SIZE: usize = 256 << 10;

/// Interval at which moves that were not continued are looked for.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(1);

/// The server.
#[derive(Debug)]
struct Server {
    node: NodeId,
    home: Home,
    guests: Guests<HomeLinks>,
    tls: ServerTls,
    map: PathBuf,
    threads: AtomicUsize,
}

/// Serves for ever.
///
/// # Errors
/// If this node lacks a privilege or the kernel a feature.
pub fn run(config: &Config, control: &ControlSocket, is_ready: impl FnOnce()) -> Result<()> {
    let identity = Identity::load(&config.config_dir).context("this node has no usable identity")?;
    tern_node::follow_map(&config.map, &identity).context("the map is not usable")?;
    let packets = Arc::new(Packets::open(TABLE).context("this node cannot move connections")?);
    let server = Arc::new(Server {
        node: identity.node(),
        home: Home::new(packets.clone()),
        tls: identity.cluster_server()?,
        guests: Guests::new(HomeLinks::new(config, identity), packets),
        map: config.map.clone(),
        threads: AtomicUsize::new(0),
    });
    is_ready();
    let mut expired_at = Instant::now();
    loop {
        control.wait(&[], EXPIRY_INTERVAL)?;
        while let Some(caller) = control.accept() {
            server.start(caller);
        }
        if expired_at.elapsed() >= EXPIRY_INTERVAL {
            expired_at = Instant::now();
            server.home.expire();
        }
    }
}

impl Server {
    /// Serves a request in a thread of its own.
    fn start(self: &Arc<Self>, caller: PendingRequest) {
        if self.threads.load(Ordering::Acquire) >= MAX_THREADS {
            return caller.reply(&refusal("tern-net serves too many connections"));
        }
        self.threads.fetch_add(1, Ordering::AcqRel);
        let guard = ThreadGuard(self.clone());
        let serve = move || guard.0.serve(caller);
        let thread = std::thread::Builder::new().name("request".into()).stack_size(STACK_SIZE).spawn(serve);
        if let Err(error) = thread {
            tracing::warn!(%error, "cannot start a thread for a request");
        }
    }

    fn serve(&self, caller: PendingRequest) {
        match *caller.request() {
            ShimRequest::Connection => {
                if let Some(socket) = caller.receive_connection()
                    && let Err(error) = self.serve_node(socket)
                {
                    tracing::info!("a link has ended: {error:#}");
                }
            }
            ShimRequest::OfferConnection { token, node } => {
                let offered = caller
                    .receive_descriptor()
                    .map_err(anyhow::Error::from)
                    .and_then(|socket| self.home.offer(token, node, socket));
                match offered {
                    Ok(()) => {
                        let shim = caller.reply_and_keep(&ShimReply::Done);
                        shim.as_ref().into_iter().for_each(await_close);
                        self.home.withdraw(token);
                        // The shim may learn only now that this program has no descriptor of the
                        // socket any more.
                        drop(shim);
                    }
                    Err(error) => caller.reply(&refusal(&format!("{error:#}"))),
                }
            }
            ShimRequest::TakeConnection { home, token } => {
                let taken = self.address(home).and_then(|address| self.guests.take(home, address, token));
                match taken {
                    Ok((socket, number)) => {
                        match caller.reply_with_fd(socket.as_fd()) {
                            Ok(shim) => {
                                // This descriptor would keep the connection open after its process has
                                // ended.
                                drop(socket);
                                await_close(&shim);
                            }
                            Err(_gone) => {
                                let returned = self.guests.give_back(home, token, &socket);
                                tracing::info!(?returned, "a connection was taken in vain");
                            }
                        }
                        self.guests.release(home, token, number);
                    }
                    Err(error) => caller.reply(&refusal(&format!("{error:#}"))),
                }
            }
            ShimRequest::ReturnConnection { home, token } => {
                let returned = caller
                    .receive_descriptor()
                    .map_err(anyhow::Error::from)
                    .and_then(|socket| self.guests.give_back(home, token, &socket));
                match returned {
                    Ok(()) => caller.reply(&ShimReply::Done),
                    Err(error) => caller.reply(&refusal(&format!("{error:#}"))),
                }
            }
            ShimRequest::Paths => {
                let reply = self.paths().map_or_else(|e| refusal(&format!("{e:#}")), ShimReply::Paths);
                caller.reply(&reply);
            }
            ShimRequest::CreateReadinessFiles => match tern_readiness::mount() {
                Ok((device, root)) => {
                    let sent = caller.reply_with_fd(device.as_fd());
                    let _gone = sent.and_then(|shim| control_socket::send_fd(&shim, root.as_fd()));
                }
                Err(error) => caller.reply(&refusal(&format!("cannot create readiness files: {error}"))),
            },
            _ => caller.reply(&not_held()),
        }
    }

    /// The paths to all other nodes. They are examined at the same time.
    fn paths(&self) -> Result<Vec<PathRow>> {
        let map = Map::read(&self.map)?;
        let others = map.nodes().into_iter().filter(|node| *node != self.node);
        let others: Vec<_> = others.map(|home| (home, self.address(home))).collect();
        for (home, address) in &others {
            if let Ok(address) = address {
                self.guests.begin_examination(*home, *address);
            }
        }
        let until = Instant::now() + PATHS_TIMEOUT;
        let row = |(home, address): (NodeId, Result<IpAddr>)| {
            let limit = until.saturating_duration_since(Instant::now());
            let path = match address.and_then(|address| self.guests.is_direct(home, address, limit)) {
                Ok(true) => NetworkPath::Direct,
                Ok(false) => NetworkPath::Tunnel,
                Err(error) => NetworkPath::Unknown(format!("{error:#}")),
            };
            PathRow { home, path, in_tunnel: self.guests.count_in_tunnel(home) }
        };
        Ok(others.into_iter().map(row).collect())
    }

    /// The address at which this node reaches another one.
    fn address(&self, node: NodeId) -> Result<IpAddr> {
        let address = Map::read(&self.map)?.address(node)?;
        let resolved = address.to_socket_addrs()?.next();
        Ok(resolved.with_context(|| format!("{address} has no address"))?.ip())
    }

    /// Serves the tern-net of a node with guests of this one.
    fn serve_node(&self, socket: TcpStream) -> Result<()> {
        let mut link = Link::accept(socket, &self.tls, Instant::now() + IO_TIMEOUT)?;
        let node = link.peer_node().context("the peer is not a node")?;
        let address = link.peer_address()?.ip().to_canonical();
        let begin = link::receive(&mut link, IO_TIMEOUT)?;
        let NetRequest::Begin { version } = begin else { bail!("the first request is not Begin") };
        let reply = if version != VERSION {
            NetReply::Refused(format!("home uses version {VERSION} of this protocol, the node {version}"))
        } else if !Map::read(&self.map).is_ok_and(|map| map.contains(node)) {
            NetReply::Refused(format!("node {node} is not in home's map"))
        } else {
            NetReply::Done
        };
        link::send(&mut link, &reply, IO_TIMEOUT)?;
        ensure!(reply == NetReply::Done, "node {node} was refused");
        loop {
            let request = match link::receive(&mut link, IDLE_TIMEOUT) {
                Ok(request) => request,
                Err(error) => match error.downcast_ref() {
                    Some(LinkError::Closed | LinkError::Timeout) => return Ok(()),
                    _ => return Err(error),
                },
            };
            if let NetRequest::Take(_) = request {
                // If the node has given up this request meanwhile, the process may be using the
                // connection here.
                ensure!(matches!(link.receive(), Ok(None)), "the node has given up its request");
            }
            if request == NetRequest::Tunnel {
                return self.home.serve_tunnel(node, &mut link);
            }
            let reply = self.home.handle(node, address, request);
            link::send(&mut link, &reply, IO_TIMEOUT)?;
        }
    }
}

/// Counts a thread until it has ended, or has failed to start.
struct ThreadGuard(Arc<Server>);

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        self.0.threads.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Waits until the other end closes this socket.
fn await_close(mut socket: &UnixStream) {
    let _blocking = socket.set_read_timeout(None);
    while socket.read(&mut [0]).map_or_else(|e| e.kind() == ErrorKind::Interrupted, |read| read > 0) {}
}

fn refusal(reason: &str) -> ShimReply {
    ShimReply::Refused(Refusal::new(RefusalKind::NotFound, reason))
}
