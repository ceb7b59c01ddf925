//! One TLS session over buffers that the link owns; no socket here.

use crate::frame::{Decoder, Frame, FrameError, header};
use crate::limits::RECORD;
use crate::link::LinkError;
use crate::outgoing::Stretch;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::CertificateDer;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus, WriteTraffic};
use std::collections::VecDeque;
use std::fmt;

/// Bytes that a record is longer than what it carries, generously.
const RECORD_OVERHEAD: usize = 64;
/// A frame shorter than this is gathered in less than a record.
const SHORT: usize = 512;

/// Either end.
pub(crate) enum Session {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Client(_) => "Client",
            Self::Server(_) => "Server",
        })
    }
}

/// What one step came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Something happened; step again.
    Progress,
    /// All that has come is used up.
    NeedsInput,
    /// What was to be sent is in the outgoing buffer.
    Sealed,
    /// The peer has said goodbye.
    Closed,
}

/// What is to be done once the session can send.
pub(crate) enum Wish<'a> {
    /// Nothing: take in what has come.
    Receive,
    /// Seal this frame.
    Seal(&'a Outbound<'a>),
    /// Say goodbye.
    Goodbye,
}

/// A frame to be sent, in parts.
pub(crate) struct Outbound<'a> {
    pub(crate) kind: u8,
    pub(crate) flags: u16,
    pub(crate) tag: u64,
    pub(crate) parts: &'a [&'a [u8]],
}

/// Frames that have come.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    pub(crate) decoder: Decoder,
    ready: VecDeque<Frame>,
    /// Payload bytes in `ready`.
    bytes: usize,
}

impl Inbox {
    fn take(&mut self, mut plain: &[u8]) -> Result<(), FrameError> {
        while !plain.is_empty() {
            if let Some(frame) = self.decoder.feed(&mut plain)? {
                self.bytes += frame.payload.len();
                self.ready.push_back(frame);
            }
        }
        Ok(())
    }

    pub(crate) fn pop(&mut self) -> Option<Frame> {
        let frame = self.ready.pop_front()?;
        self.bytes -= frame.payload.len();
        Some(frame)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Session {
    /// Works off one thing.
    pub(crate) fn step(
        &mut self,
        wish: &Wish<'_>,
        incoming: &mut Stretch,
        outgoing: &mut Stretch,
        inbox: &mut Inbox,
    ) -> Result<Step, LinkError> {
        let (used, outcome) = match self {
            Self::Client(c) => act(c.process_tls_records(incoming.filled()), wish, outgoing, inbox),
            Self::Server(c) => act(c.process_tls_records(incoming.filled()), wish, outgoing, inbox),
        };
        incoming.consume(used);
        outcome
    }

    pub(crate) fn is_handshaking(&self) -> bool {
        match self {
            Self::Client(c) => c.is_handshaking(),
            Self::Server(c) => c.is_handshaking(),
        }
    }

    pub(crate) fn peer_certificate(&self) -> Option<CertificateDer<'static>> {
        let chain = match self {
            Self::Client(c) => c.peer_certificates(),
            Self::Server(c) => c.peer_certificates(),
        };
        chain?.first().map(|c| c.clone().into_owned())
    }
}

fn act<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    wish: &Wish<'_>,
    outgoing: &mut Stretch,
    inbox: &mut Inbox,
) -> (usize, Result<Step, LinkError>) {
    let outcome = match status.state {
        Err(e) => Err(e.into()),
        Ok(ConnectionState::ReadTraffic(mut traffic)) => {
            let mut outcome = Ok(Step::Progress);
            while let Some(record) = traffic.next_record() {
                let taken = record.map_err(LinkError::from).and_then(|r| Ok(inbox.take(r.payload)?));
                if let Err(e) = taken {
                    outcome = Err(e);
                    break;
                }
            }
            outcome
        }
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            let mut room = RECORD_OVERHEAD;
            loop {
                match data.encode(outgoing.room(room)) {
                    Ok(count) => {
                        outgoing.grown(count);
                        break Ok(Step::Progress);
                    }
                    Err(EncodeError::InsufficientSize(short)) => room = short.required_size,
                    Err(EncodeError::AlreadyEncoded) => break Ok(Step::Progress),
                }
            }
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            // The bytes keep their place in the outgoing buffer, before anything that is sealed later.
            data.done();
            Ok(Step::Progress)
        }
        Ok(ConnectionState::WriteTraffic(mut traffic)) => match wish {
            Wish::Receive => Ok(Step::NeedsInput),
            Wish::Seal(frame) => seal(&mut traffic, frame, outgoing).map(|()| Step::Sealed),
            Wish::Goodbye => {
                let count = traffic.queue_close_notify(outgoing.room(RECORD_OVERHEAD));
                count.map_err(exhausted).map(|count| {
                    outgoing.grown(count);
                    Step::Sealed
                })
            }
        },
        Ok(ConnectionState::BlockedHandshake) => Ok(Step::NeedsInput),
        // Goodbye, or early data, which is never offered.
        Ok(_) => Ok(Step::Closed),
    };
    (status.discard, outcome)
}

fn exhausted(error: EncryptError) -> LinkError {
    LinkError::Tls(rustls::Error::General(error.to_string()))
}

/// Seals a frame into records. What is short goes into one record together with the header; whole records
/// are sealed straight from the caller's memory.
fn seal<Data>(
    traffic: &mut WriteTraffic<'_, Data>,
    frame: &Outbound<'_>,
    outgoing: &mut Stretch,
) -> Result<(), LinkError> {
    let length = frame.parts.iter().map(|p| p.len()).sum();
    let head = header(frame.kind, frame.flags, frame.tag, length)?;
    // Most frames are short: to clear a record's length for each would take longer than to seal it.
    let (mut short, mut long);
    let gathered: &mut [u8] = if head.len() + length < SHORT {
        short = [0; SHORT];
        &mut short
    } else {
        long = [0; RECORD];
        &mut long
    };
    let mut have = head.len();
    gathered[..have].copy_from_slice(&head);
    for part in frame.parts {
        let mut part = *part;
        while !part.is_empty() {
            if have == 0 && part.len() >= RECORD {
                let (whole, rest) = part.split_at(part.len() - part.len() % RECORD);
                encrypt(traffic, whole, outgoing)?;
                part = rest;
                continue;
            }
            let (now, rest) = part.split_at((RECORD - have).min(part.len()));
            gathered[have..have + now.len()].copy_from_slice(now);
            have += now.len();
            part = rest;
            if have == RECORD {
                encrypt(traffic, gathered, outgoing)?;
                have = 0;
            }
        }
    }
    encrypt(traffic, &gathered[..have], outgoing)
}

fn encrypt<Data>(
    traffic: &mut WriteTraffic<'_, Data>,
    plain: &[u8],
    outgoing: &mut Stretch,
) -> Result<(), LinkError> {
    let records = plain.len() / RECORD + 1;
    let mut room = plain.len() + records * RECORD_OVERHEAD;
    loop {
        match traffic.encrypt(plain, outgoing.room(room)) {
            Ok(count) => {
                outgoing.grown(count);
                return Ok(());
            }
            Err(EncryptError::InsufficientSize(short)) if short.required_size > room => {
                room = short.required_size;
            }
            Err(e) => return Err(exhausted(e)),
        }
    }
}
