//! The CPU time of a process, told without a stop.

use super::{Hot, stub};
use crate::member::Process;
use std::ops::Range;
use std::time::Instant;
use tern_image::Reserve;
use tern_tracee::listener::Notification;
use tern_tracee::{Memory, Result};

/// What makes the CPU time of the process of what its kernel here has counted.
#[derive(Debug)]
pub(super) struct Clock {
    /// Seconds, and nanoseconds below a second.
    pub(super) more: (i64, i64),
    pub(super) until: Instant,
    /// It stands in the table.
    pub(super) named: bool,
}

impl Clock {
    /// As they stand in the table.
    pub(super) fn bytes(&self) -> [u8; 16] {
        let (mut bytes, (seconds, rest)) = ([0; 16], self.more);
        bytes[..8].copy_from_slice(&seconds.to_le_bytes());
        bytes[8..].copy_from_slice(&rest.to_le_bytes());
        bytes
    }
}

impl Hot {
    /// From now on the stub tells the CPU time of the process: what this node's kernel has counted and so many nanoseconds more. The
    /// thread is in a trap.
    pub(crate) fn tell_time(
        &mut self,
        (more, until): (i64, Instant),
        memory: &Memory,
        reserve: Reserve,
    ) -> Result<()> {
        const SECOND: i64 = 1_000_000_000;
        let clock = Clock { more: (more.div_euclid(SECOND), more.rem_euclid(SECOND)), until, named: true };
        let table = reserve.start + stub::TABLE;
        memory.write(table + stub::MORE as u64, &clock.bytes())?;
        memory.write(table + stub::CLOCK as u64, &[1])?;
        self.clock = Some(clock);
        Ok(())
    }

    /// Home's part of the CPU time goes on.
    pub(crate) fn forget_time(&mut self, memory: &Memory, reserve: Reserve) -> Result<()> {
        match self.clock.take() {
            Some(clock) if clock.named => {
                memory.write(reserve.start + stub::TABLE + stub::CLOCK as u64, &[0])
            }
            _ => Ok(()),
        }
    }

    /// Does something with the vDSO as it was. The thread is stopped.
    pub(crate) fn with_vdso<T>(&self, vdso: &Range<u64>, memory: &Memory, work: impl FnOnce() -> T) -> T {
        let sites = || self.sites.iter().filter(|site| vdso.contains(&site.shape.start));
        sites().for_each(|site| site.restore(memory));
        let done = work();
        for site in sites() {
            // If not, its calls stop, as before.
            let _placed = site.place(memory);
        }
        done
    }
}

impl Process {
    /// It has been told its CPU time, of which home's part is `home`, known until then: its stub may tell it that as well.
    ///
    /// # Errors
    /// If it is gone.
    pub fn told_time(&mut self, trap: &Notification, (home, until): (u64, Instant)) -> Result<()> {
        if !self.hot.is_on() || self.borrowed {
            return Ok(());
        }
        self.hot.made(trap.ip, trap.nr, &self.memory, self.reserve)?;
        let more = self.meter.more_than_counted().saturating_add_unsigned(home);
        self.hot.tell_time((more, until), &self.memory, self.reserve)
    }
}
