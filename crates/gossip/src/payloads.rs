//! The payloads of all rows, in one buffer with the same stride for each: the length of the longest
//! payload so far.

/// Byte strings by index.
#[derive(Debug, Default)]
pub(crate) struct Payloads {
    lengths: Vec<u16>,
    bytes: Vec<u8>,
    stride: usize,
}

impl Payloads {
    /// Appends a payload.
    pub(crate) fn push(&mut self, payload: &[u8]) {
        self.lengths.push(0);
        self.bytes.resize(self.lengths.len() * self.stride, 0);
        self.set(self.lengths.len() - 1, payload);
    }

    /// Replaces a payload. Messages limit its length to less than `u16::MAX`.
    pub(crate) fn set(&mut self, at: usize, payload: &[u8]) {
        if payload.len() > self.stride {
            self.widen(payload.len());
        }
        let start = at * self.stride;
        self.bytes[start..start + payload.len()].copy_from_slice(payload);
        self.lengths[at] = payload.len() as u16;
    }

    /// The payload at an index.
    pub(crate) fn get(&self, at: usize) -> &[u8] {
        let start = at * self.stride;
        &self.bytes[start..start + usize::from(self.lengths[at])]
    }

    fn widen(&mut self, stride: usize) {
        let mut bytes = vec![0; self.lengths.len() * stride];
        for (at, wide) in bytes.chunks_exact_mut(stride).enumerate() {
            let payload = self.get(at);
            wide[..payload.len()].copy_from_slice(payload);
        }
        (self.bytes, self.stride) = (bytes, stride);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_keep_their_bytes_when_the_stride_grows() {
        let mut payloads = Payloads::default();
        payloads.push(b"");
        payloads.push(b"abc");
        payloads.push(b"");
        payloads.set(0, b"longer");
        payloads.set(2, b"x");
        let all: Vec<&[u8]> = (0..3).map(|at| payloads.get(at)).collect();
        assert_eq!(all, [&b"longer"[..], b"abc", b"x"]);
    }
}
