//! Buffers between TLS and the socket, for outgoing and incoming bytes.

use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::io;

/// A byte queue: bytes are appended at the end and consumed from the front.
#[derive(Debug, Default)]
pub(crate) struct ByteQueue {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

/// Memory that an empty queue keeps, in bytes.
const MAX_IDLE_BYTES: usize = 2 << 20;

impl ByteQueue {
    pub(crate) fn len(&self) -> usize {
        self.end - self.start
    }

    /// The queued bytes.
    pub(crate) fn filled(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.end]
    }

    /// Removes bytes from the front.
    pub(crate) fn consume(&mut self, count: usize) {
        self.start = (self.start + count).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.bytes.len() > MAX_IDLE_BYTES {
                self.bytes.truncate(MAX_IDLE_BYTES);
                self.bytes.shrink_to_fit();
            }
        }
    }

    /// At least `count` bytes of free space after the queued ones.
    pub(crate) fn free_space(&mut self, count: usize) -> &mut [u8] {
        // The queued bytes are moved to the front only if the gap before them is at least as long,
        // so that moves copy no more bytes than were consumed.
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

    /// Appends bytes that were written to [`Self::free_space`].
    pub(crate) fn commit(&mut self, count: usize) {
        self.end = (self.end + count).min(self.bytes.len());
    }

    /// Sends as much as the socket accepts without blocking. Returns true if the queue is empty.
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

    /// Receives up to `max` bytes without blocking. `None` if no bytes are available, 0 at the end
    /// of the stream.
    pub(crate) fn receive(&mut self, socket: impl AsFd, max: usize) -> io::Result<Option<usize>> {
        let free_space = self.free_space(max);
        loop {
            match recv(&socket, &mut free_space[..max], RecvFlags::DONTWAIT) {
                Ok((count, _)) => {
                    self.commit(count);
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
        let mut queue = ByteQueue::default();
        let (mut next_in, mut next_out) = (0u8, 0u8);
        for round in 0..500usize {
            let count = round % 13;
            for free in &mut queue.free_space(count)[..count] {
                *free = next_in;
                next_in = next_in.wrapping_add(1);
            }
            queue.commit(count);
            let take = (round % 11).min(queue.len());
            for byte in &queue.filled()[..take] {
                assert_eq!(*byte, next_out);
                next_out = next_out.wrapping_add(1);
            }
            queue.consume(take);
        }
    }

    #[test]
    fn empty_queue_frees_memory() {
        let mut queue = ByteQueue::default();
        queue.free_space(8 << 20);
        queue.commit(8 << 20);
        queue.consume(8 << 20);
        assert!(queue.bytes.capacity() <= MAX_IDLE_BYTES);
    }
}
