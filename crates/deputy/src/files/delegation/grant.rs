//! Which files of a process are delegated after a call.

use super::{
    Delegable, Delegations, FileVersion, MAX_NODE_CLOCK_DIFFERENCE, MIN_LOCAL_OPEN_SIZE, ReadDelegation,
    TIMESTAMP_GRANULARITY, has_room,
};
use crate::calls::current::CurrentCall;
use crate::files::attributes::file_attributes;
use crate::files::connections::{ConnectionOffers, StayReason};
use crate::files::shared_fs::SharedFilesystems;
use crate::files::timed_worker::TimedWorker;
use crate::process::Process;
use crate::shim::Shim;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, fstat, makedev, open, statx};
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tern_control::shim::net_socket;
use tern_ids::{HomePid, NodeId};
use tern_image::node_file::{MountKind, allows_direct};
use tern_migrate::message::{CallResult, FileDelegation, FileNotice, Message};
use tern_migrate::prefetch::OpenPrefetch;
use tern_syscall::Outcome;
use tern_tracee::procfs;

impl Shim {
    /// Ends the offers of connections of processes that have come home, and the watches of their
    /// descriptors. Until then tern-net has a descriptor of each connection, so that the process
    /// cannot close it.
    pub(crate) fn end_offers_at_home(&mut self) {
        let at_home = self.processes.values_mut().filter(|process| process.is_at_home());
        at_home.for_each(|process| process.delegations.end_offers());
    }

    /// Reports to the guests the offers that tern-net has ended.
    pub(crate) fn report_ended_offers(&mut self) {
        let ended = |process: &mut Process| {
            let ended = process.delegations.connections.take_ended().into_iter();
            ended.map(|fd| (process.pid, Message::ConnectionLost(fd))).collect::<Vec<_>>()
        };
        let messages: Vec<(HomePid, Message)> = self.processes.values_mut().flat_map(ended).collect();
        messages.iter().for_each(|(pid, message)| self.send(*pid, message));
    }

    /// Adds file notices to the result of this call. An error of a delayed write is returned by the
    /// next call that reports such errors, at the latest by close.
    pub(crate) fn add_file_notices(&mut self, pid: HomePid, current: &CurrentCall, result: &mut CallResult) {
        // Shared memory is not delegated: a process that returns overwrites it at home with its own
        // content, and delayed writes would be lost.
        let Self { processes, shared_filesystems, shared_memory, comparisons, peers, start, .. } = self;
        let is_shared = |file: (u64, u64)| shared_memory.object_at(file).is_some();
        let Some(process) = processes.get_mut(&pid) else { return };
        process.delegations.set_epoch(process.epoch);
        let (nr, args) = (i64::from(current.request.call.nr), current.request.call.values());
        if let Some(error) = process.delegations.take_write_error(nr, &args, result.outcome.ret) {
            result.outcome.ret = error;
        }
        result.notices =
            process.file_notices(current, &result.outcome, is_shared, shared_filesystems, comparisons);
        let Some(node) = peers.get_mut(process.peer).map(|peer| peer.node) else { return };
        let offer = process.offer_connection(current, result.outcome.ret, node, &start.run_dir, comparisons);
        result.notices.extend(offer.into_iter().flatten());
    }
}

impl Process {
    fn file_notices(
        &mut self,
        current: &CurrentCall,
        outcome: &Outcome,
        is_shared: impl Fn((u64, u64)) -> bool,
        shared_filesystems: &mut SharedFilesystems,
        comparisons: &mut TimedWorker,
    ) -> Vec<(i32, FileNotice)> {
        let (nr, args) = (i64::from(current.request.call.nr), current.request.call.values());
        self.delegations.forget_descriptors(nr, &args);
        let began_at = SystemTime::now().checked_sub(current.posted_at.elapsed()).unwrap_or(UNIX_EPOCH);
        let read = (nr == libc::SYS_pread64).then_some(args[0] as i32);
        let mut notices = self.delegations.revalidate(read, began_at);
        if let Some((fd, is_new)) = self.delegations.candidate(nr, &args, outcome.ret)
            && self.has_exclusive_files(comparisons)
            && (is_new || self.delegations.is_exclusive(self.memory.pid(), fd, comparisons))
            && let Some(Delegable { file, location, is_elsewhere, attributes }) =
                self.try_delegate(fd, is_new, shared_filesystems)
            && !is_shared(file.id)
        {
            let elsewhere = (!file.is_home_local && location.is_none()).then_some(file.id);
            notices.extend(self.delegations.grant(fd, &file, (is_elsewhere, elsewhere)));
            notices.push((fd, FileNotice::Delegated(file)));
            notices.extend(location.map(|location| (fd, FileNotice::LocalFile(location))));
            let prefetch = attributes.map(|attributes| OpenPrefetch { attributes, content: None });
            notices.extend(prefetch.map(|prefetch| (fd, FileNotice::Prefetched(Box::new(prefetch)))));
        }
        notices.extend(self.delegations.recall_without_room(self.memory.pid()));
        notices.extend(self.delegations.offer_written_location(self.memory.pid()));
        notices.extend(self.delegations.offer_shared(self.memory.pid(), shared_filesystems));
        notices
    }

    /// Offers the connection that this call has used, if it is worth that and qualifies.
    fn offer_connection(
        &mut self,
        current: &CurrentCall,
        ret: i64,
        node: NodeId,
        run_dir: &Path,
        comparisons: &mut TimedWorker,
    ) -> Option<Vec<(i32, FileNotice)>> {
        let (nr, args) = (i64::from(current.request.call.nr), current.request.call.values());
        let fd = self.delegations.connections.candidate(nr, &args, ret)?;
        match self.offer_if_movable(fd, node, run_dir, comparisons) {
            Ok(notices) => Some(notices),
            Err(reason) => {
                tracing::debug!(fd, ?reason, "a connection stays at home");
                self.delegations.connections.keep_home(fd, reason);
                None
            }
        }
    }

    /// Offers a connection, after the epoll sets that have it as a member.
    fn offer_if_movable(
        &mut self,
        fd: i32,
        node: NodeId,
        run_dir: &Path,
        comparisons: &mut TimedWorker,
    ) -> Result<Vec<(i32, FileNotice)>, StayReason> {
        let pid = self.memory.pid();
        // Otherwise the comparisons below would be in vain.
        if !net_socket(run_dir).exists() {
            return Err(StayReason::NoTernNet);
        }
        let sets = ConnectionOffers::epoll_sets_of_movable(pid, fd)?;
        let can_be_examined = rustix::process::geteuid().is_root() && !self.in_parent_memory;
        if !can_be_examined {
            return Err(StayReason::Unknowable);
        }
        let fds = std::iter::once(fd).chain(sets.iter().map(|(set, _)| *set));
        let is_exclusive = match self.has_own_descriptors(comparisons) {
            Some(true) => Delegations::are_exclusive(pid, fds, comparisons),
            other => other,
        };
        match is_exclusive {
            Some(true) => {}
            Some(false) => return Err(StayReason::Shared),
            None => return Err(StayReason::Unexamined),
        }
        let token = self.delegations.connections.offer((pid, fd), node, run_dir)?;
        let mut notices: Vec<(i32, FileNotice)> =
            sets.into_iter().map(|(set, members)| (set, FileNotice::EpollSet(members))).collect();
        notices.push((fd, FileNotice::Connection(token)));
        Ok(notices)
    }

    /// Whether the process's files are accessed only by its own calls, one at a time. A process
    /// that shares memory may learn through that memory, without any call, that a file has changed.
    fn has_exclusive_files(&mut self, comparisons: &mut TimedWorker) -> bool {
        self.threads.len() == 1
            && self.files.objects.is_empty()
            && !self.in_parent_memory
            && self.has_own_descriptors(comparisons) == Some(true)
    }

    /// Whether no other process uses the process's table of descriptors. Unknown if the comparison with
    /// all processes has not ended in time.
    fn has_own_descriptors(&mut self, comparisons: &mut TimedWorker) -> Option<bool> {
        // Sharing of descriptors that began before this epoch is detected here; the guest detects
        // sharing that begins later.
        let (pid, known) = (self.memory.pid(), &mut self.delegations.has_own_descriptors);
        if known.is_none() {
            let shares = comparisons.run(move || tern_image::sharing::shares_descriptors(pid));
            *known = shares.map(|shares| !shares);
        }
        // If the comparison has not ended, it is made again for the next file.
        *known
    }

    /// Describes an open file for its delegation, with its location if it is in MFS; none if it
    /// must not be delegated. `is_new`: the file has been opened just now.
    fn try_delegate(
        &mut self,
        fd: i32,
        is_new: bool,
        shared_filesystems: &mut SharedFilesystems,
    ) -> Option<Delegable> {
        const SPECIAL: u64 = (libc::O_APPEND | libc::O_DIRECT | libc::O_SYNC | libc::O_PATH) as u64;
        let pid = self.memory.pid();
        let path = format!("/proc/{pid}/fd/{fd}");
        let file = Arc::new(open(&*path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?);
        // Without DONT_SYNC this would ask a file server.
        let identity = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let found =
            statx(&file, "", identity, StatxFlags::TYPE | StatxFlags::INO | StatxFlags::MNT_ID).ok()?;
        if u32::from(found.stx_mode) & libc::S_IFMT != libc::S_IFREG {
            return None;
        }
        let device = makedev(found.stx_dev_major, found.stx_dev_minor);
        let id = (device, found.stx_ino);
        let is_shared = shared_filesystems.locate(pid, fd, device).is_some();
        let elsewhere = is_shared
            || match self.delegations.trees.kind(pid, device, found.stx_mnt_id) {
                MountKind::Mfs => true,
                MountKind::Local => false,
                MountKind::Other => return None,
            };
        let (offset, flags) = procfs::descriptor_state(pid, fd).ok()?;
        let access = (flags & libc::O_ACCMODE as u64) as i32;
        // O_SYNC includes O_DSYNC.
        if flags & SPECIAL != 0 {
            return None;
        }
        let (reads, writes) = (access != libc::O_WRONLY, access != libc::O_RDONLY);
        // A write beyond RLIMIT_FSIZE must fail at once; and mapped memory changes without calls.
        let bound =
            || tern_tracee::limit::get(pid, libc::RLIMIT_FSIZE).map_or(true, |(soft, _)| soft != u64::MAX);
        let memory = || {
            std::fs::read_link(&path)
                .map_or(true, |to| to.starts_with("/dev/shm") || to.starts_with("/memfd:"))
        };
        if !elsewhere && memory() || writes && (bound() || !elsewhere && !has_room(&file)) {
            return None;
        }
        let shows_attributes = is_new && !is_shared && self.shares_user_namespace();
        let Delegations { trees, worker, .. } = &mut self.delegations;
        let opened = Arc::clone(&file);
        let examine = move || {
            let attributes = shows_attributes.then(|| file_attributes(&opened)).flatten();
            fstat(&*opened).ok().map(|stat| (stat, attributes))
        };
        let (stat, attributes) = if elsewhere { worker.run(examine)?? } else { examine()? };
        // Two kinds of files are worth opening on their node at once: long files, and files opened
        // for reading and writing, because no content of these is prefetched.
        let worth_opening =
            reads && writes || u64::try_from(stat.st_size).is_ok_and(|size| size >= MIN_LOCAL_OPEN_SIZE);
        let location = if elsewhere && worth_opening && !is_shared {
            trees.locate_fd(pid, fd, id, |link| worker.run(move || allows_direct(&link)))
        } else {
            None
        };
        let attributes = attributes.filter(|_| location.is_none());
        if !writes {
            let granularity = if elsewhere {
                TIMESTAMP_GRANULARITY + MAX_NODE_CLOCK_DIFFERENCE
            } else {
                TIMESTAMP_GRANULARITY
            };
            let version = FileVersion::of(&stat);
            let observed_since = SystemTime::now();
            let watched = ReadDelegation {
                file,
                version,
                granularity,
                device,
                is_shared,
                may_wait: elsewhere,
                observed_since,
                location_sent: false,
            };
            self.delegations.read_delegations.insert(fd, watched);
        }
        let file = FileDelegation {
            id,
            offset,
            can_read: reads,
            can_write: writes,
            is_home_local: !elsewhere && is_new,
        };
        Some(Delegable { file, location, is_elsewhere: elsewhere, attributes })
    }

    /// Whether uids and gids mean the same for the process as for the shim.
    pub(crate) fn shares_user_namespace(&mut self) -> bool {
        let users = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/user")).ok();
        let pid = self.memory.pid().to_string();
        // The answer holds for this epoch: a process changes its user namespace only at home.
        *self
            .delegations
            .in_same_user_ns
            .get_or_insert_with(|| users(&pid).is_some_and(|own| users("self") == Some(own)))
    }
}
