//! The address range that Tern keeps for itself in deputy and guest, at the same address.
//!
//! ```text
//!  offset     at home                              away
//!       0     the blob (code)                      the stub: one `syscall` instruction
//!    2048     code for batched calls                the same
//!    4096     mailbox header  ┐ shared with the    scratch for injected calls
//!    8192     mailbox data    ┘ home shim          scratch
//!  the last
//!    4096     scratch for injected calls, at any   the same; its second half
//!             time                                 holds the process title
//! ```

use serde::{Deserialize, Serialize};
use tern_tracee::batch::BatchArea;
use tern_tracee::inject::Injection;
use tern_tracee::procfs::Mapping;
use tern_tracee::{PAGE, Result};

/// The reserved range of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserve {
    /// Its first address.
    pub start: u64,
}

impl Reserve {
    /// Its length in bytes.
    pub const LEN: u64 = 256 << 10;
    /// Length of the part after the code page.
    pub const DATA_LEN: usize = (Self::LEN - PAGE) as usize;

    /// The hint address at which the range is mapped: far from all addresses that kernels and
    /// allocators choose by themselves, so that it is free on every node and has no neighbours.
    pub const HINT: u64 = 0x3100_0000_0000;

    /// The first address after the range.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start + Self::LEN
    }

    /// Start of the writable part.
    #[must_use]
    pub fn data_start(&self) -> u64 {
        self.start + PAGE
    }

    /// A page for arguments of injected calls, usable whatever calls are pending.
    #[must_use]
    pub fn scratch(&self) -> u64 {
        self.end() - PAGE
    }

    /// Space for a few batched calls, usable whatever calls are pending.
    #[must_use]
    pub fn small_batch_area(&self) -> BatchArea {
        BatchArea { code: self.start + PAGE / 2, start: self.scratch(), end: self.scratch() + PAGE / 2 }
    }

    /// Space for hundreds of batched calls, usable only while there is no mailbox in the range.
    #[must_use]
    pub fn large_batch_area(&self) -> BatchArea {
        BatchArea { start: self.data_start() + PAGE, ..self.small_batch_area() }
    }

    /// Whether the range overlaps `[start, end)`.
    #[must_use]
    pub fn overlaps(&self, start: u64, end: u64) -> bool {
        start < self.end() && self.start < end
    }

    /// Maps the range at a free address of the process: private, readable and writable, with an
    /// executable code page.
    ///
    /// # Errors
    /// If the process is gone, or its address space limit does not allow it.
    pub fn map_new(injection: &mut Injection) -> Result<Self> {
        let prot = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as u64;
        let args = [Self::HINT, Self::LEN, prot, flags, u64::MAX, 0];
        let reserve = Self { start: injection.must("reserve addresses", libc::SYS_mmap, args)? };
        reserve.protect_code(injection)?;
        Ok(reserve)
    }

    /// Makes the code page of the mapped range executable.
    ///
    /// # Errors
    /// If the process is gone, or the kernel refuses.
    pub fn protect_code(&self, injection: &mut Injection) -> Result<()> {
        let exec = (libc::PROT_READ | libc::PROT_EXEC) as u64;
        injection
            .must("make the reserved code executable", libc::SYS_mprotect, [self.start, PAGE, exec, 0, 0, 0])
            .map(drop)
    }

    /// Sets whether children that the process forks from now on inherit the range.
    ///
    /// # Errors
    /// If the process is gone, or the kernel refuses.
    pub fn set_inherited(&self, injection: &mut Injection, is_inherited: bool) -> Result<()> {
        let (operation, advice) = if is_inherited {
            ("let children inherit the reserved range", libc::MADV_DOFORK)
        } else {
            ("keep the reserved range out of children", libc::MADV_DONTFORK)
        };
        let args = [self.start, Self::LEN, advice as u64, 0, 0, 0];
        injection.must(operation, libc::SYS_madvise, args).map(drop)
    }

    /// Unmaps the range.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn release(&self, injection: &mut Injection) -> Result<()> {
        injection.must("release addresses", libc::SYS_munmap, [self.start, Self::LEN, 0, 0, 0, 0]).map(drop)
    }

    /// The mappings without Tern's range. The kernel may have merged part of it with a neighbour.
    #[must_use]
    pub fn exclude(reserve: Option<Self>, maps: &[Mapping]) -> Vec<Mapping> {
        let mut rest = Vec::with_capacity(maps.len() + 1);
        for m in maps {
            match reserve.filter(|r| r.overlaps(m.start, m.end)) {
                None => rest.push(m.clone()),
                Some(r) => {
                    // File mappings are never merged with the range, so offsets need no adjustment.
                    rest.extend((m.start < r.start).then(|| Mapping { end: r.start, ..m.clone() }));
                    rest.extend((r.end() < m.end).then(|| Mapping { start: r.end(), ..m.clone() }));
                }
            }
        }
        rest
    }
}
