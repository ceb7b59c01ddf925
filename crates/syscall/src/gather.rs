//! The guest's half: from six registers and the guest's memory to a [`Call`] that can travel.

mod message;
mod segments;

pub(crate) use message::header;

use crate::ByteBuf;
use crate::call::{Arg, Call};
use crate::limits;
use crate::memory::{self, Memory};
use crate::route::{Route, route};
use crate::row::{Flow, Row};
use crate::scatter::Landing;
use crate::shape::{Len, Shape};
use crate::table;

/// A call that is ready to travel.
#[derive(Debug, Clone)]
pub struct Gathered {
    /// What goes home.
    pub call: Call,
    /// Where its outputs go; stays with the guest.
    pub landings: Vec<Landing>,
    /// Less data is asked for than the program wants, since it is more than [`limits::PAYLOAD`]: a blocking
    /// stream write must be continued with [`gather_after`].
    pub cut: bool,
}

/// Why a call does not travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Gather {
    /// It is answered with this errno.
    #[error("answered with errno {0}")]
    Errno(i32),
    /// The process must come home for it.
    #[error("the process must come home: {0}")]
    Homeward(&'static str),
    /// It runs where the guest is.
    #[error("the call runs natively")]
    Here,
}

/// Gathers a call.
///
/// A pointer that cannot be read does not fail here: the call travels with a bad pointer, so that home's
/// kernel weighs it against the call's other faults.
///
/// # Errors
/// [`Gather`], by the call's route; an errno also where a nested struct is malformed, as the kernel says.
pub fn gather(nr: u32, args: &[u64; 6], mem: &mut dyn Memory) -> Result<Gathered, Gather> {
    gather_after(nr, args, 0, mem)
}

/// Gathers the rest of a call of which `done` bytes have already been moved. Only for rows with a
/// [`Flow`]; control data is not sent a second time. Offsets behind pointers, as sendfile has them, have
/// been moved on by the first part's outputs.
///
/// # Errors
/// As [`gather`].
pub fn gather_after(nr: u32, args: &[u64; 6], done: u64, mem: &mut dyn Memory) -> Result<Gathered, Gather> {
    match route(nr, args) {
        Route::Home | Route::Both(_) => {}
        Route::Here => return Err(Gather::Here),
        Route::Homeward(reason) => return Err(Gather::Homeward(reason)),
        Route::Refuse(errno) => return Err(Gather::Errno(errno)),
    }
    let Some(row) = table::row(nr) else { return Err(Gather::Errno(libc::ENOSYS)) };
    let shapes = row.shapes(args);
    let mut args = *args;
    if done > 0 {
        advance(row, shapes, &mut args, done);
    }
    let mut cut = false;
    for (arg, lowered) in shapes.iter().filter_map(|shape| shape.len()?.cut(&args)).collect::<Vec<_>>() {
        args[arg] = lowered;
        cut = row.flow.is_some();
    }
    let mut gatherer = Gatherer {
        args,
        shapes,
        mem,
        lengths: [None; 6],
        landings: Vec::new(),
        probe: row.consumes,
        cut,
        skip: done,
        strings: 0,
        segments: 0,
        room: limits::PAYLOAD,
    };
    let mut travelling = [const { Arg::Value(0) }; 6];
    for (i, shape) in shapes.iter().enumerate() {
        travelling[i] = gatherer.argument(i, shape)?;
    }
    Ok(Gathered { call: Call { nr, args: travelling }, landings: gatherer.landings, cut: gatherer.cut })
}

/// Moves plain buffers, counts and offsets on; segments are skipped as they are read.
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
                // pread and pwrite say where in the file.
                if shapes.len() == 4 {
                    args[3] = args[3].saturating_add(done);
                }
            }
            // preadv2 and pwritev2 have an offset, unless it is -1.
            if shapes.len() == 6 && matches!(shapes[1], Shape::Segments(..)) && args[3] as i64 >= 0 {
                args[3] = args[3].saturating_add(done);
            }
        }
    }
}

struct Gatherer<'m> {
    args: [u64; 6],
    shapes: &'static [Shape],
    /// Lengths behind arguments, once read.
    lengths: [Option<u32>; 6],
    mem: &'m mut dyn Memory,
    landings: Vec<Landing>,
    /// Ask whether outputs can be written.
    probe: bool,
    cut: bool,
    /// Bytes of data already moved.
    skip: u64,
    /// Bytes of exec strings so far, with their pointers.
    strings: usize,
    /// Entries of iovec arrays so far.
    segments: usize,
    /// Bytes of segments that may still be carried.
    room: u64,
}

impl Gatherer<'_> {
    fn argument(&mut self, i: usize, shape: &Shape) -> Result<Arg, Gather> {
        let addr = self.args[i];
        let gathered = match *shape {
            Shape::Value | Shape::Fd => return Ok(Arg::Value(addr)),
            _ if addr == 0 => return Ok(Arg::Value(0)),
            Shape::Text(max) => memory::read_text(self.mem, addr, max as usize).ok().map(bytes),
            Shape::Page => memory::read_up_to(self.mem, addr, limits::PATH as usize).ok().map(bytes),
            Shape::In(len) => self.read_sized(addr, &len).map(bytes),
            Shape::InOut(len) => self.in_out(addr, &len, false),
            Shape::TimeLeft(len) => self.in_out(addr, &Len::Fixed(len), true),
            Shape::Out(len, ..) => self.output(addr, &len),
            Shape::Length { .. } => self.length(i, addr),
            Shape::Segments(way, count) => {
                let count = self.args[usize::from(count)];
                let landing = self.landings.len();
                let gathered = self.iovec(way, addr, count)?.map(Arg::Segments);
                if gathered.is_none() {
                    self.landings.truncate(landing);
                }
                gathered
            }
            Shape::Messages(way, count) => {
                let landing = self.landings.len();
                let count = count.map(|arg| self.args[usize::from(arg)] as u32);
                let gathered = self.messages(way, addr, count)?.map(Arg::Messages);
                if gathered.is_none() {
                    self.landings.truncate(landing);
                }
                gathered
            }
            Shape::Strings => self.string_array(addr)?,
            Shape::MaskPair => self.mask_pair(addr),
        };
        Ok(gathered.unwrap_or(Arg::Bad))
    }

    /// Bytes behind a pointer, and the number among them that says so, if it is inside; `None` passes the
    /// pointer on as a bad one.
    fn bytes(&mut self, addr: u64, len: &Len) -> Option<(u64, Option<(u32, u32)>)> {
        match len {
            Len::Pointed(arg) => {
                let length = self.pointed(*arg)?;
                Some((self.shapes.get(usize::from(*arg))?.room(length)?, None))
            }
            Len::Inside(inside) => {
                let at = addr.checked_add(inside.at.into())?;
                let number = memory::read_u32(self.mem, at).ok()?;
                Some((inside.bytes(number)?, Some((inside.at, number))))
            }
            len => Some((len.by_args(&self.args)?, None)),
        }
    }

    /// The length behind that argument. It is read once, however often it counts.
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

    /// Reads what the kernel would. A number inside that gave the length is kept as it was then, whatever
    /// another thread does to it.
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

    fn in_out(&mut self, addr: u64, len: &Len, forgiving: bool) -> Option<Arg> {
        let read = self.read_sized(addr, len)?;
        if self.probe && !forgiving && !read.is_empty() && !self.mem.writable(addr, read.len() as u64) {
            return None;
        }
        self.land(addr, read.len() as u64, forgiving);
        Some(bytes(read))
    }

    fn output(&mut self, addr: u64, len: &Len) -> Option<Arg> {
        let (len, _) = self.bytes(addr, len)?;
        if self.probe && len > 0 && !self.mem.writable(addr, len) {
            return None;
        }
        self.land(addr, len, false);
        Some(Arg::Room)
    }

    fn length(&mut self, i: usize, addr: u64) -> Option<Arg> {
        let length = self.pointed(u8::try_from(i).ok()?)?;
        let length = self.shapes.get(i)?.carried(length)?;
        self.land(addr, 4, false);
        Some(bytes(length.to_le_bytes().to_vec()))
    }

    /// pselect6's mask travels as its size, and the mask if there is one.
    fn mask_pair(&mut self, addr: u64) -> Option<Arg> {
        let mut pair = self.read(addr, 16)?;
        let mask = u64::from_le_bytes(pair[..8].try_into().ok()?);
        pair.drain(..8);
        if mask != 0 {
            pair.extend(self.read(mask, 8)?);
        }
        Some(bytes(pair))
    }

    /// The strings of argv or envp, one after the other.
    fn string_array(&mut self, addr: u64) -> Result<Option<Arg>, Gather> {
        const TOO_BIG: Gather = Gather::Errno(libc::E2BIG);
        let Ok(pointers) = memory::read_words(self.mem, addr, limits::EXEC_TOTAL / 8) else {
            return Ok(None);
        };
        let mut all = Vec::new();
        for pointer in pointers.ok_or(TOO_BIG)? {
            let Ok(text) = memory::read_text(self.mem, pointer, limits::EXEC_STRING) else { return Ok(None) };
            self.strings += text.len() + 8;
            if text.last() != Some(&0) || self.strings > limits::EXEC_TOTAL {
                return Err(TOO_BIG);
            }
            all.extend(text);
        }
        Ok(Some(Arg::Strings(ByteBuf::from(all))))
    }

    fn land(&mut self, addr: u64, len: u64, forgiving: bool) {
        self.landings.push(Landing { spans: vec![(addr, len)], forgiving });
    }
}

fn bytes(bytes: Vec<u8>) -> Arg {
    Arg::Bytes(ByteBuf::from(bytes))
}

#[cfg(test)]
mod tests;
