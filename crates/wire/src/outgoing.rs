//! Bytes on their way between TLS and the socket: what waits to leave, and what has come in.

use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::io;

/// A stretch of bytes that grows at its end and is consumed at its front.
#[derive(Debug, Default)]
pub(crate) struct Stretch {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

/// What a buffer keeps when it runs empty, in bytes.
const KEEP: usize = 2 << 20;

impl Stretch {
    pub(crate) fn len(&self) -> usize {
        self.end - self.start
    }

    /// The bytes that are there.
    pub(crate) fn filled(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.end]
    }

    /// Takes bytes off the front.
    pub(crate) fn consume(&mut self, count: usize) {
        self.start = (self.start + count).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.bytes.len() > KEEP {
                self.bytes.truncate(KEEP);
                self.bytes.shrink_to_fit();
            }
        }
    }

    /// At least `count` free bytes behind those that are there.
    pub(crate) fn room(&mut self, count: usize) -> &mut [u8] {
        // Moved only over a gap as long as itself, so that no byte is moved more than about once.
        if self.bytes.len() - self.end < count && self.start > 0 && self.start >= self.len() {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.bytes.len() - self.end < count {
            let enough = self.end + count;
            self.bytes.resize(enough.max(enough + enough / 4), 0);
        }
        &mut self.bytes[self.end..]
    }

    /// Counts bytes that were written into [`Self::room`].
    pub(crate) fn grown(&mut self, count: usize) {
        self.end = (self.end + count).min(self.bytes.len());
    }

    /// Sends as much as the socket takes without waiting; true if nothing is left.
    pub(crate) fn send(&mut self, socket: impl AsFd) -> io::Result<bool> {
        while self.len() > 0 {
            match send(&socket, &self.bytes[self.start..self.end], SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
            {
                Ok(count) => self.consume(count),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(true)
    }

    /// Receives what is there, at most `most` bytes, without waiting. `None` if nothing is there; 0 at the
    /// end of the stream.
    pub(crate) fn receive(&mut self, socket: impl AsFd, most: usize) -> io::Result<Option<usize>> {
        let room = self.room(most);
        loop {
            match recv(&socket, &mut room[..most], RecvFlags::DONTWAIT) {
                Ok((count, _)) => {
                    self.grown(count);
                    return Ok(Some(count));
                }
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_keep_their_order() {
        let mut stretch = Stretch::default();
        let (mut next_in, mut next_out) = (0u8, 0u8);
        for round in 0..500usize {
            let count = round % 13;
            for free in &mut stretch.room(count)[..count] {
                *free = next_in;
                next_in = next_in.wrapping_add(1);
            }
            stretch.grown(count);
            let take = (round % 11).min(stretch.len());
            for byte in &stretch.filled()[..take] {
                assert_eq!(*byte, next_out);
                next_out = next_out.wrapping_add(1);
            }
            stretch.consume(take);
        }
    }

    #[test]
    fn an_empty_buffer_gives_memory_back() {
        let mut stretch = Stretch::default();
        stretch.room(8 << 20);
        stretch.grown(8 << 20);
        stretch.consume(8 << 20);
        assert!(stretch.bytes.capacity() <= KEEP);
    }
}
