//! Reading a process's CPU time without a trap.

use super::{Fastpath, code};
use crate::process::Process;
use std::ops::Range;
use std::time::Instant;
use tern_image::Reserve;
use tern_tracee::listener::Notification;
use tern_tracee::{Memory, Result};

/// The published CPU time, as an addition to the time that this node's kernel has counted.
#[derive(Debug)]
pub(super) struct CpuClock {
    /// Seconds, and nanoseconds below a second.
    pub(super) offset: (i64, i64),
    pub(super) until: Instant,
    /// Whether it is in the table.
    pub(super) is_published: bool,
}

impl CpuClock {
    /// Its representation in the table.
    pub(super) fn bytes(&self) -> [u8; 16] {
        let (mut bytes, (seconds, rest)) = ([0; 16], self.offset);
        bytes[..8].copy_from_slice(&seconds.to_le_bytes());
        bytes[8..].copy_from_slice(&rest.to_le_bytes());
        bytes
    }
}

impl Fastpath {
    /// Publishes the process's CPU time: what this node's kernel has counted plus `offset`
    /// nanoseconds, until `until`. The thread is in a trap.
    pub(crate) fn publish_cpu_time(
        &mut self,
        (offset, until): (i64, Instant),
        memory: &Memory,
        reserve: Reserve,
    ) -> Result<()> {
        const SECOND: i64 = 1_000_000_000;
        let clock = CpuClock {
            offset: (offset.div_euclid(SECOND), offset.rem_euclid(SECOND)),
            until,
            is_published: true,
        };
        let table = reserve.start + code::TABLE;
        memory.write(table + code::CLOCK_OFFSET as u64, &clock.bytes())?;
        memory.write(table + code::CLOCK as u64, &[1])?;
        self.clock = Some(clock);
        Ok(())
    }

    /// Stops publishing the CPU time, because home's part changes.
    pub(crate) fn unpublish_cpu_time(&mut self, memory: &Memory, reserve: Reserve) -> Result<()> {
        match self.clock.take() {
            Some(clock) if clock.is_published => {
                memory.write(reserve.start + code::TABLE + code::CLOCK as u64, &[0])
            }
            _ => Ok(()),
        }
    }

    /// Runs `work` with the original code of the vDSO. The thread is stopped.
    pub(crate) fn with_original_vdso<T>(
        &self,
        vdso: &Range<u64>,
        memory: &Memory,
        work: impl FnOnce() -> T,
    ) -> T {
        let sites = || self.sites.iter().filter(|site| vdso.contains(&site.pattern.start));
        sites().for_each(|site| site.restore(memory));
        let done = work();
        for site in sites() {
            // If this fails, its calls trap.
            let _patched = site.patch(memory);
        }
        done
    }
}

impl Process {
    /// Publishes the CPU time after a call has asked for it. Home's part, `home`, is valid until
    /// `until`.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn publish_cpu_time(
        &mut self,
        trap: &Notification,
        (home, until): (u64, Instant),
    ) -> Result<()> {
        if !self.fastpath.is_patched() || self.shares_parent_memory {
            return Ok(());
        }
        self.fastpath.count_call(trap.ip, trap.nr, &self.memory, self.reserve)?;
        let offset = self.cpu_meter.excess_over_counted().saturating_add_unsigned(home);
        self.fastpath.publish_cpu_time((offset, until), &self.memory, self.reserve)
    }
}
