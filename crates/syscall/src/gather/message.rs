//! struct msghdr and struct mmsghdr.

use super::{Gather, Gatherer};
use crate::ByteBuf;
use crate::call::{Area, Message};
use crate::limits;
use crate::scatter::Landing;
use crate::shape::Way;

/// struct msghdr, and where its fields are.
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
    /// struct mmsghdr, which goes on with msg_len.
    pub(crate) const MANY: usize = 64;
    /// msg_len, an unsigned int
    pub(crate) const LEN: usize = 56;
}

/// Which way, and whether each message has a length of its own.
#[derive(Clone, Copy)]
struct Kind {
    way: Way,
    many: bool,
}

impl Gatherer<'_> {
    /// The message at `addr`, or the `count` messages there. `None`: the first is bad. A later bad one ends
    /// the list, as the kernel does, which then reports how many it has moved.
    pub(super) fn messages(
        &mut self,
        way: Way,
        addr: u64,
        count: Option<u32>,
    ) -> Result<Option<Vec<Message>>, Gather> {
        let kind = Kind { way, many: count.is_some() };
        let size = if kind.many { header::MANY } else { header::SIZE } as u64;
        let mut messages = Vec::new();
        // The kernel too takes no more at once.
        for i in 0..u64::from(count.unwrap_or(1)).min(limits::SEGMENTS) {
            let landings = self.landings.len();
            let message = match addr.checked_add(i * size) {
                Some(addr) => self.message(kind, addr),
                None => Ok(None),
            };
            match message {
                Ok(Some(message)) => messages.push(message),
                ended => {
                    self.landings.truncate(landings);
                    if i > 0 {
                        break;
                    }
                    return ended.map(|_| None);
                }
            }
            if self.cut || self.room == 0 || self.segments >= limits::SEGMENTS_TOGETHER {
                break;
            }
        }
        Ok(Some(messages))
    }

    fn message(&mut self, kind: Kind, addr: u64) -> Result<Option<Message>, Gather> {
        let Some(bytes) = self.read(addr, header::SIZE as u64) else { return Ok(None) };
        let word = |at: usize| bytes[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        let count = word(header::SEGMENTS_LEN);
        if count > limits::SEGMENTS {
            return Err(Gather::Errno(libc::EMSGSIZE));
        }
        let name_len = word(header::NAME_LEN) as i32;
        if name_len < 0 {
            return Err(Gather::Errno(libc::EINVAL));
        }
        let probe = self.probe && kind.way == Way::Receive;
        if probe && !self.mem.writable(addr, header::SIZE as u64) {
            return Ok(None);
        }
        // The order of these three is the order in which home lays them out.
        let segments = self.iovec(kind.way, word(header::SEGMENTS), count)?;
        let Some(segments) = segments else { return Ok(None) };
        self.segments += segments.lens.len();
        let name = self.area(kind, word(header::NAME), (name_len as u64).min(limits::ADDRESS.into()));
        let Some(name) = name else { return Ok(None) };
        if kind.way == Way::Receive && name != Area::Null {
            self.land(addr.wrapping_add(header::NAME_LEN as u64), 4, false);
        }
        let control_len = match kind.way {
            Way::Send if self.skip > 0 => 0,
            Way::Send if word(header::CONTROL_LEN) > limits::CONTROL => {
                return Err(Gather::Errno(libc::ENOBUFS));
            }
            Way::Send | Way::Receive => word(header::CONTROL_LEN).min(limits::CONTROL).min(self.room),
        };
        self.room -= control_len;
        let control = self.area(kind, word(header::CONTROL), control_len);
        let Some(control) = control else { return Ok(None) };
        if kind.way == Way::Receive {
            self.land(addr.wrapping_add(header::CONTROL_LEN as u64), 8, false);
            self.land(addr.wrapping_add(header::FLAGS as u64), 4, false);
        }
        if kind.many {
            self.land(addr.wrapping_add(header::LEN as u64), 4, false);
        }
        Ok(Some(Message { name, segments, control }))
    }

    /// A name or control data.
    fn area(&mut self, kind: Kind, addr: u64, len: u64) -> Option<Area> {
        match kind.way {
            _ if addr == 0 => Some(Area::Null),
            Way::Send if len == 0 => Some(Area::Null),
            Way::Send => self.read(addr, len).map(|bytes| Area::Bytes(ByteBuf::from(bytes))),
            Way::Receive => {
                if self.probe && len > 0 && !self.mem.writable(addr, len) {
                    return None;
                }
                self.landings.push(Landing { spans: vec![(addr, len)], forgiving: false });
                Some(Area::Room(u32::try_from(len).ok()?))
            }
        }
    }
}
