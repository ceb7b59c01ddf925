//! The requests of a guest's node to a home, and the replies. The guest's node requests every move of
//! a connection; home performs it, or refuses.
//!
//! ```text
//!  path:    Examine ──▶ Done              home has sent a packet with its address to the node
//!           HasArrived ──▶ Done           one with home's address has arrived from the node
//!  tunnel:  Tunnel ──▶ Done               the link carries packets from here on
//!
//!  take:    Take ──▶ Taken(connection)    home holds the client's packets
//!           Commit ──▶ Done               they go to the guest's node from here on
//!  return:  Recall ──▶ Done               home holds the client's packets
//!           Return(connection) ──▶ Done   home's socket has the connection again
//! ```
//! Each step of a move may be repeated after a cut link, and takes effect once.

use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use tern_ids::ConnectionToken;
use tern_redirect::ProbeToken;
use tern_tcp::Connection;

/// The version of this protocol and of the connections in it.
pub const VERSION: u32 = (2 << 16) | tern_tcp::VERSION as u32;

/// A request about a connection. The number of a move is the one that came with `Taken`: a request
/// that a cut link has delayed does not affect a later move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetRequest {
    /// The first request on a link.
    Begin {
        /// [`VERSION`].
        version: u32,
    },
    /// Send a packet as those of moved connections are sent, to an address of home, and look for one
    /// that comes from this node.
    Examine {
        /// The address at which this node reaches home.
        address: IpAddr,
        /// Content of the packets.
        token: ProbeToken,
    },
    /// Has this node's packet arrived?
    HasArrived {
        /// Its content.
        token: ProbeToken,
    },
    /// Use this link as a tunnel. No other request follows.
    Tunnel,
    /// Stop the connection at home, and send it.
    Take(ConnectionToken),
    /// The connection could not be taken: continue it at home.
    Cancel(ConnectionToken),
    /// A step of a move.
    Step(ConnectionToken, u64, Step),
}

/// A step of a move that home has begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// The connection is restored on the guest's node: its packets must go there, directly or through
    /// the tunnel.
    Commit {
        /// Through the tunnel that this node has connected.
        tunnel: bool,
    },
    /// The connection is to return: hold its packets.
    Recall,
    /// Continue the connection at home, as it is here.
    Return(Box<Connection>),
    /// The connection does not return after all: its packets must go to the guest's node again.
    Keep,
    /// The connection has ended on the guest's node.
    Gone,
}

/// A reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetReply {
    /// Done, or done before.
    Done,
    /// To `Take`, with the number of the move.
    Taken(u64, Box<Connection>, ClientRoute),
    /// Not done. One sentence.
    Refused(String),
}

/// Home's route to a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientRoute {
    /// The client itself, or the router to it.
    pub next_hop: IpAddr,
    /// Longest packet to the client, in bytes.
    pub mtu: u32,
}
