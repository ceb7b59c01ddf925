//! The payloads of all rows, side by side: each has as much room as the longest that has come.

/// Byte strings by number.
#[derive(Debug, Default)]
pub(crate) struct Payloads {
    lengths: Vec<u16>,
    bytes: Vec<u8>,
    room: usize,
}

impl Payloads {
    /// One more.
    pub(crate) fn push(&mut self, payload: &[u8]) {
        self.lengths.push(0);
        self.bytes.resize(self.lengths.len() * self.room, 0);
        self.set(self.lengths.len() - 1, payload);
    }

    /// Replaces one. Longer than `u16` no payload is: messages have limits.
    pub(crate) fn set(&mut self, at: usize, payload: &[u8]) {
        if payload.len() > self.room {
            self.widen(payload.len());
        }
        let start = at * self.room;
        self.bytes[start..start + payload.len()].copy_from_slice(payload);
        self.lengths[at] = payload.len() as u16;
    }

    /// One of them.
    pub(crate) fn get(&self, at: usize) -> &[u8] {
        let start = at * self.room;
        &self.bytes[start..start + usize::from(self.lengths[at])]
    }

    fn widen(&mut self, room: usize) {
        let mut bytes = vec![0; self.lengths.len() * room];
        for (at, wide) in bytes.chunks_exact_mut(room).enumerate() {
            let payload = self.get(at);
            wide[..payload.len()].copy_from_slice(payload);
        }
        (self.bytes, self.room) = (bytes, room);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_keeps_its_own() {
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
