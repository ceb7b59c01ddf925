//! Frames on a Unix socket: kind, stream, length, payload. Links between nodes carry the same
//! fields in their own frames.

use crate::messages::MAX_DATA_LEN;
use serde::{Serialize, de::DeserializeOwned};
use std::io::{self, ErrorKind, Read, Write};
use tern_wire::limits::MAX_PAYLOAD;

/// Bytes of a frame's header.
const HEADER_LEN: usize = 6;

/// A frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalFrame {
    /// One of [`kind`](crate::messages::kind).
    pub kind: u8,
    /// The stream that it belongs to, if its kind uses streams.
    pub stream: u8,
    /// The payload.
    pub payload: Vec<u8>,
}

impl LocalFrame {
    /// Whether stream and length are valid for its kind. A connection that carries an invalid frame
    /// is dropped.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        use crate::messages::kind;
        match self.kind {
            kind::DATA => self.payload.len() <= MAX_DATA_LEN && self.stream < 3,
            kind::END | kind::CREDIT => self.payload.len() <= 4 && self.stream < 3,
            kind::JOB_REQUEST | kind::EXEC_REQUEST | kind::EXEC_REPLY => true,
            _ => self.payload.len() <= 64,
        }
    }
}

/// Encodes a frame.
#[must_use]
pub fn encode_frame(kind: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(HEADER_LEN + payload.len());
    frame.extend_from_slice(&[kind, stream]);
    frame.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// Writes a message as a frame of stream 0.
///
/// # Errors
/// Those of the socket, or if the message is too long.
pub fn write_message<T: Serialize>(to: &mut impl Write, kind: u8, message: &T) -> io::Result<()> {
    let payload = tern_wire::encode(message).map_err(io::Error::other)?;
    to.write_all(&encode_frame(kind, 0, &payload))
}

/// Reads a frame, blocking until it is complete.
///
/// # Errors
/// Those of the socket; `InvalidData` if the length is invalid.
pub fn read_frame(from: &mut impl Read) -> io::Result<LocalFrame> {
    let mut header = [0; HEADER_LEN];
    from.read_exact(&mut header)?;
    let (kind, stream, length) = decode_header(header)?;
    let mut payload = Vec::new();
    // Read through `take`, so that a forged length allocates only what really arrives.
    from.take(length as u64).read_to_end(&mut payload)?;
    if payload.len() < length {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(LocalFrame { kind, stream, payload })
}

/// Decodes a payload.
///
/// # Errors
/// If it is no such message.
pub fn decode<T: DeserializeOwned>(payload: &[u8]) -> io::Result<T> {
    tern_wire::decode(payload).map_err(|e| io::Error::new(ErrorKind::InvalidData, e))
}

fn decode_header([kind, stream, l0, l1, l2, l3]: [u8; HEADER_LEN]) -> io::Result<(u8, u8, usize)> {
    let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    if length > MAX_PAYLOAD {
        return Err(io::Error::new(ErrorKind::InvalidData, "frame too long"));
    }
    Ok((kind, stream, length))
}

/// Receive buffer of a non-blocking socket that carries frames.
#[derive(Debug, Default)]
pub struct FrameReader(Vec<u8>);

impl FrameReader {
    /// Reads the available bytes. Returns false if the peer has closed the connection.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn fill(&mut self, from: &mut impl Read) -> io::Result<bool> {
        let mut bytes = [0; MAX_DATA_LEN];
        match from.read(&mut bytes) {
            Ok(0) => Ok(false),
            Ok(count) => {
                self.0.extend_from_slice(&bytes[..count]);
                Ok(true)
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(true),
            Err(e) => Err(e),
        }
    }

    /// The next frame, if it is complete.
    ///
    /// # Errors
    /// If its length is invalid.
    pub fn next_frame(&mut self) -> io::Result<Option<LocalFrame>> {
        let Some(header) = self.0.first_chunk::<HEADER_LEN>() else { return Ok(None) };
        let (kind, stream, length) = decode_header(*header)?;
        if self.0.len() < HEADER_LEN + length {
            return Ok(None);
        }
        let payload = self.0[HEADER_LEN..HEADER_LEN + length].to_vec();
        self.0.drain(..HEADER_LEN + length);
        Ok(Some(LocalFrame { kind, stream, payload }))
    }
}

/// Send buffer of a non-blocking socket.
#[derive(Debug, Default)]
pub struct FrameWriter {
    bytes: Vec<u8>,
    sent: usize,
}

impl FrameWriter {
    /// Appends a frame.
    pub fn push(&mut self, kind: u8, stream: u8, payload: &[u8]) {
        // A socket that always accepts some bytes but never all would otherwise make the buffer
        // grow for ever.
        if self.sent > self.bytes.len() / 2 {
            self.bytes.drain(..self.sent);
            self.sent = 0;
        }
        self.bytes.extend_from_slice(&encode_frame(kind, stream, payload));
    }

    /// Number of unsent bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// Whether all bytes are sent.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes as much as the socket accepts.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn flush(&mut self, to: &mut impl Write) -> io::Result<()> {
        while !self.is_empty() {
            match to.write(&self.bytes[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        self.bytes.clear();
        self.sent = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_reassembled_from_parts_of_any_size() {
        let sent =
            [encode_frame(4, 1, b"some"), encode_frame(5, 2, b""), encode_frame(4, 1, &[7; 70_000])].concat();
        for size in [1, 5, 4096, 1 << 20] {
            let (mut reader, mut got) = (FrameReader::default(), Vec::new());
            for mut part in sent.chunks(size) {
                while !part.is_empty() && reader.fill(&mut part).unwrap() {
                    while let Some(frame) = reader.next_frame().unwrap() {
                        got.push((frame.kind, frame.stream, frame.payload.len()));
                    }
                }
            }
            assert_eq!(got, [(4, 1, 4), (5, 2, 0), (4, 1, 70_000)], "in parts of {size}");
        }
        assert!(read_frame(&mut &sent[..8]).is_err());
    }

    #[test]
    fn invalid_length_is_refused() {
        let mut reader = FrameReader::default();
        reader.fill(&mut &[4, 1, 0xff, 0xff, 0xff, 0xff][..]).unwrap();
        assert!(reader.next_frame().is_err());
        assert!(read_frame(&mut &[4, 1, 0xff, 0xff, 0xff, 0xff][..]).is_err());
    }

    #[test]
    fn bytes_sent_to_a_slow_socket_are_not_kept() {
        /// Accepts this number of bytes, and would block then.
        struct Slow(usize);
        impl Write for Slow {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                let accepted = self.0.min(bytes.len());
                self.0 -= accepted;
                if accepted == 0 { Err(ErrorKind::WouldBlock.into()) } else { Ok(accepted) }
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut writer = FrameWriter::default();
        writer.push(4, 1, &[7; 10_000]);
        for _ in 0..10_000 {
            writer.push(4, 1, &[7; 1000]);
            writer.flush(&mut Slow(1000 + HEADER_LEN)).unwrap();
        }
        assert!(
            writer.len() == 10_000 + HEADER_LEN && writer.bytes.capacity() < 100_000,
            "{}",
            writer.bytes.capacity()
        );
    }

    #[test]
    fn frame_with_wrong_size_or_stream_is_invalid() {
        let frame = |kind, stream, length| LocalFrame { kind, stream, payload: vec![0; length] };
        use crate::messages::kind;
        assert!(frame(kind::DATA, 2, MAX_DATA_LEN).is_valid() && frame(kind::CREDIT, 0, 4).is_valid());
        assert!(!frame(kind::DATA, 3, 1).is_valid() && !frame(kind::DATA, 0, MAX_DATA_LEN + 1).is_valid());
        assert!(!frame(kind::HEARTBEAT, 0, 65).is_valid());
    }
}
