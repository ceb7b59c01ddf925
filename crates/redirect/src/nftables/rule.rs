//! The rules: which packets of which set are dropped or forwarded.

use super::attribute::{RULE, RULE_COMMENT, RULE_USER_DATA};
use super::expression::{Expressions, Header, Register};
use super::message;
use crate::ends::Family;
use crate::netlink::message::Message;

/// Which end of a connection sent the packets of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sender {
    /// The key is client, its port, home, its port.
    Client,
    /// The key is the interface, then home, its port, client, its port.
    Home,
}

/// The handling of a packet whose connection is in the set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Drop,
    /// To the interface and neighbour that the map contains.
    Forward,
}

/// A set as a rule refers to it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SetName<'a> {
    pub(crate) name: &'a str,
    /// Number of the set in the batch that creates it.
    pub(crate) id: u32,
}

/// Appends a rule to a chain: TCP packets of this IP version whose connection is in the set.
pub(crate) fn new_rule(
    table: &str,
    chain: &str,
    family: Family,
    sender: Sender,
    set: SetName<'_>,
    action: Action,
) -> Message {
    let mut message = message(libc::NFT_MSG_NEWRULE, libc::NLM_F_CREATE | libc::NLM_F_APPEND);
    message.text(RULE.table, table);
    message.text(RULE.chain, chain);
    message.nested(RULE.expressions, |m| {
        let mut rule = Expressions::new(m);
        require_tcp(&mut rule, family);
        let key = Register(0);
        let end = load_key(&mut rule, family, sender, key);
        match action {
            Action::Drop => {
                rule.lookup(set.name, set.id, key, None);
                rule.drop();
            }
            Action::Forward => {
                // The longest key has 11 registers and the longest value has 5: all 16.
                rule.lookup(set.name, set.id, key, Some(end));
                rule.forward(end, end.after(4), family);
            }
        }
    });
    if action == Action::Forward {
        // The command `nft` (1.0.6) does not print a fwd whose interface comes from a map.
        let comment = format!("fwd to the interface and neighbour in {}", set.name);
        let mut data = vec![RULE_COMMENT, comment.len() as u8 + 1];
        data.extend(comment.bytes());
        data.push(0);
        message.attribute(RULE_USER_DATA, &data);
    }
    message
}

/// Deletes all rules of a chain.
pub(crate) fn delete_rules(table: &str, chain: &str) -> Message {
    let mut message = message(libc::NFT_MSG_DELRULE, 0);
    message.text(RULE.table, table);
    message.text(RULE.chain, chain);
    message
}

fn require_tcp(rule: &mut Expressions<'_>, family: Family) {
    let ether_type = match family {
        Family::V4 => libc::ETH_P_IP,
        Family::V6 => libc::ETH_P_IPV6,
    };
    rule.meta(libc::NFT_META_PROTOCOL, Register(0));
    rule.require(Register(0), &(ether_type as u16).to_be_bytes());
    rule.meta(libc::NFT_META_L4PROTO, Register(0));
    rule.require(Register(0), &[libc::IPPROTO_TCP as u8]);
}

/// Loads the key; returns the first register after it.
fn load_key(rule: &mut Expressions<'_>, family: Family, sender: Sender, first: Register) -> Register {
    // Offset of the source address: struct iphdr and struct ipv6hdr (RFC 791, RFC 8200).
    let source = match family {
        Family::V4 => 12,
        Family::V6 => 8,
    };
    let len = family.address_len();
    let mut to = first;
    if sender == Sender::Home {
        rule.meta(libc::NFT_META_IIF, to);
        to = to.after(4);
    }
    // Offsets of the ports in TCP's header: RFC 9293.
    for (address, port) in [(source, 0), (source + len, 2)] {
        rule.payload(Header::Network, address, len, to);
        to = to.after(len);
        rule.payload(Header::Transport, port, 2, to);
        to = to.after(2);
    }
    to
}
