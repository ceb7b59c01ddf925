//! One netlink message: a header, a fixed part, and attributes (netlink(7), `linux/netlink.h`).

/// Length of `struct nlmsghdr`.
pub(crate) const HEADER_LEN: usize = 16;

/// Length of `struct nlattr`.
const ATTRIBUTE_HEADER_LEN: usize = 4;

/// A request under construction. Attributes are appended in the order of the calls.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    bytes: Vec<u8>,
}

impl Message {
    /// A message with this fixed part after the header. `flags` are `NLM_F_*` of netlink(7).
    pub(crate) fn new(kind: u16, flags: libc::c_int, fixed: &[u8]) -> Self {
        let flags = (flags | libc::NLM_F_REQUEST) as u16;
        let mut bytes = vec![0; HEADER_LEN];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(fixed);
        let mut message = Self { bytes };
        message.pad();
        message
    }

    /// Appends an attribute.
    pub(crate) fn attribute(&mut self, kind: u16, value: &[u8]) {
        let length = (ATTRIBUTE_HEADER_LEN + value.len()) as u16;
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.pad();
    }

    /// Appends a string that ends with a null byte.
    pub(crate) fn text(&mut self, kind: u16, text: &str) {
        let mut value = text.as_bytes().to_vec();
        value.push(0);
        self.attribute(kind, &value);
    }

    /// Appends a number in network byte order, as all of nfnetlink expects it.
    pub(crate) fn be32(&mut self, kind: u16, value: u32) {
        self.attribute(kind, &value.to_be_bytes());
    }

    /// Appends a number in the machine's byte order, as rtnetlink expects it.
    pub(crate) fn ne32(&mut self, kind: u16, value: u32) {
        self.attribute(kind, &value.to_ne_bytes());
    }

    /// Appends an attribute that contains those which `fill` appends.
    pub(crate) fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        let start = self.bytes.len();
        self.attribute(kind | libc::NLA_F_NESTED as u16, &[]);
        fill(self);
        let length = (self.bytes.len() - start) as u16;
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
    }

    /// Appends bytes that are no attribute, such as a second fixed part inside a nest.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.pad();
    }

    /// Adds a `NLM_F_*` flag.
    pub(crate) fn set_flag(&mut self, flag: libc::c_int) {
        let flags = u16::from_ne_bytes([self.bytes[6], self.bytes[7]]) | flag as u16;
        self.bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
    }

    /// The finished message with this sequence number.
    pub(crate) fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = self.bytes.len() as u32;
        self.bytes[0..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.bytes
    }

    /// Messages and attributes begin at multiples of four bytes.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// A message from the kernel.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) kind: u16,
    pub(crate) flags: u16,
    pub(crate) sequence: u32,
    /// All bytes after the header.
    pub(crate) body: Vec<u8>,
}

impl Reply {
    /// The attributes after a fixed part of this length.
    pub(crate) fn attributes(&self, fixed_len: usize) -> Attributes<'_> {
        attributes(self.body.get(fixed_len..).unwrap_or_default())
    }
}

/// Splits what one receive call returned. An incomplete message at the end is left out.
pub(crate) fn split(mut bytes: &[u8]) -> Vec<Reply> {
    let mut replies = Vec::new();
    while let Some(header) = bytes.get(..HEADER_LEN) {
        let length = read_u32(header) as usize;
        let Some(body) = bytes.get(HEADER_LEN..length) else { break };
        replies.push(Reply {
            kind: u16::from_ne_bytes([header[4], header[5]]),
            flags: u16::from_ne_bytes([header[6], header[7]]),
            sequence: read_u32(&header[8..]),
            body: body.to_vec(),
        });
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    replies
}

/// The first four bytes as a number in the machine's byte order; 0 if there are fewer.
pub(crate) fn read_u32(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |b| u32::from_ne_bytes(*b))
}

/// Iterates over attributes; ends at the first that is incomplete.
#[derive(Debug, Clone)]
pub(crate) struct Attributes<'a> {
    rest: &'a [u8],
}

/// The attributes in these bytes, for example in the value of a nested attribute.
pub(crate) fn attributes(bytes: &[u8]) -> Attributes<'_> {
    Attributes { rest: bytes }
}

impl<'a> Attributes<'a> {
    /// The value of the first attribute of this kind.
    pub(crate) fn find(mut self, kind: u16) -> Option<&'a [u8]> {
        self.by_ref().find(|(k, _)| *k == kind).map(|(_, value)| value)
    }
}

impl<'a> Iterator for Attributes<'a> {
    /// Kind without the flags for nesting and byte order, and value.
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let header = self.rest.first_chunk::<ATTRIBUTE_HEADER_LEN>()?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let kind = u16::from_ne_bytes([header[2], header[3]]) & libc::NLA_TYPE_MASK as u16;
        let value = self.rest.get(ATTRIBUTE_HEADER_LEN..length)?;
        self.rest = self.rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_attributes_are_read_as_written() {
        let mut message = Message::new(7, 0, &[1, 2, 3, 4]);
        message.text(1, "abc");
        message.nested(2, |m| {
            m.be32(1, 5);
            m.attribute(3, &[9]);
        });
        let bytes = message.finish(42);
        let [reply] = <[Reply; 1]>::try_from(split(&bytes)).unwrap();
        assert_eq!((reply.kind, reply.sequence), (7, 42));
        assert_eq!(reply.attributes(4).find(1), Some(&b"abc\0"[..]));
        let nest = reply.attributes(4).find(2).unwrap();
        assert_eq!(attributes(nest).find(1), Some(&[0, 0, 0, 5][..]));
        assert_eq!(attributes(nest).find(3), Some(&[9][..]));
    }

    #[test]
    fn cut_off_bytes_end_the_iteration() {
        let mut message = Message::new(7, 0, &[]);
        message.text(1, "a longer text");
        let bytes = message.finish(1);
        for cut in 0..bytes.len() {
            let _ = split(&bytes[..cut]).len();
            let _ = attributes(&bytes[..cut]).count();
        }
        assert_eq!(attributes(&[0, 0, 1, 0]).next(), None, "a length below the header's is no attribute");
    }
}
