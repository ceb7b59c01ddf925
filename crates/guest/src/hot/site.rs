//! Call sites in a guest's code that lead to the stub.
//!
//! Of a site one whole instruction of at least five bytes is replaced, by a `jmp` of five: nothing else, and **not the
//! `syscall`**. So whoever comes to any other instruction of it finds that: a branch to the `syscall`, a call that is made
//! again, a frame of a signal that interrupted it, whatever handlers are under way while it is replaced. Inside of one
//! instruction nobody can be. Known are:
//!
//! ```text
//!   b8 NR 00 00 00         mov $nr,%eax          ← jmp
//!   0f 05                  syscall
//!   48 3d 0x f0 ff ff      cmp $-4095 (or -4096),%rax
//!
//!   80 3d xx xx xx xx 00   cmpb $0,FLAG(%rip)    ← jmp, and two bytes that nobody comes to
//!   74 xx                  je elsewhere
//!   31 c0                  xor %eax,%eax
//!   0f 05, 48 3d …         the same
//! ```
//! In the vDSO, where the clocks' functions end with the `syscall` of those that it cannot tell, anything may be behind that: a function
//! hands on no flags, and what a compiler has made of a `syscall` in it counts on none.
//!
//! Where the stub does not make the call it goes to that `syscall`: the shim sees the same trap at the same address as ever.
//!
//! A `jmp` of five bytes does not reach our range. It goes to a **hop**, in the bytes behind the last of the same file's code,
//! which are in its last page by accident, and are zeros: the ELF header says where that is. In the vDSO these are the last bytes of its image.

use super::stub;
use std::ops::Range;
use tern_tracee::procfs::Mapping;
use tern_tracee::{Memory, PAGE, Result};

/// Bytes in front of a `syscall`, and behind it, by which a site is known.
const BEFORE: usize = 12;
const BEHIND: usize = 4;
const LOOK: usize = BEFORE + 2 + BEHIND;
/// The longest hop.
pub(super) const HOP: u64 = 24;
/// More headers no file has that is looked at.
const MOST_HEADERS: usize = 32;
const HEADER: usize = 56;

/// Whether this call's sites are those of the vDSO.
pub(super) fn is_clock(nr: u32) -> bool {
    i64::from(nr) == libc::SYS_clock_gettime
}

/// What is known of the code around a `syscall`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// The instruction that is replaced.
    pub(super) start: u64,
    /// The first five of its bytes.
    pub(super) bytes: [u8; 5],
    /// The `syscall`.
    pub(super) call: u64,
    /// The flag that it asks for first whether there is one thread, and where it goes if there are more.
    pub(super) asks: Option<(u64, u64)>,
    /// The number of the call.
    pub(super) nr: u32,
}

impl Shape {
    /// The shape of the code that has just made call `nr`, behind whose `syscall` is `behind`.
    pub(super) fn of(memory: &Memory, behind: u64, nr: u32) -> Result<Option<Self>> {
        let mut bytes = [0; LOOK];
        let Some(from) = behind.checked_sub(BEFORE as u64 + 2) else { return Ok(None) };
        if memory.read_some(from, &mut bytes)? != LOOK {
            return Ok(None);
        }
        Ok(Self::of_bytes(&bytes, behind, nr))
    }

    fn of_bytes(bytes: &[u8; LOOK], behind: u64, nr: u32) -> Option<Self> {
        let (before, rest) = bytes.split_at(BEFORE);
        let &[0x0f, 0x05, ref after @ ..] = rest else { return None };
        // Its flags are set anew, so that nobody sees ours; of clocks only the vDSO has sites.
        if !matches!(after, [0x48, 0x3d, 0 | 1, 0xf0]) && !is_clock(nr) {
            return None;
        }
        let call = behind - 2;
        match *before {
            // read
            [_, 0x80, 0x3d, a, b, c, d, 0, 0x74, to, 0x31, 0xc0] if nr == 0 => {
                let (start, next) = (call - 11, call - 2);
                let flag = (start + 7).checked_add_signed(i32::from_le_bytes([a, b, c, d]).into())?;
                let elsewhere = next.checked_add_signed(to.cast_signed().into())?;
                Some(Self { start, bytes: [0x80, 0x3d, a, b, c], call, asks: Some((flag, elsewhere)), nr })
            }
            // A prefix in front would make it another instruction.
            [.., prefix, 0xb8, a, b, c, d]
                if u32::from_le_bytes([a, b, c, d]) == nr
                    && nr != 0
                    && !matches!(prefix, 0x40..=0x4f | 0x66) =>
            {
                Some(Self { start: call - 5, bytes: [0xb8, a, b, c, d], call, asks: None, nr })
            }
            _ => None,
        }
    }
}

/// A site that leads to the stub.
#[derive(Debug, Clone)]
pub(super) struct Site {
    pub(super) shape: Shape,
    jump: [u8; 5],
    hop: u64,
    hop_bytes: Vec<u8>,
    /// Its record in the table.
    pub(super) record: u64,
}

impl Site {
    /// What is to be written for this one; nothing if its hop is out of reach.
    pub(super) fn new(shape: Shape, hop: u64, record: u64, table: u64) -> Option<Self> {
        let distance = hop.cast_signed().checked_sub((shape.start + 5).cast_signed())?;
        let [a, b, c, d] = i32::try_from(distance).ok()?.to_le_bytes();
        let mut hop_bytes = Vec::with_capacity(HOP as usize);
        if shape.asks.is_some() {
            // mov %rax,KEPT: it may still be wanted there.
            hop_bytes.extend([0x48, 0xa3]);
            hop_bytes.extend((table + stub::KEPT_RAX as u64).to_le_bytes());
        }
        // mov $record,%rax; jmp *(%rax)
        hop_bytes.extend([0x48, 0xb8]);
        hop_bytes.extend(record.to_le_bytes());
        hop_bytes.extend([0xff, 0x20]);
        Some(Self { shape, jump: [0xe9, a, b, c, d], hop, hop_bytes, record })
    }

    /// What the stub finds of it.
    pub(super) fn record(&self, code: u64) -> Option<[u8; stub::RECORD]> {
        let entry = code + stub::entry(self.shape.nr, self.shape.asks.is_some())?;
        let (flag, elsewhere) = self.shape.asks.unwrap_or_default();
        let call = self.shape.call;
        let words = [entry, flag, elsewhere, call, call + 2, self.shape.nr.into()];
        let mut bytes = [0; stub::RECORD];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        Some(bytes)
    }

    /// Whether this is an address in its hop, and not the first.
    pub(super) fn in_hop(&self, at: u64) -> Option<bool> {
        let inside = at.checked_sub(self.hop).filter(|inside| *inside < self.hop_bytes.len() as u64);
        inside.map(|inside| inside > 0)
    }

    /// Lets it lead to the stub; false if that cannot be, and then all is as it was. Its thread is in a trap, and there is no
    /// other.
    pub(super) fn place(&self, memory: &Memory) -> bool {
        let mut now = vec![0xff; self.hop_bytes.len()];
        if memory.read(self.hop, &mut now).is_err() || now.iter().any(|byte| *byte != 0) {
            return false;
        }
        // A kernel may be told to let nobody write to code (proc_mem.force_override).
        let placed = memory.write_forced(self.hop, &self.hop_bytes).is_ok()
            && memory.write_forced(self.shape.start, &self.jump).is_ok();
        if !placed {
            self.restore(memory);
        }
        placed
    }

    /// Puts back what was there. What is there now may be another file by now, or nothing: that is left alone.
    pub(super) fn restore(&self, memory: &Memory) {
        let put_back = |at: u64, ours: &[u8], theirs: &[u8]| {
            let mut now = vec![0; ours.len()];
            if memory.read_some(at, &mut now).is_ok_and(|read| read == now.len()) && now == ours {
                let _unmapped_meanwhile = memory.write_forced(at, theirs);
            }
        };
        put_back(self.shape.start, &self.jump, &self.shape.bytes);
        put_back(self.hop, &self.hop_bytes, &vec![0; self.hop_bytes.len()]);
    }
}

/// Room for hops in the code of a file that is mapped.
#[derive(Debug)]
pub(super) struct Room {
    /// The mapping.
    code: Range<u64>,
    /// What of it is free.
    free: Range<u64>,
    /// It is the vDSO.
    vdso: bool,
}

impl Room {
    /// The room for a site among these maps; none if it is not a file's code that is only read.
    pub(super) fn beside(site: u64, maps: &[Mapping], memory: &Memory) -> Option<Self> {
        let at = maps.iter().position(|m| m.start <= site && site < m.end)?;
        let code = &maps[at];
        let read_only = code.prot == (libc::PROT_READ | libc::PROT_EXEC) as u32;
        let vdso = code.name == b"[vdso]";
        if !read_only || code.shared || (code.is_anonymous() && !vdso) {
            return None;
        }
        if vdso {
            let mut image = vec![0; usize::try_from(code.end - code.start).ok()?];
            memory.read(code.start, &mut image).ok()?;
            let used = image.iter().rposition(|byte| *byte != 0)? as u64 + 1;
            let free = (code.start + used).next_multiple_of(16)..code.end;
            return Some(Self { code: code.start..code.end, free, vdso });
        }
        let same = |m: &&Mapping| (m.device, m.inode, m.offset) == (code.device, code.inode, 0);
        let head = maps[..=at].iter().rev().find(same)?;
        let mut elf = [0; 64 + MOST_HEADERS * HEADER];
        memory.read(head.start, &mut elf).ok()?;
        let end = end_of_code(&elf, code.offset)?;
        let from = code.start.checked_add(end.checked_sub(code.offset)?)?.checked_next_multiple_of(16)?;
        let last_page = code.end.checked_sub(PAGE)?;
        (last_page < from && from < code.end).then_some(Self {
            code: code.start..code.end,
            free: from..code.end,
            vdso,
        })
    }

    /// Whether this address is in the same code.
    pub(super) fn serves(&self, site: u64) -> bool {
        self.code.contains(&site)
    }

    /// Whether sites of this call may be in it.
    pub(super) fn is_for(&self, nr: u32) -> bool {
        self.vdso == is_clock(nr)
    }

    /// A place for one more hop.
    pub(super) fn next(&mut self) -> Option<u64> {
        let hop = self.free.start;
        let end = hop.checked_add(HOP).filter(|end| *end <= self.free.end)?;
        self.free.start = end;
        Some(hop)
    }
}

/// Where in an ELF file the code ends that is mapped from this offset on.
fn end_of_code(elf: &[u8], offset: u64) -> Option<u64> {
    let number = |at: usize, length: usize| {
        let bytes = elf.get(at..at.checked_add(length)?)?;
        Some(bytes.iter().rev().fold(0, |sum: u64, byte| sum << 8 | u64::from(*byte)))
    };
    if elf.get(..6)? != b"\x7fELF\x02\x01" || number(54, 2)? != HEADER as u64 {
        return None;
    }
    let headers = usize::try_from(number(32, 8)?).ok()?;
    let count = usize::try_from(number(56, 2)?).ok()?.min(MOST_HEADERS);
    (0..count).find_map(|n| {
        let at = headers.checked_add(n * HEADER)?;
        let (kind, flags) = (number(at, 4)?, number(at + 4, 4)?);
        let (from, in_file, in_memory) = (number(at + 8, 8)?, number(at + 32, 8)?, number(at + 40, 8)?);
        // PT_LOAD, PF_X
        let is_it = kind == 1 && flags & 1 == 1 && from & !(PAGE - 1) == offset && in_file == in_memory;
        is_it.then(|| from.checked_add(in_file)).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEHIND_IT: u64 = 0x1_0000;

    fn bytes(before: &[u8]) -> [u8; LOOK] {
        let mut all = [0x90; LOOK];
        all[BEFORE - before.len()..BEFORE].copy_from_slice(before);
        all[BEFORE..].copy_from_slice(&[0x0f, 0x05, 0x48, 0x3d, 0, 0xf0]);
        all
    }

    #[test]
    fn known_shapes_and_no_others() {
        let simple = bytes(&[0xb8, 8, 0, 0, 0]);
        let shape = Shape::of_bytes(&simple, BEHIND_IT, 8).unwrap();
        assert_eq!((shape.start, shape.call, shape.asks), (BEHIND_IT - 7, BEHIND_IT - 2, None));
        assert_eq!(
            Shape::of_bytes(&simple, BEHIND_IT, 9),
            None,
            "it made another call: somebody came from elsewhere"
        );
        assert_eq!(Shape::of_bytes(&bytes(&[0x41, 0xb8, 8, 0, 0, 0]), BEHIND_IT, 8), None, "mov to r8d");
        let asking = bytes(&[0x80, 0x3d, 0x10, 0, 0, 0, 0, 0x74, 0x20, 0x31, 0xc0]);
        let shape = Shape::of_bytes(&asking, BEHIND_IT, 0).unwrap();
        let start = BEHIND_IT - 13;
        assert_eq!((shape.start, shape.asks), (start, Some((start + 7 + 0x10, start + 9 + 0x20))));
        let mut flags_are_used = simple;
        flags_are_used[BEFORE + 2] = 0xc3;
        assert_eq!(Shape::of_bytes(&flags_are_used, BEHIND_IT, 8), None);
        assert_eq!(Shape::of_bytes(&bytes(&[0x31, 0xc0]), BEHIND_IT, 0), None);
    }

    #[test]
    fn a_hop_must_be_in_reach() {
        let shape = Shape::of_bytes(&bytes(&[0xb8, 1, 0, 0, 0]), BEHIND_IT, 1).unwrap();
        let site = Site::new(shape, BEHIND_IT + 0x100, 0x3100_0000_2000, 0x3100_0000_2000).unwrap();
        assert_eq!(site.jump, [0xe9, 0x02, 0x01, 0, 0]);
        assert_eq!(
            (site.in_hop(BEHIND_IT + 0x100), site.in_hop(BEHIND_IT + 0x100 + 12)),
            (Some(false), None)
        );
        assert!(site.record(0x3100_0000_0100).is_some());
        assert!(Site::new(shape, 1 << 40, 0, 0).is_none());
    }

    #[test]
    fn the_libc_has_room_or_says_that_it_has_none() {
        let me = std::process::id() as i32;
        let (maps, memory) = (tern_tracee::procfs::maps(me).unwrap(), Memory::open(me).unwrap());
        let code = maps.iter().find(|m| m.prot == 5 && m.name.starts_with(b"/")).unwrap();
        if let Some(mut room) = Room::beside(code.start, &maps, &memory) {
            assert!(room.serves(code.start) && room.next().is_none_or(|hop| room.serves(hop)));
        }
        let stack = maps.iter().find(|m| m.name == b"[stack]").unwrap();
        assert!(Room::beside(stack.start, &maps, &memory).is_none());
    }

    #[test]
    fn an_elf_header_may_say_anything() {
        let mut elf = vec![0xff; 64 + MOST_HEADERS * HEADER];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[54..56].copy_from_slice(&56u16.to_le_bytes());
        assert_eq!(end_of_code(&elf, 0), None);
        assert_eq!(end_of_code(&elf[..3], 0), None);
    }
}
