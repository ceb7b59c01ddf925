//! The expressions of a rule. Each is an instruction of nf_tables' virtual machine, which has sixteen
//! registers of four bytes.

use super::attribute::{DATA_VALUE, DATA_VERDICT, EXPRESSION, RULE, VERDICT_CODE};
use crate::ends::Family;
use crate::netlink::message::Message;

/// A register of four bytes, counted from 0. Longer values continue in the next registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Register(pub(crate) u32);

impl Register {
    fn number(self) -> u32 {
        libc::NFT_REG32_00 as u32 + self.0
    }

    /// The register after a value of this length in bytes that begins here.
    pub(crate) fn after(self, len: usize) -> Self {
        Self(self.0 + len.div_ceil(4) as u32)
    }
}

/// A part of a packet.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Header {
    Network,
    /// The rule does not match a fragment without the transport header.
    Transport,
}

/// The list of expressions of one rule under construction.
#[derive(Debug)]
pub(crate) struct Expressions<'a> {
    message: &'a mut Message,
}

impl<'a> Expressions<'a> {
    pub(crate) fn new(message: &'a mut Message) -> Self {
        Self { message }
    }

    /// `meta load`: `key` is one of `NFT_META_*`.
    pub(crate) fn meta(&mut self, key: libc::c_int, to: Register) {
        self.add("meta", |m| {
            m.be32(1, to.number()); // NFTA_META_DREG
            m.be32(2, key as u32); // NFTA_META_KEY
        });
    }

    /// `cmp eq`: the rule matches only if the register has this value.
    pub(crate) fn require(&mut self, register: Register, value: &[u8]) {
        self.add("cmp", |m| {
            m.be32(1, register.number()); // NFTA_CMP_SREG
            m.be32(2, libc::NFT_CMP_EQ as u32); // NFTA_CMP_OP
            m.nested(3, |m| m.attribute(DATA_VALUE, value)); // NFTA_CMP_DATA
        });
    }

    /// `payload load`: bytes of the packet.
    pub(crate) fn payload(&mut self, header: Header, offset: usize, len: usize, to: Register) {
        let base = match header {
            Header::Network => libc::NFT_PAYLOAD_NETWORK_HEADER,
            Header::Transport => libc::NFT_PAYLOAD_TRANSPORT_HEADER,
        };
        self.add("payload", |m| {
            m.be32(1, to.number()); // NFTA_PAYLOAD_DREG
            m.be32(2, base as u32); // NFTA_PAYLOAD_BASE
            m.be32(3, offset as u32); // NFTA_PAYLOAD_OFFSET
            m.be32(4, len as u32); // NFTA_PAYLOAD_LEN
        });
    }

    /// `lookup`: the rule matches only if the set has the key. The value of a map is loaded into
    /// `value`.
    pub(crate) fn lookup(&mut self, set: &str, id: u32, key: Register, value: Option<Register>) {
        self.add("lookup", |m| {
            m.text(1, set); // NFTA_LOOKUP_SET
            m.be32(2, key.number()); // NFTA_LOOKUP_SREG
            if let Some(value) = value {
                m.be32(3, value.number()); // NFTA_LOOKUP_DREG
            }
            m.be32(4, id); // NFTA_LOOKUP_SET_ID
        });
    }

    /// `fwd ip to`: sends the packet out of the interface with this index to the neighbour with this
    /// address. Decrements the TTL or hop limit, and drops the packet if it was 1.
    pub(crate) fn forward(&mut self, interface: Register, neighbour: Register, family: Family) {
        let protocol = match family {
            Family::V4 => libc::NFPROTO_IPV4,
            Family::V6 => libc::NFPROTO_IPV6,
        };
        self.add("fwd", |m| {
            m.be32(1, interface.number()); // NFTA_FWD_SREG_DEV
            m.be32(2, neighbour.number()); // NFTA_FWD_SREG_ADDR
            m.be32(3, protocol as u32); // NFTA_FWD_NFPROTO
        });
    }

    /// `immediate`: the verdict drop.
    pub(crate) fn drop(&mut self) {
        self.add("immediate", |m| {
            m.be32(1, 0); // NFTA_IMMEDIATE_DREG: NFT_REG_VERDICT
            // NFTA_IMMEDIATE_DATA
            m.nested(2, |m| {
                m.nested(DATA_VERDICT, |m| m.be32(VERDICT_CODE, libc::NF_DROP as u32));
            });
        });
    }

    fn add(&mut self, name: &str, fill: impl FnOnce(&mut Message)) {
        self.message.nested(RULE.expression, |m| {
            m.text(EXPRESSION.name, name);
            m.nested(EXPRESSION.data, fill);
        });
    }
}
