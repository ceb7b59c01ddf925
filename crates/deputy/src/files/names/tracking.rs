//! Finds the calls that use or change directories, and notifies the guests that have these cached.

use super::delegated::DelegatedDir;
use super::scanner::{DirListing, ScanError, ScanReply, ScanRequest};
use super::watcher::{DirEvent, Watcher};
use super::{MAX_PENDING_SCANS, MAX_WATCH_ENTRIES, Notice};
use crate::calls::current::CurrentCall;
use crate::links::peers::PeerId;
use crate::shim::Shim;
use std::collections::BTreeSet;
use tern_ids::HomePid;
use tern_migrate::message::Message;
use tern_migrate::names::{Listing, NameNotice, PathCall, PathQuery, split_last};
use tern_migrate::prefetch::stat_mode;
use tern_syscall::{Arg, ByteBuf, Call, Outcome};

/// Whether paths may resolve differently after this call, or become inaccessible; and whether that
/// applies only to the calling thread.
fn may_change_resolution(nr: u32) -> (bool, bool) {
    let for_all = [
        libc::SYS_chdir,
        libc::SYS_fchdir,
        libc::SYS_chroot,
        libc::SYS_pivot_root,
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_move_mount,
        libc::SYS_mount_setattr,
    ];
    let by_itself = [
        libc::SYS_setns,
        libc::SYS_unshare,
        libc::SYS_setuid,
        libc::SYS_setgid,
        libc::SYS_setreuid,
        libc::SYS_setregid,
        libc::SYS_setresuid,
        libc::SYS_setresgid,
        libc::SYS_setfsuid,
        libc::SYS_setfsgid,
        libc::SYS_setgroups,
        libc::SYS_capset,
    ]
    .contains(&i64::from(nr));
    (by_itself || for_all.contains(&i64::from(nr)), by_itself)
}

/// Whether a call gives a file a second name. Watches of the first name's directory do not report
/// changes made through the second name.
fn creates_hard_link(nr: u32) -> bool {
    [libc::SYS_link, libc::SYS_linkat].contains(&i64::from(nr))
}

/// Whether a call creates a process that shares its working directory with its parent.
fn shares_cwd(call: &Call) -> bool {
    let flags = match i64::from(call.nr) {
        libc::SYS_clone => call.values()[0],
        _ => 0,
    };
    flags & libc::CLONE_FS as u64 != 0 && flags & libc::CLONE_THREAD as u64 == 0
}

/// The path of the directory in which a call has looked up a name, if that was permitted, or of the
/// directory that it has statted; and whether a guest that has this directory cached would have
/// answered the call.
pub(super) fn directory_used(call: &Call, outcome: &Outcome) -> Option<(Vec<u8>, bool)> {
    let ret = outcome.ret;
    let args = call.values();
    let on = PathCall::classify(call.nr, &args)?;
    let no_link = ret == -i64::from(libc::EINVAL) && matches!(on.query, PathQuery::ReadLink(_));
    let Arg::Bytes(path) = &call.args[on.path] else { return None };
    let path = path.strip_suffix(b"\0")?;
    if !(ret >= 0 || ret == -i64::from(libc::ENOENT) || no_link) || !on.is_anchored(&args, path) {
        return None;
    }
    let (directory, _) = split_last(path)?;
    let is_stat = ret == 0 && matches!(on.query, PathQuery::Stat(..) | PathQuery::Statx(_));
    let stat = outcome.outs.first().filter(|_| is_stat);
    if stat
        .and_then(|stat| stat_mode(stat.as_slice()))
        .is_some_and(|mode| u32::from(mode) & libc::S_IFMT == libc::S_IFDIR)
    {
        return Some(([path, b"/"].concat(), true));
    }
    Some((directory.to_vec(), on.query != PathQuery::Open || ret < 0))
}

impl Shim {
    /// Invalidates the cached names of a process, before and after a call that may change how its
    /// paths resolve. If the call creates a hard link, or creates the first process that shares its
    /// parent's working directory, the names of all processes are invalidated.
    pub(crate) fn invalidate_if_resolution_changes(&mut self, pid: HomePid, call: &Call) {
        let (elsewhere, by_itself) = may_change_resolution(call.nr);
        if let Some(process) = self.processes.get_mut(&pid).filter(|_| by_itself) {
            process.names.is_disabled |= process.threads.len() > 1;
        }
        let of_all = creates_hard_link(call.nr);
        if shares_cwd(call) && !std::mem::replace(&mut self.names.is_disabled, true) || of_all {
            self.invalidate_all_names();
        } else if elsewhere {
            self.invalidate_names(pid);
        }
    }

    /// Invalidates all names cached for a process.
    fn invalidate_names(&mut self, pid: HomePid) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let peer = process.peer;
        if process.names.forget() && process.is_away() {
            self.send_directly(peer, pid, &Message::Names(NameNotice::InvalidateAll));
        }
    }

    /// Invalidates all names cached for all processes.
    fn invalidate_all_names(&mut self) {
        let all: Vec<HomePid> = self.processes.keys().copied().collect();
        all.into_iter().for_each(|pid| self.invalidate_names(pid));
    }

    /// A process has made a call: sends the listing of the directory that the call used, or has
    /// that directory scanned.
    pub(crate) fn note_lookup(
        &mut self,
        pid: HomePid,
        tid: HomePid,
        current: &CurrentCall,
        outcome: &Outcome,
    ) {
        self.invalidate_if_resolution_changes(pid, &current.request.call);
        let Some((path, counts)) = directory_used(&current.request.call, outcome) else { return };
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let (epoch, uid, same_users) = (process.epoch, process.uid, process.shares_user_namespace());
        if std::mem::replace(&mut process.names.epoch, epoch) != epoch {
            process.names.forget();
        }
        // While another thread changes how paths resolve, it is unknown how this call's path
        // resolved.
        let changes_resolution = |call: &Call| may_change_resolution(call.nr).0;
        let mut calls = process.threads.values().filter_map(|thread| thread.current.as_ref());
        if self.names.is_disabled
            || process.names.is_disabled
            || !same_users
            || calls.any(|c| changes_resolution(&c.request.call))
        {
            return;
        }
        if !process.names.can_add(&path) {
            return self.invalidate_names(pid);
        }
        let Self { processes, names, waker, .. } = self;
        let Some(known) = processes.get_mut(&pid).map(|process| &mut process.names) else { return };
        let generation = known.generation;
        let directory = known.directories.entry(path.clone()).or_default();
        if counts {
            directory.record_lookup();
        }
        // The lookup began after the scan, so it proves that the process may still traverse the
        // path.
        if directory.can_be_sent(current.posted_at) {
            return self.delegate_names(pid, &path);
        }
        if counts
            && names.pending_scans < MAX_PENDING_SCANS
            && let Some(max_names) = directory.names_to_scan()
        {
            let changes = names.change_count;
            directory.is_being_scanned = names.request_scan(
                ScanRequest { pid, tid, directory: path, max_names, generation, changes },
                waker,
                uid,
            );
        }
    }

    fn delegate_names(&mut self, pid: HomePid, path: &[u8]) {
        // Changes so far are sent with the listing, later ones after it.
        self.send_name_changes();
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let peer = process.peer;
        let listing = process.names.directories.get_mut(path).and_then(|directory| directory.listing.take());
        let Some((DirListing { attributes, is_direct, entries, at, watched }, changed)) = listing else {
            return;
        };
        let here = ByteBuf::from(path.to_vec());
        let age_us = u32::try_from(at.elapsed().as_micros()).unwrap_or(u32::MAX);
        let count = entries.len();
        tracing::debug!(%pid, directory = %String::from_utf8_lossy(path), count, "sending a directory listing");
        let listing = Listing { directory: here.clone(), attributes, is_direct, entries, age_us };
        let listed = NameNotice::Listed(Box::new(listing));
        let mut sent = self.send_directly(peer, pid, &Message::Names(listed));
        for name in &changed {
            let notice = NameNotice::Changed(here.clone(), ByteBuf::from(name.clone()));
            sent = sent && self.send_directly(peer, pid, &Message::Names(notice));
        }
        let known = self.processes.get_mut(&pid).filter(|_| sent).map(|process| &mut process.names);
        if let Some(directory) = known.and_then(|known| known.directories.get_mut(path)) {
            directory.set_delegated(DelegatedDir { watched, names: count, changed });
        }
    }

    /// Takes the results of finished scans.
    pub(crate) fn collect_scans(&mut self) {
        while let Some(scanned) = self.names.watcher.as_ref().and_then(Watcher::scanned) {
            // Changes before the result was taken are recorded first, since they apply to it as
            // well.
            self.send_name_changes();
            self.names.pending_scans -= 1;
            let ScanReply { request: ScanRequest { pid, directory: path, generation, changes, .. }, listing } =
                scanned;
            let changes_during_scans = self.names.changes_since(changes);
            let Self { processes, names, .. } = self;
            let known = processes.get_mut(&pid).map(|process| &mut process.names);
            let Some(known) = known.filter(|known| known.generation == generation) else { continue };
            known.drop_stale();
            let Some(directory) = known.directories.get_mut(&path) else { continue };
            directory.is_being_scanned = false;
            match listing {
                Ok(listing) => {
                    names.add_entries(pid, &path, &listing.watched);
                    directory.listing = Some((listing, BTreeSet::new()));
                    changes_during_scans.iter().for_each(|event| directory.apply_to_listing(event));
                }
                Err(ScanError::Never) => directory.disable(),
                Err(ScanError::Retry) => {}
            }
        }
        self.prune_entries();
    }

    /// Reads the changes of watched directories, and sends invalidations to guests that cache them.
    pub(crate) fn send_name_changes(&mut self) {
        let Some(watcher) = &self.names.watcher else { return };
        let events = watcher.events();
        if events.is_empty() {
            return;
        }
        if events.iter().any(|event| event.events_lost) {
            self.invalidate_all_names();
        }
        let notices: Vec<Notice> = events.iter().flat_map(|event| self.notices_for(event)).collect();
        self.names.record_changes(events);
        for (pid, peer, notice) in notices {
            self.send_directly(peer, pid, &Message::Names(notice));
        }
    }

    fn notices_for(&mut self, event: &DirEvent) -> Vec<Notice> {
        let Self { processes, names, .. } = self;
        let Some(users) = names.entries.get_mut(&event.watch) else { return Vec::new() };
        let (mut notices, before) = (Vec::new(), users.len());
        users.retain(|(pid, path)| {
            let Some(process) = processes.get_mut(pid) else { return false };
            let (peer, is_away) = (process.peer, process.is_away());
            let directory = process.names.directories.get_mut(path);
            let Some(directory) = directory.filter(|directory| directory.uses_watch(event.watch)) else {
                return false;
            };
            notices
                .extend(directory.apply(path, event).filter(|_| is_away).map(|notice| (*pid, peer, notice)));
            true
        });
        names.entry_count -= before - users.len();
        notices
    }

    /// Removes watch entries of directories that are not needed any more.
    fn prune_entries(&mut self) {
        let Self { processes, names, .. } = self;
        if names.entry_count <= MAX_WATCH_ENTRIES {
            return;
        }
        names.entries.retain(|watch, users| {
            users.retain(|(pid, path)| {
                let known = processes.get(pid).and_then(|process| process.names.directories.get(path));
                known.is_some_and(|directory| directory.uses_watch(*watch))
            });
            !users.is_empty()
        });
        names.entry_count = names.entries.values().map(BTreeSet::len).sum();
    }

    /// The link to a peer is broken: its guests' caches are invalid.
    pub(crate) fn forget_names_of_peer(&mut self, peer: PeerId) {
        for process in self.processes.values_mut().filter(|process| process.peer == peer) {
            process.names.forget();
        }
    }
}
