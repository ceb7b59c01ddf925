//! The node's rules for the packets of moved connections, shared by both halves.

use crate::message::ClientRoute;
use crate::path::{Examination, Path};
use anyhow::{Context, Result, bail, ensure};
use rustix::net::netdevice::index_to_name;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tern_ids::NodeId;
use tern_redirect::{
    Change, Ends, Hold, Injector, Namespace, NetworkInterface, NetworkNamespace, PathProbe, ProbeToken,
    RouteLookup, Table, Tunnel, TunnelEnd, Way,
};

/// Bytes that are held of one connection while it moves. The client sends what is more again.
const MAX_HELD: usize = 4 << 20;

/// The rules. Used by threads of this node's network namespace.
#[derive(Debug)]
pub struct Packets(Mutex<Rules>);

#[derive(Debug)]
struct Rules {
    table: Table,
    injector: Injector,
    /// The interfaces whose packets the table handles.
    attached: BTreeSet<u32>,
    /// The namespace of each home, by its address.
    namespaces: BTreeMap<(NodeId, IpAddr), HomeNamespace>,
}

#[derive(Debug)]
struct HomeNamespace {
    namespace: Namespace,
    /// The connections that have their sockets in it.
    connections: BTreeSet<Ends>,
}

impl Packets {
    /// Opens the table of this name in the calling thread's network namespace. It removes the rules of
    /// an earlier process.
    ///
    /// # Errors
    /// Without CAP_NET_ADMIN and CAP_SYS_ADMIN, or if the kernel lacks a feature.
    pub fn open(name: &str) -> Result<Self> {
        Table::open(name)?.remove()?;
        let mut table = Table::open(name)?;
        let injector = Injector::create(&mut table)?;
        let (attached, namespaces) = Default::default();
        Ok(Self(Mutex::new(Rules { table, injector, attached, namespaces })))
    }

    fn rules(&self) -> MutexGuard<'_, Rules> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Home: holds what the client of this connection sends.
    ///
    /// # Errors
    /// If the client is on this machine, or cannot be reached. Nothing has changed then.
    pub fn hold(&self, connection: Ends) -> Result<Hold> {
        let mut rules = self.rules();
        let way = rules.way_to(connection.client().ip())?;
        let link = rules.attach(way.interface)?;
        let hold = Hold::open(&[link], &[connection], MAX_HELD)?;
        rules.table.apply(&[Change::Hold(connection)])?;
        Ok(hold)
    }

    /// Home: the route to this connection's client.
    ///
    /// # Errors
    /// If the client is on this machine, or cannot be reached.
    pub fn client_route(&self, connection: Ends) -> Result<ClientRoute> {
        let mut rules = self.rules();
        let way = rules.way_to(connection.client().ip())?;
        Ok(ClientRoute { next_hop: way.next_hop, mtu: rules.attach(way.interface)?.mtu })
    }

    /// Home: sends the client's packets, and those that were held, to the guest's node, and lets the
    /// answers through that come through a tunnel.
    ///
    /// # Errors
    /// If a node or the client cannot be reached, or the kernel refuses. The packets are still held then.
    pub fn forward(&self, hold: Option<Hold>, connection: Ends, path: &Path) -> Result<()> {
        let mut rules = self.rules();
        let way = rules.way_along(path, connection.home().ip())?;
        let mut changes = vec![Change::Forward(connection, way)];
        if let Path::Tunnel(tunnel) = path {
            let way = rules.way_to(connection.client().ip())?;
            let tunnel = tunnel.tunnel()?;
            tunnel.permit_packets(rules.attach(way.interface)?.mtu);
            changes.push(Change::Answer { from: tunnel.interface().index, connection, way });
        }
        rules.release(hold, &changes)
    }

    /// Home: the client's packets, and those that were held, reach this machine's own sockets. `path` is
    /// the one that they had before.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn keep_local(&self, hold: Option<Hold>, connection: Ends, path: Option<&Path>) -> Result<()> {
        let mut changes = vec![Change::Forget(connection)];
        if let Some(Path::Tunnel(tunnel)) = path {
            changes.push(Change::ForgetAnswer { from: tunnel.tunnel()?.interface().index, connection });
        }
        self.rules().release(hold, &changes)
    }

    /// Guest's node: prepares for a connection of this home. Packets for it reach home's namespace on
    /// this node, and none leaves that yet. Returns the namespace, for its socket.
    ///
    /// # Errors
    /// If there can be no namespace, or the kernel refuses. Nothing is left then.
    pub fn enter(
        &self,
        home: NodeId,
        path: &Path,
        connection: Ends,
        route: ClientRoute,
    ) -> Result<NetworkNamespace> {
        let mut rules = self.rules();
        let mut mtu = route.mtu;
        match path {
            Path::Direct(home) => {
                let way = rules.way_to(*home)?;
                mtu = mtu.min(rules.attach(way.interface)?.mtu);
            }
            // Into the namespace any length may go. A client on a longer MTU than home's is no reason
            // to drop its packets.
            Path::Tunnel(tunnel) => tunnel.tunnel()?.permit_packets(u16::MAX.into()),
        }
        let place = rules.namespace(home, connection, mtu)?;
        let entered = place.inside().try_clone();
        let way_in = place.way_in(connection.home().ip());
        let done = rules.table.apply(&[Change::Forward(connection, way_in)]);
        match entered.and_then(|inside| done.map(|()| inside)) {
            Ok(inside) => Ok(inside),
            Err(error) => {
                rules.leave(home, connection);
                Err(error.into())
            }
        }
    }

    /// Guest's node: packets of this connection leave home's namespace.
    ///
    /// # Errors
    /// If the client cannot be reached, or the kernel refuses.
    pub fn answer(&self, home: NodeId, path: &Path, connection: Ends) -> Result<()> {
        let mut rules = self.rules();
        let client = connection.client().ip();
        let way = match path {
            Path::Tunnel(tunnel) => tunnel.tunnel()?.way_to(client),
            Path::Direct(_) => match RouteLookup::to(client)? {
                RouteLookup::Through(way) => way,
                RouteLookup::Local => rules.injector.way_to_local(client),
            },
        };
        let from = rules.outer(home, connection).context("the connection has no namespace")?;
        Ok(rules.table.apply(&[Change::Answer { from, connection, way }])?)
    }

    /// Guest's node: whether the answers of this connection may go to its client directly, if the path
    /// between this node and home is direct. They may if the client is on this node, or is reached on
    /// the segment of home by the next hop that home uses. On another one, a machine in between may know
    /// home's address elsewhere.
    ///
    /// # Errors
    /// If home cannot be reached.
    pub fn answers_directly(&self, home: IpAddr, connection: Ends, route: ClientRoute) -> Result<bool> {
        let to_home = self.rules().way_to(home)?;
        Ok(match RouteLookup::to(connection.client().ip()) {
            Ok(RouteLookup::Local) => true,
            Ok(RouteLookup::Through(way)) => {
                way.interface == to_home.interface
                    && way.next_hop == route.next_hop
                    && home.is_ipv4() == way.next_hop.is_ipv4()
            }
            Err(_) => false,
        })
    }

    /// Guest's node: from now on keeps what arrives for this connection from its home, besides
    /// sending it on. So a packet that reaches the socket too late is not lost.
    ///
    /// # Errors
    /// If home cannot be reached, or the kernel refuses.
    pub fn watch(&self, path: &Path, connection: Ends) -> Result<Hold> {
        let interface = match path {
            Path::Direct(home) => {
                let mut rules = self.rules();
                let way = rules.way_to(*home)?;
                rules.attach(way.interface)?
            }
            Path::Tunnel(tunnel) => tunnel.tunnel()?.interface().clone(),
        };
        Ok(Hold::open(&[interface], &[connection], MAX_HELD)?)
    }

    /// Guest's node: no packet enters home's namespace for this connection.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn stop(&self, connection: Ends) -> Result<()> {
        Ok(self.rules().table.apply(&[Change::Hold(connection)])?)
    }

    /// Guest's node: no packet of this connection leaves home's namespace.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn silence(&self, home: NodeId, connection: Ends) -> Result<()> {
        let mut rules = self.rules();
        let from = rules.outer(home, connection).context("the connection has no namespace")?;
        Ok(rules.table.apply(&[Change::ForgetAnswer { from, connection }])?)
    }

    /// Guest's node: packets enter home's namespace again, and those that were kept as well.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn go_on(&self, home: NodeId, hold: Hold, connection: Ends) -> Result<()> {
        let mut rules = self.rules();
        let place = rules.namespaces.get(&(home, connection.home().ip()));
        let way_in =
            place.context("the connection has no namespace")?.namespace.way_in(connection.home().ip());
        rules.release(Some(hold), &[Change::Forward(connection, way_in)])
    }

    /// Guest's node: sends what was kept back to home, which has the connection again. A tunnel was
    /// flushed before; should a packet be late all the same, its client sends it again.
    ///
    /// # Errors
    /// If home cannot be reached, or the kernel refuses.
    pub fn send_back(&self, path: &Path, hold: Hold, connection: Ends) -> Result<()> {
        let Path::Direct(home) = path else { return Ok(()) };
        let mut rules = self.rules();
        let way = rules.way_to(*home)?;
        rules.release(Some(hold), &[Change::Forward(connection, way)])
    }

    /// Makes an end of a tunnel.
    ///
    /// # Errors
    /// If there is an interface of this name, or the kernel refuses.
    pub(crate) fn create_tunnel(&self, name: &str, end: TunnelEnd) -> Result<Tunnel> {
        Ok(Tunnel::create(&mut self.rules().table, name, end)?)
    }

    /// Removes an end of a tunnel.
    pub(crate) fn remove_tunnel(&self, tunnel: Tunnel) {
        if let Err(error) = tunnel.remove(&mut self.rules().table) {
            tracing::warn!(%error, "the rules of a tunnel could not be removed");
        }
    }

    /// Whether this address is one of this machine's own.
    ///
    /// # Errors
    /// If no route leads to it.
    pub(crate) fn is_local(&self, address: IpAddr) -> Result<bool> {
        Ok(RouteLookup::to(address.to_canonical())? == RouteLookup::Local)
    }

    /// Whether a machine is a neighbour on an Ethernet segment, according to the routes.
    ///
    /// # Errors
    /// If no route leads to it.
    pub(crate) fn is_neighbour(&self, address: IpAddr) -> Result<bool> {
        let mut rules = self.rules();
        let way = rules.way_to(address)?;
        Ok(way.next_hop == address.to_canonical() && rules.attach(way.interface).is_ok())
    }

    /// Begins to look for the packet `incoming`, which the machine `peer` sends, and prepares to send
    /// the one in the other direction.
    ///
    /// # Errors
    /// If that machine cannot be reached, or the kernel refuses.
    pub(crate) fn examine(
        self: &Arc<Self>,
        peer: IpAddr,
        incoming: Ends,
        token: ProbeToken,
    ) -> Result<Examination> {
        let mut rules = self.rules();
        let way = rules.way_to(peer)?;
        let link = rules.attach(way.interface)?;
        let probe = PathProbe::listen(&link, &incoming, token)?;
        let outgoing = incoming.reversed();
        rules.table.apply(&[Change::Hold(incoming), Change::Forward(outgoing, way)])?;
        Ok(Examination::new(self.clone(), probe, outgoing, token))
    }

    /// Sends the packet of an examination.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(crate) fn send_probe(&self, outgoing: &Ends, token: &ProbeToken) -> Result<()> {
        Ok(self.rules().injector.send_probe(outgoing, token)?)
    }

    /// Removes the rules of an examination.
    pub(crate) fn end_examination(&self, outgoing: Ends) {
        let changes = [Change::Forget(outgoing), Change::Forget(outgoing.reversed())];
        if let Err(error) = self.rules().table.apply(&changes) {
            tracing::warn!(%error, "the rules of an examination could not be removed");
        }
    }

    /// Guest's node: forgets a connection, and removes the namespace of its home after the last.
    pub fn leave(&self, home: NodeId, connection: Ends) {
        self.rules().leave(home, connection);
    }
}

impl Rules {
    /// The way to another machine.
    fn way_to(&self, address: IpAddr) -> Result<Way> {
        match RouteLookup::to(address.to_canonical())? {
            RouteLookup::Through(way) => Ok(way),
            RouteLookup::Local => bail!("{address} is an address of this machine"),
        }
    }

    /// The way to the other node for packets to this address of home.
    fn way_along(&self, path: &Path, home: IpAddr) -> Result<Way> {
        match path {
            Path::Direct(node) => self.way_to(*node),
            Path::Tunnel(tunnel) => Ok(tunnel.tunnel()?.way_to(home)),
        }
    }

    /// Has the table handle the packets that arrive at an interface.
    fn attach(&mut self, interface: u32) -> Result<NetworkInterface> {
        let any = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        let name = index_to_name(&any, interface).context("the interface of a route is gone")?;
        let link = NetworkInterface::find(&name)?;
        ensure!(link.is_ethernet, "packets of {name} cannot be held: it has no Ethernet frames");
        if !self.attached.contains(&interface) {
            self.table.attach(&name)?;
            self.attached.insert(interface);
        }
        Ok(link)
    }

    fn release(&mut self, hold: Option<Hold>, changes: &[Change]) -> Result<()> {
        match hold {
            Some(hold) => {
                let released = hold.release(&self.injector, &mut self.table, changes)?;
                tracing::debug!(?released, "held packets were sent on");
            }
            None => self.table.apply(changes)?,
        }
        Ok(())
    }

    /// The namespace of a connection's home.
    fn namespace(&mut self, home: NodeId, connection: Ends, mtu: u32) -> Result<&Namespace> {
        let key = (home, connection.home().ip());
        if !self.namespaces.contains_key(&key) {
            let name = (0..)
                .map(|number| format!("tern{home}.{number}"))
                .find(|name| NetworkInterface::find(name).is_err())
                .context("no name for an interface")?;
            let namespace = Namespace::create(&mut self.table, &name, &[key.1], mtu)?;
            self.namespaces.insert(key, HomeNamespace { namespace, connections: BTreeSet::new() });
        }
        let place = self.namespaces.get_mut(&key).context("the namespace is gone")?;
        place.connections.insert(connection);
        Ok(&place.namespace)
    }

    /// The index of the outer end of a home's namespace.
    fn outer(&self, home: NodeId, connection: Ends) -> Option<u32> {
        let place = self.namespaces.get(&(home, connection.home().ip()))?;
        Some(place.namespace.outer().index)
    }

    fn leave(&mut self, home: NodeId, connection: Ends) {
        let key = (home, connection.home().ip());
        let mut changes = vec![Change::Forget(connection)];
        if let Some(from) = self.outer(home, connection) {
            changes.push(Change::ForgetAnswer { from, connection });
        }
        if let Err(error) = self.table.apply(&changes) {
            tracing::warn!(%error, "the rules of a connection could not be removed");
        }
        let Some(place) = self.namespaces.get_mut(&key) else { return };
        place.connections.remove(&connection);
        if place.connections.is_empty()
            && let Some(place) = self.namespaces.remove(&key)
            && let Err(error) = place.namespace.remove(&mut self.table)
        {
            tracing::warn!(%error, "the namespace of a home could not be removed");
        }
    }
}

/// The addresses of a connection, for the rules.
///
/// # Errors
/// If they are of two IP versions.
pub(crate) fn ends(client: SocketAddr, home: SocketAddr) -> Result<Ends> {
    Ok(Ends::new(client, home)?)
}
