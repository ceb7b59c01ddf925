//! The range that deputy and guest keep free for us, at the same address.
//!
//! ```text
//!  offset     at home                              away
//!       0     the blob (code)                      the stub: one `syscall` instruction
//!    2048     code of errands                      the same
//!    4096     mailbox header  ┐ shared with the    scratch for injected calls
//!    8192     mailbox data    ┘ home shim          scratch
//!  the last
//!    4096     scratch for injected calls, at any   the same; its second half
//!             time                                 holds the title
//! ```

use serde::{Deserialize, Serialize};
use tern_tracee::errand::Desk;
use tern_tracee::inject::Injection;
use tern_tracee::procfs::Mapping;
use tern_tracee::{PAGE, Result};

/// Where the range lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserve {
    /// Its first address.
    pub start: u64,
}

impl Reserve {
    /// Its length in bytes.
    pub const LEN: u64 = 256 << 10;
    /// Length of the part behind the code page.
    pub const ROOM: usize = (Self::LEN - PAGE) as usize;

    /// Where we ask for room in a process: far from where kernels and allocators put things by themselves, so
    /// that it is free on every node, and has no neighbours.
    pub const AREA: u64 = 0x3100_0000_0000;

    /// Address behind the last.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start + Self::LEN
    }

    /// Where the writable part begins.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.start + PAGE
    }

    /// Where injected calls may put what they point to, a page at most, whatever calls are under way.
    #[must_use]
    pub fn scratch(&self) -> u64 {
        self.end() - PAGE
    }

    /// Where threads may be sent on errands, whatever calls are under way: a few at a time.
    #[must_use]
    pub fn narrow_desk(&self) -> Desk {
        Desk { code: self.start + PAGE / 2, start: self.scratch(), end: self.scratch() + PAGE / 2 }
    }

    /// The same while no mailbox is in use in our range: hundreds.
    #[must_use]
    pub fn wide_desk(&self) -> Desk {
        Desk { start: self.room() + PAGE, ..self.narrow_desk() }
    }

    /// Whether the two ranges meet.
    #[must_use]
    pub fn meets(&self, start: u64, end: u64) -> bool {
        start < self.end() && self.start < end
    }

    /// Chooses a free place in a process, and maps it there: readable and writable, private.
    ///
    /// # Errors
    /// If the process is gone, or will not have so much more address space.
    pub fn take(injection: &mut Injection) -> Result<Self> {
        let prot = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as u64;
        let args = [Self::AREA, Self::LEN, prot, flags, u64::MAX, 0];
        let reserve = Self { start: injection.must("reserve addresses", libc::SYS_mmap, args)? };
        reserve.protect_code(injection)?;
        Ok(reserve)
    }

    /// Makes the code page of the range, which is mapped, executable.
    ///
    /// # Errors
    /// If the process is gone, or the kernel refuses.
    pub fn protect_code(&self, injection: &mut Injection) -> Result<()> {
        let exec = (libc::PROT_READ | libc::PROT_EXEC) as u64;
        injection.must("protect our code", libc::SYS_mprotect, [self.start, PAGE, exec, 0, 0, 0]).map(drop)
    }

    /// Removes the range from a process.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn release(&self, injection: &mut Injection) -> Result<()> {
        injection.must("release addresses", libc::SYS_munmap, [self.start, Self::LEN, 0, 0, 0, 0]).map(drop)
    }

    /// The maps without our range. The kernel may have merged a part of it with a neighbour.
    #[must_use]
    pub fn without(reserve: Option<Self>, maps: &[Mapping]) -> Vec<Mapping> {
        let mut rest = Vec::with_capacity(maps.len() + 1);
        for m in maps {
            match reserve.filter(|r| r.meets(m.start, m.end)) {
                None => rest.push(m.clone()),
                Some(r) => {
                    // Nothing of a file is ever merged with us, so offsets need no care.
                    rest.extend((m.start < r.start).then(|| Mapping { end: r.start, ..m.clone() }));
                    rest.extend((r.end() < m.end).then(|| Mapping { start: r.end(), ..m.clone() }));
                }
            }
        }
        rest
    }
}
