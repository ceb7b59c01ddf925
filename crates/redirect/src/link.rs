//! Network interfaces, by rtnetlink(7): find, create a veth pair, configure, delete.

use crate::ends::octets;
use crate::error::{NEEDS_NET_ADMIN, RedirectError, Result, WithRemedy};
use crate::netlink::Socket;
use crate::netlink::message::{Message, Reply, read_u32};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Longest name of an interface in bytes: `IFNAMSIZ` of `linux/if.h` without the null byte.
const MAX_NAME_LEN: usize = 15;

/// `VETH_INFO_PEER` of `linux/veth.h`.
const VETH_INFO_PEER: u16 = 1;

/// `IFLA_INET6_ADDR_GEN_MODE` and its value `IN6_ADDR_GEN_MODE_NONE` of `linux/if_link.h`: no
/// link-local address, so that the kernel sends no router solicitation and no duplicate detection.
const ADDRESS_GENERATION_MODE: u16 = 8;
const NO_ADDRESS_GENERATION: u8 = 1;

/// `IFA_FLAGS` of `linux/if_addr.h`: flags of 32 bits.
const IFA_FLAGS: u16 = 8;

/// `IF_OPER_UP` of `linux/if.h`.
const OPERATIONAL: u8 = 6;

/// Limit and interval of the wait for a new interface.
const OPERATIONAL_TIMEOUT: Duration = Duration::from_secs(5);
const OPERATIONAL_INTERVAL: Duration = Duration::from_millis(1);

/// Remedy for a link that cannot be configured.
const CHECK_LINKS: &str = "check the interfaces with `ip -d link`, and run it with CAP_NET_ADMIN";

/// A network interface as it was when it was looked up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkInterface {
    /// Index in its network namespace.
    pub index: u32,
    /// Name in its network namespace.
    pub name: String,
    /// Largest IP packet, in bytes.
    pub mtu: u32,
    /// Link address, such as a MAC address.
    pub address: Vec<u8>,
    /// Whether its frames have an Ethernet header.
    pub is_ethernet: bool,
}

impl NetworkInterface {
    /// The interface of this name in the calling thread's network namespace.
    ///
    /// # Errors
    /// [`RedirectError::NoInterface`] if there is none.
    pub fn find(name: &str) -> Result<Self> {
        Links::open()?.find(name)
    }
}

/// Checks the name of an interface or table. Such names appear in paths below `/proc/sys/net`.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.@".contains(&b);
    if (1..=MAX_NAME_LEN).contains(&name.len()) && name.bytes().all(plain) && name != "." && name != ".." {
        Ok(())
    } else {
        Err(RedirectError::BadName { name: name.to_owned() })
    }
}

/// A veth pair that is to be created. Both ends have the same link address and no ARP. The kernel
/// addresses frames on an interface without ARP to the interface's own link address, which is thus
/// also that of the other end. No neighbour entry is needed.
#[derive(Debug)]
pub(crate) struct VethPair<'a> {
    pub(crate) outer: &'a str,
    pub(crate) inner: &'a str,
    /// The namespace for the inner end; the outer end's if `None`.
    pub(crate) inner_namespace: Option<BorrowedFd<'a>>,
    pub(crate) mtu: u32,
    pub(crate) address: [u8; 6],
}

/// A socket for requests about the interfaces, addresses and routes of one network namespace.
#[derive(Debug)]
pub(crate) struct Links {
    socket: Socket,
}

impl Links {
    /// For the calling thread's network namespace.
    pub(crate) fn open() -> Result<Self> {
        // NETLINK_ROUTE is protocol 0.
        let socket = Socket::open(None)
            .with_remedy(|| "open a route socket".to_owned(), "permit sockets of family AF_NETLINK")?;
        Ok(Self { socket })
    }

    pub(crate) fn find(&mut self, name: &str) -> Result<NetworkInterface> {
        let reply = self.query_link(name)?;
        read_link(&reply).ok_or(RedirectError::Malformed { request: "RTM_GETLINK" })
    }

    fn query_link(&mut self, name: &str) -> Result<Reply> {
        check_name(name)?;
        let mut message = link_message(libc::RTM_GETLINK, 0, 0, 0, 0);
        message.text(libc::IFLA_IFNAME, name);
        match self.socket.get(message) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {
                Err(RedirectError::NoInterface { name: name.to_owned() })
            }
            result => result.with_remedy(|| format!("look up interface {name}"), CHECK_LINKS),
        }
    }

    /// Creates both ends, down.
    pub(crate) fn create_veth(&mut self, pair: &VethPair<'_>) -> Result<()> {
        let mut message = link_message(libc::RTM_NEWLINK, libc::NLM_F_CREATE | libc::NLM_F_EXCL, 0, 0, 0);
        let end = |m: &mut Message, name: &str| {
            m.text(libc::IFLA_IFNAME, name);
            m.ne32(libc::IFLA_MTU, pair.mtu);
            m.attribute(libc::IFLA_ADDRESS, &pair.address);
        };
        end(&mut message, pair.outer);
        message.nested(libc::IFLA_LINKINFO, |m| {
            m.text(libc::IFLA_INFO_KIND, "veth");
            m.nested(libc::IFLA_INFO_DATA, |m| {
                m.nested(VETH_INFO_PEER, |m| {
                    m.raw(&interface_header(0, 0, 0));
                    end(m, pair.inner);
                    if let Some(namespace) = pair.inner_namespace {
                        m.ne32(libc::IFLA_NET_NS_FD, namespace.as_raw_fd().cast_unsigned());
                    }
                });
            });
        });
        self.socket.change(message).with_remedy(
            || format!("create the veth pair {} and {}", pair.outer, pair.inner),
            "remove an interface of that name with `ip link del`; the kernel needs CONFIG_VETH, and the \
             caller CAP_NET_ADMIN",
        )
    }

    /// Switches ARP and IPv6's own addresses off.
    pub(crate) fn set_silent(&mut self, index: u32) -> Result<()> {
        let flag = libc::IFF_NOARP as u32;
        self.change(link_message(libc::RTM_NEWLINK, 0, index, flag, flag), index)?;
        let mut message = link_message(libc::RTM_NEWLINK, 0, index, 0, 0);
        message.nested(libc::IFLA_AF_SPEC, |m| {
            m.nested(libc::AF_INET6 as u16, |m| {
                m.attribute(ADDRESS_GENERATION_MODE, &[NO_ADDRESS_GENERATION]);
            });
        });
        match self.socket.change(message) {
            // Without IPv6 there is nothing to switch off.
            Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => Ok(()),
            result => result.with_remedy(|| format!("configure interface {index}"), CHECK_LINKS),
        }
    }

    /// Sets the MTU in bytes, and the number of frames that may wait to be sent.
    pub(crate) fn set_link(&mut self, index: u32, mtu: u32, queue_len: u32) -> Result<()> {
        let mut message = link_message(libc::RTM_NEWLINK, 0, index, 0, 0);
        message.ne32(libc::IFLA_MTU, mtu);
        message.ne32(libc::IFLA_TXQLEN, queue_len);
        self.change(message, index)
    }

    pub(crate) fn set_up(&mut self, index: u32) -> Result<()> {
        let flag = libc::IFF_UP as u32;
        self.change(link_message(libc::RTM_NEWLINK, 0, index, flag, flag), index)
    }

    /// Waits until an interface that has just been set up sends packets. A veth end drops them until the
    /// kernel's link watch has seen that the other end is up as well. From Linux 5.18 on, the query
    /// itself runs the link watch; before that it may take a second.
    pub(crate) fn wait_operational(&mut self, name: &str) -> Result<()> {
        let until = Instant::now() + OPERATIONAL_TIMEOUT;
        loop {
            let reply = self.query_link(name)?;
            if reply.attributes(16).find(libc::IFLA_OPERSTATE) == Some(&[OPERATIONAL]) {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(RedirectError::NotOperational { name: name.to_owned() });
            }
            std::thread::sleep(OPERATIONAL_INTERVAL);
        }
    }

    fn change(&mut self, message: Message, index: u32) -> Result<()> {
        self.socket.change(message).with_remedy(|| format!("configure interface {index}"), CHECK_LINKS)
    }

    /// Deletes an interface and, if it is one end of a veth pair, the other end. A missing interface
    /// is no error.
    pub(crate) fn delete(&mut self, name: &str) -> Result<()> {
        let mut message = link_message(libc::RTM_DELLINK, 0, 0, 0, 0);
        message.text(libc::IFLA_IFNAME, name);
        match self.socket.change(message) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            result => result.with_remedy(|| format!("delete interface {name}"), NEEDS_NET_ADMIN),
        }
    }

    /// Adds an address that is on no subnet. IPv6 begins to use it at once, without duplicate
    /// detection. `scope` is one of `RT_SCOPE_*`.
    pub(crate) fn add_address(&mut self, index: u32, address: IpAddr, scope: u8) -> Result<()> {
        let bytes = octets(address);
        let prefix = bytes.len() as u8 * 8;
        // struct ifaddrmsg of linux/if_addr.h: family, prefix length, flags, scope, index.
        let mut fixed = vec![family_number(address), prefix, 0, scope];
        fixed.extend(index.to_ne_bytes());
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        let mut message = Message::new(libc::RTM_NEWADDR, flags, &fixed);
        message.attribute(libc::IFA_LOCAL, &bytes);
        message.attribute(libc::IFA_ADDRESS, &bytes);
        message.ne32(IFA_FLAGS, libc::IFA_F_NODAD);
        self.socket.change(message).with_remedy(
            || format!("add address {address} to interface {index}"),
            "name each of home's addresses once; IPv6 addresses need CONFIG_IPV6",
        )
    }

    /// Adds a default route without a router: all destinations are neighbours on this interface.
    pub(crate) fn add_default_route(&mut self, index: u32, family_of: IpAddr) -> Result<()> {
        let scope = if family_of.is_ipv4() { libc::RT_SCOPE_LINK } else { libc::RT_SCOPE_UNIVERSE };
        // struct rtmsg of linux/rtnetlink.h: family, lengths of destination and source, TOS, table,
        // protocol, scope, type, flags.
        let (family, table) = (family_number(family_of), libc::RT_TABLE_MAIN);
        let fixed = [family, 0, 0, 0, table, libc::RTPROT_BOOT, scope, libc::RTN_UNICAST, 0, 0, 0, 0];
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        let mut message = Message::new(libc::RTM_NEWROUTE, flags, &fixed);
        message.ne32(libc::RTA_OIF, index);
        match self.socket.change(message) {
            // The route of another address of the same version.
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            result => result.with_remedy(|| "add the route of a home's namespace".to_owned(), CHECK_LINKS),
        }
    }

    /// The kernel's answer to a route query, for [`crate::route`].
    pub(crate) fn query(&mut self, message: Message) -> io::Result<Reply> {
        self.socket.get(message)
    }
}

/// The kernel's number of the address's family.
pub(crate) fn family_number(address: IpAddr) -> u8 {
    (if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }) as u8
}

/// A message about an interface. Only the flags in `mask` are changed.
fn link_message(kind: u16, flags: libc::c_int, index: u32, value: u32, mask: u32) -> Message {
    Message::new(kind, flags, &interface_header(index, value, mask))
}

/// `struct ifinfomsg` of `linux/rtnetlink.h`: family, padding, type, index, flags, changed flags.
fn interface_header(index: u32, flags: u32, mask: u32) -> [u8; 16] {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..16].copy_from_slice(&mask.to_ne_bytes());
    header
}

fn read_link(reply: &Reply) -> Option<NetworkInterface> {
    let attributes = reply.attributes(16);
    let name = attributes.clone().find(libc::IFLA_IFNAME)?;
    let name = name.strip_suffix(&[0]).unwrap_or(name);
    // struct ifinfomsg has the type as a number of 16 bits after the family.
    let kind = reply.body.get(2..4)?;
    Some(NetworkInterface {
        is_ethernet: kind == libc::ARPHRD_ETHER.to_ne_bytes(),
        index: read_u32(reply.body.get(4..8)?),
        name: String::from_utf8_lossy(name).into_owned(),
        mtu: read_u32(attributes.clone().find(libc::IFLA_MTU)?),
        address: attributes.find(libc::IFLA_ADDRESS).unwrap_or_default().to_vec(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_found() {
        let link = NetworkInterface::find("lo").unwrap();
        assert_eq!((link.name.as_str(), link.index), ("lo", 1));
        assert!(link.mtu >= 1500, "{link:?}");
    }

    #[test]
    fn missing_and_impossible_names_have_different_errors() {
        assert!(matches!(NetworkInterface::find("no-such-link"), Err(RedirectError::NoInterface { .. })));
        for name in ["", "..", "a/b", "sixteen-letters-", "a b"] {
            assert!(matches!(NetworkInterface::find(name), Err(RedirectError::BadName { .. })), "{name}");
        }
    }
}
