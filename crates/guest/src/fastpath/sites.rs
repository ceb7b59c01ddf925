//! Call sites in a guest's code that are patched to jump to the fast path.
//!
//! One whole instruction of at least five bytes is replaced by a five-byte `jmp`, and nothing else,
//! in particular **not the `syscall`**. So all other instructions stay valid targets: for a branch
//! to the `syscall`, for the restart of a call, and for the return of any handler that is running
//! while the site is patched. No thread can be in the middle of an instruction. The known forms
//! are:
//!
//! ```text
//!   b8 NR 00 00 00         mov $nr,%eax          ← jmp
//!   0f 05                  syscall
//!   48 3d 0x f0 ff ff      cmp $-4095 (or -4096),%rax
//!
//!   80 3d xx xx xx xx 00   cmpb $0,FLAG(%rip)    ← jmp, and two bytes that are never executed
//!   74 xx                  je elsewhere
//!   31 c0                  xor %eax,%eax
//!   0f 05, 48 3d …         the same
//! ```
//! The vDSO's clock functions end with a `syscall` for clocks that they cannot read. There, any
//! instruction may follow the `syscall`: a function returns no flags, and the compiler's code after
//! an inline `syscall` does not rely on them.
//!
//! If the fast path does not make the call it jumps to that `syscall`, so the shim sees a trap at
//! the usual address.
//!
//! A five-byte `jmp` cannot reach the reserved range. It leads to a **trampoline** in a code cave:
//! the zero bytes after the end of the same file's code, in its last page. The ELF header says
//! where the code ends. In the vDSO the cave is at the end of its image.

use super::{code, places};
use std::ops::Range;
use tern_tracee::procfs::Mapping;
use tern_tracee::{Memory, PAGE, Result};

/// The number of bytes before and after a `syscall` by which a site is recognised.
const LEN_BEFORE: usize = 12;
const LEN_AFTER: usize = 4;
const PATTERN_LEN: usize = LEN_BEFORE + 2 + LEN_AFTER;
/// The length of the longest trampoline.
pub(super) const TRAMPOLINE_LEN: u64 = 24;
/// Limit for the program headers of an ELF file.
const MAX_HEADERS: usize = 32;
const HEADER: usize = 56;

/// Whether the sites of this call are in the vDSO.
pub(super) fn is_clock(nr: u32) -> bool {
    i64::from(nr) == libc::SYS_clock_gettime
}

/// A recognised form of the code around a `syscall`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CodePattern {
    /// The address of the instruction to replace.
    pub(super) start: u64,
    /// Its first five bytes.
    pub(super) bytes: [u8; 5],
    /// The address of the `syscall`.
    pub(super) call: u64,
    /// The addresses of the flag for a single thread that the code tests first, and of the branch
    /// target if there are several threads.
    pub(super) thread_flag: Option<(u64, u64)>,
    /// The number of the call.
    pub(super) nr: u32,
}

impl CodePattern {
    /// Recognises the code that has just made call `nr`, which returns to `return_addr`.
    pub(super) fn of(memory: &Memory, return_addr: u64, nr: u32) -> Result<Option<Self>> {
        let mut bytes = [0; PATTERN_LEN];
        let Some(from) = return_addr.checked_sub(LEN_BEFORE as u64 + 2) else { return Ok(None) };
        if memory.read_some(from, &mut bytes)? != PATTERN_LEN {
            return Ok(None);
        }
        Ok(Self::of_bytes(&bytes, return_addr, nr))
    }

    fn of_bytes(bytes: &[u8; PATTERN_LEN], return_addr: u64, nr: u32) -> Option<Self> {
        let (before, rest) = bytes.split_at(LEN_BEFORE);
        let &[0x0f, 0x05, ref after @ ..] = rest else { return None };
        // The code must set the flags anew, so that the program does not see those of the fast
        // path. Sites of clock calls are exempt: they are in the vDSO only.
        if !matches!(after, [0x48, 0x3d, 0 | 1, 0xf0]) && !is_clock(nr) {
            return None;
        }
        let call = return_addr - 2;
        match *before {
            // read
            [_, 0x80, 0x3d, a, b, c, d, 0, 0x74, to, 0x31, 0xc0] if nr == 0 => {
                let (start, next) = (call - 11, call - 2);
                let flag = (start + 7).checked_add_signed(i32::from_le_bytes([a, b, c, d]).into())?;
                let branch_target = next.checked_add_signed(to.cast_signed().into())?;
                Some(Self {
                    start,
                    bytes: [0x80, 0x3d, a, b, c],
                    call,
                    thread_flag: Some((flag, branch_target)),
                    nr,
                })
            }
            // With a prefix it would be another instruction.
            [.., prefix, 0xb8, a, b, c, d]
                if u32::from_le_bytes([a, b, c, d]) == nr
                    && nr != 0
                    && !matches!(prefix, 0x40..=0x4f | 0x66) =>
            {
                Some(Self { start: call - 5, bytes: [0xb8, a, b, c, d], call, thread_flag: None, nr })
            }
            _ => None,
        }
    }
}

/// A patched call site.
#[derive(Debug, Clone)]
pub(super) struct PatchedSite {
    pub(super) pattern: CodePattern,
    jump: [u8; 5],
    trampoline: u64,
    trampoline_bytes: Vec<u8>,
    /// The address of its record in the table.
    pub(super) record: u64,
}

impl PatchedSite {
    /// Prepares the code to be written; none if the trampoline is out of reach.
    pub(super) fn new(pattern: CodePattern, trampoline: u64, record: u64, table: u64) -> Option<Self> {
        let distance = trampoline.cast_signed().checked_sub((pattern.start + 5).cast_signed())?;
        let [a, b, c, d] = i32::try_from(distance).ok()?.to_le_bytes();
        let mut trampoline_bytes = Vec::with_capacity(TRAMPOLINE_LEN as usize);
        if pattern.thread_flag.is_some() {
            // mov %rax,SAVED_RAX: the program may still need it.
            trampoline_bytes.extend([0x48, 0xa3]);
            trampoline_bytes.extend((table + code::SAVED_RAX as u64).to_le_bytes());
        }
        // mov $record,%rax; jmp *(%rax)
        trampoline_bytes.extend([0x48, 0xb8]);
        trampoline_bytes.extend(record.to_le_bytes());
        trampoline_bytes.extend([0xff, 0x20]);
        Some(Self { pattern, jump: [0xe9, a, b, c, d], trampoline, trampoline_bytes, record })
    }

    /// Its record in the table, for the fast path.
    pub(super) fn record(&self, code: u64) -> Option<[u8; code::RECORD]> {
        let entry = code + places::entry(self.pattern.nr, self.pattern.thread_flag.is_some())?;
        let (flag, branch_target) = self.pattern.thread_flag.unwrap_or_default();
        let call = self.pattern.call;
        let words = [entry, flag, branch_target, call, call + 2, self.pattern.nr.into()];
        let mut bytes = [0; code::RECORD];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        Some(bytes)
    }

    /// Whether this address is inside its trampoline, but not at its first byte; none if it is
    /// outside.
    pub(super) fn in_trampoline(&self, at: u64) -> Option<bool> {
        let inside =
            at.checked_sub(self.trampoline).filter(|inside| *inside < self.trampoline_bytes.len() as u64);
        inside.map(|inside| inside > 0)
    }

    /// Patches the site; false if that is impossible, and then nothing has changed. Its thread is
    /// in a trap, and is the only one.
    pub(super) fn patch(&self, memory: &Memory) -> bool {
        let mut now = vec![0xff; self.trampoline_bytes.len()];
        if memory.read(self.trampoline, &mut now).is_err() || now.iter().any(|byte| *byte != 0) {
            return false;
        }
        // The kernel may be configured to reject writes to code (proc_mem.force_override).
        let patched = memory.write_forced(self.trampoline, &self.trampoline_bytes).is_ok()
            && memory.write_forced(self.pattern.start, &self.jump).is_ok();
        if !patched {
            self.restore(memory);
        }
        patched
    }

    /// Restores the original code, except where the memory has changed meanwhile: it may have been
    /// unmapped, or be another file's.
    pub(super) fn restore(&self, memory: &Memory) {
        let put_back = |at: u64, ours: &[u8], theirs: &[u8]| {
            let mut now = vec![0; ours.len()];
            if memory.read_some(at, &mut now).is_ok_and(|read| read == now.len()) && now == ours {
                let _unmapped_meanwhile = memory.write_forced(at, theirs);
            }
        };
        put_back(self.pattern.start, &self.jump, &self.pattern.bytes);
        put_back(self.trampoline, &self.trampoline_bytes, &vec![0; self.trampoline_bytes.len()]);
    }
}

/// Unused bytes at the end of a mapped file's code.
#[derive(Debug)]
pub(super) struct CodeCave {
    /// The mapping.
    code: Range<u64>,
    /// Its unused bytes.
    free: Range<u64>,
    /// Whether it is the vDSO.
    vdso: bool,
}

impl CodeCave {
    /// The cave for a site, if the site is in a read-only mapping of a file's code or of the vDSO.
    pub(super) fn find(site: u64, maps: &[Mapping], memory: &Memory) -> Option<Self> {
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
        let mut elf = [0; 64 + MAX_HEADERS * HEADER];
        memory.read(head.start, &mut elf).ok()?;
        let end = code_end(&elf, code.offset)?;
        let from = code.start.checked_add(end.checked_sub(code.offset)?)?.checked_next_multiple_of(16)?;
        let last_page = code.end.checked_sub(PAGE)?;
        (last_page < from && from < code.end).then_some(Self {
            code: code.start..code.end,
            free: from..code.end,
            vdso,
        })
    }

    /// Whether this address is in the same mapping.
    pub(super) fn contains(&self, site: u64) -> bool {
        self.code.contains(&site)
    }

    /// Whether sites of this call may use it.
    pub(super) fn accepts(&self, nr: u32) -> bool {
        self.vdso == is_clock(nr)
    }

    /// Allocates space for one more trampoline.
    pub(super) fn allocate(&mut self) -> Option<u64> {
        let trampoline = self.free.start;
        let end = trampoline.checked_add(TRAMPOLINE_LEN).filter(|end| *end <= self.free.end)?;
        self.free.start = end;
        Some(trampoline)
    }
}

/// The offset in an ELF file at which the code ends, if the mapping of that code begins at
/// `offset`.
fn code_end(elf: &[u8], offset: u64) -> Option<u64> {
    let number = |at: usize, length: usize| {
        let bytes = elf.get(at..at.checked_add(length)?)?;
        Some(bytes.iter().rev().fold(0, |sum: u64, byte| sum << 8 | u64::from(*byte)))
    };
    if elf.get(..6)? != b"\x7fELF\x02\x01" || number(54, 2)? != HEADER as u64 {
        return None;
    }
    let headers = usize::try_from(number(32, 8)?).ok()?;
    let count = usize::try_from(number(56, 2)?).ok()?.min(MAX_HEADERS);
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

    const RETURN_ADDR: u64 = 0x1_0000;

    fn bytes(before: &[u8]) -> [u8; PATTERN_LEN] {
        let mut all = [0x90; PATTERN_LEN];
        all[LEN_BEFORE - before.len()..LEN_BEFORE].copy_from_slice(before);
        all[LEN_BEFORE..].copy_from_slice(&[0x0f, 0x05, 0x48, 0x3d, 0, 0xf0]);
        all
    }

    #[test]
    fn only_known_patterns_are_recognised() {
        let simple = bytes(&[0xb8, 8, 0, 0, 0]);
        let pattern = CodePattern::of_bytes(&simple, RETURN_ADDR, 8).unwrap();
        assert_eq!(
            (pattern.start, pattern.call, pattern.thread_flag),
            (RETURN_ADDR - 7, RETURN_ADDR - 2, None)
        );
        assert_eq!(
            CodePattern::of_bytes(&simple, RETURN_ADDR, 9),
            None,
            "the call has another number, so control came from elsewhere"
        );
        assert_eq!(
            CodePattern::of_bytes(&bytes(&[0x41, 0xb8, 8, 0, 0, 0]), RETURN_ADDR, 8),
            None,
            "mov to r8d"
        );
        let asking = bytes(&[0x80, 0x3d, 0x10, 0, 0, 0, 0, 0x74, 0x20, 0x31, 0xc0]);
        let pattern = CodePattern::of_bytes(&asking, RETURN_ADDR, 0).unwrap();
        let start = RETURN_ADDR - 13;
        assert_eq!((pattern.start, pattern.thread_flag), (start, Some((start + 7 + 0x10, start + 9 + 0x20))));
        let mut flags_are_used = simple;
        flags_are_used[LEN_BEFORE + 2] = 0xc3;
        assert_eq!(CodePattern::of_bytes(&flags_are_used, RETURN_ADDR, 8), None);
        assert_eq!(CodePattern::of_bytes(&bytes(&[0x31, 0xc0]), RETURN_ADDR, 0), None);
    }

    #[test]
    fn trampoline_must_be_in_reach() {
        let pattern = CodePattern::of_bytes(&bytes(&[0xb8, 1, 0, 0, 0]), RETURN_ADDR, 1).unwrap();
        let site =
            PatchedSite::new(pattern, RETURN_ADDR + 0x100, 0x3100_0000_2000, 0x3100_0000_2000).unwrap();
        assert_eq!(site.jump, [0xe9, 0x02, 0x01, 0, 0]);
        assert_eq!(
            (site.in_trampoline(RETURN_ADDR + 0x100), site.in_trampoline(RETURN_ADDR + 0x100 + 12)),
            (Some(false), None)
        );
        assert!(site.record(0x3100_0000_0100).is_some());
        assert!(PatchedSite::new(pattern, 1 << 40, 0, 0).is_none());
    }

    #[test]
    fn code_cave_is_found_only_in_file_code() {
        let me = std::process::id() as i32;
        let (maps, memory) = (tern_tracee::procfs::maps(me).unwrap(), Memory::open(me).unwrap());
        let code = maps.iter().find(|m| m.prot == 5 && m.name.starts_with(b"/")).unwrap();
        if let Some(mut cave) = CodeCave::find(code.start, &maps, &memory) {
            assert!(
                cave.contains(code.start)
                    && cave.allocate().is_none_or(|trampoline| cave.contains(trampoline))
            );
        }
        let stack = maps.iter().find(|m| m.name == b"[stack]").unwrap();
        assert!(CodeCave::find(stack.start, &maps, &memory).is_none());
    }

    #[test]
    fn invalid_elf_headers_are_rejected() {
        let mut elf = vec![0xff; 64 + MAX_HEADERS * HEADER];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[54..56].copy_from_slice(&56u16.to_le_bytes());
        assert_eq!(code_end(&elf, 0), None);
        assert_eq!(code_end(&elf[..3], 0), None);
    }
}
