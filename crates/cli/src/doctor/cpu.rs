//! What the processor and the kernel's view of it let move.
#![expect(unsafe_code, reason = "arch_prctl, mmap and PTRACE_GETREGSET have no safe form")]

use super::Finding;
use super::child::{checked, in_child};
use super::tracing::Subject;
use crate::output::reason;
use std::io;

/// Of asm/prctl.h.
const ARCH_SET_CPUID: i32 = 0x1012;
const ARCH_MAP_VDSO_64: i32 = 0x2003;
/// Of linux/elf.h.
const NT_X86_XSTATE: i32 = 0x202;
/// More than any processor's extended state: AMX makes it 11,008.
const MOST_XSTATE: usize = 64 << 10;

pub(super) fn examine() -> Vec<Finding> {
    vec![vdso(), cpuid_faulting(), address_space(), extended_state()]
}

fn arch_prctl(code: i32, argument: u64) -> io::Result<u64> {
    // SAFETY: both codes take their argument by value. Called in a probe's child only, which ends before it
    // could miss the instruction or the mapping.
    checked(unsafe { libc::syscall(libc::SYS_arch_prctl, code, argument) })
}

fn vdso() -> Finding {
    let name = "vDSO placement";
    // While a vDSO is mapped the answer is EEXIST; a kernel without the call says EINVAL.
    match in_child(|| arch_prctl(ARCH_MAP_VDSO_64, 0x6fff_f000_0000)) {
        Err(error) if error.raw_os_error() != Some(libc::EEXIST) => Finding::limited(
            name,
            format!("ARCH_MAP_VDSO_64: {}", reason(&error)),
            "guests here may have to do without fast clocks; the kernel needs CONFIG_CHECKPOINT_RESTORE",
        ),
        _ => Finding::ok(name, "ARCH_MAP_VDSO_64"),
    }
}

fn cpuid_faulting() -> Finding {
    let name = "CPUID faulting";
    match in_child(|| arch_prctl(ARCH_SET_CPUID, 0)) {
        Ok(_) => Finding::ok(
            name,
            "works, but is not used yet: only nodes with exactly the same CPU features exchange processes",
        ),
        Err(error) => Finding::limited(
            name,
            reason(&error),
            "only nodes with exactly the same CPU features exchange processes; for virtual machines, give all the \
             same CPU model",
        ),
    }
}

/// Whether programs here can map above 128 TiB (five-level page tables).
fn address_space() -> Finding {
    let name = "address space";
    let above = in_child(|| {
        let hint = (1usize << 47) * 2;
        // SAFETY: a new mapping, which at most ends up elsewhere than the hint says.
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
            Ok(1) => "57 bits (la57): a program that maps above 128 TiB moves only to nodes that have it too",
            _ => "47 bits",
        },
    )
}

/// How much register state a thread has, as the kernel gives it to a tracer.
fn extended_state() -> Finding {
    let name = "extended state";
    match in_child(read_extended_state) {
        Ok(size) => {
            let flags = cpu_flags();
            let has = |flag: &str| flags.split_whitespace().any(|one| one == flag);
            let known = [("avx2", "AVX2"), ("avx512f", "AVX-512"), ("amx_tile", "AMX"), ("pku", "PKU")];
            let names: Vec<_> = known.iter().filter(|(flag, _)| has(flag)).map(|(_, name)| *name).collect();
            Finding::ok(name, format!("{size} bytes a thread; {}", names.join(", ")))
        }
        Err(error) => Finding::missing(name, reason(&error), "registers cannot be read: no moves"),
    }
}

fn read_extended_state() -> io::Result<u64> {
    let subject = Subject::start()?;
    subject.seize()?;
    let (pid, none) = (subject.pid(), std::ptr::null_mut::<libc::c_void>());
    // SAFETY: INTERRUPT takes no pointers.
    checked(unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, pid, none, none) })?;
    // SAFETY: waits for the subject, our child, to stop; no status is asked for.
    checked(unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::__WALL) }.into())?;
    let mut state = vec![0u8; MOST_XSTATE];
    let mut vector = libc::iovec { iov_base: state.as_mut_ptr().cast(), iov_len: state.len() };
    // SAFETY: the kernel writes at most iov_len bytes into `state`, and the number of them into `vector`.
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
