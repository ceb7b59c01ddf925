//! A guest whose home has another vDSO than this node.
//!
//! ```text
//!   where home has its            here
//!   [vvar] and the like           nothing, kept free      r-x: the page of stubs, two pages below the vDSO
//!   [vdso]                        a copy with other entries
//! ```
//! None of it is ever sent: where the guest goes next it has home's own there again, or another copy. So a thread is not
//! let stand in a stub, where home has no code: it begins that function anew, or has returned from it
//! ([`Foreign::leave`]). A thread in the rest of the copy stands where home has the same code.

use crate::stubs::{BELOW, MOST_CODE, Stubs};
use std::ops::Range;
use tern_image::{Backing, Layout, Region};
use tern_migrate::message::Vdso;
use tern_tracee::inject::Injection;
use tern_tracee::procfs::Mapping;
use tern_tracee::registers::Registers;
use tern_tracee::{Error, Memory, PAGE, Result};

/// What such a guest has in place of its home's own mappings.
#[derive(Debug, Clone)]
pub struct Foreign {
    stubs: Stubs,
    /// Home's own mappings, in order of address; none before the address space is known.
    kernels: Vec<Region>,
}

impl Foreign {
    /// What a guest with this vDSO needs where the node has `ours`: nothing if that is the same.
    ///
    /// # Errors
    /// With the sentence for home, if it cannot be given it.
    pub fn judge(theirs: &Vdso, ours: &Vdso) -> std::result::Result<Option<Self>, String> {
        if theirs == ours {
            return Ok(None);
        }
        let (code, data) = match theirs.lengths.split_last() {
            Some((code, data)) => (*code, data.iter().fold(0u64, |sum, len| sum.saturating_add(*len))),
            None => (0, 0),
        };
        let stubs = Stubs::of(&theirs.code)
            .filter(|_| theirs.code.len() as u64 == code && (BELOW..=MOST_CODE as u64).contains(&data));
        let Some(stubs) = stubs else {
            return Err("the kernel here has another vDSO than home's, and does not know that".into());
        };
        Ok(Some(Self { stubs, kernels: Vec::new() }))
    }

    /// Where the parts are to be, by the address space that has come.
    ///
    /// # Errors
    /// If they are not where a kernel puts them, for process `pid`.
    pub fn locate(&mut self, layout: &Layout, pid: i32) -> Result<()> {
        let kernels: Vec<Region> = layout.kernels().copied().collect();
        let joined = kernels.windows(2).all(|pair| pair[0].end == pair[1].start);
        let fits = match (kernels.first(), kernels.last()) {
            (Some(first), Some(vdso)) => {
                vdso.len() == self.stubs.code.len() as u64
                    && (BELOW..=MOST_CODE as u64).contains(&(vdso.start - first.start))
            }
            _ => false,
        };
        if !joined || !fits {
            return Err(Error::Astray { what: "the vDSO of its home is not in one piece".into(), pid });
        }
        self.kernels = kernels;
        Ok(())
    }

    /// Puts it into the address space of an empty process.
    ///
    /// # Errors
    /// If the process is gone.
    pub(crate) fn put(&self, injection: &mut Injection, memory: &Memory) -> Result<()> {
        let (all, vdso) = (self.range(), self.vdso());
        let private = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED) as u64;
        let write = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let none = [all.start, vdso.start - all.start, 0, private, u64::MAX, 0];
        injection.must("keep the place of home's clocks", libc::SYS_mmap, none)?;
        let parts = [(self.page(), &self.stubs.page), (vdso.start, &self.stubs.code)];
        for (at, bytes) in parts {
            let len = bytes.len() as u64;
            injection.must("place home's vDSO", libc::SYS_mmap, [at, len, write, private, u64::MAX, 0])?;
            memory.write(at, bytes)?;
            let exec = (libc::PROT_READ | libc::PROT_EXEC) as u64;
            injection.must("protect home's vDSO", libc::SYS_mprotect, [at, len, exec, 0, 0, 0])?;
        }
        Ok(())
    }

    /// The maps without what is ours here. The kernel may have merged a part of it with a neighbour.
    #[must_use]
    pub fn without(foreign: Option<&Self>, maps: Vec<Mapping>) -> Vec<Mapping> {
        let Some(ours) = foreign.map(Self::range).filter(|range| !range.is_empty()) else { return maps };
        let mut rest = Vec::with_capacity(maps.len());
        for m in maps {
            if m.end <= ours.start || ours.end <= m.start {
                rest.push(m);
                continue;
            }
            // What the program has mapped over it with a file is cut with the rest: there it is home's.
            rest.extend((m.start < ours.start).then(|| Mapping { end: ours.start, ..m.clone() }));
            let offset = m.offset + (ours.end - m.start);
            rest.extend((ours.end < m.end).then_some(Mapping { start: ours.end, offset, ..m }));
        }
        rest
    }

    /// Describes home's own mappings as home has them.
    pub(crate) fn describe(&self, layout: &mut Layout) {
        layout.regions.retain(|region| region.backing != Backing::Kernel);
        let at = layout.regions.partition_point(|region| region.start < self.range().start);
        layout.regions.splice(at..at, self.kernels.iter().copied());
    }

    fn range(&self) -> Range<u64> {
        match (self.kernels.first(), self.kernels.last()) {
            (Some(first), Some(last)) => first.start..last.end,
            _ => 0..0,
        }
    }

    fn vdso(&self) -> Range<u64> {
        self.kernels.last().map_or(0..0, |vdso| vdso.start..vdso.end)
    }

    fn page(&self) -> u64 {
        self.vdso().start.saturating_sub(BELOW)
    }

    /// Whether this is an address of the copy, where what cannot be done here faults.
    pub(crate) fn in_copy(&self, address: u64) -> bool {
        self.vdso().contains(&address)
    }

    /// Whether this is an address of a stub.
    pub(crate) fn in_stubs(&self, address: u64) -> bool {
        (self.page()..self.page() + PAGE).contains(&address)
    }

    /// Takes the registers of a stopped thread out of the stubs: true if they have changed. A call there has no effect
    /// but its result, so it may be made twice.
    ///
    /// # Errors
    /// If the thread is gone.
    pub(crate) fn leave(&self, registers: &mut Registers, memory: &Memory) -> Result<bool> {
        if !self.in_stubs(registers.rip) {
            return Ok(false);
        }
        let at = registers.rip - self.page();
        let mut next = [0];
        memory.read(registers.rip, &mut next)?;
        // ret
        if next == [0xc3] && registers.restart_code().is_none() {
            registers.rip = memory.word(registers.rsp)?;
            registers.rsp += 8;
        } else if let Some((_, _, entry)) =
            self.stubs.places.iter().find(|(from, to, _)| (*from..*to).contains(&at))
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
            advice: tern_image::Advice::default(),
            backing,
            anew: false,
        }
    }

    /// As if this machine's were another's.
    fn foreign() -> Foreign {
        let me = std::process::id() as i32;
        let maps = procfs::maps(me).unwrap();
        let ours = tern_migrate::machine::machine(&Memory::open(me).unwrap(), &maps).unwrap().vdso;
        assert!(Foreign::judge(&ours, &ours).unwrap().is_none());
        let mut other = ours.clone();
        other.code[0] = 0;
        assert!(Foreign::judge(&other, &ours).unwrap_err().contains("vDSO"));
        other = ours.clone();
        other.lengths.push(PAGE);
        assert!(Foreign::judge(&other, &ours).is_err());
        let end = ours.code.len() - 1;
        other = ours.clone();
        other.code[end] ^= 1;
        Foreign::judge(&other, &ours).unwrap().unwrap()
    }

    fn placed() -> (Foreign, Layout) {
        let mut foreign = foreign();
        let vdso = START + 0x4000;
        let end = vdso + foreign.stubs.code.len() as u64;
        let regions = vec![
            region(0x1000, 0x2000, Backing::Anonymous),
            region(START, vdso, Backing::Kernel),
            region(vdso, end, Backing::Kernel),
            region(end + PAGE, end + 2 * PAGE, Backing::Anonymous),
        ];
        let layout = Layout { regions, files: Vec::new() };
        foreign.locate(&layout, 1).unwrap();
        (foreign, layout)
    }

    #[test]
    fn it_is_in_one_piece() {
        let (mut foreign, layout) = placed();
        for change in [
            |l: &mut Layout| l.regions[1].end -= PAGE,
            |l: &mut Layout| l.regions[2].end += PAGE,
            |l: &mut Layout| l.regions.truncate(2),
            |l: &mut Layout| l.regions.clear(),
        ] {
            let mut bent = layout.clone();
            change(&mut bent);
            assert!(foreign.locate(&bent, 1).is_err());
        }
        assert!(foreign.locate(&layout, 1).is_ok());
    }

    #[test]
    fn it_is_described_as_home_has_it() {
        let (foreign, layout) = placed();
        let any = procfs::maps(std::process::id() as i32).unwrap().remove(0);
        let mapping = |start: u64, end: u64| Mapping { start, end, ..any.clone() };
        let (from, to) = (foreign.range().start, foreign.range().end);
        // The last is merged with what the program has mapped behind it.
        let maps = vec![mapping(0x1000, 0x2000), mapping(from, from + PAGE), mapping(from + PAGE, to + PAGE)];
        let rest = Foreign::without(Some(&foreign), maps.clone());
        let ranges: Vec<_> = rest.iter().map(|m| (m.start, m.end)).collect();
        assert_eq!(ranges, [(0x1000, 0x2000), (to, to + PAGE)]);
        assert_eq!(Foreign::without(None, maps).len(), 3);
        let mut seen = layout.clone();
        seen.regions.retain(|r| r.backing == Backing::Anonymous);
        foreign.describe(&mut seen);
        assert_eq!(seen, layout);
    }

    /// What a stopped thread's place is read from: the page of stubs, and the copy two pages behind it.
    #[repr(align(4096))]
    struct Room([u8; 3 * PAGE as usize]);

    #[test]
    fn nobody_stands_in_a_stub() {
        let (mut foreign, _) = placed();
        let mut room = Box::new(Room([0; 3 * PAGE as usize]));
        room.0[..PAGE as usize].copy_from_slice(&foreign.stubs.page);
        let page = room.0.as_ptr() as u64;
        let vdso = page + BELOW;
        foreign.kernels =
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
        for (from, to, entry) in foreign.stubs.places.clone() {
            let anew = Registers { rip: vdso + entry, orig_rax: u64::MAX, ..thread(0, -512) };
            // At its first instruction; and behind a call that was interrupted.
            for rip in [page + from, page + to - 1] {
                let mut registers = thread(rip, -512);
                assert!(foreign.leave(&mut registers, &memory).unwrap());
                assert_eq!(registers, anew);
            }
            let mut done = thread(page + to - 1, 0);
            assert!(foreign.leave(&mut done, &memory).unwrap());
            assert_eq!((done.rip, done.rsp, done.rax), (0x1234, caller.as_ptr() as u64 + 8, 0));
        }
        let mut in_copy = thread(vdso, 0);
        assert!(!foreign.leave(&mut in_copy, &memory).unwrap());
        assert!(foreign.in_copy(vdso) && !foreign.in_stubs(vdso) && foreign.in_stubs(page));
    }
}
