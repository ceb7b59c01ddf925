//! The TCP port. The first bytes of each connection, the preamble, are not encrypted. They name the
//! component that the connection is for, and that component authenticates the peer.

use crate::cluster::admission;
use crate::node::Node;
use crate::peer::connection_limit::ConnectionLimit;
use crate::peer::strangers::{Place, Unauthenticated};
use crate::peer::{client, server};
use crate::programs::HelperProgram;
use crate::shim;
use anyhow::{Context, Result};
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tern_wire::limits::{HANDSHAKE_TIMEOUT, PREAMBLE_LEN};
use tern_wire::{Link, LinkError, Preamble};

/// Maximum number of connections of members, in total and of one node.
const MAX_MEMBER_CONNECTIONS: (usize, usize) = (512, 64);

/// The bound port.
#[derive(Debug)]
pub(crate) struct Listener {
    listener: TcpListener,
}

struct Acceptor {
    node: Arc<Node>,
    unauthenticated: Unauthenticated,
    members: Arc<ConnectionLimit<u16>>,
}

impl Listener {
    /// Binds the node's port on all addresses. If the node's address in the map is a loopback
    /// address, binds the port on that address only.
    pub(crate) fn bind(node: &Node) -> Result<Self> {
        let map = node.map();
        let port = node.config.file.port.or_else(|| map.port(node.me())).unwrap_or(crate::cluster::map::PORT);
        let own = map.host(node.me()).and_then(|host| host.parse::<IpAddr>().ok());
        let addresses = match own.filter(IpAddr::is_loopback) {
            Some(loopback) => vec![loopback],
            // The first address accepts IPv4 too, if the machine has IPv6.
            None => vec![Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()],
        };
        let mut last = None;
        for address in addresses {
            match TcpListener::bind((address, port)) {
                Ok(listener) => return Ok(Self { listener }),
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                    anyhow::bail!(
                        "TCP port {port} is taken, perhaps by another ternd; port in ternd.toml names another one"
                    );
                }
                Err(e) => last = Some(e),
            }
        }
        Err(last.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into()))
            .with_context(|| format!("cannot listen on TCP port {port}"))
    }

    /// The bound address.
    pub(crate) fn address(&self) -> Result<SocketAddr> {
        Ok(self.listener.local_addr()?)
    }

    /// Accepts connections; never returns.
    pub(crate) fn run(self, node: Arc<Node>) -> ! {
        let acceptor = Arc::new(Acceptor {
            node,
            unauthenticated: Unauthenticated::new(),
            members: ConnectionLimit::new(MAX_MEMBER_CONNECTIONS.0, MAX_MEMBER_CONNECTIONS.1),
        });
        loop {
            match self.listener.accept() {
                Ok((socket, from)) => acceptor.admit(socket, from.ip()),
                Err(error) => {
                    // Usually out of descriptors, until other connections close.
                    tracing::warn!(%error, "cannot accept a connection");
                    thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }
}

impl Acceptor {
    fn admit(self: &Arc<Self>, socket: TcpStream, from: IpAddr) {
        let Some(place) = self.unauthenticated.place(&self.node, from) else {
            if let Some(others) = self.unauthenticated.closed.take() {
                tracing::warn!(%from, others, "too many connections at once; one was closed");
            }
            return;
        };
        let acceptor = self.clone();
        let serve_connection = move || {
            if let Err(error) = acceptor.dispatch(socket, place)
                && let Some(others) = acceptor.unauthenticated.failed.take()
            {
                tracing::info!(%from, others, %error, "a connection was refused");
            }
        };
        if let Err(error) = thread::Builder::new().name("peer".into()).spawn(serve_connection) {
            tracing::warn!(%error, "cannot start a thread for a connection");
        }
    }

    fn dispatch(&self, mut socket: TcpStream, place: Place) -> Result<()> {
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        let config = &self.node.config;
        match read_preamble(&mut socket, place.preamble_deadline())? {
            Preamble::Node => {
                let accepted = Link::accept(socket, &self.node.member_tls, deadline);
                if matches!(accepted, Err(LinkError::NotInMap(_))) {
                    client::fetch_map_for_stranger(&self.node);
                }
                let mut link = accepted?;
                let peer = link.peer_member().context("the peer's certificate is not that of a node")?;
                self.unauthenticated.authenticated(place, peer.0);
                let _member =
                    self.members.acquire(peer.0.0).context("too many connections of that node at once")?;
                server::serve(&self.node, &mut link, peer)?;
            }
            Preamble::Join => {
                let tls = self.node.join_tls.as_ref().context("this node does not admit machines")?;
                let mut link = Link::accept(socket, tls, deadline)?;
                // It still counts as unauthenticated: it has not shown a token.
                admission::serve_join(&self.node, &mut link)?;
                match link.finish(Instant::now() + HANDSHAKE_TIMEOUT) {
                    Ok(()) | Err(LinkError::Timeout | LinkError::Closed) => {}
                    Err(e) => return Err(e.into()),
                }
            }
            Preamble::Shim(shim) => {
                socket.set_read_timeout(None)?;
                let handed = shim::pass_connection(&self.node.config.run_dir, shim, &socket);
                handed.with_context(|| format!("shim {shim} did not accept the connection"))?;
                self.unauthenticated.passed_on(place);
            }
            Preamble::Files => self.pass_on(&HelperProgram::file_server(config), &socket, place)?,
            Preamble::Exec => self.pass_on(&HelperProgram::command_server(config), &socket, place)?,
            Preamble::Net => {
                anyhow::ensure!(
                    config.file.connections.unwrap_or(false),
                    "connections do not move on this node (connections = true in its ternd.toml)"
                );
                self.pass_on(&HelperProgram::connection_mover(config), &socket, place)?;
            }
        }
        Ok(())
    }

    /// Passes a connection on to a program of this node. A stranger does not start it.
    fn pass_on(&self, program: &HelperProgram<'_>, socket: &TcpStream, place: Place) -> Result<()> {
        socket.set_read_timeout(None)?;
        let passed =
            if place.is_stranger { program.pass_if_running(socket) } else { program.pass_connection(socket) };
        passed.context("the program for this kind of connection did not accept it")?;
        self.unauthenticated.passed_on(place);
        Ok(())
    }
}

/// Reads exactly the preamble. The bytes that follow belong to the component.
fn read_preamble(socket: &mut TcpStream, deadline: Instant) -> Result<Preamble> {
    let mut bytes = [0; PREAMBLE_LEN];
    let mut have = 0;
    while have < PREAMBLE_LEN {
        let left = deadline.saturating_duration_since(Instant::now());
        anyhow::ensure!(left > Duration::ZERO, "no preamble in time");
        socket.set_read_timeout(Some(left))?;
        match socket.read(&mut bytes[have..]) {
            Ok(0) => anyhow::bail!("closed before the preamble was complete"),
            Ok(count) => have += count,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e.into()),
        }
        // Checked after each piece, so that a peer with another protocol is refused at once.
        anyhow::ensure!(
            bytes[..have.min(4)] == b"TERN"[..have.min(4)],
            "the peer does not use the Tern protocol"
        );
    }
    Ok(Preamble::from_bytes(&bytes)?)
}
