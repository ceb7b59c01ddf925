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
//! In programs with several threads, a call that may be cancelled loads its arguments from the stack
//! first:
//! ```text
//!   48 8b 74 24 xx         mov N(%rsp),%rsi      ← jmp
//!   41 89 c0               mov %eax,%r8d
//!   8b 7c 24 xx            mov N(%rsp),%edi
//!   31 c0                  xor %eax,%eax
//!   0f 05, 48 3d …         the same: read
//!
//!   b8 NR 00 00 00         mov $nr,%eax          ← jmp
//!   48 8b 54 24 xx         mov N(%rsp),%rdx      such loads of rdi, rsi and rdx, or of their halves
//!   48 8b 74 24 xx         mov N(%rsp),%rsi
//!   0f 05, 48 3d …         the same
//! ```
//! Since glibc 2.41, and in musl, all calls that may be cancelled are made in one place, whatever their
//! number, and glibc has a second one for programs with one thread:
//! ```text
//!   4c 89 5c 24 08         mov %r11,8(%rsp)      ← jmp
//!   0f 05                  syscall
//!   c3                     ret
//!
//!   48 8b 44 24 10         mov 16(%rsp),%rax     ← jmp
//!   0f 05                  syscall
//!   5b c3                  pop %rbx; ret
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
//! where the code ends. In the vDSO the cave is at the end of its image. The trampoline executes the
//! instructions from the replaced one up to the `syscall`, and jumps to the fast path.

use super::{code, places};
use std::ops::Range;
use tern_tracee::procfs::Mapping;
use tern_tracee::{Memory, PAGE, Result};

/// The number of bytes before and after a `syscall` by which a site is recognised.
const LEN_BEFORE: usize = 16;
/// The length of the longest loads from the stack.
const MAX_LOADS_LEN: usize = 10;
const LEN_AFTER: usize = 4;
const PATTERN_LEN: usize = LEN_BEFORE + 2 + LEN_AFTER;
/// The length of the longest trampoline.
pub(super) const TRAMPOLINE_LEN: u64 = 32;
/// Limit for the program headers of an ELF file.
const MAX_HEADERS: usize = 32;
const HEADER: usize = 56;

/// Whether the sites of this call are in the vDSO.
pub(super) fn is_clock(nr: u32) -> bool {
    i64::from(nr) == libc::SYS_clock_gettime
}

/// A recognised form of the code around a `syscall`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CodePattern {
    /// The address of the instruction to replace.
    pub(super) start: u64,
    /// The code from there to the `syscall`; the jump replaces the first five bytes.
    pub(super) code: Vec<u8>,
    /// The addresses of the flag for a single thread that this code tests, and of the branch target
    /// if there are several threads.
    pub(super) thread_flag: Option<(u64, u64)>,
    /// The number of the call; none if the code makes calls of any number.
    pub(super) nr: Option<u32>,
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
        if let Some(start) = return_addr.checked_sub(7)
            && let ([.., 0x4c, 0x89, 0x5c, 0x24, 8], [0xc3, ..])
            | ([.., 0x48, 0x8b, 0x44, 0x24, 0x10], [0x5b, 0xc3, ..]) = (before, after)
        {
            let code = before[LEN_BEFORE - 5..].to_vec();
            return Some(Self { start, code, thread_flag: None, nr: None });
        }
        // The code must set the flags anew, so that the program does not see those of the fast
        // path. Sites of clock calls are exempt: they are in the vDSO only.
        if !matches!(after, [0x48, 0x3d, 0 | 1, 0xf0]) && !is_clock(nr) {
            return None;
        }
        let call = return_addr - 2;
        let (len, thread_flag) = match *before {
            // read
            [.., 0x80, 0x3d, a, b, c, d, 0, 0x74, to, 0x31, 0xc0] if nr == 0 => {
                let flag = (call - 4).checked_add_signed(i32::from_le_bytes([a, b, c, d]).into())?;
                let branch_target = (call - 2).checked_add_signed(to.cast_signed().into())?;
                (11, Some((flag, branch_target)))
            }
            [.., 0x48, 0x8b, 0x74, 0x24, _, 0x41, 0x89, 0xc0, 0x8b, 0x7c, 0x24, _, 0x31, 0xc0] if nr == 0 => {
                (14, None)
            }
            _ => {
                let sets_number = |len: &usize| match before[..LEN_BEFORE - len] {
                    // With a prefix it would be another instruction.
                    [.., prefix, 0xb8, a, b, c, d] => {
                        u32::from_le_bytes([a, b, c, d]) == nr
                            && nr != 0
                            && !matches!(prefix, 0x40..=0x4f | 0x66)
                            && are_stack_loads(&before[LEN_BEFORE - len..])
                    }
                    _ => false,
                };
                (5 + (0..=MAX_LOADS_LEN).find(sets_number)?, None)
            }
        };
        let start = call.checked_sub(len as u64)?;
        Some(Self { start, code: before[LEN_BEFORE - len..].to_vec(), thread_flag, nr: Some(nr) })
    }

    /// The address of the `syscall`.
    pub(super) fn call(&self) -> u64 {
        self.start + self.code.len() as u64
    }

    /// The code for another address.
    fn relocated(&self, to: u64) -> Option<Vec<u8>> {
        let Some((flag, branch_target)) = self.thread_flag else { return Some(self.code.clone()) };
        let distance =
            |from: u64, to: u64| i32::try_from(to.cast_signed().checked_sub(from.cast_signed())?).ok();
        let mut code = vec![0x80, 0x3d];
        code.extend(distance(to + 7, flag)?.to_le_bytes());
        code.extend([0, 0x0f, 0x84]);
        code.extend(distance(to + 13, branch_target)?.to_le_bytes());
        code.extend([0x31, 0xc0]);
        Some(code)
    }
}

/// Whether the code only loads rdi, rsi and rdx, or their halves, from the stack.
fn are_stack_loads(mut code: &[u8]) -> bool {
    while let [0x48, 0x8b, 0x7c | 0x74 | 0x54, 0x24, _, rest @ ..]
    | [0x8b, 0x7c | 0x74 | 0x54, 0x24, _, rest @ ..] = code
    {
        code = rest;
    }
    code.is_empty()
}

/// A patched call site.
#[derive(Debug, Clone)]
pub(super) struct PatchedSite {
    pub(super) pattern: CodePattern,
    jump: [u8; 5],
    trampoline: u64,
    trampoline_bytes: Vec<u8>,
    /// The numbers of its records in the table, each with the number of its calls.
    pub(super) records: Vec<(usize, u32)>,
}

impl PatchedSite {
    /// Prepares the code to be written, with a first record; none if the trampoline is out of reach.
    pub(super) fn new(
        pattern: CodePattern,
        trampoline: u64,
        (record, nr): (usize, u32),
        table: u64,
    ) -> Option<Self> {
        let distance = trampoline.cast_signed().checked_sub((pattern.start + 5).cast_signed())?;
        let [a, b, c, d] = i32::try_from(distance).ok()?.to_le_bytes();
        let mut trampoline_bytes = pattern.relocated(trampoline)?;
        // mov $record,%rcx; jmp *(%rcx)
        trampoline_bytes.extend([0x48, 0xb9]);
        trampoline_bytes.extend((table + code::record(record) as u64).to_le_bytes());
        trampoline_bytes.extend([0xff, 0x21]);
        let records = vec![(record, nr)];
        Some(Self { pattern, jump: [0xe9, a, b, c, d], trampoline, trampoline_bytes, records })
    }

    /// Writes the record with this number. All threads are stopped, or the only one is in a trap.
    pub(super) fn write_record(
        &self,
        (record, nr): (usize, u32),
        (code, table): (u64, u64),
        memory: &Memory,
    ) -> Result<()> {
        let Some(entry) = places::entry(nr).map(|entry| code + entry) else { return Ok(()) };
        let first = if self.pattern.nr.is_some() { entry } else { code + places::selects() };
        let call = self.pattern.call();
        let after = if is_clock(nr) { code + places::clock_sums() } else { call + 2 };
        let words = [first, code + places::call(record), call + 2, call, after, nr.into(), 0, entry];
        let mut bytes = [0; code::RECORD];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        memory.write(table + code::record(record) as u64, &bytes)
    }

    /// Adds a record for calls of another number. All threads are stopped, or the only one is in a trap.
    pub(super) fn add_record(
        &mut self,
        record: (usize, u32),
        (code, table): (u64, u64),
        memory: &Memory,
    ) -> Result<()> {
        self.write_record(record, (code, table), memory)?;
        if let Some((last, _)) = self.records.last() {
            let address = table + code::record(record.0) as u64;
            memory.write(table + (code::record(*last) + code::NEXT) as u64, &address.to_le_bytes())?;
        }
        self.records.push(record);
        Ok(())
    }

    /// Whether calls of this number are made by the fast path.
    pub(super) fn has(&self, nr: u32) -> bool {
        self.records.iter().any(|(_, known)| *known == nr)
    }

    /// If this address is inside its trampoline: the address in the program's code that continues with
    /// the same registers, apart from rcx. At the `syscall`, rax is the number of the call.
    pub(super) fn in_program(&self, at: u64) -> Option<u64> {
        const TAIL: usize = 12;
        let inside = at.checked_sub(self.trampoline)?;
        if inside >= self.trampoline_bytes.len() as u64 {
            return None;
        }
        let is_tail = inside >= (self.trampoline_bytes.len() - TAIL) as u64;
        Some(match self.pattern.thread_flag {
            _ if is_tail => self.pattern.call(),
            // The flag is tested again.
            Some(_) => self.pattern.start,
            None => self.pattern.start + inside,
        })
    }

    /// Patches the site; false if that is impossible, and then nothing has changed. All threads are
    /// stopped, or the only one is in a trap.
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
        put_back(self.pattern.start, &self.jump, &self.pattern.code[..self.jump.len()]);
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

    fn pattern(before: &[u8], nr: u32) -> Option<CodePattern> {
        CodePattern::of_bytes(&bytes(before), RETURN_ADDR, nr)
    }

    const ASKING: [u8; 11] = [0x80, 0x3d, 0x10, 0, 0, 0, 0, 0x74, 0x20, 0x31, 0xc0];

    #[test]
    fn only_known_patterns_are_recognised() {
        let simple = pattern(&[0xb8, 8, 0, 0, 0], 8).unwrap();
        assert_eq!(
            (simple.start, simple.call(), simple.thread_flag),
            (RETURN_ADDR - 7, RETURN_ADDR - 2, None)
        );
        assert_eq!(
            pattern(&[0xb8, 8, 0, 0, 0], 9),
            None,
            "the call has another number, so control came from elsewhere"
        );
        assert_eq!(pattern(&[0x41, 0xb8, 8, 0, 0, 0], 8), None, "mov to r8d");
        let asking = pattern(&ASKING, 0).unwrap();
        let start = RETURN_ADDR - 13;
        assert_eq!((asking.start, asking.thread_flag), (start, Some((start + 7 + 0x10, start + 9 + 0x20))));
        let mut flags_are_used = bytes(&[0xb8, 8, 0, 0, 0]);
        flags_are_used[LEN_BEFORE + 2] = 0xc3;
        assert_eq!(CodePattern::of_bytes(&flags_are_used, RETURN_ADDR, 8), None);
        assert_eq!(pattern(&[0x31, 0xc0], 0), None);
    }

    #[test]
    fn patterns_of_several_threads_are_recognised() {
        const RSI: [u8; 5] = [0x48, 0x8b, 0x74, 0x24, 0x10];
        const EDI: [u8; 4] = [0x8b, 0x7c, 0x24, 8];
        let read: Vec<u8> = [&RSI[..], &[0x41, 0x89, 0xc0], &EDI, &[0x31, 0xc0]].concat();
        let sendto = [&[0xb8, 44, 0, 0, 0], &RSI[..], &EDI].concat();
        let recvfrom = [&[0xb8, 45, 0, 0, 0, 0x48, 0x8b, 0x54, 0x24, 0x10], &RSI[..]].concat();
        let epoll_pwait = [&[0xb8, 25, 1, 0, 0], &EDI[..]].concat();
        for (before, nr) in [(read, 0), (sendto, 44), (recvfrom, 45), (epoll_pwait, 281)] {
            let found = pattern(&before, nr).unwrap();
            assert_eq!((found.call(), &found.code), (RETURN_ADDR - 2, &before), "call {nr}");
            assert_eq!(pattern(&before, nr + 1), None);
        }
        let other_code = [&[0xb8, 44, 0, 0, 0], &EDI[..], &[0x90]].concat();
        assert_eq!(pattern(&other_code, 44), None);
    }

    #[test]
    fn patterns_of_any_number_are_recognised() {
        for (before, after) in
            [([0x4c, 0x89, 0x5c, 0x24, 8], [0xc3, 0]), ([0x48, 0x8b, 0x44, 0x24, 0x10], [0x5b, 0xc3])]
        {
            let mut code = bytes(&before);
            assert_eq!(CodePattern::of_bytes(&code, RETURN_ADDR, 45), None, "the flags are used");
            code[LEN_BEFORE + 2..][..2].copy_from_slice(&after);
            for nr in [0, 45] {
                let found = CodePattern::of_bytes(&code, RETURN_ADDR, nr).unwrap();
                assert_eq!((found.nr, found.start, found.code), (None, RETURN_ADDR - 7, before.to_vec()));
            }
        }
    }

    #[test]
    fn trampoline_must_be_in_reach() {
        let simple = pattern(&[0xb8, 1, 0, 0, 0], 1).unwrap();
        let site = PatchedSite::new(simple.clone(), RETURN_ADDR + 0x100, (2, 1), 0x3100_0000_2000).unwrap();
        assert_eq!(site.jump, [0xe9, 0x02, 0x01, 0, 0]);
        assert!(site.has(1) && !site.has(0));
        assert!(PatchedSite::new(simple, 1 << 40, (0, 1), 0).is_none());
    }

    #[test]
    fn thread_leaves_trampoline_at_every_offset() {
        let trampoline = RETURN_ADDR + 0x100;
        let asking = PatchedSite::new(pattern(&ASKING, 0).unwrap(), trampoline, (0, 0), 0).unwrap();
        let simple =
            PatchedSite::new(pattern(&[0xb8, 1, 0, 0, 0], 1).unwrap(), trampoline, (0, 1), 0).unwrap();
        let (call, end) = (RETURN_ADDR - 2, trampoline + TRAMPOLINE_LEN);
        let places = |site: &PatchedSite| (trampoline..end).map(|at| site.in_program(at)).collect::<Vec<_>>();
        let tail = [vec![Some(call); 12], vec![None; 5]].concat();
        assert_eq!(places(&asking), [vec![Some(RETURN_ADDR - 13); 15], tail].concat());
        assert_eq!(places(&simple)[..6], [0, 1, 2, 3, 4, 5].map(|at| Some(call - 5 + at)));
        // The code tests the same flag, and has the same branch target.
        let (flag, target) = asking.pattern.thread_flag.unwrap();
        let distance = |at: usize| {
            let bytes = asking.trampoline_bytes[at..at + 4].try_into().unwrap();
            (trampoline + at as u64 + 4).checked_add_signed(i32::from_le_bytes(bytes).into()).unwrap()
        };
        assert_eq!((distance(2) + 1, distance(9)), (flag, target));
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
