//! The mappings in a deputy, outside of the reserved range, that are not its program's.

use crate::process::mailbox::{Mailbox, MailboxArea};
use crate::waker::Waker;
use tern_image::Reserve;
use tern_tracee::Result;
use tern_tracee::inject::Injection;

/// Mailboxes of threads other than the first, and mappings that keep files for the return home. The
/// mappings of live mailboxes are recorded with their threads.
#[derive(Debug, Default)]
pub(crate) struct OwnMappings {
    /// Number of mailbox areas made for threads other than the first, and those that are free
    /// again.
    area_count: u64,
    free_areas: Vec<MailboxArea>,
    /// Large mailboxes of threads that have exited, still mapped.
    orphaned: Vec<(u64, u64)>,
    /// Mappings (start, end) that only keep a file for the return home, including those inherited
    /// from the process's parent.
    placeholders: Vec<(u64, u64)>,
}

impl OwnMappings {
    /// Those that a new child inherits.
    pub(crate) fn for_child(&self) -> Self {
        Self { placeholders: self.placeholders.clone(), ..Self::default() }
    }

    /// A free area for the mailbox of another thread.
    pub(crate) fn next_area(&mut self) -> MailboxArea {
        self.free_areas.pop().unwrap_or_else(|| {
            self.area_count += 1;
            MailboxArea::secondary(self.area_count)
        })
    }

    /// Creates mailboxes in a process under injection, in areas that are free again if there are some.
    ///
    /// # Errors
    /// If the process is gone, or has no free file descriptor at the moment.
    pub(crate) fn create_mailboxes(
        &mut self,
        injection: &mut Injection,
        reserve: Reserve,
        count: usize,
        waker: &Waker,
    ) -> Result<Vec<Mailbox>> {
        let reused: Vec<MailboxArea> = self.free_areas.drain(..self.free_areas.len().min(count)).collect();
        let new: Vec<MailboxArea> = (reused.len()..count).map(|_| self.next_area()).collect();
        let mut mailboxes = Vec::with_capacity(count);
        for area in reused {
            mailboxes.push(Mailbox::create(injection, reserve, area, waker.clone())?);
        }
        mailboxes.extend(Mailbox::create_all(injection, reserve, &new, waker.clone())?);
        Ok(mailboxes)
    }

    /// A mailbox is not used any more. It stays mapped until another thread uses its area, or the
    /// reserved range is released.
    pub(crate) fn mailbox_dropped(&mut self, mailbox: &Mailbox) {
        self.orphaned.extend(mailbox.large_range());
        self.free_areas.extend(Some(mailbox.area()).filter(|area| area.is_secondary()));
    }

    pub(crate) fn add_placeholder(&mut self, range: (u64, u64)) {
        self.placeholders.push(range);
    }

    /// These addresses are not mapped any more.
    pub(crate) fn unmapped(&mut self, start: u64, end: u64) {
        self.placeholders.retain(|placeholder| placeholder.0 < start || end < placeholder.1);
    }

    pub(crate) fn placeholders(&self) -> &[(u64, u64)] {
        &self.placeholders
    }

    /// The address ranges of mailboxes that are not used any more, and of placeholders.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        let kept = self.placeholders.iter().chain(&self.orphaned).copied();
        kept.chain(self.free_areas.iter().map(|area| area.range()))
    }

    /// Forgets all of them, and returns the address ranges to unmap. The areas of live mailboxes are
    /// among these.
    pub(crate) fn take_ranges(&mut self) -> Vec<(u64, u64)> {
        let all = std::mem::take(self);
        let mut ranges = all.orphaned;
        if all.area_count > 0 {
            ranges.push(MailboxArea::secondary_range(all.area_count));
        }
        ranges.extend(all.placeholders);
        ranges
    }
}
