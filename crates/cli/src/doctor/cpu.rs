//! Processor features, and the kernel's support for them, on which migration depends.
#![expect(unsafe_code, reason = "arch_prctl, mmap and PTRACE_GETREGSET have no safe form")]

use super::Finding;
use super::child::{checked, in_child};
use super::tracing::Tracee;
use crate::output::error_text;
use std::io;

/// From asm/prctl.h.
const ARCH_SET_CPUID: i32 = 0x1012;
const ARCH_MAP_VDSO_64: i32 = 0x2003;
/// From linux/elf.h.
const NT_X86_XSTATE: i32 = 0x202;
/// An upper bound for the extended state, in bytes; with AMX it has 11,008.
const MAX_XSTATE: usize = 64 << 10;

pub(super) fn probe() -> Vec<Finding> {
    vec![vdso(), cpuid_faulting(), address_space(), extended_state()]
}

fn arch_prctl(code: i32, argument: u64) -> io::Result<u64> {
    // SAFETY: both codes take their argument by value. Called only in a probe's child, which ends
    // without executing CPUID or calling the vDSO.
    checked(unsafe { libc::syscall(libc::SYS_arch_prctl, code, argument) })
}

fn vdso() -> Finding {
    let name = "vDSO placement";
    // While a vDSO is mapped the call fails with EEXIST; a kernel without the call returns EINVAL.
    match in_child(|| arch_prctl(ARCH_MAP_VDSO_64, 0x6fff_f000_0000)) {
        Err(error) if error.raw_os_error() != Some(libc::EEXIST) => Finding::limited(
            name,
            format!("ARCH_MAP_VDSO_64: {}", error_text(&error)),
            "clock calls of guests here may be slow; use a kernel with CONFIG_CHECKPOINT_RESTORE",
        ),
        _ => Finding::ok(name, "ARCH_MAP_VDSO_64"),
    }
}

fn cpuid_faulting() -> Finding {
    let name = "CPUID faulting";
    match in_child(|| arch_prctl(ARCH_SET_CPUID, 0)) {
        Ok(_) => Finding::ok(
            name,
            "works, but Tern does not use it yet: processes move only between nodes with the same CPU features",
        ),
        Err(error) => Finding::limited(
            name,
            error_text(&error),
            "processes move only between nodes with the same CPU features; give virtual machines the same CPU \
             model",
        ),
    }
}

/// Whether programs on this node can map memory above 128 TiB (five-level page tables).
fn address_space() -> Finding {
    let name = "address space";
    let above = in_child(|| {
        let hint = (1usize << 47) * 2;
        // SAFETY: a new mapping; if the hint cannot be met, the kernel chooses another address.
        let at = unsafe {
            libc::mmap(hint as *mut _, 4096, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        if at == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(u64::from(at as usize >= 1 << 47))
        }
    });
    Finding::ok(
        name,
        match above {
            Ok(1) => "57 bits (la57): a program with mappings above 128 TiB moves only to nodes with 57 bits",
            _ => "47 bits",
        },
    )
}

/// The size of a thread's register state, as a tracer can read it.
fn extended_state() -> Finding {
    let name = "extended state";
    match in_child(read_extended_state) {
        Ok(size) => {
            let flags = cpu_flags();
            let has = |flag: &str| flags.split_whitespace().any(|one| one == flag);
            let known = [("avx2", "AVX2"), ("avx512f", "AVX-512"), ("amx_tile", "AMX"), ("pku", "PKU")];
            let names: Vec<_> = known.iter().filter(|(flag, _)| has(flag)).map(|(_, name)| *name).collect();
            Finding::ok(name, format!("{size} bytes per thread; {}", names.join(", ")))
        }
        Err(error) => Finding::missing(
            name,
            error_text(&error),
            "no process can be moved, because registers cannot be read; check the sandbox that this runs in",
        ),
    }
}

fn read_extended_state() -> io::Result<u64> {
    let tracee = Tracee::start()?;
    tracee.seize()?;
    let (pid, none) = (tracee.pid(), std::ptr::null_mut::<libc::c_void>());
    // SAFETY: INTERRUPT takes no pointers.
    checked(unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, pid, none, none) })?;
    // SAFETY: waits for the tracee, our child, to stop; no status is requested.
    checked(unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::__WALL) }.into())?;
    let mut state = vec![0u8; MAX_XSTATE];
    let mut vector = libc::iovec { iov_base: state.as_mut_ptr().cast(), iov_len: state.len() };
    // SAFETY: the kernel writes at most iov_len bytes into `state`, and the number written into
    // `vector`.
    checked(unsafe { libc::ptrace(libc::PTRACE_GETREGSET, pid, NT_X86_XSTATE, &raw mut vector) })?;
    Ok(vector.iov_len as u64)
}

/// The flags of the first processor in /proc/cpuinfo.
fn cpu_flags() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("flags"));
    line.and_then(|line| line.split_once(':')).map(|(_, flags)| flags.to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extended_state_is_at_least_the_legacy_and_header_part() {
        assert!(in_child(read_extended_state).unwrap() >= 576);
    }
}
