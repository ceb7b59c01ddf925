//! struct msghdr and struct mmsghdr in the mailbox.

use super::{MailboxLayout, Out, Pointer, Written};
use crate::call::{MessageBuffer, SocketMessage};
use crate::gather::header;
use crate::limits;
use crate::shape::{Direction, When};

impl MailboxLayout {
    /// Places the headers one after the other, followed by the data that they point to. Returns the
    /// offset of the first.
    pub(super) fn messages(
        &mut self,
        direction: Direction,
        many: bool,
        messages: Vec<SocketMessage>,
    ) -> Option<usize> {
        let entries: usize = messages.iter().map(|message| message.segments.lens.len()).sum();
        let data: u64 = messages.iter().flat_map(|m| &m.segments.lens).map(|&len| u64::from(len)).sum();
        let is_valid_count = many || messages.len() == 1;
        if !is_valid_count
            || messages.len() as u64 > limits::MAX_SEGMENTS
            || entries > limits::MAX_TOTAL_SEGMENTS + limits::MAX_SEGMENTS as usize
            || data > limits::MAX_DATA
        {
            return None;
        }
        let size = if many { header::MANY } else { header::SIZE };
        let (at, piece) = self.place(vec![0; messages.len() * size]);
        for (i, message) in messages.into_iter().enumerate() {
            let header = Header { at: at + i * size, piece, offset_in_piece: i * size, direction };
            self.place_message(&header, message, many.then_some(i))?;
        }
        Some(at)
    }

    /// The outputs are in the same order as the guest's output buffers.
    fn place_message(&mut self, header: &Header, message: SocketMessage, many: Option<usize>) -> Option<()> {
        let (amount, when) = match many {
            None => (Written::Result { size: 1, add: 0 }, When::AtLeast(0)),
            Some(i) => {
                let at = header.at + header::LEN;
                (Written::Field { at, wide: false }, When::AtLeast(i as i64 + 1))
            }
        };
        let (segments, entries) = self.segments(header.direction, message.segments, amount, when)?;
        self.set_pointer(header, header::SEGMENTS, segments);
        self.set_field(header, header::SEGMENTS_LEN, entries as u64);

        let field = Written::Field { at: header.at + header::NAME_LEN, wide: false };
        if self.place_buffer(
            header,
            (header::NAME, header::NAME_LEN),
            message.name,
            limits::MAX_ADDRESS.into(),
            field,
            when,
        )? {
            self.add_output(header, header::NAME_LEN, 4, when);
        }
        let field = Written::Field { at: header.at + header::CONTROL_LEN, wide: true };
        let fields = (header::CONTROL, header::CONTROL_LEN);
        self.place_buffer(header, fields, message.control, limits::MAX_CONTROL, field, when)?;
        if header.direction == Direction::Receive {
            self.add_output(header, header::CONTROL_LEN, 8, when);
            self.add_output(header, header::FLAGS, 4, when);
        }
        if many.is_some() {
            self.add_output(header, header::LEN, 4, when);
        }
        Some(())
    }

    /// Places a name or control data. Returns whether it is space for the kernel to write.
    fn place_buffer(
        &mut self,
        header: &Header,
        (pointer, length): (usize, usize),
        buffer: MessageBuffer,
        max: u64,
        amount: Written,
        when: When,
    ) -> Option<bool> {
        match (header.direction, buffer) {
            (_, MessageBuffer::Null) => Some(false),
            (Direction::Send, MessageBuffer::Bytes(bytes)) if bytes.len() as u64 <= max => {
                self.set_field(header, length, bytes.len() as u64);
                let (to, _) = self.place(bytes.into_vec());
                self.set_pointer(header, pointer, to);
                Some(false)
            }
            (Direction::Receive, MessageBuffer::Output(len)) if u64::from(len) <= max => {
                self.set_field(header, length, len.into());
                // The kernel leaves the padding of control data unchanged. Without zeros the program
                // would get bytes of earlier calls there.
                let (at, _) = self.place(vec![0; len as usize]);
                self.outs.push(Out {
                    at,
                    len: len as usize,
                    amount,
                    when,
                    before: None,
                    is_rewritten: false,
                });
                self.set_pointer(header, pointer, at);
                Some(true)
            }
            _ => None,
        }
    }

    /// Registers a header field as an output.
    fn add_output(&mut self, header: &Header, field: usize, len: usize, when: When) {
        self.outs.push(Out {
            at: header.at + field,
            len,
            amount: Written::Whole,
            when,
            before: None,
            is_rewritten: false,
        });
    }

    fn set_pointer(&mut self, header: &Header, field: usize, to: usize) {
        self.pointers.push(Pointer { piece: header.piece, at: header.offset_in_piece + field, to });
    }

    /// Writes a number to the header. msg_namelen is followed by padding, so eight bytes always
    /// fit.
    fn set_field(&mut self, header: &Header, field: usize, number: u64) {
        let at = header.offset_in_piece + field;
        if let Some(place) = self.pieces[header.piece].bytes.get_mut(at..at + 8) {
            place.copy_from_slice(&number.to_le_bytes());
        }
    }
}

/// One header.
struct Header {
    /// Its offset in the mailbox.
    at: usize,
    /// The piece that contains it.
    piece: usize,
    /// Its offset in that piece.
    offset_in_piece: usize,
    direction: Direction,
}
