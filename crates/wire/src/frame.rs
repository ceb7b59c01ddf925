//! The frame: a header of 16 bytes, and a payload.
//!
//! ```text
//!  0       version of this format
//!  1       kind, defined by the user of the link
//!  2..4    flags, defined by the user of the link (little endian, like all numbers in a header)
//!  4..8    length of the payload, at most limits::MAX_PAYLOAD
//!  8..16   tag, defined by the user of the link: the request that it answers, an address, …
//!  16..    payload
//! ```
//! No I/O here: the caller passes received bytes to the [`Decoder`].

use crate::limits::{FRAME_VERSION, HEADER_LEN, MAX_PAYLOAD};

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The kind, defined by the user of the link.
    pub kind: u8,
    /// Free for the user of the link.
    pub flags: u16,
    /// Free for the user of the link.
    pub tag: u64,
    /// At most [`MAX_PAYLOAD`] bytes.
    pub payload: Vec<u8>,
}

/// Why bytes are not a frame. The rest of the stream cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The first byte is another version.
    #[error("the peer uses frame version {0:#x}, this node {FRAME_VERSION:#x}")]
    Version(u8),
    /// The payload is longer than [`MAX_PAYLOAD`], or than [`Decoder::limit_payload`] allows.
    #[error("a frame of {0} bytes is longer than the limit")]
    TooLong(usize),
}

/// Encodes a header.
///
/// # Errors
/// If the payload is longer than [`MAX_PAYLOAD`].
pub fn header(kind: u8, flags: u16, tag: u64, length: usize) -> Result<[u8; HEADER_LEN], FrameError> {
    let wire_length =
        u32::try_from(length).ok().filter(|_| length <= MAX_PAYLOAD).ok_or(FrameError::TooLong(length))?;
    let mut bytes = [0; HEADER_LEN];
    bytes[0] = FRAME_VERSION;
    bytes[1] = kind;
    bytes[2..4].copy_from_slice(&flags.to_le_bytes());
    bytes[4..8].copy_from_slice(&wire_length.to_le_bytes());
    bytes[8..].copy_from_slice(&tag.to_le_bytes());
    Ok(bytes)
}

/// Decodes a header. Returns the frame without its payload, and the payload's length.
fn parse(bytes: [u8; HEADER_LEN]) -> Result<(Frame, usize), FrameError> {
    let [version, kind, f0, f1, l0, l1, l2, l3, tag @ ..] = bytes;
    if version != FRAME_VERSION {
        return Err(FrameError::Version(version));
    }
    let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    if length > MAX_PAYLOAD {
        return Err(FrameError::TooLong(length));
    }
    let (flags, tag) = (u16::from_le_bytes([f0, f1]), u64::from_le_bytes(tag));
    Ok((Frame { kind, flags, tag, payload: Vec::new() }, length))
}

/// Decodes frames from bytes that arrive in arbitrary pieces. Buffers at most one incomplete
/// payload, in memory of the length that its header states, which is at most [`MAX_PAYLOAD`].
#[derive(Debug)]
pub struct Decoder {
    head: [u8; HEADER_LEN],
    /// Number of bytes in `head`.
    head_len: usize,
    /// The incomplete frame and its payload's length, once the header is complete.
    incomplete: Option<(Frame, usize)>,
    /// A recycled payload buffer.
    spare: Vec<u8>,
    /// Maximum payload length.
    max_payload: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self {
            head: [0; HEADER_LEN],
            head_len: 0,
            incomplete: None,
            spare: Vec::new(),
            max_payload: MAX_PAYLOAD,
        }
    }
}

impl Decoder {
    /// Limits the length of the following payloads to `max`, at most [`MAX_PAYLOAD`]. Does not
    /// apply to a frame already begun.
    pub fn limit_payload(&mut self, max: usize) {
        self.max_payload = max.min(MAX_PAYLOAD);
    }

    /// Consumes bytes from the front of `input` until a frame is complete or the input is empty.
    ///
    /// # Errors
    /// If the bytes are not a frame. The decoder must not be used any more.
    pub fn feed(&mut self, input: &mut &[u8]) -> Result<Option<Frame>, FrameError> {
        let (mut frame, length) = match self.incomplete.take() {
            Some(incomplete) => incomplete,
            None => {
                let (head, rest) = input.split_at((HEADER_LEN - self.head_len).min(input.len()));
                self.head[self.head_len..self.head_len + head.len()].copy_from_slice(head);
                self.head_len += head.len();
                *input = rest;
                if self.head_len < HEADER_LEN {
                    return Ok(None);
                }
                self.head_len = 0;
                let (mut frame, length) = parse(self.head)?;
                if length > self.max_payload {
                    return Err(FrameError::TooLong(length));
                }
                frame.payload = std::mem::take(&mut self.spare);
                frame.payload.clear();
                frame.payload.reserve_exact(length);
                (frame, length)
            }
        };
        let (body, rest) = input.split_at((length - frame.payload.len()).min(input.len()));
        frame.payload.extend_from_slice(body);
        *input = rest;
        if frame.payload.len() == length {
            return Ok(Some(frame));
        }
        self.incomplete = Some((frame, length));
        Ok(None)
    }

    /// Returns a payload buffer for reuse by a later frame.
    pub fn recycle(&mut self, payload: Vec<u8>) {
        if payload.capacity() > self.spare.capacity() {
            self.spare = payload;
        }
    }

    /// Whether a part of a frame was received.
    pub fn is_within_frame(&self) -> bool {
        self.head_len > 0 || self.incomplete.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes_of(frame: &Frame) -> Vec<u8> {
        let mut bytes = header(frame.kind, frame.flags, frame.tag, frame.payload.len()).unwrap().to_vec();
        bytes.extend_from_slice(&frame.payload);
        bytes
    }

    fn any_frame() -> impl Strategy<Value = Frame> {
        (any::<u8>(), any::<u16>(), any::<u64>(), prop::collection::vec(any::<u8>(), 0..300))
            .prop_map(|(kind, flags, tag, payload)| Frame { kind, flags, tag, payload })
    }

    proptest! {
        #[test]
        fn frames_decode_from_any_pieces(
            frames in prop::collection::vec(any_frame(), 0..8),
            cuts in prop::collection::vec(1usize..97, 1..20),
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(bytes_of).collect();
            let (mut decoder, mut read, mut at) = (Decoder::default(), Vec::new(), 0);
            for cut in cuts.iter().cycle() {
                let mut piece = &bytes[at..(at + cut).min(bytes.len())];
                at += piece.len();
                while !piece.is_empty() {
                    if let Some(frame) = decoder.feed(&mut piece).unwrap() {
                        read.push(frame);
                    }
                }
                if at == bytes.len() {
                    break;
                }
            }
            prop_assert_eq!(read, frames);
            prop_assert!(!decoder.is_within_frame());
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let (mut decoder, mut rest) = (Decoder::default(), &bytes[..]);
            while !rest.is_empty() && decoder.feed(&mut rest).is_ok() {}
        }
    }

    #[test]
    fn a_frame_without_payload_is_complete_with_its_header() {
        let bytes = header(3, 0, 7, 0).unwrap();
        let frame = Decoder::default().feed(&mut &bytes[..]).unwrap().unwrap();
        assert_eq!((frame.kind, frame.tag, frame.payload.len()), (3, 7, 0));
    }

    #[test]
    fn lengths_beyond_the_limit_are_refused_both_ways() {
        assert_eq!(header(0, 0, 0, MAX_PAYLOAD + 1), Err(FrameError::TooLong(MAX_PAYLOAD + 1)));
        let mut bytes = header(0, 0, 0, MAX_PAYLOAD).unwrap();
        assert_eq!(Decoder::default().feed(&mut &bytes[..]), Ok(None));
        bytes[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(Decoder::default().feed(&mut &bytes[..]), Err(FrameError::TooLong(u32::MAX as usize)));
    }

    #[test]
    fn decoder_limit_can_be_lowered() {
        let mut decoder = Decoder::default();
        decoder.limit_payload(10);
        assert_eq!(decoder.feed(&mut &header(0, 0, 0, 11).unwrap()[..]), Err(FrameError::TooLong(11)));
        let mut decoder = Decoder::default();
        decoder.limit_payload(usize::MAX);
        assert_eq!(decoder.feed(&mut &header(0, 0, 0, MAX_PAYLOAD).unwrap()[..]), Ok(None));
    }

    #[test]
    fn another_version_is_refused() {
        let mut bytes = header(0, 0, 0, 0).unwrap();
        bytes[0] = 1;
        assert_eq!(Decoder::default().feed(&mut &bytes[..]), Err(FrameError::Version(1)));
    }

    #[test]
    fn a_recycled_payload_is_used_again() {
        let mut decoder = Decoder::default();
        let bytes = bytes_of(&Frame { kind: 1, flags: 0, tag: 0, payload: vec![5; 1000] });
        let first = decoder.feed(&mut &bytes[..]).unwrap().unwrap();
        let address = first.payload.as_ptr();
        decoder.recycle(first.payload);
        let second = decoder.feed(&mut &bytes[..]).unwrap().unwrap();
        assert_eq!((second.payload.as_ptr(), second.payload.len()), (address, 1000));
    }
}
