//! Anonymous shared memory (MAP_SHARED without a file) and content of files that no guest maps any
//! more.
//!
//! munmap is not trapped, so the shim does not notice it. A program that maps and unmaps such memory
//! again and again would fill the node, and the descriptors of its shims.
//!
//! Nothing can reach anonymous shared memory once it is unmapped everywhere: all processes that
//! share it are on this node, and home has no open file for it. Other shared memory may be mapped
//! again by its name or descriptor, and travels with its process. The content of a file is sent
//! again if a guest maps the file again.

use super::Shim;
use crate::process::shared::{Process, State};
use std::collections::HashSet;
use std::sync::Arc;
use tern_image::FileRef;
use tern_image::content::KeptContent;
use tern_image::object::ObjectId;
use tern_migrate::message::Message;
use tern_tracee::procfs;

/// The name of anonymous shared memory in /proc/PID/maps.
const ANONYMOUS_NAME: &[u8] = b"/dev/zero (deleted)";

impl Shim {
    /// Has a worker look for memory that no guest maps. Does nothing while a guest arrives, departs
    /// or waits for a mapping, because memory may then have no mapping yet, or its content may be
    /// in transit.
    pub(super) fn find_unmapped(&mut self) {
        if !self.are_mappings_settled() {
            return;
        }
        if self.workers.is_content_check_due() {
            let content = self.cache.kept_content();
            if !content.is_empty() {
                self.workers.find_unmapped_content(content, self.members.host_pids());
            }
        }
        let files = self.members.iter().flat_map(|guest| guest.process.mapped_files.values());
        let anonymous = files.filter(|file| file.is_object && file.path == ANONYMOUS_NAME);
        let mut ids: Vec<ObjectId> = anonymous.map(|file| (file.device, file.inode)).collect();
        ids.sort_unstable();
        ids.dedup();
        let open = |id: ObjectId| Some((id, Arc::clone(self.cache.objects.get(id)?)));
        let objects: Vec<_> = ids.into_iter().filter_map(open).collect();
        if !objects.is_empty() {
            self.workers.find_unmapped(objects);
        }
    }

    /// Whether no guest arrives or departs, or waits for a mapping.
    fn are_mappings_settled(&self) -> bool {
        self.members.iter().all(|guest| {
            matches!(guest.process.state, State::Running)
                && guest.threads.values().all(|t| t.pending.as_ref().is_none_or(|p| p.file.is_none()))
        })
    }

    /// Forgets content that none of these guests maps. Does nothing if a guest departs: the guest
    /// may have announced the file before it unmapped the file, and then sends the content. Does
    /// nothing if a guest was forked meanwhile: the child may map files that its parent has
    /// unmapped.
    pub(super) fn forget_unmapped_content(&mut self, content: &KeptContent, guests: &[i32]) {
        if self.are_mappings_settled() && self.members.host_pids() == guests {
            self.workers.close(self.cache.forget_unmapped(content));
        }
    }

    /// Forgets sealed memory that no guest maps, and notifies home. Memory of a guest that has
    /// begun to depart meanwhile is kept: the guest has announced that memory, and sends it.
    pub(super) fn release_unmapped(&mut self, objects: &[ObjectId]) {
        let departing = self.members.iter().filter(|guest| !matches!(guest.process.state, State::Running));
        let announced: HashSet<ObjectId> = departing.flat_map(|guest| guest.process.objects()).collect();
        let released: Vec<ObjectId> = objects.iter().copied().filter(|id| !announced.contains(id)).collect();
        self.workers.close(released.iter().filter_map(|id| self.cache.objects.remove(*id)).collect());
        let mut holders = Vec::new();
        for guest in self.members.iter_mut() {
            let files = &mut guest.process.mapped_files;
            let before = files.len();
            files.retain(|_, file| !file.is_object || !released.contains(&(file.device, file.inode)));
            if files.len() < before {
                holders.push(guest.process.pid);
            }
        }
        for pid in holders {
            self.send_home(pid, &Message::Unmapped(released.clone()));
        }
    }
}

impl Process {
    /// The shared memory that it maps, or has mapped here.
    fn objects(&self) -> impl Iterator<Item = ObjectId> {
        self.mapped_files.values().filter(|file| file.is_object).map(|file| (file.device, file.inode))
    }

    /// Whether its shared memory contains a file of home that is on a disk.
    pub(crate) fn has_files_in_shared_memory(&self) -> bool {
        self.mapped_files.values().any(|file| file.is_object && !is_in_memory(file))
    }

    /// The shared memory whose content must be at home after a close of its descriptor. A program
    /// closes a segment as soon as it has mapped it, and writes to it afterwards. But it usually closes
    /// a file before it tells another process that the file is written, perhaps before it unmaps it.
    pub(crate) fn to_publish(&self) -> Vec<ObjectId> {
        let is_named = |file: &&FileRef| file.is_object && file.path != ANONYMOUS_NAME;
        if !self.mapped_files.values().any(|file| is_named(&file)) {
            return Vec::new();
        }
        let maps = procfs::maps(self.memory.pid()).unwrap_or_default();
        let mapped: HashSet<(u64, u64)> =
            maps.iter().filter(|m| m.shared).map(|m| (m.device, m.inode)).collect();
        let named = self.mapped_files.iter().filter(|(_, file)| is_named(file));
        let complete = named.filter(|(id, file)| !is_in_memory(file) || !mapped.contains(id));
        complete.map(|(_, file)| (file.device, file.inode)).collect()
    }
}

/// Whether an object is in memory at home too.
fn is_in_memory(object: &FileRef) -> bool {
    let names: [&[u8]; 4] = [ANONYMOUS_NAME, b"/dev/shm/", b"/memfd:", b"/SYSV"];
    names.iter().any(|name| object.path.starts_with(name))
}
