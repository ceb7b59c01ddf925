//! Guests whose home has another vDSO than this node.
//!
//! ```text
//!   at home                       here
//!   [vvar] and the like           nothing, kept free      r-x: the trampoline page, two pages below the vDSO
//!   [vdso]                        a copy with other entries
//! ```
//! None of this is ever sent: at its next node the guest gets home's own vDSO again, or a new copy.
//! So a thread is never left stopped inside a trampoline, where home has no code. The shim moves it
//! to the beginning of the redirected function, or has it return ([`ForeignVdso::step_out`]). A
//! thread in the rest of the copy is at an address where home has the same code.

use crate::vdso::trampoline::{DISTANCE, MAX_VDSO_LEN, VdsoTrampolines};
use std::ops::Range;
use tern_image::{Backing, Layout, Region};
use tern_migrate::message::Vdso;
use tern_tracee::inject::Injection;
use tern_tracee::procfs::Mapping;
use tern_tracee::registers::Registers;
use tern_tracee::{Error, Memory, PAGE, Result};

/// The replacement for the kernel's own mappings of a guest's home.
#[derive(Debug, Clone)]
pub(crate) struct ForeignVdso {
    trampolines: VdsoTrampolines,
    /// The mappings of home's kernel (vvar, vDSO), in order of address; empty until the address
    /// space is known.
    kernel_mappings: Vec<Region>,
}

impl ForeignVdso {
    /// The replacement that a guest with the vDSO `theirs` needs on a node with `ours`; none if
    /// they are equal.
    ///
    /// # Errors
    /// With the reason to send home, if no replacement is possible.
    pub(crate) fn check(theirs: &Vdso, ours: &Vdso) -> std::result::Result<Option<Self>, String> {
        if theirs == ours {
            return Ok(None);
        }
        let (code, data) = match theirs.lengths.split_last() {
            Some((code, data)) => (*code, data.iter().fold(0u64, |sum, len| sum.saturating_add(*len))),
            None => (0, 0),
        };
        let trampolines = VdsoTrampolines::for_vdso(&theirs.code)
            .filter(|_| theirs.code.len() as u64 == code && (DISTANCE..=MAX_VDSO_LEN as u64).contains(&data));
        let Some(trampolines) = trampolines else {
            return Err("home's vDSO differs from this node's, and its format is not supported".into());
        };
        Ok(Some(Self { trampolines, kernel_mappings: Vec::new() }))
    }

    /// Takes the addresses of its parts from the received address space of process `pid`.
    ///
    /// # Errors
    /// If they are not where a kernel maps them.
    pub(crate) fn locate(&mut self, layout: &Layout, pid: i32) -> Result<()> {
        let kernel_mappings: Vec<Region> = layout.kernel_regions().copied().collect();
        let joined = kernel_mappings.windows(2).all(|pair| pair[0].end == pair[1].start);
        let fits = match (kernel_mappings.first(), kernel_mappings.last()) {
            (Some(first), Some(vdso)) => {
                vdso.len() == self.trampolines.code.len() as u64
                    && (DISTANCE..=MAX_VDSO_LEN as u64).contains(&(vdso.start - first.start))
            }
            _ => false,
        };
        if !joined || !fits {
            return Err(Error::Inconsistent { what: "the vDSO of its home is not contiguous".into(), pid });
        }
        self.kernel_mappings = kernel_mappings;
        Ok(())
    }

    /// Maps it into an empty process.
    ///
    /// # Errors
    /// If the process is gone.
    pub(crate) fn map_into(&self, injection: &mut Injection, memory: &Memory) -> Result<()> {
        let (all, vdso) = (self.range(), self.vdso());
        let private = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED) as u64;
        let write = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let none = [all.start, vdso.start - all.start, 0, private, u64::MAX, 0];
        injection.must("reserve the place of home's clock pages", libc::SYS_mmap, none)?;
        let parts = [(self.trampoline_page(), &self.trampolines.page), (vdso.start, &self.trampolines.code)];
        for (at, bytes) in parts {
            let len = bytes.len() as u64;
            injection.must("place home's vDSO", libc::SYS_mmap, [at, len, write, private, u64::MAX, 0])?;
            memory.write(at, bytes)?;
            let exec = (libc::PROT_READ | libc::PROT_EXEC) as u64;
            injection.must("protect home's vDSO", libc::SYS_mprotect, [at, len, exec, 0, 0, 0])?;
        }
        Ok(())
    }

    /// The maps without the replacement. The kernel may have merged a part of it with a neighbour.
    #[must_use]
    pub(crate) fn exclude_from(foreign_vdso: Option<&Self>, maps: Vec<Mapping>) -> Vec<Mapping> {
        let Some(ours) = foreign_vdso.map(Self::range).filter(|range| !range.is_empty()) else { return maps };
        let mut rest = Vec::with_capacity(maps.len());
        for m in maps {
            if m.end <= ours.start || ours.end <= m.start {
                rest.push(m);
                continue;
            }
            // A file that the program has mapped over the replacement is cut too: at home, the vDSO
            // is there.
            rest.extend((m.start < ours.start).then(|| Mapping { end: ours.start, ..m.clone() }));
            let offset = m.offset + (ours.end - m.start);
            rest.extend((ours.end < m.end).then_some(Mapping { start: ours.end, offset, ..m }));
        }
        rest
    }

    /// Puts the mappings of home's kernel into a layout, in the place of this kernel's.
    pub(crate) fn describe(&self, layout: &mut Layout) {
        layout.regions.retain(|region| region.backing != Backing::Kernel);
        let at = layout.regions.partition_point(|region| region.start < self.range().start);
        layout.regions.splice(at..at, self.kernel_mappings.iter().copied());
    }

    fn range(&self) -> Range<u64> {
        match (self.kernel_mappings.first(), self.kernel_mappings.last()) {
            (Some(first), Some(last)) => first.start..last.end,
            _ => 0..0,
        }
    }

    fn vdso(&self) -> Range<u64> {
        self.kernel_mappings.last().map_or(0..0, |vdso| vdso.start..vdso.end)
    }

    fn trampoline_page(&self) -> u64 {
        self.vdso().start.saturating_sub(DISTANCE)
    }

    /// Whether this address is in the copy, where a read of the clock's data pages faults.
    pub(crate) fn in_copy(&self, address: u64) -> bool {
        self.vdso().contains(&address)
    }

    /// Whether this address is in the trampoline page.
    pub(crate) fn in_trampolines(&self, address: u64) -> bool {
        (self.trampoline_page()..self.trampoline_page() + PAGE).contains(&address)
    }

    /// Changes the registers of a stopped thread such that it is outside the trampolines; true if
    /// it was inside. The calls there have no effect but their result, so they may be repeated.
    ///
    /// # Errors
    /// If the thread is gone.
    pub(crate) fn step_out(&self, registers: &mut Registers, memory: &Memory) -> Result<bool> {
        if !self.in_trampolines(registers.rip) {
            return Ok(false);
        }
        let at = registers.rip - self.trampoline_page();
        let mut next = [0];
        memory.read(registers.rip, &mut next)?;
        // ret
        if next == [0xc3] && registers.restart_code().is_none() {
            registers.rip = memory.word(registers.rsp)?;
            registers.rsp += 8;
        } else if let Some((_, _, entry)) =
            self.trampolines.places.iter().find(|(from, to, _)| (*from..*to).contains(&at))
        {
            registers.rip = self.vdso().start + entry;
        } else {
            return Ok(false);
        }
        registers.orig_rax = u64::MAX;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_tracee::procfs;

    const START: u64 = 0x7fff_0000_0000;

    fn region(start: u64, end: u64, backing: Backing) -> Region {
        let (shared, grows_down, no_reserve) = (false, false, false);
        Region {
            start,
            end,
            prot: 5,
            shared,
            grows_down,
            no_reserve,
            advice: tern_image::MemoryAdvice::default(),
            backing,
            remap: false,
        }
    }

    /// A replacement for this machine's vDSO, as if it were another machine's.
    fn foreign_vdso() -> ForeignVdso {
        let me = std::process::id() as i32;
        let maps = procfs::maps(me).unwrap();
        let ours = tern_migrate::machine::describe(&Memory::open(me).unwrap(), &maps).unwrap().vdso;
        assert!(ForeignVdso::check(&ours, &ours).unwrap().is_none());
        let mut other = ours.clone();
        other.code[0] = 0;
        assert!(ForeignVdso::check(&other, &ours).unwrap_err().contains("vDSO"));
        other = ours.clone();
        other.lengths.push(PAGE);
        assert!(ForeignVdso::check(&other, &ours).is_err());
        let end = ours.code.len() - 1;
        other = ours.clone();
        other.code[end] ^= 1;
        ForeignVdso::check(&other, &ours).unwrap().unwrap()
    }

    fn placed() -> (ForeignVdso, Layout) {
        let mut foreign_vdso = foreign_vdso();
        let vdso = START + 0x4000;
        let end = vdso + foreign_vdso.trampolines.code.len() as u64;
        let regions = vec![
            region(0x1000, 0x2000, Backing::Anonymous),
            region(START, vdso, Backing::Kernel),
            region(vdso, end, Backing::Kernel),
            region(end + PAGE, end + 2 * PAGE, Backing::Anonymous),
        ];
        let layout = Layout { regions, files: Vec::new() };
        foreign_vdso.locate(&layout, 1).unwrap();
        (foreign_vdso, layout)
    }

    #[test]
    fn noncontiguous_kernel_mappings_are_rejected() {
        let (mut foreign_vdso, layout) = placed();
        for change in [
            |l: &mut Layout| l.regions[1].end -= PAGE,
            |l: &mut Layout| l.regions[2].end += PAGE,
            |l: &mut Layout| l.regions.truncate(2),
            |l: &mut Layout| l.regions.clear(),
        ] {
            let mut bent = layout.clone();
            change(&mut bent);
            assert!(foreign_vdso.locate(&bent, 1).is_err());
        }
        assert!(foreign_vdso.locate(&layout, 1).is_ok());
    }

    #[test]
    fn layout_shows_home_s_own_mappings() {
        let (foreign_vdso, layout) = placed();
        let any = procfs::maps(std::process::id() as i32).unwrap().remove(0);
        let mapping = |start: u64, end: u64| Mapping { start, end, ..any.clone() };
        let (from, to) = (foreign_vdso.range().start, foreign_vdso.range().end);
        // The last one is merged with a mapping of the program behind it.
        let maps = vec![mapping(0x1000, 0x2000), mapping(from, from + PAGE), mapping(from + PAGE, to + PAGE)];
        let rest = ForeignVdso::exclude_from(Some(&foreign_vdso), maps.clone());
        let ranges: Vec<_> = rest.iter().map(|m| (m.start, m.end)).collect();
        assert_eq!(ranges, [(0x1000, 0x2000), (to, to + PAGE)]);
        assert_eq!(ForeignVdso::exclude_from(None, maps).len(), 3);
        let mut seen = layout.clone();
        seen.regions.retain(|r| r.backing == Backing::Anonymous);
        foreign_vdso.describe(&mut seen);
        assert_eq!(seen, layout);
    }

    /// Memory like that of a guest: the trampoline page, and the copy two pages above it.
    #[repr(align(4096))]
    struct TestMemory([u8; 3 * PAGE as usize]);

    #[test]
    fn stopped_thread_leaves_trampolines() {
        let (mut foreign_vdso, _) = placed();
        let mut test_memory = Box::new(TestMemory([0; 3 * PAGE as usize]));
        test_memory.0[..PAGE as usize].copy_from_slice(&foreign_vdso.trampolines.page);
        let page = test_memory.0.as_ptr() as u64;
        let vdso = page + DISTANCE;
        foreign_vdso.kernel_mappings =
            vec![region(page, vdso, Backing::Kernel), region(vdso, vdso + PAGE, Backing::Kernel)];
        let memory = Memory::open(std::process::id() as i32).unwrap();
        let caller = [0x1234_u64, 5];
        let thread = |rip: u64, rax: i64| Registers {
            rip,
            rsp: caller.as_ptr() as u64,
            rax: rax.cast_unsigned(),
            orig_rax: 228,
            ..Registers::default()
        };
        for (from, to, entry) in foreign_vdso.trampolines.places.clone() {
            let anew = Registers { rip: vdso + entry, orig_rax: u64::MAX, ..thread(0, -512) };
            // At its first instruction, and behind an interrupted call.
            for rip in [page + from, page + to - 1] {
                let mut registers = thread(rip, -512);
                assert!(foreign_vdso.step_out(&mut registers, &memory).unwrap());
                assert_eq!(registers, anew);
            }
            let mut done = thread(page + to - 1, 0);
            assert!(foreign_vdso.step_out(&mut done, &memory).unwrap());
            assert_eq!((done.rip, done.rsp, done.rax), (0x1234, caller.as_ptr() as u64 + 8, 0));
        }
        let mut in_copy = thread(vdso, 0);
        assert!(!foreign_vdso.step_out(&mut in_copy, &memory).unwrap());
        assert!(
            foreign_vdso.in_copy(vdso)
                && !foreign_vdso.in_trampolines(vdso)
                && foreign_vdso.in_trampolines(page)
        );
    }
}
