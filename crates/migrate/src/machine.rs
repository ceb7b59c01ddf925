//! The machine as a process sees it. Compared before a process moves to another node.

use crate::message::{Machine, Vdso};
use tern_tracee::procfs::Mapping;
use tern_tracee::{Memory, Result};

/// Flags of `/proc/cpuinfo` that stand for instructions, under names that all kernels since 5.15
/// use. The other flags there describe what the kernel makes of the processor (mitigations, clocks,
/// virtualisation), and their names differ between kernel versions. Instructions that are not in
/// this list are covered by the CPUID words, which are compared as well.
const INSTRUCTIONS: &str = "3dnow 3dnowext 3dnowprefetch abm adx aes amx_bf16 amx_int8 amx_tile avx avx2 avx512_4fmaps \
    avx512_4vnniw avx512_bf16 avx512_bitalg avx512_fp16 avx512_vbmi2 avx512_vnni avx512_vp2intersect \
    avx512_vpopcntdq avx512bw avx512cd avx512dq avx512er avx512f avx512ifma avx512pf avx512vbmi avx512vl avx_vnni bmi1 \
    bmi2 cldemote clflush clflushopt clwb clzero cmov cx16 cx8 enqcmd erms f16c fma fma4 fpu fsgsbase fsrm fxsr fxsr_opt \
    gfni hle lahf_lm lm lwp misalignsse mmx mmxext monitorx movbe movdir64b movdiri mwaitx ospke pclmulqdq pku pni popcnt \
    rdpid rdpru rdrand rdseed rdtscp rtm serialize sha_ni sse sse2 sse4_1 sse4_2 sse4a ssse3 syscall tbm tsc tsxldtrk umip \
    vaes vpclmulqdq waitpkg wbnoinvd xgetbv1 xop xsave xsavec xsaveopt";

/// Describes the machine for a process with these mappings.
///
/// # Errors
/// If the process is gone or has no vDSO.
pub fn describe(memory: &Memory, maps: &[Mapping]) -> Result<Machine> {
    let mut code = Vec::new();
    let mut lengths = Vec::new();
    for m in maps.iter().filter(|m| m.is_kernel_mapping() && m.name != b"[vsyscall]") {
        lengths.push(m.len());
        if m.name == b"[vdso]" {
            code.resize(m.len() as usize, 0);
            memory.read(m.start, &mut code)?;
        }
    }
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = text.lines().find_map(|l| l.strip_prefix("flags")).unwrap_or_default();
    Ok(Machine {
        cpu_flags: instructions(flags),
        cpuid: tern_tracee::registers::cpuid_features(),
        xstate_len: tern_tracee::registers::xstate_len()?,
        vdso: Vdso { code, lengths },
    })
}

/// The flags that stand for instructions, sorted.
fn instructions(flags: &str) -> Vec<String> {
    let known = |flag: &&str| INSTRUCTIONS.split_ascii_whitespace().any(|name| name == *flag);
    let mut found: Vec<String> = flags.split_ascii_whitespace().filter(known).map(str::to_owned).collect();
    found.sort_unstable();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_defined_cpu_flags_are_not_compared() {
        let old = "\t\t: fpu tsc sse2 constant_tsc rep_good nopl avx2 pti lbrv";
        let new = "\t\t: fpu tsc sse2 constant_tsc rep_good nopl cpuid avx2 ibrs vnmi user_shstk lam";
        assert_eq!(instructions(old), ["avx2", "fpu", "sse2", "tsc"]);
        assert_eq!(instructions(old), instructions(new));
        assert_ne!(instructions(old), instructions(&new.replace("avx2", "")));
    }

    #[test]
    fn own_machine_is_described() {
        let me = std::process::id() as i32;
        let maps = tern_tracee::procfs::maps(me).unwrap();
        let seen = describe(&Memory::open(me).unwrap(), &maps).unwrap();
        assert!(seen.cpu_flags.iter().any(|flag| flag == "sse2"), "{:?}", seen.cpu_flags);
        assert_eq!(seen.vdso.lengths.last(), Some(&(seen.vdso.code.len() as u64)));
    }
}
