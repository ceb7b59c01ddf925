//! Another kernel's vDSO, made to work here: its entries lead to stubs that make the real calls.
//!
//! A program has resolved the addresses of home's functions, so they must be found there. Everything but the entries
//! stays as it is: who parses it (unwinders, debuggers, a libc that starts) finds the same, and a thread that was
//! interrupted in the middle of a function finds the instruction that it was at. That reads the clock's pages next,
//! which are not there, so it faults, and is brought home ([`crate::foreign`]). So that this holds for every
//! instruction, the six bytes that replace an entry are chosen such that whoever comes to any but the first of them
//! faults as well:
//!
//! ```text
//!   e9 LO HI ff ff   jmp to a stub, at most 64 KiB below
//!   3f
//!      LO            privileged or undefined
//!         HI         likewise, also as the first byte of HI ff ff
//!            ff ff   undefined
//!               ff 3f, 3f    undefined
//! ```
//! A stub's place decides LO and HI: it is looked for. The stubs are a page of their own, two below the vDSO, where
//! every kernel has pages that only clocks of hypervisors are read from: whoever was in the middle of that looks at the
//! first page afterwards, and faults.

use tern_tracee::PAGE;

/// The longest vDSO that is taken; those of today have two pages.
pub const MOST_CODE: usize = 64 << 10;
/// The page of stubs is so far below the vDSO.
pub const BELOW: u64 = 2 * PAGE;
/// Bytes that replace an entry.
pub const ENTRY: usize = 6;
/// hlt, which no program may.
const HALT: u8 = 0xf4;
/// Functions, and the calls that do the same.
const CALLS: [(&[u8], i64); 5] = [
    (b"__vdso_clock_gettime", libc::SYS_clock_gettime),
    (b"__vdso_gettimeofday", libc::SYS_gettimeofday),
    (b"__vdso_time", libc::SYS_time),
    (b"__vdso_clock_getres", libc::SYS_clock_getres),
    (b"__vdso_getcpu", libc::SYS_getcpu),
];
/// The one with another contract than its call.
pub const RANDOM: &[u8] = b"__vdso_getrandom";

/// A vDSO with its entries replaced, and the page of stubs that belongs to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stubs {
    /// The vDSO.
    pub code: Vec<u8>,
    /// The page.
    pub page: Vec<u8>,
    /// Each stub: its begin and its end in the page, and the entry in the vDSO that leads to it.
    pub places: Vec<(u64, u64, u64)>,
}

impl Stubs {
    /// Those for this vDSO; none if it is not made as is known here.
    #[must_use]
    pub fn of(vdso: &[u8]) -> Option<Self> {
        if vdso.len() > MOST_CODE || !(vdso.len() as u64).is_multiple_of(PAGE) {
            return None;
        }
        let mut stubs = Self { code: vdso.to_vec(), page: vec![HALT; PAGE as usize], places: Vec::new() };
        let functions = functions(vdso)?;
        functions.iter().find(|(name, _)| *name == CALLS[0].0)?;
        for (name, entry) in functions {
            let stub = match CALLS.iter().find(|(known, _)| *known == name) {
                Some((_, nr)) => call(*nr),
                None if name == RANDOM => random(),
                // Whatever else it does without the clock's pages it does here as well.
                None => continue,
            };
            stubs.place(entry, &stub)?;
        }
        Some(stubs)
    }

    fn place(&mut self, entry: usize, stub: &[u8]) -> Option<()> {
        let end = entry.checked_add(ENTRY)?;
        let bytes = self.code.get_mut(entry..end)?;
        if bytes[0] == 0xe9 {
            // A second name of the same function.
            return None;
        }
        for at in 0..self.page.len() - stub.len() {
            let range = (at as u64, (at + stub.len()) as u64);
            if self.places.iter().any(|(from, to, _)| range.0 < *to && *from < range.1) {
                continue;
            }
            let distance = at as i64 - BELOW as i64 - (entry as i64 + 5);
            let Ok(jump) = i32::try_from(distance) else { continue };
            let [low, high, 0xff, 0xff] = jump.to_le_bytes() else { continue };
            if faults(low) && (faults(high) || matches!(high, 0xfe | 0xff)) {
                bytes.copy_from_slice(&[0xe9, low, high, 0xff, 0xff, 0x3f]);
                self.page[at..at + stub.len()].copy_from_slice(stub);
                self.places.push((range.0, range.1, entry as u64));
                return Some(());
            }
        }
        None
    }
}

/// Whether an instruction that begins with this byte faults in 64-bit mode, whatever follows: it is undefined, or is for
/// ports and interrupts, which are not for guests.
fn faults(byte: u8) -> bool {
    matches!(
        byte,
        0x06 | 0x07 | 0x0e | 0x16 | 0x17 | 0x1e | 0x1f | 0x27 | 0x2f | 0x37 | 0x3f | 0x9a | 0xce | 0xd6 | 0xea | 0xf4
            | 0xfa | 0xfb | 0x6c..=0x6f | 0xe4..=0xe7 | 0xec..=0xef
    )
}

/// mov $nr,%eax; syscall; ret. Arguments are where the call has them: there are at most three.
fn call(nr: i64) -> Vec<u8> {
    let [a, b, c, d, ..] = nr.to_le_bytes();
    vec![0xb8, a, b, c, d, 0x0f, 0x05, 0xc3]
}

/// A libc asks with a length of -1 in r8 what the state is to be like that it keeps for this function, and is told that
/// there is none (ENOSYS): it calls the kernel then. Who has such a state gets what the call gets, which is what the
/// function itself does when the state's length is not the one that it knows.
fn random() -> Vec<u8> {
    // cmp $-1,%r8; je over the call
    let mut stub = vec![0x49, 0x83, 0xf8, 0xff, 0x74, 0x08];
    stub.extend(call(libc::SYS_getrandom));
    // mov $-ENOSYS,%rax; ret
    stub.extend([0x48, 0xc7, 0xc0, (-libc::ENOSYS) as u8, 0xff, 0xff, 0xff, 0xc3]);
    stub
}

/// The functions that a vDSO exports under their names with `__vdso_`, and their offsets.
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
    // The names follow the symbols, as every linker has it.
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

/// A number of `len` bytes.
fn number(bytes: &[u8], at: usize, len: usize) -> Option<usize> {
    let mut word = [0; 8];
    word[..len].copy_from_slice(bytes.get(at..at.checked_add(len)?)?);
    usize::try_from(u64::from_le_bytes(word)).ok()
}
