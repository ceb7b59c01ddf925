//! Delegated files that are local to this node ([`crate::files::local`]): calls on them are let
//! through, on descriptors of the guest's own.

use super::{DelegatedFile, FileCache};
use crate::files::limits::CACHE_TERM;
use crate::files::local::{LocalFile, LocalNode};
use std::time::Instant;
use tern_migrate::message::FileNotice;

impl FileCache {
    /// Detaches local files whose delegations end. From then on their offset is
    /// `delegation.offset`, and no longer the one in this kernel.
    pub(super) fn detach_local(&mut self) {
        if self.in_native_call {
            return;
        }
        for (fd, file) in self.files.iter_mut().filter(|(_, file)| file.is_returning) {
            file.delegation.offset = file.offset();
            if file.local_file.take().is_some_and(|local_file| local_file.is_open()) {
                self.stale_fds.push(*fd);
            }
        }
    }

    /// The descriptors whose files are local and valid; those of shared file systems only if
    /// `with_shared`.
    pub(crate) fn local_fds(&self, with_shared: bool) -> impl Iterator<Item = i32> {
        let is_valid = move |file: &DelegatedFile| {
            let is_wanted = with_shared || !file.is_shared();
            file.is_local() && !file.is_returning && file.is_current() && is_wanted
        };
        self.files.iter().filter(move |(_, file)| is_valid(file)).map(|(fd, _)| *fd)
    }

    /// Until when shared files may be used without asking home again, if any may.
    pub(crate) fn valid_until(&self) -> Option<Instant> {
        let shared = self.files.values().filter(|file| file.is_local() && file.is_shared());
        shared.filter_map(|file| file.validated_at).map(|since| since + CACHE_TERM).min()
    }

    /// Whether home has reported that a file is unchanged, and nothing has invalidated that.
    pub(crate) fn is_validated(&self, fd: i32) -> bool {
        self.files.get(&fd).is_some_and(DelegatedFile::is_validated)
    }

    /// Handles a notice about a shared file. It is read here, where changes by others may be seen
    /// late; so after a change it is read at home.
    pub(super) fn receive_shared_notice(
        &mut self,
        fd: i32,
        notice: &FileNotice,
        sent_at: Option<Instant>,
        local_node: &LocalNode,
    ) {
        let has_used_locks = self.has_used_locks;
        let Some(file) = self.files.get_mut(&fd).filter(|file| !file.is_returning) else { return };
        match notice {
            FileNotice::Unchanged => file.validated_at = sent_at,
            FileNotice::Changed => {
                file.stop_sharing();
                self.detach_local();
            }
            FileNotice::Shared(location)
                if file.local_file.is_none() && !file.delegation.can_write && !has_used_locks =>
            {
                (file.local_file, file.validated_at) = (LocalFile::shared(location, local_node), sent_at);
            }
            _ => {}
        }
    }

    /// Makes this delegated file a local one that the guest has open.
    #[cfg(test)]
    pub(crate) fn open_here(&mut self, fd: i32, local_file: LocalFile) {
        self.files.get_mut(&fd).unwrap().local_file = Some(local_file);
    }

    /// Makes this file valid, as home's report would.
    #[cfg(test)]
    pub(crate) fn validate(&mut self, fd: i32) {
        self.files.get_mut(&fd).unwrap().validated_at = Some(Instant::now());
    }

    /// Records that a call is let through, or may be made without a trap.
    pub(crate) fn enter_native_call(&mut self) {
        self.in_native_call = true;
    }

    /// Records that no call that was let through is in progress: the program has trapped or is
    /// stopped.
    pub(crate) fn leave_native_call(&mut self) {
        self.in_native_call = false;
    }

    /// Whether a delegation can be returned only when the program has left a call that was let
    /// through.
    pub(crate) fn must_await_native_call(&self) -> bool {
        self.in_native_call && self.files.values().any(|file| file.is_returning && file.is_local())
    }

    /// Returns the delegation of a local file while its thread waits in a trap.
    pub(crate) fn return_local(&mut self, fd: i32) {
        if let Some(file) = self.files.get_mut(&fd) {
            file.is_returning = true;
        }
        self.detach_local();
    }

    /// Records that the guest still has this descriptor, which must be closed.
    pub(crate) fn add_stale_fd(&mut self, fd: i32) {
        self.stale_fds.push(fd);
    }

    /// Records that the guest has got this descriptor anew.
    pub(crate) fn remove_stale_fd(&mut self, fd: i32) {
        self.stale_fds.retain(|stale| *stale != fd);
    }

    /// The descriptors that the guest still has and that must be closed.
    pub(crate) fn take_stale_fds(&mut self) -> Vec<i32> {
        std::mem::take(&mut self.stale_fds)
    }
}

impl DelegatedFile {
    fn is_shared(&self) -> bool {
        self.local_file.as_ref().is_some_and(LocalFile::is_shared)
    }

    pub(crate) fn is_validated(&self) -> bool {
        self.validated_at.is_some_and(|since| since.elapsed() < CACHE_TERM)
    }

    /// Whether this kernel's view of the file is current.
    fn is_current(&self) -> bool {
        !self.is_shared() || self.is_validated()
    }

    /// Ends the local use of a shared file: it is read at home from now on.
    pub(super) fn stop_sharing(&mut self) {
        if self.is_shared() {
            self.is_returning |= self.is_local();
            // If it was only offered it stays delegated.
            self.local_file.take_if(|local_file| !local_file.is_open());
        }
    }
}
