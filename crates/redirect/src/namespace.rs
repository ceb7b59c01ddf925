//! The network namespace of one home on a guest's node.
//!
//! ```text
//!  node's namespace                              home's namespace
//!  physical ─ chain ─ forwarded ──▶ outer ═══════ inner ── sockets bound to home's addresses (on lo)
//!  physical ◀─ answers ── chain ─── outer ═══════ inner ◀─ default route
//!                           └── all others: drop
//! ```
//!
//! Home's addresses exist only inside, and neither end answers ARP or neighbour solicitations. So no
//! machine on the segment learns that they are here.

use crate::ends::Way;
use crate::error::Result;
use crate::link::{Links, NetworkInterface, VethPair, check_name};
use crate::network_namespace::NetworkNamespace;
use crate::sysctl;
use crate::table::Table;
use std::net::IpAddr;
use std::os::fd::AsFd;

/// Name of the veth end inside. Each home has a namespace of its own, so that the name is free.
const INNER: &str = "home";

/// The least MTU with which an interface has IPv6: RFC 8200 section 5.
const MIN_IPV6_MTU: u32 = 1280;

/// The link address of both ends: locally administered, and never seen on another link.
const LINK_ADDRESS: [u8; 6] = [0x02, 0x7e, 0x72, 0x6e, 0x00, 0x01];

/// A network namespace that has the addresses of one home.
///
/// Nothing leaves it except packets of the connections that [`crate::Change::Answer`] names. Dropping
/// this value deletes the veth pair, which cuts off sockets that are still in the namespace; use
/// [`Namespace::keep`] to leave it for a later process.
#[derive(Debug)]
pub struct Namespace {
    inside: NetworkNamespace,
    /// Requests about the node's interfaces.
    links: Links,
    outer: NetworkInterface,
    /// Whether dropping deletes the pair.
    owned: bool,
}

impl Namespace {
    /// Makes the namespace. `outer` is the new interface's name in the calling thread's network
    /// namespace, which must be that of `table`. `mtu`, in bytes, should be that of the physical
    /// interface.
    ///
    /// # Errors
    /// If an interface of that name exists, an address is not usable, or without CAP_SYS_ADMIN and
    /// CAP_NET_ADMIN. Nothing stays behind then.
    pub fn create(table: &mut Table, outer: &str, addresses: &[IpAddr], mtu: u32) -> Result<Self> {
        check_name(outer)?;
        let inside = NetworkNamespace::create()?;
        let mut links = Links::open()?;
        let pair = VethPair {
            outer,
            inner: INNER,
            inner_namespace: Some(inside.as_fd()),
            mtu,
            address: LINK_ADDRESS,
        };
        links.create_veth(&pair)?;
        let link = match links.find(outer) {
            Ok(link) => link,
            Err(error) => {
                links.delete(outer)?;
                return Err(error);
            }
        };
        // From here on, an error drops the value and so deletes the pair.
        let mut namespace = Self { inside, links, outer: link, owned: true };
        let configured = namespace.configure(table, addresses, mtu >= MIN_IPV6_MTU);
        if configured.is_err() {
            // The first error says more than one of the cleanup.
            let _ = table.detach(outer);
        }
        configured.map(|()| namespace)
    }

    /// Finds a namespace again that an earlier process made and kept. `inside` comes from a socket
    /// in it, by [`NetworkNamespace::of_socket`]. The chain of `outer` is set up again.
    ///
    /// # Errors
    /// [`crate::RedirectError::NoInterface`] if there is no interface `outer`.
    pub fn adopt(table: &mut Table, outer: &str, inside: NetworkNamespace) -> Result<Self> {
        let mut links = Links::open()?;
        let link = links.find(outer)?;
        table.attach_namespace(outer)?;
        Ok(Self { inside, links, outer: link, owned: true })
    }

    /// The end of the veth pair in the node's namespace.
    #[must_use]
    pub fn outer(&self) -> &NetworkInterface {
        &self.outer
    }

    /// The namespace with home's addresses, for sockets that are opened in it.
    #[must_use]
    pub fn inside(&self) -> &NetworkNamespace {
        &self.inside
    }

    /// The way into the namespace for packets to this address of home.
    #[must_use]
    pub fn way_in(&self, home: IpAddr) -> Way {
        Way { interface: self.outer.index, next_hop: home }
    }

    /// Leaves the veth pair and the chain. The namespace itself stays only while sockets or processes
    /// are in it.
    pub fn keep(mut self) {
        self.owned = false;
    }

    /// Removes the namespace with its veth pair, its chain, and all connections of the table that
    /// lead into it or out of it.
    ///
    /// # Errors
    /// If the table refuses the changes. The veth pair is deleted nevertheless.
    pub fn remove(self, table: &mut Table) -> Result<()> {
        let changes = table.elements().changes_without(self.outer.index);
        let applied = table.apply(&changes);
        // Before the pair: afterwards, older kernels have deleted the chain.
        applied.and(table.detach(&self.outer.name))
    }

    /// The chain comes first: no packet leaves before it is there.
    fn configure(&mut self, table: &mut Table, addresses: &[IpAddr], ipv6: bool) -> Result<()> {
        let NetworkInterface { index, name, .. } = &self.outer;
        table.attach_namespace(name)?;
        // Packets that pass the chain never reach the node's IP stack. Should another program remove
        // the table, these settings stop them: home's addresses are reached through another interface.
        sysctl::write(&format!("ipv4/conf/{name}/rp_filter"), 1)?;
        sysctl::write(&format!("ipv4/conf/{name}/forwarding"), 0)?;
        if ipv6 {
            sysctl::write_ipv6(&format!("ipv6/conf/{name}/disable_ipv6"), 1)?;
        }
        self.links.set_silent(*index)?;
        self.inside.run(|| configure_inside(addresses, ipv6))??;
        self.links.set_up(*index)?;
        self.links.wait_operational(name)?;
        self.inside.run(|| Links::open()?.wait_operational(INNER))?
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if self.owned {
            // A destructor cannot report it. The namespace's end deletes the pair in any case.
            let _ = self.links.delete(&self.outer.name);
        }
    }
}

fn configure_inside(addresses: &[IpAddr], ipv6: bool) -> Result<()> {
    // The only router is the node's chain. Replies arrive on the interface of the default route, but
    // a client may have any source address.
    // ICMP messages about a packet that is too large reach home, and not this namespace. So TCP has to
    // find the largest packet itself when none is acknowledged (ip-sysctl.rst of the kernel).
    let settings =
        [("ip_forward", 0), ("conf/all/rp_filter", 0), ("conf/home/rp_filter", 0), ("tcp_mtu_probing", 1)];
    for (setting, value) in settings {
        sysctl::write(&format!("ipv4/{setting}"), value)?;
    }
    if ipv6 {
        for (setting, value) in
            [("accept_ra", 0), ("accept_redirects", 0), ("accept_dad", 0), ("forwarding", 0)]
        {
            sysctl::write_ipv6(&format!("ipv6/conf/{INNER}/{setting}"), value)?;
        }
    }
    let mut links = Links::open()?;
    let (loopback, inner) = (links.find("lo")?, links.find(INNER)?);
    links.set_up(loopback.index)?;
    links.set_silent(inner.index)?;
    for address in addresses {
        links.add_address(loopback.index, *address, libc::RT_SCOPE_UNIVERSE)?;
    }
    links.set_up(inner.index)?;
    for address in addresses {
        links.add_default_route(inner.index, *address)?;
    }
    Ok(())
}
