//! The bytes of a message. All numbers are little-endian.
//!
//! ```text
//!  version u8   flags u8
//!  the sender's own entry:   incarnation u64   sequence u32   length u16   payload
//!  count u8, then as many rumours:   node u16   kind u8   incarnation u64   age u32
//!  count u8, then as many entries:   node u16   incarnation u64   sequence u32   age u32   length u16   payload
//! ```
//!
//! Reading allocates nothing: a message is walked through once to see that it is whole, and again to use it.

use crate::config::{LONGEST_MESSAGE, MOST_PAYLOAD, MOST_RUMOURS};
use tern_ids::NodeId;

/// The version of this format.
pub const VERSION: u8 = 1;

/// Bytes of what each message has: version, flags, own entry without its payload, and both counts.
pub(crate) const HEAD: usize = 2 + 14 + 2;
/// Bytes of a rumour.
pub(crate) const RUMOUR: usize = 15;
/// Bytes of an entry without its payload.
pub(crate) const ENTRY: usize = 20;

/// The sender waits for an answer.
const ANSWER: u8 = 1;

/// Why a message was not taken in. Nothing of it has had an effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The sender is not in the map; so its message can wait until it is.
    #[error("node {0} is not in the map; see that all nodes have the same map")]
    Stranger(NodeId),
    /// Another format.
    #[error("gossip of version {0}, not {VERSION}; run the same tern on all nodes")]
    Version(u8),
    /// Not a message.
    #[error("the gossip message is malformed; the sender is faulty or not tern")]
    Malformed,
}

/// What a rumour says of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The sender cannot reach it, and asks whether the reader can.
    Suspect,
    /// Two nodes could not reach it.
    Dead,
}

/// A suspicion or a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rumour {
    pub(crate) node: NodeId,
    pub(crate) kind: Kind,
    pub(crate) incarnation: u64,
    pub(crate) age: u32,
}

/// A node's entry, as it travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry<'a> {
    pub(crate) node: NodeId,
    pub(crate) incarnation: u64,
    pub(crate) sequence: u32,
    pub(crate) age: u32,
    pub(crate) payload: &'a [u8],
}

/// A message that has been found whole.
#[derive(Debug, Clone)]
pub(crate) struct Message<'a> {
    pub(crate) answer: bool,
    pub(crate) own: Entry<'a>,
    pub(crate) rumours: Rumours<'a>,
    pub(crate) entries: Entries<'a>,
}

/// Writes a message piece by piece.
#[derive(Debug)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
    count_at: usize,
}

impl Writer {
    /// Begins with the sender's own entry. The rumours follow.
    pub(crate) fn new(capacity: usize, answer: bool, incarnation: u64, sequence: u32, own: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(capacity);
        bytes.extend([VERSION, if answer { ANSWER } else { 0 }]);
        bytes.extend(incarnation.to_le_bytes());
        bytes.extend(sequence.to_le_bytes());
        write_payload(&mut bytes, own);
        bytes.push(0);
        Self { count_at: bytes.len() - 1, bytes }
    }

    /// One more rumour; the caller keeps count of them.
    pub(crate) fn rumour(&mut self, rumour: Rumour) {
        self.bytes[self.count_at] += 1;
        self.bytes.extend(rumour.node.0.to_le_bytes());
        self.bytes.push(u8::from(rumour.kind == Kind::Dead));
        self.bytes.extend(rumour.incarnation.to_le_bytes());
        self.bytes.extend(rumour.age.to_le_bytes());
    }

    /// No more rumours. The entries follow.
    pub(crate) fn begin_entries(&mut self) {
        self.count_at = self.bytes.len();
        self.bytes.push(0);
    }

    /// One more entry; the caller keeps count of them.
    pub(crate) fn entry(&mut self, entry: Entry<'_>) {
        self.bytes[self.count_at] += 1;
        self.bytes.extend(entry.node.0.to_le_bytes());
        self.bytes.extend(entry.incarnation.to_le_bytes());
        self.bytes.extend(entry.sequence.to_le_bytes());
        self.bytes.extend(entry.age.to_le_bytes());
        write_payload(&mut self.bytes, entry.payload);
    }

    /// The message.
    pub(crate) fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

fn write_payload(bytes: &mut Vec<u8>, payload: &[u8]) {
    let payload = &payload[..payload.len().min(MOST_PAYLOAD)];
    // MOST_PAYLOAD is far below 2^16.
    bytes.extend((payload.len() as u16).to_le_bytes());
    bytes.extend(payload);
}

/// Reads a message.
///
/// # Errors
/// If the bytes are anything but one whole message.
pub(crate) fn read(from: NodeId, bytes: &[u8]) -> Result<Message<'_>, Refused> {
    let version = *bytes.first().ok_or(Refused::Malformed)?;
    if version != VERSION {
        return Err(Refused::Version(version));
    }
    if bytes.len() > LONGEST_MESSAGE {
        return Err(Refused::Malformed);
    }
    whole(from, &bytes[1..]).ok_or(Refused::Malformed)
}

fn whole(from: NodeId, bytes: &[u8]) -> Option<Message<'_>> {
    let mut rest = Reader(bytes);
    let flags = rest.u8()?;
    let (incarnation, sequence) = (rest.u64()?, rest.u32()?);
    let own = Entry { node: from, incarnation, sequence, age: 0, payload: rest.payload()? };
    let rumours = Rumours { left: usize::from(rest.u8()?), rest };
    if flags & !ANSWER != 0 || rumours.left > MOST_RUMOURS {
        return None;
    }
    let mut reading = rumours.clone();
    while reading.left > 0 {
        reading.next()?;
    }
    rest = reading.rest;
    let entries = Entries { left: usize::from(rest.u8()?), rest };
    let mut reading = entries.clone();
    while reading.left > 0 {
        reading.next()?;
    }
    reading.rest.0.is_empty().then_some(Message { answer: flags & ANSWER != 0, own, rumours, entries })
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
            0 => Kind::Suspect,
            1 => Kind::Dead,
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

/// Bytes that have not been read yet.
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
        if length > MOST_PAYLOAD { None } else { self.take(length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ONE: Rumour = Rumour { node: NodeId(7), kind: Kind::Dead, incarnation: 9, age: 10 };

    fn sample() -> Vec<u8> {
        let mut writer = Writer::new(64, true, 3, 4, b"own");
        writer.rumour(ONE);
        writer.rumour(Rumour { kind: Kind::Suspect, ..ONE });
        writer.begin_entries();
        writer.entry(Entry { node: NodeId(8), incarnation: 1, sequence: 2, age: 3, payload: b"others" });
        writer.finish()
    }

    #[test]
    fn a_message_survives() {
        let bytes = sample();
        let message = read(NodeId(5), &bytes).unwrap();
        assert!(message.answer);
        assert_eq!(
            message.own,
            Entry { node: NodeId(5), incarnation: 3, sequence: 4, age: 0, payload: b"own" }
        );
        let rumours: Vec<Rumour> = message.rumours.collect();
        assert_eq!(rumours, [ONE, Rumour { kind: Kind::Suspect, ..ONE }]);
        let entries: Vec<Entry<'_>> = message.entries.collect();
        assert_eq!(
            entries,
            [Entry { node: NodeId(8), incarnation: 1, sequence: 2, age: 3, payload: b"others" }]
        );
    }

    #[test]
    fn the_bytes_are_what_the_format_says() {
        let expected = b"\x01\x01\x03\0\0\0\0\0\0\0\x04\0\0\0\x03\0own\
            \x02\x07\0\x01\x09\0\0\0\0\0\0\0\x0a\0\0\0\x07\0\0\x09\0\0\0\0\0\0\0\x0a\0\0\0\
            \x01\x08\0\x01\0\0\0\0\0\0\0\x02\0\0\0\x03\0\0\0\x06\0others";
        assert_eq!(sample(), expected);
    }

    #[test]
    fn every_cut_and_every_addition_is_refused() {
        let mut bytes = sample();
        for length in 0..bytes.len() {
            assert_eq!(read(NodeId(5), &bytes[..length]).err(), Some(Refused::Malformed), "{length}");
        }
        bytes.push(0);
        assert_eq!(read(NodeId(5), &bytes).err(), Some(Refused::Malformed));
        bytes[0] = 9;
        assert_eq!(read(NodeId(5), &bytes).err(), Some(Refused::Version(9)));
    }

    #[test]
    fn a_payload_beyond_the_limit_is_refused() {
        let mut writer = Writer::new(64, false, 3, 4, &[1; MOST_PAYLOAD]);
        writer.begin_entries();
        let mut bytes = writer.finish();
        assert!(read(NodeId(5), &bytes).is_ok());
        bytes[14..16].copy_from_slice(&(MOST_PAYLOAD as u16 + 1).to_le_bytes());
        bytes.insert(16, 1);
        assert_eq!(read(NodeId(5), &bytes).err(), Some(Refused::Malformed));
    }

    proptest! {
        #[test]
        fn any_bytes_are_harmless(mut bytes: Vec<u8>) {
            let _refused = read(NodeId(1), &bytes);
            bytes.insert(0, VERSION);
            let _refused = read(NodeId(1), &bytes);
        }
    }
}
