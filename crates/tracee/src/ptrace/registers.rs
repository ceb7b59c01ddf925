//! General and extended registers.

use serde::{Deserialize, Serialize};

/// The general registers with the segment bases, laid out as `struct user_regs_struct`.
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
    /// Number of the current system call; -1 outside of one.
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

/// The kernel's internal return codes for interrupted calls that are to be restarted.
pub mod restart {
    /// Restart, unless a handler without SA_RESTART runs.
    pub const SYS: i64 = -512;
    /// Always restart.
    pub const NOINTR: i64 = -513;
    /// Restart, unless a handler runs.
    pub const NOHAND: i64 = -514;
    /// Continue by restart_syscall, unless a handler runs.
    pub const BLOCK: i64 = -516;

    /// Whether this is a restart code.
    #[must_use]
    pub fn is(code: i64) -> bool {
        matches!(code, SYS | NOINTR | NOHAND | BLOCK)
    }
}

impl Registers {
    /// The current system call, if there is one.
    #[must_use]
    pub fn call(&self) -> Option<u64> {
        (self.orig_rax.cast_signed() >= 0).then_some(self.orig_rax)
    }

    /// The restart code of the interrupted system call, if there is one.
    #[must_use]
    pub fn restart_code(&self) -> Option<i64> {
        let code = self.rax.cast_signed();
        (self.call().is_some() && restart::is(code)).then_some(code)
    }

    /// If the interrupted call could only be continued by the same kernel (restart_syscall),
    /// changes the registers to restart it from the beginning, and returns true. Sleeps are left
    /// unchanged: their continuation is requested from home, where they began. Waits on a futex with a
    /// relative time limit (FUTEX_WAIT) are left unchanged too: this kernel continues them.
    pub fn restart_from_start(&mut self) -> bool {
        let sleeps = [libc::SYS_nanosleep, libc::SYS_clock_nanosleep].map(i64::cast_unsigned);
        let operation = self.rsi as i32 & !libc::FUTEX_PRIVATE_FLAG;
        let is_futex_wait = self.orig_rax == libc::SYS_futex.cast_unsigned() && operation == libc::FUTEX_WAIT;
        let is_left = is_futex_wait || sleeps.contains(&self.orig_rax);
        if self.restart_code() != Some(restart::BLOCK) || is_left {
            return false;
        }
        self.rax = restart::NOHAND.cast_unsigned();
        true
    }

    /// The six arguments of the system call.
    #[must_use]
    pub fn arguments(&self) -> [u64; 6] {
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9]
    }

    /// Registers that make system call `nr` from the `syscall` instruction at `site`.
    #[must_use]
    pub fn calling(&self, site: u64, nr: u64, args: &[u64; 6]) -> Self {
        let [rdi, rsi, rdx, r10, r8, r9] = *args;
        // Clears the trap and direction flags. orig_rax is -1, so that the kernel does not restart
        // an interrupted call.
        let eflags = self.eflags & !0x500;
        Self { rax: nr, rdi, rsi, rdx, r10, r8, r9, rip: site, orig_rax: u64::MAX, eflags, ..*self }
    }

    /// Whether this is 64-bit code. Tern does not move 32-bit code.
    #[must_use]
    pub fn is_64_bit(&self) -> bool {
        self.cs == 0x33
    }
}

/// The extended registers: the machine's XSAVE area in its standard form.
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

/// Length in bytes of the XSAVE area for all components that this machine has enabled.
///
/// # Errors
/// None at present; reserved for machines without XSAVE (before 2008).
pub fn xstate_len() -> crate::Result<u32> {
    let leaf = std::arch::x86_64::__cpuid_count(0xd, 0);
    Ok(leaf.ebx)
}

/// The processor's features as the CPUID instruction reports them to programs. `/proc/cpuinfo`
/// omits features that are disabled in the kernel, but the kernel cannot hide them from CPUID
/// unless the processor supports CPUID faulting. Includes the offsets of the XSAVE components,
/// which differ between vendors.
#[must_use]
pub fn cpuid_features() -> Vec<u32> {
    use std::arch::x86_64::__cpuid_count as cpuid;
    // Beyond the last leaf some processors return another leaf's data.
    let (last, last_extended) = (cpuid(0, 0).eax, cpuid(0x8000_0000, 0).eax);
    let mut all = Vec::new();
    // The other two words of leaf 1 depend on the core.
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
        // In leaf 0x80000008 only ebx has features; the others are address sizes and core counts.
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
        // SSE2, which every x86-64 processor has.
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
    fn registers_have_the_kernels_layout() {
        assert_eq!(size_of::<Registers>(), size_of::<libc::user_regs_struct>());
        assert_eq!(
            std::mem::offset_of!(Registers, orig_rax),
            std::mem::offset_of!(libc::user_regs_struct, orig_rax)
        );
        assert_eq!(std::mem::offset_of!(Registers, gs), std::mem::offset_of!(libc::user_regs_struct, gs));
    }
}
