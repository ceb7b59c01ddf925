//! Calls on files of the guest's own node, which are let through.

use crate::error::GuestResult;
use crate::files::cache::FileCache;
use crate::files::internal_call::CallPurpose;
use crate::files::local::LocalFile;
use crate::process::outbox::Outbox;
use crate::process::shared::Process;
use crate::process::space::MAPPED_FILE;
use crate::process::thread::Thread;
use rustix::fs::{Mode, OFlags, SeekFrom};
use std::io;
use std::os::fd::AsFd;
use tern_tracee::listener::Notification;

impl Thread {
    /// Lets a call on a local or shared file through; false if it is on another file, or home is to
    /// make it.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn pass_to_local(
        &mut self,
        trap: &Notification,
        process: &mut Process,
        home: &mut Outbox,
    ) -> GuestResult<bool> {
        let (fd, files) = (trap.args[0] as i32, &mut process.files);
        let Some(file) = files.get(fd) else { return Ok(false) };
        let Some(local_file) = file.local_file.as_ref().filter(|_| is_content_call(trap.nr)) else {
            return Ok(false);
        };
        if local_file.is_shared() && !file.is_validated() {
            // Home's last report of the file as unchanged is no longer valid.
            return self.queue_behind_internal_call(*trap, Some(CallPurpose::Revalidate(fd)), process, home);
        }
        if local_file.is_open() {
            // A new server has no state for the file, so other nodes would keep stale caches.
            if local_file.has_lost_server() {
                files.return_local(fd);
                return Ok(false);
            }
        } else {
            // A file under the descriptor number that mappings use is left to home.
            if !file.has_no_pending_writes() || self.internal_call.is_some() || fd == MAPPED_FILE {
                return Ok(false);
            }
            let Some(opened) = process.queued_traps.take_opened(fd) else {
                let Some(request) = local_file.open_request(file.delegation) else { return Ok(false) };
                process.queued_traps.await_opening(*trap, fd, request);
                return Ok(true);
            };
            let offset = file.delegation.offset;
            let opened = opened.and_then(|local_file| {
                if let LocalFile::Open(opened_fd, _) = &local_file {
                    rustix::fs::seek(opened_fd, SeekFrom::Start(offset))?;
                    self.listener.add_fd(trap.id, opened_fd.as_fd(), fd)?;
                }
                Ok(local_file)
            });
            match opened {
                Ok(local_file) => {
                    file.local_file = Some(local_file);
                    files.remove_stale_fd(fd);
                }
                Err(error) => {
                    tracing::info!(%error, fd, "a local file could not be opened; it is used through home");
                    file.local_file = None;
                    return Ok(false);
                }
            }
        }
        self.sync.restart_code = None;
        process.enter_native_call(trap)?;
        self.let_through(trap.id)?;
        Ok(true)
    }

    /// Closes descriptors in the guest whose files are no longer delegated. The thread waits in
    /// this trap.
    pub(crate) fn close_stale_fds(&self, trap: &Notification, files: &mut FileCache) {
        for fd in files.take_stale_fds() {
            let dev_null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
            // After a failure it stays open, but no call of the guest reaches it.
            let replaced =
                dev_null.map_err(io::Error::from).and_then(|n| self.listener.add_fd(trap.id, n.as_fd(), fd));
            if let Err(error) = replaced {
                tracing::warn!(%error, fd, "a descriptor could not be closed in the guest");
                files.add_stale_fd(fd);
            }
        }
    }
}

/// Whether a call on an open file concerns only its content and its offset.
fn is_content_call(nr: u32) -> bool {
    matches!(
        i64::from(nr),
        libc::SYS_read
            | libc::SYS_write
            | libc::SYS_pread64
            | libc::SYS_pwrite64
            | libc::SYS_readv
            | libc::SYS_writev
            | libc::SYS_preadv
            | libc::SYS_pwritev
            | libc::SYS_preadv2
            | libc::SYS_pwritev2
            | libc::SYS_lseek
            | libc::SYS_ftruncate
            | libc::SYS_fallocate
            | libc::SYS_fadvise64
    )
}
