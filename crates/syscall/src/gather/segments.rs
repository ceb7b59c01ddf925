//! iovec arrays.

use super::{GatherError, Gatherer};
use crate::ByteBuf;
use crate::call::Segments;
use crate::scatter::OutputBuffer;
use crate::shape::Direction;
use crate::{limits, memory};

const IOVEC: u64 = 16;

impl Gatherer<'_> {
    /// Gathers the memory of `count` iovec entries at `addr`. `None` for a bad pointer, or a count
    /// that the kernel refuses before it reads any entry, or an entry that does not lie in user space,
    /// which the kernel refuses before it transfers anything.
    pub(super) fn iovec(
        &mut self,
        direction: Direction,
        addr: u64,
        count: u64,
    ) -> Result<Option<Segments>, GatherError> {
        if count > limits::MAX_SEGMENTS {
            return Ok(None);
        }
        let Some(entries) = self.read(addr, count * IOVEC) else { return Ok(None) };
        let mut entries: Vec<(u64, u64)> =
            entries.as_chunks::<16>().0.iter().map(|entry| pair(*entry)).collect();
        if entries.iter().any(|&(_, len)| (len as i64) < 0) {
            return Err(GatherError::Errno(libc::EINVAL));
        }
        if !are_user_ranges(&entries) {
            return Ok(None);
        }
        self.trim(&mut entries);
        match direction {
            Direction::Send => Ok(self.sent(&entries)),
            Direction::Receive => Ok(self.received(entries)),
        }
    }

    /// Leaves out data already transferred, and data above the limit of one call.
    fn trim(&mut self, entries: &mut Vec<(u64, u64)>) {
        let mut skip = self.skip;
        for (base, len) in entries.iter_mut() {
            let now = skip.min(*len);
            (*base, *len) = (base.wrapping_add(now), *len - now);
            skip -= now;
            if *len > self.remaining_data {
                *len = self.remaining_data;
                self.is_cut = true;
            }
            self.remaining_data -= *len;
        }
        if self.skip > 0 {
            entries.retain(|&(_, len)| len > 0);
        }
    }

    fn sent(&mut self, entries: &[(u64, u64)]) -> Option<Segments> {
        let total: u64 = entries.iter().map(|&(_, len)| len).sum();
        let mut bytes = vec![0; usize::try_from(total).ok()?];
        let mut at = 0;
        for &(base, len) in entries {
            let end = at + usize::try_from(len).ok()?;
            if at < end && self.mem.read(base, &mut bytes[at..end]).is_err() {
                let readable = memory::read_up_to(self.mem, base, end - at).unwrap_or_default();
                bytes[at..at + readable.len()].copy_from_slice(&readable);
                at += readable.len();
                break;
            }
            at = end;
        }
        bytes.truncate(at);
        let inaccessible = total - at as u64;
        Some(Segments { lens: lengths(entries)?, bytes: ByteBuf::from(bytes), inaccessible })
    }

    fn received(&mut self, mut entries: Vec<(u64, u64)>) -> Option<Segments> {
        let lens = lengths(&entries)?;
        let mut usable = |&(base, len): &(u64, u64)| if len > 0 { self.mem.writable(base, len) } else { 0 };
        let mut inaccessible = 0;
        if self.probe
            && let Some((bad, usable)) =
                entries.iter().map(&mut usable).enumerate().find(|&(at, usable)| usable < entries[at].1)
        {
            inaccessible = entries[bad..].iter().map(|&(_, len)| len).sum::<u64>() - usable;
            entries[bad].1 = usable;
            entries.truncate(if usable > 0 { bad + 1 } else { bad });
        }
        self.output_buffers.push(OutputBuffer { spans: entries, ignores_faults: false });
        Some(Segments { lens, bytes: ByteBuf::new(), inaccessible })
    }
}

fn lengths(entries: &[(u64, u64)]) -> Option<Vec<u32>> {
    entries.iter().map(|&(_, len)| u32::try_from(len).ok()).collect()
}

/// Whether all of these entries lie in user space. As in the kernel, the data above the limit of one call
/// is left out first.
fn are_user_ranges(entries: &[(u64, u64)]) -> bool {
    let mut left = limits::MAX_TRANSFER;
    entries.iter().all(|&(base, len)| {
        let len = len.min(left);
        left -= len;
        memory::is_user_range(base, len)
    })
}

fn pair(entry: [u8; 16]) -> (u64, u64) {
    let entry = u128::from_le_bytes(entry);
    (entry as u64, (entry >> 64) as u64)
}
