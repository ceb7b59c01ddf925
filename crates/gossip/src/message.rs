//! The bytes of a message. All numbers are little-endian.
//!
//! ```text
//!  version u8   flags u8
//!  the sender's own entry:   incarnation u64   sequence u32   length u16   payload
//!  count u8, then as many rumours:   node u16   kind u8   incarnation u64   age u32
//!  count u8, then as many entries:   node u16   incarnation u64   sequence u32   age u32
//!                                    length u16   payload
//! ```
//!
//! Decoding allocates nothing: a message is scanned once to validate it, and again to apply it.

use crate::config::{MAX_MESSAGE_LEN, MAX_PAYLOAD, MAX_RUMOURS};
use tern_ids::NodeId;

/// Version of this format.
pub const VERSION: u8 = 1;

/// Length of the fixed part: version, flags, the own entry without its payload, and both counts.
pub(crate) const HEAD_LEN: usize = 2 + 14 + 2;
/// Length of a rumour.
pub(crate) const RUMOUR_LEN: usize = 15;
/// Length of an entry without its payload.
pub(crate) const ENTRY_LEN: usize = 20;

/// Flag: the sender waits for an acknowledgement.
const WANTS_ACK: u8 = 1;

/// Why a message was rejected. It has had no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReceiveError {
    /// The sender is not in the map; the caller can keep the message until it is.
    #[error("node {0} is not in the map; give all nodes the same map")]
    UnknownSender(NodeId),
    /// The message has another format version.
    #[error("gossip format {0} is not supported, only {VERSION}; run the same version of tern on all nodes")]
    Version(u8),
    /// The bytes are not a message.
    #[error("the gossip message is malformed; check that the sender runs tern")]
    Malformed,
}

/// The claim of a rumour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RumourKind {
    /// The sender cannot reach the node, and asks whether the receiver can.
    Suspect,
    /// The node was declared dead.
    Dead,
}

/// A suspicion or a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rumour {
    pub(crate) node: NodeId,
    pub(crate) kind: RumourKind,
    pub(crate) incarnation: u64,
    pub(crate) age: u32,
}

/// A node's entry as encoded in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry<'a> {
    pub(crate) node: NodeId,
    pub(crate) incarnation: u64,
    pub(crate) sequence: u32,
    pub(crate) age: u32,
    pub(crate) payload: &'a [u8],
}

/// A validated message.
#[derive(Debug, Clone)]
pub(crate) struct Message<'a> {
    pub(crate) wants_ack: bool,
    pub(crate) own: Entry<'a>,
    pub(crate) rumours: Rumours<'a>,
    pub(crate) entries: Entries<'a>,
}

/// Encodes a message.
#[derive(Debug)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
    /// Offset of the count of the list that is being written.
    count_offset: usize,
}

impl Writer {
    /// Begins with the sender's own entry. Rumours follow.
    pub(crate) fn new(capacity: usize, wants_ack: bool, incarnation: u64, sequence: u32, own: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(capacity);
        bytes.extend([VERSION, if wants_ack { WANTS_ACK } else { 0 }]);
        bytes.extend(incarnation.to_le_bytes());
        bytes.extend(sequence.to_le_bytes());
        write_payload(&mut bytes, own);
        bytes.push(0);
        Self { count_offset: bytes.len() - 1, bytes }
    }

    /// Appends a rumour; the caller keeps within [`MAX_RUMOURS`].
    pub(crate) fn add_rumour(&mut self, rumour: Rumour) {
        self.bytes[self.count_offset] += 1;
        self.bytes.extend(rumour.node.0.to_le_bytes());
        self.bytes.push(u8::from(rumour.kind == RumourKind::Dead));
        self.bytes.extend(rumour.incarnation.to_le_bytes());
        self.bytes.extend(rumour.age.to_le_bytes());
    }

    /// Ends the rumours. Entries follow.
    pub(crate) fn begin_entries(&mut self) {
        self.count_offset = self.bytes.len();
        self.bytes.push(0);
    }

    /// Appends an entry; the caller keeps within the window.
    pub(crate) fn add_entry(&mut self, entry: Entry<'_>) {
        self.bytes[self.count_offset] += 1;
        self.bytes.extend(entry.node.0.to_le_bytes());
        self.bytes.extend(entry.incarnation.to_le_bytes());
        self.bytes.extend(entry.sequence.to_le_bytes());
        self.bytes.extend(entry.age.to_le_bytes());
        write_payload(&mut self.bytes, entry.payload);
    }

    /// Returns the encoded message.
    pub(crate) fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

fn write_payload(bytes: &mut Vec<u8>, payload: &[u8]) {
    let payload = &payload[..payload.len().min(MAX_PAYLOAD)];
    // MAX_PAYLOAD is far below 2^16.
    bytes.extend((payload.len() as u16).to_le_bytes());
    bytes.extend(payload);
}

/// Decodes and validates a message.
///
/// # Errors
/// If the bytes are not exactly one valid message.
pub(crate) fn decode(from: NodeId, bytes: &[u8]) -> Result<Message<'_>, ReceiveError> {
    let version = *bytes.first().ok_or(ReceiveError::Malformed)?;
    if version != VERSION {
        return Err(ReceiveError::Version(version));
    }
    if bytes.len() > MAX_MESSAGE_LEN {
        return Err(ReceiveError::Malformed);
    }
    parse(from, &bytes[1..]).ok_or(ReceiveError::Malformed)
}

fn parse(from: NodeId, bytes: &[u8]) -> Option<Message<'_>> {
    let mut rest = Reader(bytes);
    let flags = rest.u8()?;
    let (incarnation, sequence) = (rest.u64()?, rest.u32()?);
    let own = Entry { node: from, incarnation, sequence, age: 0, payload: rest.payload()? };
    let rumours = Rumours { left: usize::from(rest.u8()?), rest };
    if flags & !WANTS_ACK != 0 || rumours.left > MAX_RUMOURS {
        return None;
    }
    let mut scan = rumours.clone();
    while scan.left > 0 {
        scan.next()?;
    }
    rest = scan.rest;
    let entries = Entries { left: usize::from(rest.u8()?), rest };
    let mut scan = entries.clone();
    while scan.left > 0 {
        scan.next()?;
    }
    scan.rest.0.is_empty().then_some(Message { wants_ack: flags & WANTS_ACK != 0, own, rumours, entries })
}

/// The rumours of a message.
#[derive(Debug, Clone)]
pub(crate) struct Rumours<'a> {
    left: usize,
    rest: Reader<'a>,
}

impl Iterator for Rumours<'_> {
    type Item = Rumour;

    fn next(&mut self) -> Option<Rumour> {
        self.left = self.left.checked_sub(1)?;
        let rest = &mut self.rest;
        let node = NodeId(rest.u16()?);
        let kind = match rest.u8()? {
            0 => RumourKind::Suspect,
            1 => RumourKind::Dead,
            _ => return None,
        };
        Some(Rumour { node, kind, incarnation: rest.u64()?, age: rest.u32()? })
    }
}

/// The entries of a message.
#[derive(Debug, Clone)]
pub(crate) struct Entries<'a> {
    left: usize,
    rest: Reader<'a>,
}

impl<'a> Iterator for Entries<'a> {
    type Item = Entry<'a>;

    fn next(&mut self) -> Option<Entry<'a>> {
        self.left = self.left.checked_sub(1)?;
        let rest = &mut self.rest;
        let (node, incarnation) = (NodeId(rest.u16()?), rest.u64()?);
        let (sequence, age) = (rest.u32()?, rest.u32()?);
        Some(Entry { node, incarnation, sequence, age, payload: rest.payload()? })
    }
}

/// Bytes not yet decoded.
#[derive(Debug, Clone, Copy)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn payload(&mut self) -> Option<&'a [u8]> {
        let length = usize::from(self.u16()?);
        if length > MAX_PAYLOAD { None } else { self.take(length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ONE: Rumour = Rumour { node: NodeId(7), kind: RumourKind::Dead, incarnation: 9, age: 10 };

    fn sample() -> Vec<u8> {
        let mut writer = Writer::new(64, true, 3, 4, b"own");
        writer.add_rumour(ONE);
        writer.add_rumour(Rumour { kind: RumourKind::Suspect, ..ONE });
        writer.begin_entries();
        writer.add_entry(Entry { node: NodeId(8), incarnation: 1, sequence: 2, age: 3, payload: b"others" });
        writer.finish()
    }

    #[test]
    fn message_survives_encoding() {
        let bytes = sample();
        let message = decode(NodeId(5), &bytes).unwrap();
        assert!(message.wants_ack);
        assert_eq!(
            message.own,
            Entry { node: NodeId(5), incarnation: 3, sequence: 4, age: 0, payload: b"own" }
        );
        let rumours: Vec<Rumour> = message.rumours.collect();
        assert_eq!(rumours, [ONE, Rumour { kind: RumourKind::Suspect, ..ONE }]);
        let entries: Vec<Entry<'_>> = message.entries.collect();
        assert_eq!(
            entries,
            [Entry { node: NodeId(8), incarnation: 1, sequence: 2, age: 3, payload: b"others" }]
        );
    }

    #[test]
    fn encoding_matches_the_format() {
        let expected = b"\x01\x01\x03\0\0\0\0\0\0\0\x04\0\0\0\x03\0own\
            \x02\x07\0\x01\x09\0\0\0\0\0\0\0\x0a\0\0\0\x07\0\0\x09\0\0\0\0\0\0\0\x0a\0\0\0\
            \x01\x08\0\x01\0\0\0\0\0\0\0\x02\0\0\0\x03\0\0\0\x06\0others";
        assert_eq!(sample(), expected);
    }

    #[test]
    fn truncated_and_extended_messages_are_rejected() {
        let mut bytes = sample();
        for length in 0..bytes.len() {
            assert_eq!(decode(NodeId(5), &bytes[..length]).err(), Some(ReceiveError::Malformed), "{length}");
        }
        bytes.push(0);
        assert_eq!(decode(NodeId(5), &bytes).err(), Some(ReceiveError::Malformed));
        bytes[0] = 9;
        assert_eq!(decode(NodeId(5), &bytes).err(), Some(ReceiveError::Version(9)));
    }

    #[test]
    fn payload_beyond_the_limit_is_rejected() {
        let mut writer = Writer::new(64, false, 3, 4, &[1; MAX_PAYLOAD]);
        writer.begin_entries();
        let mut bytes = writer.finish();
        assert!(decode(NodeId(5), &bytes).is_ok());
        bytes[14..16].copy_from_slice(&(MAX_PAYLOAD as u16 + 1).to_le_bytes());
        bytes.insert(16, 1);
        assert_eq!(decode(NodeId(5), &bytes).err(), Some(ReceiveError::Malformed));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_harmless(mut bytes: Vec<u8>) {
            let _refused = decode(NodeId(1), &bytes);
            bytes.insert(0, VERSION);
            let _refused = decode(NodeId(1), &bytes);
        }
    }
}
