//! A TLS session over buffers that the link owns, without a socket.

use crate::byte_queue::ByteQueue;
use crate::frame::{Decoder, Frame, FrameError, header};
use crate::limits::MAX_RECORD;
use crate::link::LinkError;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::CertificateDer;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus, WriteTraffic};
use std::collections::VecDeque;
use std::fmt;

/// Upper bound of the bytes by which a record is longer than its plaintext.
const RECORD_OVERHEAD: usize = 64;
/// Frames shorter than this are assembled in a buffer that is smaller than a record.
const SHORT_FRAME: usize = 512;

/// The client's or the server's end.
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

/// The result of one step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum StepResult {
    /// Something was processed; step again.
    Progress,
    /// All received bytes are processed.
    NeedsInput,
    /// The requested frame, or the close notification, is in the outgoing buffer.
    Encrypted,
    /// The peer closed the session.
    Closed,
}

/// The action to take once the session can send.
pub(crate) enum Action<'a> {
    /// Only process received bytes.
    Receive,
    /// Encrypt this frame.
    Encrypt(&'a OutgoingFrame<'a>),
    /// Send the close notification.
    Close,
}

/// A frame to send, with its payload in several parts.
pub(crate) struct OutgoingFrame<'a> {
    pub(crate) kind: u8,
    pub(crate) flags: u16,
    pub(crate) tag: u64,
    pub(crate) parts: &'a [&'a [u8]],
}

/// Received frames.
#[derive(Debug, Default)]
pub(crate) struct FrameQueue {
    pub(crate) decoder: Decoder,
    ready: VecDeque<Frame>,
    /// Payload bytes in `ready`.
    bytes: usize,
}

impl FrameQueue {
    /// Adds decrypted bytes, and moves complete frames to `ready`.
    fn feed(&mut self, mut plain: &[u8]) -> Result<(), FrameError> {
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
    /// Processes one TLS state.
    pub(crate) fn step(
        &mut self,
        action: &Action<'_>,
        incoming: &mut ByteQueue,
        outgoing: &mut ByteQueue,
        inbox: &mut FrameQueue,
    ) -> Result<StepResult, LinkError> {
        let (used, outcome) = match self {
            Self::Client(c) => run_action(c.process_tls_records(incoming.filled()), action, outgoing, inbox),
            Self::Server(c) => run_action(c.process_tls_records(incoming.filled()), action, outgoing, inbox),
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

fn run_action<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    action: &Action<'_>,
    outgoing: &mut ByteQueue,
    inbox: &mut FrameQueue,
) -> (usize, Result<StepResult, LinkError>) {
    let outcome = match status.state {
        Err(e) => Err(e.into()),
        Ok(ConnectionState::ReadTraffic(mut traffic)) => {
            let mut outcome = Ok(StepResult::Progress);
            while let Some(record) = traffic.next_record() {
                let taken = record.map_err(LinkError::from).and_then(|r| Ok(inbox.feed(r.payload)?));
                if let Err(e) = taken {
                    outcome = Err(e);
                    break;
                }
            }
            outcome
        }
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            let mut size = RECORD_OVERHEAD;
            loop {
                match data.encode(outgoing.free_space(size)) {
                    Ok(count) => {
                        outgoing.commit(count);
                        break Ok(StepResult::Progress);
                    }
                    Err(EncodeError::InsufficientSize(short)) => size = short.required_size,
                    Err(EncodeError::AlreadyEncoded) => break Ok(StepResult::Progress),
                }
            }
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            // The bytes stay in the outgoing buffer, before any that are encrypted later.
            data.done();
            Ok(StepResult::Progress)
        }
        Ok(ConnectionState::WriteTraffic(mut traffic)) => match action {
            Action::Receive => Ok(StepResult::NeedsInput),
            Action::Encrypt(frame) => {
                encrypt_frame(&mut traffic, frame, outgoing).map(|()| StepResult::Encrypted)
            }
            Action::Close => {
                let count = traffic.queue_close_notify(outgoing.free_space(RECORD_OVERHEAD));
                count.map_err(encrypt_error).map(|count| {
                    outgoing.commit(count);
                    StepResult::Encrypted
                })
            }
        },
        Ok(ConnectionState::BlockedHandshake) => Ok(StepResult::NeedsInput),
        // Closed, or early data, which this side never offers.
        Ok(_) => Ok(StepResult::Closed),
    };
    (status.discard, outcome)
}

fn encrypt_error(error: EncryptError) -> LinkError {
    LinkError::Tls(rustls::Error::General(error.to_string()))
}

/// Encrypts a frame into records. The first record has the header and the beginning of the payload.
/// Further whole records within one part are encrypted directly from the caller's memory.
fn encrypt_frame<Data>(
    traffic: &mut WriteTraffic<'_, Data>,
    frame: &OutgoingFrame<'_>,
    outgoing: &mut ByteQueue,
) -> Result<(), LinkError> {
    let length = frame.parts.iter().map(|p| p.len()).sum();
    let head = header(frame.kind, frame.flags, frame.tag, length)?;
    // Most frames are short, and clearing a record-sized buffer for each would take longer than
    // encrypting it.
    let (mut short, mut long);
    let gathered: &mut [u8] = if head.len() + length < SHORT_FRAME {
        short = [0; SHORT_FRAME];
        &mut short
    } else {
        long = [0; MAX_RECORD];
        &mut long
    };
    let mut have = head.len();
    gathered[..have].copy_from_slice(&head);
    for part in frame.parts {
        let mut part = *part;
        while !part.is_empty() {
            if have == 0 && part.len() >= MAX_RECORD {
                let (whole, rest) = part.split_at(part.len() - part.len() % MAX_RECORD);
                encrypt(traffic, whole, outgoing)?;
                part = rest;
                continue;
            }
            let (now, rest) = part.split_at((MAX_RECORD - have).min(part.len()));
            gathered[have..have + now.len()].copy_from_slice(now);
            have += now.len();
            part = rest;
            if have == MAX_RECORD {
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
    outgoing: &mut ByteQueue,
) -> Result<(), LinkError> {
    let records = plain.len() / MAX_RECORD + 1;
    let mut size = plain.len() + records * RECORD_OVERHEAD;
    loop {
        match traffic.encrypt(plain, outgoing.free_space(size)) {
            Ok(count) => {
                outgoing.commit(count);
                return Ok(());
            }
            Err(EncryptError::InsufficientSize(short)) if short.required_size > size => {
                size = short.required_size;
            }
            Err(e) => return Err(encrypt_error(e)),
        }
    }
}
