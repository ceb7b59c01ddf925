//! Replies to the calls that programs make right after opening a file, from the data that came with
//! its delegation, and to its close (`cache/open_close.rs`).

use crate::error::GuestResult;
use crate::process::thread::Thread;
use crate::process::{GuestMemory, Process};
use tern_migrate::prefetch::SUPPORTED_STATX;
use tern_syscall::UserMemory;
use tern_tracee::listener::Notification;

/// The buffer to which a call writes a descriptor's attributes, and whether in statx format.
fn attributes_buffer(trap: &Notification, memory: &mut GuestMemory<'_>) -> Option<(u64, bool)> {
    let [_, second, third, fourth, fifth, _] = trap.args;
    let empty = libc::AT_EMPTY_PATH;
    let mut is_unnamed = |at: u64| {
        let mut name = [1];
        memory.read(at, &mut name).is_ok() && name == [0]
    };
    match i64::from(trap.nr) {
        libc::SYS_fstat => Some((second, false)),
        libc::SYS_newfstatat if fourth as i32 == empty && is_unnamed(second) => Some((third, false)),
        libc::SYS_statx
            if third as i32 == empty && fourth as u32 & !SUPPORTED_STATX == 0 && is_unnamed(second) =>
        {
            Some((fifth, true))
        }
        _ => None,
    }
}

/// Whether this advice has no effect, because files are read ahead anyway.
fn is_default_advice([_, _, length, advice, ..]: &[u64; 6]) -> bool {
    let usual = [libc::POSIX_FADV_NORMAL, libc::POSIX_FADV_SEQUENTIAL];
    length.cast_signed() >= 0 && usual.contains(&(*advice as i32))
}

impl Thread {
    /// Replies to a call on a delegated file from data that came with the delegation, or closes the
    /// file; false if it is another call, or home is to make it.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn reply_from_prefetch(
        &mut self,
        trap: &Notification,
        process: &mut Process,
    ) -> GuestResult<bool> {
        let fd = trap.args[0] as i32;
        let mut memory = GuestMemory(&process.memory);
        let ret = match i64::from(trap.nr) {
            libc::SYS_close if process.files.close(fd) => 0,
            // The call tests for a terminal, which a regular file is not.
            libc::SYS_ioctl
                if trap.args[1] as u32 == libc::TCGETS as u32 && process.files.is_home_local(fd) =>
            {
                -i64::from(libc::ENOTTY)
            }
            // Files are read ahead anyway.
            libc::SYS_fadvise64 if is_default_advice(&trap.args) && process.files.is_home_local(fd) => 0,
            _ => {
                let Some(attributes) = process.files.attributes(fd) else { return Ok(false) };
                let Some((at, wide)) = attributes_buffer(trap, &mut memory) else { return Ok(false) };
                let bytes = if wide { attributes.statx() } else { attributes.stat() };
                if memory.write(at, &bytes).is_err() {
                    return Ok(false);
                }
                0
            }
        };
        self.sync.restart_code = None;
        process.republish()?;
        self.reply(trap.id, ret)?;
        Ok(true)
    }
}
