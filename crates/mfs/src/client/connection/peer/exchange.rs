//! One exchange with a node: connecting, sending a request, waiting for its reply.

use super::{CALLBACK, PROBE, PROBE_INTERVAL, Peer, Response, State};
use crate::client::cache::unsynced::Boot;
use crate::message::{FileReply, FileRequest, Purpose, REPLY_FRAME, REQUEST_FRAME, VERSION};
use crate::{packing, send, set_keepalive};
use std::time::Instant;
use tern_node::map::Map;
use tern_wire::{ClientTls, FrameError, Link, LinkError, Preamble};

impl Peer {
    /// Sends a request and waits for its reply; meanwhile probes now and then whether the node is
    /// alive.
    pub(super) fn exchange(
        &self,
        link: &mut Link,
        boot: Boot,
        tag: u64,
        parts: &[&[u8]],
    ) -> Result<Response, ExchangeError> {
        send(link, REQUEST_FRAME, tag, parts, self.context.timeout)?;
        loop {
            let received = link.recv(Instant::now() + PROBE_INTERVAL);
            match received.and_then(|frame| packing::unpack(frame).ok_or(LinkError::Closed)) {
                Ok(frame) if frame.kind == REPLY_FRAME && frame.tag == tag => {
                    let length = frame.payload.len();
                    let ((recalls, reply), data) = postcard::take_from_bytes(&frame.payload)
                        .map_err(|_malformed| ExchangeError::Broken)?;
                    let data_offset = length - data.len();
                    return Ok(Response { reply, boot, recalls, frame: frame.payload, data_offset });
                }
                // An abandoned request abandons its connection, so no other reply can be due.
                Ok(_) => return Err(ExchangeError::Broken),
                Err(LinkError::Timeout) if self.is_alive() => {}
                Err(LinkError::Timeout) => return Err(ExchangeError::Lost),
                Err(_) => return Err(ExchangeError::Broken),
            }
        }
    }

    /// Whether the node has responded within the timeout; probes it.
    fn is_alive(&self) -> bool {
        let is_recent =
            |state: &State| state.last_response.is_some_and(|last| last.elapsed() < PROBE_INTERVAL);
        if is_recent(&self.state()) {
            return true;
        }
        let end = Instant::now() + PROBE_INTERVAL;
        let _ignored = self.connect(PROBE, 0, end);
        // The probe may have taken one interval of the timeout.
        let limit = self.context.timeout.saturating_sub(PROBE_INTERVAL).max(PROBE_INTERVAL);
        let state = self.state();
        state.last_response.is_some_and(|last| last.elapsed() < limit)
    }

    pub(super) fn connect(
        &self,
        number: u16,
        last_abandoned: u64,
        end: Instant,
    ) -> Result<(Link, Boot), ExchangeError> {
        let map = Map::read(&self.context.map).map_err(|_unreadable| ExchangeError::Broken)?;
        let address = map.address(self.node).map_err(|_unknown| ExchangeError::Lost)?;
        let tls: ClientTls =
            self.context.identity.cluster_client(self.node).map_err(|_unusable| ExchangeError::Lost)?;
        let end = end.min(Instant::now() + PROBE_INTERVAL);
        let mut link = Link::connect(&address, Preamble::Files, &tls, end)?;
        set_keepalive(&link).map_err(|_gone| ExchangeError::Broken)?;
        let (session, is_callback) = (self.context.session, number == CALLBACK);
        let purpose = self.context.purpose;
        let begin = FileRequest::Begin {
            version: VERSION,
            session,
            connection: number,
            abandoned: last_abandoned,
            is_callback,
            purpose,
        };
        let begin = tern_wire::encode(&begin).map_err(|_long| ExchangeError::Broken)?;
        link.send(REQUEST_FRAME, 0, &[&begin], end)?;
        let frame = link.recv(end)?;
        if (frame.kind, frame.tag) != (REPLY_FRAME, 0) {
            return Err(ExchangeError::Broken);
        }
        match tern_wire::decode(&frame.payload) {
            Ok((0, FileReply::Begun { is_new, boot_id })) => {
                if is_new && self.context.purpose == Purpose::Container {
                    self.invalidate_renewable();
                }
                let mut state = self.state();
                // This counts as a response, since the first reply on the connection may take
                // longer than a probe.
                state.last_response = Some(Instant::now());
                if is_new {
                    state.server_epoch += 1;
                    self.pending_releases.server_restarted();
                }
                if state.boot.0 != boot_id {
                    state.boot = (boot_id, state.boot.1 + 1);
                }
                Ok((link, state.boot.1))
            }
            Ok((_, FileReply::Refused(why))) => {
                tracing::warn!(node = %self.node, why, "the node refuses the connection");
                Err(ExchangeError::Refused)
            }
            _ => Err(ExchangeError::Broken),
        }
    }
}

/// The link, if its other end has not closed it; this saves a request that would fail. No frame can
/// be due on an idle connection, so one that has arrived is an error.
pub(super) fn if_open(mut link: Link) -> Option<Link> {
    matches!(link.receive(), Ok(None)).then_some(link)
}

/// Why a connection has brought no reply.
#[derive(Debug)]
pub(super) enum ExchangeError {
    /// This connection has failed; another may work.
    Broken,
    /// The node has not responded within the timeout.
    Lost,
    /// The node refuses this client.
    Refused,
    /// The request does not fit into a frame.
    TooLong,
}

impl From<LinkError> for ExchangeError {
    fn from(error: LinkError) -> Self {
        if matches!(error, LinkError::Frame(FrameError::TooLong(_))) { Self::TooLong } else { Self::Broken }
    }
}
