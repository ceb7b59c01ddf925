//! struct msghdr and struct mmsghdr in the mailbox.

use super::{Layout, Out, Pointer, Written};
use crate::call::{Area, Message};
use crate::gather::header;
use crate::limits;
use crate::shape::{Way, When};

impl Layout {
    /// The headers in a row, and behind them what they point to; the offset of the first.
    pub(super) fn messages(&mut self, way: Way, many: bool, messages: Vec<Message>) -> Option<usize> {
        let entries: usize = messages.iter().map(|message| message.segments.lens.len()).sum();
        let data: u64 = messages.iter().flat_map(|m| &m.segments.lens).map(|&len| u64::from(len)).sum();
        let alone = many || messages.len() == 1;
        if !alone
            || messages.len() as u64 > limits::SEGMENTS
            || entries > limits::SEGMENTS_TOGETHER + limits::SEGMENTS as usize
            || data > limits::PAYLOAD
        {
            return None;
        }
        let size = if many { header::MANY } else { header::SIZE };
        let (at, piece) = self.place(vec![0; messages.len() * size]);
        for (i, message) in messages.into_iter().enumerate() {
            let header = Header { at: at + i * size, piece, within: i * size, way };
            self.message(&header, message, many.then_some(i))?;
        }
        Some(at)
    }

    /// The order of the outputs is the order in which the guest has gathered their places.
    fn message(&mut self, header: &Header, message: Message, many: Option<usize>) -> Option<()> {
        let entries = message.segments.lens.len();
        let (amount, when) = match many {
            None => (Written::Result { size: 1, add: 0 }, When::AtLeast(0)),
            Some(i) => {
                let at = header.at + header::LEN;
                (Written::Field { at, wide: false }, When::AtLeast(i as i64 + 1))
            }
        };
        let segments = self.segments(header.way, message.segments, amount, when)?;
        self.refer(header, header::SEGMENTS, segments);
        self.note(header, header::SEGMENTS_LEN, entries as u64);

        let field = Written::Field { at: header.at + header::NAME_LEN, wide: false };
        if self.area(
            header,
            (header::NAME, header::NAME_LEN),
            message.name,
            limits::ADDRESS.into(),
            field,
            when,
        )? {
            self.reported(header, header::NAME_LEN, 4, when);
        }
        let field = Written::Field { at: header.at + header::CONTROL_LEN, wide: true };
        let places = (header::CONTROL, header::CONTROL_LEN);
        self.area(header, places, message.control, limits::CONTROL, field, when)?;
        if header.way == Way::Receive {
            self.reported(header, header::CONTROL_LEN, 8, when);
            self.reported(header, header::FLAGS, 4, when);
        }
        if many.is_some() {
            self.reported(header, header::LEN, 4, when);
        }
        Some(())
    }

    /// A name or control data; is there room for the kernel to write?
    fn area(
        &mut self,
        header: &Header,
        (pointer, length): (usize, usize),
        area: Area,
        max: u64,
        amount: Written,
        when: When,
    ) -> Option<bool> {
        match (header.way, area) {
            (_, Area::Null) => Some(false),
            (Way::Send, Area::Bytes(bytes)) if bytes.len() as u64 <= max => {
                self.note(header, length, bytes.len() as u64);
                let (to, _) = self.place(bytes.into_vec());
                self.refer(header, pointer, to);
                Some(false)
            }
            (Way::Receive, Area::Room(len)) if u64::from(len) <= max => {
                self.note(header, length, len.into());
                let at = self.room(len as usize);
                self.outs.push(Out { at, len: len as usize, amount, when, before: None });
                self.refer(header, pointer, at);
                Some(true)
            }
            _ => None,
        }
    }

    /// A field of the header that the kernel writes.
    fn reported(&mut self, header: &Header, field: usize, len: usize, when: When) {
        self.outs.push(Out { at: header.at + field, len, amount: Written::Whole, when, before: None });
    }

    fn refer(&mut self, header: &Header, field: usize, to: usize) {
        self.pointers.push(Pointer { piece: header.piece, at: header.within + field, to });
    }

    /// Writes a number into the header. msg_namelen is followed by padding, so that eight bytes fit all.
    fn note(&mut self, header: &Header, field: usize, number: u64) {
        let at = header.within + field;
        if let Some(place) = self.pieces[header.piece].bytes.get_mut(at..at + 8) {
            place.copy_from_slice(&number.to_le_bytes());
        }
    }
}

/// One header.
struct Header {
    /// Its offset in the mailbox.
    at: usize,
    /// The piece that it is in.
    piece: usize,
    /// Its offset in that piece.
    within: usize,
    way: Way,
}
