//! struct msghdr and struct mmsghdr.

use super::{GatherError, Gatherer};
use crate::ByteBuf;
use crate::call::{MessageBuffer, SocketMessage};
use crate::limits;
use crate::scatter::OutputBuffer;
use crate::shape::Direction;

/// Size and field offsets of struct msghdr.
pub(crate) mod header {
    /// Its size.
    pub(crate) const SIZE: usize = 56;
    /// msg_name
    pub(crate) const NAME: usize = 0;
    /// msg_namelen, an int
    pub(crate) const NAME_LEN: usize = 8;
    /// msg_iov
    pub(crate) const SEGMENTS: usize = 16;
    /// msg_iovlen
    pub(crate) const SEGMENTS_LEN: usize = 24;
    /// msg_control
    pub(crate) const CONTROL: usize = 32;
    /// msg_controllen
    pub(crate) const CONTROL_LEN: usize = 40;
    /// msg_flags, an int
    pub(crate) const FLAGS: usize = 48;
    /// Size of struct mmsghdr: a msghdr followed by msg_len.
    pub(crate) const MANY: usize = 64;
    /// msg_len, an unsigned int
    pub(crate) const LEN: usize = 56;
}

/// The direction, and whether each message has a length of its own.
#[derive(Clone, Copy)]
struct Kind {
    direction: Direction,
    many: bool,
}

impl Gatherer<'_> {
    /// Gathers the message at `addr`, or `count` messages there. `None` if the first is bad. A
    /// later bad one ends the list, as in the kernel, which then returns the number of messages
    /// before it.
    pub(super) fn messages(
        &mut self,
        direction: Direction,
        addr: u64,
        count: Option<u32>,
    ) -> Result<Option<Vec<SocketMessage>>, GatherError> {
        let kind = Kind { direction, many: count.is_some() };
        let size = if kind.many { header::MANY } else { header::SIZE } as u64;
        let mut messages = Vec::new();
        // The kernel, too, handles at most this many messages in one call.
        for i in 0..u64::from(count.unwrap_or(1)).min(limits::MAX_SEGMENTS) {
            let outputs_before = self.output_buffers.len();
            let message = match addr.checked_add(i * size) {
                Some(addr) => self.message(kind, addr),
                None => Ok(None),
            };
            match message {
                Ok(Some(message)) => messages.push(message),
                ended => {
                    self.output_buffers.truncate(outputs_before);
                    if i > 0 {
                        break;
                    }
                    return ended.map(|_| None);
                }
            }
            if self.is_cut || self.remaining_data == 0 || self.segments >= limits::MAX_TOTAL_SEGMENTS {
                break;
            }
        }
        Ok(Some(messages))
    }

    fn message(&mut self, kind: Kind, addr: u64) -> Result<Option<SocketMessage>, GatherError> {
        let Some(bytes) = self.read(addr, header::SIZE as u64) else { return Ok(None) };
        let word = |at: usize| bytes[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        let count = word(header::SEGMENTS_LEN);
        if count > limits::MAX_SEGMENTS {
            return Err(GatherError::Errno(libc::EMSGSIZE));
        }
        let name_len = word(header::NAME_LEN) as i32;
        if name_len < 0 {
            return Err(GatherError::Errno(libc::EINVAL));
        }
        let probe = self.probe && kind.direction == Direction::Receive;
        if probe && self.mem.writable(addr, header::SIZE as u64) < header::SIZE as u64 {
            return Ok(None);
        }
        // Home lays out segments, name and control data in the same order.
        let segments = self.iovec(kind.direction, word(header::SEGMENTS), count)?;
        let Some(segments) = segments else { return Ok(None) };
        self.segments += segments.lens.len();
        let name = self.buffer(kind, word(header::NAME), (name_len as u64).min(limits::MAX_ADDRESS.into()));
        let Some(name) = name else { return Ok(None) };
        if kind.direction == Direction::Receive && name != MessageBuffer::Null {
            self.add_output(addr.wrapping_add(header::NAME_LEN as u64), 4, false);
        }
        let control_len = match kind.direction {
            Direction::Send if self.skip > 0 => 0,
            Direction::Send if word(header::CONTROL_LEN) > limits::MAX_CONTROL => {
                return Err(GatherError::Errno(libc::ENOBUFS));
            }
            Direction::Send | Direction::Receive => {
                word(header::CONTROL_LEN).min(limits::MAX_CONTROL).min(self.remaining_data)
            }
        };
        self.remaining_data -= control_len;
        let control = self.buffer(kind, word(header::CONTROL), control_len);
        let Some(control) = control else { return Ok(None) };
        if kind.direction == Direction::Receive {
            self.add_output(addr.wrapping_add(header::CONTROL_LEN as u64), 8, false);
            self.add_output(addr.wrapping_add(header::FLAGS as u64), 4, false);
        }
        if kind.many {
            self.add_output(addr.wrapping_add(header::LEN as u64), 4, false);
        }
        Ok(Some(SocketMessage { name, segments, control }))
    }

    /// A name or control data.
    fn buffer(&mut self, kind: Kind, addr: u64, len: u64) -> Option<MessageBuffer> {
        match kind.direction {
            _ if addr == 0 => Some(MessageBuffer::Null),
            Direction::Send if len == 0 => Some(MessageBuffer::Null),
            Direction::Send => self.read(addr, len).map(|bytes| MessageBuffer::Bytes(ByteBuf::from(bytes))),
            Direction::Receive => {
                let len = if self.probe { self.mem.writable(addr, len) } else { len };
                self.output_buffers.push(OutputBuffer { spans: vec![(addr, len)], ignores_faults: false });
                Some(MessageBuffer::Output(u32::try_from(len).ok()?))
            }
        }
    }
}
