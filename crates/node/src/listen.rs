//! The TCP port: who connects says in clear for whom it is, and is authenticated by that one.

use crate::beside::Beside;
use crate::slots::{Slot, Slots};
use crate::state::Node;
use crate::{admit, serve, shims};
use anyhow::{Context, Result};
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{process, thread};
use tern_wire::limits::{HANDSHAKE, PREAMBLE};
use tern_wire::{Link, LinkError, Preamble};

/// Connections that have not proved anything yet, in all and from one address.
const MOST_STRANGERS: (usize, usize) = (128, 32);

/// Connections of members, in all and of one.
const MOST_MEMBERS: (usize, usize) = (512, 64);

/// The port, bound.
#[derive(Debug)]
pub(crate) struct Port {
    listener: TcpListener,
}

struct Gate {
    node: Arc<Node>,
    strangers: Arc<Slots<IpAddr>>,
    members: Arc<Slots<u16>>,
}

impl Port {
    /// Binds the node's port: on all addresses, or only on the loopback if that is the node's address.
    pub(crate) fn bind(node: &Node) -> Result<Self> {
        let map = node.map();
        let port = node.config.file.port.or_else(|| map.port(node.me())).unwrap_or(crate::map::PORT);
        let own = map.host(node.me()).and_then(|host| host.parse::<IpAddr>().ok());
        let addresses = match own.filter(IpAddr::is_loopback) {
            Some(loopback) => vec![loopback],
            // The first takes IPv4 as well, if there is IPv6 here at all.
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

    /// Serves for ever.
    pub(crate) fn run(self, node: Arc<Node>) -> ! {
        let gate = Arc::new(Gate {
            node,
            strangers: Slots::new(MOST_STRANGERS.0, MOST_STRANGERS.1),
            members: Slots::new(MOST_MEMBERS.0, MOST_MEMBERS.1),
        });
        loop {
            match self.listener.accept() {
                Ok((socket, from)) => gate.enter(socket, from.ip()),
                Err(error) => {
                    // Mostly: out of descriptors. Those that are busy will give some back.
                    tracing::warn!(%error, "cannot accept a connection");
                    thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }
}

impl Gate {
    fn enter(self: &Arc<Self>, socket: TcpStream, from: IpAddr) {
        let Some(slot) = self.strangers.take(from) else {
            tracing::warn!(%from, "too many connections at once; one was closed");
            return;
        };
        let gate = self.clone();
        let greet = move || {
            if let Err(error) = gate.greet(socket, slot) {
                tracing::info!(%from, %error, "a connection was refused");
            }
        };
        if let Err(error) = thread::Builder::new().name("peer".into()).spawn(greet) {
            tracing::warn!(%error, "no thread for a connection");
        }
    }

    fn greet(&self, mut socket: TcpStream, stranger: Slot<IpAddr>) -> Result<()> {
        let deadline = Instant::now() + HANDSHAKE;
        match preamble(&mut socket, deadline)? {
            Preamble::Node => {
                let mut link = Link::accept(socket, &self.node.members, deadline)?;
                let peer = link.peer_node().context("the peer is no node")?;
                drop(stranger);
                let _member =
                    self.members.take(peer.0).context("too many connections of that node at once")?;
                serve::serve(&self.node, &mut link, peer)?;
            }
            Preamble::Join => {
                let tls = self.node.newcomers.as_ref().context("this node admits nobody")?;
                let mut link = Link::accept(socket, tls, deadline)?;
                // It stays a stranger: it has shown no token yet.
                admit::converse(&self.node, &mut link)?;
                match link.finish(Instant::now() + HANDSHAKE) {
                    Ok(()) | Err(LinkError::Timeout | LinkError::Closed) => {}
                    Err(e) => return Err(e.into()),
                }
            }
            Preamble::Shim(shim) => {
                socket.set_read_timeout(None)?;
                let handed = shims::hand_over(&self.node.config.run_dir, shim, &socket);
                handed.with_context(|| format!("shim {shim} did not take it"))?;
            }
            Preamble::Files => {
                socket.set_read_timeout(None)?;
                let files = Beside::files(&self.node.config);
                files.hand_over(&socket).context("the server of files did not take it")?;
            }
            Preamble::Exec => {
                socket.set_read_timeout(None)?;
                let exec = Beside::exec(&self.node.config);
                exec.hand_over(&socket).context("what runs other nodes' commands did not take it")?;
            }
        }
        Ok(())
    }
}

/// Reads exactly the preamble, and not a byte more, which is the shim's to read.
fn preamble(socket: &mut TcpStream, deadline: Instant) -> Result<Preamble> {
    let mut bytes = [0; PREAMBLE];
    let mut have = 0;
    while have < PREAMBLE {
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
        // Nothing else that begins so would be read to its end.
        anyhow::ensure!(bytes[..have.min(4)] == b"TERN"[..have.min(4)], "the peer does not speak tern");
    }
    Ok(Preamble::from_bytes(&bytes)?)
}

/// Ends the daemon if a thread that must not end does.
pub(crate) fn forever(name: &'static str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let body = move || {
        let _ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        tracing::error!(name, "a thread that must not end has ended");
        process::exit(70);
    };
    thread::Builder::new().name(name.into()).spawn(body).context("cannot start a thread")?;
    Ok(())
}
