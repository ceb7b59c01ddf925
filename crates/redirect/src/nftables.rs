//! Messages to nf_tables (`linux/netfilter/nf_tables.h`), for one table of family netdev.
//!
//! The crates for nftables do not fit: rustables is under the GPL, nftnl needs a C library, and
//! neither has the expression `fwd`. This crate needs five kinds of message and six kinds of
//! expression.

pub(crate) mod attribute;
pub(crate) mod element;
pub(crate) mod expression;
pub(crate) mod rule;

use crate::netlink::message::Message;
use attribute::{CHAIN, HOOK, SET, TABLE};

/// The hook priority of all chains: before the IP stack and connection tracking, which have no hooks
/// at ingress, and before other netdev chains of usual priority (0).
const PRIORITY: i32 = -500;

/// The verdict of a chain for packets that no rule handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Policy {
    Accept,
    Drop,
}

/// A set of connections, or a map from connections to ways.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SetShape<'a> {
    pub(crate) name: &'a str,
    /// Data types of the parts of the key, for the command `nft`, with their lengths in bytes.
    pub(crate) key: &'a [DataType],
    /// The same of the value; empty for a set.
    pub(crate) value: &'a [DataType],
}

/// A data type of the command `nft`: its number there (`include/datatype.h` of nftables; the kernel
/// only stores it) and its length in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DataType {
    number: u32,
    len: u32,
}

pub(crate) const IPV4_ADDRESS: DataType = DataType { number: 7, len: 4 };
pub(crate) const IPV6_ADDRESS: DataType = DataType { number: 8, len: 16 };
pub(crate) const PORT: DataType = DataType { number: 13, len: 2 };
pub(crate) const INTERFACE: DataType = DataType { number: 20, len: 4 };

/// `nft` packs the types of a concatenation into one number, this many bits each.
const DATA_TYPE_BITS: u32 = 6;

/// Each part of a key begins at a register of four bytes.
fn padded_len(parts: &[DataType]) -> u32 {
    parts.iter().map(|part| part.len.next_multiple_of(4)).sum()
}

fn packed_types(parts: &[DataType]) -> u32 {
    parts.iter().fold(0, |packed, part| packed << DATA_TYPE_BITS | part.number)
}

/// A message of nf_tables. `kind` is one of `NFT_MSG_*`.
pub(crate) fn message(kind: libc::c_int, flags: libc::c_int) -> Message {
    // struct nfgenmsg of linux/netfilter/nfnetlink.h: family, version, resource.
    let fixed = [libc::NFPROTO_NETDEV as u8, libc::NFNETLINK_V0 as u8, 0, 0];
    Message::new((libc::NFNL_SUBSYS_NFTABLES << 8 | kind) as u16, flags, &fixed)
}

/// The first message of a batch.
pub(crate) fn batch_begin() -> Message {
    batch_end_of_kind(libc::NFNL_MSG_BATCH_BEGIN)
}

/// The last message of a batch.
pub(crate) fn batch_end() -> Message {
    batch_end_of_kind(libc::NFNL_MSG_BATCH_END)
}

fn batch_end_of_kind(kind: libc::c_int) -> Message {
    let [high, low] = (libc::NFNL_SUBSYS_NFTABLES as u16).to_be_bytes();
    Message::new(kind as u16, 0, &[0, libc::NFNETLINK_V0 as u8, high, low])
}

/// Creates the table, or updates its flags.
pub(crate) fn new_table(table: &str, flags: u32) -> Message {
    let mut message = message(libc::NFT_MSG_NEWTABLE, libc::NLM_F_CREATE);
    message.text(TABLE.name, table);
    message.be32(TABLE.flags, flags);
    message
}

/// Deletes the table with all that is in it.
pub(crate) fn delete_table(table: &str) -> Message {
    let mut message = message(libc::NFT_MSG_DELTABLE, 0);
    message.text(TABLE.name, table);
    message
}

/// Creates a set or map; changes nothing if it exists.
pub(crate) fn new_set(table: &str, id: u32, shape: &SetShape<'_>) -> Message {
    let mut message = message(libc::NFT_MSG_NEWSET, libc::NLM_F_CREATE);
    message.text(SET.table, table);
    message.text(SET.name, shape.name);
    message.be32(SET.flags, if shape.value.is_empty() { 0 } else { libc::NFT_SET_MAP as u32 });
    message.be32(SET.key_type, packed_types(shape.key));
    message.be32(SET.key_len, padded_len(shape.key));
    if !shape.value.is_empty() {
        message.be32(SET.data_type, packed_types(shape.value));
        message.be32(SET.data_len, padded_len(shape.value));
    }
    message.be32(SET.id, id);
    message
}

/// Creates a chain at the ingress hook of an interface; changes nothing if it exists.
pub(crate) fn new_chain(table: &str, chain: &str, interface: &str, policy: Policy) -> Message {
    let mut message = message(libc::NFT_MSG_NEWCHAIN, libc::NLM_F_CREATE);
    message.text(CHAIN.table, table);
    message.text(CHAIN.name, chain);
    message.nested(CHAIN.hook, |m| {
        m.be32(HOOK.number, libc::NF_NETDEV_INGRESS as u32);
        m.be32(HOOK.priority, PRIORITY.cast_unsigned());
        m.text(HOOK.device, interface);
    });
    let verdict = if policy == Policy::Accept { libc::NF_ACCEPT } else { libc::NF_DROP };
    message.be32(CHAIN.policy, verdict as u32);
    message.text(CHAIN.kind, "filter");
    message
}

/// Deletes a chain with its rules.
pub(crate) fn delete_chain(table: &str, chain: &str) -> Message {
    let mut message = message(libc::NFT_MSG_DELCHAIN, 0);
    message.text(CHAIN.table, table);
    message.text(CHAIN.name, chain);
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_of_ipv4_has_the_layout_of_the_nft_command() {
        let key = [IPV4_ADDRESS, PORT, IPV4_ADDRESS, PORT];
        // As `nft --debug=mnl` printed it for `ip saddr . tcp sport . ip daddr . tcp dport`.
        assert_eq!((packed_types(&key), padded_len(&key)), (0x1c_d1cd, 16));
        assert_eq!(padded_len(&[INTERFACE, IPV6_ADDRESS, PORT, IPV6_ADDRESS, PORT]), 44);
    }
}
