//! The home half: from a [`Call`] to bytes in the deputy's mailbox, and from there to an
//! [`Outcome`].
//!
//! The call is untrusted. Every length is computed from the table and the call's values, compared
//! with the data received, and limited. Parts of the mailbox never overlap.

mod message;

use crate::ByteBuf;
use crate::call::{Arg, Call, Outcome, Segments};
use crate::limits;
use crate::memory::Fault;
use crate::route::{Route, route};
use crate::shape::{Amount, Direction, Len, Shape, When};
use crate::table;

/// An address in user space at which nothing is mapped: it is below `vm.mmap_min_addr`. The kernel returns
/// EFAULT when it accesses it.
const BAD_ADDRESS: u64 = 2048;

/// An address of the kernel.
const KERNEL_ADDRESS: u64 = 0xffff_ffff_ffff_f000;

/// No shim would have gathered this call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// It is not performed at home.
    #[error("system call {0} is not performed by a deputy")]
    NotHome(u32),
    /// An argument does not match the shape in the table.
    #[error("system call {nr}: argument {arg} does not match its shape in the table")]
    Shape {
        /// The call.
        nr: u32,
        /// The argument, from 0.
        arg: usize,
    },
    /// It needs more mailbox space than a call may have.
    #[error("system call {0} asks for more than {max} bytes of mailbox", max = limits::MAX_MAILBOX)]
    TooBig(u32),
}

/// A call laid out for a mailbox at any address. The mailbox must not be reused until the call has
/// ended: an interrupted call that restart_syscall continues still writes to the pointers that it
/// was first made with.
#[derive(Debug)]
pub struct MailboxLayout {
    nr: u32,
    args: [Slot; 6],
    size: usize,
    pieces: Vec<Piece>,
    pointers: Vec<Pointer>,
    outs: Vec<Out>,
}

#[derive(Debug, Clone, Copy)]
enum Slot {
    Value(u64),
    /// An offset in the mailbox.
    At(usize),
}

/// Bytes to write to the mailbox before the call.
#[derive(Debug)]
struct Piece {
    at: usize,
    bytes: Vec<u8>,
}

/// A pointer in a piece to an offset in the mailbox.
#[derive(Debug)]
struct Pointer {
    piece: usize,
    at: usize,
    to: usize,
}

/// Bytes that the kernel may have written when the call returns.
#[derive(Debug)]
struct Out {
    at: usize,
    len: usize,
    amount: Written,
    when: When,
    /// The piece that was written there before the call. If unchanged it is not sent back.
    before: Option<usize>,
    /// It is sent back after a call that succeeds, even if unchanged.
    is_rewritten: bool,
}

#[derive(Debug, Clone, Copy)]
enum Written {
    Whole,
    Result {
        size: u32,
        add: u32,
    },
    /// Given by a number of four or eight bytes at this offset of the mailbox.
    Field {
        at: usize,
        wide: bool,
    },
    /// Given by the length behind this argument.
    Pointed(u8),
}

impl Call {
    /// Lays out a call, without trusting any of it. Also lays out calls with a local part
    /// ([`Route::Both`]); the deputy's code for them decides whether and how to make them.
    ///
    /// # Errors
    /// [`Malformed`] if no shim would have gathered the call. The deputy must not make it.
    pub fn lay_out(self) -> Result<MailboxLayout, Malformed> {
        let (nr, values) = (self.nr, self.values());
        let (Route::Home | Route::Both(_), Some(row)) = (route(nr, &values), table::row(nr)) else {
            return Err(Malformed::NotHome(nr));
        };
        let shapes = row.shapes(&values);
        let mut lengths = [None; 6];
        for (length, arg) in lengths.iter_mut().zip(&self.args) {
            if let Arg::Bytes(bytes) = arg {
                *length = bytes.first_chunk().map(|word| u32::from_le_bytes(*word));
            }
        }
        let mut layout = MailboxLayout {
            nr,
            args: values.map(Slot::Value),
            size: 0,
            pieces: Vec::new(),
            pointers: Vec::new(),
            outs: Vec::new(),
        };
        let sizes = Sizes { values, shapes, lengths };
        let mut exec_size = 0;
        for (i, arg) in self.args.into_iter().enumerate() {
            let malformed = Malformed::Shape { nr, arg: i };
            match (shapes.get(i), arg) {
                (None, Arg::Value(_)) => layout.args[i] = Slot::Value(0),
                (Some(Shape::Value | Shape::Fd), Arg::Value(value)) => layout.args[i] = Slot::Value(value),
                (None | Some(Shape::Value | Shape::Fd), _) => return Err(malformed),
                (Some(_), Arg::Value(0)) => {}
                (Some(_), Arg::Value(_)) => return Err(malformed),
                (Some(_), Arg::BadPointer) => layout.args[i] = Slot::Value(BAD_ADDRESS),
                (Some(_), Arg::KernelPointer) => layout.args[i] = Slot::Value(KERNEL_ADDRESS),
                (Some(shape), arg) => {
                    let at = layout.pointer(shape, arg, &sizes, &mut exec_size).ok_or(malformed)?;
                    layout.args[i] = Slot::At(at);
                }
            }
            if layout.size > limits::MAX_MAILBOX {
                return Err(Malformed::TooBig(nr));
            }
        }
        Ok(layout)
    }
}

/// The values from which lengths are computed.
struct Sizes {
    values: [u64; 6],
    shapes: &'static [Shape],
    /// The first four bytes of arguments with data.
    lengths: [Option<u32>; 6],
}

impl Sizes {
    fn bytes(&self, len: &Len, bytes: Option<&[u8]>) -> Option<usize> {
        let len = match len {
            Len::Pointed(arg) => {
                let arg = usize::from(*arg);
                self.shapes.get(arg)?.buffer_size(self.lengths[arg]?)?
            }
            Len::Embedded(embedded) => {
                let number = bytes?.get(embedded.at as usize..)?.first_chunk()?;
                embedded.bytes(u32::from_le_bytes(*number))?
            }
            len => len.by_args(&self.values)?,
        };
        usize::try_from(len).ok().filter(|&len| len <= limits::MAX_MAILBOX)
    }
}

impl MailboxLayout {
    /// The call's number.
    #[must_use]
    pub fn nr(&self) -> u32 {
        self.nr
    }

    /// Size of the mailbox that the call needs, with outputs, in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// The arguments of the call for a mailbox at this address in the deputy. The address should be
    /// page-aligned; data is then aligned for direct I/O.
    #[must_use]
    pub fn args(&self, base: u64) -> [u64; 6] {
        self.args.map(|slot| match slot {
            Slot::Value(value) => value,
            Slot::At(at) => base.wrapping_add(at as u64),
        })
    }

    /// Writes the call's data to the mailbox, which has the address `base` in the deputy. Memory
    /// that only the kernel writes is left unchanged. May be repeated, to make the call again.
    ///
    /// # Errors
    /// [`Fault`] if the mailbox is smaller than [`MailboxLayout::size`]; a part may have been written.
    pub fn fill(&self, base: u64, mailbox: &mut [u8]) -> Result<(), Fault> {
        for piece in &self.pieces {
            mailbox
                .get_mut(piece.at..piece.at + piece.bytes.len())
                .ok_or(Fault)?
                .copy_from_slice(&piece.bytes);
        }
        for pointer in &self.pointers {
            let at = self.pieces[pointer.piece].at + pointer.at;
            let to = base.wrapping_add(pointer.to as u64);
            mailbox.get_mut(at..at + 8).ok_or(Fault)?.copy_from_slice(&to.to_le_bytes());
        }
        Ok(())
    }

    /// Collects the outputs from the mailbox, given the call's result. Lengths in the mailbox are
    /// trusted only up to the size of the buffers.
    #[must_use]
    pub fn collect(&self, ret: i64, mailbox: &[u8]) -> Outcome {
        let mut outs: Vec<ByteBuf> =
            self.outs.iter().map(|out| self.collect_output(out, ret, mailbox)).collect();
        let used = outs.iter().rposition(|out| !out.is_empty()).map_or(0, |last| last + 1);
        outs.truncate(used);
        Outcome { ret, outs }
    }

    #[cfg(test)]
    pub(crate) fn out_lens(&self) -> Vec<u64> {
        self.outs.iter().map(|out| out.len as u64).collect()
    }

    fn collect_output(&self, out: &Out, ret: i64, mailbox: &[u8]) -> ByteBuf {
        let happened = match out.when {
            // An argument that the kernel may change is compared with its old content.
            _ if out.before.is_some() => true,
            When::AtLeast(least) => ret >= least,
            When::Interrupted => ret == -i64::from(libc::EINTR) || ret == -ERESTART_RESTARTBLOCK,
        };
        if !happened {
            return ByteBuf::new();
        }
        let len = match out.amount {
            Written::Whole => out.len as u64,
            Written::Result { size, add } => {
                (ret as u64).saturating_mul(size.into()).saturating_add(add.into())
            }
            Written::Field { at, wide } => field(mailbox, at, wide),
            Written::Pointed(arg) => match self.args[usize::from(arg)] {
                Slot::At(at) => field(mailbox, at, false),
                Slot::Value(_) => 0,
            },
        };
        let len = usize::try_from(len).map_or(out.len, |len| len.min(out.len));
        let taken = mailbox.get(out.at..out.at + len).unwrap_or_default();
        match out.before {
            Some(piece) if self.pieces[piece].bytes == taken && !(out.is_rewritten && ret >= 0) => {
                ByteBuf::new()
            }
            _ => ByteBuf::from(taken),
        }
    }

    /// Lays out the data behind a pointer. Returns its offset.
    fn pointer(&mut self, shape: &Shape, arg: Arg, sizes: &Sizes, exec_size: &mut usize) -> Option<usize> {
        match (shape, arg) {
            (Shape::Text(max), Arg::Bytes(text)) => {
                let max = *max as usize;
                let ended = text.iter().position(|&b| b == 0).is_some_and(|nul| nul + 1 == text.len());
                let endless = text.len() == max && !text.contains(&0);
                (text.len() <= max && (ended || endless)).then(|| self.place(text.into_vec()).0)
            }
            (Shape::Page, Arg::Bytes(bytes)) => {
                let mut page = bytes.into_vec();
                // The kernel reads the whole page, so the rest of it must not hold other data.
                let fits = page.len() <= limits::MAX_PATH as usize;
                page.resize(limits::MAX_PATH as usize, 0);
                fits.then(|| self.place(page).0)
            }
            (Shape::In(len), Arg::Bytes(bytes)) => {
                let fits = sizes.bytes(len, Some(&bytes))? == bytes.len();
                fits.then(|| self.place(bytes.into_vec()).0)
            }
            (Shape::InOut(len), Arg::Bytes(bytes)) => {
                let fits = sizes.bytes(len, Some(&bytes))? == bytes.len();
                fits.then(|| self.place_in_out(bytes, false))
            }
            (Shape::Rewritten(len), Arg::Bytes(bytes)) => {
                let fits = sizes.bytes(len, Some(&bytes))? == bytes.len();
                fits.then(|| self.place_in_out(bytes, true))
            }
            (Shape::TimeLeft(len), Arg::Bytes(bytes)) => {
                (bytes.len() == *len as usize).then(|| self.place_in_out(bytes, false))
            }
            (Shape::Length { .. }, Arg::Bytes(bytes)) => {
                let length = u32::from_le_bytes(bytes.as_slice().try_into().ok()?);
                (shape.carried(length)? == length).then(|| self.place_in_out(bytes, true))
            }
            (Shape::Out(len, amount, when), Arg::Output) => {
                let len = sizes.bytes(len, None)?;
                // Some drivers and file systems write less than they say. Without zeros the program would
                // get bytes of earlier calls there.
                let at = match amount {
                    Amount::Whole | Amount::Padded => self.place(vec![0; len]).0,
                    _ => self.reserve(len),
                };
                let amount = match *amount {
                    Amount::Whole => Written::Whole,
                    Amount::Padded => Written::Result { size: 1, add: 0 },
                    Amount::Result { size, add } => Written::Result { size, add },
                    Amount::Pointed(arg) => Written::Pointed(arg),
                    Amount::SelfSized => Written::Field { at, wide: false },
                };
                self.outs.push(Out { at, len, amount, when: *when, before: None, is_rewritten: false });
                Some(at)
            }
            (Shape::Segments(direction, count), Arg::Segments(segments)) => {
                let amount = Written::Result { size: 1, add: 0 };
                let (at, entries) = self.segments(*direction, segments, amount, When::AtLeast(0))?;
                self.args[usize::from(*count)] = Slot::Value(entries as u64);
                Some(at)
            }
            (Shape::Messages(direction, count), Arg::Messages(messages)) => {
                let entries = messages.len();
                let at = self.messages(*direction, count.is_some(), messages)?;
                if let Some(count) = count {
                    self.args[usize::from(*count)] = Slot::Value(entries as u64);
                }
                Some(at)
            }
            (Shape::Strings, Arg::Strings(texts)) => self.strings(texts.into_vec(), exec_size),
            (Shape::MaskPair, Arg::Bytes(bytes)) => self.mask_pair(&bytes),
            _ => None,
        }
    }

    /// Reserves space for the kernel's output or for a piece. Returns its offset.
    fn reserve(&mut self, len: usize) -> usize {
        // Aligned for direct I/O if there is enough data for it.
        let align = match len {
            4096.. => 4096,
            512.. => 512,
            _ => 16,
        };
        let at = self.size.next_multiple_of(align);
        // Each part is limited, so one argument cannot overflow `size`. `lay_out` checks `size`
        // after each argument.
        self.size = at + len;
        at
    }

    /// Places a piece. Returns its offset and its index.
    fn place(&mut self, bytes: Vec<u8>) -> (usize, usize) {
        let at = self.reserve(bytes.len());
        self.pieces.push(Piece { at, bytes });
        (at, self.pieces.len() - 1)
    }

    fn place_in_out(&mut self, bytes: ByteBuf, is_rewritten: bool) -> usize {
        let len = bytes.len();
        let (at, piece) = self.place(bytes.into_vec());
        let (amount, when, before) = (Written::Whole, When::AtLeast(0), Some(piece));
        self.outs.push(Out { at, len, amount, when, before, is_rewritten });
        at
    }

    /// Places the data contiguously, and an iovec array that divides it as the guest's does. Returns the
    /// array's offset and the number of its entries.
    fn segments(
        &mut self,
        direction: Direction,
        segments: Segments,
        amount: Written,
        when: When,
    ) -> Option<(usize, usize)> {
        let total: u64 = segments.lens.iter().map(|&len| u64::from(len)).sum();
        if segments.lens.len() as u64 > limits::MAX_SEGMENTS || total > limits::MAX_DATA {
            return None;
        }
        let accessible = usize::try_from(total.checked_sub(segments.inaccessible)?).ok()?;
        let data = match direction {
            Direction::Send if segments.bytes.len() == accessible => self.place(segments.bytes.into_vec()).0,
            Direction::Receive if segments.bytes.is_empty() => {
                let at = self.reserve(accessible);
                self.outs.push(Out { at, len: accessible, amount, when, before: None, is_rewritten: false });
                at
            }
            _ => return None,
        };
        let mut lens = segments.lens;
        let mut left = accessible;
        let ends_in = lens.iter_mut().position(|len| {
            let whole = *len as usize;
            *len = whole.min(left) as u32;
            left -= *len as usize;
            (*len as usize) < whole
        });
        lens.truncate(ends_in.map_or(lens.len(), |last| last + 1));
        let mut entries: Vec<u8> =
            lens.iter().flat_map(|&len| (u128::from(len) << 64).to_le_bytes()).collect();
        // Without room for one more entry, the call transfers only what is accessible.
        if ends_in.is_some() && (lens.len() as u64) < limits::MAX_SEGMENTS {
            let entry = u128::from(segments.inaccessible) << 64 | u128::from(BAD_ADDRESS);
            entries.extend(entry.to_le_bytes());
        }
        let count = entries.len() / 16;
        let (at, piece) = self.place(entries);
        let mut to = data;
        for (i, &len) in lens.iter().enumerate() {
            self.pointers.push(Pointer { piece, at: i * 16, to });
            to += len as usize;
        }
        Some((at, count))
    }

    /// Places argv or envp: the strings, and the pointers to them. `exec_size` counts the bytes of
    /// argv and envp together.
    fn strings(&mut self, texts: Vec<u8>, exec_size: &mut usize) -> Option<usize> {
        let starts: Vec<usize> = std::iter::once(0)
            .chain(texts.iter().enumerate().filter(|(_, b)| **b == 0).map(|(i, _)| i + 1))
            .take(limits::MAX_EXEC_TOTAL / 8 + 1)
            .collect();
        // Each NUL ends a string, and no bytes follow the last.
        let (&end, starts) = starts.split_last()?;
        *exec_size += texts.len() + starts.len() * 8;
        if end != texts.len() || *exec_size > limits::MAX_EXEC_TOTAL {
            return None;
        }
        let (data, _) = self.place(texts);
        let (at, piece) = self.place(vec![0; (starts.len() + 1) * 8]);
        let pointers = starts.iter().enumerate();
        self.pointers.extend(pointers.map(|(i, start)| Pointer { piece, at: i * 8, to: data + start }));
        Some(at)
    }

    fn mask_pair(&mut self, bytes: &[u8]) -> Option<usize> {
        let (size, mask) = bytes.split_first_chunk::<8>()?;
        let mask = match mask.len() {
            0 => None,
            8 => Some(self.place(mask.to_vec()).0),
            _ => return None,
        };
        let (at, piece) = self.place([[0; 8], *size].concat());
        self.pointers.extend(mask.map(|to| Pointer { piece, at: 0, to }));
        Some(at)
    }
}

/// The kernel's internal code for a call that restart_syscall continues.
const ERESTART_RESTARTBLOCK: i64 = 516;

fn field(mailbox: &[u8], at: usize, wide: bool) -> u64 {
    let bytes = mailbox.get(at..).unwrap_or_default();
    if wide {
        bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    } else {
        bytes.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes).into())
    }
}
