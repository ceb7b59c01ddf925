//! Replacing another kernel's vDSO: its functions are redirected to trampolines that make the real
//! system calls.
//!
//! A program has resolved the addresses of the functions in home's vDSO, so they must stay valid.
//! Everything but the entries is copied unchanged: parsers of the image (unwinders, debuggers, a
//! starting libc) find the same bytes, and so does a thread that was interrupted inside a function.
//! That thread then reads the clock's data pages, which are not mapped here, so it faults and is
//! fetched home (`ForeignVdso`). A thread may have been interrupted at any instruction. So the six
//! bytes that replace an entry are chosen such that execution faults from any of them but the
//! first:
//!
//! ```text
//!   e9 LO HI ff ff   jmp to a trampoline, at most 64 KiB below
//!   3f
//!      LO            privileged or undefined
//!         HI         likewise, also as the first byte of HI ff ff
//!            ff ff   undefined
//!               ff 3f, 3f    undefined
//! ```
//! The distance to the trampoline determines LO and HI, so a suitable place for the trampoline is
//! searched. The trampolines are in a page of their own, two pages below the vDSO. In that place
//! every kernel has pages that only the clocks of hypervisors use. Code that was interrupted while
//! it read such a page reads the first data page next, and faults.

use tern_tracee::PAGE;

/// The largest supported vDSO, in bytes; those of today have two pages.
pub const MAX_VDSO_LEN: usize = 64 << 10;
/// The distance of the trampoline page below the vDSO.
pub const DISTANCE: u64 = 2 * PAGE;
/// The number of bytes that replace an entry.
pub const ENTRY_LEN: usize = 6;
/// hlt, which is privileged.
const HLT: u8 = 0xf4;
/// Functions, and the equivalent system calls.
const CALLS: [(&[u8], i64); 5] = [
    (b"__vdso_clock_gettime", libc::SYS_clock_gettime),
    (b"__vdso_gettimeofday", libc::SYS_gettimeofday),
    (b"__vdso_time", libc::SYS_time),
    (b"__vdso_clock_getres", libc::SYS_clock_getres),
    (b"__vdso_getcpu", libc::SYS_getcpu),
];
/// The function whose contract differs from its system call's.
pub const GETRANDOM: &[u8] = b"__vdso_getrandom";

/// A vDSO with redirected entries, and its trampoline page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VdsoTrampolines {
    /// The vDSO.
    pub code: Vec<u8>,
    /// The trampoline page.
    pub page: Vec<u8>,
    /// For each trampoline: its begin and its end in the page, and the entry in the vDSO that leads
    /// to it.
    pub places: Vec<(u64, u64, u64)>,
}

impl VdsoTrampolines {
    /// The trampolines for this vDSO; none if its form is not supported.
    #[must_use]
    pub fn for_vdso(vdso: &[u8]) -> Option<Self> {
        if vdso.len() > MAX_VDSO_LEN || !(vdso.len() as u64).is_multiple_of(PAGE) {
            return None;
        }
        let mut trampolines =
            Self { code: vdso.to_vec(), page: vec![HLT; PAGE as usize], places: Vec::new() };
        let functions = functions(vdso)?;
        functions.iter().find(|(name, _)| *name == CALLS[0].0)?;
        for (name, entry) in functions {
            let trampoline = match CALLS.iter().find(|(known, _)| *known == name) {
                Some((_, nr)) => call(*nr),
                None if name == GETRANDOM => random(),
                // Other functions are not redirected: they do not read the clock's data pages.
                None => continue,
            };
            trampolines.place(entry, &trampoline)?;
        }
        Some(trampolines)
    }

    fn place(&mut self, entry: usize, trampoline: &[u8]) -> Option<()> {
        let end = entry.checked_add(ENTRY_LEN)?;
        let bytes = self.code.get_mut(entry..end)?;
        if bytes[0] == 0xe9 {
            // A second name of the same function, or an entry that is a jump. Neither is supported.
            return None;
        }
        for at in 0..self.page.len() - trampoline.len() {
            let range = (at as u64, (at + trampoline.len()) as u64);
            if self.places.iter().any(|(from, to, _)| range.0 < *to && *from < range.1) {
                continue;
            }
            let distance = at as i64 - DISTANCE as i64 - (entry as i64 + 5);
            let Ok(jump) = i32::try_from(distance) else { continue };
            let [low, high, 0xff, 0xff] = jump.to_le_bytes() else { continue };
            if faults(low) && (faults(high) || matches!(high, 0xfe | 0xff)) {
                bytes.copy_from_slice(&[0xe9, low, high, 0xff, 0xff, 0x3f]);
                self.page[at..at + trampoline.len()].copy_from_slice(trampoline);
                self.places.push((range.0, range.1, entry as u64));
                return Some(());
            }
        }
        None
    }
}

/// Whether an instruction that begins with this byte faults in 64-bit mode, whatever follows: it is
/// undefined or privileged (I/O ports, the interrupt flag, hlt).
fn faults(byte: u8) -> bool {
    matches!(
        byte,
        0x06 | 0x07 | 0x0e | 0x16 | 0x17 | 0x1e | 0x1f | 0x27 | 0x2f | 0x37 | 0x3f | 0x9a | 0xce | 0xd6 | 0xea | 0xf4
            | 0xfa | 0xfb | 0x6c..=0x6f | 0xe4..=0xe7 | 0xec..=0xef
    )
}

/// mov $nr,%eax; syscall; ret. The arguments, three at most, are where the call expects them.
fn call(nr: i64) -> Vec<u8> {
    let [a, b, c, d, ..] = nr.to_le_bytes();
    vec![0xb8, a, b, c, d, 0x0f, 0x05, 0xc3]
}

/// A libc that passes a length of -1 in r8 asks for the layout of the state that it must keep for
/// this function. The reply is ENOSYS, so the libc uses the system call. A caller that already has
/// a state gets the system call's result, as the function itself would return it for a state of
/// unexpected length.
fn random() -> Vec<u8> {
    // cmp $-1,%r8; je over the call
    let mut trampoline = vec![0x49, 0x83, 0xf8, 0xff, 0x74, 0x08];
    trampoline.extend(call(libc::SYS_getrandom));
    // mov $-ENOSYS,%rax; ret
    trampoline.extend([0x48, 0xc7, 0xc0, (-libc::ENOSYS) as u8, 0xff, 0xff, 0xff, 0xc3]);
    trampoline
}

/// The functions that a vDSO exports with the prefix `__vdso_`, and their offsets.
#[must_use]
pub fn functions(elf: &[u8]) -> Option<Vec<(&[u8], usize)>> {
    const HEADER: usize = 56;
    const SYMBOL: usize = 24;
    if elf.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let headers = number(elf, 32, 8)?;
    let count = number(elf, 56, 2)?;
    let (mut symbols, mut strings) = (None, None);
    for n in 0..count {
        let at = headers.checked_add(n * HEADER)?;
        // PT_DYNAMIC
        if number(elf, at, 4)? != 2 {
            continue;
        }
        let (begin, len) = (number(elf, at.checked_add(8)?, 8)?, number(elf, at.checked_add(32)?, 8)?);
        for entry in elf.get(begin..begin.checked_add(len)?)?.chunks_exact(16) {
            match number(entry, 0, 8)? {
                5 => strings = number(entry, 8, 8),
                6 => symbols = number(entry, 8, 8),
                _ => {}
            }
        }
    }
    // The names follow the symbols in the output of every linker.
    let (symbols, strings) = (symbols?, strings?);
    let mut found = Vec::new();
    for symbol in elf.get(symbols..strings)?.chunks_exact(SYMBOL) {
        let (name, section, value) = (number(symbol, 0, 4)?, number(symbol, 6, 2)?, number(symbol, 8, 8)?);
        let name = elf.get(strings.checked_add(name)?..)?.split(|byte| *byte == 0).next()?;
        if section != 0 && name.starts_with(b"__vdso_") {
            found.push((name, value));
        }
    }
    Some(found)
}

/// A little-endian number of `len` bytes.
fn number(bytes: &[u8], at: usize, len: usize) -> Option<usize> {
    let mut word = [0; 8];
    word[..len].copy_from_slice(bytes.get(at..at.checked_add(len)?)?);
    usize::try_from(u64::from_le_bytes(word)).ok()
}
