//! Memory that plays the role of a guest's memory: direct calls access it natively, forwarded calls
//! only through `UserMemory`.

use tern_syscall::{Fault, UserMemory};

const PAGE: usize = 4096;
const SIZE: usize = 64 * PAGE;

/// The byte that fills a mailbox before a call.
pub(crate) const STALE: u8 = 0xa5;
/// The byte that fills the guest's memory.
pub(crate) const UNTOUCHED: u8 = 0xee;

/// Page-aligned bytes, all `STALE` at first.
pub(crate) struct Pages {
    bytes: Vec<u8>,
    at: usize,
    len: usize,
}

impl Pages {
    pub(crate) fn new(len: usize) -> Self {
        let bytes = vec![STALE; len + PAGE];
        let at = bytes.as_ptr().align_offset(PAGE);
        Self { bytes, at, len }
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.at..self.at + self.len]
    }
}

/// The guest's memory. All other addresses fault.
pub(crate) struct Arena {
    pages: Pages,
    used: usize,
}

impl Arena {
    pub(crate) fn new() -> Self {
        let mut arena = Self { pages: Pages::new(SIZE), used: 0 };
        arena.reset();
        arena
    }

    pub(crate) fn reset(&mut self) {
        self.pages.bytes().fill(UNTOUCHED);
        self.used = 16;
    }

    pub(crate) fn snapshot(&mut self) -> Vec<u8> {
        self.pages.bytes().to_vec()
    }

    /// Reserves this many bytes. Returns their address.
    pub(crate) fn reserve(&mut self, len: usize) -> u64 {
        let at = self.used;
        self.used = (at + len).next_multiple_of(16);
        assert!(self.used < SIZE);
        self.pages.bytes()[at..].as_ptr() as u64
    }

    /// The address of the first data.
    pub(crate) fn first(&mut self) -> u64 {
        self.pages.bytes()[16..].as_ptr() as u64
    }

    pub(crate) fn put(&mut self, bytes: &[u8]) -> u64 {
        let addr = self.reserve(bytes.len());
        self.write(addr, bytes).expect("room was just made");
        addr
    }

    pub(crate) fn text(&mut self, text: &str) -> u64 {
        self.put(&[text.as_bytes(), b"\0"].concat())
    }

    pub(crate) fn words(&mut self, words: &[u64]) -> u64 {
        self.put(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>())
    }

    pub(crate) fn ints(&mut self, ints: &[i32]) -> u64 {
        self.put(&ints.iter().flat_map(|int| int.to_le_bytes()).collect::<Vec<_>>())
    }

    pub(crate) fn get(&mut self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read(addr, &mut bytes).expect("an address of this arena");
        bytes
    }

    pub(crate) fn int(&mut self, addr: u64) -> i32 {
        i32::from_le_bytes(self.get(addr, 4).try_into().expect("four bytes"))
    }

    fn range(&mut self, addr: u64, len: usize) -> Result<std::ops::Range<usize>, Fault> {
        let start = addr.checked_sub(self.pages.bytes().as_ptr() as u64).ok_or(Fault)?;
        let start = usize::try_from(start).map_err(|_e| Fault)?;
        let end = start.checked_add(len).filter(|&end| end <= SIZE).ok_or(Fault)?;
        Ok(start..end)
    }
}

impl UserMemory for Arena {
    fn read(&mut self, addr: u64, buf: &mut [u8]) -> Result<(), Fault> {
        let range = self.range(addr, buf.len())?;
        buf.copy_from_slice(&self.pages.bytes()[range]);
        Ok(())
    }

    fn write(&mut self, addr: u64, data: &[u8]) -> Result<(), Fault> {
        let range = self.range(addr, data.len())?;
        self.pages.bytes()[range].copy_from_slice(data);
        Ok(())
    }

    fn writable(&mut self, addr: u64, len: u64) -> u64 {
        let end = self.pages.bytes().as_ptr() as u64 + SIZE as u64;
        self.range(addr, 0).map_or(0, |_| len.min(end - addr))
    }
}
