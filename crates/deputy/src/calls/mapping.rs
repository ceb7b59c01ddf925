//! The mapping that a deputy's mmap has made, for the guest that will map the same.

use crate::process::Process;
use crate::waker::Waker;
use std::task::Poll;
use tern_ids::HomePid;
use tern_image::content::Progress;
use tern_image::layout::{self, FileIdentifier};
use tern_image::object::{self, ObjectId};
use tern_migrate::message::Mapped;
use tern_syscall::Arg;
use tern_tracee::procfs::Mapping;
use tern_tracee::{PAGE, procfs};

/// How often a worker is asked to identify the file that one call has mapped. It is asked again
/// because another thread's call may have changed the mapping meanwhile.
const MAX_FILE_REQUESTS: u32 = 3;

/// The mapping that a finished mmap has made.
pub(super) struct DescribedMapping {
    /// The file.
    pub(super) mapped: Option<Mapped>,
    /// The mapping itself (start, length) if it is redundant.
    pub(super) surplus: Option<(u64, u64)>,
    /// The program can use such a mapping only at home.
    pub(super) home_only: bool,
}

impl Process {
    /// Opens the shared memory `id`, which the process maps.
    pub(super) fn open_object(&self, id: ObjectId) -> std::io::Result<std::fs::File> {
        let maps = procfs::maps(self.memory.pid()).map_err(std::io::Error::other)?;
        let mapping = maps.iter().find(|m| m.shared && object::id(m) == id);
        self.files.open_object(mapping.ok_or(std::io::ErrorKind::NotFound)?)
    }

    /// Whether a mapping that was made for the guest is only correct at home. A process could not
    /// leave home with it, or its writes to the mapping would be seen by others. The program may
    /// write to the mapping as soon as it changes the protection.
    fn is_home_only(&self, mapping: &Mapping) -> bool {
        // The flags are only in smaps.
        let all = procfs::smaps(self.memory.pid()).unwrap_or_default();
        all.iter().find(|m| m.start <= mapping.start && mapping.start < m.end).is_some_and(|m| {
            let moves_along = self.files.objects.contains(&object::id(m));
            layout::check(m).is_err() || layout::writes_are_visible_to_others(m) && !moves_along
        })
    }

    /// The mapping that a thread's finished mmap has made; nothing if it is another call. The mapping is
    /// redundant if another mapping keeps the file. Pending while a worker identifies the file; the
    /// worker then wakes the main loop.
    pub(super) fn describe_mapping(&mut self, tid: HomePid, waker: &Waker) -> Poll<DescribedMapping> {
        const NOTHING: Poll<DescribedMapping> =
            Poll::Ready(DescribedMapping { mapped: None, surplus: None, home_only: false });
        const AT_HOME: Poll<DescribedMapping> =
            Poll::Ready(DescribedMapping { mapped: None, surplus: None, home_only: true });
        let Some(thread) = self.threads.get_mut(&tid) else { return NOTHING };
        let (Some(current), Some(mailbox)) = (&mut thread.current, &mut thread.mailbox) else {
            return NOTHING;
        };
        let (call, ret) = (&current.request.call, mailbox.result());
        if i64::from(call.nr) != libc::SYS_mmap || current.guest_number().is_none() || ret < 0 {
            return NOTHING;
        }
        if self.files.collect_identified() == Progress::Running {
            return Poll::Pending;
        }
        let at = ret.cast_unsigned();
        let Ok(maps) = procfs::maps(self.memory.pid()) else { return NOTHING };
        let Some(mapping) = maps.iter().find(|m| m.start <= at && at < m.end && !m.is_anonymous()) else {
            tracing::warn!(pid = %self.pid, at, "a mapping made for the guest is not found here");
            return NOTHING;
        };
        // New shared anonymous memory: only this process has it yet, and shares it with its
        // children.
        const SHARED: u64 = (libc::MAP_SHARED | libc::MAP_ANONYMOUS) as u64;
        let is_new_object = matches!(call.args[3], Arg::Value(flags) if flags & SHARED == SHARED);
        if is_new_object {
            self.files.objects.insert(object::id(mapping));
        }
        let (requests, length) = (current.file_requests, call.args[1].clone());
        current.file_requests += 1;
        let is_kept = maps.iter().any(|m| {
            let is_placeholder = |(start, end): &(u64, u64)| m.start < *end && *start < m.end;
            (m.device, m.inode) == (mapping.device, mapping.inode)
                && self.own_mappings.placeholders().iter().any(is_placeholder)
        });
        // A private mapping of a file that is already mapped is as good as the other.
        let is_checked = requests > 0 || is_new_object || is_kept && !mapping.shared;
        if !is_checked && self.is_home_only(mapping) {
            return AT_HOME;
        }
        match requests {
            0 => self.files.file_mapped(mapping),
            requests if requests < MAX_FILE_REQUESTS => self.files.forget_unreadable(mapping),
            _ => {}
        }
        let identified = self.files.identify(mapping);
        if self.has_unidentified_files(waker) {
            return Poll::Pending;
        }
        let mapped = match identified {
            // Shared zeroes would be shared memory that home does not know.
            Ok(None) if mapping.shared => return AT_HOME,
            Ok(file) => file.map_or(Mapped::Zero, Mapped::File),
            Err(why) => {
                tracing::warn!(pid = %self.pid, %why, "a file mapped for the guest cannot be read");
                return AT_HOME;
            }
        };
        let Arg::Value(length) = length else { return NOTHING };
        let is_redundant = is_kept || mapped == Mapped::Zero;
        if !is_redundant {
            self.own_mappings.add_placeholder((at, at + length.next_multiple_of(PAGE)));
        }
        let surplus = is_redundant.then_some((at, length));
        Poll::Ready(DescribedMapping { mapped: Some(mapped), surplus, home_only: false })
    }
}
