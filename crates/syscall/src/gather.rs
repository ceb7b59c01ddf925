//! The guest shim's half: makes a [`Call`], which can be sent home, from six registers and the
//! guest's memory.

mod message;
mod segments;

pub(crate) use message::header;

use crate::ByteBuf;
use crate::call::{Arg, Call};
use crate::limits;
use crate::memory::{self, UserMemory};
use crate::route::{Route, route};
use crate::row::{Flow, Row};
use crate::scatter::OutputBuffer;
use crate::shape::{Len, Shape};
use crate::table;

/// A call that is ready to be sent.
#[derive(Debug, Clone)]
pub struct Gathered {
    /// The part that is sent home.
    pub call: Call,
    /// The buffers of its outputs, which stay with the guest.
    pub output_buffers: Vec<OutputBuffer>,
    /// The program requested more than [`limits::MAX_DATA`] bytes, and the call is cut to that
    /// limit. If all bytes up to the limit are transferred, the guest's shim repeats a read, write,
    /// pread64, pwrite64 or sendto for the remainder.
    pub is_cut: bool,
}

/// Why a call is not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GatherError {
    /// It fails with this errno.
    #[error("answered with errno {0}")]
    Errno(i32),
    /// The process must be fetched home for it.
    #[error("the process must come home: {0}")]
    Homeward(&'static str),
    /// It runs natively on the guest's node.
    #[error("the call runs natively")]
    Here,
}

/// Gathers a call.
///
/// A pointer that cannot be read does not fail here: the call is sent with a bad pointer, so that
/// home's kernel decides which error to report.
///
/// # Errors
/// [`GatherError`], by the call's route. If a nested struct is malformed, the errno that the kernel
/// returns.
pub fn gather(nr: u32, args: &[u64; 6], mem: &mut dyn UserMemory) -> Result<Gathered, GatherError> {
    gather_after(nr, args, 0, mem)
}

/// Gathers the rest of a call of which `done` bytes have been transferred. Only for rows with a
/// [`Flow`]. Control data is not sent a second time. Offsets behind pointers, as in sendfile, are
/// not advanced here: the outputs of the first part have already updated them.
///
/// # Errors
/// Those of [`gather`].
pub fn gather_after(
    nr: u32,
    args: &[u64; 6],
    done: u64,
    mem: &mut dyn UserMemory,
) -> Result<Gathered, GatherError> {
    match route(nr, args) {
        Route::Home | Route::Both(_) => {}
        Route::Here | Route::Timed => return Err(GatherError::Here),
        Route::Homeward(reason) => return Err(GatherError::Homeward(reason)),
        Route::Refuse(errno) => return Err(GatherError::Errno(errno)),
    }
    let Some(row) = table::row(nr) else { return Err(GatherError::Errno(libc::ENOSYS)) };
    let shapes = row.shapes(args);
    let mut args = *args;
    if done > 0 {
        advance(row, shapes, &mut args, done);
    }
    let mut is_cut = false;
    for (arg, lowered) in
        shapes.iter().filter_map(|shape| shape.len()?.lowered_arg(&args)).collect::<Vec<_>>()
    {
        args[arg] = lowered;
        is_cut = row.flow.is_some();
    }
    let mut gatherer = Gatherer {
        args,
        shapes,
        mem,
        lengths: [None; 6],
        output_buffers: Vec::new(),
        probe: row.consumes,
        is_cut,
        skip: done,
        exec_size: 0,
        segments: 0,
        remaining_data: limits::MAX_DATA,
    };
    let mut call_args = [const { Arg::Value(0) }; 6];
    for (i, shape) in shapes.iter().enumerate() {
        call_args[i] = gatherer.argument(i, shape)?;
    }
    Ok(Gathered {
        call: Call { nr, args: call_args },
        output_buffers: gatherer.output_buffers,
        is_cut: gatherer.is_cut,
    })
}

/// Advances plain buffers, counts and offsets. Data in segments is skipped when the iovec array is
/// read.
fn advance(row: &Row, shapes: &[Shape], args: &mut [u64; 6], done: u64) {
    match row.flow {
        None => {}
        Some(Flow::Between(count)) => {
            let count = &mut args[usize::from(count)];
            *count = count.saturating_sub(done);
        }
        Some(Flow::Read | Flow::Write) => {
            if let Some(Shape::In(Len::Arg(_)) | Shape::Out(Len::Arg(_), ..)) = shapes.get(1) {
                args[1] = args[1].wrapping_add(done);
                args[2] = args[2].saturating_sub(done);
                // pread and pwrite have a file offset.
                if shapes.len() == 4 {
                    args[3] = args[3].saturating_add(done);
                }
            }
            // preadv2 and pwritev2 have one too, unless it is -1.
            if shapes.len() == 6 && matches!(shapes[1], Shape::Segments(..)) && args[3] as i64 >= 0 {
                args[3] = args[3].saturating_add(done);
            }
        }
    }
}

struct Gatherer<'m> {
    args: [u64; 6],
    shapes: &'static [Shape],
    /// Lengths behind pointers, once read.
    lengths: [Option<u32>; 6],
    mem: &'m mut dyn UserMemory,
    output_buffers: Vec<OutputBuffer>,
    /// Check that outputs are writable.
    probe: bool,
    is_cut: bool,
    /// Bytes of data already transferred.
    skip: u64,
    /// Size of the exec strings so far, with their pointers.
    exec_size: usize,
    /// Number of iovec entries so far.
    segments: usize,
    /// Remaining limit for the data of segments, in bytes.
    remaining_data: u64,
}

impl Gatherer<'_> {
    fn argument(&mut self, i: usize, shape: &Shape) -> Result<Arg, GatherError> {
        let addr = self.args[i];
        let gathered = match *shape {
            Shape::Value | Shape::Fd => return Ok(Arg::Value(addr)),
            _ if addr == 0 => return Ok(Arg::Value(0)),
            _ if !memory::is_user_range(addr, 0) => return Ok(Arg::KernelPointer),
            Shape::Text(max) => memory::read_c_string(self.mem, addr, max as usize).ok().map(bytes),
            Shape::Page => memory::read_up_to(self.mem, addr, limits::MAX_PATH as usize).ok().map(bytes),
            Shape::In(len) => self.read_sized(addr, &len).map(bytes),
            Shape::InOut(len) | Shape::Rewritten(len) => self.in_out(addr, &len, false),
            Shape::TimeLeft(len) => self.in_out(addr, &Len::Fixed(len), true),
            Shape::Out(len, ..) => self.output(addr, &len),
            Shape::Length { .. } => self.length(i, addr),
            Shape::Segments(direction, count) => {
                let count = self.args[usize::from(count)];
                let first_output = self.output_buffers.len();
                let gathered = self.iovec(direction, addr, count)?.map(Arg::Segments);
                if gathered.is_none() {
                    self.output_buffers.truncate(first_output);
                }
                gathered
            }
            Shape::Messages(direction, count) => {
                let first_output = self.output_buffers.len();
                let count = count.map(|arg| self.args[usize::from(arg)] as u32);
                let gathered = self.messages(direction, addr, count)?.map(Arg::Messages);
                if gathered.is_none() {
                    self.output_buffers.truncate(first_output);
                }
                gathered
            }
            Shape::Strings => self.string_array(addr)?,
            Shape::MaskPair => self.mask_pair(addr),
        };
        Ok(gathered.unwrap_or(Arg::BadPointer))
    }

    /// Returns the number of bytes behind a pointer. If a number in the struct determines it, also
    /// returns that number's offset and value. `None` means that the call is sent with a bad
    /// pointer.
    fn bytes(&mut self, addr: u64, len: &Len) -> Option<(u64, Option<(u32, u32)>)> {
        match len {
            Len::Pointed(arg) => {
                let length = self.pointed(*arg)?;
                Some((self.shapes.get(usize::from(*arg))?.buffer_size(length)?, None))
            }
            Len::Embedded(embedded) => {
                let at = addr.checked_add(embedded.at.into())?;
                let number = memory::read_u32(self.mem, at).ok()?;
                Some((embedded.bytes(number)?, Some((embedded.at, number))))
            }
            len => Some((len.by_args(&self.args)?, None)),
        }
    }

    /// The length that an argument points to. Read once, even if it is used several times.
    fn pointed(&mut self, arg: u8) -> Option<u32> {
        let arg = usize::from(arg);
        if self.lengths[arg].is_none() {
            self.lengths[arg] = memory::read_u32(self.mem, self.args[arg]).ok();
        }
        self.lengths[arg]
    }

    fn read(&mut self, addr: u64, len: u64) -> Option<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(len).ok()?];
        if len > 0 {
            self.mem.read(addr, &mut bytes).ok()?;
        }
        Some(bytes)
    }

    /// Reads what the kernel would read. If a number in the struct determined the length, the
    /// returned bytes contain that number, even if another thread changes it meanwhile.
    fn read_sized(&mut self, addr: u64, len: &Len) -> Option<Vec<u8>> {
        let (len, number) = self.bytes(addr, len)?;
        let mut bytes = self.read(addr, len)?;
        if let Some((at, number)) = number
            && let Some(place) = bytes.get_mut(at as usize..at as usize + 4)
        {
            place.copy_from_slice(&number.to_le_bytes());
        }
        Some(bytes)
    }

    fn in_out(&mut self, addr: u64, len: &Len, ignores_faults: bool) -> Option<Arg> {
        if matches!(len, Len::Pointed(_)) {
            self.end_at_fault(addr, len)?;
        }
        let read = self.read_sized(addr, len)?;
        let len = read.len() as u64;
        if self.probe && !ignores_faults && self.mem.writable(addr, len) < len {
            return None;
        }
        self.add_output(addr, read.len() as u64, ignores_faults);
        Some(bytes(read))
    }

    fn output(&mut self, addr: u64, len: &Len) -> Option<Arg> {
        if self.probe {
            self.end_at_fault(addr, len)?;
        }
        let (len, _) = self.bytes(addr, len)?;
        self.add_output(addr, len, false);
        Some(Arg::Output)
    }

    /// Lowers the stated length of an output to the memory behind the pointer: the kernel writes what
    /// comes, and finds a fault only if that is too long. `None` if no length is left.
    fn end_at_fault(&mut self, addr: u64, len: &Len) -> Option<()> {
        let (wanted, _) = self.bytes(addr, len)?;
        let usable = if wanted > 0 { self.mem.writable(addr, wanted) } else { 0 };
        if usable == wanted {
            return Some(());
        }
        match len {
            Len::Arg(count) => {
                let elements = usable.checked_sub(count.add.into())? / u64::from(count.size);
                self.args[usize::from(count.arg)] = Some(elements).filter(|&elements| elements > 0)?;
            }
            Len::Pointed(arg) => {
                self.lengths[usize::from(*arg)] = Some(u32::try_from(usable).ok()?).filter(|&len| len > 0);
                self.lengths[usize::from(*arg)]?;
            }
            _ => return None,
        }
        Some(())
    }

    fn length(&mut self, i: usize, addr: u64) -> Option<Arg> {
        let length = self.pointed(u8::try_from(i).ok()?)?;
        let length = self.shapes.get(i)?.carried(length)?;
        self.add_output(addr, 4, false);
        Some(bytes(length.to_le_bytes().to_vec()))
    }

    /// pselect6's mask is sent as its size, followed by the mask if there is one.
    fn mask_pair(&mut self, addr: u64) -> Option<Arg> {
        let mut pair = self.read(addr, 16)?;
        let mask = u64::from_le_bytes(pair[..8].try_into().ok()?);
        pair.drain(..8);
        if mask != 0 {
            pair.extend(self.read(mask, 8)?);
        }
        Some(bytes(pair))
    }

    /// The concatenated strings of argv or envp.
    fn string_array(&mut self, addr: u64) -> Result<Option<Arg>, GatherError> {
        const TOO_BIG: GatherError = GatherError::Errno(libc::E2BIG);
        let Ok(pointers) = memory::read_words(self.mem, addr, limits::MAX_EXEC_TOTAL / 8) else {
            return Ok(None);
        };
        let mut all = Vec::new();
        for pointer in pointers.ok_or(TOO_BIG)? {
            let Ok(text) = memory::read_c_string(self.mem, pointer, limits::MAX_EXEC_STRING) else {
                return Ok(None);
            };
            self.exec_size += text.len() + 8;
            if text.last() != Some(&0) || self.exec_size > limits::MAX_EXEC_TOTAL {
                return Err(TOO_BIG);
            }
            all.extend(text);
        }
        Ok(Some(Arg::Strings(ByteBuf::from(all))))
    }

    fn add_output(&mut self, addr: u64, len: u64, ignores_faults: bool) {
        self.output_buffers.push(OutputBuffer { spans: vec![(addr, len)], ignores_faults });
    }
}

fn bytes(bytes: Vec<u8>) -> Arg {
    Arg::Bytes(ByteBuf::from(bytes))
}

#[cfg(test)]
mod tests;
