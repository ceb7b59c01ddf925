//! Elements of sets and maps: connections, and ways of connections.

use super::attribute::{DATA_VALUE, ELEMENT};
use super::message;
use crate::ends::{Ends, Family, Way, octets};
use crate::netlink::message::{Message, Reply, attributes};
use std::net::SocketAddr;

/// The key of packets from client to home.
pub(crate) fn client_key(connection: &Ends) -> Vec<u8> {
    let mut key = end(connection.client());
    key.extend(end(connection.home()));
    key
}

/// The key of packets from home to client that arrive from this interface.
pub(crate) fn home_key(interface: u32, connection: &Ends) -> Vec<u8> {
    let mut key = interface.to_ne_bytes().to_vec();
    key.extend(end(connection.home()));
    key.extend(end(connection.client()));
    key
}

/// The value of a map.
pub(crate) fn way_value(way: &Way) -> Vec<u8> {
    let mut value = way.interface.to_ne_bytes().to_vec();
    value.extend(octets(way.next_hop));
    value
}

fn end(address: SocketAddr) -> Vec<u8> {
    let mut bytes = octets(address.ip());
    bytes.extend(address.port().to_be_bytes());
    bytes.extend([0, 0]); // Each part fills whole registers of four bytes.
    bytes
}

/// Reads what [`client_key`] wrote.
pub(crate) fn read_client_key(family: Family, key: &[u8]) -> Option<Ends> {
    let (client, home) = read_ends(family, key)?;
    Ends::new(client, home).ok()
}

/// Reads what [`home_key`] wrote.
pub(crate) fn read_home_key(family: Family, key: &[u8]) -> Option<(u32, Ends)> {
    let (interface, ends) = key.split_first_chunk::<4>()?;
    let (home, client) = read_ends(family, ends)?;
    Some((u32::from_ne_bytes(*interface), Ends::new(client, home).ok()?))
}

/// Reads what [`way_value`] wrote.
pub(crate) fn read_way(family: Family, value: &[u8]) -> Option<Way> {
    let (interface, next_hop) = value.split_first_chunk::<4>()?;
    Some(Way { interface: u32::from_ne_bytes(*interface), next_hop: family.read(next_hop)? })
}

fn read_ends(family: Family, key: &[u8]) -> Option<(SocketAddr, SocketAddr)> {
    let len = family.address_len() + 4;
    let (first, second) = key.split_at_checked(len)?;
    let read = |bytes: &[u8]| {
        let (address, port) = bytes.split_at_checked(family.address_len())?;
        let port = u16::from_be_bytes(*port.first_chunk()?);
        Some(SocketAddr::new(family.read(address)?, port))
    };
    Some((read(first)?, read(second)?))
}

/// Adds an element; the value is empty for a set.
pub(crate) fn add(table: &str, set: &str, key: &[u8], value: &[u8]) -> Message {
    change(libc::NFT_MSG_NEWSETELEM, libc::NLM_F_CREATE, table, set, key, value)
}

/// Removes an element.
pub(crate) fn remove(table: &str, set: &str, key: &[u8]) -> Message {
    change(libc::NFT_MSG_DELSETELEM, 0, table, set, key, &[])
}

fn change(
    kind: libc::c_int,
    flags: libc::c_int,
    table: &str,
    set: &str,
    key: &[u8],
    value: &[u8],
) -> Message {
    let mut message = message(kind, flags);
    message.text(ELEMENT.table, table);
    message.text(ELEMENT.set, set);
    message.nested(ELEMENT.elements, |m| {
        m.nested(ELEMENT.element, |m| {
            m.nested(ELEMENT.key, |m| m.attribute(DATA_VALUE, key));
            if !value.is_empty() {
                m.nested(ELEMENT.data, |m| m.attribute(DATA_VALUE, value));
            }
        });
    });
    message
}

/// Requests all elements of a set.
pub(crate) fn list(table: &str, set: &str) -> Message {
    let mut message = message(libc::NFT_MSG_GETSETELEM, 0);
    message.text(ELEMENT.table, table);
    message.text(ELEMENT.set, set);
    message
}

/// Keys and values in a reply to [`list`].
pub(crate) fn read(reply: &Reply) -> Vec<(&[u8], &[u8])> {
    let elements = reply.attributes(4).find(ELEMENT.elements).unwrap_or_default();
    let part = |element, kind| {
        attributes(element).find(kind).and_then(|data| attributes(data).find(DATA_VALUE)).unwrap_or_default()
    };
    attributes(elements)
        .map(|(_, element)| (part(element, ELEMENT.key), part(element, ELEMENT.data)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_values_are_read_as_written() {
        for (client, home, hop) in
            [("10.0.0.1:40000", "10.0.0.2:7000", "10.0.0.3"), ("[fd00::1]:1", "[fd00::2]:65535", "fd00::3")]
        {
            let connection = Ends::new(client.parse().unwrap(), home.parse().unwrap()).unwrap();
            let family = connection.family();
            assert_eq!(read_client_key(family, &client_key(&connection)), Some(connection));
            let key = home_key(9, &connection);
            assert_eq!(read_home_key(family, &key), Some((9, connection)));
            let way = Way { interface: 3, next_hop: hop.parse().unwrap() };
            assert_eq!(read_way(family, &way_value(&way)), Some(way));
            for cut in 0..key.len() {
                assert_eq!(read_home_key(family, &key[..cut]).is_some(), cut >= key.len() - 2, "{cut}");
            }
        }
    }

    #[test]
    fn elements_of_a_reply_are_found() {
        let bytes = add("tern", "ways4", &[1, 2, 3, 4], &[5, 6, 7, 8]).finish(1);
        let replies = crate::netlink::message::split(&bytes);
        assert_eq!(read(&replies[0]), [(&[1, 2, 3, 4][..], &[5, 6, 7, 8][..])]);
    }
}
