//! Calls that would access shared memory at home while its current content is away, or destroy that
//! content. Their process is fetched home first.

use crate::calls::result::rejected;
use crate::process::Process;
use crate::shim::Shim;
use crate::shm::objects::is_nameless;
use crate::shm::openers::{Opener, file_id};
use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tern_ids::HomePid;
use tern_image::object::ObjectId;
use tern_migrate::message::{CallRequest, Message};
use tern_syscall::{Arg, Arguments, Call, MessageBuffer, Shape, SocketMessage};
use tern_tracee::registers::restart;

/// The name of an object, as the kernel reports it.
fn object_name(object: &File) -> PathBuf {
    std::fs::read_link(format!("/proc/self/fd/{}", object.as_raw_fd())).unwrap_or_default()
}

/// Whether a call sends a message with control data, which may contain descriptors.
fn passes_descriptors(call: &Call) -> bool {
    let has_control = |message: &SocketMessage| matches!(message.control, MessageBuffer::Bytes(_));
    let is_send = [libc::SYS_sendmsg, libc::SYS_sendmmsg].contains(&i64::from(call.nr));
    is_send && matches!(&call.args[1], Arg::Messages(messages) if messages.iter().any(has_control))
}

/// Whether an mmap is shared. A private mapping would get home's content.
fn maps_shared(mmap: &Call) -> bool {
    matches!(mmap.args[3], Arg::Value(flags) if flags & libc::MAP_SHARED as u64 != 0)
}

impl Shim {
    /// Fetches a process home for a call that is only correct there. The guest thread repeats the
    /// call, without the calls of the prelude that have returned `prelude`.
    pub(crate) fn redirect_home(
        &mut self,
        tid: HomePid,
        pid: HomePid,
        request: &CallRequest,
        prelude: Vec<i64>,
    ) {
        let name = tern_syscall::row(request.call.nr).map_or("a call", |row| row.name);
        self.fetch_home(pid, &format!("shared memory: {name} is made at home only"));
        let mut again = rejected(request.number, 0);
        again.prelude = prelude;
        again.outcome.ret = request.restart_code.filter(|c| restart::is(*c)).unwrap_or(restart::NOINTR);
        let thread = self.process_of_thread(tid).and_then(|process| process.threads.get_mut(&tid));
        if let Some(thread) = thread {
            // A repeated request must not make the prelude again.
            thread.last_result = Some(again.clone());
        }
        self.send(tid, &Message::Result(Box::new(again)));
    }

    /// The process to fetch home first, if a call accesses, at home, memory whose current content
    /// is away. This is the calling process, or another sharer if the caller has only inherited the
    /// descriptor.
    ///
    /// A sharer may map the object again, shared: its node has the content. Whether a close counts is
    /// said by the guest's node, which knows what is still mapped.
    pub(crate) fn sharer_to_fetch(&self, tid: HomePid, request: &CallRequest) -> Option<HomePid> {
        if self.shared_memory.is_empty() {
            return None;
        }
        let process = self.find_process(tid)?;
        if passes_descriptors(&request.call) && self.has_object_with_descriptor(process) {
            return Some(process.pid);
        }
        let accessed = self.accessed_object(process, &request.call)?;
        let shares = |process: &&Process| process.is_away() && process.files.uses_object(accessed);
        match i64::from(request.call.nr) {
            libc::SYS_mmap if shares(&process) && maps_shared(&request.call) => None,
            libc::SYS_close => request.to_publish.contains(&accessed).then_some(process.pid),
            _ => {
                let sharer = Some(process).filter(shares).or_else(|| self.processes.values().find(shares));
                sharer.map(|process| process.pid)
            }
        }
    }

    /// Whether a process away shares memory of which it may have a descriptor. Another process that
    /// gets the descriptor could map the memory at home.
    fn has_object_with_descriptor(&self, process: &Process) -> bool {
        let objects = process.files.objects.iter().filter_map(|id| self.shared_memory.objects().get(*id));
        process.is_away()
            && objects.map(|file| object_name(file)).any(|name| !is_nameless(name.as_os_str().as_bytes()))
    }

    /// The object that a call of this process reads, writes, maps or closes by a descriptor.
    pub(crate) fn accessed_object(&self, process: &Process, call: &Call) -> Option<ObjectId> {
        const ACCESSING_CALLS: [i64; 22] = [
            libc::SYS_close,
            libc::SYS_read,
            libc::SYS_write,
            libc::SYS_pread64,
            libc::SYS_pwrite64,
            libc::SYS_readv,
            libc::SYS_writev,
            libc::SYS_preadv,
            libc::SYS_pwritev,
            libc::SYS_preadv2,
            libc::SYS_pwritev2,
            libc::SYS_ftruncate,
            libc::SYS_fallocate,
            libc::SYS_fsync,
            libc::SYS_fdatasync,
            libc::SYS_sync_file_range,
            libc::SYS_sendfile,
            libc::SYS_copy_file_range,
            libc::SYS_splice,
            libc::SYS_mmap,
            libc::SYS_fadvise64,
            libc::SYS_vmsplice,
        ];
        // A seal would have to be set on the copy of the guest's node.
        let seals = i64::from(call.nr) == libc::SYS_fcntl
            && call.args[1] == Arg::Value(libc::F_ADD_SEALS.cast_unsigned().into());
        if self.shared_memory.is_empty() || !seals && !ACCESSING_CALLS.contains(&i64::from(call.nr)) {
            return None;
        }
        let Some(Arguments::Fixed(shapes)) = tern_syscall::row(call.nr).map(|row| row.arguments) else {
            return None;
        };
        let descriptors = call.args.iter().zip(shapes).filter(|(_, shape)| matches!(shape, Shape::Fd));
        descriptors.into_iter().find_map(|(arg, _)| {
            let Arg::Value(fd) = arg else { return None };
            // Through the thread by which memory is read, since the first thread may have exited.
            let link = format!("/proc/{}/fd/{}", process.memory.pid(), *fd as i32);
            let inode = file_id(Path::new(&link))?;
            self.shared_memory.object_at(inode)
        })
    }

    /// The calling process, if it must be fetched home first: by this call it ends or executes a
    /// program, and it is the last process away that has the content of some shared memory. That
    /// content would be lost with its guest.
    pub(crate) fn last_holder_to_fetch(&mut self, tid: HomePid, request: &CallRequest) -> Option<HomePid> {
        const ALL: [i64; 3] = [libc::SYS_exit_group, libc::SYS_execve, libc::SYS_execveat];
        let nr = i64::from(request.call.nr);
        if self.shared_memory.is_empty() || !ALL.contains(&nr) && nr != libc::SYS_exit {
            return None;
        }
        let process = self.find_process(tid)?;
        if process.in_parent_memory || nr == libc::SYS_exit && process.live_threads().count() > 1 {
            return None;
        }
        // A process that is already in such a call does not count: its content is lost as well.
        let ends = |process: &Process| {
            let mut calls = process.threads.values().filter_map(|thread| thread.current.as_ref());
            calls.any(|current| ALL.contains(&i64::from(current.request.call.nr)))
        };
        let others = |id: &ObjectId| {
            let has = |process: &&Process| {
                process.is_away()
                    && !process.in_parent_memory
                    && process.files.objects.contains(id)
                    && !ends(process)
            };
            self.processes.values().filter(has).any(|other| other.pid != process.pid)
        };
        let exits = nr == libc::SYS_exit || nr == libc::SYS_exit_group;
        let pid = process.pid;
        let alone: Vec<ObjectId> = process.files.objects.iter().filter(|id| !others(id)).copied().collect();
        alone.into_iter().any(|id| !self.is_unreachable(id, pid, exits)).then_some(pid)
    }

    /// Whether no process can reach an object once this process does not map it, or has exited.
    /// This holds for anonymous memory, and at an exit also for an unlinked file that no other
    /// process has open (a Java machine unlinks its own before it ends).
    fn is_unreachable(&mut self, id: ObjectId, pid: HomePid, exits: bool) -> bool {
        let Some(file) = self.shared_memory.objects().get(id) else { return false };
        let name = object_name(file);
        let name = name.as_os_str().as_bytes();
        if name.starts_with(b"/dev/zero") {
            return true;
        }
        let Ok(meta) = file.metadata() else { return false };
        let unnamed = meta.nlink() == 0 && !name.starts_with(b"/SYSV");
        let (this, itself) = (HashSet::from([(meta.dev(), meta.ino())]), BTreeSet::from([pid.0]));
        exits && unnamed && self.shared_memory.find_opener(this, itself) == Opener::None
    }
}
