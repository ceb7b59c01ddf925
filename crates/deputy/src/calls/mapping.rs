//! The mapping that a deputy's mmap has made, for the guest that will map the same.

use crate::calls::current::CurrentCall;
use crate::process::Process;
use crate::shim::Shim;
use crate::shm::mapped_away::Pieces;
use crate::waker::Waker;
use std::task::Poll;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_image::content::Progress;
use tern_image::layout::{self, FileIdentifier};
use tern_image::object::{self, ObjectId};
use tern_migrate::message::Mapped;
use tern_syscall::Arg;
use tern_tracee::procfs::Mapping;
use tern_tracee::{PAGE, procfs};

/// How long a file may take to become shared memory. Its process then maps it at home.
const MAX_SHARING: Duration = Duration::from_secs(10);

/// How often a worker is asked to identify the file that one call has mapped. It is asked again
/// because another thread's call may have changed the mapping meanwhile.
const MAX_FILE_REQUESTS: u32 = 3;

/// The mapping that a finished mmap has made.
#[derive(Debug)]
pub(super) struct DescribedMapping {
    /// The file.
    pub(super) mapped: Option<Mapped>,
    /// Since when the file has been becoming shared memory, if it is.
    shared_since: Option<Instant>,
    /// The mapping itself (start, length) if it is redundant.
    pub(super) surplus: Option<(u64, u64)>,
    /// The program can use such a mapping only at home.
    pub(super) home_only: bool,
}

/// How a guest can have a mapping.
enum Sharing {
    /// Its node maps a copy of the file, or shared memory that it has already.
    None,
    /// The file becomes shared memory of the process.
    New,
    /// Only at home.
    AtHome,
}

impl Shim {
    /// The mapping that a thread's finished mmap has made; nothing if it is another call. Pending while
    /// a worker identifies or reads the file, or while a file that another thread has mapped becomes
    /// shared memory. The main loop is woken then.
    pub(super) fn finished_mapping(&mut self, tid: HomePid) -> Poll<DescribedMapping> {
        let (waker, shares_files) = (self.waker.clone(), self.start.shares_files);
        let described = match self.current_call(tid).and_then(|current| current.mapping.take()) {
            Some(described) => Poll::Ready(described),
            None => match self.process_of_thread(tid) {
                Some(process) => process.describe_mapping(tid, &waker, shares_files),
                None => Poll::Pending,
            },
        };
        let Poll::Ready(mut described) = described else { return Poll::Pending };
        let object = match &described.mapped {
            Some(Mapped::File(file)) if file.is_object => (file.device, file.inode),
            _ => return Poll::Ready(described),
        };
        if described.shared_since.is_some() || !self.is_sharing_a_file() {
            if described.shared_since.is_none() && self.shares(tid, object) {
                // Two files may have the same device and inode in the list of mappings.
                described.home_only |= !self.maps_object(tid, object);
                return Poll::Ready(described);
            }
            let since = *described.shared_since.get_or_insert_with(Instant::now);
            let shared = match self.share_mapped_file(tid, object, since) {
                Poll::Pending if since.elapsed() > MAX_SHARING => {
                    Poll::Ready(Err("its file system does not answer".into()))
                }
                shared => shared,
            };
            if let Poll::Ready(content) = shared {
                return Poll::Ready(self.end_sharing(tid, described, content));
            }
        }
        if let Some(current) = self.current_call(tid) {
            current.mapping = Some(described);
        }
        Poll::Pending
    }

    /// Whether a file that a thread has mapped is becoming shared memory. One at a time does.
    fn is_sharing_a_file(&self) -> bool {
        let threads = self.processes.values().flat_map(|process| process.threads.values());
        let mut mappings = threads.filter_map(|thread| thread.current.as_ref()?.mapping.as_ref());
        mappings.any(|mapping| mapping.shared_since.is_some())
    }

    /// Whether a thread's process shares this object, so that its guest's node has the content.
    fn shares(&self, tid: HomePid, id: ObjectId) -> bool {
        // Anonymous memory that was made just now is not open yet.
        self.find_process(tid).is_some_and(|process| process.files.objects.contains(&id))
            && self.shared_memory.contains(id)
    }

    /// Whether the descriptor that a thread's mmap maps is of this object.
    fn maps_object(&self, tid: HomePid, id: ObjectId) -> bool {
        let process = self.find_process(tid);
        let current = process.and_then(|process| process.threads.get(&tid)?.current.as_ref());
        let object = process
            .zip(current)
            .and_then(|(process, current)| self.accessed_object(process, &current.request.call));
        object == Some(id)
    }

    /// A file that a thread has mapped has become shared memory with this content, or it is to be mapped
    /// at home.
    fn end_sharing(
        &mut self,
        tid: HomePid,
        mut described: DescribedMapping,
        content: Result<Pieces, String>,
    ) -> DescribedMapping {
        if let Some(Mapped::File(file)) = described.mapped.take() {
            let id = (file.device, file.inode);
            if let Some(process) = self.process_of_thread(tid) {
                process.files.new_objects.remove(&id);
                if content.is_ok() {
                    process.files.objects.insert(id);
                }
            }
            match content {
                Ok(content) => {
                    described.mapped = Some(Mapped::Shared(file, content));
                }
                Err(why) => {
                    tracing::info!(%tid, %why, "a file that it maps cannot be shared away");
                    self.close_unused_objects();
                    described.home_only = true;
                }
            }
        }
        // The calls of other threads may wait for this.
        self.waker.wake();
        described
    }

    fn current_call(&mut self, tid: HomePid) -> Option<&mut CurrentCall> {
        self.process_of_thread(tid)?.threads.get_mut(&tid)?.current.as_mut()
    }
}

impl Process {
    /// How the guest can have a mapping that was made for it. The program may write to the mapping as
    /// soon as it changes the protection.
    fn sharing_of(&self, mapping: &Mapping) -> Sharing {
        // The flags are only in smaps.
        let all = procfs::smaps(self.memory.pid()).unwrap_or_default();
        let Some(m) = all.iter().find(|m| m.start <= mapping.start && mapping.start < m.end) else {
            return Sharing::None;
        };
        let id = object::id(m);
        if layout::check(m).is_err() {
            Sharing::AtHome
        } else if !layout::writes_are_visible_to_others(m) || self.files.objects.contains(&id) {
            Sharing::None
        } else if self.in_parent_memory || all.iter().any(|o| object::id(o) == id && o.start != m.start) {
            // The guest's other mapping of the file has the content of another moment.
            Sharing::AtHome
        } else {
            Sharing::New
        }
    }

    /// The mapping that a thread's finished mmap has made; nothing if it is another call. The mapping is
    /// redundant if another mapping keeps the file. Pending while a worker identifies the file; the
    /// worker then wakes the main loop. `shares_files` is whether a file can become shared memory.
    fn describe_mapping(
        &mut self,
        tid: HomePid,
        waker: &Waker,
        shares_files: bool,
    ) -> Poll<DescribedMapping> {
        const NOTHING: Poll<DescribedMapping> = Poll::Ready(DescribedMapping {
            mapped: None,
            shared_since: None,
            surplus: None,
            home_only: false,
        });
        const AT_HOME: Poll<DescribedMapping> = Poll::Ready(DescribedMapping {
            mapped: None,
            shared_since: None,
            surplus: None,
            home_only: true,
        });
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
        match if is_checked { Sharing::None } else { self.sharing_of(mapping) } {
            Sharing::None => {}
            Sharing::New if shares_files => {
                // Its size may have changed since it was an object.
                self.files.forget_objects();
                self.files.new_objects.insert(object::id(mapping));
            }
            Sharing::New | Sharing::AtHome => return AT_HOME,
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
        Poll::Ready(DescribedMapping { mapped: Some(mapped), shared_since: None, surplus, home_only: false })
    }
}
