//! Pieces on a Unix socket: kind, stream, length, bytes. Between nodes the link's frames carry the same.

use crate::words::PIECE;
use serde::{Serialize, de::DeserializeOwned};
use std::io::{self, ErrorKind, Read, Write};
use tern_wire::limits::MOST_PAYLOAD;

/// Bytes before each piece.
const HEAD: usize = 6;

/// A piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// One of [`kind`](crate::words::kind).
    pub kind: u8,
    /// Of which stream, where that matters.
    pub stream: u8,
    /// What it carries.
    pub bytes: Vec<u8>,
}

impl Piece {
    /// Whether it is of a size that its kind can have; who sends others is not heard any further.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        use crate::words::kind;
        match self.kind {
            kind::DATA => self.bytes.len() <= PIECE && self.stream < 3,
            kind::END | kind::TAKEN => self.bytes.len() <= 4 && self.stream < 3,
            kind::ORDER | kind::ASK | kind::SAID => true,
            _ => self.bytes.len() <= 64,
        }
    }
}

/// The bytes of a piece.
#[must_use]
pub fn whole(kind: u8, stream: u8, bytes: &[u8]) -> Vec<u8> {
    let mut whole = Vec::with_capacity(HEAD + bytes.len());
    whole.extend_from_slice(&[kind, stream]);
    whole.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    whole.extend_from_slice(bytes);
    whole
}

/// Writes a message as a piece.
///
/// # Errors
/// Those of the socket, or that it is too long.
pub fn say<T: Serialize>(to: &mut impl Write, kind: u8, message: &T) -> io::Result<()> {
    let bytes = tern_wire::encode(message).map_err(io::Error::other)?;
    to.write_all(&whole(kind, 0, &bytes))
}

/// Reads a piece, waiting for it.
///
/// # Errors
/// Those of the socket, or that what comes is no piece.
pub fn hear(from: &mut impl Read) -> io::Result<Piece> {
    let mut head = [0; HEAD];
    from.read_exact(&mut head)?;
    let (kind, stream, length) = read_head(head)?;
    let mut bytes = Vec::new();
    // Read through `take`, so that a false length allocates only what really comes.
    from.take(length as u64).read_to_end(&mut bytes)?;
    if bytes.len() < length {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(Piece { kind, stream, bytes })
}

/// What a piece says.
///
/// # Errors
/// If it is no such message.
pub fn read<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    tern_wire::decode(bytes).map_err(|e| io::Error::new(ErrorKind::InvalidData, e))
}

fn read_head([kind, stream, l0, l1, l2, l3]: [u8; HEAD]) -> io::Result<(u8, u8, usize)> {
    let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    if length > MOST_PAYLOAD {
        return Err(io::Error::new(ErrorKind::InvalidData, "a piece longer than any"));
    }
    Ok((kind, stream, length))
}

/// What has come of pieces on a socket that is not waited for.
#[derive(Debug, Default)]
pub struct Inbox(Vec<u8>);

impl Inbox {
    /// Takes what is there; false if the other end has closed.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn fill(&mut self, from: &mut impl Read) -> io::Result<bool> {
        let mut bytes = [0; PIECE];
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

    /// The next piece, if it has come whole.
    ///
    /// # Errors
    /// If it is no piece.
    pub fn piece(&mut self) -> io::Result<Option<Piece>> {
        let Some(head) = self.0.first_chunk::<HEAD>() else { return Ok(None) };
        let (kind, stream, length) = read_head(*head)?;
        if self.0.len() < HEAD + length {
            return Ok(None);
        }
        let bytes = self.0[HEAD..HEAD + length].to_vec();
        self.0.drain(..HEAD + length);
        Ok(Some(Piece { kind, stream, bytes }))
    }
}

/// What waits for a socket that may take it later.
#[derive(Debug, Default)]
pub struct Outbox {
    bytes: Vec<u8>,
    at: usize,
}

impl Outbox {
    /// Adds a piece.
    pub fn add(&mut self, kind: u8, stream: u8, bytes: &[u8]) {
        // A socket that always takes some and never all would have everything kept that it has ever taken.
        if self.at > self.bytes.len() / 2 {
            self.bytes.drain(..self.at);
            self.at = 0;
        }
        self.bytes.extend_from_slice(&whole(kind, stream, bytes));
    }

    /// How many bytes wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes what the socket takes.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn flush(&mut self, to: &mut impl Write) -> io::Result<()> {
        while !self.is_empty() {
            match to.write(&self.bytes[self.at..]) {
                Ok(count) => self.at += count,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        self.bytes.clear();
        self.at = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_survive_however_they_come() {
        let sent = [whole(4, 1, b"some"), whole(5, 2, b""), whole(4, 1, &[7; 70_000])].concat();
        for size in [1, 5, 4096, 1 << 20] {
            let (mut inbox, mut got) = (Inbox::default(), Vec::new());
            for mut part in sent.chunks(size) {
                while !part.is_empty() && inbox.fill(&mut part).unwrap() {
                    while let Some(piece) = inbox.piece().unwrap() {
                        got.push((piece.kind, piece.stream, piece.bytes.len()));
                    }
                }
            }
            assert_eq!(got, [(4, 1, 4), (5, 2, 0), (4, 1, 70_000)], "in parts of {size}");
        }
        assert!(hear(&mut &sent[..8]).is_err());
    }

    #[test]
    fn a_false_length_is_refused() {
        let mut inbox = Inbox::default();
        inbox.fill(&mut &[4, 1, 0xff, 0xff, 0xff, 0xff][..]).unwrap();
        assert!(inbox.piece().is_err());
        assert!(hear(&mut &[4, 1, 0xff, 0xff, 0xff, 0xff][..]).is_err());
    }

    #[test]
    fn what_a_slow_socket_has_taken_is_not_kept() {
        /// Takes so much at a time, and then no more for now.
        struct Slow(usize);
        impl Write for Slow {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                let taken = self.0.min(bytes.len());
                self.0 -= taken;
                if taken == 0 { Err(ErrorKind::WouldBlock.into()) } else { Ok(taken) }
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut outbox = Outbox::default();
        outbox.add(4, 1, &[7; 10_000]);
        for _ in 0..10_000 {
            outbox.add(4, 1, &[7; 1000]);
            outbox.flush(&mut Slow(1000 + HEAD)).unwrap();
        }
        assert!(
            outbox.len() == 10_000 + HEAD && outbox.bytes.capacity() < 100_000,
            "{}",
            outbox.bytes.capacity()
        );
    }

    #[test]
    fn what_no_kind_carries_is_unsound() {
        let piece = |kind, stream, length| Piece { kind, stream, bytes: vec![0; length] };
        use crate::words::kind;
        assert!(piece(kind::DATA, 2, PIECE).is_sound() && piece(kind::TAKEN, 0, 4).is_sound());
        assert!(!piece(kind::DATA, 3, 1).is_sound() && !piece(kind::DATA, 0, PIECE + 1).is_sound());
        assert!(!piece(kind::BEAT, 0, 65).is_sound());
    }
}
