//! The report of `tern status`.

use crate::node::{Node, kernel_release};
use crate::peer::client;
use crate::peer::message::PeerReply;
use crate::process::process_list;
use std::sync::Arc;
use std::time::Duration;
use tern_control::{NodeRow, Refusal, StatusReport};
use tern_ids::NodeId;

/// Timeout of the pings of `tern status`.
const PING_TIMEOUT: Duration = Duration::from_secs(1);

/// Pings all other nodes and reports on the cluster.
pub(super) fn report(node: &Arc<Node>) -> StatusReport {
    let (away, guests) = process_list::counts(node);
    let mut nodes: Vec<_> =
        client::ping_all(node, PING_TIMEOUT).into_iter().map(|answer| row(node, answer)).collect();
    let open = if node.check_accepts_guests().is_ok() { "" } else { ", takes no guests" };
    nodes.push(NodeRow {
        node: node.me(),
        host: node.map().host(node.me()).unwrap_or_default(),
        up: true,
        rtt_ms: None,
        note: format!("this node, linux {}{open}", kernel_release()),
    });
    nodes.sort_by_key(|row| row.node);
    StatusReport {
        node: node.me(),
        version: env!("CARGO_PKG_VERSION").into(),
        cluster: node.identity.cluster().into(),
        nodes,
        away,
        guests,
    }
}

fn row(node: &Node, (peer, answer): (NodeId, Result<client::PeerResponse, Refusal>)) -> NodeRow {
    let host = node.map().host(peer).unwrap_or_default();
    let answer = match answer {
        Ok(answer) => answer,
        Err(refusal) => return NodeRow { node: peer, host, up: false, rtt_ms: None, note: refusal.message },
    };
    let mut note = format!("ternd {}", printable(&answer.hello.version));
    if let PeerReply::Pong { kernel, guests, accepts_guests } = &answer.reply {
        note += &format!(", linux {}, {guests} guests", printable(kernel));
        if !accepts_guests {
            note += ", takes no guests";
        }
    }
    let off = answer.clock_ahead.unsigned_abs();
    if u128::from(off) > client::MAX_CLOCK_OFFSET.as_nanos() + answer.round_trip.as_nanos() / 2 {
        note += &format!(", clock off by {} ms: not a destination", off / 1_000_000);
    }
    NodeRow { node: peer, host, up: true, rtt_ms: Some(answer.round_trip.as_secs_f64() * 1e3), note }
}

/// Text of another node, made safe for a terminal.
fn printable(text: &str) -> String {
    text.chars().filter(|c| c.is_ascii_graphic()).take(64).collect()
}
