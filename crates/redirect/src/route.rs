//! The next hop to an address, from the kernel's routes.

use crate::ends::{Family, Way, octets};
use crate::error::{RedirectError, Result, WithRemedy};
use crate::link::{Links, family_number};
use crate::netlink::message::{Message, Reply, read_u32};
use std::net::IpAddr;

/// Where the routes of a network namespace lead to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteLookup {
    /// Through an interface, to the destination itself or to a router.
    Through(Way),
    /// The address is one of this namespace's own.
    Local,
}

impl RouteLookup {
    /// Looks up the route to an address in the calling thread's network namespace.
    ///
    /// # Errors
    /// [`RedirectError::NoRoute`] if there is none, or if the router is of the other IP version.
    pub fn to(address: IpAddr) -> Result<Self> {
        let bytes = octets(address);
        // struct rtmsg of linux/rtnetlink.h: family, length of the destination in bits, and zeros.
        let fixed = [family_number(address), bytes.len() as u8 * 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let mut message = Message::new(libc::RTM_GETROUTE, 0, &fixed);
        message.attribute(libc::RTA_DST, &bytes);
        match Links::open()?.query(message) {
            Ok(reply) => read(&reply, address).ok_or(RedirectError::NoRoute { address }),
            Err(error) if error.raw_os_error() == Some(libc::ENETUNREACH) => {
                Err(RedirectError::NoRoute { address })
            }
            Err(error) => Err(error).with_remedy(
                || format!("find the route to {address}"),
                "check it with `ip route get ADDRESS`",
            ),
        }
    }
}

/// `None` if the route leads nowhere, or is of a kind that the table cannot use.
fn read(reply: &Reply, address: IpAddr) -> Option<RouteLookup> {
    match *reply.body.get(7)? {
        libc::RTN_LOCAL => return Some(RouteLookup::Local),
        libc::RTN_UNICAST => {}
        _ => return None,
    }
    let kinds = reply.attributes(12);
    if kinds.clone().find(libc::RTA_VIA).is_some() {
        return None; // An IPv4 route through an IPv6 router.
    }
    let interface = read_u32(kinds.clone().find(libc::RTA_OIF)?);
    let next_hop = match kinds.find(libc::RTA_GATEWAY) {
        Some(router) => Family::of(address).read(router)?,
        None => address,
    };
    Some(RouteLookup::Through(Way { interface, next_hop }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_local() {
        assert_eq!(RouteLookup::to([127, 0, 0, 1].into()).unwrap(), RouteLookup::Local);
    }

    #[test]
    fn router_is_the_next_hop() {
        let fixed = [2, 32, 0, 0, 254, 3, 0, libc::RTN_UNICAST, 0, 0, 0, 0];
        let mut message = Message::new(libc::RTM_NEWROUTE, 0, &fixed);
        message.ne32(libc::RTA_OIF, 4);
        message.attribute(libc::RTA_GATEWAY, &[10, 0, 0, 254]);
        let bytes = message.finish(1);
        let reply = &crate::netlink::message::split(&bytes)[0];
        let way = Way { interface: 4, next_hop: [10, 0, 0, 254].into() };
        assert_eq!(read(reply, [192, 0, 2, 1].into()), Some(RouteLookup::Through(way)));
    }
}
