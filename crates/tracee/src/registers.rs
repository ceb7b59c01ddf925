//! General and extended registers.

use serde::{Deserialize, Serialize};

/// The general registers, laid out as `struct user_regs_struct`, with the segment bases.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[allow(missing_docs, reason = "named by the processor's manual")]
pub struct Registers {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rax: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    /// The number of the system call that it is in; -1 outside one.
    pub orig_rax: u64,
    pub rip: u64,
    pub cs: u64,
    pub eflags: u64,
    pub rsp: u64,
    pub ss: u64,
    pub fs_base: u64,
    pub gs_base: u64,
    pub ds: u64,
    pub es: u64,
    pub fs: u64,
    pub gs: u64,
}

/// Return codes by which the kernel says, to itself, that an interrupted call is to be made again.
pub mod restart {
    /// Make it again, unless a handler without SA_RESTART runs.
    pub const SYS: i64 = -512;
    /// Make it again in any case.
    pub const NOINTR: i64 = -513;
    /// Make it again, unless a handler runs.
    pub const NOHAND: i64 = -514;
    /// Continue it by restart_syscall, unless a handler runs.
    pub const BLOCK: i64 = -516;

    /// Whether this is one of the four.
    #[must_use]
    pub fn is(code: i64) -> bool {
        matches!(code, SYS | NOINTR | NOHAND | BLOCK)
    }
}

impl Registers {
    /// The system call it is in, if it is in one.
    #[must_use]
    pub fn call(&self) -> Option<u64> {
        (self.orig_rax.cast_signed() >= 0).then_some(self.orig_rax)
    }

    /// The restart code with which its call was interrupted, if it was.
    #[must_use]
    pub fn restart_code(&self) -> Option<i64> {
        let code = self.rax.cast_signed();
        (self.call().is_some() && restart::is(code)).then_some(code)
    }

    /// If its call was interrupted and only the kernel that it ran on could continue it (restart_syscall), makes
    /// them those of the same call made anew; true if so. Sleeps are left as they are: their continuation is
    /// asked of their home, where they began.
    pub fn begin_anew(&mut self) -> bool {
        let sleeps = [libc::SYS_nanosleep, libc::SYS_clock_nanosleep].map(i64::cast_unsigned);
        if self.restart_code() != Some(restart::BLOCK) || sleeps.contains(&self.orig_rax) {
            return false;
        }
        self.rax = restart::NOHAND.cast_unsigned();
        true
    }

    /// The six arguments of a system call.
    #[must_use]
    pub fn arguments(&self) -> [u64; 6] {
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9]
    }

    /// Set to make system call `nr` from the `syscall` instruction at `site`.
    #[must_use]
    pub fn calling(&self, site: u64, nr: u64, args: &[u64; 6]) -> Self {
        let [rdi, rsi, rdx, r10, r8, r9] = *args;
        // Trap and direction flag off; orig_rax -1, so that the kernel sees no interrupted call to restart.
        let eflags = self.eflags & !0x500;
        Self { rax: nr, rdi, rsi, rdx, r10, r8, r9, rip: site, orig_rax: u64::MAX, eflags, ..*self }
    }

    /// Whether this is 64-bit code, the only kind that is moved.
    #[must_use]
    pub fn is_64_bit(&self) -> bool {
        self.cs == 0x33
    }
}

/// The extended registers as the machine's XSAVE area in its standard form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Xstate(pub Vec<u8>);

impl Xstate {
    /// NT_X86_XSTATE.
    pub(crate) const NOTE: usize = 0x202;

    /// The components in use (XSTATE_BV).
    #[must_use]
    pub fn components(&self) -> u64 {
        self.0.get(512..520).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
    }
}

/// Length in bytes of the area in which this machine shows extended registers: what it has switched on.
///
/// # Errors
/// None today; a machine without XSAVE (before 2008) would be one.
pub fn xstate_len() -> crate::Result<u32> {
    let leaf = std::arch::x86_64::__cpuid_count(0xd, 0);
    Ok(leaf.ebx)
}

/// What a program can find out about the processor's features by the CPUID instruction, which no kernel filters
/// unless the processor can be told to fault it: `/proc/cpuinfo` leaves out what the kernel was told not to use. Also
/// where each part of the extended registers lies, which differs between makers.
#[must_use]
pub fn cpuid_features() -> Vec<u32> {
    use std::arch::x86_64::__cpuid_count as cpuid;
    // Beyond the last leaf some processors answer with another one.
    let (last, last_extended) = (cpuid(0, 0).eax, cpuid(0x8000_0000, 0).eax);
    let mut all = Vec::new();
    // Leaf 1's other two words are of the core that runs this.
    let features = cpuid(1, 0);
    all.extend([features.ecx, features.edx]);
    for (leaf, sub) in [(7, 0), (7, 1), (7, 2)].into_iter().filter(|(leaf, _)| *leaf <= last) {
        let words = cpuid(leaf, sub);
        all.extend([words.ebx, words.ecx, words.edx]);
        if sub > 0 {
            all.push(words.eax);
        }
    }
    if last >= 0xd {
        all.push(cpuid(0xd, 1).eax);
        for part in 2..64 {
            let words = cpuid(0xd, part);
            all.extend([words.eax, words.ebx].into_iter().filter(|word| *word != 0));
        }
    }
    for leaf in [0x8000_0001, 0x8000_0008, 0x8000_0021].into_iter().filter(|leaf| *leaf <= last_extended) {
        let words = cpuid(leaf, 0);
        // Leaf 8 has sizes of addresses and the number of cores in the others; only ebx has features.
        all.extend(if leaf == 0x8000_0008 { [words.ebx, 0] } else { [words.ecx, words.edx] });
        if leaf == 0x8000_0021 {
            all.push(words.eax);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    #[test]
    fn features_are_the_same_on_every_core() {
        let all = super::cpuid_features();
        // SSE2, which x86-64 has by definition.
        assert!(all[1] >> 26 & 1 == 1 && all.len() > 8);
        let mut cores = rustix::thread::CpuSet::new();
        let before = rustix::thread::sched_getaffinity(None).unwrap();
        for core in (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| before.is_set(*core)) {
            cores.clear();
            cores.set(core);
            rustix::thread::sched_setaffinity(None, &cores).unwrap();
            assert_eq!(super::cpuid_features(), all, "core {core}");
        }
        rustix::thread::sched_setaffinity(None, &before).unwrap();
    }

    use super::*;

    #[test]
    fn layout_is_the_kernels() {
        assert_eq!(size_of::<Registers>(), size_of::<libc::user_regs_struct>());
        assert_eq!(
            std::mem::offset_of!(Registers, orig_rax),
            std::mem::offset_of!(libc::user_regs_struct, orig_rax)
        );
        assert_eq!(std::mem::offset_of!(Registers, gs), std::mem::offset_of!(libc::user_regs_struct, gs));
    }
}
