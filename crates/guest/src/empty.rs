//! A fresh process of the sandbox, a copy of ourselves, is emptied before a guest is built in it.

use crate::foreign::Foreign;
use tern_image::{Layout, Region, Reserve};
use tern_tracee::inject::{self, Injection, SYSCALL, Site};
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::{Error, Memory, PAGE, Result};

/// Turns a copy of ourselves into an empty process: our range with the stub, the kernel's own mappings where
/// the process had them, or what stands for them, nothing else; no descriptors, no capabilities.
pub(crate) fn empty(
    injection: &mut Injection,
    memory: &Memory,
    layout: &Layout,
    (reserve, foreign): (Reserve, Option<&Foreign>),
) -> Result<()> {
    let pid = injection.pid();
    let now = procfs::maps(pid)?;
    let (mut kernels, mut targets): (Vec<&Mapping>, Vec<&Region>) = (Vec::new(), Vec::new());
    if foreign.is_none() {
        kernels.extend(now.iter().filter(|m| m.is_kernels() && m.name != b"[vsyscall]"));
        targets.extend(layout.kernels());
    }
    let same =
        kernels.len() == targets.len() && kernels.iter().zip(&targets).all(|(m, r)| m.len() == r.len());
    if !same {
        return Err(Error::Astray {
            what: "the kernel's own mappings are not those of its home".into(),
            pid,
        });
    }
    let code = inject::own_site().0;
    if reserve.meets(code & !(PAGE - 1), code + 2) {
        return Err(Error::Astray { what: "our code lies where our range must be".into(), pid });
    }
    let prot = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let fixed = (libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    // First away from where anything is or will be: old and new places may overlap. Then our range.
    let away = gap(&now, layout, reserve);
    let mut at = away;
    for m in &kernels {
        mremap(injection, m.start, m.len(), at)?;
        at += m.len();
    }
    injection.must(
        "map our range",
        libc::SYS_mmap,
        [reserve.start, Reserve::LEN, prot, fixed, u64::MAX, 0],
    )?;
    memory.write(reserve.start, &SYSCALL)?;
    reserve.protect_code(injection)?;
    injection.set_site(Site(reserve.start));
    tern_image::thread::withdraw(std::slice::from_mut(injection), memory, reserve)?;
    for (start, end) in [
        (0, reserve.start.min(away)),
        (reserve.end().min(at), reserve.start.max(away)),
        (reserve.end().max(at), tern_tracee::TASK_END),
    ] {
        if start < end {
            injection.must("remove our memory", libc::SYS_munmap, [start, end - start, 0, 0, 0, 0])?;
        }
    }
    let mut at = away;
    for (m, target) in kernels.iter().zip(targets) {
        mremap(injection, at, m.len(), target.start)?;
        at += m.len();
    }
    if let Some(foreign) = foreign {
        foreign.put(injection, memory)?;
    }
    injection.must("close descriptors", libc::SYS_close_range, [0, u64::from(u32::MAX), 0, 0, 0, 0])?;
    drop_capabilities(injection, memory, reserve)
}

fn mremap(injection: &mut Injection, from: u64, len: u64, to: u64) -> Result<()> {
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    injection.must("place the vDSO", libc::SYS_mremap, [from, len, len, flags, to, 0]).map(drop)
}

/// An address range that is free now and in the layout, large enough for the kernel's own mappings.
fn gap(now: &[Mapping], layout: &Layout, reserve: Reserve) -> u64 {
    const ROOM: u64 = 1 << 20;
    let free = |start: u64| {
        let end = start + ROOM;
        !now.iter().any(|m| m.start < end && start < m.end)
            && !layout.regions.iter().any(|r| r.start < end && start < r.end)
            && !reserve.meets(start, end)
    };
    (1u64..).map(|n| n << 32).find(|&start| free(start)).unwrap_or(1 << 32)
}

fn drop_capabilities(injection: &mut Injection, memory: &Memory, reserve: Reserve) -> Result<()> {
    // struct __user_cap_header_struct: version 3, pid 0 (itself); then two empty sets of three words.
    let mut bytes = 0x2008_0522_u32.to_le_bytes().to_vec();
    bytes.resize(8 + 24, 0);
    memory.write(reserve.room(), &bytes)?;
    let args = [reserve.room(), reserve.room() + 8, 0, 0, 0, 0];
    injection.must("drop capabilities", libc::SYS_capset, args).map(drop)
}
