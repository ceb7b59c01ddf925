//! Emptying a fresh process of the sandbox, a copy of the shim, before a guest is built in it.

use crate::vdso::foreign::ForeignVdso;
use tern_image::{Layout, Region, Reserve};
use tern_tracee::inject::{self, Injection, SYSCALL, Site};
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::{Error, Memory, PAGE, Result};

/// Turns a copy of the shim into an empty process. It has the reserved range with the injection
/// code, the kernel's own mappings at the addresses where the guest had them (or their
/// replacements), no other memory, no descriptors, and no capabilities.
pub(crate) fn empty(
    injection: &mut Injection,
    memory: &Memory,
    layout: &Layout,
    (reserve, foreign_vdso): (Reserve, Option<&ForeignVdso>),
) -> Result<()> {
    let pid = injection.pid();
    let now = procfs::maps(pid)?;
    let (mut kernel_mappings, mut targets): (Vec<&Mapping>, Vec<&Region>) = (Vec::new(), Vec::new());
    if foreign_vdso.is_none() {
        kernel_mappings.extend(now.iter().filter(|m| m.is_kernel_mapping() && m.name != b"[vsyscall]"));
        targets.extend(layout.kernel_regions());
    }
    let same = kernel_mappings.len() == targets.len()
        && kernel_mappings.iter().zip(&targets).all(|(m, r)| m.len() == r.len());
    if !same {
        return Err(Error::Inconsistent { what: "the kernel's own mappings differ from home's".into(), pid });
    }
    let code = inject::own_site().0;
    if reserve.overlaps(code & !(PAGE - 1), code + 2) {
        return Err(Error::Inconsistent {
            what: "the shim's code is where the reserved range must be".into(),
            pid,
        });
    }
    let prot = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let fixed = (libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    // First move the kernel's mappings away from all old and new places, which may overlap. Then
    // map the range.
    let away = gap(&now, layout, reserve);
    let mut at = away;
    for m in &kernel_mappings {
        mremap(injection, m.start, m.len(), at)?;
        at += m.len();
    }
    injection.must(
        "map the reserved range",
        libc::SYS_mmap,
        [reserve.start, Reserve::LEN, prot, fixed, u64::MAX, 0],
    )?;
    memory.write(reserve.start, &SYSCALL)?;
    reserve.protect_code(injection)?;
    injection.set_site(Site(reserve.start));
    tern_image::thread::clear_kernel_pointers(
        std::slice::from_mut(injection),
        memory,
        reserve.large_batch_area(),
    )?;
    for (start, end) in [
        (0, reserve.start.min(away)),
        (reserve.end().min(at), reserve.start.max(away)),
        (reserve.end().max(at), tern_tracee::TASK_END),
    ] {
        if start < end {
            injection.must("unmap the shim's memory", libc::SYS_munmap, [start, end - start, 0, 0, 0, 0])?;
        }
    }
    let mut at = away;
    for (m, target) in kernel_mappings.iter().zip(targets) {
        mremap(injection, at, m.len(), target.start)?;
        at += m.len();
    }
    if let Some(foreign_vdso) = foreign_vdso {
        foreign_vdso.map_into(injection, memory)?;
    }
    injection.must("close descriptors", libc::SYS_close_range, [0, u64::from(u32::MAX), 0, 0, 0, 0])?;
    drop_capabilities(injection, memory, reserve)
}

fn mremap(injection: &mut Injection, from: u64, len: u64, to: u64) -> Result<()> {
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    injection.must("place the vDSO", libc::SYS_mremap, [from, len, len, flags, to, 0]).map(drop)
}

/// Finds an address range that is free both now and in the layout, and large enough for the
/// kernel's own mappings.
fn gap(now: &[Mapping], layout: &Layout, reserve: Reserve) -> u64 {
    const GAP_LEN: u64 = 1 << 20;
    let free = |start: u64| {
        let end = start + GAP_LEN;
        !now.iter().any(|m| m.start < end && start < m.end)
            && !layout.regions.iter().any(|r| r.start < end && start < r.end)
            && !reserve.overlaps(start, end)
    };
    (1u64..).map(|n| n << 32).find(|&start| free(start)).unwrap_or(1 << 32)
}

fn drop_capabilities(injection: &mut Injection, memory: &Memory, reserve: Reserve) -> Result<()> {
    // struct __user_cap_header_struct: version 3, pid 0 (itself); then two empty sets of three
    // words.
    let mut bytes = 0x2008_0522_u32.to_le_bytes().to_vec();
    bytes.resize(8 + 24, 0);
    memory.write(reserve.data_start(), &bytes)?;
    let args = [reserve.data_start(), reserve.data_start() + 8, 0, 0, 0, 0];
    injection.must("drop capabilities", libc::SYS_capset, args).map(drop)
}
