//! Access to a guest's memory, implemented by the guest's shim.

/// The memory of a stopped or waiting guest thread.
pub trait UserMemory {
    /// Fills `buf` from `addr`. After a fault the content of `buf` is undefined.
    ///
    /// # Errors
    /// [`Fault`] if any byte of the range cannot be read.
    fn read(&mut self, addr: u64, buf: &mut [u8]) -> Result<(), Fault>;

    /// Writes `data` to `addr`. After a fault a part may have been written, as with the kernel's
    /// own copies.
    ///
    /// # Errors
    /// [`Fault`] if the guest itself could not write some byte of the range.
    fn write(&mut self, addr: u64, data: &[u8]) -> Result<(), Fault>;

    /// The number of bytes from the beginning of this range to which the guest could write, as far as
    /// that is known without a write. Checked
    /// before a call that consumes the data that it reads, so that data which cannot be delivered is
    /// not taken from a pipe or a socket. An implementation that always returns `len` loses such
    /// data where the kernel would not.
    fn writable(&mut self, addr: u64, len: u64) -> u64 {
        let _ = addr;
        len
    }
}

/// The guest cannot access this memory; its program gets EFAULT.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("bad address in the guest's memory")]
pub struct Fault;

const PAGE: u64 = 4096;

/// The end of user space with five levels of page tables. With four it ends lower, and the kernel has
/// refused what lies between in some versions and not in others.
const USER_END: u64 = 1 << 56;

/// Whether this range lies in user space. For one that does not, the kernel returns EFAULT in many calls
/// before it does anything, also for a length of 0 (`access_ok` in Linux's asm/uaccess.h). Elsewhere it
/// finds inaccessible memory only when it transfers data.
pub(crate) fn is_user_range(addr: u64, len: u64) -> bool {
    addr.checked_add(len).is_some_and(|end| end <= USER_END)
}

/// Reads up to `max` bytes, and stops at a fault. A fault in the first page is an error.
pub(crate) fn read_up_to(mem: &mut dyn UserMemory, addr: u64, max: usize) -> Result<Vec<u8>, Fault> {
    read_while(mem, addr, max, |_| None)
}

/// Reads a NUL-terminated string, with its NUL. If it is longer than `max` bytes, returns the first
/// `max`, without a NUL: home's kernel then refuses it as too long.
///
/// # Errors
/// [`Fault`] if a part of it cannot be read.
pub fn read_c_string(mem: &mut dyn UserMemory, addr: u64, max: usize) -> Result<Vec<u8>, Fault> {
    let text = read_while(mem, addr, max, |chunk| chunk.iter().position(|&b| b == 0))?;
    if text.last() == Some(&0) || text.len() == max { Ok(text) } else { Err(Fault) }
}

/// Reads page by page, since the mapping may end before `max`. `end` finds the last byte to read.
fn read_while(
    mem: &mut dyn UserMemory,
    addr: u64,
    max: usize,
    end: impl Fn(&[u8]) -> Option<usize>,
) -> Result<Vec<u8>, Fault> {
    let mut got = Vec::new();
    while got.len() < max {
        let at = addr.checked_add(got.len() as u64).ok_or(Fault)?;
        let chunk = ((PAGE - at % PAGE) as usize).min(max - got.len());
        let from = got.len();
        got.resize(from + chunk, 0);
        if mem.read(at, &mut got[from..]).is_err() {
            got.truncate(from);
            return if from == 0 { Err(Fault) } else { Ok(got) };
        }
        if let Some(last) = end(&got[from..]) {
            got.truncate(from + last + 1);
            break;
        }
    }
    Ok(got)
}

/// Reads an array of 64-bit words up to its zero word, which is not returned. `None` if it has more
/// than `max` words.
pub(crate) fn read_words(mem: &mut dyn UserMemory, addr: u64, max: usize) -> Result<Option<Vec<u64>>, Fault> {
    let mut words = Vec::new();
    let mut chunk = [0; PAGE as usize];
    let mut at = addr;
    loop {
        // A word that crosses a page is read by itself.
        let len = ((PAGE - at % PAGE) as usize & !7).max(8);
        mem.read(at, &mut chunk[..len])?;
        for word in chunk[..len].as_chunks::<8>().0 {
            match u64::from_le_bytes(*word) {
                0 => return Ok(Some(words)),
                _ if words.len() == max => return Ok(None),
                word => words.push(word),
            }
        }
        at = at.checked_add(len as u64).ok_or(Fault)?;
    }
}

/// Reads one 32-bit number.
pub(crate) fn read_u32(mem: &mut dyn UserMemory, addr: u64) -> Result<u32, Fault> {
    let mut word = [0; 4];
    mem.read(addr, &mut word)?;
    Ok(u32::from_le_bytes(word))
}
